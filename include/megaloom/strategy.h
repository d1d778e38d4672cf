/* The strategy: Megatron-style model parallelism inside the user's own training loop.
 *
 *     loom_fabric_create → loom_fabric_launch → loom_gpt_create → loom_fabric_setup_module
 *         → loom_fabric_setup_megatron_optimizer → loom_fabric_setup_dataloader
 *         → loop { loom_parallel_training_step; loom_optimizer_step }
 *
 * Every rank of the world runs the same calls. Names are those of NeMo's FabricMegatronStrategy and MegatronParallel.
 * Objects made from a fabric must be destroyed before it, also on the way out of an error: parallel and batches first,
 * then the fabric (destroying a parallel destroys its module and its optimizer). Functions that make, set up, launch or
 * step are collective over the world unless they say not; accessors, resets and destroys are not collective.
 */
#ifndef MEGALOOM_STRATEGY_H
#define MEGALOOM_STRATEGY_H

#include <megaloom/callbacks.h>
#include <megaloom/config.h>
#include <megaloom/layout.h>
#include <megaloom/module.h>
#include <megaloom/optim.h>
#include <megaloom/router.h>
#include <megaloom/safetensors.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_fabric loom_fabric;
typedef struct loom_parallel loom_parallel;
typedef struct loom_batches loom_batches;

/* ---- Plug-ins: each a struct of functions with one working default ---- */

/* The device of a rank. */
typedef struct loom_accelerator {
    const char *name; /* "cpu" */
    void *context;
    loom_status (*setup_device)(void *context, loom_rank *rank, int device);
    void (*teardown)(void *context, loom_rank *rank);
    /* The start-up tuning hook (in place of enable_nvidia_optimizations): what was tuned goes into `text` (bytes long),
     * which is logged once. */
    loom_status (*tune)(void *context, loom_rank *rank, char *text, size_t bytes);
} loom_accelerator;
/* The CPU: threads bound by the launcher, denormals flushed. */
LOOM_API const loom_accelerator *loom_accelerator_cpu(void);

/* Who started the ranks, and where they are. */
typedef struct loom_cluster_environment {
    const char *name; /* "rank" for the default, "slurm", … */
    void *context;
    bool (*creates_processes_externally)(void *context, loom_rank *rank);
    int (*world_size)(void *context, loom_rank *rank);
    int (*global_rank)(void *context, loom_rank *rank);
    int (*local_rank)(void *context, loom_rank *rank);
    int (*node_rank)(void *context, loom_rank *rank);
    /* Where processes meet that nobody else brings together; NULL and 0 where a launcher did. */
    const char *(*main_address)(void *context, loom_rank *rank);
    int (*main_port)(void *context, loom_rank *rank);
} loom_cluster_environment;
/* The ranks as loom_run_local or loom_run_mpi made them. */
LOOM_API const loom_cluster_environment *loom_cluster_environment_rank(void);

/* Precision: what is converted where. Each function may be NULL (nothing to do). Without one in the strategy's
 * configuration a fabric makes it of its loom_precision_config: 32, bf16-mixed or 16-mixed. */
typedef struct loom_precision_plugin {
    const char *name; /* "32" */
    void *context;
    loom_status (*convert_config)(void *context, loom_model_config *model, loom_ddp_config *ddp);
    loom_status (*convert_module)(void *context, loom_module *module);
    loom_status (*convert_optimizer_config)(void *context, loom_optimizer_config *optimizer);
    /* The precision's hook in setup_optimizer. */
    loom_status (*setup_optimizer)(void *context, loom_optimizer *optimizer);
    loom_status (*convert_input)(void *context, const loom_batch *batch); /* first stage only */
    /* Last stage only: *output, token losses [s, b], becomes F32 (loom_cast), whose reference the caller has. */
    loom_status (*convert_output)(void *context, loom_tape *tape, loom_tensor **output);
    /* F32, BF16 or F16: in which the module's parameters are kept once it is set up, rounded to nearest even; their
     * activations have the same dtype. Training keeps fp32 masters of 16-bit parameters beside them, sharded under a
     * distributed optimizer: those are updated, and the parameters rounded from them. */
    loom_dtype params_dtype;
} loom_precision_plugin;
LOOM_API const loom_precision_plugin *loom_precision_plugin_fp32(void);

