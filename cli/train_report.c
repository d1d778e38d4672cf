/* What `megaloom train` leaves in its output. Metrics are flushed each step; the facts are written when the run begins
 * and again when it ends, also by a failure, so that what a killed run says of itself is "running". A report that
 * cannot be written never costs a training. */
#include "train_report.h"
#include "commands.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static loom_status path_of(const loom_run_config *config, const char *name, char path[PATH_BYTES]) {
    if (snprintf(path, PATH_BYTES, "%s/%s", config->output, name) >= PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    return LOOM_OK;
}

/* Earlier starts of a run that goes on, where it has told of them. */
static loom_status open_sessions(loom_cli_train_report *report, int64_t first_step, bool continues) {
    loom_run_record *earlier = NULL;
    int64_t count = 0;
    if (continues && loom_run_read(report->config->output, &earlier) == LOOM_OK)
        count = earlier->facts.session_count;
    report->sessions = calloc((size_t)count + 1, sizeof *report->sessions);
    if (report->sessions && count)
        memcpy(report->sessions, earlier->facts.sessions, (size_t)count * sizeof *report->sessions);
    loom_run_destroy(earlier);
    if (!report->sessions)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the starts of a run");
    report->sessions[count] = (loom_run_session){.first_step = first_step, .began = (int64_t)time(NULL)};
    report->facts.sessions = report->sessions;
    report->facts.session_count = count + 1;
    return LOOM_OK;
}

loom_status loom_cli_report_open(
    loom_rank *rank, const loom_run_config *config, int64_t first_step, bool continues, loom_cli_train_report *report) {
    char path[PATH_BYTES];
    *report = (loom_cli_train_report){.config = config, .rank = rank};
    if (loom_rank_index(rank) != 0)
        return LOOM_OK;
    LOOM_TRY(loom_cli_make_directories(config->output));
    LOOM_TRY(open_sessions(report, first_step, continues));
    LOOM_TRY(path_of(config, "metrics.jsonl", path));
    LOOM_TRY(loom_metrics_continue(path, continues ? first_step - 1 : 0, &report->metrics));
    if (!config->log.tensorboard)
        return LOOM_OK;
    LOOM_TRY(path_of(config, "tensorboard", path));
    return loom_events_open(path, first_step, &report->events);
}

loom_status loom_cli_report_begin(loom_cli_train_report *report, double gemm_rate, double flops_per_token) {
    if (!report->metrics)
        return LOOM_OK;
    report->facts.state = LOOM_RUN_RUNNING;
    report->facts.ranks = loom_rank_count(report->rank);
    report->facts.threads = loom_team_size(loom_rank_team(report->rank));
    report->facts.steps = report->config->steps;
    report->facts.gemm_rate = gemm_rate;
    report->facts.flops_per_token = flops_per_token;
    LOOM_TRY(loom_run_write_config(report->config->output, report->config));
    return loom_run_write_facts(report->config->output, &report->facts);
}

loom_status loom_cli_report_step(loom_cli_train_report *report, const loom_step_report *step) {
    if (report->events)
        LOOM_TRY(loom_events_write(report->events, step));
    return report->metrics ? loom_metrics_write(report->metrics, step) : LOOM_OK;
}

/* ---- the end ---- */

static loom_status own_memory(
    loom_rank *rank, loom_parallel *parallel, const loom_optimizer *optimizer, double bytes[LOOM_RUN_MEMORY_KINDS]) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(parallel, &parameters, &count));
    double weights = 0, gradients = 0;
    for (int64_t i = 0; i < count; i++) {
        double elements = (double)loom_parameter_count(parameters[i]);
        weights += elements * (double)loom_dtype_size(parameters[i]->dtype);
        gradients += parameters[i]->grad ? elements * (double)sizeof(float) : 0;
    }
    bytes[LOOM_RUN_MEMORY_WEIGHTS] = weights;
    bytes[LOOM_RUN_MEMORY_GRADIENTS] = gradients;
    bytes[LOOM_RUN_MEMORY_OPTIMIZER] = (double)loom_optimizer_state_bytes(optimizer);
    bytes[LOOM_RUN_MEMORY_ACTIVATIONS] = (double)loom_rank_memory(rank).high_water;
    return LOOM_OK;
}

/* The plan of this rank's stage, by the kinds that are measured: the run's parameters are counted without the gaps of
 * their buffers, and the allocator has no buffers of reductions. What cannot be planned stays NaN. */
