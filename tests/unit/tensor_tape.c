/* The tape's promises beside the numbers: who keeps what for how long, when a parameter is ready, what recomputation
 * and deferral may not change, how errors leave things. */
#include "tensor_support.h"

enum { H = 6, VECTORS = 4 };
static const int64_t shape[3] = {3, 2, H};
static const int64_t samples[2] = {8, 5};

/* ---- a small network: norm, activation with bias, dropout with bias and residual, norm with the first weight again
 */

typedef struct network {
    vector vectors[VECTORS]; /* weight (used twice), norm bias, activation bias, dropout bias */
    float at_ready[VECTORS][WIDEST];
    int ready[VECTORS];
    int ready_early; /* a parameter was called ready before its last use */
} network;

static void network_make(network *n) {
    static const char *const names[VECTORS] = {"weight", "norm.bias", "activation.bias", "dropout.bias"};
    *n = (network){0};
    for (int i = 0; i < VECTORS; i++)
        vector_make(&n->vectors[i], names[i], H, 30 + (uint32_t)i);
}

static loom_status block(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    network *n = argument;
    loom_dropout dropout = {0.3f, 11, 2, LOOM_DROPOUT_MLP};
    loom_tensor *normed = NULL, *active = NULL, *dropped = NULL;
    loom_status status = loom_norm(tape, x, &n->vectors[0].parameter, &n->vectors[1].parameter, 1e-5f, &normed);
    if (!status)
        status = loom_activate(tape, LOOM_GELU_TANH, normed, &n->vectors[2].parameter, &active);
    if (!status)
        status = loom_bias_dropout_add(
            tape, active, &n->vectors[3].parameter, x, &dropout, samples, loom_positions_from(0), &dropped);
    if (!status)
        status = loom_norm(tape, dropped, &n->vectors[0].parameter, &n->vectors[1].parameter, 1e-5f, output);
    loom_tensor_release(normed);
    loom_tensor_release(active);
    loom_tensor_release(dropped);
    return status;
}

static loom_status recomputed_block(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    return loom_recompute_call(tape, block, argument, NULL, x, output);
}

/* Half of the work recomputed inside what is recomputed. */
static loom_status nested_block(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    return loom_recompute_call(tape, recomputed_block, argument, NULL, x, output);
}

static void on_ready(void *context, loom_parameter *parameter) {
    network *n = context;
    for (int i = 0; i < VECTORS; i++) {
        if (parameter != &n->vectors[i].parameter)
            continue;
        n->ready[i]++;
        n->ready_early |= parameter->pending_uses != 0;
        memcpy(n->at_ready[i], parameter->grad, sizeof n->at_ready[i]);
    }
}

typedef struct manner {
    loom_recomputed function;
    bool defer, leaf;
} manner;

