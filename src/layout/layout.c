/* The groups. A kind of group on one grid is a lattice: the grid's axes, neighbours of the same fate merged into runs,
 * each either free (its digit is part of the place) or fixed (part of the index). Rank -> (index, place) takes the
 * digits apart, (index, place) -> rank puts them together; both are a handful of divisions. The other kinds are views
 * of a lattice: parts of its groups (instances, hierarchical levels) or their ends (embeddings). With an encoder a
 * kind's groups are those of the encoder's lattice, then those of the decoder's; pp and tp_pp join the two instead.
 * Invariant: the sizes passed loom__layout_check, so every product is exact and every division below leaves no rest
 * that matters. */
#include "layout/layout.h"
#include "base/parts.h"
#include <string.h>

enum { ENCODER, DECODER };

static const char *const kind_name[LOOM_GROUP_KIND_COUNT] = {
#define NAME(name, text) [LOOM_GROUP_##name] = text,
    LOOM_GROUP_LIST(NAME)
#undef NAME
};

enum {
    TP = 1 << LOOM__AXIS_TP,
    CP = 1 << LOOM__AXIS_CP,
    EP = 1 << LOOM__AXIS_EP,
    DP = 1 << LOOM__AXIS_DP,
    PP = 1 << LOOM__AXIS_PP
};

/* The kinds that are lattices: their free axes, and which of the two grids they live on. */
static const struct {
    loom_group_kind kind;
    int free;
    bool expert;
} plain_kind[] = {
    {LOOM_GROUP_DP_CP, DP | CP, false},
    {LOOM_GROUP_DP, DP, false},
    {LOOM_GROUP_CP, CP, false},
    {LOOM_GROUP_TP_PP, TP | PP, false},
    {LOOM_GROUP_TP, TP, false},
    {LOOM_GROUP_PP, PP, false},
    {LOOM_GROUP_TP_DP_CP, TP | DP | CP, false},
    {LOOM_GROUP_TP_DP, TP | DP, false},
    {LOOM_GROUP_TP_CP, TP | CP, false},
    {LOOM_GROUP_EP, EP, true},
    {LOOM_GROUP_ETP, TP, true},
    {LOOM_GROUP_ETP_EP, TP | EP, true},
    {LOOM_GROUP_ETP_EP_PP, TP | EP | PP, true},
    {LOOM_GROUP_EDP, DP, true},
    {LOOM_GROUP_INTRA_DIST_OPT, TP | EP | PP, true},
};

void loom__layout_range(int64_t n, int64_t parts, int64_t index, int64_t *first, int64_t *count) {
    int64_t begin = loom__part_begin(n, parts, index);
    *count = loom__part_begin(n, parts, index + 1) - begin;
    *first = begin;
}

int64_t loom__layout_range_part(int64_t n, int64_t parts, int64_t i) {
    int64_t each = n / parts, rest = n % parts, longer = rest * (each + 1);
    return i < longer ? i / (each + 1) : rest + (i - longer) / each;
}

/* 64-bit division is several times slower than 32-bit on many machines, and ranks seldom need it. */
static inline int64_t divide(int64_t a, int64_t b, int64_t *rest) {
    if ((((uint64_t)a | (uint64_t)b) >> 32) == 0) {
        *rest = (int64_t)((uint32_t)a % (uint32_t)b);
        return (int64_t)((uint32_t)a / (uint32_t)b);
    }
    *rest = a % b;
    return a / b;
}

static void lattice_add(loom_layout_lattice *lattice, int64_t size, bool free) {
    int64_t stride = lattice->ranks;
    lattice->ranks *= size;
    if (free)
        lattice->size *= size;
    if (size == 1)
        return;
    if (lattice->runs > 0 && lattice->run[lattice->runs - 1].free == free)
        lattice->run[lattice->runs - 1].size *= size;
    else
        lattice->run[lattice->runs++] = (loom_layout_run){size, stride, free};
}

static int64_t lattice_groups(const loom_layout_lattice *lattice) {
    return lattice->ranks == 0 ? 0 : lattice->ranks / lattice->size;
}

