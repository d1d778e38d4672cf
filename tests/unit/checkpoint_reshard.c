/* What one layout writes, another reads: whole states are cut by the shard map of spec (which a plan does not use), put
 * into the chunks that the sharded state names, and read back by plans at another layout. */
#include "checkpoint/reshard.h"
#include "checkpoint/written.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { LAYERS = 4, ARRAYS = 4, VOCABULARY = 37 };

static void must(loom_status status) {
    if (status)
        fail_msg("%s", loom_error_message());
}

static void *make(size_t bytes) {
    void *memory = calloc(1, bytes + 1);
    assert_non_null(memory);
    return memory;
}

typedef struct model {
    bool gated, tied, replicated;
    int64_t every; /* this many layers one has experts; 0: none */
} model;

typedef struct world {
    int64_t tp, pp, vpp, dp;
    int64_t ep, etp; /* of a model with experts */
    bool apart;      /* these have an optimizer of their own where they need none, as we once wrote it */
} world;

typedef struct cut {
    loom__model_spec *spec;
    loom_stage *stages;
    loom__sharded_layout layout;
} cut;

static loom_model_config config_of(const model *of) {
    return (loom_model_config){.architecture = of->gated ? "llama" : "gpt2",
        .num_layers = LAYERS,
        .hidden_size = 24,
        .ffn_hidden_size = 40,
        .num_attention_heads = 4,
        .num_query_groups = 2,
        .seq_length = 16,
        .vocab_size = VOCABULARY,
        .make_vocab_size_divisible_by = 8,
        .normalization = of->gated ? LOOM_RMSNORM : LOOM_LAYERNORM,
        .layernorm_epsilon = 1e-5,
        .activation = of->gated ? LOOM_SWIGLU : LOOM_GELU_TANH,
        .position_embedding_type = of->gated ? LOOM_POSITION_ROPE : LOOM_POSITION_LEARNED,
        .rotary_base = 10000,
        .add_bias_linear = !of->gated,
        .replicate_query_groups = of->replicated,
        .share_embeddings_and_output_weights = of->tied,
        .init_method_std = 0.02,
        .moe = {.num_moe_experts = of->every ? 4 : 0,
            .moe_ffn_hidden_size = 20,
            .moe_layer_freq.every = of->every,
            .moe_shared_expert_intermediate_size = of->every > 1 ? 16 : 0}};
}

static cut make_cut(const model *of, const world *size) {
    cut made = {0};
    loom_model_config config = config_of(of);
    must(loom__model_config_complete(&config, size->tp, size->tp > 1));
    must(loom__model_spec_create(&config, &made.spec));
    loom_stage_split split = {
        .layers = LAYERS, .pipeline_model_parallel_size = size->pp, .virtual_pipeline_model_parallel_size = size->vpp};
    int64_t chunks = 1;
    must(loom_stage_split_chunks(&split, &chunks));
    made.stages = make((size_t)(chunks * size->pp) * sizeof *made.stages);
    must(loom_stage_split_make(&split, made.stages));
    made.layout = (loom__sharded_layout){.spec = made.spec,
        .tp = size->tp,
        .pp = size->pp,
        .dp = size->dp,
        .etp = size->etp,
        .ep = size->ep,
        .edp = of->every ? size->tp * size->dp / (size->etp * size->ep) : 0,
        .chunks = chunks,
        .stages = made.stages,
        .bucket_size = 1500,
        .experts_apart = size->apart};
    return made;
}

/* Of rank `number`, tensor ranks first, then those of a pipeline. */
static loom__sharded_place place_of(const loom__sharded_layout *layout, int64_t number) {
    int64_t all = layout->tp * layout->dp, rank = number % all;
    loom__sharded_place at = {.stage = number / all, .tp_rank = rank % layout->tp, .dp_rank = rank / layout->tp};
    if (loom__layout_has_experts(layout)) {
        at.etp_rank = rank % layout->etp;
        at.ep_rank = rank / layout->etp % layout->ep;
        at.edp_rank = rank / (layout->etp * layout->ep);
    }
    return at;
}

