/* What a step takes: the bubble of the simulated schedule, bytes of each kind of traffic, memory that other choices
 * free, a million ranks, and the search. */
#include <math.h>
#include <megaloom/plan.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { FIELDS = 12 };

static const char *const common[] = {"steps=1", "model.architecture=llama", "model.num_layers=8",
    "model.hidden_size=256", "model.ffn_hidden_size=1024", "model.num_attention_heads=8", "model.num_query_groups=8",
    "model.seq_length=64", "model.vocab_size=256", "data.kind=mock"};
enum { COMMON = sizeof common / sizeof *common };

typedef struct planned {
    loom_run_config *config;
    loom_plan_options options;
    loom_plan *plan;
} planned;

/* On nodes of four ranks. */
static planned plan_fields(int64_t world, const char *const *fields) {
    const char *all[COMMON + FIELDS];
    int64_t count = COMMON;
    planned p = {.options = loom_plan_options_default()};
    char *not_built = NULL;
    const loom_plan_check check = {.world_size = world};
    memcpy(all, common, sizeof common);
    for (int i = 0; i < FIELDS && fields[i]; i++)
        all[count++] = fields[i];
    p.options.world_size = world;
    p.options.machine.ranks_per_node = 4;
    if (loom_run_config_load_planned(NULL, all, count, &check, &p.config, &not_built) ||
        loom_plan_make(p.config, &p.options, &p.plan))
        fail_msg("%s", loom_error_message());
    free(not_built);
    return p;
}

static void forget(planned *p) {
    loom_plan_destroy(p->plan);
    loom_run_config_destroy(p->config);
}

#define PLAN(world, ...) plan_fields(world, (const char *const[FIELDS]){__VA_ARGS__})

static bool near(double found, double wanted, double share) {
    return fabs(found - wanted) <= share * fabs(wanted);
}

/* With a small vocabulary the stages are nearly equal; then it is (p-1) of (v m + p-1). */
static void the_bubble_is_that_of_the_schedule(void **state) {
    (void)state;
    planned plain = PLAN(4, "strategy.pipeline_model_parallel_size=4", "data.global_batch_size=8");
    planned chunks = PLAN(4, "strategy.pipeline_model_parallel_size=4", "data.global_batch_size=8",
        "strategy.virtual_pipeline_model_parallel_size=2");
    planned none = PLAN(1, "data.global_batch_size=8");
    assert_true(near(plain.plan->bubble, 3.0 / 11, 0.05));
    assert_true(near(chunks.plan->bubble, 3.0 / 19, 0.15));
    assert_true(none.plan->bubble < 1e-9);
    assert_true(plain.plan->bubble_simulated);
    forget(&plain);
    forget(&chunks);
    forget(&none);
}

/* Of so many microbatches warm-up and cool-down are nothing: what is left is that the last stage has the head. */
static void many_microbatches_leave_the_imbalance_of_the_stages(void **state) {
    (void)state;
    planned p = PLAN(4, "strategy.pipeline_model_parallel_size=4", "data.global_batch_size=1000000");
    double sum = 0, most = 0;
    for (int i = 0; i < 4; i++) {
        sum += p.plan->stages[i].flops;
        most = p.plan->stages[i].flops > most ? p.plan->stages[i].flops : most;
    }
    assert_true(p.plan->bubble_simulated);
    assert_true(near(p.plan->bubble, 1 - sum / (4 * most), 0.01));
    assert_int_equal(p.plan->stages[0].microbatches, 4);
    assert_int_equal(p.plan->stages[3].microbatches, 1);
    forget(&p);
}

