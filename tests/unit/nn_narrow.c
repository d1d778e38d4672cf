/* A small GPT in bf16 and fp16 beside the same model in fp32, on one tensor rank and on several: the loss, the
 * gradients, the memory of the activations, and generation's cache. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "nn/layer.h"
#include "parallel/parallel.h"
#include "tensor/dtype.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { S = 24, B = 3, VOCABULARY = 61, LAYERS = 2, SEED = 5, KINDS = 2, SCALE = 1024 };

/* gpt2; llama with norms of heads and zero-centred weights. */
static loom_model_config config_of(int kind) {
    return (loom_model_config){.architecture = kind ? "llama" : "gpt2",
        .num_layers = LAYERS,
        .hidden_size = 48,
        .ffn_hidden_size = 96,
        .num_attention_heads = 6,
        .num_query_groups = 6,
        .qk_layernorm = kind == 1,
        .layernorm_zero_centered_gamma = kind == 1,
        .seq_length = S,
        .max_position_embeddings = S,
        .vocab_size = VOCABULARY,
        .make_vocab_size_divisible_by = 4,
        .normalization = kind ? LOOM_RMSNORM : LOOM_LAYERNORM,
        .layernorm_epsilon = 1e-5,
        .activation = kind ? LOOM_SWIGLU : LOOM_GELU_TANH,
        .position_embedding_type = kind ? LOOM_POSITION_ROPE : LOOM_POSITION_LEARNED,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = kind == 0,
        .add_qkv_bias = kind == 0,
        .share_embeddings_and_output_weights = kind == 0,
        .hidden_dropout = kind ? 0 : 0.1,
        .attention_dropout = kind ? 0 : 0.1,
        .init_method_std = 0.15,
        .use_scaled_init = true};
}

typedef struct model {
    loom_model_config config;
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    loom__layer layers[LAYERS];
    loom_parameter *words, *positions, *norm, *norm_bias, *output;
    float *cosine, *sine;
} model;

static loom_status make_rope(model *m) {
    int64_t half = m->config.kv_channels / 2;
    m->cosine = malloc((size_t)(S * half) * sizeof(float));
    m->sine = malloc((size_t)(S * half) * sizeof(float));
    CHECK(m->cosine && m->sine, "out of memory");
    for (int64_t i = 0; i < S * half; i++) {
        double angle = (double)(i / half) * pow(10000, -(double)(i % half) / (double)half);
        m->cosine[i] = (float)cos(angle);
        m->sine[i] = (float)sin(angle);
    }
    return LOOM_OK;
}

static loom_status model_make(int kind, loom_dtype dtype, loom_comm *tp, bool sequence_parallel, model *m) {
    *m = (model){.config = config_of(kind)};
    int size = loom_comm_size(tp), me = loom_comm_rank(tp);
    LOOM_TRY(loom__model_config_complete(&m->config, size, sequence_parallel));
    LOOM_TRY(loom__model_spec_create(&m->config, &m->spec));
    LOOM_TRY(loom__part_create(m->spec, 1, NULL, 0, &m->part));
    LOOM_TRY(loom__parameter_set_create(
        m->spec, m->part, &(loom__tensor_place){size, me, .sequence_parallel = sequence_parallel}, &m->set));
    LOOM_TRY(loom__parameter_set_initialize(m->set, SEED));
    LOOM_TRY(make_rope(m));
    for (int64_t i = 0; i < m->set->count; i++) {
        loom_parameter *parameter = &m->set->parameters[i];
        int64_t count = loom_parameter_count(parameter);
        parameter->grad = malloc((size_t)(count + 1) * sizeof(float));
        CHECK(parameter->grad, "out of memory");
        if (dtype != LOOM_F32) {
            uint16_t *to = malloc((size_t)(count + 1) * sizeof *to);
            CHECK(to, "out of memory");
            loom__parameter_narrow(parameter, dtype, to);
        }
    }
    for (int64_t i = 0; i < LAYERS; i++)
        LOOM_TRY(loom__layer_bind(m->set, &m->config, i, &m->layers[i]));
    m->words = loom__parameter_set_find(m->set, "embedding.word_embeddings.weight");
    m->positions = loom__parameter_set_find(m->set, "embedding.position_embeddings.weight");
    m->norm = loom__parameter_set_find(m->set, "decoder.final_layernorm.weight");
    m->norm_bias = loom__parameter_set_find(m->set, "decoder.final_layernorm.bias");
    m->output = kind ? loom__parameter_set_find(m->set, "output_layer.weight") : m->words;
    return LOOM_OK;
}

