/* Weights between checkpoints and Hugging Face directories. Both sides know a parameter by its canonical tensor: the
 * archive of a checkpoint and the weights of a directory give it, the writers of both take it. The invariant: in the
 * dtype that they are stored in, weights come out with the bits that they went in with. */
#include "rewrite/convert.h"
#include "model/gpt.h"
#include "model/huggingface_directory.h"
#include "rewrite/archive.h"
#include "rewrite/offline.h"
#include "state/context.h"
#include "state/state.h"
#include <math.h>
#include <megaloom/load_model.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct converting {
    const char *in, *out;
    const loom_convert_options *options;
    loom_dtype dtype;
    bool dtype_given;
    loom_run_config *config;
    loom_tool_outcome outcome;
} converting;

static loom_status read_dtype(converting *c) {
    static const struct {
        const char *name;
        loom_dtype dtype;
    } names[] = {{"fp32", LOOM_F32}, {"bf16", LOOM_BF16}, {"fp16", LOOM_F16}};
    c->dtype_given = c->options->dtype != NULL;
    for (size_t i = 0; c->dtype_given && i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, c->options->dtype) == 0) {
            c->dtype = names[i].dtype;
            return LOOM_OK;
        }
    return c->dtype_given
               ? loom_fail(LOOM_ERR_ARGUMENT, "dtype: found %s, expected fp32, bf16 or fp16", c->options->dtype)
               : LOOM_OK;
}

static bool has_file(const char *folder, const char *name) {
    char *path = loom__path_join(folder, "/", name);
    bool found = path && access(path, F_OK) == 0;
    free(path);
    return found;
}

static loom_status config_of_hf(const char *directory, loom_run_config **config) {
    char *hf = loom__path_join("model.hf=", "", directory);
    const char *list[] = {hf};
    loom_status status = hf ? loom_run_config_load(NULL, list, 1, config)
                            : loom_fail(LOOM_ERR_MEMORY, "out of memory for the path of a model");
    free(hf);
    if (!status)
        (*config)->model.hf = NULL; /* what is written of it says all by itself */
    return status;
}

static void report(const loom_tool_progress *progress, uint64_t done, uint64_t all) {
    if (progress->report)
        progress->report(progress->context, done < all ? done : all, all);
}

/* ---- from a checkpoint to a directory */

typedef struct visiting {
    const converting *of;
    const loom__archive *archive;
} visiting;

static loom_status visit_one(const visiting *v, int64_t number, loom__parameter_body body, void *argument) {
    const loom__model_spec *spec = v->archive->spec;
    int64_t count = loom__descriptor_count(&spec->parameters[number]);
    loom__reshard_want want = {.array = LOOM__STATE_WEIGHT, .canonical = number, .count = count};
    float *canonical = malloc((size_t)(count + 1) * sizeof *canonical);
    if (!canonical)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", spec->parameters[number].name);
    loom_status status = loom__archive_read(v->archive, spec, 1, 0, &want, LOOM_F32, canonical);
    if (!status)
        status = body(argument, number, canonical);
    free(canonical);
    return status;
}

static loom_status visit_archive(void *context, loom__parameter_body body, void *argument) {
    const visiting *v = context;
    const loom__model_spec *spec = v->archive->spec;
    uint64_t done = 0, all = 0;
    for (int64_t i = 0; i < spec->count; i++)
        all += (uint64_t)loom__descriptor_count(&spec->parameters[i]) * loom_dtype_size(v->of->dtype);
    for (int64_t i = 0; i < spec->count; i++) {
        LOOM_TRY(visit_one(v, i, body, argument));
        done += (uint64_t)loom__descriptor_count(&spec->parameters[i]) * loom_dtype_size(v->of->dtype);
        report(&v->of->options->progress, done, all);
    }
    return LOOM_OK;
}

/* Token ids are in config.json: without one a context has none. */
static const char *source_of(const converting *c, const loom__archive *archive) {
    const char *context = loom_checkpoint_get_info(archive->checkpoint)->context;
    return c->options->hf ? c->options->hf : context && has_file(context, "config.json") ? context : NULL;
}

static bool has_optimizer(const loom_checkpoint *checkpoint) {
    for (int64_t i = 0; i < loom_checkpoint_get_info(checkpoint)->tensors; i++)
        if (loom__is_of_optimizer(loom_checkpoint_tensor_at(checkpoint, i)->name))
            return true;
    return false;
}

