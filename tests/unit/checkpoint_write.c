/* Writing checkpoints: what is committed is whole, and what fails leaves what was there. */
#include "checkpoint/writer.h"
#include "format_scratch.h"
#include <setjmp.h>

#include <cmocka.h>

static void must(loom_status status) {
    if (status)
        fail_msg("%s", loom_error_message());
}

typedef struct save {
    loom__checkpoint_description descriptions[2];
    loom_value_pool *pool;
    loom_value *common;
} save;

/* Rank r writes rows [rows[2r], +rows[2r+1]) of a tensor of 4 x 3, all elements `value`. */
static save write_rows(const char *path, const int64_t rows[4], float value) {
    static const int64_t shape[] = {4, 3};
    float data[12];
    save made = {0};
    for (int i = 0; i < 12; i++)
        data[i] = value;
    must(loom_value_pool_create(&made.pool));
    must(loom_value_dict(made.pool, &made.common));
    must(loom__checkpoint_begin(path));
    for (int rank = 0; rank < 2; rank++) {
        loom__checkpoint_writer *writer = NULL;
        must(loom__checkpoint_file_create(path, rank, 0, &writer));
        must(loom__checkpoint_file_tensor(
            writer, "w", LOOM_F32, 2, shape, (int64_t[]){rows[2 * rank], 0}, (int64_t[]){rows[2 * rank + 1], 3}, data));
        must(loom__checkpoint_file_finish(writer, &made.descriptions[rank]));
        loom__checkpoint_writer_destroy(writer);
    }
    return made;
}

static void save_free(save *of) {
    free(of->descriptions[0].data);
    free(of->descriptions[1].data);
    loom_value_pool_destroy(of->pool);
}

static loom_status commit_rows(const char *path, const int64_t rows[4], float value) {
    save made = write_rows(path, rows, value);
    loom_status status = loom__checkpoint_commit(path, made.descriptions, 2, made.common);
    save_free(&made);
    return status;
}

static float first_element(const char *path) {
    loom_checkpoint *checkpoint = NULL;
    const loom_checkpoint_tensor *tensor = NULL;
    float value = -1;
    must(loom_checkpoint_open(path, &checkpoint));
    must(loom_checkpoint_find_tensor(checkpoint, "w", &tensor));
    must(loom_checkpoint_read(checkpoint, tensor, (int64_t[]){0, 0}, (int64_t[]){1, 1}, LOOM_F32, &value));
    loom_checkpoint_close(checkpoint);
    return value;
}

static const int64_t halves[] = {0, 2, 2, 2};

static void a_gap_or_an_overlap_is_not_committed(void **state) {
    static const int64_t gap[] = {0, 2, 3, 1}, overlap[] = {0, 2, 1, 2};
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "iter_0000001");
    must(commit_rows(path, halves, 1));
    assert_int_equal(commit_rows(path, gap, 2), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "cover 9 elements, expected all 12"));
    assert_int_equal(commit_rows(path, overlap, 2), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "overlap"));
    assert_true(first_element(path) == 1);
    must(commit_rows(path, halves, 3));
    assert_true(first_element(path) == 3);
    assert_int_equal(access(scratch_file(&folder, "iter_0000001.tmp"), F_OK), -1);
    scratch_remove(&folder);
}

static void ranks_must_agree_on_a_tensor(void **state) {
    static const int64_t shapes[2][2] = {{4, 3}, {5, 3}};
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "c");
    loom__checkpoint_description descriptions[2];
    void *pickle = NULL;
    size_t bytes;
    float data[6] = {0};
    must(loom__checkpoint_begin(path));
    for (int rank = 0; rank < 2; rank++) {
        loom__checkpoint_writer *writer = NULL;
        must(loom__checkpoint_file_create(path, rank, 0, &writer));
        must(loom__checkpoint_file_tensor(
            writer, "w", LOOM_F32, 2, shapes[rank], (int64_t[]){2 * rank, 0}, (int64_t[]){2, 3}, data));
        must(loom__checkpoint_file_finish(writer, &descriptions[rank]));
        loom__checkpoint_writer_destroy(writer);
    }
    assert_int_equal(loom__checkpoint_make_metadata(path, descriptions, 2, &pickle, &bytes), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "__0_0.distcp and __1_0.distcp"));
    free(descriptions[0].data);
    free(descriptions[1].data);
    scratch_remove(&folder);
}

