/* The frequencies of rotary positions. */
#ifndef SPEC_ROPE_H
#define SPEC_ROPE_H

#include <megaloom/model.h>

/* Channels of a head that are rotated: pairs of them turn together. */
int64_t loom__rope_channels(const loom_model_config *config);
/* Radians a position of pair `pair` (of channels / 2), scaled as the configuration says. In double: a position of some
 * thousands times a frequency has lost digits in fp32. */
double loom__rope_frequency(const loom_model_config *config, int64_t pair);

#endif
