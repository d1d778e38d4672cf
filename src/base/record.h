/* Text that must fit a fixed buffer: the error record, and the messages that become one. */
#ifndef BASE_RECORD_H
#define BASE_RECORD_H

#include <megaloom/status.h>
#include <stdarg.h>
#include <stddef.h>

enum { LOOM__RECORD_BYTES = 8192 }; /* of a thread's error record, its end counted */

/* The largest number of the text's first `length` bytes that does not end inside a UTF-8 character. */
size_t loom__whole_characters(const char *text, size_t length);

/* vsnprintf that cuts at a whole character and leaves "" when the text cannot be made. Returns the bytes written, the
 * final 0 not counted. */
size_t loom__record_format(char *text, size_t bytes, const char *format, va_list arguments)
    __attribute__((format(printf, 3, 0)));

#endif
