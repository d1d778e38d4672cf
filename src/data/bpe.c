/* Byte-pair encoding. A short word is a row of symbols that is searched anew after each join, which is quadratic and
 * still the fastest; a long one is a linked list with a heap of the pairs that can be joined, so that a megabyte of one
 * letter takes no more than n log n. Both join the same pairs in the same order: lowest rank first, leftmost of equals.
 */
#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>

enum { SHORT_WORD = 32 }; /* symbols */

static const uint64_t EMPTY = UINT64_MAX;

/* ---- the map ---- */

static uint64_t mix(uint64_t key) {
    key *= UINT64_C(0x9e3779b97f4a7c15);
    return key ^ (key >> 29);
}

static uint64_t slot_of(const loom__map *map, uint64_t key) {
    uint64_t slot = mix(key) & (map->slots - 1);
    while (map->keys[slot] != key && map->keys[slot] != EMPTY)
        slot = (slot + 1) & (map->slots - 1);
    return slot;
}

static loom_status grow(loom__map *map) {
    loom__map larger = {.slots = map->slots ? 2 * map->slots : 64, .count = map->count};
    larger.keys = malloc(larger.slots * sizeof *larger.keys);
    larger.values = malloc(larger.slots * sizeof *larger.values);
    if (!larger.keys || !larger.values) {
        loom__map_free(&larger);
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a table of %llu entries", (unsigned long long)larger.slots);
    }
    memset(larger.keys, 0xff, larger.slots * sizeof *larger.keys);
    for (uint64_t i = 0; i < map->slots; i++)
        if (map->keys[i] != EMPTY) {
            uint64_t slot = slot_of(&larger, map->keys[i]);
            larger.keys[slot] = map->keys[i];
            larger.values[slot] = map->values[i];
        }
    loom__map_free(map);
    *map = larger;
    return LOOM_OK;
}

loom_status loom__map_put(loom__map *map, uint64_t key, uint64_t value) {
    if (2 * (map->count + 1) > map->slots)
        LOOM_TRY(grow(map));
    uint64_t slot = slot_of(map, key);
    map->count += map->keys[slot] == EMPTY;
    map->keys[slot] = key;
    map->values[slot] = value;
    return LOOM_OK;
}

uint64_t loom__map_get(const loom__map *map, uint64_t key) {
    if (map->slots == 0)
        return EMPTY;
    uint64_t slot = slot_of(map, key);
    return map->keys[slot] == key ? map->values[slot] : EMPTY;
}

void loom__map_free(loom__map *map) {
    free(map->keys);
    free(map->values);
    *map = (loom__map){0};
}

/* ---- the vocabulary ---- */

loom_status loom__bpe_create(loom__bpe *bpe, uint32_t ids) {
    *bpe = (loom__bpe){.ids = ids, .unknown = LOOM__NO_TOKEN, .slot_count = 64};
    memset(bpe->byte_ids, 0xff, sizeof bpe->byte_ids);
    while (bpe->slot_count < 2 * (uint64_t)ids)
        bpe->slot_count *= 2;
    bpe->pieces = calloc(ids ? ids : 1, sizeof *bpe->pieces);
    bpe->slots = malloc(bpe->slot_count * sizeof *bpe->slots);
    if (!bpe->pieces || !bpe->slots) {
        loom__bpe_free(bpe);
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a vocabulary of %u tokens", ids);
    }
    memset(bpe->slots, 0xff, bpe->slot_count * sizeof *bpe->slots);
    return LOOM_OK;
}

void loom__bpe_free(loom__bpe *bpe) {
    free(bpe->pieces);
    free(bpe->slots);
    loom__map_free(&bpe->merges);
    *bpe = (loom__bpe){0};
}

/* Eight bytes a step: words are hashed for every one of them in a text. */
static uint64_t hash_text(const char *text, size_t bytes) {
    uint64_t hash = bytes, part = 0;
    for (; bytes >= 8; text += 8, bytes -= 8) {
        memcpy(&part, text, 8);
        hash = mix(hash ^ part);
    }
    part = 0;
    memcpy(&part, text, bytes);
    return mix(mix(hash ^ part));
}

static uint64_t text_slot(const loom__bpe *bpe, const char *text, size_t bytes) {
    uint64_t slot = hash_text(text, bytes) & (bpe->slot_count - 1);
    for (; bpe->slots[slot] != LOOM__NO_TOKEN; slot = (slot + 1) & (bpe->slot_count - 1)) {
        const loom__bpe_piece *piece = &bpe->pieces[bpe->slots[slot]];
        if (piece->bytes == bytes && memcmp(piece->text, text, bytes) == 0)
            break;
    }
    return slot;
}

