/* Generation on several ranks: the same text under every tensor-parallel layout, rows of any lengths that end, and what
 * is refused. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <stdlib.h>

enum { POSITIONS = 48, ROWS = 3, MADE = 40, SEEDS = 4 };

/* Behind KINDS: what experts a token goes to is drawn by its row, so that a row is another one alone. */
typedef enum model_kind { GPT2, LLAMA_GROUPS, LLAMA_WINDOW, EXPERTS, KINDS, DRAWN_EXPERTS } model_kind;

static bool has_experts(model_kind kind) {
    return kind == EXPERTS || kind == DRAWN_EXPERTS;
}

/* Initial weights so large that the logits are far from equal, and tokens hang on those before them. */
static loom_model_config config_of(model_kind kind) {
    loom_model_config config = kind == GPT2 ? small_config() : loom_model_config_default("llama");
    if (kind != GPT2) {
        config.num_layers = 2;
        config.hidden_size = 16;
        config.ffn_hidden_size = 24;
        config.num_attention_heads = 4;
        config.num_query_groups = 2;
        config.vocab_size = SMALL_VOCABULARY;
        config.make_vocab_size_divisible_by = 4;
        config.window_size = kind == LLAMA_WINDOW ? 5 : 0;
        config.moe.num_moe_experts = has_experts(kind) ? 4 : 0;
        config.moe.moe_router_force_load_balancing = kind == DRAWN_EXPERTS;
        config.add_bias_linear = kind == EXPERTS;
    }
    config.seq_length = POSITIONS;
    config.max_position_embeddings = POSITIONS;
    config.init_method_std = 0.5;
    return config;
}

static loom_status start(loom_rank *rank, model_kind kind, small_run *run) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_model_config config = config_of(kind);
    loom_module *module;
    int world = loom_rank_count(rank);
    *run = (small_run){0};
    strategy.tensor_model_parallel_size = world;
    strategy.sequence_parallel = world == 2 || (world > 1 && has_experts(kind));
    config.replicate_query_groups = world > config.num_query_groups;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, &config, &module));
    return loom_fabric_setup_module_for_inference(run->fabric, module, &run->parallel);
}

typedef loom_status (*body_function)(loom_rank *rank, const small_run *run, void *argument);

/* A body on a model of one kind. */
typedef struct work {
    model_kind kind;
    body_function body;
    void *argument;
} work;

static loom_status do_work(loom_rank *rank, void *argument) {
    const work *w = argument;
    small_run run;
    loom_status status = start(rank, w->kind, &run);
    if (!status)
        status = w->body(rank, &run, w->argument);
    small_destroy(&run);
    return status;
}

static void on_ranks(int ranks, model_kind kind, body_function body, void *argument) {
    must_run(ranks, do_work, &(work){kind, body, argument});
}

typedef struct text {
    int64_t steps, tokens[MADE][ROWS];
} text;

static loom_status keep(void *context, int64_t rows, const int64_t *tokens) {
    text *to = context;
    CHECK(to->steps < MADE, "more than %d tokens", MADE);
    for (int64_t j = 0; j < rows; j++)
        to->tokens[to->steps][j] = tokens[j];
    to->steps++;
    return LOOM_OK;
}

static const int64_t prompt_tokens[ROWS][4] = {{3, 1, 4, 1}, {3, 1, 4, 1}, {18, 0, 7, 2}};

static void prompts_of(int64_t length, loom_prompt prompts[ROWS]) {
    for (int j = 0; j < ROWS; j++)
        prompts[j] = (loom_prompt){prompt_tokens[j], length};
}

/* The longest in the middle: neither the first nor the last row is as long as the batch. */
static void uneven_prompts(loom_prompt prompts[ROWS]) {
    static const int64_t lengths[ROWS] = {2, 4, 1};
    for (int j = 0; j < ROWS; j++)
        prompts[j] = (loom_prompt){prompt_tokens[j], lengths[j]};
}

/* ---- the same text ---- */

/* What a rank wrote: for each seed and, last, greedily; behind prompts of 1 and of 4 tokens. */
typedef struct texts {
    text of[SEEDS + 1][2];
} texts;