/* Two blocks, one after the other, with gradients in the network and in d_x. */
static loom_status walk(loom_rank *rank, network *n, const manner *how, float *d_x) {
    float numbers[3 * 2 * H];
    loom_tape_options options = {
        .record = true, .defer_weights = how->defer, .parameter_ready = on_ready, .context = n};
    loom_tape *tape;
    loom_tensor *x, *middle = NULL, *y = NULL, *d_y;
    network_make(n);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    if (how->leaf)
        LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(how->function(tape, n, x, &middle));
    LOOM_TRY(how->function(tape, n, middle, &y));
    loom_tensor_release(middle);
    fill(numbers, 3 * 2 * H, 2);
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &d_y));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    loom_tensor_release(y);
    loom_tensor_release(d_y);
    if (how->defer) {
        for (int i = 0; i < VECTORS; i++)
            CHECK(n->ready[i] == 0, "%s is ready before its weight half", n->vectors[i].parameter.name);
        LOOM_TRY(loom_tape_run_weights(tape));
    }
    loom_tensor *gradient = loom_tape_gradient(tape, x);
    CHECK((gradient != NULL) == how->leaf, "gradient of an input that is %s leaf", how->leaf ? "a" : "no");
    if (gradient)
        memcpy(d_x, gradient->data, (size_t)loom_tensor_count(x) * sizeof(float));
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status compare_manners(loom_rank *rank, void *argument) {
    static const struct {
        const char *name;
        loom_recomputed function;
    } functions[] = {{"plain", block}, {"recomputed", recomputed_block}, {"nested", nested_block}};
    (void)argument;
    for (int leaf = 1; leaf >= 0; leaf--) {
        network first, other;
        float d_first[3 * 2 * H] = {0}, d_other[3 * 2 * H] = {0};
        for (int i = 0; i < 6; i++) {
            manner how = {functions[i % 3].function, i >= 3, leaf};
            network *n = i ? &other : &first;
            LOOM_TRY(walk(rank, n, &how, i ? d_other : d_first));
            CHECK(!n->ready_early, "%s: a parameter was ready while uses were pending", functions[i % 3].name);
            for (int v = 0; v < VECTORS; v++) {
                const char *name = n->vectors[v].parameter.name;
                CHECK(n->ready[v] == 1, "%s%s: %s was ready %d times", functions[i % 3].name,
                    how.defer ? ", deferred" : "", name, n->ready[v]);
                CHECK(memcmp(n->at_ready[v], n->vectors[v].grad, H * sizeof(float)) == 0,
                    "%s: the gradient of %s changed after it was ready", functions[i % 3].name, name);
                CHECK(n->vectors[v].parameter.grad_written, "%s%s, input %s leaf: %s has no gradient",
                    functions[i % 3].name, how.defer ? ", deferred" : "", leaf ? "a" : "no", name);
                CHECK(memcmp(first.vectors[v].grad, n->vectors[v].grad, H * sizeof(float)) == 0,
                    "%s%s: another gradient of %s than plain", functions[i % 3].name, how.defer ? ", deferred" : "",
                    name);
            }
            if (i)
                CHECK(memcmp(d_first, d_other, sizeof d_first) == 0, "%s%s: another d_x than plain",
                    functions[i % 3].name, how.defer ? ", deferred" : "");
        }
    }
    return LOOM_OK;
}

static void recomputed_and_deferred_gradients_are_bit_equal_and_ready_once(void **state) {
    (void)state;
    must_run(compare_manners, NULL);
}

/* ---- memory ---- */

static loom_status infer(loom_rank *rank, void *argument) {
    network n;
    float numbers[3 * 2 * H];
    loom_tape_options options = {0};
    loom_tape *tape;
    loom_tensor *x, *y = NULL;
    (void)argument;
    network_make(&n);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    size_t before = loom_rank_memory(rank).in_use;
    LOOM_TRY(block(tape, &n, x, &y));
    size_t after = loom_rank_memory(rank).in_use;
    CHECK(after == 2 * before, "inference keeps %zu bytes beside its input of %zu", after - before, before);
    loom_tensor_release(y);
    CHECK(loom_rank_memory(rank).in_use == before, "inference keeps memory after its output has gone");
    for (int i = 0; i < VECTORS; i++)
        CHECK(n.vectors[i].parameter.pending_uses == 0, "inference counts a use of a parameter");
    CHECK(loom_tape_gradient(tape, x) == NULL, "inference gives a gradient");
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void inference_keeps_nothing(void **state) {
    (void)state;
    must_run(infer, NULL);
}

static loom_status repeat(loom_rank *rank, void *argument) {
    network n;
    float d_x[3 * 2 * H];
    manner how = {block, false, true};
    size_t high = 0;
    (void)argument;
    for (int i = 0; i < 10; i++) {
        LOOM_TRY(walk(rank, &n, &how, d_x));
        loom_memory memory = loom_rank_memory(rank);
        CHECK(i == 0 || memory.high_water == high, "high water grew from %zu to %zu in step %d", high,
            memory.high_water, i);
        high = memory.high_water;
    }
    return LOOM_OK;
}

static void a_repeated_step_needs_no_more_memory(void **state) {
    (void)state;
    must_run(repeat, NULL);
}

/* ---- errors ---- */

static loom_status boom_backward(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    (void)tape;
    (void)node;
    (void)d_y;
    return loom_fail(LOOM_ERR_STATE, "as it was told to");
}

typedef struct boom_state {
    int *released;
    void *memory;
} boom_state;

static void boom_release(loom_node *node) {
    boom_state *state = loom_node_state(node);
    ++*state->released;
    free(state->memory);
}

static const loom_op boom_op = {"boom", boom_backward, NULL, boom_release};

static loom_status boom(loom_tape *tape, int *released, loom_tensor *x, loom_tensor **output) {
    loom_tensor *y;
    loom_node *node;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, x->dims, x->shape, &y));
    memcpy(y->data, x->data, (size_t)loom_tensor_count(x) * sizeof(float));
    loom_status status = loom_tape_record(tape, &boom_op, sizeof(boom_state), &x, 1, NULL, 0, y, &node);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    if (node)
        *(boom_state *)loom_node_state(node) = (boom_state){released, malloc(100)};
    *output = y;
    return LOOM_OK;
}

