/* Layouts of a pipeline from anyone, for several pipeline sizes and each number of layers that the text itself places.
 * What is taken places every layer once, in the order of depth. */
#include <megaloom/stages.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { LAYERS_MAX = 24 };

static void use(const loom_stage_split *split) {
    int64_t chunks, depth = 0;
    if (loom_stage_split_chunks(split, &chunks) != LOOM_OK)
        return;
    int64_t parts = chunks * split->pipeline_model_parallel_size;
    loom_stage *stages = malloc((size_t)parts * sizeof *stages);
    if (!stages)
        return;
    if (loom_stage_split_make(split, stages) == LOOM_OK) {
        for (int64_t i = 0; i < parts; i++) {
            if (stages[i].layers < 0 || stages[i].first_layer != depth)
                abort();
            depth += stages[i].layers;
        }
        if (depth != split->layers)
            abort();
    }
    free(stages);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1);
    if (!text)
        return 0;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    for (int64_t pp = 1; pp <= 4; pp++)
        for (int64_t layers = 1; layers <= LAYERS_MAX; layers++)
            use(&(loom_stage_split){
                .layers = layers, .pipeline_model_parallel_size = pp, .pipeline_model_parallel_layout = text});
    free(text);
    return 0;
}