static void free_cut(cut *made) {
    loom__model_spec_destroy(made->spec);
    free(made->stages);
}

/* No two elements of a model are alike. */
static double element(int array, int64_t canonical, int64_t place) {
    return 1.0 + (double)place + 1e5 * (double)canonical + 1e8 * array;
}

typedef struct filling {
    double *values;
    int array;
    int64_t canonical;
} filling;

static loom_status fill_run(void *context, int64_t local, int64_t place, int64_t count) {
    const filling *fill = context;
    for (int64_t i = 0; i < count; i++)
        fill->values[local + i] = place < 0 ? 0.0 : element(fill->array, fill->canonical, place + i);
    return LOOM_OK;
}

/* A rank's local tensor, by the shard map of spec. */
static double *local_tensor(
    const cut *of, int array, int64_t canonical, const loom__sharded_place *at, int64_t *count) {
    const loom__parameter_descriptor *parameter = &of->spec->parameters[canonical];
    int64_t shape[2], tensor = loom__layout_tensor_size(&of->layout, parameter);
    loom__parameter_local_shape(of->spec, parameter, tensor, shape);
    *count = shape[0] * shape[1];
    filling fill = {make((size_t)*count * sizeof(double)), array, canonical};
    must(loom__parameter_shard_runs(
        of->spec, parameter, tensor, loom__place_tensor_rank(at, parameter), fill_run, &fill));
    return fill.values;
}

/* ---- a checkpoint in memory */

typedef struct written {
    int64_t count;
    loom__stored_tensor *tensors;
    double ***data; /* [tensor][chunk] */
} written;

static int64_t tensor_of(written *to, const loom__state_entry *entry) {
    for (int64_t i = 0; i < to->count; i++)
        if (strcmp(to->tensors[i].key, entry->key) == 0)
            return i;
    to->tensors = realloc(to->tensors, (size_t)(to->count + 1) * sizeof *to->tensors);
    to->data = realloc(to->data, (size_t)(to->count + 1) * sizeof *to->data);
    assert_true(to->tensors && to->data);
    loom__stored_tensor tensor = {.key = strdup(entry->key), .dims = entry->dims};
    memcpy(tensor.shape, entry->shape, sizeof entry->shape);
    to->tensors[to->count] = tensor;
    to->data[to->count] = NULL;
    return to->count++;
}

static void write_entry(
    written *to, const cut *of, const loom__part *part, const loom__state_entry *entry, const loom__sharded_place *at) {
    int64_t number = tensor_of(to, entry);
    loom__stored_tensor *tensor = &to->tensors[number];
    double ***data = &to->data[number];
    size_t count = (size_t)tensor->chunk_count + 1;
    loom__stored_chunk *chunks = realloc((void *)tensor->chunks, count * sizeof *chunks);
    *data = realloc(*data, count * sizeof **data);
    assert_true(chunks && *data);
    chunks[count - 1] = (loom__stored_chunk){0};
    memcpy(chunks[count - 1].offset, entry->offset, sizeof entry->offset);
    memcpy(chunks[count - 1].size, entry->size, sizeof entry->size);
    double *values = make((size_t)entry->count * sizeof(double));
    for (int64_t i = 0; i < entry->count; i++)
        values[i] = -7.0; /* of a gap */
    if (entry->entry >= 0) {
        int64_t elements;
        double *local = local_tensor(of, entry->array, part->entries[entry->entry].canonical, at, &elements);
        assert_true(entry->at >= 0 && entry->at + entry->count <= elements);
        memcpy(values, local + entry->at, (size_t)entry->count * sizeof(double));
        free(local);
    }
    (*data)[count - 1] = values;
    tensor->chunks = chunks;
    tensor->chunk_count = (int64_t)count;
}

