/* megaloom topology: every process group of a configuration, without running a rank. All answers come from
 * <megaloom/layout.h>; this file only reads the command line and lays out text. Groups are streamed, never stored, so
 * that a world of a million ranks prints as readily as one of eight. */
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <megaloom/layout.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2, KEY_RANK = 'r', KEY_WORLD = 'w', KEY_JSON = 'j' };

/* Groups are folded by looking at each member: up to here that takes no time that a person notices. */
enum { WORLD_MAX = 1 << 24 };

typedef struct topology_request {
    loom_parallel_sizes sizes;
    bool world_given, rank_given, json, failed;
    int64_t rank;
} topology_request;

/* The fields of the strategy that a layout depends on. */
#define FIELD(name, member)                                                                                            \
    { name, offsetof(loom_parallel_sizes, member) }
static const struct {
    const char *name;
    size_t offset;
} number_field[] = {
    FIELD("tensor_model_parallel_size", tensor),
    FIELD("pipeline_model_parallel_size", pipeline),
    FIELD("virtual_pipeline_model_parallel_size", virtual_pipeline),
    FIELD("context_parallel_size", context),
    FIELD("expert_model_parallel_size", expert),
    FIELD("expert_tensor_parallel_size", expert_tensor),
    FIELD("encoder_tensor_model_parallel_size", encoder_tensor),
    FIELD("encoder_pipeline_model_parallel_size", encoder_pipeline),
    FIELD("num_distributed_optimizer_instances", optimizer_instances),
};
enum { NUMBER_FIELDS = sizeof number_field / sizeof *number_field };
static const char *const other_field[] = {"hierarchical_context_parallel_sizes", "use_tp_pp_dp_mapping", "order"};
enum { OTHER_FIELDS = sizeof other_field / sizeof *other_field };
static const char prefix[] = "strategy.";

static void complain(topology_request *request, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void complain(topology_request *request, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("megaloom: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    request->failed = true;
}

static bool read_number(const char *text, int64_t *out) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || (*text != '-' && (*text < '0' || *text > '9')))
        return false;
    *out = value;
    return true;
}

/* Edits between two words (Levenshtein), to name the field that was meant. */
static size_t distance(const char *a, const char *b) {
    size_t row[64], length = strlen(b);
    if (length >= 64)
        return SIZE_MAX;
    for (size_t j = 0; j <= length; j++)
        row[j] = j;
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < length; j++) {
            size_t replaced = diagonal + (a[i] != b[j]), best = row[j + 1] < row[j] ? row[j + 1] : row[j];
            diagonal = row[j + 1];
            row[j + 1] = replaced < best + 1 ? replaced : best + 1;
        }
    }
    return row[length];
}

static const char *nearest_field(const char *name) {
    const char *best = number_field[0].name;
    for (int i = 1; i < NUMBER_FIELDS + OTHER_FIELDS; i++) {
        const char *candidate = i < NUMBER_FIELDS ? number_field[i].name : other_field[i - NUMBER_FIELDS];
        if (distance(name, candidate) < distance(name, best))
            best = candidate;
    }
    return best;
}

/* [4, 2], 4,2 or 4x2: innermost level first. */
static void read_levels(topology_request *request, const char *text) {
    loom_parallel_sizes *sizes = &request->sizes;
    const char *p = text + (*text == '[');
    int levels = 0;
    while (true) {
        char *end;
        errno = 0;
        long long value = strtoll(p, &end, 10);
        if (end == p || errno != 0)
            break;
        if (levels < LOOM_LAYOUT_HCP_LEVELS)
            sizes->hierarchical_context[levels] = value;
        levels++;
        p = end + strspn(end, " ");
        if (*p != ',' && *p != 'x') {
            p += *text == '[' && *p == ']';
            if (*p != '\0')
                break;
            sizes->hierarchical_levels = levels;
            return;
        }
        p += 1 + strspn(p + 1, " ");
    }
    complain(request,
        "strategy.hierarchical_context_parallel_sizes: found \"%s\", expected sizes, innermost first, e.g. [4,2]",
        text);
}

