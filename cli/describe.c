/* megaloom describe: what a model is made of, from its config.json or the context of its checkpoint, and how it falls
 * on the stages of a pipeline; its weight files are looked at where they are there, for their dtype. */
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZES_MAX = 4096, KINDS = 5, DTYPES = 3 };

/* Training keeps a weight, its gradient and AdamW's two moments in fp32. */
enum { TRAINING_BYTES = 16 };

typedef struct model_facts {
    loom_model_config config;
    loom_run_config *stored_run; /* of a checkpoint, whose texts `config` borrows; or NULL */
    loom_model_description parameters;
    int64_t sizes[SIZES_MAX], size_count;            /* legal tensor sizes */
    int64_t replicated[SIZES_MAX], replicated_count; /* with copies of query groups */
    const char *stored;                              /* dtype of the first tensor; NULL: there are no weight files */
    int64_t stored_tensors;
    int64_t pipelines[SIZES_MAX], pipeline_count; /* sizes that divide the layers */
    loom_stage_split split;                       /* asked for; without a pipeline size: none */
    int64_t chunks;                               /* of a stage */
    loom_stage *stages;                           /* in the order of depth */
    int64_t *stage_parameters;
} model_facts;

/* What a split depends on, by the names of a run file. */
static const char *const split_fields[] = {"strategy.pipeline_model_parallel_size",
    "strategy.virtual_pipeline_model_parallel_size", "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage", "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split", "model.pipeline_model_parallel_layout",
    "model.balanced_pipeline_split"};
enum { SPLIT_FIELDS = sizeof split_fields / sizeof *split_fields };

typedef struct kind {
    const char *name;
    int64_t count;
} kind;

static void list_kinds(const loom_model_description *from, kind kinds[KINDS]) {
    const kind all[KINDS] = {{"embedding", from->embedding}, {"attention", from->attention}, {"mlp", from->mlp},
        {"norms", from->norms}, {"head", from->head}};
    memcpy(kinds, all, sizeof all);
}

static const struct {
    const char *name;
    int64_t bytes;
} dtypes[DTYPES] = {{"fp32", 4}, {"bf16", 2}, {"fp16", 2}};

static bool is_split_field(const char *override) {
    size_t length = strcspn(override, "=");
    for (int i = 0; i < SPLIT_FIELDS && override[length]; i++)
        if (strlen(split_fields[i]) == length && strncmp(override, split_fields[i], length) == 0)
            return true;
    return false;
}

static void list_pipelines(model_facts *facts) {
    for (int64_t pp = 1; pp <= facts->config.num_layers && pp <= SIZES_MAX; pp++)
        if (facts->config.num_layers % pp == 0)
            facts->pipelines[facts->pipeline_count++] = pp;
}

/* Cuts the model as the overrides say and counts the parameters of each chunk. */
static loom_status cut(const loom_cli_run_arguments *given, model_facts *facts) {
    loom_run_config *run;
    LOOM_TRY(loom_run_config_load(NULL, given->overrides, given->override_count, &run));
    facts->split = loom_stage_split_of(&run->strategy, &run->model.config);
    facts->split.layers = facts->config.num_layers;
    loom_status status = loom_stage_split_chunks(&facts->split, &facts->chunks);
    if (!status) {
        int64_t count = facts->chunks * facts->split.pipeline_model_parallel_size;
        facts->stages = calloc((size_t)count, sizeof *facts->stages);
        facts->stage_parameters = calloc((size_t)count, sizeof *facts->stage_parameters);
        status = facts->stages && facts->stage_parameters
                     ? loom_stage_split_make(&facts->split, facts->stages)
                     : loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " chunks", count);
        loom_model_description of;
        for (int64_t i = 0; i < count && !status; i++) {
            status = loom_model_describe_stage(&facts->config, &facts->stages[i], &of);
            facts->stage_parameters[i] = status ? 0 : of.total;
        }
    }
    facts->split.pipeline_model_parallel_layout = NULL; /* it goes with the run file */
    loom_run_config_destroy(run);
    return status;
}

