/* Tensors as they are, in a form that other programs read without knowing Megatron: one safetensors file, or what plain
 * torch.distributed.checkpoint writes. The invariant: names, shapes, dtypes and bits are those of the checkpoint. */
#include "checkpoint/writer.h"
#include "format/file.h"
#include "rewrite/convert.h"
#include "rewrite/offline.h"
#include <errno.h>
#include <fcntl.h>
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BLOCK_ELEMENTS = 1 << 22 };

/* Rows of axis 0 that make a block; where one is too large, of the next axis, one row of the first at a time. */
loom_status loom__walk_blocks(
    int dims, const int64_t *offsets, const int64_t *sizes, loom__block block, void *context) {
    int64_t at[LOOM_CHECKPOINT_MAX_DIMS] = {0}, part[LOOM_CHECKPOINT_MAX_DIMS] = {0}, row = 1;
    int axis = dims - 1;
    for (int i = 0; i < dims; i++) {
        if (sizes[i] == 0)
            return LOOM_OK;
        at[i] = offsets[i];
        part[i] = 1;
    }
    while (axis > 0 && row * sizes[axis] <= BLOCK_ELEMENTS) {
        part[axis] = sizes[axis];
        row *= sizes[axis--];
    }
    if (dims == 0)
        return block(context, at, part, 1);
    int64_t rows = BLOCK_ELEMENTS / row;
    for (;;) {
        int64_t left = offsets[axis] + sizes[axis] - at[axis];
        part[axis] = left < rows ? left : rows;
        LOOM_TRY(block(context, at, part, part[axis] * row));
        at[axis] += part[axis];
        int i = axis;
        while (i > 0 && at[i] == offsets[i] + sizes[i]) {
            at[i] = offsets[i];
            at[--i]++;
        }
        if (at[0] == offsets[0] + sizes[0])
            return LOOM_OK;
    }
}

typedef struct converting {
    const loom_checkpoint *checkpoint;
    const loom_checkpoint_tensor *tensor; /* the one at work */
    const loom_tool_progress *progress;
    uint64_t done, all; /* bytes of elements */
    void *block;
    size_t room;
    loom_safetensors_writer *safetensors;
    loom__checkpoint_writer *dcp;
} converting;

static uint64_t bytes_of(const loom_checkpoint_tensor *tensor) {
    return (uint64_t)tensor->elements * loom_dtype_size(tensor->dtype);
}

static loom_status read_box(converting *c, const int64_t *offsets, const int64_t *sizes, int64_t elements) {
    size_t bytes = (size_t)elements * loom_dtype_size(c->tensor->dtype);
    if (bytes > c->room) {
        free(c->block);
        c->room = 0;
        c->block = malloc(bytes);
        if (!c->block)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a block of %zu bytes", bytes);
        c->room = bytes;
    }
    LOOM_TRY(loom_checkpoint_read(c->checkpoint, c->tensor, offsets, sizes, c->tensor->dtype, c->block));
    c->done += bytes;
    if (c->progress->report)
        c->progress->report(c->progress->context, c->done, c->all);
    return LOOM_OK;
}

static loom_status write_block(void *context, const int64_t *offsets, const int64_t *sizes, int64_t elements) {
    converting *c = context;
    LOOM_TRY(read_box(c, offsets, sizes, elements));
    return loom_safetensors_writer_write(
        c->safetensors, c->block, (size_t)elements * loom_dtype_size(c->tensor->dtype));
}

static loom_status to_safetensors(converting *c, const char *out, loom_tool_outcome *outcome) {
    static const int64_t zero[LOOM_CHECKPOINT_MAX_DIMS];
    const loom_checkpoint_info *info = loom_checkpoint_get_info(c->checkpoint);
    LOOM_TRY(loom_safetensors_writer_create(out, &c->safetensors));
    LOOM_TRY(loom_safetensors_writer_metadata(c->safetensors, "format", "pt")); /* transformers asks for it */
    for (int64_t i = 0; i < info->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(c->checkpoint, i);
        LOOM_TRY(loom_safetensors_writer_add(c->safetensors, tensor->name, tensor->dtype, tensor->dims, tensor->shape));
    }
    for (int64_t i = 0; i < info->tensors; i++) {
        c->tensor = loom_checkpoint_tensor_at(c->checkpoint, i);
        LOOM_TRY(loom__walk_blocks(c->tensor->dims, zero, c->tensor->shape, write_block, c));
    }
    outcome->dropped_objects = info->common ? info->common->count : 0;
    for (int64_t i = 0; i < info->objects; i++)
        outcome->dropped_objects += !strstr(loom_checkpoint_object_at(c->checkpoint, i)->name, "_extra_state");
    return loom_safetensors_writer_finish(c->safetensors);
}

