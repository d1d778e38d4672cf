/* The .metadata of torch.distributed.checkpoint: state_dict_metadata says which tensors there are, how large, and how
 * they are cut; storage_data says where each piece lies. Both come as plain values out of the pickle reader, and only
 * the classes below are taken for what they say. The invariant at the end is that of <megaloom/checkpoint.h>: every
 * chunk lies inside its tensor and has a place, and the chunks of a tensor cover it without overlap, so that a read of
 * any box finds each of its elements once. */
#include "checkpoint/checkpoint.h"
#include "format/pickle.h"

#include <stdlib.h>

#define METADATA "torch.distributed.checkpoint.metadata."
#define STORAGE "torch.distributed.checkpoint.filesystem._StorageInfo"

typedef struct reader {
    const char *what;
    loom_checkpoint *to;
    int64_t file_room;
} reader;

static loom_status no_memory(const reader *r) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its tensors", r->what);
}

static bool is_object(const loom_value *value, const char *name) {
    return value && value->kind == LOOM_VALUE_OBJECT && strcmp(value->object->name, name) == 0;
}

static const loom_value *member(const loom_value *of, const char *key, loom_value_kind kind) {
    const loom_value *value = loom_value_get(of, key);
    return value && value->kind == kind ? value : NULL;
}

/* A tuple of at most MAX_DIMS whole numbers of at least 0; false for anything else. */
static bool read_size(const loom_value *size, int *dims, int64_t *out) {
    if (!size || size->kind != LOOM_VALUE_TUPLE || size->count > LOOM_CHECKPOINT_MAX_DIMS)
        return false;
    for (int i = 0; i < LOOM_CHECKPOINT_MAX_DIMS; i++)
        out[i] = 1;
    for (int64_t i = 0; i < size->count; i++) {
        if (size->items[i]->kind != LOOM_VALUE_INT || size->items[i]->integer < 0)
            return false;
        out[i] = size->items[i]->integer;
    }
    *dims = (int)size->count;
    return true;
}

/* ---- tensors ---- */

static loom_status read_dtype(const reader *r, const loom_value *properties, loom_checkpoint_tensor *tensor) {
    const loom_value *state = is_object(properties, METADATA "TensorProperties") ? properties->object->state : NULL;
    const loom_value *dtype = state && state->kind == LOOM_VALUE_TUPLE && state->count >= 5 ? state->items[0]
                              : state ? loom_value_get(state, "dtype")
                                      : NULL;
    if (!dtype || dtype->kind != LOOM_VALUE_NAME || strncmp(dtype->text, "torch.", 6) != 0)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: tensor '%s' has no TensorProperties with a dtype", r->what, tensor->name);
    tensor->dtype = loom__torch_dtype(dtype->text + 6);
    if (tensor->dtype == LOOM_DTYPE_COUNT)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: tensor '%s' has dtype %s, expected float64, float32, float16, bfloat16, int64, "
            "int32, "
            "int16, int8, uint8 or bool",
            r->what, tensor->name, dtype->text);
    return LOOM_OK;
}

static loom_status read_shape(const reader *r, const loom_value *of, loom_checkpoint_tensor *tensor) {
    const loom_value *size = loom_value_get(of, "size");
    if (size && size->kind == LOOM_VALUE_TUPLE && size->count > LOOM_CHECKPOINT_MAX_DIMS)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: tensor '%s' has %lld dimensions, at most %d",
            r->what, tensor->name, (long long)size->count, LOOM_CHECKPOINT_MAX_DIMS);
    if (!read_size(size, &tensor->dims, tensor->shape))
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: tensor '%s' has no size of whole numbers of at least 0", r->what, tensor->name);
    size_t bytes;
    tensor->elements = 1;
    for (int i = 0; i < tensor->dims; i++)
        if (__builtin_mul_overflow(tensor->elements, tensor->shape[i], &tensor->elements))
            tensor->elements = INT64_MAX;
    if (__builtin_mul_overflow((size_t)tensor->elements, loom_dtype_size(tensor->dtype), &bytes) || bytes > INT64_MAX)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: tensor '%s': the product of its size exceeds 2^63 bytes", r->what, tensor->name);
    return LOOM_OK;
}

