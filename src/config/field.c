/* What can be done with one field: set it from a YAML node, write it, compare it, check it. The type of a field decides
 * all of it; defaults are written in the table as a run file would write them and go through the same setter, so a
 * default can never be a value that the reader would not take. */
#include "config/field.h"
#include "base/nearest.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- setting */

static const loom__choice *find_choice(const loom__field *field, const char *name) {
    for (int i = 0; i < field->choice_count; i++)
        if (strcmp(field->choices[i].name, name) == 0)
            return &field->choices[i];
    return NULL;
}

static bool set_null(const loom__field *field, loom_run_config *config) {
    static const size_t bytes[] = {[LOOM__FIELD_INT] = sizeof(int64_t),
        [LOOM__FIELD_REAL] = sizeof(double),
        [LOOM__FIELD_BOOL] = sizeof(bool),
        [LOOM__FIELD_STRING] = sizeof(char *),
        [LOOM__FIELD_CHOICE] = sizeof(char *),
        [LOOM__FIELD_ENUM] = sizeof(int),
        [LOOM__FIELD_INTS] = sizeof(int64_t),
        [LOOM__FIELD_LAYERS] = sizeof(loom_moe_layer_freq),
        [LOOM__FIELD_NAMES] = sizeof(char *),
        [LOOM__FIELD_REALS] = sizeof(double),
        [LOOM__FIELD_PATHS] = sizeof(loom_data_path *),
        [LOOM__FIELD_OBJECT] = sizeof(void *)};
    if (!field->nullable)
        return false;
    memset(loom__field_at(field, config), 0, bytes[field->kind] * (size_t)(field->capacity ? field->capacity : 1));
    if (field->kind == LOOM__FIELD_PATHS || field->kind == LOOM__FIELD_REALS)
        memset((char *)config + field->count_offset, 0, sizeof(int64_t));
    return true;
}

enum { LIST_MOST = LOOM_CONTEXT_LAYERS_MAX };

static bool set_ints(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config) {
    int64_t values[LIST_MOST] = {0};
    if (node->kind != LOOM__YAML_SEQUENCE || node->count > field->capacity || node->count == 0)
        return false;
    for (int64_t i = 0; i < node->count; i++)
        if (!loom__yaml_is_int(loom__yaml_at(yaml, node->items[i]), &values[i]) || values[i] < 1)
            return false;
    memcpy(loom__field_at(field, config), values, sizeof *values * (size_t)field->capacity);
    return true;
}

/* A number, a list, or Megatron's text of one. */
static bool set_layers(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config) {
    loom_moe_layer_freq made = {0};
    int64_t value;
    if (node->kind == LOOM__YAML_MAPPING || node->count > LOOM_MOE_LAYERS_MAX)
        return false;
    if (node->kind == LOOM__YAML_SCALAR) {
        if (!loom__yaml_is_int(node, &made.every) && !loom__moe_layer_freq_parse(node->text, &made))
            return false;
    } else {
        for (int64_t i = 0; i < node->count; i++) {
            if (!loom__yaml_is_int(loom__yaml_at(yaml, node->items[i]), &value) || value < 0 || value > 1)
                return false;
            made.list[made.length++] = (uint8_t)value;
        }
    }
    if (made.length == 0 && made.every < 1)
        return false;
    memcpy(loom__field_at(field, config), &made, sizeof made);
    return true;
}

static bool set_choice(const loom__field *field, const loom__yaml_node *node, loom_run_config *config) {
    const loom__choice *choice = find_choice(field, node->text);
    if (!choice)
        return false;
    if (field->kind == LOOM__FIELD_CHOICE)
        *(const char **)loom__field_at(field, config) = choice->means ? choice->means : choice->name;
    else
        memcpy(loom__field_at(field, config), &choice->value, sizeof choice->value);
    return true;
}

/* Where a field has no upper end of its own; said only to who goes beyond it. */
#define INT_MOST 0x1p53

