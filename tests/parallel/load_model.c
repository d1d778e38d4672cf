/* A model from a checkpoint's context alone, of every precision: the weights that were saved, bit for bit, in the dtype
 * that they were kept in, on the layout of the run and on another, and in fp32 where that is asked for. */
#include "parallel/pipeline_support.h"
#include <megaloom/load_model.h>
#include <megaloom/state.h>
#include <unistd.h>

enum { PATH = 512 };

static const uint64_t begin = 0xcbf29ce484222325u;

typedef struct passage {
    pipe_case of;
    const char *path;
    const char *overrides[3];
    int64_t override_count;
    bool gradients;
    loom_dtype dtype; /* that is expected */
    uint64_t weights; /* of rank 0 */
} passage;

static loom_status keep(loom_rank *rank, passage *p, uint64_t hash) {
    uint64_t first = hash;
    LOOM_TRY(loom_broadcast(loom_rank_world(rank), &first, sizeof first, LOOM_U8, 0));
    CHECK(first == hash, "rank %d has other weights than rank 0", loom_rank_index(rank));
    if (loom_rank_index(rank) == 0)
        p->weights = hash;
    return LOOM_OK;
}

static loom_status save_body(loom_rank *rank, void *argument) {
    passage *p = argument;
    pipe_case c = pipe_filled(&p->of);
    small_run run;
    pipe_result result;
    loom_status status = pipe_start(rank, &c, &run);
    if (!status)
        status = small_data(&run, LOOM_TRAINING, PIPE_STEPS * c.global, c.micro, c.global);
    if (!status)
        status = pipe_train(&run, &result);
    if (!status) {
        loom_state_item items[] = {
            {.key = "state_dict", .module = run.parallel}, {.key = "optimizer", .optimizer = run.optimizer}};
        loom_state state = {items, 2};
        status = loom_fabric_save(run.fabric, p->path, &state, NULL, 0);
    }
    if (!status)
        status = keep(rank, p, result.weights);
    small_destroy(&run);
    return status;
}

static loom_status look(loom_rank *rank, passage *p, const loom_loaded_model *model) {
    uint64_t hash = begin;
    CHECK(loom_parallel_dtype(model->parallel) == p->dtype, "found dtype %s, expected %s",
        loom_dtype_name(loom_parallel_dtype(model->parallel)), loom_dtype_name(p->dtype));
    LOOM_TRY(loom_gpt_visit(model->parallel, false, pipe_hash, &hash));
    return keep(rank, p, hash);
}

static loom_status load_body(loom_rank *rank, void *argument) {
    passage *p = argument;
    loom_loaded_model model = {0};
    LOOM_TRY(loom_load_model(rank, p->path, p->overrides, p->override_count, p->gradients, &model));
    loom_status status = look(rank, p, &model);
    loom_loaded_model_destroy(&model);
    return status;
}

static void must_be(passage *p, int ranks, uint64_t weights) {
    p->weights = 0;
    must_run(ranks, load_body, p);
    assert_true(p->weights == weights);
}

static void of_precision(const char *precision, loom_dtype dtype) {
    char path[PATH];
    snprintf(path, sizeof path, "%s/load_model-%lld", MEGALOOM_BUILD, (long long)getpid());
    passage p = {.of = {.ranks = 2, .tp = 2, .sharded = true, .precision = precision}, .path = path, .dtype = dtype};
    p.of.scale = dtype == LOOM_F16 ? 1024 : 0;
    must_run(2, save_body, &p);
    uint64_t weights = p.weights;
    for (int gradients = 0; gradients <= 1; gradients++) {
        p.gradients = gradients;
        p.override_count = 0;
        must_be(&p, 2, weights);
        p.overrides[0] = "strategy.tensor_model_parallel_size=1";
        p.overrides[1] = "strategy.pipeline_model_parallel_size=2";
        p.override_count = 2;
        must_be(&p, 2, weights);
        p.overrides[2] = "precision.precision=32";
        p.override_count = 3;
        p.dtype = LOOM_F32;
        must_be(&p, 2, weights);
        p.dtype = dtype;
    }
    char command[PATH + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void a_model_in_fp32_comes_from_its_checkpoint(void **state) {
    (void)state;
    of_precision(NULL, LOOM_F32);
}

static void so_does_one_in_bf16(void **state) {
    (void)state;
    of_precision("bf16-mixed", LOOM_BF16);
}

static void so_does_one_in_fp16(void **state) {
    (void)state;
    of_precision("16-mixed", LOOM_F16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_in_fp32_comes_from_its_checkpoint),
        cmocka_unit_test(so_does_one_in_bf16),
        cmocka_unit_test(so_does_one_in_fp16),
    };
    return cmocka_run_group_tests_name("parallel.load_model", tests, NULL, NULL);
}
