/* Learns joins. Every word is a row of ids; for each pair of neighbours there is how often it occurs in all words, and
 * a list of the words that had it. A heap gives the most frequent pair; its count may be stale, since joins change the
 * counts of the pairs around them, and is then put right and pushed again. Counts are exact after every join: each
 * place that is joined takes the pairs around it out and puts its new ones in. Equally frequent pairs go by their ids,
 * so that the result is a function of the counts alone. */
#include "data/bpe_train.h"

#include <stdlib.h>
#include <string.h>

/* ---- counting words ---- */

static uint64_t hash_text(const char *text, size_t bytes) { /* FNV-1a */
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash ^ hash >> 32;
}

void loom__word_counts_free(loom__word_counts *words) {
    free(words->texts);
    free(words->words);
    free(words->slots);
    *words = (loom__word_counts){0};
}

static loom_status no_memory(const char *what) {
    return loom_fail(LOOM_ERR_MEMORY, "no memory for %s to learn from", what);
}

static uint64_t slot_of(const loom__word_counts *words, const char *text, size_t bytes) {
    uint64_t slot = hash_text(text, bytes) & (words->slot_count - 1);
    for (; words->slots[slot] >= 0; slot = (slot + 1) & (words->slot_count - 1)) {
        const struct loom__counted_word *word = &words->words[words->slots[slot]];
        if (word->bytes == bytes && memcmp(words->texts + word->offset, text, bytes) == 0)
            break;
    }
    return slot;
}

static loom_status grow_slots(loom__word_counts *words) {
    uint64_t wanted = words->slot_count ? 2 * words->slot_count : 1024;
    int64_t *slots = malloc(wanted * sizeof *slots);
    if (!slots)
        return no_memory("words");
    free(words->slots);
    memset(slots, 0xff, wanted * sizeof *slots);
    words->slots = slots;
    words->slot_count = wanted;
    for (int64_t i = 0; i < words->count; i++) {
        const struct loom__counted_word *word = &words->words[i];
        slots[slot_of(words, words->texts + word->offset, word->bytes)] = i;
    }
    return LOOM_OK;
}

static loom_status reserve_word(loom__word_counts *words, size_t bytes) {
    if (words->count == words->capacity) {
        int64_t capacity = words->capacity ? 2 * words->capacity : 1024;
        struct loom__counted_word *grown = realloc(words->words, (size_t)capacity * sizeof *grown);
        if (!grown)
            return no_memory("words");
        words->words = grown;
        words->capacity = capacity;
    }
    if (bytes > words->text_capacity - words->text_bytes) {
        size_t capacity = 2 * words->text_capacity + bytes + 4096;
        char *grown = realloc(words->texts, capacity);
        if (!grown)
            return no_memory("words");
        words->texts = grown;
        words->text_capacity = capacity;
    }
    return LOOM_OK;
}

loom_status loom__word_counts_add(loom__word_counts *words, const char *text, size_t bytes) {
    if (2 * ((uint64_t)words->count + 1) > words->slot_count)
        LOOM_TRY(grow_slots(words));
    uint64_t slot = slot_of(words, text, bytes);
    if (words->slots[slot] < 0) {
        LOOM_TRY(reserve_word(words, bytes));
        words->words[words->count] = (struct loom__counted_word){.offset = words->text_bytes, .bytes = (uint32_t)bytes};
        memcpy(words->texts + words->text_bytes, text, bytes);
        words->text_bytes += bytes;
        words->slots[slot] = words->count++;
    }
    words->words[words->slots[slot]].count++;
    return LOOM_OK;
}

/* ---- learning ---- */

enum { NONE = -1 };

typedef struct pair {
    uint32_t left, right;
    int64_t count; /* in all words */
    int64_t users; /* the first of its list in `nodes`; NONE */
    bool changed;  /* by the join in work */
} pair;

typedef struct node {
    int64_t word, next;
} node;

typedef struct entry {
    int64_t count; /* when it was pushed */
    int64_t pair;
} entry;

typedef struct learning {
    const loom__word_counts *words;
    uint32_t *symbols; /* of all words; those of word i from words->words[i].offset on, at most as many as bytes */
    uint32_t *lengths; /* [words] of them are left */
    loom__map numbers; /* left << 32 | right -> number in pairs */
    pair *pairs;
    int64_t pair_count, pair_capacity;
    node *nodes;
    int64_t node_count, node_capacity;
    entry *heap;
    int64_t heap_count, heap_capacity;
    int64_t *changed; /* pairs that became more frequent by the join in work */
    int64_t changed_count, changed_capacity;
    loom__bpe texts; /* ids by text, so that a token has one id however it is joined */
    char **made;     /* [made_count] the texts of new tokens */
    int64_t made_count;
} learning;

