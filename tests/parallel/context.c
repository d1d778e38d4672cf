/* Ranks that share a sequence compute what one rank does: losses and norms within the rounding of their sums, whatever
 * hides keys (causality, windows, documents, dropout), however keys travel, with tensor ranks, stages and shards. */
#include "parallel/support.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 4, S = 24, VOCABULARY = 31, BATCH = 4, TEXT = 160 };

typedef struct context_case {
    int ranks, cp, tp, pp, vpp;
    const char *type; /* cp_comm_type; NULL = p2p */
    int64_t inner;    /* ranks of the inner level of a2a+p2p */
    int64_t groups;   /* query groups; 0 = all 12 heads */
    int64_t window;
    bool documents, sp, sharded, learned, average, selective;
    double dropout;
    const char *precision;
    int64_t micro, length; /* length: of a sequence; 0 = S */
} context_case;

typedef struct context_result {
    double loss[STEPS], norm[STEPS], evaluated;
    size_t high_water;
} context_result;

typedef struct context_job {
    const context_case *c;
    context_result *result;
} context_job;

static const char *name_of(const context_case *c, char text[TEXT]) {
    snprintf(text, TEXT, "%d ranks, cp %d %s tp %d%s pp %d groups %lld window %lld%s dropout %g%s%s", c->ranks, c->cp,
        c->type ? c->type : "p2p", c->tp, c->sp ? " sp" : "", c->pp, (long long)c->groups, (long long)c->window,
        c->documents ? " documents" : "", c->dropout, c->sharded ? " sharded" : "", c->precision ? c->precision : "");
    return text;
}

/* ---- data: samples of documents that end at other places in each ---- */

static loom_status documents_get(void *context, int64_t index, const loom_sample_row *row) {
    const loom_dataset *inner = context;
    LOOM_TRY(inner->get(inner->context, index, row));
    int64_t length = 3 + (index < 0 ? 0 : index % 5) * 3;
    for (int64_t t = 0; t < S; t++) {
        row->loss_mask[t] = (t + index) % 3 == 0 ? 0 : 1;
        row->position_ids[t] = t % length;
        if (row->document_start)
            row->document_start[t] = (int32_t)(t / length * length);
    }
    return LOOM_OK;
}

/* ---- one run ---- */

static loom_model_config model_of(const context_case *c) {
    loom_model_config config = loom_model_config_default(c->learned ? "gpt2" : "llama");
    config.num_layers = 4;
    config.hidden_size = 48;
    config.ffn_hidden_size = 72;
    config.num_attention_heads = 12;
    config.num_query_groups = c->groups ? c->groups : 12;
    config.seq_length = c->length ? c->length : S;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.init_method_std = 0.05;
    config.window_size = c->window;
    config.hidden_dropout = config.attention_dropout = c->dropout;
    config.recompute = c->selective ? LOOM_RECOMPUTE_SELECTIVE : LOOM_RECOMPUTE_NONE;
    if (c->type)
        config.parallel.cp_comm_type = c->type;
    if (c->inner) {
        config.parallel.hierarchical_context_parallel_sizes[0] = c->inner;
        config.parallel.hierarchical_context_parallel_sizes[1] = c->cp / c->inner;
    }
    return config;
}

static loom_status set_up(loom_rank *rank, const context_case *c, loom_fabric **fabric, loom_parallel **parallel) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_precision_config precision = loom_precision_config_default();
    loom_model_config config = model_of(c);
    loom_module *module;
    strategy.context_parallel_size = c->cp;
    strategy.tensor_model_parallel_size = c->tp;
    strategy.sequence_parallel = c->sp;
    strategy.pipeline_model_parallel_size = c->pp;
    strategy.virtual_pipeline_model_parallel_size = c->vpp;
    strategy.ddp_config.overlap_grad_reduce = strategy.ddp_config.use_distributed_optimizer = c->sharded;
    strategy.ddp_config.average_in_collective = c->average;
    strategy.ddp_config.bucket_size = c->sharded ? 4000 : 0;
    if (c->precision)
        precision.precision = c->precision;
    if (c->precision && strcmp(c->precision, "16-mixed") == 0)
        precision.initial_loss_scale = 1024;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, fabric));
    LOOM_TRY(loom_fabric_launch(*fabric));
    LOOM_TRY(loom_gpt_create(*fabric, &config, &module));
    return loom_fabric_setup_module(*fabric, module, parallel);
}

