/* Sorting what a checkpoint holds to the parameters of a model. A key names an array and a kind of parameter, the place
 * of a chunk tells the rest; each chunk becomes rectangles of canonical tensors, whatever form it was stored in: whole
 * tensors, flat buckets, flattened shards. The invariant: a copy (a replicated parameter in a second tensor rank's
 * bucket, the head of tied embeddings) gives no piece, so that pieces of a sound checkpoint never overlap. */
#include "checkpoint/source.h"
#include <stdio.h>
#include <stdlib.h>

/* A key of the model and what it stands for. */
typedef struct name {
    char key[LOOM__STATE_KEY_BYTES];
    int64_t layer;  /* of a key without a layer number, else -1 */
    int64_t expert; /* of one whose tensor has those of a layer, else -1 */
    int64_t canonical;
    int half; /* -1 whole, 0 gate, 1 up */
} name;

typedef struct sorter {
    loom__reshard_source *source;
    const loom__stored_state *stored;
    const loom__sharded_options *options;
    name *names; /* sorted by key, layer and expert */
    int64_t name_count;
    loom__part **parts; /* [bucket_parts] of the stored layout, by stage and place among ep; NULL without one */
    loom__state_buckets **buckets;
} sorter;

static int compare_names(const void *left, const void *right) {
    const name *a = left, *b = right;
    int order = strcmp(a->key, b->key);
    if (order || a->layer != b->layer)
        return order ? order : a->layer < b->layer ? -1 : 1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

static name *add_name(sorter *s, int64_t canonical, loom__key_style style, int half) {
    const loom__parameter_descriptor *parameter = &s->source->spec->parameters[canonical];
    name *added = &s->names[s->name_count++];
    *added = (name){.layer = style == LOOM__KEYS_STACKED ? parameter->layer : -1,
        .expert = style == LOOM__KEYS_SINGLETON ? -1 : parameter->expert,
        .canonical = canonical,
        .half = half};
    loom__state_key(parameter, style, half, added->key);
    return added;
}

/* Transformer Engine fuses no norm into a layer of experts; Megatron-Core's own modules are written as if it did. */
static void add_spellings(sorter *s, int64_t canonical, loom__key_style style) {
    static const char fused[] = "mlp.linear_fc1.layer_norm_";
    const loom__parameter_descriptor *parameter = &s->source->spec->parameters[canonical];
    add_name(s, canonical, style, -1);
    if (!strstr(parameter->name, "pre_mlp_layernorm.") ||
        !loom__layer_has_experts(&s->source->spec->config, parameter->layer))
        return;
    name *added = add_name(s, canonical, style, -1);
    char *at = strstr(added->key, fused);
    snprintf(at, sizeof added->key - (size_t)(at - added->key), "%s", strstr(parameter->name, "pre_mlp_layernorm."));
}

static loom_status list_names(sorter *s) {
    enum { SPELLINGS = 5 };
    const loom__model_spec *spec = s->source->spec;
    bool alike = loom__key_style_of(&spec->config, false) == LOOM__KEYS_STACKED;
    const int64_t tensors = loom__spec_tensors(spec);
    s->names = malloc(((size_t)tensors * SPELLINGS + 1) * sizeof *s->names);
    if (!s->names)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the keys of %lld parameters", (long long)tensors);
    for (int64_t i = 0; i < tensors; i++) {
        const loom__parameter_descriptor *parameter = &spec->parameters[i];
        if (parameter->layer < 0 || alike)
            add_spellings(s, i, LOOM__KEYS_STACKED);
        if (parameter->layer >= 0)
            add_spellings(s, i, LOOM__KEYS_OF_LAYERS);
        if (parameter->expert >= 0)
            add_name(s, i, LOOM__KEYS_SINGLETON, -1);
        for (int half = 0; half < 2 && parameter->shard == LOOM__SHARD_GATE_UP; half++)
            add_name(s, i, LOOM__KEYS_SINGLETON, half);
    }
    qsort(s->names, (size_t)s->name_count, sizeof *s->names, compare_names);
    return LOOM_OK;
}

/* The first name with this key, or NULL. */
static const name *find_name(const sorter *s, const char *key) {
    int64_t low = 0, high = s->name_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(s->names[middle].key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < s->name_count && strcmp(s->names[low].key, key) == 0 ? &s->names[low] : NULL;
}

static const char *skip(const char *text, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) == 0 ? text + length : NULL;
}

/* The array whose name `text` begins with, followed by `end`; *behind is what comes then. -1: none. */
static int find_array(const sorter *s, const char *text, char end, const char **behind) {
    static const char *const masters[] = {"param", "fp32_param"};
    for (int i = 0; i < 2 + s->options->moments; i++) {
        const char *rest = skip(text, i < 2 ? masters[i] : s->options->moment[i - 2].name);
        if (rest && *rest == end) {
            *behind = rest + (end != '\0');
            return i < 2 ? LOOM__STATE_MASTER : LOOM__STATE_MOMENT + i - 2;
        }
    }
    return -1;
}

static loom_status add_piece(sorter *s, const loom__source_piece *piece) {
    loom__reshard_source *source = s->source;
    if (source->count == source->room) {
        int64_t room = source->room ? 2 * source->room : 256;
        loom__source_piece *grown = realloc(source->pieces, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld pieces of a checkpoint", (long long)room);
        source->pieces = grown;
        source->room = room;
    }
    source->pieces[source->count++] = *piece;
    return LOOM_OK;
}

static loom_status check_chunk(const loom__stored_tensor *tensor, int64_t number) {
    const loom__stored_chunk *chunk = &tensor->chunks[number];
    for (int i = 0; i < tensor->dims; i++)
        if (chunk->offset[i] < 0 || chunk->size[i] < 1 || chunk->offset[i] > tensor->shape[i] - chunk->size[i])
            return loom_fail(LOOM_ERR_FORMAT,
                "checkpoint: %s, chunk %lld, axis %d: found %lld elements from %lld on, expected them inside %lld",
                tensor->key, (long long)number, i, (long long)chunk->size[i], (long long)chunk->offset[i],
                (long long)tensor->shape[i]);
    return LOOM_OK;
}

/* Axes that number what shares a key. */
static int leading_axes(const name *named) {
    return (named->layer >= 0) + (named->expert >= 0);
}

/* The name of a key whose tensor has layer `layer` and expert `expert` at those places of its leading axes. */
static const name *name_at(const sorter *s, const name *named, int64_t layer, int64_t expert) {
    int64_t experts = named->expert >= 0 ? s->source->spec->config.moe.num_moe_experts : 1;
    return &named[layer * experts + expert];
}

/* Shape [layer,] [expert,] rows [, columns] of a parameter, half of the rows for a half. Rows of a vocabulary may be
 * any. */
static bool has_shape(const sorter *s, const name *named, int dims, const int64_t *shape) {
    const loom__model_spec *spec = s->source->spec;
    const loom__parameter_descriptor *parameter = &spec->parameters[named->canonical];
    int layered = named->layer >= 0, leading = leading_axes(named);
    if (dims != leading + parameter->dims || (layered && shape[0] != spec->config.num_layers) ||
        (named->expert >= 0 && shape[layered] != spec->config.moe.num_moe_experts))
        return false;
    int64_t rows = parameter->shape[0] / (named->half < 0 ? 1 : 2);
    int64_t elements;
    if (__builtin_mul_overflow(shape[leading], parameter->shape[1], &elements))
        return false;
    return (shape[leading] == rows || parameter->embedding_or_output) &&
           (parameter->dims == 1 || shape[leading + 1] == parameter->shape[1]);
}

static loom_status add_whole(sorter *s, const name *named, int array, int64_t number) {
    const loom__stored_tensor *tensor = &s->stored->tensors[number];
    const loom__parameter_descriptor *parameter = &s->source->spec->parameters[named->canonical];
    int layered = named->layer >= 0, leading = leading_axes(named);
    int64_t skipped = named->half > 0 ? parameter->shape[0] / 2 : 0;
    for (int64_t c = 0; c < tensor->chunk_count; c++) {
        const loom__stored_chunk *chunk = &tensor->chunks[c];
        LOOM_TRY(check_chunk(tensor, c));
        int64_t layer = layered ? chunk->offset[0] : 0, layers = layered ? chunk->size[0] : 1;
        int64_t expert = leading > layered ? chunk->offset[layered] : 0;
        int64_t experts = leading > layered ? chunk->size[layered] : 1;
        int64_t rows = chunk->size[leading], columns = parameter->dims == 2 ? chunk->size[leading + 1] : 1;
        for (int64_t i = 0; i < layers * experts; i++) {
            loom__source_piece piece = {.array = array,
                .canonical = name_at(s, named, layer + i / experts, expert + i % experts)->canonical,
                .tensor = number,
                .chunk = c,
                .box = {
                    .first = {chunk->offset[leading] + skipped, parameter->dims == 2 ? chunk->offset[leading + 1] : 0},
                    .count = {rows, columns},
                    .at = i * rows * columns,
                    .stride = columns}};
            LOOM_TRY(add_piece(s, &piece));
        }
    }
    return LOOM_OK;
}

static loom_status add_range(
    sorter *s, loom__source_piece piece, const loom__box *box, int64_t first, int64_t count, int64_t at) {
    loom__box boxes[LOOM__RANGE_BOXES];
    int made = loom__box_range(box, first, count, at, boxes);
    for (int i = 0; i < made; i++) {
        piece.box = boxes[i];
        LOOM_TRY(add_piece(s, &piece));
    }
    return LOOM_OK;
}

/* Axes but the last one number the shards; the last one is a shard, row-major. */
static loom_status add_flattened(sorter *s, const name *named, int array, int64_t number) {
    const loom__stored_tensor *tensor = &s->stored->tensors[number];
    int axes = tensor->original_dims, layered = named->layer >= 0, leading = leading_axes(named);
    int64_t local[LOOM__STORED_DIMS] = {0}, elements = 1;
    bool fits = tensor->dims == axes + 1;
    for (int i = 0; i < axes && fits; i++) {
        fits = tensor->shape[i] > 0 && tensor->original_shape[i] % tensor->shape[i] == 0;
        local[i] = fits ? tensor->original_shape[i] / tensor->shape[i] : 0;
        elements *= local[i];
    }
    bool single = true;
    for (int i = 0; i < leading && fits; i++)
        single = single && local[i] == 1;
    if (!fits || tensor->shape[axes] != elements || !single)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: %s is flattened, but its last axis is not a shard of the other axes' number: found %lld "
            "elements, expected %lld%s",
            tensor->key, (long long)tensor->shape[tensor->dims - 1], (long long)elements,
            leading > layered ? ", of one expert"
            : layered         ? ", of one layer"
                              : "");
    for (int64_t c = 0; c < tensor->chunk_count; c++) {
        const loom__stored_chunk *chunk = &tensor->chunks[c];
        LOOM_TRY(check_chunk(tensor, c));
        for (int i = 0; i < axes; i++)
            if (chunk->size[i] != 1)
                return loom_fail(LOOM_ERR_FORMAT,
                    "checkpoint: %s, chunk %lld, axis %d: found %lld shards in one chunk, expected 1", tensor->key,
                    (long long)c, i, (long long)chunk->size[i]);
        loom__box shard = {.count = {local[leading], 1}};
        shard.first[0] = chunk->offset[leading] * local[leading];
        if (axes > leading + 1) {
            shard.count[1] = local[leading + 1];
            shard.first[1] = chunk->offset[leading + 1] * local[leading + 1];
        }
        shard.stride = shard.count[1];
        const name *of =
            name_at(s, named, layered ? chunk->offset[0] : 0, leading > layered ? chunk->offset[layered] : 0);
        loom__source_piece piece = {.array = array, .canonical = of->canonical, .tensor = number, .chunk = c};
        LOOM_TRY(add_range(s, piece, &shard, chunk->offset[axes], chunk->size[axes], 0));
    }
    return LOOM_OK;
}

/* One place of a bucket, as far as it lies in a chunk of the bucket that begins at `offset`. */
static loom_status add_place(sorter *s, loom__source_piece piece, const loom__part_entry *entry,
    const loom__sharded_place *at, int64_t start, const loom__stored_chunk *chunk) {
    const loom__sharded_layout *layout = s->stored->layout;
    const loom__parameter_descriptor *parameter = &layout->spec->parameters[entry->canonical];
    loom__shard_box boxes[LOOM__SHARD_BOXES];
    int count = loom__shard_boxes(layout->spec, parameter, loom__layout_tensor_size(layout, parameter),
        loom__place_tensor_rank(at, parameter), boxes);
    piece.canonical = entry->canonical;
    for (int i = 0; i < count && !entry->copy; i++)
        if (boxes[i].replica == 0)
            LOOM_TRY(add_range(s, piece, &boxes[i].box, chunk->offset[0] - start, chunk->size[0], 0));
    return LOOM_OK;
}

static int64_t expert_ranks(const loom__sharded_layout *layout) {
    return loom__layout_has_experts(layout) ? layout->ep : 1;
}

/* Of the buckets of a stage and a place among ep. */
static int64_t bucket_parts(const loom__sharded_layout *layout) {
    return layout->pp * expert_ranks(layout);
}

static loom_status bucket_buffers(sorter *s) {
    const loom__sharded_layout *layout = s->stored->layout;
    size_t parts = (size_t)bucket_parts(layout);
    s->parts = calloc(parts, sizeof(loom__part *));
    s->buckets = calloc(parts, sizeof(loom__state_buckets *));
    if (!s->parts || !s->buckets)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the buckets of %zu stages", parts);
    for (int64_t i = 0; i < (int64_t)parts; i++) {
        int64_t stage = i / expert_ranks(layout);
        LOOM_TRY(loom__sharded_part(layout, stage, i % expert_ranks(layout), &s->parts[i]));
        LOOM_TRY(loom__state_buckets_create(layout, s->parts[i], stage, &s->buckets[i]));
    }
    return LOOM_OK;
}

/* Optimizers that are chained say so in older checkpoints, and in dp_reshardable ones. */
static const char *skip_chain(const char *key) {
    const char *inner = skip(key, "chained_0.");
    if (!inner)
        inner = skip(key, "chained_1.");
    return inner ? inner : key;
}

/* What the key of a bucket says. */
typedef struct bucket_key {
    bool experts;
    long long group, gbuf, index;
    const char *array;
} bucket_key;

static bool read_bucket_key(const char *key, bucket_key *out) {
    int length = 0;
    const char *inner = skip_chain(key);
    *out = (bucket_key){.experts = skip(key, "chained_1.") != NULL};
    if (sscanf(inner, "optimizer.distributed.dp_group_idx_%lld.gbuf_idx_%lld.dtype_(%*[^)]).bucket_idx_%lld.%n",
            &out->group, &out->gbuf, &out->index, &length) != 3 ||
        length == 0)
        return false;
    out->array = inner + length;
    return true;
}

/* The rank of a data-parallel group whose other coordinates are 0; false: there is no such group. */
static bool find_place(const loom__sharded_layout *layout, const bucket_key *key, loom__sharded_place *at) {
    int64_t tensor = key->experts ? layout->etp : layout->tp, shares = key->experts ? layout->ep : 1;
    if ((key->experts && !loom__layout_chains(layout)) || key->group < 0 || key->group / tensor / shares >= layout->pp)
        return false;
    int64_t rank = key->group % tensor, share = key->group / tensor % shares;
    /* Experts that are among the rest are cut as it is. */
    *at = (loom__sharded_place){.stage = key->group / tensor / shares, .tp_rank = rank, .etp_rank = rank};
    if (key->experts)
        *at = (loom__sharded_place){.stage = at->stage, .etp_rank = rank, .ep_rank = share};
    return true;
}

static loom_status find_bucket(sorter *s, const char *text, const bucket_key *key, loom__sharded_place *at,
    int64_t *part, const loom__state_bucket **found) {
    const loom__sharded_layout *layout = s->stored->layout;
    if (!layout)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "checkpoint: %s is a bucket (dp_reshardable), expected the layout that wrote it to be known", text);
    if (!s->buckets)
        LOOM_TRY(bucket_buffers(s));
    bool fits = find_place(layout, key, at);
    *part = fits ? at->stage * expert_ranks(layout) + at->ep_rank : 0;
    for (int64_t b = 0; fits && b < s->buckets[*part]->count; b++) {
        const loom__state_bucket *bucket = &s->buckets[*part]->buckets[b];
        if (bucket->expert == key->experts && bucket->gbuf == key->gbuf && bucket->index == key->index) {
            *found = bucket;
            return LOOM_OK;
        }
    }
    int64_t groups = layout->pp * (key->experts ? layout->etp * layout->ep : layout->tp);
    return loom_fail(LOOM_ERR_FORMAT,
        "checkpoint: %s: the layout that wrote it, %s %lld and pipeline_model_parallel_size %lld, has no such bucket; "
        "expected dp_group_idx 0 to %lld",
        text, key->experts ? "expert tensor x expert ranks" : "tensor_model_parallel_size",
        (long long)(groups / layout->pp), (long long)layout->pp, (long long)(groups - 1));
}

