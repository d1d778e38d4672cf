/* The optimizer's step over ranks: norm, clipping, groups, and failing together. Thread ranks stand for the
 * model-parallel group; each is a data-parallel group of one. */
#include <math.h>
#include <string.h>

#include "optim/optim.h"
#include "parallel/ddp_parameters.h"
#include "parallel/support.h"

static const loom_optimizer_config plain = {.optimizer = "adam",
    .lr = 1e-2,
    .weight_decay = 0.5,
    .decoupled_weight_decay = true,
    .adam_beta1 = 0.9,
    .adam_beta2 = 0.95,
    .adam_eps = 1e-8,
    .clip_grad = 1.0};
static const loom_lr_config constant = {.schedule = "megatron-constant"};

/* One rank's parameters under ddp and optimizer. */
typedef struct model {
    test_parameters set;
    loom__ddp *ddp;
    loom_optimizer *optimizer;
} model;

static loom_status model_create(loom_rank *rank, const int64_t *counts, int64_t count, int64_t bucket_size,
    const loom_optimizer_config *config, loom__optimizer_options options, model *made) {
    int me = loom_rank_index(rank);
    loom_comm *alone;
    loom__ddp_options ddp_options = loom__ddp_options_default();
    ddp_options.bucket_size = bucket_size;
    options.steps = 100;
    options.model_parallel = loom_rank_world(rank);
    *made = (model){0};
    test_parameters_create(&made->set, counts, count, 1.0f);
    LOOM_TRY(loom_group_create(rank, "alone", &me, 1, &alone));
    LOOM_TRY(loom__ddp_create(rank, &ddp_options, made->set.list, count, alone, &made->ddp));
    /* The ends of the list are replicated, as norms and biases are. */
    made->set.parameters[count - 1].tensor_parallel = false;
    made->set.parameters[count - 1].decay = false;
    return loom__optimizer_create(rank, config, &constant, made->ddp, &options, &made->optimizer);
}

static void model_destroy(model *made) {
    loom__optimizer_destroy(made->optimizer);
    loom__ddp_destroy(made->ddp);
    test_parameters_destroy(&made->set);
}

static const float *first_moment(const model *made) {
    return loom__optimizer_state_of(made->optimizer)->arrays[0].values;
}

static void fill(loom_parameter *parameter, float value) {
    for (int64_t e = 0; e < parameter->shape[0]; e++)
        parameter->grad[e] = value;
}

static loom_status norm_of_shards(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {1, 1};
    int me = loom_rank_index(rank);
    model made;
    loom_optimizer_outcome outcome;
    const loom__optimizer_options options = {.counts_replicated = me == 0};
    LOOM_TRY(model_create(rank, counts, 2, 0, &plain, options, &made));
    fill(made.set.list[0], me == 0 ? 3.0f : 4.0f);
    fill(made.set.list[1], 12.0f);
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.grad_norm == 13.0, "the norm is %.9g", outcome.grad_norm);
    CHECK(outcome.lr == 1e-2 && outcome.step == 1 && outcome.loss_scale == 1.0 && !outcome.skipped,
        "outcome: lr %g, step %lld", outcome.lr, (long long)outcome.step);
    /* Buffers are in reverse: place 0 is the replicated one. */
    const float *m = first_moment(&made);
    double clipped = 12.0 / (13.0 + 1e-6);
    CHECK(fabs((double)m[0] - 0.1 * clipped) < 1e-7, "the clipped gradient is %.9g, expected %.9g", (double)m[0] * 10,
        clipped);
    model_destroy(&made);
    return LOOM_OK;
}

static void the_norm_counts_a_replicated_parameter_once(void **state) {
    (void)state;
    must_run(2, norm_of_shards, NULL);
}

static int64_t tied_or_partly(const loom_parameter *parameter, void *context) {
    int me = *(const int *)context;
    if (parameter->index == 0) /* tied: the copy of rank 1 does not count */
        return me == 0 ? 1 : 0;
    if (parameter->index == 1) /* the last two of three are copies of what rank 0 holds */
        return me == 0 ? 3 : 1;
    return 0;
}

static loom_status norm_of_copies(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {1, 3, 1};
    int me = loom_rank_index(rank);
    model made;
    loom_optimizer_outcome outcome;
    const loom__optimizer_options options = {.counted_elements = tied_or_partly, .counted_context = &me};
    LOOM_TRY(model_create(rank, counts, 3, 0, &plain, options, &made));
    fill(made.set.list[0], 3.0f);
    fill(made.set.list[1], 2.0f);
    fill(made.set.list[2], 100.0f);
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.grad_norm == 5.0, "the norm is %.9g", outcome.grad_norm); /* 9 + 3*4 + 4 */
    model_destroy(&made);
    return LOOM_OK;
}

