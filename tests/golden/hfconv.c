/* Conversion between Hugging Face and Megatron: NeMo's own transforms (hfconv/transform_vectors*), the table of names
 * (hfconv/facts*.json) and Megatron-Core's parameter lists (mcore/<case>/case.json), all exact. */
#include "spec/huggingface.h"
#include "support/golden.h"
#include <math.h>
#include <setjmp.h>

#include <cmocka.h>

/* ---- a whole safetensors file in memory, as far as F32 tensors go */

typedef struct tensors {
    json_t *header;
    char *bytes;
    size_t data; /* offset of the first tensor */
} tensors;

static char *slurp(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *bytes = malloc((size_t)size + 1);
    *length = bytes ? fread(bytes, 1, (size_t)size, file) : 0;
    fclose(file);
    return bytes;
}

static tensors tensors_open(const char *path) {
    tensors file = {0};
    size_t length = 0;
    uint64_t header = 0;
    file.bytes = slurp(path, &length);
    assert_non_null(file.bytes);
    memcpy(&header, file.bytes, sizeof header);
    file.header = json_loadb(file.bytes + 8, header, 0, NULL);
    assert_non_null(file.header);
    file.data = 8 + header;
    return file;
}

static void tensors_close(tensors *file) {
    json_decref(file->header);
    free(file->bytes);
}

static const float *tensor(const tensors *file, const char *name, int64_t *count) {
    const json_t *entry = json_object_get(file->header, name);
    if (!entry)
        return NULL;
    const json_t *offsets = json_object_get(entry, "data_offsets");
    size_t first = (size_t)json_integer_value(json_array_get(offsets, 0));
    size_t end = (size_t)json_integer_value(json_array_get(offsets, 1));
    *count = (int64_t)((end - first) / sizeof(float));
    return (const float *)(const void *)(file->bytes + file->data + first);
}

/* ---- transform vectors */

