/* metrics.jsonl, the progress line and the GEMM yardstick. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <megaloom/report.h>
#include <pty.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

static loom_step_report step_report(int64_t step) {
    return (loom_step_report){.step = step,
        .loss = 2.5,
        .grad_norm = 0.125,
        .learning_rate = 1e-3,
        .tokens_per_second = 12345,
        .gemm_share = NAN,
        .seconds = 2,
        .validation_loss = NAN,
        .consumed_samples = 16 * step,
        .loss_scale = 1024,
        .num_zeros_in_grad = NAN,
        .skipped_steps = step / 2};
}

/* ---- metrics ---- */

static void each_step_is_one_object_that_can_be_read_at_once(void **state) {
    char path[] = MEGALOOM_BUILD "/metrics-XXXXXX", line[1024];
    loom_metrics *metrics;
    (void)state;
    close(mkstemp(path));
    assert_int_equal(loom_metrics_open(path, &metrics), LOOM_OK);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    for (int64_t step = 1; step <= 3; step++) {
        loom_step_report report = step_report(step);
        if (step == 2) {
            report.validation_loss = 2.25;
            report.num_zeros_in_grad = 7;
        }
        if (step == 3) {
            report.loss = INFINITY;
            report.gemm_share = 0.5;
        }
        assert_int_equal(loom_metrics_write(metrics, &report), LOOM_OK);
        assert_non_null(fgets(line, sizeof line, file));
        json_t *object = json_loads(line, 0, NULL);
        assert_non_null(object);
        assert_int_equal(json_integer_value(json_object_get(object, "step")), step);
        assert_int_equal(json_integer_value(json_object_get(object, "consumed_samples")), 16 * step);
        assert_true(json_real_value(json_object_get(object, "grad_norm")) == 0.125);
        assert_true(json_real_value(json_object_get(object, "learning_rate")) == 1e-3);
        assert_true(json_real_value(json_object_get(object, "tokens_per_second")) == 12345);
        assert_int_equal(json_object_get(object, "validation_loss") != NULL, step == 2);
        assert_int_equal(json_object_get(object, "gemm_share") != NULL, step == 3);
        assert_true(json_real_value(json_object_get(object, "loss_scale")) == 1024);
        assert_int_equal(json_integer_value(json_object_get(object, "skipped_steps")), step / 2);
        assert_int_equal(json_object_get(object, "num_zeros_in_grad") != NULL, step == 2);
        if (step == 3)
            assert_true(json_is_null(json_object_get(object, "loss")));
        else
            assert_true(json_real_value(json_object_get(object, "loss")) == 2.5);
        json_decref(object);
    }
    fclose(file);
    loom_metrics_close(metrics);
    loom_metrics_close(NULL);
    unlink(path);
}

static void a_file_that_cannot_be_written_is_named(void **state) {
    loom_metrics *metrics = NULL;
    (void)state;
    assert_int_equal(loom_metrics_open(MEGALOOM_BUILD "/no/such/folder/metrics.jsonl", &metrics), LOOM_ERR_IO);
    assert_null(metrics);
    assert_non_null(strstr(loom_error_message(), "/no/such/folder/metrics.jsonl"));
}

/* Several processes open one path at once, over an earlier run's file: one has it, the others are refused. */
static void one_run_alone_writes_a_file_and_the_earlier_one_is_kept(void **state) {
    enum { OPENERS = 3, ROUNDS = 100 };
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        char path[] = MEGALOOM_BUILD "/metrics-XXXXXX", old[sizeof path + 4];
        int owners = 0, refused = 0, go[2], told[2], hold[2], fd = mkstemp(path);
        assert_int_equal(write(fd, "earlier\n", 8), 8);
        close(fd);
        assert_true(pipe(go) == 0 && pipe(told) == 0 && pipe(hold) == 0);
        pid_t children[OPENERS];
        for (int i = 0; i < OPENERS; i++)
            if ((children[i] = fork()) == 0) {
                loom_metrics *metrics;
                char byte;
                close(go[1]);
                close(hold[1]);
                (void)!read(go[0], &byte, 1); /* until the parent lets all of them go */
                loom_status status = loom_metrics_open(path, &metrics);
                byte = status == LOOM_OK ? 'o' : status == LOOM_ERR_STATE ? 'r' : '?';
                (void)!write(told[1], &byte, 1);
                (void)!read(hold[0], &byte, 1); /* whoever has the file keeps it until all have tried */
                _exit(0);
            }
        close(go[0]);
        close(go[1]);
        close(hold[0]);
        for (int i = 0; i < OPENERS; i++) {
            char byte;
            assert_int_equal(read(told[0], &byte, 1), 1);
            owners += byte == 'o';
            refused += byte == 'r';
        }
        close(hold[1]);
        close(told[0]);
        close(told[1]);
        for (int i = 0; i < OPENERS; i++)
            waitpid(children[i], NULL, 0);
        snprintf(old, sizeof old, "%s.old", path);
        assert_int_equal(owners + refused, OPENERS);
        assert_int_equal(owners, 1);
        char line[16] = "";
        FILE *kept = fopen(old, "r");
        assert_non_null(kept);
        assert_non_null(fgets(line, sizeof line, kept));
        fclose(kept);
        assert_string_equal(line, "earlier\n");
        unlink(path);
        unlink(old);
    }
}

