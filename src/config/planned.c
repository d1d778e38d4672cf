/* The check of a run that is planned and not started. A field with a fault of its own is judged no further: everything
 * is checked as if it had its default, and what is then said about it is left out, so that each fault is told once and
 * none hides another. Beside the checks of a run stand those of context and expert parallelism, which a run refuses as
 * a whole. */
#include "config/check.h"
#include "config/field.h"
#include "config/sizes.h"
#include "layout/legal.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void check_context(const loom_run_config *config, loom__faults *faults) {
    const loom_model_config *model = &config->model.config;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t cp = strategy->context_parallel_size, s = model->seq_length, tp = strategy->tensor_model_parallel_size;
    if (cp <= 1 || s < 1)
        return;
    int64_t unit = 2 * cp * (strategy->sequence_parallel ? tp : 1);
    if (s % unit != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "model.seq_length: found %" PRId64 ", expected a multiple of %" PRId64
            " (2 times strategy.context_parallel_size %" PRId64 "%s): the nearest legal %s",
            s, unit, cp, strategy->sequence_parallel ? " times the tensor size, as sequence_parallel asks" : "",
            loom__nearest_multiples(unit, s).text);
    int64_t groups = model->num_query_groups ? model->num_query_groups : model->num_attention_heads;
    const char *type = model->parallel.cp_comm_type;
    bool all_to_all = type && strcmp(type, "a2a") == 0;
    if (all_to_all && groups > 0 && tp > 0 && groups % (tp * cp) != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.context_parallel_size: found %" PRId64
            " with model.cp_comm_type a2a, expected one that times the tensor size %" PRId64 " divides the %" PRId64
            " query groups%s%s",
            cp, tp, groups, groups % tp == 0 ? ": the nearest legal " : "",
            groups % tp == 0 ? loom__nearest_divisors(groups / tp, cp).text : "");
}

static void check_hierarchy(const loom_run_config *config, loom__faults *faults) {
    const int64_t *sizes = config->model.config.parallel.hierarchical_context_parallel_sizes;
    int64_t cp = config->strategy.context_parallel_size, product = 1;
    if (sizes[0] == 0)
        return;
    for (int level = 0; level < LOOM_LAYOUT_HCP_LEVELS && sizes[level] > 0; level++)
        if (__builtin_mul_overflow(product, sizes[level], &product))
            product = INT64_MAX;
    if (product != cp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "model.hierarchical_context_parallel_sizes: found a product of %" PRId64
            ", expected strategy.context_parallel_size, %" PRId64,
            product, cp);
}

static void check_experts(const loom_run_config *config, loom__faults *faults) {
    const loom_moe_config *moe = &config->model.config.moe;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t experts = moe->num_moe_experts, ep = strategy->expert_model_parallel_size;
    if (experts == 0) {
        if (ep > 1)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "strategy.expert_model_parallel_size: found %" PRId64
                ", expected 1 for a model without experts (model.num_moe_experts)",
                ep);
        return;
    }
    if (experts % ep != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.expert_model_parallel_size: found %" PRId64
            ", expected a divisor of model.num_moe_experts %" PRId64 ": the nearest legal %s",
            ep, experts, loom__nearest_divisors(experts, ep).text);
    if (moe->moe_router_topk > experts)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "model.moe_router_topk: found %" PRId64 ", expected at most model.num_moe_experts, %" PRId64,
            moe->moe_router_topk, experts);
    if (strategy->tensor_model_parallel_size > 1 && !strategy->sequence_parallel)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.sequence_parallel: found false with experts and a tensor size of %" PRId64 ", expected true",
            strategy->tensor_model_parallel_size);
    int64_t etp = strategy->expert_tensor_parallel_size ? strategy->expert_tensor_parallel_size
                                                        : strategy->tensor_model_parallel_size;
    int64_t width = moe->moe_ffn_hidden_size ? moe->moe_ffn_hidden_size : config->model.config.ffn_hidden_size;
    if (width > 0 && etp > 0 && width % etp != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.expert_tensor_parallel_size: found %" PRId64
            ", expected a divisor of the width of an expert %" PRId64 ": the nearest legal %s",
            etp, width, loom__nearest_divisors(width, etp).text);
}

static void check_architecture(const loom_run_config *config, loom__faults *faults) {
    const char *name = config->model.config.architecture;
    if (name && strcmp(name, "mixtral") == 0 && !config->model.hf && config->model.config.moe.num_moe_experts == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "model.num_moe_experts: missing, expected an integer >= 1 with model.architecture mixtral");
}

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

void loom__check_planned(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults) {
    loom__faults found;
    loom_run_config sound = *config;
    loom__faults_begin(&found);
    found.not_built = faults->not_built;
    for (int64_t i = 0; i < loom__field_count; i++)
        if (faulty[i])
            loom__field_set_default(&loom__fields[i], NULL, &sound);
    /* What is missing of the data depends on their kind: mock data miss nothing. */
    if (faulty[loom__field_find("data.kind")])
        sound.data.kind = "mock";
    /* The table tells what is not built of the configuration as it is. */
    if (faults->not_built)
        loom__fields_check(&sound, "", &found);
    const char *architecture = sound.model.config.architecture;
    if (architecture && strcmp(architecture, "mixtral") == 0)
        sound.model.config.architecture = "llama";
    loom__check_run(&sound, world_size > 0 ? world_size : sound.ranks, &found);
    check_context(&sound, &found);
    check_hierarchy(&sound, &found);
    check_experts(&sound, &found);
    sound.model.config.architecture = architecture;
    check_architecture(&sound, &found);
    char *next;
    for (char *line = found.text; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        if (!is_about_faulty(line, faulty) && !loom__faults_has(faults, line))
            loom__faults_add(faults, LOOM_ERR_CONFIG, "%s", line);
    }
}
