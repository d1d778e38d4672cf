/* What a trace shows beside the computations: reductions of buckets under the backward or behind it, gathers of
 * parameters behind the optimizer's step, keys and values under the attention that comes before theirs. Rank 0 reads
 * the file that it has written. Under mpirun the program is one of the two ranks. */
#include "small_model.h"
#include "support.h"
#include <jansson.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, STEPS = 2, MICROBATCHES = 2 };

typedef struct trace_case {
    bool overlaps, shards, ring;
    bool held; /* rank 1 gives nothing into the ring before rank 0 computes what its message is to pass under */
    char folder[256];
} trace_case;

/* ---- a rank that comes late ----
 *
 * On thread ranks nothing is left to chance: rank 1 gives its keys, and later their gradients, into the ring when rank
 * 0 has begun the blocks that they are to pass under. Would rank 0 wait for them first, neither came on: rank 1 stops
 * holding back after a while, and the trace shows the transfers before the blocks. */

enum { CHUNKS = 2, OWN_BLOCKS = 3 /* of a causal square of two chunks */ };

static const loom_kernels *plain;
static _Atomic int64_t forwards_begun, backwards_begun; /* rank 0: rounds … */
static _Atomic int64_t second_halves_begun;             /* … and in the backward its second step */
static _Atomic bool gave_up;
static _Thread_local int rank_index = -1;
static _Thread_local int64_t begins, deltas, blocks; /* calls of this rank; blocks of the backward's round */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void nothing(void *argument, int64_t item, int worker) {
    (void)argument, (void)item, (void)worker;
}

/* Messages move on meanwhile, as they do between the items of a kernel. */
static void hold_back(loom_team *team, const _Atomic int64_t *count, int64_t wanted) {
    for (double until = seconds_now() + 5; atomic_load(count) < wanted && !atomic_load(&gave_up);) {
        loom_team_run(team, nothing, NULL, 1);
        if (seconds_now() > until)
            atomic_store(&gave_up, true);
    }
}

static void held_begin(
    loom_team *team, const loom_attention_block *block, float *accumulator, float *maximum, float *sum) {
    if (begins++ % CHUNKS == 0 && rank_index == 1)
        hold_back(team, &forwards_begun, begins / CHUNKS + 1);
    plain->attention_begin(team, block, accumulator, maximum, sum);
}

static void held_block(loom_team *team, const loom_attention_block *block, const float *q, const float *k,
    const float *v, float *accumulator, float *maximum, float *sum) {
    if (rank_index == 0)
        atomic_store(&forwards_begun, begins / CHUNKS);
    plain->attention_block(team, block, q, k, v, accumulator, maximum, sum);
}

static void held_delta(loom_team *team, const loom_attention_block *block, const float *out, const float *d_out,
    int64_t out_stride, float *delta) {
    if (deltas++ % CHUNKS == 0 && rank_index == 1)
        hold_back(team, &backwards_begun, deltas / CHUNKS + 1);
    blocks = 0;
    plain->attention_delta(team, block, out, d_out, out_stride, delta);
}

static void held_block_backward(loom_team *team, const loom_attention_block *block, const float *q, const float *k,
    const float *v, const float *d_out, int64_t out_stride, const float *log_sum_exp, const float *delta,
    bool accumulate_q, bool accumulate_kv, float *d_q, float *d_k, float *d_v) {
    if (rank_index == 0) {
        atomic_store(&backwards_begun, deltas / CHUNKS);
        if (++blocks > OWN_BLOCKS)
            atomic_store(&second_halves_begun, deltas / CHUNKS);
    } else if (blocks++ == 0) {
        hold_back(team, &second_halves_begun, deltas / CHUNKS);
    }
    plain->attention_block_backward(
        team, block, q, k, v, d_out, out_stride, log_sum_exp, delta, accumulate_q, accumulate_kv, d_q, d_k, d_v);
}

/* ---- what the file says ---- */

/* Events of one name (up to a comma) of one row, in time's order; microseconds. */
typedef struct found {
    int64_t count;
    double begin[256], end[256];
} found;

static double number(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}

static bool is_named(const json_t *event, const char *name) {
    const char *found_name = json_string_value(json_object_get(event, "cat"));
    return found_name && strcmp(found_name, name) == 0;
}

