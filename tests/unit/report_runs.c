/* A run's folder written and read back, its page, pictures of ranks, and two runs compared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <megaloom/run.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report/run.h"

#define TEST(name) static void name(void **state)

/* ---- folders ---- */

static char *make_folder(char *template) {
    assert_non_null(mkdtemp(template));
    return template;
}

static void remove_folder(const char *folder) {
    static const char *const names[] = {
        "metrics.jsonl", "metrics.jsonl.old", "run.json", "run.yaml", "timeline.svg", "run.json.tmp"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    assert_int_equal(rmdir(folder), 0);
}

static FILE *open_in(const char *folder, const char *name, const char *mode) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, mode);
    assert_non_null(file);
    return file;
}

static void put(const char *folder, const char *name, const char *text) {
    FILE *file = open_in(folder, name, "w");
    fputs(text, file);
    fclose(file);
}

static loom_run_record *read_run(const char *folder) {
    loom_run_record *run = NULL;
    loom_status status = loom_run_read(folder, &run);
    if (status)
        print_error("%s\n", loom_error_message());
    assert_int_equal(status, LOOM_OK);
    return run;
}

/* For free(). */
static char *page_of(const loom_run_record *run, int64_t points) {
    char *text = NULL;
    size_t length;
    FILE *memory = open_memstream(&text, &length);
    assert_int_equal(loom_run_write_html(memory, run, points), LOOM_OK);
    fclose(memory);
    return text;
}

/* The page's data, as its script reads them. */
static json_t *data_of(const char *page) {
    const char *begin = strstr(page, "id=\"data\">"), *end = begin ? strstr(begin, "</script>") : NULL;
    assert_non_null(end);
    begin += strlen("id=\"data\">");
    json_t *data = json_loadb(begin, (size_t)(end - begin), 0, NULL);
    assert_non_null(data);
    return data;
}

static const json_t *chart_of(const json_t *data, const char *title) {
    size_t i;
    const json_t *chart;
    json_array_foreach(json_object_get(data, "charts"), i,
        chart) if (strcmp(json_string_value(json_object_get(chart, "title")), title) == 0) return chart;
    return NULL;
}

static const json_t *curve_of(const json_t *data, const char *title, size_t number, const char *key) {
    return json_object_get(json_array_get(json_object_get(chart_of(data, title), "curves"), number), key);
}

static bool warns(const json_t *data, const char *text) {
    size_t i;
    const json_t *warning;
    json_array_foreach(
        json_object_get(data, "warnings"), i, warning) if (strstr(json_string_value(warning), text)) return true;
    return false;
}

/* ---- reading back ---- */

TEST(facts_come_back_as_they_were_written) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    loom_run_session sessions[] = {{1, 1000, 2000}, {51, 3000, 4000}};
    loom_run_rank ranks[2] = {{.node = "first", .bytes = {1, 2, 3, 4}, .planned = {NAN, NAN, NAN, NAN}},
        {.node = "second", .bytes = {5, 6, NAN, 8}, .planned = {1, 1, 1, 1}}};
    loom_run_facts facts = {LOOM_RUN_FAILED, "step 7: \"quoted\" <b> \xff", 2, 3, 100, 1e11, NAN, sessions, 2, ranks};
    (void)state;
    make_folder(folder);
    assert_int_equal(loom_run_write_facts(folder, &facts), LOOM_OK);
    loom_run_record *run = read_run(folder);
    assert_int_equal(run->facts.state, LOOM_RUN_FAILED);
    assert_string_equal(run->facts.message, "step 7: \"quoted\" <b> ?");
    assert_int_equal(run->facts.ranks, 2);
    assert_int_equal(run->facts.threads, 3);
    assert_int_equal(run->facts.steps, 100);
    assert_true(run->facts.gemm_rate == 1e11);
    assert_true(isnan(run->facts.flops_per_token));
    assert_int_equal(run->facts.session_count, 2);
    assert_int_equal(run->facts.sessions[1].first_step, 51);
    assert_int_equal(run->facts.sessions[1].ended, 4000);
    assert_string_equal(run->facts.rank[1].node, "second");
    assert_true(run->facts.rank[1].bytes[LOOM_RUN_MEMORY_ACTIVATIONS] == 8);
    assert_true(isnan(run->facts.rank[1].bytes[LOOM_RUN_MEMORY_OPTIMIZER]));
    assert_true(isnan(run->facts.rank[0].planned[0]) && run->facts.rank[1].planned[0] == 1);
    assert_int_equal(run->count, 0);
    loom_run_destroy(run);
    loom_run_destroy(NULL);
    remove_folder(folder);
}

