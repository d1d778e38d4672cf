/* Megatron-Core does not say in a checkpoint how its ranks were laid out, since it reads buckets at the same layout
 * alone. Keys and chunks tell: what they leave open (cuts of layers that are not even, other bucket sizes) shows when
 * the lengths of the buckets are compared, so that a wrong guess never gives wrong numbers. */
#include "checkpoint/written.h"
#include <stdio.h>
#include <stdlib.h>

static bool is_embedding(const char *key) {
    const char *name = "embedding.word_embeddings.weight";
    return strcmp(key, name) == 0 || (strncmp(key, "module.", 7) == 0 && strcmp(key + 7, name) == 0);
}

static const char *behind(const char *text, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) == 0 ? text + length : text;
}

/* The tensor, or one of the tensors, whose columns the expert tensor ranks share. */
static bool is_of_experts(const char *key) {
    static const char end[] = "linear_fc2.weight";
    const char *inner = behind(key, "module.");
    size_t length = strlen(inner);
    return strncmp(inner, "decoder.layers.", strlen("decoder.layers.")) == 0 && strstr(inner, "mlp.experts.experts.") &&
           length > strlen(end) && strcmp(inner + length - strlen(end), end) == 0;
}

typedef struct seen {
    int64_t groups, buffers; /* buffers of the first group */
    int64_t expert_groups;
    const loom__stored_tensor *embedding, *experts;
} seen;

static seen look(const loom__stored_tensor *tensors, int64_t count) {
    seen s = {0};
    for (int64_t i = 0; i < count; i++) {
        long long group, buffer;
        const char *key = tensors[i].key, *of_experts = behind(key, "chained_1.");
        if (is_embedding(key))
            s.embedding = &tensors[i];
        if (is_of_experts(key))
            s.experts = &tensors[i];
        if (sscanf(of_experts > key ? of_experts : behind(key, "chained_0."),
                "optimizer.distributed.dp_group_idx_%lld.gbuf_idx_%lld.", &group, &buffer) != 2)
            continue;
        if (of_experts > key) {
            if (group >= s.expert_groups && group < INT32_MAX)
                s.expert_groups = group + 1;
            continue;
        }
        if (group >= s.groups && group < INT32_MAX)
            s.groups = group + 1;
        if (group == 0 && buffer >= s.buffers && buffer < INT32_MAX)
            s.buffers = buffer + 1;
    }
    return s;
}

/* A spec whose vocabulary is padded as the checkpoint's. */
static loom_status make_spec(
    const loom_model_config *config, const loom__stored_tensor *embedding, int64_t tp, loom__model_spec **spec) {
    loom_model_config written = *config;
    bool sequences_cut = tp > 1 && config->moe.num_moe_experts > 0;
    written.padded_vocab_size = embedding->shape[0];
    /* No parameter depends on the length of sequences, which need not be that of the run that wrote. */
    if (sequences_cut)
        written.seq_length = config->seq_length < tp ? tp : config->seq_length / tp * tp;
    LOOM_TRY(loom__model_config_complete(&written, tp, sequences_cut));
    return loom__model_spec_create(&written, spec);
}

/* As the columns of a chunk and the number of groups show; members of a group do not show, and need not. Without groups
 * of experts they are among the rest, cut as that is. */
static loom_status find_experts(const seen *s, int64_t pp, const loom_model_config *config, loom__sharded_layout *out) {
    const loom__stored_tensor *t = s->experts;
    if (config->moe.num_moe_experts == 0)
        return LOOM_OK;
    int64_t columns = t && t->chunk_count > 0 ? t->chunks[0].size[t->dims - 1] : 0;
    int64_t etp = columns > 0 ? t->shape[t->dims - 1] / columns : 0;
    out->etp = etp;
    out->ep = out->edp = 1;
    if (s->expert_groups == 0 && etp == out->tp)
        return LOOM_OK;
    if (etp < 1 || s->expert_groups % (pp * etp) != 0 || s->expert_groups < 1 ||
        config->moe.num_moe_experts % (s->expert_groups / (pp * etp)) != 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: found optimizer buckets of %lld groups of experts and weights of experts on %lld expert "
            "tensor ranks%s, expected a multiple of those times pipeline_model_parallel_size %lld, by which the %lld "
            "experts divide, or no groups and tensor_model_parallel_size %lld ranks",
            (long long)s->expert_groups, (long long)etp, t ? "" : " (none)", (long long)pp,
            (long long)config->moe.num_moe_experts, (long long)out->tp);
    out->ep = s->expert_groups / (pp * etp);
    return LOOM_OK;
}

