/* Hugging Face's own models (hf/<case>) through checkpoints: imported, saved, loaded at another layout and exported
 * they are the same tensors, bit for bit and in the dtype that they came in; so they are when a directory is converted
 * to a checkpoint and back without ranks. */
#include "model.h"
#include <ftw.h>
#include <megaloom/checkpoint_tools.h>
#include <megaloom/load_model.h>
#include <megaloom/state.h>

typedef struct hf_case {
    char *name, *directory;
    loom_model_config config;
    loom_dtype dtype;
} hf_case;

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)found, (void)kind, (void)place;
    return remove(path);
}

static void output_path(const char *what, char path[GOLDEN_PATH]) {
    snprintf(path, GOLDEN_PATH, "%s/golden-hf_checkpoint-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), what);
    (void)nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- the same tensors */

static loom_status tensor_is_equal(
    const char *name, const loom_safetensors_tensor *wanted, const loom_safetensors *file) {
    const loom_safetensors_tensor *found;
    LOOM_TRY(loom_safetensors_find(file, wanted->name, &found));
    if (found->dtype != wanted->dtype || found->dims != wanted->dims ||
        memcmp(found->shape, wanted->shape, sizeof found->shape) != 0)
        return loom_fail(LOOM_ERR_INTERNAL, "%s: %s has another shape or dtype than the original", name, found->name);
    if (memcmp(found->data, wanted->data, wanted->bytes) != 0)
        return loom_fail(LOOM_ERR_INTERNAL, "%s: %s has other bits than the original", name, found->name);
    return LOOM_OK;
}

static loom_status directory_is_equal(const hf_case *c, const char *directory) {
    loom_safetensors *wanted = NULL, *found = NULL;
    loom_status status = loom_safetensors_open(c->directory, &wanted);
    if (!status)
        status = loom_safetensors_open(directory, &found);
    int64_t count = status ? 0 : loom_safetensors_count(wanted);
    if (!status && loom_safetensors_count(found) != count)
        status = loom_fail(LOOM_ERR_INTERNAL, "%s: found %lld tensors, wanted %lld", c->name,
            (long long)loom_safetensors_count(found), (long long)count);
    for (int64_t i = 0; !status && i < count; i++)
        status = tensor_is_equal(c->name, loom_safetensors_get(wanted, i), found);
    loom_safetensors_close(wanted);
    loom_safetensors_close(found);
    return status;
}

/* ---- without ranks */

static loom_status convert(const hf_case *c) {
    char checkpoint[GOLDEN_PATH], back[GOLDEN_PATH];
    loom_tool_outcome outcome;
    output_path("converted", checkpoint);
    output_path("back", back);
    LOOM_TRY(loom_checkpoint_convert(c->directory, checkpoint, NULL, &outcome));
    LOOM_TRY(loom_checkpoint_verify(checkpoint, NULL, NULL, &(loom_checkpoint_verified){0}));
    LOOM_TRY(loom_checkpoint_convert(checkpoint, back, NULL, &outcome));
    return directory_is_equal(c, back);
}

/* ---- with ranks */

typedef struct passage {
    const hf_case *of;
    const char *checkpoint, *out;
} passage;

static bool divides(const hf_case *c, int64_t tp) {
    int64_t sizes[64], count = loom_model_tensor_sizes(&c->config, sizes, 64);
    for (int64_t i = 0; i < count; i++)
        if (sizes[i] == tp)
            return true;
    return false;
}

static loom_status save(const passage *p, loom_loaded_model *model) {
    loom_state_item items[] = {{.key = "state_dict", .module = model->parallel}};
    loom_state state = {items, 1};
    return loom_fabric_save(model->fabric, p->checkpoint, &state, NULL, 0);
}

static loom_status import_rank(loom_rank *rank, void *argument) {
    const passage *p = argument;
    bool experts = p->of->config.moe.num_moe_experts > 0;
    const char *overrides[] = {divides(p->of, 2) && !experts ? "strategy.tensor_model_parallel_size=2"
                                                             : "strategy.tensor_model_parallel_size=1",
        experts ? "strategy.expert_model_parallel_size=2" : "strategy.expert_model_parallel_size=1"};
    char source[GOLDEN_PATH + 8];
    loom_loaded_model model = {0};
    snprintf(source, sizeof source, "hf://%s", p->of->directory);
    LOOM_TRY(loom_import_model(rank, source, overrides, 2, true, &model));
    loom_status status = save(p, &model);
    loom_loaded_model_destroy(&model);
    return status;
}

static loom_status export_rank(loom_rank *rank, void *argument) {
    const passage *p = argument;
    const char *overrides[] = {"strategy.tensor_model_parallel_size=1", "strategy.expert_model_parallel_size=1",
        p->of->config.num_layers % 2 ? "strategy.pipeline_model_parallel_size=1"
                                     : "strategy.pipeline_model_parallel_size=2"};
    loom_hf_save_options options = loom_hf_save_options_default();
    loom_loaded_model model = {0};
    options.dtype = p->of->dtype;
    LOOM_TRY(loom_load_model(rank, p->checkpoint, overrides, 3, false, &model));
    loom_status status = loom_gpt_save_hf(model.parallel, p->out, &options);
    loom_loaded_model_destroy(&model);
    return status;
}

static loom_status pass(const hf_case *c) {
    char checkpoint[GOLDEN_PATH], out[GOLDEN_PATH];
    loom_run_options options = loom_run_options_default();
    passage p = {c, checkpoint, out};
    options.threads = 1;
    options.timeout = 60;
    output_path("saved", checkpoint);
    output_path("exported", out);
    LOOM_TRY(loom_run_local(2, import_rank, &p, &options));
    LOOM_TRY(loom_run_local(2, export_rank, &p, &options));
    return directory_is_equal(c, out);
}

/* ---- all cases */

static void every_case(loom_status (*claim)(const hf_case *c)) {
    glob_t files = golden_glob("hf/*/case.json");
    int ran = 0, unbuilt = 0;
    for (size_t i = 0; i < files.gl_pathc; i++) {
        loom_safetensors *file = NULL;
        hf_case c = {.name = golden_folder_name(files.gl_pathv[i])};
        c.directory = golden_path("hf/%s/model", c.name);
        bool built = golden_read_config(c.name, c.directory, &c.config);
        if (built) {
            golden_must(loom_safetensors_open(c.directory, &file), c.name);
            c.dtype = loom_safetensors_get(file, 0)->dtype;
            loom_safetensors_close(file);
            if (claim(&c))
                fail_msg("%s: %s", c.name, loom_error_message());
            ran++;
        } else {
            unbuilt++;
        }
        free(c.name);
        free(c.directory);
    }
    globfree(&files);
    char path[GOLDEN_PATH];
    static const char *const outputs[] = {"converted", "back", "saved", "exported"};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
        output_path(outputs[i], path);
    print_message("%d cases ran, %d are of models that are not built\n", ran, unbuilt);
    assert_true(ran > 0);
}

static void a_directory_converted_to_a_checkpoint_and_back_keeps_all_bits(void **state) {
    (void)state;
    every_case(convert);
}

static void imported_saved_loaded_and_exported_keeps_all_bits(void **state) {
    (void)state;
    every_case(pass);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_directory_converted_to_a_checkpoint_and_back_keeps_all_bits),
        cmocka_unit_test(imported_saved_loaded_and_exported_keeps_all_bits),
    };
    return cmocka_run_group_tests_name("golden.hf_checkpoint", tests, NULL, NULL);
}
