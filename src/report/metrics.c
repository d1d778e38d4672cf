/* metrics.jsonl: the run's numbers, a line a step, readable while the run goes on. A file is only ever replaced as a
 * whole, by a new one that may begin with its lines: what an earlier run wrote is never changed. */
#include "report/columns.h"
#include "report/router.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <megaloom/report.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(member, text) {text, offsetof(loom_step_report, member), false},
#define INTEGER(member, text) {text, offsetof(loom_step_report, member), true},
const loom__column loom__columns[LOOM__COLUMNS] = {LOOM__COLUMN_LIST(REAL, INTEGER)};
#undef REAL
#undef INTEGER

struct loom_metrics {
    FILE *file;
    char *path;
};

/* Whether the open file is still what the name stands for: another run may have set it aside meanwhile. */
static bool is_named(int fd, const char *path) {
    struct stat open_file, named;
    return fstat(fd, &open_file) == 0 && stat(path, &named) == 0 && open_file.st_dev == named.st_dev &&
           open_file.st_ino == named.st_ino;
}

/* A locked file of this name, new or an earlier run's; LOOM_ERR_STATE where another run holds it. */
static loom_status lock_named(const char *path, int *out) {
    for (;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd == -1)
            return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
        bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0, taken = !locked && errno == EWOULDBLOCK;
        /* A file system without locks cannot keep two runs apart. */
        if ((locked || !taken) && is_named(fd, path)) {
            *out = fd;
            return LOOM_OK;
        }
        bool other_run = taken && is_named(fd, path);
        close(fd);
        if (other_run)
            return loom_fail(LOOM_ERR_STATE, "%s: another run is writing it; give this one another output", path);
    }
}

enum { PATH_BYTES = 4096 };

/* Sets an earlier run's lines aside, to the path `old`; *was_there false: there were none. The lock on the old file is
 * held until the new one is locked, so that nobody else sets anything aside in between. */
static loom_status set_aside(const char *path, int *fd, char old[PATH_BYTES], bool *was_there) {
    struct stat found;
    *was_there = fstat(*fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 0;
    if (!*was_there)
        return LOOM_OK;
    if (snprintf(old, PATH_BYTES, "%s.old", path) >= PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the metrics is too long");
    int fresh = -1;
    loom_status status =
        rename(path, old) == 0 ? lock_named(path, &fresh) : loom_fail(LOOM_ERR_IO, "%s: cannot be set aside: %m", path);
    close(*fd);
    *fd = fresh;
    return status;
}

/* The lines of the steps up to `last`. A line that was cut off when its run was killed is of no step. */
static loom_status keep_lines(const char *old, int64_t last, FILE *to) {
    FILE *from = fopen(old, "r");
    char *line = NULL;
    size_t bytes = 0;
    if (!from)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be read: %m", old);
    for (ssize_t length; (length = getline(&line, &bytes, from)) > 0;) {
        long long step;
        if (line[length - 1] == '\n' && sscanf(line, "{\"step\":%lld,", &step) == 1 && step <= last)
            fwrite(line, 1, (size_t)length, to);
    }
    free(line);
    bool bad = ferror(from) != 0;
    fclose(from);
    if (bad || fflush(to) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: its lines cannot be kept: %m", old);
    return LOOM_OK;
}

static loom_status open_locked(const char *path, int64_t last, FILE **file) {
    int fd;
    char old[PATH_BYTES];
    bool was_there;
    LOOM_TRY(lock_named(path, &fd));
    LOOM_TRY(set_aside(path, &fd, old, &was_there));
    *file = fdopen(fd, "w");
    if (!*file) {
        close(fd);
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    }
    loom_status status = was_there && last > 0 ? keep_lines(old, last, *file) : LOOM_OK;
    if (status)
        fclose(*file);
    return status;
}

loom_status loom_metrics_open(const char *path, loom_metrics **out) {
    return loom_metrics_continue(path, 0, out);
}

loom_status loom_metrics_continue(const char *path, int64_t last, loom_metrics **out) {
    loom_metrics *metrics = calloc(1, sizeof *metrics);
    char *copy = metrics ? strdup(path) : NULL;
    loom_status status =
        copy ? open_locked(path, last, &metrics->file) : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    if (status) {
        free(copy);
        free(metrics);
        return status;
    }
    metrics->path = copy;
    *out = metrics;
    return LOOM_OK;
}

/* NaN stands for a value that was not measured; an infinity was, but JSON has no number for it. */
static void put(json_t *object, const char *key, double value) {
    if (!isnan(value))
        json_object_set_new(object, key, isinf(value) ? json_null() : json_real(value));
}

static loom_status put_router_number(void *context, const char *name, double value, bool is_count) {
    if (is_count)
        json_object_set_new(context, name, json_integer((json_int_t)value));
    else
        put(context, name, value);
    return LOOM_OK;
}

/* Takes the object. */
static loom_status write_line(loom_metrics *metrics, json_t *object) {
    int failed = json_dumpf(object, metrics->file, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(object);
    if (failed || fputc('\n', metrics->file) == EOF || fflush(metrics->file) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", metrics->path);
    return LOOM_OK;
}

loom_status loom_metrics_write(loom_metrics *metrics, const loom_step_report *report) {
    json_t *object = json_object();
    if (!object)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a line of metrics");
    json_object_set_new(object, "step", json_integer(report->step));
    for (int i = 0; i < LOOM__COLUMNS; i++) {
        const loom__column *column = &loom__columns[i];
        double value = loom__column_value(column, report);
        if (column->integer)
            json_object_set_new(object, column->name, json_integer((json_int_t)value));
        else
            put(object, column->name, value);
    }
    (void)loom__router_numbers(report, put_router_number, object);
    return write_line(metrics, object);
}

loom_status loom_metrics_write_test(loom_metrics *metrics, int64_t step, double loss, double tokens) {
    json_t *object = json_object();
    if (!object)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a line of metrics");
    json_object_set_new(object, "step", json_integer(step));
    put(object, "test_loss", loss);
    put(object, "test_tokens", tokens);
    return write_line(metrics, object);
}

void loom_metrics_close(loom_metrics *metrics) {
    if (!metrics)
        return;
    fclose(metrics->file); /* every line has been flushed */
    free(metrics->path);
    free(metrics);
}
