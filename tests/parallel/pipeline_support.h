/* A GPT that trains for a few steps on a pipeline, and what came of it. */
#ifndef TESTS_PARALLEL_PIPELINE_SUPPORT_H
#define TESTS_PARALLEL_PIPELINE_SUPPORT_H

#include "parallel/small_model.h"
#include "parallel/support.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PIPE_STEPS = 4, PIPE_TEXT = 200 };

typedef struct pipe_case {
    int ranks, tp, pp, vpp; /* 0 = 1; vpp 0 = no chunks */
    int64_t group;
    const char *stages;          /* pipeline_model_parallel_layout */
    int64_t first, last;         /* layers of the first and the last stage; 0 = as all */
    bool balanced, sp, overlap;  /* overlap: gradients reduced while the backward goes on, in small buckets */
    bool sharded, gather, align; /* the distributed optimizer; its gathers during the forward, all at once */
    bool align_reduction;        /* reductions of a chunk begin on all stages at once */
    int64_t instances;           /* of it; 0 = 1 */
    bool pytorch;                /* the wrapper; find_unused, fixed: its find_unused_parameters and static_graph */
    bool find_unused, fixed, average;
    const char *schedule, *wire;    /* NULL = the defaults */
    const char *precision, *params; /* NULL = 32; precision.params_dtype */
    bool narrow_reduction;          /* grad_reduce_in_fp32 false */
    double scale;                   /* initial_loss_scale; 0 = the default */
    bool variable;
    bool untied;
    double dropout;
    int64_t layers, micro, global; /* 0 = 4, 1, 8 */
} pipe_case;

typedef struct pipe_result {
    double loss[PIPE_STEPS], norm[PIPE_STEPS];
    uint64_t weights; /* a hash of all parameters, whole, after the last step */
} pipe_result;

static inline const char *pipe_name(const pipe_case *c, char text[PIPE_TEXT]) {
    snprintf(text, PIPE_TEXT, "ranks %d tp %d pp %d vpp %d %s %s micro %lld of %lld, %lld layers%s%s%s%s%s%s%s%s%s%s",
        c->ranks, c->tp, c->pp, c->vpp, c->stages ? c->stages : "", c->schedule ? c->schedule : "", (long long)c->micro,
        (long long)c->global, (long long)c->layers, c->overlap ? " overlap" : "", c->sharded ? " sharded" : "",
        c->gather ? " gather" : "", c->align ? " aligned" : "", c->align_reduction ? " aligned reduction" : "",
        c->instances > 1 ? " instances" : "", c->pytorch ? " pytorch" : "", c->precision ? " " : "",
        c->precision ? c->precision : "", c->narrow_reduction ? " narrow" : "");
    return text;
}

static inline pipe_case pipe_filled(const pipe_case *given) {
    pipe_case c = *given;
    c.tp = c.tp ? c.tp : 1;
    c.pp = c.pp ? c.pp : 1;
    c.layers = c.layers ? c.layers : 4;
    c.micro = c.micro ? c.micro : 1;
    c.global = c.global ? c.global : 8;
    return c;
}

static inline loom_megatron_strategy_config pipe_strategy(const pipe_case *c) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    strategy.tensor_model_parallel_size = c->tp;
    strategy.pipeline_model_parallel_size = c->pp;
    strategy.virtual_pipeline_model_parallel_size = c->vpp;
    strategy.microbatch_group_size_per_vp_stage = c->group;
    strategy.sequence_parallel = c->sp;
    strategy.pipeline_dtype = c->wire;
    if (c->schedule)
        strategy.schedule = c->schedule;
    strategy.ddp_config.overlap_grad_reduce = c->overlap;
    /* Gathered one by one: what an operation does not wait for has not been started when it reads. */
    strategy.ddp_config.bucket_size = c->gather ? 1 : c->overlap ? 700 : 0;
    strategy.ddp_config.average_in_collective = c->average;
    strategy.ddp_config.use_distributed_optimizer = c->sharded;
    strategy.ddp_config.overlap_param_gather = c->gather;
    strategy.ddp_config.align_param_gather = c->align;
    strategy.ddp_config.align_grad_reduce = c->align_reduction;
    strategy.num_distributed_optimizer_instances = c->instances ? c->instances : 1;
    if (c->pytorch) {
        strategy.ddp = "pytorch";
        strategy.bucket_cap_mb = 0.002;
        strategy.find_unused_parameters = c->find_unused;
        strategy.static_graph = c->fixed;
    }
    return strategy;
}

static inline loom_model_config pipe_model(const pipe_case *c) {
    loom_model_config model = small_config();
    model.num_layers = c->layers;
    model.hidden_dropout = model.attention_dropout = c->dropout;
    model.share_embeddings_and_output_weights = !c->untied;
    model.parallel.pipeline_model_parallel_layout = c->stages;
    model.parallel.num_layers_in_first_pipeline_stage = c->first;
    model.parallel.num_layers_in_last_pipeline_stage = c->last;
    model.parallel.balanced_pipeline_split = c->balanced;
    model.parallel.variable_seq_lengths = c->variable;
    return model;
}

