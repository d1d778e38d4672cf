/* The sharded state of each checkpoint that the real Megatron-Core wrote (tests/golden/ckpt): the same keys, shapes,
 * dtypes and chunks, computed from the model's configuration and the layout alone; and plans that read each of them,
 * the flattened ones too, at other layouts. */
#include "checkpoint/reshard.h"
#include "model.h"
#include <megaloom/stages.h>

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

typedef struct ckpt_case {
    const char *name;
    json_t *json, *manifest;
    loom__model_spec *spec;
    loom_stage *stages;
    loom__sharded_layout layout;
    loom__sharded_options options;
} ckpt_case;

static bool has_option(const json_t *json, const char *option) {
    return json_object_get(json_object_get(json, "options"), option) != NULL;
}

static loom__optimizer_form form_of(const json_t *json) {
    const char *type = golden_string(json, "sharding_type", NULL);
    for (int form = LOOM__OPTIMIZER_FULLY_RESHARDABLE; type && form <= LOOM__OPTIMIZER_MODEL_SPACE; form++)
        if (!has_option(json, "noopt") && strcmp(type, loom__optimizer_form_name(form)) == 0)
            return (loom__optimizer_form)form;
    return LOOM__OPTIMIZER_ABSENT;
}

/* False: the model is not built, and said so. */
static bool read_case(ckpt_case *of) {
    const json_t *layout = json_object_get(of->json, "layout");
    char *folder = golden_path("%s", golden_string(of->json, "model", "?"));
    char *hf = strrchr(folder, '/');
    *hf = '\0';
    const char *model = strrchr(folder, '/') + 1;
    char name[GOLDEN_TEXT];
    snprintf(name, sizeof name, "%s", model);
    *hf = '/';
    loom_model_config config;
    bool built = golden_read_config(name, folder, &config);
    free(folder);
    if (!built)
        return false;
    of->layout = (loom__sharded_layout){.tp = golden_int(layout, "tp", 1),
        .pp = golden_int(layout, "pp", 1),
        .dp = golden_int(layout, "dp", 1),
        .ep = golden_int(layout, "ep", 1),
        .bucket_size = -1};
    /* Those that say nothing of it have the tensor ranks share experts too. */
    of->layout.etp = golden_int(layout, "etp", of->layout.tp);
    of->layout.edp = of->layout.tp * of->layout.dp / (of->layout.etp * of->layout.ep);
    config.padded_vocab_size = golden_int(of->json, "padded_vocab", config.vocab_size);
    golden_must(loom__model_config_complete(&config, of->layout.tp, of->layout.tp > 1), of->name);
    golden_must(loom__model_spec_create(&config, &of->spec), of->name);
    loom_stage_split split = {.layers = config.num_layers,
        .pipeline_model_parallel_size = of->layout.pp,
        .virtual_pipeline_model_parallel_size = golden_int(layout, "vpp", 0)};
    golden_must(loom_stage_split_chunks(&split, &of->layout.chunks), of->name);
    of->stages = golden_allocate((size_t)(of->layout.chunks * of->layout.pp) * sizeof *of->stages);
    golden_must(loom_stage_split_make(&split, of->stages), of->name);
    of->layout.spec = of->spec;
    of->layout.stages = of->stages;
    of->options = (loom__sharded_options){.prefix = has_option(of->json, "nemo") ? "module." : "",
        .singleton_local_shards = has_option(of->json, "singleton"),
        .param_dtype = has_option(of->json, "bf16") ? LOOM_BF16 : LOOM_F32,
        .grad_dtype = LOOM_F32,
        .form = form_of(of->json),
        .moments = 2,
        .moment = {{"exp_avg", LOOM_F32}, {"exp_avg_sq", LOOM_F32}}};
    return true;
}

static json_t *integers(const int64_t *values, int count) {
    json_t *array = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(array, json_integer(values[i]));
    return array;
}

