/* What happens in a step: events, data, losses, modes; and how a step that goes wrong ends. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include "parallel/toy_module.h"
#include <math.h>

static loom_megatron_strategy_config defaults(int tp) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.tensor_model_parallel_size = tp;
    return config;
}

/* ---- callbacks ---- */

typedef struct event_log {
    char text[256]; /* a letter for each event: A for the first … H for the eighth */
    char mark;      /* before each letter, 0 for none */
    loom_step seen[LOOM_EVENT_COUNT];
} event_log;

#define EVENT_FUNCTION(name, text)                                                                                     \
    static loom_status log_##name(void *context, loom_step *step) {                                                    \
        return log_event(context, LOOM_EVENT_##name, step);                                                            \
    }

static loom_status log_event(void *context, loom_event event, loom_step *step) {
    event_log *log = context;
    size_t used = strlen(log->text);
    if (used + 3 < sizeof log->text)
        snprintf(log->text + used, 3, "%.1s%c", log->mark ? &log->mark : "", 'A' + (int)event);
    log->seen[event] = *step;
    return LOOM_OK;
}

LOOM_EVENT_LIST(EVENT_FUNCTION)

static loom_callback logging(event_log *log) {
    return (loom_callback){log, {
#define EVENT_ENTRY(name, text) [LOOM_EVENT_##name] = log_##name,
                                    LOOM_EVENT_LIST(EVENT_ENTRY)
#undef EVENT_ENTRY
                                }};
}

static loom_status watch(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    event_log first = {.mark = '1'}, second = {.mark = '2'};
    loom_callback one = logging(&first), two = logging(&second);
    loom_callbacks *given, *more;
    small_run run;
    double loss;
    (void)argument;
    LOOM_TRY(loom_callbacks_create(&given));
    LOOM_TRY(loom_callbacks_create(&more));
    LOOM_TRY(loom_callbacks_add(given, &one));
    LOOM_TRY(loom_callbacks_add(given, &one)); /* which changes nothing */
    LOOM_TRY(loom_callbacks_add(more, &two));
    LOOM_TRY(loom_callbacks_merge(given, more));
    LOOM_TRY(loom_callbacks_merge(given, more));
    CHECK(loom_callbacks_count(given) == 2, "%lld callbacks of two", (long long)loom_callbacks_count(given));
    config.megatron_callbacks = given;
    LOOM_TRY(small_start(rank, &config, &run));
    CHECK(loom_callbacks_count(loom_fabric_callbacks(run.fabric)) >= 2, "the strategy did not take the callbacks");
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 64, 2, 8)); /* 2 data-parallel ranks: 2 microbatches */
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    CHECK(strcmp(first.text, "1A1B1C1D1C1D1E1F1G1H") == 0, "the events came as %s", first.text);
    CHECK(strcmp(second.text, "2A2B2C2D2C2D2E2F2G2H") == 0, "the events came as %s", second.text);
    const loom_step *seen = first.seen;
    const loom_step *sized = &seen[LOOM_EVENT_MICROBATCHES_START];
    CHECK(sized->micro_batch_size == 2 && sized->seq_length == SMALL_SEQUENCE && sized->num_microbatches == 2 &&
              sized->global_batch_size == 8,
        "the sizes were not final when the microbatches started");
    CHECK(seen[LOOM_EVENT_MICROBATCH_START].batch && seen[LOOM_EVENT_MICROBATCH_END].microbatch == 1,
        "a microbatch event without its microbatch");
    CHECK(seen[LOOM_EVENT_MICROBATCHES_END].tokens == 2 * 2 * SMALL_SEQUENCE, "this rank's tokens are %g",
        seen[LOOM_EVENT_MICROBATCHES_END].tokens);
    CHECK(seen[LOOM_EVENT_REDUCE_MICROBATCHES_END].tokens == 8 * SMALL_SEQUENCE, "the group's tokens are %g",
        seen[LOOM_EVENT_REDUCE_MICROBATCHES_END].tokens);
    CHECK(seen[LOOM_EVENT_STEP_END].loss == loss && seen[LOOM_EVENT_STEP_END].consumed_samples == 8,
        "the step ended with loss %g and %lld samples", seen[LOOM_EVENT_STEP_END].loss,
        (long long)seen[LOOM_EVENT_STEP_END].consumed_samples);
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    CHECK(seen[LOOM_EVENT_STEP_END].number == 1 && seen[LOOM_EVENT_STEP_END].consumed_samples == 16,
        "the second step is number %lld", (long long)seen[LOOM_EVENT_STEP_END].number);
    small_destroy(&run);
    loom_callbacks_destroy(given);
    loom_callbacks_destroy(more);
    return LOOM_OK;
}

