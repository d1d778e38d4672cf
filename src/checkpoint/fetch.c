/* A chunk's bytes into memory of one's own, in few large reads: a page of a mapping at a time is far from what a disk
 * can give. Nothing here is an error: what is not fetched is read from the mapping, which tells what is wrong. */
#include "checkpoint/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { LEAST_BYTES = 1 << 20, PART_BYTES = 1 << 23, BLOCK = 4096, HUGE_PAGE = 1 << 21 };

void loom__chunk_memory_free(loom__chunk_memory *memory) {
    free(memory->memory);
    *memory = (loom__chunk_memory){0};
}

static bool reserve(loom__chunk_memory *memory, size_t bytes) {
    if (memory->room >= bytes)
        return true;
    loom__chunk_memory_free(memory);
    size_t room = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    memory->memory = aligned_alloc(HUGE_PAGE, room);
    memory->room = memory->memory ? room : 0;
    return memory->memory != NULL;
}

/* From a whole block to a whole block, or to the end of the file. */
static bool read_blocks(int file, unsigned char *to, uint64_t from, uint64_t bytes, uint64_t needed) {
    uint64_t at = 0;
    while (at < bytes) {
        uint64_t part = bytes - at < PART_BYTES ? bytes - at : PART_BYTES;
        ssize_t got = pread(file, to + at, (size_t)part, (off_t)(from + at));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        at += (uint64_t)got;
        /* A short read ends at the file's end; behind it no direct read may begin. */
        if (got % BLOCK != 0)
            break;
    }
    return at >= needed;
}

static int open_file(const char *path, bool direct) {
    int file = direct ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT) : -1;
    return file >= 0 ? file : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

void loom__checkpoint_fetch(const loom_checkpoint *checkpoint, const loom__checkpoint_entry *entry, int64_t chunk,
    bool direct, loom__chunk_memory *memory) {
    memory->archive = NULL;
    if (checkpoint->safetensors)
        return;
    const loom__checkpoint_place *place = &entry->places[chunk];
    const loom__checkpoint_file *from = &checkpoint->files[place->file];
    if (place->bytes < LEAST_BYTES || place->position > from->mapping.bytes ||
        place->bytes > from->mapping.bytes - place->position)
        return;
    uint64_t skip = place->position % BLOCK, needed = skip + place->bytes;
    uint64_t bytes = (needed + BLOCK - 1) / BLOCK * BLOCK;
    int file = reserve(memory, bytes) ? open_file(from->path, direct) : -1;
    if (file < 0)
        return;
    if (read_blocks(file, memory->memory, place->position - skip, bytes, needed))
        memory->archive = memory->memory + skip;
    close(file);
}
