/* What the names of the precision's fields mean. */
#ifndef CONFIG_PRECISION_H
#define CONFIG_PRECISION_H

#include "base/faults.h"
#include <megaloom/config.h>

/* The dtype of "fp32", "bf16" and "fp16", in every spelling that the fields take; `otherwise` for NULL. */
loom_dtype loom__dtype_called(const char *name, loom_dtype otherwise);
/* In which the precision ("32", "bf16-mixed", "16-mixed" or a spelling of them) keeps weights and activations. */
loom_dtype loom__precision_dtype(const loom_precision_config *config);
/* Faults of fields that are sound by themselves. */
void loom__check_precision(const loom_precision_config *config, loom__faults *faults);

#endif
