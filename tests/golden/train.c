/* Twenty steps of AdamW against plain torch (train/<case>): losses, gradient norms, learning rates and the final
 * parameters, on every way to cut the global batch. The thread run writes its losses and norms, bit for bit, into the
 * build tree (golden-train-<world>.txt); the MPI run of as many ranks must find the same text there. In bf16-mixed the
 * same trajectories come out to the digits that bf16 has. */
#include "model.h"

/* Larger worlds run the layouts that they alone can: tensor, data and pipeline parallel at once. */
enum { MOST_RANKS_OF_ALL_LAYOUTS = 4 };

typedef struct train_case {
    char *name, *directory; /* of the weights */
    loom_model_config config;
    json_t *trajectory;
    golden_rows rows; /* all steps' global batches */
    int64_t steps, batch;
} train_case;

typedef struct train_suite {
    golden_suite golden;
    train_case *cases;
    FILE *record; /* of rank 0 */
    char *text;
    size_t bytes;
} train_suite;

/* ---- the references */

static void load_case(train_case *c) {
    loom_safetensors *file = NULL;
    char *path = golden_path("train/%s/tokens.safetensors", c->name);
    golden_must(loom_safetensors_open(path, &file), c->name);
    c->rows = golden_rows_of_tokens(file, "tokens");
    c->steps = golden_int(c->trajectory, "steps", 0);
    c->batch = golden_int(c->trajectory, "global_batch", 0);
    c->config.seq_length = c->rows.s;
    if (c->steps < 1 || c->rows.b != c->steps * c->batch) {
        fprintf(stderr, "%s: %lld rows, expected %lld steps of %lld\n", path, (long long)c->rows.b, (long long)c->steps,
            (long long)c->batch);
        exit(2);
    }
    loom_safetensors_close(file);
    free(path);
}

static void free_case(train_case *c) {
    json_decref(c->trajectory);
    golden_rows_free(&c->rows);
    free(c->name);
    free(c->directory);
}

static void load(train_suite *suite) {
    glob_t files = golden_glob("train/*/trajectory.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        train_case c = {.name = golden_folder_name(files.gl_pathv[i]), .trajectory = golden_json(files.gl_pathv[i])};
        c.directory = golden_path("%s/model", golden_string(c.trajectory, "hf_case", ""));
        if (golden_read_config(c.name, c.directory, &c.config)) {
            load_case(&c);
            suite->cases[suite->golden.cases++] = c;
        } else {
            free_case(&c);
            suite->golden.unbuilt++;
        }
    }
    globfree(&files);
}

static loom_status make_optimizer(const train_case *c, golden_model *model, loom_optimizer **optimizer) {
    const json_t *adam = json_object_get(c->trajectory, "optimizer");
    const json_t *rate = json_object_get(c->trajectory, "lr_schedule");
    loom_optimizer_config config = loom_optimizer_config_default();
    config.lr = golden_number(rate, "max", 0);
    config.min_lr = golden_number(rate, "min", 0);
    config.weight_decay = golden_number(adam, "wd", 0);
    config.adam_beta1 = golden_number(adam, "beta1", 0);
    config.adam_beta2 = golden_number(adam, "beta2", 0);
    config.adam_eps = golden_number(adam, "eps", 0);
    config.clip_grad = golden_number(adam, "clip", 0);
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = c->steps};
    setup.schedule.schedule = "cosine";
    setup.schedule.warmup_steps = golden_int(rate, "warmup", 0);
    return loom_fabric_setup_megatron_optimizer(model->fabric, model->parallel, &config, &setup, optimizer);
}

/* ---- one layout */

typedef struct tolerances {
    double loss, norm; /* relative */
} tolerances;

static tolerances tolerances_of(const golden_layout *layout) {
    return layout->precision ? (tolerances){3e-3, 5e-2} : (tolerances){3e-6, 1e-5};
}

