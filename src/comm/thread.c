/* Ranks that are threads of one process: members publish where their buffers lie and read each other's memory.
 *
 * A group has a ring of posts and three counters a member: posted, reduced, copied. Counter c of member m says that m
 * has passed that stage of its operations 0 … c-1; each member passes its stages in the order of its calls. Operation k
 * may reduce when all members have posted k, copy results when all have reduced k, and is finished when all have copied
 * k: then nobody reads anybody's buffers of k, nor post k, whose place in the ring is free again.
 *
 * Invariant (memory after a failure): a member reads foreign memory only between setting its `reading` word and
 * clearing it, and looks at the abort flag after setting it. A member that leaves a wait after a failure first waits
 * until the abort flag is set and then until all `reading` words are clear, so its buffers are its own again. */
#include "base/parts.h"
#include "comm/comm.h"
#include "comm/reduce.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    DEPTH = 16,           /* operations of a group that can be posted at once; further ones wait their turn */
    SMALL_BYTES = 2048,   /* an all-reduce of at most this is reduced by every member for itself */
    PIECE_BYTES = 1 << 20 /* between two looks at the abort flag */
};

enum { STAGE_NEW, STAGE_POSTED, STAGE_REDUCED, STAGE_COPIED }; /* of collectives */
enum { STAGE_WAITING, STAGE_MATCHED };                         /* of messages */

typedef struct post {
    loom__operation operation;
    loom_dtype dtype;
    loom_reduce reduce;
    int root;
    const void *in;
    void *out;
    int64_t count;
    const int64_t *counts, *receive_counts;
} post;

typedef struct member {
    _Alignas(64) _Atomic int64_t posted;
    _Atomic int64_t reduced, copied;
} member;

enum { MAIL_WAITING, MAIL_TAKEN, MAIL_DELIVERED, MAIL_MISMATCH };

/* A send that waits for its receiver; owned by the send's request. */
typedef struct mail {
    struct mail *next;
    int from, tag;
    const void *buffer;
    int64_t count, received_count;
    loom_dtype dtype, received_dtype;
    _Atomic int state;
} mail;

typedef struct mailbox {
    pthread_mutex_t lock;
    mail *first;
} mailbox;

typedef struct thread_group {
    struct thread_group *next; /* among those that still wait for members */
    uint64_t key;
    int size;
    int joined, users;
    bool *has_joined; /* [size] */
    member *members;  /* [size] */
    post *posts;      /* [DEPTH][size] */
    mailbox *boxes;   /* [size], by receiver */
} thread_group;

typedef struct rank_words {
    _Alignas(64) _Atomic uint32_t sleeping;
    _Alignas(64) _Atomic uint32_t reading;
} rank_words;

struct loom__thread_world {
    int size;
    pthread_mutex_t lock; /* of the fields down to `groups` */
    int users;
    thread_group *groups; /* waiting for members */
    loom__board *board;
    rank_words *words; /* [size] */
};

static void *zeroed(size_t alignment, size_t bytes) {
    size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    void *memory = aligned_alloc(alignment, rounded);
    if (memory)
        memset(memory, 0, rounded);
    return memory;
}

loom_status loom__thread_world_create(int size, loom__thread_world **out) {
    loom__thread_world *world = calloc(1, sizeof *world);
    loom__board *board = zeroed(64, loom__board_bytes(size));
    rank_words *words = zeroed(64, (size_t)size * sizeof *words);
    if (!world || !board || !words) {
        free(world);
        free(board);
        free(words);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a world of %d thread ranks", size);
    }
    pthread_mutex_init(&world->lock, NULL);
    board->pages = size;
    world->size = size;
    world->users = 1;
    world->board = board;
    world->words = words;
    *out = world;
    return LOOM_OK;
}

loom__board *loom__thread_world_board(loom__thread_world *world) {
    return world->board;
}

void loom__thread_world_destroy(loom__thread_world *world) {
    if (!world)
        return;
    pthread_mutex_lock(&world->lock);
    bool last = --world->users == 0;
    pthread_mutex_unlock(&world->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&world->lock);
    free(world->board);
    free(world->words);
    free(world);
}

