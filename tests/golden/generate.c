/* What the transformers package generates greedily (generate/<case>.json, made by tools/record-generation.py): the same
 * tokens on every layout of tensor and expert ranks that divides the case, with the cache, prompts of one length or of
 * all lengths side by side, and without it, by a forward over the whole text for each token. Data ranks that share
 * experts read different prompts at the same time. */
#include "model.h"

enum { ROWS_MAX = 8, ALL_ROWS_MAX = 32 };

typedef struct token_batch {
    int64_t rows, length, made;
    int64_t *prompts; /* [rows, length] */
    int64_t *tokens;  /* [rows, made] */
} token_batch;

typedef struct generate_case {
    char *name, *directory;
    loom_model_config config;
    token_batch *batches;
    int64_t batch_count;
} generate_case;

typedef struct generate_suite {
    golden_suite golden;
    generate_case *cases;
} generate_suite;

/* ---- the references */

static int64_t *read_rows(const json_t *list, int64_t *rows, int64_t *width) {
    *rows = (int64_t)json_array_size(list);
    *width = (int64_t)json_array_size(json_array_get(list, 0));
    int64_t *values = golden_allocate((size_t)(*rows * *width) * sizeof *values);
    for (int64_t i = 0; i < *rows * *width; i++)
        values[i] =
            json_integer_value(json_array_get(json_array_get(list, (size_t)(i / *width)), (size_t)(i % *width)));
    return values;
}

static void load_batches(generate_case *c, const char *path, const json_t *json) {
    json_t *batches = json_object_get(json, "batches");
    c->batch_count = (int64_t)json_array_size(batches);
    c->batches = golden_allocate((size_t)c->batch_count * sizeof *c->batches);
    for (int64_t i = 0; i < c->batch_count; i++) {
        json_t *batch = json_array_get(batches, (size_t)i);
        token_batch *to = &c->batches[i];
        int64_t rows;
        to->prompts = read_rows(json_object_get(batch, "prompts"), &to->rows, &to->length);
        to->tokens = read_rows(json_object_get(batch, "tokens"), &rows, &to->made);
        if (rows != to->rows || rows < 1 || rows > ROWS_MAX || to->length < 1 || to->made < 1) {
            fprintf(stderr, "%s: batch %lld: prompts and tokens must be 1 to %d rows, not empty\n", path, (long long)i,
                ROWS_MAX);
            exit(2);
        }
    }
}

static void free_case(generate_case *c) {
    for (int64_t i = 0; i < c->batch_count; i++) {
        free(c->batches[i].prompts);
        free(c->batches[i].tokens);
    }
    free(c->batches);
    free(c->name);
    free(c->directory);
}

static void load(generate_suite *suite) {
    glob_t files = golden_glob("generate/*.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char *path = files.gl_pathv[i];
        json_t *json = golden_json(path);
        const char *model = golden_string(json, "model", "");
        generate_case c = {.name = golden_path("%s", model), .directory = golden_path("%s", model)};
        if (golden_read_config(path, c.directory, &c.config)) {
            load_batches(&c, path, json);
            suite->cases[suite->golden.cases++] = c;
        } else {
            free_case(&c);
            suite->golden.unbuilt++;
        }
        json_decref(json);
    }
    globfree(&files);
}

/* ---- one layout */

static loom_status same_token(const generate_case *c, const char *layout, const char *how, const token_batch *batch,
    int64_t row, int64_t step, int64_t found) {
    int64_t wanted = batch->tokens[row * batch->made + step];
    if (found == wanted)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_INTERNAL,
        "%s, %s: %s: token %lld of row %lld behind a prompt of %lld: found %lld, wanted %lld", c->name, layout, how,
        (long long)step, (long long)row, (long long)batch->length, (long long)found, (long long)wanted);
}

/* Rows of `count` batches from number `first` on, side by side. */
static loom_status with_cache(
    const golden_model *model, const generate_case *c, const char *layout, int64_t first, int64_t count) {
    const token_batch *of[ALL_ROWS_MAX];
    loom_prompt prompts[ALL_ROWS_MAX];
    int64_t row[ALL_ROWS_MAX], rows = 0, made = 0;
    for (int64_t i = first; i < first + count; i++) {
        const token_batch *batch = &c->batches[i % c->batch_count];
        for (int64_t j = 0; j < batch->rows && rows < ALL_ROWS_MAX; j++, rows++) {
            of[rows] = batch;
            row[rows] = j;
            prompts[rows] = (loom_prompt){batch->prompts + j * batch->length, batch->length};
        }
        made = batch->made > made ? batch->made : made;
    }
    loom_generate_options options = loom_generate_options_default();
    loom_generation *generation;
    options.max_tokens = made;
    LOOM_TRY(loom_generation_create(model->parallel, prompts, rows, &options, &generation));
    loom_status status = LOOM_OK;
    int64_t step = 0;
    for (const int64_t *tokens; !status; step++) {
        status = loom_generation_next(generation, &tokens);
        for (int64_t j = 0; !status && j < rows; j++)
            if (step < of[j]->made)
                status = same_token(
                    c, layout, count > 1 ? "beside other lengths" : "with the cache", of[j], row[j], step, tokens[j]);
    }
    loom_generation_destroy(generation);
    if (status != LOOM_END)
        return status;
    return golden_near(c->name, layout, "tokens made", (double)(step - 1), (double)made, 0);
}

