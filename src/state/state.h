/* Saving and loading states: what the files of it share. */
#ifndef STATE_STATE_H
#define STATE_STATE_H

#include "checkpoint/reshard.h"
#include "strategy/strategy.h"
#include <megaloom/checkpoint.h>
#include <megaloom/state.h>

enum { LOOM__STATE_PREFIX_BYTES = 64, LOOM__STATE_NAME_BYTES = LOOM__STATE_KEY_BYTES + LOOM__STATE_PREFIX_BYTES };

/* A module of a state, and the optimizer of the state that is its. */
typedef struct loom__state_module {
    const char *key, *optimizer_key; /* borrowed from the state; NULL without an optimizer, as is that */
    bool is_main;
    char prefix[LOOM__STATE_PREFIX_BYTES]; /* of its tensors and objects in a checkpoint: "" of the main one, or "KEY."
                                            */
    loom_parallel *module;
    loom_optimizer *optimizer;
} loom__state_module;

/* LOOM_ERR_ARGUMENT for a state that cannot be. */
loom_status loom__state_check(const loom_state *state);
/* The module of that number, in a state that was checked; 0 is the main one, whose keys in a checkpoint have no prefix.
 * false: there is none. */
bool loom__state_module_at(const loom_state *state, int64_t number, loom__state_module *module);
/* Whether a name is key + "." + more. */
static inline bool loom__begins_with(const char *name, const char *key) {
    size_t bytes = strlen(key);
    return strncmp(name, key, bytes) == 0 && name[bytes] == '.';
}
/* The item of that key, or NULL. */
const loom_state_item *loom__state_item(const loom_state *state, const char *key);
static inline bool loom__state_is_plain(const loom_state_item *item) {
    return !item->module && !item->optimizer;
}

/* The layout of a module, whose spec is the module's; *stages are the layout's, for free(). The state of an optimizer
 * that is not distributed is not shared out: dp is 1. */
loom_status loom__parallel_layout(const loom_parallel *parallel, loom__sharded_layout *layout, loom_stage **stages);
/* This rank's place in it. */
loom__sharded_place loom__parallel_place(const loom_parallel *parallel);
/* The same as a value of the common state, and back: *found is false where a checkpoint has none. */
loom_status loom__layout_value(loom_value_pool *pool, const loom__sharded_layout *layout, const loom_value **value);
loom_status loom__layout_read(const loom_value *common, loom__sharded_layout *layout, loom_stage **stages, bool *found);

/* loom_value_set of a new text or bool. */
loom_status loom__set_text(loom_value_pool *pool, loom_value *dict, const char *key, const char *of);
loom_status loom__set_bool(loom_value_pool *pool, loom_value *dict, const char *key, bool of);

/* What a checkpoint says of an optimizer beside its tensors, wherever its form has it. */
typedef struct loom__optimizer_values {
    const loom_value *groups;   /* param_groups: LIST, those of experts behind the others */
    int64_t steps;              /* updates so far; below 0: not said */
    const loom_value *scaler;   /* grad_scaler: DICT, empty for a constant loss scale; NULL without one */
    const loom_value *schedule; /* opt_param_scheduler: DICT */
} loom__optimizer_values;
/* experts: they have an optimizer of their own (loom__layout_chains), and so groups. */
loom_status loom__optimizer_values_of(
    loom_value_pool *pool, const loom_optimizer *optimizer, bool experts, loom__optimizer_values *values);
/* For a layout that chains optimizers: where a checkpoint has experts among the rest, the groups that theirs were in
 * are groups of experts too. Lives as long as the pool. */
loom_status loom__optimizer_values_for(
    loom_value_pool *pool, const loom__sharded_layout *layout, loom__optimizer_values *values);
/* "optimizer" of the common state, in the form of the options; with experts, a DICT by number of one for the other
 * parameters and one for theirs. What `rest` (an optimizer of that state, one or several, or NULL) has that is of
 * no form goes along. */
loom_status loom__optimizer_common_value(loom_value_pool *pool, const loom__sharded_options *options, bool experts,
    const loom__optimizer_values *values, const loom_value *rest, loom_value **value);
/* The first of several optimizers that are chained in a LIST, or in a DICT by number; else the value itself. */
const loom_value *loom__first_optimizer(const loom_value *value);
/* The content of an object (of experts: entry->expert); buckets and values only of those that have some. */
loom_status loom__object_value(loom_value_pool *pool, const loom__state_entry *entry,
    const loom__sharded_options *options, const loom__state_buckets *buckets, const loom__optimizer_values *values,
    const loom_value **value);
/* "content_metadata" of the common state. */
loom_status loom__content_value(loom_value_pool *pool, const loom__content_metadata *content, loom_value **value);

/* ---- modules that were not made by loom_gpt_create */