static void wake(loom__thread_world *world, int rank) {
    _Atomic uint32_t *word = &world->words[rank].sleeping;
    if (atomic_load_explicit(word, memory_order_seq_cst) != 0 &&
        atomic_exchange_explicit(word, 0, memory_order_seq_cst) != 0)
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void loom__thread_world_wake(loom__thread_world *world) {
    for (int rank = 0; rank < world->size; rank++)
        wake(world, rank);
}

static loom__thread_world *world_of(const loom_comm *comm) {
    return comm->endpoint->state;
}

static bool begin_reading(const loom_comm *comm) {
    _Atomic uint32_t *word = &world_of(comm)->words[comm->endpoint->rank].reading;
    atomic_store_explicit(word, 1, memory_order_seq_cst);
    if (!loom__board_aborted(comm->endpoint->board))
        return true;
    atomic_store_explicit(word, 0, memory_order_seq_cst);
    return false;
}

static void end_reading(const loom_comm *comm) {
    atomic_store_explicit(&world_of(comm)->words[comm->endpoint->rank].reading, 0, memory_order_seq_cst);
}

static void quiesce(loom__endpoint *endpoint) {
    loom__thread_world *world = endpoint->state;
    /* Another rank may have failed first and not have published it yet: until then readers may still begin. */
    while (!loom__board_aborted(endpoint->board))
        sched_yield();
    loom__thread_world_wake(world);
    for (int rank = 0; rank < world->size; rank++)
        if (rank != endpoint->rank)
            while (atomic_load_explicit(&world->words[rank].reading, memory_order_seq_cst) != 0)
                sched_yield();
}

/* Groups. */

static void free_group(thread_group *group) {
    if (group->boxes)
        for (int i = 0; i < group->size; i++)
            pthread_mutex_destroy(&group->boxes[i].lock);
    free(group->has_joined);
    free(group->members);
    free(group->posts);
    free(group->boxes);
    free(group);
}

static thread_group *new_group(const loom_comm *comm) {
    size_t size = (size_t)comm->size;
    thread_group *group = calloc(1, sizeof *group);
    if (!group)
        return NULL;
    group->key = comm->key;
    group->size = comm->size;
    group->has_joined = calloc(size, sizeof *group->has_joined);
    group->members = zeroed(64, size * sizeof *group->members);
    group->posts = calloc(size * DEPTH, sizeof *group->posts);
    group->boxes = calloc(size, sizeof *group->boxes);
    if (group->boxes)
        for (size_t i = 0; i < size; i++)
            pthread_mutex_init(&group->boxes[i].lock, NULL);
    if (group->has_joined && group->members && group->posts && group->boxes)
        return group;
    free_group(group);
    return NULL;
}

/* The first member to come makes the group, the others find it among those that wait; nobody waits here. */
static loom_status create_group(loom_comm *comm) {
    loom__thread_world *world = world_of(comm);
    pthread_mutex_lock(&world->lock);
    thread_group **link = &world->groups;
    while (*link && ((*link)->key != comm->key || (*link)->size != comm->size || (*link)->has_joined[comm->place]))
        link = &(*link)->next;
    if (!*link)
        *link = new_group(comm);
    thread_group *group = *link;
    if (group) {
        group->has_joined[comm->place] = true;
        group->users++;
        if (++group->joined == group->size)
            *link = group->next;
    }
    pthread_mutex_unlock(&world->lock);
    comm->state = group;
    return group ? LOOM_OK
                 : loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory for %d members", comm->name, comm->size);
}

static void destroy_group(loom_comm *comm) {
    loom__thread_world *world = world_of(comm);
    thread_group *group = comm->state;
    pthread_mutex_lock(&world->lock);
    bool last = --group->users == 0;
    if (last && group->joined < group->size) {
        thread_group **link = &world->groups;
        while (*link != group)
            link = &(*link)->next;
        *link = group->next;
    }
    pthread_mutex_unlock(&world->lock);
    if (last)
        free_group(group);
}

/* Collectives. */

static void passed(loom_comm *comm, _Atomic int64_t *counter, int64_t value) {
    thread_group *group = comm->state;
    atomic_store_explicit(counter, value, memory_order_seq_cst);
    for (int i = 0; i < group->size; i++)
        if (i != comm->place)
            wake(world_of(comm), comm->ranks[i]);
}

enum counter { POSTED, REDUCED, COPIED };

static bool all_passed(const thread_group *group, enum counter which, int64_t value) {
    for (int i = 0; i < group->size; i++) {
        member *m = &group->members[i];
        _Atomic int64_t *counter = which == POSTED ? &m->posted : which == REDUCED ? &m->reduced : &m->copied;
        if (atomic_load_explicit(counter, memory_order_seq_cst) < value)
            return false;
    }
    return true;
}

static post *post_of(const thread_group *group, int64_t number, int place) {
    return &group->posts[(size_t)(number % DEPTH) * (size_t)group->size + (size_t)place];
}

static int64_t sum_before(const int64_t *counts, int place) {
    int64_t sum = 0;
    for (int i = 0; i < place; i++)
        sum += counts[i];
    return sum;
}

static bool same_counts(const post *a, const post *b, int size) {
    if (a->operation != LOOM__ALL_GATHER && a->operation != LOOM__REDUCE_SCATTER)
        return a->operation == LOOM__ALL_TO_ALL || a->count == b->count;
    return memcmp(a->counts, b->counts, (size_t)size * sizeof *a->counts) == 0;
}

/* All members compare all posts with member 0's, so all come to the same verdict. Called while reading. */
static int find_disagreement(const thread_group *group, int64_t number) {
    const post *first = post_of(group, number, 0);
    for (int i = 1; i < group->size; i++) {
        const post *other = post_of(group, number, i);
        if (other->operation != first->operation || other->dtype != first->dtype || other->reduce != first->reduce ||
            other->root != first->root || !same_counts(first, other, group->size))
            return i;
    }
    return -1;
}

static void say_post(const post *p, char *text, size_t bytes) {
    if (p->operation == LOOM__BARRIER || p->operation == LOOM__ALL_TO_ALL)
        snprintf(text, bytes, "%s", loom__operation_name(p->operation));
    else if (p->operation == LOOM__BROADCAST)
        snprintf(text, bytes, "broadcast of %lld %s from member %d", (long long)p->count, loom_dtype_name(p->dtype),
            p->root);
    else if (p->operation == LOOM__ALL_REDUCE)
        snprintf(text, bytes, "all_reduce (%s) of %lld %s", p->reduce == LOOM_SUM ? "sum" : "max", (long long)p->count,
            loom_dtype_name(p->dtype));
    else
        snprintf(text, bytes, "%s of %s, %lld elements for member 0, …", loom__operation_name(p->operation),
            loom_dtype_name(p->dtype), (long long)p->counts[0]);
}

static loom_status disagreement(loom_request *request, int64_t number, int place) {
    const loom_comm *comm = request->comm;
    const thread_group *group = comm->state;
    char first[128], other[128];
    say_post(post_of(group, number, 0), first, sizeof first);
    say_post(post_of(group, number, place), other, sizeof other);
    end_reading(comm);
    return loom__endpoint_fail(comm->endpoint, LOOM_ERR_COMM,
        "members of group %s disagree about operation #%llu: rank %d came to %s, rank %d to %s%s", comm->name,
        (unsigned long long)request->sequence, comm->ranks[0], first, comm->ranks[place], other,
        strcmp(first, other) == 0 ? " with other counts" : "");
}

/* dst[0 … bytes) = src, in pieces; false when the run was aborted in between. */
static bool copy_pieces(const loom_comm *comm, void *dst, const void *src, size_t bytes) {
    for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
        if (loom__board_aborted(comm->endpoint->board))
            return false;
        memcpy((char *)dst + done, (const char *)src + done, bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES);
    }
    return true;
}