/* ---- plain DCP */

/* Those of the checkpoint, and the common state by its keys. */
static loom_status write_objects(converting *c, loom_tool_outcome *outcome, loom_value_pool *pool) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(c->checkpoint);
    const loom_value *common = info->common;
    for (int64_t i = 0; i < info->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(c->checkpoint, i);
        const loom_value *value = NULL;
        LOOM_TRY(loom_checkpoint_read_object(c->checkpoint, object, pool, &value));
        LOOM_TRY(loom__checkpoint_file_object(c->dcp, object->name, value));
    }
    for (int64_t i = 0; common && common->kind == LOOM_VALUE_DICT && i < common->count; i++) {
        const loom_value *key = common->items[2 * i];
        if (key->kind == LOOM_VALUE_TEXT)
            LOOM_TRY(loom__checkpoint_file_object(c->dcp, key->text, common->items[2 * i + 1]));
        else
            outcome->dropped_objects++;
    }
    return LOOM_OK;
}

static loom_status write_chunks(converting *c) {
    for (int64_t i = 0; i < loom_checkpoint_get_info(c->checkpoint)->tensors; i++) {
        const loom_checkpoint_tensor *tensor = c->tensor = loom_checkpoint_tensor_at(c->checkpoint, i);
        for (int64_t k = 0; k < tensor->chunk_count; k++) {
            const loom_checkpoint_chunk *chunk = &tensor->chunks[k];
            int64_t elements = 1;
            for (int axis = 0; axis < tensor->dims; axis++)
                elements *= chunk->sizes[axis];
            LOOM_TRY(read_box(c, chunk->offsets, chunk->sizes, elements));
            LOOM_TRY(loom__checkpoint_file_tensor(c->dcp, tensor->name, tensor->dtype, tensor->dims, tensor->shape,
                chunk->offsets, chunk->sizes, c->block));
        }
    }
    return LOOM_OK;
}

static loom_status write_metadata(const char *out, const loom__checkpoint_description *description) {
    loom__new_file file = {.descriptor = -1};
    void *pickle = NULL;
    size_t bytes = 0;
    LOOM_TRY(loom__checkpoint_make_metadata(out, description, 1, &pickle, &bytes));
    char *path = loom__path_join(out, ".tmp/", ".metadata");
    loom_status status =
        path ? loom__new_file_create(path, &file) : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", out);
    if (!status)
        status = loom__new_file_write(&file, pickle, bytes);
    if (!status)
        status = loom__new_file_sync(&file);
    if (!status)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    free(path);
    free(pickle);
    return status;
}

static loom_status put_in_place(const char *out) {
    char *temporary = loom__path_join(out, "", ".tmp");
    if (!temporary)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", out);
    loom_status status = LOOM_OK;
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, out, RENAME_NOREPLACE) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be renamed to %s: %m", temporary, out);
    free(temporary);
    return status;
}

static loom_status write_dcp(converting *c, const char *out, loom_tool_outcome *outcome, loom_value_pool *pool) {
    loom__checkpoint_description description = {0};
    LOOM_TRY(loom__checkpoint_file_create(out, 0, 0, &c->dcp));
    LOOM_TRY(write_objects(c, outcome, pool));
    LOOM_TRY(write_chunks(c));
    LOOM_TRY(loom__checkpoint_file_finish(c->dcp, &description));
    loom_status status = write_metadata(out, &description);
    free(description.data);
    return status ? status : put_in_place(out);
}

static loom_status to_dcp(converting *c, const char *out, loom_tool_outcome *outcome) {
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom__checkpoint_begin(out);
    if (!status) {
        status = write_dcp(c, out, outcome, pool);
        loom__checkpoint_writer_destroy(c->dcp);
        if (status)
            status = loom__tool_discard(out, status);
    }
    loom_value_pool_destroy(pool);
    return status;
}

loom_status loom__convert_raw(const char *in, const char *out, loom__raw_form form, const loom_tool_progress *progress,
    loom_tool_outcome *outcome) {
    loom_checkpoint *checkpoint = NULL;
    LOOM_TRY(loom_checkpoint_open(in, &checkpoint));
    converting c = {.checkpoint = checkpoint, .progress = progress};
    for (int64_t i = 0; i < loom_checkpoint_get_info(checkpoint)->tensors; i++)
        c.all += bytes_of(loom_checkpoint_tensor_at(checkpoint, i));
    loom_status status = form == LOOM__RAW_DCP ? to_dcp(&c, out, outcome) : to_safetensors(&c, out, outcome);
    loom_safetensors_writer_destroy(c.safetensors);
    free(c.block);
    loom_checkpoint_close(checkpoint);
    return status;
}
