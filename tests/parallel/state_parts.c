/* States of several parts: two models with their optimizers, a module of one's own, plain values with filters, levels
 * of strictness, and a module's dict in memory. */
#include "ddp/ddp.h"
#include "optim/optim.h"
#include "parallel/small_model.h"
#include "parallel/support.h"
#include "parallel/toy_module.h"
#include "strategy/strategy.h"
#include <megaloom/state.h>
#include <unistd.h>

enum { PATH = 512 };

static void clear(const char *path) {
    char command[PATH + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void folder(char path[PATH], const char *name) {
    snprintf(path, PATH, "%s/state_parts-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), name);
    clear(path);
}

static loom_status fabric_at(loom_rank *rank, int tp, bool sharded, uint64_t seed, loom_fabric **fabric) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.tensor_model_parallel_size = tp;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_grad_reduce = sharded;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, fabric));
    loom_fabric_seed_everything(*fabric, seed);
    return loom_fabric_launch(*fabric);
}

/* Elements of this rank's parameters and of what its optimizer keeps of them get numbers that depend on all of
 * (salt, parameter or part, element). */
static void number(loom_parallel *parallel, loom_optimizer *optimizer, int salt) {
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const loom__optimizer_state *state = loom__optimizer_state_of(optimizer);
    loom__optimizer_progress progress = loom__optimizer_progress_of(optimizer);
    for (int64_t p = 0; p < view->place_count; p++)
        for (int64_t i = view->places[p].start; i < view->places[p].start + view->places[p].count; i++)
            view->data[i] = (float)(salt + (int)p * 1000 + (int)(i - view->places[p].start));
    for (int a = 0; a < state->count; a++)
        for (int64_t p = 0; p < view->place_count; p++)
            for (int64_t i = 0; i < view->parts[p].count; i++)
                ((float *)state->arrays[a].values)[view->parts[p].state + i] =
                    (float)(salt + (a + 1) * 100000 + (int)p * 1000 +
                            (int)(view->parts[p].start - view->places[p].start + i));
    progress.steps = salt;
    loom__optimizer_set_progress(optimizer, &progress);
}

/* Whether they still are those. */
static loom_status check_numbers(loom_parallel *parallel, loom_optimizer *optimizer, int salt, const char *what) {
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const loom__optimizer_state *state = loom__optimizer_state_of(optimizer);
    LOOM_TRY(loom__ddp_wait_parameters(parallel->ddp));
    for (int64_t p = 0; p < view->place_count; p++)
        for (int64_t i = view->places[p].start; i < view->places[p].start + view->places[p].count; i++) {
            float wanted = (float)(salt + (int)p * 1000 + (int)(i - view->places[p].start));
            CHECK(view->data[i] == wanted, "%s, %s: found %g, expected %g", what, view->parameters[p]->name,
                (double)view->data[i], (double)wanted);
        }
    for (int a = 0; a < state->count; a++)
        for (int64_t p = 0; p < view->place_count; p++)
            for (int64_t i = 0; i < view->parts[p].count; i++) {
                float found = ((float *)state->arrays[a].values)[view->parts[p].state + i],
                      wanted = (float)(salt + (a + 1) * 100000 + (int)p * 1000 +
                                       (int)(view->parts[p].start - view->places[p].start + i));
                CHECK(found == wanted, "%s, %s of %s: found %g, expected %g", what, state->arrays[a].name,
                    view->parameters[p]->name, (double)found, (double)wanted);
            }
    CHECK(loom__optimizer_progress_of(optimizer).steps == salt, "%s: %lld updates, expected %d", what,
        (long long)loom__optimizer_progress_of(optimizer).steps, salt);
    return LOOM_OK;
}

static loom_status expect(loom_status status, loom_status wanted, const char *text) {
    CHECK(status == wanted, "found %s \"%.300s\", expected %s", loom_status_name(status), loom_error_message(),
        loom_status_name(wanted));
    char found[2048];
    snprintf(found, sizeof found, "%s", loom_error_message());
    CHECK(strstr(found, text), "found \"%s\", expected \"%s\" in it", found, text);
    loom_error_clear();
    return LOOM_OK;
}

