/* megaloom plan: what a run will need and how long it will take, and all that is wrong with it, without a rank. All
 * answers come from <megaloom/plan.h>; this file reads the command line. */
#include "plan.h"
#include "commands.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    KEY_WORLD = 'w',
    KEY_MEMORY = 'm',
    KEY_SEARCH = 's',
    KEY_JSON = 'j',
    KEY_MACHINE = 256,
    KEY_NODE,
    KEY_FLOPS,
    KEY_MEGATRON,
    KEY_NEMO
};

enum { TEXT_MAX = 1 << 20 };

typedef struct plan_request {
    loom_cli_run_arguments run;
    loom_plan_options options;
    double memory, flops;        /* 0 = the machine's */
    int64_t ranks_per_node;      /* 0 = the machine's */
    const char *megatron, *nemo; /* files of other programs; NULL = none */
    bool search, json;
} plan_request;

/* A number with a unit, in any case: "80GiB", "80 gb", "312T", "80e9". */
static bool read_amount(const char *text, double *out) {
    static const struct {
        const char *unit;
        double factor;
    } units[] = {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"P", 1e15}, {"KB", 1e3}, {"MB", 1e6},
        {"GB", 1e9}, {"TB", 1e12}, {"PB", 1e15}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
        {"PiB", 0x1p50}};
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || errno != 0 || !(value > 0) || value > 1e30)
        return false;
    end += *end == ' ';
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcasecmp(end, units[i].unit) == 0) {
            *out = value * units[i].factor;
            return true;
        }
    return false;
}

/* "80" is meant as 80 GiB. */
static void take_memory(plan_request *to, const char *text, const struct argp_state *state) {
    if (!read_amount(text, &to->memory))
        argp_error(state,
            "--memory: found %s, expected bytes of a rank such as 80GiB or 64GB (units K, M, G, T, P; KB … PB of 1000, "
            "KiB … PiB of 1024)",
            text);
    else if (to->memory < 0x1p20)
        argp_error(state, "--memory: found %s, less than a megabyte; expected bytes of a rank such as 80GiB", text);
}

