/* Generation with experts that several ranks share: each data rank writes what one rank writes for its prompts, however
 * many they are and wherever they end; ranks that need each other wait for each other, and fail together. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <math.h>
#include <stdlib.h>

enum { POSITIONS = 48, MADE = 24, LONGEST = 6, DATA_RANKS = 6, ROWS = 3 };

typedef struct expert_case {
    int ranks, tp, cp, ep, etp; /* 0: 1, etp as tp */
    bool extended;
    const char *dispatcher, *precision; /* NULL = alltoall, 32 */
    int experts;                        /* 0 = 4 */
    double capacity;                    /* factor; 0 = no token is dropped */
    bool shared;                        /* experts beside the routed ones, behind a gate; every second layer is dense */
} expert_case;

/* ---- what each data rank is asked for ---- */

/* From none to three prompts, none of them as long as its neighbour. */
static int64_t prompts_of(int data_rank, int64_t memory[ROWS][LONGEST], loom_prompt prompts[ROWS]) {
    int64_t rows = (data_rank + 2) % (ROWS + 1);
    for (int64_t j = 0; j < rows; j++) {
        int64_t length = 1 + (3 * j + 2 * data_rank) % LONGEST;
        for (int64_t t = 0; t < length; t++)
            memory[j][t] = (5 * data_rank + 3 * j + 7 * t * t) % SMALL_VOCABULARY;
        prompts[j] = (loom_prompt){memory[j], length};
    }
    return rows;
}

/* Greedily and drawn, to ends that differ. */
static loom_generate_options options_of(int data_rank) {
    loom_generate_options options = loom_generate_options_default();
    options.max_tokens = MADE - 5 * data_rank % (MADE - 1);
    options.temperature = data_rank % 2 ? 0.9 : 0;
    options.top_k = data_rank == 3 ? 7 : 0;
    options.seed = (uint64_t)data_rank;
    options.stop_token = data_rank == 2 ? 3 : -1;
    return options;
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

static loom_status write_text(const small_run *run, int data_rank, text *to) {
    int64_t memory[ROWS][LONGEST];
    loom_prompt prompts[ROWS];
    loom_generate_options options = options_of(data_rank);
    int64_t rows = prompts_of(data_rank, memory, prompts);
    *to = (text){0};
    return loom_generate(run->parallel, prompts, rows, &options, keep, to);
}

/* ---- the model ---- */

/* Initial weights so large that the logits are far from equal, and tokens hang on those before them. */
static loom_model_config config_of(const expert_case *c) {
    loom_model_config config = loom_model_config_default("llama");
    config.num_layers = 2;
    config.hidden_size = 16;
    config.ffn_hidden_size = 24;
    config.num_attention_heads = 4;
    config.num_query_groups = 2;
    config.vocab_size = SMALL_VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.seq_length = config.max_position_embeddings = POSITIONS;
    config.init_method_std = 0.5;
    config.moe.num_moe_experts = c->experts ? c->experts : 4;
    config.moe.moe_token_dispatcher_type = c->dispatcher ? c->dispatcher : c->extended ? "allgather" : "alltoall";
    config.moe.moe_expert_capacity_factor = c->capacity;
    if (c->shared) {
        config.moe.moe_shared_expert_intermediate_size = 16;
        config.moe.moe_shared_expert_gate = true;
        config.moe.moe_layer_freq.every = 2;
    }
    return config;
}

static loom_status start(loom_rank *rank, const expert_case *c, small_run *run) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_precision_config precision = loom_precision_config_default();
    loom_model_config config = config_of(c);
    loom_module *module;
    *run = (small_run){0};
    strategy.tensor_model_parallel_size = c->tp ? c->tp : 1;
    strategy.sequence_parallel = c->tp > 1;
    strategy.context_parallel_size = c->cp ? c->cp : 1;
    strategy.expert_model_parallel_size = c->ep ? c->ep : 1;
    strategy.expert_tensor_parallel_size = c->etp;
    strategy.moe_extended_tp = c->extended;
    config.replicate_query_groups = c->tp > config.num_query_groups;
    if (c->precision)
        precision.precision = c->precision;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, &config, &module));
    return loom_fabric_setup_module_for_inference(run->fabric, module, &run->parallel);
}

