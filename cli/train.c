/* megaloom train: a run file's training, written against the public API as a user would write it. Each rank runs
 * `train`; rank 0 also shows and writes down what happens. */
#include "commands.h"
#include "train_data.h"
#include "train_report.h"
#include "train_state.h"
#include <argp.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Events of a rank's trace: some thousand steps of a small pipeline. */
enum { TRACE_EVENTS = 1 << 16 };

/* What all ranks of a process are given. */
typedef struct job {
    loom_run_config *config;
    const char *resume;        /* the checkpoint to go on from; NULL: none */
    bool continues;            /* it is that of an earlier run with this output */
    loom_tokenizer *tokenizer; /* of the data; NULL where they have none */
} job;

typedef struct training {
    const loom_run_config *config;
    const loom_tokenizer *tokenizer;
    loom_rank *rank;
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_cli_train_data data;
    loom_batches *batches, *valid_batches;
    loom_cli_train_report report;
    loom_progress *progress; /* rank 0 only */
    int64_t done, consumed;  /* steps and samples so far */
    loom_profile profile;    /* of the steps after the first, when they are over */
    const char *resume;      /* NULL: nothing to go on from */
    bool continues;
    int64_t first;            /* the step that this run begins with, from 1 */
    int64_t saved;            /* the step of the last checkpoint; -1 = none */
    loom_cli_signal stopped;  /* what has ended it early, or LOOM_CLI_GO_ON */
    double validation_loss;   /* after the last step; NaN = none */
    int64_t choices, dropped; /* of experts, by all tokens so far; how many found no room */
    loom_cli_clock clock;
    char checkpoints[4096]; /* the folder */
    double gemm_rate;
    double flops_per_token;
    char model_path[4096]; /* where the model goes; empty = nowhere */
} training;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- data ---- */

static loom_status open_data(training *t) {
    int64_t data_parallel = loom_layout_data_parallel_size(loom_fabric_layout(t->fabric));
    return loom_cli_train_data_open(t->config, t->tokenizer, data_parallel, &t->data);
}

/* ---- what rank 0 shows ---- */

/* Before the first step: what is written at the end alone. Nothing of what may lie there is lost. */
static loom_status check_writable(const char *directory, const char *name) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    FILE *file = fopen(path, "a");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    fclose(file);
    return LOOM_OK;
}

static loom_status open_reports(training *t) {
    const loom_run_config *config = t->config;
    LOOM_TRY(loom_cli_report_open(t->rank, config, t->first, t->continues, &t->report));
    if (loom_rank_index(t->rank) != 0)
        return LOOM_OK;
    if (config->trace) {
        LOOM_TRY(check_writable(config->output, "trace.json"));
        LOOM_TRY(check_writable(config->output, "timeline.svg"));
    }
    /* mpirun hands its processes a terminal of its own, whatever their output goes to. */
    bool terminal = isatty(STDOUT_FILENO) != 0 && !loom_mpi_launched(NULL);
    return loom_progress_create(stdout, terminal, config->steps, config->log.every, &t->progress);
}

static loom_status validate(training *t, int64_t step, double *loss) {
    double sum = 0, tokens = 0;
    /* The same batches every time, so that two validations can be compared. */
    LOOM_TRY(loom_batches_reset(t->valid_batches));
    for (int64_t i = 0; i < t->config->validation.batches; i++) {
        loom_step_result result;
        LOOM_TRY(loom_parallel_step(t->parallel, LOOM_VALIDATION, t->valid_batches, NULL, NULL, NULL, &result));
        sum += result.loss * result.tokens;
        tokens += result.tokens;
    }
    *loss = tokens > 0 ? sum / tokens : NAN;
    if (t->progress)
        loom_progress_note(t->progress, "validation loss %.4f after step %lld", *loss, (long long)step);
    return LOOM_OK;
}

/* The mean over all test data, once. */
static loom_status test(training *t) {
    double sum = 0, tokens = 0;
    loom_status status = LOOM_OK;
    loom_batches *batches;
    LOOM_TRY(loom_cli_test_batches(t->fabric, t->config, &t->data, &batches));
    for (loom_step_result result; !status;) {
        status = loom_parallel_step(t->parallel, LOOM_TEST, batches, NULL, NULL, NULL, &result);
        sum += status ? 0 : result.loss * result.tokens;
        tokens += status ? 0 : result.tokens;
    }
    loom_batches_destroy(batches);
    if (status != LOOM_END)
        return status;
    if (tokens == 0)
        return loom_fail(LOOM_ERR_CONFIG, "none of the test data counts: there is no test loss");
    if (t->progress)
        loom_progress_note(
            t->progress, "test loss %.4f over %.0f tokens after step %lld", sum / tokens, tokens, (long long)t->done);
    return t->report.metrics ? loom_metrics_write_test(t->report.metrics, t->done, sum / tokens, tokens) : LOOM_OK;
}