static loom_status step_is_near(train_suite *suite, loom_rank *rank, const train_case *c, const char *layout,
    tolerances most, int64_t t, double loss, const loom_optimizer_outcome *outcome) {
    char what[3][GOLDEN_TEXT];
    static const char *const names[] = {"loss", "gradient norm", "learning rate"};
    for (int i = 0; i < 3; i++)
        snprintf(what[i], GOLDEN_TEXT, "%s of step %lld", names[i], (long long)t);
    if (loom_rank_index(rank) == 0)
        fprintf(suite->record, "%s, %s, step %lld: loss %a norm %a\n", c->name, layout, (long long)t, loss,
            outcome->grad_norm);
    double wanted = golden_at(c->trajectory, "loss", t);
    LOOM_TRY(golden_near(c->name, layout, what[0], loss, wanted, most.loss * wanted));
    wanted = golden_at(c->trajectory, "grad_norm", t);
    LOOM_TRY(golden_near(c->name, layout, what[1], outcome->grad_norm, wanted, most.norm * wanted));
    wanted = golden_at(c->trajectory, "lr", t);
    return golden_near(c->name, layout, what[2], outcome->lr, wanted, 1e-9 * wanted);
}

/* The samples and the l2 norm of one tensor, to ten times what correct runs differ by among themselves, at least 2e-6.
 * The reference is a double run: the factor 1 - lr*wd of a step, rounded to fp32, errs all elements in the same way by
 * up to 2^-24, which the noise of one element does not show but a norm adds up. */
static loom_status parameter_is_near(const train_case *c, const char *layout, const char *name, const json_t *wanted,
    const loom_safetensors_tensor *tensor) {
    const json_t *noise = json_object_get(json_object_get(c->trajectory, "params_final_noise"), name);
    double measured =
        fmax(golden_number(noise, "max_abs_f32_vs_f64", 0), golden_number(noise, "max_abs_f32_microbatch2_vs_f32", 0));
    double tolerance = fmax(2e-6, 10 * measured), norm = 0;
    float *values = malloc((size_t)(tensor->elements + 1) * sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    loom_status status = loom_safetensors_read_f32(tensor, 0, tensor->elements, values);
    size_t samples = json_array_size(json_object_get(wanted, "sample_index"));
    for (size_t i = 0; !status && i < samples; i++) {
        char what[GOLDEN_TEXT];
        int64_t at = (int64_t)golden_at(wanted, "sample_index", (int64_t)i);
        snprintf(what, sizeof what, "%s[%lld] at the end", name, (long long)at);
        if (at < tensor->elements)
            status = golden_near(
                c->name, layout, what, (double)values[at], golden_at(wanted, "sample", (int64_t)i), tolerance);
        else
            status = loom_fail(LOOM_ERR_INTERNAL, "%s, %s: %s is beyond the tensor", c->name, layout, what);
    }
    for (int64_t i = 0; !status && i < tensor->elements; i++)
        norm += (double)values[i] * (double)values[i];
    free(values);
    LOOM_TRY(status);
    double l2 = golden_number(wanted, "l2", NAN);
    return golden_near(c->name, layout, name, sqrt(norm), l2, tolerance + (double)c->steps * 0x1p-24 * l2);
}

static loom_status parameters_are_near(const train_case *c, const char *layout, const loom_safetensors *found) {
    json_t *all = json_object_get(c->trajectory, "params_final");
    /* Iterated without json_object_foreach: it wants a json_t that is not const. */
    int64_t count = 0;
    for (void *at = json_object_iter(all); at; at = json_object_iter_next(all, at)) {
        const loom_safetensors_tensor *tensor;
        const char *name = json_object_iter_key(at);
        LOOM_TRY(loom_safetensors_find(found, name, &tensor));
        LOOM_TRY(parameter_is_near(c, layout, name, json_object_iter_value(at), tensor));
        count++;
    }
    if (count == 0 || count != loom_safetensors_count(found))
        return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: found %lld parameters, wanted %lld", c->name, layout,
            (long long)loom_safetensors_count(found), (long long)count);
    return LOOM_OK;
}

static loom_status train(train_suite *suite, loom_rank *rank, const train_case *c, const char *name,
    const golden_layout *layout, golden_model *model) {
    loom_optimizer *optimizer;
    loom_batches *batches;
    golden_source source;
    loom_status status = LOOM_OK;
    LOOM_TRY(make_optimizer(c, model, &optimizer));
    LOOM_TRY(golden_batches(model, &c->rows, c->batch, layout->micro, true, &source, &batches));
    for (int64_t t = 0; !status && t < c->steps; t++) {
        double loss = 0;
        loom_optimizer_outcome outcome = {0};
        status = loom_parallel_training_step(model->parallel, batches, &loss);
        if (!status)
            status = loom_optimizer_step(optimizer, &outcome);
        if (!status)
            status = step_is_near(suite, rank, c, name, tolerances_of(layout), t, loss, &outcome);
    }
    loom_batches_destroy(batches);
    return status;
}