static void the_norm_counts_tied_and_copied_rows_once(void **state) {
    (void)state;
    must_run(2, norm_of_copies, NULL);
}

static int64_t too_many(const loom_parameter *parameter, void *context) {
    (void)context;
    return parameter->shape[0] + 1;
}

static loom_status count_too_many(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {7};
    model made;
    const loom__optimizer_options options = {.counted_elements = too_many};
    loom_status status = model_create(rank, counts, 1, 0, &plain, options, &made);
    CHECK(
        status == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), "p0 counts 8 elements on rank 0, expected 0 to 7"),
        "%s", loom_error_message());
    model_destroy(&made);
    return LOOM_OK;
}

static void a_count_beyond_the_parameter_is_refused(void **state) {
    (void)state;
    must_run(1, count_too_many, NULL);
}

typedef struct bits {
    int64_t bucket_size;
    int threads;
    float data[5000];
    double norm;
} bits;

static loom_status train(loom_rank *rank, void *argument) {
    bits *wanted = argument;
    const int64_t counts[] = {3, 4097, 64, 1, 130};
    model made;
    loom_optimizer_outcome outcome = {0};
    LOOM_TRY(model_create(
        rank, counts, 5, wanted->bucket_size, &plain, (loom__optimizer_options){.counts_replicated = true}, &made));
    for (int step = 0; step < 5; step++) {
        loom__ddp_begin_step(made.ddp);
        loom__ddp_expect_last(made.ddp, true);
        for (int64_t p = 4; p >= 0; p--) {
            bool accumulate;
            float *grad = loom_parameter_begin_grad(made.set.list[p], &accumulate);
            for (int64_t e = 0; e < counts[p]; e++)
                grad[e] = sinf((float)(e + 10 * p + step)) + (accumulate ? grad[e] : 0.0f);
            loom__ddp_parameter_ready(made.ddp, made.set.list[p]);
        }
        LOOM_TRY(loom__ddp_finish(made.ddp));
        LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    }
    float *at = wanted->data;
    for (int64_t p = 0; p < 5; p++) {
        memcpy(at, made.set.list[p]->data, (size_t)counts[p] * sizeof *at);
        at += counts[p];
    }
    wanted->norm = outcome.grad_norm;
    model_destroy(&made);
    return LOOM_OK;
}

static void weights_have_the_same_bits_for_any_bucket_size_and_team(void **state) {
    (void)state;
    static bits first, other;
    const int64_t sizes[] = {1, 7, 64, 0};
    loom_run_options options = loom_run_options_default();
    for (int i = 0; i < 8; i++) {
        bits *wanted = i ? &other : &first;
        memset(wanted, 0, sizeof *wanted);
        wanted->bucket_size = sizes[i / 2];
        options.threads = 1 + i % 2 * 2;
        if (loom_run_local(1, train, wanted, &options))
            fail_msg("%s", loom_error_message());
        assert_memory_equal(wanted->data, first.data, sizeof first.data);
        assert_true(wanted->norm == first.norm && wanted->norm > 0);
    }
    assert_true(first.data[100] != 1.0f);
}

static bool is_second(const loom_parameter *parameter, void *context) {
    return parameter->index == *(const int64_t *)context;
}

static loom_status grouped(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {1, 1, 1};
    int64_t second = 1;
    model usual, conditioned;
    loom__optimizer_options options = {.counts_replicated = true};
    LOOM_TRY(model_create(rank, counts, 3, 0, &plain, options, &usual));
    options.conditions = (loom_optimizer_conditions){is_second, is_second, 0.5, &second};
    LOOM_TRY(model_create(rank, counts, 3, 0, &plain, options, &conditioned));
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < 3; i++) {
            fill(usual.set.list[i], 0.25f);
            fill(conditioned.set.list[i], 0.25f);
        }
        LOOM_TRY(loom_optimizer_step(usual.optimizer, NULL));
        LOOM_TRY(loom_optimizer_step(conditioned.optimizer, NULL));
    }
    /* An equal gradient at each step moves a weight by the rate; decay multiplies by 1 - rate * 0.5. */
    double decayed = 1.0, still = 1.0, half = 1.0;
    for (int step = 1; step <= 3; step++) {
        decayed = decayed * (1.0 - 1e-2 * 0.5) - 1e-2;
        still -= 1e-2;
        half -= 0.5e-2;
    }
    const double expected[2][3] = {{decayed, decayed, still}, {decayed, half, decayed}};
    for (int i = 0; i < 3; i++) {
        double a = (double)usual.set.list[i]->data[0], b = (double)conditioned.set.list[i]->data[0];
        CHECK(fabs(a - expected[0][i]) < 1e-6, "default: p%d is %.9g, expected %.9g", i, a, expected[0][i]);
        CHECK(fabs(b - expected[1][i]) < 1e-6, "conditions: p%d is %.9g, expected %.9g", i, b, expected[1][i]);
    }
    model_destroy(&usual);
    model_destroy(&conditioned);
    return LOOM_OK;
}

