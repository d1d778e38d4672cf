#!/usr/bin/env python3
"""Records what the transformers package generates greedily, as golden numbers for tests/golden/generate.c.

    tools/record-generation.py [FOLDER]

FOLDER is the golden tree, tests/golden when not given. It writes FOLDER/generate/<case>.json for each decoder-only model
FOLDER/hf/<case>/model, and makes the model FOLDER/generate/bytes, whose vocabulary is that of the byte tokenizer. Needs
torch and transformers, in a virtual environment outside the tree.

A case: model (its folder, from FOLDER), prompts [rows][length], tokens [rows][made], all greedy; margin: the smallest
difference between the best and the second logit on the way, so that one sees that rounding decides nothing.
"""
import json
import pathlib
import sys

import torch
import transformers

TOKENS = 24
LENGTHS = (1, 7)  # of the prompts of the two batches
ROWS = 2
MARGIN = 1e-3  # a hundred times the rounding of fp32 logits of this size


def continue_greedily(model, prompts):
    """The tokens with the package's own cache, and the smallest margin by a forward over everything."""
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                         min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        logits = model(out).logits[:, ids.shape[1] - 1:-1].double()
    best = logits.topk(2).values
    made = out[:, ids.shape[1]:]
    if not torch.equal(logits.argmax(-1), made):
        sys.exit("the package's cache and a forward over everything disagree")
    return made.tolist(), float((best[..., 0] - best[..., 1]).min())


def record(root, folder, case):
    model = transformers.AutoModelForCausalLM.from_pretrained(root / folder, dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    batches = []
    generator = torch.Generator().manual_seed(sum(case.encode()))
    for length in LENGTHS:
        for _ in range(1000):
            prompts = torch.randint(0, model.config.vocab_size, (ROWS, length), generator=generator).tolist()
            tokens, margin = continue_greedily(model, prompts)
            if margin >= MARGIN:
                break
        else:
            sys.exit(f"{case}: no prompt of length {length} with a margin of {MARGIN}")
        batches.append({"prompts": prompts, "tokens": tokens, "margin": margin})
    path = root / "generate" / f"{case}.json"
    head = json.dumps({"model": folder, "transformers": transformers.__version__, "torch": torch.__version__})
    lines = ",\n ".join(json.dumps(batch) for batch in batches)
    path.write_text(f'{head[:-1]}, "batches": [\n {lines}]}}\n')
    print(case, [batch["margin"] for batch in batches])


def make_bytes_model(folder):
    torch.manual_seed(7)
    config = transformers.GPT2Config(vocab_size=257, n_positions=96, n_embd=32, n_layer=2, n_head=4,
                                     bos_token_id=256, eos_token_id=256, initializer_range=0.3)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "tests/golden")
    torch.set_num_threads(1)
    (root / "generate").mkdir(exist_ok=True)
    make_bytes_model(root / "generate/bytes")
    record(root, "generate/bytes", "bytes")
    for path in sorted((root / "hf").glob("*/model")):
        case = path.parent.name
        if not case.startswith("t5"):
            record(root, f"hf/{case}/model", case)


main()