TEST(facts_and_lines_that_are_cut_anywhere_are_refused) {
    static const char facts[] = "{\"state\": \"finished\", \"ranks\": 1, \"sessions\": [{\"first_step\": 1}], "
                                "\"rank\": [{\"node\": \"n\", \"bytes\": {\"weights\": 1.5}}]}";
    static const char line[] = "{\"step\":1,\"loss\":2.5}";
    loom_step_report report;
    (void)state;
    for (size_t length = 0; length < sizeof facts; length++) {
        loom_run_facts read = {0};
        loom_status status = loom__run_parse_facts("run.json", facts, length, &read);
        assert_int_equal(status, length == sizeof facts - 1 ? LOOM_OK : LOOM_ERR_FORMAT);
        loom__run_free_facts(&read);
    }
    for (size_t length = 0; length < sizeof line; length++)
        assert_int_equal(loom__run_parse_line(line, length, &report), length == sizeof line - 1);
}

TEST(lines_that_are_none_are_counted_and_a_step_told_again_holds) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    (void)state;
    make_folder(folder);
    put(folder, "metrics.jsonl",
        "{\"step\":1,\"loss\":5.0}\n{\"step\":2,\"loss\":4.0}\n{\"step\":3,\"loss\":3.0}\n{\"step\":3,\"test_loss\":2."
        "75,\"test_tokens\":64.0}\nno json\n{\"step\":-1}\n"
        "[]\n{\"step\":2,\"loss\":4.5}\n{\"step\":3,\"loss\":null}\n{\"step\":4}\n{\"step\":5,\"lo");
    loom_run_record *run = read_run(folder);
    assert_int_equal(run->count, 4);
    assert_int_equal(run->damaged, 4);
    assert_int_equal(run->repeated, 2);
    assert_true(run->test_loss == 2.75 && run->test_step == 3);
    assert_true(run->reports[1].loss == 4.5);
    assert_true(isinf(run->reports[2].loss));
    assert_true(isnan(run->reports[3].loss));
    assert_int_equal(run->facts.ranks, 0);
    loom_run_destroy(run);
    remove_folder(folder);
}

TEST(a_folder_without_a_run_and_facts_that_are_none_are_refused) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    loom_run_record *run = NULL;
    static const char *const bad[] = {"", "[]", "{\"state\": \"lost\", \"ranks\": 1}", "{\"state\": \"running\"}",
        "{\"state\": \"running\", \"ranks\": 2, \"rank\": [{}]}", "{\"state\": \"running\", \"ranks\": 99999999999}",
        "{\"state\": 3, \"ranks\": 1", "{\"state\": \"running\", \"ranks\": -1, \"rank\": []}"};
    (void)state;
    make_folder(folder);
    assert_int_equal(loom_run_read(folder, &run), LOOM_ERR_NOT_FOUND);
    assert_int_equal(loom_run_read("no/such/folder", &run), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "no/such/folder"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put(folder, "run.json", bad[i]);
        assert_int_equal(loom_run_read(folder, &run), LOOM_ERR_FORMAT);
        assert_non_null(strstr(loom_error_message(), "run.json"));
        assert_null(run);
    }
    remove_folder(folder);
}

