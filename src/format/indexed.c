/* Reading Megatron's indexed datasets. Both files are mapped; nothing is copied, so opening costs one pass over the
 * index. The invariant after open: every sequence lies inside the .bin, and the document index rises from 0 to the
 * number of sequences. Sequences may share bytes or leave some out: an .idx that selects from a larger .bin is legal.
 */
#include "format/indexed.h"
#include "format/file.h"

#include <stdlib.h>

const char loom__indexed_magic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};

static const loom_dtype dtype_of_code[] = {
    LOOM_DTYPE_COUNT, LOOM_U8, LOOM_I8, LOOM_I16, LOOM_I32, LOOM_I64, LOOM_F64, LOOM_F32, LOOM_U16};
enum { CODES = sizeof dtype_of_code / sizeof *dtype_of_code };

struct loom_indexed {
    char *prefix;
    loom__mapping idx, bin;
    bool borrowed;
    loom__indexed_view view;
};

loom_dtype loom__indexed_dtype_of_code(unsigned code) {
    return code < CODES ? dtype_of_code[code] : LOOM_DTYPE_COUNT;
}

unsigned loom__indexed_code_of_dtype(loom_dtype dtype) {
    for (unsigned code = 1; code < CODES; code++)
        if (dtype_of_code[code] == dtype)
            return code;
    return 0;
}

/* ---- Checks ---- */

static loom_status check_header(
    const char *prefix, const unsigned char *idx, size_t idx_bytes, loom__indexed_view *view) {
    if (idx_bytes < LOOM__INDEXED_HEADER_BYTES)
        return loom_fail(LOOM_ERR_FORMAT, "%s.idx: has %zu bytes, expected at least %d for the header", prefix,
            idx_bytes, LOOM__INDEXED_HEADER_BYTES);
    if (memcmp(idx, loom__indexed_magic, sizeof loom__indexed_magic) != 0) {
        char found[2 * sizeof loom__indexed_magic + 1] = "";
        for (size_t i = 0; i < sizeof loom__indexed_magic; i++) {
            found[2 * i] = "0123456789abcdef"[idx[i] >> 4];
            found[2 * i + 1] = "0123456789abcdef"[idx[i] & 15];
        }
        return loom_fail(
            LOOM_ERR_FORMAT, "%s.idx: magic is %s, expected 4d4d49444944580000 (MMIDIDX and two zeros)", prefix, found);
    }
    uint64_t version = loom__load_u64(idx + 9);
    if (version != 1)
        return loom_fail(LOOM_ERR_FORMAT, "%s.idx: version is %llu, expected 1", prefix, (unsigned long long)version);
    view->dtype = loom__indexed_dtype_of_code(idx[17]);
    if (view->dtype == LOOM_DTYPE_COUNT)
        return loom_fail(LOOM_ERR_FORMAT, "%s.idx: dtype code is %u, expected 1 to 8 (U8 I8 I16 I32 I64 F64 F32 U16)",
            prefix, (unsigned)idx[17]);
    view->size = loom_dtype_size(view->dtype);

    uint64_t sequences = loom__load_u64(idx + 18), entries = loom__load_u64(idx + 26);
    uint64_t body = idx_bytes - LOOM__INDEXED_HEADER_BYTES;
    if (sequences > body / 12)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s.idx: number of sequences is %llu, expected at most %llu (the file has %zu bytes)", prefix,
            (unsigned long long)sequences, (unsigned long long)(body / 12), idx_bytes);
    uint64_t rest = body - 12 * sequences;
    if (entries < 1 || entries > rest / 8)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s.idx: number of document entries is %llu, expected 1 to %llu (the file has %zu bytes)", prefix,
            (unsigned long long)entries, (unsigned long long)(rest / 8), idx_bytes);
    rest -= 8 * entries;
    if (rest != 0 && rest != sequences)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s.idx: has %zu bytes, expected %llu (or %llu with modes) for %llu sequences and %llu document entries",
            prefix, idx_bytes, (unsigned long long)(idx_bytes - rest),
            (unsigned long long)(idx_bytes - rest + sequences), (unsigned long long)sequences,
            (unsigned long long)entries);
    view->sequences = (int64_t)sequences;
    view->document_entries = (int64_t)entries;
    view->lengths = idx + LOOM__INDEXED_HEADER_BYTES;
    view->pointers = view->lengths + 4 * sequences;
    view->documents = view->pointers + 8 * sequences;
    view->modes = rest > 0 ? view->documents + 8 * entries : NULL;
    return LOOM_OK;
}