/* ---- two models ---- */

typedef struct pair {
    loom_fabric *fabric;
    loom_parallel *policy, *critic;
    loom_optimizer *of_policy, *of_critic;
} pair;

static loom_status add_model(
    loom_fabric *fabric, int64_t layers, loom_parallel **parallel, loom_optimizer **optimizer) {
    loom_model_config config = small_config();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_module *module;
    config.num_layers = layers;
    config.vocab_size = 24; /* without padding at any layout here */
    optim.lr = 0.01;
    LOOM_TRY(loom_gpt_create(fabric, &config, &module));
    LOOM_TRY(loom_fabric_setup_module(fabric, module, parallel));
    return loom_fabric_setup_megatron_optimizer(fabric, *parallel, &optim, NULL, optimizer);
}

static loom_status start_pair(loom_rank *rank, int tp, bool sharded, pair *p) {
    LOOM_TRY(fabric_at(rank, tp, sharded, 5, &p->fabric));
    LOOM_TRY(add_model(p->fabric, 2, &p->policy, &p->of_policy));
    return add_model(p->fabric, 1, &p->critic, &p->of_critic);
}

static void stop_pair(pair *p) {
    loom_parallel_destroy(p->policy);
    loom_parallel_destroy(p->critic);
    loom_fabric_destroy(p->fabric);
}

enum { POLICY = 7, CRITIC = 500000 };

static loom_status with_pair(pair *p, const char *load, const char *save) {
    loom_state_item items[] = {{.key = "critic's optimizer", .optimizer = p->of_critic},
        {.key = "critic", .module = p->critic}, {.key = "state_dict", .module = p->policy},
        {.key = "optimizer", .optimizer = p->of_policy}};
    loom_state state = {items, 4};
    loom_load_report report = {0};
    if (load)
        LOOM_TRY(loom_fabric_load(p->fabric, load, &state, true, &report));
    loom_load_report_free(&report);
    return save ? loom_fabric_save(p->fabric, save, &state, NULL, 0) : LOOM_OK;
}

/* The parts of one rank, when dp = 1, hold all: what was numbered at one layout is numbered alike after another. */
static loom_status pair_body(pair *p, const char *const *paths, int turn) {
    if (turn == 0) {
        number(p->policy, p->of_policy, POLICY);
        number(p->critic, p->of_critic, CRITIC);
        return with_pair(p, NULL, paths[0]);
    }
    if (turn == 1)
        return with_pair(p, paths[0], paths[1]);
    LOOM_TRY(with_pair(p, paths[1], NULL));
    LOOM_TRY(check_numbers(p->policy, p->of_policy, POLICY, "policy"));
    return check_numbers(p->critic, p->of_critic, CRITIC, "critic");
}

/* Each of them alone, under its key, finds its own; nothing of the other is unexpected. */
static loom_status one_of_pair(pair *p, const char *path) {
    loom_state_item items[] = {{.key = "critic", .module = p->critic}, {.key = "o", .optimizer = p->of_critic},
        {.key = "state_dict", .module = p->policy}, {.key = "stranger", .module = p->policy}};
    loom_state critic = {items, 2}, policy = {items + 2, 1}, stranger = {items + 3, 1};
    loom_load_report report = {0};
    number(p->policy, p->of_policy, 1);
    number(p->critic, p->of_critic, 1);
    LOOM_TRY(loom_fabric_load(p->fabric, path, &critic, true, &report));
    loom_load_report_free(&report);
    LOOM_TRY(check_numbers(p->critic, p->of_critic, CRITIC, "critic alone"));
    LOOM_TRY(check_numbers(p->policy, p->of_policy, 1, "policy untouched"));
    LOOM_TRY(loom_fabric_load(p->fabric, path, &policy, true, &report));
    loom_load_report_free(&report);
    LOOM_TRY(expect(loom_fabric_load(p->fabric, path, &stranger, true, &report), LOOM_ERR_NOT_FOUND,
        "missing (stranger.embedding.word_embeddings.weight"));
    items[1].optimizer = p->of_policy;
    LOOM_TRY(expect(
        loom_fabric_save(p->fabric, path, &critic, NULL, 0), LOOM_ERR_ARGUMENT, "an optimizer alone cannot be saved"));
    loom_state_item apart[] = {{.key = "state_dict", .module = p->policy}, {.key = "decoder", .module = p->critic}};
    LOOM_TRY(expect(loom_fabric_save(p->fabric, path, &(loom_state){apart, 2}, NULL, 0), LOOM_ERR_ARGUMENT,
        "the key decoder of a module begins keys of the main module"));
    apart[1].key = "state_dict.critic";
    LOOM_TRY(expect(loom_fabric_save(p->fabric, path, &(loom_state){apart, 2}, NULL, 0), LOOM_ERR_ARGUMENT,
        "begins with that of another, state_dict, and a dot"));
    items[0].module = p->policy;
    loom_state_item twice[] = {items[0], items[2]};
    return expect(
        loom_fabric_save(p->fabric, path, &(loom_state){twice, 2}, NULL, 0), LOOM_ERR_ARGUMENT, "have the same module");
}