static void the_eight_events_come_in_order_to_all_merged_callbacks(void **state) {
    (void)state;
    must_run(4, watch, NULL);
}

static void every_event_has_its_name(void **state) {
    (void)state;
    assert_string_equal(loom_event_name(LOOM_EVENT_STEP_START), "on_megatron_step_start");
    assert_string_equal(loom_event_name(LOOM_EVENT_STEP_END), "on_megatron_step_end");
    assert_string_equal(loom_event_name(LOOM_EVENT_COUNT), "?");
}

/* Gives the step other data, one microbatch and a wish to stop. */
static loom_status replace_step(void *context, loom_step *step) {
    if (step->mode == LOOM_TRAINING)
        *step = (loom_step){.mode = step->mode,
            .number = step->number,
            .batches = context,
            .micro_batch_size = 1,
            .seq_length = SMALL_SEQUENCE,
            .num_microbatches = 1,
            .stop = true};
    return LOOM_OK;
}

static loom_status replace(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    small_run run, other = {0};
    loom_step_result result;
    (void)argument;
    LOOM_TRY(small_start(rank, &config, &run));
    other.fabric = run.fabric;
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 64, 2, 8));
    LOOM_TRY(small_data(&other, LOOM_TRAINING, 64, 1, 0));
    loom_callback callback = {other.batches, {[LOOM_EVENT_STEP_START] = replace_step}};
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
    CHECK(result.stop && result.microbatches == 1 && result.tokens == SMALL_SEQUENCE,
        "%lld microbatches with %g tokens", (long long)result.microbatches, result.tokens);
    CHECK(loom_batches_get_state(run.batches).fetched == 0 && loom_batches_get_state(other.batches).fetched == 1,
        "the replaced step read from the old data");
    loom_batches_destroy(other.batches);
    loom_dataset_destroy(&other.dataset);
    small_destroy(&run);
    return LOOM_OK;
}

static void a_callback_may_replace_the_step(void **state) {
    (void)state;
    must_run(1, replace, NULL);
}

static loom_status fail_on_rank_1(void *context, loom_step *step) {
    (void)step;
    return loom_rank_index(context) == 1 ? loom_fail(LOOM_ERR_STATE, "I have had enough") : LOOM_OK;
}

static loom_status protest(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    loom_callback callback = {rank, {[LOOM_EVENT_MICROBATCH_START] = fail_on_rank_1}};
    small_run run;
    double loss;
    (void)argument;
    loom_status status = small_start(rank, &config, &run);
    if (!status)
        status = loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback);
    if (!status)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void an_error_in_a_callback_ends_the_step_on_all_ranks(void **state) {
    loom_run_options options = test_options();
    (void)state;
    assert_int_equal(loom_run_local(2, protest, NULL, &options), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "rank 1: on_megatron_microbatch_start: I have had enough"));
}

/* ---- a module and a loss of one's own ---- */

typedef struct plain_sum {
    int reductions;
} plain_sum;

/* The sum over all tokens, masked or not, in halves. */
static loom_status sum_forward(void *context, const loom_batch *batch, const loom_tensor *losses, float seed,
    double *sum, double *weight, loom_tensor *d_losses) {
    (void)context;
    (void)batch;
    for (int64_t i = 0; i < loom_tensor_count(losses); i++) {
        *sum += 0.5 * (double)loom_tensor_f32(losses)[i];
        *weight += 0.5;
        if (d_losses)
            loom_tensor_f32(d_losses)[i] = 0.5f * seed;
    }
    return LOOM_OK;
}