static void read_override(topology_request *request, const char *argument) {
    loom_parallel_sizes *sizes = &request->sizes;
    const char *equals = strchr(argument, '=');
    if (!equals) {
        complain(request, "%s: expected strategy.FIELD=VALUE", argument);
        return;
    }
    char name[64];
    size_t length = (size_t)(equals - argument), skip = strlen(prefix);
    bool prefixed = strncmp(argument, prefix, skip) == 0;
    if (!prefixed)
        skip = 0;
    snprintf(name, sizeof name, "%.*s", (int)(length - skip > 63 ? 63 : length - skip), argument + skip);
    const char *value = equals + 1;
    bool none = strcmp(value, "null") == 0 || strcmp(value, "none") == 0 || strcmp(value, "None") == 0;

    for (int i = 0; prefixed && i < NUMBER_FIELDS; i++) {
        if (strcmp(name, number_field[i].name) != 0)
            continue;
        int64_t *member = (int64_t *)((char *)sizes + number_field[i].offset), number = 0;
        bool optional = member == &sizes->virtual_pipeline || member == &sizes->expert_tensor;
        if (optional && none)
            *member = 0;
        else if (!read_number(value, &number))
            complain(
                request, "strategy.%s: found \"%s\", expected an integer%s", name, value, optional ? ", or null" : "");
        else if (optional && number == 0)
            complain(request, "strategy.%s: found 0, expected at least 1, or null", name);
        else
            *member = number;
        return;
    }
    if (prefixed && strcmp(name, "hierarchical_context_parallel_sizes") == 0) {
        if (none)
            sizes->hierarchical_levels = 0;
        else
            read_levels(request, value);
    } else if (prefixed && strcmp(name, "use_tp_pp_dp_mapping") == 0) {
        bool yes = strcmp(value, "true") == 0 || strcmp(value, "True") == 0;
        if (!yes && strcmp(value, "false") != 0 && strcmp(value, "False") != 0)
            complain(request, "strategy.use_tp_pp_dp_mapping: found \"%s\", expected true or false", value);
        sizes->use_tp_pp_dp_mapping = yes;
    } else if (prefixed && strcmp(name, "order") == 0) {
        if (strlen(value) >= sizeof sizes->order || *value == '\0')
            complain(request, "strategy.order: found \"%s\", expected axes joined by '-', e.g. tp-cp-ep-dp-pp", value);
        else
            strcpy(sizes->order, value);
    } else {
        complain(request, "%.*s: no field that the topology depends on; did you mean strategy.%s?", (int)length,
            argument, nearest_field(name));
    }
}

