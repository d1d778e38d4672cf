/* The two ends of the model against their unsharded twins: embeddings and cross-entropy, with vocabularies that leave
 * ranks with padding only. */
#include "parallel_support.h"

enum { S = 12, B = 2, H = 6, ROWS = S * B, V = 5, WIDTH = 4 }; /* WIDTH rows or columns of the table on each rank */

/* ---- embedding: looked-up rows plus zeros, so every bit must agree ---- */

static void fill_tokens(int64_t *tokens) {
    for (int i = 0; i < ROWS; i++)
        tokens[i] = i * 7 % 11 % V;
}

static loom_status embed(loom_rank *rank, loom_comm *tp, const layout *at, int64_t first, int64_t rows,
    const float *table, const float *d_y, loom_parameter *parameter, loom_tensor **y) {
    bool sp = tp && at->sequence_parallel;
    int64_t s = sp ? S / loom_comm_size(tp) : S, tokens[ROWS];
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *d;
    fill_tokens(tokens);
    LOOM_TRY(parameter_make(parameter, "word_embeddings.weight", rows, H, table + first * H));
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(loom__vocab_embedding(tape, tokens, B, S, parameter, first, V, tp, sp, y));
    LOOM_TRY(loom_tensor_ready(*y));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){s, B, H}, d_y + (sp ? loom_comm_rank(tp) * s * B * H : 0), &d));
    LOOM_TRY(loom_tape_backward(tape, *y, d));
    loom_tensor_release(d);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status embedding_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    int64_t size = loom_comm_size(tp), me = loom_comm_rank(tp), rows = size > 1 ? WIDTH : 2 * WIDTH;
    int64_t s = at->sequence_parallel ? S / size : S;
    float *table = numbers(MOST_RANKS * WIDTH * H, 1), *d_y = numbers(ROWS * H, 2);
    loom_parameter part, twin;
    loom_tensor *y, *y_twin;
    CHECK(table && d_y, "out of memory");
    LOOM_TRY(embed(rank, tp, at, me * rows, rows, table, d_y, &part, &y));
    LOOM_TRY(embed(rank, NULL, at, 0, MOST_RANKS * WIDTH, table, d_y, &twin, &y_twin));
    LOOM_TRY(compare("y", loom_tensor_f32(y), s * B, H,
        loom_tensor_f32(y_twin) + (at->sequence_parallel ? me * s * B * H : 0), H, 0, 0));
    LOOM_TRY(compare("d_table", part.grad, rows, H, twin.grad + me * rows * H, H, 0, 0));
    for (int64_t i = V * H; i < MOST_RANKS * WIDTH * H; i++)
        CHECK(twin.grad[i] == 0, "a padding row has a gradient");
    loom_tensor_release(y);
    loom_tensor_release(y_twin);
    parameter_free(&part);
    parameter_free(&twin);
    free(table);
    free(d_y);
    CHECK(loom_rank_memory(rank).in_use == 0, "memory is still in use");
    return LOOM_OK;
}

static void vocabulary_embedding_is_bit_equal_to_the_unsharded_one(void **state) {
    (void)state;
    on_all_layouts(embedding_on_rank, 0);
}

static loom_status bad_token_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    float *table = numbers(2 * WIDTH * H, 1);
    loom_parameter part;
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *y = NULL;
    int64_t tokens[ROWS];
    CHECK(table, "out of memory");
    LOOM_TRY(parameter_make(&part, "word_embeddings.weight", 2 * WIDTH, H, table));
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    for (int wrong = 0; wrong < 2; wrong++) {
        fill_tokens(tokens);
        tokens[S + 3] = wrong ? V : -1; /* V lies in the padding */
        char expected[64];
        snprintf(expected, sizeof expected, "token %d at position 3 of row 1: expected 0 to 4", wrong ? V : -1);
        CHECK(loom__vocab_embedding(tape, tokens, B, S, &part, 0, V, tp, at->sequence_parallel, &y) ==
                      LOOM_ERR_ARGUMENT &&
                  strstr(loom_error_message(), expected),
            "found \"%s\"", loom_error_message());
    }
    loom_tape_destroy(tape);
    parameter_free(&part);
    free(table);
    return LOOM_OK;
}

static void a_token_outside_the_vocabulary_is_named(void **state) {
    (void)state;
    on_all_layouts(bad_token_on_rank, 0);
}

