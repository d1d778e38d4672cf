/* GPT: embedding, layers, final norm, head. The module knows its configuration from the start and its parameters once a
 * strategy tells it where it lives (materialize). */
#include "model/gpt.h"
#include "parallel/parallel.h"
#include "spec/rope.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static loom__gpt *gpt_of(void *context) {
    return context;
}

/* ---- coming into being ---- */

static loom_status make_rope(loom__gpt *gpt) {
    const loom_model_config *config = &gpt->config;
    if (config->position_embedding_type != LOOM_POSITION_ROPE)
        return LOOM_OK;
    int64_t half = loom__rope_channels(config) / 2;
    int64_t positions =
        config->max_position_embeddings > config->seq_length ? config->max_position_embeddings : config->seq_length;
    gpt->cosine = malloc((size_t)(positions * half + 1) * sizeof(float));
    gpt->sine = malloc((size_t)(positions * half + 1) * sizeof(float));
    if (!gpt->cosine || !gpt->sine)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for rotary tables of %lld positions", (long long)positions);
    for (int64_t i = 0; i < half; i++) {
        double frequency = loom__rope_frequency(config, i);
        for (int64_t p = 0; p < positions; p++) {
            gpt->cosine[p * half + i] = (float)cos((double)p * frequency);
            gpt->sine[p * half + i] = (float)sin((double)p * frequency);
        }
    }
    gpt->rope = (loom_rope_table){positions, 2 * half, gpt->cosine, gpt->sine};
    return LOOM_OK;
}

