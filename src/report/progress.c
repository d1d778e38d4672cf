/* The progress line. The rate and the time left come from a moving mean of the step times, so that one slow step (a
 * validation, a neighbour on the machine) does not make the estimate jump. */
#include <limits.h>
#include <math.h>
#include <megaloom/report.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

struct loom_progress {
    FILE *out;
    bool terminal;
    bool open; /* a line is on the terminal that has no newline yet */
    int64_t steps, every;
    int64_t timed; /* steps whose time is known */
    double mean_seconds;
};

loom_status loom_progress_create(FILE *out, bool terminal, int64_t steps, int64_t every, loom_progress **progress) {
    loom_progress *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the progress line");
    *made = (loom_progress){.out = out, .terminal = terminal, .steps = steps, .every = every > 0 ? every : 1};
    *progress = made;
    return LOOM_OK;
}

static void duration(double seconds, char *text, size_t bytes) {
    if (!(seconds < 1e15))
        return;
    int64_t whole = (int64_t)(seconds + 0.5), hours = whole / 3600;
    if (hours >= 48)
        snprintf(text, bytes, "  %lld d %02lld h left", (long long)(hours / 24), (long long)(hours % 24));
    else if (hours > 0)
        snprintf(text, bytes, "  %lld:%02lld:%02lld left", (long long)hours, (long long)(whole / 60 % 60),
            (long long)(whole % 60));
    else
        snprintf(text, bytes, "  %lld:%02lld left", (long long)(whole / 60), (long long)(whole % 60));
}

static void rate(double tokens, char *text, size_t bytes) {
    if (tokens >= 1e6)
        snprintf(text, bytes, "  %.2fM tokens/s", tokens * 1e-6);
    else if (tokens >= 1e4)
        snprintf(text, bytes, "  %.1fk tokens/s", tokens * 1e-3);
    else
        snprintf(text, bytes, tokens < 10 ? "  %.2g tokens/s" : "  %.0f tokens/s", tokens);
}

/* A NaN has a sign, which says nothing. */
static void loss_text(double loss, char *text, size_t bytes) {
    if (isnan(loss))
        snprintf(text, bytes, "  loss nan");
    else
        snprintf(text, bytes, fabs(loss) < 1e6 ? "  loss %.4f" : "  loss %.4g", loss);
}

/* Columns of the terminal; without limit where it does not say. */
static int columns(const loom_progress *progress) {
    struct winsize size;
    return ioctl(fileno(progress->out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : INT_MAX;
}

enum { NARROWEST_BAR = 5, WIDEST_BAR = 20, BAR_EDGES = 3 };

/* "[==>  ] " of at most `room` bytes; nothing where that is too narrow. */
static void bar(const loom_progress *progress, int64_t step, size_t room, char text[WIDEST_BAR + BAR_EDGES + 1]) {
    if (progress->steps <= 0 || room < NARROWEST_BAR + BAR_EDGES)
        return;
    int width = room < WIDEST_BAR + BAR_EDGES ? (int)room - BAR_EDGES : WIDEST_BAR;
    int full = (int)((double)width * (double)step / (double)progress->steps);
    text[0] = '[';
    for (int i = 0; i < width; i++)
        text[1 + i] = i < full ? '=' : i == full ? '>' : ' ';
    snprintf(text + 1 + width, BAR_EDGES, "] ");
}

/* A line that is longer than the terminal would be wrapped, and then not be rewritten but scroll: what says least goes
 * first, and the bar has what room the others leave. */
static void put_line(loom_progress *progress, const loom_step_report *report, bool last) {
    char cells[WIDEST_BAR + BAR_EDGES + 1] = "", tokens[48] = "", share[32] = "", left[48] = "", dropped[32] = "";
    char step[64], loss[32];
    int width = snprintf(NULL, 0, "%lld", (long long)progress->steps);
    snprintf(step, sizeof step, "step %*lld/%lld", width, (long long)report->step, (long long)progress->steps);
    loss_text(report->loss, loss, sizeof loss);
    if (!isnan(report->tokens_per_second))
        rate(report->tokens_per_second, tokens, sizeof tokens);
    if (report->gemm_share <= 1)
        snprintf(share, sizeof share, "  %.0f%% of GEMM rate", report->gemm_share * 100);
    if (report->router && report->router->dropped > 0)
        snprintf(dropped, sizeof dropped, "  %.1f%% dropped",
            100 * (double)report->router->dropped / (double)report->router->choices);
    if (progress->mean_seconds > 0)
        duration(progress->mean_seconds * (double)(progress->steps - report->step), left, sizeof left);
    if (!progress->terminal) {
        fprintf(progress->out, "%s%s%s%s%s%s\n", step, loss, dropped, tokens, share, left);
        return;
    }
    size_t most = (size_t)columns(progress) - 1;
    char *const least_first[] = {share, dropped, tokens, left, loss};
    const size_t parts = sizeof least_first / sizeof *least_first;
    size_t length = strlen(step);
    for (size_t i = 0; i < parts; i++)
        length += strlen(least_first[i]);
    for (size_t i = 0; i < parts && length > most; i++) {
        length -= strlen(least_first[i]);
        least_first[i][0] = '\0';
    }
    if (length < most)
        bar(progress, report->step, most - length, cells);
    fprintf(progress->out, "\r%s%.*s%s%s%s%s%s\033[K%s", cells, most < sizeof step ? (int)most : (int)sizeof step, step,
        loss, dropped, tokens, share, left, last ? "\n" : "");
    progress->open = !last;
}

/* What was not measured is left out of the line. */
void loom_progress_step(loom_progress *progress, const loom_step_report *report) {
    /* The first step warms everything up and says little about the others: the second takes its place. */
    if (!isnan(report->seconds) && progress->timed++ < 2)
        progress->mean_seconds = report->seconds;
    else if (!isnan(report->seconds))
        progress->mean_seconds = 0.9 * progress->mean_seconds + 0.1 * report->seconds;
    bool last = report->step == progress->steps;
    if (!progress->terminal && report->step % progress->every != 0 && report->step != 1 && !last)
        return;
    put_line(progress, report, last);
    fflush(progress->out);
}

void loom_progress_note(loom_progress *progress, const char *format, ...) {
    va_list arguments;
    if (progress->open)
        fputs("\r\033[K", progress->out);
    progress->open = false;
    va_start(arguments, format);
    vfprintf(progress->out, format, arguments);
    va_end(arguments);
    fputc('\n', progress->out);
    fflush(progress->out);
}

void loom_progress_destroy(loom_progress *progress) {
    if (progress && progress->open)
        fputc('\n', progress->out);
    free(progress);
}