static error_t parse(int key, char *argument, struct argp_state *state) {
    topology_request *request = state->input;
    switch (key) {
    case KEY_WORLD:
        request->world_given = true;
        if (!read_number(argument, &request->sizes.world) || request->sizes.world > WORLD_MAX)
            complain(
                request, "--world-size: found \"%s\", expected a number of ranks, at most %d", argument, WORLD_MAX);
        return 0;
    case KEY_RANK:
        request->rank_given = true;
        if (!read_number(argument, &request->rank))
            complain(request, "--rank: found \"%s\", expected a rank", argument);
        return 0;
    case KEY_JSON:
        request->json = true;
        return 0;
    case ARGP_KEY_ARG:
        read_override(request, argument);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Text. */

enum { LINE_WIDTH = 100, LABEL_WIDTH = 31, RANKS_SHOWN = 4, RUNS_SHOWN = 8, GROUPS_SHOWN = 32, GROUPS_HEAD = 6 };

typedef struct text_line {
    char text[512];
    size_t length;
} text_line;

static void __attribute__((format(printf, 2, 3))) append(text_line *line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line->text + line->length, sizeof line->text - line->length, format, arguments);
    va_end(arguments);
    if (length > 0)
        line->length += (size_t)length;
    if (line->length >= sizeof line->text)
        line->length = sizeof line->text - 1;
}

static void append_run(text_line *line, int64_t first, int64_t last) {
    if (first == last)
        append(line, "%" PRId64, first);
    else
        append(line, "%" PRId64 "-%" PRId64, first, last);
}

/* The ranks of a group: runs of neighbours ("0-3"), and of many equal parts the first two and the last ("0,8,…,56"). */
static void append_group(text_line *out, const loom_layout *layout, loom_group_kind kind, int64_t index) {
    int64_t size = loom_layout_group_size(layout, kind, index), runs = 0, start = 0, previous = -2;
    int64_t starts[2] = {0, 0}, lengths[2] = {0, 0};
    bool regular = true;
    text_line listed = {.length = 0};
    /* One more turn closes the last run. */
    for (int64_t place = 0; place <= size; place++) {
        int64_t rank = place < size ? loom_layout_group_member(layout, kind, index, place) : -2;
        if (rank == previous + 1) {
            previous = rank;
            continue;
        }
        if (place > 0) {
            int64_t length = previous - start + 1;
            if (runs < 2) {
                starts[runs] = start;
                lengths[runs] = length;
            }
            regular &= length == lengths[0] && start == starts[0] + runs * (starts[1] - starts[0]);
            if (runs < RUNS_SHOWN) {
                append(&listed, "%s", runs > 0 ? "," : "");
                append_run(&listed, start, previous);
            }
            runs++;
        }
        if (place < size)
            start = previous = rank;
    }
    int64_t length = lengths[0], last = loom_layout_group_member(layout, kind, index, size - 1);
    if (regular && runs > RANKS_SHOWN) {
        append_run(out, starts[0], starts[0] + length - 1);
        append(out, ",");
        append_run(out, starts[1], starts[1] + length - 1);
        append(out, ",…,");
        append_run(out, last - length + 1, last);
    } else if (runs <= RUNS_SHOWN) {
        append(out, "%s", listed.text);
    } else {
        append(out, "%s,…,%" PRId64, listed.text, last);
    }
}

/* Columns that a UTF-8 text takes. */
static size_t columns(const char *text) {
    size_t count = 0;
    for (; *text; text++)
        count += ((unsigned char)*text & 0xc0) != 0x80;
    return count;
}

/* An earlier kind with the very same groups, or `kind` itself. */
static loom_group_kind same_groups(const loom_layout *layout, loom_group_kind kind) {
    int64_t count = loom_layout_group_count(layout, kind);
    for (int k = 0; k < (int)kind; k++) {
        loom_group_kind other = (loom_group_kind)k;
        bool same = loom_layout_group_count(layout, other) == count;
        for (int64_t index = 0; same && index < count; index++) {
            int64_t size = loom_layout_group_size(layout, kind, index);
            same = loom_layout_group_size(layout, other, index) == size;
            for (int64_t place = 0; same && place < size; place++)
                same = loom_layout_group_member(layout, kind, index, place) ==
                       loom_layout_group_member(layout, other, index, place);
        }
        if (same)
            return other;
    }
    return kind;
}

static void print_kind(const loom_layout *layout, loom_group_kind kind) {
    int64_t count = loom_layout_group_count(layout, kind), size = loom_layout_group_size(layout, kind, 0);
    /* An encoder's groups come first and may be of another size than the decoder's. */
    int64_t last_size = loom_layout_group_size(layout, kind, count - 1);
    char sizes[48];
    if (size == last_size)
        snprintf(sizes, sizeof sizes, "%" PRId64, size);
    else
        snprintf(sizes, sizeof sizes, "%" PRId64 ",%" PRId64, size, last_size);
    printf("%-14s %7" PRId64 " %7s ", loom_layout_kind_name(kind), count, sizes);
    if (size == 1 && last_size == 1 && count == loom_layout_world_size(layout)) {
        printf(" each rank alone\n");
        return;
    }
    loom_group_kind same = same_groups(layout, kind);
    if (same != kind) {
        printf(" as %s\n", loom_layout_kind_name(same));
        return;
    }
    size_t used = LABEL_WIDTH;
    bool fold = count > GROUPS_SHOWN;
    for (int64_t index = 0; index < count; index++) {
        text_line group = {.length = 0};
        if (fold && index == GROUPS_HEAD) {
            index = count - 2;
            append(&group, "…");
        } else {
            append(&group, "{");
            append_group(&group, layout, kind, index);
            append(&group, "}");
        }
        size_t width = columns(group.text) + 1;
        if (used + width > LINE_WIDTH && used > LABEL_WIDTH) {
            printf("\n%*s", LABEL_WIDTH, "");
            used = LABEL_WIDTH;
        }
        printf(" %s", group.text);
        used += width;
    }
    printf("\n");
}

static void print_heading(const loom_layout *layout) {
    const loom_parallel_sizes *s = &layout->sizes;
    printf("%" PRId64 " rank%s", s->world, s->world == 1 ? "" : "s");
    if (layout->encoder_ranks > 0)
        printf(": encoder 0-%" PRId64 " = tp %" PRId64 " x cp %" PRId64 " x dp %" PRId64 " x pp %" PRId64
               "; decoder %" PRId64 "-%" PRId64,
            layout->encoder_ranks - 1, s->encoder_tensor, s->context, layout->data, s->encoder_pipeline,
            layout->encoder_ranks, s->world - 1);
    printf(" = tp %" PRId64 " x cp %" PRId64 " x dp %" PRId64 " x pp %" PRId64, s->tensor, s->context, layout->data,
        s->pipeline);
    if (s->virtual_pipeline > 0)
        printf(" (%" PRId64 " virtual stages a rank)", s->virtual_pipeline);
    if (s->expert > 1 || s->expert_tensor != s->tensor || layout->expert_data != layout->data)
        printf("; experts: etp %" PRId64 " x ep %" PRId64 " x edp %" PRId64 " x pp %" PRId64, s->expert_tensor,
            s->expert, layout->expert_data, s->pipeline);
    if (s->optimizer_instances > 1)
        printf("; %" PRId64 " optimizer instances", s->optimizer_instances);
    printf("; order %s (first fastest)\n", s->order);
}

static void print_table(const loom_layout *layout) {
    print_heading(layout);
    printf("\n%-14s %7s %7s  %s\n", "kind", "groups", "size", "ranks");
    for (int kind = 0; kind < LOOM_GROUP_KIND_COUNT; kind++) {
        if (loom_layout_group_count(layout, (loom_group_kind)kind) > 0)
            print_kind(layout, (loom_group_kind)kind);
    }
}

static void print_rank(const loom_layout *layout, int64_t rank) {
    loom_layout_rank r;
    if (!loom_layout_rank_describe(layout, rank, &r))
        return;
    print_heading(layout);
    printf("\nrank %" PRId64 "%s: tp %" PRId64 ", cp %" PRId64 ", dp %" PRId64 ", pp %" PRId64 "; experts: etp %" PRId64
           ", ep %" PRId64 ", edp %" PRId64 "\n",
        rank,
        layout->encoder_ranks == 0 ? ""
        : r.encoder                ? " (encoder)"
                                   : " (decoder)",
        r.tp, r.cp, r.dp, r.pp, r.etp, r.ep, r.edp);
    for (int64_t which = 0; which < r.pipelines; which++) {
        int64_t next, previous, first, last;
        if (!loom_layout_pipeline_describe(layout, rank, which, &next, &previous, &first, &last))
            return;
        printf("stage %" PRId64 " of %" PRId64 ": previous %" PRId64 ", next %" PRId64 ", first %" PRId64
               ", last %" PRId64 "\n",
            r.pp, r.pp_size, previous, next, first, last);
    }
    printf("first rank of its tp group %" PRId64 ", of its model replica %" PRId64 ", of its dp group %" PRId64 "\n",
        r.tp_src, r.mp_src, r.dp_src);
    printf("\n%-14s %13s %13s  %s\n", "kind", "group", "place", "ranks");
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        loom_group_kind kind = (loom_group_kind)k;
        int64_t first = 0, place = 0, count = loom_layout_groups_of(layout, kind, rank, &first, &place);
        for (int64_t index = first; index < first + count; index++) {
            text_line group = {.length = 0};
            char where[2][48];
            snprintf(
                where[0], sizeof where[0], "%" PRId64 " of %" PRId64, index, loom_layout_group_count(layout, kind));
            snprintf(where[1], sizeof where[1], "%" PRId64 " of %" PRId64, place,
                loom_layout_group_size(layout, kind, index));
            append_group(&group, layout, kind, index);
            printf("%-14s %13s %13s  {%s}\n", loom_layout_kind_name(kind), where[0], where[1], group.text);
        }
    }
}

