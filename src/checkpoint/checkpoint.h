/* What the files of this room share: an open checkpoint. */
#ifndef CHECKPOINT_CHECKPOINT_H
#define CHECKPOINT_CHECKPOINT_H

#include "format/file.h"
#include <megaloom/checkpoint.h>
#include <megaloom/safetensors.h>
#include <stdatomic.h>

typedef struct loom__checkpoint_file {
    char *name, *path;
    loom__mapping mapping;
    char *missing; /* why it could not be mapped; NULL = it was */
} loom__checkpoint_file;

/* Where the bytes of one chunk or object lie. */
typedef struct loom__checkpoint_place {
    int64_t file; /* number; -1 = the metadata names none */
    uint64_t position, bytes;
    atomic_bool checked; /* its checksum has been compared */
} loom__checkpoint_place;

typedef struct loom__checkpoint_entry {
    loom_checkpoint_tensor tensor; /* first: a public tensor is its entry */
    loom_checkpoint_chunk *chunks;
    loom__checkpoint_place *places; /* [chunk_count] */
    int64_t *order;                 /* chunk numbers sorted by offsets */
    const void *data;               /* safetensors: the elements; NULL otherwise */
} loom__checkpoint_entry;

typedef struct loom__checkpoint_object {
    loom_checkpoint_object object; /* first */
    loom__checkpoint_place place;
} loom__checkpoint_object;

struct loom_checkpoint {
    char *path, *context;
    loom_checkpoint_info info;
    loom__checkpoint_file *files;
    int64_t file_count;
    loom__checkpoint_entry *tensors;  /* sorted by name */
    loom__checkpoint_object *objects; /* sorted by name */
    loom_value_pool *pool;            /* of the common state */
    loom__mapping common;             /* common.pt: tensors of the common state point into it */
    loom_safetensors *safetensors;
};

/* Opens; with `lenient`, data files that are missing or too short are left for the reads that need them. */
loom_status loom__checkpoint_open(const char *path, bool lenient, loom_checkpoint **checkpoint);

/* Fills tensors, objects and files from the bytes of a .metadata (borrowed for the call); `what` is for messages. The
 * files are named, not opened. Every chunk has a place, chunks cover their tensor without overlap. */
loom_status loom__checkpoint_read_metadata(
    const char *what, const void *data, size_t bytes, loom_checkpoint *checkpoint);

/* The elements of a chunk: `data` lives as long as the checkpoint and the pool. */
loom_status loom__checkpoint_chunk_data(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, loom_value_pool *pool, const void **data);

/* Memory for the bytes of a chunk; zeroed at first. */
typedef struct loom__chunk_memory {
    unsigned char *memory;
    size_t room;
    const unsigned char *archive; /* in it; NULL: nothing was fetched */
} loom__chunk_memory;
void loom__chunk_memory_free(loom__chunk_memory *memory);
/* Reads a chunk's bytes from the disk in large parts, `direct`: past the page cache, where that can be done. Where the
 * file cannot be read so, or the chunk is small, nothing is fetched, and whoever wants the elements finds out why. Any
 * thread may call it. */
void loom__checkpoint_fetch(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry, int64_t chunk,
    bool direct, loom__chunk_memory *memory);
/* loom__checkpoint_chunk_data of what was fetched, or of the file: `data` lives as long as memory and pool as well. */
loom_status loom__checkpoint_fetched_data(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, const loom__chunk_memory *memory, loom_value_pool *pool, const void **data);
/* The same of a tensor of floating-point numbers as fp32, [its elements]: where they are or, when they are of another
 * dtype or not aligned, in `room` of that size. */
loom_status loom__checkpoint_fetched_floats(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry,
    int64_t chunk, const loom__chunk_memory *memory, loom_value_pool *pool, float *room, const float **values);

/* Fills the part of `info` that is guessed from names and chunks. */
void loom__checkpoint_hints(loom_checkpoint *checkpoint);

#endif
