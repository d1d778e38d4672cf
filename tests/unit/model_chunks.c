/* A model cut into chunks is the same model: run one after the other, with activations handed on and gradients handed
 * back as between stages, the chunks give the bits of the uncut model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/decoder.h"
#include "model/gpt.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { SEED = 99, B = 2, S = 8, VOCABULARY = 29, CHUNKS_MAX = 6, MICROBATCHES = 2 };

typedef enum kind { GPT2, LLAMA, TIED_ONE_GROUP, KINDS } kind;

static loom_model_config config_of(kind k, int64_t layers) {
    bool gpt2 = k == GPT2;
    return (loom_model_config){.architecture = gpt2 ? "gpt2" : "llama",
        .num_layers = layers,
        .hidden_size = 24,
        .ffn_hidden_size = 36,
        .num_attention_heads = 4,
        .num_query_groups = gpt2         ? 4
                            : k == LLAMA ? 2
                                         : 1,
        .replicate_query_groups = k == TIED_ONE_GROUP,
        .seq_length = S,
        .max_position_embeddings = 2 * S,
        .vocab_size = VOCABULARY,
        .make_vocab_size_divisible_by = 4,
        .normalization = gpt2 ? LOOM_LAYERNORM : LOOM_RMSNORM,
        .layernorm_epsilon = 1e-5,
        .activation = gpt2 ? LOOM_GELU_TANH : LOOM_SWIGLU,
        .position_embedding_type = gpt2 ? LOOM_POSITION_LEARNED : LOOM_POSITION_ROPE,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = gpt2,
        .add_qkv_bias = gpt2,
        .share_embeddings_and_output_weights = k != LLAMA,
        .init_method_std = 0.2,
        .use_scaled_init = true,
        .hidden_dropout = gpt2 ? 0.1 : 0,
        .attention_dropout = gpt2 ? 0.1 : 0,
        .recompute = k == TIED_ONE_GROUP ? LOOM_RECOMPUTE_FULL : LOOM_RECOMPUTE_NONE};
}

/* Chunk c of stage r is chunks[c * stages + r]. */
typedef struct cut {
    int64_t layers;
    int stages, each;
    loom_stage chunks[CHUNKS_MAX];
} cut;

static const cut cuts[] = {
    {4, 2, 1, {{0, 2, true, false}, {2, 2, false, true}}},
    {4, 2, 1, {{0, 3, true, false}, {3, 1, false, true}}},
    {4, 3, 1, {{0, 1, true, false}, {1, 2, false, false}, {3, 1, false, true}}},
    {4, 4, 1, {{0, 1, true, false}, {1, 1, false, false}, {2, 1, false, false}, {3, 1, false, true}}},
    /* E|tt|tt|L on four stages, E|t|t|L on two with two chunks each, a chunk with nothing in it */
    {4, 4, 1, {{0, 0, true, false}, {0, 2, false, false}, {2, 2, false, false}, {4, 0, false, true}}},
    {2, 2, 2, {{0, 0, true, false}, {0, 1, false, false}, {1, 1, false, false}, {2, 0, false, true}}},
    {2, 3, 1, {{0, 1, true, false}, {1, 0, false, false}, {1, 1, false, true}}},
    {4, 1, 2, {{0, 3, true, false}, {3, 1, false, true}}},
};

/* No token comes twice, so that the embedding's gradient is one addition an element whatever the head has added. */
typedef struct microbatch {
    int64_t tokens[B * S], labels[B * S], positions[B * S], sample[B];
    float mask[B * S];
    loom_batch batch;
} microbatch;

static void make_batch(microbatch *m, int number, bool odd_positions) {
    for (int64_t i = 0; i < B * S; i++) {
        m->tokens[i] = (i * 5 + 3 + number) % VOCABULARY;
        m->labels[i] = (i * 7 + 1) % VOCABULARY;
        m->positions[i] = odd_positions ? 2 * S - 1 - i % S : i % S;
        m->mask[i] = 1;
    }
    m->sample[0] = 3 + number;
    m->sample[1] = 8 + number;
    m->batch = (loom_batch){.b = B,
        .s = S,
        .rows = B,
        .tokens = m->tokens,
        .labels = m->labels,
        .loss_mask = m->mask,
        .position_ids = m->positions,
        .sample = m->sample};
}

