/* megaloom topology: every process group of a configuration, without running a rank. All answers come from
 * <megaloom/layout.h>; this file reads the command line and nothing else, and tells all that is wrong with it at once.
 */
#include "topology.h"
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <megaloom/names.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2, KEY_RANK = 'r', KEY_WORLD = 'w', KEY_JSON = 'j', KEY_SVG = 1, KEY_HTML, KEY_NODE };

/* Groups are folded by looking at each member: up to here that takes no time that a person notices. */
enum { WORLD_MAX = 1 << 24 };

typedef struct topology_request {
    loom_parallel_sizes sizes;
    bool world_given, rank_given, json, failed;
    int64_t rank, ranks_per_node;
    const char *svg, *html; /* files; NULL = none */
} topology_request;

/* The fields of the strategy that a layout depends on. */
#define PREFIX "strategy."
#define FIELD(name, member)                                                                                            \
    { PREFIX name, offsetof(loom_parallel_sizes, member) }
static const struct {
    const char *path;
    size_t offset;
} number_field[] = {
    FIELD("tensor_model_parallel_size", tensor),
    FIELD("pipeline_model_parallel_size", pipeline),
    FIELD("virtual_pipeline_model_parallel_size", virtual_pipeline),
    FIELD("context_parallel_size", context),
    FIELD("expert_model_parallel_size", expert),
    FIELD("expert_tensor_parallel_size", expert_tensor),
    FIELD("encoder_tensor_model_parallel_size", encoder_tensor),
    FIELD("encoder_pipeline_model_parallel_size", encoder_pipeline),
    FIELD("num_distributed_optimizer_instances", optimizer_instances),
};
enum { NUMBER_FIELDS = sizeof number_field / sizeof *number_field };
static const char levels_path[] = PREFIX "hierarchical_context_parallel_sizes";
static const char mapping_path[] = PREFIX "use_tp_pp_dp_mapping";
static const char extended_path[] = PREFIX "moe_extended_tp";
static const char order_path[] = PREFIX "order";
enum { FIELDS = NUMBER_FIELDS + 4, PREFIX_LENGTH = sizeof PREFIX - 1 };

static bool read_number(const char *text, int64_t *out) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || (*text != '-' && (*text < '0' || *text > '9')))
        return false;
    *out = value;
    return true;
}

/* Names the field that was meant, or all of them. What was meant may have a wrong prefix or none. */
static void complain_of_field(topology_request *request, const char *field) {
    const char *names[2 * FIELDS] = {[NUMBER_FIELDS] = levels_path, extended_path, mapping_path, order_path};
    for (int i = 0; i < NUMBER_FIELDS; i++)
        names[i] = number_field[i].path;
    for (int i = 0; i < FIELDS; i++)
        names[FIELDS + i] = names[i] + PREFIX_LENGTH;
    bool prefixed = strncmp(field, PREFIX, PREFIX_LENGTH) == 0;
    const char *meant = loom_nearest_name(prefixed ? field + PREFIX_LENGTH : field, names, 2 * FIELDS);
    if (meant) {
        if (strncmp(meant, PREFIX, PREFIX_LENGTH) == 0)
            meant += PREFIX_LENGTH;
        loom_cli_complain(
            &request->failed, "%s: no field that the topology depends on; did you mean " PREFIX "%s?", field, meant);
        return;
    }
    char list[1024] = "";
    for (int i = 0, used = 0; i < FIELDS; i++)
        used += snprintf(list + used, sizeof list - (size_t)used, "%s%s", i > 0 ? ", " : "", names[i]);
    loom_cli_complain(&request->failed, "%s: no field that the topology depends on; those are %s", field, list);
}

