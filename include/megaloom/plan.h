/* What a run will need, before it starts: memory of a rank by kind, operations and bytes of a step, idle time of the
 * pipeline, and what binds. Pure arithmetic: no rank, no thread and no file but the one that is read; time and memory
 * do not grow with the number of ranks, so that a million of them are planned in a moment.
 *
 * Memory is that of Megaloom's own training: the activations are counted by walking the operations of a layer with
 * their very tensors, over the instructions that a stage carries out. How many rows an expert gets depends on the data:
 * all are thought to get as many. Parts of a configuration that training still refuses are counted by the same rules
 * where they have tensors of their own (recomputed experts), fp8 as bf16. Not counted are the program itself, threads,
 * messages of MPI, the router's tables of choices and scratch of the kernels.
 *
 * Sizes are in bytes, times in seconds, operations in floating point operations. Nothing here is collective. */
#ifndef MEGALOOM_PLAN_H
#define MEGALOOM_PLAN_H

#include <megaloom/config.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a rank runs on; the estimates of time follow from it, nothing else does. */
typedef struct loom_plan_machine {
    const char *name;
    double flops;             /* of a rank's matrix products, in a second, in the dtype of the run, at best */
    double efficiency;        /* the share of it that products reach */
    double node_bandwidth;    /* bytes a second that a rank sends within its node */
    double network_bandwidth; /* and to other nodes */
    double memory;            /* bytes of a rank; 0 = no limit */
    int64_t ranks_per_node;   /* 0 = all on one node */
} loom_plan_machine;

/* Fills in a machine of that name: "cpu" (a core of a workstation: 80 GFLOP/s, 10 GB/s, a network of 1.25 GB/s),
 * "a100", "h100", "b200" (nodes of 8, dense bf16). False for another name. */
LOOM_API bool loom_plan_machine_find(const char *name, loom_plan_machine *machine);
/* The names that it knows, NULL after the last. */
LOOM_API const char *const *loom_plan_machine_names(void);

typedef struct loom_plan_options {
    int64_t world_size; /* 0 = the configuration's `ranks` */
    loom_plan_machine machine;
} loom_plan_options;
/* The ranks of the configuration on machine "cpu". */
LOOM_API loom_plan_options loom_plan_options_default(void);

/* Memory of one rank. The first three stay for the whole run; the others are those of the moment of a step that needs
 * most: what is kept for backwards, gradients and messages on their way, logits of the vocabulary. */
typedef struct loom_plan_memory {
    double weights;
    double gradients;
    double optimizer;   /* fp32 masters and moments */
    double activations; /* kept for a backward */
    double buffers;     /* messages, gathered sequences, gradients of activations; buffers of reductions */
    double logits;
    double total;
    double reductions; /* of `buffers`: what reductions hold, for the whole run */
} loom_plan_memory;

/* One stage of the pipeline, and a rank of it. */
typedef struct loom_plan_stage {
    int64_t layers;
    bool embedding, loss;    /* the model begins, or ends, here */
    int64_t parameters;      /* of the stage over all its tensor and expert ranks; a tied head's copy counted */
    int64_t rank_parameters; /* that a rank holds, padding rows of the vocabulary included */
    double flops;            /* of a rank in a step, recomputation included */
    int64_t microbatches;    /* forwards that wait for their backward at worst */
    double idle;             /* share of the step in which it does not compute */
    loom_plan_memory memory;
} loom_plan_stage;

/* What moves between ranks in a step. */
typedef enum loom_plan_traffic_kind {
    LOOM_PLAN_TENSOR,     /* tensor and sequence parallelism */
    LOOM_PLAN_CONTEXT,    /* keys and values */
    LOOM_PLAN_EXPERT,     /* tokens to experts and back */
    LOOM_PLAN_PIPELINE,   /* activations and their gradients between stages */
    LOOM_PLAN_GRADIENTS,  /* reduction over data-parallel ranks */
    LOOM_PLAN_PARAMETERS, /* gathers of a distributed optimizer */
    LOOM_PLAN_EMBEDDING,  /* tied embeddings, first with last stage */
    LOOM_PLAN_TRAFFIC_KINDS
} loom_plan_traffic_kind;
/* "tensor", …; "?" for a number that is no kind. */
LOOM_API const char *loom_plan_traffic_name(loom_plan_traffic_kind kind);

typedef struct loom_plan_traffic {
    int64_t group; /* ranks that exchange; 1 = none */
    double rank;   /* bytes that a rank of the busiest stage sends */
    double inside; /* bytes of all ranks that stay within a node */
    double across; /* and that go from node to node */
} loom_plan_traffic;

