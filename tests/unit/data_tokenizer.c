/* Tokenizers out of tokenizer.json: round trips, long words, what is refused and how, threads. Ids are compared with
 * those of another program in golden.tokenizer. */
#include "unit/format_scratch.h"

#include <megaloom/data.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static loom_tokenizer *open_golden(const char *kind) {
    char path[512];
    loom_tokenizer *tokenizer = NULL;
    snprintf(path, sizeof path, MEGALOOM_TESTS "/golden/tokenizer/%s/tokenizer.json", kind);
    if (loom_tokenizer_open(path, &tokenizer) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return tokenizer;
}

static int64_t *encode(const loom_tokenizer *tokenizer, const char *text, size_t bytes, size_t *count) {
    size_t room = loom_tokenizer_room(tokenizer, bytes);
    int64_t *tokens = malloc(room * sizeof *tokens + 1);
    assert_non_null(tokens);
    if (tokenizer->encode(tokenizer->context, text, bytes, tokens, room, count) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return tokens;
}

static void expect_round_trip(const loom_tokenizer *tokenizer, const char *text, size_t bytes) {
    size_t count = 0, made = 0;
    int64_t *tokens = encode(tokenizer, text, bytes, &count);
    char *back = malloc(bytes + 1);
    assert_non_null(back);
    assert_int_equal(tokenizer->decode(tokenizer->context, tokens, count, back, bytes, &made), LOOM_OK);
    assert_int_equal(made, bytes);
    assert_memory_equal(back, text, bytes);
    free(back);
    free(tokens);
}

static void every_character_comes_back_from_a_byte_level_tokenizer(void **state) {
    (void)state;
    loom_tokenizer *tokenizer = open_golden("gpt2");
    char *text = malloc(1112064 * 4 + 1), *at = text;
    assert_non_null(text);
    for (unsigned letter = 0; letter < 0x110000; letter += letter == 0xd7ff ? 0x801 : 1) {
        if (letter >= 0x10000)
            *at++ = (char)(0xf0 | letter >> 18), *at++ = (char)(0x80 | (letter >> 12 & 63));
        else if (letter >= 0x800)
            *at++ = (char)(0xe0 | letter >> 12);
        if (letter >= 0x800)
            *at++ = (char)(0x80 | (letter >> 6 & 63)), *at++ = (char)(0x80 | (letter & 63));
        else if (letter >= 0x80)
            *at++ = (char)(0xc0 | letter >> 6), *at++ = (char)(0x80 | (letter & 63));
        else
            *at++ = (char)letter;
    }
    expect_round_trip(tokenizer, text, (size_t)(at - text));
    free(text);
    loom_tokenizer_destroy(tokenizer);
}

/* Time is not asserted, but the test ends at its limit where the work is quadratic. */
static void a_word_of_a_million_letters_is_encoded(void **state) {
    (void)state;
    static const char *const kinds[] = {"gpt2", "llama2", "qwen2"};
    static char text[1000000];
    for (size_t k = 0; k < 3; k++) {
        loom_tokenizer *tokenizer = open_golden(kinds[k]);
        memset(text, 'a', sizeof text);
        expect_round_trip(tokenizer, text, sizeof text);
        memset(text, ' ', sizeof text);
        expect_round_trip(tokenizer, text, sizeof text);
        loom_tokenizer_destroy(tokenizer);
    }
}

static void text_that_is_no_utf8_is_refused_with_its_offset(void **state) {
    (void)state;
    static const struct {
        const char *text, *offset;
    } cases[] = {{"abcdefghi\xff", "byte 9 "}, {"a\xc3", "byte 1 "}, {"\xc0\x80", "byte 0 "},
        {"x\xed\xa0\x80", "byte 1 "}, {"12345678\xf4\x90\x80\x80", "byte 8 "}};
    loom_tokenizer *tokenizer = open_golden("llama3");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t tokens[64];
        size_t count = 77;
        assert_int_equal(
            tokenizer->encode(tokenizer->context, cases[i].text, strlen(cases[i].text), tokens, 64, &count),
            LOOM_ERR_ARGUMENT);
        assert_non_null(strstr(loom_error_message(), cases[i].offset));
        assert_int_equal(count, 77);
    }
    loom_tokenizer_destroy(tokenizer);
}

static void too_many_combining_marks_are_refused(void **state) {
    (void)state;
    char text[2 * 300 + 1] = "a";
    for (size_t i = 0; i < 300; i++)
        memcpy(text + 1 + 2 * i, "\xcc\x81", i < 299 ? 2 : 0);
    loom_tokenizer *tokenizer = open_golden("qwen2");
    int64_t tokens[4096];
    size_t count;
    assert_int_equal(tokenizer->encode(tokenizer->context, text, 1 + 2 * 299, tokens, 4096, &count), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "combining marks"));
    loom_tokenizer_destroy(tokenizer);
}

