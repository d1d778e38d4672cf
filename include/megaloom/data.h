/* Training data: from text to microbatches.
 *
 *   text files --loom_data_preprocess_text--> PREFIX.bin + PREFIX.idx   (Megatron's indexed dataset)
 *   loom_indexed   opens such a pair: sequences of tokens, grouped into documents
 *   loom_dataset   samples of a fixed length out of it (GPT, blends), from JSON lines (fine-tuning), replayed from a
 * file (fixed), or your own loom_data_sampler   which samples make microbatch k of a data-parallel rank
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

/* Opens "byte", or a tokenizer by the path of its file or directory: a Hugging Face tokenizer.json, of byte-level BPE
 * (GPT-2, Llama 3, Qwen) or SentencePiece's BPE (Llama 2, Mistral, Gemma); GPT-2's vocab.json with merges.txt beside it
 * (also encoder.json with vocab.bpe); tiktoken's ranks in a tokenizer.model, with Llama 3's pattern and, where there
 * are 128000 of them, its special tokens. SentencePiece's own model, by its library, in a tokenizer.model or any file
 * whose name ends in .model (LOOM_ERR_UNSUPPORTED, with what to install, where megaloom was built without that library;
 * the file is trusted as the library trusts it). Ids of a SentencePiece model are those of that library's Encode, which
 * puts nothing around a text, and eod and bos the model's own; what is unknown decodes to the model's text for it. Ids
 * of all others are those of the `tokenizers` package with special tokens, so that a template's begin of text is put
 * first. What the package would do otherwise is refused when it is opened (LOOM_ERR_UNSUPPORTED, with the place in the
 * file). A byte-level tokenizer gives decoded bytes as they are, also those that are no UTF-8; a run of SentencePiece's
 * byte tokens that is none becomes a U+FFFD for each. eod and bos are the eos_token and bos_token of
 * tokenizer_config.json or special_tokens_map.json beside the file, else a token of a known name. What a letter is in a
 * pattern is said by PCRE2's Unicode (14 with Debian 12's), so that text with letters of a later one may be cut
 * otherwise than by the package. */
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
LOOM_API int64_t loom_indexed_bin_bytes(const loom_indexed *indexed); /* of PREFIX.bin */
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

/* Writes the documents of the first set, then those of the second, and so on, as Megatron's add_index does. All are
 * opened before anything is written, and must have one dtype, and all modes or none (LOOM_ERR_ARGUMENT names the two
 * sets that differ). Replaces output_prefix as a writer does. */
LOOM_API loom_status loom_indexed_merge(const char *const *prefixes, int64_t count, const char *output_prefix);

/* ---- Text to indexed dataset ---- */

/* What a document is in a file of text. */
typedef enum loom_text_format {
    LOOM_TEXT_AUTO,     /* JSON in files that end in .jsonl, .json or .ndjson, else FILE */
    LOOM_TEXT_JSON,     /* the member `key` of the object on each line (JSON lines, UTF-8); blank lines are none */
    LOOM_TEXT_FILE,     /* the whole file */
    LOOM_TEXT_LINE,     /* each line, without its end (\n or \r\n) */
    LOOM_TEXT_SEPARATOR /* what lies between the separators, as it is */
} loom_text_format;

/* Called by the preprocessing thread after each block of documents; bytes of text done and in all. */
typedef void (*loom_data_progress)(void *context, int64_t documents, int64_t bytes_done, int64_t bytes_total);
/* Called by the preprocessing thread with why a document is skipped: file, line, fault. Of very many in one block only
 * the first are told. */
typedef void (*loom_data_skipped)(void *context, const char *message);