typedef struct loom_plan {
    /* The layout. */
    int64_t world, nodes, tensor, context, expert, data, pipeline;
    int64_t chunks;            /* of a stage */
    int64_t microbatches;      /* of a step */
    int64_t micro_batch_size;  /* samples */
    int64_t global_batch_size; /* samples of a step */
    int64_t seq_length;        /* tokens of a sample */
    /* The model. */
    int64_t parameters;        /* without padding, a tied head once */
    int64_t active_parameters; /* that a token meets: of the experts moe_router_topk */
    double flops_per_token; /* forward and backward; attention by half where it is causal, recomputation not counted */
    double flops_per_token_full_attention; /* attention over the whole sequence, as papers count it */
    double flops_per_step;                 /* flops_per_token times the tokens of a step */
    double recompute_flops_per_step;       /* what recomputation adds */
    /* The pipeline. */
    double bubble;         /* share of the stages' time in which they do not compute; of the simulated schedule */
    bool bubble_simulated; /* false: so many stages that the formula had to do, with equal stages */
    int64_t stage_count;
    loom_plan_stage *stages;
    int64_t worst;       /* the stage that needs most memory */
    double memory_setup; /* most bytes that a rank needs while it is set up */
    double memory_limit; /* of a rank; 0 = none */
    loom_plan_traffic traffic[LOOM_PLAN_TRAFFIC_KINDS];
    /* Time, on the machine. */
    double step_seconds;
    double compute_seconds;                          /* of the slowest stage; below: what comes beside it */
    double exposed_seconds[LOOM_PLAN_TRAFFIC_KINDS]; /* a kind of traffic */
    double bubble_seconds;                           /* waiting for other stages */
    double utilization;                              /* flops_per_step over what all ranks could do in the step */
    char binds[320];                                 /* one line: what limits this run, and what would help */
} loom_plan;

/* Plans a configuration that loom_run_config_load_planned has found sound. loom_plan_destroy. Errors: those of the
 * layout and the model; LOOM_ERR_UNSUPPORTED for encoder-decoder models. */
LOOM_API loom_status loom_plan_make(const loom_run_config *config, const loom_plan_options *options, loom_plan **plan);
LOOM_API void loom_plan_destroy(loom_plan *plan); /* NULL is accepted */

/* A layout that a search has planned. */
typedef struct loom_plan_candidate {
    int64_t tensor, context, expert, data, pipeline, chunks, micro_batch_size, microbatches;
    bool sequence_parallel;
    loom_recompute recompute;
    double memory; /* of a rank of the worst stage */
    double bubble, utilization, step_seconds, tokens_per_second;
} loom_plan_candidate;

/* Why layouts fall, by reason. */
typedef struct loom_plan_fall {
    const char *reason;
    int64_t count;
    char example[160]; /* of one of them: the nearest, where it is memory that it lacks */
} loom_plan_fall;

typedef struct loom_plan_search {
    int64_t tried;
    int64_t count;
    loom_plan_candidate *candidates; /* those that fit, most tokens a second first */
    int64_t fall_count;
    loom_plan_fall *falls; /* most first */
} loom_plan_search;

/* Plans the configuration with every tensor, pipeline, virtual and, with experts, expert size that the ranks allow, and
 * microbatches of 1, 2, 4 and 8 samples; of each the least recomputation that fits. The global batch, the context size
 * and all else stay as they are; sequence parallelism is on where there is a tensor size above 1. A way of cutting the
 * layers that is written out holds for the configuration's own pipeline size alone. loom_plan_search_destroy. */
LOOM_API loom_status loom_plan_search_make(
    const loom_run_config *config, const loom_plan_options *options, loom_plan_search **search);
LOOM_API void loom_plan_search_destroy(loom_plan_search *search); /* NULL is accepted */

/* The fields of a run file that say what another program's configuration says. */
typedef struct loom_plan_translation {
    char **overrides; /* "model.num_layers=96", …: for loom_run_config_load_planned */
    int64_t override_count;
    int64_t world_size; /* 0 = it does not say */
    char *left_out;     /* what has no field here, one a line; "" = nothing */
    char *faults; /* what is wrong with it, one a line with its name; "" = nothing: loom_plan_check has room for it */
} loom_plan_translation;

/* A command line of Megatron-LM, as it stands in a shell script: words with quotes, backslashes and comments; what
 * stands before the first option (torchrun and its own options but for the sizes of the job, the script) is passed
 * over. Options that change nothing here (paths, logging, fused kernels) are left out without a word. Megatron-LM's
 * defaults hold where they differ. A value that is missing, options that contradict each other and the like are faults
 * of the translation, which is made all the same, so that they are told with those of the configuration. `name` stands
 * in messages. loom_plan_translation_free. LOOM_ERR_FORMAT: a quote that does not end, more than 1 MB. */
LOOM_API loom_status loom_plan_translate_megatron(
    const char *name, const char *text, size_t length, loom_plan_translation *translation);
/* A YAML file of NeMo (model, trainer, exp_manager) or Megatron-Bridge (model, train, optimizer, ddp, …): its sections
 * are found by their names. Errors: those of a YAML file. */
LOOM_API loom_status loom_plan_translate_nemo(
    const char *name, const char *text, size_t length, loom_plan_translation *translation);
/* Whether the text has sections that only such a file has. */
LOOM_API bool loom_plan_is_nemo(const char *text, size_t length);
LOOM_API void loom_plan_translation_free(loom_plan_translation *translation);

#ifdef __cplusplus
}
#endif
#endif