/* ---- what is kept ---- */

static loom_hf_save_options save_options(const training *t) {
    const loom_run_config *config = t->config;
    loom_hf_save_options options = loom_hf_save_options_default();
    options.source = config->model.hf;
    /* The weights that the run computed with, exactly; masters of them are the training's, not the model's. */
    options.dtype = loom_parallel_dtype(t->parallel);
    /* A vocabulary that has no room for the end of a text is not of bytes alone. */
    if (!config->model.hf && t->tokenizer && t->tokenizer->vocab_size <= config->model.config.vocab_size)
        options.tokenizer = config->data.tokenizer ? config->data.tokenizer : "byte";
    return options;
}

/* Before the first step: a model that could not be written is no surprise for the end of a long training. */
static loom_status check_export(training *t) {
    if (!t->config->export_model)
        return LOOM_OK;
    loom_status status = LOOM_OK;
    if (snprintf(t->model_path, sizeof t->model_path, "%s/model", t->config->output) >= (int)sizeof t->model_path)
        status = loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    loom_hf_save_options options = save_options(t);
    if (!status)
        status = loom_gpt_check_save_hf(t->parallel, t->model_path, &options);
    return status ? loom_fail_context(status, "the trained model (export=false trains without writing it): ") : LOOM_OK;
}

static loom_status export_model(training *t) {
    if (!t->config->export_model)
        return LOOM_OK;
    loom_hf_save_options options = save_options(t);
    return loom_gpt_save_hf(t->parallel, t->model_path, &options);
}

/* ---- checkpoints ---- */

static loom_cli_saved saved_of(const training *t) {
    return (loom_cli_saved){.fabric = t->fabric,
        .parallel = t->parallel,
        .optimizer = t->optimizer,
        .step = t->done,
        .consumed_samples = t->consumed};
}

static loom_status go_on(training *t) {
    if (!t->resume)
        return LOOM_OK;
    loom_cli_saved saved = saved_of(t);
    LOOM_TRY(loom_cli_resume(&saved, t->resume, t->data.sizes.global_batch_size));
    t->done = t->saved = saved.step;
    t->consumed = saved.consumed_samples;
    return LOOM_OK;
}

/* A run that cannot save ends: what it would do from here on could be lost. */
static loom_status no_checkpoint(const training *t, loom_status why) {
    if (t->saved < 0)
        return loom_fail_context(
            why, "no checkpoint after step %lld, and none before it: the run ends: ", (long long)t->done);
    return loom_fail_context(why,
        "no checkpoint after step %lld: the run ends, and the last one is after step %lld: ", (long long)t->done,
        (long long)t->saved);
}

static loom_status save(training *t) {
    const loom_checkpoint_config *config = &t->config->checkpoint;
    if (t->saved == t->done)
        return LOOM_OK;
    loom_cli_saved saved = saved_of(t);
    loom_keep keep = {.last = config->keep_last, .best = config->keep_best, .validation_loss = t->validation_loss};
    double start = now();
    loom_status status = loom_cli_save(&saved, t->checkpoints, &keep);
    if (status)
        return no_checkpoint(t, status);
    double seconds = now() - start;
    t->saved = t->done;
    /* What threads write behind the run's back takes longer than this, and is not known. */
    if (!config->io.async_save && seconds > t->clock.longest_save)
        t->clock.longest_save = seconds;
    if (t->progress)
        loom_progress_note(t->progress, "checkpoint after step %lld%s: %s (%.1f s)", (long long)t->done,
            config->io.async_save ? " begun" : "", t->checkpoints, seconds);
    return LOOM_OK;
}

/* An asynchronous save goes on while the run does, but not beyond it. */
static loom_status end_saves(training *t) {
    bool pending;
    return loom_fabric_finalize_saves(t->fabric, true, &pending);
}

/* After a step: what the run file wants, and what a signal or the time asks for. */
static loom_status save_if_due(training *t) {
    const loom_checkpoint_config *config = &t->config->checkpoint;
    loom_cli_signal asked = LOOM_CLI_GO_ON;
    int64_t every = config->every;
    bool up = t->done < t->config->steps && loom_cli_time_is_up(&t->clock, now(), config->time_limit);
    LOOM_TRY(loom_cli_ask_signals(t->rank, up ? LOOM_CLI_TIME_IS_UP : LOOM_CLI_GO_ON, &asked));
    t->stopped = asked >= LOOM_CLI_SAVE_AND_STOP ? asked : LOOM_CLI_GO_ON;
    if (asked != LOOM_CLI_GO_ON || (every > 0 && (t->done % every == 0 || t->done == t->config->steps)))
        return save(t);
    return LOOM_OK;
}