static void conditions_choose_decay_and_rate_of_each_parameter(void **state) {
    (void)state;
    must_run(1, grouped, NULL);
}

static loom_status corrected(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {40};
    model scaled, whole;
    loom_optimizer_outcome a, b;
    const loom__optimizer_options options = {.counts_replicated = true};
    LOOM_TRY(model_create(rank, counts, 1, 0, &plain, options, &scaled));
    LOOM_TRY(model_create(rank, counts, 1, 0, &plain, options, &whole));
    CHECK(loom__optimizer_set_token_factor(scaled.optimizer, 0.0) == LOOM_ERR_ARGUMENT, "factor 0");
    CHECK(loom__optimizer_set_token_factor(scaled.optimizer, NAN) == LOOM_ERR_ARGUMENT, "factor NaN");
    for (int step = 0; step < 4; step++) {
        /* Clipped in the first steps, not in the later ones; the last has no factor. */
        float value = step < 2 ? 0.5f : 0.01f, factor = step < 3 ? 4.0f : 1.0f;
        fill(scaled.set.list[0], value);
        fill(whole.set.list[0], value * factor);
        if (step < 3)
            LOOM_TRY(loom__optimizer_set_token_factor(scaled.optimizer, (double)factor));
        LOOM_TRY(loom_optimizer_step(scaled.optimizer, &a));
        LOOM_TRY(loom_optimizer_step(whole.optimizer, &b));
        CHECK(a.grad_norm == b.grad_norm, "step %d: norms %.9g and %.9g", step, a.grad_norm, b.grad_norm);
        CHECK(memcmp(scaled.set.list[0]->data, whole.set.list[0]->data, 40 * sizeof(float)) == 0,
            "step %d: the factor is not applied once", step);
        CHECK(scaled.set.list[0]->grad[0] == value, "step %d: the gradient was changed", step);
    }
    model_destroy(&scaled);
    model_destroy(&whole);
    return LOOM_OK;
}

static void the_token_factor_counts_once_in_norm_and_update(void **state) {
    (void)state;
    must_run(1, corrected, NULL);
}

typedef struct poison {
    int64_t parameter;
    int rank;
    float value;
} poison;

static loom_status poisoned(loom_rank *rank, void *argument) {
    const poison *bad = argument;
    const int64_t counts[] = {5, 3, 4};
    int me = loom_rank_index(rank);
    char wanted[96];
    model made;
    loom_optimizer_outcome outcome = {.step = 77};
    LOOM_TRY(model_create(rank, counts, 3, 0, &plain, (loom__optimizer_options){.counts_replicated = me == 0}, &made));
    for (int i = 0; i < 3; i++)
        fill(made.set.list[i], 0.5f);
    LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    float before[3] = {made.set.list[0]->data[0], made.set.list[1]->data[0], made.set.list[2]->data[0]};
    float moment = first_moment(&made)[0];
    if (me == bad->rank)
        made.set.list[bad->parameter]->grad[2] = bad->value;
    loom_status status = loom_optimizer_step(made.optimizer, &outcome);
    CHECK(
        status == (me == bad->rank ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED), "rank %d: %s", me, loom_status_name(status));
    snprintf(wanted, sizeof wanted, "step 2: the gradient of p%d has a NaN or an infinity (rank %d)",
        (int)bad->parameter, bad->rank);
    CHECK(strstr(loom_error_message(), wanted), "rank %d says: %s", me, loom_error_message());
    CHECK(outcome.step == 77, "the outcome was written");
    for (int i = 0; i < 3; i++)
        CHECK(memcmp(&made.set.list[i]->data[0], &before[i], sizeof before[i]) == 0, "p%d was updated", i);
    CHECK(memcmp(first_moment(&made), &moment, sizeof moment) == 0, "a moment was updated");
    for (int i = 0; i < 3; i++)
        fill(made.set.list[i], 0.5f);
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.step == 2, "the next step is %lld", (long long)outcome.step);
    model_destroy(&made);
    return LOOM_OK;
}

