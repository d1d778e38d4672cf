/* Published configurations: exact numbers of parameters, and the operations that the papers' formulas give. */
#include <math.h>
#include <megaloom/plan.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct planned {
    loom_run_config *config;
    char *not_built;
    loom_plan *plan;
} planned;

static planned plan_file(const char *name, int64_t world, const char *machine) {
    char path[512];
    planned p = {0};
    loom_plan_options options = loom_plan_options_default();
    const loom_plan_check check = {.world_size = world};
    snprintf(path, sizeof path, MEGALOOM_TESTS "/../examples/plan/%s.yaml", name);
    options.world_size = world;
    assert_true(loom_plan_machine_find(machine, &options.machine));
    if (loom_run_config_load_planned(path, NULL, 0, &check, &p.config, &p.not_built) ||
        loom_plan_make(p.config, &options, &p.plan))
        fail_msg("%s: %s", name, loom_error_message());
    return p;
}

static void forget(planned *p) {
    loom_plan_destroy(p->plan);
    loom_run_config_destroy(p->config);
    free(p->not_built);
}

/* Narayanan et al. 2021, section 5: P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) parameters; to them come the weight
 * and bias of the last norm. F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) operations, a quarter of them recomputed, but
 * for the head's: 72 l h^2 (1 + s/(6h) + V/(12 l h)) for a token without recomputation. */
static void check_narayanan(const loom_plan *plan, double l, double h, double v, double s) {
    double parameters = 12 * l * h * h + 13 * l * h + (v + s) * h + 2 * h;
    double flops = 72 * l * h * h * (1 + s / (6 * h) + v / (12 * l * h));
    assert_true((double)plan->parameters == parameters);
    assert_true(fabs(plan->flops_per_token_full_attention / flops - 1) < 1e-12);
}

static void gpt3_has_175_billion_parameters(void **state) {
    (void)state;
    planned p = plan_file("gpt3-175b", 0, "a100");
    assert_int_equal(p.plan->parameters, 174615846912);
    check_narayanan(p.plan, 96, 12288, 51200, 2048);
    assert_string_equal(p.not_built, "");
    assert_int_equal(p.plan->tensor, 8);
    assert_int_equal(p.plan->pipeline, 8);
    forget(&p);
}

static void a_trillion_parameters_on_3072_ranks(void **state) {
    (void)state;
    planned p = plan_file("gpt-1t", 0, "a100");
    assert_int_equal(p.plan->parameters, 1008038758400);
    check_narayanan(p.plan, 128, 25600, 51200, 2048);
    /* Recomputed is the forward of all layers: 24 h^2 + 4 s h, attention by half. */
    const double l = 128, h = 25600, tokens = 3072.0 * 2048, seen = 2049.0 / 2;
    assert_true(fabs(p.plan->recompute_flops_per_step / (tokens * l * (24 * h * h + 4 * seen * h)) - 1) < 1e-12);
    assert_int_equal(p.plan->world, 3072);
    assert_true(p.plan->stages[p.plan->worst].memory.total < p.plan->memory_limit);
    forget(&p);
}

/* 6 N operations a token, as the paper counts its 3.8e25 for 15.6e12 tokens; what attention and the embedding, which
 * multiplies nothing, change is told apart. */
static void llama_405b_is_cut_as_published(void **state) {
    (void)state;
    planned p = plan_file("llama3-405b", 16384, "h100");
    assert_int_equal(p.plan->parameters, 405853388800);
    const double n = 405853388800.0, embedding = 128256.0 * 16384, norms = (2 * 126 + 1) * 16384.0;
    const double l = 126, seen = 8193.0 / 2, heads = 128 * 128;
    double flops = 6 * (n - embedding - norms) + 3 * l * 4 * seen * heads;
    assert_true(fabs(p.plan->flops_per_token / flops - 1) < 1e-12);
    assert_true(fabs(6 * n * 15.6e12 / 3.8e25 - 1) < 0.01);
    /* 126 layers, the embedding and the loss: 128 over 16 stages. */
    assert_int_equal(p.plan->stage_count, 16);
    assert_int_equal(p.plan->stages[0].layers, 7);
    assert_int_equal(p.plan->stages[15].layers, 7);
    for (int i = 1; i < 15; i++)
        assert_int_equal(p.plan->stages[i].layers, 8);
    assert_string_equal(p.not_built, "");
    forget(&p);
}

