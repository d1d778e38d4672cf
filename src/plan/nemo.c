/* YAML of NeMo and Megatron-Bridge as fields of a run file. Most of their keys have the names of Megatron-Core's
 * configurations, which are the run file's: such a key goes to the field of its name; one table knows the others, and
 * the sections. What neither knows is listed. */
#include "base/yaml.h"
#include "config/field.h"
#include "plan/translation.h"
#include <inttypes.h>
#include <megaloom/names.h>
#include <stdlib.h>
#include <string.h>

/* A section of the file, and where in a run file its keys are looked for. */
static const struct section {
    const char *name;
    const char *places[3];
} sections[] = {
    {"model", {"model.", "strategy.", NULL}},
    {"train", {"data.", "", NULL}},
    {"dataset", {"data.", NULL, NULL}},
    {"data", {"data.", NULL, NULL}},
    {"optimizer", {"optim.", NULL, NULL}},
    {"optim", {"optim.", NULL, NULL}},
    {"scheduler", {"optim.", NULL, NULL}},
    {"sched", {"optim.", NULL, NULL}},
    {"ddp", {"strategy.ddp.", NULL, NULL}},
    {"strategy", {"strategy.", NULL, NULL}},
    {"mixed_precision", {"precision.", NULL, NULL}},
};

/* Keys of other names; flag: what `true` stands for, where the field is no switch. */
static const struct rename {
    const char *section, *key, *field, *flag;
} renames[] = {
    {"model", "encoder_seq_length", "model.seq_length", NULL},
    {"dataset", "sequence_length", "model.seq_length", NULL},
    {"dataset", "seq_length", "model.seq_length", NULL},
    {"data", "seq_length", "model.seq_length", NULL},
    {"model", "activations_checkpoint_granularity", "model.recompute", NULL},
    {"model", "recompute_granularity", "model.recompute", NULL},
    {"model", "gated_linear_unit", "model.activation", "swiglu"},
    {"model", "bias", "model.add_bias_linear", NULL},
    {"model", "rotary_percentage", "model.rotary_percent", NULL},
    {"model", "micro_batch_size", "data.micro_batch_size", NULL},
    {"model", "global_batch_size", "data.global_batch_size", NULL},
    {"model", "rampup_batch_size", "data.rampup_batch_size", NULL},
    {"model", "seed", "seed", NULL},
    {"model", "overlap_p2p_comm", NULL, NULL},
    {"model", "name", NULL, NULL},
    {"optim", "name", "optim.optimizer", NULL},
    {"train", "train_iters", "steps", NULL},
    {"optimizer", "use_distributed_optimizer", "strategy.ddp.use_distributed_optimizer", NULL},
    {"scheduler", "lr_decay_style", "optim.schedule", NULL},
    {"scheduler", "lr_warmup_iters", "optim.warmup_steps", NULL},
    {"scheduler", "lr_decay_iters", "optim.lr_decay_steps", NULL},
    {"scheduler", "lr_warmup_init", "optim.init_lr", NULL},
    {"sched", "name", "optim.schedule", NULL},
    {"trainer", "max_steps", "steps", NULL},
    {"trainer", "precision", "precision", NULL},
    {"trainer", "gradient_clip_val", "optim.clip_grad", NULL},
};

/* Sections, and keys anywhere, that change nothing that a plan counts. */
static const char *const quiet_sections[] = {"exp_manager", "logger", "checkpoint", "tokenizer", "rng", "dist",
    "profiling", "inprocess_restart", "nsys_profile", "name", "run", "restore_from_path", "comm_overlap",
    "rerun_state_machine", "straggler", "peft", "ft", "nvrx_straggler"};
