"""Compare a model's gradients with those under ssdtrain, with all that it saves on the disk.

    python docs/examples/check_gradients.py DIRECTORY

Put your model and your batch in place of these. Under `max_resident_bytes` nothing is kept for
speed, so the bound decides how much has to come back from the disk: a fifth of what the model saves
is hard enough. `verify=True` also checks every byte that was written. From the fourth step on some
tensors are made again from others.
"""

import sys

import torch
from torch import nn

import ssdtrain

LAYER = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
MODEL = nn.Sequential(nn.TransformerEncoder(LAYER, 4), nn.Linear(256, 256))
BATCH = torch.randn(8, 128, 256)


def gradients() -> dict[str, torch.Tensor]:
    """Run one step from the same random state, and return all gradients."""
    torch.manual_seed(0)
    MODEL.zero_grad()
    MODEL(BATCH).square().mean().backward()
    named = MODEL.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the gradients that are not equal in every value."""
    return [name for name in expected if not torch.equal(found[name], expected[name])]


if len(sys.argv) != 2:
    sys.exit("usage: python check_gradients.py DIRECTORY")
plain = gradients()
if different(gradients(), plain):
    sys.exit("the model does not repeat itself without ssdtrain: nothing can be compared")
options = {"min_bytes": 4096, "max_resident_bytes": 24 << 20, "verify": True}
with ssdtrain.offload(sys.argv[1], **options) as session:
    for _ in range(8):
        if wrong := different(gradients(), plain):
            sys.exit(f"gradients differ: {', '.join(wrong)}")
print(session)
print(f"{len(plain)} gradients are equal in every value, {session.stats.bytes_read} bytes read")