static loom_generate_options options_of(int seed) {
    loom_generate_options options = loom_generate_options_default();
    options.max_tokens = MADE;
    options.seed = (uint64_t)seed;
    options.temperature = seed < SEEDS ? 0.8 + 0.4 * seed : 0;
    options.top_k = seed == 1 ? 7 : 0;
    options.top_p = seed >= 2 ? 0.9 : 1;
    return options;
}

static loom_status write_texts(loom_rank *rank, const small_run *run, void *argument) {
    texts *mine = (texts *)argument + loom_rank_index(rank);
    for (int seed = 0; seed <= SEEDS; seed++)
        for (int i = 0; i < 2; i++) {
            loom_prompt prompts[ROWS];
            loom_generate_options options = options_of(seed);
            prompts_of(i ? 4 : 1, prompts);
            LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, keep, &mine->of[seed][i]));
            CHECK(mine->of[seed][i].steps == MADE, "found %lld tokens, wanted %d", (long long)mine->of[seed][i].steps,
                MADE);
        }
    return LOOM_OK;
}

static texts *allocate_texts(int ranks) {
    texts *made = calloc((size_t)ranks, sizeof *made);
    assert_non_null(made);
    return made;
}

static void every_layout_and_every_rank_writes_the_same_text(void **state) {
    (void)state;
    for (model_kind kind = 0; kind < KINDS; kind++) {
        texts *wanted = allocate_texts(1);
        on_ranks(1, kind, write_texts, wanted);
        for (int ranks = 2; ranks <= 4; ranks += 2) {
            texts *found = allocate_texts(ranks);
            on_ranks(ranks, kind, write_texts, found);
            for (int r = 0; r < ranks; r++)
                assert_memory_equal(&found[r], wanted, sizeof *wanted);
            free(found);
        }
        free(wanted);
    }
}

static bool equal_rows(const text *a, int row, const text *b, int other) {
    for (int64_t i = 0; i < MADE; i++)
        if (a->tokens[i][row] != b->tokens[i][other])
            return false;
    return true;
}

/* A test of equality would not see a generator that writes the same whatever it is given. */
static void other_seeds_rows_and_prompts_write_other_texts(void **state) {
    (void)state;
    texts *found = allocate_texts(1);
    on_ranks(1, GPT2, write_texts, found);
    for (int seed = 0; seed < SEEDS; seed++) {
        assert_false(equal_rows(&found->of[seed][1], 0, &found->of[seed][1], 1));
        assert_false(equal_rows(&found->of[seed][0], 0, &found->of[seed][1], 0));
        assert_false(equal_rows(&found->of[seed][1], 0, &found->of[(seed + 1) % SEEDS][1], 0));
    }
    assert_true(equal_rows(&found->of[SEEDS][1], 0, &found->of[SEEDS][1], 1));
    assert_false(equal_rows(&found->of[SEEDS][1], 0, &found->of[SEEDS][1], 2));
    free(found);
}

static loom_status equal_alone(const small_run *run, const loom_prompt prompts[ROWS]) {
    loom_generate_options options = options_of(SEEDS);
    text together = {0};
    LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, keep, &together));
    for (int j = 0; j < ROWS; j++) {
        text alone = {0};
        LOOM_TRY(loom_generate(run->parallel, &prompts[j], 1, &options, keep, &alone));
        CHECK(equal_rows(&alone, 0, &together, j), "row %d is another alone", j);
    }
    return LOOM_OK;
}

static loom_status rows_alone(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    loom_prompt prompts[ROWS];
    prompts_of(4, prompts);
    LOOM_TRY(equal_alone(run, prompts));
    uneven_prompts(prompts);
    return equal_alone(run, prompts);
}

static void a_row_is_the_same_alone_and_beside_others_of_any_length(void **state) {
    (void)state;
    for (model_kind kind = 0; kind < KINDS; kind++)
        for (int ranks = 1; ranks <= 2; ranks++)
            on_ranks(ranks, kind, rows_alone, NULL);
}

/* A draw hangs on the number of its row, whatever the other rows are. */
static loom_status drawn_beside_others(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    loom_prompt prompts[ROWS];
    uneven_prompts(prompts);
    for (int seed = 0; seed < SEEDS; seed++) {
        loom_generate_options options = options_of(seed);
        text uneven = {0}, even = {0};
        LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, keep, &uneven));
        for (int j = 0; j < ROWS; j++) {
            loom_prompt others[ROWS];
            for (int i = 0; i < ROWS; i++)
                others[i] = prompts[j];
            even = (text){0};
            LOOM_TRY(loom_generate(run->parallel, others, ROWS, &options, keep, &even));
            CHECK(equal_rows(&even, j, &uneven, j), "seed %d: row %d is another beside prompts of its length", seed, j);
        }
    }
    return LOOM_OK;
}

