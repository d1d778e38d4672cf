/* A state that one layout saves, another loads: weights, moments, updates and schedule, for all pairs of layouts. */
#include "ddp/ddp.h"
#include "optim/optim.h"
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <math.h>
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SEQUENCE = 8, VOCABULARY = 21, BEFORE = 2, AFTER = 5, GLOBAL = 12, SAMPLES = GLOBAL * (BEFORE + AFTER) };

typedef struct place {
    int tp, pp, vpp, dp;
    bool plain;      /* without the distributed optimizer */
    int ep, etp, cp; /* 0: 1, as tp, 1 */
} place;

enum { RANKS = 8 };

static int ranks_of(const place *at) {
    return at->tp * at->pp * at->dp * (at->cp ? at->cp : 1);
}

/* Which model, and how the optimizer is saved. */
typedef struct way {
    const char *architecture;
    bool tied, fully;
    bool together; /* checkpoint.parallel_load */
    bool biased;   /* add_bias_linear */
} way;

/* One run of a program. */
typedef struct job {
    place at;
    way by;
    uint64_t seed;
    const char *load, *save; /* folders; NULL: nothing is loaded, nothing saved */
    int after;               /* steps behind the load or the save */
    double losses[AFTER];    /* theirs, of rank 0 */
    /* Of each rank, before those steps: what save and load have to do with. The caller frees. */
    struct job_state {
        int64_t count;
        float *values; /* weights and the optimizer's arrays, [count] */
        int64_t steps;
        int64_t consumed;
    } states[RANKS];
} job;

static loom_model_config model_config(const way *by) {
    loom_model_config config = loom_model_config_default(by->architecture);
    bool groups = strcmp(by->architecture, "gpt2") != 0;
    if (strcmp(by->architecture, "mixtral") == 0) {
        config.moe.num_moe_experts = 4;
        config.moe.moe_ffn_hidden_size = 12;
        config.moe.moe_shared_expert_intermediate_size = 8;
    }
    config.num_layers = 4;
    config.hidden_size = 16;
    config.ffn_hidden_size = 24;
    config.num_attention_heads = 4;
    config.num_query_groups = groups ? 2 : 4;
    config.hidden_dropout = config.attention_dropout = 0;
    config.seq_length = SEQUENCE;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 2; /* so that the padding depends on the tensor size */
    config.share_embeddings_and_output_weights = by->tied;
    config.add_bias_linear = config.add_bias_linear || by->biased;
    return config;
}

typedef struct run {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_dataset dataset;
    loom_batches *batches;
    int64_t consumed;
} run;

static loom_status start(loom_rank *rank, const job *j, run *r) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
    io_config.parallel_load = j->by.together;
    const loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
    loom_model_config model = model_config(&j->by);
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = BEFORE + AFTER};
    loom_module *module;
    config.checkpoint_io = &io;
    config.tensor_model_parallel_size = j->at.tp;
    config.pipeline_model_parallel_size = j->at.pp;
    config.virtual_pipeline_model_parallel_size = j->at.vpp;
    config.context_parallel_size = j->at.cp ? j->at.cp : 1;
    config.expert_model_parallel_size = j->at.ep ? j->at.ep : 1;
    config.expert_tensor_parallel_size = j->at.etp;
    config.sequence_parallel = j->at.ep && j->at.tp > 1;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_grad_reduce = !j->at.plain;
    config.ddp_config.bucket_size = j->at.plain ? 0 : 1500;
    config.dist_ckpt_optim_fully_reshardable = j->by.fully;
    optim.lr = 0.01;
    setup.schedule.warmup_steps = 3;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &r->fabric));
    loom_fabric_seed_everything(r->fabric, j->seed);
    LOOM_TRY(loom_fabric_launch(r->fabric));
    LOOM_TRY(loom_gpt_create(r->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->parallel, &optim, &setup, &r->optimizer));
    return loom_mock_dataset_create(SEQUENCE, VOCABULARY, 3, SAMPLES, &r->dataset);
}

