/* The forward of one chunk: the embedding where the model begins, the chunk's layers, final norm, head and loss where
 * it ends. What comes in from the chunk before is a leaf of the tape, what goes out is the next one's. The invariant:
 * chunks one after the other run the operations of the whole model in their order, so that no cut changes a number. */
#include "model/gpt.h"
#include "parallel/parallel.h"
#include "tensor/dtype.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* True when row t of every sample is at position t: then nothing has to be looked up. The rows of a context rank are
 * not in a row, and may count from 0 all the same where documents begin in them. */
static bool plain_positions(const loom__gpt *gpt, const loom_batch *batch) {
    if (loom__gpt_context_size(gpt) > 1)
        return false;
    if (!batch->position_ids)
        return true;
    for (int64_t i = 0; i < batch->b * batch->s; i++)
        if (batch->position_ids[i] != i % batch->s)
            return false;
    return true;
}

loom__router_options loom__gpt_router_options(const loom__gpt *gpt, bool training, double own_loss_scale) {
    const loom_module_environment *environment = &gpt->environment;
    const loom_moe_config *moe = &gpt->config.moe;
    loom_comm *slices = environment->expert_tensor_group ? environment->expert_tensor_group : environment->tensor_group;
    return (loom__router_options){
        .router = loom__model_router(&gpt->config),
        .groups = {environment->expert_group, slices, environment->experts_group,
            moe->moe_token_dispatcher_type && strcmp(moe->moe_token_dispatcher_type, "allgather") == 0},
        .training = training,
        .in_double = moe->moe_router_dtype && strcmp(moe->moe_router_dtype, "fp64") == 0,
        .random_logits = moe->moe_router_force_load_balancing,
        .weigh_input = moe->moe_apply_probs_on_input,
        .jitter = training ? moe->moe_input_jitter_eps : 0,
        .balance_coefficient = {loom__balance_coefficient(moe, "aux_loss"),
            loom__balance_coefficient(moe, "seq_aux_loss"), loom__balance_coefficient(moe, "global_aux_loss")},
        .z_coefficient = moe->moe_z_loss_coeff,
        .own_loss_scale = own_loss_scale,
        .balance_group = environment->balance_group,
        .step_group = environment->step_group,
    };
}

static int64_t place_of(loom_positions rows, int64_t row) {
    return row < rows.turn ? rows.first + row : rows.second + row - rows.turn;
}

static loom_status make_microbatch(const loom__gpt *gpt, const loom_forward *forward, loom__microbatch **out) {
    const loom_batch *batch = forward->batch;
    bool plain = plain_positions(gpt, batch);
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
        .rows = loom_positions_from(0),
        .sample = batch->sample,
        .rope = gpt->rope,
    };
    m->router = loom__gpt_router_options(gpt, forward->training, forward->own_loss_scale);
    m->router.collector = forward->router_collector;
    loom_status status = loom__gpt_share_sequence(gpt, batch, &gpt->chunks[forward->chunk].place, m);
    if (status) {
        loom__microbatch_release(m);
        return status;
    }
    if (!plain) {
        int32_t *positions = (int32_t *)(m + 1);
        for (int64_t i = 0; i < count; i++)
            positions[i] = (int32_t)(batch->position_ids ? batch->position_ids[i] : place_of(m->rows, i % batch->s));
        m->positions = positions;
    }
    *out = m;
    return LOOM_OK;
}

/* The slice [b, s/tp] of the positions that belongs to this rank's rows. */
static loom_status local_positions(const loom__microbatch *m, int64_t **out) {
    *out = NULL;
    if (!m->positions)
        return LOOM_OK;
    int64_t rows = m->sequence_parallel ? m->s / loom_comm_size(m->tp) : m->s, first = loom__first_row(m);
    int64_t *local = malloc((size_t)(m->b * rows + 1) * sizeof *local);
    if (!local)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for positions");
    for (int64_t j = 0; j < m->b; j++)
        for (int64_t t = 0; t < rows; t++)
            local[j * rows + t] = m->positions[j * m->s + first + t];
    *out = local;
    return LOOM_OK;
}

