/* The layouts that fit, best first. What can never be (sizes that do not divide) is sorted out by the checks that a run
 * makes; of the rest each is planned. Recomputation only costs time, so that of one layout the least that fits is
 * enough. */
#include "config/check.h"
#include "layout/layout.h"
#include "plan/sizes.h"
#include "schedule/schedule.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Schedules of more forwards are shortened: a search plans thousands. */
enum { FORWARDS = 1 << 13 };
enum { SIZES_MAX = 64, TENSOR_MAX = 64, EXPERT_MAX = 1 << 16, CHUNKS_MAX = 8, MICRO_MAX = 8 };

typedef enum reason { TENSOR, SEQUENCE, LAYERS, BATCH, SCHEDULE, EXPERTS, OTHER, MEMORY, REASONS } reason;

static const char *const reasons[REASONS] = {
    [TENSOR] = "the tensor size does not divide heads, query groups or widths",
    [SEQUENCE] = "the sequence does not divide, or context ranks cannot share heads",
    [LAYERS] = "the layers do not divide over stages and chunks",
    [BATCH] = "the global batch is no whole number of microbatches",
    [SCHEDULE] = "the microbatches make no interleaved schedule",
    [EXPERTS] = "the expert size does not divide experts or ranks",
    [OTHER] = "the sizes do not go together",
    [MEMORY] = "a rank needs more memory than it has",
};

typedef struct seeker {
    const loom_run_config *config;
    const loom_plan_options *options;
    int64_t world;
    loom_plan_search *search;
    int64_t capacity;
    int64_t counts[REASONS];
    char examples[REASONS][160];
    double least_memory;
} seeker;

typedef struct choice {
    int64_t tp, pp, ep, chunks, micro;
} choice;

static void describe(const choice *c, char *text, size_t bytes) {
    size_t used = (size_t)snprintf(text, bytes, "tp %" PRId64 " pp %" PRId64, c->tp, c->pp);
    if (c->chunks > 1)
        used += (size_t)snprintf(text + used, bytes - used, " vp %" PRId64, c->chunks);
    if (c->ep > 1)
        used += (size_t)snprintf(text + used, bytes - used, " ep %" PRId64, c->ep);
    snprintf(text + used, bytes - used, " micro %" PRId64, c->micro);
}

static void fall(seeker *s, reason why, const choice *c) {
    if (s->counts[why]++ == 0)
        describe(c, s->examples[why], sizeof s->examples[why]);
}

static loom_run_config with(const seeker *s, const choice *c, loom_recompute recompute) {
    loom_run_config made = *s->config;
    made.ranks = 1; /* threads of a process are fewer than what is planned */
    made.strategy.tensor_model_parallel_size = c->tp;
    made.strategy.pipeline_model_parallel_size = c->pp;
    made.strategy.virtual_pipeline_model_parallel_size = c->chunks > 1 ? c->chunks : 0;
    made.strategy.expert_model_parallel_size = c->ep;
    made.strategy.sequence_parallel = c->tp > 1;
    made.data.micro_batch_size = c->micro;
    made.model.config.recompute = recompute;
    made.model.config.padded_vocab_size = 0;
    if (c->chunks > 1 && made.strategy.schedule && strcmp(made.strategy.schedule, "zero-bubble") == 0)
        made.strategy.schedule = "1f1b";
    if (c->pp != s->config->strategy.pipeline_model_parallel_size || c->chunks > 1) {
        made.model.config.parallel.pipeline_model_parallel_layout = NULL;
        made.model.config.parallel.num_layers_in_first_pipeline_stage = 0;
        made.model.config.parallel.num_layers_in_last_pipeline_stage = 0;
    }
    return made;
}

/* The checks are asked without the nearest legal values, which would be searched for each layout that falls. */
static bool shares_sequence(const loom_model_config *model, int64_t tp, int64_t cp) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__model_context_faults(model, tp, cp, tp > 1, &faults);
    return faults.count == 0;
}

static bool shares_experts(const loom_model_config *model, int64_t ep, int64_t etp) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__model_expert_ranks_faults(model, ep, etp, &faults);
    return faults.count == 0;
}

static bool splits_layers(const loom_stage_split *split) {
    loom__faults faults;
    int64_t chunks;
    loom__faults_begin(&faults);
    loom__stage_split_faults(split, &chunks, &faults);
    return faults.count == 0;
}

static bool makes_schedule(const loom_schedule_config *schedule) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__schedule_faults(schedule, &faults);
    return faults.count == 0;
}

/* Whatever else a run is asked. */
static bool passes_checks(const loom_run_config *config, int64_t world) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__check_run(config, world, &faults);
    return faults.status != LOOM_ERR_CONFIG;
}

