/* Status names and the error record. The record is the one piece of per-thread state in the library: whoever detects an
 * error writes it, callers only add context, and the thread that asks reads it. */
#include "base/record.h"
#include <stdio.h>
#include <string.h>

static _Thread_local char record[LOOM__RECORD_BYTES];

size_t loom__whole_characters(const char *text, size_t length) {
    size_t begin = length;
    while (begin > 0 && length - begin < 4) {
        unsigned char byte = (unsigned char)text[--begin];
        if ((byte & 0xc0) == 0x80)
            continue;
        size_t wanted = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
        return begin + wanted > length ? begin : length;
    }
    return length; /* no UTF-8 */
}

size_t loom__record_format(char *text, size_t bytes, const char *format, va_list arguments) {
    int wanted = vsnprintf(text, bytes, format, arguments);
    size_t length = wanted < 0 ? 0 : (size_t)wanted;
    if (length >= bytes)
        length = loom__whole_characters(text, bytes - 1);
    text[length] = '\0';
    return length;
}

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
    char text[LOOM__RECORD_BYTES];
    va_list arguments;
    va_start(arguments, format);
    size_t length = loom__record_format(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(record, text, length + 1);
    return status;
}

loom_status loom_fail_context(loom_status status, const char *format, ...) {
    char text[LOOM__RECORD_BYTES];
    va_list arguments;
    va_start(arguments, format);
    size_t length = loom__record_format(text, sizeof text, format, arguments);
    va_end(arguments);
    size_t rest = strlen(record), room = sizeof text - 1 - length;
    if (rest > room)
        rest = loom__whole_characters(record, room);
    memcpy(text + length, record, rest);
    text[length + rest] = '\0';
    memcpy(record, text, length + rest + 1);
    return status;
}
