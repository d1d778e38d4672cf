/* What the commands share: errors as lines and exit statuses, and the way from a run file to ranks with a model. */
#include "commands.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int loom_cli_process(void) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; loom_mpi_launched(NULL) && i < sizeof variables / sizeof *variables; i++) {
        const char *value = getenv(variables[i]);
        if (value)
            return atoi(value);
    }
    return 0;
}

loom_status loom_cli_run_arguments_create(int argc, loom_cli_run_arguments *arguments) {
    const char **overrides = calloc((size_t)argc + 1, sizeof *overrides);
    if (!overrides)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the arguments");
    *arguments = (loom_cli_run_arguments){.overrides = overrides};
    return LOOM_OK;
}

void loom_cli_run_arguments_free(loom_cli_run_arguments *arguments) {
    free(arguments->overrides);
    *arguments = (loom_cli_run_arguments){0};
}

void loom_cli_run_argument(loom_cli_run_arguments *arguments, char *text, const struct argp_state *state) {
    if (strchr(text, '='))
        arguments->overrides[arguments->override_count++] = text;
    else if (!arguments->path)
        arguments->path = text;
    else
        argp_error(state, "more than one run file: %s and %s", arguments->path, text);
}

error_t loom_cli_take_model(loom_cli_model_source *source, int key, const char *text) {
    switch (key) {
    case 'm':
        source->hf = text;
        return 0;
    case LOOM_CLI_KEY_CHECKPOINT:
        source->checkpoint = text;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

void loom_cli_model_source_check(const loom_cli_model_source *source, const struct argp_state *state) {
    if (!source->hf == !source->checkpoint)
        argp_error(state, "one of --hf and --checkpoint must be given");
}

loom_status loom_cli_model_override(const loom_cli_model_source *source, char *text, size_t bytes) {
    size_t at = (size_t)snprintf(text, bytes, source->hf ? "model.hf='" : "model.from='");
    for (const char *c = source->hf ? source->hf : source->checkpoint; *c && at + 4 <= bytes; c++) {
        text[at++] = *c;
        if (*c == '\'')
            text[at++] = '\'';
    }
    if (at + 4 > bytes)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the model is too long");
    memcpy(text + at, "'", 2);
    return LOOM_OK;
}

loom_status loom_cli_complete_model(loom_run_config *config) {
    loom_run_config *stored = NULL;
    if (!config->model.from || config->model.config.vocab_size > 0)
        return LOOM_OK;
    LOOM_TRY(loom_checkpoint_run_config(config->model.from, NULL, 0, &stored));
    config->model.config.vocab_size = stored->model.config.vocab_size;
    loom_run_config_destroy(stored);
    return LOOM_OK;
}

const char *loom_cli_routes_by_rank(const loom_run_config *config) {
    const loom_moe_config *moe = &config->model.config.moe;
    if (moe->num_moe_experts == 0)
        return NULL;
    if (moe->moe_expert_capacity_factor > 0)
        return "model.moe_expert_capacity_factor";
    for (int i = 0; i < LOOM_MOE_BALANCES && moe->moe_router_load_balancing_type[i]; i++)
        if (strcmp(moe->moe_router_load_balancing_type[i], "sinkhorn") == 0)
            return "model.moe_router_load_balancing_type";
    return NULL;
}

static bool is_balanced_by(const loom_moe_config *moe, const char *type) {
    for (int i = 0; i < LOOM_MOE_BALANCES && moe->moe_router_load_balancing_type[i]; i++)
        if (strcmp(moe->moe_router_load_balancing_type[i], type) == 0 && moe->moe_aux_loss_coeff[i] > 0)
            return true;
    return false;
}

const char *loom_cli_goes_by_data_ranks(const loom_run_config *config) {
    const loom_moe_config *moe = &config->model.config.moe;
    const char *order = config->data.dataloader_type;
    bool experts = moe->num_moe_experts > 0;
    if (strcmp(order, "cyclic") == 0)
        return "data.dataloader_type cyclic, by which each data-parallel rank has samples of its own";
    if (strcmp(order, "random_batch") == 0)
        return "data.dataloader_type random_batch, by which each data-parallel rank has samples of its own";
    if (experts && is_balanced_by(moe, "global_aux_loss"))
        return "global_aux_loss, which at a microbatch is of those that all data-parallel ranks have had so far";
    if (experts && strcmp(order, "batch") == 0 && (is_balanced_by(moe, "aux_loss") || loom_cli_routes_by_rank(config)))
        return "data.dataloader_type batch, by which the data-parallel ranks decide what samples are in a microbatch, "
               "whose tokens the routers see together";
    return NULL;
}

int64_t loom_cli_data_parallel_size(const loom_run_config *config, int64_t ranks) {
    const loom_megatron_strategy_config *s = &config->strategy;
    return ranks / (s->tensor_model_parallel_size * s->pipeline_model_parallel_size * s->context_parallel_size);
}

int loom_cli_exit_status(loom_status status) {
    switch (status) {
    case LOOM_OK:
        return 0;
    case LOOM_ERR_ARGUMENT:
    case LOOM_ERR_CONFIG:
    case LOOM_ERR_UNSUPPORTED:
    case LOOM_ERR_FORMAT:
    case LOOM_ERR_NOT_FOUND:
        return 2;
    default:
        return 1;
    }
}

void loom_cli_complain(bool *failed, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("megaloom: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    *failed = true;
}

int loom_cli_fail(loom_status status) {
    char process[32] = "";
    int rank = loom_cli_process();
    /* A fault of all processes is told by the first; it ends the others before their second is over. */
    if (rank > 0) {
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        snprintf(process, sizeof process, "process %d: ", rank);
    }
    const char *line = *loom_error_message() ? loom_error_message() : loom_status_text(status);
    /* A configuration's faults come all at once, one a line. */
    for (const char *end; line; line = *end ? end + 1 : NULL) {
        end = strchrnul(line, '\n');
        fprintf(stderr, "megaloom: %s%.*s\n", process, (int)(end - line), line);
    }
    return loom_cli_exit_status(status);
}

int64_t loom_cli_integer(
    const char *option, const char *text, int64_t least, int64_t most, const struct argp_state *state) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end != text && !*end && !errno && value >= least && value <= most)
        return value;
    if (least == INT64_MIN)
        argp_error(state, "%s: found %s, expected an integer of 64 bits", option, text);
    else if (most == INT64_MAX)
        argp_error(state, "%s: found %s, expected an integer >= %lld", option, text, (long long)least);
    else
        argp_error(state, "%s: found %s, expected an integer from %lld to %lld", option, text, (long long)least,
            (long long)most);
    return least;
}

int64_t loom_cli_read_bytes(const char *text) {
    static const struct {
        const char *unit;
        int64_t bytes;
    } units[] = {{"", 1}, {"B", 1}, {"KB", 1000}, {"MB", 1000000}, {"GB", 1000000000}, {"KiB", 1024}, {"MiB", 1 << 20},
        {"GiB", 1 << 30}};
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || errno || number < 1)
        return -1;
    int64_t bytes;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcasecmp(units[i].unit, end) == 0)
            return __builtin_mul_overflow(number, units[i].bytes, &bytes) ? -1 : bytes;
    return -1;
}