static written write_all(const cut *of, const loom__sharded_options *options) {
    written to = {0};
    for (int64_t rank = 0; rank < of->layout.pp * of->layout.tp * of->layout.dp; rank++) {
        loom__sharded_place at = place_of(&of->layout, rank);
        loom__part *part = NULL;
        loom__sharded_state *state = NULL;
        must(loom__sharded_part(&of->layout, at.stage, at.ep_rank, &part));
        must(loom__sharded_state_create(&of->layout, options, part, &at, &state));
        for (int64_t i = 0; i < state->count; i++)
            if (loom__state_entry_is_main(&state->entries[i]) && !state->entries[i].object)
                write_entry(&to, of, part, &state->entries[i], &at);
        loom__sharded_state_destroy(state);
        loom__part_destroy(part);
    }
    return to;
}

static void free_written(written *to) {
    for (int64_t i = 0; i < to->count; i++) {
        for (int64_t c = 0; c < to->tensors[i].chunk_count; c++)
            free(to->data[i][c]);
        free(to->data[i]);
        free((void *)to->tensors[i].key);
        free((void *)to->tensors[i].chunks);
    }
    free(to->tensors);
    free(to->data);
}

/* ---- reading it */

/* Thirds of each tensor that do not end with its rows, as a sharded optimizer has them. */
static int64_t want_third(loom__reshard_want *wants, int array, int64_t canonical, int64_t elements, int64_t third) {
    int64_t first = elements * third / 3, end = elements * (third + 1) / 3;
    *wants =
        (loom__reshard_want){.array = array, .canonical = canonical, .first = first, .count = end - first, .at = 5};
    return end > first;
}

static void run_copies(const loom__reshard_plan *plan, const written *from, double **arrays) {
    for (int64_t i = 0; i < plan->count; i++) {
        const loom__reshard_copy *c = &plan->copies[i];
        const double *chunk = from->data[c->tensor][c->chunk];
        for (int64_t row = 0; row < c->copy.rows; row++)
            memcpy(arrays[c->want] + c->copy.to + row * c->copy.to_stride,
                chunk + c->copy.from + row * c->copy.from_stride, (size_t)c->copy.columns * sizeof(double));
    }
}

/* The parameters of experts, or the others: a plan is for the tensor ranks of one kind. */
static void read_kind(const cut *of, const loom__reshard_source *source, const written *from,
    const loom__sharded_place *at, bool experts, bool optimizer) {
    loom__part *part = NULL;
    must(loom__sharded_part(&of->layout, at->stage, at->ep_rank, &part));
    int64_t room = part->count * ARRAYS * 3, count = 0, elements;
    loom__reshard_want *wants = make((size_t)room * sizeof *wants);
    for (int64_t i = 0; i < part->count; i++) {
        int64_t canonical = part->entries[i].canonical;
        if ((of->spec->parameters[canonical].expert >= 0) != experts)
            continue;
        free(local_tensor(of, 0, canonical, at, &elements));
        wants[count++] = (loom__reshard_want){.canonical = canonical, .count = elements, .at = 5};
        for (int third = 0; third < 3 && optimizer; third++)
            for (int array = 1; array < ARRAYS; array++)
                count += want_third(&wants[count], array, canonical, elements, third);
    }
    double **arrays = make((size_t)count * sizeof *arrays);
    for (int64_t i = 0; i < count; i++)
        arrays[i] = make((size_t)(wants[i].count + 5) * sizeof(double));
    loom__reshard_plan *plan = NULL;
    must(loom__reshard_plan_create(source, of->spec, experts ? of->layout.etp : of->layout.tp,
        experts ? at->etp_rank : at->tp_rank, wants, count, &plan));
    assert_int_equal(plan->missing_count, 0);
    run_copies(plan, from, arrays);
    for (int64_t i = 0; i < count; i++) {
        double *wanted = local_tensor(of, wants[i].array, wants[i].canonical, at, &elements);
        if (memcmp(arrays[i] + 5, wanted + wants[i].first, (size_t)wants[i].count * sizeof(double)) != 0)
            fail_msg("%s, array %d, from element %lld on, tp rank %lld of %lld, stage %lld of %lld",
                of->spec->parameters[wants[i].canonical].name, wants[i].array, (long long)wants[i].first,
                (long long)at->tp_rank, (long long)of->layout.tp, (long long)at->stage, (long long)of->layout.pp);
        free(wanted);
        free(arrays[i]);
    }
    loom__reshard_plan_destroy(plan);
    loom__part_destroy(part);
    free(arrays);
    free(wants);
}

