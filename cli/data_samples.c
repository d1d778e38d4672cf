/* megaloom data samples: what a GPT dataset hands to training. The JSON has the keys of the golden GPT cases. */
#include "data.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STATUS_USAGE = 2,
    OPTION_SEQ_LENGTH = 256,
    OPTION_SEED,
    OPTION_SPLIT,
    OPTION_PART,
    OPTION_NUM_SAMPLES,
    OPTION_SAMPLE,
    OPTION_EOD,
    OPTION_PAD,
    OPTION_RESET_POSITIONS,
    OPTION_RESET_ATTENTION,
    OPTION_EOD_MASK,
    OPTION_NO_EXTRA,
    OPTION_KEEP_PARTIAL,
    OPTION_SURPLUS,
    OPTION_MAX_EPOCHS,
    OPTION_CACHE,
    OPTION_INDICES,
    OPTION_JSON
};

static const char *const parts[LOOM_SPLIT_COUNT] = {"train", "valid", "test"};

typedef struct arguments {
    const char **list; /* prefixes, or weights and prefixes */
    int64_t list_length;
    loom_gpt_blend_config blend;
    int64_t first, last; /* samples to show */
    bool indices, json;
} arguments;

static const struct argp_option options[] = {
    {"seq-length", OPTION_SEQ_LENGTH, "N", 0, "Tokens of a sample", 0},
    {"seed", OPTION_SEED, "N", 0, "Of the order of documents and samples (default 1234)", 0},
    {"split", OPTION_SPLIT, "SHARES", 0, "Of training, validation and test documents (default 969,30,1)", 0},
    {"part", OPTION_PART, "NAME", 0, "train (the default), valid or test", 0},
    {"num-samples", OPTION_NUM_SAMPLES, "N", 0,
        "Samples that are asked of the data, by as many epochs as it takes (default: one epoch)", 0},
    {"sample", OPTION_SAMPLE, "K[-L]", 0, "Show sample K, or samples K to L (default 0)", 0},
    {"eod", OPTION_EOD, "ID", 0, "The token that ends a document; the next three options need it", 0},
    {"reset-position-ids", OPTION_RESET_POSITIONS, NULL, 0, "Positions count from the beginning of each document", 0},
    {"reset-attention-mask", OPTION_RESET_ATTENTION, NULL, 0, "Attention stops at the end of a document", 0},
    {"eod-mask-loss", OPTION_EOD_MASK, NULL, 0, "No loss where the token is an end of document", 0},
    {"pad", OPTION_PAD, "ID", 0, "A token that only fills up", 0},
    {"no-extra-token", OPTION_NO_EXTRA, NULL, 0, "Samples have no token beyond the last that is a label only", 0},
    {"keep-partial", OPTION_KEEP_PARTIAL, NULL, 0, "The last, padded sample of the part valid is kept", 0},
    {"surplus", OPTION_SURPLUS, "X", 0, "Samples that each part of a blend gets beyond its share (default 0.005)", 0},
    {"max-epochs", OPTION_MAX_EPOCHS, "N", 0, "Refuse a number of samples that takes more epochs", 0},
    {"index-mapping-dir", OPTION_CACHE, "DIR", 0, "Keep the orders in this folder, and find them there", 0},
    {"indices", OPTION_INDICES, NULL, 0, "With --json: the orders of documents and samples, too", 0},
    {"json", OPTION_JSON, NULL, 0, "Write JSON", 0},
    {0},
};

static void take_samples(arguments *to, char *text, const struct argp_state *state) {
    char *dash = strchr(text, '-');
    if (dash)
        *dash = '\0';
    to->first = loom_cli_integer("--sample", text, 0, INT64_MAX, state);
    to->last = dash ? loom_cli_integer("--sample", dash + 1, to->first, INT64_MAX, state) : to->first;
}

static loom_split part_of(const char *text, const struct argp_state *state) {
    for (int i = 0; i < LOOM_SPLIT_COUNT; i++)
        if (strcmp(text, parts[i]) == 0)
            return (loom_split)i;
    argp_error(state, "--part is '%s', expected train, valid or test", text);
    return LOOM_SPLIT_TRAIN;
}

