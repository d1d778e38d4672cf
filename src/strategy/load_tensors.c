/* Tensors of a checkpoint into a module and its optimizer. What is missing is asked of the whole model, not of a rank's
 * part, so that every rank gives the same answer without a word between them. The invariant: each chunk that a rank
 * needs is read once, and held alone. */
#include "checkpoint/written.h"
#include "model/gpt.h"
#include "optim/optim.h"
#include "strategy/load.h"
#include <stdio.h>
#include <stdlib.h>

struct loom__load {
    const loom_parallel *parallel;
    loom__load_scope scope;
    const loom__gpt *gpt;
    const loom__optimizer_state *state; /* NULL: no optimizer */
    loom__sharded_options options;
    loom__stored_tensor *tensors;
    loom__stored_chunk **chunks; /* [count] */
    int64_t *numbers;            /* [count] of the checkpoint's tensors */
    int64_t count;
    loom__written written;
    loom__reshard_source *source;
    bool masters; /* the checkpoint has them */
};

static loom_status copy_chunks(
    loom__load *load, int64_t number, const char *key, const loom_checkpoint_tensor *tensor) {
    loom__stored_chunk *chunks = calloc((size_t)tensor->chunk_count + 1, sizeof *chunks);
    if (!chunks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)tensor->chunk_count);
    for (int64_t c = 0; c < tensor->chunk_count; c++)
        for (int i = 0; i < tensor->dims; i++) {
            chunks[c].offset[i] = tensor->chunks[c].offsets[i];
            chunks[c].size[i] = tensor->chunks[c].sizes[i];
        }
    load->chunks[number] = chunks;
    loom__stored_tensor *stored = &load->tensors[number];
    *stored = (loom__stored_tensor){.key = key,
        .dims = tensor->dims,
        .original_dims = tensor->original_dims,
        .chunk_count = tensor->chunk_count,
        .chunks = chunks};
    memcpy(stored->shape, tensor->shape, sizeof stored->shape);
    memcpy(stored->original_shape, tensor->original_shape, sizeof stored->original_shape);
    return LOOM_OK;
}

_Static_assert((int)LOOM_CHECKPOINT_MAX_DIMS == (int)LOOM__STORED_DIMS, "shapes are copied whole");

static loom_status list_tensors(loom__load *load) {
    const loom_checkpoint *checkpoint = load->scope.checkpoint;
    int64_t count = loom_checkpoint_get_info(checkpoint)->tensors;
    load->tensors = calloc((size_t)count + 1, sizeof *load->tensors);
    load->chunks = calloc((size_t)count + 1, sizeof(loom__stored_chunk *));
    load->numbers = calloc((size_t)count + 1, sizeof *load->numbers);
    if (!load->tensors || !load->chunks || !load->numbers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tensors", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, i);
        const char *key = loom__load_scope_key(&load->scope, tensor->name);
        /* An optimizer that nobody asks for needs no layout by which its buckets are understood. */
        if (!key || (!load->state && loom__is_of_optimizer(key)))
            continue;
        load->numbers[load->count] = i;
        LOOM_TRY(copy_chunks(load, load->count++, key, tensor));
    }
    return LOOM_OK;
}

static int array_count(const loom__load *load) {
    return load->state ? LOOM__STATE_MOMENT + load->options.moments : LOOM__STATE_MASTER;
}

/* Every parameter of the model, whole. */
static loom_status plan_whole(const loom__load *load, int array, loom__reshard_plan **plan) {
    const loom__model_spec *spec = load->gpt->spec;
    loom__reshard_want *wants = calloc((size_t)spec->count + 1, sizeof *wants);
    if (!wants)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld parameters", (long long)spec->count);
    for (int64_t i = 0; i < spec->count; i++) {
        int64_t shape[2];
        loom__parameter_local_shape(spec, &spec->parameters[i], 1, shape);
        wants[i] = (loom__reshard_want){.array = array, .canonical = i, .count = shape[0] * shape[1]};
    }
    loom_status status = loom__reshard_plan_create(load->source, spec, 1, 0, wants, spec->count, plan);
    free(wants);
    return status;
}

/* As the checkpoint tells, or as its buckets look. */
static loom_status find_layout(loom__load *load, bool *found) {
    const loom_model_config *config = &load->gpt->spec->config;
    loom__sharded_layout told;
    loom_stage *stages = NULL;
    bool tells = false;
    if (!load->state) {
        *found = false;
        return LOOM_OK;
    }
    LOOM_TRY(loom__layout_read(load->scope.root, &told, &stages, &tells));
    if (!tells)
        return loom__written_find(config, load->tensors, load->count, &load->written, found);
    loom_status status = loom__written_from(config, load->tensors, load->count, &told, &load->written);
    free(stages);
    *found = !status;
    return status;
}