typedef struct pair_job {
    const char *paths[2];
    int turn, tp;
    bool sharded;
} pair_job;

static loom_status pair_rank(loom_rank *rank, void *argument) {
    const pair_job *job = argument;
    pair p = {0};
    loom_status status = start_pair(rank, job->tp, job->sharded, &p);
    if (!status)
        status = pair_body(&p, job->paths, job->turn);
    if (!status && job->turn == 2)
        status = one_of_pair(&p, job->paths[1]);
    stop_pair(&p);
    return status;
}

static void two_models_and_their_optimizers_go_through_another_layout(void **state) {
    (void)state;
    char first[PATH], second[PATH];
    folder(first, "first");
    folder(second, "second");
    pair_job job = {{first, second}, 0, 1, false};
    must_run(1, pair_rank, &job);
    job = (pair_job){{first, second}, 1, 2, true};
    must_run(4, pair_rank, &job);
    job = (pair_job){{first, second}, 2, 1, false};
    must_run(1, pair_rank, &job);
    clear(first);
    clear(second);
}

/* ---- a module of one's own ---- */

typedef struct own_job {
    const char *load, *save;
    int tp;
    bool sharded, check, wrong;
} own_job;

static loom_status own_body(
    loom_fabric *fabric, const own_job *job, loom_parallel *parallel, loom_optimizer *optimizer) {
    loom_state_item items[] = {{.key = "mine", .module = parallel}, {.key = "its", .optimizer = optimizer}};
    loom_state state = {items, 2};
    loom_load_report report = {0};
    int salt = 10 * (1 + loom_comm_rank(loom_fabric_group(fabric, LOOM_GROUP_TP)));
    if (job->wrong)
        return expect(loom_fabric_load(fabric, job->load, &state, true, &report), LOOM_ERR_NOT_FOUND, "misshaped (p1");
    if (!job->load)
        number(parallel, optimizer, salt);
    /* p0 is a replica, and its updates are alike everywhere. */
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(parallel, &parameters, &count));
    if (job->load) {
        LOOM_TRY(loom_fabric_load(fabric, job->load, &state, true, &report));
        loom_load_report_free(&report);
    }
    if (job->check)
        CHECK(parameters[0]->data[0] == 10 + 1000 && parameters[1]->data[0] == (float)salt, "p0 is %g and p1 %g",
            (double)parameters[0]->data[0], (double)parameters[1]->data[0]);
    return job->save ? loom_fabric_save(fabric, job->save, &state, NULL, 0) : LOOM_OK;
}

static loom_status own_rank(loom_rank *rank, void *argument) {
    const own_job *job = argument;
    toy t = {.parameters = 2, .uses = 1, .use = {{0, 1}}, .shard = {false, true}, .initial = 1};
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    optim.lr = 0.01;
    loom_status status = fabric_at(rank, job->tp, job->sharded, 1, &fabric);
    if (!status)
        status = loom_fabric_setup_module(fabric, toy_module(&t), &parallel);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer);
    if (!status)
        status = own_body(fabric, job, parallel, optimizer);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

