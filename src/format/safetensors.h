/* What the readers and the fuzzer share beyond <megaloom/safetensors.h>. */
#ifndef FORMAT_SAFETENSORS_H
#define FORMAT_SAFETENSORS_H

#include <megaloom/safetensors.h>

/* The reference implementation's bound on the header. */
enum { LOOM__SAFETENSORS_HEADER_MAX = 100000000 };

/* Opens a file that lies in memory, which is borrowed until the close; `path` is for messages. */
loom_status loom__safetensors_open_memory(const char *path, const void *data, size_t bytes, loom_safetensors **file);
/* Opens the set that an index in memory describes; its shards are files in the folder of `path`. */
loom_status loom__safetensors_open_index(const char *path, const void *text, size_t bytes, loom_safetensors **file);

#endif
