/* Who of those that hold the same chunk writes it. */
#ifndef STRATEGY_SAVE_PLAN_H
#define STRATEGY_SAVE_PLAN_H

#include <megaloom/checkpoint_io.h>

/* A rank's part of the answer, kept for a save of the same chunks; zeroed at first. */
typedef struct loom__save_plan {
    uint64_t structure; /* a hash of this rank's chunks */
    int64_t count;
    bool *mine; /* [count] */
} loom__save_plan;
void loom__save_plan_free(loom__save_plan *plan);

/* Without `group` the main holders write. With it its members share: the chunks that one member alone holds are its,
 * the others go, largest first, to the holder that has the fewest bytes so far. A chunk whose main holder is not in the
 * group is written by none of it. With `keep` a plan that fits the chunks of every member is taken as it is.
 * Collective over the group; the answer depends on what the members hold alone, not on when they come. */
loom_status loom__save_plan_make(
    loom_comm *group, const loom_checkpoint_content *content, bool keep, loom__save_plan *plan);

#endif