static loom_status find(const json_t *events, const char *name, int64_t process, int64_t thread, found *out) {
    const json_t *at, *end;
    size_t i, k;
    *out = (found){0};
    json_array_foreach(events, i, at) {
        const char *phase = json_string_value(json_object_get(at, "ph"));
        if (!is_named(at, name) || number(at, "pid") != (double)process || number(at, "tid") != (double)thread ||
            strcmp(phase, "e") == 0)
            continue;
        CHECK(out->count < 256, "more than 256 events %s", name);
        double begin = number(at, "ts"), finish = NAN;
        if (strcmp(phase, "X") == 0)
            finish = begin + number(at, "dur");
        json_array_foreach(events, k,
            end) if (strcmp(phase, "b") == 0 && strcmp(json_string_value(json_object_get(end, "ph")), "e") == 0 &&
                     json_equal(json_object_get(end, "id"), json_object_get(at, "id"))) finish = number(end, "ts");
        CHECK(finish >= begin, "%s at %g us ends at %g us", name, begin, finish);
        out->begin[out->count] = begin;
        out->end[out->count++] = finish;
    }
    return LOOM_OK;
}

/* Most of those that are not behind `limit`. */
static double last_end(const found *events, double limit) {
    double last = 0;
    for (int64_t i = 0; i < events->count; i++)
        if (events->begin[i] < limit && events->end[i] > last)
            last = events->end[i];
    return last;
}

static loom_status check_rank(const trace_case *c, const json_t *events, int64_t rank, int64_t buckets) {
    found backwards, reductions, gathers, steps;
    LOOM_TRY(find(events, "backward", 0, rank, &backwards));
    LOOM_TRY(find(events, "gradient reduction", 1 + rank, 0, &reductions));
    LOOM_TRY(find(events, "parameter gather", 1 + rank, 0, &gathers));
    LOOM_TRY(find(events, "optimizer step", 0, rank, &steps));
    CHECK(backwards.count == STEPS * MICROBATCHES, "%lld backwards", (long long)backwards.count);
    CHECK(steps.count == STEPS, "%lld steps of the optimizer", (long long)steps.count);
    CHECK(reductions.count == STEPS * buckets, "%lld reductions of %lld buckets", (long long)reductions.count,
        (long long)buckets);
    /* Gathers of the last step may be under way where the trace ends. */
    int64_t least = c->shards ? (STEPS - 1) * buckets : 0, most = c->shards ? STEPS * buckets : 0;
    CHECK(gathers.count >= least && gathers.count <= most, "%lld gathers of %lld buckets", (long long)gathers.count,
        (long long)buckets);
    double before = 0;
    for (int step = 0; step < STEPS; step++) {
        double backward_ends = last_end(&backwards, steps.begin[step]);
        int64_t under = 0;
        for (int64_t i = 0; i < reductions.count; i++) {
            if (reductions.begin[i] < before || reductions.begin[i] > steps.begin[step])
                continue;
            under += reductions.begin[i] < backward_ends;
            CHECK(reductions.end[i] <= steps.begin[step], "the optimizer's step begins before a reduction ends");
        }
        /* The first bucket starts inside the backward; the last one may be full only at its very end. */
        if (c->overlaps)
            CHECK(under >= buckets - 1, "step %d: only %lld of %lld reductions begin under the last backward", step,
                (long long)under, (long long)buckets);
        else
            CHECK(under == 0, "step %d: %lld reductions begin before the last backward ends", step, (long long)under);
        before = steps.begin[step];
    }
    for (int64_t i = 0; i < gathers.count; i++)
        CHECK(gathers.begin[i] >= steps.begin[0], "parameters are gathered before the first update");
    return LOOM_OK;
}

/* Each transfer of the ring begins under the forward or backward of its microbatch and ends there. */
static loom_status check_exchanges(const json_t *events, const char *name, int64_t rank, int64_t wanted,
    const found *forwards, const found *backwards) {
    found exchanges;
    LOOM_TRY(find(events, name, 1 + rank, 0, &exchanges));
    CHECK(
        exchanges.count == wanted, "%lld times %s, expected %lld", (long long)exchanges.count, name, (long long)wanted);
    for (int64_t i = 0; i < exchanges.count; i++) {
        int64_t around = 0;
        for (int kind = 0; kind < 2; kind++) {
            const found *computations = kind == 0 ? forwards : backwards;
            for (int64_t k = 0; k < computations->count; k++)
                around += computations->begin[k] <= exchanges.begin[i] && exchanges.end[i] <= computations->end[k];
        }
        CHECK(around == 1, "%s from %g to %g us is inside of %lld computations", name, exchanges.begin[i],
            exchanges.end[i], (long long)around);
    }
    return LOOM_OK;
}

