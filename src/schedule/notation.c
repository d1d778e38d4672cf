/* Lists as text, in the notation that golden/pipeline/order.json has. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "schedule/schedule.h"

static const char *const token[LOOM_INSTRUCTION_KINDS] = {
    [LOOM_INSTRUCTION_FORWARD] = "F",
    [LOOM_INSTRUCTION_BACKWARD] = "B",
    [LOOM_INSTRUCTION_BACKWARD_INPUT] = "B",
    [LOOM_INSTRUCTION_BACKWARD_WEIGHT] = "W",
    [LOOM_INSTRUCTION_SEND_NEXT] = "s>",
    [LOOM_INSTRUCTION_SEND_PREVIOUS] = "s<",
    [LOOM_INSTRUCTION_RECEIVE_PREVIOUS] = "r<",
    [LOOM_INSTRUCTION_RECEIVE_NEXT] = "r>",
    [LOOM_INSTRUCTION_SYNC_OFF] = "-sync",
    [LOOM_INSTRUCTION_SYNC_ON] = "+sync",
    [LOOM_INSTRUCTION_GRAD_SYNC] = "G",
    [LOOM_INSTRUCTION_PARAM_SYNC] = "P",
};

enum { LONGEST_TOKEN = 40 }; /* a blank, a letter, two numbers, a point, the end */

static int put(char *text, const loom_instruction *at, bool chunks) {
    if (!loom_instruction_computes(at->kind))
        return at->kind >= LOOM_INSTRUCTION_GRAD_SYNC
                   ? snprintf(text, LONGEST_TOKEN, "%s%d", token[at->kind], at->chunk)
                   : snprintf(text, LONGEST_TOKEN, "%s", token[at->kind]);
    if (!chunks)
        return snprintf(text, LONGEST_TOKEN, "%s%" PRId64, token[at->kind], at->microbatch);
    return snprintf(text, LONGEST_TOKEN, "%s%" PRId64 ".%d", token[at->kind], at->microbatch, at->chunk);
}

loom_status loom_schedule_notation(
    const loom_schedule_config *config, const loom_schedule_list *list, bool messages, bool syncs, char **text) {
    size_t room = 0, used = 0;
    char *made = NULL, *grown;
    int64_t exchange = -1;
    for (int64_t i = 0; i <= list->count; i++) {
        if (room - used < LONGEST_TOKEN) {
            room = room > 0 ? room * 2 : 256;
            grown = realloc(made, room);
            if (!grown) {
                free(made);
                return loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a schedule");
            }
            made = grown;
            made[used] = '\0';
        }
        if (i == list->count)
            break;
        const loom_instruction *at = &list->instructions[i];
        bool computes = loom_instruction_computes(at->kind),
             message = !computes && at->kind < LOOM_INSTRUCTION_SYNC_OFF;
        if ((unsigned)at->kind >= LOOM_INSTRUCTION_KINDS || (!computes && !(message ? messages : syncs)))
            continue;
        if (used > 0 && !(message && at->exchange >= 0 && at->exchange == exchange))
            made[used++] = ' ';
        exchange = at->exchange;
        used += (size_t)put(made + used, at, config->chunks > 1);
    }
    *text = made;
    return LOOM_OK;
}