static loom_status lay_out(const loom_model_config *config, const seen *s, loom__written *out) {
    int64_t tp = s->embedding->chunk_count, pp = s->groups / tp;
    loom_stage_split split = {.layers = config->num_layers,
        .pipeline_model_parallel_size = pp,
        .virtual_pipeline_model_parallel_size = pp > 1 && s->buffers > 1 ? s->buffers : 0};
    LOOM_TRY(make_spec(config, s->embedding, tp, &out->spec));
    out->layout = (loom__sharded_layout){.spec = out->spec,
        .tp = tp,
        .pp = pp,
        .dp = 1,
        .bucket_size = loom__ddp_default_bucket_size(1),
        .experts_apart = s->expert_groups > 0};
    LOOM_TRY(find_experts(s, pp, config, &out->layout));
    LOOM_TRY(loom_stage_split_chunks(&split, &out->layout.chunks));
    out->stages = calloc((size_t)(out->layout.chunks * pp), sizeof *out->stages);
    if (!out->stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld stages", (long long)pp);
    out->layout.stages = out->stages;
    return loom_stage_split_make(&split, out->stages);
}

loom_status loom__written_find(const loom_model_config *config, const loom__stored_tensor *tensors, int64_t count,
    loom__written *written, bool *found) {
    seen s = look(tensors, count);
    *found = s.groups > 0;
    if (!*found)
        return LOOM_OK;
    if (!s.embedding || s.embedding->chunk_count < 1 || s.groups % s.embedding->chunk_count != 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: found optimizer buckets of %lld groups and %lld row chunks of "
            "embedding.word_embeddings.weight "
            "(one for each tensor rank), expected a multiple of them",
            (long long)s.groups, s.embedding ? (long long)s.embedding->chunk_count : 0LL);
    loom__written made = {0};
    loom_status status = lay_out(config, &s, &made);
    if (status) {
        loom__written_free(&made);
        return loom_fail_context(status, "the layout that wrote the checkpoint: ");
    }
    *written = made;
    return LOOM_OK;
}

static loom_status copy_layout(
    const loom_model_config *config, const seen *s, const loom__sharded_layout *told, loom__written *out) {
    int64_t stages = told->chunks * told->pp;
    out->layout = *told;
    out->layout.experts_apart = s->expert_groups > 0;
    LOOM_TRY(make_spec(config, s->embedding, told->tp, &out->spec));
    out->stages = calloc((size_t)stages, sizeof *out->stages);
    if (!out->stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld stages", (long long)stages);
    memcpy(out->stages, told->stages, (size_t)stages * sizeof *out->stages);
    out->layout.spec = out->spec;
    out->layout.stages = out->stages;
    return LOOM_OK;
}

loom_status loom__written_from(const loom_model_config *config, const loom__stored_tensor *tensors, int64_t count,
    const loom__sharded_layout *told, loom__written *written) {
    seen s = look(tensors, count);
    if (!s.embedding || told->tp < 1 || told->pp < 1 || told->chunks < 1 || told->dp < 1)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: found a layout of %lld x %lld x %lld ranks and %lld chunks%s, expected numbers from 1 and "
            "word embeddings",
            (long long)told->tp, (long long)told->pp, (long long)told->dp, (long long)told->chunks,
            s.embedding ? "" : " without word embeddings");
    int64_t experts = config->moe.num_moe_experts, width = config->moe.moe_ffn_hidden_size;
    if (experts > 0 &&
        (told->etp < 1 || told->ep < 1 || told->edp < 1 || width % told->etp != 0 || experts % told->ep != 0))
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: found a layout of %lld x %lld x %lld ranks of experts, expected numbers from 1, of which the "
            "first divides moe_ffn_hidden_size %lld and the second num_moe_experts %lld",
            (long long)told->etp, (long long)told->ep, (long long)told->edp, (long long)width, (long long)experts);
    loom__written made = {0};
    loom_status status = copy_layout(config, &s, told, &made);
    if (status) {
        loom__written_free(&made);
        return loom_fail_context(status, "the layout that wrote the checkpoint: ");
    }
    *written = made;
    return LOOM_OK;
}

void loom__written_free(loom__written *written) {
    loom__model_spec_destroy(written->spec);
    free(written->stages);
    *written = (loom__written){0};
}