static loom_status compare(
    train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout, golden_model *model) {
    char name[GOLDEN_TEXT];
    loom_safetensors *file = NULL;
    golden_layout_name(layout, name);
    LOOM_TRY(golden_model_create(rank, layout, c->directory, &c->config, model));
    LOOM_TRY(train(suite, rank, c, name, layout, model));
    LOOM_TRY(golden_replicas_are_equal(model, c->name, name));
    if (layout->precision)
        return LOOM_OK; /* its weights have three digits */
    LOOM_TRY(golden_export(model, false, "train", &file));
    loom_status status = file ? parameters_are_near(c, name, file) : LOOM_OK;
    loom_safetensors_close(file);
    return loom_agree(loom_rank_world(rank), status);
}

/* ---- the walk */

static loom_status run_once(train_suite *suite, loom_rank *rank, const train_case *c, golden_layout layout) {
    bool first = loom_rank_index(rank) == 0;
    golden_counts *counts = &suite->golden.counts;
    if (!golden_layout_divides(&layout, &c->config, c->rows.s, c->batch)) {
        if (first)
            counts->left_out++;
        return LOOM_OK;
    }
    if (!golden_groups_divide(&c->config, layout.tp)) {
        LOOM_TRY(golden_check_refusal(rank, c->name, &layout, c->directory, &c->config));
        layout.replicate = true;
        if (first)
            counts->refused++;
    }
    golden_model model;
    loom_status status = compare(suite, rank, c, &layout, &model);
    golden_model_destroy(&model);
    if (!status && first)
        counts->ran++;
    return status;
}

/* With the plain optimizer, and where the largest microbatches leave several ranks something to share out, once more
 * with the distributed one; with two instances of it where each has several. One and two ranks do each of these in bf16
 * as well. */
static loom_status run_layout(train_suite *suite, loom_rank *rank, const train_case *c, golden_layout layout) {
    bool largest = layout.micro * layout.dp == c->batch;
    for (int bf16 = 0; bf16 < (largest && loom_rank_count(rank) <= 2 ? 2 : 1); bf16++) {
        layout.precision = bf16 ? "bf16-mixed" : NULL;
        layout.overlap = layout.sharded = false;
        layout.instances = 1;
        LOOM_TRY(run_once(suite, rank, c, layout));
        if (layout.dp == 1 || !largest)
            continue;
        layout.overlap = layout.sharded = true;
        LOOM_TRY(run_once(suite, rank, c, layout));
        if (layout.dp < 4 || layout.dp % 2)
            continue;
        layout.instances = 2;
        LOOM_TRY(run_once(suite, rank, c, layout));
    }
    return LOOM_OK;
}

/* The largest microbatch everywhere; 1, 2, … where the ranks are one, or tensor, sequence and data parallel at once. */
static loom_status run_micro_batches(
    train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout) {
    int64_t largest = c->batch / layout->dp > 1 ? c->batch / layout->dp : 1;
    bool all = (layout->tp == 1 && layout->dp == 1) || (layout->sp && layout->dp > 1);
    for (int64_t micro = all ? 1 : largest; micro <= largest; micro = micro < 2         ? 2
                                                                      : micro < largest ? largest
                                                                                        : micro + 1) {
        golden_layout cut = *layout;
        cut.micro = micro;
        LOOM_TRY(run_layout(suite, rank, c, cut));
    }
    return LOOM_OK;
}

/* The cases have two layers: a layer a stage, and with chunks an embedding, a layer, a layer and a head alone. One
 * microbatch is fewer than there are stages; a step of chunks has at least as many as stages. */