TEST(a_run_that_goes_on_keeps_the_lines_of_the_steps_before) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX", path[1024];
    loom_metrics *metrics;
    (void)state;
    make_folder(folder);
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    assert_int_equal(loom_metrics_open(path, &metrics), LOOM_OK);
    for (int64_t step = 1; step <= 6; step++)
        assert_int_equal(loom_metrics_write(metrics, &(loom_step_report){.step = step, .loss = 1}), LOOM_OK);
    loom_metrics_close(metrics);
    FILE *cut = fopen(path, "a");
    fputs("{\"step\":2,\"los", cut);
    fclose(cut);
    assert_int_equal(loom_metrics_continue(path, 4, &metrics), LOOM_OK);
    for (int64_t step = 5; step <= 7; step++)
        assert_int_equal(loom_metrics_write(metrics, &(loom_step_report){.step = step, .loss = 2}), LOOM_OK);
    loom_metrics_close(metrics);
    loom_run_record *run = read_run(folder);
    assert_int_equal(run->count, 7);
    assert_int_equal(run->damaged + run->repeated, 0);
    for (int64_t i = 0; i < 7; i++)
        assert_true(run->reports[i].step == i + 1 && run->reports[i].loss == (i < 4 ? 1 : 2));
    loom_run_destroy(run);
    remove_folder(folder);
}

/* ---- the page ---- */

TEST(no_text_of_a_run_becomes_markup) {
    static const char evil[] = "</script><img src=x onerror=alert(1)>&\"'";
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    char message[128];
    loom_run_facts facts = {LOOM_RUN_FAILED, message, 1, 1, 3, NAN, NAN, NULL, 0, NULL};
    (void)state;
    snprintf(message, sizeof message, "%s", evil);
    make_folder(folder);
    assert_int_equal(loom_run_write_facts(folder, &facts), LOOM_OK);
    put(folder, "run.yaml", evil);
    put(folder, "timeline.svg", evil);
    loom_run_record *run = read_run(folder);
    free(run->folder);
    run->folder = strdup(evil);
    char *page = page_of(run, 0);
    assert_null(strstr(page, "<img"));
    json_t *data = data_of(page);
    assert_string_equal(json_string_value(json_object_get(data, "title")), evil);
    assert_string_equal(json_string_value(json_object_get(data, "config")), evil);
    assert_string_equal(json_string_value(json_object_get(data, "timeline")), evil);
    assert_true(warns(data, evil));
    assert_true(warns(data, "run.yaml is not one"));
    json_decref(data);
    free(page);
    loom_run_destroy(run);
    remove_folder(folder);
}

TEST(a_page_asks_for_nothing_from_elsewhere) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    (void)state;
    make_folder(folder);
    put(folder, "metrics.jsonl", "{\"step\":1,\"loss\":5.0}\n");
    loom_run_record *run = read_run(folder);
    char *page = page_of(run, 0);
    assert_non_null(strstr(page, "default-src 'none'"));
    assert_null(strstr(page, "<link rel=\"stylesheet"));
    assert_null(strstr(page, " src="));
    assert_null(strstr(page, "@import"));
    assert_null(strstr(page, "https:"));
    free(page);
    loom_run_destroy(run);
    remove_folder(folder);
}

TEST(a_run_of_one_step_and_one_without_any_have_a_page) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    (void)state;
    make_folder(folder);
    put(folder, "metrics.jsonl", "{\"step\":1,\"loss\":5.0,\"tokens_per_second\":10,\"step_seconds\":1}\n");
    loom_run_record *run = read_run(folder);
    char *page = page_of(run, 0);
    json_t *data = data_of(page);
    assert_int_equal(json_array_size(curve_of(data, "Loss", 0, "x")), 1);
    assert_null(chart_of(data, "Gradient norm")); /* which was never measured */
    json_decref(data);
    free(page);
    loom_run_destroy(run);
    put(folder, "metrics.jsonl", "");
    run = read_run(folder);
    page = page_of(run, 0);
    data = data_of(page);
    assert_true(warns(data, "No step has been written down."));
    assert_int_equal(json_array_size(json_object_get(data, "charts")), 0);
    json_decref(data);
    free(page);
    loom_run_destroy(run);
    remove_folder(folder);
}

