/* Saves that fail, on one rank or on all: every rank hears of it, nothing is renamed, and what was there is whole. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH = 512 };

static void clear(const char *path) {
    char command[2 * PATH];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

enum { ROOM = 256 };

typedef enum fault {
    BAD_OBJECT, /* rank 1 fails as it begins its file, */
    BAD_CHUNK,  /* as it writes it, */
    FULL_DISK   /* or no file may become longer than a few kB */
} fault;

typedef struct job {
    char path[PATH];
    fault fault;
    bool async;
    _Atomic bool on; /* whether the save at hand is to fail */
} job;

static loom_status save_with_fault(
    const loom_checkpoint_io *self, const char *path, const loom_checkpoint_content *content) {
    loom_checkpoint_shard shards[ROOM] = {{0}};
    loom_checkpoint_value objects[ROOM] = {{0}};
    const job *j = self->context;
    loom_value value = {.kind = LOOM_VALUE_NONE};
    loom_checkpoint_content given = *content;
    float element = 0;
    CHECK(given.shard_count < ROOM && given.object_count < ROOM, "%lld chunks", (long long)given.shard_count);
    for (int64_t i = 0; i < given.shard_count; i++)
        shards[i] = content->shards[i];
    for (int64_t i = 0; i < given.object_count; i++)
        objects[i] = content->objects[i];
    given.shards = shards;
    given.objects = objects;
    if (j->on && j->fault == BAD_OBJECT)
        objects[given.object_count++] = (loom_checkpoint_value){"", &value};
    if (j->on && j->fault == BAD_CHUNK)
        shards[given.shard_count++] = (loom_checkpoint_shard){
            .key = "bad", .main = true, .dims = 1, .shape = {1}, .offsets = {1}, .sizes = {1}, .data = &element};
    return loom_checkpoint_io_save(self->checkpoint_io, path, &given);
}

/* What the middle rank brings has something more in it that cannot be written. */
static loom_status set_up_fault(loom_checkpoint_io *self, loom_fabric *fabric) {
    self->save = loom_rank_index(loom_fabric_rank(fabric)) == 1 ? save_with_fault : NULL;
    return LOOM_OK;
}

static loom_status start(loom_rank *rank, job *j, small_run *run) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
    io_config.async_save = j->async;
    loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
    loom_checkpoint_io outer = {
        .name = "fault", .context = j, .wraps = true, .checkpoint_io = &io, .setup = set_up_fault};
    config.ddp_config.use_distributed_optimizer = true;
    config.checkpoint_io = &outer;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    return small_model(run);
}

static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static loom_status save(const job *j, small_run *run) {
    bool pending;
    loom_state_item items[] = {
        {.key = "state_dict", .module = run->parallel}, {.key = "optimizer", .optimizer = run->optimizer}};
    LOOM_TRY(loom_fabric_save(run->fabric, j->path, &(loom_state){items, 2}, NULL, 0));
    return loom_fabric_finalize_saves(run->fabric, true, &pending);
}

static loom_status check_old(const job *j, small_run *run, float wanted) {
    loom_parameter *const *parameters;
    int64_t count;
    loom_load_report report = {0};
    loom_state_item items[] = {
        {.key = "state_dict", .module = run->parallel}, {.key = "optimizer", .optimizer = run->optimizer}};
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    CHECK(parameters[0]->data[0] != wanted, "nothing has changed since the save");
    LOOM_TRY(loom_fabric_load(run->fabric, j->path, &(loom_state){items, 2}, true, &report));
    loom_load_report_free(&report);
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    CHECK(parameters[0]->data[0] == wanted, "found %g, expected %g of the save that did not fail",
        (double)parameters[0]->data[0], (double)wanted);
    return LOOM_OK;
}

/* How this rank's save goes that cannot. */
static loom_status failing_save(loom_rank *rank, job *j, small_run *run) {
    loom_comm *world = loom_rank_world(rank);
    if (loom_rank_index(rank) == 0) {
        j->on = true;
        if (j->fault == FULL_DISK)
            limit_files(4096);
    }
    LOOM_TRY(loom_barrier(world));
    loom_status status = save(j, run);
    char message[1024], temporary[PATH + 8];
    struct stat found;
    snprintf(message, sizeof message, "%s", loom_error_message());
    snprintf(temporary, sizeof temporary, "%s.tmp", j->path);
    LOOM_TRY(loom_barrier(world));
    if (loom_rank_index(rank) == 0) {
        j->on = false;
        if (j->fault == FULL_DISK)
            limit_files(RLIM_INFINITY);
    }
    LOOM_TRY(loom_barrier(world));
    CHECK(status != LOOM_OK, "the save of rank %d has come to a good end", loom_rank_index(rank));
    CHECK(strstr(message, j->fault == FULL_DISK ? "File too large" : "__1_0.distcp"), "the message is: %s", message);
    CHECK(stat(temporary, &found) != 0, "%s is left behind", temporary);
    loom_error_clear();
    return LOOM_OK;
}

static loom_status body(loom_rank *rank, job *j, small_run *run) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(start(rank, j, run));
    LOOM_TRY(save(j, run));
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    float before = parameters[0]->data[0];
    parameters[0]->data[0] = before + 1;
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    LOOM_TRY(failing_save(rank, j, run));
    LOOM_TRY(check_old(j, run, before));
    /* When nothing is in the way any more the next one is made as if nothing had been. */
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    parameters[0]->data[0] = before + 2;
    LOOM_TRY(save(j, run));
    parameters[0]->data[0] = before;
    return check_old(j, run, before + 2);
}

static loom_status rank_body(loom_rank *rank, void *argument) {
    small_run run = {0};
    loom_status status = body(rank, argument, &run);
    small_destroy(&run);
    return status;
}

static void run_job(fault kind) {
    for (int async = 0; async < 2; async++) {
        job j = {.fault = kind, .async = async};
        char temporary[PATH + 8];
        snprintf(j.path, sizeof j.path, "%s/save_fails-%lld", MEGALOOM_BUILD, (long long)getpid());
        snprintf(temporary, sizeof temporary, "%s.tmp", j.path);
        clear(j.path);
        clear(temporary);
        must_run(3, rank_body, &j);
        clear(j.path);
        clear(temporary);
    }
}

static void a_middle_rank_that_cannot_begin_its_file_commits_nothing(void **state) {
    (void)state;
    run_job(BAD_OBJECT);
}

static void a_middle_rank_that_cannot_write_its_file_commits_nothing(void **state) {
    (void)state;
    run_job(BAD_CHUNK);
}

static void a_full_disk_leaves_what_was_there(void **state) {
    (void)state;
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    run_job(FULL_DISK);
    signal(SIGXFSZ, before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_middle_rank_that_cannot_begin_its_file_commits_nothing),
        cmocka_unit_test(a_middle_rank_that_cannot_write_its_file_commits_nothing),
        cmocka_unit_test(a_full_disk_leaves_what_was_there),
    };
    return cmocka_run_group_tests_name("parallel.save_fails", tests, NULL, NULL);
}
