/* Run files from anyone: whatever the bytes, loading ends with a configuration or with a message, and what it loads
 * prints and checks without harm. What was printed loads to the same values: it prints to the same text. */
#include <megaloom/config.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static loom_status keep(void *context, const char *text, size_t length) {
    char **kept = context;
    *kept = strndup(text, length);
    return *kept ? LOOM_OK : LOOM_ERR_MEMORY;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    loom_run_config *config = NULL, *again = NULL;
    char *once = NULL, *twice = NULL;
    if (loom_run_config_from_text("fuzz", (const char *)data, size, NULL, 0, &config) != LOOM_OK)
        return 0;
    loom_status checked = loom_run_config_check(config, 4);
    if (loom_run_config_print(config, keep, &once) != LOOM_OK ||
        loom_run_config_from_text("printed", once, strlen(once), NULL, 0, &again) != LOOM_OK ||
        loom_run_config_print(again, keep, &twice) != LOOM_OK)
        abort();
    if (strcmp(once, twice) != 0 || loom_run_config_check(again, 4) != checked)
        abort();
    free(once);
    free(twice);
    loom_run_config_destroy(again);
    loom_run_config_destroy(config);
    return 0;
}
