/* What a checkpoint tells about the layout that wrote it. Where the common state says it, as Megaloom's does, or
 * objects carry it in their names (the random numbers of each rank), it is known; otherwise it is read off the chunks
 * of a weight that tensor parallelism cuts by its last axis, and the model-parallel groups of a distributed optimizer.
 */
#include "base/text.h"
#include "checkpoint/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>

/* R of "__R_N.distcp"; -1 for another name. */
static int64_t rank_of(const char *file) {
    long long rank = -1, number = -1;
    int end = 0;
    return sscanf(file, "__%lld_%lld.distcp%n", &rank, &number, &end) == 2 && end > 0 && file[end] == '\0' ? rank : -1;
}

static int by_number(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t count_different(int64_t *numbers, int64_t count) {
    int64_t different = 0;
    qsort(numbers, (size_t)count, sizeof *numbers, by_number);
    for (int64_t i = 0; i < count; i++)
        different += i == 0 || numbers[i] != numbers[i - 1];
    return different;
}

static void count_writers(loom_checkpoint *of, int64_t *numbers) {
    int64_t count = 0;
    for (int64_t i = 0; i < of->file_count; i++) {
        numbers[count] = rank_of(of->files[i].name);
        count += numbers[count] >= 0;
    }
    of->info.writers = count_different(numbers, count);
}

static bool read_layout(loom_checkpoint *of) {
    const loom_value *layout = loom_value_get(loom_value_get(of->info.common, "megaloom"), "layout");
    const loom_value *ranks = loom_value_get(layout, "tensor_model_parallel_size");
    const loom_value *stages = loom_value_get(layout, "pipeline_model_parallel_size");
    if (!ranks || !stages || ranks->kind != LOOM_VALUE_INT || stages->kind != LOOM_VALUE_INT || ranks->integer < 1 ||
        stages->integer < 1)
        return false;
    of->info.tensor_parallel = ranks->integer;
    of->info.pipeline_parallel = stages->integer;
    return true;
}

/* "rng_state/shard_p.t_P.T". */
static bool read_random_states(loom_checkpoint *of) {
    for (int64_t i = 0; i < of->info.objects; i++) {
        long long p, t, stages, ranks;
        if (sscanf(of->objects[i].object.name, "rng_state/shard_%lld.%lld_%lld.%lld", &p, &t, &stages, &ranks) == 4 &&
            stages > 0 && ranks > 0) {
            of->info.pipeline_parallel = stages;
            of->info.tensor_parallel = ranks;
            return true;
        }
    }
    return false;
}

/* Groups G of "optimizer.distributed.dp_group_idx_G.…": there is one for each (tensor, pipeline) rank. Those of
 * experts, of the second one of chained optimizers, are others. */
static int64_t count_groups(const loom_checkpoint *of) {
    int64_t groups = 0;
    for (int64_t i = 0; i < of->info.objects; i++) {
        const char *name = of->objects[i].object.name;
        const char *at = strncmp(name, "chained_1.", strlen("chained_1.")) ? strstr(name, "dp_group_idx_") : NULL;
        long long group = at ? atoll(at + 13) : -1;
        if (group >= groups)
            groups = group + 1;
    }
    return groups;
}

static const loom__checkpoint_entry *find_projection(const loom_checkpoint *of) {
    for (int64_t i = 0; i < of->info.tensors; i++)
        if (loom__ends_with(of->tensors[i].tensor.name, "self_attention.linear_proj.weight") &&
            of->tensors[i].tensor.original_dims == 0)
            return &of->tensors[i];
    return NULL;
}

static void guess(loom_checkpoint *of, int64_t groups) {
    const loom__checkpoint_entry *entry = find_projection(of);
    if (!entry || entry->tensor.chunk_count == 0)
        return;
    int last = entry->tensor.dims - 1;
    int64_t count = entry->tensor.chunk_count, pieces = 0;
    int64_t *numbers = calloc((size_t)count, sizeof *numbers);
    if (!numbers)
        return;
    for (int64_t i = 0; i < count; i++)
        numbers[i] = entry->chunks[i].offsets[last];
    pieces = count_different(numbers, count);
    of->info.tensor_parallel = pieces;
    if (groups > 0 && groups % pieces == 0)
        of->info.pipeline_parallel = groups / pieces;
    free(numbers);
}

void loom__checkpoint_hints(loom_checkpoint *checkpoint) {
    loom_checkpoint_info *info = &checkpoint->info;
    const loom_value *iteration = loom_value_get(info->common, "iteration");
    const loom_value *content = loom_value_get(info->common, "content_metadata");
    const loom_value *sharding = loom_value_get(content, "distrib_optim_sharding_type");
    if (!iteration)
        iteration = loom_value_get(info->common, "global_step");
    if (iteration && iteration->kind == LOOM_VALUE_INT && iteration->integer >= 0)
        info->iteration = iteration->integer;
    if (!sharding)
        sharding = loom_value_get(loom_value_get(info->common, "optimizer"), "param_state_sharding_type");
    if (sharding && sharding->kind == LOOM_VALUE_TEXT)
        info->optimizer_sharding = sharding->text;
    int64_t *numbers = calloc((size_t)checkpoint->file_count + 1, sizeof *numbers);
    if (numbers)
        count_writers(checkpoint, numbers);
    free(numbers);
    if (read_layout(checkpoint) || read_random_states(checkpoint))
        return;
    info->layout_is_guessed = true;
    guess(checkpoint, count_groups(checkpoint));
}
