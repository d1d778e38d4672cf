/* The indices of a GPT dataset, apart from the tokens, so that they can be checked and (later) kept on disk. */
#ifndef DATA_GPT_H
#define DATA_GPT_H

#include <megaloom/data.h>

/* A sample begins at token `offset` of document_index[place]. */
typedef struct loom__gpt_cut {
    int64_t place, offset;
} loom__gpt_cut;

typedef struct loom__gpt_indices {
    int64_t first, end; /* the split's sequences [first, end) */
    int64_t epochs;
    int64_t documents;       /* entries of document_index: epochs * (end - first) */
    int64_t *document_index; /* sequence numbers in reading order */
    int64_t samples;
    loom__gpt_cut *sample_index; /* [samples + 1] */
    int64_t *shuffle_index;      /* [samples] sample asked -> sample in reading order */
} loom__gpt_indices;

/* length(context, sequence) gives tokens. config is that of loom_gpt_dataset_create. */
loom_status loom__gpt_indices_build(const loom_gpt_dataset_config *config, int64_t first, int64_t end,
    int64_t (*length)(const void *context, int64_t sequence), const void *context, loom__gpt_indices *indices);
void loom__gpt_indices_free(loom__gpt_indices *indices);

/* Of a dataset made by loom_gpt_dataset_create. */
const loom__gpt_indices *loom__gpt_dataset_indices(const loom_dataset *dataset);

#endif
