/* Golden blends: which dataset gives which sample, how many each is asked for, and whole blends over the golden
 * corpora, against Megatron-Core. Every case of both files is run. */
#include "data/blend.h"
#include "data/gpt.h"
#include "golden/data_cases.h"

#include <math.h>

/* A weight as it stands in the file: a number, or the text of one with all its digits. */
static double weight_at(const json_t *array, int64_t i) {
    const json_t *value = json_array_get(array, (size_t)i);
    return json_is_string(value) ? strtod(json_string_value(value), NULL) : json_number_value(value);
}

/* ---- blend_index.json ---- */

static void check_order(
    const json_t *entry, const int16_t *dataset, const int64_t *sample, int64_t size, const char *id) {
    const json_t *datasets = json_object_get(entry, "dataset"), *samples = json_object_get(entry, "sample");
    expect(size == size_of(datasets) && size == size_of(samples));
    for (int64_t i = 0; i < size; i++)
        expect(dataset[i] == at(datasets, i) && sample[i] == at(samples, i));
}

static void run_order(const json_t *entry, const char *id) {
    bool exhaustive = strcmp(golden_string(entry, "what", ""), "exhaustive") == 0;
    const json_t *given = json_object_get(entry, exhaustive ? "sizes" : "weights");
    int64_t count = size_of(given), size = golden_int(entry, "size", 0);
    double *weights = calloc((size_t)count, sizeof *weights);
    int64_t *sizes = calloc((size_t)count, sizeof *sizes);
    for (int64_t i = 0; i < count; i++) {
        weights[i] = weight_at(given, i);
        sizes[i] = at(given, i);
        size += exhaustive ? sizes[i] : 0;
    }
    int16_t *dataset = calloc((size_t)size + 1, sizeof *dataset);
    int64_t *sample = calloc((size_t)size + 1, sizeof *sample);
    expect((exhaustive ? loom_data_blend_by_size(sizes, count, dataset, sample)
                       : loom_data_blend_by_weight(weights, count, size, dataset, sample)) == LOOM_OK);
    check_order(entry, dataset, sample, size, id);
    free(weights);
    free(sizes);
    free(dataset);
    free(sample);
}

static void run_sizes(const json_t *entry, const char *id) {
    const json_t *weights = json_object_get(entry, "weights"), *sizes = json_object_get(entry, "sizes"),
                 *wanted = json_object_get(entry, "result");
    double surplus = json_number_value(json_object_get(entry, "surplus"));
    for (int64_t i = 0; i < size_of(weights); i++)
        for (int64_t k = 0; k < size_of(sizes); k++)
            expect(loom_data_blend_share(weight_at(weights, i), at(sizes, k), surplus) ==
                   at(json_array_get(wanted, (size_t)i), k));
}

static void run_list(const json_t *entry, const char *id) {
    const json_t *given = json_object_get(entry, "list"), *wanted = json_object_get(entry, "prefixes");
    const char *list[64], *prefixes[64];
    double weights[64];
    int64_t count, length = size_of(given);
    bool weighted;
    expect(length <= 64);
    for (int64_t i = 0; i < length; i++)
        list[i] = json_string_value(json_array_get(given, (size_t)i));
    loom_status status = loom_data_blend_from_list(list, length, weights, prefixes, &count, &weighted);
    if (golden_int(entry, "error", 0) || golden_int(entry, "reference_wrong", 0)) {
        expect(status == LOOM_ERR_CONFIG);
        return;
    }
    expect(status == LOOM_OK && count == size_of(wanted));
    expect(weighted == json_is_array(json_object_get(entry, "weights")));
    for (int64_t i = 0; i < count; i++) {
        expect(strcmp(prefixes[i], json_string_value(json_array_get(wanted, (size_t)i))) == 0);
        expect(!weighted || weights[i] == weight_at(json_object_get(entry, "weights"), i));
    }
}

static void run_index(const json_t *entry, const char *id) {
    const char *what = golden_string(entry, "what", "");
    if (strcmp(what, "sizes_per_dataset") == 0)
        run_sizes(entry, id);
    else if (strcmp(what, "blend_from_list") == 0)
        run_list(entry, id);
    else
        run_order(entry, id);
    ran++;
}

static void blends_are_ordered_as_megatrons(void **state) {
    (void)state;
    each_case("blend_index.json", run_index);
}

/* ---- blend_built.json ---- */

enum { MOST = 16 };

