/* Reading safetensors. A file is an 8-byte length, a JSON header of that length, and the data, which the header's
 * offsets must cover exactly: sorted by offset, each tensor begins where the one before ended, and the last ends with
 * the file. The invariant after open is that every tensor's data..data+bytes lies inside its mapping and that bytes is
 * exactly elements x size, so nothing later has to check again. */
#include "format/safetensors.h"
#include "base/nearest.h"
#include "base/text.h"
#include "format/file.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>

typedef struct shard {
    char *path;
    loom__mapping mapping;
    bool borrowed; /* the mapping is somebody's memory */
} shard;

struct loom_safetensors {
    char *path; /* as opened */
    shard *shards;
    size_t shard_count;
    loom_safetensors_tensor *tensors;
    int64_t count, capacity;
    int64_t *by_name; /* tensor numbers sorted by name */
    json_t *metadata; /* of the first shard; NULL = none */
};

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to open it", path);
}

void loom_safetensors_close(loom_safetensors *file) {
    if (!file)
        return;
    for (int64_t i = 0; i < file->count; i++)
        free((void *)(uintptr_t)file->tensors[i].name);
    for (size_t i = 0; i < file->shard_count; i++) {
        if (!file->shards[i].borrowed)
            loom__unmap_file(&file->shards[i].mapping);
        free(file->shards[i].path);
    }
    json_decref(file->metadata);
    free(file->tensors);
    free(file->by_name);
    free(file->shards);
    free(file->path);
    free(file);
}

/* ---- One shard ---- */

/* dtypes of the format that Megaloom has no element type for */
static bool is_foreign_dtype(const char *name) {
    static const char *const names[] = {
        "U32", "U64", "C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static loom_status read_shape(const char *path, const json_t *shape, loom_safetensors_tensor *tensor) {
    if (!json_is_array(shape))
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': shape is missing or no list", path, tensor->name);
    size_t dims = json_array_size(shape);
    if (dims > LOOM_SAFETENSORS_MAX_DIMS)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: tensor '%s' has %zu dimensions, at most %d",
            path, tensor->name, dims, LOOM_SAFETENSORS_MAX_DIMS);
    tensor->dims = (int)dims;
    tensor->elements = 1;
    for (size_t i = 0; i < LOOM_SAFETENSORS_MAX_DIMS; i++)
        tensor->shape[i] = 1;
    for (size_t i = 0; i < dims; i++) {
        const json_t *value = json_array_get(shape, i);
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: tensor '%s': shape[%zu] is no whole number of at least 0", path, tensor->name, i);
        tensor->shape[i] = json_integer_value(value);
        if (__builtin_mul_overflow(tensor->elements, tensor->shape[i], &tensor->elements))
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: tensor '%s': the product of its shape exceeds 2^63 at shape[%zu] = %lld", path, tensor->name, i,
                (long long)tensor->shape[i]);
    }
    return LOOM_OK;
}

/* Fills all but `data`, which gets set once the offsets have been checked; *begin is in bytes of the data part. */
static loom_status read_entry(
    const char *path, const json_t *entry, size_t data_bytes, loom_safetensors_tensor *tensor, uint64_t *begin) {
    if (!json_is_object(entry))
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': its header entry is no object", path, tensor->name);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)entry, key, value) {
        (void)value;
        if (strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 && strcmp(key, "data_offsets") != 0)
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: tensor '%s': unknown field '%.80s', expected dtype, shape, data_offsets", path, tensor->name, key);
    }
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': dtype is missing or no text", path, tensor->name);
    tensor->dtype = loom_dtype_from_name(dtype);
    if (tensor->dtype == LOOM_DTYPE_COUNT && is_foreign_dtype(dtype))
        return loom_fail(
            LOOM_ERR_UNSUPPORTED, "not supported yet: %s: tensor '%s' has dtype %s", path, tensor->name, dtype);
    if (tensor->dtype == LOOM_DTYPE_COUNT)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': dtype is '%.40s', expected F32, BF16, F16, I64, …", path,
            tensor->name, dtype);
    LOOM_TRY(read_shape(path, json_object_get(entry, "shape"), tensor));

    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to) ||
        json_integer_value(from) < 0 || json_integer_value(to) < 0)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': data_offsets is not [begin, end] with whole numbers", path,
            tensor->name);
    uint64_t first = (uint64_t)json_integer_value(from), end = (uint64_t)json_integer_value(to), wanted;
    if (end < first)
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': data_offsets are reversed: [%llu, %llu]", path,
            tensor->name, (unsigned long long)first, (unsigned long long)end);
    if (end > data_bytes)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor '%s': data_offsets end at %llu, expected at most %zu (the file's data)", path, tensor->name,
            (unsigned long long)end, data_bytes);
    if (__builtin_mul_overflow((uint64_t)tensor->elements, loom_dtype_size(tensor->dtype), &wanted) ||
        wanted != end - first)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor '%s': data_offsets span %llu bytes, expected %lld elements x %zu bytes of %s", path,
            tensor->name, (unsigned long long)(end - first), (long long)tensor->elements,
            loom_dtype_size(tensor->dtype), dtype);
    tensor->bytes = (size_t)wanted;
    *begin = first;
    return LOOM_OK;
}