/* ---- progress ---- */

static char *progress_of(int terminal, int64_t steps, int64_t every) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    loom_progress *progress;
    assert_non_null(out);
    assert_int_equal(loom_progress_create(out, terminal, steps, every, &progress), LOOM_OK);
    for (int64_t step = 1; step <= steps; step++) {
        loom_step_report report = step_report(step);
        report.gemm_share = step == 1 ? NAN : 0.42;
        loom_progress_step(progress, &report);
        if (step == 2)
            loom_progress_note(progress, "validation loss %.2f", 2.25);
    }
    loom_progress_destroy(progress);
    loom_progress_destroy(NULL);
    fclose(out);
    return text;
}

static int count_of(const char *text, const char *what) {
    int count = 0;
    for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
        count++;
    return count;
}

static void a_file_gets_the_first_the_last_and_every_nth_step(void **state) {
    char *text = progress_of(0, 25, 10);
    (void)state;
    assert_int_equal(count_of(text, "step "), 4); /* 1, 10, 20, 25 */
    assert_int_equal(count_of(text, "\n"), 5);    /* and the note */
    assert_int_equal(count_of(text, "\r"), 0);
    assert_non_null(strstr(text, "step  1/25  loss 2.5000  12.3k tokens/s  0:48 left\n"));
    assert_non_null(strstr(text, "step 10/25  loss 2.5000  12.3k tokens/s  42% of GEMM rate  0:30 left\n"));
    assert_non_null(strstr(text, "step 25/25"));
    assert_non_null(strstr(text, "0:00 left\n"));
    assert_non_null(strstr(text, "\nvalidation loss 2.25\n"));
    free(text);
}

static void a_terminal_gets_one_line_that_is_rewritten(void **state) {
    char *text = progress_of(1, 25, 10);
    (void)state;
    assert_int_equal(count_of(text, "step "), 25);
    assert_int_equal(count_of(text, "\n"), 2); /* of the note and of the end */
    assert_non_null(strstr(text, "\r[==========>         ] step 13/25"));
    assert_non_null(strstr(text, "\r\033[Kvalidation loss 2.25\n"));
    assert_true(text[strlen(text) - 1] == '\n');
    free(text);
}

static void long_times_and_high_rates_stay_readable(void **state) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    loom_progress *progress;
    loom_step_report report = step_report(1);
    (void)state;
    assert_non_null(out);
    assert_int_equal(loom_progress_create(out, false, 5001, 0, &progress), LOOM_OK);
    report.tokens_per_second = 2.5e6;
    loom_progress_step(progress, &report);
    report.step = 2;
    report.tokens_per_second = 999;
    loom_progress_step(progress, &report);
    loom_progress_destroy(progress);
    fclose(out);
    assert_non_null(strstr(text, "2.50M tokens/s  2:46:40 left"));
    assert_non_null(strstr(text, "999 tokens/s"));
    free(text);
}

/* One line of step 9/10, on a terminal of so many columns. */
static void on_columns(int columns, char text[256]) {
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    int master, slave;
    loom_progress *progress;
    loom_step_report report = step_report(9);
    report.gemm_share = 0.42;
    if (openpty(&master, &slave, NULL, NULL, &size))
        skip(); /* a system without pseudo-terminals, as a bare chroot is */
    FILE *out = fdopen(slave, "w");
    assert_non_null(out);
    assert_int_equal(loom_progress_create(out, true, 10, 1, &progress), LOOM_OK);
    loom_progress_step(progress, &report);
    ssize_t length = read(master, text, 255);
    assert_true(length > 0);
    text[length] = '\0';
    loom_progress_destroy(progress);
    fclose(out);
    close(master);
}

