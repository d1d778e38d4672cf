/* Whole texts of UTF-8: most are ASCII, which is passed eight bytes at a time. */
#include "data/utf8.h"

#include <stdint.h>
#include <string.h>
#include <utf8proc.h>

size_t loom__utf8_valid(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint64_t eight;
        if (bytes - at >= 8 && (memcpy(&eight, text + at, 8), (eight & UINT64_C(0x8080808080808080)) == 0)) {
            at += 8;
            continue;
        }
        utf8proc_int32_t letter;
        utf8proc_ssize_t length =
            utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(bytes - at), &letter);
        if (length < 0)
            break;
        at += (size_t)length;
    }
    return at;
}