/* ---- learned positions: each rank adds those of its own rows; their gradients are partial sums over tp ---- */

static loom_status place(loom_rank *rank, int64_t first, int64_t rows, const int64_t *positions, const float *x,
    const float *table, loom_parameter *parameter, loom_tensor **y, float *d_x) {
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *in, *d;
    LOOM_TRY(parameter_make(parameter, "position_embeddings.weight", S, H, table));
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){rows, B, H}, x + first * B * H, &in));
    LOOM_TRY(loom_tape_leaf(tape, in));
    LOOM_TRY(loom__position_embedding(tape, in, parameter, positions, first, y));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){rows, B, H}, x + first * B * H, &d));
    LOOM_TRY(loom_tape_backward(tape, *y, d));
    memcpy(d_x, loom_tape_gradient(tape, in)->data, (size_t)(rows * B * H) * sizeof(float));
    loom_tensor_release(in);
    loom_tensor_release(d);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status position_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    int64_t me = loom_comm_rank(tp), rows = at->sequence_parallel ? S / loom_comm_size(tp) : S;
    int64_t first = at->sequence_parallel ? me * rows : 0, local[ROWS], whole[ROWS];
    float *x = numbers(ROWS * H, 1), *table = numbers(S * H, 2), *d_x = numbers(ROWS * H, 3);
    loom_parameter part, twin;
    loom_tensor *y, *y_twin;
    CHECK(x && table && d_x, "out of memory");
    for (int j = 0; j < B; j++)
        for (int64_t t = 0; t < S; t++)
            whole[j * S + t] = (t * 5 + j) % S;
    for (int j = 0; j < B; j++)
        memcpy(local + j * rows, whole + j * S + first, (size_t)rows * sizeof *local);
    bool given = at->kind;
    LOOM_TRY(place(rank, first, rows, given ? local : NULL, x, table, &part, &y, d_x));
    LOOM_TRY(compare("d_x", d_x, rows * B, H, x + first * B * H, H, 0, 0));
    LOOM_TRY(place(rank, 0, S, given ? whole : NULL, x, table, &twin, &y_twin, d_x));
    LOOM_TRY(compare("y", loom_tensor_f32(y), rows * B, H, loom_tensor_f32(y_twin) + first * B * H, H, 0, 0));
    if (at->sequence_parallel) {
        /* At most two terms a row, in the order of the ranks or the other. */
        LOOM_TRY(loom_all_reduce(tp, part.grad, part.grad, S * H, LOOM_F32, LOOM_SUM));
        LOOM_TRY(compare("d_table", part.grad, S, H, twin.grad, H, 0, 4 * 0x1p-23));
    } else {
        LOOM_TRY(compare("d_table", part.grad, S, H, twin.grad, H, 0, 0));
    }
    loom_tensor_release(y);
    loom_tensor_release(y_twin);
    parameter_free(&part);
    parameter_free(&twin);
    free(x);
    free(table);
    free(d_x);
    CHECK(loom_rank_memory(rank).in_use == 0, "memory is still in use");
    return LOOM_OK;
}

static void position_embedding_equals_the_unsharded_one(void **state) {
    (void)state;
    on_all_layouts(position_on_rank, 0);
    on_all_layouts(position_on_rank, 1);
}

static loom_status bad_position_on_rank(loom_rank *rank, void *argument) {
    float *x = numbers(ROWS * H, 1);
    loom_parameter table;
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *in, *y = NULL;
    (void)argument;
    CHECK(x, "out of memory");
    LOOM_TRY(parameter_make(&table, "position_embeddings.weight", S, H, x));
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S, B, H}, x, &in));
    CHECK(loom__position_embedding(tape, in, &table, NULL, 1, &y) == LOOM_ERR_ARGUMENT &&
              strstr(loom_error_message(), "position 12: position_embeddings.weight has 12 rows"),
        "found \"%s\"", loom_error_message());
    loom_tensor_release(in);
    loom_tape_destroy(tape);
    parameter_free(&table);
    free(x);
    return LOOM_OK;
}

static void a_position_beyond_the_table_is_named(void **state) {
    (void)state;
    on_all_layouts(bad_position_on_rank, 0);
}

/* ---- cross-entropy ---- */

