/* The page of one run. All of it comes from the run's folder, so that it can be made at the end, or later, or of a run
 * that was killed; what a run has not left behind has no place in the page. What a reader should know before trusting
 * the curves stands above them: numbers that are none, steps that are missing, told twice or were skipped. */
#include "config/sizes.h"
#include "report/page.h"
#include "report/rank_map.h"
#include "report/router.h"
#include "report/run.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MARKS = 40, RANKS_SHOWN = 64, TIMELINE_BYTES = 8 << 20, TIME_TEXT = 40 };

/* ---- small numbers ---- */

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* NaN without a finite value. */
static double median_of(const loom_run_record *run, double (*value)(const loom_step_report *report)) {
    double *values = calloc((size_t)run->count + 1, sizeof *values), median = NAN;
    int64_t found = 0;
    for (int64_t i = 0; values && i < run->count; i++) {
        double at = value(&run->reports[i]);
        if (isfinite(at))
            values[found++] = at;
    }
    if (found) {
        qsort(values, (size_t)found, sizeof *values, compare_doubles);
        median = values[found / 2];
    }
    free(values);
    return median;
}

static double throughput_of(const loom_step_report *report) {
    return report->tokens_per_second;
}

static double share_of(const loom_step_report *report) {
    return report->gemm_share;
}

static json_t *scaled(double value, const char *unit) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P"};
    int at = 0;
    for (bool first = true; fabs(value) >= (first ? 1e4 : 999.5) && at < 5; at++, first = false)
        value /= 1000;
    return loom__html_format("%.3g%s%s", value, prefixes[at], unit);
}

static json_t *duration(double seconds) {
    int64_t whole = (int64_t)(seconds + 0.5);
    if (whole >= 3600)
        return loom__html_format("%" PRId64 " h %02" PRId64 " min", whole / 3600, whole / 60 % 60);
    if (whole >= 60)
        return loom__html_format("%" PRId64 " min %02" PRId64 " s", whole / 60, whole % 60);
    return loom__html_format("%.3g s", seconds);
}

static void time_text(int64_t when, char text[TIME_TEXT]) {
    struct tm parts;
    time_t given = (time_t)when;
    *text = '\0';
    if (when > 0 && gmtime_r(&given, &parts))
        (void)strftime(text, TIME_TEXT, "%Y-%m-%d %H:%M UTC", &parts);
}

/* ---- facts ---- */

static void add_fact(json_t *facts, const char *name, json_t *value, json_t *detail) {
    json_t *fact = json_array();
    json_array_append_new(fact, json_string(name));
    json_array_append_new(fact, value);
    if (detail)
        json_array_append_new(fact, detail);
    json_array_append_new(facts, fact);
}

static json_t *loss_text(double loss) {
    return loom__html_format(fabs(loss) < 1e6 ? "%.4f" : "%.4g", loss);
}

static void add_losses(const loom_run_record *run, json_t *facts) {
    const loom_step_report *first = &run->reports[0], *last = &run->reports[run->count - 1];
    double best = INFINITY, latest = NAN;
    int64_t best_step = 0;
    for (int64_t i = 0; i < run->count; i++) {
        double loss = run->reports[i].validation_loss;
        if (!isfinite(loss))
            continue;
        latest = loss;
        if (loss < best) {
            best = loss;
            best_step = run->reports[i].step;
        }
    }
    add_fact(facts, "Loss", loss_text(last->loss),
        loom__html_format(
            fabs(first->loss) < 1e6 ? "%.4f at step %" PRId64 : "%.4g at step %" PRId64, first->loss, first->step));
    if (isfinite(latest))
        add_fact(facts, "Validation loss", loom__html_format("%.4f", latest),
            loom__html_format("best %.4f at step %" PRId64, best, best_step));
}

static void add_test(const loom_run_record *run, json_t *facts) {
    if (!isnan(run->test_loss))
        add_fact(facts, "Test loss", loom__html_format("%.4f", run->test_loss),
            loom__html_format("after step %" PRId64, run->test_step));
}

