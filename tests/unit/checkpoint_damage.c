/* Damaged checkpoints. A small one is written, and each of its files is then cut at every structure and has every byte
 * changed, one at a time: each such copy is refused with a message, which names the damaged file where it holds data,
 * or it reads as the very same checkpoint. */
#include "checkpoint/writer.h"
#include "format_scratch.h"
#include <setjmp.h>

#include <cmocka.h>

static const char *const files[] = {".metadata", "common.pt", "metadata.json", "__0_0.distcp", "__1_0.distcp"};
enum { FILES = sizeof files / sizeof *files, WIDTH = 3, HEIGHT = 4 };

typedef struct outcome {
    int64_t copies, refused, harmless;
} outcome;

static void must(loom_status status) {
    if (status)
        fail_msg("%s", loom_error_message());
}

static char path[128];
static scratch folder;

/* Two ranks, each with half of the rows of "w"; rank 0 has "step" and an object too. */
static void write_checkpoint(void) {
    static const int64_t shape[] = {HEIGHT, WIDTH}, sizes[] = {HEIGHT / 2, WIDTH};
    static const float half[HEIGHT / 2 * WIDTH] = {1, 2, 3, 4, 5, 6};
    static const int64_t steps = 7;
    loom__checkpoint_description descriptions[2];
    loom_value_pool *pool = NULL;
    loom_value *common = NULL, *number = NULL, *list = NULL;
    must(loom_value_pool_create(&pool));
    must(loom_value_dict(pool, &common));
    must(loom_value_int(pool, 3, &number));
    must(loom_value_set(pool, common, "iteration", number));
    must(loom_value_list(pool, &list));
    must(loom_value_append(pool, list, number));
    must(loom__checkpoint_begin(path));
    for (int rank = 0; rank < 2; rank++) {
        const int64_t offsets[] = {rank * HEIGHT / 2, 0};
        loom__checkpoint_writer *writer = NULL;
        must(loom__checkpoint_file_create(path, rank, 0, &writer));
        if (rank == 0)
            must(loom__checkpoint_file_object(writer, "state/shard_0_1", list));
        must(loom__checkpoint_file_tensor(writer, "w", LOOM_F32, 2, shape, offsets, sizes, half));
        if (rank == 0)
            must(loom__checkpoint_file_tensor(writer, "step", LOOM_I64, 0, NULL, NULL, NULL, &steps));
        must(loom__checkpoint_file_finish(writer, &descriptions[rank]));
        loom__checkpoint_writer_destroy(writer);
    }
    must(loom__checkpoint_commit(path, descriptions, 2, common));
    free(descriptions[0].data);
    free(descriptions[1].data);
    loom_value_pool_destroy(pool);
}

static int setup(void **state) {
    (void)state;
    folder = scratch_make();
    snprintf(path, sizeof path, "%s/iter_0000003", folder.path);
    write_checkpoint();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    scratch_remove(&folder);
    return 0;
}

static unsigned char *slurp(const char *name, size_t *bytes) {
    char full[512];
    unsigned char *data = malloc(1 << 16);
    snprintf(full, sizeof full, "%s/%s", path, name);
    FILE *file = fopen(full, "rb");
    assert_non_null(file);
    *bytes = fread(data, 1, 1 << 16, file);
    fclose(file);
    return data;
}

