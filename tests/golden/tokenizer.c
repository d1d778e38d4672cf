/* Golden tokenizers: ids and decoded texts of the `tokenizers` package, one folder with tokenizer.json and cases.json
 * for each kind. */
#include "support/golden.h"

#include <megaloom/data.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { LONGEST = 1 << 14 };

typedef struct counts {
    int ran, left_out;
} counts;

static void check_case(const loom_tokenizer *tokenizer, const json_t *entry, const char *id) {
    static int64_t tokens[16 * LONGEST];
    static char text[16 * LONGEST];
    const json_t *given = json_object_get(entry, "text"), *ids = json_object_get(entry, "ids"),
                 *decoded = json_object_get(entry, "decoded");
    size_t bytes = json_string_length(given), count = 0, made = 0;
    size_t room = loom_tokenizer_room(tokenizer, bytes);
    assert_true(room <= sizeof tokens / sizeof *tokens);
    if (tokenizer->encode(tokenizer->context, json_string_value(given), bytes, tokens, room, &count) != LOOM_OK)
        fail_msg("%s: %s", id, loom_error_message());
    for (size_t i = 0; i < count || i < json_array_size(ids); i++) {
        long long wanted = i < json_array_size(ids) ? json_integer_value(json_array_get(ids, i)) : -1;
        long long found = i < count ? tokens[i] : -1;
        if (wanted != found)
            fail_msg("%s: token %zu is %lld, expected %lld", id, i, found, wanted);
    }
    if (tokenizer->decode(tokenizer->context, tokens, count, text, sizeof text, &made) != LOOM_OK)
        fail_msg("%s: %s", id, loom_error_message());
    decoded = decoded ? decoded : given;
    if (!json_is_null(decoded) &&
        (made != json_string_length(decoded) || memcmp(text, json_string_value(decoded), made) != 0))
        fail_msg("%s: decodes to '%.*s', expected '%s'", id, (int)made, text, json_string_value(decoded));
    /* The text of fewer tokens, as far as they are settled, is a beginning of the whole. */
    static char shorter[sizeof text];
    for (size_t i = 0, last = 0, part = 0; i < count && i < 64; i++, last = part) {
        if (tokenizer->settled && tokenizer->settled(tokenizer->context, tokens, i) < i)
            continue;
        assert_int_equal(tokenizer->decode(tokenizer->context, tokens, i, shorter, sizeof shorter, &part), LOOM_OK);
        if (part < last || part > made || memcmp(shorter, text, part) != 0)
            fail_msg("%s: the text of %zu tokens is no beginning of the whole", id, i);
    }
}

/* ---- tokens that come one by one ---- */

static size_t read_ids(const json_t *list, int64_t *ids) {
    size_t count = json_array_size(list);
    assert_true(count <= LONGEST);
    for (size_t i = 0; i < count; i++)
        ids[i] = json_integer_value(json_array_get(list, i));
    return count;
}

static void check_decoding(const loom_tokenizer *tokenizer, const json_t *entry, const char *id) {
    static int64_t before[LONGEST], ids[LONGEST];
    static char text[16 * LONGEST];
    size_t head = read_ids(json_object_get(entry, "before"), before),
           count = read_ids(json_object_get(entry, "ids"), ids);
    const char *wanted = golden_string(entry, "text", ""), *piece;
    size_t made = 0, bytes;
    loom_text_stream *stream;
    assert_int_equal(loom_text_stream_create(tokenizer, before, head, &stream), LOOM_OK);
    for (size_t i = 0; i <= count; i++) {
        loom_status status = i < count ? loom_text_stream_put(stream, ids[i], &piece, &bytes)
                                       : loom_text_stream_end(stream, &piece, &bytes);
        if (status)
            fail_msg("%s: %s", id, loom_error_message());
        assert_true(bytes < sizeof text - made);
        memcpy(text + made, piece, bytes);
        made += bytes;
    }
    text[made] = '\0';
    loom_text_stream_destroy(stream);
    if (strcmp(text, wanted) != 0)
        fail_msg("%s: gives '%s', expected '%s'", id, text, wanted);
}

static void a_stream_gives_what_the_package_makes_of_the_whole(void **state) {
    (void)state;
    int ran = 0, left_out = 0;
    glob_t files = golden_glob("tokenizer/*/decodings.json");
    for (size_t i = 0; i < files.gl_pathc; i++) {
        char folder[4096], id[4200];
        loom_tokenizer *tokenizer;
        snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(files.gl_pathv[i], '/') - files.gl_pathv[i]),
            files.gl_pathv[i]);
        if (loom_tokenizer_open(folder, &tokenizer) == LOOM_ERR_UNSUPPORTED) {
            left_out++;
            continue;
        }
        json_t *root = json_load_file(files.gl_pathv[i], JSON_ALLOW_NUL, NULL), *entry;
        assert_non_null(root);
        size_t number;
        json_array_foreach(json_object_get(root, "cases"), number, entry) {
            snprintf(id, sizeof id, "%s: decoding %zu", folder, number);
            check_decoding(tokenizer, entry, id);
            ran++;
        }
        json_decref(root);
        loom_tokenizer_destroy(tokenizer);
    }
    globfree(&files);
    print_message("decodings: %d cases ran, %d tokenizers left out (not supported yet)\n", ran, left_out);
    if (ran == 0 && getenv("MEGALOOM_GOLDEN"))
        skip();
    assert_true(ran > 0);
}

static void check_folder(const char *cases, counts *counted) {
    char path[4096], id[4200];
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(cases, '/') - cases), cases);
    loom_tokenizer *tokenizer;
    loom_status status = loom_tokenizer_open(path, &tokenizer);
    if (status == LOOM_ERR_UNSUPPORTED) {
        assert_non_null(strstr(loom_error_message(), "not supported yet"));
        counted->left_out++;
        return;
    }
    if (status != LOOM_OK)
        fail_msg("%s", loom_error_message());
    json_t *root = json_load_file(cases, JSON_ALLOW_NUL, NULL), *entry;
    assert_non_null(root);
    size_t i;
    json_array_foreach(json_object_get(root, "cases"), i, entry) {
        snprintf(id, sizeof id, "%s: case %zu '%.40s'", path, i, golden_string(entry, "text", "?"));
        check_case(tokenizer, entry, id);
        counted->ran++;
    }
    json_decref(root);
    loom_tokenizer_destroy(tokenizer);
}

static void ids_and_texts_are_those_of_the_tokenizers_package(void **state) {
    (void)state;
    counts counted = {0};
    glob_t files = golden_glob("tokenizer/*/cases.json");
    for (size_t i = 0; i < files.gl_pathc; i++)
        check_folder(files.gl_pathv[i], &counted);
    globfree(&files);
    print_message(
        "tokenizer: %d cases ran, %d tokenizers left out (not supported yet)\n", counted.ran, counted.left_out);
    if (counted.ran == 0 && getenv("MEGALOOM_GOLDEN"))
        skip();
    assert_true(counted.ran > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_and_texts_are_those_of_the_tokenizers_package),
        cmocka_unit_test(a_stream_gives_what_the_package_makes_of_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
