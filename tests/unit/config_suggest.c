/* What a fault offers is legal. From legal configurations one number or flag is made illegal, each in many ways; every
 * value that the faults then offer is put in alone and checked again, and what single values would have been legal is
 * found by trying all of them, without the search that made the offers. */
#include "config/check.h"
#include "config/field.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    FIELDS = 16,
    LINES_MAX = 64,
    OFFERS_MAX = 32,
    BOUND = 96, /* up to which every value is tried */
    THINNED = 7 /* of so many cases one is taken */
};

#define DENSE                                                                                                          \
    "steps=100", "data.kind=mock", "model.architecture=llama", "model.vocab_size=256", "model.seq_length=96",          \
        "model.num_layers=12", "model.hidden_size=96", "model.ffn_hidden_size=192", "model.num_attention_heads=12",    \
        "data.micro_batch_size=1"
#define TP(n) "strategy.tensor_model_parallel_size=" #n
#define PP(n) "strategy.pipeline_model_parallel_size=" #n
#define VP(n) "strategy.virtual_pipeline_model_parallel_size=" #n
#define CP(n) "strategy.context_parallel_size=" #n
#define EP(n) "strategy.expert_model_parallel_size=" #n
#define ETP(n) "strategy.expert_tensor_parallel_size=" #n
#define BATCH(n) "data.global_batch_size=" #n
#define GROUPS(n) "model.num_query_groups=" #n
#define SEQUENCE_PARALLEL "strategy.sequence_parallel=true"

static const struct base {
    int64_t world;
    const char *fields[24 + FIELDS];
} bases[] = {
    {1, {DENSE}},
    {8, {DENSE, TP(2), PP(2), BATCH(8)}},
    {8, {DENSE, TP(4), GROUPS(4), SEQUENCE_PARALLEL, BATCH(6)}},
    {24, {DENSE, TP(3), PP(4), BATCH(16), "data.micro_batch_size=2", "model.padded_vocab_size=300"}},
    {6, {DENSE, TP(6), GROUPS(3), "model.replicate_query_groups=true", BATCH(5)}},
    {4, {DENSE, PP(2), VP(3), BATCH(8)}},
    {8, {DENSE, PP(4), VP(3), BATCH(24), "strategy.microbatch_group_size_per_vp_stage=6"}},
    {4, {DENSE, PP(4), "model.num_layers=11", "model.num_layers_in_first_pipeline_stage=2", BATCH(4)}},
    {4, {DENSE, PP(4), "model.num_layers=10", "model.account_for_embedding_in_pipeline_split=true",
            "model.account_for_loss_in_pipeline_split=true"}},
    {5, {DENSE, PP(5), "model.balanced_pipeline_split=true", BATCH(7)}},
    {4, {DENSE, PP(2), "model.pipeline_model_parallel_layout=\"Et*3|t*3|t*3|t*3L\"", BATCH(8)}},
    {8, {DENSE, CP(4), TP(2), SEQUENCE_PARALLEL, BATCH(3)}},
    {6, {DENSE, CP(3), "model.cp_comm_type=all_gather", BATCH(4)}},
    {12, {DENSE, CP(2), TP(2), GROUPS(4), "model.cp_comm_type=a2a", BATCH(9)}},
    {8, {DENSE, CP(4), "model.cp_comm_type=a2a+p2p", "model.hierarchical_context_parallel_sizes=[2, 2]", BATCH(8)}},
    {8, {DENSE, "model.num_moe_experts=8", EP(4), TP(2), SEQUENCE_PARALLEL, ETP(1),
            "model.moe_shared_expert_intermediate_size=64", BATCH(8)}},
    {16, {DENSE, "model.num_moe_experts=12", EP(2), TP(2), PP(2), SEQUENCE_PARALLEL, "model.moe_router_num_groups=3",
             "model.moe_router_group_topk=2", BATCH(16)}},
    {8, {DENSE, "model.num_moe_experts=4", EP(2), TP(2), SEQUENCE_PARALLEL, "strategy.moe_extended_tp=true",
            "model.moe_ffn_hidden_size=48"}},
    {16, {DENSE, "model.num_moe_experts=8", EP(4), ETP(1), TP(2), CP(2), PP(2), SEQUENCE_PARALLEL,
             "strategy.use_tp_pp_dp_mapping=true", BATCH(4)}},
    {8, {DENSE, TP(2), "strategy.num_distributed_optimizer_instances=2", "strategy.ddp.use_distributed_optimizer=true",
            BATCH(4)}},
    {4, {DENSE, PP(2), VP(2), BATCH(32), "data.rampup_batch_size=[8, 8, 100]"}},
    {2, {DENSE, "model.architecture=gpt2", "model.max_position_embeddings=100", BATCH(6)}},
    {3072, {DENSE, "model.num_layers=128", "model.hidden_size=25600", "model.num_attention_heads=160",
               "model.ffn_hidden_size=102400", "model.seq_length=2048", TP(8), PP(64), BATCH(3072)}},
    {16384, {DENSE, "model.num_layers=128", "model.hidden_size=16384", "model.num_attention_heads=128", GROUPS(8),
                "model.ffn_hidden_size=53248", "model.seq_length=8192", TP(8), PP(16), VP(8), BATCH(2048)}},
};
enum { BASES = sizeof bases / sizeof *bases };

