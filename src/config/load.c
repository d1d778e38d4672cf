/* Reading a run file and overrides. Both are YAML nodes applied to paths, in order, over the defaults; each field
 * remembers where its value came from, so that checks made after everything is known still point at the line. Nothing
 * stops at the first fault: types are checked while applying, ranges and names at the end, and all of it is reported
 * together. */
#include "base/nearest.h"
#include "config/check.h"
#include "config/field.h"
#include "config/from.h"
#include "config/owner.h"
#include "spec/huggingface.h"
#include <errno.h>
#include <fcntl.h>
#include <megaloom/data.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 160, HF_CONFIG_BYTES = 1 << 20 };

/* Where a field was given. */
typedef struct origin {
    bool given;
    const char *by; /* "override", or the source of translated fields; NULL = the file */
    int line, column;
} origin;

typedef struct loader {
    loom__config_owner *owner;
    loom__faults faults;
    origin *origins;             /* one a field */
    const loom_plan_check *plan; /* NULL = the run is not planned */
    bool *faulty;                /* one a field: it has not the value that was asked for */
    const char *name;            /* of the file */
    const loom__yaml *yaml;      /* the document being applied */
    const char *by;              /* as of an origin, of what is being applied */
    loom_status status;          /* of what ends the loading at once: memory */
} loader;

static void place_text(const loader *load, const char *by, int line, int column, char *text, size_t bytes) {
    if (by)
        snprintf(text, bytes, "%.256s: ", by);
    else
        snprintf(text, bytes, "%.256s:%d:%d: ", load->name, line, column);
}

static void place_of(const loader *load, const loom__yaml_node *node, char *text, size_t bytes) {
    place_text(load, load->by, node->line, node->column, text, bytes);
}

/* A copy that is fit for one line of a message. */
static void printable(const char *from, char *text, size_t bytes) {
    static const char cut[] = "...";
    size_t i = 0;
    for (; from[i] && i + sizeof cut < bytes; i++)
        text[i] = (unsigned char)from[i] < 0x20 || from[i] == 0x7f ? '?' : from[i];
    memcpy(text + i, from[i] ? cut : "", from[i] ? sizeof cut : 1);
}

static void describe(const loom__yaml_node *node, char *text, size_t bytes) {
    char inner[80];
    bool yes;
    double real;
    if (node->kind != LOOM__YAML_SCALAR) {
        snprintf(text, bytes, "%s", node->kind == LOOM__YAML_MAPPING ? "a mapping" : "a list");
    } else if (loom__yaml_is_null(node)) {
        snprintf(text, bytes, "null");
    } else {
        printable(node->text, inner, sizeof inner);
        bool bare = loom__yaml_is_bool(node, &yes) || loom__yaml_is_real(node, &real);
        snprintf(text, bytes, bare ? "%s" : "\"%s\"", inner);
    }
}

/* The same, and of a list its entries where they are few: which of them is wrong is what one looks for. */
static void describe_entries(const loader *load, const loom__yaml_node *node, char *text, size_t bytes) {
    char entry[96];
    size_t used = 1;
    describe(node, text, bytes);
    if (node->kind != LOOM__YAML_SEQUENCE || node->count == 0)
        return;
    char list[160] = "[";
    for (int64_t i = 0; i < node->count; i++) {
        describe(loom__yaml_at(load->yaml, node->items[i]), entry, sizeof entry);
        int more = snprintf(list + used, sizeof list - used, "%s%s", i > 0 ? ", " : "", entry);
        if ((size_t)more + 2 > sizeof list - used)
            return;
        used += (size_t)more;
    }
    snprintf(text, bytes, "%s]", list);
}

