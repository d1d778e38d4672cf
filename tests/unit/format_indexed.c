/* The .idx reader against damaged files, and the writer's promises. */
#include "format/indexed.h"
#include "unit/format_scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Three I32 sequences of 3, 0 and 2 in two documents. Places of the fields: magic 0, version 9, dtype 17, sequences 18,
 * document entries 26, lengths 34, pointers 46, documents 70, end 94. */
enum { LENGTHS = 34, POINTERS = 46, DOCUMENTS = 70, IDX_BYTES = 94, BIN_BYTES = 20 };

static unsigned char idx[IDX_BYTES + 8], bin[BIN_BYTES];

static void put(size_t at, const void *value, size_t bytes) {
    memcpy(idx + at, value, bytes);
}

static void put_i64(size_t at, int64_t value) {
    put(at, &value, sizeof value);
}

static void put_i32(size_t at, int32_t value) {
    put(at, &value, sizeof value);
}

static void build(void) {
    memset(idx, 0, sizeof idx);
    put(0, "MMIDIDX\0\0", 9);
    put_i64(9, 1);
    idx[17] = 4;
    put_i64(18, 3);
    put_i64(26, 3);
    put_i32(LENGTHS, 3);
    put_i32(LENGTHS + 4, 0);
    put_i32(LENGTHS + 8, 2);
    put_i64(POINTERS, 0);
    put_i64(POINTERS + 8, 12);
    put_i64(POINTERS + 16, 12);
    put_i64(DOCUMENTS, 0);
    put_i64(DOCUMENTS + 8, 1);
    put_i64(DOCUMENTS + 16, 3);
    for (size_t i = 0; i < BIN_BYTES / 4; i++) {
        int32_t value = (int32_t)(10 + i);
        memcpy(bin + 4 * i, &value, 4);
    }
}

/* Exactly the bytes on the heap, so that a sanitizer sees any read past them; reads every element where it opens. */
static loom_status open_bytes(size_t idx_bytes, size_t bin_bytes) {
    unsigned char *i = malloc(idx_bytes ? idx_bytes : 1), *b = malloc(bin_bytes ? bin_bytes : 1);
    memcpy(i, idx, idx_bytes);
    memcpy(b, bin, bin_bytes);
    loom_indexed *set;
    loom_error_clear();
    loom_status status = loom__indexed_open_memory("set", i, idx_bytes, b, bin_bytes, &set);
    if (status == LOOM_OK) {
        for (int64_t s = 0; s < loom_indexed_sequences(set); s++) {
            int64_t tokens[64] = {0}, length = loom_indexed_length(set, s);
            if (length <= 64)
                loom_indexed_read(set, s, 0, length, tokens);
        }
        loom_indexed_close(set);
    }
    free(i);
    free(b);
    return status;
}

static void refuse_bytes(size_t idx_bytes, size_t bin_bytes, const char *part) {
    loom_status status = open_bytes(idx_bytes, bin_bytes);
    if (status != LOOM_ERR_FORMAT || !strstr(loom_error_message(), part))
        fail_msg("%s '%s', expected '%s'", loom_status_name(status), loom_error_message(), part);
}

static void refuse(const char *part) {
    refuse_bytes(IDX_BYTES, BIN_BYTES, part);
}

static void a_good_pair_opens(void **state) {
    (void)state;
    build();
    loom_indexed *set;
    assert_int_equal(loom__indexed_open_memory("set", idx, IDX_BYTES, bin, BIN_BYTES, &set), LOOM_OK);
    int64_t tokens[2];
    assert_int_equal(loom_indexed_tokens(set), 5);
    assert_int_equal(loom_indexed_documents(set), 2);
    assert_int_equal(loom_indexed_read(set, 2, 0, 2, tokens), LOOM_OK);
    assert_int_equal(tokens[1], 14);
    assert_int_equal(loom_indexed_read(set, 2, 1, 2, tokens), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_indexed_read(set, 2, INT64_MAX, 1, tokens), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_indexed_read(set, 3, 0, 0, tokens), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_indexed_read(set, -1, 0, 0, tokens), LOOM_ERR_ARGUMENT);
    assert_null(loom_indexed_data(set, 3));
    loom_indexed_close(set);
}

static void a_flipped_magic_is_refused(void **state) {
    (void)state;
    build();
    idx[3] ^= 1;
    refuse("set.idx: magic is 4d4d494549");
}