static loom_status sum_reduce(void *context, loom_comm *group, double *sum, double *weight, double *loss) {
    ((plain_sum *)context)->reductions++;
    LOOM_TRY(loom_all_reduce(group, sum, sum, 1, LOOM_F64, LOOM_SUM));
    LOOM_TRY(loom_all_reduce(group, weight, weight, 1, LOOM_F64, LOOM_SUM));
    *loss = *sum / *weight;
    return LOOM_OK;
}

static const int four_rows[4][TOY_SEQUENCE] = {{1, 2, 3}, {4, -1, -1}, {1, 1, 1}, {2, 2, 2}};

/* All labels: 6, 4 + 7 + 7 (masked ones read 7), 3, 6: their mean is 33/12; half of the weights cancels. */
static loom_status own_loss(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    toy own = {.parameters = 1, .uses = 1, .initial = 2};
    plain_sum calls = {0};
    loom_loss_reduction reduction = {&calls, sum_forward, sum_reduce};
    toy_rows rows = {four_rows};
    loom_dataset dataset = toy_dataset(&rows, 4);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 1, .global_batch_size = 4};
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer_outcome outcome;
    loom_step_result result;
    small_run run = {0};
    (void)argument;
    optim.lr = 0.1;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, toy_module(&own), &run.parallel));
    loom_parallel_set_loss_reduction(run.parallel, &reduction);
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    CHECK(loom_parallel_model_config(run.parallel) == NULL, "a toy has a model configuration");
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
    CHECK(fabs(result.loss - 2 * 33.0 / 12) < 1e-6 && result.tokens == 6 && calls.reductions == 1,
        "loss %g of weight %g after %d reductions", result.loss, result.tokens, calls.reductions);
    LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
    CHECK(fabs(outcome.grad_norm - 33.0 / 12) < 1e-6, "norm %g", outcome.grad_norm);
    /* The first step of Adam moves by the rate against the gradient's sign. */
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(run.parallel, &parameters, &count));
    CHECK(count == 1 && fabsf(parameters[0]->data[0] - 1.9f) < 1e-4f, "the parameter is %g",
        (double)parameters[0]->data[0]);
    small_destroy(&run);
    CHECK(own.freed == 1, "the module was destroyed %d times", own.freed);
    return LOOM_OK;
}

static void a_module_and_a_loss_of_ones_own_train(void **state) {
    (void)state;
    must_run(1, own_loss, NULL);
}

/* ---- losses of 16 bits ---- */

static loom_status narrow_forward(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output) {
    loom_tensor *wide = NULL;
    LOOM_TRY(toy_forward(context, tape, forward, &wide));
    loom_status status = loom_cast(tape, wide, LOOM_BF16, output);
    loom_tensor_release(wide);
    return status;
}

/* Of the same rows: the masked mean is 2 (6 + 4 + 3 + 6) / 10, which bf16 holds exactly; each gradient of a loss is
 * rounded to it. */
