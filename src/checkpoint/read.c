/* Reading a box of a tensor: every chunk that meets it gives its part, straight from the mapping into the caller's
 * memory. Since chunks cover a tensor without overlap, each element of the box is written exactly once. */
#include "checkpoint/checkpoint.h"
#include "format/torch_file.h"

#include <stdio.h>
#include <stdlib.h>

static const loom__checkpoint_entry *entry_of(const loom_checkpoint_tensor *tensor) {
    return (const loom__checkpoint_entry *)tensor;
}

/* The value of the archive at a place; archive: its bytes, or NULL for those in the file. */
static loom_status read_archive(const loom_checkpoint *of, loom__checkpoint_place *place, const char *name,
    const void *archive, loom_value_pool *pool, const loom_value **value) {
    const loom__checkpoint_file *file = &of->files[place->file];
    char what[4096];
    if (file->missing)
        return loom_fail(LOOM_ERR_IO, "%s", file->missing);
    snprintf(what, sizeof what, "%s: '%s' at %llu", file->path, name, (unsigned long long)place->position);
    if (place->position > file->mapping.bytes || place->bytes > file->mapping.bytes - place->position)
        return loom_fail(LOOM_ERR_FORMAT, "%s is %llu bytes long, but the file ends at %zu: cut short", what,
            (unsigned long long)place->bytes, file->mapping.bytes);
    bool checked = atomic_load_explicit(&place->checked, memory_order_relaxed);
    LOOM_TRY(loom__torch_read(what, archive ? archive : file->mapping.data + place->position, (size_t)place->bytes,
        checked ? LOOM__TORCH_TRUST : LOOM__TORCH_CHECK, pool, value));
    atomic_store_explicit(&place->checked, true, memory_order_relaxed);
    return LOOM_OK;
}

/* An archive may leave out axes of size 1, as Megatron-Core does with the layer. */
static bool is_shape_of(const loom_value_tensor *tensor, const loom_checkpoint_chunk *chunk, int dims) {
    int d = 0;
    for (int i = 0; i < dims; i++) {
        if (chunk->sizes[i] == 1)
            continue;
        while (d < tensor->dims && tensor->shape[d] == 1)
            d++;
        if (d == tensor->dims || tensor->shape[d++] != chunk->sizes[i])
            return false;
    }
    while (d < tensor->dims && tensor->shape[d] == 1)
        d++;
    return d == tensor->dims;
}

loom_status loom__checkpoint_fetched_data(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, const loom__chunk_memory *memory, loom_value_pool *pool, const void **data) {
    const loom_checkpoint_tensor *tensor = &entry->tensor;
    const loom_value *value = NULL;
    if (checkpoint->safetensors) {
        *data = entry->data;
        return LOOM_OK;
    }
    LOOM_TRY(read_archive(checkpoint, &entry->places[chunk], tensor->name, memory->archive, pool, &value));
    const char *path = checkpoint->files[entry->places[chunk].file].path;
    if (value->kind != LOOM_VALUE_TENSOR)
        return loom_fail(LOOM_ERR_FORMAT, "%s: '%s' at %llu is a %s, expected a tensor", path, tensor->name,
            (unsigned long long)entry->places[chunk].position, loom_value_kind_name(value->kind));
    if (value->tensor->dtype != tensor->dtype)
        return loom_fail(LOOM_ERR_FORMAT, "%s: '%s' at %llu has dtype %s, expected %s", path, tensor->name,
            (unsigned long long)entry->places[chunk].position, loom_dtype_name(value->tensor->dtype),
            loom_dtype_name(tensor->dtype));
    if (!is_shape_of(value->tensor, &entry->chunks[chunk], tensor->dims))
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: '%s' at %llu has %lld elements in %d dimensions, which is not the shape of chunk %lld", path,
            tensor->name, (unsigned long long)entry->places[chunk].position, (long long)value->tensor->elements,
            value->tensor->dims, (long long)chunk);
    *data = value->tensor->data;
    return LOOM_OK;
}