static loom_status check_sequences(const char *prefix, uint64_t bin_bytes, loom__indexed_view *view) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < view->sequences; i++) {
        int32_t length = loom__load_i32(view->lengths + 4 * i);
        int64_t pointer = loom__load_i64(view->pointers + 8 * i);
        if (length < 0)
            return loom_fail(LOOM_ERR_FORMAT, "%s.idx: length of sequence %lld is %d, expected at least 0", prefix,
                (long long)i, length);
        uint64_t bytes = (uint64_t)length * view->size;
        if (pointer < 0 || (uint64_t)pointer > bin_bytes || bytes > bin_bytes - (uint64_t)pointer)
            return loom_fail(LOOM_ERR_FORMAT,
                "%s.bin: has %llu bytes, but sequence %lld of %d %s lies at byte %lld: %llu bytes wanted", prefix,
                (unsigned long long)bin_bytes, (long long)i, length, loom_dtype_name(view->dtype), (long long)pointer,
                (unsigned long long)pointer + bytes);
        if (__builtin_add_overflow(tokens, (int64_t)length, &tokens))
            return loom_fail(LOOM_ERR_FORMAT, "%s.idx: the lengths sum to more than 2^63", prefix);
    }
    view->tokens = tokens;
    return LOOM_OK;
}

static loom_status check_documents(const char *prefix, const loom__indexed_view *view) {
    int64_t last = 0;
    for (int64_t i = 0; i < view->document_entries; i++) {
        int64_t entry = loom__load_i64(view->documents + 8 * i);
        if ((i == 0 && entry != 0) || entry < last || entry > view->sequences)
            return loom_fail(LOOM_ERR_FORMAT, "%s.idx: document entry %lld is %lld, expected %lld to %lld", prefix,
                (long long)i, (long long)entry, (long long)last, i == 0 ? 0LL : (long long)view->sequences);
        last = entry;
    }
    if (last != view->sequences)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s.idx: the last document entry is %lld, expected %lld, the number of sequences", prefix, (long long)last,
            (long long)view->sequences);
    return LOOM_OK;
}

loom_status loom__indexed_check(
    const char *prefix, const void *idx, size_t idx_bytes, uint64_t bin_bytes, loom__indexed_view *view) {
    loom__indexed_view found = {0};
    LOOM_TRY(check_header(prefix, idx, idx_bytes, &found));
    LOOM_TRY(check_sequences(prefix, bin_bytes, &found));
    LOOM_TRY(check_documents(prefix, &found));
    *view = found;
    return LOOM_OK;
}

/* ---- Opening ---- */

static loom_status map_both(loom_indexed *indexed) {
    char *idx = loom__path_join(indexed->prefix, "", ".idx"), *bin = loom__path_join(indexed->prefix, "", ".bin");
    loom_status status = idx && bin ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: no memory to open it", indexed->prefix);
    if (status == LOOM_OK)
        status = loom__map_file(idx, &indexed->idx);
    if (status == LOOM_OK)
        status = loom__map_file(bin, &indexed->bin);
    free(idx);
    free(bin);
    return status;
}

static loom_status make(const char *prefix, loom_indexed **indexed) {
    loom_indexed *made = calloc(1, sizeof *made);
    if (made)
        made->prefix = strdup(prefix);
    if (!made || !made->prefix) {
        free(made);
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to open it", prefix);
    }
    *indexed = made;
    return LOOM_OK;
}

static loom_status check_made(loom_indexed *made, loom_indexed **indexed) {
    loom_status status =
        loom__indexed_check(made->prefix, made->idx.data, made->idx.bytes, made->bin.bytes, &made->view);
    if (status != LOOM_OK) {
        loom_indexed_close(made);
        return status;
    }
    *indexed = made;
    return LOOM_OK;
}