/* Adds what one rank writes to {"tensors": {key: {shape, dtype, chunks}}, "objects": {key: true}}. */
static void add_rank(const ckpt_case *of, const loom__sharded_state *state, json_t *found) {
    json_t *tensors = json_object_get(found, "tensors"), *objects = json_object_get(found, "objects");
    for (int64_t i = 0; i < state->count; i++) {
        const loom__state_entry *entry = &state->entries[i];
        if (!loom__state_entry_is_main(entry))
            continue;
        if (entry->object) {
            check(!json_object_get(objects, entry->key), "%s: %s comes twice", of->name, entry->key);
            json_object_set_new(objects, entry->key, json_true());
            continue;
        }
        json_t *tensor = json_object_get(tensors, entry->key), *shape = integers(entry->shape, entry->dims);
        const char *dtype = entry->dtype == LOOM_BF16 ? "bfloat16" : "float32";
        if (!tensor) {
            tensor = json_pack("{s:O,s:s,s:[]}", "shape", shape, "dtype", dtype, "chunks");
            json_object_set_new(tensors, entry->key, tensor);
        }
        check(json_equal(shape, json_object_get(tensor, "shape")), "%s: %s has two shapes", of->name, entry->key);
        json_decref(shape);
        json_array_append_new(json_object_get(tensor, "chunks"),
            json_pack("[o,o]", integers(entry->offset, entry->dims), integers(entry->size, entry->dims)));
    }
}

static json_t *whole_state(const ckpt_case *of) {
    json_t *found = json_pack("{s:{},s:{}}", "tensors", "objects");
    const loom__sharded_layout *layout = &of->layout;
    int64_t ranks = layout->tp * layout->dp;
    for (int64_t i = 0; i < layout->pp * ranks; i++) {
        int64_t rank = i % ranks;
        loom__sharded_place at = {.stage = i / ranks,
            .tp_rank = rank % layout->tp,
            .dp_rank = rank / layout->tp,
            .etp_rank = rank % layout->etp,
            .ep_rank = rank / layout->etp % layout->ep,
            .edp_rank = rank / (layout->etp * layout->ep)};
        loom__part *part = NULL;
        loom__sharded_state *state = NULL;
        golden_must(loom__sharded_part(layout, at.stage, at.ep_rank, &part), of->name);
        golden_must(loom__sharded_state_create(layout, &of->options, part, &at, &state), of->name);
        add_rank(of, state, found);
        loom__sharded_state_destroy(state);
        loom__part_destroy(part);
    }
    return found;
}

static int compare_text(const void *left, const void *right) {
    return strcmp(*(char *const *)left, *(char *const *)right);
}

/* The chunks in one order, as a JSON array of text; files list them by file and rank. */
static json_t *sorted_chunks(const json_t *tensor) {
    const json_t *chunks = json_object_get(tensor, "chunks");
    size_t count = json_array_size(chunks);
    char **texts = golden_allocate(count * sizeof *texts);
    json_t *sorted = json_array();
    for (size_t i = 0; i < count; i++)
        texts[i] = json_dumps(json_array_get(chunks, i), JSON_COMPACT);
    qsort(texts, count, sizeof *texts, compare_text);
    for (size_t i = 0; i < count; i++) {
        json_array_append_new(sorted, json_string(texts[i]));
        free(texts[i]);
    }
    free(texts);
    return sorted;
}

static void compare_tensor(const ckpt_case *of, const char *key, const json_t *found, const json_t *wanted) {
    check(found, "%s: %s is missing", of->name, key);
    check(json_equal(json_object_get(found, "shape"), json_object_get(wanted, "shape")), "%s: shape of %s", of->name,
        key);
    check(strcmp(golden_string(found, "dtype", "?"), golden_string(wanted, "dtype", "?")) == 0, "%s: dtype of %s",
        of->name, key);
    json_t *ours = sorted_chunks(found), *theirs = sorted_chunks(wanted);
    if (!json_equal(ours, theirs)) {
        char *ours_text = json_dumps(ours, JSON_COMPACT), *theirs_text = json_dumps(theirs, JSON_COMPACT);
        check(false, "%s: chunks of %s: found\n%s, expected\n%s", of->name, key, ours_text, theirs_text);
    }
    json_decref(ours);
    json_decref(theirs);
}

/* Keys that are not of the model and its optimizer. */
static bool is_other(const char *key) {
    return strncmp(key, "rng_state/", strlen("rng_state/")) == 0;
}

