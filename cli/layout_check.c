/* Whether a layout computes what one rank computes, up to rounding. How much rounding matters is measured, not guessed:
 * one rank runs again from weights that differ at random in their last bit, and what grows out of that is what rounding
 * may do to each quantity in each step (the test of a port by the growth of rounding errors: Rosinski and Williamson,
 * SIAM J. Sci. Comput. 18, 1997). A quantity of the layout's run that is farther from the plain run than FACTOR times
 * that, or than FLOOR unit roundoffs where that is more, is beyond noise.
 *
 * A tensor is kept as a sketch: each element is added, with a random sign, to one of BUCKETS sums, both keyed by the
 * element's place in the unsharded tensor. The distance of two sketches estimates that of the tensors to about a fifth,
 * sketches of shards add up to that of the whole, and a shard at the wrong place is as visible as a wrong value.
 * Invariant: all runs record the same quantities in the same order. */
#include "layout_check.h"
#include "commands.h"
#include "train_data.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 64, CONTROLS = 2, SITES = 2 };
#define FACTOR 16.0
#define FLOOR 16.0       /* unit roundoffs of fp32 */
#define NARROW_FLOOR 1.0 /* of bf16 or fp16 */

/* In the order of a step. */
typedef enum kind { ACTIVATION, LOSS, GRADIENT, NORM, WEIGHT } kind;
static const char *const kind_text[] = {[ACTIVATION] = "activations after ",
    [LOSS] = "the loss",
    [GRADIENT] = "gradient of ",
    [NORM] = "the gradient norm",
    [WEIGHT] = "updated "};

typedef struct quantity {
    kind of;
    int64_t step;
    char name[128];
    double sketch[BUCKETS];
} quantity;

typedef struct record {
    quantity *list;
    int64_t count, room;
    int64_t steps;
} record;

typedef struct job {
    const loom_cli_layout_check *check;
    const loom_run_config *config; /* of this run */
    uint64_t perturbation;         /* 0 = none */
    int64_t total;                 /* steps, those that a loss scale skips among them; 0 = as many as it takes */
    record *out;                   /* of rank 0 */
} job;

/* What a rank holds during a run. */
typedef struct run {
    const job *given;
    loom_rank *rank;
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_cli_train_data data;
    loom_batches *batches, *valid;
    int64_t layers, step;
    int64_t updates;     /* steps so far that were not skipped */
    double *activations; /* [layers][SITES][BUCKETS] of the step so far */
    int *seen;           /* [layers] outputs of this forward */
    kind visiting;
    bool first_of_tensor; /* the tensor rank that tells what all of them have */
} run;

/* ---- sketches ---- */

static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void add_to(double sketch[BUCKETS], uint64_t place, double value) {
    uint64_t random = mix(place);
    sketch[random % BUCKETS] += random >> 63 ? value : -value;
}

static double distance(const double a[BUCKETS], const double b[BUCKETS]) {
    double sum = 0;
    for (int i = 0; i < BUCKETS; i++)
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum);
}

static double widen(loom_dtype dtype, const void *data, int64_t i) {
    if (dtype == LOOM_F32)
        return ((const float *)data)[i];
    unsigned bits = ((const uint16_t *)data)[i], exponent = dtype == LOOM_BF16 ? 8 : 5, fraction = 15 - exponent;
    unsigned power = bits >> fraction & ((1u << exponent) - 1), part = bits & ((1u << fraction) - 1);
    int bias = (1 << (exponent - 1)) - 1;
    double value = power == (1u << exponent) - 1 ? (part ? NAN : INFINITY)
                   : power ? ldexp((double)(part | 1u << fraction), (int)power - bias - (int)fraction)
                           : ldexp((double)part, 1 - bias - (int)fraction);
    return bits >> 15 ? -value : value;
}

/* ---- what is recorded ---- */

static loom_status new_quantity(run *r, kind of, const char *name, quantity **out) {
    record *to = r->given->out;
    if (to->count == to->room) {
        int64_t room = to->room ? 2 * to->room : 256;
        quantity *grown = realloc(to->list, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " quantities", room);
        to->list = grown;
        to->room = room;
    }
    quantity *made = &to->list[to->count++];
    *made = (quantity){.of = of, .step = r->step};
    snprintf(made->name, sizeof made->name, "%s", name);
    *out = made;
    return LOOM_OK;
}

