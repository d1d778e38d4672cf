/* Levels of strictness, by Megatron-Core's names. Each says of two things, what the state lacks in the checkpoint and
 * what the checkpoint has beyond the state, whether they are an error, a warning, an answer or nothing. The invariant:
 * a list that a level ignores is empty behind it. */
#include "base/nearest.h"
#include "state/state.h"
#include <stdio.h>
#include <stdlib.h>

typedef enum reaction { IGNORED, RETURNED, LOGGED, RAISED } reaction;

static const struct level {
    const char *name;
    reaction absent, beyond;
} levels[] = {
    [LOOM_STRICT_RETURN_ALL] = {"return_all", RETURNED, RETURNED},
    [LOOM_STRICT_RAISE_ALL] = {"raise_all", RAISED, RAISED},
    [LOOM_STRICT_ASSUME_OK_UNEXPECTED] = {"assume_ok_unexpected", RAISED, IGNORED},
    [LOOM_STRICT_LOG_UNEXPECTED] = {"log_unexpected", LOGGED, IGNORED},
    [LOOM_STRICT_LOG_ALL] = {"log_all", LOGGED, LOGGED},
    [LOOM_STRICT_RAISE_UNEXPECTED] = {"raise_unexpected", RAISED, IGNORED},
    [LOOM_STRICT_RETURN_UNEXPECTED] = {"return_unexpected", RETURNED, IGNORED},
    [LOOM_STRICT_IGNORE_ALL] = {"ignore_all", IGNORED, IGNORED},
};
enum { LEVELS = sizeof levels / sizeof *levels };

const char *loom_strict_name(loom_strict strict) {
    return (unsigned)strict < LEVELS ? levels[strict].name : "unknown";
}

loom_status loom_strict_parse(const char *name, loom_strict *strict) {
    loom__nearest nearest;
    loom__nearest_begin(&nearest, name);
    for (int i = 0; i < LEVELS; i++) {
        if (strcmp(levels[i].name, name) == 0) {
            *strict = (loom_strict)i;
            return LOOM_OK;
        }
        loom__nearest_offer(&nearest, levels[i].name);
    }
    return loom_fail(LOOM_ERR_ARGUMENT,
        "strict: found %.60s, expected one of assume_ok_unexpected, log_unexpected, log_all, raise_unexpected, "
        "raise_all, return_unexpected, return_all, ignore_all%s%s",
        name, nearest.best ? "; did you mean " : "", nearest.best ? nearest.best : "");
}

loom_strict loom__strict_of_module(loom_strict strict) {
    bool raises = (unsigned)strict < LEVELS && levels[strict].absent == RAISED;
    return raises ? LOOM_STRICT_RAISE_ALL : strict;
}

loom_status loom__names_add(char ***names, int64_t *count, const char *prefix, const char *name) {
    char **grown = realloc(*names, (size_t)(*count + 1) * sizeof *grown);
    size_t bytes = strlen(prefix) + strlen(name) + 1;
    if (grown)
        *names = grown;
    char *made = grown ? malloc(bytes) : NULL;
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of %lld names", (long long)*count + 1);
    snprintf(made, bytes, "%s%s", prefix, name);
    grown[(*count)++] = made;
    return LOOM_OK;
}

void loom__names_free(char **names, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

static void clear(char ***names, int64_t *count) {
    loom__names_free(*names, *count);
    *names = NULL;
    *count = 0;
}

/* " 2 missing (a, b);" with as many names as fit in a third of the text. */
static size_t say_names(char *text, size_t bytes, size_t part, const char *what, char *const *names, int64_t count) {
    size_t used = 0;
    if (count == 0)
        return 0;
    used += (size_t)snprintf(text, bytes, " %lld %s (", (long long)count, what);
    for (int64_t i = 0; i < count; i++) {
        if (used + strlen(names[i]) + 16 > part) {
            used += (size_t)snprintf(text + used, bytes - used, "%s…", i ? ", " : "");
            break;
        }
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? ", " : "", names[i]);
    }
    return used + (size_t)snprintf(text + used, bytes - used, ");");
}

/* The lists whose level has the reaction; whether there are any. */
static bool say(const struct level *level, reaction wanted, const loom_load_report *report, char *text, size_t bytes) {
    size_t used = 0, part = bytes / 3;
    text[0] = '\0';
    if (level->absent == wanted)
        used += say_names(text, bytes, part, "missing", report->missing, report->missing_count);
    if (level->beyond == wanted)
        used += say_names(text + used, bytes - used, part, "unexpected", report->unexpected, report->unexpected_count);
    if (level->absent == wanted)
        used += say_names(text + used, bytes - used, part, "misshaped", report->misshaped, report->misshaped_count);
    return used > 0;
}

loom_status loom__strict_apply(loom_strict strict, loom_rank *rank, const char *where, loom_load_report *report) {
    char text[3072];
    if ((unsigned)strict >= LEVELS)
        return loom_fail(LOOM_ERR_ARGUMENT, "strict: found level %d, expected 0 to %d", (int)strict, LEVELS - 1);
    const struct level *level = &levels[strict];
    if (say(level, RAISED, report, text, sizeof text))
        return loom_fail(LOOM_ERR_NOT_FOUND,
            "%s does not hold the state:%s a load that is not strict takes what there is", where, text);
    if (say(level, LOGGED, report, text, sizeof text) && loom_rank_index(rank) == 0)
        loom_rank_log(rank, LOOM_LOG_WARNING, "%s does not hold the state:%s the rest is loaded", where, text);
    if (level->absent == IGNORED) {
        clear(&report->missing, &report->missing_count);
        clear(&report->misshaped, &report->misshaped_count);
    }
    if (level->beyond == IGNORED)
        clear(&report->unexpected, &report->unexpected_count);
    return LOOM_OK;
}
