/* Ten thousand topologies drawn at random. An oracle written as the rules are told (README of the golden topology
 * files) decides which are legal; in the legal ones every group and place is checked against plain coordinates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/random.h"
#include "layout/layout.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOPOLOGIES = 10000, WORLD_MAX = 4096, AXES = LOOM_LAYOUT_AXES };
enum { TP, CP, EP, DP, PP };
static const char *const axis_name[AXES] = {"tp", "cp", "ep", "dp", "pp"};

typedef struct draw {
    uint64_t seed;
    uint32_t topology, count;
} draw;

static int64_t below(draw *d, int64_t n) {
    loom__philox words = loom__philox4x32(d->count++, d->topology, 0, 0, (uint32_t)d->seed, (uint32_t)(d->seed >> 32));
    return (int64_t)(words.word[0] % (uint32_t)n);
}

static bool chance(draw *d, int percent) {
    return below(d, 100) < percent;
}

static int64_t some_size(draw *d) {
    static const int64_t size[] = {1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 8};
    return size[below(d, (int64_t)(sizeof size / sizeof *size))];
}

static void draw_order(draw *d, char *order) {
    int axes[AXES] = {TP, CP, EP, DP, PP}, kept = chance(d, 20) ? 3 + (int)below(d, 3) : AXES;
    for (int i = 0; i < AXES; i++) {
        int j = i + (int)below(d, AXES - i), axis = axes[j];
        axes[j] = axes[i];
        axes[i] = axis;
    }
    order[0] = '\0';
    for (int i = 0; i < kept; i++) {
        strcat(order, i > 0 ? "-" : "");
        strcat(order, axis_name[axes[i]]);
    }
    if (chance(d, 5))
        strcat(order, chance(d, 50) ? "-tp" : "-zz");
    if (chance(d, 5))
        order[below(d, 4)] = ',';
}

static loom_parallel_sizes draw_sizes(draw *d) {
    loom_parallel_sizes s = loom_parallel_sizes_default(1);
    s.tensor = some_size(d);
    s.pipeline = some_size(d);
    s.context = chance(d, 60) ? 1 : some_size(d);
    int64_t data = some_size(d), model = s.tensor * s.pipeline * s.context;
    if (chance(d, 20)) {
        s.encoder_pipeline = below(d, 3);
        s.encoder_tensor = chance(d, 70) ? (s.tensor % 2 == 0 ? s.tensor / 2 : s.tensor) : below(d, s.tensor + 2);
        model += (s.encoder_tensor > 0 ? s.encoder_tensor : s.tensor) * s.encoder_pipeline * s.context;
    }
    s.world = model * data;
    while (s.world > WORLD_MAX)
        s.world /= 2;
    if (chance(d, 10))
        s.world = 1 + below(d, WORLD_MAX);
    if (chance(d, 40))
        s.expert = some_size(d);
    if (chance(d, 30))
        s.expert_tensor = chance(d, 50) ? 1 : some_size(d);
    if (chance(d, 25))
        s.virtual_pipeline = 1 + below(d, 3);
    if (chance(d, 25))
        s.optimizer_instances = some_size(d);
    if (chance(d, 25)) {
        int64_t inner = s.context % 2 == 0 ? 2 : s.context % 3 == 0 ? 3 : 1;
        s.hierarchical_levels = 2 + (int)below(d, 2);
        s.hierarchical_context[0] = inner;
        s.hierarchical_context[1] = chance(d, 90) ? s.context / inner : some_size(d);
        s.hierarchical_context[2] = 1;
    }
    if (chance(d, 20))
        s.use_tp_pp_dp_mapping = true;
    else if (chance(d, 50))
        draw_order(d, s.order);
    if (chance(d, 4)) {
        static const int64_t bad[] = {0, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 32, 4097};
        int64_t *member[] = {&s.world, &s.tensor, &s.pipeline, &s.context, &s.expert, &s.expert_tensor,
            &s.optimizer_instances, &s.virtual_pipeline, &s.encoder_tensor, &s.encoder_pipeline};
        *member[below(d, 10)] = bad[below(d, 6)];
    }
    return s;
}

/* A grid as it is told: sizes of the axes, first axis of the order fastest. */
typedef struct grid {
    int64_t size[AXES];
    int64_t offset;
} grid;

