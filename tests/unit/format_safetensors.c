/* The safetensors reader against hostile files, and reader and writer against each other. */
#include "format/safetensors.h"
#include "unit/format_scratch.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static unsigned char made[200000];

/* A file with this header and `data_bytes` bytes of data in `made`; returns its size. */
static size_t build(uint64_t length, const char *header, size_t data_bytes) {
    memcpy(made, &length, 8);
    memcpy(made + 8, header, strlen(header));
    for (size_t i = 0; i < data_bytes; i++)
        made[8 + strlen(header) + i] = (unsigned char)i;
    return 8 + strlen(header) + data_bytes;
}

/* Exactly the bytes on the heap, so that a sanitizer sees any read past them. */
static loom_status open_bytes(size_t bytes, loom_safetensors **file) {
    unsigned char *copy = malloc(bytes + 1);
    memcpy(copy, made, bytes);
    unsigned char *exact = realloc(copy, bytes ? bytes : 1);
    loom_status status = loom__safetensors_open_memory("bad.safetensors", exact, bytes, file);
    if (status == LOOM_OK)
        loom_safetensors_close(*file);
    free(exact);
    return status;
}

static void refuse(size_t bytes, loom_status wanted, const char *part) {
    loom_safetensors *file = NULL;
    loom_error_clear();
    loom_status status = open_bytes(bytes, &file);
    if (status != wanted || !strstr(loom_error_message(), part) || !strstr(loom_error_message(), "bad.safetensors"))
        fail_msg("%s '%s', expected %s '%s'", loom_status_name(status), loom_error_message(), loom_status_name(wanted),
            part);
}

static void refuse_header(const char *header, size_t data_bytes, const char *part) {
    refuse(build(strlen(header), header, data_bytes), LOOM_ERR_FORMAT, part);
}

static const char good[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
                           "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[16,19]}}";

static void a_good_file_opens(void **state) {
    (void)state;
    loom_safetensors *file;
    assert_int_equal(open_bytes(build(strlen(good), good, 19), &file), LOOM_OK);
}

static void header_length_0_is_refused(void **state) {
    (void)state;
    refuse(build(0, good, 19), LOOM_ERR_FORMAT, "header length is 0");
}

static void header_length_7_is_refused(void **state) {
    (void)state;
    refuse(build(7, good, 19), LOOM_ERR_FORMAT, "no JSON object");
}

static void header_length_beyond_the_file_is_refused(void **state) {
    (void)state;
    refuse(build(strlen(good) + 20, good, 19), LOOM_ERR_FORMAT, "header length is");
}

static void header_length_2_to_63_is_refused(void **state) {
    (void)state;
    refuse(build((uint64_t)1 << 63, good, 19), LOOM_ERR_FORMAT, "header length is 9223372036854775808");
}

static void header_length_2_to_64_minus_1_is_refused(void **state) {
    (void)state;
    refuse(build(UINT64_MAX, good, 19), LOOM_ERR_FORMAT, "header length is 18446744073709551615");
}

static void files_shorter_than_the_length_field_are_refused(void **state) {
    (void)state;
    build(strlen(good), good, 19);
    for (size_t bytes = 0; bytes < 8; bytes++)
        refuse(bytes, LOOM_ERR_FORMAT, "expected at least 8");
}

static void overlapping_tensors_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
        6, "overlaps");
}

static void two_tensors_at_one_place_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
        4, "overlaps");
}

static void a_hole_between_tensors_is_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[6,10]}}",
        10, "belong to no tensor");
}

static void a_hole_before_the_first_tensor_is_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 5, "belong to no tensor");
}

static void bytes_after_the_last_tensor_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5, "expected all 5");
}

static void reversed_offsets_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", 4, "reversed");
}

static void offsets_past_the_file_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]}}", 4, "end at 5, expected at most 4");
}

static void a_span_that_is_not_shape_times_dtype_is_refused(void **state) {
    (void)state;
    refuse_header(
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "expected 2 elements x 4 bytes");
}

static void a_product_that_overflows_is_refused(void **state) {
    (void)state;
    refuse_header(
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "exceeds 2^63");
    refuse_header("{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0, "span");
}

static void duplicate_names_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                  "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
        2, "duplicate");
}

static void numbers_that_do_not_fit_are_refused(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,18446744073709551615]}}", 1, "integer");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1, "whole numbers");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "shape[0]");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, "shape[0]");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "data_offsets");
}

