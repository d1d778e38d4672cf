"""The `encode` of bench/data.c by the `tokenizers` package, on one core: one line of JSON of the same form.

    tokenizers_encode.py TOKENIZER.json TEXT

The faster of its two ways is taken: one document after another, and batches without offsets.
"""
import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer  # noqa: E402 (the package reads the variable)

BATCH = 1000


def one_by_one(tokenizer, documents):
    return sum(len(tokenizer.encode(document).ids) for document in documents)


def in_batches(tokenizer, documents):
    return sum(len(encoded.ids) for at in range(0, len(documents), BATCH)
               for encoded in tokenizer.encode_batch_fast(documents[at:at + BATCH]))


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    with open(sys.argv[2], encoding="utf-8", newline="") as file:
        text = file.read()
    documents = text.split("\n\n")
    if not documents[-1]:
        documents.pop()
    best = None
    for way in (one_by_one, in_batches):
        start = time.process_time()
        tokens = way(tokenizer, documents)
        seconds = time.process_time() - start
        best = seconds if best is None else min(best, seconds)
    print(json.dumps({"documents": len(documents), "bytes": len(text.encode()), "tokens": tokens,
                      "cpu_seconds": round(best, 4)}))


if __name__ == "__main__":
    main()
