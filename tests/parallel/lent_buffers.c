/* Whatever operation of a run fails, the memory of the buffers stays: MPI may have a use for it until the process ends.
 * Ranks are threads, and their backend that of threads, but it calls a buffer lent, as the one of MPI does, when an
 * operation is given up that has it. Runs that train, save, load, trace and predict fail at one operation after
 * another, and free and munmap are watched: what is lent is not given back, and nothing lent lies on a stack, but for
 * what is so small that MPI works in a copy. */
#include "comm/comm.h"
#include "parallel/support.h"
#include "runtime/rank.h"
#include <malloc.h>
#include <megaloom/checkpoint_io.h>
#include <megaloom/profile.h>
#include <megaloom/state.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* FEW: numbers in structs are lent too, and are so few always; lists of a number for each rank or parameter are few in
 * these runs alone. */
enum {
    RANKS = 4,
    FAILING = 1,
    SEQUENCE = 16,
    VOCABULARY = 70,
    SAMPLES = 64,
    GLOBAL = 8,
    LOANS = 4096,
    FEW = 16,
    STRIDE = 11
};

typedef struct loan {
    const char *first, *end;
    char of[200];
} loan;

/* The loans of all ranks of the run at hand. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static loan loans[LOANS];
static _Atomic int loan_count;
static char broken[512]; /* the first loan that was not kept */

static void find_broken(const char *first, size_t bytes, const char *how) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < loan_count && !broken[0]; i++)
        if (first < loans[i].end && loans[i].first < first + bytes)
            snprintf(broken, sizeof broken, "%s memory that is lent to %s", how, loans[i].of);
    pthread_mutex_unlock(&lock);
}

/* The linker puts these in the place of free and munmap. */
void __real_free(void *memory);
int __real_munmap(void *memory, size_t bytes);
void __wrap_free(void *memory);
int __wrap_munmap(void *memory, size_t bytes);

void __wrap_free(void *memory) {
    if (loan_count > 0 && memory)
        find_broken(memory, malloc_usable_size(memory), "free gives back");
    __real_free(memory);
}

int __wrap_munmap(void *memory, size_t bytes) {
    if (loan_count > 0)
        find_broken(memory, bytes, "munmap gives back");
    return __real_munmap(memory, bytes);
}

static bool on_stack(const char *at) {
    pthread_attr_t attributes;
    void *first = NULL;
    size_t bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return false;
    pthread_attr_getstack(&attributes, &first, &bytes);
    pthread_attr_destroy(&attributes);
    return at >= (const char *)first && at < (const char *)first + bytes;
}

static void lend(const loom_request *request, const void *buffer, uint64_t bytes) {
    bool stack = on_stack(buffer);
    if (bytes <= (stack ? LOOM_COPIED_BYTES : FEW))
        return;
    loan made = {.first = buffer, .end = (const char *)buffer + bytes};
    loom__request_describe(request, made.of, sizeof made.of);
    pthread_mutex_lock(&lock);
    if (stack && !broken[0])
        snprintf(
            broken, sizeof broken, "a stack has %llu bytes that are lent to %s", (unsigned long long)bytes, made.of);
    if (loan_count < LOANS)
        loans[loan_count++] = made;
    pthread_mutex_unlock(&lock);
}

/* ---- a backend that lends ---- */

typedef struct lender {
    loom__backend backend; /* first: a group points to it */
    const loom__backend *threads;
    int64_t starts, fails_at; /* counted from 1; 0 = never */
} lender;

static loom_status start_and_fail(loom_request *request) {
    lender *l = (lender *)(uintptr_t)request->comm->backend;
    LOOM_TRY(l->threads->start(request));
    if (++l->starts == l->fails_at)
        loom__endpoint_fail(request->comm->endpoint, LOOM_ERR_COMM, "the network is down");
    return LOOM_OK;
}

static void release_and_lend(loom_request *request) {
    const lender *l = (const lender *)request->comm->backend;
    uint64_t in, out;
    loom__request_sizes(request, &in, &out);
    if (!request->done) {
        request->comm->endpoint->lent = true;
        lend(request, request->in, in);
        lend(request, request->out, out);
    }
    l->threads->release(request);
}