static size_t compare_case(ckpt_case *of) {
    bool model_space = of->options.form == LOOM__OPTIMIZER_MODEL_SPACE;
    if (model_space)
        of->options.form = LOOM__OPTIMIZER_ABSENT; /* not written, only read */
    json_t *found = whole_state(of), *value;
    const char *key;
    size_t tensors = 0;
    json_object_foreach(json_object_get(of->manifest, "tensors"), key, value) {
        if (model_space && strncmp(key, "optimizer.", strlen("optimizer.")) == 0)
            continue;
        compare_tensor(of, key, json_object_get(json_object_get(found, "tensors"), key), value);
        tensors++;
    }
    check(json_object_size(json_object_get(found, "tensors")) == tensors, "%s: %zu keys, expected %zu", of->name,
        json_object_size(json_object_get(found, "tensors")), tensors);
    size_t objects = 0;
    json_object_foreach(json_object_get(of->manifest, "objects"), key, value) {
        if (is_other(key))
            continue;
        check(json_object_get(json_object_get(found, "objects"), key), "%s: object %s is missing", of->name, key);
        objects++;
    }
    check(json_object_size(json_object_get(found, "objects")) == objects, "%s: %zu objects, expected %zu", of->name,
        json_object_size(json_object_get(found, "objects")), objects);
    json_decref(found);
    return tensors + objects;
}

/* The numbers of buckets that the objects hold: [[{"__dict__": [[dtypes, [numels]]]}, …]]. */
static const json_t *stored_numel(const ckpt_case *of, int64_t group, const char *which, int64_t gbuf, int64_t index) {
    char key[LOOM__STATE_KEY_BYTES];
    snprintf(key, sizeof key, "optimizer.distributed.dp_group_idx_%lld.%s/shard_0_1", (long long)group, which);
    const json_t *value = json_object_get(json_object_get(json_object_get(of->manifest, "objects"), key), "value");
    const json_t *buffer = json_array_get(json_array_get(value, 0), (size_t)gbuf);
    const json_t *pair = json_array_get(json_object_get(buffer, "__dict__"), 0);
    return json_array_get(json_array_get(pair, 1), (size_t)index);
}

static void compare_buckets(const ckpt_case *of) {
    for (int64_t group = 0; group < of->layout.pp * of->layout.tp; group++) {
        loom__part *part = NULL;
        loom__state_buckets *buckets = NULL;
        golden_must(loom__sharded_part(&of->layout, group / of->layout.tp, 0, &part), of->name);
        golden_must(loom__state_buckets_create(&of->layout, part, group / of->layout.tp, &buckets), of->name);
        for (int64_t b = 0; b < buckets->count; b++) {
            const loom__state_bucket *bucket = &buckets->buckets[b];
            check(json_integer_value(stored_numel(of, group, "per_bucket_numel", bucket->gbuf, bucket->index)) ==
                          bucket->numel &&
                      json_integer_value(stored_numel(
                          of, group, "per_bucket_numel_unpadded", bucket->gbuf, bucket->index)) == bucket->unpadded,
                "%s: group %lld, bucket %lld has %lld elements, %lld unpadded", of->name, (long long)group,
                (long long)b, (long long)bucket->numel, (long long)bucket->unpadded);
        }
        loom__state_buckets_destroy(buckets);
        loom__part_destroy(part);
    }
}

/* ---- reading */

static void read_integers(const json_t *array, int64_t *values) {
    for (size_t i = 0; i < json_array_size(array) && i < LOOM__STORED_DIMS; i++)
        values[i] = json_integer_value(json_array_get(array, i));
}

static loom__stored_tensor stored_tensor(const char *key, const json_t *json) {
    const json_t *chunks = json_object_get(json, "chunks"), *original = json_object_get(json, "orig_shape");
    loom__stored_chunk *read = golden_allocate(json_array_size(chunks) * sizeof *read);
    loom__stored_tensor tensor = {.key = key,
        .dims = (int)json_array_size(json_object_get(json, "shape")),
        .original_dims = (int)json_array_size(original),
        .chunk_count = (int64_t)json_array_size(chunks),
        .chunks = read};
    read_integers(json_object_get(json, "shape"), tensor.shape);
    read_integers(original, tensor.original_shape);
    for (size_t i = 0; i < json_array_size(chunks); i++) {
        const json_t *chunk = json_array_get(chunks, i);
        read_integers(json_array_get(chunk, 0), read[i].offset);
        read_integers(json_array_get(chunk, 1), read[i].size);
    }
    return tensor;
}

