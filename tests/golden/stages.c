/* Layers of stages against the numbers of Megatron-Core (tests/golden/pipeline/layers.json). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/stages.h>

#include "support/golden.h"

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

/* A given zero is a value like any other, and a bad one, while 0 means "not given" in the structure. */
static int64_t optional_size(const json_t *item, const char *key) {
    int64_t value = golden_int(item, key, 0);
    return value == 0 && json_is_integer(json_object_get(item, key)) ? -1 : value;
}

static void compare(const json_t *item, const char *id, const loom_stage_split *split) {
    int64_t chunks, pp = split->pipeline_model_parallel_size, depth = 0;
    check(loom_stage_split_chunks(split, &chunks) == LOOM_OK, "%s: refused: %s", id, loom_error_message());
    check(chunks == golden_int(item, "vp_found", 1), "%s: %lld chunks, expected %lld", id, (long long)chunks,
        golden_int(item, "vp_found", 1));
    loom_stage *stages = malloc((size_t)(chunks * pp) * sizeof *stages);
    assert_non_null(stages);
    check(loom_stage_split_make(split, stages) == LOOM_OK, "%s: refused: %s", id, loom_error_message());
    const json_t *build = json_object_get(item, "build"), *offset = json_object_get(item, "offset");
    check((int64_t)json_array_size(build) == pp, "%s: %zu stages", id, json_array_size(build));
    for (int64_t i = 0; i < chunks * pp; i++) {
        const loom_stage *stage = &stages[i];
        json_int_t wanted =
            json_integer_value(json_array_get(json_array_get(build, (size_t)(i % pp)), (size_t)(i / pp)));
        json_int_t first =
            json_integer_value(json_array_get(json_array_get(offset, (size_t)(i % pp)), (size_t)(i / pp)));
        check(stage->layers == wanted, "%s: stage %lld chunk %lld has %lld layers, expected %lld", id,
            (long long)(i % pp), (long long)(i / pp), (long long)stage->layers, (long long)wanted);
        check(wanted == 0 || stage->first_layer == first, "%s: stage %lld chunk %lld begins at %lld, expected %lld", id,
            (long long)(i % pp), (long long)(i / pp), (long long)stage->first_layer, (long long)first);
        check(stage->first_layer == depth, "%s: chunk %lld of the depth does not follow the one before", id,
            (long long)i);
        check(stage->embedding == (i == 0) && stage->loss == (i == chunks * pp - 1), "%s: an end is misplaced", id);
        depth += stage->layers;
    }
    check(depth == split->layers, "%s: %lld layers in all", id, (long long)depth);
    free(stages);
}

static void refuse(const char *id, const loom_stage_split *split, loom_status expected) {
    int64_t chunks;
    /* A split that is refused may not be written, so room for its stages need not be known. */
    loom_error_clear();
    loom_status status = loom_stage_split_chunks(split, &chunks);
    if (status == LOOM_OK)
        status = loom_stage_split_make(split, NULL);
    check(status == expected || (!expected && status != LOOM_OK), "%s: status %s, expected %s", id,
        loom_status_name(status), expected ? loom_status_name(expected) : "a refusal");
    check(*loom_error_message(), "%s: refused without a word", id);
}

static void layers_of_stages_equal_the_reference(void **state) {
    (void)state;
    glob_t found = golden_glob("pipeline/layers*.json");
    int ran = 0, refused = 0, unbuilt = 0, wrong = 0, left = 0;
    for (size_t f = 0; f < found.gl_pathc; f++) {
        json_t *file = golden_json(found.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            const char *id = golden_string(item, "id", "?"), *layout = golden_string(item, "layout", NULL);
            loom_stage_split split = {.layers = golden_int(item, "layers", 0),
                .pipeline_model_parallel_size = golden_int(item, "pp", 1),
                .virtual_pipeline_model_parallel_size = optional_size(item, "vp"),
                .num_layers_in_first_pipeline_stage = optional_size(item, "first"),
                .num_layers_in_last_pipeline_stage = optional_size(item, "last"),
                .account_for_embedding_in_pipeline_split = golden_int(item, "account_embedding", 0) != 0,
                .account_for_loss_in_pipeline_split = golden_int(item, "account_loss", 0) != 0,
                .pipeline_model_parallel_layout = layout};
            bool predicts = layout && strchr(layout, 'm');
            if (golden_int(item, "mtp", 0) > 0 && !predicts) {
                left++; /* a number of prediction layers is no field yet, so the case cannot be said */
            } else if (predicts) {
                refuse(id, &split, LOOM_ERR_UNSUPPORTED);
                unbuilt++;
            } else if (golden_int(item, "error", 0) || golden_int(item, "reference_wrong", 0)) {
                refuse(id, &split, LOOM_ERR_CONFIG);
                refused++;
                wrong += golden_int(item, "reference_wrong", 0) != 0;
            } else {
                compare(item, id, &split);
                ran++;
            }
        }
        json_decref(file);
    }
    print_message("pipeline/layers: %zu files, %d cases equal, %d refused (%d where the reference is wrong), %d not "
                  "supported yet, %d left out\n",
        found.gl_pathc, ran, refused, wrong, unbuilt, left);
    if (!getenv("MEGALOOM_GOLDEN"))
        assert_true(found.gl_pathc == 1 && ran > 0 && refused > 0);
    globfree(&found);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(layers_of_stages_equal_the_reference)};
    return cmocka_run_group_tests_name("golden.stages", tests, NULL, NULL);
}
