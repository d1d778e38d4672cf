/* How layers fall on stages. There are five ways: evenly, with other numbers in the first and last stage, with the
 * embedding and the loss counted as layers, balanced (ours, for what does not divide), and written out. Each way has
 * its check, which names all its faults, and a count for the chunk at one place of the depth; the chunks taken in order
 * of depth hold the layers 0, 1, … once each, whatever the way. */
#include "base/suggest.h"
#include "layout/layout.h"
#include "layout/stages_text.h"
#include <inttypes.h>
#include <megaloom/stages.h>
#include <stdio.h>
#include <string.h>

static bool has_ends(const loom_stage_split *s) {
    return s->num_layers_in_first_pipeline_stage != 0 || s->num_layers_in_last_pipeline_stage != 0;
}

static int64_t accounted(const loom_stage_split *s) {
    return s->account_for_embedding_in_pipeline_split + s->account_for_loss_in_pipeline_split;
}

/* "pipeline_model_parallel_size 4 x virtual_pipeline_model_parallel_size 2 = 8 chunks", or "… 4". */
static void say_parts(const loom_stage_split *s, int64_t chunks, char *text, size_t bytes) {
    if (chunks > 1)
        snprintf(text, bytes,
            "pipeline_model_parallel_size %" PRId64 " x virtual_pipeline_model_parallel_size %" PRId64 " = %" PRId64
            " chunks",
            s->pipeline_model_parallel_size, chunks, s->pipeline_model_parallel_size * chunks);
    else
        snprintf(text, bytes, "pipeline_model_parallel_size %" PRId64, s->pipeline_model_parallel_size);
}

/* The chunks of a stage and, with a layout, what it stands for. False where they are at fault. */
static bool check_chunks(const loom_stage_split *s, int64_t *chunks, loom__stages_count *count, loom__faults *faults) {
    int64_t before = faults->count, pp = s->pipeline_model_parallel_size, vp = s->virtual_pipeline_model_parallel_size;
    if (pp < 1)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "pipeline_model_parallel_size: found %" PRId64 ", expected at least 1", pp);
    if (vp < 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size: found %" PRId64 ", expected at least 1, or null", vp);
    const char *text = s->pipeline_model_parallel_layout;
    bool readable = !text || loom__stages_text_count(text, count, faults);
    if (pp < 1 || vp < 0 || !readable)
        return false;
    loom_status virtual_stages = loom__check_virtual_stages(vp, pp);
    if (virtual_stages)
        loom__faults_add(faults, virtual_stages, "%s", loom_error_message());
    else if (vp > 0 && pp > LOOM__STAGES_MAX / vp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size: found %" PRId64 ", with pipeline_model_parallel_size %" PRId64
            ", expected at most %d chunks in all",
            vp, pp, LOOM__STAGES_MAX);
    else if (pp > LOOM__STAGES_MAX)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "pipeline_model_parallel_size: found %" PRId64 ", expected at most %d", pp, LOOM__STAGES_MAX);
    if (faults->count > before)
        return false;
    *chunks = vp > 0 ? vp : 1;
    if (!text)
        return true;
    if (pp == 1 && count->stages > 1) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "pipeline_model_parallel_layout: '%.80s' has %" PRId64
            " stages, but pipeline_model_parallel_size is 1: expected one stage, or a pipeline size that divides their "
            "number",
            text, count->stages);
    } else if (count->stages % pp != 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "pipeline_model_parallel_layout: '%.80s' has %" PRId64
            " stage%s, expected a multiple of pipeline_model_parallel_size %" PRId64,
            text, count->stages, count->stages == 1 ? "" : "s", pp);
    } else if (vp > 0 && count->stages != pp * vp) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size: found %" PRId64
            ", but pipeline_model_parallel_layout '%.80s' has %" PRId64
            " stages for pipeline_model_parallel_size %" PRId64 ": expected %" PRId64 ", or null",
            vp, text, count->stages, pp, count->stages / pp);
    } else {
        *chunks = count->stages / pp;
    }
    return faults->count == before;
}

