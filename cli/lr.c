/* megaloom lr: the schedule of a run file, step by step and as a drawing. The numbers come from the function that the
 * optimizer asks as well; no rank is started. On a terminal that knows UTF-8 a character of the drawing is eight dots,
 * elsewhere one star. */
#include "commands.h"
#include <argp.h>
#include <inttypes.h>
#include <jansson.h>
#include <langinfo.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { STEPS_MAX = 10000000, HEIGHT = 12, WIDEST = 100, MARGIN = 13 };
enum { LR, EMBEDDINGS, DECAY, CURVES };

typedef struct plan {
    const loom_run_config *config;
    int64_t run_steps, count; /* where the schedule ends; how many steps are shown */
    double *curves[CURVES];   /* [count] each, in one piece of memory */
    bool decoupled, ramp;     /* embeddings have a rate of their own; weight decay changes */
} plan;

static loom_status make_plan(const loom_run_config *config, int64_t wanted, plan *out) {
    plan made = {.config = config, .run_steps = config->steps ? config->steps : wanted};
    made.count = wanted ? wanted : config->steps;
    if (made.count == 0)
        return loom_fail(LOOM_ERR_CONFIG, "steps: missing, expected an integer >= 1 (or --steps)");
    if (made.count > STEPS_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "found %" PRId64 " steps to show, expected at most %d; see --steps",
            made.count, STEPS_MAX);
    LOOM_TRY(loom_optimizer_config_check(&config->optim));
    LOOM_TRY(loom_lr_config_check(&config->lr));
    made.curves[0] = calloc((size_t)made.count, CURVES * sizeof(double));
    if (!made.curves[0])
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " steps", made.count);
    for (int i = 1; i < CURVES; i++)
        made.curves[i] = made.curves[i - 1] + made.count;
    for (int64_t step = 0; step < made.count; step++) {
        loom_lr_values at;
        loom_status status = loom_lr_at(&config->optim, &config->lr, made.run_steps, step, &at);
        if (status) {
            free(made.curves[0]);
            return status;
        }
        made.curves[LR][step] = at.lr;
        made.curves[EMBEDDINGS][step] = at.decoupled_lr;
        made.curves[DECAY][step] = at.weight_decay;
    }
    made.decoupled = config->optim.decoupled_lr > 0;
    made.ramp = config->lr.weight_decay_incr_style && strcmp(config->lr.weight_decay_incr_style, "constant") != 0;
    *out = made;
    return LOOM_OK;
}

/* ---- the drawing ---- */

typedef struct canvas {
    int width, height;        /* in characters */
    int dots_across, dots_up; /* of a character */
    unsigned char *dots;      /* [height * dots_up][width * dots_across], the lowest row first */
} canvas;

static int dots_wide(const canvas *on) {
    return on->width * on->dots_across;
}

/* A column from the last height to this one, so that the curve has no gaps where it is steep. */
static void draw_column(canvas *on, int x, int from, int to) {
    int low = from < to ? from : to, high = from < to ? to : from;
    for (int y = low; y <= high; y++)
        on->dots[(size_t)y * (size_t)dots_wide(on) + (size_t)x] = 1;
}

static void draw_curve(canvas *on, const double *curve, int64_t count, double top) {
    int wide = dots_wide(on), tall = on->height * on->dots_up, before = -1;
    for (int x = 0; x < wide; x++) {
        int64_t step = wide > 1 ? (int64_t)((double)x * (double)(count - 1) / (wide - 1) + 0.5) : 0;
        int y = top > 0 ? (int)(curve[step] / top * (tall - 1) + 0.5) : 0;
        draw_column(on, x, before < 0 ? y : before, y);
        before = y;
    }
}

/* Eight dots as one character: Unicode numbers them down the left column, then the right, the lowest two last. */
static void put_cell(const canvas *on, int column, int row) {
    static const unsigned char bits[4][2] = {{0x40, 0x80}, {0x04, 0x20}, {0x02, 0x10}, {0x01, 0x08}};
    unsigned cell = 0;
    for (int y = 0; y < on->dots_up; y++)
        for (int x = 0; x < on->dots_across; x++)
            if (on->dots[(size_t)(row * on->dots_up + y) * (size_t)dots_wide(on) +
                         (size_t)(column * on->dots_across + x)])
                cell |= bits[y][x];
    if (on->dots_across == 1)
        putchar(cell ? '*' : ' ');
    else if (!cell)
        putchar(' ');
    else
        printf("\xe2%c%c", 0xa0 | (int)(cell >> 6), 0x80 | (int)(cell & 0x3f));
}

static void print_canvas(const canvas *on, const char *title, double top, int64_t last) {
    printf("\n%s\n", title);
    for (int row = on->height - 1; row >= 0; row--) {
        if (row == on->height - 1 || row == on->height / 2 || row == 0)
            printf("%10.3g |", top * row / (on->height - 1));
        else
            printf("%10s |", "");
        for (int column = 0; column < on->width; column++)
            put_cell(on, column, row);
        puts("");
    }
    printf("%10s +", "");
    for (int column = 0; column < on->width; column++)
        putchar('-');
    printf("\n%10s  1%*" PRId64 "\n", "step", on->width - 1, last);
}