static void a_module_of_ones_own_is_stored_by_its_parameter_names(void **state) {
    (void)state;
    char first[PATH], second[PATH];
    folder(first, "own");
    folder(second, "own2");
    own_job job = {.save = first, .tp = 2};
    must_run(2, own_rank, &job);
    job = (own_job){.load = first, .save = second, .tp = 2, .sharded = true, .check = true};
    must_run(4, own_rank, &job);
    job = (own_job){.load = second, .tp = 2, .check = true};
    must_run(2, own_rank, &job);
    job = (own_job){.load = second, .tp = 1, .wrong = true};
    must_run(1, own_rank, &job);
    loom_checkpoint *checkpoint = NULL;
    const loom_checkpoint_tensor *tensor = NULL;
    float moments[2] = {0};
    if (loom_checkpoint_open(second, &checkpoint) ||
        loom_checkpoint_find_tensor(checkpoint, "optimizer.state.exp_avg.p1", &tensor) ||
        loom_checkpoint_read(checkpoint, tensor, (int64_t[]){0, 0}, tensor->shape, LOOM_F32, moments))
        fail_msg("%s", loom_error_message());
    assert_int_equal(tensor->dims, 2);
    assert_int_equal(tensor->shape[0], 2);
    assert_true(moments[0] == 100010 && moments[1] == 100020);
    loom_checkpoint_close(checkpoint);
    clear(first);
    clear(second);
}

/* ---- levels ---- */

static loom_status load_level(pair *p, const char *path, loom_strict strict, loom_load_report *report) {
    loom_state_item items[] = {{.key = "state_dict", .module = p->policy}};
    return loom_fabric_load(p->fabric, path, &(loom_state){items, 1}, strict, report);
}

static bool no_fc2(void *context, const char *name) {
    (void)context;
    return !strstr(name, "linear_fc2");
}

static loom_status levels_body(pair *p, const char *path) {
    static const struct level {
        const char *name;
        bool error;
        int64_t missing;
    } levels[] = {{"assume_ok_unexpected", true, 0}, {"log_unexpected", false, 4}, {"log_all", false, 4},
        {"raise_unexpected", true, 0}, {"raise_all", true, 0}, {"return_unexpected", false, 4},
        {"return_all", false, 4}, {"ignore_all", false, 0}};
    loom_state_item items[] = {{.key = "state_dict", .module = p->policy}, {.key = "critic", .module = p->critic}};
    loom_state_filter filter = {"state_dict", no_fc2, NULL};
    loom_strict strict;
    LOOM_TRY(loom_fabric_save(p->fabric, path, &(loom_state){items, 2}, &filter, 1));
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        loom_load_report report = {0};
        LOOM_TRY(loom_strict_parse(levels[i].name, &strict));
        CHECK(strcmp(loom_strict_name(strict), levels[i].name) == 0, "%s comes back as another", levels[i].name);
        loom_status status = load_level(p, path, strict, &report);
        if (levels[i].error) {
            LOOM_TRY(expect(status, LOOM_ERR_NOT_FOUND, "4 missing ("));
            continue;
        }
        LOOM_TRY(status);
        int64_t missing = report.missing_count;
        loom_load_report_free(&report);
        CHECK(missing == levels[i].missing, "%s: %lld missing", levels[i].name, (long long)missing);
    }
    LOOM_TRY(expect(loom_strict_parse("raise_al", &strict), LOOM_ERR_ARGUMENT, "did you mean raise_all"));
    LOOM_TRY(expect(load_level(p, path, (loom_strict)99, &(loom_load_report){0}), LOOM_ERR_ARGUMENT, "found level 99"));
    return LOOM_OK;
}

typedef struct body_job {
    loom_status (*body)(pair *p, const char *path);
    const char *path;
} body_job;

