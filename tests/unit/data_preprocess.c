/* Text to indexed datasets: what is a document in each format, what is skipped, that the number of workers changes
 * nothing, and that a run which is killed anywhere leaves no pair and goes on to the same bytes. */
#include "data/preprocess.h"
#include "unit/format_scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/wait.h>

#include <cmocka.h>

#define assert_ok(call)                                                                                                \
    do {                                                                                                               \
        if ((call) != LOOM_OK)                                                                                         \
            fail_msg("%s", loom_error_message());                                                                      \
    } while (0)

/* The path of the input, which must outlive other names. */
static const char *keep(char kept[512], const char *path) {
    snprintf(kept, 512, "%s", path);
    return kept;
}

typedef struct told {
    char first[512];
    int64_t count;
} told;

static void tell(void *context, const char *message) {
    told *t = context;
    if (t->count++ == 0)
        snprintf(t->first, sizeof t->first, "%s", message);
}

static loom_data_preprocess_config config_of(const char *const *inputs, const char *prefix) {
    return (loom_data_preprocess_config){
        .inputs = inputs, .input_count = 1, .output_prefix = prefix, .append_eod = true, .workers = 2};
}

/* The lengths of the set's documents against those given, which end with -1; sum(lengths) * width is the .bin. */
static void assert_lengths(const scratch *folder, const char *name, const int64_t *lengths) {
    loom_indexed *set;
    char bin[64];
    snprintf(bin, sizeof bin, "%s.bin", name);
    if (loom_indexed_open(scratch_file(folder, name), &set) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    int64_t d = 0;
    for (; lengths[d] >= 0; d++) {
        int64_t first = loom_indexed_document(set, d), end = loom_indexed_document(set, d + 1);
        assert_int_equal(end - first, lengths[d] > 0);
        assert_int_equal(end > first ? loom_indexed_length(set, first) : 0, lengths[d]);
    }
    assert_int_equal(loom_indexed_documents(set), d);
    assert_int_equal(
        loom_indexed_tokens(set) * (int64_t)loom_dtype_size(loom_indexed_dtype(set)), scratch_size(folder, bin));
    loom_indexed_close(set);
}

static void json_lines_are_kept_or_counted(void **state) {
    (void)state;
    static const char lines[] =
        "{\"text\":\"\"}\n{\"text\":\"ab\"}\n{\"text\":\"\xe2\x80\x8d\"}\n \n{\"text\":\"\xff\"}\n"
        "{\"text\":\"a\\u0000b\",\"n\":123456789012345678901234567890}\r\n[]\n{\"text\":7}\n"
        "{\"other\":1}\n{\"text\":\"\\ud800\"}\n{\"text\":\"no end\"}";
    scratch folder = scratch_make();
    char input[512];
    const char *inputs[1] = {keep(input, scratch_write(&folder, "in.jsonl", lines, sizeof lines - 1))};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s", scratch_file(&folder, "set"));
    loom_data_preprocess_config config = config_of(inputs, prefix);
    told messages = {0};
    config.skipped = tell;
    config.progress_context = &messages;
    loom_data_preprocess_result result;
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.documents, 5);
    assert_int_equal(result.invalid, 5);
    assert_int_equal(result.bytes, sizeof lines - 1);
    assert_int_equal(messages.count, 5);
    assert_non_null(strstr(messages.first, "in.jsonl:5: no JSON at byte 9: "));
    assert_lengths(&folder, "set", (const int64_t[]){1, 3, 4, 4, 7, -1});
    /* Without the end of document an empty text is a document of no sequence, as Megatron has it. */
    config.append_eod = false;
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_lengths(&folder, "set", (const int64_t[]){0, 2, 3, 3, 6, -1});
    config.strict = true;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "in.jsonl:5: no JSON at byte 9: "));
    assert_lengths(&folder, "set", (const int64_t[]){0, 2, 3, 3, 6, -1}); /* the old one is still there */
    assert_int_equal(scratch_size(&folder, "set.bin.tmp"), -1);
    scratch_remove(&folder);
}