static loom_status read_metadata(loom_safetensors *file, const char *path, json_t *metadata) {
    if (!json_is_object(metadata))
        return loom_fail(LOOM_ERR_FORMAT, "%s: __metadata__ is no object", path);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value))
            return loom_fail(LOOM_ERR_FORMAT, "%s: __metadata__ '%.80s' is no text", path, key);
    }
    if (!file->metadata)
        file->metadata = json_incref(metadata);
    return LOOM_OK;
}

static loom_status grow(loom_safetensors *file, const char *path, size_t more) {
    int64_t wanted = file->count + (int64_t)more;
    if (wanted <= file->capacity)
        return LOOM_OK;
    void *tensors = realloc(file->tensors, (size_t)wanted * sizeof *file->tensors);
    if (!tensors)
        return no_memory(path);
    file->tensors = tensors;
    file->capacity = wanted;
    return LOOM_OK;
}

static int by_place(const void *a, const void *b) {
    const loom_safetensors_tensor *x = a, *y = b;
    const char *p = x->data, *q = y->data;
    if (p != q)
        return p < q ? -1 : 1;
    if (x->bytes != y->bytes) /* empty tensors come before the one that begins at the same place */
        return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static loom_status read_tensors(
    loom_safetensors *file, const char *path, json_t *header, const unsigned char *data, size_t data_bytes) {
    int64_t first = file->count;
    LOOM_TRY(grow(file, path, json_object_size(header)));
    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            LOOM_TRY(read_metadata(file, path, entry));
            continue;
        }
        loom_safetensors_tensor tensor = {.name = strdup(name), .path = path};
        if (!tensor.name)
            return no_memory(path);
        file->tensors[file->count++] = tensor; /* from here on close frees the name */
        uint64_t begin = 0;
        LOOM_TRY(read_entry(path, entry, data_bytes, &tensor, &begin));
        tensor.data = data + begin;
        file->tensors[file->count - 1] = tensor;
    }
    if (file->count > first)
        qsort(file->tensors + first, (size_t)(file->count - first), sizeof *file->tensors, by_place);
    const unsigned char *reached = data;
    for (int64_t i = first; i < file->count; i++) {
        const loom_safetensors_tensor *tensor = &file->tensors[i];
        const unsigned char *begin = tensor->data;
        if (begin != reached)
            return loom_fail(LOOM_ERR_FORMAT, "%s: tensor '%s': data_offsets begin at %zu, expected %zu: %s", path,
                tensor->name, (size_t)(begin - data), (size_t)(reached - data),
                begin < reached ? "it overlaps the tensor before it" : "the bytes between belong to no tensor");
        reached += tensor->bytes;
    }
    if (reached != data + data_bytes)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the tensors cover %zu bytes of data, expected all %zu of the file", path,
            (size_t)(reached - data), data_bytes);
    return LOOM_OK;
}

