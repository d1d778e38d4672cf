/* Reading zip archives in place. Nothing but the central directory is believed: the end record is looked for at the end
 * of the given bytes, offsets count from their begin, and a local header only says how far it is to the data. The
 * invariant after open is that every record's stored bytes lie before the directory, so nothing later checks again. */
#include "format/zip.h"

#include <libdeflate.h>
#include <stdlib.h>

enum {
    END_BYTES = 22,
    END64_BYTES = 56,
    LOCATOR_BYTES = 20,
    CENTRAL_BYTES = 46,
    LOCAL_BYTES = 30,
    COMMENT_MAX = 65535,
    METHOD_STORED = 0,
    METHOD_DEFLATED = 8,
    DEFLATE_MOST = 1032 /* times as many bytes as deflate can make of one */
};

static uint16_t load_u16(const unsigned char *at) {
    return (uint16_t)(at[0] | at[1] << 8);
}

static uint32_t load_u32(const unsigned char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static bool has_signature(const unsigned char *at, unsigned a, unsigned b) {
    return at[0] == 'P' && at[1] == 'K' && at[2] == a && at[3] == b;
}

typedef struct directory {
    uint64_t entries, bytes, at; /* at: from the begin of the archive */
    uint64_t ends_before;        /* where the end records begin */
} directory;

static loom_status find_directory(const char *what, const unsigned char *data, size_t bytes, directory *found) {
    if (bytes < END_BYTES)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: has %zu bytes, expected a zip archive of at least %d", what, bytes, END_BYTES);
    const unsigned char *end = NULL;
    for (size_t comment = 0; comment <= COMMENT_MAX && comment <= bytes - END_BYTES; comment++) {
        const unsigned char *at = data + bytes - END_BYTES - comment;
        if (has_signature(at, 5, 6) && load_u16(at + 20) == comment) {
            end = at;
            break;
        }
    }
    if (!end)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: no end record of a zip archive at the end of its %zu bytes: cut short, or no archive", what, bytes);
    size_t end_at = (size_t)(end - data);
    *found = (directory){load_u16(end + 10), load_u32(end + 12), load_u32(end + 16), end_at};
    if (end_at < LOCATOR_BYTES || !has_signature(end - LOCATOR_BYTES, 6, 7))
        return LOOM_OK;
    uint64_t at = loom__load_u64(end - LOCATOR_BYTES + 8);
    if (end_at < LOCATOR_BYTES + END64_BYTES || at > end_at - LOCATOR_BYTES - END64_BYTES ||
        !has_signature(data + at, 6, 6))
        return loom_fail(LOOM_ERR_FORMAT, "%s: the zip64 end record is said to be at %llu, where none is", what,
            (unsigned long long)at);
    *found =
        (directory){loom__load_u64(data + at + 32), loom__load_u64(data + at + 40), loom__load_u64(data + at + 48), at};
    return LOOM_OK;
}

/* Sizes of 2^32 and more stand in an extra field, in this order, those only that are all ones in the entry itself. */
static loom_status read_extra64(
    const char *what, const unsigned char *extra, size_t bytes, uint64_t *sizes[3], int64_t entry) {
    bool needed = false;
    for (int i = 0; i < 3; i++)
        needed |= *sizes[i] == UINT32_MAX;
    for (size_t at = 0; needed && at + 4 <= bytes;) {
        size_t length = load_u16(extra + at + 2), used = 0;
        if (length > bytes - at - 4)
            break;
        if (load_u16(extra + at) == 1) {
            for (int i = 0; i < 3; i++) {
                if (*sizes[i] != UINT32_MAX)
                    continue;
                if (used + 8 > length)
                    break;
                *sizes[i] = loom__load_u64(extra + at + 4 + used);
                used += 8;
            }
            return LOOM_OK;
        }
        at += 4 + length;
    }
    if (needed)
        return loom_fail(LOOM_ERR_FORMAT, "%s: entry %lld of the zip directory has 64-bit sizes, but no field for them",
            what, (long long)entry);
    return LOOM_OK;
}

/* One entry of the directory at `at`, with `left` bytes to its end; *used is its length. */
static loom_status read_entry(const char *what, const unsigned char *data, const directory *from,
    const unsigned char *at, size_t left, int64_t entry, loom__zip_record *record, size_t *used) {
    if (left < CENTRAL_BYTES || !has_signature(at, 1, 2))
        return loom_fail(LOOM_ERR_FORMAT, "%s: entry %lld of the zip directory does not begin where it should", what,
            (long long)entry);
    size_t name_bytes = load_u16(at + 28), extra_bytes = load_u16(at + 30);
    size_t whole = CENTRAL_BYTES + name_bytes + extra_bytes + load_u16(at + 32);
    if (whole > left)
        return loom_fail(LOOM_ERR_FORMAT, "%s: entry %lld of the zip directory has %zu bytes, %zu are left", what,
            (long long)entry, whole, left);
    const char *name = (const char *)at + CENTRAL_BYTES;
    int shown = name_bytes > 200 ? 200 : (int)name_bytes;
    uint64_t stored = load_u32(at + 20), bytes = load_u32(at + 24), local = load_u32(at + 42);
    uint64_t *sizes[] = {&bytes, &stored, &local};
    LOOM_TRY(read_extra64(what, at + CENTRAL_BYTES + name_bytes, extra_bytes, sizes, entry));
    unsigned method = load_u16(at + 10), flags = load_u16(at + 8);
    if (flags & 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: record '%.*s' is encrypted", what, shown, name);
    if (method != METHOD_STORED && method != METHOD_DEFLATED)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: record '%.*s' is packed by method %u, expected stored (0) or deflated (8)", what,
            shown, name, method);
    if (local > from->at || from->at - local < LOCAL_BYTES || !has_signature(data + local, 3, 4))
        return loom_fail(LOOM_ERR_FORMAT, "%s: record '%.*s' is said to begin at %llu, where no record begins", what,
            shown, name, (unsigned long long)local);
    size_t local_name = load_u16(data + local + 26), ahead = LOCAL_BYTES + local_name + load_u16(data + local + 28);
    if (ahead > from->at - local || stored > from->at - local - ahead)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: record '%.*s' at %llu has %llu bytes, which reach into the zip directory at %llu", what, shown, name,
            (unsigned long long)local, (unsigned long long)stored, (unsigned long long)from->at);
    if (local_name != name_bytes || memcmp(data + local + LOCAL_BYTES, name, name_bytes) != 0)
        return loom_fail(LOOM_ERR_FORMAT, "%s: record '%.*s' has another name in its own header", what, shown, name);
    if (method == METHOD_STORED ? stored != bytes : bytes / DEFLATE_MOST > stored)
        return loom_fail(LOOM_ERR_FORMAT, "%s: record '%.*s' is said to have %llu bytes, but %llu are stored", what,
            shown, name, (unsigned long long)bytes, (unsigned long long)stored);
    const char *slash = memchr(name, '/', name_bytes);
    size_t folder = slash ? (size_t)(slash - name) + 1 : 0;
    *record = (loom__zip_record){.name = name + folder,
        .name_bytes = name_bytes - folder,
        .stored = data + local + ahead,
        .stored_bytes = (size_t)stored,
        .bytes = (size_t)bytes,
        .crc = load_u32(at + 16),
        .deflated = method == METHOD_DEFLATED};
    *used = whole;
    return LOOM_OK;
}

