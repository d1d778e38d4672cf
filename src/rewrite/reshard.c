/* A checkpoint for another layout. Tensors come from the archive of the old one and go where the ranks of the new one
 * would have them; the common state is taken over but for what tells of the layout and of the optimizer's form. The
 * invariant: what a run of the new layout would not have read is not dropped without being counted. */
#include "config/precision.h"
#include "rewrite/archive.h"
#include "rewrite/offline.h"
#include "state/context.h"
#include "state/state.h"
#include <megaloom/load_model.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the common state */

static loom_status own_value(loom_value_pool *pool, const loom_value *old, const loom__offline_layout *layout,
    bool has_optimizer, loom_value **out) {
    const loom_value *value = NULL;
    LOOM_TRY(loom_value_dict(pool, out));
    LOOM_TRY(loom__layout_value(pool, &layout->sharded, &value));
    LOOM_TRY(loom_value_set(pool, *out, "layout", value));
    for (int64_t i = 0; old && old->kind == LOOM_VALUE_DICT && i < old->count; i++)
        if (!loom_value_is_text(old->items[2 * i], "layout") &&
            (has_optimizer || !loom_value_is_text(old->items[2 * i], "skipped_steps")))
            LOOM_TRY(loom_value_set_pair(pool, *out, old->items[2 * i], old->items[2 * i + 1]));
    return LOOM_OK;
}

loom_status loom__offline_common(loom_value_pool *pool, const loom_value *from, const loom__offline_layout *layout,
    const loom__sharded_options *options, const loom__optimizer_values *values, const loom_value **out) {
    static const char *const remade[] = {"checkpoint_version", "content_metadata", "optimizer", "megaloom"};
    loom_value *common = NULL, *content = NULL, *optimizer = NULL, *own = NULL, *version = NULL;
    bool has_optimizer = options->form != LOOM__OPTIMIZER_ABSENT;
    const loom__content_metadata metadata = {
        .distrib_optim_sharding_type = loom__optimizer_form_name(options->form), .chained_optim_avoid_prefix = true};
    LOOM_TRY(loom_value_dict(pool, &common));
    LOOM_TRY(loom_value_float(pool, 3.0, &version)); /* Megatron-LM's, since 2020 */
    LOOM_TRY(loom_value_set(pool, common, "checkpoint_version", version));
    LOOM_TRY(loom__content_value(pool, &metadata, &content));
    LOOM_TRY(loom_value_set(pool, common, "content_metadata", content));
    if (has_optimizer) {
        LOOM_TRY(loom__optimizer_common_value(pool, options, loom__layout_chains(&layout->sharded), values,
            loom_value_get(from, "optimizer"), &optimizer));
        LOOM_TRY(loom_value_set(pool, common, "optimizer", optimizer));
        if (values->schedule)
            LOOM_TRY(loom_value_set(pool, common, "opt_param_scheduler", values->schedule));
    }
    LOOM_TRY(own_value(pool, loom_value_get(from, "megaloom"), layout, has_optimizer, &own));
    LOOM_TRY(loom_value_set(pool, common, "megaloom", own));
    for (int64_t i = 0; from && from->kind == LOOM_VALUE_DICT && i < from->count; i++) {
        const loom_value *key = from->items[2 * i];
        bool taken = loom_value_is_text(key, "opt_param_scheduler") ||
                     (!has_optimizer && loom_value_is_text(key, "lr_schedulers"));
        for (size_t k = 0; k < sizeof remade / sizeof *remade; k++)
            taken = taken || loom_value_is_text(key, remade[k]);
        if (!taken)
            LOOM_TRY(loom_value_set_pair(pool, common, key, from->items[2 * i + 1]));
    }
    *out = common;
    return LOOM_OK;
}

/* ---- what is asked for */

typedef struct resharding {
    const char *in, *out;
    const char *const *overrides;
    int64_t override_count;
    const loom_reshard_options *options;
    loom_run_config *config; /* of the new layout */
    loom__archive *archive;
    loom__offline_layout layout;
    loom__sharded_options sharded;
    char *context;
    loom_tool_outcome outcome;
} resharding;

static bool is_given(const resharding *r, const char *field) {
    size_t length = strlen(field);
    for (int64_t i = 0; i < r->override_count; i++)
        if (strncmp(r->overrides[i], field, length) == 0 && r->overrides[i][length] == '=')
            return true;
    return false;
}

