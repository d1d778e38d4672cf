/* Every kernel but the product and attention (which have their own tests), in every table of this machine: near the
 * double reference, the same bits for any team, NaN never hidden; and on 16-bit elements exactly what fp32 gives. */
#include "kernel_support.h"

typedef struct shape {
    int64_t rows, cols;
    int variant;
    loom_row_coordinates coordinates;
    const int64_t *tokens;
    const int32_t *positions;
} shape;

enum { INPUTS = 6 };

#define E(i) in[i]
#define R(i) in[i]
#define OUT_E out
#define OUT_R out
#define TABLE loom_kernels
#define REAL float
#define INPUT float *const *
#define OUTPUT float *
#define OP(name) table_##name
#include "kernel_ops.h"
#undef TABLE
#undef REAL
#undef INPUT
#undef OUTPUT
#undef OP
#define TABLE kernels64
#define REAL double
#define INPUT double *const *
#define OUTPUT double *
#define OP(name) exact_##name
#include "kernel_ops.h"
#undef TABLE
#undef REAL
#undef INPUT
#undef OUTPUT
#undef OP
#undef E
#undef R
#undef OUT_E
#undef OUT_R

/* Arrays in two forms that hold the same numbers. */
typedef struct both {
    float *wide;
    uint16_t *narrow;
} both;

#define NARROW 1
#define E(i) in[i].narrow
#define R(i) in[i].wide
#define OUT_E out.narrow
#define OUT_R out.wide
#define TABLE loom_kernels16
#define REAL float
#define INPUT const both *
#define OUTPUT both
#define OP(name) narrow_##name
#include "kernel_ops.h"
#undef TABLE
#undef REAL
#undef OP

typedef struct operation {
    const char *name;
    void (*table)(const loom_kernels *, loom_team *, const shape *, float *const *, float *);
    void (*exact)(const kernels64 *, loom_team *, const shape *, double *const *, double *);
    void (*narrow)(const loom_kernels16 *, loom_team *, const shape *, const both *, both); /* NULL: fp32 alone */
    int variants;
    int inputs;         /* in[0 … inputs-1] are read wherever they lie within the shape: NaN there must show */
    int64_t wide, tall; /* elements of the output: wide * rows * cols + tall * rows + deep * cols + 8 */
    int64_t deep;
    bool over_rows, over_cols; /* what its sums run over */
} operation;