/* All that is zero or NULL has a meaning, so that only what matters need be set. */
typedef struct loom_data_preprocess_config {
    const char *const *inputs; /* files, patterns as in glob(7), and directories that are searched recursively; taken in
                                  the given order, files of a directory in byte order of their paths; links are
                                  followed, hidden files skipped */
    int64_t input_count;
    const char *suffix; /* of the files taken out of directories (".pod"); NULL = all */
    loom_text_format format;
    const char *separator;           /* of LOOM_TEXT_SEPARATOR: 1 to 4096 bytes */
    const char *const *json_keys;    /* members to take; several give a dataset each, whose documents
                                     correspond, and make AUTO mean JSON */
    int64_t json_key_count;          /* 0 = one, "text" */
    const loom_tokenizer *tokenizer; /* NULL = byte */
    bool append_eod;                 /* the tokenizer's end of document behind each document */
    bool strict;                     /* a document that is wrong is an error, else it is skipped and counted */
    int64_t workers;                 /* threads that encode; 0 = one for each core that this thread may use */
    const char *output_prefix;   /* PREFIX.bin, PREFIX.idx; of several keys PREFIX_KEY_document, as Megatron has it */
    loom_data_progress progress; /* may be NULL */
    loom_data_skipped skipped;   /* may be NULL */
    void *progress_context;      /* of both */
} loom_data_preprocess_config;

typedef struct loom_data_preprocess_result {
    int64_t documents;       /* written to each dataset */
    int64_t empty;           /* plain texts without a token: skipped */
    int64_t invalid;         /* skipped: no JSON, no such member, not UTF-8 and the tokenizer wants it, too long */
    int64_t tokens;          /* ends of documents included; of all datasets */
    int64_t bytes;           /* of text read: lines and objects, not only what became tokens */
    int64_t resumed_bytes;   /* of them, by an earlier run that was stopped */
    loom_dtype dtype;        /* of the .bin */
    int64_t discarded_bytes; /* that an earlier run had done and this one began anew, since tokenizer, options or input
                                files are others */
} loom_data_preprocess_result;

/* Each document becomes one sequence: its tokens and, with append_eod, the end of document. An empty text in JSON lines
 * becomes a document of its end alone, or of no sequence. The same input gives the same bytes, for any number of
 * workers. Memory is bounded by some blocks of text for each worker and the longest document; a line of JSON has at
 * most 64 MiB, a longer one is wrong.
 *
 * A run that was stopped (killed, out of disk) leaves temporary files and PREFIX.preprocess, which says how far it was;
 * the same call goes on there, and gives the bytes of a run that was never stopped. Where configuration or input files
 * (paths, sizes, times) have changed it begins anew. At no moment does a pair under the names of the output exist that
 * is not whole. A second run on the same prefix is refused while the first lives (LOOM_ERR_IO).
 *
 * LOOM_ERR_ARGUMENT before any input is read: append_eod with a tokenizer that has no end of document, or a value
 * outside of what is said above. No document at all is LOOM_ERR_NOT_FOUND. */
LOOM_API loom_status loom_data_preprocess_text(
    const loom_data_preprocess_config *config, loom_data_preprocess_result *result);

/* ---- Text to tokenizer ---- */

/* How text is cut into words, inside of which tokens lie. */
typedef enum loom_tokenizer_pattern { LOOM_PATTERN_GPT2, LOOM_PATTERN_LLAMA3 } loom_tokenizer_pattern;

/* All that is zero or NULL has a meaning, but for inputs, vocab_size and output. */
typedef struct loom_tokenizer_train_config {
    const char *const
        *inputs; /* this and the next six as for preprocessing; of several keys all texts are learned from */
    int64_t input_count;
    const char *suffix;
    loom_text_format format;
    const char *separator;
    const char *const *json_keys;
    int64_t json_key_count;
    int64_t vocab_size; /* special tokens, 256 bytes, and as many joins as this leaves room for; at most 2^24 */
    const char *const *special_tokens; /* ids from 0 on */
    int64_t special_token_count;       /* 0 = one, "<|endoftext|>", which ends a document */
    loom_tokenizer_pattern pattern;
    const char *output;          /* path of the tokenizer.json to write */
    loom_data_progress progress; /* of reading; may be NULL */
    loom_data_skipped skipped;   /* may be NULL */
    void *progress_context;      /* of both */
} loom_tokenizer_train_config;

typedef struct loom_tokenizer_train_result {
    int64_t vocab_size;                /* of the file: fewer than asked where the text has no more pairs to join */
    int64_t documents, invalid, bytes; /* read, skipped, of text read */
    int64_t words;                     /* different ones */
} loom_tokenizer_train_result;