static void check_layout(const loom_stage_split *s, const loom__stages_count *count, loom__faults *faults) {
    const char *text = s->pipeline_model_parallel_layout;
    if (count->prediction > 0)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: pipeline_model_parallel_layout '%.80s' with m (multi-token prediction layers); only E, "
            "t "
            "and L work",
            text);
    if (count->layers != s->layers)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "pipeline_model_parallel_layout: '%.80s' places %" PRId64 " layers (t), expected num_layers %" PRId64, text,
            count->layers, s->layers);
}

enum { BALANCED_SAID = 8 };

/* "make them 8, 8, 7, 7" of at most BALANCED_SAID parts. */
static void say_balanced(int64_t layers, int64_t parts, char *text, size_t bytes) {
    int64_t first, count;
    size_t used = (size_t)snprintf(text, bytes, "make them ");
    for (int64_t i = 0; i < parts; i++) {
        loom__layout_range(layers, parts, i, &first, &count);
        used += (size_t)snprintf(text + used, bytes - used, "%s%" PRId64, i > 0 ? ", " : "", count);
    }
}

/* `more` layers besides the model's are counted: the embedding and the loss. */
static void check_even(const loom_stage_split *s, int64_t chunks, int64_t more, loom__faults *faults) {
    int64_t pp = s->pipeline_model_parallel_size, parts = pp * chunks, total = s->layers + more;
    if (total % parts == 0)
        return;
    char what[160], counted[200] = "", balanced[80 + 8 * 24] = "";
    say_parts(s, chunks, what, sizeof what);
    if (more > 0)
        snprintf(counted, sizeof counted, " and %s%s%s, counted as %s, make %" PRId64 ", which",
            s->account_for_embedding_in_pipeline_split ? "the embedding" : "", more == 2 ? " and " : "",
            s->account_for_loss_in_pipeline_split ? "the loss" : "", more == 2 ? "layers" : "a layer", total);
    if (s->layers >= parts && more == 0) {
        size_t used = (size_t)snprintf(balanced, sizeof balanced, " (balanced_pipeline_split would ");
        if (parts <= BALANCED_SAID)
            say_balanced(s->layers, parts, balanced + used, sizeof balanced - used - 1);
        else
            strcat(balanced, "cut them unevenly");
        strcat(balanced, ")");
    }
    loom__faults_add(faults, LOOM_ERR_CONFIG, "num_layers %" PRId64 "%s is not a multiple of %s%s", s->layers, counted,
        what, balanced);
}

static void check_balanced(const loom_stage_split *s, int64_t chunks, loom__faults *faults) {
    int64_t parts = s->pipeline_model_parallel_size * chunks;
    if (s->layers >= parts)
        return;
    char what[160];
    say_parts(s, chunks, what, sizeof what);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "num_layers %" PRId64 " are too few for %s: balanced_pipeline_split gives each at least one layer", s->layers,
        what);
}

/* One of the two ends, alone: positive, cut evenly over the chunks. */
static bool check_end(const char *name, int64_t value, int64_t chunks, loom__faults *faults) {
    if (value < 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %" PRId64 ", expected at least 1, or null", name, value);
        return false;
    }
    if (value % chunks == 0)
        return true;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "%s: found %" PRId64 ", expected a multiple of the %" PRId64
        " chunks of a stage (virtual_pipeline_model_parallel_size)",
        name, value, chunks);
    return false;
}

static const char first_name[] = "num_layers_in_first_pipeline_stage",
                  last_name[] = "num_layers_in_last_pipeline_stage";