static loom_status train(loom_fabric *fabric, loom_parallel *parallel, loom_optimizer *optimizer,
    const loom_dataset *dataset, int64_t micro, context_result *result) {
    loom_dataloader loader = {.dataset = dataset, .micro_batch_size = micro, .global_batch_size = BATCH};
    loom_batches *batches = NULL, *validation = NULL;
    loom_status status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    for (int step = 0; !status && step < STEPS; step++) {
        loom_optimizer_outcome outcome;
        status = loom_parallel_training_step(parallel, batches, &result->loss[step]);
        if (!status)
            status = loom_optimizer_step(optimizer, &outcome);
        if (!status)
            result->norm[step] = outcome.grad_norm;
    }
    loader.mode = LOOM_VALIDATION;
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &validation);
    if (!status)
        status = loom_parallel_validation_step(parallel, validation, &result->evaluated);
    loom_batches_destroy(batches);
    loom_batches_destroy(validation);
    return status;
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    const context_job *job = argument;
    const context_case *c = job->c;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_dataset inner = {0}, outer;
    context_result mine = {.evaluated = 0};
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 0.001;
    loom_status status = loom_mock_dataset_create(c->length ? c->length : S, VOCABULARY, 5, STEPS * BATCH, &inner);
    outer = (loom_dataset){.context = &inner,
        .length = STEPS * BATCH,
        .sequence_length = S,
        .document_boundaries = c->documents,
        .get = documents_get};
    if (!status)
        status = set_up(rank, c, &fabric, &parallel);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer);
    if (!status)
        status = train(fabric, parallel, optimizer, c->documents ? &outer : &inner, c->micro ? c->micro : 1, &mine);
    mine.high_water = loom_rank_memory(rank).high_water;
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&inner);
    if (!status && loom_rank_index(rank) == 0)
        *job->result = mine;
    return status;
}

static context_case filled(const context_case *given) {
    context_case c = *given;
    c.cp = c.cp ? c.cp : 1;
    c.tp = c.tp ? c.tp : 1;
    c.pp = c.pp ? c.pp : 1;
    c.ranks = c.ranks ? c.ranks : c.cp * c.tp * c.pp;
    return c;
}

static loom_status try_run(const context_case *given, context_result *result) {
    context_case c = filled(given);
    context_job job = {&c, result};
    loom_run_options options = test_options();
    return loom_run_local(c.ranks, on_rank, &job, &options);
}

static context_result run_it(const context_case *c) {
    char text[TEXT];
    context_result result;
    context_case full = filled(c);
    if (try_run(c, &result))
        fail_msg("%s: %s", name_of(&full, text), loom_error_message());
    return result;
}

static void must_be_near(const char *name, const char *what, int step, double found, double wanted, double relative) {
    if (!(fabs(found - wanted) <= relative * fabs(wanted)))
        fail_msg("%s: %s of step %d is %.9g, one rank has %.9g", name, what, step, found, wanted);
}

/* Against the same model and data on one rank. */
static void must_equal_one_rank(const context_case *given) {
    char name[TEXT];
    context_case c = filled(given), alone = *given;
    alone.ranks = alone.cp = alone.tp = alone.pp = 1;
    alone.vpp = 0;
    alone.sp = alone.sharded = alone.average = alone.selective = false;
    context_result found = run_it(given), wanted = run_it(&alone);
    double loss = c.precision ? 4e-3 : 1e-5, norm = c.precision ? 6e-2 : 1e-5;
    name_of(&c, name);
    for (int step = 0; step < STEPS; step++) {
        must_be_near(name, "loss", step, found.loss[step], wanted.loss[step], loss);
        must_be_near(name, "norm", step, found.norm[step], wanted.norm[step], norm);
    }
    must_be_near(name, "evaluation loss", STEPS, found.evaluated, wanted.evaluated, loss);
}

static void all_equal_one_rank(const context_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++)
        must_equal_one_rank(&cases[i]);
}

#define ALL_EQUAL_ONE_RANK(cases) all_equal_one_rank(cases, sizeof(cases) / sizeof *(cases))

