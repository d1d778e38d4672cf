/* What the two files of the MPI backend share: the endpoint's state. */
#ifndef COMM_MPI_WORLD_H
#define COMM_MPI_WORLD_H

#include "comm/comm.h"

#if MEGALOOM_MPI
#include <mpi.h>

enum { LOOM__MPI_SCRATCHES = 8 };

typedef struct loom__mpi_scratch {
    void *memory;
    size_t bytes;
    bool used;
} loom__mpi_scratch;

typedef struct loom__mpi_world {
    MPI_Comm world, end; /* of the groups that every endpoint has */
    size_t chunk;
    size_t board_bytes;
    int *page_of;
    loom__mpi_scratch scratches[LOOM__MPI_SCRATCHES];
} loom__mpi_world;

extern const loom__backend loom__mpi_backend;

#endif
#endif