static int data_rank_of(const small_run *run) {
    return loom_comm_rank(loom_fabric_group(run->fabric, LOOM_GROUP_DP));
}

typedef loom_status (*body_function)(loom_rank *rank, const small_run *run, void *argument);

typedef struct work {
    const expert_case *of;
    body_function body;
    void *argument;
} work;

static loom_status do_work(loom_rank *rank, void *argument) {
    const work *w = argument;
    small_run run;
    loom_status status = start(rank, w->of, &run);
    if (!status)
        status = w->body(rank, &run, w->argument);
    small_destroy(&run);
    return status;
}

/* ---- the same text ---- */

static loom_status write_all(loom_rank *rank, const small_run *run, void *argument) {
    (void)rank;
    for (int d = 0; d < DATA_RANKS; d++)
        LOOM_TRY(write_text(run, d, (text *)argument + d));
    return LOOM_OK;
}

static loom_status write_mine(loom_rank *rank, const small_run *run, void *argument) {
    const text *wanted = argument;
    text found;
    for (int turn = 0; turn < 2; turn++) {
        int asked = (data_rank_of(run) + turn) % DATA_RANKS;
        LOOM_TRY(write_text(run, asked, &found));
        CHECK(found.steps == wanted[asked].steps, "rank %d: found %lld steps, wanted %lld", loom_rank_index(rank),
            (long long)found.steps, (long long)wanted[asked].steps);
        for (int64_t i = 0; i < found.steps; i++)
            for (int j = 0; j < ROWS; j++)
                CHECK(found.tokens[i][j] == wanted[asked].tokens[i][j],
                    "rank %d: token %lld of row %d: found %lld, wanted %lld", loom_rank_index(rank), (long long)i, j,
                    (long long)found.tokens[i][j], (long long)wanted[asked].tokens[i][j]);
    }
    return LOOM_OK;
}

static void equal_one_rank(const expert_case *cases, size_t count) {
    for (const expert_case *c = cases; c < cases + count; c++) {
        text wanted[DATA_RANKS];
        expert_case alone = *c;
        alone.tp = alone.ep = 1;
        alone.etp = 0;
        alone.extended = false;
        must_run(1, do_work, &(work){&alone, write_all, wanted});
        loom_run_options options = test_options();
        if (loom_run_local(c->ranks, do_work, &(work){c, write_mine, wanted}, &options))
            fail_msg("%d ranks, tp %d, ep %d, etp %d%s: %s", c->ranks, c->tp, c->ep, c->etp,
                c->extended ? " extended" : "", loom_error_message());
    }
}

#define EQUAL_ONE_RANK(cases) equal_one_rank(cases, sizeof(cases) / sizeof *(cases))

static void each_data_rank_writes_what_one_rank_writes_for_its_prompts(void **state) {
    (void)state;
    const expert_case cases[] = {{.ranks = 2, .ep = 2}, {.ranks = 2, .ep = 2, .dispatcher = "allgather"},
        {.ranks = 2, .etp = 2}, {.ranks = 2, .etp = 2, .dispatcher = "allgather"}, {.ranks = 3, .ep = 3, .experts = 6},
        {.ranks = 4, .ep = 4}, {.ranks = 4, .ep = 2}, {.ranks = 4, .ep = 2, .etp = 2},
        {.ranks = 4, .ep = 2, .etp = 2, .dispatcher = "allgather"}, {.ranks = 2, .ep = 2, .shared = true}};
    EQUAL_ONE_RANK(cases);
}

/* Tensor groups within expert groups, expert groups within tensor groups, and neither: of tensor groups 01 23 45 and
 * expert groups 012 345 all six ranks are one chain. */
static void tensor_groups_and_expert_groups_need_not_divide_one_another(void **state) {
    (void)state;
    const expert_case cases[] = {{.ranks = 4, .tp = 2, .ep = 2}, {.ranks = 4, .tp = 2, .ep = 4, .etp = 1},
        {.ranks = 4, .tp = 2, .ep = 1, .etp = 4}, {.ranks = 4, .tp = 4, .ep = 2, .etp = 1},
        {.ranks = 4, .tp = 2, .ep = 2, .etp = 1, .dispatcher = "allgather", .shared = true},
        {.ranks = 6, .tp = 2, .ep = 3, .etp = 1, .experts = 6},
        {.ranks = 6, .tp = 2, .ep = 3, .etp = 1, .experts = 6, .dispatcher = "allgather"},
        {.ranks = 6, .tp = 2, .ep = 1, .etp = 3, .experts = 3}};
    EQUAL_ONE_RANK(cases);
}

