#!/usr/bin/env python3
"""Makes the tiny Qwen models with experts of tests/golden/hf, and records their logits, losses and gradients.

    tools/make-qwen-moe-golden.py [FOLDER]

FOLDER is tests/golden/hf when not given; what the files of FOLDER/<case> hold, FOLDER/README.md says. Needs torch,
transformers and safetensors, in a virtual environment outside the tree.
"""
import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, num_experts=8, moe_intermediate_size=16, bos_token_id=1, eos_token_id=2)
CASES = {
    "qwen2_moe": dict(seed=201, model="Qwen2Moe", num_hidden_layers=2, num_experts_per_tok=4, norm_topk_prob=False,
                      shared_expert_intermediate_size=24, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2_moe_dense_layers": dict(seed=202, model="Qwen2Moe", num_hidden_layers=4, num_experts_per_tok=2,
                                   norm_topk_prob=True, shared_expert_intermediate_size=24, decoder_sparse_step=2,
                                   mlp_only_layers=[0, 1], qkv_bias=False, tie_word_embeddings=True),
    "qwen3_moe": dict(seed=203, model="Qwen3Moe", num_hidden_layers=2, num_experts_per_tok=3, norm_topk_prob=True,
                      head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_moe_dense_layers": dict(seed=204, model="Qwen3Moe", num_hidden_layers=2, num_experts_per_tok=2,
                                   norm_topk_prob=False, mlp_only_layers=[0], attention_bias=True, head_dim=8,
                                   tie_word_embeddings=True),
}
ROWS, LENGTH = 2, 32
MARGIN = 2e-3  # between the last expert chosen and the first that is not, in logits


def fill(model, generator):
    """Every term matters: norms and biases too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.12 * noise)
            if ".mlp.gate." in name or "shared_expert_gate" in name:
                parameter.mul_(3)


def names_in_file(name, value):
    """The parameters in memory -> those of the file, where each expert's gate and up stand alone."""
    prefix, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for expert, both in enumerate(value):
            gate, up = both.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
    elif last == "down_proj":
        for expert, down in enumerate(value):
            yield f"{prefix}.{expert}.down_proj.weight", down
    else:
        yield name, value


def run(model, ids, labels):
    """Logits, loss, gradients and the smallest margin of a routing."""
    margins = []

    def look(module, _, output):
        best = output[0].topk(module.top_k + 1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())

    hooks = [module.register_forward_hook(look) for name, module in model.named_modules()
             if type(module).__name__.endswith("TopKRouter")]
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    valid = labels >= 0
    loss = torch.nn.functional.cross_entropy(logits[valid], labels[valid], reduction="sum") / valid.sum()
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gradients.update(names_in_file(name, gradient))
    return logits.detach(), loss.detach(), gradients, min(margins)


def largest(a, b):
    return float((a.double() - b.double()).abs().max())


def make(folder, case, given):
    given = dict(given)
    seed, name = given.pop("seed"), given.pop("model")
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **given})
    generator = torch.Generator().manual_seed(seed)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    fill(made, generator)
    made.tie_weights()
    made.save_pretrained(folder / case / "model")

    def load(dtype):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder / case / "model", dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()

    model, wide = load(torch.float32), load(torch.float64)
    for _ in range(1000):
        ids = torch.randint(3, config.vocab_size, (ROWS, LENGTH), generator=generator)
        labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], 1)
        logits, loss, gradients, margin = run(model, ids, labels)
        if margin >= MARGIN:
            break
    else:
        sys.exit(f"{case}: no tokens whose routing has a margin of {MARGIN}")
    logits64, loss64, gradients64, _ = run(wide, ids, labels)
    on_disk = safetensors.torch.load_file(folder / case / "model" / "model.safetensors")
    gradients = {name: value.contiguous() for name, value in gradients.items() if name in on_disk}
    if set(gradients) != set(on_disk):
        sys.exit(f"{case}: no gradient of {sorted(set(on_disk) - set(gradients))}")
    safetensors.torch.save_file({"input_ids": ids, "labels": labels, "logits": logits, "loss": loss.reshape(1),
                                 "loss_f64run": loss64.reshape(1)}, folder / case / "io.safetensors")
    safetensors.torch.save_file(gradients, folder / case / "grads.safetensors")
    facts = {
        "case": case, "class": type(model).__name__, "seed": seed, "batch": ROWS, "seq": LENGTH,
        "weights_dtype": "float32", "compute": "fp32 (weights read from disk)", "loss": loss.item(),
        "loss_f64run": loss64.item(), "n_target_tokens": int((labels >= 0).sum()),
        "max_abs_diff_f32_vs_f64run": {
            "logits": largest(logits, logits64), "loss": abs(loss.item() - loss64.item()),
            "grads": max(largest(gradients[name], gradients64[name]) for name in gradients)},
        "max_abs": {"logits": float(logits.abs().max()), "grads": max(float(g.abs().max()) for g in gradients.values())},
        "grad_l2_norm": float(sum((g.double() ** 2).sum() for g in gradients.values()) ** 0.5),
        "torch": torch.__version__, "transformers": transformers.__version__, "router_min_topk_margin": margin,
        "params": {name: list(value.shape) for name, value in sorted(on_disk.items())},
    }
    (folder / case / "case.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"| {case} | {facts['class']} | h{config.hidden_size} L{config.num_hidden_layers} "
          f"heads{config.num_attention_heads}/{config.num_key_value_heads}kv V{config.vocab_size} seq{LENGTH} float32 | "
          f"{facts['loss']:.6f} | {facts['max_abs_diff_f32_vs_f64run']['logits']:.1e} | "
          f"{facts['max_abs_diff_f32_vs_f64run']['grads']:.1e} | {facts['max_abs']['grads']:.2f} |")


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/hf")
    torch.set_num_threads(1)
    for case, given in CASES.items():
        make(folder, case, given)


if __name__ == "__main__":
    main()
