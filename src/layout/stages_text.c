/* A layout text becomes a flat list of parts: a symbol and how often, or the begin of a group with its repeats and its
 * end. All counting is done on that list with sums that stop at a bound, so that "((t*9999|)*9999)*9999" is refused
 * without being written out; only what passed is expanded, and each step of the expansion makes a layer or a stage. */
#include "layout/stages_text.h"
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char field[] = "pipeline_model_parallel_layout";

/* A part: symbol 'E', 't', 'm', 'L' or '|', `times` in a row; or '(', whose group is the parts up to `end`. */
typedef struct part {
    char symbol;
    int end; /* of a group: the part behind it */
    int64_t times;
} part;

typedef struct reader {
    const char *text;
    size_t at;
    part parts[LOOM__STAGES_PARTS_MAX];
    int count;
    loom__faults *faults;
} reader;

static bool fault(reader *r, const char *expected) {
    char found[24];
    unsigned char c = (unsigned char)r->text[r->at];
    if (c == '\0')
        strcpy(found, "the end");
    else if (isprint(c))
        snprintf(found, sizeof found, "'%c'", c);
    else
        snprintf(found, sizeof found, "byte 0x%02x", c);
    loom__faults_add(r->faults, LOOM_ERR_CONFIG, "%s: '%.80s', character %zu: found %s, expected %s", field, r->text,
        r->at + 1, found, expected);
    return false;
}

static bool too_long(reader *r) {
    loom__faults_add(r->faults, LOOM_ERR_CONFIG,
        "%s: '%.80s…' has more than %d parts: expected fewer, with x*n or (…)*n for repeats", field, r->text,
        LOOM__STAGES_PARTS_MAX);
    return false;
}

enum { MANY = 2 * LOOM__STAGES_MAX }; /* where counting stops */

static int64_t at_most_many(int64_t a) {
    return a < MANY ? a : MANY;
}

/* "*n" behind a symbol or a group. */
static bool read_times(reader *r, bool required, int64_t *times) {
    *times = 1;
    if (r->text[r->at] != '*')
        return !required || fault(r, "*n, the number of repeats, behind ')'");
    r->at++;
    if (!isdigit((unsigned char)r->text[r->at]))
        return fault(r, "a number of repeats >= 1");
    size_t first = r->at;
    int64_t n = 0;
    for (; isdigit((unsigned char)r->text[r->at]); r->at++)
        n = at_most_many(n * 10 + (r->text[r->at] - '0'));
    if (n == 0) {
        r->at = first;
        return fault(r, "a number of repeats >= 1");
    }
    *times = n;
    return true;
}

/* Reads up to the end or the ')' of this depth. */
static bool read_parts(reader *r, int depth) {
    int run = -1; /* the part before, where it is a symbol of this group */
    for (;;) {
        char symbol = r->text[r->at];
        if (symbol == ',') {
            r->at++;
            continue;
        }
        if (symbol == '\0' || symbol == ')')
            return depth > 0 || symbol == '\0' || fault(r, "no ')' without '('");
        if (r->count == LOOM__STAGES_PARTS_MAX)
            return too_long(r);
        if (symbol == '(') {
            int own = r->count;
            if (depth == LOOM__STAGES_DEPTH_MAX)
                return fault(r, "at most 32 groups one in another");
            r->at++;
            r->parts[r->count++] = (part){.symbol = '('};
            if (!read_parts(r, depth + 1))
                return false;
            if (r->text[r->at] != ')')
                return fault(r, "')'");
            if (r->count == own + 1)
                return fault(r, "something between '(' and ')'");
            r->at++;
            if (!read_times(r, true, &r->parts[own].times))
                return false;
            r->parts[own].end = r->count;
            run = -1;
        } else if (strchr("EtmL|", symbol)) {
            int64_t times;
            r->at++;
            if (!read_times(r, false, &times))
                return false;
            if (run >= 0 && r->parts[run].symbol == symbol && r->parts[run].times <= LOOM__STAGES_MAX) {
                r->parts[run].times += times;
            } else {
                run = r->count;
                r->parts[r->count++] = (part){.symbol = symbol, .times = times};
            }
        } else {
            return fault(r, "E, t, m, L, |, (…)*n or *n");
        }
    }
}

