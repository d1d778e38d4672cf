/* What a checkpoint says of its model. Ours hold the run file of the run that wrote them; NeMo's hold its object tree,
 * of which the model's configuration is one mapping with Megatron's field names. It is rewritten as a run file, so that
 * one reader judges both. The invariant: a key of NeMo's that changes what the model computes is taken over or refused,
 * never dropped. */
#include "config/from.h"
#include "config/field.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

/* ---- where it lies */

static loom_status joined(char *path, const char *folder, const char *name) {
    if (snprintf(path, PATH_BYTES, "%s/%s", folder, name) >= PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the checkpoint is too long: %.100s…", folder);
    return LOOM_OK;
}

/* Of a folder of checkpoints the one that its pointer names, else the folder itself. */
static loom_status newest(const char *folder, char *path) {
    char word[32] = "", name[64] = ".";
    LOOM_TRY(joined(path, folder, "latest_checkpointed_iteration.txt"));
    FILE *file = fopen(path, "rb");
    bool found = file && fscanf(file, "%31s", word) == 1;
    if (file)
        fclose(file);
    if (found && strspn(word, "0123456789") == strlen(word))
        snprintf(name, sizeof name, "iter_%07lld", atoll(word));
    else if (found && strcmp(word, "release") == 0)
        snprintf(name, sizeof name, "release");
    return joined(path, folder, name);
}

static loom_status find_context(const char *checkpoint, char *path, bool *is_nemo) {
    static const char *const names[] = {"context/run.yaml", "context/model.yaml"};
    char folder[PATH_BYTES];
    if (!*checkpoint)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the checkpoint is empty");
    LOOM_TRY(newest(checkpoint, folder));
    for (int i = 0; i < 2; i++) {
        LOOM_TRY(joined(path, folder, names[i]));
        *is_nemo = i == 1;
        if (access(path, F_OK) == 0)
            return LOOM_OK;
    }
    return loom_fail(LOOM_ERR_NOT_FOUND,
        "%s: has neither context/run.yaml, as checkpoints of Megaloom have it, nor context/model.yaml, as those of "
        "NeMo: what model it is of must be told",
        checkpoint);
}

/* ---- NeMo's */

static const loom__yaml_node *member(const loom__yaml *yaml, const loom__yaml_node *of, const char *key) {
    for (int64_t i = 0; of && of->kind == LOOM__YAML_MAPPING && i < of->count; i++)
        if (strcmp(loom__yaml_at(yaml, of->items[2 * i])->text, key) == 0)
            return loom__yaml_at(yaml, of->items[2 * i + 1]);
    return NULL;
}

/* The last part of the dotted name of a class or function; "" where there is none. */
static const char *target_of(const loom__yaml *yaml, const loom__yaml_node *of) {
    const loom__yaml_node *target = member(yaml, of, "_target_");
    if (!target && of && of->kind == LOOM__YAML_SCALAR)
        target = of;
    const char *text = target && target->kind == LOOM__YAML_SCALAR ? target->text : "";
    const char *dot = strrchr(text, '.');
    return dot ? dot + 1 : text;
}

static const char *architecture_of(const char *class) {
    static const char *const classes[][2] = {{"Llama", "llama"}, {"CodeLlama", "llama"}, {"Mistral", "mistral"},
        {"Mixtral", "mixtral"}, {"Qwen2", "qwen2"}, {"Qwen3", "qwen3"}, {"Gemma", "gemma"}, {"GPT", "gpt2"}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        size_t length = strlen(classes[i][0]);
        const char *rest = strncmp(class, classes[i][0], length) == 0 ? class + length : "";
        /* Gemma2Model and Gemma3Model are other models; Llama31Config8B is a size of Llama. */
        bool other = strcmp(classes[i][1], "llama") != 0 && *rest >= '0' && *rest <= '9';
        if (!other && (strncmp(rest, "Model", 5) == 0 || strstr(rest, "Config")))
            return classes[i][1];
    }
    return NULL;
}

/* Fields that have another name, or whose value must be this for us to compute the same. */
static const struct {
    const char *nemo, *ours;
} renamed[] = {{"scale_factor", "rope_scaling_factor"}, {"low_freq_factor", "rope_scaling_low_freq_factor"},
    {"high_freq_factor", "rope_scaling_high_freq_factor"},
    {"old_context_len", "rope_scaling_original_max_position_embeddings"}};
static const struct {
    const char *key, *value;
} required[] = {{"rotary_interleaved", "false"}, {"multi_latent_attention", "false"},
    {"seq_len_interpolation_factor", "null"}, {"query_pre_attn_scalar", "null"}, {"final_logit_softcapping", "null"},
    {"attn_logit_softcapping", "null"}, {"activation_func_fp8_input_store", "false"},
    {"apply_residual_connection_post_layernorm", "false"}};

/* Fields of the run file that NeMo's configuration holds too, but that a model of ours takes from its own run. */
static bool is_of_run(const char *path) {
    static const char *const names[] = {"model.hf", "model.from", "model.recompute", "model.replicate_query_groups"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], path) == 0)
            return true;
    return false;
}