/* Learns a byte-level BPE tokenizer: the most frequent pair of neighbours inside words becomes a token, again and
 * again; of equally frequent ones the pair of lower ids first. The file is Hugging Face's tokenizer.json, which appears
 * whole or not at all. Words of more than 1024 bytes teach nothing. Memory grows with the number of different words. */
LOOM_API loom_status loom_tokenizer_train(
    const loom_tokenizer_train_config *config, loom_tokenizer_train_result *result);

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
    /* Positions of sample `index` in [0, length) before its padding, in [1, s]. NULL: all samples fill s. */
    int64_t (*positions)(void *context, int64_t index);
    /* Where the sample lies, for messages: "corpus.bin, byte 4096". May be NULL; text is cut off at `bytes`. */
    void (*locate)(void *context, int64_t index, char *text, size_t bytes);
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
    int64_t samples;    /* at least so many, by as many epochs as it takes; -1 = one epoch, whatever it gives */
    int64_t max_epochs; /* more than these are refused; 0 = no limit */
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
    /* A folder in which the indices are kept under a name made of all they depend on: whoever finds them there reads
     * them (ranks of a node share the memory), the first to miss them builds them. Made where it is missing. NULL =
     * built in memory. */
    const char *index_mapping_dir;
} loom_gpt_dataset_config;

/* s 0 (must be set), seed 1234, split "969,30,1", train, one epoch, extra token, drop the partial, no resets, no eod,
 * pad -1. */
LOOM_API loom_gpt_dataset_config loom_gpt_dataset_config_default(void);
/* indexed is borrowed until the dataset is destroyed. LOOM_ERR_NOT_FOUND: the split has no share; LOOM_ERR_CONFIG:
 * samples are asked of a share without documents or tokens, more epochs than max_epochs are needed, or a value is not
 * legal; LOOM_ERR_IO: index_mapping_dir cannot be written. */
LOOM_API loom_status loom_gpt_dataset_create(
    const loom_indexed *indexed, const loom_gpt_dataset_config *config, loom_dataset *dataset);

/* The orders that a GPT dataset reads in; borrowed from it. */
typedef struct loom_gpt_dataset_order {
    int64_t first, end;             /* the split's sequences [first, end) */
    int64_t epochs, documents;      /* documents: epochs * (end - first) */
    const uint32_t *document_index; /* [documents] sequences in reading order */
    int64_t samples;
    const int64_t *sample_index;  /* [samples + 1, 2] place in document_index and token where a sample begins */
    const int64_t *shuffle_index; /* [samples] sample asked -> sample in reading order */
} loom_gpt_dataset_order;
/* Of a dataset made by loom_gpt_dataset_create, or by loom_gpt_blend_create of one part; LOOM_ERR_ARGUMENT for others.
 */
LOOM_API loom_status loom_gpt_dataset_get_order(const loom_dataset *dataset, loom_gpt_dataset_order *order);

/* ---- Blends: samples of several datasets in given shares ---- */

/* Sample i of the blend is sample[i] of dataset[i], i in [0, size), chosen so that after every sample each dataset is
 * as near its share as can be. weights[0, count) are shares whose sum is 1; count at most 32767. Equals
 * Megatron-Core's. */
LOOM_API loom_status loom_data_blend_by_weight(
    const double *weights, int64_t count, int64_t size, int16_t *dataset, int64_t *sample);
/* The same with shares by size, until each dataset has given each of its samples once: i in [0, sum of sizes). */
LOOM_API loom_status loom_data_blend_by_size(const int64_t *sizes, int64_t count, int16_t *dataset, int64_t *sample);
/* Samples to ask of a dataset with this share of a blend of `size`, rounded up, a part of `surplus` more and again
 * rounded up. */
LOOM_API int64_t loom_data_blend_share(double weight, int64_t size, double surplus);
/* weights[i] / their sum, as numpy computes it, in place. */
LOOM_API void loom_data_blend_normalize(double *weights, int64_t count);
/* A list as Megatron's --data-path takes it, ["0.7", "books", "0.3", "web"], or prefixes alone: prefixes[0, *count) and
 * weights[0, *count), both of room for `length`, *weighted whether there are weights. LOOM_ERR_CONFIG: an empty list,
 * or a weight that is not above 0 and finite. */
LOOM_API loom_status loom_data_blend_from_list(
    const char *const *list, int64_t length, double *weights, const char **prefixes, int64_t *count, bool *weighted);