static loom_status embed(
    const loom__gpt *gpt, loom_tape *tape, const loom__microbatch *m, const loom_batch *batch, loom_tensor **output) {
    const loom_model_config *config = &gpt->config;
    loom_tape_scope(tape, "embedding");
    int64_t rows = gpt->word_embeddings->shape[0];
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
        status = local_positions(m, &positions);
        if (!status)
            status = loom__position_embedding(
                tape, words, gpt->position_embeddings, positions, m->rows.first + loom__first_row(m), &placed);
        free(positions);
        loom_tensor_release(words);
    } else {
        placed = words;
    }
    if (!status && m->training && config->hidden_dropout > 0) {
        loom_dropout dropout = {(float)config->hidden_dropout, m->seed, 0xffffffffu, LOOM_DROPOUT_EMBEDDING};
        status = loom_bias_dropout_add(tape, placed, NULL, NULL, &dropout, m->sample, loom__row_positions(m), output);
        loom_tensor_release(placed);
        return status;
    }
    if (!status)
        *output = placed;
    return status;
}

static loom_status through_layers(const loom__gpt_chunk *chunk, loom_tape *tape, loom__microbatch *m, loom_tensor **x) {
    for (int64_t i = 0; i < chunk->place.layers; i++) {
        loom_tensor *next = NULL;
        LOOM_TRY(loom__layer_forward(&chunk->layers[i], tape, m, *x, &next));
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

/* Some rows of x [1, b, h], as [1, count, h]; takes the reference of x. */
static loom_status take_rows(loom_tape *tape, loom_tensor *x, const int64_t *rows, int64_t count, loom_tensor **taken) {
    const int64_t h = x->shape[2];
    loom_tensor *made = NULL;
    loom_status status = loom_tensor_ready(x);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, (int64_t[]){1, count, h}, &made);
    for (int64_t i = 0; !status && i < count; i++)
        memcpy(loom__element(made, i * h), loom__element(x, rows[i] * h), (size_t)h * loom_dtype_size(x->dtype));
    loom_tensor_release(x);
    *taken = made;
    return status;
}

loom_status loom__gpt_next_logits(const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, int64_t *tokens,
    const int64_t *last, int64_t count, loom_tensor **logits) {
    loom_batch batch = {.b = m->b, .s = m->s, .rows = m->b, .tokens = tokens};
    loom_tensor *x = NULL;
    LOOM_TRY(embed(gpt, tape, m, &batch, &x));
    loom_status status = through_layers(&gpt->chunks[0], tape, m, &x);
    if (status) {
        loom_tensor_release(x);
        return status;
    }
    LOOM_TRY(take_rows(tape, x, last, count, &x));
    status = output_logits(gpt, tape, m, x, logits);
    loom_tensor_release(x);
    return status;
}

/* ---- what a forward is given ---- */

/* Values that a batch must not have; its memory is the user's. Labels are read where the loss is. */
static loom_status check_values(const loom__gpt *gpt, const loom_batch *batch, bool loss) {
    int64_t vocabulary = gpt->config.vocab_size;
    for (int64_t i = 0; i < batch->b * batch->s; i++) {
        int64_t label = loss ? batch->labels[i] : 0;
        /* One that does not count may be anything: -100, say. */
        if (loss && (label < 0 || label >= vocabulary) && batch->loss_mask[i] != 0)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "label %lld at position %lld of row %lld counts in the loss: expected 0 to %lld, or a loss mask of 0",
                (long long)label, (long long)(i % batch->s), (long long)(i / batch->s), (long long)(vocabulary - 1));
        if (batch->position_ids && (batch->position_ids[i] < 0 || batch->position_ids[i] > INT32_MAX))
            return loom_fail(LOOM_ERR_ARGUMENT, "position %lld at place %lld of row %lld: expected 0 to %d",
                (long long)batch->position_ids[i], (long long)(i % batch->s), (long long)(i / batch->s), INT32_MAX);
    }
    return LOOM_OK;
}

loom_status loom__gpt_activation_shape(void *context, int64_t b, int64_t s, int *dims, int64_t shape[LOOM_MAX_DIMS]) {
    const loom__gpt *gpt = context;
    const loom_module_environment *environment = &gpt->environment;
    int64_t tp = environment->sequence_parallel ? loom_comm_size(environment->tensor_group) : 1;
    if (s % tp)
        return loom_fail(LOOM_ERR_CONFIG,
            "sequence_parallel: %lld positions cannot be split over %lld tensor ranks; nearest lengths %lld and %lld",
            (long long)s, (long long)tp, (long long)(s / tp * tp), (long long)((s / tp + 1) * tp));
    *dims = 3;
    shape[0] = s / tp;
    shape[1] = b;
    shape[2] = gpt->config.hidden_size;
    return LOOM_OK;
}

