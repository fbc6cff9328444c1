"""Hugging Face architectures, randomly initialised, with dropout, trained on the same bytes."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn

from ssdtrain.demo.options import HEAD_WIDTH, TrainingOptions
from ssdtrain.demo.trainee import BYTE_VALUES_COUNT, ContextFunction

PAD_TOKEN = BYTE_VALUES_COUNT
MASK_TOKEN = BYTE_VALUES_COUNT + 1
VOCABULARY_COUNT = BYTE_VALUES_COUNT + 8
"""The byte values, and room for special tokens; a multiple of eight."""

MASKED_SHARE = 0.15
"""Share of the tokens that BERT has to guess, as in its paper."""

IGNORED_LABEL = -100
"""The label that torch's cross-entropy leaves out."""


class HuggingFaceTrainee:
    """GPT-2, BERT, T5 or Llama with the size of the options."""

    def __init__(self, options: TrainingOptions) -> None:
        try:
            # By name at run time: an extra that type checkers need not have.
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ImportError(
                f"--model {options.model} needs Hugging Face transformers, which could not be "
                f"imported ({error}); install it with: pip install 'ssdtrain[transformers]', or "
                "leave --model out to train the demo's own model"
            ) from error
        build = {"gpt2": _gpt2, "bert": _bert, "t5": _t5, "llama": _llama}[options.model]
        self.module: nn.Module = build(transformers, options)
        self._options = options

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the loss the architecture is trained with: the model's own."""
        tokens = text[:, :-1]
        if self._options.model == "bert":
            tokens, labels = _mask(tokens)
            inputs = {"input_ids": tokens, "labels": labels}
        elif self._options.model == "t5":
            # The encoder reads the text, the decoder tells it one byte ahead.
            inputs = {"input_ids": tokens, "labels": text[:, 1:].contiguous()}
        else:
            # These shift the labels themselves.
            inputs = {"input_ids": tokens, "labels": tokens}
        return cast("torch.Tensor", self.module(**inputs).loss)

    def recompute_blocks(self, context_function: ContextFunction) -> None:
        """Recompute every block in backward, through the library's own switch."""
        arguments = {
            "use_reentrant": False,
            "preserve_rng_state": True,
            "context_fn": context_function,
        }
        module = cast("Any", self.module)
        # Newer releases call it by another name and deprecate the old one.
        if hasattr(module, "activation_checkpointing_enable"):
            module.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _mask(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide some tokens; the choice depends on the text alone, so that all modes hide the same."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
    # At least one, or the mean over none would be NaN.
    hidden[:, 0] = True
    return tokens.masked_fill(hidden, MASK_TOKEN), tokens.masked_fill(~hidden, IGNORED_LABEL)


def _gpt2(transformers: Any, options: TrainingOptions) -> nn.Module:
    dropout = options.dropout_probability
    configuration = transformers.GPT2Config(
        vocab_size=VOCABULARY_COUNT,
        n_positions=options.sequence,
        n_embd=options.hidden,
        n_layer=options.layers,
        n_head=options.hidden // HEAD_WIDTH,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return cast("nn.Module", transformers.GPT2LMHeadModel(configuration))


def _bert(transformers: Any, options: TrainingOptions) -> nn.Module:
    dropout = options.dropout_probability
    configuration = transformers.BertConfig(
        vocab_size=VOCABULARY_COUNT,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // HEAD_WIDTH,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=options.sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PAD_TOKEN,
        use_cache=False,
    )
    return cast("nn.Module", transformers.BertForMaskedLM(configuration))


def _t5(transformers: Any, options: TrainingOptions) -> nn.Module:
    configuration = transformers.T5Config(
        vocab_size=VOCABULARY_COUNT,
        d_model=options.hidden,
        d_kv=HEAD_WIDTH,
        d_ff=4 * options.hidden,
        num_layers=options.layers,
        num_decoder_layers=options.layers,
        num_heads=options.hidden // HEAD_WIDTH,
        dropout_rate=options.dropout_probability,
        pad_token_id=PAD_TOKEN,
        eos_token_id=PAD_TOKEN,
        decoder_start_token_id=PAD_TOKEN,
        use_cache=False,
    )
    return cast("nn.Module", transformers.T5ForConditionalGeneration(configuration))


def _llama(transformers: Any, options: TrainingOptions) -> nn.Module:
    configuration = transformers.LlamaConfig(
        vocab_size=VOCABULARY_COUNT,
        hidden_size=options.hidden,
        # Three matrices instead of two: 8/3 gives the same count of weights as 4.
        intermediate_size=8 * options.hidden // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // HEAD_WIDTH,
        num_key_value_heads=options.hidden // HEAD_WIDTH,
        max_position_embeddings=options.sequence,
        attention_dropout=options.dropout_probability,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return cast("nn.Module", transformers.LlamaForCausalLM(configuration))
