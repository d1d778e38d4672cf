/* The parameters of a rank: whatever the number of tensor ranks, together they hold the same canonical tensors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "nn/layer.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { SEED = 77 };

enum { KINDS = 4 }; /* gpt2, llama, llama of one query group, the same with norms of heads and zero-centred weights */

static loom_model_config config_of(int kind) {
    loom_model_config config = {
        .architecture = kind ? "llama" : "gpt2",
        .num_layers = 2,
        .hidden_size = 24,
        .ffn_hidden_size = 36,
        .num_attention_heads = 6,
        .num_query_groups = kind == 0   ? 6
                            : kind == 1 ? 3
                                        : 1,
        .replicate_query_groups = kind >= 2,
        .qk_layernorm = kind == 3,
        .layernorm_zero_centered_gamma = kind == 3,
        .seq_length = 12,
        .vocab_size = 29,
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
        .init_method_std = 0.02,
        .use_scaled_init = true,
    };
    return config;
}

static int64_t elements(const int64_t *shape, int dims) {
    return shape[0] * (dims == 2 ? shape[1] : 1);
}

typedef struct whole {
    int kind;
    int64_t count;
    float **tensors; /* by a single rank */
} whole;

/* ---- on one rank, without a group ---- */

static loom_status make_whole(whole *w) {
    loom_model_config config = config_of(w->kind);
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    LOOM_TRY(loom__model_config_complete(&config, 1, false));
    LOOM_TRY(loom__model_spec_create(&config, &spec));
    LOOM_TRY(loom__part_create(spec, 1, NULL, 0, &part));
    LOOM_TRY(loom__parameter_set_create(spec, part, &(loom__tensor_place){.tp = 1}, &set));
    LOOM_TRY(loom__parameter_set_initialize(set, SEED));
    w->count = spec->count;
    w->tensors = calloc((size_t)spec->count, sizeof *w->tensors);
    CHECK(w->tensors, "out of memory");
    for (int64_t i = 0; i < spec->count; i++) {
        const loom__parameter_descriptor *d = &spec->parameters[i];
        w->tensors[i] = malloc((size_t)(elements(d->shape, d->dims) + 1) * sizeof(float));
        CHECK(w->tensors[i], "out of memory");
        LOOM_TRY(loom__parameter_gather(set, i, LOOM__PARAMETER_DATA, NULL, w->tensors[i]));
    }
    loom__parameter_set_destroy(set);
    loom__part_destroy(part);
    loom__model_spec_destroy(spec);
    return LOOM_OK;
}

static void free_whole(whole *w) {
    for (int64_t i = 0; i < w->count; i++)
        free(w->tensors[i]);
    free(w->tensors);
}

static void initial_values_are_those_of_their_descriptors(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        loom_model_config config = config_of(kind);
        loom__model_spec *spec;
        loom__part *part;
        loom__parameter_set *set;
        assert_int_equal(loom__model_config_complete(&config, 1, false), LOOM_OK);
        assert_int_equal(loom__model_spec_create(&config, &spec), LOOM_OK);
        assert_int_equal(loom__part_create(spec, 1, NULL, 0, &part), LOOM_OK);
        assert_int_equal(loom__parameter_set_create(spec, part, &(loom__tensor_place){.tp = 1}, &set), LOOM_OK);
        assert_int_equal(loom__parameter_set_initialize(set, SEED), LOOM_OK);
        for (int64_t i = 0; i < spec->count; i++) {
            const loom__parameter_descriptor *d = &spec->parameters[i];
            const loom_parameter *p = &set->parameters[i];
            int64_t n = elements(d->shape, d->dims);
            double square = 0;
            for (int64_t e = 0; e < n; e++) {
                if (d->initial != LOOM__INIT_NORMAL)
                    assert_true(p->data[e] == (d->initial == LOOM__INIT_ONE ? 1.0f : 0.0f));
                square += (double)p->data[e] * (double)p->data[e];
            }
            /* The deviation of a mean of n squares of normals is sqrt(2/n). */
            if (d->initial == LOOM__INIT_NORMAL)
                assert_true(fabs(square / (double)n / (d->std * d->std) - 1) < 5 * sqrt(2.0 / (double)n));
            for (int64_t e = n; e < elements(p->shape, p->dims); e++)
                assert_true(p->data[e] == 0); /* padding of the vocabulary */
        }
        loom__parameter_set_destroy(set);
        loom__part_destroy(part);
        loom__model_spec_destroy(spec);
    }
}

/* ---- on several ---- */

