/* megaloom compare: the curves of two runs over each other, and whether what lies between their losses may be rounding.
 */
#include "commands.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 64, HEIGHT = 14, NOTE_BYTES = 512, KEY_HTML = 1 };

typedef struct arguments {
    const char *folders[2], *html;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case KEY_HTML:
        to->html = text;
        return 0;
    case ARGP_KEY_ARG:
        if (to->folders[1])
            argp_error(state, "more than two runs: %s, %s and %s", to->folders[0], to->folders[1], text);
        to->folders[to->folders[0] != NULL] = text;
        return 0;
    case ARGP_KEY_END:
        if (!to->folders[1])
            argp_error(state, "give the output folders of two runs");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- the drawing ---- */

typedef struct range {
    double low, high;
    int64_t first, last;
} range;

static range range_of(loom_run_record *const runs[2]) {
    range r = {INFINITY, -INFINITY, INT64_MAX, 0};
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < runs[k]->count; i++) {
            const loom_step_report *at = &runs[k]->reports[i];
            r.first = at->step < r.first ? at->step : r.first;
            r.last = at->step > r.last ? at->step : r.last;
            if (isfinite(at->loss)) {
                r.low = fmin(r.low, at->loss);
                r.high = fmax(r.high, at->loss);
            }
        }
    return r;
}

static void draw(loom_run_record *const runs[2]) {
    char cells[HEIGHT][WIDTH + 1];
    range r = range_of(runs);
    if (!(r.low <= r.high))
        return;
    for (int row = 0; row < HEIGHT; row++)
        snprintf(cells[row], sizeof cells[row], "%*s", WIDTH, "");
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < runs[k]->count; i++) {
            const loom_step_report *at = &runs[k]->reports[i];
            if (!isfinite(at->loss))
                continue;
            int x = r.last > r.first
                        ? (int)((double)(at->step - r.first) / (double)(r.last - r.first) * (WIDTH - 1) + 0.5)
                        : 0;
            int y = r.high > r.low ? (int)((at->loss - r.low) / (r.high - r.low) * (HEIGHT - 1) + 0.5) : 0;
            char *cell = &cells[HEIGHT - 1 - y][x];
            *cell = *cell == ' ' || *cell == "ab"[k] ? "ab"[k] : '#';
        }
    printf("\nloss (# where both are)\n");
    for (int row = 0; row < HEIGHT; row++)
        if (row == 0 || row == HEIGHT - 1)
            printf("%10.4g |%s\n", row ? r.low : r.high, cells[row]);
        else
            printf("%10s |%s\n", "", cells[row]);
    printf("%10s +", "");
    for (int i = 0; i < WIDTH; i++)
        putchar('-');
    printf("\n%10s  %-10" PRId64 "%*" PRId64 "\n\n", "step", r.first, WIDTH - 10, r.last);
}

/* ---- configurations ---- */

