/* megaloom compare: the curves of two runs over each other, and whether what lies between their losses may be rounding.
 */
#include "commands.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 64, HEIGHT = 14, NOTE_BYTES = 768, OTHER_BYTES = 224, MOST_NOISE = 16, KEY_HTML = 1, KEY_NOISE };

typedef struct arguments {
    const char *folders[2], *html;
    const char *noise[MOST_NOISE];
    int noise_count;
} arguments;

typedef struct compared {
    loom_run_record *runs[2], *noise[MOST_NOISE];
    int noise_count;
} compared;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case KEY_HTML:
        to->html = text;
        return 0;
    case KEY_NOISE:
        if (to->noise_count == MOST_NOISE)
            argp_error(state, "--noise: more than %d runs", MOST_NOISE);
        to->noise[to->noise_count++] = text;
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
        "model.account_for_embedding_in_pipeline_split", "model.account_for_loss_in_pipeline_split",
        "model.cp_comm_type", "model.hierarchical_context_parallel_sizes", "model.moe_token_dispatcher_type",
        "model.moe_grouped_gemm", "model.moe_permute_fusion", "model.moe_shared_expert_overlap",
        "model.moe_layer_recompute", "model.moe_per_layer_logging", "optim.log_num_zeros_in_grad"};
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

static int64_t token_ranks(const loom_run_record *run) {
    const loom_megatron_strategy_config *s = &run->config->strategy;
    return s->tensor_model_parallel_size * s->context_parallel_size;
}

/* Under a launcher the run file's ranks are not those that there were. */
static int64_t data_ranks(const loom_run_record *run) {
    return loom_cli_data_parallel_size(run->config, run->facts.ranks > 0 ? run->facts.ranks : run->config->ranks);
}

/* The first common step that the two do at another rate, or behind another number of samples: fields of the layout
 * decide that as well where a run file leaves it to them; or what routes by the tokens of a rank. "" where there is
 * none. */
static void other_step(const loom_run_record *a, const loom_run_record *b, char what[OTHER_BYTES]) {
    *what = '\0';
    if (a->config && b->config && loom_cli_routes_by_rank(a->config) && token_ranks(a) != token_ranks(b))
        snprintf(what, OTHER_BYTES, "%s goes by the tokens of a rank, which %" PRId64 " and %" PRId64 " share",
            loom_cli_routes_by_rank(a->config), token_ranks(a), token_ranks(b));
    if (a->config && b->config && loom_cli_goes_by_data_ranks(a->config) && data_ranks(a) != data_ranks(b))
        snprintf(what, OTHER_BYTES, "%" PRId64 " and %" PRId64 " data-parallel ranks with %s", data_ranks(a),
            data_ranks(b), loom_cli_goes_by_data_ranks(a->config));
    for (int64_t i = 0, j = 0; i < a->count && j < b->count && !*what;) {
        const loom_step_report *x = &a->reports[i], *y = &b->reports[j];
        i += x->step <= y->step;
        j += y->step <= x->step;
        if (x->step != y->step)
            continue;
        if (x->consumed_samples != y->consumed_samples && x->consumed_samples && y->consumed_samples)
            snprintf(what, OTHER_BYTES, "%" PRId64 " and %" PRId64 " samples after step %" PRId64, x->consumed_samples,
                y->consumed_samples, x->step);
        else if (fabs(x->learning_rate - y->learning_rate) > 1e-6 * fabs(x->learning_rate))
            snprintf(what, OTHER_BYTES, "learning rates of %.4g and %.4g in step %" PRId64, x->learning_rate,
                y->learning_rate, x->step);
    }
}

/* ---- the verdict ---- */

static void verdict(const loom_run_difference *d, const fields *of, const char *other, char note[NOTE_BYTES]) {
    const char *what = d->of_norm ? "gradient norms" : "losses";
    if (d->beyond > 0 && of->others > 0)
        snprintf(note, NOTE_BYTES, "not the same training (%s differs): the %s are apart by %.2g at step %" PRId64,
            of->first, what, d->at, d->beyond);
    else if (d->beyond > 0 && *other)
        snprintf(note, NOTE_BYTES, "not the same training (%s): the %s are apart by %.2g at step %" PRId64, other, what,
            d->at, d->beyond);
    else if (d->beyond > 0)
        snprintf(note, NOTE_BYTES,
            "beyond rounding noise from step %" PRId64 ": the %s differ by %.2g there, rounding explains %.2g",
            d->beyond, what, d->at, d->allowed);
    else if (d->equal == d->common)
        snprintf(note, NOTE_BYTES, "bit for bit equal in all %" PRId64 " common steps", d->common);
    else if (d->judged < d->last)
        snprintf(note, NOTE_BYTES,
            "within rounding noise up to step %" PRId64 ", the last that is measured; the losses differ by at most "
            "%.2g, at step %" PRId64,
            d->judged, d->largest, d->largest_step);
    else
        snprintf(note, NOTE_BYTES,
            "within rounding noise: the losses of %" PRId64 " common steps differ by at most %.2g, at step %" PRId64,
            d->common, d->largest, d->largest_step);
}

