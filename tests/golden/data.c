/* Golden data numbers: indexed datasets, GPT datasets, splits, samplers and numpy's shuffles against Megatron-Core,
 * NeMo and numpy. Every case of every file is run; what is not built yet must be refused as such and is counted apart.
 */
#include "data/gpt.h"
#include "data/mt19937.h"
#include "golden/data_cases.h"

#include <megaloom/config.h>
#include <megaloom/data.h>
#include <megaloom/safetensors.h>
#include <unistd.h>

static void prefix_of(char *out, size_t size, const char *folder, const char *file) {
    snprintf(out, size, "%s/data/%s/%s", golden_root(), folder, file);
}

/* ---- indexed.json ---- */

static void check_get(const loom_indexed *set, const json_t *row, const char *id) {
    int64_t sequence = at(row, 0), first = at(row, 1), length = loom_indexed_length(set, sequence);
    const json_t *count_given = json_array_get(row, 2), *values = json_array_get(row, 3);
    int64_t count = json_is_null(count_given) ? length - first : json_integer_value(count_given);
    expect(count == size_of(values));
    if (loom_indexed_dtype(set) == LOOM_F64) {
        for (int64_t i = 0; i < count; i++) {
            double value;
            memcpy(&value, (const char *)loom_indexed_data(set, sequence) + 8 * (first + i), 8);
            expect(value == json_number_value(json_array_get(values, (size_t)i)));
        }
        return;
    }
    int64_t *tokens = calloc((size_t)count + 1, sizeof *tokens);
    assert_ok(loom_indexed_read(set, sequence, first, count, tokens));
    for (int64_t i = 0; i < count; i++)
        expect(tokens[i] == at(values, i));
    free(tokens);
}

static void check_same_file(const char *a, const char *b, const char *suffix, const char *id) {
    char path_a[4200], path_b[4200];
    snprintf(path_a, sizeof path_a, "%s%s", a, suffix);
    snprintf(path_b, sizeof path_b, "%s%s", b, suffix);
    FILE *x = fopen(path_a, "rb"), *y = fopen(path_b, "rb");
    expect(x && y);
    int c, d;
    do {
        c = getc(x);
        d = getc(y);
        expect(c == d);
    } while (c != EOF);
    fclose(x);
    fclose(y);
    unlink(path_b);
}

/* Writing what was read gives the reference's bytes. */
static void check_rewritten(const loom_indexed *set, const char *prefix, const char *id) {
    char copy[] = "/tmp/loom-golden-XXXXXX";
    int descriptor = mkstemp(copy);
    expect(descriptor >= 0);
    close(descriptor);
    loom_indexed_writer *writer;
    assert_ok(loom_indexed_writer_create(copy, loom_indexed_dtype(set), loom_indexed_multimodal(set), &writer));
    for (int64_t d = 0; d < loom_indexed_documents(set); d++) {
        for (int64_t i = loom_indexed_document(set, d); i < loom_indexed_document(set, d + 1); i++)
            assert_ok(loom_indexed_writer_add(
                writer, loom_indexed_data(set, i), loom_indexed_length(set, i), loom_indexed_mode(set, i)));
        assert_ok(loom_indexed_writer_end_document(writer));
    }
    assert_ok(loom_indexed_writer_finish(writer));
    loom_indexed_writer_destroy(writer);
    check_same_file(prefix, copy, ".idx", id);
    check_same_file(prefix, copy, ".bin", id);
    unlink(copy);
}

/* What the reference joined, joined again, gives the reference's bytes. */
static void check_merged(const json_t *from, const char *prefix, const char *id) {
    enum { MOST = 8 };
    char paths[MOST][4096], copy[] = "/tmp/loom-golden-XXXXXX";
    const char *inputs[MOST];
    expect(size_of(from) >= 1 && size_of(from) <= MOST);
    for (int64_t i = 0; i < size_of(from); i++) {
        prefix_of(paths[i], sizeof paths[i], "indexed", json_string_value(json_array_get(from, (size_t)i)));
        inputs[i] = paths[i];
    }
    int descriptor = mkstemp(copy);
    expect(descriptor >= 0);
    close(descriptor);
    assert_ok(loom_indexed_merge(inputs, size_of(from), copy));
    check_same_file(prefix, copy, ".idx", id);
    check_same_file(prefix, copy, ".bin", id);
    unlink(copy);
}