static void traffic_is_that_of_rings(void **state) {
    (void)state;
    /* 8 ranks: tensor pairs within a node of 4, replicas of dp 2 from node to node. */
    planned p = PLAN(8, "strategy.tensor_model_parallel_size=4", "data.global_batch_size=4");
    const loom_plan_traffic *tensor = &p.plan->traffic[LOOM_PLAN_TENSOR];
    const loom_plan_traffic *gradients = &p.plan->traffic[LOOM_PLAN_GRADIENTS];
    const double x = 64.0 * 256 * 4, share = 3.0 / 4, microbatches = 2;
    /* Each layer all-reduces four times, the embedding and the head once each; the loss three numbers a token. */
    double wanted = microbatches * 2 * share * (8 * 4 * x + 2 * x + 3 * 64 * 4);
    assert_true(near(tensor->rank, wanted, 1e-9));
    assert_true(near(tensor->inside, 8 * wanted, 1e-9));
    assert_true(tensor->across == 0);
    assert_true(near(gradients->rank, 4.0 * (double)p.plan->stages[0].rank_parameters, 0.01));
    assert_true(gradients->inside == 0);
    forget(&p);
    /* A pipeline sends each microbatch once each way over each of its three steps. */
    p = PLAN(4, "strategy.pipeline_model_parallel_size=4", "data.global_batch_size=8");
    assert_true(near(p.plan->traffic[LOOM_PLAN_PIPELINE].inside, 8 * 3 * 2 * x, 1e-9));
    forget(&p);
}

static double share_across(const loom_plan_traffic *t) {
    return t->across / (t->inside + t->across);
}

/* 8 ranks on two nodes, experts over the 4 of each: an expert's two replicas are on different nodes, while of the eight
 * steps of the ring of all replicas two leave a node. */
static void gradients_of_experts_go_round_their_own_replicas(void **state) {
    (void)state;
    planned p =
        PLAN(8, "model.num_moe_experts=4", "model.architecture=mixtral", "strategy.expert_model_parallel_size=4",
            "data.global_batch_size=8", "strategy.ddp.use_distributed_optimizer=true");
    const double experts = 8.0 * 3 * 256 * 1024, dense = (double)p.plan->stages[0].rank_parameters - experts;
    const double of_dense = 8 * 4 * dense * 7 / 8, of_experts = 8 * 4 * experts / 2;
    for (int kind = LOOM_PLAN_GRADIENTS; kind <= LOOM_PLAN_PARAMETERS; kind++) {
        assert_true(near(p.plan->traffic[kind].inside, of_dense * 6 / 8, 0.01));
        assert_true(near(p.plan->traffic[kind].across, of_dense * 2 / 8 + of_experts, 0.01));
    }
    forget(&p);
}

/* Six ranks on nodes of four: {0 … 3}{4, 5}, then {6, 7}{8 … 11}. Of 30 pairs 14 share a node; of six steps of a ring
 * two leave one. */
static void what_leaves_a_node_is_counted_of_every_member_and_group(void **state) {
    (void)state;
    planned pairs = PLAN(1536, "model.num_moe_experts=12", "model.architecture=mixtral",
        "strategy.expert_model_parallel_size=6", "model.moe_token_dispatcher_type=alltoall");
    planned ring = PLAN(1536, "model.num_moe_experts=12", "model.architecture=mixtral",
        "strategy.expert_model_parallel_size=6", "model.moe_token_dispatcher_type=allgather");
    const loom_plan_traffic *a = &pairs.plan->traffic[LOOM_PLAN_EXPERT], *b = &ring.plan->traffic[LOOM_PLAN_EXPERT];
    assert_true(near(share_across(a), 16.0 / 30, 1e-9));
    assert_true(near(share_across(b), 2.0 / 6, 1e-9));
    assert_true(near(b->rank, 6 * a->rank, 1e-9));
    forget(&pairs);
    forget(&ring);
}

/* Four stages of two ranks: the middle of three steps leaves a node, and so does the way back to the first stage, which
 * a microbatch takes once. */
