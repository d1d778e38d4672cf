/* Models whose experts, and routers, have biases, as the real Megatron-Core trains them (tests/golden/moe_biases): its
 * checkpoint of their weights is loaded at every layout, and losses, gradient norms and rates of twenty steps and the
 * gradients of the first one are its own. Models start from other weights, so that what is not loaded shows. */
#include "model.h"
#include <megaloom/state.h>

static const golden_layout layouts[] = {
    {.tp = 1, .dp = 1, .micro = 1},
    {.tp = 1, .dp = 1, .micro = 1, .recompute = LOOM_RECOMPUTE_FULL, .sharded = true},
    {.tp = 1, .dp = 2, .ep = 2, .micro = 1},
    {.tp = 1, .dp = 2, .ep = 1, .etp = 2, .micro = 1, .sharded = true},
    {.tp = 2, .dp = 1, .sp = true, .micro = 1},
    {.tp = 2, .dp = 1, .ep = 2, .etp = 1, .sp = true, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 1, .cp = 2, .ep = 2, .micro = 1},
    {.tp = 1, .dp = 4, .ep = 4, .micro = 1, .overlap = true, .sharded = true},
    {.tp = 2, .dp = 2, .ep = 2, .sp = true, .micro = 1, .overlap = true, .sharded = true},
    {.tp = 1, .dp = 4, .ep = 2, .etp = 2, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 2, .pp = 2, .ep = 2, .micro = 1, .sharded = true},
};

typedef struct bias_case {
    char *name, *path; /* of the checkpoint */
    json_t *json;
    loom_run_config *run;
    loom_model_config config;
    loom_safetensors *numbers;
    golden_rows rows;
    int64_t batch, steps;
} bias_case;

typedef struct bias_suite {
    golden_suite golden;
    bias_case *cases;
} bias_suite;

enum { FIELDS = 40 };

static void load_case(bias_case *c) {
    const json_t *fields = json_object_get(c->json, "fields"), *field;
    const char *overrides[FIELDS];
    size_t i;
    if (json_array_size(fields) > FIELDS) {
        fprintf(stderr, "%s: %zu fields, expected at most %d\n", c->name, json_array_size(fields), FIELDS);
        exit(2);
    }
    json_array_foreach(fields, i, field) overrides[i] = json_string_value(field);
    golden_must(loom_run_config_load(NULL, overrides, (int64_t)json_array_size(fields), &c->run), c->name);
    c->config = c->run->model.config;
    c->path = golden_path("moe_biases/%s/iter_0000000", c->name);
    char *numbers = golden_path("moe_biases/%s/numbers.safetensors", c->name);
    golden_must(loom_safetensors_open(numbers, &c->numbers), c->name);
    free(numbers);
    c->rows = golden_rows_of_tokens(c->numbers, "tokens");
    c->batch = golden_int(c->json, "global_batch", 0);
    c->steps = (int64_t)json_array_size(json_object_get(c->json, "loss"));
}

static void load(bias_suite *suite) {
    glob_t files = golden_glob("moe_biases/*/case.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        bias_case *c = &suite->cases[suite->golden.cases++];
        *c = (bias_case){.name = golden_folder_name(files.gl_pathv[i]), .json = golden_json(files.gl_pathv[i])};
        load_case(c);
    }
    globfree(&files);
}

static void free_case(bias_case *c) {
    loom_safetensors_close(c->numbers);
    loom_run_config_destroy(c->run);
    golden_rows_free(&c->rows);
    json_decref(c->json);
    free(c->name);
    free(c->path);
}

/* Room at experts is for the tokens that a rank routes: with parts of a sequence, others find none. */
static bool divides(const golden_layout *layout, const bias_case *c) {
    bool parts = layout->tp > 1 || layout->cp > 1;
    return golden_layout_divides(layout, &c->config, c->rows.s, c->batch) &&
           !(parts && c->config.moe.moe_expert_capacity_factor > 0);
}

typedef struct gradient_check {
    const bias_case *c;
    const char *layout;
    int64_t met, biases; /* biases: of experts */
} gradient_check;

static loom_status gradient_agrees(
    void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    gradient_check *check = context;
    char key[GOLDEN_TEXT];
    int64_t count = shape[0] * (dims == 2 ? shape[1] : 1);
    const loom_safetensors_tensor *tensor;
    snprintf(key, sizeof key, "grad.%s", name);
    LOOM_TRY(loom_safetensors_find(check->c->numbers, key, &tensor));
    if (tensor->dims != dims || tensor->elements != count)
        return loom_fail(LOOM_ERR_INTERNAL, "%s has another shape", key);
    float *wanted = malloc((size_t)(count + 1) * sizeof *wanted);
    if (!wanted)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    loom_status status = loom_safetensors_read_f32(tensor, 0, count, wanted);
    if (!status)
        status = golden_gradient_near(check->c->name, check->layout, name, values, wanted, count);
    free(wanted);
    check->met++;
    check->biases += strstr(name, "local_experts") && strstr(name, ".bias");
    return status;
}

