/* Parameters of one rank. The spec's part says which there are, its shard runs which canonical element lies where;
 * initial values, loading and gathering all go through them, so that no layout can change a number. */
#include "nn/parameters.h"
#include "base/random.h"
#include <stdlib.h>
#include <string.h>

/* The tensor ranks that share the parameter. */
static int tensor_size(const loom__parameter_set *set, const loom__parameter_descriptor *descriptor) {
    return descriptor->expert >= 0 && set->at.etp ? set->at.etp : set->at.tp;
}

static int tensor_rank(const loom__parameter_set *set, const loom__parameter_descriptor *descriptor) {
    return descriptor->expert >= 0 && set->at.etp ? set->at.etp_rank : set->at.tp_rank;
}

static loom_status make_parameter(loom__parameter_set *set, int64_t index) {
    const loom__part_entry *entry = &set->part->entries[index];
    const loom__parameter_descriptor *descriptor = entry->descriptor;
    loom_parameter *parameter = &set->parameters[index];
    int tp = tensor_size(set, descriptor), tp_rank = tensor_rank(set, descriptor);
    parameter->name = descriptor->name;
    parameter->dims = descriptor->dims;
    loom__parameter_local_shape(set->spec, descriptor, tp, parameter->shape);
    parameter->tensor_parallel = descriptor->shard != LOOM__SHARD_NONE && tp > 1;
    parameter->sequence_partial = descriptor->sequence_partial && set->at.sequence_parallel;
    parameter->tensor_partial = descriptor->tensor_partial && tp > 1;
    parameter->expert_parallel = loom__part_is_apart(set->part, descriptor);
    parameter->decay = descriptor->decay;
    parameter->embedding_or_output = descriptor->embedding_or_output;
    parameter->chunk = entry->chunk;
    parameter->shared_ends = entry->shared_ends;
    parameter->descriptor = descriptor;
    parameter->index = index;
    parameter->owned = entry->copy ? 0 : loom__parameter_owned_count(set->spec, descriptor, tp, tp_rank);
    int64_t count = loom_parameter_count(parameter);
    parameter->memory = parameter->data = calloc((size_t)count + 1, sizeof(float));
    return parameter->data
               ? LOOM_OK
               : loom_fail(LOOM_ERR_MEMORY, "out of memory for %s: %lld elements", parameter->name, (long long)count);
}

loom_status loom__parameter_set_create(
    const loom__model_spec *spec, const loom__part *part, const loom__tensor_place *at, loom__parameter_set **out) {
    loom__parameter_set *set = calloc(1, sizeof *set);
    if (!set)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the parameters of a model");
    *set = (loom__parameter_set){.spec = spec, .part = part, .at = *at};
    /* A stage of a pipeline may hold nothing at all. */
    const int64_t tensors = part->count + part->module_buffers;
    set->parameters = calloc((size_t)tensors + 1, sizeof *set->parameters);
    set->list = calloc((size_t)tensors + 1, sizeof *set->list);
    loom_status status = set->parameters && set->list
                             ? LOOM_OK
                             : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld parameters", (long long)tensors);
    for (int64_t i = 0; !status && i < tensors; i++) {
        set->list[i] = &set->parameters[i];
        status = make_parameter(set, i);
    }
    set->count = part->count;
    set->module_buffers = part->module_buffers;
    if (status) {
        loom__parameter_set_destroy(set);
        return status;
    }
    *out = set;
    return LOOM_OK;
}

void loom__parameter_set_destroy(loom__parameter_set *set) {
    if (!set)
        return;
    for (int64_t i = 0; set->parameters && i < set->part->count + set->part->module_buffers; i++)
        free(set->parameters[i].memory);
    free(set->parameters);
    free(set->list);
    free(set);
}

typedef struct fill_context {
    uint64_t seed, hash;
    const loom__parameter_descriptor *descriptor;
    float *data;
} fill_context;

static loom_status fill_run(void *context, int64_t local_first, int64_t canonical_first, int64_t count) {
    const fill_context *fill = context;
    if (canonical_first >= 0)
        loom__normal_fill(fill->seed, fill->hash, canonical_first, count, 0.0f, (float)fill->descriptor->std,
            fill->data + local_first);
    return LOOM_OK;
}