static loom_status export_archive(converting *c, const loom__archive *archive) {
    loom_hf_save_options options = loom_hf_save_options_default();
    visiting v = {c, archive};
    if (!c->dtype_given)
        c->dtype = archive->param_dtype;
    options.dtype = c->dtype;
    options.source = source_of(c, archive);
    if (c->options->max_shard_bytes)
        options.max_shard_bytes = c->options->max_shard_bytes;
    c->outcome.dropped_optimizer = has_optimizer(archive->checkpoint);
    LOOM_TRY(loom__hf_save_visited(archive->spec, visit_archive, &v, c->out, &options));
    return loom__tool_measure(c->out, &c->outcome);
}

static loom_status to_hf(converting *c) {
    loom__archive *archive = NULL;
    LOOM_TRY(c->options->hf ? config_of_hf(c->options->hf, &c->config)
                            : loom_checkpoint_run_config(c->in, NULL, 0, &c->config));
    LOOM_TRY(loom__archive_open(c->in, &c->config->model.config, true, &archive));
    loom_status status = export_archive(c, archive);
    loom__archive_close(archive);
    return status;
}

/* ---- from a directory to a checkpoint */

typedef struct importing {
    loom__hf_weights *weights;
    const loom__model_spec *spec;
    int64_t number; /* of the parameter in `canonical`; -1: none */
    float *canonical;
} importing;

static loom_status load_canonical(importing *from, int64_t number) {
    if (from->number == number)
        return LOOM_OK;
    const loom__parameter_descriptor *parameter = &from->spec->parameters[number];
    free(from->canonical);
    from->number = -1;
    from->canonical = malloc((size_t)(loom__descriptor_count(parameter) + 1) * sizeof *from->canonical);
    if (!from->canonical)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", parameter->name);
    LOOM_TRY(loom__hf_weights_read(from->weights, number, from->canonical));
    from->number = number;
    return LOOM_OK;
}

static loom_status put(const char *name, float value, loom_dtype dtype, char *to) {
    uint16_t narrow = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
    if (dtype == LOOM_F16 && isfinite(value) && isinf(loom_f16_to_f32(narrow)))
        return loom_fail(LOOM_ERR_FORMAT, "%s: an element is %g, which fp16 cannot hold (at most 65504); bf16 can",
            name, (double)value);
    memcpy(to, &narrow, sizeof narrow);
    return LOOM_OK;
}

/* The rows of one box, of which those behind the canonical tensor's are padding and stay zero. */
static loom_status copy_box(const importing *from, const loom__parameter_descriptor *parameter, const loom__box *box,
    loom_dtype dtype, char *out) {
    int64_t columns = parameter->shape[1];
    for (int64_t row = 0; row < box->count[0] && box->first[0] + row < parameter->shape[0]; row++) {
        const float *source = from->canonical + (box->first[0] + row) * columns + box->first[1];
        char *to = out + (size_t)(box->at + row * box->stride) * loom_dtype_size(dtype);
        if (dtype == LOOM_F32)
            memcpy(to, source, (size_t)box->count[1] * sizeof *source);
        for (int64_t i = 0; dtype != LOOM_F32 && i < box->count[1]; i++)
            LOOM_TRY(put(parameter->name, source[i], dtype, to + (size_t)i * sizeof(uint16_t)));
    }
    return LOOM_OK;
}

static loom_status read_weights(void *context, const loom__model_spec *spec, int64_t tp, int64_t tp_rank,
    const loom__reshard_want *want, loom_dtype dtype, void *out) {
    importing *from = context;
    const loom__parameter_descriptor *parameter = &spec->parameters[want->canonical];
    loom__shard_box shards[LOOM__SHARD_BOXES];
    LOOM_TRY(load_canonical(from, want->canonical));
    memset(out, 0, (size_t)want->count * loom_dtype_size(dtype));
    int count = loom__shard_boxes(spec, parameter, tp, tp_rank, shards);
    for (int i = 0; i < count; i++) {
        loom__box boxes[LOOM__RANGE_BOXES];
        int made = loom__box_range(&shards[i].box, want->first, want->count, 0, boxes);
        for (int k = 0; k < made; k++)
            LOOM_TRY(copy_box(from, parameter, &boxes[k], dtype, out));
    }
    return LOOM_OK;
}

