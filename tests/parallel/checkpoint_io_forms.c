/* Whatever a state is made of, a save that ranks share and that goes on in the background holds the bits of one that
 * the main holders write at once: tensors, objects, common state and context. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include "parallel/toy_module.h"
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PATH = 512, RANKS = 4 };

static void clear(const char *path) {
    char command[3 * PATH];
    snprintf(command, sizeof command, "rm -rf '%s' '%s.tmp'", path, path);
    assert_int_equal(system(command), 0);
}

/* What of a state differs from one case to the next. */
typedef struct form {
    const char *name, *precision;
    int tp, instances;
    bool sharded, fully_reshardable;
    bool parts; /* a second model and a module of one's own as well */
} form;

typedef struct job {
    const form *form;
    char plain[PATH], background[PATH];
} job;

typedef struct run {
    small_run small;
    toy toy;
    loom_parallel *critic, *own;
    loom_optimizer *of_critic, *of_own;
} run;

static loom_status add_parts(run *r) {
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_model_config config = small_config();
    loom_module *module;
    config.num_layers = 1;
    optim.lr = 0.01;
    LOOM_TRY(loom_gpt_create(r->small.fabric, &config, &module));
    LOOM_TRY(loom_fabric_setup_module(r->small.fabric, module, &r->critic));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->small.fabric, r->critic, &optim, NULL, &r->of_critic));
    r->toy = (toy){.parameters = 2, .uses = 1, .use = {{0, 1}}, .shard = {false, true}, .initial = 1};
    LOOM_TRY(loom_fabric_setup_module(r->small.fabric, toy_module(&r->toy), &r->own));
    return loom_fabric_setup_megatron_optimizer(r->small.fabric, r->own, &optim, NULL, &r->of_own);
}

static loom_status start(loom_rank *rank, const form *f, const loom_checkpoint_io_config *io_config, run *r) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_precision_config precision = loom_precision_config_default();
    loom_checkpoint_io io = loom_checkpoint_io_megatron(io_config);
    config.tensor_model_parallel_size = f->tp;
    config.ddp_config.use_distributed_optimizer = f->sharded;
    config.dist_ckpt_optim_fully_reshardable = f->fully_reshardable;
    config.num_distributed_optimizer_instances = f->instances;
    config.checkpoint_io = &io;
    precision.precision = f->precision;
    LOOM_TRY(loom_fabric_create(rank, &config, &precision, &r->small.fabric));
    LOOM_TRY(loom_fabric_launch(r->small.fabric));
    LOOM_TRY(small_model(&r->small));
    LOOM_TRY(small_data(&r->small, LOOM_TRAINING, 64, 2, 0));
    return f->parts ? add_parts(r) : LOOM_OK;
}

static void stop(run *r) {
    loom_parallel_destroy(r->critic);
    loom_parallel_destroy(r->own);
    small_destroy(&r->small);
}

static loom_status steps(run *r, int count) {
    double loss;
    loom_optimizer_outcome outcome;
    for (int i = 0; i < count; i++) {
        LOOM_TRY(loom_parallel_training_step(r->small.parallel, r->small.batches, &loss));
        LOOM_TRY(loom_optimizer_step(r->small.optimizer, &outcome));
    }
    return LOOM_OK;
}