/* fails: 0 in the first operation, 1 in a later one, 2 in the backward, 3 in the backward after deferred halves. */
static loom_status break_off(loom_rank *rank, void *argument) {
    int fails = *(int *)argument, released = 0;
    network n;
    vector narrow;
    float numbers[3 * 2 * H];
    loom_tape_options options = {.record = true, .defer_weights = fails == 3};
    loom_tape *tape;
    loom_tensor *x, *a = NULL, *b = NULL, *c = NULL;
    network_make(&n);
    vector_make(&narrow, "narrow.weight", H - 1, 3);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    LOOM_TRY(loom_tape_leaf(tape, x));
    loom_tape_scope(tape, "decoder.layers.3");
    loom_status status = fails == 0 ? loom_norm(tape, x, &narrow.parameter, NULL, 1e-5f, &a) : block(tape, &n, x, &a);
    if (!status)
        status = boom(tape, &released, a, &b);
    if (!status)
        status = fails == 1 ? loom_activate(tape, LOOM_SWIGLU, b, &narrow.parameter, &c) : block(tape, &n, b, &c);
    if (!status)
        status = loom_tape_backward(tape, c, c);
    loom_status wanted = fails < 2 ? LOOM_ERR_ARGUMENT : LOOM_ERR_STATE;
    CHECK(status == wanted, "found %s, expected %s", loom_status_name(status), loom_status_name(wanted));
    const char *message = loom_error_message();
    CHECK(strstr(message, fails < 2 ? "narrow.weight" : "backward of boom in decoder.layers.3: as it was told to"),
        "the message is \"%s\"", message);
    loom_tensor_release(a);
    loom_tensor_release(b);
    loom_tensor_release(c);
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    for (int i = 0; i < VECTORS; i++)
        CHECK(n.vectors[i].parameter.pending_uses == 0, "%lld uses of %s are still pending",
            (long long)n.vectors[i].parameter.pending_uses, n.vectors[i].parameter.name);
    CHECK(released == (fails > 0), "the operation's state was released %d times", released);
    return LOOM_OK;
}

static void a_failing_operation_releases_everything(void **state) {
    (void)state;
    for (int fails = 0; fails < 2; fails++)
        must_run(break_off, &fails);
}

static void a_failing_backward_names_itself_and_releases_everything(void **state) {
    (void)state;
    for (int fails = 2; fails < 4; fails++)
        must_run(break_off, &fails);
}

/* y = x; the weight half counts itself and fails as often as it was told to. */
typedef struct weight_half {
    int runs, fails;
    vector vector;
} weight_half;

static loom_status pass_on(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    return loom_tape_give(tape, node, 0, loom_tensor_retain(d_y));
}