#define ENTRY(name) #name, table_##name, exact_##name, narrow_##name
#define ENTRY32(name) #name, table_##name, exact_##name, NULL
static const operation operations[] = {
    {ENTRY(bias_add), 1, 2, 1, 0, 0, false, false},
    {ENTRY(bias_gradient), 2, 1, 0, 0, 1, true, false},
    {ENTRY(add), 1, 1, 1, 0, 0, false, false},
    {ENTRY(scale), 1, 1, 1, 0, 0, false, false},
    {ENTRY(activation), 2 * LOOM_ACTIVATION_COUNT, 1, 1, 0, 0, false, false},
    {ENTRY(activation_backward), 2 * LOOM_ACTIVATION_COUNT, 1, 2, 0, 0, false, false},
    {ENTRY(bias_dropout_add), 8, 1, 1, 0, 0, false, false},
    {ENTRY(dropout_backward), 2, 1, 1, 0, 0, false, false},
    {ENTRY(layernorm), 1, 3, 1, 2, 0, false, true},
    {ENTRY(layernorm_backward_input), 1, 2, 1, 0, 0, false, true},
    {ENTRY(layernorm_backward_weight), 2, 1, 0, 0, 2, true, false},
    {ENTRY(rmsnorm), 1, 2, 1, 1, 0, false, true},
    {ENTRY(rmsnorm_backward_input), 1, 2, 1, 0, 0, false, true},
    {ENTRY(rmsnorm_backward_weight), 2, 1, 0, 0, 1, true, false},
    {ENTRY(embedding), 1, 0, 1, 0, 0, false, false},
    {ENTRY(embedding_backward), 2, 0, 0, 0, 5, true, false},
    {ENTRY(rope), 8, 1, 8, 0, 0, false, false},
    {ENTRY(cross_entropy_local), 2, 1, 0, 3, 0, false, true},
    {ENTRY(cross_entropy_backward), 2, 1, 1, 1, 0, false, false},
    {ENTRY32(exact_sum), 2, 1, 0, 0, 0, false, false},
    {ENTRY32(adamw), 4, 1, 4, 0, 0, false, false},
    {ENTRY32(sgd), 4, 1, 2, 0, 0, false, false},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

/* {s, b, cols}: empty, single, narrower and wider than a vector, with rests, over several row chunks, over several
 * items, over several blocks of the loss. */
static const int64_t sizes[][3] = {{0, 1, 5}, {1, 1, 0}, {1, 1, 1}, {3, 1, 5}, {1, 3, 16}, {2, 2, 17}, {5, 1, 33},
    {35, 2, 64}, {65, 2, 100}, {21, 2, 1000}, {3, 1, 2100}};
enum { SIZES = sizeof sizes / sizeof *sizes };

typedef struct problem {
    shape z;
    size_t in_count, out_count;
    float *in[INPUTS], *prefill;
    int64_t *tokens, sample[3];
    int32_t *positions;
} problem;

static void problem_make(problem *p, const operation *op, const int64_t *size, int variant) {
    int64_t s = size[0], b = size[1], cols = size[2], rows = s * b;
    p->in_count = (size_t)((rows + 8) * (cols + 1) * (op->wide == 8 ? 8 : 2)); /* rope reads the most */
    p->out_count = (size_t)(op->wide * rows * cols + op->tall * rows + op->deep * cols + 8);
    for (int i = 0; i < INPUTS; i++)
        p->in[i] = numbers(p->in_count, (uint32_t)i + 1);
    p->prefill = numbers(p->out_count, 99);
    p->tokens = room_for((size_t)rows * sizeof(int64_t));
    p->positions = room_for((size_t)rows * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++) {
        p->tokens[r] = r * 7 % 11;
        p->positions[r] = (int32_t)(r * 5 % (s + 2));
    }
    for (int64_t j = 0; j < 3; j++)
        p->sample[j] = 1000 * j + 5;
    p->z = (shape){rows, cols, variant, {s, b, 1000000, p->sample}, p->tokens, p->positions};
}

static void problem_free(problem *p) {
    for (int i = 0; i < INPUTS; i++)
        free(p->in[i]);
    free(p->prefill);
    free(p->tokens);
    free(p->positions);
}

/* The output of a table, with a guard behind it that must come back unharmed. Caller frees. */
static float *run_table(const operation *op, const problem *p, const loom_kernels *table, loom_team *team) {
    float *out = room_for((p->out_count + GUARD) * sizeof *out);
    memcpy(out, p->prefill, p->out_count * sizeof *out);
    for (int i = 0; i < GUARD; i++)
        out[p->out_count + (size_t)i] = guard_value;
    op->table(table, team, &p->z, p->in, out);
    for (int i = 0; i < GUARD; i++)
        if (out[p->out_count + (size_t)i] != guard_value)
            fail_msg("%s of %s wrote behind its output", op->name, table->name);
    return out;
}

static double *run_exact(const operation *op, const problem *p) {
    double *in[INPUTS], *out = widened(p->prefill, p->out_count);
    for (int i = 0; i < INPUTS; i++)
        in[i] = widened(p->in[i], p->in_count);
    op->exact(&exact_kernels, NULL, &p->z, in, out);
    for (int i = 0; i < INPUTS; i++)
        free(in[i]);
    return out;
}

static void every_table_is_near_the_double_reference(void **state) {
    (void)state;
    for (int o = 0; o < OPERATIONS; o++)
        for (int variant = 0; variant < operations[o].variants; variant++)
            for (int size = 0; size < SIZES; size++) {
                const operation *op = &operations[o];
                problem p;
                problem_make(&p, op, sizes[size], variant);
                double *expected = run_exact(op, &p);
                int64_t terms = (op->over_rows ? p.z.rows : 0) + (op->over_cols ? p.z.cols : 0);
                double tolerance = tolerance_for(terms, largest_of(expected, p.out_count));
                for (int t = 0; t < TABLES; t++) {
                    const loom_kernels *table = loom_kernels_find(table_names[t]);
                    if (!table)
                        continue;
                    float *found = run_table(op, &p, table, NULL);
                    char what[200];
                    snprintf(what, sizeof what, "%s of %s, variant %d, %lldx%lld", op->name, table->name, variant,
                        (long long)p.z.rows, (long long)p.z.cols);
                    assert_close(what, found, expected, p.out_count, tolerance);
                    free(found);
                }
                free(expected);
                problem_free(&p);
            }
}

static void any_team_gives_the_same_bits(void **state) {
    (void)state;
    for (int o = 0; o < OPERATIONS; o++)
        for (int variant = 0; variant < operations[o].variants; variant++)
            for (int size = 0; size < SIZES; size++) {
                const operation *op = &operations[o];
                problem p;
                problem_make(&p, op, sizes[size], variant);
                float *alone = run_table(op, &p, loom_kernels_fast(), NULL);
                for (int t = 1; t < TEAMS; t++) {
                    float *together = run_table(op, &p, loom_kernels_fast(), teams[t]);
                    if (memcmp(alone, together, p.out_count * sizeof *alone) != 0)
                        fail_msg("%s, variant %d: other bits with %d threads", op->name, variant, t);
                    free(together);
                }
                free(alone);
                problem_free(&p);
            }
}

static void avx2_and_avx512_give_the_same_bits(void **state) {
    (void)state;
    const loom_kernels *narrow = loom_kernels_find("avx2"), *wide = loom_kernels_find("avx512");
    if (!narrow || !wide)
        skip();
    for (int o = 0; o < OPERATIONS; o++)
        for (int variant = 0; variant < operations[o].variants; variant++)
            for (int size = 0; size < SIZES; size++) {
                const operation *op = &operations[o];
                problem p;
                problem_make(&p, op, sizes[size], variant);
                float *x = run_table(op, &p, narrow, NULL), *y = run_table(op, &p, wide, NULL);
                if (memcmp(x, y, p.out_count * sizeof *x) != 0)
                    fail_msg("%s, variant %d: avx2 and avx512 differ", op->name, variant);
                free(x);
                free(y);
                problem_free(&p);
            }
}

static uint16_t rounded(loom_dtype dtype, float x) {
    return dtype == LOOM_BF16 ? loom_f32_to_bf16(x) : loom_f32_to_f16(x);
}

static float widened16(loom_dtype dtype, uint16_t x) {
    return dtype == LOOM_BF16 ? loom_bf16_to_f32(x) : loom_f16_to_f32(x);
}

/* Rounds x in place and gives it in both forms. Caller frees narrow. */
static both both_of(loom_dtype dtype, float *x, size_t count) {
    both made = {x, room_for((count + GUARD) * sizeof(uint16_t))};
    for (size_t i = 0; i < count; i++) {
        made.narrow[i] = rounded(dtype, x[i]);
        x[i] = widened16(dtype, made.narrow[i]);
    }
    for (size_t i = 0; i < GUARD; i++)
        made.narrow[count + i] = 0x4321;
    return made;
}

static void compare_with_fp32(
    const operation *op, const loom_kernels *table, const loom_kernels16 *kernels, loom_dtype dtype, problem *p) {
    both in[INPUTS];
    for (int i = 0; i < INPUTS; i++)
        in[i] = both_of(dtype, p->in[i], p->in_count);
    both prefill = both_of(dtype, p->prefill, p->out_count);
    float *expected = run_table(op, p, table, NULL);
    size_t elements = (size_t)(op->wide * p->z.rows * p->z.cols);
    char what[200];
    snprintf(what, sizeof what, "%s of %s in %s, variant %d, %lldx%lld", op->name, table->name, loom_dtype_name(dtype),
        p->z.variant, (long long)p->z.rows, (long long)p->z.cols);
    for (int team = 0; team < TEAMS; team++) {
        both out = {room_for(p->out_count * sizeof(float)), room_for((p->out_count + GUARD) * sizeof(uint16_t))};
        memcpy(out.wide, prefill.wide, p->out_count * sizeof(float));
        memcpy(out.narrow, prefill.narrow, (p->out_count + GUARD) * sizeof(uint16_t));
        op->narrow(kernels, teams[team], &p->z, in, out);
        for (size_t i = 0; i < p->out_count; i++) {
            float found = i < elements ? widened16(dtype, out.narrow[i]) : out.wide[i];
            float wanted = i < elements ? widened16(dtype, rounded(dtype, expected[i])) : expected[i];
            if (memcmp(&found, &wanted, sizeof found) != 0 && !(isnan(found) && isnan(wanted)))
                fail_msg("%s: element %zu is %.9g, expected %.9g", what, i, (double)found, (double)wanted);
        }
        assert_memory_equal(out.narrow + p->out_count, prefill.narrow + p->out_count, GUARD * sizeof *out.narrow);
        free(out.wide);
        free(out.narrow);
    }
    free(expected);
    free(prefill.narrow);
    for (int i = 0; i < INPUTS; i++)
        free(in[i].narrow);
}

/* Widening is exact and rounding comes last, so there is nothing in between that may differ by a bit. */
static void on_16_bit_elements_kernels_give_the_rounded_results_of_fp32(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        for (int o = 0; table && o < OPERATIONS; o++)
            for (int variant = 0; operations[o].narrow && variant < operations[o].variants; variant++)
                for (int size = 0; size < SIZES; size++)
                    for (int kind = 0; kind < 2; kind++) {
                        problem p;
                        problem_make(&p, &operations[o], sizes[size], variant);
                        compare_with_fp32(
                            &operations[o], table, kind ? table->f16 : table->bf16, kind ? LOOM_F16 : LOOM_BF16, &p);
                        problem_free(&p);
                    }
    }
}