static loom_status grow(void **array, int64_t *capacity, size_t size) {
    int64_t wanted = *capacity ? 2 * *capacity : 1024;
    void *grown = realloc(*array, (size_t)wanted * size);
    if (!grown)
        return no_memory("pairs");
    *array = grown;
    *capacity = wanted;
    return LOOM_OK;
}

static bool goes_before(const learning *l, const entry *a, const entry *b) {
    if (a->count != b->count)
        return a->count > b->count;
    const pair *x = &l->pairs[a->pair], *y = &l->pairs[b->pair];
    return x->left != y->left ? x->left < y->left : x->right < y->right;
}

static loom_status push(learning *l, int64_t number) {
    if (l->heap_count == l->heap_capacity)
        LOOM_TRY(grow((void **)&l->heap, &l->heap_capacity, sizeof *l->heap));
    const entry added = {.count = l->pairs[number].count, .pair = number};
    int64_t at = l->heap_count++;
    for (; at > 0 && goes_before(l, &added, &l->heap[(at - 1) / 2]); at = (at - 1) / 2)
        l->heap[at] = l->heap[(at - 1) / 2];
    l->heap[at] = added;
    return LOOM_OK;
}

static entry pop(learning *l) {
    const entry first = l->heap[0], last = l->heap[--l->heap_count];
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child + 1 < l->heap_count && goes_before(l, &l->heap[child + 1], &l->heap[child]))
            child++;
        if (child >= l->heap_count || !goes_before(l, &l->heap[child], &last))
            break;
        l->heap[at] = l->heap[child];
        at = child;
    }
    l->heap[at] = last;
    return first;
}

/* Counts the pair `sign` more times in the word; with a plus it belongs to the pair's words from now on. */
static loom_status count_pair(learning *l, uint32_t left, uint32_t right, int64_t word, int64_t sign) {
    uint64_t key = (uint64_t)left << 32 | right, number = loom__map_get(&l->numbers, key);
    if (number == UINT64_MAX) {
        if (l->pair_count == l->pair_capacity)
            LOOM_TRY(grow((void **)&l->pairs, &l->pair_capacity, sizeof *l->pairs));
        number = (uint64_t)l->pair_count;
        LOOM_TRY(loom__map_put(&l->numbers, key, number));
        l->pairs[l->pair_count++] = (pair){.left = left, .right = right, .users = NONE};
    }
    pair *p = &l->pairs[number];
    p->count += sign * l->words->words[word].count;
    if (sign < 0)
        return LOOM_OK;
    if (!p->changed) {
        if (l->changed_count == l->changed_capacity)
            LOOM_TRY(grow((void **)&l->changed, &l->changed_capacity, sizeof *l->changed));
        l->changed[l->changed_count++] = (int64_t)number;
        p->changed = true;
    }
    if (p->users != NONE && l->nodes[p->users].word == word)
        return LOOM_OK;
    if (l->node_count == l->node_capacity)
        LOOM_TRY(grow((void **)&l->nodes, &l->node_capacity, sizeof *l->nodes));
    l->nodes[l->node_count] = (node){.word = word, .next = p->users};
    p->users = l->node_count++;
    return LOOM_OK;
}

static loom_status count_word(learning *l, int64_t word, int64_t sign) {
    const uint32_t *symbols = l->symbols + l->words->words[word].offset;
    for (uint32_t i = 0; i + 1 < l->lengths[word]; i++)
        LOOM_TRY(count_pair(l, symbols[i], symbols[i + 1], word, sign));
    return LOOM_OK;
}

static loom_status push_changed(learning *l) {
    for (int64_t i = 0; i < l->changed_count; i++) {
        pair *p = &l->pairs[l->changed[i]];
        p->changed = false;
        if (p->count > 0)
            LOOM_TRY(push(l, l->changed[i]));
    }
    l->changed_count = 0;
    return LOOM_OK;
}

/* A list may name a word again that was joined already, and one whose pair another join took away: nothing happens
 * then.
 */
static loom_status join_word(learning *l, int64_t word, const loom__join *join) {
    uint32_t *symbols = l->symbols + l->words->words[word].offset, length = l->lengths[word], kept = 0;
    for (uint32_t i = 0; i < length; i++) {
        if (i + 1 == length || symbols[i] != join->left || symbols[i + 1] != join->right) {
            symbols[kept++] = symbols[i];
            continue;
        }
        LOOM_TRY(count_pair(l, join->left, join->right, word, -1));
        if (kept > 0) {
            LOOM_TRY(count_pair(l, symbols[kept - 1], join->left, word, -1));
            LOOM_TRY(count_pair(l, symbols[kept - 1], join->joined, word, 1));
        }
        if (i + 2 < length) {
            LOOM_TRY(count_pair(l, join->right, symbols[i + 2], word, -1));
            LOOM_TRY(count_pair(l, join->joined, symbols[i + 2], word, 1));
        }
        symbols[kept++] = join->joined;
        i++;
    }
    l->lengths[word] = kept;
    return LOOM_OK;
}