static loom_status count_run(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    weight_half *half = *(weight_half **)loom_node_state(node);
    (void)tape;
    (void)d_y;
    half->runs++;
    return half->fails-- > 0 ? loom_fail(LOOM_ERR_STATE, "as it was told to") : LOOM_OK;
}

static loom_status weigh(loom_tape *tape, weight_half *half, loom_tensor *x, loom_tensor **output) {
    static const loom_op op = {"weigh", pass_on, count_run, NULL};
    loom_parameter *parameter = &half->vector.parameter;
    loom_node *node;
    LOOM_TRY(loom_tensor_view(x, x->dims, x->shape, output));
    LOOM_TRY(loom_tape_record(tape, &op, sizeof half, &x, 1, &parameter, 1, *output, &node));
    *(weight_half **)loom_node_state(node) = half;
    return LOOM_OK;
}

static loom_status go_on(loom_rank *rank, void *argument) {
    enum { HALVES = 3 };
    float numbers[3 * 2 * H];
    weight_half halves[HALVES] = {{0}};
    loom_tape_options options = {.record = true, .defer_weights = true};
    loom_tape *tape;
    loom_tensor *x[HALVES + 1];
    (void)argument;
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x[0]));
    for (int i = 0; i < HALVES; i++) {
        vector_make(&halves[i].vector, "weight", H, 1);
        LOOM_TRY(weigh(tape, &halves[i], x[i], &x[i + 1]));
    }
    halves[1].fails = 2;
    LOOM_TRY(loom_tape_backward(tape, x[HALVES], x[HALVES]));
    for (int i = 0; i < 2; i++)
        CHECK(loom_tape_run_weights(tape) == LOOM_ERR_STATE, "the failure was lost");
    LOOM_TRY(loom_tape_run_weights(tape));
    LOOM_TRY(loom_tape_run_weights(tape));
    for (int i = 0; i < HALVES; i++) {
        CHECK(halves[i].runs == (i == 1 ? 3 : 1), "half %d ran %d times", i, halves[i].runs);
        CHECK(halves[i].vector.parameter.pending_uses == 0, "half %d has uses pending", i);
    }
    for (int i = 0; i <= HALVES; i++)
        loom_tensor_release(x[i]);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void weight_halves_go_on_where_they_had_failed(void **state) {
    (void)state;
    must_run(go_on, NULL);
}

static loom_status failing_block(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    loom_tensor *y;
    LOOM_TRY(block(tape, argument, x, &y));
    loom_tensor_release(y);
    (void)output;
    return loom_fail(LOOM_ERR_NUMERIC, "inside");
}

static void count_free(void *argument) {
    ++*(int *)argument;
}

