/* megaloom checkpoint diff: whether two checkpoints hold the same tensors, however each of them is cut. */
#include "checkpoint.h"
#include "commands.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_ELEMENTS = 1 << 22 };

typedef struct arguments {
    const char *paths[2];
    double tolerance;
} arguments;

typedef struct comparison {
    const loom_checkpoint *a, *b;
    double tolerance;
    int64_t same, differ;
    void *blocks[2];
    size_t room; /* bytes of each */
} comparison;

typedef struct difference {
    int64_t elements; /* that differ by more than the tolerance, or are of different kinds (NaN) */
    double largest;
} difference;

static bool is_floating(loom_dtype dtype) {
    return dtype == LOOM_F64 || dtype == LOOM_F32 || dtype == LOOM_F16 || dtype == LOOM_BF16;
}

/* Bit-equal values are equal, NaN too. */
static void compare_floats(const float *a, const float *b, int64_t count, double tolerance, difference *found) {
    for (int64_t i = 0; i < count; i++) {
        if (memcmp(&a[i], &b[i], sizeof *a) == 0)
            continue;
        double apart = fabs((double)a[i] - (double)b[i]);
        if (isnan(apart))
            apart = INFINITY;
        if (apart > found->largest)
            found->largest = apart;
        found->elements += apart > tolerance;
    }
}

static loom_status make_room(comparison *c, size_t bytes) {
    if (bytes <= c->room)
        return LOOM_OK;
    for (int i = 0; i < 2; i++) {
        void *grown = realloc(c->blocks[i], bytes);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a block of %zu bytes", bytes);
        c->blocks[i] = grown;
    }
    c->room = bytes;
    return LOOM_OK;
}

static loom_status compare_block(comparison *c, const loom_checkpoint_tensor *a, const loom_checkpoint_tensor *b,
    const int64_t *offsets, const int64_t *sizes, difference *found) {
    bool floats = is_floating(a->dtype) && a->dtype != LOOM_F64;
    loom_dtype dtype = floats ? LOOM_F32 : a->dtype;
    size_t size = loom_dtype_size(dtype);
    int64_t count = 1;
    for (int i = 0; i < a->dims; i++)
        count *= sizes[i];
    LOOM_TRY(make_room(c, (size_t)count * size));
    LOOM_TRY(loom_checkpoint_read(c->a, a, offsets, sizes, dtype, c->blocks[0]));
    LOOM_TRY(loom_checkpoint_read(c->b, b, offsets, sizes, dtype, c->blocks[1]));
    if (floats) {
        compare_floats(c->blocks[0], c->blocks[1], count, c->tolerance, found);
        return LOOM_OK;
    }
    const char *x = c->blocks[0], *y = c->blocks[1];
    for (int64_t i = 0; i < count; i++)
        if (memcmp(x + (size_t)i * size, y + (size_t)i * size, size) != 0) {
            double apart = INFINITY;
            if (a->dtype == LOOM_F64) {
                double p, q;
                memcpy(&p, x + (size_t)i * size, size);
                memcpy(&q, y + (size_t)i * size, size);
                apart = isnan(p - q) ? INFINITY : fabs(p - q);
            }
            found->largest = apart > found->largest ? apart : found->largest;
            found->elements += apart > c->tolerance;
        }
    return LOOM_OK;
}

/* A chunk of the first checkpoint in blocks along its longest prefix of whole rows: memory stays that of one block. */
static loom_status compare_chunk(comparison *c, const loom_checkpoint_tensor *a, const loom_checkpoint_tensor *b,
    const loom_checkpoint_chunk *chunk, difference *found) {
    int64_t offsets[LOOM_CHECKPOINT_MAX_DIMS], sizes[LOOM_CHECKPOINT_MAX_DIMS], row = 1;
    memcpy(offsets, chunk->offsets, sizeof offsets);
    memcpy(sizes, chunk->sizes, sizeof sizes);
    if (a->dims == 0)
        return compare_block(c, a, b, offsets, sizes, found);
    for (int i = 1; i < a->dims; i++)
        row *= chunk->sizes[i];
    int64_t rows = row > 0 ? BLOCK_ELEMENTS / row : 1;
    if (rows < 1)
        rows = 1;
    for (int64_t done = 0; done < chunk->sizes[0]; done += sizes[0]) {
        offsets[0] = chunk->offsets[0] + done;
        sizes[0] = chunk->sizes[0] - done < rows ? chunk->sizes[0] - done : rows;
        LOOM_TRY(compare_block(c, a, b, offsets, sizes, found));
    }
    return LOOM_OK;
}

