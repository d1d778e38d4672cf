/* Ranks on nodes, coloured by group. A panel shows one kind of group: every node is a box, every rank a cell in it, and
 * cells of one group have one colour. Kinds that cut the ranks in the same way share a panel. All panels place the
 * ranks alike, so that the eye finds a rank again. Each cell carries its rank and its group, for a script that picks
 * one out; without a script the picture is whole. */
#include "report/rank_map.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 1080, MARGIN = 20, HEAD = 44, NODE_HEAD = 18, PAD = 6, GAP = 10, PANEL_GAP = 28 };
enum { DEFAULT_RANKS_PER_NODE = 8, LABEL_BYTES = 160 };

typedef struct node {
    int64_t first, count; /* ranks */
    const char *name;     /* NULL = none */
} node;

typedef struct panel {
    loom_group_kind kind;
    char label[LABEL_BYTES]; /* "dp = dp_cp" */
} panel;

typedef struct drawing {
    FILE *out;
    const loom_layout *layout;
    int64_t rank;
    node *nodes;
    int64_t node_count;
    panel panels[LOOM_GROUP_KIND_COUNT];
    int panel_count;
    int cell, gap, font;       /* pixels; font 0: cells have no number */
    int64_t columns;           /* of cells in a box, at most */
    int box_width, box_height; /* of the largest box */
    int64_t across;            /* boxes beside each other in a panel */
    int64_t panels_across;     /* panels beside each other */
    int panel_width, panel_height;
} drawing;

/* ---- which panels ---- */

static bool same_groups(const loom_layout *layout, loom_group_kind a, loom_group_kind b) {
    int64_t world = loom_layout_world_size(layout);
    if (loom_layout_group_count(layout, a) != loom_layout_group_count(layout, b))
        return false;
    for (int64_t rank = 0; rank < world; rank++) {
        int64_t index[2] = {-1, -1}, place;
        (void)loom_layout_group_of(layout, a, rank, &index[0], &place);
        (void)loom_layout_group_of(layout, b, rank, &index[1], &place);
        if (index[0] != index[1])
            return false;
    }
    return true;
}

