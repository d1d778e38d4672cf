/* A set of parameters as a Hugging Face directory. First the plan, from the spec alone: every file tensor in order, and
 * the shard it goes to. Then the parameters come by, one at a time; the writer fills each file tensor from the
 * canonical one, rounds it in pieces, and goes on to the next file where the plan says so. So the bytes depend on the
 * spec and the values, never on the layout, and no more than one parameter is in memory. */
#include "model/gpt.h"
#include "model/huggingface_directory.h"
#include "spec/huggingface.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

loom_hf_save_options loom_hf_save_options_default(void) {
    return (loom_hf_save_options){.dtype = LOOM_F32, .max_shard_bytes = 5000000000};
}

/* model-00001-of-00004.safetensors: five digits. */
enum { SHARDS_MAX = 99999, FILE_NAME = 64, PIECE = 4096 };

typedef struct planned_tensor {
    loom__hf_tensor tensor;
    int64_t shard;
} planned_tensor;

typedef struct plan {
    planned_tensor *tensors;
    int64_t count, capacity, shards, total_bytes, shard_bytes;
    int64_t max_shard_bytes, element_bytes;
} plan;

typedef struct save {
    const loom__model_spec *spec;
    const loom_hf_save_options *options;
    const loom_tokenizer *tokenizer; /* of the options, on the writing rank */
    loom_comm *world;                /* NULL: there are no other ranks */
    bool writes;
    /* From here on: of the writing rank alone. */
    plan plan;
    char *temporary;
    int lock; /* of the temporary directory; -1: not begun */
    loom_safetensors_writer *writer;
    int64_t at; /* the next tensor of the plan */
    const loom__parameter_descriptor *descriptor;
    const float *canonical;
} save;

static int64_t tensor_elements(const loom__hf_tensor *tensor) {
    return tensor->shape[0] * (tensor->dims == 2 ? tensor->shape[1] : 1);
}

