/* A run's folder, read back. A run may have been killed at any moment, and may be writing while it is read: a line of
 * the metrics that is no JSON object with a step is counted and left out. Invariant: steps ascend, so where a run went
 * back to a checkpoint the later telling of a step holds. */
#include "report/columns.h"
#include "report/run.h"
#include "report/series.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LARGEST_TEXT = 64 << 20, MOST_RANKS = 1 << 24 };
#define LAST_STEP INT64_C(9000000000000000) /* what a double still tells from its neighbours */

/* The file as a string; NULL where it is not there. */
static loom_status read_text(const char *path, char **text) {
    FILE *file = fopen(path, "r");
    struct stat found;
    if (!file && errno == ENOENT)
        return LOOM_OK;
    if (!file || fstat(fileno(file), &found) != 0 || !S_ISREG(found.st_mode)) {
        if (file)
            fclose(file);
        return loom_fail(LOOM_ERR_IO, "%s: cannot be read", path);
    }
    if (found.st_size > LARGEST_TEXT) {
        fclose(file);
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: found %lld bytes, expected at most %d", path, (long long)found.st_size, LARGEST_TEXT);
    }
    size_t room = (size_t)found.st_size, length = 0;
    char *made = malloc(room + 1);
    if (made)
        length = fread(made, 1, room, file);
    fclose(file);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", path);
    made[length] = '\0';
    *text = made;
    return LOOM_OK;
}

/* ---- run.json ---- */

