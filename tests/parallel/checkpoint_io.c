/* The checkpoint I/O of a strategy: the chain of wrappers, who writes what, saving while training goes on, and which
 * checkpoints are kept. The same program runs as processes of MPI (mpi.checkpoint_io). */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <math.h>
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH = 512 };

static void clear(const char *path) {
    char command[3 * PATH];
    snprintf(command, sizeof command, "rm -rf '%s' '%s.tmp' '%s.gone'", path, path, path);
    if (system(command) != 0)
        fail_msg("%s: cannot be removed", path);
}

static void folder(char path[PATH], const char *name) {
    snprintf(path, PATH, "%s/checkpoint_io-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), name);
    clear(path);
}

typedef struct job {
    const char *path;
    loom_checkpoint_io_config io;
    loom_checkpoint_io *wrapper;
    int tp;
    bool sharded, fully_reshardable;
} job;

static job job_of(const char *path) {
    return (job){.path = path, .io = loom_checkpoint_io_config_default(), .tp = 1};
}

static loom_status start(loom_rank *rank, const job *j, small_run *r) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io io = loom_checkpoint_io_megatron(&j->io);
    config.tensor_model_parallel_size = j->tp;
    config.ddp_config.use_distributed_optimizer = j->sharded;
    config.dist_ckpt_optim_fully_reshardable = j->fully_reshardable;
    config.checkpoint_io = j->wrapper ? j->wrapper : &io;
    return small_start(rank, &config, r);
}

static loom_status step(small_run *r) {
    double loss;
    loom_optimizer_outcome outcome;
    LOOM_TRY(loom_parallel_training_step(r->parallel, r->batches, &loss));
    return loom_optimizer_step(r->optimizer, &outcome);
}

/* A hash of this rank's weights. */
static loom_status look(small_run *r, uint64_t *hash) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(r->parallel, &parameters, &count));
    *hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < count; i++)
        for (int64_t e = 0; e < loom_parameter_count(parameters[i]); e++) {
            uint32_t bits;
            memcpy(&bits, &parameters[i]->data[e], sizeof bits);
            *hash = (*hash ^ bits) * 0x100000001b3u;
        }
    return LOOM_OK;
}

static loom_status save(small_run *r, const char *path) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = r->parallel}, {.key = "optimizer", .optimizer = r->optimizer}};
    return loom_fabric_save(r->fabric, path, &(loom_state){items, 2}, NULL, 0);
}

static loom_status load(small_run *r, const char *path) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = r->parallel}, {.key = "optimizer", .optimizer = r->optimizer}};
    loom_load_report report = {0};
    LOOM_TRY(loom_fabric_load(r->fabric, path, &(loom_state){items, 2}, true, &report));
    loom_load_report_free(&report);
    return LOOM_OK;
}

static loom_status with_run(loom_rank *rank, const job *j, loom_status (*body)(small_run *r, const job *j)) {
    small_run r = {0};
    loom_status status = start(rank, j, &r);
    if (!status)
        status = body(&r, j);
    small_destroy(&r);
    return status;
}

/* ---- what is expected of a save */

/* The bytes of which this rank is the main holder. */
static loom_status weigh(const loom_checkpoint_io *self, const char *path, const loom_checkpoint_content *content) {
    (void)path;
    int64_t *bytes = self->context;
    for (int64_t i = 0; i < content->shard_count; i++) {
        const loom_checkpoint_shard *shard = &content->shards[i];
        int64_t size = (int64_t)loom_dtype_size(shard->dtype);
        for (int axis = 0; axis < shard->dims; axis++)
            size *= shard->sizes[axis];
        *bytes += shard->main ? size : 0;
    }
    return LOOM_OK;
}

/* The ranks' expectations together are what is saved, but for shares that are rounded down. */
static loom_status expected(loom_rank *rank, void *argument) {
    job j = *(const job *)argument;
    int64_t saved = 0;
    loom_checkpoint_io scale = {
        .name = "scale", .context = &saved, .wraps = true, .checkpoint_io = NULL, .save = weigh};
    small_run r = {0};
    j.wrapper = &scale;
    loom_status status = start(rank, &j, &r);
    if (!status)
        status = save(&r, j.path);
    for (int shared = 0; shared < 2 && !status; shared++) {
        int64_t mine[2] = {saved, (int64_t)loom__expected_save(r.parallel, r.optimizer, shared)}, all[2] = {0, 0};
        status = loom_all_reduce(loom_rank_world(rank), mine, all, 2, LOOM_I64, LOOM_SUM);
        if (!status)
            CHECK(all[1] <= all[0] && (double)all[1] > 0.99 * (double)all[0],
                "%lld bytes are expected of all ranks, which save %lld", (long long)all[1], (long long)all[0]);
    }
    small_destroy(&r);
    return status;
}

