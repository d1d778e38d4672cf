/* The pages of the recorder. Text is kept in atomic words and put together by hand, without the formatted-output
 * family, because the same lines are written from a signal handler when the run is being killed. Invariant: a page is
 * written by its own rank alone, and nothing in it is needed for the run to be right. */
#include "comm/recorder.h"
#include "base/record.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define RELAXED memory_order_relaxed

const char *loom__operation_name(loom__operation operation) {
    switch (operation) {
#define CASE(name, text)                                                                                               \
    case LOOM__##name:                                                                                                 \
        return text;
        LOOM__OPERATION_LIST(CASE)
#undef CASE
    case LOOM__OPERATION_COUNT:
        break;
    }
    return "unknown operation";
}

uint64_t loom__clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

size_t loom__board_bytes(int pages) {
    return (sizeof(loom__board) + (size_t)pages * sizeof(loom__page) + 63) / 64 * 64;
}

bool loom__board_abort(loom__board *board, int rank, loom_status status, const char *message) {
    uint32_t nobody = 0;
    if (!atomic_compare_exchange_strong(&board->claimed, &nobody, 1))
        return false;
    board->rank = rank;
    board->status = status;
    size_t length = strnlen(message, LOOM__MESSAGE);
    if (length == LOOM__MESSAGE)
        length = loom__whole_characters(message, LOOM__MESSAGE - 1);
    memcpy(board->message, message, length);
    board->message[length] = '\0';
    atomic_store_explicit(&board->aborted, 1, memory_order_seq_cst);
    return true;
}

bool loom__board_claim_report(loom__board *board) {
    int32_t nobody = 0;
    return atomic_compare_exchange_strong(&board->teller, &nobody, (int32_t)getpid());
}

void loom__board_told(loom__board *board) {
    atomic_store(&board->teller, LOOM__TOLD);
}

int32_t loom__board_teller(loom__board *board) {
    int32_t teller = atomic_load(&board->teller);
    return teller == LOOM__TOLD ? 0 : teller;
}

/* Text <-> atomic words; `words` * 8 bytes, always ended by a 0. */
static void store_text(_Atomic uint64_t *to, size_t words, const char *text) {
    char bytes[LOOM__NOTE] = {0};
    memcpy(bytes, text, strnlen(text, words * 8 - 1));
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        atomic_store_explicit(&to[i], word, RELAXED);
    }
}

static void load_text(const _Atomic uint64_t *from, size_t words, char *text) {
    for (size_t i = 0; i < words; i++) {
        uint64_t word = atomic_load_explicit(&from[i], RELAXED);
        memcpy(text + 8 * i, &word, 8);
    }
    text[8 * words - 1] = '\0';
}

