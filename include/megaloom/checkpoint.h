/* Checkpoints as files: what Megatron-Core calls torch_dist, what torch.distributed.checkpoint writes by itself, the
 * folders of NeMo around them, and safetensors. A checkpoint is a set of named tensors, each cut into chunks that lie
 * in several files, named objects, and the common state that is the same for all ranks.
 *
 * No function here is collective. An open checkpoint may be read by many threads at once. Its files are mapped: they
 * must not shrink while it is open. No code from a checkpoint is ever run.
 *
 * Errors: LOOM_ERR_NOT_FOUND (no checkpoint, no such tensor), LOOM_ERR_IO, LOOM_ERR_FORMAT (a file breaks its format:
 * the message names file, place, found and expected), LOOM_ERR_UNSUPPORTED (of the format, but not of Megaloom),
 * LOOM_ERR_ARGUMENT, LOOM_ERR_MEMORY. */
#ifndef MEGALOOM_CHECKPOINT_H
#define MEGALOOM_CHECKPOINT_H

#include <megaloom/value.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LOOM_CHECKPOINT_MAX_DIMS = LOOM_VALUE_MAX_DIMS };

typedef enum loom_checkpoint_format {
    LOOM_CHECKPOINT_TORCH_DIST, /* Megatron-Core's, also inside a folder of NeMo */
    LOOM_CHECKPOINT_DCP,        /* plain torch.distributed.checkpoint */
    LOOM_CHECKPOINT_SAFETENSORS
} loom_checkpoint_format;
/* "torch_dist", "dcp", "safetensors". Never NULL. */
LOOM_API const char *loom_checkpoint_format_name(loom_checkpoint_format format);

typedef struct loom_checkpoint loom_checkpoint;

/* A box of a tensor as it lies in a file. */
typedef struct loom_checkpoint_chunk {
    int64_t offsets[LOOM_CHECKPOINT_MAX_DIMS], sizes[LOOM_CHECKPOINT_MAX_DIMS]; /* [dims], in elements */
    const char *file;                                                           /* name, without a folder */
    uint64_t position, bytes; /* of its archive (safetensors: of its elements) in the file */
} loom_checkpoint_chunk;

/* The chunks of a tensor cover it without overlap. Pointers live as long as the checkpoint is open. */
typedef struct loom_checkpoint_tensor {
    const char *name;
    loom_dtype dtype;
    int dims;                                /* 0 = a scalar */
    int64_t shape[LOOM_CHECKPOINT_MAX_DIMS]; /* of the whole tensor, not of a shard; row-major */
    int64_t elements;
    int64_t chunk_count;
    const loom_checkpoint_chunk *chunks; /* in the order of the checkpoint's metadata */
    /* Optimizer tensors of the form "fully_sharded_model_space" are stored flattened: shape = [X/x, Y/y, …, x*y*…] for
     * a parameter of shape [X, Y, …] in shards of [x, y, …]. Then these are the parameter's; otherwise 0 dimensions. */
    int original_dims;
    int64_t original_shape[LOOM_CHECKPOINT_MAX_DIMS];
} loom_checkpoint_tensor;

typedef struct loom_checkpoint_object {
    const char *name;
    const char *file;
    uint64_t position, bytes;
} loom_checkpoint_object;

/* What is known of a checkpoint as a whole; 0 and NULL where it is not. */
typedef struct loom_checkpoint_info {
    loom_checkpoint_format format;
    const char *path;    /* the folder (safetensors: folder or file) that is read, after the search of open */
    const char *context; /* the folder context/ beside the files, or NeMo's */
    int64_t tensors, objects, files;
    uint64_t bytes;                 /* of all files together, metadata included */
    const loom_value *common;       /* the common state, a DICT */
    int64_t iteration;              /* of the common state; -1 = none */
    const char *optimizer_sharding; /* "fully_reshardable", "dp_reshardable", "fully_sharded_model_space", … */
    int64_t writers;                /* ranks that wrote a file */
    /* Sizes of the layout that wrote it, as the common state says, or from the objects and chunks that differ by rank.
     * A guess where layout_is_guessed: a rank count that the chunks agree with. */
    int64_t tensor_parallel, pipeline_parallel;
    bool layout_is_guessed;
} loom_checkpoint_info;

