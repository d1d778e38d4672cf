/* Keys and values of the positions that a model has seen, so that generation computes each position once. */
#ifndef NN_CACHE_H
#define NN_CACHE_H

#include <megaloom/tensor.h>

typedef struct loom__kv_cache {
    int64_t layers, rows, g, d; /* g: local query groups */
    int64_t *begin; /* [rows + 1] where each row's places begin, and where the last one's end; owned, as the next two */
    int64_t *length;  /* [rows] positions that all layers have seen; whoever runs the layers moves it on */
    int64_t *reading; /* [rows] positions behind those that the layers are being run for; whoever runs them sets it */
    loom_tensor **k, **v; /* a layer: [begin[rows], g*d], in the dtype of its keys */
} loom__kv_cache;

/* Room for capacity[j] >= 0 positions of row j. Memory from the rank's allocator; its elements are undefined up to the
 * first use. Not collective. */
loom_status loom__kv_cache_create(loom_rank *rank, int64_t layers, int64_t rows, const int64_t *capacity, int64_t g,
    int64_t d, loom__kv_cache **cache);
void loom__kv_cache_destroy(loom__kv_cache *cache); /* NULL is accepted */

/* Self attention of positions length[j] … length[j] + reading[j] - 1 of every row j, over all of its positions up to
 * their own. qkv: fused, rotated already, [1, t, g*(n/g + 2)*d] with t = sum of reading, row behind row; *output [1, t,
 * n*d]. Takes their keys and values into the cache. options as for loom_attention, without document_start and dropout.
 * Only on a tape that does not record. */
loom_status loom__cached_attention(loom_tape *tape, loom__kv_cache *cache, int64_t layer, loom_tensor *qkv,
    const loom_attention_options *options, loom_tensor **output);

#endif
