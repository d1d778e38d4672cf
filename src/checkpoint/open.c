/* Finding and opening a checkpoint. What a path leads to is decided by the files that are there, in one order, and what
 * is there but cannot be read is said rather than passed over. All files are mapped once, so that reads change nothing
 * but the marks that say which checksums have been compared. */
#include "base/nearest.h"
#include "checkpoint/checkpoint.h"
#include "format/torch_file.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define TRACKER "latest_checkpointed_iteration.txt"

const char *loom_checkpoint_format_name(loom_checkpoint_format format) {
    static const char *const names[] = {[LOOM_CHECKPOINT_TORCH_DIST] = "torch_dist",
        [LOOM_CHECKPOINT_DCP] = "dcp",
        [LOOM_CHECKPOINT_SAFETENSORS] = "safetensors"};
    return (size_t)format < sizeof names / sizeof *names ? names[format] : "unknown format";
}

void loom_checkpoint_close(loom_checkpoint *checkpoint) {
    if (!checkpoint)
        return;
    for (int64_t i = 0; checkpoint->tensors && i < checkpoint->info.tensors; i++) {
        loom__checkpoint_entry *entry = &checkpoint->tensors[i];
        if (!checkpoint->safetensors)
            free((void *)(uintptr_t)entry->tensor.name);
        free(entry->chunks);
        free(entry->places);
        free(entry->order);
    }
    for (int64_t i = 0; checkpoint->objects && i < checkpoint->info.objects; i++)
        free((void *)(uintptr_t)checkpoint->objects[i].object.name);
    for (int64_t i = 0; i < checkpoint->file_count; i++) {
        loom__unmap_file(&checkpoint->files[i].mapping);
        free(checkpoint->files[i].name);
        free(checkpoint->files[i].path);
        free(checkpoint->files[i].missing);
    }
    loom_value_pool_destroy(checkpoint->pool);
    loom__unmap_file(&checkpoint->common);
    loom_safetensors_close(checkpoint->safetensors);
    free(checkpoint->tensors);
    free(checkpoint->objects);
    free(checkpoint->files);
    free(checkpoint->path);
    free(checkpoint->context);
    free(checkpoint);
}

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to open it", path);
}

/* *there: whether folder/name exists; what exists but cannot be looked at counts. */
static loom_status look(const char *folder, const char *name, bool *there) {
    struct stat status;
    char *path = loom__path_join(folder, "/", name);
    if (!path)
        return no_memory(folder);
    *there = stat(path, &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
    free(path);
    return LOOM_OK;
}

static loom_status map_in(const char *folder, const char *name, loom__mapping *mapping) {
    char *path = loom__path_join(folder, "/", name);
    if (!path)
        return no_memory(folder);
    loom_status status = loom__map_file(path, mapping);
    free(path);
    return status;
}

/* ---- one folder of torch_dist or DCP ---- */

static loom_status check_config(const char *what, const loom__mapping *text) {
    json_error_t error = {0};
    json_t *json = json_loadb((const char *)text->data, text->bytes, 0, &error);
    if (!json)
        return loom_fail(LOOM_ERR_FORMAT, "%s:%d: is no JSON: %s", what, error.line, error.text);
    const char *backend = json_string_value(json_object_get(json, "sharded_backend"));
    const json_t *version = json_object_get(json, "sharded_backend_version");
    loom_status status = LOOM_OK;
    if (!backend)
        status = loom_fail(LOOM_ERR_FORMAT, "%s: sharded_backend is missing or no text", what);
    else if (strcmp(backend, "torch_dist") != 0 || (version && json_integer_value(version) != 1))
        status = loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: sharded_backend '%.40s' version %lld, expected torch_dist version 1", what, backend,
            (long long)json_integer_value(version));
    json_decref(json);
    return status;
}

static loom_status read_config(loom_checkpoint *to, bool has_common) {
    bool there = false;
    LOOM_TRY(look(to->path, "metadata.json", &there));
    to->info.format = there ? LOOM_CHECKPOINT_TORCH_DIST : LOOM_CHECKPOINT_DCP;
    if (!there && has_common)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: has common.pt but no metadata.json, which is written last: the checkpoint is not complete", to->path);
    if (!there)
        return LOOM_OK;
    loom__mapping text = {0};
    char *what = loom__path_join(to->path, "/", "metadata.json");
    loom_status status = what ? loom__map_file(what, &text) : no_memory(to->path);
    if (status == LOOM_OK)
        status = check_config(what, &text);
    to->info.bytes += text.bytes;
    loom__unmap_file(&text);
    free(what);
    return status;
}

