/* A checkpoint that is rewritten for another layout without ranks, and the one that a run of that layout writes when it
 * has loaded the same: the same tensors, chunks, objects, common state and context, for all pairs of layouts. */
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SEQUENCE = 8, VOCABULARY = 19, GLOBAL = 12, BEFORE = 2, PATH = 512 };

typedef struct place {
    int tp, pp, vpp, dp;
    bool sharded, fully; /* fully: strategy.dist_ckpt_optim_fully_reshardable */
    int ep, etp, cp;     /* of a model with experts; ep 0: of one without */
} place;

static int ranks_of(const place *at) {
    return at->tp * at->pp * at->dp * (at->cp ? at->cp : 1);
}

typedef struct kind {
    bool tied;             /* GPT-2 with a third moment; else Llama */
    const char *precision; /* NULL: 32 */
    double loss_scale;     /* of 16-mixed; 0: a dynamic one */
    bool narrow;           /* gradients are reduced in 16 bits */
} kind;

typedef struct job {
    place at;
    kind of;
    const char *load, *save;
} job;

static loom_model_config model_config(bool tied, bool experts) {
    loom_model_config config = loom_model_config_default(tied ? "gpt2" : "llama");
    config.num_layers = 4;
    config.hidden_size = 16;
    config.ffn_hidden_size = 24;
    config.num_attention_heads = 4;
    config.num_query_groups = tied ? 4 : 2;
    config.seq_length = SEQUENCE;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 2; /* so that the padding depends on the tensor size */
    config.share_embeddings_and_output_weights = tied;
    if (experts) {
        config.moe.num_moe_experts = 4;
        config.moe.moe_ffn_hidden_size = 12;
        config.moe.moe_router_score_function = "sigmoid";
        config.moe.moe_router_enable_expert_bias = true;
        config.add_bias_linear = true;
    }
    return config;
}

typedef struct run {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_dataset dataset;
    loom_batches *batches;
} run;

/* A run that loads begins with another scale, so that what is not loaded shows. */
static loom_precision_config precision_of(const job *j) {
    loom_precision_config config = loom_precision_config_default();
    if (j->of.precision)
        config.precision = j->of.precision;
    config.grad_reduce_in_fp32 = !j->of.narrow;
    if (!j->of.precision || strcmp(j->of.precision, "16-mixed") != 0)
        return config;
    config.loss_scale = j->of.loss_scale;
    if (config.loss_scale > 0)
        return config;
    config.initial_loss_scale = j->load ? 4 : 1024;
    config.loss_scale_window = BEFORE + 1;
    config.hysteresis = j->load ? 2 : 3;
    return config;
}

static loom_status start(loom_rank *rank, const job *j, run *r) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
    io_config.parallel_save = false; /* a tool writes what several ranks hold for the first of them */
    const loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
    loom_model_config model = model_config(j->of.tied, j->at.ep > 0);
    loom_precision_config precision = precision_of(j);
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = 9};
    loom_module *module;
    config.checkpoint_io = &io;
    config.tensor_model_parallel_size = j->at.tp;
    config.pipeline_model_parallel_size = j->at.pp;
    config.virtual_pipeline_model_parallel_size = j->at.vpp;
    config.context_parallel_size = j->at.cp ? j->at.cp : 1;
    config.expert_model_parallel_size = j->at.ep ? j->at.ep : 1;
    config.expert_tensor_parallel_size = j->at.etp;
    config.sequence_parallel = j->at.ep && j->at.tp > 1;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_grad_reduce = j->at.sharded;
    config.ddp_config.bucket_size = j->at.sharded ? 1500 : 0;
    optim.lr = 0.01;
    optim.amsgrad = j->of.tied;
    config.dist_ckpt_optim_fully_reshardable = j->at.fully;
    LOOM_TRY(loom_fabric_create(rank, &config, &precision, &r->fabric));
    loom_fabric_seed_everything(r->fabric, j->load ? 2 : 1);
    LOOM_TRY(loom_fabric_launch(r->fabric));
    LOOM_TRY(loom_gpt_create(r->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->parallel, &optim, &setup, &r->optimizer));
    return loom_mock_dataset_create(SEQUENCE, VOCABULARY, 3, (int64_t)GLOBAL * BEFORE, &r->dataset);
}

