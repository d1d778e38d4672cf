/* The field table: the one place that knows the name, type, default, range, meaning and state of every field of a run
 * file. */
#ifndef CONFIG_FIELD_H
#define CONFIG_FIELD_H

#include "base/faults.h"
#include "base/yaml.h"
#include "spec/architecture.h"
#include <megaloom/config.h>
#include <stdio.h>

typedef enum loom__field_kind {
    LOOM__FIELD_INT,    /* int64_t */
    LOOM__FIELD_REAL,   /* double */
    LOOM__FIELD_BOOL,   /* bool */
    LOOM__FIELD_STRING, /* const char * */
    LOOM__FIELD_CHOICE, /* const char *, one of `choices` */
    LOOM__FIELD_ENUM,   /* an enum of the size of int, one of `choices` */
    LOOM__FIELD_INTS,   /* int64_t[capacity], 0 ends the list */
    LOOM__FIELD_NAMES,  /* const char *[capacity], each one of `choices`; NULL ends the list; one needs no list */
    LOOM__FIELD_REALS,  /* double[capacity] and, at count_offset, their int64_t count; one needs no list */
    LOOM__FIELD_PATHS,  /* loom_data_path * and, at count_offset, its int64_t count */
    LOOM__FIELD_OBJECT  /* a pointer that only code can set */
} loom__field_kind;

typedef struct loom__choice {
    const char *name;
    int value;             /* of LOOM__FIELD_ENUM */
    const char *means;     /* the name that is stored when this one is given; NULL = itself */
    const char *not_built; /* why the choice is refused; NULL = it works */
} loom__choice;

typedef struct loom__field {
    const char *path;
    loom__field_kind kind;
    size_t offset;      /* in loom_run_config */
    const char *preset; /* the default, as in a run file */
    /* Where it depends on the architecture: that of gpt2, of llama, and of those that differ from llama; the preset is
     * then null. */
    const char *by_architecture[LOOM__ARCHITECTURE_COUNT];
    bool nullable;    /* null means 0, an empty list or NULL */
    bool positive;    /* a real that must be above `low`, not at it */
    bool open;        /* a real that must be below `high`, not at it */
    bool single;      /* a real that is computed with in fp32: its range holds for the rounded value */
    double low, high; /* of numbers; high 0 = no limit but the type's (2^53 for integers) */
    const loom__choice *choices;
    int choice_count;
    int capacity;
    size_t count_offset;
    bool of_hf;              /* decided by model.hf when that is given */
    bool run_only;           /* part of the run file alone */
    const char *section_key; /* the path is a section as well; inside it this field has this name ("" = none) */
    const char *not_built;   /* why anything but the default is refused; NULL = it works */
    const char *doc;
} loom__field;

extern const loom__field loom__fields[];
extern const int64_t loom__field_count;

/* One line for each section that begins a block of the run file; NULL where there is none. */
const char *loom__section_doc(const char *section);

/* Place in the table of the field with this path, or -1. "precision.precision" finds "precision". */
int64_t loom__field_find(const char *path);
/* Whether some field's path begins with path and a dot. */
bool loom__field_is_section(const char *path);

/* Writes the value in `config` as it stands in a run file: null, 0.001, [1, 2], quoted where a plain scalar would be
 * read as another type. */
void loom__field_write(const loom__field *field, const loom_run_config *config, FILE *to);
/* The same as text, cut off where it does not fit. */
void loom__field_text(const loom__field *field, const loom_run_config *config, char *text, size_t bytes);
/* What the field accepts: "an integer >= 1", "one of adam, sgd". */
void loom__field_expected(const loom__field *field, char *text, size_t bytes);
bool loom__field_is_default(const loom__field *field, const loom_run_config *config);
/* Sets the value from a node; false when the node has not the field's type, or is a 0 that would count as null where 0
 * is out of range (then nothing is set). Other ranges are not checked. Strings point into the node. Not for
 * LOOM__FIELD_PATHS, which takes null alone here. */
bool loom__field_set(
    const loom__field *field, const loom__yaml *yaml, const loom__yaml_node *node, loom_run_config *config);
/* Sets the default, that of the architecture where it depends on it (NULL and unknown names: gpt2). */
void loom__field_set_default(const loom__field *field, const char *architecture, loom_run_config *config);
/* to = from. Of strings and lists, which belong to their configuration, nothing is copied. */
void loom__field_copy(const loom__field *field, const loom_run_config *from, loom_run_config *to);

/* Checks the value's range, name and state; `place` ("run.yaml:3:5: ", "") goes before each message. */
void loom__field_check(
    const loom__field *field, const loom_run_config *config, const char *place, loom__faults *faults);
/* Checks all fields whose path begins with `prefix`. */
void loom__fields_check(const loom_run_config *config, const char *prefix, loom__faults *faults);

static inline void *loom__field_at(const loom__field *field, const loom_run_config *config) {
    return (char *)config + field->offset;
}

#endif