/* The curves from first to last in one drawing. */
static loom_status draw(const plan *of, const char *title, int first, int last) {
    struct winsize size;
    bool terminal = isatty(STDOUT_FILENO);
    bool fine = terminal && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
    int columns = terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
    int width = columns - MARGIN < 20 ? 20 : columns - MARGIN > WIDEST ? WIDEST : columns - MARGIN;
    canvas on = {width, HEIGHT, fine ? 2 : 1, fine ? 4 : 1, NULL};
    double top = 0;
    on.dots = calloc((size_t)(dots_wide(&on) * on.height * on.dots_up), 1);
    if (!on.dots)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a drawing");
    for (int i = first; i <= last; i++)
        for (int64_t step = 0; step < of->count; step++)
            top = of->curves[i][step] > top ? of->curves[i][step] : top;
    for (int i = first; i <= last; i++)
        draw_curve(&on, of->curves[i], of->count, top);
    print_canvas(&on, title, top, of->count);
    free(on.dots);
    return LOOM_OK;
}

static loom_status print_text(const plan *of) {
    printf("%8s  %12s%s  %12s\n", "step", "lr", of->decoupled ? "   embeddings" : "", "weight_decay");
    for (int64_t step = 0; step < of->count; step++) {
        printf("%8" PRId64 "  %12.6g", step + 1, of->curves[LR][step]);
        if (of->decoupled)
            printf(" %12.6g", of->curves[EMBEDDINGS][step]);
        printf("  %12.6g\n", of->curves[DECAY][step]);
    }
    const char *title = of->decoupled ? "learning rate, and that of embeddings" : "learning rate";
    LOOM_TRY(draw(of, title, LR, of->decoupled ? EMBEDDINGS : LR));
    return of->ramp ? draw(of, "weight decay", DECAY, DECAY) : LOOM_OK;
}

/* ---- JSON ---- */

static json_t *groups_json(const plan *of) {
    json_t *groups = json_pack("[{s:s}, {s:s, s:i}]", "name", "weights", "name", "no_weight_decay", "wd_mult", 0);
    const loom_optimizer_config *optim = &of->config->optim;
    if (of->decoupled)
        json_array_append_new(
            groups, json_pack("{s:s, s:f, s:f}", "name", "embedding_and_output", "max_lr", optim->decoupled_lr,
                        "min_lr", optim->decoupled_min_lr > 0 ? optim->decoupled_min_lr : optim->min_lr));
    return groups;
}

static loom_status print_json(const plan *of) {
    json_t *rows = json_array();
    for (int64_t step = 0; step < of->count; step++) {
        double lr = of->curves[LR][step], decay = of->curves[DECAY][step];
        json_t *row = json_pack("[I, f, f, f, f]", (json_int_t)step, lr, decay, lr, 0.0);
        if (of->decoupled) {
            json_array_append_new(row, json_real(of->curves[EMBEDDINGS][step]));
            json_array_append_new(row, json_real(decay));
        }
        json_array_append_new(rows, row);
    }
    json_t *root = json_pack("{s:s, s:I, s:o, s:o}", "schedule", of->config->lr.schedule, "steps",
        (json_int_t)of->run_steps, "groups", groups_json(of), "rows", rows);
    int failed = !root || json_dumpf(root, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17)) != 0;
    json_decref(root);
    if (failed)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the schedule, or it cannot be written");
    puts("");
    return LOOM_OK;
}

/* ---- the command ---- */

typedef struct arguments {
    int64_t steps;
    bool json;
    loom_cli_run_arguments run;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'n':
        to->steps = loom_cli_integer("--steps", text, 1, INT64_MAX, state);
        return 0;
    case 'j':
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        if (!to->run.path && !to->run.override_count)
            argp_error(state, "give a run file or overrides");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static loom_status show(const arguments *given) {
    loom_run_config *config;
    plan of = {0};
    LOOM_TRY(loom_run_config_load(given->run.path, given->run.overrides, given->run.override_count, &config));
    loom_status status = make_plan(config, given->steps, &of);
    if (!status) {
        status = given->json ? print_json(&of) : print_text(&of);
        free(of.curves[0]);
    }
    loom_run_config_destroy(config);
    if (!status && (fflush(stdout) != 0 || ferror(stdout)))
        status = loom_fail(LOOM_ERR_IO, "writing to standard output failed");
    return status;
}

int loom_cli_lr(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"steps", 'n', "N", 0, "Show this many steps; all of the run when not given", 0},
        {"json", 'j', NULL, 0, "JSON: rows of updates so far, lr, weight decay, then both of each further group", 0},
        {0}};
    static const struct argp argp = {options, take, "[RUN.yaml] [FIELD=VALUE...]",
        "Prints learning rate and weight decay of each step, and draws them.\v"
        "Steps are numbered as in training: the first is 1. The schedule ends where the run file's steps say; a file "
        "without them takes --steps.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    setlocale(LC_CTYPE, "");
    status = show(&given);
    loom_cli_run_arguments_free(&given.run);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}