loom_status loom__zip_open(const char *what, const void *data, size_t bytes, loom__zip *zip) {
    directory from = {0};
    LOOM_TRY(find_directory(what, data, bytes, &from));
    if (from.at > from.ends_before || from.bytes != from.ends_before - from.at)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: the zip directory is said to have %llu bytes at %llu, expected it to end at %llu", what,
            (unsigned long long)from.bytes, (unsigned long long)from.at, (unsigned long long)from.ends_before);
    if (from.entries > from.bytes / CENTRAL_BYTES)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the zip directory is said to have %llu entries in %llu bytes", what,
            (unsigned long long)from.entries, (unsigned long long)from.bytes);
    loom__zip made = {what, calloc((size_t)from.entries + 1, sizeof *made.records), (int64_t)from.entries};
    if (!made.records)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to open it", what);
    const unsigned char *at = (const unsigned char *)data + from.at;
    size_t left = (size_t)from.bytes, used = 0;
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < made.count && status == LOOM_OK; i++, at += used, left -= used) {
        used = 0;
        status = read_entry(what, data, &from, at, left, i, &made.records[i], &used);
    }
    if (status == LOOM_OK && left > 0)
        status = loom_fail(LOOM_ERR_FORMAT, "%s: %zu bytes of the zip directory belong to no entry", what, left);
    if (status != LOOM_OK) {
        loom__zip_close(&made);
        return status;
    }
    *zip = made;
    return LOOM_OK;
}

void loom__zip_close(loom__zip *zip) {
    free(zip->records);
    *zip = (loom__zip){0};
}

const loom__zip_record *loom__zip_find(const loom__zip *zip, const char *name) {
    size_t bytes = strlen(name);
    for (int64_t i = 0; i < zip->count; i++)
        if (zip->records[i].name_bytes == bytes && memcmp(zip->records[i].name, name, bytes) == 0)
            return &zip->records[i];
    return NULL;
}

loom_status loom__zip_get(const loom__zip *zip, const char *name, const loom__zip_record **record) {
    *record = loom__zip_find(zip, name);
    if (!*record)
        return loom_fail(LOOM_ERR_FORMAT, "%s: has no record '%.200s'", zip->what, name);
    return LOOM_OK;
}

loom_status loom__zip_check(const loom__zip *zip, const loom__zip_record *record, const void *unpacked) {
    uint32_t found = libdeflate_crc32(0, unpacked, record->bytes);
    if (found != record->crc)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the checksum of record '%.*s' is %08x, expected %08x: damaged",
            zip->what, record->name_bytes > 200 ? 200 : (int)record->name_bytes, record->name, found, record->crc);
    return LOOM_OK;
}

loom_status loom__zip_inflate(const loom__zip *zip, const loom__zip_record *record, void *out) {
    struct libdeflate_decompressor *inflater = libdeflate_alloc_decompressor();
    if (!inflater)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to unpack it", zip->what);
    size_t made = 0;
    enum libdeflate_result result =
        libdeflate_deflate_decompress(inflater, record->stored, record->stored_bytes, out, record->bytes, &made);
    libdeflate_free_decompressor(inflater);
    if (result != LIBDEFLATE_SUCCESS || made != record->bytes)
        return loom_fail(LOOM_ERR_FORMAT, "%s: record '%.*s' cannot be unpacked to its %zu bytes: damaged", zip->what,
            record->name_bytes > 200 ? 200 : (int)record->name_bytes, record->name, record->bytes);
    return LOOM_OK;
}