/* Labels of all kinds: good ones, the usual mark of an ignored one, one in the padding and one beyond it. */
static void fill_labels(int64_t *labels) {
    for (int i = 0; i < ROWS; i++)
        labels[i] = i % 8 == 3 ? -100 : i % 8 == 5 ? V : i % 8 == 7 ? 1000 : i * 3 % V;
}

static loom_status entropy(loom_rank *rank, loom_comm *tp, int64_t first, int64_t width, int64_t valid,
    const float *logits, const int64_t *labels, bool keep, float *losses, float *d_logits) {
    int64_t whole = MOST_RANKS * WIDTH;
    float *mine = columns(logits, ROWS, whole, first, width), *weights = numbers(ROWS, 9);
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *y, *d, *kept = NULL;
    CHECK(mine && weights, "out of memory");
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S, B, width}, mine, &x));
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(loom__vocab_cross_entropy(tape, x, labels, first, valid, V, tp, &y));
    CHECK(y->dims == 2 && y->shape[0] == S && y->shape[1] == B, "the losses are not [s, b]");
    if (keep)
        LOOM_TRY(loom_tensor_view(x, 2, (int64_t[]){ROWS, width}, &kept));
    LOOM_TRY(tensor_make(rank, 2, (int64_t[]){S, B}, weights, &d));
    memcpy(losses, y->data, ROWS * sizeof *losses);
    LOOM_TRY(loom_tape_backward(tape, y, d));
    memcpy(d_logits, loom_tape_gradient(tape, x)->data, (size_t)(ROWS * width) * sizeof *d_logits);
    if (kept)
        CHECK(
            memcmp(kept->data, mine, (size_t)(ROWS * width) * sizeof *mine) == 0, "logits that are kept were changed");
    loom_tensor_release(kept);
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tensor_release(d);
    loom_tape_destroy(tape);
    free(mine);
    free(weights);
    return LOOM_OK;
}

/* A loss is a logarithm of a sum of at most 16 exponentials, each of a difference of numbers in [-2, 2]: a relative
 * error of some 40 eps in the sum, 40 eps in the loss, and as much in a gradient of size up to 2. */
static const double entropy_tolerance = 80 * 0x1p-24;

static loom_status entropy_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    bool padded = at->kind & 1, keep = at->kind & 2; /* padding takes part; somebody else keeps the logits */
    loom_comm *tp = loom_rank_world(rank);
    int64_t size = loom_comm_size(tp), me = loom_comm_rank(tp), width = size > 1 ? WIDTH : 2 * WIDTH;
    int64_t first = me * width, all = size * width, labels[ROWS], by_position[ROWS];
    int64_t valid = padded ? width : V - first < 0 ? 0 : V - first > width ? width : V - first;
    float *logits = numbers(ROWS * MOST_RANKS * WIDTH, 3);
    float *d_part = numbers(ROWS * WIDTH * 2, 0), *d_twin = numbers(ROWS * MOST_RANKS * WIDTH, 0);
    float losses[ROWS], losses_twin[ROWS];
    CHECK(logits && d_part && d_twin, "out of memory");
    fill_labels(labels);
    for (int t = 0; t < S; t++)
        for (int j = 0; j < B; j++)
            by_position[t * B + j] = labels[j * S + t];
    LOOM_TRY(entropy(rank, tp, first, width, valid, logits, labels, keep, losses, d_part));
    LOOM_TRY(entropy(rank, NULL, 0, all, padded ? all : V, logits, labels, false, losses_twin, d_twin));
    LOOM_TRY(compare("losses", losses, ROWS, 1, losses_twin, 1, 0, entropy_tolerance));
    LOOM_TRY(compare("d_logits", d_part, ROWS, width, d_twin, all, first, entropy_tolerance));
    for (int r = 0; r < ROWS; r++) {
        bool ignored = by_position[r] < 0 || by_position[r] >= V;
        CHECK((losses[r] == 0) == ignored, "row %d with label %lld has loss %g", r, (long long)by_position[r],
            (double)losses[r]);
        for (int64_t c = 0; c < width; c++)
            CHECK(!(ignored || c >= valid) || d_part[r * width + c] == 0,
                "row %d with label %lld: column %lld has gradient %g", r, (long long)by_position[r], (long long)c,
                (double)d_part[r * width + c]);
    }
    free(logits);
    free(d_part);
    free(d_twin);
    CHECK(loom_rank_memory(rank).in_use == 0, "memory is still in use");
    return LOOM_OK;
}

