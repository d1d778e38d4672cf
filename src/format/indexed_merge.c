/* Merging indexed datasets: the documents of one after those of the other. The inputs are opened, and so checked,
 * before anything is written; the output is a new set, whose pointers follow from its lengths, so that inputs which
 * select from a larger .bin are merged, too. */
#include "format/indexed.h"

#include <stdlib.h>

static loom_status check_alike(const loom_indexed *first, const loom_indexed *other) {
    if (loom_indexed_dtype(first) != loom_indexed_dtype(other))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: dtype is %s, expected %s, which %s has", loom_indexed_prefix(other),
            loom_dtype_name(loom_indexed_dtype(other)), loom_dtype_name(loom_indexed_dtype(first)),
            loom_indexed_prefix(first));
    if (loom_indexed_multimodal(first) != loom_indexed_multimodal(other))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: has %s, expected %s, as %s has", loom_indexed_prefix(other),
            loom_indexed_multimodal(other) ? "modes" : "no modes", loom_indexed_multimodal(first) ? "modes" : "none",
            loom_indexed_prefix(first));
    return LOOM_OK;
}

static loom_status add_set(loom_indexed_writer *writer, const loom_indexed *set) {
    for (int64_t document = 0; document < loom_indexed_documents(set); document++) {
        int64_t end = loom_indexed_document(set, document + 1);
        for (int64_t i = loom_indexed_document(set, document); i < end; i++)
            LOOM_TRY(loom_indexed_writer_add(
                writer, loom_indexed_data(set, i), loom_indexed_length(set, i), loom_indexed_mode(set, i)));
        LOOM_TRY(loom_indexed_writer_end_document(writer));
    }
    return LOOM_OK;
}

static loom_status write_sets(loom_indexed *const *sets, int64_t count, const char *output_prefix) {
    loom_indexed_writer *writer;
    LOOM_TRY(loom_indexed_writer_create(
        output_prefix, loom_indexed_dtype(sets[0]), loom_indexed_multimodal(sets[0]), &writer));
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < count && status == LOOM_OK; i++)
        status = add_set(writer, sets[i]);
    if (status == LOOM_OK)
        status = loom_indexed_writer_finish(writer);
    loom_indexed_writer_destroy(writer);
    return status;
}

loom_status loom_indexed_merge(const char *const *prefixes, int64_t count, const char *output_prefix) {
    if (count < 1 || !prefixes || !output_prefix || !*output_prefix)
        return loom_fail(LOOM_ERR_ARGUMENT, "merging needs at least one dataset and an output prefix");
    loom_indexed **sets = calloc((size_t)count, sizeof *sets);
    if (!sets)
        return loom_fail(LOOM_ERR_MEMORY, "no memory to merge %lld datasets", (long long)count);
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < count && status == LOOM_OK; i++) {
        status = loom_indexed_open(prefixes[i], &sets[i]);
        if (status == LOOM_OK)
            status = check_alike(sets[0], sets[i]);
    }
    if (status == LOOM_OK)
        status = write_sets(sets, count, output_prefix);
    for (int64_t i = 0; i < count; i++)
        loom_indexed_close(sets[i]);
    free(sets);
    return status;
}
