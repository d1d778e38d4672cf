/* What the verbs that write a checkpoint share: the bar while they work, and what they say at the end. */
#include "checkpoint.h"
#include "commands.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { WIDTH = 40 };

error_t loom_cli_take_rewrite(
    loom_cli_rewrite_arguments *arguments, int key, const char *text, const struct argp_state *state) {
    switch (key) {
    case 'j':
        arguments->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (arguments->out)
            return ARGP_ERR_UNKNOWN;
        *(arguments->in ? &arguments->out : &arguments->in) = text;
        return 0;
    case ARGP_KEY_END:
        if (!arguments->out)
            argp_error(state, "IN and OUT must be given");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

loom_cli_bar loom_cli_bar_begin(void) {
    return (loom_cli_bar){.shows = isatty(STDERR_FILENO) == 1, .percent = -1};
}

void loom_cli_bar_report(void *context, uint64_t done, uint64_t all) {
    loom_cli_bar *bar = context;
    int percent = all ? (int)(100.0 * (double)done / (double)all) : 100;
    char size[32];
    if (!bar->shows || percent == bar->percent)
        return;
    bar->percent = percent;
    fprintf(stderr, "\r[");
    for (int i = 0; i < WIDTH; i++)
        fputc(i * 100 < percent * WIDTH ? '#' : '.', stderr);
    fprintf(stderr, "] %3d%% of %s ", percent, loom_cli_bytes((double)all, size));
}

void loom_cli_bar_end(loom_cli_bar *bar) {
    if (bar->shows && bar->percent >= 0)
        fprintf(stderr, "\r\033[K");
    bar->percent = -1;
}

static int print_json(const char *out, const loom_tool_outcome *outcome) {
    json_t *root = json_pack("{s:s, s:I, s:I, s:I, s:s, s:I, s:b}", "path", out, "ranks", (json_int_t)outcome->ranks,
        "tensors", (json_int_t)outcome->tensors, "bytes", (json_int_t)outcome->bytes, "optimizer", outcome->form,
        "dropped_objects", (json_int_t)outcome->dropped_objects, "dropped_optimizer",
        outcome->dropped_optimizer ? 1 : 0);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory for the outcome"));
    puts(text);
    free(text);
    return 0;
}

int loom_cli_print_outcome(const char *out, const loom_tool_outcome *outcome, bool json) {
    char size[32];
    if (json)
        return print_json(out, outcome);
    printf("%s: %" PRId64 " tensors, %s", out, outcome->tensors, loom_cli_bytes((double)outcome->bytes, size));
    if (outcome->ranks > 0)
        printf(", as of %" PRId64 " rank%s", outcome->ranks, outcome->ranks == 1 ? "" : "s");
    if (outcome->form[0])
        printf(", optimizer %s", outcome->form);
    printf("\n");
    if (outcome->dropped_optimizer)
        printf("the state of the optimizer was left out\n");
    if (outcome->dropped_objects > 0)
        printf("%" PRId64 " object%s left out\n", outcome->dropped_objects, outcome->dropped_objects == 1 ? "" : "s");
    return 0;
}