static int64_t largest_group(const loom_layout *layout, loom_group_kind kind) {
    int64_t largest = 0, count = loom_layout_group_count(layout, kind);
    for (int64_t i = 0; i < count; i++) {
        int64_t size = loom_layout_group_size(layout, kind, i);
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* The axes first, as one speaks of them, then what is joined of them. */
static void choose_panels(drawing *d) {
    static const loom_group_kind axes[] = {LOOM_GROUP_TP, LOOM_GROUP_CP, LOOM_GROUP_EP, LOOM_GROUP_DP, LOOM_GROUP_PP};
    enum { AXES = sizeof axes / sizeof *axes };
    for (int i = 0; i < AXES + LOOM_GROUP_KIND_COUNT; i++) {
        loom_group_kind kind = i < AXES ? axes[i] : (loom_group_kind)(i - AXES);
        bool again = false, joined = false;
        for (int j = 0; i >= AXES && j < AXES; j++)
            again = again || axes[j] == kind;
        if (again || largest_group(d->layout, kind) < 2)
            continue;
        for (int j = 0; j < d->panel_count && !joined; j++) {
            size_t length = strlen(d->panels[j].label);
            joined = same_groups(d->layout, d->panels[j].kind, kind);
            if (joined)
                snprintf(d->panels[j].label + length, LABEL_BYTES - length, " = %s", loom_layout_kind_name(kind));
        }
        if (joined)
            continue;
        panel *next = &d->panels[d->panel_count++];
        next->kind = kind;
        snprintf(next->label, sizeof next->label, "%s", loom_layout_kind_name(kind));
    }
}

/* ---- where things are ---- */

static loom_status make_nodes(drawing *d, int64_t per_node, const loom_run_rank *ranks) {
    int64_t world = loom_layout_world_size(d->layout);
    d->nodes = calloc((size_t)world, sizeof *d->nodes);
    if (!d->nodes)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a picture of %" PRId64 " ranks", world);
    for (int64_t rank = 0; rank < world; rank++) {
        bool opens = rank == 0 || (ranks ? strcmp(ranks[rank].node, ranks[rank - 1].node) != 0 : rank % per_node == 0);
        if (opens)
            d->nodes[d->node_count++] = (node){.first = rank, .name = ranks ? ranks[rank].node : NULL};
        d->nodes[d->node_count - 1].count++;
    }
    return LOOM_OK;
}

static void measure(drawing *d) {
    int64_t world = loom_layout_world_size(d->layout), most = 0;
    for (int64_t i = 0; i < d->node_count; i++)
        most = d->nodes[i].count > most ? d->nodes[i].count : most;
    d->cell = world <= 128 ? 30 : world <= 1024 ? 22 : 9;
    d->gap = world <= 1024 ? 3 : 1;
    d->font = world <= 128 ? 12 : world <= 1024 ? 9 : 0;
    d->columns = most <= 4 ? most : most <= 32 ? (most + 1) / 2 : (int64_t)ceil(sqrt((double)most));
    d->columns = d->columns > 16 ? 16 : d->columns;
    int64_t rows = (most + d->columns - 1) / d->columns;
    d->box_width = (int)d->columns * (d->cell + d->gap) - d->gap + 2 * PAD;
    d->box_height = (int)rows * (d->cell + d->gap) - d->gap + 2 * PAD + NODE_HEAD;
    int64_t room = WIDTH - 2 * MARGIN;
    d->across = (room + GAP) / (d->box_width + GAP);
    d->across = d->across < 1 ? 1 : d->across > d->node_count ? d->node_count : d->across;
    int64_t down = (d->node_count + d->across - 1) / d->across;
    d->across = (d->node_count + down - 1) / down; /* full rows: 4 and 4, not 6 and 2 */
    d->panel_width = (int)d->across * (d->box_width + GAP) - GAP;
    d->panel_width = d->panel_width < 240 ? 240 : d->panel_width;
    d->panel_height = (int)down * (d->box_height + GAP) - GAP + HEAD;
    d->panels_across = (room + PANEL_GAP) / (d->panel_width + PANEL_GAP);
    d->panels_across = d->panels_across < 1 ? 1 : d->panels_across;
}

/* ---- drawing ---- */

static void put_escaped(FILE *out, const char *text) {
    for (; *text; text++)
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '>')
            fputs("&gt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '"')
            fputs("&quot;", out);
        else if ((unsigned char)*text < ' ')
            fputc(' ', out);
        else
            fputc(*text, out);
}

/* The colours of Okabe and Ito (jfly.uni-koeln.de/color) without their black, each also darker and lighter. In this
 * order each is as far as can be from those before it for the worst of normal, deuteranope, protanope and tritanope
 * vision: the first 4 are 42 apart in CIELAB, the first 8 are 18, the first 16 are 10. */
static const unsigned char palette[][3] = {{0x00, 0x72, 0xb2}, {0xe6, 0x9f, 0x00}, {0x6a, 0x2f, 0x00},
    {0xf8, 0xf3, 0xaa}, {0xb3, 0xdd, 0xf5}, {0x00, 0x39, 0x59}, {0x56, 0xb4, 0xe9}, {0x78, 0x72, 0x21},
    {0xcc, 0x79, 0xa7}, {0x00, 0x9e, 0x73}, {0xec, 0xb7, 0x8c}, {0x2b, 0x5a, 0x74}, {0x66, 0x3c, 0x54},
    {0x8c, 0xc0, 0xdc}, {0xf0, 0xe4, 0x42}, {0x73, 0x50, 0x00}, {0x00, 0x4f, 0x3a}, {0xe8, 0xc3, 0xd7},
    {0xf4, 0xd4, 0x8c}, {0x8c, 0xd3, 0xc0}, {0xd5, 0x5e, 0x00}};

/* An odd number of colours: sizes are mostly powers of two, and groups that lie above each other get different ones. */
static void colour_of(int64_t group, unsigned rgb[3], bool *white) {
    static const double weight[3] = {0.2126, 0.7152, 0.0722};
    double luminance = 0;
    for (int i = 0; i < 3; i++) {
        rgb[i] = palette[(size_t)group % (sizeof palette / sizeof *palette)][i];
        double value = rgb[i] / 255.0;
        luminance += weight[i] * value * value; /* near enough to the curve of sRGB */
    }
    *white = luminance < 0.2;
}

/* As many of the kinds as there is room for beside the next panel. */
static void put_label(const drawing *d, const char *label) {
    size_t room = (size_t)d->panel_width / 8, length = strlen(label);
    if (length > room) {
        length = room - 2;
        while (length > 0 && label[length] != ' ')
            length--;
        while (length > 0 && (label[length - 1] == ' ' || label[length - 1] == '='))
            length--;
        fprintf(d->out, "%.*s …", (int)length, label);
    } else {
        fputs(label, d->out);
    }
}

static void put_style(FILE *out) {
    fputs("<style>\n"
          ".rank-map text{font:12px system-ui,-apple-system,\"Segoe UI\",\"DejaVu Sans\",sans-serif;fill:#1f2328}\n"
          ".rank-map .rm-title{font-size:14px;font-weight:600}.rank-map .rm-soft{fill:#59636e;font-size:11px}\n"
          ".rank-map .rm-page{fill:#fff}.rank-map .rm-node{fill:#f3f5f7;stroke:#d0d7de}\n"
          ".rank-map .rm-white{fill:#fff}.rank-map .rm-black{fill:#10151b}.rank-map .rm-off{opacity:.16}\n"
          ".rank-map .rm-cell rect{stroke:#808a94;stroke-width:.75}\n"
          ".rank-map .rm-picked rect{stroke:#10151b;stroke-width:3}\n"
          "@media (prefers-color-scheme:dark){.rank-map text{fill:#e6edf3}.rank-map .rm-soft{fill:#9198a1}\n"
          ".rank-map .rm-page{fill:#0d1117}.rank-map .rm-node{fill:#161b22;stroke:#30363d}\n"
          ".rank-map .rm-white{fill:#fff}.rank-map .rm-black{fill:#10151b}.rank-map .rm-off{opacity:.2}\n"
          ".rank-map .rm-picked rect{stroke:#fff}}\n"
          "</style>\n",
        out);
}

static void put_cell(const drawing *d, const panel *of, int64_t rank, int x, int y, int64_t picked_group) {
    int64_t group = -1, place = 0;
    unsigned rgb[3] = {0x99, 0x99, 0x99};
    bool white = false, inside = loom_layout_group_of(d->layout, of->kind, rank, &group, &place);
    if (inside)
        colour_of(group, rgb, &white);
    bool off = d->rank >= 0 ? !inside || group != picked_group : !inside;
    fprintf(d->out, "<g class=\"rm-cell%s%s\" data-r=\"%" PRId64 "\" data-g=\"%" PRId64 "\"><title>rank %" PRId64,
        off && rank != d->rank ? " rm-off" : "", rank == d->rank ? " rm-picked" : "", rank, group, rank);
    if (inside)
        fprintf(d->out, ": %" PRId64 " of %" PRId64 " in %s group %" PRId64, place,
            loom_layout_group_size(d->layout, of->kind, group), loom_layout_kind_name(of->kind), group);
    else
        fprintf(d->out, ": in no %s group", loom_layout_kind_name(of->kind));
    fprintf(d->out, "</title><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"%d\" fill=\"#%02x%02x%02x\"/>", x,
        y, d->cell, d->cell, d->font ? 4 : 1, rgb[0], rgb[1], rgb[2]);
    if (d->font)
        fprintf(d->out,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\" style=\"font-size:%dpx\" class=\"%s\">%" PRId64 "</text>",
            x + d->cell / 2, y + d->cell / 2 + d->font * 36 / 100, d->font, white ? "rm-white" : "rm-black", rank);
    fputs("</g>\n", d->out);
}

static void put_node(const drawing *d, const panel *of, int64_t number, int x, int y, int64_t picked_group) {
    const node *at = &d->nodes[number];
    fprintf(d->out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\" class=\"rm-node\"/>", x, y,
        d->box_width, d->box_height);
    fprintf(d->out, "<text x=\"%d\" y=\"%d\" class=\"rm-soft\">", x + PAD, y + 15);
    /* A name that is longer than its box would run into the next one. */
    if (at->name && *at->name && (int)strlen(at->name) * 7 <= d->box_width - 2 * PAD)
        put_escaped(d->out, at->name);
    else
        fprintf(d->out, d->box_width >= 60 ? "node %" PRId64 : "%" PRId64, number);
    fputs("</text>\n", d->out);
    for (int64_t i = 0; i < at->count; i++)
        put_cell(d, of, at->first + i, x + PAD + (int)(i % d->columns) * (d->cell + d->gap),
            y + NODE_HEAD + PAD + (int)(i / d->columns) * (d->cell + d->gap), picked_group);
}

static void put_panel(const drawing *d, int number, int x, int y) {
    const panel *of = &d->panels[number];
    int64_t count = loom_layout_group_count(d->layout, of->kind), largest = largest_group(d->layout, of->kind);
    int64_t picked_group = -1, place = 0;
    if (d->rank >= 0)
        (void)loom_layout_group_of(d->layout, of->kind, d->rank, &picked_group, &place);
    fprintf(d->out,
        "<g class=\"rm-panel\" data-kind=\"%s\"><text x=\"%d\" y=\"%d\" class=\"rm-title\"><title>%s</title>",
        loom_layout_kind_name(of->kind), x, y + 14, of->label);
    put_label(d, of->label);
    fprintf(d->out, "</text><text x=\"%d\" y=\"%d\" class=\"rm-soft\">", x, y + 32);
    if (d->rank >= 0 && picked_group >= 0)
        fprintf(d->out, "group %" PRId64 " of %" PRId64 ", place %" PRId64 " of %" PRId64, picked_group, count, place,
            loom_layout_group_size(d->layout, of->kind, picked_group));
    else if (d->rank >= 0)
        fprintf(d->out, "in none of %" PRId64 " group%s", count, count == 1 ? "" : "s");
    else
        fprintf(d->out, "%" PRId64 " group%s of %" PRId64, count, count == 1 ? "" : "s", largest);
    fputs("</text>\n", d->out);
    for (int64_t i = 0; i < d->node_count; i++)
        put_node(d, of, i, x + (int)(i % d->across) * (d->box_width + GAP),
            y + HEAD + (int)(i / d->across) * (d->box_height + GAP), picked_group);
    fputs("</g>\n", d->out);
}

void loom__rank_map_experts(const loom_layout *layout, char text[LOOM__EXPERTS_TEXT]) {
    const loom_parallel_sizes *sizes = &layout->sizes;
    *text = '\0';
    if (sizes->expert > 1 || sizes->expert_tensor != sizes->tensor)
        snprintf(text, LOOM__EXPERTS_TEXT, ", experts etp %" PRId64 " × ep %" PRId64 " × edp %" PRId64,
            sizes->expert_tensor, sizes->expert, layout->expert_data);
}

static void draw(const drawing *d) {
    char experts[LOOM__EXPERTS_TEXT];
    const loom_parallel_sizes *sizes = &d->layout->sizes;
    int across = (int)d->panels_across < d->panel_count ? (int)d->panels_across : d->panel_count;
    int down = across ? (d->panel_count + across - 1) / across : 0;
    int width = 2 * MARGIN + across * (d->panel_width + PANEL_GAP) - PANEL_GAP, top = MARGIN + 34;
    width = width < 420 ? 420 : width;
    int height = top + (down ? down * (d->panel_height + PANEL_GAP) - PANEL_GAP : 20) + MARGIN;
    fprintf(d->out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"rank-map\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d "
        "%d\">\n",
        width, height, width, height);
    put_style(d->out);
    fputs("<rect width=\"100%\" height=\"100%\" class=\"rm-page\"/>\n", d->out);
    fprintf(d->out, "<text x=\"%d\" y=\"%d\" class=\"rm-title\">", MARGIN, MARGIN + 12);
    if (d->rank >= 0)
        fprintf(d->out, "rank %" PRId64 " of ", d->rank);
    loom__rank_map_experts(d->layout, experts);
    fprintf(d->out, "%" PRId64 " rank%s = tp %" PRId64 " × cp %" PRId64 " × dp %" PRId64 " × pp %" PRId64 "%s</text>\n",
        sizes->world, sizes->world == 1 ? "" : "s", sizes->tensor, sizes->context, d->layout->data, sizes->pipeline,
        experts);
    if (d->panel_count == 0)
        fprintf(d->out, "<text x=\"%d\" y=\"%d\" class=\"rm-soft\">every rank is alone in its groups</text>\n", MARGIN,
            top + 14);
    for (int i = 0; i < d->panel_count; i++)
        put_panel(
            d, i, MARGIN + i % across * (d->panel_width + PANEL_GAP), top + i / across * (d->panel_height + PANEL_GAP));
    fputs("</svg>\n", d->out);
}

loom_status loom__rank_map_check(const loom_layout *layout, const loom_topology_picture *picture) {
    int64_t world = loom_layout_world_size(layout);
    if (world > LOOM_TOPOLOGY_PICTURE_RANKS)
        return loom_fail(LOOM_ERR_ARGUMENT, "a picture of %" PRId64 " ranks: expected at most %d", world,
            LOOM_TOPOLOGY_PICTURE_RANKS);
    if (picture->rank < -1 || picture->rank >= world || picture->ranks_per_node < 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a picture of rank %" PRId64 " with %" PRId64 " ranks a node: expected a rank from 0 to %" PRId64
            " or -1, and at least 1 rank a node or 0",
            picture->rank, picture->ranks_per_node, world - 1);
    return LOOM_OK;
}

loom_status loom__rank_map_write(
    FILE *out, const loom_layout *layout, const loom_topology_picture *picture, const loom_run_rank *nodes) {
    LOOM_TRY(loom__rank_map_check(layout, picture));
    drawing d = {.out = out, .layout = layout, .rank = picture->rank};
    LOOM_TRY(make_nodes(&d, picture->ranks_per_node ? picture->ranks_per_node : DEFAULT_RANKS_PER_NODE, nodes));
    choose_panels(&d);
    measure(&d);
    draw(&d);
    free(d.nodes);
    return ferror(out) ? loom_fail(LOOM_ERR_IO, "the picture of the ranks cannot be written: %m") : LOOM_OK;
}

loom_status loom_topology_write_svg(FILE *out, const loom_layout *layout, const loom_topology_picture *picture) {
    return loom__rank_map_write(out, layout, picture, NULL);
}