static void another_version_is_refused(void **state) {
    (void)state;
    build();
    put_i64(9, 2);
    refuse("version is 2, expected 1");
}

static void dtype_codes_0_9_and_99_are_refused(void **state) {
    (void)state;
    build();
    static const unsigned char codes[] = {0, 9, 99, 255};
    for (size_t i = 0; i < sizeof codes; i++) {
        idx[17] = codes[i];
        refuse("dtype code is");
    }
}

static void an_idx_one_byte_short_is_refused(void **state) {
    (void)state;
    build();
    refuse_bytes(IDX_BYTES - 1, BIN_BYTES, "number of document entries is 3, expected 1 to 2 (the file has 93 bytes)");
}

static void an_idx_one_byte_long_is_refused(void **state) {
    (void)state;
    build();
    refuse_bytes(IDX_BYTES + 1, BIN_BYTES, "has 95 bytes, expected 94 (or 97 with modes)");
}

static void a_bin_two_bytes_short_is_refused(void **state) {
    (void)state;
    build();
    refuse_bytes(
        IDX_BYTES, BIN_BYTES - 2, "set.bin: has 18 bytes, but sequence 2 of 2 I32 lies at byte 12: 20 bytes wanted");
}

static void an_empty_idx_is_refused(void **state) {
    (void)state;
    build();
    refuse_bytes(0, BIN_BYTES, "has 0 bytes");
}

static void sequence_counts_beyond_the_file_are_refused(void **state) {
    (void)state;
    build();
    static const uint64_t counts[] = {4, (uint64_t)1 << 30, (uint64_t)1 << 62, (uint64_t)1 << 63, UINT64_MAX,
        UINT64_MAX / 12 + 1, ((uint64_t)1 << 62) + 3 /* times 12 it wraps to the true size */};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        put(18, &counts[i], 8);
        refuse("expected");
    }
}

static void document_counts_beyond_the_file_are_refused(void **state) {
    (void)state;
    build();
    static const uint64_t counts[] = {0, 4, (uint64_t)1 << 61, (uint64_t)1 << 63, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        put(26, &counts[i], 8);
        refuse("number of document entries");
    }
}

static void negative_lengths_are_refused(void **state) {
    (void)state;
    build();
    put_i32(LENGTHS + 4, -1);
    refuse("length of sequence 1 is -1");
}

static void pointers_outside_the_bin_are_refused(void **state) {
    (void)state;
    static const int64_t pointers[] = {-1, 13, 21, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        build();
        put_i64(POINTERS + 16, pointers[i]);
        refuse("sequence 2 of 2 I32 lies at byte");
    }
}

static void document_entries_that_do_not_rise_from_0_to_the_end_are_refused(void **state) {
    (void)state;
    build();
    put_i64(DOCUMENTS, 1);
    refuse("document entry 0 is 1, expected 0 to 0");
    build();
    put_i64(DOCUMENTS + 8, 4);
    refuse("document entry 1 is 4, expected 0 to 3");
    build();
    put_i64(DOCUMENTS + 8, -1);
    refuse("document entry 1 is -1");
    build();
    put_i64(DOCUMENTS + 16, 2);
    refuse("the last document entry is 2, expected 3");
    build();
    put_i64(DOCUMENTS + 8, 2);
    put_i64(DOCUMENTS + 16, 1);
    refuse("document entry 2 is 1, expected 2 to 3");
}

static void every_truncation_is_refused(void **state) {
    (void)state;
    build();
    for (size_t bytes = 0; bytes < IDX_BYTES; bytes++)
        refuse_bytes(bytes, BIN_BYTES, "expected");
    for (size_t bytes = 0; bytes < BIN_BYTES; bytes++)
        refuse_bytes(IDX_BYTES, bytes, "wanted");
}

static void every_flipped_byte_opens_or_is_refused(void **state) {
    (void)state;
    static const unsigned char flips[] = {0x01, 0x02, 0x80, 0xff};
    int opened = 0;
    for (size_t i = 0; i < IDX_BYTES; i++)
        for (size_t f = 0; f < sizeof flips; f++) {
            build();
            idx[i] ^= flips[f];
            opened += open_bytes(IDX_BYTES, BIN_BYTES) == LOOM_OK;
        }
    assert_true(opened > 0 && opened < IDX_BYTES); /* a shorter sequence or another type may be legal, most is not */
}