loom_status loom_indexed_open(const char *prefix, loom_indexed **indexed) {
    loom_indexed *made;
    LOOM_TRY(make(prefix, &made));
    loom_status status = map_both(made);
    if (status != LOOM_OK) {
        loom_indexed_close(made);
        return status;
    }
    return check_made(made, indexed);
}

loom_status loom__indexed_open_memory(
    const char *prefix, const void *idx, size_t idx_bytes, const void *bin, size_t bin_bytes, loom_indexed **indexed) {
    loom_indexed *made;
    LOOM_TRY(make(prefix, &made));
    made->idx = (loom__mapping){idx, idx_bytes};
    made->bin = (loom__mapping){bin, bin_bytes};
    made->borrowed = true;
    return check_made(made, indexed);
}

void loom_indexed_close(loom_indexed *indexed) {
    if (!indexed)
        return;
    if (!indexed->borrowed) {
        loom__unmap_file(&indexed->idx);
        loom__unmap_file(&indexed->bin);
    }
    free(indexed->prefix);
    free(indexed);
}

/* ---- Access ---- */

static bool has_sequence(const loom_indexed *indexed, int64_t sequence) {
    return sequence >= 0 && sequence < indexed->view.sequences;
}

const char *loom_indexed_prefix(const loom_indexed *indexed) {
    return indexed->prefix;
}

loom_dtype loom_indexed_dtype(const loom_indexed *indexed) {
    return indexed->view.dtype;
}

int64_t loom_indexed_sequences(const loom_indexed *indexed) {
    return indexed->view.sequences;
}

int64_t loom_indexed_documents(const loom_indexed *indexed) {
    return indexed->view.document_entries - 1;
}

int64_t loom_indexed_tokens(const loom_indexed *indexed) {
    return indexed->view.tokens;
}

bool loom_indexed_multimodal(const loom_indexed *indexed) {
    return indexed->view.modes != NULL;
}

int64_t loom_indexed_bin_bytes(const loom_indexed *indexed) {
    return (int64_t)indexed->bin.bytes;
}

int64_t loom_indexed_length(const loom_indexed *indexed, int64_t sequence) {
    return has_sequence(indexed, sequence) ? loom__load_i32(indexed->view.lengths + 4 * sequence) : 0;
}

int64_t loom_indexed_pointer(const loom_indexed *indexed, int64_t sequence) {
    return has_sequence(indexed, sequence) ? loom__load_i64(indexed->view.pointers + 8 * sequence) : 0;
}

int loom_indexed_mode(const loom_indexed *indexed, int64_t sequence) {
    return indexed->view.modes && has_sequence(indexed, sequence) ? (int8_t)indexed->view.modes[sequence] : 0;
}

int64_t loom_indexed_document(const loom_indexed *indexed, int64_t document) {
    bool inside = document >= 0 && document < indexed->view.document_entries;
    return inside ? loom__load_i64(indexed->view.documents + 8 * document) : 0;
}

const void *loom_indexed_data(const loom_indexed *indexed, int64_t sequence) {
    return has_sequence(indexed, sequence) ? indexed->bin.data + loom_indexed_pointer(indexed, sequence) : NULL;
}

loom_status loom_indexed_read(
    const loom_indexed *indexed, int64_t sequence, int64_t first, int64_t count, int64_t *tokens) {
    if (!has_sequence(indexed, sequence))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: sequence %lld asked, it has %lld", indexed->prefix,
            (long long)sequence, (long long)indexed->view.sequences);
    int64_t length = loom_indexed_length(indexed, sequence);
    if (first < 0 || count < 0 || first > length || count > length - first)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: elements [%lld, +%lld) of sequence %lld asked, it has %lld",
            indexed->prefix, (long long)first, (long long)count, (long long)sequence, (long long)length);
    if (!loom__widen(indexed->view.dtype, loom_indexed_data(indexed, sequence), first, count, tokens))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: dtype is %s, expected an integer type to read tokens", indexed->prefix,
            loom_dtype_name(indexed->view.dtype));
    return LOOM_OK;
}

loom_dtype loom_indexed_dtype_for_vocabulary(int64_t vocab_size) {
    return vocab_size < 65500 ? LOOM_U16 : LOOM_I32;
}
