/* Biases of the choice of experts: all ranks of any layout move them to the same bits, from what the routers of a whole
 * training step have counted and nothing else, and a run that stops and goes on has them. */
#include "parallel/shared_model.h"

#include "model/gpt.h"
#include "strategy/strategy.h"
#include <megaloom/state.h>
#include <unistd.h>

enum { EXPERTS = 4, RANKS = 8, PATH = 512 };

/* What all ranks have in the end: NaN where a rank has not the layer, or the layer no experts. */
typedef struct biases {
    float of[RANKS][LAYERS][EXPERTS];
} biases;

typedef struct bias_job {
    shared_case c;
    int steps, done; /* done: by the run that was saved */
    bool evaluates;  /* before each step */
    int bad;         /* step whose gradients overflow on the last rank; 0 = none */
    const char *save, *load;
    biases *found;
    shared_result *result; /* of rank 0: losses and norms of the steps; NULL: not wanted */
    int64_t skipped;
} bias_job;

typedef struct bias_run {
    const bias_job *job;
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_dataset dataset;
    loom_batches *batches, *validation;
    int step;
} bias_run;

static const loom__gpt *gpt_of(const bias_run *r) {
    return r->parallel->module->context;
}

static void note_biases(const bias_run *r, int rank) {
    if (!r->job->found)
        return;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int e = 0; e < EXPERTS; e++)
            r->job->found->of[rank][layer][e] = NAN;
    for (int64_t i = 0; i < gpt_of(r)->layer_count; i++) {
        const loom__layer *layer = &gpt_of(r)->layers[i];
        if (layer->router_memory)
            memcpy(r->job->found->of[rank][layer->number], layer->router_memory->bias, EXPERTS * sizeof(float));
    }
}

/* Between the last backward and the reduction. */
static loom_status overflow(void *context, loom_step *step) {
    const bias_run *r = context;
    bool last = loom_rank_index(r->fabric->rank) == loom_rank_count(r->fabric->rank) - 1;
    if (step->mode == LOOM_TRAINING && r->job->bad > 0 && r->step == r->job->bad && last)
        r->parallel->parameters[r->parallel->parameter_count - 1]->grad[0] = INFINITY;
    return LOOM_OK;
}

static loom_status transfer(bias_run *r, const char *path, bool load) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = r->parallel}, {.key = "optimizer", .optimizer = r->optimizer}};
    loom_state state = {items, 2};
    loom_load_report report = {0};
    if (!load)
        return loom_fabric_save(r->fabric, path, &state, NULL, 0);
    LOOM_TRY(loom_fabric_load(r->fabric, path, &state, LOOM_STRICT_RAISE_ALL, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

static loom_status go(loom_rank *rank, bias_run *r, bias_job *job) {
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 0.001;
    LOOM_TRY(loom_mock_dataset_create(S, VOCABULARY, 5, STEPS * BATCH, &r->dataset));
    LOOM_TRY(set_up(rank, &job->c, &r->fabric, &r->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->parallel, &optim, NULL, &r->optimizer));
    loom_callback callback = {.context = r, .event = {[LOOM_EVENT_MICROBATCHES_END] = overflow}};
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(r->fabric), &callback));
    loom_dataloader loader = {.dataset = &r->dataset,
        .micro_batch_size = 1,
        .global_batch_size = BATCH,
        .consumed_samples = job->done * BATCH};
    LOOM_TRY(loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches));
    loader.mode = LOOM_VALIDATION;
    loader.consumed_samples = 0;
    LOOM_TRY(loom_fabric_setup_dataloader(r->fabric, &loader, &r->validation));
    if (job->load)
        LOOM_TRY(transfer(r, job->load, true));
    for (r->step = 1; r->step <= job->steps; r->step++) {
        loom_optimizer_outcome outcome;
        double loss;
        if (job->evaluates)
            LOOM_TRY(loom_parallel_validation_step(r->parallel, r->validation, &loss));
        LOOM_TRY(loom_parallel_training_step(r->parallel, r->batches, &loss));
        LOOM_TRY(loom_optimizer_step(r->optimizer, &outcome));
        if (loom_rank_index(rank) == 0) {
            job->skipped = outcome.skipped_steps;
            job->result->loss[r->step - 1] = loss;
            job->result->norm[r->step - 1] = outcome.grad_norm;
        }
    }
    return job->save ? transfer(r, job->save, false) : LOOM_OK;
}

