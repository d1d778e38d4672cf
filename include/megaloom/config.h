/* Configurations as plain structs: of the strategy, of its parts, and of a whole run as a run file describes it.
 *
 * Field names and defaults are those of FabricMegatronStrategy, Megatron-Core and NeMo. Start from the …_default()
 * function, change what differs. One field table in the library knows each field's type, range, meaning and whether it
 * is built yet; it drives the run file's reader, the checks and the printing, so a value that a struct may hold and a
 * run file may say is checked in the same words.
 *
 * Where a Python field may be None, 0 (sizes), 0.0 (rates) or NULL (strings, objects) stands for it. Strings are `const
 * char *`: static, the caller's, or owned by the loom_run_config they came with. Nothing here is collective; everything
 * may be called without ranks.
 *
 * Checks report every fault at once, one a line, each with the field (a field's own faults while loading also with
 * their place in the file), what was found, what is expected and the nearest legal values: LOOM_ERR_CONFIG, or
 * LOOM_ERR_UNSUPPORTED when the only faults are values whose part is not built yet ("not supported yet: …"). */
#ifndef MEGALOOM_CONFIG_H
#define MEGALOOM_CONFIG_H

#include <megaloom/model.h>
#include <megaloom/stages.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Objects a strategy can be given: structs of functions, in their own headers. */
struct loom_data_sampler;
struct loom_accelerator;
struct loom_cluster_environment;
struct loom_checkpoint_io;
struct loom_precision_plugin;
struct loom_callbacks;

/* Gradient buffers and their reduction: Megatron-Core's DistributedDataParallelConfig. */
typedef struct loom_ddp_config {
    bool grad_reduce_in_fp32;  /* the precision's field of that name takes its place */
    bool overlap_grad_reduce;  /* buckets are reduced while the backward goes on; same numbers either way */
    bool overlap_param_gather; /* parameters are gathered while the next forward goes on, an operation waits for its
                                  own; only with use_distributed_optimizer */
    bool align_param_gather;   /* these gathers all start after the update, on all stages; false: each when the one
                                  before it is wanted */
    bool align_grad_reduce;    /* on a pipeline the reduction of a chunk starts on all stages at once, behind its last
                                  backward; with it and align_param_gather its gathers do so in the next forward. Only
                                  with overlap_grad_reduce */
    bool use_distributed_optimizer; /* a rank keeps state for, and updates, its shard of every bucket; same numbers */
    int64_t num_distributed_optimizer_instances; /* 1, or that of the strategy, which decides */
    bool check_for_nan_in_grad; /* default true: a NaN or infinity in a reduced bucket is an error that names it */
    bool check_for_large_grads;
    int64_t bucket_size;                  /* elements; 0 = max(40e6, 1e6 * data-parallel size) */
    bool pad_buckets_for_high_nccl_busbw; /* buckets of the distributed optimizer end at multiples of 65536 elements */
    bool average_in_collective;           /* the mean is taken while reducing, not by scaling before it */
    bool fp8_param_gather;
    bool reuse_grad_buf_for_mxfp8_param_ag;
    bool use_megatron_fsdp;
    const char *data_parallel_sharding_strategy; /* "no_shard", … */
    bool gradient_reduce_div_fusion;
    int64_t suggested_communication_unit_size;
    bool preserve_fp32_weights;
    bool keep_fp8_transpose_cache;
    bool nccl_ub;
    bool fsdp_double_buffer;
    bool delay_wgrad_compute;
} loom_ddp_config;
LOOM_API loom_ddp_config loom_ddp_config_default(void);