/* With `load` the state is read, else written. */
static loom_status with_state(run *r, const char *path, bool load) {
    loom_state_item items[] = {{.key = "state_dict", .module = r->small.parallel},
        {.key = "optimizer", .optimizer = r->small.optimizer}, {.key = "critic", .module = r->critic},
        {.key = "critic's optimizer", .optimizer = r->of_critic}, {.key = "own", .module = r->own},
        {.key = "own's optimizer", .optimizer = r->of_own}};
    loom_state state = {items, r->critic ? 6 : 2};
    loom_load_report report = {0};
    if (!load)
        return loom_fabric_save(r->small.fabric, path, &state, NULL, 0);
    LOOM_TRY(loom_fabric_load(r->small.fabric, path, &state, true, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

/* A module of one's own changes with its numbers alone; a replica of all ranks has the same. */
static void number_own(run *r, float salt) {
    loom_parameter *const *parameters;
    int64_t count;
    if (!r->own || loom_parallel_parameters(r->own, &parameters, &count))
        return;
    parameters[0]->data[0] = salt;
    parameters[1]->data[0] = salt + 1 + (float)loom_comm_rank(loom_fabric_group(r->small.fabric, LOOM_GROUP_TP));
}

static loom_status save_plainly(loom_rank *rank, const job *j, run *r) {
    loom_checkpoint_io_config config = loom_checkpoint_io_config_default();
    config.parallel_save = false;
    config.storage_writers_per_rank = 1;
    LOOM_TRY(start(rank, j->form, &config, r));
    LOOM_TRY(steps(r, 2));
    number_own(r, 5);
    return with_state(r, j->plain, false);
}

/* What was loaded is saved once more, over what was there. */
static loom_status save_in_the_background(loom_rank *rank, const job *j, run *r) {
    loom_checkpoint_io_config config = loom_checkpoint_io_config_default();
    bool pending;
    config.async_save = config.parallel_load = true;
    LOOM_TRY(start(rank, j->form, &config, r));
    LOOM_TRY(steps(r, 2));
    number_own(r, 5);
    for (int i = 0; i < 2; i++) {
        LOOM_TRY(with_state(r, j->background, false));
        number_own(r, 7);
        LOOM_TRY(steps(r, 3));
        LOOM_TRY(with_state(r, j->background, true));
    }
    LOOM_TRY(with_state(r, j->background, false));
    return loom_fabric_finalize_saves(r->small.fabric, true, &pending);
}

static loom_status rank_body(loom_rank *rank, void *argument) {
    run r = {0};
    loom_status status = save_plainly(rank, argument, &r);
    stop(&r);
    r = (run){0};
    if (!status)
        status = save_in_the_background(rank, argument, &r);
    stop(&r);
    return status;
}

/* ---- comparing */

static void *values_of(const loom_checkpoint *checkpoint, const loom_checkpoint_tensor *tensor, size_t *bytes) {
    *bytes = (size_t)tensor->elements * loom_dtype_size(tensor->dtype);
    void *values = calloc(*bytes + 1, 1);
    assert_non_null(values);
    if (loom_checkpoint_read(
            checkpoint, tensor, (int64_t[LOOM_CHECKPOINT_MAX_DIMS]){0}, tensor->shape, tensor->dtype, values))
        fail_msg("%s", loom_error_message());
    return values;
}

static void compare_tensors(const loom_checkpoint *a, const loom_checkpoint *b, const char *name) {
    const loom_checkpoint_info *of_a = loom_checkpoint_get_info(a), *of_b = loom_checkpoint_get_info(b);
    if (of_a->tensors != of_b->tensors || of_a->objects != of_b->objects || of_a->tensors == 0)
        fail_msg("%s: %lld and %lld tensors, %lld and %lld objects", name, (long long)of_a->tensors,
            (long long)of_b->tensors, (long long)of_a->objects, (long long)of_b->objects);
    for (int64_t i = 0; i < of_a->tensors; i++) {
        size_t bytes, others;
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(a, i), *other = NULL;
        if (loom_checkpoint_find_tensor(b, tensor->name, &other))
            fail_msg("%s: %s", name, loom_error_message());
        void *x = values_of(a, tensor, &bytes), *y = values_of(b, other, &others);
        if (bytes != others || memcmp(x, y, bytes) != 0)
            fail_msg("%s: %s differs", name, tensor->name);
        free(x);
        free(y);
    }
    for (int64_t i = 0; i < of_a->objects; i++)
        assert_string_equal(loom_checkpoint_object_at(a, i)->name, loom_checkpoint_object_at(b, i)->name);
}

static void compare_file(const job *j, const char *file) {
    char command[3 * PATH];
    snprintf(command, sizeof command, "cmp '%s/%s' '%s/%s'", j->plain, file, j->background, file);
    if (system(command) != 0)
        fail_msg("%s: %s differs", j->form->name, file);
}

static void every_form_of_a_state_is_the_same_saved_at_once_and_in_the_background(void **state) {
    static const form forms[] = {
        {"whole", "32", 2, 1, false, false, false},
        {"shards", "32", 1, 1, true, false, false},
        {"shards of two instances", "32", 1, 2, true, false, false},
        {"fully reshardable", "32", 2, 1, true, true, false},
        {"fully reshardable of two instances", "bf16-mixed", 1, 2, true, true, false},
        {"bf16", "bf16-mixed", 2, 1, false, false, false},
        {"bf16 in shards", "bf16-mixed", 2, 1, true, false, false},
        {"fp16 in shards", "16-mixed", 1, 1, true, false, false},
        {"three modules", "32", 2, 1, false, false, true},
        {"three modules in shards", "32", 2, 1, true, false, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        job j = {.form = &forms[i]};
        loom_checkpoint *plain = NULL, *background = NULL;
        snprintf(j.plain, PATH, "%s/io_forms-%lld-plain", MEGALOOM_BUILD, (long long)getpid());
        snprintf(j.background, PATH, "%s/io_forms-%lld-background", MEGALOOM_BUILD, (long long)getpid());
        clear(j.plain);
        clear(j.background);
        must_run(RANKS, rank_body, &j);
        if (loom_checkpoint_open(j.plain, &plain) || loom_checkpoint_open(j.background, &background))
            fail_msg("%s: %s", forms[i].name, loom_error_message());
        compare_tensors(plain, background, forms[i].name);
        compare_file(&j, "common.pt");
        compare_file(&j, "context/run.yaml");
        loom_checkpoint_close(plain);
        loom_checkpoint_close(background);
        clear(j.plain);
        clear(j.background);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_of_a_state_is_the_same_saved_at_once_and_in_the_background)};
    return cmocka_run_group_tests_name("parallel.checkpoint_io_forms", tests, NULL, NULL);
}