/* datasets[0, count), all of one sequence length, become parts of the blend, which destroys them; after an error they
 * are still the caller's. weights NULL: shares by size, and size -1 takes every sample once; else size is the blend's
 * length and weights are relative. LOOM_ERR_CONFIG: a weight that is not above 0, a dataset with fewer samples than its
 * share, with both counts, or without weights one that has none. */
LOOM_API loom_status loom_blended_dataset_create(
    const loom_dataset *datasets, const double *weights, int64_t count, int64_t size, loom_dataset *dataset);

/* A blend of GPT datasets, opened from their files: Megatron-Core's BlendedMegatronDatasetBuilder for one split. */
typedef struct loom_gpt_blend_config {
    const char *const *prefixes; /* [count] */
    const double *weights;       /* [count] relative; NULL = by size, and one epoch of each */
    int64_t count;
    /* Of each part; `samples` are those of the blend: at least so many with weights (shares are rounded up), at most
     * with NULL, where -1 takes all. */
    loom_gpt_dataset_config gpt;
    double surplus; /* of samples that each part gets beyond its share, against the rounding of shares */
} loom_gpt_blend_config;
/* No parts, the GPT dataset's defaults, surplus 0.005. */
LOOM_API loom_gpt_blend_config loom_gpt_blend_config_default(void);
/* The dataset keeps the files open. Errors are those of loom_indexed_open, loom_gpt_dataset_create and
 * loom_blended_dataset_create; weights without a number of samples are LOOM_ERR_CONFIG. */
LOOM_API loom_status loom_gpt_blend_create(const loom_gpt_blend_config *config, loom_dataset *dataset);

/* Replays tensor `tokens` [steps, batch, s+1] (any integer dtype) of a safetensors file: sample i is row i mod batch of
 * step i / batch. Every position counts. *batch (may be NULL) gets the size that global batches must have to replay the
 * steps. vocab_size as above; token ids are checked when read. */
LOOM_API loom_status loom_fixed_dataset_create(
    const char *path, int64_t vocab_size, loom_dataset *dataset, int64_t *batch);

/* Fine-tuning from JSON lines, one sample each: {"input": "…", "output": "…"}, or {"messages": [{"role": "…",
 * "content": "…"}, …]}, where the role assistant answers. Texts are taken one after another as they are; each answer is
 * followed by the end of document; only answers and those ends count in the loss. Lines of blanks are skipped, other
 * keys too; a line has at most 64 MiB. */
typedef struct loom_finetune_dataset_config {
    const char *const *paths; /* [count] */
    int64_t count;
    const loom_tokenizer *tokenizer; /* used by the creation alone; it must have an end of document */
    int64_t sequence_length;         /* s; a longer sample is refused with file and line */
    bool pack; /* samples that follow one another share a row while they fit; positions and attention begin anew */
    int64_t vocab_size; /* > 0: a tokenizer with more tokens is refused; 0 = unchecked */
} loom_finetune_dataset_config;
/* Nothing set. */
LOOM_API loom_finetune_dataset_config loom_finetune_dataset_config_default(void);
/* All tokens are kept in memory, 5 bytes each. LOOM_ERR_FORMAT: a line that is no such sample (file, line, what is
 * expected); LOOM_ERR_NOT_FOUND: no sample at all. */
LOOM_API loom_status loom_finetune_dataset_create(const loom_finetune_dataset_config *config, loom_dataset *dataset);

/* A deterministic synthetic stream without files: `samples` walks over the vocabulary, a function of (seed, sample). */
LOOM_API loom_status loom_mock_dataset_create(
    int64_t sequence_length, int64_t vocab_size, uint64_t seed, int64_t samples, loom_dataset *dataset);

/* ---- Samplers ---- */

