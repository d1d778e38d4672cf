/* megaloom eval: the loss of given tokens under a model on the disk, on any layout; logits and gradients into a
 * safetensors file. The tokens are cut over the data-parallel ranks in contiguous parts, which is put together again
 * for the file. */
#include "commands.h"
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the tokens ---- */

/* Rows of tokens and labels; a label below 0 does not count. */
typedef struct token_rows {
    int64_t b, s;
    int64_t *tokens, *labels; /* [b, s] */
} token_rows;

static void token_rows_free(token_rows *rows) {
    free(rows->tokens);
    free(rows->labels);
}

static loom_status read_pair(const char *path, const loom_safetensors *file, token_rows *rows) {
    const loom_safetensors_tensor *ids, *labels;
    LOOM_TRY(loom_safetensors_find(file, "input_ids", &ids));
    LOOM_TRY(loom_safetensors_find(file, "labels", &labels));
    if (ids->dims != 2 || labels->dims != 2 || ids->shape[0] != labels->shape[0] || ids->shape[1] != labels->shape[1])
        return loom_fail(LOOM_ERR_FORMAT, "%s: input_ids and labels must have one shape [batch, sequence]", path);
    rows->b = ids->shape[0];
    rows->s = ids->shape[1];
    rows->tokens = malloc((size_t)(ids->elements + 1) * sizeof(int64_t));
    rows->labels = malloc((size_t)(ids->elements + 1) * sizeof(int64_t));
    if (!rows->tokens || !rows->labels)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    LOOM_TRY(loom_safetensors_read_i64(ids, 0, ids->elements, rows->tokens));
    return loom_safetensors_read_i64(labels, 0, labels->elements, rows->labels);
}

/* tokens [..., sequence + 1]: inputs are all but the last of a row, labels all but the first. */
static loom_status read_tokens(const char *path, const loom_safetensors *file, token_rows *rows) {
    const loom_safetensors_tensor *tensor;
    LOOM_TRY(loom_safetensors_find(file, "tokens", &tensor));
    int64_t width = tensor->dims > 0 ? tensor->shape[tensor->dims - 1] : 0;
    if (tensor->dims < 1 || tensor->dims > 3 || width < 2)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tokens must be [sequence+1], [batch, sequence+1] or [steps, batch, sequence+1]", path);
    rows->s = width - 1;
    rows->b = tensor->elements / width;
    int64_t *all = malloc((size_t)(tensor->elements + 1) * sizeof *all);
    rows->tokens = malloc((size_t)(rows->b * rows->s + 1) * sizeof(int64_t));
    rows->labels = malloc((size_t)(rows->b * rows->s + 1) * sizeof(int64_t));
    loom_status status = all && rows->tokens && rows->labels
                             ? loom_safetensors_read_i64(tensor, 0, tensor->elements, all)
                             : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    for (int64_t j = 0; !status && j < rows->b; j++) {
        memcpy(rows->tokens + j * rows->s, all + j * width, (size_t)rows->s * sizeof *all);
        memcpy(rows->labels + j * rows->s, all + j * width + 1, (size_t)rows->s * sizeof *all);
    }
    free(all);
    return status;
}

static loom_status read_rows(const char *path, token_rows *rows) {
    loom_safetensors *file;
    LOOM_TRY(loom_safetensors_open(path, &file));
    loom_status status =
        loom_safetensors_has(file, "input_ids") ? read_pair(path, file, rows) : read_tokens(path, file, rows);
    loom_safetensors_close(file);
    if (!status && (rows->b < 1 || rows->s < 1))
        status = loom_fail(LOOM_ERR_FORMAT, "%s: holds no tokens", path);
    return status;
}

/* A loader over this rank's part of the rows. */
typedef struct row_source {
    const token_rows *rows;
    int64_t first, end, at, micro_batch_size;
} row_source;

static loom_status next_rows(void *context, loom_batch *batch) {
    row_source *source = context;
    if (source->at >= source->end)
        return LOOM_END;
    const token_rows *rows = source->rows;
    int64_t s = rows->s;
    batch->b = source->micro_batch_size;
    for (int64_t j = 0; j < batch->b; j++) {
        int64_t row = source->at + j;
        batch->sample[j] = batch->index[j] = row;
        for (int64_t t = 0; t < s; t++) {
            int64_t label = rows->labels[row * s + t];
            batch->tokens[j * s + t] = rows->tokens[row * s + t];
            batch->labels[j * s + t] = label < 0 ? 0 : label;
            batch->loss_mask[j * s + t] = label < 0 ? 0.0f : 1.0f;
            batch->position_ids[j * s + t] = t;
        }
    }
    source->at += batch->b;
    return LOOM_OK;
}

