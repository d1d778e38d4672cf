/* How layers fall on stages. There are five ways: evenly, with other numbers in the first and last stage, with the
 * embedding and the loss counted as layers, balanced (ours, for what does not divide), and written out. Each way has
 * its check, which names all its faults, and a count for the chunk at one place of the depth; the chunks taken in order
 * of depth hold the layers 0, 1, … once each, whatever the way. */
#include "base/faults.h"
#include "base/legal.h"
#include "layout/layout.h"
#include "layout/stages_text.h"
#include <inttypes.h>
#include <megaloom/stages.h>
#include <stdio.h>
#include <string.h>

/* The largest integer of a run file; sums of a few such numbers are exact. */
static const int64_t LAYERS_MAX = INT64_C(1) << 53;

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
            " stages, but pipeline_model_parallel_size is 1: expected one stage, or a pipeline size that divides "
            "%" PRId64,
            text, count->stages, count->stages);
    } else if (count->stages % pp != 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "pipeline_model_parallel_layout: '%.80s' has %" PRId64
            " stage%s, expected a multiple of pipeline_model_parallel_size %" PRId64
            ": nearest legal %s stages, or pipeline_model_parallel_size %s",
            text, count->stages, count->stages == 1 ? "" : "s", pp, loom__nearest_multiples(pp, count->stages).text,
            loom__nearest_divisors(count->stages, pp).text);
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

/* The sizes of the stages of a balanced split, written out where they are few. */
static void say_balanced(int64_t layers, int64_t parts, char *text, size_t bytes) {
    int64_t first, count;
    size_t used = 0;
    *text = '\0';
    for (int64_t i = 0; i < parts && parts <= 8; i++) {
        loom__layout_range(layers, parts, i, &first, &count);
        used += (size_t)snprintf(text + used, bytes - used, "%s%" PRId64, i > 0 ? ", " : ": ", count);
    }
}

/* `more` layers besides the model's are counted: the embedding and the loss. */
static void check_even(const loom_stage_split *s, int64_t chunks, int64_t more, loom__faults *faults) {
    int64_t pp = s->pipeline_model_parallel_size, parts = pp * chunks, total = s->layers + more;
    if (total % parts == 0)
        return;
    char what[160], counted[120] = "", legal[320] = "", balanced[8 * 24];
    say_parts(s, chunks, what, sizeof what);
    if (more > 0)
        snprintf(counted, sizeof counted, " and %s%s%s, counted as %s, make %" PRId64 ", which",
            s->account_for_embedding_in_pipeline_split ? "the embedding" : "", more == 2 ? " and " : "",
            s->account_for_loss_in_pipeline_split ? "the loss" : "", more == 2 ? "layers" : "a layer", total);
    loom__suggest_size(legal, sizeof legal, "pipeline_model_parallel_size", total, chunks, pp);
    if (chunks > 1)
        loom__suggest_size(legal, sizeof legal, "virtual_pipeline_model_parallel_size", total, pp, chunks);
    int64_t below = total / parts * parts - more;
    size_t used = strlen(legal);
    used += (size_t)snprintf(legal + used, sizeof legal - used, "%s num_layers %s",
        used > 0 ? ", or" : "; nearest legal", loom__nearest_pair(below, below + parts).text);
    if (s->layers >= parts && more == 0) {
        say_balanced(s->layers, parts, balanced, sizeof balanced);
        snprintf(legal + used, sizeof legal - used, ", or balanced_pipeline_split true%s", balanced);
    }
    loom__faults_add(
        faults, LOOM_ERR_CONFIG, "num_layers %" PRId64 "%s is not a multiple of %s%s", s->layers, counted, what, legal);
}

