/* Datasets beyond the golden cases: sizes past 32 bits, bad tokens, bad configurations, the fixed dataset,
 * preprocessing. */
#include "data/gpt.h"
#include "unit/format_scratch.h"

#include <fcntl.h>
#include <megaloom/safetensors.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* ---- Size ---- */

/* The indices of `count` sequences of `length` tokens each. */
static loom_status build(
    int64_t count, int32_t length, int64_t s, int64_t extra, int64_t samples, loom__gpt_indices *indices) {
    const loom__gpt_key key = {.end = count, .sequence_length = s, .seed = 1234, .samples = samples, .extra = extra};
    int32_t *lengths = malloc((size_t)count * sizeof *lengths);
    assert_non_null(lengths);
    for (int64_t i = 0; i < count; i++)
        lengths[i] = length;
    loom_status status = loom__gpt_indices_build(&key, lengths, 0, indices);
    free(lengths);
    return status;
}

static void build_2048(int64_t samples) {
    /* `samples` sequences of 2048 tokens, and one more token's worth to label the last */
    loom__gpt_indices indices;
    assert_int_equal(build(samples, 2048, 2048, 0, samples, &indices), LOOM_OK);
    assert_int_equal(indices.epochs, 1);
    assert_int_equal(indices.samples, samples);
    assert_int_equal(indices.sample_index[samples].place, samples - 1);
    assert_int_equal(indices.sample_index[samples].offset, 2048);
    loom__gpt_indices_free(&indices);
}

static void a_million_samples_of_2048_just_below_and_at_2_to_31_tokens_work(void **state) {
    (void)state;
    build_2048(1048575);
    build_2048(1048576);
}

static void offsets_and_epochs_past_32_bits_work(void **state) {
    (void)state;
    const int64_t s = (1 << 30) + 1;
    loom__gpt_indices indices;
    assert_int_equal(build(2, INT32_MAX, s, 1, 10, &indices), LOOM_OK); /* 10 * 2^30 tokens of two of 2^31 */
    assert_int_equal(indices.epochs, 3);
    for (int64_t i = 0; i <= indices.samples; i++) {
        int64_t reached = indices.sample_index[i].place * INT32_MAX + indices.sample_index[i].offset;
        assert_true(reached == i * s);
    }
    loom__gpt_indices_free(&indices);
    assert_int_equal(build(2, INT32_MAX, s, 1, INT64_MAX / 2, &indices), LOOM_ERR_CONFIG);
}

static void tokens_behind_the_first_4_gigabytes_are_read(void **state) {
    (void)state;
    scratch folder = scratch_make();
    /* A .bin that is a hole but for its end, described by hand: three sequences of 2^30 I32 tokens. */
    int descriptor = open(scratch_file(&folder, "set.bin"), O_CREAT | O_WRONLY, 0600);
    const int64_t each = 1 << 30, bytes = 3 * each * 4;
    const int32_t last = 77;
    if (descriptor < 0 || pwrite(descriptor, &last, 4, bytes - 4) != 4) {
        scratch_remove(&folder); /* a file system without holes or room */
        skip();
    }
    close(descriptor);
    unsigned char idx[34 + 3 * 12 + 2 * 8] = "MMIDIDX\0\0\1\0\0\0\0\0\0\0\4\3\0\0\0\0\0\0\0\2";
    const int32_t lengths[3] = {(int32_t)each, (int32_t)each, (int32_t)each};
    const int64_t pointers[3] = {0, 4 * each, 8 * each}, documents[2] = {0, 3};
    memcpy(idx + 34, lengths, 12);
    memcpy(idx + 46, pointers, 24);
    memcpy(idx + 70, documents, 16);
    scratch_write(&folder, "set.idx", idx, sizeof idx);
    loom_indexed *set;
    int64_t tokens[2];
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_OK);
    assert_int_equal(loom_indexed_tokens(set), 3 * each);
    assert_int_equal(loom_indexed_read(set, 2, each - 2, 2, tokens), LOOM_OK);
    assert_int_equal(tokens[0], 0);
    assert_int_equal(tokens[1], 77);
    loom_indexed_close(set);
    scratch_remove(&folder);
}

/* How many of the first epoch's ten samples are among the first ten of the order, when `samples` are asked. */
static int first_epoch_in_front(int64_t samples) {
    loom__gpt_indices indices;
    assert_int_equal(build(10, 10, 10, 0, samples, &indices), LOOM_OK);
    assert_int_equal(indices.epochs, 2);
    assert_int_equal(indices.samples, 20);
    int found = 0;
    for (int64_t i = 0; i < 10; i++)
        found += indices.shuffle_index[i] < 10;
    loom__gpt_indices_free(&indices);
    return found;
}