static loom_status read_chunk(const reader *r, const loom_value *of, const loom_checkpoint_tensor *tensor,
    int64_t number, loom_checkpoint_chunk *to) {
    int offset_dims = 0, size_dims = 0;
    if (!is_object(of, METADATA "ChunkStorageMetadata") ||
        !read_size(loom_value_get(of, "offsets"), &offset_dims, to->offsets) ||
        !read_size(loom_value_get(of, "sizes"), &size_dims, to->sizes))
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor '%s': chunk %lld is no ChunkStorageMetadata with offsets and sizes", r->what, tensor->name,
            (long long)number);
    if (offset_dims != tensor->dims || size_dims != tensor->dims)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor '%s': chunk %lld has %d offsets and %d sizes, expected %d of each", r->what, tensor->name,
            (long long)number, offset_dims, size_dims, tensor->dims);
    for (int i = 0; i < tensor->dims; i++)
        if (to->sizes[i] > tensor->shape[i] || to->offsets[i] > tensor->shape[i] - to->sizes[i])
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: tensor '%s': chunk %lld has [%lld, +%lld) on axis %d, expected it inside of %lld", r->what,
                tensor->name, (long long)number, (long long)to->offsets[i], (long long)to->sizes[i], i,
                (long long)tensor->shape[i]);
    return LOOM_OK;
}

static int compare_offsets(const int64_t *a, const int64_t *b) {
    for (int i = 0; i < LOOM_CHECKPOINT_MAX_DIMS; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

static int by_offsets(const void *a, const void *b, void *chunks) {
    const loom_checkpoint_chunk *of = chunks;
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    int order = compare_offsets(of[x].offsets, of[y].offsets);
    return order ? order : (x > y) - (x < y);
}

static int64_t volume(const loom_checkpoint_chunk *chunk, int dims) {
    int64_t elements = 1;
    for (int i = 0; i < dims; i++)
        elements *= chunk->sizes[i]; /* inside of the tensor, whose product is checked */
    return elements;
}

static bool overlap(const loom_checkpoint_chunk *a, const loom_checkpoint_chunk *b, int dims) {
    for (int i = 0; i < dims; i++)
        if (a->offsets[i] + a->sizes[i] <= b->offsets[i] || b->offsets[i] + b->sizes[i] <= a->offsets[i])
            return false;
    return true;
}

/* Chunks that do not overlap and have as many elements as the tensor cover it. Sorted by offsets, a chunk can only meet
 * those that begin before it ends on the first axis. */
static loom_status check_cover(const reader *r, const loom__checkpoint_entry *entry) {
    const loom_checkpoint_tensor *tensor = &entry->tensor;
    int64_t covered = 0, count = tensor->chunk_count;
    for (int64_t i = 0; i < count; i++) {
        const loom_checkpoint_chunk *a = &entry->chunks[entry->order[i]];
        int64_t elements = volume(a, tensor->dims);
        if (elements == 0)
            continue;
        for (int64_t j = i + 1; j < count; j++) {
            const loom_checkpoint_chunk *b = &entry->chunks[entry->order[j]];
            if (tensor->dims > 0 && b->offsets[0] >= a->offsets[0] + a->sizes[0])
                break;
            if (volume(b, tensor->dims) > 0 && overlap(a, b, tensor->dims))
                return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': chunks %lld and %lld overlap", r->what,
                    tensor->name, (long long)entry->order[i], (long long)entry->order[j]);
        }
        covered += elements;
    }
    if (covered != tensor->elements)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': its %lld chunks cover %lld elements, expected all %lld",
            r->what, tensor->name, (long long)count, (long long)covered, (long long)tensor->elements);
    return LOOM_OK;
}

static loom_status read_tensor(const reader *r, const loom_value *of, loom__checkpoint_entry *entry) {
    loom_checkpoint_tensor *tensor = &entry->tensor;
    LOOM_TRY(read_dtype(r, loom_value_get(of, "properties"), tensor));
    LOOM_TRY(read_shape(r, of, tensor));
    const loom_value *chunks = member(of, "chunks", LOOM_VALUE_LIST);
    if (!chunks)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s' has no list of chunks", r->what, tensor->name);
    size_t count = (size_t)chunks->count;
    entry->chunks = calloc(count + 1, sizeof *entry->chunks);
    entry->places = calloc(count + 1, sizeof *entry->places);
    entry->order = calloc(count + 1, sizeof *entry->order);
    if (!entry->chunks || !entry->places || !entry->order)
        return no_memory(r);
    tensor->chunks = entry->chunks;
    tensor->chunk_count = chunks->count;
    for (int64_t i = 0; i < chunks->count; i++) {
        LOOM_TRY(read_chunk(r, chunks->items[i], tensor, i, &entry->chunks[i]));
        entry->places[i].file = -1;
        entry->order[i] = i;
    }
    qsort_r(entry->order, count, sizeof *entry->order, by_offsets, entry->chunks);
    return check_cover(r, entry);
}

