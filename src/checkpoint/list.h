/* A list of state entries while it is made. */
#ifndef CHECKPOINT_LIST_H
#define CHECKPOINT_LIST_H

#include "checkpoint/sharded.h"

typedef struct loom__state_list {
    loom__sharded_state *state;
    int64_t room;
    const loom__sharded_layout *layout;
    const loom__sharded_options *options;
    const loom__part *part;
    const loom__sharded_place *at;
} loom__state_list;

/* A zeroed entry at the end; valid until the next one. */
loom_status loom__state_list_add(loom__state_list *list, loom__state_entry **entry);

/* Writes a formatted key; LOOM_ERR_UNSUPPORTED where it does not fit. */
LOOM_PRINTF(2, 3) loom_status loom__state_key_format(char key[LOOM__STATE_KEY_BYTES], const char *format, ...);

/* The entries of a dp_reshardable optimizer. */
loom_status loom__state_list_add_buckets(loom__state_list *list);

#endif