/* All arrays of all parameters, for one tensor rank of tp. */
static void plan_rank(const ckpt_case *of, const loom__reshard_source *source, int64_t tp, int64_t tp_rank) {
    const loom__model_spec *spec = of->spec;
    int arrays = of->options.form == LOOM__OPTIMIZER_ABSENT ? 1 : LOOM__STATE_MOMENT + of->options.moments;
    int64_t count = 0;
    loom__reshard_want *wants = golden_allocate((size_t)(spec->count * arrays) * sizeof *wants);
    for (int64_t i = 0; i < spec->count; i++) {
        int64_t shape[2];
        loom__parameter_local_shape(spec, &spec->parameters[i], tp, shape);
        for (int array = 0; array < arrays; array++)
            wants[count++] = (loom__reshard_want){.array = array, .canonical = i, .count = shape[0] * shape[1]};
    }
    loom__reshard_plan *plan = NULL;
    golden_must(loom__reshard_plan_create(source, spec, tp, tp_rank, wants, count, &plan), of->name);
    check(plan->missing_count == 0, "%s at tensor size %lld: array %d of %s is missing", of->name, (long long)tp,
        wants[plan->missing[0]].array, spec->parameters[wants[plan->missing[0]].canonical].name);
    loom__reshard_plan_destroy(plan);
    free(wants);
}

static void plan_case(const ckpt_case *of) {
    const json_t *tensors = json_object_get(of->manifest, "tensors");
    loom__stored_tensor *stored = golden_allocate(json_object_size(tensors) * sizeof *stored);
    loom__stored_state state = {.tensors = stored, .layout = &of->layout};
    json_t *value;
    const char *key;
    json_object_foreach((json_t *)tensors, key, value) stored[state.count++] = stored_tensor(key, value);
    loom__reshard_source *source = NULL;
    golden_must(loom__reshard_source_create(of->spec, &state, &of->options, &source), of->name);
    loom__reshard_leftover left = loom__reshard_source_leftover(source);
    check(left.unexpected_count == 0, "%s: %s is unexpected", of->name, stored[left.unexpected[0]].key);
    check(left.misshaped_count == 0, "%s: %s is misshaped", of->name, stored[left.misshaped[0]].key);
    for (int64_t tp = 1; tp <= 2; tp++)
        for (int64_t rank = 0; rank < tp; rank++)
            plan_rank(of, source, tp, rank);
    loom__reshard_source_destroy(source);
    for (int64_t i = 0; i < state.count; i++)
        free((void *)stored[i].chunks);
    free(stored);
}

static void keys_shapes_and_chunks_are_those_of_the_reference_and_other_layouts_read_them(void **state) {
    (void)state;
    glob_t found = golden_glob("ckpt/*/case.json");
    size_t ran = 0, other = 0, unbuilt = 0, keys = 0;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *folder = golden_folder_name(found.gl_pathv[i]), *path = golden_path("ckpt/%s/manifest.json", folder);
        ckpt_case of = {.name = folder, .json = golden_json(found.gl_pathv[i]), .manifest = golden_json(path)};
        if (!json_object_get(of.json, "layout")) {
            other++;
        } else if (!read_case(&of)) {
            unbuilt++;
        } else {
            if (of.options.form == LOOM__OPTIMIZER_DP_RESHARDABLE)
                compare_buckets(&of);
            plan_case(&of);
            keys += compare_case(&of);
            ran++;
        }
        loom__model_spec_destroy(of.spec);
        free(of.stages);
        json_decref(of.json);
        json_decref(of.manifest);
        free(folder);
        free(path);
    }
    print_message("ckpt: %zu checkpoints equal and planned (%zu keys), %zu of no layout, %zu not supported yet\n", ran,
        keys, other, unbuilt);
    if (!getenv("MEGALOOM_GOLDEN"))
        assert_true(ran >= 15);
    globfree(&found);
}

/* {"a": …} of common.json says what the metadata says, key for key. */
static void content_metadata_is_that_of_the_strategy(void **state) {
    (void)state;
    loom__content_metadata with = loom__sharded_state_dict_metadata(true, false);
    loom__content_metadata without = loom__sharded_state_dict_metadata(false, true);
    assert_string_equal(with.distrib_optim_sharding_type, "dp_reshardable");
    assert_true(!with.singleton_local_shards && with.chained_optim_avoid_prefix);
    assert_null(without.distrib_optim_sharding_type);
    assert_true(!without.singleton_local_shards && without.chained_optim_avoid_prefix);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_shapes_and_chunks_are_those_of_the_reference_and_other_layouts_read_them),
        cmocka_unit_test(content_metadata_is_that_of_the_strategy)};
    return cmocka_run_group_tests_name("golden.ckpt_sharded", tests, NULL, NULL);
}
