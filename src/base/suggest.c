/* Suggestions come from the checks themselves. What a check would accept is not computed by a second rule beside it,
 * which could forget what a third one asks: values near the one at fault, divisors and multiples of the numbers that
 * the faults tell, are put in place of it one after the other, and all checks are made. The invariant: what is offered
 * has passed, and has brought no fault that was not there.
 *
 * Two faults are the same where they name the same variables in the same order, or one at most and the same words, so
 * that other numbers in a line, or "ranks" for "rank", make no other fault of it. */
#include "base/suggest.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    LINES_MAX = 64,        /* as bits of a mask; faults are at most LOOM__FAULTS_MAX where looking for them ends */
    NAMED_MAX = 32,        /* variables that are tried, and of one line */
    NUMBERS_MAX = 24,      /* of the lines that name a variable */
    POOL_MAX = 64,         /* those, and the values of all variables */
    SIDE_MAX = 384,        /* values tried below, and above */
    SMALL = 16,            /* values from the lowest on */
    NEIGHBOURS = 24,       /* values next to the one at fault */
    NUMBER_NEIGHBOURS = 6, /* and next to each number */
    MULTIPLES = 32,        /* of each number, on each side */
    COUNTED = 2,           /* what may be counted besides, as the embedding and the loss are as layers */
    ROOT_MAX = 1 << 16     /* up to which divisors are looked for: a message may not take longer than what it refuses */
};

typedef struct line {
    const char *text;
    size_t length;
    uint64_t same; /* equal for two lines that tell the same fault */
    int named[NAMED_MAX];
    int count;
} line;

typedef struct lines {
    loom__faults faults;
    line line[LINES_MAX];
    int count;
} lines;

/* A value, what it leaves of the faults, and whether it brings others. */
typedef struct outcome {
    int64_t value;
    uint64_t left;
    bool adds;
} outcome;

/* What is offered of a variable. */
typedef struct offer {
    int variable;
    char text[48];
    uint64_t mended;
    int left;
} offer;

static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

static int find_variable(const loom__trial *trial, const char *word, size_t length) {
    for (int i = 0; i < (int)trial->count; i++) {
        const char *name = trial->variables[i].name;
        if (*name == *word && strncmp(name, word, length) == 0 && name[length] == '\0')
            return i;
    }
    return -1;
}

static void hash(uint64_t *sum, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        *sum = (*sum ^ (unsigned char)bytes[i]) * UINT64_C(1099511628211);
}

static void read_line(const loom__trial *trial, line *l) {
    uint64_t by_name = UINT64_C(14695981039346656037), by_text = by_name;
    for (size_t at = 0; at < l->length;) {
        size_t word = 0;
        while (at + word < l->length && is_word(l->text[at + word]))
            word++;
        int found = word > 0 ? find_variable(trial, l->text + at, word) : -1;
        if (found >= 0) {
            hash(&by_name, l->text + at, word);
            hash(&by_name, " ", 1);
            int i = 0;
            while (i < l->count && l->named[i] != found)
                i++;
            if (i == l->count && l->count < NAMED_MAX)
                l->named[l->count++] = found;
        }
        if (word > 0 && (l->text[at] < '0' || l->text[at] > '9'))
            hash(&by_text, l->text + at, word);
        at += word > 0 ? word : 1;
    }
    l->same = l->count > 1 ? by_name : by_text;
}

static void split(const loom__trial *trial, const loom__faults *faults, lines *all) {
    for (const char *at = faults->text; *at && all->count < LINES_MAX;) {
        line *l = &all->line[all->count++];
        *l = (line){.text = at, .length = strcspn(at, "\n")};
        read_line(trial, l);
        at += l->length + (at[l->length] == '\n');
    }
}

/* The lines point into `all`. */
static void check(const loom__trial *trial, lines *all) {
    all->count = 0;
    loom__faults_begin(&all->faults);
    trial->check(trial->context, &all->faults);
    split(trial, &all->faults, all);
}

static outcome judge(const loom__trial *trial, const lines *before, int64_t value) {
    lines after;
    outcome made = {.value = value};
    check(trial, &after);
    for (int i = 0; i < after.count; i++) {
        bool known = false;
        for (int b = 0; b < before->count; b++)
            if (before->line[b].same == after.line[i].same) {
                known = true;
                made.left |= UINT64_C(1) << b;
            }
        made.adds |= !known;
    }
    return made;
}

static outcome try_number(const loom__trial *trial, const lines *before, const loom__variable *v, int64_t value) {
    int64_t found = *v->number;
    *v->number = value;
    outcome made = judge(trial, before, value);
    *v->number = found;
    return made;
}

static outcome try_flag(const loom__trial *trial, const lines *before, const loom__variable *v) {
    *v->flag = !*v->flag;
    outcome made = judge(trial, before, *v->flag);
    *v->flag = !*v->flag;
    return made;
}

/* ---- which values */

/* The nearest ones on one side of the value at fault, the nearest first. */
typedef struct side {
    int64_t values[SIDE_MAX];
    int count;
} side;

typedef struct candidates {
    int64_t from, low, high;
    side below, above;
} candidates;