static error_t parse(int key, char *value, struct argp_state *state) {
    arguments *to = state->input;
    loom_gpt_dataset_config *gpt = &to->blend.gpt;
    char *end;
    switch (key) {
    case OPTION_SEQ_LENGTH:
        gpt->sequence_length = loom_cli_integer("--seq-length", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_SEED:
        gpt->seed = loom_cli_integer("--seed", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_SPLIT:
        gpt->split = value;
        return 0;
    case OPTION_PART:
        gpt->which = part_of(value, state);
        return 0;
    case OPTION_NUM_SAMPLES:
        gpt->samples = loom_cli_integer("--num-samples", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_SAMPLE:
        take_samples(to, value, state);
        return 0;
    case OPTION_EOD:
        gpt->eod = loom_cli_integer("--eod", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_PAD:
        gpt->pad = loom_cli_integer("--pad", value, 0, INT64_MAX, state);
        return 0;
    case OPTION_RESET_POSITIONS:
        gpt->reset_position_ids = true;
        return 0;
    case OPTION_RESET_ATTENTION:
        gpt->reset_attention_mask = true;
        return 0;
    case OPTION_EOD_MASK:
        gpt->eod_mask_loss = true;
        return 0;
    case OPTION_NO_EXTRA:
        gpt->add_extra_token_to_sequence = false;
        return 0;
    case OPTION_KEEP_PARTIAL:
        gpt->drop_last_partial_validation_sequence = false;
        return 0;
    case OPTION_SURPLUS:
        to->blend.surplus = strtod(value, &end);
        if (end == value || *end)
            argp_error(state, "--surplus is '%s', expected a number from 0", value);
        return 0;
    case OPTION_MAX_EPOCHS:
        gpt->max_epochs = loom_cli_integer("--max-epochs", value, 1, INT64_MAX, state);
        return 0;
    case OPTION_CACHE:
        gpt->index_mapping_dir = value;
        return 0;
    case OPTION_INDICES:
        to->indices = true;
        return 0;
    case OPTION_JSON:
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        to->list[to->list_length++] = value;
        return 0;
    case ARGP_KEY_END:
        if (to->list_length == 0)
            argp_error(state, "PREFIX is missing: name a dataset without .bin or .idx");
        if (gpt->sequence_length == 0)
            argp_error(state, "--seq-length is missing");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- writing ---- */

static void print_list(const char *key, const int64_t *values, int64_t count) {
    printf("%s[", key);
    for (int64_t i = 0; i < count; i++)
        printf("%s%" PRId64, i ? ", " : "", values[i]);
    printf("]");
}

/* One row a position: 1 where it may not look. */
static void print_attention(const loom_batch *batch) {
    printf(", \"attention_mask\": [");
    for (int64_t i = 0; i < batch->s; i++) {
        printf("%s\"", i ? ", " : "");
        for (int64_t j = 0; j < batch->s; j++)
            putchar(j <= i && j >= batch->document_start[i] ? '0' : '1');
        putchar('"');
    }
    printf("]");
}

static void print_json_sample(const loom_batch *batch, int64_t k) {
    printf("{\"i\": %" PRId64, k);
    print_list(", \"tokens\": ", batch->tokens, batch->s);
    print_list(", \"labels\": ", batch->labels, batch->s);
    printf(", \"loss_mask\": \"");
    for (int64_t i = 0; i < batch->s; i++)
        putchar(batch->loss_mask[i] != 0.0f ? '1' : '0');
    print_list("\", \"position_ids\": ", batch->position_ids, batch->s);
    if (batch->document_start)
        print_attention(batch);
    printf("}");
}

static void print_text_sample(const loom_dataset *set, const loom_batch *batch, int64_t k) {
    char where[512] = "";
    if (set->locate)
        set->locate(set->context, k, where, sizeof where);
    printf("sample %" PRId64 "%s%s\n", k, *where ? ": begins in " : "", where);
    print_list("  tokens     ", batch->tokens, batch->s);
    print_list("\n  labels     ", batch->labels, batch->s);
    printf("\n  loss       [");
    for (int64_t i = 0; i < batch->s; i++)
        printf("%s%d", i ? ", " : "", batch->loss_mask[i] != 0.0f);
    print_list("]\n  positions  ", batch->position_ids, batch->s);
    for (int64_t i = 0; batch->document_start && i < batch->s; i++)
        printf("%s%d%s", i ? ", " : "\n  document   [", batch->document_start[i], i + 1 < batch->s ? "" : "]");
    printf("\n");
}

static loom_status print_indices(const loom_dataset *set, int64_t asked) {
    loom_gpt_dataset_order order;
    LOOM_TRY(loom_gpt_dataset_get_order(set, &order));
    printf("\"documents\": [%" PRId64 ", %" PRId64 "], \"num_samples\": ", order.first, order.end);
    if (asked < 0)
        printf("null");
    else
        printf("%" PRId64, asked);
    printf(", \"document_index\": [");
    for (int64_t i = 0; i < order.documents; i++)
        printf("%s%" PRIu32, i ? ", " : "", order.document_index[i]);
    print_list("], \"sample_index\": ", order.sample_index, 2 * (order.samples + 1));
    print_list(", \"shuffle_index\": ", order.shuffle_index, order.samples);
    printf(", ");
    return LOOM_OK;
}

static loom_status print_samples(const arguments *given, const loom_dataset *set, loom_batch *batch) {
    const loom_gpt_dataset_config *gpt = &given->blend.gpt;
    if (set->length == 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "the part %s (--split %s) has no sample of %" PRId64 " tokens: expected a part with a larger share, or a "
            "shorter --seq-length",
            parts[gpt->which], gpt->split, gpt->sequence_length);
    if (given->last >= set->length)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "--sample is %" PRId64 ", the part %s has %" PRId64 " samples: expected 0 to %" PRId64, given->last,
            parts[gpt->which], set->length, set->length - 1);
    if (given->json) {
        printf("{\"seq_length\": %" PRId64 ", \"seed\": %" PRId64 ", \"split\": \"%s\", \"%s\": {",
            gpt->sequence_length, gpt->seed, gpt->split, parts[gpt->which]);
        if (given->indices)
            LOOM_TRY(print_indices(set, gpt->samples));
        printf("\"length\": %" PRId64 ", \"samples\": [", set->length);
    } else {
        printf("%s: %" PRId64 " samples of %" PRId64 " tokens\n", parts[gpt->which], set->length, gpt->sequence_length);
    }
    for (int64_t k = given->first; k <= given->last; k++) {
        loom_sample_row row = {
            batch->tokens, batch->labels, batch->loss_mask, batch->position_ids, batch->document_start};
        LOOM_TRY(set->get(set->context, k, &row));
        if (given->json && k > given->first)
            printf(", ");
        if (given->json)
            print_json_sample(batch, k);
        else
            print_text_sample(set, batch, k);
    }
    if (given->json)
        printf("]}}\n");
    return LOOM_OK;
}

static bool is_number(const char *text) {
    char *end;
    strtod(text, &end);
    return end != text && *end == '\0';
}

/* A list that begins with a weight and is odd would be taken for prefixes alone, and the weight for a file. */
static loom_status check_list(const char *const *list, int64_t length) {
    if (length % 2 == 0 || length < 3 || !is_number(list[0]))
        return LOOM_OK;
    for (int64_t i = 0; i < length; i += 2)
        if (!is_number(list[i]))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "prefix %s has no weight: expected weights and prefixes in turn, or prefixes alone", list[i]);
    return loom_fail(LOOM_ERR_ARGUMENT, "weight %s has no prefix behind it", list[length - 1]);
}

static loom_status run(arguments *given) {
    LOOM_TRY(check_list(given->list, given->list_length));
    size_t room = (size_t)given->list_length;
    const char **prefixes = calloc(room, sizeof *prefixes);
    double *weights = calloc(room, sizeof *weights);
    bool weighted = false;
    loom_dataset set = {0};
    loom_batch *batch = NULL;
    loom_status status = prefixes && weights ? loom_data_blend_from_list(given->list, given->list_length, weights,
                                                   prefixes, &given->blend.count, &weighted)
                                             : loom_fail(LOOM_ERR_MEMORY, "out of memory for %zu prefixes", room);
    given->blend.prefixes = prefixes;
    given->blend.weights = weighted ? weights : NULL;
    if (!status && weighted && given->blend.count > 1 && given->blend.gpt.samples < 0)
        status =
            loom_fail(LOOM_ERR_ARGUMENT, "prefixes with weights need --num-samples N: how many samples the blend has");
    if (!status)
        status = loom_gpt_blend_create(&given->blend, &set);
    if (!status)
        status = loom_batch_create(1, set.sequence_length, set.document_boundaries, &batch);
    if (!status)
        status = print_samples(given, &set, batch);
    loom_batch_destroy(batch);
    loom_dataset_destroy(&set);
    free(prefixes);
    free(weights);
    return status;
}

int loom_cli_data_samples(int argc, char **argv) {
    static const struct argp parser = {.options = options,
        .parser = parse,
        .args_doc = "[WEIGHT] PREFIX... --seq-length N",
        .doc =
            "Shows samples of a GPT dataset as training reads them: tokens, labels, loss mask and positions. Several "
            "PREFIXes, each with a WEIGHT before it or none, are a blend."};
    arguments given = {.list = calloc((size_t)argc, sizeof *given.list), .blend = loom_gpt_blend_config_default()};
    if (!given.list) {
        fprintf(stderr, "megaloom: out of memory\n");
        return 1;
    }
    int result = STATUS_USAGE;
    if (argp_parse(&parser, argc, argv, 0, NULL, &given) == 0) {
        loom_status status = run(&given);
        fflush(stdout);
        result = status == LOOM_OK ? 0 : loom_cli_fail(status);
    }
    free(given.list);
    return result;
}
