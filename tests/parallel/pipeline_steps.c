/* What a step on a pipeline does beside its numbers: events, logits, memory, shapes, the end of the data; and how a
 * step that goes wrong ends. */
#include "parallel/pipeline_support.h"
#include "parallel/toy_module.h"
#include "strategy/strategy.h"
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static loom_status start(loom_rank *rank, const pipe_case *given, small_run *run) {
    pipe_case c = pipe_filled(given);
    LOOM_TRY(pipe_start(rank, &c, run));
    return small_data(run, LOOM_TRAINING, PIPE_STEPS * c.global, c.micro, c.global);
}

static const pipe_case interleaved = {.ranks = 4, .pp = 2, .vpp = 2};

/* ---- events ---- */

typedef struct seen {
    char text[512];
    int64_t last;
    bool has_batch;
} seen;

static loom_status see(seen *log, char letter, const loom_step *step) {
    size_t used = strlen(log->text);
    snprintf(log->text + used, sizeof log->text - used, "%c%lld ", letter, (long long)step->microbatch);
    log->has_batch = log->has_batch && step->batch && step->batch->b == 1;
    return LOOM_OK;
}

static loom_status see_start(void *context, loom_step *step) {
    return see(context, 'S', step);
}

static loom_status see_end(void *context, loom_step *step) {
    return see(context, 'E', step);
}

static loom_status see_reduced(void *context, loom_step *step) {
    seen *log = context;
    snprintf(log->text + strlen(log->text), 64, "loss %.3f tokens %g", step->loss, step->tokens);
    return LOOM_OK;
}

static loom_status watch(loom_rank *rank, void *argument) {
    small_run run;
    seen log = {.has_batch = true};
    loom_callback callback = {&log, {[LOOM_EVENT_MICROBATCH_START] = see_start,
                                        [LOOM_EVENT_MICROBATCH_END] = see_end,
                                        [LOOM_EVENT_REDUCE_MICROBATCHES_END] = see_reduced}};
    loom_step_result result;
    char wanted[512];
    (void)argument;
    LOOM_TRY(start(rank, &interleaved, &run));
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
    /* 8 samples on two data-parallel ranks: four microbatches through two chunks, by twos. */
    snprintf(wanted, sizeof wanted, "S0 E0 S1 E1 S0 E0 S1 E1 S2 E2 S3 E3 S2 E2 S3 E3 loss %.3f tokens %d", result.loss,
        8 * SMALL_SEQUENCE);
    CHECK(strcmp(log.text, wanted) == 0, "found %s, expected %s", log.text, wanted);
    CHECK(log.has_batch, "an event without its microbatch");
    CHECK(result.loss > 1 && result.tokens == 8 * SMALL_SEQUENCE, "stage %d has loss %g of %g tokens",
        loom_comm_rank(loom_fabric_group(run.fabric, LOOM_GROUP_PP)), result.loss, result.tokens);
    CHECK(loom_batches_get_state(run.batches).fetched == 4, "%lld microbatches were read for 4",
        (long long)loom_batches_get_state(run.batches).fetched);
    small_destroy(&run);
    return LOOM_OK;
}

static void each_forward_has_its_events_each_microbatch_is_read_once_and_all_stages_hear_of_the_loss(void **state) {
    (void)state;
    must_run(4, watch, NULL);
}

/* ---- precision ---- */

typedef struct converted {
    int64_t inputs, outputs;
} converted;

static loom_status convert_input(void *context, const loom_batch *batch) {
    ((converted *)context)->inputs += batch->b;
    return LOOM_OK;
}

static loom_status convert_output(void *context, loom_tape *tape, loom_tensor **output) {
    (void)tape;
    ((converted *)context)->outputs += (*output)->shape[1];
    return LOOM_OK;
}