loom_status loom__checkpoint_chunk_data(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, loom_value_pool *pool, const void **data) {
    loom__chunk_memory nothing = {0};
    return loom__checkpoint_fetched_data(checkpoint, entry, chunk, &nothing, pool, data);
}

/* ---- boxes ---- */

typedef struct conversion {
    loom_dtype from, to;
    size_t from_size, to_size;
} conversion;

static loom_status choose(const loom_checkpoint_tensor *tensor, loom_dtype dtype, conversion *made) {
    bool floating = tensor->dtype == LOOM_F64 || tensor->dtype == LOOM_F32 || tensor->dtype == LOOM_F16 ||
                    tensor->dtype == LOOM_BF16;
    if (dtype != tensor->dtype && !(dtype == LOOM_F32 && floating))
        return loom_fail(LOOM_ERR_ARGUMENT, "tensor '%s' of %s cannot be read as %s: expected %s%s", tensor->name,
            loom_dtype_name(tensor->dtype), loom_dtype_name(dtype), loom_dtype_name(tensor->dtype),
            floating ? " or F32" : "");
    *made = (conversion){tensor->dtype, dtype, loom_dtype_size(tensor->dtype), loom_dtype_size(dtype)};
    return LOOM_OK;
}

static void copy_run(const conversion *how, const unsigned char *from, unsigned char *to, int64_t count) {
    if (how->from == how->to) {
        memcpy(to, from, (size_t)count * how->from_size);
        return;
    }
    for (int64_t i = 0; i < count; i++, from += how->from_size, to += sizeof(float)) {
        float value = 0;
        if (how->from == LOOM_F64) {
            double wide;
            memcpy(&wide, from, sizeof wide);
            value = (float)wide;
        } else {
            uint16_t narrow;
            memcpy(&narrow, from, sizeof narrow);
            value = how->from == LOOM_F16 ? loom_f16_to_f32(narrow) : loom_bf16_to_f32(narrow);
        }
        memcpy(to, &value, sizeof value);
    }
}

loom_status loom__checkpoint_fetched_floats(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, const loom__chunk_memory *memory, loom_value_pool *pool, float *room, const float **values) {
    const loom_checkpoint_tensor *tensor = &entry->tensor;
    const void *data = NULL;
    int64_t count = 1;
    conversion how;
    LOOM_TRY(choose(tensor, LOOM_F32, &how));
    LOOM_TRY(loom__checkpoint_fetched_data(checkpoint, entry, chunk, memory, pool, &data));
    for (int i = 0; i < tensor->dims; i++)
        count *= tensor->chunks[chunk].sizes[i];
    *values = room;
    if (tensor->dtype == LOOM_F32 && (uintptr_t)data % sizeof(float) == 0)
        *values = data;
    else
        copy_run(&how, data, (unsigned char *)room, count);
    return LOOM_OK;
}

/* Copies the box of `sizes` at from_offsets of an array of shape from_shape to to_offsets of one of shape to_shape; all
 * row-major with `dims` axes. */