static void stop(run *r) {
    loom_batches_destroy(r->batches);
    loom_parallel_destroy(r->parallel);
    loom_fabric_destroy(r->fabric);
    loom_dataset_destroy(&r->dataset);
}

/* Two microbatches of each rank, which is what interleaved stages need. */
static loom_status feed(run *r, int dp) {
    loom_dataloader loader = {.dataset = &r->dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = GLOBAL / dp / 2,
        .global_batch_size = GLOBAL,
        .consumed_samples = r->consumed};
    return loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches);
}

static loom_status step(run *r, double *loss) {
    loom_optimizer_outcome outcome;
    LOOM_TRY(loom_parallel_training_step(r->parallel, r->batches, loss));
    return loom_optimizer_step(r->optimizer, &outcome);
}

static loom_status save_consumed(void *context, loom_value_pool *pool, const loom_value **value) {
    loom_value *made = NULL;
    LOOM_TRY(loom_value_int(pool, loom_batches_get_state(((run *)context)->batches).consumed_samples, &made));
    *value = made;
    return LOOM_OK;
}

static loom_status load_consumed(void *context, const loom_value *value) {
    CHECK(value->kind == LOOM_VALUE_INT, "consumed samples are a %s", loom_value_kind_name(value->kind));
    ((run *)context)->consumed = value->integer;
    return LOOM_OK;
}

