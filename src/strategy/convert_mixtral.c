/* Mixtral by names and tensors alone, since its experts are no part of a model's spec: every tensor of one side is made
 * of stretches of rows of tensors of the other. The invariant: the list of stretches covers each tensor of both sides
 * once, so one list serves both ways, and no bit changes. */
#include "checkpoint/context.h"
#include "checkpoint/writer.h"
#include "format/file.h"
#include "model/gpt.h"
#include "model/huggingface_directory.h"
#include "strategy/convert.h"
#include "strategy/offline.h"
#include <jansson.h>
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { NAME_BYTES = 128 };

typedef struct sizes {
    int64_t layers, h, f, n, g, d, experts, vocabulary;
    bool tied;
} sizes;

/* Rows [row, +rows) of the tensor `key` at [layer][expert] are rows [hf_row, +rows) of the Hugging Face tensor. */
typedef struct stretch {
    char hf[NAME_BYTES], key[NAME_BYTES];
    int64_t layer, expert; /* -1: the key has no such axis */
    int64_t hf_row, row, rows;
    int64_t columns;          /* 0: one dimension */
    int64_t hf_rows, of_rows; /* of the two tensors in all */
} stretch;

typedef struct mixtral {
    sizes of;
    stretch *list;
    int64_t count, room;
    const loom_tool_progress *progress;
    uint64_t done, all;
} mixtral;

/* ---- which models */

static bool is_mixtral(const json_t *root) {
    const char *type = json_string_value(json_object_get(root, "model_type"));
    return type && strcmp(type, "mixtral") == 0;
}

static loom_status read_json(const char *directory, json_t **root) {
    char path[4096], *text = NULL;
    size_t length = 0;
    json_error_t error;
    LOOM_TRY(loom__hf_read_config_text(directory, path, sizeof path, &text, &length));
    *root = json_loadb(text, length, 0, &error);
    free(text);
    return *root ? LOOM_OK : loom_fail(LOOM_ERR_FORMAT, "%s:%d: is no JSON: %s", path, error.line, error.text);
}

bool loom__is_mixtral(const char *directory) {
    json_t *root = NULL;
    char path[4096];
    bool there = snprintf(path, sizeof path, "%s/config.json", directory) < (int)sizeof path && access(path, F_OK) == 0;
    bool found = there && read_json(directory, &root) == LOOM_OK && is_mixtral(root);
    json_decref(root);
    loom_error_clear();
    return found;
}

static loom_status read_size(const json_t *root, const char *key, int64_t otherwise, int64_t *out) {
    const json_t *value = json_object_get(root, key);
    *out = value && !json_is_null(value) ? json_integer_value(value) : otherwise;
    return *out >= 1 && *out < INT32_MAX
               ? LOOM_OK
               : loom_fail(LOOM_ERR_FORMAT, "config.json: %s: found %lld, expected an integer from 1 to %d", key,
                     (long long)*out, INT32_MAX);
}

static loom_status read_sizes(const char *directory, sizes *of) {
    json_t *root = NULL;
    LOOM_TRY(read_json(directory, &root));
    loom_status status = read_size(root, "num_hidden_layers", 0, &of->layers);
    status = status ? status : read_size(root, "hidden_size", 0, &of->h);
    status = status ? status : read_size(root, "intermediate_size", 0, &of->f);
    status = status ? status : read_size(root, "num_attention_heads", 0, &of->n);
    status = status ? status : read_size(root, "num_key_value_heads", of->n, &of->g);
    status = status ? status : read_size(root, "head_dim", of->h / of->n, &of->d);
    status = status ? status : read_size(root, "num_local_experts", 0, &of->experts);
    status = status ? status : read_size(root, "vocab_size", 0, &of->vocabulary);
    of->tied = json_is_true(json_object_get(root, "tie_word_embeddings"));
    json_decref(root);
    if (!status && of->n % of->g != 0)
        status =
            loom_fail(LOOM_ERR_FORMAT, "%s/config.json: found %lld heads and %lld key-value heads, expected a multiple",
                directory, (long long)of->n, (long long)of->g);
    return status;
}

/* ---- the list */