/* The id of the token that the pair gives: its own where the text is one already. */
static loom_status find_joined(learning *l, const pair *p, uint32_t *id) {
    const loom__bpe_piece *left = &l->texts.pieces[p->left], *right = &l->texts.pieces[p->right];
    size_t bytes = (size_t)left->bytes + right->bytes;
    char *text = malloc(bytes);
    if (!text)
        return no_memory("tokens");
    memcpy(text, left->text, left->bytes);
    memcpy(text + left->bytes, right->text, right->bytes);
    *id = loom__bpe_find(&l->texts, text, bytes);
    if (*id != LOOM__NO_TOKEN) {
        free(text);
        return LOOM_OK;
    }
    *id = 256 + (uint32_t)l->made_count;
    l->made[l->made_count++] = text;
    loom__bpe_add(&l->texts, *id, text, (uint32_t)bytes, true);
    return LOOM_OK;
}

static loom_status join_pair(learning *l, int64_t number, loom__join *join) {
    const pair chosen = l->pairs[number];
    *join = (loom__join){.left = chosen.left, .right = chosen.right};
    LOOM_TRY(find_joined(l, &chosen, &join->joined));
    l->pairs[number].users = NONE;
    for (int64_t n = chosen.users; n != NONE; n = l->nodes[n].next)
        LOOM_TRY(join_word(l, l->nodes[n].word, join));
    return push_changed(l);
}

static loom_status begin(learning *l, const uint32_t byte_ids[256], int64_t tokens, char bytes[256]) {
    LOOM_TRY(loom__bpe_create(&l->texts, 256 + (uint32_t)tokens));
    l->symbols = malloc((l->words->text_bytes + 1) * sizeof *l->symbols);
    l->lengths = malloc(((size_t)l->words->count + 1) * sizeof *l->lengths);
    l->made = calloc((size_t)tokens + 1, sizeof *l->made);
    if (!l->symbols || !l->lengths || !l->made)
        return no_memory("words");
    for (int byte = 0; byte < 256; byte++) {
        bytes[byte] = (char)byte;
        loom__bpe_add(&l->texts, byte_ids[byte], &bytes[byte], 1, true);
    }
    for (size_t i = 0; i < l->words->text_bytes; i++)
        l->symbols[i] = byte_ids[(unsigned char)l->words->texts[i]];
    for (int64_t w = 0; w < l->words->count; w++) {
        l->lengths[w] = l->words->words[w].bytes;
        LOOM_TRY(count_word(l, w, 1));
    }
    return push_changed(l);
}

static loom_status learn(learning *l, int64_t tokens, loom__join **joins, int64_t *join_count) {
    int64_t capacity = 0;
    while (l->made_count < tokens && l->heap_count > 0) {
        entry top = pop(l);
        int64_t count = l->pairs[top.pair].count;
        if (count != top.count && count > 0)
            LOOM_TRY(push(l, top.pair));
        if (count != top.count || count <= 0)
            continue;
        if (*join_count == capacity)
            LOOM_TRY(grow((void **)joins, &capacity, sizeof **joins));
        LOOM_TRY(join_pair(l, top.pair, &(*joins)[*join_count]));
        ++*join_count;
    }
    return LOOM_OK;
}

static void end(learning *l) {
    for (int64_t i = 0; l->made && i < l->made_count; i++)
        free(l->made[i]);
    free(l->made);
    free(l->symbols);
    free(l->lengths);
    free(l->pairs);
    free(l->nodes);
    free(l->heap);
    free(l->changed);
    loom__map_free(&l->numbers);
    loom__bpe_free(&l->texts);
}

loom_status loom__bpe_train(const loom__word_counts *words, const uint32_t byte_ids[256], int64_t tokens,
    loom__join **joins, int64_t *join_count) {
    learning l = {.words = words};
    char bytes[256];
    loom__join *made = NULL;
    int64_t count = 0;
    loom_status status = begin(&l, byte_ids, tokens, bytes);
    if (status == LOOM_OK)
        status = learn(&l, tokens, &made, &count);
    end(&l);
    if (status != LOOM_OK) {
        free(made);
        return status;
    }
    *joins = made;
    *join_count = count;
    return LOOM_OK;
}
