/* A distributed optimizer's state as its buckets: what lies in the buffer is written as it lies there, so that saving
 * needs no communication. Where a parameter is can be computed again from the layout alone, so that another layout can
 * read it. The invariant: the chunks of a bucket cover it from its start to the end of its last parameter, the gaps
 * between parameters included, because a tensor of a checkpoint has no holes. */
#include "checkpoint/list.h"
#include <stdlib.h>

const char *loom__state_dtype_name(loom_dtype dtype) {
    return dtype == LOOM_BF16 ? "torch.bfloat16" : dtype == LOOM_F16 ? "torch.float16" : "torch.float32";
}

const char *loom__state_chain(const loom__sharded_layout *layout, bool experts) {
    return !loom__layout_chains(layout) ? "" : experts ? "chained_1." : "chained_0.";
}

int64_t loom__state_group(const loom__sharded_layout *layout, const loom__sharded_place *at, bool experts) {
    return experts ? (at->stage * layout->ep + at->ep_rank) * layout->etp + at->etp_rank
                   : at->stage * layout->tp + at->tp_rank;
}

static int compare_buckets(const void *left, const void *right) {
    const loom__state_bucket *a = left, *b = right;
    if (a->expert != b->expert)
        return a->expert ? 1 : -1;
    if (a->gbuf != b->gbuf)
        return a->gbuf < b->gbuf ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static bool is_of(const loom__part *part, int64_t number, bool experts) {
    return loom__part_is_apart(part, part->entries[number].descriptor) == experts;
}

/* The buffer of dense parameters, or of experts, behind what `out` has: elements [start, …). */
typedef struct buffer {
    const loom__sharded_layout *layout;
    const loom__part *part;
    bool experts;
    int64_t start, first_place;
    loom__ddp_map_options options;
    loom__ddp_entry *entries; /* [count], as is the next */
    loom__ddp_bucket *found;
    int64_t count;
} buffer;

static void list_entries(buffer *b, loom__state_buckets *out) {
    const loom__model_spec *spec = b->layout->spec;
    b->count = 0;
    for (int64_t i = 0; i < b->part->count; i++) {
        const loom__part_entry *entry = &b->part->entries[i];
        const loom__parameter_descriptor *parameter = &spec->parameters[entry->canonical];
        int64_t shape[2];
        if (!is_of(b->part, i, b->experts))
            continue;
        loom__parameter_local_shape(spec, parameter, loom__layout_tensor_size(b->layout, parameter), shape);
        out->entries[entry->buffer_place] = i;
        b->entries[b->count++] = (loom__ddp_entry){
            .count = shape[0] * shape[1], .chunk = entry->chunk, .shared_embedding = entry->shared_ends};
    }
}

/* Chunks before `chunk` have a buffer each where they have such parameters. */
static int64_t buffers_before(const buffer *b, int64_t chunk) {
    int64_t buffers = 0;
    for (int64_t i = 0; i < b->count && b->entries[i].chunk < chunk; i++)
        buffers += i == 0 || b->entries[i].chunk != b->entries[i - 1].chunk;
    return buffers;
}

static loom_status lay_out(buffer *b, loom__state_buckets *out) {
    loom__ddp_place *places = out->places + b->first_place;
    int64_t elements = 0, made = 0, index = 0, before = -1;
    list_entries(b, out);
    LOOM_TRY(loom__ddp_map(b->entries, b->count, &b->options, places, b->found, &made, &elements));
    for (int64_t i = 0; i < b->count; i++) {
        places[i].start += b->start;
        places[i].bucket += out->count;
    }
    for (int64_t i = 0; i < made; i++) {
        const loom__ddp_bucket *bucket = &b->found[i];
        int64_t chunk = b->entries[b->count - 1 - bucket->first_place].chunk;
        index = chunk == before ? index + 1 : 0;
        before = chunk;
        out->buckets[out->count++] = (loom__state_bucket){.expert = b->experts,
            .gbuf = buffers_before(b, chunk),
            .index = index,
            .numel = bucket->end - bucket->start,
            .unpadded = bucket->unpadded,
            .start = b->start + bucket->start,
            .first_place = b->first_place + bucket->first_place,
            .places = bucket->places};
    }
    b->start += elements;
    b->first_place += b->count;
    return LOOM_OK;
}

static loom_status lay_out_all(const loom__sharded_layout *layout, const loom__part *part, int64_t stage,
    loom__ddp_entry *entries, loom__ddp_bucket *found, loom__state_buckets *out) {
    buffer b = {.layout = layout, .part = part, .entries = entries, .found = found};
    b.options = (loom__ddp_map_options){.bucket_size = stage == 0 ? layout->bucket_size : -1,
        .alignment = 1,
        .shards = layout->dp,
        .pad_for_high_busbw = layout->pad_for_high_busbw};
    LOOM_TRY(lay_out(&b, out));
    b.experts = true;
    b.options.shards = layout->edp;
    if (loom__layout_chains(layout))
        LOOM_TRY(lay_out(&b, out));
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
        made->entries = calloc(count, sizeof *made->entries);
    }
    loom_status status = LOOM_OK;
    if (!made || !entries || !found || !made->buckets || !made->places || !made->entries)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for the buckets of %lld parameters", (long long)part->count);
    if (!status)
        status = lay_out_all(layout, part, stage, entries, found, made);
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
    free(buckets->entries);
    free(buckets);
}