static loom_status body_rank(loom_rank *rank, void *argument) {
    const body_job *job = argument;
    pair p = {0};
    loom_status status = start_pair(rank, 2, false, &p);
    if (!status)
        status = job->body(&p, job->path);
    stop_pair(&p);
    return status;
}

static void run_body(loom_status (*body)(pair *p, const char *path), const char *name) {
    char path[PATH];
    folder(path, name);
    body_job job = {body, path};
    must_run(2, body_rank, &job);
    clear(path);
}

static void each_level_raises_logs_lists_or_ignores(void **state) {
    (void)state;
    run_body(levels_body, "levels");
}

/* ---- plain values ---- */

static bool no_secret(void *context, const char *name) {
    ++*(int *)context;
    return strcmp(name, "secret") != 0;
}

static loom_status nested_value(loom_value_pool *pool, const loom_value **value) {
    loom_value *outer = NULL, *inner = NULL, *number = NULL;
    LOOM_TRY(loom_value_dict(pool, &outer));
    LOOM_TRY(loom_value_dict(pool, &inner));
    LOOM_TRY(loom_value_int(pool, 3, &number));
    LOOM_TRY(loom_value_set(pool, outer, "secret", number));
    LOOM_TRY(loom_value_set(pool, inner, "secret", number));
    LOOM_TRY(loom_value_set(pool, inner, "kept", number));
    LOOM_TRY(loom_value_set(pool, outer, "data", inner));
    *value = outer;
    return LOOM_OK;
}

static loom_status nested_body(pair *p, const char *path, loom_value_pool *pool, loom_load_report *report) {
    int asked = 0;
    loom_state_item items[] = {{.key = "run"}, {.key = "run2"}};
    loom_state_filter filters[] = {{"run/data", no_secret, &asked}, {"run/nothing", no_secret, &asked}};
    loom_state state = {items, 2};
    LOOM_TRY(nested_value(pool, &items[0].value));
    items[1].value = items[0].value;
    LOOM_TRY(loom_fabric_save(p->fabric, path, &state, filters, 1));
    LOOM_TRY(loom_fabric_load(p->fabric, path, &state, true, report));
    const loom_value *run = items[0].value, *data = loom_value_get(run, "data");
    CHECK(loom_value_get(run, "secret"), "the filter of run/data chose in run");
    CHECK(loom_value_get(data, "kept") && !loom_value_get(data, "secret"), "run/data was not filtered");
    CHECK(loom_value_get(loom_value_get(items[1].value, "data"), "secret"), "run2 was filtered");
    bool first = loom_rank_index(loom_fabric_rank(p->fabric)) == 0; /* whose values are stored */
    return expect(loom_fabric_save(p->fabric, path, &state, filters, 2), first ? LOOM_ERR_ARGUMENT : LOOM_ERR_ABORTED,
        "the key run/nothing, which the state lacks");
}

static loom_status values_body(pair *p, const char *path) {
    loom_value_pool *pool = NULL;
    loom_load_report report = {0};
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = nested_body(p, path, pool, &report);
    loom_load_report_free(&report);
    loom_value_pool_destroy(pool);
    return status;
}

static void a_filter_of_a_path_chooses_in_the_dict_there(void **state) {
    (void)state;
    run_body(values_body, "values");
}

/* ---- a dict in memory ---- */

static loom_status dict_of(loom_value_pool *pool, const loom_parallel *parallel, const char *front, loom_value **dict) {
    LOOM_TRY(loom_value_dict(pool, dict));
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        const loom_parameter *parameter = parallel->parameters[i];
        int64_t elements = loom_parameter_count(parameter);
        float *values = malloc((size_t)elements * sizeof *values);
        char key[PATH];
        loom_value *tensor = NULL;
        for (int64_t e = 0; e < elements; e++)
            values[e] = (float)(i * 1000 + e);
        loom_status status = loom_value_tensor_copy(pool, LOOM_F32, parameter->dims, parameter->shape, values, &tensor);
        free(values);
        LOOM_TRY(status);
        snprintf(key, sizeof key, "%s%s", front, parameter->name);
        LOOM_TRY(loom_value_set(pool, *dict, key, tensor));
    }
    return LOOM_OK;
}

