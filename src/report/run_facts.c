/* run.json and run.yaml, written. run.json is replaced by a rename, so that a reader meets the old facts or the new
 * ones and never half of them. */
#include "report/page.h"
#include "report/run.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NAME(enumerator, text) text,
const char *const loom__run_memory_names[LOOM_RUN_MEMORY_KINDS] = {LOOM_RUN_MEMORY_LIST(NAME)};
const char *const loom__run_state_names[LOOM_RUN_STATE_COUNT] = {LOOM_RUN_STATE_LIST(NAME)};
#undef NAME

/* JSON has no NaN: what was not measured is left out. */
static void put_real(json_t *object, const char *key, double value) {
    if (isfinite(value))
        json_object_set_new(object, key, json_real(value));
}

static json_t *sizes_json(const double bytes[LOOM_RUN_MEMORY_KINDS]) {
    json_t *object = json_object();
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        put_real(object, loom__run_memory_names[i], bytes[i]);
    return object;
}

static json_t *facts_json(const loom_run_facts *facts) {
    json_t *object = json_pack("{s:s, s:o*, s:I, s:I, s:I}", "state", loom__run_state_names[facts->state], "message",
        facts->message ? loom__html_string(facts->message) : NULL, "ranks", (json_int_t)facts->ranks, "threads",
        (json_int_t)facts->threads, "steps", (json_int_t)facts->steps);
    if (!object)
        return NULL;
    put_real(object, "gemm_rate", facts->gemm_rate);
    put_real(object, "flops_per_token", facts->flops_per_token);
    json_t *sessions = json_array(), *ranks = json_array();
    for (int64_t i = 0; i < facts->session_count; i++)
        json_array_append_new(
            sessions, json_pack("{s:I, s:I, s:I}", "first_step", (json_int_t)facts->sessions[i].first_step, "began",
                          (json_int_t)facts->sessions[i].began, "ended", (json_int_t)facts->sessions[i].ended));
    for (int64_t i = 0; facts->rank && i < facts->ranks; i++)
        json_array_append_new(
            ranks, json_pack("{s:o, s:o, s:o}", "node", loom__html_string(facts->rank[i].node), "bytes",
                       sizes_json(facts->rank[i].bytes), "planned", sizes_json(facts->rank[i].planned)));
    json_object_set_new(object, "sessions", sessions);
    json_object_set_new(object, "rank", ranks);
    return object;
}

loom_status loom__run_path(const char *folder, const char *name, char path[LOOM__RUN_PATH_BYTES]) {
    if (snprintf(path, LOOM__RUN_PATH_BYTES, "%s/%s", folder, name) >= LOOM__RUN_PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of %s is too long", name);
    return LOOM_OK;
}

static loom_status close_written(FILE *file, const char *path) {
    bool bad = ferror(file) != 0;
    if (fclose(file) != 0 || bad)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return LOOM_OK;
}

loom_status loom_run_write_facts(const char *folder, const loom_run_facts *facts) {
    char path[LOOM__RUN_PATH_BYTES], partial[LOOM__RUN_PATH_BYTES];
    LOOM_TRY(loom__run_path(folder, "run.json", path));
    LOOM_TRY(loom__run_path(folder, "run.json.tmp", partial));
    json_t *object = facts_json(facts);
    if (!object)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the facts of a run");
    FILE *file = fopen(partial, "w");
    loom_status status = file ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", partial);
    if (!status) {
        json_dumpf(object, file, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
        fputc('\n', file);
        status = close_written(file, partial);
    }
    json_decref(object);
    if (!status && rename(partial, path) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status;
}

static loom_status put_text(void *context, const char *text, size_t length) {
    fwrite(text, 1, length, context);
    return LOOM_OK;
}

loom_status loom_run_write_config(const char *folder, const loom_run_config *config) {
    char path[LOOM__RUN_PATH_BYTES];
    LOOM_TRY(loom__run_path(folder, "run.yaml", path));
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status = loom_run_config_print(config, put_text, file);
    loom_status closed = close_written(file, path);
    return status ? status : closed;
}
