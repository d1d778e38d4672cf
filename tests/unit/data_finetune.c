/* Fine-tuning data: what counts, what is packed, what is refused. */
#include "unit/format_scratch.h"

#include <megaloom/data.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { S = 12, EOD = 256 };

static loom_status open_text(const scratch *folder, const char *text, int64_t s, bool pack, loom_dataset *set) {
    const char *path = scratch_write(folder, "a.jsonl", text, strlen(text));
    loom_finetune_dataset_config config = loom_finetune_dataset_config_default();
    config.paths = &path;
    config.count = 1;
    config.tokenizer = loom_tokenizer_byte();
    config.sequence_length = s;
    config.pack = pack;
    return loom_finetune_dataset_create(&config, set);
}

/* A row as text: tokens with '.' for 0 and '$' for the end, labels, and a digit for each mask, position and start. */
static void assert_row(const loom_dataset *set, int64_t index, const char *tokens, const char *labels, const char *mask,
    const char *positions, const char *starts) {
    int64_t got[S], next[S], place[S];
    float counts[S];
    int32_t begin[S] = {0};
    const loom_sample_row row = {got, next, counts, place, starts ? begin : NULL};
    assert_int_equal(set->get(set->context, index, &row), LOOM_OK);
    char found[5][S + 1] = {{0}};
    for (int i = 0; i < S; i++) {
        found[0][i] = (char)(got[i] == 0 ? '.' : got[i] == EOD ? '$' : got[i]);
        found[1][i] = (char)(next[i] == 0 ? '.' : next[i] == EOD ? '$' : next[i]);
        found[2][i] = counts[i] == 1.0f ? '1' : '0';
        found[3][i] = (char)('0' + place[i]);
        found[4][i] = (char)('0' + begin[i]);
    }
    assert_string_equal(found[0], tokens);
    assert_string_equal(found[1], labels);
    assert_string_equal(found[2], mask);
    assert_string_equal(found[3], positions);
    if (starts)
        assert_string_equal(found[4], starts);
}

static void only_answers_count(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_dataset set;
    assert_int_equal(open_text(&folder,
                         "{\"input\": \"ask\", \"output\": \"yes\", \"other\": 1}\n\n  \r\n"
                         "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                         "\"content\": \"b\"}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", "
                         "\"content\": \"d\"}]}",
                         S, false, &set),
        LOOM_OK);
    assert_int_equal(set.length, 2);
    assert_false(set.document_boundaries);
    assert_row(&set, 0, "askyes......", "skyes$......", "001111000000", "012345012345", NULL);
    assert_row(&set, 1, "ab$cd.......", "b$cd$.......", "110110000000", "012340123456", NULL);
    loom_dataset_destroy(&set);
    scratch_remove(&folder);
}

static void samples_share_a_row_while_they_fit(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_dataset set;
    assert_int_equal(open_text(&folder,
                         "{\"input\": \"ask\", \"output\": \"yes\"}\n" /* 6 positions */
                         "{\"input\": \"x\", \"output\": \"yz\"}\n"    /* 3 */
                         "{\"input\": \"p\", \"output\": \"qr\"}\n"    /* 3, which fills the row */
                         "{\"input\": \"m\", \"output\": \"n\"}\n",
                         S, true, &set),
        LOOM_OK);
    assert_int_equal(set.length, 2);
    assert_true(set.document_boundaries);
    assert_row(&set, 0, "askyesxyzpqr", "skyes$yz$qr$", "001111111111", "012345012012", "000000666999");
    assert_row(&set, 1, "mn..........", "n$..........", "110000000000", "010123456789", "002222222222");
    assert_row(&set, -1, "askyesxyzpqr", "skyes$yz$qr$", "000000000000", "012345012012", "000000666999");
    loom_dataset_destroy(&set);
    scratch_remove(&folder);
}