static bool in_range(const loom__field *field, double value) {
    double limit = field->kind == LOOM__FIELD_INT ? INT_MOST : 1e300;
    if (field->high > 0)
        limit = field->high;
    return (field->positive ? value > field->low : value >= field->low) &&
           (field->open ? value < limit : value <= limit);
}

/* Null is kept as 0, so that a 0 that somebody writes must be told from it here. */
static bool is_zero_for_null(const loom__field *field, double value) {
    return field->nullable && value == 0 && !in_range(field, value);
}

/* The items of a list, or the one that stands for it; false: no list that fits. */
static bool items_of(const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node,
    const loom__yaml_node *items[LIST_MOST], int64_t *count) {
    bool list = node->kind == LOOM__YAML_SEQUENCE;
    *count = list ? node->count : 1;
    if (*count < 1 || *count > field->capacity)
        return false;
    for (int64_t i = 0; i < *count; i++) {
        items[i] = list ? loom__yaml_at(yaml, node->items[i]) : node;
        if (items[i]->kind != LOOM__YAML_SCALAR)
            return false;
    }
    return true;
}

static bool set_names(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config) {
    const loom__yaml_node *items[LIST_MOST];
    const char *names[LIST_MOST] = {NULL};
    int64_t count;
    if (!items_of(field, yaml, node, items, &count))
        return false;
    for (int64_t i = 0; i < count; i++) {
        const loom__choice *choice = find_choice(field, items[i]->text);
        if (!choice)
            return false;
        names[i] = choice->name;
    }
    memcpy(loom__field_at(field, config), names, (size_t)field->capacity * sizeof *names);
    return true;
}

static bool set_reals(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config) {
    const loom__yaml_node *items[LIST_MOST];
    double values[LIST_MOST] = {0};
    int64_t count;
    if (!items_of(field, yaml, node, items, &count))
        return false;
    for (int64_t i = 0; i < count; i++)
        if (!loom__yaml_is_real(items[i], &values[i]))
            return false;
    memcpy(loom__field_at(field, config), values, (size_t)field->capacity * sizeof *values);
    memcpy((char *)config + field->count_offset, &count, sizeof count);
    return true;
}

bool loom__field_set(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config) {
    if (loom__yaml_is_null(node))
        return set_null(field, config);
    if (field->kind == LOOM__FIELD_INTS)
        return set_ints(field, yaml, node, config);
    if (field->kind == LOOM__FIELD_LAYERS)
        return set_layers(field, yaml, node, config);
    if (field->kind == LOOM__FIELD_NAMES)
        return set_names(field, yaml, node, config);
    if (field->kind == LOOM__FIELD_REALS)
        return set_reals(field, yaml, node, config);
    if (node->kind != LOOM__YAML_SCALAR)
        return false;
    void *at = loom__field_at(field, config);
    bool yes;
    int64_t whole;
    double real;
    switch (field->kind) {
    case LOOM__FIELD_INT:
        if (!loom__yaml_is_int(node, &whole) || is_zero_for_null(field, (double)whole))
            return false;
        *(int64_t *)at = whole;
        return true;
    case LOOM__FIELD_REAL:
        if (!loom__yaml_is_real(node, &real) || is_zero_for_null(field, real))
            return false;
        *(double *)at = real;
        return true;
    case LOOM__FIELD_BOOL:
        return loom__yaml_is_bool(node, at);
    case LOOM__FIELD_STRING:
        if (loom__yaml_is_bool(node, &yes) || loom__yaml_is_real(node, &real))
            return false;
        *(const char **)at = node->text;
        return true;
    case LOOM__FIELD_CHOICE:
    case LOOM__FIELD_ENUM:
        return set_choice(field, node, config);
    case LOOM__FIELD_INTS:
    case LOOM__FIELD_LAYERS:
    case LOOM__FIELD_NAMES:
    case LOOM__FIELD_REALS:
    case LOOM__FIELD_PATHS:
    case LOOM__FIELD_OBJECT:
        break;
    }
    return false;
}

