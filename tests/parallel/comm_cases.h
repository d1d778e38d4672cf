/* The collectives against their definition, written as plain loops. The same body runs on thread ranks and on MPI
 * ranks: both meet the definition bit for bit, so they equal each other. A rank returns its first failed check. */
#ifndef TESTS_PARALLEL_COMM_CASES_H
#define TESTS_PARALLEL_COMM_CASES_H

#include <math.h>
#include <megaloom/rank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                                 \
            return loom_fail_context(LOOM_ERR_INTERNAL, "%s: ", #condition);                                           \
        }                                                                                                              \
    } while (0)

/* Element i of rank r: values of many magnitudes, so that another order of summing gives other bits. */
static inline double comm_value(int rank, int64_t i) {
    uint64_t x = (uint64_t)(rank + 1) * 0x9E3779B97F4A7C15u ^ (uint64_t)(i + 1) * 0xD1B54A32D192ED03u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    return ((double)(x >> 40) / 16777216.0 - 0.5) * ldexp(1.0, (int)(x & 15) - 8);
}

static inline void comm_set(loom_dtype dtype, void *array, int64_t at, int rank, int64_t i) {
    double value = comm_value(rank, i);
    if (dtype == LOOM_F32)
        ((float *)array)[at] = (float)value;
    else if (dtype == LOOM_BF16)
        ((uint16_t *)array)[at] = loom_f32_to_bf16((float)value);
    else if (dtype == LOOM_F16)
        ((uint16_t *)array)[at] = loom_f32_to_f16((float)value);
    else if (dtype == LOOM_F64)
        ((double *)array)[at] = value;
    else
        ((int64_t *)array)[at] = (int64_t)(value * 1e6);
}

/* Element i of the reduction over ranks list[0 … size), as comm.h defines it. */
static inline void comm_define(
    loom_dtype dtype, loom_reduce operation, const int *list, int size, int64_t i, void *array, int64_t at) {
    float f = 0, f_block = 0;
    double d = 0, d_block = 0;
    int64_t n = 0, n_block = 0;
    for (int r = 0; r < size; r++) {
        double x = comm_value(list[r], i);
        float xf = (float)x;
        if (dtype == LOOM_BF16)
            xf = loom_bf16_to_f32(loom_f32_to_bf16(xf));
        if (dtype == LOOM_F16)
            xf = loom_f16_to_f32(loom_f32_to_f16(xf));
        int64_t xn = (int64_t)(x * 1e6);
        if (operation == LOOM_MAX) {
            f = r == 0 || xf > f ? xf : f;
            d = r == 0 || x > d ? x : d;
            n = r == 0 || xn > n ? xn : n;
            continue;
        }
        bool begins = r % LOOM_REDUCE_BLOCK == 0, ends = (r + 1) % LOOM_REDUCE_BLOCK == 0 || r + 1 == size;
        f_block = begins ? xf : f_block + xf;
        d_block = begins ? x : d_block + x;
        n_block = begins ? xn : n_block + xn;
        if (ends) {
            bool first = r < LOOM_REDUCE_BLOCK;
            f = first ? f_block : f + f_block;
            d = first ? d_block : d + d_block;
            n = first ? n_block : n + n_block;
        }
    }
    if (dtype == LOOM_F32)
        ((float *)array)[at] = f;
    else if (dtype == LOOM_BF16)
        ((uint16_t *)array)[at] = loom_f32_to_bf16(f);
    else if (dtype == LOOM_F16)
        ((uint16_t *)array)[at] = loom_f32_to_f16(f);
    else if (dtype == LOOM_F64)
        ((double *)array)[at] = d;
    else
        ((int64_t *)array)[at] = n;
}

typedef struct comm_case {
    loom_comm *comm;
    int size, me;
    int list[64];
    loom_dtype dtype;
    size_t element;
    int64_t count; /* of the whole */
    int64_t counts[64];
    char *in, *out, *expected;
} comm_case;

static inline int64_t comm_before(const comm_case *c, int place) {
    int64_t sum = 0;
    for (int i = 0; i < place; i++)
        sum += c->counts[i];
    return sum;
}

/* Uneven parts, some of them empty, that add up to count. */
static inline void comm_cut(comm_case *c) {
    int64_t left = c->count;
    for (int i = 0; i < c->size; i++) {
        int64_t part = i + 1 == c->size ? left : i % 3 == 1 ? 0 : (left + 1) / 2;
        c->counts[i] = part;
        left -= part;
    }
}