static void keys_travel_in_four_ways(void **state) {
    (void)state;
    const context_case cases[] = {{.cp = 2}, {.cp = 3}, {.cp = 4}, {.cp = 6}, {.cp = 12, .groups = 4},
        {.cp = 2, .type = "all_gather"}, {.cp = 3, .type = "all_gather", .groups = 4}, {.cp = 4, .type = "all_gather"},
        {.cp = 2, .type = "a2a"}, {.cp = 3, .type = "a2a"}, {.cp = 4, .type = "a2a", .groups = 4},
        {.cp = 4, .type = "a2a+p2p", .inner = 2}, {.cp = 6, .type = "a2a+p2p", .inner = 3},
        {.cp = 6, .type = "a2a+p2p", .inner = 2, .groups = 2}, {.cp = 4, .type = "a2a+p2p", .inner = 4},
        {.cp = 4, .type = "a2a+p2p", .inner = 1}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void what_hides_a_key_hides_it_on_any_rank(void **state) {
    (void)state;
    const context_case cases[] = {{.cp = 3, .window = 5}, {.cp = 2, .window = 7, .type = "all_gather"},
        {.cp = 4, .window = 5, .type = "a2a"}, {.cp = 4, .window = 9, .type = "a2a+p2p", .inner = 2},
        {.cp = 3, .documents = true}, {.cp = 2, .documents = true, .type = "all_gather", .micro = 2},
        {.cp = 3, .documents = true, .type = "a2a", .micro = 2},
        {.cp = 4, .documents = true, .type = "a2a+p2p", .inner = 2, .micro = 2}, {.cp = 3, .dropout = 0.2, .micro = 2},
        {.cp = 2, .dropout = 0.2, .type = "all_gather"}, {.cp = 4, .dropout = 0.2, .type = "a2a"},
        {.cp = 4, .dropout = 0.2, .type = "a2a+p2p", .inner = 2},
        {.cp = 2, .dropout = 0.2, .learned = true, .documents = true, .window = 8}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void other_parallelism_goes_along(void **state) {
    (void)state;
    const context_case cases[] = {{.cp = 2, .tp = 2, .sp = true, .dropout = 0.1},
        {.cp = 2, .tp = 3, .sp = true, .dropout = 0.1, .groups = 6, .learned = true}, {.cp = 3, .tp = 4, .sp = true},
        {.cp = 2, .pp = 2, .micro = 1}, {.cp = 2, .pp = 2, .vpp = 2}, {.cp = 2, .pp = 2, .tp = 2, .sp = true},
        {.ranks = 4, .cp = 2, .sharded = true}, {.ranks = 4, .cp = 2, .average = true},
        {.ranks = 6, .cp = 3, .sharded = true, .type = "all_gather"}, {.cp = 2, .selective = true, .dropout = 0.1},
        {.ranks = 8, .cp = 2, .tp = 2, .sp = true, .sharded = true, .type = "a2a"},
        {.cp = 2, .precision = "bf16-mixed"}, {.cp = 3, .precision = "bf16-mixed", .type = "all_gather"},
        {.cp = 4, .precision = "bf16-mixed", .type = "a2a+p2p", .inner = 2},
        {.cp = 2, .precision = "16-mixed", .sharded = true}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* Everything that is as long as the sequence is cut: activations, and what attention keeps of keys, queries and sums.
 */
static void memory_falls_with_the_number_of_context_ranks(void **state) {
    (void)state;
    const context_case alone = {.length = 768};
    double whole = (double)run_it(&alone).high_water;
    static const char *const types[] = {"p2p", "a2a", "all_gather"};
    for (int type = 0; type < 3; type++)
        for (int cp = 2; cp <= 4; cp *= 2) {
            const context_case c = {.cp = cp, .type = types[type], .length = 768};
            double share = (double)run_it(&c).high_water / whole;
            printf("cp %d %s: %.3f of one rank's memory\n", cp, types[type], share);
            assert_true(share < (type == 2 ? 1.35 : 1.2) / cp);
        }
}

static void expect_refusal(context_case c, const char *words) {
    context_result result;
    if (try_run(&c, &result) == LOOM_OK || !strstr(loom_error_message(), words))
        fail_msg("cp %d %s: found \"%s\", expected \"%s\"", c.cp, c.type ? c.type : "p2p", loom_error_message(), words);
}

static void what_cannot_be_shared_is_refused_with_its_numbers(void **state) {
    (void)state;
    expect_refusal((context_case){.cp = 5}, "seq_length 24 cannot be cut into 2 chunks for each of the 5 ranks");
    expect_refusal((context_case){.cp = 4, .type = "a2a", .groups = 2}, "the 12 heads and 2 query groups");
    expect_refusal((context_case){.cp = 4, .type = "a2a+p2p"}, "product is context_parallel_size 4: found [0, 0]");
    expect_refusal((context_case){.cp = 4, .type = "a2a+p2p", .inner = 3}, "found [3, 1]");
    expect_refusal(
        (context_case){.cp = 2, .type = "ring"}, "found ring, expected one of p2p, all_gather, a2a, a2a+p2p");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_travel_in_four_ways),
        cmocka_unit_test(what_hides_a_key_hides_it_on_any_rank),
        cmocka_unit_test(other_parallelism_goes_along),
        cmocka_unit_test(memory_falls_with_the_number_of_context_ranks),
        cmocka_unit_test(what_cannot_be_shared_is_refused_with_its_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