static const char *const quiet_keys[] = {"data_prefix", "index_mapping_dir", "num_workers", "splits_string",
    "tokenizer", "gradient_as_bucket_view", "megatron_amp_O2", "mcore_gpt", "use_flash_attention",
    "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_add_fusion", "apply_rope_fusion",
    "cross_entropy_loss_fusion", "gradient_accumulation_fusion", "transformer_engine", "nsys_profile", "eval_interval",
    "eval_iters", "log_every_n_steps", "val_check_interval", "limit_val_batches", "limit_test_batches", "accelerator",
    "logger", "enable_checkpointing", "use_distributed_sampler", "accumulate_grad_batches", "max_epochs", "max_time",
    "benchmark", "enable_model_summary", "enable_progress_bar", "betas", "weight_decay_incr_style",
    "resume_from_checkpoint", "dataloader_type", "data_impl", "skip_warmup", "random_seed", "path", "blend"};

static bool is_one_of(const char *name, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i], name) == 0)
            return true;
    return false;
}

typedef struct reader {
    loom__translator t;
    const loom__yaml *yaml;
    int64_t nodes, devices;
    bool ranks_unknown; /* the machine, or an interpolation, would tell */
} reader;

static const struct rename *find_rename(const char *section, const char *key) {
    for (size_t i = 0; i < sizeof renames / sizeof *renames; i++)
        if (strcmp(renames[i].section, section) == 0 && strcmp(renames[i].key, key) == 0)
            return &renames[i];
    return NULL;
}

/* The field of the key's own name in a place of its section; NULL where there is none. */
static const char *find_field(const char *section, const char *key, char path[160]) {
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        if (strcmp(sections[i].name, section) != 0)
            continue;
        for (int place = 0; place < 3 && sections[i].places[place]; place++) {
            snprintf(path, 160, "%s%.100s", sections[i].places[place], key);
            if (loom__field_find(path) >= 0)
                return path;
        }
    }
    return NULL;
}

/* "[1, 2]" of a list of scalars; false for what is deeper. */
static bool text_of(const reader *r, const loom__yaml_node *node, char *text, size_t bytes) {
    size_t used = 0;
    if (node->kind == LOOM__YAML_SCALAR) {
        snprintf(text, bytes, "%.400s", node->text);
        return true;
    }
    if (node->kind == LOOM__YAML_MAPPING)
        return false;
    used += (size_t)snprintf(text, bytes, "[");
    for (int64_t i = 0; i < node->count && used + 32 < bytes; i++) {
        const loom__yaml_node *item = loom__yaml_at(r->yaml, node->items[i]);
        if (item->kind != LOOM__YAML_SCALAR)
            return false;
        used += (size_t)snprintf(text + used, bytes - used, "%s%.24s", i ? ", " : "", item->text);
    }
    snprintf(text + used, bytes - used, "]");
    return true;
}

static void take_sizes(reader *r, const char *key, const loom__yaml_node *node) {
    int64_t value;
    if (!loom__yaml_is_int(node, &value) || value == -1) {
        /* "auto", -1, "${…}" */
        r->ranks_unknown = true;
        loom__translator_leave_out(&r->t, "line %d: %s: \"%.60s\" is for NeMo to find out, expected a number",
            node->line, key, node->kind == LOOM__YAML_SCALAR ? node->text : "[…]");
    } else if (value < 1 || value > INT32_MAX) {
        loom__translator_fault(&r->t, "line %d: %s: found %" PRId64 ", expected an integer from 1 to %d", node->line,
            key, value, INT32_MAX);
    } else if (strcmp(key, "num_nodes") == 0) {
        r->nodes = value;
    } else {
        r->devices = value;
    }
}

/* What `uniform` recomputation of single layers says, and a residual stream in the dtype of everything else, is what
 * there is here. */
static bool says_nothing_new(const char *key, const loom__yaml_node *node) {
    static const struct {
        const char *key, *value;
    } usual[] = {{"activations_checkpoint_method", "uniform"}, {"recompute_method", "uniform"},
        {"activations_checkpoint_num_layers", "1"}, {"recompute_num_layers", "1"}};
    bool yes;
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        if (strcmp(usual[i].key, key) == 0)
            return node->kind == LOOM__YAML_SCALAR && strcmp(node->text, usual[i].value) == 0;
    return strcmp(key, "fp32_residual_connection") == 0 && loom__yaml_is_bool(node, &yes) && !yes;
}

