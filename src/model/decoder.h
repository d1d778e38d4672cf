/* A model that reads rows of tokens piece by piece and tells, after each piece, the logits of what comes next. */
#ifndef MODEL_DECODER_H
#define MODEL_DECODER_H

#include <megaloom/module.h>

typedef struct loom__decoder loom__decoder;

/* Whether the module (of loom__gpt_create, materialized) can be decoded with: on one stage, in one chunk. Errors:
 * LOOM_ERR_UNSUPPORTED says what to do instead. */
loom_status loom__decoder_check(const loom_module *module);

/* For `rows` >= 0 rows, of at most capacity[j] positions together with what it will be given. The module (borrowed)
 * must be of loom__gpt_create and materialized. Not collective. */
loom_status loom__decoder_create(
    const loom_module *module, int64_t rows, const int64_t *capacity, loom__decoder **decoder);
void loom__decoder_destroy(loom__decoder *decoder); /* NULL is accepted */

/* Reads the next counts[j] >= 0 tokens of each row j: tokens [sum of counts], row behind row, legal ids. Gives the
 * logits [rows with tokens, v] behind them (without padding), the same on every rank of the tensor group. With no
 * tokens at all it lends this rank's experts to the others. After an error the decoder must not be used again.
 * Collective over the tensor group and, of a model with experts, over the expert group (etp_ep), whose ranks may read
 * other numbers of tokens. */
loom_status loom__decoder_read(loom__decoder *decoder, int64_t *tokens, const int64_t *counts, float *logits);

/* Positions that a model has (its completed configuration): INT32_MAX where it has no limit of its own. */
int64_t loom__decoder_positions(const loom_model_config *config);

#endif
