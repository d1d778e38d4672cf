/* A small model on ranks that share its sequences, its tensors or its experts, trained for a few steps and compared
 * with the same model on one rank. */
#ifndef TESTS_PARALLEL_SHARED_MODEL_H
#define TESTS_PARALLEL_SHARED_MODEL_H

#include "base/random.h"
#include "model/gpt.h"
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 4, S = 24, VOCABULARY = 31, BATCH = 4, TEXT = 160 };
enum { LAYERS = 4, WIDTH = 48, KEPT = LAYERS * 3 * WIDTH * WIDTH };

typedef struct shared_case {
    int ranks, cp, tp, pp, vpp;
    const char *type;          /* cp_comm_type; NULL = p2p */
    const char *types[LAYERS]; /* one of each layer, in its place */
    int64_t inner;             /* ranks of the inner level of a2a+p2p */
    int64_t groups;            /* query groups; 0 = all 12 heads */
    int64_t window;
    bool mean_of_each; /* the loss is the mean over microbatches of their means, not over the tokens */
    bool documents, sp, sharded, learned, average, selective, full; /* selective, full: recomputation */
    double dropout;
    /* Of experts: 0 of them = a dense model. ep ranks share them, etp ranks share each (0 = tp). */
    int experts, topk, ep, etp, freq, shared_width;
    const char *layers; /* "0110": which have experts */
    bool shared_gate, shared_overlap, extended;
    const char *dispatcher, *balance, *score, *schedule;
    const char *balances[LOOM_MOE_BALANCES]; /* several at once, in place of balance and coefficient */
    double coefficients[LOOM_MOE_BALANCES];
    double coefficient, z, capacity, bias; /* bias: by which an expert's bias moves in a step; 0 = none has one */
    double jitter;
    bool experts_again;      /* moe_layer_recompute */
    bool biases, mlp_biases; /* add_bias_linear, add_mlp_bias */
    const char *bias_part;   /* biases whose names contain it are multiplied by 1 + bias_step */
    double bias_step;
    bool fp64;                /* moe_router_dtype */
    bool forced, weigh_input; /* forced: moe_router_force_load_balancing; weigh_input: moe_apply_probs_on_input */
    bool pre_softmax, by_position, padded, starved; /* starved: the router sends every token to expert 0 (and 1) */
    const char *precision;
    int64_t micro, length; /* length: of a sequence; 0 = S */
} shared_case;

typedef struct shared_result {
    double loss[STEPS], norm[STEPS], evaluated;
    /* Gradients of the first step: of the routers and of biases of experts, or, where layers share a sequence each in
     * its own way, of qkv. */
    float kept[KEPT];
    int64_t kept_count;
    double slope; /* of the loss of the first step as bias_step grows from 0, from the gradients */
    size_t high_water;
} shared_result;

typedef struct shared_job {
    const shared_case *c;
    shared_result *result;
} shared_job;

static inline const char *name_of(const shared_case *c, char text[TEXT]) {
    snprintf(text, TEXT, "%d ranks, cp %d %s tp %d%s pp %d groups %lld window %lld%s dropout %g%s%s", c->ranks, c->cp,
        c->types[0] ? "mixed"
        : c->type   ? c->type
                    : "p2p",
        c->tp, c->sp ? " sp" : "", c->pp, (long long)c->groups, (long long)c->window, c->documents ? " documents" : "",
        c->dropout, c->sharded ? " sharded" : "", c->precision ? c->precision : "");
    if (c->experts)
        snprintf(text + strlen(text), TEXT - strlen(text), " %d experts ep %d etp %d %s%s", c->experts, c->ep, c->etp,
            c->dispatcher ? c->dispatcher : "", c->biases || c->mlp_biases ? " biases" : "");
    return text;
}

/* ---- data: samples of documents that end at other places in each ---- */

static inline loom_status documents_get(void *context, int64_t index, const loom_sample_row *row) {
    const loom_dataset *inner = context;
    LOOM_TRY(inner->get(inner->context, index, row));
    int64_t length = 3 + (index < 0 ? 0 : index % 5) * 3;
    for (int64_t t = 0; t < S; t++) {
        row->loss_mask[t] = (t + index) % 3 == 0 ? 0 : 1;
        row->position_ids[t] = t % length;
        if (row->document_start)
            row->document_start[t] = (int32_t)(t / length * length);
    }
    return LOOM_OK;
}

/* ---- a loss in which each microbatch counts the same; of this data every piece of one has as large a part masked ----
 */

