"""The model `small` of bench/train.c in Megatron-Core on gloo: TP=2 with sequence parallelism, one thread a rank, fp32.

    megatron_train.py small STEPS

Needs torch and megatron-core in its environment; no GPU. Megatron-Core asks for CUDA in places that a CPU can serve:
those few calls are answered here, and nothing of the model, its communication or its loss is replaced but the norm,
whose own class refuses sequence parallelism without Apex. Prints one line of JSON like torch_train.py.
"""
import json
import logging
import os
import socket
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import torch
import torch.multiprocessing as processes

WARM_UP, RANKS = 2, 2
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, MICROBATCH = 6, 384, 6, 8192, 256, 8


def on_cpu(function):
    def call(*arguments, **named):
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*arguments, **named)
    return call


torch.cuda.current_device = lambda: "cpu"
torch.cuda.device_count = lambda: 1
torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
for name in ("tensor", "zeros", "ones", "empty", "arange", "rand", "randn"):
    setattr(torch, name, on_cpu(getattr(torch, name)))

import megatron.core.tensor_parallel.random as megatron_random
megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm


def make_norm(cls, config, hidden_size, eps=1e-5, **_):
    """torch's LayerNorm, its parameters marked as Megatron's sum over the tensor-parallel ranks expects."""
    norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


WrappedTorchNorm.__new__ = make_norm


def peak_of_process():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def train(rank, port, steps):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=4 * HIDDEN,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=RANKS, sequence_parallel=True,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, persist_layer_norm=False,
        masked_softmax_fusion=False, bias_activation_fusion=True, bias_dropout_fusion=True, activation_func=torch.nn.functional.gelu)
    model = GPTModel(
        config, gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    positions = torch.arange(SEQUENCE).expand(MICROBATCH, SEQUENCE)
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (MICROBATCH, SEQUENCE + 1), generator=generator)
        torch.distributed.barrier()
        start = time.monotonic()
        model.zero_grad_buffer()
        loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([model])
        square = torch.zeros(())
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
            if rank == 0 or getattr(parameter, "tensor_model_parallel", False):
                square += parameter.grad.norm() ** 2
        torch.distributed.all_reduce(square)
        factor = min(1.0, 1.0 / (square.sqrt().item() + 1e-6))
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], factor)
        optimizer.step()
        value = loss.item()
        torch.distributed.barrier()
        seconds.append(time.monotonic() - start)
    peak = torch.tensor(float(peak_of_process()))
    torch.distributed.all_reduce(peak)
    step = statistics.median(seconds[WARM_UP:])
    if rank == 0:
        import megatron.core
        print(json.dumps({
            "program": "megatron-core " + megatron.core.__version__, "model": "small", "ranks": RANKS, "threads": 1,
            "steps": steps, "loss": value, "step_seconds": step, "tokens_per_second": MICROBATCH * SEQUENCE / step,
            "process_peak_bytes": peak.item()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "small":
        sys.exit(__doc__)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    processes.start_processes(train, args=(port, int(sys.argv[2])), nprocs=RANKS, start_method="fork")