static loom_status add(mixtral *m, const stretch *made) {
    if (m->count == m->room) {
        int64_t room = m->room ? 2 * m->room : 256;
        stretch *grown = realloc(m->list, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tensors", (long long)room);
        m->list = grown;
        m->room = room;
    }
    m->list[m->count++] = *made;
    return LOOM_OK;
}

/* A whole tensor. */
static loom_status add_whole(
    mixtral *m, const char *hf, const char *key, int64_t layer, int64_t rows, int64_t columns) {
    stretch made = {.layer = layer, .expert = -1, .rows = rows, .columns = columns, .hf_rows = rows, .of_rows = rows};
    if (layer < 0)
        snprintf(made.hf, NAME_BYTES, "%s", hf);
    else
        snprintf(made.hf, NAME_BYTES, "model.layers.%lld.%s", (long long)layer, hf);
    snprintf(made.key, NAME_BYTES, "%s", key);
    return add(m, &made);
}

/* Of each group its query heads, its key and its value. */
static loom_status add_qkv(mixtral *m, int64_t layer) {
    static const char *const names[] = {"q", "k", "v"};
    const sizes *of = &m->of;
    int64_t queries = of->n / of->g * of->d, row = 0;
    for (int64_t group = 0; group < of->g; group++)
        for (int i = 0; i < 3; i++) {
            int64_t rows = i == 0 ? queries : of->d;
            stretch made = {.layer = layer,
                .expert = -1,
                .hf_row = group * rows,
                .row = row,
                .rows = rows,
                .columns = of->h,
                .hf_rows = of->g * rows,
                .of_rows = of->g * (queries + 2 * of->d)};
            snprintf(made.hf, NAME_BYTES, "model.layers.%lld.self_attn.%s_proj.weight", (long long)layer, names[i]);
            snprintf(made.key, NAME_BYTES, "decoder.layers.self_attention.linear_qkv.weight");
            LOOM_TRY(add(m, &made));
            row += rows;
        }
    return LOOM_OK;
}

static loom_status add_expert(mixtral *m, int64_t layer, int64_t expert) {
    static const struct {
        const char *hf;
        int half; /* of fc1; -1: fc2 */
    } parts[] = {{"w1", 0}, {"w3", 1}, {"w2", -1}};
    const sizes *of = &m->of;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        bool second = parts[i].half < 0;
        int64_t rows = second ? of->h : of->f;
        stretch made = {.layer = layer,
            .expert = expert,
            .row = second ? 0 : parts[i].half * rows,
            .rows = rows,
            .columns = second ? of->f : of->h,
            .hf_rows = rows,
            .of_rows = second ? rows : 2 * rows};
        snprintf(made.hf, NAME_BYTES, "model.layers.%lld.block_sparse_moe.experts.%lld.%s.weight", (long long)layer,
            (long long)expert, parts[i].hf);
        snprintf(made.key, NAME_BYTES, "decoder.layers.mlp.experts.experts.linear_fc%d.weight", second ? 2 : 1);
        LOOM_TRY(add(m, &made));
    }
    return LOOM_OK;
}

static loom_status add_layer(mixtral *m, int64_t layer) {
    const sizes *of = &m->of;
    LOOM_TRY(add_whole(
        m, "input_layernorm.weight", "decoder.layers.self_attention.linear_qkv.layer_norm_weight", layer, of->h, 0));
    LOOM_TRY(add_qkv(m, layer));
    LOOM_TRY(add_whole(
        m, "self_attn.o_proj.weight", "decoder.layers.self_attention.linear_proj.weight", layer, of->h, of->n * of->d));
    LOOM_TRY(add_whole(
        m, "post_attention_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight", layer, of->h, 0));
    LOOM_TRY(
        add_whole(m, "block_sparse_moe.gate.weight", "decoder.layers.mlp.router.weight", layer, of->experts, of->h));
    for (int64_t expert = 0; expert < of->experts; expert++)
        LOOM_TRY(add_expert(m, layer, expert));
    return LOOM_OK;
}

/* Rows of the vocabulary are padded as for one tensor rank. */
static loom_status make_list(mixtral *m) {
    enum { DIVISOR = 128 };
    const sizes *of = &m->of;
    int64_t padded = (of->vocabulary + DIVISOR - 1) / DIVISOR * DIVISOR;
    LOOM_TRY(add_whole(m, "model.embed_tokens.weight", "embedding.word_embeddings.weight", -1, of->vocabulary, of->h));
    m->list[m->count - 1].of_rows = padded;
    for (int64_t layer = 0; layer < of->layers; layer++)
        LOOM_TRY(add_layer(m, layer));
    LOOM_TRY(add_whole(m, "model.norm.weight", "decoder.final_layernorm.weight", -1, of->h, 0));
    if (of->tied)
        return LOOM_OK;
    LOOM_TRY(add_whole(m, "lm_head.weight", "output_layer.weight", -1, of->vocabulary, of->h));
    m->list[m->count - 1].of_rows = padded;
    return LOOM_OK;
}

