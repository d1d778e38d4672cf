/* A distributed optimizer's state as its buckets: what lies in the buffer is written as it lies there, so that saving
 * needs no communication. Where a parameter is can be computed again from the layout alone, so that another layout can
 * read it. The invariant: the chunks of a bucket cover it from its start to the end of its last parameter, the gaps
 * between parameters included, because a tensor of a checkpoint has no holes. */
#include "checkpoint/list.h"
#include <stdlib.h>

const char *loom__state_dtype_name(loom_dtype dtype) {
    return dtype == LOOM_BF16 ? "torch.bfloat16" : dtype == LOOM_F16 ? "torch.float16" : "torch.float32";
}

loom_status loom__state_bucket_key(const loom__sharded_options *options, int64_t group,
    const loom__state_bucket *bucket, char key[LOOM__STATE_KEY_BYTES]) {
    return loom__state_key_format(key,
        "optimizer.distributed.dp_group_idx_%lld.gbuf_idx_%lld.dtype_(%s, %s).bucket_idx_%lld.", (long long)group,
        (long long)bucket->gbuf, loom__state_dtype_name(options->param_dtype),
        loom__state_dtype_name(options->grad_dtype), (long long)bucket->index);
}

static int compare_buckets(const void *left, const void *right) {
    const loom__state_bucket *a = left, *b = right;
    if (a->gbuf != b->gbuf)
        return a->gbuf < b->gbuf ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

/* Chunks that have parameters before `chunk`. */
static int64_t buffers_before(const loom__part *part, int64_t chunk) {
    int64_t buffers = 0;
    for (int64_t i = 0; i < part->count && part->entries[i].chunk < chunk; i++)
        buffers += i == 0 || part->entries[i].chunk != part->entries[i - 1].chunk;
    return buffers;
}

static loom_status lay_out(const loom__sharded_layout *layout, const loom__part *part, int64_t stage,
    loom__ddp_entry *entries, loom__ddp_bucket *found, loom__state_buckets *out) {
    loom__ddp_map_options options = {.bucket_size = stage == 0 ? layout->bucket_size : -1,
        .alignment = 1,
        .shards = layout->dp,
        .pad_for_high_busbw = layout->pad_for_high_busbw};
    int64_t elements = 0;
    for (int64_t i = 0; i < part->count; i++) {
        const loom__part_entry *entry = &part->entries[i];
        int64_t shape[2];
        loom__parameter_local_shape(layout->spec, &layout->spec->parameters[entry->canonical], layout->tp, shape);
        entries[i] = (loom__ddp_entry){
            .count = shape[0] * shape[1], .chunk = entry->chunk, .shared_embedding = entry->shared_ends};
    }
    LOOM_TRY(loom__ddp_map(entries, part->count, &options, out->places, found, &out->count, &elements));
    int64_t index = 0, before = -1;
    for (int64_t b = 0; b < out->count; b++) {
        const loom__ddp_bucket *bucket = &found[b];
        int64_t chunk = entries[part->count - 1 - bucket->first_place].chunk;
        index = chunk == before ? index + 1 : 0;
        before = chunk;
        out->buckets[b] = (loom__state_bucket){.gbuf = buffers_before(part, chunk),
            .index = index,
            .numel = bucket->end - bucket->start,
            .unpadded = bucket->unpadded,
            .start = bucket->start,
            .first_place = bucket->first_place,
            .places = bucket->places};
    }
    qsort(out->buckets, (size_t)out->count, sizeof *out->buckets, compare_buckets);
    return LOOM_OK;
}

loom_status loom__state_buckets_create(
    const loom__sharded_layout *layout, const loom__part *part, int64_t stage, loom__state_buckets **out) {
    size_t count = (size_t)part->count + 1; /* never 0 bytes */
    loom__state_buckets *made = calloc(1, sizeof *made);
    loom__ddp_entry *entries = calloc(count, sizeof *entries);
    loom__ddp_bucket *found = calloc(count, sizeof *found);
    if (made) {
        made->place_count = part->count;
        made->buckets = calloc(count, sizeof *made->buckets);
        made->places = calloc(count, sizeof *made->places);
    }
    loom_status status = LOOM_OK;
    if (!made || !entries || !found || !made->buckets || !made->places)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for the buckets of %lld parameters", (long long)part->count);
    if (!status)
        status = lay_out(layout, part, stage, entries, found, made);
    free(entries);
    free(found);
    if (status) {
        loom__state_buckets_destroy(made);
        return status;
    }
    *out = made;
    return LOOM_OK;
}

void loom__state_buckets_destroy(loom__state_buckets *buckets) {
    if (!buckets)
        return;
    free(buckets->buckets);
    free(buckets->places);
    free(buckets);
}

void loom__state_shard_range(
    const loom__state_buckets *buckets, int64_t p, int64_t dp, int64_t dp_rank, int64_t range[2]) {
    const loom__ddp_place *place = &buckets->places[p];
    const loom__state_bucket *bucket = NULL;
    for (int64_t b = 0; b < buckets->count && !bucket; b++)
        if (p >= buckets->buckets[b].first_place && p < buckets->buckets[b].first_place + buckets->buckets[b].places)
            bucket = &buckets->buckets[b];
    loom__ddp_part part = {.count = 0};
    if (bucket && dp_rank < dp)
        part = loom__ddp_part_of(
            place, &(loom__ddp_bucket){.start = bucket->start, .end = bucket->start + bucket->numel}, dp, dp_rank);
    range[0] = part.count ? part.start - place->start : 0;
    range[1] = range[0] + part.count;
}

/* Elements [from, to) of a bucket; `number` of the part or -1. */
static loom_status add_piece(loom__state_list *list, const loom__state_bucket *bucket, const char *prefix,
    const char *name, int array, loom_dtype dtype, int64_t number, const int64_t range[2]) {
    loom__state_entry *entry = NULL;
    LOOM_TRY(loom__state_list_add(list, &entry));
    LOOM_TRY(loom__state_key_format(entry->key, "%s%s", prefix, name));
    entry->dtype = dtype;
    entry->dims = 1;
    entry->shape[0] = bucket->unpadded;
    entry->offset[0] = range[0];
    entry->size[0] = entry->count = range[1] - range[0];
    entry->array = array;
    entry->entry = number;
    return LOOM_OK;
}

/* One array of this rank's shard of a bucket. */
static loom_status add_shard(loom__state_list *list, const loom__state_buckets *buckets,
    const loom__state_bucket *bucket, const char *prefix, const char *name, int array, loom_dtype dtype) {
    int64_t length = bucket->numel / list->layout->dp, at = list->dp_rank * length, end = at + length;
    if (end > bucket->unpadded)
        end = bucket->unpadded;
    for (int64_t p = bucket->first_place; p < bucket->first_place + bucket->places && at < end; p++) {
        int64_t start = buckets->places[p].start - bucket->start, stop = start + buckets->places[p].count;
        if (stop <= at)
            continue;
        int64_t gap[2] = {at, start < end ? start : end}, piece[2] = {at > start ? at : start, stop < end ? stop : end};
        if (gap[0] < gap[1]) {
            LOOM_TRY(add_piece(list, bucket, prefix, name, array, dtype, -1, gap));
            at = gap[1];
        }
        if (piece[0] >= piece[1])
            continue;
        LOOM_TRY(add_piece(list, bucket, prefix, name, array, dtype, buckets->place_count - 1 - p, piece));
        list->state->entries[list->state->count - 1].at = piece[0] - start;
        at = piece[1];
    }
    int64_t rest[2] = {at, end};
    return at < end ? add_piece(list, bucket, prefix, name, array, dtype, -1, rest) : LOOM_OK;
}

static loom_status add_objects(loom__state_list *list, int64_t group) {
    static const struct {
        loom__state_object object;
        const char *name;
    } objects[] = {{LOOM__STATE_OPTIMIZER, "optimizer"}, {LOOM__STATE_SCALER, "grad_scaler"},
        {LOOM__STATE_NUMEL, "per_bucket_numel"}, {LOOM__STATE_NUMEL_UNPADDED, "per_bucket_numel_unpadded"}};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        loom__state_entry *entry = NULL;
        if (objects[i].object == LOOM__STATE_SCALER && !list->options->scaler)
            continue;
        LOOM_TRY(loom__state_list_add(list, &entry));
        LOOM_TRY(loom__state_key_format(
            entry->key, "optimizer.distributed.dp_group_idx_%lld.%s/shard_0_1", (long long)group, objects[i].name));
        entry->object = objects[i].object;
        entry->replica[2] = list->dp_rank;
    }
    return LOOM_OK;
}

static loom_status add_bucket(
    loom__state_list *list, const loom__state_buckets *buckets, const loom__state_bucket *bucket, int64_t group) {
    const loom__sharded_options *options = list->options;
    char prefix[LOOM__STATE_KEY_BYTES];
    LOOM_TRY(loom__state_bucket_key(options, group, bucket, prefix));
    LOOM_TRY(add_shard(list, buckets, bucket, prefix, "param", LOOM__STATE_MASTER, LOOM_F32));
    for (int i = 0; i < options->moments; i++)
        LOOM_TRY(add_shard(
            list, buckets, bucket, prefix, options->moment[i].name, LOOM__STATE_MOMENT + i, options->moment[i].dtype));
    return LOOM_OK;
}

loom_status loom__state_list_add_buckets(loom__state_list *list) {
    int64_t group = list->stage * list->layout->tp + list->tp_rank;
    loom__state_buckets *buckets = NULL;
    LOOM_TRY(loom__state_buckets_create(list->layout, list->part, list->stage, &buckets));
    loom_status status = add_objects(list, group);
    for (int64_t b = 0; b < buckets->count && !status; b++)
        status = add_bucket(list, buckets, &buckets->buckets[b], group);
    loom__state_buckets_destroy(buckets);
    return status;
}