static void nan_in_any_input_shows_in_the_output(void **state) {
    static const int64_t size[3] = {2, 2, 20};
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        for (int o = 0; table && o < OPERATIONS; o++)
            for (int variant = 0; variant < operations[o].variants; variant++)
                for (int input = 0; input < operations[o].inputs; input++) {
                    const operation *op = &operations[o];
                    problem p;
                    problem_make(&p, op, size, variant);
                    p.in[input][7] = NAN;
                    float *out = run_table(op, &p, table, NULL);
                    bool shows = false;
                    for (size_t i = 0; i < p.out_count; i++)
                        shows = shows || isnan(out[i]);
                    if (!shows)
                        fail_msg(
                            "%s of %s, variant %d: a NaN in input %d is gone", op->name, table->name, variant, input);
                    free(out);
                    problem_free(&p);
                }
    }
}

static void nonfinite_values_are_found_wherever_they_are(void **state) {
    (void)state;
    enum { COUNT = 40000 };
    float *x = numbers(COUNT, 3);
    static const size_t places[] = {0, 1, 15, 16, 16383, 16384, COUNT - 1};
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        for (int team = 0; table && team < TEAMS; team++) {
            assert_false(table->has_nonfinite(teams[team], COUNT, x));
            assert_false(table->has_nonfinite(teams[team], 0, x));
            for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
                float kept = x[places[i]];
                static const float bad[] = {NAN, INFINITY, -INFINITY};
                for (int kind = 0; kind < 3; kind++) {
                    x[places[i]] = bad[kind];
                    assert_true(table->has_nonfinite(teams[team], COUNT, x));
                    assert_false(table->has_nonfinite(teams[team], (int64_t)places[i], x));
                }
                x[places[i]] = 3.0e38f;
                assert_false(table->has_nonfinite(teams[team], COUNT, x));
                x[places[i]] = kept;
            }
        }
    }
    free(x);
}