static void add_speed(const loom_run_record *run, json_t *facts) {
    double seconds = 0, tokens = 0, rate = median_of(run, throughput_of), share = median_of(run, share_of);
    for (int64_t i = 0; i < run->count; i++) {
        double took = run->reports[i].seconds, positions = run->reports[i].tokens_per_second * took;
        seconds += isfinite(took) ? took : 0;
        tokens += isfinite(positions) ? positions : 0;
    }
    if (isfinite(rate))
        add_fact(facts, "Throughput", scaled(rate, " tokens/s"), loom__html_format("median of the steps"));
    if (share > 1)
        add_fact(facts, "Of the measured peak", loom__html_format("over 100 %%"),
            loom__html_format("others used the machine when it was measured"));
    else if (isfinite(share))
        add_fact(facts, "Of the measured peak", loom__html_format("%.0f %%", 100 * share),
            isfinite(run->facts.gemm_rate) ? scaled(run->facts.gemm_rate, " FLOP/s in products")
                                           : loom__html_format("median of the steps"));
    if (tokens > 0)
        add_fact(facts, "Tokens", scaled(tokens, ""), NULL);
    if (seconds > 0)
        add_fact(facts, "Time in steps", duration(seconds), NULL);
}

static void add_dropped(const loom_run_record *run, json_t *facts) {
    const loom_run_series *choices = loom_run_find_series(run, "dropped_choices"),
                          *shares = loom_run_find_series(run, "dropped_share");
    double dropped = 0, share = 0;
    if (!choices || !shares)
        return;
    for (int64_t i = 0; i < choices->count; i++)
        dropped += choices->values[i];
    for (int64_t i = 0; i < shares->count; i++)
        share += shares->values[i] / (double)shares->count;
    add_fact(facts, "Dropped choices", loom__html_format("%.3g %%", 100 * share),
        loom__html_format("%.0f found no room at their expert", dropped));
}

/* False where the run does not tell its layout, or tells one that cannot be. */
static bool layout_of(const loom_run_record *run, loom_layout *layout) {
    if (!run->config || run->facts.ranks < 1)
        return false;
    loom_parallel_sizes sizes = loom__strategy_sizes(&run->config->strategy, run->facts.ranks);
    return loom_layout_init(&sizes, layout) == LOOM_OK;
}

/* The factors of the world; experts cut the same ranks in another way. */
static void add_sizes(const loom_layout *layout, bool sequence_parallel, json_t *facts) {
    const loom_parallel_sizes *sizes = &layout->sizes;
    char experts[LOOM__EXPERTS_TEXT];
    loom__rank_map_experts(layout, experts);
    const char *sequence = sequence_parallel ? ", sequence parallel" : "";
    if (sizes->context > 1)
        add_fact(facts, "Layout",
            loom__html_format("%" PRId64 " × %" PRId64 " × %" PRId64 " × %" PRId64, sizes->tensor, sizes->context,
                sizes->pipeline, layout->data),
            loom__html_format("tensor × context × pipeline × data%s%s", sequence, experts));
    else
        add_fact(facts, "Layout",
            loom__html_format("%" PRId64 " × %" PRId64 " × %" PRId64, sizes->tensor, sizes->pipeline, layout->data),
            loom__html_format("tensor × pipeline × data%s%s", sequence, experts));
}

static void add_layout(const loom_run_record *run, json_t *facts) {
    if (run->facts.ranks > 0)
        add_fact(facts, "Ranks", loom__html_format("%" PRId64, run->facts.ranks),
            loom__html_format("of %" PRId64 " thread%s", run->facts.threads, run->facts.threads == 1 ? "" : "s"));
    if (!run->config)
        return;
    const loom_megatron_strategy_config *s = &run->config->strategy;
    const loom_model_config *m = &run->config->model.config;
    loom_layout layout;
    if (layout_of(run, &layout))
        add_sizes(&layout, s->sequence_parallel, facts);
    add_fact(facts, "Model", loom__html_format("%s", m->architecture ? m->architecture : "from Hugging Face"),
        m->num_layers > 0 ? loom__html_format("%" PRId64 " layers, h %" PRId64 ", s %" PRId64, m->num_layers,
                                m->hidden_size, m->seq_length)
                          : NULL);
    add_fact(facts, "Precision", loom__html_format("%s", run->config->precision.precision), NULL);
}