static void cross_entropy_equals_the_unsharded_one(void **state) {
    (void)state;
    on_all_layouts(entropy_on_rank, 0);
}

static void padding_takes_part_where_asked_for(void **state) {
    (void)state;
    on_all_layouts(entropy_on_rank, 1);
}

static void logits_that_somebody_keeps_are_left_alone(void **state) {
    (void)state;
    on_all_layouts(entropy_on_rank, 2);
}

/* Four logits 1, 2, 3, 4, the last one the target: 0.44019 on any number of ranks, also far from zero. */
static loom_status four_logits_on_rank(loom_rank *rank, void *argument) {
    loom_comm *tp = loom_rank_world(rank);
    int64_t size = loom_comm_size(tp), width = (4 + size - 1) / size, first = loom_comm_rank(tp) * width;
    int64_t valid = 4 - first < 0 ? 0 : 4 - first > width ? width : 4 - first, label = 3;
    loom_tape_options options = {0};
    (void)argument;
    for (int shift = -1000; shift <= 1000; shift += 1000) {
        float logits[4];
        loom_tape *tape;
        loom_tensor *x, *y;
        for (int64_t c = 0; c < width; c++)
            logits[c] = c < valid ? (float)(shift + 1 + first + c) : 1e9f; /* padding must not be looked at */
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(tensor_make(rank, 3, (int64_t[]){1, 1, width}, logits, &x));
        LOOM_TRY(loom__vocab_cross_entropy(tape, x, &label, first, valid, 4, tp, &y));
        double loss = (double)loom_tensor_f32(y)[0];
        /* The logits of size 1000 leave 2^-14 of the loss. */
        CHECK(fabs(loss - 0.4401896985611953) <= (shift ? 0x1p-13 : 1e-6), "the loss is %.7f at a shift of %d", loss,
            shift);
        loom_tensor_release(x);
        loom_tensor_release(y);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static void logits_1_2_3_4_give_0_44019_on_any_number_of_ranks(void **state) {
    (void)state;
    on_all_layouts(four_logits_on_rank, 0);
}

static loom_status gather_on_rank(loom_rank *rank, void *argument) {
    loom_comm *tp = loom_rank_world(rank);
    int64_t size = loom_comm_size(tp), width = size > 1 ? WIDTH : 2 * WIDTH, first = loom_comm_rank(tp) * width;
    float *logits = numbers(ROWS * MOST_RANKS * WIDTH, 3);
    float *mine = columns(logits, ROWS, MOST_RANKS * WIDTH, first, width), out[ROWS * V + 1];
    loom_tensor *x;
    (void)argument;
    CHECK(logits && mine, "out of memory");
    out[ROWS * V] = 12345;
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S, B, width}, mine, &x));
    LOOM_TRY(loom__gather_logits(x, V, tp, out));
    for (int t = 0; t < S; t++)
        for (int j = 0; j < B; j++)
            for (int c = 0; c < V; c++)
                CHECK(out[(j * S + t) * V + c] == logits[(t * B + j) * MOST_RANKS * WIDTH + c],
                    "logit %d of position %d of row %d is another's", c, t, j);
    CHECK(out[ROWS * V] == 12345, "the gather wrote behind its end");
    loom_tensor_release(x);
    free(logits);
    free(mine);
    return LOOM_OK;
}

static void gathered_logits_are_whole_and_without_padding(void **state) {
    (void)state;
    on_all_layouts(gather_on_rank, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vocabulary_embedding_is_bit_equal_to_the_unsharded_one),
        cmocka_unit_test(a_token_outside_the_vocabulary_is_named),
        cmocka_unit_test(position_embedding_equals_the_unsharded_one),
        cmocka_unit_test(a_position_beyond_the_table_is_named),
        cmocka_unit_test(cross_entropy_equals_the_unsharded_one),
        cmocka_unit_test(padding_takes_part_where_asked_for),
        cmocka_unit_test(logits_that_somebody_keeps_are_left_alone),
        cmocka_unit_test(logits_1_2_3_4_give_0_44019_on_any_number_of_ranks),
        cmocka_unit_test(gathered_logits_are_whole_and_without_padding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