static loom_status fail_inside(loom_rank *rank, void *argument) {
    network n;
    float numbers[3 * 2 * H];
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *y = NULL;
    (void)argument;
    network_make(&n);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    LOOM_TRY(loom_tape_leaf(tape, x));
    CHECK(loom_recompute_call(tape, failing_block, &n, NULL, x, &y) == LOOM_ERR_NUMERIC, "the error was lost");
    CHECK(loom_tape_records(tape), "a failed recomputation leaves the tape not recording");
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void a_recomputation_that_fails_leaves_the_tape_as_it_was(void **state) {
    (void)state;
    must_run(fail_inside, NULL);
}

static loom_status same(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    (void)tape;
    (void)argument;
    *output = loom_tensor_retain(x);
    return LOOM_OK;
}

/* The argument is freed once, whether the call is kept, or not, or never walked. */
static loom_status free_once(loom_rank *rank, void *argument) {
    float numbers[3 * 2 * H];
    (void)argument;
    fill(numbers, 3 * 2 * H, 1);
    for (int kind = 0; kind < 3; kind++) {
        int freed = 0;
        loom_tape_options options = {.record = kind > 0};
        loom_tape *tape;
        loom_tensor *x, *y;
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
        LOOM_TRY(loom_tape_leaf(tape, x));
        LOOM_TRY(loom_recompute_call(tape, same, &freed, count_free, x, &y));
        CHECK(freed == (kind == 0), "the argument was freed %d times before the walk", freed);
        if (kind == 2) {
            LOOM_TRY(loom_tape_backward(tape, y, y));
            CHECK(memcmp(loom_tape_gradient(tape, x)->data, numbers, sizeof numbers) == 0,
                "the gradient of nothing is not what came in");
        }
        loom_tensor_release(x);
        loom_tensor_release(y);
        loom_tape_destroy(tape);
        CHECK(freed == 1, "the argument was freed %d times", freed);
    }
    return LOOM_OK;
}

static void the_argument_of_a_recomputation_is_freed_once(void **state) {
    (void)state;
    must_run(free_once, NULL);
}

/* ---- numbers that are none ---- */

static loom_status find_nan(loom_rank *rank, void *argument) {
    network n;
    float numbers[3 * 2 * H];
    (void)argument;
    network_make(&n);
    fill(numbers, 3 * 2 * H, 1);
    n.vectors[2].data[4] = NAN;
    for (int checked = 0; checked < 2; checked++) {
        loom_tape_options options = {.check_finite = checked};
        loom_tape *tape;
        loom_tensor *x, *y = NULL;
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
        loom_tape_scope(tape, "decoder.layers.7");
        loom_status status = block(tape, &n, x, &y);
        if (checked) {
            const char *message = loom_error_message();
            CHECK(status == LOOM_ERR_NUMERIC, "found %s", loom_status_name(status));
            CHECK(strstr(message, "activation in decoder.layers.7") && strstr(message, "rank 0"),
                "the message is \"%s\"", message);
        } else {
            CHECK(status == LOOM_OK && isnan(loom_tensor_f32(y)[4]), "a NaN was hidden");
        }
        loom_tensor_release(x);
        loom_tensor_release(y);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static void the_first_nan_is_named_with_operation_and_scope(void **state) {
    (void)state;
    must_run(find_nan, NULL);
}

/* ---- whose value it is ---- */

/* Address after address: a new tape often lies where an old one lay. */
static loom_status reuse(loom_rank *rank, void *argument) {
    float numbers[3 * 2 * H];
    loom_tape_options options = {.record = true};
    loom_tensor *x;
    network n;
    (void)argument;
    network_make(&n);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    for (int i = 0; i < 20; i++) {
        loom_tape *tape;
        loom_tensor *y, *filler = NULL;
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        CHECK(loom_tape_gradient(tape, x) == NULL, "a new tape has a gradient of an old tape's leaf");
        if (i % 2) {
            LOOM_TRY(make_tensor(rank, 3, shape, numbers, &filler));
            LOOM_TRY(loom_tape_leaf(tape, filler));
        } else {
            LOOM_TRY(loom_tape_leaf(tape, x));
        }
        LOOM_TRY(block(tape, &n, x, &y));
        LOOM_TRY(loom_tape_backward(tape, y, y));
        CHECK((loom_tape_gradient(tape, x) != NULL) == (i % 2 == 0), "an old tape's leaf has a gradient on a new tape");
        if (filler)
            CHECK(loom_tape_gradient(tape, filler) == NULL, "a gradient went to a value that nothing used");
        loom_tensor_release(filler);
        loom_tensor_release(y);
        loom_tape_destroy(tape);
    }
    loom_tensor_release(x);
    return LOOM_OK;
}

static void a_leaf_of_an_old_tape_is_no_value_of_a_new_one(void **state) {
    (void)state;
    must_run(reuse, NULL);
}

static loom_status misuse(loom_rank *rank, void *argument) {
    float numbers[3 * 2 * H];
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *y, *small;
    network n;
    (void)argument;
    network_make(&n);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    LOOM_TRY(make_tensor(rank, 1, shape, numbers, &small));
    LOOM_TRY(block(tape, &n, x, &y));
    CHECK(loom_tape_backward(tape, x, x) == LOOM_ERR_ARGUMENT, "walked from a tensor of no tape");
    CHECK(loom_tape_backward(tape, y, small) == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), "36"),
        "walked with a gradient of another size: %s", loom_error_message());
    LOOM_TRY(loom_tape_backward(tape, y, y));
    CHECK(loom_tape_backward(tape, y, y) == LOOM_ERR_STATE, "walked twice");
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tensor_release(small);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void a_walk_from_elsewhere_of_another_size_or_again_is_refused(void **state) {
    (void)state;
    must_run(misuse, NULL);
}

/* ---- gradients that are views ---- */

static loom_status reshape_backward(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *d_x;
    LOOM_TRY(loom_tensor_view(d_y, 3, shape, &d_x));
    return loom_tape_give(tape, node, 0, d_x);
}

/* y = x under another shape; the gradient goes back as a view of what came. */
static loom_status reshape(loom_tape *tape, loom_tensor *x, const int64_t *to, loom_tensor **output) {
    static const loom_op op = {"reshape", reshape_backward, NULL, NULL};
    loom_node *node;
    loom_tensor *y;
    LOOM_TRY(loom_tensor_view(x, 3, to, &y));
    loom_status status = loom_tape_record(tape, &op, 0, &x, 1, NULL, 0, y, &node);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

/* The rotation before the reshape turns its gradient in place where it may; here it is a view of the caller's. */
static loom_status walk_views(loom_rank *rank, void *argument) {
    static const int64_t flat[3] = {6, 1, H};
    static const float cosine[18] = {0, 0, 0}, sine[18] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    float numbers[3 * 2 * H], ones[3 * 2 * H];
    (void)argument;
    fill(numbers, 3 * 2 * H, 1);
    for (int i = 0; i < 3 * 2 * H; i++)
        ones[i] = (float)(i + 1);
    for (int defer = 0; defer < 2; defer++) {
        loom_tape_options options = {.record = true, .defer_weights = defer};
        loom_rope_table table = {18, 2, cosine, sine};
        loom_tape *tape;
        loom_tensor *x, *rotated, *flat_x, *biased, *d_y;
        vector bias;
        vector_make(&bias, "bias", H, 4);
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
        LOOM_TRY(loom_tape_leaf(tape, x));
        LOOM_TRY(loom_rope(tape, x, &table, 1, 1, 2, NULL, 0, &rotated));
        LOOM_TRY(reshape(tape, rotated, flat, &flat_x));
        loom_dropout none = {0};
        LOOM_TRY(
            loom_bias_dropout_add(tape, flat_x, &bias.parameter, NULL, &none, NULL, loom_positions_from(0), &biased));
        LOOM_TRY(make_tensor(rank, 3, flat, ones, &d_y));
        LOOM_TRY(loom_tape_backward(tape, biased, d_y));
        LOOM_TRY(loom_tape_run_weights(tape));
        CHECK(memcmp(d_y->data, ones, sizeof ones) == 0, "the walk changed the gradient it was given");
        for (int c = 0; c < H; c++) {
            float expected = 0;
            for (int r = 0; r < 6; r++)
                expected += ones[r * H + c];
            CHECK(bias.grad[c] == expected, "element %d of the bias' gradient is %g, expected %g", c,
                (double)bias.grad[c], (double)expected);
        }
        /* A quarter turn of the pairs (q0 q1) and (k0 k1); v stays. */
        const float *d_x = loom_tensor_f32(loom_tape_gradient(tape, x));
        for (int i = 0; i < 3 * 2 * H; i++) {
            int c = i % H;
            float expected = c >= 4 ? ones[i] : c % 2 ? -ones[i - 1] : ones[i + 1];
            CHECK(d_x[i] == expected, "element %d of d_x is %g, expected %g", i, (double)d_x[i], (double)expected);
        }
        loom_tensor_release(x);
        loom_tensor_release(rotated);
        loom_tensor_release(flat_x);
        loom_tensor_release(biased);
        loom_tensor_release(d_y);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static void a_gradient_that_is_a_view_is_not_changed_in_place(void **state) {
    (void)state;
    must_run(walk_views, NULL);
}

/* ---- arguments ---- */

static loom_status refuse(loom_rank *rank, void *argument) {
    float numbers[3 * 2 * H];
    float table_values[8] = {0};
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *small, *none, *y = NULL;
    vector narrow, wide;
    (void)argument;
    vector_make(&narrow, "narrow", H - 1, 1);
    vector_make(&wide, "wide", H, 1);
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    LOOM_TRY(make_tensor(rank, 1, shape, numbers, &small));
    LOOM_TRY(make_tensor(rank, 0, shape, numbers, &none));
    loom_dropout dropout = {0.5f, 1, 1, LOOM_DROPOUT_MLP}, off = {0};
    loom_rope_table table = {4, 2, table_values, table_values};
    const int32_t below[6] = {0, 1, 2, 0, -1, 2}, beyond[6] = {0, 1, 4, 0, 1, 2};
    loom_attention_options attention = {.n = 1, .g = 1, .d = 2, .scale = 1, .dropout = dropout};
    loom_attention_options uneven = {.n = 3, .g = 2, .d = 2, .scale = 1};
#define REFUSED(call, text)                                                                                            \
    CHECK((call) == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), (text)) && !y, "%s: \"%s\"", #call,              \
        loom_error_message())
    REFUSED(loom_norm(tape, x, &wide.parameter, &narrow.parameter, 1e-5f, &y), "narrow has 5 elements");
    REFUSED(loom_activate(tape, LOOM_GELU_ERF, none, NULL, &y), "axis");
    REFUSED(loom_activate(tape, LOOM_SWIGLU, small, NULL, &y), "odd width of 3");
    REFUSED(loom_bias_dropout_add(tape, small, NULL, NULL, &off, NULL, loom_positions_from(0), &y), "1 dimensions");
    REFUSED(loom_bias_dropout_add(tape, x, &narrow.parameter, NULL, &off, NULL, loom_positions_from(0), &y),
        "narrow has 5 elements");
    REFUSED(loom_bias_dropout_add(tape, x, NULL, small, &off, NULL, loom_positions_from(0), &y), "3 elements for 36");
    REFUSED(loom_bias_dropout_add(tape, x, NULL, NULL, &dropout, NULL, loom_positions_from(0), &y),
        "0.5 needs the sample numbers");
    REFUSED(loom_add(tape, x, small, &y), "adding 3 elements to 36");
    REFUSED(loom_rope(tape, x, &table, 1, 2, 2, NULL, 0, &y), "found width 6, expected 8");
    REFUSED(loom_rope(tape, x, &table, 1, 1, 2, NULL, 2, &y), "position 4, expected 0 to 3");
    REFUSED(loom_rope(tape, x, &table, 1, 1, 2, below, 0, &y), "position -1, expected 0 to 3");
    REFUSED(loom_rope(tape, x, &table, 1, 1, 2, beyond, 0, &y), "position 4, expected 0 to 3");
    REFUSED(loom_attention(tape, x, &attention, &y), "0.5 needs the sample numbers");
    REFUSED(loom_attention(tape, x, &uneven, &y), "3 heads are not a multiple of 2");
    REFUSED(loom_tensor_view(x, 1, shape, &y), "3 elements, expected 36");
    REFUSED(loom_tensor_create(rank, LOOM_F32, 5, shape, &y), "found 5");
    REFUSED(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){2, -1}, &y), "-1");
    REFUSED(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){INT64_MAX, 3}, &y), "does not fit");
    REFUSED(loom_tensor_create(rank, LOOM_F32, 1, (int64_t[]){INT64_MAX}, &y), "too large");
