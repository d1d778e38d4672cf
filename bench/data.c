/* The figures of preparing data, one line of JSON for each call:
 *
 *   bench_data encode TOKENIZER TEXT    processor time of encoding the documents of a file; an empty line divides them
 *   bench_data peak COMMAND…            runs a command: its processor time and the most memory that it had resident
 *   bench_data corpus PREFIX TOKENS     writes an indexed dataset of so many tokens, documents of 64 to 2047
 *   bench_data loader PREFIX S ROWS AHEAD TOKENS
 *                                       processor time of loading microbatches of ROWS samples of S tokens from it,
 * with AHEAD microbatches read ahead (0: by the caller), until so many tokens have come
 *
 * Opening the tokenizer and reading the file are not measured. */
#include <megaloom/data.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double processor_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long length = -1;
    if (file && fseek(file, 0, SEEK_END) == 0 && (length = ftell(file)) >= 0 && fseek(file, 0, SEEK_SET) == 0)
        text = malloc((size_t)length + 1);
    if (!text || fread(text, 1, (size_t)length, file) != (size_t)length) {
        fprintf(stderr, "bench_data: %s: cannot be read\n", path);
        exit(2);
    }
    fclose(file);
    *bytes = (size_t)length;
    return text;
}

static int encode(const char *name, const char *path) {
    loom_tokenizer *tokenizer;
    size_t bytes, tokens = 0, documents = 0;
    char *text = read_file(path, &bytes);
    if (loom_tokenizer_open(name, &tokenizer) != LOOM_OK) {
        fprintf(stderr, "bench_data: %s\n", loom_error_message());
        return 2;
    }
    size_t room = loom_tokenizer_room(tokenizer, bytes);
    int64_t *ids = malloc(room * sizeof *ids);
    if (!ids) {
        fprintf(stderr, "bench_data: no memory for %zu tokens\n", room);
        return 1;
    }
    double start = processor_seconds();
    for (const char *at = text, *end = text + bytes; at < end; documents++) {
        const char *stop = memmem(at, (size_t)(end - at), "\n\n", 2);
        size_t count;
        stop = stop ? stop : end;
        if (tokenizer->encode(tokenizer->context, at, (size_t)(stop - at), ids, room, &count) != LOOM_OK) {
            fprintf(stderr, "bench_data: document %zu: %s\n", documents, loom_error_message());
            return 1;
        }
        tokens += count;
        at = stop == end ? end : stop + 2;
    }
    double seconds = processor_seconds() - start;
    printf(
        "{\"documents\":%zu,\"bytes\":%zu,\"tokens\":%zu,\"cpu_seconds\":%.4f}\n", documents, bytes, tokens, seconds);
    free(ids);
    free(text);
    loom_tokenizer_destroy(tokenizer);
    return 0;
}

static double seconds_of(struct timeval time) {
    return (double)time.tv_sec + 1e-6 * (double)time.tv_usec;
}

static int peak(char **command) {
    pid_t child = fork();
    if (child == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO);
        execvp(command[0], command);
        perror(command[0]);
        _exit(127);
    }
    struct rusage used;
    int status = 0;
    if (child < 0 || wait4(child, &status, 0, &used) != child || status != 0) {
        fprintf(stderr, "bench_data: failed: %s\n", command[0]);
        return 1;
    }
    printf("{\"peak_mib\":%.1f,\"cpu_seconds\":%.2f}\n", (double)used.ru_maxrss / 1024,
        seconds_of(used.ru_utime) + seconds_of(used.ru_stime));
    return 0;
}

static int failed(void) {
    fprintf(stderr, "bench_data: %s\n", loom_error_message());
    return 1;
}

static int corpus(const char *prefix, int64_t tokens) {
    loom_indexed_writer *writer;
    static int64_t document[2048];
    uint64_t state = 1;
    loom_status status = loom_indexed_writer_create(prefix, LOOM_U16, false, &writer);
    while (status == LOOM_OK && tokens > 0) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        int64_t length = 64 + (int64_t)(state >> 33) % (2048 - 64);
        for (int64_t i = 0; i < length; i++)
            document[i] = ((int64_t)(state >> 40) + i * i) % 32000;
        status = loom_indexed_writer_add_tokens(writer, document, length, 0);
        if (status == LOOM_OK)
            status = loom_indexed_writer_end_document(writer);
        tokens -= length;
    }
    if (status == LOOM_OK)
        status = loom_indexed_writer_finish(writer);
    if (status != LOOM_OK)
        return failed();
    loom_indexed_writer_destroy(writer);
    return 0;
}

static int load(const char *prefix, int64_t s, int64_t rows, int64_t depth, int64_t tokens) {
    loom_indexed *indexed;
    loom_dataset dataset;
    loom_data_loader loader, ahead;
    loom_batch *batch;
    loom_gpt_dataset_config config = loom_gpt_dataset_config_default();
    config.sequence_length = s;
    config.split = "1,0,0";
    config.vocab_size = 32000;
    loom_data_loader_config cut = loom_data_loader_config_default();
    cut.micro_batch_size = cut.global_batch_size = rows;
    cut.cycle = true;
    if (loom_indexed_open(prefix, &indexed) || loom_gpt_dataset_create(indexed, &config, &dataset) ||
        loom_data_loader_create(&dataset, &cut, &loader) || loom_batch_create(rows, s, false, &batch))
        return failed();
    const loom_data_prefetch_config read_ahead = {.depth = depth, .rank = -1};
    if (depth > 0) {
        if (loom_data_loader_prefetch(&loader, &read_ahead, &ahead))
            return failed();
        loader = ahead;
    }
    double start = processor_seconds();
    int64_t count = 0, sum = 0;
    for (; count < tokens; count += rows * s) {
        if (loader.next(loader.context, batch))
            return failed();
        sum += batch->tokens[count % (rows * s)];
    }
    double seconds = processor_seconds() - start;
    printf("{\"samples\":%lld,\"tokens\":%lld,\"cpu_seconds\":%.4f,\"sum\":%lld}\n", (long long)dataset.length,
        (long long)count, seconds, (long long)sum);
    loom_data_loader_destroy(&loader);
    loom_batch_destroy(batch);
    loom_dataset_destroy(&dataset);
    loom_indexed_close(indexed);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "encode") == 0)
        return encode(argv[2], argv[3]);
    if (argc >= 3 && strcmp(argv[1], "peak") == 0)
        return peak(argv + 2);
    if (argc == 4 && strcmp(argv[1], "corpus") == 0)
        return corpus(argv[2], atoll(argv[3]));
    if (argc == 7 && strcmp(argv[1], "loader") == 0 && atoll(argv[3]) > 0 && atoll(argv[4]) > 0)
        return load(argv[2], atoll(argv[3]), atoll(argv[4]), atoll(argv[5]), atoll(argv[6]));
    fputs("usage: bench_data encode TOKENIZER TEXT | peak COMMAND... | corpus PREFIX TOKENS |\n"
          "       loader PREFIX S ROWS AHEAD TOKENS\n",
        stderr);
    return 2;
}
