/* Bucketed gradient reduction. A bucket starts when all its parameters and all earlier buckets of its buffer are ready,
 * so that every rank starts the same collectives of a group in the same order although its parameters may become ready
 * in another one; dense and expert buckets have groups of their own, and do not wait for each other.
 * Invariant: buckets of a region before next have started, the others have not, and a started bucket's gradients are
 * not touched until finish has waited for it. Nothing here depends on the values of gradients: a NaN found on one rank
 * is remembered, its bucket is reduced all the same, and finish tells all members. */
#include "ddp/state.h"
#include "runtime/spans.h"
#include <math.h>
#include <megaloom/kernels.h>
#include <stdio.h>
#include <string.h>

static void remember(loom__ddp *ddp, loom_status status) {
    if (!status || ddp->failure)
        return;
    ddp->failure = status;
    snprintf(ddp->message, sizeof ddp->message, "%s", loom_error_message());
}

/* The part of the bucket whose sum this rank has after a reduction. */
static void summed_range(const loom__ddp *ddp, int64_t index, int64_t *start, int64_t *count) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    const loom__ddp_share *share = loom__ddp_share_of(ddp, bucket);
    bool parts = share->shards == loom_comm_size(share->group);
    *count = parts ? loom__ddp_part_length(ddp, bucket) : bucket->end - bucket->start;
    *start = bucket->start + (parts ? share->shard * *count : 0);
}

void loom__ddp_add_span(loom__ddp *ddp, int64_t index, loom_span_kind kind, const loom__ddp_times *times) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    bool wide = kind == LOOM_SPAN_GRADIENT_REDUCTION && !ddp->reduced16;
    size_t size = loom_dtype_size(wide ? LOOM_F32 : ddp->view.dtype);
    loom__span_add(ddp->rank,
        &(loom__span){kind, index, (bucket->end - bucket->start) * (int64_t)size, times->started, times->ended});
}

static loom_status wait_bucket(loom__ddp *ddp, int64_t index) {
    loom__ddp_bucket_state *state = &ddp->states[index];
    bool under_way = state->request != NULL;
    loom_status status = loom_wait(state->request);
    state->request = NULL;
    if (!status && under_way)
        loom__ddp_add_span(ddp, index, LOOM_SPAN_GRADIENT_REDUCTION, &state->reduction);
    if (!status && state->widen) {
        int64_t start, count;
        summed_range(ddp, index, &start, &count);
        ddp->narrow->widen(loom_rank_team(ddp->rank), count, ddp->reduced16 + start, ddp->view.grad + start);
    }
    state->widen = false;
    return status;
}

loom_status loom__ddp_wait_reductions(loom__ddp *ddp) {
    loom_status first = LOOM_OK;
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++)
        for (int64_t i = ddp->region[kind].first; i < ddp->region[kind].next; i++) {
            loom_status status = wait_bucket(ddp, i);
            first = first ? first : status;
        }
    return first;
}

void loom__ddp_begin_step(loom__ddp *ddp) {
    /* A step that was given up may have left buckets under way, whose memory is about to be written. */
    (void)loom__ddp_wait_reductions(ddp);
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++)
        ddp->region[kind].next = ddp->region[kind].first;
    ddp->last = false;
    ddp->failure = LOOM_OK;
    ddp->bad_microbatch = -1;
    ddp->nonfinite[0] = '\0';
    for (int64_t i = 0; i < ddp->view.bucket_count; i++)
        ddp->states[i].waiting = ddp->view.buckets[i].places;
    for (int64_t place = 0; place < ddp->view.place_count; place++) {
        ddp->parameters[place]->grad_written = false;
        ddp->ready[place] = ddp->graph_known && ddp->unused[place];
        if (ddp->ready[place])
            ddp->states[ddp->view.places[place].bucket].waiting--;
    }
}