/* The precision plugin's fields. */
typedef struct loom_precision_config {
    /* "32" ("fp32", "32-true"); "bf16-mixed" ("bf16") and "16-mixed" ("16", "fp16"): weights and activations in 16
     * bits, gradients of weights, fp32 masters of the weights and the optimizer's state in fp32. */
    const char *precision;
    const char *params_dtype; /* in which initial values are made: "fp32", or that of the weights */
    const char
        *pipeline_dtype; /* in place of the strategy's; NULL: the strategy's, else "bf16" or, without bf16, "fp32" */
    const char *autocast_dtype; /* of products; NULL or that of the weights */
    bool autocast_enabled;
    bool grad_reduce_in_fp32;  /* false: gradients travel between data-parallel ranks in the dtype of the weights */
    double loss_scale;         /* of 16-mixed, as the next four: fixed; 0 = dynamic */
    double initial_loss_scale; /* 2^32 */
    double min_loss_scale;     /* where gradients overflow at it the run ends */
    int64_t loss_scale_window; /* good steps before it doubles */
    int64_t hysteresis;        /* bad steps before it is halved */
    const char *fp4;
    const char *fp8;
    int64_t fp8_margin;
    int64_t fp8_amax_history_len;
    const char *fp8_amax_compute_algo;
    bool fp8_wgrad;
    bool fp8_dot_product_attention;
    bool fp8_multi_head_attention;
    bool fp8_params; /* the old name of the next one; the two must not contradict each other */
    bool fp8_param_gather;
} loom_precision_config;
LOOM_API loom_precision_config loom_precision_config_default(void);
LOOM_API loom_status loom_precision_config_check(const loom_precision_config *config);

/* FabricMegatronStrategy's constructor. Objects are borrowed and must outlive the strategy; NULL takes the default one.
 */
typedef struct loom_megatron_strategy_config {
    int64_t tensor_model_parallel_size;
    int64_t pipeline_model_parallel_size;
    int64_t virtual_pipeline_model_parallel_size; /* 0 = none */
    const char *pipeline_model_parallel_comm_backend;
    int64_t microbatch_group_size_per_vp_stage; /* 0 = pipeline_model_parallel_size */
    int64_t context_parallel_size;
    bool sequence_parallel;
    int64_t expert_model_parallel_size;
    bool moe_extended_tp;                /* experts are not shared out but each cut over tensor x expert ranks */
    int64_t expert_tensor_parallel_size; /* 0 = tensor_model_parallel_size */
    int64_t encoder_tensor_model_parallel_size;
    int64_t encoder_pipeline_model_parallel_size;
    const struct loom_data_sampler *data_sampler;
    const struct loom_accelerator *accelerator;
    const int *parallel_devices; /* device numbers of the local ranks */
    const struct loom_cluster_environment *cluster_environment;
    const struct loom_checkpoint_io *checkpoint_io; /* copied by loom_fabric_create */
    const struct loom_precision_plugin *precision;
    const struct loom_callbacks *megatron_callbacks; /* merged into the strategy's own connector */
    const char *ddp;                                 /* "megatron" (with the fields of ddp_config) or "pytorch" */
    loom_ddp_config ddp_config;                      /* a DDP configuration is taken as it is */
    const char *process_group_backend;
    double timeout; /* seconds a wait may take */
    const char *start_method;
    bool no_ddp_communication_hook; /* of ddp "pytorch", where it counts as false: see
                                       loom_fabric_set_no_ddp_communication_hook */
    bool output_data_idx;
    const char *pipeline_dtype; /* of activations and their gradients between stages: "fp32", "bf16", "fp16"; NULL: the
                                   precision's */
    const char *schedule; /* of the pipeline: "1f1b" or "zero-bubble"; in a run file it stands outside the strategy */
    bool init_model_parallel;
    bool use_tp_pp_dp_mapping;
    int64_t num_distributed_optimizer_instances; /* each shares the optimizer out among its ranks */
    bool dist_ckpt_optim_fully_reshardable;      /* how a distributed optimizer is saved: like its parameters
                                                    (fully_reshardable) rather than as its buckets (dp_reshardable) */
    const char *nccl_communicator_config_path;
    double bucket_cap_mb; /* this and the next three: keyword arguments of the PyTorch-style wrapper, refused with
                             ddp "megatron". MiB a bucket; 0 = 25; the first bucket has 1 at most */
    bool find_unused_parameters;  /* buckets do not wait for parameters that the last backward does not use */
    bool gradient_as_bucket_view; /* gradients lie in their buckets either way */
    bool static_graph;            /* what the first step has not used is used by none; else LOOM_ERR_STATE */
} loom_megatron_strategy_config;
LOOM_API loom_megatron_strategy_config loom_megatron_strategy_config_default(void);
/* Checks every field by the table (ranges, names, what is built), sequence_parallel against the tensor size, and
 * virtual stages and their microbatch group against the pipeline size. */
LOOM_API loom_status loom_megatron_strategy_config_check(const loom_megatron_strategy_config *config);