static void lattice_find(const loom_layout_lattice *lattice, int64_t rank, int64_t *index, int64_t *place) {
    int64_t rest = rank - lattice->offset, scale[2] = {1, 1}, sum[2] = {0, 0};
    for (int i = 0; i < lattice->runs; i++) {
        const loom_layout_run *run = &lattice->run[i];
        int64_t digit = rest;
        if (i + 1 < lattice->runs)
            rest = divide(rest, run->size, &digit);
        sum[run->free] += digit * scale[run->free];
        scale[run->free] *= run->size;
    }
    *index = sum[false];
    *place = sum[true];
}

static int64_t lattice_member(const loom_layout_lattice *lattice, int64_t index, int64_t place) {
    int64_t rank = lattice->offset, rest[2] = {index, place};
    for (int i = 0; i < lattice->runs; i++) {
        const loom_layout_run *run = &lattice->run[i];
        int64_t digit;
        rest[run->free] = divide(rest[run->free], run->size, &digit);
        rank += digit * run->stride;
    }
    return rank;
}

/* A group of a lattice, cut: its place p is (outer*size + place)*inner + i, and (outer, i) number the parts. */
typedef struct cut {
    loom_group_kind base;
    int64_t outer, size, inner;
} cut;

/* False where this layout has no such parts. */
static bool cut_of(const loom_layout *layout, loom_group_kind kind, cut *out) {
    int64_t instances = layout->sizes.optimizer_instances;
    switch (kind) {
    case LOOM_GROUP_INTRA_DP_CP:
        *out = (cut){LOOM_GROUP_DP_CP, instances, layout->lattice[DECODER][LOOM_GROUP_DP_CP].size / instances, 1};
        return instances > 1;
    case LOOM_GROUP_INTRA_EDP:
        *out = (cut){LOOM_GROUP_EDP, instances, layout->expert_data / instances, 1};
        return instances > 1;
    case LOOM_GROUP_INTER_EDP:
        *out = (cut){LOOM_GROUP_EDP, 1, instances, layout->expert_data / instances};
        return instances > 1;
    default: {
        int level = (int)kind - LOOM_GROUP_HCP_L0;
        if (level < 0 || level >= layout->sizes.hierarchical_levels)
            return false;
        int64_t inner = 1, size = layout->sizes.hierarchical_context[level];
        for (int i = 0; i < level; i++)
            inner *= layout->sizes.hierarchical_context[i];
        *out = (cut){LOOM_GROUP_CP, layout->sizes.context / (size * inner), size, inner};
        return true;
    }
    }
}

static bool is_cut(loom_group_kind kind) {
    return kind == LOOM_GROUP_INTRA_DP_CP || kind == LOOM_GROUP_INTRA_EDP || kind == LOOM_GROUP_INTER_EDP ||
           (kind >= LOOM_GROUP_HCP_L0 && kind <= LOOM_GROUP_HCP_L7);
}

static bool is_end(loom_group_kind kind) {
    return kind == LOOM_GROUP_EMBD || kind == LOOM_GROUP_POS_EMBD;
}

static bool is_joined(loom_group_kind kind) {
    return kind == LOOM_GROUP_PP || kind == LOOM_GROUP_TP_PP;
}

/* The plain kinds, the encoder's groups and the decoder's taken together. */

static int64_t plain_count(const loom_layout *layout, loom_group_kind kind) {
    int64_t decoder = lattice_groups(&layout->lattice[DECODER][kind]);
    return is_joined(kind) ? decoder : decoder + lattice_groups(&layout->lattice[ENCODER][kind]);
}

static int64_t plain_size(const loom_layout *layout, loom_group_kind kind, int64_t index) {
    const loom_layout_lattice *encoder = &layout->lattice[ENCODER][kind], *decoder = &layout->lattice[DECODER][kind];
    if (is_joined(kind))
        return decoder->size + (encoder->ranks > 0 ? encoder->size : 0);
    return index < lattice_groups(encoder) ? encoder->size : decoder->size;
}

