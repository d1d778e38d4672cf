/* Run files from anyone: whatever the bytes, loading ends with a configuration or with a message, and what it loads
 * prints and checks without harm. */
#include <megaloom/config.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static loom_status reload(void *context, const char *text, size_t length) {
    return loom_run_config_from_text("printed", text, length, NULL, 0, context);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    loom_run_config *config = NULL, *again = NULL;
    if (loom_run_config_from_text("fuzz", (const char *)data, size, NULL, 0, &config) != LOOM_OK)
        return 0;
    loom_status checked = loom_run_config_check(config, 4);
    if (loom_run_config_print(config, reload, &again) != LOOM_OK)
        __builtin_trap();
    if (loom_run_config_check(again, 4) != checked)
        __builtin_trap();
    loom_run_config_destroy(again);
    loom_run_config_destroy(config);
    return 0;
}
