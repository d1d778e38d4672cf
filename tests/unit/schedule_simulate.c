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

static void check_order(const schedule *s, int64_t from, int64_t to, bool forward) {
    const loom_schedule_list *sender = &s->lists[from], *receiver = &s->lists[to];
    int64_t at = 0;
    for (int64_t i = 0; i < sender->count; i++) {
        const loom_instruction *sent = &sender->instructions[i], *wanted = receiver->instructions;
        if (sent->kind != (forward ? LOOM_INSTRUCTION_SEND_NEXT : LOOM_INSTRUCTION_SEND_PREVIOUS))
            continue;
        while (at < receiver->count &&
               wanted[at].kind != (forward ? LOOM_INSTRUCTION_RECEIVE_PREVIOUS : LOOM_INSTRUCTION_RECEIVE_NEXT))
            at++;
        int wrap = forward ? to < from : -(to > from);
        check(
            at < receiver->count && wanted[at].microbatch == sent->microbatch && wanted[at].chunk == sent->chunk + wrap,
            "%s: stage %lld sends microbatch %lld, chunk %d, out of turn", s->name, (long long)from,
            (long long)sent->microbatch, sent->chunk);
        at++;
    }
}

static void run_order(schedule *s) {
    for (int64_t stage = 0; stage < s->config.stages; stage++) {
        int64_t next = (stage + 1) % s->config.stages;
        check_order(s, stage, next, true);
        check_order(s, next, stage, false);
    }
}

static void messages_of_a_direction_are_received_in_the_order_of_their_sends(void **state) {
    (void)state;
    each_legal(run_order);
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
    if (c->kind == LOOM_SCHEDULE_ZERO_BUBBLE)
        return;
    loom_schedule_result result = simulate(s, NULL, false);
    close_to(s->name, "bubble", result.bubble, (p - 1) / (v * m + p - 1));
    loom_schedule_result_free(&result);
}

static void bubbles_are_the_textbook_s(void **state) {
    (void)state;
    each_legal(run_bubble);
}

/* The same cost everywhere. */
static loom_schedule_result simulate_uniform(loom_schedule_config config, double f, double b, double w) {
    double costs[3][STAGES];
    for (int i = 0; i < STAGES; i++) {
        costs[0][i] = f;
        costs[1][i] = b;
        costs[2][i] = w;
    }
    schedule s;
    make(&s, config);
    loom_schedule_result result = simulate(&s, &(loom_schedule_costs){costs[0], costs[1], costs[2], 0.0}, false);
    drop(&s);
    return result;
}

static int64_t peak(const loom_schedule_result *result) {
    int64_t most = 0;
    for (int64_t stage = 0; stage < result->stages; stage++)
        if (result->stage[stage].activations > most)
            most = result->stage[stage].activations;
    return most;
}

static void zero_bubble_saves_weight_halves_and_keeps_the_peak(void **state) {
    (void)state;
    static const double costs[][3] = {
        {1, 1, 1}, {1, 1.25, 0.75}, {2, 2, 1}, {1, 2, 1}, {3, 1, 1}, {1, 1, 0}, {1, 0.75, 1.25}, {1, 1, 2}};
    for (size_t k = 0; k < sizeof costs / sizeof *costs; k++) {
        double f = costs[k][0], b = costs[k][1], w = costs[k][2];
        for (int64_t p = 1; p <= STAGES; p++)
            for (int64_t m = 1; m <= 24; m++) {
                char name[128];
                snprintf(name, sizeof name, "zero-bubble pp %lld m %lld costs %g %g %g", (long long)p, (long long)m, f,
                    b, w);
                loom_schedule_config config = {.stages = p, .microbatches = m};
                loom_schedule_result plain = simulate_uniform(config, f, b, w);
                config.kind = LOOM_SCHEDULE_ZERO_BUBBLE;
                loom_schedule_result split = simulate_uniform(config, f, b, w);
                double work = (double)m * (f + b + w), ends = (double)(p - 1);
                close_to(name, "bubble of 1F1B", plain.makespan - work, ends * (f + b + w));
                if (m >= p && w <= f)
                    close_to(name, "bubble", split.makespan - work, ends * (f + b - w));
                check(split.makespan <= plain.makespan + 1e-9, "%s: %g is longer than 1F1B's %g", name, split.makespan,
                    plain.makespan);
                assert_int_equal(peak(&split), peak(&plain));
                loom_schedule_result_free(&plain);
                loom_schedule_result_free(&split);
            }
    }
}