/* The loss of a step: from token losses to one number, and the gradient that the backward starts from. */
typedef struct loom_loss_reduction {
    void *context;
    /* Adds this microbatch's weighted losses to *sum and its weights to *weight; d_losses (not NULL in training) [s, b]
     * gets weight * seed. losses [s, b]. seed is 1 / (expected tokens of the global batch), and the optimizer
     * multiplies by expected / Σ weight: so only the proportions of the weights matter. Beside them a router's own
     * losses weigh as a token of weight 1 each would: weights of mean 1 in a microbatch leave them their coefficients.
     * Not collective. */
    loom_status (*forward)(void *context, const loom_batch *batch, const loom_tensor *losses, float seed, double *sum,
        double *weight, loom_tensor *d_losses);
    /* Over all microbatches and the data-parallel (times context-parallel) group: *sum and *weight become the group's,
     * *loss their quotient. Collective over `group`. */
    loom_status (*reduce)(void *context, loom_comm *group, double *sum, double *weight, double *loss);
} loom_loss_reduction;
/* Mean over the tokens whose loss_mask counts: Σ loss·mask / Σ mask over microbatches and ranks; without any token 0.
 */
LOOM_API const loom_loss_reduction *loom_loss_reduction_masked_token(void);

/* ---- The fabric ---- */

/* Validates everything and names every fault. config and precision are copied; precision NULL = its default. Not
 * collective. */
LOOM_API loom_status loom_fabric_create(loom_rank *rank, const loom_megatron_strategy_config *config,
    const loom_precision_config *precision, loom_fabric **fabric);
/* Ranks, groups, device. A second call takes the groups down and builds them again (not with modules set up). */
LOOM_API loom_status loom_fabric_launch(loom_fabric *fabric);
LOOM_API void loom_fabric_destroy(loom_fabric *fabric); /* NULL is accepted */
/* Before setup_module, with ddp "pytorch": true leaves the reduction to the caller, who sums parameter->grad over the
 * data-parallel group between a training step and the optimizer's. Creating the fabric sets it to false with pytorch,
 * whatever the configuration says. LOOM_ERR_CONFIG for true with ddp "megatron". Not collective; the same on all ranks.
 */
LOOM_API loom_status loom_fabric_set_no_ddp_communication_hook(loom_fabric *fabric, bool on);
/* The seed of initial weights and dropout; default 1234. Before setup_module. Not collective. */
LOOM_API void loom_fabric_seed_everything(loom_fabric *fabric, uint64_t seed);

/* The parallel fields, as a plain copy. Those of the pipeline split are fields of a model: they are 0 until
 * loom_gpt_create, then those of the last model created (the layout is borrowed from its configuration).
 * use_te_rng_tracker, use_sharp and use_gloo_process_groups have no field yet and are 0. Not collective. */
typedef struct loom_parallelism {
    int64_t tensor_model_parallel_size, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size;
    int64_t microbatch_group_size_per_vp_stage, context_parallel_size;
    bool sequence_parallel;
    int64_t expert_model_parallel_size, expert_tensor_parallel_size;
    bool moe_extended_tp;
    int64_t encoder_tensor_model_parallel_size, encoder_pipeline_model_parallel_size;
    const char *pipeline_dtype;
    int64_t num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage;
    bool account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split;
    const char *pipeline_model_parallel_layout;
    bool balanced_pipeline_split;
    bool use_te_rng_tracker, use_sharp, use_gloo_process_groups;
} loom_parallelism;
LOOM_API loom_parallelism loom_fabric_parallelism(const loom_fabric *fabric);

