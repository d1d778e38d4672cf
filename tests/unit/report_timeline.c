/* Timelines as a picture and as a trace: what is in them, where it lies, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <megaloom/timeline.h>
#include <stdlib.h>
#include <string.h>

/* Two stages, one microbatch in two chunks each; stage 0 computes for 3 of 10 units, stage 1 for 4; it begins at 5. */
static const loom_schedule_event events[] = {
    {0, LOOM_INSTRUCTION_FORWARD, 0, 3, 5.0, 6.0},
    {1, LOOM_INSTRUCTION_FORWARD, 1, 3, 6.5, 8.5},
    {1, LOOM_INSTRUCTION_SEND_PREVIOUS, 1, 3, 8.5, 9.0},
    {1, LOOM_INSTRUCTION_BACKWARD_INPUT, 1, 3, 9.0, 11.0},
    {0, LOOM_INSTRUCTION_BACKWARD_WEIGHT, 0, 3, 13.0, 15.0},
};
static const loom_timeline example = {.title = "one < two & \"three\"",
    .unit = "ms",
    .stages = 2,
    .chunks = 2,
    .events = events,
    .event_count = sizeof events / sizeof *events};

typedef loom_status (*writer)(FILE *out, const loom_timeline *timeline);

static loom_status write_trace(FILE *out, const loom_timeline *timeline) {
    return loom_timeline_write_trace(out, timeline, 1e-3);
}

/* What was written; the caller frees it. */
static char *written(writer write, const loom_timeline *timeline, loom_status expected) {
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    loom_error_clear();
    assert_int_equal(write(file, timeline), expected);
    fclose(file);
    return text;
}

static int count(const char *text, const char *word) {
    int found = 0;
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word))
        found++;
    return found;
}

/* The number of an attribute, in the tag that begins at `tag`. */
static double number_of(const char *tag, const char *name) {
    char key[32];
    snprintf(key, sizeof key, " %s=\"", name);
    const char *at = strstr(tag, key);
    assert_non_null(at);
    return strtod(at + strlen(key), NULL);
}

static void the_bubble_is_what_nobody_computes(void **state) {
    (void)state;
    assert_true(fabs(loom_timeline_bubble(&example) - (1.0 - 7.0 / 20.0)) < 1e-12);
    const loom_timeline nothing = {.stages = 2};
    assert_true(loom_timeline_bubble(&nothing) == 0.0);
}

static void the_picture_has_every_computation_in_its_place(void **state) {
    (void)state;
    char *text = written(loom_timeline_write_svg, &example, LOOM_OK);
    assert_int_equal(count(text, "<title>"), 4);
    assert_non_null(strstr(text, "<title>stage 1: backward (inputs) of microbatch 3, chunk 1</title>"));
    assert_non_null(strstr(text, "one &lt; two &amp; \"three\""));
    assert_non_null(strstr(text, "prefers-color-scheme:dark"));
    assert_non_null(strstr(text, ">70.0 %</text>"));
    assert_non_null(strstr(text, ">60.0 %</text>"));
    assert_non_null(strstr(text, "bubble 65.0 %"));
    assert_non_null(strstr(text, "weight half, by chunk"));
    assert_null(strstr(text, ">backward, by chunk"));
    assert_int_equal(count(text, "<svg"), count(text, "</svg>"));
    assert_int_equal(count(text, "<text"), count(text, "</text>"));
    assert_int_equal(count(text, "<g>"), count(text, "</g>"));

    /* Positions are those of the times, between the ends of the row's band. */
    const char *band = strstr(text, "<rect x="), *cell = strstr(text, "microbatch 3, chunk 0</title><rect");
    assert_non_null(band);
    assert_non_null(cell);
    double left = number_of(band, "x"), width = number_of(band, "width");
    cell = strstr(cell, "<rect");
    assert_true(fabs(number_of(cell, "x") - left) < 0.02 && fabs(number_of(cell, "width") - width / 10.0) < 0.02);
    cell = strstr(text, "backward (weights)");
    assert_non_null(cell);
    cell = strstr(cell, "<rect");
    assert_true(fabs(number_of(cell, "x") - left - width * 0.8) < 0.02);
    assert_true(fabs(number_of(cell, "x") + number_of(cell, "width") - left - width) < 0.02);
    free(text);
}

