/* Fuzzes the reading of JSON lines: input is cut into lines, at each place at which a reading may have ended, and each
 * line is parsed; a text that a line holds lies inside of it, and what is refused is said. The same bytes are read as
 * ranks and as merges of a tokenizer. */
#include "data/json_line.h"
#include "data/text_reader.h"
#include "data/tokenizer_json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void read_line(const char *line, size_t bytes) {
    json_t *object;
    const char *text;
    size_t text_bytes;
    loom_error_clear();
    if (loom__json_line_parse(line, bytes, bytes % 2 == 0, &object) != LOOM_OK) {
        if (!*loom_error_message())
            abort();
        return;
    }
    if (object && loom__json_line_text(object, "text", &text, &text_bytes) == LOOM_OK) {
        if (text_bytes > bytes || text[text_bytes] != '\0')
            abort();
    } else if (object && !*loom_error_message()) {
        abort();
    }
    json_decref(object);
}

/* The documents, when `first` bytes come in before the rest. */
static size_t count(loom_text_format format, const char *separator, const char *text, size_t bytes, size_t first) {
    size_t documents = 0, start = 0, searched = 0;
    for (size_t have = first;; have = bytes) {
        for (;;) {
            size_t next, end = loom__text_cut(format, separator, text, have, searched, &next);
            if (next > have || (end != SIZE_MAX && (end < start || next <= end)))
                abort();
            searched = next;
            if (end == SIZE_MAX)
                break;
            if (format == LOOM_TEXT_JSON && have == bytes)
                read_line(text + start, end - start);
            start = next;
            documents++;
        }
        if (have == bytes)
            return documents;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *text = (const char *)data, *const special[] = {"<|endoftext|>", NULL};
    size_t lines = count(LOOM_TEXT_JSON, NULL, text, bytes, 0),
           parts = count(LOOM_TEXT_SEPARATOR, "}\n{", text, bytes, 0);
    for (size_t first = 0; first < bytes && first < 64; first++)
        if (count(LOOM_TEXT_LINE, NULL, text, bytes, first) != lines ||
            count(LOOM_TEXT_SEPARATOR, "}\n{", text, bytes, first) != parts)
            abort();
    static const char vocab[] = "{\"a\":0,\"b\":1,\"ab\":2}";
    loom__tokenizer_json *made;
    if (loom__tokenizer_json_from_ranks("fuzz", text, bytes, &made) == LOOM_OK)
        loom__tokenizer_json_free(made);
    if (loom__tokenizer_json_from_merges("fuzz", vocab, sizeof vocab - 1, text, bytes, special, &made) == LOOM_OK)
        loom__tokenizer_json_free(made);
    if (loom__tokenizer_json_from_merges("fuzz", text, bytes, "a b\n", 4, special, &made) == LOOM_OK)
        loom__tokenizer_json_free(made);
    return 0;
}