static loom__sharded_options options_of(loom__optimizer_form form, bool singleton) {
    return (loom__sharded_options){.prefix = singleton ? "module." : "",
        .singleton_local_shards = singleton,
        .param_dtype = LOOM_BF16,
        .grad_dtype = LOOM_F32,
        .form = form,
        .moments = 2,
        .moment = {{"exp_avg", LOOM_F32}, {"exp_avg_sq", LOOM_F32}}};
}

static void reshard(
    const model *of, const world *source_size, const world *target_size, const loom__sharded_options *options) {
    cut from = make_cut(of, source_size), to = make_cut(of, target_size);
    written stored = write_all(&from, options);
    loom__stored_state state = {.tensors = stored.tensors, .count = stored.count, .layout = &from.layout};
    loom__reshard_source *source = NULL;
    must(loom__reshard_source_create(to.spec, &state, options, &source));
    loom__reshard_leftover left = loom__reshard_source_leftover(source);
    assert_true(left.unexpected_count == 0 && left.misshaped_count == 0);
    for (int64_t rank = 0; rank < to.layout.tp * to.layout.dp * to.layout.pp; rank++) {
        loom__sharded_place at = place_of(&to.layout, rank);
        for (int experts = 0; experts < (of->every ? 2 : 1); experts++)
            read_kind(&to, source, &stored, &at, experts, options->form != LOOM__OPTIMIZER_ABSENT);
    }
    loom__reshard_source_destroy(source);
    free_written(&stored);
    free_cut(&from);
    free_cut(&to);
}

static const model models[] = {
    {true, false, false, 0}, {true, true, false, 0}, {false, true, false, 0}, {true, false, true, 0}};
static const world worlds[] = {{1, 1, 0, 1, 0, 0, false}, {2, 1, 0, 1, 0, 0, false}, {1, 2, 0, 1, 0, 0, false},
    {2, 2, 0, 1, 0, 0, false}, {2, 1, 0, 2, 0, 0, false}, {1, 2, 2, 1, 0, 0, false}, {1, 1, 0, 3, 0, 0, false},
    {4, 2, 0, 2, 0, 0, false}};

static void every_layout_reads_what_every_other_wrote(void **state) {
    (void)state;
    enum { WORLDS = sizeof worlds / sizeof *worlds };
    static const loom__optimizer_form forms[] = {
        LOOM__OPTIMIZER_WHOLE, LOOM__OPTIMIZER_FULLY_RESHARDABLE, LOOM__OPTIMIZER_DP_RESHARDABLE};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        for (int pair = 0; pair < WORLDS * WORLDS; pair++) {
            const world *from = &worlds[pair / WORLDS], *to = &worlds[pair % WORLDS];
            if (!models[m].replicated && (from->tp > 2 || to->tp > 2))
                continue;
            for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
                loom__sharded_options whole = options_of(forms[f], false), layers = options_of(forms[f], true);
                reshard(&models[m], from, to, &whole);
                if (f == 0)
                    reshard(&models[m], from, to, &layers);
            }
        }
}