static loom_status read_hf(const resharding *r, loom_run_config **config) {
    const char **list = calloc((size_t)r->override_count + 1, sizeof *list);
    char *hf = loom__path_join("model.hf=", "", r->options->hf);
    loom_status status = list && hf ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the overrides");
    if (!status) {
        list[0] = hf;
        if (r->override_count > 0)
            memcpy(list + 1, r->overrides, (size_t)r->override_count * sizeof *list);
        status = loom_run_config_load(NULL, list, r->override_count + 1, config);
    }
    /* The context that is written says all of it by itself. */
    if (!status)
        (*config)->model.hf = NULL;
    free(hf);
    free(list);
    return status;
}

static int64_t model_ranks(const loom_megatron_strategy_config *strategy) {
    return strategy->tensor_model_parallel_size * strategy->pipeline_model_parallel_size *
           strategy->context_parallel_size;
}

/* Ranks that keep the data-parallel size of the run that wrote the checkpoint. */
static loom_status choose_ranks(resharding *r) {
    loom_run_config *old = NULL;
    int64_t dp = 1;
    if (is_given(r, "ranks"))
        return LOOM_OK;
    if (!r->options->hf) {
        LOOM_TRY(loom_checkpoint_run_config(r->in, NULL, 0, &old));
        dp = old->ranks / model_ranks(&old->strategy);
        loom_run_config_destroy(old);
    }
    r->config->ranks = (dp > 0 ? dp : 1) * model_ranks(&r->config->strategy);
    return LOOM_OK;
}

static loom_status form_of(const resharding *r, loom__optimizer_form *form) {
    static const struct {
        const char *name;
        loom__optimizer_form form;
    } names[] = {{"dp_reshardable", LOOM__OPTIMIZER_DP_RESHARDABLE},
        {"fully_reshardable", LOOM__OPTIMIZER_FULLY_RESHARDABLE}, {"whole", LOOM__OPTIMIZER_WHOLE},
        {"none", LOOM__OPTIMIZER_ABSENT}};
    const char *asked = r->options->optimizer_form;
    bool shards = r->config->strategy.ddp_config.use_distributed_optimizer;
    bool fully = r->config->strategy.dist_ckpt_optim_fully_reshardable;
    *form = !r->archive->has_optimizer ? LOOM__OPTIMIZER_ABSENT
            : !shards                  ? LOOM__OPTIMIZER_WHOLE
            : fully                    ? LOOM__OPTIMIZER_FULLY_RESHARDABLE
                                       : LOOM__OPTIMIZER_DP_RESHARDABLE;
    if (!asked)
        return LOOM_OK;
    bool known = false;
    for (size_t i = 0; i < sizeof names / sizeof *names && !known; i++) {
        known = strcmp(names[i].name, asked) == 0;
        *form = known ? names[i].form : *form;
    }
    if (!known)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "optimizer form: found %s, expected dp_reshardable, fully_reshardable, whole or none", asked);
    if (*form != LOOM__OPTIMIZER_ABSENT && !r->archive->has_optimizer)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s: has no state of an optimizer: found form %s, expected none", r->in, asked);
    return LOOM_OK;
}

