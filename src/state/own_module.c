/* The state of a module that has no specification, whose parameters are known by their names alone. Nobody knows how a
 * shard of the tensor ranks lies in the whole, so shards are stored side by side: such a tensor is of use at the same
 * number of tensor ranks only. What an optimizer keeps is stored flat, so that it can be shared out over any number of
 * data-parallel ranks. The invariant: each element of each tensor is the main one of exactly one rank. */
#include "ddp/ddp.h"
#include "optim/optim.h"
#include "state/state.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct listing {
    const loom_parallel *parallel;
    const loom__optimizer_state *optimizer; /* NULL: none */
    loom__own_state *state;
    int tp, tp_rank, dp_rank;
} listing;

/* In front of the axes of a shard comes one for the tensor ranks. */
static void put_rank(const listing *l, const loom_parameter *parameter, loom__own_entry *entry) {
    if (!parameter->tensor_parallel)
        return;
    for (int i = entry->dims; i > 0; i--) {
        entry->shape[i] = entry->shape[i - 1];
        entry->offset[i] = entry->offset[i - 1];
        entry->size[i] = entry->size[i - 1];
    }
    entry->dims++;
    entry->shape[0] = l->tp;
    entry->offset[0] = l->tp_rank;
    entry->size[0] = 1;
}

static loom_status put_key(loom__own_entry *entry, const char *array, const loom_parameter *parameter) {
    const char *front = array ? "optimizer.state." : "", *dot = array ? "." : "";
    int bytes = snprintf(entry->key, sizeof entry->key, "%s%s%s%s", front, array ? array : "", dot, parameter->name);
    if (bytes >= (int)sizeof entry->key)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: the parameter name %.40s… makes a checkpoint key of %d bytes; at most %zu",
            parameter->name, bytes, sizeof entry->key - 1);
    return LOOM_OK;
}

static bool holds_first(const listing *l, const loom_parameter *parameter) {
    return parameter->tensor_parallel || l->tp_rank == 0;
}

static loom_status add_weight(const listing *l, const loom_parameter *parameter) {
    loom__own_entry *entry = &l->state->entries[l->state->count++];
    *entry = (loom__own_entry){.is_main = l->dp_rank == 0 && holds_first(l, parameter),
        .dtype = LOOM_F32,
        .dims = parameter->dims,
        .values = parameter->data};
    for (int i = 0; i < parameter->dims; i++)
        entry->shape[i] = entry->size[i] = parameter->shape[i];
    put_rank(l, parameter, entry);
    return put_key(entry, NULL, parameter);
}

/* The arrays of the parameter at one place of the optimizer's, as far as this rank updates it. */
static loom_status add_arrays(const listing *l, const loom__ddp_view *view, int64_t place) {
    const loom__ddp_part *part = &view->parts[place];
    const loom_parameter *parameter = view->parameters[place];
    for (int i = 0; i < l->optimizer->count; i++) {
        const struct loom__optimizer_array *array = &l->optimizer->arrays[i];
        loom__own_entry *entry = &l->state->entries[l->state->count++];
        *entry = (loom__own_entry){.of_optimizer = true,
            .is_main =
                part->count > 0 && l->dp_rank / view->share[LOOM__DDP_DENSE].shards == 0 && holds_first(l, parameter),
            .dtype = array->dtype,
            .dims = 1,
            .shape = {loom_parameter_count(parameter)},
            .offset = {part->count > 0 ? part->start - view->places[place].start : 0},
            .size = {part->count},
            .values = (char *)array->values + (size_t)part->state * loom_dtype_size(array->dtype)};
        put_rank(l, parameter, entry);
        LOOM_TRY(put_key(entry, array->name, parameter));
    }
    return LOOM_OK;
}

static loom_status list_all(listing *l) {
    const loom_parallel *parallel = l->parallel;
    const loom__ddp_view *view = parallel->ddp ? loom__ddp_view_of(parallel->ddp) : NULL;
    int64_t arrays = l->optimizer ? l->optimizer->count : 0;
    l->state->entries = calloc((size_t)(parallel->parameter_count * (1 + arrays)) + 1, sizeof *l->state->entries);
    if (!l->state->entries)
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory for the state of %lld parameters", (long long)parallel->parameter_count);
    for (int64_t i = 0; i < parallel->parameter_count; i++)
        LOOM_TRY(add_weight(l, parallel->parameters[i]));
    for (int64_t place = 0; arrays && place < view->place_count; place++)
        LOOM_TRY(add_arrays(l, view, place));
    return LOOM_OK;
}