/* The key of the section that was meant, perhaps; NULL = none is near. */
static const char *nearest_key(const char *section, const char *key) {
    enum { KEYS_MAX = 512 };
    const char *names[KEYS_MAX];
    int64_t count = 0;
    for (size_t i = 0; i < sizeof renames / sizeof *renames; i++)
        if (strcmp(renames[i].section, section) == 0)
            names[count++] = renames[i].key;
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        for (int place = 0; place < 3 && sections[i].places[place]; place++) {
            const char *prefix = sections[i].places[place];
            size_t length = strlen(prefix);
            for (int64_t f = 0; f < loom__field_count && strcmp(sections[i].name, section) == 0; f++) {
                const char *path = loom__fields[f].path;
                if (strncmp(path, prefix, length) == 0 && !strchr(path + length, '.') && count < KEYS_MAX)
                    names[count++] = path + length;
            }
        }
    return loom_nearest_name(key, names, count);
}

static void add_value(reader *r, const char *field, const char *flag, const loom__yaml_node *node, const char *text) {
    bool yes;
    if (flag && loom__yaml_is_bool(node, &yes)) {
        if (yes)
            loom__translator_add(&r->t, field, flag);
        return;
    }
    if (strcmp(field, "model.normalization") == 0 && strcmp(text, "layernorm1p") == 0)
        loom__translator_add(&r->t, "model.layernorm_zero_centered_gamma", "true");
    if (strcmp(field, "optim.optimizer") == 0 && strncmp(text, "distributed_", 12) == 0)
        loom__translator_add(&r->t, "strategy.ddp.use_distributed_optimizer", "true");
    loom__translator_add(&r->t, field, loom__translated_value(field, text));
}

static void take_section(reader *r, const char *section, const loom__yaml_node *node);

static void take_key(reader *r, const char *section, const char *key, const loom__yaml_node *node) {
    char path[160], text[16 * LOOM_CONTEXT_LAYERS_MAX];
    bool is_precision =
        strcmp(section, "mixed_precision") == 0 && (strcmp(key, "bf16") == 0 || strcmp(key, "fp16") == 0);
    bool yes;
    if (*key == '_' || loom__yaml_is_null(node) || is_one_of(key, quiet_keys, sizeof quiet_keys / sizeof *quiet_keys))
        return;
    if (strcmp(key, "num_nodes") == 0 || strcmp(key, "devices") == 0) {
        take_sizes(r, key, node);
        return;
    }
    if (is_precision) {
        if (loom__yaml_is_bool(node, &yes) && yes)
            loom__translator_add(&r->t, "precision", *key == 'b' ? "bf16-mixed" : "16-mixed");
        return;
    }
    /* NeMo puts optimizer, schedule and data into the model; Megatron-Bridge its DDP fields into a section. */
    if (node->kind == LOOM__YAML_MAPPING) {
        take_section(r, key, node);
        return;
    }
    const struct rename *other = find_rename(section, key);
    const char *field = other ? other->field : find_field(section, key, path);
    if (other && !other->field)
        return;
    if (!field && says_nothing_new(key, node))
        return;
    if (!field || !text_of(r, node, text, sizeof text)) {
        const char *meant = field ? NULL : nearest_key(section, key);
        loom__translator_leave_out(&r->t, "line %d: %s.%.80s has no field here%s%s%s", node->line, section, key,
            meant ? "; did you mean " : "", meant ? meant : "", meant ? "?" : "");
        return;
    }
    if (node->kind == LOOM__YAML_SCALAR && strstr(text, "${")) {
        loom__translator_leave_out(&r->t, "line %d: %s.%.80s: \"%.60s\" is for NeMo to expand, expected its value",
            node->line, section, key, text);
        return;
    }
    add_value(r, field, other ? other->flag : NULL, node, text);
}

