/* Blends. Each sample goes to the dataset that is furthest behind its share at that place, the first of them where
 * several are: the order is a function of the shares alone, and the arithmetic, doubles in this order, is
 * Megatron-Core's. */
#include "data/blend.h"

#include <math.h>
#include <stdlib.h>

enum { MOST_PARTS = INT16_MAX };

static loom_status check_count(int64_t count) {
    if (count < 1 || count > MOST_PARTS)
        return loom_fail(LOOM_ERR_CONFIG, "a blend of %lld datasets, expected 1 to %d", (long long)count, MOST_PARTS);
    return LOOM_OK;
}

static loom_status no_memory(int64_t count, const char *what) {
    return loom_fail(LOOM_ERR_MEMORY, "no memory for a blend of %lld %s", (long long)count, what);
}

/* The open dataset that is furthest behind at sample i; open NULL: all are. */
static int64_t furthest_behind(
    const double *weights, const int64_t *given, const bool *open, int64_t count, int64_t i) {
    double place = i > 1 ? (double)i : 1.0, largest = -INFINITY;
    int64_t found = 0;
    for (int64_t k = 0; k < count; k++) {
        double behind = weights[k] * place - (double)given[k];
        if ((!open || open[k]) && behind > largest) {
            largest = behind;
            found = k;
        }
    }
    return found;
}

loom_status loom_data_blend_by_weight(
    const double *weights, int64_t count, int64_t size, int16_t *dataset, int64_t *sample) {
    LOOM_TRY(check_count(count));
    int64_t *given = calloc((size_t)count, sizeof *given);
    if (!given)
        return no_memory(count, "datasets");
    for (int64_t i = 0; i < size; i++) {
        int64_t k = furthest_behind(weights, given, NULL, count, i);
        dataset[i] = (int16_t)k;
        sample[i] = given[k]++;
    }
    free(given);
    return LOOM_OK;
}

static int64_t sum_of(const int64_t *sizes, int64_t count) {
    int64_t sum = 0;
    for (int64_t k = 0; k < count; k++)
        sum += sizes[k];
    return sum;
}

loom_status loom_data_blend_by_size(const int64_t *sizes, int64_t count, int16_t *dataset, int64_t *sample) {
    LOOM_TRY(check_count(count));
    int64_t size = sum_of(sizes, count), *given = calloc((size_t)count, sizeof *given);
    double *weights = calloc((size_t)count, sizeof *weights);
    bool *open = calloc((size_t)count, sizeof *open);
    loom_status status = given && weights && open ? LOOM_OK : no_memory(count, "datasets");
    for (int64_t k = 0; !status && k < count; k++) {
        weights[k] = (double)sizes[k] / (double)size;
        open[k] = sizes[k] > 0;
    }
    for (int64_t i = 0; !status && i < size; i++) {
        int64_t k = furthest_behind(weights, given, open, count, i);
        dataset[i] = (int16_t)k;
        sample[i] = given[k]++;
        open[k] = given[k] < sizes[k];
    }
    free(given);
    free(weights);
    free(open);
    return status;
}

int64_t loom_data_blend_share(double weight, int64_t size, double surplus) {
    return (int64_t)ceil(ceil((double)size * weight) * (1.0 + surplus));
}

