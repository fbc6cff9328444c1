"""The models that the demo trains on bytes of text: a GPT in plain PyTorch, and Hugging Face's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ssdtrain.demo.options import HEAD_WIDTH, TrainingOptions

BYTE_VALUES_COUNT = 256
PAD_TOKEN = BYTE_VALUES_COUNT
MASK_TOKEN = BYTE_VALUES_COUNT + 1
VOCABULARY_COUNT = BYTE_VALUES_COUNT + 8
"""The byte values, and room for special tokens; a multiple of eight."""
MASKED_SHARE = 0.15
"""Share of the tokens that BERT has to guess, as in its paper."""
IGNORED_LABEL = -100
"""The label that torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Trainee:
    """A model, and the loss that it is trained on."""

    module: nn.Module
    loss: Callable[[torch.Tensor], torch.Tensor]
    """Returns the loss of a batch of text, int64, (batch, sequence + 1)."""


def build_trainee(options: TrainingOptions) -> Trainee:
    """Build the model that the options name, in training mode, with weights from their seed."""
    torch.manual_seed(options.seed)
    if options.model == "gpt":
        module: nn.Module = ByteGPT(options)
        return Trainee(module.train(), partial(_next_byte_loss, module))
    module = _hugging_face(options)
    return Trainee(module.train(), partial(_own_loss, module, options.model))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer: the members of its lists of modules."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


def recompute_block(block: nn.Module, context_function: Callable[[], Any]) -> None:
    """Compute a block again in backward, with `torch.utils.checkpoint`."""
    again: Any = partial(
        checkpoint, block.forward, use_reentrant=False, context_fn=context_function
    )
    block.forward = again


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

    def __init__(self, options: TrainingOptions) -> None:
        super().__init__()
        hidden, dropout = options.hidden, options.dropout_probability
        self.tokens = nn.Embedding(BYTE_VALUES_COUNT, hidden)
        self.positions = nn.Embedding(options.sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, dropout) for _ in range(options.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, BYTE_VALUES_COUNT, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as GPT-2: small normal ones, smaller where a block adds to the stream."""
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
            stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


def _next_byte_loss(module: nn.Module, text: torch.Tensor) -> torch.Tensor:
    logits = module(text[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def _own_loss(module: nn.Module, model: str, text: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a Hugging Face model: its own."""
    # GPT-2 and Llama shift the labels themselves.
    tokens = labels = text[:, :-1]
    if model == "bert":
        tokens, labels = _mask(tokens)
    elif model == "t5":
        # The encoder reads the text, the decoder predicts each next byte.
        labels = text[:, 1:].contiguous()
    return cast("torch.Tensor", module(input_ids=tokens, labels=labels).loss)


def _mask(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide some tokens; the choice depends on the text alone, so that all modes hide the same."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
    # At least one token, or the mean would be NaN.
    hidden[:, 0] = True
    return tokens.masked_fill(hidden, MASK_TOKEN), tokens.masked_fill(~hidden, IGNORED_LABEL)


def _hugging_face(options: TrainingOptions) -> nn.Module:
    """Build GPT-2, BERT, T5 or Llama, randomly initialised."""
    # By name, as type checkers need not have this extra.
    transformers: Any = importlib.import_module("transformers")
    hidden, layers, dropout = options.hidden, options.layers, options.dropout_probability
    heads = hidden // HEAD_WIDTH
    common = {"vocab_size": VOCABULARY_COUNT, "use_cache": False}
    match options.model:
        case "gpt2":
            build, sizes = transformers.GPT2LMHeadModel, transformers.GPT2Config(
                **common, n_positions=options.sequence, n_embd=hidden, n_layer=layers, n_head=heads,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=None,
                eos_token_id=None,
            )  # fmt: skip
        case "bert":
            build, sizes = transformers.BertForMaskedLM, transformers.BertConfig(
                **common, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * hidden, max_position_embeddings=options.sequence,
                hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
                pad_token_id=PAD_TOKEN,
            )  # fmt: skip
        case "t5":
            build, sizes = transformers.T5ForConditionalGeneration, transformers.T5Config(
                **common, d_model=hidden, d_kv=HEAD_WIDTH, d_ff=4 * hidden, num_layers=layers,
                num_decoder_layers=layers, num_heads=heads, dropout_rate=dropout,
                pad_token_id=PAD_TOKEN, eos_token_id=PAD_TOKEN, decoder_start_token_id=PAD_TOKEN,
            )  # fmt: skip
        case _:
            # Three matrices in the MLP: 8/3 of the width gives as many weights as two of 4.
            build, sizes = transformers.LlamaForCausalLM, transformers.LlamaConfig(
                **common, hidden_size=hidden, intermediate_size=8 * hidden // 3,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                max_position_embeddings=options.sequence, attention_dropout=dropout,
                bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
    return cast("nn.Module", build(sizes))
