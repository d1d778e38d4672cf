#!/usr/bin/env python3
"""Makes tests/golden/moe_biases: models with biased experts that the real Megatron-Core trains on the CPU.

    tools/make-moe-biases-golden.py [FOLDER]

For each case a model is filled with numbers (biases too, which training would begin at zero), saved by Megatron-Core's
dist_checkpointing, and trained for twenty steps on one rank. Beside the checkpoint lie what the model is in the words of
a run file, the losses and gradient norms of the steps, tokens, and the gradients of the first step. A case is refused
whose choice of experts hangs on rounding. Needs what tools/verify_with_megatron needs, which it builds on.
"""
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LOADER = importlib.machinery.SourceFileLoader("verify", os.path.join(HERE, "verify_with_megatron"))
verify = importlib.util.module_from_spec(importlib.util.spec_from_loader("verify", LOADER))
LOADER.exec_module(verify)

STEPS, BATCH, LENGTH, VOCABULARY, HIDDEN, HEADS = 20, 8, 16, 64, 16, 4
ADAM = {"lr": 1e-3, "min_lr": 1e-4, "wd": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": 1.0, "warmup": 2,
        "decay": 20}
LEAST_MARGIN = 5e-6
ROOM = {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"}
# Fields of experts have one name in Megatron-Core and in a run file.
CASES = {
    "two_experts": {"seed": 1, "architecture": "llama", "moe": {"moe_router_topk": 2}},
    "one_expert_weights_first": {
        "seed": 2, "architecture": "gpt2",
        "moe": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True, **ROOM}},
    "two_experts_padded": {
        "seed": 3, "architecture": "llama",
        "moe": {"moe_router_topk": 2, "moe_pad_expert_input_to_capacity": True, **ROOM}},
    "sigmoid_fp64_singleton_keys": {
        "seed": 4, "architecture": "llama", "singleton": True,
        "moe": {"moe_router_topk": 2, "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp64"}},
}


def make_model(case, torch):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    llama = case["architecture"] == "llama"
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=24, num_attention_heads=HEADS,
        num_query_groups=2 if llama else HEADS, normalization="RMSNorm" if llama else "LayerNorm",
        layernorm_epsilon=1e-5, add_bias_linear=True, gated_linear_unit=llama, hidden_dropout=0.0, attention_dropout=0.0,
        activation_func=torch.nn.functional.silu if llama
        else lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, attention_softmax_in_fp32=True,
        use_cpu_initialization=True, num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_load_balancing_type="none",
        **{"moe_token_dispatcher_type": "allgather", **case["moe"]})
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=4, normalization=config.normalization), VOCABULARY,
        max_sequence_length=LENGTH, parallel_output=True, share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute", rotary_base=10000)
    generator = torch.Generator().manual_seed(case["seed"])
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        norm = "layernorm" in name and name.endswith("weight")
        parameter.data.copy_(1 + 0.1 * drawn if norm else 0.2 * drawn)
    return config, model


def let_biases_be_added():
    """On one rank Megatron-Core 0.16.1 adds the bias in place to what a function of its own returned as it was given,
    which PyTorch refuses; a copy has the same numbers."""
    from megatron.core.tensor_parallel import layers
    reduce = layers.reduce_from_tensor_model_parallel_region
    layers.reduce_from_tensor_model_parallel_region = lambda *given, **named: reduce(*given, **named).clone()


def fields(case):
    """The model in the words of a run file."""
    llama = case["architecture"] == "llama"
    given = {"architecture": case["architecture"], "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 24,
             "num_attention_heads": HEADS, "num_query_groups": 2 if llama else HEADS, "vocab_size": VOCABULARY,
             "seq_length": LENGTH, "make_vocab_size_divisible_by": 1, "add_bias_linear": True,
             "share_embeddings_and_output_weights": not llama, "num_moe_experts": 4, "moe_ffn_hidden_size": 24,
             **case["moe"]}
    if llama:
        given["rotary_base"] = 10000
    else:
        given.update(hidden_dropout=0.0, attention_dropout=0.0, max_position_embeddings=LENGTH)
    return [f"model.{name}={json.dumps(value) if not isinstance(value, str) else value}"
            for name, value in given.items()]


def save(case, model, folder):
    from megatron.core import dist_checkpointing, parallel_state
    os.makedirs(folder)
    metadata = {"singleton_local_shards": case.get("singleton", False)}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    states = model.sharded_state_dict(prefix="", metadata=dict(metadata, dp_cp_group=group))
    dist_checkpointing.save(states, folder, content_metadata=metadata)