static loom_status body(loom_rank *rank, void *argument) {
    bias_job *job = argument;
    bias_run r = {.job = job};
    loom_status status = go(rank, &r, job);
    if (!status)
        note_biases(&r, loom_rank_index(rank));
    loom_batches_destroy(r.batches);
    loom_batches_destroy(r.validation);
    loom_parallel_destroy(r.parallel);
    loom_fabric_destroy(r.fabric);
    loom_dataset_destroy(&r.dataset);
    return status;
}

/* A sigmoid and a rate, where a case does not say. */
static loom_status try_job(bias_job *job, biases *found, shared_result *result) {
    loom_run_options options = test_options();
    shared_case c = job->c;
    c.experts = c.experts ? c.experts : EXPERTS;
    c.score = c.score ? c.score : "sigmoid";
    job->c = filled(&c);
    job->steps = job->steps ? job->steps : STEPS;
    job->found = found;
    job->result = result;
    return loom_run_local(job->c.ranks, body, job, &options);
}

static int64_t run_job(bias_job job, biases *found) {
    char text[TEXT];
    shared_result result;
    if (try_job(&job, found, &result))
        fail_msg("%s: %s", name_of(&job.c, text), loom_error_message());
    return job.skipped;
}

/* Each layer of each rank that has it, against the one rank; some rank must have it. */
static void must_have_the_biases(const shared_case *c, int ranks, const biases *found, const biases *wanted) {
    char text[TEXT];
    for (int layer = 0; layer < LAYERS; layer++) {
        int holders = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const float *bias = found->of[rank][layer];
            if (isnan(bias[0]))
                continue;
            holders++;
            if (memcmp(bias, wanted->of[0][layer], EXPERTS * sizeof *bias) != 0)
                fail_msg("%s, rank %d, layer %d: biases %g %g %g %g, expected %g %g %g %g", name_of(c, text), rank,
                    layer, (double)bias[0], (double)bias[1], (double)bias[2], (double)bias[3],
                    (double)wanted->of[0][layer][0], (double)wanted->of[0][layer][1], (double)wanted->of[0][layer][2],
                    (double)wanted->of[0][layer][3]);
        }
        if ((holders == 0) != isnan(wanted->of[0][layer][0]))
            fail_msg("%s: layer %d is held by %d ranks", name_of(c, text), layer, holders);
    }
}

static void every_layout_moves_biases_to_the_same_bits(void **state) {
    (void)state;
    const shared_case cases[] = {{.tp = 2, .sp = true}, {.cp = 2}, {.ranks = 2, .ep = 2}, {.ranks = 2}, {.pp = 2},
        {.pp = 2, .vpp = 2}, {.ranks = 4, .ep = 2, .sharded = true}, {.full = true}, {.selective = true},
        {.experts_again = true}, {.ranks = 2, .ep = 2, .full = true},
        {.ranks = 4, .pp = 2, .ep = 2, .schedule = "zero-bubble"},
        {.ranks = 4, .tp = 2, .sp = true, .ep = 2, .freq = 2}, {.ranks = 8, .tp = 2, .sp = true, .cp = 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += FEW) {
        biases found, wanted;
        bias_job job = {.c = cases[i]}, alone = {.c = on_one_rank(&cases[i])};
        job.c.bias = alone.c.bias = 0.05;
        shared_case c = filled(&job.c);
        run_job(job, &found);
        run_job(alone, &wanted);
        must_have_the_biases(&c, c.ranks, &found, &wanted);
    }
}

static void biases_change_what_a_model_computes_alike_on_every_layout(void **state) {
    (void)state;
    const shared_case cases[] = {{.tp = 2, .sp = true, .experts = 4, .score = "sigmoid", .bias = 0.05},
        {.ranks = 4, .cp = 2, .experts = 4, .ep = 2, .score = "sigmoid", .bias = 0.05, .coefficient = 1},
        {.ranks = 4, .pp = 2, .experts = 4, .score = "sigmoid", .bias = 0.05, .full = true},
        {.ranks = 2, .experts = 4, .ep = 2, .score = "sigmoid", .bias = 0.05, .capacity = 1}};
    ALL_EQUAL_ONE_RANK(cases);
    const shared_case with = {.experts = 4, .score = "sigmoid", .bias = 0.05};
    const shared_case without = {.experts = 4, .score = "sigmoid"};
    shared_result moved = run_it(&with), plain = run_it(&without);
    /* Biases begin at 0, and move when the first step is over. */
    assert_true(moved.loss[0] == plain.loss[0]);
    assert_true(fabs(moved.loss[1] - plain.loss[1]) > 1e-6);
}

/* A router of zeros sends every token to experts 0 and 1 while no bias tells experts apart. */
static void a_bias_moves_away_from_the_experts_with_more_tokens(void **state) {
    (void)state;
    biases found;
    run_job((bias_job){.c = {.bias = 0.25, .starved = true}, .steps = 1}, &found);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int e = 0; e < EXPERTS; e++)
            assert_float_equal(found.of[0][layer][e], e < 2 ? -0.25F : 0.25F, 0);
    run_job((bias_job){.c = {.bias = 0.25, .starved = true}, .steps = 2}, &found);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int e = 0; e < EXPERTS; e++)
            assert_float_equal(found.of[0][layer][e], 0.0F, 0);
}

