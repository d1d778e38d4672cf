/* A SentencePiece model as a tokenizer. The library reads and uses it; what is checked here is what the library would
 * not say: that the message is whole, and that nothing in it breaks the promise that text only grows with its tokens.
 */
#include "data/sentencepiece.h"

bool loom__sentencepiece_is_model(const void *model, size_t bytes) {
    return bytes > 0 && *(const char *)model == '\n';
}

#ifndef MEGALOOM_SENTENCEPIECE

loom_status loom__sentencepiece_open(const char *name, const void *model, size_t bytes, loom_tokenizer *made) {
    (void)model;
    (void)bytes;
    (void)made;
    return loom_fail(LOOM_ERR_UNSUPPORTED,
        "%s: not supported yet by this build: SentencePiece's model needs its library (Debian: libsentencepiece-dev, "
        "and "
        "a C++ compiler) when megaloom is built, there is: tiktoken's tokenizer.model, and the tokenizer.json that "
        "transformers makes of it (AutoTokenizer.from_pretrained, then save_pretrained)",
        name);
}

#else

#include "data/utf8.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of UTF-8 that the library's own normalizations make of one, the mark of a blank counted as its three: U+FDFA in
 * NFKC makes the most. Without normalization a blank makes the most. */
enum { MOST_NORMALIZED = 13, MOST_PLAIN = 3 };
/* Fields of a model's message, and of the two that normalize. */
enum { FIELD_NORMALIZER = 3, FIELD_DENORMALIZER = 5, FIELD_CHARSMAP = 2 };

typedef struct model {
    loom__sentencepiece_library *library;
    loom__sentencepiece_ids ids;
    char *name; /* of the file */
} model;

/* ---- the message ---- */

/* A field of a message in protobuf's form; bytes and data only where it has a length. */
typedef struct field {
    uint64_t number;
    const unsigned char *data;
    size_t bytes;
} field;

static bool take_number(const unsigned char **at, const unsigned char *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (*at == end)
            return false;
        unsigned char byte = *(*at)++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return true;
    }
    return false;
}

/* False where the message is cut or is none. */
static bool take_field(const unsigned char **at, const unsigned char *end, field *taken) {
    uint64_t tag, value;
    if (!take_number(at, end, &tag))
        return false;
    *taken = (field){.number = tag >> 3};
    size_t skipped = 0;
    switch (tag & 7) {
    case 0:
        return take_number(at, end, &value);
    case 1:
        skipped = 8;
        break;
    case 2:
        if (!take_number(at, end, &value) || value > (uint64_t)(end - *at))
            return false;
        taken->data = *at;
        taken->bytes = skipped = (size_t)value;
        break;
    case 5:
        skipped = 4;
        break;
    default:
        return false;
    }
    if (skipped > (size_t)(end - *at))
        return false;
    *at += skipped;
    return true;
}

/* Whether a normalizer's message changes characters: its table is there. */
static bool has_table(const field *normalizer) {
    const unsigned char *at = normalizer->data, *end = at + normalizer->bytes;
    field inner;
    while (at < end && take_field(&at, end, &inner))
        if (inner.number == FIELD_CHARSMAP && inner.bytes > 0)
            return true;
    return false;
}

static loom_status check_message(const char *name, const unsigned char *data, size_t bytes, bool *normalizes) {
    const unsigned char *at = data, *end = data + bytes;
    field found;
    *normalizes = false;
    while (at < end) {
        size_t offset = (size_t)(at - data);
        if (!take_field(&at, end, &found))
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: the message at byte %zu is cut or damaged, expected a SentencePiece model of fields that end with "
                "its %zu bytes",
                name, offset, bytes);
        *normalizes = *normalizes || (found.number == FIELD_NORMALIZER && found.data && has_table(&found));
        if (found.number == FIELD_DENORMALIZER && found.data && has_table(&found))
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "%s: not supported yet: denormalizer_spec with a table (byte %zu), there is: decoding as it is", name,
                offset);
    }
    return LOOM_OK;
}

/* ---- the tokenizer ---- */

static loom_status encode(
    void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count) {
    const model *from = context;
    size_t valid = loom__utf8_valid(text, bytes);
    if (valid < bytes)
        return loom_fail(LOOM_ERR_ARGUMENT, "byte %zu of the text (0x%02x) is not UTF-8, which %s works on", valid,
            (unsigned char)text[valid], from->name);
    return loom__sentencepiece_library_encode(from->library, text, bytes, tokens, capacity, count);
}

static loom_status decode(
    void *context, const int64_t *tokens, size_t count, char *text, size_t capacity, size_t *bytes) {
    const model *from = context;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= from->ids.pieces)
            return loom_fail(LOOM_ERR_ARGUMENT, "token %zu is %lld, expected 0 to %lld", i, (long long)tokens[i],
                (long long)from->ids.pieces - 1);
    return loom__sentencepiece_library_decode(from->library, tokens, count, text, capacity, bytes);
}

static size_t settled(void *context, const int64_t *tokens, size_t count) {
    const model *from = context;
    while (count > 0 && tokens[count - 1] >= 0 && tokens[count - 1] < from->ids.pieces &&
           loom__sentencepiece_library_is_byte(from->library, tokens[count - 1]))
        count--;
    return count;
}

static void destroy(void *context) {
    model *from = context;
    loom__sentencepiece_library_free(from->library);
    free(from->name);
    free(from);
}

loom_status loom__sentencepiece_open(const char *name, const void *data, size_t bytes, loom_tokenizer *made) {
    bool normalizes;
    LOOM_TRY(check_message(name, data, bytes, &normalizes));
    model *from = calloc(1, sizeof *from);
    if (from)
        from->name = strdup(name);
    loom_status status = from && from->name
                             ? loom__sentencepiece_library_load(name, data, bytes, &from->ids, &from->library)
                             : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    if (status != LOOM_OK) {
        if (from)
            destroy(from);
        return status;
    }
    *made = (loom_tokenizer){.name = from->name,
        .context = from,
        .vocab_size = from->ids.pieces,
        .eod = from->ids.eos,
        .bos = from->ids.bos,
        .tokens_per_byte = normalizes ? MOST_NORMALIZED : MOST_PLAIN,
        .tokens_around = MOST_PLAIN,
        .encode = encode,
        .decode = decode,
        .settled = settled,
        .destroy = destroy};
    return LOOM_OK;
}

#endif
