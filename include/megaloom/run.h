/* The folder of a run: what a run leaves there beside its metrics, how it is read back, and what is made of it: a page,
 * and the comparison of two runs.
 *
 * A run writes OUTPUT/run.yaml (its configuration, as understood), OUTPUT/run.json (the facts below) and
 * OUTPUT/metrics.jsonl; OUTPUT/timeline.svg where it was traced. Reading needs metrics.jsonl or run.json; whatever else
 * is missing is missing in the page. Nothing here is collective; everything may be called without ranks. */
#ifndef MEGALOOM_RUN_H
#define MEGALOOM_RUN_H

#include <megaloom/config.h>
#include <megaloom/layout.h>
#include <megaloom/report.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(ENUM, name): what a rank's memory is for. */
#define LOOM_RUN_MEMORY_LIST(X)                                                                                        \
    X(WEIGHTS, "weights")                                                                                              \
    X(GRADIENTS, "gradients")                                                                                          \
    X(OPTIMIZER, "optimizer")     /* moments, and masters of 16-bit weights */                                         \
    X(ACTIVATIONS, "activations") /* the allocator's high-water mark: activations, logits, buffers of operations */

typedef enum loom_run_memory {
#define LOOM_RUN_MEMORY_ENUM(name, text) LOOM_RUN_MEMORY_##name,
    LOOM_RUN_MEMORY_LIST(LOOM_RUN_MEMORY_ENUM)
#undef LOOM_RUN_MEMORY_ENUM
        LOOM_RUN_MEMORY_KINDS
} loom_run_memory;

enum { LOOM_RUN_NODE_BYTES = 64 };

/* A rank, as the run found it. */
typedef struct loom_run_rank {
    char node[LOOM_RUN_NODE_BYTES];        /* the machine's name; "" = unknown */
    double bytes[LOOM_RUN_MEMORY_KINDS];   /* measured at the end; NaN = not measured */
    double planned[LOOM_RUN_MEMORY_KINDS]; /* expected before the run; NaN = not planned */
} loom_run_rank;

/* X(ENUM, name): how far a run has come. */
#define LOOM_RUN_STATE_LIST(X)                                                                                         \
    X(RUNNING, "running") /* or killed: nobody has written down an end */                                              \
    X(FINISHED, "finished")                                                                                            \
    X(STOPPED, "stopped") /* before its last step, as asked */                                                         \
    X(FAILED, "failed")

typedef enum loom_run_state {
#define LOOM_RUN_STATE_ENUM(name, text) LOOM_RUN_##name,
    LOOM_RUN_STATE_LIST(LOOM_RUN_STATE_ENUM)
#undef LOOM_RUN_STATE_ENUM
        LOOM_RUN_STATE_COUNT
} loom_run_state;

/* One start of a run; a run that was resumed has several. Times are seconds since 1970; 0 = unknown. */
typedef struct loom_run_session {
    int64_t first_step; /* from 1 */
    int64_t began, ended;
} loom_run_session;

typedef struct loom_run_facts {
    loom_run_state state;
    const char *message; /* why it stopped or failed; NULL = none */
    int64_t ranks, threads, steps;
    double gemm_rate;       /* FLOP/s of all ranks together; NaN = not measured, as the next one */
    double flops_per_token; /* of a training step */
    const loom_run_session *sessions;
    int64_t session_count;
    const loom_run_rank *rank; /* [ranks], or NULL */
} loom_run_facts;
/* Writes FOLDER/run.json, in place of one that is there, in one moment. */
LOOM_API loom_status loom_run_write_facts(const char *folder, const loom_run_facts *facts);
/* Writes FOLDER/run.yaml. */
LOOM_API loom_status loom_run_write_config(const char *folder, const loom_run_config *config);

/* Numbers that not every run has, those of routers among them, by their name in metrics.jsonl. */
typedef struct loom_run_series {
    char *name; /* "expert_load", "moe/z_loss_layer_3", … */
    int64_t count;
    int64_t *steps; /* [count], ascending: those whose line has the number */
    double *values; /* [count]; an infinity where the line has null */
} loom_run_series;

/* A run as read back; everything belongs to it. */
typedef struct loom_run_record {
    char *folder;
    loom_run_facts facts;      /* ranks is 0 without a run.json */
    char *config_text;         /* run.yaml; NULL = not there */
    loom_run_config *config;   /* the same, understood; NULL where this version does not */
    loom_step_report *reports; /* one a step, steps ascending; NaN where a line has no such number */
    int64_t count;
    loom_run_series *series; /* [series_count], in the order of their names; loom_run_find_series */
    int64_t series_count;
    int64_t damaged;   /* lines that are none, as the last one of a run that was killed */
    int64_t repeated;  /* lines of steps that a later line tells again: the later one holds */
    double test_loss;  /* of the last test; NaN = there was none */
    int64_t test_step; /* after which it was */
    char *timeline;    /* timeline.svg; NULL = not there */
} loom_run_record;
/* LOOM_ERR_NOT_FOUND: neither file is there; LOOM_ERR_FORMAT: run.json is none. */
LOOM_API loom_status loom_run_read(const char *folder, loom_run_record **run);
LOOM_API void loom_run_destroy(loom_run_record *run); /* NULL is accepted */
/* NULL: no line has such a number, or it is a member of loom_step_report. */
LOOM_API const loom_run_series *loom_run_find_series(const loom_run_record *run, const char *name);