#undef REFUSED
    loom_tensor_release(x);
    loom_tensor_release(small);
    loom_tensor_release(none);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void arguments_that_do_not_fit_are_named(void **state) {
    (void)state;
    must_run(refuse, NULL);
}

/* Frozen parameters take no gradient and hold no node. */
static loom_status freeze(loom_rank *rank, void *argument) {
    network n;
    float numbers[3 * 2 * H];
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *y;
    (void)argument;
    network_make(&n);
    for (int i = 0; i < VECTORS; i++)
        n.vectors[i].parameter.grad = NULL;
    fill(numbers, 3 * 2 * H, 1);
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
    size_t before = loom_rank_memory(rank).in_use;
    LOOM_TRY(block(tape, &n, x, &y));
    CHECK(loom_rank_memory(rank).in_use == 2 * before, "a frozen network keeps activations");
    loom_tensor_release(y);
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(block(tape, &n, x, &y));
    LOOM_TRY(loom_tape_backward(tape, y, y));
    CHECK(loom_tape_gradient(tape, x) != NULL, "the input of a frozen network has no gradient");
    for (int i = 0; i < VECTORS; i++)
        CHECK(!n.vectors[i].parameter.grad_written, "a frozen parameter was given a gradient");
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

/* Of weight and bias of a layer norm either may be frozen: the other's gradient does not change. */
static loom_status freeze_half(loom_rank *rank, void *argument) {
    float numbers[3 * 2 * H];
    vector reference[2];
    (void)argument;
    fill(numbers, 3 * 2 * H, 1);
    for (int frozen = -1; frozen < 2; frozen++) {
        vector v[2];
        loom_tape_options options = {.record = true};
        loom_tape *tape;
        loom_tensor *x, *y;
        for (int i = 0; i < 2; i++)
            vector_make(&v[i], i ? "bias" : "weight", H, 5 + (uint32_t)i);
        if (frozen >= 0)
            v[frozen].parameter.grad = NULL;
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(make_tensor(rank, 3, shape, numbers, &x));
        LOOM_TRY(loom_norm(tape, x, &v[0].parameter, &v[1].parameter, 1e-5f, &y));
        LOOM_TRY(loom_tape_backward(tape, y, x));
        for (int i = 0; i < 2; i++) {
            CHECK(v[i].parameter.grad_written == (i != frozen), "%s: written %d", v[i].parameter.name,
                v[i].parameter.grad_written);
            if (frozen >= 0 && i != frozen)
                CHECK(memcmp(v[i].grad, reference[i].grad, H * sizeof(float)) == 0,
                    "%s has another gradient beside a frozen one", v[i].parameter.name);
            if (frozen < 0)
                reference[i] = v[i];
        }
        loom_tensor_release(x);
        loom_tensor_release(y);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static void half_of_a_norm_may_be_frozen(void **state) {
    (void)state;
    must_run(freeze_half, NULL);
}

static void frozen_parameters_keep_nothing_and_pass_the_gradient_on(void **state) {
    (void)state;
    must_run(freeze, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recomputed_and_deferred_gradients_are_bit_equal_and_ready_once),
        cmocka_unit_test(inference_keeps_nothing),
        cmocka_unit_test(a_repeated_step_needs_no_more_memory),
        cmocka_unit_test(a_failing_operation_releases_everything),
        cmocka_unit_test(a_failing_backward_names_itself_and_releases_everything),
        cmocka_unit_test(weight_halves_go_on_where_they_had_failed),
        cmocka_unit_test(a_recomputation_that_fails_leaves_the_tape_as_it_was),
        cmocka_unit_test(the_argument_of_a_recomputation_is_freed_once),
        cmocka_unit_test(the_first_nan_is_named_with_operation_and_scope),
        cmocka_unit_test(a_leaf_of_an_old_tape_is_no_value_of_a_new_one),
        cmocka_unit_test(a_walk_from_elsewhere_of_another_size_or_again_is_refused),
        cmocka_unit_test(a_gradient_that_is_a_view_is_not_changed_in_place),
        cmocka_unit_test(arguments_that_do_not_fit_are_named),
        cmocka_unit_test(frozen_parameters_keep_nothing_and_pass_the_gradient_on),
        cmocka_unit_test(half_of_a_norm_may_be_frozen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
