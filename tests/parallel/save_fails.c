/* Saves that fail, on one rank or on all: every rank hears of it, nothing is renamed, and what was there is whole. */
#include "parallel/small_model.h"
#include "parallel/support.h"
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

typedef struct job {
    char path[PATH];
    const char *obstacle; /* a folder of this name stands in rank 1's way */
    bool limit;           /* no file may become longer than a few kB */
} job;

static loom_status start(loom_rank *rank, small_run *run) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.ddp_config.use_distributed_optimizer = true;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    return small_model(run);
}

typedef struct obstacle {
    const job *j;
    bool blocks;
} obstacle;

/* Asked of each entry of the optimizer, on each rank, between the making of the unfinished folder and the rank's file.
 */
static bool keep_all(void *context, const char *name) {
    obstacle *o = context;
    char path[2 * PATH];
    (void)name;
    if (o->blocks) {
        snprintf(path, sizeof path, "%s.tmp/%s", o->j->path, o->j->obstacle);
        o->blocks = mkdir(path, 0777) != 0;
        strcat(path, "/in it");
        o->blocks = o->blocks || mkdir(path, 0777) != 0;
    }
    return true;
}

static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static loom_status save(const job *j, small_run *run, obstacle *o) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = run->parallel}, {.key = "optimizer", .optimizer = run->optimizer}};
    loom_state_filter filter = {"optimizer", keep_all, o};
    return loom_fabric_save(run->fabric, j->path, &(loom_state){items, 2}, o ? &filter : NULL, o != NULL);
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
static loom_status failing_save(loom_rank *rank, const job *j, small_run *run) {
    loom_comm *world = loom_rank_world(rank);
    obstacle o = {j, j->obstacle && loom_rank_index(rank) == 1};
    if (j->limit && loom_rank_index(rank) == 0)
        limit_files(4096);
    LOOM_TRY(loom_barrier(world));
    loom_status status = save(j, run, j->obstacle ? &o : NULL);
    char message[1024];
    snprintf(message, sizeof message, "%s", loom_error_message());
    LOOM_TRY(loom_barrier(world));
    if (j->limit && loom_rank_index(rank) == 0)
        limit_files(RLIM_INFINITY);
    LOOM_TRY(loom_barrier(world));
    CHECK(!o.blocks, "the obstacle was not put in the way");
    CHECK(status != LOOM_OK, "the save of rank %d has come to a good end", loom_rank_index(rank));
    CHECK(strstr(message, j->limit ? "File too large" : "__1_0.distcp"), "the message is: %s", message);
    loom_error_clear();
    return LOOM_OK;
}

static loom_status body(loom_rank *rank, const job *j, small_run *run) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(start(rank, run));
    LOOM_TRY(save(j, run, NULL));
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    float before = parameters[0]->data[0];
    parameters[0]->data[0] = before + 1;
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    LOOM_TRY(failing_save(rank, j, run));
    LOOM_TRY(check_old(j, run, before));
    if (j->obstacle)
        return LOOM_OK;
    /* When there is room again the next one is made as if nothing had been. */
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    parameters[0]->data[0] = before + 2;
    LOOM_TRY(save(j, run, NULL));
    parameters[0]->data[0] = before;
    return check_old(j, run, before + 2);
}

static loom_status rank_body(loom_rank *rank, void *argument) {
    small_run run = {0};
    loom_status status = body(rank, argument, &run);
    small_destroy(&run);
    return status;
}

static void run_job(const char *obstacle_name, bool limit) {
    job j = {.obstacle = obstacle_name, .limit = limit};
    char temporary[PATH + 8];
    snprintf(j.path, sizeof j.path, "%s/save_fails-%lld", MEGALOOM_BUILD, (long long)getpid());
    snprintf(temporary, sizeof temporary, "%s.tmp", j.path);
    clear(j.path);
    clear(temporary);
    must_run(3, rank_body, &j);
    clear(j.path);
    clear(temporary);
}

static void a_middle_rank_that_cannot_begin_its_file_commits_nothing(void **state) {
    (void)state;
    run_job("__1_0.distcp.tmp", false);
}

static void a_middle_rank_that_cannot_end_its_file_commits_nothing(void **state) {
    (void)state;
    run_job("__1_0.distcp", false);
}

static void a_full_disk_leaves_what_was_there(void **state) {
    (void)state;
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    run_job(NULL, true);
    signal(SIGXFSZ, before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_middle_rank_that_cannot_begin_its_file_commits_nothing),
        cmocka_unit_test(a_middle_rank_that_cannot_end_its_file_commits_nothing),
        cmocka_unit_test(a_full_disk_leaves_what_was_there),
    };
    return cmocka_run_group_tests_name("parallel.save_fails", tests, NULL, NULL);
}