static void run_indexed(const json_t *entry, const char *id) {
    char prefix[4096];
    prefix_of(prefix, sizeof prefix, "indexed", golden_string(entry, "file", "?"));
    loom_indexed *set;
    assert_ok(loom_indexed_open(prefix, &set));
    const json_t *lengths = json_object_get(entry, "sequence_lengths"),
                 *pointers = json_object_get(entry, "sequence_pointers"),
                 *documents = json_object_get(entry, "document_indices"), *modes = json_object_get(entry, "modes");
    static const char *const names[] = {"", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"};
    static const loom_dtype dtypes[] = {
        LOOM_DTYPE_COUNT, LOOM_U8, LOOM_I8, LOOM_I16, LOOM_I32, LOOM_I64, LOOM_F64, LOOM_F32, LOOM_U16};
    for (size_t i = 1; i < sizeof names / sizeof *names; i++)
        expect((strcmp(names[i], golden_string(entry, "dtype", "")) == 0) == (loom_indexed_dtype(set) == dtypes[i]));
    expect(loom_indexed_sequences(set) == size_of(lengths));
    expect(loom_indexed_documents(set) == size_of(documents) - 1);
    expect(loom_indexed_multimodal(set) == (golden_int(entry, "multimodal", 0) != 0));
    for (int64_t i = 0; i < size_of(lengths); i++) {
        expect(loom_indexed_length(set, i) == at(lengths, i));
        expect(loom_indexed_pointer(set, i) == at(pointers, i));
        expect(loom_indexed_mode(set, i) == (modes ? at(modes, i) : 0));
    }
    for (int64_t i = 0; i < size_of(documents); i++)
        expect(loom_indexed_document(set, i) == at(documents, i));
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(entry, "get"), i, row) check_get(set, row, id);
    check_rewritten(set, prefix, id);
    if (json_object_get(entry, "merged_from"))
        check_merged(json_object_get(entry, "merged_from"), prefix, id);
    loom_indexed_close(set);
    ran++;
}

static void indexed_datasets_read_and_write_as_megatron(void **state) {
    (void)state;
    each_case("indexed.json", run_indexed);
}

static void run_bad(const json_t *entry, const char *id) {
    char prefix[4096];
    prefix_of(prefix, sizeof prefix, "indexed_bad", golden_string(entry, "file", "?"));
    loom_indexed *set;
    loom_error_clear();
    expect(loom_indexed_open(prefix, &set) == LOOM_ERR_FORMAT);
    expect(strstr(loom_error_message(), prefix));
    expect(strstr(loom_error_message(), "expected") || strstr(loom_error_message(), "wanted"));
    ran++;
}

static void damaged_indexed_datasets_are_refused_at_open(void **state) {
    (void)state;
    each_case("indexed_bad.json", run_bad);
}

/* ---- gpt.json ---- */

static bool option(const json_t *entry, const char *name, bool otherwise) {
    return golden_int(json_object_get(entry, "options"), name, otherwise) != 0;
}

static loom_gpt_dataset_config gpt_config(const json_t *entry, loom_split which) {
    loom_gpt_dataset_config config = loom_gpt_dataset_config_default();
    const json_t *asked = json_array_get(json_object_get(entry, "sizes"), which);
    config.sequence_length = golden_int(entry, "seq_length", 0);
    config.seed = golden_int(entry, "seed", 0);
    config.split = golden_string(entry, "split", "");
    config.which = which;
    config.samples = json_is_integer(asked) ? json_integer_value(asked) : -1;
    config.add_extra_token_to_sequence = option(entry, "add_extra_token_to_sequence", true);
    config.drop_last_partial_validation_sequence = option(entry, "drop_last_partial_validation_sequence", true);
    config.reset_position_ids = option(entry, "reset_position_ids", false);
    config.reset_attention_mask = option(entry, "reset_attention_mask", false);
    config.eod_mask_loss = option(entry, "eod_mask_loss", false);
    config.eod = golden_int(entry, "eod", -1);
    config.pad = golden_int(entry, "pad", -1);
    return config;
}