static void evaluation_counts_nothing(void **state) {
    (void)state;
    biases plain, evaluated;
    const shared_case c = {.bias = 0.05, .ranks = 1};
    run_job((bias_job){.c = c}, &plain);
    run_job((bias_job){.c = c, .evaluates = true}, &evaluated);
    must_have_the_biases(&c, 1, &evaluated, &plain);
}

/* In Megatron-Core biases move before the optimizer learns that it must not. */
static void a_skipped_update_moves_biases_all_the_same(void **state) {
    (void)state;
    biases one, skipped;
    const shared_case c = {.bias = 0.25, .starved = true, .precision = "16-mixed", .ranks = 2};
    assert_int_equal(run_job((bias_job){.c = c, .steps = 1}, &one), 0);
    assert_int_equal(run_job((bias_job){.c = c, .steps = 1, .bad = 1}, &skipped), 1);
    must_have_the_biases(&c, 2, &skipped, &one);
    assert_float_equal(skipped.of[0][0][0], -0.25F, 0);
}

/* ---- checkpoints ---- */

static void folder(char path[PATH]) {
    char command[PATH + 16];
    snprintf(path, PATH, "%s/expert_bias-%lld", MEGALOOM_BUILD, (long long)getpid());
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void a_checkpoint_holds_biases_for_any_layout(void **state) {
    (void)state;
    static const struct {
        shared_case from, to;
    } cases[] = {{{.tp = 2, .sp = true, .sharded = true}, {.ranks = 4, .pp = 2, .vpp = 2, .ep = 2}},
        {{.pp = 2, .precision = "bf16-mixed"}, {.ranks = 2, .ep = 2, .precision = "bf16-mixed", .sharded = true}},
        {{.freq = 2}, {.cp = 2, .freq = 2}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[PATH];
        biases saved, loaded;
        folder(path);
        bias_job save = {.c = cases[i].from, .save = path}, load = {.c = cases[i].to, .load = path, .steps = -1};
        save.c.bias = load.c.bias = 0.05;
        run_job(save, &saved);
        run_job(load, &loaded);
        shared_case c = filled(&load.c);
        for (int layer = 0; layer < LAYERS; layer++)
            for (int rank = 0; rank < save.c.pp; rank++)
                if (!isnan(saved.of[rank][layer][0]))
                    memcpy(saved.of[0][layer], saved.of[rank][layer], sizeof saved.of[0][layer]);
        must_have_the_biases(&c, c.ranks, &loaded, &saved);
        folder(path);
    }
}

static void a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not(void **state) {
    (void)state;
    char path[PATH];
    biases whole, resumed;
    shared_result all, rest;
    folder(path);
    const shared_case c = {.ranks = 2, .ep = 2, .bias = 0.05, .sharded = true};
    bias_job save = {.c = c, .steps = 2, .save = path}, load = {.c = c, .steps = 2, .done = 2, .load = path};
    bias_job at_once = {.c = c};
    assert_int_equal(try_job(&save, &resumed, &all), LOOM_OK);
    if (try_job(&load, &resumed, &rest))
        fail_msg("%s", loom_error_message());
    assert_int_equal(try_job(&at_once, &whole, &all), LOOM_OK);
    must_have_the_biases(&c, 2, &resumed, &whole);
    assert_memory_equal(rest.loss, all.loss + 2, 2 * sizeof *rest.loss);
    assert_memory_equal(rest.norm, all.norm + 2, 2 * sizeof *rest.norm);
    folder(path);
}

static void expect_refusal(bias_job job, const char *words) {
    biases found;
    shared_result result;
    if (try_job(&job, &found, &result) == LOOM_OK || !strstr(loom_error_message(), words))
        fail_msg("found \"%s\", expected \"%s\"", loom_error_message(), words);
}

/* All that the module has, in memory, with biases that nobody has counted. */
static loom_status load_dict(bias_run *r, loom_value_pool *pool) {
    const loom__parameter_set *set = gpt_of(r)->set;
    loom_value *dict = NULL;
    loom_load_report report = {0};
    const float values[EXPERTS] = {1, -2, 3, -4};
    LOOM_TRY(loom_value_dict(pool, &dict));
    for (int64_t i = 0; i < set->count + set->module_buffers; i++) {
        const loom_parameter *of = set->list[i];
        loom_value *tensor = NULL;
        LOOM_TRY(
            loom_value_tensor_copy(pool, LOOM_F32, of->dims, of->shape, i < set->count ? of->data : values, &tensor));
        LOOM_TRY(loom_value_set(pool, dict, of->name, tensor));
    }
    LOOM_TRY(loom_fabric_load_module_state_dict(r->fabric, r->parallel, dict, LOOM_STRICT_RAISE_ALL, &report));
    for (int64_t i = 0; i < gpt_of(r)->layer_count; i++)
        CHECK(memcmp(gpt_of(r)->layers[i].router_memory->bias, values, sizeof values) == 0,
            "the biases of layer %lld are not those of the dict", (long long)i);
    return LOOM_OK;
}

static loom_status with_dict(loom_rank *rank, void *argument) {
    bias_job job = {.c = *(const shared_case *)argument};
    bias_run r = {.job = &job};
    loom_value_pool *pool = NULL;
    loom_status status = loom_value_pool_create(&pool);
    if (!status)
        status = set_up(rank, &job.c, &r.fabric, &r.parallel);
    if (!status)
        status = load_dict(&r, pool);
    loom_value_pool_destroy(pool);
    loom_parallel_destroy(r.parallel);
    loom_fabric_destroy(r.fabric);
    return status;
}

static void a_dict_in_memory_has_biases_too(void **state) {
    (void)state;
    const shared_case given = {.ranks = 2, .ep = 2, .bias = 0.05, .experts = EXPERTS, .score = "sigmoid"};
    shared_case c = filled(&given);
    must_run(2, with_dict, &c);
}

static void a_strict_load_names_the_biases(void **state) {
    (void)state;
    char path[PATH];
    biases found;
    const shared_case with = {.bias = 0.05}, without = {.ranks = 1};
    folder(path);
    /* No rate, no biases: what the other model lacks. */
    bias_job plain = {.c = without, .steps = 1, .save = path};
    shared_result result;
    plain.c.experts = EXPERTS;
    if (try_job(&plain, NULL, &result))
        fail_msg("%s", loom_error_message());
    expect_refusal((bias_job){.c = with, .steps = -1, .load = path}, "4 missing (decoder.layers.0.mlp.router.expert_");
    folder(path);
    run_job((bias_job){.c = with, .steps = 1, .save = path}, &found);
    expect_refusal(
        (bias_job){.c = without, .steps = -1, .load = path}, "1 unexpected (decoder.layers.mlp.router.expert_bias)");
    folder(path);
    expect_refusal((bias_job){.c = {.bias = 0.05, .score = "softmax"}}, "needs moe_router_score_function sigmoid");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_moves_biases_to_the_same_bits),
        cmocka_unit_test(biases_change_what_a_model_computes_alike_on_every_layout),
        cmocka_unit_test(a_bias_moves_away_from_the_experts_with_more_tokens),
        cmocka_unit_test(evaluation_counts_nothing),
        cmocka_unit_test(a_skipped_update_moves_biases_all_the_same),
        cmocka_unit_test(a_checkpoint_holds_biases_for_any_layout),
        cmocka_unit_test(a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not),
        cmocka_unit_test(a_dict_in_memory_has_biases_too),
        cmocka_unit_test(a_strict_load_names_the_biases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
