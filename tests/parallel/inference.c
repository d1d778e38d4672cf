/* A module that was set up for inference: the same numbers as with gradients, no memory for them, and a refusal by name
 * of all that would need them. */
#include "parallel/small_model.h"
#include "parallel/support.h"

typedef loom_status (*setup_function)(loom_fabric *fabric, loom_module *module, loom_parallel **parallel);

static loom_status start(loom_rank *rank, setup_function setup, small_run *run) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_model_config config = small_config();
    loom_module *module;
    strategy.tensor_model_parallel_size = 2;
    strategy.sequence_parallel = true;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_gpt_create(run->fabric, &config, &module));
    return setup(run->fabric, module, &run->parallel);
}

/* ---- the same numbers ---- */

static loom_status validate(loom_rank *rank, setup_function setup, double *loss) {
    small_run run = {0};
    loom_status status = start(rank, setup, &run);
    if (!status)
        status = small_data(&run, LOOM_VALIDATION, 16, 2, 0);
    if (!status)
        status = loom_parallel_validation_step(run.parallel, run.batches, loss);
    small_destroy(&run);
    return status;
}

static loom_status validate_both(loom_rank *rank, void *argument) {
    (void)argument;
    double with = 0, without = 0;
    LOOM_TRY(validate(rank, loom_fabric_setup_module, &with));
    LOOM_TRY(validate(rank, loom_fabric_setup_module_for_inference, &without));
    CHECK(with > 0 && with == without, "found a loss of %.17g, wanted %.17g", without, with);
    return LOOM_OK;
}

static void the_loss_is_that_of_a_module_with_gradients(void **state) {
    (void)state;
    must_run(4, validate_both, NULL);
}

/* ---- what is not there ---- */

static loom_status see_nothing(void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    (void)context;
    (void)name;
    (void)dims;
    (void)shape;
    (void)values;
    return LOOM_OK;
}

static loom_status must_refuse(loom_status found, const char *who) {
    CHECK(found == LOOM_ERR_STATE, "%s: found %s", who, loom_status_name(found));
    CHECK(strncmp(loom_error_message(), who, strlen(who)) == 0 &&
              strstr(loom_error_message(), "loom_fabric_setup_module_for_inference"),
        "%s: found \"%s\"", who, loom_error_message());
    return LOOM_OK;
}

static loom_status ask_for_gradients(small_run *run) {
    loom_parameter *const *parameters;
    int64_t count;
    double loss;
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 1;
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    for (int64_t i = 0; i < count; i++)
        CHECK(parameters[i]->data && !parameters[i]->grad, "%s has a gradient, or no data", parameters[i]->name);
    LOOM_TRY(small_data(run, LOOM_TRAINING, 16, 2, 0));
    LOOM_TRY(must_refuse(loom_parallel_training_step(run->parallel, run->batches, &loss), "training_step: "));
    LOOM_TRY(
        must_refuse(loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer),
            "setup_megatron_optimizer: "));
    LOOM_TRY(must_refuse(loom_gpt_visit(run->parallel, true, see_nothing, NULL), "visit: "));
    LOOM_TRY(must_refuse(loom_gpt_write_hf(run->parallel, true, NULL), "write_hf: "));
    return loom_gpt_visit(run->parallel, false, see_nothing, NULL);
}

static loom_status refuse(loom_rank *rank, void *argument) {
    (void)argument;
    small_run run = {0};
    loom_status status = start(rank, loom_fabric_setup_module_for_inference, &run);
    if (!status)
        status = ask_for_gradients(&run);
    small_destroy(&run);
    return status;
}

static void what_needs_gradients_is_refused_by_name(void **state) {
    (void)state;
    must_run(2, refuse, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_loss_is_that_of_a_module_with_gradients),
        cmocka_unit_test(what_needs_gradients_is_refused_by_name),
    };
    return cmocka_run_group_tests_name("parallel.inference", tests, NULL, NULL);
}