static loom_status choose_form(resharding *r) {
    static const char *const names[] = {[LOOM__OPTIMIZER_ABSENT] = "none",
        [LOOM__OPTIMIZER_WHOLE] = "whole",
        [LOOM__OPTIMIZER_FULLY_RESHARDABLE] = "fully_reshardable",
        [LOOM__OPTIMIZER_DP_RESHARDABLE] = "dp_reshardable"};
    static const char *const precisions[] = {[LOOM_F32] = "32", [LOOM_BF16] = "bf16-mixed", [LOOM_F16] = "16-mixed"};
    const loom__archive *archive = r->archive;
    loom__sharded_options *sharded = &r->sharded;
    bool differs = loom__precision_dtype(&r->config->precision) != archive->param_dtype;
    if (differs && is_given(r, "precision.precision"))
        return loom_fail(LOOM_ERR_CONFIG,
            "precision.precision: found %s, expected %s, as %s has its weights; megaloom checkpoint convert --dtype "
            "and "
            "a run that loads it change that",
            r->config->precision.precision, precisions[archive->param_dtype], r->in);
    /* A context without a precision is that of another program. */
    if (differs)
        r->config->precision.precision = precisions[archive->param_dtype];
    *sharded = (loom__sharded_options){.prefix = "",
        .param_dtype = archive->param_dtype,
        .grad_dtype = r->config->precision.grad_reduce_in_fp32 ? LOOM_F32 : archive->param_dtype,
        .by_shard = true,
        .scaler = archive->optimizer.scaler != NULL,
        .moments = archive->moments};
    memcpy(sharded->moment, archive->moment, sizeof sharded->moment);
    LOOM_TRY(form_of(r, &sharded->form));
    if (sharded->form != LOOM__OPTIMIZER_ABSENT && !archive->optimizer.groups)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: has the state of an optimizer, but no param_groups of it: expected them in the common state or in "
            "optimizer.distributed.dp_group_idx_0.optimizer",
            r->in);
    snprintf(r->outcome.form, sizeof r->outcome.form, "%s", names[sharded->form]);
    r->outcome.dropped_optimizer = archive->has_optimizer && sharded->form == LOOM__OPTIMIZER_ABSENT;
    return LOOM_OK;
}

/* ---- the whole */

static loom_status read_archive(void *context, const loom__model_spec *spec, int64_t tp, int64_t tp_rank,
    const loom__reshard_want *want, loom_dtype dtype, void *out) {
    return loom__archive_read(context, spec, tp, tp_rank, want, dtype, out);
}

static void count_dropped(resharding *r) {
    const loom_checkpoint *checkpoint = r->archive->checkpoint;
    for (int64_t i = 0; i < loom_checkpoint_get_info(checkpoint)->objects; i++) {
        const char *name = loom_checkpoint_object_at(checkpoint, i)->name;
        bool known = strstr(name, "_extra_state") || loom__is_of_optimizer(name);
        r->outcome.dropped_objects += !known;
    }
}

static loom_status write(resharding *r) {
    const loom_value *common = NULL;
    size_t length = 0;
    loom__archive *archive = r->archive;
    LOOM_TRY(loom__context_text(r->config, &r->context, &length));
    LOOM_TRY(loom__optimizer_values_for(archive->pool, &r->layout.sharded, &archive->optimizer));
    LOOM_TRY(loom__offline_common(archive->pool, loom_checkpoint_get_info(archive->checkpoint)->common, &r->layout,
        &r->sharded, &archive->optimizer, &common));
    count_dropped(r);
    r->outcome.ranks = loom_layout_world_size(&r->layout.ranks);
    loom__offline_save save = {.path = r->out,
        .layout = &r->layout,
        .options = &r->sharded,
        .optimizer = &archive->optimizer,
        .common = common,
        .context = r->context,
        .companions = r->options->hf ? r->options->hf : loom_checkpoint_get_info(archive->checkpoint)->context,
        .read = read_archive,
        .read_context = archive,
        .progress = &r->options->progress};
    return loom__offline_write(&save);
}

static loom_status reshard(resharding *r) {
    LOOM_TRY(loom__tool_check_paths(r->in, r->out));
    LOOM_TRY(r->options->hf ? read_hf(r, &r->config)
                            : loom_checkpoint_run_config(r->in, r->overrides, r->override_count, &r->config));
    LOOM_TRY(choose_ranks(r));
    LOOM_TRY(loom__offline_layout_make(r->config, r->config->ranks, &r->layout));
    LOOM_TRY(loom__archive_open(r->in, &r->config->model.config, false, &r->archive));
    LOOM_TRY(choose_form(r));
    LOOM_TRY(write(r));
    return loom__tool_measure(r->out, &r->outcome);
}

loom_status loom_checkpoint_reshard(const char *in, const char *out, const char *const *overrides,
    int64_t override_count, const loom_reshard_options *options, loom_tool_outcome *outcome) {
    static const loom_reshard_options none;
    resharding r = {.in = in,
        .out = out,
        .overrides = overrides,
        .override_count = override_count,
        .options = options ? options : &none};
    loom_status status = reshard(&r);
    free(r.context);
    loom__archive_close(r.archive);
    loom__offline_layout_free(&r.layout);
    loom_run_config_destroy(r.config);
    if (!status && outcome)
        *outcome = r.outcome;
    return status;
}