/* Megatron-Core's OptimizerConfig. */
typedef struct loom_optimizer_config {
    const char *optimizer; /* "adam" or "sgd" */
    double lr;             /* must be set: loom_optimizer_config_default() leaves it 0 */
    double min_lr;
    double weight_decay;         /* of tensors of two or more dimensions */
    bool decoupled_weight_decay; /* Adam takes it off the weight (AdamW); false: it adds it to the gradient, as sgd does
                                  */
    double adam_beta1, adam_beta2, adam_eps;
    bool amsgrad;              /* of Adam: divide by the largest second moment so far */
    const char *exp_avg_dtype; /* of Adam's first moment: "fp32" or "bf16" */
    const char *exp_avg_sq_dtype;
    double sgd_momentum;
    double sgd_dampening;
    bool maximize;              /* step up the gradient */
    double clip_grad;           /* global norm; 0 = no clipping */
    const char *clip_norm_type; /* "1", "2", "inf" */
    /* Of word embeddings and head; 0 = lr, and min_lr. */
    double decoupled_lr, decoupled_min_lr;
    bool log_num_zeros_in_grad;
} loom_optimizer_config;
LOOM_API loom_optimizer_config loom_optimizer_config_default(void);
LOOM_API loom_status loom_optimizer_config_check(const loom_optimizer_config *config);

/* The learning rate over the steps.
 *
 * "cosine": step t < warmup_steps uses lr*(t+1)/warmup_steps, then half a cosine from lr at t = warmup_steps to min_lr
 * at the last step.
 *
 * "megatron-constant", "megatron-linear", "megatron-cosine", "megatron-inverse-square-root", "megatron-WSD":
 * Megatron-Core's OptimizerParamScheduler, whose first step uses init_lr. Counted in steps.
 *
 * NeMo's policies, with their options: the warm-up uses lr*(t+1)/(warmup_steps+1) up to and with t = warmup_steps, then
 * some hold lr for hold_steps, then the curve ends at max_steps with min_lr. "WarmupPolicy", "WarmupHoldPolicy",
 * "SquareAnnealing", "SquareRootAnnealing", "CosineAnnealing" (with constant_steps at its end the warm-up is
 * lr*t/warmup_steps), "WarmupAnnealing", "InverseSquareRootAnnealing", "T5InverseSquareRootAnnealing" (which ignores
 * lr), "PolynomialDecayAnnealing", "PolynomialHoldDecayAnnealing", "NoamAnnealing", "NoamHoldAnnealing",
 * "WarmupHoldAnnealLinear", "WarmupHoldAnnealOneMinusSquareRoot".
 *
 * Weight decay goes from start_weight_decay to end_weight_decay over wd_incr_steps where weight_decay_incr_style is
 * "linear" or "cosine", under every schedule. */
typedef struct loom_lr_config {
    const char *schedule;
    int64_t warmup_steps;
    double init_lr;
    int64_t lr_decay_steps;         /* 0 = the steps of the run */
    const char *lr_wsd_decay_style; /* "exponential", "linear", "cosine", "minus_sqrt" */
    int64_t wsd_decay_steps;        /* 0 = none */
    /* Of policies; a ratio is a share of max_steps, in place of the steps of that name. */
    int64_t max_steps; /* 0 = the steps of the run */
    double warmup_ratio;
    int64_t hold_steps; /* 0 = none */
    double hold_ratio;
    int64_t constant_steps; /* 0 = none */
    double constant_ratio;
    double power;      /* of the two Polynomial… */
    bool cycle;        /* theirs, too */
    double decay_rate; /* of NoamHoldAnnealing */
    int64_t d_model;   /* of NoamAnnealing, which needs it */
    double start_weight_decay;
    double end_weight_decay;             /* 0 = weight_decay */
    const char *weight_decay_incr_style; /* "constant", "linear", "cosine" */
    int64_t wd_incr_steps;               /* 0 = the steps of the run */
    /* When a saved schedule is loaded: true keeps the values above and takes the step alone; the second takes the saved
     * ones; neither: they must agree. */
    bool override_opt_param_scheduler;
    bool use_checkpoint_opt_param_scheduler;
} loom_lr_config;
LOOM_API loom_lr_config loom_lr_config_default(void);
LOOM_API loom_status loom_lr_config_check(const loom_lr_config *config);

/* One dataset of a blend. */
typedef struct loom_data_path {
    double weight;      /* relative; 0, and then of all: by size */
    const char *prefix; /* of .bin and .idx; for kind "fixed" a safetensors file */
} loom_data_path;

