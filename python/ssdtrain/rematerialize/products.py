"""Matrix products, attention and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdtrain.rematerialize.operation import Operation, Table

__all__ = ["PRODUCTS"]

aten = torch.ops.aten


def _addmm(bias: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha)


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(bias, left, right, beta=beta, alpha=alpha)


def _is_sure_convolution(node: Any, _number: int) -> bool:
    # On a GPU, cuDNN takes another algorithm when memory is short.
    if node._input_metadata[0].device.type != "cpu":  # noqa: SLF001
        return False
    # The node saves no bias, and a frozen bias has no edge.
    return node.next_functions[2][0] is not None or node._saved_bias_sym_sizes_opt in (None, (0,))  # noqa: SLF001


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
    return aten.convolution(x, weight, bias, *options)


def _is_without_dropout(node: Any, number: int) -> bool:
    return number == 0 and node._saved_dropout_p == 0  # noqa: SLF001


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    mask, causal, scale = options
    function = aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    return function(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]


def _attend_flash(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    causal, scale = options
    function = aten._scaled_dot_product_flash_attention  # noqa: SLF001
    return function(query, key, value, 0.0, causal, scale=scale)[0]


def _attend_efficient(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    bias, causal, scale = options
    function = aten._scaled_dot_product_efficient_attention  # noqa: SLF001
    return function(query, key, value, bias, True, 0.0, causal, scale=scale)[0]


def _attend_cudnn(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    bias, causal, scale = options
    function = aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
    return function(query, key, value, bias, True, 0.0, causal, scale=scale)[0]


def _attention(function: Any, *masks: str) -> Operation:
    return Operation(
        "attention",
        function,
        ("query", "key", "value", *masks),
        ("is_causal", "scale"),
        optional=masks,
        results=("output",),
        is_known=_is_without_dropout,
        is_dear=True,
    )


PRODUCTS: Table = {
    "MmBackward0": Operation("mm", torch.mm, ("self", "mat2"), is_dear=True),
    "AddmmBackward0": Operation(
        "addmm", _addmm, ("self", "mat1", "mat2"), ("beta", "alpha"), is_dear=True
    ),
    "BmmBackward0": Operation("bmm", torch.bmm, ("self", "mat2"), is_dear=True),
    "BaddbmmBackward0": Operation(
        "baddbmm", _baddbmm, ("self", "batch1", "batch2"), ("beta", "alpha"), is_dear=True
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention(_attend_on_cpu, "attn_mask"),
    "ScaledDotProductFlashAttentionBackward0": _attention(_attend_flash),
    "ScaledDotProductEfficientAttentionBackward0": _attention(_attend_efficient, "attn_bias"),
    "ScaledDotProductCudnnAttentionBackward0": _attention(_attend_cudnn, "attn_bias"),
    "ConvolutionBackward0": Operation(
        "convolution",
        _convolution,
        ("input", "weight", "bias"),
        ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        optional=("bias",),
        is_known=_is_sure_convolution,
        is_dear=True,
    ),
}
