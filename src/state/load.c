/* Loading a state, as the strategy does it: first every rank finds out, alone, whether what was asked for is there;
 * they agree; only then anything is changed. The invariant: an error of a strict load leaves the state as it was. */
#include "model/gpt.h"
#include "state/state.h"
#include <megaloom/checkpoint_io.h>
#include <stdlib.h>

/* What a report's values live in. */
struct loom_load_sources {
    loom_checkpoint *checkpoint;
    loom_value_pool *pool;
};

void loom_load_report_free(loom_load_report *report) {
    loom__names_free(report->missing, report->missing_count);
    loom__names_free(report->unexpected, report->unexpected_count);
    loom__names_free(report->misshaped, report->misshaped_count);
    if (report->sources) {
        loom_value_pool_destroy(report->sources->pool);
        loom_checkpoint_close(report->sources->checkpoint);
        free(report->sources);
    }
    *report = (loom_load_report){0};
}

/* One module of the state. */
typedef struct loading_module {
    loom__state_module parts;
    loom__load_scope scope;
    loom__load *load;     /* of a module of loom_gpt_create, */
    loom__own_state *own; /* or of another */
} loading_module;

typedef struct loading {
    loom_fabric *fabric;
    const loom_state *state;
    loading_module *modules; /* [count] */
    int64_t count;
    loom_load_report report;
} loading;

/* What the common state has beyond the state. */
static loom_status collect_leftover(loading *l, const loom_value *common) {
    loom_value *left = NULL;
    loom_value_pool *pool = l->report.sources->pool;
    LOOM_TRY(loom_value_dict(pool, &left));
    for (int64_t i = 0; common && common->kind == LOOM_VALUE_DICT && i < common->count; i++) {
        const loom_value *key = common->items[2 * i];
        if (key->kind != LOOM_VALUE_TEXT || !loom__state_item(l->state, key->text))
            LOOM_TRY(loom_value_set_pair(pool, left, key, common->items[2 * i + 1]));
    }
    l->report.leftover = left;
    return LOOM_OK;
}

static loom_status add_missing_values(loading *l, const loom_value *common) {
    for (int64_t i = 0; i < l->state->count; i++) {
        const loom_state_item *item = &l->state->items[i];
        if (!loom__state_is_plain(item) || loom_value_get(common, item->key))
            continue;
        LOOM_TRY(loom__names_add(&l->report.missing, &l->report.missing_count, "", item->key));
    }
    return LOOM_OK;
}

static loom_status open_module(loading_module *m, loom_load_report *report) {
    if (!m->parts.module->is_gpt) {
        LOOM_TRY(loom__own_state_create(m->parts.module, m->parts.optimizer, &m->own));
        return loom__own_list(m->own, &m->scope, report);
    }
    LOOM_TRY(loom__load_create(m->parts.module, m->parts.optimizer, &m->scope, &m->load));
    return loom__load_list(m->load, report);
}

static loom_status open_modules(loading *l) {
    loom__state_module module;
    int64_t count = 0;
    while (loom__state_module_at(l->state, count, &module))
        count++;
    l->modules = calloc((size_t)count + 1, sizeof *l->modules);
    if (!l->modules)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a state");
    for (l->count = 0; l->count < count;) {
        loading_module *m = &l->modules[l->count];
        (void)loom__state_module_at(l->state, l->count++, &m->parts);
        m->scope = loom__load_scope_of(l->report.sources->checkpoint, &m->parts);
        LOOM_TRY(open_module(m, &l->report));
    }
    return LOOM_OK;
}

static loom_status open_all(loading *l, const char *path) {
    LOOM_TRY(loom__state_check(l->state));
    struct loom_load_sources *sources = l->report.sources = calloc(1, sizeof *l->report.sources);
    if (!sources)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the load of a checkpoint");
    LOOM_TRY(loom_value_pool_create(&sources->pool));
    LOOM_TRY(loom_checkpoint_io_load(loom_fabric_checkpoint_io(l->fabric), path, &sources->checkpoint));
    const loom_checkpoint_info *info = loom_checkpoint_get_info(sources->checkpoint);
    l->report.iteration = info->iteration;
    LOOM_TRY(open_modules(l));
    LOOM_TRY(add_missing_values(l, info->common));
    return collect_leftover(l, info->common);
}

static loom_status prepare(loading *l, const char *path, loom_strict strict) {
    LOOM_TRY(open_all(l, path));
    return loom__strict_apply(strict, l->fabric->rank, path, &l->report);
}

static loom_status take_values(loading *l) {
    const loom_value *common = loom_checkpoint_get_info(l->report.sources->checkpoint)->common;
    for (int64_t i = 0; i < l->state->count; i++) {
        loom_state_item *item = &l->state->items[i];
        const loom_value *value = loom__state_is_plain(item) ? loom_value_get(common, item->key) : NULL;
        if (value && item->load)
            LOOM_TRY(item->load(item->context, value));
        else if (value)
            item->value = value;
    }
    return LOOM_OK;
}

static loom_status read_module(const loading_module *m, bool *masters) {
    LOOM_TRY(m->own ? loom__own_read(m->own, &m->scope) : loom__load_read(m->load, masters));
    return m->parts.optimizer ? loom__load_optimizer(m->parts.optimizer, &m->scope) : LOOM_OK;
}

/* Training goes on with the random numbers that it had; every rank reads the same ones. */
static void take_seed(const loading_module *m) {
    const loom_value *seed = loom_value_get(loom_value_get(m->scope.root, "megaloom"), "seed");
    loom__gpt *gpt = m->parts.module->module->context;
    if (m->parts.optimizer && m->parts.module->is_gpt && seed && seed->kind == LOOM_VALUE_INT)
        gpt->environment.seed = (uint64_t)seed->integer;
}

/* Collective. */
static loom_status take_module(const loading *l, const loading_module *m) {
    loom__ddp *ddp = m->parts.module->ddp;
    bool masters = false;
    if (ddp)
        LOOM_TRY(loom__ddp_wait_parameters(ddp));
    LOOM_TRY(loom_agree(loom_rank_world(l->fabric->rank), read_module(m, &masters)));
    if (masters)
        LOOM_TRY(loom__ddp_gather(ddp));
    take_seed(m);
    return LOOM_OK;
}

static loom_status load_all(loading *l, const char *path, loom_strict strict) {
    loom_comm *world = loom_rank_world(l->fabric->rank);
    bool pending;
    LOOM_TRY(loom_fabric_finalize_saves(l->fabric, true, &pending));
    LOOM_TRY(loom_agree(world, prepare(l, path, strict)));
    for (int64_t i = 0; i < l->count; i++)
        LOOM_TRY(take_module(l, &l->modules[i]));
    return loom_agree(world, take_values(l));
}

loom_status loom_fabric_load(
    loom_fabric *fabric, const char *path, const loom_state *state, loom_strict strict, loom_load_report *report) {
    loading l = {.fabric = fabric, .state = state};
    loom_status status = load_all(&l, path, strict);
    for (int64_t i = 0; i < l.count; i++) {
        loom__load_destroy(l.modules[i].load);
        loom__own_state_destroy(l.modules[i].own);
    }
    free(l.modules);
    if (status) {
        loom_load_report_free(&l.report);
        return status;
    }
    *report = l.report;
    return LOOM_OK;
}