static inline loom_status comm_same(const comm_case *c, const char *what, int64_t count) {
    if (count > 0 && memcmp(c->out, c->expected, (size_t)count * c->element) != 0)
        return loom_fail(LOOM_ERR_INTERNAL, "%s of %lld %s over %d ranks is not what the definition says", what,
            (long long)count, loom_dtype_name(c->dtype), c->size);
    return LOOM_OK;
}

static inline loom_status comm_case_reduce(comm_case *c, loom_reduce operation) {
    for (int64_t i = 0; i < c->count; i++) {
        comm_set(c->dtype, c->in, i, c->list[c->me], i);
        comm_define(c->dtype, operation, c->list, c->size, i, c->expected, i);
    }
    size_t bytes = (size_t)c->count * c->element;
    LOOM_TRY(loom_all_reduce(c->comm, c->in, c->out, c->count, c->dtype, operation));
    LOOM_TRY(comm_same(c, "all_reduce", c->count));
    memcpy(c->out, c->in, bytes);
    LOOM_TRY(loom_all_reduce(c->comm, c->out, c->out, c->count, c->dtype, operation));
    LOOM_TRY(comm_same(c, "all_reduce in place", c->count));

    int64_t begin = comm_before(c, c->me), mine = c->counts[c->me];
    memmove(c->expected, c->expected + (size_t)begin * c->element, (size_t)mine * c->element);
    LOOM_TRY(loom_reduce_scatter_v(c->comm, c->in, c->out, c->counts, c->dtype, operation));
    LOOM_TRY(comm_same(c, "reduce_scatter_v", mine));
    char *own = c->in + (size_t)begin * c->element;
    LOOM_TRY(loom_reduce_scatter_v(c->comm, c->in, own, c->counts, c->dtype, operation));
    if (mine > 0)
        memcpy(c->out, own, (size_t)mine * c->element);
    return comm_same(c, "reduce_scatter_v in place", mine);
}

static inline loom_status comm_case_gather(comm_case *c) {
    for (int place = 0; place < c->size; place++)
        for (int64_t i = 0; i < c->counts[place]; i++)
            comm_set(c->dtype, c->expected, comm_before(c, place) + i, c->list[place], i);
    for (int64_t i = 0; i < c->counts[c->me]; i++)
        comm_set(c->dtype, c->in, i, c->list[c->me], i);
    memset(c->out, 0xff, (size_t)c->count * c->element);
    LOOM_TRY(loom_all_gather_v(c->comm, c->in, c->out, c->counts, c->dtype));
    LOOM_TRY(comm_same(c, "all_gather_v", c->count));
    memset(c->out, 0xff, (size_t)c->count * c->element);
    char *own = c->out + (size_t)comm_before(c, c->me) * c->element;
    memcpy(own, c->in, (size_t)c->counts[c->me] * c->element);
    LOOM_TRY(loom_all_gather_v(c->comm, own, c->out, c->counts, c->dtype));
    return comm_same(c, "all_gather_v in place", c->count);
}

static inline loom_status comm_case_broadcast(comm_case *c, int root) {
    for (int64_t i = 0; i < c->count; i++) {
        comm_set(c->dtype, c->expected, i, c->list[root], i);
        comm_set(c->dtype, c->out, i, c->list[c->me], i);
    }
    LOOM_TRY(loom_broadcast(c->comm, c->out, c->count, c->dtype, root));
    return comm_same(c, "broadcast", c->count);
}

/* Member a sends counts[(a + b) mod size] elements to member b; element i is comm_value(a * 100 + b, i). */
static inline loom_status comm_case_all_to_all(comm_case *c) {
    int64_t send[64], receive[64], sent = 0, received = 0;
    for (int p = 0; p < c->size; p++) {
        send[p] = c->counts[(c->me + p) % c->size];
        receive[p] = c->counts[(p + c->me) % c->size];
        for (int64_t i = 0; i < send[p]; i++)
            comm_set(c->dtype, c->in, sent++, c->me * 100 + p, i);
        for (int64_t i = 0; i < receive[p]; i++)
            comm_set(c->dtype, c->expected, received++, p * 100 + c->me, i);
    }
    LOOM_TRY(loom_all_to_all_v(c->comm, c->in, send, c->out, receive, c->dtype));
    return comm_same(c, "all_to_all_v", received);
}

