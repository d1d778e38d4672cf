/* The gathers of a distributed optimizer. They start from the last bucket of a buffer to the first, since a forward
 * needs the buffer from its end; so all members start them in the same order, however each comes to need its
 * parameters. Invariant: buckets of a region from gathers_left on have been started since the last update, and a
 * parameter has its hook exactly while its bucket is stale. */
#include "ddp/state.h"
#include "runtime/spans.h"

static loom_status start_gather(loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    const loom__ddp_share *share = loom__ddp_share_of(ddp, bucket);
    int64_t length = loom__ddp_part_length(ddp, bucket);
    int64_t size = (int64_t)loom_dtype_size(ddp->view.dtype);
    char *values = ddp->view.data ? (char *)ddp->view.data : (char *)ddp->view.data16;
    values += bucket->start * size;
    for (int64_t i = 0; i < share->shards; i++)
        ddp->part_counts[i] = length;
    loom__ddp_bucket_state *state = &ddp->states[index];
    state->gathering.started = loom__span_clock(ddp->rank);
    LOOM_TRY(loom_all_gather_v_start(share->instance, values + share->shard * length * size, values, ddp->part_counts,
        ddp->view.dtype, &state->gather));
    if (state->gathering.started)
        loom__request_time(state->gather, &state->gathering.ended);
    return LOOM_OK;
}

static loom_status start_down_to(loom__ddp *ddp, loom__ddp_region *region, int64_t index) {
    while (region->gathers_left > index)
        LOOM_TRY(start_gather(ddp, --region->gathers_left));
    return LOOM_OK;
}

loom_status loom__ddp_start_gathers(loom__ddp *ddp, int64_t chunk) {
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++) {
        loom__ddp_region *region = &ddp->region[kind];
        int64_t index = region->end;
        while (index > region->first && loom__ddp_chunk_of(ddp, index - 1) <= chunk)
            index--;
        LOOM_TRY(start_down_to(ddp, region, index));
    }
    return LOOM_OK;
}

void loom__ddp_drop_gathers(loom__ddp *ddp) {
    for (int64_t i = 0; i < ddp->view.bucket_count; i++) {
        (void)loom_wait(ddp->states[i].gather);
        ddp->states[i].gather = NULL;
    }
}

static loom_status await_bucket(loom__ddp *ddp, int64_t index) {
    loom__ddp_bucket_state *state = &ddp->states[index];
    const loom__ddp_bucket *bucket = &ddp->view.buckets[index];
    if (!state->stale)
        return LOOM_OK;
    loom__ddp_region *region = loom__ddp_region_of(ddp, index);
    LOOM_TRY(start_down_to(ddp, region, index));
    /* The next one travels while this one is used. */
    LOOM_TRY(start_down_to(ddp, region, index > region->first ? index - 1 : region->first));
    loom_request *gather = state->gather;
    state->gather = NULL;
    LOOM_TRY(loom_wait(gather));
    loom__ddp_add_span(ddp, index, LOOM_SPAN_PARAMETER_GATHER, &state->gathering);
    state->stale = false;
    for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++)
        ddp->parameters[place]->await_data = NULL;
    return LOOM_OK;
}

static loom_status await_parameter(void *context, int64_t place) {
    loom__ddp *ddp = context;
    return await_bucket(ddp, ddp->view.places[place].bucket);
}

loom_status loom__ddp_wait_parameters(loom__ddp *ddp) {
    for (int64_t index = ddp ? ddp->view.bucket_count - 1 : -1; index >= 0; index--)
        LOOM_TRY(await_bucket(ddp, index));
    return LOOM_OK;
}

/* The buckets of a region that is shared out become those that must be gathered. */
static void expect_gathers(loom__ddp *ddp, loom__ddp_region *region) {
    region->gathers_left = region->end;
    for (int64_t i = region->first; i < region->end; i++) {
        const loom__ddp_bucket *bucket = &ddp->view.buckets[i];
        ddp->states[i].stale = true;
        for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++) {
            loom_parameter *parameter = ddp->parameters[place];
            parameter->await_data = await_parameter;
            parameter->await_context = ddp;
            parameter->await_place = place;
        }
    }
}

loom_status loom__ddp_gather(loom__ddp *ddp) {
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++)
        if (ddp->view.share[kind].shards > 1)
            expect_gathers(ddp, &ddp->region[kind]);
    if (!ddp->options.overlap_param_gather)
        return loom__ddp_wait_parameters(ddp);
    if (ddp->options.gathers_by_chunk)
        return LOOM_OK;
    for (int kind = 0; kind < LOOM__DDP_KINDS; kind++) {
        loom__ddp_region *region = &ddp->region[kind];
        bool one = !ddp->options.align_param_gather && region->gathers_left > region->first;
        LOOM_TRY(start_down_to(ddp, region, one ? region->gathers_left - 1 : region->first));
    }
    return LOOM_OK;
}

loom_status loom__ddp_gather_gradients(loom__ddp *ddp) {
    LOOM_TRY(loom__ddp_start_gathers(ddp, ddp->chunks));
    for (int64_t i = 0; i < ddp->view.bucket_count; i++) {
        const loom__ddp_bucket *bucket = &ddp->view.buckets[i];
        const loom__ddp_share *share = loom__ddp_share_of(ddp, bucket);
        int64_t length = loom__ddp_part_length(ddp, bucket);
        float *grad = ddp->view.grad + bucket->start;
        if (share->shards > 1)
            LOOM_TRY(loom_all_gather(share->instance, grad + share->shard * length, grad, length, LOOM_F32));
    }
    return LOOM_OK;
}
