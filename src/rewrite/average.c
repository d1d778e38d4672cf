/* The mean of weights. All checkpoints are open at once and read block by block, so that memory does not grow with
 * their number or size. The invariant: a block of the result is the weighted sum of the same blocks in the order of the
 * arguments, in double, rounded once. */
#include "checkpoint/context.h"
#include "checkpoint/writer.h"
#include "format/file.h"
#include "model/huggingface_directory.h"
#include "rewrite/convert.h"
#include "rewrite/offline.h"
#include "state/state.h"
#include <errno.h>
#include <math.h>
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct averaging {
    const char *const *paths;
    int64_t count;
    const char *out;
    const loom_tool_progress *progress;
    loom_checkpoint **checkpoints; /* [count] */
    double *shares;                /* [count] */
    int64_t tensor;                /* at work, of the first */
    uint64_t done, all;
    double *sum;
    void *block; /* of one checkpoint, then of the result */
    int64_t room;
    loom_safetensors_writer *safetensors;
    char *chunk; /* of the tensor at work, where chunks are written whole */
    size_t chunk_filled;
} averaging;

static bool is_weight(const char *name) {
    return !loom__is_of_optimizer(name);
}

static bool is_floating(loom_dtype dtype) {
    return dtype == LOOM_F64 || dtype == LOOM_F32 || dtype == LOOM_F16 || dtype == LOOM_BF16;
}

/* ---- the same structure */

typedef struct differences {
    FILE *to;
    int64_t count;
} differences;

static void shape_text(const loom_checkpoint_tensor *tensor, char text[160]) {
    size_t used = (size_t)snprintf(text, 160, "%s [", loom_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->dims && used < 140; i++)
        used += (size_t)snprintf(text + used, 160 - used, "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
    snprintf(text + used, 160 - used, "]");
}

/* The next tensor from `at` on that is a weight; NULL at the end. */
static const loom_checkpoint_tensor *next_weight(const loom_checkpoint *checkpoint, int64_t *at) {
    const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, *at);
    while (tensor && !is_weight(tensor->name))
        tensor = loom_checkpoint_tensor_at(checkpoint, ++*at);
    return tensor;
}

static void compare(const averaging *a, int64_t other, differences *found) {
    const char *first = a->paths[0], *second = a->paths[other];
    for (int64_t i = 0, j = 0;;) {
        const loom_checkpoint_tensor *x = next_weight(a->checkpoints[0], &i),
                                     *y = next_weight(a->checkpoints[other], &j);
        char left[160], right[160];
        if (!x && !y)
            return;
        int order = !x ? 1 : !y ? -1 : strcmp(x->name, y->name);
        bool differs = order != 0 || x->dtype != y->dtype || x->dims != y->dims ||
                       memcmp(x->shape, y->shape, sizeof x->shape) != 0;
        if (order != 0)
            fprintf(found->to, "\n%s: only in %s", order < 0 ? x->name : y->name, order < 0 ? first : second);
        else if (differs) {
            shape_text(x, left);
            shape_text(y, right);
            fprintf(found->to, "\n%s: %s in %s, %s in %s", x->name, left, first, right, second);
        }
        found->count += differs;
        i += order <= 0;
        j += order >= 0;
    }
}

static loom_status check_same(const averaging *a) {
    char *text = NULL;
    size_t length = 0;
    differences found = {.to = open_memstream(&text, &length)};
    if (!found.to)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of differences");
    for (int64_t i = 1; i < a->count; i++)
        compare(a, i, &found);
    bool failed = fclose(found.to) != 0;
    loom_status status = failed ? loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of differences") : LOOM_OK;
    if (!status && found.count > 0)
        status = loom_fail(LOOM_ERR_ARGUMENT,
            "average: the checkpoints differ in %lld tensor%s, expected the same in all:%s", (long long)found.count,
            found.count == 1 ? "" : "s", text);
    free(text);
    return status;
}

