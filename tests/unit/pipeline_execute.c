/* The executor alone. Its work is arithmetic: a chunk adds a number of its own to what it gets, so that a message that
 * went astray shows in a value. */
#include "parallel/support.h"
#include "pipeline/pipeline.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct job {
    loom_schedule_config schedule;
    loom_dtype wire;
    bool variable;
    int64_t early;      /* receives stand as many computations early; -1 = where the generator puts them */
    int64_t most_sends; /* that may be under way; 0 = not looked at */
    /* Breaks the list of stage 0: */
    void (*spoil)(loom_schedule_list *list);
} job;

enum { WIDTH = 3 };

typedef struct toy_work {
    const job *job;
    loom_rank *rank;
    loom_parameter scale; /* one number, 1: every chunk multiplies by it, so that there is something to train */
    float scale_grad;
    int64_t stage, chunks, finished;
    bool sync;
    char synced[64]; /* a letter for each SYNC, GRAD_SYNC and PARAM_SYNC */
} toy_work;

/* What the chunk adds: place in the model, from 1. */
static float step_of(const toy_work *work, int64_t chunk) {
    return (float)(chunk * work->job->schedule.stages + work->stage + 1);
}

/* What arrives at the chunk for the microbatch. */
static float wanted(const toy_work *work, int64_t microbatch, int64_t chunk) {
    int64_t before = chunk * work->job->schedule.stages + work->stage;
    return (float)(microbatch * 1000 + before * (before + 1) / 2);
}

static loom_status scale_backward_input(loom_tape *tape, loom_node *node, loom_tensor *d_output) {
    return loom_tape_give(tape, node, 0, loom_tensor_retain(d_output));
}

static loom_status scale_backward_weight(loom_tape *tape, loom_node *node, loom_tensor *d_output) {
    bool accumulate;
    (void)tape;
    float *grad = loom_parameter_begin_grad(loom_node_parameter(node, 0), &accumulate);
    *grad = (accumulate ? *grad : 0) + loom_tensor_f32(d_output)[0];
    return LOOM_OK;
}

static const loom_op scale_op = {"toy scale", scale_backward_input, scale_backward_weight, NULL};

/* With variable shapes every microbatch has a width of its own. */
static int64_t width_of(const job *j, int64_t microbatch) {
    return j->variable ? 1 + microbatch % WIDTH : WIDTH;
}

static loom_status toy_forward(void *context, int64_t microbatch, int64_t chunk, loom_tape *tape, loom_tensor *input,
    loom_tensor **output, loom_tensor **d_output) {
    toy_work *work = context;
    const job *j = work->job;
    int64_t shape[2] = {1, width_of(j, microbatch)};
    bool first = work->stage == 0 && chunk == 0;
    bool last = work->stage == j->schedule.stages - 1 && chunk == work->chunks - 1;
    CHECK(first == (input == NULL), "microbatch %lld, chunk %lld: an input too few or too many", (long long)microbatch,
        (long long)chunk);
    loom_tensor *made = NULL;
    loom_node *node = NULL;
    LOOM_TRY(loom_tensor_create(work->rank, LOOM_F32, 2, shape, &made));
    for (int64_t i = 0; i < shape[1]; i++) {
        float found = input ? loom_tensor_f32(input)[i] : wanted(work, microbatch, chunk);
        CHECK(!input || loom_tensor_count(input) == shape[1], "microbatch %lld: %lld elements instead of %lld",
            (long long)microbatch, (long long)loom_tensor_count(input), (long long)shape[1]);
        CHECK(found == wanted(work, microbatch, chunk), "stage %lld, microbatch %lld, chunk %lld got %g, expected %g",
            (long long)work->stage, (long long)microbatch, (long long)chunk, (double)found,
            (double)wanted(work, microbatch, chunk));
        loom_tensor_f32(made)[i] = found + step_of(work, chunk);
    }
    loom_parameter *parameter = &work->scale;
    loom_status status = loom_tape_record(tape, &scale_op, 0, &input, input != NULL, &parameter, 1, made, &node);
    if (!status && last && d_output) {
        status = loom_tensor_create(work->rank, LOOM_F32, 2, shape, d_output);
        for (int64_t i = 0; !status && i < shape[1]; i++)
            loom_tensor_f32(*d_output)[i] = (float)(microbatch + 1);
    }
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    *output = made;
    return LOOM_OK;
}

static void toy_finished(void *context, int64_t microbatch) {
    (void)microbatch;
    ((toy_work *)context)->finished++;
}