static void lend_from_now_on(loom_rank *rank, lender *l, int64_t fails_at) {
    loom__endpoint *endpoint = rank->endpoint;
    *l = (lender){*endpoint->backend, endpoint->backend, 0, fails_at};
    l->backend.start = start_and_fail;
    l->backend.release = release_and_lend;
    endpoint->backend = endpoint->world->backend = &l->backend;
}

/* ---- a run ---- */

typedef struct scene {
    const char *architecture;
    int tp, pp, vpp, cp, ep;
    bool distributed;
    const char *cp_comm_type;
} scene;

typedef struct job {
    const scene *s;
    char folder[400];
    int64_t fails_at, starts;
    lender lenders[RANKS];
} job;

typedef struct run {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_dataset dataset;
    loom_batches *batches;
} run;

static loom_model_config model_of(const scene *s) {
    loom_model_config config = loom_model_config_default(s->architecture);
    config.num_layers = 4;
    config.hidden_size = 32;
    config.ffn_hidden_size = 48;
    config.num_attention_heads = config.num_query_groups = 4;
    config.hidden_dropout = config.attention_dropout = 0;
    config.seq_length = SEQUENCE;
    config.vocab_size = VOCABULARY;
    config.make_vocab_size_divisible_by = 2;
    if (s->cp_comm_type)
        config.parallel.cp_comm_type[0] = s->cp_comm_type;
    if (s->ep == 0)
        return config;
    config.moe.num_moe_experts = 4;
    config.moe.moe_ffn_hidden_size = 24;
    config.moe.moe_router_score_function = "sigmoid";
    config.moe.moe_router_enable_expert_bias = true;
    config.moe.moe_router_load_balancing_type[0] = "seq_aux_loss";
    config.moe.moe_aux_loss_coeff[0] = 0.01;
    return config;
}

static loom_status set_up(loom_rank *rank, const scene *s, run *r) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_model_config model = model_of(s);
    loom_module *module;
    optim.lr = 0.01;
    io_config.parallel_load = true;
    const loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
    config.checkpoint_io = &io;
    config.tensor_model_parallel_size = s->tp;
    config.pipeline_model_parallel_size = s->pp;
    config.virtual_pipeline_model_parallel_size = s->vpp;
    config.context_parallel_size = s->cp;
    config.expert_model_parallel_size = s->ep ? s->ep : 1;
    config.sequence_parallel = s->tp > 1;
    config.ddp_config.bucket_size = 3000;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_param_gather = s->distributed;
    config.ddp_config.overlap_grad_reduce = true;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &r->fabric));
    LOOM_TRY(loom_fabric_launch(r->fabric));
    LOOM_TRY(loom_gpt_create(r->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->parallel, &optim, NULL, &r->optimizer));
    LOOM_TRY(loom_mock_dataset_create(SEQUENCE, VOCABULARY, 3, SAMPLES, &r->dataset));
    return s->ep ? loom_parallel_collect_router_statistics(r->parallel, true) : LOOM_OK;
}

static loom_status feed(run *r, loom_step_mode mode) {
    loom_batches_destroy(r->batches);
    r->batches = NULL;
    loom_dataloader loader = {.dataset = &r->dataset, .mode = mode, .micro_batch_size = 1, .global_batch_size = GLOBAL};
    return loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches);
}

static loom_status look_at_logits(void *context, const loom_batch *batch, int64_t vocabulary, const float *logits) {
    (void)context;
    (void)batch;
    (void)vocabulary;
    (void)logits;
    return LOOM_OK;
}

static loom_status look_at_tensor(
    void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    (void)context;
    (void)name;
    (void)dims;
    (void)shape;
    (void)values;
    return LOOM_OK;
}

static loom_status save_and_load(const job *j, run *r) {
    char path[500];
    loom_load_report report = {0};
    loom_state_item items[] = {
        {.key = "state_dict", .module = r->parallel}, {.key = "optimizer", .optimizer = r->optimizer}};
    snprintf(path, sizeof path, "%s/saved", j->folder);
    LOOM_TRY(loom_fabric_save(r->fabric, path, &(loom_state){items, 2}, NULL, 0));
    loom_status status = loom_fabric_load(r->fabric, path, &(loom_state){items, 2}, true, &report);
    loom_load_report_free(&report);
    return status;
}