typedef struct loom_data_sampler_config {
    int64_t total_samples; /* of the dataset */
    /* Where to start. single: in [0, total); the others count on, epoch after epoch. */
    int64_t consumed_samples;
    int64_t micro_batch_size;  /* rows of a microbatch */
    int64_t global_batch_size; /* over all data-parallel ranks, a multiple of micro_batch_size * data_parallel_size; 0 =
                                  none */
    int64_t data_parallel_rank, data_parallel_size;
    bool drop_last;                        /* leave out an incomplete last round of microbatches, or global batch */
    bool pad_samples_to_global_batch_size; /* else fill it up with padding rows (negative numbers) */
    int64_t seed;         /* of the shuffled ones: epoch e is ordered by the 32 lowest bits of seed + e */
    const int64_t *order; /* what the sampler's function `order` gave for this; NULL: batch makes it anew each time */
} loom_data_sampler_config;

/* A sampler says which samples make up the batches. It is a pure function of its arguments: no state to save. */
typedef struct loom_data_sampler {
    const char *name;
    void *context;
    bool global_batches; /* a batch is a rank's part of a global batch, which a step cuts into microbatches */
    /* Checks the configuration and gives the number of batches that each rank gets from consumed_samples to the end of
     * the epoch. */
    loom_status (*length)(void *context, const loom_data_sampler_config *config, int64_t *batches);
    /* Batch number `batch` in [0, batches) of config->data_parallel_rank: samples[0 … *count), *count at most
     * micro_batch_size, or with global_batches global_batch_size / data_parallel_size (fewer, even 0, only at an end
     * that is neither dropped nor padded). Negative = padding row. */
    loom_status (*batch)(
        void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count);
    /* For a shuffled one: the order of the epoch that config->consumed_samples lies in, the same on all ranks; free it
     * with free. NULL: there is none. */
    loom_status (*order)(void *context, const loom_data_sampler_config *config, int64_t **order);
} loom_data_sampler;

/* In order, each round of microbatches cut into consecutive parts by rank (NeMo's "single"). */
LOOM_API const loom_data_sampler *loom_data_sampler_single(void);
/* Each rank has its own part of the dataset and reads it in an order of its own in each epoch (NeMo's "cyclic"). */
LOOM_API const loom_data_sampler *loom_data_sampler_cyclic(void);
/* In order, a global batch at a time, dealt out to the ranks one by one (NeMo's "batch"). */
LOOM_API const loom_data_sampler *loom_data_sampler_batch(void);
/* As cyclic, a global batch at a time (NeMo's "random_batch"). */
LOOM_API const loom_data_sampler *loom_data_sampler_random_batch(void);
/* The built-in sampler of a dataloader_type; any other name is LOOM_ERR_CONFIG naming them. */
LOOM_API loom_status loom_data_sampler_find(const char *name, const loom_data_sampler **sampler);

/* ---- Sizes of steps ---- */

/* Number of microbatches of a step: global / (micro * dp). LOOM_ERR_CONFIG names the nearest legal global batch sizes.
 */
LOOM_API loom_status loom_data_microbatches(
    int64_t global_batch_size, int64_t micro_batch_size, int64_t data_parallel_size, int64_t *microbatches);

/* Megatron-Core's microbatch calculator. With rampup_batch_size {start, increment, samples} the global batch grows from
 * start by increments to global_batch_size, in equal parts of the first `samples` samples; all 0 = no ramp-up. */
typedef struct loom_data_step_config {
    int64_t global_batch_size, micro_batch_size, data_parallel_size;
    int64_t rampup_batch_size[3];
    bool decrease_batch_size_if_needed; /* a size that does not divide is rounded down, else it is refused */
} loom_data_step_config;

typedef struct loom_data_step {
    int64_t global_batch_size;         /* as ramp-up wants it */
    int64_t running_global_batch_size; /* what a step takes: a multiple of micro_batch_size * data_parallel_size */
    int64_t microbatches;              /* of each rank */
    int64_t
        sequence_length; /* of all its microbatches, where a loader tells; 0 = not told, as by the functions below */
} loom_data_step;

/* The step that begins after `consumed` samples. LOOM_ERR_CONFIG: a configuration that is none, or a size that does not
 * divide or gives no microbatch, with the nearest legal sizes. */
LOOM_API loom_status loom_data_step_at(const loom_data_step_config *config, int64_t consumed, loom_data_step *step);
/* Checks the sizes of all steps of the ramp-up, so that none is refused in the middle of a run; the first that is, with
 * the samples after which it comes. */