/* JSON with the keys of the golden files. */

static void json_group(const loom_layout *layout, loom_group_kind kind, int64_t index) {
    int64_t size = loom_layout_group_size(layout, kind, index);
    for (int64_t p = 0; p < size; p++)
        printf("%s%" PRId64, p > 0 ? "," : "[", loom_layout_group_listed(layout, kind, index, p));
    printf("]");
}

static void json_optional(const char *key, int64_t value) {
    if (value > 0)
        printf(",\"%s\":%" PRId64, key, value);
    else
        printf(",\"%s\":null", key);
}

static const struct {
    const char *key;
    size_t offset;
    int where; /* 1: without an encoder, 2: with one, 3: always */
} fact[] = {
#define FACT(name, where)                                                                                              \
    { #name, offsetof(loom_layout_rank, name), where }
    FACT(tp, 3),
    FACT(tp_size, 2),
    FACT(cp, 3),
    FACT(dp, 3),
    FACT(dp_cp, 1),
    FACT(pp, 3),
    FACT(pp_size, 2),
    FACT(ep, 1),
    FACT(etp, 1),
    FACT(edp, 1),
    FACT(tp_src, 1),
    FACT(mp_src, 1),
    FACT(dp_src, 1),
    FACT(pp_next, 3),
    FACT(pp_prev, 3),
    FACT(pp_first, 2),
    FACT(pp_last, 2),
};
enum { FACTS = sizeof fact / sizeof *fact, FLAGS = 4 };
static const char *const flag_key[FLAGS] = {"inside_encoder", "inside_decoder", "embd", "pos_embd"};

/* One value of one rank; a list where the rank is in several pipelines and the value depends on which. */
static void json_fact(const loom_layout *layout, int64_t rank, int which) {
    loom_layout_rank r;
    if (!loom_layout_rank_describe(layout, rank, &r))
        return;
    const char *key = fact[which].key;
    int64_t next = 0, previous = 0, first = 0, last = 0, value;
    bool varies = strcmp(key, "pp_next") == 0 || strcmp(key, "pp_prev") == 0 || strcmp(key, "pp_last") == 0;
    if (!varies || r.pipelines == 1) {
        memcpy(&value, (const char *)&r + fact[which].offset, sizeof value);
        printf("%" PRId64, value);
        return;
    }
    for (int64_t i = 0; i < r.pipelines; i++) {
        if (loom_layout_pipeline_describe(layout, rank, i, &next, &previous, &first, &last))
            printf("%s%" PRId64, i > 0 ? "," : "[", key[3] == 'n' ? next : key[3] == 'p' ? previous : last);
    }
    printf("]");
}

static void json_flag(const loom_layout *layout, int64_t rank, int flag) {
    loom_layout_rank r;
    if (loom_layout_rank_describe(layout, rank, &r)) {
        const bool value[FLAGS] = {r.encoder, !r.encoder, r.embd, r.pos_embd};
        printf("%d", value[flag]);
    }
}

/* The facts of ranks first … last: arrays, or plain values for one rank. */
static void json_facts(const loom_layout *layout, int64_t first, int64_t last, bool arrays) {
    int where = layout->encoder_ranks > 0 ? 2 : 1;
    bool started = false;
    for (int f = 0; f < FACTS + FLAGS; f++) {
        if (f < FACTS ? !(fact[f].where & where) : where == 1 && f < FACTS + 2)
            continue;
        printf("%s\"%s\":%s", started ? "," : "", f < FACTS ? fact[f].key : flag_key[f - FACTS], arrays ? "[" : "");
        started = true;
        for (int64_t rank = first; rank <= last; rank++) {
            printf("%s", rank > first ? "," : "");
            if (f < FACTS)
                json_fact(layout, rank, f);
            else
                json_flag(layout, rank, f - FACTS);
        }
        printf("%s", arrays ? "]" : "");
    }
}

/* As the golden files build it: the sizes that were given, then the order without its dashes. */
static void json_id(const loom_parallel_sizes *given) {
    printf("\"id\":\"w%" PRId64 "_tp%" PRId64 "_pp%" PRId64, given->world, given->tensor, given->pipeline);
    if (given->virtual_pipeline > 0)
        printf("_vpp%" PRId64, given->virtual_pipeline);
    printf("_cp%" PRId64 "_ep%" PRId64, given->context, given->expert);
    if (given->expert_tensor > 0)
        printf("_etp%" PRId64, given->expert_tensor);
    if (given->encoder_pipeline > 0)
        printf("_etp%" PRId64 "_epp%" PRId64, given->encoder_tensor, given->encoder_pipeline);
    if (given->optimizer_instances > 1)
        printf("_inst%" PRId64, given->optimizer_instances);
    for (int level = 0; level < given->hierarchical_levels; level++)
        printf("%s%" PRId64, level > 0 ? "x" : "_hcp", given->hierarchical_context[level]);
    printf("_");
    for (const char *p = given->order; *p; p++) {
        if (*p != '-')
            putchar(*p);
    }
    printf("\"");
}

static void json_layout(const loom_layout *layout, const loom_parallel_sizes *sizes) {
    loom_parallel_sizes given = *sizes;
    if (given.order[0] == '\0')
        strcpy(given.order, layout->sizes.order);
    printf("{");
    json_id(&given);
    printf(",\"world\":%" PRId64 ",\"tp\":%" PRId64 ",\"pp\":%" PRId64, given.world, given.tensor, given.pipeline);
    json_optional("vpp", given.virtual_pipeline);
    printf(",\"cp\":%" PRId64 ",\"ep\":%" PRId64, given.context, given.expert);
    json_optional("etp", given.expert_tensor);
    if (layout->encoder_ranks > 0) {
        printf(",\"order\":\"%s\",\"enc_tp\":%" PRId64 ",\"enc_pp\":%" PRId64, given.order, given.encoder_tensor,
            given.encoder_pipeline);
    } else {
        printf(
            ",\"inst\":%" PRId64 ",\"hcp\":%s", given.optimizer_instances, given.hierarchical_levels > 0 ? "" : "null");
        for (int level = 0; level < given.hierarchical_levels; level++)
            printf("%s%" PRId64, level > 0 ? "," : "[", given.hierarchical_context[level]);
        printf("%s,\"order\":\"%s\",\"dp\":%" PRId64 ",\"edp\":%" PRId64, given.hierarchical_levels > 0 ? "]" : "",
            given.order, layout->data, layout->expert_data);
    }
    printf(",\"groups\":{");
    bool started = false;
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        loom_group_kind kind = (loom_group_kind)k;
        int64_t count = loom_layout_group_count(layout, kind);
        if (count == 0)
            continue;
        printf("%s\"%s\":[", started ? "," : "", loom_layout_kind_name(kind));
        started = true;
        for (int64_t index = 0; index < count; index++) {
            printf("%s", index > 0 ? "," : "");
            json_group(layout, kind, index);
        }
        printf("]");
    }
    printf("},\"rank\":{");
    json_facts(layout, 0, layout->sizes.world - 1, true);
    printf("}");
    if (layout->encoder_ranks > 0) {
        printf(",\"pp_mixes_dp_cp\":0,\"pp_groups_per_rank\":");
        for (int64_t rank = 0; rank < layout->sizes.world; rank++) {
            int64_t first, place;
            printf(
                "%s%" PRId64, rank > 0 ? "," : "[", loom_layout_groups_of(layout, LOOM_GROUP_PP, rank, &first, &place));
        }
        printf("]");
    }
    printf("}\n");
}

