/* Hugging Face's own numbers (hf/<case>): logits, loss and every gradient of a forward and backward, on every layout
 * that divides the case; and what must not change a bit of any gradient: recomputation, reduction in buckets during the
 * backward. */
#include "model.h"

typedef struct hf_case {
    char *name, *directory; /* of the weights */
    loom_model_config config;
    golden_rows rows;
    int64_t vocabulary, valid; /* labels that count */
    float *logits;             /* [b, s, v] */
    double largest;            /* of the logits, in size */
    double loss;
    loom_safetensors *gradients;
} hf_case;

typedef struct hf_suite {
    golden_suite golden;
    hf_case *cases;
} hf_suite;

/* ---- the references */

static void load_case(hf_case *c, const char *path) {
    loom_safetensors *io = NULL;
    int64_t width, elements;
    char *file = golden_path("hf/%s/io.safetensors", c->name);
    golden_must(loom_safetensors_open(file, &io), path);
    c->rows.tokens = golden_i64(io, "input_ids", &c->rows.b, &c->rows.s);
    c->rows.labels = golden_i64(io, "labels", &c->rows.b, &width);
    c->logits = golden_f32(io, "logits", &elements);
    c->vocabulary = elements / (c->rows.b * c->rows.s);
    for (int64_t i = 0; i < elements; i++)
        c->largest = fmax(c->largest, fabs((double)c->logits[i]));
    float *loss = golden_f32(io, "loss", &elements);
    c->loss = (double)loss[0];
    free(loss);
    for (int64_t i = 0; i < c->rows.b * c->rows.s; i++)
        c->valid += c->rows.labels[i] >= 0;
    loom_safetensors_close(io);
    free(file);
    file = golden_path("hf/%s/grads.safetensors", c->name);
    golden_must(loom_safetensors_open(file, &c->gradients), path);
    free(file);
    c->config.seq_length = c->rows.s;
}

static void free_case(hf_case *c) {
    loom_safetensors_close(c->gradients);
    golden_rows_free(&c->rows);
    free(c->logits);
    free(c->name);
    free(c->directory);
}

static void load(hf_suite *suite) {
    glob_t files = golden_glob("hf/*/case.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        hf_case c = {.name = golden_folder_name(files.gl_pathv[i])};
        c.directory = golden_path("hf/%s/model", c.name);
        if (golden_read_config(c.name, c.directory, &c.config)) {
            load_case(&c, files.gl_pathv[i]);
            suite->cases[suite->golden.cases++] = c;
        } else {
            free_case(&c);
            suite->golden.unbuilt++;
        }
    }
    globfree(&files);
}

/* ---- one layout */

typedef struct logits_check {
    const hf_case *c;
    const char *layout;
} logits_check;

static loom_status logits_are_near(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    const logits_check *check = context;
    const hf_case *c = check->c;
    if (vocabulary != c->vocabulary || batch->s != c->rows.s)
        return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: found logits of %lld x %lld, wanted %lld x %lld", c->name,
            check->layout, (long long)batch->s, (long long)vocabulary, (long long)c->rows.s, (long long)c->vocabulary);
    int64_t row = batch->s * vocabulary;
    for (int64_t j = 0; j < batch->b; j++) {
        char what[GOLDEN_TEXT];
        snprintf(what, sizeof what, "logits of row %lld", (long long)batch->index[j]);
        LOOM_TRY(golden_all_near(
            c->name, check->layout, what, logits + j * row, c->logits + batch->index[j] * row, row, 2e-5 * c->largest));
    }
    return LOOM_OK;
}