static void model_free(model *m) {
    for (int64_t i = 0; m->set && i < m->set->count; i++) {
        free(m->set->parameters[i].grad);
        free(m->set->parameters[i].data16);
    }
    loom__parameter_set_destroy(m->set);
    loom__part_destroy(m->part);
    loom__model_spec_destroy(m->spec);
    free(m->cosine);
    free(m->sine);
}

/* Logits [S, B, v/tp] of tokens [B, S]. */
static loom_status forward(
    const model *m, loom_tape *tape, loom__microbatch *microbatch, const int64_t *tokens, loom_tensor **logits) {
    loom_comm *tp = microbatch->tp;
    bool sp = microbatch->sequence_parallel;
    int64_t first = m->words->shape[0] * loom_comm_rank(tp);
    loom_tensor *x = NULL, *next = NULL;
    LOOM_TRY(
        loom__vocab_embedding(tape, tokens, microbatch->b, microbatch->s, m->words, first, VOCABULARY, tp, sp, &x));
    if (m->positions) {
        LOOM_TRY(loom__position_embedding(
            tape, x, m->positions, NULL, microbatch->rows.first + loom__first_row(microbatch), &next));
        loom_tensor_release(x);
        x = next;
    }
    for (int64_t i = 0; i < LAYERS; i++) {
        LOOM_TRY(loom__layer_forward(&m->layers[i], tape, microbatch, x, &next));
        loom_tensor_release(x);
        x = next;
    }
    LOOM_TRY(loom__norm(tape, &m->config, x, m->norm, m->norm_bias, &next));
    loom_tensor_release(x);
    loom_status status = loom__column_linear(tape, next, m->output, NULL, tp, sp, logits);
    loom_tensor_release(next);
    return status;
}

static void make_tokens(int64_t *tokens, int64_t *labels) {
    for (int64_t i = 0; i < S * B; i++) {
        tokens[i] = i * 17 % VOCABULARY;
        labels[i] = i * 17 * 3 % VOCABULARY;
    }
}

typedef struct outcome {
    double loss;
    size_t activations; /* bytes in use between forward and backward */
    float *gradient;    /* canonical, of all parameters one after the other */
    int64_t count;
    int64_t *ends; /* [parameters] */
    int64_t parameters;
} outcome;

/* A replica that saw a part of the rows or heads has a part of the gradient. */
static loom_status gather_gradients(const model *m, loom_comm *tp, outcome *out) {
    out->parameters = m->set->count;
    out->ends = malloc((size_t)m->set->count * sizeof *out->ends);
    CHECK(out->ends, "out of memory");
    for (int pass = 0; pass < 2; pass++) {
        int64_t at = 0;
        for (int64_t i = 0; i < m->set->count; i++) {
            loom_parameter *parameter = &m->set->parameters[i];
            const loom__parameter_descriptor *d = parameter->descriptor;
            if (pass && (parameter->sequence_partial || parameter->tensor_partial))
                LOOM_TRY(loom_all_reduce(
                    tp, parameter->grad, parameter->grad, loom_parameter_count(parameter), LOOM_F32, LOOM_SUM));
            if (pass)
                LOOM_TRY(loom__parameter_gather(m->set, i, LOOM__PARAMETER_GRAD, tp, out->gradient + at));
            at += d->shape[0] * (d->dims == 2 ? d->shape[1] : 1);
            out->ends[i] = at;
        }
        out->count = at;
        if (!pass)
            out->gradient = malloc((size_t)(at + 1) * sizeof(float));
        CHECK(out->gradient, "out of memory");
    }
    return LOOM_OK;
}

static loom_status run_model(
    loom_rank *rank, int kind, loom_dtype dtype, loom_comm *tp, bool sequence_parallel, outcome *out) {
    static const int64_t sample[B] = {4, 5, 9};
    int64_t tokens[S * B], labels[S * B];
    model m;
    loom_tape *tape;
    loom_tensor *logits = NULL, *losses = NULL, *d_losses = NULL;
    make_tokens(tokens, labels);
    LOOM_TRY(model_make(kind, dtype, tp, sequence_parallel, &m));
    loom__microbatch microbatch = {.references = 1,
        .tp = tp,
        .sequence_parallel = sequence_parallel,
        .training = true,
        .seed = SEED,
        .b = B,
        .s = S,
        .sample = sample,
        .rope = {S, m.config.kv_channels, m.cosine, m.sine}};
    loom_tape_options options = {.record = true, .check_finite = true};
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(forward(&m, tape, &microbatch, tokens, &logits));
    int64_t columns = m.output->shape[0], first = columns * loom_comm_rank(tp), valid = VOCABULARY - first;
    LOOM_TRY(loom__vocab_cross_entropy(
        tape, logits, labels, first, valid < columns ? valid : columns, VOCABULARY, tp, &losses));
    loom_tensor_release(logits);
    CHECK(losses->dtype == LOOM_F32, "losses are kept in %s", loom_dtype_name(losses->dtype));
    *out = (outcome){.activations = loom_rank_memory(rank).in_use};
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){S, B}, &d_losses));
    for (int64_t i = 0; i < S * B; i++) {
        out->loss += (double)loom_tensor_f32(losses)[i] / (S * B);
        loom_tensor_f32(d_losses)[i] = (float)SCALE / (S * B);
    }
    LOOM_TRY(loom_tape_backward(tape, losses, d_losses));
    LOOM_TRY(gather_gradients(&m, tp, out));
    loom_tensor_release(losses);
    loom_tensor_release(d_losses);
    loom_tape_destroy(tape);
    model_free(&m);
    CHECK(loom_rank_memory(rank).in_use == 0, "%zu bytes are still in use", loom_rank_memory(rank).in_use);
    return LOOM_OK;
}