void loom__field_set_default(const loom__field *field, const char *architecture, loom_run_config *config) {
    loom__architecture number = loom__architecture_find(architecture);
    number = number == LOOM__ARCHITECTURE_UNKNOWN ? LOOM__GPT2 : number;
    const char *by_architecture = field->by_architecture[number];
    by_architecture = by_architecture ? by_architecture : field->by_architecture[LOOM__LLAMA];
    loom__yaml_node preset = {
        .kind = LOOM__YAML_SCALAR, .plain = true, .text = by_architecture ? by_architecture : field->preset};
    loom__field_set(field, NULL, &preset, config);
}

void loom__field_copy(const loom__field *field, const loom_run_config *from, loom_run_config *to) {
    static const size_t sizes[] = {[LOOM__FIELD_INT] = sizeof(int64_t),
        [LOOM__FIELD_REAL] = sizeof(double),
        [LOOM__FIELD_BOOL] = sizeof(bool),
        [LOOM__FIELD_CHOICE] = sizeof(const char *),
        [LOOM__FIELD_ENUM] = sizeof(int),
        [LOOM__FIELD_INTS] = sizeof(int64_t),
        [LOOM__FIELD_LAYERS] = sizeof(loom_moe_layer_freq),
        [LOOM__FIELD_NAMES] = sizeof(const char *),
        [LOOM__FIELD_REALS] = sizeof(double),
        [LOOM__FIELD_OBJECT] = 0};
    size_t count = field->capacity ? (size_t)field->capacity : 1;
    if (field->kind == LOOM__FIELD_REALS)
        memcpy((char *)to + field->count_offset, (const char *)from + field->count_offset, sizeof(int64_t));
    memcpy(loom__field_at(field, to), loom__field_at(field, from), count * sizes[field->kind]);
}

/* ---- writing */

static void write_real(double value, FILE *to) {
    char text[40];
    /* The program's locale may want a decimal comma; a run file never does. */
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = uselocale(plain);
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    uselocale(before);
    if (plain)
        freelocale(plain);
    fputs(text, to);
}

/* Whether a YAML reader takes the bare text for this very string. */
static bool is_plain_string(const char *text) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    static const char inner[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+-";
    const loom__yaml_node node = {.kind = LOOM__YAML_SCALAR, .plain = true, .text = text};
    bool yes;
    return (strchr(letters, *text) || *text == '/') && *text && !text[strspn(text, inner)] &&
           !loom__yaml_is_null(&node) && !loom__yaml_is_bool(&node, &yes) && strcasecmp(text, "nan") != 0 &&
           strcasecmp(text, "inf") != 0;
}

/* Writes the letter at `text` as an escape where YAML does not take it raw, or takes it for a line break or a byte
 * order mark; returns its bytes, 0 where it can stand for itself. */
static size_t write_unprintable(const char *text, FILE *to) {
    static const char *const named[][2] = {{"\xc2\x85", "\\N"}, {"\xe2\x80\xa8", "\\L"}, {"\xe2\x80\xa9", "\\P"},
        {"\xef\xbb\xbf", "\\uFEFF"}, {"\xef\xbf\xbe", "\\uFFFE"}, {"\xef\xbf\xbf", "\\uFFFF"}};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        size_t length = strlen(named[i][0]);
        if (strncmp(text, named[i][0], length) == 0) {
            fputs(named[i][1], to);
            return length;
        }
    }
    unsigned char c = (unsigned char)text[0], next = c ? (unsigned char)text[1] : 0;
    if (c < 0x20 || c == 0x7f) {
        fprintf(to, "\\x%02x", c);
        return 1;
    }
    if (c == 0xc2 && next >= 0x80 && next < 0xa0) { /* the other control characters of Latin-1 */
        fprintf(to, "\\x%02x", next);
        return 2;
    }
    return 0;
}