/* numpy's sum: eight partial sums, and halves of what has more than 128 terms. */
static double pairwise_sum(const double *values, int64_t count) {
    if (count > 128) {
        int64_t half = count / 2 - count / 2 % 8;
        return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
    }
    double sum = 0.0;
    int64_t i = 0;
    if (count >= 8) {
        double part[8] = {0};
        for (; i + 8 <= count; i += 8)
            for (int k = 0; k < 8; k++)
                part[k] = i ? part[k] + values[i + k] : values[k];
        sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
    for (; i < count; i++)
        sum += values[i];
    return sum;
}

void loom_data_blend_normalize(double *weights, int64_t count) {
    double sum = pairwise_sum(weights, count);
    for (int64_t i = 0; i < count; i++)
        weights[i] /= sum;
}

static bool is_number(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    if (end == text)
        return false;
    return end[strspn(end, " \t\n\r\f\v")] == '\0';
}

loom_status loom_data_blend_from_list(
    const char *const *list, int64_t length, double *weights, const char **prefixes, int64_t *count, bool *weighted) {
    if (length < 1)
        return loom_fail(
            LOOM_ERR_CONFIG, "an empty list of datasets, expected prefixes, or weights and prefixes in turn");
    int64_t numbers = 0;
    for (int64_t i = 0; i < length; i += 2) {
        double value;
        numbers += is_number(list[i], &value);
    }
    *weighted = length % 2 == 0 && numbers > 0;
    if (*weighted && numbers != length / 2)
        return loom_fail(LOOM_ERR_CONFIG, "%lld of %lld datasets have a weight, expected all or none of them",
            (long long)numbers, (long long)(length / 2));
    *count = *weighted ? length / 2 : length;
    for (int64_t i = 0; i < *count; i++) {
        prefixes[i] = list[*weighted ? 2 * i + 1 : i];
        weights[i] = 1.0;
        if (*weighted && is_number(list[2 * i], &weights[i]) && !(weights[i] > 0.0 && isfinite(weights[i])))
            return loom_fail(
                LOOM_ERR_CONFIG, "weight of '%.200s' is %.60s, expected a number above 0", prefixes[i], list[2 * i]);
    }
    return LOOM_OK;
}

/* ---- The dataset ---- */

static loom_status blend_get(void *context, int64_t index, const loom_sample_row *row);

const loom__blend *loom__blend_of(const loom_dataset *dataset) {
    return dataset->get == blend_get ? dataset->context : NULL;
}

static loom_status blend_get(void *context, int64_t index, const loom_sample_row *row) {
    const loom__blend *blend = context;
    if (index < 0) {
        const loom_dataset *first = &blend->parts[blend->dataset[0]];
        return first->get(first->context, -1, row);
    }
    const loom_dataset *part = &blend->parts[blend->dataset[index]];
    return part->get(part->context, blend->sample[index], row);
}

static void blend_locate(void *context, int64_t index, char *text, size_t bytes) {
    const loom__blend *blend = context;
    const loom_dataset *part = &blend->parts[blend->dataset[index < 0 ? 0 : index]];
    if (part->locate)
        part->locate(part->context, index < 0 ? 0 : blend->sample[index], text, bytes);
    else if (bytes > 0)
        *text = '\0';
}

/* Without the parts. */
static void blend_free(loom__blend *blend) {
    if (!blend)
        return;
    free(blend->parts);
    free(blend->dataset);
    free(blend->sample);
    free(blend);
}

static void blend_destroy(void *context) {
    loom__blend *blend = context;
    for (int64_t k = 0; k < blend->count; k++)
        loom_dataset_destroy(&blend->parts[k]);
    blend_free(blend);
}

/* Each part must have as many samples as the blend asks of it. */
static loom_status check_enough(const loom__blend *blend, int64_t length) {
    int64_t *asked = calloc((size_t)blend->count, sizeof *asked);
    if (!asked)
        return no_memory(blend->count, "datasets");
    for (int64_t i = 0; i < length; i++)
        asked[blend->dataset[i]]++;
    loom_status status = LOOM_OK;
    for (int64_t k = 0; !status && k < blend->count; k++)
        if (asked[k] > blend->parts[k].length)
            status = loom_fail(LOOM_ERR_CONFIG,
                "the blend asks %lld samples of its dataset %lld, which has %lld: ask for a larger surplus",
                (long long)asked[k], (long long)k, (long long)blend->parts[k].length);
    free(asked);
    return status;
}

/* Shares of the parts: the weights, or their lengths where there are none. A share of nothing would be chosen now and
 * then, so there must be none. */
static loom_status make_shares(const loom__blend *blend, const double *weights, double *shares) {
    for (int64_t k = 0; k < blend->count; k++) {
        shares[k] = weights ? weights[k] : (double)blend->parts[k].length;
        if (weights && !(weights[k] > 0.0 && isfinite(weights[k])))
            return loom_fail(
                LOOM_ERR_CONFIG, "weight %lld of the blend is %g, expected a number above 0", (long long)k, weights[k]);
        if (!weights && blend->parts[k].length < 1)
            return loom_fail(LOOM_ERR_CONFIG,
                "dataset %lld of the blend has no sample: leave it out, or give its part a larger share", (long long)k);
    }
    loom_data_blend_normalize(shares, blend->count);
    return LOOM_OK;
}

static loom_status order(loom__blend *blend, const double *weights, int64_t size, int64_t *length) {
    double *shares = calloc((size_t)blend->count, sizeof *shares);
    int64_t *sizes = calloc((size_t)blend->count, sizeof *sizes);
    loom_status status = shares && sizes ? make_shares(blend, weights, shares) : no_memory(blend->count, "datasets");
    for (int64_t k = 0; !status && k < blend->count; k++)
        sizes[k] = blend->parts[k].length;
    int64_t all = status ? 0 : sum_of(sizes, blend->count);
    *length = size < 0 || (!weights && size > all) ? all : size;
    if (!status) {
        blend->dataset = malloc((size_t)*length * sizeof *blend->dataset + 1);
        blend->sample = malloc((size_t)*length * sizeof *blend->sample + 1);
        if (!blend->dataset || !blend->sample)
            status = no_memory(*length, "samples");
    }
    if (!status)
        status = size < 0 ? loom_data_blend_by_size(sizes, blend->count, blend->dataset, blend->sample)
                          : loom_data_blend_by_weight(shares, blend->count, *length, blend->dataset, blend->sample);
    free(shares);
    free(sizes);
    return status ? status : check_enough(blend, *length);
}

static loom_status check_parts(const loom_dataset *datasets, const double *weights, int64_t count, int64_t size) {
    LOOM_TRY(check_count(count));
    if (weights && size < 0)
        return loom_fail(LOOM_ERR_CONFIG, "a blend with weights needs a number of samples: give one, or no weights");
    for (int64_t k = 1; k < count; k++)
        if (datasets[k].sequence_length != datasets[0].sequence_length ||
            datasets[k].document_boundaries != datasets[0].document_boundaries)
            return loom_fail(LOOM_ERR_CONFIG,
                "datasets of a blend must agree: number %lld has sequences of %lld, number 0 of %lld", (long long)k,
                (long long)datasets[k].sequence_length, (long long)datasets[0].sequence_length);
    return LOOM_OK;
}

loom_status loom_blended_dataset_create(
    const loom_dataset *datasets, const double *weights, int64_t count, int64_t size, loom_dataset *dataset) {
    LOOM_TRY(check_parts(datasets, weights, count, size));
    loom__blend *blend = calloc(1, sizeof *blend);
    if (blend)
        blend->parts = malloc((size_t)count * sizeof *blend->parts);
    int64_t length = 0;
    loom_status status = LOOM_OK;
    if (!blend || !blend->parts) {
        status = no_memory(count, "datasets");
    } else {
        blend->count = count;
        memcpy(blend->parts, datasets, (size_t)count * sizeof *datasets);
        status = order(blend, weights, size, &length);
    }
    if (status != LOOM_OK) {
        blend_free(blend);
        return status;
    }
    *dataset = (loom_dataset){.context = blend,
        .length = length,
        .sequence_length = datasets[0].sequence_length,
        .document_boundaries = datasets[0].document_boundaries,
        .get = blend_get,
        .locate = blend_locate,
        .destroy = blend_destroy};
    return LOOM_OK;
}