static int64_t width_of(const stretch *s) {
    return s->columns ? s->columns : 1;
}

static void count_all(mixtral *m, size_t element) {
    for (int64_t i = 0; i < m->count; i++)
        m->all += (uint64_t)(m->list[i].rows * width_of(&m->list[i])) * element;
}

static void report(mixtral *m, size_t bytes) {
    m->done += bytes;
    if (m->progress->report)
        m->progress->report(m->progress->context, m->done, m->all);
}

/* ---- from a directory to a checkpoint */

static loom_status check_nothing_left(const mixtral *m, const loom_safetensors *file) {
    for (int64_t i = 0; i < loom_safetensors_count(file); i++) {
        const loom_safetensors_tensor *tensor = loom_safetensors_get(file, i);
        bool found = false;
        for (int64_t k = 0; k < m->count && !found; k++)
            found = strcmp(m->list[k].hf, tensor->name) == 0;
        if (!found)
            return loom_fail(LOOM_ERR_FORMAT, "%s: tensor %s has no place in this model", tensor->path, tensor->name);
    }
    return LOOM_OK;
}

static loom_status fill_rows(const stretch *s, const loom_safetensors *file, loom_dtype dtype, char *chunk) {
    const loom_safetensors_tensor *tensor = NULL;
    size_t row = (size_t)width_of(s) * loom_dtype_size(dtype);
    LOOM_TRY(loom_safetensors_find(file, s->hf, &tensor));
    if (tensor->dtype != dtype || tensor->dims != (s->columns ? 2 : 1) || tensor->shape[0] != s->hf_rows ||
        tensor->shape[1] != width_of(s))
        return loom_fail(LOOM_ERR_FORMAT, "%s: tensor %s is %s [%lld, %lld], the model needs %s [%lld, %lld]",
            tensor->path, s->hf, loom_dtype_name(tensor->dtype), (long long)tensor->shape[0],
            (long long)tensor->shape[1], loom_dtype_name(dtype), (long long)s->hf_rows, (long long)width_of(s));
    memcpy(chunk + (size_t)s->row * row, (const char *)tensor->data + (size_t)s->hf_row * row, (size_t)s->rows * row);
    return LOOM_OK;
}

/* Axes of the tensor `key`: [layers,] [experts,] rows [, columns]; and its box at the stretch's layer and expert. */
static int axes_of(const mixtral *m, const stretch *s, int64_t *shape, int64_t *offset, int64_t *size) {
    int dims = 0;
    if (s->layer >= 0) {
        shape[dims] = m->of.layers;
        offset[dims] = s->layer;
        size[dims++] = 1;
    }
    if (s->expert >= 0) {
        shape[dims] = m->of.experts;
        offset[dims] = s->expert;
        size[dims++] = 1;
    }
    shape[dims] = size[dims] = s->of_rows;
    offset[dims++] = 0;
    if (s->columns) {
        shape[dims] = size[dims] = s->columns;
        offset[dims++] = 0;
    }
    return dims;
}

static bool same_chunk(const stretch *a, const stretch *b) {
    return a->layer == b->layer && a->expert == b->expert && strcmp(a->key, b->key) == 0;
}

/* The stretches of one chunk stand together. *next is the first behind them. */
static loom_status write_chunk(mixtral *m, int64_t first, const loom_safetensors *file, loom_dtype dtype,
    loom__checkpoint_writer *to, int64_t *next) {
    const stretch *s = &m->list[first];
    int64_t shape[4], offset[4], size[4];
    size_t bytes = (size_t)(s->of_rows * width_of(s)) * loom_dtype_size(dtype);
    char *chunk = calloc(bytes + 1, 1);
    loom_status status = chunk ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a chunk of %s", s->key);
    int64_t i = first;
    for (; i < m->count && !status && same_chunk(&m->list[i], s); i++)
        status = fill_rows(&m->list[i], file, dtype, chunk);
    int dims = axes_of(m, s, shape, offset, size);
    if (!status)
        status = loom__checkpoint_file_tensor(to, s->key, dtype, dims, shape, offset, size, chunk);
    report(m, bytes);
    free(chunk);
    *next = i;
    return status;
}