/* ---- blocks */

static loom_status make_room(averaging *a, int64_t elements) {
    if (elements <= a->room)
        return LOOM_OK;
    free(a->sum);
    free(a->block);
    a->room = 0;
    a->sum = malloc((size_t)elements * sizeof *a->sum);
    a->block = malloc((size_t)elements * sizeof(double));
    if (!a->sum || !a->block)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a block of %lld elements", (long long)elements);
    a->room = elements;
    return LOOM_OK;
}

static double element(const void *block, loom_dtype dtype, int64_t i) {
    const uint16_t *narrow = block;
    switch (dtype) {
    case LOOM_F64:
        return ((const double *)block)[i];
    case LOOM_F32:
        return (double)((const float *)block)[i];
    case LOOM_BF16:
        return (double)loom_bf16_to_f32(narrow[i]);
    default:
        return (double)loom_f16_to_f32(narrow[i]);
    }
}

/* The rounding to fp32 of a sum that is nearly exact and then to 16 bits could go the wrong way at a tie: the first is
 * to odd, which leaves the second right. */
static float round_to_odd(double value) {
    float rounded = (float)value;
    if ((double)rounded == value || !isfinite(rounded))
        return rounded;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    if (fabs((double)rounded) > fabs(value))
        bits--; /* towards zero */
    bits |= 1;
    memcpy(&rounded, &bits, sizeof bits);
    return rounded;
}

static void put(void *block, loom_dtype dtype, int64_t i, double value) {
    uint16_t *narrow = block;
    switch (dtype) {
    case LOOM_F64:
        ((double *)block)[i] = value;
        break;
    case LOOM_F32:
        ((float *)block)[i] = (float)value;
        break;
    case LOOM_BF16:
        narrow[i] = loom_f32_to_bf16(round_to_odd(value));
        break;
    default:
        narrow[i] = loom_f32_to_f16(round_to_odd(value));
    }
}

static loom_status read_one(averaging *a, int64_t number, const char *name, const int64_t *offsets,
    const int64_t *sizes, loom_dtype dtype, void *out) {
    const loom_checkpoint_tensor *tensor = NULL;
    LOOM_TRY(loom_checkpoint_find_tensor(a->checkpoints[number], name, &tensor));
    return loom_checkpoint_read(a->checkpoints[number], tensor, offsets, sizes, dtype, out);
}

static loom_status check_equal(
    averaging *a, const loom_checkpoint_tensor *tensor, const int64_t *offsets, const int64_t *sizes, size_t bytes) {
    for (int64_t i = 1; i < a->count; i++) {
        LOOM_TRY(read_one(a, i, tensor->name, offsets, sizes, tensor->dtype, a->sum));
        if (memcmp(a->sum, a->block, bytes) != 0)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "average: %s is of %s and not the same in %s and %s: it has no mean, expected equal values",
                tensor->name, loom_dtype_name(tensor->dtype), a->paths[0], a->paths[i]);
    }
    return LOOM_OK;
}

/* The mean of one block, in a->block. */
static loom_status average_block(averaging *a, const int64_t *offsets, const int64_t *sizes, int64_t elements) {
    const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(a->checkpoints[0], a->tensor);
    size_t bytes = (size_t)elements * loom_dtype_size(tensor->dtype);
    LOOM_TRY(make_room(a, elements));
    LOOM_TRY(read_one(a, 0, tensor->name, offsets, sizes, tensor->dtype, a->block));
    a->done += bytes;
    if (a->progress->report)
        a->progress->report(a->progress->context, a->done, a->all);
    if (!is_floating(tensor->dtype))
        return check_equal(a, tensor, offsets, sizes, bytes);
    memset(a->sum, 0, (size_t)elements * sizeof *a->sum);
    for (int64_t i = 0; i < a->count; i++) {
        if (i > 0)
            LOOM_TRY(read_one(a, i, tensor->name, offsets, sizes, tensor->dtype, a->block));
        for (int64_t e = 0; e < elements; e++)
            a->sum[e] += a->shares[i] * element(a->block, tensor->dtype, e);
    }
    for (int64_t e = 0; e < elements; e++) {
        put(a->block, tensor->dtype, e, a->sum[e]);
        if (!isfinite(element(a->block, tensor->dtype, e)))
            return loom_fail(LOOM_ERR_NUMERIC, "average: %s has an element whose mean is %g, which is no finite %s",
                tensor->name, a->sum[e], loom_dtype_name(tensor->dtype));
    }
    return LOOM_OK;
}