static void a_message_under_a_computation_costs_nothing(void **state) {
    (void)state;
    schedule s, early;
    make(&s, (loom_schedule_config){.stages = 4, .microbatches = 16});
    loom_schedule_costs costs = {.message = 0.5};
    loom_schedule_result late = simulate(&s, &costs, false), blocking = simulate(&s, &costs, true);
    early = s;
    for (int64_t stage = 0; stage < 4; stage++)
        assert_int_equal(
            loom_schedule_post_receives_early(&s.config, &s.lists[stage], 1, &early.lists[stage]), LOOM_OK);
    loom_schedule_result ahead = simulate(&early, &costs, false);
    check(ahead.makespan < late.makespan && late.makespan <= blocking.makespan, "%g, late %g, blocking %g",
        ahead.makespan, late.makespan, blocking.makespan);
    loom_schedule_result_free(&late);
    loom_schedule_result_free(&blocking);
    loom_schedule_result_free(&ahead);
    drop(&s);
    drop(&early);
}

static void stages_of_unequal_cost_are_played_as_they_are(void **state) {
    (void)state;
    /* Two stages, two microbatches, the second stage twice as slow: F 0-1, then B (2 halves) when the gradient comes.
     */
    const double cost[2] = {1, 2};
    schedule s;
    make(&s, (loom_schedule_config){.stages = 2, .microbatches = 2});
    loom_schedule_result result = simulate(&s, &(loom_schedule_costs){cost, cost, cost, 0.0}, false);
    /* stage 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13; stage 0 then B1 13-15 */
    close_to(s.name, "makespan", result.makespan, 15.0);
    close_to(s.name, "bubble", result.bubble, 1.0 - 18.0 / 30.0);
    close_to(s.name, "busy", result.stage[0].busy, 6.0);
    assert_int_equal(result.event_count, 8);
    assert_int_equal(result.events[2].kind, LOOM_INSTRUCTION_BACKWARD);
    close_to(s.name, "B0 of stage 0", result.events[2].start, 7.0);
    assert_int_equal(result.stage[0].activations, 2);
    assert_int_equal(result.stage[1].activations, 1);
    loom_schedule_result_free(&result);
    drop(&s);
}

static int64_t find(const schedule *s, int64_t stage, loom_instruction_kind kind, int64_t microbatch) {
    const loom_schedule_list *list = &s->lists[stage];
    for (int64_t i = 0; i < list->count; i++)
        if (list->instructions[i].kind == kind && (list->instructions[i].microbatch == microbatch || microbatch < 0))
            return i;
    fail();
    return -1;
}

/* Takes an instruction out and puts it in front of where another one then stands. */
static void move(schedule *s, int64_t stage, int64_t from, int64_t to) {
    loom_instruction *list = s->lists[stage].instructions, moved = list[from];
    memmove(list + from, list + from + 1, (size_t)(s->lists[stage].count - from - 1) * sizeof *list);
    memmove(list + to + 1, list + to, (size_t)(s->lists[stage].count - to - 1) * sizeof *list);
    list[to] = moved;
}

static void fails(const schedule *s, bool blocking, const char *message) {
    loom_schedule_result result;
    loom_error_clear();
    assert_int_equal(loom_schedule_simulate(&s->config, s->lists, NULL, blocking, &result), LOOM_ERR_ARGUMENT);
    check(strstr(loom_error_message(), message), "'%s' does not say '%s'", loom_error_message(), message);
}

static void broken_lists_are_told_by_stage_and_instruction(void **state) {
    (void)state;
    static const struct {
        int64_t stage;
        loom_instruction_kind taken;
        int64_t microbatch;
        const char *message;
    } missing[] = {
        {1, LOOM_INSTRUCTION_RECEIVE_PREVIOUS, 2,
            "(forward of microbatch 2, chunk 0): its input has not been received"},
        {0, LOOM_INSTRUCTION_RECEIVE_NEXT, 1, "the gradient of its output has not been received"},
        {0, LOOM_INSTRUCTION_SEND_NEXT, 1, "stage 0: the send to next of microbatch 1, chunk 0, is missing"},
        {1, LOOM_INSTRUCTION_SEND_PREVIOUS, 3, "stage 1: the send to previous of microbatch 3"},
        {0, LOOM_INSTRUCTION_FORWARD, 0, "what it sends has not been computed"},
        {1, LOOM_INSTRUCTION_BACKWARD, 3, "stage 1, instruction 16 (send to previous of microbatch 3, chunk 0): what"},
        {0, LOOM_INSTRUCTION_BACKWARD, 1, "must be accumulated in the order of microbatches"},
        {0, LOOM_INSTRUCTION_SYNC_OFF, -1, "reductions are on, but later microbatches still add"},
        {0, LOOM_INSTRUCTION_SYNC_ON, -1, "stage 0: the gradients of chunk 0 are never reduced"},
    };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        schedule s;
        make(&s, (loom_schedule_config){.stages = 2, .microbatches = 4});
        int64_t at = find(&s, missing[i].stage, missing[i].taken, missing[i].microbatch);
        move(&s, missing[i].stage, at, s.lists[missing[i].stage].count - 1);
        s.lists[missing[i].stage].count--;
        fails(&s, false, missing[i].message);
        drop(&s);
    }

    schedule s;
    make(&s, (loom_schedule_config){.stages = 2, .microbatches = 4});
    loom_instruction *list = s.lists[1].instructions;
    list[find(&s, 1, LOOM_INSTRUCTION_FORWARD, 2)].microbatch = 1;
    fails(&s, false, "(forward of microbatch 1, chunk 0): it is there twice");
    list[1].microbatch = 4;
    fails(&s, false, "there is no such microbatch");
    list[1].microbatch = 0;
    list[1].chunk = 1;
    fails(&s, false, "there is no such chunk");
    list[1].chunk = 0;
    list[1].kind = LOOM_INSTRUCTION_RECEIVE_NEXT;
    fails(&s, false, "the model ends here");
    drop(&s);
}