static int64_t integer_of(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

static double real_of(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void read_sizes(const json_t *object, double bytes[LOOM_RUN_MEMORY_KINDS]) {
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        bytes[i] = real_of(object, loom__run_memory_names[i]);
}

static loom_status read_ranks(const char *path, const json_t *list, loom_run_facts *facts) {
    if (json_array_size(list) == 0)
        return LOOM_OK;
    if ((int64_t)json_array_size(list) != facts->ranks)
        return loom_fail(LOOM_ERR_FORMAT, "%s: \"rank\" has %zu entries, expected those of %lld ranks, or none", path,
            json_array_size(list), (long long)facts->ranks);
    loom_run_rank *ranks = calloc((size_t)facts->ranks, sizeof *ranks);
    if (!ranks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld ranks", (long long)facts->ranks);
    for (int64_t i = 0; i < facts->ranks; i++) {
        const json_t *rank = json_array_get(list, (size_t)i);
        const char *node = json_string_value(json_object_get(rank, "node"));
        snprintf(ranks[i].node, sizeof ranks[i].node, "%s", node ? node : "");
        read_sizes(json_object_get(rank, "bytes"), ranks[i].bytes);
        read_sizes(json_object_get(rank, "planned"), ranks[i].planned);
    }
    facts->rank = ranks;
    return LOOM_OK;
}

static loom_status read_sessions(const json_t *list, loom_run_facts *facts) {
    size_t count = json_array_size(list);
    loom_run_session *sessions = calloc(count + 1, sizeof *sessions);
    if (!sessions)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the starts of a run");
    for (size_t i = 0; i < count; i++) {
        const json_t *session = json_array_get(list, i);
        sessions[i] = (loom_run_session){
            integer_of(session, "first_step"), integer_of(session, "began"), integer_of(session, "ended")};
    }
    facts->sessions = sessions;
    facts->session_count = (int64_t)count;
    return LOOM_OK;
}

static loom_status take_facts(const char *path, const json_t *object, loom_run_facts *facts) {
    const char *state = json_string_value(json_object_get(object, "state"));
    const char *message = json_string_value(json_object_get(object, "message"));
    int number = 0;
    while (number < LOOM_RUN_STATE_COUNT && (!state || strcmp(state, loom__run_state_names[number]) != 0))
        number++;
    facts->ranks = integer_of(object, "ranks");
    if (number == LOOM_RUN_STATE_COUNT || facts->ranks < 1 || facts->ranks > MOST_RANKS)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: found state \"%s\" and %lld ranks, expected running, finished, stopped or failed, and 1 to %d ranks",
            path, state ? state : "", (long long)facts->ranks, MOST_RANKS);
    facts->state = (loom_run_state)number;
    facts->threads = integer_of(object, "threads");
    facts->steps = integer_of(object, "steps");
    facts->gemm_rate = real_of(object, "gemm_rate");
    facts->flops_per_token = real_of(object, "flops_per_token");
    facts->message = message ? strdup(message) : NULL;
    if (message && !facts->message)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the message of a run");
    LOOM_TRY(read_sessions(json_object_get(object, "sessions"), facts));
    return read_ranks(path, json_object_get(object, "rank"), facts);
}

loom_status loom__run_parse_facts(const char *name, const char *text, size_t length, loom_run_facts *facts) {
    json_error_t error;
    json_t *object = json_loadb(text, length, 0, &error);
    loom_status status = object && json_is_object(object)
                             ? take_facts(name, object, facts)
                             : loom_fail(LOOM_ERR_FORMAT, "%s:%d: no JSON object: %s", name, error.line, error.text);
    json_decref(object);
    return status;
}

void loom__run_free_facts(loom_run_facts *facts) {
    free((void *)facts->message);
    free((void *)facts->sessions);
    free((void *)facts->rank);
}

static loom_status read_facts(loom_run_record *run, bool *there) {
    char path[LOOM__RUN_PATH_BYTES], *text = NULL;
    LOOM_TRY(loom__run_path(run->folder, "run.json", path));
    LOOM_TRY(read_text(path, &text));
    *there = text != NULL;
    if (!text)
        return LOOM_OK;
    loom_status status = loom__run_parse_facts(path, text, strlen(text), &run->facts);
    free(text);
    return status;
}

/* ---- metrics.jsonl ---- */

/* False: it is no line of a step. */
static bool take_report(const json_t *object, loom_step_report *report) {
    const json_t *step = json_object_get(object, "step");
    bool good = json_is_integer(step) && json_integer_value(step) > 0 && json_integer_value(step) < LAST_STEP;
    if (good) {
        *report = (loom_step_report){.step = json_integer_value(step)};
        for (int i = 0; i < LOOM__COLUMNS; i++) {
            const loom__column *column = &loom__columns[i];
            const json_t *value = json_object_get(object, column->name);
            double number = json_is_number(value) ? json_number_value(value) : json_is_null(value) ? INFINITY : NAN;
            if (column->integer && !(fabs(number) < 9e15))
                number = 0;
            loom__column_set(column, report, number);
        }
    }
    return good;
}

bool loom__run_parse_line(const char *line, size_t length, loom_step_report *report) {
    json_t *object = json_loadb(line, length, 0, NULL);
    bool good = take_report(object, report);
    json_decref(object);
    return good;
}

bool loom__run_parse_test(const char *line, size_t length, int64_t *step, double *loss) {
    static const char name[] = "\"test_loss\"";
    json_t *object = memmem(line, length, name, sizeof name - 1) ? json_loadb(line, length, 0, NULL) : NULL;
    const json_t *value = json_object_get(object, "test_loss");
    bool is = json_is_number(value) || json_is_null(value);
    if (is) {
        *step = integer_of(object, "step");
        *loss = json_is_number(value) ? json_number_value(value) : INFINITY;
    }
    json_decref(object);
    return is;
}

static loom_status add_report(loom_run_record *run, int64_t *room, const loom_step_report *report) {
    if (run->count > 0 && run->reports[run->count - 1].step >= report->step)
        loom__series_cut(run, report->step);
    while (run->count > 0 && run->reports[run->count - 1].step >= report->step) {
        run->count--;
        run->repeated++;
    }
    if (run->count == *room) {
        int64_t wanted = *room ? 2 * *room : 256;
        loom_step_report *grown = realloc(run->reports, (size_t)wanted * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for the metrics of %lld steps", (long long)wanted);
        run->reports = grown;
        *room = wanted;
    }
    run->reports[run->count++] = *report;
    return LOOM_OK;
}

static loom_status take_line(loom_run_record *run, int64_t *room, const char *line, size_t length) {
    loom_step_report report;
    if (loom__run_parse_test(line, length, &run->test_step, &run->test_loss))
        return LOOM_OK;
    json_t *object = json_loadb(line, length, 0, NULL);
    bool good = take_report(object, &report);
    loom_status status = good ? add_report(run, room, &report) : LOOM_OK;
    if (good && !status)
        status = loom__series_take(run, report.step, object);
    json_decref(object);
    run->damaged += !good;
    return status;
}

static loom_status read_metrics(loom_run_record *run, bool *there) {
    char path[LOOM__RUN_PATH_BYTES], *line = NULL;
    size_t bytes = 0;
    int64_t room = 0;
    LOOM_TRY(loom__run_path(run->folder, "metrics.jsonl", path));
    FILE *file = fopen(path, "r");
    *there = file != NULL;
    if (!file)
        return errno == ENOENT || errno == ENOTDIR ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be read: %m", path);
    loom_status status = LOOM_OK;
    for (ssize_t length; !status && (length = getline(&line, &bytes, file)) > 0;)
        status = take_line(run, &room, line, (size_t)length);
    free(line);
    if (!status && ferror(file))
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be read: %m", path);
    fclose(file);
    return status;
}

/* ---- the whole ---- */

static loom_status read_all(loom_run_record *run) {
    char path[LOOM__RUN_PATH_BYTES];
    bool facts, metrics;
    LOOM_TRY(read_facts(run, &facts));
    LOOM_TRY(read_metrics(run, &metrics));
    if (!facts && !metrics)
        return loom_fail(LOOM_ERR_NOT_FOUND,
            "%s: no run is there: expected the output folder of a run, with a metrics.jsonl or a run.json",
            run->folder);
    LOOM_TRY(loom__run_path(run->folder, "timeline.svg", path));
    LOOM_TRY(read_text(path, &run->timeline));
    LOOM_TRY(loom__run_path(run->folder, "run.yaml", path));
    LOOM_TRY(read_text(path, &run->config_text));
    /* One of another version is shown, though it is not understood. */
    if (run->config_text &&
        loom_run_config_from_text(path, run->config_text, strlen(run->config_text), NULL, 0, &run->config) != LOOM_OK)
        run->config = NULL;
    return LOOM_OK;
}

loom_status loom_run_read(const char *folder, loom_run_record **out) {
    loom_run_record *run = calloc(1, sizeof *run);
    if (run)
        run->folder = strdup(folder);
    if (!run || !run->folder) {
        free(run);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a run");
    }
    run->facts.gemm_rate = run->facts.flops_per_token = run->test_loss = NAN;
    loom_status status = read_all(run);
    if (status) {
        loom_run_destroy(run);
        return status;
    }
    *out = run;
    return LOOM_OK;
}

void loom_run_destroy(loom_run_record *run) {
    if (!run)
        return;
    loom__run_free_facts(&run->facts);
    loom_run_config_destroy(run->config);
    free(run->config_text);
    free(run->reports);
    loom__series_free(run);
    free(run->timeline);
    free(run->folder);
    free(run);
}
