/* Messages between stages: activations and their gradients, with the conversion to and from what travels. */
#ifndef PIPELINE_EXCHANGE_H
#define PIPELINE_EXCHANGE_H

#include <megaloom/tensor.h>

typedef enum loom__flow { LOOM__FLOW_ACTIVATION, LOOM__FLOW_GRADIENT } loom__flow;

/* What a message is about. A boundary lies before every chunk of the model but the first; it has the number, on its
 * stage, of the chunk behind it, whichever way the message goes. */
typedef struct loom__message {
    loom__flow flow;
    int peer; /* place in the group of the stages */
    int64_t boundary, microbatch;
} loom__message;

/* A receive under way; zero at first, and again after it has been taken. */
typedef struct loom__incoming {
    loom__message message;
    bool posted;
    loom_request *head, *body;
    int64_t words[1 + LOOM_MAX_DIMS]; /* dims and shape, sent ahead */
    loom_tensor *wire;
    struct loom__incoming *next; /* among those whose shape is awaited */
} loom__incoming;

typedef enum loom__part { LOOM__PART_DATA, LOOM__PART_SHAPE } loom__part;

typedef struct loom__outgoing loom__outgoing;

typedef struct loom__exchange {
    loom_rank *rank;
    loom_comm *group;
    int64_t chunks, window; /* microbatches that have tags of their own */
    loom_dtype activations, wire;
    bool variable_shapes;
    loom__incoming *opening; /* whose shape is awaited, oldest first */
    loom__outgoing *first, *last;
    int64_t under_way, most_under_way; /* sends */
} loom__exchange;

/* Errors: LOOM_ERR_CONFIG when the chunks leave too few tags for the microbatches in flight. */
loom_status loom__exchange_open(loom__exchange *exchange, loom_rank *rank, loom_comm *group, int64_t chunks,
    loom_dtype activations, loom_dtype wire, bool variable_shapes);
/* The tag of one part of a message: below LOOM_TAG_COUNT, another for each flow, boundary, part, and microbatch of a
 * window. Messages that are a window apart share one; the later is not sent before the earlier has arrived. */
int loom__exchange_tag(const loom__exchange *exchange, const loom__message *message, loom__part part);
/* Starts a receive. The shape is that of the activation; not used with variable shapes. */
loom_status loom__exchange_post(
    loom__exchange *exchange, loom__incoming *incoming, const loom__message *message, int dims, const int64_t *shape);
/* Waits for it; *tensor has the dtype of activations and is the caller's. */
loom_status loom__exchange_take(loom__exchange *exchange, loom__incoming *incoming, loom_tensor **tensor);
/* Whether take would return at once. */
bool loom__exchange_arrived(const loom__incoming *incoming);
/* Starts a send of the tensor, whose reference it takes, also on failure; memory is given back when it is done. At
 * most `most` sends are under way afterwards (0: no limit). */
loom_status loom__exchange_send(
    loom__exchange *exchange, const loom__message *message, loom_tensor *tensor, int64_t most);
/* Moves everything on without waiting. */
loom_status loom__exchange_poll(loom__exchange *exchange);
/* Waits for all sends. */
loom_status loom__exchange_finish(loom__exchange *exchange);
/* After an error: gives everything up that is under way. The run ends with `why` when something was. What MPI may still
 * use, `incoming` among it, must stay where it is then (endpoint->lent). */
void loom__exchange_cancel_incoming(loom__exchange *exchange, loom__incoming *incoming, loom_status why);
void loom__exchange_cancel(loom__exchange *exchange, loom_status why);

#endif
