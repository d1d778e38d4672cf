/* Mixed precision on whole models: 16-bit weights and activations follow fp32 on every layout, the optimizer's masters
 * decide, and an overflow of fp16 on one rank is skipped by all. */
#include "optim/optim.h"
#include "parallel/pipeline_support.h"
#include "strategy/strategy.h"
#include <pthread.h>

/* ---- beside fp32 ---- */

static const pipe_case layouts[] = {
    {.ranks = 1},
    {.ranks = 2, .tp = 2, .sp = true, .dropout = 0.1},
    {.ranks = 2, .pp = 2},
    {.ranks = 2, .pp = 2, .vpp = 2, .overlap = true},
    {.ranks = 2, .pp = 2, .untied = true, .schedule = "zero-bubble", .wire = "fp32"},
    {.ranks = 2, .sharded = true, .overlap = true, .gather = true},
    {.ranks = 2, .pytorch = true},
    {.ranks = 8, .tp = 2, .pp = 2, .sp = true, .sharded = true},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static void must_follow_fp32(const char *precision, double scale) {
    for (size_t i = 0; i < LAYOUTS; i++) {
        char name[PIPE_TEXT];
        pipe_case wide = layouts[i], narrow = layouts[i];
        narrow.precision = precision;
        narrow.scale = scale;
        pipe_result wanted = pipe_run(&wide), found = pipe_run(&narrow);
        assert_true(found.weights != wanted.weights);
        for (int t = 0; t < PIPE_STEPS; t++) {
            if (!(fabs(found.loss[t] - wanted.loss[t]) <= 2e-3 * wanted.loss[t]) || found.loss[t] == wanted.loss[t])
                fail_msg("%s: loss of step %d: found %.9g, wanted %.9g", pipe_name(&narrow, name), t, found.loss[t],
                    wanted.loss[t]);
            if (!(fabs(found.norm[t] - wanted.norm[t]) <= (t ? 5e-2 : 1e-2) * wanted.norm[t]))
                fail_msg("%s: norm of step %d: found %.9g, wanted %.9g", pipe_name(&narrow, name), t, found.norm[t],
                    wanted.norm[t]);
        }
    }
}

static void bf16_follows_fp32_on_every_layout(void **state) {
    (void)state;
    must_follow_fp32("bf16-mixed", 0);
}

static void fp16_follows_fp32_on_every_layout(void **state) {
    (void)state;
    must_follow_fp32("16-mixed", 1024);
}

static void every_spelling_of_a_precision_is_the_same(void **state) {
    static const char *const spellings[][2] = {{"bf16-mixed", "bf16"}, {"16-mixed", "16"}, {"16-mixed", "fp16"}};
    (void)state;
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        pipe_case a = {.ranks = 1, .precision = spellings[i][0]}, b = a;
        b.precision = spellings[i][1];
        pipe_result wanted = pipe_run(&a), found = pipe_run(&b);
        for (int t = 0; t < PIPE_STEPS; t++)
            assert_true(found.loss[t] == wanted.loss[t]);
        assert_true(found.weights == wanted.weights);
    }
}

static void sharded_masters_change_no_bit(void **state) {
    (void)state;
    for (int narrow_reduction = 0; narrow_reduction < 2; narrow_reduction++) {
        pipe_case plain = {.ranks = 4, .tp = 2, .sp = true, .precision = "bf16-mixed"};
        plain.narrow_reduction = narrow_reduction;
        pipe_result wanted = pipe_run(&plain);
        for (int variant = 0; variant < 4; variant++) {
            pipe_case c = plain;
            c.sharded = variant < 3;
            c.overlap = variant == 1 || variant == 2;
            c.gather = variant == 2;
            c.pytorch = variant == 3;
            pipe_result found = pipe_run(&c);
            pipe_must_be_equal(&c, &found, &wanted);
        }
    }
    pipe_case plain = {.ranks = 4, .precision = "bf16-mixed"}, shared = plain;
    shared.sharded = true;
    shared.instances = 2;
    pipe_result wanted = pipe_run(&plain), found = pipe_run(&shared);
    pipe_must_be_equal(&shared, &found, &wanted);
}