/* *known is whether the key is a bucket's. */
static loom_status add_bucket(sorter *s, int64_t number, bool *known) {
    const loom__stored_tensor *tensor = &s->stored->tensors[number];
    bucket_key key;
    const char *behind;
    const loom__state_bucket *bucket = NULL;
    int array = read_bucket_key(tensor->key, &key) ? find_array(s, key.array, '\0', &behind) : -1;
    *known = array >= 0;
    if (array < 0)
        return LOOM_OK;
    loom__sharded_place at = {0};
    int64_t part = 0;
    LOOM_TRY(find_bucket(s, tensor->key, &key, &at, &part, &bucket));
    if (tensor->dims != 1 || tensor->shape[0] != bucket->unpadded)
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: %s: found %lld elements, expected %lld for the layout that wrote it", tensor->key,
            (long long)tensor->shape[0], (long long)bucket->unpadded);
    const loom__state_buckets *buckets = s->buckets[part];
    for (int64_t c = 0; c < tensor->chunk_count; c++) {
        LOOM_TRY(check_chunk(tensor, c));
        loom__source_piece piece = {.array = array, .tensor = number, .chunk = c};
        for (int64_t p = bucket->first_place; p < bucket->first_place + bucket->places; p++)
            LOOM_TRY(add_place(s, piece, &s->parts[part]->entries[buckets->entries[p]], &at,
                buckets->places[p].start - bucket->start, &tensor->chunks[c]));
    }
    return LOOM_OK;
}