static void outcome_free(outcome *out) {
    free(out->gradient);
    free(out->ends);
}

static double cosine_of(const float *x, const float *y, int64_t first, int64_t end) {
    double xy = 0, xx = 0, yy = 0;
    for (int64_t i = first; i < end; i++) {
        xy += (double)x[i] * (double)y[i];
        xx += (double)x[i] * (double)x[i];
        yy += (double)y[i] * (double)y[i];
    }
    return xy / sqrt(xx * yy);
}

typedef struct layout {
    int kind;
    loom_dtype dtype;
    bool sequence_parallel;
} layout;

/* Whole gradients within 0.999, and each parameter's, so that a small one is not lost among the large, within 0.995. */
static loom_status compare(loom_rank *rank, void *argument) {
    const layout *at = argument;
    outcome wide, narrow;
    LOOM_TRY(run_model(rank, at->kind, LOOM_F32, loom_rank_world(rank), at->sequence_parallel, &wide));
    LOOM_TRY(run_model(rank, at->kind, at->dtype, loom_rank_world(rank), at->sequence_parallel, &narrow));
    CHECK(fabs(narrow.loss - wide.loss) < 1e-2 * wide.loss, "loss %.6f, in fp32 %.6f", narrow.loss, wide.loss);
    CHECK(narrow.loss != wide.loss, "the loss is that of fp32, %.9g: nothing was rounded", wide.loss);
    double whole = cosine_of(narrow.gradient, wide.gradient, 0, wide.count);
    CHECK(whole > 0.999, "cosine of the gradients %.6f", whole);
    for (int64_t i = 0; i < wide.parameters; i++) {
        double cosine = cosine_of(narrow.gradient, wide.gradient, i ? wide.ends[i - 1] : 0, wide.ends[i]);
        CHECK(cosine > 0.995, "cosine of the gradients of parameter %lld: %.6f", (long long)i, cosine);
    }
    double share = (double)narrow.activations / (double)wide.activations;
    CHECK(share < 0.55, "activations take %zu bytes, in fp32 %zu", narrow.activations, wide.activations);
    outcome_free(&wide);
    outcome_free(&narrow);
    return LOOM_OK;
}

static void run_layout(int ranks, layout at) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
#if defined(__SANITIZE_THREAD__)
    options.kernels = loom_kernels_reference(); /* a library's product is not instrumented */
#endif
    if (loom_run_local(ranks, compare, &at, &options))
        fail_msg("model %d in %s on %d ranks%s: %s", at.kind, loom_dtype_name(at.dtype), ranks,
            at.sequence_parallel ? ", sequence parallel" : "", loom_error_message());
}

static void a_gpt_in_16_bits_is_near_fp32_on_every_layout(void **state) {
    static const loom_dtype dtypes[] = {LOOM_BF16, LOOM_F16};
    (void)state;
    for (int kind = 0; kind < KINDS; kind++)
        for (int d = 0; d < 2; d++)
            for (int ranks = 1; ranks <= 3; ranks++)
                for (int sp = 0; sp < (ranks > 1 ? 2 : 1); sp++)
                    run_layout(ranks, (layout){kind, dtypes[d], sp});
}

/* ---- generation ---- */

/* The logits of the last position, [B, VOCABULARY]. */
static loom_status last_logits(loom_tensor *logits, loom_comm *tp, float *out) {
    int64_t s = logits->shape[0];
    float *all = malloc((size_t)(s * B * VOCABULARY) * sizeof *all);
    CHECK(all, "out of memory");
    loom_status status = loom__gather_logits(logits, VOCABULARY, tp, all);
    for (int64_t j = 0; !status && j < B; j++)
        memcpy(out + j * VOCABULARY, all + (j * s + s - 1) * VOCABULARY, VOCABULARY * sizeof *out);
    free(all);
    return status;
}

