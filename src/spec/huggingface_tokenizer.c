/* The byte tokenizer in the form of the `tokenizers` package: token b is byte b, token 256 the end of a text. It is a
 * BPE without merges behind the "ByteLevel" step, which spells each byte as one printable character: those that Latin-1
 * prints as themselves, the others in order from U+0100. */
#include "spec/huggingface.h"
#include <jansson.h>
#include <stdlib.h>

static bool is_printable(int byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
}

/* The character of a byte; `others` counts those that do not print. All need one or two bytes of UTF-8. */
static void spell(int byte, int *others, char text[3]) {
    int character = is_printable(byte) ? byte : 0x100 + (*others)++;
    if (character < 0x80) {
        text[0] = (char)character;
        text[1] = '\0';
    } else {
        text[0] = (char)(0xc0 | character >> 6);
        text[1] = (char)(0x80 | (character & 0x3f));
        text[2] = '\0';
    }
}

static loom_status print(json_t *object, char **text) {
    char *made = object ? json_dumps(object, JSON_INDENT(2)) : NULL;
    json_decref(object);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a tokenizer");
    *text = made;
    return LOOM_OK;
}

static json_t *vocabulary(void) {
    json_t *made = json_object();
    int others = 0;
    bool whole = made != NULL;
    for (int byte = 0; whole && byte < LOOM__HF_BYTE_END; byte++) {
        char text[3];
        spell(byte, &others, text);
        whole = json_object_set_new(made, text, json_integer(byte)) == 0;
    }
    if (whole)
        return made;
    json_decref(made);
    return NULL;
}

#define END_OF_TEXT "<|endoftext|>"

loom_status loom__hf_byte_tokenizer_text(char **text) {
    json_t *tokens = vocabulary();
    if (!tokens)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a tokenizer");
    return print(
        json_pack("{s:s, s:n, s:n, s:[{s:i, s:s, s:b, s:b, s:b, s:b, s:b}], s:n, s:{s:s, s:b, s:b, s:b}, s:n, "
                  "s:{s:s, s:b, s:b, s:b}, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:o, s:[]}}",
            "version", "1.0", "truncation", "padding", "added_tokens", "id", LOOM__HF_BYTE_END, "content", END_OF_TEXT,
            "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1, "normalizer", "pre_tokenizer",
            "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0, "post_processor", "decoder",
            "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0, "model", "type", "BPE",
            "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback",
            0, "vocab", tokens, "merges"),
        text);
}

loom_status loom__hf_byte_tokenizer_config_text(int64_t positions, char **text) {
    return print(json_pack("{s:s, s:s, s:I, s:b}", "tokenizer_class", "PreTrainedTokenizerFast", "eos_token",
                     END_OF_TEXT, "model_max_length", (json_int_t)positions, "clean_up_tokenization_spaces", 0),
        text);
}