static void the_bytes_that_are_expected_of_a_save_are_those_it_has(void **state) {
    (void)state;
    for (int tp = 1; tp <= 2; tp++)
        for (int sharded = 0; sharded < 2; sharded++) {
            job j = job_of("nowhere");
            j.tp = tp;
            j.sharded = j.fully_reshardable = sharded; /* without gaps, which in a small model are much */
            must_run(4, expected, &j);
        }
}

/* ---- the chain */

typedef struct heard {
    _Atomic int saves, loads, removes;
} heard;

static loom_status hear_save(const loom_checkpoint_io *self, const char *path, const loom_checkpoint_content *content) {
    CHECK(content->shard_count > 0, "a save of nothing");
    ((heard *)self->context)->saves++;
    return loom_checkpoint_io_save(self->checkpoint_io, path, content);
}

static loom_status hear_load(const loom_checkpoint_io *self, const char *path, loom_checkpoint **checkpoint) {
    ((heard *)self->context)->loads++;
    return loom_checkpoint_io_load(self->checkpoint_io, path, checkpoint);
}

static loom_status hear_remove(const loom_checkpoint_io *self, const char *path) {
    ((heard *)self->context)->removes++;
    return loom_checkpoint_io_remove(self->checkpoint_io, path);
}

static loom_status wrapped(small_run *r, const job *j) {
    const loom_checkpoint_io *outer = loom_fabric_checkpoint_io(r->fabric);
    const loom_checkpoint_io *inner = loom_fabric_unwrapped_checkpoint_io(r->fabric);
    struct stat found;
    CHECK(outer->wraps && outer->checkpoint_io->wraps && outer->checkpoint_io->checkpoint_io == inner, "the chain");
    CHECK(strcmp(inner->name, "megatron") == 0, "inside stands %s, expected the Megatron one", inner->name);
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(load(r, j->path));
    LOOM_TRY(loom_checkpoint_io_remove(outer, j->path));
    CHECK(stat(j->path, &found) != 0, "%s is still there", j->path);
    return LOOM_OK;
}

static loom_status wrapped_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, wrapped);
}

static void a_wrapper_gets_the_megatron_one_inside_and_sees_each_call(void **state) {
    char path[PATH];
    heard seen = {0};
    loom_checkpoint_io inner = {.name = "idle", .wraps = true};
    loom_checkpoint_io outer = {.name = "listener",
        .context = &seen,
        .wraps = true,
        .checkpoint_io = &inner,
        .save = hear_save,
        .load = hear_load,
        .remove = hear_remove};
    (void)state;
    folder(path, "wrapped");
    job j = job_of(path);
    j.wrapper = &outer;
    must_run(2, wrapped_rank, &j);
    assert_int_equal(seen.saves, 2);
    assert_int_equal(seen.loads, 2);
    assert_int_equal(seen.removes, 2);
    assert_null(outer.checkpoint_io->checkpoint_io); /* the user's own structs stay as they are */
}

static loom_status refused_rank(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config bad = loom_checkpoint_io_config_default();
    loom_checkpoint_io circle = {.name = "circle", .wraps = true}, empty = {.name = "empty"};
    loom_fabric *fabric = NULL;
    (void)argument;
    circle.checkpoint_io = &circle;
    config.checkpoint_io = &circle;
    CHECK(loom_fabric_create(rank, &config, NULL, &fabric) == LOOM_ERR_CONFIG, "a circle");
    config.checkpoint_io = &empty;
    CHECK(loom_fabric_create(rank, &config, NULL, &fabric) == LOOM_ERR_CONFIG, "no functions");
    CHECK(strstr(loom_error_message(), "empty has no function save"), "%s", loom_error_message());
    bad.save_ckpt_format = "zarr";
    loom_checkpoint_io io = loom_checkpoint_io_megatron(&bad);
    config.checkpoint_io = &io;
    CHECK(loom_fabric_create(rank, &config, NULL, &fabric) == LOOM_ERR_UNSUPPORTED, "zarr");
    bad = loom_checkpoint_io_config_default();
    bad.storage_writers_per_rank = 0;
    CHECK(loom_fabric_create(rank, &config, NULL, &fabric) == LOOM_ERR_CONFIG, "no writers");
    CHECK(!fabric && strstr(loom_error_message(), "storage_writers_per_rank"), "%s", loom_error_message());
    loom_error_clear();
    return LOOM_OK;
}