static void note_letter(toy_work *work, char letter, int64_t chunk) {
    size_t used = strlen(work->synced);
    if (used + 2 < sizeof work->synced)
        snprintf(
            work->synced + used, sizeof work->synced - used, chunk < 0 ? "%c" : "%c%lld", letter, (long long)chunk);
}

static void toy_sync(void *context, bool on) {
    note_letter(context, on ? '+' : '-', -1);
}

static void toy_grad_sync(void *context, int64_t chunk) {
    note_letter(context, 'G', chunk);
}

static void toy_param_sync(void *context, int64_t chunk) {
    note_letter(context, 'P', chunk);
}

static loom_status make_list(const job *j, int64_t stage, loom_schedule_list *list) {
    LOOM_TRY(loom_schedule_make(&j->schedule, stage, list));
    if (j->early < 0)
        return LOOM_OK;
    loom_schedule_list plain = *list;
    loom_status status = loom_schedule_post_receives_early(&j->schedule, &plain, j->early, list);
    loom_schedule_list_free(&plain);
    return status;
}

static loom_status execute(loom_rank *rank, const job *j, loom_comm *stages, toy_work *work) {
    loom__pipeline_options options = {.chunks = work->chunks, .wire = j->wire, .variable_shapes = j->variable};
    loom__pipeline_run run = {.microbatches = j->schedule.microbatches,
        .group = j->schedule.group ? j->schedule.group : j->schedule.stages,
        .training = !j->schedule.forward_only,
        .split_backward = j->schedule.kind == LOOM_SCHEDULE_ZERO_BUBBLE,
        .dims = 2,
        .shape = {1, WIDTH}};
    loom__pipeline_work functions = {.context = work,
        .forward = toy_forward,
        .finished = toy_finished,
        .sync = toy_sync,
        .grad_sync = toy_grad_sync,
        .param_sync = toy_param_sync};
    loom_schedule_list list;
    loom__pipeline *pipeline = NULL;
    LOOM_TRY(make_list(j, work->stage, &list));
    if (j->spoil && work->stage == 0)
        j->spoil(&list);
    run.list = &list;
    loom_status status = loom__pipeline_create(rank, stages, &options, &pipeline);
    for (int turn = 0; !status && turn < 2; turn++)
        status = loom__pipeline_execute(pipeline, &run, &functions);
    loom_schedule_list_free(&list);
    if (!status && j->most_sends > 0 && loom__pipeline_counts_of(pipeline).sends > j->most_sends)
        status = loom_fail(LOOM_ERR_INTERNAL, "%lld sends were under way at once",
            (long long)loom__pipeline_counts_of(pipeline).sends);
    loom__pipeline_destroy(pipeline);
    return status;
}

static loom_status body(loom_rank *rank, void *argument) {
    const job *j = argument;
    toy_work work = {.job = j,
        .rank = rank,
        .stage = loom_rank_index(rank),
        .chunks = j->schedule.chunks ? j->schedule.chunks : 1,
        .scale = {.name = "scale", .dims = 1, .shape = {1, 1}}};
    work.scale.grad = &work.scale_grad;
    loom_status status = execute(rank, j, loom_rank_world(rank), &work);
    int64_t m = j->schedule.microbatches;
    if (status) {
        /* The endpoint has failed; the memory is all back. */
        if (loom_rank_memory(rank).in_use > 0)
            return loom_fail(LOOM_ERR_INTERNAL, "%zu bytes are in use after an error", loom_rank_memory(rank).in_use);
        return status;
    }
    CHECK(loom_rank_memory(rank).in_use == 0, "%zu bytes are still in use", loom_rank_memory(rank).in_use);
    CHECK(work.finished == 2 * m, "%lld of %lld microbatches were finished", (long long)work.finished,
        (long long)(2 * m));
    /* Two runs; the gradient of microbatch i is i+1 everywhere, in each chunk. */
    float sum = j->schedule.forward_only ? 0 : (float)(work.chunks * m * (m + 1));
    CHECK(work.scale_grad == sum, "stage %lld: the gradient is %g, expected %g", (long long)work.stage,
        (double)work.scale_grad, (double)sum);
    CHECK(work.scale.pending_uses == 0, "%lld uses are pending", (long long)work.scale.pending_uses);
    return LOOM_OK;
}

static void must_work(const job *j) {
    must_run((int)j->schedule.stages, body, (void *)(uintptr_t)j);
}