static void write_string(const char *text, FILE *to) {
    if (is_plain_string(text)) {
        fputs(text, to);
        return;
    }
    fputc('"', to);
    while (*text) {
        size_t special = write_unprintable(text, to);
        if (!special && (*text == '"' || *text == '\\'))
            fputc('\\', to);
        if (!special)
            fputc(*text, to);
        text += special ? special : 1;
    }
    fputc('"', to);
}

static void write_paths(const loom_data_path *paths, int64_t count, FILE *to) {
    if (count == 1 && paths[0].weight == 1) {
        write_string(paths[0].prefix, to);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        fputs(i ? ", " : "[", to);
        if (paths[i].weight != 0) {
            write_real(paths[i].weight, to);
            fputs(", ", to);
        }
        write_string(paths[i].prefix, to);
    }
    fputc(']', to);
}

static void write_ints(const int64_t *values, int capacity, FILE *to) {
    for (int i = 0; i < capacity && values[i]; i++)
        fprintf(to, "%s%" PRId64, i ? ", " : "[", values[i]);
    fputc(']', to);
}

static void write_layers(const loom_moe_layer_freq *freq, FILE *to) {
    if (freq->length == 0)
        fprintf(to, "%" PRId64, freq->every);
    for (int64_t i = 0; i < freq->length; i++)
        fprintf(to, "%s%d%s", i ? ", " : "[", freq->list[i], i + 1 < freq->length ? "" : "]");
}

static int64_t names_in(const loom__field *field, const loom_run_config *config) {
    const char *const *names = loom__field_at(field, config);
    int64_t count = 0;
    while (count < field->capacity && names[count])
        count++;
    return count;
}

/* What a loop over them may take; a count that code has set may be anything. */
static int64_t reals_in(const loom__field *field, const loom_run_config *config) {
    int64_t count;
    memcpy(&count, (const char *)config + field->count_offset, sizeof count);
    return count < 0 ? 0 : count < field->capacity ? count : field->capacity;
}

static void write_list(const loom__field *field, const loom_run_config *config, FILE *to) {
    const void *at = loom__field_at(field, config);
    bool names = field->kind == LOOM__FIELD_NAMES;
    int64_t count = names ? names_in(field, config) : reals_in(field, config);
    for (int64_t i = 0; i < count; i++) {
        fputs(i ? ", " : count > 1 ? "[" : "", to);
        if (names)
            write_string(((const char *const *)at)[i], to);
        else
            write_real(((const double *)at)[i], to);
    }
    fputs(count > 1 ? "]" : "", to);
}

static void write_choice(const loom__field *field, int value, FILE *to) {
    for (int i = 0; i < field->choice_count; i++)
        if (field->choices[i].value == value) {
            fputs(field->choices[i].name, to);
            return;
        }
    fprintf(to, "%d", value);
}

/* Null where null is how a run file says it. */
static bool is_null_value(const loom__field *field, const loom_run_config *config) {
    const void *at = loom__field_at(field, config);
    switch (field->kind) {
    case LOOM__FIELD_INT:
        return field->nullable && *(const int64_t *)at == 0;
    case LOOM__FIELD_REAL:
        return field->nullable && *(const double *)at == 0 && !field->by_architecture[0];
    case LOOM__FIELD_STRING:
    case LOOM__FIELD_CHOICE:
    case LOOM__FIELD_OBJECT:
        return *(const void *const *)at == NULL;
    case LOOM__FIELD_INTS:
        return *(const int64_t *)at == 0;
    case LOOM__FIELD_NAMES:
        return names_in(field, config) == 0;
    case LOOM__FIELD_REALS:
        return reals_in(field, config) == 0;
    case LOOM__FIELD_PATHS:
        return *(const int64_t *)((const char *)config + field->count_offset) == 0;
    case LOOM__FIELD_BOOL:
    case LOOM__FIELD_ENUM:
    case LOOM__FIELD_LAYERS:
        break;
    }
    return false;
}