static void gradients_may_travel_in_the_dtype_of_the_weights(void **state) {
    static const char *const precisions[] = {"bf16-mixed", "16-mixed"};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        pipe_case wide = {.ranks = 2, .precision = precisions[i], .scale = i ? 1024 : 0}, narrow = wide;
        narrow.narrow_reduction = true;
        pipe_result wanted = pipe_run(&wide), found = pipe_run(&narrow);
        assert_true(found.norm[0] != wanted.norm[0]);
        assert_true(found.loss[0] == wanted.loss[0]);
        for (int t = 0; t < PIPE_STEPS; t++)
            assert_true(fabs(found.norm[t] - wanted.norm[t]) <= 5e-3 * wanted.norm[t]);
    }
}

static void messages_between_stages_may_have_either_dtype(void **state) {
    static const char *const wires[] = {"fp32", "bf16"};
    (void)state;
    pipe_case c = {.ranks = 2, .pp = 2, .precision = "bf16-mixed"};
    pipe_result wanted = pipe_run(&c);
    for (size_t i = 0; i < 2; i++) {
        c.wire = wires[i];
        pipe_result found = pipe_run(&c);
        pipe_must_be_equal(&c, &found, &wanted);
    }
    c.wire = "fp16";
    pipe_result found = pipe_run(&c);
    for (int t = 0; t < PIPE_STEPS; t++)
        assert_true(fabs(found.loss[t] - wanted.loss[t]) <= 2e-3 * wanted.loss[t]);
}

/* ---- masters ---- */