/* The backward of the loss with maximum 0, sum 1, row_scale 1 and no target here is e^x itself. */
static void exponential_is_within_two_ulp(void **state) {
    (void)state;
    enum { COUNT = 200000 };
    float *x = room_for(COUNT * sizeof *x), *y = room_for(COUNT * sizeof *y);
    for (int i = 0; i < COUNT; i++)
        x[i] = -87.0f + 175.5f * (float)i / COUNT;
    static const int64_t target = -1;
    static const float zero = 0, one = 1;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (!table)
            continue;
        memcpy(y, x, COUNT * sizeof *y);
        table->cross_entropy_backward(NULL, 1, COUNT, COUNT, y, &target, 0, &zero, &one, &one);
        for (int i = 0; i < COUNT; i++) {
            double exact = exp((double)x[i]), ulp = ldexp(1, ilogb(exact) - 23);
            if (!(fabs((double)y[i] - exact) < 2 * ulp))
                fail_msg("%s: e^%.9g is %.9g, expected %.9g", table->name, (double)x[i], (double)y[i], exact);
        }
        float limits[4] = {-INFINITY, -200, 200, INFINITY};
        table->cross_entropy_backward(NULL, 1, 4, 4, limits, &target, 0, &zero, &one, &one);
        assert_true(limits[0] == 0 && limits[1] == 0 && limits[2] == INFINITY && limits[3] == INFINITY);
    }
    free(x);
    free(y);
}

/* With d_y = 1 and up = 1: act(x) = x times a probability that is known to 4 eps, so 8 eps |x| is allowed for the
 * value; its derivative is the sum of that probability and a term of size 1, each of a dozen roundings: 16 eps. Below
 * -5 the reference in fp32 cancels (1 + tanh), hence the absolute 1 eps of the probability that the first bound
 * includes. */
