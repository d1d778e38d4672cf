/* Megatron-Core's own numbers (mcore/<case>): parameters after import, logits and token losses with the padded
 * vocabulary in the softmax, then five steps under its own learning-rate schedule (whose first rate is 0): losses,
 * gradient norms, the first step's gradients, the parameters afterwards. Those runs had its distributed optimizer, so
 * ours runs here. */
#include "model.h"

typedef struct mcore_layout {
    golden_layout golden;
    const json_t *numbers;
} mcore_layout;

typedef struct mcore_case {
    char *name, *directory; /* of the weights */
    json_t *json;
    loom_model_config config;
    int64_t padded, batch, steps;
    golden_rows eval, train;
    float *logits, *losses;                           /* [b, s, padded], [b, s] of eval */
    double largest;                                   /* of the logits, in size */
    loom_safetensors *parameters, *gradients, *after; /* NULL where the case has none */
    mcore_layout *layouts;
    int layout_count;
} mcore_case;

typedef struct mcore_suite {
    golden_suite golden;
    mcore_case *cases;
} mcore_suite;

/* ---- the references */

static void open_optional(const mcore_case *c, const char *what, loom_safetensors **file) {
    char *path = golden_path("mcore/%s/%s.safetensors", c->name, what);
    if (access(path, F_OK) == 0)
        golden_must(loom_safetensors_open(path, file), c->name);
    free(path);
}

/* Megatron's labels here are the input rolled left by one. */
static void load_eval(mcore_case *c, const loom_safetensors *io) {
    int64_t elements;
    golden_rows *rows = &c->eval;
    rows->tokens = golden_i64(io, "input_ids", &rows->b, &rows->s);
    rows->labels = golden_allocate((size_t)(rows->b * rows->s) * sizeof *rows->labels);
    for (int64_t j = 0; j < rows->b; j++)
        for (int64_t t = 0; t < rows->s; t++)
            rows->labels[j * rows->s + t] = rows->tokens[j * rows->s + (t + 1) % rows->s];
    c->logits = golden_f32(io, "logits", &elements);
    for (int64_t i = 0; i < elements; i++)
        c->largest = fmax(c->largest, fabs((double)c->logits[i]));
    if (elements != rows->b * rows->s * c->padded) {
        fprintf(stderr, "%s: %lld logits for a padded vocabulary of %lld\n", c->name, (long long)elements,
            (long long)c->padded);
        exit(2);
    }
    c->losses = golden_f32(io, "token_loss_next", &elements);
}

static void load_layouts(mcore_case *c) {
    json_t *all = json_object_get(c->json, "layouts"), *entry;
    size_t i;
    c->layouts = golden_allocate(json_array_size(all) * sizeof *c->layouts);
    json_array_foreach(all, i, entry) {
        const json_t *layout = json_object_get(entry, "layout");
        mcore_layout *made = &c->layouts[c->layout_count++];
        made->golden = (golden_layout){.tp = (int)golden_int(layout, "tp", 1),
            .dp = (int)golden_int(layout, "dp", 1),
            .pp = (int)golden_int(layout, "pp", 1),
            .ep = (int)golden_int(layout, "ep", 1),
            .vpp = golden_int(layout, "vpp", 1) > 1 ? (int)golden_int(layout, "vpp", 1) : 0,
            .sp = json_is_true(json_object_get(layout, "sp")),
            .micro = golden_int(c->json, "micro_batch", 1),
            .sharded = true};
        made->numbers = entry;
        c->steps = (int64_t)json_array_size(json_object_get(entry, "loss"));
    }
}