static loom_status record_number(run *r, kind of, double value) {
    quantity *made;
    if (loom_rank_index(r->rank) != 0)
        return LOOM_OK;
    LOOM_TRY(new_quantity(r, of, "", &made));
    made->sketch[0] = value;
    return LOOM_OK;
}

/* Where local row `row` of `rows` lies in a sequence that context ranks share in two chunks each. */
static int64_t position_of(const run *r, int64_t row, int64_t rows) {
    const loom_comm *context = loom_fabric_group(r->fabric, LOOM_GROUP_CP);
    int64_t cp = loom_comm_size(context), begin[2];
    if (cp == 1)
        return row;
    loom_layout_context_chunks(rows * cp, cp, loom_comm_rank(context), begin);
    return row < rows / 2 ? begin[0] + row : begin[1] + row - rows / 2;
}

/* The residual stream, which each layer gives out twice, of this rank's part of the samples and positions. */
static loom_status observe(
    void *context, const loom_batch *batch, const char *scope, const char *operation, loom_tensor *output) {
    run *r = context;
    int layer;
    if (sscanf(scope, "decoder.layers.%d", &layer) != 1 || layer < 0 || layer >= r->layers || output->dims != 3 ||
        strcmp(operation, "bias, dropout and residual") != 0)
        return LOOM_OK;
    LOOM_TRY(loom_tensor_ready(output));
    int64_t s = output->shape[0], rows = output->shape[1], h = output->shape[2];
    int site = r->seen[layer]++ % SITES;
    bool cut = s < batch->s;
    int64_t offset = cut ? s * loom_comm_rank(loom_fabric_group(r->fabric, LOOM_GROUP_TP)) : 0;
    if (!cut && !r->first_of_tensor)
        return LOOM_OK;
    double *sketch = r->activations + (layer * SITES + site) * BUCKETS;
    int64_t whole = batch->s * loom_comm_size(loom_fabric_group(r->fabric, LOOM_GROUP_CP));
    for (int64_t t = 0; t < s; t++)
        for (int64_t row = 0; row < rows && row < batch->b; row++) {
            uint64_t position = (uint64_t)position_of(r, offset + t, batch->s);
            uint64_t place = ((uint64_t)batch->sample[row] * (uint64_t)whole + position) * (uint64_t)h;
            for (int64_t c = 0; c < h; c++)
                add_to(sketch, place + (uint64_t)c, widen(output->dtype, output->data, (t * rows + row) * h + c));
        }
    return LOOM_OK;
}

/* Ranks have parts of the samples, of the positions and of the layers: the sum of their sketches is that of the whole.
 */
static loom_status record_activations(run *r) {
    LOOM_TRY(loom_all_reduce(
        loom_rank_world(r->rank), r->activations, r->activations, r->layers * SITES * BUCKETS, LOOM_F64, LOOM_SUM));
    for (int64_t i = 0; i < r->layers * SITES && loom_rank_index(r->rank) == 0; i++) {
        char name[96];
        quantity *made;
        snprintf(name, sizeof name, "%s of decoder.layers.%" PRId64, i % SITES ? "the MLP" : "attention", i / SITES);
        LOOM_TRY(new_quantity(r, ACTIVATION, name, &made));
        memcpy(made->sketch, r->activations + i * BUCKETS, sizeof made->sketch);
    }
    memset(r->activations, 0, (size_t)(r->layers * SITES * BUCKETS) * sizeof *r->activations);
    return LOOM_OK;
}

static loom_status visit(void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    run *r = context;
    quantity *made;
    int64_t count = 1;
    if (loom_rank_index(r->rank) != 0)
        return LOOM_OK;
    for (int i = 0; i < dims; i++)
        count *= shape[i];
    LOOM_TRY(new_quantity(r, r->visiting, name, &made));
    for (int64_t i = 0; i < count; i++)
        add_to(made->sketch, (uint64_t)i, values[i]);
    return LOOM_OK;
}

static loom_status record_tensors(run *r, kind of) {
    r->visiting = of;
    return loom_gpt_visit(r->parallel, of == GRADIENT, visit, r);
}

/* ---- a run ---- */

