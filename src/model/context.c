/* The sequence of a model whose ranks share it: which rows are here, and how attention gets at the others. The batch of
 * a forward has this rank's rows already. Invariant: what leaves attention are the rows that went in, so that nothing
 * else of the model knows of the other ranks. */
#include "model/gpt.h"
#include <stdlib.h>
#include <string.h>

int64_t loom__gpt_context_size(const loom__gpt *gpt) {
    const loom_comm *group = gpt->environment.context_group;
    return group ? loom_comm_size(group) : 1;
}

/* Of cp ranks in a row, `count` from `first` on, every `stride`-th. */
static loom_status make_level(
    loom__gpt *gpt, const char *name, int64_t first, int64_t stride, int64_t count, int level) {
    int *ranks = malloc((size_t)count * sizeof *ranks);
    if (!ranks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a group of %lld ranks", (long long)count);
    for (int64_t i = 0; i < count; i++)
        ranks[i] = loom_comm_world_rank(gpt->environment.context_group, (int)(first + i * stride));
    loom_status status = loom_group_create(gpt->environment.rank, name, ranks, (int)count, &gpt->context_levels[level]);
    free(ranks);
    return status;
}

loom_status loom__gpt_make_context_levels(loom__gpt *gpt) {
    if (loom__gpt_context_size(gpt) == 1 ||
        loom__context_layers(&gpt->config, LOOM__CONTEXT_LEVELS, 0, gpt->config.num_layers) == 0)
        return LOOM_OK;
    const int64_t *sizes = gpt->config.parallel.hierarchical_context_parallel_sizes;
    int64_t place = loom_comm_rank(gpt->environment.context_group);
    LOOM_TRY(make_level(gpt, "hcp_l0", place / sizes[0] * sizes[0], 1, sizes[0], 0));
    return make_level(gpt, "hcp_l1", place % sizes[0], sizes[0], sizes[1], 1);
}

typedef struct memory {
    loom__ring ring;
    int64_t begin[]; /* [members, chunks]; then document_start of more rows, where it is needed */
} memory;

/* Chunk number `slot` of the rows of member `outer` when `inner` ranks have joined their rows. */
static int64_t chunk_number(int64_t cp, int64_t inner, int64_t outer, int64_t slot) {
    return slot < inner ? outer * inner + slot : 2 * cp - 1 - outer * inner - (2 * inner - 1 - slot);
}

/* document_start [b, inner*s] of the rows of the inner group, from each rank's [b, s]. */
static loom_status join_documents(
    loom_rank *rank, loom_comm *group, int64_t b, int64_t s, const int32_t *mine, int32_t *joined) {
    int64_t inner = loom_comm_size(group), rows = s / 2;
    loom_tensor *gathered;
    LOOM_TRY(loom_tensor_create(rank, LOOM_I32, 3, (int64_t[]){inner, b, s}, &gathered));
    /* From its place in the tensor, which outlives a failure; the batch does not. */
    int32_t *place = (int32_t *)gathered->data + loom_comm_rank(group) * b * s;
    memcpy(place, mine, (size_t)(b * s) * sizeof *place);
    loom_status status = loom_all_gather(group, place, gathered->data, b * s, LOOM_I32);
    for (int64_t m = 0; !status && m < inner; m++)
        for (int64_t j = 0; j < b; j++) {
            const int32_t *from = (const int32_t *)gathered->data + (m * b + j) * s;
            int32_t *to = joined + j * inner * s;
            memcpy(to + m * rows, from, (size_t)rows * sizeof *to);
            memcpy(to + (2 * inner - 1 - m) * rows, from + rows, (size_t)rows * sizeof *to);
        }
    loom_tensor_release(gathered);
    return status;
}

/* The way of one type. rows: of each of the two chunks. */
static loom_status make_way(const loom__gpt *gpt, const loom_batch *batch, loom__context_type type, int64_t rows,
    const loom__microbatch *m, loom__context_way *way) {
    const loom_module_environment *environment = &gpt->environment;
    const int64_t cp = loom__gpt_context_size(gpt);
    bool levels = type == LOOM__CONTEXT_LEVELS, heads = levels || type == LOOM__CONTEXT_A2A;
    loom_comm *inner_group = levels ? gpt->context_levels[0] : environment->context_group;
    int64_t inner = heads ? loom_comm_size(inner_group) : 1, members = cp / inner, chunks = 2 * inner;
    int64_t documents = heads && batch->document_start ? m->b * m->s * inner : 0;
    way->heads_group = heads && inner > 1 ? inner_group : NULL;
    memory *made =
        calloc(1, sizeof *made + (size_t)(members * chunks) * sizeof(int64_t) + (size_t)documents * sizeof(int32_t));
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a microbatch");
    way->memory = made;
    for (int64_t member = 0; member < members; member++)
        for (int64_t slot = 0; slot < chunks; slot++)
            made->begin[member * chunks + slot] = chunk_number(cp, inner, member, slot) * rows;
    made->ring = (loom__ring){
        .comm = levels ? gpt->context_levels[1] : environment->context_group,
        .gather = type == LOOM__CONTEXT_ALL_GATHER,
        .chunks = chunks,
        .rows = rows,
        .begin = made->begin,
    };
    way->ring = members > 1 ? &made->ring : NULL;
    if (documents == 0)
        return LOOM_OK;
    int32_t *joined = (int32_t *)(made->begin + members * chunks);
    way->document_start = joined;
    return join_documents(environment->rank, inner_group, m->b, m->s, batch->document_start, joined);
}

loom_status loom__gpt_share_sequence(
    const loom__gpt *gpt, const loom_batch *batch, const loom_stage *chunk, loom__microbatch *m) {
    const int64_t cp = loom__gpt_context_size(gpt);
    for (int type = 0; type < LOOM__CONTEXT_TYPES; type++)
        m->context[type].document_start = batch->document_start;
    if (cp == 1)
        return LOOM_OK;
    int64_t begin[2], rows = m->s / 2;
    if (m->s % 2)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "context parallelism: found %lld rows of a sequence on a rank, expected two "
            "chunks of equal length",
            (long long)m->s);
    loom_layout_context_chunks(m->s * cp, cp, loom_comm_rank(gpt->environment.context_group), begin);
    m->rows = (loom_positions){begin[0], rows, begin[1]};
    for (int type = 0; type < LOOM__CONTEXT_TYPES; type++)
        if (loom__context_layers(&gpt->config, (loom__context_type)type, chunk->first_layer, chunk->layers) > 0)
            LOOM_TRY(make_way(gpt, batch, (loom__context_type)type, rows, m, &m->context[type]));
    return LOOM_OK;
}