/* ---- as a checkpoint */

static loom_status take_block(void *context, const int64_t *offsets, const int64_t *sizes, int64_t elements) {
    averaging *a = context;
    loom_dtype dtype = loom_checkpoint_tensor_at(a->checkpoints[0], a->tensor)->dtype;
    size_t bytes = (size_t)elements * loom_dtype_size(dtype);
    LOOM_TRY(average_block(a, offsets, sizes, elements));
    memcpy(a->chunk + a->chunk_filled, a->block, bytes);
    a->chunk_filled += bytes;
    return LOOM_OK;
}

static loom_status write_chunk(
    averaging *a, const loom_checkpoint_tensor *tensor, int64_t number, loom__checkpoint_writer *to) {
    const loom_checkpoint_chunk *chunk = &tensor->chunks[number];
    size_t bytes = loom_dtype_size(tensor->dtype);
    for (int i = 0; i < tensor->dims; i++)
        bytes *= (size_t)chunk->sizes[i];
    a->chunk = malloc(bytes + 1);
    a->chunk_filled = 0;
    if (!a->chunk)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a chunk of %zu bytes of %s", bytes, tensor->name);
    loom_status status = loom__walk_blocks(tensor->dims, chunk->offsets, chunk->sizes, take_block, a);
    if (!status)
        status = loom__checkpoint_file_tensor(
            to, tensor->name, tensor->dtype, tensor->dims, tensor->shape, chunk->offsets, chunk->sizes, a->chunk);
    free(a->chunk);
    a->chunk = NULL;
    return status;
}

static loom_status write_objects(averaging *a, loom_value_pool *pool, loom__checkpoint_writer *to) {
    const loom_checkpoint *first = a->checkpoints[0];
    for (int64_t i = 0; i < loom_checkpoint_get_info(first)->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(first, i);
        const loom_value *value = NULL;
        if (!is_weight(object->name))
            continue;
        LOOM_TRY(loom_checkpoint_read_object(first, object, pool, &value));
        LOOM_TRY(loom__checkpoint_file_object(to, object->name, value));
    }
    return LOOM_OK;
}

/* Without what tells of an optimizer. */
static loom_status make_common(const averaging *a, loom_value_pool *pool, loom_value **out) {
    static const char *const dropped[] = {"optimizer", "opt_param_scheduler", "lr_schedulers"};
    const loom_value *from = loom_checkpoint_get_info(a->checkpoints[0])->common;
    LOOM_TRY(loom_value_dict(pool, out));
    for (int64_t i = 0; from && from->kind == LOOM_VALUE_DICT && i < from->count; i++) {
        const loom_value *key = from->items[2 * i], *value = from->items[2 * i + 1];
        bool keeps = true;
        for (size_t k = 0; k < sizeof dropped / sizeof *dropped; k++)
            keeps = keeps && !loom_value_is_text(key, dropped[k]);
        if (loom_value_is_text(key, "content_metadata") && value->kind == LOOM_VALUE_DICT) {
            loom_value *content = NULL;
            LOOM_TRY(loom_value_dict(pool, &content));
            for (int64_t k = 0; k < value->count; k++)
                if (!loom_value_is_text(value->items[2 * k], "distrib_optim_sharding_type"))
                    LOOM_TRY(loom_value_set_pair(pool, content, value->items[2 * k], value->items[2 * k + 1]));
            value = content;
        }
        if (keeps)
            LOOM_TRY(loom_value_set_pair(pool, *out, key, value));
    }
    return LOOM_OK;
}