/* The rank that the fabric was made with. */
LOOM_API loom_rank *loom_fabric_rank(const loom_fabric *fabric);
/* After launch. */
LOOM_API const loom_layout *loom_fabric_layout(const loom_fabric *fabric);
/* This rank's handle of its group; NULL before launch or for a kind that is not communicated in yet. */
LOOM_API loom_comm *loom_fabric_group(const loom_fabric *fabric, loom_group_kind kind);
/* The connector, borrowed. */
LOOM_API loom_callbacks *loom_fabric_callbacks(loom_fabric *fabric);

/* Runs body with modules created shapes only and without initialisation (perform_initialization false, on meta);
 * restored afterwards, also by an error. Not collective. */
typedef loom_status (*loom_context_body)(void *argument);
LOOM_API loom_status loom_fabric_megatron_context(loom_fabric *fabric, loom_context_body body, void *argument);
/* The same when empty_init; else body runs as it is. */
LOOM_API loom_status loom_fabric_module_init_context(
    loom_fabric *fabric, bool empty_init, loom_context_body body, void *argument);

/* A GPT or Llama model: shapes only until setup_module. config is copied, its strings are borrowed. Inside
 * loom_fabric_megatron_context the model is created without initialisation. Not collective. */
LOOM_API loom_status loom_gpt_create(loom_fabric *fabric, const loom_model_config *config, loom_module **module);
/* The configuration of a Hugging Face directory's config.json:
 *
 *     loom_model_config config = loom_model_config_default("llama");
 *     LOOM_TRY(loom_hf_read_config("path/to/model", &config));
 *     LOOM_TRY(loom_gpt_create_from_hf(fabric, "path/to/model", &config, &module));
 *
 * Everything that the file decides is set, the architecture too, and seq_length, where it is 0, to
 * max_position_embeddings; settings of a run (seq_length, make_vocab_size_divisible_by, recompute,
 * replicate_query_groups, …) keep their values. All faults of the file are named at once: LOOM_ERR_FORMAT,
 * LOOM_ERR_UNSUPPORTED for what is not built; *config is written only on success. Not collective. */
LOOM_API loom_status loom_hf_read_config(const char *directory, loom_model_config *config);
/* loom_gpt_create with the weights of that directory: model.safetensors, or shards with
 * model.safetensors.index.json, in fp32, bf16 or fp16. They are read when the module is set up, by every rank its part,
 * and must be exactly the model's tensors. config is what loom_hf_read_config (or loom_run_config_load with model.hf)
 * gave, adjusted by the caller: dropouts, seq_length. Names and shapes are checked for the whole model on every rank.
 * directory is copied. */
LOOM_API loom_status loom_gpt_create_from_hf(
    loom_fabric *fabric, const char *directory, const loom_model_config *config, loom_module **module);
/* Describes the module's tensors, of all pipeline stages, in Hugging Face names and whole shapes, to a writer. Modules
 * of loom_gpt_create only. Not collective. */
LOOM_API loom_status loom_gpt_describe_hf(loom_parallel *parallel, loom_safetensors_writer *writer);
/* Writes the parameters, or the gradients of the last training step, in the order of the descriptions. Collective over
 * the tensor and the pipeline group, and with a distributed optimizer also over the data-parallel group; written where
 * writer is not NULL. */
LOOM_API loom_status loom_gpt_write_hf(loom_parallel *parallel, bool gradients, loom_safetensors_writer *writer);
/* Calls body(context, name, dims, shape, values) for every parameter's canonical (whole, unpadded) tensor, of all
 * pipeline stages, in the order of the model and on every rank; tied word embeddings come once. One tensor is held at a
 * time. Collective as loom_gpt_write_hf. */
LOOM_API loom_status loom_gpt_visit(loom_parallel *parallel, bool gradients,
    loom_status (*body)(void *context, const char *name, int dims, const int64_t *shape, const float *values),
    void *context);

/* Precision's dtypes into the model's configuration → materialise (weights; the parallel sizes reach the module through
 * its environment) → precision → gradient buffers → sampler's callbacks. The parallel owns the module from now on, also
 * after an error. */
