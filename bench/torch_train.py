"""The models of bench/train.c in PyTorch eager, two threads, fp32: one line of JSON of the same form.

    torch_train.py small|gpt2 STEPS

The first two steps warm up and are left out; a step's time is the median of the others.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

WARM_UP = 2
MODELS = {  # layers, hidden, heads, vocabulary, positions, microbatch
    "small": (6, 384, 6, 8192, 256, 8),
    "gpt2": (12, 768, 12, 50257, 1024, 4),
}
SEQUENCE = 256


class Layer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, hidden, heads, vocabulary, positions):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.words.weight.t()  # the head is tied
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def peak_of_process():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(__doc__)
    name, steps = sys.argv[1], int(sys.argv[2])
    layers, hidden, heads, vocabulary, positions, microbatch = MODELS[name]
    torch.manual_seed(1)
    torch.set_num_threads(2)
    model = GPT(layers, hidden, heads, vocabulary, positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds, processor = [], []
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (microbatch, SEQUENCE + 1))
        start, start_processor = time.monotonic(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        seconds.append(time.monotonic() - start)
        processor.append(time.process_time() - start_processor)
    step = statistics.median(seconds[WARM_UP:])
    print(json.dumps({
        "program": "torch " + torch.__version__, "model": name, "ranks": 1, "threads": torch.get_num_threads(),
        "steps": steps, "loss": value, "step_seconds": step,
        "tokens_per_second": microbatch * SEQUENCE / step,
        "processor_seconds": statistics.median(processor[WARM_UP:]),
        "process_peak_bytes": peak_of_process()}), flush=True)
    os._exit(0)  # its threads need not be joined


main()
