/* A generation: prompts, the decoder that reads them, and the choice of each next token. What was chosen last is what
 * the decoder reads next; at first that is the prompt. The invariant: every member of the tensor group sees the same
 * logits and so chooses the same tokens, without telling each other. */
#include "base/random.h"
#include "generate/sample.h"
#include "model/decoder.h"
#include "strategy/strategy.h"
#include <stdlib.h>

struct loom_generation {
    loom_generate_options options;
    int64_t rows, vocabulary;
    int64_t length;  /* of the prompts */
    int64_t made;    /* tokens of each row so far */
    int64_t running; /* rows that have not ended */
    loom__decoder *decoder;
    int64_t *unread, unread_length; /* [rows, unread_length]: what the decoder reads next */
    int64_t *tokens;                /* [rows]: what the caller sees */
    bool *ended;                    /* [rows] */
    float *logits;                  /* [rows, vocabulary] */
    loom__candidate *candidates;    /* [vocabulary]; NULL when greedy */
};

loom_generate_options loom_generate_options_default(void) {
    return (loom_generate_options){.max_tokens = 64, .top_p = 1, .seed = 1234, .stop_token = -1};
}

/* ---- what was asked for ---- */

static loom_status check_options(const loom_generate_options *options, int64_t vocabulary) {
    if (options->max_tokens < 1)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "max_tokens: found %lld, expected 1 or more", (long long)options->max_tokens);
    if (!(options->temperature >= 0 && options->temperature <= 1e6))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "temperature: found %g, expected 0 (greedy) to 1000000", options->temperature);
    if (options->top_k < 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "top_k: found %lld, expected 1 or more, or 0 for all", (long long)options->top_k);
    if (!(options->top_p > 0 && options->top_p <= 1))
        return loom_fail(LOOM_ERR_ARGUMENT, "top_p: found %g, expected more than 0 and at most 1", options->top_p);
    if (options->stop_token >= vocabulary)
        return loom_fail(LOOM_ERR_ARGUMENT, "stop_token: found %lld, expected 0 to %lld, or a negative number for none",
            (long long)options->stop_token, (long long)(vocabulary - 1));
    return LOOM_OK;
}

static loom_status check_prompts(const loom_prompt *prompts, int64_t rows, int64_t vocabulary) {
    if (rows < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "prompts: found %lld, expected 1 or more", (long long)rows);
    for (int64_t j = 0; j < rows; j++) {
        if (prompts[j].length < 1)
            return loom_fail(LOOM_ERR_ARGUMENT, "prompt %lld is empty, expected 1 token or more", (long long)j);
        if (prompts[j].length != prompts[0].length)
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: prompts of different lengths side by side (prompt 0 has %lld tokens, prompt %lld "
                "has %lld)",
                (long long)prompts[0].length, (long long)j, (long long)prompts[j].length);
        for (int64_t t = 0; t < prompts[j].length; t++)
            if (prompts[j].tokens[t] < 0 || prompts[j].tokens[t] >= vocabulary)
                return loom_fail(LOOM_ERR_ARGUMENT, "token %lld of prompt %lld is %lld, expected 0 to %lld",
                    (long long)t, (long long)j, (long long)prompts[j].tokens[t], (long long)(vocabulary - 1));
    }
    return LOOM_OK;
}

loom_status loom_generate_check(
    const loom_model_config *config, const loom_prompt *prompts, int64_t rows, const loom_generate_options *options) {
    int64_t positions = loom__decoder_positions(config);
    loom_generate_options chosen = options ? *options : loom_generate_options_default();
    LOOM_TRY(check_options(&chosen, config->vocab_size));
    LOOM_TRY(check_prompts(prompts, rows, config->vocab_size));
    if (prompts[0].length > positions || chosen.max_tokens > positions - prompts[0].length)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a prompt of %lld tokens and max_tokens %lld do not fit in the %lld positions of the model%s",
            (long long)prompts[0].length, (long long)chosen.max_tokens, (long long)positions,
            prompts[0].length < positions ? "; a smaller max_tokens does" : "");
    return LOOM_OK;
}

static loom_status check_asked(
    const loom_parallel *parallel, const loom_prompt *prompts, int64_t rows, const loom_generate_options *options) {
    if (!parallel->is_gpt)
        return loom_fail(
            LOOM_ERR_UNSUPPORTED, "not supported yet: generation with a module that was not made by loom_gpt_create");
    LOOM_TRY(loom__decoder_check(parallel->module));
    return loom_generate_check(loom_parallel_model_config(parallel), prompts, rows, options);
}

static uint64_t hash_asked(const loom_prompt *prompts, int64_t rows, const loom_generate_options *options) {
    const int64_t integers[] = {
        rows, prompts[0].length, options->max_tokens, options->top_k, (int64_t)options->seed, options->stop_token};
    const double reals[] = {options->temperature, options->top_p};
    uint64_t hash = loom__hash_bytes(LOOM__HASH_BEGIN, integers, sizeof integers);
    hash = loom__hash_bytes(hash, reals, sizeof reals);
    for (int64_t j = 0; j < rows; j++)
        hash = loom__hash_bytes(hash, prompts[j].tokens, (size_t)prompts[j].length * sizeof(int64_t));
    return hash;
}