/* Each transfer that a computation follows is open when that begins, and still afterwards. */
static loom_status check_overlap(
    const json_t *events, const char *name, int64_t rank, const found *pieces, int64_t wanted) {
    found exchanges;
    int64_t under = 0;
    LOOM_TRY(find(events, name, 1 + rank, 0, &exchanges));
    for (int64_t i = 0; i < exchanges.count; i++)
        for (int64_t k = 0; k < pieces->count; k++)
            if (exchanges.begin[i] <= pieces->begin[k] && pieces->begin[k] < exchanges.end[i]) {
                under++;
                break;
            }
    CHECK(under == wanted, "rank %lld computes under %lld times %s, expected %lld of %lld", (long long)rank,
        (long long)under, name, (long long)wanted, (long long)exchanges.count);
    return LOOM_OK;
}

static loom_status check_ring(const trace_case *c, const json_t *events, int64_t rank) {
    enum {
        LAYERS = 2,
        PIECE = 4 * 2 * 2 * 16 * 4
    }; /* bytes of a piece: rows, samples, keys and values, width, float */
    found forwards, backwards, pieces;
    const json_t *at;
    size_t i;
    LOOM_TRY(find(events, "forward", 0, rank, &forwards));
    LOOM_TRY(find(events, "backward", 0, rank, &backwards));
    int64_t layers = (int64_t)STEPS * MICROBATCHES * LAYERS;
    /* Keys go once in the forward and once in the backward of two ranks; their gradient is at home after two. */
    LOOM_TRY(check_exchanges(events, "key exchange", rank, 2 * layers, &forwards, &backwards));
    LOOM_TRY(check_exchanges(events, "key gradient exchange", rank, 2 * layers, &backwards, &(found){0}));
    LOOM_TRY(find(events, "attention of a piece", 0, rank, &pieces));
    CHECK(pieces.count == 2 * RANKS * layers, "attention of %lld pieces", (long long)pieces.count);
    if (c->held && rank == 0) {
        LOOM_TRY(check_overlap(events, "key exchange", rank, &pieces, 2 * layers));
        /* That of a round's second step goes home when nothing is left to compute. */
        LOOM_TRY(check_overlap(events, "key gradient exchange", rank, &pieces, layers));
    }
    json_array_foreach(events, i, at) {
        const json_t *arguments = json_object_get(at, "args");
        if (is_named(at, "key exchange") || is_named(at, "key gradient exchange"))
            CHECK(number(arguments, "bytes") == PIECE && !json_object_get(arguments, "bucket"), "%g bytes of a piece",
                number(arguments, "bytes"));
    }
    return LOOM_OK;
}

static loom_status check_file(const trace_case *c) {
    char path[512];
    json_error_t fault;
    snprintf(path, sizeof path, "%s/trace.json", c->folder);
    json_t *file = json_load_file(path, 0, &fault);
    CHECK(file, "%s: %s", path, fault.text);
    const json_t *events = json_object_get(file, "traceEvents"), *at;
    size_t i;
    loom_status status = LOOM_OK;
    int64_t named = 0, buckets = 0;
    json_array_foreach(events, i, at) {
        const char *text = json_string_value(json_object_get(json_object_get(at, "args"), "name"));
        named += text && strstr(text, ": communication") != NULL;
        if (is_named(at, "gradient reduction")) {
            int64_t bucket = json_integer_value(json_object_get(json_object_get(at, "args"), "bucket"));
            buckets = bucket >= buckets ? bucket + 1 : buckets;
        }
    }
    if (named != RANKS)
        status = loom_fail(LOOM_ERR_INTERNAL, "%lld processes of communication have names", (long long)named);
    if (!status && (c->overlaps ? buckets < 3 : buckets != 1))
        status = loom_fail(LOOM_ERR_INTERNAL, "%lld buckets", (long long)buckets);
    for (int64_t rank = 0; rank < RANKS && !status; rank++) {
        status = check_rank(c, events, rank, buckets);
        if (!status && c->ring)
            status = check_ring(c, events, rank);
    }
    json_decref(file);
    return status;
}