static loom_status make_replica_group(loom__gpt *gpt) {
    loom_comm *tp = gpt->environment.tensor_group;
    int64_t size = loom_comm_size(tp), groups = gpt->config.num_query_groups;
    if (size <= groups)
        return LOOM_OK;
    int count = (int)(size / groups), first = loom_comm_rank(tp) / count * count;
    int *ranks = malloc((size_t)count * sizeof *ranks);
    if (!ranks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a group of %d ranks", count);
    for (int i = 0; i < count; i++)
        ranks[i] = loom_comm_world_rank(tp, first + i);
    loom_status status = loom_group_create(gpt->environment.rank, "kv_replicas", ranks, count, &gpt->replicas);
    free(ranks);
    return status;
}

static loom_status bind_parameters(loom__gpt *gpt) {
    const loom__parameter_set *set = gpt->set;
    gpt->layers = calloc((size_t)gpt->config.num_layers, sizeof *gpt->layers);
    if (!gpt->layers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld layers", (long long)gpt->config.num_layers);
    for (int64_t i = 0; i < gpt->config.num_layers; i++)
        LOOM_TRY(loom__layer_bind(set, &gpt->config, i, &gpt->layers[i]));
    gpt->word_embeddings = loom__parameter_set_find(set, "embedding.word_embeddings.weight");
    gpt->position_embeddings = loom__parameter_set_find(set, "embedding.position_embeddings.weight");
    gpt->final_norm = loom__parameter_set_find(set, "decoder.final_layernorm.weight");
    gpt->final_norm_bias = loom__parameter_set_find(set, "decoder.final_layernorm.bias");
    gpt->output = gpt->config.share_embeddings_and_output_weights
                      ? gpt->word_embeddings
                      : loom__parameter_set_find(set, "output_layer.weight");
    if (!gpt->word_embeddings || !gpt->final_norm || !gpt->output)
        return loom_fail(LOOM_ERR_INTERNAL, "the spec lacks the embedding, the final norm or the head");
    return LOOM_OK;
}

/* What this rank does by itself. */
static loom_status make_parameters(loom__gpt *gpt) {
    const loom_module_environment *environment = &gpt->environment;
    int tp = loom_comm_size(environment->tensor_group), tp_rank = loom_comm_rank(environment->tensor_group);
    LOOM_TRY(loom__model_config_complete(&gpt->config, tp, environment->sequence_parallel));
    LOOM_TRY(loom__model_spec_create(&gpt->config, &gpt->spec));
    LOOM_TRY(loom__parameter_set_create(gpt->spec, tp, tp_rank, environment->sequence_parallel, &gpt->set));
    LOOM_TRY(bind_parameters(gpt));
    LOOM_TRY(make_rope(gpt));
    if (gpt->hf_directory)
        return loom__hf_load(gpt->hf_directory, gpt->set);
    bool initialize = gpt->initialize && environment->perform_initialization;
    return initialize ? loom__parameter_set_initialize(gpt->set, environment->seed) : LOOM_OK;
}

static loom_status gpt_materialize(void *context, const loom_module_environment *environment) {
    loom__gpt *gpt = gpt_of(context);
    if (gpt->set)
        return loom_fail(LOOM_ERR_STATE, "this model has been set up already");
    gpt->environment = *environment;
    /* Making a group is collective: a rank that failed must not be waited for there. */
    LOOM_TRY(loom_agree(environment->tensor_group, make_parameters(gpt)));
    return make_replica_group(gpt);
}

static loom_status gpt_parameters(void *context, loom_parameter *const **parameters, int64_t *count) {
    const loom__gpt *gpt = gpt_of(context);
    if (!gpt->set)
        return loom_fail(LOOM_ERR_STATE, "this model has no parameters yet: it has not been set up");
    *parameters = gpt->set->list;
    *count = gpt->set->count;
    return LOOM_OK;
}

static loom_model_config *gpt_config(void *context) {
    return &gpt_of(context)->config;
}

static void gpt_destroy(void *context) {
    loom__gpt *gpt = gpt_of(context);
    if (!gpt)
        return;
    loom_group_destroy(gpt->replicas);
    free(gpt->layers);
    free(gpt->cosine);
    free(gpt->sine);
    loom__parameter_set_destroy(gpt->set);
    loom__model_spec_destroy(gpt->spec);
    free(gpt->hf_directory);
    free(gpt);
}

/* ---- gradients of copies ---- */

/* A replica's key/value gradient comes from its own query heads alone; the copies stay equal because all add the same
 * sum. */
static loom_status sum_replicas(const loom__gpt *gpt, const loom_parameter *parameter) {
    if (!parameter || !parameter->grad)
        return LOOM_OK;
    int64_t width = parameter->dims == 2 ? parameter->shape[1] : 1, d = gpt->config.kv_channels;
    int64_t first = (parameter->shape[0] - 2 * d) * width;
    return loom_all_reduce(
        gpt->replicas, parameter->grad + first, parameter->grad + first, 2 * d * width, LOOM_F32, LOOM_SUM);
}

static loom_status gpt_finalize(void *context) {
    const loom__gpt *gpt = gpt_of(context);
    for (int64_t i = 0; gpt->replicas && i < gpt->config.num_layers; i++) {
        LOOM_TRY(sum_replicas(gpt, gpt->layers[i].qkv));
        LOOM_TRY(sum_replicas(gpt, gpt->layers[i].qkv_bias));
    }
    return LOOM_OK;
}

/* ---- forward ---- */

/* True when row t of every sample is at position t: then nothing has to be looked up. */
static bool plain_positions(const loom_batch *batch) {
    for (int64_t i = 0; i < batch->b * batch->s; i++)
        if (batch->position_ids[i] != i % batch->s)
            return false;
    return true;
}

static loom_status make_microbatch(const loom__gpt *gpt, const loom_forward *forward, loom__microbatch **out) {
    const loom_batch *batch = forward->batch;
    bool plain = !batch->position_ids || plain_positions(batch);
    int64_t count = batch->b * batch->s;
    loom__microbatch *m = calloc(1, sizeof *m + (plain ? 0 : (size_t)count * sizeof(int32_t)));
    if (!m)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a microbatch");
    *m = (loom__microbatch){
        .references = 1,
        .tp = gpt->environment.tensor_group,
        .sequence_parallel = gpt->environment.sequence_parallel,
        .training = forward->training,
        .seed = gpt->environment.seed,
        .b = batch->b,
        .s = batch->s,
        .sample = batch->sample,
        .document_start = batch->document_start,
        .rope = gpt->rope,
    };
    if (!plain) {
        int32_t *positions = (int32_t *)(m + 1);
        for (int64_t i = 0; i < count; i++)
            positions[i] = (int32_t)batch->position_ids[i];
        m->positions = positions;
    }
    *out = m;
    return LOOM_OK;
}

/* The slice [b, s/tp] of position_ids that belongs to this rank's rows. */
static loom_status local_positions(const loom__microbatch *m, const loom_batch *batch, int64_t **out) {
    *out = NULL;
    if (!m->positions)
        return LOOM_OK;
    int64_t rows = m->sequence_parallel ? m->s / loom_comm_size(m->tp) : m->s, first = loom__sequence_offset(m);
    int64_t *local = malloc((size_t)(m->b * rows + 1) * sizeof *local);
    if (!local)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for positions");
    for (int64_t j = 0; j < m->b; j++)
        memcpy(local + j * rows, batch->position_ids + j * m->s + first, (size_t)rows * sizeof *local);
    *out = local;
    return LOOM_OK;
}

static loom_status embed(
    const loom__gpt *gpt, loom_tape *tape, const loom__microbatch *m, const loom_batch *batch, loom_tensor **output) {
    const loom_model_config *config = &gpt->config;
    loom_tape_scope(tape, "embedding");
    int64_t rows = gpt->word_embeddings->shape[0], offset = loom__sequence_offset(m);
    loom_tensor *words = NULL, *placed = NULL;
    LOOM_TRY(loom__vocab_embedding(tape, batch->tokens, m->b, m->s, gpt->word_embeddings, rows * loom_comm_rank(m->tp),
        config->vocab_size, m->tp, m->sequence_parallel, &words));
    loom_status status = LOOM_OK;
    if (config->scale_embeddings) {
        loom_tensor *plain = words;
        words = NULL;
        status = loom_scale(tape, plain, (float)sqrt((double)config->hidden_size), &words);
        loom_tensor_release(plain);
        LOOM_TRY(status);
    }
    if (gpt->position_embeddings) {
        int64_t *positions;
        status = local_positions(m, batch, &positions);
        if (!status)
            status = loom__position_embedding(tape, words, gpt->position_embeddings, positions, offset, &placed);
        free(positions);
        loom_tensor_release(words);
    } else {
        placed = words;
    }
    if (!status && m->training && config->hidden_dropout > 0) {
        loom_dropout dropout = {(float)config->hidden_dropout, m->seed, 0xffffffffu, LOOM_DROPOUT_EMBEDDING};
        status = loom_bias_dropout_add(tape, placed, NULL, NULL, &dropout, m->sample, offset, output);
        loom_tensor_release(placed);
        return status;
    }
    if (!status)
        *output = placed;
    return status;
}

static loom_status through_layers(const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, loom_tensor **x) {
    for (int64_t i = 0; i < gpt->config.num_layers; i++) {
        loom_tensor *next = NULL;
        LOOM_TRY(loom__layer_forward(&gpt->layers[i], tape, m, *x, &next));
        loom_tensor_release(*x);
        *x = next;
    }
    return LOOM_OK;
}

static loom_status output_logits(
    const loom__gpt *gpt, loom_tape *tape, const loom__microbatch *m, loom_tensor *x, loom_tensor **logits) {
    loom_tape_scope(tape, "output_layer");
    loom_tensor *normed = NULL;
    LOOM_TRY(loom__norm(tape, &gpt->config, x, gpt->final_norm, gpt->final_norm_bias, &normed));
    loom_status status = loom__column_linear(tape, normed, gpt->output, NULL, m->tp, m->sequence_parallel, logits);
    loom_tensor_release(normed);
    return status;
}

static loom_status head(const loom__gpt *gpt, loom_tape *tape, const loom__microbatch *m, const loom_forward *forward,
    loom_tensor *x, loom_tensor **output) {
    const loom_model_config *config = &gpt->config;
    loom_tensor *logits = NULL;
    LOOM_TRY(output_logits(gpt, tape, m, x, &logits));
    int64_t columns = gpt->output->shape[0], first = columns * loom_comm_rank(m->tp);
    int64_t valid = config->padded_vocab_in_softmax ? columns : config->vocab_size - first;
    valid = valid < 0 ? 0 : valid > columns ? columns : valid;
    loom_status status = loom__vocab_cross_entropy(
        tape, logits, forward->batch->labels, first, valid, config->vocab_size, m->tp, output);
    if (!status && forward->logits)
        *forward->logits = loom_tensor_retain(logits);
    loom_tensor_release(logits);
    return status;
}

/* The rows of the last position, [1, b, h]; takes the reference of x. */
static loom_status last_position(loom_tape *tape, loom_tensor *x, loom_tensor **last) {
    int64_t s = x->shape[0], b = x->shape[1], h = x->shape[2];
    loom_tensor *made = NULL;
    loom_status status = loom_tensor_ready(x);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 3, (int64_t[]){1, b, h}, &made);
    if (!status)
        memcpy(made->data, loom_tensor_f32(x) + (s - 1) * b * h, (size_t)(b * h) * sizeof(float));
    loom_tensor_release(x);
    *last = made;
    return status;
}

loom_status loom__gpt_next_logits(
    const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, int64_t *tokens, loom_tensor **logits) {
    loom_batch batch = {.b = m->b, .s = m->s, .rows = m->b, .tokens = tokens};
    loom_tensor *x = NULL;
    LOOM_TRY(embed(gpt, tape, m, &batch, &x));
    loom_status status = through_layers(gpt, tape, m, &x);
    if (status) {
        loom_tensor_release(x);
        return status;
    }
    LOOM_TRY(last_position(tape, x, &x));
    status = output_logits(gpt, tape, m, x, logits);
    loom_tensor_release(x);
    return status;
}

/* Values that a batch must not have; its memory is the user's. */
static loom_status check_values(const loom__gpt *gpt, const loom_batch *batch) {
    int64_t vocabulary = gpt->config.vocab_size;
    for (int64_t i = 0; i < batch->b * batch->s; i++) {
        int64_t label = batch->labels[i];
        /* One that does not count may be anything: -100, say. */
        if ((label < 0 || label >= vocabulary) && batch->loss_mask[i] != 0)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "label %lld at position %lld of row %lld counts in the loss: expected 0 to %lld, or a loss mask of 0",
                (long long)label, (long long)(i % batch->s), (long long)(i / batch->s), (long long)(vocabulary - 1));
        if (batch->position_ids && (batch->position_ids[i] < 0 || batch->position_ids[i] > INT32_MAX))
            return loom_fail(LOOM_ERR_ARGUMENT, "position %lld at place %lld of row %lld: expected 0 to %d",
                (long long)batch->position_ids[i], (long long)(i % batch->s), (long long)(i / batch->s), INT32_MAX);
    }
    return LOOM_OK;
}