void loom__field_write(const loom__field *field, const loom_run_config *config, FILE *to) {
    const void *at = loom__field_at(field, config);
    int value;
    if (is_null_value(field, config)) {
        fputs("null", to);
        return;
    }
    switch (field->kind) {
    case LOOM__FIELD_INT:
        fprintf(to, "%" PRId64, *(const int64_t *)at);
        break;
    case LOOM__FIELD_REAL:
        write_real(*(const double *)at, to);
        break;
    case LOOM__FIELD_BOOL:
        fputs(*(const bool *)at ? "true" : "false", to);
        break;
    case LOOM__FIELD_STRING:
    case LOOM__FIELD_CHOICE:
        write_string(*(const char *const *)at, to);
        break;
    case LOOM__FIELD_ENUM:
        memcpy(&value, at, sizeof value);
        write_choice(field, value, to);
        break;
    case LOOM__FIELD_INTS:
        write_ints(at, field->capacity, to);
        break;
    case LOOM__FIELD_LAYERS:
        write_layers(at, to);
        break;
    case LOOM__FIELD_NAMES:
    case LOOM__FIELD_REALS:
        write_list(field, config, to);
        break;
    case LOOM__FIELD_PATHS:
        write_paths(
            *(const loom_data_path *const *)at, *(const int64_t *)((const char *)config + field->count_offset), to);
        break;
    case LOOM__FIELD_OBJECT:
        fputs("(object)", to);
        break;
    }
}

void loom__field_text(const loom__field *field, const loom_run_config *config, char *text, size_t bytes) {
    FILE *to = fmemopen(text, bytes, "w");
    text[0] = '\0';
    if (!to)
        return;
    loom__field_write(field, config, to);
    fclose(to);
    text[bytes - 1] = '\0';
}

/* ---- what is expected */

static void list_choices(const loom__field *field, bool built_only, FILE *to) {
    bool first = true;
    for (int i = 0; i < field->choice_count; i++) {
        if (field->choices[i].means || (built_only && field->choices[i].not_built))
            continue;
        fprintf(to, "%s%s", first ? "" : ", ", field->choices[i].name);
        first = false;
    }
}

static void write_expected(const loom__field *field, FILE *to) {
    switch (field->kind) {
    case LOOM__FIELD_INT:
        fputs("an integer ", to);
        if (field->high > 0)
            fprintf(to, "from %.0f to %.0f", field->low, field->high);
        else
            fprintf(to, ">= %.0f", field->low);
        break;
    case LOOM__FIELD_REAL:
        fputs("a number ", to);
        if (field->high == 0) {
            fputs(field->positive ? "> " : ">= ", to);
            write_real(field->low, to);
        } else {
            fputs(field->positive ? "above " : "from ", to);
            write_real(field->low, to);
            fputs(field->open ? " to below " : " to ", to);
            write_real(field->high, to);
        }
        break;
    case LOOM__FIELD_BOOL:
        fputs("true or false", to);
        break;
    case LOOM__FIELD_STRING:
        fputs("a string", to);
        break;
    case LOOM__FIELD_CHOICE:
    case LOOM__FIELD_ENUM:
        fputs("one of ", to);
        list_choices(field, field->choice_count > 8, to);
        break;
    case LOOM__FIELD_INTS:
        fprintf(to, "a list of at most %d integers >= 1", field->capacity);
        break;
    case LOOM__FIELD_LAYERS:
        fprintf(to, "an integer >= 1, or a list of 0 and 1, one for each layer, of at most %d", LOOM_MOE_LAYERS_MAX);
        break;
    case LOOM__FIELD_NAMES:
        fputs("one of ", to);
        list_choices(field, false, to);
        fprintf(to, ", or a list of at most %d of them", field->capacity);
        break;
    case LOOM__FIELD_REALS:
        fputs("a number >= ", to);
        write_real(field->low, to);
        fprintf(to, ", or a list of at most %d", field->capacity);
        break;
    case LOOM__FIELD_PATHS:
        fputs("a prefix, a list of prefixes, or of weights > 0 and prefixes in turn", to);
        break;
    case LOOM__FIELD_OBJECT:
        fputs("nothing: it is an object that only code can set", to);
        return;
    }
    if (field->section_key)
        fputs(", or a mapping of its fields", to);
    if (field->nullable)
        fputs(", or null", to);
}