static int64_t plain_member(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t place) {
    const loom_layout_lattice *encoder = &layout->lattice[ENCODER][kind], *decoder = &layout->lattice[DECODER][kind];
    if (encoder->ranks == 0)
        return lattice_member(decoder, index, place);
    int64_t groups = lattice_groups(encoder);
    if (!is_joined(kind))
        return index < groups ? lattice_member(encoder, index, place) : lattice_member(decoder, index - groups, place);
    if (place >= encoder->size)
        return lattice_member(decoder, index, place - encoder->size);
    if (kind == LOOM_GROUP_PP)
        index = loom__layout_range_part(lattice_groups(decoder), groups, index);
    return lattice_member(encoder, index, place);
}

/* How many groups hold the rank, from *first on; the rank is one of the layout's. */
static int64_t plain_find(
    const loom_layout *layout, loom_group_kind kind, int64_t rank, int64_t *first, int64_t *place) {
    const loom_layout_lattice *encoder = &layout->lattice[ENCODER][kind], *decoder = &layout->lattice[DECODER][kind];
    if (decoder->ranks == 0)
        return 0;
    int64_t count = 1;
    if (rank >= decoder->offset) {
        lattice_find(decoder, rank, first, place);
        if (encoder->ranks > 0 && is_joined(kind))
            *place += encoder->size;
        else if (encoder->ranks > 0)
            *first += lattice_groups(encoder);
    } else {
        lattice_find(encoder, rank, first, place);
        if (kind == LOOM_GROUP_PP)
            loom__layout_range(lattice_groups(decoder), lattice_groups(encoder), *first, first, &count);
    }
    return count;
}

static bool is_kind(loom_group_kind kind) {
    return (int)kind >= 0 && kind < LOOM_GROUP_KIND_COUNT;
}

const char *loom_layout_kind_name(loom_group_kind kind) {
    return is_kind(kind) ? kind_name[kind] : "?";
}

loom_group_kind loom_layout_kind_from_name(const char *name) {
    int kind = 0;
    while (kind < LOOM_GROUP_KIND_COUNT && strcmp(name, kind_name[kind]) != 0)
        kind++;
    return (loom_group_kind)kind;
}

loom_parallel_sizes loom_parallel_sizes_default(int64_t world) {
    return (loom_parallel_sizes){
        .world = world, .tensor = 1, .pipeline = 1, .context = 1, .expert = 1, .optimizer_instances = 1};
}

loom_status loom_layout_init(const loom_parallel_sizes *sizes, loom_layout *out) {
    loom__layout_checked c;
    LOOM_TRY(loom__layout_check(sizes, &c));
    const loom_parallel_sizes *s = &c.sizes;
    loom_layout layout = {.sizes = *s, .data = c.data, .expert_data = c.expert_data, .encoder_ranks = c.encoder_ranks};
    int64_t instances = s->optimizer_instances;
    /* In the order of loom__axis. The encoder has no experts: its expert kinds live on its dense grid. */
    const int64_t encoder[] = {s->encoder_tensor, s->context, 1, c.data, s->encoder_pipeline};
    const int64_t dense[] = {s->tensor, s->context, 1, c.data, s->pipeline};
    const int64_t expert[] = {s->expert_tensor, 1, s->expert, c.expert_data, s->pipeline};

    for (size_t i = 0; i < sizeof plain_kind / sizeof *plain_kind; i++) {
        loom_group_kind kind = plain_kind[i].kind;
        bool optimizer = kind == LOOM_GROUP_INTRA_DIST_OPT;
        if (optimizer && c.encoder_ranks > 0)
            continue;
        for (int side = c.encoder_ranks > 0 ? ENCODER : DECODER; side <= DECODER; side++) {
            const int64_t *grid = side == ENCODER ? encoder : plain_kind[i].expert ? expert : dense;
            loom_layout_lattice *lattice = &layout.lattice[side][kind];
            *lattice = (loom_layout_lattice){.offset = side == ENCODER ? 0 : c.encoder_ranks, .ranks = 1, .size = 1};
            for (int a = 0; a < LOOM_LAYOUT_AXES; a++) {
                loom__axis axis = c.order[a];
                bool free = (plain_kind[i].free >> axis & 1) != 0;
                if (optimizer && axis == LOOM__AXIS_DP) {
                    lattice_add(lattice, grid[axis] / instances, true);
                    lattice_add(lattice, instances, false);
                } else {
                    lattice_add(lattice, grid[axis], free);
                }
            }
        }
    }
    *out = layout;
    return LOOM_OK;
}

