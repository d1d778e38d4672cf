/* The map of the gradient buffer: parameters in reverse order of the model, because that is the order in which a
 * backward pass finishes them, cut in buckets by Megatron-Core's rule. Invariant: buckets are consecutive, each holds
 * at least one parameter, all of one chunk, and which parameters share a bucket does not depend on the alignment. */
#include "ddp/map.h"

int64_t loom__ddp_default_bucket_size(int64_t dp) {
    int64_t by_ranks = 1000000 * dp;
    return by_ranks > 40000000 ? by_ranks : 40000000;
}

/* Whether the chunk of list entry `i` ends with it, walking backwards. */
static bool ends_chunk(const int64_t *chunks, int64_t i) {
    return i == 0 || (chunks && chunks[i - 1] != chunks[i]);
}

loom_status loom__ddp_map(const int64_t *counts, const int64_t *chunks, int64_t count, int64_t bucket_size,
    loom__ddp_place *places, loom__ddp_bucket *buckets, int64_t *bucket_count, int64_t *elements) {
    int64_t at = 0, made = 0, held = 0;
    for (int64_t place = 0; place < count; place++) {
        int64_t entry = count - 1 - place, wanted = counts[entry];
        if (wanted < 0 || wanted > INT64_MAX / (int64_t)sizeof(float) - LOOM__DDP_ALIGNMENT - at)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "gradient buffer: parameter %lld of %lld has %lld elements, which do not fit after %lld others",
                (long long)entry, (long long)count, (long long)wanted, (long long)at);
        if (held == 0 && (made == 0 || buckets[made - 1].end == at))
            buckets[made++] = (loom__ddp_bucket){.start = at, .end = -1, .first_place = place};
        loom__ddp_bucket *bucket = &buckets[made - 1];
        places[place] = (loom__ddp_place){.start = at, .count = wanted, .bucket = made - 1};
        bucket->places++;
        held += wanted;
        at += (wanted + LOOM__DDP_ALIGNMENT - 1) / LOOM__DDP_ALIGNMENT * LOOM__DDP_ALIGNMENT;
        bool bucketed = bucket_size > 0 && (!chunks || chunks[entry] == 0);
        if ((bucketed && held >= bucket_size) || ends_chunk(chunks, entry)) {
            bucket->end = at;
            held = 0;
        }
    }
    *bucket_count = made;
    *elements = at;
    return LOOM_OK;
}
