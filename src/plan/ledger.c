/* The memory of a chunk with any number of layers. Layers are alike: a few of them are walked, and what one more costs,
 * at each moment that counts, is what the last of these cost. So a plan takes no longer for a deep model, and is as
 * exact as the walk.
 *
 * How context ranks share a sequence may differ between layers. It changes what passes while a layer computes, and not
 * what the layer keeps: so the worst moment of the layers of one type is in the last of them, where most is kept, and
 * is found by a walk of the layers up to there as if all were of that type. */
#include "plan/sizes.h"

/* Walked exactly; of each kind. */
enum { LAYERS_WALKED = 4 };

static void extend(loom__plan_bytes *far, const loom__plan_bytes *near, double times) {
    far->activations += times * (far->activations - near->activations);
    far->buffers += times * (far->buffers - near->buffers);
    far->logits += times * (far->logits - near->logits);
}

/* Adds what `more` layers of one kind beyond those of `ledger` cost, told by what the last of them cost. */
static loom_status add_layers(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type context,
    int64_t dense, int64_t experts, bool of_experts, int64_t more, bool split, loom__plan_ledger *ledger,
    const loom__plan_ledger *walked) {
    loom__plan_ledger near;
    if (more == 0)
        return LOOM_OK;
    LOOM_TRY(loom__plan_walk(sizes, chunk, context, dense - !of_experts, experts - of_experts, split, &near));
    const struct {
        loom__plan_bytes *to;
        const loom__plan_bytes *far, *near;
    } parts[] = {{&ledger->forward, &walked->forward, &near.forward}, {&ledger->kept, &walked->kept, &near.kept},
        {&ledger->backward, &walked->backward, &near.backward}, {&ledger->halfway, &walked->halfway, &near.halfway},
        {&ledger->weights, &walked->weights, &near.weights}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        loom__plan_bytes far = *parts[i].far;
        extend(&far, parts[i].near, (double)more);
        parts[i].to->activations += far.activations - parts[i].far->activations;
        parts[i].to->buffers += far.buffers - parts[i].far->buffers;
        parts[i].to->logits += far.logits - parts[i].far->logits;
    }
    return LOOM_OK;
}

static loom_status make_alike(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type context,
    bool split, loom__plan_ledger *ledger) {
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts), dense = layers - experts;
    int64_t some_dense = dense < LAYERS_WALKED ? dense : LAYERS_WALKED;
    int64_t some_experts = experts < LAYERS_WALKED ? experts : LAYERS_WALKED;
    loom__plan_ledger walked = {0};
    LOOM_TRY(loom__plan_walk(sizes, chunk, context, some_dense, some_experts, split, &walked));
    loom__plan_ledger made = walked;
    LOOM_TRY(
        add_layers(sizes, chunk, context, some_dense, some_experts, false, dense - some_dense, split, &made, &walked));
    LOOM_TRY(add_layers(
        sizes, chunk, context, some_dense, some_experts, true, experts - some_experts, split, &made, &walked));
    *ledger = made;
    return LOOM_OK;
}

static void take_worse(loom__plan_bytes *worst, loom__plan_bytes other, const loom__plan_bytes *more) {
    other.activations += more->activations;
    other.buffers += more->buffers;
    other.logits += more->logits;
    if (loom__plan_bytes_sum(&other) > loom__plan_bytes_sum(worst))
        *worst = other;
}

loom_status loom__plan_ledger_make(
    const loom__plan_sizes *sizes, const loom_stage *chunk, bool split, loom__plan_ledger *ledger) {
    loom__context_type last = LOOM__CONTEXT_P2P;
    loom__plan_ledger made, before;
    if (chunk->layers > 0)
        last = loom__context_type_of(&sizes->model, chunk->first_layer + chunk->layers - 1);
    LOOM_TRY(make_alike(sizes, chunk, last, split, &made));
    for (int type = 0; type < LOOM__CONTEXT_TYPES; type++) {
        loom_stage part = *chunk;
        part.layers = loom__plan_layers_up_to(sizes, chunk, (loom__context_type)type);
        if (part.layers == 0 || part.layers == chunk->layers)
            continue;
        /* Behind it come layers, whose weight halves wait where there are two. */
        part.loss = false;
        LOOM_TRY(make_alike(sizes, &part, (loom__context_type)type, split, &before));
        const loom__plan_bytes none = {0}, waiting = {made.halfway.activations - before.halfway.activations,
                                               made.halfway.buffers - before.halfway.buffers,
                                               made.halfway.logits - before.halfway.logits};
        take_worse(&made.forward, before.forward, &none);
        take_worse(&made.backward, before.backward, &waiting);
    }
    *ledger = made;
    return LOOM_OK;
}