static void every_message_reaches_its_computation(void **state) {
    (void)state;
    for (int64_t stages = 1; stages <= 4; stages++)
        for (int64_t chunks = 0; chunks <= (stages > 1 ? 3 : 0); chunks++)
            for (int64_t m = chunks ? stages : 1; m <= 8; m += chunks ? stages : 1)
                for (int64_t early = -1; early <= 3; early += 2) {
                    job j = {.schedule = {.stages = stages, .chunks = chunks == 1 ? 0 : chunks, .microbatches = m},
                        .wire = LOOM_F32,
                        .early = early};
                    must_work(&j);
                    j.schedule.forward_only = true;
                    must_work(&j);
                    j.schedule.forward_only = false;
                    j.variable = true;
                    must_work(&j);
                    if (j.schedule.chunks)
                        continue;
                    j.schedule.kind = LOOM_SCHEDULE_ZERO_BUBBLE;
                    must_work(&j);
                }
}

/* Two stages with chunks: both neighbours are the same rank, and more microbatches than there are tags for. */
static void two_stages_with_chunks_and_more_microbatches_than_tags_mix_nothing_up(void **state) {
    (void)state;
    job j = {.schedule = {.stages = 2, .chunks = 5, .microbatches = 480}, .wire = LOOM_F32, .early = 2};
    must_work(&j);
    j.schedule.forward_only = true;
    must_work(&j);
}

/* The first two receives of activations, posted the other way round. */
static void swap_receives(loom_schedule_list *list) {
    loom_instruction *first = NULL;
    for (int64_t i = 0; i < list->count; i++) {
        loom_instruction *at = &list->instructions[i];
        if (at->kind != LOOM_INSTRUCTION_RECEIVE_PREVIOUS)
            continue;
        if (first) {
            loom_instruction second = *at;
            *at = *first;
            *first = second;
            return;
        }
        first = at;
    }
}

/* Microbatches are in the tags: what is posted first is not what comes first. */
static void receives_posted_in_another_order_get_their_own_messages(void **state) {
    (void)state;
    job j = {.schedule = {.stages = 2, .chunks = 2, .microbatches = 4},
        .wire = LOOM_F32,
        .early = 3,
        .spoil = swap_receives};
    must_work(&j);
}

/* Nothing but the executor holds the first stage back. */
static void a_fast_stage_of_an_evaluation_does_not_fill_its_memory(void **state) {
    (void)state;
    job j = {.schedule = {.stages = 3, .microbatches = 600, .forward_only = true},
        .wire = LOOM_F32,
        .early = 1,
        .most_sends = 3 + 2 * 3};
    must_work(&j);
    j.schedule.chunks = 2;
    must_work(&j);
}

/* The toy's values are whole numbers below 2048 with one or two microbatches, which 16 bits hold. */
static void narrow_dtypes_travel(void **state) {
    (void)state;
    static const loom_dtype dtypes[] = {LOOM_BF16, LOOM_F16};
    for (size_t i = 0; i < 2; i++) {
        job j = {.schedule = {.stages = 2, .microbatches = 1}, .wire = dtypes[i], .early = 1};
        must_work(&j);
        j.variable = true;
        must_work(&j);
    }
}

/* ---- instructions about reductions ---- */

static loom_status see_syncs(loom_rank *rank, void *argument) {
    /* As the reference has them (golden/pipeline, pp2_vp2_m4_g2_sync), twice, since the list is carried out twice. */
    static const char *const expected[] = {"-P0P1+G1-+G0-+-P0P1+G1-+G0-+", "-P0P1+G1-+G0-P0P1+G1-+G0"};
    const job *j = argument;
    toy_work work = {.job = j,
        .rank = rank,
        .stage = loom_rank_index(rank),
        .chunks = j->schedule.chunks,
        .scale = {.name = "scale", .dims = 1, .shape = {1, 1}}};
    work.scale.grad = &work.scale_grad;
    LOOM_TRY(execute(rank, j, loom_rank_world(rank), &work));
    CHECK(strcmp(work.synced, expected[work.stage]) == 0, "stage %lld: found %s, expected %s", (long long)work.stage,
        work.synced, expected[work.stage]);
    return LOOM_OK;
}

static void instructions_about_reductions_reach_the_work(void **state) {
    (void)state;
    job j = {
        .schedule = {.stages = 2, .chunks = 2, .microbatches = 4, .align_sync = true}, .wire = LOOM_F32, .early = -1};
    must_run(2, see_syncs, &j);
}

/* ---- lists that cannot be carried out ---- */

static void swap_first_backward(loom_schedule_list *list) {
    for (int64_t i = 0; i < list->count; i++)
        if (list->instructions[i].kind == LOOM_INSTRUCTION_BACKWARD) {
            loom_instruction backward = list->instructions[i];
            memmove(list->instructions + 1, list->instructions, (size_t)i * sizeof *list->instructions);
            list->instructions[0] = backward;
            return;
        }
}