loom_status loom__parameter_set_initialize(loom__parameter_set *set, uint64_t seed) {
    for (int64_t i = 0; i < set->count; i++) {
        const loom__part_entry *entry = &set->part->entries[i];
        const loom__parameter_descriptor *descriptor = entry->descriptor;
        loom_parameter *parameter = &set->parameters[i];
        int64_t count = loom_parameter_count(parameter);
        float value = descriptor->initial == LOOM__INIT_ONE ? 1.0f : 0.0f;
        if (parameter->dtype != LOOM_F32)
            return loom_fail(LOOM_ERR_STATE, "%s is kept in %s: initial values are made in F32, before it is narrowed",
                parameter->name, loom_dtype_name(parameter->dtype));
        for (int64_t e = 0; e < count; e++)
            parameter->data[e] = value;
        if (descriptor->initial != LOOM__INIT_NORMAL)
            continue;
        uint64_t name = loom__hash_name(set->spec->parameters[entry->canonical].name);
        fill_context context = {seed, name, descriptor, parameter->data};
        LOOM_TRY(loom__parameter_shard_runs(
            set->spec, descriptor, tensor_size(set, descriptor), tensor_rank(set, descriptor), fill_run, &context));
    }
    return LOOM_OK;
}

loom_parameter *loom__parameter_set_find(const loom__parameter_set *set, const char *name) {
    for (int64_t i = 0; i < set->count + set->module_buffers; i++)
        if (strcmp(set->parameters[i].name, name) == 0)
            return &set->parameters[i];
    return NULL;
}

/* The local array, in its dtype, and the canonical one. */
typedef struct copy_context {
    loom_dtype dtype;
    void *local;
    float *canonical;
    int64_t owned;
} copy_context;

static uint16_t *narrow_at(const copy_context *copy, int64_t element) {
    return (uint16_t *)copy->local + element;
}

static float *wide_at(const copy_context *copy, int64_t element) {
    return (float *)copy->local + element;
}

static loom_status gather_run(void *context, int64_t local_first, int64_t canonical_first, int64_t count) {
    const copy_context *copy = context;
    int64_t end = local_first + count < copy->owned ? local_first + count : copy->owned, kept = end - local_first;
    if (canonical_first < 0 || kept <= 0)
        return LOOM_OK;
    float *to = copy->canonical + canonical_first;
    if (copy->dtype == LOOM_F32)
        memcpy(to, wide_at(copy, local_first), (size_t)kept * sizeof(float));
    else
        for (int64_t i = 0; i < kept; i++) {
            uint16_t value = *narrow_at(copy, local_first + i);
            to[i] = copy->dtype == LOOM_BF16 ? loom_bf16_to_f32(value) : loom_f16_to_f32(value);
        }
    return LOOM_OK;
}

static loom_status scatter_run(void *context, int64_t local_first, int64_t canonical_first, int64_t count) {
    const copy_context *copy = context;
    const float *from = copy->canonical + canonical_first;
    if (canonical_first < 0)
        memset((char *)copy->local + (size_t)local_first * loom_dtype_size(copy->dtype), 0,
            (size_t)count * loom_dtype_size(copy->dtype));
    else if (copy->dtype == LOOM_F32)
        memcpy(wide_at(copy, local_first), from, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++)
            *narrow_at(copy, local_first + i) =
                copy->dtype == LOOM_BF16 ? loom_f32_to_bf16(from[i]) : loom_f32_to_f16(from[i]);
    return LOOM_OK;
}

/* canonical = what this rank owns of the parameter, −0 elsewhere. */
static loom_status gather_own(
    const loom__parameter_set *set, int64_t index, loom__parameter_array array, float *canonical) {
    const loom__parameter_descriptor *descriptor = set->part->entries[index].descriptor;
    const loom_parameter *parameter = &set->parameters[index];
    int64_t count = loom__descriptor_count(descriptor);
    for (int64_t i = 0; i < count; i++)
        canonical[i] = -0.0F;
    copy_context context = {LOOM_F32, parameter->grad, canonical, parameter->owned};
    if (array == LOOM__PARAMETER_DATA) {
        context.dtype = parameter->dtype;
        context.local = loom_parameter_values(parameter);
    }
    return loom__parameter_shard_runs(
        set->spec, descriptor, tensor_size(set, descriptor), tensor_rank(set, descriptor), gather_run, &context);
}

/* Each canonical element is owned by one rank and −0 on the others, which adds nothing, not even to −0: the sum is a
 * copy. */
static loom_status join(loom_comm *group, float *canonical, int64_t count) {
    return group && loom_comm_size(group) > 1 ? loom_all_reduce(group, canonical, canonical, count, LOOM_F32, LOOM_SUM)
                                              : LOOM_OK;
}

loom_status loom__parameter_gather(
    const loom__parameter_set *set, int64_t index, loom__parameter_array array, loom_comm *tp, float *canonical) {
    LOOM_TRY(gather_own(set, index, array, canonical));
    return join(tp, canonical, loom__descriptor_count(set->part->entries[index].descriptor));
}