static void experts_are_read_at_other_expert_and_expert_tensor_sizes(void **state) {
    (void)state;
    /* The last one has biases, as it has no gates. */
    static const model with[] = {{true, false, false, 1}, {true, true, false, 2}, {false, true, false, 2}};
    static const world sizes[] = {{1, 1, 0, 1, 1, 1, false}, {1, 1, 0, 2, 2, 1, false}, {2, 1, 0, 1, 1, 2, false},
        {2, 1, 0, 2, 4, 1, false}, {1, 1, 0, 4, 2, 2, false}, {1, 2, 2, 2, 2, 1, false}, {2, 2, 0, 1, 2, 1, false},
        {1, 1, 0, 6, 2, 1, false}, {2, 2, 0, 2, 1, 2, false}, {2, 1, 0, 2, 1, 2, true}};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    static const loom__optimizer_form forms[] = {
        LOOM__OPTIMIZER_WHOLE, LOOM__OPTIMIZER_FULLY_RESHARDABLE, LOOM__OPTIMIZER_DP_RESHARDABLE};
    for (size_t m = 0; m < sizeof with / sizeof *with; m++)
        for (int pair = 0; pair < SIZES * SIZES; pair++)
            for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
                loom__sharded_options stacked = options_of(forms[f], false), apart = options_of(forms[f], true);
                stacked.by_shard = true;
                reshard(&with[m], &sizes[pair / SIZES], &sizes[pair % SIZES], &stacked);
                if (f == 0)
                    reshard(&with[m], &sizes[pair / SIZES], &sizes[pair % SIZES], &apart);
            }
}

/* Megatron-Core does not say how experts were shared out: their groups and the columns of their weights do. */
static void who_shared_experts_is_found_in_their_buckets(void **state) {
    (void)state;
    static const model of = {true, false, false, 1};
    static const world sizes[] = {{1, 1, 0, 2, 2, 1, false}, {2, 1, 0, 2, 2, 2, false}, {2, 2, 0, 2, 4, 1, false},
        {1, 1, 0, 4, 2, 2, false}, {2, 2, 0, 2, 1, 2, false}, {2, 2, 0, 2, 1, 2, true}};
    loom__sharded_options options = options_of(LOOM__OPTIMIZER_DP_RESHARDABLE, false);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        cut from = make_cut(&of, &sizes[i]);
        from.layout.bucket_size = loom__ddp_default_bucket_size(1);
        written stored = write_all(&from, &options);
        loom__written found = {0};
        bool any = false;
        must(loom__written_find(&from.spec->config, stored.tensors, stored.count, &found, &any));
        assert_true(any);
        assert_int_equal(found.layout.tp, sizes[i].tp);
        assert_int_equal(found.layout.pp, sizes[i].pp);
        assert_int_equal(found.layout.ep, sizes[i].ep);
        assert_int_equal(found.layout.etp, sizes[i].etp);
        assert_int_equal(loom__layout_chains(&found.layout), sizes[i].apart || sizes[i].ep > 1);
        loom__stored_state as_found = {.tensors = stored.tensors, .count = stored.count, .layout = &found.layout};
        loom__reshard_source *source = NULL;
        must(loom__reshard_source_create(from.spec, &as_found, &options, &source));
        assert_int_equal(loom__reshard_source_leftover(source).unexpected_count, 0);
        loom__reshard_source_destroy(source);
        /* Of a layout that is told the keys say it too. */
        loom__written told = {0};
        from.layout.experts_apart = false;
        must(loom__written_from(&from.spec->config, stored.tensors, stored.count, &from.layout, &told));
        assert_int_equal(loom__layout_chains(&told.layout), sizes[i].apart || sizes[i].ep > 1);
        loom__written_free(&told);
        from.layout.ep = 3;
        loom_error_clear();
        assert_int_equal(
            loom__written_from(&from.spec->config, stored.tensors, stored.count, &from.layout, &(loom__written){0}),
            LOOM_ERR_FORMAT);
        assert_non_null(strstr(loom_error_message(), "num_moe_experts 4"));
        loom__written_free(&found);
        free_written(&stored);
        free_cut(&from);
    }
}

/* ---- what is not there, or not as it should be */

typedef struct sample {
    cut of;
    loom__sharded_options options;
    written stored;
} sample;

static sample make_sample(loom__optimizer_form form) {
    sample made = {.of = make_cut(&models[0], &worlds[1]), .options = options_of(form, false)};
    made.stored = write_all(&made.of, &made.options);
    return made;
}

static loom_status open_sample(const sample *s, bool layout, loom__reshard_source **source) {
    loom__stored_state state = {
        .tensors = s->stored.tensors, .count = s->stored.count, .layout = layout ? &s->of.layout : NULL};
    loom_error_clear();
    return loom__reshard_source_create(s->of.spec, &state, &s->options, source);
}

