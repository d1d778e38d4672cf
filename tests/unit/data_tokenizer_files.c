/* Tokenizers out of vocab.json and merges.txt, and out of ranks: which file is taken, what is refused and how; and what
 * training refuses. Ids are compared with those of other programs in golden.tokenizer. */
#include "unit/format_scratch.h"

#include <megaloom/data.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void expect_refused(const char *path, loom_status status, const char *message) {
    loom_tokenizer *tokenizer = NULL;
    loom_error_clear();
    if (loom_tokenizer_open(path, &tokenizer) != status || !strstr(loom_error_message(), message))
        fail_msg("%s: '%s' lacks '%s'", path, loom_error_message(), message);
    assert_null(tokenizer);
}

static void write_text(const scratch *folder, const char *name, const char *text) {
    scratch_write(folder, name, text, strlen(text));
}

/* All bytes but those of `without`, as ranks. */
static void write_ranks(const scratch *folder, int without, const char *more) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[8192];
    size_t length = 0;
    int rank = 0;
    for (int byte = 0; byte < 256; byte++)
        if (byte != without)
            length += (size_t)snprintf(
                text + length, sizeof text - length, "%c%c== %d\n", digits[byte >> 2], digits[(byte & 3) << 4], rank++);
    snprintf(text + length, sizeof text - length, "%s", more);
    write_text(folder, "tokenizer.model", text);
}

static void merges_are_taken_by_folder_and_by_name(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_text(&folder, "vocab.json", "{\"a\":0,\"b\":1,\"ab\":2,\"<|endoftext|>\":3}");
    expect_refused(folder.path, LOOM_ERR_NOT_FOUND, "merges.txt");
    write_text(&folder, "merges.txt", "#version: 0.2\r\na b\r\n\r\n");
    const char *const paths[] = {folder.path, scratch_file(&folder, "vocab.json")};
    for (size_t i = 0; i < 2; i++) {
        loom_tokenizer *tokenizer;
        if (loom_tokenizer_open(paths[i], &tokenizer) != LOOM_OK)
            fail_msg("%s", loom_error_message());
        int64_t tokens[16];
        size_t count;
        assert_int_equal(tokenizer->vocab_size, 4);
        assert_int_equal(tokenizer->eod, 3);
        assert_int_equal(tokenizer->encode(tokenizer->context, "abb<|endoftext|>a", 17, tokens, 16, &count), LOOM_OK);
        assert_int_equal(count, 4);
        assert_memory_equal(tokens, ((const int64_t[]){2, 1, 3, 0}), 4 * sizeof *tokens);
        loom_tokenizer_destroy(tokenizer);
    }
    write_text(&folder, "merges.txt", "a b\na c\n");
    expect_refused(folder.path, LOOM_ERR_FORMAT, "model.merges[1] is \"a c\", expected a pair of tokens");
    write_text(&folder, "merges.txt", "a \xff\n");
    expect_refused(folder.path, LOOM_ERR_FORMAT, "merges, line 1: is not UTF-8");
    write_text(&folder, "vocab.json", "{\"a\":0");
    expect_refused(folder.path, LOOM_ERR_FORMAT, "no vocab.json");
    scratch_remove(&folder);
}