static inline loom_status mean_forward(void *context, const loom_batch *batch, const loom_tensor *losses, float seed,
    double *sum, double *weight, loom_tensor *d_losses) {
    const loom_loss_reduction *masked = context;
    float valid = 0, *mask = batch->loss_mask, whole = (float)(batch->b * batch->s);
    for (int64_t i = 0; i < batch->b * batch->s; i++)
        valid += mask[i];
    double of_sum = 0, of_weight = 0;
    LOOM_TRY(masked->forward(masked->context, batch, losses, seed * whole / valid, &of_sum, &of_weight, d_losses));
    *sum += of_sum * (double)(whole / valid);
    *weight += of_weight * (double)(whole / valid);
    return LOOM_OK;
}

/* ---- one run ---- */

static inline void set_experts(const shared_case *c, loom_model_config *config) {
    loom_moe_config *moe = &config->moe;
    moe->num_moe_experts = c->experts;
    moe->moe_router_topk = c->topk ? c->topk : 2;
    moe->moe_ffn_hidden_size = 24;
    moe->moe_layer_freq.every = c->freq ? c->freq : 1;
    for (const char *layer = c->layers; layer && *layer; layer++)
        moe->moe_layer_freq.list[moe->moe_layer_freq.length++] = *layer == '1';
    moe->moe_shared_expert_intermediate_size = c->shared_width;
    moe->moe_shared_expert_gate = c->shared_gate;
    moe->moe_shared_expert_overlap = c->shared_overlap;
    if (c->dispatcher)
        moe->moe_token_dispatcher_type = c->dispatcher;
    if (c->balance)
        moe->moe_router_load_balancing_type[0] = c->balance;
    if (c->score)
        moe->moe_router_score_function = c->score;
    moe->moe_aux_loss_coeff[0] = c->coefficient;
    for (int i = 0; i < LOOM_MOE_BALANCES && c->balances[i]; i++) {
        moe->moe_router_load_balancing_type[i] = c->balances[i];
        moe->moe_aux_loss_coeff[i] = c->coefficients[i];
        moe->moe_aux_loss_coeff_count = i + 1;
    }
    moe->moe_z_loss_coeff = c->z;
    moe->moe_expert_capacity_factor = c->capacity;
    moe->moe_router_pre_softmax = c->pre_softmax;
    if (c->by_position)
        moe->moe_token_drop_policy = "position";
    moe->moe_pad_expert_input_to_capacity = c->padded;
    moe->moe_input_jitter_eps = c->jitter;
    moe->moe_router_dtype = c->fp64 ? "fp64" : NULL;
    moe->moe_router_force_load_balancing = c->forced;
    moe->moe_apply_probs_on_input = c->weigh_input;
    moe->moe_router_enable_expert_bias = c->bias > 0;
    moe->moe_router_bias_update_rate = c->bias;
    moe->moe_layer_recompute = c->experts_again;
}

static inline loom_model_config model_of(const shared_case *c) {
    loom_model_config config = loom_model_config_default(c->learned ? "gpt2" : "llama");
    config.num_layers = LAYERS;
    config.hidden_size = WIDTH;
    config.ffn_hidden_size = 72;
    config.num_attention_heads = 12;
    config.num_query_groups = c->groups ? c->groups : 12;
    config.seq_length = c->length ? c->length : S;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.init_method_std = 0.05;
    config.window_size = c->window;
    config.add_bias_linear = config.add_bias_linear || c->biases;
    config.add_mlp_bias = c->mlp_biases;
    config.hidden_dropout = config.attention_dropout = c->dropout;
    config.recompute = c->full ? LOOM_RECOMPUTE_FULL : c->selective ? LOOM_RECOMPUTE_SELECTIVE : LOOM_RECOMPUTE_NONE;
    if (c->type)
        config.parallel.cp_comm_type[0] = c->type;
    for (int layer = 0; layer < LAYERS && c->types[layer]; layer++)
        config.parallel.cp_comm_type[layer] = c->types[layer];
    if (c->experts)
        set_experts(c, &config);
    if (c->inner) {
        config.parallel.hierarchical_context_parallel_sizes[0] = c->inner;
        config.parallel.hierarchical_context_parallel_sizes[1] = c->cp / c->inner;
    }
    return config;
}

/* A router of zeros has equal scores, and the first experts get everything. */
static inline loom_status starve(loom_parallel *parallel) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(parallel, &parameters, &count));
    for (int64_t i = 0; i < count; i++)
        if (strstr(parameters[i]->name, "router"))
            memset(loom_parameter_values(parameters[i]), 0,
                (size_t)loom_parameter_count(parameters[i]) * loom_dtype_size(parameters[i]->dtype));
    return LOOM_OK;
}

