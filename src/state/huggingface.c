/* What a model of loom_gpt_create gives out: its canonical tensors, one by one or as a Hugging Face directory.
 * Invariant: parameters are whole before they are read, whatever gathers of shards were under way. */
#include "model/gpt.h"
#include "model/huggingface_directory.h"
#include "strategy/strategy.h"

static loom_status gpt_set(const loom_parallel *parallel, const loom__parameter_set **set) {
    if (!parallel->is_gpt)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "this module was not made by loom_gpt_create: its tensors have no canonical form");
    *set = ((loom__gpt *)parallel->module->context)->set;
    return LOOM_OK;
}

loom_status loom_gpt_describe_hf(loom_parallel *parallel, loom_safetensors_writer *writer) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    return loom__hf_describe(set, writer);
}

/* What is read is whole on this rank. */
static loom_status make_whole(loom_parallel *parallel, bool gradients, const char *who) {
    if (!gradients)
        return loom__ddp_wait_parameters(parallel->ddp);
    LOOM_TRY(loom__parallel_check_gradients(parallel, who));
    return loom__ddp_gather_gradients(parallel->ddp);
}

/* Gradients are sums under the seed of the step; what is given out is the gradient of the mean. */
static float factor_of(const loom_parallel *parallel, bool gradients) {
    return (float)(gradients ? parallel->token_factor / parallel->loss_scale : 1);
}

loom_status loom_gpt_write_hf(loom_parallel *parallel, bool gradients, loom_safetensors_writer *writer) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    LOOM_TRY(make_whole(parallel, gradients, "write_hf"));
    loom_comm *const *groups = parallel->fabric->groups;
    return loom__hf_write(set, gradients ? LOOM__PARAMETER_GRAD : LOOM__PARAMETER_DATA, groups[LOOM_GROUP_TP],
        groups[LOOM_GROUP_PP], factor_of(parallel, gradients), writer);
}

typedef struct visit_context {
    const loom__parameter_set *set;
    loom_status (*body)(void *context, const char *name, int dims, const int64_t *shape, const float *values);
    void *context;
} visit_context;

static loom_status visit(void *argument, int64_t number, const float *canonical) {
    const visit_context *to = argument;
    const loom__parameter_descriptor *descriptor = &to->set->spec->parameters[number];
    return to->body(to->context, descriptor->name, descriptor->dims, descriptor->shape, canonical);
}

loom_status loom_gpt_visit(loom_parallel *parallel, bool gradients,
    loom_status (*body)(void *context, const char *name, int dims, const int64_t *shape, const float *values),
    void *context) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    LOOM_TRY(make_whole(parallel, gradients, "visit"));
    loom_comm *const *groups = parallel->fabric->groups;
    visit_context visited = {set, body, context};
    return loom__parameter_set_visit(set, gradients ? LOOM__PARAMETER_GRAD : LOOM__PARAMETER_DATA,
        groups[LOOM_GROUP_TP], groups[LOOM_GROUP_PP], factor_of(parallel, gradients), visit, &visited);
}

static bool writes_hf(const loom_parallel *parallel) {
    loom_comm *const *groups = parallel->fabric->groups;
    return loom_comm_rank(groups[LOOM_GROUP_TP]) == 0 && loom_comm_rank(groups[LOOM_GROUP_DP_CP]) == 0 &&
           loom_comm_rank(groups[LOOM_GROUP_PP]) == 0;
}

/* The tokenizer that goes along, on the rank that writes. */
static loom_status open_tokenizer(
    const loom_parallel *parallel, const loom_hf_save_options *options, loom_tokenizer **tokenizer) {
    *tokenizer = NULL;
    return writes_hf(parallel) && options->tokenizer ? loom_tokenizer_open(options->tokenizer, tokenizer) : LOOM_OK;
}

loom_status loom_hf_check_output(const char *directory) {
    return loom__hf_directory_check(directory);
}

loom_status loom_gpt_check_save_hf(
    loom_parallel *parallel, const char *directory, const loom_hf_save_options *options) {
    const loom__parameter_set *set = NULL;
    loom_hf_save_options chosen = options ? *options : loom_hf_save_options_default();
    loom_tokenizer *tokenizer;
    LOOM_TRY(gpt_set(parallel, &set));
    loom_status status = open_tokenizer(parallel, &chosen, &tokenizer);
    if (!status && writes_hf(parallel))
        status = loom__hf_save_check(set, directory, &chosen, tokenizer);
    loom_tokenizer_destroy(tokenizer);
    return loom_agree(loom_rank_world(parallel->fabric->rank), status);
}

loom_status loom_gpt_save_hf(loom_parallel *parallel, const char *directory, const loom_hf_save_options *options) {
    const loom__parameter_set *set = NULL;
    loom_hf_save_options chosen = options ? *options : loom_hf_save_options_default();
    loom_comm *world = loom_rank_world(parallel->fabric->rank);
    loom_tokenizer *tokenizer;
    LOOM_TRY(gpt_set(parallel, &set));
    LOOM_TRY(loom__ddp_wait_parameters(parallel->ddp));
    loom_comm *const *groups = parallel->fabric->groups;
    loom_status status = loom_agree(world, open_tokenizer(parallel, &chosen, &tokenizer));
    if (!status)
        status = loom__hf_save(set, groups[LOOM_GROUP_TP], groups[LOOM_GROUP_PP], world, writes_hf(parallel), directory,
            &chosen, tokenizer);
    loom_tokenizer_destroy(tokenizer);
    return status;
}