/* The neighbour of each weight above or below it, at random. Zeros stay: their neighbours are no rounding of them. */
static loom_status perturb(run *r) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(r->parallel, &parameters, &count));
    for (int64_t p = 0; p < count; p++)
        for (int64_t i = 0; i < loom_parameter_count(parameters[p]); i++) {
            bool up = mix(mix(r->given->perturbation + (uint64_t)p) + (uint64_t)i) >> 63;
            if (parameters[p]->dtype == LOOM_F32) {
                float *at = &parameters[p]->data[i];
                *at = *at != 0 ? nextafterf(*at, up ? INFINITY : -INFINITY) : *at;
            } else if ((parameters[p]->data16[i] & 0x7fff) > 1) {
                parameters[p]->data16[i] = (uint16_t)(parameters[p]->data16[i] + (up ? 1 : -1));
            }
        }
    loom_optimizer_reload_model_params(r->optimizer);
    return LOOM_OK;
}

static loom_status set_up(run *r) {
    const loom_run_config *config = r->given->config;
    LOOM_TRY(loom_cli_fabric(r->rank, config, &r->fabric));
    int64_t data_parallel = loom_layout_data_parallel_size(loom_fabric_layout(r->fabric));
    LOOM_TRY(loom_agree(loom_rank_world(r->rank),
        loom_cli_train_data_open(config, r->given->check->tokenizer, data_parallel, &r->data)));
    LOOM_TRY(loom_cli_model(r->fabric, config, true, &r->parallel));
    loom_optimizer_setup setup = {.schedule = config->lr, .steps = config->steps};
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->parallel, &config->optim, &setup, &r->optimizer));
    LOOM_TRY(loom_cli_train_batches(r->fabric, config, &r->data, 0, &r->batches, &r->valid));
    if (r->given->perturbation)
        LOOM_TRY(perturb(r));
    r->layers = loom_parallel_model_config(r->parallel)->num_layers;
    r->first_of_tensor = loom_comm_rank(loom_fabric_group(r->fabric, LOOM_GROUP_TP)) == 0;
    r->activations = calloc((size_t)(r->layers * SITES * BUCKETS), sizeof *r->activations);
    r->seen = calloc((size_t)r->layers, sizeof *r->seen);
    LOOM_TRY(loom_agree(loom_rank_world(r->rank),
        r->activations && r->seen ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for sketches")));
    loom_parallel_observe(r->parallel, observe, r);
    return LOOM_OK;
}

static loom_status one_step(run *r) {
    loom_step_result result;
    loom_optimizer_outcome outcome;
    loom_status status = loom_parallel_step(r->parallel, LOOM_TRAINING, r->batches, NULL, NULL, NULL, &result);
    if (status == LOOM_END)
        return loom_fail(LOOM_ERR_STATE, "the data end before step %" PRId64, r->step);
    LOOM_TRY(status);
    LOOM_TRY(record_activations(r));
    LOOM_TRY(record_number(r, LOSS, result.loss));
    LOOM_TRY(record_tensors(r, GRADIENT));
    LOOM_TRY(loom_optimizer_step(r->optimizer, &outcome));
    r->updates += !outcome.skipped;
    /* A step that a loss scale skips has no norm. */
    LOOM_TRY(record_number(r, NORM, isfinite(outcome.grad_norm) ? outcome.grad_norm : 0));
    return record_tensors(r, WEIGHT);
}

/* A dynamic loss scale begins so high that the first steps are skipped: they are compared, but not counted. The plain
 * run finds out how many there are; the others make as many steps as it has made. */
static bool is_over(const run *r) {
    return r->given->total ? r->step > r->given->total : r->updates == r->given->check->steps;
}

static loom_status run_steps(run *r) {
    for (r->step = 1; !is_over(r); r->step++) {
        LOOM_TRY(one_step(r));
        if (r->step - r->updates > LOOM_CLI_MOST_SKIPPED)
            return loom_fail(LOOM_ERR_NUMERIC,
                "one rank has skipped %" PRId64 " of %" PRId64 " steps because of overflows, expected at most %d: "
                "nothing can be compared; a smaller precision.initial_loss_scale skips fewer",
                r->step - r->updates, r->step, LOOM_CLI_MOST_SKIPPED);
    }
    return LOOM_OK;
}

static loom_status run_rank(loom_rank *rank, void *argument) {
    run r = {.given = argument, .rank = rank};
    loom_status status = set_up(&r);
    if (!status)
        status = run_steps(&r);
    if (!status && loom_rank_index(rank) == 0)
        r.given->out->steps = r.step - 1;
    loom_comm_free(loom_rank_world(rank), r.activations);
    free(r.seen);
    loom_batches_destroy(r.batches);
    loom_batches_destroy(r.valid);
    loom_parallel_destroy(r.parallel);
    loom_cli_train_data_close(&r.data);
    loom_fabric_destroy(r.fabric);
    return status;
}

/* The same training on one rank. */
static loom_run_config plain_of(const loom_run_config *config) {
    loom_megatron_strategy_config none = loom_megatron_strategy_config_default();
    loom_run_config plain = *config;
    const loom_megatron_strategy_config *s = &config->strategy;
    int64_t copies =
        config->ranks / (s->tensor_model_parallel_size * s->pipeline_model_parallel_size * s->context_parallel_size);
    none.timeout = s->timeout;
    plain.strategy = none;
    plain.ranks = 1;
    if (plain.data.global_batch_size == 0 && strcmp(plain.data.kind, "fixed") != 0)
        plain.data.global_batch_size = plain.data.micro_batch_size * copies;
    loom_model_parallel_config *cut = &plain.model.config.parallel;
    const loom_model_config fresh = loom_model_config_default(plain.model.config.architecture);
    bool variable = cut->variable_seq_lengths;
    *cut = fresh.parallel;
    cut->variable_seq_lengths = variable;
    return plain;
}

static void say(const loom_cli_layout_check *check, const loom_run_config *config, uint64_t perturbation) {
    char line[128];
    if (!check->say)
        return;
    snprintf(line, sizeof line, "%" PRId64 " step%s on %" PRId64 " rank%s%s", check->steps,
        check->steps == 1 ? "" : "s", config->ranks, config->ranks == 1 ? "" : "s",
        perturbation ? ", from weights that differ in their last bit" : "");
    check->say(check->context, line);
}

static loom_run_options options_of(const loom_cli_layout_check *check) {
    loom_run_options options = loom_run_options_default();
    options.threads = (int)check->config->threads;
    options.timeout = check->config->strategy.timeout;
    return options;
}

static loom_status run_plain(const loom_cli_layout_check *check, record *plain, record controls[CONTROLS]) {
    loom_run_config one = plain_of(check->config);
    loom_run_options options = options_of(check);
    options.beside_mpi = true;
    for (uint64_t k = 0; k <= CONTROLS; k++) {
        job given = {check, &one, k, k ? plain->steps : 0, k ? &controls[k - 1] : plain};
        say(check, &one, k);
        loom_status status = loom_run_local(1, run_rank, &given, &options);
        if (status)
            return loom_fail_context(status, "the run on one rank: ");
    }
    return LOOM_OK;
}

/* ---- the verdict ---- */

static double floor_of(const loom_run_config *config) {
    const char *precision = config->precision.precision;
    if (strncmp(precision, "bf16", 4) == 0)
        return NARROW_FLOOR * ldexp(1, -8);
    return strncmp(precision, "16", 2) == 0 ? NARROW_FLOOR * ldexp(1, -11) : FLOOR * ldexp(1, -24);
}

static bool is_finite(const double sketch[BUCKETS]) {
    for (int i = 0; i < BUCKETS; i++)
        if (!isfinite(sketch[i]))
            return false;
    return true;
}

/* Of two runs that overflow both nobody can say more; of one that does alone the distance has no bound. */
static double apart_of(const quantity *a, const quantity *b) {
    bool finite = is_finite(a->sketch);
    if (finite != is_finite(b->sketch))
        return INFINITY;
    return finite ? distance(a->sketch, b->sketch) : 0;
}

/* The order in which a step computes: gradients come from the last layer to the first. */
static bool comes_before(const record *of, int64_t a, int64_t b) {
    const quantity *x = &of->list[a], *y = &of->list[b];
    if (x->step != y->step)
        return x->step < y->step;
    if (x->of != y->of)
        return x->of < y->of;
    return x->of == GRADIENT ? a > b : a < b;
}

/* The noise of a quantity is the most that any step so far has shown: by chance a single number may have none.
 * most: [quantities of a step]. */
static double noise_at(const record *plain, const record *controls, int64_t i, double *most) {
    for (int k = 0; k < CONTROLS; k++)
        *most = fmax(*most, apart_of(&plain->list[i], &controls[k].list[i]));
    return *most;
}

static void judge(const loom_cli_layout_check *check, const record *plain, const record *controls, const record *layout,
    double *noise, loom_cli_layout_finding *finding) {
    static const double nothing[BUCKETS];
    double least = floor_of(check->config), nearest = -1;
    int64_t shown = -1, a_step = plain->count / plain->steps;
    *finding = (loom_cli_layout_finding){.compared = plain->count, .skipped = plain->steps - check->steps};
    for (int64_t i = 0; i < plain->count; i++) {
        bool finite = is_finite(plain->list[i].sketch);
        double size = finite ? distance(plain->list[i].sketch, nothing) : 0;
        double apart = apart_of(&plain->list[i], &layout->list[i]);
        double allowed = fmax(FACTOR * noise_at(plain, controls, i, &noise[i % a_step]), least * size);
        bool beyond = apart > allowed;
        double share = apart > 0 && isfinite(apart) ? apart / allowed : 0;
        bool better =
            beyond ? finding->beyond == 0 || comes_before(plain, i, shown) : finding->beyond == 0 && share > nearest;
        finding->beyond += beyond;
        finding->overflowed += !finite;
        if (!better)
            continue;
        shown = i;
        nearest = share;
        finding->step = plain->list[i].step;
        finding->apart = size > 0 ? apart / size : apart;
        finding->allowed = size > 0 ? allowed / size : allowed;
        snprintf(finding->what, sizeof finding->what, "%s%s", kind_text[plain->list[i].of], plain->list[i].name);
    }
}

static loom_status compare(const loom_cli_layout_check *check, const record *plain, const record *controls,
    const record *layout, loom_cli_layout_finding *finding) {
    bool same = layout->count == plain->count;
    for (int64_t i = 0; i < plain->count && same; i++)
        same = strcmp(plain->list[i].name, layout->list[i].name) == 0;
    if (!same)
        return loom_fail(LOOM_ERR_INTERNAL, "the layout has other tensors than one rank");
    double *noise = calloc((size_t)plain->count, sizeof *noise);
    if (!noise)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the noise of %" PRId64 " quantities", plain->count);
    judge(check, plain, controls, layout, noise, finding);
    free(noise);
    return LOOM_OK;
}

/* ---- all runs ---- */

typedef struct whole {
    const loom_cli_layout_check *check;
    record plain, controls[CONTROLS], layout;
    loom_cli_layout_finding *finding;
} whole;

/* Under a launcher: the plain runs are a matter of the first process, while the others wait for it. */
static loom_status run_under_mpi(loom_rank *rank, void *argument) {
    whole *w = argument;
    loom_comm *world = loom_rank_world(rank);
    loom_status status = LOOM_OK;
    int64_t total = 0;
    LOOM_TRY(loom_cli_check_same(rank, w->check->config));
    if (loom_rank_index(rank) == 0) {
        loom_rank_note(rank, "training on one rank");
        status = run_plain(w->check, &w->plain, w->controls);
        loom_rank_note(rank, NULL);
    }
    LOOM_TRY(loom_agree(world, status));
    LOOM_TRY(loom_all_reduce(world, &w->plain.steps, &total, 1, LOOM_I64, LOOM_MAX));
    job given = {w->check, w->check->config, 0, total, &w->layout};
    if (loom_rank_index(rank) == 0)
        say(w->check, w->check->config, 0);
    LOOM_TRY(run_rank(rank, &given));
    if (loom_rank_index(rank) == 0)
        status = compare(w->check, &w->plain, w->controls, &w->layout, w->finding);
    LOOM_TRY(loom_agree(world, status));
    return loom_broadcast(world, w->finding, sizeof *w->finding, LOOM_U8, 0);
}

static loom_status run_all(whole *w) {
    const loom_cli_layout_check *check = w->check;
    loom_run_options options = options_of(check);
    options.kernels = check->kernels;
    if (loom_mpi_launched(NULL)) {
        options.log = check->log;
        return loom_run_mpi(run_under_mpi, w, &options);
    }
    LOOM_TRY(run_plain(check, &w->plain, w->controls));
    job given = {check, check->config, 0, w->plain.steps, &w->layout};
    say(check, check->config, 0);
    LOOM_TRY(loom_run_local((int)check->config->ranks, run_rank, &given, &options));
    return compare(check, &w->plain, w->controls, &w->layout, w->finding);
}

loom_status loom_cli_check_layout_run(const loom_cli_layout_check *check, loom_cli_layout_finding *finding) {
    whole w = {.check = check, .finding = finding};
    loom_status status = run_all(&w);
    free(w.plain.list);
    free(w.layout.list);
    for (int k = 0; k < CONTROLS; k++)
        free(w.controls[k].list);
    return status;
}
