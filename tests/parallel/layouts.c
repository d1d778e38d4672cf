/* A model that Megaloom initialises itself is the same model on every layout: bit-equal weights, losses that differ by
 * the order of additions only; and what does not change that order (threads, buckets, overlap, running again) changes
 * no bit. */
#include "parallel/support.h"
#include "parallel/toy_module.h"
#include <math.h>

enum { STEPS = 5, S = 12, VOCABULARY = 29, BATCH = 6, MODELS = 5 };

typedef enum kind { GPT2, LLAMA, LLAMA_ONE_GROUP, QWEN3_ONE_GROUP, GEMMA } kind;
static const char *const kind_names[MODELS] = {
    "gpt2", "llama", "llama of one query group", "qwen3 of one query group", "gemma"};
static const char *const architectures[MODELS] = {"gpt2", "llama", "llama", "qwen3", "gemma"};

/* What a run is, and what came of it on rank 0. */
typedef struct run {
    kind kind;
    int tp, dp, threads;
    bool sp, masks, no_overlap;
    int64_t micro, bucket_size;
    double dropout;
    loom_recompute recompute;
    double loss[STEPS], norm[STEPS];
    float *initial, *final;
    int64_t elements; /* of all weights */
} run;

static loom_model_config model_config(const run *r) {
    loom_model_config config = loom_model_config_default(architectures[r->kind]);
    bool one_group = r->kind == LLAMA_ONE_GROUP || r->kind == QWEN3_ONE_GROUP;
    config.num_layers = 2;
    config.hidden_size = 24;
    config.ffn_hidden_size = 36;
    config.num_attention_heads = 6;
    config.num_query_groups = r->kind == GPT2 ? 6 : one_group ? 1 : 3;
    config.replicate_query_groups = one_group;
    config.kv_channels = r->kind == QWEN3_ONE_GROUP ? 6 : 0;
    config.seq_length = S;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.init_method_std = 0.2; /* wide, so that five steps move something */
    config.hidden_dropout = config.attention_dropout = r->dropout;
    config.recompute = r->recompute;
    return config;
}

/* ---- data: walks over the vocabulary, with masks that leave ranks very different numbers of tokens ---- */

typedef struct masked {
    loom_dataset inner;
} masked;

static loom_status masked_get(void *context, int64_t index, const loom_sample_row *row) {
    const masked *m = context;
    LOOM_TRY(m->inner.get(m->inner.context, index, row));
    /* Of each batch of 6, samples 0 and 1 have no valid token at all, the others 3, 6, 9 and 12. */
    int64_t valid = index % BATCH < 2 ? 0 : (index % BATCH - 1) * 3;
    for (int64_t t = valid; t < S; t++)
        row->loss_mask[t] = 0;
    return LOOM_OK;
}

/* ---- one run ---- */

typedef struct sink {
    float *at;
    int64_t count;
} sink;

static loom_status take(void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    sink *to = context;
    int64_t count = shape[0] * (dims == 2 ? shape[1] : 1);
    (void)name;
    if (to->at)
        memcpy(to->at + to->count, values, (size_t)count * sizeof *values);
    to->count += count;
    return LOOM_OK;
}

static loom_status keep_weights(loom_parallel *parallel, float **weights, int64_t *elements) {
    sink to = {0};
    LOOM_TRY(loom_gpt_visit(parallel, false, take, &to));
    to = (sink){malloc((size_t)to.count * sizeof(float)), 0};
    CHECK(to.at, "out of memory");
    *weights = to.at;
    LOOM_TRY(loom_gpt_visit(parallel, false, take, &to));
    *elements = to.count;
    return LOOM_OK;
}

static loom_status train(run *mine, loom_parallel *parallel, loom_optimizer *optimizer, loom_batches *batches) {
    LOOM_TRY(keep_weights(parallel, &mine->initial, &mine->elements));
    for (int step = 0; step < STEPS; step++) {
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(parallel, batches, &mine->loss[step]));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
        mine->norm[step] = outcome.grad_norm;
    }
    return keep_weights(parallel, &mine->final, &mine->elements);
}