static void a_last_epoch_used_below_80_percent_is_shuffled_apart(void **state) {
    (void)state;
    assert_int_equal(first_epoch_in_front(11), 10);
    assert_int_equal(first_epoch_in_front(17), 10);
    assert_true(first_epoch_in_front(18) < 10);
    assert_true(first_epoch_in_front(20) < 10);
}

/* ---- Configurations ---- */

static void write_set(
    const scratch *folder, loom_dtype dtype, const int64_t *tokens, int64_t count, int64_t documents) {
    loom_indexed_writer *writer;
    assert_int_equal(loom_indexed_writer_create(scratch_file(folder, "set"), dtype, false, &writer), LOOM_OK);
    for (int64_t i = 0; i < documents; i++) {
        assert_int_equal(loom_indexed_writer_add_tokens(writer, tokens, count, 0), LOOM_OK);
        assert_int_equal(loom_indexed_writer_end_document(writer), LOOM_OK);
    }
    assert_int_equal(loom_indexed_writer_finish(writer), LOOM_OK);
    loom_indexed_writer_destroy(writer);
}

static loom_gpt_dataset_config all_of_it(int64_t s) {
    loom_gpt_dataset_config config = loom_gpt_dataset_config_default();
    config.sequence_length = s;
    config.split = "1";
    return config;
}

static void illegal_configurations_are_refused_by_name(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t tokens[5] = {1, 2, 3, 4, 5};
    write_set(&folder, LOOM_U16, tokens, 5, 4);
    loom_indexed *indexed;
    loom_dataset set;
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &indexed), LOOM_OK);
    loom_gpt_dataset_config config = all_of_it(0);
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "sequence length is 0"));
    config = all_of_it(4);
    config.seed = 4294967296;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    config = all_of_it(4);
    config.eod_mask_loss = true;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "eod_mask_loss"));
    config = all_of_it(4);
    config.samples = -2;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    config = all_of_it(4);
    config.which = LOOM_SPLIT_TEST;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "no share to test"));
    config.split = "98,1,1"; /* a share of no document */
    config.samples = 3;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "no token, but 3 samples are asked of them"));
    config.samples = -1;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_OK);
    assert_int_equal(set.length, 0);
    loom_dataset_destroy(&set);
    loom_dataset_destroy(&set);
    loom_indexed_close(indexed);
    scratch_remove(&folder);
}

static void empty_documents_only_are_no_endless_loop(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_set(&folder, LOOM_U16, NULL, 0, 4);
    loom_indexed *indexed;
    loom_dataset set;
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &indexed), LOOM_OK);
    loom_gpt_dataset_config config = all_of_it(4);
    config.samples = 1;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_ERR_CONFIG);
    loom_indexed_close(indexed);
    scratch_remove(&folder);
}

static void a_token_outside_the_vocabulary_is_named_when_read(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t tokens[5] = {1, 2, 300, 4, 5};
    write_set(&folder, LOOM_U16, tokens, 5, 2);
    loom_indexed *indexed;
    loom_dataset set;
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &indexed), LOOM_OK);
    loom_gpt_dataset_config config = all_of_it(4);
    config.vocab_size = 257;
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_OK);
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 4, false, &batch), LOOM_OK);
    loom_sample_row row = {batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, NULL};
    assert_int_equal(set.get(set.context, 0, &row), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "is 300, expected 0 to 256"));
    assert_int_equal(set.get(set.context, set.length, &row), LOOM_ERR_ARGUMENT);
    loom_batch_destroy(batch);
    loom_dataset_destroy(&set);
    loom_indexed_close(indexed);
    scratch_remove(&folder);
}

static void without_a_pad_token_byte_0_counts(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t tokens[5] = {0, 0, 7, 0, 256};
    write_set(&folder, LOOM_U16, tokens, 5, 1);
    loom_indexed *indexed;
    loom_dataset set;
    assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &indexed), LOOM_OK);
    loom_gpt_dataset_config config = all_of_it(4);
    assert_int_equal(loom_gpt_dataset_create(indexed, &config, &set), LOOM_OK);
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 4, false, &batch), LOOM_OK);
    loom_sample_row row = {batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, NULL};
    assert_int_equal(set.get(set.context, 0, &row), LOOM_OK);
    for (size_t i = 0; i < 4; i++) {
        assert_true(row.loss_mask[i] == 1.0f);
        assert_int_equal(row.labels[i], tokens[i + 1]);
    }
    loom_batch_destroy(batch);
    loom_dataset_destroy(&set);
    loom_indexed_close(indexed);
    scratch_remove(&folder);
}

