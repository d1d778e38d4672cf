/* Split strings from anyone. What is taken are shares of [0, 1] in rising order, of which the last one given ends at 1;
 * and whatever the count, the bounds they give lie in order inside it. */
#include <megaloom/data.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void use(double shares[LOOM_SPLIT_COUNT][2], int64_t count) {
    int64_t last = 0;
    for (int i = 0; i < LOOM_SPLIT_COUNT; i++) {
        int64_t first, end;
        loom_data_split_bounds(shares[i], count, &first, &end);
        if (shares[i][0] < 0 ? first != 0 || end != 0 : first < last || end < first || end > count)
            abort();
        last = shares[i][0] < 0 ? last : end;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1);
    if (!text)
        return 0;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    double shares[LOOM_SPLIT_COUNT][2];
    if (loom_data_split_parse(text, shares) == LOOM_OK) {
        double last = 0;
        for (int i = 0; i < LOOM_SPLIT_COUNT; i++) {
            if (shares[i][0] == -1 ? shares[i][1] != -1 : !(shares[i][0] >= last && shares[i][1] > shares[i][0]))
                abort();
            last = shares[i][0] < 0 ? last : shares[i][1];
        }
        if (!(last > 0.999999 && last < 1.000001))
            abort();
        use(shares, 0);
        use(shares, 1000);
        use(shares, 1000000007);
    }
    free(text);
    return 0;
}