static void wrong_type(loader *load, const loom__field *field, const loom__yaml_node *node) {
    char place[320], found[192], expected[512], hint[128] = "";
    place_of(load, node, place, sizeof place);
    describe_entries(load, node, found, sizeof found);
    loom__field_expected(field, expected, sizeof expected);
    if (field->choice_count && node->kind == LOOM__YAML_SCALAR) {
        loom__nearest nearest;
        loom__nearest_begin(&nearest, node->text);
        for (int i = 0; i < field->choice_count; i++)
            loom__nearest_offer(&nearest, field->choices[i].name);
        if (nearest.best)
            snprintf(hint, sizeof hint, "; did you mean %s?", nearest.best);
    }
    loom__faults_add(
        &load->faults, LOOM_ERR_CONFIG, "%s%s: found %s, expected %s%s", place, field->path, found, expected, hint);
    load->faulty[field - loom__fields] = true;
}

/* ---- unknown fields */

/* The part of `path` after "section." up to the next dot, or NULL when it does not lie in the section. */
static const char *component_in(const char *path, const char *section, char *text, size_t bytes) {
    size_t length = strlen(section);
    if (length) {
        if (strncmp(path, section, length) != 0 || path[length] != '.')
            return NULL;
        path += length + 1;
    }
    size_t used = strcspn(path, ".");
    used = used < bytes ? used : bytes - 1;
    memcpy(text, path, used);
    text[used] = '\0';
    return text;
}

static void unknown_field(loader *load, const char *section, const loom__yaml_node *key) {
    char place[320], word[96], component[PATH_BYTES], best[2 * PATH_BYTES + 2] = "";
    place_of(load, key, place, sizeof place);
    printable(key->text, word, sizeof word);
    const char *dot = *section ? "." : "";
    loom__nearest nearest;
    loom__nearest_begin(&nearest, word);
    for (int64_t i = 0; i < loom__field_count; i++) {
        int before = nearest.distance;
        if (component_in(loom__fields[i].path, section, component, sizeof component))
            loom__nearest_offer(&nearest, component);
        if (nearest.distance < before)
            snprintf(best, sizeof best, "%.159s%s%.159s", section, dot, component);
    }
    /* Perhaps the right name in the wrong section. */
    if (!*best)
        for (int64_t i = 0; i < loom__field_count; i++) {
            const char *last = strrchr(loom__fields[i].path, '.');
            int before = nearest.distance;
            loom__nearest_offer(&nearest, last ? last + 1 : loom__fields[i].path);
            if (nearest.distance < before)
                snprintf(best, sizeof best, "%s", loom__fields[i].path);
        }
    loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s%s%s: unknown field%s%s%s", place, section, dot, word,
        *best ? "; did you mean " : "", best, *best ? "?" : "");
}

/* ---- applying nodes */

static const char *own_string(loader *load, const char *text) {
    const char *copy = loom__config_owner_string(load->owner, text);
    if (!copy)
        load->status = loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", load->name);
    return copy;
}

/* A bare number, or what a division of zeros printed in its place. */
static bool is_meant_as_weight(const loom__yaml_node *node) {
    double weight;
    if (node->kind != LOOM__YAML_SCALAR || !node->plain)
        return false;
    const char *word = node->text + (*node->text == '-' || *node->text == '+');
    word += *word == '.';
    return loom__yaml_is_real(node, &weight) || strcasecmp(word, "nan") == 0 || strcasecmp(word, "inf") == 0;
}

/* Weights stand before prefixes where any entry is one: a prefix that looks like a number is put in quotes. */
static bool has_weights(const loader *load, const loom__yaml_node *list) {
    for (int64_t i = 0; i < list->count; i++)
        if (is_meant_as_weight(loom__yaml_at(load->yaml, list->items[i])))
            return true;
    return false;
}

/* False, with a fault, where entry number `entry` (from 1) of a list is no prefix. */
static bool read_path(
    loader *load, const loom__field *field, const loom__yaml_node *prefix, int64_t entry, loom_data_path *path) {
    bool yes, other = is_meant_as_weight(prefix) || loom__yaml_is_null(prefix) || loom__yaml_is_bool(prefix, &yes);
    if (prefix->kind == LOOM__YAML_SCALAR && *prefix->text && !other) {
        path->prefix = own_string(load, prefix->text);
        return true;
    }
    char place[320], found[96];
    place_of(load, prefix, place, sizeof place);
    describe(prefix, found, sizeof found);
    loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s: entry %lld: found %s, expected a prefix%s", place,
        field->path, (long long)entry, found, other ? " (in quotes where it looks like something else)" : "");
    return false;
}

