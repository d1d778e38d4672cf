/* Parts of a model. Every parameter belongs to the layer, or to the end of the model, that uses it, and goes where that
 * goes. One is used at both ends: tied word embeddings. Where the ends are on different stages the last one holds a
 * copy under the name of an untied head. The invariant: over all stages each canonical parameter has exactly one entry
 * that is no copy. */
#include "spec/part.h"
#include <stdlib.h>
#include <string.h>

static loom_status check_chunks(const loom__model_spec *spec, const loom_stage *chunks, int64_t count) {
    int64_t layers = spec->config.num_layers, from = 0;
    if (count < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "chunks of a stage: found %lld, expected 1 or more", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const loom_stage *chunk = &chunks[i];
        if (chunk->layers < 0 || (chunk->layers > 0 && (chunk->first_layer < from || chunk->layers > layers - from ||
                                                           chunk->first_layer > layers - chunk->layers)))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "chunk %lld of a stage has %lld layers from layer %lld on: expected layers from %lld to %lld, in order "
                "of depth",
                (long long)i, (long long)chunk->layers, (long long)chunk->first_layer, (long long)from,
                (long long)(layers - 1));
        if (chunk->layers > 0)
            from = chunk->first_layer + chunk->layers;
        if ((chunk->embedding && i > 0) || (chunk->loss && i < count - 1))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "chunk %lld of the %lld of a stage has the %s: expected in the %s chunk alone", (long long)i,
                (long long)count, chunk->embedding && i > 0 ? "embedding" : "loss",
                chunk->embedding && i > 0 ? "first" : "last");
    }
    return LOOM_OK;
}

static bool belongs(const loom__parameter_descriptor *parameter, const loom_stage *chunk) {
    switch (parameter->place) {
    case LOOM__PLACE_EMBEDDING:
        return chunk->embedding;
    case LOOM__PLACE_LAYER:
        return parameter->layer >= chunk->first_layer && parameter->layer < chunk->first_layer + chunk->layers;
    default:
        return chunk->loss;
    }
}

static void add_chunk(
    loom__part *part, const loom__model_spec *spec, bool apart, const loom_stage *chunk, int64_t number) {
    for (int64_t i = 0; i < spec->count; i++) {
        const loom__parameter_descriptor *parameter = &spec->parameters[i];
        if (belongs(parameter, chunk))
            part->entries[part->count++] = (loom__part_entry){.descriptor = parameter,
                .canonical = i,
                .chunk = number,
                .shared_ends = apart && parameter->tie_group > 0};
    }
    for (int64_t i = 0; apart && chunk->loss && spec->tied_head && i < spec->count; i++)
        if (spec->parameters[i].tie_group == spec->tied_head->tie_group)
            part->entries[part->count++] = (loom__part_entry){
                .descriptor = spec->tied_head, .canonical = i, .chunk = number, .shared_ends = true, .copy = true};
}

static void add_module_buffers(
    loom__part *part, const loom__model_spec *spec, const loom_stage *chunk, int64_t number) {
    for (int64_t i = spec->count; i < loom__spec_tensors(spec); i++)
        if (belongs(&spec->parameters[i], chunk))
            part->entries[part->count + part->module_buffers++] =
                (loom__part_entry){.descriptor = &spec->parameters[i], .canonical = i, .chunk = number};
}

static void number_places(loom__part *part) {
    int64_t at = 0;
    for (int apart = 0; apart < 2; apart++)
        for (int64_t i = part->count - 1; i >= 0; i--)
            if (loom__part_is_apart(part, part->entries[i].descriptor) == apart)
                part->entries[i].buffer_place = at++;
}

void loom__part_place_experts(loom__part *part, bool among) {
    part->experts_among = among;
    number_places(part);
}

loom_status loom__part_create(
    const loom__model_spec *spec, int64_t stages, const loom_stage *chunks, int64_t chunk_count, loom__part **part) {
    const loom_stage whole = {.layers = spec->config.num_layers, .embedding = true, .loss = true};
    if (!chunks) {
        chunks = &whole;
        chunk_count = 1;
    }
    LOOM_TRY(check_chunks(spec, chunks, chunk_count));
    loom__part *made = calloc(1, sizeof *made);
    if (made)
        made->entries = calloc((size_t)loom__spec_tensors(spec) + 1, sizeof *made->entries);
    if (!made || !made->entries) {
        free(made);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a part of %lld parameters", (long long)spec->count);
    }
    for (int64_t i = 0; i < chunk_count; i++)
        add_chunk(made, spec, stages > 1, &chunks[i], i);
    for (int64_t i = 0; i < chunk_count; i++)
        add_module_buffers(made, spec, &chunks[i], i);
    number_places(made);
    *part = made;
    return LOOM_OK;
}

void loom__part_keep_experts(loom__part *part, int64_t first, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < part->count; i++) {
        int64_t expert = part->entries[i].descriptor->expert;
        if (expert < 0 || (expert >= first && expert < first + count))
            part->entries[kept++] = part->entries[i];
    }
    memmove(part->entries + kept, part->entries + part->count, (size_t)part->module_buffers * sizeof *part->entries);
    part->count = kept;
    number_places(part);
}

void loom__part_destroy(loom__part *part) {
    if (!part)
        return;
    free(part->entries);
    free(part);
}
