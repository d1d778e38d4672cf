/* Opens tokenizers by name or path. tokenizer.json does not say which of its special tokens ends a document, so the
 * files beside it are asked, and where they are silent, the names that the known families use. */
#include "base/text.h"
#include "data/sentencepiece.h"
#include "data/tokenizer_json.h"
#include "format/file.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const beside[] = {"tokenizer_config.json", "special_tokens_map.json"};
static const char *const known_ends[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};
static const char *const known_begins[] = {"<|begin_of_text|>", "<s>", "<bos>"};
enum { KNOWN_ENDS = 4, KNOWN_BEGINS = 3 };

static int64_t find_added(const loom__tokenizer_json *json, const char *text) {
    size_t bytes = strlen(text);
    for (uint32_t id = 0; id < json->bpe.ids; id++) {
        const loom__bpe_piece *piece = &json->bpe.pieces[id];
        if ((json->flags[id] & LOOM__PIECE_ADDED) && piece->bytes == bytes && memcmp(piece->text, text, bytes) == 0)
            return id;
    }
    return -1;
}

static int64_t find_known(const loom__tokenizer_json *json, const char *const *names, int count) {
    int64_t id = -1;
    for (int i = 0; i < count && id < 0; i++)
        id = find_added(json, names[i]);
    return id;
}

/* Member `key` of a file beside: a text, or an object with its content. Nothing there leaves *id. */
static loom_status read_named(
    const loom__tokenizer_json *json, const char *path, const json_t *root, const char *key, int64_t *id) {
    const json_t *value = json_object_get(root, key);
    const char *text = json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
    if (!value || json_is_null(value) || *id >= 0)
        return LOOM_OK;
    *id = text ? find_added(json, text) : -1;
    return *id >= 0 ? LOOM_OK
                    : loom_fail(LOOM_ERR_FORMAT, "%s: %s is '%.100s', expected one of the added_tokens of %s", path,
                          key, text ? text : "no text", json->name);
}

static loom_status read_beside(const loom__tokenizer_json *json, const char *path, int64_t *begin, int64_t *end) {
    struct stat found;
    if (stat(path, &found) != 0 && errno == ENOENT)
        return LOOM_OK;
    loom__mapping text;
    LOOM_TRY(loom__map_file(path, &text));
    json_error_t error;
    json_t *root = json_loadb((const char *)text.data, text.bytes, 0, &error);
    loom__unmap_file(&text);
    if (!root)
        return loom_fail(LOOM_ERR_FORMAT, "%s:%d:%d: %s", path, error.line, error.column, error.text);
    loom_status status = read_named(json, path, root, "eos_token", end);
    if (status == LOOM_OK)
        status = read_named(json, path, root, "bos_token", begin);
    json_decref(root);
    return status;
}

static loom_status read_ends(const loom__tokenizer_json *json, const char *path, int64_t *begin, int64_t *end) {
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0;
    *begin = *end = -1;
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++) {
        char *other = NULL;
        if (asprintf(&other, "%.*s%s", folder, path, beside[i]) < 0)
            return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", path);
        loom_status status = read_beside(json, other, begin, end);
        free(other);
        LOOM_TRY(status);
    }
    if (*end < 0)
        *end = find_known(json, known_ends, KNOWN_ENDS);
    if (*begin < 0)
        *begin = find_known(json, known_begins, KNOWN_BEGINS);
    return LOOM_OK;
}

/* ---- which file it is ---- */

typedef enum kind { KIND_JSON, KIND_MERGES, KIND_MODEL } kind;

/* Names by which files of each kind are known; the second file of a pair. In the order in which a folder is searched.
 */
static const struct {
    const char *name, *other;
    kind kind;
} known_files[] = {
    {"tokenizer.json", NULL, KIND_JSON},
    {"vocab.json", "merges.txt", KIND_MERGES},
    {"encoder.json", "vocab.bpe", KIND_MERGES},
    {"tokenizer.model", NULL, KIND_MODEL},
};
enum { KNOWN_FILES = sizeof known_files / sizeof *known_files, KNOWN_MODEL = KNOWN_FILES - 1 };

static bool is_there(const char *path, bool *folder) {
    struct stat found;
    bool there = stat(path, &found) == 0;
    *folder = there && S_ISDIR(found.st_mode);
    return there;
}

static bool is_named(const char *path, const char *name) {
    const char *slash = strrchr(path, '/');
    return strcmp(slash ? slash + 1 : path, name) == 0;
}

/* path/name where path is a folder, else name beside path. */
static char *path_beside(const char *path, const char *name, bool folder) {
    const char *slash = strrchr(path, '/');
    char *made = NULL;
    int length = folder ? (int)strlen(path) : slash ? (int)(slash - path) : 0;
    return asprintf(&made, "%.*s%s%s", length, path, folder || slash ? "/" : "", name) < 0 ? NULL : made;
}

