#!/usr/bin/env python3
"""Records tiny Llama models with scaled rotary positions in the transformers package, as golden numbers for
tests/golden/hf.c: `linear`, and `llama3` with frequencies in all three of its branches (as they are, blended, divided).

    tools/record-rope.py [FOLDER]

FOLDER is the golden tree, tests/golden when not given. It writes FOLDER/hf/llama_rope_linear and
FOLDER/hf/llama_rope_blend: model/, io.safetensors (input_ids, labels, already shifted, logits, loss), grads.safetensors,
case.json. Needs torch, transformers and safetensors, in a virtual environment outside the tree.
"""
import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

CASES = {
    "llama_rope_linear": (201, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
    "llama_rope_blend": (202, {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}),
}
ROWS, LENGTH = 2, 48


def branches(config):
    """How many frequencies are kept, blended and divided."""
    rope, count = config.rope_parameters, [0, 0, 0]
    original = rope["original_max_position_embeddings"]
    for i in range(config.head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / config.head_dim)
        short, long = original / rope["high_freq_factor"], original / rope["low_freq_factor"]
        count[0 if wavelength < short else 2 if wavelength > long else 1] += 1
    return count


def record(root, name, seed, rope):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters=rope)
    if rope["rope_type"] == "llama3" and min(branches(config)) == 0:
        sys.exit(f"{name}: a branch has no frequency: {branches(config)}")
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 if parameter.dim() > 1
                            else 1 + 0.1 * torch.randn_like(parameter))
    tokens = torch.randint(0, config.vocab_size, (ROWS, LENGTH + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    labels[:, -1] = -100
    folder = root / "hf" / name
    model.save_pretrained(folder / "model")
    logits = model(ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    save_file({"input_ids": ids, "labels": labels, "logits": logits.detach().contiguous(),
               "loss": loss.detach().reshape(1)}, folder / "io.safetensors")
    save_file({key: parameter.grad.contiguous() for key, parameter in model.named_parameters()},
              folder / "grads.safetensors")
    (folder / "case.json").write_text(json.dumps(
        {"case": name, "class": "LlamaForCausalLM", "seed": seed, "batch": ROWS, "seq": LENGTH, "loss": loss.item(),
         "torch": torch.__version__, "transformers": transformers.__version__}, indent=1) + "\n")
    print(name, loss.item())


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "tests/golden")
    for name, (seed, rope) in CASES.items():
        record(root, name, seed, rope)


if __name__ == "__main__":
    main()