typedef struct totals {
    int64_t embedding, layers, prediction, loss, bars;
} totals;

static totals count_parts(const part *parts, int first, int end) {
    totals sum = {0};
    for (int i = first; i < end;) {
        const part *p = &parts[i];
        totals one = {.embedding = p->symbol == 'E',
            .layers = p->symbol == 't',
            .prediction = p->symbol == 'm',
            .loss = p->symbol == 'L',
            .bars = p->symbol == '|'};
        if (p->symbol == '(')
            one = count_parts(parts, i + 1, p->end);
        int64_t times = at_most_many(p->times);
        sum.embedding = at_most_many(sum.embedding + one.embedding * times);
        sum.layers = at_most_many(sum.layers + one.layers * times);
        sum.prediction = at_most_many(sum.prediction + one.prediction * times);
        sum.loss = at_most_many(sum.loss + one.loss * times);
        sum.bars = at_most_many(sum.bars + one.bars * times);
        i = p->symbol == '(' ? p->end : i + 1;
    }
    return sum;
}

static void check_once(reader *r, char symbol, const char *what, int64_t times, bool in_place, const char *place) {
    if (times != 1)
        loom__faults_add(r->faults, LOOM_ERR_CONFIG,
            "%s: '%.80s' has %s%" PRId64 " %c, %s: expected one, the %s symbol", field, r->text,
            times == MANY ? "at least " : "", times, symbol, what, place);
    else if (!in_place)
        loom__faults_add(r->faults, LOOM_ERR_CONFIG,
            "%s: '%.80s' has %c, %s, in the middle: expected it as the %s symbol", field, r->text, symbol, what, place);
}

bool loom__stages_text_count(const char *text, loom__stages_count *count, loom__faults *faults) {
    int64_t before = faults->count;
    reader r = {.text = text, .faults = faults};
    if (!read_parts(&r, 0))
        return false;
    totals sum = count_parts(r.parts, 0, r.count);
    int first = 0;
    while (first < r.count && r.parts[first].symbol == '(')
        first++;
    check_once(&r, 'E', "the embedding", sum.embedding, r.count > 0 && r.parts[first].symbol == 'E', "first");
    check_once(&r, 'L', "the loss", sum.loss, r.count > 0 && r.parts[r.count - 1].symbol == 'L', "last");
    if (sum.bars >= LOOM__STAGES_MAX || sum.layers > LOOM__STAGES_MAX)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: '%.80s' stands for more than %d %s: expected fewer", field, text,
            LOOM__STAGES_MAX, sum.bars >= LOOM__STAGES_MAX ? "stages" : "layers");
    *count = (loom__stages_count){.stages = sum.bars + 1, .layers = sum.layers, .prediction = sum.prediction};
    return faults->count == before;
}

static loom_stage *expand(const part *parts, int first, int end, loom_stage *stage) {
    for (int i = first; i < end;) {
        const part *p = &parts[i];
        if (p->symbol == 't') {
            stage->layers += p->times;
        } else if (p->symbol == '|') {
            for (int64_t n = 0; n < p->times; n++)
                (++stage)->layers = 0;
        } else if (p->symbol == '(') {
            for (int64_t n = 0; n < p->times; n++)
                stage = expand(parts, i + 1, p->end, stage);
        }
        i = p->symbol == '(' ? p->end : i + 1;
    }
    return stage;
}

void loom__stages_text_expand(const char *text, loom_stage *stages) {
    loom__faults unused;
    loom__faults_begin(&unused);
    reader r = {.text = text, .faults = &unused};
    if (!read_parts(&r, 0))
        return;
    stages->layers = 0;
    expand(r.parts, 0, r.count, stages);
}
