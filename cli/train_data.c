/* The data of a run file. Training asks its datasets for as many samples as the steps take, ramp-up included;
 * validation and test take what their shares, or their own files, have in one pass. */
#include "train_data.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The parts for files that are used whole. */
static const char *const whole[LOOM_SPLIT_COUNT] = {"1,0,0", "0,1,0", "0,0,1"};

/* The token that ends a document; -1 where the tokenizer has none, or the model no row for it. */
static int64_t end_of_document(const loom_run_config *config, const loom_tokenizer *tokenizer) {
    return tokenizer && tokenizer->eod < config->model.config.vocab_size ? tokenizer->eod : -1;
}

/* The files of a part, and whether they are its own, read whole, or those that all share. */
static int64_t files_of(const loom_data_config *data, loom_split which, const loom_data_path **path, bool *own) {
    const struct {
        const loom_data_path *path;
        int64_t count;
    } parts[LOOM_SPLIT_COUNT] = {{data->train_path, data->train_path_count}, {data->valid_path, data->valid_path_count},
        {data->test_path, data->test_path_count}};
    *own = parts[which].count > 0;
    *path = *own ? parts[which].path : data->path;
    return *own ? parts[which].count : data->path_count;
}

static loom_status open_gpt(
    const loom_run_config *config, loom_split which, int64_t samples, int64_t eod, loom_dataset *set) {
    const loom_data_config *data = &config->data;
    bool own;
    const loom_data_path *path;
    int64_t count = files_of(data, which, &path, &own);
    loom_gpt_blend_config blend = loom_gpt_blend_config_default();
    const char **prefixes = calloc((size_t)count + 1, sizeof *prefixes);
    double *weights = calloc((size_t)count + 1, sizeof *weights);
    if (!prefixes || !weights) {
        free(prefixes);
        free(weights);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld datasets", (long long)count);
    }
    for (int64_t i = 0; i < count; i++) {
        prefixes[i] = path[i].prefix;
        weights[i] = path[i].weight;
    }
    blend.prefixes = prefixes;
    blend.count = count;
    /* One dataset has all of the blend, whatever its weight; weights need a number of samples. */
    blend.weights = count > 1 && weights[0] > 0 ? weights : NULL;
    blend.gpt.sequence_length = config->model.config.seq_length;
    blend.gpt.seed = config->seed;
    blend.gpt.split = own ? whole[which] : data->split;
    blend.gpt.which = which;
    blend.gpt.samples = samples >= 0 || !blend.weights ? samples : 0;
    blend.gpt.vocab_size = config->model.config.vocab_size;
    blend.gpt.max_epochs = data->max_epochs;
    blend.gpt.reset_position_ids = data->reset_position_ids;
    blend.gpt.reset_attention_mask = data->reset_attention_mask;
    blend.gpt.eod_mask_loss = data->eod_mask_loss;
    blend.gpt.eod = eod;
    blend.gpt.index_mapping_dir = data->index_mapping_dir;
    loom_status status = loom_gpt_blend_create(&blend, set);
    free(prefixes);
    free(weights);
    return status;
}

static loom_status open_finetune(
    const loom_run_config *config, const loom_data_path *path, int64_t count, loom_dataset *set) {
    loom_finetune_dataset_config wanted = loom_finetune_dataset_config_default();
    loom_tokenizer *tokenizer = NULL;
    const char *name = config->data.tokenizer;
    const char **paths = calloc((size_t)count + 1, sizeof *paths);
    loom_status status = paths ? loom_tokenizer_open(name ? name : "byte", &tokenizer)
                               : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld files", (long long)count);
    for (int64_t i = 0; !status && i < count; i++)
        paths[i] = path[i].prefix;
    wanted.paths = paths;
    wanted.count = count;
    wanted.tokenizer = tokenizer;
    wanted.sequence_length = config->model.config.seq_length;
    wanted.pack = config->data.pack_sequences;
    wanted.vocab_size = config->model.config.vocab_size;
    if (!status)
        status = loom_finetune_dataset_create(&wanted, set);
    loom_tokenizer_destroy(tokenizer);
    free(paths);
    return status;
}

/* Of a blend with weights as many samples as validation.batches take; else one pass over the share. */
static int64_t evaluation_samples(const loom_run_config *config, loom_split which, int64_t global_batch_size) {
    bool own;
    const loom_data_path *path;
    int64_t count = files_of(&config->data, which, &path, &own), samples;
    if (count < 2 || path[0].weight <= 0 ||
        __builtin_mul_overflow(config->validation.batches, global_batch_size, &samples))
        return -1;
    return samples;
}

