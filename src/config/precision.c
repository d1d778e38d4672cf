/* Which fields of the precision go together. Each field that the chosen precision would ignore is a fault, since
 * whoever wrote it expects something of it. */
#include "config/precision.h"
#include <string.h>

loom_dtype loom__dtype_called(const char *name, loom_dtype otherwise) {
    static const struct {
        const char *name;
        loom_dtype dtype;
    } names[] = {{"fp32", LOOM_F32}, {"float32", LOOM_F32}, {"bf16", LOOM_BF16}, {"bfloat16", LOOM_BF16},
        {"fp16", LOOM_F16}, {"float16", LOOM_F16}};
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0)
            return names[i].dtype;
    return otherwise;
}

loom_dtype loom__precision_dtype(const loom_precision_config *config) {
    const char *name = config->precision ? config->precision : "32";
    if (strncmp(name, "bf16", 4) == 0)
        return LOOM_BF16;
    return strncmp(name, "16", 2) == 0 || strcmp(name, "fp16") == 0 ? LOOM_F16 : LOOM_F32;
}

static bool differs(double value, double preset) {
    return value < preset || value > preset;
}

static void check_dtypes(const loom_precision_config *config, loom_dtype dtype, loom__faults *faults) {
    loom_dtype params = loom__dtype_called(config->params_dtype, LOOM_F32);
    loom_dtype cast = loom__dtype_called(config->autocast_dtype, dtype);
    const char *own = dtype == LOOM_BF16 ? "bf16" : dtype == LOOM_F16 ? "fp16" : "fp32";
    if (params != LOOM_F32 && dtype == LOOM_F32)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: precision.params_dtype=%s with precision 32 (16-bit weights without fp32 masters); "
            "precision bf16-mixed and 16-mixed work",
            config->params_dtype);
    else if (params != LOOM_F32 && params != dtype)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "precision.params_dtype: found %s with precision %s, expected fp32 or %s", config->params_dtype,
            config->precision, own);
    if (cast == dtype || (!config->autocast_enabled && cast == LOOM_F32))
        return;
    if (config->autocast_enabled)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: precision.autocast_dtype=%s with precision %s (products in another dtype than the "
            "weights); only %s works",
            config->autocast_dtype, config->precision ? config->precision : "32", own);
    else
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "precision.autocast_dtype: found %s without precision.autocast_enabled, which alone uses it",
            config->autocast_dtype);
}

static void check_scale(const loom_precision_config *config, loom_dtype dtype, loom__faults *faults) {
    const loom_precision_config preset = loom_precision_config_default();
    bool fixed = config->loss_scale > 0;
    const struct {
        bool set, dynamic;
        const char *field;
    } fields[] = {
        {fixed, false, "loss_scale"},
        {differs(config->initial_loss_scale, preset.initial_loss_scale), true, "initial_loss_scale"},
        {differs(config->min_loss_scale, preset.min_loss_scale), true, "min_loss_scale"},
        {config->loss_scale_window != preset.loss_scale_window, true, "loss_scale_window"},
        {config->hysteresis != preset.hysteresis, true, "hysteresis"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].set && dtype != LOOM_F16)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "precision.%s: used only by precision 16-mixed", fields[i].field);
        else if (fields[i].set && fields[i].dynamic && fixed)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "precision.%s: found together with precision.loss_scale, which is fixed; expected one of them",
                fields[i].field);
    }
    if (!fixed && config->min_loss_scale > config->initial_loss_scale)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "precision.min_loss_scale: found %g, expected at most precision.initial_loss_scale, %g",
            config->min_loss_scale, config->initial_loss_scale);
}

void loom__check_precision(const loom_precision_config *config, loom__faults *faults) {
    loom_dtype dtype = loom__precision_dtype(config);
    check_dtypes(config, dtype, faults);
    check_scale(config, dtype, faults);
}
