/* The nearest legal values of a run: what one field may be is asked of all rooms at once, since a size that the layout
 * takes may be one that the model or the batch does not. Every integer and flag of model, strategy and data that a run
 * file can change is a variable, and the number of ranks. */
#include "base/suggest.h"
#include "config/check.h"
#include "config/field.h"
#include "config/sizes.h"
#include "layout/layout.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct trial {
    loom_run_config config;
    int64_t world;
    const bool *faulty;
    bool *missing; /* room for one a field, where sizes are filled in; NULL: they are not */
    bool filled;   /* those of the run as it was given are */
} trial;

static void try_run(void *context, loom__faults *faults) {
    const trial *t = context;
    const bool *faulty = t->faulty;
    loom_run_config config = t->config;
    loom__faults found;
    loom__faults_begin(&found);
    if (t->missing) {
        memcpy(t->missing, t->faulty, (size_t)loom__field_count * sizeof *t->missing);
        /* What could no longer be judged would pass for legal. */
        if (!loom__fill_in(&config, t->missing) && t->filled)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "too large for a model to be judged");
        faulty = t->missing;
    }
    loom__check_sizes(&config, t->world, &found);
    loom__add_unknown(faults, &found, faulty);
}

/* The name behind the section; NULL for a field that is no variable. */
static const char *name_of(const loom__field *field, const loom_run_config *config) {
    static const char *const sections[] = {"model.", "strategy.", "data."};
    bool decided = field->of_hf && (config->model.hf || config->model.from);
    if ((field->kind != LOOM__FIELD_INT && field->kind != LOOM__FIELD_BOOL) || field->not_built || decided)
        return NULL;
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        size_t length = strlen(sections[i]);
        if (strncmp(field->path, sections[i], length) == 0 && !strchr(field->path + length, '.'))
            return field->path + length;
    }
    return NULL;
}

/* What null means, of the fields whose value follows from others. */
static int64_t meaning_of_null(const loom_run_config *config, const int64_t *number) {
    const loom_model_config *model = &config->model.config;
    int64_t n = model->num_attention_heads, h = model->hidden_size;
    int64_t f = model->ffn_hidden_size > 0 ? model->ffn_hidden_size : 4 * h;
    const struct {
        const int64_t *number;
        int64_t means;
    } fields[] = {{&config->strategy.expert_tensor_parallel_size, config->strategy.tensor_model_parallel_size},
        {&config->data.global_batch_size, config->data.micro_batch_size}, {&model->ffn_hidden_size, 4 * h},
        {&model->num_query_groups, n}, {&model->kv_channels, n > 0 ? h / n : 0}, {&model->moe.moe_ffn_hidden_size, f},
        {&model->max_position_embeddings, model->seq_length}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].number == number)
            return fields[i].means;
    return 0;
}

/* Without which nothing of a model is judged: no null of them is legal, though the checks of the rest fill one in. */
static bool is_needed(const loom_model_config *model, const void *at) {
    return at == &model->num_layers || at == &model->hidden_size || at == &model->num_attention_heads ||
           at == &model->seq_length || at == &model->vocab_size;
}

static bool is_flag(const loom__field *field) {
    return field->kind == LOOM__FIELD_BOOL;
}

/* Whether anything but the ramp-up is at fault with this one. */
static bool ramps_up(trial *t, const char *mark, int64_t start, int64_t increment) {
    loom__faults found;
    t->config.data.rampup_batch_size[0] = start;
    t->config.data.rampup_batch_size[1] = increment;
    loom__faults_begin(&found);
    try_run(t, &found);
    return !strstr(found.text, mark);
}

/* A ramp-up is three numbers, of which the first two are searched together: the batch sizes are legal where both are
 * multiples of what all ranks take at once, or of several times that. */
static void suggest_ramp_up(const trial *given, loom__faults *faults) {
    enum { TRIED = 64, UNITS = 8 };
    static const char mark[] = "data.rampup_batch_size: [";
    trial t = *given;
    const loom_data_config *data = &given->config.data;
    const char *line = strstr(faults->text, mark);
    loom__layout_checked layout = {0};
    loom__faults unused;
    loom__faults_begin(&unused);
    loom_parallel_sizes sizes = loom__strategy_sizes(&given->config.strategy, given->world);
    loom__layout_faults(&sizes, &layout, &unused);
    int64_t unit, most = LOOM__NUMBER_MAX / UNITS, start = data->rampup_batch_size[0];
    if (!line || layout.data < 1 || __builtin_mul_overflow(layout.data, data->micro_batch_size, &unit) || unit > most)
        return;
    for (int64_t units = 1; units <= UNITS; units++) {
        int64_t step = units * unit, nearest = start / step * step + (start % step > step / 2 ? step : 0);
        nearest = nearest > step ? nearest : step;
        for (int64_t i = 0; i < TRIED && nearest > 0; i++) {
            int64_t rest = data->global_batch_size - nearest, increment = (i + 1) * step;
            if (rest < increment || rest % increment != 0 || !ramps_up(&t, mark, nearest, increment))
                continue;
            char text[128];
            size_t length = strcspn(line, "\n");
            bool more = memmem(line, length, "; nearest legal ", sizeof "; nearest legal " - 1) != NULL;
            snprintf(text, sizeof text, "%s rampup_batch_size [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                more ? ", or" : "; nearest legal", nearest, increment, data->rampup_batch_size[2]);
            loom__faults_append(faults, line, length, text);
            return;
        }
    }
}

void loom__suggest_run(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults) {
    bool fills = faulty && !config->model.hf && !config->model.from;
    trial t = {*config, world_size, faulty, NULL, false};
    loom__variable variables[LOOM__VARIABLES_MAX];
    int64_t count = 0;
    if (faults->count == 0)
        return;
    if (fills)
        t.missing = malloc((size_t)loom__field_count * sizeof *t.missing);
    if (t.missing) {
        loom_run_config filled = *config;
        memcpy(t.missing, faulty, (size_t)loom__field_count * sizeof *t.missing);
        t.filled = loom__fill_in(&filled, t.missing);
    }
    const trial given = t;
    if (world_size > 0)
        variables[count++] = (loom__variable){"world_size", &t.world, NULL, 1, LOOM__NUMBER_MAX, 0, false};
    for (int64_t i = 0; i < loom__field_count && count < LOOM__VARIABLES_MAX; i++) {
        const loom__field *field = &loom__fields[i];
        const char *name = name_of(field, config);
        void *at = loom__field_at(field, &t.config);
        int64_t high = field->high > 0 ? (int64_t)field->high : LOOM__NUMBER_MAX;
        bool needed = is_needed(&t.config.model.config, at);
        if (!name || (faulty && faulty[i]) || (needed && *(int64_t *)at == 0))
            continue;
        variables[count++] = is_flag(field) ? (loom__variable){.name = name, .flag = at}
                                            : (loom__variable){name, at, NULL, (int64_t)field->low, high,
                                                  meaning_of_null(&t.config, at), field->nullable && !needed};
    }
    const loom__trial all = {.variables = variables, .count = count, .check = try_run, .context = &t};
    loom__faults_suggest(faults, &all);
    suggest_ramp_up(&given, faults);
    free(t.missing);
}