/* False where a weight is none, which is a fault already; the nodes of the others are prefixes. */
static bool read_weight(loader *load, const loom__field *field, const loom__yaml_node *weight,
    const loom__yaml_node *prefix, double *value) {
    char place[320], found[96];
    if (loom__yaml_is_real(weight, value) && *value > 0 && *value < 1e300)
        return true;
    place_of(load, weight, place, sizeof place);
    describe(weight, found, sizeof found);
    loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s: the weight of %.100s: found %s, expected a number > 0",
        place, field->path, prefix->kind == LOOM__YAML_SCALAR ? prefix->text : "a dataset", found);
    return false;
}

static bool apply_paths(loader *load, const loom__field *field, const loom__yaml_node *node) {
    if (loom__yaml_is_null(node))
        return loom__field_set(field, load->yaml, node, &load->owner->config);
    bool single = node->kind == LOOM__YAML_SCALAR;
    if (node->kind == LOOM__YAML_MAPPING || (single ? !*node->text : node->count == 0))
        return false;
    bool weighted = !single && has_weights(load, node);
    if (weighted && node->count % 2 != 0) {
        char place[320];
        place_of(load, node, place, sizeof place);
        loom__faults_add(&load->faults, LOOM_ERR_CONFIG,
            "%s%s: found %lld entries and numbers among them, expected a weight before each prefix, or prefixes alone "
            "(in quotes where they look like numbers)",
            place, field->path, (long long)node->count);
        return true;
    }
    int64_t count = single ? 1 : weighted ? node->count / 2 : node->count;
    loom_data_path *paths = loom__config_owner_keep(load->owner, calloc((size_t)count, sizeof *paths));
    if (!paths) {
        load->status = loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", load->name);
        return true;
    }
    bool sound = true;
    for (int64_t i = 0; i < count; i++) {
        const loom__yaml_node *weight = weighted ? loom__yaml_at(load->yaml, node->items[2 * i]) : NULL;
        int64_t place = weighted ? 2 * i + 1 : i;
        paths[i].weight = count == 1 ? 1 : 0;
        if (single) {
            paths[i].prefix = own_string(load, node->text);
            break;
        }
        const loom__yaml_node *prefix = loom__yaml_at(load->yaml, node->items[place]);
        sound = (!weight || read_weight(load, field, weight, prefix, &paths[i].weight)) && sound;
        sound = read_path(load, field, prefix, place + 1, &paths[i]) && sound;
    }
    if (!sound)
        return true;
    loom_run_config *config = &load->owner->config;
    memcpy((char *)config + field->offset, &paths, sizeof paths);
    memcpy((char *)config + field->count_offset, &count, sizeof count);
    return true;
}

static void apply_field(loader *load, int64_t number, const loom__yaml_node *node) {
    const loom__field *field = &loom__fields[number];
    loom_run_config *config = &load->owner->config;
    bool fits = field->kind == LOOM__FIELD_PATHS ? apply_paths(load, field, node)
                                                 : loom__field_set(field, load->yaml, node, config);
    if (!fits) {
        wrong_type(load, field, node);
        return;
    }
    const char **text = field->kind == LOOM__FIELD_STRING ? loom__field_at(field, config) : NULL;
    if (text && *text)
        *text = own_string(load, *text);
    /* Null means "as the architecture has it", like a field that is not given. */
    bool left_open = field->by_architecture[0] && loom__yaml_is_null(node);
    load->origins[number] = (origin){.given = !left_open, .by = load->by, .line = node->line, .column = node->column};
}