/* ---- one module ---- */

typedef struct piece {
    loom_module *module;
    loom_parameter *const *parameters;
    int64_t count;
} piece;

static loom_status piece_make(
    loom_rank *rank, const loom_model_config *config, bool sp, const cut *c, int stage, piece *p) {
    loom_stage chunks[CHUNKS_MAX];
    loom_module_environment environment = {.rank = rank,
        .tensor_group = loom_rank_world(rank),
        .sequence_parallel = sp,
        .seed = SEED,
        .perform_initialization = true,
        .stage = stage,
        .stages = c ? c->stages : 1,
        .chunk_count = c ? c->each : 1,
        .chunks = c ? chunks : NULL};
    for (int i = 0; c && i < c->each; i++)
        chunks[i] = c->chunks[i * c->stages + stage];
    LOOM_TRY(loom__gpt_create(config, NULL, true, &p->module));
    LOOM_TRY(p->module->materialize(p->module->context, &environment));
    memset(chunks, 0x55, sizeof chunks); /* they were borrowed for the call */
    LOOM_TRY(p->module->parameters(p->module->context, &p->parameters, &p->count));
    for (int64_t i = 0; i < p->count; i++) {
        loom_parameter *parameter = p->parameters[i];
        CHECK(parameter->index == i, "%s has index %lld", parameter->name, (long long)parameter->index);
        CHECK(i == 0 || parameter->chunk >= p->parameters[i - 1]->chunk, "%s comes after another chunk's",
            parameter->name);
        parameter->grad = malloc((size_t)(loom_parameter_count(parameter) + 1) * sizeof(float));
        CHECK(parameter->grad, "out of memory");
        for (int64_t e = 0; e < loom_parameter_count(parameter); e++)
            parameter->grad[e] = NAN;
    }
    return LOOM_OK;
}

static void piece_destroy(piece *p) {
    for (int64_t i = 0; i < p->count; i++)
        free(p->parameters[i]->grad);
    if (p->module)
        p->module->destroy(p->module->context);
}

static const loom_parameter *find(const piece *p, const char *name) {
    for (int64_t i = 0; i < p->count; i++)
        if (strcmp(p->parameters[i]->name, name) == 0)
            return p->parameters[i];
    return NULL;
}

/* ---- a microbatch through it ---- */

typedef struct pass {
    loom_tape *tape;
    loom_tensor *input, *output, *logits;
} pass;

static void pass_destroy(pass *p) {
    loom_tensor_release(p->input);
    loom_tensor_release(p->output);
    loom_tensor_release(p->logits);
    loom_tape_destroy(p->tape);
}

/* before: the activations of the chunk before, copied as if they had been sent; NULL at the beginning. */
static loom_status pass_forward(loom_rank *rank, const piece *p, int64_t chunk, const loom_batch *batch,
    loom_tensor *before, bool defer, pass *made) {
    loom_forward forward = {.batch = batch, .chunk = chunk, .training = true, .logits = &made->logits};
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true, .defer_weights = defer}, &made->tape));
    if (before) {
        int64_t shape[LOOM_MAX_DIMS];
        int dims;
        LOOM_TRY(p->module->activation_shape(p->module->context, batch->b, batch->s, &dims, shape));
        LOOM_TRY(loom_tensor_ready(before));
        LOOM_TRY(loom_tensor_create(rank, LOOM_F32, dims, shape, &made->input));
        CHECK(loom_tensor_count(before) == loom_tensor_count(made->input), "activations of another size");
        memcpy(made->input->data, before->data, (size_t)loom_tensor_count(before) * sizeof(float));
        LOOM_TRY(loom_tape_leaf(made->tape, made->input));
        forward.input = made->input;
    }
    return p->module->forward(p->module->context, made->tape, &forward, &made->output);
}

static loom_status make_seed(loom_rank *rank, loom_tensor **d_losses) {
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){S, B}, d_losses));
    for (int64_t i = 0; i < B * S; i++)
        loom_tensor_f32(*d_losses)[i] = 0.01f * (float)(i + 1);
    return LOOM_OK;
}

