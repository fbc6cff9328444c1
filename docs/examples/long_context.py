"""A long sequence: checkpoint every block, and offload the hidden states between the blocks.

    python docs/examples/long_context.py DIRECTORY

Checkpointing leaves one hidden state per block in memory; ssdtrain writes it while the next block
computes, and has it back when backward computes that block again. `benches/training/long_context.py`
measures it against checkpointing alone.
"""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssdtrain

SEQUENCE, HIDDEN, LAYERS = 16_384, 128, 8


class Block(nn.Module):
    """Stands for any block whose cost grows with the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GLU(), nn.Linear(HIDDEN, HIDDEN)
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.layers(stream)


blocks = nn.ModuleList(Block() for _ in range(LAYERS))
optimizer = torch.optim.AdamW(blocks.parameters())

if len(sys.argv) != 2:
    sys.exit("usage: python long_context.py DIRECTORY")
with ssdtrain.offload(sys.argv[1]) as session:
    for step in range(3):
        stream = torch.randn(1, SEQUENCE, HIDDEN)
        for block in blocks:
            # The old hidden state has no other name, so nothing but the disk holds it.
            stream = checkpoint(block, stream, use_reentrant=False)
        loss = stream.square().mean()
        del stream
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
print(session)