static void mixtral_uses_13_of_its_47_billion(void **state) {
    (void)state;
    planned p = plan_file("mixtral-8x7b", 0, "h100");
    assert_int_equal(p.plan->parameters, 46702792704);
    assert_int_equal(p.plan->active_parameters, 12879925248);
    const double seen = 4097.0 / 2, embedding = 32000.0 * 4096, norms = (2 * 32 + 1) * 4096.0;
    double flops = 6 * (12879925248.0 - embedding - norms) + 3 * 32 * 4 * seen * 4096;
    assert_true(fabs(p.plan->flops_per_token / flops - 1) < 1e-12);
    assert_true(p.plan->traffic[LOOM_PLAN_EXPERT].rank > 0);
    forget(&p);
}

/* Activations of a layer, bytes for each of s*b*h, told by a layer more. */
static double bytes_of_a_layer(const char *recompute) {
    double activations[2];
    for (int i = 0; i < 2; i++) {
        char layers[32], kept[32];
        snprintf(layers, sizeof layers, "model.num_layers=%d", 8 + i);
        snprintf(kept, sizeof kept, "model.recompute=%s", recompute);
        const char *fields[] = {"steps=1", "model.architecture=gpt2", "model.hidden_size=12288",
            "model.num_attention_heads=96", "model.seq_length=2048", "model.vocab_size=51200", "data.kind=mock",
            "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "precision=bf16-mixed", layers, kept};
        const loom_plan_check check = {.world_size = 0};
        const loom_plan_options options = loom_plan_options_default();
        loom_run_config *config = NULL;
        loom_plan *plan = NULL;
        char *not_built = NULL;
        if (loom_run_config_load_planned(NULL, fields, sizeof fields / sizeof *fields, &check, &config, &not_built) ||
            loom_plan_make(config, &options, &plan))
            fail_msg("%s", loom_error_message());
        activations[i] = plan->stages[0].memory.activations;
        loom_plan_destroy(plan);
        loom_run_config_destroy(config);
        free(not_built);
    }
    return (activations[1] - activations[0]) / (2048.0 * 12288);
}

/* Korthikanti et al. 2023: 34 + 5 a s/h, 34 without the core of attention, 2 where a layer is recomputed. Masks of
 * dropout (2) and scores are not kept here, but an fp32 number of each query and head (4 a/h); beside these the
 * statistics and widened weights of norms. */
static void a_layer_keeps_what_the_paper_counts_without_masks_and_scores(void **state) {
    (void)state;
    const double heads = 96, h = 12288, of_norms = 0.006;
    assert_true(fabs(bytes_of_a_layer("none") - 32 - 4 * heads / h) < of_norms);
    assert_true(fabs(bytes_of_a_layer("selective") - 32) < of_norms);
    assert_true(fabs(bytes_of_a_layer("full") - 2) < of_norms);
}

static void an_encoder_is_refused_by_name(void **state) {
    static const char *const fields[] = {"steps=1", "model.architecture=t5", "model.num_layers=2",
        "model.hidden_size=8", "model.num_attention_heads=2", "model.seq_length=8", "model.vocab_size=16",
        "data.kind=mock"};
    const loom_plan_check check = {.world_size = 0};
    const loom_plan_options options = loom_plan_options_default();
    loom_run_config *config = NULL;
    loom_plan *plan = NULL;
    char *not_built = NULL;
    (void)state;
    assert_int_equal(loom_run_config_load_planned(NULL, fields, 8, &check, &config, &not_built), LOOM_OK);
    assert_int_equal(loom_plan_make(config, &options, &plan), LOOM_ERR_UNSUPPORTED);
    assert_non_null(strstr(loom_error_message(), "not supported yet"));
    free(not_built);
    loom_run_config_destroy(config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt3_has_175_billion_parameters),
        cmocka_unit_test(a_trillion_parameters_on_3072_ranks),
        cmocka_unit_test(llama_405b_is_cut_as_published),
        cmocka_unit_test(mixtral_uses_13_of_its_47_billion),
        cmocka_unit_test(a_layer_keeps_what_the_paper_counts_without_masks_and_scores),
        cmocka_unit_test(an_encoder_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
