/* The .metadata of what many ranks have written. Records are sorted by name, keeping their order within one, so that
 * the chunks of a tensor come together; the values that torch's classes would pickle are put together and written, and
 * what was written is then read by the reader that every load uses: a save that could not be loaded fails here. */
#include "checkpoint/checkpoint.h"
#include "checkpoint/description.h"

#include <stdlib.h>

#define METADATA "torch.distributed.checkpoint.metadata."

typedef struct described {
    const loom__checkpoint_record *record;
    const char *file, *name;
    int64_t number;
} described;

typedef struct writer {
    const char *what;
    loom_value_pool *pool;
    described *items;
    int64_t count;
    loom_value *state, *storage;
    loom_value *none, *no, *layout, *memory_format;
} writer;

static int by_name(const void *a, const void *b) {
    const described *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

/* The bytes come from other ranks, unchanged; what does not fit is a fault of this program. */
static loom_status next_record(
    const char *what, const unsigned char *data, size_t bytes, size_t *at, loom__checkpoint_record *record) {
    if (bytes - *at < sizeof *record)
        return loom_fail(LOOM_ERR_INTERNAL, "%s: a description ends inside of a record", what);
    memcpy(record, data + *at, sizeof *record);
    size_t texts = (size_t)record->file_bytes + record->name_bytes;
    if (record->file_bytes == 0 || record->name_bytes == 0 || texts > bytes - *at - sizeof *record)
        return loom_fail(LOOM_ERR_INTERNAL, "%s: a description ends inside of a name", what);
    return LOOM_OK;
}

static loom_status take_description(writer *w, const loom__checkpoint_description *from) {
    const unsigned char *data = from->data;
    for (size_t at = 0; at < from->bytes;) {
        loom__checkpoint_record record;
        LOOM_TRY(next_record(w->what, data, from->bytes, &at, &record));
        void *copy = NULL;
        LOOM_TRY(loom__value_allocate(w->pool, sizeof record, &copy));
        memcpy(copy, &record, sizeof record);
        if ((w->count & (w->count - 1)) == 0) {
            size_t room = w->count ? 2 * (size_t)w->count : 1;
            void *grown = realloc(w->items, room * sizeof *w->items);
            if (!grown)
                return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its entries", w->what);
            w->items = grown;
        }
        const char *file = (const char *)data + at + sizeof record;
        w->items[w->count] = (described){copy, file, file + record.file_bytes, w->count};
        w->count++;
        at += sizeof record + record.file_bytes + record.name_bytes;
    }
    return LOOM_OK;
}

static loom_status put_size(writer *w, loom_value *dict, const char *key, const int64_t *of, int dims) {
    loom_value *size = NULL, *arguments = NULL, *object = NULL;
    LOOM_TRY(loom_value_ints(w->pool, true, of, dims, &size));
    LOOM_TRY(loom_value_tuple(w->pool, &arguments));
    LOOM_TRY(loom_value_append(w->pool, arguments, size));
    LOOM_TRY(loom_value_object_create(w->pool, "torch.Size", true, arguments, NULL, &object));
    return loom_value_set(w->pool, dict, key, object);
}

static loom_status put_text(writer *w, loom_value *dict, const char *key, const char *text) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_text(w->pool, text, &value));
    return loom_value_set(w->pool, dict, key, value);
}

static loom_status put_int(writer *w, loom_value *dict, const char *key, uint64_t number) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_int(w->pool, (int64_t)number, &value));
    return loom_value_set(w->pool, dict, key, value);
}

static loom_status make_object(writer *w, const char *class, const loom_value *state, loom_value **object) {
    return loom_value_object_create(w->pool, class, false, NULL, state, object);
}

/* A call with one argument. */
static loom_status make_call(writer *w, const char *name, const loom_value *argument, loom_value **object) {
    loom_value *arguments = NULL;
    LOOM_TRY(loom_value_tuple(w->pool, &arguments));
    LOOM_TRY(loom_value_append(w->pool, arguments, argument));
    return loom_value_object_create(w->pool, name, true, arguments, NULL, object);
}

static loom_status make_constants(writer *w) {
    loom_value *strided = NULL, *zero = NULL;
    LOOM_TRY(loom_value_none(w->pool, &w->none));
    LOOM_TRY(loom_value_bool(w->pool, false, &w->no));
    LOOM_TRY(loom_value_text(w->pool, "torch.strided", &strided));
    LOOM_TRY(loom_value_int(w->pool, 0, &zero));
    LOOM_TRY(make_call(w, "torch.serialization._get_layout", strided, &w->layout));
    LOOM_TRY(make_call(w, METADATA "_MEM_FORMAT_ENCODING", zero, &w->memory_format));
    LOOM_TRY(loom_value_dict(w->pool, &w->state));
    return loom_value_dict(w->pool, &w->storage);
}

/* dtype, layout, requires_grad, memory format, pin_memory. */
static loom_status make_properties(writer *w, loom_dtype dtype, loom_value **properties) {
    loom_value *state = NULL, *name = NULL;
    char text[40] = "torch.";
    strcat(text, loom__torch_dtype_name(dtype));
    LOOM_TRY(loom_value_name(w->pool, text, &name));
    LOOM_TRY(loom_value_tuple(w->pool, &state));
    const loom_value *const parts[] = {name, w->layout, w->no, w->memory_format, w->no};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        LOOM_TRY(loom_value_append(w->pool, state, parts[i]));
    return make_object(w, METADATA "TensorProperties", state, properties);
}

