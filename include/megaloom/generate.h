/* Generation: tokens that follow a prompt, one position a step, with a cache of keys and values.
 *
 *     loom_generation_create → loop { loom_generation_next } → loom_generation_destroy
 *
 * Any layout of tensor and expert ranks gives the same tokens on all its ranks. Greedy choice takes the largest logit,
 * the smaller id of two that are equal. Otherwise a token is drawn with the probability softmax(logits / temperature),
 * cut to the top_k most likely tokens and then to the fewest of them whose probabilities reach top_p of their sum. The
 * draw adds to each token's logit / temperature a Gumbel number that is a function of (seed, row, position, token) and
 * takes the largest sum, all in double. So another layout, whose logits differ by the rounding of its sums (about 1e-6
 * of their size), gives another token only where the two best sums, or a token on the edge of a cut, are nearer to each
 * other than that: for each token about once in a hundred thousand. Rounding the logits would not make it rarer, only
 * move the places; from the first such token on the texts differ. The same layout draws the same tokens again. */
#ifndef MEGALOOM_GENERATE_H
#define MEGALOOM_GENERATE_H

#include <megaloom/strategy.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_generation loom_generation;

typedef struct loom_generate_options {
    int64_t max_tokens; /* new tokens of a row, >= 1; default 64 */
    double temperature; /* >= 0; 0 = greedy, whatever the next three say; default 0 */
    int64_t top_k;      /* >= 0; 0, or more than the vocabulary, cuts nothing; default 0 */
    double top_p;       /* in (0, 1]; 1 cuts nothing; default 1 */
    uint64_t seed;      /* default 1234 */
    int64_t stop_token; /* a row ends with it; negative = none; default -1 */
} loom_generate_options;
LOOM_API loom_generate_options loom_generate_options_default(void);

typedef struct loom_prompt {
    const int64_t *tokens; /* [length] */
    int64_t length;        /* >= 1 */
} loom_prompt;

/* Whether loom_generation_create would refuse these prompts and options (NULL = the defaults) for a model of that
 * configuration: LOOM_ERR_ARGUMENT or LOOM_ERR_UNSUPPORTED says what. To be asked before weights are loaded; config is
 * one that loom_run_config_load or loom_hf_read_config read. Not collective. */
LOOM_API loom_status loom_generate_check(
    const loom_model_config *config, const loom_prompt *prompts, int64_t rows, const loom_generate_options *options);

/* Checks the prompts and makes room for them and max_tokens more. `rows` prompts (of any lengths; none where other
 * ranks alone have some) are continued side by side, each as if it were alone, but that its number among them is part
 * of the key of a draw, so that equal prompts give different texts. prompts is copied; options NULL = the defaults. The
 * parallel is borrowed until the generation is destroyed, and its parameters must not change meanwhile; it must be of
 * loom_gpt_create, on one pipeline stage and one context rank (others are refused, not supported yet), and may be one
 * that is being trained. Collective over the tensor group, whose members must ask for the same (checked); replicas of
 * other data-parallel ranks may ask for something else.
 *
 * Ranks that share the experts of a model need each other. Where they are not all of one tensor group, what is said
 * here to be collective is so over the ranks that go in step: the expert group (etp_ep) where each tensor group lies in
 * one, else all ranks. Each data-parallel rank may have other prompts and options; it calls loom_generation_next until
 * LOOM_END, and who has less to write reads nothing then and lends its experts, until all have ended. */
LOOM_API loom_status loom_generation_create(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_generation **generation);
/* One more token of each row, [rows], valid until the next call; -1 for a row that has ended. LOOM_END when all rows
 * have ended or have max_tokens, of all ranks that go in step. The first call reads the prompts. LOOM_ERR_NUMERIC when
 * a logit is not finite; ranks that go in step fail together (LOOM_ERR_ABORTED on the others). After another error than
 * LOOM_END the generation can only be destroyed. Collective over the tensor group or the ranks that go in step. */
LOOM_API loom_status loom_generation_next(loom_generation *generation, const int64_t **tokens);
/* All rows of this rank end here: loom_generation_next gives LOOM_END, when the others that go in step have ended too.
 * For all members of a tensor group alike; not collective. */
LOOM_API void loom_generation_stop(loom_generation *generation);
/* Not collective. NULL is accepted. */
LOOM_API void loom_generation_destroy(loom_generation *generation);

/* Receives the tokens [rows] of a step, on every rank that has rows. LOOM_END from all members of a tensor group ends
 * their rows (loom_generation_stop) without an error. */
typedef loom_status (*loom_token_function)(void *context, int64_t rows, const int64_t *tokens);
/* All of it: create, next up to the end, destroy. Collective as those are. */
LOOM_API loom_status loom_generate(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_token_function receive, void *context);

#ifdef __cplusplus
}
#endif
#endif
