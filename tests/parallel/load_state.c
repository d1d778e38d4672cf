/* Loading a state: what is refused, what a load that is not strict leaves alone, and what comes back. The checkpoint is
 * one of the real Megatron-Core's (tests/golden/ckpt), written at two tensor and two pipeline ranks. */
#include "parallel/support.h"
#include <megaloom/state.h>

enum { HIDDEN = 16 };

static const char checkpoint[] = MEGALOOM_TESTS "/golden/ckpt/tp2_pp2_fully_reshardable";

/* The model that the checkpoint holds. */
static loom_model_config whole_config(void) {
    loom_model_config config = loom_model_config_default("llama");
    config.num_layers = 4;
    config.hidden_size = HIDDEN;
    config.ffn_hidden_size = 32;
    config.num_attention_heads = 4;
    config.num_query_groups = 2;
    config.kv_channels = 4;
    config.seq_length = 16;
    config.vocab_size = config.padded_vocab_size = 64;
    return config;
}

/* It has norms of heads that the checkpoint lacks, another MLP, and no head of its own. */
static loom_model_config other_config(void) {
    loom_model_config config = whole_config();
    config.qk_layernorm = true;
    config.ffn_hidden_size = 48;
    config.share_embeddings_and_output_weights = true;
    return config;
}

typedef struct loaded {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
} loaded;

static loom_status start(loom_rank *rank, const loom_model_config *model, bool sharded, loaded *run) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_module *module;
    *run = (loaded){0};
    config.tensor_model_parallel_size = sharded ? 1 : loom_rank_count(rank);
    config.ddp_config.use_distributed_optimizer = sharded;
    optim.lr = 0.01;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, model, &module));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, module, &run->parallel));
    return loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer);
}

static void stop(loaded *run) {
    loom_parallel_destroy(run->parallel);
    loom_fabric_destroy(run->fabric);
}

/* A parameter of this rank, by the end of its name. */
static loom_parameter *parameter_of(const loaded *run, const char *end) {
    loom_parameter *const *parameters;
    int64_t count;
    if (loom_parallel_parameters(run->parallel, &parameters, &count))
        return NULL;
    for (int64_t i = 0; i < count; i++) {
        size_t length = strlen(parameters[i]->name), tail = strlen(end);
        if (length >= tail && strcmp(parameters[i]->name + length - tail, end) == 0)
            return parameters[i];
    }
    return NULL;
}

static loom_status in_message(loom_status status, loom_status wanted, const char *const *texts, size_t count) {
    CHECK(status == wanted, "found %s \"%.200s\", expected %s", loom_status_name(status), loom_error_message(),
        loom_status_name(wanted));
    for (size_t i = 0; i < count; i++) {
        char found[2048];
        snprintf(found, sizeof found, "%s", loom_error_message());
        CHECK(strstr(found, texts[i]), "found \"%s\", expected \"%s\" in it", found, texts[i]);
    }
    return LOOM_OK;
}

static loom_status load(loaded *run, loom_state_item *items, int64_t count, bool strict, loom_load_report *report) {
    loom_state state = {items, count};
    loom_error_clear();
    return loom_fabric_load(run->fabric, checkpoint, &state, strict, report);
}

/* ---- strict */

static loom_status strict_rank(loom_rank *rank, void *argument) {
    (void)argument;
    /* Four layers of fc1, four of fc2 and the value. */
    static const char *const lists[] = {"9 missing (", "1 unexpected (output_layer.weight)", "2 misshaped ("};
    loom_model_config config = other_config();
    config.qk_layernorm = false;
    loaded run;
    loom_load_report report = {0};
    LOOM_TRY(start(rank, &config, false, &run));
    const loom_parameter *embedding = parameter_of(&run, "word_embeddings.weight");
    float before = embedding->data[3];
    loom_state_item items[] = {{.key = "state_dict", .module = run.parallel}, {.key = "shopping list"}};
    loom_status status = load(&run, items, 2, true, &report);
    status = in_message(status, LOOM_ERR_NOT_FOUND, lists, 3);
    if (!status && embedding->data[3] != before)
        status = loom_fail(LOOM_ERR_INTERNAL, "a strict load that fails has changed a weight");
    stop(&run);
    return status;
}

static void a_strict_load_names_all_that_is_wrong_and_changes_nothing(void **state) {
    (void)state;
    must_run(2, strict_rank, NULL);
}

/* ---- not strict */

static bool names(char *const *list, int64_t count, const char *wanted) {
    for (int64_t i = 0; i < count; i++)
        if (strcmp(list[i], wanted) == 0)
            return true;
    return false;
}

static loom_status check_lists(const loom_load_report *report) {
    CHECK(report->missing_count == 16 && names(report->missing, 16, "decoder.layers.3.mlp.linear_fc2.weight") &&
              names(report->missing, 16, "decoder.layers.0.self_attention.q_layernorm.weight"),
        "%lld names are missing", (long long)report->missing_count);
    CHECK(report->unexpected_count == 1 && names(report->unexpected, 1, "output_layer.weight"),
        "%lld names are unexpected", (long long)report->unexpected_count);
    CHECK(report->misshaped_count == 2 && names(report->misshaped, 2, "decoder.layers.mlp.linear_fc1.weight"),
        "%lld names are misshaped", (long long)report->misshaped_count);
    CHECK(report->iteration == 3, "iteration %lld", (long long)report->iteration);
    return LOOM_OK;
}