/* Opens what `path` is or leads to:
 * - a folder with .metadata and the .distcp files beside it (torch_dist when there is a metadata.json, else plain DCP;
 *   a torch_dist folder whose metadata.json is missing was not written to its end, and is refused);
 * - a folder with weights/ in it (NeMo);
 * - a folder with latest_checkpointed_iteration.txt: the iter_NNNNNNN that it names;
 * - safetensors, as loom_safetensors_open has it.
 * All data files must be there; of each only the places are looked at that its metadata names. loom_checkpoint_close.
 */
LOOM_API loom_status loom_checkpoint_open(const char *path, loom_checkpoint **checkpoint);
/* NULL is accepted. */
LOOM_API void loom_checkpoint_close(loom_checkpoint *checkpoint);

LOOM_API const loom_checkpoint_info *loom_checkpoint_get_info(const loom_checkpoint *checkpoint);

/* Tensor number `index` in [0, info.tensors), sorted by name; NULL outside. */
LOOM_API const loom_checkpoint_tensor *loom_checkpoint_tensor_at(const loom_checkpoint *checkpoint, int64_t index);
/* The tensor of that name, or LOOM_ERR_NOT_FOUND naming the nearest one. */
LOOM_API loom_status loom_checkpoint_find_tensor(
    const loom_checkpoint *checkpoint, const char *name, const loom_checkpoint_tensor **tensor);
/* The same for objects. */
LOOM_API const loom_checkpoint_object *loom_checkpoint_object_at(const loom_checkpoint *checkpoint, int64_t index);
LOOM_API loom_status loom_checkpoint_find_object(
    const loom_checkpoint *checkpoint, const char *name, const loom_checkpoint_object **object);

/* out [sizes…] = the box tensor[offsets … offsets + sizes), row-major. `dtype` is the tensor's own, or LOOM_F32, to
 * which F64 (rounded), F16 and BF16 are converted. The first read of a chunk compares its checksum. Memory beyond `out`
 * is at most one deflated chunk, and none for stored ones. `tensor` is of this checkpoint. */
LOOM_API loom_status loom_checkpoint_read(const loom_checkpoint *checkpoint, const loom_checkpoint_tensor *tensor,
    const int64_t *offsets, const int64_t *sizes, loom_dtype dtype, void *out);
/* The same for a box of original_shape, for tensors that have one: shards are put in their places. Memory beyond `out`
 * is that of one shard. */
LOOM_API loom_status loom_checkpoint_read_original(const loom_checkpoint *checkpoint,
    const loom_checkpoint_tensor *tensor, const int64_t *offsets, const int64_t *sizes, loom_dtype dtype, void *out);
/* The value of an object, made in `pool`; its tensors may point into the open checkpoint. */
LOOM_API loom_status loom_checkpoint_read_object(const loom_checkpoint *checkpoint,
    const loom_checkpoint_object *object, loom_value_pool *pool, const loom_value **value);

/* One fault of a checkpoint; file is a name, or "" where it is of the whole. */
typedef void (*loom_checkpoint_fault)(void *context, const char *file, const char *message);
typedef struct loom_checkpoint_verified {
    int64_t tensors, chunks, objects, files; /* looked at */
    uint64_t bytes;
    int64_t not_compared; /* floating-point tensors whose values were not looked at: padded buckets of other programs */
    int64_t faults, damaged_files;
} loom_checkpoint_verified;
/* Reads everything: structure, every archive and its checksums, and that floating-point values are finite (buckets of
 * the form dp_reshardable that another program wrote hold whatever lay between parameters, and are not looked at for
 * that). `fault` (may be NULL) hears of each fault, in the order of the files. LOOM_ERR_FORMAT when there was one, with
 * a message that counts them; what keeps the checkpoint from being opened at all is returned as it is, and not told to
 * `fault`. */
LOOM_API loom_status loom_checkpoint_verify(
    const char *path, loom_checkpoint_fault fault, void *context, loom_checkpoint_verified *verified);

#ifdef __cplusplus
}
#endif
#endif
