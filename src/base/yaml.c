/* libyaml composes the document; this file copies it into plain nodes, once. Before that, a walk over the events
 * refuses whatever could make a small file large, slow or ambiguous, and stops there: libyaml's own work grows with the
 * square of the depth. So the document that is composed is a tree (no aliases), shallow, without tags, and no larger
 * than the limits. */
#include "base/yaml.h"
#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct loom__yaml {
    yaml_document_t document;
    loom__yaml_node *nodes; /* in the order of libyaml, which numbers from 1 */
    int64_t *items;         /* all children, one array */
    int64_t count;
};

typedef struct builder {
    const char *name;
    loom__yaml *yaml;
    int64_t items_used;
} builder;

static loom_status fail_at(const char *name, yaml_mark_t mark, const char *what) {
    return loom_fail(LOOM_ERR_FORMAT, "%s:%zu:%zu: %s", name, mark.line + 1, mark.column + 1, what);
}

static loom_status build_node(builder *build, int number);

static loom_status build_children(builder *build, const yaml_node_t *node, loom__yaml_node *copy) {
    bool mapping = node->type == YAML_MAPPING_NODE;
    copy->kind = mapping ? LOOM__YAML_MAPPING : LOOM__YAML_SEQUENCE;
    copy->count = mapping ? node->data.mapping.pairs.top - node->data.mapping.pairs.start
                          : node->data.sequence.items.top - node->data.sequence.items.start;
    copy->items = build->yaml->items + build->items_used;
    int64_t children = mapping ? 2 * copy->count : copy->count;
    for (int64_t i = 0; i < children; i++) {
        const yaml_node_pair_t *pair = mapping ? node->data.mapping.pairs.start + i / 2 : NULL;
        int child = !mapping ? node->data.sequence.items.start[i] : i % 2 ? pair->value : pair->key;
        copy->items[i] = child - 1;
    }
    build->items_used += children;
    for (int64_t i = 0; i < children; i++) {
        int child = (int)copy->items[i] + 1;
        LOOM_TRY(build_node(build, child));
        if (mapping && i % 2 == 0 && build->yaml->nodes[child - 1].kind != LOOM__YAML_SCALAR)
            return fail_at(
                build->name, build->yaml->document.nodes.start[child - 1].start_mark, "a key must be a plain name");
    }
    return LOOM_OK;
}

static loom_status build_node(builder *build, int number) {
    const yaml_node_t *node = build->yaml->document.nodes.start + (number - 1);
    loom__yaml_node *copy = build->yaml->nodes + (number - 1);
    copy->line = (int)node->start_mark.line + 1;
    copy->column = (int)node->start_mark.column + 1;
    if (node->type != YAML_SCALAR_NODE)
        return build_children(build, node, copy);
    copy->kind = LOOM__YAML_SCALAR;
    copy->text = (const char *)node->data.scalar.value;
    copy->plain = node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    if (strlen(copy->text) != node->data.scalar.length)
        return fail_at(build->name, node->start_mark, "a NUL character in a string");
    return LOOM_OK;
}

static loom_status syntax_fault(const char *name, const yaml_parser_t *parser) {
    const char *problem = parser->problem ? parser->problem : "not YAML";
    if (parser->error == YAML_MEMORY_ERROR)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory while reading YAML", name);
    if (parser->error == YAML_READER_ERROR)
        return loom_fail(LOOM_ERR_FORMAT, "%s: byte %zu: %s", name, parser->problem_offset, problem);
    return loom_fail(LOOM_ERR_FORMAT, "%s:%zu:%zu: %s%s%s", name, parser->problem_mark.line + 1,
        parser->problem_mark.column + 1, problem, parser->context ? ", " : "", parser->context ? parser->context : "");
}

static loom_status build_tree(const char *name, loom__yaml *yaml) {
    yaml->count = yaml->document.nodes.top - yaml->document.nodes.start;
    if (yaml->count == 0)
        return LOOM_OK;
    int64_t children = 0;
    for (const yaml_node_t *node = yaml->document.nodes.start; node < yaml->document.nodes.top; node++)
        children += node->type == YAML_SEQUENCE_NODE ? node->data.sequence.items.top - node->data.sequence.items.start
                    : node->type == YAML_MAPPING_NODE
                        ? 2 * (node->data.mapping.pairs.top - node->data.mapping.pairs.start)
                        : 0;
    yaml->nodes = calloc((size_t)yaml->count, sizeof *yaml->nodes);
    yaml->items = calloc((size_t)children + 1, sizeof *yaml->items);
    if (!yaml->nodes || !yaml->items)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory while reading YAML", name);
    builder build = {.name = name, .yaml = yaml};
    return build_node(&build, 1);
}

/* What the walk over the events has met. */
typedef struct census {
    int depth, documents;
    int64_t nodes;
} census;

static loom_status count_event(const char *name, const yaml_event_t *event, census *met) {
    const yaml_char_t *tag = NULL;
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (++met->documents > 1)
            return fail_at(name, event->start_mark, "a second document begins here, expected only one");
        return LOOM_OK;
    case YAML_ALIAS_EVENT:
        return fail_at(name, event->start_mark, "aliases are not accepted; write the value twice");
    case YAML_SCALAR_EVENT:
        tag = event->data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        tag = event->data.sequence_start.tag;
        met->depth++;
        break;
    case YAML_MAPPING_START_EVENT:
        tag = event->data.mapping_start.tag;
        met->depth++;
        break;
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        met->depth--;
        return LOOM_OK;
    default:
        return LOOM_OK;
    }
    if (tag)
        return fail_at(name, event->start_mark, "tags (!…) are not accepted");
    if (met->depth > LOOM__YAML_MAX_DEPTH)
        return fail_at(name, event->start_mark, "nested more than 16 levels deep");
    if (++met->nodes > LOOM__YAML_MAX_NODES)
        return fail_at(name, event->start_mark, "more than 65536 values");
    return LOOM_OK;
}

