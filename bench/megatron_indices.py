"""The three indices of a GPT dataset, by Megatron-Core and by bench_indices, in turns.

    megatron_indices.py BENCH_INDICES [DOCUMENTS [SEQUENCE_LENGTH [ROUNDS]]]

Megatron-Core's functions are those that its GPTDataset calls, in their order. Both sides are timed by processor time,
each the median of its rounds; what they build is compared by sums. Needs megatron-core and torch.
"""
import json
import statistics
import subprocess
import sys
import time

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index


def build(lengths, documents, s, epochs, tokens):
    state = numpy.random.RandomState(1234)
    start = time.process_time()
    document_index = _build_document_index(documents, epochs, state, False)
    sample_index = helpers.build_sample_idx(lengths, document_index, s, epochs, tokens, True, 1)
    samples = sample_index.shape[0] - 1
    shuffle_index = _build_shuffle_index(samples, samples, state)
    return time.process_time() - start, document_index, sample_index, shuffle_index


def weighted_sum(values):
    values = values.astype(numpy.uint64)
    return int((numpy.arange(1, len(values) + 1, dtype=numpy.uint64) * values).sum())


def main():
    program = sys.argv[1]
    count, s, rounds = (int(sys.argv[i]) if len(sys.argv) > i else preset
                        for i, preset in ((2, 2_800_000), (3, 2048), (4, 5)))
    number = numpy.arange(count, dtype=numpy.uint64)
    lengths = (1 + (number * 2654435761 % 2**32) % 355).astype(numpy.int32)
    documents = numpy.arange(count, dtype=numpy.int32)
    tokens = int(lengths.sum(dtype=numpy.int64))
    for epochs in (1, 2, 4):
        theirs, ours = [], []
        for _ in range(rounds):
            seconds, *indices = build(lengths, documents, s, epochs, tokens)
            theirs.append(seconds)
            done = subprocess.run([program, str(count), str(s), str(epochs), "1"], check=True, stdout=subprocess.PIPE)
            result = json.loads(done.stdout)
            ours.append(result["seconds"])
        sums = [weighted_sum(indices[0]), weighted_sum(indices[1].astype(numpy.int64).sum(axis=1)),
                weighted_sum(indices[2])]
        if sums != result["sums"]:
            sys.exit(f"megatron_indices: {epochs} epochs: the indices differ: {sums}, {result['sums']}")
        a, b = statistics.median(theirs), statistics.median(ours)
        print(f"{epochs} epochs of {tokens} tokens, {len(indices[2])} samples: "
              f"Megatron-Core {a * 1e3:.0f} ms, Megaloom {b * 1e3:.0f} ms: {a / b:.1f} times faster", flush=True)


main()
