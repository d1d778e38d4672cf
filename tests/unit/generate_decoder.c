/* What the decoder computes: the logits of one rank wherever the experts are, behind rows that read different numbers
 * of tokens, or none. */
#include "model/decoder.h"
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCABULARY = 19, DATA_RANKS = 4, ROWS = 3, STEPS = 5, POSITIONS = 16 };

typedef struct layout {
    int ranks, tp, ep, etp;
    const char *dispatcher;
} layout;

/* The logits of each step's rows that read something, of what a data rank reads. */
typedef struct logits {
    float of[STEPS][ROWS][VOCABULARY];
} logits;

/* Data rank d has d rows; each reads a prompt, then one or two tokens a step, and rests in one step. */
static int64_t count_of(int data_rank, int step, int64_t row) {
    if (row >= data_rank)
        return 0;
    return step == 0 ? 1 + (2 * row + data_rank) % 4 : (step + row) % 3;
}

static loom_status read_all(const loom_module *module, int data_rank, logits *to) {
    const int64_t capacity[ROWS] = {POSITIONS, POSITIONS - 1, POSITIONS - 2};
    loom__decoder *decoder;
    memset(to, 0, sizeof *to);
    LOOM_TRY(loom__decoder_create(module, data_rank, capacity, &decoder));
    loom_status status = LOOM_OK;
    for (int step = 0; !status && step < STEPS; step++) {
        int64_t tokens[ROWS * POSITIONS], counts[ROWS], at = 0;
        for (int64_t j = 0; j < data_rank; j++) {
            counts[j] = count_of(data_rank, step, j);
            for (int64_t t = 0; t < counts[j]; t++)
                tokens[at++] = (7 * step + 3 * j + 5 * t + data_rank) % VOCABULARY;
        }
        status = loom__decoder_read(decoder, tokens, counts, to->of[step][0]);
    }
    loom__decoder_destroy(decoder);
    return status;
}

static loom_status start(loom_rank *rank, const layout *at, loom_fabric **fabric, loom_parallel **parallel) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_model_config config = loom_model_config_default("llama");
    loom_module *module;
    config.num_layers = 2;
    config.hidden_size = 16;
    config.ffn_hidden_size = 24;
    config.num_attention_heads = 4;
    config.num_query_groups = 4;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.seq_length = POSITIONS;
    config.init_method_std = 0.2;
    config.moe.num_moe_experts = 4;
    config.moe.moe_token_dispatcher_type = at->dispatcher;
    strategy.tensor_model_parallel_size = at->tp;
    strategy.sequence_parallel = at->tp > 1;
    strategy.expert_model_parallel_size = at->ep;
    strategy.expert_tensor_parallel_size = at->etp;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, fabric));
    LOOM_TRY(loom_fabric_launch(*fabric));
    LOOM_TRY(loom_gpt_create(*fabric, &config, &module));
    return loom_fabric_setup_module_for_inference(*fabric, module, parallel);
}

typedef struct job {
    const layout *at;
    logits *wanted; /* [DATA_RANKS] */
    bool makes;
} job;

/* Every logit within 1e-5 of the largest. */
static loom_status compare(int me, const logits *found, const logits *wanted) {
    const float *a = found->of[0][0], *b = wanted->of[0][0];
    double largest = 0;
    for (size_t i = 0; i < sizeof *wanted / sizeof *b; i++)
        largest = fmax(largest, fabs((double)b[i]));
    for (size_t i = 0; i < sizeof *wanted / sizeof *b; i++)
        CHECK(fabs((double)a[i] - (double)b[i]) <= 1e-5 * largest, "rank %d: logit %zu: found %.9g, wanted %.9g", me, i,
            (double)a[i], (double)b[i]);
    return LOOM_OK;
}

static loom_status run(loom_rank *rank, void *argument) {
    const job *of = argument;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_status status = start(rank, of->at, &fabric, &parallel);
    for (int d = 0; !status && of->makes && d < DATA_RANKS; d++)
        status = read_all(parallel->module, d, &of->wanted[d]);
    if (!status && !of->makes) {
        int me = loom_comm_rank(fabric->groups[LOOM_GROUP_DP]);
        logits found;
        status = read_all(parallel->module, me, &found);
        if (!status)
            status = compare(loom_rank_index(rank), &found, &of->wanted[me]);
    }
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

static void logits_are_those_of_one_rank_within_1e_5(void **state) {
    (void)state;
    const layout alone = {1, 1, 1, 0, "alltoall"};
    const layout layouts[] = {{2, 1, 2, 0, "alltoall"}, {4, 1, 4, 0, "alltoall"}, {4, 1, 4, 0, "allgather"},
        {4, 1, 2, 0, "allgather"}, {4, 1, 1, 4, "alltoall"}, {4, 1, 2, 2, "allgather"}, {4, 2, 4, 1, "alltoall"},
        {4, 2, 2, 2, "allgather"}, {2, 2, 1, 0, "alltoall"}, {4, 4, 2, 2, "alltoall"}};
    logits *wanted = calloc(DATA_RANKS, sizeof *wanted);
    assert_non_null(wanted);
    loom_run_options options = test_options();
    must_run(1, run, &(job){&alone, wanted, true});
    for (const layout *at = layouts; at < layouts + sizeof layouts / sizeof *layouts; at++)
        if (loom_run_local(at->ranks, run, &(job){at, wanted, false}, &options))
            fail_msg("%d ranks, tp %d, ep %d, etp %d, %s: %s", at->ranks, at->tp, at->ep, at->etp, at->dispatcher,
                loom_error_message());
    free(wanted);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(logits_are_those_of_one_rank_within_1e_5)};
    return cmocka_run_group_tests_name("unit.generate_decoder", tests, NULL, NULL);
}