/* out[0 … count) = the reduction of all members' in[first … first+count). */
static bool reduce_pieces(loom_request *request, int64_t number, int64_t first, int64_t count, void *out) {
    const loom_comm *comm = request->comm;
    const thread_group *group = comm->state;
    int64_t element = (int64_t)loom_dtype_size(request->dtype), piece = PIECE_BYTES / element;
    const void *few[64];
    const void **inputs = group->size <= 64 ? few : malloc((size_t)group->size * sizeof *inputs);
    bool good = inputs != NULL;
    if (!good)
        loom__endpoint_fail(comm->endpoint, LOOM_ERR_MEMORY, "group %s: out of memory", comm->name);
    for (int64_t done = 0; good && done < count; done += piece) {
        good = !loom__board_aborted(comm->endpoint->board);
        if (!good)
            break;
        for (int i = 0; i < group->size; i++)
            inputs[i] = (const char *)post_of(group, number, i)->in + (first + done) * element;
        loom__reduce(request->dtype, request->reduce, group->size, inputs, count - done < piece ? count - done : piece,
            (char *)out + done * element);
    }
    if (inputs != few)
        free(inputs);
    return good;
}

static bool is_small(const loom_request *request) {
    return request->operation == LOOM__ALL_REDUCE && request->bytes <= SMALL_BYTES;
}