static void free_sample(sample *s) {
    free_written(&s->stored);
    free_cut(&s->of);
}

static loom__stored_tensor *stored_tensor(sample *s, const char *key) {
    for (int64_t i = 0; i < s->stored.count; i++)
        if (strcmp(s->stored.tensors[i].key, key) == 0)
            return &s->stored.tensors[i];
    fail_msg("%s is not stored", key);
    return NULL;
}

static void a_missing_chunk_an_unknown_key_and_another_shape_are_listed(void **state) {
    (void)state;
    sample s = make_sample(LOOM__OPTIMIZER_ABSENT);
    loom__stored_tensor *norm = stored_tensor(&s, "decoder.final_layernorm.weight"),
                        *fc2 = stored_tensor(&s, "decoder.layers.mlp.linear_fc2.weight"),
                        *qkv = stored_tensor(&s, "decoder.layers.self_attention.linear_qkv.weight");
    const char *key = norm->key;
    norm->key = "decoder.final_layernorm.scale";
    fc2->shape[2]--;
    qkv->chunk_count--;
    loom__reshard_source *source = NULL;
    must(open_sample(&s, false, &source));
    loom__reshard_leftover left = loom__reshard_source_leftover(source);
    assert_int_equal(left.unexpected_count, 1);
    assert_int_equal(left.unexpected[0], norm - s.stored.tensors);
    assert_int_equal(left.misshaped_count, 1);
    assert_int_equal(left.misshaped[0], fc2 - s.stored.tensors);
    int64_t count = 0, missing = 0;
    loom__reshard_want *wants = make((size_t)s.of.spec->count * sizeof *wants);
    for (; count < s.of.spec->count; count++) {
        int64_t elements;
        free(local_tensor(&s.of, 0, count, &(loom__sharded_place){.tp_rank = 1}, &elements));
        wants[count] = (loom__reshard_want){.canonical = count, .count = elements};
    }
    loom__reshard_plan *plan = NULL;
    must(loom__reshard_plan_create(source, s.of.spec, 2, 1, wants, count, &plan));
    for (int64_t i = 0; i < plan->missing_count; i++) {
        const char *name = s.of.spec->parameters[wants[plan->missing[i]].canonical].name;
        missing += strstr(name, "final_layernorm") || strstr(name, "linear_fc2") ||
                   strcmp(name, "decoder.layers.3.self_attention.linear_qkv.weight") == 0;
    }
    assert_int_equal(missing, 1 + LAYERS + 1);
    assert_int_equal(plan->missing_count, missing);
    loom__reshard_plan_destroy(plan);
    wants[0].count++;
    assert_int_equal(loom__reshard_plan_create(source, s.of.spec, 2, 1, wants, 1, &plan), LOOM_ERR_ARGUMENT);
    norm->key = key;
    qkv->chunk_count++;
    free(wants);
    loom__reshard_source_destroy(source);
    free_sample(&s);
}

static void assert_refused(sample *s, bool layout, loom_status wanted, const char *text) {
    loom__reshard_source *source = NULL;
    assert_int_equal(open_sample(s, layout, &source), wanted);
    if (!strstr(loom_error_message(), text))
        fail_msg("found \"%s\", expected \"%s\" in it", loom_error_message(), text);
}

static void chunks_over_each_other_or_outside_are_refused(void **state) {
    (void)state;
    sample s = make_sample(LOOM__OPTIMIZER_ABSENT);
    loom__stored_tensor *qkv = stored_tensor(&s, "decoder.layers.self_attention.linear_qkv.weight");
    loom__stored_chunk *chunk = (loom__stored_chunk *)&qkv->chunks[1], before = *chunk;
    chunk->offset[1]++;
    assert_refused(&s, false, LOOM_ERR_FORMAT, "hold the same element of decoder.layers.1.self_attention.linear_qkv");
    chunk->offset[1] = INT64_MAX - 3;
    assert_refused(&s, false, LOOM_ERR_FORMAT, "linear_qkv.weight, chunk 1, axis 1");
    chunk->offset[1] = -1;
    assert_refused(&s, false, LOOM_ERR_FORMAT, "linear_qkv.weight, chunk 1, axis 1");
    *chunk = before;
    chunk->size[0] = 0;
    assert_refused(&s, false, LOOM_ERR_FORMAT, "linear_qkv.weight, chunk 1, axis 0");
    free_sample(&s);
}