void loom__field_expected(const loom__field *field, char *text, size_t bytes) {
    FILE *to = fmemopen(text, bytes, "w");
    text[0] = '\0';
    if (!to)
        return;
    write_expected(field, to);
    fclose(to);
    text[bytes - 1] = '\0';
}

/* ---- checking */

static bool same_list(const loom__field *field, const loom_run_config *a, const loom_run_config *b) {
    char left[256], right[256];
    loom__field_text(field, a, left, sizeof left);
    loom__field_text(field, b, right, sizeof right);
    return strcmp(left, right) == 0;
}

bool loom__field_is_default(const loom__field *field, const loom_run_config *config) {
    loom_run_config standard;
    memset(&standard, 0, sizeof standard);
    loom__field_set_default(field, NULL, &standard);
    const void *at = loom__field_at(field, config), *preset = loom__field_at(field, &standard);
    switch (field->kind) {
    case LOOM__FIELD_INT:
        return *(const int64_t *)at == *(const int64_t *)preset;
    case LOOM__FIELD_REAL:
        return *(const double *)at == *(const double *)preset;
    case LOOM__FIELD_BOOL:
        return *(const bool *)at == *(const bool *)preset;
    case LOOM__FIELD_ENUM:
        return memcmp(at, preset, sizeof(int)) == 0;
    case LOOM__FIELD_INTS:
        return memcmp(at, preset, sizeof(int64_t) * (size_t)field->capacity) == 0;
    case LOOM__FIELD_LAYERS:
        return memcmp(at, preset, sizeof(loom_moe_layer_freq)) == 0;
    case LOOM__FIELD_NAMES:
    case LOOM__FIELD_REALS:
        return same_list(field, config, &standard);
    case LOOM__FIELD_STRING:
    case LOOM__FIELD_CHOICE: {
        const char *a = *(const char *const *)at, *b = *(const char *const *)preset;
        return a == b || (a && b && strcmp(a, b) == 0);
    }
    case LOOM__FIELD_PATHS:
    case LOOM__FIELD_OBJECT:
        break;
    }
    return is_null_value(field, config);
}

static const loom__choice *choice_of(const loom__field *field, const void *at) {
    if (field->kind == LOOM__FIELD_CHOICE)
        return find_choice(field, *(const char *const *)at);
    int value;
    memcpy(&value, at, sizeof value);
    for (int i = 0; i < field->choice_count; i++)
        if (field->choices[i].value == value)
            return &field->choices[i];
    return NULL;
}

static bool is_legal_list(const loom__field *field, const loom_run_config *config) {
    const void *at = loom__field_at(field, config);
    bool legal = true;
    for (int64_t i = 0; field->kind == LOOM__FIELD_NAMES && i < names_in(field, config); i++)
        legal = legal && find_choice(field, ((const char *const *)at)[i]);
    for (int64_t i = 0; field->kind == LOOM__FIELD_REALS && i < reals_in(field, config); i++)
        legal = legal && in_range(field, ((const double *)at)[i]);
    return legal;
}