/* Everybody sends to the next member and receives from the one before, twice with one tag and once with another; the
 * receives are posted in an order of their own. */
static inline loom_status comm_case_messages(comm_case *c) {
    if (c->size == 1)
        return LOOM_OK;
    int next = (c->me + 1) % c->size, before = (c->me + c->size - 1) % c->size;
    int64_t half = c->count / 2;
    char *second = c->in + (size_t)half * c->element, *second_out = c->out + (size_t)half * c->element;
    for (int64_t i = 0; i < c->count; i++) {
        comm_set(c->dtype, c->in, i, c->list[c->me], i);
        comm_set(c->dtype, c->expected, i, c->list[before], i);
    }
    loom_request *requests[6];
    int64_t token = 1000 + c->me, got = -1;
    LOOM_TRY(loom_receive_start(c->comm, &got, 1, LOOM_I64, before, 9, &requests[0]));
    LOOM_TRY(loom_receive_start(c->comm, c->out, half, c->dtype, before, 3, &requests[1]));
    LOOM_TRY(loom_send_start(c->comm, c->in, half, c->dtype, next, 3, &requests[2]));
    LOOM_TRY(loom_send_start(c->comm, second, c->count - half, c->dtype, next, 3, &requests[3]));
    LOOM_TRY(loom_receive_start(c->comm, second_out, c->count - half, c->dtype, before, 3, &requests[4]));
    LOOM_TRY(loom_send_start(c->comm, &token, 1, LOOM_I64, next, 9, &requests[5]));
    for (int i = 5; i >= 0; i--)
        LOOM_TRY(loom_wait(requests[i]));
    CHECK(got == 1000 + before, "rank %d got %lld", c->me, (long long)got);
    return comm_same(c, "send and receive", c->count);
}

/* Several operations under way at once, waited for in reverse; more of them than a group can hold at once. */
static inline loom_status comm_case_outstanding(comm_case *c) {
    enum { MANY = 40, LENGTH = 1500 };
    float *in = malloc(sizeof(float) * MANY * LENGTH), *out = malloc(sizeof(float) * MANY * LENGTH);
    loom_request *requests[MANY];
    loom_status status = in && out ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory");
    for (int k = 0; k < MANY && status == LOOM_OK; k++) {
        for (int i = 0; i < LENGTH; i++)
            in[k * LENGTH + i] = (float)comm_value(c->list[c->me], k * LENGTH + i);
        status = loom_all_reduce_start(
            c->comm, in + k * LENGTH, out + k * LENGTH, k % 2 ? LENGTH : 3, LOOM_F32, LOOM_SUM, &requests[k]);
    }
    for (int k = MANY - 1; k >= 0 && status == LOOM_OK; k--)
        status = loom_wait(requests[k]);
    for (int k = 0; k < MANY && status == LOOM_OK; k++) {
        for (int i = 0; i < (k % 2 ? LENGTH : 3) && status == LOOM_OK; i++) {
            float expected;
            comm_define(LOOM_F32, LOOM_SUM, c->list, c->size, k * LENGTH + i, &expected, 0);
            if (memcmp(&expected, &out[k * LENGTH + i], sizeof expected) != 0)
                status = loom_fail(LOOM_ERR_INTERNAL, "outstanding all_reduce %d differs at %d", k, i);
        }
    }
    free(in);
    free(out);
    return status;
}

/* All operations of one group for one dtype and count. */
static inline loom_status comm_case_all(loom_comm *comm, loom_dtype dtype, int64_t count) {
    comm_case c = {.comm = comm,
        .size = loom_comm_size(comm),
        .me = loom_comm_rank(comm),
        .dtype = dtype,
        .element = loom_dtype_size(dtype),
        .count = count};
    for (int i = 0; i < c.size; i++)
        c.list[i] = loom_comm_world_rank(comm, i);
    comm_cut(&c);
    size_t bytes = (size_t)(count * c.size + 1) * c.element;
    c.in = malloc(bytes);
    c.out = malloc(bytes);
    c.expected = malloc(bytes);
    loom_status status = c.in && c.out && c.expected ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory");
    if (status == LOOM_OK)
        status = comm_case_reduce(&c, LOOM_SUM);
    if (status == LOOM_OK)
        status = comm_case_reduce(&c, LOOM_MAX);
    if (status == LOOM_OK)
        status = comm_case_gather(&c);
    for (int root = 0; root < c.size && status == LOOM_OK; root += 2)
        status = comm_case_broadcast(&c, root);
    if (status == LOOM_OK)
        status = comm_case_all_to_all(&c);
    if (status == LOOM_OK)
        status = comm_case_messages(&c);
    if (status == LOOM_OK && dtype == LOOM_F32 && count == 2)
        status = comm_case_outstanding(&c);
    if (status == LOOM_OK)
        status = loom_barrier(comm);
    free(c.in);
    free(c.out);
    free(c.expected);
    return status;
}

