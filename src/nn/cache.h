/* Keys and values of the positions that a model has seen, so that generation computes each position once. */
#ifndef NN_CACHE_H
#define NN_CACHE_H

#include <megaloom/tensor.h>

typedef struct loom__kv_cache {
    int64_t layers, b, g, d; /* g: local query groups */
    int64_t capacity;        /* positions there is room for */
    int64_t length;          /* positions that all layers have seen; whoever runs the layers moves it on */
    loom_tensor **k, **v;    /* a layer: [capacity, b, g*d], in the dtype of its keys */
} loom__kv_cache;

/* Memory from the rank's allocator; its elements are undefined up to the first use. Not collective. */
loom_status loom__kv_cache_create(
    loom_rank *rank, int64_t layers, int64_t capacity, int64_t b, int64_t g, int64_t d, loom__kv_cache **cache);
void loom__kv_cache_destroy(loom__kv_cache *cache); /* NULL is accepted */

/* Self attention of positions length … length + s - 1 (fused qkv [s, b, g*(n/g + 2)*d], rotated already) over all
 * positions up to their own: [s, b, n*d]. Takes their keys and values into the cache. options as for loom_attention,
 * without document_start and dropout. Only on a tape that does not record. */
loom_status loom__cached_attention(loom_tape *tape, loom__kv_cache *cache, int64_t layer, loom_tensor *qkv,
    const loom_attention_options *options, loom_tensor **output);

#endif