/* Ranks that read different prompts would mix them into one another's activations without a word. */
static loom_status check_same(
    loom_comm *tp, const loom_prompt *prompts, int64_t rows, const loom_generate_options *options) {
    int64_t mine = (int64_t)hash_asked(prompts, rows, options), first = mine;
    LOOM_TRY(loom_broadcast(tp, &first, 1, LOOM_I64, 0));
    return loom_agree(tp, first == mine
                              ? LOOM_OK
                              : loom_fail(LOOM_ERR_ARGUMENT, "rank %d was given other prompts or options than rank %d",
                                    loom_comm_world_rank(tp, loom_comm_rank(tp)), loom_comm_world_rank(tp, 0)));
}

/* ---- the generation ---- */

static loom_status make(const loom_parallel *parallel, const loom_prompt *prompts, loom_generation *generation) {
    int64_t rows = generation->rows, v = generation->vocabulary, length = generation->length, logits;
    if (__builtin_mul_overflow(rows, v, &logits) || logits > INT64_MAX / 8)
        return loom_fail(LOOM_ERR_ARGUMENT, "%lld prompts are too many", (long long)rows);
    generation->unread = calloc((size_t)rows, (size_t)length * sizeof(int64_t));
    generation->tokens = calloc((size_t)rows, sizeof(int64_t));
    generation->ended = calloc((size_t)rows, sizeof(bool));
    generation->logits = malloc((size_t)logits * sizeof(float));
    bool draws = generation->options.temperature > 0;
    if (draws)
        generation->candidates = calloc((size_t)v, sizeof(loom__candidate));
    if (!generation->unread || !generation->tokens || !generation->ended || !generation->logits ||
        (draws && !generation->candidates))
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a generation of %lld rows", (long long)rows);
    for (int64_t j = 0; j < rows; j++)
        memcpy(generation->unread + j * length, prompts[j].tokens, (size_t)length * sizeof(int64_t));
    /* The last token is never read. */
    return loom__decoder_create(
        parallel->module, rows, length + generation->options.max_tokens - 1, &generation->decoder);
}

loom_status loom_generation_create(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_generation **out) {
    loom_comm *tp = parallel->fabric->groups[LOOM_GROUP_TP];
    loom_generate_options chosen = options ? *options : loom_generate_options_default();
    if (loom_comm_size(parallel->fabric->groups[LOOM_GROUP_CP]) > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: generating with context_parallel_size %d; only 1 works",
            loom_comm_size(parallel->fabric->groups[LOOM_GROUP_CP]));
    /* Ranks that share experts must take the same steps, which only those of one tensor group do. */
    if (loom_comm_size(parallel->fabric->groups[LOOM_GROUP_ETP_EP]) > loom_comm_size(tp))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: generating with expert_model_parallel_size %d, whose ranks are not all tensor ranks of "
            "one another; 1 works",
            loom_comm_size(parallel->fabric->groups[LOOM_GROUP_EP]));
    LOOM_TRY(loom_agree(tp, check_asked(parallel, prompts, rows, &chosen)));
    LOOM_TRY(check_same(tp, prompts, rows, &chosen));
    loom_generation *generation = calloc(1, sizeof *generation);
    loom_status status = LOOM_OK;
    if (generation) {
        *generation = (loom_generation){.options = chosen,
            .rows = rows,
            .vocabulary = loom_parallel_model_config(parallel)->vocab_size,
            .length = prompts[0].length,
            .running = rows,
            .unread_length = prompts[0].length};
        status = make(parallel, prompts, generation);
    } else {
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a generation");
    }
    status = loom_agree(tp, status);
    if (status) {
        loom_generation_destroy(generation);
        return status;
    }
    *out = generation;
    return LOOM_OK;
}

loom_status loom_generation_next(loom_generation *generation, const int64_t **tokens) {
    const loom_generate_options *options = &generation->options;
    int64_t v = generation->vocabulary;
    if (generation->running == 0 || generation->made == options->max_tokens)
        return LOOM_END;
    LOOM_TRY(
        loom__decoder_read(generation->decoder, generation->unread, generation->unread_length, generation->logits));
    generation->unread_length = 1;
    for (int64_t j = 0; j < generation->rows; j++) {
        int64_t token;
        /* A row that has ended goes on in the decoder, unseen, beside the others. */
        LOOM_TRY(loom__sample_token(options, generation->logits + j * v, v, j, generation->length + generation->made,
            generation->candidates, &token));
        generation->unread[j] = token;
        generation->tokens[j] = generation->ended[j] ? -1 : token;
        if (!generation->ended[j] && token == options->stop_token) {
            generation->ended[j] = true;
            generation->running--;
        }
    }
    generation->made++;
    *tokens = generation->tokens;
    return LOOM_OK;
}

void loom_generation_destroy(loom_generation *generation) {
    if (!generation)
        return;
    loom__decoder_destroy(generation->decoder);
    free(generation->unread);
    free(generation->tokens);
    free(generation->ended);
    free(generation->logits);
    free(generation->candidates);
    free(generation);
}

loom_status loom_generate(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_token_function receive, void *context) {
    loom_generation *generation;
    const int64_t *tokens = NULL;
    LOOM_TRY(loom_generation_create(parallel, prompts, rows, options, &generation));
    loom_status status;
    while (!(status = loom_generation_next(generation, &tokens)) && !(status = receive(context, rows, tokens)))
        continue;
    loom_generation_destroy(generation);
    return status == LOOM_END ? LOOM_OK : status;
}