static loom_status read_common(loom_checkpoint *to) {
    LOOM_TRY(map_in(to->path, "common.pt", &to->common));
    LOOM_TRY(loom_value_pool_create(&to->pool));
    char *what = loom__path_join(to->path, "/", "common.pt");
    if (!what)
        return no_memory(to->path);
    to->info.bytes += to->common.bytes;
    loom_status status =
        loom__torch_read(what, to->common.data, to->common.bytes, LOOM__TORCH_CHECK, to->pool, &to->info.common);
    if (status == LOOM_OK && to->info.common->kind != LOOM_VALUE_DICT)
        status = loom_fail(
            LOOM_ERR_FORMAT, "%s: holds a %s, expected a dict", what, loom_value_kind_name(to->info.common->kind));
    free(what);
    return status;
}

static loom_status read_metadata(loom_checkpoint *to) {
    loom__mapping pickle = {0};
    char *what = loom__path_join(to->path, "/", ".metadata");
    loom_status status = what ? loom__map_file(what, &pickle) : no_memory(to->path);
    if (status == LOOM_OK)
        status = loom__checkpoint_read_metadata(what, pickle.data, pickle.bytes, to);
    to->info.bytes += pickle.bytes;
    loom__unmap_file(&pickle);
    free(what);
    return status;
}

static loom_status map_files(loom_checkpoint *to, bool lenient) {
    for (int64_t i = 0; i < to->file_count; i++) {
        loom__checkpoint_file *file = &to->files[i];
        file->path = loom__path_join(to->path, "/", file->name);
        if (!file->path)
            return no_memory(to->path);
        loom_status status = loom__map_file(file->path, &file->mapping);
        to->info.bytes += file->mapping.bytes;
        if (status == LOOM_OK)
            continue;
        if (!lenient)
            return status;
        file->missing = strdup(loom_error_message());
        if (!file->missing)
            return no_memory(to->path);
    }
    to->info.files = to->file_count;
    return LOOM_OK;
}

static loom_status check_place(const loom_checkpoint *of, const loom__checkpoint_place *place, const char *name) {
    const loom__checkpoint_file *file = &of->files[place->file];
    if (place->position > file->mapping.bytes || place->bytes > file->mapping.bytes - place->position)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: has %zu bytes, but '%s' is said to lie at %llu, %llu bytes long: cut short", file->path,
            file->mapping.bytes, name, (unsigned long long)place->position, (unsigned long long)place->bytes);
    return LOOM_OK;
}

static loom_status check_places(const loom_checkpoint *of) {
    for (int64_t i = 0; i < of->info.tensors; i++)
        for (int64_t c = 0; c < of->tensors[i].tensor.chunk_count; c++)
            LOOM_TRY(check_place(of, &of->tensors[i].places[c], of->tensors[i].tensor.name));
    for (int64_t i = 0; i < of->info.objects; i++)
        LOOM_TRY(check_place(of, &of->objects[i].place, of->objects[i].object.name));
    return LOOM_OK;
}

static loom_status open_sharded(loom_checkpoint *to, bool lenient) {
    bool has_common = false;
    LOOM_TRY(look(to->path, "common.pt", &has_common));
    LOOM_TRY(read_config(to, has_common));
    LOOM_TRY(read_metadata(to));
    if (has_common)
        LOOM_TRY(read_common(to));
    else if (to->info.format == LOOM_CHECKPOINT_TORCH_DIST)
        return loom_fail(LOOM_ERR_NOT_FOUND, "%s/common.pt: is missing", to->path);
    LOOM_TRY(map_files(to, lenient));
    return lenient ? LOOM_OK : check_places(to);
}

/* ---- safetensors ---- */

static int by_name(const void *a, const void *b) {
    const loom__checkpoint_entry *x = a, *y = b;
    return strcmp(x->tensor.name, y->tensor.name);
}