/* ---- the two kinds of entries, sorted by name ---- */

static int by_tensor_name(const void *a, const void *b) {
    const loom__checkpoint_entry *x = a, *y = b;
    return strcmp(x->tensor.name, y->tensor.name);
}

static int by_object_name(const void *a, const void *b) {
    const loom__checkpoint_object *x = a, *y = b;
    return strcmp(x->object.name, y->object.name);
}

static loom_status check_name(const reader *r, const loom_value *name) {
    if (name->kind != LOOM_VALUE_TEXT || name->count == 0 || strlen(name->text) != (size_t)name->count)
        return loom_fail(LOOM_ERR_FORMAT, "%s: a key of state_dict_metadata is a %s, expected a name", r->what,
            loom_value_kind_name(name->kind));
    return LOOM_OK;
}

static loom_status read_entries(const reader *r, const loom_value *state) {
    loom_checkpoint *to = r->to;
    to->tensors = calloc((size_t)state->count + 1, sizeof *to->tensors);
    to->objects = calloc((size_t)state->count + 1, sizeof *to->objects);
    if (!to->tensors || !to->objects)
        return no_memory(r);
    for (int64_t i = 0; i < state->count; i++) {
        const loom_value *name = state->items[2 * i], *of = state->items[2 * i + 1];
        LOOM_TRY(check_name(r, name));
        bool is_bytes = is_object(of, METADATA "BytesStorageMetadata");
        if (!is_bytes && !is_object(of, METADATA "TensorStorageMetadata"))
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: '%s' is described by a %s, expected TensorStorageMetadata or BytesStorageMetadata", r->what,
                name->text, of->kind == LOOM_VALUE_OBJECT ? of->object->name : loom_value_kind_name(of->kind));
        char *copy = strdup(name->text);
        if (!copy)
            return no_memory(r);
        if (is_bytes) {
            loom__checkpoint_object *object = &to->objects[to->info.objects++];
            object->object.name = copy;
            object->place.file = -1;
        } else {
            loom__checkpoint_entry *entry = &to->tensors[to->info.tensors++];
            entry->tensor.name = copy;
            LOOM_TRY(read_tensor(r, of, entry));
        }
    }
    qsort(to->tensors, (size_t)to->info.tensors, sizeof *to->tensors, by_tensor_name);
    qsort(to->objects, (size_t)to->info.objects, sizeof *to->objects, by_object_name);
    for (int64_t i = 1; i < to->info.tensors; i++)
        if (by_tensor_name(&to->tensors[i - 1], &to->tensors[i]) == 0)
            return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s' is there twice", r->what, to->tensors[i].tensor.name);
    for (int64_t i = 1; i < to->info.objects; i++)
        if (by_object_name(&to->objects[i - 1], &to->objects[i]) == 0)
            return loom_fail(LOOM_ERR_FORMAT, "%s: object '%s' is there twice", r->what, to->objects[i].object.name);
    return LOOM_OK;
}

/* ---- places ---- */

/* Files are few beside chunks, and the chunks of one file come together. */
static loom_status file_number(reader *r, const char *name, int64_t *number) {
    loom_checkpoint *to = r->to;
    for (int64_t i = to->file_count - 1; i >= 0; i--)
        if (strcmp(to->files[i].name, name) == 0) {
            *number = i;
            return LOOM_OK;
        }
    if (to->file_count == r->file_room) {
        int64_t room = r->file_room ? 2 * r->file_room : 16;
        void *grown = realloc(to->files, (size_t)room * sizeof *to->files);
        if (!grown)
            return no_memory(r);
        to->files = grown;
        r->file_room = room;
    }
    char *copy = strdup(name);
    if (!copy)
        return no_memory(r);
    to->files[to->file_count] = (loom__checkpoint_file){.name = copy};
    *number = to->file_count++;
    return LOOM_OK;
}

