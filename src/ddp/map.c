/* The map of the gradient buffer: parameters in reverse order of the model, because that is the order in which a
 * backward pass finishes them, cut in buckets by Megatron-Core's rule or by PyTorch's. Invariant: buckets are
 * consecutive, each holds at least one parameter, all of one chunk; with shards each divides evenly among them. */
#include "ddp/map.h"

/* Megatron-Core's alignments for a distributed optimizer, in elements. */
enum { SHARDED_ALIGNMENT = 64, SHARDED_END = 128, BUSBW_END = 1 << 16 };

int64_t loom__ddp_default_bucket_size(int64_t dp) {
    int64_t by_ranks = 1000000 * dp;
    return by_ranks > 40000000 ? by_ranks : 40000000;
}

static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static int64_t least_common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

static loom_status check_options(const loom__ddp_map_options *options) {
    if (options->shards < 0 || options->shards > INT32_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: found %lld shards, expected 0 to %d",
            (long long)options->shards, INT32_MAX);
    if (!options->shards && options->alignment < 1)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "gradient buffer: alignment %lld, expected at least 1", (long long)options->alignment);
    return LOOM_OK;
}

/* A bucket under construction. */
typedef struct builder {
    const loom__ddp_map_options *options;
    loom__ddp_bucket *buckets;
    int64_t made, at; /* buckets so far, the open one included; where the next place may start */
    int64_t held;     /* elements of the open bucket that count for its size */
    bool open;
    int64_t end_multiple;
    bool first_of_chunk; /* the open bucket is the first of its chunk */
} builder;

static void close_bucket(builder *b) {
    loom__ddp_bucket *bucket = &b->buckets[b->made - 1];
    bucket->end = b->at = round_up(b->at, b->end_multiple);
    b->open = false;
}

static void open_bucket(builder *b, int64_t place) {
    b->buckets[b->made++] = (loom__ddp_bucket){.start = b->at, .first_place = place};
    b->held = 0;
    b->open = true;
}

static bool is_full(const builder *b, int64_t chunk) {
    const loom__ddp_map_options *options = b->options;
    if (options->first_bucket_size)
        return b->held >= (b->first_of_chunk ? options->first_bucket_size : options->bucket_size);
    return options->bucket_size >= 0 && chunk == 0 && b->held >= options->bucket_size;
}

loom_status loom__ddp_map(const loom__ddp_entry *entries, int64_t count, const loom__ddp_map_options *options,
    loom__ddp_place *places, loom__ddp_bucket *buckets, int64_t *bucket_count, int64_t *elements) {
    LOOM_TRY(check_options(options));
    int64_t shards = options->shards, alignment = shards ? SHARDED_ALIGNMENT : options->alignment;
    int64_t end_multiple = alignment;
    if (shards)
        end_multiple = least_common_multiple(shards, options->pad_for_high_busbw ? BUSBW_END : SHARDED_END);
    builder b = {.options = options, .buckets = buckets, .end_multiple = end_multiple, .first_of_chunk = true};
    for (int64_t place = 0; place < count; place++) {
        int64_t entry = count - 1 - place, wanted = entries[entry].count, chunk = entries[entry].chunk;
        bool alone = shards && entries[entry].shared_embedding;
        if (wanted < 0 || wanted > INT64_MAX / (int64_t)sizeof(float) - alignment - end_multiple - b.at)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "gradient buffer: parameter %lld of %lld has %lld elements, which do not fit after %lld others",
                (long long)entry, (long long)count, (long long)wanted, (long long)b.at);
        if (alone && b.open) {
            b.at = round_up(b.at, alignment);
            buckets[b.made - 1].unpadded = b.at - buckets[b.made - 1].start;
            close_bucket(&b);
        }
        if (!b.open)
            open_bucket(&b, place);
        loom__ddp_bucket *bucket = &buckets[b.made - 1];
        int64_t start = round_up(b.at, alignment);
        places[place] = (loom__ddp_place){.start = start, .count = wanted, .bucket = b.made - 1};
        b.at = start + wanted;
        b.held = shards ? b.at - bucket->start : b.held + wanted;
        bucket->places++;
        bucket->unpadded = b.at - bucket->start;
        bool ends_chunk = entry == 0 || entries[entry - 1].chunk != chunk;
        if (alone || ends_chunk || is_full(&b, chunk)) {
            close_bucket(&b);
            b.first_of_chunk = ends_chunk;
        }
    }
    *bucket_count = b.made;
    *elements = b.at;
    return LOOM_OK;
}

loom__ddp_part loom__ddp_part_of(
    const loom__ddp_place *place, const loom__ddp_bucket *bucket, int64_t shards, int64_t shard) {
    int64_t length = (bucket->end - bucket->start) / shards;
    int64_t first = bucket->start + shard * length, last = first + length;
    int64_t start = place->start > first ? place->start : first;
    int64_t place_end = place->start + place->count, end = place_end < last ? place_end : last;
    if (end <= start)
        return (loom__ddp_part){.start = place->start, .state = bucket->start / shards};
    return (loom__ddp_part){start, end - start, bucket->start / shards + start - first};
}
