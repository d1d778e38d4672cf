/* Printing a configuration as a run file, by a walk over the table. Indentation follows the dots of the paths; a
 * section's heading is written when the walk enters it. */
#include "config/field.h"
#include <stdlib.h>
#include <string.h>

typedef struct printer {
    FILE *to;
    const loom_run_config *config;
    bool comments;
    char section[128]; /* the one the walk is in */
} printer;

static int depth_of(const char *path) {
    int depth = 0;
    for (; *path; path++)
        depth += *path == '.';
    return depth;
}

/* Where the comment of a line that began at `start` begins. */
static void write_comment_mark(printer *out, long start) {
    enum { COLUMN = 48 };
    long width = ftell(out->to) - start;
    fprintf(out->to, "%*s# ", width < COLUMN ? (int)(COLUMN - width) : 1, "");
}

/* "; null: true (gpt2, gemma), else false" for a default that depends on the architecture: who differs from llama. */
static void list_defaults(const loom__field *field, FILE *to) {
    const char *const *defaults = field->by_architecture, *usual = defaults[LOOM__LLAMA];
    bool said[LOOM__ARCHITECTURE_COUNT] = {false};
    if (!usual)
        return;
    fputs("; null: ", to);
    for (int i = 0; i < LOOM__ARCHITECTURE_COUNT; i++) {
        if (said[i] || !defaults[i] || strcmp(defaults[i], usual) == 0)
            continue;
        fprintf(to, "%s (%s", defaults[i], loom__architecture_name((loom__architecture)i));
        for (int j = i + 1; j < LOOM__ARCHITECTURE_COUNT; j++)
            if (defaults[j] && strcmp(defaults[j], defaults[i]) == 0) {
                fprintf(to, ", %s", loom__architecture_name((loom__architecture)j));
                said[j] = true;
            }
        fputs("), ", to);
    }
    fprintf(to, "else %s", usual);
}

static void write_line(printer *out, const char *path, const char *key, const loom__field *field, bool commented_out) {
    long start = ftell(out->to);
    fprintf(out->to, "%*s%s%s:", 2 * depth_of(path), "", commented_out ? "# " : "", key);
    if (field) {
        fputc(' ', out->to);
        if (out->comments)
            fputs(field->by_architecture[0] ? "null" : field->preset, out->to);
        else
            loom__field_write(field, out->config, out->to);
    }
    if (out->comments && field) {
        write_comment_mark(out, start);
        fputs(field->doc, out->to);
        list_defaults(field, out->to);
        if (field->not_built)
            fprintf(out->to, " [not supported yet: %s]", field->not_built);
    } else if (out->comments && loom__section_doc(path)) {
        write_comment_mark(out, start);
        fputs(loom__section_doc(path), out->to);
    }
    fputc('\n', out->to);
}

/* Writes "model:" or "  ddp:" when the walk enters a section. */
static void enter_section(printer *out, const char *path) {
    const char *dot = strrchr(path, '.');
    int length = dot ? (int)(dot - path) : 0;
    if (strlen(out->section) == (size_t)length && strncmp(out->section, path, (size_t)length) == 0)
        return;
    bool back_out = strncmp(out->section, path, (size_t)length) == 0 && out->section[length] == '.';
    snprintf(out->section, sizeof out->section, "%.*s", length, path);
    if (length == 0 && out->comments)
        fputc('\n', out->to);
    if (length == 0 || back_out)
        return;
    const char *key = strrchr(out->section, '.');
    if (out->comments && !key)
        fputc('\n', out->to);
    write_line(out, out->section, key ? key + 1 : out->section, NULL, false);
}

static void print_field(printer *out, const loom__field *field) {
    const char *dot = strrchr(field->path, '.');
    const char *key = dot ? dot + 1 : field->path;
    if (field->section_key && *field->section_key) {
        char inside[128];
        snprintf(inside, sizeof inside, "%s.%s", field->path, field->section_key);
        enter_section(out, inside);
        write_line(out, inside, field->section_key, field, false);
        return;
    }
    /* A default of "strategy.ddp" is said by the mapping of its fields. */
    if (field->section_key && (out->comments || loom__field_is_default(field, out->config)))
        return;
    if (field->kind == LOOM__FIELD_OBJECT)
        return;
    enter_section(out, field->path);
    const loom_run_model *model = &out->config->model;
    bool decided = model->hf || (model->from && strcmp(field->path, "model.vocab_size") != 0);
    write_line(out, field->path, key, field, field->of_hf && !out->comments && decided);
}

static loom_status print_all(printer *out, loom_text_function write, void *context) {
    char *text = NULL;
    size_t length = 0;
    out->to = open_memstream(&text, &length);
    if (!out->to)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for printing a configuration");
    if (out->comments)
        fputs("# Megaloom run file: every field with its default. Any of them can be set on the command line as\n"
              "# a.b.c=value. Fields marked [not supported yet] accept their default only.\n\n",
            out->to);
    /* "ddp: pytorch" has no mapping of DDP fields. */
    const loom__field *ddp = &loom__fields[loom__field_find("strategy.ddp")];
    bool hide_ddp = !loom__field_is_default(ddp, out->config);
    for (int64_t i = 0; i < loom__field_count; i++)
        if (!hide_ddp || strncmp(loom__fields[i].path, "strategy.ddp.", 13) != 0)
            print_field(out, &loom__fields[i]);
    loom_status status = LOOM_OK;
    if (fclose(out->to) != 0)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for printing a configuration");
    else
        status = write(context, text, length);
    free(text);
    return status;
}

loom_status loom_run_config_print(const loom_run_config *config, loom_text_function write, void *context) {
    printer out = {.config = config};
    return print_all(&out, write, context);
}

loom_status loom_run_config_print_defaults(loom_text_function write, void *context) {
    loom_run_config config = loom_run_config_default();
    printer out = {.config = &config, .comments = true};
    return print_all(&out, write, context);
}
