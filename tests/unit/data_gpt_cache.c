/* Indices kept on disk: the same as built in memory, whatever happens to the files and whoever else builds them. */
#include "data/gpt.h"
#include "unit/format_scratch.h"

#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { DOCUMENTS = 200, RANKS = 6 };

static void fill_lengths(int32_t *lengths) {
    for (int i = 0; i < DOCUMENTS; i++)
        lengths[i] = 1 + i * 7919 % 61;
}

static loom__gpt_key key_of(const int32_t *lengths, int64_t samples) {
    return (loom__gpt_key){.end = DOCUMENTS,
        .lengths_hash = loom__gpt_hash(lengths, DOCUMENTS * sizeof *lengths),
        .sequence_length = 16,
        .seed = 5,
        .samples = samples,
        .extra = 1};
}

static bool same(const loom__gpt_indices *a, const loom__gpt_indices *b) {
    size_t samples = (size_t)a->samples;
    return a->epochs == b->epochs && a->documents == b->documents && a->samples == b->samples &&
           memcmp(a->document_index, b->document_index, (size_t)a->documents * sizeof *a->document_index) == 0 &&
           memcmp(a->sample_index, b->sample_index, (samples + 1) * sizeof *a->sample_index) == 0 &&
           memcmp(a->shuffle_index, b->shuffle_index, samples * sizeof *a->shuffle_index) == 0;
}

/* Files whose names begin with gpt-; the name of one of them. */
static int count_kept(const scratch *folder, char *name) {
    DIR *directory = opendir(folder->path);
    int found = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (strncmp(entry->d_name, "gpt-", 4) == 0) {
            snprintf(name, 256, "%s", entry->d_name);
            found++;
        }
    closedir(directory);
    return found;
}

static void check_cached(const scratch *folder, int64_t samples, const loom__gpt_indices *wanted) {
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    const loom__gpt_key key = key_of(lengths, samples);
    loom__gpt_indices got;
    assert_int_equal(loom__gpt_indices_cached(folder->path, &key, lengths, 0, &got), LOOM_OK);
    assert_non_null(got.file.data);
    assert_true(same(&got, wanted));
    loom__gpt_indices_free(&got);
}

static void build(int64_t samples, loom__gpt_indices *indices) {
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    const loom__gpt_key key = key_of(lengths, samples);
    assert_int_equal(loom__gpt_indices_build(&key, lengths, 0, indices), LOOM_OK);
}

static void kept_indices_equal_built_ones_and_are_found_again(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char name[256];
    loom__gpt_indices one, three;
    build(-1, &one);
    build(900, &three);
    assert_int_equal(three.epochs, 3);
    check_cached(&folder, -1, &one);
    check_cached(&folder, -1, &one);
    assert_int_equal(count_kept(&folder, name), 1);
    check_cached(&folder, 900, &three);
    assert_int_equal(count_kept(&folder, name), 2);
    loom__gpt_indices_free(&one);
    loom__gpt_indices_free(&three);
    scratch_remove(&folder);
}

static void a_corpus_that_has_changed_gets_other_indices(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char name[256];
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    loom__gpt_key key = key_of(lengths, -1);
    loom__gpt_indices before, after;
    assert_int_equal(loom__gpt_indices_cached(folder.path, &key, lengths, 0, &before), LOOM_OK);
    lengths[7]++;
    key = key_of(lengths, -1);
    assert_int_equal(loom__gpt_indices_cached(folder.path, &key, lengths, 0, &after), LOOM_OK);
    assert_false(same(&before, &after));
    assert_int_equal(count_kept(&folder, name), 2);
    loom__gpt_indices_free(&before);
    loom__gpt_indices_free(&after);
    scratch_remove(&folder);
}

