/* Training data: from text to microbatches.
 *
 *   text files --loom_data_preprocess_text--> PREFIX.bin + PREFIX.idx   (Megatron's indexed dataset)
 *   loom_indexed   opens such a pair: sequences of tokens, grouped into documents
 *   loom_dataset   samples of a fixed length out of it (GPT), or replayed from a file (fixed), or your own
 *   loom_data_sampler   which samples make microbatch k of a data-parallel rank
 *   loom_data_loader    an iterator of microbatches: dataset + sampler, or your own source
 *
 * Nothing here is collective and nothing communicates: each data-parallel rank builds the same indices and reads its
 * own part; ranks of one data-parallel coordinate (tensor, pipeline, context) get equal batches from equal arguments.
 * Datasets and indexed datasets are read-only after creation and may be shared by many threads; a loader belongs to one
 * thread.
 *
 * Shape letters: b rows of a microbatch, s sequence. All arrays are row-major [b, s]. Counts of tokens, samples and
 * bytes are 64-bit.
 *
 * Errors: LOOM_ERR_ARGUMENT and LOOM_ERR_CONFIG (a value that is not legal, with the nearest that is), LOOM_ERR_IO,
 * LOOM_ERR_FORMAT (a file breaks its format: file, field, found, wanted), LOOM_ERR_UNSUPPORTED ("not supported yet:
 * …"), LOOM_ERR_NOT_FOUND, LOOM_ERR_MEMORY, LOOM_END (an iterator has ended: not a failure). */
#ifndef MEGALOOM_DATA_H
#define MEGALOOM_DATA_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tokenizers ---- */

/* A tokenizer is a struct of functions; bring your own, take the byte tokenizer, or open a tokenizer.json. It is
 * read-only: any number of threads may encode and decode at once. */
typedef struct loom_tokenizer {
    const char *name;
    void *context;
    int64_t vocab_size; /* ids are in [0, vocab_size) */
    int64_t eod;        /* end of document; -1 = none */
    int64_t bos;        /* begin of text; -1 = none. Where it belongs before a text, encode puts it there itself */
    int64_t tokens_per_byte, tokens_around; /* see loom_tokenizer_room; 0 tokens per byte are read as 1 */
    /* Tokens of text[0, bytes): writes *count <= capacity ids. loom_tokenizer_room says which capacity always suffices;
     * too little is LOOM_ERR_ARGUMENT, and so is, but for the byte tokenizer, a text that is not UTF-8 (with the
     * offset). */
    loom_status (*encode)(
        void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count);
    /* Text of tokens[0, count), without a final NUL: writes *bytes <= capacity; *bytes is the length it would need when
     * the capacity is too small (nothing is written then). The end-of-document token and other special tokens become
     * nothing. Decoding more tokens only appends to the text of fewer, as far as they are settled; a character may be
     * split over two tokens. loom_text_stream makes text of tokens as they come. */
    loom_status (*decode)(
        void *context, const int64_t *tokens, size_t count, char *text, size_t capacity, size_t *bytes);
    /* How many of the first tokens have a text that no later token changes; NULL: all. A SentencePiece tokenizer's byte
     * tokens at the end are not settled: the next one decides whether together they are UTF-8. */
    size_t (*settled)(void *context, const int64_t *tokens, size_t count);
    void (*destroy)(void *context); /* of an opened tokenizer; may be NULL */
} loom_tokenizer;

enum { LOOM_BYTE_VOCABULARY = 257 }; /* tokens of the byte tokenizer */
/* Bytes are tokens 0-255, 256 is the end of a document. Any input is valid text. */
LOOM_API const loom_tokenizer *loom_tokenizer_byte(void);
/* The built-in tokenizer of that name ("byte"); any other is LOOM_ERR_UNSUPPORTED naming what there is. */
LOOM_API loom_status loom_tokenizer_find(const char *name, const loom_tokenizer **tokenizer);

/* Opens "byte", or a Hugging Face tokenizer.json by its path or that of its directory: byte-level BPE (GPT-2, Llama 3,
 * Qwen) and SentencePiece's BPE (Llama 2, Mistral, Gemma). Ids are those of the `tokenizers` package with special
 * tokens, so that a template's begin of text is put first. What the package would do otherwise is refused when it is
 * opened (LOOM_ERR_UNSUPPORTED, with the place in the file). A byte-level tokenizer gives decoded bytes as they are,
 * also those that are no UTF-8; a run of SentencePiece's byte tokens that is none becomes a U+FFFD for each. eod and
 * bos are the eos_token and bos_token of tokenizer_config.json or special_tokens_map.json beside the file, else a token
 * of a known name. */