static loom_status convert(loom_rank *rank, void *argument) {
    pipe_case c = pipe_filled(&interleaved);
    loom_megatron_strategy_config strategy = pipe_strategy(&c);
    loom_model_config model = pipe_model(&c);
    converted seen_here = {0};
    loom_precision_plugin plugin = *loom_precision_plugin_fp32();
    small_run run = {0};
    loom_module *module;
    double loss;
    (void)argument;
    plugin.context = &seen_here;
    plugin.convert_input = convert_input;
    plugin.convert_output = convert_output;
    strategy.precision = &plugin;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_gpt_create(run.fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, module, &run.parallel));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 8, 1, 8));
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    bool last = run.parallel->stage == 1;
    CHECK(seen_here.inputs == (last ? 0 : 4) && seen_here.outputs == (last ? 4 : 0),
        "stage %lld converted %lld inputs and %lld outputs", (long long)run.parallel->stage,
        (long long)seen_here.inputs, (long long)seen_here.outputs);
    small_destroy(&run);
    return LOOM_OK;
}

static void inputs_are_converted_where_the_model_begins_and_outputs_where_it_ends(void **state) {
    (void)state;
    must_run(4, convert, NULL);
}

/* ---- buckets ---- */

static loom_status look_at_buckets(loom_rank *rank, void *argument) {
    pipe_case c = pipe_filled(&interleaved);
    small_run run;
    (void)argument;
    c.overlap = true;
    LOOM_TRY(pipe_start(rank, &c, &run));
    const loom__ddp_view *view = loom__ddp_view_of(run.parallel->ddp);
    int64_t of_chunk[2] = {0};
    for (int64_t i = 0; i < view->bucket_count; i++) {
        const loom__ddp_bucket *bucket = &view->buckets[i];
        int64_t chunk = view->parameters[bucket->first_place]->chunk;
        for (int64_t p = 0; p < bucket->places; p++)
            CHECK(view->parameters[bucket->first_place + p]->chunk == chunk, "bucket %lld holds two chunks",
                (long long)i);
        of_chunk[chunk]++;
    }
    bool cut = run.parallel->stage == 0;
    CHECK(of_chunk[1] == 1 && (cut ? of_chunk[0] > 1 : of_chunk[0] == 1), "stage %lld has %lld and %lld buckets",
        (long long)run.parallel->stage, (long long)of_chunk[0], (long long)of_chunk[1]);
    small_destroy(&run);
    return LOOM_OK;
}

static void only_the_first_chunk_of_the_first_stage_has_several_buckets(void **state) {
    (void)state;
    must_run(4, look_at_buckets, NULL);
}

/* ---- logits ---- */

enum { LOGIT_ROWS = 4, LOGITS = LOGIT_ROWS * SMALL_SEQUENCE * SMALL_VOCABULARY };

typedef struct kept_logits {
    float values[LOGITS];
    int64_t rows;
} kept_logits;

static loom_status keep(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    kept_logits *kept = context;
    CHECK(batch->sample[0] == kept->rows, "logits of sample %lld came as number %lld", (long long)batch->sample[0],
        (long long)kept->rows);
    CHECK(kept->rows < LOGIT_ROWS && vocabulary == SMALL_VOCABULARY, "too many logits");
    memcpy(kept->values + kept->rows * batch->s * vocabulary, logits,
        (size_t)(batch->b * batch->s * vocabulary) * sizeof *logits);
    kept->rows += batch->b;
    return LOOM_OK;
}

typedef struct logits_job {
    pipe_case c;
    kept_logits *rank_0;
} logits_job;

static loom_status predict(loom_rank *rank, void *argument) {
    const logits_job *job = argument;
    pipe_case c = pipe_filled(&job->c);
    small_run run;
    kept_logits *mine = calloc(1, sizeof *mine);
    CHECK(mine, "out of memory");
    LOOM_TRY(pipe_start(rank, &c, &run));
    LOOM_TRY(small_data(&run, LOOM_PREDICT, LOGIT_ROWS, 1, LOGIT_ROWS));
    LOOM_TRY(loom_parallel_predict_step(run.parallel, run.batches, keep, mine));
    CHECK(
        mine->rows == LOGIT_ROWS, "rank %d has the logits of %lld rows", loom_rank_index(rank), (long long)mine->rows);
    double worst = 0;
    if (loom_rank_index(rank) == 0 && job->c.pp == 0)
        *job->rank_0 = *mine;
    for (int i = 0; job->c.pp > 0 && i < LOGITS; i++)
        worst = fmax(worst, fabs((double)mine->values[i] - (double)job->rank_0->values[i]));
    CHECK(worst < 1e-6, "the logits of rank %d differ by %g from those of one stage", loom_rank_index(rank), worst);
    free(mine);
    small_destroy(&run);
    return LOOM_OK;
}