static void json_rank(const loom_layout *layout, int64_t rank) {
    printf("{\"world\":%" PRId64 ",\"rank\":%" PRId64 ",", layout->sizes.world, rank);
    json_facts(layout, rank, rank, false);
    printf(",\"groups\":{");
    bool started = false;
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        loom_group_kind kind = (loom_group_kind)k;
        int64_t first = 0, place = 0, count = loom_layout_groups_of(layout, kind, rank, &first, &place);
        if (count == 0)
            continue;
        printf("%s\"%s\":[", started ? "," : "", loom_layout_kind_name(kind));
        started = true;
        for (int64_t i = 0; i < count; i++) {
            printf("%s", i > 0 ? "," : "");
            json_group(layout, kind, first + i);
        }
        printf("]");
    }
    printf("}}\n");
}

int loom_cli_topology(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"world-size", KEY_WORLD, "RANKS", 0, "Ranks in all (encoder ranks included)", 0},
        {"rank", KEY_RANK, "RANK", 0, "Only this rank: its place in each of its groups", 0},
        {"json", KEY_JSON, NULL, 0, "JSON: groups by kind, and what each rank is", 0},
        {0},
    };
    static const struct argp argp = {.options = options,
        .parser = parse,
        .args_doc = "[strategy.FIELD=VALUE…]",
        .doc = "Prints every process group of a configuration. No rank is started.\n"
               "\v"
               "Fields of the strategy that matter here: tensor_model_parallel_size, pipeline_model_parallel_size, "
               "virtual_pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size, "
               "expert_tensor_parallel_size, encoder_tensor_model_parallel_size, "
               "encoder_pipeline_model_parallel_size, num_distributed_optimizer_instances, "
               "hierarchical_context_parallel_sizes, use_tp_pp_dp_mapping, order.\n\n"
               "Kinds of groups: tp, cp, dp, pp, ep, etp the tensor, context, data, pipeline, expert and expert-tensor "
               "ranks; a_b those of both axes together; embd and pos_embd the stages that share the word and position "
               "embeddings; edp the data-parallel ranks of an expert; intra_ and inter_ inside and across optimizer "
               "instances; dist_opt those that share an optimizer; hcp_l0, … the levels of hierarchical context "
               "parallelism.\n\n"
               "Example: megaloom topology --world-size 64 strategy.tensor_model_parallel_size=4 "
               "strategy.pipeline_model_parallel_size=2"};
    topology_request request = {.sizes = loom_parallel_sizes_default(0)};
    argp_err_exit_status = EXIT_USAGE;
    error_t parsed = argp_parse(&argp, argc, argv, 0, NULL, &request);
    if (parsed != 0) {
        fprintf(stderr, "megaloom: %s\n", strerror(parsed));
        return EXIT_FAILURE;
    }
    if (!request.world_given)
        complain(&request, "give the number of ranks: --world-size RANKS");
    if (request.failed)
        return EXIT_USAGE;

    loom_layout layout;
    loom_status status = loom_layout_init(&request.sizes, &layout);
    if (status)
        return loom_cli_fail(status);
    if (request.rank_given && (request.rank < 0 || request.rank >= layout.sizes.world)) {
        complain(&request, "--rank: found %" PRId64 ", expected 0 to %" PRId64, request.rank, layout.sizes.world - 1);
        return EXIT_USAGE;
    }
    if (request.json && request.rank_given)
        json_rank(&layout, request.rank);
    else if (request.json)
        json_layout(&layout, &request.sizes);
    else if (request.rank_given)
        print_rank(&layout, request.rank);
    else
        print_table(&layout);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "megaloom: cannot write the output: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
