/* A checkpoint says of itself what it is of: the run file, cut down to what decides model and ranks, goes along, and a
 * model is built again from it by the calls that a run file goes through. The invariant: what is written here reads
 * back to the same model under any layout, so sizes that follow from a layout are left open. */
#include "state/context.h"
#include "config/from.h"
#include "model/gpt.h"
#include "state/state.h"
#include <megaloom/load_model.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- writing */

typedef struct text_buffer {
    FILE *to;
    bool keeps; /* the section that lines are of is one of a context */
} text_buffer;

static bool is_kept(const char *line, size_t length) {
    static const char *const sections[] = {"ranks:", "model:", "strategy:", "precision:"};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (strlen(sections[i]) <= length && strncmp(sections[i], line, strlen(sections[i])) == 0)
            return true;
    return false;
}

static loom_status take_lines(void *context, const char *text, size_t length) {
    text_buffer *buffer = context;
    for (size_t at = 0, next; at < length; at = next) {
        const char *end = memchr(text + at, '\n', length - at);
        next = end ? (size_t)(end - text) + 1 : length;
        if (text[at] != ' ')
            buffer->keeps = is_kept(text + at, next - at);
        if (buffer->keeps)
            fwrite(text + at, 1, next - at, buffer->to);
    }
    return LOOM_OK;
}

loom_status loom__context_text(const loom_run_config *config, char **text, size_t *length) {
    text_buffer buffer = {.to = open_memstream(text, length)};
    if (!buffer.to)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the context of a checkpoint");
    loom_status status = loom_run_config_print(config, take_lines, &buffer);
    bool failed = fclose(buffer.to) != 0;
    if (!status && failed)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for the context of a checkpoint");
    if (status) {
        free(*text);
        *text = NULL;
    }
    return status;
}

loom_status loom__parallel_context(const loom_parallel *parallel, char **text, size_t *length) {
    static const char *const precisions[] = {[LOOM_F32] = "32", [LOOM_BF16] = "bf16-mixed", [LOOM_F16] = "16-mixed"};
    const loom__gpt *gpt = parallel->module->context;
    const loom_fabric *fabric = parallel->fabric;
    loom_run_config config = loom_run_config_default();
    config.ranks = loom_rank_count(fabric->rank);
    config.model.config = gpt->config;
    config.model.config.padded_vocab_size = gpt->given_padded_vocab_size;
    config.strategy = fabric->config;
    config.precision.precision = precisions[loom_parallel_dtype(parallel)];
    config.precision.grad_reduce_in_fp32 = fabric->precision.grad_reduce_in_fp32;
    return loom__context_text(&config, text, length);
}

/* ---- reading */

/* NeMo's models have the vocabulary of a tokenizer; all that a checkpoint shows of it is the padded embedding. */
static loom_status find_vocabulary(const char *path, loom_run_config *config) {
    static const char *const names[] = {"module.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"};
    loom_checkpoint *checkpoint = NULL;
    LOOM_TRY(loom_checkpoint_open(path, &checkpoint));
    const loom_checkpoint_tensor *embedding = NULL;
    loom_status status = LOOM_ERR_NOT_FOUND;
    for (size_t i = 0; i < sizeof names / sizeof *names && status == LOOM_ERR_NOT_FOUND; i++)
        status = loom_checkpoint_find_tensor(checkpoint, names[i], &embedding);
    if (!status) {
        config->model.config.vocab_size = embedding->shape[0];
        config->model.config.padded_vocab_size = 0;
    }
    loom_checkpoint_close(checkpoint);
    return status;
}

loom_status loom_checkpoint_run_config(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **out) {
    loom_run_config *config = NULL;
    LOOM_TRY(loom__config_read_context(path, overrides, override_count, &config));
    loom_status status = config->model.config.vocab_size == 0 ? find_vocabulary(path, config) : LOOM_OK;
    loom_model_config *model = &config->model.config;
    if (model->seq_length == 0)
        model->seq_length = model->max_position_embeddings;
    if (model->max_position_embeddings == 0)
        model->max_position_embeddings = model->seq_length;
    if (status) {
        loom_run_config_destroy(config);
        return status;
    }
    *out = config;
    return LOOM_OK;
}