static loom_status same_bits(const char *what, const loom_tensor *found, const loom_tensor *expected) {
    int64_t count = loom_tensor_count(expected);
    CHECK(loom_tensor_count(found) == count, "%s: %lld elements, the uncut model has %lld", what,
        (long long)loom_tensor_count(found), (long long)count);
    for (int64_t i = 0; i < count; i++)
        CHECK(memcmp(loom_tensor_f32(found) + i, loom_tensor_f32(expected) + i, sizeof(float)) == 0,
            "%s: element %lld is %.9g, the uncut model's %.9g", what, (long long)i, (double)loom_tensor_f32(found)[i],
            (double)loom_tensor_f32(expected)[i]);
    return LOOM_OK;
}

/* ---- the comparison ---- */

typedef struct trial {
    kind kind;
    const cut *cut;
    bool sp, odd_positions;
    int microbatches; /* all in flight at once where there are two */
    bool defer;       /* the weight halves of the chunks run at the end */
} trial;

/* Of one model, and of its pieces. */
typedef struct runs {
    microbatch batches[MICROBATCHES];
    loom_tensor *seed;
    piece whole, pieces[CHUNKS_MAX];
    pass uncut[MICROBATCHES], passes[MICROBATCHES][CHUNKS_MAX];
} runs;

static loom_status run_uncut(loom_rank *rank, const trial *t, runs *r) {
    for (int i = 0; i < t->microbatches; i++) {
        pass *made = &r->uncut[i];
        LOOM_TRY(pass_forward(rank, &r->whole, 0, &r->batches[i].batch, NULL, false, made));
        LOOM_TRY(loom_tape_backward(made->tape, made->output, r->seed));
    }
    return r->whole.module->finalize_gradients(r->whole.module->context);
}

static loom_status cut_forward(loom_rank *rank, const trial *t, runs *r, int number) {
    const cut *c = t->cut;
    pass *passes = r->passes[number];
    for (int k = 0; k < c->stages * c->each; k++)
        LOOM_TRY(pass_forward(rank, &r->pieces[k % c->stages], k / c->stages, &r->batches[number].batch,
            k ? passes[k - 1].output : NULL, t->defer, &passes[k]));
    return LOOM_OK;
}

static loom_status cut_backward(const cut *c, runs *r, int number) {
    pass *passes = r->passes[number];
    int depth = c->stages * c->each;
    for (int k = depth - 1; k >= 0; k--) {
        loom_tensor *d_output = k == depth - 1 ? r->seed : loom_tape_gradient(passes[k + 1].tape, passes[k + 1].input);
        CHECK(d_output, "no gradient of the activations between chunks %d and %d", k, k + 1);
        LOOM_TRY(loom_tape_backward(passes[k].tape, passes[k].output, d_output));
    }
    return LOOM_OK;
}

static loom_status run_cut(loom_rank *rank, const trial *t, runs *r) {
    const cut *c = t->cut;
    for (int i = 0; i < t->microbatches; i++)
        LOOM_TRY(cut_forward(rank, t, r, i));
    for (int i = 0; i < t->microbatches; i++)
        LOOM_TRY(cut_backward(c, r, i));
    for (int i = 0; t->defer && i < t->microbatches; i++)
        for (int k = c->stages * c->each - 1; k >= 0; k--)
            LOOM_TRY(loom_tape_run_weights(r->passes[i][k].tape));
    for (int i = 0; i < c->stages; i++)
        LOOM_TRY(r->pieces[i].module->finalize_gradients(r->pieces[i].module->context));
    return LOOM_OK;
}

static loom_status same_floats(const char *what, const loom_parameter *p, const float *found, const float *expected) {
    for (int64_t e = 0; e < loom_parameter_count(p); e++)
        CHECK(memcmp(&found[e], &expected[e], sizeof(float)) == 0,
            "%s of %s: element %lld is %.9g, the uncut model's %.9g", what, p->name, (long long)e, (double)found[e],
            (double)expected[e]);
    return LOOM_OK;
}

/* The two gradients of tied embeddings, added as the strategy does it. More than one microbatch is added in another
 * order than in the uncut model. */