static void check_sample(const loom_dataset *set, const json_t *sample, const char *id) {
    int64_t s = set->sequence_length;
    loom_batch *batch;
    assert_ok(loom_batch_create(1, s, true, &batch));
    loom_sample_row row = {batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, batch->document_start};
    assert_ok(set->get(set->context, golden_int(sample, "i", -1), &row));
    const json_t *tokens = json_object_get(sample, "tokens"), *labels = json_object_get(sample, "labels"),
                 *positions = json_object_get(sample, "position_ids"),
                 *attention = json_object_get(sample, "attention_mask");
    const char *mask = golden_string(sample, "loss_mask", "");
    expect(size_of(tokens) == s && (int64_t)strlen(mask) == s);
    for (int64_t i = 0; i < s; i++) {
        expect(row.tokens[i] == at(tokens, i));
        expect(row.labels[i] == at(labels, i));
        expect((row.loss_mask[i] == 1.0f) == (mask[i] == '1') && (row.loss_mask[i] == 0.0f) == (mask[i] == '0'));
        expect(row.position_ids[i] == at(positions, i));
        const char *seen = attention ? json_string_value(json_array_get(attention, (size_t)i)) : NULL;
        for (int64_t j = 0; seen && j < s; j++)
            expect((seen[j] == '0') == (j <= i && j >= row.document_start[i]));
    }
    assert_ok(set->get(set->context, -1, &row));
    for (int64_t i = 0; i < s; i++)
        expect(row.loss_mask[i] == 0.0f);
    loom_batch_destroy(batch);
}

static void check_dataset(const loom_dataset *set, const json_t *wanted, const char *id) {
    const loom__gpt_indices *indices = loom__gpt_dataset_indices(set);
    const json_t *documents = json_object_get(wanted, "documents"), *order = json_object_get(wanted, "document_index"),
                 *cuts = json_object_get(wanted, "sample_index"), *shuffle = json_object_get(wanted, "shuffle_index");
    expect(set->length == golden_int(wanted, "length", -1));
    expect(indices->first == at(documents, 0) && indices->end == at(documents, 1));
    expect(indices->documents == size_of(order));
    for (int64_t i = 0; i < indices->documents; i++)
        expect(indices->document_index[i] == at(order, i));
    expect(2 * (indices->samples + 1) == size_of(cuts) && indices->samples == size_of(shuffle));
    for (int64_t i = 0; i <= indices->samples; i++) {
        expect(indices->sample_index[i].place == at(cuts, 2 * i));
        expect(indices->sample_index[i].offset == at(cuts, 2 * i + 1));
    }
    for (int64_t i = 0; i < indices->samples; i++)
        expect(indices->shuffle_index[i] == at(shuffle, i));
    size_t i;
    json_t *sample;
    json_array_foreach(json_object_get(wanted, "samples"), i, sample) check_sample(set, sample, id);
}

static void run_gpt(const json_t *entry, const char *id) {
    static const char *const names[] = {"train", "valid", "test"};
    char prefix[4096];
    prefix_of(prefix, sizeof prefix, "indexed", golden_string(entry, "dataset", "?"));
    loom_indexed *indexed;
    assert_ok(loom_indexed_open(prefix, &indexed));
    int refused = 0;
    for (int which = 0; which < LOOM_SPLIT_COUNT; which++) {
        loom_gpt_dataset_config config = gpt_config(entry, (loom_split)which);
        loom_dataset set;
        loom_status status = loom_gpt_dataset_create(indexed, &config, &set);
        const json_t *wanted = json_object_get(entry, names[which]);
        if (golden_int(entry, "error", 0)) {
            expect(status == LOOM_OK || status == LOOM_ERR_CONFIG);
            refused += status != LOOM_OK;
        } else if (!json_is_object(wanted)) {
            expect(status == LOOM_ERR_NOT_FOUND);
        } else {
            assert_ok(status);
            check_dataset(&set, wanted, id);
        }
        if (status == LOOM_OK)
            loom_dataset_destroy(&set);
    }
    expect((refused > 0) == (golden_int(entry, "error", 0) != 0));
    loom_indexed_close(indexed);
    ran++;
}

