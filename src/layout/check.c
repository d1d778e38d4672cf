/* The checks of the parallel sizes. Every check that still makes sense is made, so that one call names every fault; a
 * check that needs a value already found to be at fault is skipped, so that no fault is a mere consequence of another.
 * Nothing is changed in the sizes before all checks passed: what comes out satisfies every invariant that the
 * arithmetic of layout.c relies on (all sizes positive, all products exact, pipelines of the dense and the expert grid
 * equal). */
#include "base/suggest.h"
#include "layout/layout.h"
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const axis_name[LOOM_LAYOUT_AXES] = {"tp", "cp", "ep", "dp", "pp"};
static const char default_order[] = "tp-cp-ep-dp-pp", mapping_order[] = "tp-cp-ep-pp-dp";

/* a*b, or 0 where a factor is 0 (unknown) or the product does not fit. */
static int64_t times(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? 0 : product;
}

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static int64_t check_least(loom__faults *faults, const char *name, int64_t value, int64_t least) {
    if (value >= least)
        return value;
    loom__faults_add(faults, LOOM_ERR_CONFIG, "%s is %" PRId64 ": expected at least %" PRId64 "%s", name, value, least,
        least == 0 ? " (0 = not given)" : "");
    return 0;
}

static void check_hierarchical(loom__faults *faults, const loom_parallel_sizes *sizes, int64_t context) {
    int levels = sizes->hierarchical_levels;
    if (levels == 0)
        return;
    if (levels < 0 || levels > LOOM_LAYOUT_HCP_LEVELS) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "hierarchical_context_parallel_sizes has %d levels: expected 1 to %d, or none", levels,
            LOOM_LAYOUT_HCP_LEVELS);
        return;
    }
    char list[LOOM_LAYOUT_HCP_LEVELS * 24] = "", legal[LOOM_LAYOUT_HCP_LEVELS * 24 + 48] = "";
    size_t used = 0;
    int64_t product = 1;
    for (int level = 0; level < levels; level++) {
        int64_t size = sizes->hierarchical_context[level];
        int64_t inner = product;
        product = times(product, size > 0 ? size : 0);
        if (level == levels - 1 && inner > 0 && context % inner == 0)
            snprintf(legal, sizeof legal, ", e.g. [%s%" PRId64 "]", list, context / inner);
        used +=
            (size_t)snprintf(list + used, sizeof list - used, "%" PRId64 "%s", size, level == levels - 1 ? "" : ", ");
    }
    if (context > 0 && product != context)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "hierarchical_context_parallel_sizes [%s] must be positive and multiply to context_parallel_size %" PRId64
            "%s",
            list, context, legal);
}

/* Reads the order into axes[]; absent axes are appended and marked in `absent`. False when it is at fault. */
static bool check_order(
    loom__faults *faults, const loom_parallel_sizes *sizes, loom__axis axes[LOOM_LAYOUT_AXES], bool absent[]) {
    char text[LOOM_LAYOUT_ORDER_BYTES] = "";
    size_t length = strnlen(sizes->order, sizeof sizes->order);
    if (length == sizeof sizes->order) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "order is longer than %zu characters: expected axes joined by '-', e.g. %s", sizeof sizes->order - 1,
            default_order);
        return false;
    }
    for (size_t i = 0; i < length; i++)
        text[i] = (char)tolower((unsigned char)sizes->order[i]);
    if (length == 0)
        strcpy(text, sizes->use_tp_pp_dp_mapping ? mapping_order : default_order);
    else if (sizes->use_tp_pp_dp_mapping && strcmp(text, mapping_order) != 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "order is '%s', but use_tp_pp_dp_mapping asks for %s: give one of the two", sizes->order, mapping_order);
        return false;
    }
    int count = 0;
    bool good = true;
    for (char *part = text, *next; part; part = next) {
        next = strchr(part, '-');
        if (next)
            *next++ = '\0';
        int axis = 0;
        while (axis < LOOM_LAYOUT_AXES && strcmp(part, axis_name[axis]) != 0)
            axis++;
        if (axis == LOOM_LAYOUT_AXES) {
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "order is '%s': '%s' is no axis; expected tp, cp, ep, dp, pp joined by '-', e.g. %s", sizes->order,
                part, default_order);
            good = false;
        } else if (!absent[axis]) {
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "order is '%s': %s stands there twice; expected each axis once, e.g. %s", sizes->order, part,
                default_order);
            good = false;
        } else {
            absent[axis] = false;
            axes[count++] = (loom__axis)axis;
        }
    }
    for (int axis = 0; axis < LOOM_LAYOUT_AXES; axis++) {
        if (absent[axis])
            axes[count++] = (loom__axis)axis;
    }
    return good;
}

