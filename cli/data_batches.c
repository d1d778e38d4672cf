/* megaloom data batches: what each data-parallel rank reads, without any data. Without --steps it shows what the
 * sampler gives from the consumed samples to the end of the epoch, in the keys of the golden samplers; with --steps it
 * runs the loader, so through ramp-up and from epoch to epoch. */
#include "data.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STATUS_USAGE = 2,
    OPTION_KIND = 256,
    OPTION_TOTAL,
    OPTION_CONSUMED,
    OPTION_MICRO,
    OPTION_GLOBAL,
    OPTION_RANKS,
    OPTION_SEED,
    OPTION_KEEP_LAST,
    OPTION_PAD,
    OPTION_RAMPUP,
    OPTION_DECREASE,
    OPTION_STEPS,
    OPTION_JSON
};

typedef struct arguments {
    const char *kind;
    const loom_data_sampler *sampler;
    loom_data_sampler_config config;
    int64_t rampup[3], steps;
    bool decrease, json;
} arguments;

static const struct argp_option options[] = {
    {"dataloader-type", OPTION_KIND, "KIND", 0, "single (the default), cyclic, batch or random_batch", 0},
    {"total", OPTION_TOTAL, "N", 0, "Samples of the dataset", 0},
    {"consumed", OPTION_CONSUMED, "N", 0, "Samples that were read before (default 0)", 0},
    {"micro-batch-size", OPTION_MICRO, "N", 0, "Samples of a microbatch", 0},
    {"global-batch-size", OPTION_GLOBAL, "N", 0, "Samples of a step over all ranks (default: one microbatch a rank)",
        0},
    {"data-parallel-size", OPTION_RANKS, "N", 0, "Ranks (default 1)", 0},
    {"seed", OPTION_SEED, "N", 0, "Of a shuffled order (default 0)", 0},
    {"keep-last", OPTION_KEEP_LAST, NULL, 0, "Keep the incomplete batch at the end", 0},
    {"pad", OPTION_PAD, NULL, 0, "Fill it up with negative numbers", 0},
    {"rampup-batch-size", OPTION_RAMPUP, "START,INCREMENT,SAMPLES", 0,
        "Steps grow from START to the global batch size; with --steps", 0},
    {"decrease-batch-size-if-needed", OPTION_DECREASE, NULL, 0, "Round sizes that do not divide down; with --steps", 0},
    {"steps", OPTION_STEPS, "N", 0, "Show this many steps of training, beginning again at the end of the data", 0},
    {"json", OPTION_JSON, NULL, 0, "Write JSON", 0},
    {0},
};

static void take_rampup(arguments *to, const char *text, const struct argp_state *state) {
    long long values[3];
    char rest;
    if (sscanf(text, "%lld,%lld,%lld%c", &values[0], &values[1], &values[2], &rest) != 3)
        argp_error(state, "--rampup-batch-size is '%s', expected three numbers: START,INCREMENT,SAMPLES", text);
    for (int i = 0; i < 3; i++)
        to->rampup[i] = values[i];
}

static void check_given(const arguments *given, const struct argp_state *state) {
    if (given->config.total_samples == 0)
        argp_error(state, "--total is missing: the samples of the dataset");
    if (given->config.micro_batch_size == 0)
        argp_error(state, "--micro-batch-size is missing");
    if (given->steps == 0 && (given->rampup[0] != 0 || given->decrease))
        argp_error(state, "--rampup-batch-size and --decrease-batch-size-if-needed are of steps: give --steps, too");
}