LOOM_API loom_status loom_fabric_setup_module(loom_fabric *fabric, loom_module *module, loom_parallel **parallel);
/* The same without wrapping in DDP (Megatron's wrap_with_ddp=False): no gradient buffer is made, parameters stay in the
 * module's own memory, and loom_parameter.grad stays NULL. Validation, test and predict steps, generation and the
 * writing of Hugging Face directories work; training steps, optimizers and gradients are refused (LOOM_ERR_STATE). */
LOOM_API loom_status loom_fabric_setup_module_for_inference(
    loom_fabric *fabric, loom_module *module, loom_parallel **parallel);
LOOM_API void loom_parallel_destroy(loom_parallel *parallel); /* NULL is accepted */
/* Nothing to do: parameters live where the rank computes. */
LOOM_API loom_status loom_fabric_module_to_device(loom_fabric *fabric, loom_parallel *parallel);
/* In place of the masked-token mean. Copied. Not collective. */
LOOM_API void loom_parallel_set_loss_reduction(loom_parallel *parallel, const loom_loss_reduction *reduction);
/* The model's configuration with all derived values; NULL for a module without one. Not collective. */
LOOM_API const loom_model_config *loom_parallel_model_config(const loom_parallel *parallel);
/* In which the parameters are kept, as the precision has it: F32, BF16 or F16. Not collective. */
LOOM_API loom_dtype loom_parallel_dtype(const loom_parallel *parallel);
/* This rank's parameters; their values are whole (loom_parameter_values: in the parameter's dtype). Under a distributed
 * optimizer collective over the data-parallel group, and after a training step `grad` is reduced only where this rank
 * updates: see loom_parallel_gather_gradients.
 */
LOOM_API loom_status loom_parallel_parameters(
    loom_parallel *parallel, loom_parameter *const **parameters, int64_t *count);
/* After a training step under a distributed optimizer: every parameter's `grad` becomes the whole reduced gradient on
 * every rank. Does nothing under another. Collective over the data-parallel group. */
LOOM_API loom_status loom_parallel_gather_gradients(loom_parallel *parallel);

/* What an optimizer needs beside its configuration. */
typedef struct loom_optimizer_setup {
    loom_lr_config schedule; /* of the learning rate */
    int64_t steps;           /* of the run: where schedules end */
    loom_optimizer_conditions conditions;
} loom_optimizer_setup;
/* Adam or SGD over the module's buffers. setup NULL = a constant rate, no decay for one-dimensional parameters. The
 * optimizer belongs to the parallel. */
LOOM_API loom_status loom_fabric_setup_megatron_optimizer(loom_fabric *fabric, loom_parallel *parallel,
    const loom_optimizer_config *config, const loom_optimizer_setup *setup, loom_optimizer **optimizer);
/* The precision's hook, then the optimizer joins the callbacks. setup_megatron_optimizer calls it; calling it again
 * with the same optimizer changes nothing, another one is refused. Not collective. */
LOOM_API loom_status loom_fabric_setup_optimizer(
    loom_fabric *fabric, loom_parallel *parallel, loom_optimizer *optimizer);

/* ---- Data ---- */

/* A loader before the strategy has cut it for this data-parallel rank. */
typedef struct loom_dataloader {
    const loom_dataset *dataset; /* borrowed */
    loom_step_mode mode;         /* training starts at consumed_samples; test and predict keep the incomplete batch */
    int64_t micro_batch_size;
    int64_t global_batch_size; /* 0 = micro_batch_size * data-parallel size */
    int64_t consumed_samples;
    bool cycle;                              /* begin again at the end */
    const struct loom_data_sampler *sampler; /* borrowed; NULL = the strategy's, or else single */
    int64_t seed;                            /* of a shuffled sampler */
    int64_t rampup_batch_size[3];            /* start, increment, samples; all 0 = none. Of a training loader alone */
    bool decrease_batch_size_if_needed;
    /* The sampler's callback sets loom_step.stop in the step whose size ramp-up has just changed. */
    bool stop_when_batch_size_changes;
    int64_t prefetch_factor; /* microbatches read ahead by a thread of their own; 0 = none */
    /* As in loom_data_loader_config; where it is not 0, steps are multiples of the tensor-parallel size too when
     * sequence_parallel cuts them. All ranks and stages find the same length, without a message. */
    int64_t pad_seq_length_to_mult;
} loom_dataloader;