static void drop(loom_schedule_list *list, loom_instruction_kind kind) {
    for (int64_t i = 0; i < list->count; i++)
        if (list->instructions[i].kind == kind) {
            memmove(list->instructions + i, list->instructions + i + 1,
                (size_t)(list->count - i - 1) * sizeof *list->instructions);
            list->count--;
            return;
        }
}

static void drop_a_receive(loom_schedule_list *list) {
    drop(list, LOOM_INSTRUCTION_RECEIVE_NEXT);
}

static void repeat_a_forward(loom_schedule_list *list) {
    for (int64_t i = 0; i + 1 < list->count; i++)
        if (list->instructions[i].kind == LOOM_INSTRUCTION_FORWARD) {
            list->instructions[i + 1] = list->instructions[i];
            return;
        }
}

static void send_early(loom_schedule_list *list) {
    list->instructions[0] = (loom_instruction){LOOM_INSTRUCTION_SEND_NEXT, 0, 0, -1};
}

static void name_a_microbatch_that_is_not(loom_schedule_list *list) {
    list->instructions[0] = (loom_instruction){LOOM_INSTRUCTION_FORWARD, 0, 99, -1};
}

static void name_a_kind_that_is_not(loom_schedule_list *list) {
    list->instructions[0].kind = LOOM_INSTRUCTION_KINDS;
}

static void leave_the_last_backward_out(loom_schedule_list *list) {
    while (list->count > 0 && list->instructions[list->count - 1].kind != LOOM_INSTRUCTION_BACKWARD)
        list->count--;
    list->count--;
}

static void run_a_weight_half_first(loom_schedule_list *list) {
    list->instructions[0] = (loom_instruction){LOOM_INSTRUCTION_BACKWARD_WEIGHT, 0, 0, -1};
}

static void lists_that_cannot_be_carried_out_are_named_and_end_the_run(void **state) {
    (void)state;
    static const struct {
        void (*spoil)(loom_schedule_list *list);
        int64_t stages;
        const char *text;
    } cases[] = {
        {swap_first_backward, 2, "the backward of microbatch 0, chunk 0, which has no forward that waits for it"},
        {drop_a_receive, 2, "the backward of microbatch 0, chunk 0, whose message it has not received"},
        {repeat_a_forward, 2, "the forward of microbatch 0, chunk 0, a second time"},
        {send_early, 2, "the send to next of microbatch 0, chunk 0, which has nothing to send"},
        {name_a_microbatch_that_is_not, 2, "the forward of microbatch 99, chunk 0, which the step does not have"},
        {name_a_kind_that_is_not, 1, "instruction 0 of the schedule has kind"},
        {leave_the_last_backward_out, 1, "ends with 1 of the 1 chunks of microbatch 3 undone"},
        {run_a_weight_half_first, 1, "the backward (weights) of microbatch 0, chunk 0, before its input half"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job j = {.schedule = {.stages = cases[i].stages, .microbatches = 4},
            .wire = LOOM_F32,
            .early = -1,
            .spoil = cases[i].spoil};
        loom_run_options options = test_options();
        loom_status status = loom_run_local((int)cases[i].stages, body, &j, &options);
        if (status != LOOM_ERR_STATE || !strstr(loom_error_message(), cases[i].text))
            fail_msg("case %zu: %s: %s", i, loom_status_name(status), loom_error_message());
    }
}

static loom_status too_many_chunks(loom_rank *rank, void *argument) {
    loom__pipeline_options options = {.chunks = 251, .wire = LOOM_F32};
    loom__pipeline *pipeline;
    (void)argument;
    loom_status status = loom__pipeline_create(rank, loom_rank_world(rank), &options, &pipeline);
    CHECK(status == LOOM_ERR_CONFIG && strstr(loom_error_message(), "found 251, expected at most 250"), "found %s: %s",
        loom_status_name(status), loom_error_message());
    return LOOM_OK;
}

static void more_chunks_than_tags_are_refused(void **state) {
    (void)state;
    must_run(1, too_many_chunks, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_message_reaches_its_computation),
        cmocka_unit_test(two_stages_with_chunks_and_more_microbatches_than_tags_mix_nothing_up),
        cmocka_unit_test(a_fast_stage_of_an_evaluation_does_not_fill_its_memory),
        cmocka_unit_test(receives_posted_in_another_order_get_their_own_messages),
        cmocka_unit_test(narrow_dtypes_travel),
        cmocka_unit_test(instructions_about_reductions_reach_the_work),
        cmocka_unit_test(lists_that_cannot_be_carried_out_are_named_and_end_the_run),
        cmocka_unit_test(more_chunks_than_tags_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