static loom_status look_at_masters(loom_rank *rank, void *argument) {
    const pipe_case *given = argument;
    pipe_case c = pipe_filled(given);
    small_run run;
    double loss;
    LOOM_TRY(pipe_start(rank, &c, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, c.global, c.micro, c.global));
    const loom__ddp_view *view = loom__ddp_view_of(run.parallel->ddp);
    CHECK(!view->data && view->data16 && view->master, "the buffers are not those of 16 bits");
    for (int after = 0; after < 2; after++) {
        int64_t between = 0, seen = 0;
        for (int64_t place = 0; place < view->place_count; place++) {
            const loom_parameter *parameter = view->parameters[place];
            const loom__ddp_part *part = &view->parts[place];
            CHECK(parameter->dtype == LOOM_BF16 && !parameter->data && parameter->data16 && parameter->grad,
                "%s is not kept in BF16", parameter->name);
            for (int64_t i = 0; i < part->count; i++) {
                float master = view->master[part->state + i];
                uint16_t weight = parameter->data16[part->start - view->places[place].start + i];
                CHECK(loom_f32_to_bf16(master) == weight, "%s[%lld] is not its master rounded", parameter->name,
                    (long long)i);
                between += loom_bf16_to_f32(weight) != master;
                seen++;
            }
        }
        bool rounded = given->params && !after;
        CHECK(seen == 0 || (rounded ? between == 0 : between > seen / 2),
            "%lld of %lld masters lie between bf16 numbers", (long long)between, (long long)seen);
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
        LOOM_TRY(loom_optimizer_step(run.optimizer, NULL));
        LOOM_TRY(loom__ddp_wait_parameters(run.parallel->ddp));
        LOOM_TRY(loom_batches_reset(run.batches));
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void weights_are_their_masters_rounded(void **state) {
    (void)state;
    pipe_case c = {.ranks = 2, .precision = "bf16-mixed"};
    must_run(2, look_at_masters, &c);
    c.sharded = true;
    must_run(2, look_at_masters, &c);
    c.params = "bf16";
    must_run(2, look_at_masters, &c);
}

static loom_status load_fives(loom_rank *rank, void *argument) {
    const bool *reload = argument;
    pipe_case c = {.ranks = 2, .precision = "bf16-mixed", .sharded = true}, filled = pipe_filled(&c);
    loom_megatron_strategy_config strategy = pipe_strategy(&filled);
    loom_precision_config precision = pipe_precision(&filled);
    loom_model_config model = pipe_model(&filled);
    loom_optimizer_config optim = loom_optimizer_config_default();
    small_run run = {0};
    loom_module *module;
    double loss;
    optim.lr = 1e-9;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_gpt_create(run.fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, module, &run.parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, filled.global, filled.micro, filled.global));
    loom_parameter *bias = run.parallel->parameters[run.parallel->parameter_count - 1];
    for (int64_t i = 0; i < loom_parameter_count(bias); i++)
        bias->data16[i] = loom_f32_to_bf16(5);
    if (*reload)
        loom_optimizer_reload_model_params(run.optimizer);
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    LOOM_TRY(loom_optimizer_step(run.optimizer, NULL));
    LOOM_TRY(loom__ddp_wait_parameters(run.parallel->ddp));
    for (int64_t i = 0; i < loom_parameter_count(bias); i++)
        CHECK((loom_bf16_to_f32(bias->data16[i]) == 5) == *reload, "%s[%lld] is %g", bias->name, (long long)i,
            loom_bf16_to_f32(bias->data16[i]));
    small_destroy(&run);
    return LOOM_OK;
}

static void masters_follow_values_that_are_loaded(void **state) {
    bool reload = true;
    (void)state;
    must_run(2, load_fives, &reload);
    reload = false;
    must_run(2, load_fives, &reload);
}

/* ---- bytes ---- */

typedef struct bytes {
    const char *precision;
    size_t activations, weights, state;
} bytes;

static loom_status weigh(loom_rank *rank, void *argument) {
    bytes *to = argument;
    pipe_case c = {.ranks = 1, .micro = 8, .precision = to->precision}, filled = pipe_filled(&c);
    small_run run;
    double loss;
    LOOM_TRY(pipe_start(rank, &filled, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, c.micro, c.micro, c.micro));
    size_t before = loom_rank_memory(rank).in_use;
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    const loom__ddp_view *view = loom__ddp_view_of(run.parallel->ddp);
    to->activations = loom_rank_memory(rank).high_water - before;
    to->weights = (size_t)view->elements * loom_dtype_size(view->dtype);
    to->state = loom_optimizer_state_bytes(run.optimizer) / (size_t)view->state_elements;
    small_destroy(&run);
    return LOOM_OK;
}

static void weights_and_activations_take_half_the_bytes(void **state) {
    bytes wide = {.precision = "32"}, narrow = {.precision = "bf16-mixed"};
    (void)state;
    must_run(1, weigh, &wide);
    must_run(1, weigh, &narrow);
    assert_int_equal(2 * narrow.weights, wide.weights);
    assert_int_equal(wide.state, 8);
    assert_int_equal(narrow.state, 12); /* the masters */
    if (narrow.activations * 100 > wide.activations * 60)
        fail_msg("activations take %zu bytes at most, in fp32 %zu", narrow.activations, wide.activations);
}

/* ---- overflow ---- */

typedef struct listener {
    pthread_mutex_t lock;
    int warnings;
    char first[1024], last[1024];
} listener;

static void hear(void *context, loom_log_level level, const char *message) {
    listener *to = context;
    if (level != LOOM_LOG_WARNING)
        return;
    pthread_mutex_lock(&to->lock);
    snprintf(to->warnings++ ? to->last : to->first, sizeof to->last, "%s", message);
    pthread_mutex_unlock(&to->lock);
}

typedef struct injection {
    pipe_case c;
    int ranks, victim; /* who gets the infinity */
    listener heard;
} injection;

/* Between the last backward and the reduction. */
static loom_status inject(void *context, loom_step *step) {
    const loom_parallel *parallel = context;
    (void)step;
    parallel->parameters[parallel->parameter_count - 1]->grad[0] = INFINITY;
    return LOOM_OK;
}

static uint64_t hash_of(const void *values, size_t size) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)values)[i]) * 0x100000001b3u;
    return hash;
}

/* Weights, masters and moments of this rank. */
static uint64_t hash_state(const small_run *run) {
    const loom__ddp_view *view = loom__ddp_view_of(run->parallel->ddp);
    const loom__optimizer_state *state = loom__optimizer_state_of(run->optimizer);
    uint64_t hash = hash_of(view->data16, (size_t)view->elements * 2);
    hash = hash * 31 + hash_of(view->master, (size_t)view->state_elements * 4);
    for (int i = 0; i < state->count; i++)
        hash = hash * 31 + hash_of(state->arrays[i].values, (size_t)view->state_elements * 4);
    return hash;
}

