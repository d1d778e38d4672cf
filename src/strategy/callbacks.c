/* Connectors: ordered lists of callbacks. */
#include <megaloom/callbacks.h>
#include <stdlib.h>
#include <string.h>

struct loom_callbacks {
    loom_callback *list;
    int64_t count;
};

const char *loom_event_name(loom_event event) {
    switch (event) {
#define CASE(name, text)                                                                                               \
    case LOOM_EVENT_##name:                                                                                            \
        return text;
        LOOM_EVENT_LIST(CASE)
#undef CASE
    case LOOM_EVENT_COUNT:
        break;
    }
    return "?";
}

loom_status loom_callbacks_create(loom_callbacks **out) {
    loom_callbacks *callbacks = calloc(1, sizeof *callbacks);
    if (!callbacks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for callbacks");
    *out = callbacks;
    return LOOM_OK;
}

void loom_callbacks_destroy(loom_callbacks *callbacks) {
    if (callbacks)
        free(callbacks->list);
    free(callbacks);
}

static bool same(const loom_callback *a, const loom_callback *b) {
    bool equal = a->context == b->context;
    for (int i = 0; i < LOOM_EVENT_COUNT; i++)
        equal = equal && a->event[i] == b->event[i];
    return equal;
}

loom_status loom_callbacks_add(loom_callbacks *callbacks, const loom_callback *callback) {
    for (int64_t i = 0; i < callbacks->count; i++)
        if (same(&callbacks->list[i], callback))
            return LOOM_OK;
    loom_callback *grown = realloc(callbacks->list, (size_t)(callbacks->count + 1) * sizeof *grown);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld callbacks", (long long)(callbacks->count + 1));
    grown[callbacks->count++] = *callback;
    callbacks->list = grown;
    return LOOM_OK;
}

loom_status loom_callbacks_merge(loom_callbacks *callbacks, const loom_callbacks *other) {
    for (int64_t i = 0; i < other->count; i++)
        LOOM_TRY(loom_callbacks_add(callbacks, &other->list[i]));
    return LOOM_OK;
}

void loom_callbacks_remove(loom_callbacks *callbacks, const loom_callback *callback) {
    int64_t kept = 0;
    for (int64_t i = 0; i < callbacks->count; i++)
        if (!same(&callbacks->list[i], callback))
            callbacks->list[kept++] = callbacks->list[i];
    callbacks->count = kept;
}

int64_t loom_callbacks_count(const loom_callbacks *callbacks) {
    return callbacks->count;
}

loom_status loom_callbacks_call(const loom_callbacks *callbacks, loom_event event, loom_step *step) {
    for (int64_t i = 0; i < callbacks->count; i++) {
        const loom_callback *callback = &callbacks->list[i];
        loom_status status = callback->event[event] ? callback->event[event](callback->context, step) : LOOM_OK;
        if (status)
            return loom_fail_context(status, "%s: ", loom_event_name(event));
    }
    return LOOM_OK;
}
