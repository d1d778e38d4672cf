/* Files of other programs from anyone: the first byte says whose. What is taken loads or is refused, by message. */
#include <megaloom/plan.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0)
        return 0;
    char *text = malloc(bytes);
    if (!text)
        return 0;
    memcpy(text, data + 1, bytes - 1);
    (void)loom_plan_is_nemo(text, bytes - 1);
    loom_plan_translation made = {0};
    loom_status status = data[0] == 'm' ? loom_plan_translate_megatron("fuzz", text, bytes - 1, &made)
                                        : loom_plan_translate_nemo("fuzz", text, bytes - 1, &made);
    if (status == LOOM_OK) {
        const loom_plan_check check = {.world_size = made.world_size};
        loom_run_config *config = NULL;
        char *not_built = NULL;
        if (!loom_run_config_load_planned(
                NULL, (const char *const *)made.overrides, made.override_count, &check, &config, &not_built)) {
            free(not_built);
            loom_run_config_destroy(config);
        }
        loom_plan_translation_free(&made);
    } else if (!*loom_error_message()) {
        abort();
    }
    free(text);
    return 0;
}