static json_t *facts_of(const loom_run_record *run) {
    json_t *facts = json_array();
    int64_t last = run->count ? run->reports[run->count - 1].step : 0;
    add_fact(facts, "Steps", loom__html_format("%" PRId64, last),
        run->facts.steps > 0 ? loom__html_format("of %" PRId64, run->facts.steps) : NULL);
    if (run->count)
        add_losses(run, facts);
    add_test(run, facts);
    add_speed(run, facts);
    add_dropped(run, facts);
    add_layout(run, facts);
    return facts;
}

/* ---- warnings ---- */

static void add_warning(json_t *warnings, json_t *text) {
    json_array_append_new(warnings, text);
}

static void warn_of_steps(const loom_run_record *run, json_t *warnings) {
    int64_t nonfinite = 0, first = 0, gaps = 0, gap = 0, skipped = 0;
    for (int64_t i = 0; i < run->count; i++) {
        const loom_step_report *at = &run->reports[i];
        if (!isfinite(at->loss) && nonfinite++ == 0)
            first = at->step;
        if (i > 0 && at->step != at[-1].step + 1 && gaps++ == 0)
            gap = at[-1].step;
        skipped = at->skipped_steps > skipped ? at->skipped_steps : skipped;
    }
    if (nonfinite)
        add_warning(warnings,
            loom__html_format("The loss is no finite number in %" PRId64 " step%s, first in step %" PRId64 ".",
                nonfinite, nonfinite == 1 ? "" : "s", first));
    if (gaps)
        add_warning(
            warnings, loom__html_format("Steps are missing at %" PRId64 " place%s, first after step %" PRId64 ".", gaps,
                          gaps == 1 ? "" : "s", gap));
    if (run->count && run->reports[0].step > 1)
        add_warning(
            warnings, loom__html_format("The metrics begin with step %" PRId64 ": the earlier ones are elsewhere.",
                          run->reports[0].step));
    if (skipped)
        add_warning(warnings, loom__html_format("%" PRId64 " step%s skipped because gradients overflowed.", skipped,
                                  skipped == 1 ? " was" : "s were"));
}

static double total_of(const double bytes[LOOM_RUN_MEMORY_KINDS]) {
    double total = 0;
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        total += isfinite(bytes[i]) ? bytes[i] : 0;
    return total;
}

static bool is_planned(const loom_run_rank *rank) {
    return total_of(rank->planned) > 0;
}

static void warn_of_memory(const loom_run_record *run, json_t *warnings) {
    int64_t over = 0, first = 0;
    for (int64_t i = 0; run->facts.rank && i < run->facts.ranks; i++) {
        const loom_run_rank *rank = &run->facts.rank[i];
        if (is_planned(rank) && total_of(rank->bytes) > 1.05 * total_of(rank->planned) && over++ == 0)
            first = i;
    }
    if (over)
        add_warning(warnings,
            loom__html_format("%" PRId64 " rank%s took over 5 %% more memory than planned, first rank %" PRId64 ".",
                over, over == 1 ? "" : "s", first));
}

static json_t *warnings_of(const loom_run_record *run) {
    json_t *warnings = json_array();
    const loom_run_facts *facts = &run->facts;
    if (facts->message)
        add_warning(warnings, loom__html_string(facts->message));
    if (facts->ranks > 0 && facts->state == LOOM_RUN_RUNNING)
        add_warning(
            warnings, loom__html_format("Nobody has written down an end of this run: it goes on, or it was killed."));
    if (run->count == 0)
        add_warning(warnings, loom__html_format("No step has been written down."));
    if (run->damaged)
        add_warning(warnings, loom__html_format("%" PRId64 " line%s of metrics.jsonl cannot be read.", run->damaged,
                                  run->damaged == 1 ? "" : "s"));
    if (run->repeated)
        add_warning(
            warnings, loom__html_format("%" PRId64 " line%s of metrics.jsonl tell of steps that were done again later.",
                          run->repeated, run->repeated == 1 ? "" : "s"));
    warn_of_steps(run, warnings);
    warn_of_memory(run, warnings);
    if (run->config_text && !run->config)
        add_warning(warnings, loom__html_format("run.yaml is not one that this version of Megaloom understands."));
    if (run->timeline && strlen(run->timeline) > TIMELINE_BYTES)
        add_warning(warnings, loom__html_format("timeline.svg is too large for this page."));
    return warnings;
}

/* ---- curves ---- */