static loom_status check_flags(const loom__parameter_set *set, bool sequence_parallel) {
    for (int64_t i = 0; i < set->count; i++) {
        const loom_parameter *p = set->list[i];
        const loom__parameter_descriptor *d = &set->spec->parameters[i];
        bool shard = d->shard != LOOM__SHARD_NONE;
        CHECK(loom__parameter_set_find(set, p->name) == p && p->index == i, "%s is not found", p->name);
        CHECK(
            p->tensor_parallel == (shard && set->at.tp > 1), "%s: tensor_parallel is %d", p->name, p->tensor_parallel);
        CHECK(p->sequence_partial == (d->sequence_partial && sequence_parallel), "%s: sequence_partial is %d", p->name,
            p->sequence_partial);
        CHECK(p->tensor_partial == (d->tensor_partial && set->at.tp > 1), "%s: tensor_partial is %d", p->name,
            p->tensor_partial);
        CHECK(p->decay == (p->dims == 2), "%s: decay is %d", p->name, p->decay);
        CHECK(p->grad == NULL && !p->grad_written, "%s has a gradient already", p->name);
    }
    CHECK(loom__parameter_set_find(set, "decoder.layers.9.nothing") == NULL, "a parameter that is none was found");
    return LOOM_OK;
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    const whole *w = argument;
    loom_comm *tp = loom_rank_world(rank);
    int size = loom_comm_size(tp), me = loom_comm_rank(tp);
    loom_model_config config = config_of(w->kind);
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    LOOM_TRY(loom__model_config_complete(&config, size, size > 1));
    LOOM_TRY(loom__model_spec_create(&config, &spec));
    LOOM_TRY(loom__part_create(spec, 1, NULL, 0, &part));
    LOOM_TRY(
        loom__parameter_set_create(spec, part, &(loom__tensor_place){size, me, .sequence_parallel = size > 1}, &set));
    LOOM_TRY(loom__parameter_set_initialize(set, SEED));
    LOOM_TRY(check_flags(set, size > 1));
    CHECK(spec->count == w->count, "%lld parameters, one rank has %lld", (long long)spec->count, (long long)w->count);
    for (int64_t i = 0; i < spec->count; i++) {
        const loom__parameter_descriptor *d = &spec->parameters[i];
        loom_parameter *p = &set->parameters[i];
        int64_t count = elements(d->shape, d->dims), local = elements(p->shape, p->dims);
        size_t bytes = (size_t)local * sizeof(float);
        float *gathered = malloc((size_t)(count + 1) * sizeof(float)), *before = malloc(bytes + 1);
        CHECK(gathered && before, "out of memory");
        LOOM_TRY(loom__parameter_gather(set, i, LOOM__PARAMETER_DATA, tp, gathered));
        CHECK(memcmp(gathered, w->tensors[i], (size_t)count * sizeof(float)) == 0,
            "%s: the shards are not the whole of one rank", p->name);
        memcpy(before, p->data, bytes);
        memset(p->data, 0x55, bytes);
        LOOM_TRY(loom__parameter_scatter(set, i, w->tensors[i]));
        CHECK(memcmp(before, p->data, bytes) == 0, "%s: a shard of the whole is not what was initialised", p->name);
        /* Each canonical element counts once; padding rows are counted by their holder. */
        int64_t owned = p->owned, padded = d->dims == 2 ? d->padded_rows * d->shape[1] : d->padded_rows;
        LOOM_TRY(loom_all_reduce(tp, &owned, &owned, 1, LOOM_I64, LOOM_SUM));
        CHECK(owned == (d->shard == LOOM__SHARD_QKV_GROUPS || d->shard == LOOM__SHARD_GATE_UP ? count : padded),
            "%s: %lld elements are owned, the tensor has %lld", p->name, (long long)owned, (long long)count);
        free(gathered);
        free(before);
    }
    loom__parameter_set_destroy(set);
    loom__part_destroy(part);
    loom__model_spec_destroy(spec);
    return LOOM_OK;
}

static void shards_together_are_the_tensors_of_one_rank(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        static const int sizes[] = {1, 2, 3, 6};
        whole w = {.kind = kind};
        assert_int_equal(make_whole(&w), LOOM_OK);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            if (kind == 1 && 3 % sizes[i])
                continue;
            loom_run_options options = loom_run_options_default();
            options.threads = 1;
            options.timeout = 60;
            if (loom_run_local(sizes[i], on_rank, &w, &options))
                fail_msg("kind %d, tp %d: %s", kind, sizes[i], loom_error_message());
        }
        free_whole(&w);
    }
}

static void a_layer_that_the_set_lacks_is_named(void **state) {
    (void)state;
    loom_model_config config = config_of(0);
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    loom__layer layer;
    assert_int_equal(loom__model_config_complete(&config, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&config, &spec), LOOM_OK);
    assert_int_equal(loom__part_create(spec, 1, NULL, 0, &part), LOOM_OK);
    assert_int_equal(loom__parameter_set_create(spec, part, &(loom__tensor_place){.tp = 1}, &set), LOOM_OK);
    assert_int_equal(loom__layer_bind(set, &config, 1, &layer), LOOM_OK);
    assert_non_null(layer.fc2_bias);
    assert_int_equal(loom__layer_bind(set, &config, 2, &layer), LOOM_ERR_INTERNAL);
    assert_non_null(strstr(loom_error_message(), "layer 2"));
    loom__parameter_set_destroy(set);
    loom__part_destroy(part);
    loom__model_spec_destroy(spec);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(initial_values_are_those_of_their_descriptors),
        cmocka_unit_test(shards_together_are_the_tensors_of_one_rank),
        cmocka_unit_test(a_layer_that_the_set_lacks_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