static void splits_that_are_none_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"", " ", "0", "0,0,0", "1,2,3,4", "abc", "1.2.3", ".", "-1,2", "1e3,1", "nan",
        "inf", "98,x", "1111111111111111111111111111111111111111111111111111111111111111"};
    double shares[LOOM_SPLIT_COUNT][2];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        loom_error_clear();
        assert_int_equal(loom_data_split_parse(bad[i], shares), LOOM_ERR_CONFIG);
        assert_non_null(strstr(loom_error_message(), "98,1,1"));
    }
}

/* ---- Fixed ---- */

static const char *write_fixed(const scratch *folder, loom_dtype dtype, int dims, const int64_t *shape,
    const void *data, size_t bytes, const char *name) {
    const char *path = scratch_file(folder, "tokens.safetensors");
    loom_safetensors_writer *writer;
    assert_int_equal(loom_safetensors_writer_create(path, &writer), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_add(writer, name, dtype, dims, shape), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_write(writer, data, bytes), LOOM_OK);
    assert_int_equal(loom_safetensors_writer_finish(writer), LOOM_OK);
    loom_safetensors_writer_destroy(writer);
    return path;
}

static void fixed_tokens_are_replayed_in_order(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t shape[3] = {2, 3, 4};
    int32_t tokens[24];
    for (int i = 0; i < 24; i++)
        tokens[i] = i;
    const char *path = write_fixed(&folder, LOOM_I32, 3, shape, tokens, sizeof tokens, "tokens");
    loom_dataset set;
    int64_t global;
    assert_int_equal(loom_fixed_dataset_create(path, 24, &set, &global), LOOM_OK);
    assert_int_equal(global, 3);
    assert_int_equal(set.length, 6);
    assert_int_equal(set.sequence_length, 3);
    loom_data_loader_config config = loom_data_loader_config_default();
    config.global_batch_size = global;
    config.micro_batch_size = 3;
    loom_data_loader loader;
    loom_batch *batch;
    assert_int_equal(loom_data_loader_create(&set, &config, &loader), LOOM_OK);
    assert_int_equal(loom_batch_create(3, 3, true, &batch), LOOM_OK);
    for (int64_t step = 0; step < 2; step++) {
        assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
        for (int64_t r = 0; r < 3; r++)
            for (int64_t i = 0; i < 3; i++) {
                assert_int_equal(batch->tokens[3 * r + i], 12 * step + 4 * r + i);
                assert_int_equal(batch->labels[3 * r + i], 12 * step + 4 * r + i + 1);
                assert_true(batch->loss_mask[3 * r + i] == 1.0f);
                assert_int_equal(batch->document_start[3 * r + i], 0);
            }
    }
    assert_int_equal(loader.next(loader.context, batch), LOOM_END);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
    loom_dataset_destroy(&set);
    assert_int_equal(loom_fixed_dataset_create(path, 23, &set, NULL), LOOM_OK);
    loom_batch *one;
    assert_int_equal(loom_batch_create(1, 3, false, &one), LOOM_OK);
    loom_sample_row row = {one->tokens, one->labels, one->loss_mask, one->position_ids, NULL};
    assert_int_equal(set.get(set.context, 5, &row), LOOM_ERR_FORMAT); /* token 23 of a vocabulary of 23 */
    loom_batch_destroy(one);
    loom_dataset_destroy(&set);
    scratch_remove(&folder);
}

static void fixed_tokens_of_another_form_are_refused(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const int64_t flat[2] = {2, 4}, narrow[3] = {2, 4, 1}, good[3] = {1, 2, 4};
    const int32_t tokens[8] = {0};
    loom_dataset set;
    const char *path = write_fixed(&folder, LOOM_I32, 2, flat, tokens, 32, "tokens");
    assert_int_equal(loom_fixed_dataset_create(path, 0, &set, NULL), LOOM_ERR_FORMAT);
    write_fixed(&folder, LOOM_I32, 3, narrow, tokens, 32, "tokens");
    assert_int_equal(loom_fixed_dataset_create(path, 0, &set, NULL), LOOM_ERR_FORMAT);
    write_fixed(&folder, LOOM_F32, 3, good, tokens, 32, "tokens");
    assert_int_equal(loom_fixed_dataset_create(path, 0, &set, NULL), LOOM_ERR_ARGUMENT);
    write_fixed(&folder, LOOM_I32, 3, good, tokens, 32, "token");
    assert_int_equal(loom_fixed_dataset_create(path, 0, &set, NULL), LOOM_ERR_NOT_FOUND);
    scratch_remove(&folder);
}