typedef struct oracle {
    int order[AXES];
    grid encoder, dense, expert;
    bool has_encoder;
} oracle;

/* Number made of the digits of the axes in `mask`, first axis of the order fastest; digit = coordinate of the rank. */
static int64_t number_of(const oracle *o, const grid *g, int mask, int64_t rank, int64_t *count) {
    int64_t rest = rank - g->offset, number = 0;
    *count = 1;
    for (int i = 0; i < AXES; i++) {
        int axis = o->order[i];
        if (mask >> axis & 1) {
            number += rest % g->size[axis] * *count;
            *count *= g->size[axis];
        }
        rest /= g->size[axis];
    }
    return number;
}

/* Ranks before pp in the order: the distance between the stages of a pipeline. */
static int64_t stage_stride(const oracle *o, const grid *g) {
    int64_t stride = 1;
    for (int i = 0; o->order[i] != PP; i++)
        stride *= g->size[o->order[i]];
    return stride;
}

static bool read_order(const loom_parallel_sizes *s, oracle *o, bool absent[AXES], bool *ends_in_pp) {
    char text[LOOM_LAYOUT_ORDER_BYTES];
    int count = 0;
    snprintf(text, sizeof text, "%s",
        s->order[0]               ? s->order
        : s->use_tp_pp_dp_mapping ? "tp-cp-ep-pp-dp"
                                  : "tp-cp-ep-dp-pp");
    *ends_in_pp = strlen(text) >= 2 && strcmp(text + strlen(text) - 2, "pp") == 0;
    for (int axis = 0; axis < AXES; axis++)
        absent[axis] = true;
    for (char *save = NULL, *part = strtok_r(text, "-", &save); part; part = strtok_r(NULL, "-", &save)) {
        int axis = 0;
        while (axis < AXES && strcmp(part, axis_name[axis]) != 0)
            axis++;
        if (axis == AXES || !absent[axis])
            return false;
        absent[axis] = false;
        o->order[count++] = axis;
    }
    for (int axis = 0; axis < AXES; axis++) {
        if (absent[axis])
            o->order[count++] = axis;
    }
    return true;
}

static bool fits_order(const grid *g, const bool absent[AXES]) {
    for (int axis = 0; axis < AXES; axis++) {
        if (absent[axis] && g->size[axis] != 1)
            return false;
    }
    return true;
}

/* True where some pipeline joins an encoder group and a decoder group of other data or context rank. */
static bool pipelines_mix(const oracle *o) {
    int64_t total, encoder_groups = o->encoder.size[TP] * o->encoder.size[CP] * o->encoder.size[DP];
    int64_t decoder_groups = o->dense.size[TP] * o->dense.size[CP] * o->dense.size[DP];
    oracle flat = *o; /* one stage each: then a rank is the number of its pipeline group */
    flat.encoder.size[PP] = flat.dense.size[PP] = 1;
    flat.encoder.offset = flat.dense.offset = 0;
    int64_t group = 0;
    for (int64_t e = 0; e < encoder_groups; e++) {
        int64_t run = decoder_groups / encoder_groups + (e < decoder_groups % encoder_groups);
        for (int64_t i = 0; i < run; i++, group++) {
            if (number_of(&flat, &flat.encoder, 1 << DP | 1 << CP, e, &total) !=
                number_of(&flat, &flat.dense, 1 << DP | 1 << CP, group, &total))
                return true;
        }
    }
    return false;
}