/* Validation or test. */
static loom_status open_evaluation(
    const loom_run_config *config, loom_split which, int64_t eod, int64_t global_batch_size, loom_dataset *set) {
    const char *kind = config->data.kind;
    int64_t samples;
    bool own;
    const loom_data_path *path;
    int64_t count = files_of(&config->data, which, &path, &own);
    if (strcmp(kind, "mock") == 0) {
        if (__builtin_mul_overflow(config->validation.batches, global_batch_size, &samples))
            return loom_fail(LOOM_ERR_CONFIG, "validation.batches is %lld, too many batches of %lld samples",
                (long long)config->validation.batches, (long long)global_batch_size);
        return loom_mock_dataset_create(config->model.config.seq_length, config->model.config.vocab_size,
            (uint64_t)config->seed + which, samples, set);
    }
    if (strcmp(kind, "fixed") == 0)
        return loom_fixed_dataset_create(path[0].prefix, config->model.config.vocab_size, set, NULL);
    if (strcmp(kind, "finetune") == 0)
        return open_finetune(config, path, count, set);
    return open_gpt(config, which, evaluation_samples(config, which, global_batch_size), eod, set);
}

/* What `files` hold must fill a global batch. */
static loom_status check_samples(
    const loom_run_config *config, const char *files, const loom_dataset *set, int64_t global_batch_size) {
    if (set->length >= global_batch_size)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG, "%s has %lld %s, fewer than one global batch of %lld", files,
        (long long)set->length,
        config->data.pack_sequences ? "rows, into which data.pack_sequences put its samples" : "samples",
        (long long)global_batch_size);
}

static loom_status check_sequences(const loom_dataset *set, const loom_cli_train_data *data) {
    if (set->sequence_length == data->train.sequence_length)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG, "its sequences have %lld tokens, those of training %lld",
        (long long)set->sequence_length, (long long)data->train.sequence_length);
}

static loom_status check_validation(const loom_run_config *config, const loom_cli_train_data *data) {
    LOOM_TRY(check_sequences(&data->valid, data));
    return check_samples(config, config->data.valid_path_count > 0 ? "data.valid_path" : "its share of the documents",
        &data->valid, data->sizes.global_batch_size);
}

/* The loader begins these data again as often as the steps need. */
static loom_status check_epochs(const loom_data_config *given, int64_t samples, const loom_cli_train_data *data) {
    int64_t global = data->sizes.global_batch_size, epoch = data->train.length / global * global;
    if (given->max_epochs == 0 || epoch == 0 || (samples + epoch - 1) / epoch <= given->max_epochs)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "data.max_epochs: the steps take %lld samples, %lld epochs of %lld, expected at most %lld epochs",
        (long long)samples, (long long)((samples + epoch - 1) / epoch), (long long)epoch, (long long)given->max_epochs);
}

static loom_status open_train(const loom_run_config *config, int64_t eod, loom_cli_train_data *data) {
    const loom_data_config *given = &config->data;
    if (strcmp(given->kind, "fixed") == 0) {
        int64_t batch;
        const loom_data_path *path = given->train_path_count > 0 ? given->train_path : given->path;
        LOOM_TRY(loom_fixed_dataset_create(path[0].prefix, config->model.config.vocab_size, &data->train, &batch));
        if (!given->global_batch_size)
            data->sizes.global_batch_size = batch;
        return LOOM_OK;
    }
    int64_t samples;
    LOOM_TRY(loom_data_step_samples(&data->sizes, 0, config->steps, &samples));
    if (strcmp(given->kind, "finetune") == 0) {
        bool own = given->train_path_count > 0;
        LOOM_TRY(open_finetune(config, own ? given->train_path : given->path,
            own ? given->train_path_count : given->path_count, &data->train));
        LOOM_TRY(
            check_samples(config, own ? "data.train_path" : "data.path", &data->train, data->sizes.global_batch_size));
        return check_epochs(given, samples, data);
    }
    /* Whole batches are read: a ramp-up's steps may end inside one. */
    int64_t global = data->sizes.global_batch_size, needed = samples;
    samples = samples < INT64_MAX - global ? (samples + global - 1) / global * global : samples;
    if (strcmp(given->kind, "mock") == 0)
        return loom_mock_dataset_create(config->model.config.seq_length, config->model.config.vocab_size,
            (uint64_t)config->seed, samples, &data->train);
    LOOM_TRY(open_gpt(config, LOOM_SPLIT_TRAIN, samples, eod, &data->train));
    if (data->train.length >= needed)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "data.path: several datasets without weights give each sample once, %lld in all, but the steps take %lld: give "
        "weights, or fewer steps",
        (long long)data->train.length, (long long)needed);
}