/* "F32 [12, 2, 24]" */
static void describe_shape(loom_dtype dtype, int dims, const int64_t *shape, char *text, size_t bytes) {
    int used = snprintf(text, bytes, "%s [", loom_dtype_name(dtype));
    for (int i = 0; i < dims && (size_t)used < bytes; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if ((size_t)used < bytes)
        snprintf(text + used, bytes - (size_t)used, "]");
}

static loom_status check_input(
    const loom__gpt *gpt, const loom_forward *forward, const loom__gpt_chunk *chunk, int dims, const int64_t *shape) {
    const loom_tensor *x = forward->input;
    long long number = (long long)forward->chunk, stage = (long long)gpt->environment.stage;
    loom_dtype dtype = gpt->set->count ? gpt->set->parameters[0].dtype : x ? x->dtype : LOOM_F32;
    char found[128], expected[128];
    if (chunk->place.embedding)
        return x ? loom_fail(LOOM_ERR_ARGUMENT,
                       "chunk %lld of stage %lld begins the model: found activations (loom_forward.input), expected "
                       "none",
                       number, stage)
                 : LOOM_OK;
    describe_shape(dtype, dims, shape, expected, sizeof expected);
    if (!x)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "chunk %lld of stage %lld does not begin the model: found no activations (loom_forward.input), expected %s "
            "from the chunk before",
            number, stage, expected);
    if (x->dtype == dtype && x->dims == dims && memcmp(x->shape, shape, (size_t)dims * sizeof *shape) == 0)
        return LOOM_OK;
    describe_shape(x->dtype, x->dims, x->shape, found, sizeof found);
    return loom_fail(LOOM_ERR_ARGUMENT, "activations for chunk %lld of stage %lld: found %s, expected %s", number,
        stage, found, expected);
}

static loom_status check_forward(const loom__gpt *gpt, const loom_forward *forward) {
    const loom_model_config *config = &gpt->config;
    const loom_batch *batch = forward->batch;
    int64_t shape[LOOM_MAX_DIMS];
    int dims;
    if (!gpt->set)
        return loom_fail(LOOM_ERR_STATE, "this model cannot compute yet: it has not been set up");
    if (forward->chunk < 0 || forward->chunk >= gpt->chunk_count)
        return loom_fail(LOOM_ERR_ARGUMENT, "chunk of a forward: found %lld, expected 0 to %lld",
            (long long)forward->chunk, (long long)(gpt->chunk_count - 1));
    const loom__gpt_chunk *chunk = &gpt->chunks[forward->chunk];
    int64_t length = batch->s * loom__gpt_context_size(gpt);
    LOOM_TRY(loom__gpt_activation_shape((void *)(uintptr_t)gpt, batch->b, batch->s, &dims, shape));
    if (config->position_embedding_type == LOOM_POSITION_LEARNED && length > config->max_position_embeddings)
        return loom_fail(LOOM_ERR_CONFIG,
            "a sequence of %lld positions, but the model has %lld (max_position_embeddings)", (long long)length,
            (long long)config->max_position_embeddings);
    LOOM_TRY(check_input(gpt, forward, chunk, dims, shape));
    return check_values(gpt, batch, chunk->place.loss);
}

/* ---- the whole ---- */

static loom_status run_chunk(
    const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, const loom_forward *forward, loom_tensor **output) {
    const loom__gpt_chunk *chunk = &gpt->chunks[forward->chunk];
    loom_tensor *x = NULL;
    loom_status status = LOOM_OK;
    if (chunk->place.embedding)
        status = embed(gpt, tape, m, forward->batch, &x);
    else
        x = loom_tensor_retain(forward->input);
    if (!status)
        status = through_layers(chunk, tape, m, &x);
    if (!status && chunk->place.loss)
        status = head(gpt, tape, m, forward, x, output);
    else if (!status)
        *output = loom_tensor_retain(x);
    loom_tensor_release(x);
    return status;
}

loom_status loom__gpt_forward(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output) {
    const loom__gpt *gpt = context;
    loom__microbatch *m = NULL;
    LOOM_TRY(check_forward(gpt, forward));
    LOOM_TRY(make_microbatch(gpt, forward, &m));
    loom_status status = run_chunk(gpt, tape, m, forward, output);
    loom__microbatch_release(m);
    return status;
}