static loom_status gradients_agree(const bias_case *c, const char *layout, golden_model *model) {
    gradient_check check = {c, layout, 0, 0};
    LOOM_TRY(loom_gpt_visit(model->parallel, true, gradient_agrees, &check));
    double biases = 2 * (double)(c->config.moe.num_moe_experts * c->config.num_layers);
    LOOM_TRY(golden_near(c->name, layout, "number of biases of experts", (double)check.biases, biases, 0));
    return golden_near(
        c->name, layout, "number of gradients", (double)check.met, (double)loom_safetensors_count(c->numbers) - 1, 0);
}

static loom_status number(const bias_case *c, const char *layout, const char *key, int64_t step, double found) {
    char what[GOLDEN_TEXT];
    double wanted = golden_at(c->json, key, step);
    snprintf(what, sizeof what, "%s of step %lld", key, (long long)step);
    return golden_near(c->name, layout, what, found, wanted, 1e-5 * wanted);
}

static loom_status train(
    const bias_case *c, const char *layout, golden_model *model, loom_batches *batches, loom_optimizer *optimizer) {
    for (int64_t step = 0; step < c->steps; step++) {
        double loss = 0;
        loom_optimizer_outcome outcome = {0};
        LOOM_TRY(loom_parallel_training_step(model->parallel, batches, &loss));
        LOOM_TRY(number(c, layout, "loss", step, loss));
        if (step == 0)
            LOOM_TRY(gradients_agree(c, layout, model));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
        LOOM_TRY(number(c, layout, "grad_norm", step, outcome.grad_norm));
        LOOM_TRY(number(c, layout, "lr", step, outcome.lr));
    }
    return golden_replicas_are_equal(model, c->name, layout);
}

static loom_status compare(
    loom_rank *rank, const bias_case *c, const golden_layout *layout, const char *name, golden_model *model) {
    loom_optimizer *optimizer;
    loom_batches *batches;
    golden_source source;
    loom_load_report report;
    LOOM_TRY(golden_model_create(rank, layout, NULL, &c->config, model));
    loom_state_item item = {.key = "state_dict", .module = model->parallel};
    loom_state state = {&item, 1};
    LOOM_TRY(loom_fabric_load(model->fabric, c->path, &state, true, &report));
    int64_t wrong = report.missing_count + report.unexpected_count + report.misshaped_count;
    loom_load_report_free(&report);
    LOOM_TRY(golden_near(c->name, name, "names in the lists of a strict load", (double)wrong, 0, 0));
    LOOM_TRY(golden_megatron_optimizer(json_object_get(c->json, "optimizer"), c->steps, model, &optimizer));
    LOOM_TRY(golden_batches(model, &c->rows, c->batch, layout->micro, true, &source, &batches));
    loom_status status = train(c, name, model, batches, optimizer);
    loom_batches_destroy(batches);
    return status;
}

static loom_status walk(loom_rank *rank, void *argument) {
    bias_suite *suite = argument;
    bool first = loom_rank_index(rank) == 0;
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i++)
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            const bias_case *c = &suite->cases[i];
            const golden_layout *layout = &layouts[k];
            if (layout->tp * layout->dp * (layout->pp ? layout->pp : 1) * (layout->cp ? layout->cp : 1) !=
                loom_rank_count(rank))
                continue;
            if (!divides(layout, c)) {
                if (first)
                    suite->golden.counts.left_out++;
                continue;
            }
            char name[GOLDEN_TEXT];
            golden_model model;
            golden_layout_name(layout, name);
            loom_status status = compare(rank, c, layout, name, &model);
            golden_model_destroy(&model);
            if (status)
                return loom_fail_context(status, "%s, %s: ", c->name, name);
            if (first)
                suite->golden.counts.ran++;
        }
    return LOOM_OK;
}

int main(void) {
    bias_suite suite = {.golden = {.name = "golden.moe_biases",
                            .left_out = "experts, sequence or batch do not divide, or a limited room is cut",
                            .walk = walk}};
    load(&suite);
    if (suite.golden.cases == 0 && getenv("MEGALOOM_GOLDEN")) {
        printf("golden.moe_biases: %s has no such cases\n", golden_root());
        return 0;
    }
    int failed = golden_claim(&suite.golden, "biased_experts_are_those_of_megatron_core");
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    return failed;
}