static void a_pipeline_of_two_chunks_goes_back_once(void **state) {
    (void)state;
    planned p = PLAN(8, "strategy.tensor_model_parallel_size=2", "strategy.pipeline_model_parallel_size=4",
        "strategy.virtual_pipeline_model_parallel_size=2", "data.global_batch_size=8");
    const loom_plan_traffic *t = &p.plan->traffic[LOOM_PLAN_PIPELINE];
    assert_true(near(share_across(t), 3.0 / 7, 1e-9));
    assert_true(near(t->inside + t->across, 8.0 * 2 * 7 * 2 * 64 * 256 * 4, 1e-9));
    forget(&p);
}

static void sequence_parallelism_moves_less_between_layers_and_keeps_less(void **state) {
    (void)state;
    planned without = PLAN(4, "strategy.tensor_model_parallel_size=4");
    planned with = PLAN(4, "strategy.tensor_model_parallel_size=4", "strategy.sequence_parallel=true");
    assert_true(with.plan->stages[0].memory.activations < 0.8 * without.plan->stages[0].memory.activations);
    forget(&without);
    forget(&with);
}

static void recomputation_trades_memory_for_operations(void **state) {
    (void)state;
    planned none = PLAN(1, "data.micro_batch_size=4");
    planned selective = PLAN(1, "data.micro_batch_size=4", "model.recompute=selective");
    planned full = PLAN(1, "data.micro_batch_size=4", "model.recompute=full");
    const loom_plan *const plans[] = {none.plan, selective.plan, full.plan};
    for (int i = 1; i < 3; i++) {
        assert_true(plans[i]->stages[0].memory.activations < plans[i - 1]->stages[0].memory.activations);
        assert_true(plans[i]->recompute_flops_per_step > plans[i - 1]->recompute_flops_per_step);
        assert_true(plans[i]->flops_per_step == plans[0]->flops_per_step);
    }
    forget(&none);
    forget(&selective);
    forget(&full);
}

static void a_distributed_optimizer_shares_its_state_out(void **state) {
    (void)state;
    planned plain = PLAN(8, "precision=bf16-mixed");
    planned shared = PLAN(8, "precision=bf16-mixed", "strategy.ddp.use_distributed_optimizer=true");
    const loom_plan_memory *a = &plain.plan->stages[0].memory, *b = &shared.plan->stages[0].memory;
    assert_true(near(a->optimizer, 6 * a->weights, 0.001)); /* 12 bytes beside 2 */
    assert_true(near(b->optimizer, a->optimizer / 8, 0.01));
    assert_true(near(a->gradients, 2 * a->weights, 1e-9));
    forget(&plain);
    forget(&shared);
}

static void a_million_ranks_are_planned(void **state) {
    (void)state;
    planned p = PLAN(1048576, "strategy.tensor_model_parallel_size=8", "strategy.pipeline_model_parallel_size=8",
        "data.global_batch_size=1048576", "strategy.ddp.use_distributed_optimizer=true");
    assert_int_equal(p.plan->world, 1048576);
    assert_int_equal(p.plan->data, 16384);
    assert_int_equal(p.plan->microbatches, 64);
    forget(&p);
}

static void experts_are_shared_out_over_their_ranks(void **state) {
    (void)state;
    planned one = PLAN(8, "model.num_moe_experts=8", "model.architecture=mixtral");
    planned all = PLAN(8, "model.num_moe_experts=8", "model.architecture=mixtral",
        "strategy.expert_model_parallel_size=8", "model.moe_token_dispatcher_type=alltoall");
    const double experts = 8.0 * 8 * 3 * 256 * 1024, router = 8.0 * 8 * 256;
    assert_true(one.plan->parameters == all.plan->parameters);
    double dense = (double)one.plan->stages[0].rank_parameters - experts;
    assert_true((double)all.plan->stages[0].rank_parameters == dense + experts / 8);
    assert_true(dense > router);
    assert_true(one.plan->traffic[LOOM_PLAN_EXPERT].rank == 0);
    assert_true(all.plan->traffic[LOOM_PLAN_EXPERT].rank > 0);
    /* Nodes of four: of seven other ranks three share the node. */
    const loom_plan_traffic *t = &all.plan->traffic[LOOM_PLAN_EXPERT];
    assert_true(near(t->across / (t->inside + t->across), 4.0 / 7, 1e-9));
    forget(&one);
    forget(&all);
}