static void buckets_need_the_layout_that_wrote_them(void **state) {
    (void)state;
    sample s = make_sample(LOOM__OPTIMIZER_DP_RESHARDABLE);
    assert_refused(&s, false, LOOM_ERR_ARGUMENT, "expected the layout that wrote it to be known");
    s.of.layout.bucket_size = -1;
    assert_refused(&s, true, LOOM_ERR_FORMAT, "for the layout that wrote it");
    s.of.layout.tp = 1;
    s.of.layout.bucket_size = 1500;
    assert_refused(&s, true, LOOM_ERR_FORMAT, "bucket_idx_0.param: found");
    s.of.layout.tp = 2;
    free_sample(&s);
}

static void a_flattened_shard_is_found_by_its_place(void **state) {
    (void)state;
    cut of = make_cut(&models[0], &worlds[0]);
    const int64_t columns = 24, rows = 80; /* of linear_fc1: gate and up, two tensor ranks */
    loom__stored_chunk chunks[2 * LAYERS * 2] = {0};
    int64_t count = 0;
    for (int64_t layer = 0; layer < LAYERS; layer++)
        for (int64_t shard = 0; shard < 4; shard++)
            chunks[count++] = (loom__stored_chunk){.offset = {layer, shard}, .size = {1, 1, 1, rows / 4 * columns}};
    loom__stored_tensor tensor = {.key = "optimizer.state.exp_avg.module.decoder.layers.mlp.linear_fc1.weight",
        .dims = 4,
        .shape = {LAYERS, 4, 1, rows / 4 * columns},
        .original_dims = 3,
        .original_shape = {LAYERS, rows, columns},
        .chunk_count = count,
        .chunks = chunks};
    loom__stored_state stored = {.tensors = &tensor, .count = 1};
    loom__sharded_options options = options_of(LOOM__OPTIMIZER_MODEL_SPACE, false);
    loom__reshard_source *source = NULL;
    must(loom__reshard_source_create(of.spec, &stored, &options, &source));
    loom__reshard_want want = {.array = LOOM__STATE_MOMENT, .first = 30 * columns + 7, .count = 1};
    while (strcmp(of.spec->parameters[want.canonical].name, "decoder.layers.2.mlp.linear_fc1.weight") != 0)
        want.canonical++;
    loom__reshard_plan *plan = NULL;
    must(loom__reshard_plan_create(source, of.spec, 1, 0, &want, 1, &plan));
    assert_int_equal(plan->count, 1);
    assert_int_equal(plan->copies[0].chunk, 2 * 4 + 1); /* row 30 of 80 is in the second shard of 20 */
    assert_int_equal(plan->copies[0].copy.from, 10 * columns + 7);
    loom__reshard_plan_destroy(plan);
    loom__reshard_source_destroy(source);
    tensor.shape[3]--;
    loom_error_clear();
    assert_int_equal(loom__reshard_source_create(of.spec, &stored, &options, &source), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "is flattened"));
    free_cut(&of);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_reads_what_every_other_wrote),
        cmocka_unit_test(experts_are_read_at_other_expert_and_expert_tensor_sizes),
        cmocka_unit_test(who_shared_experts_is_found_in_their_buckets),
        cmocka_unit_test(a_missing_chunk_an_unknown_key_and_another_shape_are_listed),
        cmocka_unit_test(chunks_over_each_other_or_outside_are_refused),
        cmocka_unit_test(buckets_need_the_layout_that_wrote_them),
        cmocka_unit_test(a_flattened_shard_is_found_by_its_place),
    };
    return cmocka_run_group_tests_name("unit.checkpoint_reshard", tests, NULL, NULL);
}