static void load_case(mcore_case *c) {
    loom_safetensors *io = NULL;
    char *path = golden_path("mcore/%s/io.safetensors", c->name);
    golden_must(loom_safetensors_open(path, &io), c->name);
    free(path);
    c->padded = golden_int(c->json, "padded_vocab", 0);
    c->batch = golden_int(c->json, "global_batch", 0);
    load_eval(c, io);
    c->train = golden_rows_of_tokens(io, "train_tokens");
    loom_safetensors_close(io);
    load_layouts(c);
    open_optional(c, "params_mcore", &c->parameters);
    open_optional(c, "grads_step1", &c->gradients);
    open_optional(c, "params_after5", &c->after);
    c->config.seq_length = c->eval.s > c->train.s ? c->eval.s : c->train.s;
    c->config.padded_vocab_size = c->padded;
    c->config.padded_vocab_in_softmax = true;
}

static void free_case(mcore_case *c) {
    loom_safetensors_close(c->parameters);
    loom_safetensors_close(c->gradients);
    loom_safetensors_close(c->after);
    golden_rows_free(&c->eval);
    golden_rows_free(&c->train);
    free(c->logits);
    free(c->losses);
    free(c->layouts);
    json_decref(c->json);
    free(c->name);
    free(c->directory);
}

static void load(mcore_suite *suite) {
    glob_t files = golden_glob("mcore/*/case.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        mcore_case c = {.name = golden_folder_name(files.gl_pathv[i]), .json = golden_json(files.gl_pathv[i])};
        const char *hf = golden_string(c.json, "hf", "");
        /* Weights are in hf/<case>/model, or in mcore/<case>/hf itself. */
        c.directory = golden_path("%s%s", hf, strncmp(hf, "hf/", 3) == 0 ? "/model" : "");
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

/* ---- whole tensors against a file in Megatron-Core's names, which holds padding rows as well */

typedef enum tensor_rule { EQUAL_BITS, GRADIENT, UPDATED } tensor_rule;

typedef struct tensor_check {
    const mcore_case *c;
    const char *layout;
    const loom_safetensors *file;
    tensor_rule rule;
    double rates; /* sum of the learning rates so far */
    int64_t met;
} tensor_check;

/* Elements [first, first + count) of an updated parameter. */
static loom_status updated_is_near(const tensor_check *check, const char *name, const float *found, const float *wanted,
    int64_t first, int64_t count, double tolerance) {
    return golden_all_near(check->c->name, check->layout, name, found + first, wanted + first, count, tolerance);
}

/* The key rows of a bias of query, key and value have a true gradient of zero. What is left is rounding noise, which
 * Adam turns into steps of up to the learning rate in either direction: two correct runs differ by up to twice their
 * sum. All other elements are held to 2e-6. */
static loom_status updated(
    const tensor_check *check, const char *name, const float *found, const float *wanted, int64_t count) {
    const char *bias = "linear_qkv.bias";
    size_t length = strlen(name), tail = strlen(bias);
    if (length < tail || strcmp(name + length - tail, bias) != 0)
        return updated_is_near(check, name, found, wanted, 0, count, 2e-6);
    const loom_model_config *config = &check->c->config;
    int64_t n = config->num_attention_heads, g = config->num_query_groups ? config->num_query_groups : n;
    int64_t d = count / (n + 2 * g), group = (n / g + 2) * d;
    for (int64_t first = 0; first < count; first += group) {
        int64_t key = first + group - 2 * d;
        LOOM_TRY(updated_is_near(check, name, found, wanted, first, group - 2 * d, 2e-6));
        LOOM_TRY(updated_is_near(check, name, found, wanted, key, d, 2 * check->rates));
        LOOM_TRY(updated_is_near(check, name, found, wanted, key + d, d, 2e-6));
    }
    return LOOM_OK;
}

static loom_status tensor_agrees(void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    tensor_check *check = context;
    const char *where = check->c->name;
    const loom_safetensors_tensor *tensor;
    LOOM_TRY(loom_safetensors_find(check->file, name, &tensor));
    int64_t count = shape[0] * (dims == 2 ? shape[1] : 1);
    if (tensor->dims != dims || tensor->shape[0] < shape[0] || (dims == 2 && tensor->shape[1] != shape[1]))
        return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: %s has the wrong shape", where, check->layout, name);
    float *wanted = malloc((size_t)(count + 1) * sizeof *wanted);
    if (!wanted)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    loom_status status = loom_safetensors_read_f32(tensor, 0, count, wanted);
    if (!status && check->rule == GRADIENT)
        status = golden_gradient_near(where, check->layout, name, values, wanted, count);
    else if (!status && check->rule == UPDATED)
        status = updated(check, name, values, wanted, count);
    else if (!status && memcmp(values, wanted, (size_t)count * sizeof *wanted) != 0)
        status = loom_fail(LOOM_ERR_INTERNAL, "%s, %s: imported %s is not bit-equal", where, check->layout, name);
    free(wanted);
    check->met++;
    return status;
}

/* Every tensor of the model, and none that the file has beside them. */
static loom_status tensors_agree(const mcore_case *c, const char *layout, golden_model *model,
    const loom_safetensors *file, tensor_rule rule, double rates) {
    if (!file)
        return LOOM_OK;
    tensor_check check = {c, layout, file, rule, rates, 0};
    LOOM_TRY(loom_gpt_visit(model->parallel, rule == GRADIENT, tensor_agrees, &check));
    return golden_near(
        c->name, layout, "number of tensors", (double)check.met, (double)loom_safetensors_count(file), 0);
}

/* ---- logits and token losses */

typedef struct eval_check {
    const mcore_case *c;
    const char *layout;
    int64_t rows; /* whose losses have been compared */
} eval_check;

static loom_status logits_are_near(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    const eval_check *check = context;
    const mcore_case *c = check->c;
    for (int64_t i = 0; i < batch->b * batch->s; i++) {
        char what[GOLDEN_TEXT];
        int64_t row = batch->index[i / batch->s] * batch->s + i % batch->s;
        snprintf(what, sizeof what, "logits of position %lld", (long long)row);
        LOOM_TRY(golden_all_near(c->name, check->layout, what, logits + i * vocabulary, c->logits + row * c->padded,
            vocabulary, 2e-5 * c->largest));
    }
    return LOOM_OK;
}

/* A loss reduction of the test's own, which looks at every token's loss. Losses are differences of logits and the log
 * of a sum of exponentials of them: as near as two logits. */
static loom_status losses_are_near(void *context, const loom_batch *batch, const loom_tensor *losses, float seed,
    double *sum, double *weight, loom_tensor *d_losses) {
    eval_check *check = context;
    const mcore_case *c = check->c;
    (void)seed;
    (void)d_losses;
    for (int64_t j = 0; j < batch->b; j++, check->rows++)
        for (int64_t t = 0; t < batch->s; t++) {
            char what[GOLDEN_TEXT];
            double found = (double)loom_tensor_f32(losses)[t * batch->b + j];
            int64_t row = batch->index[j] * batch->s + t;
            snprintf(what, sizeof what, "loss of position %lld", (long long)row);
            LOOM_TRY(golden_near(c->name, check->layout, what, found, (double)c->losses[row], 4e-5 * c->largest));
            *sum += found;
            *weight += 1;
        }
    return LOOM_OK;
}

/* All rows on every data-parallel rank; the last stage has their losses. */
static loom_status evaluate(const mcore_case *c, const char *layout, golden_model *model) {
    eval_check check = {c, layout, 0};
    loom_loss_reduction reduction = *loom_loss_reduction_masked_token();
    golden_source source;
    loom_batches *batches;
    reduction.context = &check;
    reduction.forward = losses_are_near;
    LOOM_TRY(golden_batches(model, &c->eval, c->eval.b, 1, false, &source, &batches));
    loom_parallel_set_loss_reduction(model->parallel, &reduction);
    loom_status status = loom_parallel_predict_step(model->parallel, batches, logits_are_near, &check);
    loom_parallel_set_loss_reduction(model->parallel, loom_loss_reduction_masked_token());
    loom_batches_destroy(batches);
    LOOM_TRY(status);
    loom_comm *stages = loom_fabric_group(model->fabric, LOOM_GROUP_PP);
    bool last = loom_comm_rank(stages) == loom_comm_size(stages) - 1;
    return golden_near(c->name, layout, "rows with token losses", (double)check.rows, last ? (double)c->eval.b : 0, 0);
}

/* ---- training */

static loom_status train_step(const mcore_case *c, const mcore_layout *layout, const char *name, golden_model *model,
    loom_batches *batches, loom_optimizer *optimizer, int64_t t) {
    double loss = 0, wanted;
    loom_optimizer_outcome outcome = {0};
    char what[3][GOLDEN_TEXT];
    static const char *const names[] = {"loss", "gradient norm", "learning rate"};
    for (int i = 0; i < 3; i++)
        snprintf(what[i], GOLDEN_TEXT, "%s of step %lld", names[i], (long long)t);
    LOOM_TRY(loom_parallel_training_step(model->parallel, batches, &loss));
    wanted = golden_at(layout->numbers, "loss", t);
    LOOM_TRY(golden_near(c->name, name, what[0], loss, wanted, 3e-6 * wanted));
    if (t == 0)
        LOOM_TRY(tensors_agree(c, name, model, c->gradients, GRADIENT, 0));
    LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
    wanted = golden_at(layout->numbers, "grad_norm", t);
    LOOM_TRY(golden_near(c->name, name, what[1], outcome.grad_norm, wanted, 1e-5 * wanted));
    wanted = golden_at(layout->numbers, "lr", t);
    return golden_near(c->name, name, what[2], outcome.lr, wanted, 1e-9 * wanted);
}

static loom_status train(const mcore_case *c, const mcore_layout *layout, const char *name, golden_model *model) {
    loom_optimizer *optimizer;
    loom_batches *batches;
    golden_source source;
    double rates = 0;
    loom_status status = LOOM_OK;
    LOOM_TRY(golden_megatron_optimizer(json_object_get(c->json, "optimizer"), c->steps, model, &optimizer));
    LOOM_TRY(golden_batches(model, &c->train, c->batch, layout->golden.micro, true, &source, &batches));
    for (int64_t t = 0; !status && t < c->steps; t++) {
        status = train_step(c, layout, name, model, batches, optimizer, t);
        rates += golden_at(layout->numbers, "lr", t);
    }
    loom_batches_destroy(batches);
    LOOM_TRY(status);
    LOOM_TRY(tensors_agree(c, name, model, c->after, UPDATED, rates));
    return golden_replicas_are_equal(model, c->name, name);
}

/* ---- the walk */

static loom_status compare(loom_rank *rank, const mcore_case *c, const mcore_layout *layout, golden_model *model) {
    char name[GOLDEN_TEXT];
    golden_layout_name(&layout->golden, name);
    LOOM_TRY(golden_model_create(rank, &layout->golden, c->directory, &c->config, model));
    LOOM_TRY(tensors_agree(c, name, model, c->parameters, EQUAL_BITS, 0));
    LOOM_TRY(evaluate(c, name, model));
    return train(c, layout, name, model);
}

static loom_status walk(loom_rank *rank, void *argument) {
    mcore_suite *suite = argument;
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i++)
        for (int k = 0; k < suite->cases[i].layout_count; k++) {
            const mcore_layout *layout = &suite->cases[i].layouts[k];
            if (layout->golden.tp * layout->golden.dp * layout->golden.pp != loom_rank_count(rank))
                continue;
            golden_model model;
            loom_status status = compare(rank, &suite->cases[i], layout, &model);
            golden_model_destroy(&model);
            LOOM_TRY(status);
            if (loom_rank_index(rank) == 0)
                suite->golden.counts.ran++;
        }
    return LOOM_OK;
}

int main(void) {
    mcore_suite suite = {.golden = {.name = "golden.mcore", .left_out = "none", .walk = walk}};
    load(&suite);
    int failed = golden_claim(&suite.golden, "numbers_are_those_of_megatron_core");
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    return failed;
}
