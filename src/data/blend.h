/* What a blend is made of, for tests. */
#ifndef DATA_BLEND_H
#define DATA_BLEND_H

#include <megaloom/data.h>

typedef struct loom__blend {
    loom_dataset *parts;
    int64_t count;
    int16_t *dataset; /* [length of the blend] */
    int64_t *sample;
} loom__blend;

/* Of a dataset made by loom_blended_dataset_create; NULL where it is another. */
const loom__blend *loom__blend_of(const loom_dataset *dataset);
/* Of a dataset made by loom_gpt_blend_create: the blend, or the one GPT dataset, without the files; else the dataset.
 */
const loom_dataset *loom__gpt_blend_inner(const loom_dataset *dataset);

#endif
