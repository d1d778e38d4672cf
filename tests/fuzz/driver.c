/* Runs a fuzz target over given files and folders without a fuzzer: each file as it is, cut at each of its first bytes,
 * and with each of these changed in a few ways (CHANGED_MAX bytes of a long file). The same inputs on every machine, so
 * that a normal test run meets what the fuzzer has found. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { FILE_MAX = 1 << 20, CHANGED_MAX = 512 };

static long inputs;

/* On the heap and exactly as long as it is, so that a sanitizer sees a read past its end. */
static void run(const uint8_t *data, size_t bytes) {
    uint8_t *copy = malloc(bytes ? bytes : 1);
    if (!copy)
        exit(2);
    memcpy(copy, data, bytes);
    LLVMFuzzerTestOneInput(copy, bytes);
    free(copy);
    inputs++;
}

static void run_variants(uint8_t *data, size_t bytes) {
    static const uint8_t changes[] = {0x01, 0x80, 0xff};
    size_t reach = bytes < CHANGED_MAX ? bytes : CHANGED_MAX;
    run(data, bytes);
    for (size_t i = 0; i < reach; i++) {
        run(data, i);
        for (size_t c = 0; c < sizeof changes; c++) {
            data[i] ^= changes[c];
            run(data, bytes);
            data[i] ^= changes[c];
        }
    }
}

static int run_file(const char *path) {
    uint8_t *data = malloc(FILE_MAX);
    FILE *file = fopen(path, "rb");
    if (!data || !file) {
        fprintf(stderr, "%s: cannot be read\n", path);
        return 2;
    }
    size_t bytes = fread(data, 1, FILE_MAX, file);
    fclose(file);
    run_variants(data, bytes);
    free(data);
    return 0;
}

static int run_path(const char *path) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode))
        return run_file(path);
    struct dirent **entries;
    int count = scandir(path, &entries, NULL, alphasort), worst = 0;
    for (int i = 0; i < count; i++) {
        char *inner = NULL;
        if (entries[i]->d_name[0] != '.' && asprintf(&inner, "%s/%s", path, entries[i]->d_name) >= 0) {
            int result = run_path(inner);
            worst = result > worst ? result : worst;
        }
        free(inner);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
    return count < 0 ? 2 : worst;
}

int main(int argc, char **argv) {
    int worst = 0;
    for (int i = 1; i < argc; i++) {
        int result = run_path(argv[i]);
        worst = result > worst ? result : worst;
    }
    printf("%ld inputs\n", inputs);
    return inputs > 0 ? worst : 2; /* a corpus that is not found is a failure */
}
