/* One rank's part of a save: files by several threads, and the copy that lets the owner go on. */
#include "checkpoint/job.h"
#include "format_scratch.h"
#include <setjmp.h>

#include <cmocka.h>

enum { SHARDS = 7, ELEMENTS = 300000, WRITERS = 3 };

static void must(loom_status status) {
    if (status)
        fail_msg("%s", loom_error_message());
}

typedef struct state_of {
    scratch folder;
    char path[512];
    float *values; /* [SHARDS - 1][ELEMENTS]; the last shard has no data */
    char keys[SHARDS][8];
    loom_checkpoint_shard shards[SHARDS];
    bool mine[SHARDS];
    loom_checkpoint_content content;
} state_of;

static void fill(state_of *s, float first) {
    for (int64_t i = 0; i < (SHARDS - 1) * ELEMENTS; i++)
        s->values[i] = first + (float)(i % 65521);
}

/* A state of such values, and a folder in which it can be saved at s->path; end. */
static void make(state_of *s, float first) {
    s->folder = scratch_make();
    snprintf(s->path, sizeof s->path, "%s", scratch_file(&s->folder, "c"));
    s->values = malloc((size_t)(SHARDS - 1) * ELEMENTS * sizeof *s->values);
    assert_non_null(s->values);
    fill(s, first);
    for (int i = 0; i < SHARDS; i++) {
        snprintf(s->keys[i], sizeof s->keys[i], "w%d", i);
        s->shards[i] = (loom_checkpoint_shard){.key = s->keys[i],
            .main = true,
            .dtype = LOOM_F32,
            .dims = 1,
            .shape = {ELEMENTS},
            .sizes = {ELEMENTS},
            .data = i + 1 < SHARDS ? s->values + (int64_t)i * ELEMENTS : NULL};
        s->mine[i] = i != 2; /* another rank writes it */
    }
    s->content = (loom_checkpoint_content){.shards = s->shards, .shard_count = SHARDS};
}

static void end(state_of *s) {
    free(s->values);
    scratch_remove(&s->folder);
}

static loom__save_job *begin(const state_of *s, const loom__save_job_config *config) {
    loom__save_job *job = NULL;
    must(loom__checkpoint_begin(s->path));
    must(loom__save_job_start(s->path, &s->content, s->mine, config, &job));
    return job;
}

/* Commits, and compares with what `fill` has made. */
static void commit_and_compare(const char *path, const loom__checkpoint_description *description, float first) {
    loom_value_pool *pool = NULL;
    loom_value *common = NULL;
    loom_checkpoint *checkpoint = NULL;
    float *found = malloc(ELEMENTS * sizeof *found);
    must(loom_value_pool_create(&pool));
    must(loom_value_dict(pool, &common));
    must(loom__checkpoint_commit(path, description, 1, common));
    must(loom_checkpoint_open(path, &checkpoint));
    assert_int_equal(loom_checkpoint_get_info(checkpoint)->tensors, SHARDS - 1);
    for (int64_t i = 0; i < SHARDS; i++) {
        const loom_checkpoint_tensor *tensor = NULL;
        char key[8];
        if (i == 2)
            continue;
        snprintf(key, sizeof key, "w%lld", (long long)i);
        must(loom_checkpoint_find_tensor(checkpoint, key, &tensor));
        must(loom_checkpoint_read(checkpoint, tensor, (int64_t[]){0}, (int64_t[]){ELEMENTS}, LOOM_F32, found));
        for (int64_t e = 0; e < ELEMENTS; e++) {
            float wanted = i + 1 < SHARDS ? first + (float)((i * ELEMENTS + e) % 65521) : 0;
            if (found[e] != wanted)
                fail_msg("%s[%lld] is %g, expected %g", key, (long long)e, (double)found[e], (double)wanted);
        }
    }
    loom_checkpoint_close(checkpoint);
    loom_value_pool_destroy(pool);
    free(found);
}