static uint64_t own_pid_space(void) {
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

void loom__page_open(loom__page *page, int rank) {
    atomic_store_explicit(&page->rank, rank, RELAXED);
    atomic_store_explicit(&page->pid, (int32_t)getpid(), RELAXED);
    atomic_store_explicit(&page->pid_space, own_pid_space(), RELAXED);
    atomic_store_explicit(&page->moved, loom__clock(), RELAXED);
    atomic_store_explicit(&page->state, LOOM__RANK_RUNNING, memory_order_release);
}

int loom__page_add_group(loom__page *page, uint64_t key) {
    int slot = -1;
    bool fresh = false;
    for (int i = 0; i < LOOM__PAGE_GROUPS && !fresh; i++) {
        fresh = atomic_load_explicit(&page->groups[i].key, RELAXED) == 0;
        if (fresh || (slot < 0 && !page->groups[i].used))
            slot = i;
    }
    /* Before a key goes: a reader that misses it must know why. */
    if (!fresh)
        atomic_store_explicit(&page->forgot, 1, memory_order_seq_cst);
    if (slot < 0)
        return -1;
    page->groups[slot].used = true;
    atomic_store_explicit(&page->groups[slot].key, 0, memory_order_seq_cst);
    atomic_store_explicit(&page->groups[slot].started, 0, memory_order_release);
    atomic_store_explicit(&page->groups[slot].key, key, memory_order_release);
    return slot;
}

void loom__page_remove_group(loom__page *page, int slot) {
    if (slot >= 0)
        page->groups[slot].used = false;
}

int64_t loom__page_started(const loom__page *page, uint64_t key) {
    for (int i = 0; i < LOOM__PAGE_GROUPS; i++)
        if (atomic_load_explicit(&page->groups[i].key, memory_order_acquire) == key) {
            int64_t started = (int64_t)atomic_load_explicit(&page->groups[i].started, memory_order_acquire);
            /* The place may be going to another group just now. */
            if (atomic_load_explicit(&page->groups[i].key, memory_order_acquire) == key)
                return started;
        }
    return atomic_load_explicit(&page->forgot, memory_order_seq_cst) ? LOOM__STARTED_UNKNOWN : -1;
}

void loom__page_note(loom__page *page, const char *text) {
    store_text(page->note, LOOM__NOTE / 8, text ? text : "");
}

static void write_record(loom__record *record, uint64_t key, const char *group, loom__operation operation,
    uint64_t sequence, uint64_t bytes, loom__record_state state) {
    atomic_store_explicit(&record->state, LOOM__RECORD_NONE, RELAXED);
    atomic_store_explicit(&record->key, key, RELAXED);
    atomic_store_explicit(&record->sequence, sequence, RELAXED);
    atomic_store_explicit(&record->bytes, bytes, RELAXED);
    atomic_store_explicit(&record->time, loom__clock(), RELAXED);
    store_text(record->group, LOOM__GROUP_NAME / 8, group);
    atomic_store_explicit(&record->operation, operation, RELAXED);
    atomic_store_explicit(&record->state, state, memory_order_release);
}

void loom__page_begin(loom__page *page, int slot, uint64_t key, const char *group, loom__operation operation,
    uint64_t sequence, uint64_t bytes) {
    uint64_t number = atomic_load_explicit(&page->begun, RELAXED);
    write_record(&page->ring[number % LOOM__RECORDS], key, group, operation, sequence, bytes, LOOM__RECORD_STARTED);
    atomic_store_explicit(&page->begun, number + 1, RELAXED);
    if (slot >= 0)
        atomic_store_explicit(&page->groups[slot].started, sequence, memory_order_release);
}

void loom__page_finish(
    loom__page *page, uint64_t key, const char *group, loom__operation operation, uint64_t sequence, uint64_t bytes) {
    uint64_t begun = atomic_load_explicit(&page->begun, RELAXED);
    uint64_t oldest = begun > LOOM__RECORDS ? begun - LOOM__RECORDS : 0;
    for (uint64_t number = begun; number > oldest; number--) {
        loom__record *record = &page->ring[(number - 1) % LOOM__RECORDS];
        if (atomic_load_explicit(&record->key, RELAXED) == key &&
            atomic_load_explicit(&record->sequence, RELAXED) == sequence &&
            atomic_load_explicit(&record->operation, RELAXED) == (uint32_t)operation) {
            atomic_store_explicit(&record->time, loom__clock(), RELAXED);
            atomic_store_explicit(&record->state, LOOM__RECORD_FINISHED, memory_order_release);
            break;
        }
    }
    write_record(&page->last, key, group, operation, sequence, bytes, LOOM__RECORD_FINISHED);
}

void loom__page_wait(
    loom__page *page, uint64_t key, const char *group, loom__operation operation, uint64_t sequence, uint64_t bytes) {
    write_record(&page->current, key, group, operation, sequence, bytes, LOOM__RECORD_STARTED);
    atomic_store_explicit(&page->waiting, 1, memory_order_release);
}

void loom__page_wait_end(loom__page *page) {
    atomic_store_explicit(&page->waiting, 0, memory_order_release);
}

const loom__record *loom__page_find(const loom__page *page, uint64_t key, uint64_t sequence) {
    for (int i = 0; i < LOOM__RECORDS; i++) {
        const loom__record *record = &page->ring[i];
        if (atomic_load_explicit(&record->state, memory_order_acquire) != LOOM__RECORD_NONE &&
            atomic_load_explicit(&record->key, RELAXED) == key &&
            atomic_load_explicit(&record->sequence, RELAXED) == sequence &&
            atomic_load_explicit(&record->operation, RELAXED) < LOOM__SEND)
            return record;
    }
    return NULL;
}

void loom__line_put(loom__line *line, const char *text) {
    for (; *text && line->length + 1 < line->bytes; text++)
        line->text[line->length++] = *text;
    line->text[line->length] = '\0';
}

void loom__line_put_number(loom__line *line, uint64_t number) {
    char digits[21];
    size_t at = sizeof digits - 1;
    digits[at] = '\0';
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    loom__line_put(line, digits + at);
}

/* A killed process stays a zombie until its parent has looked; /proc tells. The state follows the last ')' of the line.
 */
static bool is_zombie(int32_t pid) {
    char path[32], line[512];
    loom__line name = {path, 0, sizeof path};
    loom__line_put(&name, "/proc/");
    loom__line_put_number(&name, (uint64_t)pid);
    loom__line_put(&name, "/stat");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, line, sizeof line);
    close(file);
    while (length > 0 && line[length - 1] != ')')
        length--;
    return length > 0 && length + 1 < (ssize_t)sizeof line && (line[length + 1] == 'Z' || line[length + 1] == 'X');
}