static loom_status same_sum(
    const loom_parameter *first, const loom_parameter *last, const loom_parameter *uncut, double tolerance) {
    for (int64_t e = 0; e < loom_parameter_count(first); e++) {
        float sum = first->grad[e] + last->grad[e];
        CHECK(memcmp(&sum, &uncut->grad[e], sizeof sum) == 0 || fabs((double)sum - (double)uncut->grad[e]) <= tolerance,
            "the gradients of %s are %.9g in sum at element %lld, the uncut model's %.9g", first->name, (double)sum,
            (long long)e, (double)uncut->grad[e]);
    }
    return LOOM_OK;
}

static loom_status check_parameters(const trial *t, const piece *whole, const piece *pieces) {
    static const char words[] = "embedding.word_embeddings.weight";
    int64_t found = 0;
    for (int r = 0; r < t->cut->stages; r++)
        for (int64_t i = 0; i < pieces[r].count; i++) {
            const loom_parameter *p = pieces[r].parameters[i];
            bool tied = t->kind != LLAMA && t->cut->stages > 1;
            bool copy = tied && strcmp(p->name, "output_layer.weight") == 0;
            const loom_parameter *uncut = find(whole, copy ? words : p->name);
            CHECK(uncut, "%s is no parameter of the uncut model", p->name);
            CHECK(loom_parameter_count(p) == loom_parameter_count(uncut), "%s has another size", p->name);
            LOOM_TRY(same_floats("initial values", p, p->data, uncut->data));
            CHECK(p->shared_ends == (copy || (tied && strcmp(p->name, words) == 0)), "%s: shared_ends is %d", p->name,
                p->shared_ends);
            CHECK(p->owned == (copy ? 0 : uncut->owned), "%s: %lld elements are owned", p->name, (long long)p->owned);
            found += !copy;
            if (copy)
                LOOM_TRY(same_sum(find(&pieces[0], words), p, uncut, t->microbatches > 1 ? 1e-6 : 0));
            else if (!p->shared_ends)
                LOOM_TRY(same_floats("gradient", p, p->grad, uncut->grad));
        }
    CHECK(found == whole->count, "the stages have %lld parameters, the uncut model %lld", (long long)found,
        (long long)whole->count);
    return LOOM_OK;
}

static loom_status compare(loom_rank *rank, const trial *t, runs *r) {
    const cut *c = t->cut;
    loom_model_config config = config_of(t->kind, c->layers);
    for (int i = 0; i < t->microbatches; i++)
        make_batch(&r->batches[i], i, t->odd_positions);
    LOOM_TRY(make_seed(rank, &r->seed));
    LOOM_TRY(piece_make(rank, &config, t->sp, NULL, 0, &r->whole));
    for (int i = 0; i < c->stages; i++)
        LOOM_TRY(piece_make(rank, &config, t->sp, c, i, &r->pieces[i]));
    LOOM_TRY(run_uncut(rank, t, r));
    LOOM_TRY(run_cut(rank, t, r));
    for (int i = 0; i < t->microbatches; i++) {
        const pass *last = &r->passes[i][c->stages * c->each - 1];
        LOOM_TRY(same_bits("token losses", last->output, r->uncut[i].output));
        CHECK(last->logits && r->uncut[i].logits, "no logits were handed out");
        LOOM_TRY(same_bits("logits", last->logits, r->uncut[i].logits));
    }
    return check_parameters(t, &r->whole, r->pieces);
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    runs *r = calloc(1, sizeof *r);
    CHECK(r, "out of memory");
    loom_status status = compare(rank, argument, r);
    loom_tensor_release(r->seed);
    for (int i = 0; i < MICROBATCHES; i++) {
        pass_destroy(&r->uncut[i]);
        for (int k = 0; k < CHUNKS_MAX; k++)
            pass_destroy(&r->passes[i][k]);
    }
    piece_destroy(&r->whole);
    for (int i = 0; i < CHUNKS_MAX; i++)
        piece_destroy(&r->pieces[i]);
    free(r);
    return status;
}

static void must_run(int ranks, loom_rank_function function, void *argument, const char *what) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
#if defined(__SANITIZE_THREAD__)
    options.kernels = loom_kernels_reference(); /* a library's GEMM is not instrumented */