static loom_status read_place(
    reader *r, const char *name, const loom_value *info, int64_t *file, uint64_t *position, uint64_t *bytes) {
    const loom_value *path = member(info, "relative_path", LOOM_VALUE_TEXT);
    const loom_value *offset = member(info, "offset", LOOM_VALUE_INT), *length = member(info, "length", LOOM_VALUE_INT);
    const loom_value *transforms = loom_value_get(info, "transform_descriptors");
    if (!is_object(info, STORAGE) || !path || !offset || !length || offset->integer < 0 || length->integer < 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: the place of '%s' is no _StorageInfo with a path, an offset and a length", r->what, name);
    if (transforms && transforms->kind != LOOM_VALUE_NONE && transforms->count != 0)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: '%s' is stored through a transform (%.80s)",
            r->what, name,
            transforms->kind == LOOM_VALUE_LIST && transforms->items[0]->kind == LOOM_VALUE_TEXT
                ? transforms->items[0]->text
                : loom_value_kind_name(transforms->kind));
    if (path->count == 0 || strlen(path->text) != (size_t)path->count || strchr(path->text, '/') ||
        strcmp(path->text, ".") == 0 || strcmp(path->text, "..") == 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: '%s' lies in '%.200s', expected a file of the same folder, without a path", r->what, name, path->text);
    LOOM_TRY(file_number(r, path->text, file));
    *position = (uint64_t)offset->integer;
    *bytes = (uint64_t)length->integer;
    return LOOM_OK;
}

/* The chunk with these offsets, or -1. Of several (empty ones may share them) the first without a place. */
static int64_t find_chunk(const loom__checkpoint_entry *entry, const int64_t *offsets) {
    int64_t low = 0, high = entry->tensor.chunk_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (compare_offsets(entry->chunks[entry->order[middle]].offsets, offsets) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (int64_t i = low; i < entry->tensor.chunk_count; i++) {
        int64_t chunk = entry->order[i];
        if (compare_offsets(entry->chunks[chunk].offsets, offsets) != 0)
            break;
        if (entry->places[chunk].file < 0)
            return chunk;
    }
    return -1;
}

static loom_status place_chunk(
    reader *r, const loom_value *index, loom__checkpoint_entry *entry, const loom_value *info) {
    int64_t offsets[LOOM_CHECKPOINT_MAX_DIMS] = {0}, found[LOOM_CHECKPOINT_MAX_DIMS];
    const loom_value *given = loom_value_get(index, "offset");
    int dims = entry->tensor.dims;
    if (given && given->kind != LOOM_VALUE_NONE) {
        if (!read_size(given, &dims, offsets) || dims != entry->tensor.dims)
            return loom_fail(LOOM_ERR_FORMAT, "%s: storage_data of '%s' has no offset with %d numbers", r->what,
                entry->tensor.name, entry->tensor.dims);
    }
    for (int i = 0; i < LOOM_CHECKPOINT_MAX_DIMS; i++)
        found[i] = i < dims ? offsets[i] : 1; /* as read_size fills what is beyond */
    int64_t chunk = find_chunk(entry, found);
    if (chunk < 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: storage_data of '%s' has a place for a chunk that it does not have, or two", r->what,
            entry->tensor.name);
    loom__checkpoint_place *place = &entry->places[chunk];
    return read_place(r, entry->tensor.name, info, &place->file, &place->position, &place->bytes);
}

static loom_status read_places(reader *r, const loom_value *storage) {
    loom_checkpoint *to = r->to;
    for (int64_t i = 0; i < storage->count; i++) {
        const loom_value *index = storage->items[2 * i], *info = storage->items[2 * i + 1];
        const loom_value *name = member(index, "fqn", LOOM_VALUE_TEXT);
        if (!is_object(index, METADATA "MetadataIndex") || !name)
            return loom_fail(LOOM_ERR_FORMAT, "%s: entry %lld of storage_data has no MetadataIndex with a name",
                r->what, (long long)i);
        loom__checkpoint_entry wanted = {.tensor.name = name->text};
        loom__checkpoint_entry *entry =
            bsearch(&wanted, to->tensors, (size_t)to->info.tensors, sizeof wanted, by_tensor_name);
        if (entry) {
            LOOM_TRY(place_chunk(r, index, entry, info));
            continue;
        }
        loom__checkpoint_object object = {.object.name = name->text};
        loom__checkpoint_object *found =
            bsearch(&object, to->objects, (size_t)to->info.objects, sizeof object, by_object_name);
        if (!found || found->place.file >= 0)
            return loom_fail(LOOM_ERR_FORMAT, "%s: storage_data has %s for '%s'", r->what,
                found ? "two places" : "a place, but state_dict_metadata no entry,", name->text);
        LOOM_TRY(read_place(r, name->text, info, &found->place.file, &found->place.position, &found->place.bytes));
    }
    return LOOM_OK;
}

/* Public chunks and objects repeat their place; the file's name is final only now. */
static loom_status finish_places(const reader *r) {
    loom_checkpoint *to = r->to;
    for (int64_t i = 0; i < to->info.tensors; i++) {
        loom__checkpoint_entry *entry = &to->tensors[i];
        for (int64_t c = 0; c < entry->tensor.chunk_count; c++) {
            const loom__checkpoint_place *place = &entry->places[c];
            if (place->file < 0)
                return loom_fail(LOOM_ERR_FORMAT, "%s: chunk %lld of tensor '%s' has no place in storage_data", r->what,
                    (long long)c, entry->tensor.name);
            entry->chunks[c].file = to->files[place->file].name;
            entry->chunks[c].position = place->position;
            entry->chunks[c].bytes = place->bytes;
        }
    }
    for (int64_t i = 0; i < to->info.objects; i++) {
        loom__checkpoint_object *object = &to->objects[i];
        if (object->place.file < 0)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: object '%s' has no place in storage_data", r->what, object->object.name);
        object->object.file = to->files[object->place.file].name;
        object->object.position = object->place.position;
        object->object.bytes = object->place.bytes;
    }
    return LOOM_OK;
}

/* Megatron-Core's own addition: the shapes that flattened optimizer tensors had. */
static loom_status read_originals(const reader *r, const loom_value *mcore_data) {
    for (int64_t i = 0; i < r->to->info.tensors; i++) {
        loom_checkpoint_tensor *tensor = &r->to->tensors[i].tensor;
        const loom_value *shape =
            loom_value_get(loom_value_get(mcore_data, tensor->name), "nd_reformulated_orig_global_shape");
        if (!shape || shape->kind == LOOM_VALUE_NONE)
            continue;
        int64_t rest = 1;
        bool fits = read_size(shape, &tensor->original_dims, tensor->original_shape) &&
                    tensor->original_dims + 1 == tensor->dims;
        for (int d = 0; fits && d < tensor->original_dims; d++) {
            fits = tensor->shape[d] > 0 && tensor->original_shape[d] % tensor->shape[d] == 0 &&
                   !__builtin_mul_overflow(rest, tensor->original_shape[d] / tensor->shape[d], &rest);
        }
        if (!fits || rest != tensor->shape[tensor->dims - 1])
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: tensor '%s': nd_reformulated_orig_global_shape does not fit its flattened size", r->what,
                tensor->name);
    }
    return LOOM_OK;
}

static loom_status read_root(reader *r, const loom_value *root) {
    if (!is_object(root, METADATA "Metadata"))
        return loom_fail(LOOM_ERR_FORMAT, "%s: holds a %s, expected " METADATA "Metadata", r->what,
            root->kind == LOOM_VALUE_OBJECT ? root->object->name : loom_value_kind_name(root->kind));
    const loom_value *state = member(root, "state_dict_metadata", LOOM_VALUE_DICT);
    const loom_value *storage = member(root, "storage_data", LOOM_VALUE_DICT);
    if (!state || !storage)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: has no dict %s", r->what, state ? "storage_data" : "state_dict_metadata");
    LOOM_TRY(read_entries(r, state));
    LOOM_TRY(read_places(r, storage));
    LOOM_TRY(finish_places(r));
    return read_originals(r, loom_value_get(root, "mcore_data"));
}

loom_status loom__checkpoint_read_metadata(
    const char *what, const void *data, size_t bytes, loom_checkpoint *checkpoint) {
    reader r = {.what = what, .to = checkpoint};
    loom_value_pool *pool = NULL;
    loom__pickled pickled = {0};
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom__pickle_read(what, data, bytes, pool, &pickled);
    if (status == LOOM_OK)
        status = read_root(&r, pickled.root);
    loom_value_pool_destroy(pool);
    return status;
}