LOOM_API loom_status loom_tokenizer_open(const char *name, loom_tokenizer **tokenizer);
/* Only for what loom_tokenizer_open made; NULL is accepted. */
LOOM_API void loom_tokenizer_destroy(loom_tokenizer *tokenizer);
/* The most tokens that a text of so many bytes can have: bytes * tokens_per_byte + tokens_around, at most SIZE_MAX. */
LOOM_API size_t loom_tokenizer_room(const loom_tokenizer *tokenizer, size_t bytes);

/* Text of tokens that come one by one, in whole characters, with U+FFFD in place of bytes that are none: put together
 * it is what the `tokenizers` package makes of all tokens at once, special tokens left out.
 *
 *     loom_text_stream_create → loop { loom_text_stream_put } → loom_text_stream_end → loom_text_stream_destroy */
typedef struct loom_text_stream loom_text_stream;

/* before[0, count): the tokens that come before, such as a prompt (they decide whether a space at the beginning
 * belongs to the text); their own text is not given. The tokenizer is borrowed until the stream is destroyed, before
 * for the call. */
LOOM_API loom_status loom_text_stream_create(
    const loom_tokenizer *tokenizer, const int64_t *before, size_t count, loom_text_stream **stream);
/* What the token adds: UTF-8 without a final NUL, often empty; valid until the next call. What later tokens may still
 * change is held back. Errors: those of the tokenizer's decode. */
LOOM_API loom_status loom_text_stream_put(loom_text_stream *stream, int64_t token, const char **text, size_t *bytes);
/* What was held back; afterwards the stream can only be destroyed. */
LOOM_API loom_status loom_text_stream_end(loom_text_stream *stream, const char **text, size_t *bytes);
LOOM_API void loom_text_stream_destroy(loom_text_stream *stream); /* NULL is accepted */

/* ---- Indexed datasets: PREFIX.idx and PREFIX.bin ---- */

/* Megatron's format. PREFIX.bin holds the elements of all sequences; PREFIX.idx, little-endian:
 *   "MMIDIDX\0\0", u64 version 1, u8 dtype code (1 U8, 2 I8, 3 I16, 4 I32, 5 I64, 6 F64, 7 F32, 8 U16),
 *   u64 sequences n, u64 document entries m, i32 length [n], i64 byte pointer [n], i64 document index [m]
 *   (0 = document[0] <= … <= document[m-1] = n: document k is the sequences [document[k], document[k+1])),
 *   and, in multimodal sets, i8 mode [n]. */
typedef struct loom_indexed loom_indexed;

/* Maps both files and checks every field: lengths, pointers inside the .bin, document order, file sizes. */
LOOM_API loom_status loom_indexed_open(const char *prefix, loom_indexed **indexed);
/* NULL is accepted. Datasets made from it must be destroyed first. */
LOOM_API void loom_indexed_close(loom_indexed *indexed);

/* What it was opened with, without .idx and .bin; lives as long as the set. */
LOOM_API const char *loom_indexed_prefix(const loom_indexed *indexed);
LOOM_API loom_dtype loom_indexed_dtype(const loom_indexed *indexed);
LOOM_API int64_t loom_indexed_sequences(const loom_indexed *indexed); /* n */
LOOM_API int64_t loom_indexed_documents(const loom_indexed *indexed); /* m - 1 */
LOOM_API int64_t loom_indexed_tokens(const loom_indexed *indexed);    /* sum of all lengths */
LOOM_API bool loom_indexed_multimodal(const loom_indexed *indexed);
/* For sequence in [0, n); 0 outside. length in elements; pointer in bytes; mode 0 where there are none. */
LOOM_API int64_t loom_indexed_length(const loom_indexed *indexed, int64_t sequence);
LOOM_API int64_t loom_indexed_pointer(const loom_indexed *indexed, int64_t sequence);
LOOM_API int loom_indexed_mode(const loom_indexed *indexed, int64_t sequence);
/* First sequence of document k, k in [0, m-1] (k = m-1 gives n); 0 outside. */
LOOM_API int64_t loom_indexed_document(const loom_indexed *indexed, int64_t document);
/* The elements of a sequence where they lie (not necessarily aligned); NULL outside [0, n). */
LOOM_API const void *loom_indexed_data(const loom_indexed *indexed, int64_t sequence);
/* tokens[i] = element first+i of the sequence, i in [0, count), which must lie inside it. Integer dtypes only. */
LOOM_API loom_status loom_indexed_read(
    const loom_indexed *indexed, int64_t sequence, int64_t first, int64_t count, int64_t *tokens);