/* The file of a folder, or the path itself, and its kind (a number in known_files, 0 where the name says nothing). */
static loom_status find_file(const char *name, char **path, int *known) {
    bool folder, other;
    if (!is_there(name, &folder) || !folder) {
        *known = loom__ends_with(name, ".model") ? KNOWN_MODEL : 0;
        for (int i = 0; i < KNOWN_FILES; i++)
            if (is_named(name, known_files[i].name))
                *known = i;
        *path = strdup(name);
        return *path ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    }
    for (*known = 0; *known < KNOWN_FILES; ++*known) {
        *path = path_beside(name, known_files[*known].name, true);
        if (!*path)
            return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
        if (is_there(*path, &other))
            return LOOM_OK;
        free(*path);
    }
    return loom_fail(LOOM_ERR_NOT_FOUND,
        "%s: has no tokenizer, expected tokenizer.json, vocab.json and merges.txt, or tokenizer.model", name);
}

/* ---- opening ---- */

static void destroy_json(void *context) {
    loom__tokenizer_json_free(context);
}

static loom_status read_merges(
    const char *path, const char *other, const loom__mapping *vocab, loom__tokenizer_json **json) {
    const char *special[KNOWN_ENDS + KNOWN_BEGINS + 1] = {NULL};
    memcpy(special, known_ends, sizeof known_ends);
    memcpy(special + KNOWN_ENDS, known_begins, sizeof known_begins);
    char *merges_path = path_beside(path, other, false);
    if (!merges_path)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", path);
    loom__mapping merges;
    loom_status status = loom__map_file(merges_path, &merges);
    free(merges_path);
    LOOM_TRY(status);
    status = loom__tokenizer_json_from_merges(
        path, (const char *)vocab->data, vocab->bytes, (const char *)merges.data, merges.bytes, special, json);
    loom__unmap_file(&merges);
    return status;
}

static loom_status read_file(const char *path, int known, const loom__mapping *text, loom__tokenizer_json **json) {
    const char *data = (const char *)text->data;
    switch (known_files[known].kind) {
    case KIND_MERGES:
        return read_merges(path, known_files[known].other, text, json);
    case KIND_MODEL:
        return loom__tokenizer_json_from_ranks(path, data, text->bytes, json);
    default:
        return loom__tokenizer_json_read(path, data, text->bytes, json);
    }
}

static loom_status open_json(const char *path, int known, const loom__mapping *text, loom_tokenizer *made) {
    loom__tokenizer_json *json = NULL;
    LOOM_TRY(read_file(path, known, text, &json));
    int64_t begin, end;
    loom_status status = read_ends(json, path, &begin, &end);
    if (status != LOOM_OK) {
        loom__tokenizer_json_free(json);
        return status;
    }
    json->end = end;
    *made = (loom_tokenizer){.name = json->name,
        .context = json,
        .vocab_size = json->bpe.ids,
        .eod = end,
        .bos = begin,
        .encode = loom__tokenizer_json_encode,
        .decode = loom__tokenizer_json_decode,
        .settled = loom__tokenizer_json_settled,
        .destroy = destroy_json};
    loom__tokenizer_json_room(json, &made->tokens_per_byte, &made->tokens_around);
    return LOOM_OK;
}

static loom_status open_file(const char *path, int known, loom_tokenizer *made) {
    loom__mapping text;
    LOOM_TRY(loom__map_file(path, &text));
    bool sentencepiece = known_files[known].kind == KIND_MODEL && loom__sentencepiece_is_model(text.data, text.bytes);
    loom_status status = sentencepiece ? loom__sentencepiece_open(path, text.data, text.bytes, made)
                                       : open_json(path, known, &text, made);
    loom__unmap_file(&text);
    return status;
}

static loom_status open_named(const char *name, loom_tokenizer *made) {
    bool folder, there = is_there(name, &folder), ends = loom__ends_with(name, ".json");
    if (!there && !strchr(name, '/') && !ends && !loom__ends_with(name, ".model"))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: tokenizer '%.100s', there is: byte, and the path of a tokenizer.json, vocab.json "
            "(merges.txt beside it) or tokenizer.model, or of the directory that holds it",
            name);
    char *path;
    int known;
    LOOM_TRY(find_file(name, &path, &known));
    loom_status status = open_file(path, known, made);
    free(path);
    return status;
}

loom_status loom_tokenizer_open(const char *name, loom_tokenizer **tokenizer) {
    loom_tokenizer made = *loom_tokenizer_byte();
    if (strcmp(name, "byte") != 0)
        LOOM_TRY(open_named(name, &made));
    loom_tokenizer *kept = malloc(sizeof *kept);
    if (!kept) {
        if (made.destroy)
            made.destroy(made.context);
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a tokenizer");
    }
    *kept = made;
    *tokenizer = kept;
    return LOOM_OK;
}

void loom_tokenizer_destroy(loom_tokenizer *tokenizer) {
    if (tokenizer && tokenizer->destroy)
        tokenizer->destroy(tokenizer->context);
    free(tokenizer);
}

size_t loom_tokenizer_room(const loom_tokenizer *tokenizer, size_t bytes) {
    size_t per_byte = tokenizer->tokens_per_byte > 1 ? (size_t)tokenizer->tokens_per_byte : 1;
    size_t around = tokenizer->tokens_around > 0 ? (size_t)tokenizer->tokens_around : 0;
    return bytes > (SIZE_MAX - around) / per_byte ? SIZE_MAX : bytes * per_byte + around;
}