/* A line between others and one at the end that are longer than lines of JSON may be; one that is just not. */
static void a_line_that_is_too_long_is_named_and_forgotten(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char input[512], prefix[512];
    const char *inputs[] = {keep(input, scratch_file(&folder, "in.jsonl"))};
    FILE *file = fopen(input, "w");
    char *letters = malloc(LOOM__JSON_LINE_BYTES + 1);
    assert_true(file && letters);
    memset(letters, 'x', LOOM__JSON_LINE_BYTES + 1);
    fputs("{\"text\":\"a\"}\n", file);
    fwrite(letters, 1, LOOM__JSON_LINE_BYTES + 1, file);
    fputs("\n{\"text\":\"bc\"}\n{\"text\":\"", file);
    fwrite(letters, 1, LOOM__JSON_LINE_BYTES - 11, file);
    fputs("\"}\n{\"text\":\"d\"}\n", file);
    fwrite(letters, 1, LOOM__JSON_LINE_BYTES + 1, file);
    assert_int_equal(fclose(file), 0);
    free(letters);
    loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "out")));
    told told_of = {0};
    config.skipped = tell;
    config.progress_context = &told_of;
    loom_data_preprocess_result result;
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.documents, 4);
    assert_int_equal(result.invalid, 2);
    assert_int_equal(result.bytes, scratch_size(&folder, "in.jsonl"));
    assert_int_equal(told_of.count, 2);
    assert_non_null(strstr(told_of.first, "in.jsonl:2: the line has 67108865 bytes, expected at most 67108864"));
    assert_lengths(&folder, "out", (const int64_t[]){2, 3, LOOM__JSON_LINE_BYTES - 10, 2, -1});
    config.strict = true;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_FORMAT);
    scratch_remove(&folder);
}

static void its_own_output_is_no_input(void **state) {
    (void)state;
    scratch folder = scratch_make();
    scratch_write(&folder, "a.txt", "abc", 3);
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s/./set", folder.path);
    const char *inputs[1] = {folder.path};
    loom_data_preprocess_config config = config_of(inputs, prefix);
    loom_data_preprocess_result result;
    for (int i = 0; i < 2; i++) {
        assert_ok(loom_data_preprocess_text(&config, &result));
        assert_int_equal(result.bytes, 3);
        assert_lengths(&folder, "set", (const int64_t[]){4, -1});
    }
    scratch_remove(&folder);
}

static void several_keys_give_datasets_that_correspond(void **state) {
    (void)state;
    static const char lines[] = "{\"q\":\"one\",\"a\":\"1\"}\n{\"q\":\"lost\"}\n{\"q\":\"\",\"a\":\"22\"}\n";
    scratch folder = scratch_make();
    char input[512];
    const char *inputs[1] = {keep(input, scratch_write(&folder, "in.jsonl", lines, sizeof lines - 1))};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s", scratch_file(&folder, "set"));
    loom_data_preprocess_config config = config_of(inputs, prefix);
    config.json_keys = (const char *[]){"q", "a"};
    config.json_key_count = 2;
    loom_data_preprocess_result result;
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.documents, 2);
    assert_int_equal(result.invalid, 1);
    assert_int_equal(result.tokens, 4 + 2 + 1 + 3);
    assert_lengths(&folder, "set_q_document", (const int64_t[]){4, 1, -1});
    assert_lengths(&folder, "set_a_document", (const int64_t[]){2, 3, -1});
    config.json_keys = (const char *[]){"q", "q"};
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_ARGUMENT);
    config.json_keys = (const char *[]){"q", "a/b"};
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_ARGUMENT);
    scratch_remove(&folder);
}