/* What a member does when all have posted. */
static bool first_work(loom_request *request, int64_t number) {
    const loom_comm *comm = request->comm;
    const thread_group *group = comm->state;
    size_t element = loom_dtype_size(request->dtype);
    int me = comm->place;
    switch (request->operation) {
    case LOOM__ALL_REDUCE: {
        if (is_small(request))
            return reduce_pieces(request, number, 0, request->count, request->state);
        int64_t begin = loom__part_begin(request->count, group->size, me);
        int64_t end = loom__part_begin(request->count, group->size, me + 1);
        return reduce_pieces(request, number, begin, end - begin, (char *)request->out + (size_t)begin * element);
    }
    case LOOM__REDUCE_SCATTER:
        return reduce_pieces(request, number, sum_before(request->counts, me), request->counts[me], request->out);
    case LOOM__ALL_GATHER: {
        char *to = request->out;
        for (int i = 0; i < group->size; i++) {
            size_t bytes = (size_t)request->counts[i] * element;
            const void *from = post_of(group, number, i)->in;
            if (bytes > 0 && from != to && !copy_pieces(comm, to, from, bytes))
                return false;
            to += bytes;
        }
        return true;
    }
    case LOOM__BROADCAST:
        return request->bytes == 0 || me == request->peer ||
               copy_pieces(comm, request->out, post_of(group, number, request->peer)->in, request->bytes);
    case LOOM__ALL_TO_ALL: {
        char *to = request->out;
        for (int i = 0; i < group->size; i++) {
            const post *theirs = post_of(group, number, i);
            if (theirs->counts[me] != request->receive_counts[i]) {
                loom__endpoint_fail(comm->endpoint, LOOM_ERR_COMM,
                    "all_to_all #%llu of group %s: rank %d sends %lld elements to rank %d, which receives %lld",
                    (unsigned long long)request->sequence, comm->name, comm->ranks[i], (long long)theirs->counts[me],
                    comm->ranks[me], (long long)request->receive_counts[i]);
                return false;
            }
            size_t bytes = (size_t)request->receive_counts[i] * element;
            const char *from = (const char *)theirs->in + (size_t)sum_before(theirs->counts, me) * element;
            if (bytes > 0 && !copy_pieces(comm, to, from, bytes))
                return false;
            to += bytes;
        }
        return true;
    }
    default:
        return true; /* a barrier moves nothing */
    }
}

/* The second half of a large all-reduce: the other members' parts of the result. */
static bool second_work(loom_request *request, int64_t number) {
    const loom_comm *comm = request->comm;
    const thread_group *group = comm->state;
    size_t element = loom_dtype_size(request->dtype);
    for (int step = 1; step < group->size; step++) {
        int from = (comm->place + step) % group->size;
        size_t begin = (size_t)loom__part_begin(request->count, group->size, from) * element;
        size_t end = (size_t)loom__part_begin(request->count, group->size, from + 1) * element;
        const char *theirs = post_of(group, number, from)->out;
        if (end > begin && !copy_pieces(comm, (char *)request->out + begin, theirs + begin, end - begin))
            return false;
    }
    return true;
}