/* Linear layers have an object beside them, which holds nothing. */
static loom_status write_extra(const mixtral *m, loom__checkpoint_writer *to, loom_value_pool *pool) {
    static const char *const linear[] = {"self_attention.linear_proj", "self_attention.linear_qkv",
        "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"};
    loom_value *none = NULL, *list = NULL;
    char name[2 * NAME_BYTES];
    LOOM_TRY(loom_value_none(pool, &none));
    LOOM_TRY(loom_value_list(pool, &list));
    LOOM_TRY(loom_value_append(pool, list, none));
    for (int i = 0; i < 4; i++)
        for (int64_t layer = 0; layer < m->of.layers; layer++)
            for (int64_t expert = 0; expert < (i < 2 ? 1 : m->of.experts); expert++) {
                if (i < 2)
                    snprintf(name, sizeof name, "decoder.layers.%s._extra_state/shard_%lld_%lld", linear[i],
                        (long long)layer, (long long)m->of.layers);
                else
                    snprintf(name, sizeof name, "decoder.layers.%s._extra_state/shard_%lld.%lld_%lld.%lld", linear[i],
                        (long long)layer, (long long)expert, (long long)m->of.layers, (long long)m->of.experts);
                LOOM_TRY(loom__checkpoint_file_object(to, name, list));
            }
    return LOOM_OK;
}

static loom_status write_file(mixtral *m, const loom_safetensors *file, loom_value_pool *pool, const char *out,
    loom__checkpoint_description *description) {
    loom_dtype dtype = loom_safetensors_get(file, 0)->dtype;
    loom__checkpoint_writer *to = NULL;
    LOOM_TRY(loom__checkpoint_file_create(out, 0, 0, &to));
    count_all(m, loom_dtype_size(dtype));
    loom_status status = write_extra(m, to, pool);
    for (int64_t i = 0; i < m->count && !status;)
        status = write_chunk(m, i, file, dtype, to, &i);
    if (!status)
        status = loom__checkpoint_file_finish(to, description);
    loom__checkpoint_writer_destroy(to);
    return status;
}

static loom_status write_checkpoint(
    mixtral *m, const loom_safetensors *file, const char *in, const char *out, loom_value_pool *pool) {
    loom__checkpoint_description description = {0};
    loom_value *common = NULL, *version = NULL;
    LOOM_TRY(loom_value_dict(pool, &common));
    LOOM_TRY(loom_value_float(pool, 3.0, &version)); /* Megatron-LM's, since 2020 */
    LOOM_TRY(loom_value_set(pool, common, "checkpoint_version", version));
    LOOM_TRY(write_file(m, file, pool, out, &description));
    loom_status status = loom__checkpoint_copy_context(out, in);
    if (!status)
        status = loom__checkpoint_commit(out, &description, 1, common);
    free(description.data);
    return status;
}

static loom_status import(mixtral *m, const char *in, const char *out) {
    loom_safetensors *file = NULL;
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_safetensors_open(in, &file));
    loom_status status = check_nothing_left(m, file);
    if (!status)
        status = loom_value_pool_create(&pool);
    if (!status)
        status = loom__checkpoint_begin(out);
    if (!status) {
        status = write_checkpoint(m, file, in, out, pool);
        if (status)
            status = loom__tool_discard(out, status);
    }
    loom_value_pool_destroy(pool);
    loom_safetensors_close(file);
    return status;
}

/* ---- from a checkpoint to a directory */

/* With and without NeMo's prefix; the norm before the experts by the name that Transformer Engine leaves it as well. */
static loom_status find(const loom_checkpoint *from, const char *key, const loom_checkpoint_tensor **tensor) {
    static const char fused[] = "decoder.layers.mlp.linear_fc1.layer_norm_weight";
    static const char *const prefixes[] = {"", "module."};
    const char *spellings[] = {key, strcmp(key, fused) == 0 ? "decoder.layers.pre_mlp_layernorm.weight" : key};
    loom_status status = LOOM_ERR_NOT_FOUND;
    for (int i = 0; i < 4 && status == LOOM_ERR_NOT_FOUND; i++) {
        char name[2 * NAME_BYTES];
        snprintf(name, sizeof name, "%s%s", prefixes[i % 2], spellings[i / 2]);
        status = loom_checkpoint_find_tensor(from, name, tensor);
    }
    return status;
}