static void gpt_datasets_equal_megatrons(void **state) {
    (void)state;
    each_case("gpt.json", run_gpt);
}

static void run_kept_mask(const json_t *entry, const char *id) {
    char prefix[4096];
    prefix_of(prefix, sizeof prefix, "indexed", golden_string(entry, "dataset", "?"));
    loom_indexed *indexed;
    assert_ok(loom_indexed_open(prefix, &indexed));
    const json_t *wanted = json_object_get(entry, "true_loss_tokens");
    const json_t *first = json_object_get(entry, "padded");
    /* The reference's fault is one of the read order: any order must give the same. The fault shows where the valid
     * split keeps its padded sample. */
    loom_gpt_dataset_config config = gpt_config(entry, LOOM_SPLIT_VALID);
    config.pad = 0;
    config.drop_last_partial_validation_sequence = false;
    loom_dataset set;
    assert_ok(loom_gpt_dataset_create(indexed, &config, &set));
    expect(set.length == size_of(wanted));
    loom_batch *batch;
    assert_ok(loom_batch_create(1, set.sequence_length, false, &batch));
    loom_sample_row row = {batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, NULL};
    assert_ok(set.get(set.context, at(first, 0), &row));
    for (int64_t sample = 0; sample < set.length; sample++) {
        assert_ok(set.get(set.context, sample, &row));
        int64_t counted = 0;
        for (int64_t i = 0; i < set.sequence_length; i++)
            counted += row.loss_mask[i] == 1.0f;
        expect(counted == at(wanted, sample));
    }
    loom_batch_destroy(batch);
    loom_dataset_destroy(&set);
    loom_indexed_close(indexed);
    ran++;
}

static void a_padded_sample_masks_nothing_in_later_samples(void **state) {
    (void)state;
    each_case("gpt_kept_mask.json", run_kept_mask);
}

/* ---- split.json ---- */

static void check_shares(double shares[LOOM_SPLIT_COUNT][2], const json_t *entry, const char *id) {
    const json_t *matrix = json_object_get(entry, "matrix");
    for (size_t i = 0; i < LOOM_SPLIT_COUNT; i++) {
        const json_t *pair = json_array_get(matrix, i);
        double begin = -1.0, end = -1.0;
        if (json_is_array(pair)) {
            begin = strtod(json_string_value(json_array_get(pair, 0)), NULL);
            end = strtod(json_string_value(json_array_get(pair, 1)), NULL);
        }
        expect(shares[i][0] == begin && shares[i][1] == end);
    }
    const char *count;
    json_t *bounds;
    json_object_foreach(json_object_get(entry, "bounds"), count, bounds) {
        for (size_t i = 0; i < LOOM_SPLIT_COUNT; i++) {
            int64_t first, end;
            loom_data_split_bounds(shares[i], strtoll(count, NULL, 10), &first, &end);
            const json_t *wanted = json_array_get(bounds, i);
            expect(json_is_null(wanted) ? first == 0 && end == 0 : first == at(wanted, 0) && end == at(wanted, 1));
        }
    }
}

static void run_split(const json_t *entry, const char *id) {
    double shares[LOOM_SPLIT_COUNT][2];
    ran++;
    if (strcmp(golden_string(entry, "what", ""), "two_vectors") == 0) {
        double given[2][LOOM_SPLIT_COUNT];
        for (size_t i = 0; i < LOOM_SPLIT_COUNT; i++) {
            given[0][i] = json_number_value(json_array_get(json_object_get(entry, "a"), i));
            given[1][i] = json_number_value(json_array_get(json_object_get(entry, "b"), i));
        }
        assert_ok(loom_data_split_intersect(given[0], given[1], shares));
        check_shares(shares, entry, id);
        return;
    }
    loom_status status = loom_data_split_parse(golden_string(entry, "split", ""), shares);
    if (golden_int(entry, "error", 0)) {
        expect(status == LOOM_ERR_CONFIG);
        return;
    }
    assert_ok(status);
    check_shares(shares, entry, id);
}

static void splits_equal_megatrons(void **state) {
    (void)state;
    each_case("split.json", run_split);
}

/* ---- samplers.json ---- */