static loom_status overflow(loom_rank *rank, void *argument) {
    const injection *job = argument;
    pipe_case c = pipe_filled(&job->c);
    small_run run;
    double loss;
    loom_optimizer_outcome outcome;
    const double after[] = {65536, 32768, 16384};
    LOOM_TRY(pipe_start(rank, &c, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 8 * c.global, c.micro, c.global));
    loom_callback callback = {.context = run.parallel, .event = {[LOOM_EVENT_MICROBATCHES_END] = inject}};
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
    CHECK(!outcome.skipped && outcome.step == 1, "the step before was skipped");
    LOOM_TRY(loom__ddp_wait_parameters(run.parallel->ddp));
    uint64_t before = hash_state(&run);
    if (loom_rank_index(rank) == job->victim)
        LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    for (int i = 0; i < 3; i++) {
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
        CHECK(isfinite(loss), "the loss of a step with an overflow is %g", loss);
        LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
        CHECK(outcome.skipped && outcome.skipped_steps == i + 1 && outcome.step == 1 && isnan(outcome.grad_norm),
            "rank %d: overflow %d was not skipped", loom_rank_index(rank), i);
        CHECK(loom__optimizer_loss_scale(run.optimizer) == after[i], "scale %g after overflow %d, expected %g",
            loom__optimizer_loss_scale(run.optimizer), i, after[i]);
        CHECK(hash_state(&run) == before, "a skipped step changed weights, masters or moments");
        CHECK(loom_optimizer_lr_state(run.optimizer).num_steps == 1, "a skipped step moved the schedule on");
    }
    loom_callbacks_remove(loom_fabric_callbacks(run.fabric), &callback);
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
    CHECK(!outcome.skipped && outcome.step == 2 && outcome.loss_scale == 16384 && hash_state(&run) != before,
        "the step behind was skipped");
    small_destroy(&run);
    return LOOM_OK;
}

static void run_injection(injection *job, loom_rank_function function) {
    loom_run_options options = test_options();
    char name[PIPE_TEXT], expected[32];
    pthread_mutex_init(&job->heard.lock, NULL);
    options.log = hear;
    options.log_context = &job->heard;
    if (loom_run_local(job->c.ranks, function, job, &options))
        fail_msg("%s: %s", pipe_name(&job->c, name), loom_error_message());
    pthread_mutex_destroy(&job->heard.lock);
    snprintf(expected, sizeof expected, "rank %d", job->victim);
    if (!strstr(job->heard.first, expected))
        fail_msg("%s: a message names no %s: %s", pipe_name(&job->c, name), expected, job->heard.first);
}

static void an_overflow_on_one_rank_is_skipped_by_all(void **state) {
    static const pipe_case cases[] = {{.ranks = 4, .tp = 2},
        {.ranks = 4, .tp = 2, .sharded = true, .gather = true, .overlap = true}, {.ranks = 4, .pp = 2},
        {.ranks = 4, .pp = 2, .sharded = true}, {.ranks = 8, .tp = 2, .pp = 2, .sp = true}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int victim = 0; victim < cases[i].ranks; victim += cases[i].ranks - 1) {
            injection job = {.c = cases[i], .victim = victim};
            job.c.precision = "16-mixed";
            job.c.scale = 65536;
            /* With overlap the bucket has left before the event: gradients that wait for the end can be changed. */
            job.c.overlap = false;
            run_injection(&job, overflow);
            assert_int_equal(job.heard.warnings, 3);
            assert_non_null(strstr(job.heard.last, "update 2 is skipped, 3 so far: the gradient of "));
            assert_non_null(strstr(job.heard.last, "in the last microbatch"));
            assert_non_null(strstr(job.heard.last, "loss scale 32768, next 16384"));
        }
}