loom_status loom_cli_train_data_open(
    const loom_run_config *config, const loom_tokenizer *tokenizer, int64_t data_parallel, loom_cli_train_data *data) {
    const loom_data_config *given = &config->data;
    int64_t eod = end_of_document(config, tokenizer), global = given->global_batch_size;
    loom_cli_train_data made = {
        .sizes = {global ? global : given->micro_batch_size * data_parallel, given->micro_batch_size, data_parallel,
            {given->rampup_batch_size[0], given->rampup_batch_size[1], given->rampup_batch_size[2]},
            given->decrease_batch_size_if_needed}};
    loom_status status = open_train(config, eod, &made);
    if (!status && config->validation.every > 0) {
        status = open_evaluation(config, LOOM_SPLIT_VALID, eod, made.sizes.global_batch_size, &made.valid);
        if (!status)
            status = check_validation(config, &made);
        if (status)
            loom_fail_context(status,
                "validation data (data.split \"%s\"; give a larger share, or set validation.every=0): ", given->split);
    }
    if (!status && config->validation.test) {
        status = open_evaluation(config, LOOM_SPLIT_TEST, eod, made.sizes.global_batch_size, &made.test);
        if (!status)
            status = check_sequences(&made.test, &made);
        if (status)
            loom_fail_context(status,
                "test data (data.split \"%s\"; give a larger share, or set validation.test=false): ", given->split);
    }
    if (status) {
        loom_cli_train_data_close(&made);
        return status;
    }
    *data = made;
    return LOOM_OK;
}

void loom_cli_train_data_close(loom_cli_train_data *data) {
    loom_dataset_destroy(&data->train);
    loom_dataset_destroy(&data->valid);
    loom_dataset_destroy(&data->test);
}

/* The same samples every time, so their order means nothing; lengths follow from whole global batches. */
static const loom_data_sampler *evaluation_sampler(const loom_data_config *data) {
    return data->pad_seq_length_to_mult ? loom_data_sampler_batch() : loom_data_sampler_single();
}

loom_status loom_cli_train_batches(loom_fabric *fabric, const loom_run_config *config, const loom_cli_train_data *data,
    int64_t consumed_samples, loom_batches **train, loom_batches **valid) {
    const loom_data_config *given = &config->data;
    loom_dataloader loader = {
        .dataset = &data->train,
        .mode = LOOM_TRAINING,
        .micro_batch_size = given->micro_batch_size,
        .global_batch_size = data->sizes.global_batch_size,
        .consumed_samples = consumed_samples,
        .cycle = strcmp(given->kind, "finetune") == 0,
        .seed = config->seed,
        .decrease_batch_size_if_needed = given->decrease_batch_size_if_needed,
        .stop_when_batch_size_changes = given->stop_when_batch_size_changes,
        .prefetch_factor = given->prefetch_factor,
        .pad_seq_length_to_mult = given->pad_seq_length_to_mult,
    };
    memcpy(loader.rampup_batch_size, given->rampup_batch_size, sizeof loader.rampup_batch_size);
    LOOM_TRY(loom_data_sampler_find(given->dataloader_type, &loader.sampler));
    LOOM_TRY(loom_fabric_setup_dataloader(fabric, &loader, train));
    *valid = NULL;
    if (!data->valid.get)
        return LOOM_OK;
    loader.sampler = evaluation_sampler(given);
    loader.dataset = &data->valid;
    loader.mode = LOOM_VALIDATION;
    loader.consumed_samples = 0;
    loader.cycle = true;
    return loom_fabric_setup_dataloader(fabric, &loader, valid);
}

loom_status loom_cli_test_batches(
    loom_fabric *fabric, const loom_run_config *config, const loom_cli_train_data *data, loom_batches **test) {
    const loom_data_config *given = &config->data;
    const loom_dataloader loader = {
        .dataset = &data->test,
        .mode = LOOM_TEST,
        .sampler = evaluation_sampler(given),
        .micro_batch_size = given->micro_batch_size,
        .global_batch_size = data->sizes.global_batch_size,
        .decrease_batch_size_if_needed = given->decrease_batch_size_if_needed,
        .prefetch_factor = given->prefetch_factor,
        .pad_seq_length_to_mult = given->pad_seq_length_to_mult,
    };
    return loom_fabric_setup_dataloader(fabric, &loader, test);
}
