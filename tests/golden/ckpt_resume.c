/* Checkpoints that the real Megatron-Core wrote after three steps (tests/golden/ckpt) are loaded at other layouts than
 * they were written at, and trained on: the fourth and the fifth step have the losses, gradient norms and rates that
 * the reference had. So weights, moments, number of updates and schedule are right, whatever form they were stored in.
 * Models start from other weights, so that what is not loaded shows. */
#include "model.h"
#include <megaloom/state.h>

typedef struct resume_case {
    char *name, *path, *hf; /* of the checkpoint, of the model */
    json_t *json;
    loom_model_config config;
    golden_rows rows; /* of the steps that were not taken yet */
    int64_t batch, micro, saved, steps;
    bool optimizer;
    double loss, norm; /* tolerances, relative */
} resume_case;

typedef struct resume_suite {
    golden_suite golden;
    resume_case *cases;
} resume_suite;

static const golden_layout layouts[] = {
    {.tp = 1, .dp = 1, .micro = 1},
    {.tp = 1, .dp = 1, .micro = 1, .sharded = true},
    {.tp = 2, .dp = 1, .sp = true, .micro = 1},
    {.tp = 1, .dp = 2, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 1, .pp = 2, .vpp = 2, .micro = 1, .sharded = true},
    {.tp = 2, .dp = 1, .pp = 2, .micro = 1, .sharded = true},
    {.tp = 2, .dp = 2, .micro = 1, .overlap = true, .sharded = true},
    {.tp = 1, .dp = 1, .cp = 2, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 2, .ep = 2, .micro = 1},
    {.tp = 1, .dp = 2, .ep = 2, .micro = 1, .sharded = true},
    {.tp = 2, .dp = 1, .ep = 2, .etp = 1, .sp = true, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 4, .ep = 2, .etp = 2, .micro = 1, .sharded = true},
    {.tp = 1, .dp = 4, .ep = 4, .micro = 1, .overlap = true, .sharded = true},
    {.tp = 2, .dp = 2, .ep = 2, .sp = true, .micro = 1, .overlap = true, .sharded = true},
    {.tp = 1, .dp = 2, .pp = 2, .ep = 2, .micro = 1, .sharded = true},
};

static bool has_option(const json_t *json, const char *option) {
    return json_object_get(json_object_get(json, "options"), option) != NULL;
}

static golden_rows rows_of(const json_t *tokens, int64_t first) {
    int64_t steps = (int64_t)json_array_size(tokens) - first, at = 0;
    int64_t batch = (int64_t)json_array_size(json_array_get(tokens, 0));
    int64_t width = (int64_t)json_array_size(json_array_get(json_array_get(tokens, 0), 0));
    golden_rows rows = {.b = steps * batch, .s = width - 1};
    rows.tokens = golden_allocate((size_t)(rows.b * rows.s) * sizeof *rows.tokens);
    rows.labels = golden_allocate((size_t)(rows.b * rows.s) * sizeof *rows.labels);
    for (int64_t row = 0; row < rows.b; row++)
        for (int64_t t = 0; t < rows.s; t++, at++) {
            const json_t *line =
                json_array_get(json_array_get(tokens, (size_t)(first + row / batch)), (size_t)(row % batch));
            rows.tokens[at] = json_integer_value(json_array_get(line, (size_t)t));
            rows.labels[at] = json_integer_value(json_array_get(line, (size_t)t + 1));
        }
    return rows;
}

static bool load_case(resume_case *c) {
    const char *model = golden_string(c->json, "model", "?"); /* mcore/NAME/hf */
    char name[GOLDEN_TEXT] = "";
    sscanf(model, "mcore/%100[^/]", name);
    c->hf = golden_path("%s", model);
    c->path = golden_path("ckpt/%s", c->name);
    if (!golden_read_config(name, c->hf, &c->config))
        return false;
    c->batch = golden_int(c->json, "global_batch", 0);
    c->micro = golden_int(c->json, "micro_batch", 1);
    c->saved = golden_int(c->json, "saved_after_step", 0);
    c->steps = (int64_t)json_array_size(json_object_get(c->json, "log"));
    c->optimizer = golden_string(c->json, "sharding_type", NULL) && !has_option(c->json, "noopt");
    /* A run in bf16 rounds where ours does not. */
    c->loss = has_option(c->json, "bf16") ? 5e-3 : 3e-6;
    c->norm = has_option(c->json, "bf16") ? 5e-2 : 1e-5;
    c->rows = rows_of(json_object_get(c->json, "tokens"), c->saved);
    c->config.seq_length = c->rows.s;
    c->config.padded_vocab_size = golden_int(c->json, "padded_vocab", c->config.vocab_size);
    c->config.padded_vocab_in_softmax = true;
    return true;
}

static void free_case(resume_case *c) {
    golden_rows_free(&c->rows);
    json_decref(c->json);
    free(c->name);
    free(c->path);
    free(c->hf);
}

static void load(resume_suite *suite) {
    glob_t files = golden_glob("ckpt/*/case.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        resume_case c = {.name = golden_folder_name(files.gl_pathv[i]), .json = golden_json(files.gl_pathv[i])};
        if (json_object_get(c.json, "layout") && load_case(&c)) {
            suite->cases[suite->golden.cases++] = c;
        } else {
            free_case(&c);
            suite->golden.unbuilt++;
        }
    }
    globfree(&files);
}