static void context_ranks_share_a_sequence(void **state) {
    (void)state;
    planned one = PLAN(1, NULL), two = PLAN(2, "strategy.context_parallel_size=2");
    double whole = one.plan->stages[0].memory.activations, half = two.plan->stages[0].memory.activations;
    assert_true(near(half, whole / 2, 0.05));
    /* Keys and values of 32 positions go to the other rank forward and backward, their gradients there and home. */
    assert_true(near(two.plan->traffic[LOOM_PLAN_CONTEXT].rank, 4 * 8 * 32 * 2 * 256 * 4.0, 1e-9));
    forget(&one);
    forget(&two);
}

static void what_binds_is_named(void **state) {
    (void)state;
    planned p = PLAN(4, "strategy.pipeline_model_parallel_size=4");
    assert_non_null(strstr(p.plan->binds, "waiting in the pipeline"));
    loom_plan_destroy(p.plan);
    p.options.machine.memory = 1e6;
    assert_int_equal(loom_plan_make(p.config, &p.options, &p.plan), LOOM_OK);
    assert_non_null(strstr(p.plan->binds, "memory: a rank of stage"));
    forget(&p);
}

static void a_search_gives_what_fits_fastest_first_and_why_others_fall(void **state) {
    (void)state;
    planned p = PLAN(8, "data.global_batch_size=16");
    loom_plan_search *search;
    double all = p.plan->stages[0].memory.total, tried = 0;
    p.options.machine.memory = 0.6 * all;
    assert_int_equal(loom_plan_search_make(p.config, &p.options, &search), LOOM_OK);
    assert_true(search->count > 0);
    assert_true(search->fall_count >= 3);
    for (int64_t i = 0; i < search->count; i++) {
        const loom_plan_candidate *c = &search->candidates[i];
        assert_true(c->memory <= p.options.machine.memory);
        assert_int_equal(c->tensor * c->pipeline * c->data, 8);
        if (i > 0)
            assert_true(c->tokens_per_second <= search->candidates[i - 1].tokens_per_second);
    }
    for (int64_t i = 0; i < search->fall_count; i++)
        tried += (double)search->falls[i].count;
    assert_true((double)search->count + tried == (double)search->tried);
    loom_plan_search_destroy(search);
    loom_plan_search_destroy(NULL);
    forget(&p);
}

/* The step's seconds, or -1 where the fields make no plan or it does not fit. */
static double seconds_of(const char *const *fields, int64_t count, const loom_plan_options *options) {
    const loom_plan_check check = {.world_size = options->world_size};
    loom_run_config *config = NULL;
    loom_plan *plan = NULL;
    char *not_built = NULL;
    double seconds = -1;
    if (loom_run_config_load_planned(NULL, fields, count, &check, &config, &not_built) == LOOM_OK &&
        loom_plan_make(config, options, &plan) == LOOM_OK &&
        plan->stages[plan->worst].memory.total <= options->machine.memory)
        seconds = plan->step_seconds;
    loom_plan_destroy(plan);
    loom_run_config_destroy(config);
    free(not_built);
    return seconds;
}

typedef struct choice {
    int64_t tp, pp, vp, ep, micro;
} choice;