static bool is_legal(const loom_parallel_sizes *s, oracle *o) {
    const int64_t least_one[] = {s->world, s->tensor, s->pipeline, s->context, s->expert, s->optimizer_instances};
    const int64_t least_zero[] = {s->virtual_pipeline, s->expert_tensor, s->encoder_tensor, s->encoder_pipeline};
    for (int i = 0; i < 6; i++) {
        if (least_one[i] < 1)
            return false;
    }
    for (int i = 0; i < 4; i++) {
        if (least_zero[i] < 0)
            return false;
    }
    int64_t etp = s->expert_tensor > 0 ? s->expert_tensor : s->tensor;
    int64_t enc = s->encoder_tensor > 0 ? s->encoder_tensor : s->tensor;
    const int64_t bounded[] = {s->tensor, s->pipeline, s->context, s->expert, etp, enc, s->encoder_pipeline};
    for (int i = 0; i < 7; i++) {
        if (bounded[i] > s->world || bounded[i] > 100000)
            return false; /* more than there are ranks; products below cannot overflow */
    }
    bool absent[AXES], ends_in_pp;
    if (!read_order(s, o, absent, &ends_in_pp))
        return false;
    if ((s->virtual_pipeline > 0 && s->pipeline == 1) || enc > s->tensor)
        return false;
    int64_t encoder_model = enc * s->encoder_pipeline * s->context, model = s->tensor * s->pipeline * s->context;
    if (s->world % (model + encoder_model) != 0)
        return false;
    int64_t dp = s->world / (model + encoder_model), ranks = dp * model;
    if (ranks % (etp * s->expert * s->pipeline) != 0)
        return false;
    int64_t edp = ranks / (etp * s->expert * s->pipeline), product = 1;
    for (int level = 0; level < s->hierarchical_levels; level++)
        product *= s->hierarchical_context[level];
    if ((s->hierarchical_levels > 0 && product != s->context) || dp * s->context % s->optimizer_instances != 0 ||
        edp % s->optimizer_instances != 0)
        return false;
    o->has_encoder = s->encoder_pipeline > 0;
    o->encoder = (grid){{enc, s->context, 1, dp, s->encoder_pipeline}, 0};
    o->dense = (grid){{s->tensor, s->context, 1, dp, s->pipeline}, dp * encoder_model};
    o->expert = (grid){{etp, 1, s->expert, edp, s->pipeline}, dp * encoder_model};
    if (!fits_order(&o->dense, absent) || !fits_order(&o->expert, absent) ||
        (o->has_encoder && !fits_order(&o->encoder, absent)))
        return false;
    if (!(ends_in_pp || s->pipeline == 1 || edp == dp))
        return false;
    if (s->pipeline > 1 && stage_stride(o, &o->dense) != stage_stride(o, &o->expert))
        return false;
    return !o->has_encoder || (s->optimizer_instances == 1 && !pipelines_mix(o));
}

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

static const struct {
    loom_group_kind kind;
    int mask;
    bool expert;
} plain[] = {{LOOM_GROUP_DP_CP, 1 << DP | 1 << CP, false}, {LOOM_GROUP_DP, 1 << DP, false},
    {LOOM_GROUP_CP, 1 << CP, false}, {LOOM_GROUP_TP, 1 << TP, false}, {LOOM_GROUP_TP_CP, 1 << TP | 1 << CP, false},
    {LOOM_GROUP_TP_DP, 1 << TP | 1 << DP, false}, {LOOM_GROUP_TP_DP_CP, 1 << TP | 1 << DP | 1 << CP, false},
    {LOOM_GROUP_EP, 1 << EP, true}, {LOOM_GROUP_ETP, 1 << TP, true}, {LOOM_GROUP_ETP_EP, 1 << TP | 1 << EP, true},
    {LOOM_GROUP_ETP_EP_PP, 1 << TP | 1 << EP | 1 << PP, true}, {LOOM_GROUP_EDP, 1 << DP, true}};

