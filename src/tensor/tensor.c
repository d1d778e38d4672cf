/* Tensors: a shape and a counted piece of the rank's memory. Several tensors may share a piece (views); it goes back to
 * the allocator with the last of them. */
#include "runtime/allocator.h"
#include "runtime/rank.h"
#include <megaloom/tensor.h>
#include <stdlib.h>

struct loom__storage {
    loom__allocator *allocator;
    void *memory;
    int64_t references;
};

static loom_status count_elements(int dims, const int64_t *shape, int64_t *count) {
    if (dims < 0 || dims > LOOM_MAX_DIMS)
        return loom_fail(LOOM_ERR_ARGUMENT, "dimensions of a tensor: found %d, expected 0 to %d", dims, LOOM_MAX_DIMS);
    *count = 1;
    for (int i = 0; i < dims; i++)
        if (shape[i] < 0 || __builtin_mul_overflow(*count, shape[i], count))
            return loom_fail(LOOM_ERR_ARGUMENT, "shape of a tensor: axis %d is %lld, the product does not fit", i,
                (long long)shape[i]);
    return LOOM_OK;
}

static loom_tensor *tensor_of(loom_dtype dtype, int dims, const int64_t *shape, struct loom__storage *storage) {
    loom_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor)
        return NULL;
    *tensor = (loom_tensor){.dtype = dtype, .dims = dims, .storage = storage, .references = 1, .data = storage->memory};
    for (int i = 0; i < dims; i++)
        tensor->shape[i] = shape[i];
    return tensor;
}

loom_status loom_tensor_create(loom_rank *rank, loom_dtype dtype, int dims, const int64_t *shape, loom_tensor **out) {
    int64_t count;
    LOOM_TRY(count_elements(dims, shape, &count));
    size_t width = loom_dtype_size(dtype);
    if (!width || (uint64_t)count > SIZE_MAX / width)
        return loom_fail(LOOM_ERR_ARGUMENT, "tensor of %lld elements of dtype %s: too large", (long long)count,
            loom_dtype_name(dtype));
    loom__allocator *allocator;
    LOOM_TRY(loom__rank_allocator(rank, &allocator));
    struct loom__storage *storage = malloc(sizeof *storage);
    loom_tensor *tensor = NULL;
    loom_status status = storage ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a tensor");
    if (!status) {
        *storage = (struct loom__storage){allocator, NULL, 1};
        status = loom__allocate(allocator, (size_t)count * width, &storage->memory);
    }
    if (!status) {
        tensor = tensor_of(dtype, dims, shape, storage);
        if (!tensor) {
            loom__release(allocator, storage->memory);
            status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a tensor");
        }
    }
    if (status) {
        free(storage);
        return status;
    }
    *out = tensor;
    return LOOM_OK;
}

loom_tensor *loom_tensor_retain(loom_tensor *tensor) {
    tensor->references++;
    return tensor;
}

void loom_tensor_release(loom_tensor *tensor) {
    if (!tensor || --tensor->references > 0)
        return;
    /* Memory that a peer still reads must not be handed out again. An error here is seen by whoever waits next. */
    (void)loom_tensor_ready(tensor);
    struct loom__storage *storage = tensor->storage;
    if (--storage->references == 0) {
        loom__release(storage->allocator, storage->memory);
        free(storage);
    }
    free(tensor);
}

loom_status loom_tensor_view(loom_tensor *tensor, int dims, const int64_t *shape, loom_tensor **view) {
    int64_t count;
    LOOM_TRY(loom_tensor_ready(tensor));
    LOOM_TRY(count_elements(dims, shape, &count));
    if (count != loom_tensor_count(tensor))
        return loom_fail(LOOM_ERR_ARGUMENT, "view of a tensor: found %lld elements, expected %lld", (long long)count,
            (long long)loom_tensor_count(tensor));
    loom_tensor *made = tensor_of(tensor->dtype, dims, shape, tensor->storage);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a tensor");
    made->data = tensor->data;
    made->tape = tensor->tape;
    made->value = tensor->value;
    tensor->storage->references++;
    *view = made;
    return LOOM_OK;
}

bool loom_tensor_is_shared(const loom_tensor *tensor) {
    return tensor->references > 1 || tensor->storage->references > 1;
}

loom_status loom_tensor_ready(loom_tensor *tensor) {
    loom_request *pending = tensor->pending;
    if (!pending)
        return LOOM_OK;
    tensor->pending = NULL;
    loom_status status = loom_wait(pending);
    loom_tensor_release(tensor->source);
    tensor->source = NULL;
    return status;
}

int64_t loom_tensor_count(const loom_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->dims; i++)
        count *= tensor->shape[i];
    return count;
}