static void too_little_room_is_an_error_and_decode_says_what_it_needs(void **state) {
    (void)state;
    loom_tokenizer *tokenizer = open_golden("llama2");
    int64_t tokens[32];
    size_t count = 0, bytes = 0;
    char text[8] = "-------";
    assert_int_equal(tokenizer->encode(tokenizer->context, "hello", 5, tokens, 1, &count), LOOM_ERR_ARGUMENT);
    assert_int_equal(tokenizer->encode(tokenizer->context, "hello", 5, tokens, 32, &count), LOOM_OK);
    assert_int_equal(tokenizer->decode(tokenizer->context, tokens, count, text, 4, &bytes), LOOM_OK);
    assert_int_equal(bytes, 5);
    assert_string_equal(text, "-------");
    tokens[0] = tokenizer->vocab_size;
    assert_int_equal(tokenizer->decode(tokenizer->context, tokens, count, text, 8, &bytes), LOOM_ERR_ARGUMENT);
    loom_tokenizer_destroy(tokenizer);
}

static void ends_come_from_the_files_beside_or_from_known_names(void **state) {
    (void)state;
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"</s>\":1,\"<x>\":2,\"<s>\":3},\"merges\":[]},"
        "\"added_tokens\":[{\"id\":1,\"content\":\"</s>\",\"special\":true},"
        "{\"id\":2,\"content\":\"<x>\"},{\"id\":3,\"content\":\"<s>\",\"special\":true}],"
        "\"decoder\":{\"type\":\"Fuse\"}}";
    scratch folder = scratch_make();
    loom_tokenizer *tokenizer;
    scratch_write(&folder, "tokenizer.json", json, sizeof json - 1);
    assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_OK);
    assert_int_equal(tokenizer->eod, 1);
    assert_int_equal(tokenizer->bos, 3);
    assert_int_equal(tokenizer->vocab_size, 4);
    loom_tokenizer_destroy(tokenizer);
    static const char other[] = "{\"eos_token\":{\"content\":\"<x>\"},\"bos_token\":null}";
    scratch_write(&folder, "tokenizer_config.json", other, sizeof other - 1);
    assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_OK);
    assert_int_equal(tokenizer->eod, 2);
    char text[8];
    size_t bytes;
    assert_int_equal(tokenizer->decode(tokenizer->context, (int64_t[]){0, 2, 0}, 3, text, 8, &bytes), LOOM_OK);
    assert_int_equal(bytes, 2); /* the end of document is nothing */
    loom_tokenizer_destroy(tokenizer);
    scratch_write(&folder, "tokenizer_config.json", "{\"eos_token\":\"<y>\"}", 19);
    assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "eos_token is '<y>'"));
    scratch_remove(&folder);
}

/* What replaces the model, or a member, of a sound file. */
static void what_is_not_built_and_what_is_wrong_is_named(void **state) {
    (void)state;
    static const char model[] =
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}",
                      decoder[] = "\"decoder\":{\"type\":\"Fuse\"}";
    static const struct {
        const char *members; /* after the model and the decoder */
        loom_status status;
        const char *message;
        const char *model; /* NULL: the sound one */
    } cases[] = {
        {"", LOOM_OK, "", NULL},
        {"", LOOM_ERR_UNSUPPORTED, "not supported yet: model.type \"Unigram\"", "\"model\":{\"type\":\"Unigram\"}"},
        {"", LOOM_ERR_UNSUPPORTED, "model.dropout 0.1",
            "\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{},\"merges\":[]}"},
        {"", LOOM_ERR_UNSUPPORTED, "end_of_word_suffix \"</w>\"",
            "\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\",\"vocab\":{},\"merges\":[]}"},
        {"", LOOM_ERR_FORMAT, "model.merges[0]",
            "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}"},
        {"", LOOM_ERR_FORMAT, "the id of token 'a'",
            "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4000000000},\"merges\":[]}"},
        {"", LOOM_ERR_FORMAT, "'b' has id 0", "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}"},
        {"", LOOM_ERR_FORMAT, "<0x00>",
            "\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"vocab\":{},\"merges\":[]}"},
        {",\"normalizer\":{\"type\":\"NFKC\"}", LOOM_ERR_UNSUPPORTED, "normalizer.type \"NFKC\"", NULL},
        {",\"pre_tokenizer\":{\"type\":\"Whitespace\"}", LOOM_ERR_UNSUPPORTED, "pre_tokenizer.type \"Whitespace\"",
            NULL},
        {",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\",\"invert\":"
         "false}",
            LOOM_ERR_FORMAT, "the pattern ( cannot be compiled", NULL},
        {",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\w\"},\"behavior\":\"Isolated\"}",
            LOOM_ERR_UNSUPPORTED, "\\w in the pattern", NULL},
        {",\"post_processor\":{\"type\":\"RobertaProcessing\"}", LOOM_ERR_UNSUPPORTED, "\"RobertaProcessing\"", NULL},
        {",\"truncation\":{\"max_length\":5}", LOOM_ERR_UNSUPPORTED, "truncation {\"max_length\":5}", NULL},
        {",\"added_tokens\":[{\"id\":9,\"content\":\"<m>\",\"lstrip\":true}]", LOOM_ERR_UNSUPPORTED, "lstrip", NULL},
        {",\"added_tokens\":[{\"id\":1,\"content\":\"a\"}]", LOOM_ERR_FORMAT, "'a' has id 1", NULL},
        {",\"novel\":1", LOOM_ERR_UNSUPPORTED, "member 'novel'", NULL},
    };
    scratch folder = scratch_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1024];
        int bytes = snprintf(
            json, sizeof json, "{%s,%s%s}", cases[i].model ? cases[i].model : model, decoder, cases[i].members);
        loom_tokenizer *tokenizer = NULL;
        const char *path = scratch_write(&folder, "tokenizer.json", json, (size_t)bytes);
        if (loom_tokenizer_open(path, &tokenizer) != cases[i].status)
            fail_msg("case %zu: %s", i, loom_error_message());
        if (cases[i].status != LOOM_OK && !strstr(loom_error_message(), cases[i].message))
            fail_msg("case %zu: '%s' lacks '%s'", i, loom_error_message(), cases[i].message);
        assert_true((tokenizer != NULL) == (cases[i].status == LOOM_OK));
        loom_tokenizer_destroy(tokenizer);
    }
    scratch_remove(&folder);
}

