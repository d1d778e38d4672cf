/* Opens tokenizers by name or path. tokenizer.json does not say which of its special tokens ends a document, so the
 * files beside it are asked, and where they are silent, the names that the known families use. */
#include "base/text.h"
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

static void destroy_json(void *context) {
    loom__tokenizer_json_free(context);
}

static loom_status open_json(const char *path, loom_tokenizer *made) {
    loom__mapping text;
    LOOM_TRY(loom__map_file(path, &text));
    loom__tokenizer_json *json = NULL;
    loom_status status = loom__tokenizer_json_read(path, (const char *)text.data, text.bytes, &json);
    loom__unmap_file(&text);
    LOOM_TRY(status);
    int64_t begin, end;
    status = read_ends(json, path, &begin, &end);
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

loom_status loom_tokenizer_open(const char *name, loom_tokenizer **tokenizer) {
    struct stat found;
    bool is_there = stat(name, &found) == 0;
    loom_tokenizer made = *loom_tokenizer_byte();
    if (strcmp(name, "byte") != 0) {
        if (!is_there && !strchr(name, '/') && !loom__ends_with(name, ".json"))
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: tokenizer '%.100s', there is: byte, and the path of a tokenizer.json or of the "
                "directory that holds it",
                name);
        char *path = loom__path_join(name, "", is_there && S_ISDIR(found.st_mode) ? "/tokenizer.json" : "");
        if (!path)
            return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
        loom_status status = open_json(path, &made);
        free(path);
        LOOM_TRY(status);
    }
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
