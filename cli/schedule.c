/* megaloom schedule: what each stage of a pipeline does in which order, proved, simulated and drawn. All answers come
 * from <megaloom/schedule.h> and <megaloom/timeline.h>; this file reads the command line and writes the files. */
#include "schedule.h"
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <megaloom/timeline.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2 };

/* Forwards of all stages together: up to here lists and simulation take seconds and about a gigabyte. */
enum { FORWARDS_MAX = 1 << 22 };

/* A picture of more would take a viewer minutes, and its computations be thinner than a pixel. */
enum { DRAWN_MAX = 1 << 17 };

enum {
    KEY_PP = 'p',
    KEY_VP = 'v',
    KEY_MICROBATCHES = 'm',
    KEY_GROUP = 'g',
    KEY_SCHEDULE = 's',
    KEY_FORWARD_ONLY = 'f',
    KEY_COSTS = 'c',
    KEY_JSON = 'j',
    KEY_SVG = 'o',
    KEY_ALIGN = 256,
    KEY_MESSAGE,
    KEY_AHEAD,
    KEY_TRACE
};

/* As many microbatches as a schedule may have. */
static const int64_t COUNT_MAX = (int64_t)1 << 40;

typedef struct schedule_request {
    loom_schedule_config config;
    const char *costs, *svg, *trace;
    double message;
    int64_t ahead; /* -1: receives stay where they are */
    bool json, failed;
} schedule_request;

static void read_count(
    schedule_request *request, const char *option, const char *text, int64_t least, int64_t most, int64_t *out) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    bool beyond = end != text && *end == '\0' && (value > most || (errno == ERANGE && value > 0));
    if (beyond)
        loom_cli_complain(&request->failed, "%s: found \"%s\", expected at most %" PRId64, option, text, most);
    else if (end == text || *end != '\0' || errno != 0 || value < least)
        loom_cli_complain(
            &request->failed, "%s: found \"%s\", expected an integer of at least %" PRId64, option, text, least);
    else
        *out = value;
}

static bool read_cost(const char *text, char **end, double *out) {
    errno = 0;
    double value = strtod(text, end);
    if (*end == text || errno != 0 || !(value >= 0.0) || value > 1e12)
        return false;
    *out = value;
    return true;
}

static void read_schedule(schedule_request *request, const char *text) {
    static const char *const names[] = {"1f1b", "zero-bubble"};
    if (strcmp(text, names[0]) == 0) {
        request->config.kind = LOOM_SCHEDULE_1F1B;
    } else if (strcmp(text, names[1]) == 0) {
        request->config.kind = LOOM_SCHEDULE_ZERO_BUBBLE;
    } else {
        const char *meant = loom_nearest_name(text, names, 2);
        loom_cli_complain(&request->failed, "--schedule: found \"%s\", expected 1f1b or zero-bubble%s%s%s", text,
            meant ? "; did you mean " : "", meant ? meant : "", meant ? "?" : "");
    }
}

