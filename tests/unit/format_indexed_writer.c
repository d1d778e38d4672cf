/* Writing indexed datasets in parts: marks and going on behind them, two writers of one set, merging; and sets whose
 * sizes lie beyond 31 and 32 bits, in sparse files. */
#include "format/indexed.h"
#include "unit/format_scratch.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* A number of documents of 0 to 4 tokens each, an empty document and a document of two sequences now and then. */
static void add_documents(loom_indexed_writer *writer, int64_t first, int64_t end) {
    for (int64_t d = first; d < end; d++) {
        const int64_t tokens[4] = {d % 60000, d % 7, 1, 2};
        if (d % 11 != 0)
            assert_int_equal(loom_indexed_writer_add_tokens(writer, tokens, d % 5, 0), LOOM_OK);
        if (d % 13 == 0)
            assert_int_equal(loom_indexed_writer_add_tokens(writer, tokens, 1, 0), LOOM_OK);
        assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    }
}

static void assert_same_files(const char *a, const char *b) {
    FILE *x = fopen(a, "rb"), *y = fopen(b, "rb");
    assert_true(x && y);
    int c, d;
    do {
        c = getc(x);
        d = getc(y);
        assert_int_equal(c, d);
    } while (c != EOF);
    fclose(x);
    fclose(y);
}

static void assert_same_sets(const scratch *folder, const char *a, const char *b) {
    char names[4][64];
    for (int i = 0; i < 2; i++) {
        snprintf(names[i], sizeof names[i], "%s%s", a, i ? ".idx" : ".bin");
        snprintf(names[2 + i], sizeof names[i], "%s%s", b, i ? ".idx" : ".bin");
        assert_same_files(scratch_file(folder, names[i]), scratch_file(folder, names[2 + i]));
    }
}

/* More sequences than a buffer holds, so that lengths and documents are read back from the disk. */
enum { DOCUMENTS = 200000 };

static void a_writer_goes_on_behind_its_mark(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_indexed_writer *writer;
    assert_int_equal(loom_indexed_writer_create(scratch_file(&folder, "whole"), LOOM_U16, false, &writer), LOOM_OK);
    add_documents(writer, 0, DOCUMENTS);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);

    const char *prefix = scratch_file(&folder, "parts");
    loom__indexed_mark mark;
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_U16, false, &writer), LOOM_OK);
    static const int64_t stops[] = {0, 1, 70001, 70002, 150000};
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        add_documents(writer, i ? stops[i - 1] : 0, stops[i]);
        assert_int_equal(loom__indexed_writer_mark(writer, &mark), LOOM_OK);
        add_documents(writer, 5, 120000); /* lost: they come after the mark, and are more than what follows */
        loom__indexed_writer_abandon(writer);
        loom_indexed *set;
        assert_int_equal(loom_indexed_open(prefix, &set), LOOM_ERR_NOT_FOUND);
        assert_int_equal(loom__indexed_writer_resume(prefix, LOOM_U16, false, &mark, &writer), LOOM_OK);
    }
    add_documents(writer, 150000, DOCUMENTS);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
    assert_same_sets(&folder, "whole", "parts");
    scratch_remove(&folder);
}

static void a_mark_beyond_what_is_there_is_refused(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *prefix = scratch_file(&folder, "set");
    loom_indexed_writer *writer;
    loom__indexed_mark mark;
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_I32, false, &writer), LOOM_OK);
    add_documents(writer, 0, 10);
    assert_int_equal(loom_indexed_writer_add_tokens(writer, &(int64_t){1}, 1, 0), LOOM_OK);
    assert_int_equal(loom__indexed_writer_mark(writer, &mark), LOOM_ERR_STATE); /* inside a document */
    assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    assert_int_equal(loom__indexed_writer_mark(writer, &mark), LOOM_OK);
    loom__indexed_writer_abandon(writer);
    loom__indexed_mark beyond = mark;
    beyond.sequences++;
    assert_int_equal(loom__indexed_writer_resume(prefix, LOOM_I32, false, &beyond, &writer), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "set.idx.lengths.tmp: has"));
    assert_int_equal(loom__indexed_writer_resume(prefix, LOOM_I32, false, &mark, &writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
    assert_int_equal(rmdir(folder.path), 0);
}

static void a_second_writer_of_a_set_is_refused(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *prefix = scratch_file(&folder, "set");
    loom_indexed_writer *writer, *other;
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_U16, false, &writer), LOOM_OK);
    add_documents(writer, 0, 10);
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_U16, false, &other), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "set.bin.tmp: is being written by another process"));
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
    loom_indexed *set;
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_OK);
    assert_int_equal(loom_indexed_documents(set), 10);
    loom_indexed_close(set);
    scratch_remove(&folder);
}

static void merging_is_writing_one_after_the_other(void **state) {
    (void)state;
    scratch folder = scratch_make();
    static const struct {
        const char *name;
        int64_t first, end;
    } parts[] = {{"whole", 0, 300}, {"a", 0, 120}, {"none", 120, 120}, {"b", 120, 300}};
    char paths[4][512];
    for (size_t i = 0; i < 4; i++) {
        loom_indexed_writer *writer;
        snprintf(paths[i], sizeof paths[i], "%s", scratch_file(&folder, parts[i].name));
        assert_int_equal(loom_indexed_writer_create(paths[i], LOOM_U16, false, &writer), LOOM_OK);
        add_documents(writer, parts[i].first, parts[i].end);
        assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
        loom_indexed_writer_destroy(writer);
    }
    const char *const inputs[] = {paths[1], paths[2], paths[3]};
    assert_int_equal(loom_indexed_merge(inputs, 3, scratch_file(&folder, "merged")), LOOM_OK);
    assert_same_sets(&folder, "whole", "merged");
    /* An input may be the output, too. */
    assert_int_equal(loom_indexed_merge(inputs, 3, paths[1]), LOOM_OK);
    assert_same_sets(&folder, "whole", "a");
    scratch_remove(&folder);
}

