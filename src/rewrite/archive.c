/* A checkpoint without ranks. It is opened as a load opens it, for the model whole, and then gives any part of any
 * rank's tensors; so the tools that rewrite a checkpoint never hold more than what they write at once. The invariant:
 * what opens is complete, so that a tool fails before it has written anything. */
#include "rewrite/archive.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- what is stored */

/* A tool's checkpoint is one module's, the main one's. */
static loom__load_scope scope_of(const loom__archive *a) {
    return (loom__load_scope){.checkpoint = a->checkpoint, .root = loom_checkpoint_get_info(a->checkpoint)->common};
}

static const char *skip(const char *text, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) == 0 ? text + length : NULL;
}

/* Behind the number of one of several optimizers. */
static const char *skip_chain(const char *key) {
    const char *inner = skip(key, "chained_0.");
    if (!inner)
        inner = skip(key, "chained_1.");
    return inner ? inner : key;
}

/* Whether the key is of that array of an optimizer: "optimizer.state.NAME.…" or "optimizer.distributed.….NAME". */
static bool is_of_moment(const char *key, const char *name) {
    key = skip_chain(key);
    const char *state = skip(key, "optimizer.state.");
    size_t length = strlen(name);
    if (state)
        return strncmp(state, name, length) == 0 && state[length] == '.';
    const char *last = skip(key, "optimizer.distributed.") ? strrchr(key, '.') : NULL;
    return last && strcmp(last + 1, name) == 0;
}

static void find_moments(loom__archive *a) {
    static const char *const names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"};
    for (size_t n = 0; n < sizeof names / sizeof *names && a->moments < LOOM__STATE_MOMENTS; n++)
        for (int64_t i = 0; i < a->stored.count; i++)
            if (is_of_moment(a->stored.tensors[i].key, names[n])) {
                loom_dtype dtype = loom__stored_tensor_of(&a->stored, i)->dtype;
                a->moment[a->moments++] = (struct loom__sharded_moment){names[n], dtype};
                break;
            }
}

static loom_status find_dtype(loom__archive *a) {
    static const char name[] = "embedding.word_embeddings.weight";
    for (int64_t i = 0; i < a->stored.count; i++) {
        const char *inner = skip(a->stored.tensors[i].key, "module.");
        if (strcmp(inner ? inner : a->stored.tensors[i].key, name) != 0)
            continue;
        loom_dtype dtype = a->param_dtype = loom__stored_tensor_of(&a->stored, i)->dtype;
        return dtype == LOOM_F32 || dtype == LOOM_BF16 || dtype == LOOM_F16
                   ? LOOM_OK
                   : loom_fail(LOOM_ERR_FORMAT, "%s: %s: found dtype %s, expected F32, BF16 or F16",
                         loom_checkpoint_get_info(a->checkpoint)->path, a->stored.tensors[i].key,
                         loom_dtype_name(dtype));
    }
    return loom_fail(LOOM_ERR_NOT_FOUND, "%s: has no %s: expected the checkpoint of a decoder-only model",
        loom_checkpoint_get_info(a->checkpoint)->path, name);
}

static loom_status find_optimizer(loom__archive *a) {
    const loom__load_scope scope = scope_of(a);
    a->has_optimizer = loom_value_get(scope.root, "optimizer") != NULL || a->moments > 0;
    return loom__optimizer_values_read(&scope, a->pool, &a->optimizer);
}

/* ---- sorted to the model */

/* What is wrong with a checkpoint: how many names of each kind, and as many of them as a message has room for. */
typedef enum kind { MISSING, UNEXPECTED, MISSHAPED, KINDS } kind;
typedef struct names {
    char text[KINDS][1000];
    size_t used[KINDS];
    int64_t count[KINDS];
} names;

