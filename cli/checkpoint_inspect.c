/* megaloom checkpoint inspect: what is in a checkpoint, for people and as JSON in the keys of the golden manifests. */
#include "checkpoint.h"
#include "commands.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUE_SHOWN = 96, SHAPE_TEXT = 256 };

typedef struct arguments {
    const char *path;
    bool json;
} arguments;

static const char *dtype_name(loom_dtype dtype) {
    const char *name = loom_dtype_torch_name(dtype);
    return name ? name : loom_dtype_name(dtype);
}

/* ---- text ---- */

static const char *shape_text(int dims, const int64_t *shape, char text[SHAPE_TEXT]) {
    int at = snprintf(text, SHAPE_TEXT, "[");
    for (int i = 0; i < dims; i++)
        at += snprintf(text + at, (size_t)(SHAPE_TEXT - at), "%s%" PRId64, i ? ", " : "", shape[i]);
    snprintf(text + at, (size_t)(SHAPE_TEXT - at), "]");
    return text;
}

static void print_heading(const loom_checkpoint_info *info) {
    char size[32];
    printf("%s: %s", info->path, loom_checkpoint_format_name(info->format));
    if (info->iteration >= 0)
        printf(", iteration %" PRId64, info->iteration);
    printf(", %" PRId64 " file%s, %s\n", info->files, info->files == 1 ? "" : "s",
        loom_cli_bytes((double)info->bytes, size));
    if (info->context)
        printf("context    %s\n", info->context);
    if (info->writers > 0)
        printf("written    by %" PRId64 " rank%s\n", info->writers, info->writers == 1 ? "" : "s");
    if (info->tensor_parallel > 0)
        printf("layout     tensor %" PRId64, info->tensor_parallel);
    if (info->tensor_parallel > 0 && info->pipeline_parallel > 0)
        printf(", pipeline %" PRId64, info->pipeline_parallel);
    if (info->tensor_parallel > 0)
        printf(info->layout_is_guessed ? ", as its chunks and objects suggest\n" : "\n");
    if (info->optimizer_sharding)
        printf("optimizer  %s\n", info->optimizer_sharding);
}

/* One line each, cut where it gets long: --json has all. */
static loom_status print_common(const loom_value *common) {
    for (int64_t i = 0; common && i < common->count; i++) {
        const loom_value *key = common->items[2 * i];
        char *text = NULL;
        LOOM_TRY(loom_value_to_json(common->items[2 * i + 1], 0, &text));
        printf("%s%s: %.*s%s\n", i ? "           " : "common     ", key->kind == LOOM_VALUE_TEXT ? key->text : "?",
            VALUE_SHOWN, text, strlen(text) > VALUE_SHOWN ? "…" : "");
        free(text);
    }
    return LOOM_OK;
}

static void print_tensors(const loom_checkpoint *from) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(from);
    int name_width = 6, shape_width = 5;
    char text[SHAPE_TEXT], size[32];
    int64_t elements = 0;
    double bytes = 0;
    for (int64_t i = 0; i < info->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(from, i);
        int name = (int)strlen(tensor->name), shape = (int)strlen(shape_text(tensor->dims, tensor->shape, text));
        name_width = name > name_width ? name : name_width;
        shape_width = shape > shape_width ? shape : shape_width;
    }
    printf("\n%-*s  %-8s  %-*s  %6s  %10s\n", name_width, "tensor", "dtype", shape_width, "shape", "chunks", "bytes");
    for (int64_t i = 0; i < info->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(from, i);
        double own = (double)tensor->elements * (double)loom_dtype_size(tensor->dtype);
        printf("%-*s  %-8s  %-*s  %6" PRId64 "  %10s", name_width, tensor->name, dtype_name(tensor->dtype), shape_width,
            shape_text(tensor->dims, tensor->shape, text), tensor->chunk_count, loom_cli_bytes(own, size));
        if (tensor->original_dims > 0)
            printf("  of %s", shape_text(tensor->original_dims, tensor->original_shape, text));
        printf("\n");
        elements += tensor->elements;
        bytes += own;
    }
    printf("%" PRId64 " tensors, %" PRId64 " elements, %s\n", info->tensors, elements, loom_cli_bytes(bytes, size));
}

/* "X/shard_3_4" and its kin are many: they are counted under X. */
static void print_objects(const loom_checkpoint *from) {
    int64_t count = loom_checkpoint_get_info(from)->objects;
    for (int64_t first = 0, end; first < count; first = end) {
        const char *name = loom_checkpoint_object_at(from, first)->name;
        size_t length = strcspn(name, "/");
        uint64_t bytes = 0;
        char size[32];
        for (end = first; end < count; end++) {
            const loom_checkpoint_object *object = loom_checkpoint_object_at(from, end);
            if (strcspn(object->name, "/") != length || strncmp(object->name, name, length) != 0)
                break;
            bytes += object->bytes;
        }
        printf("%s%-.*s  %" PRId64 " object%s, %s\n", first ? "" : "\n", (int)length, name, end - first,
            end - first == 1 ? "" : "s", loom_cli_bytes((double)bytes, size));
    }
}

/* ---- JSON ---- */

