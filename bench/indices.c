/* The time to build the three indices of a GPT dataset in memory:
 *
 *   bench_indices DOCUMENTS SEQUENCE_LENGTH EPOCHS ROUNDS
 *
 * Document i has 1 + (2654435761 i mod 2^32) mod 355 tokens, 178 on average. Prints as JSON the median processor time
 * in seconds, and sums over the indices, by which bench/megatron_indices.py sees that both built the same. */
#include "data/gpt.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double processor_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int print(const loom__gpt_indices *indices, int64_t tokens, double seconds) {
    uint64_t sums[3] = {0};
    for (int64_t i = 0; i < indices->documents; i++)
        sums[0] += (uint64_t)(i + 1) * indices->document_index[i];
    for (int64_t i = 0; i <= indices->samples; i++)
        sums[1] += (uint64_t)(i + 1) * (uint64_t)(indices->sample_index[i].place + indices->sample_index[i].offset);
    for (int64_t i = 0; i < indices->samples; i++)
        sums[2] += (uint64_t)(i + 1) * (uint64_t)indices->shuffle_index[i];
    printf("{\"tokens\": %" PRId64 ", \"samples\": %" PRId64 ", \"seconds\": %.6f, \"sums\": [%" PRIu64 ", %" PRIu64
           ", %" PRIu64 "]}\n",
        tokens, indices->samples, seconds, sums[0], sums[1], sums[2]);
    return 0;
}

int main(int argc, char **argv) {
    int64_t documents = argc == 5 ? atoll(argv[1]) : 0, s = argc == 5 ? atoll(argv[2]) : 0,
            epochs = argc == 5 ? atoll(argv[3]) : 0, rounds = argc == 5 ? atoll(argv[4]) : 0, tokens = 0;
    if (documents < 1 || s < 1 || epochs < 1 || rounds < 1) {
        fprintf(stderr, "usage: bench_indices DOCUMENTS SEQUENCE_LENGTH EPOCHS ROUNDS\n");
        return 2;
    }
    int32_t *lengths = loom__gpt_large((size_t)documents * sizeof *lengths); /* as loom_gpt_dataset_create does */
    double *seconds = malloc((size_t)rounds * sizeof *seconds);
    if (!lengths || !seconds)
        return 1;
    for (int64_t i = 0; i < documents; i++) {
        lengths[i] = 1 + (int32_t)((uint32_t)i * 2654435761u % 355u);
        tokens += lengths[i];
    }
    const loom__gpt_key key = {.end = documents,
        .sequence_length = s,
        .seed = 1234,
        .samples = epochs == 1 ? -1 : (epochs * tokens - 1) / s,
        .extra = 1};
    loom__gpt_indices indices = {0};
    for (int64_t i = 0; i < rounds; i++) {
        loom__gpt_indices_free(&indices);
        double start = processor_seconds();
        if (loom__gpt_indices_build(&key, lengths, 0, &indices) != LOOM_OK) {
            fprintf(stderr, "bench_indices: %s\n", loom_error_message());
            return 1;
        }
        seconds[i] = processor_seconds() - start;
    }
    qsort(seconds, (size_t)rounds, sizeof *seconds, ascending);
    int status = print(&indices, tokens, seconds[rounds / 2]);
    loom__gpt_indices_free(&indices);
    free(lengths);
    free(seconds);
    return status;
}