static void numbers_are_left_out_where_none_would_fit(void **state) {
    (void)state;
    enum { MANY = 2000 };
    loom_schedule_event *many = calloc(MANY, sizeof *many);
    assert_non_null(many);
    for (int i = 0; i < MANY; i++)
        many[i] = (loom_schedule_event){0, LOOM_INSTRUCTION_FORWARD, 0, i, i, i + 1};
    loom_timeline timeline = {.stages = 1, .events = many, .event_count = MANY};
    char *text = written(loom_timeline_write_svg, &timeline, LOOM_OK);
    assert_int_equal(count(text, "<title>"), MANY);
    assert_true(count(text, "<text") < 100);
    free(text);
    timeline.event_count = 10;
    text = written(loom_timeline_write_svg, &timeline, LOOM_OK);
    assert_true(count(text, "class=\"white\" text-anchor=\"middle\">") == 10);
    free(text);
    free(many);
}

static void a_timeline_of_nothing_is_a_picture_and_a_trace(void **state) {
    (void)state;
    const loom_timeline nothing = {.stages = 1};
    char *text = written(loom_timeline_write_svg, &nothing, LOOM_OK);
    assert_non_null(strstr(text, "</svg>"));
    assert_null(strstr(text, "nan"));
    free(text);
    text = written(write_trace, &nothing, LOOM_OK);
    json_t *trace = json_loads(text, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(trace, "traceEvents")), 2);
    json_decref(trace);
    free(text);
}

static void the_trace_has_every_event_in_microseconds(void **state) {
    (void)state;
    char *text = written(write_trace, &example, LOOM_OK);
    json_error_t error;
    json_t *trace = json_loads(text, 0, &error), *list = json_object_get(trace, "traceEvents");
    assert_non_null(list);
    assert_int_equal(json_array_size(list), 1 + 2 + 5);
    const json_t *send = json_array_get(list, 3 + 2);
    assert_string_equal(json_string_value(json_object_get(send, "name")), "send to previous 3.1");
    assert_string_equal(json_string_value(json_object_get(send, "ph")), "X");
    assert_int_equal(json_integer_value(json_object_get(send, "tid")), 1);
    assert_true(fabs(json_number_value(json_object_get(send, "ts")) - 3500.0) < 1e-9);
    assert_true(fabs(json_number_value(json_object_get(send, "dur")) - 500.0) < 1e-9);
    json_decref(trace);
    free(text);
}

static void spans_that_overlap_are_pairs_in_a_process_of_their_row(void **state) {
    (void)state;
    static const loom_timeline_span spans[] = {
        {1, LOOM_SPAN_GRADIENT_REDUCTION, 0, 4096, 4.0, 9.0},
        {1, LOOM_SPAN_PARAMETER_GATHER, 1, 2048, 7.0, 12.0},
        {0, LOOM_SPAN_OPTIMIZER_STEP, -1, 0, 15.0, 17.0},
        {0, LOOM_SPAN_ATTENTION, -1, 0, 6.0, 7.0},
    };
    loom_timeline timeline = example;
    timeline.spans = spans;
    timeline.span_count = 4;
    char *text = written(write_trace, &timeline, LOOM_OK);
    json_t *trace = json_loads(text, 0, NULL);
    const json_t *list = json_object_get(trace, "traceEvents");
    /* Row 0 communicates with nobody, and has no process for it. */
    assert_int_equal(json_array_size(list), 1 + 2 + 1 + 5 + 2 * 2 + 2);
    assert_non_null(strstr(text, "stage 1: communication"));
    assert_null(strstr(text, "stage 0: communication"));
    const json_t *begin = json_array_get(list, 9), *end = json_array_get(list, 10), *update = json_array_get(list, 13);
    assert_string_equal(json_string_value(json_object_get(begin, "name")), "gradient reduction, bucket 0");
    assert_string_equal(json_string_value(json_object_get(begin, "ph")), "b");
    assert_string_equal(json_string_value(json_object_get(end, "ph")), "e");
    assert_true(json_equal(json_object_get(begin, "id"), json_object_get(end, "id")));
    assert_int_equal(json_integer_value(json_object_get(begin, "pid")), 2);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(begin, "args"), "bytes")), 4096);
    /* The span begins before all events do, and time with it. */
    assert_true(fabs(json_number_value(json_object_get(begin, "ts"))) < 1e-9);
    assert_true(fabs(json_number_value(json_object_get(end, "ts")) - 5000.0) < 1e-9);
    assert_string_equal(json_string_value(json_object_get(update, "name")), "optimizer step");
    assert_string_equal(json_string_value(json_object_get(update, "ph")), "X");
    assert_true(fabs(json_number_value(json_object_get(update, "ts")) - 11000.0) < 1e-9);
    const json_t *attention = json_array_get(list, 14);
    assert_string_equal(json_string_value(json_object_get(attention, "name")), "attention of a piece");
    assert_string_equal(json_string_value(json_object_get(attention, "ph")), "X");
    assert_int_equal(json_integer_value(json_object_get(attention, "pid")), 0);
    json_decref(trace);
    free(text);
}