static loom_status train(run *r) {
    loom_dataloader loader = {
        .dataset = &r->dataset, .mode = LOOM_TRAINING, .micro_batch_size = 2, .global_batch_size = GLOBAL};
    LOOM_TRY(loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches));
    for (int i = 0; i < BEFORE; i++) {
        loom_optimizer_outcome outcome;
        double loss;
        LOOM_TRY(loom_parallel_training_step(r->parallel, r->batches, &loss));
        LOOM_TRY(loom_optimizer_step(r->optimizer, &outcome));
    }
    return LOOM_OK;
}

static loom_status go(const job *j, run *r) {
    loom_value iteration = {.kind = LOOM_VALUE_INT, .integer = BEFORE};
    loom_state_item items[] = {{.key = "state_dict", .module = r->parallel},
        {.key = "optimizer", .optimizer = r->optimizer}, {.key = "iteration", .value = &iteration}};
    loom_state state = {items, 3};
    loom_load_report report = {0};
    if (!j->load) {
        LOOM_TRY(train(r));
    } else {
        LOOM_TRY(loom_fabric_load(r->fabric, j->load, &state, true, &report));
    }
    loom_status status = loom_fabric_save(r->fabric, j->save, &state, NULL, 0);
    loom_load_report_free(&report);
    return status;
}

static loom_status rank_body(loom_rank *rank, void *argument) {
    run r = {0};
    loom_status status = start(rank, argument, &r);
    if (!status)
        status = go(argument, &r);
    loom_batches_destroy(r.batches);
    loom_parallel_destroy(r.parallel);
    loom_fabric_destroy(r.fabric);
    loom_dataset_destroy(&r.dataset);
    return status;
}

static void run_job(const place *at, const kind *of, const char *load, const char *save) {
    job j = {.at = *at, .of = *of, .load = load, .save = save};
    must_run(ranks_of(at), rank_body, &j);
}

static void must(loom_status status, const char *what) {
    if (status)
        fail_msg("%s: %s", what, loom_error_message());
}

static void reshard(const char *in, const char *out, const place *at, const char *form, const char *what) {
    enum { TEXTS = 12 };
    char texts[TEXTS][96];
    const char *overrides[TEXTS];
    loom_reshard_options options = {.optimizer_form = form};
    loom_tool_outcome outcome;
    const char *sharded = at->sharded ? "true" : "false";
    snprintf(texts[0], sizeof texts[0], "strategy.tensor_model_parallel_size=%d", at->tp);
    snprintf(texts[1], sizeof texts[1], "strategy.pipeline_model_parallel_size=%d", at->pp);
    snprintf(texts[2], sizeof texts[2], "strategy.virtual_pipeline_model_parallel_size=%s", at->vpp ? "2" : "null");
    snprintf(texts[3], sizeof texts[3], "strategy.ddp.use_distributed_optimizer=%s", sharded);
    snprintf(texts[4], sizeof texts[4], "strategy.ddp.overlap_grad_reduce=%s", sharded);
    snprintf(texts[5], sizeof texts[5], "strategy.ddp.bucket_size=%s", at->sharded ? "1500" : "null");
    snprintf(texts[6], sizeof texts[6], "ranks=%d", ranks_of(at));
    snprintf(texts[7], sizeof texts[7], "strategy.dist_ckpt_optim_fully_reshardable=%s", at->fully ? "true" : "false");
    snprintf(texts[8], sizeof texts[8], "strategy.expert_model_parallel_size=%d", at->ep ? at->ep : 1);
    snprintf(texts[9], sizeof texts[9], "strategy.expert_tensor_parallel_size=%s",
        at->etp == 0   ? "null"
        : at->etp == 1 ? "1"
                       : "2");
    snprintf(texts[10], sizeof texts[10], "strategy.context_parallel_size=%d", at->cp ? at->cp : 1);
    snprintf(texts[11], sizeof texts[11], "strategy.sequence_parallel=%s", at->ep && at->tp > 1 ? "true" : "false");
    for (int i = 0; i < TEXTS; i++)
        overrides[i] = texts[i];
    must(loom_checkpoint_reshard(in, out, overrides, TEXTS, &options, &outcome), what);
    assert_int_equal(outcome.ranks, ranks_of(at));
    assert_int_equal(outcome.dropped_objects, 0);
}