/* Biases begin at zero, where a wrong one would not show: here they are something, the same on every layout. */
static inline void bias_values(const char *name, int64_t count, float *values) {
    loom__normal_fill(9, loom__hash_name(name), 0, count, 0, 0.3f, values);
}

static inline bool is_part(const shared_case *c, const char *name) {
    return c->bias_part && strstr(name, c->bias_part);
}

enum { BIAS_MOST = 4 * WIDTH };

static inline loom_status set_biases(const shared_case *c, loom_parallel *parallel) {
    loom__parameter_set *set = ((loom__gpt *)parallel->module->context)->set;
    for (int64_t i = 0; i < set->count; i++) {
        const loom__parameter_descriptor *descriptor = set->part->entries[i].descriptor;
        const char *end = strrchr(descriptor->name, '.');
        float values[BIAS_MOST], factor = is_part(c, descriptor->name) ? 1 + (float)c->bias_step : 1;
        if (strcmp(end, ".bias") != 0)
            continue;
        CHECK(descriptor->shape[0] <= BIAS_MOST, "%s is too long", descriptor->name);
        bias_values(descriptor->name, descriptor->shape[0], values);
        for (int64_t k = 0; k < descriptor->shape[0]; k++)
            values[k] *= factor;
        LOOM_TRY(loom__parameter_scatter(set, i, values));
    }
    return LOOM_OK;
}

static inline loom_status set_up(
    loom_rank *rank, const shared_case *c, loom_fabric **fabric, loom_parallel **parallel) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_precision_config precision = loom_precision_config_default();
    loom_model_config config = model_of(c);
    loom_module *module;
    strategy.context_parallel_size = c->cp;
    strategy.tensor_model_parallel_size = c->tp;
    strategy.sequence_parallel = c->sp;
    strategy.pipeline_model_parallel_size = c->pp;
    strategy.virtual_pipeline_model_parallel_size = c->vpp;
    strategy.expert_model_parallel_size = c->ep ? c->ep : 1;
    strategy.expert_tensor_parallel_size = c->etp;
    strategy.moe_extended_tp = c->extended;
    if (c->schedule)
        strategy.schedule = c->schedule;
    strategy.ddp_config.overlap_grad_reduce = strategy.ddp_config.use_distributed_optimizer = c->sharded;
    strategy.ddp_config.average_in_collective = c->average;
    strategy.ddp_config.bucket_size = c->sharded ? 4000 : 0;
    if (c->precision)
        precision.precision = c->precision;
    if (c->precision && strcmp(c->precision, "16-mixed") == 0)
        precision.initial_loss_scale = 1024;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, fabric));
    LOOM_TRY(loom_fabric_launch(*fabric));
    LOOM_TRY(loom_gpt_create(*fabric, &config, &module));
    LOOM_TRY(loom_fabric_setup_module(*fabric, module, parallel));
    if (c->biases || c->mlp_biases)
        LOOM_TRY(set_biases(c, *parallel));
    return c->starved ? starve(*parallel) : LOOM_OK;
}

static inline loom_status keep_slope(
    const shared_case *c, const char *name, int64_t count, const float *gradient, double *slope) {
    float values[BIAS_MOST];
    if (!is_part(c, name))
        return LOOM_OK;
    CHECK(count <= BIAS_MOST, "%s is no bias", name);
    bias_values(name, count, values);
    for (int64_t i = 0; i < count; i++)
        *slope += (double)gradient[i] * (double)values[i];
    return LOOM_OK;
}

static inline bool keeps(const shared_case *c) {
    return c->experts > 0 || c->types[0];
}

static inline bool is_kept(const shared_case *c, const char *name) {
    if (c->experts)
        return strstr(name, "router") || (strstr(name, "experts") && strstr(name, ".bias"));
    return c->types[0] && strstr(name, "linear_qkv.weight");
}

typedef struct keeping {
    const shared_case *c;
    shared_result *result;
} keeping;

static inline loom_status keep(void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    const keeping *k = context;
    shared_result *result = k->result;
    if (!is_kept(k->c, name))
        return LOOM_OK;
    int64_t count = shape[0] * (dims == 2 ? shape[1] : 1);
    CHECK(result->kept_count + count <= KEPT, "%s does not fit", name);
    memcpy(result->kept + result->kept_count, values, (size_t)count * sizeof *values);
    result->kept_count += count;
    return keep_slope(k->c, name, count, values, &result->slope);
}