static void what_cannot_save_is_refused_by_name(void **state) {
    (void)state;
    must_run(1, refused_rank, NULL);
}

/* ---- who writes what */

typedef struct sharing {
    job j;
    bool parallel_save, within_dp;
    uint64_t hash[4];
} sharing;

static loom_status share(small_run *r, const job *j) {
    sharing *s = (sharing *)(uintptr_t)j;
    int me = loom_rank_index(loom_fabric_rank(r->fabric));
    LOOM_TRY(step(r));
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(look(r, &s->hash[me]));
    uint64_t again;
    LOOM_TRY(step(r)); /* what is loaded is not what is there */
    LOOM_TRY(load(r, j->path));
    LOOM_TRY(look(r, &again));
    CHECK(again == s->hash[me], "rank %d reads other weights than it saved", me);
    return LOOM_OK;
}

static loom_status sharing_rank(loom_rank *rank, void *argument) {
    return with_run(rank, &((sharing *)argument)->j, share);
}

static int64_t bytes_of(const char *path, int rank) {
    char name[PATH + 32];
    struct stat found;
    snprintf(name, sizeof name, "%s/__%d_0.distcp", path, rank);
    return stat(name, &found) == 0 ? (int64_t)found.st_size : 0;
}

static void ranks_that_hold_the_same_share_its_writing(void **state) {
    char path[PATH];
    int64_t bytes[3][4];
    (void)state;
    folder(path, "shared");
    for (int kind = 0; kind < 3; kind++) {
        sharing s = {.j = job_of(path)};
        s.j.tp = 2;
        s.j.io.parallel_save = kind > 0;
        s.j.io.parallel_save_within_dp = kind == 2;
        must_run(4, sharing_rank, &s);
        for (int i = 0; i < 4; i++)
            bytes[kind][i] = bytes_of(path, i);
    }
    /* tp 2, dp 2: ranks 2 and 3 hold what 0 and 1 do. */
    assert_int_equal(bytes[0][2] + bytes[0][3], 0);
    int64_t all = bytes[0][0] + bytes[0][1];
    for (int kind = 1; kind < 3; kind++)
        for (int i = 0; i < 4; i++) {
            int64_t wanted = kind == 1 ? all / 4 : bytes[0][i % 2] / 2;
            if (bytes[kind][i] * 5 < wanted * 4 || bytes[kind][i] * 4 > wanted * 5)
                fail_msg("rank %d has written %lld bytes, expected about %lld", i, (long long)bytes[kind][i],
                    (long long)wanted);
        }
    clear(path);
}

static loom_status constant(small_run *r, const job *j) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = r->parallel}, {.key = "optimizer", .optimizer = r->optimizer}};
    for (int64_t round = 0; round < 5; round++) { /* the whole state, and the model alone, which is another structure */
        loom_state state = {items, round == 2 ? 1 : 2};
        loom_load_report report = {0};
        LOOM_TRY(step(r));
        LOOM_TRY(loom_fabric_save(r->fabric, j->path, &state, NULL, 0));
        LOOM_TRY(loom_fabric_load(r->fabric, j->path, &state, true, &report));
        loom_load_report_free(&report);
    }
    return LOOM_OK;
}

static loom_status constant_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, constant);
}

static void a_kept_plan_is_made_again_for_another_state(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "constant");
    job j = job_of(path);
    j.io.assume_constant_structure = true;
    must_run(2, constant_rank, &j);
    clear(path);
}

/* ---- reading together */

static loom_status read_shared(small_run *r, const job *j) {
    uint64_t before, after;
    LOOM_TRY(look(r, &before));
    for (int i = 0; i < 2; i++) { /* the second state is loaded into one that has gone on */
        LOOM_TRY(save(r, j->path));
        LOOM_TRY(look(r, &before));
        LOOM_TRY(step(r));
        LOOM_TRY(load(r, j->path));
        LOOM_TRY(look(r, &after));
        CHECK(before == after, "what is read together differs from what was saved");
        LOOM_TRY(step(r));
    }
    return LOOM_OK;
}

static loom_status read_shared_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, read_shared);
}

static void chunks_read_once_reach_all_that_want_them(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "together");
    for (int sharded = 0; sharded < 2; sharded++) {
        job j = job_of(path);
        j.io.parallel_load = true;
        j.sharded = sharded;
        must_run(3, read_shared_rank, &j);
        j.tp = 2;
        must_run(4, read_shared_rank, &j);
    }
    clear(path);
}

