/* The plan of one rank: each rectangle that it wants meets each rectangle that a checkpoint has of the same parameter.
 * The invariant: the copies of a plan write each wanted element once; where they do not write all, the plan says so,
 * and where they would write one twice there is no plan. */
#include "checkpoint/reshard.h"
#include "checkpoint/source.h"
#include <stdlib.h>

typedef struct planner {
    const loom__reshard_source *source;
    const loom__model_spec *spec;
    int64_t tp, tp_rank, room;
    loom__reshard_plan *plan;
} planner;

static loom_status add_copy(planner *p, const loom__reshard_copy *copy) {
    loom__reshard_plan *plan = p->plan;
    if (plan->count == p->room) {
        int64_t room = p->room ? 2 * p->room : 256;
        loom__reshard_copy *grown = realloc(plan->copies, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan of %lld copies", (long long)room);
        plan->copies = grown;
        p->room = room;
    }
    plan->copies[plan->count++] = *copy;
    return LOOM_OK;
}

/* The first piece of an array of a parameter; those behind it may be others'. */
static int64_t first_piece(const loom__reshard_source *source, int array, int64_t canonical) {
    int64_t low = 0, high = source->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        const loom__source_piece *piece = &source->pieces[middle];
        if (piece->array < array || (piece->array == array && piece->canonical < canonical))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Elements of a box that are no padding of the vocabulary. */
static int64_t real_elements(
    const loom__parameter_descriptor *parameter, int64_t first_row, int64_t rows, int64_t columns) {
    int64_t left = parameter->shape[0] - first_row;
    left = left < 0 ? 0 : left;
    return (rows < left ? rows : left) * columns;
}

/* *found grows by what the copies write, *wanted by what there is to write. */
static loom_status fill_box(
    planner *p, const loom__reshard_want *want, int64_t number, const loom__box *box, int64_t *wanted, int64_t *found) {
    const loom__parameter_descriptor *parameter = &p->spec->parameters[want->canonical];
    const loom__reshard_source *source = p->source;
    *wanted += real_elements(parameter, box->first[0], box->count[0], box->count[1]);
    for (int64_t i = first_piece(source, want->array, want->canonical); i < source->count; i++) {
        const loom__source_piece *piece = &source->pieces[i];
        loom__reshard_copy copy = {.tensor = piece->tensor, .chunk = piece->chunk, .want = number};
        if (piece->array != want->array || piece->canonical != want->canonical)
            break;
        if (!loom__box_meet(&piece->box, box, &copy.copy))
            continue;
        int64_t first = piece->box.first[0] > box->first[0] ? piece->box.first[0] : box->first[0];
        *found += real_elements(parameter, first, copy.copy.rows, copy.copy.columns);
        LOOM_TRY(add_copy(p, &copy));
    }
    return LOOM_OK;
}

static loom_status check_want(const planner *p, const loom__reshard_want *want, int64_t number) {
    int64_t shape[2] = {0, 0};
    bool fits =
        want->canonical >= 0 && want->canonical < loom__spec_tensors(p->spec) && want->first >= 0 && want->count >= 0;
    if (fits)
        loom__parameter_local_shape(p->spec, &p->spec->parameters[want->canonical], p->tp, shape);
    if (!fits || want->first > shape[0] * shape[1] - want->count)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "reshard: want %lld is %lld elements from %lld on of parameter %lld: expected them inside %lld x %lld",
            (long long)number, (long long)want->count, (long long)want->first, (long long)want->canonical,
            (long long)shape[0], (long long)shape[1]);
    return LOOM_OK;
}

static loom_status fill_want(planner *p, const loom__reshard_want *want, int64_t number) {
    LOOM_TRY(check_want(p, want, number));
    const loom__parameter_descriptor *parameter = &p->spec->parameters[want->canonical];
    loom__shard_box shards[LOOM__SHARD_BOXES];
    int64_t wanted = 0, found = 0;
    int count = loom__shard_boxes(p->spec, parameter, p->tp, p->tp_rank, shards);
    for (int i = 0; i < count; i++) {
        loom__box boxes[LOOM__RANGE_BOXES];
        int made = loom__box_range(&shards[i].box, want->first, want->count, want->at, boxes);
        for (int j = 0; j < made; j++)
            LOOM_TRY(fill_box(p, want, number, &boxes[j], &wanted, &found));
    }
    if (found < wanted)
        p->plan->missing[p->plan->missing_count++] = number;
    return LOOM_OK;
}

static int compare_copies(const void *left, const void *right) {
    const loom__reshard_copy *a = left, *b = right;
    if (a->tensor != b->tensor)
        return a->tensor < b->tensor ? -1 : 1;
    if (a->chunk != b->chunk)
        return a->chunk < b->chunk ? -1 : 1;
    return a->copy.from < b->copy.from ? -1 : a->copy.from > b->copy.from;
}

loom_status loom__reshard_plan_create(const loom__reshard_source *source, const loom__model_spec *spec, int64_t tp,
    int64_t tp_rank, const loom__reshard_want *wants, int64_t count, loom__reshard_plan **out) {
    loom__reshard_plan *plan = calloc(1, sizeof *plan);
    if (plan)
        plan->missing = calloc((size_t)count + 1, sizeof *plan->missing);
    loom_status status = LOOM_OK;
    if (!plan || !plan->missing)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan of %lld tensors", (long long)count);
    planner p = {.source = source, .spec = spec, .tp = tp, .tp_rank = tp_rank, .plan = plan};
    for (int64_t i = 0; i < count && !status; i++)
        status = fill_want(&p, &wants[i], i);
    if (status) {
        loom__reshard_plan_destroy(plan);
        return status;
    }
    if (plan->count)
        qsort(plan->copies, (size_t)plan->count, sizeof *plan->copies, compare_copies);
    *out = plan;
    return LOOM_OK;
}

void loom__reshard_plan_destroy(loom__reshard_plan *plan) {
    if (!plan)
        return;
    free(plan->copies);
    free(plan->missing);
    free(plan);
}
