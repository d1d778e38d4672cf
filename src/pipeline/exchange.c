/* Messages between stages. What travels is the pipeline's dtype: a sender converts before, a receiver after. Where
 * shapes vary, five integers go ahead, and the receive of the data starts when they have come.
 *
 * Invariant of the tags: a message is known by (flow, boundary, microbatch), and its tag holds all three, the last
 * modulo a window. Messages of one boundary and flow are sent and received in the order of their microbatches, and a
 * send waits until the message that had its tag before has arrived; so two messages that are alive never share a tag,
 * also where both neighbours are the same rank (two stages with chunks). */
#include "pipeline/exchange.h"
#include "comm/comm.h"
#include "runtime/rank.h"
#include <stdlib.h>

enum { FLOWS = 2, PARTS = 2, LEAST_WINDOW = 8, WORDS = 1 + LOOM_MAX_DIMS };

struct loom__outgoing {
    loom__outgoing *next;
    int peer, tag;
    loom_request *head, *body;
    loom_tensor *tensor; /* what is sent */
    int64_t words[WORDS];
};

loom_status loom__exchange_open(loom__exchange *exchange, loom_rank *rank, loom_comm *group, int64_t chunks,
    loom_dtype activations, loom_dtype wire, bool variable_shapes) {
    int64_t most = LOOM_TAG_COUNT / (FLOWS * PARTS * LEAST_WINDOW);
    if (chunks > most)
        return loom_fail(LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size: found %lld, expected at most %lld (messages between stages have %d "
            "tags)",
            (long long)chunks, (long long)most, LOOM_TAG_COUNT);
    *exchange = (loom__exchange){.rank = rank,
        .group = group,
        .chunks = chunks,
        .window = LOOM_TAG_COUNT / (FLOWS * PARTS * chunks),
        .activations = activations,
        .wire = wire,
        .variable_shapes = variable_shapes};
    return LOOM_OK;
}

int loom__exchange_tag(const loom__exchange *exchange, const loom__message *message, loom__part part) {
    int64_t line = ((int64_t)message->flow * PARTS + part) * exchange->chunks + message->boundary;
    return (int)(line * exchange->window + message->microbatch % exchange->window);
}

static bool is_done(const loom_request *request) {
    return !request || request->done;
}

/* Whether MPI may still use memory of messages that were given up: it stays allocated then. */
static bool is_lent(const loom__exchange *exchange) {
    return exchange->rank->endpoint->lent;
}

/* ---- conversion ---- */

static float value_at(loom_dtype dtype, const void *values, int64_t i) {
    switch (dtype) {
    case LOOM_BF16:
        return loom_bf16_to_f32(((const uint16_t *)values)[i]);
    case LOOM_F16:
        return loom_f16_to_f32(((const uint16_t *)values)[i]);
    default:
        return ((const float *)values)[i];
    }
}

/* Takes the reference of `tensor`; rounds once. */
static loom_status convert(
    const loom__exchange *exchange, loom_tensor *tensor, loom_dtype dtype, loom_tensor **converted) {
    if (tensor->dtype == dtype) {
        *converted = tensor;
        return LOOM_OK;
    }
    loom_status status = loom_tensor_create(exchange->rank, dtype, tensor->dims, tensor->shape, converted);
    int64_t count = status ? 0 : loom_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) {
        float value = value_at(tensor->dtype, tensor->data, i);
        if (dtype == LOOM_F32)
            loom_tensor_f32(*converted)[i] = value;
        else
            ((uint16_t *)(*converted)->data)[i] = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
    }
    loom_tensor_release(tensor);
    return status;
}

/* ---- receiving ---- */

static loom_status receive_body(loom__exchange *exchange, loom__incoming *incoming, int dims, const int64_t *shape) {
    const loom__message *message = &incoming->message;
    LOOM_TRY(loom_tensor_create(exchange->rank, exchange->wire, dims, shape, &incoming->wire));
    return loom_receive_start(exchange->group, incoming->wire->data, loom_tensor_count(incoming->wire), exchange->wire,
        message->peer, loom__exchange_tag(exchange, message, LOOM__PART_DATA), &incoming->body);
}

/* The shape has come; waits for it where it has not. */
static loom_status receive_after_shape(loom__exchange *exchange, loom__incoming *incoming) {
    loom_request *head = incoming->head;
    loom__incoming **link = &exchange->opening;
    while (*link != incoming)
        link = &(*link)->next;
    *link = incoming->next;
    incoming->head = NULL;
    LOOM_TRY(loom_wait(head));
    int64_t dims = incoming->words[0];
    if (dims < 0 || dims > LOOM_MAX_DIMS)
        return loom_fail(LOOM_ERR_INTERNAL, "a stage announces a tensor of %lld dimensions, expected 0 to %d",
            (long long)dims, LOOM_MAX_DIMS);
    return receive_body(exchange, incoming, (int)dims, incoming->words + 1);
}

loom_status loom__exchange_post(
    loom__exchange *exchange, loom__incoming *incoming, const loom__message *message, int dims, const int64_t *shape) {
    incoming->message = *message;
    incoming->posted = true;
    if (!exchange->variable_shapes)
        return receive_body(exchange, incoming, dims, shape);
    LOOM_TRY(loom_receive_start(exchange->group, incoming->words, WORDS, LOOM_I64, message->peer,
        loom__exchange_tag(exchange, message, LOOM__PART_SHAPE), &incoming->head));
    loom__incoming **link = &exchange->opening;
    while (*link)
        link = &(*link)->next;
    *link = incoming;
    incoming->next = NULL;
    return LOOM_OK;
}