void loom__bpe_add(loom__bpe *bpe, uint32_t id, const char *text, uint32_t bytes, bool found_by_text) {
    bpe->pieces[id] = (loom__bpe_piece){.text = text, .bytes = bytes, .found_by_text = found_by_text};
    if (found_by_text)
        bpe->slots[text_slot(bpe, text, bytes)] = id;
}

uint32_t loom__bpe_find(const loom__bpe *bpe, const char *text, size_t bytes) {
    return bpe->slots[text_slot(bpe, text, bytes)];
}

/* ---- words ---- */

typedef struct loom__bpe_candidate {
    uint32_t rank, at;            /* the order of joins */
    uint32_t left, right, joined; /* stale when the symbols there are others by now */
} candidate;

void loom__bpe_scratch_free(loom__bpe_scratch *scratch) {
    free(scratch->symbols);
    free(scratch->next);
    free(scratch->previous);
    free(scratch->heap);
    *scratch = (loom__bpe_scratch){0};
}

static loom_status reserve(loom__bpe_scratch *scratch, size_t symbols) {
    if (symbols <= scratch->capacity)
        return LOOM_OK;
    size_t capacity = symbols < 256 ? 256 : symbols + symbols / 2;
    loom__bpe_scratch_free(scratch);
    scratch->symbols = malloc(capacity * sizeof *scratch->symbols);
    scratch->next = malloc(capacity * sizeof *scratch->next);
    scratch->previous = malloc(capacity * sizeof *scratch->previous);
    /* A join takes one candidate off the heap and adds two at most, and there are fewer joins than symbols. */
    scratch->heap = malloc(2 * capacity * sizeof *scratch->heap);
    if (!scratch->symbols || !scratch->next || !scratch->previous || !scratch->heap) {
        loom__bpe_scratch_free(scratch);
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a word of %zu bytes", symbols);
    }
    scratch->capacity = capacity;
    return LOOM_OK;
}

static uint64_t find_merge(const loom__bpe *bpe, uint32_t left, uint32_t right) {
    return loom__map_get(&bpe->merges, (uint64_t)left << 32 | right);
}

static bool goes_before(const candidate *a, const candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void push(loom__bpe_scratch *scratch, candidate added) {
    size_t at = scratch->heap_count++;
    for (; at > 0 && goes_before(&added, &scratch->heap[(at - 1) / 2]); at = (at - 1) / 2)
        scratch->heap[at] = scratch->heap[(at - 1) / 2];
    scratch->heap[at] = added;
}

static candidate pop(loom__bpe_scratch *scratch) {
    candidate *heap = scratch->heap, first = heap[0], last = heap[--scratch->heap_count];
    size_t at = 0, count = scratch->heap_count;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child + 1 < count && goes_before(&heap[child + 1], &heap[child]))
            child++;
        if (child >= count || !goes_before(&heap[child], &last))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

static void propose(const loom__bpe *bpe, loom__bpe_scratch *scratch, uint32_t at, uint32_t after) {
    uint32_t left = scratch->symbols[at], right = scratch->symbols[after];
    uint64_t merge = find_merge(bpe, left, right);
    if (merge != EMPTY)
        push(scratch,
            (candidate){
                .rank = (uint32_t)(merge >> 32), .at = at, .left = left, .right = right, .joined = (uint32_t)merge});
}

static size_t join_long(const loom__bpe *bpe, loom__bpe_scratch *scratch, size_t count) {
    static const uint32_t none = UINT32_MAX; /* also the symbol of what was joined to its left neighbour */
    uint32_t *symbols = scratch->symbols, *next = scratch->next, *previous = scratch->previous;
    scratch->heap_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        previous[i] = i - 1; /* none for 0 */
        next[i] = i + 1 < count ? i + 1 : none;
    }
    for (uint32_t i = 0; i + 1 < count; i++)
        propose(bpe, scratch, i, i + 1);
    while (scratch->heap_count > 0) {
        candidate best = pop(scratch);
        uint32_t after = next[best.at];
        if (symbols[best.at] != best.left || after == none || symbols[after] != best.right)
            continue;
        symbols[best.at] = best.joined;
        symbols[after] = none;
        next[best.at] = next[after];
        if (next[after] != none)
            previous[next[after]] = best.at;
        if (previous[best.at] != none)
            propose(bpe, scratch, previous[best.at], best.at);
        if (next[best.at] != none)
            propose(bpe, scratch, best.at, next[best.at]);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i != none; i = next[i])
        symbols[kept++] = symbols[i];
    return kept;
}

