/* The folder context/ of a checkpoint: what one must know to build the model and the strategy again, as the text of a
 * run file. */
#ifndef CHECKPOINT_CONTEXT_H
#define CHECKPOINT_CONTEXT_H

#include <megaloom/status.h>
#include <stddef.h>

#define LOOM__CONTEXT_FOLDER "context"
#define LOOM__CONTEXT_FILE "run.yaml"

/* Writes context/run.yaml into the unfinished checkpoint path.tmp, flushed to the disk: between loom__checkpoint_begin
 * and loom__checkpoint_commit. LOOM_ERR_IO, LOOM_ERR_MEMORY. */
loom_status loom__checkpoint_write_context(const char *path, const char *text, size_t length);

/* The same with the files of another checkpoint's context, `context`, as far as a context of ours has them. */
loom_status loom__checkpoint_copy_context(const char *path, const char *context);

/* LOOM_ERR_STATE names a file in folder/context/ that loom__checkpoint_write_context does not make. */
loom_status loom__context_check(const char *folder);
/* Removes folder/context; one that is not there is LOOM_OK. */
loom_status loom__context_remove(const char *folder);

#endif