static loom__model_spec *spec_of_vector(const json_t *vector, int64_t tp) {
    loom_model_config config = {.architecture = "llama",
        .num_layers = 1,
        .hidden_size = golden_int(vector, "hidden", 0),
        .ffn_hidden_size = golden_int(vector, "ffn", 0),
        .num_attention_heads = golden_int(vector, "num_attention_heads", 0),
        .num_query_groups = golden_int(vector, "num_query_groups", 0),
        .kv_channels = golden_int(vector, "kv_channels", 0),
        .seq_length = 8,
        .vocab_size = golden_int(vector, "vocab", 0),
        .padded_vocab_size = golden_int(vector, "padded_vocab", 0),
        .make_vocab_size_divisible_by = 1,
        .normalization = LOOM_RMSNORM,
        .layernorm_epsilon = 1e-6,
        .activation = LOOM_SWIGLU,
        .position_embedding_type = LOOM_POSITION_ROPE,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = true,
        .init_method_std = 0.02};
    loom__model_spec *spec = NULL;
    if (loom__model_config_complete(&config, tp, false) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_int_equal(loom__model_spec_create(&config, &spec), LOOM_OK);
    return spec;
}

static const loom__parameter_descriptor *find(const loom__model_spec *spec, const char *name) {
    for (int64_t i = 0; i < spec->count; i++)
        if (strcmp(spec->parameters[i].name, name) == 0)
            return &spec->parameters[i];
    return NULL;
}

/* What the vectors call the tensor of a Hugging Face name. */
static void vector_name(const char *hf, const char *prefix, char *name, size_t bytes) {
    static const char *const names[][2] = {{".q_proj.weight", "q"}, {".k_proj.weight", "k"}, {".v_proj.weight", "v"},
        {".q_proj.bias", "q_bias"}, {".k_proj.bias", "k_bias"}, {".v_proj.bias", "v_bias"},
        {".gate_proj.weight", "gate"}, {".up_proj.weight", "up"}, {"embed_tokens.weight", "emb_pruned"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strstr(hf, names[i][0]))
            snprintf(name, bytes, "%s%s", prefix, names[i][1]);
}

typedef struct copy {
    const tensors *file;
    const char *prefix;
    float *canonical, *local;
} copy;

static loom_status import(
    void *context, int64_t first, int64_t count, const char *hf, int64_t hf_first, int64_t stride) {
    copy *to = context;
    char name[128] = "";
    int64_t elements = 0;
    vector_name(hf, to->prefix, name, sizeof name);
    const float *from = tensor(to->file, name, &elements);
    if (!from || hf_first + (count - 1) * stride >= elements)
        return loom_fail(LOOM_ERR_NOT_FOUND, "%s for %s", name, hf);
    for (int64_t i = 0; i < count; i++)
        to->canonical[first + i] = from[hf_first + i * stride];
    return LOOM_OK;
}

static loom_status cut(void *context, int64_t local, int64_t canonical, int64_t count) {
    copy *to = context;
    for (int64_t i = 0; i < count; i++)
        to->local[local + i] = canonical < 0 ? 0 : to->canonical[canonical + i];
    return LOOM_OK;
}

/* Imports the parameter, cuts it for each rank, compares with the vectors; returns how many tensors were compared. */
static int compare_parameter(const tensors *file, const char *prefix, const loom__model_spec *spec, const char *name,
    const char *golden, int64_t tp) {
    const loom__parameter_descriptor *parameter = find(spec, name);
    int64_t shape[2], count = 0;
    int compared = 0;
    assert_non_null(parameter);
    loom__parameter_local_shape(spec, parameter, tp, shape);
    copy to = {.file = file,
        .prefix = prefix,
        .canonical = calloc((size_t)(parameter->shape[0] * parameter->shape[1]), sizeof(float)),
        .local = calloc((size_t)(shape[0] * shape[1]), sizeof(float))};
    if (loom__hf_source_runs(spec, parameter, import, &to) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    for (int64_t rank = 0; rank < tp; rank++) {
        char wanted[128];
        if (tp == 1)
            snprintf(wanted, sizeof wanted, "%s%s", prefix, golden);
        else
            snprintf(wanted, sizeof wanted, "%stp%lld.%lld.%s", prefix, (long long)tp, (long long)rank, golden);
        const float *expected = tensor(file, wanted, &count);
        if (!expected)
            continue;
        assert_int_equal(loom__parameter_shard_runs(spec, parameter, tp, rank, cut, &to), LOOM_OK);
        assert_int_equal(count, shape[0] * shape[1]);
        /* Rows that are padding here hold nothing; what the vectors have there is pruned on export. */
        int64_t real = parameter->padded_rows > parameter->shape[0] ? parameter->shape[0] * parameter->shape[1] : count;
        if (memcmp(expected, to.local, (size_t)real * sizeof(float)) != 0)
            fail_msg("%s differs", wanted);
        compared++;
    }
    free(to.canonical);
    free(to.local);
    return compared;
}

static void transforms_equal_nemos(void **state) {
    (void)state;
    glob_t files = golden_glob("hfconv/transform_vectors*.json");
    int ran = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        char path[4096];
        snprintf(path, sizeof path, "%.*s.safetensors", (int)(strlen(files.gl_pathv[f]) - 5), files.gl_pathv[f]);
        json_t *vectors = golden_json(files.gl_pathv[f]), *vector;
        tensors file = tensors_open(path);
        size_t index;
        json_array_foreach(vectors, index, vector) {
            const char *prefix = golden_string(vector, "prefix", "");
            int64_t groups = golden_int(vector, "num_query_groups", 1);
            for (int64_t tp = 1; tp <= groups; tp++) {
                char probe[64];
                int64_t count;
                snprintf(probe, sizeof probe, "%stp%lld.0.linear_qkv", prefix, (long long)tp);
                if (tp > 1 && !tensor(&file, probe, &count))
                    continue;
                loom__model_spec *spec = spec_of_vector(vector, tp);
                static const char layer[] = "decoder.layers.0.";
                char name[128];
                snprintf(name, sizeof name, "%sself_attention.linear_qkv.weight", layer);
                int compared = compare_parameter(&file, prefix, spec, name, "linear_qkv", tp);
                snprintf(name, sizeof name, "%smlp.linear_fc1.weight", layer);
                compared += compare_parameter(&file, prefix, spec, name, "linear_fc1", tp);
                assert_int_equal(compared, 2 * tp);
                if (tp == 1) {
                    snprintf(name, sizeof name, "%sself_attention.linear_qkv.bias", layer);
                    compared = compare_parameter(&file, prefix, spec, name, "linear_qkv_bias", 1);
                    compared +=
                        compare_parameter(&file, prefix, spec, "embedding.word_embeddings.weight", "emb_padded", 1);
                    assert_int_equal(compared, 2);
                }
                loom__model_spec_destroy(spec);
                ran++;
            }
        }
        tensors_close(&file);
        json_decref(vectors);
    }
    globfree(&files);
    printf("transform vectors: %d ran, 0 left out\n", ran);
    assert_true(ran > 0);
}

/* ---- names */

typedef struct names {
    const json_t *expected; /* list of Hugging Face names */
    size_t found;
    long layer, expert;
} names;

static void fill_hole(const char *pattern, const char *what, long number, char *name, size_t bytes) {
    const char *hole = strstr(pattern, what);
    if (hole)
        snprintf(name, bytes, "%.*s%ld%s", (int)(hole - pattern), pattern, number, hole + strlen(what));
    else
        snprintf(name, bytes, "%s", pattern);
}

/* Replaces {l} by the number of the layer, {e} by that of the expert. */
static void with_numbers(const char *pattern, long layer, long expert, char *name, size_t bytes) {
    char half[256];
    fill_hole(pattern, "{l}", layer, half, sizeof half);
    fill_hole(half, "{e}", expert, name, bytes);
}

static loom_status check_name(void *context, const loom__hf_tensor *tensor) {
    names *to = context;
    char name[256];
    size_t index;
    json_t *expected;
    json_array_foreach((json_t *)to->expected, index, expected) {
        with_numbers(json_string_value(expected), to->layer, to->expert, name, sizeof name);
        if (strcmp(name, tensor->name) == 0) {
            to->found++;
            return LOOM_OK;
        }
    }
    return loom_fail(LOOM_ERR_NOT_FOUND, "%s is not expected", tensor->name);
}

static void check_parameter(
    const loom__model_spec *spec, const char *megatron, const json_t *fact, long layer, long expert) {
    const loom__parameter_descriptor *parameter = find(spec, megatron);
    if (!parameter)
        fail_msg("%s is missing", megatron);
    const json_t *hf = json_object_get(fact, "hf");
    names to = {.expected = hf, .layer = layer, .expert = expert};
    if (loom__hf_parameter_tensors(spec, parameter, check_name, &to) != LOOM_OK)
        fail_msg("%s: %s", megatron, loom_error_message());
    assert_int_equal(to.found, json_array_size(hf));
    const json_t *axis = json_object_get(fact, "tp_axis");
    if (json_is_null(axis)) {
        assert_int_equal(parameter->shard, LOOM__SHARD_NONE);
    } else {
        assert_int_not_equal(parameter->shard, LOOM__SHARD_NONE);
        assert_int_equal(parameter->shard_axis, json_integer_value(axis));
    }
}

enum { FAMILY_EXPERTS = 3 };

/* A model of the family with every parameter its facts list. */
static loom_status spec_of_family(const char *family, loom__model_spec **spec) {
    loom_model_config config = loom_model_config_default(family);
    config.num_layers = 3;
    config.hidden_size = 16;
    config.num_attention_heads = 4;
    config.seq_length = 8;
    config.vocab_size = 10;
    config.make_vocab_size_divisible_by = 4;
    config.moe.num_moe_experts = strcmp(family, "mixtral") == 0 ? FAMILY_EXPERTS : 0;
    LOOM_TRY(loom__model_config_complete(&config, 2, true));
    return loom__model_spec_create(&config, spec);
}

static void names_equal_the_table(void **state) {
    (void)state;
    glob_t files = golden_glob("hfconv/facts*.json");
    int ran = 0, refused = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *facts = golden_json(files.gl_pathv[f]), *family;
        const char *key;
        json_object_foreach(facts, key, family) {
            loom__model_spec *spec = NULL;
            if (*key == '_')
                continue;
            loom_status status = spec_of_family(key, &spec);
            if (status != LOOM_OK) {
                assert_int_equal(status, LOOM_ERR_UNSUPPORTED);
                assert_non_null(strstr(loom_error_message(), "not supported yet"));
                refused++;
                continue;
            }
            size_t index, in_layers = 0, outside = 0;
            json_t *fact;
            json_array_foreach(json_object_get(family, "params"), index, fact) {
                const char *pattern = golden_string(fact, "local_spec_name", golden_string(fact, "megatron", ""));
                char megatron[256];
                bool layered = strstr(pattern, "{l}") != NULL;
                long experts = strstr(pattern, "{e}") ? FAMILY_EXPERTS : 1;
                in_layers += layered ? (size_t)experts : 0;
                outside += !layered;
                for (long at = 0; at < (layered ? 3 : 1) * experts; at++) {
                    with_numbers(pattern, at / experts, at % experts, megatron, sizeof megatron);
                    check_parameter(spec, megatron, fact, at / experts, at % experts);
                }
            }
            assert_int_equal(spec->count, 3 * in_layers + outside);
            loom__model_spec_destroy(spec);
            ran++;
        }
        json_decref(facts);
    }
    globfree(&files);
    printf("families of names: %d ran, %d not supported yet\n", ran, refused);
    assert_true(ran >= 2);
}

/* ---- Megatron-Core's own lists */

static loom_status spec_of_case(const json_t *json, int64_t tp, loom__model_spec **spec) {
    char path[4096];
    size_t length = 0;
    const char *hf = golden_string(json, "hf", "");
    snprintf(path, sizeof path, "%s/%s/model/config.json", golden_root(), hf);
    char *text = slurp(path, &length);
    if (!text) {
        snprintf(path, sizeof path, "%s/%s/config.json", golden_root(), hf);
        text = slurp(path, &length);
    }
    assert_non_null(text);
    loom_model_config config = {.seq_length = golden_int(json, "seq", 0),
        .make_vocab_size_divisible_by = 1,
        .padded_vocab_size = golden_int(json, "padded_vocab", 0)};
    loom_status status = loom__hf_model_config(path, text, length, &config);
    free(text);
    LOOM_TRY(status);
    LOOM_TRY(loom__model_config_complete(&config, tp, tp > 1));
    return loom__model_spec_create(&config, spec);
}

static void check_shape(const json_t *expected, int dims, const int64_t shape[2]) {
    assert_int_equal(json_array_size(expected), dims);
    for (int i = 0; i < dims; i++)
        assert_int_equal(json_integer_value(json_array_get(expected, (size_t)i)), shape[i]);
}

static void parameters_equal_megatron_cores(void **state) {
    (void)state;
    glob_t files = golden_glob("mcore/*/case.json");
    int ran = 0, refused = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *json = golden_json(files.gl_pathv[f]), *params = json_object_get(json, "params"), *param;
        loom__model_spec *spec = NULL;
        const char *name;
        loom_status status = spec_of_case(json, 2, &spec);
        if (status == LOOM_OK) {
            json_object_foreach(params, name, param) {
                const loom__parameter_descriptor *parameter = find(spec, name);
                if (!parameter)
                    fail_msg("%s: %s is missing", files.gl_pathv[f], name);
                int64_t whole[2], half[2];
                loom__parameter_local_shape(spec, parameter, 1, whole);
                loom__parameter_local_shape(spec, parameter, 2, half);
                check_shape(json_object_get(param, "shape"), parameter->dims, whole);
                if (json_object_get(param, "shape_tp2"))
                    check_shape(json_object_get(param, "shape_tp2"), parameter->dims, half);
                check_parameter(spec, name, param, 0, 0);
            }
            assert_int_equal(spec->count, json_object_size(params));
            loom__model_spec_destroy(spec);
            ran++;
        } else {
            if (status != LOOM_ERR_UNSUPPORTED)
                fail_msg("%s: %s", files.gl_pathv[f], loom_error_message());
            refused++;
        }
        json_decref(json);
    }
    globfree(&files);
    printf("Megatron-Core parameter lists: %d ran, %d not supported yet\n", ran, refused);
    assert_true(ran > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(transforms_equal_nemos),
        cmocka_unit_test(names_equal_the_table),
        cmocka_unit_test(parameters_equal_megatron_cores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
