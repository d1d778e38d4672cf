/* Moments that are bf16 in memory: how they round, and that every table does it alike. */
#include "kernel_support.h"

enum { COUNT = 16384 + 37 };

static uint16_t half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* With beta1 = 0 the first moment is the gradient, rounded. */
static void moments_round_to_the_nearest_and_ties_to_even(void **state) {
    (void)state;
    const float d_w[] = {1.0f, 0x1.008p0f, 0x1.01p0f, 0x1.03p0f, 0x1.010002p0f, -0x1.01p0f, 0x1.fffffep127f, 0.0f, NAN};
    const float rounded[] = {1.0f, 1.0f, 1.0f, 0x1.04p0f, 0x1.02p0f, -1.0f, INFINITY, 0.0f, NAN};
    enum { CASES = sizeof d_w / sizeof *d_w };
    const loom_adamw adamw = {
        .beta2 = 0.5, .eps = 1, .bias_correction1 = 1, .bias_correction2 = 1, .grad_scale = 1, .bf16_m = true};
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        float w[CASES] = {0}, v[CASES] = {0};
        uint16_t m[CASES] = {0};
        if (!table)
            continue;
        table->adamw(NULL, CASES, &adamw, d_w, w, m, v, NULL);
        for (int i = 0; i < CASES; i++)
            if (isnan(rounded[i]) ? (m[i] & 0x7f80u) != 0x7f80u || !(m[i] & 0x7fu) : m[i] != half_of(rounded[i]))
                fail_msg("%s rounds %a to %#x, expected %a", table->name, (double)d_w[i], m[i], (double)rounded[i]);
    }
}

typedef struct update {
    float w[COUNT], v_max[COUNT];
    uint16_t m[COUNT], v[COUNT + 1];
} update;

static update *walk(const loom_kernels *table, loom_team *team, bool amsgrad) {
    update *made = room_for(sizeof *made);
    float *d_w = numbers(COUNT, 5);
    memset(made, 0, sizeof *made);
    made->v[COUNT] = 77;
    for (int step = 1; step <= 3; step++) {
        const loom_adamw adamw = {.lr = 1e-2,
            .weight_decay = 0.1,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .eps = 1e-8,
            .bias_correction1 = 1 - pow(0.9, step),
            .bias_correction2 = 1 - pow(0.95, step),
            .grad_scale = 0.5f,
            .bf16_m = true,
            .bf16_v = true};
        table->adamw(team, COUNT, &adamw, d_w, made->w, made->m, made->v, amsgrad ? made->v_max : NULL);
    }
    assert_int_equal(made->v[COUNT], 77);
    free(d_w);
    return made;
}

static void bf16_moments_agree_in_every_table_and_team(void **state) {
    (void)state;
    for (int amsgrad = 0; amsgrad < 2; amsgrad++) {
        update *expected = walk(loom_kernels_reference(), NULL, amsgrad);
        update *fast = walk(loom_kernels_fast(), NULL, amsgrad);
        for (int t = 0; t < TABLES; t++) {
            const loom_kernels *table = loom_kernels_find(table_names[t]);
            update *found = table ? walk(table, teams[2], amsgrad) : NULL;
            for (int i = 0; found && i < COUNT; i++) {
                if (abs(found->m[i] - expected->m[i]) > 1 || abs(found->v[i] - expected->v[i]) > 1)
                    fail_msg("%s: element %d has moments %#x, %#x", table->name, i, found->m[i], found->v[i]);
                if (!(fabsf(found->w[i] - expected->w[i]) <= 1e-4f))
                    fail_msg("%s: element %d is %.9g", table->name, i, (double)found->w[i]);
            }
            if (found && strncmp(table_names[t], "avx", 3) == 0)
                assert_memory_equal(found, fast, sizeof *fast);
            free(found);
        }
        free(expected);
        free(fast);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moments_round_to_the_nearest_and_ties_to_even),
        cmocka_unit_test(bf16_moments_agree_in_every_table_and_team),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