static void add_name(names *to, kind of, const char *prefix, const char *name) {
    static const char more[] = ", …";
    char *text = to->text[of] + to->used[of];
    size_t length = strlen(prefix) + strlen(name) + 2, room = sizeof to->text[of] - sizeof more - to->used[of];
    if (length < room)
        to->used[of] += (size_t)snprintf(text, length + 1, "%s%s%s", to->count[of] ? ", " : "", prefix, name);
    else if (room > 0) {
        memcpy(text, more, sizeof more);
        to->used[of] = sizeof to->text[of] - sizeof more;
    }
    to->count[of]++;
}

static loom_status say_names(const names *list, const char *path) {
    static const char *const what[] = {
        [MISSING] = "missing", [UNEXPECTED] = "unexpected", [MISSHAPED] = "of another shape"};
    char text[KINDS][1100] = {"", "", ""};
    bool any = false;
    for (int i = 0; i < KINDS; i++) {
        if (list->count[i])
            snprintf(text[i], sizeof text[i], "%s %lld %s (%s)", any ? "," : "", (long long)list->count[i], what[i],
                list->text[i]);
        any = any || list->count[i];
    }
    if (!any)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_NOT_FOUND, "%s does not hold the state of this model:%s%s%s", path, text[MISSING],
        text[UNEXPECTED], text[MISSHAPED]);
}

static loom_status list_missing(const loom__archive *a, int array, const char *prefix, names *to, int64_t *missing) {
    loom__reshard_plan *plan = NULL;
    LOOM_TRY(loom__stored_plan_whole(&a->stored, a->spec, array, &plan));
    *missing = plan->missing_count;
    for (int64_t i = 0; to && i < plan->missing_count; i++)
        add_name(to, MISSING, prefix, a->spec->parameters[plan->missing[i]].name);
    loom__reshard_plan_destroy(plan);
    return LOOM_OK;
}

static loom_status check_complete(loom__archive *a, names *to) {
    loom__reshard_leftover left = loom__reshard_source_leftover(a->stored.source);
    int64_t missing = 0;
    LOOM_TRY(list_missing(a, LOOM__STATE_WEIGHT, "", to, &missing));
    LOOM_TRY(list_missing(a, LOOM__STATE_MASTER, "", NULL, &missing));
    a->has_masters = missing < a->spec->count;
    if (a->has_masters)
        LOOM_TRY(list_missing(a, LOOM__STATE_MASTER, "optimizer.state.param.", to, &missing));
    for (int i = 0; i < a->moments; i++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "optimizer.state.%s.", a->moment[i].name);
        LOOM_TRY(list_missing(a, LOOM__STATE_MOMENT + i, prefix, to, &missing));
    }
    for (int64_t i = 0; i < left.unexpected_count; i++)
        add_name(to, UNEXPECTED, "", a->stored.tensors[left.unexpected[i]].key);
    for (int64_t i = 0; i < left.misshaped_count; i++)
        add_name(to, MISSHAPED, "", a->stored.tensors[left.misshaped[i]].key);
    return LOOM_OK;
}

static loom_status sort_in(loom__archive *a, bool weights_only) {
    const loom__load_scope scope = scope_of(a);
    names *list = calloc(1, sizeof *list);
    if (!list)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of names");
    loom__sharded_options options = {.prefix = "", .weights_alone = weights_only, .moments = a->moments};
    memcpy(options.moment, a->moment, sizeof options.moment);
    loom_status status = loom__stored_sort(&scope, a->spec, &options, &a->stored);
    if (!status)
        status = check_complete(a, list);
    if (!status)
        status = say_names(list, loom_checkpoint_get_info(a->checkpoint)->path);
    free(list);
    return status;
}

/* ---- from open to close */

static loom_status open_all(const char *path, const loom_model_config *given, bool weights_only, loom__archive *a) {
    loom_model_config config = *given;
    config.padded_vocab_size = 0;
    LOOM_TRY(loom__model_config_complete(&config, 1, false));
    LOOM_TRY(loom__model_spec_create(&config, &a->spec));
    LOOM_TRY(loom_value_pool_create(&a->pool));
    LOOM_TRY(loom_checkpoint_open(path, &a->checkpoint));
    const loom__load_scope scope = scope_of(a);
    LOOM_TRY(loom__stored_list(&scope, weights_only, &a->stored));
    LOOM_TRY(find_dtype(a));
    find_moments(a);
    if (!weights_only)
        LOOM_TRY(find_optimizer(a));
    return sort_in(a, weights_only);
}