static loom_status read_rows(
    const mixtral *m, const loom_checkpoint *from, const stretch *s, loom_dtype dtype, char *to) {
    const loom_checkpoint_tensor *tensor = NULL;
    int64_t shape[LOOM_CHECKPOINT_MAX_DIMS], offset[LOOM_CHECKPOINT_MAX_DIMS], size[LOOM_CHECKPOINT_MAX_DIMS];
    LOOM_TRY(find(from, s->key, &tensor));
    int dims = axes_of(m, s, shape, offset, size), axis = (s->layer >= 0) + (s->expert >= 0);
    bool fits = tensor->dims == dims && tensor->dtype == dtype;
    /* Rows of a vocabulary may be padded otherwise. */
    for (int i = 0; i < dims && fits; i++)
        fits = tensor->shape[i] == shape[i] || (i == axis && s->layer < 0 && tensor->shape[i] >= s->rows);
    if (!fits)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: %s has another shape or dtype than config.json and the other "
            "tensors say",
            tensor->name);
    offset[axis] = s->row;
    size[axis] = s->rows;
    return loom_checkpoint_read(
        from, tensor, offset, size, dtype, to + (size_t)(s->hf_row * width_of(s)) * loom_dtype_size(dtype));
}

static bool is_first(const mixtral *m, int64_t number) {
    for (int64_t i = 0; i < number; i++)
        if (strcmp(m->list[i].hf, m->list[number].hf) == 0)
            return false;
    return true;
}

static loom_status write_tensor(
    mixtral *m, int64_t number, const loom_checkpoint *from, loom_dtype dtype, loom_safetensors_writer *to) {
    const stretch *s = &m->list[number];
    size_t bytes = (size_t)(s->hf_rows * width_of(s)) * loom_dtype_size(dtype);
    char *values = malloc(bytes + 1);
    loom_status status = values ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", s->hf);
    for (int64_t i = number; i < m->count && !status; i++)
        if (strcmp(m->list[i].hf, s->hf) == 0)
            status = read_rows(m, from, &m->list[i], dtype, values);
    if (!status)
        status = loom_safetensors_writer_write(to, values, bytes);
    free(values);
    report(m, bytes);
    return status;
}

static loom_status write_weights(mixtral *m, const loom_checkpoint *from, const char *path) {
    const loom_checkpoint_tensor *embedding = NULL;
    loom_safetensors_writer *to = NULL;
    LOOM_TRY(find(from, m->list[0].key, &embedding));
    loom_dtype dtype = embedding->dtype;
    count_all(m, loom_dtype_size(dtype));
    loom_status status = loom_safetensors_writer_create(path, &to);
    if (!status)
        status = loom_safetensors_writer_metadata(to, "format", "pt"); /* transformers asks for it */
    if (!status)
        status = loom_safetensors_writer_metadata(to, "producer", LOOM__HF_PRODUCER);
    for (int64_t i = 0; i < m->count && !status; i++) {
        const stretch *s = &m->list[i];
        const int64_t shape[] = {s->hf_rows, s->columns};
        if (is_first(m, i))
            status = loom_safetensors_writer_add(to, s->hf, dtype, s->columns ? 2 : 1, shape);
    }
    for (int64_t i = 0; i < m->count && !status; i++)
        if (is_first(m, i))
            status = write_tensor(m, i, from, dtype, to);
    if (!status)
        status = loom_safetensors_writer_finish(to);
    loom_safetensors_writer_destroy(to);
    return status;
}

static loom_status fill_directory(mixtral *m, const loom_checkpoint *from, const char *source, const char *temporary) {
    char *weights = loom__path_join(temporary, "/", "model.safetensors");
    loom_status status = weights ? loom__tool_copy_config(source, temporary)
                                 : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", temporary);
    if (!status)
        status = loom__hf_directory_copy_companions(source, temporary);
    if (!status)
        status = write_weights(m, from, weights);
    free(weights);
    return status;
}

static loom_status export(mixtral *m, const char *in, const char *source, const char *out) {
    loom_checkpoint *from = NULL;
    char *temporary = NULL;
    int lock = -1;
    LOOM_TRY(loom_checkpoint_open(in, &from));
    loom_status status = loom__hf_directory_begin(out, &temporary, &lock);
    if (!status)
        status = fill_directory(m, from, source, temporary);
    if (!status)
        status = loom__hf_directory_commit(out);
    else
        loom__hf_directory_discard(temporary);
    if (lock >= 0)
        close(lock);
    free(temporary);
    loom_checkpoint_close(from);
    return status;
}

/* ---- both */

loom_status loom__convert_mixtral(
    const char *in, const char *source, const char *out, const loom_tool_progress *progress) {
    mixtral m = {.progress = progress};
    loom_status status = read_sizes(source ? source : in, &m.of);
    if (!status)
        status = make_list(&m);
    if (!status)
        status = source ? export(&m, in, source, out) : import(&m, in, out);
    free(m.list);
    return status;
}
