/* The engine of `megaloom check-layout` against faults that are put into the layout's own run, through the table of
 * kernels: each must be named by tensor, layer and step, and nothing may be named where there is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/layout_check.h"
#include <string.h>

/* A layer's two norms in a forward, and the final one; two layers. */
enum { NORMS = 5, STEPS = 3, MICROBATCHES = 2 };

typedef struct counts {
    int forward, backward, updates;
} counts;
/* Kernels have no context; each rank is a thread. */
static _Thread_local counts of_rank;

static loom_run_config *load(const char *const *overrides, int64_t count) {
    static const char text[] =
        "ranks: 2\nthreads: 1\nsteps: 100\n"
        "model: {architecture: llama, num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, "
        "seq_length: 16, vocab_size: 64, hidden_dropout: 0.1}\n"
        "strategy: {tensor_model_parallel_size: 2, sequence_parallel: true}\n"
        "data: {kind: mock, micro_batch_size: 2, global_batch_size: 4}\noptim: {lr: 1.0e-3}\n";
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_from_text("run.yaml", text, sizeof text - 1, overrides, count, &config), LOOM_OK);
    return config;
}

static loom_cli_layout_finding find_with(
    const loom_kernels *kernels, const char *const *overrides, int64_t override_count) {
    loom_run_config *config = load(overrides, override_count);
    loom_cli_layout_check check = {.config = config, .steps = STEPS, .kernels = kernels};
    loom_cli_layout_finding finding = {0};
    loom_status status = loom_cli_check_layout_run(&check, &finding);
    if (status)
        print_error("%s\n", loom_error_message());
    assert_int_equal(status, LOOM_OK);
    loom_run_config_destroy(config);
    return finding;
}

static loom_cli_layout_finding find(const loom_kernels *kernels) {
    return find_with(kernels, NULL, 0);
}

/* ---- faults ---- */

/* The first norm of layer 1 is off by a thousandth in one row, in the second step. */
static void wrong_forward(
    loom_team *team, int64_t rows, int64_t h, float eps, const float *x, const float *weight, float *y, float *rstd) {
    loom_kernels_fast()->rmsnorm(team, rows, h, eps, x, weight, y, rstd);
    int call = of_rank.forward++;
    if (call / (NORMS * MICROBATCHES) == 1 && call % NORMS == 2)
        for (int64_t c = 0; c < h; c++)
            y[c] *= 1.001f;
}

/* The gradient of the weight of layer 0's second norm misses its half, as it would without the sum over ranks. */
static void wrong_gradient(loom_team *team, int64_t rows, int64_t h, const float *x, const float *rstd,
    const float *d_y, bool accumulate, float *d_weight) {
    loom_kernels_fast()->rmsnorm_backward_weight(team, rows, h, x, rstd, d_y, accumulate, d_weight);
    if (of_rank.backward++ % NORMS == 3)
        for (int64_t c = 0; c < h; c++)
            d_weight[c] *= 0.5f;
}

/* One update of the run, of the first tensor that is updated, takes a tenth too large a step. */
static void wrong_update(
    loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v, float *max) {
    loom_adamw wrong = *adamw;
    if (of_rank.updates++ == 0)
        wrong.lr *= 1.1f;
    loom_kernels_fast()->adamw(team, count, &wrong, d_w, w, m, v, max);
}

/* Among weights of 11 bits only a step at a wrong scale stands out. */
static void far_too_large_update(
    loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v, float *max) {
    loom_adamw wrong = *adamw;
    wrong.lr *= 30;
    loom_kernels_fast()->adamw(team, count, &wrong, d_w, w, m, v, max);
}

/* ---- claims ---- */

static void a_layout_without_a_fault_differs_by_noise_alone(void **state) {
    (void)state;
    loom_cli_layout_finding found = find(NULL);
    assert_int_equal(found.beyond, 0);
    /* Activations of 2 layers, the loss, 15 gradients and weights of a step, the norm: three times. */
    assert_int_equal(found.compared % STEPS, 0);
    assert_true(found.compared > STEPS * 20);
    assert_true(found.apart <= found.allowed);
}

static void a_forward_that_is_wrong_is_named_by_step_and_layer(void **state) {
    loom_kernels kernels = *loom_kernels_fast();
    (void)state;
    kernels.rmsnorm = wrong_forward;
    loom_cli_layout_finding found = find(&kernels);
    assert_true(found.beyond > 1);
    assert_int_equal(found.step, 2);
    assert_string_equal(found.what, "activations after attention of decoder.layers.1");
    assert_true(found.apart > found.allowed);
}

static void a_gradient_that_is_wrong_is_named_by_tensor(void **state) {
    loom_kernels kernels = *loom_kernels_fast();
    (void)state;
    kernels.rmsnorm_backward_weight = wrong_gradient;
    loom_cli_layout_finding found = find(&kernels);
    assert_int_equal(found.step, 1);
    assert_string_equal(found.what, "gradient of decoder.layers.0.pre_mlp_layernorm.weight");
    assert_true(found.apart > 0.1);
}

static void an_update_that_is_wrong_is_named_as_one(void **state) {
    loom_kernels kernels = *loom_kernels_fast();
    (void)state;
    kernels.adamw = wrong_update;
    loom_cli_layout_finding found = find(&kernels);
    assert_int_equal(found.step, 1);
    assert_memory_equal(found.what, "updated ", strlen("updated "));
}

/* 2^32 overflows in fp16 until it has been halved often enough, on one rank as on the layout. */
static void steps_that_a_loss_scale_skips_are_no_difference(void **state) {
    static const char *const overrides[] = {"precision=16-mixed"};
    (void)state;
    loom_cli_layout_finding found = find_with(NULL, overrides, 1);
    assert_int_equal(found.beyond, 0);
    assert_true(found.skipped > 5);
    assert_true(found.overflowed > 0);
    /* Those after them are compared as ever. */
    assert_int_equal(found.compared % (STEPS + found.skipped), 0);
    assert_true(found.step > found.skipped);
}

static void an_update_that_is_wrong_is_named_behind_skipped_steps(void **state) {
    static const char *const overrides[] = {"precision=16-mixed"};
    loom_kernels kernels = *loom_kernels_fast();
    (void)state;
    kernels.adamw = far_too_large_update;
    loom_cli_layout_finding found = find_with(&kernels, overrides, 1);
    assert_true(found.beyond > 0);
    assert_int_equal(found.step, found.skipped + 1);
    assert_memory_equal(found.what, "updated ", strlen("updated "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layout_without_a_fault_differs_by_noise_alone),
        cmocka_unit_test(a_forward_that_is_wrong_is_named_by_step_and_layer),
        cmocka_unit_test(a_gradient_that_is_wrong_is_named_by_tensor),
        cmocka_unit_test(an_update_that_is_wrong_is_named_as_one),
        cmocka_unit_test(steps_that_a_loss_scale_skips_are_no_difference),
        cmocka_unit_test(an_update_that_is_wrong_is_named_behind_skipped_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