static inline loom_status train(const shared_case *c, loom_fabric *fabric, loom_parallel *parallel,
    loom_optimizer *optimizer, const loom_dataset *dataset, shared_result *result) {
    const int64_t micro = c->micro ? c->micro : 1;
    loom_dataloader loader = {.dataset = dataset, .micro_batch_size = micro, .global_batch_size = BATCH};
    loom_batches *batches = NULL, *validation = NULL;
    loom_status status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    for (int step = 0; !status && step < STEPS; step++) {
        loom_optimizer_outcome outcome;
        status = loom_parallel_training_step(parallel, batches, &result->loss[step]);
        if (!status && step == 0 && keeps(c))
            status = loom_gpt_visit(parallel, true, keep, &(keeping){c, result});
        if (!status)
            status = loom_optimizer_step(optimizer, &outcome);
        if (!status)
            result->norm[step] = outcome.grad_norm;
    }
    loader.mode = LOOM_VALIDATION;
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &validation);
    if (!status)
        status = loom_parallel_validation_step(parallel, validation, &result->evaluated);
    loom_batches_destroy(batches);
    loom_batches_destroy(validation);
    return status;
}

static inline loom_status on_rank(loom_rank *rank, void *argument) {
    const shared_job *job = argument;
    const shared_case *c = job->c;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_dataset inner = {0}, outer;
    const loom_loss_reduction *masked = loom_loss_reduction_masked_token();
    const loom_loss_reduction mean = {(void *)(uintptr_t)masked, mean_forward, masked->reduce};
    shared_result mine = {.evaluated = 0};
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 0.001;
    loom_status status = loom_mock_dataset_create(c->length ? c->length : S, VOCABULARY, 5, STEPS * BATCH, &inner);
    outer = (loom_dataset){.context = &inner,
        .length = STEPS * BATCH,
        .sequence_length = S,
        .document_boundaries = c->documents,
        .get = documents_get};
    if (!status)
        status = set_up(rank, c, &fabric, &parallel);
    if (!status && c->mean_of_each)
        loom_parallel_set_loss_reduction(parallel, &mean);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer);
    if (!status)
        status = train(c, fabric, parallel, optimizer, c->documents ? &outer : &inner, &mine);
    mine.high_water = loom_rank_memory(rank).high_water;
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&inner);
    if (!status && loom_rank_index(rank) == 0)
        *job->result = mine;
    return status;
}

static inline shared_case filled(const shared_case *given) {
    shared_case c = *given;
    c.cp = c.cp ? c.cp : 1;
    c.tp = c.tp ? c.tp : 1;
    c.pp = c.pp ? c.pp : 1;
    c.ep = c.ep ? c.ep : 1;
    c.ranks = c.ranks ? c.ranks : c.cp * c.tp * c.pp;
    return c;
}

static inline loom_status try_run(const shared_case *given, shared_result *result) {
    shared_case c = filled(given);
    shared_job job = {&c, result};
    loom_run_options options = test_options();
    return loom_run_local(c.ranks, on_rank, &job, &options);
}

static inline shared_result run_it(const shared_case *c) {
    char text[TEXT];
    shared_result result;
    shared_case full = filled(c);
    if (try_run(c, &result))
        fail_msg("%s: %s", name_of(&full, text), loom_error_message());
    return result;
}

static inline loom_status near(
    const char *name, const char *what, int step, double found, double wanted, double relative) {
    return fabs(found - wanted) <= relative * fabs(wanted)
               ? LOOM_OK
               : loom_fail(LOOM_ERR_INTERNAL, "%s: %s of step %d is %.9g, one rank has %.9g", name, what, step, found,
                     wanted);
}

/* Of what is in 16 bits a rounding can send a token to another expert. */
static inline loom_status compare_kept(
    const char *name, const shared_case *c, const shared_result *found, const shared_result *wanted) {
    double off = 0, all = 0;
    if (c->precision)
        return LOOM_OK;
    CHECK(found->kept_count == wanted->kept_count && (found->kept_count > 0) == keeps(c),
        "%s: %lld gradients kept, one rank has %lld", name, (long long)found->kept_count,
        (long long)wanted->kept_count);
    for (int64_t i = 0; i < wanted->kept_count; i++) {
        double a = (double)found->kept[i], b = (double)wanted->kept[i];
        off += (a - b) * (a - b);
        all += b * b;
    }
    CHECK(sqrt(off) <= 1e-5 * sqrt(all), "%s: the gradients kept are off by %g, of %g", name, sqrt(off), sqrt(all));
    return LOOM_OK;
}