static int64_t files_in(const char *path) {
    loom_checkpoint *checkpoint = NULL;
    must(loom_checkpoint_open(path, &checkpoint));
    int64_t files = loom_checkpoint_get_info(checkpoint)->files;
    loom_checkpoint_close(checkpoint);
    return files;
}

static void each_writer_makes_a_file_of_its_own(void **state) {
    (void)state;
    state_of s;
    loom__checkpoint_description description = {0};
    loom__save_job_config config = {.rank = 3, .writers = WRITERS};
    make(&s, 1);
    loom__save_job *job = begin(&s, &config);
    must(loom__save_job_wait(job, &description));
    loom__save_job_destroy(job);
    commit_and_compare(s.path, &description, 1);
    assert_int_equal(files_in(s.path), WRITERS);
    free(description.data);
    end(&s);
}

static void a_copied_state_may_change_while_it_is_written(void **state) {
    (void)state;
    state_of s;
    loom__copy_memory memory = {0};
    make(&s, 1);
    for (int round = 0; round < 2; round++) {
        loom__checkpoint_description description = {0};
        loom__save_job_config config = {.writers = WRITERS, .background = true, .memory = &memory};
        const void *before = memory.data;
        loom__save_job *job = begin(&s, &config);
        assert_true(round == 0 || memory.data == before);
        fill(&s, (float)round + 2);
        memset(s.keys, 'x', sizeof s.keys);
        must(loom__save_job_wait(job, &description));
        assert_true(loom__save_job_finished(job));
        loom__save_job_destroy(job);
        commit_and_compare(s.path, &description, (float)round + 1);
        free(description.data);
        for (int i = 0; i < SHARDS; i++)
            snprintf(s.keys[i], sizeof s.keys[i], "w%d", i);
    }
    loom__copy_memory_free(&memory);
    end(&s);
}

static void the_owner_hears_what_a_thread_failed_of(void **state) {
    (void)state;
    state_of s;
    loom__checkpoint_description description = {0};
    loom__copy_memory memory = {0};
    loom__save_job_config config = {.writers = WRITERS, .background = true, .memory = &memory};
    make(&s, 1);
    s.shards[1].offsets[0] = 1;
    loom__save_job *job = begin(&s, &config);
    assert_int_equal(loom__save_job_wait(job, &description), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), ".distcp: tensor 'w1': chunk [1, +300000) on axis 0"));
    loom__save_job_destroy(job);
    loom__copy_memory_free(&memory);
    end(&s);
}

static void a_small_state_is_one_file_and_an_empty_one_none(void **state) {
    (void)state;
    state_of s;
    make(&s, 1);
    for (int64_t shards = 0; shards < 2; shards++) {
        loom__checkpoint_description description = {0};
        loom__save_job_config config = {.writers = WRITERS};
        s.shards[0].sizes[0] = s.shards[0].shape[0] = 10;
        s.content.shard_count = shards;
        loom__save_job *job = begin(&s, &config);
        must(loom__save_job_wait(job, &description));
        loom__save_job_destroy(job);
        assert_int_equal(description.bytes > 0, shards);
        assert_int_equal(access(scratch_file(&s.folder, "c.tmp/__0_0.distcp"), F_OK), shards - 1);
        assert_int_equal(access(scratch_file(&s.folder, "c.tmp/__0_1.distcp"), F_OK), -1);
        free(description.data);
    }
    must(loom__checkpoint_abandon(s.path));
    assert_int_equal(access(scratch_file(&s.folder, "c.tmp"), F_OK), -1);
    end(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_writer_makes_a_file_of_its_own),
        cmocka_unit_test(a_copied_state_may_change_while_it_is_written),
        cmocka_unit_test(the_owner_hears_what_a_thread_failed_of),
        cmocka_unit_test(a_small_state_is_one_file_and_an_empty_one_none)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