int64_t loom_layout_world_size(const loom_layout *layout) {
    return layout->sizes.world;
}

int64_t loom_layout_data_parallel_size(const loom_layout *layout) {
    return layout->data;
}

int64_t loom_layout_expert_data_parallel_size(const loom_layout *layout) {
    return layout->expert_data;
}

int64_t loom_layout_model_parallel_size(const loom_layout *layout) {
    return layout->sizes.tensor * layout->sizes.pipeline;
}

int64_t loom_layout_virtual_pipeline_rank(const loom_layout *layout) {
    return layout->sizes.virtual_pipeline > 0 ? 0 : -1;
}

int64_t loom_layout_group_count(const loom_layout *layout, loom_group_kind kind) {
    cut part;
    if (!is_kind(kind))
        return 0;
    if (is_end(kind))
        return plain_count(layout, LOOM_GROUP_PP);
    if (!is_cut(kind))
        return plain_count(layout, kind);
    return cut_of(layout, kind, &part) ? plain_count(layout, part.base) * part.outer * part.inner : 0;
}

int64_t loom_layout_group_size(const loom_layout *layout, loom_group_kind kind, int64_t index) {
    cut part;
    if (index < 0 || index >= loom_layout_group_count(layout, kind))
        return 0;
    if (is_end(kind))
        return kind == LOOM_GROUP_EMBD && plain_size(layout, LOOM_GROUP_PP, index) > 1 ? 2 : 1;
    if (is_cut(kind))
        return cut_of(layout, kind, &part) ? part.size : 0;
    return plain_size(layout, kind, index);
}

int64_t loom_layout_group_member(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t place) {
    cut part;
    if (place < 0 || place >= loom_layout_group_size(layout, kind, index))
        return -1;
    if (is_end(kind))
        return plain_member(
            layout, LOOM_GROUP_PP, index, place == 0 ? 0 : plain_size(layout, LOOM_GROUP_PP, index) - 1);
    if (!is_cut(kind))
        return plain_member(layout, kind, index, place);
    if (!cut_of(layout, kind, &part))
        return -1;
    int64_t inner, outer;
    index = divide(index, part.inner, &inner);
    index = divide(index, part.outer, &outer);
    return plain_member(layout, part.base, index, (outer * part.size + place) * part.inner + inner);
}

int64_t loom_layout_group_listed(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t position) {
    int64_t size = loom_layout_group_size(layout, kind, index);
    if (kind != LOOM_GROUP_INTRA_DIST_OPT || position < 0 || position >= size)
        return loom_layout_group_member(layout, kind, index, position);
    /* The reference joins the model replicas (etp_ep_pp) of the instance one after the other. */
    int64_t replica = layout->lattice[DECODER][LOOM_GROUP_ETP_EP_PP].size, place;
    int64_t which = divide(position, replica, &place);
    return plain_member(layout, LOOM_GROUP_ETP_EP_PP, index * (size / replica) + which, place);
}

