/* What a message says after "nearest legal". The search for a divisor is bounded, since a message may not take longer
 * than the work it refuses; 1 is always an answer. */
#include "base/legal.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* "below or above"; one that is not positive is left out. */
static loom__legal nearest_pair(int64_t below, int64_t above) {
    loom__legal near = {""};
    if (below > 0 && above > 0)
        snprintf(near.text, sizeof near.text, "%" PRId64 " or %" PRId64, below, above);
    else
        snprintf(near.text, sizeof near.text, "%" PRId64, below > 0 ? below : above);
    return near;
}

loom__legal loom__nearest_divisors(int64_t n, int64_t v) {
    /* The search takes the root of n steps; beyond this bound it would be felt, and 1 divides everything. */
    enum { SEARCH_MAX = 1 << 20 };
    int64_t below = 1, above = n > v ? n : 0;
    for (int64_t d = 1; d <= n / d && d <= SEARCH_MAX; d++) {
        if (n % d != 0)
            continue;
        const int64_t pair[2] = {d, n / d};
        for (int i = 0; i < 2; i++) {
            if (pair[i] < v && pair[i] > below)
                below = pair[i];
            if (pair[i] > v && (above == 0 || pair[i] < above))
                above = pair[i];
        }
    }
    return nearest_pair(below < v ? below : 0, above);
}