static error_t parse(int key, char *value, struct argp_state *state) {
    arguments *to = state->input;
    loom_data_sampler_config *config = &to->config;
    switch (key) {
    case OPTION_KIND:
        to->kind = value;
        return 0;
    case OPTION_TOTAL:
        config->total_samples = loom_cli_integer("--total", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_CONSUMED:
        config->consumed_samples = loom_cli_integer("--consumed", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_MICRO:
        config->micro_batch_size = loom_cli_integer("--micro-batch-size", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_GLOBAL:
        config->global_batch_size = loom_cli_integer("--global-batch-size", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_RANKS:
        config->data_parallel_size = loom_cli_integer("--data-parallel-size", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_SEED:
        config->seed = loom_cli_integer("--seed", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_KEEP_LAST:
        config->drop_last = false;
        return 0;
    case OPTION_PAD:
        config->pad_samples_to_global_batch_size = true;
        return 0;
    case OPTION_RAMPUP:
        take_rampup(to, value, state);
        return 0;
    case OPTION_DECREASE:
        to->decrease = true;
        return 0;
    case OPTION_STEPS:
        to->steps = loom_cli_integer("--steps", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_JSON:
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "'%s' is no option: no data is read", value);
        return 0;
    case ARGP_KEY_END:
        check_given(to, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- writing ---- */

static void print_batch(const arguments *given, const int64_t *samples, int64_t count, bool first) {
    printf("%s[", first ? "" : given->json ? ", " : " ");
    for (int64_t i = 0; i < count; i++)
        printf("%s%" PRId64, i == 0 ? "" : given->json ? ", " : " ", samples[i]);
    printf("]");
}

static void print_head(const arguments *given) {
    const loom_data_sampler_config *config = &given->config;
    printf("{\"kind\": \"%s\", \"total\": %" PRId64 ", \"consumed\": %" PRId64 ", \"mbs\": %" PRId64 ", \"gbs\": ",
        given->sampler->name, config->total_samples, config->consumed_samples, config->micro_batch_size);
    if (config->global_batch_size > 0)
        printf("%" PRId64, config->global_batch_size);
    else
        printf("null");
    printf(", \"dp\": %" PRId64 ", \"drop_last\": %d, \"pad\": %d", config->data_parallel_size, config->drop_last,
        config->pad_samples_to_global_batch_size);
    if (given->sampler->order)
        printf(", \"seed\": %" PRId64, config->seed);
    if (given->rampup[0] != 0)
        printf(", \"rampup\": [%" PRId64 ", %" PRId64 ", %" PRId64 "]", given->rampup[0], given->rampup[1],
            given->rampup[2]);
}

/* ---- one epoch of the sampler ---- */

static loom_status print_rank(const arguments *given, int64_t rank, const int64_t *order, int64_t *samples) {
    const loom_data_sampler *sampler = given->sampler;
    loom_data_sampler_config config = given->config;
    int64_t batches, count;
    config.data_parallel_rank = rank;
    config.order = order;
    LOOM_TRY(sampler->length(sampler->context, &config, &batches));
    if (given->json && rank == 0)
        printf(", \"len\": %" PRId64 ", \"batches\": [", batches);
    if (given->json)
        printf("%s[", rank ? ", " : "");
    else
        printf("rank %" PRId64 ": ", rank);
    for (int64_t i = 0; i < batches; i++) {
        LOOM_TRY(sampler->batch(sampler->context, &config, i, samples, &count));
        print_batch(given, samples, count, i == 0);
    }
    fputs(given->json ? "]" : "\n", stdout);
    return LOOM_OK;
}

static loom_status print_epoch(const arguments *given) {
    const loom_data_sampler *sampler = given->sampler;
    const loom_data_sampler_config *config = &given->config;
    int64_t rows = config->micro_batch_size, unused, *order = NULL;
    LOOM_TRY(sampler->length(sampler->context, config, &unused));
    if (sampler->global_batches)
        rows = config->global_batch_size / config->data_parallel_size;
    if (sampler->order)
        LOOM_TRY(sampler->order(sampler->context, config, &order));
    int64_t *samples = calloc((size_t)rows, sizeof *samples);
    loom_status status = samples ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " samples", rows);
    if (!status && given->json)
        print_head(given);
    for (int64_t rank = 0; !status && rank < config->data_parallel_size; rank++)
        status = print_rank(given, rank, order, samples);
    if (!status && given->json)
        printf("]}\n");
    free(samples);
    free(order);
    return status;
}

/* ---- steps of the loader ---- */

static loom_status read_nothing(void *context, int64_t index, const loom_sample_row *row) {
    (void)context, (void)index;
    *row->tokens = *row->labels = *row->position_ids = 0;
    *row->loss_mask = 1.0f;
    return LOOM_OK;
}

static loom_status open_loader(
    const arguments *given, const loom_dataset *dataset, int64_t rank, loom_data_loader *loader) {
    loom_data_loader_config config = loom_data_loader_config_default();
    config.sampler = given->sampler;
    config.micro_batch_size = given->config.micro_batch_size;
    config.global_batch_size = given->config.global_batch_size;
    config.data_parallel_rank = rank;
    config.data_parallel_size = given->config.data_parallel_size;
    config.consumed_samples = given->config.consumed_samples;
    config.drop_last = given->config.drop_last;
    config.pad_samples_to_global_batch_size = given->config.pad_samples_to_global_batch_size;
    config.cycle = true;
    config.seed = given->config.seed;
    memcpy(config.rampup_batch_size, given->rampup, sizeof config.rampup_batch_size);
    config.decrease_batch_size_if_needed = given->decrease;
    return loom_data_loader_create(dataset, &config, loader);
}

/* The microbatches of one step and rank. */
static loom_status print_step(const arguments *given, loom_data_loader *loader, loom_batch *batch, bool first) {
    loom_data_step step;
    LOOM_TRY(loader->step(loader->context, &step));
    for (int64_t m = 0; m < step.microbatches; m++) {
        LOOM_TRY(loader->next(loader->context, batch));
        print_batch(given, batch->index, batch->b, first && m == 0);
    }
    return LOOM_OK;
}

/* [consumed, global batch, running global batch, microbatches] of each step. */
static loom_status print_trace(const arguments *given) {
    const loom_data_step_config sizes = {given->config.global_batch_size, given->config.micro_batch_size,
        given->config.data_parallel_size, {given->rampup[0], given->rampup[1], given->rampup[2]}, given->decrease};
    int64_t consumed = given->config.consumed_samples;
    printf(", \"trace\": [");
    for (int64_t i = 0; i < given->steps; i++) {
        loom_data_step step;
        LOOM_TRY(loom_data_step_at(&sizes, consumed, &step));
        printf("%s[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]", i ? ", " : "", consumed,
            step.global_batch_size, step.running_global_batch_size, step.microbatches);
        consumed += step.running_global_batch_size;
    }
    printf("], \"batches\": [");
    return LOOM_OK;
}

static loom_status print_json_steps(const arguments *given, loom_data_loader *loaders, loom_batch *batch) {
    print_head(given);
    LOOM_TRY(print_trace(given));
    for (int64_t rank = 0; rank < given->config.data_parallel_size; rank++) {
        printf("%s[", rank ? ", " : "");
        for (int64_t i = 0; i < given->steps; i++)
            LOOM_TRY(print_step(given, &loaders[rank], batch, i == 0));
        printf("]");
    }
    printf("]}\n");
    return LOOM_OK;
}

static loom_status print_text_steps(const arguments *given, loom_data_loader *loaders, loom_batch *batch) {
    for (int64_t i = 0; i < given->steps; i++) {
        loom_data_step step;
        LOOM_TRY(loaders[0].step(loaders[0].context, &step));
        printf("step %" PRId64 ": after %" PRId64 " samples, %" PRId64 " in %" PRId64 " microbatch%s\n", i,
            loaders[0].consumed_samples(loaders[0].context), step.running_global_batch_size, step.microbatches,
            step.microbatches == 1 ? "" : "es");
        for (int64_t rank = 0; rank < given->config.data_parallel_size; rank++) {
            printf("  rank %" PRId64 ": ", rank);
            LOOM_TRY(print_step(given, &loaders[rank], batch, true));
            printf("\n");
        }
    }
    return LOOM_OK;
}

static loom_status print_steps(const arguments *given) {
    const loom_dataset dataset = {.length = given->config.total_samples, .sequence_length = 1, .get = read_nothing};
    int64_t ranks = given->config.data_parallel_size, made = 0;
    loom_data_loader *loaders = calloc((size_t)ranks, sizeof *loaders);
    loom_batch *batch = NULL;
    loom_status status = loaders ? loom_batch_create(given->config.micro_batch_size, 1, false, &batch)
                                 : loom_fail(LOOM_ERR_MEMORY, "out of memory for %" PRId64 " ranks", ranks);
    for (; !status && made < ranks; made++) {
        status = open_loader(given, &dataset, made, &loaders[made]);
        if (status)
            break;
    }
    if (!status)
        status = given->json ? print_json_steps(given, loaders, batch) : print_text_steps(given, loaders, batch);
    for (int64_t rank = 0; rank < made; rank++)
        loom_data_loader_destroy(&loaders[rank]);
    loom_batch_destroy(batch);
    free(loaders);
    return status;
}

int loom_cli_data_batches(int argc, char **argv) {
    static const struct argp parser = {.options = options,
        .parser = parse,
        .args_doc = "--total N --micro-batch-size N",
        .doc = "Shows which samples each data-parallel rank reads in which batch. No data is needed."};
    arguments given = {.kind = "single", .config = {.data_parallel_size = 1, .drop_last = true}};
    if (argp_parse(&parser, argc, argv, 0, NULL, &given) != 0)
        return STATUS_USAGE;
    if (given.steps > 0 && given.config.global_batch_size == 0)
        given.config.global_batch_size = given.config.micro_batch_size * given.config.data_parallel_size;
    loom_status status = loom_data_sampler_find(given.kind, &given.sampler);
    if (!status)
        status = given.steps > 0 ? print_steps(&given) : print_epoch(&given);
    fflush(stdout);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}