static void a_file_cut_anywhere_is_refused(void **state) {
    (void)state;
    static const char json[] = "{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[[\"a\",\"b\"]]},"
                               "\"decoder\":{\"type\":\"Fuse\"}}";
    scratch folder = scratch_make();
    loom_tokenizer *tokenizer;
    for (size_t bytes = 0; bytes < sizeof json - 1; bytes++) {
        scratch_write(&folder, "tokenizer.json", json, bytes);
        assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_ERR_FORMAT);
    }
    scratch_write(&folder, "tokenizer.json", json, sizeof json - 1);
    assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_OK);
    int64_t tokens[8];
    size_t count;
    assert_int_equal(tokenizer->encode(tokenizer->context, "abc", 3, tokens, 8, &count), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "no token for the character c"));
    loom_tokenizer_destroy(tokenizer);
    scratch_remove(&folder);
}

static void a_pattern_that_never_ends_is_stopped(void **state) {
    (void)state;
    static const char json[] = "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]},\"decoder\":{\"type\":\"Fuse\"},"
                               "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a|a)+$(?<=b)\"},"
                               "\"behavior\":\"Isolated\",\"invert\":false}}";
    scratch folder = scratch_make();
    loom_tokenizer *tokenizer;
    scratch_write(&folder, "tokenizer.json", json, sizeof json - 1);
    assert_int_equal(loom_tokenizer_open(folder.path, &tokenizer), LOOM_OK);
    int64_t tokens[64];
    size_t count;
    assert_int_equal(
        tokenizer->encode(tokenizer->context, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 40, tokens, 64, &count),
        LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "match limit"));
    loom_tokenizer_destroy(tokenizer);
    scratch_remove(&folder);
}

typedef struct shared_work {
    const loom_tokenizer *tokenizer;
    int64_t tokens[256];
    size_t count;
    loom_status status;
} shared_work;

static const char shared_text[] = "Threads may share a tokenizer: 1234 \xe4\xbd\xa0\xe5\xa5\xbd, e\xcc\x81.";

static void *encode_often(void *argument) {
    shared_work *work = argument;
    for (int i = 0; i < 200 && work->status == LOOM_OK; i++)
        work->status = work->tokenizer->encode(
            work->tokenizer->context, shared_text, sizeof shared_text - 1, work->tokens, 256, &work->count);
    return NULL;
}

static void threads_share_a_tokenizer(void **state) {
    (void)state;
    loom_tokenizer *tokenizer = open_golden("qwen2");
    shared_work work[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        work[i] = (shared_work){.tokenizer = tokenizer};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &work[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(work[i].status, LOOM_OK);
        assert_int_equal(work[i].count, work[0].count);
        assert_memory_equal(work[i].tokens, work[0].tokens, work[0].count * sizeof *work[0].tokens);
    }
    loom_tokenizer_destroy(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_character_comes_back_from_a_byte_level_tokenizer),
        cmocka_unit_test(a_word_of_a_million_letters_is_encoded),
        cmocka_unit_test(text_that_is_no_utf8_is_refused_with_its_offset),
        cmocka_unit_test(too_many_combining_marks_are_refused),
        cmocka_unit_test(too_little_room_is_an_error_and_decode_says_what_it_needs),
        cmocka_unit_test(ends_come_from_the_files_beside_or_from_known_names),
        cmocka_unit_test(what_is_not_built_and_what_is_wrong_is_named),
        cmocka_unit_test(a_file_cut_anywhere_is_refused),
        cmocka_unit_test(a_pattern_that_never_ends_is_stopped),
        cmocka_unit_test(threads_share_a_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