/* What the user iterates over: microbatches of one loader, or of several in "max_size_cycle" mode (it ends with the
 * longest, shorter ones begin again; microbatches are taken from them in turn, of the first one first,
 * also where they do not start at their first sample). A ramp-up of several, which must be the same for all, counts the
 * samples of all together; it needs samplers that know microbatches (single, cyclic). */
LOOM_API loom_status loom_fabric_setup_dataloader(
    loom_fabric *fabric, const loom_dataloader *loader, loom_batches **batches);
LOOM_API loom_status loom_fabric_setup_dataloaders(
    loom_fabric *fabric, const loom_dataloader *loaders, int64_t count, loom_batches **batches);
/* A source of one's own, taken as it is (it must already be this rank's); the struct is copied, destroyed with batches.
 */
LOOM_API loom_status loom_fabric_setup_loader(
    loom_fabric *fabric, const loom_data_loader *loader, loom_batches **batches);
LOOM_API void loom_batches_destroy(loom_batches *batches); /* NULL is accepted */

/* The next microbatch; *batch stays valid until the next call. LOOM_END at the end. Not collective. */
LOOM_API loom_status loom_batches_next(loom_batches *batches, const loom_batch **batch);
typedef struct loom_batches_state {
    int64_t fetched;     /* microbatches handed out */
    int64_t length;      /* in all; -1 = unknown or without end */
    bool done;           /* fetched has reached length, or the source has ended */
    int64_t batch_index; /* of the last one; -1 before the first */
    int64_t loader_index;
    const loom_batch *last;
    int64_t consumed_samples;
    int64_t micro_batch_size, seq_length; /* as the loader knows them; 0 = unknown */
    int64_t num_microbatches;             /* the same, of the step that the next microbatch begins */
} loom_batches_state;
LOOM_API loom_batches_state loom_batches_get_state(const loom_batches *batches);
struct loom_data_loader_config;
/* How loader number loader_index was cut for this data-parallel rank: sampler, sizes, rank, consumed samples at the
 * start, seed, ramp-up (of several loaders their common one). LOOM_ERR_ARGUMENT: there is no such loader;
 * LOOM_ERR_STATE: it is one's own, taken as it is. */
LOOM_API loom_status loom_batches_data_config(
    const loom_batches *batches, int64_t loader_index, struct loom_data_loader_config *config);
/* Begins anew: fetched 0, not done, from the loader's first sample. */
LOOM_API loom_status loom_batches_reset(loom_batches *batches);

/* A source of data with a set-up of its own. */
typedef struct loom_datamodule {
    void *context;
    loom_status (*setup)(void *context);                     /* may be NULL */
    const loom_data_sampler *(*data_sampler)(void *context); /* may be NULL */
} loom_datamodule;
/* Sets the module up; a strategy without a sampler adopts the module's. */
LOOM_API loom_status loom_fabric_process_datamodule(loom_fabric *fabric, const loom_datamodule *datamodule);

/* ---- Steps ---- */

/* Sizes that are 0 are inferred from the loader: the rows of its microbatches, their sequence, the microbatches of a
 * step (1 where it does not know). */
typedef struct loom_step_sizes {
    int64_t micro_batch_size, seq_length, num_microbatches;
} loom_step_sizes;

/* What a step gave, the same on all ranks: the last stage tells the others. */
typedef struct loom_step_result {
    double loss;   /* over the whole global batch */
    double tokens; /* that counted, over the whole global batch */
    bool stop;     /* a callback asks the loop to stop */
    int64_t microbatches;
} loom_step_result;

/* One training step: all microbatches, forward and backward in the order of the pipeline's schedule, gradients reduced
 * and final. LOOM_END when the data end before the first microbatch; data that end inside a step are an error with both
 * counts. */
