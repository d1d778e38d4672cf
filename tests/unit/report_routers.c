/* Numbers of routers: in a line of metrics.jsonl, on the progress line, read back, and in the page of the run. */
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

/* Layers 1 and 11 have experts; the losses of a step hang on its number. */
typedef struct routers {
    loom_router_statistics of;
    loom_router_layer layers[2];
} routers;

static loom_step_report report_of(routers *r, int64_t step, bool limited, bool layers) {
    const double loss = 1 + 0.25 * (double)step;
    r->layers[0] = (loom_router_layer){
        .layer = 1, .choices = 16, .dropped = limited ? 12 : 0, .load = 4, .losses = {loss, NAN, NAN, NAN}};
    r->layers[1] = (loom_router_layer){.layer = 11, .choices = 16, .load = 1, .losses = {2 * loss, NAN, NAN, INFINITY}};
    r->of = (loom_router_statistics){.experts = 4,
        .limited = limited,
        .layer_count = 2,
        .layers = r->layers,
        .choices = 32,
        .dropped = limited ? 12 : 0,
        .load = 4,
        .mean_load = 2.5,
        .losses = {1.5 * loss, NAN, NAN, INFINITY}};
    return (loom_step_report){.step = step,
        .loss = 2,
        .grad_norm = 1,
        .tokens_per_second = NAN,
        .gemm_share = NAN,
        .validation_loss = NAN,
        .router = &r->of,
        .router_layers = layers};
}

static void write_run(const char *path, int64_t steps, bool limited, bool layers) {
    loom_metrics *metrics;
    assert_int_equal(loom_metrics_open(path, &metrics), LOOM_OK);
    for (int64_t step = 1; step <= steps; step++) {
        routers r;
        loom_step_report report = report_of(&r, step, limited, layers);
        assert_int_equal(loom_metrics_write(metrics, &report), LOOM_OK);
    }
    loom_metrics_close(metrics);
}

/* A folder with a run; removed by `end`. */
typedef struct run_folder {
    char folder[1024], path[1100];
    loom_run_record *run;
} run_folder;

static void read_back(run_folder *of) {
    if (loom_run_read(of->folder, &of->run))
        fail_msg("%s", loom_error_message());
}

static run_folder begin(int64_t steps, bool limited, bool layers) {
    run_folder of = {.run = NULL};
    snprintf(of.folder, sizeof of.folder, MEGALOOM_BUILD "/routers-XXXXXX");
    assert_non_null(mkdtemp(of.folder));
    snprintf(of.path, sizeof of.path, "%s/metrics.jsonl", of.folder);
    write_run(of.path, steps, limited, layers);
    return of;
}

static void end(run_folder *of) {
    loom_run_destroy(of->run);
    unlink(of->path);
    rmdir(of->folder);
}

static json_t *last_line(const char *path) {
    FILE *file = fopen(path, "r");
    char line[4096] = "";
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
    }
    fclose(file);
    json_t *object = json_loads(line, 0, NULL);
    assert_non_null(object);
    return object;
}

static double number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    return json_is_null(value) ? INFINITY : value ? json_number_value(value) : NAN;
}

/* ---- lines ---- */

static void a_line_tells_of_the_model_and_if_asked_of_each_layer(void **state) {
    (void)state;
    for (int layers = 0; layers < 2; layers++) {
        run_folder of = begin(2, true, layers);
        json_t *line = last_line(of.path);
        assert_true(number(line, "expert_load") == 4 && number(line, "expert_load_mean") == 2.5);
        assert_true(json_is_integer(json_object_get(line, "dropped_choices")));
        assert_true(number(line, "dropped_choices") == 12 && number(line, "dropped_share") == 0.375);
        assert_true(number(line, "load_balancing_loss") == 2.25 && isinf(number(line, "z_loss")));
        assert_null(json_object_get(line, "seq_load_balancing_loss"));
        assert_int_equal(json_object_get(line, "moe/expert_load_layer_1") != NULL, layers);
        if (layers) {
            assert_true(number(line, "moe/expert_load_layer_1") == 4);
            assert_true(number(line, "moe/dropped_share_layer_1") == 0.75);
            assert_true(number(line, "moe/load_balancing_loss_layer_11") == 3);
            assert_null(json_object_get(line, "moe/expert_load_layer_0"));
        }
        json_decref(line);
        end(&of);
    }
}

