/* What the reader of fine-tuning data and its fuzzer share beyond <megaloom/data.h>. */
#ifndef DATA_FINETUNE_H
#define DATA_FINETUNE_H

#include <megaloom/data.h>

/* As loom_finetune_dataset_create, from one text in memory in place of config->paths; `name` is for messages. */
loom_status loom__finetune_open_memory(const loom_finetune_dataset_config *config, const char *name, const void *text,
    size_t bytes, loom_dataset *dataset);

#endif
