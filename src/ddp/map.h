/* Where each parameter lies in the gradient buffer, and where buckets end. Pure arithmetic. */
#ifndef DDP_MAP_H
#define DDP_MAP_H

#include <megaloom/types.h>

enum { LOOM__DDP_ALIGNMENT = 16 }; /* elements: 64 bytes of fp32 */

/* The buffer is cut in places, one a parameter, next to each other: place p holds parameter count-1-p of the list. A
 * place starts at a multiple of LOOM__DDP_ALIGNMENT; the gap before the next one holds zeros. */
typedef struct loom__ddp_place {
    int64_t start, count; /* elements */
    int64_t bucket;
} loom__ddp_place;

typedef struct loom__ddp_bucket {
    int64_t start, end;          /* elements of the buffer, gaps included; end is the next bucket's start */
    int64_t first_place, places; /* consecutive places */
} loom__ddp_bucket;

/* The default of Megatron-Core: max(40e6, 1e6 * dp) elements. */
int64_t loom__ddp_default_bucket_size(int64_t dp);

/* Lays out `count` parameters of counts[i] elements (model order). chunks[i] says whose a parameter is, never less than
 * before; NULL = all are of chunk 0. A bucket ends with the parameter that makes it hold bucket_size elements or more
 * (gaps not counted; bucket_size 0 = none does), and with its chunk; chunks after the first are one bucket each. places
 * and buckets have room for `count` entries each. *bucket_count is 0 only for count 0; *elements is the whole length.
 */
loom_status loom__ddp_map(const int64_t *counts, const int64_t *chunks, int64_t count, int64_t bucket_size,
    loom__ddp_place *places, loom__ddp_bucket *buckets, int64_t *bucket_count, int64_t *elements);

#endif
