/* Stop and resume: a loader that begins where another stood gives what that one would have given, for every sampler, on
 * one to three data-parallel ranks, with ramp-up and without, read ahead or not; in the middle of an epoch, at its
 * edge, in the ramp-up, in the second epoch and behind the end of the data. */
#include <megaloom/data.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

/* 100 samples in global batches of 12: an epoch is 96, and two and a half are read. */
enum { TOTAL = 100, GLOBAL = 12, EPOCH = 96, UNTIL = 240, MOST = 512 };

static loom_status get(void *context, int64_t index, const loom_sample_row *row) {
    (void)context;
    row->tokens[0] = row->labels[0] = index < 0 ? 0 : index;
    row->loss_mask[0] = 1;
    row->position_ids[0] = 0;
    return LOOM_OK;
}

typedef struct stream {
    int64_t count;
    int64_t before[MOST]; /* consumed samples when the microbatch was asked for */
    int64_t index[MOST], sample[MOST];
    bool ended;
} stream;

typedef struct kind {
    const char *sampler;
    int64_t ranks, rank;
    bool ramp, cycle, ahead;
} kind;

static loom_data_loader open_loader(const loom_dataset *dataset, const kind *of, int64_t consumed) {
    loom_data_loader_config config = loom_data_loader_config_default();
    assert_int_equal(loom_data_sampler_find(of->sampler, &config.sampler), LOOM_OK);
    config.global_batch_size = GLOBAL;
    config.data_parallel_rank = of->rank;
    config.data_parallel_size = of->ranks;
    config.cycle = of->cycle;
    config.seed = 5;
    config.consumed_samples = consumed;
    if (of->ramp) {
        config.rampup_batch_size[0] = config.rampup_batch_size[1] = 6;
        config.rampup_batch_size[2] = 36;
    }
    loom_data_loader plain, loader;
    if (loom_data_loader_create(dataset, &config, &plain) != LOOM_OK)
        fail_msg("%s of %d: %s", of->sampler, (int)of->ranks, loom_error_message());
    if (!of->ahead)
        return plain;
    const loom_data_prefetch_config ahead = {.depth = 3, .rank = -1};
    assert_int_equal(loom_data_loader_prefetch(&plain, &ahead, &loader), LOOM_OK);
    return loader;
}

static void read_stream(loom_data_loader *loader, stream *read) {
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
    *read = (stream){0};
    while (!read->ended && loader->consumed_samples(loader->context) < UNTIL) {
        assert_true(read->count < MOST);
        read->before[read->count] = loader->consumed_samples(loader->context);
        loom_status status = loader->next(loader->context, batch);
        read->ended = status == LOOM_END;
        assert_true(read->ended || (status == LOOM_OK && batch->b == 1));
        if (!read->ended) {
            read->index[read->count] = batch->index[0];
            read->sample[read->count++] = batch->sample[0];
        }
    }
    loom_batch_destroy(batch);
}

/* Goes on behind the first step that ends at `wanted` or later. */
static void resume_at(const loom_dataset *dataset, const kind *of, const stream *whole, int64_t wanted) {
    loom_data_step_config sizes = {
        GLOBAL, 1, of->ranks, {of->ramp ? 6 : 0, of->ramp ? 6 : 0, of->ramp ? 36 : 0}, false};
    int64_t at = 0, first = 0;
    while (at < wanted) {
        loom_data_step step;
        assert_int_equal(loom_data_step_at(&sizes, at, &step), LOOM_OK);
        at += step.running_global_batch_size;
    }
    while (first < whole->count && whole->before[first] < at)
        first++;
    assert_true(first == whole->count || whole->before[first] == at);
    /* A loader that is made there, and one that has gone elsewhere and is sent there. */
    for (int moved = 0; moved < 2; moved++) {
        stream rest;
        loom_data_loader loader = open_loader(dataset, of, moved ? 0 : at);
        if (moved) {
            loom_batch *batch;
            assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
            assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
            assert_int_equal(loader.seek(loader.context, at), LOOM_OK);
            loom_batch_destroy(batch);
        }
        read_stream(&loader, &rest);
        loom_data_loader_destroy(&loader);
        if (rest.count != whole->count - first || rest.ended != whole->ended)
            fail_msg("%s, rank %d of %d, at %d: %d microbatches, expected %d", of->sampler, (int)of->rank,
                (int)of->ranks, (int)at, (int)rest.count, (int)(whole->count - first));
        for (int64_t i = 0; i < rest.count; i++)
            if (rest.index[i] != whole->index[first + i] || rest.sample[i] != whole->sample[first + i])
                fail_msg("%s, rank %d of %d, at %d: microbatch %d is sample %d, expected %d", of->sampler,
                    (int)of->rank, (int)of->ranks, (int)at, (int)i, (int)rest.index[i], (int)whole->index[first + i]);
    }
}

static void check_kind(const kind *of) {
    /* In the ramp-up, or after as many steps without one; mid-epoch; its edge; the second epoch; the third. */
    static const int64_t points[] = {12, 40, EPOCH, 130, 200};
    const loom_dataset dataset = {.length = TOTAL, .sequence_length = 1, .get = get};
    stream whole;
    loom_data_loader loader = open_loader(&dataset, of, 0);
    read_stream(&loader, &whole);
    loom_data_loader_destroy(&loader);
    assert_true(of->cycle ? whole.count * of->ranks >= UNTIL : whole.count * of->ranks <= EPOCH && whole.ended);
    for (size_t i = 0; i < sizeof points / sizeof *points && (of->cycle || points[i] <= 40); i++)
        resume_at(&dataset, of, &whole, points[i]);
    if (of->cycle)
        return;
    /* Behind the end: nothing comes, as nothing came. */
    stream rest;
    loader = open_loader(&dataset, of, whole.count * of->ranks);
    read_stream(&loader, &rest);
    assert_true(rest.count == 0 && rest.ended);
    assert_int_equal(loader.remaining(loader.context), 0);
    loom_data_loader_destroy(&loader);
}

static void a_stopped_stream_goes_on_as_if_it_had_not(void **state) {
    (void)state;
    static const char *const samplers[] = {"single", "cyclic", "batch", "random_batch"};
    int ran = 0;
    for (int sampler = 0; sampler < 4; sampler++)
        for (int64_t ranks = 1; ranks <= 3; ranks++)
            for (int64_t rank = 0; rank < ranks; rank++)
                for (int flags = 0; flags < 8; flags++, ran++)
                    check_kind(
                        &(kind){samplers[sampler], ranks, rank, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0});
    print_message("%d streams, each gone on with at up to five points\n", ran);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_stopped_stream_goes_on_as_if_it_had_not)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