static double seconds_of_choice(const choice *c, const char *recompute, const loom_plan_options *options) {
    char texts[6][80];
    const char *fields[COMMON + 11];
    int64_t count = COMMON;
    memcpy(fields, common, sizeof common);
    fields[count++] = "model.architecture=mixtral";
    fields[count++] = "model.num_moe_experts=4";
    fields[count++] = "data.global_batch_size=16";
    fields[count++] = c->tp > 1 ? "strategy.sequence_parallel=true" : "strategy.sequence_parallel=false";
    snprintf(texts[0], sizeof *texts, "strategy.tensor_model_parallel_size=%d", (int)c->tp);
    snprintf(texts[1], sizeof *texts, "strategy.pipeline_model_parallel_size=%d", (int)c->pp);
    snprintf(texts[2], sizeof *texts, "strategy.expert_model_parallel_size=%d", (int)c->ep);
    snprintf(texts[3], sizeof *texts, "data.micro_batch_size=%d", (int)c->micro);
    snprintf(texts[4], sizeof *texts, "model.recompute=%s", recompute);
    snprintf(texts[5], sizeof *texts, "strategy.virtual_pipeline_model_parallel_size=%d", (int)c->vp);
    for (int i = 0; i < (c->vp > 1 ? 6 : 5); i++)
        fields[count++] = texts[i];
    return seconds_of(fields, count, options);
}

static double seconds_found(const loom_plan_search *search, const choice *c) {
    for (int64_t i = 0; i < search->count; i++) {
        const loom_plan_candidate *found = &search->candidates[i];
        if (found->tensor == c->tp && found->pipeline == c->pp && found->chunks == c->vp && found->expert == c->ep &&
            found->micro_batch_size == c->micro)
            return found->step_seconds;
    }
    return -1;
}

/* Each layout planned by itself, as its user would. */
static void a_search_finds_all_that_fit_and_nothing_else(void **state) {
    static const char *const recomputes[] = {"none", "selective", "full"};
    (void)state;
    planned p = PLAN(8, "model.architecture=mixtral", "model.num_moe_experts=4", "data.global_batch_size=16");
    loom_plan_search *search;
    int64_t fit = 0, with_tensor = 0;
    p.options.machine.memory = 60e6;
    assert_int_equal(loom_plan_search_make(p.config, &p.options, &search), LOOM_OK);
    for (choice c = {.tp = 1}; c.tp <= 8; c.tp *= 2)
        for (c.pp = 1; c.tp * c.pp <= 8; c.pp *= 2)
            for (c.vp = 1; c.vp <= (c.pp > 1 ? 8 : 1); c.vp++)
                for (c.ep = 1; c.ep <= 4; c.ep *= 2)
                    for (c.micro = 1; c.micro <= 8; c.micro *= 2) {
                        double seconds = -1;
                        for (int r = 0; r < 3 && seconds < 0; r++)
                            seconds = seconds_of_choice(&c, recomputes[r], &p.options);
                        assert_true(near(seconds_found(search, &c), seconds, 1e-9));
                        fit += seconds > 0;
                        with_tensor += seconds > 0 && c.tp > 1;
                    }
    assert_int_equal(search->count, fit);
    assert_true(with_tensor > 0);
    loom_plan_search_destroy(search);
    forget(&p);
}

/* 14 layers, embedding and loss: 16 chunks of one. */
static void a_search_cuts_the_embedding_and_the_loss_as_layers(void **state) {
    (void)state;
    planned p = PLAN(2, "model.num_layers=14", "model.account_for_embedding_in_pipeline_split=true",
        "model.account_for_loss_in_pipeline_split=true", "data.global_batch_size=4");
    loom_plan_search *search;
    assert_int_equal(loom_plan_search_make(p.config, &p.options, &search), LOOM_OK);
    assert_true(seconds_found(search, &(choice){1, 2, 8, 1, 1}) > 0);
    loom_plan_search_destroy(search);
    forget(&p);
}

/* The ranks of the file, more than there are threads; a length that two context ranks of two tensor ranks can cut and
 * of four cannot; heads of which each context rank needs a whole number. */