static void missing_and_unknown_fields_are_named(void **state) {
    (void)state;
    refuse_header("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype is missing");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape is missing");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"stride\":[1]}}", 1, "'stride'");
    refuse_header("{\"a\":{\"dtype\":\"Q8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype is 'Q8'");
    refuse_header("{\"a\":7}", 0, "no object");
    refuse_header("{\"__metadata__\":{\"k\":1}}", 0, "'k' is no text");
    refuse_header("[1,2]", 0, "expected '{'");
}

static void dtypes_of_the_format_that_we_lack_are_not_supported_yet(void **state) {
    (void)state;
    const char *header = "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    refuse(build(strlen(header), header, 1), LOOM_ERR_UNSUPPORTED, "not supported yet: ");
}

static void deep_nesting_is_refused(void **state) {
    (void)state;
    char header[8192];
    memset(header, '[', sizeof header);
    memcpy(header, "{\"a\":", 5);
    header[sizeof header - 1] = '\0';
    refuse_header(header, 0, "no JSON object");
}

static void a_header_of_100_kilobytes_loads(void **state) {
    (void)state;
    static char header[120000];
    size_t at = (size_t)snprintf(header, sizeof header, "{\"__metadata__\":{\"k\":\"");
    memset(header + at, 'x', 100000);
    at += 100000;
    snprintf(header + at, sizeof header - at, "\"},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
    loom_safetensors *file;
    assert_int_equal(open_bytes(build(strlen(header), header, 1), &file), LOOM_OK);
}

static void empty_tensors_and_scalars_load(void **state) {
    (void)state;
    const char *header = "{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                         "\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[4,4]}}   ";
    loom_safetensors *file;
    size_t bytes = build(strlen(header), header, 4);
    assert_int_equal(loom__safetensors_open_memory("good", made, bytes, &file), LOOM_OK);
    assert_int_equal(loom_safetensors_count(file), 2);
    const loom_safetensors_tensor *tensor;
    assert_int_equal(loom_safetensors_find(file, "s", &tensor), LOOM_OK);
    assert_int_equal(tensor->dims, 0);
    assert_int_equal(tensor->elements, 1);
    assert_int_equal(loom_safetensors_find(file, "e", &tensor), LOOM_OK);
    assert_int_equal(tensor->elements, 0);
    assert_int_equal(loom_safetensors_read_f32(tensor, 0, 0, NULL), LOOM_OK);
    loom_safetensors_close(file);
}

static void every_truncation_is_refused(void **state) {
    (void)state;
    size_t whole = build(strlen(good), good, 19);
    for (size_t bytes = 0; bytes < whole; bytes++) {
        loom_safetensors *file;
        assert_int_equal(open_bytes(bytes, &file), LOOM_ERR_FORMAT);
    }
}

static void every_flipped_byte_opens_or_is_refused(void **state) {
    (void)state;
    size_t whole = build(strlen(good), good, 19);
    static const unsigned char flips[] = {0x01, 0x80, 0xff, 0x10};
    for (size_t i = 0; i < whole; i++)
        for (size_t f = 0; f < sizeof flips; f++) {
            made[i] ^= flips[f];
            loom_safetensors *file;
            open_bytes(whole, &file);
            made[i] ^= flips[f];
        }
    loom_safetensors *file;
    assert_int_equal(open_bytes(whole, &file), LOOM_OK);
}

/* ---- Values, writer, sets ---- */