static void check_absent(
    loom__faults *faults, const loom_parallel_sizes *sizes, const char *axis, const char *name, int64_t size) {
    if (size > 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "order is '%s' and lacks %s, but %s is %" PRId64 ": expected 1, or %s in the order, e.g. %s", sizes->order,
            axis, name, size, axis, default_order);
}

/* Ranks of one dense decoder and encoder model, against the world. Gives the data parallel size, 0 when at fault. */
static int64_t check_world(loom__faults *faults, const loom_parallel_sizes *s, int64_t world, int64_t decoder,
    int64_t encoder, bool with_encoder) {
    int64_t model;
    if (world == 0 || decoder == 0 || (with_encoder && encoder == 0))
        return 0;
    if (__builtin_add_overflow(decoder, encoder, &model))
        model = INT64_MAX;
    if (world % model == 0 && model < INT64_MAX)
        return world / model;
    char what[384];
    if (with_encoder)
        snprintf(what, sizeof what,
            "context_parallel_size %" PRId64 " x (encoder_tensor_model_parallel_size %" PRId64
            " x encoder_pipeline_model_parallel_size %" PRId64 " + tensor_model_parallel_size %" PRId64
            " x pipeline_model_parallel_size %" PRId64 ")",
            s->context, s->encoder_tensor > 0 ? s->encoder_tensor : s->tensor, s->encoder_pipeline, s->tensor,
            s->pipeline);
    else
        snprintf(what, sizeof what,
            "tensor_model_parallel_size %" PRId64 " x pipeline_model_parallel_size %" PRId64
            " x context_parallel_size %" PRId64,
            s->tensor, s->pipeline, s->context);
    if (model == INT64_MAX)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s is 2^63 or more, world_size %" PRId64, what, world);
    else
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s = %" PRId64 " %s world_size %" PRId64, what, model,
            model > world ? "is more than" : "does not divide", world);
    return 0;
}

/* Gives the expert data parallel size, 0 when at fault. */
static int64_t check_experts(
    loom__faults *faults, const loom_parallel_sizes *s, int64_t decoder_ranks, int64_t etp, int64_t ep, int64_t pp) {
    if (decoder_ranks == 0 || etp == 0 || ep == 0)
        return 0;
    int64_t model = times(times(etp, ep), pp);
    if (model > 0 && decoder_ranks % model == 0)
        return decoder_ranks / model;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "expert_tensor_parallel_size %" PRId64 "%s x expert_model_parallel_size %" PRId64
        " x pipeline_model_parallel_size %" PRId64 " does not divide the %" PRId64 " ranks of world_size%s",
        etp, s->expert_tensor == 0 ? " (that of tensor_model_parallel_size)" : "", ep, pp, decoder_ranks,
        s->encoder_pipeline > 0 ? " that are not the encoder's" : "");
    return 0;
}

/* The dense and the expert grid must have the same pipelines. The reference moreover insists on equal data parallel
 * sizes unless pp is the last axis. */
