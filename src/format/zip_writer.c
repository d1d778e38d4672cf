/* Writing one archive of a torch file behind whatever the file holds already. Offsets count from the archive's begin,
 * and so does the alignment of 64 bytes that torch gives every record (a loader may map it). Sizes and checksum of a
 * record follow its data, as torch has it; they and the directory use 64 bits as soon as a number needs them. */
#include "format/zip.h"

#include <libdeflate.h>
#include <stdio.h>
#include <stdlib.h>

#define FOLDER "archive/"

enum { ALIGNMENT = 64, NAME_MAX_BYTES = 256, LOCAL_BYTES = 30, FLAGS = 0x0808, PIECE_BYTES = 1 << 18 };

typedef struct entry {
    char name[NAME_MAX_BYTES]; /* with the folder */
    uint64_t at, bytes;
    uint32_t crc;
} entry;

struct loom__zip_writer {
    loom__new_file *file;
    uint64_t begin; /* of the archive in the file */
    entry *entries;
    size_t count;
};

/* Fields one behind another. */
typedef struct fields {
    unsigned char bytes[512];
    size_t count;
} fields;

static void put(fields *to, uint64_t number, size_t width) {
    memcpy(to->bytes + to->count, &number, width);
    to->count += width;
}

loom_status loom__zip_writer_create(loom__new_file *file, loom__zip_writer **writer) {
    loom__zip_writer *made = malloc(sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", file->path);
    *made = (loom__zip_writer){.file = file, .begin = file->bytes};
    *writer = made;
    return LOOM_OK;
}

void loom__zip_writer_destroy(loom__zip_writer *writer) {
    if (!writer)
        return;
    free(writer->entries);
    free(writer);
}

static uint64_t reached(const loom__zip_writer *writer) {
    return writer->file->bytes - writer->begin;
}

/* Piece by piece, so that what the checksum has read is still in the cache when it is written. */
static loom_status write_data(loom__zip_writer *writer, const unsigned char *data, size_t bytes, uint32_t *crc) {
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        size_t part = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        *crc = libdeflate_crc32(*crc, data + at, part);
        LOOM_TRY(loom__new_file_write(writer->file, data + at, part));
    }
    return LOOM_OK;
}

loom_status loom__zip_writer_add(loom__zip_writer *writer, const char *name, const void *data, size_t bytes) {
    static const char filler[ALIGNMENT] = "ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ";
    entry made = {.at = reached(writer), .bytes = bytes};
    int name_bytes = snprintf(made.name, sizeof made.name, FOLDER "%s", name);
    if (name_bytes >= (int)sizeof made.name)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: the name of record %.80s… is too long", writer->file->path, name);
    void *grown = realloc(writer->entries, (writer->count + 1) * sizeof *writer->entries);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", writer->file->path);
    writer->entries = grown;

    size_t past = (size_t)((made.at + LOCAL_BYTES + (uint64_t)name_bytes + 4) % ALIGNMENT);
    size_t padding = (ALIGNMENT - past) % ALIGNMENT;
    fields head = {.count = 0};
    put(&head, 0x04034b50, 4);
    put(&head, 0, 2); /* version */
    put(&head, FLAGS, 2);
    put(&head, 0, 2 + 4); /* stored, no date */
    put(&head, 0, 4);     /* checksum and sizes follow the data */
    put(&head, 0, 8);
    put(&head, (uint64_t)name_bytes, 2);
    put(&head, padding + 4, 2);
    memcpy(head.bytes + head.count, made.name, (size_t)name_bytes);
    head.count += (size_t)name_bytes;
    put(&head, 0x4246, 2);
    put(&head, padding, 2);
    LOOM_TRY(loom__new_file_write(writer->file, head.bytes, head.count));
    LOOM_TRY(loom__new_file_write(writer->file, filler, padding));
    LOOM_TRY(write_data(writer, data, bytes, &made.crc));

    size_t width = bytes >= UINT32_MAX ? 8 : 4;
    fields tail = {.count = 0};
    put(&tail, 0x08074b50, 4);
    put(&tail, made.crc, 4);
    put(&tail, bytes, width);
    put(&tail, bytes, width);
    LOOM_TRY(loom__new_file_write(writer->file, tail.bytes, tail.count));
    writer->entries[writer->count++] = made;
    return LOOM_OK;
}

static loom_status put_entry(loom__zip_writer *writer, const entry *of) {
    bool wide_bytes = of->bytes >= UINT32_MAX, wide_at = of->at >= UINT32_MAX;
    size_t name_bytes = strlen(of->name), wide = (wide_bytes ? 16u : 0u) + (wide_at ? 8u : 0u);
    fields to = {.count = 0};
    put(&to, 0x02014b50, 4);
    put(&to, 0, 4); /* versions */
    put(&to, FLAGS, 2);
    put(&to, 0, 2 + 4);
    put(&to, of->crc, 4);
    put(&to, wide_bytes ? UINT32_MAX : of->bytes, 4);
    put(&to, wide_bytes ? UINT32_MAX : of->bytes, 4);
    put(&to, name_bytes, 2);
    put(&to, wide ? wide + 4 : 0, 2);
    put(&to, 0, 2 + 2 + 2); /* comment, disk, attributes */
    put(&to, 0, 4);
    put(&to, wide_at ? UINT32_MAX : of->at, 4);
    memcpy(to.bytes + to.count, of->name, name_bytes);
    to.count += name_bytes;
    if (wide) {
        put(&to, 1, 2);
        put(&to, wide, 2);
        if (wide_bytes) {
            put(&to, of->bytes, 8);
            put(&to, of->bytes, 8);
        }
        if (wide_at)
            put(&to, of->at, 8);
    }
    return loom__new_file_write(writer->file, to.bytes, to.count);
}

loom_status loom__zip_writer_finish(loom__zip_writer *writer, uint64_t *bytes) {
    uint64_t at = reached(writer), count = writer->count;
    for (size_t i = 0; i < writer->count; i++)
        LOOM_TRY(put_entry(writer, &writer->entries[i]));
    uint64_t end = reached(writer), directory = end - at;
    fields to = {.count = 0};
    put(&to, 0x06064b50, 4);
    put(&to, 44, 8);
    put(&to, 0x031e, 2);
    put(&to, 45, 2);
    put(&to, 0, 8); /* disks */
    put(&to, count, 8);
    put(&to, count, 8);
    put(&to, directory, 8);
    put(&to, at, 8);
    put(&to, 0x07064b50, 4);
    put(&to, 0, 4);
    put(&to, end, 8);
    put(&to, 1, 4);
    put(&to, 0x06054b50, 4);
    put(&to, 0, 4);
    put(&to, count, 2);
    put(&to, count, 2);
    put(&to, directory >= UINT32_MAX ? UINT32_MAX : directory, 4);
    put(&to, at >= UINT32_MAX ? UINT32_MAX : at, 4);
    put(&to, 0, 2);
    LOOM_TRY(loom__new_file_write(writer->file, to.bytes, to.count));
    *bytes = reached(writer);
    return LOOM_OK;
}