/* Each byte in turn is damaged: the header's and the indices'. */
static void damaged_files_are_built_again(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char name[256];
    loom__gpt_indices wanted;
    build(-1, &wanted);
    check_cached(&folder, -1, &wanted);
    assert_int_equal(count_kept(&folder, name), 1);
    long bytes = scratch_size(&folder, name);
    for (long at = 0; at < bytes; at += at < 128 ? 1 : 97) {
        FILE *file = fopen(scratch_file(&folder, name), "r+b");
        assert_non_null(file);
        assert_int_equal(fseek(file, at, SEEK_SET), 0);
        int byte = fgetc(file);
        assert_int_equal(fseek(file, at, SEEK_SET), 0);
        fputc(byte ^ 1, file);
        assert_int_equal(fclose(file), 0);
        check_cached(&folder, -1, &wanted);
    }
    for (long kept = 0; kept < bytes; kept += 331) {
        assert_int_equal(truncate(scratch_file(&folder, name), kept), 0);
        check_cached(&folder, -1, &wanted);
        assert_int_equal(scratch_size(&folder, name), bytes);
    }
    assert_int_equal(count_kept(&folder, name), 1); /* and nothing is left behind */
    loom__gpt_indices_free(&wanted);
    scratch_remove(&folder);
}

typedef struct rank {
    pthread_t thread;
    const scratch *folder;
    loom__gpt_indices got;
    loom_status status;
} rank;

static void *ask(void *context) {
    rank *own = context;
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    const loom__gpt_key key = key_of(lengths, 900);
    own->status = loom__gpt_indices_cached(own->folder->path, &key, lengths, 0, &own->got);
    return NULL;
}

static void many_that_build_at_once_get_the_same(void **state) {
    (void)state;
    loom__gpt_indices wanted;
    build(900, &wanted);
    for (int round = 0; round < 5; round++) {
        scratch folder = scratch_make();
        char name[256];
        rank ranks[RANKS];
        for (int i = 0; i < RANKS; i++) {
            ranks[i] = (rank){.folder = &folder};
            assert_int_equal(pthread_create(&ranks[i].thread, NULL, ask, &ranks[i]), 0);
        }
        for (int i = 0; i < RANKS; i++)
            pthread_join(ranks[i].thread, NULL);
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(ranks[i].status, LOOM_OK);
            assert_true(same(&ranks[i].got, &wanted));
            loom__gpt_indices_free(&ranks[i].got);
        }
        assert_int_equal(count_kept(&folder, name), 1);
        scratch_remove(&folder);
    }
    loom__gpt_indices_free(&wanted);
}

static void a_folder_that_cannot_be_written_is_named(void **state) {
    (void)state;
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    const loom__gpt_key key = key_of(lengths, -1);
    loom__gpt_indices got;
    assert_int_equal(loom__gpt_indices_cached("/proc/no/such/folder", &key, lengths, 0, &got), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "/proc/no/such/folder/gpt-"));
    assert_non_null(strstr(loom_error_message(), "index_mapping_dir"));
}

static void more_epochs_than_allowed_are_refused_with_both_counts(void **state) {
    (void)state;
    scratch folder = scratch_make();
    int32_t lengths[DOCUMENTS];
    fill_lengths(lengths);
    const loom__gpt_key key = key_of(lengths, 900);
    loom__gpt_indices got;
    assert_int_equal(loom__gpt_indices_build(&key, lengths, 3, &got), LOOM_OK);
    loom__gpt_indices_free(&got);
    /* Also where they lie on disk already, built without the limit. */
    assert_int_equal(loom__gpt_indices_cached(folder.path, &key, lengths, 0, &got), LOOM_OK);
    loom__gpt_indices_free(&got);
    assert_int_equal(loom__gpt_indices_cached(folder.path, &key, lengths, 1, &got), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "900 samples of 16 tokens"));
    assert_non_null(strstr(loom_error_message(), "takes 3 epochs"));
    assert_non_null(strstr(loom_error_message(), "expected at most 1 epochs"));
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_indices_equal_built_ones_and_are_found_again),
        cmocka_unit_test(a_corpus_that_has_changed_gets_other_indices),
        cmocka_unit_test(damaged_files_are_built_again),
        cmocka_unit_test(many_that_build_at_once_get_the_same),
        cmocka_unit_test(a_folder_that_cannot_be_written_is_named),
        cmocka_unit_test(more_epochs_than_allowed_are_refused_with_both_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
