/* The one door to YAML: a bounded document as a tree of nodes with their places, and the scalars of the YAML 1.2 core
 * schema. No file is read here. */
#ifndef BASE_YAML_H
#define BASE_YAML_H

#include <megaloom/types.h>

enum { LOOM__YAML_MAX_BYTES = 1 << 20, LOOM__YAML_MAX_DEPTH = 16, LOOM__YAML_MAX_NODES = 1 << 16 };

typedef enum loom__yaml_kind { LOOM__YAML_SCALAR, LOOM__YAML_SEQUENCE, LOOM__YAML_MAPPING } loom__yaml_kind;

typedef struct loom__yaml_node {
    loom__yaml_kind kind;
    int line, column; /* counted from 1 */
    bool plain;       /* a scalar without quotes, whose text decides its type */
    const char *text; /* scalar: NUL-terminated, without NUL inside */
    int64_t count;    /* sequence: items; mapping: pairs */
    int64_t *items;   /* node numbers: count of them; a mapping has key, value, key, value, … (keys are scalars) */
} loom__yaml_node;

typedef struct loom__yaml loom__yaml;

/* Parses one document of `length` bytes; `name` stands in messages ("run.yaml:3:7: …"). Refused with LOOM_ERR_FORMAT,
 * by place: what is no YAML, more than one document, aliases, explicit tags, keys that are no scalars, NUL in a scalar,
 * and more than the limits above. */
loom_status loom__yaml_parse(const char *name, const char *text, size_t length, loom__yaml **yaml);
void loom__yaml_destroy(loom__yaml *yaml);

/* NULL for an empty document. Nodes live as long as the document. */
const loom__yaml_node *loom__yaml_root(const loom__yaml *yaml);
const loom__yaml_node *loom__yaml_at(const loom__yaml *yaml, int64_t number);

/* Whether the scalar is of that type by the core schema; the value in *value. A quoted scalar is a string only. An
 * integer is also a real. False also where an integer does not fit 64 bits. */
bool loom__yaml_is_null(const loom__yaml_node *node);
bool loom__yaml_is_bool(const loom__yaml_node *node, bool *value);
bool loom__yaml_is_int(const loom__yaml_node *node, int64_t *value);
bool loom__yaml_is_real(const loom__yaml_node *node, double *value);

#endif