/* *dtype and *count of the weights at `path`; left as they are where there are none. */
static loom_status look_at_directory(const char *path, const char **dtype, int64_t *count) {
    loom_safetensors *file;
    loom_status status = loom_safetensors_open(path, &file);
    if (status == LOOM_ERR_NOT_FOUND) {
        loom_error_clear();
        return LOOM_OK;
    }
    LOOM_TRY(status);
    const loom_safetensors_tensor *first = loom_safetensors_get(file, 0);
    *dtype = first ? loom_dtype_name(first->dtype) : "no tensor";
    *count = loom_safetensors_count(file);
    loom_safetensors_close(file);
    return LOOM_OK;
}

static loom_status look_at_checkpoint(const char *path, const char **dtype, int64_t *count) {
    loom_checkpoint *checkpoint;
    LOOM_TRY(loom_checkpoint_open(path, &checkpoint));
    for (int64_t i = 0; i < loom_checkpoint_get_info(checkpoint)->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, i);
        /* With experts also "chained_0.optimizer.…". */
        if (strncmp(tensor->name, "optimizer.", strlen("optimizer.")) == 0 || strstr(tensor->name, ".optimizer."))
            continue;
        *dtype = *count ? *dtype : loom_dtype_name(tensor->dtype);
        ++*count;
    }
    loom_checkpoint_close(checkpoint);
    return LOOM_OK;
}

/* Sizes follow from the model alone: a run's padding is none of its. */
static loom_status read_config(const loom_cli_model_source *model, model_facts *facts) {
    facts->config = loom_model_config_default("gpt2");
    if (model->hf) {
        LOOM_TRY(loom_hf_read_config(model->hf, &facts->config));
    } else {
        LOOM_TRY(loom_checkpoint_run_config(model->checkpoint, NULL, 0, &facts->stored_run));
        facts->config = facts->stored_run->model.config;
        facts->config.padded_vocab_size = 0;
        facts->config.replicate_query_groups = false;
    }
    facts->config.make_vocab_size_divisible_by = 1;
    return LOOM_OK;
}

static loom_status look(const loom_cli_model_source *model, const loom_cli_run_arguments *split, model_facts *facts) {
    LOOM_TRY(read_config(model, facts));
    LOOM_TRY(loom_model_describe(&facts->config, &facts->parameters));
    facts->size_count = loom_model_tensor_sizes(&facts->config, facts->sizes, SIZES_MAX);
    list_pipelines(facts);
    if (split->override_count > 0)
        LOOM_TRY(cut(split, facts));
    facts->config.replicate_query_groups = true;
    facts->replicated_count = loom_model_tensor_sizes(&facts->config, facts->replicated, SIZES_MAX);
    return model->hf ? look_at_directory(model->hf, &facts->stored, &facts->stored_tensors)
                     : look_at_checkpoint(model->checkpoint, &facts->stored, &facts->stored_tensors);
}

/* ---- text ---- */

/* "1,771,200" */
static const char *grouped(int64_t number, char text[40]) {
    char digits[32];
    int length = snprintf(digits, sizeof digits, "%" PRId64, number), used = 0;
    for (int i = 0; i < length; i++) {
        text[used++] = digits[i];
        if ((length - 1 - i) % 3 == 0 && i + 1 < length)
            text[used++] = ',';
    }
    text[used] = '\0';
    return text;
}