static loom_status set_up(loom_rank *rank, const run *wanted, loom_fabric **fabric, loom_parallel **parallel) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_model_config config = model_config(wanted);
    loom_module *module;
    strategy.tensor_model_parallel_size = wanted->tp;
    strategy.sequence_parallel = wanted->sp;
    strategy.ddp_config.bucket_size = wanted->bucket_size;
    strategy.ddp_config.overlap_grad_reduce = !wanted->no_overlap;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, fabric));
    loom_fabric_seed_everything(*fabric, 4321);
    LOOM_TRY(loom_fabric_launch(*fabric));
    LOOM_TRY(loom_gpt_create(*fabric, &config, &module));
    return loom_fabric_setup_module(*fabric, module, parallel);
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    run *wanted = argument, mine = *wanted;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_batches *batches = NULL;
    masked data = {0};
    loom_dataset dataset = {0};
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 0.01;
    loom_status status = loom_mock_dataset_create(S, VOCABULARY, 5, STEPS * BATCH, &data.inner);
    dataset = (loom_dataset){.context = &data, .length = STEPS * BATCH, .sequence_length = S, .get = masked_get};
    loom_dataloader loader = {.dataset = wanted->masks ? &dataset : &data.inner,
        .micro_batch_size = wanted->micro,
        .global_batch_size = BATCH};
    if (!status)
        status = set_up(rank, wanted, &fabric, &parallel);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer);
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    if (!status)
        status = train(&mine, parallel, optimizer, batches);
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&data.inner);
    if (!status && loom_rank_index(rank) == 0) {
        *wanted = mine;
    } else {
        free(mine.initial);
        free(mine.final);
    }
    return status;
}

static void describe(const run *r, char *text, size_t bytes) {
    snprintf(text, bytes, "%s tp%d dp%d%s mbs%lld dropout %g%s", kind_names[r->kind], r->tp, r->dp, r->sp ? " sp" : "",
        (long long)r->micro, r->dropout, r->masks ? " masks" : "");
}

static void run_it(run *r) {
    loom_run_options options = test_options();
    char text[160];
    options.threads = r->threads ? r->threads : 1;
    describe(r, text, sizeof text);
    if (loom_run_local(r->tp * r->dp, on_rank, r, &options))
        fail_msg("%s: %s", text, loom_error_message());
}

static void free_run(run *r) {
    free(r->initial);
    free(r->final);
    r->initial = r->final = NULL;
}

static void assert_same_bits(const run *a, const run *b) {
    char text[160];
    describe(b, text, sizeof text);
    assert_int_equal(a->elements, b->elements);
    if (memcmp(a->initial, b->initial, (size_t)a->elements * sizeof(float)))
        fail_msg("%s: other initial weights", text);
    for (int i = 0; i < STEPS; i++)
        if (memcmp(&a->loss[i], &b->loss[i], sizeof(double)) || memcmp(&a->norm[i], &b->norm[i], sizeof(double)))
            fail_msg("%s: loss %.17g and norm %.17g of step %d, expected %.17g and %.17g", text, b->loss[i], b->norm[i],
                i, a->loss[i], a->norm[i]);
    if (memcmp(a->final, b->final, (size_t)a->elements * sizeof(float)))
        fail_msg("%s: other weights after %d steps", text, STEPS);
}

/* The promise of another layout: 1e-5 relative, of losses and norms. */
static void assert_same_model(const run *a, const run *b) {
    char text[160];
    describe(b, text, sizeof text);
    assert_int_equal(a->elements, b->elements);
    if (memcmp(a->initial, b->initial, (size_t)a->elements * sizeof(float)))
        fail_msg("%s: other initial weights", text);
    for (int i = 0; i < STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-5 * a->loss[i]))
            fail_msg("%s: loss %.9g of step %d, one rank has %.9g", text, b->loss[i], i, a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 1e-5 * a->norm[i]))
            fail_msg("%s: norm %.9g of step %d, one rank has %.9g", text, b->norm[i], i, a->norm[i]);
    }
}