void loom__ddp_expect_last(loom__ddp *ddp, bool last) {
    ddp->last = last;
    /* Reductions and gathers may share a group, on which all members must start them in one order. */
    if (last)
        remember(ddp, loom__ddp_start_gathers(ddp, ddp->chunks));
}

void loom__ddp_sync_parameters(loom__ddp *ddp, int64_t chunk) {
    remember(ddp, loom__ddp_start_gathers(ddp, chunk));
}

/* A NaN in a backward spoils all that comes behind it, and last the first norm of a chunk, or its first bias: looking
 * at that one costs nothing beside the microbatch. */
static loom_parameter *find_probe(const loom__ddp *ddp, int64_t chunk) {
    const loom__ddp_region *dense = &ddp->region[LOOM__DDP_DENSE];
    for (int64_t place = ddp->view.place_count - 1; place >= 0; place--)
        if (ddp->view.places[place].bucket < dense->end && ddp->parameters[place]->chunk == chunk &&
            ddp->parameters[place]->dims == 1)
            return ddp->view.places[place].bucket >= dense->next ? ddp->parameters[place] : NULL;
    return NULL;
}

void loom__ddp_note_microbatch(loom__ddp *ddp, int64_t microbatch) {
    if (!ddp->options.check_for_nan_in_grad || ddp->bad_microbatch >= 0)
        return;
    for (int64_t chunk = 0; chunk < ddp->chunks; chunk++) {
        const loom_parameter *probe = find_probe(ddp, chunk);
        if (probe && probe->grad_written &&
            loom_rank_kernels(ddp->rank)->has_nonfinite(
                loom_rank_team(ddp->rank), loom_parameter_count(probe), probe->grad))
            ddp->bad_microbatch = microbatch;
    }
}

const char *loom__ddp_nonfinite(const loom__ddp *ddp) {
    return ddp->nonfinite[0] ? ddp->nonfinite : NULL;
}

static loom_status check_finite(const loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    const loom_kernels *kernels = loom_rank_kernels(ddp->rank);
    loom_team *team = loom_rank_team(ddp->rank);
    char since[48] = "";
    if (!kernels->has_nonfinite(team, bucket->end - bucket->start, ddp->view.grad + bucket->start))
        return LOOM_OK;
    if (ddp->bad_microbatch >= 0)
        snprintf(since, sizeof since, "since microbatch %lld, ", (long long)ddp->bad_microbatch);
    else if (ddp->options.microbatches_noted)
        snprintf(since, sizeof since, "in the last microbatch, ");
    for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++)
        if (kernels->has_nonfinite(team, ddp->view.places[place].count, ddp->parameters[place]->grad))
            return loom_fail(LOOM_ERR_NUMERIC,
                "the gradient of %s has a NaN or an infinity before its reduction (%sbucket %lld of %lld, rank %d)",
                ddp->parameters[place]->name, since, (long long)index, (long long)ddp->view.bucket_count,
                loom_rank_index(ddp->rank));
    return loom_fail(LOOM_ERR_INTERNAL, "bucket %lld has a NaN or an infinity between its parameters (rank %d)",
        (long long)index, loom_rank_index(ddp->rank));
}

/* Several instances need the sum in several places, added up in the order that one instance has: an all-reduce. */
static loom_status start_reduction(loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    const loom__ddp_share *share = loom__ddp_share_of(ddp, bucket);
    loom_comm *group = share->group;
    loom_request **request = &ddp->states[index].request;
    float *grad = ddp->view.grad + bucket->start;
    int64_t length = loom__ddp_part_length(ddp, bucket);
    if (loom_comm_size(group) == 1 || ddp->options.leave_reduction)
        return LOOM_OK;
    loom_dtype dtype = LOOM_F32;
    void *whole = grad, *part = grad + share->shard * length;
    if (ddp->reduced16) {
        uint16_t *narrow = ddp->reduced16 + bucket->start;
        ddp->narrow->narrow(loom_rank_team(ddp->rank), bucket->end - bucket->start, grad, narrow);
        ddp->states[index].widen = true;
        dtype = ddp->view.dtype;
        whole = narrow;
        part = narrow + share->shard * length;
    }
    loom__ddp_times *times = &ddp->states[index].reduction;
    times->started = loom__span_clock(ddp->rank);
    if (share->shards < loom_comm_size(group)) {
        LOOM_TRY(loom_all_reduce_start(group, whole, whole, bucket->end - bucket->start, dtype, LOOM_SUM, request));
    } else {
        for (int64_t i = 0; i < share->shards; i++)
            ddp->part_counts[i] = length;
        LOOM_TRY(loom_reduce_scatter_v_start(group, whole, part, ddp->part_counts, dtype, LOOM_SUM, request));
    }
    if (times->started)
        loom__request_time(*request, &times->ended);
    return LOOM_OK;
}