static void check_batches(
    const loom_data_sampler *sampler, loom_data_sampler_config *config, const json_t *ranks, const char *id) {
    int64_t rows =
        sampler->global_batches ? config->global_batch_size / config->data_parallel_size : config->micro_batch_size;
    int64_t *samples = calloc((size_t)rows, sizeof *samples);
    for (int64_t rank = 0; rank < size_of(ranks); rank++) {
        const json_t *batches = json_array_get(ranks, (size_t)rank);
        config->data_parallel_rank = rank;
        int64_t length, count;
        assert_ok(sampler->length(sampler->context, config, &length));
        expect(length == size_of(batches));
        for (int64_t b = 0; b < length; b++) {
            const json_t *wanted = json_array_get(batches, (size_t)b);
            assert_ok(sampler->batch(sampler->context, config, b, samples, &count));
            expect(count == size_of(wanted));
            for (int64_t i = 0; i < count; i++)
                expect(samples[i] == at(wanted, i));
        }
        expect(sampler->batch(sampler->context, config, length, samples, &count) != LOOM_OK);
    }
    free(samples);
}

static void run_sampler(const json_t *entry, const char *id) {
    const loom_data_sampler *sampler;
    assert_ok(loom_data_sampler_find(golden_string(entry, "kind", ""), &sampler));
    loom_data_sampler_config config = {.total_samples = golden_int(entry, "total", 0),
        .consumed_samples = golden_int(entry, "consumed", 0),
        .micro_batch_size = golden_int(entry, "mbs", 0),
        .global_batch_size = golden_int(entry, "gbs", 0),
        .data_parallel_rank = golden_int(entry, "rank", 0),
        .data_parallel_size = golden_int(entry, "dp", 0),
        .drop_last = golden_int(entry, "drop_last", 0) != 0,
        .pad_samples_to_global_batch_size = golden_int(entry, "pad", 0) != 0,
        .seed = golden_int(entry, "seed", 0)};
    /* In a ramp-up the reference leaves the size to the calculator, and does not check it. */
    if (json_is_array(json_object_get(entry, "rampup")) && !sampler->global_batches &&
        !config.pad_samples_to_global_batch_size)
        config.global_batch_size = 0;
    if (golden_int(entry, "error", 0) || golden_int(entry, "reference_wrong", 0)) {
        int64_t length;
        expect(sampler->length(sampler->context, &config, &length) == LOOM_ERR_CONFIG);
    } else {
        const json_t *ranks = json_object_get(entry, "batches");
        expect(size_of(ranks) == config.data_parallel_size);
        check_batches(sampler, &config, ranks, id);
        if (sampler->order) { /* an order that is kept gives the same */
            int64_t *order;
            config.data_parallel_rank = 0;
            assert_ok(sampler->order(sampler->context, &config, &order));
            config.order = order;
            check_batches(sampler, &config, ranks, id);
            free(order);
        }
    }
    ran++;
}

static void samplers_equal_nemos(void **state) {
    (void)state;
    each_case("samplers.json", run_sampler);
}

/* ---- microbatches.json ---- */

/* [consumed, global batch, running global batch, microbatches] */
static void check_step(const loom_data_step_config *config, const json_t *row, const char *id) {
    int64_t round = config->micro_batch_size * config->data_parallel_size;
    loom_data_step step;
    loom_status status = loom_data_step_at(config, at(row, 0), &step);
    if (at(row, 3) < 1 || at(row, 2) % round != 0) { /* the reference was asked without its checks */
        expect(status == LOOM_ERR_CONFIG);
        return;
    }
    assert_ok(status);
    expect(step.global_batch_size == at(row, 1));
    expect(step.running_global_batch_size == at(row, 2));
    expect(step.microbatches == at(row, 3));
}