static const char *bytes_text(double bytes, char text[40]) {
    static const char *const units[] = {"bytes", "KB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    while (bytes >= 1000 && unit + 1 < sizeof units / sizeof *units) {
        bytes /= 1000;
        unit++;
    }
    snprintf(text, 40, unit ? "%.4g %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

static void print_sizes(const char *title, const int64_t *sizes, int64_t count) {
    printf("%-16s", title);
    for (int64_t i = 0; i < count && i < SIZES_MAX; i++)
        printf("%s%" PRId64, i ? ", " : "", sizes[i]);
    puts("");
}

static void print_chunk(const model_facts *facts, int64_t index, int64_t pipeline) {
    const loom_stage *stage = &facts->stages[index];
    char name[64], what[96], text[40];
    if (facts->chunks > 1)
        snprintf(name, sizeof name, "stage %" PRId64 ".%" PRId64, index % pipeline, index / pipeline);
    else
        snprintf(name, sizeof name, "stage %" PRId64, index);
    if (stage->layers > 1)
        snprintf(what, sizeof what, "layers %" PRId64 "-%" PRId64, stage->first_layer,
            stage->first_layer + stage->layers - 1);
    else if (stage->layers == 1)
        snprintf(what, sizeof what, "layer %" PRId64, stage->first_layer);
    else
        snprintf(what, sizeof what, "no layer");
    printf("  %-14s%-16s%-22s%18s\n", name, what,
        stage->embedding && stage->loss ? "embedding, head, loss"
        : stage->embedding              ? "embedding"
        : stage->loss                   ? "head, loss"
                                        : "",
        grouped(facts->stage_parameters[index], text));
}

static void print_stages(const model_facts *facts) {
    int64_t pipeline = facts->split.pipeline_model_parallel_size, most = 0, all = 0;
    printf("%-16s%" PRId64 " stage%s", "pipeline", pipeline, pipeline == 1 ? "" : "s");
    printf(facts->chunks > 1 ? " of %" PRId64 " chunks\n" : "\n", facts->chunks);
    for (int64_t stage = 0; stage < pipeline; stage++) {
        int64_t own = 0;
        for (int64_t chunk = 0; chunk < facts->chunks; chunk++) {
            print_chunk(facts, chunk * pipeline + stage, pipeline);
            own += facts->stage_parameters[chunk * pipeline + stage];
        }
        most = own > most ? own : most;
        all += own;
    }
    printf(
        "  the largest stage has %.2f times the mean of the stages\n", (double)most * (double)pipeline / (double)all);
    if (all > facts->parameters.total)
        puts("  the last stage has a copy of the tied embedding");
}

static void print_experts(const loom_model_config *config) {
    const loom_moe_config *moe = &config->moe;
    int64_t f = moe->moe_ffn_hidden_size ? moe->moe_ffn_hidden_size : config->ffn_hidden_size;
    if (moe->num_moe_experts == 0)
        return;
    printf("%-16s%" PRId64 " of MLP %" PRId64 ", %" PRId64 " a token, in %" PRId64 " of the layers\n", "experts",
        moe->num_moe_experts, f, moe->moe_router_topk, loom_model_expert_layers(config));
    if (moe->moe_shared_expert_intermediate_size > 0)
        printf("%-16sMLP %" PRId64 "%s\n", "shared expert", moe->moe_shared_expert_intermediate_size,
            moe->moe_shared_expert_gate ? ", with a gate" : "");
}

static void print_text(const char *directory, const model_facts *facts) {
    const loom_model_config *config = &facts->config;
    int64_t n = config->num_attention_heads, g = config->num_query_groups ? config->num_query_groups : n;
    int64_t d = config->kv_channels ? config->kv_channels : config->hidden_size / n;
    int64_t f = config->ffn_hidden_size ? config->ffn_hidden_size : 4 * config->hidden_size;
    char text[40], memory[40];
    printf("%s\n", directory);
    printf("%-16s%s\n", "architecture", config->architecture);
    printf("%-16s%" PRId64 "\n", "layers", config->num_layers);
    printf("%-16s%" PRId64 ", MLP %" PRId64 "\n", "hidden size", config->hidden_size, f);
    printf("%-16s%" PRId64 " of %" PRId64 " channels, %" PRId64 " query groups\n", "heads", n, d, g);
    print_experts(config);
    printf("%-16s%" PRId64 "\n", "vocabulary", config->vocab_size);
    printf("%-16s%" PRId64 " tokens\n", "context", config->max_position_embeddings);
    printf("%-16s%s\n", "head", config->share_embeddings_and_output_weights ? "tied to the embedding" : "its own");
    if (facts->stored)
        printf("%-16s%" PRId64 " tensors, %s\n", "weight files", facts->stored_tensors, facts->stored);
    else
        printf("%-16snone here\n", "weight files");
    puts("parameters");
    kind kinds[KINDS];
    list_kinds(&facts->parameters, kinds);
    for (int i = 0; i < KINDS; i++)
        printf("  %-14s%18s  %5.1f%%\n", kinds[i].name, grouped(kinds[i].count, text),
            100.0 * (double)kinds[i].count / (double)facts->parameters.total);
    printf("  %-14s%18s\n", "total", grouped(facts->parameters.total, text));
    puts("memory");
    for (int i = 0; i < DTYPES; i++)
        printf("  weights %-22s%s\n", dtypes[i].name,
            bytes_text((double)facts->parameters.total * (double)dtypes[i].bytes, memory));
    printf("  training fp32, AdamW        %s, activations not counted\n",
        bytes_text((double)facts->parameters.total * TRAINING_BYTES, memory));
    print_sizes("tensor sizes", facts->sizes, facts->size_count);
    if (facts->replicated_count > facts->size_count)
        print_sizes("  with copies", facts->replicated, facts->replicated_count);
    print_sizes("pipeline sizes", facts->pipelines, facts->pipeline_count);
    if (facts->stages)
        print_stages(facts);
}

/* ---- JSON ---- */

static json_t *sizes_json(const int64_t *sizes, int64_t count) {
    json_t *made = json_array();
    for (int64_t i = 0; i < count && i < SIZES_MAX; i++)
        json_array_append_new(made, json_integer(sizes[i]));
    return made;
}

/* Numbers of the chunks of each stage: [stage][chunk]. */
static json_t *chunks_json(const model_facts *facts, int64_t (*number)(const model_facts *facts, int64_t index)) {
    int64_t pipeline = facts->split.pipeline_model_parallel_size;
    json_t *all = json_array();
    for (int64_t stage = 0; stage < pipeline; stage++) {
        json_t *own = json_array();
        for (int64_t chunk = 0; chunk < facts->chunks; chunk++)
            json_array_append_new(own, json_integer(number(facts, chunk * pipeline + stage)));
        json_array_append_new(all, own);
    }
    return all;
}

static int64_t layers_of(const model_facts *facts, int64_t index) {
    return facts->stages[index].layers;
}
static int64_t offset_of(const model_facts *facts, int64_t index) {
    return facts->stages[index].first_layer;
}
static int64_t parameters_of(const model_facts *facts, int64_t index) {
    return facts->stage_parameters[index];
}

static json_t *pipeline_json(const model_facts *facts) {
    return json_pack("{s:I, s:I, s:o, s:o, s:o}", "pp", (json_int_t)facts->split.pipeline_model_parallel_size,
        "vp_found", (json_int_t)facts->chunks, "build", chunks_json(facts, layers_of), "offset",
        chunks_json(facts, offset_of), "parameters", chunks_json(facts, parameters_of));
}

/* NULL for a dense model. */
static json_t *experts_json(const loom_model_config *config) {
    const loom_moe_config *moe = &config->moe;
    return moe->num_moe_experts == 0
               ? NULL
               : json_pack("{s:I, s:I, s:I, s:I, s:I, s:b}", "num_moe_experts", (json_int_t)moe->num_moe_experts,
                     "moe_ffn_hidden_size",
                     (json_int_t)(moe->moe_ffn_hidden_size ? moe->moe_ffn_hidden_size : config->ffn_hidden_size),
                     "moe_router_topk", (json_int_t)moe->moe_router_topk, "layers_with_experts",
                     (json_int_t)loom_model_expert_layers(config), "moe_shared_expert_intermediate_size",
                     (json_int_t)moe->moe_shared_expert_intermediate_size, "moe_shared_expert_gate",
                     moe->moe_shared_expert_gate ? 1 : 0);
}

static int print_json(const model_facts *facts) {
    const loom_model_config *config = &facts->config;
    int64_t n = config->num_attention_heads, total = facts->parameters.total;
    json_t *parameters = json_object(), *memory = json_object();
    kind kinds[KINDS];
    list_kinds(&facts->parameters, kinds);
    for (int i = 0; i < KINDS; i++)
        json_object_set_new(parameters, kinds[i].name, json_integer(kinds[i].count));
    json_object_set_new(parameters, "total", json_integer(total));
    for (int i = 0; i < DTYPES; i++)
        json_object_set_new(memory, dtypes[i].name, json_integer(total * dtypes[i].bytes));
    json_object_set_new(memory, "training_fp32", json_integer(total * TRAINING_BYTES));
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s?, s:o, s:o, s:o, s:o, s:o, s:o*, s:o*}", "architecture",
        config->architecture, "num_layers", (json_int_t)config->num_layers, "hidden_size",
        (json_int_t)config->hidden_size, "ffn_hidden_size",
        (json_int_t)(config->ffn_hidden_size ? config->ffn_hidden_size : 4 * config->hidden_size),
        "num_attention_heads", (json_int_t)n, "num_query_groups",
        (json_int_t)(config->num_query_groups ? config->num_query_groups : n), "kv_channels",
        (json_int_t)(config->kv_channels ? config->kv_channels : config->hidden_size / n), "vocab_size",
        (json_int_t)config->vocab_size, "max_position_embeddings", (json_int_t)config->max_position_embeddings,
        "tied_head", config->share_embeddings_and_output_weights ? 1 : 0, "stored_dtype", facts->stored, "parameters",
        parameters, "memory_bytes", memory, "tensor_sizes", sizes_json(facts->sizes, facts->size_count),
        "tensor_sizes_with_replicated_query_groups", sizes_json(facts->replicated, facts->replicated_count),
        "pipeline_sizes", sizes_json(facts->pipelines, facts->pipeline_count), "pipeline",
        facts->stages ? pipeline_json(facts) : NULL, "experts", experts_json(config));
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory for the description"));
    puts(text);
    free(text);
    return 0;
}

