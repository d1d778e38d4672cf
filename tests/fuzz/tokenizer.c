/* Fuzzes the reader of tokenizer.json. What opens is used: a text of many kinds of characters, cut out of the file
 * itself, becomes tokens that the vocabulary has and no more than were announced; their text is written as it was
 * counted; and the text of a few of them, as far as they are settled, is its beginning. */
#include "data/tokenizer_json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* What a stream of text relies on. */
static void check_settled(
    loom__tokenizer_json *json, const int64_t *tokens, size_t count, const char *whole, size_t bytes) {
    for (size_t few = 0; few < count && few < 40; few++) {
        size_t settled = loom__tokenizer_json_settled(json, tokens, few), part = 0;
        char *text = malloc(bytes + 1);
        if (!text)
            return;
        if (settled > few || loom__tokenizer_json_decode(json, tokens, settled, text, bytes, &part) != LOOM_OK ||
            part > bytes || memcmp(text, whole, part) != 0)
            abort();
        free(text);
    }
}

static void use(loom__tokenizer_json *json, const char *text, size_t bytes) {
    int64_t per_byte, extra;
    loom__tokenizer_json_room(json, &per_byte, &extra);
    size_t room = (size_t)per_byte * bytes + (size_t)extra, count = 0, wanted = 0, made = 0;
    if (room > 1 << 20)
        return;
    int64_t *tokens = malloc((room + 1) * sizeof *tokens);
    if (tokens && loom__tokenizer_json_encode(json, text, bytes, tokens, room, &count) == LOOM_OK) {
        if (loom__tokenizer_json_decode(json, tokens, count, NULL, 0, &wanted) != LOOM_OK)
            abort();
        char *decoded = malloc(wanted + 1);
        if (decoded &&
            (loom__tokenizer_json_decode(json, tokens, count, decoded, wanted, &made) != LOOM_OK || made != wanted))
            abort();
        if (decoded)
            check_settled(json, tokens, count, decoded, made);
        free(decoded);
    } else if (tokens && strstr(loom_error_message(), "there is room for")) {
        abort();
    }
    free(tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const char mixed[] = " a  b<s></s>\n\tI'm 123 e\xcc\x81 \xe2\x96\x81x \xf0\x9f\x99\x82\xe4\xbd\xa0 <0x0A>";
    loom__tokenizer_json *json;
    if (loom__tokenizer_json_read("fuzz", (const char *)data, bytes, &json) != LOOM_OK) {
        if (!*loom_error_message())
            abort();
        return 0;
    }
    use(json, mixed, sizeof mixed - 1);
    use(json, (const char *)data, bytes < 512 ? bytes : 512);
    use(json, "", 0);
    loom__tokenizer_json_free(json);
    return 0;
}
