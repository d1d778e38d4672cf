/* Which fields of the precision go together, and what each default is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "config/precision.h"
#include <string.h>

static void expect(const loom_precision_config *config, loom_status wanted, const char *text) {
    assert_int_equal(loom_precision_config_check(config), wanted);
    if (text)
        assert_string_equal(loom_error_message(), text);
}

static loom_precision_config of(const char *precision) {
    loom_precision_config config = loom_precision_config_default();
    config.precision = precision;
    return config;
}

static void the_defaults_are_those_of_the_reference(void **state) {
    (void)state;
    loom_precision_config config = loom_precision_config_default();
    assert_string_equal(config.precision, "32");
    assert_string_equal(config.params_dtype, "fp32");
    assert_null(config.pipeline_dtype);
    assert_null(config.autocast_dtype);
    assert_false(config.autocast_enabled);
    assert_true(config.grad_reduce_in_fp32);
    assert_true(config.loss_scale == 0);
    assert_true(config.initial_loss_scale == 4294967296.0);
    assert_true(config.min_loss_scale == 1);
    assert_int_equal(config.loss_scale_window, 1000);
    assert_int_equal(config.hysteresis, 2);
}

static void names_mean_dtypes(void **state) {
    static const struct {
        const char *name;
        loom_dtype dtype;
    } precisions[] = {{"32", LOOM_F32}, {"fp32", LOOM_F32}, {"32-true", LOOM_F32}, {"bf16-mixed", LOOM_BF16},
        {"bf16", LOOM_BF16}, {"16-mixed", LOOM_F16}, {"16", LOOM_F16}, {"fp16", LOOM_F16}};
    (void)state;
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++) {
        loom_precision_config config = of(precisions[i].name);
        assert_int_equal(loom__precision_dtype(&config), precisions[i].dtype);
        expect(&config, LOOM_OK, NULL);
    }
    assert_int_equal(loom__dtype_called("bfloat16", LOOM_F32), LOOM_BF16);
    assert_int_equal(loom__dtype_called("fp16", LOOM_F32), LOOM_F16);
    assert_int_equal(loom__dtype_called(NULL, LOOM_F16), LOOM_F16);
}

static void initial_values_are_made_in_fp32_or_in_the_dtype_of_the_weights(void **state) {
    (void)state;
    loom_precision_config config = of("bf16-mixed");
    config.params_dtype = "bf16";
    expect(&config, LOOM_OK, NULL);
    config.params_dtype = "fp16";
    expect(&config, LOOM_ERR_CONFIG,
        "precision.params_dtype: found fp16 with precision bf16-mixed, expected fp32 or bf16");
    config = of("32");
    config.params_dtype = "bf16";
    expect(&config, LOOM_ERR_UNSUPPORTED,
        "not supported yet: precision.params_dtype=bf16 with precision 32 (16-bit weights without fp32 masters); "
        "precision bf16-mixed and 16-mixed work");
}

static void products_have_the_dtype_of_the_weights(void **state) {
    (void)state;
    loom_precision_config config = of("bf16-mixed");
    config.autocast_enabled = true;
    expect(&config, LOOM_OK, NULL);
    config.autocast_dtype = "bf16";
    expect(&config, LOOM_OK, NULL);
    config.autocast_dtype = "fp16";
    expect(&config, LOOM_ERR_UNSUPPORTED,
        "not supported yet: precision.autocast_dtype=fp16 with precision bf16-mixed (products in another dtype than "
        "the "
        "weights); only bf16 works");
    config.autocast_enabled = false;
    expect(&config, LOOM_ERR_CONFIG,
        "precision.autocast_dtype: found fp16 without precision.autocast_enabled, which alone uses it");
    config = of("32");
    config.autocast_enabled = true;
    config.autocast_dtype = "bf16";
    expect(&config, LOOM_ERR_UNSUPPORTED, NULL);
}

static void fields_of_the_loss_scale_belong_to_fp16(void **state) {
    (void)state;
    loom_precision_config config = of("bf16-mixed");
    config.loss_scale = 128;
    config.hysteresis = 3;
    expect(&config, LOOM_ERR_CONFIG,
        "precision.loss_scale: used only by precision 16-mixed\n"
        "precision.hysteresis: used only by precision 16-mixed");
    config = of("16-mixed");
    config.loss_scale = 128;
    expect(&config, LOOM_OK, NULL);
    config.loss_scale_window = 10;
    expect(&config, LOOM_ERR_CONFIG,
        "precision.loss_scale_window: found together with precision.loss_scale, which is fixed; expected one of them");
    config = of("16-mixed");
    config.initial_loss_scale = 2;
    config.min_loss_scale = 4;
    expect(&config, LOOM_ERR_CONFIG,
        "precision.min_loss_scale: found 4, expected at most precision.initial_loss_scale, 2");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_defaults_are_those_of_the_reference),
        cmocka_unit_test(names_mean_dtypes),
        cmocka_unit_test(initial_values_are_made_in_fp32_or_in_the_dtype_of_the_weights),
        cmocka_unit_test(products_have_the_dtype_of_the_weights),
        cmocka_unit_test(fields_of_the_loss_scale_belong_to_fp16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