static loom_status write_profile(loom_rank *rank, const job *j, const loom_profile *profile) {
    char path[500];
    snprintf(path, sizeof path, "%s/profile.json", j->folder);
    return loom_profile_write(path, loom_rank_world(rank), profile, 1);
}

static loom_status do_all(loom_rank *rank, const job *j, run *r) {
    loom_profile profile = {0};
    double loss;
    LOOM_TRY(set_up(rank, j->s, r));
    LOOM_TRY(feed(r, LOOM_TRAINING));
    LOOM_TRY(loom_profile_begin(rank));
    LOOM_TRY(loom_parallel_trace_begin(r->parallel, 1000));
    for (int step = 0; step < 2; step++) {
        LOOM_TRY(loom_parallel_training_step(r->parallel, r->batches, &loss));
        LOOM_TRY(loom_optimizer_step(r->optimizer, NULL));
    }
    LOOM_TRY(loom_parallel_trace_end(r->parallel, j->folder));
    LOOM_TRY(loom_profile_end(rank, &profile));
    loom_status status = write_profile(rank, j, &profile);
    loom_profile_free(&profile);
    LOOM_TRY(status);
    LOOM_TRY(loom_gpt_visit(r->parallel, true, look_at_tensor, NULL));
    LOOM_TRY(save_and_load(j, r));
    LOOM_TRY(feed(r, LOOM_PREDICT));
    return loom_parallel_predict_step(r->parallel, r->batches, look_at_logits, NULL);
}

static loom_status run_on_rank(loom_rank *rank, void *argument) {
    job *j = argument;
    int index = loom_rank_index(rank);
    run r = {0};
    lend_from_now_on(rank, &j->lenders[index], index == FAILING ? j->fails_at : 0);
    loom_status status = do_all(rank, j, &r);
    loom_batches_destroy(r.batches);
    loom_parallel_destroy(r.parallel);
    loom_fabric_destroy(r.fabric);
    loom_dataset_destroy(&r.dataset);
    if (index == FAILING)
        j->starts = j->lenders[index].starts;
    return status;
}

static void clear(const char *folder) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
}

/* The run with one operation of a rank failing, and then another; the stride meets each kind of them somewhere. */
static void every_failure_keeps_what_is_lent(const scene *s) {
    static job j;
    char made[] = MEGALOOM_BUILD "/lent-XXXXXX";
    int64_t lent = 0, starts = 1;
    loom_run_options options = test_options();
    j = (job){.s = s};
    assert_non_null(mkdtemp(made));
    for (int64_t fails_at = 0; fails_at <= starts; fails_at += STRIDE) {
        snprintf(j.folder, sizeof j.folder, "%s/%lld", made, (long long)fails_at);
        snprintf(broken, sizeof broken, "%s", "");
        j.fails_at = fails_at;
        char command[500];
        snprintf(command, sizeof command, "mkdir '%s'", j.folder);
        assert_int_equal(system(command), 0);
        loom_status status = loom_run_local(RANKS, run_on_rank, &j, &options);
        if (fails_at == 0 && status)
            fail_msg("%s", loom_error_message());
        if (fails_at == 0)
            starts = j.starts;
        if (fails_at > 0 && status == LOOM_OK)
            fail_msg("operation %lld has failed, and the run has not", (long long)fails_at);
        if (broken[0])
            fail_msg("where operation %lld fails, %s", (long long)fails_at, broken);
        lent += loan_count;
        loan_count = 0;
        clear(j.folder);
    }
    clear(made);
    assert_true(lent > starts / STRIDE);
}

static void with_tensor_and_data_ranks(void **state) {
    (void)state;
    every_failure_keeps_what_is_lent(&(scene){.architecture = "gpt2", .tp = 2, .pp = 1, .cp = 1, .distributed = true});
}

static void with_stages_and_data_ranks(void **state) {
    (void)state;
    every_failure_keeps_what_is_lent(&(scene){.architecture = "gpt2", .tp = 1, .pp = 2, .vpp = 2, .cp = 1});
}

static void with_context_and_expert_ranks(void **state) {
    (void)state;
    every_failure_keeps_what_is_lent(
        &(scene){.architecture = "mixtral", .tp = 1, .pp = 1, .cp = 2, .ep = 2, .distributed = true});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_tensor_and_data_ranks),
        cmocka_unit_test(with_stages_and_data_ranks),
        cmocka_unit_test(with_context_and_expert_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
