#!/usr/bin/env python3
"""Compares a model in Hugging Face's transformers with the same directory in Megaloom.

    tools/compare-transformers.py DIR TEXT [--megaloom build/megaloom] [--rows 8] [--length 128]

DIR is a Hugging Face directory (OUTPUT/model of a run, or what `megaloom export` made), TEXT a file whose bytes are the
tokens. Prints the mean loss of the same tokens in both, and ends with status 1 when they differ by 1e-5 or more. Needs
torch, transformers, safetensors and numpy, in a virtual environment outside the tree:

    python3 -m venv ~/venv && ~/venv/bin/pip install torch transformers safetensors numpy
    ~/venv/bin/python tools/compare-transformers.py build/demo/demo/model README.md
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

LIMIT = 1e-5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("text")
    parser.add_argument("--megaloom", default="build/megaloom")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("overrides", nargs="*", help="FIELD=VALUE for megaloom eval")
    return parser.parse_intermixed_args()


def tokens_of(given):
    import numpy

    count = given.rows * (given.length + 1)
    with open(given.text, "rb") as file:
        data = file.read(count)
    if len(data) < count:
        sys.exit(f"{given.text}: has {len(data)} bytes, {given.rows} rows of {given.length} + 1 need {count}")
    return numpy.frombuffer(data, dtype=numpy.uint8).astype(numpy.int64).reshape(given.rows, given.length + 1)


def loss_of_transformers(directory, tokens):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True)
    # A tensor that was not found would be made up, with no more than a warning.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            sys.exit(f"{directory}: {kind}: {sorted(map(str, report[kind]))}")
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), ids[:, 1:].flatten())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: "
          f"{type(model).__name__}, {parameters} parameters")
    return loss.item()


def loss_of_megaloom(given, tokens):
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokens.safetensors")
        save_file({"tokens": tokens}, path)
        command = [given.megaloom, "eval", "--hf", given.directory, "--tokens", path, *given.overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^loss (\S+) over", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not found:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return float(found.group(1))


def main():
    given = arguments()
    tokens = tokens_of(given)
    theirs, ours = loss_of_transformers(given.directory, tokens), loss_of_megaloom(given, tokens)
    difference = abs(theirs - ours)
    print(f"loss of {given.rows * given.length} tokens of {given.text}")
    print(f"  transformers  {theirs:.9f}")
    print(f"  megaloom      {ours:.9f}")
    print(f"  difference    {difference:.2e} (limit {LIMIT:.0e})")
    # Written so that a NaN fails.
    return 0 if difference < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