static void experts_cut_over_tensor_and_expert_ranks_write_the_same(void **state) {
    (void)state;
    const expert_case cases[] = {{.ranks = 2, .ep = 2, .experts = 3, .extended = true},
        {.ranks = 4, .ep = 4, .experts = 3, .extended = true}, {.ranks = 4, .tp = 2, .ep = 2, .extended = true},
        {.ranks = 4, .ep = 2, .experts = 5, .extended = true, .shared = true}};
    EQUAL_ONE_RANK(cases);
}

static void weights_of_16_bits_write_what_they_write_on_one_rank(void **state) {
    (void)state;
    const expert_case cases[] = {{.ranks = 2, .ep = 2, .precision = "bf16-mixed"},
        {.ranks = 4, .ep = 4, .precision = "bf16-mixed", .dispatcher = "allgather"}};
    EQUAL_ONE_RANK(cases);
}

/* A rank with nothing to read has room for no token, and drops none of the others'. */
static void each_rank_drops_what_one_rank_drops(void **state) {
    (void)state;
    const expert_case cases[] = {{.ranks = 2, .ep = 2, .capacity = 1}, {.ranks = 4, .ep = 4, .capacity = 0.5}};
    EQUAL_ONE_RANK(cases);
}

/* ---- ends ---- */

typedef struct ending {
    int data_rank; /* that ends early */
    int64_t steps;
    text *texts; /* of the data ranks */
    int me;
} ending;

static loom_status keep_until(void *context, int64_t rows, const int64_t *tokens) {
    ending *e = context;
    LOOM_TRY(keep(&e->texts[e->me], rows, tokens));
    return e->me == e->data_rank && e->texts[e->me].steps == e->steps ? LOOM_END : LOOM_OK;
}

static loom_status generate_two_rows(const small_run *run, int64_t max_tokens, loom_token_function receive, void *to) {
    const loom_prompt prompts[] = {{(const int64_t[]){3, 1, 4}, 3}, {(const int64_t[]){2}, 1}};
    loom_generate_options options = loom_generate_options_default();
    options.max_tokens = max_tokens;
    return loom_generate(run->parallel, prompts, 2, &options, receive, to);
}

static loom_status ends_early(loom_rank *rank, const small_run *run, void *argument) {
    ending e = {.data_rank = 1, .steps = 3, .texts = argument, .me = data_rank_of(run)};
    LOOM_TRY(generate_two_rows(run, 10, keep_until, &e));
    int64_t wanted = e.me == 1 ? 3 : 10;
    CHECK(e.texts[e.me].steps == wanted, "rank %d: found %lld steps, wanted %lld", loom_rank_index(rank),
        (long long)e.texts[e.me].steps, (long long)wanted);
    return LOOM_OK;
}

static void who_receives_may_end_its_own_rows_while_others_go_on(void **state) {
    (void)state;
    text texts[2] = {{0}};
    must_run(2, do_work, &(work){&(expert_case){.ep = 2}, ends_early, texts});
    for (int i = 0; i < 3; i++)
        assert_memory_equal(texts[0].tokens[i], texts[1].tokens[i], 2 * sizeof(int64_t));
}

/* ---- what fails ---- */

static loom_status asks_for_too_much(loom_rank *rank, const small_run *run, void *argument) {
    text found = {0};
    (void)argument;
    int me = loom_rank_index(rank);
    loom_status status = generate_two_rows(run, me == 1 ? POSITIONS : 4, keep, &found);
    loom_status wanted = me == 1 ? LOOM_ERR_ARGUMENT : LOOM_ERR_ABORTED;
    CHECK(status == wanted && strstr(loom_error_message(), "a prompt of 3 tokens and max_tokens 48 do not fit") &&
              (me == 1 || strstr(loom_error_message(), "rank 1: ")),
        "rank %d: found %s \"%.200s\"", me, loom_status_name(status), loom_error_message());
    return generate_two_rows(run, 4, keep, &found);
}