static void check_ends(const loom_stage_split *s, int64_t chunks, loom__faults *faults) {
    int64_t first = s->num_layers_in_first_pipeline_stage, last = s->num_layers_in_last_pipeline_stage;
    bool good = check_end(first_name, first, chunks, faults);
    good &= check_end(last_name, last, chunks, faults);
    if (!good)
        return;
    int64_t pp = s->pipeline_model_parallel_size;
    if (pp == 1) {
        /* First and last stage are one. */
        if (first > 0 && first != s->layers)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "%s: found %" PRId64 " with pipeline_model_parallel_size 1, expected num_layers %" PRId64 ", or null",
                first_name, first, s->layers);
        if (last > 0 && last != s->layers)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "%s: found %" PRId64 " with pipeline_model_parallel_size 1, expected num_layers %" PRId64 ", or null",
                last_name, last, s->layers);
        return;
    }
    int64_t middle = pp - (first > 0) - (last > 0), unit = middle * chunks;
    /* Either may be as large as an integer; neither is negative. */
    int64_t rest = first > s->layers || last > s->layers ? -1 : s->layers - first - last;
    if (middle == 0 ? rest == 0 : rest > 0 && rest % unit == 0)
        return;
    char given[160] = "", expected[200];
    int64_t ends;
    if (__builtin_add_overflow(first, last, &ends))
        ends = INT64_MAX;
    if (first > 0)
        snprintf(given, sizeof given, "%s %" PRId64, first_name, first);
    size_t used = strlen(given);
    if (last > 0)
        snprintf(given + used, sizeof given - used, "%s%s %" PRId64, used > 0 ? " and " : "", last_name, last);
    if (middle == 0)
        snprintf(expected, sizeof expected, "these %" PRId64 " to be all", ends);
    else if (chunks > 1)
        snprintf(expected, sizeof expected,
            "besides these %" PRId64 " a positive multiple of %" PRId64 ", which is %" PRId64 " other stages x %" PRId64
            " chunks of a stage",
            ends, unit, middle, chunks);
    else
        snprintf(expected, sizeof expected,
            "besides these %" PRId64 " a positive multiple of %" PRId64 " for the other stages", ends, middle);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "num_layers %" PRId64 " with %s on pipeline_model_parallel_size %" PRId64 ": expected %s", s->layers, given, pp,
        expected);
}

/* The fields of two ways at once. */
static bool check_ways(const loom_stage_split *s, loom__faults *faults) {
    const struct {
        bool given;
        int way;
        const char *name;
    } fields[] = {{s->pipeline_model_parallel_layout != NULL, 0, "pipeline_model_parallel_layout"},
        {s->balanced_pipeline_split, 1, "balanced_pipeline_split"},
        {s->num_layers_in_first_pipeline_stage != 0, 2, first_name},
        {s->num_layers_in_last_pipeline_stage != 0, 2, last_name},
        {s->account_for_embedding_in_pipeline_split, 3, "account_for_embedding_in_pipeline_split"},
        {s->account_for_loss_in_pipeline_split, 3, "account_for_loss_in_pipeline_split"}};
    int chosen = -1;
    bool good = true;
    for (int i = 0; i < (int)(sizeof fields / sizeof *fields); i++) {
        if (!fields[i].given)
            continue;
        if (chosen < 0)
            chosen = i;
        if (fields[i].way == fields[chosen].way)
            continue;
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found together with %s, expected one way to cut the layers",
            fields[i].name, fields[chosen].name);
        good = false;
    }
    return good;
}

void loom__stage_split_faults(const loom_stage_split *s, int64_t *chunks, loom__faults *faults) {
    loom__stages_count count = {0};
    int64_t found = 1;
    bool sized = check_chunks(s, &found, &count, faults);
    bool counted = s->layers >= 1 && s->layers <= LOOM__NUMBER_MAX;
    if (sized)
        *chunks = found;
    if (!counted)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "num_layers: found %" PRId64 ", expected 1 to %" PRId64, s->layers,
            LOOM__NUMBER_MAX);
    if (!check_ways(s, faults) || !sized || !counted)
        return;
    if (s->pipeline_model_parallel_layout)
        check_layout(s, &count, faults);
    else if (s->balanced_pipeline_split)
        check_balanced(s, found, faults);
    else if (has_ends(s))
        check_ends(s, found, faults);
    else
        check_even(s, found, accounted(s), faults);
}

void loom__stage_chunks_faults(const loom_stage_split *split, int64_t *chunks, loom__faults *faults) {
    loom__stages_count count;
    int64_t found = 1;
    if (check_chunks(split, &found, &count, faults))
        *chunks = found;
}

static void try_split(void *context, loom__faults *faults) {
    int64_t chunks;
    loom__stage_split_faults(context, &chunks, faults);
}

