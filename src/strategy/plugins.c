/* The one working default of each plug-in. */
#include "strategy/strategy.h"
#include <stdio.h>

/* ---- accelerator ---- */

static loom_status cpu_setup(void *context, loom_rank *rank, int device) {
    (void)context;
    (void)rank;
    (void)device;
    return LOOM_OK;
}

static loom_status cpu_tune(void *context, loom_rank *rank, char *text, size_t bytes) {
    (void)context;
    int threads = loom_team_size(loom_rank_team(rank));
    snprintf(text, bytes, "cpu: kernels %s, %d compute thread%s a rank, denormals flushed to zero",
        loom_rank_kernels(rank)->name, threads, threads == 1 ? "" : "s");
    return LOOM_OK;
}

const loom_accelerator *loom_accelerator_cpu(void) {
    static const loom_accelerator cpu = {"cpu", NULL, cpu_setup, NULL, cpu_tune};
    return &cpu;
}

/* ---- cluster environment ---- */

static bool rank_external(void *context, loom_rank *rank) {
    int size = 0;
    (void)context;
    (void)rank;
    return loom_mpi_launched(&size);
}

static int rank_world_size(void *context, loom_rank *rank) {
    (void)context;
    return loom_rank_count(rank);
}

static int rank_global_rank(void *context, loom_rank *rank) {
    (void)context;
    return loom_rank_index(rank);
}

static int rank_local_rank(void *context, loom_rank *rank) {
    (void)context;
    return loom_rank_local_index(rank);
}

/* Launchers place ranks node by node; with equal nodes this is the node's number. */
static int rank_node_rank(void *context, loom_rank *rank) {
    (void)context;
    return loom_rank_index(rank) / loom_rank_local_count(rank);
}

/* Nothing listens: ranks find each other through the launcher, or are threads of one process. */
static const char *rank_main_address(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return NULL;
}

static int rank_main_port(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return 0;
}

const loom_cluster_environment *loom_cluster_environment_rank(void) {
    static const loom_cluster_environment environment = {"rank", NULL, rank_external, rank_world_size, rank_global_rank,
        rank_local_rank, rank_node_rank, rank_main_address, rank_main_port};
    return &environment;
}

/* ---- precision ---- */

const loom_precision_plugin *loom_precision_plugin_fp32(void) {
    static const loom_precision_plugin fp32 = {.name = "32"};
    return &fp32;
}

/* ---- loss ---- */

static loom_status masked_forward(void *context, const loom_batch *batch, const loom_tensor *losses, float seed,
    double *sum, double *weight, loom_tensor *d_losses) {
    (void)context;
    const float *loss = loom_tensor_f32(losses);
    for (int64_t t = 0; t < batch->s; t++)
        for (int64_t j = 0; j < batch->b; j++) {
            float mask = batch->loss_mask[j * batch->s + t];
            int64_t at = t * batch->b + j;
            if (mask != 0) {
                *sum += (double)mask * (double)loss[at];
                *weight += (double)mask;
            }
            if (d_losses)
                loom_tensor_f32(d_losses)[at] = mask * seed;
        }
    return LOOM_OK;
}

static loom_status masked_reduce(void *context, loom_comm *group, double *sum, double *weight, double *loss) {
    (void)context;
    double pair[2] = {*sum, *weight};
    LOOM_TRY(loom_all_reduce(group, pair, pair, 2, LOOM_F64, LOOM_SUM));
    *sum = pair[0];
    *weight = pair[1];
    *loss = pair[1] > 0 ? pair[0] / pair[1] : 0;
    return LOOM_OK;
}

const loom_loss_reduction *loom_loss_reduction_masked_token(void) {
    static const loom_loss_reduction reduction = {NULL, masked_forward, masked_reduce};
    return &reduction;
}