static void check_expert_pipelines(
    loom__faults *faults, const loom__layout_checked *c, const bool absent[], int64_t etp) {
    const loom_parallel_sizes *s = &c->sizes;
    if (s->pipeline == 1)
        return;
    const int64_t dense[LOOM_LAYOUT_AXES] = {s->tensor, s->context, 1, c->data, 1};
    const int64_t expert[LOOM_LAYOUT_AXES] = {etp, 1, s->expert, c->expert_data, 1};
    int64_t dense_stride = 1, expert_stride = 1;
    int last = LOOM_LAYOUT_AXES - 1;
    while (last > 0 && absent[c->order[last]])
        last--;
    for (int i = 0; c->order[i] != LOOM__AXIS_PP; i++) {
        dense_stride *= dense[c->order[i]];
        expert_stride *= expert[c->order[i]];
    }
    bool unequal = c->order[last] != LOOM__AXIS_PP && c->data != c->expert_data;
    if (!unequal && dense_stride == expert_stride)
        return;
    char order[80];
    if (s->order[0])
        snprintf(order, sizeof order, "order '%s'", s->order);
    else
        snprintf(order, sizeof order, "use_tp_pp_dp_mapping, which orders ranks %s,", mapping_order);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "%s does not end in pp, which needs expert_tensor_parallel_size %" PRId64
        " x expert_model_parallel_size %" PRId64 " = tensor_model_parallel_size %" PRId64
        " x context_parallel_size %" PRId64 "%s (data parallel size %" PRId64 ", of the experts %" PRId64
        "); order %s asks for no more than that both divide",
        order, etp, s->expert, s->tensor, s->context, unequal ? "" : ", laid out on the same side of pp", c->data,
        c->expert_data, default_order);
}

static void check_instances(
    loom__faults *faults, int64_t world, int64_t instances, int64_t replicas, int64_t expert_data) {
    int64_t common = common_divisor(replicas, expert_data);
    if (common % instances != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "num_distributed_optimizer_instances is %" PRId64
            ": expected a divisor of data x context parallel size %" PRId64
            " and of the expert data parallel size %" PRId64 " of world_size %" PRId64,
            instances, replicas, expert_data, world);
}

/* An encoder group of enc_tp ranks serves a run of consecutive decoder pipelines. The run stays within one
 * data-parallel and context rank only when the runs are equal and consecutive pipelines differ in their tensor rank
 * alone. */
static void check_encoder_mixing(loom__faults *faults, const loom__layout_checked *c, int64_t encoder_tensor) {
    const loom_parallel_sizes *s = &c->sizes;
    if (encoder_tensor == s->tensor || (c->data == 1 && s->context == 1))
        return;
    bool tensor_first = true;
    for (int i = 0; c->order[i] != LOOM__AXIS_TP; i++)
        tensor_first &=
            !(c->order[i] == LOOM__AXIS_DP && c->data > 1) && !(c->order[i] == LOOM__AXIS_CP && s->context > 1);
    if (tensor_first && s->tensor % encoder_tensor == 0)
        return;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "encoder_tensor_model_parallel_size is %" PRId64 " and tensor_model_parallel_size is %" PRId64
        ": some pipeline would join ranks of different data-parallel or context rank (data parallel size %" PRId64
        ", context_parallel_size %" PRId64 ")",
        encoder_tensor, s->tensor, c->data, s->context);
}

loom_status loom__check_virtual_stages(int64_t virtual_pipeline, int64_t pipeline) {
    if (virtual_pipeline < 1 || pipeline != 1)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "virtual_pipeline_model_parallel_size is %" PRId64
        ", but pipeline_model_parallel_size is 1: expected at least 2 pipeline stages, or no virtual ones",
        virtual_pipeline);
}