static void every_rank_gets_the_logits_of_the_last_stage_in_order(void **state) {
    (void)state;
    kept_logits alone = {.rows = 0};
    logits_job jobs[] = {
        {{.ranks = 1}, &alone}, {{.ranks = 2, .pp = 2}, &alone}, {{.ranks = 4, .tp = 2, .pp = 2, .vpp = 2}, &alone}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        must_run(jobs[i].c.ranks, predict, &jobs[i]);
}

/* ---- memory ---- */

static loom_status count_memory(loom_rank *rank, void *argument) {
    const pipe_case *given = argument;
    pipe_case c = pipe_filled(given);
    small_run run;
    double loss;
    LOOM_TRY(start(rank, &c, &run));
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    size_t after_first = loom_rank_memory(rank).high_water;
    for (int t = 1; t < PIPE_STEPS; t++)
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    /* Whether a message has left when the next tensor is made is a matter of time; how many there are is not. */
    int64_t sends = loom__pipeline_counts_of(run.parallel->pipeline).sends;
    int64_t chunks = c.vpp ? c.vpp : 1, message = (SMALL_SEQUENCE * 16 + 32) * (int64_t)sizeof(float);
    CHECK(sends <= 2 * c.pp * chunks, "%lld messages were under way at once", (long long)sends);
    CHECK(loom_rank_memory(rank).high_water <= after_first + (size_t)(sends * message),
        "high water grew from %zu to %zu after the first step, with %lld messages of %lld bytes", after_first,
        loom_rank_memory(rank).high_water, (long long)sends, (long long)message);
    CHECK(loom_rank_memory(rank).in_use == 0, "%zu bytes are in use between steps", loom_rank_memory(rank).in_use);
    loom_schedule_config schedule = {.stages = c.pp,
        .chunks = c.vpp,
        .microbatches = c.global,
        .kind = c.schedule ? LOOM_SCHEDULE_ZERO_BUBBLE : LOOM_SCHEDULE_1F1B};
    loom_schedule_list lists[4];
    loom_schedule_result simulated;
    for (int64_t s = 0; s < c.pp; s++)
        LOOM_TRY(loom_schedule_make(&schedule, s, &lists[s]));
    LOOM_TRY(loom_schedule_simulate(&schedule, lists, NULL, false, &simulated));
    int64_t stage = run.parallel->stage, found = loom__pipeline_counts_of(run.parallel->pipeline).live;
    CHECK(found == simulated.stage[stage].activations, "stage %lld held %lld activations, the simulator says %lld",
        (long long)stage, (long long)found, (long long)simulated.stage[stage].activations);
    loom_schedule_result_free(&simulated);
    for (int64_t s = 0; s < c.pp; s++)
        loom_schedule_list_free(&lists[s]);
    small_destroy(&run);
    return LOOM_OK;
}

static void activations_are_as_many_as_the_simulator_counts_and_memory_stops_growing(void **state) {
    (void)state;
    static const pipe_case cases[] = {{.ranks = 2, .pp = 2}, {.ranks = 4, .pp = 4, .layers = 4},
        {.ranks = 2, .pp = 2, .vpp = 2}, {.ranks = 4, .pp = 4, .schedule = "zero-bubble"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_case c = cases[i];
        must_run(c.ranks, count_memory, &c);
    }
}

/* ---- microbatches that differ in length ---- */

typedef struct uneven_source {
    int64_t next;
} uneven_source;

/* Lengths 8, 4, 6, 8, …; position t of sample i is token (3 i + t) mod v, its label the token behind it. */
static loom_status next_uneven(void *context, loom_batch *batch) {
    uneven_source *source = context;
    static const int64_t lengths[] = {8, 4, 6};
    int64_t number = source->next++;
    batch->b = 1;
    batch->s = lengths[number % 3];
    batch->sample[0] = batch->index[0] = number;
    for (int64_t t = 0; t < batch->s; t++) {
        batch->tokens[t] = (3 * number + t) % SMALL_VOCABULARY;
        batch->labels[t] = (3 * number + t + 1) % SMALL_VOCABULARY;
        batch->loss_mask[t] = 1;
        batch->position_ids[t] = t;
    }
    return LOOM_OK;
}

typedef struct uneven_job {
    pipe_case c;
    double *losses; /* of one rank */
} uneven_job;

static loom_status train_uneven(loom_rank *rank, void *argument) {
    const uneven_job *job = argument;
    pipe_case c = pipe_filled(&job->c);
    uneven_source source = {0};
    small_run run;
    loom_data_loader loader = {.context = &source,
        .micro_batch_size = 1,
        .sequence_length = SMALL_SEQUENCE,
        .microbatches = 4,
        .next = next_uneven};
    loom_status status = pipe_start(rank, &c, &run);
    if (!status)
        status = loom_fabric_setup_loader(run.fabric, &loader, &run.batches);
    for (int t = 0; !status && t < PIPE_STEPS; t++) {
        loom_optimizer_outcome outcome;
        double loss = 0;
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
        if (!status)
            status = loom_optimizer_step(run.optimizer, &outcome);
        if (!status && job->c.pp == 0)
            job->losses[t] = loss;
        else if (!status && !(fabs(loss - job->losses[t]) <= 3e-6 * loss))
            status = loom_fail(LOOM_ERR_INTERNAL, "loss of step %d: found %.9g, wanted %.9g", t, loss, job->losses[t]);
    }
    small_destroy(&run);
    return status;
}

static void microbatches_may_differ_in_length_when_the_field_says_so(void **state) {
    (void)state;
    double losses[PIPE_STEPS];
    uneven_job jobs[] = {{{.ranks = 1, .variable = true}, losses}, {{.ranks = 2, .pp = 2, .variable = true}, losses},
        {{.ranks = 2, .pp = 2, .vpp = 2, .variable = true}, losses},
        {{.ranks = 4, .tp = 2, .pp = 2, .vpp = 2, .sp = true, .variable = true}, losses},
        {{.ranks = 3, .pp = 3, .layers = 4, .balanced = true, .variable = true, .schedule = "zero-bubble"}, losses}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        must_run(jobs[i].c.ranks, train_uneven, &jobs[i]);
}

static void must_fail(int ranks, loom_rank_function function, void *argument, loom_status wanted, const char *text) {
    loom_run_options options = test_options();
    loom_status status = loom_run_local(ranks, function, argument, &options);
    if (status != wanted || !strstr(loom_error_message(), text))
        fail_msg("found %s: %s; expected %s with \"%s\"", loom_status_name(status), loom_error_message(),
            loom_status_name(wanted), text);
}

static void microbatches_of_another_length_are_refused_without_the_field(void **state) {
    (void)state;
    double losses[PIPE_STEPS];
    uneven_job job = {{.ranks = 2, .pp = 2}, losses};
    must_fail(2, train_uneven, &job, LOOM_ERR_ARGUMENT,
        "the step has microbatches of 1 rows of 8 positions, but its loader gives 1 of 4");
}

/* Two rows, then one. */
static loom_status next_short(void *context, loom_batch *batch) {
    LOOM_TRY(next_uneven(context, batch));
    int64_t rows = ((uneven_source *)context)->next == 3 ? 1 : 2;
    batch->s = SMALL_SEQUENCE;
    batch->b = rows;
    for (int64_t i = 0; i < rows * batch->s; i++) {
        batch->tokens[i] = batch->labels[i] = i % SMALL_VOCABULARY;
        batch->loss_mask[i] = 1;
        batch->position_ids[i] = i % batch->s;
    }
    batch->sample[rows - 1] = batch->index[rows - 1] = 0;
    return LOOM_OK;
}

static loom_status train_short(loom_rank *rank, void *argument) {
    pipe_case c = pipe_filled(argument);
    uneven_source source = {0};
    small_run run;
    double loss;
    loom_data_loader loader = {.context = &source,
        .micro_batch_size = 2,
        .sequence_length = SMALL_SEQUENCE,
        .microbatches = 4,
        .next = next_short};
    loom_status status = pipe_start(rank, &c, &run);
    if (!status)
        status = loom_fabric_setup_loader(run.fabric, &loader, &run.batches);
    if (!status)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void a_microbatch_with_fewer_rows_is_named_by_the_stage_that_would_send_it(void **state) {
    (void)state;
    pipe_case c = {.ranks = 2, .pp = 2}, variable = {.ranks = 2, .pp = 2, .variable = true};
    must_fail(2, train_short, &c, LOOM_ERR_ARGUMENT,
        "stage 0, forward of microbatch 2, chunk 0: the activations for the next stage are [8, 1, 16] of F32, expected "
        "[8, 2, 16]");
    must_run(2, train_short, &variable);
}

/* ---- the end of the data ---- */

static loom_status read_to_the_end(loom_rank *rank, void *argument) {
    pipe_case c = pipe_filled(argument);
    small_run run;
    double loss;
    LOOM_TRY(start(rank, &c, &run));
    for (int t = 0; t < PIPE_STEPS; t++)
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    for (int t = 0; t < 2; t++) {
        loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
        CHECK(status == LOOM_END, "after the data a step gives %s", loom_status_name(status));
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void the_end_of_the_data_comes_to_all_stages_and_ends_nothing(void **state) {
    (void)state;
    pipe_case c = interleaved;
    must_run(4, read_to_the_end, &c);
}

/* ---- what is refused ---- */

static loom_status refuse_toy(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    toy module = {.parameters = 1, .uses = 1};
    loom_fabric *fabric;
    loom_parallel *parallel;
    (void)argument;
    strategy.pipeline_model_parallel_size = 2;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &fabric));
    LOOM_TRY(loom_fabric_launch(fabric));
    loom_status status = loom_fabric_setup_module(fabric, toy_module(&module), &parallel);
    CHECK(status == LOOM_ERR_UNSUPPORTED, "found %s", loom_status_name(status));
    CHECK(strstr(loom_error_message(), "strategy.pipeline_model_parallel_size: found 2, but this module has no "
                                       "activation_shape"),
        "found %s", loom_error_message());
    loom_fabric_destroy(fabric);
    return LOOM_OK;
}

static void a_module_that_cannot_be_cut_is_refused_on_two_stages(void **state) {
    (void)state;
    must_run(2, refuse_toy, NULL);
}

static loom_status too_few_microbatches(loom_rank *rank, void *argument) {
    small_run run;
    double loss;
    pipe_case c = pipe_filled(&interleaved);
    (void)argument;
    c.global = 2; /* one microbatch of each data-parallel rank */
    LOOM_TRY(start(rank, &c, &run));
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    CHECK(status == LOOM_ERR_CONFIG, "found %s", loom_status_name(status));
    CHECK(strstr(loom_error_message(), "microbatch"), "found %s", loom_error_message());
    small_destroy(&run);
    return LOOM_OK;
}

static void a_step_with_too_few_microbatches_for_its_chunks_is_refused_on_every_rank(void **state) {
    (void)state;
    must_run(4, too_few_microbatches, NULL);
}

static loom_status say_keys(loom_rank *rank, void *argument) {
    const pipe_case *given = argument;
    pipe_case c = pipe_filled(given);
    small_run run;
    char key[32];
    LOOM_TRY(pipe_start(rank, &c, &run));
    for (int64_t chunk = 0; chunk < (c.vpp ? c.vpp : 1); chunk++) {
        char wanted[32] = "model";
        if (c.vpp)
            snprintf(wanted, sizeof wanted, "model_%lld", (long long)chunk);
        LOOM_TRY(loom_parallel_state_key(run.parallel, chunk, key, sizeof key));
        CHECK(strcmp(key, wanted) == 0, "found %s, expected %s", key, wanted);
    }
    CHECK(loom_parallel_state_key(run.parallel, c.vpp ? c.vpp : 1, key, sizeof key) == LOOM_ERR_ARGUMENT, "no error");
    CHECK(loom_parallel_state_key(run.parallel, 0, key, 5) == LOOM_ERR_ARGUMENT, "no error");
    small_destroy(&run);
    return LOOM_OK;
}

static void chunks_have_the_state_keys_of_the_reference(void **state) {
    (void)state;
    pipe_case plain = {.ranks = 2, .pp = 2}, chunks = {.ranks = 2, .pp = 2, .vpp = 2};
    must_run(2, say_keys, &plain);
    must_run(2, say_keys, &chunks);
}

/* ---- the trace ---- */

typedef struct trace_job {
    int64_t capacity, last_capacity; /* of the first stage, of the last one */
    const char *folder;
} trace_job;

static loom_status trace(loom_rank *rank, void *argument) {
    const trace_job *job = argument;
    pipe_case c = pipe_filled(&interleaved);
    small_run run;
    double loss;
    LOOM_TRY(start(rank, &c, &run));
    CHECK(loom_parallel_trace_end(run.parallel, ".") == LOOM_ERR_STATE, "a trace ends that was not begun");
    CHECK(loom_parallel_trace_begin(run.parallel, 0) == LOOM_ERR_ARGUMENT, "a trace of no event is accepted");
    LOOM_TRY(loom_parallel_trace_begin(run.parallel, run.parallel->stage == 0 ? job->capacity : job->last_capacity));
    for (int t = 0; t < 2; t++)
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    loom_status status = loom_parallel_trace_end(run.parallel, job->folder);
    if (status) {
        small_destroy(&run);
        return status;
    }
    CHECK(loom_parallel_trace_end(run.parallel, ".") == LOOM_ERR_STATE, "a trace ends twice");
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    small_destroy(&run);
    return LOOM_OK;
}

/* How often the text stands in the file; −1 when there is no file. The file is removed. */
static int count_in(const char *folder, const char *name, const char *text) {
    static char all[1 << 17];
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (!file)
        return -1;
    all[fread(all, 1, sizeof all - 1, file)] = '\0';
    fclose(file);
    unlink(path);
    int count = 0;
    for (const char *at = all; (at = strstr(at, text)); at++)
        count++;
    return count;
}

static void a_trace_holds_every_computation_of_every_rank_or_what_fits(void **state) {
    (void)state;
    char folder[] = MEGALOOM_BUILD "/trace-XXXXXX";
    assert_non_null(mkdtemp(folder));
    trace_job whole = {1000, 1000, folder}, tight = {10, 10, folder}, uneven = {1000, 31, folder},
              nowhere = {1000, 1000, "/nowhere"};
    /* Two steps of four microbatches through two chunks of two stages, by two pipelines. */
    must_run(4, trace, &whole);
    assert_int_equal(count_in(folder, "trace.json", "\"cat\":\"backward\""), 2 * 4 * 2 * 2 * 2);
    assert_int_equal(count_in(folder, "timeline.svg", "Step 2, measured: 4 microbatches on 2 stages"), 1);
    /* One step is 16 computations and some waits: neither is whole where only 10 fit. */
    must_run(4, trace, &tight);
    int found = count_in(folder, "trace.json", "\"ph\":\"X\"");
    assert_int_equal(found, 4 * 10);
    assert_int_equal(count_in(folder, "timeline.svg", "Step"), -1);
    /* The last stage has room for a step of 16 computations and 12 waits, which are all that there can be, and not for
     * two without any. */
    must_run(4, trace, &uneven);
    assert_true(count_in(folder, "trace.json", "\"cat\":\"backward\"") >= 2 * (2 * 8 + 8));
    assert_int_equal(count_in(folder, "timeline.svg", "Step 1, measured"), 1);
    must_fail(4, trace, &nowhere, LOOM_ERR_IO, "/nowhere/trace.json: cannot be written");
    rmdir(folder);
}

/* ---- what goes wrong on the way ---- */

static loom_status poison(loom_rank *rank, void *argument) {
    small_run run;
    double loss;
    pipe_case c = {.ranks = 4, .pp = 4};
    (void)argument;
    LOOM_TRY(start(rank, &c, &run));
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(run.parallel, &parameters, &count));
    for (int64_t i = 0; i < count; i++)
        if (strcmp(parameters[i]->name, "decoder.layers.1.mlp.linear_fc1.weight") == 0)
            parameters[i]->data[3] = NAN;
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void a_nan_is_named_by_the_stage_that_makes_it(void **state) {
    (void)state;
    must_fail(
        4, poison, NULL, LOOM_ERR_NUMERIC, "rank 1: stage 1, forward of microbatch 0, chunk 0: step 1, microbatch 0: ");
    assert_non_null(strstr(loom_error_message(), "decoder.layers.1"));
}

/* With sequence parallelism a stage's output is in parts, and only one of them is bad. */
static loom_status poison_a_part(loom_rank *rank, void *argument) {
    small_run run;
    double loss;
    pipe_case c = {.ranks = 4, .tp = 2, .pp = 2, .sp = true, .micro = 1, .global = 1};
    (void)argument;
    LOOM_TRY(start(rank, &c, &run));
    loom_parameter *const *parameters;
    int64_t count;
    bool here = loom_comm_rank(loom_fabric_group(run.fabric, LOOM_GROUP_TP)) == 1;
    LOOM_TRY(loom_parallel_parameters(run.parallel, &parameters, &count));
    for (int64_t i = 0; here && i < count; i++)
        if (strcmp(parameters[i]->name, "decoder.layers.1.mlp.linear_fc2.bias") == 0)
            parameters[i]->data[0] = NAN;
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void a_nan_in_a_part_of_the_sequence_is_named_as_well(void **state) {
    (void)state;
    must_fail(4, poison_a_part, NULL, LOOM_ERR_NUMERIC,
        "rank 1: stage 0, forward of microbatch 0, chunk 0: step 1, microbatch 0: ");
    assert_non_null(strstr(loom_error_message(), "decoder.layers.1"));
}

/* fp16 ends at 65504. */
static loom_status send_large(loom_rank *rank, void *argument) {
    small_run run;
    double loss;
    pipe_case c = {.ranks = 2, .pp = 2, .wire = "fp16"};
    (void)argument;
    LOOM_TRY(start(rank, &c, &run));
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(run.parallel, &parameters, &count));
    for (int64_t i = 0; i < count; i++)
        if (strcmp(parameters[i]->name, "decoder.layers.1.mlp.linear_fc2.bias") == 0)
            parameters[i]->data[0] = 1e6f;
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void activations_too_large_for_their_way_are_named(void **state) {
    (void)state;
    must_fail(2, send_large, NULL, LOOM_ERR_NUMERIC,
        "what came from the stage before is too large for strategy.pipeline_dtype fp16");
}

static loom_status zero_bubble_chunks(loom_rank *rank, void *argument) {
    pipe_case c = {.ranks = 2, .pp = 2, .vpp = 2, .schedule = "zero-bubble"};
    small_run run;
    (void)argument;
    c = pipe_filled(&c);
    loom_status status = pipe_start(rank, &c, &run);
    CHECK(status == LOOM_ERR_UNSUPPORTED && strstr(loom_error_message(), "schedule=zero-bubble with 2 chunks"),
        "found %s: %s", loom_status_name(status), loom_error_message());
    small_destroy(&run);
    return LOOM_OK;
}

static void zero_bubble_with_chunks_is_refused_at_setup(void **state) {
    (void)state;
    must_run(2, zero_bubble_chunks, NULL);
}

static loom_status sleep_for_ever(void *context, loom_step *step) {
    const loom_parallel *parallel = *(loom_parallel **)context;
    struct timespec rest = {.tv_sec = 1000};
    if (parallel->stage == 1 && step->microbatch == 2)
        nanosleep(&rest, NULL);
    return LOOM_OK;
}

static loom_status fall_asleep(loom_rank *rank, void *argument) {
    small_run run;
    double loss;
    pipe_case c = pipe_filled(argument);
    loom_callback callback = {&run.parallel, {[LOOM_EVENT_MICROBATCH_END] = sleep_for_ever}};
    LOOM_TRY(start(rank, &c, &run));
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(run.fabric), &callback));
    loom_status status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

/* In a process of its own: a thread that never comes back stays behind. */
static void a_stage_that_stops_is_named_with_its_microbatch_and_chunk(void **state) {
    (void)state;
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        pipe_case c = {.ranks = 3, .pp = 3, .vpp = 2, .layers = 6, .global = 6};
        loom_run_options options = test_options();
        options.timeout = 0.5;
        options.grace = 0.3;
        loom_status status = loom_run_local(3, fall_asleep, &c, &options);
        ssize_t written = write(pipes[1], loom_error_message(), strlen(loom_error_message()));
        _exit(status == LOOM_ERR_STUCK && written > 0 ? 7 : 1);
    }
    close(pipes[1]);
    char text[4096];
    size_t length = 0;
    for (ssize_t n; (n = read(pipes[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)n;
    text[length] = '\0';
    close(pipes[0]);
    int result;
    waitpid(child, &result, 0);
    if (!WIFEXITED(result) || WEXITSTATUS(result) != 7 || !strstr(text, "stage 1: forward of microbatch 2, chunk 0") ||
        !strstr(text, "rank 1") || !strstr(text, "receive #") || !strstr(text, "of group pp"))
        fail_msg("exit status %d: %s", result, text);
}

static void log_errors(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_ERROR)
        fprintf(stderr, "%s\n", line);
}

/* This program as a process of mpirun, one of whose stages stops. */
static int stop_under_mpi(void) {
    pipe_case c = {.ranks = 3, .pp = 3, .vpp = 2, .layers = 6, .global = 6};
    loom_run_options options = test_options();
    options.timeout = 1;
    options.grace = 1;
    options.log = log_errors;
    return loom_run_mpi(fall_asleep, &c, &options) == LOOM_OK ? 0 : 1;
}

static void a_stage_that_stops_is_named_under_mpi_too(void **state) {
    const char *mpirun = getenv("MEGALOOM_MPIRUN");
    static char text[1 << 16];
    char command[2048];
    if (!mpirun) {
        puts("left out: no mpirun was named");
        skip();
    }
    snprintf(command, sizeof command,
        "exec %s --allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none -n 3 "
        "'%s' stop 2>&1",
        mpirun, (const char *)*state);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    text[fread(text, 1, sizeof text - 1, pipe)] = '\0';
    int status = pclose(pipe);
    if (status == 0 || !strstr(text, "stage 1: forward of microbatch 2, chunk 0") || !strstr(text, "of group pp"))
        fail_msg("exit status %d: %s", status, text);
}

int main(int argc, char **argv) {
    if (argc > 1)
        return stop_under_mpi();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_forward_has_its_events_each_microbatch_is_read_once_and_all_stages_hear_of_the_loss),
        cmocka_unit_test(inputs_are_converted_where_the_model_begins_and_outputs_where_it_ends),
        cmocka_unit_test(only_the_first_chunk_of_the_first_stage_has_several_buckets),
        cmocka_unit_test(every_rank_gets_the_logits_of_the_last_stage_in_order),
        cmocka_unit_test(activations_are_as_many_as_the_simulator_counts_and_memory_stops_growing),
        cmocka_unit_test(microbatches_may_differ_in_length_when_the_field_says_so),
        cmocka_unit_test(microbatches_of_another_length_are_refused_without_the_field),
        cmocka_unit_test(a_microbatch_with_fewer_rows_is_named_by_the_stage_that_would_send_it),
        cmocka_unit_test(the_end_of_the_data_comes_to_all_stages_and_ends_nothing),
        cmocka_unit_test(a_module_that_cannot_be_cut_is_refused_on_two_stages),
        cmocka_unit_test(a_step_with_too_few_microbatches_for_its_chunks_is_refused_on_every_rank),
        cmocka_unit_test(chunks_have_the_state_keys_of_the_reference),
        cmocka_unit_test(a_trace_holds_every_computation_of_every_rank_or_what_fits),
        cmocka_unit_test(a_nan_is_named_by_the_stage_that_makes_it),
        cmocka_unit_test(a_nan_in_a_part_of_the_sequence_is_named_as_well),
        cmocka_unit_test(activations_too_large_for_their_way_are_named),
        cmocka_unit_test(zero_bubble_with_chunks_is_refused_at_setup),
        cmocka_unit_test(a_stage_that_stops_is_named_with_its_microbatch_and_chunk),
        cmocka_unit_test_prestate(a_stage_that_stops_is_named_under_mpi_too, argv[0]),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