static void plain_text_is_cut_as_asked(void **state) {
    (void)state;
    static const char text[] = "one\r\n\ntwo\n--\nthree\n--\n--\n";
    scratch folder = scratch_make();
    char input[512];
    const char *inputs[1] = {keep(input, scratch_write(&folder, "in.txt", text, sizeof text - 1))};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s", scratch_file(&folder, "set"));
    static const struct {
        loom_text_format format;
        const char *separator;
        int64_t lengths[8], empty;
    } cases[] = {
        {LOOM_TEXT_AUTO, NULL, {sizeof text, -1}, 0},
        {LOOM_TEXT_FILE, NULL, {sizeof text, -1}, 0},
        {LOOM_TEXT_LINE, NULL, {4, 4, 3, 6, 3, 3, -1}, 1},
        {LOOM_TEXT_SEPARATOR, "\n--\n", {10, 6, 4, -1}, 0},
        {LOOM_TEXT_SEPARATOR, "--\n", {11, 7, -1}, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t block = 1; block < sizeof text + 2; block += 3) { /* each place at which a reading may end */
            loom_data_preprocess_config config = config_of(inputs, prefix);
            config.format = cases[i].format;
            config.separator = cases[i].separator;
            loom_data_preprocess_result result;
            assert_ok(loom__preprocess_text(&config, block, 7, &result));
            assert_int_equal(result.empty, cases[i].empty);
            assert_lengths(&folder, "set", cases[i].lengths);
        }
    scratch_remove(&folder);
}

static void a_missing_end_of_document_is_refused_before_input_is_read(void **state) {
    (void)state;
    loom_tokenizer without = *loom_tokenizer_byte();
    without.eod = -1;
    const char *inputs[1] = {"/nonexistent/input"};
    loom_data_preprocess_config config = config_of(inputs, "/nonexistent/set");
    config.tokenizer = &without;
    loom_data_preprocess_result result;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "tokenizer byte has none"));
    config.append_eod = false;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_NOT_FOUND);
}

static void compressed_text_is_refused_by_name(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char input[512], prefix[512];
    const char *inputs[1] = {keep(input, scratch_write(&folder, "in.jsonl.gz", "\x1f\x8b", 2))};
    loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "set")));
    loom_data_preprocess_result result;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_UNSUPPORTED);
    assert_non_null(strstr(loom_error_message(), "in.jsonl.gz: not supported yet: compressed text"));
    scratch_remove(&folder);
}

/* ---- a vocabulary that needs 32 bits ---- */

static loom_status encode_wide(
    void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count) {
    (void)context;
    if (bytes > capacity)
        return loom_fail(LOOM_ERR_ARGUMENT, "too little room");
    for (size_t i = 0; i < bytes; i++)
        tokens[i] = 65535 + (text[i] == 'b') + (text[i] == 'c' ? 4464 : 0);
    *count = bytes;
    return LOOM_OK;
}

static void the_width_follows_the_vocabulary(void **state) {
    (void)state;
    scratch folder = scratch_make();
    char input[512];
    const char *inputs[1] = {keep(input, scratch_write(&folder, "in", "abc", 3))};
    char prefix[512];
    snprintf(prefix, sizeof prefix, "%s", scratch_file(&folder, "set"));
    loom_data_preprocess_config config = config_of(inputs, prefix);
    const loom_tokenizer wide = {.name = "wide", .vocab_size = 70001, .eod = 70000, .bos = -1, .encode = encode_wide};
    config.tokenizer = &wide;
    loom_data_preprocess_result result;
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.dtype, LOOM_I32);
    assert_int_equal(scratch_size(&folder, "set.bin"), 16);
    loom_indexed *set;
    int64_t tokens[4];
    assert_int_equal(loom_indexed_open(prefix, &set), LOOM_OK);
    assert_int_equal(loom_indexed_read(set, 0, 0, 4, tokens), LOOM_OK);
    assert_memory_equal(tokens, ((const int64_t[]){65535, 65536, 69999, 70000}), sizeof tokens);
    loom_indexed_close(set);
    /* A tokenizer that breaks its word is named, whatever the width would hold. */
    loom_tokenizer liar = wide;
    liar.vocab_size = 65537;
    liar.eod = 0;
    config.tokenizer = &liar;
    assert_int_equal(loom_data_preprocess_text(&config, &result), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "tokenizer wide gives token 69999, expected 0 to 65536"));
    scratch_remove(&folder);
}

/* ---- workers, and being killed ---- */

enum { LINES = 3000, BLOCK_BYTES = 500, JOURNAL_BYTES = 12000 };

