/* Optimal string alignment with three rolling rows; the allowed distance only shrinks while names are offered, so the
 * first of equally near names wins and the answer depends on the order of the list alone. */
#include "base/nearest.h"
#include <megaloom/names.h>
#include <stddef.h>
#include <string.h>

enum { NAME_MAX_BYTES = 95 };

static int smaller(int a, int b) {
    return a < b ? a : b;
}

int loom__edit_distance(const char *a, const char *b, int limit) {
    size_t length_a = strnlen(a, NAME_MAX_BYTES + 1), length_b = strnlen(b, NAME_MAX_BYTES + 1);
    if (length_a > NAME_MAX_BYTES || length_b > NAME_MAX_BYTES)
        return limit + 1;
    int rows[3][NAME_MAX_BYTES + 1];
    for (size_t j = 0; j <= length_b; j++)
        rows[0][j] = (int)j;
    for (size_t i = 1; i <= length_a; i++) {
        int *now = rows[i % 3], *last = rows[(i - 1) % 3], *before = rows[(i + 1) % 3];
        int lowest = now[0] = (int)i;
        for (size_t j = 1; j <= length_b; j++) {
            int cost = last[j - 1] + (a[i - 1] != b[j - 1]);
            cost = smaller(cost, smaller(last[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                cost = smaller(cost, before[j - 2] + 1);
            now[j] = cost;
            lowest = smaller(lowest, cost);
        }
        /* A swap reaches back two rows, so one row above the limit is not yet the end; two above is. */
        if (lowest > limit + 1)
            return limit + 1;
    }
    return smaller(rows[length_a % 3][length_b], limit + 1);
}

void loom__nearest_begin(loom__nearest *nearest, const char *word) {
    size_t length = strnlen(word, NAME_MAX_BYTES + 1);
    nearest->word = word;
    nearest->best = NULL;
    nearest->distance = (int)(length < 3 ? 1 : length / 3 + 1) + 1;
}

void loom__nearest_offer(loom__nearest *nearest, const char *name) {
    int distance = loom__edit_distance(nearest->word, name, nearest->distance - 1);
    if (distance < nearest->distance) {
        nearest->distance = distance;
        nearest->best = name;
    }
}

const char *loom_nearest_name(const char *name, const char *const *candidates, int64_t count) {
    loom__nearest nearest = {.word = name, .distance = (int)(strnlen(name, NAME_MAX_BYTES + 1) / 3) + 1};
    for (int64_t i = 0; i < count; i++)
        loom__nearest_offer(&nearest, candidates[i]);
    return nearest.best;
}