/* ---- comparing */

static void same_chunks(const loom_checkpoint_tensor *a, const loom_checkpoint_tensor *b, const char *what) {
    if (a->chunk_count != b->chunk_count)
        fail_msg(
            "%s, %s: %lld chunks, expected %lld", what, a->name, (long long)b->chunk_count, (long long)a->chunk_count);
    for (int64_t i = 0; i < a->chunk_count; i++) {
        bool found = false;
        for (int64_t k = 0; k < b->chunk_count && !found; k++)
            found = memcmp(a->chunks[i].offsets, b->chunks[k].offsets, sizeof a->chunks[i].offsets) == 0 &&
                    memcmp(a->chunks[i].sizes, b->chunks[k].sizes, sizeof a->chunks[i].sizes) == 0 &&
                    strcmp(a->chunks[i].file, b->chunks[k].file) == 0;
        if (!found)
            fail_msg("%s, %s: chunk %lld is not there, or in another file", what, a->name, (long long)i);
    }
}

static void same_tensor(const loom_checkpoint *a, const loom_checkpoint *b, int64_t number, const char *what) {
    const loom_checkpoint_tensor *x = loom_checkpoint_tensor_at(a, number), *y = loom_checkpoint_tensor_at(b, number);
    const int64_t zero[LOOM_CHECKPOINT_MAX_DIMS] = {0};
    if (strcmp(x->name, y->name) != 0 || x->dtype != y->dtype || x->dims != y->dims ||
        memcmp(x->shape, y->shape, sizeof x->shape) != 0)
        fail_msg("%s: %s of %s, expected %s of %s, or another shape", what, y->name, loom_dtype_name(y->dtype), x->name,
            loom_dtype_name(x->dtype));
    same_chunks(x, y, what);
    size_t bytes = (size_t)x->elements * loom_dtype_size(x->dtype);
    char *left = malloc(bytes + 1), *right = malloc(bytes + 1);
    assert_true(left && right);
    must(loom_checkpoint_read(a, x, zero, x->shape, x->dtype, left), what);
    must(loom_checkpoint_read(b, y, zero, y->shape, y->dtype, right), what);
    if (memcmp(left, right, bytes) != 0)
        fail_msg("%s: %s has other bits", what, x->name);
    free(left);
    free(right);
}

static void same_value(const loom_value *a, const loom_value *b, const char *name, const char *what) {
    char *left = NULL, *right = NULL;
    must(loom_value_to_json(a, 0, &left), what);
    must(loom_value_to_json(b, 0, &right), what);
    if (strcmp(left, right) != 0)
        fail_msg("%s, %s:\n%s\nexpected\n%s", what, name, right, left);
    free(left);
    free(right);
}

static void same_object(const loom_checkpoint *a, const loom_checkpoint *b, int64_t number, const char *what) {
    const loom_checkpoint_object *x = loom_checkpoint_object_at(a, number), *y = loom_checkpoint_object_at(b, number);
    const loom_value *left = NULL, *right = NULL;
    loom_value_pool *pool = NULL;
    if (strcmp(x->name, y->name) != 0)
        fail_msg("%s: object %s, expected %s", what, y->name, x->name);
    must(loom_value_pool_create(&pool), what);
    must(loom_checkpoint_read_object(a, x, pool, &left), what);
    must(loom_checkpoint_read_object(b, y, pool, &right), what);
    same_value(left, right, x->name, what);
    loom_value_pool_destroy(pool);
}

static void same_context(const char *a, const char *b, const char *what) {
    char command[3 * PATH];
    snprintf(command, sizeof command, "cmp '%s/context/run.yaml' '%s/context/run.yaml'", a, b);
    if (system(command) != 0)
        fail_msg("%s: the contexts differ", what);
}

