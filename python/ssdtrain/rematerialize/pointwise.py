"""Operations on each element by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from ssdtrain.rematerialize.operation import Operation, Table, dtype_of

__all__ = ["POINTWISE"]

aten = torch.ops.aten


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Any:
    return aten.elu(x, alpha, scale, input_scale)


def _add(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    return torch.add(x, other, alpha=alpha)


def _subtract(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    return torch.sub(x, other, alpha=alpha)


def _divide(x: Tensor, other: Tensor, rounding_mode: str | None) -> Tensor:
    return torch.div(x, other, rounding_mode=rounding_mode)


def _add_product(x: Tensor, left: Tensor, right: Tensor, value: float) -> Tensor:
    return torch.addcmul(x, left, right, value=value)


def _add_quotient(x: Tensor, left: Tensor, right: Tensor, value: float) -> Tensor:
    return torch.addcdiv(x, left, right, value=value)


def _power_of_number(exponent: Tensor, base: float) -> Tensor:
    return torch.pow(base, exponent)


def _where(x: Tensor, other: Tensor, condition: Tensor) -> Tensor:
    return torch.where(condition, x, other)


def _fill_masked(x: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_fill(x, mask, value)


def _drop(x: Tensor, mask: Tensor, p: float) -> Any:
    """Multiply by a mask and a scale as dropout does, which draws the mask at random."""
    kept = 1 - p
    if x.is_cpu:
        return x * (mask.to(x.dtype) * (1 / kept if kept else 0.0))
    if x.dtype is not torch.float64:
        # The kernel divides by the share that is kept after rounding it to float32.
        kept = torch.tensor(kept, dtype=torch.float32, device="cpu").item()
    return aten.native_dropout_backward(x, mask, 1 / kept if kept else 0.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Any:
    return aten._to_copy(x, dtype=dtype)  # noqa: SLF001 - `Tensor.to` does not always copy


def _stays_on_device(node: Any, _number: int) -> bool:
    (before, number), after = node.next_functions[0], node._input_metadata[0]  # noqa: SLF001
    return before is not None and before._input_metadata[number].device == after.device  # noqa: SLF001


def _of_self(**functions: Any) -> Table:
    """Return the rows of functions of one tensor, by the name of the node without "Backward0"."""
    return {f"{name}Backward0": Operation(name.lower(), made) for name, made in functions.items()}


def _of_result(**functions: Any) -> Table:
    """Return the rows of functions of which the node saves the result, not the input."""
    return {
        f"{name}Backward0": Operation(name.lower(), made, results=("result",))
        for name, made in functions.items()
    }


POINTWISE: Table = {
    **_of_self(
        Abs=torch.abs,
        Cos=torch.cos,
        Erf=torch.erf,
        Hardsigmoid=F.hardsigmoid,
        Hardswish=F.hardswish,
        Log=torch.log,
        Log1P=torch.log1p,
        Log2=torch.log2,
        LogSigmoid=F.logsigmoid,
        Mish=F.mish,
        Neg=torch.neg,
        Sign=torch.sign,
        Silu=F.silu,
        Sin=torch.sin,
    ),
    **_of_result(
        Exp=torch.exp,
        Expm1=torch.expm1,
        Reciprocal=torch.reciprocal,
        Relu=torch.relu,
        Rsqrt=torch.rsqrt,
        Sigmoid=torch.sigmoid,
        Sqrt=torch.sqrt,
        Tanh=torch.tanh,
    ),
    "GeluBackward0": Operation("gelu", _gelu, constants=("approximate",)),
    "LeakyReluBackward0": Operation("leaky_relu", F.leaky_relu, constants=("negative_slope",)),
    "EluBackward0": Operation("elu", _elu, constants=("alpha", "scale", "input_scale")),
    "GluBackward0": Operation("glu", F.glu, constants=("dim",)),
    "CeluBackward0": Operation("celu", F.celu, constants=("alpha",)),
    "SoftplusBackward0": Operation("softplus", F.softplus, constants=("beta", "threshold")),
    "HardtanhBackward0": Operation("hardtanh", F.hardtanh, constants=("min_val", "max_val")),
    "ClampBackward1": Operation("clamp", torch.clamp, constants=("min", "max")),
    "ClampMinBackward0": Operation("clamp_min", torch.clamp_min, constants=("min",)),
    "ClampMaxBackward0": Operation("clamp_max", torch.clamp_max, constants=("max",)),
    "MaximumBackward0": Operation("maximum", torch.maximum, ("self", "other")),
    "MinimumBackward0": Operation("minimum", torch.minimum, ("self", "other")),
    "PowBackward0": Operation("pow", torch.pow, constants=("exponent",)),
    "PowBackward1": Operation("pow", torch.pow, ("self", "exponent"), results=("result",)),
    "PowBackward2": Operation(
        "pow", _power_of_number, ("exponent",), ("self",), results=("result",)
    ),
    "AddBackward0": Operation("add", _add, ("self", "other"), ("alpha",)),
    "SubBackward0": Operation("sub", _subtract, ("self", "other"), ("alpha",)),
    "MulBackward0": Operation("mul", torch.mul, ("self", "other")),
    "MulBackward1": Operation("mul", torch.mul, constants=("other",)),
    "DivBackward1": Operation("div", torch.div, constants=("other",)),
    "DivBackward0": Operation("div", torch.div, ("self", "other")),
    "DivBackward2": Operation("div", _divide, ("self", "other"), ("rounding_mode",)),
    "AddcmulBackward0": Operation(
        "addcmul", _add_product, ("self", "tensor1", "tensor2"), ("value",)
    ),
    "AddcdivBackward0": Operation(
        "addcdiv", _add_quotient, ("self", "tensor1", "tensor2"), ("value",)
    ),
    "LerpBackward0": Operation("lerp", torch.lerp, ("self", "end"), ("weight",)),
    "WhereBackward0": Operation("where", _where, ("self", "other", "condition")),
    "MaskedFillBackward1": Operation("masked_fill", _fill_masked, ("self", "value", "mask")),
    "NativeDropoutBackward0": Operation("dropout", _drop, ("self", "result1"), ("p",)),
    "ToCopyBackward0": Operation("cast", _cast, constants=(dtype_of,), is_known=_stays_on_device),
}
