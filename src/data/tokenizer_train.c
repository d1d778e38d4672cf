/* Learns a tokenizer from text: counts the words of all documents, as the pattern of the tokenizer to be cuts them,
 * learns joins from the counts, and writes them as a tokenizer.json. The words come from the very code that will cut
 * them when the file is used, so that what is learned is what is applied. */
#include "data/bpe_train.h"
#include "data/json_line.h"
#include "data/text_reader.h"
#include "data/tokenizer_reader.h"
#include "format/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORD_BYTES = 1024, MOST_TOKENS = 1 << 24, MOST_SPECIAL = 1 << 16 };

typedef struct training {
    loom_tokenizer_train_config config;
    const char *const *keys;
    int64_t key_count;
    const char *const *special;
    int64_t special_count;
    loom__text_files files;
    loom__text_reader *reader;
    loom__text_block block;
    loom__tokenizer_json *cutter; /* a tokenizer of bytes with the pattern */
    loom__word_counts words;
    loom__join *joins;
    int64_t join_count;
    loom_tokenizer_train_result result;
} training;

/* ---- the parts of the file that do not depend on what is learned ---- */

static json_t *pre_tokenizer(loom_tokenizer_pattern pattern) {
    if (pattern == LOOM_PATTERN_GPT2)
        return json_pack(
            "{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 1);
    return json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}", "type", "Sequence", "pretokenizers",
        "type", "Split", "pattern", "Regex", loom__llama3_pattern, "behavior", "Isolated", "invert", 0, "type",
        "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0);
}