static void same_checkpoint(const char *wanted, const char *found, const char *what) {
    loom_checkpoint *a = NULL, *b = NULL;
    must(loom_checkpoint_open(wanted, &a), what);
    must(loom_checkpoint_open(found, &b), what);
    const loom_checkpoint_info *x = loom_checkpoint_get_info(a), *y = loom_checkpoint_get_info(b);
    if (x->tensors != y->tensors || x->objects != y->objects || x->files != y->files)
        fail_msg("%s: %lld tensors, %lld objects, %lld files; expected %lld, %lld, %lld", what, (long long)y->tensors,
            (long long)y->objects, (long long)y->files, (long long)x->tensors, (long long)x->objects,
            (long long)x->files);
    for (int64_t i = 0; i < x->tensors; i++)
        same_tensor(a, b, i, what);
    for (int64_t i = 0; i < x->objects; i++)
        same_object(a, b, i, what);
    same_value(x->common, y->common, "common state", what);
    loom_checkpoint_close(a);
    loom_checkpoint_close(b);
    same_context(wanted, found, what);
}

/* ---- claims */

static void clear(const char *path) {
    char command[PATH + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void folder(char path[PATH], const char *name) {
    snprintf(path, PATH, "%s/reshard_offline-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), name);
    clear(path);
}

static const place places[] = {{.tp = 1, .pp = 1, .dp = 1}, {.tp = 2, .pp = 1, .dp = 1, .sharded = true},
    {.tp = 1, .pp = 2, .dp = 1, .sharded = true}, {.tp = 2, .pp = 2, .dp = 1},
    {.tp = 2, .pp = 1, .dp = 2, .sharded = true}, {.tp = 1, .pp = 2, .vpp = 2, .dp = 1, .sharded = true},
    {.tp = 1, .pp = 1, .dp = 3, .sharded = true}, {.tp = 2, .pp = 1, .dp = 2, .sharded = true, .fully = true}};
static const place with_experts[] = {{.tp = 2, .pp = 1, .dp = 2, .ep = 1, .sharded = true},
    {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .sharded = true},
    {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .etp = 2, .sharded = true},
    {.tp = 2, .pp = 1, .dp = 2, .ep = 4, .etp = 1, .sharded = true},
    {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .cp = 2, .sharded = true},
    {.tp = 1, .pp = 2, .dp = 2, .ep = 2, .sharded = true},
    {.tp = 1, .pp = 1, .dp = 2, .ep = 1, .etp = 2, .sharded = true},
    {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .sharded = true, .fully = true}};
enum { PLACES = sizeof places / sizeof *places };
_Static_assert(sizeof with_experts == sizeof places, "as many");

/* From every layout, or from one of each form, to all. */
static void all_pairs(const kind *of, const place *all, bool from_all) {
    char first[PATH], second[PATH], third[PATH], what[128];
    folder(first, "first");
    folder(second, "second");
    folder(third, "third");
    for (int a = 0; a < PLACES; a++) {
        if (!from_all && a != 3 && a != 6 && a != 7)
            continue;
        run_job(&all[a], of, NULL, first);
        for (int b = 0; b < PLACES; b++) {
            snprintf(what, sizeof what, "layout %d to %d, %s, %s%s%s", a, b, of->tied ? "tied" : "untied",
                of->precision ? of->precision : "32", of->narrow ? ", gradients too" : "",
                all->ep ? ", with experts" : "");
            run_job(&all[b], of, first, second);
            reshard(first, third, &all[b], NULL, what);
            same_checkpoint(second, third, what);
            clear(third);
        }
    }
    clear(first);
    clear(second);
}

static void a_resharded_checkpoint_is_what_a_run_would_have_written(void **state) {
    (void)state;
    all_pairs(&(kind){0}, places, true);
}

static void tied_embeddings_and_a_third_moment_too(void **state) {
    (void)state;
    all_pairs(&(kind){.tied = true}, places, false);
}

static void weights_of_16_bits_keep_their_masters_and_the_loss_scale(void **state) {
    static const kind kinds[] = {{.precision = "bf16-mixed"}, {.precision = "16-mixed", .tied = true},
        {.precision = "bf16-mixed", .narrow = true}, {.precision = "16-mixed", .loss_scale = 512}};
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        all_pairs(&kinds[i], places, false);
}

static void experts_too(void **state) {
    (void)state;
    all_pairs(&(kind){0}, with_experts, true);
    all_pairs(&(kind){.precision = "16-mixed"}, with_experts, false);
}

/* Through another form of the optimizer nothing is lost. */
static void lead_back(const place *from, const place *through) {
    static const char *const forms[] = {"fully_reshardable", "whole", "dp_reshardable"};
    static const kind kinds[] = {{0}, {.precision = "bf16-mixed"}, {.precision = "16-mixed"}};
    char first[PATH], second[PATH], third[PATH], what[128];
    folder(first, "first");
    folder(second, "second");
    folder(third, "third");
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        run_job(from, &kinds[k], NULL, first);
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
            snprintf(what, sizeof what, "%s, %s", forms[i], kinds[k].precision ? kinds[k].precision : "32");
            reshard(first, second, through, forms[i], what);
            reshard(second, third, from, NULL, what);
            same_checkpoint(first, third, what);
            clear(second);
            clear(third);
        }
    }
    clear(first);
}

static void every_form_of_the_optimizer_leads_back(void **state) {
    (void)state;
    lead_back(&places[4], &places[2]);
    lead_back(&with_experts[2], &with_experts[5]);
}

static int64_t names_with(const loom_checkpoint *checkpoint, const char *prefix) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(checkpoint);
    int64_t found = 0;
    for (int64_t i = 0; i < info->tensors; i++)
        found += strncmp(loom_checkpoint_tensor_at(checkpoint, i)->name, prefix, strlen(prefix)) == 0;
    for (int64_t i = 0; i < info->objects; i++)
        found += strncmp(loom_checkpoint_object_at(checkpoint, i)->name, prefix, strlen(prefix)) == 0;
    return found;
}