static loom_run_config *load(const struct base *base) {
    loom_run_config *config = NULL;
    int64_t count = 0;
    while (base->fields[count])
        count++;
    if (loom_run_config_from_text("run.yaml", "", 0, base->fields, count, &config) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return config;
}

/* ---- a fault's line, and what it offers */

typedef struct offer {
    char name[64], value[96];
} offer;

typedef struct line {
    char text[2048];    /* before what is offered */
    char letters[2048]; /* of that: lines of one check differ in numbers */
    offer offers[OFFERS_MAX];
    int count;
} line;

typedef struct report {
    line lines[LINES_MAX];
    int count;
} report;

static const char word_letters[] = "abcdefghijklmnopqrstuvwxyz0123456789_";

static bool has_word(const char *text, const char *word) {
    size_t length = strlen(word);
    for (const char *at = text; (at = strstr(at, word)); at += length)
        if ((at == text || !strchr(word_letters, at[-1])) && (!at[length] || !strchr(word_letters, at[length])))
            return true;
    return false;
}

static void add_offer(line *l, const char *name, const char *value) {
    assert_true(l->count < OFFERS_MAX);
    snprintf(l->offers[l->count].name, sizeof l->offers->name, "%s", name);
    snprintf(l->offers[l->count++].value, sizeof l->offers->value, "%s", value);
}

static const char ramp_up[] = "rampup_batch_size";

/* "A 2 or 4, B null, or C true", "D [1, 2, 3]" */
static void read_offers(char *text, line *l) {
    for (char *item = text, *next; item; item = next) {
        char first[32], second[32], name[64];
        bool list = strncmp(item, ramp_up, sizeof ramp_up - 1) == 0;
        next = strstr(list ? strchr(item, ']') : item, ", ");
        if (next) {
            *next = '\0';
            next += 2;
            if (strncmp(next, "or ", 3) == 0)
                next += 3;
        }
        if (list) {
            add_offer(l, ramp_up, item + sizeof ramp_up);
            continue;
        }
        int found = sscanf(item, "%63s %31s or %31s", name, first, second);
        if (found < 2)
            fail_msg("cannot read what is offered: '%s' of '%s'", item, l->text);
        add_offer(l, name, first);
        if (found == 3)
            add_offer(l, name, second);
    }
}

static void read_report(const char *message, report *r) {
    static const char mark[] = "; nearest legal ";
    r->count = 0;
    for (const char *at = message; *at;) {
        size_t length = strcspn(at, "\n"), used = 0;
        line *l = &r->lines[r->count++];
        assert_true(r->count < LINES_MAX && length < sizeof l->text);
        memcpy(l->text, at, length);
        l->text[length] = '\0';
        l->count = 0;
        char *offers = strstr(l->text, mark);
        if (offers) {
            *offers = '\0';
            read_offers(offers + sizeof mark - 1, l);
        }
        for (const char *c = l->text; *c; c++)
            if ((*c < '0' || *c > '9') && *c != ' ')
                l->letters[used++] = *c;
        l->letters[used] = '\0';
        at += length + (at[length] == '\n');
    }
}

static bool has_letters(const report *r, const char *letters) {
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->lines[i].letters, letters) == 0)
            return true;
    return false;
}

/* ---- one configuration and its ranks */

typedef struct subject {
    loom_run_config config;
    int64_t world;
} subject;

/* Asked without a search for what else is legal. */
static bool find_faults(const subject *s, loom__faults *faults) {
    loom__faults_begin(faults);
    loom__check_sizes(&s->config, s->world, faults);
    return faults->count > 0;
}