static loom_status sort_tensor(sorter *s, int64_t number) {
    const loom__stored_tensor *tensor = &s->stored->tensors[number];
    loom__reshard_source *source = s->source;
    bool bucket = false;
    if (s->options->weights_alone && skip(skip_chain(tensor->key), "optimizer.")) {
        source->unexpected[source->unexpected_count++] = number;
        return LOOM_OK;
    }
    LOOM_TRY(add_bucket(s, number, &bucket));
    if (bucket)
        return LOOM_OK;
    int array = LOOM__STATE_WEIGHT;
    const char *key = skip_chain(tensor->key), *state = skip(key, "optimizer.state.");
    if (state)
        array = find_array(s, state, '.', &key);
    for (const char *inner; array >= 0 && (inner = skip(key, "module."));)
        key = inner;
    const name *named = array >= 0 ? find_name(s, key) : NULL;
    bool of_optimizer = array != LOOM__STATE_WEIGHT;
    if (!named || (of_optimizer && named->canonical >= source->spec->count)) {
        source->unexpected[source->unexpected_count++] = number;
        return LOOM_OK;
    }
    bool flat = tensor->original_dims > 0;
    if (!has_shape(
            s, named, flat ? tensor->original_dims : tensor->dims, flat ? tensor->original_shape : tensor->shape)) {
        source->misshaped[source->misshaped_count++] = number;
        return LOOM_OK;
    }
    return flat ? add_flattened(s, named, array, number) : add_whole(s, named, array, number);
}

