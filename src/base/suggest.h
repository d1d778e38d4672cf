/* The nearest legal values of what faults name, found by trying: a value is offered only after all checks have been
 * made with it. */
#ifndef BASE_SUGGEST_H
#define BASE_SUGGEST_H

#include "base/faults.h"

/* A number or a flag that faults may name and that could have another value. */
typedef struct loom__variable {
    const char *name; /* as faults say it: a word of its own, behind a dot or not */
    int64_t *number;  /* NULL: a flag */
    bool *flag;
    int64_t low, high;  /* of a number */
    int64_t stands_for; /* the value that a number of 0 stands for; 0: it is not given, and no number is offered */
    bool nullable;      /* a number of 0 is legal in itself, and told as null */
} loom__variable;

/* check: adds the faults of the variables as they are now, without suggestions, whatever their values in range are. */
typedef struct loom__trial {
    const loom__variable *variables;
    int64_t count;
    void (*check)(void *context, loom__faults *faults);
    void *context;
} loom__trial;

enum { LOOM__VARIABLES_MAX = 128 };

/* The largest integer of a run file. */
#define LOOM__NUMBER_MAX ((int64_t)1 << 53)

/* Appends "; nearest legal A 2 or 4, or B 3" to each line that trial->check finds as well. Each value is of a variable
 * that the line names; put in alone it mends the line, and all other lines of its variable that some value of it mends,
 * and brings no new fault. Where one value of the variable mends everything, all that are offered do. Variables are as
 * they were in the end. */
void loom__faults_suggest(loom__faults *faults, const loom__trial *trial);

#endif