static void apply_mapping(loader *load, const char *section, const loom__yaml_node *node);

static void apply_node(loader *load, const char *section, const loom__yaml_node *key, const loom__yaml_node *node) {
    char path[PATH_BYTES], place[320], found[96];
    int length = snprintf(path, sizeof path, "%s%s%s", section, *section ? "." : "", key->text);
    bool fits = length >= 0 && (size_t)length < sizeof path && !strchr(key->text, '.');
    int64_t number = fits ? loom__field_find(path) : -1;
    bool is_section = fits && (number < 0 || loom__fields[number].section_key) && loom__field_is_section(path);
    if (is_section && node->kind == LOOM__YAML_MAPPING) {
        /* A mapping of DDP fields is a Megatron configuration, whatever was said before. */
        if (number >= 0 && !*loom__fields[number].section_key)
            loom__field_set_default(&loom__fields[number], NULL, &load->owner->config);
        apply_mapping(load, path, node);
    } else if (number >= 0) {
        apply_field(load, number, node);
    } else if (is_section && !loom__yaml_is_null(node)) {
        place_of(load, node, place, sizeof place);
        describe(node, found, sizeof found);
        loom__faults_add(
            &load->faults, LOOM_ERR_CONFIG, "%s%s: found %s, expected a mapping of its fields", place, path, found);
    } else if (!is_section) {
        unknown_field(load, section, key);
    }
}

static void apply_mapping(loader *load, const char *section, const loom__yaml_node *node) {
    char place[320], name[96];
    for (int64_t i = 0; i < node->count && load->status == LOOM_OK && !loom__faults_full(&load->faults); i++) {
        const loom__yaml_node *key = loom__yaml_at(load->yaml, node->items[2 * i]);
        const loom__yaml_node *first = NULL;
        for (int64_t j = 0; j < i && !first; j++) {
            const loom__yaml_node *earlier = loom__yaml_at(load->yaml, node->items[2 * j]);
            first = strcmp(earlier->text, key->text) == 0 ? earlier : NULL;
        }
        if (first) {
            place_of(load, key, place, sizeof place);
            printable(key->text, name, sizeof name);
            loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s%s%s: given twice, first on line %d", place, section,
                *section ? "." : "", name, first->line);
            continue;
        }
        apply_node(load, section, key, loom__yaml_at(load->yaml, node->items[2 * i + 1]));
    }
}

static loom_status apply_file(loader *load, const char *text, size_t length) {
    loom__yaml *yaml = NULL;
    LOOM_TRY(loom__yaml_parse(load->name, text, length, &yaml));
    const loom__yaml_node *root = loom__yaml_root(yaml);
    load->yaml = yaml;
    if (root && root->kind == LOOM__YAML_MAPPING) {
        apply_mapping(load, "", root);
    } else if (root && !loom__yaml_is_null(root)) {
        char place[320], found[96];
        place_of(load, root, place, sizeof place);
        describe(root, found, sizeof found);
        loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%sfound %s, expected a mapping of fields", place, found);
    }
    loom__yaml_destroy(yaml);
    return load->status;
}

/* ---- overrides */

/* A field that takes a string takes the text after = as it stands, unless it is quoted or null. */
static bool is_raw(int64_t number, const char *value) {
    loom_moe_layer_freq layers;
    /* "[0]*2+[1]" is no YAML, nor is one that repeats too often. */
    if (number >= 0 && loom__fields[number].kind == LOOM__FIELD_LAYERS)
        return loom__moe_layer_freq_parse(value, &layers) || strpbrk(value, "*+");
    return number >= 0 && loom__fields[number].kind == LOOM__FIELD_STRING && *value && !strchr("\"'~", *value) &&
           strcmp(value, "null") != 0;
}