static loom_status take_tensor(loom_checkpoint *to, const loom_safetensors_tensor *from) {
    loom__checkpoint_entry *entry = &to->tensors[to->info.tensors++];
    const char *slash = strrchr(from->path, '/');
    entry->tensor = (loom_checkpoint_tensor){
        .name = from->name, .dtype = from->dtype, .dims = from->dims, .elements = from->elements, .chunk_count = 1};
    entry->data = from->data;
    entry->chunks = calloc(1, sizeof *entry->chunks);
    if (!entry->chunks)
        return no_memory(to->path);
    entry->tensor.chunks = entry->chunks;
    entry->chunks[0] = (loom_checkpoint_chunk){.file = slash ? slash + 1 : from->path, .bytes = from->bytes};
    memcpy(entry->tensor.shape, from->shape, sizeof from->shape);
    memcpy(entry->chunks[0].sizes, from->shape, sizeof from->shape);
    to->info.bytes += from->bytes;
    return LOOM_OK;
}

static loom_status open_safetensors(loom_checkpoint *to) {
    to->info.format = LOOM_CHECKPOINT_SAFETENSORS;
    LOOM_TRY(loom_safetensors_open(to->path, &to->safetensors));
    int64_t count = loom_safetensors_count(to->safetensors);
    const char *last = NULL;
    to->tensors = calloc((size_t)count + 1, sizeof *to->tensors);
    if (!to->tensors)
        return no_memory(to->path);
    for (int64_t i = 0; i < count; i++) {
        const loom_safetensors_tensor *from = loom_safetensors_get(to->safetensors, i);
        LOOM_TRY(take_tensor(to, from));
        to->info.files += from->path != last; /* they come shard by shard */
        last = from->path;
    }
    qsort(to->tensors, (size_t)count, sizeof *to->tensors, by_name);
    return LOOM_OK;
}

/* ---- where the files are ---- */