/* Changes bytes in the middle of the first chunk of a tensor. */
static loom_status damage(const char *path) {
    char name[PATH + 64];
    loom_checkpoint *checkpoint = NULL;
    const loom_checkpoint_tensor *tensor = NULL;
    LOOM_TRY(loom_checkpoint_open(path, &checkpoint));
    loom_status status = loom_checkpoint_find_tensor(checkpoint, "embedding.word_embeddings.weight", &tensor);
    long at = status ? 0 : (long)(tensor->chunks[0].position + tensor->chunks[0].bytes / 2);
    snprintf(name, sizeof name, "%s/%s", path, status ? "" : tensor->chunks[0].file);
    loom_checkpoint_close(checkpoint);
    LOOM_TRY(status);
    FILE *file = fopen(name, "r+");
    CHECK(file && fseek(file, at, SEEK_SET) == 0 && fputs("damaged", file) != EOF && fclose(file) == 0, "%s", name);
    return LOOM_OK;
}

static loom_status read_damaged(small_run *r, const job *j) {
    loom_rank *rank = loom_fabric_rank(r->fabric);
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(loom_agree(loom_rank_world(rank), loom_rank_index(rank) == 0 ? damage(j->path) : LOOM_OK));
    CHECK(load(r, j->path), "a damaged chunk was loaded");
    CHECK(strstr(loom_error_message(), ".distcp"), "the damage is told as: %s", loom_error_message());
    loom_error_clear();
    LOOM_TRY(save(r, j->path));
    return load(r, j->path);
}

static loom_status read_damaged_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, read_damaged);
}

static void a_chunk_that_one_cannot_read_fails_all(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "damaged");
    job j = job_of(path);
    j.io.parallel_load = true;
    must_run(3, read_damaged_rank, &j);
    clear(path);
}

/* ---- saving while training goes on */

static loom_status go_on(small_run *r, const job *j) {
    uint64_t saved, loaded;
    bool pending;
    LOOM_TRY(step(r));
    LOOM_TRY(look(r, &saved));
    LOOM_TRY(save(r, j->path));
    for (int i = 0; i < 3; i++)
        LOOM_TRY(step(r));
    LOOM_TRY(loom_fabric_finalize_saves(r->fabric, true, &pending));
    CHECK(!pending, "a save goes on that was waited for");
    LOOM_TRY(load(r, j->path));
    LOOM_TRY(look(r, &loaded));
    CHECK(saved == loaded, "the checkpoint is not of the step in which it was saved");
    LOOM_TRY(step(r));
    LOOM_TRY(look(r, &saved));
    LOOM_TRY(save(r, j->path)); /* in place of the first */
    LOOM_TRY(step(r));
    LOOM_TRY(load(r, j->path)); /* waits by itself */
    LOOM_TRY(look(r, &loaded));
    CHECK(saved == loaded, "a load has not waited for the save before it");
    return LOOM_OK;
}

static loom_status go_on_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, go_on);
}

static void an_asynchronous_save_holds_the_state_of_its_step(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "async");
    for (int sharded = 0; sharded < 2; sharded++) {
        job j = job_of(path);
        j.io.async_save = true;
        j.sharded = sharded;
        must_run(2, go_on_rank, &j);
        clear(path);
    }
}

/* The unfinished folder goes while threads write into it. */
static loom_status fail_later(small_run *r, const job *j) {
    struct stat found;
    loom_comm *world = loom_rank_world(loom_fabric_rank(r->fabric));
    char temporary[PATH + 8], gone[PATH + 8], text[512];
    bool pending;
    loom_status status = LOOM_OK;
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(step(r));
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(loom_barrier(world));
    snprintf(temporary, sizeof temporary, "%s.tmp", j->path);
    snprintf(gone, sizeof gone, "%s.gone", j->path);
    if (loom_rank_index(loom_fabric_rank(r->fabric)) == 0 && rename(temporary, gone) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: %m", temporary);
    LOOM_TRY(loom_agree(world, status));
    for (int i = 0; i < 1000 && !status; i++) {
        status = step(r);
        if (!status)
            usleep(1000);
    }
    snprintf(text, sizeof text, "%s", loom_error_message());
    CHECK(status, "no step has heard of the save that failed");
    CHECK(strstr(text, j->path) && strstr(text, "No such file or directory"), "the step says: %s", text);
    LOOM_TRY(loom_fabric_finalize_saves(r->fabric, true, &pending));
    CHECK(stat(j->path, &found) == 0, "the checkpoint that was there is gone");
    LOOM_TRY(load(r, j->path));
    LOOM_TRY(save(r, j->path));
    LOOM_TRY(loom_fabric_finalize_saves(r->fabric, true, &pending));
    return load(r, j->path);
}

static loom_status fail_later_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, fail_later);
}