/* ---- models */

void loom_loaded_model_destroy(loom_loaded_model *model) {
    loom_parallel_destroy(model->parallel);
    loom_fabric_destroy(model->fabric);
    loom_run_config_destroy(model->config);
    *model = (loom_loaded_model){0};
}

loom_status loom_load_weights(loom_fabric *fabric, loom_parallel *parallel, const char *path) {
    loom_state_item items[] = {{.key = "state_dict", .module = parallel}};
    loom_state state = {items, 1};
    loom_load_report report = {0};
    LOOM_TRY(loom_fabric_load(fabric, path, &state, true, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

typedef struct creation {
    loom_loaded_model *model;
    loom_module *module;
} creation;

static loom_status create_empty(void *argument) {
    creation *of = argument;
    return loom_gpt_create(of->model->fabric, &of->model->config->model.config, &of->module);
}

/* Weights of a directory are read as the module is set up, those of a checkpoint after it. */
static loom_status build(loom_rank *rank, const char *checkpoint, bool gradients, loom_loaded_model *model) {
    const loom_run_config *config = model->config;
    creation of = {.model = model};
    LOOM_TRY(loom_fabric_create(rank, &config->strategy, &config->precision, &model->fabric));
    loom_fabric_seed_everything(model->fabric, (uint64_t)config->seed);
    LOOM_TRY(loom_fabric_launch(model->fabric));
    if (checkpoint)
        LOOM_TRY(loom_fabric_megatron_context(model->fabric, create_empty, &of));
    else
        LOOM_TRY(loom_gpt_create_from_hf(model->fabric, config->model.hf, &config->model.config, &of.module));
    LOOM_TRY(gradients ? loom_fabric_setup_module(model->fabric, of.module, &model->parallel)
                       : loom_fabric_setup_module_for_inference(model->fabric, of.module, &model->parallel));
    return checkpoint ? loom_load_weights(model->fabric, model->parallel, checkpoint) : LOOM_OK;
}

static loom_status finish(loom_status status, loom_loaded_model *made, loom_loaded_model *model) {
    if (status) {
        loom_loaded_model_destroy(made);
        return status;
    }
    *model = *made;
    return LOOM_OK;
}

loom_status loom_load_model(loom_rank *rank, const char *path, const char *const *overrides, int64_t override_count,
    bool gradients, loom_loaded_model *model) {
    loom_loaded_model made = {0};
    loom_status status = loom_checkpoint_run_config(path, overrides, override_count, &made.config);
    status = loom_agree(loom_rank_world(rank), status);
    if (!status)
        status = build(rank, path, gradients, &made);
    return finish(status, &made, model);
}

static loom_status read_directory(
    const char *source, const char *const *overrides, int64_t override_count, loom_run_config **config) {
    static const char scheme[] = "hf://";
    if (strncmp(source, scheme, strlen(scheme)) != 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "import_model: found \"%.100s\", expected hf:// and the path of a directory", source);
    const char **list = calloc((size_t)override_count + 1, sizeof *list);
    char *hf = NULL;
    loom_status status = LOOM_OK;
    if (!list || asprintf(&hf, "model.hf=%s", source + strlen(scheme)) < 0)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for the overrides of a model");
    if (!status) {
        list[0] = hf;
        if (override_count > 0)
            memcpy(list + 1, overrides, (size_t)override_count * sizeof *list);
        status = loom_run_config_load(NULL, list, override_count + 1, config);
    }
    free(hf);
    free(list);
    return status;
}

loom_status loom_import_model(loom_rank *rank, const char *source, const char *const *overrides, int64_t override_count,
    bool gradients, loom_loaded_model *model) {
    loom_loaded_model made = {0};
    loom_status status = read_directory(source, overrides, override_count, &made.config);
    status = loom_agree(loom_rank_world(rank), status);
    if (!status)
        status = build(rank, NULL, gradients, &made);
    return finish(status, &made, model);
}