static loom_status lenient(loaded *run) {
    loom_load_report report = {0};
    const loom_parameter *norm = parameter_of(run, "layers.1.input_layernorm.weight"),
                         *fc2 = parameter_of(run, "layers.1.mlp.linear_fc2.weight"),
                         *q_norm = parameter_of(run, "layers.1.self_attention.q_layernorm.weight");
    CHECK(norm && fc2 && q_norm, "the model lacks parameters");
    float kept = fc2->data[5];
    loom_state_item items[] = {{.key = "state_dict", .module = run->parallel}};
    CHECK(norm->data[0] == 1.0f, "a norm begins with %g", (double)norm->data[0]);
    LOOM_TRY(load(run, items, 1, false, &report));
    loom_status status = check_lists(&report);
    loom_load_report_free(&report);
    LOOM_TRY(status);
    CHECK(norm->data[0] != 1.0f, "a norm that is there was not loaded");
    CHECK(fc2->data[5] == kept && q_norm->data[0] == 1.0f, "what is missing was touched");
    return LOOM_OK;
}

static loom_status lenient_rank(loom_rank *rank, void *argument) {
    (void)argument;
    loom_model_config config = other_config();
    loaded run;
    loom_status status = start(rank, &config, false, &run);
    if (!status)
        status = lenient(&run);
    stop(&run);
    return status;
}

static void a_load_that_is_not_strict_takes_what_there_is_and_lists_the_rest(void **state) {
    (void)state;
    must_run(2, lenient_rank, NULL);
}

/* ---- states */

static loom_status take_integer(void *context, const loom_value *value) {
    CHECK(value->kind == LOOM_VALUE_INT, "found a %s", loom_value_kind_name(value->kind));
    *(int64_t *)context = value->integer;
    return LOOM_OK;
}

static loom_status values(loaded *run) {
    int64_t iteration = -1;
    loom_load_report report = {0};
    loom_state_item items[] = {{.key = "iteration", .load = take_integer, .context = &iteration},
        {.key = "state_dict", .module = run->parallel}, {.key = "checkpoint_version"}};
    LOOM_TRY(load(run, items, 3, true, &report));
    loom_status status = LOOM_OK;
    if (iteration != 3 || !items[2].value || items[2].value->kind != LOOM_VALUE_FLOAT)
        status = loom_fail(LOOM_ERR_INTERNAL, "values of the common state were not taken");
    if (!status && (loom_value_get(report.leftover, "iteration") || !loom_value_get(report.leftover, "optimizer")))
        status = loom_fail(LOOM_ERR_INTERNAL, "the leftover is not what was not asked for");
    loom_load_report_free(&report);
    return status;
}

static loom_status refused(loaded *run) {
    loom_load_report report = {0};
    static const char *const alone[] = {"an optimizer alone", "in a state with the model"}, *const twice[] = {"twice"};
    loom_state_item items[] = {{.key = "optimizer", .optimizer = run->optimizer}, {.key = "a"}, {.key = "a"}};
    LOOM_TRY(in_message(load(run, items, 1, false, &report), LOOM_ERR_ARGUMENT, alone, 2));
    LOOM_TRY(in_message(load(run, items + 1, 2, false, &report), LOOM_ERR_ARGUMENT, twice, 1));
    loom_state state = {items + 1, 1};
    loom_status status = loom_fabric_load(run->fabric, MEGALOOM_TESTS "/golden/nothing", &state, false, &report);
    return in_message(status, LOOM_ERR_NOT_FOUND, NULL, 0);
}

static loom_status states_rank(loom_rank *rank, void *argument) {
    loom_status (*const body)(loaded * run) = *(loom_status(*const *)(loaded *))argument;
    loom_model_config config = whole_config();
    loaded run;
    loom_status status = start(rank, &config, true, &run);
    if (!status)
        status = body(&run);
    stop(&run);
    return status;
}

static void values_are_taken_and_the_rest_is_left_over(void **state) {
    (void)state;
    loom_status (*body)(loaded *) = values;
    must_run(2, states_rank, &body);
}

static void an_optimizer_alone_a_key_twice_and_a_missing_folder_are_refused(void **state) {
    (void)state;
    loom_status (*body)(loaded *) = refused;
    must_run(2, states_rank, &body);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_strict_load_names_all_that_is_wrong_and_changes_nothing),
        cmocka_unit_test(a_load_that_is_not_strict_takes_what_there_is_and_lists_the_rest),
        cmocka_unit_test(values_are_taken_and_the_rest_is_left_over),
        cmocka_unit_test(an_optimizer_alone_a_key_twice_and_a_missing_folder_are_refused),
    };
    return cmocka_run_group_tests_name("parallel.load_state", tests, NULL, NULL);
}