/* Rank 0: each tensor of the reference is there, near it, and no other. */
static loom_status gradients_are_near(const hf_case *c, const char *layout, const loom_safetensors *found) {
    int64_t count = loom_safetensors_count(c->gradients);
    if (loom_safetensors_count(found) != count)
        return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: found %lld gradients, wanted %lld", c->name, layout,
            (long long)loom_safetensors_count(found), (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const loom_safetensors_tensor *wanted = loom_safetensors_get(c->gradients, i), *tensor;
        LOOM_TRY(loom_safetensors_find(found, wanted->name, &tensor));
        int64_t elements = wanted->elements;
        if (tensor->elements != elements)
            return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: gradient of %s: found %lld elements, wanted %lld", c->name,
                layout, wanted->name, (long long)tensor->elements, (long long)elements);
        float *values = malloc((size_t)(2 * elements + 1) * sizeof *values);
        if (!values)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory");
        loom_status status = loom_safetensors_read_f32(wanted, 0, elements, values);
        if (!status)
            status = loom_safetensors_read_f32(tensor, 0, elements, values + elements);
        if (!status)
            status = golden_gradient_near(c->name, layout, wanted->name, values + elements, values, elements);
        free(values);
        LOOM_TRY(status);
    }
    return LOOM_OK;
}

static loom_status train_once(const hf_case *c, const golden_layout *layout, const char *name, golden_model *model) {
    golden_source source;
    loom_batches *batches = NULL;
    logits_check check = {c, name};
    loom_step_result result = {0};
    LOOM_TRY(golden_batches(model, &c->rows, c->rows.b, layout->micro, true, &source, &batches));
    loom_status status =
        loom_parallel_step(model->parallel, LOOM_TRAINING, batches, NULL, logits_are_near, &check, &result);
    loom_batches_destroy(batches);
    LOOM_TRY(status);
    LOOM_TRY(golden_near(c->name, name, "tokens that count", result.tokens, (double)c->valid, 0));
    return golden_near(c->name, name, "loss", result.loss, c->loss, 2e-6);
}

static loom_status compare(loom_rank *rank, const hf_case *c, const golden_layout *layout, golden_model *model) {
    char name[GOLDEN_TEXT];
    loom_safetensors *file = NULL;
    golden_layout_name(layout, name);
    LOOM_TRY(golden_model_create(rank, layout, c->directory, &c->config, model));
    LOOM_TRY(train_once(c, layout, name, model));
    LOOM_TRY(golden_export(model, true, "hf", &file));
    loom_status status = file ? gradients_are_near(c, name, file) : LOOM_OK;
    loom_safetensors_close(file);
    LOOM_TRY(loom_agree(loom_rank_world(rank), status));
    return golden_replicas_are_equal(model, c->name, name);
}

/* ---- what changes how, not what */

static loom_status same_bits(const hf_case *c, const char *layout, const golden_model *a, const golden_model *b) {
    loom_parameter *const *wanted, *const *found;
    int64_t count, other;
    LOOM_TRY(loom_parallel_parameters(a->parallel, &wanted, &count));
    LOOM_TRY(loom_parallel_parameters(b->parallel, &found, &other));
    for (int64_t i = 0; i < count; i++) {
        int64_t elements = wanted[i]->shape[0] * (wanted[i]->dims == 2 ? wanted[i]->shape[1] : 1);
        if (memcmp(wanted[i]->grad, found[i]->grad, (size_t)elements * sizeof(float)) != 0)
            return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: gradient of %s is not bit-equal to that of the plain run",
                c->name, layout, wanted[i]->name);
    }
    return LOOM_OK;
}

static loom_status changes_nothing(
    loom_rank *rank, const hf_case *c, const golden_layout *layout, const golden_model *plain) {
    golden_model model;
    char name[GOLDEN_TEXT];
    golden_layout_name(layout, name);
    loom_status status = golden_model_create(rank, layout, c->directory, &c->config, &model);
    if (!status)
        status = train_once(c, layout, name, &model);
    if (!status)
        status = same_bits(c, name, plain, &model);
    golden_model_destroy(&model);
    return status;
}

static loom_status variants(loom_rank *rank, const hf_case *c, const golden_layout *layout, const golden_model *plain) {
    golden_layout variant = *layout;
    if ((layout->tp == 1 || layout->sp) && layout->tp <= 2)
        for (int kind = LOOM_RECOMPUTE_SELECTIVE; kind <= LOOM_RECOMPUTE_FULL; kind++) {
            variant.recompute = (loom_recompute)kind;
            LOOM_TRY(changes_nothing(rank, c, &variant, plain));
        }
    variant.recompute = LOOM_RECOMPUTE_NONE;
    variant.overlap = true;
    return layout->dp > 1 ? changes_nothing(rank, c, &variant, plain) : LOOM_OK;
}