static loom_status run_pipelines(
    train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout) {
    golden_layout cut = *layout;
    cut.dp = layout->dp / 2;
    cut.pp = 2;
    int64_t part = c->batch / cut.dp;
    for (cut.micro = part; cut.micro >= 1; cut.micro /= part > 4 ? 4 : 2) {
        cut.vpp = 0;
        cut.stages = NULL;
        LOOM_TRY(run_layout(suite, rank, c, cut));
        if (part / cut.micro < 2 || part / cut.micro % 2)
            continue;
        cut.vpp = 2;
        cut.stages = "E|t|t|L";
        LOOM_TRY(run_layout(suite, rank, c, cut));
    }
    return LOOM_OK;
}

/* A part of the data ranks share their sequences instead, in every way there is. */
static loom_status run_contexts(train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout) {
    static const char *const types[] = {NULL, "all_gather", "a2a", "a2a+p2p"};
    golden_layout cut = *layout;
    for (cut.cp = 2; cut.cp <= 4; cut.cp *= 2)
        for (int type = 0; type < 4; type++) {
            cut.dp = layout->dp / cut.cp;
            cut.cp_type = types[type];
            cut.micro = cut.dp ? c->batch / cut.dp : 0;
            if (layout->dp % cut.cp == 0 && (type < 3 || cut.cp == 4))
                LOOM_TRY(run_layout(suite, rank, c, cut));
        }
    return LOOM_OK;
}

/* Experts are shared out over data, context and tensor ranks, and cut otherwise than the rest. */
static loom_status run_experts(train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout) {
    golden_layout cut = *layout;
    int world = layout->tp * layout->dp;
    if (c->config.moe.num_moe_experts == 0)
        return LOOM_OK;
    for (cut.cp = 1; cut.cp <= 2; cut.cp++)
        for (cut.pp = 1; cut.pp <= 2; cut.pp++)
            for (cut.etp = 1; cut.etp <= world; cut.etp++)
                for (cut.ep = 1; cut.ep <= world; cut.ep++) {
                    int model = cut.cp * cut.pp;
                    cut.dp = layout->dp / model;
                    cut.micro = cut.dp ? c->batch / cut.dp : 0;
                    bool plain = cut.ep == 1 && cut.etp == layout->tp;
                    if (layout->dp % model || world / cut.pp % (cut.etp * cut.ep) || plain ||
                        (cut.cp > 1 && cut.pp > 1))
                        continue;
                    LOOM_TRY(run_layout(suite, rank, c, cut));
                }
    return LOOM_OK;
}

/* Context, tensor and data ranks at once, and the experts, where there are some, over two of them. */
static loom_status run_contexts_and_data(
    train_suite *suite, loom_rank *rank, const train_case *c, const golden_layout *layout) {
    golden_layout cut = *layout;
    cut.cp = 2;
    cut.dp = layout->dp / cut.cp;
    cut.micro = c->batch / cut.dp;
    LOOM_TRY(run_layout(suite, rank, c, cut));
    cut.ep = 2;
    return c->config.moe.num_moe_experts > 0 ? run_layout(suite, rank, c, cut) : LOOM_OK;
}

static loom_status walk(loom_rank *rank, void *argument) {
    train_suite *suite = argument;
    int world = loom_rank_count(rank);
    golden_begin(&suite->golden, rank);
    if (loom_rank_index(rank) == 0) {
        suite->record = open_memstream(&suite->text, &suite->bytes);
        if (!suite->record)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory");
        fprintf(suite->record, "golden tree %s, %d ranks\n", golden_root(), world);
    }
    loom_status status = LOOM_OK;
    for (int i = 0; i < suite->golden.cases; i++)
        for (int tp = 1; tp <= world; tp++)
            for (int sp = 0; !status && world % tp == 0 && sp <= (tp > 1 ? 1 : 0); sp++) {
                golden_layout layout = {.tp = tp, .dp = world / tp, .sp = sp};
                if (world <= MOST_RANKS_OF_ALL_LAYOUTS)
                    status = run_micro_batches(suite, rank, &suite->cases[i], &layout);
                if (!status && world <= MOST_RANKS_OF_ALL_LAYOUTS)
                    status = run_contexts(suite, rank, &suite->cases[i], &layout);
                if (!status && world <= MOST_RANKS_OF_ALL_LAYOUTS)
                    status = run_experts(suite, rank, &suite->cases[i], &layout);
                if (!status && layout.dp % 2 == 0 && (world <= MOST_RANKS_OF_ALL_LAYOUTS || tp == 2))
                    status = run_pipelines(suite, rank, &suite->cases[i], &layout);
                if (!status && world > MOST_RANKS_OF_ALL_LAYOUTS && tp == 2 && sp)
                    status = run_contexts_and_data(suite, rank, &suite->cases[i], &layout);
            }
    if (loom_rank_index(rank) == 0)
        fclose(suite->record);
    return status;
}