/* ---- the claims ---- */

static const struct { int tp, dp; } grid[] = {{2, 1}, {1, 2}, {2, 2}, {3, 1}, {1, 3}};

static bool divides(kind k, int tp) {
    return (k != LLAMA && k != GEMMA) || 3 % tp == 0;
}

static int compare_layouts(kind k, double dropout, bool masks) {
    run one = {.kind = k, .tp = 1, .dp = 1, .micro = BATCH, .dropout = dropout, .masks = masks};
    int ran = 0;
    run_it(&one);
    assert_true(one.loss[0] > 1 && one.loss[STEPS - 1] < one.loss[0]);
    for (size_t i = 0; i < sizeof grid / sizeof *grid; i++)
        for (int sp = 0; sp < (grid[i].tp > 1 ? 2 : 1); sp++) {
            run other = one;
            other.tp = grid[i].tp;
            other.dp = grid[i].dp;
            other.sp = sp;
            other.micro = BATCH / other.dp;
            if (!divides(k, other.tp))
                continue;
            run_it(&other);
            assert_same_model(&one, &other);
            free_run(&other);
            ran++;
        }
    free_run(&one);
    return ran;
}

static void a_model_is_the_same_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < MODELS; k++)
        printf("%s: %d layouts against one rank\n", kind_names[k], compare_layouts((kind)k, 0, false));
}

static void a_model_with_dropout_is_the_same_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < MODELS; k++)
        compare_layouts((kind)k, 0.1, false);
}

static void ranks_with_few_or_no_valid_tokens_weigh_as_their_tokens_do(void **state) {
    (void)state;
    compare_layouts(GPT2, 0, true);
    compare_layouts(LLAMA, 0.1, true);
}

static void dropout_changes_the_losses(void **state) {
    (void)state;
    run a = {.kind = GPT2, .tp = 1, .dp = 1, .micro = BATCH}, b = a;
    b.dropout = 0.1;
    run_it(&a);
    run_it(&b);
    assert_true(fabs(a.loss[0] - b.loss[0]) > 1e-3);
    free_run(&a);
    free_run(&b);
}

static void the_microbatch_size_changes_no_number(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 3};
    for (int k = 0; k < MODELS; k++)
        for (int dropped = 0; dropped < 2; dropped++) {
            run one = {.kind = (kind)k, .tp = 1, .dp = 1, .micro = BATCH, .dropout = dropped ? 0.1 : 0, .masks = true};
            run_it(&one);
            for (size_t i = 0; i < 3; i++) {
                run other = one;
                other.micro = sizes[i];
                run_it(&other);
                assert_same_model(&one, &other);
                free_run(&other);
            }
            free_run(&one);
        }
}

/* Runs the two and compares every bit. */
static void must_be_bit_equal(run a, run b) {
    run_it(&a);
    run_it(&b);
    assert_same_bits(&a, &b);
    free_run(&a);
    free_run(&b);
}

static void a_second_run_is_bit_equal(void **state) {
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        run r = {.kind = (kind)k, .tp = 3, .dp = 1, .sp = true, .micro = 3, .dropout = 0.1};
        must_be_bit_equal(r, r);
        r = (run){.kind = (kind)k, .tp = 1, .dp = 3, .micro = 1, .dropout = 0.1};
        must_be_bit_equal(r, r);
    }
}

static void the_size_of_the_team_changes_no_bit(void **state) {
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        run one = {.kind = (kind)k, .tp = 1, .dp = 2, .micro = 3, .threads = 1, .dropout = 0.1}, two = one;
        two.threads = 2;
        must_be_bit_equal(one, two);
    }
}