static void check_balanced(const loom_stage_split *s, int64_t chunks, loom__faults *faults) {
    int64_t parts = s->pipeline_model_parallel_size * chunks;
    if (s->layers >= parts)
        return;
    char what[160];
    say_parts(s, chunks, what, sizeof what);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "num_layers %" PRId64
        " are too few for %s: balanced_pipeline_split gives each at least one layer; nearest legal "
        "num_layers %" PRId64,
        s->layers, what, parts);
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
        "%s: found %" PRId64 ", expected a multiple of the %" PRId64 " chunks of a stage: nearest legal %s", name,
        value, chunks, loom__nearest_multiples(chunks, value).text);
    return false;
}

/* Appends the values of one end with which `rest` = layers less the other end leaves a positive multiple of `unit` for
 * the middle, the nearest to `value`. */
static void suggest_end(
    char *text, size_t bytes, const char *name, int64_t value, int64_t rest, int64_t unit, int64_t chunks) {
    int64_t nearest[2] = {0, 0};
    if (value == 0)
        return;
    if (unit == 0) {
        nearest[0] = rest % chunks == 0 ? rest : 0;
    } else if (rest % chunks == 0) {
        int64_t times = (rest - value) / unit; /* the middle's share, rounded down, may be 0 or less */
        for (int64_t k = times > 2 ? times - 1 : 1; k <= times + 2 || k == 1; k++) {
            int64_t end = rest - k * unit;
            if (end > 0 && end < value && end > nearest[0])
                nearest[0] = end;
            if (end > value && (nearest[1] == 0 || end < nearest[1]))
                nearest[1] = end;
        }
    }
    if (nearest[0] <= 0 && nearest[1] <= 0)
        return;
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s %s", used > 0 ? ", or " : "; nearest legal ", name,
        loom__nearest_pair(nearest[0], nearest[1]).text);
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
    char given[160] = "", legal[320] = "", expected[120];
    if (first > 0)
        snprintf(given, sizeof given, "%s %" PRId64, first_name, first);
    size_t used = strlen(given);
    if (last > 0)
        snprintf(given + used, sizeof given - used, "%s%s %" PRId64, used > 0 ? " and " : "", last_name, last);
    if (middle == 0)
        snprintf(expected, sizeof expected, "the two to be all of them");
    else if (chunks > 1)
        snprintf(expected, sizeof expected,
            "a positive multiple of %" PRId64 " (stages) x %" PRId64 " (chunks of a stage) for the others", middle,
            chunks);
    else
        snprintf(expected, sizeof expected, "a positive multiple of %" PRId64 " for the other stages", middle);
    if (s->layers > last)
        suggest_end(legal, sizeof legal, first_name, first, s->layers - last, unit, chunks);
    if (s->layers > first)
        suggest_end(legal, sizeof legal, last_name, last, s->layers - first, unit, chunks);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "num_layers %" PRId64 " with %s on pipeline_model_parallel_size %" PRId64 ": expected %s%s", s->layers, given,
        pp, expected, legal);
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

static loom_status check(const loom_stage_split *s, int64_t *chunks) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__stages_count count = {0};
    bool sized = check_chunks(s, chunks, &count, &faults);
    bool counted = s->layers >= 1 && s->layers <= LAYERS_MAX;
    if (!counted)
        loom__faults_add(
            &faults, LOOM_ERR_CONFIG, "num_layers: found %" PRId64 ", expected 1 to %" PRId64, s->layers, LAYERS_MAX);
    if (check_ways(s, &faults) && sized && counted) {
        if (s->pipeline_model_parallel_layout)
            check_layout(s, &count, &faults);
        else if (s->balanced_pipeline_split)
            check_balanced(s, *chunks, &faults);
        else if (has_ends(s))
            check_ends(s, *chunks, &faults);
        else
            check_even(s, *chunks, accounted(s), &faults);
    }
    return loom__faults_end(&faults);
}

loom_status loom__stage_split_check(const loom_stage_split *split) {
    int64_t chunks;
    return check(split, &chunks);
}

loom_status loom_stage_split_chunks(const loom_stage_split *split, int64_t *chunks) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__stages_count count;
    int64_t found = 1;
    check_chunks(split, &found, &count, &faults);
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
    LOOM_TRY(check(split, &chunks));
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