static loom_status write_activation(const loom__yaml *yaml, const loom__yaml_node *config, const char *name, FILE *to) {
    static const struct {
        const char *function;
        bool gated;
        const char *ours;
    } known[] = {{"silu", true, "swiglu"}, {"gelu", true, "geglu_erf"}, {"openai_gelu", true, "geglu"},
        {"fast_gelu", true, "geglu"}, {"gelu", false, "gelu_erf"}, {"openai_gelu", false, "gelu_tanh"},
        {"fast_gelu", false, "gelu_tanh"}};
    const loom__yaml_node *function = member(yaml, config, "activation_func");
    const loom__yaml_node *gate = member(yaml, config, "gated_linear_unit");
    bool gated = false;
    if (!function)
        return LOOM_OK;
    if (gate)
        (void)loom__yaml_is_bool(gate, &gated);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].gated == gated && strcmp(known[i].function, target_of(yaml, function)) == 0) {
            fprintf(to, "  activation: %s\n", known[i].ours);
            return LOOM_OK;
        }
    return loom_fail(LOOM_ERR_UNSUPPORTED,
        "not supported yet: %s: activation_func %.60s%s; silu with a gate, gelu, openai_gelu and fast_gelu are", name,
        target_of(yaml, function), gated ? " with a gate" : "");
}

static loom_status check_required(const char *name, const char *key, const char *found) {
    for (size_t i = 0; i < sizeof required / sizeof *required; i++)
        if (strcmp(required[i].key, key) == 0 && strcmp(required[i].value, found) != 0)
            return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: %s %.60s; only %s works", name, key, found,
                required[i].value);
    return LOOM_OK;
}

/* A list of numbers, one a layer. */
static void write_list(const loom__yaml *yaml, const char *key, const loom__yaml_node *list, FILE *to) {
    fprintf(to, "  %s: [", key);
    for (int64_t i = 0; i < list->count; i++) {
        const loom__yaml_node *item = loom__yaml_at(yaml, list->items[i]);
        fprintf(to, "%s%s", i ? ", " : "", item->kind == LOOM__YAML_SCALAR ? item->text : "no number");
    }
    fputs("]\n", to);
}

static loom_status write_field(
    const char *name, const loom__yaml *yaml, const char *key, const loom__yaml_node *value, FILE *to) {
    char path[128];
    if (value->kind == LOOM__YAML_SEQUENCE && strcmp(key, "moe_layer_freq") == 0)
        write_list(yaml, key, value, to);
    if (value->kind != LOOM__YAML_SCALAR)
        return LOOM_OK;
    LOOM_TRY(check_required(name, key, loom__yaml_is_null(value) ? "null" : value->text));
    const char *ours = key;
    for (size_t i = 0; i < sizeof renamed / sizeof *renamed; i++)
        if (strcmp(renamed[i].nemo, key) == 0)
            ours = renamed[i].ours;
    if (strcmp(ours, "rope_scaling_factor") == 0)
        fputs("  rope_scaling: llama3\n", to);
    snprintf(path, sizeof path, "model.%s", ours);
    int64_t number = loom__field_find(path);
    if (number < 0 || is_of_run(path) || loom__yaml_is_null(value))
        return LOOM_OK;
    if (strcmp(ours, "normalization") == 0)
        fprintf(to, "  normalization: %s\n", strcmp(value->text, "RMSNorm") == 0 ? "rmsnorm" : "layernorm");
    else if (strcmp(ours, "position_embedding_type") == 0 && strcmp(value->text, "learned_absolute") == 0)
        fputs("  position_embedding_type: learned\n", to);
    else
        fprintf(to, "  %s: %s\n", ours, value->text);
    return LOOM_OK;
}