/* The element type for a vocabulary: U16 below 65500 entries, else I32 (Megatron's rule). */
LOOM_API loom_dtype loom_indexed_dtype_for_vocabulary(int64_t vocab_size);

/* Writes PREFIX.bin and PREFIX.idx under temporary names in a stream; finish makes them visible, so that a stopped
 * writer never leaves a pair that can be opened. After a call that failed with LOOM_ERR_IO every later one fails too:
 * what the files hold is then unknown. dtype: one of the format's. */
typedef struct loom_indexed_writer loom_indexed_writer;
LOOM_API loom_status loom_indexed_writer_create(
    const char *prefix, loom_dtype dtype, bool multimodal, loom_indexed_writer **writer);
/* Appends a sequence of `count` elements of the writer's dtype (at most 2^31-1). mode must be 0 unless multimodal. */
LOOM_API loom_status loom_indexed_writer_add(
    loom_indexed_writer *writer, const void *elements, int64_t count, int mode);
/* The same from int64; a value that the writer's integer dtype cannot hold is LOOM_ERR_ARGUMENT (value, range). */
LOOM_API loom_status loom_indexed_writer_add_tokens(
    loom_indexed_writer *writer, const int64_t *tokens, int64_t count, int mode);
/* Ends the document; it holds the sequences added since the last end (possibly none). */
LOOM_API loom_status loom_indexed_writer_end_document(loom_indexed_writer *writer);
/* Flushes to disk and renames. Sequences after the last end of a document are LOOM_ERR_STATE. Then destroy. */
LOOM_API loom_status loom_indexed_writer_finish(loom_indexed_writer *writer);
/* Frees; unfinished files are removed. NULL is accepted. */
LOOM_API void loom_indexed_writer_destroy(loom_indexed_writer *writer);

/* ---- Text to indexed dataset ---- */

/* Called now and then by the preprocessing thread; bytes of text done and in all. */
typedef void (*loom_data_progress)(void *context, int64_t documents, int64_t bytes_done, int64_t bytes_total);

typedef struct loom_data_preprocess_config {
    const char *const
        *inputs; /* files, and directories that are searched recursively; taken in the given order, files of
                    a directory in byte order of their paths; links are followed, hidden files skipped */
    int64_t input_count;
    const char *suffix;              /* of the files taken out of directories (".pod"); NULL = all */
    const loom_tokenizer *tokenizer; /* NULL = byte */
    const char *output_prefix;
    loom_data_progress progress; /* may be NULL */
    void *progress_context;
} loom_data_preprocess_config;

typedef struct loom_data_preprocess_result {
    int64_t documents; /* written */
    int64_t empty;     /* files without a token: skipped */
    int64_t tokens;    /* ends of documents included */
    int64_t bytes;     /* of text read */
    loom_dtype dtype;  /* of the .bin */
} loom_data_preprocess_result;

/* One file is one document of one sequence, its tokens and then the end of document. The same input gives the same
 * bytes. No document at all is LOOM_ERR_NOT_FOUND. */
LOOM_API loom_status loom_data_preprocess_text(
    const loom_data_preprocess_config *config, loom_data_preprocess_result *result);

/* ---- Datasets ---- */

/* Where a sample goes: rows of s elements each, written by get. */
typedef struct loom_sample_row {
    int64_t *tokens;         /* [s] */
    int64_t *labels;         /* [s] next tokens; a legal id everywhere */
    float *loss_mask;        /* [s] 1 = counts, 0 = does not */
    int64_t *position_ids;   /* [s] */
    int32_t *document_start; /* [s] position where the document of this position begins; NULL = not wanted */
} loom_sample_row;

/* A dataset is a struct of functions. `get` may be called by many threads at once. */
typedef struct loom_dataset {
    void *context;
    int64_t length;           /* samples */
    int64_t sequence_length;  /* s */
    bool document_boundaries; /* attention stops at documents: get fills document_start */
    /* Sample `index` in [0, length). index < 0 asks for a padding row: legal tokens, loss_mask 0. */
    loom_status (*get)(void *context, int64_t index, const loom_sample_row *row);
    void (*destroy)(void *context); /* may be NULL */
} loom_dataset;

/* Calls destroy and clears the struct; NULL and a cleared struct are accepted. */
LOOM_API void loom_dataset_destroy(loom_dataset *dataset);

typedef enum loom_split { LOOM_SPLIT_TRAIN, LOOM_SPLIT_VALID, LOOM_SPLIT_TEST, LOOM_SPLIT_COUNT } loom_split;

