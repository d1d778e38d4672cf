/* Loading a state, as the strategy does it: first every rank finds out, alone, whether what was asked for is there;
 * they agree; only then anything is changed. The invariant: an error of a strict load leaves the state as it was. */
#include "strategy/load.h"
#include <megaloom/checkpoint_io.h>
#include <stdio.h>
#include <stdlib.h>

/* What a report's values live in. */
struct loom_load_sources {
    loom_checkpoint *checkpoint;
    loom_value_pool *pool;
};

static void free_names(char **names, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

void loom_load_report_free(loom_load_report *report) {
    free_names(report->missing, report->missing_count);
    free_names(report->unexpected, report->unexpected_count);
    free_names(report->misshaped, report->misshaped_count);
    if (report->sources) {
        loom_value_pool_destroy(report->sources->pool);
        loom_checkpoint_close(report->sources->checkpoint);
        free(report->sources);
    }
    *report = (loom_load_report){0};
}

typedef struct loading {
    loom_fabric *fabric;
    const loom_state *state;
    loom__state_parts parts;
    loom__load *load; /* of the module */
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
        loom_load_report *report = &l->report;
        char **grown = realloc(report->missing, (size_t)(report->missing_count + 1) * sizeof *grown);
        if (grown)
            report->missing = grown;
        if (!grown || !(grown[report->missing_count] = strdup(item->key)))
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of names");
        report->missing_count++;
    }
    return LOOM_OK;
}

static loom_status open_all(loading *l, const char *path) {
    LOOM_TRY(loom__state_check(l->state, &l->parts));
    struct loom_load_sources *sources = l->report.sources = calloc(1, sizeof *l->report.sources);
    if (!sources)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the load of a checkpoint");
    LOOM_TRY(loom_value_pool_create(&sources->pool));
    LOOM_TRY(loom_checkpoint_io_load(loom_fabric_checkpoint_io(l->fabric), path, &sources->checkpoint));
    const loom_checkpoint_info *info = loom_checkpoint_get_info(sources->checkpoint);
    l->report.iteration = info->iteration;
    if (l->parts.module) {
        LOOM_TRY(loom__load_create(l->parts.module, l->parts.optimizer, sources->checkpoint, &l->load));
        LOOM_TRY(loom__load_list(l->load, &l->report));
    }
    LOOM_TRY(add_missing_values(l, info->common));
    return collect_leftover(l, info->common);
}

/* " 2 missing (a, b);" with as many names as fit. */
static size_t say_names(char *text, size_t bytes, const char *what, char *const *names, int64_t count) {
    size_t used = 0, part = bytes / 3;
    if (count == 0)
        return 0;
    used += (size_t)snprintf(text, bytes, " %lld %s (", (long long)count, what);
    for (int64_t i = 0; i < count; i++) {
        if (used + strlen(names[i]) + 16 > part) {
            used += (size_t)snprintf(text + used, bytes - used, ", …");
            break;
        }
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? ", " : "", names[i]);
    }
    return used + (size_t)snprintf(text + used, bytes - used, ");");
}

static loom_status check_strict(const loading *l, const char *path) {
    const loom_load_report *report = &l->report;
    char text[3072] = "";
    if (!report->missing_count && !report->unexpected_count && !report->misshaped_count)
        return LOOM_OK;
    size_t used = say_names(text, sizeof text, "missing", report->missing, report->missing_count);
    used += say_names(text + used, sizeof text - used, "unexpected", report->unexpected, report->unexpected_count);
    say_names(text + used, sizeof text - used, "misshaped", report->misshaped, report->misshaped_count);
    return loom_fail(
        LOOM_ERR_NOT_FOUND, "%s does not hold the state:%s a load that is not strict takes what there is", path, text);
}

static loom_status prepare(loading *l, const char *path, bool strict) {
    LOOM_TRY(open_all(l, path));
    return strict ? check_strict(l, path) : LOOM_OK;
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

static loom_status read_tensors(loading *l, bool *masters) {
    *masters = false;
    if (!l->load)
        return LOOM_OK;
    LOOM_TRY(loom__load_read(l->load, masters));
    return l->parts.optimizer ? loom__load_optimizer(l->parts.optimizer, l->report.sources->checkpoint) : LOOM_OK;
}

static loom_status load_all(loading *l, const char *path, bool strict) {
    loom_comm *world = loom_rank_world(l->fabric->rank);
    bool masters, pending;
    LOOM_TRY(loom_fabric_finalize_saves(l->fabric, true, &pending));
    LOOM_TRY(loom_agree(world, prepare(l, path, strict)));
    if (l->parts.module && l->parts.module->ddp)
        LOOM_TRY(loom__ddp_wait_parameters(l->parts.module->ddp));
    LOOM_TRY(loom_agree(world, read_tensors(l, &masters)));
    if (masters)
        LOOM_TRY(loom__ddp_gather(l->parts.module->ddp));
    return loom_agree(world, take_values(l));
}

loom_status loom_fabric_load(
    loom_fabric *fabric, const char *path, const loom_state *state, bool strict, loom_load_report *report) {
    loading l = {.fabric = fabric, .state = state};
    loom_status status = load_all(&l, path, strict);
    loom__load_destroy(l.load);
    if (status) {
        loom_load_report_free(&l.report);
        return status;
    }
    *report = l.report;
    return LOOM_OK;
}