/* Checks every field of a model by the table, without regard to ranks: ranges, names, what is built. */
LOOM_API loom_status loom_model_config_check(const loom_model_config *config);

typedef struct loom_data_config {
    const char *kind; /* "gpt": .bin/.idx datasets; "fixed": batches replayed from a safetensors file with tensor
                         `tokens` [steps, batch, sequence+1]; "finetune": JSON lines; "mock": a deterministic
                         synthetic stream */
    const loom_data_path *path;
    int64_t path_count;
    const loom_data_path *train_path; /* in place of `path` and `split` for training */
    int64_t train_path_count;
    const loom_data_path *valid_path; /* the same for validation */
    int64_t valid_path_count;
    const loom_data_path *test_path; /* the same for the test at the end */
    int64_t test_path_count;
    const char *split;     /* shares of training, validation and test documents, "98,1,1" */
    const char *tokenizer; /* what loom_tokenizer_open takes, NULL: byte; loading the run file does not open it: where
                              it is another, and model.vocab_size is 0, the caller sets that one from it */
    int64_t micro_batch_size;  /* samples a rank takes at once */
    int64_t global_batch_size; /* samples of a step over all ranks; 0 = micro_batch_size * data-parallel size, for kind
                                  "fixed" the batch of the file */
    int64_t rampup_batch_size[3]; /* start, increment, samples; all 0 = none */
    bool decrease_batch_size_if_needed;
    bool stop_when_batch_size_changes; /* training ends after the step that changes the ramp-up's size */
    const char *dataloader_type;       /* what loom_data_sampler_find takes */
    int64_t max_epochs;                /* of a corpus; 0 = no limit */
    bool reset_position_ids, reset_attention_mask, eod_mask_loss; /* as in loom_gpt_dataset_config */
    bool pack_sequences;                                          /* of kind "finetune": samples share a sequence */
    int64_t pad_seq_length_to_mult; /* of kind "finetune": a step is as long as its longest sample, rounded up to a
                                       multiple of this; 0 = model.seq_length */
    const char *index_mapping_dir;  /* the same; NULL = none */
    int64_t prefetch_factor;        /* microbatches read ahead; 0 = none */
} loom_data_config;

typedef struct loom_validation_config {
    int64_t every;   /* steps; 0 = never */
    int64_t batches; /* global batches a time */
    bool test;       /* the loss of the test data, all of them, when training has ended */
} loom_validation_config;

/* How the Megatron checkpoint I/O writes and reads: MegatronCheckpointIO's arguments. */
typedef struct loom_checkpoint_io_config {
    const char *save_ckpt_format;     /* "torch_dist" */
    bool async_save;                  /* a save copies the state and returns; a thread writes the copy */
    bool load_directly_on_device;     /* the device is the CPU: true and false are the same */
    int64_t storage_writers_per_rank; /* torch_dist_multiproc: threads of a rank that write, a file each; one that would
                                         have less than 1 MiB is not used */
    bool parallel_save;           /* ranks that hold the same share its writing, balanced by size; false: the first of
                                     them writes it */
    bool parallel_save_within_dp; /* only ranks of one data-parallel (times context-parallel) group share */
    bool parallel_load; /* of a data-parallel (times context-parallel) group that wants the same chunk one rank reads it
                           and sends it to the others */
    bool assume_constant_structure; /* who writes what is found out once, and again where a rank's tensors have changed
                                     */
} loom_checkpoint_io_config;
LOOM_API loom_checkpoint_io_config loom_checkpoint_io_config_default(void);
LOOM_API loom_status loom_checkpoint_io_config_check(const loom_checkpoint_io_config *config);

typedef struct loom_checkpoint_config {
    int64_t every; /* steps; 0 = never */
    int64_t keep_last;
    int64_t keep_best; /* those of the lowest validation loss are kept as well; 0 = none */
    double time_limit; /* seconds of the run: it saves and stops before; 0 = none */
    loom_checkpoint_io_config io;
} loom_checkpoint_config;

typedef struct loom_log_config {
    int64_t every; /* steps */
    bool tensorboard;
} loom_log_config;

/* Where the model comes from: a Hugging Face directory, a checkpoint, or the fields of `config`. With `hf`,
 * loom_run_config_load has read its config.json and `config` holds what it says. */
typedef struct loom_run_model {
    const char *hf;
    const char *from;
    loom_model_config config; /* as given; derived values may still be 0 */
} loom_run_model;