/* Where the parameters of the spec are. */
typedef struct places {
    int64_t *here;  /* number in this rank's set; -1 = not here, or a copy */
    int64_t *stage; /* place in the pipeline group of the one that holds it */
} places;

/* The stages ask each other instead of the configuration, so that whatever cut the model is followed. */
static loom_status find_stages(const loom__parameter_set *set, loom_comm *pp, const places *at) {
    const loom__model_spec *spec = set->spec;
    int64_t count = spec->count, *holders = malloc((size_t)(2 * count + 1) * sizeof *holders);
    if (!holders)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the places of %lld parameters", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        holders[i] = at->here[i] >= 0;
        holders[count + i] = at->here[i] >= 0 && pp ? loom_comm_rank(pp) : 0;
    }
    loom_status status =
        pp && loom_comm_size(pp) > 1 ? loom_all_reduce(pp, holders, holders, 2 * count, LOOM_I64, LOOM_SUM) : LOOM_OK;
    /* An expert that is not here is on another rank of its stage. */
    if (!status && set->experts)
        status = loom_all_reduce(set->experts, holders, holders, 2 * count, LOOM_I64, LOOM_MAX);
    for (int64_t i = 0; !status && i < count; i++) {
        at->stage[i] = holders[count + i];
        if (holders[i] != 1)
            status = loom_fail(LOOM_ERR_STATE, "%s is held by %lld stages of the pipeline, expected 1",
                spec->parameters[i].name, (long long)holders[i]);
    }
    loom_comm_free(pp ? pp : set->experts, holders);
    return status;
}

static loom_status visit_one(const loom__parameter_set *set, const places *at, int64_t number,
    loom__parameter_array array, loom_comm *tp, loom_comm *pp, float factor, loom__parameter_body body, void *context) {
    const loom__parameter_descriptor *descriptor = &set->spec->parameters[number];
    int64_t count = loom__descriptor_count(descriptor);
    float *canonical = malloc((size_t)(count + 1) * sizeof *canonical);
    if (!canonical)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", descriptor->name);
    loom_status status = LOOM_OK;
    int64_t here = at->here[number];
    bool expert = descriptor->expert >= 0, mine = !pp || loom_comm_rank(pp) == at->stage[number];
    memset(canonical, 0, (size_t)count * sizeof *canonical);
    if (here >= 0)
        status = gather_own(set, here, array, canonical);
    if (!status && mine)
        status = join(expert ? set->experts : tp, canonical, count);
    if (!status && pp && loom_comm_size(pp) > 1)
        status = loom_broadcast(pp, canonical, count, LOOM_F32, (int)at->stage[number]);
    for (int64_t i = 0; !status && factor != 1 && i < count; i++)
        canonical[i] *= factor;
    if (!status)
        status = body(context, number, canonical);
    loom_comm_free(tp ? tp : pp ? pp : set->experts, canonical);
    return status;
}

loom_status loom__parameter_set_visit(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp,
    loom_comm *pp, float factor, loom__parameter_body body, void *context) {
    int64_t count = set->spec->count;
    places at = {malloc((size_t)(count + 1) * sizeof(int64_t)), malloc((size_t)(count + 1) * sizeof(int64_t))};
    loom_status status = at.here && at.stage ? LOOM_OK
                                             : loom_fail(LOOM_ERR_MEMORY,
                                                   "out of memory for the places of %lld parameters", (long long)count);
    for (int64_t i = 0; !status && i < count; i++)
        at.here[i] = -1;
    for (int64_t i = 0; !status && i < set->count; i++)
        if (!set->part->entries[i].copy)
            at.here[set->part->entries[i].canonical] = i;
    if (!status)
        status = find_stages(set, pp, &at);
    for (int64_t i = 0; !status && i < count; i++)
        status = visit_one(set, &at, i, array, tp, pp, factor, body, context);
    free(at.here);
    free(at.stage);
    return status;
}

loom_status loom__parameter_scatter(loom__parameter_set *set, int64_t index, const float *canonical) {
    const loom__parameter_descriptor *descriptor = set->part->entries[index].descriptor;
    const loom_parameter *parameter = &set->parameters[index];
    copy_context context = {parameter->dtype, loom_parameter_values(parameter), (float *)(uintptr_t)canonical, 0};
    return loom__parameter_shard_runs(
        set->spec, descriptor, tensor_size(set, descriptor), tensor_rank(set, descriptor), scatter_run, &context);
}
