/* The files of text that somebody names: paths, patterns and folders become one list in a fixed order. */
#ifndef DATA_TEXT_FILES_H
#define DATA_TEXT_FILES_H

#include <megaloom/data.h>

typedef struct loom__text_file {
    char *path;
    int64_t bytes;
    int64_t changed;         /* when, in nanoseconds of the file system's clock */
    uint64_t device, number; /* which file it is, under whatever path */
} loom__text_file;

typedef struct loom__text_files {
    loom__text_file *files;
    int64_t count, capacity;
    int64_t bytes; /* of all files */
} loom__text_files;

/* Appends the files of `input`: itself, those that match it as a pattern of glob(7), or those below it, in byte order
 * of their paths; of a folder only those that end in `suffix` (NULL = all). LOOM_ERR_NOT_FOUND where there is none. */
loom_status loom__text_files_add(const char *input, const char *suffix, loom__text_files *files);
/* LOOM_ERR_UNSUPPORTED where a name says that the file is compressed: read as text it would be noise. */
loom_status loom__text_files_check(const loom__text_files *files);
/* Takes the file at `path` off the list, where it is there under that or another path. */
void loom__text_files_drop(const char *path, loom__text_files *files);
void loom__text_files_free(loom__text_files *files); /* a cleared struct is accepted */

#endif
