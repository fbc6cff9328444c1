"""Activations and the optimizer's state on the disk, and updates in backward, over micro-batches.

    python docs/examples/optimizer_in_backward.py DIRECTORY

Each part of the weights is updated as soon as its gradients are complete, and these are freed.
`step()` puts the updates in place: the losses are those of the plain run. Clipping needs
`overlap="step"`: `docs/guides/weights-and-optimizer.md` tells why.
"""

import sys

import torch
from torch import nn

import ssdtrain

WIDTH, LAYERS, MICRO_BATCHES = 512, 8, 2

if len(sys.argv) != 2:
    sys.exit("usage: python optimizer_in_backward.py DIRECTORY")
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# The default of buffer_bytes would hold all of this small model's state.
ssdtrain.offload_optimizer(optimizer, sys.argv[1], overlap="backward", buffer_bytes="8MiB")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
with ssdtrain.offload(sys.argv[1]) as session:
    for step in range(3):
        for number in range(MICRO_BATCHES):
            optimizer.set_is_last_backward(number == MICRO_BATCHES - 1)
            x = torch.randn(2048, WIDTH)
            loss = (model(x) - x).square().mean() / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss of the last micro-batch {loss.item():.4f}")
stats = optimizer.offload_stats
print(session)
print(stats)