/* All positions at once, and one after the other with a cache. */
static loom_status decode(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    int64_t tokens[S * B], labels[S * B];
    float whole[B * VOCABULARY], stepwise[B * VOCABULARY];
    model m;
    loom_tape *tape;
    loom_tensor *logits = NULL;
    make_tokens(tokens, labels);
    LOOM_TRY(model_make(at->kind, at->dtype, tp, false, &m));
    loom__microbatch microbatch = {
        .references = 1, .tp = tp, .b = B, .s = S, .rope = {S, m.config.kv_channels, m.cosine, m.sine}};
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = false}, &tape));
    LOOM_TRY(forward(&m, tape, &microbatch, tokens, &logits));
    LOOM_TRY(last_logits(logits, tp, whole));
    loom_tensor_release(logits);
    int64_t g = m.config.num_query_groups / loom_comm_size(tp);
    int64_t room[B];
    for (int64_t j = 0; j < B; j++)
        room[j] = S;
    LOOM_TRY(loom__kv_cache_create(rank, LAYERS, B, room, g, m.config.kv_channels, &microbatch.cache));
    for (int64_t j = 0; j < B; j++)
        microbatch.cache->reading[j] = 1;
    for (int64_t t = 0; t < S; t++) {
        int64_t one[B];
        for (int64_t j = 0; j < B; j++)
            one[j] = tokens[j * S + t];
        microbatch.s = 1;
        microbatch.rows = loom_positions_from(t);
        LOOM_TRY(forward(&m, tape, &microbatch, one, &logits));
        LOOM_TRY(last_logits(logits, tp, stepwise));
        loom_tensor_release(logits);
        for (int64_t j = 0; j < B; j++)
            microbatch.cache->length[j]++;
    }
    CHECK(microbatch.cache->k[0]->dtype == at->dtype, "the cache is kept in %s",
        loom_dtype_name(microbatch.cache->k[0]->dtype));
    double cosine = cosine_of(stepwise, whole, 0, B * VOCABULARY);
    CHECK(cosine > 0.9995, "cosine of the logits %.6f", cosine);
    loom__kv_cache_destroy(microbatch.cache);
    loom_tape_destroy(tape);
    model_free(&m);
    return LOOM_OK;
}

static void generation_with_a_cache_of_16_bits_gives_the_same_logits(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        loom_run_options options = loom_run_options_default();
        options.threads = 1;
        options.timeout = 60;
        layout at = {1, LOOM_BF16, false};
        if (loom_run_local(ranks, decode, &at, &options))
            fail_msg("%d ranks: %s", ranks, loom_error_message());
    }
}

/* ---- parameters ---- */

static loom_status scatter_and_gather(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    model m;
    LOOM_TRY(model_make(at->kind, at->dtype, tp, false, &m));
    for (int64_t i = 0; i < m.set->count; i++) {
        const loom__parameter_descriptor *d = &m.spec->parameters[i];
        int64_t count = d->shape[0] * (d->dims == 2 ? d->shape[1] : 1);
        float *canonical = malloc((size_t)(count + 1) * sizeof(float)),
              *back = malloc((size_t)(count + 1) * sizeof(float));
        CHECK(canonical && back, "out of memory");
        for (int64_t e = 0; e < count; e++)
            canonical[e] = 1.0f / (float)(e + 3 + i);
        LOOM_TRY(loom__parameter_scatter(m.set, i, canonical));
        LOOM_TRY(loom__parameter_gather(m.set, i, LOOM__PARAMETER_DATA, tp, back));
        for (int64_t e = 0; e < count; e++)
            CHECK(back[e] == loom_bf16_to_f32(loom_f32_to_bf16(canonical[e])), "%s: element %lld is %.9g, was %.9g",
                d->name, (long long)e, (double)back[e], (double)canonical[e]);
        free(canonical);
        free(back);
    }
    CHECK(loom__parameter_set_initialize(m.set, SEED) == LOOM_ERR_STATE, "narrowed parameters were initialized");
    model_free(&m);
    return LOOM_OK;
}

static void parameters_of_16_bits_give_back_what_they_took_rounded(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        layout at = {0, LOOM_BF16, false};
        loom_run_options options = loom_run_options_default();
        options.threads = 1;
        options.timeout = 60;
        if (loom_run_local(ranks, scatter_and_gather, &at, &options))
            fail_msg("%d ranks: %s", ranks, loom_error_message());
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpt_in_16_bits_is_near_fp32_on_every_layout),
        cmocka_unit_test(generation_with_a_cache_of_16_bits_gives_the_same_logits),
        cmocka_unit_test(parameters_of_16_bits_give_back_what_they_took_rounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