static void copy_box(const conversion *how, int dims, const int64_t *sizes, const void *from, const int64_t *from_shape,
    const int64_t *from_offsets, void *to, const int64_t *to_shape, const int64_t *to_offsets) {
    int64_t from_stride[LOOM_CHECKPOINT_MAX_DIMS], to_stride[LOOM_CHECKPOINT_MAX_DIMS],
        at[LOOM_CHECKPOINT_MAX_DIMS] = {0};
    int64_t from_at = 0, to_at = 0, run = 1;
    int outer = dims; /* axes that are walked; those after are one run */
    for (int i = dims - 1; i >= 0; i--) {
        if (sizes[i] == 0)
            return;
        from_stride[i] = i + 1 < dims ? from_stride[i + 1] * from_shape[i + 1] : 1;
        to_stride[i] = i + 1 < dims ? to_stride[i + 1] * to_shape[i + 1] : 1;
        from_at += from_offsets[i] * from_stride[i];
        to_at += to_offsets[i] * to_stride[i];
    }
    while (outer > 0) {
        outer--;
        run *= sizes[outer];
        if (sizes[outer] != from_shape[outer] || sizes[outer] != to_shape[outer])
            break;
    }
    for (;;) {
        copy_run(how, (const unsigned char *)from + (size_t)from_at * how->from_size,
            (unsigned char *)to + (size_t)to_at * how->to_size, run);
        int i = outer - 1;
        for (; i >= 0; i--) {
            from_at += from_stride[i];
            to_at += to_stride[i];
            if (++at[i] < sizes[i])
                break;
            from_at -= from_stride[i] * sizes[i];
            to_at -= to_stride[i] * sizes[i];
            at[i] = 0;
        }
        if (i < 0)
            return;
    }
}

/* What two boxes share, as offsets in each and a size; false when nothing. */
static bool intersect(int dims, const int64_t *a, const int64_t *a_sizes, const int64_t *b, const int64_t *b_sizes,
    int64_t *in_a, int64_t *in_b, int64_t *sizes) {
    for (int i = 0; i < dims; i++) {
        int64_t begin = a[i] > b[i] ? a[i] : b[i];
        int64_t a_end = a[i] + a_sizes[i], b_end = b[i] + b_sizes[i], end = a_end < b_end ? a_end : b_end;
        if (begin >= end)
            return false;
        in_a[i] = begin - a[i];
        in_b[i] = begin - b[i];
        sizes[i] = end - begin;
    }
    return true;
}

static loom_status check_box(
    const char *name, int dims, const int64_t *shape, const int64_t *offsets, const int64_t *sizes) {
    for (int i = 0; i < dims; i++)
        if (offsets[i] < 0 || sizes[i] < 0 || sizes[i] > shape[i] || offsets[i] > shape[i] - sizes[i])
            return loom_fail(LOOM_ERR_ARGUMENT, "tensor '%s': [%lld, +%lld) asked on axis %d, it has %lld", name,
                (long long)offsets[i], (long long)sizes[i], i, (long long)shape[i]);
    return LOOM_OK;
}

static loom_status read_chunk_part(const loom_checkpoint *of, const loom__checkpoint_entry *entry, int64_t chunk,
    const conversion *how, const int64_t *offsets, const int64_t *sizes, void *out) {
    const loom_checkpoint_chunk *from = &entry->chunks[chunk];
    int64_t in_chunk[LOOM_CHECKPOINT_MAX_DIMS], in_box[LOOM_CHECKPOINT_MAX_DIMS], shared[LOOM_CHECKPOINT_MAX_DIMS];
    int dims = entry->tensor.dims;
    const void *data = NULL;
    loom_value_pool *pool = NULL;
    if (!intersect(dims, from->offsets, from->sizes, offsets, sizes, in_chunk, in_box, shared))
        return LOOM_OK;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom__checkpoint_chunk_data(of, entry, chunk, pool, &data);
    if (status == LOOM_OK)
        copy_box(how, dims, shared, data, from->sizes, in_chunk, out, sizes, in_box);
    loom_value_pool_destroy(pool);
    return status;
}

loom_status loom_checkpoint_read(const loom_checkpoint *checkpoint, const loom_checkpoint_tensor *tensor,
    const int64_t *offsets, const int64_t *sizes, loom_dtype dtype, void *out) {
    conversion how;
    LOOM_TRY(choose(tensor, dtype, &how));
    LOOM_TRY(check_box(tensor->name, tensor->dims, tensor->shape, offsets, sizes));
    for (int64_t c = 0; c < tensor->chunk_count; c++)
        LOOM_TRY(read_chunk_part(checkpoint, entry_of(tensor), c, &how, offsets, sizes, out));
    return LOOM_OK;
}

