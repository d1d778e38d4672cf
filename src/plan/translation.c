/* What the readers of other programs' configurations share. A translation is a list of overrides, so that the checks of
 * a run file, and their words, are those of any other configuration. */
#include "plan/translation.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static void out_of_memory(loom__translator *translator) {
    translator->status = loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", translator->name);
}

loom_status loom__translator_begin(loom__translator *translator, const char *name, size_t length) {
    *translator = (loom__translator){.name = name};
    if (length > LOOM__TRANSLATED_BYTES_MAX)
        return loom_fail(LOOM_ERR_FORMAT, "%s: more than %d bytes", name, LOOM__TRANSLATED_BYTES_MAX);
    translator->left_out = open_memstream(&translator->made.left_out, &translator->left_out_bytes);
    translator->faults = open_memstream(&translator->made.faults, &translator->fault_bytes);
    if (!translator->left_out || !translator->faults)
        out_of_memory(translator);
    return translator->status;
}

void loom__translator_add(loom__translator *translator, const char *field, const char *value) {
    loom_plan_translation *made = &translator->made;
    if (translator->status)
        return;
    if (made->override_count == translator->capacity) {
        int64_t grown = translator->capacity ? 2 * translator->capacity : 64;
        char **memory = realloc(made->overrides, (size_t)grown * sizeof *memory);
        if (!memory) {
            out_of_memory(translator);
            return;
        }
        made->overrides = memory;
        translator->capacity = grown;
    }
    char *text;
    if (asprintf(&text, "%s=%s", field, value) < 0) {
        out_of_memory(translator);
        return;
    }
    made->overrides[made->override_count++] = text;
}

static void add_line(FILE *to, const char *name, const char *format, va_list arguments) {
    if (ftell(to) > 0)
        fputc('\n', to);
    fputs(name, to);
    vfprintf(to, format, arguments);
}

void loom__translator_leave_out(loom__translator *translator, const char *format, ...) {
    va_list arguments;
    if (translator->status)
        return;
    va_start(arguments, format);
    add_line(translator->left_out, "", format, arguments);
    va_end(arguments);
}

void loom__translator_fault(loom__translator *translator, const char *format, ...) {
    va_list arguments;
    char name[512];
    if (translator->status)
        return;
    snprintf(name, sizeof name, "%s: ", translator->name);
    va_start(arguments, format);
    add_line(translator->faults, name, format, arguments);
    va_end(arguments);
}

loom_status loom__translator_end(loom__translator *translator, loom_status status, loom_plan_translation *out) {
    FILE *streams[] = {translator->left_out, translator->faults};
    for (int i = 0; i < 2; i++)
        if (streams[i] && fclose(streams[i]) != 0 && !translator->status)
            out_of_memory(translator);
    status = status ? status : translator->status;
    if (status)
        loom_plan_translation_free(&translator->made);
    else
        *out = translator->made;
    return status;
}

void loom_plan_translation_free(loom_plan_translation *translation) {
    for (int64_t i = 0; i < translation->override_count; i++)
        free(translation->overrides[i]);
    free(translation->overrides);
    free(translation->left_out);
    free(translation->faults);
    *translation = (loom_plan_translation){0};
}

const char *loom__translated_value(const char *field, const char *value) {
    static const struct {
        const char *field, *from, *to;
    } words[] = {
        {"model.normalization", "LayerNorm", "layernorm"},
        {"model.normalization", "RMSNorm", "rmsnorm"},
        {"model.normalization", "layernorm1p", "layernorm"},
        {"model.activation", "fast-swiglu", "swiglu"},
        {"model.activation", "fast-geglu", "geglu"},
        {"model.position_embedding_type", "learned_absolute", "learned"},
        {"optim.schedule", "CosineAnnealing", "CosineAnnealing"},
        {"optim.schedule", "constant", "megatron-constant"},
        {"optim.schedule", "linear", "megatron-linear"},
        {"optim.schedule", "cosine", "megatron-cosine"},
        {"optim.schedule", "inverse-square-root", "megatron-inverse-square-root"},
        {"optim.schedule", "WSD", "megatron-WSD"},
        {"optim.optimizer", "adamw", "adam"},
        {"optim.optimizer", "fused_adam", "adam"},
        {"optim.optimizer", "distributed_fused_adam", "adam"},
        {"optim.optimizer", "megatron_fused_adam", "adam"},
        {"optim.optimizer", "mcore_distributed_optim", "adam"},
        {"precision", "bf16_mixed", "bf16-mixed"},
        {"precision", "fp16_mixed", "16-mixed"},
        {"precision", "16", "16-mixed"},
        {"precision", "32", "\"32\""},
        {"precision", "32-true", "\"32\""},
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(words[i].field, field) == 0 && strcasecmp(words[i].from, value) == 0)
            return words[i].to;
    return value;
}