static void a_hundred_and_three_shards_count_past_32_bits(void **state) {
    (void)state;
    /* The index alone is checked, against a .bin of the claimed size. */
    enum { SHARDS = 103 };
    const int64_t total = 10251184259;
    static unsigned char big[LOOM__INDEXED_HEADER_BYTES + SHARDS * 12 + 16];
    build();
    memcpy(big, idx, LOOM__INDEXED_HEADER_BYTES);
    const int64_t counts[2] = {SHARDS, 2}, documents[2] = {0, SHARDS};
    memcpy(big + 18, counts, 16);
    int64_t pointer = 0;
    for (int64_t i = 0; i < SHARDS; i++) {
        int32_t length = (int32_t)(total / SHARDS + (i < total % SHARDS));
        memcpy(big + LOOM__INDEXED_HEADER_BYTES + 4 * i, &length, 4);
        memcpy(big + LOOM__INDEXED_HEADER_BYTES + 4 * SHARDS + 8 * i, &pointer, 8);
        pointer += 4 * (int64_t)length;
    }
    memcpy(big + LOOM__INDEXED_HEADER_BYTES + 12 * SHARDS, documents, 16);
    loom__indexed_view view;
    assert_int_equal(loom__indexed_check("set", big, sizeof big, (uint64_t)pointer, &view), LOOM_OK);
    assert_true(view.tokens == total);
    assert_int_equal(loom__indexed_check("set", big, sizeof big, (uint64_t)pointer - 1, &view), LOOM_ERR_FORMAT);
}

/* ---- Writer ---- */

static void vocabularies_choose_the_width(void **state) {
    (void)state;
    assert_int_equal(loom_indexed_dtype_for_vocabulary(257), LOOM_U16);
    assert_int_equal(loom_indexed_dtype_for_vocabulary(65499), LOOM_U16);
    assert_int_equal(loom_indexed_dtype_for_vocabulary(65500), LOOM_I32);
    assert_int_equal(loom_indexed_dtype_for_vocabulary(119547), LOOM_I32);
}

static void ids_65535_fit_16_bits_and_65536_is_refused(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *prefix = scratch_file(&folder, "set");
    loom_indexed_writer *writer;
    const int64_t good[2] = {0, 65535}, bad[2] = {1, 65536}, negative[1] = {-1};
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_U16, false, &writer), LOOM_OK);
    assert_int_equal(loom_indexed_writer_add_tokens(writer, good, 2, 0), LOOM_OK);
    assert_int_equal(loom_indexed_writer_add_tokens(writer, bad, 2, 0), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "token 65536 at 1 of sequence 1 does not fit U16 (0 to 65535)"));
    assert_int_equal(loom_indexed_writer_add_tokens(writer, negative, 1, 0), LOOM_ERR_ARGUMENT);
    assert_int_equal(
        loom_indexed_writer_add_tokens(writer, good, 1, 1), LOOM_ERR_ARGUMENT); /* a mode, not multimodal */
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_ERR_STATE);       /* no document yet */
    assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
    loom_indexed *set;
    int64_t tokens[2];
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_OK);
    assert_int_equal(loom_indexed_sequences(set), 1);
    assert_int_equal(loom_indexed_read(set, 0, 0, 2, tokens), LOOM_OK);
    assert_memory_equal(tokens, good, sizeof good);
    loom_indexed_close(set);
    assert_int_equal(scratch_size(&folder, "set.bin"), 4);
    scratch_remove(&folder);
}

static void id_69999_round_trips_in_32_bits(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_indexed_writer *writer;
    const int64_t good[3] = {65536, 69999, 0};
    assert_int_equal(loom_indexed_writer_create(scratch_file(&folder, "set"), LOOM_I32, false, &writer), LOOM_OK);
    assert_int_equal(loom_indexed_writer_add_tokens(writer, good, 3, 0), LOOM_OK);
    assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
    loom_indexed *set;
    int64_t tokens[3];
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_OK);
    assert_int_equal(loom_indexed_read(set, 0, 0, 3, tokens), LOOM_OK);
    assert_memory_equal(tokens, good, sizeof good);
    loom_indexed_close(set);
    scratch_remove(&folder);
}

