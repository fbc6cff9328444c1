"""The demo's own GPT, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ssdtrain.demo.options import HEAD_WIDTH, TrainingOptions
from ssdtrain.demo.trainee import BYTE_VALUES_COUNT, ContextFunction


class Block(nn.Module):
    """A pre-norm transformer block: causal attention with a fused qkv, then a GELU MLP."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.head_count = hidden // HEAD_WIDTH
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(hidden)
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Add attention and MLP to the residual stream, (batch, sequence, hidden)."""
        stream = stream + self._drop(self._attend(self.norm_attention(stream)))
        inner = functional.gelu(self.mlp_in(self.norm_mlp(stream)))
        return stream + self._drop(self.mlp_out(inner))

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = stream.shape
        heads = self.queries_keys_values(stream).view(batch, sequence, 3, self.head_count, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        out: torch.Tensor = self.attention_out(
            mixed.transpose(1, 2).reshape(batch, sequence, hidden)
        )
        return out

    def _drop(self, tensor: torch.Tensor) -> torch.Tensor:
        return functional.dropout(tensor, self.dropout, self.training)


class ByteGPT(nn.Module):
    """A GPT-style language model over bytes."""

    def __init__(self, *, layers: int, hidden: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTE_VALUES_COUNT, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, BYTE_VALUES_COUNT, bias=False)
        self.context_function: ContextFunction | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as GPT-2: small normal ones, smaller where a block adds to the stream.

        So the variance of the residual stream does not grow with the depth.
        """
        layers = len(self.blocks)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                deviation = 0.02 / math.sqrt(2 * layers) if into_stream else 0.02
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, sequence, 256), for token ids, (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            if self.context_function is None:
                stream = block(stream)
            else:
                stream = checkpoint(
                    block,
                    stream,
                    use_reentrant=False,
                    preserve_rng_state=True,
                    context_fn=self.context_function,
                )
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


class ByteGPTTrainee:
    """`ByteGPT` trained to predict the next byte."""

    def __init__(self, options: TrainingOptions) -> None:
        self.module: nn.Module = ByteGPT(
            layers=options.layers,
            hidden=options.hidden,
            sequence=options.sequence,
            dropout=options.dropout_probability,
        )

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy of the next byte."""
        logits = self.module(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    def recompute_blocks(self, context_function: ContextFunction) -> None:
        """Recompute every block in backward."""
        assert isinstance(self.module, ByteGPT)
        self.module.context_function = context_function