static loom_status narrow_losses(loom_rank *rank, void *argument) {
    static const loom_precision_plugin unconverted = {.name = "bf16 by itself", .params_dtype = LOOM_BF16};
    const bool *converts = argument;
    loom_megatron_strategy_config config = defaults(1);
    loom_precision_config precision = loom_precision_config_default();
    toy own = {.parameters = 1, .uses = 1, .initial = 2};
    toy_rows rows = {four_rows};
    loom_dataset dataset = toy_dataset(&rows, 4);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 1, .global_batch_size = 4};
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer_outcome outcome;
    loom_module *module = toy_module(&own);
    small_run run = {0};
    double loss;
    optim.lr = 0.1;
    precision.precision = "bf16-mixed";
    if (!*converts)
        config.precision = &unconverted;
    module->forward = narrow_forward;
    LOOM_TRY(loom_fabric_create(rank, &config, *converts ? &precision : NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, module, &run.parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    if (*converts) {
        CHECK(!status && fabs(loss - 3.8) < 1e-9, "loss %g: %s", loss, loom_error_message());
        LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
        CHECK(fabs(outcome.grad_norm - 1.9) < 1.9 / 256, "norm %g", outcome.grad_norm);
        CHECK(own.parameter[0].dtype == LOOM_BF16 && toy_value(&own.parameter[0]) == 1.8984375f,
            "the parameter is %g, expected 1.9 in bf16", (double)toy_value(&own.parameter[0]));
    } else {
        CHECK(status == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), "are kept in BF16, expected F32"), "%s",
            loom_error_message());
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void losses_of_16_bits_are_widened_where_the_model_ends(void **state) {
    (void)state;
    bool converts = true;
    must_run(1, narrow_losses, &converts);
    converts = false;
    must_run(1, narrow_losses, &converts);
    must_run(2, own_loss, NULL);
    must_run(4, own_loss, NULL);
}

static loom_status failing_module(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    toy own = {.parameters = 1, .uses = 1, .failure = LOOM_ERR_IO};
    toy_rows rows = {four_rows};
    loom_dataset dataset = toy_dataset(&rows, 4);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 1};
    small_run run = {0};
    double loss;
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, toy_module(&own), &run.parallel));
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    CHECK(loom_parallel_training_step(run.parallel, run.batches, &loss) == LOOM_ERR_IO, "the error was lost");
    CHECK(loom_parallel_predict_step(run.parallel, run.batches, (loom_logits_function)(void (*)(void))failing_module,
              NULL) == LOOM_ERR_ARGUMENT,
        "logits of a module without a vocabulary");
    CHECK(loom_gpt_visit(run.parallel, false, NULL, NULL) == LOOM_ERR_ARGUMENT, "a toy was visited as a GPT");
    own.failure = LOOM_OK;
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    small_destroy(&run);
    CHECK(loom_rank_memory(rank).in_use == 0, "memory is still in use");
    return LOOM_OK;
}

static void a_module_that_fails_ends_the_step_and_leaves_nothing_behind(void **state) {
    (void)state;
    must_run(1, failing_module, NULL);
}

/* ---- modes ---- */

typedef struct logits_seen {
    float *values;
    int64_t count, calls;
} logits_seen;

static loom_status see_logits(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    logits_seen *seen = context;
    int64_t count = batch->b * batch->s * vocabulary;
    float *copy = realloc(seen->values, (size_t)count * sizeof *copy);
    CHECK(copy, "out of memory");
    memcpy(copy, logits, (size_t)count * sizeof *copy);
    seen->values = copy;
    seen->count = count;
    seen->calls++;
    return LOOM_OK;
}

/* Mean loss of the batch by its logits. */
static double loss_by_logits(const logits_seen *seen, const loom_batch *batch) {
    double sum = 0;
    for (int64_t i = 0; i < batch->b * batch->s; i++) {
        const float *row = seen->values + i * SMALL_VOCABULARY;
        double total = 0;
        for (int c = 0; c < SMALL_VOCABULARY; c++)
            total += exp((double)row[c]);
        sum += log(total) - (double)row[batch->labels[i]];
    }
    return sum / (double)(batch->b * batch->s);
}