static void recomputation_changes_no_bit(void **state) {
    (void)state;
    for (int k = 0; k < MODELS; k++)
        for (int recompute = LOOM_RECOMPUTE_SELECTIVE; recompute <= LOOM_RECOMPUTE_FULL; recompute++) {
            run plain = {.kind = (kind)k, .tp = 3, .dp = 1, .sp = true, .micro = 3, .dropout = 0.1}, again = plain;
            again.recompute = (loom_recompute)recompute;
            must_be_bit_equal(plain, again);
        }
}

static void buckets_and_overlap_change_no_bit(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 700, 5000};
    run plain = {.kind = GPT2, .tp = 1, .dp = 3, .micro = 1, .masks = true};
    run_it(&plain);
    for (int overlap = 0; overlap < 2; overlap++)
        for (size_t i = 0; i < 3; i++) {
            run other = plain;
            other.no_overlap = !overlap;
            other.bucket_size = sizes[i];
            run_it(&other);
            assert_same_bits(&plain, &other);
            free_run(&other);
        }
    free_run(&plain);
}

/* ---- numbers said in advance ---- */

typedef struct toy_case {
    toy toy; /* copied by each rank */
    const int (*rows)[TOY_SEQUENCE];
    int64_t count, global, micro;
    int tp;
    int64_t bucket_size;
    double loss, norm; /* expected */
} toy_case;

static loom_status toy_step(const toy_case *c, toy *own, loom_fabric *fabric, loom_parallel **parallel) {
    toy_rows rows = {c->rows};
    loom_dataset dataset = toy_dataset(&rows, c->count);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = c->micro, .global_batch_size = c->global};
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer *optimizer;
    loom_optimizer_outcome outcome;
    loom_batches *batches;
    double loss;
    optim.lr = 0.01;
    LOOM_TRY(loom_fabric_launch(fabric));
    LOOM_TRY(loom_fabric_setup_module(fabric, toy_module(own), parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(fabric, *parallel, &optim, NULL, &optimizer));
    LOOM_TRY(loom_fabric_setup_dataloader(fabric, &loader, &batches));
    loom_status status = loom_parallel_training_step(*parallel, batches, &loss);
    loom_batches_destroy(batches);
    LOOM_TRY(status);
    LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
    CHECK(fabs(loss - c->loss) <= 1e-6, "loss %.9g, expected %.9g", loss, c->loss);
    CHECK(fabs(outcome.grad_norm - c->norm) <= 1e-5, "norm %.9g, expected %.9g", outcome.grad_norm, c->norm);
    CHECK(own->materialized == 1 && own->finalized == 1, "materialized %d times, finalized %d times", own->materialized,
        own->finalized);
    return LOOM_OK;
}

static loom_status toy_on_rank(loom_rank *rank, void *argument) {
    const toy_case *c = argument;
    toy own = c->toy;
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_fabric *fabric;
    loom_parallel *parallel = NULL;
    strategy.tensor_model_parallel_size = c->tp;
    strategy.ddp_config.bucket_size = c->bucket_size;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &fabric));
    loom_status status = toy_step(c, &own, fabric, &parallel);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    if (!status && own.freed != 1)
        status = loom_fail(LOOM_ERR_INTERNAL, "the module was destroyed %d times", own.freed);
    return status;
}

/* Losses {4} and {1, 2, 3}: their mean is 2.5, not the mean 3 of two means; the gradient of one factor is the same. */
static void the_mean_is_over_tokens_not_over_microbatches_or_ranks(void **state) {
    (void)state;
    static const int rows[2][TOY_SEQUENCE] = {{4, -1, -1}, {1, 2, 3}};
    toy_case c = {.toy = {.parameters = 1, .uses = 1, .initial = 1},
        .rows = rows,
        .count = 2,
        .global = 2,
        .micro = 1,
        .tp = 1,
        .loss = 2.5,
        .norm = 2.5};
    must_run(1, toy_on_rank, &c); /* two microbatches */
    must_run(2, toy_on_rank, &c); /* two ranks */
    c.micro = 2;
    must_run(1, toy_on_rank, &c); /* one microbatch of both */
}

