/* The text of pipeline_model_parallel_layout: E embedding, t layer, m multi-token-prediction layer, L loss, | end of a
 * stage, x*n and (…)*n repeats, commas ignored. */
#ifndef LAYOUT_STAGES_TEXT_H
#define LAYOUT_STAGES_TEXT_H

#include "base/faults.h"
#include <megaloom/stages.h>

/* Stages and layers that a text may stand for, each; and its parts, after which repeats are counted as one. */
enum { LOOM__STAGES_MAX = 1 << 20, LOOM__STAGES_PARTS_MAX = 4096, LOOM__STAGES_DEPTH_MAX = 32 };

/* What a text stands for, counted without expanding it: hostile repeats cost nothing. */
typedef struct loom__stages_count {
    int64_t stages, layers;
    int64_t prediction; /* m */
} loom__stages_count;

/* Reads the text; false, with its faults added, where it is no layout: grammar, repeats, E not once and first, L not
 * once and last. At most LOOM__STAGES_MAX stages and layers are accepted. */
bool loom__stages_text_count(const char *text, loom__stages_count *count, loom__faults *faults);
/* Layers of each stage of a text that was accepted; `stages` has room for count.stages. Sets `layers` alone. */
void loom__stages_text_expand(const char *text, loom_stage *stages);

#endif