static void planned_memory(
    loom_rank *rank, const loom_run_config *config, const loom_layout *layout, double bytes[LOOM_RUN_MEMORY_KINDS]) {
    loom_plan_options options = loom_plan_options_default();
    loom_layout_rank place;
    loom_plan *plan;
    options.world_size = loom_rank_count(rank);
    if (!loom_layout_rank_describe(layout, loom_rank_index(rank), &place) ||
        loom_plan_make(config, &options, &plan) != LOOM_OK)
        return;
    const loom_plan_stage *stage = &plan->stages[place.pp];
    const loom_plan_memory *m = &stage->memory;
    double parameters = (double)stage->rank_parameters;
    bytes[LOOM_RUN_MEMORY_WEIGHTS] = m->gradients > 0 ? 4 * parameters * m->weights / m->gradients : NAN;
    bytes[LOOM_RUN_MEMORY_GRADIENTS] = 4 * parameters;
    bytes[LOOM_RUN_MEMORY_OPTIMIZER] = m->optimizer;
    bytes[LOOM_RUN_MEMORY_ACTIVATIONS] = m->activations + m->buffers - m->reductions + m->logits;
    loom_plan_destroy(plan);
}

/* What each rank holds and where it is, on every rank; for free(). Collective over the world. */
static loom_status gather_ranks(const loom_cli_train_report *report, const loom_layout *layout, loom_parallel *parallel,
    const loom_optimizer *optimizer, loom_run_rank **ranks) {
    loom_rank *rank = report->rank;
    loom_comm *world = loom_rank_world(rank);
    loom_run_rank mine = {.node = ""}, *all = calloc((size_t)loom_rank_count(rank), sizeof *all);
    loom_status status = loom_agree(world, all ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the ranks"));
    (void)gethostname(mine.node, sizeof mine.node - 1);
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        mine.bytes[i] = mine.planned[i] = NAN;
    if (!status)
        status = loom_agree(world, own_memory(rank, parallel, optimizer, mine.bytes));
    if (!status)
        planned_memory(rank, report->config, layout, mine.planned);
    if (!status)
        status = loom_all_gather(world, &mine, all, sizeof mine, LOOM_U8);
    if (status) {
        loom_comm_free(world, all);
        return status;
    }
    *ranks = all;
    return LOOM_OK;
}

/* "FOLDER/report.html.tmp" becomes "FOLDER/report.html" when it is whole: a page may be open while it is made anew. */
loom_status loom_cli_write_report(const char *folder, const char *path, int64_t points) {
    loom_run_record *run;
    char whole[PATH_BYTES], partial[PATH_BYTES + 8];
    if (snprintf(whole, sizeof whole, "%s%s", path ? path : folder, path ? "" : "/report.html") >= (int)sizeof whole)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the page is too long");
    snprintf(partial, sizeof partial, "%s.tmp", whole);
    LOOM_TRY(loom_run_read(folder, &run));
    FILE *file = fopen(partial, "w");
    loom_status status =
        file ? loom_run_write_html(file, run, points) : loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", partial);
    if (file && fclose(file) != 0 && !status)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", partial);
    if (!status && rename(partial, whole) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", whole);
    if (status && file)
        unlink(partial);
    loom_run_destroy(run);
    return status;
}

static loom_status write_all(loom_cli_train_report *report) {
    report->sessions[report->facts.session_count - 1].ended = (int64_t)time(NULL);
    LOOM_TRY(loom_run_write_facts(report->config->output, &report->facts));
    return loom_cli_write_report(report->config->output, NULL, 0);
}

loom_status loom_cli_report_end(loom_cli_train_report *report, const loom_layout *layout, loom_parallel *parallel,
    const loom_optimizer *optimizer, const char *message, loom_status status) {
    char text[4096];
    loom_run_rank *ranks = NULL;
    snprintf(text, sizeof text, "%s", status ? loom_error_message() : "");
    if (!status)
        LOOM_TRY(gather_ranks(report, layout, parallel, optimizer, &ranks));
    /* A run that has not begun has no facts, and leaves those of an earlier one alone. */
    if (report->metrics && report->facts.ranks > 0) {
        report->facts.state = status ? LOOM_RUN_FAILED : message ? LOOM_RUN_STOPPED : LOOM_RUN_FINISHED;
        report->facts.message = status ? text : message;
        report->facts.rank = ranks;
        if (write_all(report) != LOOM_OK)
            loom_rank_log(report->rank, LOOM_LOG_WARNING, "the report is not written: %s", loom_error_message());
    }
    free(ranks);
    return status ? loom_fail(status, "%s", text) : LOOM_OK;
}

void loom_cli_report_close(loom_cli_train_report *report) {
    loom_metrics_close(report->metrics);
    loom_events_close(report->events);
    free(report->sessions);
}