/* [4, 2], 4,2 or 4x2: innermost level first. */
static void read_levels(topology_request *request, const char *text) {
    loom_parallel_sizes *sizes = &request->sizes;
    const char *p = text + (*text == '[');
    int levels = 0;
    while (true) {
        char *end;
        errno = 0;
        long long value = strtoll(p, &end, 10);
        if (end == p || errno != 0)
            break;
        if (levels < LOOM_LAYOUT_HCP_LEVELS)
            sizes->hierarchical_context[levels] = value;
        levels++;
        p = end + strspn(end, " ");
        if (*p != ',' && *p != 'x') {
            p += *text == '[' && *p == ']';
            if (*p != '\0')
                break;
            sizes->hierarchical_levels = levels;
            return;
        }
        p += 1 + strspn(p + 1, " ");
    }
    loom_cli_complain(
        &request->failed, "%s: found \"%s\", expected sizes, innermost first, e.g. [4,2]", levels_path, text);
}

static void read_override(topology_request *request, char *argument) {
    loom_parallel_sizes *sizes = &request->sizes;
    char *equals = strchr(argument, '=');
    if (!equals) {
        loom_cli_complain(&request->failed, "%s: expected strategy.FIELD=VALUE", argument);
        return;
    }
    *equals = '\0';
    const char *field = argument, *value = equals + 1;
    bool none = strcmp(value, "null") == 0 || strcmp(value, "none") == 0 || strcmp(value, "None") == 0;

    for (int i = 0; i < NUMBER_FIELDS; i++) {
        if (strcmp(field, number_field[i].path) != 0)
            continue;
        int64_t *member = (int64_t *)((char *)sizes + number_field[i].offset), number = 0;
        bool optional = member == &sizes->virtual_pipeline || member == &sizes->expert_tensor;
        if (optional && none)
            *member = 0;
        else if (!read_number(value, &number))
            loom_cli_complain(
                &request->failed, "%s: found \"%s\", expected an integer%s", field, value, optional ? ", or null" : "");
        else if (optional && number == 0)
            loom_cli_complain(&request->failed, "%s: found 0, expected at least 1, or null", field);
        else
            *member = number;
        return;
    }
    if (strcmp(field, levels_path) == 0) {
        if (none)
            sizes->hierarchical_levels = 0;
        else
            read_levels(request, value);
    } else if (strcmp(field, mapping_path) == 0 || strcmp(field, extended_path) == 0) {
        bool yes = strcmp(value, "true") == 0 || strcmp(value, "True") == 0;
        if (!yes && strcmp(value, "false") != 0 && strcmp(value, "False") != 0)
            loom_cli_complain(&request->failed, "%s: found \"%s\", expected true or false", field, value);
        *(strcmp(field, mapping_path) == 0 ? &sizes->use_tp_pp_dp_mapping : &sizes->moe_extended_tp) = yes;
    } else if (strcmp(field, order_path) == 0) {
        if (strlen(value) >= sizeof sizes->order || *value == '\0')
            loom_cli_complain(
                &request->failed, "%s: found \"%s\", expected axes joined by '-', e.g. tp-cp-ep-dp-pp", field, value);
        else
            strcpy(sizes->order, value);
    } else {
        complain_of_field(request, field);
    }
}