/* Whether the value has the type's range or one of its names. */
static bool is_legal(const loom__field *field, const loom_run_config *config) {
    const void *at = loom__field_at(field, config);
    if (is_null_value(field, config))
        return field->nullable;
    const loom_moe_layer_freq *layers = at;
    switch (field->kind) {
    case LOOM__FIELD_INT:
        return in_range(field, (double)*(const int64_t *)at);
    case LOOM__FIELD_REAL:
        return in_range(field, *(const double *)at) &&
               (!field->single || in_range(field, (double)(float)*(const double *)at));
    case LOOM__FIELD_CHOICE:
    case LOOM__FIELD_ENUM:
        return choice_of(field, at) != NULL;
    case LOOM__FIELD_LAYERS:
        return layers->length > 0 ? layers->length <= LOOM_MOE_LAYERS_MAX : layers->every > 0 && !layers->length;
    case LOOM__FIELD_NAMES:
    case LOOM__FIELD_REALS:
        return is_legal_list(field, config);
    case LOOM__FIELD_BOOL:
    case LOOM__FIELD_STRING:
    case LOOM__FIELD_INTS:
    case LOOM__FIELD_PATHS:
    case LOOM__FIELD_OBJECT:
        break;
    }
    return true;
}

void loom__field_check(
    const loom__field *field, const loom_run_config *config, const char *place, loom__faults *faults) {
    char found[256], text[512];
    bool chosen = field->kind == LOOM__FIELD_CHOICE || field->kind == LOOM__FIELD_ENUM;
    if (!is_legal(field, config)) {
        loom__field_text(field, config, found, sizeof found);
        loom__field_expected(field, text, sizeof text);
        bool beyond = field->kind == LOOM__FIELD_INT && field->high == 0 &&
                      (double)*(const int64_t *)loom__field_at(field, config) > INT_MOST;
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s%s: found %s, expected %s%s", place, field->path, found, text,
            field->single ? " in fp32"
            : beyond      ? " (at most 9007199254740992)"
                          : "");
        return;
    }
    const loom__choice *choice =
        chosen && !is_null_value(field, config) ? choice_of(field, loom__field_at(field, config)) : NULL;
    if (choice && choice->not_built) {
        FILE *to = fmemopen(text, sizeof text, "w");
        text[0] = '\0';
        if (to) {
            list_choices(field, true, to);
            fclose(to);
        }
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED, "%snot supported yet: %s=%s (%s); what works: %s", place,
            field->path, choice->name, choice->not_built, text);
    } else if (field->not_built && !loom__field_is_default(field, config)) {
        loom__field_text(field, config, found, sizeof found);
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED, "%snot supported yet: %s=%s (%s); only %s works", place,
            field->path, found, field->not_built, field->kind == LOOM__FIELD_OBJECT ? "NULL" : field->preset);
    }
}

void loom__fields_check(const loom_run_config *config, const char *prefix, loom__faults *faults) {
    for (int64_t i = 0; i < loom__field_count; i++)
        if (strncmp(loom__fields[i].path, prefix, strlen(prefix)) == 0)
            loom__field_check(&loom__fields[i], config, "", faults);
}

/* ---- the public defaults */

loom_run_config loom_run_config_default(void) {
    loom_run_config config;
    memset(&config, 0, sizeof config);
    for (int64_t i = 0; i < loom__field_count; i++)
        loom__field_set_default(&loom__fields[i], NULL, &config);
    return config;
}

loom_model_config loom_model_config_default(const char *architecture) {
    loom_run_config config;
    memset(&config, 0, sizeof config);
    for (int64_t i = 0; i < loom__field_count; i++)
        loom__field_set_default(&loom__fields[i], architecture, &config);
    config.model.config.architecture = architecture;
    return config.model.config;
}

loom_megatron_strategy_config loom_megatron_strategy_config_default(void) {
    return loom_run_config_default().strategy;
}

loom_ddp_config loom_ddp_config_default(void) {
    return loom_run_config_default().strategy.ddp_config;
}

loom_precision_config loom_precision_config_default(void) {
    return loom_run_config_default().precision;
}

loom_checkpoint_io_config loom_checkpoint_io_config_default(void) {
    return loom_run_config_default().checkpoint.io;
}

loom_lr_config loom_lr_config_default(void) {
    return loom_run_config_default().lr;
}

loom_optimizer_config loom_optimizer_config_default(void) {
    loom_optimizer_config config = loom_run_config_default().optim;
    config.lr = 0;
    return config;
}