/* Whether the sizes are legal; what is not is counted. */
static bool is_legal(seeker *s, const choice *c) {
    loom_run_config config = with(s, c, LOOM_RECOMPUTE_NONE);
    const loom_megatron_strategy_config *strategy = &config.strategy;
    loom_model_config model = config.model.config;
    int64_t cp = strategy->context_parallel_size, dp = s->world / (c->tp * c->pp * cp);
    int64_t global = config.data.global_batch_size, unit = c->micro * dp;
    int64_t etp = strategy->expert_tensor_parallel_size ? strategy->expert_tensor_parallel_size : c->tp;
    bool extended = strategy->moe_extended_tp;
    if (extended)
        etp = c->tp;
    loom_stage_split split = loom_stage_split_of(strategy, &model);
    reason why = REASONS;
    bool heads = model.num_attention_heads % c->tp == 0;
    if (loom__model_config_complete_planned(&model, c->tp, c->tp > 1))
        why = heads && model.seq_length % c->tp != 0 ? SEQUENCE : TENSOR;
    else if (!shares_sequence(&model, c->tp, cp))
        why = SEQUENCE;
    else if ((extended ? model.moe.moe_ffn_hidden_size % (c->tp * c->ep) != 0 : !shares_experts(&model, c->ep, etp)) ||
             s->world % (etp * c->ep * c->pp) != 0)
        why = EXPERTS;
    else if (global % unit != 0)
        why = BATCH;
    else if (!splits_layers(&split))
        why = LAYERS;
    const loom_schedule_config schedule = {.stages = c->pp,
        .chunks = c->chunks > 1 ? c->chunks : 0,
        .microbatches = global / unit > 0 ? global / unit : 1,
        .group = c->chunks > 1 ? strategy->microbatch_group_size_per_vp_stage : 0};
    if (why == REASONS && !makes_schedule(&schedule))
        why = SCHEDULE;
    if (why == REASONS && !passes_checks(&config, s->world))
        why = OTHER;
    if (why != REASONS)
        fall(s, why, c);
    return why == REASONS;
}

static loom_status keep(seeker *s, const choice *c, loom_recompute recompute, const loom_plan *plan) {
    loom_plan_search *search = s->search;
    if (search->count == s->capacity) {
        int64_t grown = s->capacity ? 2 * s->capacity : 64;
        void *memory = realloc(search->candidates, (size_t)grown * sizeof *search->candidates);
        if (!memory)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " layouts", grown);
        search->candidates = memory;
        s->capacity = grown;
    }
    search->candidates[search->count++] = (loom_plan_candidate){
        .tensor = c->tp,
        .context = plan->context,
        .expert = c->ep,
        .data = plan->data,
        .pipeline = c->pp,
        .chunks = c->chunks,
        .micro_batch_size = c->micro,
        .microbatches = plan->microbatches,
        .sequence_parallel = c->tp > 1,
        .recompute = recompute,
        .memory = plan->stages[plan->worst].memory.total,
        .bubble = plan->bubble,
        .utilization = plan->utilization,
        .step_seconds = plan->step_seconds,
        .tokens_per_second = (double)plan->global_batch_size * (double)plan->seq_length / plan->step_seconds,
    };
    return LOOM_OK;
}

static loom_status try_choice(seeker *s, const choice *c) {
    double limit = s->options->machine.memory, least = 0;
    s->search->tried++;
    if (!is_legal(s, c))
        return LOOM_OK;
    for (int recompute = LOOM_RECOMPUTE_NONE; recompute <= LOOM_RECOMPUTE_FULL; recompute++) {
        loom_run_config config = with(s, c, (loom_recompute)recompute);
        loom_plan *plan;
        loom_status status = loom__plan_make(&config, s->options, FORWARDS, &plan);
        if (status == LOOM_ERR_CONFIG || status == LOOM_ERR_UNSUPPORTED) {
            fall(s, OTHER, c);
            return LOOM_OK;
        }
        LOOM_TRY(status);
        double memory = plan->stages[plan->worst].memory.total;
        bool fits = !(limit > 0) || memory <= limit;
        if (fits)
            status = keep(s, c, (loom_recompute)recompute, plan);
        loom_plan_destroy(plan);
        if (fits || status)
            return status;
        least = least > 0 && least < memory ? least : memory;
    }
    s->counts[MEMORY]++;
    if (!(s->least_memory > 0) || least < s->least_memory) {
        char text[96];
        s->least_memory = least;
        describe(c, text, sizeof text);
        bool small = least < 1073741824.0;
        snprintf(s->examples[MEMORY], sizeof s->examples[MEMORY], "%s, the nearest, needs %.1f %s", text,
            least / (small ? 1048576.0 : 1073741824.0), small ? "MiB" : "GiB");
    }
    return LOOM_OK;
}