/* One self-contained page: curves, memory, the timeline, the rank map, the configuration, warnings. Scripts and styles
 * are in it, and it asks for nothing else. Curves of many steps are drawn of at most `points` stretches with the
 * smallest, the largest and the mean value of each; 0 = 1000. */
LOOM_API loom_status loom_run_write_html(FILE *out, const loom_run_record *run, int64_t points);

/* ---- Who is where, drawn ---- */

typedef struct loom_topology_picture {
    int64_t ranks_per_node; /* ranks of a box, in order; 0 = 8 */
    int64_t rank;           /* this one is picked out, with all its groups; -1 = none */
} loom_topology_picture;
enum { LOOM_TOPOLOGY_PICTURE_RANKS = 4096 };
/* A panel for each kind of group with more than one member, the ranks in boxes by node and coloured by group; kinds
 * with the same groups share a panel. LOOM_ERR_ARGUMENT: more ranks than LOOM_TOPOLOGY_PICTURE_RANKS, or no such rank.
 */
LOOM_API loom_status loom_topology_write_svg(
    FILE *out, const loom_layout *layout, const loom_topology_picture *picture);
/* The same as a self-contained page, in which a rank can be picked. */
LOOM_API loom_status loom_topology_write_html(
    FILE *out, const loom_layout *layout, const loom_topology_picture *picture);

/* ---- Two runs ---- */

/* How far two runs of the same training may be apart by rounding alone.
 *
 * Let e(t) = |a - b| / max(|a|, |b|) of the losses of step t, t counted from 1 at the first step that both have, and
 * g(t) the same of the gradient norms. Both begin there with the same weights, so e(1) is the rounding of one forward
 * whose sums are in another order; each later step adds the rounding of a gradient and an update. These errors are of
 * the size of LOOM_NOISE_UNITS unit roundoffs u of the activations: 2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16 (there
 * 4: the loss is a mean in fp32 over many tokens, whose roundings cancel). Training may amplify a difference,
 * exponentially where it is unstable, but it amplifies what is there, and no step of a training that works does so more
 * than LOOM_NOISE_GROWTH times. What is there is seen in the norms too, also where two losses happen to cross. Hence
 *
 *     e(t) <= max(LOOM_NOISE_UNITS u, LOOM_NOISE_GROWTH max of e(s) and g(s) over s < t),
 *
 * and, where the weights are known to be equal because t = 1 is step 1 of both,
 *
 *     g(1) <= LOOM_NOISE_NORM_UNITS u.
 *
 * A fault of a layout (a sum that is missing, a shard at the wrong place) does not grow out of rounding: it is there at
 * once, in the first forward, the first gradient, or the step after the first wrong update. What is below the first
 * bounds there and grows from there passes.
 *
 * Runs c that differ from a by rounding alone, because they had another layout that is trusted, or another size of
 * microbatches, measure the amplification instead of bounding it. With such ones
 *
 *     e(t) <= max(LOOM_NOISE_FLOOR u, LOOM_NOISE_FACTOR max of |a - c| / max(|a|, |c|) over them and over s <= t)
 *
 * takes the place of the first bound, up to the last step that one of them has; beyond it nothing is judged.
 * `megaloom check-layout`, which makes such runs and looks at every tensor, is sharper still. */
#define LOOM_NOISE_UNITS 100.0
#define LOOM_NOISE_GROWTH 8.0
#define LOOM_NOISE_NORM_UNITS 200.0
#define LOOM_NOISE_FLOOR 16.0
#define LOOM_NOISE_FACTOR 16.0
/* The bound of e for `precision` ("32", "bf16-mixed", "16-mixed") where `largest` is the largest e or g before; 0 =
 * none. */
LOOM_API double loom_run_noise_bound(const char *precision, double largest);

typedef struct loom_run_difference {
    int64_t first, last, common; /* the first and the last step that both have; how many */
    int64_t equal;               /* of them with the same bits in the loss */
    double begin;                /* e(1) */
    double largest;              /* of e */
    int64_t largest_step;
    int64_t beyond;     /* the first step with e, or g, above its bound; 0 = none */
    double at, allowed; /* e, or g, and the bound there */
    bool of_norm;       /* it is g */
    int64_t judged;     /* the last step that was; before `last` where the measure of rounding ends */
    bool precision_known;
} loom_run_difference;
/* noise: [noise_count] runs that differ from a by rounding alone; NULL, 0 = none. LOOM_ERR_ARGUMENT: no step is in
 * both, or none in a and one of `noise`. A loss that is NaN or infinite in one of them is beyond every bound. */
LOOM_API loom_status loom_runs_compare(const loom_run_record *a, const loom_run_record *b,
    const loom_run_record *const *noise, int64_t noise_count, loom_run_difference *difference);
/* Calls function(context, field, in_a, in_b) for each field whose value differs in the two run.yaml; NULL stands for a
 * field that one of them lacks. LOOM_ERR_NOT_FOUND: one has no run.yaml. */
typedef loom_status (*loom_run_field_function)(void *context, const char *field, const char *a, const char *b);
LOOM_API loom_status loom_runs_compare_config(
    const loom_run_record *a, const loom_run_record *b, loom_run_field_function function, void *context);
/* The page of it: curves over each other, the difference beside its bound. `noise` as above; `note` is one line; NULL =
 * none. */
LOOM_API loom_status loom_runs_write_html(FILE *out, const loom_run_record *a, const loom_run_record *b,
    const loom_run_record *const *noise, int64_t noise_count, const loom_run_difference *difference, const char *note,
    int64_t points);

#ifdef __cplusplus
}
#endif
#endif
