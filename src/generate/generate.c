/* A generation: prompts, the decoder that reads them, and the choice of each next token. What was chosen last is what
 * the decoder reads next; at first that is the prompt. Ranks that need each other's experts take every step together,
 * whatever each of them has to write: who has nothing more reads nothing, until nobody has. The invariants: every
 * member of the tensor group sees the same logits and so chooses the same tokens, without telling each other; and of
 * ranks that go in step none leaves before all do. */
#include "base/random.h"
#include "generate/sample.h"
#include "model/decoder.h"
#include "strategy/strategy.h"
#include <stdlib.h>

struct loom_generation {
    loom_generate_options options;
    loom_comm *together; /* ranks that go in step; NULL: the tensor group alone, whose members are alike */
    int64_t rows, vocabulary;
    int64_t made;    /* tokens of each row so far */
    int64_t running; /* rows that have not ended */
    bool finished;   /* no rank of those that go in step has a row that runs */
    loom__decoder *decoder;
    int64_t *lengths;            /* [rows] of the prompts */
    int64_t *unread, *counts;    /* what the decoder reads next: counts[j] tokens of row j, row behind row */
    int64_t *tokens;             /* [rows]: what the caller sees */
    bool *ended;                 /* [rows] */
    float *logits;               /* [rows that are read, vocabulary] */
    loom__candidate *candidates; /* [vocabulary]; NULL when greedy */
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
    if (rows < 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "prompts: found %lld, expected 0 or more", (long long)rows);
    for (int64_t j = 0; j < rows; j++) {
        if (prompts[j].length < 1)
            return loom_fail(LOOM_ERR_ARGUMENT, "prompt %lld is empty, expected 1 token or more", (long long)j);
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
    int64_t longest = 0;
    for (int64_t j = 0; j < rows; j++)
        longest = prompts[j].length > longest ? prompts[j].length : longest;
    if (rows > 0 && (longest > positions || chosen.max_tokens > positions - longest))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a prompt of %lld tokens and max_tokens %lld do not fit in the %lld positions of the model%s",
            (long long)longest, (long long)chosen.max_tokens, (long long)positions,
            longest < positions ? "; a smaller max_tokens does" : "");
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
    const int64_t integers[] = {rows, options->max_tokens, options->top_k, (int64_t)options->seed, options->stop_token};
    const double reals[] = {options->temperature, options->top_p};
    uint64_t hash = loom__hash_bytes(LOOM__HASH_BEGIN, integers, sizeof integers);
    hash = loom__hash_bytes(hash, reals, sizeof reals);
    for (int64_t j = 0; j < rows; j++) {
        hash = loom__hash_bytes(hash, &prompts[j].length, sizeof prompts[j].length);
        hash = loom__hash_bytes(hash, prompts[j].tokens, (size_t)prompts[j].length * sizeof(int64_t));
    }
    return hash;
}

/* Ranks that read different prompts would mix them into one another's activations without a word. */
static loom_status check_same(
    loom_comm *tp, const loom_prompt *prompts, int64_t rows, const loom_generate_options *options) {
    int64_t mine = (int64_t)hash_asked(prompts, rows, options), first = mine;
    LOOM_TRY(loom_broadcast(tp, &first, 1, LOOM_I64, 0));
    return first == mine ? LOOM_OK
                         : loom_fail(LOOM_ERR_ARGUMENT, "rank %d was given other prompts or options than rank %d",
                               loom_comm_world_rank(tp, loom_comm_rank(tp)), loom_comm_world_rank(tp, 0));
}

/* ---- who goes in step ---- */

/* Whether every group of kind `inner` lies in one group of kind `outer`. */
static bool lie_within(const loom_layout *layout, loom_group_kind inner, loom_group_kind outer) {
    for (int64_t rank = 0; rank < loom_layout_world_size(layout); rank++) {
        int64_t group, place, here, first;
        if (!loom_layout_group_of(layout, inner, rank, &group, &place) ||
            !loom_layout_group_of(layout, outer, rank, &here, &place) ||
            !loom_layout_group_of(layout, outer, loom_layout_group_member(layout, inner, group, 0), &first, &place) ||
            here != first)
            return false;
    }
    return true;
}

/* Members of a tensor group read the same, and members of an expert group need each other. Where neither kind of groups
 * contains the other, chains of both may reach every rank. NULL: the tensor group. */
static loom_comm *find_together(const loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    const loom_model_config *config = parallel->is_gpt ? loom_parallel_model_config(parallel) : NULL;
    if (!config || config->moe.num_moe_experts == 0 || lie_within(&fabric->layout, LOOM_GROUP_ETP_EP, LOOM_GROUP_TP))
        return NULL;
    bool contains = lie_within(&fabric->layout, LOOM_GROUP_TP, LOOM_GROUP_ETP_EP);
    return fabric->groups[contains ? LOOM_GROUP_ETP_EP : LOOM_GROUP_TP_DP_CP];
}

/* The end of a step of this rank that ended with `mine`: all fail together, or all learn whether any goes on. */
static loom_status end_step(loom_generation *generation, loom_status mine) {
    enum { RUNS = 1, FAILED = 2 };
    int64_t most = mine ? FAILED : generation->running > 0 ? RUNS : 0;
    if (!generation->together) {
        generation->finished = generation->running == 0;
        return mine;
    }
    LOOM_TRY(loom_all_reduce(generation->together, &most, &most, 1, LOOM_I64, LOOM_MAX));
    generation->finished = most == 0;
    return most == FAILED ? loom_agree(generation->together, mine) : LOOM_OK;
}

/* ---- the generation ---- */