/* A gradient that is not finite is a failure, or, under a loss scale, noted for the message about the step that is
 * skipped. */
static void look(loom__ddp *ddp, int64_t index) {
    loom_status status = check_finite(ddp, index);
    if (status != LOOM_ERR_NUMERIC || !ddp->options.note_nonfinite)
        remember(ddp, status);
    else if (!ddp->nonfinite[0])
        snprintf(ddp->nonfinite, sizeof ddp->nonfinite, "%s", loom_error_message());
}

/* Megatron-Core's rule: a norm is unexpected where it is so many times the largest of the first ones. NaNs and
 * infinities are another check's. */
static void look_for_large(loom__ddp *ddp, int64_t index) {
    enum { LEARNS_FROM = 100, TIMES = 10 };
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    loom_exact_sum sum = {0};
    loom_rank_kernels(ddp->rank)->exact_sum(
        loom_rank_team(ddp->rank), 2, bucket->end - bucket->start, ddp->view.grad + bucket->start, &sum);
    if (sum.nonfinite)
        return;
    double norm = sqrt(loom_exact_sum_value(&sum, 2));
    if (ddp->norms_seen < LEARNS_FROM) {
        ddp->norms_seen++;
        ddp->largest_norm = norm > ddp->largest_norm ? norm : ddp->largest_norm;
        return;
    }
    if (norm >= TIMES * ddp->largest_norm)
        loom_rank_log(ddp->rank, LOOM_LOG_WARNING,
            "gradients of bucket %lld of %lld have norm %.6g before their reduction, %d times the largest of the first "
            "%d, %.6g, or more (rank %d)",
            (long long)index, (long long)ddp->view.bucket_count, norm, TIMES, LEARNS_FROM, ddp->largest_norm,
            loom_rank_index(ddp->rank));
}

static void start_bucket(loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++) {
        loom_parameter *parameter = ddp->parameters[place];
        if (!parameter->grad_written)
            memset(parameter->grad, 0, (size_t)ddp->view.places[place].count * sizeof(float));
        if (!ddp->graph_known)
            ddp->unused[place] = !parameter->grad_written;
        parameter->grad_written = true;
    }
    if (ddp->options.check_for_nan_in_grad)
        look(ddp, index);
    if (ddp->options.check_for_large_grads)
        look_for_large(ddp, index);
    remember(ddp, start_reduction(ddp, index));
}

static void start_ready_buckets(loom__ddp *ddp) {
    for (int kind = 0; kind < LOOM__DDP_KINDS && ddp->options.overlap_grad_reduce; kind++) {
        loom__ddp_region *region = &ddp->region[kind];
        while (region->next < region->end && ddp->states[region->next].waiting == 0)
            start_bucket(ddp, region->next++);
    }
}

void loom__ddp_sync_gradients(loom__ddp *ddp, int64_t chunk) {
    for (int kind = 0; kind < LOOM__DDP_KINDS && ddp->options.overlap_grad_reduce; kind++) {
        loom__ddp_region *region = &ddp->region[kind];
        while (region->next < region->end && loom__ddp_chunk_of(ddp, region->next) >= chunk)
            start_bucket(ddp, region->next++);
    }
}

