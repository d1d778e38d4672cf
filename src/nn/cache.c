/* The key/value cache. A layer's keys lie in one array over positions, as its values do, so that attention reads them
 * in place as one block of keys whose queries begin at a later position. The invariant: rows below `length` are those
 * of every layer; rows from there on belong to the positions that are being computed. Arrays are made in fp32; a layer
 * whose first keys come in another dtype has its arrays made anew. */
#include "nn/cache.h"
#include "tensor/dtype.h"
#include <stdlib.h>

static loom_status make_layer(loom_rank *rank, loom__kv_cache *cache, int64_t layer, loom_dtype dtype) {
    int64_t shape[3] = {cache->capacity, cache->b, cache->g * cache->d};
    loom_tensor *k, *v;
    LOOM_TRY(loom_tensor_create(rank, dtype, 3, shape, &k));
    loom_status status = loom_tensor_create(rank, dtype, 3, shape, &v);
    if (status) {
        loom_tensor_release(k);
        return status;
    }
    loom_tensor_release(cache->k[layer]);
    loom_tensor_release(cache->v[layer]);
    cache->k[layer] = k;
    cache->v[layer] = v;
    return LOOM_OK;
}

static loom_status allocate(loom_rank *rank, loom__kv_cache *cache) {
    cache->k = calloc((size_t)cache->layers, sizeof(loom_tensor *));
    cache->v = calloc((size_t)cache->layers, sizeof(loom_tensor *));
    if (!cache->k || !cache->v)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the cache of %lld layers", (long long)cache->layers);
    for (int64_t i = 0; i < cache->layers; i++)
        LOOM_TRY(make_layer(rank, cache, i, LOOM_F32));
    return LOOM_OK;
}

loom_status loom__kv_cache_create(
    loom_rank *rank, int64_t layers, int64_t capacity, int64_t b, int64_t g, int64_t d, loom__kv_cache **out) {
    loom__kv_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a key/value cache");
    *cache = (loom__kv_cache){.layers = layers, .b = b, .g = g, .d = d, .capacity = capacity};
    loom_status status = allocate(rank, cache);
    if (status) {
        loom__kv_cache_destroy(cache);
        return loom_fail_context(
            status, "key/value cache of %lld positions for %lld rows: ", (long long)capacity, (long long)b);
    }
    *out = cache;
    return LOOM_OK;
}

void loom__kv_cache_destroy(loom__kv_cache *cache) {
    if (!cache)
        return;
    for (int64_t i = 0; i < cache->layers; i++) {
        loom_tensor_release(cache->k ? cache->k[i] : NULL);
        loom_tensor_release(cache->v ? cache->v[i] : NULL);
    }
    free(cache->k);
    free(cache->v);
    free(cache);
}

/* Fused rows hold, a group, [its query heads][k][v]; the cache holds the groups' k next to each other, and their v. */
static void take_in(const loom__kv_cache *cache, int64_t layer, const loom_tensor *qkv, int64_t per_group) {
    int64_t rows = qkv->shape[0] * cache->b, d = cache->d, group_stride = (per_group + 2) * d;
    int64_t to = cache->length * cache->b * cache->g * d;
    size_t bytes = (size_t)d * loom_dtype_size(qkv->dtype);
    for (int64_t i = 0; i < rows * cache->g; i++) {
        int64_t from = per_group * d + i * group_stride;
        memcpy(loom__element(cache->k[layer], to + i * d), loom__element(qkv, from), bytes);
        memcpy(loom__element(cache->v[layer], to + i * d), loom__element(qkv, from + d), bytes);
    }
}

loom_status loom__cached_attention(loom_tape *tape, loom__kv_cache *cache, int64_t layer, loom_tensor *qkv,
    const loom_attention_options *options, loom_tensor **output) {
    int64_t s = qkv->shape[0], b = qkv->shape[1], width = qkv->shape[2], n = options->n, g = options->g, d = options->d;
    LOOM_TRY(loom_tensor_ready(qkv));
    if (loom_tape_records(tape) || layer >= cache->layers || b != cache->b || g != cache->g || d != cache->d ||
        s > cache->capacity - cache->length)
        return loom_fail(LOOM_ERR_INTERNAL,
            "cached attention of layer %lld: found %lld positions of %lld rows, expected at most %lld of %lld, and a "
            "tape that does not record",
            (long long)layer, (long long)s, (long long)b, (long long)(cache->capacity - cache->length),
            (long long)cache->b);
    LOOM_TRY(loom__check_dtype(tape, "cached attention", qkv));
    loom_rank *rank = loom_tape_rank(tape);
    if (cache->k[layer]->dtype != qkv->dtype && cache->length > 0)
        return loom_fail(LOOM_ERR_INTERNAL, "cached attention of layer %lld: found %s, expected %s as before",
            (long long)layer, loom_dtype_name(qkv->dtype), loom_dtype_name(cache->k[layer]->dtype));
    if (cache->k[layer]->dtype != qkv->dtype)
        LOOM_TRY(make_layer(rank, cache, layer, qkv->dtype));
    take_in(cache, layer, qkv, n / g);
    loom_attention_block block = {.b = b,
        .n = n,
        .g = g,
        .d = d,
        .s_q = s,
        .s_kv = cache->length + s,
        .q_offset = cache->length,
        .q_stride = width,
        .k_stride = g * d,
        .v_stride = g * d,
        .q_group_stride = (n / g + 2) * d,
        .kv_group_stride = d,
        .scale = options->scale,
        .causal = options->causal,
        .window = options->window,
        .head_offset = options->head_offset};
    loom_tensor *out = NULL, *lse = NULL;
    loom_status status = loom_tensor_create(rank, qkv->dtype, 3, (int64_t[]){s, b, n * d}, &out);
    if (!status)
        status = loom_tensor_create(rank, LOOM_F32, 3, (int64_t[]){b, n, s}, &lse);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    LOOM__KERNEL(tape, qkv->dtype, attention, &block, qkv->data, cache->k[layer]->data, cache->v[layer]->data,
        out->data, n * d, loom_tensor_f32(lse));
    loom_tensor_release(lse);
    *output = out;
    return LOOM_OK;
}
