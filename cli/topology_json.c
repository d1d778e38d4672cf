/* A layout as JSON, with the keys, the order and the absent fields of the golden topology files, so that the two
 * compare byte for byte. It is written while the layout is read; nothing is stored. */
#include "topology.h"
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

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

void loom_cli_topology_json(const loom_layout *layout, const loom_parallel_sizes *sizes) {
    loom_parallel_sizes given = *sizes;
    if (given.order[0] == '\0')
        strcpy(given.order, layout->sizes.order);
    printf("{");
    json_id(&given);
    printf(",\"world\":%" PRId64 ",\"tp\":%" PRId64 ",\"pp\":%" PRId64, given.world, given.tensor, given.pipeline);
    json_optional("vpp", given.virtual_pipeline);
    printf(",\"cp\":%" PRId64 ",\"ep\":%" PRId64, given.context, given.expert);
    json_optional("etp", given.expert_tensor);
    if (given.moe_extended_tp)
        printf(",\"moe_extended_tp\":true");
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

void loom_cli_topology_json_rank(const loom_layout *layout, int64_t rank) {
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