/* Names the first part of a path that is no section though more follows it. */
static void unknown_section(loader *load, const char *path) {
    char section[PATH_BYTES] = "", part[PATH_BYTES];
    const char *start = path;
    for (const char *dot = strchr(path, '.'); dot; dot = strchr(dot + 1, '.')) {
        snprintf(part, sizeof part, "%.*s", (int)(dot - path), path);
        if (!loom__field_is_section(part))
            break;
        memcpy(section, part, sizeof section);
        start = dot + 1;
    }
    if (loom__field_find(part) >= 0) {
        loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s: %s: unknown field; %s is a value, not a section",
            load->by, path, part);
        return;
    }
    snprintf(part, sizeof part, "%.*s", (int)strcspn(start, "."), start);
    const loom__yaml_node key = {.kind = LOOM__YAML_SCALAR, .plain = true, .text = part};
    unknown_field(load, section, &key);
}

/* Applies a value at a path of which every part but the last must be a section. */
static void apply_at(loader *load, const char *path, const loom__yaml_node *value) {
    char section[PATH_BYTES] = "";
    const char *dot = strrchr(path, '.');
    if (dot)
        snprintf(section, sizeof section, "%.*s", (int)(dot - path), path);
    loom__yaml_node key = {.kind = LOOM__YAML_SCALAR, .plain = true, .text = dot ? dot + 1 : path};
    if (dot && !loom__field_is_section(section)) {
        unknown_section(load, path);
        return;
    }
    apply_node(load, section, &key, value);
}

static loom_status apply_override(loader *load, const char *override) {
    char path[PATH_BYTES], shown[80], name[PATH_BYTES + 16];
    const char *equals = strchr(override, '=');
    if (!equals || equals == override || (size_t)(equals - override) >= sizeof path) {
        printable(override, shown, sizeof shown);
        loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "override: found \"%s\", expected field=value", shown);
        return LOOM_OK;
    }
    snprintf(path, sizeof path, "%.*s", (int)(equals - override), override);
    const char *value = equals + 1;
    if (is_raw(loom__field_find(path), value)) {
        loom__yaml_node node = {.kind = LOOM__YAML_SCALAR, .text = value};
        apply_at(load, path, &node);
        return load->status;
    }
    loom__yaml *yaml = NULL;
    snprintf(name, sizeof name, "override %s", path);
    loom_status status = loom__yaml_parse(name, value, strlen(value), &yaml);
    if (status == LOOM_ERR_MEMORY)
        return status;
    if (status != LOOM_OK) {
        loom__faults_add_record(&load->faults, LOOM_ERR_CONFIG);
        return LOOM_OK;
    }
    static const loom__yaml_node nothing = {.kind = LOOM__YAML_SCALAR, .plain = true, .text = ""};
    const loom__yaml_node *root = loom__yaml_root(yaml);
    load->yaml = yaml;
    apply_at(load, path, root ? root : &nothing);
    loom__yaml_destroy(yaml);
    return load->status;
}

/* ---- after everything was applied */

static bool is_given(const loader *load, const char *path) {
    return load->origins[loom__field_find(path)].given;
}

static void finish_fields(loader *load) {
    loom_run_config *config = &load->owner->config;
    char place[320];
    for (int64_t i = 0; i < loom__field_count; i++) {
        const loom__field *field = &loom__fields[i];
        const origin *from = &load->origins[i];
        if (!from->given && field->by_architecture[0])
            loom__field_set_default(field, config->model.config.architecture, config);
        if (!from->given)
            continue;
        if (load->plan && strcmp(field->path, "ranks") == 0 && loom__many_ranks(config->ranks))
            continue;
        place_text(load, from->by, from->line, from->column, place, sizeof place);
        int64_t before = load->faults.count;
        loom__field_check(field, config, place, &load->faults);
        load->faulty[i] = load->faulty[i] || load->faults.count > before;
        /* A default of the architecture is a choice once somebody writes it: model.hf would silently undo it. */
        bool is_choice = field->by_architecture[0] || !loom__field_is_default(field, config);
        if (field->of_hf && config->model.hf && is_choice)
            loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s: decided by model.hf; leave one of the two out",
                place, field->path);
        /* NeMo's checkpoints do not tell the size of their vocabulary. */
        if (field->of_hf && config->model.from && is_choice && strcmp(field->path, "model.vocab_size") != 0)
            loom__faults_add(&load->faults, LOOM_ERR_CONFIG, "%s%s: decided by model.from; leave one of the two out",
                place, field->path);
    }
    if (config->model.hf && config->model.from)
        loom__faults_add(
            &load->faults, LOOM_ERR_CONFIG, "model.from: the model is that of model.hf; leave one of the two out");
    /* Which tokenizer another program's file means is not known. */
    bool translated = load->plan && load->plan->translated > 0 && !config->data.tokenizer;
    if (config->model.config.architecture && !config->model.hf && config->model.config.vocab_size == 0 && !translated &&
        (!config->data.tokenizer || strcmp(config->data.tokenizer, "byte") == 0))
        config->model.config.vocab_size = LOOM_BYTE_VOCABULARY;
}