static void a_fully_masked_microbatch_gives_no_nan(void **state) {
    (void)state;
    static const int rows[2][TOY_SEQUENCE] = {{-1, -1, -1}, {1, 2, 3}};
    static const int none[2][TOY_SEQUENCE] = {{-1, -1, -1}, {-1, -1, -1}};
    toy_case c = {.toy = {.parameters = 1, .uses = 1, .initial = 1},
        .rows = rows,
        .count = 2,
        .global = 2,
        .micro = 1,
        .tp = 1,
        .loss = 2,
        .norm = 2};
    must_run(1, toy_on_rank, &c);
    must_run(2, toy_on_rank, &c);
    c.rows = none;
    c.loss = c.norm = 0;
    must_run(2, toy_on_rank, &c);
}

static const int one_token[2][TOY_SEQUENCE] = {{1, -1, -1}, {1, -1, -1}};

/* Shards with gradients 3 and 4 and a replica with 12: 13 = |(3, 4, 12)|. */
static void the_norm_counts_shards_each_and_replicas_once(void **state) {
    (void)state;
    toy_case c = {
        .toy = {.parameters = 2, .uses = 2, .use = {{0, 1}, {1, 12}}, .shard = {true}, .shard_factor = {3, 4}},
        .rows = one_token,
        .count = 2,
        .global = 1,
        .micro = 1,
        .tp = 2,
        .norm = 13};
    must_run(2, toy_on_rank, &c);
    c.global = 2;
    must_run(4, toy_on_rank, &c);
}

/* A tied parameter whose two uses give 1 and 2, and another with 4: 5 = |(3, 4)|. */
static void the_norm_counts_a_tied_parameter_once(void **state) {
    (void)state;
    toy_case c = {.toy = {.parameters = 2, .uses = 3, .use = {{0, 1}, {1, 4}, {0, 2}}},
        .rows = one_token,
        .count = 2,
        .global = 2,
        .micro = 1,
        .tp = 1,
        .norm = 5};
    must_run(1, toy_on_rank, &c);
    must_run(2, toy_on_rank, &c);
}

/* The parameters are laid out in reverse, so the first one lies in the last bucket. */
static void an_unused_parameter_has_a_zero_gradient_and_hangs_nobody(void **state) {
    (void)state;
    for (int64_t bucket_size = 0; bucket_size < 3; bucket_size++) {
        toy_case c = {.toy = {.parameters = 3, .uses = 2, .use = {{1, 3}, {2, 4}}},
            .rows = one_token,
            .count = 2,
            .global = 2,
            .micro = 1,
            .tp = 1,
            .bucket_size = bucket_size,
            .norm = 5};
        must_run(2, toy_on_rank, &c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_is_the_same_on_every_layout),
        cmocka_unit_test(a_model_with_dropout_is_the_same_on_every_layout),
        cmocka_unit_test(ranks_with_few_or_no_valid_tokens_weigh_as_their_tokens_do),
        cmocka_unit_test(dropout_changes_the_losses),
        cmocka_unit_test(the_microbatch_size_changes_no_number),
        cmocka_unit_test(a_second_run_is_bit_equal),
        cmocka_unit_test(the_size_of_the_team_changes_no_bit),
        cmocka_unit_test(recomputation_changes_no_bit),
        cmocka_unit_test(buckets_and_overlap_change_no_bit),
        cmocka_unit_test(the_mean_is_over_tokens_not_over_microbatches_or_ranks),
        cmocka_unit_test(a_fully_masked_microbatch_gives_no_nan),
        cmocka_unit_test(the_norm_counts_shards_each_and_replicas_once),
        cmocka_unit_test(the_norm_counts_a_tied_parameter_once),
        cmocka_unit_test(an_unused_parameter_has_a_zero_gradient_and_hangs_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
