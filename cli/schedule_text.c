/* megaloom schedule, for people: a table of the stages, then their work. */
#include "commands.h"
#include "schedule.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 100, INDENT = 10, ALL_SHOWN = 256, SHOWN_OF_LONG = 64 };

static void print_heading(const loom_cli_schedule_data *schedule) {
    const loom_schedule_config *c = &schedule->config;
    printf("%s: %" PRId64 " stage%s", loom_cli_schedule_name(c), c->stages, c->stages > 1 ? "s" : "");
    if (c->chunks > 1)
        printf(" of %" PRId64 " chunks", c->chunks);
    printf(", %" PRId64 " microbatch%s", c->microbatches, c->microbatches > 1 ? "es" : "");
    if (c->chunks > 1)
        printf(" in groups of %" PRId64, c->group > 0 ? c->group : c->stages);
    printf("\nbubble %.1f %%, a step takes %g\n\n", 100.0 * schedule->result.bubble, schedule->result.makespan);
}

static void print_table(const loom_cli_schedule_data *schedule) {
    printf("%5s %8s %8s %12s %9s %10s %8s\n", "stage", "warm-up", "steady", "activations", "receives", "busy", "idle");
    for (int64_t stage = 0; stage < schedule->config.stages; stage++) {
        const loom_schedule_stage_result *r = &schedule->result.stage[stage];
        double makespan = schedule->result.makespan, idle = makespan > 0.0 ? 1.0 - r->busy / makespan : 0.0;
        loom_schedule_counts counts;
        loom_schedule_count(&schedule->config, stage, &counts);
        printf("%5" PRId64 " %8" PRId64 " %8" PRId64 " %12" PRId64 " %9" PRId64 " %10g %6.1f %%\n", stage,
            counts.warmup, counts.remaining, r->activations, r->receives, r->busy, 100.0 * idle);
    }
}

/* Words, broken at blanks. Of a long list the begin and the end tell what it is like. */
static void print_work(int64_t stage, const char *text) {
    int64_t words = 1, word = 0;
    for (const char *at = text; *at; at++)
        words += *at == ' ';
    char name[32];
    snprintf(name, sizeof name, "stage %" PRId64, stage);
    int column = printf("%-*s", INDENT - 1, name);
    for (const char *at = text; *at; word++) {
        size_t length = strcspn(at, " ");
        bool hidden = words > ALL_SHOWN && word >= SHOWN_OF_LONG && word < words - SHOWN_OF_LONG;
        char gap[64] = "";
        if (hidden && word == SHOWN_OF_LONG)
            snprintf(gap, sizeof gap, "… %" PRId64 " more …", words - 2 * (int64_t)SHOWN_OF_LONG);
        if (!hidden || *gap) {
            int width = (int)(hidden ? strlen(gap) : length);
            if (column + 1 + width > COLUMNS)
                column = printf("\n%*s", INDENT - 1, "") - 1;
            column += printf(" %.*s", width, hidden ? gap : at);
        }
        at += length + (at[length] == ' ');
    }
    putchar('\n');
}

loom_status loom_cli_schedule_text(const loom_cli_schedule_data *schedule) {
    print_heading(schedule);
    print_table(schedule);
    putchar('\n');
    for (int64_t stage = 0; stage < schedule->config.stages; stage++) {
        char *text;
        LOOM_TRY(loom_schedule_notation(&schedule->config, &schedule->lists[stage], false, false, &text));
        print_work(stage, text);
        free(text);
    }
    return LOOM_OK;
}