/* The divisors of n up to `most`, ascending. */
static int divisors(int64_t n, int64_t most, int64_t sizes[SIZES_MAX]) {
    int count = 0;
    for (int64_t d = 1; d <= n && d <= most && count < SIZES_MAX; d++)
        if (n % d == 0)
            sizes[count++] = d;
    return count;
}

/* Layers, and what counts as one where they are cut. */
static int64_t count_layers(const seeker *s) {
    const loom_model_config *model = &s->config->model.config;
    return model->num_layers + model->parallel.account_for_embedding_in_pipeline_split +
           model->parallel.account_for_loss_in_pipeline_split;
}

static loom_status try_pipeline(seeker *s, choice c) {
    int64_t layers = count_layers(s), experts = s->config->model.config.moe.num_moe_experts;
    int64_t own = s->config->strategy.virtual_pipeline_model_parallel_size;
    int64_t most = own > CHUNKS_MAX ? own : CHUNKS_MAX;
    int64_t expert_sizes[SIZES_MAX] = {1};
    int expert_count = experts > 0 ? divisors(experts, s->world < EXPERT_MAX ? s->world : EXPERT_MAX, expert_sizes) : 1;
    for (int e = 0; e < expert_count; e++)
        for (c.chunks = 1; c.chunks <= most && (c.chunks == 1 || c.pp > 1) && c.pp * c.chunks <= layers; c.chunks++)
            for (c.micro = 1; c.micro <= MICRO_MAX; c.micro *= 2) {
                c.ep = expert_sizes[e];
                LOOM_TRY(try_choice(s, &c));
            }
    return LOOM_OK;
}

static loom_status try_all(seeker *s) {
    int64_t cp = s->config->strategy.context_parallel_size, tensor_sizes[SIZES_MAX], stages[SIZES_MAX];
    int tensor_count = divisors(s->world / cp, TENSOR_MAX, tensor_sizes);
    for (int t = 0; t < tensor_count; t++) {
        int stage_count = divisors(s->world / cp / tensor_sizes[t], count_layers(s), stages);
        for (int p = 0; p < stage_count; p++)
            LOOM_TRY(try_pipeline(s, (choice){.tp = tensor_sizes[t], .pp = stages[p]}));
    }
    return LOOM_OK;
}

/* As fast but for the last digits is as fast: then the one that needs less. */
static int by_speed(const void *a, const void *b) {
    const loom_plan_candidate *x = a, *y = b;
    float mine = (float)x->tokens_per_second, other = (float)y->tokens_per_second;
    int order = (mine < other) - (mine > other);
    return order ? order : (x->memory > y->memory) - (x->memory < y->memory);
}

static int by_count(const void *a, const void *b) {
    const loom_plan_fall *x = a, *y = b;
    return (x->count < y->count) - (x->count > y->count);
}

static loom_status gather_falls(const seeker *s) {
    loom_plan_search *search = s->search;
    search->falls = calloc(REASONS, sizeof *search->falls);
    if (!search->falls)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the reasons of a search");
    for (int why = 0; why < REASONS; why++) {
        if (s->counts[why] == 0)
            continue;
        loom_plan_fall *made = &search->falls[search->fall_count++];
        *made = (loom_plan_fall){.reason = reasons[why], .count = s->counts[why]};
        memcpy(made->example, s->examples[why], sizeof made->example);
    }
    qsort(search->falls, (size_t)search->fall_count, sizeof *search->falls, by_count);
    if (search->count > 0)
        qsort(search->candidates, (size_t)search->count, sizeof *search->candidates, by_speed);
    return LOOM_OK;
}

loom_status loom_plan_search_make(
    const loom_run_config *config, const loom_plan_options *options, loom_plan_search **out) {
    /* What the configuration itself plans: its batch is what all layouts are compared at. */
    loom_run_config given = *config;
    loom_plan *plan;
    LOOM_TRY(loom__plan_make(config, options, FORWARDS, &plan));
    given.data.global_batch_size = plan->global_batch_size;
    loom_plan_options of_all = *options;
    of_all.world_size = plan->world;
    seeker s = {.config = &given, .options = &of_all, .world = plan->world};
    loom_plan_destroy(plan);
    s.search = calloc(1, sizeof *s.search);
    loom_status status = s.search ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a search");
    if (!status)
        status = try_all(&s);
    if (!status)
        status = gather_falls(&s);
    if (status) {
        loom_plan_search_destroy(s.search);
        return status;
    }
    loom_error_clear(); /* of layouts that fell */
    *out = s.search;
    return LOOM_OK;
}

void loom_plan_search_destroy(loom_plan_search *search) {
    if (!search)
        return;
    free(search->candidates);
    free(search->falls);
    free(search);
}