static loom_status advance_collective(loom_request *request) {
    loom_comm *comm = request->comm;
    thread_group *group = comm->state;
    member *mine = &group->members[comm->place];
    int64_t number = (int64_t)request->sequence - 1;
    if (request->stage == STAGE_NEW) {
        if (atomic_load_explicit(&mine->posted, memory_order_relaxed) != number ||
            !all_passed(group, COPIED, number - DEPTH + 1))
            return LOOM_OK;
        *post_of(group, number, comm->place) = (post){request->operation, request->dtype, request->reduce,
            request->peer, request->in, request->out, request->count, request->counts, request->receive_counts};
        passed(comm, &mine->posted, number + 1);
        request->stage = STAGE_POSTED;
    }
    if (request->stage == STAGE_POSTED) {
        bool two_stages = request->operation == LOOM__ALL_REDUCE && !is_small(request);
        if (atomic_load_explicit(&mine->reduced, memory_order_relaxed) != number ||
            (!two_stages && atomic_load_explicit(&mine->copied, memory_order_relaxed) != number) ||
            !all_passed(group, POSTED, number + 1) || !begin_reading(comm))
            return LOOM_OK;
        int odd = find_disagreement(group, number);
        if (odd >= 0)
            return disagreement(request, number, odd);
        bool good = first_work(request, number);
        end_reading(comm);
        if (!good)
            return comm->endpoint->failure;
        request->stage = two_stages ? STAGE_REDUCED : STAGE_COPIED;
        if (!two_stages)
            atomic_store_explicit(&mine->reduced, number + 1, memory_order_seq_cst);
        passed(comm, two_stages ? &mine->reduced : &mine->copied, number + 1);
    }
    if (request->stage == STAGE_REDUCED) {
        if (atomic_load_explicit(&mine->copied, memory_order_relaxed) != number ||
            !all_passed(group, REDUCED, number + 1) || !begin_reading(comm))
            return LOOM_OK;
        bool good = second_work(request, number);
        end_reading(comm);
        if (!good)
            return LOOM_OK;
        passed(comm, &mine->copied, number + 1);
        request->stage = STAGE_COPIED;
    }
    if (request->stage == STAGE_COPIED && all_passed(group, COPIED, number + 1)) {
        if (request->state && request->bytes > 0)
            memcpy(request->out, request->state, request->bytes);
        loom__request_done(request);
    }
    return LOOM_OK;
}

/* Messages. */

static loom_status advance_send(loom_request *request) {
    mail *letter = request->state;
    switch (atomic_load_explicit(&letter->state, memory_order_acquire)) {
    case MAIL_DELIVERED:
        loom__request_done(request);
        return LOOM_OK;
    case MAIL_MISMATCH:
        return loom__message_mismatch(request, letter->received_count, letter->received_dtype);
    default:
        return LOOM_OK;
    }
}

static mail *take_mail(mailbox *box, int from, int tag) {
    pthread_mutex_lock(&box->lock);
    mail **link = &box->first;
    while (*link && ((*link)->from != from || (*link)->tag != tag))
        link = &(*link)->next;
    mail *letter = *link;
    if (letter) {
        *link = letter->next;
        atomic_store_explicit(&letter->state, MAIL_TAKEN, memory_order_relaxed);
    }
    pthread_mutex_unlock(&box->lock);
    return letter;
}

static loom_status advance_receive(loom_request *request) {
    loom_comm *comm = request->comm;
    thread_group *group = comm->state;
    if (loom__request_must_follow(request, STAGE_MATCHED) || !begin_reading(comm))
        return LOOM_OK;
    mail *letter = take_mail(&group->boxes[comm->place], request->peer, request->tag);
    if (!letter) {
        end_reading(comm);
        return LOOM_OK;
    }
    request->stage = STAGE_MATCHED;
    bool same = letter->count == request->count && letter->dtype == request->dtype;
    int64_t sent = letter->count;
    loom_dtype sent_dtype = letter->dtype;
    bool whole = same && (request->bytes == 0 || copy_pieces(comm, request->out, letter->buffer, request->bytes));
    if (whole || !same) {
        letter->received_count = request->count;
        letter->received_dtype = request->dtype;
        atomic_store_explicit(&letter->state, same ? MAIL_DELIVERED : MAIL_MISMATCH, memory_order_seq_cst);
    }
    end_reading(comm);
    wake(world_of(comm), comm->ranks[request->peer]);
    if (!same)
        return loom__message_mismatch(request, sent, sent_dtype);
    if (whole)
        loom__request_done(request);
    return LOOM_OK;
}