bool loom__page_process_is_dead(const loom__page *page) {
    int32_t pid = atomic_load_explicit(&page->pid, RELAXED);
    uint64_t space = atomic_load_explicit(&page->pid_space, RELAXED);
    if (pid <= 0 || space == 0 || space != own_pid_space())
        return false;
    return (kill(pid, 0) != 0 && errno == ESRCH) || is_zombie(pid);
}

static void put_seconds(loom__line *b, uint64_t nanoseconds) {
    uint64_t tenths = nanoseconds / 100000000u;
    loom__line_put_number(b, tenths / 10);
    loom__line_put(b, ".");
    loom__line_put_number(b, tenths % 10);
    loom__line_put(b, " s");
}

static void put_record(loom__line *b, const loom__record *record) {
    char group[LOOM__GROUP_NAME];
    load_text(record->group, LOOM__GROUP_NAME / 8, group);
    loom__line_put(b, loom__operation_name((loom__operation)atomic_load_explicit(&record->operation, RELAXED)));
    loom__line_put(b, " #");
    loom__line_put_number(b, atomic_load_explicit(&record->sequence, RELAXED));
    loom__line_put(b, " of group ");
    loom__line_put(b, group);
    loom__line_put(b, " (");
    loom__line_put_number(b, atomic_load_explicit(&record->bytes, RELAXED));
    loom__line_put(b, " bytes)");
}

static uint64_t age_of(const loom__record *record) {
    uint64_t now = loom__clock(), then = atomic_load_explicit(&record->time, RELAXED);
    return now > then ? now - then : 0;
}

size_t loom__page_describe(const loom__page *page, char *text, size_t bytes) {
    loom__line b = {text, 0, bytes};
    loom__line_put(&b, "last finished operation: ");
    if (atomic_load_explicit(&page->last.state, memory_order_acquire) == LOOM__RECORD_FINISHED) {
        put_record(&b, &page->last);
        loom__line_put(&b, ", ");
        put_seconds(&b, age_of(&page->last));
        loom__line_put(&b, " ago");
    } else {
        loom__line_put(&b, "none");
    }
    loom__line_put(&b, "; current: ");
    char note[LOOM__NOTE];
    load_text(page->note, LOOM__NOTE / 8, note);
    if (atomic_load_explicit(&page->waiting, memory_order_acquire)) {
        put_record(&b, &page->current);
        loom__line_put(&b, ", for ");
        put_seconds(&b, age_of(&page->current));
        if (note[0]) {
            loom__line_put(&b, ", while ");
            loom__line_put(&b, note);
        }
    } else {
        loom__line_put(&b, note[0] ? note : "between operations");
    }
    return b.length;
}

void loom__page_dump(const loom__page *page, int most, void (*line)(void *context, const char *text), void *context) {
    char text[256];
    uint64_t begun = atomic_load_explicit(&page->begun, RELAXED);
    uint64_t kept = most < LOOM__RECORDS ? (uint64_t)most : LOOM__RECORDS;
    for (uint64_t number = begun > kept ? begun - kept : 0; number < begun; number++) {
        const loom__record *record = &page->ring[number % LOOM__RECORDS];
        uint32_t state = atomic_load_explicit(&record->state, memory_order_acquire);
        if (state == LOOM__RECORD_NONE)
            continue;
        loom__line b = {text, 0, sizeof text};
        loom__line_put(&b, "rank ");
        loom__line_put_number(&b, (uint64_t)atomic_load_explicit(&page->rank, RELAXED));
        loom__line_put(&b, ": ");
        put_record(&b, record);
        loom__line_put(&b, state == LOOM__RECORD_FINISHED ? " finished " : " started ");
        put_seconds(&b, age_of(record));
        loom__line_put(&b, " ago");
        line(context, text);
    }
}

typedef struct log_door {
    loom_log_function log;
    void *context;
} log_door;

static void log_line(void *context, const char *text) {
    const log_door *door = context;
    door->log(door->context, LOOM_LOG_INFO, text);
}

void loom__board_dump(const loom__board *board, loom_log_function log, void *log_context) {
    enum { OPERATIONS_A_RANK = 8 };
    log_door door = {log, log_context};
    for (int i = 0; log && i < board->pages; i++)
        loom__page_dump(&board->page[i], OPERATIONS_A_RANK, log_line, &door);
}