TEST(what_a_reader_must_know_stands_above_the_curves) {
    char folder[] = MEGALOOM_BUILD "/run-XXXXXX";
    loom_run_session sessions[] = {{11, 0, 0}, {14, 0, 0}};
    loom_run_rank rank = {.bytes = {100, 0, 0, 0}, .planned = {50, 0, 0, 0}};
    loom_run_facts facts = {LOOM_RUN_RUNNING, NULL, 1, 1, 30, NAN, NAN, sessions, 2, &rank};
    (void)state;
    make_folder(folder);
    assert_int_equal(loom_run_write_facts(folder, &facts), LOOM_OK);
    put(folder, "metrics.jsonl",
        "{\"step\":11,\"loss\":5.0,\"skipped_steps\":1}\n{\"step\":12}\n{\"step\":14,\"loss\":null,\"skipped_steps\":2}"
        "\n"
        "{\"step\":15,\"loss\":4.0,\"skipped_steps\":2}\nx\n");
    loom_run_record *run = read_run(folder);
    char *page = page_of(run, 0);
    json_t *data = data_of(page);
    assert_true(warns(data, "no finite number in 2 steps, first in step 12."));
    assert_true(warns(data, "Steps are missing at 1 place, first after step 12."));
    assert_true(warns(data, "begin with step 11"));
    assert_true(warns(data, "2 steps were skipped"));
    assert_true(warns(data, "1 line of metrics.jsonl cannot be read."));
    assert_true(warns(data, "it goes on, or it was killed"));
    assert_true(warns(data, "1 rank took over 5 % more memory than planned, first rank 0"));
    const json_t *marks = json_object_get(chart_of(data, "Loss"), "marks");
    assert_int_equal(json_array_size(marks), 3); /* one start again, two steps without a number */
    const json_t *means = curve_of(data, "Loss", 0, "mean");
    assert_int_equal(json_array_size(means), 2); /* a curve with as many holes as numbers has no place for them */
    const json_t *planned =
        json_object_get(json_array_get(json_object_get(json_object_get(data, "memory"), "ranks"), 0), "planned");
    assert_true(json_number_value(json_array_get(planned, 0)) == 50);
    json_decref(data);
    free(page);
    loom_run_destroy(run);
    remove_folder(folder);
}

static const char *fact_of(const json_t *data, const char *name, size_t part) {
    size_t i;
    const json_t *fact;
    json_array_foreach(
        json_object_get(data, "facts"), i, fact) if (strcmp(json_string_value(json_array_get(fact, 0)), name) ==
                                                     0) return json_string_value(json_array_get(fact, part));
    return "";
}

TEST(the_factors_of_a_layout_are_all_named) {
    static const char text[] = "ranks: 8\nsteps: 1\n"
                               "model: {architecture: mixtral, num_layers: 2, hidden_size: 32, num_attention_heads: 4, "
                               "seq_length: 16, vocab_size: 64, num_moe_experts: 4}\n"
                               "strategy: {tensor_model_parallel_size: 2, sequence_parallel: true, "
                               "context_parallel_size: 2, expert_model_parallel_size: 4, "
                               "expert_tensor_parallel_size: 1}\ndata: {kind: mock}\n";
    loom_run_record run = {.folder = (char *)"run", .test_loss = NAN, .facts = {.ranks = 8, .threads = 1}};
    (void)state;
    assert_int_equal(loom_run_config_from_text("run.yaml", text, sizeof text - 1, NULL, 0, &run.config), LOOM_OK);
    char *page = page_of(&run, 0);
    json_t *data = data_of(page);
    assert_string_equal(fact_of(data, "Layout", 1), "2 × 2 × 1 × 2");
    assert_string_equal(fact_of(data, "Layout", 2),
        "tensor × context × pipeline × data, sequence parallel, experts etp 1 × ep 4 × edp 2");
    json_decref(data);
    free(page);
    loom_run_config_destroy(run.config);
}

TEST(numbers_of_any_size_stay_short_and_the_last_one_is_exact) {
    enum { STEPS = 1000 };
    loom_step_report reports[STEPS];
    loom_run_record run = {.folder = (char *)"run", .reports = reports, .count = STEPS, .test_loss = NAN};
    (void)state;
    for (int64_t i = 0; i < STEPS; i++)
        reports[i] = (loom_step_report){.step = i + 1,
            .loss = i == 0 ? 1e30 : (double)i,
            .tokens_per_second = 1.2e6,
            .gemm_share = 2.6, /* of a peak that was measured beside others */
            .seconds = 1,
            .grad_norm = NAN,
            .validation_loss = NAN};
    run.facts.gemm_rate = NAN;
    char *page = page_of(&run, 10);
    json_t *data = data_of(page);
    assert_string_equal(fact_of(data, "Throughput", 1), "1.2M tokens/s");
    assert_string_equal(fact_of(data, "Tokens", 1), "1.2G");
    assert_string_equal(fact_of(data, "Of the measured peak", 1), "over 100 %");
    assert_string_equal(fact_of(data, "Loss", 1), "999.0000");
    assert_string_equal(fact_of(data, "Loss", 2), "1e+30 at step 1");
    const json_t *last = curve_of(data, "Loss", 0, "last"); /* of ten stretches the last has the mean 949.5 */
    assert_int_equal(json_integer_value(json_array_get(last, 0)), STEPS);
    assert_true(json_number_value(json_array_get(last, 1)) == 999);
    json_decref(data);
    free(page);
}

