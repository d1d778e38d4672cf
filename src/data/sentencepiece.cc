// The calls of SentencePiece's library, which is C++, behind functions of C. The rest of the tree is C and knows no
// exception: each call catches what the library throws and says it in the error record. The library's processor is
// only read once it is loaded, so that any number of threads may use one.
#include "data/sentencepiece.h"

#include <cstring>
#include <exception>
#include <new>
#include <sentencepiece_processor.h>
#include <string>
#include <vector>

struct loom__sentencepiece_library {
    sentencepiece::SentencePieceProcessor processor;
};

namespace {

// The status of work(), whose exceptions become one.
template <typename Work> loom_status guarded(const Work &work) {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        return loom_fail(LOOM_ERR_MEMORY, "no memory for SentencePiece");
    } catch (const std::exception &error) {
        return loom_fail(LOOM_ERR_INTERNAL, "SentencePiece: %s", error.what());
    }
}

} // namespace

loom_status loom__sentencepiece_library_load(const char *name, const void *model, size_t bytes,
    loom__sentencepiece_ids *ids, loom__sentencepiece_library **library) {
    loom__sentencepiece_library *made = new (std::nothrow) loom__sentencepiece_library;
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    loom_status status = guarded([&] {
        const auto result =
            made->processor.LoadFromSerializedProto(std::string(static_cast<const char *>(model), bytes));
        return result.ok() ? LOOM_OK
                           : loom_fail(LOOM_ERR_FORMAT, "%s: SentencePiece's library refuses the model: %s", name,
                                 result.ToString().c_str());
    });
    if (status != LOOM_OK) {
        delete made;
        return status;
    }
    ids->pieces = made->processor.GetPieceSize();
    ids->bos = made->processor.bos_id();
    ids->eos = made->processor.eos_id();
    *library = made;
    return LOOM_OK;
}

void loom__sentencepiece_library_free(loom__sentencepiece_library *library) {
    delete library;
}

bool loom__sentencepiece_library_is_byte(const loom__sentencepiece_library *library, int64_t piece) {
    return library->processor.IsByte(static_cast<int>(piece));
}

loom_status loom__sentencepiece_library_encode(const loom__sentencepiece_library *library, const char *text,
    size_t bytes, int64_t *tokens, size_t capacity, size_t *count) {
    return guarded([&] {
        std::vector<int> ids;
        const auto result = library->processor.Encode(absl::string_view(text, bytes), &ids);
        if (!result.ok())
            return loom_fail(LOOM_ERR_INTERNAL, "SentencePiece: %s", result.ToString().c_str());
        if (ids.size() > capacity)
            return loom_fail(LOOM_ERR_ARGUMENT, "%zu bytes of text give %zu tokens, there is room for %zu", bytes,
                ids.size(), capacity);
        for (size_t i = 0; i < ids.size(); i++)
            tokens[i] = ids[i];
        *count = ids.size();
        return LOOM_OK;
    });
}

loom_status loom__sentencepiece_library_decode(const loom__sentencepiece_library *library, const int64_t *tokens,
    size_t count, char *text, size_t capacity, size_t *bytes) {
    return guarded([&] {
        std::string decoded;
        const auto result = library->processor.Decode(std::vector<int>(tokens, tokens + count), &decoded);
        if (!result.ok())
            return loom_fail(LOOM_ERR_INTERNAL, "SentencePiece: %s", result.ToString().c_str());
        *bytes = decoded.size();
        if (decoded.size() <= capacity && !decoded.empty())
            std::memcpy(text, decoded.data(), decoded.size());
        return LOOM_OK;
    });
}