/* The shares of train, valid and test in "98,1,1": begin and end in [0, 1], or a pair of -1 for no share. Missing
 * entries are 0; separators are , ; / and spaces. LOOM_ERR_CONFIG when it is no such list or its sum is 0. */
LOOM_API loom_status loom_data_split_parse(const char *split, double shares[LOOM_SPLIT_COUNT][2]);
/* The same for a set given by two splits (documents and samples): shares that lie in both. */
LOOM_API loom_status loom_data_split_intersect(
    const double a[LOOM_SPLIT_COUNT], const double b[LOOM_SPLIT_COUNT], double shares[LOOM_SPLIT_COUNT][2]);
/* [*first, *end) of `count` things for a share; rounded half to even, as Megatron does. A share of -1 gives [0, 0). */
LOOM_API void loom_data_split_bounds(const double share[2], int64_t count, int64_t *first, int64_t *end);

/* Megatron's GPT dataset: the sequences of a split ("documents" here) are put one after another in a shuffled order,
 * epoch after epoch, cut into samples of s tokens that overlap by the one token that is only a label, and the samples
 * are shuffled. The orders equal Megatron-Core's for the same seed (numpy's RandomState). */
typedef struct loom_gpt_dataset_config {
    int64_t sequence_length; /* s >= 1 */
    int64_t seed;            /* 0 … 2^32-1 */
    const char *split;       /* "98,1,1" */
    loom_split which;
    int64_t samples; /* at least so many, by as many epochs as it takes; -1 = one epoch, whatever it gives */
    /* True: samples are s+1 tokens, the last only a label. False: samples are s tokens, the last position has no label
     * and is masked. */
    bool add_extra_token_to_sequence;
    bool drop_last_partial_validation_sequence; /* false: the last, padded sample of the valid split is kept */
    bool reset_position_ids;                    /* positions count from each document's start */
    bool reset_attention_mask;                  /* attention stops at documents: document_start is filled */
    bool eod_mask_loss;                         /* positions whose token is eod are masked */
    int64_t eod;                                /* needed by the three above; -1 = none */
    /* A token that only fills up: masked where it is a label, read as token 0. -1 (or the same as eod) = none: padding
     * is then recognised by its place. */
    int64_t pad;
    int64_t vocab_size; /* > 0: ids outside are LOOM_ERR_FORMAT when read; 0 = unchecked */
} loom_gpt_dataset_config;

/* s 0 (must be set), seed 1234, split "969,30,1", train, one epoch, extra token, drop the partial, no resets, no eod,
 * pad -1. */
LOOM_API loom_gpt_dataset_config loom_gpt_dataset_config_default(void);
/* indexed is borrowed until the dataset is destroyed. LOOM_ERR_NOT_FOUND: the split has no share; LOOM_ERR_CONFIG:
 * samples are asked of a share without documents or tokens, or a value is not legal. */
LOOM_API loom_status loom_gpt_dataset_create(
    const loom_indexed *indexed, const loom_gpt_dataset_config *config, loom_dataset *dataset);

/* Replays tensor `tokens` [steps, batch, s+1] (any integer dtype) of a safetensors file: sample i is row i mod batch of
 * step i / batch. Every position counts. *batch (may be NULL) gets the size that global batches must have to replay the
 * steps. vocab_size as above; token ids are checked when read. */
LOOM_API loom_status loom_fixed_dataset_create(
    const char *path, int64_t vocab_size, loom_dataset *dataset, int64_t *batch);

/* A deterministic synthetic stream without files: `samples` walks over the vocabulary, a function of (seed, sample). */
LOOM_API loom_status loom_mock_dataset_create(
    int64_t sequence_length, int64_t vocab_size, uint64_t seed, int64_t samples, loom_dataset *dataset);

/* ---- Samplers ---- */

typedef struct loom_data_sampler_config {
    int64_t total_samples;     /* of the dataset */
    int64_t consumed_samples;  /* where to start, in [0, total) */
    int64_t micro_batch_size;  /* rows of a microbatch */
    int64_t global_batch_size; /* over all data-parallel ranks, a multiple of micro_batch_size * data_parallel_size; 0 =
                                  none */
    int64_t data_parallel_rank, data_parallel_size;
    bool drop_last;                        /* leave out an incomplete last round of microbatches */
    bool pad_samples_to_global_batch_size; /* else fill it up with padding rows (negative numbers) */
} loom_data_sampler_config;

