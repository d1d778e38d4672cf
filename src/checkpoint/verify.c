/* Reading all of a checkpoint and telling every fault instead of the first. A file is read in the order of its bytes:
 * pieces are sorted by file and place, each is opened with its checksums compared, and the elements of each chunk are
 * looked at where they lie. */
#include "checkpoint/checkpoint.h"

#include <stdlib.h>

/* A chunk (object = NULL) or an object. */
typedef struct piece {
    int64_t file;
    uint64_t position;
    const loom__checkpoint_entry *entry;
    int64_t chunk;
    loom__checkpoint_object *object;
} piece;

typedef struct verifier {
    const loom_checkpoint *of;
    loom_checkpoint_fault fault;
    void *context;
    loom_checkpoint_verified found;
    bool *damaged; /* [files] */
} verifier;

static int by_place(const void *a, const void *b, void *files) {
    const piece *x = a, *y = b;
    const loom__checkpoint_file *of = files;
    if (x->file != y->file)
        return strcmp(of[x->file].name, of[y->file].name);
    return (x->position > y->position) - (x->position < y->position);
}

/* Messages of the library begin with the path; here the name is told beside them. */
static const char *without_path(const verifier *v, int64_t file, const char *message) {
    const char *path = file >= 0 ? v->of->files[file].path : "";
    size_t length = strlen(path);
    return length && strncmp(message, path, length) == 0 && strncmp(message + length, ": ", 2) == 0
               ? message + length + 2
               : message;
}

static void tell(verifier *v, int64_t file, const char *message) {
    v->found.faults++;
    if (file >= 0 && !v->damaged[file])
        v->found.damaged_files++;
    if (file >= 0)
        v->damaged[file] = true;
    if (v->fault)
        v->fault(v->context, file >= 0 ? v->of->files[file].name : "", without_path(v, file, message));
}

/* Number of the first element that is NaN or infinite; -1 where all are finite, or no floating-point numbers. */
static int64_t first_not_finite(loom_dtype dtype, const unsigned char *data, int64_t count) {
    size_t size = loom_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *at = data + (size_t)i * size;
        uint16_t narrow;
        uint32_t single;
        uint64_t wide;
        bool finite = true;
        if (dtype == LOOM_F32) {
            memcpy(&single, at, size);
            finite = (single & 0x7f800000u) != 0x7f800000u;
        } else if (dtype == LOOM_BF16 || dtype == LOOM_F16) {
            memcpy(&narrow, at, size);
            unsigned exponent = dtype == LOOM_BF16 ? 0x7f80u : 0x7c00u;
            finite = (narrow & exponent) != exponent;
        } else if (dtype == LOOM_F64) {
            memcpy(&wide, at, size);
            finite = (wide & 0x7ff0000000000000u) != 0x7ff0000000000000u;
        } else {
            return -1;
        }
        if (!finite)
            return i;
    }
    return -1;
}

/* Buckets hold, between parameters, whatever was in the memory of the one who saved; Megaloom's hold zeros. */
static bool has_padding(const loom_checkpoint *of, const char *name) {
    return strncmp(name, "optimizer.distributed.", 22) == 0 && !loom_value_get(of->info.common, "megaloom");
}

static loom_status check_chunk(const loom_checkpoint *of, const piece *at, loom_value_pool *pool) {
    const loom_checkpoint_tensor *tensor = &at->entry->tensor;
    const loom_checkpoint_chunk *chunk = &at->entry->chunks[at->chunk];
    const void *data = NULL;
    int64_t elements = 1;
    LOOM_TRY(loom__checkpoint_chunk_data(of, at->entry, at->chunk, pool, &data));
    for (int i = 0; i < tensor->dims; i++)
        elements *= chunk->sizes[i];
    int64_t bad = has_padding(of, tensor->name) ? -1 : first_not_finite(tensor->dtype, data, elements);
    if (bad >= 0)
        return loom_fail(LOOM_ERR_NUMERIC, "tensor '%s': element %lld of chunk %lld is not a finite number",
            tensor->name, (long long)bad, (long long)at->chunk);
    return LOOM_OK;
}

static loom_status check_piece(const loom_checkpoint *of, const piece *at) {
    loom_value_pool *pool = NULL;
    const loom_value *value = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status =
        at->object ? loom_checkpoint_read_object(of, &at->object->object, pool, &value) : check_chunk(of, at, pool);
    loom_value_pool_destroy(pool);
    return status;
}

/* Whether a missing file was told already: each of its pieces would say the same. */
static bool is_missing(verifier *v, const piece *at) {
    const char *missing = at->file >= 0 ? v->of->files[at->file].missing : NULL;
    if (missing && !v->damaged[at->file])
        tell(v, at->file, missing);
    return missing != NULL;
}

static const char *name_of(const piece *of) {
    return of->object ? of->object->object.name : of->entry->tensor.name;
}