/* Opened so that a pipe without a writer does not hold it up. */
static FILE *open_regular(const char *path, const char **reason) {
    struct stat found;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool is_looked_at = descriptor >= 0 && fstat(descriptor, &found) == 0;
    FILE *file = is_looked_at && S_ISREG(found.st_mode) ? fdopen(descriptor, "rb") : NULL;
    *reason = is_looked_at && !S_ISREG(found.st_mode) ? "is no regular file, expected one" : strerror(errno);
    if (!file && descriptor >= 0)
        close(descriptor);
    return file;
}

static loom_status read_file(const char *path, bool is_regular, size_t limit, char **text, size_t *length) {
    const char *reason = NULL;
    FILE *file = is_regular ? open_regular(path, &reason) : fopen(path, "rb");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: %s", path, reason ? reason : strerror(errno));
    char *bytes = malloc(limit + 1);
    if (!bytes) {
        fclose(file);
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    }
    errno = 0;
    size_t count = fread(bytes, 1, limit + 1, file);
    loom_status status = LOOM_OK;
    if (ferror(file))
        status = loom_fail(LOOM_ERR_IO, "%s: %s", path, strerror(errno));
    else if (count > limit)
        status = loom_fail(LOOM_ERR_FORMAT, "%s: more than %zu bytes", path, limit);
    fclose(file);
    if (status != LOOM_OK) {
        free(bytes);
        return status;
    }
    *text = bytes;
    *length = count;
    return LOOM_OK;
}

/* What the directory's config.json says, under the fields that a run may still set. */
static loom_status read_hf(loader *load) {
    loom_model_config *model = &load->owner->config.model.config;
    double hidden_dropout = model->hidden_dropout, attention_dropout = model->attention_dropout;
    double balance[LOOM_MOE_BALANCES];
    memcpy(balance, model->moe.moe_aux_loss_coeff, sizeof balance);
    char *path = NULL, *text = NULL;
    size_t length = 0;
    if (!*load->owner->config.model.hf)
        return loom_fail(
            LOOM_ERR_CONFIG, "%s: model.hf: is empty, expected the path of a Hugging Face directory", load->name);
    if (asprintf(&path, "%s/config.json", load->owner->config.model.hf) < 0)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", load->name);
    loom_status status = read_file(path, true, HF_CONFIG_BYTES, &text, &length);
    if (status == LOOM_OK)
        status = loom__hf_model_config(path, text, length, model);
    free(text);
    free(path);
    LOOM_TRY(status);
    if (is_given(load, "model.hidden_dropout"))
        model->hidden_dropout = hidden_dropout;
    if (is_given(load, "model.attention_dropout"))
        model->attention_dropout = attention_dropout;
    if (is_given(load, "model.moe_aux_loss_coeff"))
        memcpy(model->moe.moe_aux_loss_coeff, balance, sizeof balance);
    if (model->seq_length == 0)
        model->seq_length = model->max_position_embeddings;
    return LOOM_OK;
}

