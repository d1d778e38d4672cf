/* Small questions about strings that several rooms ask; nothing here knows a locale. */
#include "base/text.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

bool loom__ends_with(const char *text, const char *end) {
    size_t length = strlen(text), wanted = strlen(end);
    return length >= wanted && strcmp(text + length - wanted, end) == 0;
}

bool loom__is_utf8(const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    while (*at) {
        unsigned lead = *at++;
        if (lead < 0x80)
            continue;
        int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4)
            return false;
        uint32_t letter = lead & (0x3fU >> more);
        for (int i = 0; i < more; i++, at++) {
            if ((*at & 0xc0) != 0x80)
                return false;
            letter = letter << 6 | (*at & 0x3fU);
        }
        if (letter < (more == 3      ? 0x10000U
                         : more == 2 ? 0x800U
                                     : 0x80U) ||
            letter > 0x10ffff || (letter >= 0xd800 && letter < 0xe000))
            return false;
    }
    return true;
}