/* A whole run. */
typedef struct loom_run_config {
    int64_t seed;
    int64_t ranks;   /* thread ranks where no launcher started us */
    int64_t threads; /* compute threads a rank; 0 = allowed cores / local ranks */
    int64_t steps;   /* 0 = not given */
    const char *output;
    bool export_model; /* `export`: the model goes to OUTPUT/model at the end */
    const char *device;
    loom_run_model model;
    loom_megatron_strategy_config strategy;
    loom_precision_config precision;
    loom_data_config data;
    loom_optimizer_config optim;
    loom_lr_config lr; /* in the run file these are fields of `optim`, too */
    loom_validation_config validation;
    loom_checkpoint_config checkpoint;
    loom_log_config log;
    bool trace;
    bool profile;
} loom_run_config;

/* Every field at its default; strings are static. */
LOOM_API loom_run_config loom_run_config_default(void);

/* Reads a run file (at most 1 MB), then the overrides ("a.b.c=value", the value as YAML), in that order over the
 * defaults of the file's architecture. path NULL: no file, overrides alone. Types, ranges, names and what is built are
 * checked here, field by field, each fault with its place in the file; what depends on several fields by
 * loom_run_config_check. With model.hf its config.json
 * is read as well. *config is the caller's: loom_run_config_destroy. LOOM_ERR_IO: the file cannot be read;
 * LOOM_ERR_FORMAT: it is no YAML. */
LOOM_API loom_status loom_run_config_load(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **config);
/* The same from `length` bytes of text, called `name` in messages. No file is read: with model.hf the model's own
 * fields stay unset. */
LOOM_API loom_status loom_run_config_from_text(const char *name, const char *text, size_t length,
    const char *const *overrides, int64_t override_count, loom_run_config **config);
/* How a run that is only planned is checked. */
typedef struct loom_plan_check {
    int64_t world_size; /* 0 = the configuration's `ranks` */
    /* So many of the overrides, the first ones, come from a file of this name: it stands in their messages in place of
     * "override". */
    const char *source;
    int64_t translated;
    const char *faults; /* known already, one a line: reported with the others. NULL or "" = none */
    /* Called between loading and checking where loading found no fault: may fill fields in, from a tokenizer, say. Its
     * faults are reported with the others. NULL = nothing to fill in. */
    loom_status (*prepare)(void *context, loom_run_config *config);
    void *context;
} loom_plan_check;

/* loom_run_config_load and loom_run_config_check in one, for those who plan a run and do not start it: all faults of
 * both are reported at once, and fields whose part is not built are none: their lines ("not supported yet: …", as
 * loom_run_config_check says them) come in *not_built, "" where there are none, which the caller frees. Context and
 * expert parallelism are checked against the model as well. */
LOOM_API loom_status loom_run_config_load_planned(const char *path, const char *const *overrides,
    int64_t override_count, const loom_plan_check *check, loom_run_config **config, char **not_built);

/* Frees what loading made, strings included; NULL is accepted. Not for a config from loom_run_config_default. */
LOOM_API void loom_run_config_destroy(loom_run_config *config);

/* Checks the whole for a run on `world_size` ranks (0 = unknown yet: what depends on it is left out): every field by
 * the table, required fields, the layout (loom_layout_init), the model against the tensor size, its layers against the
 * pipeline (loom_stage_split_make), batch sizes against the data-parallel size, and the microbatches of the batch size
 * and of each size of a ramp-up against the schedule (loom_schedule_config_check). Configurations made in code are
 * checked by it just as well. */
LOOM_API loom_status loom_run_config_check(const loom_run_config *config, int64_t world_size);

/* How the strategy cuts the model into stages; the layout text is borrowed from the model's configuration. */
LOOM_API loom_stage_split loom_stage_split_of(
    const loom_megatron_strategy_config *strategy, const loom_model_config *model);

/* Receives a piece of text; another status than LOOM_OK ends the printing and is returned. */
typedef loom_status (*loom_text_function)(void *context, const char *text, size_t length);

/* The configuration as a run file that loads to the same values. */
LOOM_API loom_status loom_run_config_print(const loom_run_config *config, loom_text_function write, void *context);
/* The run file of all defaults, with a comment for each field; it loads to loom_run_config_default(). */
LOOM_API loom_status loom_run_config_print_defaults(loom_text_function write, void *context);

#ifdef __cplusplus
}
#endif
#endif
