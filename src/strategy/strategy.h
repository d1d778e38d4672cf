/* The objects of the strategy room. */
#ifndef STRATEGY_STRATEGY_H
#define STRATEGY_STRATEGY_H

#include "ddp/ddp.h"
#include "runtime/rank.h"
#include <megaloom/strategy.h>

struct loom_fabric {
    loom_rank *rank;
    loom_megatron_strategy_config config;
    const loom_precision_plugin *precision_plugin;
    const loom_accelerator *accelerator;
    const loom_cluster_environment *environment;
    const loom_data_sampler *sampler;
    loom_callbacks *callbacks;
    uint64_t seed;
    bool launched;
    bool device_ready;           /* the accelerator has been set up */
    bool tuned;                  /* all ranks' accelerators were set up, and this rank's was tuned */
    loom__limit limit;           /* on the rank's waits, from the launch to the end */
    bool perform_initialization; /* false inside megatron_context */
    int64_t modules;             /* set up and not destroyed yet */
    loom_layout layout;
    loom_comm *groups[LOOM_GROUP_KIND_COUNT];
};

struct loom_parallel {
    loom_fabric *fabric;
    loom_module *module;
    bool is_gpt; /* made by loom_gpt_create */
    loom__ddp *ddp;
    loom_loss_reduction reduction;
    loom_parameter *const *parameters;
    int64_t parameter_count;
    loom_parameter **partial; /* those whose gradient must be summed over the tensor ranks */
    int64_t partial_count, partial_elements;
    float *partial_buffer;
    loom_optimizer *optimizer;
    int64_t steps[LOOM_PREDICT + 1]; /* of each mode so far */
    double token_factor;             /* expected / valid tokens of the last training step */
};

typedef struct loom__source {
    loom_data_loader loader;
    int64_t start;  /* consumed samples at its beginning */
    int64_t before; /* samples of the passes that a shorter source has behind it */
    int64_t length; /* microbatches of one pass; −1 = unknown */
} loom__source;

struct loom_batches {
    loom__source *sources;
    int64_t source_count;
    loom_batch **buffers; /* one a source */
    int64_t fetched, length;
    bool done;
    int64_t last_loader, last_batch;
    bool output_data_idx;
    bool stop_when_size_changes;
    int64_t last_microbatches; /* of the last training step; 0 = there was none */
};

/* Fills in the sizes of a step that nobody has given, as far as its loader knows them. */
void loom__infer_sizes(loom_step *step);
/* Everything after the last backward: buckets, partial sums over tensor ranks, replicas. Collective. */
loom_status loom__parallel_finish_gradients(loom_parallel *parallel);

#endif