static void a_line_that_is_no_sample_is_named(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
    } wrong[] = {
        {"{\"input\": \"a\", \"output\": \"b\"}\n{", "a.jsonl:2: no JSON at byte "},
        {"[1]", "a.jsonl:1: the line is a list, expected an object"},
        {"{\"input\": \"a\"}", "a.jsonl:1: no texts input and output"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "a.jsonl:1: no message of the role assistant"},
        {"{\"messages\": [{\"role\": \"user\"}]}", "a.jsonl:1: a message without the texts role and content"},
        {"{\"input\": \"\", \"output\": \"\"}", "a.jsonl:1: a sample of 1 tokens, expected at least 2"},
        {"{\"input\": \"aaaaaaaaaa\", \"output\": \"bbb\"}",
            "a.jsonl:1: the sample takes 13 positions, the sequence has 12"},
        {"{\"input\": \"a\", \"input\": \"b\", \"output\": \"c\"}", "a.jsonl:1: no JSON at byte "},
    };
    scratch folder = scratch_make();
    loom_dataset set;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(open_text(&folder, wrong[i].text, S, false, &set), LOOM_ERR_FORMAT);
        if (!strstr(loom_error_message(), wrong[i].message))
            fail_msg("%s: %s", wrong[i].message, loom_error_message());
    }
    assert_int_equal(open_text(&folder, "\n \n", S, false, &set), LOOM_ERR_NOT_FOUND);
    assert_int_equal(open_text(&folder, "", 0, false, &set), LOOM_ERR_CONFIG);
    scratch_remove(&folder);
}

/* Lines that preprocessing reads are read here too. */
static void a_mark_before_the_file_and_numbers_of_any_size_do_not_matter(void **state) {
    (void)state;
    scratch folder = scratch_make();
    loom_dataset set;
    assert_int_equal(open_text(&folder,
                         "\xef\xbb\xbf{\"input\": \"ask\", \"output\": \"yes\", "
                         "\"id\": 123456789012345678901234567890}\r\n\xef\xbb\xbf\n",
                         S, false, &set),
        LOOM_OK);
    assert_int_equal(set.length, 1);
    assert_row(&set, 0, "askyes......", "skyes$......", "001111000000", "012345012345", NULL);
    loom_dataset_destroy(&set);
    scratch_remove(&folder);
}

static void a_line_beyond_64_mib_is_refused_unparsed(void **state) {
    (void)state;
    static const size_t bytes = (64 << 20) + 1;
    scratch folder = scratch_make();
    loom_dataset set;
    char *text = malloc(bytes + 1);
    assert_non_null(text);
    memset(text, '[', bytes);
    text[bytes] = '\0';
    assert_int_equal(open_text(&folder, text, S, false, &set), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "a.jsonl:1: the line has 67108865 bytes, expected at most 67108864"));
    free(text);
    scratch_remove(&folder);
}

/* Every prefix of a file is a dataset or a named error, never worse. */
static void a_file_cut_anywhere_is_refused_or_read(void **state) {
    (void)state;
    static const char text[] = "{\"input\": \"\\u00e4\\u0000\", \"output\": \"b\"}\n"
                               "{\"messages\": [{\"role\": \"assistant\", \"content\": \"ab\"}]}\n";
    scratch folder = scratch_make();
    for (size_t bytes = 0; bytes < sizeof text; bytes++) {
        char part[sizeof text];
        loom_dataset set = {0};
        memcpy(part, text, bytes);
        part[bytes] = '\0';
        loom_status status = open_text(&folder, part, S, true, &set);
        assert_true(status == LOOM_OK || status == LOOM_ERR_FORMAT || status == LOOM_ERR_NOT_FOUND);
        loom_dataset_destroy(&set);
    }
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_answers_count),
        cmocka_unit_test(samples_share_a_row_while_they_fit),
        cmocka_unit_test(a_line_that_is_no_sample_is_named),
        cmocka_unit_test(a_mark_before_the_file_and_numbers_of_any_size_do_not_matter),
        cmocka_unit_test(a_line_beyond_64_mib_is_refused_unparsed),
        cmocka_unit_test(a_file_cut_anywhere_is_refused_or_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