/* Index and place of every rank, from its coordinates. */
static void check_coordinates(const char *id, const loom_layout *layout, const oracle *o) {
    for (size_t k = 0; k < sizeof plain / sizeof *plain; k++) {
        const grid *decoder = plain[k].expert ? &o->expert : &o->dense;
        int all = (1 << AXES) - 1;
        for (int64_t rank = 0; rank < layout->sizes.world; rank++) {
            const grid *g = rank < o->dense.offset ? &o->encoder : decoder;
            int64_t index = -1, place = -1, groups, size, before = 0;
            if (g != &o->encoder && o->has_encoder)
                number_of(o, &o->encoder, all & ~plain[k].mask, 0, &before);
            int64_t expected_place = number_of(o, g, plain[k].mask, rank, &size);
            int64_t expected_index = before + number_of(o, g, all & ~plain[k].mask, rank, &groups);
            check(loom_layout_group_of(layout, plain[k].kind, rank, &index, &place) && index == expected_index &&
                      place == expected_place && loom_layout_group_size(layout, plain[k].kind, index) == size,
                "%s: %s of rank %" PRId64 " is %" PRId64 "/%" PRId64 ", expected %" PRId64 "/%" PRId64, id,
                loom_layout_kind_name(plain[k].kind), rank, index, place, expected_index, expected_place);
        }
    }
}

/* Every kind: the groups hold each rank as often as the rank says, once where the kind is a partition. */
static void check_partitions(const char *id, const loom_layout *layout) {
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        loom_group_kind kind = (loom_group_kind)k;
        const char *name = loom_layout_kind_name(kind);
        int64_t groups = loom_layout_group_count(layout, kind), slots = 0, memberships = 0;
        for (int64_t i = 0; i < groups; i++)
            slots += loom_layout_group_size(layout, kind, i);
        bool partition = groups > 0 && kind != LOOM_GROUP_EMBD && kind != LOOM_GROUP_POS_EMBD &&
                         (kind != LOOM_GROUP_PP || layout->encoder_ranks == 0);
        for (int64_t rank = 0; rank < layout->sizes.world; rank++) {
            int64_t first = 0, place = 0, count = loom_layout_groups_of(layout, kind, rank, &first, &place);
            check(!partition || count == 1, "%s: rank %" PRId64 " is in %" PRId64 " groups %s", id, rank, count, name);
            for (int64_t i = first; i < first + count; i++)
                check(loom_layout_group_member(layout, kind, i, place) == rank,
                    "%s: %s %" PRId64 " does not have rank %" PRId64 " at place %" PRId64, id, name, i, rank, place);
            if (count > 0 && place > 0)
                check(loom_layout_group_member(layout, kind, first, place - 1) < rank, "%s: %s is not ascending", id,
                    name);
            memberships += count;
        }
        check(slots == memberships, "%s: %s has %" PRId64 " places for %" PRId64 " memberships", id, name, slots,
            memberships);
        check(!partition || slots == layout->sizes.world, "%s: %s is no partition", id, name);
    }
}

static void check_ends(const char *id, const loom_layout *layout) {
    const int64_t ranks[] = {0, 1, layout->sizes.world / 2, layout->sizes.world - 1};
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        for (int i = 0; i < 4; i++) {
            int64_t index, place;
            if (loom_layout_group_of(layout, (loom_group_kind)k, ranks[i], &index, &place))
                check(loom_layout_group_member(layout, (loom_group_kind)k, index, place) == ranks[i],
                    "%s: %s loses rank %" PRId64, id, loom_layout_kind_name((loom_group_kind)k), ranks[i]);
        }
    }
}