/* A list that is not three numbers is refused where run files are read. */
static void check_list_refused(const json_t *rampup, const char *id) {
    char *list = json_dumps(rampup, 0), text[256];
    snprintf(text, sizeof text, "data.rampup_batch_size=%s", list);
    const char *const overrides[] = {"data.kind=mock", "data.micro_batch_size=2", "data.global_batch_size=16", text,
        "steps=1", "model.architecture=gpt2", "model.num_layers=1", "model.hidden_size=8",
        "model.num_attention_heads=1", "model.seq_length=8", "model.vocab_size=8"};
    loom_run_config *config = NULL;
    loom_status status = loom_run_config_load(NULL, overrides, sizeof overrides / sizeof *overrides, &config);
    if (status == LOOM_OK) {
        status = loom_run_config_check(config, 2);
        loom_run_config_destroy(config);
    }
    expect(status == LOOM_ERR_CONFIG && strstr(loom_error_message(), "rampup_batch_size"));
    free(list);
}

static void run_microbatches(const json_t *entry, const char *id) {
    const json_t *rampup = json_object_get(entry, "rampup"), *trace = json_object_get(entry, "trace"), *row;
    loom_data_step_config config = {.global_batch_size = golden_int(entry, "gbs", 0),
        .micro_batch_size = golden_int(entry, "mbs", 0),
        .data_parallel_size = golden_int(entry, "dp", 0),
        .decrease_batch_size_if_needed = golden_int(entry, "decrease_if_needed", 0) != 0};
    ran++;
    if (json_is_array(rampup) && size_of(rampup) != 3) {
        check_list_refused(rampup, id);
        return;
    }
    for (int64_t i = 0; i < 3; i++)
        config.rampup_batch_size[i] = at(rampup, i);
    bool in_start = strcmp(golden_string(entry, "where", ""), "start") == 0;
    expect(!in_start || loom_data_step_check(&config) == LOOM_ERR_CONFIG);
    size_t i;
    json_array_foreach(trace, i, row) check_step(&config, row, id);
    json_array_foreach(json_object_get(entry, "probe"), i, row) check_step(&config, row, id);
    bool stuck = size_of(trace) > 0 && at(json_array_get(trace, 0), 3) < 1;
    expect((loom_data_step_check(&config) == LOOM_OK) == (!golden_int(entry, "error", 0) && !stuck));
    /* Steps in all, counted one by one and in stretches. */
    for (int64_t steps = 1; !stuck && steps < size_of(trace); steps++) {
        int64_t samples;
        assert_ok(loom_data_step_samples(&config, 0, steps, &samples));
        expect(samples == at(json_array_get(trace, (size_t)steps), 0));
    }
}

static void steps_have_the_sizes_of_megatrons(void **state) {
    (void)state;
    each_case("microbatches.json", run_microbatches);
}

/* ---- numpy_random.json ---- */

static uint64_t checksum(const int64_t *values, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (uint64_t)(i + 1) * (uint64_t)values[i];
    return sum;
}

static void check_shuffle(
    loom__mt19937 *generator, const json_t *entry, const char *list, const char *sum, const char *id) {
    int64_t n = golden_int(entry, "n", -1);
    int64_t *values = calloc((size_t)n + 1, sizeof *values);
    for (int64_t i = 0; i < n; i++)
        values[i] = i;
    loom__mt19937_shuffle(generator, values, n);
    const json_t *wanted = json_object_get(entry, list);
    expect(json_is_array(wanted));
    for (int64_t i = 0; i < size_of(wanted); i++)
        expect(values[i] == at(wanted, i));
    expect(checksum(values, n) == strtoull(golden_string(entry, sum, "x"), NULL, 10));
    free(values);
}

static void run_random(const json_t *entry, const char *id) {
    const char *what = golden_string(entry, "what", "");
    loom__mt19937 generator;
    loom__mt19937_seed(&generator, (uint32_t)golden_int(entry, "seed", 0));
    if (strcmp(what, "raw32") == 0) {
        const json_t *values = json_object_get(entry, "values");
        for (int64_t i = 0; i < size_of(values); i++)
            expect(loom__mt19937_next(&generator) == at(values, i));
    } else if (strcmp(what, "shuffle_twice") == 0) {
        check_shuffle(&generator, entry, "first", "first_sum", id);
        check_shuffle(&generator, entry, "second", "second_sum", id);
    } else if (strcmp(what, "permutation") == 0) {
        check_shuffle(&generator, entry, "values", "sum", id);
        const json_t *next = json_object_get(entry, "next_raw32");
        for (int64_t i = 0; i < size_of(next); i++)
            expect(loom__mt19937_next(&generator) == at(next, i));
    } else { /* doubles: no dataset of this version draws any */
        left_out++;
        return;
    }
    ran++;
}