/* ---- the loop ---- */

/* *stop: a callback asks to end here. */
static loom_status train_step(training *t, int64_t step, bool *stop) {
    double start = now();
    loom_step_result result;
    loom_optimizer_outcome outcome;
    loom_batches_state before = loom_batches_get_state(t->batches);
    loom_status status = loom_parallel_step(t->parallel, LOOM_TRAINING, t->batches, NULL, NULL, NULL, &result);
    if (status == LOOM_END)
        return loom_fail(LOOM_ERR_STATE, "the data end after %lld of %lld steps", (long long)(step - 1),
            (long long)t->config->steps);
    LOOM_TRY(status);
    LOOM_TRY(loom_optimizer_step(t->optimizer, &outcome));
    double seconds = now() - start;
    loom_batches_state state = loom_batches_get_state(t->batches);
    double positions = (double)(state.consumed_samples - before.consumed_samples) * (double)before.seq_length;
    loom_step_report report = {
        .step = step,
        .loss = result.loss,
        .grad_norm = outcome.grad_norm,
        .learning_rate = outcome.lr,
        .tokens_per_second = positions / seconds,
        .gemm_share = positions / seconds * t->flops_per_token / t->gemm_rate,
        .seconds = seconds,
        .validation_loss = NAN,
        .consumed_samples = state.consumed_samples,
        .loss_scale = outcome.loss_scale,
        .num_zeros_in_grad = outcome.num_zeros_in_grad < 0 ? NAN : (double)outcome.num_zeros_in_grad,
        .skipped_steps = outcome.skipped_steps,
        .memory_bytes = (int64_t)loom_rank_memory(t->rank).high_water,
        .router = loom_parallel_router_statistics(t->parallel),
        .router_layers = loom_parallel_model_config(t->parallel)->moe.moe_per_layer_logging,
    };
    t->choices += report.router ? report.router->choices : 0;
    t->dropped += report.router ? report.router->dropped : 0;
    t->done = step;
    t->consumed = report.consumed_samples;
    if (t->progress)
        loom_progress_step(t->progress, &report);
    int64_t every = t->config->validation.every;
    *stop = result.stop;
    if (t->valid_batches && (step % every == 0 || step == t->config->steps || *stop))
        LOOM_TRY(validate(t, step, &report.validation_loss));
    t->validation_loss = report.validation_loss;
    double whole = now() - start;
    t->clock.longest_step = whole > t->clock.longest_step ? whole : t->clock.longest_step;
    return loom_cli_report_step(&t->report, &report);
}

static loom_status set_up(training *t) {
    const loom_run_config *config = t->config;
    LOOM_TRY(loom_cli_check_same(t->rank, config));
    LOOM_TRY(loom_cli_fabric(t->rank, config, &t->fabric));
    LOOM_TRY(loom_agree(loom_rank_world(t->rank), open_data(t)));
    LOOM_TRY(loom_cli_model(t->fabric, config, true, &t->parallel));
    LOOM_TRY(loom_parallel_collect_router_statistics(t->parallel, true));
    loom_optimizer_setup setup = {.schedule = config->lr, .steps = config->steps};
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(t->fabric, t->parallel, &config->optim, &setup, &t->optimizer));
    LOOM_TRY(loom_cli_checkpoints_path(config, t->checkpoints, sizeof t->checkpoints));
    LOOM_TRY(go_on(t));
    t->first = t->done + 1;
    LOOM_TRY(loom_cli_train_batches(t->fabric, config, &t->data, t->consumed, &t->batches, &t->valid_batches));
    LOOM_TRY(check_export(t));
    LOOM_TRY(loom_agree(loom_rank_world(t->rank), open_reports(t)));
    LOOM_TRY(loom_measure_gemm_rate(t->rank, loom_rank_world(t->rank), &t->gemm_rate));
    t->flops_per_token = loom_model_flops_per_token(loom_parallel_model_config(t->parallel));
    return loom_agree(loom_rank_world(t->rank), loom_cli_report_begin(&t->report, t->gemm_rate, t->flops_per_token));
}

static void tear_down(training *t) {
    loom_profile_free(&t->profile);
    loom_progress_destroy(t->progress);
    loom_cli_report_close(&t->report);
    loom_batches_destroy(t->batches);
    loom_batches_destroy(t->valid_batches);
    loom_parallel_destroy(t->parallel);
    loom_cli_train_data_close(&t->data);
    loom_fabric_destroy(t->fabric);
}