static void take_machine(plan_request *to, const char *text, const struct argp_state *state) {
    const char *const *names = loom_plan_machine_names();
    int count = 0;
    char all[160] = "";
    if (loom_plan_machine_find(text, &to->options.machine))
        return;
    for (; names[count]; count++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", count ? ", " : "", names[count]);
    const char *meant = loom_nearest_name(text, names, count);
    argp_error(state, "--machine: found %s, expected one of %s%s%s%s", text, all, meant ? "; did you mean " : "",
        meant ? meant : "", meant ? "?" : "");
}

static error_t take(int key, char *text, struct argp_state *state) {
    plan_request *to = state->input;
    switch (key) {
    case KEY_WORLD:
        to->options.world_size = loom_cli_integer("--world-size", text, 1, INT32_MAX, state);
        return 0;
    case KEY_MEMORY:
        take_memory(to, text, state);
        return 0;
    case KEY_FLOPS:
        if (!read_amount(text, &to->flops))
            argp_error(state, "--flops: found %s, expected operations a second of a rank such as 312T", text);
        return 0;
    case KEY_MACHINE:
        take_machine(to, text, state);
        return 0;
    case KEY_NODE:
        to->ranks_per_node = loom_cli_integer("--ranks-per-node", text, 1, INT32_MAX, state);
        return 0;
    case KEY_MEGATRON:
        to->megatron = text;
        return 0;
    case KEY_NEMO:
        to->nemo = text;
        return 0;
    case KEY_SEARCH:
        to->search = true;
        return 0;
    case KEY_JSON:
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        if ((to->run.path != NULL) + (to->megatron != NULL) + (to->nemo != NULL) > 1)
            argp_error(state, "give one of a run file, --megatron-args and --nemo");
        if (!to->run.path && !to->megatron && !to->nemo && !to->run.override_count)
            argp_error(state, "give a run file, overrides, --megatron-args FILE or --nemo FILE");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The vocabulary of a tokenizer is needed where the run file does not say it. */
static loom_status find_vocabulary(void *context, loom_run_config *config) {
    (void)context;
    loom_tokenizer *tokenizer = NULL;
    if (config->model.config.vocab_size > 0 || config->model.hf || config->model.from || !config->data.tokenizer)
        return LOOM_OK;
    loom_status status = loom_cli_open_tokenizer(config, &tokenizer);
    loom_tokenizer_destroy(tokenizer);
    return status;
}

static loom_status show(const plan_request *request, const loom_cli_plan_facts *facts, bool *fits) {
    const loom_plan *plan = facts->plan;
    *fits = !(plan->memory_limit > 0) || plan->stages[plan->worst].memory.total <= plan->memory_limit;
    if (request->json)
        LOOM_TRY(loom_cli_plan_json(facts));
    else
        loom_cli_plan_text(facts);
    if (fflush(stdout) != 0 || ferror(stdout))
        return loom_fail(LOOM_ERR_IO, "cannot write the output: %m");
    return LOOM_OK;
}

static loom_status read_text(const char *path, char **text, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: %m", path);
    char *made = malloc(TEXT_MAX + 1);
    size_t count = made ? fread(made, 1, TEXT_MAX + 1, file) : 0;
    loom_status status = made ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    if (!status && ferror(file))
        status = loom_fail(LOOM_ERR_IO, "%s: %m", path);
    else if (!status && count > TEXT_MAX)
        status = loom_fail(LOOM_ERR_FORMAT, "%s: more than %d bytes", path, TEXT_MAX);
    fclose(file);
    if (status) {
        free(made);
        return status;
    }
    *text = made;
    *length = count;
    return LOOM_OK;
}

/* Translates the file of another program, where one is given or the run file is one. */
static loom_status translate(plan_request *request, loom_plan_translation *translation) {
    char *text = NULL;
    size_t length = 0;
    const char *path = request->megatron ? request->megatron : request->nemo ? request->nemo : request->run.path;
    if (!path)
        return LOOM_OK;
    LOOM_TRY(read_text(path, &text, &length));
    loom_status status = LOOM_OK;
    if (request->megatron) {
        status = loom_plan_translate_megatron(path, text, length, translation);
    } else if (request->nemo || loom_plan_is_nemo(text, length)) {
        status = loom_plan_translate_nemo(path, text, length, translation);
        request->run.path = NULL;
    }
    free(text);
    return status;
}

/* The translated fields, then the overrides of the command line. */
static loom_status join(const plan_request *request, const loom_plan_translation *translation, const char ***out) {
    int64_t own = translation->override_count, given = request->run.override_count;
    const char **all = calloc((size_t)(own + given) + 1, sizeof *all);
    if (!all)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the fields of a plan");
    for (int64_t i = 0; i < own; i++)
        all[i] = translation->overrides[i];
    for (int64_t i = 0; i < given; i++)
        all[own + i] = request->run.overrides[i];
    *out = all;
    return LOOM_OK;
}

/* What a translation leaves out, and what it does not know. The caller frees it. */
static loom_status tell_left_out(
    const plan_request *request, const loom_plan_translation *translation, char **left_out) {
    static const char unknown[] = "how many ranks there are: --world-size=RANKS says it; taken for 1";
    const char *lines = translation->left_out ? translation->left_out : "";
    bool told = translation->override_count == 0 || request->options.world_size > 0;
    if (asprintf(left_out, "%s%s%s", lines, !told && *lines ? "\n" : "", told ? "" : unknown) < 0)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the lines of a plan");
    return LOOM_OK;
}

/* Where a plan fails, what was left out may be why. */
static void print_left_out(const char *name, const char *left_out) {
    const char *next;
    for (const char *line = left_out; *line; line = next) {
        size_t length = strcspn(line, "\n");
        fprintf(stderr, "megaloom: %s: left out: %.*s\n", name, (int)length, line);
        next = line + length + (line[length] == '\n');
    }
}

static loom_status plan_translated(plan_request *request, const loom_plan_translation *translation, const char *name,
    const char *left_out, bool *fits) {
    loom_run_config *config = NULL;
    char *not_built = NULL;
    const char **overrides = NULL;
    const loom_plan_check check = {.world_size = request->options.world_size,
        .source = name,
        .translated = translation->override_count,
        .faults = translation->faults,
        .prepare = find_vocabulary};
    LOOM_TRY(join(request, translation, &overrides));
    loom_status status = loom_run_config_load_planned(request->run.path, overrides,
        translation->override_count + request->run.override_count, &check, &config, &not_built);
    free(overrides);
    LOOM_TRY(status);
    loom_cli_plan_facts facts = {
        .name = name, .config = config, .options = &request->options, .not_built = not_built, .left_out = left_out};
    loom_plan *plan = NULL;
    loom_plan_search *search = NULL;
    status = loom_plan_make(config, &request->options, &plan);
    if (!status && request->search)
        status = loom_plan_search_make(config, &request->options, &search);
    facts.plan = plan;
    facts.search = search;
    if (!status)
        status = show(request, &facts, fits);
    loom_plan_destroy(plan);
    loom_plan_search_destroy(search);
    free(not_built);
    loom_run_config_destroy(config);
    return status;
}

static loom_status answer(plan_request *request, bool *fits) {
    loom_plan_machine *machine = &request->options.machine;
    machine->memory = request->memory > 0 ? request->memory : machine->memory;
    machine->flops = request->flops > 0 ? request->flops : machine->flops;
    machine->ranks_per_node = request->ranks_per_node > 0 ? request->ranks_per_node : machine->ranks_per_node;
    const char *name = request->megatron ? request->megatron : request->nemo ? request->nemo : request->run.path;
    loom_plan_translation translation = {0};
    char *left_out = NULL;
    LOOM_TRY(translate(request, &translation));
    if (request->options.world_size == 0)
        request->options.world_size = translation.world_size;
    loom_status status = tell_left_out(request, &translation, &left_out);
    if (!status)
        status = plan_translated(request, &translation, name ? name : "plan", left_out, fits);
    if (status && left_out)
        print_left_out(name ? name : "plan", left_out);
    free(left_out);
    loom_plan_translation_free(&translation);
    return status;
}

int loom_cli_plan(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"world-size", KEY_WORLD, "RANKS", 0, "Ranks in all (default: the run file's ranks)", 0},
        {"memory", KEY_MEMORY, "BYTES", 0, "Memory of a rank, such as 80GiB (default: the machine's)", 0},
        {"machine", KEY_MACHINE, "NAME", 0, "What a rank runs on: cpu (default), a100, h100, b200", 0},
        {"ranks-per-node", KEY_NODE, "RANKS", 0, "Ranks that share a node (default: the machine's)", 0},
        {"flops", KEY_FLOPS, "RATE", 0, "Operations a second of a rank at best, such as 312T (default: the machine's)",
            0},
        {"megatron-args", KEY_MEGATRON, "FILE", 0, "Plan a command line of Megatron-LM, as a shell script has it", 0},
        {"nemo", KEY_NEMO, "FILE", 0,
            "Plan a YAML file of NeMo or Megatron-Bridge (a run file that is one is recognised)", 0},
        {"search", KEY_SEARCH, NULL, 0, "List the layouts that fit, fastest first, and why the others fall", 0},
        {"json", KEY_JSON, NULL, 0, "JSON: all numbers, in bytes, seconds and operations", 0},
        {0},
    };
    static const struct argp argp = {.options = options,
        .parser = take,
        .args_doc = "[RUN.yaml] [FIELD=VALUE...]",
        .doc = "Tells what a run will need before it starts: memory of a rank by kind, operations and traffic of a "
               "step, idle time of the pipeline, and what binds. All faults of the run file are named at once. No rank "
               "is started.\v"
               "The exit status is 1 where a rank needs more memory than it has.\n\n"
               "Example: megaloom plan examples/plan/gpt3-175b.yaml --machine a100 --search"};
    plan_request request = {.options = loom_plan_options_default()};
    loom_status status = loom_cli_run_arguments_create(argc, &request.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &request);
    bool fits = true;
    status = answer(&request, &fits);
    loom_cli_run_arguments_free(&request.run);
    return status ? loom_cli_fail(status) : fits ? EXIT_SUCCESS : EXIT_FAILURE;
}