static const loom_run_record *const *noise_of(const compared *c) {
    return (const loom_run_record *const *)c->noise;
}

static loom_status write_page(const char *path, const compared *c, const loom_run_difference *d, const char *note) {
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status = loom_runs_write_html(file, c->runs[0], c->runs[1], noise_of(c), c->noise_count, d, note, 0);
    if (fclose(file) != 0 && !status)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status;
}

static loom_status compare(const arguments *given, const compared *c, bool *beyond) {
    loom_run_record *const *runs = c->runs;
    loom_run_difference d;
    fields of = {0};
    char note[NOTE_BYTES], other[OTHER_BYTES];
    LOOM_TRY(loom_runs_compare(runs[0], runs[1], noise_of(c), c->noise_count, &d));
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
    other_step(runs[0], runs[1], other);
    verdict(&d, &of, other, note);
    puts(note);
    *beyond = d.beyond > 0;
    return given->html ? write_page(given->html, c, &d, note) : LOOM_OK;
}

/* A run that measures rounding differs from the first one by its layout alone. */
static loom_status note_field(void *context, const char *field, const char *a, const char *b) {
    (void)a, (void)b;
    char *first = context;
    if (!*first && !is_of_layout(field))
        snprintf(first, OTHER_BYTES / 2, "%s", field);
    return LOOM_OK;
}

static loom_status check_noise(const compared *c) {
    for (int k = 0; k < c->noise_count; k++) {
        char first[OTHER_BYTES] = "";
        loom_status status = loom_runs_compare_config(c->runs[0], c->noise[k], note_field, first);
        if (status && status != LOOM_ERR_NOT_FOUND)
            return status;
        if (*first)
            snprintf(first + strlen(first), OTHER_BYTES - strlen(first), " differs");
        else
            other_step(c->runs[0], c->noise[k], first);
        if (*first)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "--noise: %s is not the training of %s (%s): expected one that differs by its layout alone",
                c->noise[k]->folder, c->runs[0]->folder, first);
    }
    return LOOM_OK;
}

static loom_status read_runs(const arguments *given, compared *c) {
    for (int k = 0; k < 2; k++)
        LOOM_TRY(loom_run_read(given->folders[k], &c->runs[k]));
    for (; c->noise_count < given->noise_count; c->noise_count++)
        LOOM_TRY(loom_run_read(given->noise[c->noise_count], &c->noise[c->noise_count]));
    return check_noise(c);
}

int loom_cli_compare(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"html", KEY_HTML, "FILE", 0, "Also write a page: curves over each other, the difference beside its bound", 0},
        {"noise", KEY_NOISE, "RUN", 0,
            "A run that differs from RUN_A by rounding alone: the difference of the two measures what rounding does "
            "(more than one may be given)",
            0},
        {0}};
    static const struct argp argp = {options, take, "RUN_A RUN_B",
        "Draws the losses of two runs over each other, and tells whether rounding explains their difference.\v"
        "The relative difference of the losses of a step is rounding noise up to 100 unit roundoffs of the activations "
        "(2^-24 in fp32; 4 in bf16, 2^-8, and fp16, 2^-11), or up to 8 times the largest difference before, of a loss "
        "or a gradient norm: training amplifies a difference, but not at once. The gradient norm of step 1, which "
        "begins with equal weights, may differ by twice the former. With --noise the losses may differ by 16 times "
        "what RUN and RUN_A have differed by up to the step, or by 16 unit roundoffs (0.64 in bf16 and fp16): that "
        "finds faults that begin small and grow slowly, and bears trainings that are unstable. Exit status 1: the "
        "difference is beyond that. `megaloom check-layout` looks closer.",
        NULL, NULL, NULL};
    arguments given = {0};
    compared c = {0};
    bool beyond = false;
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_status status = read_runs(&given, &c);
    if (!status)
        status = compare(&given, &c, &beyond);
    for (int k = 0; k < 2; k++)
        loom_run_destroy(c.runs[k]);
    for (int k = 0; k < c.noise_count; k++)
        loom_run_destroy(c.noise[k]);
    return status ? loom_cli_fail(status) : beyond;
}