static bool is_legal(const subject *s) {
    loom__faults faults;
    return !find_faults(s, &faults);
}

static const loom__field *field_named(const char *name) {
    static const char *const sections[] = {"model.", "strategy.", "data."};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s%s", sections[i], name);
        int64_t found = loom__field_find(path);
        if (found >= 0)
            return &loom__fields[found];
    }
    return NULL;
}

static int64_t *number_of(subject *s, const char *name) {
    if (strcmp(name, "world_size") == 0)
        return &s->world;
    const loom__field *field = field_named(name);
    return field && field->kind == LOOM__FIELD_INT && !field->not_built ? loom__field_at(field, &s->config) : NULL;
}

/* Whether the table takes it: a field with a fault of its own is told with its range, and judged no further. */
static bool is_in_range(const char *name, int64_t value) {
    const loom__field *field = field_named(name);
    return value >= 1 && (!field || field->high <= 0 || value <= (int64_t)field->high);
}

static void put(subject *s, const offer *o) {
    int64_t *number = number_of(s, o->name), *ramp = s->config.data.rampup_batch_size;
    const loom__field *field = field_named(o->name);
    if (strcmp(o->name, ramp_up) == 0)
        assert_int_equal(sscanf(o->value, "[%" SCNd64 ", %" SCNd64 ", %" SCNd64 "]", ramp, ramp + 1, ramp + 2), 3);
    else if (number)
        *number = strcmp(o->value, "null") == 0 ? 0 : strtoll(o->value, NULL, 10);
    else if (field && field->kind == LOOM__FIELD_BOOL)
        *(bool *)loom__field_at(field, &s->config) = strcmp(o->value, "true") == 0;
    else
        fail_msg("'%s %s' is offered, which is no field", o->name, o->value);
}

/* ---- the claims */

typedef struct tally {
    int64_t cases, illegal, lines, offers;
} tally;

static void check_offer(const char *id, const subject *s, const report *before, const line *l, const offer *o) {
    subject changed = *s;
    loom__faults faults;
    report after;
    put(&changed, o);
    if (!find_faults(&changed, &faults))
        return;
    read_report(faults.text, &after);
    if (has_letters(&after, l->letters))
        fail_msg(
            "%s: '%s' offers %s %s, which does not mend it: '%s'", id, l->text, o->name, o->value, after.lines[0].text);
    for (int i = 0; i < after.count; i++)
        if (!has_letters(before, after.lines[i].letters))
            fail_msg(
                "%s: '%s' offers %s %s, with which comes '%s'", id, l->text, o->name, o->value, after.lines[i].text);
}

/* The nearest value from `from` on in steps of `by` with which the whole is legal, 0 = there is none. */
static int64_t nearest_legal(const subject *s, const char *name, int64_t by) {
    subject changed = *s;
    int64_t *number = number_of(&changed, name), from = *number;
    for (int64_t i = 1; i <= BOUND && is_in_range(name, from + i * by); i++) {
        *number = from + i * by;
        if (is_legal(&changed))
            return *number;
    }
    return 0;
}

static bool is_offered(const line *l, const char *name, int64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, value);
    for (int i = 0; i < l->count; i++)
        if (strcmp(l->offers[i].name, name) == 0 && strcmp(l->offers[i].value, text) == 0)
            return true;
    return false;
}

/* If one value of a field that the line names makes all legal, the nearest such are offered, and nothing of the field
 * that does not. */
static void check_nearest(const char *id, const subject *s, const line *l, const char *name) {
    subject changed = *s;
    const int64_t *number = number_of(&changed, name);
    if (!number || *number == 0 || !has_word(l->text, name))
        return;
    for (int64_t by = -1; by <= 1; by += 2) {
        int64_t value = nearest_legal(s, name, by);
        if (value > 0 && !is_offered(l, name, value))
            fail_msg("%s: '%s' does not offer %s %" PRId64 ", which is legal", id, l->text, name, value);
        if (value == 0)
            continue;
        for (int i = 0; i < l->count; i++) {
            subject other = *s;
            put(&other, &l->offers[i]);
            if (strcmp(l->offers[i].name, name) == 0 && !is_legal(&other))
                fail_msg("%s: '%s' offers %s %s, with which not all is legal, as it is with %" PRId64, id, l->text,
                    name, l->offers[i].value, value);
        }
    }
}