/* Two files of JSON lines, some of them wrong, and one of plain text; the folder's path is left in *input. */
static void write_inputs(const scratch *folder) {
    assert_int_equal(mkdir(scratch_file(folder, "in"), 0777), 0);
    for (int f = 0; f < 2; f++) {
        FILE *file = fopen(scratch_file(folder, f ? "in/b.jsonl" : "in/a.jsonl"), "wb");
        assert_non_null(file);
        for (int i = 0; i < LINES; i++) {
            fprintf(file, i % 97 == 5 ? "{\"text\": oops}\n" : "{\"n\":%d,\"text\":\"", i);
            for (int k = 0; i % 97 != 5 && k < i * i % 61; k++)
                fputc('a' + (i + k) % 26, file);
            fputs(i % 97 != 5 ? "\"}\n" : "", file);
        }
        fclose(file);
    }
    scratch_write(folder, "in/c.txt", "plain", 5);
}

static void assert_same_set(const scratch *folder, const char *name) {
    for (int i = 0; i < 2; i++) {
        char command[1200];
        snprintf(command, sizeof command, "cmp %s/whole%s %s/%s%s", folder->path, i ? ".idx" : ".bin", folder->path,
            name, i ? ".idx" : ".bin");
        assert_int_equal(system(command), 0);
    }
}

static loom_data_preprocess_result make_whole(const scratch *folder) {
    char input[512], prefix[512];
    const char *inputs[1] = {keep(input, scratch_file(folder, "in"))};
    loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(folder, "whole")));
    config.workers = 1;
    loom_data_preprocess_result result;
    if (loom_data_preprocess_text(&config, &result) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return result;
}

static void any_number_of_workers_gives_the_same_bytes(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_inputs(&folder);
    loom_data_preprocess_result whole = make_whole(&folder), result;
    assert_int_equal(whole.invalid, 62);
    assert_int_equal(whole.documents, 2 * LINES - 62 + 1);
    for (int64_t workers = 1; workers <= 7; workers += 2) {
        char input[512], prefix[512];
        const char *inputs[1] = {keep(input, scratch_file(&folder, "in"))};
        loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "set")));
        config.workers = workers;
        assert_ok(loom__preprocess_text(&config, BLOCK_BYTES, JOURNAL_BYTES, &result));
        assert_int_equal(result.tokens, whole.tokens);
        assert_int_equal(result.bytes, whole.bytes);
        assert_same_set(&folder, "set");
        assert_int_equal(scratch_size(&folder, "set.preprocess"), -1);
        assert_int_equal(scratch_size(&folder, "set.idx.lengths.tmp"), -1);
    }
    scratch_remove(&folder);
}

static void die_at(void *context, int64_t documents, int64_t done, int64_t total) {
    int64_t *left = context;
    (void)documents, (void)done, (void)total;
    if (--*left == 0)
        raise(SIGKILL);
}

/* In a process of its own, which is killed after `blocks` blocks. Whether it was. */
static bool run_killed(const scratch *folder, int64_t blocks) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char input[512], prefix[512];
        const char *inputs[1] = {keep(input, scratch_file(folder, "in"))};
        loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(folder, "set")));
        config.progress = die_at;
        config.progress_context = &blocks;
        loom_data_preprocess_result result;
        _exit(loom__preprocess_text(&config, BLOCK_BYTES, JOURNAL_BYTES, &result) != LOOM_OK);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
}

static void a_run_killed_anywhere_leaves_no_pair_and_goes_on(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_inputs(&folder);
    loom_data_preprocess_result whole = make_whole(&folder), result;
    int resumed = 0;
    for (int64_t blocks = 1; blocks < 300; blocks += 37) {
        assert_true(run_killed(&folder, blocks));
        loom_indexed *set;
        assert_int_equal(loom_indexed_open(scratch_file(&folder, "set"), &set), LOOM_ERR_NOT_FOUND);
        char input[512], prefix[512];
        const char *inputs[1] = {keep(input, scratch_file(&folder, "in"))};
        loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "set")));
        assert_ok(loom__preprocess_text(&config, BLOCK_BYTES, JOURNAL_BYTES, &result));
        resumed += result.resumed_bytes > 0;
        assert_true(result.resumed_bytes < whole.bytes);
        assert_int_equal(result.documents, whole.documents);
        assert_int_equal(result.invalid, whole.invalid);
        assert_int_equal(result.tokens, whole.tokens);
        assert_same_set(&folder, "set");
        assert_int_equal(remove(scratch_file(&folder, "set.idx")), 0);
    }
    assert_true(resumed >= 6);
    /* Killed again and again, each time a little later. */
    int kills = 0;
    while (run_killed(&folder, 40))
        kills++;
    assert_true(kills > 3);
    assert_same_set(&folder, "set");
    scratch_remove(&folder);
}

