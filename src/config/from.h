/* The run that wrote a checkpoint, from its context alone. */
#ifndef CONFIG_FROM_H
#define CONFIG_FROM_H

#include <megaloom/config.h>

/* The context of the checkpoint at `path`, which may be a folder of checkpoints, as a run configuration with
 * `overrides` over it: the context/run.yaml of ours, or of NeMo's context/model.yaml the model, as far as it is known
 * here (without a vocab_size, which NeMo asks of its tokenizer). loom_run_config_destroy. Errors: LOOM_ERR_NOT_FOUND
 * without a context, LOOM_ERR_UNSUPPORTED for a model of NeMo's that is not built, those of loom_run_config_load. */
loom_status loom__config_read_context(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **config);

#endif
