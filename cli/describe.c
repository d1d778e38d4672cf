/* megaloom describe: what a Hugging Face model is made of, from its config.json; its weight files are looked at where
 * they are there, for their dtype. */
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
    loom_model_description parameters;
    int64_t sizes[SIZES_MAX], size_count;            /* legal tensor sizes */
    int64_t replicated[SIZES_MAX], replicated_count; /* with copies of query groups */
    const char *stored;                              /* dtype of the first tensor; NULL: there are no weight files */
    int64_t stored_tensors;
} model_facts;

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

static loom_status look(const char *directory, model_facts *facts) {
    facts->config = loom_model_config_default("gpt2");
    facts->config.make_vocab_size_divisible_by = 1;
    LOOM_TRY(loom_hf_read_config(directory, &facts->config));
    LOOM_TRY(loom_model_describe(&facts->config, &facts->parameters));
    facts->size_count = loom_model_tensor_sizes(&facts->config, facts->sizes, SIZES_MAX);
    facts->config.replicate_query_groups = true;
    facts->replicated_count = loom_model_tensor_sizes(&facts->config, facts->replicated, SIZES_MAX);
    loom_safetensors *file;
    loom_status status = loom_safetensors_open(directory, &file);
    if (status == LOOM_ERR_NOT_FOUND) {
        loom_error_clear();
        return LOOM_OK;
    }
    LOOM_TRY(status);
    const loom_safetensors_tensor *first = loom_safetensors_get(file, 0);
    facts->stored = first ? loom_dtype_name(first->dtype) : "no tensor";
    facts->stored_tensors = loom_safetensors_count(file);
    loom_safetensors_close(file);
    return LOOM_OK;
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
}

/* ---- JSON ---- */

static json_t *sizes_json(const int64_t *sizes, int64_t count) {
    json_t *made = json_array();
    for (int64_t i = 0; i < count && i < SIZES_MAX; i++)
        json_array_append_new(made, json_integer(sizes[i]));
    return made;
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
    json_t *root = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s?, s:o, s:o, s:o, s:o}",
        "architecture", config->architecture, "num_layers", (json_int_t)config->num_layers, "hidden_size",
        (json_int_t)config->hidden_size, "ffn_hidden_size",
        (json_int_t)(config->ffn_hidden_size ? config->ffn_hidden_size : 4 * config->hidden_size),
        "num_attention_heads", (json_int_t)n, "num_query_groups",
        (json_int_t)(config->num_query_groups ? config->num_query_groups : n), "kv_channels",
        (json_int_t)(config->kv_channels ? config->kv_channels : config->hidden_size / n), "vocab_size",
        (json_int_t)config->vocab_size, "max_position_embeddings", (json_int_t)config->max_position_embeddings,
        "tied_head", config->share_embeddings_and_output_weights ? 1 : 0, "stored_dtype", facts->stored, "parameters",
        parameters, "memory_bytes", memory, "tensor_sizes", sizes_json(facts->sizes, facts->size_count),
        "tensor_sizes_with_replicated_query_groups", sizes_json(facts->replicated, facts->replicated_count));
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
    const char *hf;
    bool json;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'm':
        to->hf = text;
        return 0;
    case 'j':
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "found %s, expected options alone", text);
        return 0;
    case ARGP_KEY_END:
        if (!to->hf)
            argp_error(state, "--hf must be given");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int loom_cli_describe(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"hf", 'm', "DIR", 0, "Hugging Face directory of the model", 0}, {"json", 'j', NULL, 0, "JSON", 0}, {0}};
    static const struct argp argp = {options, take, "--hf DIR",
        "Describes a model: sizes, parameters by kind, memory in each dtype, legal tensor sizes.\v"
        "Numbers are those of the whole model, without the padding rows of the vocabulary. Tensor sizes \"with "
        "copies\" "
        "need model.replicate_query_groups=true. No weight is read; a config.json alone is enough.",
        NULL, NULL, NULL};
    arguments given = {0};
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    model_facts *facts = calloc(1, sizeof *facts);
    loom_status status =
        facts ? look(given.hf, facts) : loom_fail(LOOM_ERR_MEMORY, "out of memory for the description");
    int code = status ? loom_cli_fail(status) : 0;
    bool prints = !status && loom_cli_process() == 0;
    if (prints && given.json)
        code = print_json(facts);
    else if (prints)
        print_text(given.hf, facts);
    free(facts);
    if (code == 0 && (fflush(stdout) != 0 || ferror(stdout))) {
        fprintf(stderr, "megaloom: cannot write the output: %s\n", strerror(errno));
        code = 1;
    }
    return code;
}
