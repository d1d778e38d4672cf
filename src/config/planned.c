/* The check of a run that is planned and not started. A field with a fault of its own is judged no further: everything
 * is checked as if it had its default, and what is then said about it is left out, so that each fault is told once and
 * none hides another. The rules are those of a run: what a run refuses, a plan tells, and nothing else. */
#include "config/check.h"
#include "config/field.h"
#include "config/sizes.h"
#include <stdlib.h>
#include <string.h>

/* Whether the line speaks of a field that has been named: by its own name, as a word. */
static bool is_about_faulty(const char *line, const bool *faulty) {
    static const char word[] = "abcdefghijklmnopqrstuvwxyz0123456789_";
    for (int64_t i = 0; i < loom__field_count; i++) {
        if (!faulty[i])
            continue;
        const char *dot = strrchr(loom__fields[i].path, '.'), *name = dot ? dot + 1 : loom__fields[i].path;
        size_t length = strlen(name);
        for (const char *at = line; (at = strstr(at, name)); at += length)
            if ((at == line || !strchr(word, at[-1])) && (!at[length] || !strchr(word, at[length])))
                return true;
    }
    return false;
}

void loom__check_planned(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults) {
    loom__faults found;
    loom_run_config sound = *config;
    loom__faults_begin(&found);
    found.not_built = faults->not_built;
    for (int64_t i = 0; i < loom__field_count; i++)
        if (faulty[i])
            loom__field_set_default(&loom__fields[i], NULL, &sound);
    /* What is missing of the data depends on their kind: mock data miss nothing. */
    if (faulty[loom__field_find("data.kind")])
        sound.data.kind = "mock";
    /* The table tells what is not built of the configuration as it is. */
    if (faults->not_built)
        loom__fields_check(&sound, "", &found);
    loom__check_run(&sound, world_size > 0 ? world_size : sound.ranks, &found);
    char *next;
    for (char *line = found.text; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        if (!is_about_faulty(line, faulty) && !loom__faults_has(faults, line))
            loom__faults_add(faults, LOOM_ERR_CONFIG, "%s", line);
    }
}