static loom_status check_forward(const loom__gpt *gpt, const loom_forward *forward) {
    const loom_model_config *config = &gpt->config;
    const loom_batch *batch = forward->batch;
    int64_t tp = gpt->environment.sequence_parallel ? loom_comm_size(gpt->environment.tensor_group) : 1;
    if (forward->input)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: activations from a pipeline stage before this one");
    if (batch->s % tp)
        return loom_fail(LOOM_ERR_CONFIG,
            "sequence_parallel: %lld positions cannot be split over %lld tensor ranks; nearest lengths %lld and %lld",
            (long long)batch->s, (long long)tp, (long long)(batch->s / tp * tp), (long long)((batch->s / tp + 1) * tp));
    if (config->position_embedding_type == LOOM_POSITION_LEARNED && batch->s > config->max_position_embeddings)
        return loom_fail(LOOM_ERR_CONFIG,
            "a sequence of %lld positions, but the model has %lld (max_position_embeddings)", (long long)batch->s,
            (long long)config->max_position_embeddings);
    return check_values(gpt, batch);
}

static loom_status gpt_forward(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output) {
    const loom__gpt *gpt = gpt_of(context);
    loom__microbatch *m = NULL;
    LOOM_TRY(check_forward(gpt, forward));
    LOOM_TRY(make_microbatch(gpt, forward, &m));
    loom_tensor *x = NULL;
    loom_status status = embed(gpt, tape, m, forward->batch, &x);
    if (!status)
        status = through_layers(gpt, tape, m, &x);
    if (!status)
        status = head(gpt, tape, m, forward, x, output);
    loom_tensor_release(x);
    loom__microbatch_release(m);
    return status;
}

loom_status loom__gpt_create(
    const loom_model_config *config, const char *hf_directory, bool initialize, loom_module **module) {
    loom__gpt *gpt = calloc(1, sizeof *gpt);
    char *directory = hf_directory ? strdup(hf_directory) : NULL;
    if (!gpt || (hf_directory && !directory)) {
        free(gpt);
        free(directory);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a model");
    }
    gpt->config = *config;
    gpt->hf_directory = directory;
    gpt->initialize = initialize;
    gpt->module = (loom_module){
        .context = gpt,
        .materialize = gpt_materialize,
        .parameters = gpt_parameters,
        .forward = gpt_forward,
        .finalize_gradients = gpt_finalize,
        .config = gpt_config,
        .destroy = gpt_destroy,
    };
    *module = &gpt->module;
    return LOOM_OK;
}

bool loom__module_is_gpt(const loom_module *module) {
    return module->materialize == gpt_materialize;
}