static void a_deadlock_is_told_as_its_cycle(void **state) {
    (void)state;
    schedule s;
    /* Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1; stage 1 wants both first. */
    make(&s, (loom_schedule_config){.stages = 3, .microbatches = 4});
    int64_t forward = find(&s, 1, LOOM_INSTRUCTION_FORWARD, 1);
    move(&s, 1, find(&s, 1, LOOM_INSTRUCTION_RECEIVE_NEXT, 0), forward);
    move(&s, 1, find(&s, 1, LOOM_INSTRUCTION_BACKWARD, 0), forward + 1);
    move(&s, 2, find(&s, 2, LOOM_INSTRUCTION_RECEIVE_PREVIOUS, 1), find(&s, 2, LOOM_INSTRUCTION_BACKWARD, 0));
    move(&s, 2, find(&s, 2, LOOM_INSTRUCTION_FORWARD, 1), find(&s, 2, LOOM_INSTRUCTION_BACKWARD, 0));
    fails(&s, false, "a deadlock of 2 stages: stage ");
    fails(&s, false,
        "stage 1 at instruction 6 (backward of microbatch 0, chunk 0) waits for stage 2 to start its instruction ");
    fails(&s, false,
        "stage 2 at instruction 4 (forward of microbatch 1, chunk 0) waits for stage 1 to start its instruction 8 "
        "(send to next, the activation for microbatch 1, chunk 0)");
    drop(&s);

    /* Each receives before it sends what the other waits for: only stages that block stand still. */
    make(&s, (loom_schedule_config){.stages = 2, .microbatches = 4});
    for (int64_t stage = 0; stage < 2; stage++) {
        loom_schedule_list *list = &s.lists[stage];
        for (int64_t i = 1; i < list->count; i++) {
            loom_instruction *at = &list->instructions[i];
            if (at->exchange < 0 || at->exchange != at[-1].exchange)
                continue;
            loom_instruction send = at[-1];
            at[-1] = *at;
            *at = send;
            at->exchange += 1000;
        }
    }
    loom_schedule_result result = simulate(&s, NULL, false);
    loom_schedule_result_free(&result);
    fails(&s, true, "a deadlock of 2 stages: stage ");
    fails(&s, true, "(receive from next of microbatch 0, chunk 0) waits for stage 1 to start its instruction ");
    fails(&s, true, "(receive from previous of microbatch 1, chunk 0) waits for stage 0 to start its instruction ");
    drop(&s);
}

static void costs_must_be_numbers_of_at_least_0(void **state) {
    (void)state;
    schedule s;
    make(&s, (loom_schedule_config){.stages = 2, .microbatches = 4});
    loom_schedule_result result;
    const double bad[2] = {1, NAN};
    assert_int_equal(
        loom_schedule_simulate(&s.config, s.lists, &(loom_schedule_costs){.backward_weight = bad}, false, &result),
        LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "the cost of the weight half of stage 1, chunk 0 is nan"));
    assert_int_equal(loom_schedule_simulate(&s.config, s.lists, &(loom_schedule_costs){.message = -1}, false, &result),
        LOOM_ERR_ARGUMENT);
    loom_schedule_list early;
    assert_int_equal(loom_schedule_post_receives_early(&s.config, &s.lists[0], -1, &early), LOOM_ERR_ARGUMENT);
    s.lists[0].instructions[1].chunk = 3;
    assert_int_equal(loom_schedule_post_receives_early(&s.config, &s.lists[0], 1, &early), LOOM_ERR_ARGUMENT);
    drop(&s);
    loom_schedule_result_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_legal_schedule_is_proved_in_both_forms),
        cmocka_unit_test(messages_of_a_direction_are_received_in_the_order_of_their_sends),
        cmocka_unit_test(early_receives_stay_proved_and_bounded_and_never_slower),
        cmocka_unit_test(bubbles_are_the_textbook_s),
        cmocka_unit_test(zero_bubble_saves_weight_halves_and_keeps_the_peak),
        cmocka_unit_test(a_message_under_a_computation_costs_nothing),
        cmocka_unit_test(stages_of_unequal_cost_are_played_as_they_are),
        cmocka_unit_test(broken_lists_are_told_by_stage_and_instruction),
        cmocka_unit_test(a_deadlock_is_told_as_its_cycle),
        cmocka_unit_test(costs_must_be_numbers_of_at_least_0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