/* What a step that failed has left of the trace. Its parts come together by messages, for which all ranks must be
 * there, but they fail at different places and some not at all. */
static loom_status keep_trace(training *t, loom_status why) {
    char text[4096];
    if (!t->config->trace)
        return why;
    snprintf(text, sizeof text, "%s", loom_error_message());
    if (loom_rank_count(t->rank) > 1 && t->progress)
        loom_rank_log(t->rank, LOOM_LOG_WARNING,
            "the trace is not written: the run has failed, and the records of %d ranks cannot come together",
            loom_rank_count(t->rank));
    if (loom_rank_count(t->rank) == 1 && loom_parallel_trace_end(t->parallel, t->config->output))
        loom_rank_log(t->rank, LOOM_LOG_WARNING, "the trace is not written: %s", loom_error_message());
    return loom_fail(why, "%s", text);
}

/* The first step warms everything up and would be most of a short run's profile: it is left out where there are more.
 */
static int64_t first_of_profile(const training *t) {
    return t->config->steps > t->first ? t->first + 1 : t->first;
}

static loom_status train_steps(training *t) {
    const loom_run_config *config = t->config;
    if (config->trace)
        LOOM_TRY(loom_parallel_trace_begin(t->parallel, TRACE_EVENTS));
    for (bool stop = false; t->done < config->steps && !stop && !t->stopped;) {
        if (config->profile && t->done + 1 == first_of_profile(t))
            LOOM_TRY(loom_profile_begin(t->rank));
        loom_status status = train_step(t, t->done + 1, &stop);
        if (status)
            return keep_trace(t, status);
        LOOM_TRY(save_if_due(t));
    }
    LOOM_TRY(end_saves(t));
    if (t->done < config->steps && !t->stopped && t->progress)
        loom_progress_note(t->progress,
            "stopped after step %lld of %lld: the batch size has changed (data.stop_when_batch_size_changes)",
            (long long)t->done, (long long)config->steps);
    return config->profile && t->done >= first_of_profile(t) ? loom_profile_end(t->rank, &t->profile) : LOOM_OK;
}