/* Fields of the model that a checkpoint knows as well, but that a run may give anew. */
static bool is_inherited(const char *path) {
    static const char *const names[] = {"model.seq_length", "model.hidden_dropout", "model.attention_dropout",
        "model.make_vocab_size_divisible_by", "model.padded_vocab_in_softmax", "model.use_scaled_init",
        "model.moe_router_num_groups", "model.moe_router_group_topk", "model.moe_router_score_function",
        "model.moe_router_topk_scaling_factor", "model.moe_router_enable_expert_bias", "model.moe_router_dtype",
        "model.moe_router_load_balancing_type", "model.moe_apply_probs_on_input"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], path) == 0)
            return true;
    return false;
}

static loom_status take_vocabulary(loader *load, int64_t stored) {
    int64_t *given = &load->owner->config.model.config.vocab_size;
    if (stored > 0 && is_given(load, "model.vocab_size") && *given != stored)
        return loom_fail(LOOM_ERR_CONFIG,
            "%s: model.vocab_size: found %lld, but model.from has %lld; leave one of the two out", load->name,
            (long long)*given, (long long)stored);
    if (stored > 0)
        *given = stored;
    return LOOM_OK;
}

/* What the checkpoint's context says of the model, under the fields that a run may still set. */
static loom_status read_from(loader *load) {
    loom_run_config *config = &load->owner->config, *stored = NULL;
    LOOM_TRY(loom__config_read_context(config->model.from, NULL, 0, &stored));
    /* Balance losses and their coefficients belong together: of several types there are as many. */
    bool balanced =
        !is_given(load, "model.moe_router_load_balancing_type") && !is_given(load, "model.moe_aux_loss_coeff");
    for (int64_t i = 0; i < loom__field_count; i++) {
        const loom__field *field = &loom__fields[i];
        bool taken = field->of_hf || (is_inherited(field->path) && !load->origins[i].given) ||
                     (balanced && strcmp(field->path, "model.moe_aux_loss_coeff") == 0);
        if (taken && strcmp(field->path, "model.vocab_size") != 0)
            loom__field_copy(field, stored, config);
        const char **text = taken && field->kind == LOOM__FIELD_STRING ? loom__field_at(field, config) : NULL;
        const char *const *from = loom__field_at(field, stored);
        if (text)
            *text = *from ? own_string(load, *from) : NULL;
    }
    loom_status status = take_vocabulary(load, stored->model.config.vocab_size);
    loom_run_config_destroy(stored);
    return status;
}

static loom_status load_fields(loader *load, const char *text, size_t length, const char *const *overrides,
    int64_t override_count, bool with_files) {
    if (text)
        LOOM_TRY(apply_file(load, text, length));
    for (int64_t i = 0; i < override_count; i++) {
        load->by = load->plan && i < load->plan->translated ? load->plan->source : "override";
        LOOM_TRY(apply_override(load, overrides[i]));
    }
    finish_fields(load);
    const loom_run_model *model = &load->owner->config.model;
    if (with_files && (model->hf || model->from) && load->faults.count == 0) {
        loom_status status = model->hf ? read_hf(load) : read_from(load);
        if (status == LOOM_ERR_MEMORY || status == LOOM_ERR_IO)
            return status;
        /* An architecture that cannot be read is a fault for whoever plans as well: there are no sizes then. */
        loom__faults *not_built = load->faults.not_built;
        load->faults.not_built = NULL;
        loom__faults_add_record(&load->faults, status);
        load->faults.not_built = not_built;
    }
    return LOOM_OK;
}

/* A run writes its model at the end, and is refused at the begin where it could not. */
static void check_export(const loom_run_config *config, loom__faults *faults) {
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t tp = strategy->tensor_model_parallel_size;
    loom__model_spec spec = {.config = config->model.config};
    if (!config->export_model || loom__model_config_complete_planned(&spec.config, tp, tp > 1) ||
        !loom__hf_check(&spec))
        return;
    loom__faults_add(faults, LOOM_ERR_UNSUPPORTED, "%s (export=false trains without writing it)", loom_error_message());
}