static void a_bad_gradient_on_one_rank_fails_all_and_changes_nothing(void **state) {
    (void)state;
    must_run(3, poisoned, &(poison){1, 1, NAN});
    must_run(3, poisoned, &(poison){0, 0, -INFINITY});
}

static void a_bad_copy_that_the_norm_does_not_count_is_found(void **state) {
    (void)state;
    must_run(3, poisoned, &(poison){2, 2, NAN});
    must_run(2, poisoned, &(poison){2, 1, INFINITY});
}

static loom_status too_large(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t counts[] = {5};
    model made;
    const loom__optimizer_options options = {.counts_replicated = loom_rank_index(rank) == 0};
    LOOM_TRY(model_create(rank, counts, 1, 0, &plain, options, &made));
    fill(made.set.list[0], 3e38f);
    CHECK(loom_optimizer_step(made.optimizer, NULL) == LOOM_ERR_NUMERIC, "accepted");
    CHECK(strstr(loom_error_message(), "step 1: the norm of the gradients is inf although each is finite"), "%s",
        loom_error_message());
    fill(made.set.list[0], 1e30f);
    loom_optimizer_outcome outcome;
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(fabs(outcome.grad_norm / (1e30 * sqrt(5.0)) - 1) < 1e-6, "norm %g", outcome.grad_norm);
    model_destroy(&made);
    return LOOM_OK;
}

static void a_norm_beyond_fp32_is_an_error_and_a_large_one_is_not(void **state) {
    (void)state;
    must_run(2, too_large, NULL);
}

static loom_status expect_refusal(loom_rank *rank, loom_optimizer_config config, loom__optimizer_options options,
    loom_status status, const char *words) {
    const int64_t counts[] = {5};
    model made;
    loom_status found = model_create(rank, counts, 1, 0, &config, options, &made);
    CHECK(found == status && strstr(loom_error_message(), words), "%s: %s, expected %s", loom_status_name(found),
        loom_error_message(), words);
    model_destroy(&made);
    return LOOM_OK;
}

static loom_status refused(loom_rank *rank, void *argument) {
    (void)argument;
    const loom__optimizer_options none = {0};
    int64_t second = 0;
    loom_optimizer_config config = plain;
    config.optimizer = "lion";
    config.lr = 0;
    config.adam_beta1 = 1.0;
    config.adam_beta2 = NAN;
    config.adam_eps = 1e-60;
    config.clip_grad = -1;
    LOOM_TRY(expect_refusal(rank, config, none, LOOM_ERR_CONFIG,
        "optim.optimizer: found lion, expected adam or sgd\n"
        "optim.lr: found 0, expected a rate above 0\n"
        "optim.adam_beta1: found 1, expected 0 <= beta < 1\n"
        "optim.adam_beta2: found nan, expected 0 <= beta < 1\n"
        "optim.adam_eps: found 1e-60, expected a number above 0 that fits fp32\n"
        "optim.clip_grad: found -1, expected a number from 0 (0 = no clipping)"));
    config = plain;
    config.optimizer = "sgd";
    config.sgd_momentum = 1.0;
    LOOM_TRY(expect_refusal(rank, config, none, LOOM_ERR_CONFIG, "optim.sgd_momentum: found 1, expected 0 <="));
    config = plain;
    config.decoupled_lr = 1e-4;
    config.decoupled_min_lr = 1e-3;
    LOOM_TRY(expect_refusal(rank, config, none, LOOM_ERR_CONFIG, "lr: found 0.0001, expected at least min_lr"));
    const loom__optimizer_options negative = {.conditions = {NULL, is_second, -1.0, &second}};
    return expect_refusal(rank, plain, negative, LOOM_ERR_ARGUMENT, "lr_mult: found -1, expected a number from 0");
}

static void configurations_that_cannot_be_are_refused_with_all_faults(void **state) {
    (void)state;
    must_run(1, refused, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_norm_counts_a_replicated_parameter_once),
        cmocka_unit_test(the_norm_counts_tied_and_copied_rows_once),
        cmocka_unit_test(a_count_beyond_the_parameter_is_refused),
        cmocka_unit_test(weights_have_the_same_bits_for_any_bucket_size_and_team),
        cmocka_unit_test(conditions_choose_decay_and_rate_of_each_parameter),
        cmocka_unit_test(the_token_factor_counts_once_in_norm_and_update),
        cmocka_unit_test(a_bad_gradient_on_one_rank_fails_all_and_changes_nothing),
        cmocka_unit_test(a_bad_copy_that_the_norm_does_not_count_is_found),
        cmocka_unit_test(a_norm_beyond_fp32_is_an_error_and_a_large_one_is_not),
        cmocka_unit_test(configurations_that_cannot_be_are_refused_with_all_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
