"""A whole training whose weights, state and activations take more than the memory it may have.

    python docs/examples/larger_than_memory.py DIRECTORY

Without ssdtrain this step keeps 24 MiB of weights, as many of gradients, 48 MiB of state and
25 MiB of activations. Here the model is built without memory, and all of them go through 16 MiB.
Each step takes four micro-batches, clips, and has a schedule. The checkpoint is written and read
part by part: kill the run and start it again, and it goes on with the same bits. To begin anew,
remove DIRECTORY/checkpoint.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import ssdtrain

WIDTH, LAYERS, STEPS, MICRO_BATCHES, SAVE_EVERY = 512, 24, 6, 4, 2

if len(sys.argv) != 2:
    sys.exit("usage: python larger_than_memory.py DIRECTORY")
checkpoint = Path(sys.argv[1]) / "checkpoint"

torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    )
with ssdtrain.offload(sys.argv[1], max_resident_bytes="16MiB") as session:
    # A model that is built on meta gets new parameters here, so the optimizer comes after it.
    ssdtrain.offload_parameters(model, session, max_resident_bytes="4MiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ssdtrain.offload_optimizer(optimizer, session, max_gradient_bytes="8MiB")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    begin = 0
    if (checkpoint / "manifest.json").exists():
        last = ssdtrain.load(checkpoint, model, optimizer)
        scheduler.load_state_dict(last["scheduler"])
        torch.set_rng_state(last["random"])
        begin = last["step"]
        print(f"goes on after step {begin}")

    for step in range(begin, STEPS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x = torch.randn(256, WIDTH)
            loss = (model(x) - x).square().mean() / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step + 1}: loss {total:.6f}")
        if (step + 1) % SAVE_EVERY == 0:
            extra = {
                "step": step + 1,
                "scheduler": scheduler.state_dict(),
                "random": torch.get_rng_state(),
            }
            ssdtrain.save(checkpoint, model, optimizer, extra=extra)
print(session)