static error_t parse(int key, char *argument, struct argp_state *state) {
    schedule_request *request = state->input;
    char *end;
    switch (key) {
    case KEY_PP:
        read_count(request, "--pp", argument, 1, INT32_MAX, &request->config.stages);
        return 0;
    case KEY_VP:
        read_count(request, "--vp", argument, 1, INT32_MAX, &request->config.chunks);
        return 0;
    case KEY_MICROBATCHES:
        read_count(request, "--microbatches", argument, 1, COUNT_MAX, &request->config.microbatches);
        return 0;
    case KEY_GROUP:
        read_count(request, "--group-size", argument, 1, COUNT_MAX, &request->config.group);
        return 0;
    case KEY_SCHEDULE:
        read_schedule(request, argument);
        return 0;
    case KEY_FORWARD_ONLY:
        request->config.forward_only = true;
        return 0;
    case KEY_ALIGN:
        request->config.align_sync = true;
        return 0;
    case KEY_COSTS:
        request->costs = argument;
        return 0;
    case KEY_MESSAGE:
        if (!read_cost(argument, &end, &request->message) || *end != '\0')
            loom_cli_complain(
                &request->failed, "--message-cost: found \"%s\", expected a number of at least 0", argument);
        return 0;
    case KEY_AHEAD:
        read_count(request, "--receives-ahead", argument, 0, COUNT_MAX, &request->ahead);
        return 0;
    case KEY_JSON:
        request->json = true;
        return 0;
    case KEY_SVG:
        request->svg = argument;
        return 0;
    case KEY_TRACE:
        request->trace = argument;
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_complain(&request->failed, "%s: no argument is expected here, only options", argument);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* "1,1,1" for all stages, or as many triples, joined by '/', as there are stages or chunks of stages. The table is
 * [3, stages, chunks]; NULL where no costs are given. */
static loom_status read_costs(const schedule_request *request, double **out) {
    const loom_schedule_config *c = &request->config;
    int64_t chunks = c->chunks > 0 ? c->chunks : 1, places = c->stages * chunks, given = 0;
    *out = NULL;
    if (!request->costs)
        return LOOM_OK;
    double *table = calloc((size_t)(3 * places), sizeof *table);
    if (!table)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the costs of %" PRId64 " stages", c->stages);
    const char *at = request->costs;
    bool good = true;
    for (; good; given++) {
        double triple[3] = {0};
        char *end = NULL;
        for (int i = 0; good && i < 3; i++) {
            good = read_cost(at, &end, &triple[i]) && (i == 2 || *end == ',');
            at = good ? end + (i < 2) : at;
        }
        for (int i = 0; good && i < 3 && given < places; i++)
            table[i * places + given] = triple[i];
        if (!good || *at == '\0')
            break;
        good = *at++ == '/';
    }
    given += good;
    if (!good || (given != 1 && given != c->stages && given != places)) {
        free(table);
        return loom_fail(LOOM_ERR_ARGUMENT,
            "--costs: found \"%s\", expected FORWARD,INPUT,WEIGHT (halves of the backward), such as 1,1,1, once or for "
            "each of the %" PRId64 " stages%s, joined by '/'",
            request->costs, c->stages, chunks > 1 ? " or of their chunks" : "");
    }
    /* From the end, so that nothing is read after it was written. */
    for (int i = 0; i < 3; i++)
        for (int64_t place = places - 1; place >= 0; place--)
            table[i * places + place] = table[i * places + (given == 1 ? 0 : given == places ? place : place / chunks)];
    *out = table;
    return LOOM_OK;
}

const char *loom_cli_schedule_name(const loom_schedule_config *config) {
    bool interleaved = config->chunks > 1;
    if (config->forward_only)
        return interleaved ? "interleaved forward-only" : "forward-only";
    if (config->kind == LOOM_SCHEDULE_ZERO_BUBBLE)
        return "zero-bubble 1F1B";
    return interleaved ? "interleaved 1F1B" : "1F1B";
}

static loom_status make_list(const schedule_request *request, int64_t stage, loom_schedule_list *list) {
    LOOM_TRY(loom_schedule_make(&request->config, stage, list));
    if (request->ahead < 0)
        return LOOM_OK;
    loom_schedule_list early;
    loom_status status = loom_schedule_post_receives_early(&request->config, list, request->ahead, &early);
    loom_schedule_list_free(list);
    if (!status)
        *list = early;
    return status;
}

static loom_status make(const schedule_request *request, loom_cli_schedule_data *schedule) {
    schedule->config = request->config;
    LOOM_TRY(loom_schedule_config_check(&request->config));
    const loom_schedule_config *c = &request->config;
    int64_t chunks = c->chunks > 0 ? c->chunks : 1;
    if (c->stages > FORWARDS_MAX / chunks || c->microbatches > FORWARDS_MAX / (c->stages * chunks))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%" PRId64 " stages of %" PRId64 " chunks with %" PRId64
            " microbatches: expected at most %d forwards in all",
            c->stages, chunks, c->microbatches, FORWARDS_MAX);
    schedule->lists = calloc((size_t)c->stages, sizeof *schedule->lists);
    if (!schedule->lists)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " stages", c->stages);
    double *table;
    LOOM_TRY(read_costs(request, &table));
    int64_t places = c->stages * chunks;
    loom_schedule_costs costs = {.message = request->message};
    if (table)
        costs = (loom_schedule_costs){table, table + places, table + 2 * places, request->message};
    loom_status status = LOOM_OK;
    for (int64_t stage = 0; stage < c->stages && !status; stage++)
        status = make_list(request, stage, &schedule->lists[stage]);
    if (!status)
        status = loom_schedule_simulate(&schedule->config, schedule->lists, &costs, false, &schedule->result);
    free(table);
    return status;
}

static void destroy(loom_cli_schedule_data *schedule) {
    for (int64_t stage = 0; schedule->lists && stage < schedule->config.stages; stage++)
        loom_schedule_list_free(&schedule->lists[stage]);
    free(schedule->lists);
    loom_schedule_result_free(&schedule->result);
}