static void what_is_written_is_read_back(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_file(&folder, "x.safetensors");
    loom_safetensors_writer *writer;
    const float f32[6] = {0.0f, -1.5f, 3e38f, 1e-40f, INFINITY, 7.0f};
    const double f64[2] = {1.0 / 3.0, -2.0};
    const uint16_t bf16[2] = {0x3f80, 0xc000}, f16[2] = {0x3c00, 0x0001};
    const int64_t i64[2] = {INT64_MIN, INT64_MAX};
    const int32_t i32[1] = {-5};
    const uint16_t u16[1] = {65535};
    assert_int_equal(loom_safetensors_writer_create(path, &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_metadata(writer, "format", "pt \"quoted\""), LOOM_OK);
    const int64_t matrix[2] = {2, 3}, two[1] = {2}, none[2] = {0, 9};
    assert_int_equal(loom_safetensors_writer_add(writer, "f32", LOOM_F32, 2, matrix), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "f64", LOOM_F64, 1, two), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "bf16", LOOM_BF16, 1, two), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "f16", LOOM_F16, 1, two), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "i64", LOOM_I64, 1, two), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "empty", LOOM_F32, 2, none), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "i32", LOOM_I32, 0, NULL), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "u16", LOOM_U16, 0, NULL), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, f32, 10), LOOM_OK); /* pieces of any size */
    assert_int_equal(scratch_size(&folder, "x.safetensors"), -1);
    assert_int_equal(loom_safetensors_writer_write(writer, (const char *)f32 + 10, sizeof f32 - 10), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, f64, sizeof f64), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, bf16, sizeof bf16), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, f16, sizeof f16), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, i64, sizeof i64), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, i32, sizeof i32), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_ERR_STATE); /* two bytes are missing */
    assert_int_equal(loom_safetensors_writer_write(writer, u16, sizeof u16), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, u16, 1), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
    assert_int_equal(scratch_size(&folder, "x.safetensors.tmp"), -1);

    loom_safetensors *file;
    const loom_safetensors_tensor *t;
    float floats[6];
    int64_t whole[2];
    assert_int_equal(loom_safetensors_open(path, &file), LOOM_OK);
    assert_int_equal(loom_safetensors_count(file), 8);
    assert_string_equal(loom_safetensors_get(file, 0)->name, "f32");
    assert_null(loom_safetensors_get(file, 8));
    assert_string_equal(loom_safetensors_metadata(file, "format"), "pt \"quoted\"");
    assert_null(loom_safetensors_metadata(file, "other"));
    assert_int_equal(loom_safetensors_find(file, "f32", &t), LOOM_OK);
    assert_int_equal(t->dims, 2);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal((uintptr_t)t->data % 8, 0);
    assert_int_equal(loom_safetensors_read_f32(t, 0, 6, floats), LOOM_OK);
    assert_memory_equal(floats, f32, sizeof f32);
    assert_int_equal(loom_safetensors_read_f32(t, 4, 2, floats), LOOM_OK);
    assert_true(floats[1] == 7.0f);
    assert_int_equal(loom_safetensors_read_f32(t, 4, 3, floats), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_read_f32(t, -1, 1, floats), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_read_i64(t, 0, 1, whole), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_find(file, "f64", &t), LOOM_OK);
    assert_int_equal(loom_safetensors_read_f32(t, 0, 2, floats), LOOM_OK);
    assert_true(floats[0] == 1.0f / 3.0f && floats[1] == -2.0f);
    assert_int_equal(loom_safetensors_find(file, "bf16", &t), LOOM_OK);
    assert_int_equal(loom_safetensors_read_f32(t, 0, 2, floats), LOOM_OK);
    assert_true(floats[0] == 1.0f && floats[1] == -2.0f);
    assert_int_equal(loom_safetensors_find(file, "f16", &t), LOOM_OK);
    assert_int_equal(loom_safetensors_read_f32(t, 0, 2, floats), LOOM_OK);
    assert_true(floats[0] == 1.0f && floats[1] == 0x1p-24f);
    assert_int_equal(loom_safetensors_find(file, "i64", &t), LOOM_OK);
    assert_int_equal(loom_safetensors_read_i64(t, 0, 2, whole), LOOM_OK);
    assert_true(whole[0] == INT64_MIN && whole[1] == INT64_MAX);
    assert_int_equal(loom_safetensors_read_f32(t, 0, 1, floats), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_find(file, "u16", &t), LOOM_OK);
    assert_int_equal(loom_safetensors_read_i64(t, 0, 1, whole), LOOM_OK);
    assert_int_equal(whole[0], 65535);
    assert_int_equal(loom_safetensors_find(file, "f23", &t), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "did you mean 'f32'"));
    assert_true(loom_safetensors_has(file, "i32") && !loom_safetensors_has(file, "i3"));
    loom_safetensors_close(file);
    scratch_remove(&folder);
}

static void an_unfinished_file_leaves_the_old_one(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *path = scratch_write(&folder, "x.safetensors", "old", 3);
    const int64_t shape[1] = {4};
    loom_safetensors_writer *writer;
    assert_int_equal(loom_safetensors_writer_create(path, &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_F32, 1, shape), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_F32, 1, shape), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_writer_write(writer, shape, 4), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "b", LOOM_F32, 1, shape), LOOM_ERR_STATE);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_ERR_STATE);
    loom_safetensors_writer_destroy(writer);
    assert_int_equal(scratch_size(&folder, "x.safetensors"), 3);
    assert_int_equal(scratch_size(&folder, "x.safetensors.tmp"), -1);
    scratch_remove(&folder);
}

