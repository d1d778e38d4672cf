/* How the layers of a model are cut over the stages of a pipeline, and over the chunks of a stage where it is
 * interleaved (virtual stages). Pure arithmetic: no ranks, no files. Model depth goes through chunk 0 of stages 0, 1,
 * …, then chunk 1 of stages 0, 1, …, as in Megatron-Core. Numbers from golden/pipeline/layers.json. */
#ifndef MEGALOOM_STAGES_H
#define MEGALOOM_STAGES_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The fields of the same names in a run file; 0, false and NULL stand for "not given". Layers are cut in one of five
 * ways: evenly; with other numbers in the first and last stage; with the embedding and the loss counted as a layer
 * each; balanced; or as a layout says. Fields of two ways together are refused.
 *
 * A layout is a row of E (embedding, first), t (layer), L (loss, last) and | (end of a stage; the stages go through the
 * depth as above, so there may be several for each pipeline stage). x*n and (…)*n repeat, groups may stand in groups,
 * commas are ignored. m (multi-token prediction) is read, and not supported yet. */
typedef struct loom_stage_split {
    int64_t layers; /* of the model */
    int64_t pipeline_model_parallel_size;
    int64_t virtual_pipeline_model_parallel_size; /* 0: none, or what the layout implies */
    int64_t num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage;
    bool account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split;
    const char *pipeline_model_parallel_layout; /* "E|t*3|(tt|)*2L" */
    bool balanced_pipeline_split;               /* 30 layers on 4 stages: 8, 8, 7, 7 */
} loom_stage_split;

/* One chunk of one stage. */
typedef struct loom_stage {
    int64_t first_layer; /* global number from 0; meaningless without layers */
    int64_t layers;      /* may be 0: an embedding or a head alone */
    bool embedding;      /* the model begins here: words (and positions) are looked up */
    bool loss;           /* the model ends here: final norm, head, loss */
} loom_stage;

/* Chunks of each stage: virtual_pipeline_model_parallel_size, what the layout implies, or 1. Errors: LOOM_ERR_CONFIG
 * names the field, both numbers and the nearest legal values. */
LOOM_API loom_status loom_stage_split_chunks(const loom_stage_split *split, int64_t *chunks);
/* Chunk c of stage r goes to stages[c * pipeline_model_parallel_size + r]: that is the order of depth. `stages` is the
 * caller's, of chunks * pipeline_model_parallel_size; written on success alone. Errors: LOOM_ERR_CONFIG, all faults at
 * once; LOOM_ERR_UNSUPPORTED for a layout with m. */
LOOM_API loom_status loom_stage_split_make(const loom_stage_split *split, loom_stage *stages);

#ifdef __cplusplus
}
#endif
#endif