/* A million steps; the numbers are put into the record directly, since reading a million lines takes seconds. */
TEST(of_a_million_steps_each_extreme_is_in_the_curve) {
    enum { STEPS = 1000000, POINTS = 500 };
    loom_run_record run = {.folder = (char *)"long", .count = STEPS};
    (void)state;
    run.reports = calloc(STEPS, sizeof *run.reports);
    assert_non_null(run.reports);
    run.facts.gemm_rate = run.facts.flops_per_token = run.test_loss = NAN;
    for (int64_t i = 0; i < STEPS; i++)
        run.reports[i] = (loom_step_report){.step = i + 1,
            .loss = i == 123456   ? 99
                    : i == 654321 ? -7
                                  : 2,
            .grad_norm = NAN,
            .validation_loss = i % 1000 == 999 ? 3 : NAN};
    run.reports[5].loss = NAN;
    char *page = page_of(&run, POINTS);
    json_t *data = data_of(page);
    const json_t *x = curve_of(data, "Loss", 0, "x"), *low = curve_of(data, "Loss", 0, "low"),
                 *high = curve_of(data, "Loss", 0, "high"), *mean = curve_of(data, "Loss", 0, "mean");
    double least = INFINITY, most = -INFINITY;
    assert_int_equal(json_array_size(x), POINTS);
    for (size_t i = 0; i < POINTS; i++) {
        double from = json_number_value(json_array_get(low, i)), to = json_number_value(json_array_get(high, i));
        double middle = json_number_value(json_array_get(mean, i));
        assert_true(from <= middle && middle <= to);
        least = fmin(least, from);
        most = fmax(most, to);
    }
    assert_true(least == -7 && most == 99);
    assert_int_equal(json_array_size(curve_of(data, "Loss", 1, "x")), POINTS); /* validation, 1000 of them */
    assert_true(strlen(page) < 1 << 20);
    json_decref(data);
    free(page);
    free(run.reports);
}

/* ---- ranks ---- */

static char *picture_of(const loom_parallel_sizes *sizes, int64_t rank, bool html) {
    loom_layout layout;
    char *text = NULL;
    size_t length;
    assert_int_equal(loom_layout_init(sizes, &layout), LOOM_OK);
    FILE *memory = open_memstream(&text, &length);
    loom_topology_picture picture = {.ranks_per_node = 4, .rank = rank};
    assert_int_equal((html ? loom_topology_write_html : loom_topology_write_svg)(memory, &layout, &picture), LOOM_OK);
    fclose(memory);
    return text;
}

static int64_t times(const char *text, const char *part) {
    int64_t count = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part))
        count++;
    return count;
}

TEST(a_panel_for_each_kind_of_group_holds_every_rank_once) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(16);
    (void)state;
    sizes.tensor = 2;
    sizes.pipeline = 2;
    char *svg = picture_of(&sizes, -1, false);
    int64_t panels = times(svg, "class=\"rm-panel\"");
    assert_true(panels >= 3); /* tp, dp, pp at least */
    assert_int_equal(times(svg, "data-kind=\"tp\""), 1);
    assert_int_equal(times(svg, "data-kind=\"dp\""), 1);
    assert_int_equal(times(svg, "data-kind=\"pp\""), 1);
    assert_int_equal(times(svg, "data-kind=\"dp_cp\""), 0); /* the same ranks as dp: one panel */
    assert_int_equal(times(svg, "data-r=\"13\""), panels);
    assert_int_equal(times(svg, ">node 3<"), panels);
    assert_int_equal(times(svg, "rm-off\"") + times(svg, "rm-picked\""), 0);
    assert_int_equal(times(svg, "<g"), times(svg, "</g>"));
    free(svg);
}

