/* What it gains that a shared expert is computed while rows travel: training steps of the same model with and without,
 * taking turns in one process, on ranks that are threads of this process or, under mpirun, processes.
 *
 *     bench_shared_expert [--ranks N] [--rounds N] [--hidden N] [--shared N] [--tokens N]
 *     mpirun -n N bench_shared_expert …
 *
 * A model of four layers of eight experts, two for each token, over all ranks. `step` is the median of a step's time,
 * `processor` of the processor time of this process in it, `waited` of the time that rank 0 was in exchanges of rows:
 * for the transfer, and for ranks that come later. `with / without` is the median of each round's quotient. */
#include "measure.h"
#include <megaloom/megaloom.h>
#include <stdio.h>
#include <string.h>

enum { WARM_UP = 2, MOST_ROUNDS = 400, WAYS = 2, STEP = 0, PROCESSOR, WAITED, FIGURES };

typedef struct bench {
    int64_t ranks, rounds, hidden, shared, tokens;
    double seconds[WAYS][FIGURES][MOST_ROUNDS];
} bench;

typedef struct run {
    loom_fabric *fabric;
    loom_parallel *model;
    loom_batches *batches;
    loom_dataset dataset;
    double loss;
} run;

static loom_status set_up(loom_rank *rank, const bench *b, bool overlap, run *r) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_model_config model = loom_model_config_default("mixtral");
    loom_module *module;
    strategy.expert_model_parallel_size = loom_rank_count(rank);
    model.num_layers = 4;
    model.hidden_size = model.ffn_hidden_size = b->hidden;
    model.num_attention_heads = model.num_query_groups = 8;
    model.seq_length = b->tokens;
    model.vocab_size = 512;
    model.moe.num_moe_experts = 8;
    model.moe.moe_shared_expert_intermediate_size = b->shared;
    model.moe.moe_token_dispatcher_type = "alltoall";
    model.moe.moe_shared_expert_overlap = overlap;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &r->fabric));
    LOOM_TRY(loom_fabric_launch(r->fabric));
    LOOM_TRY(loom_gpt_create(r->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->model));
    LOOM_TRY(loom_mock_dataset_create(b->tokens, 512, 1, 64 * loom_rank_count(rank), &r->dataset));
    loom_dataloader loader = {
        .dataset = &r->dataset, .micro_batch_size = 1, .global_batch_size = loom_rank_count(rank)};
    return loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches);
}

static void tear_down(run *r) {
    loom_batches_destroy(r->batches);
    loom_parallel_destroy(r->model);
    loom_dataset_destroy(&r->dataset);
    loom_fabric_destroy(r->fabric);
}

static loom_status step(loom_rank *rank, run *r, double figures[FIGURES]) {
    loom_profile profile;
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    LOOM_TRY(loom_profile_begin(rank));
    double start = seconds_of(CLOCK_MONOTONIC), start_processor = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    LOOM_TRY(loom_parallel_training_step(r->model, r->batches, &r->loss));
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    figures[STEP] = seconds_of(CLOCK_MONOTONIC) - start;
    figures[PROCESSOR] = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start_processor;
    LOOM_TRY(loom_profile_end(rank, &profile));
    figures[WAITED] = 0;
    for (int64_t i = 0; i < profile.count; i++)
        if (strcmp(profile.entries[i].group, "ep") == 0)
            figures[WAITED] += profile.entries[i].seconds;
    loom_profile_free(&profile);
    return LOOM_OK;
}

static loom_status take_turns(loom_rank *rank, bench *b, run *runs) {
    for (int64_t round = -WARM_UP; round < b->rounds; round++)
        for (int turn = 0; turn < WAYS; turn++) {
            int way = round % 2 ? turn : WAYS - 1 - turn;
            double figures[FIGURES];
            LOOM_TRY(step(rank, &runs[way], figures));
            for (int f = 0; f < FIGURES && round >= 0 && loom_rank_index(rank) == 0; f++)
                b->seconds[way][f][round] = figures[f];
        }
    return runs[0].loss == runs[1].loss
               ? LOOM_OK
               : loom_fail(LOOM_ERR_INTERNAL, "losses of %.9g and %.9g", runs[0].loss, runs[1].loss);
}

static void print(bench *b, int ranks) {
    static const char *const names[FIGURES] = {"step", "processor", "waited"};
    printf("%d ranks, hidden %lld, shared expert %lld, %lld tokens each, medians of %lld\n%-10s %10s %10s  %s\n", ranks,
        (long long)b->hidden, (long long)b->shared, (long long)b->tokens, (long long)b->rounds, "ms", "without", "with",
        "with / without");
    for (int f = 0; f < FIGURES; f++) {
        double quotient[MOST_ROUNDS];
        for (int64_t i = 0; i < b->rounds; i++)
            quotient[i] = b->seconds[1][f][i] / b->seconds[0][f][i];
        printf("%-10s %10.2f %10.2f  %.3f\n", names[f], 1e3 * median(b->seconds[0][f], b->rounds),
            1e3 * median(b->seconds[1][f], b->rounds), median(quotient, b->rounds));
    }
}

static loom_status measure(loom_rank *rank, void *argument) {
    bench *b = argument;
    run runs[WAYS] = {{0}};
    loom_status status = set_up(rank, b, false, &runs[0]);
    if (!status)
        status = set_up(rank, b, true, &runs[1]);
    if (!status)
        status = take_turns(rank, b, runs);
    if (!status && loom_rank_index(rank) == 0)
        print(b, loom_rank_count(rank));
    tear_down(&runs[0]);
    tear_down(&runs[1]);
    return status;
}

int main(int argc, char **argv) {
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return EXIT_FAILURE;
    b->ranks = 2;
    b->rounds = 20;
    b->hidden = b->tokens = 512;
    b->shared = 1024;
    const struct {
        const char *name;
        int64_t *to, most;
    } options[] = {{"--ranks", &b->ranks, 8}, {"--rounds", &b->rounds, MOST_ROUNDS}, {"--hidden", &b->hidden, 8192},
        {"--shared", &b->shared, 1 << 16}, {"--tokens", &b->tokens, 1 << 16}};
    bool understood = argc % 2 == 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        size_t option = 0;
        while (option < sizeof options / sizeof *options && strcmp(options[option].name, argv[i]) != 0)
            option++;
        understood = understood && option < sizeof options / sizeof *options;
        if (!understood)
            break;
        *options[option].to = atoll(argv[i + 1]);
        understood = *options[option].to >= 1 && *options[option].to <= options[option].most;
    }
    if (!understood) {
        fprintf(stderr,
            "usage: bench_shared_expert [--ranks N, at most 8] [--rounds N, at most %d] [--hidden N] "
            "[--shared N] [--tokens N]\n",
            MOST_ROUNDS);
        free(b);
        return 2;
    }
    loom_run_options options_of_run = loom_run_options_default();
    options_of_run.threads = 1;
    loom_status status = loom_mpi_launched(NULL) ? loom_run_mpi(measure, b, &options_of_run)
                                                 : loom_run_local((int)b->ranks, measure, b, &options_of_run);
    if (status)
        fprintf(stderr, "bench_shared_expert: %s\n", loom_error_message());
    free(b);
    return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
