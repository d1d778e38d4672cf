/* The indices of a GPT dataset on disk. A file's name is a hash of everything its content depends on, the lengths of
 * the documents included, so a corpus that has changed under its name finds another file. The header repeats all of it
 * and has a sum over the rest: what does not agree is built again. A file comes into being under a name of its own and
 * is renamed, so readers see whole files only and any number of builders are safe; the lock spares them the work, no
 * more, and nobody waits for it for ever. */
#include "data/gpt.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_WAIT_MS = 60000, STEP_MS = 20 };

#define MAGIC UINT64_C(0x3176584449545047) /* "GPTIDXv1" read as a little-endian number */

typedef struct header {
    uint64_t magic;
    loom__gpt_key key;
    int64_t epochs, documents, samples;
    uint64_t sum; /* of all that follows the header, and of what stands before the sum in it */
} header;

/* Four lanes, so that a sum of gigabytes is limited by memory and not by the multiplier. */
uint64_t loom__gpt_hash(const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint64_t lane[4] = {1, 2, 3, bytes};
    for (; bytes >= 32; bytes -= 32, at += 32)
        for (int i = 0; i < 4; i++) {
            lane[i] = (lane[i] ^ loom__load_u64(at + 8 * i)) * UINT64_C(0x9e3779b97f4a7c15);
            lane[i] ^= lane[i] >> 32;
        }
    for (; bytes > 0; bytes--, at++) {
        lane[0] = (lane[0] ^ *at) * UINT64_C(0x9e3779b97f4a7c15);
        lane[0] ^= lane[0] >> 32;
    }
    uint64_t hash = 0;
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ lane[i]) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 33;
    }
    return hash;
}

static size_t payload_bytes(const header *head) {
    return ((size_t)head->samples + 1) * sizeof(loom__gpt_cut) + (size_t)head->samples * sizeof(int64_t) +
           (size_t)head->documents * sizeof(uint32_t);
}

static uint64_t sum_of(const header *head, const void *payload, size_t bytes) {
    return loom__gpt_hash(head, offsetof(header, sum)) ^ loom__gpt_hash(payload, bytes);
}

/* ---- Reading ---- */

static bool agrees(const loom__mapping *file, const loom__gpt_key *key) {
    header head;
    if (file->bytes < sizeof head)
        return false;
    memcpy(&head, file->data, sizeof head);
    if (head.magic != MAGIC || memcmp(&head.key, key, sizeof *key) != 0)
        return false;
    size_t rest = file->bytes - sizeof head;
    if (head.samples < 0 || head.documents < 0 || (size_t)head.samples > rest / sizeof(loom__gpt_cut) ||
        (size_t)head.documents > rest / sizeof(uint32_t) || payload_bytes(&head) != rest)
        return false;
    return head.sum == sum_of(&head, file->data + sizeof head, rest);
}

/* Whether the file is there and sound; then the indices lie in it. */
static bool read_indices(const char *path, const loom__gpt_key *key, loom__gpt_indices *indices) {
    loom__mapping file = {0};
    if (loom__map_file(path, &file) != LOOM_OK) {
        loom_error_clear();
        return false;
    }
    if (!agrees(&file, key)) {
        loom__unmap_file(&file);
        return false;
    }
    header head;
    memcpy(&head, file.data, sizeof head);
    const unsigned char *at = file.data + sizeof head;
    *indices = (loom__gpt_indices){.first = key->first,
        .end = key->end,
        .epochs = head.epochs,
        .documents = head.documents,
        .samples = head.samples,
        .file = file};
    indices->sample_index = (const void *)at;
    at += ((size_t)head.samples + 1) * sizeof *indices->sample_index;
    indices->shuffle_index = (const void *)at;
    indices->document_index = (const void *)(at + (size_t)head.samples * sizeof *indices->shuffle_index);
    return true;
}

/* ---- Writing ---- */

static bool write_all(int descriptor, const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes > 0) {
        ssize_t done = write(descriptor, at, bytes < (1u << 30) ? bytes : 1u << 30);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        at += done;
        bytes -= (size_t)done;
    }
    return true;
}