loom_status loom__archive_open(
    const char *path, const loom_model_config *config, bool weights_only, loom__archive **out) {
    loom__archive *archive = calloc(1, sizeof *archive);
    if (!archive)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a checkpoint");
    loom_status status = open_all(path, config, weights_only, archive);
    if (status) {
        loom__archive_close(archive);
        return status;
    }
    *out = archive;
    return LOOM_OK;
}

void loom__archive_close(loom__archive *archive) {
    if (!archive)
        return;
    loom__stored_free(&archive->stored);
    loom_value_pool_destroy(archive->pool);
    loom_checkpoint_close(archive->checkpoint);
    loom__model_spec_destroy(archive->spec);
    free(archive);
}

/* ---- reading */

static float widened(const char *from, loom_dtype dtype) {
    uint16_t narrow;
    double wide;
    if (dtype == LOOM_F64) {
        memcpy(&wide, from, sizeof wide);
        return (float)wide;
    }
    memcpy(&narrow, from, sizeof narrow);
    return dtype == LOOM_BF16 ? loom_bf16_to_f32(narrow) : loom_f16_to_f32(narrow);
}

static void copy_box(const loom__box_copy *copy, const char *from, loom_dtype stored, char *to, loom_dtype dtype) {
    size_t size = loom_dtype_size(stored), wanted = loom_dtype_size(dtype);
    for (int64_t row = 0; row < copy->rows; row++) {
        const char *source = from + (size_t)(copy->from + row * copy->from_stride) * size;
        char *target = to + (size_t)(copy->to + row * copy->to_stride) * wanted;
        if (stored == dtype)
            memcpy(target, source, (size_t)copy->columns * size);
        for (int64_t i = 0; stored != dtype && i < copy->columns; i++) {
            float value = widened(source + (size_t)i * size, stored);
            memcpy(target + (size_t)i * wanted, &value, sizeof value);
        }
    }
}

static loom_status copy_chunk(const loom__archive *a, const loom__reshard_copy *copy, loom_dtype dtype, void *out) {
    const loom_checkpoint_tensor *tensor = loom__stored_tensor_of(&a->stored, copy->tensor);
    const void *data = NULL;
    loom_value_pool *pool = NULL;
    if (tensor->dtype != dtype &&
        (dtype != LOOM_F32 || (tensor->dtype != LOOM_F64 && tensor->dtype != LOOM_BF16 && tensor->dtype != LOOM_F16)))
        return loom_fail(LOOM_ERR_FORMAT, "checkpoint: %s: found dtype %s, expected %s", tensor->name,
            loom_dtype_name(tensor->dtype), loom_dtype_name(dtype));
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status =
        loom__checkpoint_chunk_data(a->checkpoint, (const loom__checkpoint_entry *)tensor, copy->chunk, pool, &data);
    if (!status)
        copy_box(&copy->copy, data, tensor->dtype, out, dtype);
    loom_value_pool_destroy(pool);
    return status;
}

loom_status loom__archive_read(const loom__archive *a, const loom__model_spec *spec, int64_t tp, int64_t tp_rank,
    const loom__reshard_want *wanted, loom_dtype dtype, void *out) {
    loom__reshard_want want = *wanted;
    loom__reshard_plan *plan = NULL;
    if (want.array == LOOM__STATE_MASTER && !a->has_masters)
        want.array = LOOM__STATE_WEIGHT;
    LOOM_TRY(loom__reshard_plan_create(a->stored.source, spec, tp, tp_rank, &want, 1, &plan));
    memset(out, 0, (size_t)want.count * loom_dtype_size(dtype));
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < plan->count && !status; i++)
        status = copy_chunk(a, &plan->copies[i], dtype, out);
    loom__reshard_plan_destroy(plan);
    return status;
}