static void a_search_asks_what_a_run_is_asked(void **state) {
    static const char *const lengths[] = {"model.seq_length=36", "model.seq_length=64"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        planned p = PLAN(0, "ranks=8192", "strategy.context_parallel_size=2", "model.cp_comm_type=a2a", lengths[i],
            "data.global_batch_size=8192");
        loom_plan_search *search;
        assert_int_equal(loom_plan_search_make(p.config, &p.options, &search), LOOM_OK);
        assert_true(seconds_found(search, &(choice){2, 1, 1, 1, 1}) > 0);
        assert_true((seconds_found(search, &(choice){4, 1, 1, 1, 1}) > 0) == (i == 1));
        assert_true(seconds_found(search, &(choice){8, 1, 1, 1, 1}) < 0);
        loom_plan_search_destroy(search);
        forget(&p);
    }
}

/* Eight context ranks on two nodes, heads exchanged within nodes where there are levels. */
static void ways_of_context_ranks_move_the_sum_of_their_layers(void **state) {
    static const char *const ways[] = {"p2p", "all_gather", "a2a", "a2a+p2p"};
    const char *levels = "model.hierarchical_context_parallel_sizes=[4, 2]", *cp = "strategy.context_parallel_size=8";
    double rank = 0, inside = 0, across = 0, seconds = 0, by_heads = 0;
    (void)state;
    for (int i = 0; i < 4; i++) {
        char way[64];
        snprintf(way, sizeof way, "model.cp_comm_type=%s", ways[i]);
        planned p = PLAN(8, cp, levels, way);
        const loom_plan_traffic *t = &p.plan->traffic[LOOM_PLAN_CONTEXT];
        assert_true(t->inside > 0 && t->across > 0);
        /* Of four ranks three quarters go to others, of eight seven eighths. */
        assert_true(i < 3 || near(t->inside / (3.0 / 4), by_heads / (7.0 / 8), 1e-9));
        by_heads = i == 2 ? t->inside + t->across : by_heads;
        rank += t->rank / 4;
        inside += t->inside / 4;
        across += t->across / 4;
        seconds += p.plan->exposed_seconds[LOOM_PLAN_CONTEXT] / 4;
        forget(&p);
    }
    planned p =
        PLAN(8, cp, levels, "model.cp_comm_type=[p2p, all_gather, a2a, a2a+p2p, a2a+p2p, a2a, all_gather, p2p]");
    const loom_plan_traffic *t = &p.plan->traffic[LOOM_PLAN_CONTEXT];
    assert_true(near(t->rank, rank, 1e-9) && near(t->inside, inside, 1e-9) && near(t->across, across, 1e-9));
    assert_true(near(p.plan->exposed_seconds[LOOM_PLAN_CONTEXT], seconds, 1e-9));
    forget(&p);
}

#define SHARING                                                                                                        \
    "model.num_moe_experts=8", "strategy.expert_model_parallel_size=8", "model.moe_token_dispatcher_type=alltoall",    \
        "data.global_batch_size=16"

static double expert_seconds(const char *width, const char *overlap, const char *schedule, double *bytes) {
    planned p = PLAN(8, SHARING, width, overlap, schedule);
    double seconds = p.plan->exposed_seconds[LOOM_PLAN_EXPERT];
    *bytes = p.plan->traffic[LOOM_PLAN_EXPERT].rank;
    forget(&p);
    return seconds;
}

/* What is hidden is no more than the shared expert computes, and no more than there is; bytes are the same. */
static void exchanges_pass_under_a_shared_expert(void **state) {
    static const char *const widths[] = {"model.moe_shared_expert_intermediate_size=8",
        "model.moe_shared_expert_intermediate_size=16", "model.moe_shared_expert_intermediate_size=1048576"};
    const char *plain = "schedule=1f1b", *off = "model.moe_shared_expert_overlap=false";
    const char *on = "model.moe_shared_expert_overlap=true";
    double whole[3], rest[3], bytes[6];
    (void)state;
    for (int i = 0; i < 3; i++) {
        whole[i] = expert_seconds(widths[i], off, plain, &bytes[2 * i]);
        rest[i] = expert_seconds(widths[i], on, plain, &bytes[2 * i + 1]);
        assert_true(bytes[2 * i] == bytes[2 * i + 1] && whole[i] > 0);
    }
    assert_true(rest[0] > 0 && near(whole[1] - rest[1], 2 * (whole[0] - rest[0]), 1e-6));
    assert_true(fabs(rest[2]) < 1e-9 * whole[2]);
    /* A backward in two halves has the input's alone to compute then: two of three parts are left. */
    double halves = expert_seconds(widths[0], on, "schedule=zero-bubble", &bytes[0]);
    assert_true(near(whole[0] - halves, (whole[0] - rest[0]) * 2 / 3, 1e-6));
}

