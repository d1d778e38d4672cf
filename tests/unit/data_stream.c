/* The consumed stream: wherever a run stops, the one that goes on reads what it would have read, for every sampler,
 * through ramp-up, over the ends of epochs and of the data, with a reader ahead and without. */
#include <megaloom/data.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 4096 };

static loom_status count_get(void *context, int64_t index, const loom_sample_row *row) {
    (void)context;
    row->tokens[0] = row->labels[0] = index < 0 ? 0 : index;
    row->loss_mask[0] = 1.0f;
    row->position_ids[0] = 0;
    return LOOM_OK;
}

static loom_dataset counting(int64_t length) {
    return (loom_dataset){.length = length, .sequence_length = 1, .get = count_get};
}

/* What a rank reads: dataset numbers, stream numbers, and the microbatches of each step. */
typedef struct stream {
    int64_t index[MOST], sample[MOST], count;
    int64_t size[MOST], begin[MOST], row[MOST], steps; /* of each step: microbatches, consumed before, first row */
} stream;

static loom_data_loader open_loader(const loom_dataset *dataset, const loom_data_loader_config *config, bool ahead) {
    loom_data_loader loader, wrapped;
    if (loom_data_loader_create(dataset, config, &loader) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    if (!ahead)
        return loader;
    const loom_data_prefetch_config prefetch = {3, 60, -1};
    assert_int_equal(loom_data_loader_prefetch(&loader, &prefetch, &wrapped), LOOM_OK);
    return wrapped;
}

/* Steps from where the loader is until the end or `steps` of them. */
static void read_steps(loom_data_loader *loader, int64_t steps, stream *into) {
    loom_batch *batch;
    assert_int_equal(loom_batch_create(loader->micro_batch_size, 1, false, &batch), LOOM_OK);
    memset(into, 0, sizeof *into);
    while (into->steps < steps) {
        loom_data_step step;
        assert_int_equal(loader->step(loader->context, &step), LOOM_OK);
        int64_t begin = loader->consumed_samples(loader->context), rows = into->count;
        loom_status status = LOOM_OK;
        for (int64_t m = 0; m < step.microbatches && !status; m++) {
            status = loader->next(loader->context, batch);
            assert_true(status == LOOM_OK || (status == LOOM_END && m == 0)); /* never in the middle of a step */
            for (int64_t row = 0; !status && row < batch->b; row++) {
                into->index[into->count] = batch->index[row];
                into->sample[into->count++] = batch->sample[row];
            }
        }
        if (status)
            break;
        assert_int_equal(loader->consumed_samples(loader->context), begin + step.running_global_batch_size);
        into->size[into->steps] = step.microbatches;
        into->begin[into->steps] = begin;
        into->row[into->steps++] = rows;
    }
    loom_batch_destroy(batch);
}

/* `part`, begun at step `from` of `whole`, is the rest of it. */
static void assert_rest(const stream *whole, int64_t from, const stream *part) {
    int64_t rows = whole->row[from];
    assert_int_equal(part->steps, whole->steps - from);
    assert_int_equal(part->count, whole->count - rows);
    assert_memory_equal(part->index, whole->index + rows, (size_t)part->count * sizeof *part->index);
    assert_memory_equal(part->sample, whole->sample + rows, (size_t)part->count * sizeof *part->sample);
    assert_memory_equal(part->size, whole->size + from, (size_t)part->steps * sizeof *part->size);
}

/* The step that begins at or first behind `consumed`. */
static int64_t step_at(const stream *whole, int64_t consumed) {
    int64_t found = 0;
    while (found + 1 < whole->steps && whole->begin[found] < consumed)
        found++;
    return found;
}

static void check_resumed(
    const loom_dataset *dataset, loom_data_loader_config config, const int64_t *stops, int64_t count, bool ahead) {
    static stream whole, part;
    config.consumed_samples = 0;
    loom_data_loader loader = open_loader(dataset, &config, false);
    read_steps(&loader, 40, &whole);
    loom_data_loader_destroy(&loader);
    assert_true(whole.steps > 3);
    loom_data_loader seeking = open_loader(dataset, &config, ahead);
    for (int64_t i = 0; i < count; i++) {
        int64_t from = step_at(&whole, stops[i]);
        config.consumed_samples = whole.begin[from];
        loader = open_loader(dataset, &config, ahead);
        read_steps(&loader, whole.steps - from, &part);
        assert_rest(&whole, from, &part);
        loom_data_loader_destroy(&loader);
        /* A loader that has been elsewhere and is sent there goes on alike. */
        assert_int_equal(seeking.seek(seeking.context, whole.begin[from]), LOOM_OK);
        read_steps(&seeking, whole.steps - from, &part);
        assert_rest(&whole, from, &part);
    }
    loom_data_loader_destroy(&seeking);
}

static const char *const kinds[] = {"single", "cyclic", "batch", "random_batch"};
enum { KINDS = 4 };

static loom_data_loader_config config_of(const char *kind, int64_t micro, int64_t global, int64_t rank, int64_t ranks) {
    loom_data_loader_config config = loom_data_loader_config_default();
    assert_int_equal(loom_data_sampler_find(kind, &config.sampler), LOOM_OK);
    config.micro_batch_size = micro;
    config.global_batch_size = global;
    config.data_parallel_rank = rank;
    config.data_parallel_size = ranks;
    config.seed = 1234;
    return config;
}

static void a_resumed_run_reads_what_the_uninterrupted_one_reads(void **state) {
    (void)state;
    loom_dataset dataset = counting(130); /* an epoch of 120 in global batches of 24, and a tail */
    for (int64_t ranks = 1; ranks <= 3; ranks++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int64_t rank = 0; rank < ranks; rank++)
                for (int ramp = 0; ramp < 2; ramp++) {
                    loom_data_loader_config config = config_of(kinds[kind], 2, 24, rank, ranks);
                    config.cycle = true;
                    if (ramp)
                        memcpy(config.rampup_batch_size, (int64_t[]){12, 12, 60}, sizeof config.rampup_batch_size);
                    /* in ramp-up, inside an epoch, at its edge, in the second, long after the data's end */
                    static const int64_t stops[] = {12, 48, 72, 120, 168, 600};
                    check_resumed(&dataset, config, stops, 6, false);
                    check_resumed(&dataset, config, stops, 6, true);
                    config.cycle = false; /* the last of them is the end of the data */
                    check_resumed(&dataset, config, stops, 6, false);
                }
}

static void after_the_end_of_the_data_comes_nothing(void **state) {
    (void)state;
    loom_dataset dataset = counting(130);
    for (int kind = 0; kind < KINDS; kind++)
        for (int ahead = 0; ahead < 2; ahead++) {
            static stream none;
            loom_data_loader_config config = config_of(kinds[kind], 2, 24, 0, 1);
            config.consumed_samples = 120;
            loom_data_loader loader = open_loader(&dataset, &config, ahead != 0);
            assert_int_equal(loader.remaining(loader.context), 0);
            read_steps(&loader, 4, &none);
            assert_int_equal(none.steps, 0);
            read_steps(&loader, 4, &none); /* and asking again changes nothing */
            assert_int_equal(none.steps, 0);
            assert_int_equal(loader.seek(loader.context, 96), LOOM_OK);
            read_steps(&loader, 4, &none);
            assert_int_equal(none.steps, 1);
            loom_data_loader_destroy(&loader);
        }
}

/* Each epoch hands out 120 of the 130 samples once, whichever rank reads them. */
static void an_epoch_reads_no_sample_twice(void **state) {
    (void)state;
    loom_dataset dataset = counting(130);
    for (int64_t ranks = 1; ranks <= 3; ranks++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int64_t epoch = 0; epoch < 3; epoch++) {
                static stream read;
                int seen[130] = {0};
                int64_t numbers[120] = {0}, rows = 0;
                for (int64_t rank = 0; rank < ranks; rank++) {
                    loom_data_loader_config config = config_of(kinds[kind], 2, 24, rank, ranks);
                    config.cycle = true;
                    config.consumed_samples = epoch * 120;
                    loom_data_loader loader = open_loader(&dataset, &config, false);
                    read_steps(&loader, 5, &read);
                    rows += read.count;
                    for (int64_t i = 0; i < read.count; i++) {
                        seen[read.index[i]]++;
                        numbers[read.sample[i] - epoch * 120]++;
                    }
                    loom_data_loader_destroy(&loader);
                }
                assert_int_equal(rows, 120);
                for (int64_t i = 0; i < 130; i++)
                    assert_true(seen[i] <= 1);
                for (int64_t i = 0; i < 120; i++)
                    assert_int_equal(numbers[i], 1);
            }
}

static void shuffled_epochs_differ_and_come_again_with_their_seed(void **state) {
    (void)state;
    static stream first, again, other;
    loom_dataset dataset = counting(96);
    for (int kind = 1; kind < KINDS; kind += 2) {
        loom_data_loader_config config = config_of(kinds[kind], 2, 24, 0, 1);
        config.cycle = true;
        loom_data_loader loader = open_loader(&dataset, &config, false);
        read_steps(&loader, 8, &first);
        assert_true(memcmp(first.index, first.index + 96, 96 * sizeof *first.index) != 0);
        loom_data_loader_destroy(&loader);
        loader = open_loader(&dataset, &config, false);
        read_steps(&loader, 8, &again);
        assert_memory_equal(first.index, again.index, sizeof first.index);
        loom_data_loader_destroy(&loader);
        config.seed++;
        loader = open_loader(&dataset, &config, false);
        read_steps(&loader, 8, &other);
        assert_true(memcmp(first.index, other.index, 96 * sizeof *first.index) != 0);
        loom_data_loader_destroy(&loader);
    }
}

static void the_batch_sampler_gives_every_layout_the_same_numbers(void **state) {
    (void)state;
    loom_dataset dataset = counting(48);
    for (int64_t ranks = 1; ranks <= 3; ranks++)
        for (int64_t rank = 0; rank < ranks; rank++) {
            static stream read;
            loom_data_loader_config config = config_of("batch", 2, 12, rank, ranks);
            loom_data_loader loader = open_loader(&dataset, &config, false);
            read_steps(&loader, 4, &read);
            for (int64_t i = 0; i < read.count; i++)
                assert_int_equal(read.index[i], read.sample[i]);
            loom_data_loader_destroy(&loader);
        }
}

/* start 4, by 4, to 16, over 48 samples */
static void a_rampup_takes_its_steps_where_it_should(void **state) {
    (void)state;
    static stream read;
    static const int64_t begins[] = {0, 4, 8, 12, 16, 24, 32, 44, 56}, sizes[] = {2, 2, 2, 2, 4, 4, 6, 6, 8};
    loom_dataset dataset = counting(200);
    loom_data_loader_config config = config_of("single", 2, 16, 0, 1);
    memcpy(config.rampup_batch_size, (int64_t[]){4, 4, 48}, sizeof config.rampup_batch_size);
    loom_data_loader loader = open_loader(&dataset, &config, false);
    read_steps(&loader, 9, &read);
    assert_memory_equal(read.begin, begins, sizeof begins);
    assert_memory_equal(read.size, sizes, sizeof sizes);
    loom_data_step step;
    assert_int_equal(loader.seek(loader.context, 24), LOOM_OK);
    assert_int_equal(loader.step(loader.context, &step), LOOM_OK);
    assert_int_equal(step.global_batch_size, 8);
    loom_data_loader_destroy(&loader);
}

static void a_size_that_is_decreased_is_what_a_step_takes(void **state) {
    (void)state;
    static stream read;
    loom_dataset dataset = counting(100);
    loom_data_loader_config config = config_of("single", 2, 7, 0, 2);
    loom_data_loader loader;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_ERR_CONFIG);
    config.decrease_batch_size_if_needed = true;
    loader = open_loader(&dataset, &config, false);
    read_steps(&loader, 40, &read);
    assert_int_equal(read.steps, 25);
    loom_data_loader_destroy(&loader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resumed_run_reads_what_the_uninterrupted_one_reads),
        cmocka_unit_test(after_the_end_of_the_data_comes_nothing),
        cmocka_unit_test(an_epoch_reads_no_sample_twice),
        cmocka_unit_test(shuffled_epochs_differ_and_come_again_with_their_seed),
        cmocka_unit_test(the_batch_sampler_gives_every_layout_the_same_numbers),
        cmocka_unit_test(a_rampup_takes_its_steps_where_it_should),
        cmocka_unit_test(a_size_that_is_decreased_is_what_a_step_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