/* The sum comes last: the header is written again when it is known. */
static bool write_payload(int descriptor, const loom__gpt_indices *indices, header *head) {
    size_t bytes = payload_bytes(head), cuts = ((size_t)head->samples + 1) * sizeof(loom__gpt_cut),
           shuffle = (size_t)head->samples * sizeof(int64_t);
    unsigned char *payload = malloc(bytes);
    if (!payload) {
        errno = ENOMEM;
        return false;
    }
    memcpy(payload, indices->sample_index, cuts);
    memcpy(payload + cuts, indices->shuffle_index, shuffle);
    memcpy(payload + cuts + shuffle, indices->document_index, bytes - cuts - shuffle);
    head->sum = sum_of(head, payload, bytes);
    bool written = write_all(descriptor, head, sizeof *head) && write_all(descriptor, payload, bytes);
    free(payload);
    return written;
}

static loom_status write_indices(const char *path, const loom__gpt_key *key, const loom__gpt_indices *indices) {
    char *temporary = loom__path_join(path, "", ".XXXXXX");
    if (!temporary)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for the name of %s", path);
    header head = {MAGIC, *key, indices->epochs, indices->documents, indices->samples, 0};
    int descriptor = mkstemp(temporary);
    bool written = descriptor >= 0 && write_payload(descriptor, indices, &head) && fsync(descriptor) == 0 &&
                   fchmod(descriptor, 0644) == 0 && rename(temporary, path) == 0;
    int error = errno;
    if (!written && descriptor >= 0)
        unlink(temporary);
    if (descriptor >= 0)
        close(descriptor);
    free(temporary);
    return written ? LOOM_OK
                   : loom_fail(LOOM_ERR_IO, "%s: the indices cannot be kept: %s; choose another index_mapping_dir",
                         path, strerror(error));
}

/* ---- One builds, the others wait ---- */

/* A descriptor that holds the lock; -1 where the folder cannot be written, or after the longest wait. */
static int lock(const char *folder) {
    char *path = loom__path_join(folder, "/", "lock");
    int descriptor = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    free(path);
    for (int waited = 0; descriptor >= 0 && flock(descriptor, LOCK_EX | LOCK_NB) != 0; waited += STEP_MS) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || waited >= LONGEST_WAIT_MS) {
            close(descriptor);
            return -1;
        }
        nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000L}, NULL);
    }
    return descriptor;
}

/* With the lock held: whoever held it before may have built the file. */
static loom_status build_and_keep(const char *path, const loom__gpt_key *key, const int32_t *lengths,
    int64_t max_epochs, loom__gpt_indices *indices) {
    if (read_indices(path, key, indices))
        return LOOM_OK;
    loom__gpt_indices built;
    LOOM_TRY(loom__gpt_indices_build(key, lengths, max_epochs, &built));
    loom_status status = write_indices(path, key, &built);
    /* All ranks of a node read the one file: its pages are there once. */
    if (status == LOOM_OK && read_indices(path, key, indices)) {
        loom__gpt_indices_free(&built);
        return LOOM_OK;
    }
    if (status != LOOM_OK) {
        loom__gpt_indices_free(&built);
        return status;
    }
    *indices = built;
    return LOOM_OK;
}

loom_status loom__gpt_indices_cached(const char *folder, const loom__gpt_key *key, const int32_t *lengths,
    int64_t max_epochs, loom__gpt_indices *indices) {
    char name[64];
    snprintf(name, sizeof name, "gpt-%016llx.index", (unsigned long long)loom__gpt_hash(key, sizeof *key));
    char *path = loom__path_join(folder, "/", name);
    if (!path)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for the name of %s", name);
    mkdir(folder, 0777); /* where it cannot be made, writing says why */
    loom_status status = LOOM_OK;
    loom__gpt_indices found;
    if (!read_indices(path, key, &found)) {
        int held = lock(folder);
        status = build_and_keep(path, key, lengths, max_epochs, &found);
        if (held >= 0)
            close(held);
    }
    free(path);
    LOOM_TRY(status);
    /* What is on disk may have been built without the limit. */
    if (max_epochs > 0 && found.epochs > max_epochs) {
        loom__gpt_indices_free(&found);
        return loom__gpt_indices_build(key, lengths, max_epochs, indices);
    }
    *indices = found;
    return LOOM_OK;
}