static loom_status sort_in(loom__load *load) {
    bool found = false;
    LOOM_TRY(list_tensors(load));
    LOOM_TRY(find_layout(load, &found));
    loom__stored_state stored = {
        .tensors = load->tensors, .count = load->count, .layout = found ? &load->written.layout : NULL};
    LOOM_TRY(loom__reshard_source_create(load->gpt->spec, &stored, &load->options, &load->source));
    if (!load->state)
        return LOOM_OK;
    loom__reshard_plan *plan = NULL;
    LOOM_TRY(plan_whole(load, LOOM__STATE_MASTER, &plan));
    load->masters = plan->missing_count < load->gpt->spec->count;
    loom__reshard_plan_destroy(plan);
    return LOOM_OK;
}

loom_status loom__load_create(
    const loom_parallel *parallel, const loom_optimizer *optimizer, const loom__load_scope *scope, loom__load **out) {
    loom__load *load = calloc(1, sizeof *load);
    if (!load)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the load of a checkpoint");
    load->parallel = parallel;
    load->scope = *scope;
    load->gpt = parallel->module->context;
    load->options = (loom__sharded_options){.prefix = "", .weights_alone = !optimizer};
    if (optimizer) {
        load->state = loom__optimizer_state_of(optimizer);
        load->options.moments = load->state->count;
        for (int i = 0; i < load->state->count; i++)
            load->options.moment[i].name = load->state->arrays[i].name;
    }
    loom_status status = sort_in(load);
    if (status) {
        loom__load_destroy(load);
        return status;
    }
    *out = load;
    return LOOM_OK;
}

void loom__load_destroy(loom__load *load) {
    if (!load)
        return;
    loom__reshard_source_destroy(load->source);
    loom__written_free(&load->written);
    for (int64_t i = 0; load->chunks && i < load->count; i++)
        free(load->chunks[i]);
    free(load->chunks);
    free(load->numbers);
    free(load->tensors);
    free(load);
}

/* ---- what there is */

static loom_status list_missing(const loom__load *load, int array, loom_load_report *report) {
    char prefix[LOOM__STATE_NAME_BYTES];
    loom__reshard_plan *plan = NULL;
    snprintf(prefix, sizeof prefix, "%s", load->scope.prefix);
    if (array != LOOM__STATE_WEIGHT)
        snprintf(prefix, sizeof prefix, "%soptimizer.state.%s.", load->scope.prefix,
            array == LOOM__STATE_MASTER ? "param" : load->options.moment[array - LOOM__STATE_MOMENT].name);
    LOOM_TRY(plan_whole(load, array, &plan));
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < plan->missing_count && !status; i++)
        status = loom__names_add(
            &report->missing, &report->missing_count, prefix, load->gpt->spec->parameters[plan->missing[i]].name);
    loom__reshard_plan_destroy(plan);
    return status;
}

/* What the source could not take. */
static loom_status list_left(
    const loom__load *load, const int64_t *numbers, int64_t left, char ***names, int64_t *count) {
    for (int64_t i = 0; i < left; i++) {
        const char *key = load->tensors[numbers[i]].key;
        if (!loom__is_extra_state(key))
            LOOM_TRY(loom__names_add(names, count, load->scope.prefix, key));
    }
    return LOOM_OK;
}

loom_status loom__load_list(const loom__load *load, loom_load_report *report) {
    loom__reshard_leftover left = loom__reshard_source_leftover(load->source);
    for (int array = 0; array < array_count(load); array++)
        if (array != LOOM__STATE_MASTER || load->masters)
            LOOM_TRY(list_missing(load, array, report));
    LOOM_TRY(list_left(load, left.unexpected, left.unexpected_count, &report->unexpected, &report->unexpected_count));
    return list_left(load, left.misshaped, left.misshaped_count, &report->misshaped, &report->misshaped_count);
}

/* ---- reading */

/* Where the elements of a want go. */
typedef struct sink {
    loom_dtype dtype; /* F32, BF16 or F16 */
    void *values;
} sink;

typedef struct reading {
    const loom__load *load;
    loom__reshard_want *wants;
    sink *sinks;
    int64_t count;
    bool experts; /* whose parameters are wanted, or the others; a plan is for the tensor ranks of one kind */
} reading;

static void add_want(reading *r, loom__reshard_want want, sink to) {
    if ((r->load->gpt->spec->parameters[want.canonical].expert >= 0) != r->experts)
        return;
    r->wants[r->count] = want;
    r->sinks[r->count++] = to;
}