static loom_status overflow_at_the_floor(loom_rank *rank, void *argument) {
    const injection *job = argument;
    pipe_case c = pipe_filled(&job->c);
    loom_megatron_strategy_config strategy = pipe_strategy(&c);
    loom_precision_config precision = pipe_precision(&c);
    small_run run = {0};
    double loss;
    precision.initial_loss_scale = precision.min_loss_scale = 16;
    precision.hysteresis = 1;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(small_model(&run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, c.global, c.micro, c.global));
    loom_callback callback = {.context = run.parallel, .event = {[LOOM_EVENT_MICROBATCHES_END] = inject}};
    if (loom_rank_index(rank) == job->victim)
        LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    uint64_t before = hash_state(&run);
    loom_status status = loom_optimizer_step(run.optimizer, NULL);
    const char *message = loom_error_message();
    CHECK(status == LOOM_ERR_NUMERIC || status == LOOM_ERR_ABORTED, "found %s", loom_status_name(status));
    CHECK(strstr(message, "the loss scale is at its floor, 16 (min_loss_scale): the gradient of ") &&
              strstr(message, "rank 3)"),
        "rank %d says: %s", loom_rank_index(rank), message);
    CHECK(hash_state(&run) == before, "weights or state changed");
    small_destroy(&run);
    return LOOM_OK;
}

static void at_the_floor_the_run_ends_and_says_why(void **state) {
    injection job = {.c = {.ranks = 4, .tp = 2, .precision = "16-mixed"}, .victim = 3};
    (void)state;
    must_run(4, overflow_at_the_floor, &job);
}

/* A weight of a layer that is not finite on one rank, as a bad device would leave it. */
static loom_status spoil_a_layer(loom_parallel *parallel) {
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        loom_parameter *parameter = parallel->parameters[i];
        if (strcmp(parameter->name, "decoder.layers.1.input_layernorm.weight") != 0)
            continue;
        if (parameter->dtype == LOOM_F32)
            parameter->data[0] = NAN;
        else
            parameter->data16[0] = 0x7fff; /* a NaN in both */
    }
    return LOOM_OK;
}

static loom_status bad_loss(loom_rank *rank, void *argument) {
    const injection *job = argument;
    pipe_case c = pipe_filled(&job->c);
    small_run run;
    double loss;
    loom_optimizer_outcome outcome;
    LOOM_TRY(pipe_start(rank, &c, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, c.global, c.micro, c.global));
    if (loom_rank_index(rank) == job->victim)
        LOOM_TRY(spoil_a_layer(run.parallel));
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    if (status) {
        small_destroy(&run);
        return status;
    }
    CHECK(isnan(loss), "the loss is %g", loss);
    LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
    CHECK(outcome.skipped && outcome.step == 0, "the step was not skipped");
    small_destroy(&run);
    return LOOM_OK;
}

static void a_bad_loss_is_skipped_under_a_loss_scale_and_named(void **state) {
    static const pipe_case cases[] = {{.ranks = 2}, {.ranks = 2, .tp = 2, .sp = true}, {.ranks = 2, .pp = 2}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        injection job = {.c = cases[i]};
        job.c.precision = "16-mixed";
        job.c.scale = 1024;
        run_injection(&job, bad_loss);
        assert_true(job.heard.warnings >= 2);
        assert_non_null(strstr(job.heard.first, "step 1, microbatch 0: the output of "));
        assert_non_null(strstr(job.heard.first, "in decoder.layers.1"));
        assert_non_null(strstr(job.heard.last, "update 1 is skipped, 1 so far: the gradient of "));
    }
}

static void a_bad_loss_ends_the_run_in_other_precisions(void **state) {
    static const char *const precisions[] = {"32", "bf16-mixed"};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        injection job = {.c = {.ranks = 2, .precision = precisions[i]}, .victim = 1};
        loom_run_options options = test_options();
        assert_int_equal(loom_run_local(2, bad_loss, &job, &options), LOOM_ERR_NUMERIC);
        assert_non_null(strstr(loom_error_message(), "step 1, microbatch 0: the output of "));
        assert_non_null(strstr(loom_error_message(), "in decoder.layers.1"));
        assert_non_null(strstr(loom_error_message(), "(rank 1)"));
    }
}

/* Behind the forward of the second microbatch, when the gradient of the first is there. */
static loom_status inject_later(void *context, loom_step *step) {
    const loom_parallel *parallel = context;
    for (int64_t i = 0; i < parallel->parameter_count && step->microbatch == 1; i++)
        if (strcmp(parallel->parameters[i]->name, "decoder.layers.0.input_layernorm.weight") == 0)
            parallel->parameters[i]->grad[0] = NAN;
    return LOOM_OK;
}