static void shuffles_equal_numpys(void **state) {
    (void)state;
    each_case("numpy_random.json", run_random);
}

/* ---- torch_random.json ---- */

static void run_torch(const json_t *entry, const char *id) {
    if (strcmp(golden_string(entry, "what", ""), "randperm") != 0) { /* floats: no dataset of this version draws any */
        left_out++;
        return;
    }
    int64_t n = golden_int(entry, "n", -1);
    int64_t *values = calloc((size_t)n + 1, sizeof *values);
    loom__torch_randperm((uint64_t)golden_int(entry, "seed", 0), n, values);
    const json_t *wanted = json_object_get(entry, "values");
    for (int64_t i = 0; i < size_of(wanted); i++)
        expect(values[i] == at(wanted, i));
    expect(checksum(values, n) == strtoull(golden_string(entry, "sum", "x"), NULL, 10));
    free(values);
    ran++;
}

static void permutations_equal_torchs(void **state) {
    (void)state;
    each_case("torch_random.json", run_torch);
}

/* ---- Real safetensors ---- */

static void hugging_face_folders_and_their_tensors_open(void **state) {
    (void)state;
    glob_t folders = golden_glob("hf/*/model");
    for (size_t f = 0; f < folders.gl_pathc; f++) {
        const char *id = folders.gl_pathv[f];
        loom_safetensors *file;
        assert_ok(loom_safetensors_open(id, &file));
        expect(loom_safetensors_count(file) > 0);
        for (int64_t i = 0; i < loom_safetensors_count(file); i++) {
            const loom_safetensors_tensor *tensor = loom_safetensors_get(file, i), *found;
            assert_ok(loom_safetensors_find(file, tensor->name, &found));
            expect(found == tensor);
            float *values = calloc((size_t)tensor->elements + 1, sizeof *values);
            assert_ok(loom_safetensors_read_f32(tensor, 0, tensor->elements, values));
            for (int64_t j = 0; j < tensor->elements; j++)
                expect(values[j] > -1e6f && values[j] < 1e6f);
            free(values);
        }
        loom_safetensors_close(file);
        ran++;
    }
    globfree(&folders);
    report("hf/*/model");
}

static void training_tokens_replay_as_fixed_datasets(void **state) {
    (void)state;
    glob_t files = golden_glob("train/*/tokens.safetensors");
    for (size_t f = 0; f < files.gl_pathc; f++) {
        const char *id = files.gl_pathv[f];
        loom_dataset set;
        int64_t batch;
        assert_ok(loom_fixed_dataset_create(id, 0, &set, &batch));
        expect(set.length > 0 && set.length % batch == 0);
        loom_batch *row;
        assert_ok(loom_batch_create(1, set.sequence_length, false, &row));
        loom_sample_row target = {row->tokens, row->labels, row->loss_mask, row->position_ids, NULL};
        for (int64_t i = 0; i < set.length; i++) {
            assert_ok(set.get(set.context, i, &target));
            for (int64_t j = 1; j < set.sequence_length; j++)
                expect(target.tokens[j] == target.labels[j - 1]);
        }
        loom_batch_destroy(row);
        loom_dataset_destroy(&set);
        ran++;
    }
    globfree(&files);
    report("train/*/tokens.safetensors");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(indexed_datasets_read_and_write_as_megatron),
        cmocka_unit_test(damaged_indexed_datasets_are_refused_at_open),
        cmocka_unit_test(gpt_datasets_equal_megatrons),
        cmocka_unit_test(a_padded_sample_masks_nothing_in_later_samples),
        cmocka_unit_test(splits_equal_megatrons),
        cmocka_unit_test(samplers_equal_nemos),
        cmocka_unit_test(steps_have_the_sizes_of_megatrons),
        cmocka_unit_test(shuffles_equal_numpys),
        cmocka_unit_test(permutations_equal_torchs),
        cmocka_unit_test(hugging_face_folders_and_their_tensors_open),
        cmocka_unit_test(training_tokens_replay_as_fixed_datasets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