static void a_journal_of_other_work_is_not_used(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_inputs(&folder);
    assert_true(run_killed(&folder, 200));
    assert_true(scratch_size(&folder, "set.preprocess") > 0);
    FILE *file = fopen(scratch_file(&folder, "in/a.jsonl"), "ab");
    fputs("{\"text\":\"one more\"}\n", file);
    fclose(file);
    loom_data_preprocess_result whole = make_whole(&folder), result;
    char input[512], prefix[512];
    const char *inputs[1] = {keep(input, scratch_file(&folder, "in"))};
    loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "set")));
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.resumed_bytes, 0);
    assert_true(result.discarded_bytes > 0 && result.discarded_bytes < result.bytes);
    assert_int_equal(result.documents, whole.documents);
    assert_same_set(&folder, "set");

    /* Every journal that is cut short, and one whose files are gone, begins anew. */
    assert_true(run_killed(&folder, 200));
    long bytes = scratch_size(&folder, "set.preprocess");
    assert_true(bytes > 0);
    for (long cut = 0; cut < bytes; cut += 31) {
        assert_int_equal(truncate(scratch_file(&folder, "set.preprocess"), cut), 0);
        assert_ok(loom_data_preprocess_text(&config, &result));
        assert_int_equal(result.resumed_bytes, 0);
        assert_same_set(&folder, "set");
        assert_true(run_killed(&folder, 200));
    }
    assert_int_equal(truncate(scratch_file(&folder, "set.bin.tmp"), 3), 0);
    assert_ok(loom_data_preprocess_text(&config, &result));
    assert_int_equal(result.resumed_bytes, 0);
    assert_same_set(&folder, "set");
    scratch_remove(&folder);
}

static void a_full_disk_leaves_what_another_run_goes_on_with(void **state) {
    (void)state;
    scratch folder = scratch_make();
    write_inputs(&folder);
    loom_data_preprocess_result whole = make_whole(&folder), result;
    char input[512], prefix[512];
    const char *inputs[1] = {keep(input, scratch_file(&folder, "in"))};
    loom_data_preprocess_config config = config_of(inputs, keep(prefix, scratch_file(&folder, "set")));
    scratch_limit(200000);
    loom_status status = loom__preprocess_text(&config, BLOCK_BYTES, JOURNAL_BYTES, &result);
    scratch_limit(0);
    assert_int_equal(status, LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "set.bin.tmp: writing failed"));
    assert_ok(loom__preprocess_text(&config, BLOCK_BYTES, JOURNAL_BYTES, &result));
    assert_true(result.resumed_bytes > 0);
    assert_int_equal(result.tokens, whole.tokens);
    assert_same_set(&folder, "set");
    scratch_remove(&folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_lines_are_kept_or_counted),
        cmocka_unit_test(a_line_that_is_too_long_is_named_and_forgotten),
        cmocka_unit_test(its_own_output_is_no_input),
        cmocka_unit_test(several_keys_give_datasets_that_correspond),
        cmocka_unit_test(plain_text_is_cut_as_asked),
        cmocka_unit_test(a_missing_end_of_document_is_refused_before_input_is_read),
        cmocka_unit_test(compressed_text_is_refused_by_name),
        cmocka_unit_test(the_width_follows_the_vocabulary),
        cmocka_unit_test(any_number_of_workers_gives_the_same_bytes),
        cmocka_unit_test(a_run_killed_anywhere_leaves_no_pair_and_goes_on),
        cmocka_unit_test(a_journal_of_other_work_is_not_used),
        cmocka_unit_test(a_full_disk_leaves_what_another_run_goes_on_with),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
