/* Small questions about strings. */
#ifndef BASE_TEXT_H
#define BASE_TEXT_H

#include <stdbool.h>

bool loom__ends_with(const char *text, const char *end);
/* Whether the bytes are UTF-8 as RFC 3629 has it: shortest forms, no surrogates, nothing above U+10FFFF. */
bool loom__is_utf8(const char *text);

#endif
