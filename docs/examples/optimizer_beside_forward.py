"""Activations and the optimizer's state on the disk, and updates beside the next forward.

    python docs/examples/optimizer_beside_forward.py DIRECTORY

`step()` returns at once. Each layer waits for its own weights, and whoever looks at one sees it
updated: the losses are those of the plain run, also with clipping. `docs/optimizer.md` tells what
works.
"""

import sys

import torch
from torch import nn

import ssdtrain

WIDTH, LAYERS = 512, 8

if len(sys.argv) != 2:
    sys.exit("usage: python optimizer_beside_forward.py DIRECTORY")
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ssdtrain.offload_optimizer(optimizer, sys.argv[1], overlap="forward")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
with ssdtrain.offload(sys.argv[1]) as session:
    for step in range(3):
        x = torch.randn(4096, WIDTH)
        loss = (model(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss {loss.item():.4f}")
stats = optimizer.offload_stats
print(session)
print(f"{stats.written_bytes / 2**20:.0f} MiB of optimizer state written")
print(f"{stats.step_s:.3f} s in step(), {stats.waited_s:.3f} s waited for updates elsewhere")