static loom_status allocate(loom_generation *generation, const loom_prompt *prompts) {
    const int64_t rows = generation->rows, v = generation->vocabulary;
    int64_t logits, all = 0;
    if (__builtin_mul_overflow(rows, v, &logits) || logits > INT64_MAX / 8)
        return loom_fail(LOOM_ERR_ARGUMENT, "%lld prompts are too many", (long long)rows);
    for (int64_t j = 0; j < rows; j++)
        if (__builtin_add_overflow(all, prompts[j].length, &all) || all > INT64_MAX / 8)
            return loom_fail(LOOM_ERR_ARGUMENT, "the tokens of %lld prompts are too many", (long long)rows);
    const size_t count = (size_t)rows + 1;
    generation->lengths = calloc(count, sizeof(int64_t));
    generation->unread = calloc((size_t)all + 1, sizeof(int64_t));
    generation->counts = calloc(count, sizeof(int64_t));
    generation->tokens = calloc(count, sizeof(int64_t));
    generation->ended = calloc(count, sizeof(bool));
    generation->logits = malloc(((size_t)logits + 1) * sizeof(float));
    bool draws = generation->options.temperature > 0;
    if (draws)
        generation->candidates = calloc((size_t)v, sizeof(loom__candidate));
    if (generation->lengths && generation->unread && generation->counts && generation->tokens && generation->ended &&
        generation->logits && (generation->candidates || !draws))
        return LOOM_OK;
    return loom_fail(LOOM_ERR_MEMORY, "out of memory for a generation of %lld rows", (long long)rows);
}

static loom_status make(const loom_parallel *parallel, const loom_prompt *prompts, loom_generation *generation) {
    LOOM_TRY(allocate(generation, prompts));
    int64_t *to = generation->unread;
    for (int64_t j = 0; j < generation->rows; j++) {
        const int64_t length = prompts[j].length;
        memcpy(to, prompts[j].tokens, (size_t)length * sizeof *to);
        to += length;
        generation->lengths[j] = generation->counts[j] = length;
        /* What the decoder needs room for: the last token is never read. */
        generation->tokens[j] = length + generation->options.max_tokens - 1;
    }
    return loom__decoder_create(parallel->module, generation->rows, generation->tokens, &generation->decoder);
}

loom_status loom_generation_create(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_generation **out) {
    loom_comm *tp = parallel->fabric->groups[LOOM_GROUP_TP], *together = find_together(parallel);
    loom_comm *all = together ? together : tp;
    loom_generate_options chosen = options ? *options : loom_generate_options_default();
    if (loom_comm_size(parallel->fabric->groups[LOOM_GROUP_CP]) > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: generating with context_parallel_size %d, whose ranks would each have a part of the "
            "cache; generate with context_parallel_size 1: a checkpoint loads at any layout",
            loom_comm_size(parallel->fabric->groups[LOOM_GROUP_CP]));
    LOOM_TRY(loom_agree(all, check_asked(parallel, prompts, rows, &chosen)));
    LOOM_TRY(loom_agree(all, check_same(tp, prompts, rows, &chosen)));
    loom_generation *generation = calloc(1, sizeof *generation);
    loom_status status = LOOM_OK;
    if (generation) {
        *generation = (loom_generation){.options = chosen,
            .together = together,
            .rows = rows,
            .vocabulary = loom_parallel_model_config(parallel)->vocab_size,
            .running = rows};
        status = make(parallel, prompts, generation);
    } else {
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a generation");
    }
    status = loom_agree(all, status);
    if (!status)
        status = end_step(generation, LOOM_OK);
    if (status) {
        loom_generation_destroy(generation);
        return status;
    }
    *out = generation;
    return LOOM_OK;
}

/* The next token of every row that was read, and what the decoder reads next. */
static loom_status choose(loom_generation *generation) {
    const loom_generate_options *options = &generation->options;
    const int64_t v = generation->vocabulary;
    int64_t read = 0, unread = 0;
    for (int64_t j = 0; j < generation->rows; j++) {
        generation->tokens[j] = -1;
        if (generation->ended[j])
            continue;
        int64_t token;
        LOOM_TRY(loom__sample_token(options, generation->logits + read++ * v, v, j,
            generation->lengths[j] + generation->made, generation->candidates, &token));
        generation->tokens[j] = token;
        generation->ended[j] = token == options->stop_token || generation->made + 1 == options->max_tokens;
        generation->counts[j] = generation->ended[j] ? 0 : 1;
        generation->running -= generation->ended[j];
        if (!generation->ended[j])
            generation->unread[unread++] = token;
    }
    generation->made++;
    return LOOM_OK;
}

loom_status loom_generation_next(loom_generation *generation, const int64_t **tokens) {
    while (!generation->finished) {
        bool writes = generation->running > 0;
        LOOM_TRY(loom__decoder_read(generation->decoder, generation->unread, generation->counts, generation->logits));
        LOOM_TRY(end_step(generation, writes ? choose(generation) : LOOM_OK));
        if (writes) {
            *tokens = generation->tokens;
            return LOOM_OK;
        }
    }
    return LOOM_END;
}

void loom_generation_stop(loom_generation *generation) {
    for (int64_t j = 0; j < generation->rows; j++) {
        generation->ended[j] = true;
        generation->counts[j] = 0;
    }
    generation->running = 0;
    generation->finished = generation->finished || !generation->together;
}

void loom_generation_destroy(loom_generation *generation) {
    if (!generation)
        return;
    loom__decoder_destroy(generation->decoder);
    free(generation->lengths);
    free(generation->unread);
    free(generation->counts);
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
    while (!(status = loom_generation_next(generation, &tokens))) {
        status = receive(context, rows, tokens);
        if (status && status != LOOM_END)
            break;
        if (status == LOOM_END)
            loom_generation_stop(generation);
    }
    loom_generation_destroy(generation);
    return status == LOOM_END ? LOOM_OK : status;
}
