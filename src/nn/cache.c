/* The key/value cache. A layer's keys lie in one array, as its values do: the positions of a row next to each other,
 * row behind row. So attention reads a row's keys in place as one block whose queries begin at a later position, and a
 * row is computed as if it were alone, wherever the others are. The invariant: places below a row's `length` are those
 * of every layer; places from there on belong to the positions that are being computed. Arrays are made in fp32; a
 * layer whose first keys come in another dtype has its arrays made anew. */
#include "nn/cache.h"
#include "tensor/dtype.h"
#include <stdlib.h>
#include <string.h>

static loom_status make_layer(loom_rank *rank, loom__kv_cache *cache, int64_t layer, loom_dtype dtype) {
    int64_t shape[2] = {cache->begin[cache->rows], cache->g * cache->d};
    loom_tensor *k, *v;
    LOOM_TRY(loom_tensor_create(rank, dtype, 2, shape, &k));
    loom_status status = loom_tensor_create(rank, dtype, 2, shape, &v);
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

/* The arrays of a row each, and where each row begins. */
static loom_status place_rows(loom__kv_cache *cache, const int64_t *capacity) {
    size_t rows = (size_t)cache->rows;
    cache->begin = calloc(3 * rows + 1, sizeof *cache->begin);
    if (!cache->begin)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the cache of %zu rows", rows);
    cache->length = cache->begin + rows + 1;
    cache->reading = cache->length + rows;
    for (size_t j = 0; j < rows; j++)
        if (__builtin_add_overflow(cache->begin[j], capacity[j], &cache->begin[j + 1]))
            return loom_fail(LOOM_ERR_MEMORY, "the positions of %zu rows are too many", rows);
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

loom_status loom__kv_cache_create(loom_rank *rank, int64_t layers, int64_t rows, const int64_t *capacity, int64_t g,
    int64_t d, loom__kv_cache **out) {
    loom__kv_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a key/value cache");
    *cache = (loom__kv_cache){.layers = layers, .rows = rows, .g = g, .d = d};
    loom_status status = place_rows(cache, capacity);
    if (!status)
        status = allocate(rank, cache);
    if (status) {
        long long positions = cache->begin ? (long long)cache->begin[rows] : 0;
        loom__kv_cache_destroy(cache);
        return loom_fail_context(
            status, "key/value cache of %lld positions for %lld rows: ", positions, (long long)rows);
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
    free(cache->begin);
    free(cache);
}

/* Fused rows hold, a group, [its query heads][k][v]; the cache holds the groups' k next to each other, and their v.
 * `first`: the fused row of the first position that row j reads. */
static void take_in(
    const loom__kv_cache *cache, int64_t layer, int64_t j, const loom_tensor *qkv, int64_t first, int64_t per_group) {
    int64_t d = cache->d, group_stride = (per_group + 2) * d;
    int64_t to = (cache->begin[j] + cache->length[j]) * cache->g * d;
    size_t bytes = (size_t)d * loom_dtype_size(qkv->dtype);
    for (int64_t i = 0; i < cache->reading[j] * cache->g; i++) {
        int64_t from = per_group * d + (first * cache->g + i) * group_stride;
        memcpy(loom__element(cache->k[layer], to + i * d), loom__element(qkv, from), bytes);
        memcpy(loom__element(cache->v[layer], to + i * d), loom__element(qkv, from + d), bytes);
    }
}

static loom_status check_call(const loom_tape *tape, const loom__kv_cache *cache, int64_t layer, const loom_tensor *qkv,
    const loom_attention_options *options) {
    int64_t positions = qkv->shape[0] * qkv->shape[1], reading = 0;
    bool seen = false, fits = true;
    for (int64_t j = 0; j < cache->rows; j++) {
        reading += cache->reading[j];
        seen = seen || cache->length[j] > 0;
        fits = fits && cache->reading[j] <= cache->begin[j + 1] - cache->begin[j] - cache->length[j];
    }
    if (loom_tape_records(tape) || layer >= cache->layers || options->g != cache->g || options->d != cache->d ||
        positions != reading || !fits)
        return loom_fail(LOOM_ERR_INTERNAL,
            "cached attention of layer %lld: found %lld positions, expected %lld that have room, and a tape that does "
            "not record",
            (long long)layer, (long long)positions, (long long)reading);
    if (cache->k[layer]->dtype != qkv->dtype && seen)
        return loom_fail(LOOM_ERR_INTERNAL, "cached attention of layer %lld: found %s, expected %s as before",
            (long long)layer, loom_dtype_name(qkv->dtype), loom_dtype_name(cache->k[layer]->dtype));
    return LOOM_OK;
}

/* Of one row's positions, which begin at row `first` of qkv and out. */
static void attend_row(loom_tape *tape, const loom__kv_cache *cache, int64_t layer, int64_t j, const loom_tensor *qkv,
    int64_t first, const loom_attention_options *options, loom_tensor *lse, loom_tensor *out) {
    const int64_t n = options->n, g = options->g, d = options->d, width = qkv->shape[2], at = cache->begin[j] * g * d;
    const loom_attention_block block = {.b = 1,
        .n = n,
        .g = g,
        .d = d,
        .s_q = cache->reading[j],
        .s_kv = cache->length[j] + cache->reading[j],
        .q_offset = cache->length[j],
        .q_stride = width,
        .k_stride = g * d,
        .v_stride = g * d,
        .q_group_stride = (n / g + 2) * d,
        .kv_group_stride = d,
        .scale = options->scale,
        .causal = options->causal,
        .window = options->window,
        .head_offset = options->head_offset};
    LOOM__KERNEL(tape, qkv->dtype, attention, &block, loom__element(qkv, first * width),
        loom__element(cache->k[layer], at), loom__element(cache->v[layer], at), loom__element(out, first * n * d),
        n * d, loom_tensor_f32(lse) + first * n);
}

loom_status loom__cached_attention(loom_tape *tape, loom__kv_cache *cache, int64_t layer, loom_tensor *qkv,
    const loom_attention_options *options, loom_tensor **output) {
    const int64_t positions = qkv->shape[0] * qkv->shape[1], n = options->n;
    LOOM_TRY(loom_tensor_ready(qkv));
    LOOM_TRY(check_call(tape, cache, layer, qkv, options));
    LOOM_TRY(loom__check_dtype(tape, "cached attention", qkv));
    loom_rank *rank = loom_tape_rank(tape);
    if (cache->k[layer]->dtype != qkv->dtype)
        LOOM_TRY(make_layer(rank, cache, layer, qkv->dtype));
    loom_tensor *out = NULL, *lse = NULL;
    loom_status status =
        loom_tensor_create(rank, qkv->dtype, 3, (int64_t[]){qkv->shape[0], qkv->shape[1], n * options->d}, &out);
    if (!status)
        status = loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){positions, n}, &lse);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    for (int64_t j = 0, first = 0; j < cache->rows; first += cache->reading[j++])
        if (cache->reading[j] > 0) {
            take_in(cache, layer, j, qkv, first, n / options->g);
            attend_row(tape, cache, layer, j, qkv, first, options, lse, out);
        }
    loom_tensor_release(lse);
    *output = out;
    return LOOM_OK;
}