static loom_status evaluate(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(loom_rank_count(rank));
    float **reference = argument; /* of the run on one rank */
    logits_seen seen = {0}, again = {0};
    small_run run;
    double validation, test;
    config.sequence_parallel = loom_rank_count(rank) > 1;
    LOOM_TRY(small_start(rank, &config, &run));
    LOOM_TRY(small_data(&run, LOOM_VALIDATION, 4, 4, 4));
    LOOM_TRY(loom_parallel_validation_step(run.parallel, run.batches, &validation));
    LOOM_TRY(loom_batches_reset(run.batches));
    LOOM_TRY(loom_parallel_test_step(run.parallel, run.batches, &test));
    CHECK(memcmp(&validation, &test, sizeof test) == 0, "validation gives %.9g, test %.9g", validation, test);
    LOOM_TRY(loom_batches_reset(run.batches));
    LOOM_TRY(loom_parallel_predict_step(run.parallel, run.batches, see_logits, &seen));
    CHECK(seen.calls == 1 && seen.count == 4 * SMALL_SEQUENCE * SMALL_VOCABULARY, "%lld calls, %lld logits",
        (long long)seen.calls, (long long)seen.count);
    double by_logits = loss_by_logits(&seen, loom_batches_get_state(run.batches).last);
    CHECK(fabs(by_logits - validation) < 1e-5, "the logits' loss is %.9g, the step's %.9g", by_logits, validation);
    /* Each rank has the whole: they agree to the bit. */
    float *sum = malloc((size_t)seen.count * sizeof *sum);
    CHECK(sum, "out of memory");
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), seen.values, sum, seen.count, LOOM_F32, LOOM_MAX));
    CHECK(memcmp(sum, seen.values, (size_t)seen.count * sizeof *sum) == 0, "the ranks see different logits");
    free(sum);
    if (*reference)
        for (int64_t i = 0; i < seen.count; i++)
            CHECK(fabsf((*reference)[i] - seen.values[i]) < 2e-5f, "logit %lld is %g, on one rank %g", (long long)i,
                (double)seen.values[i], (double)(*reference)[i]);
    /* Looking changes nothing. */
    LOOM_TRY(loom_batches_reset(run.batches));
    LOOM_TRY(loom_parallel_predict_step(run.parallel, run.batches, see_logits, &again));
    CHECK(memcmp(seen.values, again.values, (size_t)seen.count * sizeof *seen.values) == 0, "the weights have moved");
    small_destroy(&run);
    CHECK(loom_rank_memory(rank).in_use == 0, "%zu bytes are still in use", loom_rank_memory(rank).in_use);
    free(again.values);
    if (loom_rank_count(rank) == 1)
        *reference = seen.values;
    else
        free(seen.values);
    return LOOM_OK;
}

static void evaluations_agree_with_the_logits_of_every_rank(void **state) {
    float *reference = NULL;
    (void)state;
    must_run(1, evaluate, &reference);
    must_run(2, evaluate, &reference);
    must_run(4, evaluate, &reference);
    free(reference);
}

/* Three rows in batches of four: one batch, a pad row of weight zero, the mean over three. */
static loom_status evaluate_three(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    toy own = {.parameters = 1, .uses = 1, .initial = 1};
    toy_rows rows = {four_rows};
    loom_dataset dataset = toy_dataset(&rows, 3);
    int64_t ranks = loom_rank_count(rank);
    loom_dataloader loader = {
        .dataset = &dataset, .mode = LOOM_TEST, .micro_batch_size = 4 / ranks, .global_batch_size = 4};
    loom_step_result result;
    small_run run = {0};
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, toy_module(&own), &run.parallel));
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TEST, run.batches, NULL, NULL, NULL, &result));
    CHECK(
        result.tokens == 7 && fabs(result.loss - 13.0 / 7) < 1e-6, "loss %g of %g tokens", result.loss, result.tokens);
    CHECK(loom_parallel_step(run.parallel, LOOM_TEST, run.batches, NULL, NULL, NULL, &result) == LOOM_END,
        "a second batch");
    small_destroy(&run);
    return LOOM_OK;
}

static void padded_rows_of_an_evaluation_weigh_nothing(void **state) {
    (void)state;
    must_run(1, evaluate_three, NULL);
    must_run(2, evaluate_three, NULL);
}

/* ---- data ---- */

static loom_status iterate(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    small_run run = {0};
    const loom_batch *batch = NULL;
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 6, 2, 0));
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < 3; i++) {
            loom_batches_state state = loom_batches_get_state(run.batches);
            CHECK(state.fetched == i && state.length == 3 && !state.done && state.batch_index == i - 1,
                "before batch %lld: %lld of %lld fetched, last %lld", (long long)i, (long long)state.fetched,
                (long long)state.length, (long long)state.batch_index);
            LOOM_TRY(loom_batches_next(run.batches, &batch));
            CHECK(batch->b == 2 && batch->index[0] == 2 * i && batch == loom_batches_get_state(run.batches).last,
                "batch %lld begins with sample %lld", (long long)i, (long long)batch->index[0]);
        }
        CHECK(loom_batches_get_state(run.batches).done, "not done after all batches");
        CHECK(loom_batches_next(run.batches, &batch) == LOOM_END, "a batch behind the end");
        LOOM_TRY(loom_batches_reset(run.batches));
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void batches_count_end_and_begin_again(void **state) {
    (void)state;
    must_run(1, iterate, NULL);
}