/* Megatron-Core chains optimizers where experts are reduced over a group of their own, and there alone: it does not
 * load what is chained otherwise. */
static void experts_at_1_are_among_the_rest(void **state) {
    static const struct {
        place at;
        bool chained, prefixed;
    } cases[] = {{{.tp = 1, .pp = 1, .dp = 2, .ep = 1, .sharded = true}, false, false},
        {{.tp = 1, .pp = 2, .dp = 1, .ep = 1, .sharded = true, .fully = true}, false, false},
        {{.tp = 2, .pp = 1, .dp = 1, .ep = 1, .etp = 2}, false, false},
        {{.tp = 2, .pp = 1, .dp = 1, .ep = 1, .etp = 1, .sharded = true}, true, true},
        {{.tp = 1, .pp = 1, .dp = 2, .ep = 2, .sharded = true, .fully = true}, true, false},
        {{.tp = 1, .pp = 1, .dp = 2, .ep = 2, .sharded = true}, true, true}};
    char path[PATH];
    (void)state;
    folder(path, "chain");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom_checkpoint *checkpoint = NULL;
        run_job(&cases[i].at, &(kind){0}, NULL, path);
        must(loom_checkpoint_open(path, &checkpoint), "chain");
        const loom_value *optimizer = loom_value_get(loom_checkpoint_get_info(checkpoint)->common, "optimizer");
        assert_non_null(optimizer);
        assert_int_equal(optimizer->kind, LOOM_VALUE_DICT);
        assert_true(optimizer->count > 0);
        assert_int_equal(optimizer->items[0]->kind, cases[i].chained ? LOOM_VALUE_INT : LOOM_VALUE_TEXT);
        assert_int_equal(names_with(checkpoint, "chained_") > 0, cases[i].prefixed);
        loom_checkpoint_close(checkpoint);
        clear(path);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resharded_checkpoint_is_what_a_run_would_have_written),
        cmocka_unit_test(tied_embeddings_and_a_third_moment_too),
        cmocka_unit_test(weights_of_16_bits_keep_their_masters_and_the_loss_scale),
        cmocka_unit_test(experts_too),
        cmocka_unit_test(every_form_of_the_optimizer_leads_back),
        cmocka_unit_test(experts_at_1_are_among_the_rest),
    };
    return cmocka_run_group_tests_name("parallel.reshard_offline", tests, NULL, NULL);
}