static void only_sets_alike_are_merged(void **state) {
    (void)state;
    scratch folder = scratch_make();
    static const struct {
        const char *name;
        loom_dtype dtype;
        bool multimodal;
    } kinds[] = {{"u16", LOOM_U16, false}, {"i32", LOOM_I32, false}, {"modes", LOOM_U16, true}};
    char paths[3][512], out[512];
    for (size_t i = 0; i < 3; i++) {
        loom_indexed_writer *writer;
        snprintf(paths[i], sizeof paths[i], "%s", scratch_file(&folder, kinds[i].name));
        assert_int_equal(loom_indexed_writer_create(paths[i], kinds[i].dtype, kinds[i].multimodal, &writer), LOOM_OK);
        add_documents(writer, 0, 10);
        assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
        loom_indexed_writer_destroy(writer);
    }
    snprintf(out, sizeof out, "%s", scratch_file(&folder, "out"));
    assert_int_equal(loom_indexed_merge((const char *[]){paths[0], paths[1]}, 2, out), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "i32: dtype is I32, expected U16, which "));
    assert_int_equal(loom_indexed_merge((const char *[]){paths[0], paths[2]}, 2, out), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "modes: has modes, expected none, as "));
    assert_int_equal(loom_indexed_merge((const char *[]){paths[0], "/nonexistent/set"}, 2, out), LOOM_ERR_NOT_FOUND);
    assert_int_equal(loom_indexed_merge(NULL, 0, out), LOOM_ERR_ARGUMENT);
    assert_int_equal(scratch_size(&folder, "out.bin"), -1);
    scratch_remove(&folder);
}

/* ---- Size ---- */

/* A set of U16 sequences of the given length, one a document, in a sparse .bin. */
static void write_sparse(const scratch *folder, int64_t sequences, int32_t length) {
    int idx = open(scratch_file(folder, "set.idx"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    int bin = open(scratch_file(folder, "set.bin"), O_RDWR | O_CREAT | O_TRUNC, 0666);
    assert_true(idx >= 0 && bin >= 0);
    const uint64_t numbers[2] = {(uint64_t)sequences, (uint64_t)sequences + 1}, version = 1;
    unsigned char head[LOOM__INDEXED_HEADER_BYTES] = "MMIDIDX";
    memcpy(head + 9, &version, 8);
    head[17] = 8;
    memcpy(head + 18, numbers, 16);
    assert_int_equal(write(idx, head, sizeof head), sizeof head);
    for (int64_t i = 0; i < sequences; i++)
        assert_int_equal(write(idx, &length, 4), 4);
    for (int64_t i = 0; i < sequences; i++)
        assert_int_equal(write(idx, &(int64_t){2 * i * length}, 8), 8);
    for (int64_t i = 0; i <= sequences; i++)
        assert_int_equal(write(idx, &i, 8), 8);
    int64_t bytes = 2 * sequences * length;
    assert_int_equal(ftruncate(bin, bytes), 0);
    const uint16_t last[2] = {12345, 54321};
    assert_int_equal(pwrite(bin, last, 4, bytes - 4), 4);
    close(idx);
    close(bin);
}

static void check_sparse(int64_t sequences, int32_t length) {
    scratch folder = scratch_make();
    write_sparse(&folder, sequences, length);
    loom_indexed *set;
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_OK);
    assert_true(loom_indexed_tokens(set) == sequences * length);
    assert_true(loom_indexed_bin_bytes(set) == 2 * sequences * length);
    assert_true(loom_indexed_pointer(set, sequences - 1) == 2 * (sequences - 1) * length);
    int64_t tokens[3] = {-1, -1, -1};
    assert_int_equal(loom_indexed_read(set, sequences - 1, length - 3, 3, tokens), LOOM_OK);
    assert_int_equal(tokens[0], 0);
    assert_int_equal(tokens[1], 12345);
    assert_int_equal(tokens[2], 54321);
    assert_int_equal(loom_indexed_read(set, sequences - 1, length - 2, 3, tokens), LOOM_ERR_ARGUMENT);
    loom_indexed_close(set);
    assert_int_equal(truncate(scratch_file(&folder, "set.bin"), 2 * sequences * length - 1), 0);
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_ERR_FORMAT);
    scratch_remove(&folder);
}

static void documents_of_2_to_30_tokens_and_totals_beyond_2_to_32_are_read(void **state) {
    (void)state;
    check_sparse(1, 1 << 30);    /* 2^31 bytes */
    check_sparse(2, 1 << 30);    /* 2^31 tokens */
    check_sparse(5, 1 << 30);    /* 5 * 2^30 tokens */
    check_sparse(3, INT32_MAX);  /* the longest sequence that the format has */
    check_sparse(103, 99526837); /* 10,251,264,211 tokens */
    check_sparse(1048575, 2048); /* one sequence below 2^31 tokens */
    check_sparse(1048576, 2048); /* 2^31 tokens */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_writer_goes_on_behind_its_mark),
        cmocka_unit_test(a_mark_beyond_what_is_there_is_refused),
        cmocka_unit_test(a_second_writer_of_a_set_is_refused),
        cmocka_unit_test(merging_is_writing_one_after_the_other),
        cmocka_unit_test(only_sets_alike_are_merged),
        cmocka_unit_test(documents_of_2_to_30_tokens_and_totals_beyond_2_to_32_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