#endif
    if (loom_run_local(ranks, function, argument, &options))
        fail_msg("%s: %s", what, loom_error_message());
}

static void compare_on(int tp, bool sp, int microbatches, bool defer) {
    for (int k = 0; k < KINDS; k++)
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
            trial t = {(kind)k, &cuts[i], sp, i % 2, microbatches, defer};
            char what[64];
            snprintf(what, sizeof what, "kind %d, cut %zu, tp %d%s", k, i, tp, sp ? ", sequence parallel" : "");
            must_run(tp, on_rank, &t, what);
        }
}

static void chunks_in_a_row_give_the_bits_of_the_uncut_model(void **state) {
    (void)state;
    compare_on(1, false, 1, false);
}

static void so_they_do_on_two_tensor_ranks(void **state) {
    (void)state;
    compare_on(2, false, 1, false);
    compare_on(2, true, 1, false);
}

static void so_they_do_with_two_microbatches_in_flight_and_weight_halves_at_the_end(void **state) {
    (void)state;
    compare_on(1, false, 2, false);
    compare_on(2, true, 2, true);
}

/* ---- what is refused ---- */

static loom_status must_refuse(loom_status status, loom_status expected, const char *text) {
    CHECK(status == expected && strstr(loom_error_message(), text), "found status %d, \"%s\", expected %d with \"%s\"",
        (int)status, status ? loom_error_message() : "", (int)expected, text);
    loom_error_clear();
    return LOOM_OK;
}

/* A forward of the second of two stages. */
static loom_status try_input(loom_rank *rank, const piece *p, int64_t chunk, int dims, const int64_t *shape) {
    microbatch m;
    pass made = {0};
    make_batch(&m, 0, false);
    loom_status status = dims ? loom_tensor_create(rank, LOOM_F32, dims, shape, &made.input) : LOOM_OK;
    loom_forward forward = {.batch = &m.batch, .chunk = chunk, .input = made.input};
    if (!status)
        status = loom_tape_create(rank, &(loom_tape_options){.record = false}, &made.tape);
    if (!status && made.input)
        memset(made.input->data, 0, (size_t)loom_tensor_count(made.input) * sizeof(float));
    if (!status)
        status = p->module->forward(p->module->context, made.tape, &forward, &made.output);
    pass_destroy(&made);
    return status;
}

static loom_status try_inputs(loom_rank *rank, const piece *first, const piece *last) {
    int64_t right[] = {S, B, 24}, wrong[] = {S + 1, B, 24};
    LOOM_TRY(must_refuse(try_input(rank, first, 0, 3, right), LOOM_ERR_ARGUMENT, "found activations"));
    LOOM_TRY(must_refuse(
        try_input(rank, last, 0, 0, NULL), LOOM_ERR_ARGUMENT, "chunk 0 of stage 1 does not begin the model"));
    LOOM_TRY(must_refuse(
        try_input(rank, last, 0, 3, wrong), LOOM_ERR_ARGUMENT, "found F32 [9, 2, 24], expected F32 [8, 2, 24]"));
    LOOM_TRY(must_refuse(try_input(rank, last, 0, 2, right), LOOM_ERR_ARGUMENT, "found F32 [8, 2], expected"));
    LOOM_TRY(must_refuse(try_input(rank, last, 1, 3, right), LOOM_ERR_ARGUMENT, "found 1, expected 0 to 0"));
    LOOM_TRY(must_refuse(try_input(rank, last, -1, 3, right), LOOM_ERR_ARGUMENT, "found -1, expected 0 to 0"));
    LOOM_TRY(try_input(rank, last, 0, 3, right));
    loom__decoder *decoder;
    return must_refuse(loom__decoder_create(last->module, 1, (int64_t[]){4}, &decoder), LOOM_ERR_UNSUPPORTED,
        "generate with pipeline_model_parallel_size 1");
}

static loom_status wrong_inputs(loom_rank *rank, void *argument) {
    loom_model_config config = config_of(LLAMA, cuts[0].layers);
    piece first = {0}, last = {0};
    (void)argument;
    loom_status status = piece_make(rank, &config, false, &cuts[0], 0, &first);
    if (!status)
        status = piece_make(rank, &config, false, &cuts[0], 1, &last);
    if (!status)
        status = try_inputs(rank, &first, &last);
    piece_destroy(&first);
    piece_destroy(&last);
    return status;
}

