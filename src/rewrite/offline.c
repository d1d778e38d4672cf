/* All ranks of a layout, one after the other: each one's sharded state says what it would write, and the chunks are
 * made from whatever holds the state. The invariant: a checkpoint from here and one from a run of that layout hold the
 * same keys, chunks and objects, since both ask the same arithmetic. */
#include "rewrite/offline.h"
#include "checkpoint/context.h"
#include "checkpoint/writer.h"
#include "config/sizes.h"
#include "ddp/plan.h"
#include "format/file.h"
#include "model/gpt.h"
#include "model/huggingface_directory.h"
#include "state/state.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the layout */

static int64_t bucket_size(const loom_megatron_strategy_config *strategy, int64_t dp) {
    const loom_ddp_config *config = &strategy->ddp_config;
    bool pytorch = strategy->ddp && strcmp(strategy->ddp, "pytorch") == 0;
    if (pytorch || !config->overlap_grad_reduce)
        return -1;
    return config->bucket_size ? config->bucket_size : loom__ddp_default_bucket_size(dp);
}

static loom_status make_stages(const loom_run_config *config, loom__offline_layout *out) {
    loom_stage_split split = loom_stage_split_of(&config->strategy, &config->model.config);
    int64_t pp = split.pipeline_model_parallel_size;
    LOOM_TRY(loom_stage_split_chunks(&split, &out->sharded.chunks));
    out->stages = calloc((size_t)(out->sharded.chunks * pp), sizeof *out->stages);
    if (!out->stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld stages", (long long)pp);
    out->stages[0] = (loom_stage){.layers = split.layers, .embedding = true, .loss = true};
    return pp > 1 ? loom_stage_split_make(&split, out->stages) : LOOM_OK;
}

static loom_status make_layout(const loom_run_config *config, int64_t world, loom__offline_layout *out) {
    const loom_megatron_strategy_config *strategy = &config->strategy;
    bool shards = strategy->ddp_config.use_distributed_optimizer;
    loom_parallel_sizes sizes = loom__strategy_sizes(strategy, world);
    loom_model_config model = config->model.config;
    LOOM_TRY(loom_megatron_strategy_config_check(strategy));
    LOOM_TRY(loom_layout_init(&sizes, &out->ranks));
    const loom__model_ranks ranks = {sizes.tensor, 1, out->ranks.sizes.expert, out->ranks.sizes.expert_tensor,
        strategy->sequence_parallel && strategy->tensor_model_parallel_size > 1};
    LOOM_TRY(loom__model_config_complete_on(&model, &ranks));
    LOOM_TRY(loom__model_spec_create(&model, &out->spec));
    LOOM_TRY(make_stages(config, out));
    int64_t dp = loom_layout_data_parallel_size(&out->ranks);
    int64_t all = dp * sizes.context / strategy->num_distributed_optimizer_instances;
    out->sharded.spec = out->spec;
    out->sharded.stages = out->stages;
    out->sharded.tp = sizes.tensor;
    out->sharded.pp = sizes.pipeline;
    out->sharded.dp = shards ? all : 1;
    out->sharded.etp = out->ranks.sizes.expert_tensor;
    out->sharded.ep = out->ranks.sizes.expert;
    out->sharded.edp = shards ? out->ranks.expert_data / strategy->num_distributed_optimizer_instances : 1;
    out->sharded.bucket_size = bucket_size(strategy, dp);
    out->sharded.pad_for_high_busbw = strategy->ddp_config.pad_buckets_for_high_nccl_busbw;
    return LOOM_OK;
}

loom_status loom__offline_layout_make(const loom_run_config *config, int64_t world, loom__offline_layout *layout) {
    loom__offline_layout made = {0};
    loom_status status = make_layout(config, world, &made);
    if (status) {
        loom__offline_layout_free(&made);
        return status;
    }
    *layout = made;
    return LOOM_OK;
}

void loom__offline_layout_free(loom__offline_layout *layout) {
    loom__model_spec_destroy(layout->spec);
    free(layout->stages);
    *layout = (loom__offline_layout){0};
}

/* ---- one rank */

typedef struct writing {
    const loom__offline_save *save;
    loom_value_pool *pool;
    loom__checkpoint_description *descriptions;
    int64_t description_count;
    uint64_t done, all; /* bytes of elements */
    void *chunk;        /* room for the largest so far */
    size_t room;
} writing;

typedef struct rank_state {
    loom__sharded_place place;
    loom__part *part;
    loom__state_buckets *buckets; /* NULL without dp_reshardable */
    loom__sharded_state *state;
} rank_state;

static void rank_free(rank_state *rank) {
    loom__sharded_state_destroy(rank->state);
    loom__state_buckets_destroy(rank->buckets);
    loom__part_destroy(rank->part);
}

static loom_status rank_make(const loom__offline_save *save, int64_t number, rank_state *rank) {
    const loom__sharded_layout *layout = &save->layout->sharded;
    loom_layout_rank at;
    if (!loom_layout_rank_describe(&save->layout->ranks, number, &at))
        return loom_fail(LOOM_ERR_INTERNAL, "rank %lld is none of the layout", (long long)number);
    rank->place = (loom__sharded_place){.stage = at.pp,
        .tp_rank = at.tp,
        .dp_rank = at.dp_cp,
        .etp_rank = at.etp,
        .ep_rank = at.ep,
        .edp_rank = at.edp};
    LOOM_TRY(loom__sharded_part(layout, rank->place.stage, rank->place.ep_rank, &rank->part));
    if (save->options->form == LOOM__OPTIMIZER_DP_RESHARDABLE)
        LOOM_TRY(loom__state_buckets_create(layout, rank->part, rank->place.stage, &rank->buckets));
    return loom__sharded_state_create(layout, save->options, rank->part, &rank->place, &rank->state);
}

static loom_status write_object(
    const writing *w, const rank_state *rank, const loom__state_entry *entry, loom__checkpoint_writer *to) {
    const loom_value *list = NULL;
    LOOM_TRY(loom__object_value(w->pool, entry, w->save->options, rank->buckets, w->save->optimizer, &list));
    return loom__checkpoint_file_object(to, entry->key, list);
}

static loom_status write_tensor(
    writing *w, const rank_state *rank, const loom__state_entry *entry, loom__checkpoint_writer *to) {
    const loom__offline_save *save = w->save;
    size_t bytes = (size_t)entry->count * loom_dtype_size(entry->dtype);
    if (bytes > w->room) {
        free(w->chunk);
        w->room = 0;
        w->chunk = malloc(bytes);
        if (!w->chunk)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a chunk of %zu bytes of %s", bytes, entry->key);
        w->room = bytes;
    }
    if (entry->entry < 0) {
        memset(w->chunk, 0, bytes);
    } else {
        loom__reshard_want want = {.array = entry->array,
            .canonical = rank->part->entries[entry->entry].canonical,
            .first = entry->at,
            .count = entry->count};
        const loom__sharded_layout *layout = &save->layout->sharded;
        const loom__parameter_descriptor *parameter = &layout->spec->parameters[want.canonical];
        LOOM_TRY(save->read(save->read_context, layout->spec, loom__layout_tensor_size(layout, parameter),
            loom__place_tensor_rank(&rank->place, parameter), &want, entry->dtype, w->chunk));
    }
    LOOM_TRY(loom__checkpoint_file_tensor(
        to, entry->key, entry->dtype, entry->dims, entry->shape, entry->offset, entry->size, w->chunk));
    w->done += bytes;
    if (save->progress && save->progress->report)
        save->progress->report(save->progress->context, w->done < w->all ? w->done : w->all, w->all);
    return LOOM_OK;
}

static loom_status write_entries(writing *w, const rank_state *rank, loom__checkpoint_writer *to) {
    for (int objects = 1; objects >= 0; objects--)
        for (int64_t i = 0; i < rank->state->count; i++) {
            const loom__state_entry *entry = &rank->state->entries[i];
            if (!loom__state_entry_is_main(entry) || (entry->object != LOOM__STATE_TENSOR) != objects)
                continue;
            LOOM_TRY(objects ? write_object(w, rank, entry, to) : write_tensor(w, rank, entry, to));
        }
    return LOOM_OK;
}

static loom_status write_rank(writing *w, const rank_state *rank, int64_t number) {
    loom__checkpoint_writer *to = NULL;
    int64_t count = 0;
    for (int64_t i = 0; i < rank->state->count; i++)
        count += loom__state_entry_is_main(&rank->state->entries[i]);
    if (count == 0)
        return LOOM_OK;
    LOOM_TRY(loom__checkpoint_file_create(w->save->path, (int)number, 0, &to));
    loom_status status = write_entries(w, rank, to);
    if (!status)
        status = loom__checkpoint_file_finish(to, &w->descriptions[w->description_count]);
    w->description_count += !status;
    loom__checkpoint_writer_destroy(to);
    return status;
}

/* ---- all of them */

/* What is written, gaps between parameters and copies for other tensor ranks left out. */
static uint64_t bytes_of(const loom__offline_save *save) {
    const loom__sharded_options *options = save->options;
    size_t each = loom_dtype_size(options->param_dtype);
    bool masters = options->form > LOOM__OPTIMIZER_WHOLE ||
                   (options->form == LOOM__OPTIMIZER_WHOLE && options->param_dtype != LOOM_F32);
    each += masters ? sizeof(float) : 0;
    for (int i = 0; options->form != LOOM__OPTIMIZER_ABSENT && i < options->moments; i++)
        each += loom_dtype_size(options->moment[i].dtype);
    uint64_t elements = 0;
    for (int64_t i = 0; i < save->layout->spec->count; i++)
        elements += (uint64_t)save->layout->spec->parameters[i].padded_rows *
                    (uint64_t)save->layout->spec->parameters[i].shape[1];
    return elements * each;
}

loom_status loom__tool_copy_config(const char *source, const char *folder) {
    char path[4096], *text = NULL;
    size_t length = 0;
    LOOM_TRY(loom__hf_read_config_text(source, path, sizeof path, &text, &length));
    char *ended = strndup(text, length);
    loom_status status = ended ? loom__hf_directory_write(folder, "config.json", ended)
                               : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    free(ended);
    free(text);
    return status;
}

/* The token ids are in config.json. */
static loom_status copy_companions(const loom__offline_save *save) {
    char *folder = loom__path_join(save->path, ".tmp/", LOOM__CONTEXT_FOLDER);
    char *config = loom__path_join(save->companions, "/", "config.json");
    loom_status status = folder && config ? loom__hf_directory_copy_companions(save->companions, folder)
                                          : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory for a path", save->path);
    if (!status && access(config, F_OK) == 0)
        status = loom__tool_copy_config(save->companions, folder);
    free(config);
    free(folder);
    return status;
}

static loom_status write_ranks(writing *w) {
    int64_t ranks = loom_layout_world_size(&w->save->layout->ranks);
    for (int64_t r = 0; r < ranks; r++) {
        rank_state rank = {0};
        loom_status status = rank_make(w->save, r, &rank);
        if (!status)
            status = write_rank(w, &rank, r);
        rank_free(&rank);
        LOOM_TRY(status);
    }
    LOOM_TRY(loom__checkpoint_write_context(w->save->path, w->save->context, strlen(w->save->context)));
    if (w->save->companions)
        LOOM_TRY(copy_companions(w->save));
    return loom__checkpoint_commit(w->save->path, w->descriptions, w->description_count, w->save->common);
}

/* What an error leaves is removed; the error stays the first one. */
loom_status loom__tool_discard(const char *path, loom_status status) {
    char *message = strdup(loom_error_message()), *temporary = loom__path_join(path, "", ".tmp");
    loom_status removed = temporary ? loom__checkpoint_remove(temporary) : LOOM_OK;
    if (removed && message)
        status = loom_fail(status, "%s", message);
    free(temporary);
    free(message);
    return status;
}

loom_status loom__offline_write(const loom__offline_save *save) {
    writing w = {.save = save, .all = bytes_of(save)};
    int64_t ranks = loom_layout_world_size(&save->layout->ranks);
    LOOM_TRY(loom_value_pool_create(&w.pool));
    w.descriptions = calloc((size_t)ranks, sizeof *w.descriptions);
    loom_status status =
        w.descriptions ? loom__checkpoint_begin(save->path)
                       : loom_fail(LOOM_ERR_MEMORY, "out of memory for the files of %lld ranks", (long long)ranks);
    if (!status) {
        status = write_ranks(&w);
        if (status)
            status = loom__tool_discard(save->path, status);
    }
    for (int64_t i = 0; i < w.description_count; i++)
        free(w.descriptions[i].data);
    free(w.descriptions);
    free(w.chunk);
    loom_value_pool_destroy(w.pool);
    return status;
}

loom_status loom__tool_check_paths(const char *in, const char *out) {
    struct stat from, to;
    bool there = lstat(out, &to) == 0;
    if (!there && errno != ENOENT && errno != ENOTDIR)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be looked at: %s", out, strerror(errno));
    if (there && stat(in, &from) == 0 && stat(out, &to) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is what is read, expected another path to write to", out);
    if (there)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is there already, expected a path where nothing is", out);
    return LOOM_OK;
}

loom_status loom__tool_measure(const char *path, loom_tool_outcome *outcome) {
    loom_checkpoint *checkpoint = NULL;
    LOOM_TRY(loom_checkpoint_open(path, &checkpoint));
    outcome->tensors = loom_checkpoint_get_info(checkpoint)->tensors;
    outcome->bytes = 0;
    for (int64_t i = 0; i < outcome->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, i);
        outcome->bytes += (uint64_t)tensor->elements * loom_dtype_size(tensor->dtype);
    }
    loom_checkpoint_close(checkpoint);
    return LOOM_OK;
}
