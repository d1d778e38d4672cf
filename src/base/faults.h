/* Collecting every fault of a check before reporting, one a line, so that a user repairs a file in one go. */
#ifndef BASE_FAULTS_H
#define BASE_FAULTS_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LOOM__FAULTS_BYTES = 7168, LOOM__FAULTS_MAX = 50 };

typedef struct loom__faults {
    int64_t count;
    int64_t omitted;    /* faults that were counted but no longer fitted in the text */
    loom_status status; /* of the whole: any other fault outweighs "not supported yet" */
    size_t length;
    /* Where lines about what is not built yet go instead, each once; they are no faults then. NULL = they are. */
    struct loom__faults *not_built;
    char text[LOOM__FAULTS_BYTES]; /* lines, without the last newline */
} loom__faults;

void loom__faults_begin(loom__faults *faults);
void loom__faults_add(loom__faults *faults, loom_status status, const char *format, ...) LOOM_PRINTF(3, 4);
/* Adds each line of this thread's error record, as left by a check that returned `status`; LOOM_OK adds nothing. */
void loom__faults_add_record(loom__faults *faults, loom_status status);
/* Puts `text` at the end of the line that is these `length` characters, where it is among the faults and room is left.
 */
void loom__faults_append(loom__faults *faults, const char *line, size_t length, const char *text);
/* True when so many faults were found that looking for more is no use. */
bool loom__faults_full(const loom__faults *faults);
/* Whether this very line is among the faults. */
bool loom__faults_has(const loom__faults *faults, const char *line);
/* LOOM_OK without faults; otherwise records all of them and returns their status. */
loom_status loom__faults_end(const loom__faults *faults);

#endif
