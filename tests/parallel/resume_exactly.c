/* A run that stops, is saved and goes on in a new process has the bits of one that never stopped: losses, norms, rates,
 * loss scale, skipped steps, weights, masters and moments, in every precision. Each run begins from other weights and
 * another seed, so that what is not loaded shows. */
#include "optim/optim.h"
#include "parallel/pipeline_support.h"
#include "strategy/strategy.h"
#include <megaloom/state.h>
#include <unistd.h>

enum { STOP = 3, STEPS = 6, AFTER = STEPS - STOP, PATH = 512, MOST_RANKS = 4 };

typedef struct resume_case {
    pipe_case at;
    bool rampup;
    bool fully; /* strategy.dist_ckpt_optim_fully_reshardable */
    int bad[2]; /* steps whose gradients overflow on the last rank; 0 = none */
} resume_case;

typedef struct resume_result {
    struct resume_step {
        double loss, norm, scale, rate;
        int64_t skipped, consumed, updates;
    } steps[AFTER];
    uint64_t weights, state[MOST_RANKS]; /* at the end */
    uint64_t masters[MOST_RANKS];        /* at the stop */
} resume_result;

typedef struct resume_job {
    const resume_case *c;
    const char *path;
    bool load, alone; /* alone: the model without its optimizer */
    resume_result *result;
} resume_job;

typedef struct resumed {
    small_run run;
    int64_t consumed;
    bool bad; /* the step now */
} resumed;

/* fp16 begins with a scale that is small enough, so that a step is bad only where a test makes it so. */
static loom_precision_config precision_of(const resume_case *c, bool load) {
    loom_precision_config precision = pipe_precision(&c->at);
    if (strcmp(precision.precision, "16-mixed") == 0) {
        precision.initial_loss_scale = load ? 4 : 1024;
        precision.loss_scale_window = 2;
    }
    return precision;
}

static loom_status start(loom_rank *rank, const resume_case *c, bool load, small_run *run) {
    loom_megatron_strategy_config strategy = pipe_strategy(&c->at);
    loom_model_config model = pipe_model(&c->at);
    loom_precision_config precision = precision_of(c, load);
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = STEPS};
    loom_module *module;
    optim.lr = 0.01;
    setup.schedule.schedule = "megatron-cosine";
    setup.schedule.warmup_steps = 2;
    strategy.dist_ckpt_optim_fully_reshardable = c->fully;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &run->fabric));
    loom_fabric_seed_everything(run->fabric, load ? 2 : 1);
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, module, &run->parallel));
    return loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, &setup, &run->optimizer);
}

static loom_status feed(const resume_case *c, resumed *r) {
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 3, STEPS * c->at.global, &r->run.dataset));
    loom_dataloader loader = {.dataset = &r->run.dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = c->at.micro,
        .global_batch_size = c->at.global,
        .consumed_samples = r->consumed};
    if (c->rampup)
        memcpy(loader.rampup_batch_size, (int64_t[]){4, 4, 12}, sizeof loader.rampup_batch_size);
    return loom_fabric_setup_dataloader(r->run.fabric, &loader, &r->run.batches);
}

static loom_status save_consumed(void *context, loom_value_pool *pool, const loom_value **value) {
    loom_value *made = NULL;
    LOOM_TRY(loom_value_int(pool, loom_batches_get_state(((resumed *)context)->run.batches).consumed_samples, &made));
    *value = made;
    return LOOM_OK;
}

static loom_status load_consumed(void *context, const loom_value *value) {
    CHECK(value->kind == LOOM_VALUE_INT, "consumed samples are a %s", loom_value_kind_name(value->kind));
    ((resumed *)context)->consumed = value->integer;
    return LOOM_OK;
}