static json_t *ints(int count, const int64_t *of) {
    json_t *list = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(list, json_integer(of[i]));
    return list;
}

static json_t *tensor_json(const loom_checkpoint_tensor *tensor) {
    json_t *chunks = json_array();
    for (int64_t i = 0; i < tensor->chunk_count; i++) {
        const loom_checkpoint_chunk *chunk = &tensor->chunks[i];
        json_array_append_new(
            chunks, json_pack("[oo]", ints(tensor->dims, chunk->offsets), ints(tensor->dims, chunk->sizes)));
    }
    json_t *made = json_pack(
        "{so,ss,so}", "shape", ints(tensor->dims, tensor->shape), "dtype", dtype_name(tensor->dtype), "chunks", chunks);
    if (tensor->original_dims > 0)
        json_object_set_new(made, "orig_shape", ints(tensor->original_dims, tensor->original_shape));
    return made;
}

static loom_status value_json(const loom_value *value, json_t **json) {
    char *text = NULL;
    LOOM_TRY(loom_value_to_json(value, 0, &text));
    *json = json_loads(text, JSON_DECODE_ANY, NULL);
    free(text);
    return *json ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for JSON");
}

static loom_status object_json(const loom_checkpoint *from, const loom_checkpoint_object *object, json_t **json) {
    loom_value_pool *pool = NULL;
    const loom_value *value = NULL;
    json_t *rendered = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom_checkpoint_read_object(from, object, pool, &value);
    if (status == LOOM_OK)
        status = value_json(value, &rendered);
    loom_value_pool_destroy(pool);
    LOOM_TRY(status);
    *json = json_pack("{sI,so}", "bytes", (json_int_t)object->bytes, "value", rendered);
    return *json ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for JSON");
}

static json_t *known(int64_t number, int64_t unknown) {
    return number == unknown ? json_null() : json_integer(number);
}

static json_t *info_json(const loom_checkpoint_info *info) {
    json_t *layout = json_pack("{so,so,sI,sb}", "tensor_parallel", known(info->tensor_parallel, 0), "pipeline_parallel",
        known(info->pipeline_parallel, 0), "writers", (json_int_t)info->writers, "guessed", info->layout_is_guessed);
    return json_pack("{ss,ss,ss?,so,sI,sI,ss?,so}", "format", loom_checkpoint_format_name(info->format), "path",
        info->path, "context", info->context, "iteration", known(info->iteration, -1), "files", (json_int_t)info->files,
        "bytes", (json_int_t)info->bytes, "optimizer_sharding", info->optimizer_sharding, "layout", layout);
}

static loom_status fill_json(const loom_checkpoint *from, json_t *root) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(from);
    json_t *tensors = json_object(), *objects = json_object(), *common = NULL;
    json_object_set_new(root, "tensors", tensors);
    json_object_set_new(root, "objects", objects);
    for (int64_t i = 0; i < info->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(from, i);
        json_object_set_new(tensors, tensor->name, tensor_json(tensor));
    }
    for (int64_t i = 0; i < info->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(from, i);
        json_t *json = NULL;
        LOOM_TRY(object_json(from, object, &json));
        json_object_set_new(objects, object->name, json);
    }
    if (info->common) {
        LOOM_TRY(value_json(info->common, &common));
        json_object_set_new(root, "common", common);
    }
    return LOOM_OK;
}

static loom_status print_json(const loom_checkpoint *from) {
    json_t *root = info_json(loom_checkpoint_get_info(from));
    loom_status status = root ? fill_json(from, root) : loom_fail(LOOM_ERR_MEMORY, "out of memory for JSON");
    if (status == LOOM_OK) {
        json_dumpf(root, stdout, 0);
        putchar('\n');
    }
    json_decref(root);
    return status;
}

static loom_status print_text(const loom_checkpoint *from) {
    print_heading(loom_checkpoint_get_info(from));
    LOOM_TRY(print_common(loom_checkpoint_get_info(from)->common));
    print_tensors(from);
    print_objects(from);
    return LOOM_OK;
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'j':
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (to->path)
            argp_error(state, "more than one checkpoint: %s and %s", to->path, text);
        to->path = text;
        return 0;
    case ARGP_KEY_END:
        if (!to->path)
            argp_error(state, "DIR must be given");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int loom_cli_checkpoint_inspect(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"json", 'j', NULL, 0, "All of it as JSON: every chunk, every object, the common state", 0}, {0}};
    static const struct argp argp = {options, take, "DIR",
        "Shows what is in a checkpoint: tensors, how they are cut, objects, the common state, the layout it came "
        "from.\v"
        "DIR is a checkpoint of Megatron-Core (torch_dist), of NeMo (a folder with weights/) or of "
        "torch.distributed.checkpoint, a folder with latest_checkpointed_iteration.txt, or safetensors. Nothing in it "
        "is executed.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_checkpoint *checkpoint = NULL;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_status status = loom_checkpoint_open(given.path, &checkpoint);
    if (status)
        return loom_cli_fail(status);
    status = given.json ? print_json(checkpoint) : print_text(checkpoint);
    fflush(stdout);
    loom_checkpoint_close(checkpoint);
    return status ? loom_cli_fail(status) : 0;
}