static int compare_pieces(const void *left, const void *right) {
    const loom__source_piece *a = left, *b = right;
    if (a->array != b->array)
        return a->array < b->array ? -1 : 1;
    if (a->canonical != b->canonical)
        return a->canonical < b->canonical ? -1 : 1;
    if (a->box.first[0] != b->box.first[0])
        return a->box.first[0] < b->box.first[0] ? -1 : 1;
    return a->box.first[1] < b->box.first[1] ? -1 : a->box.first[1] > b->box.first[1];
}

/* An element that is there twice could hide one that is missing. */
static loom_status check_overlaps(const sorter *s) {
    const loom__reshard_source *source = s->source;
    for (int64_t i = 0; i < source->count; i++) {
        const loom__source_piece *a = &source->pieces[i];
        for (int64_t j = i + 1; j < source->count; j++) {
            const loom__source_piece *b = &source->pieces[j];
            loom__box_copy both;
            if (a->array != b->array || a->canonical != b->canonical ||
                b->box.first[0] >= a->box.first[0] + a->box.count[0])
                break;
            if (loom__box_meet(&a->box, &b->box, &both))
                return loom_fail(LOOM_ERR_FORMAT,
                    "checkpoint: chunk %lld of %s and chunk %lld of %s hold the same element of %s, expected each once",
                    (long long)a->chunk, s->stored->tensors[a->tensor].key, (long long)b->chunk,
                    s->stored->tensors[b->tensor].key, source->spec->parameters[a->canonical].name);
        }
    }
    return LOOM_OK;
}

