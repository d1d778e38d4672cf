/* The sharded state of a model and its optimizer: which keys a checkpoint has, the global shape of each, and which
 * chunk of which key each rank holds, as Megatron-Core 0.16 names and cuts them. Pure arithmetic on the model's
 * specification and the layout. */
#ifndef CHECKPOINT_SHARDED_H
#define CHECKPOINT_SHARDED_H

#include "checkpoint/box.h"
#include "ddp/map.h"
#include "spec/part.h"

enum { LOOM__STATE_KEY_BYTES = 256, LOOM__STATE_DIMS = 4, LOOM__STATE_MOMENTS = 3 };

/* How the state of an optimizer lies in a checkpoint; distrib_optim_sharding_type is the name of the last three. */
typedef enum loom__optimizer_form {
    LOOM__OPTIMIZER_ABSENT,
    LOOM__OPTIMIZER_WHOLE,             /* no distributed optimizer: each moment like its parameter, and fp32_param where
                                          parameters are not fp32 */
    LOOM__OPTIMIZER_FULLY_RESHARDABLE, /* each moment, and param, like its parameter */
    LOOM__OPTIMIZER_DP_RESHARDABLE,    /* the buckets of the distributed optimizer, flat */
    LOOM__OPTIMIZER_MODEL_SPACE /* fully_sharded_model_space: read alone, Megatron-Core 0.16 refuses to write it */
} loom__optimizer_form;

/* NULL where content metadata does not say a type. */
const char *loom__optimizer_form_name(loom__optimizer_form form);

/* The content metadata that is stored with a checkpoint and decides how it is read. */
typedef struct loom__content_metadata {
    const char *distrib_optim_sharding_type; /* NULL: not there, as without the distributed optimizer */
    bool singleton_local_shards;             /* keys carry layer numbers and gate and up are tensors of their own */
    bool chained_optim_avoid_prefix;
} loom__content_metadata;

/* What the strategy asks for: with the distributed optimizer dp_reshardable, or fully_reshardable where that was
 * chosen; else no type. */
loom__content_metadata loom__sharded_state_dict_metadata(bool use_distributed_optimizer, bool fully_reshardable);

/* Who holds what, of all ranks. Ranks that differ in context-parallel place alone count as data-parallel ones. */
typedef struct loom__sharded_layout {
    const loom__model_spec *spec; /* completed for tp: its padded vocabulary is that of the layout */
    int64_t tp, pp, dp;
    int64_t etp, ep, edp;     /* of a model with experts: ranks that share an expert, that share a layer's experts out,
                                 and that have the same ones */
    int64_t chunks;           /* of each stage */
    const loom_stage *stages; /* [chunks * pp] as loom_stage_split_make writes them; NULL where there is one chunk in
                                 all */
    /* Of the buckets: as loom__ddp_map_options has it, for the first stage and chunk (-1 everywhere else). */
    int64_t bucket_size;
    bool pad_for_high_busbw;
    bool experts_apart; /* of a checkpoint: experts have an optimizer of their own also where they need none */
} loom__sharded_layout;

static inline bool loom__layout_has_experts(const loom__sharded_layout *layout) {
    return layout->spec->config.moe.num_moe_experts > 0;
}

/* Whether there are two optimizers, chained: the second one for experts, with buckets and groups of their own. */
static inline bool loom__layout_chains(const loom__sharded_layout *layout) {
    return loom__layout_has_experts(layout) &&
           (layout->experts_apart || !loom__experts_are_among(layout->tp, layout->ep, layout->etp));
}

/* A rank of a layout. A data-parallel place of dp or edp and above has a copy of what another has. */
typedef struct loom__sharded_place {
    int64_t stage, tp_rank, dp_rank;
    int64_t etp_rank, ep_rank, edp_rank; /* of a model with experts */
} loom__sharded_place;

/* Who stands where among the ranks that a parameter is cut over. */
static inline int64_t loom__layout_tensor_size(
    const loom__sharded_layout *layout, const loom__parameter_descriptor *parameter) {
    return parameter->expert >= 0 ? layout->etp : layout->tp;
}
static inline int64_t loom__place_tensor_rank(
    const loom__sharded_place *at, const loom__parameter_descriptor *parameter) {
    return parameter->expert >= 0 ? at->etp_rank : at->tp_rank;
}

typedef struct loom__sharded_options {
    const char *prefix; /* of model keys: "" (Megatron-LM) or "module." (NeMo) */
    bool singleton_local_shards;
    loom_dtype param_dtype, grad_dtype;
    loom__optimizer_form form;
    /* Of fully_reshardable: a data-parallel place has what it keeps, the elements of its shard of the buckets, rather
     * than copies of all. */
    bool by_shard;
    bool scaler;        /* of dp_reshardable: the optimizer has a loss scale, which is an object there */
    bool weights_alone; /* of what is read: keys of an optimizer are nothing of the model */
    int moments;        /* of the optimizer, by PyTorch's names: exp_avg, exp_avg_sq, … */
    struct loom__sharded_moment {
        const char *name;
        loom_dtype dtype;
    } moment[LOOM__STATE_MOMENTS];
} loom__sharded_options;

/* The arrays that belong to a parameter. */
enum { LOOM__STATE_WEIGHT, LOOM__STATE_MASTER, LOOM__STATE_MOMENT /* + number of the moment */ };

