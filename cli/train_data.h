/* The data of a run file: what `megaloom train` reads, and in which order. */
#ifndef CLI_TRAIN_DATA_H
#define CLI_TRAIN_DATA_H

#include <megaloom/megaloom.h>

typedef struct loom_cli_train_data {
    loom_dataset train, valid, test; /* the others are cleared where nothing validates or tests */
    loom_data_step_config sizes;
} loom_cli_train_data;

/* Opens what config->data and config->validation name; tokenizer is that of the data, NULL where the kind has none;
 * data_parallel is the layout's size. */
loom_status loom_cli_train_data_open(
    const loom_run_config *config, const loom_tokenizer *tokenizer, int64_t data_parallel, loom_cli_train_data *data);
/* A cleared struct is accepted. */
void loom_cli_train_data_close(loom_cli_train_data *data);

/* The iterators over them, that of training behind the samples consumed so far; *valid is NULL where nothing validates.
 * Collective over the world. */
loom_status loom_cli_train_batches(loom_fabric *fabric, const loom_run_config *config, const loom_cli_train_data *data,
    int64_t consumed_samples, loom_batches **train, loom_batches **valid);

/* The iterator of one pass over the test data, which there are; the last batch is filled up with rows that do not
 * count. Collective over the world. */
loom_status loom_cli_test_batches(
    loom_fabric *fabric, const loom_run_config *config, const loom_cli_train_data *data, loom_batches **test);

#endif
