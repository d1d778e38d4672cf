/* Tensors of a checkpoint into a module and its optimizer. What is missing is asked of the whole model, not of a rank's
 * part, so that every rank gives the same answer without a word between them. The invariant: each chunk that a rank
 * needs is read once. */
#include "model/gpt.h"
#include "optim/optim.h"
#include "state/chunks.h"
#include "state/stored.h"
#include "strategy/megatron_io.h"
#include <stdio.h>
#include <stdlib.h>

struct loom__load {
    const loom_parallel *parallel;
    loom__load_scope scope;
    const loom__gpt *gpt;
    const loom__optimizer_state *state; /* NULL: no optimizer */
    loom__sharded_options options;
    loom__stored stored;
    bool masters; /* the checkpoint has them */
};

static int array_count(const loom__load *load) {
    return load->state ? LOOM__STATE_MOMENT + load->options.moments : LOOM__STATE_MASTER;
}

static loom_status sort_in(loom__load *load) {
    LOOM_TRY(loom__stored_list(&load->scope, !load->state, &load->stored));
    LOOM_TRY(loom__stored_sort(&load->scope, load->gpt->spec, &load->options, &load->stored));
    if (!load->state)
        return LOOM_OK;
    loom__reshard_plan *plan = NULL;
    LOOM_TRY(loom__stored_plan_whole(&load->stored, load->gpt->spec, LOOM__STATE_MASTER, &plan));
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
    loom__stored_free(&load->stored);
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
    LOOM_TRY(loom__stored_plan_whole(&load->stored, load->gpt->spec, array, &plan));
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
        const char *key = load->stored.tensors[numbers[i]].key;
        if (!loom__is_extra_state(key))
            LOOM_TRY(loom__names_add(names, count, load->scope.prefix, key));
    }
    return LOOM_OK;
}

loom_status loom__load_list(const loom__load *load, loom_load_report *report) {
    loom__reshard_leftover left = loom__reshard_source_leftover(load->stored.source);
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
    for (int64_t i = 0; i < part->count + part->module_buffers; i++) {
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

/* The chunks of a plan, and the first copy of each. */
typedef struct fetching {
    const reading *r;
    const loom__reshard_plan *plan;
    loom__chunk_wish *wishes;
    int64_t *first; /* [count + 1] */
    int64_t count;
} fetching;

static loom_status take_chunk(void *context, int64_t wish, const float *values) {
    const fetching *f = context;
    for (int64_t at = f->first[wish]; at < f->first[wish + 1]; at++)
        copy_box(&f->plan->copies[at].copy, values, &f->r->sinks[f->plan->copies[at].want]);
    return LOOM_OK;
}

static loom_status list_wishes(fetching *f) {
    const loom__reshard_plan *plan = f->plan;
    f->wishes = calloc((size_t)plan->count + 1, sizeof *f->wishes);
    f->first = calloc((size_t)plan->count + 1, sizeof *f->first);
    if (!f->wishes || !f->first)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of %lld chunks", (long long)plan->count);
    for (int64_t i = 0; i < plan->count; i++) {
        const loom__reshard_copy *copy = &plan->copies[i];
        if (i > 0 && copy->tensor == copy[-1].tensor && copy->chunk == copy[-1].chunk)
            continue;
        f->first[f->count] = i;
        f->wishes[f->count++] = (loom__chunk_wish){f->r->load->stored.numbers[copy->tensor], copy->chunk};
    }
    f->first[f->count] = plan->count;
    return LOOM_OK;
}

/* Replicas that read the same for themselves had better find it in the page cache. */
static loom__chunk_source source_of(const loom__load *load, bool experts) {
    const loom_fabric *fabric = load->parallel->fabric;
    const loom_checkpoint_io_config *config = loom__megatron_io_config(loom_fabric_unwrapped_checkpoint_io(fabric));
    loom_comm *replicas = fabric->groups[experts ? LOOM_GROUP_EDP : LOOM_GROUP_DP_CP];
    bool shared = config && config->parallel_load;
    return (loom__chunk_source){.checkpoint = load->scope.checkpoint,
        .group = shared ? replicas : NULL,
        .direct = shared || loom_comm_size(replicas) == 1,
        .team = loom_rank_team(fabric->rank)};
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

/* prepared: how the making of the wants has ended, which others may wait to hear. */
static loom_status read_wants(reading *r, loom_status prepared) {
    const loom__parameter_set *set = r->load->gpt->set;
    bool apart = r->experts && set->at.etp > 0;
    loom__reshard_plan *plan = NULL;
    if (!prepared)
        prepared = loom__reshard_plan_create(r->load->stored.source, r->load->gpt->spec,
            apart ? set->at.etp : set->at.tp, apart ? set->at.etp_rank : set->at.tp_rank, r->wants, r->count, &plan);
    fetching f = {.r = r, .plan = plan};
    if (!prepared)
        prepared = list_wishes(&f);
    loom__chunk_source source = source_of(r->load, r->experts);
    loom_status status = loom__chunks_read(&source, prepared, f.wishes, f.count, take_chunk, &f);
    free(f.wishes);
    free(f.first);
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

static loom_status make_room(reading *r) {
    const loom__part *part = r->load->gpt->part;
    size_t room = (size_t)(part->count * (array_count(r->load) + 1) + part->module_buffers) + 1;
    r->wants = calloc(room, sizeof *r->wants);
    r->sinks = calloc(room, sizeof *r->sinks);
    if (!r->wants || !r->sinks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the load of %zu arrays", room);
    clear_padding(r->load);
    return LOOM_OK;
}

static loom_status want_all_weights(reading *r) {
    want_weights(r);
    return r->load->parallel->ddp ? want_places(r, want_masters) : LOOM_OK;
}

static loom_status want_all_state(reading *r) {
    return want_places(r, want_state);
}

/* Those who read experts together are others than those who read the rest together: a failure goes along, so that all
 * hear of it. */
static loom_status read_kinds(reading *r, loom_status status, loom_status (*want)(reading *r)) {
    int kinds = r->load->gpt->spec->config.moe.num_moe_experts > 0 ? 2 : 1;
    for (int experts = 0; experts < kinds; experts++) {
        r->experts = experts;
        r->count = 0;
        if (!status)
            status = want(r);
        status = read_wants(r, status);
    }
    return status;
}

/* Masters come after the weights, which are rounded from them. */
static loom_status read_all(reading *r) {
    loom_status status = read_kinds(r, make_room(r), want_all_weights);
    if (!r->load->state)
        return status;
    LOOM_TRY(read_kinds(r, status, want_all_state));
    if (r->load->masters)
        round_masters(r->load);
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