/* Whether experts can be cut over tensor x expert ranks. */
static bool check_extended(loom__faults *faults, int64_t ranks, const loom_parallel_sizes *s, int64_t pp) {
    int64_t slices = times(s->tensor, s->expert), unit = times(slices, pp);
    if (s->expert_tensor > 0 && s->expert_tensor != s->tensor)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "expert_tensor_parallel_size: found %" PRId64
            " with moe_extended_tp, which cuts experts over tensor x expert ranks; expected null",
            s->expert_tensor);
    if (ranks < 1 || s->tensor < 1 || s->expert < 1 || pp < 1)
        return false;
    if (unit > 0 && ranks % unit == 0)
        return true;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "moe_extended_tp: tensor_model_parallel_size %" PRId64 " x expert_model_parallel_size %" PRId64
        " x pipeline_model_parallel_size %" PRId64 " does not divide the %" PRId64 " ranks of world_size",
        s->tensor, s->expert, pp, ranks);
    return false;
}

void loom__layout_faults(const loom_parallel_sizes *sizes, loom__layout_checked *out, loom__faults *faults) {
    loom__layout_checked c = {.sizes = *sizes};
    loom_parallel_sizes *s = &c.sizes;
    int64_t before = faults->count;

    int64_t world = check_least(faults, "world_size", s->world, 1);
    int64_t tp = check_least(faults, "tensor_model_parallel_size", s->tensor, 1);
    int64_t pp = check_least(faults, "pipeline_model_parallel_size", s->pipeline, 1);
    int64_t cp = check_least(faults, "context_parallel_size", s->context, 1);
    int64_t ep = check_least(faults, "expert_model_parallel_size", s->expert, 1);
    int64_t instances = check_least(faults, "num_distributed_optimizer_instances", s->optimizer_instances, 1);
    int64_t vpp = check_least(faults, "virtual_pipeline_model_parallel_size", s->virtual_pipeline, 0);
    int64_t etp = check_least(faults, "expert_tensor_parallel_size", s->expert_tensor, 0);
    int64_t encoder_tp = check_least(faults, "encoder_tensor_model_parallel_size", s->encoder_tensor, 0);
    int64_t encoder_pp = check_least(faults, "encoder_pipeline_model_parallel_size", s->encoder_pipeline, 0);
    if (s->expert_tensor == 0)
        etp = tp;
    if (s->encoder_tensor == 0)
        encoder_tp = tp;

    check_hierarchical(faults, s, cp);
    bool absent[LOOM_LAYOUT_AXES] = {true, true, true, true, true};
    bool ordered = check_order(faults, s, c.order, absent);

    loom_status virtual_stages = loom__check_virtual_stages(vpp, pp);
    if (virtual_stages)
        loom__faults_add(faults, virtual_stages, "%s", loom_error_message());
    if (tp > 0 && encoder_tp > tp) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "encoder_tensor_model_parallel_size is %" PRId64 ", above tensor_model_parallel_size %" PRId64, encoder_tp,
            tp);
        encoder_tp = 0;
    }
    bool encoder = encoder_pp > 0;
    if (encoder && instances > 1) {
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: num_distributed_optimizer_instances %" PRId64
            " together with encoder ranks (encoder_pipeline_model_parallel_size %" PRId64 ")",
            instances, encoder_pp);
    }

    int64_t decoder_model = times(times(tp, pp), cp), encoder_model = times(times(encoder_tp, encoder_pp), cp);
    if (tp > 0 && pp > 0 && cp > 0 && decoder_model == 0)
        decoder_model = INT64_MAX;
    if (encoder && encoder_tp > 0 && cp > 0 && encoder_model == 0)
        encoder_model = INT64_MAX;
    c.data = check_world(faults, s, world, decoder_model, encoder_model, encoder);
    out->data = c.data;
    c.encoder_ranks = c.data * encoder_model;
    c.decoder_ranks = c.data * decoder_model;
    if (s->moe_extended_tp) {
        bool fits = check_extended(faults, c.decoder_ranks, s, pp);
        etp = times(tp, ep);
        s->expert = ep = 1;
        c.expert_data = fits ? c.decoder_ranks / times(etp, pp) : 0;
    } else {
        c.expert_data = check_experts(faults, s, c.decoder_ranks, etp, ep, pp);
    }

    if (ordered) {
        int64_t size[LOOM_LAYOUT_AXES][3] = {
            {tp, etp, 0}, {cp, 0, 0}, {ep, 0, 0}, {c.data, c.expert_data, 0}, {pp, encoder_pp, 0}};
        const char *name[LOOM_LAYOUT_AXES][2] = {{"tensor_model_parallel_size", "expert_tensor_parallel_size"},
            {"context_parallel_size", NULL}, {"expert_model_parallel_size", NULL},
            {"the data parallel size", "the expert data parallel size"},
            {"pipeline_model_parallel_size", "encoder_pipeline_model_parallel_size"}};
        bool complete = true;
        for (int axis = 0; axis < LOOM_LAYOUT_AXES; axis++) {
            for (int i = 0; absent[axis] && size[axis][i] > 0; i++) {
                check_absent(faults, s, axis_name[axis], name[axis][i], size[axis][i]);
                complete &= size[axis][i] == 1;
            }
        }
        if (complete && c.data > 0 && c.expert_data > 0)
            check_expert_pipelines(faults, &c, absent, etp);
        if (complete && encoder && c.data > 0 && encoder_tp > 0)
            check_encoder_mixing(faults, &c, encoder_tp);
    }
    if (instances > 1 && c.data > 0 && c.expert_data > 0)
        check_instances(faults, world, instances, c.data * cp, c.expert_data);

    if (faults->count > before)
        return;

    s->expert_tensor = etp;
    s->moe_extended_tp = false;
    s->encoder_tensor = encoder ? encoder_tp : 0;
    size_t used = 0;
    for (int i = 0; i < LOOM_LAYOUT_AXES; i++)
        used +=
            (size_t)snprintf(s->order + used, sizeof s->order - used, "%s%s", i > 0 ? "-" : "", axis_name[c.order[i]]);
    *out = c;
}