static json_t *byte_level(int trim) {
    return json_pack(
        "{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 1, "trim_offsets", trim, "use_regex", 1);
}

/* The letters that stand for bytes have ids in the order of their code points, behind the special tokens. */
static void order_bytes(int64_t first, uint32_t byte_ids[256]) {
    char letters[256][3];
    for (int byte = 0; byte < 256; byte++) {
        size_t length = loom__byte_letters((const char[]){(char)byte}, 1, letters[byte]);
        letters[byte][length] = '\0';
    }
    for (int byte = 0; byte < 256; byte++) {
        byte_ids[byte] = (uint32_t)first;
        for (int other = 0; other < 256; other++) /* UTF-8 sorts as its code points do */
            byte_ids[byte] += strcmp(letters[other], letters[byte]) < 0;
    }
}

static loom_status put_token(const training *t, json_t *vocab, const char *bytes, size_t count, uint32_t id) {
    char *letters = malloc(2 * count + 1);
    size_t length = letters ? loom__byte_letters(bytes, count, letters) : 0;
    if (letters)
        letters[length] = '\0';
    if (letters && json_object_get(vocab, letters)) {
        loom_status status =
            loom_fail(LOOM_ERR_ARGUMENT, "special token '%.100s' is also how a token of bytes is written", letters);
        free(letters);
        return status;
    }
    int failed = !letters || json_object_set_new_nocheck(vocab, letters, json_integer(id)) != 0;
    free(letters);
    return failed ? loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its vocabulary", t->config.output) : LOOM_OK;
}

/* ---- counting ---- */

static loom_status make_cutter(training *t) {
    uint32_t byte_ids[256];
    json_t *vocab = json_object();
    loom_status status = LOOM_OK;
    order_bytes(0, byte_ids);
    for (int byte = 0; byte < 256 && status == LOOM_OK; byte++)
        status = put_token(t, vocab, (const char[]){(char)byte}, 1, byte_ids[byte]);
    json_t *root = json_pack("{s:o, s:o, s:{s:s, s:O, s:[]}}", "pre_tokenizer", pre_tokenizer(t->config.pattern),
        "decoder", byte_level(1), "model", "type", "BPE", "vocab", vocab, "merges");
    if (status == LOOM_OK)
        status = root ? loom__tokenizer_json_build(t->config.output, root, &t->cutter)
                      : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", t->config.output);
    json_decref(root);
    json_decref(vocab);
    return status;
}

static loom_status count_word(void *context, const char *word, size_t bytes) {
    training *t = context;
    return bytes <= WORD_BYTES ? loom__word_counts_add(&t->words, word, bytes) : LOOM_OK;
}

static loom_status count_json(training *t, const char *line, size_t bytes, int64_t *documents) {
    json_t *object;
    LOOM_TRY(loom__json_line_parse(line, bytes, false, &object));
    loom_status status = LOOM_OK;
    for (int64_t k = 0; object && k < t->key_count && status == LOOM_OK; k++) {
        const char *text;
        size_t text_bytes;
        status = loom__json_line_text(object, t->keys[k], &text, &text_bytes);
        if (status == LOOM_OK)
            status = loom__tokenizer_json_words(t->cutter, text, text_bytes, count_word, t);
    }
    *documents += object && status == LOOM_OK;
    json_decref(object);
    return status;
}

static loom_status count_document(training *t, const loom__document *document) {
    const char *text = t->block.text + document->offset, *path = t->files.files[document->file].path;
    loom_status status = loom__text_check_length(document);
    if (status == LOOM_OK && loom__text_format_of(t->config.format, path) == LOOM_TEXT_JSON) {
        status = count_json(t, text, document->bytes, &t->result.documents);
    } else if (status == LOOM_OK) {
        status = loom__tokenizer_json_words(t->cutter, text, document->bytes, count_word, t);
        t->result.documents += status == LOOM_OK;
    }
    if (status == LOOM_OK || status == LOOM_ERR_MEMORY)
        return status;
    t->result.invalid++;
    loom_fail_context(status, "%s:%lld: ", path, (long long)document->line);
    if (t->config.skipped)
        t->config.skipped(t->config.progress_context, loom_error_message());
    return LOOM_OK;
}

static loom_status count_words(training *t) {
    for (;;) {
        loom_status status = loom__text_reader_next(t->reader, &t->block);
        if (status == LOOM_END)
            break;
        LOOM_TRY(status);
        for (int64_t i = 0; i < t->block.count; i++)
            LOOM_TRY(count_document(t, &t->block.documents[i]));
        int64_t done = t->block.end.offset;
        for (int64_t i = 0; i < t->block.end.file; i++)
            done += t->files.files[i].bytes;
        t->result.bytes = done;
        if (t->config.progress)
            t->config.progress(t->config.progress_context, t->result.documents, done, t->files.bytes);
    }
    t->result.words = t->words.count;
    if (t->words.count == 0)
        return loom_fail(LOOM_ERR_NOT_FOUND, "%s%s: no text found: %lld file%s, %lld invalid documents",
            t->config.inputs[0], t->config.input_count > 1 ? " and further inputs" : "", (long long)t->files.count,
            t->files.count == 1 ? "" : "s", (long long)t->result.invalid);
    return LOOM_OK;
}

/* ---- writing ---- */

/* The bytes of all tokens by id; those of joined tokens are of tokens before them. */
typedef struct texts {
    char **text; /* [ids] */
    size_t *bytes;
    int64_t ids;
} texts;

static void free_texts(texts *made) {
    for (int64_t i = 0; made->text && i < made->ids; i++)
        free(made->text[i]);
    free(made->text);
    free(made->bytes);
}

/* ids of the learned joins count from 256; in the file they come behind the special tokens. */
static loom_status make_texts(const training *t, const uint32_t byte_ids[256], texts *made) {
    made->ids = 256;
    for (int64_t i = 0; i < t->join_count; i++)
        made->ids = t->joins[i].joined >= made->ids ? (int64_t)t->joins[i].joined + 1 : made->ids;
    made->text = calloc((size_t)made->ids, sizeof *made->text);
    made->bytes = calloc((size_t)made->ids, sizeof *made->bytes);
    if (!made->text || !made->bytes)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its vocabulary", t->config.output);
    for (int byte = 0; byte < 256; byte++) {
        made->text[byte_ids[byte]] = strndup((const char[]){(char)byte}, 1);
        made->bytes[byte_ids[byte]] = 1;
    }
    for (int64_t i = 0; i < t->join_count; i++) {
        const loom__join *join = &t->joins[i];
        size_t left = made->bytes[join->left], right = made->bytes[join->right];
        if (made->text[join->joined])
            continue;
        char *text = made->text[join->joined] = malloc(left + right);
        if (!text)
            return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its vocabulary", t->config.output);
        memcpy(text, made->text[join->left], left);
        memcpy(text + left, made->text[join->right], right);
        made->bytes[join->joined] = left + right;
    }
    return LOOM_OK;
}

static json_t *letters_of(const texts *made, uint32_t id) {
    char *letters = malloc(2 * made->bytes[id]);
    json_t *text = letters ? json_stringn(letters, loom__byte_letters(made->text[id], made->bytes[id], letters)) : NULL;
    free(letters);
    return text;
}

static loom_status fill_model(training *t, json_t *vocab, json_t *merges, const texts *made) {
    for (int64_t i = 0; i < t->special_count; i++)
        if (json_object_set_new(vocab, t->special[i], json_integer(i)) != 0)
            return loom_fail(LOOM_ERR_ARGUMENT, "special token %lld is not UTF-8", (long long)i);
    for (int64_t id = 0; id < made->ids; id++)
        LOOM_TRY(put_token(t, vocab, made->text[id], made->bytes[id], (uint32_t)(t->special_count + id)));
    for (int64_t i = 0; i < t->join_count; i++) {
        json_t *pair = json_pack("[o, o]", letters_of(made, t->joins[i].left), letters_of(made, t->joins[i].right));
        if (!pair || json_array_append_new(merges, pair) != 0)
            return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its merges", t->config.output);
    }
    return LOOM_OK;
}

static json_t *list_special(const training *t) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < t->special_count; i++)
        json_array_append_new(
            list, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)i, "content", t->special[i],
                      "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
    return list;
}

