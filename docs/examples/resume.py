"""A run that may be killed at any moment: start it again, and it goes on from its last checkpoint.

    python docs/examples/resume.py DIRECTORY

The state of the optimizer lies on the disk, and the checkpoint is written from there and read back
to there: neither is ever in memory as a whole. Kill it (Ctrl-C, kill -9) and run it again: the
losses are those of a run that was never interrupted. To begin anew, remove DIRECTORY/checkpoint.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import ssdtrain

WIDTH, STEPS, SAVE_EVERY = 512, 20, 5

if len(sys.argv) != 2:
    sys.exit("usage: python resume.py DIRECTORY")
checkpoint = Path(sys.argv[1]) / "checkpoint"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
# The default of buffer_bytes would hold all of this small model's state.
ssdtrain.offload_optimizer(optimizer, sys.argv[1], buffer_bytes="8MiB")

begin = 0
if (checkpoint / "manifest.json").exists():
    last = ssdtrain.load(checkpoint, model, optimizer)
    scheduler.load_state_dict(last["scheduler"])
    torch.set_rng_state(last["random"])
    begin = last["step"]
    print(f"goes on after step {begin}")

for step in range(begin, STEPS):
    loss = model(torch.randn(32, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step + 1}: loss {loss.item():.6f}")
    if (step + 1) % SAVE_EVERY == 0:
        extra = {
            "step": step + 1,
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        ssdtrain.save(checkpoint, model, optimizer, extra=extra)
print(optimizer.offload_stats)
