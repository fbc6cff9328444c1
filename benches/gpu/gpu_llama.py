"""Blocks as those of Llama: what a step of a language model saves, at any size."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

HEAD_WIDTH_MAX = 128
WIDTH_MULTIPLE = 256
ROTATION_BASE = 10_000.0
COSTLY_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - public names
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - of torch.ops
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
]
"""Matrix products and attention, whose results the usual selective checkpoint keeps."""

Run = Callable[["Block", Tensor, Tensor], Tensor]
"""Calls a block with the residual stream and the rotation."""


def use_same_bits() -> None:
    """Have PyTorch use operators that give the same bits each time, or raise.

    Only warned, the backwards of attention would add in any order: on an H100 two plain runs in
    bfloat16 differed.
    """
    torch.use_deterministic_algorithms(True)
    # Filling what is empty would hide what is not written, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Its backward adds in any order, whatever is asked for.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


class Norm(nn.Module):
    """Root mean square norm (Zhang and Sennrich, arXiv 1910.07467), in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Norm (batch, sequence, hidden)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class Block(nn.Module):
    """Attention with rotary positions, then a gated product (Llama, arXiv 2302.13971)."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.head_width = min(HEAD_WIDTH_MAX, hidden // 2)
        # Two thirds of four times the width, rounded up: 11,008 for 4,096.
        wide = -(-hidden * 8 // 3 // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self.norms = nn.ModuleList(Norm(hidden) for _ in range(2))
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Add to the residual stream, (batch, sequence, hidden)."""
        batch, sequence, hidden = x.shape
        heads = self.queries_keys_values(self.norms[0](x))
        heads = heads.view(batch, sequence, 3, hidden // self.head_width, self.head_width)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = rotated(query, turn), rotated(key, turn)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        out = self.down(functional.silu(gate) * up)
        if self.dropout:
            out = functional.dropout(out, self.dropout)
        return x + out


class Llama(nn.Module):
    """A row of blocks and a loss, without words: what comes in are hidden states."""

    def __init__(self, hidden: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, dropout) for _ in range(layers))

    def forward(self, x: Tensor, *, run: Run | None = None) -> Tensor:
        """Return the loss of (batch, sequence, hidden); ``run`` calls each block."""
        turn = rotation(x.shape[1], self.blocks[0].head_width, x)
        for block in self.blocks:
            x = block(x, turn) if run is None else run(block, x, turn)
        return x.float().square().mean()


recomputed: Run = partial(checkpoint, use_reentrant=False)
"""Keeps the input of a block, and runs the block again in backward."""
selected: Run = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, COSTLY_OPERATIONS),
)
"""Keeps the results of costly operations too, and runs the others again."""


def rotation(sequence: int, width: int, like: Tensor) -> Tensor:
    """Return cosines and sines of rotary positions, (2, sequence, width / 2)."""
    steps = torch.arange(width // 2, dtype=torch.float32) / (width // 2)
    angles = torch.arange(sequence, dtype=torch.float32)[:, None] / ROTATION_BASE**steps
    return torch.stack([angles.cos(), angles.sin()]).to(like)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the halves of each head by its position (RoFormer, arXiv 2104.09864)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = turn
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
