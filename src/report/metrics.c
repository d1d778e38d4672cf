/* metrics.jsonl: the run's numbers, a line a step, readable while the run goes on. */
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

/* Sets an earlier run's lines aside. The lock on the old file is held until the new one is locked, so that nobody else
 * sets anything aside in between. */
static loom_status set_aside(const char *path, int *fd) {
    char old[4096];
    struct stat found;
    if (fstat(*fd, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size == 0)
        return LOOM_OK;
    if (snprintf(old, sizeof old, "%s.old", path) >= (int)sizeof old)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the metrics is too long");
    int fresh = -1;
    loom_status status =
        rename(path, old) == 0 ? lock_named(path, &fresh) : loom_fail(LOOM_ERR_IO, "%s: cannot be set aside: %m", path);
    close(*fd);
    *fd = fresh;
    return status;
}

static loom_status open_locked(const char *path, FILE **file) {
    int fd;
    LOOM_TRY(lock_named(path, &fd));
    LOOM_TRY(set_aside(path, &fd));
    *file = fdopen(fd, "w");
    if (*file)
        return LOOM_OK;
    close(fd);
    return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
}

loom_status loom_metrics_open(const char *path, loom_metrics **out) {
    loom_metrics *metrics = calloc(1, sizeof *metrics);
    char *copy = metrics ? strdup(path) : NULL;
    loom_status status =
        copy ? open_locked(path, &metrics->file) : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
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
    put(object, "loss", report->loss);
    put(object, "grad_norm", report->grad_norm);
    put(object, "learning_rate", report->learning_rate);
    put(object, "tokens_per_second", report->tokens_per_second);
    json_object_set_new(object, "consumed_samples", json_integer(report->consumed_samples));
    put(object, "step_seconds", report->seconds);
    put(object, "gemm_share", report->gemm_share);
    put(object, "validation_loss", report->validation_loss);
    put(object, "loss_scale", report->loss_scale);
    json_object_set_new(object, "skipped_steps", json_integer(report->skipped_steps));
    put(object, "num_zeros_in_grad", report->num_zeros_in_grad);
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