static void without_a_capacity_nothing_is_said_of_dropping(void **state) {
    (void)state;
    run_folder of = begin(1, false, true);
    json_t *line = last_line(of.path);
    assert_true(number(line, "expert_load") == 4);
    assert_null(json_object_get(line, "dropped_choices"));
    assert_null(json_object_get(line, "dropped_share"));
    assert_null(json_object_get(line, "moe/dropped_share_layer_1"));
    json_decref(line);
    end(&of);
}

static void the_progress_line_tells_what_is_dropped(void **state) {
    (void)state;
    for (int limited = 0; limited < 2; limited++) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *out = open_memstream(&text, &bytes);
        loom_progress *progress;
        routers r;
        loom_step_report report = report_of(&r, 1, limited, false);
        assert_non_null(out);
        assert_int_equal(loom_progress_create(out, false, 1, 1, &progress), LOOM_OK);
        loom_progress_step(progress, &report);
        loom_progress_destroy(progress);
        fclose(out);
        assert_int_equal(strstr(text, "loss 2.0000  37.5% dropped") != NULL, limited);
        assert_int_equal(strstr(text, "dropped") != NULL, limited);
        free(text);
    }
}

/* ---- read back ---- */

static void series_come_back_by_name(void **state) {
    (void)state;
    run_folder of = begin(3, true, true);
    read_back(&of);
    const loom_run_series *load = loom_run_find_series(of.run, "expert_load");
    const loom_run_series *loss = loom_run_find_series(of.run, "moe/load_balancing_loss_layer_11");
    assert_true(load && load->count == 3 && load->steps[2] == 3 && load->values[2] == 4);
    assert_true(loss && loss->count == 3 && loss->values[0] == 2.5 && loss->values[2] == 3.5);
    assert_true(isinf(loom_run_find_series(of.run, "z_loss")->values[0]));
    assert_null(loom_run_find_series(of.run, "loss"));
    assert_null(loom_run_find_series(of.run, "step"));
    assert_null(loom_run_find_series(of.run, "moe/load_balancing_loss_layer_0"));
    for (int64_t i = 1; i < of.run->series_count; i++)
        assert_true(strcmp(of.run->series[i - 1].name, of.run->series[i].name) < 0);
    end(&of);
}

/* Where a run goes back, nothing stays of the steps that a later line tells again, also of what it no longer tells. */
static void a_step_told_again_leaves_no_series_behind(void **state) {
    (void)state;
    run_folder of = begin(5, true, true);
    FILE *file = fopen(of.path, "a");
    assert_non_null(file);
    fputs("{\"step\":3,\"loss\":1.0,\"expert_load\":1.5,\"odd\":\"text\",\"list\":[1]}\n{\"step\":4,\"loss\":1.0}\n",
        file);
    fclose(file);
    read_back(&of);
    const loom_run_series *load = loom_run_find_series(of.run, "expert_load");
    const loom_run_series *share = loom_run_find_series(of.run, "dropped_share");
    assert_int_equal(of.run->count, 4);
    assert_true(load->count == 3 && load->steps[2] == 3 && load->values[2] == 1.5);
    assert_true(share->count == 2 && share->steps[1] == 2);
    assert_null(loom_run_find_series(of.run, "odd"));
    assert_null(loom_run_find_series(of.run, "list"));
    end(&of);
}

static void more_names_than_a_run_has_are_left_out(void **state) {
    enum { NAMES = 20000, LEAST = 1000 };
    (void)state;
    run_folder of = begin(1, false, false);
    FILE *file = fopen(of.path, "a");
    assert_non_null(file);
    fputs("{\"step\":2", file);
    for (int i = 0; i < NAMES; i++)
        fprintf(file, ",\"name%d\":%d", i, i);
    fputs("}\n", file);
    fclose(file);
    read_back(&of);
    assert_int_equal(of.run->count, 2);
    assert_true(of.run->series_count > LEAST && of.run->series_count < NAMES);
    end(&of);
}

