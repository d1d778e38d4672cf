/* Names: what a user may have meant who wrote one that there is not. */
#ifndef MEGALOOM_NAMES_H
#define MEGALOOM_NAMES_H

#include <megaloom/status.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The candidate that takes the fewest edits (insert, delete, replace, swap of neighbours; in bytes) to reach from
 * `name`, the first of several; NULL when none takes at most a third of the name's length, since a worse guess
 * misleads. Names longer than 95 bytes are near to none. Borrows everything; the answer is one of the candidates. */
LOOM_API const char *loom_nearest_name(const char *name, const char *const *candidates, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
