"""Computes attention with the operators of GPUs, for models on `meta` tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["FusedAttention"]

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
"""The operators behind ``scaled_dot_product_attention`` on GPUs; they have no public names."""


class FusedAttention(TorchFunctionMode):
    """Lets models use fused attention, whose backward needs no matrix of attention weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(  # noqa: PLR0917 - torch's own signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None and query.element_size() == 2:
        flash = getattr(torch.ops.aten, FLASH)
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, dim=-3)
        value = value.repeat_interleave(groups, dim=-3)
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    efficient = getattr(torch.ops.aten, EFFICIENT)
    return efficient(  # type: ignore[no-any-return]
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