static loom_status read_tracker(const char *folder, char **target) {
    loom__mapping text = {0};
    LOOM_TRY(map_in(folder, TRACKER, &text));
    char word[64] = "", name[96];
    size_t bytes = text.bytes < sizeof word - 1 ? text.bytes : sizeof word - 1;
    memcpy(word, text.data, bytes);
    loom__unmap_file(&text);
    word[strcspn(word, " \t\r\n")] = '\0';
    bool digits = *word && strspn(word, "0123456789") == strlen(word) && strlen(word) <= 18;
    if (!digits && strcmp(word, "release") != 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s/" TRACKER ": holds '%.40s', expected the number of an iteration, or release", folder, word);
    if (digits)
        snprintf(name, sizeof name, "iter_%07lld", atoll(word));
    else
        snprintf(name, sizeof name, "release");
    *target = loom__path_join(folder, "/", name);
    return *target ? LOOM_OK : no_memory(folder);
}

static loom_status find_context(loom_checkpoint *to) {
    bool there = false;
    LOOM_TRY(look(to->path, "context", &there));
    if (there && !(to->context = loom__path_join(to->path, "/", "context")))
        return no_memory(to->path);
    return LOOM_OK;
}

/* Follows `path` to the folder of the files: *sharded says of which kind it is. */
static loom_status find_folder(loom_checkpoint *to, const char *path, int left, bool *sharded) {
    bool there = false;
    free(to->path);
    to->path = strdup(path);
    if (!to->path)
        return no_memory(path);
    size_t length = strlen(to->path);
    while (length > 1 && to->path[length - 1] == '/')
        to->path[--length] = '\0';
    LOOM_TRY(look(path, ".metadata", sharded));
    if (*sharded)
        return find_context(to);
    char *next = NULL;
    LOOM_TRY(look(path, "weights/.metadata", &there));
    if (there) {
        *sharded = true;
        LOOM_TRY(find_context(to));
        next = loom__path_join(to->path, "/", "weights");
        free(to->path);
        to->path = next;
        return next ? LOOM_OK : no_memory(path);
    }
    LOOM_TRY(look(path, TRACKER, &there));
    if (!there || left == 0)
        return LOOM_OK;
    LOOM_TRY(read_tracker(to->path, &next));
    loom_status status = find_folder(to, next, left - 1, sharded);
    free(next);
    return status;
}

static loom_status open_found(loom_checkpoint *to, const char *path, bool lenient) {
    bool sharded = false;
    struct stat status;
    LOOM_TRY(find_folder(to, path, 1, &sharded));
    if (sharded) {
        LOOM_TRY(open_sharded(to, lenient));
    } else {
        if (stat(to->path, &status) != 0)
            return loom_fail(loom__errno_status(errno), "%s: cannot be opened: %s", to->path, strerror(errno));
        loom_status opened = open_safetensors(to);
        if (opened == LOOM_ERR_NOT_FOUND && S_ISDIR(status.st_mode))
            return loom_fail(LOOM_ERR_NOT_FOUND,
                "%s: is no checkpoint: expected .metadata, weights/.metadata, " TRACKER
                ", model.safetensors or model.safetensors.index.json in it",
                to->path);
        LOOM_TRY(opened);
    }
    to->info.path = to->path;
    to->info.context = to->context;
    loom__checkpoint_hints(to);
    return LOOM_OK;
}

loom_status loom__checkpoint_open(const char *path, bool lenient, loom_checkpoint **checkpoint) {
    loom_checkpoint *made = calloc(1, sizeof *made);
    if (!made)
        return no_memory(path);
    made->info.iteration = -1;
    loom_status status = open_found(made, path, lenient);
    if (status != LOOM_OK) {
        loom_checkpoint_close(made);
        return status;
    }
    *checkpoint = made;
    return LOOM_OK;
}

loom_status loom_checkpoint_open(const char *path, loom_checkpoint **checkpoint) {
    return loom__checkpoint_open(path, false, checkpoint);
}

/* ---- looking up ---- */

const loom_checkpoint_info *loom_checkpoint_get_info(const loom_checkpoint *checkpoint) {
    return &checkpoint->info;
}

const loom_checkpoint_tensor *loom_checkpoint_tensor_at(const loom_checkpoint *checkpoint, int64_t index) {
    return index >= 0 && index < checkpoint->info.tensors ? &checkpoint->tensors[index].tensor : NULL;
}

const loom_checkpoint_object *loom_checkpoint_object_at(const loom_checkpoint *checkpoint, int64_t index) {
    return index >= 0 && index < checkpoint->info.objects ? &checkpoint->objects[index].object : NULL;
}

static int by_object_name(const void *a, const void *b) {
    const loom__checkpoint_object *x = a, *y = b;
    return strcmp(x->object.name, y->object.name);
}

static loom_status not_found(
    const loom_checkpoint *of, const char *kind, const char *name, const loom__nearest *nearest) {
    if (nearest->best)
        return loom_fail(
            LOOM_ERR_NOT_FOUND, "%s: has no %s '%s' (did you mean '%s'?)", of->path, kind, name, nearest->best);
    return loom_fail(LOOM_ERR_NOT_FOUND, "%s: has no %s '%s'", of->path, kind, name);
}

loom_status loom_checkpoint_find_tensor(
    const loom_checkpoint *checkpoint, const char *name, const loom_checkpoint_tensor **tensor) {
    loom__checkpoint_entry wanted = {.tensor.name = name};
    const loom__checkpoint_entry *found =
        bsearch(&wanted, checkpoint->tensors, (size_t)checkpoint->info.tensors, sizeof wanted, by_name);
    if (found) {
        *tensor = &found->tensor;
        return LOOM_OK;
    }
    loom__nearest nearest;
    loom__nearest_begin(&nearest, name);
    for (int64_t i = 0; i < checkpoint->info.tensors; i++)
        loom__nearest_offer(&nearest, checkpoint->tensors[i].tensor.name);
    return not_found(checkpoint, "tensor", name, &nearest);
}

loom_status loom_checkpoint_find_object(
    const loom_checkpoint *checkpoint, const char *name, const loom_checkpoint_object **object) {
    loom__checkpoint_object wanted = {.object.name = name};
    const loom__checkpoint_object *found =
        checkpoint->objects
            ? bsearch(&wanted, checkpoint->objects, (size_t)checkpoint->info.objects, sizeof wanted, by_object_name)
            : NULL;
    if (found) {
        *object = &found->object;
        return LOOM_OK;
    }
    loom__nearest nearest;
    loom__nearest_begin(&nearest, name);
    for (int64_t i = 0; i < checkpoint->info.objects; i++)
        loom__nearest_offer(&nearest, checkpoint->objects[i].object.name);
    return not_found(checkpoint, "object", name, &nearest);
}