LOOM_API loom_status loom_data_step_check(const loom_data_step_config *config);
/* Samples that `steps` steps take from `consumed` on. LOOM_ERR_CONFIG where they are more than 2^63. */
LOOM_API loom_status loom_data_step_samples(
    const loom_data_step_config *config, int64_t consumed, int64_t steps, int64_t *samples);

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
    /* With the strategy's output_data_idx: the number of the microbatch in its loader, and the loader's; else -1. */
    int64_t batch_index, loader_index;
} loom_batch;

/* An empty batch (b 0) of rows x s. */
LOOM_API loom_status loom_batch_create(int64_t rows, int64_t s, bool document_boundaries, loom_batch **batch);
LOOM_API void loom_batch_destroy(loom_batch *batch); /* NULL is accepted */

/* A source of microbatches for one rank: a struct of functions. */
typedef struct loom_data_loader {
    void *context;
    int64_t micro_batch_size; /* most rows of a batch */
    int64_t sequence_length;  /* s of every batch, at most */
    int64_t microbatches;     /* of a step, after any ramp-up; 0 = the source does not know steps */
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
    /* The sizes of the step that the next microbatch begins; NULL: each has `microbatches`. */
    loom_status (*step)(void *context, loom_data_step *step);
    /* What is being read, for messages: "sample 7, corpus.bin, byte 4096"; cut off at `bytes`. May be NULL. Unlike the
     * others it may be called by another thread while `next` runs. */
    void (*locate)(void *context, char *text, size_t bytes);
} loom_data_loader;

typedef struct loom_data_loader_config {
    const loom_data_sampler *sampler; /* NULL = single */
    int64_t micro_batch_size, global_batch_size;
    int64_t data_parallel_rank, data_parallel_size;
    int64_t consumed_samples;
    bool drop_last;                        /* end with the last whole global batch */
    bool pad_samples_to_global_batch_size; /* with drop_last false: the last global batch is filled up */
    bool cycle;                            /* begin again at the end: an epoch is all that one pass hands out */
    int64_t seed;                          /* of a shuffled sampler */
    int64_t rampup_batch_size[3];          /* as in loom_data_step_config; needs drop_last */
    bool decrease_batch_size_if_needed;
    /* 0: all steps have the dataset's sequence length. Else, with a sampler of global batches and a dataset that tells
     * `positions`, a step is as long as the longest sample of its global batch on all data-parallel ranks, rounded up
     * to a multiple of this, and never longer than the dataset's. */
    int64_t pad_seq_length_to_mult;
} loom_data_loader_config;

/* Sizes 1, rank 0 of 1, nothing consumed, drop_last, no padding, no cycle, seed 0, no ramp-up, steps of one length. */
LOOM_API loom_data_loader_config loom_data_loader_config_default(void);
/* dataset is borrowed until the loader is destroyed; a sampler too. Where a step begins, `consumed` samples are all
 * that decides what comes: a loader made there, or sent there by seek, goes on as one that was never stopped. An epoch
 * has the whole global batches (of the size after any ramp-up) of the dataset; the step of a ramp-up that does not fit
 * into what is left of one goes on with the next, or, without cycle, is not begun. */
LOOM_API loom_status loom_data_loader_create(
    const loom_dataset *dataset, const loom_data_loader_config *config, loom_data_loader *loader);
typedef struct loom_data_prefetch_config {
    int64_t depth;  /* microbatches read ahead, at least 1 */
    double timeout; /* seconds that `next`, `seek` and `destroy` wait for the reader; 0 = for ever */
    int64_t rank;   /* named in messages; -1 = not */
} loom_data_prefetch_config;
/* A loader whose microbatches are read by a thread of its own, `depth` of them ahead, in the same order and with the
 * same consumed samples as without. On success it owns `inner`, whose functions are called by that thread. An error of
 * inner comes out of the `next` that would have got the microbatch. LOOM_ERR_TIMEOUT: the reader gave nothing within
 * the timeout; the message says what it is reading. */
LOOM_API loom_status loom_data_loader_prefetch(
    const loom_data_loader *inner, const loom_data_prefetch_config *config, loom_data_loader *loader);
/* Calls destroy and clears the struct; NULL and a cleared struct are accepted. */
LOOM_API void loom_data_loader_destroy(loom_data_loader *loader);

#ifdef __cplusplus
}
#endif
#endif