static bool is_section(const char *name) {
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (strcmp(sections[i].name, name) == 0)
            return true;
    return strcmp(name, "trainer") == 0;
}

static void take_section(reader *r, const char *section, const loom__yaml_node *node) {
    if (is_one_of(section, quiet_sections, sizeof quiet_sections / sizeof *quiet_sections) || *section == '_')
        return;
    if (!is_section(section)) {
        loom__translator_leave_out(&r->t, "line %d: section %.80s has no fields here", node->line, section);
        return;
    }
    for (int64_t i = 0; i < node->count; i++)
        take_key(r, section, loom__yaml_at(r->yaml, node->items[2 * i])->text,
            loom__yaml_at(r->yaml, node->items[2 * i + 1]));
}

static void take_root(reader *r, const loom__yaml_node *root) {
    for (int64_t i = 0; i < root->count; i++) {
        const char *key = loom__yaml_at(r->yaml, root->items[2 * i])->text;
        const loom__yaml_node *node = loom__yaml_at(r->yaml, root->items[2 * i + 1]);
        if (node->kind == LOOM__YAML_MAPPING)
            take_section(r, key, node);
        else if (strcmp(key, "mixed_precision") == 0 && node->kind == LOOM__YAML_SCALAR)
            loom__translator_add(&r->t, "precision", loom__translated_value("precision", node->text));
        else if (!is_one_of(key, quiet_sections, sizeof quiet_sections / sizeof *quiet_sections) && *key != '_')
            loom__translator_leave_out(&r->t, "line %d: %.80s has no field here", node->line, key);
    }
}

static void add_defaults(reader *r) {
    static const char *const defaults[][2] = {
        {"model.architecture", "gpt2"}, {"model.add_qkv_bias", "false"}, {"data.kind", "mock"}, {"steps", "1"}};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        loom__translator_add(&r->t, defaults[i][0], defaults[i][1]);
}

static loom_status translate(reader *r, const char *name, const char *text, size_t length) {
    loom__yaml *yaml = NULL;
    LOOM_TRY(loom__yaml_parse(name, text, length, &yaml));
    const loom__yaml_node *root = loom__yaml_root(yaml);
    loom_status status = root && root->kind == LOOM__YAML_MAPPING
                             ? LOOM_OK
                             : loom_fail(LOOM_ERR_FORMAT,
                                   "%s: found no mapping, expected sections such as model and "
                                   "trainer",
                                   name);
    r->yaml = yaml;
    if (!status) {
        add_defaults(r);
        take_root(r, root);
        /* The corpus is not needed; whatever the file says of it must not be looked for. */
        loom__translator_add(&r->t, "data.kind", "mock");
        if (!r->ranks_unknown && r->devices > 0)
            loom__translator_set_ranks(&r->t, r->devices, r->nodes);
    }
    loom__yaml_destroy(yaml);
    return status;
}

loom_status loom_plan_translate_nemo(
    const char *name, const char *text, size_t length, loom_plan_translation *translation) {
    reader r = {.nodes = 0};
    loom_status status = loom__translator_begin(&r.t, name, length);
    if (!status)
        status = translate(&r, name, text, length);
    return loom__translator_end(&r.t, status, translation);
}

bool loom_plan_is_nemo(const char *text, size_t length) {
    static const char *const own[] = {"trainer", "exp_manager", "train", "mixed_precision", "ddp", "optimizer"};
    loom__yaml *yaml = NULL;
    if (loom__yaml_parse("", text, length, &yaml)) {
        loom_error_clear();
        return false;
    }
    const loom__yaml_node *root = loom__yaml_root(yaml);
    bool found = false;
    for (int64_t i = 0; root && root->kind == LOOM__YAML_MAPPING && i < root->count; i++)
        found = found || is_one_of(loom__yaml_at(yaml, root->items[2 * i])->text, own, sizeof own / sizeof *own);
    loom__yaml_destroy(yaml);
    return found;
}
