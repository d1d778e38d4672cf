/* A module's parameters, and its module buffers, from a dict in memory, as torch.save keeps one: this rank's own
 * tensors by their names. First all of the dict is matched; only then anything is changed, so that an error leaves the
 * module as it was. */
#include "model/gpt.h"
#include "state/state.h"
#include <stdlib.h>

/* What a parameter gets; NULL: nothing. */
typedef struct matching {
    loom_fabric *fabric;
    const loom_parallel *parallel;
    const loom_value **values; /* [tensor_count] */
    loom_load_report report;
} matching;

/* Parameters, and module buffers behind them in the list. */
static int64_t tensor_count(const loom_parallel *parallel) {
    const loom__gpt *gpt = parallel->is_gpt ? parallel->module->context : NULL;
    return parallel->parameter_count + (gpt ? gpt->set->module_buffers : 0);
}

static const char *without_module(const char *name) {
    static const char nesting[] = "module.";
    while (strncmp(name, nesting, sizeof nesting - 1) == 0)
        name += sizeof nesting - 1;
    return name;
}

/* Of the chunk, whatever "module." stands before either; -1: none. */
static int64_t find_parameter(const loom_parallel *parallel, int64_t chunk, const char *name) {
    for (int64_t i = 0; i < tensor_count(parallel); i++)
        if (parallel->parameters[i]->chunk == chunk &&
            strcmp(without_module(parallel->parameters[i]->name), without_module(name)) == 0)
            return i;
    return -1;
}

static bool fits(const loom_parameter *parameter, const loom_value_tensor *tensor) {
    bool same = tensor->dims == parameter->dims &&
                (tensor->dtype == LOOM_F32 || tensor->dtype == LOOM_BF16 || tensor->dtype == LOOM_F16);
    for (int i = 0; i < parameter->dims && same; i++)
        same = tensor->shape[i] == parameter->shape[i];
    return same;
}

static loom_status match_entry(matching *m, int64_t chunk, const loom_value *key, const loom_value *value) {
    if (key->kind != LOOM_VALUE_TEXT)
        return loom_fail(LOOM_ERR_ARGUMENT, "state dict of a module: found a key that is a %s, expected a str",
            loom_value_kind_name(key->kind));
    if (loom__is_extra_state(key->text))
        return LOOM_OK;
    loom_load_report *report = &m->report;
    int64_t found = find_parameter(m->parallel, chunk, key->text);
    if (found < 0)
        return loom__names_add(&report->unexpected, &report->unexpected_count, "", key->text);
    if (m->values[found])
        return loom_fail(LOOM_ERR_ARGUMENT, "state dict of a module: two keys are the parameter %s, one of them %s",
            m->parallel->parameters[found]->name, key->text);
    m->values[found] = value;
    if (value->kind == LOOM_VALUE_TENSOR && fits(m->parallel->parameters[found], value->tensor))
        return LOOM_OK;
    return loom__names_add(&report->misshaped, &report->misshaped_count, "", key->text);
}

static loom_status match_chunk(matching *m, const loom_value *dict, int64_t chunk) {
    char key[32];
    LOOM_TRY(loom_parallel_state_key(m->parallel, chunk, key, sizeof key));
    const loom_value *inner = loom_value_get(dict, key);
    if (m->parallel->chunk_count > 1)
        dict = inner;
    if (!dict || dict->kind != LOOM_VALUE_DICT)
        return loom_fail(LOOM_ERR_ARGUMENT, "state dict of a module: %s is a %s, expected a dict of tensors",
            m->parallel->chunk_count > 1 ? key : "it", dict ? loom_value_kind_name(dict->kind) : "key that it lacks");
    for (int64_t i = 0; i < dict->count; i++)
        LOOM_TRY(match_entry(m, chunk, dict->items[2 * i], dict->items[2 * i + 1]));
    return LOOM_OK;
}

static bool is_taken(const matching *m, int64_t number) {
    const loom_value *value = m->values[number];
    return value && value->kind == LOOM_VALUE_TENSOR && fits(m->parallel->parameters[number], value->tensor);
}

static loom_status match(matching *m, const loom_value *dict) {
    const loom_value *outer = loom_value_get(dict, "state_dict");
    m->values = calloc((size_t)tensor_count(m->parallel) + 1, sizeof *m->values);
    if (!m->values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the state dict of a module");
    for (int64_t chunk = 0; chunk < m->parallel->chunk_count; chunk++)
        LOOM_TRY(match_chunk(m, outer ? outer : dict, chunk));
    for (int64_t i = 0; i < tensor_count(m->parallel); i++)
        if (!is_taken(m, i))
            LOOM_TRY(
                loom__names_add(&m->report.missing, &m->report.missing_count, "", m->parallel->parameters[i]->name));
    return LOOM_OK;
}

static loom_status prepare(matching *m, const loom_value *dict, loom_strict strict) {
    if (loom_parallel_dtype(m->parallel) != LOOM_F32)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: a state dict for a module with %s weights; only fp32",
            loom_dtype_name(loom_parallel_dtype(m->parallel)));
    LOOM_TRY(match(m, dict));
    return loom__strict_apply(
        loom__strict_of_module(strict), m->fabric->rank, "the state dict of the module", &m->report);
}

/* The tensor need not be aligned. */
static void copy(const loom_value_tensor *from, float *to) {
    if (from->dtype == LOOM_F32) {
        memcpy(to, from->data, (size_t)from->elements * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < from->elements; i++) {
        uint16_t narrow;
        memcpy(&narrow, (const char *)from->data + 2 * i, sizeof narrow);
        to[i] = from->dtype == LOOM_BF16 ? loom_bf16_to_f32(narrow) : loom_f16_to_f32(narrow);
    }
}

static loom_status load_all(matching *m, const loom_value *dict, loom_strict strict) {
    LOOM_TRY(loom_agree(loom_rank_world(m->fabric->rank), prepare(m, dict, strict)));
    if (m->parallel->ddp)
        LOOM_TRY(loom__ddp_wait_parameters(m->parallel->ddp));
    for (int64_t i = 0; i < tensor_count(m->parallel); i++)
        if (is_taken(m, i))
            copy(m->values[i]->tensor, m->parallel->parameters[i]->data);
    return LOOM_OK;
}

loom_status loom_fabric_load_module_state_dict(loom_fabric *fabric, loom_parallel *parallel,
    const loom_value *state_dict, loom_strict strict, loom_load_report *report) {
    matching m = {.fabric = fabric, .parallel = parallel, .report.iteration = -1};
    loom_status status = load_all(&m, state_dict, strict);
    free(m.values);
    if (status) {
        loom_load_report_free(&m.report);
        return status;
    }
    *report = m.report;
    return LOOM_OK;
}