static void check_pipelines(const char *id, const loom_layout *layout) {
    int64_t next, previous, first, last, index, place;
    for (int64_t g = 0; g < loom_layout_group_count(layout, LOOM_GROUP_PP); g++) {
        loom_layout_rank head;
        int64_t stages = loom_layout_group_size(layout, LOOM_GROUP_PP, g);
        assert_true(loom_layout_rank_describe(layout, loom_layout_group_member(layout, LOOM_GROUP_PP, g, 0), &head));
        for (int64_t stage = 0; stage < stages; stage++) {
            int64_t rank = loom_layout_group_member(layout, LOOM_GROUP_PP, g, stage);
            loom_layout_rank r;
            assert_true(loom_layout_rank_describe(layout, rank, &r));
            check(r.dp == head.dp && r.cp == head.cp, "%s: pipeline %" PRId64 " joins other data", id, g);
            check(r.mp_src == head.mp_src, "%s: pipeline %" PRId64 " joins other replicas", id, g);
            loom_layout_groups_of(layout, LOOM_GROUP_PP, rank, &index, &place);
            assert_true(loom_layout_pipeline_describe(layout, rank, g - index, &next, &previous, &first, &last));
            check(next == loom_layout_group_member(layout, LOOM_GROUP_PP, g, (stage + 1) % stages) &&
                      previous == loom_layout_group_member(layout, LOOM_GROUP_PP, g, (stage + stages - 1) % stages) &&
                      first == loom_layout_group_member(layout, LOOM_GROUP_PP, g, 0) &&
                      last == loom_layout_group_member(layout, LOOM_GROUP_PP, g, stages - 1) && r.pp == stage,
                "%s: neighbours of rank %" PRId64 " in pipeline %" PRId64, id, rank, g);
        }
    }
}

static void describe(char *text, size_t bytes, uint64_t seed, int topology, const loom_parallel_sizes *s) {
    snprintf(text, bytes,
        "seed %" PRIu64 " topology %d: world %" PRId64 " tp %" PRId64 " pp %" PRId64 " vpp %" PRId64 " cp %" PRId64
        " ep %" PRId64 " etp %" PRId64 " encoder %" PRId64 "x%" PRId64 " instances %" PRId64 " levels %d order '%s'%s",
        seed, topology, s->world, s->tensor, s->pipeline, s->virtual_pipeline, s->context, s->expert, s->expert_tensor,
        s->encoder_tensor, s->encoder_pipeline, s->optimizer_instances, s->hierarchical_levels, s->order,
        s->use_tp_pp_dp_mapping ? " mapping" : "");
}

static void ten_thousand_topologies_are_partitions_or_refused(void **state) {
    (void)state;
    const char *given = getenv("MEGALOOM_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20240607;
    int legal_count = 0, encoders = 0;
    for (int topology = 0; topology < TOPOLOGIES; topology++) {
        draw d = {seed, (uint32_t)topology, 0};
        loom_parallel_sizes sizes = draw_sizes(&d);
        char id[512];
        describe(id, sizeof id, seed, topology, &sizes);
        loom_layout layout;
        oracle o = {0};
        if (sizes.world > WORLD_MAX) { /* too many to ask each: the ends must be found all the same */
            if (loom_layout_init(&sizes, &layout) == LOOM_OK)
                check_ends(id, &layout);
            continue;
        }
        bool legal = is_legal(&sizes, &o);
        loom_error_clear();
        loom_status status = loom_layout_init(&sizes, &layout);
        check((status == LOOM_OK) == legal, "%s is %s, but the answer is %s (%s)", id, legal ? "legal" : "illegal",
            loom_status_name(status), loom_error_message());
        if (!legal) {
            check(status == LOOM_ERR_CONFIG || status == LOOM_ERR_UNSUPPORTED, "%s: %s", id, loom_status_name(status));
            check(loom_error_message()[0] != '\0', "%s: refused without a word", id);
            continue;
        }
        legal_count++;
        encoders += o.has_encoder;
        check_partitions(id, &layout);
        check_coordinates(id, &layout, &o);
        check_pipelines(id, &layout);
    }
    print_message("seed %" PRIu64 ": %d topologies, %d legal ones checked (%d with an encoder)\n", seed, TOPOLOGIES,
        legal_count, encoders);
    assert_in_range(legal_count, TOPOLOGIES / 5, TOPOLOGIES * 4 / 5);
    assert_true(encoders > TOPOLOGIES / 100);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(ten_thousand_topologies_are_partitions_or_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