static void after_a_failed_write_nothing_is_published(void **state) {
    (void)state;
    enum { COUNT = 300000, ROOM = 1000 };
    scratch folder = scratch_make();
    static unsigned char bytes[COUNT];
    const int64_t shape[1] = {COUNT};
    loom_safetensors_writer *writer;
    assert_int_equal(loom_safetensors_writer_create(scratch_file(&folder, "x"), &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_U8, 1, shape), LOOM_OK);
    scratch_limit(ROOM);
    loom_status status = loom_safetensors_writer_write(writer, bytes, COUNT);
    scratch_limit(0);
    assert_int_equal(status, LOOM_ERR_IO);
    assert_int_equal(loom_safetensors_writer_write(writer, bytes, COUNT), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "x.tmp: an earlier write failed"));
    assert_int_not_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
    assert_int_equal(rmdir(folder.path), 0);
}

static int allocations_left;

static void *few_allocations(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void out_of_memory_is_no_wrong_shape_and_no_bad_name(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t shape[3] = {1, 2, 3};
    int refused = 0;
    for (int allowed = 0;; allowed++) {
        loom_safetensors_writer *writer;
        loom_safetensors *file;
        const loom_safetensors_tensor *tensor;
        assert_int_equal(loom_safetensors_writer_create(scratch_file(&folder, "x"), &writer), LOOM_OK);
        allocations_left = allowed;
        json_set_alloc_funcs(few_allocations, free);
        loom_status meta = loom_safetensors_writer_metadata(writer, "key", "value");
        loom_status add = loom_safetensors_writer_add(writer, "tensor", LOOM_U8, 3, shape);
        json_set_alloc_funcs(malloc, free);
        assert_true(meta == LOOM_OK || meta == LOOM_ERR_MEMORY);
        assert_true(add == LOOM_OK || add == LOOM_ERR_MEMORY);
        if (add == LOOM_OK) {
            assert_int_equal(loom_safetensors_writer_write(writer, "abcdef", 6), LOOM_OK);
            assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
            if (loom_safetensors_open(scratch_file(&folder, "x"), &file) != LOOM_OK)
                fail_msg("%d allocations: %s", allowed, loom_error_message());
            assert_int_equal(loom_safetensors_find(file, "tensor", &tensor), LOOM_OK);
            assert_int_equal(tensor->dims, 3);
            loom_safetensors_close(file);
        }
        loom_safetensors_writer_destroy(writer);
        refused += add != LOOM_OK;
        if (add == LOOM_OK && meta == LOOM_OK)
            break;
    }
    assert_in_range(refused, 5, 100);
    scratch_remove(&folder);
}

static void texts_that_are_no_utf8_are_refused_by_that_name(void **state) {
    (void)state;
    static const char *const bad[] = {"\xff", "\x80", "a\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80",
        "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xe2\x82"};
    static const char *const good_names[] = {
        "\x7f", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"};
    scratch folder = scratch_make();
    loom_safetensors_writer *writer;
    const int64_t shape[1] = {0};
    assert_int_equal(loom_safetensors_writer_create(scratch_file(&folder, "x"), &writer), LOOM_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(loom_safetensors_writer_add(writer, bad[i], LOOM_U8, 1, shape), LOOM_ERR_ARGUMENT);
        assert_non_null(strstr(loom_error_message(), "UTF-8"));
        assert_int_equal(loom_safetensors_writer_metadata(writer, "key", bad[i]), LOOM_ERR_ARGUMENT);
        assert_int_equal(loom_safetensors_writer_metadata(writer, bad[i], "value"), LOOM_ERR_ARGUMENT);
    }
    for (size_t i = 0; i < sizeof good_names / sizeof *good_names; i++)
        assert_int_equal(loom_safetensors_writer_add(writer, good_names[i], LOOM_U8, 1, shape), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
    scratch_remove(&folder);
}

static void sizes_that_overflow_are_not_written(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_safetensors_writer *writer;
    const int64_t huge[2] = {INT64_MAX / 2, 2}, negative[1] = {-1};
    assert_int_equal(loom_safetensors_writer_create(scratch_file(&folder, "x"), &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_F32, 2, huge), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_F32, 1, negative), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_F32, 9, huge), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_safetensors_writer_add(writer, "a", LOOM_DTYPE_COUNT, 0, NULL), LOOM_ERR_ARGUMENT);
    loom_safetensors_writer_destroy(writer);
    scratch_remove(&folder);
}

static void write_shard(const scratch *folder, const char *file_name, const char *tensor, unsigned char value) {
    loom_safetensors_writer *writer;
    const int64_t shape[1] = {1};
    assert_int_equal(loom_safetensors_writer_create(scratch_file(folder, file_name), &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, tensor, LOOM_U8, 1, shape), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, &value, 1), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
}

static loom_status open_set(const scratch *folder, const char *index, loom_safetensors **file) {
    scratch_write(folder, "model.safetensors.index.json", index, strlen(index));
    return loom_safetensors_open(folder->path, file);
}

static void a_set_of_shards_opens_as_one(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_shard(&folder, "1.safetensors", "a", 10);
    write_shard(&folder, "2.safetensors", "b", 20);
    loom_safetensors *file;
    assert_int_equal(
        open_set(&folder, "{\"weight_map\":{\"b\":\"2.safetensors\",\"a\":\"1.safetensors\"}}", &file), LOOM_OK);
    const loom_safetensors_tensor *tensor;
    int64_t value;
    assert_int_equal(loom_safetensors_count(file), 2);
    assert_int_equal(loom_safetensors_find(file, "b", &tensor), LOOM_OK);
    assert_int_equal(loom_safetensors_read_i64(tensor, 0, 1, &value), LOOM_OK);
    assert_int_equal(value, 20);
    loom_safetensors_close(file);
    scratch_remove(&folder);
}

/* As in transformers. */
static void a_single_file_goes_before_an_index(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_safetensors *file;
    write_shard(&folder, "1.safetensors", "a", 10);
    write_shard(&folder, "model.safetensors", "c", 30);
    assert_int_equal(open_set(&folder, "{\"weight_map\":{\"a\":\"1.safetensors\"}}", &file), LOOM_OK);
    assert_true(loom_safetensors_has(file, "c") && !loom_safetensors_has(file, "a"));
    loom_safetensors_close(file);
    scratch_remove(&folder);
}

static void refuse_single(const scratch *folder, const char *because) {
    loom_safetensors *file;
    assert_int_not_equal(loom_safetensors_open(folder->path, &file), LOOM_OK);
    if (!strstr(loom_error_message(), because))
        fail_msg("found '%s', expected '%s'", loom_error_message(), because);
    assert_int_equal(remove(scratch_file(folder, "model.safetensors")), 0);
}

static void what_is_there_and_no_file_is_named(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *single = scratch_file(&folder, "model.safetensors");
    assert_int_equal(mkfifo(single, 0600), 0);
    refuse_single(&folder, "model.safetensors: is no regular file");
    assert_int_equal(mkdir(scratch_file(&folder, "model.safetensors"), 0700), 0);
    refuse_single(&folder, "model.safetensors: is a directory");
    assert_int_equal(symlink("model.safetensors", scratch_file(&folder, "model.safetensors")), 0);
    refuse_single(&folder, "Too many levels of symbolic links");
    assert_int_equal(symlink("nowhere", scratch_file(&folder, "model.safetensors")), 0);
    refuse_single(&folder, "model.safetensors: cannot be opened: No such file");
    scratch_remove(&folder);
}

static void refuse_set(const char *index, loom_status wanted, const char *part) {
    scratch folder = scratch_make();
    write_shard(&folder, "1.safetensors", "a", 10);
    write_shard(&folder, "2.safetensors", "b", 20);
    write_shard(&folder, "3.safetensors", "a", 30);
    loom_safetensors *file;
    loom_status status = open_set(&folder, index, &file);
    if (status != wanted || !strstr(loom_error_message(), part))
        fail_msg("%s '%s', expected %s '%s'", loom_status_name(status), loom_error_message(), loom_status_name(wanted),
            part);
    scratch_remove(&folder);
}

static void an_index_that_disagrees_with_its_shards_is_refused(void **state) {
    (void)state;
    refuse_set("{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"}}", LOOM_ERR_FORMAT, "'b'");
    refuse_set("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":\"2.safetensors\"}}",
        LOOM_ERR_FORMAT, "'c' names 2.safetensors, which does not have");
    refuse_set(
        "{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"1.safetensors\"}}", LOOM_ERR_FORMAT, "but the tensor is in");
    refuse_set("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"3.safetensors\"}}", LOOM_ERR_FORMAT, "is in");
    refuse_set("{\"weight_map\":{\"a\":\"4.safetensors\"}}", LOOM_ERR_NOT_FOUND, "4.safetensors");
    refuse_set("{\"weight_map\":[]}", LOOM_ERR_FORMAT, "weight_map");
    refuse_set("{\"weight_map\":{\"a\":7}}", LOOM_ERR_FORMAT, "no text");
    refuse_set("{\"weight_map\":", LOOM_ERR_FORMAT, "no JSON");
}