/* The arrays of the parameter of one place of the optimizer's, as far as this rank updates it. */
static void want_state(reading *r, const loom__ddp_view *view, int64_t place, int64_t canonical) {
    const loom__load *load = r->load;
    const loom__ddp_part *part = &view->parts[place];
    loom__reshard_want want = {
        .canonical = canonical, .first = part->start - view->places[place].start, .count = part->count};
    if (load->masters) {
        want.array = LOOM__STATE_MASTER;
        add_want(r, want, (sink){LOOM_F32, view->master ? view->master + part->state : view->data + part->start});
    }
    for (int i = 0; i < load->state->count; i++) {
        const struct loom__optimizer_array *array = &load->state->arrays[i];
        want.array = LOOM__STATE_MOMENT + i;
        add_want(
            r, want, (sink){array->dtype, (char *)array->values + (size_t)part->state * loom_dtype_size(array->dtype)});
    }
}

static void want_weights(reading *r) {
    const loom__part *part = r->load->gpt->part;
    for (int64_t i = 0; i < part->count; i++) {
        const loom_parameter *parameter = r->load->gpt->set->list[i];
        loom__reshard_want want = {.canonical = part->entries[i].canonical, .count = loom_parameter_count(parameter)};
        add_want(r, want, (sink){parameter->dtype, loom_parameter_values(parameter)});
    }
}

/* Masters begin as the weights that are stored, in what precision those are. */
static void want_masters(reading *r, const loom__ddp_view *view, int64_t place, int64_t canonical) {
    const loom__ddp_part *part = &view->parts[place];
    loom__reshard_want want = {
        .canonical = canonical, .first = part->start - view->places[place].start, .count = part->count};
    if (view->master)
        add_want(r, want, (sink){LOOM_F32, view->master + part->state});
}

typedef void (*want_place)(reading *r, const loom__ddp_view *view, int64_t place, int64_t canonical);

static loom_status want_places(reading *r, want_place want) {
    const loom__part *part = r->load->gpt->part;
    const loom__ddp_view *view = loom__ddp_view_of(r->load->parallel->ddp);
    for (int64_t i = 0; i < part->count; i++) {
        int64_t place = part->entries[i].buffer_place;
        const loom_parameter *parameter = r->load->gpt->set->list[i];
        if (view->place_count != part->count || view->parameters[place] != parameter)
            return loom_fail(LOOM_ERR_INTERNAL, "parameter %s is not where the optimizer has it", parameter->name);
        want(r, view, place, part->entries[i].canonical);
    }
    return LOOM_OK;
}

static void copy_box(const loom__box_copy *copy, const float *from, const sink *to) {
    for (int64_t row = 0; row < copy->rows; row++) {
        const float *source = from + copy->from + row * copy->from_stride;
        int64_t first = copy->to + row * copy->to_stride;
        if (to->dtype == LOOM_F32)
            memcpy((float *)to->values + first, source, (size_t)copy->columns * sizeof *source);
        else
            for (int64_t i = 0; i < copy->columns; i++)
                ((uint16_t *)to->values)[first + i] =
                    to->dtype == LOOM_BF16 ? loom_f32_to_bf16(source[i]) : loom_f32_to_f16(source[i]);
    }
}

/* The copies [*at, …) of one chunk. */
static loom_status read_chunk(const reading *r, const loom__reshard_plan *plan, int64_t *at) {
    const loom__reshard_copy *copy = &plan->copies[*at];
    const loom_checkpoint *checkpoint = r->load->scope.checkpoint;
    const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, r->load->numbers[copy->tensor]);
    const loom_checkpoint_chunk *chunk = &tensor->chunks[copy->chunk];
    int64_t tensor_number = copy->tensor, chunk_number = copy->chunk;
    size_t elements = 1;
    for (int i = 0; i < tensor->dims; i++)
        elements *= (size_t)chunk->sizes[i];
    float *values = malloc(elements * sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a chunk of %zu elements of %s", elements, tensor->name);
    loom_status status = loom_checkpoint_read(checkpoint, tensor, chunk->offsets, chunk->sizes, LOOM_F32, values);
    for (; *at < plan->count; (*at)++) {
        copy = &plan->copies[*at];
        if (status || copy->tensor != tensor_number || copy->chunk != chunk_number)
            break;
        copy_box(&copy->copy, values, &r->sinks[copy->want]);
    }
    free(values);
    return status;
}

/* Elements [from, …) of one place, as far as this rank keeps state of them, in an array of it. */
static void clear_kept(const loom__ddp_view *view, int64_t place, int64_t from, loom_dtype dtype, void *values) {
    const loom__ddp_part *part = &view->parts[place];
    int64_t skipped = view->places[place].start + from - part->start, size = (int64_t)loom_dtype_size(dtype);
    skipped = skipped > 0 ? skipped : 0;
    if (values && skipped < part->count)
        memset((char *)values + (part->state + skipped) * size, 0, (size_t)((part->count - skipped) * size));
}