static loom_status write_file(const loom_cli_schedule_data *schedule, const char *path, bool svg) {
    const loom_schedule_config *c = &schedule->config;
    char title[200];
    size_t used = (size_t)snprintf(
        title, sizeof title, "%s: %" PRId64 " stage%s", loom_cli_schedule_name(c), c->stages, c->stages > 1 ? "s" : "");
    if (c->chunks > 1)
        used += (size_t)snprintf(title + used, sizeof title - used, " of %" PRId64 " chunks", c->chunks);
    snprintf(title + used, sizeof title - used, ", %" PRId64 " microbatch%s", c->microbatches,
        c->microbatches > 1 ? "es" : "");
    loom_timeline timeline = {.title = title,
        .stages = c->stages,
        .chunks = c->chunks,
        .events = schedule->result.events,
        .event_count = schedule->result.event_count};
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status =
        svg ? loom_timeline_write_svg(file, &timeline) : loom_timeline_write_trace(file, &timeline, 1e-3);
    if (fclose(file) != 0 && !status)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status ? loom_fail_context(status, "%s: ", path) : LOOM_OK;
}

static loom_status answer(const schedule_request *request, loom_cli_schedule_data *schedule) {
    LOOM_TRY(make(request, schedule));
    if (request->svg && schedule->result.event_count > DRAWN_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "--svg: there are %" PRId64 " computations, expected at most %d in a picture (--trace takes any number)",
            schedule->result.event_count, DRAWN_MAX);
    if (request->svg)
        LOOM_TRY(write_file(schedule, request->svg, true));
    if (request->trace)
        LOOM_TRY(write_file(schedule, request->trace, false));
    LOOM_TRY(request->json ? loom_cli_schedule_json(schedule) : loom_cli_schedule_text(schedule));
    if (fflush(stdout) != 0 || ferror(stdout))
        return loom_fail(LOOM_ERR_IO, "cannot write the output: %m");
    return LOOM_OK;
}

int loom_cli_schedule(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"pp", KEY_PP, "STAGES", 0, "Pipeline stages", 0},
        {"vp", KEY_VP, "CHUNKS", 0, "Chunks of the model on each stage (interleaved)", 0},
        {"microbatches", KEY_MICROBATCHES, "COUNT", 0, "Microbatches of a step", 0},
        {"group-size", KEY_GROUP, "COUNT", 0,
            "Microbatches that go through one chunk before the next (default: STAGES)", 0},
        {"schedule", KEY_SCHEDULE, "NAME", 0, "1f1b (default), or zero-bubble: the backward in two halves", 0},
        {"forward-only", KEY_FORWARD_ONLY, NULL, 0, "As in evaluation", 0},
        {"align-sync", KEY_ALIGN, NULL, 0, "All stages start the gradient reduction of a chunk at the same time", 0},
        {"costs", KEY_COSTS, "F,I,W[/…]", 0,
            "Time of a forward, and of the input and the weight half of a backward: once (default 1,1,1), or for each "
            "stage, or for each chunk of each stage",
            0},
        {"message-cost", KEY_MESSAGE, "TIME", 0, "Time of a message (default 0)", 0},
        {"receives-ahead", KEY_AHEAD, "COUNT", 0, "Start receives COUNT computations before what reads them", 0},
        {"json", KEY_JSON, NULL, 0, "JSON: lists, counts and what the simulation says", 0},
        {"svg", KEY_SVG, "FILE", 0, "Draw the timeline", 0},
        {"trace", KEY_TRACE, "FILE", 0, "Write it for Perfetto and chrome://tracing, a unit of time as 1 ms", 0},
        {0},
    };
    static const struct argp argp = {.options = options,
        .parser = parse,
        .doc =
            "Prints what each stage of a pipeline does in which order, proved free of deadlock and simulated. No rank "
            "is started.\n"
            "\v"
            "F3.1 is the forward of microbatch 3 in chunk 1, B its backward (or the input half of it), W the weight "
            "half. Activations are the microbatches that a stage keeps for their backward at worst, receives those "
            "that have started and are not used yet, idle the share of the time in which the stage does not "
            "compute.\n\n"
            "Example: megaloom schedule --pp 4 --vp 2 --microbatches 8 --svg timeline.svg"};
    schedule_request request = {.ahead = -1};
    argp_err_exit_status = EXIT_USAGE;
    error_t parsed = argp_parse(&argp, argc, argv, 0, NULL, &request);
    if (parsed != 0) {
        fprintf(stderr, "megaloom: %s\n", strerror(parsed));
        return EXIT_FAILURE;
    }
    bool understood = !request.failed;
    if (understood && request.config.stages == 0)
        loom_cli_complain(&request.failed, "give the number of pipeline stages: --pp STAGES");
    if (understood && request.config.microbatches == 0)
        loom_cli_complain(&request.failed, "give the number of microbatches: --microbatches COUNT");
    if (request.failed)
        return EXIT_USAGE;
    loom_cli_schedule_data schedule = {0};
    loom_status status = answer(&request, &schedule);
    destroy(&schedule);
    return status ? loom_cli_fail(status) : EXIT_SUCCESS;
}