/* ---- the page ---- */

/* The data of the run's page. */
static json_t *page_of(const loom_run_record *run) {
    char *text = NULL;
    size_t length;
    FILE *memory = open_memstream(&text, &length);
    assert_non_null(memory);
    assert_int_equal(loom_run_write_html(memory, run, 100), LOOM_OK);
    fclose(memory);
    const char *from = strstr(text, "id=\"data\">"), *to = from ? strstr(from, "</script>") : NULL;
    assert_non_null(to);
    from += strlen("id=\"data\">");
    json_t *data = json_loadb(from, (size_t)(to - from), 0, NULL);
    assert_non_null(data);
    free(text);
    return data;
}

/* The curves of a chart; NULL where there is none. */
static const json_t *curves_of(const json_t *data, const char *title) {
    const json_t *charts = json_object_get(data, "charts");
    for (size_t i = 0; i < json_array_size(charts); i++)
        if (strcmp(json_string_value(json_object_get(json_array_get(charts, i), "title")), title) == 0)
            return json_object_get(json_array_get(charts, i), "curves");
    return NULL;
}

static void expect_curve(const json_t *curves, size_t at, const char *name, double first, double last) {
    const json_t *curve = json_array_get(curves, at), *mean = json_object_get(curve, "mean");
    assert_non_null(curve);
    assert_string_equal(json_string_value(json_object_get(curve, "name")), name);
    assert_true(json_number_value(json_array_get(mean, 0)) == first);
    assert_true(json_number_value(json_array_get(mean, json_array_size(mean) - 1)) == last);
}

static void the_page_has_the_curves_of_the_model(void **state) {
    (void)state;
    run_folder of = begin(4, true, false);
    read_back(&of);
    json_t *data = page_of(of.run);
    const json_t *load = curves_of(data, "Busiest expert over the mean");
    assert_int_equal(json_array_size(load), 2);
    expect_curve(load, 0, "most uneven layer", 4, 4);
    expect_curve(load, 1, "mean of the layers", 2.5, 2.5);
    expect_curve(curves_of(data, "Share of choices dropped"), 0, "all layers", 0.375, 0.375);
    expect_curve(curves_of(data, "Load-balancing loss"), 0, "mean of the layers", 1.875, 3);
    assert_null(curves_of(data, "Load-balancing loss of sequences"));
    assert_null(curves_of(data, "Z loss of the routers")); /* never finite */
    json_t *facts = json_object_get(data, "facts");
    bool found = false;
    for (size_t i = 0; i < json_array_size(facts); i++) {
        const json_t *fact = json_array_get(facts, i);
        if (strcmp(json_string_value(json_array_get(fact, 0)), "Dropped choices") == 0)
            found = strcmp(json_string_value(json_array_get(fact, 1)), "37.5 %") == 0 &&
                    strncmp(json_string_value(json_array_get(fact, 2)), "48 found", 8) == 0;
    }
    assert_true(found);
    json_decref(data);
    end(&of);
}

static void the_page_has_the_curves_of_each_layer_in_order(void **state) {
    (void)state;
    run_folder of = begin(4, true, true);
    read_back(&of);
    json_t *data = page_of(of.run);
    const json_t *loss = curves_of(data, "Load-balancing loss");
    assert_int_equal(json_array_size(loss), 2);
    expect_curve(loss, 0, "layer 1", 1.25, 2);
    expect_curve(loss, 1, "layer 11", 2.5, 4);
    expect_curve(curves_of(data, "Share of choices dropped"), 0, "layer 1", 0.75, 0.75);
    json_decref(data);
    end(&of);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_tells_of_the_model_and_if_asked_of_each_layer),
        cmocka_unit_test(without_a_capacity_nothing_is_said_of_dropping),
        cmocka_unit_test(the_progress_line_tells_what_is_dropped),
        cmocka_unit_test(series_come_back_by_name),
        cmocka_unit_test(a_step_told_again_leaves_no_series_behind),
        cmocka_unit_test(more_names_than_a_run_has_are_left_out),
        cmocka_unit_test(the_page_has_the_curves_of_the_model),
        cmocka_unit_test(the_page_has_the_curves_of_each_layer_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