static void sizes_beyond_all_numbers_are_refused(void **state) {
    static const char *const extremes[] = {"data.micro_batch_size=9007199254740992",
        "model.moe_ffn_hidden_size=9007199254740992", "model.moe_router_topk=9007199254740992",
        "model.moe_shared_expert_intermediate_size=9007199254740992", "model.num_moe_experts=9007199254740992"};
    (void)state;
    for (size_t i = 0; i < sizeof extremes / sizeof *extremes; i++) {
        const char *fields[COMMON + 3];
        const loom_plan_check check = {.world_size = 1};
        const loom_plan_options options = loom_plan_options_default();
        loom_run_config *config = NULL;
        loom_plan *plan = NULL;
        char *not_built = NULL, field[64];
        memcpy(fields, common, sizeof common);
        fields[COMMON] = "model.num_moe_experts=16384";
        fields[COMMON + 1] = "model.architecture=mixtral";
        fields[COMMON + 2] = extremes[i];
        snprintf(field, sizeof field, "%.*s", (int)strcspn(extremes[i], "="), extremes[i]);
        if (i > 0) { /* the model is judged by itself */
            assert_int_equal(
                loom_run_config_load_planned(NULL, fields, COMMON + 3, &check, &config, &not_built), LOOM_ERR_CONFIG);
            assert_non_null(strstr(loom_error_message(), field));
            continue;
        }
        assert_int_equal(loom_run_config_load_planned(NULL, fields, COMMON + 3, &check, &config, &not_built), LOOM_OK);
        assert_int_equal(loom_plan_make(config, &options, &plan), LOOM_ERR_CONFIG);
        assert_non_null(strstr(loom_error_message(), "too large to plan"));
        free(not_built);
        loom_run_config_destroy(config);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bubble_is_that_of_the_schedule),
        cmocka_unit_test(many_microbatches_leave_the_imbalance_of_the_stages),
        cmocka_unit_test(traffic_is_that_of_rings),
        cmocka_unit_test(gradients_of_experts_go_round_their_own_replicas),
        cmocka_unit_test(what_leaves_a_node_is_counted_of_every_member_and_group),
        cmocka_unit_test(a_pipeline_of_two_chunks_goes_back_once),
        cmocka_unit_test(sequence_parallelism_moves_less_between_layers_and_keeps_less),
        cmocka_unit_test(recomputation_trades_memory_for_operations),
        cmocka_unit_test(a_distributed_optimizer_shares_its_state_out),
        cmocka_unit_test(a_million_ranks_are_planned),
        cmocka_unit_test(experts_are_shared_out_over_their_ranks),
        cmocka_unit_test(context_ranks_share_a_sequence),
        cmocka_unit_test(what_binds_is_named),
        cmocka_unit_test(ways_of_context_ranks_move_the_sum_of_their_layers),
        cmocka_unit_test(exchanges_pass_under_a_shared_expert),
        cmocka_unit_test(sizes_beyond_all_numbers_are_refused),
        cmocka_unit_test(a_search_gives_what_fits_fastest_first_and_why_others_fall),
        cmocka_unit_test(a_search_finds_all_that_fit_and_nothing_else),
        cmocka_unit_test(a_search_asks_what_a_run_is_asked),
        cmocka_unit_test(a_search_cuts_the_embedding_and_the_loss_as_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