/* Members of the group that shares a bucket out, and a rank's place among them. */
static int64_t shards_of(const loom__sharded_layout *layout, const loom__state_bucket *bucket) {
    return bucket->expert ? layout->edp : layout->dp;
}

static int64_t shard_of(const loom__sharded_place *at, const loom__state_bucket *bucket) {
    return bucket->expert ? at->edp_rank : at->dp_rank;
}

void loom__state_shard_range(const loom__state_buckets *buckets, int64_t p, const loom__sharded_layout *layout,
    const loom__sharded_place *at, int64_t range[2]) {
    const loom__ddp_place *place = &buckets->places[p];
    const loom__state_bucket *bucket = NULL;
    for (int64_t b = 0; b < buckets->count && !bucket; b++)
        if (p >= buckets->buckets[b].first_place && p < buckets->buckets[b].first_place + buckets->buckets[b].places)
            bucket = &buckets->buckets[b];
    loom__ddp_part part = {.count = 0};
    if (bucket && shard_of(at, bucket) < shards_of(layout, bucket))
        part =
            loom__ddp_part_of(place, &(loom__ddp_bucket){.start = bucket->start, .end = bucket->start + bucket->numel},
                shards_of(layout, bucket), shard_of(at, bucket));
    range[0] = part.count ? part.start - place->start : 0;
    range[1] = range[0] + part.count;
}

/* Elements [from, to) of a bucket; `number` of the part or -1. */
static loom_status add_piece(loom__state_list *list, const loom__state_bucket *bucket, const char *prefix,
    const char *name, int array, loom_dtype dtype, int64_t number, const int64_t range[2]) {
    loom__state_entry *entry = NULL;
    LOOM_TRY(loom__state_list_add(list, &entry));
    LOOM_TRY(loom__state_key_format(entry->key, "%s%s", prefix, name));
    entry->expert = bucket->expert;
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
    int64_t length = bucket->numel / shards_of(list->layout, bucket), at = shard_of(list->at, bucket) * length,
            end = at + length;
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
        LOOM_TRY(add_piece(list, bucket, prefix, name, array, dtype, buckets->entries[p], piece));
        list->state->entries[list->state->count - 1].at = piece[0] - start;
        at = piece[1];
    }
    int64_t rest[2] = {at, end};
    return at < end ? add_piece(list, bucket, prefix, name, array, dtype, -1, rest) : LOOM_OK;
}

static loom_status add_objects(loom__state_list *list, bool experts) {
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
        LOOM_TRY(loom__state_key_format(entry->key, "%soptimizer.distributed.dp_group_idx_%lld.%s/shard_0_1",
            loom__state_chain(list->layout, experts), (long long)loom__state_group(list->layout, list->at, experts),
            objects[i].name));
        entry->object = objects[i].object;
        entry->expert = experts;
        entry->replica[2] = experts ? list->at->edp_rank : list->at->dp_rank;
    }
    return LOOM_OK;
}

static loom_status add_bucket(
    loom__state_list *list, const loom__state_buckets *buckets, const loom__state_bucket *bucket) {
    const loom__sharded_options *options = list->options;
    char prefix[LOOM__STATE_KEY_BYTES];
    LOOM_TRY(loom__state_key_format(prefix,
        "%soptimizer.distributed.dp_group_idx_%lld.gbuf_idx_%lld.dtype_(%s, %s).bucket_idx_%lld.",
        loom__state_chain(list->layout, bucket->expert),
        (long long)loom__state_group(list->layout, list->at, bucket->expert), (long long)bucket->gbuf,
        loom__state_dtype_name(options->param_dtype), loom__state_dtype_name(options->grad_dtype),
        (long long)bucket->index));
    LOOM_TRY(add_shard(list, buckets, bucket, prefix, "param", LOOM__STATE_MASTER, LOOM_F32));
    for (int i = 0; i < options->moments; i++)
        LOOM_TRY(add_shard(
            list, buckets, bucket, prefix, options->moment[i].name, LOOM__STATE_MOMENT + i, options->moment[i].dtype));
    return LOOM_OK;
}

loom_status loom__state_list_add_buckets(loom__state_list *list) {
    loom__state_buckets *buckets = NULL;
    LOOM_TRY(loom__state_buckets_create(list->layout, list->part, list->at->stage, &buckets));
    loom_status status = add_objects(list, false);
    if (!status && loom__layout_chains(list->layout))
        status = add_objects(list, true);
    for (int64_t b = 0; b < buckets->count && !status; b++)
        status = add_bucket(list, buckets, &buckets->buckets[b]);
    loom__state_buckets_destroy(buckets);
    return status;
}