bool loom__exchange_arrived(const loom__incoming *incoming) {
    return !incoming->head && incoming->wire && is_done(incoming->body);
}

loom_status loom__exchange_take(loom__exchange *exchange, loom__incoming *incoming, loom_tensor **tensor) {
    if (incoming->head)
        LOOM_TRY(receive_after_shape(exchange, incoming));
    loom_request *body = incoming->body;
    loom_tensor *wire = incoming->wire;
    incoming->body = NULL;
    loom_status status = loom_wait(body);
    incoming->wire = NULL;
    incoming->posted = false;
    if (status) {
        if (!is_lent(exchange))
            loom_tensor_release(wire);
        return status;
    }
    return convert(exchange, wire, exchange->activations, tensor);
}

void loom__exchange_cancel_incoming(loom__exchange *exchange, loom__incoming *incoming, loom_status why) {
    loom_cancel(incoming->head, why);
    loom_cancel(incoming->body, why);
    if (is_lent(exchange))
        return;
    loom_tensor_release(incoming->wire);
    *incoming = (loom__incoming){0};
}

/* ---- sending ---- */

static void drop(const loom__exchange *exchange, loom__outgoing *outgoing) {
    if (is_lent(exchange))
        return;
    loom_tensor_release(outgoing->tensor);
    free(outgoing);
}

/* Takes `*link` out of the list and waits for it. */
static loom_status complete(loom__exchange *exchange, loom__outgoing **link, loom__outgoing *before) {
    loom__outgoing *outgoing = *link;
    *link = outgoing->next;
    if (exchange->last == outgoing)
        exchange->last = before;
    exchange->under_way--;
    loom_status head = loom_wait(outgoing->head), body = loom_wait(outgoing->body);
    drop(exchange, outgoing);
    return head ? head : body;
}

/* Waits for the message that has the tag now. */
static loom_status free_tag(loom__exchange *exchange, int peer, int tag) {
    loom__outgoing **link = &exchange->first, *before = NULL;
    while (*link) {
        if ((*link)->peer == peer && (*link)->tag == tag)
            return complete(exchange, link, before);
        before = *link;
        link = &(*link)->next;
    }
    return LOOM_OK;
}

static loom_status start(loom__exchange *exchange, const loom__message *message, loom__outgoing *outgoing) {
    const loom_tensor *tensor = outgoing->tensor;
    if (exchange->variable_shapes) {
        outgoing->words[0] = tensor->dims;
        for (int i = 0; i < tensor->dims; i++)
            outgoing->words[1 + i] = tensor->shape[i];
        LOOM_TRY(loom_send_start(exchange->group, outgoing->words, WORDS, LOOM_I64, message->peer,
            loom__exchange_tag(exchange, message, LOOM__PART_SHAPE), &outgoing->head));
    }
    return loom_send_start(exchange->group, tensor->data, loom_tensor_count(tensor), exchange->wire, message->peer,
        outgoing->tag, &outgoing->body);
}

loom_status loom__exchange_send(
    loom__exchange *exchange, const loom__message *message, loom_tensor *tensor, int64_t most) {
    int tag = loom__exchange_tag(exchange, message, LOOM__PART_DATA);
    loom_status status = loom_tensor_ready(tensor);
    if (!status)
        status = free_tag(exchange, message->peer, tag);
    while (!status && most > 0 && exchange->under_way >= most)
        status = complete(exchange, &exchange->first, NULL);
    if (status) {
        loom_tensor_release(tensor);
        return status;
    }
    loom_tensor *wire = NULL;
    LOOM_TRY(convert(exchange, tensor, exchange->wire, &wire));
    loom__outgoing *outgoing = calloc(1, sizeof *outgoing);
    if (!outgoing) {
        loom_tensor_release(wire);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a message between stages");
    }
    *outgoing = (loom__outgoing){.peer = message->peer, .tag = tag, .tensor = wire};
    status = start(exchange, message, outgoing);
    if (status) {
        loom_cancel(outgoing->head, status);
        drop(exchange, outgoing);
        return status;
    }
    *(exchange->last ? &exchange->last->next : &exchange->first) = outgoing;
    exchange->last = outgoing;
    exchange->under_way++;
    if (exchange->under_way > exchange->most_under_way)
        exchange->most_under_way = exchange->under_way;
    return LOOM_OK;
}

loom_status loom__exchange_poll(loom__exchange *exchange) {
    loom__rank_progress(exchange->rank);
    while (exchange->opening && is_done(exchange->opening->head))
        LOOM_TRY(receive_after_shape(exchange, exchange->opening));
    loom__outgoing **link = &exchange->first, *before = NULL;
    while (*link) {
        if (is_done((*link)->head) && is_done((*link)->body)) {
            LOOM_TRY(complete(exchange, link, before));
            continue;
        }
        before = *link;
        link = &(*link)->next;
    }
    return LOOM_OK;
}

loom_status loom__exchange_finish(loom__exchange *exchange) {
    while (exchange->first)
        LOOM_TRY(complete(exchange, &exchange->first, NULL));
    return LOOM_OK;
}

void loom__exchange_cancel(loom__exchange *exchange, loom_status why) {
    exchange->opening = NULL;
    while (exchange->first) {
        loom__outgoing *outgoing = exchange->first;
        exchange->first = outgoing->next;
        loom_cancel(outgoing->head, why);
        loom_cancel(outgoing->body, why);
        drop(exchange, outgoing);
    }
    exchange->last = NULL;
    exchange->under_way = 0;
}
