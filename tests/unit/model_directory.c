/* The directory of an export: what may be replaced, what never is, and that it appears whole. */
#include "model/huggingface_directory.h"
#include <ftw.h>
#include <megaloom/safetensors.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define TEST(name) static void name(void **state)

typedef struct scratch {
    char folder[128], path[160];
} scratch;

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)found, (void)kind, (void)place;
    return remove(path);
}

static int make_scratch(void **state) {
    scratch *made = calloc(1, sizeof *made);
    snprintf(made->folder, sizeof made->folder, "%s/directory-XXXXXX", MEGALOOM_BUILD);
    if (!mkdtemp(made->folder))
        return -1;
    snprintf(made->path, sizeof made->path, "%s/model", made->folder);
    *state = made;
    return 0;
}

static int remove_scratch(void **state) {
    scratch *made = *state;
    int failed = nftw(made->folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(made);
    return failed;
}

static const char *in(const char *directory, const char *name, char path[256]) {
    assert_true(snprintf(path, 256, "%s/%s", directory, name) < 256);
    return path;
}

static void put(const char *directory, const char *name) {
    char path[256];
    FILE *file = fopen(in(directory, name, path), "w");
    assert_non_null(file);
    fclose(file);
}

static bool has(const char *directory, const char *name) {
    char path[256];
    return access(in(directory, name, path), F_OK) == 0;
}

static void put_weights(const char *directory, const char *producer) {
    char path[256];
    loom_safetensors_writer *writer;
    assert_int_equal(loom_safetensors_writer_create(in(directory, "model.safetensors", path), &writer), LOOM_OK);
    if (producer)
        assert_int_equal(loom_safetensors_writer_metadata(writer, "producer", producer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
}

/* As a process that ends does, the lock is given back at once. */
static loom_status begin(const char *path, char **temporary) {
    int lock = -1;
    loom_status status = loom__hf_directory_begin(path, temporary, &lock);
    if (status == LOOM_OK)
        assert_int_equal(close(lock), 0);
    return status;
}

/* An export with one more file of that name. */
static void export_with(const char *path, const char *name) {
    char *temporary = NULL;
    assert_int_equal(begin(path, &temporary), LOOM_OK);
    assert_int_equal(loom__hf_directory_write(temporary, "config.json", "{}\n"), LOOM_OK);
    assert_int_equal(loom__hf_directory_write(temporary, name, "{}\n"), LOOM_OK);
    put_weights(temporary, LOOM__HF_PRODUCER);
    assert_int_equal(loom__hf_directory_commit(path), LOOM_OK);
    free(temporary);
}

static void assert_refused(const char *path, const char *because) {
    char *temporary = NULL;
    assert_int_equal(loom__hf_directory_check(path), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), because));
    assert_int_equal(begin(path, &temporary), LOOM_ERR_ARGUMENT);
}

TEST(it_appears_at_the_end_and_leaves_nothing_beside) {
    const scratch *s = *state;
    char *temporary = NULL;
    assert_int_equal(begin(s->path, &temporary), LOOM_OK);
    assert_int_equal(loom__hf_directory_write(temporary, "config.json", "{}\n"), LOOM_OK);
    assert_false(has(s->folder, "model"));
    assert_int_equal(loom__hf_directory_commit(s->path), LOOM_OK);
    free(temporary);
    assert_true(has(s->path, "config.json"));
    assert_false(has(s->folder, "model.tmp") || has(s->path, ".megaloom-unfinished"));
}

TEST(one_of_ours_is_replaced_whole) {
    const scratch *s = *state;
    char path[256];
    export_with(s->path, "tokenizer.json");
    export_with(in(s->folder, "model//", path), "generation_config.json");
    assert_true(has(s->path, "generation_config.json"));
    assert_false(has(s->path, "tokenizer.json"));
    assert_false(has(s->folder, "model.old"));
}

TEST(an_empty_directory_is_taken) {
    const scratch *s = *state;
    assert_int_equal(mkdir(s->path, 0777), 0);
    export_with(s->path, "tokenizer.json");
    assert_true(has(s->path, "tokenizer.json"));
}

TEST(a_file_of_somebody_else_is_left_alone) {
    const scratch *s = *state;
    export_with(s->path, "tokenizer.json");
    put(s->path, "notes.txt");
    assert_refused(s->path, "notes.txt");
    assert_true(has(s->path, "notes.txt") && has(s->path, "config.json"));
}

TEST(a_model_of_somebody_else_is_left_alone) {
    const scratch *s = *state;
    assert_int_equal(mkdir(s->path, 0777), 0);
    put(s->path, "config.json");
    assert_refused(s->path, "did not write");
    put_weights(s->path, NULL);
    assert_refused(s->path, "did not write");
    put_weights(s->path, "somebody");
    assert_refused(s->path, "did not write");
    assert_true(has(s->path, "model.safetensors"));
}

TEST(a_file_or_a_link_is_no_directory) {
    const scratch *s = *state;
    char target[256];
    put(s->folder, "model");
    assert_refused(s->path, "no directory");
    assert_int_equal(unlink(s->path), 0);
    export_with(in(s->folder, "other", target), "tokenizer.json");
    assert_int_equal(symlink(target, s->path), 0);
    assert_refused(s->path, "no directory");
}

TEST(what_a_dead_run_left_is_cleared_unless_it_holds_more) {
    const scratch *s = *state;
    char *left = NULL;
    assert_int_equal(begin(s->path, &left), LOOM_OK);
    put(left, "model-00001-of-00003.safetensors.tmp");
    put(left, "config.json");
    export_with(s->path, "tokenizer.json");
    assert_false(has(s->path, "model-00001-of-00003.safetensors.tmp"));
    free(left);
    assert_int_equal(begin(s->path, &left), LOOM_OK);
    put(left, "notes.txt");
    assert_refused(s->path, "notes.txt");
    assert_true(has(left, "notes.txt"));
    free(left);
}

TEST(a_temporary_directory_that_no_export_left_is_refused) {
    const scratch *s = *state;
    char beside[256], precious[256];
    /* A copy of an export: all is ours but the mark. */
    export_with(in(s->folder, "model.tmp", beside), "tokenizer.json");
    assert_refused(s->path, "model.tmp: is there and is no unfinished export");
    assert_true(has(beside, "config.json") && has(beside, "model.safetensors"));
    assert_int_equal(rename(beside, in(s->folder, "precious", precious)), 0);
    assert_int_equal(symlink(precious, beside), 0);
    assert_refused(s->path, "model.tmp: is there and is no directory");
    assert_true(has(precious, "config.json") && has(precious, "model.safetensors"));
}

TEST(an_empty_temporary_directory_is_taken) {
    const scratch *s = *state;
    char beside[256];
    assert_int_equal(mkdir(in(s->folder, "model.tmp", beside), 0777), 0);
    export_with(s->path, "tokenizer.json");
    assert_false(has(s->folder, "model.tmp"));
}

TEST(an_export_that_is_at_work_is_not_disturbed) {
    const scratch *s = *state;
    char *temporary = NULL;
    int lock = -1;
    assert_int_equal(loom__hf_directory_begin(s->path, &temporary, &lock), LOOM_OK);
    put(temporary, "config.json");
    assert_refused(s->path, "model.tmp: another export is writing there");
    assert_true(has(temporary, "config.json"));
    assert_int_equal(loom__hf_directory_commit(s->path), LOOM_OK);
    assert_int_equal(close(lock), 0);
    assert_true(has(s->path, "config.json"));
    free(temporary);
}

TEST(what_stands_where_the_old_model_would_go_is_kept) {
    const scratch *s = *state;
    char beside[256];
    export_with(in(s->folder, "model.old", beside), "tokenizer.json");
    export_with(s->path, "tokenizer.json"); /* nothing is replaced: it is not in the way */
    assert_true(has(beside, "config.json"));
    assert_refused(s->path, "model.old: is there");
    assert_true(has(beside, "config.json") && has(s->path, "config.json"));
}

TEST(a_directory_or_a_link_under_the_name_of_a_file_is_somebody_elses) {
    const scratch *s = *state;
    char inner[256];
    export_with(s->path, "tokenizer.json");
    assert_int_equal(mkdir(in(s->path, "vocab.json", inner), 0777), 0);
    assert_refused(s->path, "vocab.json");
    assert_int_equal(rmdir(inner), 0);
    assert_int_equal(symlink("config.json", inner), 0);
    assert_refused(s->path, "vocab.json");
}

TEST(a_path_without_a_name_is_refused) {
    (void)state;
    assert_refused(
        ".", "has no name of its own: expected the name of the Hugging Face directory to make, such as ./model");
    assert_refused("somewhere/..//", "has no name of its own");
    assert_refused("/", "such as /model");
    assert_refused("", "is empty");
}

TEST(a_file_that_comes_meanwhile_is_kept_and_so_is_the_finished_model) {
    const scratch *s = *state;
    char *temporary = NULL;
    export_with(s->path, "tokenizer.json");
    assert_int_equal(begin(s->path, &temporary), LOOM_OK);
    assert_int_equal(loom__hf_directory_write(temporary, "vocab.json", "{}\n"), LOOM_OK);
    put(s->path, "notes.txt");
    assert_int_equal(loom__hf_directory_commit(s->path), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "the model is whole and stays at "));
    assert_non_null(strstr(loom_error_message(), "model.tmp: "));
    loom__hf_directory_discard(temporary);
    assert_true(has(temporary, "vocab.json"));
    free(temporary);
    assert_true(has(s->path, "notes.txt") && has(s->path, "tokenizer.json"));
    assert_int_equal(loom__hf_directory_check(s->path), LOOM_ERR_ARGUMENT);
}