static void a_stopped_writer_leaves_no_pair(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *prefix = scratch_file(&folder, "set");
    loom_indexed_writer *writer;
    loom_indexed *set;
    const int64_t token[1] = {1};
    assert_int_equal(loom_indexed_writer_create(prefix, LOOM_U8, false, &writer), LOOM_OK);
    assert_int_equal(loom_indexed_writer_add_tokens(writer, token, 1, 0), LOOM_OK);
    assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_ERR_NOT_FOUND);
    loom_indexed_writer_destroy(writer);
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_ERR_NOT_FOUND);
    assert_int_equal(rmdir(folder.path), 0); /* nothing is left, the temporary files neither */
}

static void a_writer_that_cannot_write_says_where(void **state) {
    (void)state;
    loom_indexed_writer *writer;
    assert_int_equal(loom_indexed_writer_create("/nonexistent/set", LOOM_U8, false, &writer), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "/nonexistent/set.bin"));
    assert_int_equal(loom_indexed_writer_create("set", LOOM_BF16, false, &writer), LOOM_ERR_ARGUMENT);
}

static void after_a_failed_write_nothing_is_published(void **state) {
    (void)state;
    enum { COUNT = 400000, ROOM = 1000 };
    scratch folder = scratch_make();
    static int64_t tokens[COUNT];
    loom_indexed_writer *writer;
    loom_indexed *set;
    assert_int_equal(loom_indexed_writer_create(scratch_file(&folder, "set"), LOOM_U8, false, &writer), LOOM_OK);
    scratch_limit(ROOM);
    loom_status status = loom_indexed_writer_add_tokens(writer, tokens, COUNT, 0);
    scratch_limit(0);
    assert_int_equal(status, LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "set.bin.tmp: writing failed"));
    assert_int_equal(loom_indexed_writer_add_tokens(writer, tokens, 1, 0), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "set.bin.tmp: an earlier write failed"));
    (void)loom_indexed_writer_end_document(writer);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_ERR_IO);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_ERR_IO);
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_ERR_NOT_FOUND);
    loom_indexed_writer_destroy(writer);
    assert_int_equal(rmdir(folder.path), 0);
}

static void a_failed_finish_cannot_be_repeated(void **state) {
    (void)state;
    scratch folder = scratch_make();
    static int64_t tokens[3000];
    loom_indexed_writer *writer;
    loom_indexed *set;
    assert_int_equal(loom_indexed_writer_create(scratch_file(&folder, "set"), LOOM_U8, false, &writer), LOOM_OK);
    for (int i = 0; i < 100; i++)
        assert_int_equal(loom_indexed_writer_add_tokens(writer, tokens, 1, 0), LOOM_OK);
    assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    scratch_limit(200); /* the .bin fits, the .idx does not */
    loom_status status = loom_indexed_writer_finish(writer);
    scratch_limit(0);
    assert_int_equal(status, LOOM_ERR_IO);
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "set.idx.tmp: an earlier write failed"));
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_ERR_NOT_FOUND);
    loom_indexed_writer_destroy(writer);
    assert_int_equal(rmdir(folder.path), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_pair_opens),
        cmocka_unit_test(a_flipped_magic_is_refused),
        cmocka_unit_test(another_version_is_refused),
        cmocka_unit_test(dtype_codes_0_9_and_99_are_refused),
        cmocka_unit_test(an_idx_one_byte_short_is_refused),
        cmocka_unit_test(an_idx_one_byte_long_is_refused),
        cmocka_unit_test(a_bin_two_bytes_short_is_refused),
        cmocka_unit_test(an_empty_idx_is_refused),
        cmocka_unit_test(sequence_counts_beyond_the_file_are_refused),
        cmocka_unit_test(document_counts_beyond_the_file_are_refused),
        cmocka_unit_test(negative_lengths_are_refused),
        cmocka_unit_test(pointers_outside_the_bin_are_refused),
        cmocka_unit_test(document_entries_that_do_not_rise_from_0_to_the_end_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_flipped_byte_opens_or_is_refused),
        cmocka_unit_test(a_hundred_and_three_shards_count_past_32_bits),
        cmocka_unit_test(vocabularies_choose_the_width),
        cmocka_unit_test(ids_65535_fit_16_bits_and_65536_is_refused),
        cmocka_unit_test(id_69999_round_trips_in_32_bits),
        cmocka_unit_test(a_stopped_writer_leaves_no_pair),
        cmocka_unit_test(a_writer_that_cannot_write_says_where),
        cmocka_unit_test(after_a_failed_write_nothing_is_published),
        cmocka_unit_test(a_failed_finish_cannot_be_repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
