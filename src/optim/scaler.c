/* Megatron-Core's DynamicGradScaler: products in fp32, as there. Invariant: the scale is never below the floor, and two
 * scalers that saw the same bits are equal, so that ranks which agree on the bits need not talk about the scale. */
#include "optim/scaler.h"
#include "base/faults.h"
#include <math.h>

loom__scaler_options loom__scaler_options_default(void) {
    return (loom__scaler_options){.dynamic = true,
        .initial_scale = 4294967296.0,
        .min_scale = 1.0,
        .growth_factor = 2.0,
        .backoff_factor = 0.5,
        .growth_interval = 1000,
        .hysteresis = 2};
}

/* Written so that a NaN is a fault. */
static bool is_scale(double value) {
    return (float)value > 0.0f && !isinf((float)value);
}

loom_status loom__scaler_make(const loom__scaler_options *options, loom__scaler *scaler) {
    loom__faults faults;
    loom__faults_begin(&faults);
    if (!is_scale(options->initial_scale))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "loss scale: found %g, expected a number above 0 that fits fp32",
            options->initial_scale);
    if (options->dynamic) {
        if (!is_scale(options->min_scale) || !(options->min_scale <= options->initial_scale))
            loom__faults_add(&faults, LOOM_ERR_CONFIG,
                "min_loss_scale: found %g, expected a number above 0 and at most the initial scale, %g",
                options->min_scale, options->initial_scale);
        if (!(options->growth_factor > 1.0) || isinf(options->growth_factor))
            loom__faults_add(&faults, LOOM_ERR_CONFIG, "growth factor of the loss scale: found %g, expected above 1",
                options->growth_factor);
        if (!(options->backoff_factor > 0.0 && options->backoff_factor < 1.0))
            loom__faults_add(&faults, LOOM_ERR_CONFIG,
                "backoff factor of the loss scale: found %g, expected between 0 and 1", options->backoff_factor);
        if (options->growth_interval < 1)
            loom__faults_add(&faults, LOOM_ERR_CONFIG, "loss_scale_window: found %lld, expected a number from 1",
                (long long)options->growth_interval);
        if (options->hysteresis < 1)
            loom__faults_add(&faults, LOOM_ERR_CONFIG, "hysteresis: found %lld, expected a number from 1",
                (long long)options->hysteresis);
    }
    LOOM_TRY(loom__faults_end(&faults));
    *scaler = (loom__scaler){
        .options = *options, .scale = (float)options->initial_scale, .hysteresis_tracker = options->hysteresis};
    return LOOM_OK;
}

bool loom__scaler_update(loom__scaler *scaler, bool found_inf) {
    const loom__scaler_options *options = &scaler->options;
    if (!options->dynamic)
        return false;
    if (found_inf) {
        float floor = (float)options->min_scale;
        scaler->growth_tracker = 0;
        if (--scaler->hysteresis_tracker > 0)
            return false;
        bool stuck = scaler->scale <= floor;
        scaler->scale = fmaxf(scaler->scale * (float)options->backoff_factor, floor);
        return stuck;
    }
    if (++scaler->growth_tracker == options->growth_interval) {
        scaler->growth_tracker = 0;
        scaler->hysteresis_tracker = options->hysteresis;
        scaler->scale *= (float)options->growth_factor;
    }
    return false;
}
