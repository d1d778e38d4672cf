/* A line of JSON lines: an object whose members, by name, are texts. */
#ifndef DATA_JSON_LINE_H
#define DATA_JSON_LINE_H

#include <jansson.h>
#include <megaloom/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A longer line is not parsed, nor kept in memory where that can be avoided. */
enum { LOOM__JSON_LINE_BYTES = 64 << 20 };
/* LOOM_ERR_FORMAT where a line of so many bytes is too long. */
loom_status loom__json_line_check_length(int64_t bytes);

/* The object of the line: json_decref it. NULL where the line is blank. Nothing but JSON's own rules and UTF-8 is asked
 * of it: numbers may have any number of digits, texts may hold a NUL; unless unique, the last of equal names counts.
 * LOOM_ERR_FORMAT says what is wrong and at which byte of the line, without the name of the file. */
loom_status loom__json_line_parse(const char *line, size_t bytes, bool unique, json_t **object);

/* The text of a member, borrowed from the object; LOOM_ERR_FORMAT where it is missing (with the members that there are)
 * or no text. */
loom_status loom__json_line_text(const json_t *object, const char *key, const char **text, size_t *bytes);

#endif