/* Of 3 and of 1 microbatches: taken in turn until the longer one ends, the shorter begins again. */
static loom_status cycle(loom_rank *rank, void *argument) {
    static const int64_t expected[6] = {0, 100, 2, 100, 4, 100};
    static const int offset[2][TOY_SEQUENCE] = {{5, 5, 5}, {6, 6, 6}};
    loom_megatron_strategy_config config = defaults(1);
    toy_rows rows = {offset};
    loom_dataset shorter = toy_dataset(&rows, 2), longer = {0};
    small_run run = {0};
    const loom_batch *batch;
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_mock_dataset_create(TOY_SEQUENCE, SMALL_VOCABULARY, 3, 6, &longer));
    loom_dataloader loaders[2] = {
        {.dataset = &longer, .micro_batch_size = 2}, {.dataset = &shorter, .micro_batch_size = 2}};
    LOOM_TRY(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &run.batches));
    CHECK(loom_batches_get_state(run.batches).length == 6, "length %lld, expected 6",
        (long long)loom_batches_get_state(run.batches).length);
    for (int i = 0; i < 6; i++) {
        LOOM_TRY(loom_batches_next(run.batches, &batch));
        int64_t found = batch->index[0] + (batch->labels[0] == 5 ? 100 : 0);
        loom_batches_state state = loom_batches_get_state(run.batches);
        CHECK(state.loader_index == i % 2 && state.batch_index == i / 2, "batch %d is %lld of loader %lld", i,
            (long long)state.batch_index, (long long)state.loader_index);
        CHECK((i % 2 == 0 && batch->index[0] == expected[i]) || found == expected[i],
            "batch %d begins with sample %lld", i, (long long)found);
    }
    CHECK(loom_batches_next(run.batches, &batch) == LOOM_END, "more than the longest");
    CHECK(loom_fabric_setup_dataloaders(run.fabric, loaders, 0, &run.batches) == LOOM_ERR_ARGUMENT, "no loader");
    small_destroy(&run);
    loom_dataset_destroy(&longer);
    return LOOM_OK;
}

static void several_loaders_take_turns_until_the_longest_ends(void **state) {
    (void)state;
    must_run(1, cycle, NULL);
}

/* A source of one's own: `left` microbatches of one row. */
typedef struct short_source {
    int left;
    bool destroyed;
} short_source;

static loom_status short_next(void *context, loom_batch *batch) {
    short_source *source = context;
    if (source->left == 0)
        return LOOM_END;
    source->left--;
    batch->b = 1;
    for (int64_t t = 0; t < batch->s; t++) {
        batch->tokens[t] = batch->labels[t] = t;
        batch->position_ids[t] = t;
        batch->loss_mask[t] = 1;
    }
    return LOOM_OK;
}

static int64_t short_remaining(void *context) {
    return ((short_source *)context)->left;
}

static void short_destroy(void *context) {
    ((short_source *)context)->destroyed = true;
}

