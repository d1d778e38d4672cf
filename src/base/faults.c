/* The collector keeps the lines in a fixed buffer that fits the error record, so collecting can never fail itself; what
 * does not fit is counted and said at the end. */
#include "base/faults.h"
#include "base/record.h"
#include <inttypes.h>
#include <string.h>

/* Room kept free for the closing line about omitted faults. */
enum { CLOSING_BYTES = 64 };

void loom__faults_begin(loom__faults *faults) {
    faults->count = 0;
    faults->omitted = 0;
    faults->status = LOOM_OK;
    faults->length = 0;
    faults->not_built = NULL;
    faults->text[0] = '\0';
}

/* Where the line begins in the text; SIZE_MAX = nowhere. */
static size_t find_line(const loom__faults *faults, const char *line, size_t length) {
    for (size_t at = 0; at < faults->length;) {
        size_t there = strcspn(faults->text + at, "\n");
        if (there == length && memcmp(faults->text + at, line, length) == 0)
            return at;
        at += there + 1;
    }
    return SIZE_MAX;
}

static bool has_line(const loom__faults *faults, const char *line, size_t length) {
    return find_line(faults, line, length) != SIZE_MAX;
}

bool loom__faults_has(const loom__faults *faults, const char *line) {
    return has_line(faults, line, strlen(line));
}

static void add_line(loom__faults *faults, loom_status status, const char *line, size_t length) {
    static const char mark[] = "not supported yet";
    if (faults->not_built && memmem(line, length, mark, sizeof mark - 1)) {
        if (!has_line(faults->not_built, line, length))
            add_line(faults->not_built, LOOM_ERR_UNSUPPORTED, line, length);
        return;
    }
    faults->count++;
    if (faults->status == LOOM_OK || (faults->status == LOOM_ERR_UNSUPPORTED && status != LOOM_ERR_UNSUPPORTED))
        faults->status = status;
    size_t newline = faults->length > 0;
    if (faults->omitted || faults->length + newline + length + CLOSING_BYTES > sizeof faults->text) {
        faults->omitted++;
        return;
    }
    if (newline)
        faults->text[faults->length++] = '\n';
    memcpy(faults->text + faults->length, line, length);
    faults->length += length;
    faults->text[faults->length] = '\0';
}

void loom__faults_add(loom__faults *faults, loom_status status, const char *format, ...) {
    char line[2048];
    va_list arguments;
    va_start(arguments, format);
    size_t length = loom__record_format(line, sizeof line, format, arguments);
    va_end(arguments);
    add_line(faults, status, line, length);
}

void loom__faults_add_record(loom__faults *faults, loom_status status) {
    if (status == LOOM_OK)
        return;
    for (const char *line = loom_error_message(); *line;) {
        size_t length = strcspn(line, "\n");
        add_line(faults, status, line, length);
        line += length + (line[length] == '\n');
    }
}

void loom__faults_append(loom__faults *faults, const char *line, size_t length, const char *text) {
    size_t at = find_line(faults, line, length), more = strlen(text), end = at + length;
    if (at == SIZE_MAX || faults->length + more + CLOSING_BYTES > sizeof faults->text)
        return;
    memmove(faults->text + end + more, faults->text + end, faults->length - end + 1);
    memcpy(faults->text + end, text, more);
    faults->length += more;
}

bool loom__faults_full(const loom__faults *faults) {
    return faults->count >= LOOM__FAULTS_MAX;
}

loom_status loom__faults_end(const loom__faults *faults) {
    if (faults->count == 0)
        return LOOM_OK;
    if (faults->omitted > 0)
        return loom_fail(faults->status, "%s\n… and %" PRId64 " more", faults->text, faults->omitted);
    return loom_fail(faults->status, "%s", faults->text);
}
