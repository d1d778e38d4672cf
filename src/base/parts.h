/* Cutting a count in parts as equal as they can be: the first ones have one more. One definition, since shards of a
 * model, chunks of a collective and groups of encoder ranks must meet at the same borders. */
#ifndef BASE_PARTS_H
#define BASE_PARTS_H

#include <stdint.h>

/* The first element of part `place` of `size`; part size-1 ends at loom__part_begin(count, size, size) = count. */
static inline int64_t loom__part_begin(int64_t count, int64_t size, int64_t place) {
    int64_t rest = count % size;
    return count / size * place + (place < rest ? place : rest);
}

#endif