static loom_status write_file(averaging *a, loom_value_pool *pool, loom__checkpoint_description *description) {
    const loom_checkpoint *first = a->checkpoints[0];
    loom__checkpoint_writer *to = NULL;
    LOOM_TRY(loom__checkpoint_file_create(a->out, 0, 0, &to));
    loom_status status = write_objects(a, pool, to);
    for (a->tensor = 0; !status && a->tensor < loom_checkpoint_get_info(first)->tensors; a->tensor++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(first, a->tensor);
        for (int64_t c = 0; !status && is_weight(tensor->name) && c < tensor->chunk_count; c++)
            status = write_chunk(a, tensor, c, to);
    }
    if (!status)
        status = loom__checkpoint_file_finish(to, description);
    loom__checkpoint_writer_destroy(to);
    return status;
}

static loom_status write_checkpoint(averaging *a, loom_value_pool *pool) {
    const char *context = loom_checkpoint_get_info(a->checkpoints[0])->context;
    loom__checkpoint_description description = {0};
    loom_value *common = NULL;
    LOOM_TRY(make_common(a, pool, &common));
    LOOM_TRY(write_file(a, pool, &description));
    loom_status status = context ? loom__checkpoint_copy_context(a->out, context) : LOOM_OK;
    if (!status)
        status = loom__checkpoint_commit(a->out, &description, 1, common);
    free(description.data);
    return status;
}

static loom_status to_checkpoint(averaging *a) {
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom__checkpoint_begin(a->out);
    if (!status) {
        status = write_checkpoint(a, pool);
        if (status)
            status = loom__tool_discard(a->out, status);
    }
    loom_value_pool_destroy(pool);
    return status;
}

/* ---- as safetensors */

static loom_status write_block(void *context, const int64_t *offsets, const int64_t *sizes, int64_t elements) {
    averaging *a = context;
    loom_dtype dtype = loom_checkpoint_tensor_at(a->checkpoints[0], a->tensor)->dtype;
    LOOM_TRY(average_block(a, offsets, sizes, elements));
    return loom_safetensors_writer_write(a->safetensors, a->block, (size_t)elements * loom_dtype_size(dtype));
}

static loom_status write_safetensors(averaging *a, const char *path) {
    static const int64_t zero[LOOM_CHECKPOINT_MAX_DIMS];
    const loom_checkpoint *first = a->checkpoints[0];
    int64_t count = loom_checkpoint_get_info(first)->tensors;
    LOOM_TRY(loom_safetensors_writer_create(path, &a->safetensors));
    LOOM_TRY(loom_safetensors_writer_metadata(a->safetensors, "format", "pt")); /* transformers asks for it */
    LOOM_TRY(loom_safetensors_writer_metadata(a->safetensors, "producer", LOOM__HF_PRODUCER));
    for (int64_t i = 0; i < count; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(first, i);
        LOOM_TRY(loom_safetensors_writer_add(a->safetensors, tensor->name, tensor->dtype, tensor->dims, tensor->shape));
    }
    for (a->tensor = 0; a->tensor < count; a->tensor++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(first, a->tensor);
        LOOM_TRY(loom__walk_blocks(tensor->dims, zero, tensor->shape, write_block, a));
    }
    return loom_safetensors_writer_finish(a->safetensors);
}

static loom_status fill_directory(averaging *a, const char *temporary) {
    char *weights = loom__path_join(temporary, "/", "model.safetensors");
    loom_status status = weights ? loom__tool_copy_config(a->paths[0], temporary)
                                 : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", a->out);
    if (!status)
        status = loom__hf_directory_copy_companions(a->paths[0], temporary);
    if (!status)
        status = write_safetensors(a, weights);
    free(weights);
    return status;
}