static void what_one_rank_asks_wrongly_all_refuse_by_its_name(void **state) {
    (void)state;
    must_run(4, do_work, &(work){&(expert_case){.ep = 4}, asks_for_too_much, NULL});
}

/* The last norm of one rank alone, so that nothing of it comes to the others. */
static loom_status computes_nonsense(loom_rank *rank, const small_run *run, void *argument) {
    loom_parameter *const *parameters;
    int64_t count;
    text found = {0};
    (void)argument;
    int me = loom_rank_index(rank);
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    for (int64_t i = 0; me == 2 && i < count; i++)
        if (strcmp(parameters[i]->name, "decoder.final_layernorm.weight") == 0)
            parameters[i]->data[0] = NAN;
    loom_status status = generate_two_rows(run, 4, keep, &found);
    loom_status wanted = me == 2 ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED;
    CHECK(status == wanted && strstr(loom_error_message(), "the logit of token 0 at position 3 of row 0 is ") &&
              (me == 2 || strstr(loom_error_message(), "rank 2: ")),
        "rank %d: found %s \"%.200s\"", me, loom_status_name(status), loom_error_message());
    return LOOM_OK;
}

static void logits_that_are_no_numbers_end_it_for_all_by_the_name_of_their_rank(void **state) {
    (void)state;
    must_run(4, do_work, &(work){&(expert_case){.ep = 4}, computes_nonsense, NULL});
}

static loom_status fails_on_one(void *context, int64_t rows, const int64_t *tokens) {
    (void)rows;
    (void)tokens;
    return *(int *)context == 1 ? loom_fail(LOOM_ERR_IO, "the pipe is closed") : LOOM_OK;
}

static loom_status leaves(loom_rank *rank, const small_run *run, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank);
    return generate_two_rows(run, 4, fails_on_one, &me);
}

static void a_rank_that_leaves_ends_the_run_by_its_name(void **state) {
    (void)state;
    loom_run_options options = test_options();
    loom_status status = loom_run_local(2, do_work, &(work){&(expert_case){.ep = 2}, leaves, NULL}, &options);
    assert_int_equal(status, LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "rank 1: the pipe is closed"));
}

static loom_status refuses_context_ranks(loom_rank *rank, const small_run *run, void *argument) {
    text found = {0};
    (void)argument;
    loom_status status = generate_two_rows(run, 4, keep, &found);
    CHECK(status == LOOM_ERR_UNSUPPORTED &&
              strstr(loom_error_message(), "not supported yet: generating with context_parallel_size 2") &&
              strstr(loom_error_message(), "generate with context_parallel_size 1"),
        "rank %d: found %s \"%.200s\"", loom_rank_index(rank), loom_status_name(status), loom_error_message());
    return LOOM_OK;
}

static void context_ranks_are_refused_with_what_to_do_instead(void **state) {
    (void)state;
    must_run(2, do_work, &(work){&(expert_case){.cp = 2, .ep = 2}, refuses_context_ranks, NULL});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_data_rank_writes_what_one_rank_writes_for_its_prompts),
        cmocka_unit_test(tensor_groups_and_expert_groups_need_not_divide_one_another),
        cmocka_unit_test(experts_cut_over_tensor_and_expert_ranks_write_the_same),
        cmocka_unit_test(weights_of_16_bits_write_what_they_write_on_one_rank),
        cmocka_unit_test(each_rank_drops_what_one_rank_drops),
        cmocka_unit_test(who_receives_may_end_its_own_rows_while_others_go_on),
        cmocka_unit_test(what_one_rank_asks_wrongly_all_refuse_by_its_name),
        cmocka_unit_test(logits_that_are_no_numbers_end_it_for_all_by_the_name_of_their_rank),
        cmocka_unit_test(a_rank_that_leaves_ends_the_run_by_its_name),
        cmocka_unit_test(context_ranks_are_refused_with_what_to_do_instead),
    };
    return cmocka_run_group_tests_name("parallel.generate_experts", tests, NULL, NULL);
}
