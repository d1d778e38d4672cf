/* The profiler of a rank: what is measured is the same computation, and no moment is lost or counted twice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/rank.h"
#include <math.h>
#include <string.h>
#include <time.h>

enum { SIZE = 24, COUNT = SIZE * SIZE };

/* What a rank saw; asserts are for the main thread. */
typedef struct findings {
    bool same_bits, same_sum, every_kernel, restored;
    loom_status again, early, late;
    loom_profile profile;
} findings;

static void wait_milliseconds(long milliseconds) {
    nanosleep(&(struct timespec){.tv_nsec = milliseconds * 1000000}, NULL);
}

/* A table holds pointers alone: a kernel that has no wrapper leaves a gap. */
static bool is_full(const void *table, size_t bytes) {
    void *entry;
    for (size_t at = 0; at < bytes; at += sizeof entry) {
        memcpy(&entry, (const char *)table + at, sizeof entry);
        if (!entry)
            return false;
    }
    return true;
}

static bool has_every_kernel(const loom_kernels *kernels) {
    return is_full(kernels, sizeof *kernels) && is_full(kernels->bf16, sizeof *kernels->bf16) &&
           is_full(kernels->f16, sizeof *kernels->f16);
}

static loom_status work(loom_rank *rank, void *argument) {
    findings *mine = (findings *)argument + loom_rank_index(rank);
    const loom_kernels *plain = loom_rank_kernels(rank);
    loom_team *team = loom_rank_team(rank);
    float a[COUNT], plainly[COUNT], measured[COUNT], gathered[2 * COUNT];
    for (int i = 0; i < COUNT; i++)
        a[i] = (float)(i % 13) * 0.3f - 1;
    mine->early = loom_profile_end(rank, &mine->profile);
    plain->gemm(team, false, true, SIZE, SIZE, SIZE, 1, a, SIZE, a, SIZE, false, plainly, SIZE);
    LOOM_TRY(loom_profile_begin(rank));
    mine->again = loom_profile_begin(rank);
    const loom_kernels *watched = loom_rank_kernels(rank);
    mine->every_kernel = watched != plain && has_every_kernel(watched);
    loom__profile_phase(rank, LOOM_PROFILE_FORWARD);
    watched->gemm(team, false, true, SIZE, SIZE, SIZE, 1, a, SIZE, a, SIZE, false, measured, SIZE);
    watched->gemm(team, false, true, SIZE, SIZE, SIZE, 1, a, SIZE, a, SIZE, false, measured, SIZE);
    mine->same_bits = memcmp(plainly, measured, sizeof plainly) == 0;
    loom_profile_phase before = loom__profile_phase(rank, LOOM_PROFILE_OPTIMIZER);
    loom_exact_sum sum = {0}, watched_sum = {0};
    plain->exact_sum(team, 2, COUNT, a, &sum);
    watched->exact_sum(team, 2, COUNT, a, &watched_sum);
    mine->same_sum = memcmp(&sum, &watched_sum, sizeof sum) == 0;
    wait_milliseconds(20);
    loom__profile_phase(rank, before);
    LOOM_TRY(loom_all_gather(loom_rank_world(rank), a, gathered, COUNT, LOOM_F32));
    mine->late = loom_profile_end(rank, &mine->profile);
    mine->restored = loom_rank_kernels(rank) == plain;
    return LOOM_OK;
}

static const loom_profile_entry *find(const loom_profile *profile, loom_profile_phase phase, const char *operation) {
    for (int64_t i = 0; i < profile->count; i++)
        if (profile->entries[i].phase == phase && strcmp(profile->entries[i].operation, operation) == 0)
            return &profile->entries[i];
    return NULL;
}

static void measure(findings *found) {
    loom_run_options options = loom_run_options_default();
    options.threads = 2;
    options.timeout = 60;
    memset(found, 0, 2 * sizeof *found);
    if (loom_run_local(2, work, found, &options))
        fail_msg("%s", loom_error_message());
}

static void forget(findings *found) {
    for (int i = 0; i < 2; i++)
        loom_profile_free(&found[i].profile);
}

static void a_measured_rank_computes_the_same_bits(void **state) {
    (void)state;
    findings found[2];
    measure(found);
    for (int i = 0; i < 2; i++) {
        assert_true(found[i].every_kernel);
        assert_true(found[i].same_bits);
        assert_true(found[i].same_sum);
        assert_true(found[i].restored);
        assert_int_equal(found[i].early, LOOM_ERR_STATE);
        assert_int_equal(found[i].again, LOOM_ERR_STATE);
        assert_int_equal(found[i].late, LOOM_OK);
    }
    forget(found);
}

static void the_seconds_of_all_entries_are_the_time_that_passed(void **state) {
    (void)state;
    findings found[2];
    measure(found);
    for (int i = 0; i < 2; i++) {
        const loom_profile *profile = &found[i].profile;
        double sum = 0;
        for (int64_t e = 0; e < profile->count; e++)
            sum += profile->entries[e].seconds;
        assert_true(profile->seconds >= 0.02);
        assert_true(fabs(sum - profile->seconds) < 1e-6);
        /* What is no operation's is the phase's. */
        assert_true(find(profile, LOOM_PROFILE_OPTIMIZER, "rest")->seconds >= 0.02);
        for (int64_t e = 1; e < profile->count; e++)
            assert_true(profile->entries[e - 1].seconds >= profile->entries[e].seconds);
    }
    forget(found);
}

static void calls_are_counted_by_phase_operation_and_group(void **state) {
    (void)state;
    findings found[2];
    measure(found);
    for (int i = 0; i < 2; i++) {
        const loom_profile *profile = &found[i].profile;
        const loom_profile_entry *gemm = find(profile, LOOM_PROFILE_FORWARD, "gemm");
        const loom_profile_entry *sum = find(profile, LOOM_PROFILE_OPTIMIZER, "exact_sum");
        const loom_profile_entry *gather = find(profile, LOOM_PROFILE_FORWARD, "all_gather");
        assert_non_null(gemm);
        assert_int_equal(gemm->calls, 2);
        assert_true(gemm->flops == 2 * 2.0 * SIZE * SIZE * SIZE);
        assert_non_null(sum);
        assert_int_equal(sum->calls, 1);
        assert_true(sum->bytes == 4.0 * COUNT);
        assert_null(find(profile, LOOM_PROFILE_FORWARD, "exact_sum"));
        assert_non_null(gather);
        assert_int_equal(gather->calls, 1);
        assert_string_equal(gather->group, "world");
        assert_true(gather->bytes >= 4.0 * COUNT);
    }
    forget(found);
}

static loom_status forgetful(loom_rank *rank, void *argument) {
    (void)argument;
    return loom_profile_begin(rank);
}

static void a_rank_may_end_while_it_is_measured(void **state) {
    (void)state;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    assert_int_equal(loom_run_local(2, forgetful, NULL, &options), LOOM_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_measured_rank_computes_the_same_bits),
        cmocka_unit_test(the_seconds_of_all_entries_are_the_time_that_passed),
        cmocka_unit_test(calls_are_counted_by_phase_operation_and_group),
        cmocka_unit_test(a_rank_may_end_while_it_is_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