static void mark_ready(loom__ddp *ddp, int64_t place) {
    ddp->ready[place] = true;
    ddp->states[ddp->view.places[place].bucket].waiting--;
}

/* A bucket has parameters of one chunk, whose last backward has begun now: its tape knows which of them it uses. */
static void mark_unused(loom__ddp *ddp, int64_t chunk) {
    for (int64_t place = 0; place < ddp->view.place_count; place++) {
        const loom_parameter *parameter = ddp->parameters[place];
        if (parameter->chunk == chunk && parameter->pending_uses == 0 && !ddp->ready[place])
            mark_ready(ddp, place);
    }
}

static loom_status become_ready(loom__ddp *ddp, int64_t place) {
    const loom_parameter *parameter = ddp->parameters[place];
    int rank = loom_rank_index(ddp->rank);
    if (!ddp->ready[place]) {
        mark_ready(ddp, place);
        return LOOM_OK;
    }
    if (ddp->graph_known && ddp->unused[place])
        return loom_fail(LOOM_ERR_STATE,
            "%s has a gradient, but had none in the first step and strategy.static_graph is true (rank %d)",
            parameter->name, rank);
    return loom_fail(LOOM_ERR_STATE,
        "%s became ready twice in the last backward of a step: its first gradient may be reduced already (rank %d)",
        parameter->name, rank);
}

void loom__ddp_parameter_ready(void *context, loom_parameter *parameter) {
    loom__ddp *ddp = context;
    int64_t place = ddp->last ? loom__ddp_find_place(ddp, parameter) : -1;
    if (place < 0)
        return;
    remember(ddp, become_ready(ddp, place));
    if (ddp->options.find_unused_parameters)
        mark_unused(ddp, parameter->chunk);
    start_ready_buckets(ddp);
}

static void scale_sums(loom__ddp *ddp) {
    for (int64_t i = 0; i < ddp->view.bucket_count; i++) {
        const loom__ddp_bucket *bucket = &ddp->view.buckets[i];
        int64_t length = loom__ddp_part_length(ddp, bucket);
        float *grad = ddp->view.grad + bucket->start + loom__ddp_share_of(ddp, bucket)->shard * length;
        float factor = ddp->scale[bucket->expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE];
        loom_rank_kernels(ddp->rank)->scale(loom_rank_team(ddp->rank), length, factor, grad, grad);
    }
}

/* A gradient is bad on one rank alone, so all must hear of it; a failed communication ends the others by itself. */
static loom_status agree(const loom__ddp *ddp, loom_status status) {
    bool meets = !status || status == LOOM_ERR_NUMERIC;
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++) {
        loom_comm *group = ddp->view.share[kind].group;
        if (meets && group && loom_comm_size(group) > 1 && (kind == LOOM__DDP_DENSE || ddp->view.has_experts))
            status = loom_agree(group, status);
    }
    return status;
}

loom_status loom__ddp_finish(loom__ddp *ddp) {
    remember(ddp, loom__ddp_start_gathers(ddp, ddp->chunks));
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++)
        while (ddp->region[kind].next < ddp->region[kind].end)
            start_bucket(ddp, ddp->region[kind].next++);
    ddp->graph_known = ddp->options.static_graph;
    ddp->last = false;
    remember(ddp, loom__ddp_wait_reductions(ddp));
    /* What was remembered came first; the thread's record may have gone on since. */
    loom_status status = ddp->failure ? loom_fail(ddp->failure, "%s", ddp->message) : LOOM_OK;
    if (ddp->options.check_for_nan_in_grad)
        status = agree(ddp, status);
    LOOM_TRY(status);
    if (ddp->options.average_in_collective && loom_comm_size(ddp->view.share[LOOM__DDP_DENSE].group) > 1)
        scale_sums(ddp);
    return LOOM_OK;
}