static void what_is_drawn_for_a_row_does_not_hang_on_its_neighbours(void **state) {
    (void)state;
    for (model_kind kind = 0; kind < KINDS; kind++)
        on_ranks(2, kind, drawn_beside_others, NULL);
}

/* One forward over prompts and texts, without the cache: at each position its choice is the token that was written. */
enum { WHOLE = 4 + MADE };

typedef struct whole_text {
    text written;
    loom_prompt prompts[ROWS];
} whole_text;

/* What stands behind a row's end is seen by nobody. */
static loom_status next_whole(void *context, loom_batch *batch) {
    const whole_text *whole = context;
    batch->b = ROWS;
    for (int64_t i = 0; i < (int64_t)ROWS * WHOLE; i++) {
        int64_t j = i / WHOLE, t = i % WHOLE, length = whole->prompts[j].length;
        batch->tokens[i] = t < length          ? whole->prompts[j].tokens[t]
                           : t < length + MADE ? whole->written.tokens[t - length][j]
                                               : 0;
        batch->labels[i] = 0;
        batch->loss_mask[i] = 1;
        batch->position_ids[i] = t;
        batch->sample[j] = batch->index[j] = j;
    }
    return LOOM_OK;
}

static loom_status chooses_the_same(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    const whole_text *whole = context;
    for (int64_t j = 0; j < batch->b; j++)
        for (int64_t step = 0; step < MADE; step++) {
            const float *at = logits + (j * WHOLE + whole->prompts[j].length - 1 + step) * vocabulary;
            int64_t best = 0, written = whole->written.tokens[step][j];
            for (int64_t i = 1; i < vocabulary; i++)
                best = at[i] > at[best] ? i : best;
            CHECK(best == written, "token %lld of row %lld: found %lld, without the cache %lld", (long long)step,
                (long long)j, (long long)written, (long long)best);
        }
    return LOOM_OK;
}

static loom_status compare_with_a_whole_forward(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    loom_generate_options options = options_of(SEEDS);
    whole_text whole = {0};
    loom_batches *batches;
    loom_data_loader loader = {
        .context = &whole, .micro_batch_size = ROWS, .sequence_length = WHOLE, .microbatches = 1, .next = next_whole};
    if (*(bool *)argument)
        uneven_prompts(whole.prompts);
    else
        prompts_of(4, whole.prompts);
    LOOM_TRY(loom_generate(run->parallel, whole.prompts, ROWS, &options, keep, &whole.written));
    LOOM_TRY(loom_fabric_setup_loader(run->fabric, &loader, &batches));
    loom_status status = loom_parallel_predict_step(run->parallel, batches, chooses_the_same, &whole);
    loom_batches_destroy(batches);
    return status;
}

static void the_cache_changes_no_token(void **state) {
    (void)state;
    for (int uneven = 0; uneven < 2; uneven++)
        for (model_kind kind = 0; kind <= DRAWN_EXPERTS; kind++)
            for (int ranks = 1; ranks <= 4 && kind != KINDS; ranks *= 2)
                on_ranks(ranks, kind, compare_with_a_whole_forward, &(bool){uneven});
}

/* ---- ends ---- */

static loom_status stops(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    loom_prompt prompts[ROWS];
    loom_generate_options options = options_of(0);
    text whole = {0}, ended = {0};
    prompts_of(4, prompts);
    LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, keep, &whole));
    options.stop_token = whole.tokens[5][0];
    LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, keep, &ended));
    int64_t last = 0;
    for (int j = 0; j < ROWS; j++) {
        int64_t end = 0;
        while (end < MADE && whole.tokens[end][j] != options.stop_token)
            end++;
        last = end > last ? end : last;
        for (int64_t i = 0; i < ended.steps; i++) {
            int64_t wanted = i <= end ? whole.tokens[i][j] : -1;
            CHECK(ended.tokens[i][j] == wanted, "token %lld of row %d: found %lld, wanted %lld", (long long)i, j,
                (long long)ended.tokens[i][j], (long long)wanted);
        }
    }
    int64_t steps = last + 1 < MADE ? last + 1 : MADE;
    CHECK(ended.steps == steps, "found %lld steps, wanted %lld", (long long)ended.steps, (long long)steps);
    return LOOM_OK;
}