static loom_status load_dict(pair *p, loom_value_pool *pool) {
    loom_value *dict = NULL, *outer = NULL, *none = NULL, *short_of = NULL;
    loom_load_report report = {0};
    const loom_parameter *last = p->policy->parameters[p->policy->parameter_count - 1];
    LOOM_TRY(dict_of(pool, p->policy, "module.module.", &dict));
    LOOM_TRY(loom_value_none(pool, &none));
    LOOM_TRY(loom_value_set(pool, dict, "decoder.layers.0.mlp.linear_fc1._extra_state", none));
    LOOM_TRY(loom_value_dict(pool, &outer));
    LOOM_TRY(loom_value_set(pool, outer, "state_dict", dict));
    LOOM_TRY(loom_fabric_load_module_state_dict(p->fabric, p->policy, outer, true, &report));
    float wanted = (float)((p->policy->parameter_count - 1) * 1000 + 1);
    CHECK(last->data[1] == wanted, "%s: found %g, expected %g", last->name, (double)last->data[1], (double)wanted);

    /* One too few and one too many. */
    LOOM_TRY(loom_value_dict(pool, &short_of));
    for (int64_t i = 1; i + 1 < dict->count; i++)
        LOOM_TRY(loom_value_set_pair(pool, short_of, dict->items[2 * i], dict->items[2 * i + 1]));
    LOOM_TRY(loom_value_set(pool, short_of, "lm_head", none));
    last->data[1] = -1;
    LOOM_TRY(expect(
        loom_fabric_load_module_state_dict(p->fabric, p->policy, short_of, LOOM_STRICT_ASSUME_OK_UNEXPECTED, &report),
        LOOM_ERR_NOT_FOUND, "1 missing (embedding.word_embeddings.weight); 1 unexpected (lm_head);"));
    CHECK(last->data[1] == -1, "a dict that is refused has changed a parameter");
    static const struct level {
        loom_strict strict;
        int64_t missing, unexpected;
    } levels[] = {{LOOM_STRICT_RETURN_ALL, 1, 1}, {LOOM_STRICT_LOG_ALL, 1, 1}, {LOOM_STRICT_LOG_UNEXPECTED, 1, 0},
        {LOOM_STRICT_RETURN_UNEXPECTED, 1, 0}, {LOOM_STRICT_IGNORE_ALL, 0, 0}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        LOOM_TRY(loom_fabric_load_module_state_dict(p->fabric, p->policy, short_of, levels[i].strict, &report));
        int64_t missing = report.missing_count, unexpected = report.unexpected_count;
        loom_load_report_free(&report);
        CHECK(missing == levels[i].missing && unexpected == levels[i].unexpected, "%s: %lld missing, %lld unexpected",
            loom_strict_name(levels[i].strict), (long long)missing, (long long)unexpected);
    }
    CHECK(last->data[1] == wanted, "a load that is not strict did not take what there is");
    return expect(loom_fabric_load_module_state_dict(p->fabric, p->policy, none, true, &report), LOOM_ERR_ARGUMENT,
        "expected a dict of tensors");
}

static loom_status dict_body(pair *p, const char *path) {
    loom_value_pool *pool = NULL;
    (void)path;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = load_dict(p, pool);
    loom_value_pool_destroy(pool);
    return status;
}

static void a_dict_in_memory_is_loaded_whatever_modules_stand_before_its_names(void **state) {
    (void)state;
    run_body(dict_body, "dict");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_models_and_their_optimizers_go_through_another_layout),
        cmocka_unit_test(a_module_of_ones_own_is_stored_by_its_parameter_names),
        cmocka_unit_test(each_level_raises_logs_lists_or_ignores),
        cmocka_unit_test(a_filter_of_a_path_chooses_in_the_dict_there),
        cmocka_unit_test(a_dict_in_memory_is_loaded_whatever_modules_stand_before_its_names),
    };
    return cmocka_run_group_tests_name("parallel.state_parts", tests, NULL, NULL);
}
