/* Decoding with a key/value cache: what is read goes through the same layers as in training, and attends to the cache.
 * Tokens are one list, row behind row, each with its row and its position: only attention needs to know more of a row
 * than that, so rows may be of any length, and one that reads nothing costs nothing. Activations are whole on each rank
 * (a single position cannot be split over the sequence), whatever the strategy says of sequence parallelism. The
 * invariant: the cache holds exactly the positions that were read. */
#include "model/decoder.h"
#include "model/gpt.h"
#include "parallel/parallel.h"
#include <stdlib.h>

struct loom__decoder {
    const loom__gpt *gpt;
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

loom_status loom__decoder_create(
    const loom_module *module, int64_t rows, const int64_t *capacity, loom__decoder **out) {
    const loom__gpt *gpt = module->context;
    const loom_model_config *config = &gpt->config;
    LOOM_TRY(loom__decoder_check(module));
    int64_t groups = config->num_query_groups / loom_comm_size(gpt->environment.tensor_group);
    loom__decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a decoder");
    decoder->gpt = gpt;
    loom_status status = loom__kv_cache_create(gpt->environment.rank, config->num_layers, rows, capacity,
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

/* What is read, as a list of tokens. */
typedef struct reading {
    int64_t count, rows;
    int64_t *row;      /* [count] */
    int64_t *last;     /* [rows] the last token of each row that has any */
    int32_t *position; /* [count] */
} reading;

static void free_reading(reading *r) {
    free(r->row);
    free(r->position);
}

static loom_status make_reading(loom__kv_cache *cache, const int64_t *counts, reading *r) {
    *r = (reading){0};
    for (int64_t j = 0; j < cache->rows; j++)
        r->count += counts[j];
    r->row = malloc((size_t)(r->count + cache->rows + 1) * sizeof *r->row);
    r->position = malloc((size_t)(r->count + 1) * sizeof *r->position);
    if (!r->row || !r->position) {
        free_reading(r);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tokens", (long long)r->count);
    }
    r->last = r->row + r->count;
    int64_t at = 0;
    for (int64_t j = 0; j < cache->rows; j++) {
        cache->reading[j] = counts[j];
        for (int64_t t = 0; t < counts[j]; t++, at++) {
            r->row[at] = j;
            r->position[at] = (int32_t)(cache->length[j] + t);
        }
        if (counts[j] > 0)
            r->last[r->rows++] = at - 1;
    }
    return LOOM_OK;
}

/* The tokens as samples of one position each. */
static loom_status run_model(loom__decoder *decoder, int64_t *tokens, const reading *r, float *logits) {
    const loom__gpt *gpt = decoder->gpt;
    loom_comm *tp = gpt->environment.tensor_group;
    /* On a tape that does not record nobody keeps the microbatch beyond this call. */
    loom__microbatch m = {
        .references = 1,
        .tp = tp,
        .seed = gpt->environment.seed,
        .b = r->count,
        .s = 1,
        .rows = loom_positions_from(0),
        .sample = r->row,
        .positions = r->position,
        .rope = gpt->rope,
        .router = loom__gpt_router_options(gpt, false, 0),
        .cache = decoder->cache,
    };
    loom_tape *tape;
    LOOM_TRY(loom_tape_create(gpt->environment.rank, &(loom_tape_options){.record = false}, &tape));
    loom_tensor *local = NULL;
    loom_status status = loom__gpt_next_logits(gpt, tape, &m, tokens, r->last, r->rows, &local);
    if (!status)
        status = loom__gather_logits(local, gpt->config.vocab_size, tp, logits);
    loom_tensor_release(local);
    loom_tape_destroy(tape);
    return status;
}

loom_status loom__decoder_read(loom__decoder *decoder, int64_t *tokens, const int64_t *counts, float *logits) {
    reading r;
    LOOM_TRY(make_reading(decoder->cache, counts, &r));
    loom_status status = run_model(decoder, tokens, &r, logits);
    for (int64_t j = 0; !status && j < decoder->cache->rows; j++)
        decoder->cache->length[j] += counts[j];
    free_reading(&r);
    return status;
}
