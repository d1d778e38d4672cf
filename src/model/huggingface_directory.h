/* The directory that an export makes: filled under a temporary name, then put in place. */
#ifndef MODEL_HUGGINGFACE_DIRECTORY_H
#define MODEL_HUGGINGFACE_DIRECTORY_H

#include <megaloom/types.h>

/* What an export writes into the metadata of its weight files, as value of "producer": only a directory that has it,
 * and nothing but files of an export, is ever replaced. */
#define LOOM__HF_PRODUCER "megaloom"

/* LOOM_OK when an export may put its result at `path`: nothing is there, or an empty directory, or one of ours; and
 * nobody has anything at "PATH.tmp" (but an export that was stopped) or, where there is something to replace, at
 * "PATH.old". Otherwise LOOM_ERR_ARGUMENT says what is there. */
loom_status loom__hf_directory_check(const char *path);

/* Checks, and makes the directory "PATH.tmp", marked as unfinished; its name is the caller's: free. *lock is a
 * descriptor that keeps other exports away until the caller closes it, after commit or discard. */
loom_status loom__hf_directory_begin(const char *path, char **temporary, int *lock);
/* Puts it in the place of `path`; what was there is gone afterwards. Where that fails "PATH.tmp" stays, finished, and
 * the error says so. */
loom_status loom__hf_directory_commit(const char *path);
/* Removes what was begun and is not finished; NULL is accepted. */
void loom__hf_directory_discard(const char *temporary);

/* A whole small file. */
loom_status loom__hf_directory_write(const char *directory, const char *name, const char *text);
/* Copies the files that belong to a model beside its weights and config.json (tokenizer, generation_config.json), those
 * that `source` has. */
loom_status loom__hf_directory_copy_companions(const char *source, const char *directory);
/* Copies the tokenizer.json at `path`, or in the directory there, and the files beside it that name its special tokens.
 */
loom_status loom__hf_directory_copy_tokenizer(const char *path, const char *directory);

#endif
