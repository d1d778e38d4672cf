/* The simulator's claims over all small schedules, and what it says about lists that somebody broke. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <megaloom/schedule.h>

enum { STAGES = 8 };

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

typedef struct schedule {
    loom_schedule_config config;
    loom_schedule_list lists[STAGES];
    char name[128];
} schedule;

static void make(schedule *s, loom_schedule_config config) {
    s->config = config;
    snprintf(s->name, sizeof s->name, "pp %lld vp %lld m %lld group %lld kind %d%s%s", (long long)config.stages,
        (long long)config.chunks, (long long)config.microbatches, (long long)config.group, (int)config.kind,
        config.forward_only ? " forward-only" : "", config.align_sync ? " align-sync" : "");
    for (int64_t stage = 0; stage < config.stages; stage++)
        check(loom_schedule_make(&config, stage, &s->lists[stage]) == LOOM_OK, "%s: %s", s->name, loom_error_message());
}

static void drop(schedule *s) {
    for (int64_t stage = 0; stage < s->config.stages; stage++)
        loom_schedule_list_free(&s->lists[stage]);
}

static loom_schedule_result simulate(const schedule *s, const loom_schedule_costs *costs, bool blocking) {
    loom_schedule_result result;
    loom_status status = loom_schedule_simulate(&s->config, s->lists, costs, blocking, &result);
    check(status == LOOM_OK, "%s%s: %s", s->name, blocking ? " blocking" : "", loom_error_message());
    return result;
}

/* Every legal schedule of up to 8 stages, 4 chunks and 24 microbatches. */
static int64_t each_legal(void (*run)(schedule *s)) {
    int64_t ran = 0;
    for (int64_t pp = 1; pp <= STAGES; pp++)
        for (int64_t vp = 0; vp <= 4; vp++)
            for (int64_t m = 1; m <= 24; m++)
                for (int64_t group = vp > 1 ? pp : 0; group <= (vp > 1 ? m : 0); group++)
                    for (int variant = 0; variant < 6; variant++) {
                        loom_schedule_config config = {.stages = pp,
                            .chunks = vp,
                            .microbatches = m,
                            .group = group,
                            .kind = variant >= 4 ? LOOM_SCHEDULE_ZERO_BUBBLE : LOOM_SCHEDULE_1F1B,
                            .forward_only = variant == 2 || variant == 3,
                            .align_sync = variant % 2 == 1};
                        if (loom_schedule_config_check(&config))
                            continue;
                        schedule s;
                        make(&s, config);
                        run(&s);
                        drop(&s);
                        ran++;
                    }
    return ran;
}

static void run_both_forms(schedule *s) {
    for (int blocking = 0; blocking < 2; blocking++) {
        loom_schedule_result result = simulate(s, NULL, blocking);
        loom_schedule_result_free(&result);
    }
}

static void every_legal_schedule_is_proved_in_both_forms(void **state) {
    (void)state;
    print_message("%lld schedules\n", (long long)each_legal(run_both_forms));
}

static void run_early(schedule *s) {
    for (int64_t depth = 0; depth < 4; depth++) {
        schedule early = *s;
        int64_t before[STAGES];
        loom_schedule_result result = simulate(s, &(loom_schedule_costs){.message = 0.25}, false);
        double makespan = result.makespan;
        for (int64_t stage = 0; stage < s->config.stages; stage++)
            before[stage] = result.stage[stage].receives;
        loom_schedule_result_free(&result);
        for (int64_t stage = 0; stage < s->config.stages; stage++) {
            assert_int_equal(
                loom_schedule_post_receives_early(&s->config, &s->lists[stage], depth, &early.lists[stage]), LOOM_OK);
            assert_int_equal(early.lists[stage].count, s->lists[stage].count);
        }
        result = simulate(&early, &(loom_schedule_costs){.message = 0.25}, false);
        check(result.makespan <= makespan + 1e-9, "%s: depth %lld takes %g, without %g", s->name, (long long)depth,
            result.makespan, makespan);
        for (int64_t stage = 0; stage < s->config.stages; stage++)
            check(result.stage[stage].receives <= before[stage] + depth + 1, "%s: %lld receives at depth %lld", s->name,
                (long long)result.stage[stage].receives, (long long)depth);
        if (s->config.chunks < 2)
            for (int64_t stage = 0; stage < s->config.stages; stage++)
                check(result.stage[stage].receives <= depth + 1, "%s: %lld receives at depth %lld", s->name,
                    (long long)result.stage[stage].receives, (long long)depth);
        loom_schedule_result_free(&result);
        drop(&early);
    }
}

static void early_receives_stay_proved_and_bounded_and_never_slower(void **state) {
    (void)state;
    each_legal(run_early);
}

static void close_to(const char *name, const char *what, double found, double expected) {
    check(fabs(found - expected) <= 1e-12 * (1.0 + fabs(expected)), "%s: %s is %.15g, expected %.15g", name, what,
        found, expected);
}

static void run_bubble(schedule *s) {
    const loom_schedule_config *c = &s->config;
    double p = (double)c->stages, m = (double)c->microbatches, v = c->chunks > 1 ? (double)c->chunks : 1.0;
    if (c->kind == LOOM_SCHEDULE_ZERO_BUBBLE || (c->group != 0 && c->group != c->stages))
        return;
    /* In the middle of a group of another length, or of a last group that is not full, stages wait a little more. */
    if (c->chunks > 1 && c->microbatches % c->stages != 0)
        return;
    loom_schedule_result result = simulate(s, NULL, false);
    close_to(s->name, "bubble", result.bubble, (p - 1) / (v * m + p - 1));
    loom_schedule_result_free(&result);
}

static void bubbles_are_the_textbook_s(void **state) {
    (void)state;
    each_legal(run_bubble);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_legal_schedule_is_proved_in_both_forms),
        cmocka_unit_test(early_receives_stay_proved_and_bounded_and_never_slower),
        cmocka_unit_test(bubbles_are_the_textbook_s),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