static loom_status try_chunks(loom_rank *rank, int64_t count, const loom_stage *chunks) {
    loom_model_config config = config_of(GPT2, 4);
    loom_module *module;
    loom_module_environment environment = {
        .rank = rank, .tensor_group = loom_rank_world(rank), .stages = 2, .chunk_count = count, .chunks = chunks};
    LOOM_TRY(loom__gpt_create(&config, NULL, true, &module));
    loom_status status = module->materialize(module->context, &environment);
    module->destroy(module->context);
    return status;
}

static loom_status wrong_chunks(loom_rank *rank, void *argument) {
    (void)argument;
    LOOM_TRY(must_refuse(try_chunks(rank, 1, NULL), LOOM_ERR_ARGUMENT, "stage 0 of 2 was given no chunks"));
    LOOM_TRY(must_refuse(try_chunks(rank, 0, cuts[0].chunks), LOOM_ERR_ARGUMENT, "found 0, expected 1 or more"));
    const loom_stage beyond = {3, 2, false, true}, backwards[] = {{2, 1, true, false}, {1, 1, false, false}};
    const loom_stage two_ends[] = {{0, 1, true, false}, {1, 1, true, false}};
    const loom_stage two_losses[] = {{0, 1, false, true}, {1, 1, false, true}};
    LOOM_TRY(must_refuse(try_chunks(rank, 1, &beyond), LOOM_ERR_ARGUMENT, "2 layers from layer 3 on"));
    LOOM_TRY(must_refuse(try_chunks(rank, 2, backwards), LOOM_ERR_ARGUMENT, "chunk 1 of a stage has 1 layers"));
    LOOM_TRY(must_refuse(try_chunks(rank, 2, two_ends), LOOM_ERR_ARGUMENT, "the embedding: expected in the first"));
    return must_refuse(try_chunks(rank, 2, two_losses), LOOM_ERR_ARGUMENT, "the loss: expected in the last");
}

static void what_is_wrong_with_activations_is_named(void **state) {
    (void)state;
    must_run(1, wrong_inputs, NULL, "wrong inputs");
}

static void chunks_that_the_model_cannot_have_are_named(void **state) {
    (void)state;
    must_run(1, wrong_chunks, NULL, "wrong chunks");
}

static loom_status shapes(loom_rank *rank, void *argument) {
    const bool *sp = argument;
    loom_model_config config = config_of(GPT2, 4);
    piece p = {0};
    int64_t shape[LOOM_MAX_DIMS];
    int dims = 0;
    loom_status status = piece_make(rank, &config, *sp, &cuts[0], 1, &p);
    if (!status)
        status = p.module->activation_shape(p.module->context, 3, 6, &dims, shape);
    if (!status && (dims != 3 || shape[0] != (*sp ? 3 : 6) || shape[1] != 3 || shape[2] != 24))
        status = loom_fail(LOOM_ERR_INTERNAL, "found [%lld, %lld, %lld]", (long long)shape[0], (long long)shape[1],
            (long long)shape[2]);
    if (!status && *sp)
        status = must_refuse(p.module->activation_shape(p.module->context, 3, 7, &dims, shape), LOOM_ERR_CONFIG,
            "7 positions cannot be split over 2 tensor ranks");
    piece_destroy(&p);
    return status;
}

static void activations_are_split_over_the_sequence_with_sequence_parallelism_alone(void **state) {
    (void)state;
    bool sp = false;
    must_run(2, shapes, &sp, "tp 2");
    sp = true;
    must_run(2, shapes, &sp, "tp 2, sequence parallel");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_in_a_row_give_the_bits_of_the_uncut_model),
        cmocka_unit_test(so_they_do_on_two_tensor_ranks),
        cmocka_unit_test(so_they_do_with_two_microbatches_in_flight_and_weight_halves_at_the_end),
        cmocka_unit_test(what_is_wrong_with_activations_is_named),
        cmocka_unit_test(chunks_that_the_model_cannot_have_are_named),
        cmocka_unit_test(activations_are_split_over_the_sequence_with_sequence_parallelism_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
