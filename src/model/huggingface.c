/* Weights in from, and out to, Hugging Face directories. The spec says which element of which file tensor a canonical
 * element is; here those maps are walked, one parameter at a time, so that no more than the largest tensor is held
 * twice. */
#include "spec/huggingface.h"
#include "format/file.h"
#include "model/gpt.h"
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A config.json is some hundred lines; a larger file is not one. */
enum { CONFIG_BYTES_MAX = 1 << 20 };

static loom_status copy_text(const char *path, const loom__mapping *mapping, char **text) {
    if (mapping->bytes > CONFIG_BYTES_MAX)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: has %zu bytes, expected at most %d", path, mapping->bytes, CONFIG_BYTES_MAX);
    char *made = malloc(mapping->bytes + 1);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", path);
    memcpy(made, mapping->data, mapping->bytes);
    *text = made;
    return LOOM_OK;
}

static loom_status read_text(const char *path, char **text, size_t *length) {
    loom__mapping mapping;
    LOOM_TRY(loom__map_file(path, &mapping));
    loom_status status = copy_text(path, &mapping, text);
    if (!status)
        *length = mapping.bytes;
    loom__unmap_file(&mapping);
    return status;
}

loom_status loom__hf_read_config_text(const char *directory, char *path, size_t bytes, char **text, size_t *length) {
    if (!*directory)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the Hugging Face directory is empty");
    if (snprintf(path, bytes, "%s/config.json", directory) >= (int)bytes)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the Hugging Face directory is too long");
    return read_text(path, text, length);
}

loom_status loom__hf_read_config(const char *directory, loom_model_config *config) {
    char path[4096], *text = NULL;
    size_t length = 0;
    LOOM_TRY(loom__hf_read_config_text(directory, path, sizeof path, &text, &length));
    loom_status status = loom__hf_model_config(path, text, length, config);
    free(text);
    return status;
}

/* ---- import ---- */

struct loom__hf_weights {
    loom_safetensors *file;
    const loom__model_spec *spec;
    float *canonical; /* of the parameter that is being filled */
    /* The file tensor that runs are being taken from, widened once. */
    char name[LOOM__HF_NAME_MAX];
    float *values;
    int64_t elements;
};

static loom_status find_tensor(const loom_safetensors *file, const loom__model_spec *spec, const char *name,
    const loom_safetensors_tensor **tensor) {
    const char *other = loom__hf_other_name(spec, name);
    if (other && !loom_safetensors_has(file, name))
        return loom_safetensors_find(file, other, tensor);
    return loom_safetensors_find(file, name, tensor);
}

static loom_status load_tensor(loom__hf_weights *context, const char *name) {
    if (strcmp(context->name, name) == 0)
        return LOOM_OK;
    const loom_safetensors_tensor *tensor;
    LOOM_TRY(find_tensor(context->file, context->spec, name, &tensor));
    float *values = realloc(context->values, (size_t)(tensor->elements + 1) * sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s: %lld elements", name, (long long)tensor->elements);
    context->values = values;
    context->elements = tensor->elements;
    LOOM_TRY(loom_safetensors_read_f32(tensor, 0, tensor->elements, values));
    snprintf(context->name, sizeof context->name, "%s", name);
    return LOOM_OK;
}

static loom_status import_run(
    void *argument, int64_t canonical_first, int64_t count, const char *hf_name, int64_t hf_first, int64_t hf_stride) {
    loom__hf_weights *context = argument;
    LOOM_TRY(load_tensor(context, hf_name));
    for (int64_t i = 0; i < count; i++)
        context->canonical[canonical_first + i] = context->values[hf_first + i * hf_stride];
    return LOOM_OK;
}

static loom_status check_shape(void *argument, const loom__hf_tensor *wanted) {
    const loom__hf_weights *context = argument;
    const loom_safetensors_tensor *tensor;
    LOOM_TRY(find_tensor(context->file, context->spec, wanted->name, &tensor));
    if (tensor->dims != wanted->dims || tensor->shape[0] != wanted->shape[0] || tensor->shape[1] != wanted->shape[1])
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor %s has shape [%lld, %lld] of %d dimensions, the model needs [%lld, %lld] of %d", tensor->path,
            tensor->name, (long long)tensor->shape[0], (long long)tensor->shape[1], tensor->dims,
            (long long)wanted->shape[0], (long long)wanted->shape[1], wanted->dims);
    return LOOM_OK;
}

typedef struct name_search {
    const loom__model_spec *spec;
    const char *name;
    bool found;
} name_search;

static loom_status match_name(void *argument, const loom__hf_tensor *tensor) {
    name_search *search = argument;
    const char *other = loom__hf_other_name(search->spec, tensor->name);
    search->found =
        search->found || strcmp(tensor->name, search->name) == 0 || (other && strcmp(other, search->name) == 0);
    return LOOM_OK;
}