static loom_status read_shard(loom_safetensors *file, const shard *source) {
    const char *path = source->path;
    size_t bytes = source->mapping.bytes;
    if (bytes < 8)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: has %zu bytes, expected at least 8 for the length of the header", path, bytes);
    uint64_t length = loom__load_u64(source->mapping.data);
    if (length < 2 || length > bytes - 8)
        return loom_fail(LOOM_ERR_FORMAT, "%s: header length is %llu, expected 2 to %zu (the file has %zu bytes)", path,
            (unsigned long long)length, bytes - 8, bytes);
    if (length > LOOM__SAFETENSORS_HEADER_MAX)
        return loom_fail(LOOM_ERR_FORMAT, "%s: header length is %llu, expected at most %d", path,
            (unsigned long long)length, LOOM__SAFETENSORS_HEADER_MAX);
    const char *text = (const char *)source->mapping.data + 8;
    if (*text != '{')
        return loom_fail(LOOM_ERR_FORMAT, "%s: the header begins with byte 0x%02x, expected '{'", path,
            (unsigned)(unsigned char)*text);
    json_error_t error;
    json_t *header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    if (!header)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: the header is no JSON object: %s (byte %d)", path, error.text, error.position);
    loom_status status =
        read_tensors(file, path, header, source->mapping.data + 8 + length, bytes - 8 - (size_t)length);
    json_decref(header);
    return status;
}

/* ---- Names ---- */

static int compare_names(const void *a, const void *b, void *tensors) {
    const loom_safetensors_tensor *list = tensors;
    return strcmp(list[*(const int64_t *)a].name, list[*(const int64_t *)b].name);
}

static loom_status sort_names(loom_safetensors *file) {
    file->by_name = malloc(((size_t)file->count + 1) * sizeof *file->by_name);
    if (!file->by_name)
        return no_memory(file->path);
    for (int64_t i = 0; i < file->count; i++)
        file->by_name[i] = i;
    qsort_r(file->by_name, (size_t)file->count, sizeof *file->by_name, compare_names, file->tensors);
    for (int64_t i = 1; i < file->count; i++) {
        const loom_safetensors_tensor *a = &file->tensors[file->by_name[i - 1]], *b = &file->tensors[file->by_name[i]];
        if (strcmp(a->name, b->name) == 0)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: tensor '%s' is in %s and in %s", file->path, a->name, a->path, b->path);
    }
    return LOOM_OK;
}

static const loom_safetensors_tensor *look_up(const loom_safetensors *file, const char *name) {
    int64_t low = 0, high = file->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        const loom_safetensors_tensor *tensor = &file->tensors[file->by_name[middle]];
        int order = strcmp(name, tensor->name);
        if (order == 0)
            return tensor;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* ---- Files and sets ---- */

static loom_status make(const char *path, size_t shard_count, loom_safetensors **file) {
    loom_safetensors *made = calloc(1, sizeof *made);
    if (made) {
        made->path = strdup(path);
        made->shards = calloc(shard_count + 1, sizeof *made->shards);
    }
    if (!made || !made->path || !made->shards) {
        loom_safetensors_close(made);
        return no_memory(path);
    }
    *file = made;
    return LOOM_OK;
}

/* Takes over `path`. */
static loom_status add_shard(loom_safetensors *file, char *path) {
    if (!path)
        return no_memory(file->path);
    shard *added = &file->shards[file->shard_count];
    *added = (shard){.path = path};
    file->shard_count++;
    LOOM_TRY(loom__map_file(path, &added->mapping));
    return read_shard(file, added);
}

static loom_status open_file(const char *path, loom_safetensors **file) {
    loom_safetensors *made;
    LOOM_TRY(make(path, 1, &made));
    loom_status status = add_shard(made, strdup(path));
    if (status == LOOM_OK)
        status = sort_names(made);
    if (status != LOOM_OK) {
        loom_safetensors_close(made);
        return status;
    }
    *file = made;
    return LOOM_OK;
}

loom_status loom__safetensors_open_memory(const char *path, const void *data, size_t bytes, loom_safetensors **file) {
    loom_safetensors *made;
    LOOM_TRY(make(path, 1, &made));
    made->shards[0] = (shard){.path = strdup(path), .mapping = {data, bytes}, .borrowed = true};
    made->shard_count = 1;
    loom_status status = made->shards[0].path ? read_shard(made, &made->shards[0]) : no_memory(path);
    if (status == LOOM_OK)
        status = sort_names(made);
    if (status != LOOM_OK) {
        loom_safetensors_close(made);
        return status;
    }
    *file = made;
    return LOOM_OK;
}

/* A shard's name is a plain file name: an index must not reach out of its directory. */
static bool is_shard_name(const char *name) {
    return !strchr(name, '/') && loom__ends_with(name, ".safetensors") && name[0] != '.';
}

static int compare_texts(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The different shard names of a weight map, sorted; they belong to the JSON. */
static loom_status list_shards(const char *path, json_t *weight_map, const char **names, size_t *count) {
    size_t found = 0;
    const char *name;
    json_t *value;
    json_object_foreach(weight_map, name, value) {
        const char *shard_name = json_string_value(value);
        if (!shard_name)
            return loom_fail(LOOM_ERR_FORMAT, "%s: weight_map '%.200s' is no text", path, name);
        if (!is_shard_name(shard_name))
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: weight_map '%.200s' names '%.200s', expected a .safetensors file of the same directory, without a "
                "path",
                path, name, shard_name);
        names[found++] = shard_name;
    }
    qsort(names, found, sizeof *names, compare_texts);
    size_t different = 0;
    for (size_t i = 0; i < found; i++)
        if (i == 0 || strcmp(names[i], names[different - 1]) != 0)
            names[different++] = names[i];
    *count = different;
    return LOOM_OK;
}

/* Every tensor of the shards is in the map under its shard, and there are as many as the map has. */
static loom_status check_against_index(const loom_safetensors *file, const json_t *weight_map) {
    for (int64_t i = 0; i < file->count; i++) {
        const loom_safetensors_tensor *tensor = &file->tensors[i];
        const char *listed = json_string_value(json_object_get(weight_map, tensor->name));
        const char *base = strrchr(tensor->path, '/');
        base = base ? base + 1 : tensor->path;
        if (!listed)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: tensor '%s' of %s is not in the weight_map", file->path, tensor->name, base);
        if (strcmp(listed, base) != 0)
            return loom_fail(LOOM_ERR_FORMAT, "%s: weight_map '%s' names %s, but the tensor is in %s", file->path,
                tensor->name, listed, base);
    }
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)weight_map, name, value) {
        if (!look_up(file, name))
            return loom_fail(LOOM_ERR_FORMAT, "%s: weight_map '%.200s' names %s, which does not have that tensor",
                file->path, name, json_string_value(value));
    }
    return LOOM_OK;
}