static loom_status write_model(const char *name, const loom__yaml *yaml, FILE *to) {
    const loom__yaml_node *root = loom__yaml_root(yaml), *config = member(yaml, root, "config");
    const char *architecture = architecture_of(target_of(yaml, config));
    if (!config || config->kind != LOOM__YAML_MAPPING)
        return loom_fail(LOOM_ERR_FORMAT, "%s: has no mapping config, where NeMo keeps the model's", name);
    if (!architecture)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: a model of class %.60s; GPT, Llama, Mistral, Mixtral, Qwen2, Qwen3 and Gemma are",
            name, target_of(yaml, config));
    const loom__yaml_node *experts = member(yaml, config, "num_moe_experts");
    /* A Qwen3 with experts is of the same class, or of a subclass. */
    bool sparse = experts && !loom__yaml_is_null(experts) && strcmp(architecture, "qwen3") == 0;
    fprintf(to, "model:\n  architecture: %s%s\n", architecture, sparse ? "_moe" : "");
    for (int64_t i = 0; i < config->count; i++)
        LOOM_TRY(write_field(name, yaml, loom__yaml_at(yaml, config->items[2 * i])->text,
            loom__yaml_at(yaml, config->items[2 * i + 1]), to));
    return write_activation(yaml, config, name, to);
}

static loom_status rewrite(const char *name, const char *text, size_t length, char **out, size_t *bytes) {
    loom__yaml *yaml = NULL;
    LOOM_TRY(loom__yaml_parse(name, text, length, &yaml));
    FILE *to = open_memstream(out, bytes);
    loom_status status = to ? write_model(name, yaml, to) : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", name);
    if (to && fclose(to) != 0 && !status)
        status = loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", name);
    loom__yaml_destroy(yaml);
    return status;
}

static loom_status read_text(const char *path, char **out, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %m", path);
    char *text = malloc(LOOM__YAML_MAX_BYTES + 1);
    *length = text ? fread(text, 1, LOOM__YAML_MAX_BYTES + 1, file) : 0;
    bool failed = ferror(file) != 0;
    fclose(file);
    *out = text;
    if (!text)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    if (failed)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be read", path);
    if (*length > LOOM__YAML_MAX_BYTES)
        return loom_fail(LOOM_ERR_FORMAT, "%s: more than %d bytes", path, LOOM__YAML_MAX_BYTES);
    return LOOM_OK;
}

/* As text, so that a context that names files, itself among them, has none of them opened. */
static loom_status read_run(const char *name, const char *text, size_t length, const char *const *overrides,
    int64_t override_count, loom_run_config **config) {
    loom_run_config *made = NULL;
    LOOM_TRY(loom_run_config_from_text(name, text, length, overrides, override_count, &made));
    if (made->model.hf || made->model.from) {
        loom_run_config_destroy(made);
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: its model comes from elsewhere (model.hf or model.from), expected all of its fields", name);
    }
    *config = made;
    return LOOM_OK;
}

static bool is_overridden(const char *const *overrides, int64_t count) {
    static const char field[] = "model.vocab_size=";
    for (int64_t i = 0; i < count; i++)
        if (strncmp(overrides[i], field, strlen(field)) == 0)
            return true;
    return false;
}

loom_status loom__config_read_context(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **config) {
    char context[PATH_BYTES], *text = NULL, *rewritten = NULL;
    bool is_nemo = false;
    size_t length = 0;
    LOOM_TRY(find_context(path, context, &is_nemo));
    loom_status status = read_text(context, &text, &length);
    if (!status && is_nemo)
        status = rewrite(context, text, length, &rewritten, &length);
    if (!status)
        status = read_run(context, is_nemo ? rewritten : text, length, overrides, override_count, config);
    /* Where nobody says it, it is not that of the bytes, as in a run file. */
    if (!status && is_nemo && !strstr(rewritten, "  vocab_size:") && !is_overridden(overrides, override_count))
        (*config)->model.config.vocab_size = 0;
    free(rewritten);
    free(text);
    return status;
}