static error_t parse(int key, char *argument, struct argp_state *state) {
    topology_request *request = state->input;
    switch (key) {
    case KEY_WORLD:
        request->world_given = true;
        if (!read_number(argument, &request->sizes.world) || request->sizes.world > WORLD_MAX)
            loom_cli_complain(&request->failed, "--world-size: found \"%s\", expected a number of ranks, at most %d",
                argument, WORLD_MAX);
        return 0;
    case KEY_RANK:
        request->rank_given = true;
        if (!read_number(argument, &request->rank))
            loom_cli_complain(&request->failed, "--rank: found \"%s\", expected a rank", argument);
        return 0;
    case KEY_JSON:
        request->json = true;
        return 0;
    case KEY_SVG:
        request->svg = argument;
        return 0;
    case KEY_HTML:
        request->html = argument;
        return 0;
    case KEY_NODE:
        request->ranks_per_node = loom_cli_integer("--ranks-per-node", argument, 1, WORLD_MAX, state);
        return 0;
    case ARGP_KEY_ARG:
        read_override(request, argument);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

typedef loom_status (*picture_writer)(FILE *out, const loom_layout *layout, const loom_topology_picture *picture);

static loom_status draw(
    const char *path, picture_writer write, const loom_layout *layout, const loom_topology_picture *picture) {
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!path)
        return LOOM_OK;
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status = write(file, layout, picture);
    if (fclose(file) != 0 && !status)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status;
}

static loom_status draw_both(const topology_request *request, const loom_layout *layout) {
    loom_topology_picture picture = {
        .ranks_per_node = request->ranks_per_node, .rank = request->rank_given ? request->rank : -1};
    LOOM_TRY(draw(request->svg, loom_topology_write_svg, layout, &picture));
    return draw(request->html, loom_topology_write_html, layout, &picture);
}

int loom_cli_topology(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"world-size", KEY_WORLD, "RANKS", 0, "Ranks in all (encoder ranks included)", 0},
        {"rank", KEY_RANK, "RANK", 0, "Only this rank: its place in each of its groups", 0},
        {"json", KEY_JSON, NULL, 0, "JSON: groups by kind, and what each rank is", 0},
        {"svg", KEY_SVG, "FILE", 0, "Also draw the ranks on their nodes, coloured by group; --rank is picked out", 0},
        {"html", KEY_HTML, "FILE", 0, "The same as a page, in which a rank can be picked", 0},
        {"ranks-per-node", KEY_NODE, "N", 0, "Ranks of a node in the drawings (8)", 0},
        {0},
    };
    static const struct argp argp = {.options = options,
        .parser = parse,
        .args_doc = "[strategy.FIELD=VALUE…]",
        .doc = "Prints every process group of a configuration. No rank is started.\n"
               "\v"
               "Fields of the strategy that matter here: tensor_model_parallel_size, pipeline_model_parallel_size, "
               "virtual_pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size, "
               "expert_tensor_parallel_size, encoder_tensor_model_parallel_size, "
               "encoder_pipeline_model_parallel_size, num_distributed_optimizer_instances, "
               "hierarchical_context_parallel_sizes, moe_extended_tp, use_tp_pp_dp_mapping, order.\n\n"
               "Kinds of groups: tp, cp, dp, pp, ep, etp the tensor, context, data, pipeline, expert and expert-tensor "
               "ranks; a_b those of both axes together; embd and pos_embd the stages that share the word and position "
               "embeddings; edp the data-parallel ranks of an expert; intra_ and inter_ inside and across optimizer "
               "instances; dist_opt those that share an optimizer; hcp_l0, … the levels of hierarchical context "
               "parallelism.\n\n"
               "Example: megaloom topology --world-size 64 strategy.tensor_model_parallel_size=4 "
               "strategy.pipeline_model_parallel_size=2"};
    topology_request request = {.sizes = loom_parallel_sizes_default(0)};
    argp_err_exit_status = EXIT_USAGE;
    error_t parsed = argp_parse(&argp, argc, argv, 0, NULL, &request);
    if (parsed != 0) {
        fprintf(stderr, "megaloom: %s\n", strerror(parsed));
        return EXIT_FAILURE;
    }
    if (!request.world_given)
        loom_cli_complain(&request.failed, "give the number of ranks: --world-size RANKS");
    if (request.failed)
        return EXIT_USAGE;

    loom_layout layout;
    loom_status status = loom_layout_init(&request.sizes, &layout);
    if (status)
        return loom_cli_fail(status);
    if (request.rank_given && (request.rank < 0 || request.rank >= layout.sizes.world)) {
        loom_cli_complain(
            &request.failed, "--rank: found %" PRId64 ", expected 0 to %" PRId64, request.rank, layout.sizes.world - 1);
        return EXIT_USAGE;
    }
    status = draw_both(&request, &layout);
    if (status)
        return loom_cli_fail(status);
    if (request.json && request.rank_given)
        loom_cli_topology_json_rank(&layout, request.rank);
    else if (request.json)
        loom_cli_topology_json(&layout, &request.sizes);
    else if (request.rank_given)
        loom_cli_topology_rank(&layout, request.rank);
    else
        loom_cli_topology_table(&layout);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "megaloom: cannot write the output: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
