/* Which layers have experts: Megatron's texts, and what a list must be. */
#include "base/faults.h"
#include "spec/parameter.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name) static void name(void **state)

static void expect_list(const char *text, const char *layers) {
    loom_moe_layer_freq freq;
    if (!loom__moe_layer_freq_parse(text, &freq))
        fail_msg("%s was not read", text);
    assert_int_equal(freq.length, strlen(layers));
    for (int64_t i = 0; i < LOOM_MOE_LAYERS_MAX; i++)
        assert_int_equal(freq.list[i], i < freq.length && layers[i] == '1');
}

TEST(megatrons_texts_are_read) {
    (void)state;
    expect_list("[1, 0,1]", "101");
    expect_list("([0]*1+[1]*3)", "0111");
    expect_list("[0]*2 + [1]*3", "00111");
    expect_list("([0]*2+[1])*2", "001001");
    expect_list(" ( [ 1 , 0 ] ) * 2 * 2 ", "10101010");
    expect_list("[0]*0+[1]", "1");
}

TEST(other_texts_are_no_lists) {
    (void)state;
    static const char *const texts[] = {"", "2", "[]", "[1", "[1]]", "[2]", "[10]", "(1)", "[1]*", "[1]*-1", "[1]+",
        "[1] [0]", "[0]*0", "[1]*513", "([1]*512)+[0]", "[1]*99999", "((((((((((((((((((([1])))))))))))))))))))",
        "[1,]", "3*[1]", "exit()"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        loom_moe_layer_freq freq = {.every = 7};
        if (loom__moe_layer_freq_parse(texts[i], &freq))
            fail_msg("\"%s\" was read as a list of %d", texts[i], (int)freq.length);
        assert_int_equal(freq.every, 7);
    }
}

TEST(a_list_has_a_number_for_each_layer) {
    (void)state;
    const struct {
        loom_moe_layer_freq freq;
        int64_t layers;
        const char *message;
    } cases[] = {{{.every = -1}, 4, "moe_layer_freq: found -1, expected 1 or more"},
        {{.length = 3, .list = {1, 1, 1}}, 4,
            "moe_layer_freq: found a list of 3 layers, expected one number for each of num_layers 4"},
        {{.length = 4}, 4,
            "moe_layer_freq: found a list of zeros, expected a 1 for each layer with experts (without any, leave "
            "num_moe_experts out)"},
        {{.length = 3, .list = {1}}, 600,
            "moe_layer_freq: found a list of 3 layers, expected one number for each of num_layers 600 (a list has at "
            "most 512)"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom__faults faults;
        loom__faults_begin(&faults);
        loom_moe_layer_freq freq = cases[i].freq;
        loom__moe_layer_freq_complete(&freq, cases[i].layers, &faults);
        assert_int_equal(loom__faults_end(&faults), LOOM_ERR_CONFIG);
        assert_string_equal(loom_error_message(), cases[i].message);
    }
}

TEST(layers_with_experts_are_counted) {
    (void)state;
    loom_model_config config = {.num_layers = 7, .moe = {.num_moe_experts = 4}};
    assert_int_equal(loom_model_expert_layers(&config), 7);
    assert_false(loom__layers_differ(&config));
    config.moe.moe_layer_freq.every = 3;
    assert_int_equal(loom_model_expert_layers(&config), 3);
    assert_true(loom__layer_has_experts(&config, 3) && !loom__layer_has_experts(&config, 4));
    assert_true(loom__layers_differ(&config));
    config.moe.moe_layer_freq = (loom_moe_layer_freq){.length = 7, .list = {0, 1, 1, 1, 1, 0, 0}};
    assert_int_equal(loom_model_expert_layers(&config), 4);
    assert_true(loom__layers_differ(&config));
    config.moe.num_moe_experts = 0;
    assert_int_equal(loom_model_expert_layers(&config), 0);
    assert_false(loom__layers_differ(&config));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(megatrons_texts_are_read),
        cmocka_unit_test(other_texts_are_no_lists),
        cmocka_unit_test(a_list_has_a_number_for_each_layer),
        cmocka_unit_test(layers_with_experts_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