loom_status loom__own_state_create(
    const loom_parallel *parallel, const loom_optimizer *optimizer, loom__own_state **out) {
    if (loom_parallel_dtype(parallel) != LOOM_F32)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: checkpoints of a module that was not made by loom_gpt_create with %s weights; only "
            "fp32",
            loom_dtype_name(loom_parallel_dtype(parallel)));
    loom_comm *const *groups = parallel->fabric->groups;
    listing l = {.parallel = parallel,
        .optimizer = optimizer ? loom__optimizer_state_of(optimizer) : NULL,
        .state = calloc(1, sizeof *l.state),
        .tp = loom_comm_size(groups[LOOM_GROUP_TP]),
        .tp_rank = loom_comm_rank(groups[LOOM_GROUP_TP]),
        .dp_rank = loom_comm_rank(groups[LOOM_GROUP_DP_CP])};
    loom_status status = l.state ? list_all(&l) : loom_fail(LOOM_ERR_MEMORY, "out of memory for the state of a module");
    if (status) {
        loom__own_state_destroy(l.state);
        return status;
    }
    *out = l.state;
    return LOOM_OK;
}

void loom__own_state_destroy(loom__own_state *state) {
    if (!state)
        return;
    free(state->entries);
    free(state);
}

/* ---- loading */

/* NULL where the checkpoint has none of that name; *fits is whether it has the entry's shape. */
static const loom_checkpoint_tensor *find(const loom__own_entry *entry, const loom__load_scope *scope, bool *fits) {
    *fits = false;
    for (int64_t i = 0; i < loom_checkpoint_get_info(scope->checkpoint)->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(scope->checkpoint, i);
        const char *key = loom__load_scope_key(scope, tensor->name);
        if (!key || strcmp(key, entry->key) != 0)
            continue;
        *fits = tensor->dims == entry->dims;
        for (int axis = 0; axis < entry->dims && *fits; axis++)
            *fits = tensor->shape[axis] == entry->shape[axis];
        return tensor;
    }
    return NULL;
}

static bool has_key(const loom__own_state *state, const char *key) {
    for (int64_t i = 0; i < state->count; i++)
        if (strcmp(state->entries[i].key, key) == 0)
            return true;
    return false;
}

static bool wants_optimizer(const loom__own_state *state) {
    return state->count > 0 && state->entries[state->count - 1].of_optimizer;
}

static loom_status list_unexpected(
    const loom__own_state *state, const loom__load_scope *scope, loom_load_report *report) {
    for (int64_t i = 0; i < loom_checkpoint_get_info(scope->checkpoint)->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(scope->checkpoint, i);
        const char *key = loom__load_scope_key(scope, tensor->name);
        if (!key || loom__is_extra_state(key) || has_key(state, key))
            continue;
        if (wants_optimizer(state) || strncmp(key, "optimizer.", strlen("optimizer.")) != 0)
            LOOM_TRY(loom__names_add(&report->unexpected, &report->unexpected_count, "", tensor->name));
    }
    return LOOM_OK;
}

loom_status loom__own_list(const loom__own_state *state, const loom__load_scope *scope, loom_load_report *report) {
    for (int64_t i = 0; i < state->count; i++) {
        const loom__own_entry *entry = &state->entries[i];
        bool fits;
        const loom_checkpoint_tensor *tensor = find(entry, scope, &fits);
        if (tensor && !fits)
            LOOM_TRY(loom__names_add(&report->misshaped, &report->misshaped_count, "", tensor->name));
        if (!fits)
            LOOM_TRY(loom__names_add(&report->missing, &report->missing_count, scope->prefix, entry->key));
    }
    return list_unexpected(state, scope, report);
}

static loom_status read_narrow(
    const loom__own_entry *entry, const loom_checkpoint *checkpoint, const loom_checkpoint_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < entry->dims; i++)
        count *= entry->size[i];
    float *wide = malloc((size_t)count * sizeof *wide + 1);
    if (!wide)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld elements of %s", (long long)count, tensor->name);
    loom_status status = loom_checkpoint_read(checkpoint, tensor, entry->offset, entry->size, LOOM_F32, wide);
    for (int64_t i = 0; i < count && !status; i++)
        ((uint16_t *)entry->values)[i] = loom_f32_to_bf16(wide[i]);
    free(wide);
    return status;
}

loom_status loom__own_read(const loom__own_state *state, const loom__load_scope *scope) {
    for (int64_t i = 0; i < state->count; i++) {
        const loom__own_entry *entry = &state->entries[i];
        bool fits;
        const loom_checkpoint_tensor *tensor = find(entry, scope, &fits);
        if (!fits || entry->size[entry->dims - 1] == 0)
            continue;
        if (entry->dtype == LOOM_BF16)
            LOOM_TRY(read_narrow(entry, scope->checkpoint, tensor));
        else
            LOOM_TRY(
                loom_checkpoint_read(scope->checkpoint, tensor, entry->offset, entry->size, LOOM_F32, entry->values));
    }
    return LOOM_OK;
}