static loom_status write_imported(
    converting *c, const loom__offline_layout *layout, importing *from, const char *context) {
    const loom_value *common = NULL;
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom__sharded_options options = {.prefix = "", .param_dtype = c->dtype, .grad_dtype = LOOM_F32};
    loom__offline_save save = {.path = c->out,
        .layout = layout,
        .options = &options,
        .context = context,
        .companions = c->in,
        .read = read_weights,
        .read_context = from,
        .progress = &c->options->progress};
    loom_status status = loom__offline_common(pool, NULL, layout, &options, NULL, &common);
    save.common = common;
    if (!status)
        status = loom__offline_write(&save);
    loom_value_pool_destroy(pool);
    return status;
}

static loom_status import(converting *c, const loom__offline_layout *layout) {
    importing from = {.spec = layout->spec, .number = -1};
    char *context = NULL;
    size_t length = 0;
    LOOM_TRY(loom__hf_weights_open(c->in, layout->spec, &from.weights));
    if (!c->dtype_given)
        c->dtype = loom__hf_weights_dtype(from.weights);
    c->config->precision.precision = c->dtype == LOOM_BF16 ? "bf16-mixed" : c->dtype == LOOM_F16 ? "16-mixed" : "32";
    loom_status status = loom__context_text(c->config, &context, &length);
    if (!status)
        status = write_imported(c, layout, &from, context);
    free(context);
    free(from.canonical);
    loom__hf_weights_close(from.weights);
    return status;
}

static loom_status to_torch_dist(converting *c) {
    loom__offline_layout layout = {0};
    LOOM_TRY(config_of_hf(c->in, &c->config));
    LOOM_TRY(loom__offline_layout_make(c->config, 1, &layout));
    c->outcome.ranks = 1;
    loom_status status = import(c, &layout);
    loom__offline_layout_free(&layout);
    return status ? status : loom__tool_measure(c->out, &c->outcome);
}

/* ---- which */

static loom_status choose(converting *c, loom_status (**way)(converting *c), loom__raw_form *raw) {
    bool from_hf = has_file(c->in, "config.json");
    const char *to = c->options->to ? c->options->to : from_hf ? "torch_dist" : "hf";
    bool is_raw = strcmp(to, "dcp") == 0 || strcmp(to, "safetensors") == 0;
    *way = strcmp(to, "hf") == 0 ? to_hf : strcmp(to, "torch_dist") == 0 ? to_torch_dist : NULL;
    *raw = strcmp(to, "dcp") == 0 ? LOOM__RAW_DCP : LOOM__RAW_SAFETENSORS;
    if (!*way && !is_raw)
        return loom_fail(LOOM_ERR_ARGUMENT, "convert to: found %s, expected hf, torch_dist, dcp or safetensors", to);
    if (from_hf != (*way == to_torch_dist))
        return loom_fail(LOOM_ERR_ARGUMENT,
            from_hf ? "%s: is a Hugging Face directory: found form %s, expected torch_dist"
                    : "%s: is a checkpoint: found form %s, expected hf, dcp or safetensors "
                      "(another layout of torch_dist: megaloom checkpoint reshard)",
            c->in, to);
    if (is_raw && c->dtype_given)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "dtype: found %s with form %s, which keeps every tensor's own; expected none", c->options->dtype, to);
    return LOOM_OK;
}

static loom_status convert(converting *c) {
    loom_status (*way)(converting * c) = NULL;
    loom__raw_form raw = LOOM__RAW_DCP;
    LOOM_TRY(read_dtype(c));
    LOOM_TRY(loom__tool_check_paths(c->in, c->out));
    LOOM_TRY(choose(c, &way, &raw));
    if (!way) {
        LOOM_TRY(loom__convert_raw(c->in, c->out, raw, &c->options->progress, &c->outcome));
        return loom__tool_measure(c->out, &c->outcome);
    }
    return way(c);
}

loom_status loom_checkpoint_convert(
    const char *in, const char *out, const loom_convert_options *options, loom_tool_outcome *outcome) {
    static const loom_convert_options none;
    converting c = {.in = in, .out = out, .options = options ? options : &none};
    loom_status status = convert(&c);
    loom_run_config_destroy(c.config);
    if (!status && outcome)
        *outcome = c.outcome;
    return status;
}