/* One tensor of such a module or its optimizer, as a checkpoint has it, and this rank's part of it. */
typedef struct loom__own_entry {
    char key[LOOM__STATE_KEY_BYTES];
    bool of_optimizer;
    bool is_main; /* this rank writes it; others hold the same */
    loom_dtype dtype;
    int dims;
    int64_t shape[LOOM__STATE_DIMS], offset[LOOM__STATE_DIMS], size[LOOM__STATE_DIMS];
    void *values; /* [size…], of the module or the optimizer */
} loom__own_entry;
typedef struct loom__own_state {
    int64_t count;
    loom__own_entry *entries;
} loom__own_state;
/* A parameter NAME is the tensor NAME, [its shape], or [tp, its shape] where it is a shard of the tensor ranks; an
 * array of its optimizer is optimizer.state.ARRAY.NAME, [elements] or [tp, elements]. optimizer may be NULL. */
loom_status loom__own_state_create(
    const loom_parallel *parallel, const loom_optimizer *optimizer, loom__own_state **state);
void loom__own_state_destroy(loom__own_state *state); /* NULL is accepted */

/* ---- loading */

/* What of a checkpoint is one module's. */
typedef struct loom__load_scope {
    const loom_checkpoint *checkpoint;
    const loom_value *root;   /* as the common state of a checkpoint of this module alone; NULL: there is none */
    const loom_value *others; /* modules of the checkpoint that have a prefix: DICT by key, or NULL */
    char prefix[LOOM__STATE_PREFIX_BYTES]; /* of the names of its tensors and objects */
} loom__load_scope;
/* Finds the module where the checkpoint has it. */
loom__load_scope loom__load_scope_of(const loom_checkpoint *checkpoint, const loom__state_module *module);
/* The name without the prefix; NULL for one that is another module's. */
const char *loom__load_scope_key(const loom__load_scope *scope, const char *name);

/* Whether a key, without a prefix, is of an optimizer; of several that are chained it says which. */
static inline bool loom__is_of_optimizer(const char *key) {
    static const char chained[] = "chained_", own[] = "optimizer.";
    if (strncmp(key, chained, sizeof chained - 1) == 0 && strchr(key, '.'))
        key = strchr(key, '.') + 1;
    return strncmp(key, own, sizeof own - 1) == 0;
}

/* Whether a tensor is what Transformer Engine keeps beside a layer's parameters, which no load misses or minds. */
static inline bool loom__is_extra_state(const char *key) {
    static const char end[] = "_extra_state";
    size_t bytes = strlen(key);
    return bytes >= sizeof end - 1 && strcmp(key + bytes - (sizeof end - 1), end) == 0;
}

/* What a level makes of the lists of a report on `where`, which may be a path: an error, a line in the log of rank 0,
 * or an empty list. Not collective. LOOM_ERR_NOT_FOUND; LOOM_ERR_ARGUMENT for a level that is none; LOOM_ERR_MEMORY. */
loom_status loom__strict_apply(loom_strict strict, loom_rank *rank, const char *where, loom_load_report *report);
/* The level for a module's own dict, where what raises for one raises for both. */
loom_strict loom__strict_of_module(loom_strict strict);
/* Adds prefix and name to a list. LOOM_ERR_MEMORY. */
loom_status loom__names_add(char ***names, int64_t *count, const char *prefix, const char *name);
void loom__names_free(char **names, int64_t count);

/* The lists of a report for such a module: they grow. */
loom_status loom__own_list(const loom__own_state *state, const loom__load_scope *scope, loom_load_report *report);
/* Reads what there is of it. */
loom_status loom__own_read(const loom__own_state *state, const loom__load_scope *scope);

/* A checkpoint that is sorted to the parameters of a module of loom_gpt_create. */
typedef struct loom__load loom__load;

/* optimizer may be NULL. Not collective: the same on every rank. Errors: those of loom__reshard_source_create. */
loom_status loom__load_create(
    const loom_parallel *parallel, const loom_optimizer *optimizer, const loom__load_scope *scope, loom__load **load);
void loom__load_destroy(loom__load *load); /* NULL is accepted */

/* The lists of a report, over the whole model, the same on every rank: they grow. */
loom_status loom__load_list(const loom__load *load, loom_load_report *report);
/* Reads this rank's part of what there is. *masters: whether the parameters were read as the optimizer's masters, so
 * that with shards they are to be gathered. */
loom_status loom__load_read(const loom__load *load, bool *masters);
/* What the checkpoint says of an optimizer, each NULL (steps: -1) where it does not; every group has a "step" where
 * there are steps. Borrowed from the checkpoint and the pool. */
loom_status loom__optimizer_values_read(
    const loom__load_scope *scope, loom_value_pool *pool, loom__optimizer_values *values);
/* Updates so far and schedule of the optimizer, as far as the checkpoint has them. */
loom_status loom__load_optimizer(loom_optimizer *optimizer, const loom__load_scope *scope);

#endif