static void a_row_ends_with_the_stop_token_and_all_rows_end_the_text(void **state) {
    (void)state;
    on_ranks(1, GPT2, stops, NULL);
    on_ranks(2, LLAMA_GROUPS, stops, NULL);
}

static loom_status stop_after_three(void *context, int64_t rows, const int64_t *tokens) {
    text *to = context;
    LOOM_TRY(keep(to, rows, tokens));
    return to->steps == 3 ? LOOM_END : LOOM_OK;
}

static loom_status is_stopped(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    loom_prompt prompts[ROWS];
    loom_generate_options options = options_of(0);
    text found = {0};
    prompts_of(4, prompts);
    LOOM_TRY(loom_generate(run->parallel, prompts, ROWS, &options, stop_after_three, &found));
    CHECK(found.steps == 3, "found %lld tokens, wanted 3", (long long)found.steps);
    return LOOM_OK;
}

static void who_receives_may_end_the_text(void **state) {
    (void)state;
    on_ranks(2, GPT2, is_stopped, NULL);
}

static loom_status fills_the_model(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    int64_t tokens[POSITIONS] = {0};
    loom_prompt prompt = {tokens, POSITIONS - 3};
    loom_generate_options options = loom_generate_options_default();
    text found = {0};
    options.max_tokens = 3;
    LOOM_TRY(loom_generate(run->parallel, &prompt, 1, &options, keep, &found));
    CHECK(found.steps == 3, "found %lld tokens, wanted 3", (long long)found.steps);
    return LOOM_OK;
}

static void a_text_may_fill_all_positions(void **state) {
    (void)state;
    for (model_kind kind = 0; kind < KINDS; kind++)
        on_ranks(2, kind, fills_the_model, NULL);
}

static loom_status no_prompts(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    text found = {0};
    LOOM_TRY(loom_generate(run->parallel, NULL, 0, NULL, keep, &found));
    CHECK(found.steps == 0, "found %lld steps, wanted none", (long long)found.steps);
    return LOOM_OK;
}

static void no_prompt_is_a_text_that_has_ended(void **state) {
    (void)state;
    on_ranks(2, GPT2, no_prompts, NULL);
}

/* ---- what is refused ---- */

/* Refused on every rank; the ranks stay usable. */
static loom_status refused(loom_parallel *parallel, const loom_prompt *prompts, int64_t rows,
    const loom_generate_options *options, loom_status status, const char *part, const char *other) {
    loom_generation *generation = NULL;
    loom_status found = loom_generation_create(parallel, prompts, rows, options, &generation);
    bool named = strstr(loom_error_message(), part) && strstr(loom_error_message(), other);
    loom_generation_destroy(generation);
    CHECK(found == status && named, "found %s \"%.200s\", wanted %s with \"%s\" and \"%s\"", loom_status_name(found),
        loom_error_message(), loom_status_name(status), part, other);
    return LOOM_OK;
}

