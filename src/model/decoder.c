/* Decoding with a key/value cache: a piece of s positions goes through the same layers as in training, and attends to
 * the cache. Activations are whole on each rank (a single position cannot be split over the sequence), whatever the
 * strategy says of sequence parallelism. The invariant: the cache holds exactly the positions that were read. */
#include "model/decoder.h"
#include "model/gpt.h"
#include "parallel/parallel.h"
#include <stdlib.h>

struct loom__decoder {
    const loom__gpt *gpt;
    int64_t b;
    loom__kv_cache *cache;
};

int64_t loom__decoder_positions(const loom_model_config *config) {
    switch (config->position_embedding_type) {
    case LOOM_POSITION_LEARNED:
        return config->max_position_embeddings;
    case LOOM_POSITION_ROPE: /* the longer of the two has a table */
        return config->max_position_embeddings > config->seq_length ? config->max_position_embeddings
                                                                    : config->seq_length;
    default:
        return INT32_MAX;
    }
}

loom_status loom__decoder_check(const loom_module *module) {
    const loom_module_environment *environment = &((const loom__gpt *)module->context)->environment;
    if (environment->stages > 1 || environment->chunk_count > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: generation with a model that is cut into %lld stages of %lld chunks; generate with "
            "pipeline_model_parallel_size 1, from the weights that loom_gpt_save_hf writes",
            (long long)environment->stages, (long long)environment->chunk_count);
    return LOOM_OK;
}

loom_status loom__decoder_create(const loom_module *module, int64_t b, int64_t capacity, loom__decoder **out) {
    const loom__gpt *gpt = module->context;
    const loom_model_config *config = &gpt->config;
    LOOM_TRY(loom__decoder_check(module));
    int64_t groups = config->num_query_groups / loom_comm_size(gpt->environment.tensor_group);
    loom__decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a decoder");
    decoder->gpt = gpt;
    decoder->b = b;
    loom_status status = loom__kv_cache_create(gpt->environment.rank, config->num_layers, capacity, b,
        groups > 0 ? groups : 1, config->kv_channels, &decoder->cache);
    if (status) {
        free(decoder);
        return status;
    }
    *out = decoder;
    return LOOM_OK;
}

void loom__decoder_destroy(loom__decoder *decoder) {
    if (!decoder)
        return;
    loom__kv_cache_destroy(decoder->cache);
    free(decoder);
}

loom_status loom__decoder_read(loom__decoder *decoder, int64_t *tokens, int64_t s, float *logits) {
    const loom__gpt *gpt = decoder->gpt;
    loom__kv_cache *cache = decoder->cache;
    loom_comm *tp = gpt->environment.tensor_group;
    /* On a tape that does not record nobody keeps the microbatch beyond this call. */
    loom__microbatch m = {
        .references = 1,
        .tp = tp,
        .seed = gpt->environment.seed,
        .b = decoder->b,
        .s = s,
        .rows = loom_positions_from(cache->length),
        .rope = gpt->rope,
        .router = loom__gpt_router_options(gpt, false, 0),
        .cache = cache,
    };
    loom_tape *tape;
    LOOM_TRY(loom_tape_create(gpt->environment.rank, &(loom_tape_options){.record = false}, &tape));
    loom_tensor *local = NULL;
    loom_status status = loom__gpt_next_logits(gpt, tape, &m, tokens, &local);
    if (!status)
        status = loom__gather_logits(local, gpt->config.vocab_size, tp, logits);
    loom_tensor_release(local);
    loom_tape_destroy(tape);
    if (!status)
        cache->length += s;
    return status;
}