static uint64_t bytes_of(const piece *of) {
    return of->object ? of->object->place.bytes : of->entry->places[of->chunk].bytes;
}

static bool is_beyond(const verifier *v, const piece *at) {
    size_t end = at->file >= 0 ? v->of->files[at->file].mapping.bytes : SIZE_MAX;
    return at->file >= 0 && (at->position > end || bytes_of(at) > end - at->position);
}

/* Pieces from the first that reaches beyond the end of its file to the last one of that file: one fault. */
static int64_t tell_cut(verifier *v, const piece *pieces, int64_t first, int64_t count) {
    int64_t lost = 0, end = first;
    for (; end < count && pieces[end].file == pieces[first].file; end++)
        lost += is_beyond(v, &pieces[end]);
    (void)loom_fail(LOOM_ERR_FORMAT,
        "ends at %zu, before %lld of its pieces do, the first of them '%s' at %llu: cut short",
        v->of->files[pieces[first].file].mapping.bytes, (long long)lost, name_of(&pieces[first]),
        (unsigned long long)pieces[first].position);
    tell(v, pieces[first].file, loom_error_message());
    return end;
}

static void check_pieces(verifier *v, const piece *pieces, int64_t count) {
    for (int64_t i = 0; i < count;) {
        if (is_missing(v, &pieces[i])) {
            i++;
        } else if (is_beyond(v, &pieces[i])) {
            i = tell_cut(v, pieces, i, count);
        } else {
            if (check_piece(v->of, &pieces[i]) != LOOM_OK)
                tell(v, pieces[i].file, loom_error_message());
            i++;
        }
    }
}

/* Archives lie one behind another: two of them in the same bytes mean that one was overwritten. */
static void check_overlaps(verifier *v, const piece *pieces, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const piece *a = &pieces[i - 1], *b = &pieces[i];
        if (a->file != b->file || bytes_of(a) <= b->position - a->position)
            continue;
        (void)loom_fail(LOOM_ERR_FORMAT, "'%s' and '%s' are said to lie in the same bytes", name_of(a), name_of(b));
        tell(v, b->file, loom_error_message());
    }
}

static loom_status verify(verifier *v) {
    const loom_checkpoint *of = v->of;
    const loom_checkpoint_info *info = &of->info;
    int64_t count = 0, room = info->objects;
    for (int64_t i = 0; i < info->tensors; i++) {
        room += of->tensors[i].tensor.chunk_count;
        v->found.not_compared += has_padding(of, of->tensors[i].tensor.name);
    }
    piece *pieces = calloc((size_t)room + 1, sizeof *pieces);
    if (!pieces)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to verify it", of->path);
    for (int64_t i = 0; i < info->objects; i++) {
        loom__checkpoint_object *object = &of->objects[i];
        pieces[count++] = (piece){object->place.file, object->place.position, NULL, 0, object};
    }
    for (int64_t i = 0; i < info->tensors; i++)
        for (int64_t c = 0; c < of->tensors[i].tensor.chunk_count; c++) {
            const loom__checkpoint_entry *entry = &of->tensors[i];
            const loom__checkpoint_place *place = entry->places ? &entry->places[c] : NULL;
            pieces[count++] = (piece){place ? place->file : -1, place ? place->position : 0, entry, c, NULL};
        }
    if (!of->safetensors) {
        qsort_r(pieces, (size_t)count, sizeof *pieces, by_place, of->files);
        check_overlaps(v, pieces, count);
    }
    check_pieces(v, pieces, count);
    v->found.tensors = info->tensors;
    v->found.objects = info->objects;
    v->found.chunks = count - info->objects;
    v->found.files = info->files;
    v->found.bytes = info->bytes;
    free(pieces);
    return LOOM_OK;
}

loom_status loom_checkpoint_verify(
    const char *path, loom_checkpoint_fault fault, void *context, loom_checkpoint_verified *verified) {
    loom_checkpoint *checkpoint = NULL;
    LOOM_TRY(loom__checkpoint_open(path, true, &checkpoint));
    verifier v = {.of = checkpoint, .fault = fault, .context = context};
    v.damaged = calloc((size_t)checkpoint->file_count + 1, sizeof *v.damaged);
    loom_status status =
        v.damaged ? verify(&v) : loom_fail(LOOM_ERR_MEMORY, "%s: no memory to verify it", checkpoint->path);
    free(v.damaged);
    loom_checkpoint_close(checkpoint);
    LOOM_TRY(status);
    *verified = v.found;
    if (v.found.faults > 0)
        return loom_fail(LOOM_ERR_FORMAT, "%s: %lld faults in %lld of its %lld data files", path,
            (long long)v.found.faults, (long long)v.found.damaged_files, (long long)v.found.files);
    return LOOM_OK;
}