/* ---- the walk */

static loom_status run_layout(hf_suite *suite, loom_rank *rank, const hf_case *c, golden_layout *layout) {
    bool first = loom_rank_index(rank) == 0;
    if (!golden_layout_divides(layout, &c->config, c->rows.s, c->rows.b)) {
        if (first)
            suite->golden.counts.left_out++;
        return LOOM_OK;
    }
    if (!golden_groups_divide(&c->config, layout->tp)) {
        LOOM_TRY(golden_check_refusal(rank, c->name, layout, c->directory, &c->config));
        layout->replicate = true;
        if (first)
            suite->golden.counts.refused++;
    }
    golden_model model;
    loom_status status = compare(rank, c, layout, &model);
    if (!status)
        status = variants(rank, c, layout, &model);
    golden_model_destroy(&model);
    if (!status && first)
        suite->golden.counts.ran++;
    return status;
}

/* Of the models every EVERY-th: what threads do to each other does not hang on the architecture. */
#if defined(__SANITIZE_THREAD__)
enum { EVERY = 3 };
#else
enum { EVERY = 1 };
#endif

static loom_status walk(loom_rank *rank, void *argument) {
    hf_suite *suite = argument;
    int world = loom_rank_count(rank);
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i += EVERY)
        for (int tp = 1; tp <= world; tp++)
            for (int sp = 0; world % tp == 0 && sp <= (tp > 1 ? 1 : 0); sp++) {
                int64_t micro = 1, most = suite->cases[i].rows.b * tp / world;
                do {
                    golden_layout layout = {.tp = tp, .dp = world / tp, .sp = sp, .micro = micro};
                    LOOM_TRY(run_layout(suite, rank, &suite->cases[i], &layout));
                    micro *= 2;
                } while (micro <= most);
                golden_layout staged = {.tp = tp, .dp = world / tp / 2, .pp = 2, .sp = sp, .micro = 1};
                if (world / tp % 2 == 0)
                    LOOM_TRY(run_layout(suite, rank, &suite->cases[i], &staged));
                golden_layout sharing = {.tp = tp, .dp = world / tp, .sp = sp, .micro = 1, .ep = 2};
                if (suite->cases[i].config.moe.num_moe_experts > 0 && world / tp % 2 == 0)
                    LOOM_TRY(run_layout(suite, rank, &suite->cases[i], &sharing));
            }
    return LOOM_OK;
}

/* ---- the tests */

static void one_rank_equals_hugging_face(void **state) {
    golden_world(*state, 1);
}

static void two_ranks_equal_hugging_face(void **state) {
    golden_world(*state, 2);
}

static void four_ranks_equal_hugging_face(void **state) {
    golden_world(*state, 4);
}

static void two_ranks_of_three_threads_equal_hugging_face(void **state) {
    hf_suite *suite = *state;
    suite->golden.threads = 3;
    golden_world(&suite->golden, 2);
    suite->golden.threads = 0;
}

static void launched_ranks_equal_hugging_face(void **state) {
    golden_world(*state, 0);
}

int main(void) {
    hf_suite suite = {
        .golden = {.name = "golden.hf", .left_out = "heads, layers, sequence or batch do not divide", .walk = walk}};
    const struct CMUnitTest alone[] = {
        cmocka_unit_test_prestate(one_rank_equals_hugging_face, &suite),
        cmocka_unit_test_prestate(two_ranks_equal_hugging_face, &suite),
        cmocka_unit_test_prestate(four_ranks_equal_hugging_face, &suite),
        cmocka_unit_test_prestate(two_ranks_of_three_threads_equal_hugging_face, &suite),
    };
    const struct CMUnitTest launched[] = {cmocka_unit_test_prestate(launched_ranks_equal_hugging_face, &suite)};
    load(&suite);
    int failed = golden_main(&suite.golden, alone, sizeof alone / sizeof *alone, launched, 1);
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    return failed;
}