/* ---- the record */

static void record_path(int world, char *path) {
    snprintf(path, GOLDEN_PATH, "%s/golden-train-%d.txt", MEGALOOM_BUILD, world);
}

static void write_record(const train_suite *suite, int world) {
    char path[GOLDEN_PATH];
    record_path(world, path);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(suite->text, 1, suite->bytes, file), suite->bytes);
    assert_int_equal(fclose(file), 0);
}

/* The lines of the thread run, one after another. False: it was a run of another tree. */
static bool compare_record(const train_suite *suite, FILE *file, const char *path) {
    char line[1024];
    const char *at = suite->text;
    int number = 0;
    while (fgets(line, sizeof line, file)) {
        size_t length = strlen(line);
        number++;
        if (strncmp(line, at, length) == 0) {
            at += length;
            continue;
        }
        if (number == 1) {
            printf("%s is of another run (%.*s): not compared\n", path, (int)strcspn(line, "\n"), line);
            return false;
        }
        fail_msg("%s:%d: threads had\n%sMPI has\n%.*s", path, number, line, (int)strcspn(at, "\n"), at);
    }
    assert_true(number > 1);
    assert_string_equal(at, "");
    printf("%d lines of losses and norms are bit-equal to those of thread ranks\n", number - 1);
    return true;
}

/* ---- the tests */

static void run_world(train_suite *suite, int world) {
    free(suite->text);
    suite->text = NULL;
    golden_world(&suite->golden, world);
    write_record(suite, world);
}

static void one_rank_follows_the_trajectory(void **state) {
    run_world(*state, 1);
}

static void two_ranks_follow_the_trajectory(void **state) {
    run_world(*state, 2);
}

static void four_ranks_follow_the_trajectory(void **state) {
    run_world(*state, 4);
}

static void eight_ranks_follow_the_trajectory_with_tensor_data_and_pipeline_or_context_parallelism(void **state) {
    run_world(*state, 8);
}

static void launched_ranks_follow_the_trajectory(void **state) {
    golden_world(*state, 0);
}

static void launched_ranks_are_bit_equal_to_thread_ranks(void **state) {
    const train_suite *suite = *state;
    char path[GOLDEN_PATH];
    int world = 0;
    assert_true(loom_mpi_launched(&world));
    assert_int_equal(suite->golden.status, LOOM_OK);
    record_path(world, path);
    FILE *file = fopen(path, "r");
    if (!file) {
        printf("%s is not there: the thread run has not been made\n", path);
        skip();
    }
    bool compared = compare_record(suite, file, path);
    fclose(file);
    if (!compared)
        skip();
}

int main(void) {
    train_suite suite = {
        .golden = {.name = "golden.train", .left_out = "heads, sequence or batch do not divide", .walk = walk}};
    const struct CMUnitTest alone[] = {
        cmocka_unit_test_prestate(one_rank_follows_the_trajectory, &suite),
        cmocka_unit_test_prestate(two_ranks_follow_the_trajectory, &suite),
        cmocka_unit_test_prestate(four_ranks_follow_the_trajectory, &suite),
        cmocka_unit_test_prestate(
            eight_ranks_follow_the_trajectory_with_tensor_data_and_pipeline_or_context_parallelism, &suite),
    };
    const struct CMUnitTest launched[] = {
        cmocka_unit_test_prestate(launched_ranks_follow_the_trajectory, &suite),
        cmocka_unit_test_prestate(launched_ranks_are_bit_equal_to_thread_ranks, &suite),
    };
    load(&suite);
    int failed =
        golden_main(&suite.golden, alone, sizeof alone / sizeof *alone, launched, sizeof launched / sizeof *launched);
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    free(suite.text);
    return failed;
}