static void clear_rows(const loom__load *load, int64_t number, int64_t from) {
    const loom_parameter *parameter = load->gpt->set->list[number];
    const loom__ddp_view *view = load->parallel->ddp ? loom__ddp_view_of(load->parallel->ddp) : NULL;
    int64_t place = load->gpt->part->entries[number].buffer_place, size = (int64_t)loom_dtype_size(parameter->dtype);
    memset((char *)loom_parameter_values(parameter) + from * size, 0,
        (size_t)((loom_parameter_count(parameter) - from) * size));
    if (view)
        clear_kept(view, place, from, LOOM_F32, view->master);
    for (int i = 0; load->state && i < load->state->count; i++)
        clear_kept(view, place, from, load->state->arrays[i].dtype, load->state->arrays[i].values);
}

/* Padding rows that the checkpoint does not have are zero, whatever they were. */
static void clear_padding(const loom__load *load) {
    const loom__part *part = load->gpt->part;
    for (int64_t i = 0; i < part->count; i++) {
        const loom__parameter_descriptor *parameter = &load->gpt->spec->parameters[part->entries[i].canonical];
        const loom__parameter_set *set = load->gpt->set;
        int64_t rows = parameter->padded_rows / set->at.tp, first = rows * set->at.tp_rank;
        if (parameter->padded_rows == parameter->shape[0] || parameter->shape[0] >= first + rows)
            continue;
        int64_t real = parameter->shape[0] > first ? parameter->shape[0] - first : 0;
        clear_rows(load, i, real * parameter->shape[1]);
    }
}

static loom_status read_wants(reading *r) {
    const loom__parameter_set *set = r->load->gpt->set;
    loom__reshard_plan *plan = NULL;
    bool apart = r->experts && set->at.etp > 0;
    LOOM_TRY(loom__reshard_plan_create(r->load->source, r->load->gpt->spec, apart ? set->at.etp : set->at.tp,
        apart ? set->at.etp_rank : set->at.tp_rank, r->wants, r->count, &plan));
    loom_status status = LOOM_OK;
    for (int64_t at = 0; at < plan->count && !status;)
        status = read_chunk(r, plan, &at);
    loom__reshard_plan_destroy(plan);
    return status;
}

/* A weight is its master rounded, also where the checkpoint rounded it to something else. */
static void round_masters(const loom__load *load) {
    const loom__ddp_view *view = loom__ddp_view_of(load->parallel->ddp);
    const loom_kernels *kernels = loom_rank_kernels(load->parallel->fabric->rank);
    loom_team *team = loom_rank_team(load->parallel->fabric->rank);
    for (int64_t place = 0; view->master && place < view->place_count; place++) {
        const loom__ddp_part *part = &view->parts[place];
        (view->dtype == LOOM_BF16 ? kernels->bf16 : kernels->f16)
            ->narrow(team, part->count, view->master + part->state, view->data16 + part->start);
    }
}

static loom_status read_weights(reading *r) {
    r->count = 0;
    want_weights(r);
    if (r->load->parallel->ddp)
        LOOM_TRY(want_places(r, want_masters));
    return read_wants(r);
}

static loom_status read_state(reading *r) {
    r->count = 0;
    LOOM_TRY(want_places(r, want_state));
    return read_wants(r);
}

static loom_status read_kinds(reading *r, loom_status (*read)(reading *r)) {
    r->experts = false;
    LOOM_TRY(read(r));
    r->experts = true;
    return r->load->gpt->spec->config.moe.num_moe_experts > 0 ? read(r) : LOOM_OK;
}

/* Masters come after the weights, which are rounded from them. */
static loom_status read_all(reading *r) {
    const loom__load *load = r->load;
    size_t room = (size_t)(load->gpt->part->count * (array_count(load) + 1)) + 1;
    r->wants = calloc(room, sizeof *r->wants);
    r->sinks = calloc(room, sizeof *r->sinks);
    if (!r->wants || !r->sinks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the load of %zu arrays", room);
    clear_padding(load);
    LOOM_TRY(read_kinds(r, read_weights));
    if (!load->state)
        return LOOM_OK;
    LOOM_TRY(read_kinds(r, read_state));
    if (load->masters)
        round_masters(load);
    return LOOM_OK;
}

loom_status loom__load_read(const loom__load *load, bool *masters) {
    reading r = {.load = load};
    loom_status status = read_all(&r);
    free(r.wants);
    free(r.sinks);
    LOOM_TRY(status);
    *masters = load->masters;
    return LOOM_OK;
}
