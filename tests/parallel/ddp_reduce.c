/* Bucketed gradient reduction on thread ranks. Ranks return their first failed check; the main thread asserts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ddp/ddp.h"
#include "parallel/ddp_parameters.h"

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { COUNT = 9 };
static const int64_t counts[COUNT] = {5, 1, 33, 17, 64, 2, 100, 3001, 16};

/* Values whose sums round, so that another order of addition would show. */
static float gradient(int rank, int64_t parameter, int64_t element, int step) {
    uint32_t hash = (uint32_t)rank * 2654435761u ^ (uint32_t)parameter * 40503u ^ (uint32_t)element * 2246822519u ^
                    (uint32_t)step * 3266489917u;
    hash = (hash ^ (hash >> 15)) * 2246822519u;
    hash ^= hash >> 13;
    return ((float)(hash >> 8) / 8388608.0f - 1.0f) * ((hash & 7u) == 0 ? 1000.0f : 1.0f);
}

static void contribute(loom_parameter *parameter, int rank, int64_t index, int step) {
    bool accumulate;
    float *grad = loom_parameter_begin_grad(parameter, &accumulate);
    for (int64_t e = 0; e < counts[index]; e++)
        grad[e] = gradient(rank, index, e, step) + (accumulate ? grad[e] : 0.0f);
}

typedef struct plan {
    loom__ddp_options options;
    int unused;     /* parameter that is neither written nor ready after the first step; -1 = none */
    int unwritten;  /* parameter that is ready but not written after the first step; -1 = none */
    bool scrambled; /* every rank has an order of readiness of its own */
    int microbatches;
    int dp_size; /* members of a group: the world, or 1 */
} plan;

static loom_status expect(const loom__ddp *ddp, const plan *wanted, int first_rank, int size, int step) {
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    for (int64_t p = 0; p < COUNT; p++) {
        const float *grad = view->parameters[COUNT - 1 - p]->grad;
        for (int64_t e = 0; e < counts[p]; e++) {
            float sum = 0.0f;
            for (int r = 0; r < size; r++) {
                float own = gradient(first_rank + r, p, e, step);
                for (int m = 1; m < wanted->microbatches; m++)
                    own = gradient(first_rank + r, p, e, step + 100 * m) + own;
                sum = r ? sum + own : own;
            }
            if (step > 0 && (p == wanted->unused || p == wanted->unwritten))
                sum = 0.0f;
            if (wanted->options.average_in_collective && size > 1)
                sum *= 1.0f / (float)size;
            CHECK(memcmp(&sum, &grad[e], sizeof sum) == 0, "step %d, element %lld of p%lld: found %.9g, expected %.9g",
                step, (long long)e, (long long)p, (double)grad[e], (double)sum);
        }
    }
    for (int64_t b = 1; b < view->bucket_count; b++)
        CHECK(view->buckets[b].start == view->buckets[b - 1].end, "a gap before bucket %lld", (long long)b);
    return LOOM_OK;
}

static loom_status one_step(loom__ddp *ddp, test_parameters *set, const plan *wanted, int rank, int step) {
    loom__ddp_begin_step(ddp);
    for (int m = 0; m < wanted->microbatches; m++) {
        loom__ddp_expect_last(ddp, m == wanted->microbatches - 1);
        for (int64_t i = 0; i < COUNT; i++) {
            int64_t p = wanted->scrambled ? (i * 4 + rank * 2 + step) % COUNT : COUNT - 1 - i;
            if (step > 0 && p == wanted->unused)
                continue;
            if (step == 0 || p != wanted->unwritten)
                contribute(set->list[p], rank, p, step + 100 * m);
            loom__ddp_parameter_ready(ddp, set->list[p]);
        }
    }
    return loom__ddp_finish(ddp);
}

static loom_status run_plan(loom_rank *rank, void *argument) {
    const plan *wanted = argument;
    int me = loom_rank_index(rank), size = wanted->dp_size;
    loom_comm *dp = loom_rank_world(rank);
    if (size == 1)
        LOOM_TRY(loom_group_create(rank, "alone", &me, 1, &dp));
    test_parameters set;
    loom__ddp *ddp = NULL;
    test_parameters_create(&set, counts, COUNT, 3.0f);
    loom_status status = loom__ddp_create(rank, &wanted->options, set.list, COUNT, dp, &ddp);
    for (int step = 0; step < 3 && !status; step++) {
        status = one_step(ddp, &set, wanted, me, step);
        if (!status)
            status = expect(ddp, wanted, size == 1 ? me : 0, size, step);
    }
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return status;
}