static void put(const char *name, const unsigned char *data, size_t bytes) {
    char full[512];
    snprintf(full, sizeof full, "%s/%s", path, name);
    FILE *file = fopen(full, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* The files that were told of, with what opening said, as one text. */
typedef struct told {
    char text[4096];
} told;

static void hear(void *context, const char *file, const char *message) {
    told *to = context;
    size_t length = strlen(to->text);
    snprintf(to->text + length, sizeof to->text - length, "%s: %s\n", file, message);
}

/* All that the checkpoint was made of. */
static bool reads_the_same(void) {
    loom_checkpoint *checkpoint = NULL;
    const loom_checkpoint_tensor *tensor = NULL;
    const loom_checkpoint_object *object = NULL;
    const loom_value *value = NULL, *iteration;
    loom_value_pool *pool = NULL;
    float w[HEIGHT * WIDTH] = {0};
    int64_t step = 0;
    bool same = loom_checkpoint_open(path, &checkpoint) == LOOM_OK && loom_value_pool_create(&pool) == LOOM_OK;
    same = same && loom_checkpoint_find_tensor(checkpoint, "w", &tensor) == LOOM_OK && tensor->dims == 2 &&
           tensor->shape[0] == HEIGHT &&
           loom_checkpoint_read(checkpoint, tensor, (int64_t[]){0, 0}, tensor->shape, LOOM_F32, w) == LOOM_OK;
    for (int i = 0; i < HEIGHT * WIDTH; i++)
        same = same && w[i] == (float)(i % (HEIGHT / 2 * WIDTH) + 1);
    same = same && loom_checkpoint_find_tensor(checkpoint, "step", &tensor) == LOOM_OK && tensor->dims == 0 &&
           loom_checkpoint_read(checkpoint, tensor, NULL, NULL, LOOM_I64, &step) == LOOM_OK && step == 7;
    same = same && loom_checkpoint_find_object(checkpoint, "state/shard_0_1", &object) == LOOM_OK &&
           loom_checkpoint_read_object(checkpoint, object, pool, &value) == LOOM_OK && value->kind == LOOM_VALUE_LIST &&
           value->count == 1 && value->items[0]->integer == 3;
    iteration = same ? loom_value_get(loom_checkpoint_get_info(checkpoint)->common, "iteration") : NULL;
    same = iteration && iteration->kind == LOOM_VALUE_INT && iteration->integer == 3;
    loom_value_pool_destroy(pool);
    loom_checkpoint_close(checkpoint);
    return same;
}

/* `what` was done to a file. */
static void check_copy(const char *name, const char *what, size_t at, outcome *sum) {
    told heard = {.text = ""};
    loom_checkpoint_verified found = {0};
    loom_error_clear();
    loom_status status = loom_checkpoint_verify(path, hear, &heard, &found);
    sum->copies++;
    if (status == LOOM_OK) {
        if (!reads_the_same())
            fail_msg("%s, %s %zu: nobody saw it, and it reads otherwise", name, what, at);
        sum->harmless++;
        return;
    }
    sum->refused++;
    if (!*heard.text)
        hear(&heard, "", loom_error_message());
    if (strlen(heard.text) < 10)
        fail_msg("%s, %s %zu: status %d says '%s'", name, what, at, status, heard.text);
    if (strncmp(name, "__", 2) == 0 && !strstr(heard.text, name))
        fail_msg("%s, %s %zu: the message does not name it: %s", name, what, at, heard.text);
    if (strncmp(name, "__", 2) == 0)
        assert_int_equal(found.damaged_files, 1);
}

static void the_undamaged_one_is_sound(void **state) {
    (void)state;
    loom_checkpoint_verified found = {0};
    must(loom_checkpoint_verify(path, NULL, NULL, &found));
    assert_true(reads_the_same());
    assert_int_equal(found.tensors, 2);
    assert_int_equal(found.chunks, 3);
    assert_int_equal(found.objects, 1);
    assert_int_equal(found.files, 2);
}

/* Behind every signature of a zip record, and everywhere in a pickle or a JSON text. */
static void a_file_cut_at_any_structure_is_refused(void **state) {
    (void)state;
    outcome sum = {0};
    for (int f = 0; f < FILES; f++) {
        size_t bytes;
        unsigned char *data = slurp(files[f], &bytes);
        bool zips = strncmp(files[f], "__", 2) == 0 || strcmp(files[f], "common.pt") == 0;
        for (size_t at = 0; at < bytes; at++) {
            if (zips && memcmp(data + at, "PK", 2) != 0 && (at < 2 || memcmp(data + at - 2, "PK", 2) != 0) &&
                at % 37 != 0)
                continue;
            put(files[f], data, at);
            check_copy(files[f], "cut at", at, &sum);
        }
        put(files[f], data, bytes);
        free(data);
    }
    printf("%lld copies: %lld refused, %lld the same\n", (long long)sum.copies, (long long)sum.refused,
        (long long)sum.harmless);
    assert_int_equal(sum.harmless, 0);
    assert_true(sum.refused >= 200);
}

static void a_changed_byte_is_refused_or_harmless(void **state) {
    (void)state;
    outcome sum = {0};
    for (int f = 0; f < FILES; f++) {
        size_t bytes;
        unsigned char *data = slurp(files[f], &bytes);
        for (size_t at = 0; at < bytes; at++) {
            unsigned char change = at % 2 ? 0xff : 0x01;
            data[at] ^= change;
            put(files[f], data, bytes);
            check_copy(files[f], "changed at", at, &sum);
            data[at] ^= change;
        }
        put(files[f], data, bytes);
        free(data);
    }
    printf("%lld copies: %lld refused, %lld the same\n", (long long)sum.copies, (long long)sum.refused,
        (long long)sum.harmless);
    assert_true(sum.refused >= 200);
}

static void every_damaged_file_is_named(void **state) {
    (void)state;
    told heard = {.text = ""};
    loom_checkpoint_verified found = {0};
    loom_checkpoint *checkpoint = NULL;
    size_t sizes[2];
    unsigned char *data[2] = {slurp("__0_0.distcp", &sizes[0]), slurp("__1_0.distcp", &sizes[1])};
    char full[512];
    put("__0_0.distcp", data[0], sizes[0] - 1);
    snprintf(full, sizeof full, "%s/__1_0.distcp", path);
    assert_int_equal(unlink(full), 0);
    assert_int_equal(loom_checkpoint_verify(path, hear, &heard, &found), LOOM_ERR_FORMAT);
    assert_int_equal(found.damaged_files, 2);
    assert_non_null(strstr(heard.text, "__0_0.distcp: "));
    assert_non_null(strstr(heard.text, "__1_0.distcp: "));
    assert_int_equal(loom_checkpoint_open(path, &checkpoint), LOOM_ERR_NOT_FOUND);
    for (int i = 0; i < 2; i++) {
        put(i ? "__1_0.distcp" : "__0_0.distcp", data[i], sizes[i]);
        free(data[i]);
    }
    assert_true(reads_the_same());
}

static void what_was_not_finished_is_no_checkpoint(void **state) {
    (void)state;
    loom_checkpoint *checkpoint = NULL;
    size_t bytes;
    char full[512];
    unsigned char *data = slurp("metadata.json", &bytes);
    snprintf(full, sizeof full, "%s/metadata.json", path);
    assert_int_equal(unlink(full), 0);
    assert_int_equal(loom_checkpoint_open(path, &checkpoint), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "not complete"));
    put("metadata.json", data, bytes);
    free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_undamaged_one_is_sound),
        cmocka_unit_test(a_file_cut_at_any_structure_is_refused),
        cmocka_unit_test(a_changed_byte_is_refused_or_harmless),
        cmocka_unit_test(every_damaged_file_is_named),
        cmocka_unit_test(what_was_not_finished_is_no_checkpoint),
    };
    return cmocka_run_group_tests_name("damaged checkpoints", tests, setup, teardown);
}