static void ranks_are_checked_line_by_line(void **state) {
    (void)state;
    scratch folder = scratch_make();
    expect_refused(folder.path, LOOM_ERR_NOT_FOUND, "has no tokenizer, expected tokenizer.json, vocab.json");
    write_ranks(&folder, -1, "YWI= 256\n");
    loom_tokenizer *tokenizer;
    int64_t tokens[8];
    size_t count;
    if (loom_tokenizer_open(folder.path, &tokenizer) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_int_equal(tokenizer->encode(tokenizer->context, "abab", 4, tokens, 8, &count), LOOM_OK);
    assert_int_equal(count, 2);
    assert_int_equal(tokens[1], 256);
    assert_int_equal(tokenizer->eod, -1); /* the file names none */
    loom_tokenizer_destroy(tokenizer);
    static const struct {
        int without;
        const char *more, *message;
    } cases[] = {
        {'x', "", "no token is the byte 0x78"},
        {-1, "YWI= 257\n", "'YWI= 257' is no line of ranks"},
        {-1, "YWI= 255\n", "'YWI= 255' is no line of ranks"},
        {-1, "YWI=256\n", "'YWI=256' is no line of ranks"},
        {-1, "YWI 256\n", "'YWI 256' is no line of ranks"},
        {-1, "Y?I= 256\n", "'Y?I= 256' is no line of ranks"},
        {-1, "YWI= 99999999999999999999\n", "is no line of ranks"},
        {-1, "YQ== 256\n", "token 256 has the bytes of token 97"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_ranks(&folder, cases[i].without, cases[i].more);
        expect_refused(folder.path, LOOM_ERR_FORMAT, cases[i].message);
    }
    write_text(&folder, "tokenizer.model", "");
    expect_refused(folder.path, LOOM_ERR_FORMAT, "has no token");
    scratch_remove(&folder);
}

static void training_refuses_what_cannot_be(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char input[512], output[512];
    snprintf(input, sizeof input, "%s", scratch_write(&folder, "in.txt", "to be or not to be", 18));
    snprintf(output, sizeof output, "%s", scratch_file(&folder, "tokenizer.json"));
    const char *inputs[] = {input};
    const loom_tokenizer_train_config good = {.inputs = inputs, .input_count = 1, .vocab_size = 260, .output = output};
    loom_tokenizer_train_result result;
    const char *const twice[] = {"<s>", "<s>"}, *const byte[] = {"\xc4\xa0"}; /* how a byte level writes a space */
    struct {
        loom_tokenizer_train_config config;
        const char *message;
    } cases[4] = {{good, "vocab_size is 256, expected 257 (256 bytes and 1 special tokens)"},
        {good, "special token '<s>' is given twice"}, {good, "is also how a token of bytes is written"},
        {good, "the separator has 1 bytes"}};
    cases[0].config.vocab_size = 256;
    cases[1].config.special_tokens = twice;
    cases[1].config.special_token_count = 2;
    cases[2].config.special_tokens = byte;
    cases[2].config.special_token_count = 1;
    cases[3].config.separator = ";";
    for (size_t i = 0; i < 4; i++) {
        if (loom_tokenizer_train(&cases[i].config, &result) != LOOM_ERR_ARGUMENT ||
            !strstr(loom_error_message(), cases[i].message))
            fail_msg("case %zu: '%s' lacks '%s'", i, loom_error_message(), cases[i].message);
        assert_int_equal(scratch_size(&folder, "tokenizer.json"), -1);
    }
    /* " to", " be" … of so short a text there are no more than this. */
    loom_tokenizer_train_config large = good;
    large.vocab_size = 5000;
    assert_int_equal(loom_tokenizer_train(&large, &result), LOOM_OK);
    assert_int_equal(result.words, 5);
    assert_true(result.vocab_size > 257 && result.vocab_size < 280);
    loom_tokenizer *tokenizer;
    int64_t tokens[16];
    size_t count;
    assert_int_equal(loom_tokenizer_open(output, &tokenizer), LOOM_OK);
    assert_int_equal(tokenizer->vocab_size, result.vocab_size);
    assert_int_equal(tokenizer->eod, 0);
    assert_int_equal(tokenizer->encode(tokenizer->context, "to be or", 8, tokens, 16, &count), LOOM_OK);
    assert_int_equal(count, 3);
    loom_tokenizer_destroy(tokenizer);
    assert_int_equal(scratch_size(&folder, "tokenizer.json.tmp"), -1);
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_are_taken_by_folder_and_by_name),
        cmocka_unit_test(ranks_are_checked_line_by_line),
        cmocka_unit_test(training_refuses_what_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
