/* megaloom schedule --json: one object. Keys and notation are those of the golden order and tables; what the simulation
 * says comes beside them. */
#include "commands.h"
#include "schedule.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static loom_status print_rows(const loom_cli_schedule_data *schedule, const char *key, bool messages, bool syncs) {
    printf(",\n\"%s\":[", key);
    for (int64_t stage = 0; stage < schedule->config.stages; stage++) {
        char *text;
        LOOM_TRY(loom_schedule_notation(&schedule->config, &schedule->lists[stage], messages, syncs, &text));
        printf("%s\"%s\"", stage > 0 ? ",\n" : "", text);
        free(text);
    }
    putchar(']');
    return LOOM_OK;
}

static void print_tables(const loom_schedule_config *c) {
    loom_schedule_counts counts;
    printf(",\n\"counts\":[");
    for (int64_t stage = 0; stage < c->stages; stage++) {
        loom_schedule_count(c, stage, &counts);
        printf("%s[%" PRId64 ",%d,%" PRId64 ",%" PRId64 "]", stage > 0 ? "," : "", counts.total, counts.all_in_warmup,
            counts.warmup, counts.remaining);
    }
    putchar(']');
    if (c->chunks < 2)
        return;
    int64_t microbatch;
    int32_t chunk;
    loom_schedule_count(c, 0, &counts);
    printf(",\n\"microbatch\":[");
    for (int64_t i = 0; i < counts.total; i++) {
        loom_schedule_virtual_microbatch(c, i, false, &microbatch, &chunk);
        printf("%s%" PRId64, i > 0 ? "," : "", microbatch);
    }
    printf("],\n\"chunk\":[");
    for (int64_t i = 0; i < counts.total; i++) {
        loom_schedule_virtual_microbatch(c, i, false, &microbatch, &chunk);
        printf("%s%d", i > 0 ? "," : "", chunk);
    }
    putchar(']');
}

loom_status loom_cli_schedule_json(const loom_cli_schedule_data *schedule) {
    const loom_schedule_config *c = &schedule->config;
    const loom_schedule_result *r = &schedule->result;
    printf("{\"pp\":%" PRId64 ",\"vp\":", c->stages);
    if (c->chunks > 1)
        printf("%" PRId64, c->chunks);
    else
        printf("null");
    printf(",\"num_microbatches\":%" PRId64 ",\"group\":%" PRId64
           ",\"schedule\":\"%s\",\"forward_only\":%d,\"mode\":\"%s\"",
        c->microbatches, c->group > 0 ? c->group : c->stages,
        c->kind == LOOM_SCHEDULE_ZERO_BUBBLE ? "zero-bubble" : "1f1b", c->forward_only,
        c->align_sync ? "sync" : "batch");
    LOOM_TRY(print_rows(schedule, "order", false, false));
    /* As in the golden files, where mode sync has no messages. */
    LOOM_TRY(print_rows(schedule, "full", !c->align_sync, true));
    print_tables(c);
    printf(",\n\"makespan\":%.17g,\"bubble\":%.17g,\"activations\":[", r->makespan, r->bubble);
    for (int64_t stage = 0; stage < c->stages; stage++)
        printf("%s%" PRId64, stage > 0 ? "," : "", r->stage[stage].activations);
    printf("],\"receives\":[");
    for (int64_t stage = 0; stage < c->stages; stage++)
        printf("%s%" PRId64, stage > 0 ? "," : "", r->stage[stage].receives);
    printf("],\"busy\":[");
    for (int64_t stage = 0; stage < c->stages; stage++)
        printf("%s%.17g", stage > 0 ? "," : "", r->stage[stage].busy);
    printf("]}\n");
    return LOOM_OK;
}