static loom_status to_directory(averaging *a) {
    char *temporary = NULL;
    int lock = -1;
    LOOM_TRY(loom__hf_directory_begin(a->out, &temporary, &lock));
    loom_status status = fill_directory(a, temporary);
    if (!status)
        status = loom__hf_directory_commit(a->out);
    else
        loom__hf_directory_discard(temporary);
    close(lock);
    free(temporary);
    return status;
}

/* ---- the whole */

static loom_status make_shares(averaging *a, const double *weights) {
    double sum = 0;
    a->shares = calloc((size_t)a->count, sizeof *a->shares);
    if (!a->shares)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld checkpoints", (long long)a->count);
    for (int64_t i = 0; i < a->count; i++) {
        a->shares[i] = weights ? weights[i] : 1;
        sum += a->shares[i];
    }
    if (!isfinite(sum) || sum == 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "average: the weights have the sum %g, expected finite numbers whose sum is not 0", sum);
    for (int64_t i = 0; i < a->count; i++)
        a->shares[i] /= sum;
    return LOOM_OK;
}

static loom_status open_all(averaging *a) {
    a->checkpoints = calloc((size_t)a->count, sizeof(loom_checkpoint *));
    if (!a->checkpoints)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld checkpoints", (long long)a->count);
    for (int64_t i = 0; i < a->count; i++) {
        LOOM_TRY(loom__tool_check_paths(a->paths[i], a->out));
        LOOM_TRY(loom_checkpoint_open(a->paths[i], &a->checkpoints[i]));
    }
    for (int64_t i = 0; i < loom_checkpoint_get_info(a->checkpoints[0])->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(a->checkpoints[0], i);
        if (is_weight(tensor->name))
            a->all += (uint64_t)tensor->elements * loom_dtype_size(tensor->dtype);
    }
    return check_same(a);
}

static bool drops_optimizer(const averaging *a) {
    for (int64_t c = 0; c < a->count; c++)
        for (int64_t i = 0; i < loom_checkpoint_get_info(a->checkpoints[c])->tensors; i++)
            if (!is_weight(loom_checkpoint_tensor_at(a->checkpoints[c], i)->name))
                return true;
    return false;
}

static loom_status average(averaging *a, const loom_average_options *options, loom_tool_outcome *outcome) {
    struct stat found;
    if (a->count < 2)
        return loom_fail(LOOM_ERR_ARGUMENT, "average: found %lld checkpoint, expected at least 2", (long long)a->count);
    LOOM_TRY(make_shares(a, options->weights));
    LOOM_TRY(open_all(a));
    outcome->dropped_optimizer = drops_optimizer(a);
    bool safetensors = loom_checkpoint_get_info(a->checkpoints[0])->format == LOOM_CHECKPOINT_SAFETENSORS;
    bool directory = stat(a->paths[0], &found) == 0 && S_ISDIR(found.st_mode);
    if (!safetensors)
        LOOM_TRY(to_checkpoint(a));
    else
        LOOM_TRY(directory ? to_directory(a) : write_safetensors(a, a->out));
    return loom__tool_measure(a->out, outcome);
}

loom_status loom_checkpoint_average(const char *const *paths, int64_t count, const char *out,
    const loom_average_options *options, loom_tool_outcome *outcome) {
    static const loom_average_options none;
    loom_tool_outcome made = {0};
    options = options ? options : &none;
    averaging a = {.paths = paths, .count = count, .out = out, .progress = &options->progress};
    loom_status status = average(&a, options, &made);
    for (int64_t i = 0; a.checkpoints && i < count; i++)
        loom_checkpoint_close(a.checkpoints[i]);
    loom_safetensors_writer_destroy(a.safetensors);
    free(a.checkpoints);
    free(a.shares);
    free(a.sum);
    free(a.block);
    if (!status && outcome)
        *outcome = made;
    return status;
}