/* The token that the logits of the last position choose, for each row. */
typedef struct chosen {
    int64_t tokens[ROWS_MAX];
} chosen;

static loom_status choose(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    chosen *to = context;
    for (int64_t j = 0; j < batch->b; j++) {
        const float *last = logits + ((j + 1) * batch->s - 1) * vocabulary;
        int64_t best = 0;
        for (int64_t i = 1; i < vocabulary; i++)
            best = last[i] > last[best] ? i : best;
        to->tokens[batch->index[j]] = best;
    }
    return LOOM_OK;
}

static loom_status without_cache(
    const golden_model *model, const generate_case *c, const char *layout, const token_batch *batch) {
    int64_t longest = batch->length + batch->made;
    int64_t *memory = calloc((size_t)(2 * batch->rows * longest), sizeof *memory);
    if (!memory)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    golden_rows rows = {batch->rows, 0, memory, memory + batch->rows * longest};
    loom_status status = LOOM_OK;
    for (int64_t step = 0; !status && step < batch->made; step++) {
        golden_source source;
        loom_batches *batches = NULL;
        chosen found = {{0}};
        rows.s = batch->length + step;
        for (int64_t j = 0; j < rows.b; j++)
            for (int64_t t = 0; t < rows.s; t++)
                rows.tokens[j * rows.s + t] = t < batch->length ? batch->prompts[j * batch->length + t]
                                                                : batch->tokens[j * batch->made + t - batch->length];
        status = golden_batches(model, &rows, rows.b, rows.b, false, &source, &batches);
        if (!status)
            status = loom_parallel_predict_step(model->parallel, batches, choose, &found);
        loom_batches_destroy(batches);
        for (int64_t j = 0; !status && j < rows.b; j++)
            status = same_token(c, layout, "without the cache", batch, j, step, found.tokens[j]);
    }
    free(memory);
    return status;
}

/* Without the cache the sequence has every length, which sequence parallelism does not divide. Of the many layouts of
 * experts each reads one batch by itself, another one on each data rank; then come all side by side. */
static loom_status compare(loom_rank *rank, const generate_case *c, const golden_layout *layout, golden_model *model) {
    char name[GOLDEN_TEXT];
    golden_layout_name(layout, name);
    LOOM_TRY(golden_model_create(rank, layout, c->directory, &c->config, model));
    int64_t mine = loom_comm_rank(loom_fabric_group(model->fabric, LOOM_GROUP_DP));
    for (int64_t i = 0; i < (layout->ep ? 1 : c->batch_count); i++) {
        LOOM_TRY(with_cache(model, c, name, i + mine, 1));
        if (!layout->sp && layout->dp == 1)
            LOOM_TRY(without_cache(model, c, name, &c->batches[i]));
    }
    return with_cache(model, c, name, mine, c->batch_count);
}

static loom_status run_layout(loom_rank *rank, generate_suite *suite, const generate_case *c, golden_layout layout) {
    bool first = loom_rank_index(rank) == 0;
    if (!golden_layout_divides(&layout, &c->config, c->config.seq_length, layout.dp)) {
        suite->golden.counts.left_out += first;
        return LOOM_OK;
    }
    if (!golden_groups_divide(&c->config, layout.tp)) {
        LOOM_TRY(golden_check_refusal(rank, c->name, &layout, c->directory, &c->config));
        layout.replicate = true;
        suite->golden.counts.refused += first;
    }
    golden_model model;
    loom_status status = compare(rank, c, &layout, &model);
    golden_model_destroy(&model);
    suite->golden.counts.ran += first;
    return status;
}

/* Experts over every number of ranks, cut or shared out or both, which tensor groups divide or do not; each dispatcher
 * on every second layout. */
static loom_status run_expert_layouts(loom_rank *rank, generate_suite *suite, const generate_case *c) {
    int world = loom_rank_count(rank), number = 0;
    for (int tp = 1; tp <= world; tp++)
        for (int ep = 1; ep <= world; ep++)
            for (int etp = 1; ep * etp <= world; etp++) {
                golden_layout layout = {.tp = tp, .dp = world / tp, .sp = tp > 1, .micro = 1, .ep = ep, .etp = etp};
                if (world % tp || world % (ep * etp) || ep * etp == 1)
                    continue;
                generate_case other = *c;
                other.config.moe.moe_token_dispatcher_type = number++ % 2 ? "alltoall" : "allgather";
                LOOM_TRY(run_layout(rank, suite, &other, layout));
            }
    return LOOM_OK;
}

static loom_status walk(loom_rank *rank, void *argument) {
    generate_suite *suite = argument;
    int world = loom_rank_count(rank);
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i++) {
        const generate_case *c = &suite->cases[i];
        for (int sp = 0; sp <= (world > 1 ? 1 : 0); sp++)
            LOOM_TRY(run_layout(rank, suite, c, (golden_layout){.tp = world, .dp = 1, .sp = sp, .micro = 1}));
        if (c->config.moe.num_moe_experts > 0)
            LOOM_TRY(run_expert_layouts(rank, suite, c));
    }
    return LOOM_OK;
}

int main(void) {
    generate_suite suite = {.golden = {.name = "golden.generate", .left_out = "heads do not divide", .walk = walk}};
    load(&suite);
    int failed = golden_claim(&suite.golden, "tokens_are_those_of_transformers");
    for (int i = 0; i < suite.golden.cases; i++)
        free_case(&suite.cases[i]);
    free(suite.cases);
    return failed;
}