/* A tensor that the model has no place for would be lost without a word. */
static loom_status check_nothing_left(const loom_safetensors *file, const loom__model_spec *spec) {
    for (int64_t i = 0; i < loom_safetensors_count(file); i++) {
        const loom_safetensors_tensor *tensor = loom_safetensors_get(file, i);
        name_search search = {spec, tensor->name, false};
        for (int64_t p = 0; !search.found && p < spec->count; p++)
            LOOM_TRY(loom__hf_parameter_tensors(spec, &spec->parameters[p], match_name, &search));
        if (!search.found && !loom__hf_is_ignorable(spec, tensor->name))
            return loom_fail(LOOM_ERR_FORMAT, "%s: tensor %s has no place in this model", tensor->path, tensor->name);
    }
    return LOOM_OK;
}

typedef struct tie {
    const loom_safetensors *file;
    const loom__model_spec *spec;
    const loom_safetensors_tensor *head;
} tie;

static loom_status differs(const tie *from, const loom_safetensors_tensor *embedding, const char *how) {
    return loom_fail(LOOM_ERR_FORMAT,
        "%s: tensor %s is not %s (%s), although config.json ties them: for a head of its own set tie_word_embeddings "
        "false there, else remove the tensor",
        from->head->path, from->head->name, embedding->name, how);
}

/* Bit by bit of what is read, in pieces. */
static loom_status compare_head(void *argument, const loom__hf_tensor *wanted) {
    enum { PIECE = 2048 };
    const tie *from = argument;
    const loom_safetensors_tensor *embedding;
    float a[PIECE], b[PIECE];
    char how[96];
    LOOM_TRY(find_tensor(from->file, from->spec, wanted->name, &embedding));
    if (from->head->elements != embedding->elements || from->head->dims != embedding->dims ||
        from->head->shape[0] != embedding->shape[0])
        return differs(from, embedding, "they have other shapes");
    for (int64_t first = 0; first < embedding->elements; first += PIECE) {
        int64_t count = embedding->elements - first < PIECE ? embedding->elements - first : PIECE;
        LOOM_TRY(loom_safetensors_read_f32(embedding, first, count, a));
        LOOM_TRY(loom_safetensors_read_f32(from->head, first, count, b));
        for (int64_t i = 0; i < count; i++)
            if (memcmp(&a[i], &b[i], sizeof *a) != 0) {
                snprintf(how, sizeof how, "element %lld is %g, there %g", (long long)(first + i), (double)b[i],
                    (double)a[i]);
                return differs(from, embedding, how);
            }
    }
    return LOOM_OK;
}

/* The head that a file of tied weights may hold is not read: it must be the copy that it claims to be. */
static loom_status check_tie(const loom_safetensors *file, const loom__model_spec *spec) {
    static const char head[] = "lm_head.weight", embedding[] = "embedding.word_embeddings.weight";
    tie from = {.file = file, .spec = spec};
    if (!spec->config.share_embeddings_and_output_weights || !loom_safetensors_has(file, head))
        return LOOM_OK;
    LOOM_TRY(loom_safetensors_find(file, head, &from.head));
    for (int64_t i = 0; i < spec->count; i++)
        if (strcmp(spec->parameters[i].name, embedding) == 0)
            return loom__hf_parameter_tensors(spec, &spec->parameters[i], compare_head, &from);
    return LOOM_OK;
}

/* Also what other stages read: a directory is refused alike on every rank. */
static loom_status check_weights(loom__hf_weights *weights) {
    const loom__model_spec *spec = weights->spec;
    LOOM_TRY(check_nothing_left(weights->file, spec));
    LOOM_TRY(check_tie(weights->file, spec));
    for (int64_t i = 0; i < spec->count; i++)
        LOOM_TRY(loom__hf_parameter_tensors(spec, &spec->parameters[i], check_shape, weights));
    return LOOM_OK;
}

loom_status loom__hf_weights_open(const char *directory, const loom__model_spec *spec, loom__hf_weights **out) {
    loom__hf_weights *weights = calloc(1, sizeof *weights);
    if (!weights)
        return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", directory);
    weights->spec = spec;
    loom_status status = loom_safetensors_open(directory, &weights->file);
    if (!status)
        status = check_weights(weights);
    if (status) {
        loom__hf_weights_close(weights);
        return status;
    }
    *out = weights;
    return LOOM_OK;
}

void loom__hf_weights_close(loom__hf_weights *weights) {
    if (!weights)
        return;
    loom_safetensors_close(weights->file);
    free(weights->values);
    free(weights);
}