static void activations_are_accurate_along_the_whole_line(void **state) {
    (void)state;
    enum { COUNT = 4001 };
    float *x = room_for(2 * COUNT * sizeof *x), *y = room_for(COUNT * sizeof *y),
          *d_x = room_for(2 * COUNT * sizeof *d_x);
    float *ones = room_for(COUNT * sizeof *ones);
    double *y64 = room_for(COUNT * sizeof *y64), *d_x64 = room_for(2 * COUNT * sizeof *d_x64);
    for (int i = 0; i < COUNT; i++) {
        x[i] = -12 + 24 * (float)i / (COUNT - 1);
        x[COUNT + i] = ones[i] = 1;
    }
    double *x64 = widened(x, 2 * COUNT), *ones64 = widened(ones, COUNT);
    for (int act = 0; act < LOOM_ACTIVATION_COUNT; act++) {
        loom__ref64_activation(NULL, (loom_activation)act, 1, COUNT, x64, NULL, y64);
        loom__ref64_activation_backward(NULL, (loom_activation)act, 1, COUNT, x64, NULL, ones64, d_x64);
        for (int t = 0; t < TABLES; t++) {
            const loom_kernels *table = loom_kernels_find(table_names[t]);
            if (!table)
                continue;
            table->activation(NULL, (loom_activation)act, 1, COUNT, x, NULL, y);
            table->activation_backward(NULL, (loom_activation)act, 1, COUNT, x, NULL, ones, d_x);
            for (size_t i = 0; i < COUNT; i++) {
                double eps = 0x1p-24, size = fabs(x64[i]);
                assert_close(table->name, y + i, y64 + i, 1, 8 * eps * size);
                assert_close(table->name, d_x + i, d_x64 + i, 1, 16 * eps * (1 + size / 4));
            }
        }
    }
    free(x);
    free(y);
    free(d_x);
    free(ones);
    free(x64);
    free(y64);
    free(d_x64);
    free(ones64);
}

/* A masked token is out of the loss whatever its logits are. */
static void row_scale_zero_gives_exact_zeros(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (!table)
            continue;
        float logits[20], maximum = NAN, sum = NAN, scale = 0;
        int64_t target = 3;
        for (int i = 0; i < 20; i++)
            logits[i] = NAN;
        table->cross_entropy_backward(NULL, 1, 20, 18, logits, &target, 0, &maximum, &sum, &scale);
        for (int i = 0; i < 20; i++)
            assert_true(logits[i] == 0);
    }
}

/* Four logits 1 2 3 4, target the last: log(sum e^x) - 4 = 0.44019; an empty shard gives -inf, 0, 0. */
static void loss_of_shards_adds_up_to_that_of_the_whole(void **state) {
    (void)state;
    const float logits[4] = {1, 2, 3, 4};
    int64_t target = 3;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        for (int shards = 1; table && shards <= 4; shards *= 2) {
            float maximum[4], sum[4], found[4], highest = -INFINITY, logit = 0;
            for (int i = 0; i < shards; i++) {
                int width = 4 / shards;
                table->cross_entropy_local(NULL, 1, width, width, logits + i * width, &target, (int64_t)i * width,
                    &maximum[i], &sum[i], &found[i]);
                highest = maximum[i] > highest ? maximum[i] : highest;
                logit += found[i];
            }
            double total = 0;
            for (int i = 0; i < shards; i++)
                total += (double)sum[i] * exp((double)(maximum[i] - highest));
            assert_true(fabs(total * exp((double)(highest - logit)) - exp(0.44018969856)) < 1e-6);
        }
        float maximum, sum, found;
        if (table) {
            table->cross_entropy_local(NULL, 1, 4, 0, logits, &target, 0, &maximum, &sum, &found);
            assert_true(maximum == -INFINITY && sum == 0 && found == 0);
        }
    }
}

static void tables_are_found_by_name(void **state) {
    (void)state;
    assert_ptr_equal(loom_kernels_find("reference"), loom_kernels_reference());
    assert_ptr_equal(loom_kernels_find("fast"), loom_kernels_fast());
    assert_null(loom_kernels_find("sse1"));
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (table)
            assert_string_equal(table->name, table_names[t]);
        else
            print_message("this machine has no table %s\n", table_names[t]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_table_is_near_the_double_reference),
        cmocka_unit_test(any_team_gives_the_same_bits),
        cmocka_unit_test(avx2_and_avx512_give_the_same_bits),
        cmocka_unit_test(on_16_bit_elements_kernels_give_the_rounded_results_of_fp32),
        cmocka_unit_test(nan_in_any_input_shows_in_the_output),
        cmocka_unit_test(nonfinite_values_are_found_wherever_they_are),
        cmocka_unit_test(exponential_is_within_two_ulp),
        cmocka_unit_test(activations_are_accurate_along_the_whole_line),
        cmocka_unit_test(row_scale_zero_gives_exact_zeros),
        cmocka_unit_test(loss_of_shards_adds_up_to_that_of_the_whole),
        cmocka_unit_test(tables_are_found_by_name),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