static void try_chunks(void *context, loom__faults *faults) {
    int64_t chunks;
    loom__stage_chunks_faults(context, &chunks, faults);
}

static void suggest(
    const loom_stage_split *split, void (*check)(void *context, loom__faults *faults), loom__faults *faults) {
    loom_stage_split s = *split;
    const int64_t most = LOOM__NUMBER_MAX;
    const loom__variable variables[] = {{"num_layers", &s.layers, NULL, 1, most, 0, false},
        {"pipeline_model_parallel_size", &s.pipeline_model_parallel_size, NULL, 1, most, 0, false},
        {"virtual_pipeline_model_parallel_size", &s.virtual_pipeline_model_parallel_size, NULL, 1, most, 0, true},
        {first_name, &s.num_layers_in_first_pipeline_stage, NULL, 1, most, 0, true},
        {last_name, &s.num_layers_in_last_pipeline_stage, NULL, 1, most, 0, true},
        {"account_for_embedding_in_pipeline_split", NULL, &s.account_for_embedding_in_pipeline_split, 0, 0, 0, false},
        {"account_for_loss_in_pipeline_split", NULL, &s.account_for_loss_in_pipeline_split, 0, 0, 0, false},
        {"balanced_pipeline_split", NULL, &s.balanced_pipeline_split, 0, 0, 0, false}};
    const loom__trial all = {
        .variables = variables, .count = sizeof variables / sizeof *variables, .check = check, .context = &s};
    loom__faults_suggest(faults, &all);
}

static loom_status check_split(const loom_stage_split *split, int64_t *chunks) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__stage_split_faults(split, chunks, &faults);
    suggest(split, try_split, &faults);
    return loom__faults_end(&faults);
}

loom_status loom__stage_split_check(const loom_stage_split *split) {
    int64_t chunks;
    return check_split(split, &chunks);
}

loom_status loom_stage_split_chunks(const loom_stage_split *split, int64_t *chunks) {
    loom__faults faults;
    loom__faults_begin(&faults);
    int64_t found = 1;
    loom__stage_chunks_faults(split, &found, &faults);
    /* Where layers are given, what is offered can hold them too. */
    suggest(split, split->layers > 0 ? try_split : try_chunks, &faults);
    LOOM_TRY(loom__faults_end(&faults));
    *chunks = found;
    return LOOM_OK;
}

/* Layers of chunk `place` in the order of depth, for every way but the one written out. */
static int64_t layers_at(const loom_stage_split *s, int64_t chunks, int64_t place) {
    int64_t pp = s->pipeline_model_parallel_size, parts = pp * chunks, stage = place % pp, unused, count;
    int64_t first = s->num_layers_in_first_pipeline_stage, last = s->num_layers_in_last_pipeline_stage;
    if (s->balanced_pipeline_split) {
        loom__layout_range(s->layers, parts, place, &unused, &count);
        return count;
    }
    if (has_ends(s) && pp > 1) {
        int64_t middle = pp - (first > 0) - (last > 0);
        if (stage == 0 && first > 0)
            return first / chunks;
        if (stage == pp - 1 && last > 0)
            return last / chunks;
        return (s->layers - first - last) / middle / chunks;
    }
    return (s->layers + accounted(s)) / parts - (place == 0 && s->account_for_embedding_in_pipeline_split) -
           (place == parts - 1 && s->account_for_loss_in_pipeline_split);
}

loom_status loom_stage_split_make(const loom_stage_split *split, loom_stage *stages) {
    int64_t chunks = 1;
    LOOM_TRY(check_split(split, &chunks));
    int64_t parts = chunks * split->pipeline_model_parallel_size, depth = 0;
    if (split->pipeline_model_parallel_layout)
        loom__stages_text_expand(split->pipeline_model_parallel_layout, stages);
    for (int64_t i = 0; i < parts; i++) {
        if (!split->pipeline_model_parallel_layout)
            stages[i].layers = layers_at(split, chunks, i);
        stages[i].first_layer = depth;
        stages[i].embedding = i == 0;
        stages[i].loss = i == parts - 1;
        depth += stages[i].layers;
    }
    return LOOM_OK;
}