def margins_of(module, logits, torch):
    """By how much the last expert of a token is before the next one, and the last token that finds room at an expert
    before the next one."""
    config, k = module.config, module.topk
    logits = logits.detach().double().view(-1, logits.shape[-1])
    best, chosen = logits.topk(k + 1)
    found = [float((best[:, k - 1] - best[:, k]).min())]
    if config.moe_expert_capacity_factor:
        kept = torch.full_like(logits, float("-inf")).scatter(1, chosen[:, :k], best[:, :k])
        weights = logits.softmax(1) * kept.isfinite() if config.moe_router_pre_softmax else kept.softmax(1)
        room = int(-(-k * logits.shape[0] * config.moe_expert_capacity_factor // logits.shape[1]))
        ordered = weights.sort(0, descending=True).values
        found += [float(last - behind) for last, behind in ordered[room - 1:room + 1].T.tolist() if behind > 0]
    return found


def watch(model, margins, torch):
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            def seen(logits, *more, module=module, routing=module.routing, **named):
                margins.extend(margins_of(module, logits, torch))
                return routing(logits, *more, **named)

            module.routing = seen


def train(case, torch, config, model):
    from megatron.core.pipeline_parallel import get_forward_backward_func
    verify.OPTIMIZER.update(lr=ADAM["lr"], min_lr=ADAM["min_lr"], weight_decay=ADAM["wd"])
    wrapped, optimizer, schedule = verify.make_optimizer(
        {"form": None, "precision": "32"}, config, [model], torch.float32)
    generator = torch.Generator().manual_seed(100 + case["seed"])
    tokens = torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=generator)
    # Where a sequence begins with a token twice, both have the same weights, and either may find room.
    tokens[..., 1] += tokens[..., 1] == tokens[..., 0]
    tokens %= VOCABULARY
    positions = torch.arange(LENGTH).expand(1, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward(rows, part):
        row = next(rows)
        out = part(row[:, :-1].contiguous(), positions, mask, labels=row[:, 1:].contiguous())
        return out, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    numbers, gradients = {"loss": [], "grad_norm": [], "lr": []}, {}
    for step in range(STEPS):
        wrapped[0].zero_grad_buffer()
        optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(tokens[step].split(1)), model=wrapped[0],
            num_microbatches=BATCH, seq_length=LENGTH, micro_batch_size=1, forward_only=False)
        if step == 0:
            gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        numbers["lr"].append(optimizer.param_groups[0]["lr"])
        _, norm, _ = optimizer.step()
        schedule.step(1)
        numbers["loss"].append(sum(float(part["loss"]) for part in parts) / BATCH)
        numbers["grad_norm"].append(float(norm))
    return tokens, numbers, gradients


def make(rank, world, port, name, folder):
    with verify.OnTheCpu():
        import torch
        from safetensors.torch import save_file
        case = CASES[name]
        verify.join(rank, world, port, {"tp": 1, "pp": 1, "vpp": 0, "ep": 1, "etp": 1})
        torch.manual_seed(case["seed"])
        let_biases_be_added()
        config, model = make_model(case, torch)
        margins = []
        watch(model, margins, torch)
        os.makedirs(folder)
        save(case, model, os.path.join(folder, "iter_0000000"))
        tokens, numbers, gradients = train(case, torch, config, model)
        if min(margins) < LEAST_MARGIN:
            raise RuntimeError(f"{name}: a choice hangs on a difference of {min(margins):.1e}; give another seed")
        save_file({"tokens": tokens.int(), **{f"grad.{key}": value.contiguous() for key, value in gradients.items()}},
                  os.path.join(folder, "numbers.safetensors"))
        with open(os.path.join(folder, "case.json"), "w", encoding="utf-8") as file:
            json.dump({"fields": fields(case), "global_batch": BATCH, "micro_batch": 1, "optimizer": ADAM,
                       "least_margin": min(margins), **numbers}, file, indent=1)
        print(name, numbers["loss"][0], numbers["loss"][-1], f"margin {min(margins):.1e}", flush=True)


def main():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import megatron.core.models.gpt  # before it is told of no GPU, and before the processes part
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    to = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "tests", "golden", "moe_biases")
    for name in CASES:
        folder = os.path.join(to, name)
        shutil.rmtree(folder, ignore_errors=True)
        verify.launch(make, 1, name, folder)


if __name__ == "__main__":
    main()