/* ---- the command ---- */

typedef struct arguments {
    loom_cli_model_source model;
    bool json;
    loom_cli_run_arguments split;
    char pipeline[64], chunks[64]; /* the overrides that --pp and --vp stand for */
} arguments;

static void take_size(char *override, size_t bytes, const char *option, const char *field, const char *text,
    loom_cli_run_arguments *to, const struct argp_state *state) {
    if (snprintf(override, bytes, "%s=%s", field, text) >= (int)bytes)
        argp_error(state, "%s is '%s': expected a size, at most 9007199254740992", option, text);
    loom_cli_run_argument(to, override, state);
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'j':
        to->json = true;
        return 0;
    case 'p':
        take_size(to->pipeline, sizeof to->pipeline, "--pp", split_fields[0], text, &to->split, state);
        return 0;
    case 'v':
        take_size(to->chunks, sizeof to->chunks, "--vp", split_fields[1], text, &to->split, state);
        return 0;
    case ARGP_KEY_ARG:
        if (!is_split_field(text))
            argp_error(state,
                "found %s, expected FIELD=VALUE with a field of the pipeline split: %s, %s, %s, %s, %s, %s, %s, %s",
                text, split_fields[0], split_fields[1], split_fields[2], split_fields[3], split_fields[4],
                split_fields[5], split_fields[6], split_fields[7]);
        loom_cli_run_argument(&to->split, text, state);
        return 0;
    case ARGP_KEY_END:
        loom_cli_model_source_check(&to->model, state);
        return 0;
    default:
        return loom_cli_take_model(&to->model, key, text);
    }
}

