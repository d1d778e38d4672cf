/* The byte tokenizer: the identity on bytes, and one token more for the end of a document. */
#include <megaloom/data.h>

#include <string.h>

enum { BYTE_EOD = LOOM_BYTE_VOCABULARY - 1 };

static loom_status byte_encode(
    void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count) {
    (void)context;
    if (bytes > capacity)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%zu bytes of text give as many tokens, there is room for %zu", bytes, capacity);
    for (size_t i = 0; i < bytes; i++)
        tokens[i] = (unsigned char)text[i];
    *count = bytes;
    return LOOM_OK;
}

static loom_status byte_decode(
    void *context, const int64_t *tokens, size_t count, char *text, size_t capacity, size_t *bytes) {
    (void)context;
    size_t wanted = 0;
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= LOOM_BYTE_VOCABULARY)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "token %zu is %lld, expected 0 to %d", i, (long long)tokens[i], BYTE_EOD);
        wanted += tokens[i] != BYTE_EOD;
    }
    *bytes = wanted;
    for (size_t i = 0, at = 0; wanted <= capacity && i < count; i++)
        if (tokens[i] != BYTE_EOD)
            text[at++] = (char)tokens[i];
    return LOOM_OK;
}

const loom_tokenizer *loom_tokenizer_byte(void) {
    static const loom_tokenizer byte = {.name = "byte",
        .vocab_size = LOOM_BYTE_VOCABULARY,
        .eod = BYTE_EOD,
        .bos = -1,
        .encode = byte_encode,
        .decode = byte_decode};
    return &byte;
}

loom_status loom_tokenizer_find(const char *name, const loom_tokenizer **tokenizer) {
    if (strcmp(name, "byte") != 0)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: tokenizer '%.100s', there is: byte", name);
    *tokenizer = loom_tokenizer_byte();
    return LOOM_OK;
}