TEST(a_rank_is_picked_out_with_the_members_of_its_groups) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(8);
    (void)state;
    sizes.tensor = 2;
    char *svg = picture_of(&sizes, 5, false);
    int64_t panels = times(svg, "class=\"rm-panel\"");
    assert_int_equal(times(svg, "rm-picked\" data-r=\"5\""), panels);
    const char *tp = strstr(svg, "data-kind=\"tp\""), *end = strstr(tp, "rm-panel");
    char *panel = strndup(tp, (size_t)(end - tp));
    assert_int_equal(times(panel, "rm-off"), 6); /* all but 4 and 5 */
    assert_non_null(strstr(panel, "rm-cell\" data-r=\"4\""));
    free(panel);
    free(svg);
    char *html = picture_of(&sizes, 5, true);
    assert_non_null(strstr(html, "\"rank\":5"));
    assert_non_null(strstr(html, "default-src 'none'"));
    free(html);
}

/* How many colours the cells of a kind's panel have. */
static int64_t colours_of(const char *svg, const char *kind) {
    char key[64], seen[4096] = "";
    int64_t count = 0;
    snprintf(key, sizeof key, "data-kind=\"%s\"", kind);
    const char *at = strstr(svg, key), *end = strstr(at, "rm-panel");
    assert_non_null(at);
    for (; (at = strstr(at, "fill=\"#")) && (!end || at < end); at++) {
        char colour[16];
        snprintf(colour, sizeof colour, "%.7s;", at + 6);
        count += !strstr(seen, colour);
        if (!strstr(seen, colour))
            strcat(seen, colour);
    }
    return count;
}

TEST(groups_have_colours_of_their_own_and_experts_are_told) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(32);
    (void)state;
    sizes.tensor = 2;
    sizes.expert = 4;
    sizes.expert_tensor = 1;
    char *svg = picture_of(&sizes, -1, false), *html = picture_of(&sizes, -1, true);
    assert_int_equal(colours_of(svg, "tp"), 16);
    assert_int_equal(colours_of(svg, "ep"), 8);
    assert_non_null(strstr(svg, ">32 ranks = tp 2 × cp 1 × dp 16 × pp 1, experts etp 1 × ep 4 × edp 8<"));
    assert_non_null(strstr(html, "pipeline 1, experts etp 1"));
    free(svg);
    free(html);
}

TEST(a_picture_of_too_many_ranks_or_of_none_is_refused) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(4097);
    loom_layout layout;
    (void)state;
    FILE *null = fopen("/dev/null", "w");
    assert_int_equal(loom_layout_init(&sizes, &layout), LOOM_OK);
    assert_int_equal(loom_topology_write_svg(null, &layout, &(loom_topology_picture){.rank = -1}), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "4097 ranks: expected at most 4096"));
    sizes.world = 4;
    assert_int_equal(loom_layout_init(&sizes, &layout), LOOM_OK);
    assert_int_equal(loom_topology_write_html(null, &layout, &(loom_topology_picture){.rank = 4}), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "0 to 3"));
    fclose(null);
}

/* ---- two runs ---- */

static loom_run_record run_of(const char *name, loom_step_report *reports, int64_t count) {
    return (loom_run_record){.folder = (char *)(uintptr_t)name, .reports = reports, .count = count};
}

TEST(noise_grows_out_of_noise_and_a_fault_does_not) {
    enum { STEPS = 40 };
    loom_step_report a[STEPS], b[STEPS];
    loom_run_difference d;
    (void)state;
    for (int64_t i = 0; i < STEPS; i++)
        a[i] = b[i] = (loom_step_report){.step = i + 1, .loss = 4 - 0.01 * (double)i};
    loom_run_record x = run_of("x", a, STEPS), y = run_of("y", b + 2, STEPS - 2);
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_true(d.first == 3 && d.last == STEPS && d.common == STEPS - 2 && d.equal == d.common);
    assert_true(d.beyond == 0 && d.largest == 0 && d.largest_step == 3);

    /* Doubling each step from one unit roundoff: an unstable training, but nothing that was not there. */
    for (int64_t i = 0; i < STEPS; i++)
        b[i].loss = a[i].loss * (1 + ldexp(1, (int)(i < 20 ? i : 20) - 24));
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0);
    assert_true(d.largest > 0.05);

    /* A thousandth that is there at once. */
    for (int64_t i = 0; i < STEPS; i++)
        b[i].loss = a[i].loss * (1 + (i < 10 ? ldexp(1, -24) : 1e-3));
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 11);
    assert_true(d.at > 9e-4 && d.allowed < 1e-5);

    b[5].loss = NAN;
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 6);

    loom_run_record none = run_of("none", b, 1);
    assert_int_equal(loom_runs_compare(&y, &none, NULL, 0, &d), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "no step in common"));
}