int64_t loom_layout_groups_of(
    const loom_layout *layout, loom_group_kind kind, int64_t rank, int64_t *first, int64_t *place) {
    int64_t found, where, count;
    cut part;
    if (!is_kind(kind) || rank < 0 || rank >= layout->sizes.world)
        return 0;
    if (is_end(kind)) {
        count = plain_find(layout, LOOM_GROUP_PP, rank, &found, &where);
        int64_t last = plain_size(layout, LOOM_GROUP_PP, found) - 1;
        if (where != 0 && (where != last || kind == LOOM_GROUP_POS_EMBD))
            return 0;
        where = where != 0;
    } else if (is_cut(kind)) {
        if (!cut_of(layout, kind, &part))
            return 0;
        int64_t inner, outer;
        count = plain_find(layout, part.base, rank, &found, &where);
        where = divide(where, part.inner, &inner);
        outer = divide(where, part.size, &where);
        found = (found * part.outer + outer) * part.inner + inner;
    } else {
        count = plain_find(layout, kind, rank, &found, &where);
        if (count == 0)
            return 0;
    }
    *first = found;
    *place = where;
    return count;
}

bool loom_layout_group_of(
    const loom_layout *layout, loom_group_kind kind, int64_t rank, int64_t *index, int64_t *place) {
    return loom_layout_groups_of(layout, kind, rank, index, place) > 0;
}

bool loom_layout_pipeline_describe(const loom_layout *layout, int64_t rank, int64_t which, int64_t *next,
    int64_t *previous, int64_t *first, int64_t *last) {
    int64_t index, place;
    int64_t count = loom_layout_groups_of(layout, LOOM_GROUP_PP, rank, &index, &place);
    if (which < 0 || which >= count)
        return false;
    index += which;
    int64_t stages = plain_size(layout, LOOM_GROUP_PP, index);
    *next = plain_member(layout, LOOM_GROUP_PP, index, place + 1 < stages ? place + 1 : 0);
    *previous = plain_member(layout, LOOM_GROUP_PP, index, place > 0 ? place - 1 : stages - 1);
    *first = plain_member(layout, LOOM_GROUP_PP, index, 0);
    *last = plain_member(layout, LOOM_GROUP_PP, index, stages - 1);
    return true;
}

bool loom_layout_rank_describe(const loom_layout *layout, int64_t rank, loom_layout_rank *out) {
    int64_t index, place, next, previous, first, last;
    loom_layout_rank r = {0};
    if (!loom_layout_pipeline_describe(layout, rank, 0, &next, &previous, &first, &last))
        return false;
    r.pp_next = next;
    r.pp_prev = previous;
    r.pp_first = first;
    r.pp_last = last;
    r.pipelines = loom_layout_groups_of(layout, LOOM_GROUP_PP, rank, &index, &r.pp);
    r.pp_size = plain_size(layout, LOOM_GROUP_PP, index);
    plain_find(layout, LOOM_GROUP_TP, rank, &index, &r.tp);
    r.tp_size = plain_size(layout, LOOM_GROUP_TP, index);
    r.tp_src = plain_member(layout, LOOM_GROUP_TP, index, 0);
    plain_find(layout, LOOM_GROUP_DP, rank, &index, &r.dp);
    r.dp_src = plain_member(layout, LOOM_GROUP_DP, index, 0);
    plain_find(layout, LOOM_GROUP_TP_PP, rank, &index, &place);
    r.mp_src = plain_member(layout, LOOM_GROUP_TP_PP, index, 0);
    plain_find(layout, LOOM_GROUP_CP, rank, &index, &r.cp);
    plain_find(layout, LOOM_GROUP_DP_CP, rank, &index, &r.dp_cp);
    plain_find(layout, LOOM_GROUP_EP, rank, &index, &r.ep);
    plain_find(layout, LOOM_GROUP_ETP, rank, &index, &r.etp);
    plain_find(layout, LOOM_GROUP_EDP, rank, &index, &r.edp);
    r.embd = loom_layout_group_of(layout, LOOM_GROUP_EMBD, rank, &index, &place);
    r.pos_embd = loom_layout_group_of(layout, LOOM_GROUP_POS_EMBD, rank, &index, &place);
    r.encoder = rank < layout->encoder_ranks;
    *out = r;
    return true;
}

void loom_layout_context_chunks(int64_t s, int64_t cp, int64_t place, int64_t begin[2]) {
    int64_t rows = s / (2 * cp);
    begin[0] = place * rows;
    begin[1] = (2 * cp - 1 - place) * rows;
}