/* Where the run was started again, and the first steps whose loss is no number. */
static json_t *marks_of(const loom_run_record *run) {
    json_t *marks = json_array();
    for (int64_t i = 1; i < run->facts.session_count && i < MARKS; i++)
        json_array_append_new(
            marks, json_pack("{s:I, s:o}", "x", (json_int_t)run->facts.sessions[i].first_step, "text",
                       loom__html_format("resumed with step %" PRId64, run->facts.sessions[i].first_step)));
    for (int64_t i = 0, found = 0; i < run->count && found < MARKS; i++) {
        if (isfinite(run->reports[i].loss))
            continue;
        found++;
        json_array_append_new(
            marks, json_pack("{s:I, s:b, s:o}", "x", (json_int_t)run->reports[i].step, "bad", 1, "text",
                       loom__html_format("no finite loss in step %" PRId64, run->reports[i].step)));
    }
    return marks;
}

static bool loss_scale_matters(const loom_run_record *run) {
    for (int64_t i = 0; i < run->count; i++)
        if (isfinite(run->reports[i].loss_scale) && run->reports[i].loss_scale != 1)
            return true;
    return false;
}

static json_t *charts_of(const loom_run_record *run, int64_t points) {
    json_t *charts = json_array(), *marks = marks_of(run);
    json_t *losses[] = {loom__column_curve(run, "loss", "training", 0, points),
        loom__column_curve(run, "validation_loss", "validation", 1, points)};
    loom__charts_add(charts, "Loss", "", false, false, losses, 2, json_incref(marks));
    static const struct {
        const char *column, *title, *name, *unit;
        bool from_zero, log;
        int colour;
    } single[] = {{"grad_norm", "Gradient norm", "norm", "", false, true, 3},
        {"learning_rate", "Learning rate", "rate", "", true, false, 2},
        {"tokens_per_second", "Throughput", "tokens/s", "", true, false, 4},
        {"memory_bytes", "Memory of the allocator, rank 0", "held", "bytes", true, false, 1},
        {"loss_scale", "Loss scale", "scale", "", false, true, 3}};
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) {
        if (strcmp(single[i].column, "loss_scale") == 0 && !loss_scale_matters(run))
            continue;
        json_t *curve = loom__column_curve(run, single[i].column, single[i].name, single[i].colour, points);
        loom__charts_add(
            charts, single[i].title, single[i].unit, single[i].from_zero, single[i].log, &curve, 1, json_incref(marks));
    }
    loom__router_charts(run, points, charts, marks);
    json_decref(marks);
    return charts;
}

/* ---- memory ---- */

static json_t *sizes_json(const double bytes[LOOM_RUN_MEMORY_KINDS]) {
    json_t *list = json_array();
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        json_array_append_new(list, json_real(isfinite(bytes[i]) ? bytes[i] : 0));
    return list;
}

static json_t *memory_of(const loom_run_record *run) {
    const loom_run_facts *facts = &run->facts;
    json_t *kinds = json_array(), *ranks = json_array();
    bool planned = false;
    for (int i = 0; i < LOOM_RUN_MEMORY_KINDS; i++)
        json_array_append_new(kinds, json_string(loom__run_memory_names[i]));
    for (int64_t i = 0; facts->rank && i < facts->ranks && i < RANKS_SHOWN; i++) {
        const loom_run_rank *rank = &facts->rank[i];
        if (total_of(rank->bytes) <= 0 && !is_planned(rank))
            continue;
        json_t *object =
            json_pack("{s:o, s:o}", "name", loom__html_format("rank %" PRId64, i), "bytes", sizes_json(rank->bytes));
        if (is_planned(rank))
            json_object_set_new(object, "planned", sizes_json(rank->planned));
        planned = planned || is_planned(rank);
        json_array_append_new(ranks, object);
    }
    if (json_array_size(ranks) == 0) {
        json_decref(kinds);
        json_decref(ranks);
        return NULL;
    }
    const char *upright = planned ? " The upright line is the plan." : "";
    json_t *note = facts->ranks > RANKS_SHOWN
                       ? loom__html_format("What each rank held at most, by kind; the first %d of %" PRId64 " ranks.%s",
                             RANKS_SHOWN, facts->ranks, upright)
                       : loom__html_format("What each rank held at most, by kind.%s", upright);
    return json_pack("{s:o, s:o, s:o}", "kinds", kinds, "ranks", ranks, "note", note);
}