static void must_run(int ranks, plan wanted) {
    if (wanted.dp_size == 0)
        wanted.dp_size = ranks;
    if (wanted.microbatches == 0)
        wanted.microbatches = 1;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 30;
    if (loom_run_local(ranks, run_plan, &wanted, &options))
        fail_msg("bucket size %lld: %s", (long long)wanted.options.bucket_size, loom_error_message());
}

static const int64_t bucket_sizes[] = {1, 7, 64, 1000000000, 0};
enum { BUCKET_SIZES = sizeof bucket_sizes / sizeof *bucket_sizes };

static loom__ddp_options options_of(int64_t bucket_size) {
    loom__ddp_options options = loom__ddp_options_default();
    options.bucket_size = bucket_size;
    return options;
}

static void gradients_are_the_sum_in_rank_order_for_any_bucket_size(void **state) {
    (void)state;
    for (int i = 0; i < BUCKET_SIZES; i++)
        for (int ranks = 1; ranks <= 3; ranks++)
            must_run(ranks,
                (plan){.options = options_of(bucket_sizes[i]), .unused = -1, .unwritten = -1, .microbatches = 1});
}

static void later_microbatches_add_and_buckets_wait_for_the_last(void **state) {
    (void)state;
    for (int i = 0; i < BUCKET_SIZES; i++)
        must_run(3, (plan){.options = options_of(bucket_sizes[i]), .unused = -1, .unwritten = -1, .microbatches = 3});
}

static void ranks_that_finish_parameters_in_different_orders_end(void **state) {
    (void)state;
    for (int i = 0; i < BUCKET_SIZES; i++)
        must_run(3, (plan){.options = options_of(bucket_sizes[i]),
                        .unused = -1,
                        .unwritten = -1,
                        .scrambled = true,
                        .microbatches = 2});
}

static void an_unused_parameter_has_a_zero_gradient_and_nothing_hangs(void **state) {
    (void)state;
    for (int i = 0; i < BUCKET_SIZES; i++)
        for (int p = 0; p < COUNT; p += 4) {
            must_run(
                3, (plan){.options = options_of(bucket_sizes[i]), .unused = p, .unwritten = -1, .microbatches = 2});
            must_run(
                3, (plan){.options = options_of(bucket_sizes[i]), .unused = -1, .unwritten = p, .scrambled = true});
        }
}

static void overlap_off_and_no_buckets_give_the_same_bits(void **state) {
    (void)state;
    loom__ddp_options options = options_of(7);
    options.overlap_grad_reduce = false;
    must_run(3, (plan){.options = options, .unused = -1, .unwritten = -1, .microbatches = 2});
    options = options_of(7);
    options.disable_bucketing = true;
    options.check_for_nan_in_grad = true;
    must_run(3, (plan){.options = options, .unused = -1, .unwritten = -1, .microbatches = 2});
}

static void the_mean_is_the_sum_over_the_number_of_ranks(void **state) {
    (void)state;
    loom__ddp_options options = options_of(7);
    options.average_in_collective = true;
    must_run(3, (plan){.options = options, .unused = -1, .unwritten = -1});
    must_run(2, (plan){.options = options, .unused = -1, .unwritten = -1, .dp_size = 1});
}

static void a_group_of_one_reduces_nothing(void **state) {
    (void)state;
    must_run(2, (plan){.options = options_of(7), .unused = 3, .unwritten = -1, .dp_size = 1});
}

/* --- parameters and buffers ------------------------------------------------------------------------------------- */