loom_dtype loom__hf_weights_dtype(const loom__hf_weights *weights) {
    loom_dtype dtype = loom_safetensors_get(weights->file, 0)->dtype;
    for (int64_t i = 1; i < loom_safetensors_count(weights->file); i++)
        if (loom_safetensors_get(weights->file, i)->dtype != dtype)
            return LOOM_F32;
    return dtype == LOOM_BF16 || dtype == LOOM_F16 ? dtype : LOOM_F32;
}

loom_status loom__hf_weights_read(loom__hf_weights *weights, int64_t number, float *canonical) {
    weights->canonical = canonical;
    return loom__hf_source_runs(weights->spec, &weights->spec->parameters[number], import_run, weights);
}

static loom_status import_parameter(loom__hf_weights *weights, loom__parameter_set *set, int64_t index) {
    int64_t number = set->part->entries[index].canonical;
    const loom__parameter_descriptor *descriptor = &set->spec->parameters[number];
    float *canonical = malloc((size_t)(loom__descriptor_count(descriptor) + 1) * sizeof *canonical);
    if (!canonical)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", descriptor->name);
    loom_status status = loom__hf_weights_read(weights, number, canonical);
    if (!status)
        status = loom__parameter_scatter(set, index, canonical);
    free(canonical);
    return status;
}

loom_status loom__hf_load(const char *directory, loom__parameter_set *set) {
    loom__hf_weights *weights = NULL;
    LOOM_TRY(loom__hf_weights_open(directory, set->spec, &weights));
    loom_status status = LOOM_OK;
    for (int64_t i = 0; !status && i < set->count; i++)
        status = import_parameter(weights, set, i);
    loom__hf_weights_close(weights);
    return status;
}

/* ---- export ---- */

typedef struct export_context {
    const float *canonical;
    const char *wanted; /* the file tensor being filled */
    float *values;
} export_context;

static loom_status describe_tensor(void *argument, const loom__hf_tensor *tensor) {
    return loom_safetensors_writer_add(argument, tensor->name, LOOM_F32, tensor->dims, tensor->shape);
}

static loom_status export_run(
    void *argument, int64_t canonical_first, int64_t count, const char *hf_name, int64_t hf_first, int64_t hf_stride) {
    const export_context *context = argument;
    if (strcmp(hf_name, context->wanted) != 0)
        return LOOM_OK;
    for (int64_t i = 0; i < count; i++)
        context->values[hf_first + i * hf_stride] = context->canonical[canonical_first + i];
    return LOOM_OK;
}

typedef struct write_context {
    loom_safetensors_writer *writer;
    const loom__model_spec *spec;
    const loom__parameter_descriptor *descriptor;
    const float *canonical;
} write_context;

loom_status loom__hf_fill(const loom__model_spec *spec, const loom__parameter_descriptor *descriptor,
    const loom__hf_tensor *tensor, const float *canonical, float *values) {
    export_context context = {.canonical = canonical, .wanted = tensor->name, .values = values};
    return loom__hf_source_runs(spec, descriptor, export_run, &context);
}

static loom_status write_tensor(void *argument, const loom__hf_tensor *tensor) {
    const write_context *context = argument;
    int64_t count = tensor->shape[0] * (tensor->dims == 2 ? tensor->shape[1] : 1);
    float *values = calloc((size_t)count + 1, sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", tensor->name);
    loom_status status = loom__hf_fill(context->spec, context->descriptor, tensor, context->canonical, values);
    if (!status)
        status = loom_safetensors_writer_write(context->writer, values, (size_t)count * sizeof *values);
    free(values);
    return status;
}

typedef struct export_all {
    const loom__parameter_set *set;
    loom_safetensors_writer *writer; /* NULL: this rank only takes part in the gathers */
} export_all;

static loom_status export_parameter(void *argument, int64_t number, const float *canonical) {
    const export_all *all = argument;
    const loom__parameter_descriptor *descriptor = &all->set->spec->parameters[number];
    if (!all->writer)
        return LOOM_OK;
    write_context context = {all->writer, all->set->spec, descriptor, canonical};
    return loom__hf_parameter_tensors(all->set->spec, descriptor, write_tensor, &context);
}

loom_status loom__hf_describe(const loom__parameter_set *set, loom_safetensors_writer *writer) {
    LOOM_TRY(loom__hf_check(set->spec));
    for (int64_t i = 0; i < set->spec->count; i++)
        LOOM_TRY(loom__hf_parameter_tensors(set->spec, &set->spec->parameters[i], describe_tensor, writer));
    return LOOM_OK;
}

loom_status loom__hf_write(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp, loom_comm *pp,
    float factor, loom_safetensors_writer *writer) {
    export_all all = {set, writer};
    return loom__parameter_set_visit(set, array, tp, pp, factor, export_parameter, &all);
}