static void add_candidate(candidates *c, int64_t value) {
    bool below = value < c->from;
    if (value < c->low || value > c->high)
        return;
    side *s = below ? &c->below : &c->above;
    int place = s->count;
    while (place > 0 && (below ? s->values[place - 1] < value : s->values[place - 1] > value))
        place--;
    if (place == SIDE_MAX || (place > 0 && s->values[place - 1] == value))
        return;
    int moved = s->count - place - (s->count == SIDE_MAX);
    memmove(s->values + place + 1, s->values + place, (size_t)moved * sizeof *s->values);
    s->values[place] = value;
    s->count += s->count < SIDE_MAX;
}

static void add_divisors(candidates *c, int64_t n) {
    for (int64_t d = 1; d <= ROOT_MAX && d <= n / d; d++)
        if (n % d == 0) {
            add_candidate(c, d);
            add_candidate(c, n / d);
        }
}

/* Those around `near` that are `rest` more than a multiple of n. */
static void add_multiples(candidates *c, int64_t n, int64_t rest, int64_t near, int64_t each_side) {
    int64_t k = (near - rest) / n;
    for (int64_t i = k - each_side; i <= k + each_side; i++)
        if (i > -LOOM__NUMBER_MAX / n && i < LOOM__NUMBER_MAX / n)
            add_candidate(c, i * n + rest);
}

static int add_number(int64_t *numbers, int count, int most, int64_t n) {
    int i = 0;
    while (i < count && numbers[i] != n)
        i++;
    if (n < 1 || n > LOOM__NUMBER_MAX || i < count || count == most)
        return count;
    numbers[count] = n;
    return count + 1;
}

/* The whole numbers of a line, into `numbers` from `count` on; returns how many there are then. */
static int read_numbers(const line *l, int64_t *numbers, int count) {
    for (size_t at = 0; at < l->length;) {
        size_t word = 0;
        int64_t n = 0;
        bool digits = true;
        while (at + word < l->length && is_word(l->text[at + word])) {
            char c = l->text[at + word++];
            digits &= c >= '0' && c <= '9' && n <= LOOM__NUMBER_MAX / 10;
            n = digits ? 10 * n + (c - '0') : 0;
        }
        if (word > 0 && digits)
            count = add_number(numbers, count, NUMBERS_MAX, n);
        at += word > 0 ? word : 1;
    }
    return count;
}

static bool names(const line *l, int variable) {
    for (int i = 0; i < l->count; i++)
        if (l->named[i] == variable)
            return true;
    return false;
}

/* What a check asks is that a value divides a number, is a multiple of some (layers: of what the ends leave for each
 * stage between them), or is not beyond one; the numbers are in the lines or are values of other variables. */
static void find_candidates(const loom__trial *trial, const lines *before, int variable, candidates *c) {
    int64_t pool[POOL_MAX];
    int count = 0, all;
    for (int i = 0; i < before->count; i++)
        if (names(&before->line[i], variable))
            count = read_numbers(&before->line[i], pool, count);
    all = count;
    for (int i = 0; i < (int)trial->count; i++)
        if (trial->variables[i].number)
            all = add_number(pool, all, POOL_MAX, *trial->variables[i].number);
    for (int64_t by = 0; by <= NEIGHBOURS; by++) {
        add_candidate(c, c->from - by);
        add_candidate(c, c->from + by);
        if (by < SMALL)
            add_candidate(c, c->low + by);
    }
    for (int i = 0; i < count; i++) {
        add_divisors(c, pool[i]);
        add_multiples(c, pool[i], 0, c->from, MULTIPLES);
        for (int64_t by = -NUMBER_NEIGHBOURS; by <= NUMBER_NEIGHBOURS; by++)
            add_candidate(c, pool[i] + by);
        for (int64_t rest = -COUNTED; rest <= COUNTED; rest++)
            add_multiples(c, pool[i], rest, c->from, 1);
        for (int j = 0; j < all; j++) {
            if (j < count)
                add_multiples(c, pool[i], pool[j], c->from, 1);
            add_multiples(c, pool[j], 0, pool[i], 1);
        }
    }
}

/* ---- which of them are offered */

/* Outcomes of one side, in order, up to one that leaves nothing. */
static int try_side(
    const loom__trial *trial, const lines *before, const loom__variable *v, const side *s, outcome outcomes[SIDE_MAX]) {
    int count = 0;
    while (count < s->count) {
        outcomes[count] = try_number(trial, before, v, s->values[count]);
        count++;
        if (outcomes[count - 1].left == 0 && !outcomes[count - 1].adds)
            break;
    }
    return count;
}

/* Bits of the lines that name the variable. */
static uint64_t lines_of(const lines *before, int variable) {
    uint64_t mask = 0;
    for (int i = 0; i < before->count; i++)
        mask |= (uint64_t)names(&before->line[i], variable) << i;
    return mask;
}