static size_t join_short(const loom__bpe *bpe, uint32_t *symbols, size_t count) {
    uint64_t merges[SHORT_WORD]; /* of symbols i and i+1 */
    for (size_t i = 0; i + 1 < count; i++)
        merges[i] = find_merge(bpe, symbols[i], symbols[i + 1]);
    while (count > 1) {
        size_t best = 0;
        /* The rank lies in the upper half; equal ranks are equal merges, of which the first stays. */
        for (size_t i = 1; i + 1 < count; i++)
            if (merges[i] < merges[best])
                best = i;
        if (merges[best] == EMPTY)
            break;
        symbols[best] = (uint32_t)merges[best];
        count--;
        memmove(symbols + best + 1, symbols + best + 2, (count - best - 1) * sizeof *symbols);
        if (best + 1 < count) {
            memmove(merges + best + 1, merges + best + 2, (count - best - 2) * sizeof *merges);
            merges[best] = find_merge(bpe, symbols[best], symbols[best + 1]);
        }
        if (best > 0)
            merges[best - 1] = find_merge(bpe, symbols[best - 1], symbols[best]);
    }
    return count;
}

static size_t character_bytes(unsigned char first) {
    return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

static loom_status no_token(const char *text, size_t bytes) {
    char shown[4 * 4 + 1] = "";
    for (size_t i = 0; i < bytes && i < 4; i++) {
        static const char digits[] = "0123456789abcdef";
        unsigned char byte = (unsigned char)text[i];
        memcpy(shown + 4 * i, (const char[]){'\\', 'x', digits[byte >> 4], digits[byte & 15], '\0'}, 5);
    }
    return loom_fail(LOOM_ERR_ARGUMENT,
        "the vocabulary has no token for the character %.*s (bytes %s), no byte tokens and no unknown token",
        (int)bytes, text, shown);
}

/* The symbols that a word begins as. */
static loom_status first_symbols(
    const loom__bpe *bpe, const char *text, size_t bytes, uint32_t *symbols, size_t *count) {
    size_t made = 0;
    bool after_unknown = false;
    for (size_t i = 0, step; i < bytes; i += step) {
        step = bpe->by_character ? character_bytes((unsigned char)text[i]) : 1;
        uint32_t id = bpe->by_character ? loom__bpe_find(bpe, text + i, step) : bpe->byte_ids[(unsigned char)text[i]];
        if (id == LOOM__NO_TOKEN && bpe->by_character && bpe->byte_ids[0] != LOOM__NO_TOKEN) {
            for (size_t k = 0; k < step; k++)
                symbols[made++] = bpe->byte_ids[(unsigned char)text[i + k]];
            after_unknown = false;
            continue;
        }
        if (id != LOOM__NO_TOKEN)
            symbols[made++] = id;
        else if (bpe->unknown == LOOM__NO_TOKEN)
            return no_token(text + i, step);
        else if (!(after_unknown && bpe->join_unknown))
            symbols[made++] = bpe->unknown;
        after_unknown = id == LOOM__NO_TOKEN;
    }
    *count = made;
    return LOOM_OK;
}

loom_status loom__bpe_encode(
    const loom__bpe *bpe, const char *text, size_t bytes, loom__bpe_scratch *scratch, size_t *count) {
    if (bytes >= UINT32_MAX / 2)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "a word of %zu bytes, expected fewer than %u", bytes, (unsigned)(UINT32_MAX / 2));
    LOOM_TRY(reserve(scratch, bytes));
    if (bpe->whole_words_first) {
        uint32_t id = loom__bpe_find(bpe, text, bytes);
        if (id != LOOM__NO_TOKEN) {
            scratch->symbols[0] = id;
            *count = 1;
            return LOOM_OK;
        }
    }
    size_t made = 0;
    LOOM_TRY(first_symbols(bpe, text, bytes, scratch->symbols, &made));
    *count = made <= SHORT_WORD ? join_short(bpe, scratch->symbols, made) : join_long(bpe, scratch, made);
    return LOOM_OK;
}