/* What goes on where a run is planned: the whole is checked together with the fields. */
static loom_status check_plan(loader *load, const loom_plan_check *check) {
    loom_run_config *config = &load->owner->config;
    if (check->prepare && load->faults.count == 0) {
        loom_status status = check->prepare(check->context, config);
        if (status == LOOM_ERR_MEMORY || status == LOOM_ERR_IO)
            return status;
        loom__faults_add_record(&load->faults, status);
    }
    /* The check says them again, without the places that loading has put before them. */
    loom__faults_begin(load->faults.not_built);
    loom__check_planned(config, load->faulty, check->world_size, &load->faults);
    if (load->faults.count == 0 && check->translated == 0)
        check_export(config, &load->faults);
    return LOOM_OK;
}

static void add_known(const loom_plan_check *check, loom__faults *faults) {
    const char *next;
    for (const char *line = check && check->faults ? check->faults : ""; *line; line = next) {
        size_t length = strcspn(line, "\n");
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%.*s", (int)length, line);
        next = line + length + (line[length] == '\n');
    }
}

/* check NULL, and with it not_built: the run is not planned, and what is not built is a fault. */
static loom_status load_config(const char *name, const char *text, size_t length, const char *const *overrides,
    int64_t override_count, bool with_files, const loom_plan_check *check, loom__faults *not_built,
    loom_run_config **config) {
    loader load = {.name = name, .plan = check};
    loom__faults_begin(&load.faults);
    load.faults.not_built = not_built;
    load.owner = calloc(1, sizeof *load.owner);
    load.origins = calloc((size_t)loom__field_count, sizeof *load.origins);
    load.faulty = calloc((size_t)loom__field_count, sizeof *load.faulty);
    loom_status status = LOOM_OK;
    if (!load.owner || !load.origins || !load.faulty) {
        status = loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", name);
    } else {
        load.owner->config = loom_run_config_default();
        add_known(check, &load.faults);
        status = load_fields(&load, text, length, overrides, override_count, with_files);
        if (!status && check)
            status = check_plan(&load, check);
        if (!status)
            status = loom__faults_end(&load.faults);
    }
    free(load.origins);
    free(load.faulty);
    if (status != LOOM_OK) {
        loom__config_owner_destroy(load.owner);
        return status;
    }
    *config = &load.owner->config;
    return LOOM_OK;
}

loom_status loom_run_config_load(
    const char *path, const char *const *overrides, int64_t override_count, loom_run_config **config) {
    char *text = NULL;
    size_t length = 0;
    if (path)
        LOOM_TRY(read_file(path, false, LOOM__YAML_MAX_BYTES, &text, &length));
    loom_status status =
        load_config(path ? path : "overrides", text, length, overrides, override_count, true, NULL, NULL, config);
    free(text);
    return status;
}

loom_status loom_run_config_from_text(const char *name, const char *text, size_t length, const char *const *overrides,
    int64_t override_count, loom_run_config **config) {
    return load_config(name, text, length, overrides, override_count, false, NULL, NULL, config);
}

loom_status loom_run_config_load_planned(const char *path, const char *const *overrides, int64_t override_count,
    const loom_plan_check *check, loom_run_config **config, char **not_built) {
    char *text = NULL, *lines = NULL;
    size_t length = 0;
    loom_run_config *made = NULL;
    loom__faults later;
    loom__faults_begin(&later);
    if (path)
        LOOM_TRY(read_file(path, false, LOOM__YAML_MAX_BYTES, &text, &length));
    loom_status status =
        load_config(path ? path : "overrides", text, length, overrides, override_count, true, check, &later, &made);
    free(text);
    LOOM_TRY(status);
    lines = strdup(later.text);
    if (!lines) {
        loom_run_config_destroy(made);
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path ? path : "overrides");
    }
    *config = made;
    *not_built = lines;
    return LOOM_OK;
}