static void mock_samples_are_walks_that_depend_on_seed_and_number_alone(void **state) {
    (void)state;
    enum { S = 64, V = 17 };
    loom_dataset set, same, other;
    assert_int_equal(loom_mock_dataset_create(S, V, 5, 10, &set), LOOM_OK);
    assert_int_equal(loom_mock_dataset_create(S, V, 5, 99, &same), LOOM_OK);
    assert_int_equal(loom_mock_dataset_create(S, V, 6, 10, &other), LOOM_OK);
    loom_batch *a, *b;
    assert_int_equal(loom_batch_create(1, S, false, &a), LOOM_OK);
    assert_int_equal(loom_batch_create(1, S, false, &b), LOOM_OK);
    loom_sample_row x = {a->tokens, a->labels, a->loss_mask, a->position_ids, NULL};
    loom_sample_row y = {b->tokens, b->labels, b->loss_mask, b->position_ids, NULL};
    assert_int_equal(set.get(set.context, 3, &x), LOOM_OK);
    assert_int_equal(same.get(same.context, 3, &y), LOOM_OK);
    assert_memory_equal(x.tokens, y.tokens, S * sizeof *x.tokens);
    assert_int_equal(other.get(other.context, 3, &y), LOOM_OK);
    assert_memory_not_equal(x.tokens, y.tokens, S * sizeof *x.tokens);
    for (int64_t i = 0; i < S; i++) {
        int64_t step = (x.labels[i] - x.tokens[i] + V) % V;
        assert_true(x.tokens[i] >= 0 && x.tokens[i] < V && step >= 1 && step <= 3 && x.loss_mask[i] == 1.0f);
        assert_true(i + 1 == S || x.tokens[i + 1] == x.labels[i]);
    }
    assert_int_equal(set.get(set.context, -1, &x), LOOM_OK);
    assert_true(x.loss_mask[0] == 0.0f && x.loss_mask[S - 1] == 0.0f);
    assert_int_equal(loom_mock_dataset_create(S, 0, 5, 10, &set), LOOM_ERR_ARGUMENT);
    loom_batch_destroy(a);
    loom_batch_destroy(b);
    loom_dataset_destroy(&set);
    loom_dataset_destroy(&same);
    loom_dataset_destroy(&other);
}

/* ---- Text ---- */

typedef struct progress {
    int calls;
    int64_t documents, done, total;
} progress;

static void note(void *context, int64_t documents, int64_t done, int64_t total) {
    progress *seen = context;
    *seen = (progress){seen->calls + 1, documents, done, total};
}

static void mock_samples_beyond_the_last_are_refused(void **state) {
    (void)state;
    loom_dataset set;
    int64_t tokens[3], labels[3], positions[3];
    float mask[3];
    const loom_sample_row row = {.tokens = tokens, .labels = labels, .loss_mask = mask, .position_ids = positions};
    assert_int_equal(loom_mock_dataset_create(3, 10, 1, 2, &set), LOOM_OK);
    assert_int_equal(set.get(set.context, 1, &row), LOOM_OK);
    assert_int_equal(set.get(set.context, 2, &row), LOOM_ERR_ARGUMENT);
    assert_string_equal(loom_error_message(), "mock dataset: sample 2 asked, there are 2");
    assert_int_equal(set.get(set.context, -1, &row), LOOM_OK);
    assert_true(mask[0] == 0);
    loom_dataset_destroy(&set);
}