/* Other rates than those of the run, which the checkpoint's schedule replaces (use_checkpoint_opt_param_scheduler). */
static loom_status make_optimizer(const resume_case *c, golden_model *model, loom_optimizer **optimizer) {
    const json_t *adam = json_object_get(c->json, "optimizer");
    loom_optimizer_config config = loom_optimizer_config_default();
    config.lr = 0.5;
    config.min_lr = 0.25;
    config.weight_decay = golden_number(adam, "wd", 0);
    config.adam_beta1 = golden_number(adam, "beta1", 0);
    config.adam_beta2 = golden_number(adam, "beta2", 0);
    config.adam_eps = golden_number(adam, "eps", 0);
    config.clip_grad = golden_number(adam, "clip", 0);
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = c->steps};
    setup.schedule.schedule = "megatron-cosine";
    setup.schedule.init_lr = 0;
    setup.schedule.warmup_steps = 1;
    setup.schedule.lr_decay_steps = 7;
    setup.schedule.use_checkpoint_opt_param_scheduler = true;
    return loom_fabric_setup_megatron_optimizer(model->fabric, model->parallel, &config, &setup, optimizer);
}

static loom_status check_report(const resume_case *c, const char *name, const loom_load_report *report) {
    if (report->iteration >= 0)
        LOOM_TRY(golden_near(c->name, name, "iteration", (double)report->iteration, (double)c->saved, 0));
    if (!loom_value_get(report->leftover, "content_metadata"))
        return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: content_metadata is no leftover", c->name, name);
    return golden_near(c->name, name, "names in the lists of a strict load",
        (double)(report->missing_count + report->unexpected_count + report->misshaped_count), 0, 0);
}

static loom_status load_state(const resume_case *c, const char *name, golden_model *model, loom_optimizer *optimizer) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = model->parallel}, {.key = "optimizer", .optimizer = optimizer}};
    loom_state state = {items, c->optimizer ? 2 : 1};
    loom_load_report report;
    LOOM_TRY(loom_fabric_load(model->fabric, c->path, &state, true, &report));
    loom_status status = check_report(c, name, &report);
    loom_load_report_free(&report);
    return status;
}

static loom_status number(const resume_case *c, const char *name, const char *what, int64_t step, double found,
    const char *key, double tolerance) {
    char text[GOLDEN_TEXT];
    double wanted = golden_number(json_array_get(json_object_get(c->json, "log"), (size_t)step), key, NAN);
    snprintf(text, sizeof text, "%s of step %lld", what, (long long)step + 1);
    return golden_near(c->name, name, text, found, wanted, tolerance * wanted);
}

/* Without the optimizer's state only what comes before its first update can be right. */
static loom_status train(
    const resume_case *c, const char *name, golden_model *model, loom_batches *batches, loom_optimizer *optimizer) {
    for (int64_t step = c->saved; step < (c->optimizer ? c->steps : c->saved + 1); step++) {
        double loss = 0;
        loom_optimizer_outcome outcome = {0};
        LOOM_TRY(loom_parallel_training_step(model->parallel, batches, &loss));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
        LOOM_TRY(number(c, name, "loss", step, loss, "loss", c->loss));
        LOOM_TRY(number(c, name, "gradient norm", step, outcome.grad_norm, "grad_norm", c->norm));
        if (c->optimizer) {
            LOOM_TRY(number(c, name, "learning rate", step, outcome.lr, "lr", 1e-9));
            LOOM_TRY(golden_near(c->name, name, "updates", (double)outcome.step, (double)step + 1, 0));
        }
    }
    return golden_replicas_are_equal(model, c->name, name);
}

static loom_status resume(
    loom_rank *rank, const resume_case *c, const golden_layout *layout, const char *name, golden_model *model) {
    loom_optimizer *optimizer;
    loom_batches *batches;
    golden_source source;
    LOOM_TRY(golden_model_create(rank, layout, c->hf, &c->config, model));
    LOOM_TRY(make_optimizer(c, model, &optimizer));
    LOOM_TRY(load_state(c, name, model, optimizer));
    LOOM_TRY(golden_batches(model, &c->rows, c->batch, layout->micro, true, &source, &batches));
    loom_status status = train(c, name, model, batches, optimizer);
    loom_batches_destroy(batches);
    return status;
}

static loom_status walk(loom_rank *rank, void *argument) {
    resume_suite *suite = argument;
    bool first = loom_rank_index(rank) == 0;
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i++)
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            const resume_case *c = &suite->cases[i];
            const golden_layout *layout = &layouts[k];
            if (layout->tp * layout->dp * (layout->pp ? layout->pp : 1) * (layout->cp ? layout->cp : 1) !=
                loom_rank_count(rank))
                continue;
            if (!golden_layout_divides(layout, &c->config, c->rows.s, c->batch)) {
                if (first)
                    suite->golden.counts.left_out++;
                continue;
            }
            char name[GOLDEN_TEXT];
            golden_model model;
            golden_layout_name(layout, name);
            loom_status status = resume(rank, c, layout, name, &model);
            golden_model_destroy(&model);
            if (status)
                return loom_fail_context(status, "%s, %s: ", c->name, name);
            if (first)
                suite->golden.counts.ran++;
        }
    return LOOM_OK;
}

int main(void) {
    resume_suite suite = {
        .golden = {
            .name = "golden.ckpt_resume", .left_out = "heads, experts, sequence or batch do not divide", .walk = walk}};
    load(&suite);
    int failed = golden_claim(&suite.golden, "a_checkpoint_of_megatron_core_goes_on_at_any_layout");
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    return failed;
}