static loom_status check_events(const char *name, const char *text, size_t length) {
    yaml_parser_t parser;
    census met = {0};
    loom_status status = LOOM_OK;
    if (!yaml_parser_initialize(&parser))
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory while reading YAML", name);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    for (bool more = true; more && status == LOOM_OK;) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            status = syntax_fault(name, &parser);
            break;
        }
        more = event.type != YAML_STREAM_END_EVENT;
        status = count_event(name, &event, &met);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return status;
}

static loom_status load(const char *name, const char *text, size_t length, loom__yaml *yaml) {
    yaml_parser_t parser;
    LOOM_TRY(check_events(name, text, length));
    if (!yaml_parser_initialize(&parser))
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory while reading YAML", name);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    bool loaded = yaml_parser_load(&parser, &yaml->document);
    loom_status status = loaded ? build_tree(name, yaml) : syntax_fault(name, &parser);
    yaml_parser_delete(&parser);
    if (loaded && status != LOOM_OK)
        yaml_document_delete(&yaml->document);
    return status;
}

loom_status loom__yaml_parse(const char *name, const char *text, size_t length, loom__yaml **yaml) {
    if (length > LOOM__YAML_MAX_BYTES)
        return loom_fail(LOOM_ERR_FORMAT, "%s: %zu bytes, expected at most %d", name, length, LOOM__YAML_MAX_BYTES);
    loom__yaml *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory while reading YAML", name);
    loom_status status = load(name, text, length, made);
    if (status != LOOM_OK) {
        free(made->nodes);
        free(made->items);
        free(made);
        return status;
    }
    *yaml = made;
    return LOOM_OK;
}

void loom__yaml_destroy(loom__yaml *yaml) {
    if (!yaml)
        return;
    yaml_document_delete(&yaml->document);
    free(yaml->nodes);
    free(yaml->items);
    free(yaml);
}

const loom__yaml_node *loom__yaml_root(const loom__yaml *yaml) {
    return yaml->count ? yaml->nodes : NULL;
}

const loom__yaml_node *loom__yaml_at(const loom__yaml *yaml, int64_t number) {
    return yaml->nodes + number;
}

static bool is_one_of(const char *text, const char *a, const char *b, const char *c) {
    return strcmp(text, a) == 0 || strcmp(text, b) == 0 || strcmp(text, c) == 0;
}

bool loom__yaml_is_null(const loom__yaml_node *node) {
    return node->kind == LOOM__YAML_SCALAR && node->plain &&
           (!*node->text || strcmp(node->text, "~") == 0 || is_one_of(node->text, "null", "Null", "NULL"));
}

bool loom__yaml_is_bool(const loom__yaml_node *node, bool *value) {
    if (node->kind != LOOM__YAML_SCALAR || !node->plain)
        return false;
    bool yes = is_one_of(node->text, "true", "True", "TRUE");
    if (!yes && !is_one_of(node->text, "false", "False", "FALSE"))
        return false;
    *value = yes;
    return true;
}

bool loom__yaml_is_int(const loom__yaml_node *node, int64_t *value) {
    if (node->kind != LOOM__YAML_SCALAR || !node->plain)
        return false;
    const char *digits = node->text;
    int base = 10;
    if (strncmp(digits, "0x", 2) == 0 || strncmp(digits, "0o", 2) == 0) {
        base = digits[1] == 'x' ? 16 : 8;
        digits += 2;
    }
    const char *first = base == 10 && (*digits == '-' || *digits == '+') ? digits + 1 : digits;
    const char *legal = base == 16 ? "0123456789abcdefABCDEF" : base == 8 ? "01234567" : "0123456789";
    if (!*first || first[strspn(first, legal)])
        return false;
    errno = 0;
    long long found = strtoll(digits, NULL, base);
    if (errno)
        return false;
    *value = found;
    return true;
}

/* [-+]? ( .[0-9]+ | [0-9]+ (.[0-9]*)? ) ([eE][-+]?[0-9]+)? */
static bool is_decimal(const char *text) {
    static const char digit[] = "0123456789";
    text += *text == '-' || *text == '+';
    size_t whole = strspn(text, digit), part = 0;
    text += whole;
    if (*text == '.') {
        part = strspn(++text, digit);
        text += part;
    }
    if (whole + part == 0)
        return false;
    if (*text == 'e' || *text == 'E') {
        text++;
        text += *text == '-' || *text == '+';
        size_t exponent = strspn(text, digit);
        if (!exponent)
            return false;
        text += exponent;
    }
    return !*text;
}

bool loom__yaml_is_real(const loom__yaml_node *node, double *value) {
    int64_t whole;
    if (loom__yaml_is_int(node, &whole)) {
        *value = (double)whole;
        return true;
    }
    if (node->kind != LOOM__YAML_SCALAR || !node->plain || !is_decimal(node->text))
        return false;
    /* The program's locale may want a decimal comma. */
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!plain)
        return false;
    *value = strtod_l(node->text, NULL, plain);
    freelocale(plain);
    return true;
}
