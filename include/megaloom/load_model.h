/* A model and its strategy from what is on the disk alone: a checkpoint, or a Hugging Face directory. */
#ifndef MEGALOOM_LOAD_MODEL_H
#define MEGALOOM_LOAD_MODEL_H

#include <megaloom/strategy.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The run that wrote a checkpoint, with `overrides` ("strategy.tensor_model_parallel_size=2") over it: model, strategy,
 * precision and ranks as the folder context/ of a checkpoint of ours tells them; of NeMo's (context/model.yaml) the
 * model, whose vocabulary is then that of the stored embedding, padding included. All else has its default. `path` is
 * what loom_checkpoint_open takes. *config is the caller's: loom_run_config_destroy. Not collective. Errors:
 * LOOM_ERR_NOT_FOUND for a checkpoint without a context, LOOM_ERR_UNSUPPORTED for a model of NeMo's that is not built;
 * those of loom_checkpoint_open and loom_run_config_load. */
LOOM_API loom_status loom_checkpoint_run_config(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **config);

/* Everything that a loaded model consists of; loom_loaded_model_destroy. */
typedef struct loom_loaded_model {
    loom_run_config *config;
    loom_fabric *fabric; /* launched; its strategy borrows the texts of `config` */
    loom_parallel *parallel;
} loom_loaded_model;
/* A zeroed one is accepted. Collective, like loom_fabric_destroy. */
LOOM_API void loom_loaded_model_destroy(loom_loaded_model *model);

/* Builds the strategy and the model that the context of the checkpoint at `path` tells, with `overrides` over it, and
 * loads the weights (no optimizer), all of which must be there. gradients: whether the model can be trained
 * (loom_fabric_setup_module) or only be asked. The ranks that there are decide the data-parallel size. Collective over
 * all ranks; *model is written on success alone. Errors: those of loom_checkpoint_run_config, loom_fabric_create and a
 * strict loom_fabric_load. */
LOOM_API loom_status loom_load_model(loom_rank *rank, const char *path, const char *const *overrides,
    int64_t override_count, bool gradients, loom_loaded_model *model);
/* The same from "hf://DIR", a Hugging Face directory. */
LOOM_API loom_status loom_import_model(loom_rank *rank, const char *source, const char *const *overrides,
    int64_t override_count, bool gradients, loom_loaded_model *model);

/* Loads the weights of a checkpoint into a module of loom_gpt_create, all of which must be there; an optimizer's state
 * beside them is left. Collective over all ranks; errors as of a strict loom_fabric_load. */
LOOM_API loom_status loom_load_weights(loom_fabric *fabric, loom_parallel *parallel, const char *path);

#ifdef __cplusplus
}
#endif
#endif