static loom_status transfer(run *r, const char *load, const char *save) {
    loom_state_item items[] = {{.key = "state_dict", .module = r->parallel},
        {.key = "optimizer", .optimizer = r->optimizer},
        {.key = "consumed_samples", .load = load_consumed, .save = save_consumed, .context = r}};
    items[1].key = "the optimizer"; /* keys of modules and optimizers are the user's own */
    loom_state state = {items, 3};
    loom_load_report report = {0};
    if (save)
        return loom_fabric_save(r->fabric, save, &state, NULL, 0);
    LOOM_TRY(loom_fabric_load(r->fabric, load, &state, true, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

/* This rank's bits. */
static loom_status look(const run *r, struct job_state *out) {
    const loom__ddp_view *view = loom__ddp_view_of(r->parallel->ddp);
    const loom__optimizer_state *state = loom__optimizer_state_of(r->optimizer);
    loom_parameter *const *parameters;
    int64_t count, at = 0;
    LOOM_TRY(loom_parallel_parameters(r->parallel, &parameters, &count));
    out->values = calloc((size_t)(view->elements + state->count * view->state_elements) + 1, sizeof(float));
    CHECK(out->values, "out of memory");
    for (int64_t i = 0; i < count; i++) {
        int64_t elements = loom_parameter_count(parameters[i]);
        memcpy(out->values + at, parameters[i]->data, (size_t)elements * sizeof(float));
        at += elements;
    }
    for (int a = 0; a < state->count; a++)
        for (int64_t p = 0; p < view->place_count; p++) {
            const loom__ddp_part *part = &view->parts[p];
            memcpy(
                out->values + at, (float *)state->arrays[a].values + part->state, (size_t)part->count * sizeof(float));
            at += part->count;
        }
    out->count = at;
    out->steps = loom__optimizer_progress_of(r->optimizer).steps;
    out->consumed = loom_batches_get_state(r->batches).consumed_samples;
    return LOOM_OK;
}

static loom_status go(loom_rank *rank, job *j, run *r) {
    double loss = 0;
    LOOM_TRY(start(rank, j, r));
    if (j->load)
        LOOM_TRY(transfer(r, j->load, NULL));
    LOOM_TRY(feed(r, j->at.dp));
    for (int i = 0; i < BEFORE && !j->load; i++)
        LOOM_TRY(step(r, &loss));
    if (j->save)
        LOOM_TRY(transfer(r, NULL, j->save));
    LOOM_TRY(look(r, &j->states[loom_rank_index(rank)]));
    for (int i = 0; i < j->after; i++) {
        LOOM_TRY(step(r, &loss));
        if (loom_rank_index(rank) == 0)
            j->losses[i] = loss;
    }
    return LOOM_OK;
}

static loom_status rank_body(loom_rank *rank, void *argument) {
    run r = {0};
    loom_status status = go(rank, argument, &r);
    stop(&r);
    return status;
}

static job run_job(const place *at, const way *by, uint64_t seed, const char *load, const char *save, int after) {
    job j = {.at = *at, .by = *by, .seed = seed, .load = load, .save = save, .after = after};
    must_run(ranks_of(at), rank_body, &j);
    return j;
}

static void free_job(job *j) {
    for (int i = 0; i < RANKS; i++)
        free(j->states[i].values);
}

static void assert_same_bits(const job *a, const job *b, const char *what) {
    for (int i = 0; i < ranks_of(&a->at); i++) {
        const struct job_state *x = &a->states[i], *y = &b->states[i];
        if (x->count != y->count || x->steps != y->steps || x->consumed != y->consumed)
            fail_msg("%s, rank %d: %lld elements, %lld updates, %lld samples; expected %lld, %lld, %lld", what, i,
                (long long)y->count, (long long)y->steps, (long long)y->consumed, (long long)x->count,
                (long long)x->steps, (long long)x->consumed);
        for (int64_t e = 0; e < x->count; e++)
            if (memcmp(&x->values[e], &y->values[e], sizeof(float)) != 0)
                fail_msg("%s, rank %d, element %lld of %lld: %.9g, expected %.9g", what, i, (long long)e,
                    (long long)x->count, (double)y->values[e], (double)x->values[e]);
    }
}

static void assert_near(const job *a, const job *b, double tolerance, const char *what) {
    for (int i = 0; i < AFTER; i++)
        if (!(fabs(a->losses[i] - b->losses[i]) <= tolerance * fabs(a->losses[i])))
            fail_msg("%s: loss %d behind the load is %.9g, expected %.9g", what, i + 1, b->losses[i], a->losses[i]);
}

/* ---- folders */

enum { PATH = 512 };

static void clear(const char *path) {
    char command[PATH + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void folder(char path[PATH], const char *name) {
    snprintf(path, PATH, "%s/save_load-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), name);
    clear(path);
}

/* ---- claims */

static const place places[] = {{.tp = 1, .pp = 1, .dp = 1}, {.tp = 2, .pp = 1, .dp = 1}, {.tp = 1, .pp = 2, .dp = 1},
    {.tp = 2, .pp = 2, .dp = 1}, {.tp = 2, .pp = 1, .dp = 2}, {.tp = 1, .pp = 2, .vpp = 2, .dp = 1},
    {.tp = 1, .pp = 1, .dp = 3}};
enum { PLACES = sizeof places / sizeof *places };

/* From a layout through another and back: nothing was lost on the way, and the run at the other one goes on alike. On
 * the way back the optimizer has the other form. */
static void must_go_round(const place *from, int from_count, const place *through, int through_count, const way *by) {
    char first[PATH], second[PATH], what[128];
    way other_form = *by;
    other_form.fully = !by->fully;
    folder(first, "first");
    folder(second, "second");
    for (int a = 0; a < from_count; a++) {
        job origin = run_job(&from[a], by, 1, NULL, first, AFTER);
        for (int b = 0; b < through_count; b++) {
            snprintf(what, sizeof what, "layout %d through %d, %s%s%s", a, b, by->architecture,
                by->tied ? ", tied" : "", by->fully ? ", fully_reshardable first" : "");
            job other = run_job(&through[b], &other_form, 2, first, second, AFTER);
            job back = run_job(&from[a], by, 3, second, NULL, 0);
            assert_same_bits(&origin, &back, what);
            assert_near(&origin, &other, 1e-5, what);
            free_job(&other);
            free_job(&back);
        }
        free_job(&origin);
    }
    clear(first);
    clear(second);
}

static void every_pair_of_layouts_keeps_all_bits_and_goes_on_alike(void **state) {
    (void)state;
    for (int fully = 0; fully < 2; fully++)
        must_go_round(places, PLACES, places, PLACES, &(way){"llama", false, fully, false, false});
}

/* With two copies of the word embeddings, also where the two ends of the model are chunks of interleaved stages. */
static void tied_embeddings_keep_them_too(void **state) {
    (void)state;
    for (int fully = 0; fully < 2; fully++)
        must_go_round(places, PLACES, places, PLACES, &(way){"gpt2", true, fully, false, false});
}

static void so_do_optimizers_that_are_not_distributed(void **state) {
    static const place plain[] = {{.tp = 1, .pp = 1, .dp = 1, .plain = true},
        {.tp = 2, .pp = 1, .dp = 2, .plain = true}, {.tp = 1, .pp = 2, .vpp = 2, .dp = 1, .plain = true}};
    (void)state;
    must_go_round(plain, 3, places, PLACES, &(way){"llama", true, false, false, false});
    must_go_round(places + 4, 2, plain, 3, &(way){"llama", false, true, false, false});
}

/* Experts shared out over 1, 2 and 4 ranks, each of them over 1 and 2, with whatever else cuts a model. */
static const place with_experts[] = {{.tp = 1, .pp = 1, .dp = 1, .ep = 1}, {.tp = 1, .pp = 1, .dp = 2, .ep = 2},
    {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .etp = 2}, {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .cp = 2},
    {.tp = 2, .pp = 1, .dp = 2, .ep = 4, .etp = 1}, {.tp = 1, .pp = 1, .dp = 2, .ep = 1, .etp = 2},
    {.tp = 1, .pp = 2, .vpp = 2, .dp = 2, .ep = 2}, {.tp = 2, .pp = 1, .dp = 4, .ep = 4, .etp = 2}};
enum { WITH_EXPERTS = sizeof with_experts / sizeof *with_experts };

static void models_with_experts_keep_them_too(void **state) {
    (void)state;
    for (int fully = 0; fully < 2; fully++)
        must_go_round(with_experts + 1, 3, with_experts, WITH_EXPERTS, &(way){"mixtral", false, fully, false, false});
}

static void biases_of_experts_are_kept_too(void **state) {
    (void)state;
    for (int fully = 0; fully < 2; fully++)
        must_go_round(with_experts + 2, 1, with_experts, WITH_EXPERTS,
            &(way){.architecture = "mixtral", .fully = fully, .biased = true});
}

/* Ranks that hold the same experts are others than those that hold the same of the rest. */
static void replicas_of_experts_read_them_together(void **state) {
    (void)state;
    must_go_round(with_experts + 1, 1, with_experts, WITH_EXPERTS, &(way){"mixtral", false, false, true, false});
}

static void experts_and_optimizers_that_are_not_distributed_do_too(void **state) {
    static const place plain[] = {
        {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .plain = true}, {.tp = 2, .pp = 1, .dp = 1, .ep = 1, .plain = true}};
    (void)state;
    must_go_round(plain, 2, with_experts + 1, 3, &(way){"mixtral", false, false, false, false});
    must_go_round(with_experts + 2, 2, plain, 2, &(way){"mixtral", false, true, false, false});
}

/* ---- what is refused, and what stays */

static bool keep_norms(void *context, const char *name) {
    (void)context;
    return strstr(name, "norm") != NULL;
}

static loom_status filtered_rank(loom_rank *rank, void *argument) {
    const char *path = argument;
    job j = {.at = {.tp = 2, .pp = 1, .dp = 1, .plain = true}, .by = {.architecture = "llama"}, .seed = 1};
    run r = {0};
    LOOM_TRY(start(rank, &j, &r));
    loom_state_item items[] = {
        {.key = "state_dict", .module = r.parallel}, {.key = "optimizer", .optimizer = r.optimizer}};
    loom_state whole = {items, 2}, model = {items, 1};
    loom_state_filter filters[] = {{"state_dict", keep_norms, NULL}, {"scheduler", keep_norms, NULL}};
    loom_load_report report = {0};
    loom_status status = loom_fabric_save(r.fabric, path, &whole, filters, 2);
    if (status != LOOM_ERR_ARGUMENT || !strstr(loom_error_message(), "the key scheduler, which the state lacks"))
        return loom_fail(LOOM_ERR_INTERNAL, "a filter without an item was not refused");
    loom_error_clear();
    LOOM_TRY(loom_fabric_save(r.fabric, path, &model, filters, 1));
    LOOM_TRY(loom_fabric_load(r.fabric, path, &model, false, &report));
    int64_t missing = report.missing_count;
    loom_load_report_free(&report);
    CHECK(missing == 4 * 4 + 2, "%lld names are missing, expected all but the norms", (long long)missing);
    loom_state_item own[] = {{.key = "megaloom"}};
    loom_state named = {own, 1}, alone = {items + 1, 1};
    CHECK(loom_fabric_save(r.fabric, path, &named, NULL, 0) == LOOM_ERR_ARGUMENT, "a key of the checkpoint's own");
    CHECK(loom_fabric_save(r.fabric, path, &alone, NULL, 0) == LOOM_ERR_ARGUMENT, "an optimizer alone");
    loom_error_clear();
    stop(&r);
    return LOOM_OK;
}

static void a_filter_chooses_what_is_stored(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "filtered");
    must_run(2, filtered_rank, path);
    clear(path);
}

/* A rank that cannot write makes no checkpoint, and the one that was there stays. */
static loom_status blocked_rank(loom_rank *rank, void *argument) {
    const char *path = argument;
    job j = {.at = {.tp = 2, .pp = 1, .dp = 1, .plain = true}, .by = {.architecture = "llama"}, .seed = 1};
    char blocked[PATH + 32];
    run r = {0};
    struct stat found;
    LOOM_TRY(start(rank, &j, &r));
    loom_state_item items[] = {{.key = "state_dict", .module = r.parallel}};
    loom_state state = {items, 1};
    LOOM_TRY(loom_fabric_save(r.fabric, path, &state, NULL, 0));
    snprintf(blocked, sizeof blocked, "%s/nothing/here", path);
    loom_status status = loom_fabric_save(r.fabric, blocked, &state, NULL, 0);
    CHECK(status != LOOM_OK, "a save into no folder has come to an end");
    CHECK(stat(blocked, &found) != 0, "there is a checkpoint where none could be");
    loom_error_clear();
    loom_load_report report = {0};
    LOOM_TRY(loom_fabric_load(r.fabric, path, &state, true, &report));
    loom_load_report_free(&report);
    stop(&r);
    return LOOM_OK;
}

static void a_save_that_fails_leaves_what_was_there(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "blocked");
    must_run(2, blocked_rank, path);
    clear(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair_of_layouts_keeps_all_bits_and_goes_on_alike),
        cmocka_unit_test(tied_embeddings_keep_them_too),
        cmocka_unit_test(so_do_optimizers_that_are_not_distributed),
        cmocka_unit_test(models_with_experts_keep_them_too),
        cmocka_unit_test(biases_of_experts_are_kept_too),
        cmocka_unit_test(replicas_of_experts_read_them_together),
        cmocka_unit_test(experts_and_optimizers_that_are_not_distributed_do_too),
        cmocka_unit_test(a_filter_chooses_what_is_stored),
        cmocka_unit_test(a_save_that_fails_leaves_what_was_there),
    };
    return cmocka_run_group_tests_name("parallel.save_load", tests, NULL, NULL);
}