static json_t *make_root(const training *t, json_t *vocab, json_t *merges) {
    return json_pack("{s:s, s:n, s:n, s:o, s:n, s:o, s:o, s:o, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:O, s:O}}",
        "version", "1.0", "truncation", "padding", "added_tokens", list_special(t), "normalizer", "pre_tokenizer",
        pre_tokenizer(t->config.pattern), "post_processor", byte_level(0), "decoder", byte_level(1), "model", "type",
        "BPE", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
        "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges", merges);
}

static int write_part(const char *text, size_t bytes, void *file) {
    return loom__new_file_write(file, text, bytes) == LOOM_OK ? 0 : -1;
}

static loom_status write_root(const training *t, const json_t *root) {
    loom__new_file file;
    LOOM_TRY(loom__new_file_create(t->config.output, &file));
    loom_status status = LOOM_OK;
    if (json_dump_callback(root, write_part, &file, JSON_INDENT(2)) != 0)
        status = file.failed != LOOM_OK ? file.failed : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", t->config.output);
    if (status == LOOM_OK)
        status = loom__new_file_write(&file, "\n", 1);
    if (status == LOOM_OK)
        status = loom__new_file_sync(&file);
    if (status == LOOM_OK)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    return status;
}

static loom_status write_file(training *t, const uint32_t byte_ids[256]) {
    texts made = {0};
    json_t *vocab = json_object(), *merges = json_array(), *root = NULL;
    loom_status status = make_texts(t, byte_ids, &made);
    if (status == LOOM_OK)
        status = fill_model(t, vocab, merges, &made);
    if (status == LOOM_OK) {
        root = make_root(t, vocab, merges);
        status = root ? write_root(t, root) : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", t->config.output);
    }
    t->result.vocab_size = t->special_count + made.ids;
    json_decref(root);
    json_decref(vocab);
    json_decref(merges);
    free_texts(&made);
    return status;
}

