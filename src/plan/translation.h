/* Building a translation, for the readers of other programs' configurations. */
#ifndef PLAN_TRANSLATION_H
#define PLAN_TRANSLATION_H

#include <megaloom/plan.h>
#include <stdio.h>

enum { LOOM__TRANSLATED_BYTES_MAX = 1 << 20 };

typedef struct loom__translator {
    const char *name; /* of the text, for messages */
    loom_plan_translation made;
    int64_t capacity;
    FILE *left_out, *faults; /* memory streams of made.left_out and made.faults */
    size_t left_out_bytes, fault_bytes;
    loom_status status; /* LOOM_OK, or LOOM_ERR_MEMORY from then on */
} loom__translator;

loom_status loom__translator_begin(loom__translator *translator, const char *name, size_t length);
/* Adds "field=value"; a later one of the same field wins. */
void loom__translator_add(loom__translator *translator, const char *field, const char *value);
void loom__translator_leave_out(loom__translator *translator, const char *format, ...) LOOM_PRINTF(2, 3);
/* The name is put before it. */
void loom__translator_fault(loom__translator *translator, const char *format, ...) LOOM_PRINTF(2, 3);
/* So many ranks on each of so many nodes; 0 of either = not said, which is one. Both 0: nothing is known. */
void loom__translator_set_ranks(loom__translator *translator, int64_t a_node, int64_t nodes);
/* Hands the translation out, or frees it where `status` or the translator has failed. */
loom_status loom__translator_end(loom__translator *translator, loom_status status, loom_plan_translation *out);

/* How both programs spell the values of a field, in the run file's words; the value itself where there is no other. */
const char *loom__translated_value(const char *field, const char *value);

#endif