static void an_index_cannot_leave_its_directory(void **state) {
    (void)state;
    refuse_set("{\"weight_map\":{\"a\":\"../1.safetensors\"}}", LOOM_ERR_FORMAT, "same directory");
    refuse_set("{\"weight_map\":{\"a\":\"/etc/x.safetensors\"}}", LOOM_ERR_FORMAT, "same directory");
    refuse_set("{\"weight_map\":{\"a\":\"sub/1.safetensors\"}}", LOOM_ERR_FORMAT, "same directory");
    refuse_set("{\"weight_map\":{\"a\":\"passwd\"}}", LOOM_ERR_FORMAT, "same directory");
    refuse_set("{\"weight_map\":{\"a\":\"\"}}", LOOM_ERR_FORMAT, "same directory");
}

static void missing_files_and_folders_are_named(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_safetensors *file;
    assert_int_equal(loom_safetensors_open(scratch_file(&folder, "none.safetensors"), &file), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "none.safetensors"));
    assert_int_equal(loom_safetensors_open(folder.path, &file), LOOM_ERR_NOT_FOUND);
    write_shard(&folder, "model.safetensors", "a", 1);
    assert_int_equal(loom_safetensors_open(folder.path, &file), LOOM_OK);
    loom_safetensors_close(file);
    loom_safetensors_close(NULL);
    scratch_write(&folder, "empty.safetensors", "", 0);
    assert_int_equal(loom_safetensors_open(scratch_file(&folder, "empty.safetensors"), &file), LOOM_ERR_FORMAT);
    mkfifo(scratch_file(&folder, "pipe.safetensors"), 0600);
    assert_int_equal(loom_safetensors_open(scratch_file(&folder, "pipe.safetensors"), &file), LOOM_ERR_ARGUMENT);
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_file_opens),
        cmocka_unit_test(header_length_0_is_refused),
        cmocka_unit_test(header_length_7_is_refused),
        cmocka_unit_test(header_length_beyond_the_file_is_refused),
        cmocka_unit_test(header_length_2_to_63_is_refused),
        cmocka_unit_test(header_length_2_to_64_minus_1_is_refused),
        cmocka_unit_test(files_shorter_than_the_length_field_are_refused),
        cmocka_unit_test(overlapping_tensors_are_refused),
        cmocka_unit_test(two_tensors_at_one_place_are_refused),
        cmocka_unit_test(a_hole_between_tensors_is_refused),
        cmocka_unit_test(a_hole_before_the_first_tensor_is_refused),
        cmocka_unit_test(bytes_after_the_last_tensor_are_refused),
        cmocka_unit_test(reversed_offsets_are_refused),
        cmocka_unit_test(offsets_past_the_file_are_refused),
        cmocka_unit_test(a_span_that_is_not_shape_times_dtype_is_refused),
        cmocka_unit_test(a_product_that_overflows_is_refused),
        cmocka_unit_test(duplicate_names_are_refused),
        cmocka_unit_test(numbers_that_do_not_fit_are_refused),
        cmocka_unit_test(missing_and_unknown_fields_are_named),
        cmocka_unit_test(dtypes_of_the_format_that_we_lack_are_not_supported_yet),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(a_header_of_100_kilobytes_loads),
        cmocka_unit_test(empty_tensors_and_scalars_load),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_flipped_byte_opens_or_is_refused),
        cmocka_unit_test(what_is_written_is_read_back),
        cmocka_unit_test(an_unfinished_file_leaves_the_old_one),
        cmocka_unit_test(after_a_failed_write_nothing_is_published),
        cmocka_unit_test(out_of_memory_is_no_wrong_shape_and_no_bad_name),
        cmocka_unit_test(texts_that_are_no_utf8_are_refused_by_that_name),
        cmocka_unit_test(sizes_that_overflow_are_not_written),
        cmocka_unit_test(a_set_of_shards_opens_as_one),
        cmocka_unit_test(a_single_file_goes_before_an_index),
        cmocka_unit_test(what_is_there_and_no_file_is_named),
        cmocka_unit_test(an_index_that_disagrees_with_its_shards_is_refused),
        cmocka_unit_test(an_index_cannot_leave_its_directory),
        cmocka_unit_test(missing_files_and_folders_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