LOOM_API loom_status loom_parallel_training_step(loom_parallel *parallel, loom_batches *batches, double *loss);
LOOM_API loom_status loom_parallel_validation_step(loom_parallel *parallel, loom_batches *batches, double *loss);
LOOM_API loom_status loom_parallel_test_step(loom_parallel *parallel, loom_batches *batches, double *loss);
/* Receives the logits [b, s, v] of a microbatch, on every rank, in the order of the microbatches: with one stage right
 * after its forward, else after the step, until which the last stage holds the logits of all of them. */
typedef loom_status (*loom_logits_function)(
    void *context, const loom_batch *batch, int64_t vocabulary, const float *logits);
LOOM_API loom_status loom_parallel_predict_step(
    loom_parallel *parallel, loom_batches *batches, loom_logits_function receive, void *context);
/* All of them, with given sizes and everything it gave. receive may be NULL. */
LOOM_API loom_status loom_parallel_step(loom_parallel *parallel, loom_step_mode mode, loom_batches *batches,
    const loom_step_sizes *sizes, loom_logits_function receive, void *context, loom_step_result *result);

/* From now on (or no longer) training steps also gather what the routers of a model with experts decide, in one small
 * sum over all ranks at their end. What is recomputed counts once, validation, test and prediction not at all. Off at
 * first. Does nothing for a model without experts and for a module that was not made by loom_gpt_create. Not
 * collective; the same on all ranks, between steps. LOOM_ERR_MEMORY. */
LOOM_API loom_status loom_parallel_collect_router_statistics(loom_parallel *parallel, bool on);
/* Of the last training step: the same on all ranks, whichever layers and tokens they have. Integers are equal at any
 * layout that routes the same tokens together (a capacity is of those that a rank has of a microbatch); losses to
 * rounding. Borrowed until the next training step; NULL where nothing is gathered, or no step has been. Also for a
 * callback of LOOM_EVENT_STEP_END. Not collective. */
LOOM_API const loom_router_statistics *loom_parallel_router_statistics(const loom_parallel *parallel);

/* From now on sees the output of each operation of each forward of this rank, with the microbatch that it belongs to
 * (loom_tape_observer says the rest). NULL ends it. Not collective; what the observer does is its own affair. */
typedef loom_status (*loom_forward_observer)(
    void *context, const loom_batch *batch, const char *scope, const char *operation, loom_tensor *output);
LOOM_API void loom_parallel_observe(loom_parallel *parallel, loom_forward_observer observer, void *context);

/* ---- The pipeline ---- */

/* The key of a chunk of this stage in a state: "model_0", "model_1", … with virtual stages, "model" without. key holds
 * `bytes`; 32 always suffice. Not collective. */
LOOM_API loom_status loom_parallel_state_key(const loom_parallel *parallel, int64_t chunk, char *key, size_t bytes);

/* From now on each rank records its computations (forwards, backwards and their halves) and its waits for other stages,
 * in memory for `capacity` events, and in as much again the reductions of its buckets, the gathers of parameters, the
 * exchanges and parts of ring attention and the steps of its optimizer; what comes when that is full is counted. A
 * trace that was begun before is dropped. Collective over the world. */
LOOM_API loom_status loom_parallel_trace_begin(loom_parallel *parallel, int64_t capacity);
/* Ends it. Rank 0 writes DIRECTORY/trace.json (all that every rank recorded, a row for each of the first 64, for
 * Chrome's tracing and Perfetto) and, of the pipeline that it belongs to, DIRECTORY/timeline.svg (the last training
 * step that all its stages recorded whole), and logs that step's bubble, beside the one that the simulator finds with
 * the mean times of that step. Collective over the world. Errors: LOOM_ERR_STATE when none was begun; LOOM_ERR_IO. */
LOOM_API loom_status loom_parallel_trace_end(loom_parallel *parallel, const char *directory);

#ifdef __cplusplus
}
#endif
#endif