static loom_status write_profile(training *t) {
    const loom_run_config *config = t->config;
    int64_t steps = t->done - first_of_profile(t) + 1;
    char path[4096];
    if (!config->profile || steps < 1)
        return LOOM_OK;
    if (snprintf(path, sizeof path, "%s/profile.json", config->output) >= (int)sizeof path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    LOOM_TRY(loom_profile_write(path, loom_rank_world(t->rank), &t->profile, steps));
    if (t->progress) {
        loom_progress_note(t->progress, "time of rank 0 after the first step; all ranks: %s", path);
        loom_profile_print(stdout, &t->profile, steps);
    }
    return LOOM_OK;
}

/* The model first: a report that cannot be written must not cost the training. */
static loom_status keep(training *t) {
    if (!t->stopped)
        LOOM_TRY(export_model(t));
    loom_status trace = t->config->trace ? loom_parallel_trace_end(t->parallel, t->config->output) : LOOM_OK;
    if (trace && *t->model_path && !t->stopped)
        (void)loom_fail_context(trace, "the model is in %s, but its trace is not whole: ", t->model_path);
    LOOM_TRY(trace);
    return write_profile(t);
}

static loom_status train(loom_rank *rank, void *argument) {
    const job *given = argument;
    training t = {.config = given->config,
        .tokenizer = given->tokenizer,
        .rank = rank,
        .resume = given->resume,
        .continues = given->continues,
        .saved = -1,
        .clock = {.begin = now()}};
    loom_status status = set_up(&t);
    if (!status && t.progress) {
        int ranks = loom_rank_count(rank), threads = loom_team_size(loom_rank_team(rank));
        loom_progress_note(t.progress, "%d rank%s of %d thread%s, GEMM rate %.1f GFLOP/s, %.3g GFLOP a token", ranks,
            ranks == 1 ? "" : "s", threads, threads == 1 ? "" : "s", t.gemm_rate * 1e-9, t.flops_per_token * 1e-9);
    }
    if (!status && t.progress && t.resume)
        loom_progress_note(t.progress, "goes on after step %lld of %s", (long long)t.done, t.resume);
    double start = now();
    if (!status)
        status = train_steps(&t);
    double seconds = now() - start;
    if (!status)
        status = keep(&t);
    if (!status && t.config->validation.test && !t.stopped)
        status = test(&t);
    const char *why = t.stopped == LOOM_CLI_TIME_IS_UP ? "stopped by checkpoint.time_limit"
                      : t.stopped                      ? "stopped by SIGTERM"
                      : t.done < given->config->steps  ? "stopped: the batch size has changed"
                                                       : NULL;
    status = loom_cli_report_end(
        &t.report, status ? NULL : loom_fabric_layout(t.fabric), t.parallel, t.optimizer, why, status);
    if (!status && t.progress && t.dropped > 0)
        loom_progress_note(t.progress,
            "%lld of %lld choices of experts found no room (%.1f%%) at model.moe_expert_capacity_factor %g",
            (long long)t.dropped, (long long)t.choices, 100 * (double)t.dropped / (double)t.choices,
            loom_parallel_model_config(t.parallel)->moe.moe_expert_capacity_factor);
    if (!status && t.progress)
        loom_progress_note(t.progress, "page of the run: %s/report.html", t.config->output);
    if (!status && t.progress && t.stopped)
        loom_progress_note(t.progress, "stopped by %s after step %lld of %lld; the same command goes on",
            t.stopped == LOOM_CLI_TIME_IS_UP ? "checkpoint.time_limit" : "SIGTERM", (long long)t.done,
            (long long)t.config->steps);
    else if (!status && t.progress)
        loom_progress_note(t.progress, "%lld step%s in %.0f s; metrics: %s/metrics.jsonl; %s%s", (long long)t.done,
            t.done == 1 ? "" : "s", seconds, t.config->output,
            *t.model_path ? "model: " : "the model is not kept (export=false)", t.model_path);
    tear_down(&t);
    return status;
}

/* ---- the command ---- */

typedef struct train_arguments {
    loom_cli_run_arguments run;
    const char *resume;
} train_arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    train_arguments *to = state->input;
    switch (key) {
    case 'r':
        to->resume = text;
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        if (!to->run.path)
            argp_error(state, "give a run file");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Without --resume a run goes on where an earlier one with this output has stopped. */
static loom_status find_checkpoint(job *j, const char *given, char *folder, size_t bytes) {
    j->resume = given;
    if (given)
        return LOOM_OK;
    LOOM_TRY(loom_cli_checkpoints_path(j->config, folder, bytes));
    j->continues = loom_cli_has_checkpoint(folder);
    if (j->continues)
        j->resume = folder;
    return LOOM_OK;
}

int loom_cli_train(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"resume", 'r', "DIR", 0, "Go on from the checkpoint in DIR, written at any layout, of Megatron-Core too", 0},
        {NULL, 0, NULL, 0, NULL, 0}};
    static const struct argp argp = {options, take, "RUN.yaml [FIELD=VALUE...]",
        "Trains as the run file says, with FIELD=VALUE overriding its fields.\v"
        "Without a launcher the ranks are threads of this process (field `ranks`); under mpirun each process is a "
        "rank. "
        "Writes OUTPUT/metrics.jsonl, and at the end OUTPUT/report.html, a page of the run, and OUTPUT/model, a "
        "Hugging Face directory that model.hf=OUTPUT/model "
        "starts from; with profile=true also OUTPUT/profile.json and a table of where the time went, with trace=true "
        "OUTPUT/trace.json (for Perfetto) and OUTPUT/timeline.svg of what the pipeline's stages did, with "
        "log.tensorboard=true "
        "OUTPUT/tensorboard, event files for TensorBoard.\n\n"
        "checkpoint.every=N saves each N steps to OUTPUT/checkpoints; SIGUSR1 saves after the step, SIGTERM (without a "
        "launcher) saves and stops. A save that fails ends the run, and leaves the checkpoint before it as it was. "
        "Where OUTPUT/checkpoints holds a checkpoint, the run goes on from it, at any "
        "layout, and at the same one with the same numbers as if it had not stopped.",
        NULL, NULL, NULL};
    train_arguments given = {0};
    char folder[4096];
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    job j = {0};
    status = loom_run_config_load(given.run.path, given.run.overrides, given.run.override_count, &j.config);
    loom_cli_run_arguments_free(&given.run);
    if (!status)
        status = loom_cli_complete_model(j.config);
    if (!status)
        status = loom_cli_open_tokenizer(j.config, &j.tokenizer);
    if (!status)
        status = find_checkpoint(&j, given.resume, folder, sizeof folder);
    int code;
    if (status) {
        code = loom_cli_fail(status);
    } else {
        /* Whoever stops reading the progress does not stop the training. */
        signal(SIGPIPE, SIG_IGN);
        loom_cli_hold_signals();
        code = loom_cli_run(j.config, train, &j);
    }
    loom_tokenizer_destroy(j.tokenizer);
    loom_run_config_destroy(j.config);
    return code;
}