/* A sampler says which samples make up the microbatches. It is a pure function of its arguments: no state to save. */
typedef struct loom_data_sampler {
    const char *name;
    void *context;
    /* Checks the configuration and gives the number of microbatches that each rank gets from consumed_samples on. */
    loom_status (*length)(void *context, const loom_data_sampler_config *config, int64_t *batches);
    /* Microbatch number `batch` in [0, batches) of config->data_parallel_rank: samples[0 … *count), *count <=
     * micro_batch_size (fewer, even 0, only at an end that is neither dropped nor padded). Negative = padding row. */
    loom_status (*batch)(
        void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count);
} loom_data_sampler;

/* In order, each round of microbatches cut into consecutive parts by rank (Megatron's "single"). */
LOOM_API const loom_data_sampler *loom_data_sampler_single(void);
/* The built-in sampler of a dataloader_type; cyclic, batch and random_batch are LOOM_ERR_UNSUPPORTED. */
LOOM_API loom_status loom_data_sampler_find(const char *name, const loom_data_sampler **sampler);

/* Number of microbatches of a step: global / (micro * dp). LOOM_ERR_CONFIG names the nearest legal global batch sizes.
 */
LOOM_API loom_status loom_data_microbatches(
    int64_t global_batch_size, int64_t micro_batch_size, int64_t data_parallel_size, int64_t *microbatches);

/* ---- Batches and loaders ---- */

/* One microbatch of one data-parallel rank. Owned by whoever created it; a loader only fills it. */
typedef struct loom_batch {
    int64_t b;               /* rows filled: rows, or fewer at an end */
    int64_t s;               /* sequence */
    int64_t rows;            /* rows allocated */
    int64_t *tokens;         /* [b, s] */
    int64_t *labels;         /* [b, s]; legal ids, also where masked */
    float *loss_mask;        /* [b, s] */
    int64_t *position_ids;   /* [b, s] */
    int32_t *document_start; /* [b, s], or NULL: no document boundaries inside a sequence */
    int64_t *sample;         /* [b] sample number in the consumed stream: the same under every layout (dropout's key) */
    int64_t *index;          /* [b] sample number in the dataset; negative = padding row */
} loom_batch;

/* An empty batch (b 0) of rows x s. */
LOOM_API loom_status loom_batch_create(int64_t rows, int64_t s, bool document_boundaries, loom_batch **batch);
LOOM_API void loom_batch_destroy(loom_batch *batch); /* NULL is accepted */

/* A source of microbatches for one rank: a struct of functions. */
typedef struct loom_data_loader {
    void *context;
    int64_t micro_batch_size; /* most rows of a batch */
    int64_t sequence_length;  /* s of every batch, at most */
    int64_t microbatches;     /* of a step; 0 = the source does not know steps */
    bool document_boundaries; /* batches need document_start */
    /* Fills `batch` (rows >= micro_batch_size, s = sequence_length) with the next microbatch. Where the model's
     * variable_seq_lengths is set it may fill fewer positions and say so in batch->s, the same on all stages and tensor
     * ranks. LOOM_END after the last: nothing is filled. */
    loom_status (*next)(void *context, loom_batch *batch);
    /* Samples handed out so far over all data-parallel ranks, those before the start included. */
    int64_t (*consumed_samples)(void *context);
    /* Microbatches left; -1 = without end or unknown. */
    int64_t (*remaining)(void *context);
    /* Goes on as if `consumed` samples had been handed out. */
    loom_status (*seek)(void *context, int64_t consumed);
    void (*destroy)(void *context); /* may be NULL */
} loom_data_loader;

typedef struct loom_data_loader_config {
    const loom_data_sampler *sampler; /* NULL = single */
    int64_t micro_batch_size, global_batch_size;
    int64_t data_parallel_rank, data_parallel_size;
    int64_t consumed_samples;
    bool drop_last;                        /* end with the last whole global batch */
    bool pad_samples_to_global_batch_size; /* with drop_last false: the last global batch is filled up */
    bool cycle;                            /* begin again at the end: an epoch is all that one pass hands out */
} loom_data_loader_config;

/* Sizes 1, rank 0 of 1, nothing consumed, drop_last, no padding, no cycle. */
LOOM_API loom_data_loader_config loom_data_loader_config_default(void);
/* dataset is borrowed until the loader is destroyed; a sampler too. */
LOOM_API loom_status loom_data_loader_create(
    const loom_dataset *dataset, const loom_data_loader_config *config, loom_data_loader *loader);
/* Calls destroy and clears the struct; NULL and a cleared struct are accepted. */
LOOM_API void loom_data_loader_destroy(loom_data_loader *loader);

#ifdef __cplusplus
}
#endif
#endif