static loom_status plan_tensor(void *argument, const loom__hf_tensor *tensor) {
    plan *to = argument;
    int64_t bytes = tensor_elements(tensor) * to->element_bytes;
    if (to->count == to->capacity) {
        int64_t capacity = 2 * to->capacity + 64;
        planned_tensor *grown = realloc(to->tensors, (size_t)capacity * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for the list of tensors");
        to->tensors = grown;
        to->capacity = capacity;
    }
    if (to->shards == 0 || (to->shard_bytes > 0 && bytes > to->max_shard_bytes - to->shard_bytes)) {
        to->shards++;
        to->shard_bytes = 0;
    }
    if (to->shards > SHARDS_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "max_shard_bytes: %lld makes more than %d files",
            (long long)to->max_shard_bytes, SHARDS_MAX);
    to->shard_bytes += bytes;
    to->total_bytes += bytes;
    to->tensors[to->count++] = (planned_tensor){*tensor, to->shards - 1};
    return LOOM_OK;
}

static loom_status make_plan(const loom__model_spec *spec, const loom_hf_save_options *options, plan *made) {
    *made =
        (plan){.max_shard_bytes = options->max_shard_bytes, .element_bytes = (int64_t)loom_dtype_size(options->dtype)};
    for (int64_t i = 0; i < spec->count; i++)
        LOOM_TRY(loom__hf_parameter_tensors(spec, &spec->parameters[i], plan_tensor, made));
    return LOOM_OK;
}

static void file_name(const plan *from, int64_t shard, char name[FILE_NAME]) {
    if (from->shards == 1)
        snprintf(name, FILE_NAME, "model.safetensors");
    else
        snprintf(name, FILE_NAME, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1, (long long)from->shards);
}

/* ---- the texts ---- */

static loom_status write_index(const save *s) {
    const plan *from = &s->plan;
    char name[FILE_NAME];
    json_t *map = json_object();
    bool whole = map != NULL;
    for (int64_t i = 0; whole && i < from->count; i++) {
        file_name(from, from->tensors[i].shard, name);
        whole = json_object_set_new(map, from->tensors[i].tensor.name, json_string(name)) == 0;
    }
    json_t *root = json_pack("{s:{s:I, s:s}, s:o}", "metadata", "total_size", (json_int_t)from->total_bytes, "producer",
        LOOM__HF_PRODUCER, "weight_map", map);
    char *text = whole && root ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    loom_status status = text ? loom__hf_directory_write(s->temporary, "model.safetensors.index.json", text)
                              : loom_fail(LOOM_ERR_MEMORY, "out of memory for the index of the shards");
    free(text);
    json_decref(root);
    return status;
}

static bool is_byte(const loom_hf_save_options *options) {
    return options->tokenizer && strcmp(options->tokenizer, "byte") == 0;
}

static loom_status read_token_ids(const save *s, loom__hf_token_ids *ids) {
    *ids = (loom__hf_token_ids){-1, -1, -1};
    if (s->tokenizer)
        *ids = (loom__hf_token_ids){s->tokenizer->bos, s->tokenizer->eod, -1};
    if (!s->options->source)
        return LOOM_OK;
    char path[4096], *text = NULL;
    size_t length = 0;
    LOOM_TRY(loom__hf_read_config_text(s->options->source, path, sizeof path, &text, &length));
    loom_status status = loom__hf_read_token_ids(path, text, length, ids);
    free(text);
    return status;
}

/* Takes the text. */
static loom_status write_text(const save *s, const char *name, loom_status made, char *text) {
    LOOM_TRY(made);
    loom_status status = loom__hf_directory_write(s->temporary, name, text);
    free(text);
    return status;
}

static loom_status write_texts(const save *s) {
    loom__hf_token_ids ids;
    char *text = NULL;
    LOOM_TRY(read_token_ids(s, &ids));
    loom_status made = loom__hf_config_text(s->spec, s->options->dtype, &ids, &text);
    LOOM_TRY(write_text(s, "config.json", made, text));
    made = loom__hf_generation_text(&ids, &text);
    LOOM_TRY(write_text(s, "generation_config.json", made, text));
    if (is_byte(s->options)) {
        made = loom__hf_byte_tokenizer_text(&text);
        LOOM_TRY(write_text(s, "tokenizer.json", made, text));
        made = loom__hf_byte_tokenizer_config_text(s->spec->config.max_position_embeddings, &text);
        LOOM_TRY(write_text(s, "tokenizer_config.json", made, text));
    } else if (s->options->tokenizer) {
        LOOM_TRY(loom__hf_directory_copy_tokenizer(s->options->tokenizer, s->temporary));
    }
    return s->options->source ? loom__hf_directory_copy_companions(s->options->source, s->temporary) : LOOM_OK;
}

/* ---- the weights ---- */

static loom_status open_shard(save *s, int64_t shard) {
    char name[FILE_NAME], path[4096];
    file_name(&s->plan, shard, name);
    if (snprintf(path, sizeof path, "%s/%s", s->temporary, name) >= (int)sizeof path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the Hugging Face directory is too long");
    LOOM_TRY(loom_safetensors_writer_create(path, &s->writer));
    LOOM_TRY(loom_safetensors_writer_metadata(s->writer, "format", "pt")); /* transformers asks for it */
    LOOM_TRY(loom_safetensors_writer_metadata(s->writer, "producer", LOOM__HF_PRODUCER));
    for (int64_t i = 0; i < s->plan.count; i++) {
        const planned_tensor *planned = &s->plan.tensors[i];
        if (planned->shard == shard)
            LOOM_TRY(loom_safetensors_writer_add(
                s->writer, planned->tensor.name, s->options->dtype, planned->tensor.dims, planned->tensor.shape));
    }
    return LOOM_OK;
}

static loom_status close_shard(save *s) {
    loom_status status = s->writer ? loom_safetensors_writer_finish(s->writer) : LOOM_OK;
    loom_safetensors_writer_destroy(s->writer);
    s->writer = NULL;
    return status;
}

/* No dtype may carry it out silently. */
static loom_status check_numbers(const char *name, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (isnan(values[i]))
            return loom_fail(LOOM_ERR_NUMERIC, "%s: element %lld is not a number (NaN): the model is not written", name,
                (long long)i);
    return LOOM_OK;
}

static loom_status write_rounded(const save *s, const char *name, const float *values, int64_t count) {
    uint16_t piece[PIECE];
    if (s->options->dtype == LOOM_F32)
        return loom_safetensors_writer_write(s->writer, values, (size_t)count * sizeof *values);
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t length = count - first < PIECE ? count - first : PIECE;
        for (int64_t i = 0; i < length; i++) {
            float value = values[first + i];
            piece[i] = s->options->dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
            if (s->options->dtype == LOOM_F16 && isfinite(value) && isinf(loom_f16_to_f32(piece[i])))
                return loom_fail(LOOM_ERR_FORMAT,
                    "%s: element %lld is %g, which fp16 cannot hold (at most 65504); bf16 can", name,
                    (long long)(first + i), (double)value);
        }
        LOOM_TRY(loom_safetensors_writer_write(s->writer, piece, (size_t)length * sizeof *piece));
    }
    return LOOM_OK;
}

static loom_status write_tensor(void *argument, const loom__hf_tensor *tensor) {
    save *s = argument;
    int64_t shard = s->plan.tensors[s->at].shard, count = tensor_elements(tensor);
    if (s->at == 0 || s->plan.tensors[s->at - 1].shard != shard) {
        LOOM_TRY(close_shard(s));
        LOOM_TRY(open_shard(s, shard));
    }
    float *values = malloc((size_t)(count + 1) * sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", tensor->name);
    loom_status status = loom__hf_fill(s->spec, s->descriptor, tensor, s->canonical, values);
    if (!status)
        status = check_numbers(tensor->name, values, count);
    if (!status)
        status = write_rounded(s, tensor->name, values, count);
    free(values);
    s->at++;
    return status;
}

static loom_status agree(const save *s, loom_status status) {
    return s->world ? loom_agree(s->world, status) : status;
}

/* Each parameter ends in an agreement: a full disk ends the export on every rank, and nobody waits longer than for one
 * parameter. */
static loom_status save_parameter(void *argument, int64_t number, const float *canonical) {
    save *s = argument;
    loom_status status = LOOM_OK;
    if (s->writes) {
        s->descriptor = &s->spec->parameters[number];
        s->canonical = canonical;
        status = loom__hf_parameter_tensors(s->spec, s->descriptor, write_tensor, s);
    }
    return agree(s, status);
}

/* ---- the whole ---- */

static loom_status check_options(
    const loom__model_spec *spec, const loom_hf_save_options *options, const loom_tokenizer *tokenizer) {
    if (options->dtype != LOOM_F32 && options->dtype != LOOM_BF16 && options->dtype != LOOM_F16)
        return loom_fail(LOOM_ERR_ARGUMENT, "dtype of a Hugging Face directory: found %s, expected F32, BF16 or F16",
            loom_dtype_name(options->dtype));
    if (options->max_shard_bytes < 1)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "max_shard_bytes: found %lld, expected at least 1", (long long)options->max_shard_bytes);
    if (options->tokenizer && options->source)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "a Hugging Face directory gets its tokenizer from a source or by name, not both");
    if (tokenizer && tokenizer->vocab_size > spec->config.vocab_size)
        return loom_fail(LOOM_ERR_ARGUMENT, "the tokenizer %s has %lld tokens, the model a vocabulary of %lld",
            options->tokenizer, (long long)tokenizer->vocab_size, (long long)spec->config.vocab_size);
    return LOOM_OK;
}