int loom_cli_describe(int argc, char **argv) {
    static const struct argp_option options[] = {LOOM_CLI_MODEL_OPTIONS, {"json", 'j', NULL, 0, "JSON", 0},
        {"pp", 'p', "P", 0, "Show how layers and parameters fall on P pipeline stages", 0},
        {"vp", 'v', "V", 0, "Each stage has V chunks of the model", 0}, {0}};
    static const struct argp argp = {options, take, "(--hf DIR | --checkpoint DIR) [FIELD=VALUE...]",
        "Describes a model: sizes, parameters by kind, memory in each dtype, legal tensor and pipeline sizes.\v"
        "Numbers are those of the whole model, without the padding rows of the vocabulary. Tensor sizes \"with "
        "copies\" need model.replicate_query_groups=true; pipeline sizes are those that divide the layers. The fields "
        "are those of a run file that cut a model into stages. No weight is read; a config.json alone is enough.",
        NULL, NULL, NULL};
    arguments given = {0};
    argp_err_exit_status = 2;
    loom_status made = loom_cli_run_arguments_create(argc, &given.split);
    if (made)
        return loom_cli_fail(made);
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    model_facts *facts = calloc(1, sizeof *facts);
    loom_status status = facts ? look(&given.model, &given.split, facts)
                               : loom_fail(LOOM_ERR_MEMORY, "out of memory for the description");
    int code = status ? loom_cli_fail(status) : 0;
    bool prints = !status && loom_cli_process() == 0;
    if (prints && given.json)
        code = print_json(facts);
    else if (prints)
        print_text(given.model.hf ? given.model.hf : given.model.checkpoint, facts);
    if (facts) {
        free(facts->stages);
        free(facts->stage_parameters);
        loom_run_config_destroy(facts->stored_run);
    }
    free(facts);
    loom_cli_run_arguments_free(&given.split);
    if (code == 0 && (fflush(stdout) != 0 || ferror(stdout))) {
        fprintf(stderr, "megaloom: cannot write the output: %s\n", strerror(errno));
        code = 1;
    }
    return code;
}
