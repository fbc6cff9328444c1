"""Weights, activations and the optimizer's state on the same disks, under one bound on memory.

    python docs/examples/one_bound.py DIRECTORY

Without ssdtrain this step keeps 24 MiB of activations, 8 MiB of state and 4 MiB of weights in
memory. Here all of them go through 8 MiB, and the report tells what each of them has of it.
"""

import sys

import torch
from torch import nn

import ssdtrain

WIDTH, LAYERS = 256, 16

if len(sys.argv) != 2:
    sys.exit("usage: python one_bound.py DIRECTORY")
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with ssdtrain.offload(sys.argv[1], max_resident_bytes="8MiB") as session:
    ssdtrain.offload_parameters(model, session, max_resident_bytes="1MiB")
    ssdtrain.offload_optimizer(optimizer, session)
    for step in range(3):
        x = torch.randn(1536, WIDTH)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
print(session)
for one in session.stats.classes:
    print(f"{one.name}: {one.bytes_written / 2**20:.0f} MiB written, {one.stall_s:.3f} s stalled")