TEST(what_was_begun_and_is_not_finished_is_discarded) {
    const scratch *s = *state;
    char *temporary = NULL;
    assert_int_equal(begin(s->path, &temporary), LOOM_OK);
    put(temporary, "config.json");
    loom__hf_directory_discard(temporary);
    free(temporary);
    assert_false(has(s->folder, "model.tmp"));
}

TEST(companions_go_along_and_weights_do_not) {
    const scratch *s = *state;
    char to[256];
    export_with(s->path, "tokenizer.json");
    assert_int_equal(mkdir(in(s->folder, "copy", to), 0777), 0);
    assert_int_equal(loom__hf_directory_copy_companions(s->path, to), LOOM_OK);
    assert_true(has(to, "tokenizer.json"));
    assert_false(has(to, "model.safetensors") || has(to, "config.json"));
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, make_scratch, remove_scratch)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(it_appears_at_the_end_and_leaves_nothing_beside),
        CASE(one_of_ours_is_replaced_whole),
        CASE(an_empty_directory_is_taken),
        CASE(a_file_of_somebody_else_is_left_alone),
        CASE(a_model_of_somebody_else_is_left_alone),
        CASE(a_file_or_a_link_is_no_directory),
        CASE(what_a_dead_run_left_is_cleared_unless_it_holds_more),
        CASE(a_temporary_directory_that_no_export_left_is_refused),
        CASE(an_empty_temporary_directory_is_taken),
        CASE(an_export_that_is_at_work_is_not_disturbed),
        CASE(what_stands_where_the_old_model_would_go_is_kept),
        CASE(a_directory_or_a_link_under_the_name_of_a_file_is_somebody_elses),
        CASE(a_path_without_a_name_is_refused),
        CASE(a_file_that_comes_meanwhile_is_kept_and_so_is_the_finished_model),
        CASE(what_was_begun_and_is_not_finished_is_discarded),
        CASE(companions_go_along_and_weights_do_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
