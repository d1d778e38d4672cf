/* A line of JSON lines: an object whose members, by name, are texts. */
#ifndef DATA_JSON_LINE_H
#define DATA_JSON_LINE_H

#include <jansson.h>
#include <megaloom/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The object of the line: json_decref it. NULL where the line is blank. Nothing but JSON's own rules and UTF-8 is asked
 * of it: numbers may have any number of digits, texts may hold a NUL. LOOM_ERR_FORMAT says what is wrong and at which
 * byte of the line, without the name of the file. */
loom_status loom__json_line_parse(const char *line, size_t bytes, json_t **object);

/* The text of a member, borrowed from the object; LOOM_ERR_FORMAT where it is missing (with the members that there are)
 * or no text. */
loom_status loom__json_line_text(const json_t *object, const char *key, const char **text, size_t *bytes);

#endif