/* The losses of a run and of one that is `apart` from it, by step; norms that are measured 3 times as far apart. */
static void fill(loom_step_report *a, loom_step_report *b, int64_t count, const double *apart) {
    for (int64_t i = 0; i < count; i++) {
        a[i] = b[i] = (loom_step_report){.step = i + 1, .loss = 4 - 0.01 * (double)i, .grad_norm = 1};
        b[i].loss = a[i].loss * (1 + apart[i] * ldexp(1, -24));
        b[i].grad_norm = 1 + 3 * apart[i] * ldexp(1, -24);
    }
}

/* As it was measured at a rate that is too high: two losses come near each other while the weights do not. */
TEST(losses_that_cross_hide_nothing_that_the_norms_show) {
    static const double apart[] = {0, 1, 20, 60, 100, 4, 2, 1700};
    enum { STEPS = sizeof apart / sizeof *apart };
    loom_step_report a[STEPS], b[STEPS];
    loom_run_difference d;
    (void)state;
    fill(a, b, STEPS, apart);
    loom_run_record x = run_of("x", a, STEPS), y = run_of("y", b, STEPS);
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0); /* 1700 < 8 * 300 */
    for (int64_t i = 0; i < STEPS; i++)
        b[i].grad_norm = NAN;
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 8); /* 1700 > 8 * 100 */
}

/* Equal weights have equal gradients: where a sum of one misses a rank, the loss knows of it a step later, in small. */
TEST(a_first_gradient_that_is_wrong_is_beyond_noise_at_once) {
    static const double apart[] = {0, 1, 2, 3};
    loom_step_report a[4], b[4];
    loom_run_difference d;
    (void)state;
    fill(a, b, 4, apart);
    b[0].grad_norm = 1 + 4e-5;
    loom_run_record x = run_of("x", a, 4), y = run_of("y", b, 4);
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_true(d.beyond == 1 && d.of_norm && d.at > 3.9e-5 && d.allowed < 2e-5);
    /* A run that was resumed has other weights than the one from the beginning, by rounding. */
    x.reports = a + 1;
    x.count = 3;
    b[1].grad_norm = 1 + 4e-5;
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0);
}

TEST(a_fault_that_grows_slowly_is_beyond_the_noise_that_was_measured) {
    static const double slow[] = {0, 1, 4, 10, 30, 60, 90, 95}, rounding[] = {0, 0.5, 1, 1, 0.2, 1, 2, 1};
    enum { STEPS = sizeof slow / sizeof *slow };
    loom_step_report a[STEPS], b[STEPS], c[STEPS];
    loom_run_difference d;
    (void)state;
    fill(a, c, STEPS, rounding);
    fill(a, b, STEPS, slow);
    loom_run_record x = run_of("x", a, STEPS), y = run_of("y", b, STEPS), z = run_of("z", c, STEPS);
    const loom_run_record *noise[] = {&z};
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0);
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_OK);
    assert_true(d.beyond == 5 && !d.of_norm && d.judged == STEPS); /* 30 > 16 */
    assert_true(fabs(d.allowed - 16 * ldexp(1, -24)) < ldexp(1, -28));
    assert_int_equal(loom_runs_compare(&x, &z, noise, 1, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0);

    /* Beyond the last step of the measure nobody judges, nor before its first. */
    z.count = 4;
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_OK);
    assert_true(d.beyond == 0 && d.judged == 4 && d.last == STEPS);
    z.reports = c + 6;
    z.count = 1;
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_OK);
    assert_true(d.beyond == 7 && d.judged == 7);
    y.count = 3;
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "of which no run that measures rounding has one"));
    z.count = 0;
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "x and z have no step in common"));
}