void loom_cli_log(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_DEBUG)
        return;
    /* On a terminal the progress line may stand where this begins: it is written anew behind it. */
    fprintf(stderr, "%smegaloom: %s%s\n", isatty(STDERR_FILENO) ? "\r\033[K" : "",
        level == LOOM_LOG_WARNING ? "warning: " : "", line);
}

loom_status loom_cli_open_tokenizer(loom_run_config *config, loom_tokenizer **tokenizer) {
    int64_t *vocab_size = &config->model.config.vocab_size;
    loom_tokenizer *opened;
    if (strcmp(config->data.kind, "gpt") != 0 && strcmp(config->data.kind, "finetune") != 0)
        return LOOM_OK;
    const char *name = config->data.tokenizer;
    loom_status status = loom_tokenizer_open(name ? name : "byte", &opened);
    if (status)
        return loom_fail_context(status, "data.tokenizer: ");
    if (*vocab_size == 0 && !config->model.hf)
        *vocab_size = opened->vocab_size;
    /* Where none is given, the ids of an indexed dataset may be anybody's. */
    if (*vocab_size < opened->vocab_size && (name || strcmp(config->data.kind, "gpt") != 0)) {
        status = loom_fail(LOOM_ERR_CONFIG,
            "data.tokenizer: %s has %lld tokens, model.vocab_size is %lld, expected at least as many", opened->name,
            (long long)opened->vocab_size, (long long)*vocab_size);
        loom_tokenizer_destroy(opened);
        return status;
    }
    *tokenizer = opened;
    return LOOM_OK;
}

