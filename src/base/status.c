/* Status names and the error record. The record is the one piece of per-thread state in the library: whoever detects an
 * error writes it, callers only add context, and the thread that asks reads it. */
#include <megaloom/status.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { RECORD_BYTES = 8192 };
static _Thread_local char record[RECORD_BYTES];

const char *loom_status_name(loom_status status) {
    switch (status) {
#define CASE(name, value, text)                                                                                        \
    case LOOM_##name:                                                                                                  \
        return "LOOM_" #name;
        LOOM_STATUS_LIST(CASE)
#undef CASE
    }
    return "unknown status";
}

const char *loom_status_text(loom_status status) {
    switch (status) {
#define CASE(name, value, text)                                                                                        \
    case LOOM_##name:                                                                                                  \
        return text;
        LOOM_STATUS_LIST(CASE)
#undef CASE
    }
    return "unknown status";
}

const char *loom_error_message(void) {
    return record;
}

void loom_error_clear(void) {
    record[0] = '\0';
}

loom_status loom_fail(loom_status status, const char *format, ...) {
    /* An argument may be the record itself, so the text is made beside it. */
    char text[RECORD_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(record, text, sizeof record);
    return status;
}

loom_status loom_fail_context(loom_status status, const char *format, ...) {
    char text[RECORD_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= 0 && length < RECORD_BYTES)
        snprintf(text + length, sizeof text - (size_t)length, "%s", record);
    memcpy(record, text, sizeof record);
    return status;
}