/* ---- the page ---- */

static json_t *badge_of(const loom_run_facts *facts) {
    static const char *const tones[LOOM_RUN_STATE_COUNT] = {
        [LOOM_RUN_RUNNING] = "", [LOOM_RUN_FINISHED] = "good", [LOOM_RUN_STOPPED] = "warn", [LOOM_RUN_FAILED] = "bad"};
    return facts->ranks > 0
               ? json_pack("{s:s, s:s}", "text", loom__run_state_names[facts->state], "tone", tones[facts->state])
               : NULL;
}

static json_t *lead_of(const loom_run_facts *facts) {
    char began[TIME_TEXT] = "", ended[TIME_TEXT] = "";
    if (facts->session_count == 0)
        return NULL;
    time_text(facts->sessions[0].began, began);
    time_text(facts->sessions[facts->session_count - 1].ended, ended);
    if (!*began)
        return NULL;
    json_t *ends = facts->session_count > 1 ? loom__html_format("%s%s%s, in %" PRId64 " starts", began,
                                                  *ended ? " to " : "", ended, facts->session_count)
                                            : loom__html_format("%s%s%s", began, *ended ? " to " : "", ended);
    return ends;
}

static void set(json_t *object, const char *key, json_t *value) {
    if (value)
        json_object_set_new(object, key, value);
}

/* A run on more ranks than a picture has, or with a layout that this version does not make, has a page without one. */
static void put_rank_map(FILE *out, const loom_run_record *run) {
    loom_layout layout;
    loom_topology_picture picture = {.rank = -1};
    if (run->facts.ranks < 2 || run->facts.ranks > LOOM_TOPOLOGY_PICTURE_RANKS || !layout_of(run, &layout))
        return;
    fputs("<div hidden>\n", out);
    (void)loom__rank_map_write(out, &layout, &picture, run->facts.rank);
    fputs("</div>\n", out);
}

loom_status loom_run_write_html(FILE *out, const loom_run_record *run, int64_t points) {
    points = points > 0 ? points : LOOM__PAGE_POINTS;
    json_t *data = json_object();
    set(data, "title", loom__html_string(run->folder));
    set(data, "badge", badge_of(&run->facts));
    set(data, "lead", lead_of(&run->facts));
    set(data, "facts", facts_of(run));
    set(data, "warnings", warnings_of(run));
    set(data, "charts", charts_of(run, points));
    set(data, "memory", memory_of(run));
    if (run->timeline && strlen(run->timeline) <= TIMELINE_BYTES)
        set(data, "timeline", loom__html_string(run->timeline));
    if (run->config_text)
        set(data, "config", loom__html_string(run->config_text));
    set(data, "rank", json_integer(-1));
    set(data, "footer", loom__html_format("Made by megaloom report."));
    loom__html_begin(out, run->folder);
    put_rank_map(out, run);
    return loom__html_end(out, data);
}

loom_status loom_topology_write_html(FILE *out, const loom_layout *layout, const loom_topology_picture *picture) {
    int64_t world = loom_layout_world_size(layout);
    LOOM_TRY(loom__rank_map_check(layout, picture));
    /* The script picks the rank out, and lets go of it again. */
    char experts[LOOM__EXPERTS_TEXT];
    loom__rank_map_experts(layout, experts);
    loom_topology_picture plain = {.ranks_per_node = picture->ranks_per_node, .rank = -1};
    json_t *data = json_object();
    set(data, "title", loom__html_format("%" PRId64 " rank%s", world, world == 1 ? "" : "s"));
    set(data, "lead",
        loom__html_format("tensor %" PRId64 ", context %" PRId64 ", data %" PRId64 ", pipeline %" PRId64
                          "%s; order %s, the first fastest",
            layout->sizes.tensor, layout->sizes.context, layout->data, layout->sizes.pipeline, experts,
            layout->sizes.order));
    set(data, "rank", json_integer((json_int_t)picture->rank));
    set(data, "footer", loom__html_format("Made by megaloom topology."));
    loom__html_begin(out, "Ranks and their groups");
    fputs("<div hidden>\n", out);
    loom_status status = loom__rank_map_write(out, layout, &plain, NULL);
    fputs("</div>\n", out);
    loom_status ended = loom__html_end(out, data);
    return status ? status : ended;
}
