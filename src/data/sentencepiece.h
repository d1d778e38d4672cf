/* SentencePiece's models, unigram and BPE, through its own library. That is C++, so that the few calls below are all
 * that is asked of it, in sentencepiece.cc, which is compiled only where the library is (MEGALOOM_SENTENCEPIECE). */
#ifndef DATA_SENTENCEPIECE_H
#define DATA_SENTENCEPIECE_H

#include <megaloom/data.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the bytes are SentencePiece's, and not tiktoken's file of the same name: its message begins with the first
 * piece, and tiktoken's text with a letter. */
bool loom__sentencepiece_is_model(const void *model, size_t bytes);
/* A tokenizer out of a model's bytes; name is for messages. The ends are the model's own. */
loom_status loom__sentencepiece_open(const char *name, const void *model, size_t bytes, loom_tokenizer *made);

/* ---- the library; no exception leaves these ---- */

typedef struct loom__sentencepiece_library loom__sentencepiece_library;

typedef struct loom__sentencepiece_ids {
    int64_t pieces, bos, eos; /* -1 = none */
} loom__sentencepiece_ids;

/* LOOM_ERR_FORMAT: what the library says of the model. */
loom_status loom__sentencepiece_library_load(const char *name, const void *model, size_t bytes,
    loom__sentencepiece_ids *ids, loom__sentencepiece_library **library);
void loom__sentencepiece_library_free(loom__sentencepiece_library *library);
bool loom__sentencepiece_library_is_byte(const loom__sentencepiece_library *library, int64_t piece);
/* As a tokenizer's; the text is UTF-8, and the tokens are the model's. */
loom_status loom__sentencepiece_library_encode(const loom__sentencepiece_library *library, const char *text,
    size_t bytes, int64_t *tokens, size_t capacity, size_t *count);
loom_status loom__sentencepiece_library_decode(const loom__sentencepiece_library *library, const int64_t *tokens,
    size_t count, char *text, size_t capacity, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