typedef struct trial {
    loom_parallel_sizes sizes;
    loom__layout_checked checked;
} trial;

static void try_sizes(void *context, loom__faults *faults) {
    trial *t = context;
    loom__layout_faults(&t->sizes, &t->checked, faults);
}

static void suggest(const loom_parallel_sizes *sizes, loom__faults *faults) {
    trial t = {.sizes = *sizes};
    loom_parallel_sizes *s = &t.sizes;
    const int64_t most = LOOM__NUMBER_MAX;
    const loom__variable variables[] = {{"world_size", &s->world, NULL, 1, most, 0, false},
        {"tensor_model_parallel_size", &s->tensor, NULL, 1, most, 0, false},
        {"pipeline_model_parallel_size", &s->pipeline, NULL, 1, most, 0, false},
        {"virtual_pipeline_model_parallel_size", &s->virtual_pipeline, NULL, 1, most, 0, true},
        {"context_parallel_size", &s->context, NULL, 1, most, 0, false},
        {"expert_model_parallel_size", &s->expert, NULL, 1, most, 0, false},
        {"expert_tensor_parallel_size", &s->expert_tensor, NULL, 1, most, s->tensor, true},
        {"encoder_tensor_model_parallel_size", &s->encoder_tensor, NULL, 1, most, s->tensor, true},
        {"encoder_pipeline_model_parallel_size", &s->encoder_pipeline, NULL, 0, most, 0, false},
        {"num_distributed_optimizer_instances", &s->optimizer_instances, NULL, 1, most, 0, false},
        {"moe_extended_tp", NULL, &s->moe_extended_tp, 0, 0, 0, false},
        {"use_tp_pp_dp_mapping", NULL, &s->use_tp_pp_dp_mapping, 0, 0, 0, false}};
    const loom__trial all = {
        .variables = variables, .count = sizeof variables / sizeof *variables, .check = try_sizes, .context = &t};
    loom__faults_suggest(faults, &all);
}

loom_status loom__layout_check(const loom_parallel_sizes *sizes, loom__layout_checked *out) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__layout_faults(sizes, out, &faults);
    suggest(sizes, &faults);
    return loom__faults_end(&faults);
}