static loom_status refuses(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    (void)argument;
    const loom_generate_options good = options_of(0);
    loom_generate_options bad = good;
    loom_prompt prompts[ROWS], wrong = {(const int64_t[]){4, SMALL_VOCABULARY}, 2}, none = {NULL, 0};
    uneven_prompts(prompts);
    bad.max_tokens = 45;
    LOOM_TRY(refused(run->parallel, prompts, ROWS, &bad, LOOM_ERR_ARGUMENT, "a prompt of 4 tokens and max_tokens 45",
        "48 positions of the model"));
    bad.max_tokens = INT64_MAX;
    LOOM_TRY(
        refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "max_tokens 9223372036854775807", "48 positions"));
    LOOM_TRY(
        refused(run->parallel, &wrong, 1, &good, LOOM_ERR_ARGUMENT, "token 1 of prompt 0 is 19", "expected 0 to 18"));
    LOOM_TRY(refused(run->parallel, &none, 1, &good, LOOM_ERR_ARGUMENT, "prompt 0 is empty", ""));
    LOOM_TRY(refused(run->parallel, prompts, -1, &good, LOOM_ERR_ARGUMENT, "prompts: found -1", ""));
    bad = good;
    bad.max_tokens = 0;
    LOOM_TRY(refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "max_tokens: found 0", ""));
    bad = good;
    bad.temperature = -1;
    LOOM_TRY(refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "temperature: found -1", ""));
    bad = good;
    bad.top_k = -1;
    LOOM_TRY(refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "top_k: found -1", ""));
    bad = good;
    bad.top_p = 0;
    LOOM_TRY(refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "top_p: found 0", ""));
    bad = good;
    bad.stop_token = SMALL_VOCABULARY;
    LOOM_TRY(refused(run->parallel, prompts, 1, &bad, LOOM_ERR_ARGUMENT, "stop_token: found 19", "0 to 18"));
    text found = {0};
    return loom_generate(run->parallel, prompts, ROWS, &good, keep, &found);
}

static void what_cannot_be_is_refused_by_name(void **state) {
    (void)state;
    on_ranks(1, GPT2, refuses, NULL);
    on_ranks(2, LLAMA_GROUPS, refuses, NULL);
}

static loom_status asks_for_another_seed(loom_rank *rank, const small_run *run, void *argument) {
    (void)argument;
    loom_prompt prompts[ROWS];
    loom_generate_options options = options_of(0);
    prompts_of(4, prompts);
    options.seed += loom_rank_index(rank) == 1;
    return refused(run->parallel, prompts, ROWS, &options,
        loom_rank_index(rank) == 1 ? LOOM_ERR_ARGUMENT : LOOM_ERR_ABORTED,
        "rank 1 was given other prompts or options than rank 0", "");
}

static void ranks_that_ask_for_different_texts_are_named(void **state) {
    (void)state;
    on_ranks(2, GPT2, asks_for_another_seed, NULL);
}

/* ---- beside training ---- */

static loom_status train(loom_rank *rank, bool between, double losses[2]) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    small_run run;
    strategy.tensor_model_parallel_size = loom_rank_count(rank);
    loom_status status = small_start(rank, &strategy, &run);
    for (int i = 0; !status && i < 2; i++) {
        loom_prompt prompt = {prompt_tokens[0], 4};
        loom_generate_options options = options_of(0);
        text found = {0};
        options.max_tokens = SMALL_SEQUENCE - 4;
        status = loom_parallel_training_step(run.parallel, run.batches, &losses[i]);
        if (!status && between)
            status = loom_generate(run.parallel, &prompt, 1, &options, keep, &found);
        if (!status)
            status = loom_optimizer_step(run.optimizer, NULL);
    }
    small_destroy(&run);
    return status;
}

static loom_status train_twice(loom_rank *rank, void *argument) {
    (void)argument;
    double plain[2], between[2];
    LOOM_TRY(train(rank, false, plain));
    LOOM_TRY(train(rank, true, between));
    for (int i = 0; i < 2; i++)
        CHECK(plain[i] == between[i], "loss of step %d: found %.17g, wanted %.17g", i, between[i], plain[i]);
    return LOOM_OK;
}

static void generating_between_steps_changes_no_bit_of_training(void **state) {
    (void)state;
    must_run(2, train_twice, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_and_every_rank_writes_the_same_text),
        cmocka_unit_test(other_seeds_rows_and_prompts_write_other_texts),
        cmocka_unit_test(the_cache_changes_no_token),
        cmocka_unit_test(a_row_is_the_same_alone_and_beside_others_of_any_length),
        cmocka_unit_test(what_is_drawn_for_a_row_does_not_hang_on_its_neighbours),
        cmocka_unit_test(a_row_ends_with_the_stop_token_and_all_rows_end_the_text),
        cmocka_unit_test(who_receives_may_end_the_text),
        cmocka_unit_test(a_text_may_fill_all_positions),
        cmocka_unit_test(no_prompt_is_a_text_that_has_ended),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test(ranks_that_ask_for_different_texts_are_named),
        cmocka_unit_test(generating_between_steps_changes_no_bit_of_training),
    };
    return cmocka_run_group_tests_name("parallel.generate", tests, NULL, NULL);
}