static inline loom_precision_config pipe_precision(const pipe_case *c) {
    loom_precision_config precision = loom_precision_config_default();
    if (c->precision)
        precision.precision = c->precision;
    if (c->params)
        precision.params_dtype = c->params;
    if (c->scale > 0)
        precision.initial_loss_scale = c->scale;
    precision.grad_reduce_in_fp32 = !c->narrow_reduction;
    return precision;
}

/* Model and optimizer; destroy also after an error. */
static inline loom_status pipe_start(loom_rank *rank, const pipe_case *c, small_run *run) {
    loom_megatron_strategy_config strategy = pipe_strategy(c);
    loom_model_config model = pipe_model(c);
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_module *module;
    *run = (small_run){0};
    optim.lr = 0.01;
    loom_precision_config precision = pipe_precision(c);
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, module, &run->parallel));
    return loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer);
}

static inline loom_status pipe_hash(
    void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    uint64_t *hash = context;
    int64_t count = shape[0] * (dims == 2 ? shape[1] : 1);
    for (; *name; name++)
        *hash = (*hash ^ (uint64_t)(unsigned char)*name) * 0x100000001b3u;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        *hash = (*hash ^ bits) * 0x100000001b3u;
    }
    return LOOM_OK;
}

static inline loom_status pipe_train(small_run *run, pipe_result *result) {
    for (int t = 0; t < PIPE_STEPS; t++) {
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(run->parallel, run->batches, &result->loss[t]));
        LOOM_TRY(loom_optimizer_step(run->optimizer, &outcome));
        result->norm[t] = outcome.grad_norm;
    }
    result->weights = 0xcbf29ce484222325u;
    return loom_gpt_visit(run->parallel, false, pipe_hash, &result->weights);
}

typedef struct pipe_job {
    const pipe_case *c;
    pipe_result *result; /* of rank 0; the others must have the same */
} pipe_job;

static inline loom_status pipe_body(loom_rank *rank, void *argument) {
    const pipe_job *job = argument;
    pipe_case c = pipe_filled(job->c);
    pipe_result mine;
    small_run run;
    loom_status status = pipe_start(rank, &c, &run);
    if (!status)
        status = small_data(&run, LOOM_TRAINING, PIPE_STEPS * c.global, c.micro, c.global);
    if (!status)
        status = pipe_train(&run, &mine);
    small_destroy(&run);
    LOOM_TRY(status);
    pipe_result first = mine;
    LOOM_TRY(loom_broadcast(loom_rank_world(rank), &first, sizeof first, LOOM_U8, 0));
    CHECK(memcmp(&first, &mine, sizeof mine) == 0, "rank %d has loss %.17g and norm %.17g, rank 0 %.17g and %.17g",
        loom_rank_index(rank), mine.loss[0], mine.norm[0], first.loss[0], first.norm[0]);
    if (loom_rank_index(rank) == 0)
        *job->result = mine;
    return LOOM_OK;
}

static inline pipe_result pipe_run(const pipe_case *c) {
    char name[PIPE_TEXT];
    loom_run_options options = test_options();
    pipe_result result = {.weights = 0};
    pipe_job job = {c, &result};
    if (loom_run_local(c->ranks, pipe_body, &job, &options))
        fail_msg("%s: %s", pipe_name(c, name), loom_error_message());
    return result;
}

static inline void pipe_must_be_near(const pipe_case *c, const pipe_result *found, const pipe_result *wanted) {
    char name[PIPE_TEXT];
    for (int t = 0; t < PIPE_STEPS; t++) {
        if (!(fabs(found->loss[t] - wanted->loss[t]) <= 3e-6 * wanted->loss[t]))
            fail_msg(
                "%s: loss of step %d: found %.9g, wanted %.9g", pipe_name(c, name), t, found->loss[t], wanted->loss[t]);
        if (!(fabs(found->norm[t] - wanted->norm[t]) <= 1e-5 * wanted->norm[t]))
            fail_msg(
                "%s: norm of step %d: found %.9g, wanted %.9g", pipe_name(c, name), t, found->norm[t], wanted->norm[t]);
    }
}

static inline void pipe_must_be_equal(const pipe_case *c, const pipe_result *found, const pipe_result *wanted) {
    char name[PIPE_TEXT];
    for (int t = 0; t < PIPE_STEPS; t++)
        if (found->loss[t] != wanted->loss[t] || found->norm[t] != wanted->norm[t])
            fail_msg("%s: step %d: found loss %a and norm %a, wanted %a and %a", pipe_name(c, name), t, found->loss[t],
                found->norm[t], wanted->loss[t], wanted->norm[t]);
    if (found->weights != wanted->weights)
        fail_msg("%s: the weights differ at the end", pipe_name(c, name));
}

#endif
