/* Mixed precision as a plug-in. */
#ifndef STRATEGY_PRECISION_H
#define STRATEGY_PRECISION_H

#include "optim/scaler.h"
#include <megaloom/strategy.h>

/* Its plugin's context is itself: it must stay where it is made. */
typedef struct loom__precision {
    loom_precision_plugin plugin;
    loom_dtype initial; /* in which initial values are made: params_dtype */
    const char *wire;   /* pipeline_dtype as given, or the precision's own */
    bool wire_given;    /* it comes before the strategy's */
    bool grad_reduce_in_fp32;
    bool has_scaler; /* fp16 */
    loom__scaler_options scaler;
} loom__precision;

/* config NULL: the default. Its strings are borrowed. */
void loom__precision_make(const loom_precision_config *config, loom__precision *precision);

#endif