static loom_status open_listed(const char *path, json_t *weight_map, const char **names, loom_safetensors **file) {
    size_t count = 0;
    LOOM_TRY(list_shards(path, weight_map, names, &count));
    const char *slash = strrchr(path, '/');
    int directory = slash ? (int)(slash - path) + 1 : 0;
    loom_safetensors *made;
    LOOM_TRY(make(path, count, &made));
    loom_status status = LOOM_OK;
    for (size_t i = 0; i < count && status == LOOM_OK; i++) {
        char *shard_path = NULL;
        if (asprintf(&shard_path, "%.*s%s", directory, path, names[i]) < 0)
            shard_path = NULL;
        status = add_shard(made, shard_path);
    }
    if (status == LOOM_OK)
        status = sort_names(made);
    if (status == LOOM_OK)
        status = check_against_index(made, weight_map);
    if (status != LOOM_OK) {
        loom_safetensors_close(made);
        return status;
    }
    *file = made;
    return LOOM_OK;
}

loom_status loom__safetensors_open_index(const char *path, const void *text, size_t bytes, loom_safetensors **file) {
    if (bytes > LOOM__SAFETENSORS_HEADER_MAX)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: has %zu bytes, expected at most %d", path, bytes, LOOM__SAFETENSORS_HEADER_MAX);
    json_error_t error = {0};
    json_t *index = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!index)
        return loom_fail(LOOM_ERR_FORMAT, "%s:%d: is no JSON: %s", path, error.line, error.text);
    json_t *weight_map = json_object_get(index, "weight_map");
    const char **names = NULL;
    loom_status status;
    if (!json_is_object(weight_map))
        status = loom_fail(LOOM_ERR_FORMAT, "%s: weight_map is missing or no object", path);
    else if (!(names = calloc(json_object_size(weight_map) + 1, sizeof *names)))
        status = no_memory(path);
    else
        status = open_listed(path, weight_map, names, file);
    free(names);
    json_decref(index);
    return status;
}

static loom_status open_index(const char *path, loom_safetensors **file) {
    loom__mapping mapping;
    LOOM_TRY(loom__map_file(path, &mapping));
    loom_status status = loom__safetensors_open_index(path, mapping.data, mapping.bytes, file);
    loom__unmap_file(&mapping);
    return status;
}