/* One shard of a flattened tensor: the fragment at `fragment` [dims], whose last axis is the shard, row-major. */
static loom_status read_fragment(const loom_checkpoint *of, const loom_checkpoint_tensor *tensor,
    const int64_t *fragment, const int64_t *shard, loom_dtype dtype, const int64_t *offsets, const int64_t *sizes,
    void *scratch, void *out) {
    int64_t at[LOOM_CHECKPOINT_MAX_DIMS], flat_sizes[LOOM_CHECKPOINT_MAX_DIMS], begin[LOOM_CHECKPOINT_MAX_DIMS];
    int64_t in_shard[LOOM_CHECKPOINT_MAX_DIMS], in_box[LOOM_CHECKPOINT_MAX_DIMS], shared[LOOM_CHECKPOINT_MAX_DIMS];
    int dims = tensor->original_dims;
    conversion plain = {dtype, dtype, loom_dtype_size(dtype), loom_dtype_size(dtype)};
    for (int i = 0; i < dims; i++) {
        at[i] = fragment[i];
        flat_sizes[i] = 1;
        begin[i] = fragment[i] * shard[i];
    }
    at[dims] = 0;
    flat_sizes[dims] = tensor->shape[dims];
    if (!intersect(dims, begin, shard, offsets, sizes, in_shard, in_box, shared))
        return LOOM_OK;
    LOOM_TRY(loom_checkpoint_read(of, tensor, at, flat_sizes, dtype, scratch));
    copy_box(&plain, dims, shared, scratch, shard, in_shard, out, sizes, in_box);
    return LOOM_OK;
}

loom_status loom_checkpoint_read_original(const loom_checkpoint *checkpoint, const loom_checkpoint_tensor *tensor,
    const int64_t *offsets, const int64_t *sizes, loom_dtype dtype, void *out) {
    conversion how;
    int dims = tensor->original_dims;
    int64_t shard[LOOM_CHECKPOINT_MAX_DIMS], first[LOOM_CHECKPOINT_MAX_DIMS], end[LOOM_CHECKPOINT_MAX_DIMS];
    int64_t fragment[LOOM_CHECKPOINT_MAX_DIMS];
    if (dims == 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "tensor '%s' is not flattened: expected loom_checkpoint_read", tensor->name);
    LOOM_TRY(choose(tensor, dtype, &how));
    LOOM_TRY(check_box(tensor->name, dims, tensor->original_shape, offsets, sizes));
    for (int i = 0; i < dims; i++) {
        shard[i] = tensor->original_shape[i] / tensor->shape[i];
        if (sizes[i] == 0 || shard[i] == 0)
            return LOOM_OK;
        fragment[i] = first[i] = offsets[i] / shard[i];
        end[i] = (offsets[i] + sizes[i] - 1) / shard[i] + 1;
    }
    void *scratch = malloc((size_t)tensor->shape[dims] * how.to_size);
    if (!scratch)
        return loom_fail(LOOM_ERR_MEMORY, "tensor '%s': no memory for a shard of %lld elements", tensor->name,
            (long long)tensor->shape[dims]);
    loom_status status = LOOM_OK;
    for (int i = 0; i >= 0 && status == LOOM_OK;) {
        status = read_fragment(checkpoint, tensor, fragment, shard, dtype, offsets, sizes, scratch, out);
        for (i = dims - 1; i >= 0 && ++fragment[i] == end[i]; i--)
            fragment[i] = first[i];
    }
    free(scratch);
    return status;
}

loom_status loom_checkpoint_read_object(const loom_checkpoint *checkpoint, const loom_checkpoint_object *object,
    loom_value_pool *pool, const loom_value **value) {
    loom__checkpoint_object *of = (loom__checkpoint_object *)(uintptr_t)object;
    return read_archive(checkpoint, &of->place, object->name, NULL, pool, value);
}