/* ---- a run ---- */

typedef struct evaluation {
    const loom_run_config *config;
    const token_rows *rows;
    const char *out;
} evaluation;

typedef struct rank_logits {
    float *values; /* this rank's rows, [b/dp, s, v] */
    int64_t at;
} rank_logits;

static loom_status keep_logits(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    rank_logits *kept = context;
    int64_t count = batch->b * batch->s * vocabulary;
    memcpy(kept->values + kept->at, logits, (size_t)count * sizeof *logits);
    kept->at += count;
    return LOOM_OK;
}

static loom_status describe(
    loom_parallel *parallel, const token_rows *rows, int64_t vocabulary, loom_safetensors_writer *writer) {
    LOOM_TRY(loom_safetensors_writer_add(writer, "logits", LOOM_F32, 3, (int64_t[]){rows->b, rows->s, vocabulary}));
    LOOM_TRY(loom_safetensors_writer_add(writer, "loss", LOOM_F32, 1, (int64_t[]){1}));
    return loom_gpt_describe_hf(parallel, writer);
}

/* logits: all rows, on the writing rank. */
static loom_status write_out(loom_fabric *fabric, loom_parallel *parallel, const evaluation *e, float loss,
    const float *logits, int64_t vocabulary) {
    bool writes = loom_rank_index(loom_fabric_rank(fabric)) == 0;
    loom_safetensors_writer *writer = NULL;
    loom_status status = LOOM_OK;
    if (writes) {
        status = loom_safetensors_writer_create(e->out, &writer);
        if (!status)
            status = describe(parallel, e->rows, vocabulary, writer);
        if (!status)
            status = loom_safetensors_writer_write(
                writer, logits, (size_t)(e->rows->b * e->rows->s * vocabulary) * sizeof *logits);
        if (!status)
            status = loom_safetensors_writer_write(writer, &loss, sizeof loss);
    }
    status = loom_agree(loom_rank_world(loom_fabric_rank(fabric)), status);
    if (!status)
        status = loom_gpt_write_hf(parallel, true, writer);
    if (!status && writes)
        status = loom_safetensors_writer_finish(writer);
    loom_safetensors_writer_destroy(writer);
    return status;
}

static loom_status compute(loom_fabric *fabric, loom_parallel *parallel, const evaluation *e) {
    const token_rows *rows = e->rows;
    loom_comm *dp = loom_fabric_group(fabric, LOOM_GROUP_DP);
    int64_t size = loom_comm_size(dp), vocabulary = loom_parallel_model_config(parallel)->vocab_size;
    if (rows->b % size)
        return loom_fail(LOOM_ERR_CONFIG, "%lld rows cannot be shared by %lld data-parallel ranks", (long long)rows->b,
            (long long)size);
    int64_t mine = rows->b / size, first = mine * loom_comm_rank(dp), mbs = e->config->data.micro_batch_size;
    if (mine % mbs)
        return loom_fail(LOOM_ERR_CONFIG, "data.micro_batch_size: %lld rows a rank are not a multiple of %lld",
            (long long)mine, (long long)mbs);
    row_source source = {rows, first, first + mine, first, mbs};
    loom_data_loader loader = {.context = &source,
        .micro_batch_size = mbs,
        .sequence_length = rows->s,
        .microbatches = mine / mbs,
        .next = next_rows};
    loom_batches *batches;
    LOOM_TRY(loom_fabric_setup_loader(fabric, &loader, &batches));
    int64_t count = mine * rows->s * vocabulary;
    rank_logits kept = {.values = e->out ? malloc((size_t)(count + 1) * sizeof(float)) : NULL};
    float *all = e->out ? malloc((size_t)(count * size + 1) * sizeof *all) : NULL;
    loom_status status = LOOM_OK;
    if (e->out && (!kept.values || !all))
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)(count * size));
    loom_step_result result = {0};
    if (!status)
        status = loom_parallel_step(parallel, e->out ? LOOM_TRAINING : LOOM_VALIDATION, batches, NULL,
            e->out ? keep_logits : NULL, &kept, &result);
    if (!status && e->out)
        status = loom_all_gather(dp, kept.values, all, count, LOOM_F32);
    if (!status && e->out)
        status = write_out(fabric, parallel, e, (float)result.loss, all, vocabulary);
    if (!status && result.tokens == 0)
        status = loom_fail(LOOM_ERR_ARGUMENT, "none of the labels counts: there is no loss");
    if (!status && loom_rank_index(loom_fabric_rank(fabric)) == 0)
        printf("loss %.9g over %.0f tokens\n", result.loss, result.tokens);
    loom_comm_free(dp, kept.values);
    loom_comm_free(dp, all);
    loom_batches_destroy(batches);
    return status;
}