typedef struct blend_case {
    char paths[MOST][4200];
    const char *prefixes[MOST];
    double weights[MOST];
    loom_gpt_blend_config config;
} blend_case;

static void read_case(const json_t *entry, int which, blend_case *given, const char *id) {
    const json_t *datasets = json_object_get(entry, "datasets"), *weights = json_object_get(entry, "weights"),
                 *options = json_object_get(entry, "options"),
                 *asked = json_array_get(json_object_get(entry, "sizes"), (size_t)which);
    loom_gpt_blend_config *config = &given->config;
    *config = loom_gpt_blend_config_default();
    config->count = size_of(datasets);
    expect(config->count <= MOST);
    for (int64_t i = 0; i < config->count; i++) {
        snprintf(given->paths[i], sizeof given->paths[i], "%s/data/indexed/%s", golden_root(),
            json_string_value(json_array_get(datasets, (size_t)i)));
        given->prefixes[i] = given->paths[i];
        given->weights[i] = json_is_array(weights) ? weight_at(weights, i) : 0.0;
    }
    config->prefixes = given->prefixes;
    config->weights = json_is_array(weights) ? given->weights : NULL;
    config->gpt.sequence_length = golden_int(entry, "seq_length", 0);
    config->gpt.seed = golden_int(entry, "seed", 0);
    config->gpt.split = golden_string(entry, "split", "");
    config->gpt.which = (loom_split)which;
    config->gpt.samples = json_is_integer(asked) ? json_integer_value(asked) : -1;
    config->gpt.eod = golden_int(entry, "eod", -1);
    config->gpt.pad = golden_int(entry, "pad", -1);
    if (json_object_get(options, "mid_level_dataset_surplus"))
        config->surplus = json_number_value(json_object_get(options, "mid_level_dataset_surplus"));
}

static void check_parts(const loom_dataset *set, const json_t *wanted, int64_t length, const char *id) {
    const loom__blend *blend = loom__blend_of(loom__gpt_blend_inner(set));
    expect((blend != NULL) == (strcmp(golden_string(wanted, "kind", ""), "BlendedDataset") == 0));
    if (!blend)
        return;
    check_order(wanted, blend->dataset, blend->sample, length, id);
    const json_t *lengths = json_object_get(wanted, "sub_lengths");
    expect(blend->count == size_of(lengths));
    for (int64_t i = 0; i < blend->count; i++)
        expect(blend->parts[i].length == at(lengths, i));
}

static void check_first(const loom_dataset *set, const json_t *wanted, const char *id) {
    const json_t *first = json_object_get(wanted, "first_tokens");
    loom_batch *batch;
    expect(loom_batch_create(1, set->sequence_length, false, &batch) == LOOM_OK);
    const loom_sample_row row = {batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, NULL};
    for (int64_t i = 0; i < size_of(first); i++) {
        const json_t *tokens = json_array_get(first, (size_t)i);
        expect(set->get(set->context, i, &row) == LOOM_OK);
        for (int64_t k = 0; k < size_of(tokens); k++)
            expect(row.tokens[k] == at(tokens, k));
    }
    loom_batch_destroy(batch);
}

static void run_built(const json_t *entry, const char *id) {
    static const char *const names[] = {"train", "valid", "test"};
    int refused = 0;
    for (int which = 0; which < LOOM_SPLIT_COUNT; which++) {
        static blend_case given;
        loom_dataset set;
        read_case(entry, which, &given, id);
        loom_status status = loom_gpt_blend_create(&given.config, &set);
        const json_t *wanted = json_object_get(entry, names[which]);
        if (golden_int(entry, "error", 0)) {
            refused += status == LOOM_ERR_CONFIG;
        } else if (!json_is_object(wanted)) {
            expect(status == LOOM_ERR_NOT_FOUND);
        } else {
            expect(status == LOOM_OK);
            expect(set.length == golden_int(wanted, "length", -1));
            check_parts(&set, wanted, set.length, id);
            check_first(&set, wanted, id);
        }
        if (status == LOOM_OK)
            loom_dataset_destroy(&set);
    }
    expect((refused > 0) == (golden_int(entry, "error", 0) != 0));
    ran++;
}

static void blends_are_built_as_megatrons(void **state) {
    (void)state;
    each_case("blend_built.json", run_built);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blends_are_ordered_as_megatrons),
        cmocka_unit_test(blends_are_built_as_megatrons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