/* The first of those that leave fewest faults, of those that mend all of `mend`; NULL = there is none. */
static const outcome *choose(const outcome *outcomes, int count, uint64_t mend, int *fewest) {
    const outcome *best = NULL;
    for (int i = 0; i < count; i++) {
        int left = __builtin_popcountll(outcomes[i].left);
        if (outcomes[i].adds || (outcomes[i].left & mend) || left > *fewest || (best && left == *fewest))
            continue;
        best = &outcomes[i];
        *fewest = left;
    }
    return best;
}

static uint64_t mended_by(const outcome *outcomes, int count, uint64_t of) {
    uint64_t mended = 0;
    for (int i = 0; i < count; i++)
        mended |= outcomes[i].adds ? 0 : of & ~outcomes[i].left;
    return mended;
}

static int64_t clamp(int64_t n) {
    return n > LOOM__NUMBER_MAX ? LOOM__NUMBER_MAX : n < -LOOM__NUMBER_MAX ? -LOOM__NUMBER_MAX : n;
}

static bool offer_number(const loom__trial *trial, const lines *before, int variable, offer *made) {
    const loom__variable *v = &trial->variables[variable];
    candidates c = {.from = clamp(*v->number ? *v->number : v->stands_for), .low = v->low, .high = v->high};
    outcome below[SIDE_MAX], above[SIDE_MAX], none = {.adds = true};
    int below_count = 0, above_count = 0, fewest = LINES_MAX;
    if (*v->number != 0 || v->stands_for > 0 || !v->nullable) {
        find_candidates(trial, before, variable, &c);
        below_count = try_side(trial, before, v, &c.below, below);
        above_count = try_side(trial, before, v, &c.above, above);
    }
    if (v->nullable && *v->number != 0)
        none = try_number(trial, before, v, 0);
    uint64_t of = lines_of(before, variable),
             mend = mended_by(below, below_count, of) | mended_by(above, above_count, of) | mended_by(&none, 1, of);
    if (mend == 0)
        return false;
    choose(above, above_count, mend, &fewest);
    const outcome *low = choose(below, below_count, mend, &fewest), *high = choose(above, above_count, mend, &fewest);
    const outcome *null = low || high ? NULL : choose(&none, 1, mend, &fewest);
    if (!low && !high && !null)
        return false;
    if (low && high)
        snprintf(made->text, sizeof made->text, "%" PRId64 " or %" PRId64, low->value, high->value);
    else if (null)
        snprintf(made->text, sizeof made->text, "null");
    else
        snprintf(made->text, sizeof made->text, "%" PRId64, low ? low->value : high->value);
    made->mended = mend;
    made->left = fewest;
    return true;
}

static bool offer_flag(const loom__trial *trial, const lines *before, int variable, offer *made) {
    const loom__variable *v = &trial->variables[variable];
    outcome other = try_flag(trial, before, v);
    made->mended = mended_by(&other, 1, lines_of(before, variable));
    made->left = __builtin_popcountll(other.left);
    snprintf(made->text, sizeof made->text, "%s", *v->flag ? "false" : "true");
    return made->mended != 0;
}

static int find_offers(const loom__trial *trial, const lines *before, offer offers[NAMED_MAX]) {
    uint8_t seen[LOOM__VARIABLES_MAX] = {0};
    int count = 0;
    for (int i = 0; i < before->count; i++) {
        for (int n = 0; n < before->line[i].count && count < NAMED_MAX; n++) {
            int variable = before->line[i].named[n];
            if (seen[variable]++)
                continue;
            offer *made = &offers[count];
            made->variable = variable;
            count += trial->variables[variable].number ? offer_number(trial, before, variable, made)
                                                       : offer_flag(trial, before, variable, made);
        }
    }
    return count;
}

/* Of what mends the line, what leaves fewest of the others, in the order in which the line names it. */
static void say(
    const loom__trial *trial, const line *l, uint64_t bit, const offer *offers, int count, char *text, size_t bytes) {
    const offer *chosen[NAMED_MAX];
    int said = 0, fewest = LINES_MAX;
    *text = '\0';
    for (int n = 0; n < l->count; n++) {
        for (int i = 0; i < count; i++) {
            if (offers[i].variable != l->named[n] || !(offers[i].mended & bit) || offers[i].left > fewest)
                continue;
            said = offers[i].left < fewest ? 0 : said;
            fewest = offers[i].left;
            chosen[said++] = &offers[i];
        }
    }
    size_t used = 0;
    for (int i = 0; i < said && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s %s",
            i == 0         ? "; nearest legal "
            : i < said - 1 ? ", "
                           : ", or ",
            trial->variables[chosen[i]->variable].name, chosen[i]->text);
}

void loom__faults_suggest(loom__faults *faults, const loom__trial *trial) {
    lines before;
    offer offers[NAMED_MAX];
    if (faults->count == 0 || trial->count > LOOM__VARIABLES_MAX)
        return;
    check(trial, &before);
    int count = find_offers(trial, &before, offers);
    for (int i = 0; i < before.count; i++) {
        char text[1024];
        const line *l = &before.line[i];
        say(trial, l, UINT64_C(1) << i, offers, count, text, sizeof text);
        loom__faults_append(faults, l->text, l->length, text);
    }
}