/* An unstable training may grow faster than any bound that is fixed. */
TEST(what_a_measured_run_does_another_may_do) {
    static const double wild[] = {0, 1, 5, 20, 4000, 90000}, measured[] = {0, 0.5, 2, 5, 300, 7000};
    loom_step_report a[6], b[6], c[6];
    loom_run_difference d;
    (void)state;
    fill(a, c, 6, measured);
    fill(a, b, 6, wild);
    loom_run_record x = run_of("x", a, 6), y = run_of("y", b, 6), z = run_of("z", c, 6);
    const loom_run_record *noise[] = {&z};
    assert_int_equal(loom_runs_compare(&x, &y, NULL, 0, &d), LOOM_OK);
    assert_int_equal(d.beyond, 5);
    assert_int_equal(loom_runs_compare(&x, &y, noise, 1, &d), LOOM_OK);
    assert_int_equal(d.beyond, 0);
}

typedef struct seen {
    int count;
    char text[512];
} seen;

static loom_status see(void *context, const char *field, const char *a, const char *b) {
    seen *of = context;
    size_t length = strlen(of->text);
    of->count++;
    snprintf(of->text + length, sizeof of->text - length, "%s %s %s;", field, a ? a : "-", b ? b : "-");
    return LOOM_OK;
}

TEST(configurations_are_compared_field_by_field) {
    seen of = {0};
    loom_run_record a = {.folder = (char *)"a",
                        .config_text = (char *)"seed: 1\nstrategy:\n  timeout: 5\n  ddp: {x: 1}\nlist: [1, 2]\n"},
                    b = {.folder = (char *)"b",
                        .config_text = (char *)"seed: 1\nstrategy:\n  timeout: 6\nlist: [1, 3]\nmore: yes\n"},
                    none = {.folder = (char *)"none"};
    (void)state;
    assert_int_equal(loom_runs_compare_config(&a, &b, see, &of), LOOM_OK);
    assert_string_equal(of.text, "strategy.timeout 5 6;strategy.ddp.x 1 -;list [1, 2] [1, 3];more - yes;");
    assert_int_equal(loom_runs_compare_config(&a, &none, see, &of), LOOM_ERR_NOT_FOUND);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_come_back_as_they_were_written),
        cmocka_unit_test(facts_and_lines_that_are_cut_anywhere_are_refused),
        cmocka_unit_test(lines_that_are_none_are_counted_and_a_step_told_again_holds),
        cmocka_unit_test(a_folder_without_a_run_and_facts_that_are_none_are_refused),
        cmocka_unit_test(a_run_that_goes_on_keeps_the_lines_of_the_steps_before),
        cmocka_unit_test(no_text_of_a_run_becomes_markup),
        cmocka_unit_test(a_page_asks_for_nothing_from_elsewhere),
        cmocka_unit_test(a_run_of_one_step_and_one_without_any_have_a_page),
        cmocka_unit_test(what_a_reader_must_know_stands_above_the_curves),
        cmocka_unit_test(the_factors_of_a_layout_are_all_named),
        cmocka_unit_test(numbers_of_any_size_stay_short_and_the_last_one_is_exact),
        cmocka_unit_test(of_a_million_steps_each_extreme_is_in_the_curve),
        cmocka_unit_test(a_panel_for_each_kind_of_group_holds_every_rank_once),
        cmocka_unit_test(a_rank_is_picked_out_with_the_members_of_its_groups),
        cmocka_unit_test(groups_have_colours_of_their_own_and_experts_are_told),
        cmocka_unit_test(a_picture_of_too_many_ranks_or_of_none_is_refused),
        cmocka_unit_test(noise_grows_out_of_noise_and_a_fault_does_not),
        cmocka_unit_test(losses_that_cross_hide_nothing_that_the_norms_show),
        cmocka_unit_test(a_first_gradient_that_is_wrong_is_beyond_noise_at_once),
        cmocka_unit_test(a_fault_that_grows_slowly_is_beyond_the_noise_that_was_measured),
        cmocka_unit_test(what_a_measured_run_does_another_may_do),
        cmocka_unit_test(configurations_are_compared_field_by_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