/* The backend's table. */

static loom_status start(loom_request *request) {
    loom_comm *comm = request->comm;
    thread_group *group = comm->state;
    if (is_small(request)) {
        request->state = malloc(request->bytes > 0 ? request->bytes : 1);
    } else if (request->operation == LOOM__SEND) {
        mail *letter = calloc(1, sizeof *letter);
        if (letter) {
            *letter = (mail){.from = comm->place,
                .tag = request->tag,
                .buffer = request->in,
                .count = request->count,
                .dtype = request->dtype};
            mailbox *box = &group->boxes[request->peer];
            pthread_mutex_lock(&box->lock);
            mail **link = &box->first;
            while (*link)
                link = &(*link)->next;
            *link = letter;
            pthread_mutex_unlock(&box->lock);
            wake(world_of(comm), comm->ranks[request->peer]);
        }
        request->state = letter;
    } else {
        return LOOM_OK;
    }
    return request->state ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory", comm->name);
}

static loom_status advance(loom_request *request) {
    if (request->operation == LOOM__SEND)
        return advance_send(request);
    if (request->operation == LOOM__RECEIVE)
        return advance_receive(request);
    return advance_collective(request);
}

static void release(loom_request *request) {
    mail *letter = request->state;
    if (request->operation == LOOM__SEND && !request->done) {
        /* After a failure the letter may still lie in the box; whoever had taken it has let it go (quiesce). */
        thread_group *group = request->comm->state;
        mailbox *box = &group->boxes[request->peer];
        pthread_mutex_lock(&box->lock);
        mail **link = &box->first;
        while (*link && *link != letter)
            link = &(*link)->next;
        if (*link)
            *link = letter->next;
        pthread_mutex_unlock(&box->lock);
    }
    free(request->state);
}

static void destroy_endpoint(loom__endpoint *endpoint) {
    loom__thread_world *world = endpoint->state;
    free(endpoint);
    loom__thread_world_destroy(world);
}

static const loom__backend thread_backend = {
    .create_group = create_group,
    .destroy_group = destroy_group,
    .start = start,
    .advance = advance,
    .release = release,
    .quiesce = quiesce,
    .destroy_endpoint = destroy_endpoint,
};

loom_status loom__endpoint_create_thread(
    loom__thread_world *world, int rank, const loom__endpoint_options *options, loom__endpoint **out) {
    loom__endpoint *endpoint = calloc(1, sizeof *endpoint);
    int *all = malloc((size_t)world->size * sizeof *all);
    if (!endpoint || !all) {
        free(endpoint);
        free(all);
        return loom_fail(LOOM_ERR_MEMORY, "rank %d: out of memory", rank);
    }
    pthread_mutex_lock(&world->lock);
    world->users++;
    pthread_mutex_unlock(&world->lock);
    endpoint->rank = rank;
    endpoint->size = world->size;
    endpoint->backend = &thread_backend;
    endpoint->board = world->board;
    endpoint->page = &world->board->page[rank];
    endpoint->timeout = endpoint->limit = options->timeout;
    endpoint->oversubscribed = options->oversubscribed;
    endpoint->one_process = true;
    endpoint->sleep_word = &world->words[rank].sleeping;
    endpoint->state = world;
    loom__page_open(endpoint->page, rank);
    for (int i = 0; i < world->size; i++)
        all[i] = i;
    loom_status status = loom__group_create(endpoint, "world", all, world->size, &endpoint->world);
    free(all);
    if (status != LOOM_OK) {
        loom__endpoint_destroy(endpoint);
        return status;
    }
    *out = endpoint;
    return LOOM_OK;
}