/* Two lines that offer values of one field offer the same. */
static void check_agreement(const char *id, const report *r) {
    for (int a = 0; a < r->count; a++)
        for (int i = 0; i < r->lines[a].count; i++)
            for (int b = 0; b < r->count; b++) {
                const offer *o = &r->lines[a].offers[i];
                bool about = false;
                for (int j = 0; j < r->lines[b].count; j++)
                    about |= strcmp(r->lines[b].offers[j].name, o->name) == 0;
                bool same = false;
                for (int j = 0; j < r->lines[b].count; j++)
                    same |= about && strcmp(r->lines[b].offers[j].name, o->name) == 0 &&
                            strcmp(r->lines[b].offers[j].value, o->value) == 0;
                if (about && !same)
                    fail_msg("%s: '%s' offers %s %s, and '%s' does not", id, r->lines[a].text, o->name, o->value,
                        r->lines[b].text);
            }
}

static void check_case(const char *id, const subject *s, tally *t) {
    report before;
    /* MEGALOOM_ALL=1 takes all of them, a minute's work. */
    if (t->cases++ % THINNED != 0 && !getenv("MEGALOOM_ALL"))
        return;
    if (loom_run_config_check(&s->config, s->world) == LOOM_OK)
        return;
    read_report(loom_error_message(), &before);
    t->illegal++;
    check_agreement(id, &before);
    bool mends = false;
    for (int i = 0; i < before.count; i++) {
        const line *l = &before.lines[i];
        t->lines++;
        for (int o = 0; o < l->count; o++) {
            subject changed = *s;
            t->offers++;
            check_offer(id, s, &before, l, &l->offers[o]);
            put(&changed, &l->offers[o]);
            mends |= is_legal(&changed);
        }
        for (int64_t f = 0; f < loom__field_count; f++) {
            const char *dot = strchr(loom__fields[f].path, '.');
            if (dot && !strchr(dot + 1, '.'))
                check_nearest(id, s, l, dot + 1);
        }
        check_nearest(id, s, l, "world_size");
    }
    if (!mends)
        fail_msg("%s: nothing that is offered makes it legal: %s", id, loom_error_message());
}

static bool is_varied(const loom__field *field) {
    bool section = strncmp(field->path, "model.", 6) == 0 || strncmp(field->path, "strategy.", 9) == 0 ||
                   strncmp(field->path, "data.", 5) == 0;
    return section && strncmp(field->path, "strategy.ddp", 12) != 0 && !field->not_built;
}

static void vary(const char *id, const subject *s, const char *name, tally *t) {
    static const int64_t values[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 20, 25, 30, 48, 64, 100, 129, 1000,
        9973, 65536, INT64_C(1) << 40};
    char what[256];
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        subject changed = *s;
        int64_t *number = number_of(&changed, name);
        if (*number == values[i] || !is_in_range(name, values[i]))
            continue;
        *number = values[i];
        snprintf(what, sizeof what, "%s, %s %" PRId64, id, name, values[i]);
        check_case(what, &changed, t);
    }
}

static void what_is_offered_is_legal_and_nearest(void **state) {
    tally t = {0};
    (void)state;
    for (int b = 0; b < BASES; b++) {
        loom_run_config *config = load(&bases[b]);
        subject s = {*config, bases[b].world};
        char id[32];
        snprintf(id, sizeof id, "base %d", b);
        if (loom_run_config_check(&s.config, s.world) != LOOM_OK)
            fail_msg("%s: %s", id, loom_error_message());
        vary(id, &s, "world_size", &t);
        for (int64_t f = 0; f < loom__field_count; f++) {
            const loom__field *field = &loom__fields[f];
            const char *name = strchr(field->path, '.') ? strchr(field->path, '.') + 1 : field->path;
            if (!is_varied(field))
                continue;
            if (field->kind == LOOM__FIELD_INT)
                vary(id, &s, name, &t);
            if (field->kind == LOOM__FIELD_BOOL) {
                subject changed = s;
                char what[160];
                bool *flag = loom__field_at(field, &changed.config);
                *flag = !*flag;
                snprintf(what, sizeof what, "%s, other %s", id, name);
                check_case(what, &changed, &t);
            }
        }
        loom_run_config_destroy(config);
    }
    print_message("%" PRId64 " illegal configurations, %" PRId64 " faults, %" PRId64 " values offered\n", t.illegal,
        t.lines, t.offers);
    assert_true(t.illegal > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_offered_is_legal_and_nearest)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