static void print_shape(const loom_checkpoint_tensor *tensor) {
    printf("%s [", loom_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->dims; i++)
        printf("%s%" PRId64, i ? ", " : "", tensor->shape[i]);
    printf("]");
}

static loom_status compare_tensor(comparison *c, const loom_checkpoint_tensor *a, const loom_checkpoint_tensor *b) {
    difference found = {0};
    if (a->dtype != b->dtype || a->dims != b->dims || memcmp(a->shape, b->shape, sizeof a->shape) != 0) {
        printf("%s: ", a->name);
        print_shape(a);
        printf(" in A, ");
        print_shape(b);
        printf(" in B\n");
        c->differ++;
        return LOOM_OK;
    }
    for (int64_t i = 0; i < a->chunk_count; i++)
        LOOM_TRY(compare_chunk(c, a, b, &a->chunks[i], &found));
    if (found.elements > 0) {
        printf("%s: %" PRId64 " of %" PRId64 " elements differ", a->name, found.elements, a->elements);
        if (is_floating(a->dtype))
            printf(", by up to %.9g", found.largest);
        printf("\n");
    }
    c->differ += found.elements > 0;
    c->same += found.elements == 0;
    return LOOM_OK;
}

/* Both are sorted by name. */
static loom_status compare(comparison *c) {
    for (int64_t i = 0, j = 0;;) {
        const loom_checkpoint_tensor *a = loom_checkpoint_tensor_at(c->a, i), *b = loom_checkpoint_tensor_at(c->b, j);
        if (!a && !b)
            return LOOM_OK;
        int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name);
        if (order == 0)
            LOOM_TRY(compare_tensor(c, a, b));
        else
            printf("%s: only in %s\n", order < 0 ? a->name : b->name, order < 0 ? "A" : "B");
        c->differ += order != 0;
        i += order <= 0;
        j += order >= 0;
    }
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    char *end;
    switch (key) {
    case 't':
        errno = 0;
        to->tolerance = strtod(text, &end);
        if (end == text || *end || errno || !(to->tolerance >= 0))
            argp_error(state, "--tolerance: found %s, expected a number of at least 0", text);
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num >= 2)
            argp_error(state, "more than two checkpoints: %s", text);
        else
            to->paths[state->arg_num] = text;
        return 0;
    case ARGP_KEY_END:
        if (!to->paths[1])
            argp_error(state, "A and B must be given");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int run(const arguments *given) {
    loom_checkpoint *a = NULL, *b = NULL;
    loom_status status = loom_checkpoint_open(given->paths[0], &a);
    if (!status)
        status = loom_checkpoint_open(given->paths[1], &b);
    comparison c = {.a = a, .b = b, .tolerance = given->tolerance};
    if (!status)
        status = compare(&c);
    if (!status)
        printf("%" PRId64 " tensors are the same, %" PRId64 " differ\n", c.same, c.differ);
    fflush(stdout);
    free(c.blocks[0]);
    free(c.blocks[1]);
    loom_checkpoint_close(a);
    loom_checkpoint_close(b);
    return status ? loom_cli_fail(status) : c.differ > 0;
}

int loom_cli_checkpoint_diff(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"tolerance", 't', "DIFFERENCE", 0, "Elements this far apart are the same (default 0: bit-equal)", 0}, {0}};
    static const struct argp argp = {options, take, "A B",
        "Compares the tensors of two checkpoints, which may be cut differently.\v"
        "The exit status is 0 when all are the same, 1 when some are not, and 2 when a checkpoint cannot be read.",
        NULL, NULL, NULL};
    arguments given = {0};
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    return run(&given);
}