typedef enum loom__state_object {
    LOOM__STATE_TENSOR,        /* no object */
    LOOM__STATE_EXTRA,         /* of a linear layer: holds nothing */
    LOOM__STATE_OPTIMIZER,     /* param_groups of a data-parallel group */
    LOOM__STATE_SCALER,        /* the loss scale of one */
    LOOM__STATE_NUMEL,         /* elements of each bucket of a data-parallel group, */
    LOOM__STATE_NUMEL_UNPADDED /* and without what stands behind its last parameter */
} loom__state_object;

/* One chunk of one key. */
typedef struct loom__state_entry {
    char key[LOOM__STATE_KEY_BYTES]; /* of an object with its place: "…_extra_state/shard_0_4" */
    loom__state_object object;
    bool expert; /* of experts, or of the optimizer over them */
    loom_dtype dtype;
    int dims; /* of a tensor; so below */
    int64_t shape[LOOM__STATE_DIMS], offset[LOOM__STATE_DIMS], size[LOOM__STATE_DIMS];
    int64_t replica[3]; /* all 0: the one that is written. Tied head, tensor place, data-parallel place */
    int array;          /* LOOM__STATE_WEIGHT, … */
    int64_t entry;      /* number in the rank's part; -1: a gap between parameters, whose content means nothing */
    int64_t at, count;  /* it is elements [at, at + count) of the rank's local tensor of that parameter */
} loom__state_entry;

typedef struct loom__sharded_state {
    int64_t count;
    loom__state_entry *entries; /* weights, objects of layers, then the optimizer */
} loom__sharded_state;

/* Of one rank; `part` is what it holds (loom__sharded_part). Errors: LOOM_ERR_UNSUPPORTED for
 * LOOM__OPTIMIZER_MODEL_SPACE and for a name that does not fit, LOOM_ERR_MEMORY. */
loom_status loom__sharded_state_create(const loom__sharded_layout *layout, const loom__sharded_options *options,
    const loom__part *part, const loom__sharded_place *at, loom__sharded_state **state);
void loom__sharded_state_destroy(loom__sharded_state *state); /* NULL is accepted */

/* The part of a stage, of its experts those of a place among the ep. Free with loom__part_destroy. */
loom_status loom__sharded_part(const loom__sharded_layout *layout, int64_t stage, int64_t ep_rank, loom__part **part);

static inline bool loom__state_entry_is_main(const loom__state_entry *entry) {
    return entry->replica[0] == 0 && entry->replica[1] == 0 && entry->replica[2] == 0;
}

/* Which parameters share a key. */
typedef enum loom__key_style {
    LOOM__KEYS_STACKED,   /* layers are the first axis of a tensor, experts of a layer the next one */
    LOOM__KEYS_OF_LAYERS, /* layers that are not alike have keys of their own */
    LOOM__KEYS_SINGLETON  /* so has each expert, and each half of a gated layer */
} loom__key_style;

/* How the keys of a model are written: Megatron-Core counts layers as alike but where experts are not in every one. */
loom__key_style loom__key_style_of(const loom_model_config *config, bool singleton_local_shards);

/* The key of a parameter, without a prefix: Megatron-Core's name with its Transformer Engine norms. part: -1 the whole;
 * with LOOM__KEYS_SINGLETON 0 the gate and 1 the up half of a gated layer. */
void loom__state_key(
    const loom__parameter_descriptor *parameter, loom__key_style style, int part, char key[LOOM__STATE_KEY_BYTES]);

/* The buckets of a rank's data-parallel groups in Megatron-Core's numbers: for dense parameters and for experts a
 * buffer for each chunk of the stage that has such parameters. */
typedef struct loom__state_bucket {
    bool expert;
    int64_t gbuf, index; /* buffer of the group, bucket of the buffer */
    int64_t numel, unpadded;
    int64_t start; /* element of our one buffer of all chunks, whose buckets are the same */
    int64_t first_place, places;
} loom__state_bucket;

typedef struct loom__state_buckets {
    int64_t count, place_count;
    loom__state_bucket *buckets; /* those of experts last, in the order of gbuf and index */
    loom__ddp_place *places;     /* [place_count], as loom__part_entry numbers them */
    int64_t *entries;            /* [place_count] of the part */
} loom__state_buckets;

loom_status loom__state_buckets_create(
    const loom__sharded_layout *layout, const loom__part *part, int64_t stage, loom__state_buckets **buckets);
void loom__state_buckets_destroy(loom__state_buckets *buckets); /* NULL is accepted */

/* What a rank keeps of the parameter of place p: elements [range[0], range[1]) of its local tensor, none where both are
 * the same. */
void loom__state_shard_range(const loom__state_buckets *buckets, int64_t p, const loom__sharded_layout *layout,
    const loom__sharded_place *at, int64_t range[2]);

/* Megatron-Core's number of a rank's data-parallel group, among those of dense parameters or of experts. */
int64_t loom__state_group(const loom__sharded_layout *layout, const loom__sharded_place *at, bool experts);

/* PyTorch's name of a dtype of parameters or gradients. */
const char *loom__state_dtype_name(loom_dtype dtype);
/* What keys of the buckets begin with: where experts have an optimizer of their own, Megatron-Core chains both: "",
 * "chained_0." or "chained_1.". */
const char *loom__state_chain(const loom__sharded_layout *layout, bool experts);

#endif