static loom_status run_dry(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    short_source source = {.left = 7};
    loom_data_loader loader = {.context = &source,
        .micro_batch_size = 1,
        .sequence_length = SMALL_SEQUENCE,
        .next = short_next,
        .destroy = short_destroy};
    loom_step_sizes sizes = {.num_microbatches = 4};
    loom_step_result result;
    small_run run;
    (void)argument;
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    run.batches = NULL;
    LOOM_TRY(loom_fabric_setup_loader(run.fabric, &loader, &run.batches));
    CHECK(loom_batches_get_state(run.batches).length == -1, "a source of unknown length has one");
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, &sizes, NULL, NULL, &result));
    CHECK(result.microbatches == 4 && result.tokens == 4 * SMALL_SEQUENCE, "%g tokens", result.tokens);
    loom_status status = loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, &sizes, NULL, NULL, &result);
    CHECK(status == LOOM_ERR_STATE && strstr(loom_error_message(), "after 3 of the step's 4 microbatches"),
        "found %s: %s", loom_status_name(status), loom_error_message());
    status = loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, &sizes, NULL, NULL, &result);
    CHECK(status == LOOM_END, "after the end: %s", loom_status_name(status));
    CHECK(loom_batches_reset(run.batches) == LOOM_ERR_UNSUPPORTED, "a source without seek began again");
    /* Sizes: unknown ones are inferred, impossible ones are named. */
    loom_step_sizes wrong = {.num_microbatches = -1};
    status = loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, &wrong, NULL, NULL, &result);
    CHECK(status == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), "num_microbatches"), "found %s: %s",
        loom_status_name(status), loom_error_message());
    small_destroy(&run);
    CHECK(source.destroyed, "the source was not destroyed");
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    run.batches = NULL;
    loader.remaining = short_remaining; /* it knows that nothing is left */
    LOOM_TRY(loom_fabric_setup_loader(run.fabric, &loader, &run.batches));
    loom_batches_state empty = loom_batches_get_state(run.batches);
    CHECK(empty.done && empty.length == 0, "no batch at all, and not done");
    loader.micro_batch_size = 0;
    source.destroyed = false;
    loom_batches *batches = NULL;
    CHECK(loom_fabric_setup_loader(run.fabric, &loader, &batches) == LOOM_ERR_ARGUMENT && !batches,
        "a source of batches without rows");
    CHECK(!source.destroyed, "a source that was not taken was destroyed");
    small_destroy(&run);
    return LOOM_OK;
}

static void data_that_end_inside_a_step_are_an_error_with_both_counts(void **state) {
    (void)state;
    must_run(1, run_dry, NULL);
}

/* ---- a NaN ---- */

static loom_status poison(loom_rank *rank, void *argument) {
    const char *what = argument; /* the parameter */
    loom_megatron_strategy_config config = defaults(2);
    loom_optimizer_outcome outcome;
    small_run run;
    double loss;
    loom_status status = small_start(rank, &config, &run);
    if (!status)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    if (!status)
        status = loom_optimizer_step(run.optimizer, &outcome);
    loom_parameter *const *parameters = NULL;
    int64_t count = 0;
    if (!status)
        status = loom_parallel_parameters(run.parallel, &parameters, &count);
    for (int64_t i = 0; !status && i < count; i++)
        if (strcmp(parameters[i]->name, what) == 0)
            parameters[i]->data[0] = NAN;
    if (!status)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void a_nan_is_an_error_that_names_step_layer_and_operation(void **state) {
    static const struct {
        const char *parameter, *layer, *operation;
    } cases[] = {
        {"decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1", "row-parallel linear"},
        {"decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0", "column-parallel linear"},
        {"decoder.final_layernorm.weight", "output_layer", "norm"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom_run_options options = test_options();
        loom_status status = loom_run_local(2, poison, (void *)(uintptr_t)cases[i].parameter, &options);
        const char *message = loom_error_message();
        assert_int_equal(status, LOOM_ERR_NUMERIC);
        if (!strstr(message, "step 2, microbatch 0") || !strstr(message, cases[i].layer) ||
            !strstr(message, cases[i].operation))
            fail_msg("%s: %s", cases[i].parameter, message);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_eight_events_come_in_order_to_all_merged_callbacks),
        cmocka_unit_test(every_event_has_its_name),
        cmocka_unit_test(a_callback_may_replace_the_step),
        cmocka_unit_test(an_error_in_a_callback_ends_the_step_on_all_ranks),
        cmocka_unit_test(a_module_and_a_loss_of_ones_own_train),
        cmocka_unit_test(losses_of_16_bits_are_widened_where_the_model_ends),
        cmocka_unit_test(a_module_that_fails_ends_the_step_and_leaves_nothing_behind),
        cmocka_unit_test(evaluations_agree_with_the_logits_of_every_rank),
        cmocka_unit_test(padded_rows_of_an_evaluation_weigh_nothing),
        cmocka_unit_test(batches_count_end_and_begin_again),
        cmocka_unit_test(several_loaders_take_turns_until_the_longest_ends),
        cmocka_unit_test(data_that_end_inside_a_step_are_an_error_with_both_counts),
        cmocka_unit_test(a_nan_is_an_error_that_names_step_layer_and_operation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