int loom_cli_run(const loom_run_config *config, loom_rank_function function, void *argument) {
    int world = (int)config->ranks;
    bool mpi = loom_mpi_launched(&world);
    loom_status status = loom_run_config_check(config, world);
    if (status)
        return loom_cli_fail(status);
    loom_run_options options = loom_run_options_default();
    options.threads = (int)config->threads;
    options.timeout = config->strategy.timeout;
    options.log = loom_cli_log;
    status = mpi ? loom_run_mpi(function, argument, &options) : loom_run_local(world, function, argument, &options);
    if (!status)
        return 0;
    /* Under MPI the failure has been logged already, once a machine. */
    int code = mpi ? loom_cli_exit_status(status) : loom_cli_fail(status);
    if (status == LOOM_ERR_STUCK) {
        fflush(NULL);
        _exit(1);
    }
    return code;
}

typedef struct text_buffer {
    char *text;
    size_t length;
} text_buffer;

static loom_status append(void *context, const char *text, size_t length) {
    text_buffer *buffer = context;
    char *grown = realloc(buffer->text, buffer->length + length + 1);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a configuration");
    memcpy(grown + buffer->length, text, length);
    buffer->text = grown;
    buffer->length += length;
    grown[buffer->length] = '\0';
    return LOOM_OK;
}

static loom_status compare_texts(const char *mine, const char *first) {
    while (*mine || *first) {
        size_t length = strcspn(mine, "\n"), other = strcspn(first, "\n");
        if (length != other || memcmp(mine, first, length) != 0)
            return loom_fail(LOOM_ERR_CONFIG,
                "this process was given another run file than rank 0: \"%.*s\", there \"%.*s\"", (int)length, mine,
                (int)other, first);
        mine += length + (mine[length] != '\0');
        first += other + (first[other] != '\0');
    }
    return LOOM_OK;
}

loom_status loom_cli_check_same(loom_rank *rank, const loom_run_config *config) {
    loom_comm *world = loom_rank_world(rank);
    text_buffer mine = {0};
    LOOM_TRY(loom_agree(world, loom_run_config_print(config, append, &mine)));
    int64_t length = (int64_t)mine.length;
    loom_status status = loom_broadcast(world, &length, 1, LOOM_I64, 0);
    char *first = status ? NULL : calloc((size_t)length + 1, 1);
    if (!status)
        status = loom_agree(
            world, first ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a configuration"));
    if (!status && loom_rank_index(rank) == 0)
        memcpy(first, mine.text, mine.length);
    if (!status)
        status = loom_broadcast(world, first, length, LOOM_U8, 0);
    if (!status)
        status = loom_agree(world, compare_texts(mine.text, first));
    loom_comm_free(world, first);
    free(mine.text);
    return status;
}

loom_status loom_cli_fabric(loom_rank *rank, const loom_run_config *config, loom_fabric **fabric) {
    loom_fabric *made;
    loom_megatron_strategy_config strategy = config->strategy;
    loom_checkpoint_io io = loom_checkpoint_io_megatron(&config->checkpoint.io);
    strategy.checkpoint_io = &io;
    LOOM_TRY(loom_fabric_create(rank, &strategy, &config->precision, &made));
    loom_fabric_seed_everything(made, (uint64_t)config->seed);
    loom_status status = loom_fabric_launch(made);
    if (status) {
        loom_fabric_destroy(made);
        return status;
    }
    *fabric = made;
    return LOOM_OK;
}

loom_status loom_cli_model(
    loom_fabric *fabric, const loom_run_config *config, bool gradients, loom_parallel **parallel) {
    loom_module *module;
    if (config->model.hf)
        LOOM_TRY(loom_gpt_create_from_hf(fabric, config->model.hf, &config->model.config, &module));
    else
        LOOM_TRY(loom_gpt_create(fabric, &config->model.config, &module));
    LOOM_TRY(gradients ? loom_fabric_setup_module(fabric, module, parallel)
                       : loom_fabric_setup_module_for_inference(fabric, module, parallel));
    return config->model.from ? loom_load_weights(fabric, *parallel, config->model.from) : LOOM_OK;
}

loom_status loom_cli_make_directories(const char *path) {
    char partial[4096];
    if (!*path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is empty");
    if (snprintf(partial, sizeof partial, "%s", path) >= (int)sizeof partial)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    for (char *at = partial + 1;; at++) {
        char kept = *at;
        if (kept != '/' && kept != '\0')
            continue;
        *at = '\0';
        if (mkdir(partial, 0777) != 0 && errno != EEXIST)
            return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %m", partial);
        *at = kept;
        if (kept == '\0')
            return LOOM_OK;
    }
}