static void what_a_stopped_save_left_is_cleared(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "iter_0000001");
    loom_checkpoint *checkpoint = NULL;
    save stopped = write_rows(path, halves, 1);
    save_free(&stopped);
    assert_int_equal(loom_checkpoint_open(path, &checkpoint), LOOM_ERR_NOT_FOUND);
    must(commit_rows(path, halves, 2));
    assert_true(first_element(path) == 2);
    scratch_remove(&folder);
}

static void files_of_others_are_kept(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "iter_0000001");
    must(commit_rows(path, halves, 1));
    const char *note = scratch_write(&folder, "iter_0000001/note", "x", 1);
    assert_int_equal(loom__checkpoint_remove(path), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "note"));
    assert_int_equal(commit_rows(path, halves, 2), LOOM_ERR_STATE);
    assert_true(first_element(path) == 1);
    assert_int_equal(unlink(note), 0);
    must(loom__checkpoint_remove(scratch_file(&folder, "iter_0000001.tmp")));
    must(loom__checkpoint_remove(path));
    must(loom__checkpoint_remove(path));
    assert_int_equal(access(path, F_OK), -1);
    scratch_remove(&folder);
}

static void the_pointer_leads_to_the_last_one(void **state) {
    (void)state;
    scratch folder = scratch_make();
    must(commit_rows(scratch_file(&folder, "iter_0000001"), halves, 1));
    must(commit_rows(scratch_file(&folder, "iter_0000020"), halves, 20));
    must(loom__checkpoint_set_latest(folder.path, 1));
    assert_true(first_element(folder.path) == 1);
    must(loom__checkpoint_set_latest(folder.path, 20));
    assert_true(first_element(folder.path) == 20);
    scratch_write(&folder, "latest_checkpointed_iteration.txt", "../x", 4);
    loom_checkpoint *checkpoint = NULL;
    assert_int_equal(loom_checkpoint_open(folder.path, &checkpoint), LOOM_ERR_FORMAT);
    scratch_remove(&folder);
}

static void a_full_disk_leaves_the_last_one(void **state) {
    static const int64_t shape[] = {1 << 16};
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "iter_0000001");
    loom__checkpoint_writer *writer = NULL;
    loom__checkpoint_description description;
    float *data = calloc(1 << 16, sizeof *data);
    assert_non_null(data);
    must(commit_rows(path, halves, 1));
    must(loom__checkpoint_begin(path));
    must(loom__checkpoint_file_create(path, 0, 0, &writer));
    scratch_limit(100000);
    loom_status status = loom__checkpoint_file_tensor(writer, "w", LOOM_F32, 1, shape, (int64_t[]){0}, shape, data);
    if (status == LOOM_OK)
        status = loom__checkpoint_file_finish(writer, &description);
    scratch_limit(RLIM_INFINITY);
    assert_int_equal(status, LOOM_ERR_IO);
    loom__checkpoint_writer_destroy(writer);
    assert_true(first_element(path) == 1);
    free(data);
    scratch_remove(&folder);
}

static void objects_come_before_tensors(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "c");
    loom__checkpoint_writer *writer = NULL;
    const loom_value none = {.kind = LOOM_VALUE_NONE};
    const int64_t step = 1;
    must(loom__checkpoint_begin(path));
    must(loom__checkpoint_file_create(path, 0, 0, &writer));
    must(loom__checkpoint_file_tensor(writer, "step", LOOM_I64, 0, NULL, NULL, NULL, &step));
    assert_int_equal(loom__checkpoint_file_object(writer, "o", &none), LOOM_ERR_STATE);
    assert_int_equal(
        loom__checkpoint_file_tensor(writer, "w", LOOM_F32, 1, (int64_t[]){4}, (int64_t[]){3}, (int64_t[]){2}, &step),
        LOOM_ERR_ARGUMENT);
    loom__checkpoint_writer_destroy(writer);
    assert_int_equal(loom__checkpoint_begin("x/"), LOOM_ERR_ARGUMENT);
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gap_or_an_overlap_is_not_committed),
        cmocka_unit_test(ranks_must_agree_on_a_tensor),
        cmocka_unit_test(what_a_stopped_save_left_is_cleared),
        cmocka_unit_test(files_of_others_are_kept),
        cmocka_unit_test(the_pointer_leads_to_the_last_one),
        cmocka_unit_test(a_full_disk_leaves_the_last_one),
        cmocka_unit_test(objects_come_before_tensors),
    };
    return cmocka_run_group_tests_name("writing checkpoints", tests, NULL, NULL);
}