/* ---- the whole ---- */

static loom_status check(const training *t) {
    const loom_tokenizer_train_config *config = &t->config;
    if (config->input_count < 1 || !config->inputs || !config->output || !*config->output)
        return loom_fail(LOOM_ERR_ARGUMENT, "training a tokenizer needs at least one input and an output");
    if (t->special_count < 1 || t->special_count > MOST_SPECIAL)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%lld special tokens, expected 1 to %d", (long long)t->special_count, MOST_SPECIAL);
    for (int64_t i = 0; i < t->special_count; i++) {
        size_t bytes = t->special[i] ? strlen(t->special[i]) : 0;
        if (bytes < 2 || bytes > LOOM__TOKENIZER_ADDED)
            return loom_fail(LOOM_ERR_ARGUMENT, "special token %lld is '%.100s', expected a text of 2 to %d bytes",
                (long long)i, bytes ? t->special[i] : "", LOOM__TOKENIZER_ADDED);
        for (int64_t other = 0; other < i; other++)
            if (strcmp(t->special[i], t->special[other]) == 0)
                return loom_fail(LOOM_ERR_ARGUMENT, "special token '%.100s' is given twice", t->special[i]);
    }
    if (config->vocab_size < 256 + t->special_count || config->vocab_size > MOST_TOKENS)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "vocab_size is %lld, expected %lld (256 bytes and %lld special tokens) to %d",
            (long long)config->vocab_size, (long long)(256 + t->special_count), (long long)t->special_count,
            MOST_TOKENS);
    if (config->pattern != LOOM_PATTERN_GPT2 && config->pattern != LOOM_PATTERN_LLAMA3)
        return loom_fail(LOOM_ERR_ARGUMENT, "pattern is %d, expected 0 (GPT-2's) or 1 (Llama 3's)", config->pattern);
    LOOM_TRY(loom__new_file_check(config->output));
    return loom__text_check_separator(config->format, config->separator);
}

static loom_status run(training *t) {
    const loom__text_place start = {0};
    for (int64_t i = 0; i < t->config.input_count; i++)
        LOOM_TRY(loom__text_files_add(t->config.inputs[i], t->config.suffix, &t->files));
    LOOM_TRY(loom__text_files_check(&t->files));
    LOOM_TRY(loom__text_reader_create(
        &t->files, t->config.format, t->config.separator, LOOM__TEXT_BLOCK_BYTES, start, &t->reader));
    LOOM_TRY(make_cutter(t));
    LOOM_TRY(count_words(t));
    uint32_t byte_ids[256];
    order_bytes(0, byte_ids);
    LOOM_TRY(
        loom__bpe_train(&t->words, byte_ids, t->config.vocab_size - 256 - t->special_count, &t->joins, &t->join_count));
    return write_file(t, byte_ids);
}

loom_status loom_tokenizer_train(const loom_tokenizer_train_config *config, loom_tokenizer_train_result *result) {
    static const char *const text_key[] = {"text"};
    static const char *const end_of_text[] = {"<|endoftext|>"};
    training t = {.config = *config,
        .keys = config->json_key_count ? config->json_keys : text_key,
        .key_count = config->json_key_count ? config->json_key_count : 1,
        .special = config->special_token_count ? config->special_tokens : end_of_text,
        .special_count = config->special_token_count ? config->special_token_count : 1};
    LOOM_TRY(check(&t));
    loom_status status = run(&t);
    loom__text_reader_destroy(t.reader);
    loom__text_block_free(&t.block);
    loom__text_files_free(&t.files);
    loom__tokenizer_json_free(t.cutter);
    loom__word_counts_free(&t.words);
    free(t.joins);
    if (status == LOOM_OK)
        *result = t.result;
    return status;
}
