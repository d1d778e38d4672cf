/* SentencePiece's models: their ends and sizes, what is refused and how. Ids and texts are compared with those of its
 * package in golden.tokenizer. A build without the library refuses them by name, which is then the only test. */
#include "unit/format_scratch.h"

#include <megaloom/data.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define MODELS MEGALOOM_TESTS "/golden/tokenizer/"

enum { ROOM = 1 << 16 };

static size_t read_model(const char *kind, char bytes[ROOM]) {
    char path[4096];
    snprintf(path, sizeof path, MODELS "%s/tokenizer.model", kind);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t count = fread(bytes, 1, ROOM, file);
    fclose(file);
    assert_true(count > 1000 && count < ROOM);
    return count;
}

static loom_tokenizer *open_model(const char *path) {
    loom_tokenizer *tokenizer = NULL;
    loom_status status = loom_tokenizer_open(path, &tokenizer);
    if (status == LOOM_ERR_UNSUPPORTED && strstr(loom_error_message(), "by this build")) {
        assert_non_null(strstr(loom_error_message(), "libsentencepiece-dev"));
        skip();
    }
    if (status != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return tokenizer;
}

static void expect_refused(const char *path, loom_status status, const char *message) {
    loom_tokenizer *tokenizer = NULL;
    loom_error_clear();
    if (loom_tokenizer_open(path, &tokenizer) != status || !strstr(loom_error_message(), message))
        fail_msg("%s: '%s' lacks '%s'", path, loom_error_message(), message);
    assert_null(tokenizer);
}

static void the_ends_and_the_size_are_those_of_the_model(void **state) {
    (void)state;
    loom_tokenizer *bpe = open_model(MODELS "model_bpe"), *unigram = open_model(MODELS "model_unigram/tokenizer.model");
    assert_int_equal(bpe->vocab_size, 700);
    assert_int_equal(bpe->bos, 1);
    assert_int_equal(bpe->eod, 2);
    assert_true(unigram->vocab_size > 400 && unigram->vocab_size <= 500);
    assert_int_equal(unigram->bos, -1);
    int64_t tokens[64];
    char text[64];
    size_t count, bytes;
    /* What is unknown is unk, id 0, where there are no bytes to fall back on, else three of them. */
    assert_int_equal(unigram->encode(unigram->context, "\xe4\xba\x80", 3, tokens, 64, &count), LOOM_OK);
    assert_int_equal(tokens[count - 1], 0);
    assert_int_equal(bpe->encode(bpe->context, "\xe4\xba\x80", 3, tokens, 64, &count), LOOM_OK);
    assert_int_equal(count, 4);
    /* A character of byte tokens is known when its last byte is there. */
    assert_int_equal(bpe->settled(bpe->context, tokens, 3), 1);
    assert_int_equal(bpe->decode(bpe->context, tokens, 3, text, sizeof text, &bytes), LOOM_OK);
    assert_memory_equal(text, "\xef\xbf\xbd", 3);
    /* The end of a document has no text. */
    tokens[count++] = bpe->eod;
    assert_int_equal(bpe->settled(bpe->context, tokens, count), count);
    assert_int_equal(bpe->decode(bpe->context, tokens, count, text, sizeof text, &bytes), LOOM_OK);
    assert_int_equal(bytes, 3);
    assert_memory_equal(text, "\xe4\xba\x80", 3);
    loom_tokenizer_destroy(bpe);
    loom_tokenizer_destroy(unigram);
}

static void the_room_suffices_for_what_grows_most(void **state) {
    (void)state;
    static const struct {
        const char *kind, *text;
    } cases[] = {{"model_bpe", "   "}, {"model_bpe", "\xe4\xba\x80"}, {"model_unigram", "\xef\xb7\xba\xef\xb7\xba"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[4096];
        snprintf(path, sizeof path, MODELS "%s", cases[i].kind);
        loom_tokenizer *tokenizer = open_model(path);
        int64_t tokens[512];
        size_t bytes = strlen(cases[i].text), count, room = loom_tokenizer_room(tokenizer, bytes);
        assert_in_range(room, 1, 512);
        if (tokenizer->encode(tokenizer->context, cases[i].text, bytes, tokens, room, &count) != LOOM_OK)
            fail_msg("%s", loom_error_message());
        assert_int_equal(
            tokenizer->encode(tokenizer->context, cases[i].text, bytes, tokens, count - 1, &count), LOOM_ERR_ARGUMENT);
        assert_non_null(strstr(loom_error_message(), "there is room for"));
        loom_tokenizer_destroy(tokenizer);
    }
}

static void what_is_no_text_and_no_token_is_named(void **state) {
    (void)state;
    loom_tokenizer *tokenizer = open_model(MODELS "model_bpe");
    int64_t tokens[64] = {5, 700};
    char text[64];
    size_t count;
    assert_int_equal(tokenizer->encode(tokenizer->context, "ab\xff", 3, tokens + 2, 62, &count), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "byte 2 of the text (0xff) is not UTF-8"));
    assert_int_equal(tokenizer->decode(tokenizer->context, tokens, 2, text, sizeof text, &count), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "token 1 is 700, expected 0 to 699"));
    loom_tokenizer_destroy(tokenizer);
}

/* Wherever the file ends, it is refused with a reason, or what is left is a model by itself. */
static void a_model_that_is_cut_is_refused_at_every_byte(void **state) {
    (void)state;
    static char bytes[ROOM];
    size_t count = read_model("model_bpe", bytes);
    loom_tokenizer_destroy(open_model(MODELS "model_bpe"));
    scratch folder = scratch_make();
    int cut = 0;
    for (size_t length = 1; length < count; length++) {
        const char *path = scratch_write(&folder, "cut.model", bytes, length);
        loom_tokenizer *tokenizer = NULL;
        loom_error_clear();
        loom_status status = loom_tokenizer_open(path, &tokenizer);
        if (status == LOOM_ERR_FORMAT && strstr(loom_error_message(), "is cut or damaged"))
            cut++;
        else if (status != LOOM_OK && !*loom_error_message())
            fail_msg("%zu bytes: refused without a reason", length);
        loom_tokenizer_destroy(tokenizer);
    }
    assert_true(cut > (int)count * 9 / 10);
    scratch_remove(&folder);
}

static void what_would_change_text_behind_the_tokens_is_refused(void **state) {
    (void)state;
    static char bytes[ROOM];
    size_t count = read_model("model_bpe", bytes);
    loom_tokenizer_destroy(open_model(MODELS "model_bpe"));
    scratch folder = scratch_make();
    memcpy(bytes + count, "\x2a\x06\x12\x04\x01\x02\x03\x04", 8); /* denormalizer_spec with a table of four bytes */
    expect_refused(scratch_write(&folder, "d.model", bytes, count + 8), LOOM_ERR_UNSUPPORTED, "denormalizer_spec");
    memcpy(bytes + count, "\x2a\x02\x12\x00", 4); /* of none */
    loom_tokenizer_destroy(open_model(scratch_write(&folder, "e.model", bytes, count + 4)));
    expect_refused(scratch_write(&folder, "f.model", "\n\x0e\n\x05<unk>", 9), LOOM_ERR_FORMAT,
        "the message at byte 0 is cut or damaged");
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ends_and_the_size_are_those_of_the_model),
        cmocka_unit_test(the_room_suffices_for_what_grows_most),
        cmocka_unit_test(what_is_no_text_and_no_token_is_named),
        cmocka_unit_test(a_model_that_is_cut_is_refused_at_every_byte),
        cmocka_unit_test(what_would_change_text_behind_the_tokens_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
