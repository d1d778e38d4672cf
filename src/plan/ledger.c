/* The memory of a chunk with any number of layers. Layers are alike: a few of them are walked, and what one more costs,
 * at each moment that counts, is what the last of these cost. So a plan takes no longer for a deep model, and is as
 * exact as the walk. */
#include "plan/sizes.h"

/* Walked exactly; of each kind. */
enum { LAYERS_WALKED = 4 };

static void extend(loom__plan_bytes *far, const loom__plan_bytes *near, double times) {
    far->activations += times * (far->activations - near->activations);
    far->buffers += times * (far->buffers - near->buffers);
    far->logits += times * (far->logits - near->logits);
}

/* Adds what `more` layers of one kind beyond those of `ledger` cost, told by what the last of them cost. */
static loom_status add_layers(const loom__plan_sizes *sizes, const loom_stage *chunk, int64_t dense, int64_t experts,
    bool of_experts, int64_t more, bool split, loom__plan_ledger *ledger, const loom__plan_ledger *walked) {
    loom__plan_ledger near;
    if (more == 0)
        return LOOM_OK;
    LOOM_TRY(loom__plan_walk(sizes, chunk, dense - !of_experts, experts - of_experts, split, &near));
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

loom_status loom__plan_ledger_make(
    const loom__plan_sizes *sizes, const loom_stage *chunk, bool split, loom__plan_ledger *ledger) {
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts), dense = layers - experts;
    int64_t some_dense = dense < LAYERS_WALKED ? dense : LAYERS_WALKED;
    int64_t some_experts = experts < LAYERS_WALKED ? experts : LAYERS_WALKED;
    loom__plan_ledger walked = {0};
    LOOM_TRY(loom__plan_walk(sizes, chunk, some_dense, some_experts, split, &walked));
    loom__plan_ledger made = walked;
    LOOM_TRY(add_layers(sizes, chunk, some_dense, some_experts, false, dense - some_dense, split, &made, &walked));
    LOOM_TRY(add_layers(sizes, chunk, some_dense, some_experts, true, experts - some_experts, split, &made, &walked));
    *ledger = made;
    return LOOM_OK;
}