static loom_status evaluate(loom_rank *rank, void *argument) {
    const evaluation *e = argument;
    loom_fabric *fabric;
    loom_parallel *parallel = NULL;
    LOOM_TRY(loom_cli_check_same(rank, e->config));
    LOOM_TRY(loom_cli_fabric(rank, e->config, &fabric));
    loom_status status = loom_cli_model(fabric, e->config, e->out != NULL, &parallel);
    if (!status)
        status = compute(fabric, parallel, e);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

/* ---- the command ---- */

typedef struct arguments {
    loom_cli_model_source model;
    const char *tokens, *out;
    loom_cli_run_arguments run;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 't':
        to->tokens = text;
        return 0;
    case 'o':
        to->out = text;
        return 0;
    case ARGP_KEY_ARG:
        if (!strchr(text, '='))
            argp_error(state, "found %s, expected FIELD=VALUE", text);
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        loom_cli_model_source_check(&to->model, state);
        if (!to->tokens)
            argp_error(state, "--tokens must be given");
        return 0;
    default:
        return loom_cli_take_model(&to->model, key, text);
    }
}

/* The run that an evaluation is: the model, its tokens' shape, the user's overrides last. */
static loom_status load(arguments *given, const token_rows *rows, loom_run_config **config) {
    char texts[7][4200];
    LOOM_TRY(loom_cli_model_override(&given->model, texts[0], sizeof texts[0]));
    const char **list = calloc((size_t)given->run.override_count + 7, sizeof *list);
    if (!list)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    snprintf(texts[1], sizeof texts[1], "model.seq_length=%lld", (long long)rows->s);
    snprintf(texts[2], sizeof texts[2], "data.kind=mock");
    snprintf(texts[3], sizeof texts[3], "steps=1");
    snprintf(texts[4], sizeof texts[4], "optim.lr=1");
    /* Gradients are those of the loss that is printed. */
    snprintf(texts[5], sizeof texts[5], "model.hidden_dropout=0");
    snprintf(texts[6], sizeof texts[6], "model.attention_dropout=0");
    for (int i = 0; i < 7; i++)
        list[i] = texts[i];
    memcpy(list + 7, given->run.overrides, (size_t)given->run.override_count * sizeof *list);
    loom_status status = loom_run_config_load(NULL, list, given->run.override_count + 7, config);
    free(list);
    return status;
}

static int run(arguments *given) {
    token_rows rows = {0};
    loom_run_config *config = NULL;
    loom_status status = read_rows(given->tokens, &rows);
    if (!status)
        status = load(given, &rows, &config);
    if (!status)
        status = loom_cli_complete_model(config);
    int code = status ? loom_cli_fail(status) : 0;
    if (!status) {
        evaluation e = {config, &rows, given->out};
        code = loom_cli_run(config, evaluate, &e);
    }
    loom_run_config_destroy(config);
    token_rows_free(&rows);
    return code;
}

int loom_cli_eval(int argc, char **argv) {
    static const struct argp_option options[] = {LOOM_CLI_MODEL_OPTIONS,
        {"tokens", 't', "FILE", 0,
            "safetensors file: input_ids and labels [batch, sequence] (a negative label does not count), or tokens "
            "[batch, sequence+1]",
            0},
        {"out", 'o', "FILE", 0, "Write logits, loss and gradients (by their Hugging Face names) to a safetensors file",
            0},
        {0}};
    static const struct argp argp = {options, take, "(--hf DIR | --checkpoint DIR) --tokens FILE [FIELD=VALUE...]",
        "Prints the mean loss of the tokens. FIELD=VALUE as in a run file, e.g. ranks=2 "
        "strategy.tensor_model_parallel_size=2.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    int code = run(&given);
    loom_cli_run_arguments_free(&given.run);
    return code;
}
