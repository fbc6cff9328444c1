"""Activations, the optimizer's state and float32 masters of a bfloat16 model on the disk.

    python docs/examples/float32_masters.py DIRECTORY

Steps that are smaller than the last bit of a bfloat16 weight are not lost: the masters have them.
Of each, the disk holds what the weight does not say: `docs/guides/weights-and-optimizer.md`.
"""

import sys

import torch
from torch import nn

import ssdtrain

WIDTH, LAYERS = 512, 8

if len(sys.argv) != 2:
    sys.exit("usage: python float32_masters.py DIRECTORY")
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
model = nn.Sequential(*layers).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ssdtrain.offload_optimizer(optimizer, sys.argv[1], buffer_bytes="8MiB", master_dtype=torch.float32)
with ssdtrain.offload(sys.argv[1]) as session:
    for step in range(3):
        x = torch.randn(4096, WIDTH).bfloat16()
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
weight = model[0][0].weight
master = optimizer.state[weight]["master_weight"]
stats = optimizer.offload_stats
count = sum(param.numel() for param in model.parameters())
print(session)
print(f"{(master - weight).abs().max().item():.1e} lie between a master and its weight at most")
print(f"{stats.written_bytes / stats.step_count / count:.2f} bytes of each parameter in a step")
