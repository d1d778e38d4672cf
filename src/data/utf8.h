/* UTF-8, byte by byte. */
#ifndef DATA_UTF8_H
#define DATA_UTF8_H

#include <stdbool.h>
#include <stddef.h>

#define LOOM__UTF8_REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

/* The bytes of a character that has not come whole. */
typedef struct loom__utf8 {
    unsigned char held[4];
    size_t count;
} loom__utf8;

/* Bytes of the character that begins with this byte; 0 where none does. */
static inline size_t loom__utf8_length(unsigned char first) {
    return first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
}

/* Whether the byte can come next. Surrogates, overlong forms and what lies beyond U+10FFFF end at their second byte. */
static inline bool loom__utf8_may_follow(const loom__utf8 *character, unsigned char byte) {
    unsigned char first = character->held[0], low = 0x80, high = 0xbf;
    if (character->count == 0)
        return loom__utf8_length(byte) > 0;
    if (character->count == 1) {
        low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : low;
        high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : high;
    }
    return byte >= low && byte <= high;
}

/* Takes the byte when it can come next; a whole character leaves count 0. */
static inline bool loom__utf8_take(loom__utf8 *character, unsigned char byte) {
    if (!loom__utf8_may_follow(character, byte))
        return false;
    character->held[character->count++] = byte;
    if (character->count == loom__utf8_length(character->held[0]))
        character->count = 0;
    return true;
}

/* The offset of the first byte that is no UTF-8, or `bytes`. */
size_t loom__utf8_valid(const char *text, size_t bytes);

#endif