/* Fields that decide who computes what when, and not what is computed. */
static bool is_of_layout(const char *field) {
    static const char *const prefixes[] = {"strategy.", "checkpoint.", "log.", "validation."};
    static const char *const names[] = {"ranks", "threads", "output", "export", "schedule", "trace", "profile", "steps",
        "data.micro_batch_size", "data.prefetch_factor", "data.index_mapping_dir", "model.recompute",
        "model.replicate_query_groups", "model.balanced_pipeline_split", "model.pipeline_model_parallel_layout",
        "model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage",
        "model.account_for_embedding_in_pipeline_split", "model.account_for_loss_in_pipeline_split"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (strncmp(field, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(field, names[i]) == 0)
            return true;
    return false;
}

typedef struct fields {
    int64_t count;   /* that differ */
    int64_t others;  /* of them not of the layout */
    char first[128]; /* of those */
} fields;

static loom_status print_field(void *context, const char *field, const char *a, const char *b) {
    fields *of = context;
    if (of->count++ == 0)
        printf("\nthe configurations differ in\n");
    printf("  %-44s %-20s %s\n", field, a ? a : "-", b ? b : "-");
    if (!is_of_layout(field) && of->others++ == 0)
        snprintf(of->first, sizeof of->first, "%s", field);
    return LOOM_OK;
}

/* ---- the verdict ---- */

static void verdict(const loom_run_difference *d, const fields *of, char note[NOTE_BYTES]) {
    if (d->equal == d->common)
        snprintf(note, NOTE_BYTES, "bit for bit equal in all %" PRId64 " common steps", d->common);
    else if (d->beyond == 0)
        snprintf(note, NOTE_BYTES,
            "within rounding noise: the losses of %" PRId64 " common steps differ by at most %.2g, at step %" PRId64,
            d->common, d->largest, d->largest_step);
    else if (of->others > 0)
        snprintf(note, NOTE_BYTES, "not the same training (%s differs): the losses are apart by %.2g at step %" PRId64,
            of->first, d->at, d->beyond);
    else
        snprintf(note, NOTE_BYTES,
            "beyond rounding noise from step %" PRId64 ": the losses differ by %.2g there, rounding explains %.2g",
            d->beyond, d->at, d->allowed);
}

static loom_status write_page(
    const char *path, loom_run_record *const runs[2], const loom_run_difference *d, const char *note) {
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status = loom_runs_write_html(file, runs[0], runs[1], d, note, 0);
    if (fclose(file) != 0 && !status)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status;
}

static loom_status compare(const arguments *given, loom_run_record *const runs[2], bool *beyond) {
    loom_run_difference d;
    fields of = {0};
    char note[NOTE_BYTES];
    LOOM_TRY(loom_runs_compare(runs[0], runs[1], &d));
    for (int k = 0; k < 2; k++)
        printf("%c  %s: %" PRId64 " steps, the last with loss %.6f\n", "ab"[k], runs[k] -> folder, runs[k] -> count,
            runs[k] -> reports[runs[k]->count - 1].loss);
    loom_status status = loom_runs_compare_config(runs[0], runs[1], print_field, &of);
    if (status == LOOM_ERR_NOT_FOUND)
        printf("\n%s\n", loom_error_message());
    else
        LOOM_TRY(status);
    draw(runs);
    if (!d.precision_known)
        printf("the precision is not known: taken for 32\n");
    printf("common steps %" PRId64 " to %" PRId64 ": %" PRId64 " of %" PRId64
           " losses have the same bits; the relative difference begins with %.2g\n",
        d.first, d.last, d.equal, d.common, d.begin);
    verdict(&d, &of, note);
    puts(note);
    *beyond = d.beyond > 0;
    return given->html ? write_page(given->html, runs, &d, note) : LOOM_OK;
}

int loom_cli_compare(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"html", KEY_HTML, "FILE", 0, "Also write a page: curves over each other, the difference beside its bound", 0},
        {0}};
    static const struct argp argp = {options, take, "RUN_A RUN_B",
        "Draws the losses of two runs over each other, and tells whether rounding explains their difference.\v"
        "The relative difference of the losses of a step is rounding noise up to 100 unit roundoffs of the activations "
        "(2^-24 in fp32; 4 in bf16, 2^-8, and fp16, 2^-11), or up to 8 times the largest difference before: "
        "training amplifies a difference, but not at once. Exit status 1: it is beyond that, which rounding does not "
        "explain. `megaloom check-layout` looks closer.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_run_record *runs[2] = {NULL, NULL};
    bool beyond = false;
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_status status = loom_run_read(given.folders[0], &runs[0]);
    if (!status)
        status = loom_run_read(given.folders[1], &runs[1]);
    if (!status)
        status = compare(&given, runs, &beyond);
    loom_run_destroy(runs[0]);
    loom_run_destroy(runs[1]);
    return status ? loom_cli_fail(status) : beyond;
}