static void what_cannot_be_drawn_is_refused(void **state) {
    (void)state;
    static const loom_schedule_event bad[] = {
        {2, LOOM_INSTRUCTION_FORWARD, 0, 0, 0, 1},
        {-1, LOOM_INSTRUCTION_FORWARD, 0, 0, 0, 1},
        {0, LOOM_INSTRUCTION_FORWARD, 2, 0, 0, 1},
        {0, LOOM_INSTRUCTION_KINDS, 0, 0, 0, 1},
        {0, LOOM_INSTRUCTION_FORWARD, 0, 0, 2, 1},
        {0, LOOM_INSTRUCTION_FORWARD, 0, 0, NAN, 1},
        {0, LOOM_INSTRUCTION_FORWARD, 0, 0, 0, INFINITY},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        loom_timeline timeline = example;
        timeline.events = &bad[i];
        timeline.event_count = 1;
        free(written(loom_timeline_write_svg, &timeline, LOOM_ERR_ARGUMENT));
        assert_non_null(strstr(loom_error_message(), "event 0 ("));
        free(written(write_trace, &timeline, LOOM_ERR_ARGUMENT));
    }
    static const loom_timeline_span bad_spans[] = {
        {2, LOOM_SPAN_GRADIENT_REDUCTION, 0, 0, 0, 1},
        {0, LOOM_SPAN_ATTENTION + 1, 0, 0, 0, 1},
        {0, LOOM_SPAN_PARAMETER_GATHER, 0, 0, 2, 1},
        {0, LOOM_SPAN_PARAMETER_GATHER, 0, 0, NAN, 1},
    };
    for (size_t i = 0; i < sizeof bad_spans / sizeof *bad_spans; i++) {
        loom_timeline timeline = example;
        timeline.spans = &bad_spans[i];
        timeline.span_count = 1;
        free(written(write_trace, &timeline, LOOM_ERR_ARGUMENT));
        assert_non_null(strstr(loom_error_message(), "span 0 ("));
    }
    FILE *full = fopen("/dev/full", "w");
    if (full) {
        setvbuf(full, NULL, _IONBF, 0);
        assert_int_equal(loom_timeline_write_svg(full, &example), LOOM_ERR_IO);
        assert_int_equal(loom_timeline_write_trace(full, &example, 1.0), LOOM_ERR_IO);
        fclose(full);
    }
    FILE *out = tmpfile();
    assert_non_null(out);
    assert_int_equal(loom_timeline_write_trace(out, &example, 0.0), LOOM_ERR_ARGUMENT);
    loom_timeline stageless = {.stages = 0};
    assert_int_equal(loom_timeline_write_svg(out, &stageless), LOOM_ERR_ARGUMENT);
    fclose(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bubble_is_what_nobody_computes),
        cmocka_unit_test(the_picture_has_every_computation_in_its_place),
        cmocka_unit_test(numbers_are_left_out_where_none_would_fit),
        cmocka_unit_test(a_timeline_of_nothing_is_a_picture_and_a_trace),
        cmocka_unit_test(the_trace_has_every_event_in_microseconds),
        cmocka_unit_test(spans_that_overlap_are_pairs_in_a_process_of_their_row),
        cmocka_unit_test(what_cannot_be_drawn_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