/* Counts that do not divide, that leave members empty, and that cross each backend's limits for small operations. */
static inline loom_status comm_cases_group(loom_comm *comm) {
    static const loom_dtype dtypes[] = {LOOM_F32, LOOM_BF16, LOOM_F64, LOOM_I64, LOOM_F16};
    int64_t size = loom_comm_size(comm);
    int64_t counts[] = {0, 1, 2, size - 1, size, 3 * size + 2, 1025, 20011};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
            LOOM_TRY(comm_case_all(comm, dtypes[d], counts[n]));
    return LOOM_OK;
}

/* A group that is made again has nothing in common with the first, though its operations have the same numbers: the
 * last rank comes late to an operation that differs from the old one of that number. */
static inline loom_status comm_case_made_again(loom_rank *rank) {
    int n = loom_rank_count(rank), list[64];
    int64_t one = 1, all[64];
    loom_comm *comm;
    for (int i = 0; i < n; i++)
        list[i] = i;
    LOOM_TRY(loom_group_create(rank, "again", list, n, &comm));
    LOOM_TRY(loom_barrier(comm));
    loom_group_destroy(comm);
    LOOM_TRY(loom_group_create(rank, "again", list, n, &comm));
    struct timespec rest = {0, 80000000};
    if (loom_rank_index(rank) == n - 1)
        nanosleep(&rest, NULL);
    LOOM_TRY(loom_all_gather(comm, &one, all, 1, LOOM_I64));
    loom_group_destroy(comm);
    return LOOM_OK;
}

/* The world, the ranks of even and odd number (two groups of one name), and a group in reverse order. */
static inline loom_status comm_cases(loom_rank *rank, void *argument) {
    (void)argument;
    int n = loom_rank_count(rank), me = loom_rank_index(rank), list[64], count = 0;
    CHECK(n <= 64, "%d ranks", n);
    LOOM_TRY(comm_cases_group(loom_rank_world(rank)));
    loom_comm *half, *reverse;
    for (int i = me % 2; i < n; i += 2)
        list[count++] = i;
    LOOM_TRY(loom_group_create(rank, "half", list, count, &half));
    CHECK(loom_comm_size(half) == count && loom_comm_rank(half) == me / 2, "rank %d", me);
    LOOM_TRY(comm_case_all(half, LOOM_F32, 777));
    for (int i = 0; i < n; i++)
        list[i] = n - 1 - i;
    LOOM_TRY(loom_group_create(rank, "reverse", list, n, &reverse));
    CHECK(loom_comm_rank(reverse) == n - 1 - me && loom_comm_world_rank(reverse, 0) == n - 1, "rank %d", me);
    LOOM_TRY(comm_case_all(reverse, LOOM_F32, 777));
    loom_group_destroy(half);
    LOOM_TRY(loom_group_create(rank, "reverse", list, n, &half));
    LOOM_TRY(comm_case_all(half, LOOM_BF16, 5));
    return comm_case_made_again(rank);
}

/* The status of all is bad when one is; the message of the lowest failing member travels. */
static inline loom_status comm_agreement(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *world = loom_rank_world(rank);
    int me = loom_rank_index(rank), n = loom_rank_count(rank), bad = n - 1;
    CHECK(loom_agree(world, LOOM_OK) == LOOM_OK, "rank %d", me);
    loom_status mine = me == bad ? loom_fail(LOOM_ERR_IO, "the disk of rank %d is full", me) : LOOM_OK;
    loom_status all = loom_agree(world, mine);
    CHECK(all == (me == bad ? LOOM_ERR_IO : LOOM_ERR_ABORTED), "rank %d got %d", me, all);
    char expected[64];
    snprintf(expected, sizeof expected, "the disk of rank %d is full", bad);
    CHECK(strstr(loom_error_message(), expected) != NULL, "rank %d: %s", me, loom_error_message());
    return loom_agree(world, LOOM_OK);
}

#endif