static loom_status traced(loom_rank *rank, small_run *run, const trace_case *c) {
    double loss;
    LOOM_TRY(small_data(run, LOOM_TRAINING, 64, 2, 2 * MICROBATCHES * (c->ring ? 1 : RANKS)));
    LOOM_TRY(loom_parallel_trace_begin(run->parallel, 1000));
    for (int step = 0; step < STEPS; step++) {
        LOOM_TRY(loom_parallel_training_step(run->parallel, run->batches, &loss));
        LOOM_TRY(loom_optimizer_step(run->optimizer, NULL));
    }
    LOOM_TRY(loom_parallel_trace_end(run->parallel, c->folder));
    return loom_agree(loom_rank_world(rank), loom_rank_index(rank) == 0 ? check_file(c) : LOOM_OK);
}

static loom_status train(loom_rank *rank, void *argument) {
    const trace_case *c = argument;
    rank_index = loom_rank_index(rank);
    begins = deltas = 0;
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.ddp_config.overlap_grad_reduce = c->overlaps;
    config.ddp_config.bucket_size = 1000;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_param_gather = c->shards;
    config.context_parallel_size = c->ring ? RANKS : 1;
    small_run run;
    loom_status status = small_start(rank, &config, &run);
    if (!status)
        status = traced(rank, &run, c);
    small_destroy(&run);
    return status;
}

static void make_folder(trace_case *c) {
    snprintf(c->folder, sizeof c->folder, "%s/trace-XXXXXX", MEGALOOM_BUILD);
    assert_non_null(mkdtemp(c->folder));
}

static void remove_folder(const trace_case *c) {
    char path[512];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", c->folder, i ? "timeline.svg" : "trace.json");
        unlink(path);
    }
    rmdir(c->folder);
}

static void run_case(bool overlaps, bool shards, bool ring) {
    trace_case c = {.overlaps = overlaps, .shards = shards, .ring = ring};
    loom_run_options options = test_options();
    plain = options.kernels ? options.kernels : loom_kernels_fast();
    loom_kernels held = *plain;
    held.attention_begin = held_begin;
    held.attention_block = held_block;
    held.attention_delta = held_delta;
    held.attention_block_backward = held_block_backward;
    c.held = ring;
    options.kernels = ring ? &held : plain;
    make_folder(&c);
    loom_status status = loom_run_local(RANKS, train, &c, &options);
    remove_folder(&c);
    if (status)
        fail_msg("%s", loom_error_message());
}

static void reductions_begin_under_the_backward(void **state) {
    (void)state;
    run_case(true, false, false);
}

static void without_overlap_they_begin_behind_it(void **state) {
    (void)state;
    run_case(false, false, false);
}

static void gathers_follow_the_update(void **state) {
    (void)state;
    run_case(true, true, false);
}

static void keys_travel_under_attention(void **state) {
    (void)state;
    run_case(true, false, true);
}

enum { CASES = 4 };

static loom_status train_all(loom_rank *rank, void *argument) {
    trace_case *cases = argument;
    for (int i = 0; i < CASES; i++)
        LOOM_TRY(train(rank, &cases[i]));
    return LOOM_OK;
}

static void the_same_holds_on_mpi_ranks(void **state) {
    (void)state;
    trace_case cases[CASES] = {
        {.overlaps = true}, {.overlaps = false}, {.overlaps = true, .shards = true}, {.overlaps = true, .ring = true}};
    loom_run_options options = test_options();
    for (int i = 0; i < CASES; i++)
        make_folder(&cases[i]);
    loom_status status = loom_run_mpi(train_all, cases, &options);
    for (int i = 0; i < CASES; i++)
        remove_folder(&cases[i]);
    if (status)
        fail_msg("%s", loom_error_message());
}

int main(int argc, char **argv) {
    const struct CMUnitTest on_threads[] = {
        cmocka_unit_test(reductions_begin_under_the_backward),
        cmocka_unit_test(without_overlap_they_begin_behind_it),
        cmocka_unit_test(gathers_follow_the_update),
        cmocka_unit_test(keys_travel_under_attention),
    };
    const struct CMUnitTest on_mpi[] = {cmocka_unit_test(the_same_holds_on_mpi_ranks)};
    (void)argv;
    return argc > 1 ? cmocka_run_group_tests(on_mpi, NULL, NULL) : cmocka_run_group_tests(on_threads, NULL, NULL);
}