static void texts_become_documents(void **state) {
    (void)state;
    scratch folder = scratch_make();
    mkdir(scratch_file(&folder, "text"), 0700);
    mkdir(scratch_file(&folder, "text/b"), 0700);
    scratch_write(&folder, "text/d.pod", "", 0);                    /* empty: skipped and counted */
    scratch_write(&folder, "text/a.pod", "ab", 2);                  /* no final newline */
    scratch_write(&folder, "text/c.pod", "\xe2\x80\x8d", 3);        /* only U+200D */
    scratch_write(&folder, "text/b/z.pod", "\xff\xfe\0\x80x\n", 6); /* invalid UTF-8, a NUL */
    scratch_write(&folder, "text/skipped.txt", "no", 2);
    scratch_write(&folder, "text/.hidden.pod", "no", 2);
    progress seen = {0};
    const char *inputs[1] = {scratch_file(&folder, "text")};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s/set", folder.path);
    const loom_data_preprocess_config config = {.inputs = inputs,
        .input_count = 1,
        .suffix = ".pod",
        .append_eod = true,
        .output_prefix = prefix,
        .progress = note,
        .progress_context = &seen};
    loom_data_preprocess_result result;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_OK);
    assert_int_equal(result.documents, 3);
    assert_int_equal(result.empty, 1);
    assert_int_equal(result.tokens, 3 + 7 + 4);
    assert_int_equal(result.bytes, 11);
    assert_int_equal(result.dtype, LOOM_U16);
    assert_true(seen.calls >= 1 && seen.documents == 3 && seen.done == 11 && seen.total == 11);
    loom_indexed *set;
    int64_t tokens[8];
    char text[8];
    size_t bytes;
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_OK);
    assert_int_equal(loom_indexed_tokens(set) * 2, scratch_size(&folder, "set.bin"));
    assert_int_equal(loom_indexed_length(set, 0), 3); /* a, b/z, c: the order of their paths */
    assert_int_equal(loom_indexed_length(set, 1), 7);
    assert_int_equal(loom_indexed_length(set, 2), 4);
    assert_int_equal(loom_indexed_read(set, 1, 0, 7, tokens), LOOM_OK);
    assert_int_equal(tokens[0], 255);
    assert_int_equal(tokens[6], 256);
    const loom_tokenizer *tokenizer = loom_tokenizer_byte();
    assert_int_equal(tokenizer->decode(NULL, tokens, 7, text, sizeof text, &bytes), LOOM_OK);
    assert_int_equal(bytes, 6);
    assert_memory_equal(text, "\xff\xfe\0\x80x\n", 6);
    loom_indexed_close(set);
    scratch_remove(&folder);
}

static void missing_or_textless_inputs_leave_nothing(void **state) {
    (void)state;
    scratch folder = scratch_make();
    const char *inputs[1] = {scratch_file(&folder, "none")};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s/set", folder.path);
    loom_data_preprocess_config config = {.inputs = inputs, .input_count = 1, .output_prefix = prefix};
    loom_data_preprocess_result result;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_NOT_FOUND);
    inputs[0] = folder.path;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_NOT_FOUND);
    config.input_count = 0;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_ARGUMENT);
    assert_int_equal(rmdir(folder.path), 0);
}

static void links_in_a_loop_end_with_an_error(void **state) {
    (void)state;
    scratch folder = scratch_make();
    assert_int_equal(symlink(".", scratch_file(&folder, "again")), 0);
    const char *inputs[1] = {folder.path};
    const loom_data_preprocess_config config = {
        .inputs = inputs, .input_count = 1, .output_prefix = "/nonexistent/set"};
    loom_data_preprocess_result result;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_IO);
    scratch_remove(&folder);
}

static void the_byte_tokenizer_refuses_what_is_no_byte(void **state) {
    (void)state;
    const loom_tokenizer *tokenizer;
    assert_int_equal(loom_tokenizer_find("byte", &tokenizer), LOOM_OK);
    assert_int_equal(tokenizer->vocab_size, 257);
    assert_int_equal(tokenizer->eod, 256);
    assert_int_equal(loom_tokenizer_find("gpt2", &tokenizer), LOOM_ERR_UNSUPPORTED);
    const int64_t bad[1] = {257};
    int64_t tokens[1];
    char text[2];
    size_t count;
    assert_int_equal(tokenizer->decode(NULL, bad, 1, text, 2, &count), LOOM_ERR_ARGUMENT);
    assert_int_equal(tokenizer->encode(NULL, "ab", 2, tokens, 1, &count), LOOM_ERR_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_million_samples_of_2048_just_below_and_at_2_to_31_tokens_work),
        cmocka_unit_test(offsets_and_epochs_past_32_bits_work),
        cmocka_unit_test(tokens_behind_the_first_4_gigabytes_are_read),
        cmocka_unit_test(a_last_epoch_used_below_80_percent_is_shuffled_apart),
        cmocka_unit_test(illegal_configurations_are_refused_by_name),
        cmocka_unit_test(empty_documents_only_are_no_endless_loop),
        cmocka_unit_test(a_token_outside_the_vocabulary_is_named_when_read),
        cmocka_unit_test(without_a_pad_token_byte_0_counts),
        cmocka_unit_test(splits_that_are_none_are_refused),
        cmocka_unit_test(fixed_tokens_are_replayed_in_order),
        cmocka_unit_test(fixed_tokens_of_another_form_are_refused),
        cmocka_unit_test(mock_samples_are_walks_that_depend_on_seed_and_number_alone),
        cmocka_unit_test(mock_samples_beyond_the_last_are_refused),
        cmocka_unit_test(texts_become_documents),
        cmocka_unit_test(missing_or_textless_inputs_leave_nothing),
        cmocka_unit_test(links_in_a_loop_end_with_an_error),
        cmocka_unit_test(the_byte_tokenizer_refuses_what_is_no_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
