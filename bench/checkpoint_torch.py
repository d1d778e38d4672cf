"""torch.distributed.checkpoint on the tensors of bench_checkpoint: save (flushed) and load (files dropped from the page
cache before), one process.

    python bench/checkpoint_torch.py [MIB [ROUNDS [FOLDER]]]     (2048, 3, .)
"""

import os
import shutil
import statistics
import sys
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

TENSORS, WRITERS = 24, 2


def drop_caches(folder):
    for name in os.listdir(folder):
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(mib=2048, rounds=3, parent="."):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    elements = mib * 2**20 // (TENSORS * 4)
    state = {f"rank0.tensor{i:02}": torch.arange(elements, dtype=torch.float32) for i in range(TENSORS)}
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    folder = os.path.join(parent, f"torch-checkpoint-{os.getpid()}")
    seconds = {"save": [], "load": []}
    try:
        for _ in range(rounds):
            start = time.monotonic()
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, thread_count=WRITERS)
            dcp.save(state, storage_writer=writer, no_dist=True)
            seconds["save"].append(time.monotonic() - start)
            drop_caches(folder)
            start = time.monotonic()
            dcp.load(copy, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            seconds["load"].append(time.monotonic() - start)
            assert all(torch.equal(copy[name], state[name]) for name in state)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"torch {torch.__version__}, {mib} MiB, medians of {rounds} rounds")
    for kind, times in seconds.items():
        median = statistics.median(times)
        print(f"{kind}  {mib * 1.048576 / median:8.0f} MB/s  {median:.2f} s")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*[int(text) for text in given[:2]], *given[2:3])
