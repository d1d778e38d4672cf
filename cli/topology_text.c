/* A layout as text: a table of all groups, or one rank and its groups. Long lists are folded, of ranks in a group as of
 * groups in a kind; groups are read off the layout member by member and never stored, so that a world of a million
 * ranks prints as readily as one of eight. */
#include "topology.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

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

void loom_cli_topology_table(const loom_layout *layout) {
    print_heading(layout);
    printf("\n%-14s %7s %7s  %s\n", "kind", "groups", "size", "ranks");
    for (int kind = 0; kind < LOOM_GROUP_KIND_COUNT; kind++) {
        if (loom_layout_group_count(layout, (loom_group_kind)kind) > 0)
            print_kind(layout, (loom_group_kind)kind);
    }
}

void loom_cli_topology_rank(const loom_layout *layout, int64_t rank) {
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