loom_status loom_safetensors_open(const char *path, loom_safetensors **file) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode))
        return loom__ends_with(path, ".json") ? open_index(path, file) : open_file(path, file);
    /* What is there but cannot be read is said by whoever opens it; only what is absent leads on to the next name. */
    char *index = loom__path_join(path, "/", "model.safetensors.index.json");
    char *single = loom__path_join(path, "/", "model.safetensors");
    loom_status result;
    if (!index || !single)
        result = no_memory(path);
    else if (lstat(single, &status) == 0 || errno != ENOENT)
        result = open_file(single, file);
    else if (lstat(index, &status) == 0 || errno != ENOENT)
        result = open_index(index, file);
    else
        result =
            loom_fail(LOOM_ERR_NOT_FOUND, "%s: has neither model.safetensors nor model.safetensors.index.json", path);
    free(index);
    free(single);
    return result;
}

int64_t loom_safetensors_count(const loom_safetensors *file) {
    return file->count;
}

const loom_safetensors_tensor *loom_safetensors_get(const loom_safetensors *file, int64_t index) {
    return index >= 0 && index < file->count ? &file->tensors[index] : NULL;
}

bool loom_safetensors_has(const loom_safetensors *file, const char *name) {
    return look_up(file, name) != NULL;
}

loom_status loom_safetensors_find(
    const loom_safetensors *file, const char *name, const loom_safetensors_tensor **tensor) {
    const loom_safetensors_tensor *found = look_up(file, name);
    if (found) {
        *tensor = found;
        return LOOM_OK;
    }
    loom__nearest nearest;
    loom__nearest_begin(&nearest, name);
    for (int64_t i = 0; i < file->count; i++)
        loom__nearest_offer(&nearest, file->tensors[i].name);
    if (nearest.best)
        return loom_fail(
            LOOM_ERR_NOT_FOUND, "%s: has no tensor '%s' (did you mean '%s'?)", file->path, name, nearest.best);
    return loom_fail(
        LOOM_ERR_NOT_FOUND, "%s: has no tensor '%s' among its %lld", file->path, name, (long long)file->count);
}

const char *loom_safetensors_metadata(const loom_safetensors *file, const char *key) {
    return json_string_value(json_object_get(file->metadata, key));
}

/* ---- Values ---- */

static loom_status check_range(const loom_safetensors_tensor *tensor, int64_t first, int64_t count) {
    if (first < 0 || count < 0 || first > tensor->elements || count > tensor->elements - first)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': elements [%lld, +%lld) asked, it has %lld", tensor->path,
            tensor->name, (long long)first, (long long)count, (long long)tensor->elements);
    return LOOM_OK;
}

loom_status loom_safetensors_read_f32(const loom_safetensors_tensor *tensor, int64_t first, int64_t count, float *out) {
    LOOM_TRY(check_range(tensor, first, count));
    size_t size = loom_dtype_size(tensor->dtype);
    const unsigned char *from = (const unsigned char *)tensor->data + (size_t)first * size;
    switch (tensor->dtype) {
    case LOOM_F32:
        if (count > 0)
            memcpy(out, from, (size_t)count * size);
        return LOOM_OK;
    case LOOM_F64:
        for (int64_t i = 0; i < count; i++) {
            double value;
            memcpy(&value, from + (size_t)i * size, size);
            out[i] = (float)value;
        }
        return LOOM_OK;
    case LOOM_F16:
    case LOOM_BF16:
        for (int64_t i = 0; i < count; i++) {
            uint16_t value;
            memcpy(&value, from + (size_t)i * size, size);
            out[i] = tensor->dtype == LOOM_F16 ? loom_f16_to_f32(value) : loom_bf16_to_f32(value);
        }
        return LOOM_OK;
    default:
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': dtype is %s, expected F64, F32, F16 or BF16",
            tensor->path, tensor->name, loom_dtype_name(tensor->dtype));
    }
}

loom_status loom_safetensors_read_i64(
    const loom_safetensors_tensor *tensor, int64_t first, int64_t count, int64_t *out) {
    LOOM_TRY(check_range(tensor, first, count));
    if (!loom__widen(tensor->dtype, tensor->data, first, count, out))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': dtype is %s, expected I64, I32, I16, U16, I8, U8 or BOOL",
            tensor->path, tensor->name, loom_dtype_name(tensor->dtype));
    return LOOM_OK;
}
