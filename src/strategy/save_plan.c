/* Sharing out a save. Each rank tells two hashes of a chunk's name and place, its bytes, and whether it is the main
 * holder; every rank then sorts what all have told and walks it in the same order, so that all find the same writers
 * without another word. The invariant: exactly one member writes a chunk that has a main holder in the group. Should
 * two chunks ever share both hashes, one of them would be missing, which the commit refuses. */
#include "strategy/save_plan.h"
#include <stdlib.h>
#include <string.h>

typedef struct record {
    uint64_t hash[2];
    int64_t bytes; /* below 0: −1 − bytes, of the main holder */
} record;

/* What an archive has beside its elements, about. */
enum { ARCHIVE_BYTES = 1024 };

enum { RECORD_NUMBERS = sizeof(record) / sizeof(int64_t) };

typedef struct holder {
    record of;
    int64_t rank, index; /* member, and number in its list */
} holder;

/* Holders [first, first + count) of one chunk. */
typedef struct shared {
    int64_t first, count, bytes;
} shared;

void loom__save_plan_free(loom__save_plan *plan) {
    free(plan->mine);
    *plan = (loom__save_plan){0};
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

static record record_of(const loom_checkpoint_shard *shard) {
    record made = {.hash = {0xcbf29ce484222325u, 0x9e3779b97f4a7c15u}, .bytes = (int64_t)loom_dtype_size(shard->dtype)};
    size_t place = (size_t)shard->dims * sizeof *shard->offsets;
    for (int i = 0; i < 2; i++) {
        made.hash[i] = mix(made.hash[i], shard->key, strlen(shard->key) + 1);
        made.hash[i] = mix(made.hash[i], shard->offsets, place);
        made.hash[i] = mix(made.hash[i], shard->sizes, place);
    }
    for (int i = 0; i < shard->dims; i++)
        made.bytes *= shard->sizes[i];
    made.bytes += ARCHIVE_BYTES;
    if (shard->main)
        made.bytes = -1 - made.bytes;
    return made;
}

static int64_t size_of(const record *of) {
    return of->bytes < 0 ? -1 - of->bytes : of->bytes;
}

static int compare_numbers(uint64_t a, uint64_t b) {
    return (a > b) - (a < b);
}

static int by_chunk(const void *a, const void *b) {
    const holder *x = a, *y = b;
    for (int i = 0; i < 2; i++)
        if (x->of.hash[i] != y->of.hash[i])
            return compare_numbers(x->of.hash[i], y->of.hash[i]);
    return compare_numbers((uint64_t)x->rank, (uint64_t)y->rank);
}

/* Those without a choice first, then the largest; the rest is only to have an order. */
static int by_choice(const void *a, const void *b) {
    const shared *x = a, *y = b;
    if ((x->count == 1) != (y->count == 1))
        return x->count == 1 ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return compare_numbers((uint64_t)x->first, (uint64_t)y->first);
}

static bool same_chunk(const holder *a, const holder *b) {
    return a->of.hash[0] == b->of.hash[0] && a->of.hash[1] == b->of.hash[1];
}

static int64_t list_chunks(const holder *holders, int64_t count, shared *chunks) {
    int64_t made = 0;
    for (int64_t first = 0, end; first < count; first = end) {
        bool has_main = false;
        for (end = first; end < count && same_chunk(&holders[first], &holders[end]); end++)
            has_main |= holders[end].of.bytes < 0;
        if (has_main)
            chunks[made++] = (shared){first, end - first, size_of(&holders[first].of)};
    }
    return made;
}

static void assign(
    const holder *holders, shared *chunks, int64_t count, int64_t me, int64_t *filled, loom__save_plan *plan) {
    qsort(chunks, (size_t)count, sizeof *chunks, by_choice);
    for (int64_t i = 0; i < count; i++) {
        const holder *least = &holders[chunks[i].first];
        for (const holder *h = least; h < &holders[chunks[i].first + chunks[i].count]; h++)
            if (filled[h->rank] < filled[least->rank])
                least = h;
        filled[least->rank] += chunks[i].bytes;
        if (least->rank == me)
            plan->mine[least->index] = true;
    }
}

/* counts, all: of the members, in their order. */
static loom_status share(
    const int64_t *counts, int members, int64_t me, const record *all, int64_t total, loom__save_plan *plan) {
    holder *holders = calloc((size_t)total + 1, sizeof *holders);
    shared *chunks = calloc((size_t)total + 1, sizeof *chunks);
    int64_t *filled = calloc((size_t)members, sizeof *filled);
    loom_status status = LOOM_OK;
    int64_t at = 0;
    if (!holders || !chunks || !filled)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory to share out a save of %lld chunks", (long long)total);
    for (int m = 0; m < members && !status; m++)
        for (int64_t i = 0; i < counts[m]; i++, at++)
            holders[at] = (holder){.of = all[at], .rank = m, .index = i};
    if (!status) {
        qsort(holders, (size_t)total, sizeof *holders, by_chunk);
        assign(holders, chunks, list_chunks(holders, total, chunks), me, filled, plan);
    }
    free(holders);
    free(chunks);
    free(filled);
    return status;
}

static loom_status meet(loom_comm *group, const record *mine, loom__save_plan *plan) {
    int members = loom_comm_size(group);
    int64_t *counts = calloc((size_t)members, 2 * sizeof *counts), total = 0;
    loom_status status = loom_agree(
        group, counts ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the chunks of %d ranks", members));
    if (!status)
        status = loom_all_gather(group, &plan->count, counts, 1, LOOM_I64);
    for (int i = 0; i < members && !status; i++) {
        total += counts[i];
        counts[members + i] = counts[i] * RECORD_NUMBERS;
    }
    record *all = status ? NULL : calloc((size_t)total + 1, sizeof *all);
    if (!status)
        status = loom_agree(
            group, all ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)total));
    if (!status)
        status = loom_all_gather_v(group, mine, all, counts + members, LOOM_I64);
    if (!status)
        status = loom_agree(group, share(counts, members, loom_comm_rank(group), all, total, plan));
    loom_comm_free(group, all);
    loom_comm_free(group, counts);
    return status;
}