static void a_save_that_fails_is_told_at_a_later_step_and_costs_nothing(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "fails");
    job j = job_of(path);
    j.io.async_save = true;
    must_run(2, fail_later_rank, &j);
    clear(path);
}

static loom_status drop(small_run *r, const job *j) {
    return save(r, j->path);
}

static loom_status drop_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, drop);
}

static void a_fabric_that_ends_early_leaves_no_checkpoint(void **state) {
    char path[PATH];
    struct stat found;
    (void)state;
    folder(path, "dropped");
    job j = job_of(path);
    j.io.async_save = true;
    must_run(2, drop_rank, &j);
    assert_int_not_equal(stat(path, &found), 0);
    clear(path);
}

/* ---- what is kept */

static loom_status keep_some(small_run *r, const job *j) {
    static const double losses[] = {3, 1, NAN, 2, 4, NAN};
    loom_state_item items[] = {{.key = "state_dict", .module = r->parallel}};
    for (int64_t i = 0; i < 6; i++) {
        loom_keep keep = {.last = 2, .best = 2, .validation_loss = losses[i]};
        LOOM_TRY(loom_fabric_save_and_keep(r->fabric, j->path, i + 1, &keep, &(loom_state){items, 1}));
        LOOM_TRY(step(r));
    }
    bool pending;
    return loom_fabric_finalize_saves(r->fabric, true, &pending);
}

static loom_status keep_rank(loom_rank *rank, void *argument) {
    return with_run(rank, argument, keep_some);
}

static void check_pointer(const char *path, const char *name, const char *wanted) {
    char full[2 * PATH], text[16] = "";
    snprintf(full, sizeof full, "%s/%s", path, name);
    FILE *file = fopen(full, "r");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof text, file));
    fclose(file);
    assert_string_equal(text, wanted);
}

static void the_last_and_the_best_are_kept(void **state) {
    char path[PATH];
    (void)state;
    folder(path, "kept");
    for (int async = 0; async < 2; async++) {
        job j = job_of(path);
        j.io.async_save = async;
        must_run(2, keep_rank, &j);
        for (int i = 1; i <= 6; i++) {
            char name[PATH + 32];
            struct stat found;
            snprintf(name, sizeof name, "%s/iter_%07d", path, i);
            bool wanted = i == 2 || i == 4 || i > 4;
            if ((stat(name, &found) == 0) != wanted)
                fail_msg("%s is %s", name, wanted ? "gone" : "still there");
        }
        check_pointer(path, "latest_checkpointed_iteration.txt", "6");
        check_pointer(path, "best_checkpointed_iteration.txt", "2");
        clear(path);
    }
}

/* ---- processes */

static loom_status mpi_rank(loom_rank *rank, void *argument) {
    job *j = argument;
    j->sharded = true;
    LOOM_TRY(with_run(rank, j, go_on));
    LOOM_TRY(with_run(rank, j, fail_later));
    j->io.assume_constant_structure = j->io.parallel_load = true;
    LOOM_TRY(with_run(rank, j, constant));
    return with_run(rank, j, read_shared);
}

int main(int argc, char **argv) {
    if (argc == 2) { /* a folder that all processes see */
        loom_run_options options = test_options();
        job j = job_of(argv[1]);
        const char *place = getenv("OMPI_COMM_WORLD_RANK");
        if (!place || strcmp(place, "0") == 0)
            clear(argv[1]);
        j.io.async_save = true;
        loom_status status = loom_run_mpi(mpi_rank, &j, &options);
        if (status)
            fprintf(stderr, "%s\n", loom_error_message());
        return status != LOOM_OK;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_bytes_that_are_expected_of_a_save_are_those_it_has),
        cmocka_unit_test(a_wrapper_gets_the_megatron_one_inside_and_sees_each_call),
        cmocka_unit_test(what_cannot_save_is_refused_by_name),
        cmocka_unit_test(ranks_that_hold_the_same_share_its_writing),
        cmocka_unit_test(a_kept_plan_is_made_again_for_another_state),
        cmocka_unit_test(chunks_read_once_reach_all_that_want_them),
        cmocka_unit_test(a_chunk_that_one_cannot_read_fails_all),
        cmocka_unit_test(an_asynchronous_save_holds_the_state_of_its_step),
        cmocka_unit_test(a_save_that_fails_is_told_at_a_later_step_and_costs_nothing),
        cmocka_unit_test(a_fabric_that_ends_early_leaves_no_checkpoint),
        cmocka_unit_test(the_last_and_the_best_are_kept)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
