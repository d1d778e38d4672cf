/* The loss scale as a state machine. Pure: it sees one bit of each step and nothing else. */
#ifndef OPTIM_SCALER_H
#define OPTIM_SCALER_H

#include <megaloom/optim.h>

/* The defaults are those of fp16 training: dynamic, 2^32 to 1, factors 2 and 0.5, interval 1000, hysteresis 2. */
typedef struct loom__scaler_options {
    bool dynamic; /* false: the initial scale for ever, and nothing else below is read */
    double initial_scale, min_scale;
    double growth_factor, backoff_factor;
    int64_t growth_interval; /* good steps in a row before the scale grows */
    int64_t hysteresis;      /* bad steps before it shrinks; refilled only when it grows */
} loom__scaler_options;
loom__scaler_options loom__scaler_options_default(void);

typedef struct loom__scaler {
    loom__scaler_options options;
    float scale;
    int64_t growth_tracker;     /* good steps since the last bad one */
    int64_t hysteresis_tracker; /* bad steps left; at most 0 where each of them shrinks the scale */
} loom__scaler;

/* LOOM_ERR_CONFIG with all faults for options that cannot be. */
loom_status loom__scaler_make(const loom__scaler_options *options, loom__scaler *scaler);

/* After a step: whether its gradients overflowed. True when the run cannot go on: it overflowed, and the scale would
 * have to shrink but is at the floor already. */
bool loom__scaler_update(loom__scaler *scaler, bool found_inf);

#endif
