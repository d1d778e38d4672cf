/* TensorBoard's event files. A file is a row of records (TFRecord: length, its checksum, bytes, their checksum, all
 * little-endian; CRC-32C, masked as TensorFlow masks it), a record is a protocol buffer `Event`. Of those messages a
 * few fields are ever written, so their encoding is spelled out here: a key (field number and wire type), then a
 * varint, a fixed-size number, or a length and bytes. Each record is flushed whole, so that a reader meets a prefix of
 * records. */
#include "report/columns.h"
#include "report/router.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, MOST_FILES = 1000 };

struct loom_events {
    FILE *file;
    char path[PATH_BYTES];
};

/* ---- checksums ---- */

static uint32_t crc32c(const unsigned char *bytes, size_t count) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1u)));
    }
    return ~crc;
}

static uint32_t masked(uint32_t crc) {
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

/* ---- protocol buffers ---- */

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
/* Field numbers of tensorflow.Event, .Summary, .Summary.Value and .SessionLog. */
enum { EVENT_WALL_TIME = 1, EVENT_STEP = 2, EVENT_FILE_VERSION = 3, EVENT_SUMMARY = 5, EVENT_SESSION_LOG = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SIMPLE_VALUE = 2, SESSION_LOG_STATUS = 1, SESSION_START = 1 };

/* Room for every column, of a tag of at most 24 bytes, its number, and their keys; more scalars take more records. */
enum { MESSAGE_BYTES = 64 + LOOM__COLUMNS * 48 };
typedef struct message {
    unsigned char bytes[MESSAGE_BYTES];
    size_t length;
} message;

static void put_little(message *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        to->bytes[to->length++] = (unsigned char)(value >> (8 * i));
}

static void put_varint(message *to, uint64_t value) {
    for (; value >= 0x80; value >>= 7)
        to->bytes[to->length++] = (unsigned char)(value | 0x80);
    to->bytes[to->length++] = (unsigned char)value;
}

static void put_key(message *to, int field, int wire) {
    put_varint(to, (uint64_t)(field << 3 | wire));
}

static void put_double(message *to, int field, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(to, field, FIXED64);
    put_little(to, bits, 8);
}

static void put_float(message *to, int field, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(to, field, FIXED32);
    put_little(to, bits, 4);
}

static void put_bytes(message *to, int field, const void *bytes, size_t count) {
    put_key(to, field, BYTES);
    put_varint(to, count);
    memcpy(to->bytes + to->length, bytes, count);
    to->length += count;
}

static message event_at(int64_t step) {
    struct timespec now;
    message event = {.length = 0};
    clock_gettime(CLOCK_REALTIME, &now);
    put_double(&event, EVENT_WALL_TIME, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    put_key(&event, EVENT_STEP, VARINT);
    put_varint(&event, (uint64_t)step);
    return event;
}

/* ---- the file ---- */

static loom_status write_record(const loom_events *events, const message *event) {
    message head = {.length = 0}, tail = {.length = 0};
    put_little(&head, event->length, 8);
    put_little(&head, masked(crc32c(head.bytes, 8)), 4);
    put_little(&tail, masked(crc32c(event->bytes, event->length)), 4);
    fwrite(head.bytes, 1, head.length, events->file);
    fwrite(event->bytes, 1, event->length, events->file);
    fwrite(tail.bytes, 1, tail.length, events->file);
    if (fflush(events->file) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", events->path);
    return LOOM_OK;
}

/* A name that is not there yet. TensorBoard looks for "tfevents", and reads the files of a folder in the order of their
 * names: the time comes first, in ten digits. */
static loom_status create(loom_events *events, const char *folder) {
    char host[256] = "host";
    int fd = -1;
    (void)gethostname(host, sizeof host - 1);
    for (int i = 0; fd == -1 && i < MOST_FILES; i++) {
        int length = snprintf(events->path, sizeof events->path, "%s/events.out.tfevents.%010lld.%s.%lld.%d", folder,
            (long long)time(NULL), host, (long long)getpid(), i);
        if (length >= (int)sizeof events->path)
            return loom_fail(LOOM_ERR_ARGUMENT, "the path of the event files is too long");
        fd = open(events->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd == -1 && errno != EEXIST)
            break;
    }
    events->file = fd == -1 ? NULL : fdopen(fd, "wb");
    if (events->file)
        return LOOM_OK;
    loom_status status = loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", events->path);
    if (fd != -1)
        close(fd);
    return status;
}

/* The version first, which readers demand, then the start of a session, at which TensorBoard drops what earlier files
 * say of this step and of later ones. */
static loom_status begin(const loom_events *events, int64_t first_step) {
    static const char version[] = "brain.Event:2";
    message event = event_at(0), log = {.length = 0};
    put_bytes(&event, EVENT_FILE_VERSION, version, sizeof version - 1);
    LOOM_TRY(write_record(events, &event));
    event = event_at(first_step);
    put_key(&log, SESSION_LOG_STATUS, VARINT);
    put_varint(&log, SESSION_START);
    put_bytes(&event, EVENT_SESSION_LOG, log.bytes, log.length);
    return write_record(events, &event);
}

loom_status loom_events_open(const char *folder, int64_t first_step, loom_events **out) {
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %m", folder);
    loom_events *events = calloc(1, sizeof *events);
    loom_status status =
        events ? create(events, folder) : loom_fail(LOOM_ERR_MEMORY, "out of memory for an event file");
    if (!status)
        status = begin(events, first_step);
    if (status) {
        loom_events_close(events);
        return status;
    }
    *out = events;
    return LOOM_OK;
}

/* ---- scalars ---- */

/* One after the other into summaries, each written when it is full. */
typedef struct scalars {
    const loom_events *events;
    int64_t step;
    message summary;
} scalars;

static loom_status write_summary(scalars *s) {
    message event = event_at(s->step);
    if (s->summary.length == 0)
        return LOOM_OK;
    put_bytes(&event, EVENT_SUMMARY, s->summary.bytes, s->summary.length);
    s->summary.length = 0;
    return write_record(s->events, &event);
}

static loom_status add_scalar(void *context, const char *tag, double number, bool is_count) {
    enum { AROUND = 48 }; /* the event's own fields, keys and lengths */
    scalars *s = context;
    message value = {.length = 0};
    (void)is_count;
    if (isnan(number))
        return LOOM_OK;
    put_bytes(&value, VALUE_TAG, tag, strlen(tag));
    put_float(&value, VALUE_SIMPLE_VALUE, (float)number);
    if (s->summary.length + value.length + AROUND > MESSAGE_BYTES)
        LOOM_TRY(write_summary(s));
    put_bytes(&s->summary, SUMMARY_VALUE, value.bytes, value.length);
    return LOOM_OK;
}

loom_status loom_events_write(loom_events *events, const loom_step_report *report) {
    scalars s = {.events = events, .step = report->step};
    for (int i = 0; i < LOOM__COLUMNS; i++)
        LOOM_TRY(add_scalar(&s, loom__columns[i].name, loom__column_value(&loom__columns[i], report), false));
    LOOM_TRY(loom__router_numbers(report, add_scalar, &s));
    return write_summary(&s);
}

void loom_events_close(loom_events *events) {
    if (!events)
        return;
    if (events->file)
        fclose(events->file); /* every record has been flushed */
    free(events);
}
