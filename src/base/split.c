/* Split strings: "98,1,1" to shares of [0, 1], and shares to ranges. Every sum and rounding is done in the order and
 * precision of the reference (doubles, left to right, half to even), because one document more in a split moves all. */
#include <megaloom/data.h>

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char separators[] = ",;/ \t";

static loom_status not_a_split(const char *split, const char *why) {
    return loom_fail(LOOM_ERR_CONFIG,
        "split is '%.100s': %s, expected up to three shares of train, valid and test, such as 98,1,1", split, why);
}

/* One number of digits and at most one point, whatever the locale's decimal point is. */
static bool read_number(const char *text, size_t length, double *value) {
    char copy[64];
    size_t digits = 0, points = 0;
    for (size_t i = 0; i < length; i++) {
        digits += text[i] >= '0' && text[i] <= '9';
        points += text[i] == '.';
    }
    if (digits == 0 || points > 1 || digits + points != length || length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain == (locale_t)0)
        return false;
    *value = strtod_l(copy, NULL, plain);
    freelocale(plain);
    return true;
}

loom_status loom_data_split_intersect(
    const double a[LOOM_SPLIT_COUNT], const double b[LOOM_SPLIT_COUNT], double shares[LOOM_SPLIT_COUNT][2]) {
    double begin_a = 0.0, begin_b = 0.0;
    for (int i = 0; i < LOOM_SPLIT_COUNT; i++) {
        if (!(a[i] >= 0.0) || !(b[i] >= 0.0))
            return loom_fail(LOOM_ERR_CONFIG, "share %d of a split is %g and %g, expected at least 0", i, a[i], b[i]);
        double end_a = begin_a + a[i], end_b = begin_b + b[i];
        double begin = begin_a > begin_b ? begin_a : begin_b, end = end_a < end_b ? end_a : end_b;
        shares[i][0] = end > begin ? begin : -1.0;
        shares[i][1] = end > begin ? end : -1.0;
        begin_a = end_a;
        begin_b = end_b;
    }
    return LOOM_OK;
}

loom_status loom_data_split_parse(const char *split, double shares[LOOM_SPLIT_COUNT][2]) {
    double parts[LOOM_SPLIT_COUNT] = {0}, sum = 0.0;
    int count = 0;
    for (const char *at = split + strspn(split, separators); *at; at += strspn(at, separators)) {
        size_t length = strcspn(at, separators);
        if (count == LOOM_SPLIT_COUNT)
            return not_a_split(split, "it has more than three shares");
        if (!read_number(at, length, &parts[count]))
            return not_a_split(split, "a share is no plain number");
        sum += parts[count++];
        at += length;
    }
    if (!(sum > 0.0) || isinf(sum))
        return not_a_split(split, "its sum is not above 0");
    for (int i = 0; i < LOOM_SPLIT_COUNT; i++)
        parts[i] /= sum;
    return loom_data_split_intersect(parts, parts, shares);
}

void loom_data_split_bounds(const double share[2], int64_t count, int64_t *first, int64_t *end) {
    bool none = share[0] < 0.0;
    *first = none ? 0 : (int64_t)nearbyint(share[0] * (double)count);
    *end = none ? 0 : (int64_t)nearbyint(share[1] * (double)count);
}