static void a_narrow_terminal_gets_what_it_has_room_for(void **state) {
    static const struct {
        int columns;
        const char *line;
    } cases[] = {{200, "[==================> ] step  9/10  loss 2.5000  12.3k tokens/s  42% of GEMM rate  0:02 left"},
        {80, "[=======>] step  9/10  loss 2.5000  12.3k tokens/s  42% of GEMM rate  0:02 left"},
        {73, "step  9/10  loss 2.5000  12.3k tokens/s  42% of GEMM rate  0:02 left"},
        {60, "[=====>] step  9/10  loss 2.5000  12.3k tokens/s  0:02 left"}, {40, "step  9/10  loss 2.5000  0:02 left"},
        {25, "step  9/10  loss 2.5000"}, {12, "step  9/10"}, {6, "step "}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256], *end;
        on_columns(cases[i].columns, text);
        assert_int_equal(text[0], '\r');
        end = strstr(text, "\033[K");
        assert_non_null(end);
        *end = '\0';
        assert_true(strlen(text + 1) < (size_t)cases[i].columns);
        assert_string_equal(text + 1, cases[i].line);
    }
}

/* ---- the yardstick, with a GEMM that takes no time ---- */

static void numbers_that_are_none_or_huge_stay_short(void **state) {
    static const struct {
        double loss, tokens, seconds;
        const char *line;
    } cases[] = {{NAN, 0.25, 86400, "loss nan  0.25 tokens/s  99999 d 00 h left"},
        {-NAN, 12, NAN, "loss nan  12 tokens/s\n"}, {3e30, NAN, 1e300, "loss 3e+30\n"},
        {INFINITY, NAN, NAN, "loss inf\n"}, {1e5, NAN, 2, "loss 100000.0000  2 d 07 h left"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *out = open_memstream(&text, &bytes);
        loom_progress *progress;
        loom_step_report report = {.step = 1,
            .loss = cases[i].loss,
            .tokens_per_second = cases[i].tokens,
            .gemm_share = NAN,
            .seconds = cases[i].seconds};
        assert_int_equal(loom_progress_create(out, false, 100000, 1, &progress), LOOM_OK);
        loom_progress_step(progress, &report);
        loom_progress_destroy(progress);
        fclose(out);
        if (!strstr(text, cases[i].line))
            print_error("%s", text);
        assert_non_null(strstr(text, cases[i].line));
        free(text);
    }
}

static void lazy_gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    (void)team;
    (void)trans_a;
    (void)trans_b;
    (void)alpha;
    (void)a;
    (void)lda;
    (void)b;
    (void)ldb;
    (void)accumulate;
    (void)ldc;
    c[0] = (float)(m * n * k);
    usleep(2000);
}

static loom_status measure(loom_rank *rank, void *argument) {
    double rate = 0, *rates = argument;
    LOOM_TRY(loom_measure_gemm_rate(rank, loom_rank_world(rank), &rate));
    rates[loom_rank_index(rank)] = rate;
    return LOOM_OK;
}

/* 2 * 2048^3 operations in 2 ms or a little more on each rank: at most 2 * 8.6e12 a second, on both the same sum. */
static void the_gemm_rate_is_the_sum_over_the_ranks_by_their_own_kernels(void **state) {
    loom_kernels kernels = *loom_kernels_reference();
    loom_run_options options = loom_run_options_default();
    double rates[2] = {0};
    (void)state;
    kernels.gemm = lazy_gemm;
    options.kernels = &kernels;
    options.threads = 1;
    options.timeout = 60;
    if (loom_run_local(2, measure, rates, &options))
        fail_msg("%s", loom_error_message());
    assert_true(rates[0] == rates[1]);
    assert_true(rates[0] > 0 && rates[0] <= 2 * 2.0 * 2048 * 2048 * 2048 / 2e-3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_step_is_one_object_that_can_be_read_at_once),
        cmocka_unit_test(one_run_alone_writes_a_file_and_the_earlier_one_is_kept),
        cmocka_unit_test(a_file_that_cannot_be_written_is_named),
        cmocka_unit_test(a_file_gets_the_first_the_last_and_every_nth_step),
        cmocka_unit_test(a_terminal_gets_one_line_that_is_rewritten),
        cmocka_unit_test(long_times_and_high_rates_stay_readable),
        cmocka_unit_test(a_narrow_terminal_gets_what_it_has_room_for),
        cmocka_unit_test(numbers_that_are_none_or_huge_stay_short),
        cmocka_unit_test(the_gemm_rate_is_the_sum_over_the_ranks_by_their_own_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