static loom_status bad_gradient(loom_rank *rank, void *argument) {
    const injection *job = argument;
    pipe_case c = pipe_filled(&job->c);
    small_run run;
    double loss;
    LOOM_TRY(pipe_start(rank, &c, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, c.global, c.micro, c.global));
    loom_callback callback = {.context = run.parallel, .event = {[LOOM_EVENT_MICROBATCH_END] = inject_later}};
    if (loom_rank_index(rank) == job->victim)
        LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    CHECK(status == (loom_rank_index(rank) == job->victim ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED), "found %s",
        loom_status_name(status));
    CHECK(strstr(loom_error_message(), "the gradient of decoder.layers.0.input_layernorm.weight has a NaN or an "
                                       "infinity before its reduction (since microbatch 1, bucket 0 of 1, rank 1)"),
        "rank %d says: %s", loom_rank_index(rank), loom_error_message());
    CHECK(status == LOOM_ERR_ABORTED || strstr(loom_error_message(), "step 1: "), "no step: %s", loom_error_message());
    small_destroy(&run);
    return LOOM_OK;
}

static void a_bad_gradient_names_tensor_microbatch_and_rank_in_every_precision(void **state) {
    static const char *const precisions[] = {"32", "bf16-mixed"};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        injection job = {.c = {.ranks = 2, .precision = precisions[i]}, .victim = 1};
        must_run(2, bad_gradient, &job);
    }
}

/* ---- refusals ---- */

static loom_status mismatch(loom_rank *rank, void *argument) {
    small_run wide, narrow = {0};
    pipe_case first = {.ranks = 1}, second = {.ranks = 1, .precision = "bf16-mixed"};
    pipe_case a = pipe_filled(&first), b = pipe_filled(&second);
    loom_megatron_strategy_config strategy = pipe_strategy(&b);
    loom_precision_config precision = pipe_precision(&b);
    loom_model_config model = pipe_model(&b);
    loom_module *module;
    (void)argument;
    LOOM_TRY(pipe_start(rank, &a, &wide));
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &narrow.fabric));
    LOOM_TRY(loom_fabric_launch(narrow.fabric));
    LOOM_TRY(loom_gpt_create(narrow.fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(narrow.fabric, module, &narrow.parallel));
    loom_status status = loom_fabric_setup_optimizer(narrow.fabric, narrow.parallel, wide.optimizer);
    CHECK(status == LOOM_ERR_CONFIG && strstr(loom_error_message(), "kept in F32, expected BF16"), "found %s: %s",
        loom_status_name(status), loom_error_message());
    small_destroy(&narrow);
    small_destroy(&wide);
    return LOOM_OK;
}

static void an_optimizer_of_another_precision_is_refused(void **state) {
    (void)state;
    must_run(1, mismatch, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_follows_fp32_on_every_layout),
        cmocka_unit_test(fp16_follows_fp32_on_every_layout),
        cmocka_unit_test(every_spelling_of_a_precision_is_the_same),
        cmocka_unit_test(sharded_masters_change_no_bit),
        cmocka_unit_test(gradients_may_travel_in_the_dtype_of_the_weights),
        cmocka_unit_test(messages_between_stages_may_have_either_dtype),
        cmocka_unit_test(weights_are_their_masters_rounded),
        cmocka_unit_test(masters_follow_values_that_are_loaded),
        cmocka_unit_test(weights_and_activations_take_half_the_bytes),
        cmocka_unit_test(an_overflow_on_one_rank_is_skipped_by_all),
        cmocka_unit_test(at_the_floor_the_run_ends_and_says_why),
        cmocka_unit_test(a_bad_loss_is_skipped_under_a_loss_scale_and_named),
        cmocka_unit_test(a_bad_loss_ends_the_run_in_other_precisions),
        cmocka_unit_test(a_bad_gradient_names_tensor_microbatch_and_rank_in_every_precision),
        cmocka_unit_test(an_optimizer_of_another_precision_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
