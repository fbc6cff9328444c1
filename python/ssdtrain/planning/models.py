"""Builds models by name, without their weights: from a small table, or by a user's function.

`transformers` builds them from their numbers alone, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.notices import PROCESS

__all__ = ["DTYPES", "LIBRARIES", "MODELS", "Build", "builder", "line_of_user", "raised"]

Build = Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]
"""Makes a model, and a function that computes its loss on a micro-batch."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_LLAMA_3: Final[dict[str, Any]] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
MODELS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "llama-3-8b": (
        "LlamaConfig",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-3-70b": (
        "LlamaConfig",
        {
            **_LLAMA_3,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    # Granite 8B code is a Llama with these numbers.
    "granite-8b": (
        "LlamaConfig",
        {
            "vocab_size": 49_152,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": ("GPT2Config", {"n_layer": 12, "n_embd": 768, "n_head": 12}),
    "gpt2-xl": ("GPT2Config", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "bert-base": ("BertConfig", {}),
    "bert-large": (
        "BertConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
}
"""By name, the class of the configuration and the numbers that differ from its defaults."""

FOREIGN: Final = (
    "<",
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
    str(Path(traceback.__file__).parent / "importlib"),
)
"""Prefixes of paths whose lines do not help the user."""
LIBRARIES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages."""
HEADS: Final = {
    "LlamaConfig": "LlamaForCausalLM",
    "GPT2Config": "GPT2LMHeadModel",
    "BertConfig": "BertForMaskedLM",
}


def builder(name: str, batch: int, sequence: int, dtype: torch.dtype) -> Build:
    """Return a function that builds a model of ``MODELS``, or calls ``FILE.py:FUNCTION``.

    FUNCTION gets ``batch``, ``sequence`` and ``dtype``, and returns a model and a function that
    computes its loss. Raises ``ConfigError`` if there is no such model or function.
    """
    file, colon, function = name.rpartition(":")
    if not colon and name.endswith(".py"):
        raise ConfigError(
            f"which function of {name} makes the model? Name it too, as in {name}:build"
        )
    if colon:
        own = _function(file, function)
        try:
            inspect.signature(own).bind(batch=batch, sequence=sequence, dtype=dtype)
        except TypeError as error:
            raise ConfigError(
                f"{name} is called with batch, sequence and dtype by name ({error}); write "
                f"def {function}(batch, sequence, dtype)"
            ) from error

        def build() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
            try:
                made = own(batch=batch, sequence=sequence, dtype=dtype)
            except (Exception, SystemExit) as error:
                raise ConfigError(f"{name} raised {raised(error)}") from error
            is_pair = isinstance(made, tuple) and len(made) == 2
            if not (is_pair and isinstance(made[0], nn.Module) and callable(made[1])):
                parts = made if isinstance(made, tuple) else (made,)
                kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
                raise ConfigError(
                    f"{name} returned {kinds}, not a model and a function without arguments that "
                    "computes its loss: return model, lambda: ..."
                )
            model, loss = made
            return model, loss

        return build
    known = MODELS.get(name.lower().replace("_", "-"))
    if known is None:
        raise ConfigError(
            f"no model is called {name!r} here; there are {', '.join(MODELS)}, or FILE.py:FUNCTION"
        )
    return _named(*known, batch=batch, sequence=sequence, dtype=dtype)


def _named(
    kind: str, numbers: dict[str, Any], *, batch: int, sequence: int, dtype: torch.dtype
) -> Build:
    def build() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        try:
            import transformers  # noqa: PLC0415 - optional, and slow to import
        except ImportError as error:
            raise UnsupportedError(
                "models by name need transformers: pip install 'ssdtrain[transformers]', or give "
                "FILE.py:FUNCTION"
            ) from error
        kind_of_config = getattr(transformers, kind)
        positions = "n_positions" if kind == "GPT2Config" else "max_position_embeddings"
        own_count = getattr(kind_of_config(**numbers), positions)
        if sequence > own_count:
            PROCESS.say(
                "positions",
                "the model has positions for %d tokens; the plan is for one like it with positions "
                "for %d (--sequence)",
                own_count,
                sequence,
            )
        longest = {positions: sequence, "use_cache": False}
        config = kind_of_config(**{**numbers, **longest})
        head = getattr(transformers, HEADS[kind])
        model = head._from_config(config, dtype=dtype, attn_implementation="sdpa")  # noqa: SLF001
        if kind == "GPT2Config":
            # GPT-2 uses this loss anyway, and warns because its class name does not tell.
            model.loss_type = "ForCausalLM"
        model.train()

        def loss() -> torch.Tensor:
            words = torch.zeros(batch, sequence, dtype=torch.long)
            found = model(input_ids=words, labels=words).loss
            assert isinstance(found, torch.Tensor)
            return found

        return model, loss

    return build


def _function(file: str, function: str) -> Callable[..., Any]:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{file} is no Python file; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    # As `python FILE.py` does, also for later imports of the function.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    # A file may call sys.exit, which must not end the command.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{file} raised {raised(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{file} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def raised(error: BaseException) -> str:
    """Return an exception for messages: its class, its first line, and the user's line."""
    first = next(iter(str(error).strip().splitlines()), "")
    told = f"{type(error).__name__}: {first}" if first else type(error).__name__
    line = line_of_user(traceback.extract_tb(error.__traceback__))
    return f"{told} ({line})" if line is not None else told


def line_of_user(
    frames: Sequence[traceback.FrameSummary], passed: Sequence[str] = ()
) -> str | None:
    """Return the innermost line of the user, or ``None``; paths with ``passed`` do not count."""
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(FOREIGN)
        and not any(part in frame.filename for part in passed)
    ]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else None