static inline loom_status compare(const shared_case *c, const shared_result *found, const shared_result *wanted) {
    char name[TEXT];
    double loss = c->precision ? 4e-3 : 1e-5, norm = c->precision ? 6e-2 : 1e-5;
    name_of(c, name);
    for (int step = 0; step < STEPS; step++) {
        LOOM_TRY(near(name, "loss", step, found->loss[step], wanted->loss[step], loss));
        LOOM_TRY(near(name, "norm", step, found->norm[step], wanted->norm[step], norm));
    }
    LOOM_TRY(compare_kept(name, c, found, wanted));
    return near(name, "evaluation loss", STEPS, found->evaluated, wanted->evaluated, loss);
}

/* The same model and data on one rank. */
static inline shared_case on_one_rank(const shared_case *given) {
    shared_case alone = *given;
    alone.ranks = alone.cp = alone.tp = alone.pp = alone.ep = 1;
    alone.vpp = alone.etp = 0;
    alone.schedule = NULL;
    alone.sp = alone.sharded = alone.average = alone.selective = alone.full = alone.experts_again = false;
    return alone;
}

static inline void must_equal_one_rank(const shared_case *given) {
    shared_case c = filled(given), alone = on_one_rank(given);
    shared_result found = run_it(given), wanted = run_it(&alone);
    if (compare(&c, &found, &wanted))
        fail_msg("%s", loom_error_message());
}

/* Of the cases every FEW-th where each takes long: what threads do to each other does not hang on the numbers. */
#if defined(__SANITIZE_THREAD__)
enum { FEW = 8 };
#elif defined(__SANITIZE_ADDRESS__)
enum { FEW = 3 };
#else
enum { FEW = 1 };
#endif

static inline void all_equal_one_rank(const shared_case *cases, size_t count) {
    for (size_t i = 0; i < count; i += FEW)
        must_equal_one_rank(&cases[i]);
}

/* ---- the same on the processes of mpirun: the cases that are of as many ranks ---- */

typedef struct mpi_job {
    const shared_case *cases;
    const shared_result *wanted;
    size_t count;
} mpi_job;

static inline loom_status all_on_mpi(loom_rank *rank, void *argument) {
    const mpi_job *job = argument;
    int ran = 0;
    for (size_t i = 0; i < job->count; i++) {
        shared_case c = filled(&job->cases[i]);
        shared_result found;
        if (c.ranks != loom_rank_count(rank))
            continue;
        LOOM_TRY(on_rank(rank, &(shared_job){&c, &found}));
        loom_status status = loom_rank_index(rank) == 0 ? compare(&c, &found, &job->wanted[i]) : LOOM_OK;
        LOOM_TRY(loom_agree(loom_rank_world(rank), status));
        ran++;
    }
    return ran ? LOOM_OK : loom_fail(LOOM_ERR_STATE, "no case is of %d ranks", loom_rank_count(rank));
}

/* Each process runs the model alone first. Threads as ranks are refused under mpirun, whose variables are hidden
 * meanwhile. */
static inline void all_equal_one_rank_on_mpi(const shared_case *cases, size_t count) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"};
    enum { VARIABLES = sizeof variables / sizeof *variables };
    char *hidden[VARIABLES];
    shared_result wanted[32];
    loom_run_options options = test_options();
    assert_true(count <= sizeof wanted / sizeof *wanted);
    for (int i = 0; i < VARIABLES; i++) {
        const char *value = getenv(variables[i]);
        hidden[i] = value ? strdup(value) : NULL;
        unsetenv(variables[i]);
    }
    for (size_t i = 0; i < count; i++) {
        shared_case alone = on_one_rank(&cases[i]);
        wanted[i] = run_it(&alone);
    }
    for (int i = 0; i < VARIABLES; i++) {
        if (hidden[i])
            setenv(variables[i], hidden[i], 1);
        free(hidden[i]);
    }
    if (loom_run_mpi(all_on_mpi, &(mpi_job){cases, wanted, count}, &options))
        fail_msg("%s", loom_error_message());
}

#define ALL_EQUAL_ONE_RANK(cases) all_equal_one_rank(cases, sizeof(cases) / sizeof *(cases))

#define ALL_EQUAL_ONE_RANK_ON_MPI(cases) all_equal_one_rank_on_mpi(cases, sizeof(cases) / sizeof *(cases))

#endif