static loom_status list_records(const loom_checkpoint_content *content, record **out, uint64_t *structure) {
    record *records = calloc((size_t)content->shard_count + 1, sizeof *records);
    if (!records)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)content->shard_count);
    for (int64_t i = 0; i < content->shard_count; i++)
        records[i] = record_of(&content->shards[i]);
    *structure = mix(0xcbf29ce484222325u, records, (size_t)content->shard_count * sizeof *records);
    *out = records;
    return LOOM_OK;
}

static loom_status make_empty(loom__save_plan *plan, int64_t count, uint64_t structure) {
    loom__save_plan_free(plan);
    plan->mine = calloc((size_t)count + 1, sizeof *plan->mine);
    if (!plan->mine)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)count);
    plan->count = count;
    plan->structure = structure;
    return LOOM_OK;
}

/* Whether every member's plan fits what it holds now. */
static loom_status still_fits(
    loom_comm *group, const loom__save_plan *plan, int64_t count, uint64_t structure, bool *fits) {
    int64_t differs = !plan->mine || plan->count != count || plan->structure != structure, any = 0;
    LOOM_TRY(loom_all_reduce(group, &differs, &any, 1, LOOM_I64, LOOM_MAX));
    *fits = any == 0;
    return LOOM_OK;
}

loom_status loom__save_plan_make(
    loom_comm *group, const loom_checkpoint_content *content, bool keep, loom__save_plan *plan) {
    int64_t count = content->shard_count;
    record *records = NULL;
    uint64_t structure = 0;
    bool fits = false;
    if (!group) {
        LOOM_TRY(make_empty(plan, count, 0));
        for (int64_t i = 0; i < count; i++)
            plan->mine[i] = content->shards[i].main;
        return LOOM_OK;
    }
    loom_status status = loom_agree(group, list_records(content, &records, &structure));
    if (!status && keep)
        status = still_fits(group, plan, count, structure, &fits);
    if (!status && !fits)
        status = loom_agree(group, make_empty(plan, count, structure));
    if (!status && !fits)
        status = meet(group, records, plan);
    if (status)
        loom__save_plan_free(plan);
    loom_comm_free(group, records);
    return status;
}