static loom_status wrap_and_look(loom_rank *rank, void *argument) {
    (void)argument;
    test_parameters set;
    loom__ddp *ddp = NULL;
    const loom__ddp_options options = options_of(7);
    test_parameters_create(&set, counts, COUNT, 3.0f);
    set.parameters[2].data[32] = 42.0f;
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    CHECK(view->place_count == COUNT && view->bucket_count == 7, "%lld places, %lld buckets",
        (long long)view->place_count, (long long)view->bucket_count);
    for (int64_t p = 0; p < COUNT; p++) {
        const loom_parameter *parameter = &set.parameters[p];
        const loom__ddp_place *place = &view->places[COUNT - 1 - p];
        CHECK(view->parameters[COUNT - 1 - p] == parameter, "place of p%lld", (long long)p);
        CHECK(parameter->data == view->data + place->start && parameter->grad == view->grad + place->start,
            "p%lld does not point into the buffers", (long long)p);
        CHECK((uintptr_t)parameter->data % 64 == 0 && (uintptr_t)parameter->grad % 64 == 0, "p%lld is not aligned",
            (long long)p);
        CHECK(memcmp(parameter->data, set.memory[p], (size_t)counts[p] * sizeof(float)) == 0, "p%lld was not copied",
            (long long)p);
    }
    loom__ddp_destroy(ddp);
    CHECK(!set.parameters[0].data && !set.parameters[0].grad, "p0 points to freed memory");
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void parameters_are_copied_into_aligned_buffers_of_one_map(void **state) {
    (void)state;
    if (loom_run_local(1, wrap_and_look, NULL, NULL))
        fail_msg("%s", loom_error_message());
}

static loom_status wrap_badly(loom_rank *rank, void *argument) {
    (void)argument;
    test_parameters set;
    loom__ddp *ddp = NULL;
    const loom__ddp_options options = options_of(0), negative = options_of(-1);
    test_parameters_create(&set, counts, COUNT, 3.0f);
    loom_comm *world = loom_rank_world(rank);
    CHECK(loom__ddp_create(rank, &negative, set.list, COUNT, world, &ddp) == LOOM_ERR_ARGUMENT, "bucket_size -1");
    set.list[4] = set.list[1];
    CHECK(loom__ddp_create(rank, &options, set.list, COUNT, world, &ddp) == LOOM_ERR_ARGUMENT, "listed twice");
    CHECK(strstr(loom_error_message(), "p1 is listed twice"), "%s", loom_error_message());
    set.list[4] = &set.parameters[4];
    set.parameters[4].data = NULL;
    CHECK(loom__ddp_create(rank, &options, set.list, COUNT, world, &ddp) == LOOM_ERR_ARGUMENT, "no data");
    CHECK(strstr(loom_error_message(), "p4 has no data yet"), "%s", loom_error_message());
    CHECK(!ddp && set.parameters[0].data == set.memory[0], "a refused ddp changed a parameter");
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 0, world, &ddp));
    loom__ddp_begin_step(ddp);
    LOOM_TRY(loom__ddp_finish(ddp));
    loom__ddp_destroy(ddp);
    loom__ddp_destroy(NULL);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void lists_that_cannot_be_are_refused_and_an_empty_one_works(void **state) {
    (void)state;
    if (loom_run_local(1, wrap_badly, NULL, NULL))
        fail_msg("%s", loom_error_message());
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

static loom_status give_nan(loom_rank *rank, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank);
    test_parameters set;
    loom__ddp *ddp = NULL;
    loom__ddp_options options = options_of(7);
    options.check_for_nan_in_grad = true;
    const plan wanted = {.options = options, .unused = -1, .unwritten = -1, .microbatches = 1};
    test_parameters_create(&set, counts, COUNT, 3.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    loom__ddp_begin_step(ddp);
    loom__ddp_expect_last(ddp, true);
    for (int64_t p = COUNT - 1; p >= 0; p--) {
        contribute(set.list[p], me, p, 0);
        if (me == 1 && p == 2)
            set.list[p]->grad[32] = NAN;
        loom__ddp_parameter_ready(ddp, set.list[p]);
    }
    loom_status status = loom__ddp_finish(ddp);
    CHECK(
        status == (me == 1 ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED), "rank %d: status %s", me, loom_status_name(status));
    CHECK(
        strstr(loom_error_message(), "the gradient of p2 has a NaN or an infinity before its reduction (bucket 5 of 7, "
                                     "rank 1)"),
        "rank %d says: %s", me, loom_error_message());
    /* The next step knows nothing of it. */
    LOOM_TRY(one_step(ddp, &set, &wanted, me, 1));
    LOOM_TRY(expect(ddp, &wanted, 0, loom_rank_count(rank), 1));
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_nan_on_one_rank_is_named_on_all(void **state) {
    (void)state;
    if (loom_run_local(3, give_nan, NULL, NULL))
        fail_msg("%s", loom_error_message());
}

/* ---- unexpectedly large gradients ---- */

typedef struct warnings {
    int count;
    char last[512];
} warnings;

static void keep_warning(void *context, loom_log_level level, const char *message) {
    warnings *w = context;
    if (level != LOOM_LOG_WARNING)
        return;
    w->count++;
    snprintf(w->last, sizeof w->last, "%s", message);
}

/* Two buckets a step: the first 100 norms are those of 50 steps. */
static loom_status grow(loom_rank *rank, void *argument) {
    const warnings *w = argument;
    const int64_t two[2] = {4, 9};
    const int expected[] = {0, 0, 1, 1, 2};
    const float values[] = {1, 9.9f, 10, INFINITY, 1e6f};
    loom__ddp_options options = {.bucket_size = 1, .overlap_grad_reduce = true, .check_for_large_grads = true};
    test_parameters set;
    loom__ddp *ddp = NULL;
    test_parameters_create(&set, two, 2, 3.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 2, loom_rank_world(rank), &ddp));
    for (int step = 0; step < 54; step++) {
        float value = step < 50 ? 1 : values[step - 49];
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        for (int64_t p = 1; p >= 0; p--) {
            bool accumulate;
            float *grad = loom_parameter_begin_grad(set.list[p], &accumulate);
            for (int64_t e = 0; e < two[p]; e++)
                grad[e] = p == 1 ? value : 1.0f;
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
        LOOM_TRY(loom__ddp_finish(ddp));
        CHECK(w->count == expected[step < 50 ? 0 : step - 49], "step %d: %d warnings", step, w->count);
    }
    CHECK(strstr(w->last, "gradients of bucket 0 of 2 have norm 3e+06"), "%s", w->last);
    CHECK(strstr(w->last, "first 100, 3, or more (rank 0)"), "%s", w->last);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_bucket_of_ten_times_the_norm_is_a_warning(void **state) {
    (void)state;
    warnings w = {0};
    loom_run_options options = loom_run_options_default();
    options.log = keep_warning;
    options.log_context = &w;
    if (loom_run_local(1, grow, &w, &options))
        fail_msg("%s", loom_error_message());
}

static loom_status ready_twice(loom_rank *rank, void *argument) {
    (void)argument;
    test_parameters set;
    loom__ddp *ddp = NULL;
    loom_parameter stranger = {.name = "stranger"};
    const loom__ddp_options options = options_of(7);
    test_parameters_create(&set, counts, COUNT, 3.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    loom__ddp_parameter_ready(ddp, set.list[3]);
    loom__ddp_parameter_ready(ddp, set.list[3]);
    loom__ddp_expect_last(ddp, true);
    loom__ddp_parameter_ready(ddp, &stranger);
    loom__ddp_parameter_ready(ddp, set.list[3]);
    LOOM_TRY(loom__ddp_finish(ddp));
    loom__ddp_begin_step(ddp);
    loom__ddp_expect_last(ddp, true);
    loom__ddp_parameter_ready(ddp, set.list[3]);
    loom__ddp_parameter_ready(ddp, set.list[3]);
    CHECK(loom__ddp_finish(ddp) == LOOM_ERR_STATE, "twice is accepted");
    CHECK(strstr(loom_error_message(), "p3 became ready twice"), "%s", loom_error_message());
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_parameter_that_is_ready_twice_in_the_last_backward_is_an_error(void **state) {
    (void)state;
    if (loom_run_local(2, ready_twice, NULL, NULL))
        fail_msg("%s", loom_error_message());
}

static loom_status leave_early(loom_rank *rank, void *argument) {
    (void)argument;
    if (loom_rank_index(rank) == 1)
        return loom_fail(LOOM_ERR_IO, "rank 1 has no data");
    test_parameters set;
    loom__ddp *ddp = NULL;
    const loom__ddp_options options = options_of(7);
    const plan wanted = {.options = options, .unused = -1, .unwritten = -1, .microbatches = 1};
    test_parameters_create(&set, counts, COUNT, 3.0f);
    loom_status status = loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp);
    if (!status)
        status = one_step(ddp, &set, &wanted, loom_rank_index(rank), 0);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return status;
}

static void a_rank_that_leaves_ends_the_reduction_of_the_others(void **state) {
    (void)state;
    assert_int_equal(loom_run_local(3, leave_early, NULL, NULL), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "rank 1 has no data"));
}

/* --- on a tape --------------------------------------------------------------------------------------------------- */

enum { WIDTH = 24, ROWS = 6 };

/* Two norms, one after the other, of rank-dependent rows. */
static loom_status norm_backward(loom_rank *rank, loom__ddp *ddp, loom_parameter *const *weights) {
    const loom_tape_options options = {.record = true, .parameter_ready = loom__ddp_parameter_ready, .context = ddp};
    const int64_t shape[] = {ROWS, 1, WIDTH};
    loom_tape *tape;
    loom_tensor *x, *d_y, *middle, *y;
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, shape, &x));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, shape, &d_y));
    for (int64_t e = 0; e < ROWS * WIDTH; e++) {
        loom_tensor_f32(x)[e] = gradient(loom_rank_index(rank), 1, e, 1);
        loom_tensor_f32(d_y)[e] = gradient(loom_rank_index(rank), 2, e, 1);
    }
    LOOM_TRY(loom_norm(tape, x, weights[0], NULL, 1e-5f, &middle));
    LOOM_TRY(loom_norm(tape, middle, weights[1], NULL, 1e-5f, &y));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    loom_tensor_release(x);
    loom_tensor_release(d_y);
    loom_tensor_release(middle);
    loom_tensor_release(y);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status train_norms(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t widths[] = {WIDTH, WIDTH};
    float alone[2][WIDTH], sum[2][WIDTH];
    const loom__ddp_options options = options_of(1);
    int me = loom_rank_index(rank);
    loom_comm *self;
    test_parameters set;
    loom__ddp *ddp;
    LOOM_TRY(loom_group_create(rank, "alone", &me, 1, &self));
    test_parameters_create(&set, widths, 2, 1.5f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 2, self, &ddp));
    LOOM_TRY(norm_backward(rank, ddp, set.list));
    LOOM_TRY(loom__ddp_finish(ddp));
    memcpy(alone[0], set.list[0]->grad, sizeof alone[0]);
    memcpy(alone[1], set.list[1]->grad, sizeof alone[1]);
    loom__ddp_destroy(ddp);
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), alone, sum, 2 * WIDTH, LOOM_F32, LOOM_SUM));
    set.parameters[0].data = set.memory[0];
    set.parameters[1].data = set.memory[1];
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 2, loom_rank_world(rank), &ddp));
    loom__ddp_expect_last(ddp, true);
    LOOM_TRY(norm_backward(rank, ddp, set.list));
    LOOM_TRY(loom__ddp_finish(ddp));
    for (int p = 0; p < 2; p++)
        CHECK(memcmp(sum[p], set.list[p]->grad, sizeof sum[p]) == 0, "p%d differs from the sum of the ranks", p);
    CHECK(fabsf(sum[0][3]) > 0.0f, "the gradient is zero");
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void gradients_of_a_tape_are_reduced_while_it_is_walked(void **state) {
    (void)state;
    if (loom_run_local(3, train_norms, NULL, NULL))
        fail_msg("%s", loom_error_message());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_sum_in_rank_order_for_any_bucket_size),
        cmocka_unit_test(later_microbatches_add_and_buckets_wait_for_the_last),
        cmocka_unit_test(ranks_that_finish_parameters_in_different_orders_end),
        cmocka_unit_test(an_unused_parameter_has_a_zero_gradient_and_nothing_hangs),
        cmocka_unit_test(overlap_off_and_no_buckets_give_the_same_bits),
        cmocka_unit_test(the_mean_is_the_sum_over_the_number_of_ranks),
        cmocka_unit_test(a_group_of_one_reduces_nothing),
        cmocka_unit_test(parameters_are_copied_into_aligned_buffers_of_one_map),
        cmocka_unit_test(lists_that_cannot_be_are_refused_and_an_empty_one_works),
        cmocka_unit_test(a_nan_on_one_rank_is_named_on_all),
        cmocka_unit_test(a_bucket_of_ten_times_the_norm_is_a_warning),
        cmocka_unit_test(a_parameter_that_is_ready_twice_in_the_last_backward_is_an_error),
        cmocka_unit_test(a_rank_that_leaves_ends_the_reduction_of_the_others),
        cmocka_unit_test(gradients_of_a_tape_are_reduced_while_it_is_walked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