static loom_status put_storage(writer *w, const described *of) {
    loom_value *index = NULL, *info = NULL, *key = NULL, *value = NULL;
    LOOM_TRY(loom_value_dict(w->pool, &index));
    LOOM_TRY(put_text(w, index, "fqn", of->name));
    if (of->record->dtype >= 0)
        LOOM_TRY(put_size(w, index, "offset", of->record->offsets, of->record->dims));
    LOOM_TRY(make_object(w, METADATA "MetadataIndex", index, &key));
    LOOM_TRY(loom_value_dict(w->pool, &info));
    LOOM_TRY(put_text(w, info, "relative_path", of->file));
    LOOM_TRY(put_int(w, info, "offset", of->record->position));
    LOOM_TRY(put_int(w, info, "length", of->record->bytes));
    LOOM_TRY(make_object(w, "torch.distributed.checkpoint.filesystem._StorageInfo", info, &value));
    return loom_value_set_pair(w->pool, w->storage, key, value);
}

static loom_status put_chunk(writer *w, loom_value *chunks, const loom__checkpoint_record *record) {
    loom_value *state = NULL, *chunk = NULL;
    LOOM_TRY(loom_value_dict(w->pool, &state));
    LOOM_TRY(put_size(w, state, "offsets", record->offsets, record->dims));
    LOOM_TRY(put_size(w, state, "sizes", record->sizes, record->dims));
    LOOM_TRY(make_object(w, METADATA "ChunkStorageMetadata", state, &chunk));
    return loom_value_append(w->pool, chunks, chunk);
}

static bool is_same_tensor(const loom__checkpoint_record *a, const loom__checkpoint_record *b) {
    return a->dtype == b->dtype && a->dims == b->dims && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* Items [first, end) have one name. */
static loom_status put_entry(writer *w, int64_t first, int64_t end) {
    const described *of = &w->items[first];
    loom_value *chunks = NULL, *state = NULL, *properties = NULL, *entry = NULL;
    for (int64_t i = first + 1; i < end; i++)
        if (of->record->dtype < 0 || !is_same_tensor(of->record, w->items[i].record))
            return loom_fail(LOOM_ERR_STATE, "%s: '%s' was written to %s and %s: %s", w->what, of->name, of->file,
                w->items[i].file,
                of->record->dtype < 0 ? "an object lies in one place" : "as tensors of different dtypes or shapes");
    if (of->record->dtype < 0) {
        LOOM_TRY(make_object(w, METADATA "BytesStorageMetadata", NULL, &entry));
        return loom_value_set(w->pool, w->state, of->name, entry);
    }
    LOOM_TRY(loom_value_list(w->pool, &chunks));
    for (int64_t i = first; i < end; i++)
        LOOM_TRY(put_chunk(w, chunks, w->items[i].record));
    LOOM_TRY(make_properties(w, (loom_dtype)of->record->dtype, &properties));
    LOOM_TRY(loom_value_dict(w->pool, &state));
    LOOM_TRY(loom_value_set(w->pool, state, "properties", properties));
    LOOM_TRY(put_size(w, state, "size", of->record->shape, of->record->dims));
    LOOM_TRY(loom_value_set(w->pool, state, "chunks", chunks));
    LOOM_TRY(make_object(w, METADATA "TensorStorageMetadata", state, &entry));
    return loom_value_set(w->pool, w->state, of->name, entry);
}

static loom_status make_root(writer *w, loom_value **root) {
    loom_value *state = NULL;
    LOOM_TRY(make_constants(w));
    for (int64_t i = 0; i < w->count; i++)
        LOOM_TRY(put_storage(w, &w->items[i]));
    if (w->count > 0)
        qsort(w->items, (size_t)w->count, sizeof *w->items, by_name);
    for (int64_t first = 0, end; first < w->count; first = end) {
        for (end = first + 1; end < w->count && strcmp(w->items[end].name, w->items[first].name) == 0;)
            end++;
        LOOM_TRY(put_entry(w, first, end));
    }
    LOOM_TRY(loom_value_dict(w->pool, &state));
    LOOM_TRY(loom_value_set(w->pool, state, "state_dict_metadata", w->state));
    LOOM_TRY(loom_value_set(w->pool, state, "planner_data", w->none));
    LOOM_TRY(loom_value_set(w->pool, state, "storage_data", w->storage));
    LOOM_TRY(loom_value_set(w->pool, state, "storage_meta", w->none));
    LOOM_TRY(put_text(w, state, "version", "1.0.0"));
    return make_object(w, METADATA "Metadata", state, root);
}

static loom_status check_readable(const char *what, const loom__buffer *pickle) {
    loom_checkpoint *scratch = calloc(1, sizeof *scratch);
    if (!scratch)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to check it", what);
    loom_status status = loom__checkpoint_read_metadata(what, pickle->bytes, pickle->count, scratch);
    loom_checkpoint_close(scratch);
    return status;
}

static loom_status make(
    writer *w, const loom__checkpoint_description *descriptions, int64_t count, loom__buffer *pickle) {
    loom_value *root = NULL;
    for (int64_t i = 0; i < count; i++)
        LOOM_TRY(take_description(w, &descriptions[i]));
    LOOM_TRY(make_root(w, &root));
    LOOM_TRY(loom__pickle_write(root, NULL, pickle));
    return check_readable(w->what, pickle);
}

loom_status loom__checkpoint_make_metadata(
    const char *what, const loom__checkpoint_description *descriptions, int64_t count, void **pickle, size_t *bytes) {
    writer w = {.what = what};
    loom__buffer made = {0};
    LOOM_TRY(loom_value_pool_create(&w.pool));
    loom_status status = make(&w, descriptions, count, &made);
    free(w.items);
    loom_value_pool_destroy(w.pool);
    if (status != LOOM_OK) {
        free(made.bytes);
        return status;
    }
    *pickle = made.bytes;
    *bytes = made.count;
    return LOOM_OK;
}