static loom_status sort_all(sorter *s) {
    loom__reshard_source *source = s->source;
    size_t count = (size_t)s->stored->count + 1; /* never 0 bytes */
    source->unexpected = calloc(count, sizeof *source->unexpected);
    source->misshaped = calloc(count, sizeof *source->misshaped);
    if (!source->unexpected || !source->misshaped)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tensors", (long long)s->stored->count);
    LOOM_TRY(list_names(s));
    for (int64_t i = 0; i < s->stored->count; i++)
        LOOM_TRY(sort_tensor(s, i));
    if (source->count)
        qsort(source->pieces, (size_t)source->count, sizeof *source->pieces, compare_pieces);
    return check_overlaps(s);
}

loom_status loom__reshard_source_create(const loom__model_spec *spec, const loom__stored_state *stored,
    const loom__sharded_options *options, loom__reshard_source **out) {
    loom__reshard_source *source = calloc(1, sizeof *source);
    if (!source)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a checkpoint of %lld tensors", (long long)stored->count);
    source->spec = spec;
    sorter s = {.source = source, .stored = stored, .options = options};
    loom_status status = sort_all(&s);
    for (int64_t i = 0; stored->layout && i < bucket_parts(stored->layout); i++) {
        if (s.parts)
            loom__part_destroy(s.parts[i]);
        if (s.buckets)
            loom__state_buckets_destroy(s.buckets[i]);
    }
    free(s.parts);
    free(s.buckets);
    free(s.names);
    if (status) {
        loom__reshard_source_destroy(source);
        return status;
    }
    *out = source;
    return LOOM_OK;
}

void loom__reshard_source_destroy(loom__reshard_source *source) {
    if (!source)
        return;
    free(source->pieces);
    free(source->unexpected);
    free(source->misshaped);
    free(source);
}

loom__reshard_leftover loom__reshard_source_leftover(const loom__reshard_source *source) {
    return (loom__reshard_leftover){.unexpected_count = source->unexpected_count,
        .misshaped_count = source->misshaped_count,
        .unexpected = source->unexpected,
        .misshaped = source->misshaped};
}