static loom_status check(const loom__model_spec *spec, const char *directory, const loom_hf_save_options *options,
    const loom_tokenizer *tokenizer) {
    plan made;
    LOOM_TRY(loom__hf_check(spec));
    LOOM_TRY(check_options(spec, options, tokenizer));
    LOOM_TRY(loom__hf_directory_check(directory));
    loom_status status = make_plan(spec, options, &made);
    free(made.tensors);
    return status;
}

loom_status loom__hf_save_check(const loom__parameter_set *set, const char *directory,
    const loom_hf_save_options *options, const loom_tokenizer *tokenizer) {
    return check(set->spec, directory, options, tokenizer);
}

static loom_status begin(save *s, const char *directory) {
    if (!s->writes)
        return LOOM_OK;
    LOOM_TRY(check(s->spec, directory, s->options, s->tokenizer));
    LOOM_TRY(make_plan(s->spec, s->options, &s->plan));
    LOOM_TRY(loom__hf_directory_begin(directory, &s->temporary, &s->lock));
    return write_texts(s);
}

static loom_status finish(save *s, const char *directory) {
    if (!s->writes)
        return LOOM_OK;
    LOOM_TRY(close_shard(s));
    if (s->plan.shards > 1)
        LOOM_TRY(write_index(s));
    return loom__hf_directory_commit(directory);
}

static loom_status save_all(save *s, loom__hf_visit visit, void *context, const char *directory) {
    loom_status status = agree(s, begin(s, directory));
    if (!status)
        status = visit(context, save_parameter, s);
    if (!status)
        status = agree(s, finish(s, directory));
    loom_safetensors_writer_destroy(s->writer);
    if (status)
        loom__hf_directory_discard(s->temporary);
    if (s->lock >= 0)
        close(s->lock);
    free(s->temporary);
    free(s->plan.tensors);
    return status;
}

typedef struct visited_set {
    const loom__parameter_set *set;
    loom_comm *tp, *pp;
} visited_set;

static loom_status visit_set(void *context, loom__parameter_body body, void *argument) {
    const visited_set *of = context;
    return loom__parameter_set_visit(of->set, LOOM__PARAMETER_DATA, of->tp, of->pp, 1, body, argument);
}

loom_status loom__hf_save(const loom__parameter_set *set, loom_comm *tp, loom_comm *pp, loom_comm *world, bool writes,
    const char *directory, const loom_hf_save_options *options, const loom_tokenizer *tokenizer) {
    save s = {
        .spec = set->spec, .options = options, .tokenizer = tokenizer, .world = world, .writes = writes, .lock = -1};
    visited_set of = {set, tp, pp};
    return save_all(&s, visit_set, &of, directory);
}

loom_status loom__hf_save_visited(const loom__model_spec *spec, loom__hf_visit visit, void *context,
    const char *directory, const loom_hf_save_options *options) {
    save s = {.spec = spec, .options = options, .writes = true, .lock = -1};
    return save_all(&s, visit, context, directory);
}
