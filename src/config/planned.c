/* The check of a run that is planned and not started. A field with a fault of its own is judged no further: everything
 * is checked as if it had its default, and what is then said about it is left out, so that each fault is told once and
 * none hides another. The rules are those of a run: what a run refuses, a plan tells, and nothing else. */
#include "config/check.h"
#include "config/field.h"
#include "config/sizes.h"
#include <stdlib.h>
#include <string.h>

/* Whether the line speaks of a field that has been named: by its own name, as a word. */
static bool is_about_faulty(const char *line, const bool *faulty) {
    static const char word[] = "abcdefghijklmnopqrstuvwxyz0123456789_";
    for (int64_t i = 0; i < loom__field_count; i++) {
        if (!faulty[i])
            continue;
        const char *dot = strrchr(loom__fields[i].path, '.'), *name = dot ? dot + 1 : loom__fields[i].path;
        size_t length = strlen(name);
        for (const char *at = line; (at = strstr(at, name)); at += length)
            if ((at == line || !strchr(word, at[-1])) && (!at[length] || !strchr(word, at[length])))
                return true;
    }
    return false;
}

void loom__add_unknown(loom__faults *faults, const loom__faults *found, const bool *faulty) {
    const char *next;
    for (const char *at = found->text; *at; at = next) {
        char line[2048];
        size_t length = strcspn(at, "\n");
        snprintf(line, sizeof line, "%.*s", (int)length, at);
        next = at + length + (at[length] == '\n');
        if (!(faulty && is_about_faulty(line, faulty)) && !loom__faults_has(faults, line))
            loom__faults_add(faults, LOOM_ERR_CONFIG, "%s", line);
    }
}

/* Adds what a check says of the configuration, but for what is about a field that has been named, without suggestions.
 * not_built: of loom__faults. False where a field has a fault of its own. */
static bool add_found(
    const loom_run_config *sound, const bool *faulty, int64_t world, loom__faults *not_built, loom__faults *faults) {
    loom__faults found;
    loom__faults_begin(&found);
    found.not_built = not_built;
    /* The table tells what is not built of the configuration as it is. */
    if (not_built)
        loom__fields_check(sound, "", &found);
    bool judged = loom__check_run(sound, world, &found);
    loom__add_unknown(faults, &found, faulty);
    return judged;
}

static void fill(int64_t *size, int64_t value, const char *path, bool *faulty) {
    if (*size != 0)
        return;
    *size = value;
    faulty[loom__field_find(path)] = true;
}

bool loom__fill_in(loom_run_config *config, bool *faulty) {
    loom_model_config *model = &config->model.config;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t tp = strategy->tensor_model_parallel_size, cp = strategy->context_parallel_size;
    int64_t pp = strategy->pipeline_model_parallel_size, chunks = strategy->virtual_pipeline_model_parallel_size;
    int64_t etp = strategy->expert_tensor_parallel_size, groups = model->num_query_groups;
    const int64_t sizes[] = {tp, cp, pp, chunks, etp, groups, model->num_attention_heads};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] > 64)
            return false;
    if (model->num_layers && model->hidden_size && model->num_attention_heads && model->seq_length && model->vocab_size)
        return false;
    if (model->kv_channels == 0 && (model->hidden_size == 0 || model->num_attention_heads == 0))
        model->kv_channels = 64;
    fill(&model->num_layers, pp * (chunks > 0 ? chunks : 1), "model.num_layers", faulty);
    fill(&model->num_attention_heads, tp * (groups > 0 ? groups : 1), "model.num_attention_heads", faulty);
    fill(&model->hidden_size, 64 * tp * (etp > 0 ? etp : 1) * model->num_attention_heads, "model.hidden_size", faulty);
    fill(&model->seq_length, 2 * tp * cp, "model.seq_length", faulty);
    fill(&model->vocab_size, 1, "model.vocab_size", faulty);
    return true;
}

bool loom__many_ranks(int64_t ranks) {
    return ranks > (int64_t)loom__fields[loom__field_find("ranks")].high && ranks <= INT32_MAX;
}

void loom__check_planned(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults) {
    loom_run_config sound = *config;
    if (loom__many_ranks(config->ranks)) {
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: ranks=%lld (threads of one process); what works: a launcher such as mpirun, or at most "
            "%lld",
            (long long)config->ranks, (long long)loom__fields[loom__field_find("ranks")].high);
        world_size = world_size > 0 ? world_size : config->ranks;
        sound.ranks = 1;
    }
    for (int64_t i = 0; i < loom__field_count; i++)
        if (faulty[i])
            loom__field_set_default(&loom__fields[i], NULL, &sound);
    /* What is missing of the data depends on their kind, and what the model must have on its architecture: mock data
     * and a llama miss nothing. */
    if (faulty[loom__field_find("data.kind")])
        sound.data.kind = "mock";
    if (faulty[loom__field_find("model.architecture")])
        sound.model.config.architecture = "llama";
    loom__faults fresh;
    int64_t world = world_size > 0 ? world_size : sound.ranks;
    loom__faults_begin(&fresh);
    bool judged = add_found(&sound, faulty, world, faults->not_built, &fresh);
    bool *missing = calloc((size_t)loom__field_count, sizeof *missing);
    loom_run_config filled = sound;
    if (missing && !sound.model.hf && !sound.model.from) {
        memcpy(missing, faulty, (size_t)loom__field_count * sizeof *missing);
        if (loom__fill_in(&filled, missing))
            add_found(&filled, missing, world, faults->not_built, &fresh);
    }
    free(missing);
    if (judged)
        loom__suggest_run(&sound, faulty, world, &fresh);
    loom__add_unknown(faults, &fresh, NULL);
}