static loom_status transfer(resumed *r, const char *path, bool load, bool alone) {
    loom_state_item items[] = {{.key = "state_dict", .module = r->run.parallel},
        {.key = "optimizer", .optimizer = r->run.optimizer},
        {.key = "consumed_samples", .load = load_consumed, .save = save_consumed, .context = r}};
    loom_state state = {items, alone ? 1 : 3};
    loom_load_report report = {0};
    if (!load)
        return loom_fabric_save(r->run.fabric, path, &state, NULL, 0);
    LOOM_TRY(loom_fabric_load(r->run.fabric, path, &state, true, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

/* Between the last backward and the reduction. */
static loom_status inject(void *context, loom_step *step) {
    const resumed *r = context;
    (void)step;
    if (r->bad)
        r->run.parallel->parameters[r->run.parallel->parameter_count - 1]->grad[0] = INFINITY;
    return LOOM_OK;
}

static loom_status step(loom_rank *rank, const resume_case *c, resumed *r, int t, resume_result *result) {
    loom_optimizer_outcome outcome;
    double loss;
    r->bad = loom_rank_index(rank) == loom_rank_count(rank) - 1 && t > 0 && (t == c->bad[0] || t == c->bad[1]);
    LOOM_TRY(loom_parallel_training_step(r->run.parallel, r->run.batches, &loss));
    LOOM_TRY(loom_optimizer_step(r->run.optimizer, &outcome));
    if (t >= STOP)
        result->steps[t - STOP] = (struct resume_step){.loss = loss,
            .norm = outcome.skipped ? -1 : outcome.grad_norm,
            .scale = outcome.loss_scale,
            .rate = outcome.lr,
            .skipped = outcome.skipped_steps,
            .consumed = loom_batches_get_state(r->run.batches).consumed_samples,
            .updates = outcome.step};
    return LOOM_OK;
}

static uint64_t hash_of(uint64_t hash, const void *values, size_t size) {
    for (size_t i = 0; values && i < size; i++)
        hash = (hash ^ ((const unsigned char *)values)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_state(const small_run *run) {
    const loom__ddp_view *view = loom__ddp_view_of(run->parallel->ddp);
    const loom__optimizer_state *state = loom__optimizer_state_of(run->optimizer);
    uint64_t hash = hash_of(0xcbf29ce484222325u, view->master, (size_t)view->state_elements * sizeof(float));
    for (int i = 0; i < state->count; i++)
        hash = hash_of(hash, state->arrays[i].values, (size_t)view->state_elements * sizeof(float));
    return hash;
}

/* What the optimizer updates, whatever the weights are kept in, which must be that, rounded. */
static loom_status look_at_masters(const small_run *run, uint64_t *hash) {
    const loom__ddp_view *view = loom__ddp_view_of(run->parallel->ddp);
    *hash = 0xcbf29ce484222325u;
    LOOM_TRY(loom__ddp_wait_parameters(run->parallel->ddp));
    for (int64_t place = 0; place < view->place_count; place++) {
        const loom__ddp_part *part = &view->parts[place];
        const float *values = view->master ? view->master + part->state : view->data + part->start;
        *hash = hash_of(*hash, values, (size_t)part->count * sizeof *values);
        for (int64_t i = 0; view->master && i < part->count; i++) {
            uint16_t rounded = view->dtype == LOOM_BF16 ? loom_f32_to_bf16(values[i]) : loom_f32_to_f16(values[i]);
            CHECK(rounded == view->data16[part->start + i], "element %lld of %s is not its master rounded",
                (long long)i, view->parameters[place]->name);
        }
    }
    return LOOM_OK;
}

static loom_status gather_hash(loom_rank *rank, uint64_t mine, uint64_t all[MOST_RANKS]) {
    return loom_all_gather(loom_rank_world(rank), &mine, all, sizeof mine, LOOM_U8);
}

static loom_status go(loom_rank *rank, const resume_job *job, resumed *r, resume_result *mine) {
    resume_case c = *job->c;
    c.at = pipe_filled(&c.at);
    LOOM_TRY(start(rank, &c, job->load, &r->run));
    if (job->load)
        LOOM_TRY(transfer(r, job->path, true, job->alone));
    LOOM_TRY(feed(&c, r));
    loom_callback callback = {.context = r, .event = {[LOOM_EVENT_MICROBATCHES_END] = inject}};
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(r->run.fabric), &callback));
    uint64_t masters = 0;
    for (int t = job->load ? STOP : 0; t < STEPS; t++) {
        if (t == STOP)
            LOOM_TRY(look_at_masters(&r->run, &masters));
        LOOM_TRY(step(rank, &c, r, t, mine));
        if (t + 1 == STOP && !job->load)
            LOOM_TRY(transfer(r, job->path, false, false));
    }
    LOOM_TRY(gather_hash(rank, masters, mine->masters));
    mine->weights = 0xcbf29ce484222325u;
    LOOM_TRY(loom_gpt_visit(r->run.parallel, false, pipe_hash, &mine->weights));
    return gather_hash(rank, hash_state(&r->run), mine->state);
}

static loom_status body(loom_rank *rank, void *argument) {
    const resume_job *job = argument;
    resumed r = {0};
    resume_result mine = {0};
    loom_status status = go(rank, job, &r, &mine);
    small_destroy(&r.run);
    if (loom_rank_index(rank) == 0)
        *job->result = mine;
    return status;
}

static const char *name_of(const resume_case *c, char text[PIPE_TEXT]) {
    char at[PIPE_TEXT];
    snprintf(text, PIPE_TEXT, "%.150s%s%s dropout %g bad %d %d", pipe_name(&c->at, at), c->rampup ? " ramp-up" : "",
        c->fully ? " fully" : "", c->at.dropout, c->bad[0], c->bad[1]);
    return text;
}

static resume_result run_job(const resume_case *c, const char *path, bool load, bool alone) {
    char name[PIPE_TEXT];
    loom_run_options options = test_options();
    resume_result result = {0};
    resume_job job = {c, path, load, alone, &result};
    if (loom_run_local(c->at.ranks, body, &job, &options))
        fail_msg("%s: %s: %s", load ? "resumed" : "whole", name_of(c, name), loom_error_message());
    return result;
}

static resume_result run(const resume_case *c, const char *path, bool load) {
    return run_job(c, path, load, false);
}

static void folder(char path[PATH]) {
    char command[PATH + 16];
    snprintf(path, PATH, "%s/resume_exactly-%lld", MEGALOOM_BUILD, (long long)getpid());
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void must_be_equal(const resume_case *c, const resume_result *found, const resume_result *wanted) {
    char name[PIPE_TEXT];
    name_of(c, name);
    for (int i = 0; i < AFTER; i++) {
        const struct resume_step *a = &found->steps[i], *b = &wanted->steps[i];
        if (memcmp(a, b, sizeof *a) != 0)
            fail_msg("%s, step %d: loss %a, norm %a, scale %g, rate %g, %lld skipped, %lld samples, %lld updates; "
                     "expected %a, %a, %g, %g, %lld, %lld, %lld",
                name, STOP + i, a->loss, a->norm, a->scale, a->rate, (long long)a->skipped, (long long)a->consumed,
                (long long)a->updates, b->loss, b->norm, b->scale, b->rate, (long long)b->skipped,
                (long long)b->consumed, (long long)b->updates);
    }
    if (found->weights != wanted->weights || memcmp(found->state, wanted->state, sizeof found->state) != 0)
        fail_msg("%s: weights, masters or moments differ at the end", name);
}

static void must_be_near(const resume_case *c, const resume_result *found, const resume_result *wanted, double by) {
    char name[PIPE_TEXT];
    name_of(c, name);
    for (int i = 0; i < AFTER; i++) {
        const struct resume_step *a = &found->steps[i], *b = &wanted->steps[i];
        if (!(fabs(a->loss - b->loss) <= by * b->loss) || !(fabs(a->norm - b->norm) <= 10 * by * fabs(b->norm)) ||
            a->scale != b->scale || a->rate != b->rate || a->skipped != b->skipped || a->consumed != b->consumed)
            fail_msg("resumed at %s, step %d: loss %.9g, norm %.9g, scale %g, rate %g, %lld skipped, %lld samples; "
                     "expected %.9g, %.9g, %g, %g, %lld, %lld",
                name, STOP + i, a->loss, a->norm, a->scale, a->rate, (long long)a->skipped, (long long)a->consumed,
                b->loss, b->norm, b->scale, b->rate, (long long)b->skipped, (long long)b->consumed);
    }
}

/* ---- the same layout ---- */

static const char *const precisions[] = {"32", "bf16-mixed", "16-mixed"};
enum { PRECISIONS = sizeof precisions / sizeof *precisions };

/* fp16 at a scale that grows after two good steps and shrinks after two bad ones: with step 1 bad, what was counted
 * before the stop decides whether the scale changes at step 3. */
static const int overflows[][2] = {{0, 0}, {1, 0}, {1, 3}};
enum { OVERFLOWS = sizeof overflows / sizeof *overflows };

static void must_go_on(const resume_case *c) {
    char path[PATH];
    folder(path);
    resume_result wanted = run(c, path, false), found = run(c, path, true);
    must_be_equal(c, &found, &wanted);
    folder(path);
}

static void a_stop_changes_no_bit_in_any_precision(void **state) {
    (void)state;
    for (int p = 0; p < PRECISIONS; p++)
        for (int sharded = 0; sharded < 3; sharded++)
            for (int variant = 0; variant < 4; variant++)
                for (int o = 0; o < (p == 2 ? OVERFLOWS : 1); o++) {
                    resume_case c = {.at = {.ranks = 2, .precision = precisions[p], .global = 12},
                        .rampup = variant & 1,
                        .fully = sharded == 2};
                    memcpy(c.bad, overflows[o], sizeof c.bad);
                    c.at.sharded = sharded > 0;
                    c.at.overlap = sharded > 0 && !c.bad[0]; /* else the buckets may be gone before the injection */
                    c.at.dropout = variant & 2 ? 0.1 : 0;
                    must_go_on(&c);
                }
}

static void nor_does_it_on_tensor_and_pipeline_ranks(void **state) {
    static const pipe_case places[] = {
        {.ranks = 2, .tp = 2, .sp = true, .dropout = 0.1},
        {.ranks = 2, .pp = 2, .vpp = 2, .dropout = 0.1, .sharded = true},
        {.ranks = 4, .pp = 2, .sharded = true, .narrow_reduction = true},
        {.ranks = 4, .tp = 2, .sharded = true, .overlap = true, .gather = true},
        {.ranks = 4, .sharded = true, .instances = 2},
        {.ranks = 2, .pytorch = true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        for (int p = 0; p < PRECISIONS; p++)
            for (int fully = 0; fully <= places[i].sharded; fully++) {
                resume_case c = {.at = places[i], .fully = fully};
                c.at.precision = precisions[p];
                must_go_on(&c);
            }
}

/* ---- other layouts and precisions ---- */

static void at_another_layout_only_sums_are_rounded_otherwise(void **state) {
    static const pipe_case places[] = {
        {.ranks = 1},
        {.ranks = 2, .tp = 2, .sp = true},
        {.ranks = 3, .sharded = true},
        {.ranks = 4, .tp = 2, .pp = 2, .vpp = 2, .sharded = true},
    };
    static const double by[PRECISIONS] = {1e-5, 5e-3, 5e-3};
    (void)state;
    for (int p = 0; p < PRECISIONS; p++) {
        char path[PATH];
        resume_case from = {.at = {.ranks = 2, .sharded = true, .precision = precisions[p]}};
        from.at.global = 12;
        from.bad[0] = p == 2;
        from.bad[1] = p == 2 ? 4 : 0;
        for (int fully = 0; fully < 2; fully++) {
            from.fully = fully;
            folder(path);
            resume_result wanted = run(&from, path, false);
            for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
                resume_case to = from;
                to.at = places[i];
                to.at.precision = precisions[p];
                to.at.global = 12;
                resume_result found = run(&to, path, true);
                must_be_near(&to, &found, &wanted, by[p]);
            }
        }
        folder(path);
    }
}

/* The masters go on, whatever the weights that are rounded from them are kept in. */
static void a_run_goes_on_in_another_precision(void **state) {
    (void)state;
    for (int p = 0; p < PRECISIONS; p++)
        for (int q = 0; q < PRECISIONS; q++)
            for (int sharded = 0; sharded < 3; sharded++) {
                char path[PATH];
                resume_case from = {.at = {.ranks = 2, .precision = precisions[p]}}, to;
                from.at.sharded = sharded > 0;
                from.fully = sharded == 2;
                to = from;
                to.at.precision = precisions[q];
                folder(path);
                resume_result wanted = run(&from, path, false), found = run(&to, path, true);
                for (int i = 0; i < AFTER; i++)
                    wanted.steps[i].scale = found.steps[i].scale;
                must_be_near(&to, &found, &wanted, 5e-3);
                assert_memory_equal(found.masters, wanted.masters, sizeof found.masters);
                folder(path);
            }
}

/* What the stored weights were is not lost by rounding them. */
static void masters_of_a_model_alone_are_the_stored_weights(void **state) {
    (void)state;
    for (int sharded = 0; sharded < 2; sharded++) {
        char path[PATH];
        resume_case from = {.at = {.ranks = 2, .sharded = sharded}};
        folder(path);
        resume_result wanted = run(&from, path, false);
        for (int p = 1; p < PRECISIONS; p++) {
            resume_case to = from;
            to.at.precision = precisions[p];
            resume_result found = run_job(&to, path, true, true);
            assert_memory_equal(found.masters, wanted.masters, sizeof found.masters);
        }
        folder(path);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_changes_no_bit_in_any_precision),
        cmocka_unit_test(nor_does_it_on_tensor_and_pipeline_ranks),
        cmocka_unit_test(at_another_layout_only_sums_are_rounded_otherwise),
        cmocka_unit_test(a_run_goes_on_in_another_precision),
        cmocka_unit_test(masters_of_a_model_alone_are_the_stored_weights),
    };
    return cmocka_run_group_tests_name("parallel.resume_exactly", tests, NULL, NULL);
}
