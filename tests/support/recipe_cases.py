"""For each operation that a recipe can repeat, calls whose results need it.

Each takes two tensors of equal shape and dtype; ``x`` and ``y`` may be laid out in any way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
attention = F.scaled_dot_product_attention

Case = Callable[[Tensor, Tensor], Tensor]


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def batch_of(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def heads_of(x: Tensor) -> Tensor:
    """Return queries, keys or values of shape (2, 4, 16, 8) with the numbers of a tensor."""
    return x.flatten().repeat(64)[:1024].view(2, 4, 16, 8)


def image_of(x: Tensor) -> Tensor:
    return x.flatten().repeat(64)[:512].view(2, 4, 8, 8)


def indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).flip(0)


def vector(x: Tensor) -> Tensor:
    """Return a weight for the last dim."""
    return nn.Parameter(x.detach().reshape(-1, x.shape[-1])[-1].clone())


def matrix(x: Tensor, y: Tensor) -> Tensor:
    """Return a weight with nine rows for the last dim."""
    return nn.Parameter(torch.outer(y.detach().flatten()[:9], vector(x).detach()))


def square(x: Tensor) -> Tensor:
    """Return square matrices that fit `batch_of`."""
    return batch_of(x).mT @ batch_of(x).detach()


def channels(x: Tensor) -> Tensor:
    """Return a weight for the channels of `image_of`."""
    return nn.Parameter(x.detach().flatten()[:4].clone())


CASES: dict[str, tuple[Case, ...]] = {
    "AbsBackward0": (lambda x, y: x.abs(),),
    "AddBackward0": (
        lambda x, y: x + y,
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: x + vector(y),
        lambda x, y: x + y.float(),
        lambda x, y: (x * 2).add_(y.double()),
    ),
    "AddcdivBackward0": (lambda x, y: torch.addcdiv(x, x, y, value=0.3),),
    "AddcmulBackward0": (lambda x, y: torch.addcmul(x, x, y, value=0.3),),
    "AddmmBackward0": (
        lambda x, y: torch.addmm(vector(x).sum(), rows_of(x), rows_of(y).T, beta=0.3, alpha=2),
        lambda x, y: F.linear(rows_of(x), matrix(x, y), nn.Parameter(torch.ones(9, dtype=x.dtype))),
    ),
    "AliasBackward0": (lambda x, y: aten.alias(x),),
    "AmaxBackward0": (lambda x, y: x.amax(-1), lambda x, y: x.amax((0, 1), keepdim=True)),
    "BaddbmmBackward0": (
        lambda x, y: torch.baddbmm(batch_of(x), batch_of(x), square(y), beta=0.3, alpha=2),
    ),
    "BmmBackward0": (
        lambda x, y: torch.bmm(batch_of(x), batch_of(y).mT),
        lambda x, y: batch_of(x) @ square(y),
    ),
    "CatBackward0": (
        lambda x, y: torch.cat([x, y], -1),
        lambda x, y: torch.cat([y, x.float(), x], 0),
        lambda x, y: torch.cat([torch.empty(0, dtype=x.dtype), y, x[:, :0].detach(), x], 1),
    ),
    "CeluBackward0": (lambda x, y: F.celu(x, 0.3),),
    "ClampBackward1": (
        lambda x, y: x.clamp(-0.5, 0.5),
        lambda x, y: x.clamp(min=0),
        lambda x, y: x.clamp(max=0.25),
    ),
    "ClampMaxBackward0": (lambda x, y: x.clamp_max(0.25),),
    "ClampMinBackward0": (lambda x, y: x.clamp_min(0),),
    "CloneBackward0": (
        lambda x, y: x.clone(),
        lambda x, y: x.mT.contiguous(),
        lambda x, y: x.transpose(0, -1).reshape(-1),
    ),
    "ConvolutionBackward0": (
        lambda x, y: F.conv2d(image_of(x), image_of(y)[:, :, :3, :3], padding=1),
        lambda x, y: F.conv1d(image_of(x)[0], image_of(y)[0, :, :, :3], vector(x)[:4], stride=2),
        lambda x, y: F.conv_transpose2d(image_of(x), image_of(y)[0, :, None, :2, :2], groups=4),
    ),
    "CosBackward0": (lambda x, y: x.cos(),),
    "DiagonalBackward0": (lambda x, y: x.diagonal(1, -2, -1),),
    "DivBackward0": (lambda x, y: x / y, lambda x, y: x / 3),
    "DivBackward1": (lambda x, y: aten.div.Scalar(x, 3),),
    "DivBackward2": (lambda x, y: torch.div(x, y, rounding_mode="trunc"),),
    "EluBackward0": (lambda x, y: F.elu(x, 0.3), lambda x, y: F.selu(x)),
    "ErfBackward0": (lambda x, y: x.erf(),),
    "ExpBackward0": (lambda x, y: x.exp(),),
    "ExpandBackward0": (lambda x, y: x.unsqueeze(-2).expand(*x.shape[:-1], 3, -1),),
    "Expm1Backward0": (lambda x, y: x.expm1(),),
    "FlipBackward0": (lambda x, y: x.flip(0, -1),),
    "GatherBackward0": (lambda x, y: x.gather(-1, y.detach().argsort(-1)[..., :3]),),
    "GeluBackward0": (lambda x, y: F.gelu(x), lambda x, y: F.gelu(x, approximate="tanh")),
    "GluBackward0": (lambda x, y: F.glu(torch.cat([x, y], -1)),),
    "HardsigmoidBackward0": (lambda x, y: F.hardsigmoid(x),),
    "HardswishBackward0": (lambda x, y: F.hardswish(x * 3),),
    "HardtanhBackward0": (lambda x, y: F.hardtanh(x), lambda x, y: F.relu6(x * 5)),
    "IndexBackward0": (
        lambda x, y: x[indices(x)],
        lambda x, y: x[:, torch.tensor([1, 0])],
        lambda x, y: x[y > 0],
    ),
    "IndexSelectBackward0": (lambda x, y: x.index_select(-1, torch.tensor([2, 0])),),
    "LeakyReluBackward0": (lambda x, y: F.leaky_relu(x, 0.3),),
    "LerpBackward0": (lambda x, y: torch.lerp(x, y, 0.3),),
    "LinalgVectorNormBackward0": (
        lambda x, y: x.norm(dim=-1),
        lambda x, y: torch.linalg.vector_norm(x, 1, (0, 1), keepdim=True),
        lambda x, y: x.norm(dtype=torch.float64),
    ),
    "Log1PBackward0": (lambda x, y: x.log1p(),),
    "Log2Backward0": (lambda x, y: x.log2(),),
    "LogBackward0": (lambda x, y: x.log(),),
    "LogSigmoidBackward0": (lambda x, y: F.logsigmoid(x),),
    "LogSoftmaxBackward0": (
        lambda x, y: x.log_softmax(-1),
        lambda x, y: F.log_softmax(x, 0, dtype=torch.float32),
    ),
    "LogsumexpBackward0": (lambda x, y: x.logsumexp(-1), lambda x, y: x.logsumexp((0, 1), True)),
    "MaskedFillBackward1": (lambda x, y: x.masked_fill(y > 0, y.sum()),),
    "MaximumBackward0": (torch.maximum,),
    "MeanBackward0": (lambda x, y: x.mean(), lambda x, y: x.mean(dtype=torch.float64)),
    "MeanBackward1": (
        lambda x, y: x.mean(-1, keepdim=True),
        lambda x, y: x.mean((0, 1)),
        lambda x, y: x.mean(-1, dtype=torch.float32),
    ),
    "MinimumBackward0": (torch.minimum,),
    "MishBackward0": (lambda x, y: F.mish(x),),
    "MmBackward0": (
        lambda x, y: torch.mm(rows_of(x), rows_of(y).T),
        lambda x, y: F.linear(x, matrix(x, y)),
    ),
    "MulBackward0": (
        lambda x, y: x * y,
        lambda x, y: x * 3,
        lambda x, y: 0.1 * x,
        lambda x, y: x * y.detach(),
        lambda x, y: x * vector(y),
        lambda x, y: x.sum() * 0.3,
        lambda x, y: x * y.float(),
        lambda x, y: F.dropout(x, 0.3),
    ),
    "MulBackward1": (lambda x, y: aten.mul.Scalar(x, 0.3),),
    "NativeDropoutBackward0": (
        lambda x, y: torch.native_dropout(x, 0.3, True)[0],
        lambda x, y: torch.native_dropout(x, 1.0, True)[0],
    ),
    "NativeGroupNormBackward0": (
        lambda x, y: F.group_norm(image_of(x), 2, channels(x), channels(y)),
    ),
    "NativeLayerNormBackward0": (
        lambda x, y: F.layer_norm(x, x.shape[-1:], vector(x), vector(y)),
        lambda x, y: F.layer_norm(x, x.shape[-1:], vector(x), vector(y).detach()),
        lambda x, y: F.layer_norm(x, x.shape[-2:]),
    ),
    "NegBackward0": (lambda x, y: -x,),
    "PermuteBackward0": (
        lambda x, y: x.movedim(0, -1),
        lambda x, y: image_of(x).permute(2, 0, -1, 1),
    ),
    "PowBackward0": (lambda x, y: x**2, lambda x, y: x.square(), lambda x, y: x**-0.5),
    "PowBackward1": (lambda x, y: x**y,),
    "PowBackward2": (lambda x, y: 2.5**x,),
    "ReciprocalBackward0": (lambda x, y: 1 / x,),
    "ReluBackward0": (lambda x, y: x.relu(),),
    "RepeatBackward0": (lambda x, y: x.repeat(2, *[1] * x.dim()),),
    "ReshapeAliasBackward0": (lambda x, y: aten._reshape_alias(x, x.shape, x.stride()),),
    "RollBackward0": (lambda x, y: x.roll((1, 2), (0, -1)), lambda x, y: x.roll(1)),
    "RsqrtBackward0": (lambda x, y: x.rsqrt(),),
    "ScaledDotProductFlashAttentionForCpuBackward0": (
        lambda x, y: attention(heads_of(x), heads_of(y), heads_of(x * y)),
        lambda x, y: attention(heads_of(x), heads_of(y), heads_of(x), is_causal=True, scale=0.3),
        lambda x, y: attention(
            heads_of(x), heads_of(y), heads_of(x), attn_mask=torch.ones(16, 16).tril() > 0
        ),
    ),
    "SafeSoftmaxBackward0": (
        lambda x, y: aten._safe_softmax(torch.where(y > 0, x, x * -torch.inf), -1),
        lambda x, y: aten._safe_softmax(x, 0, dtype=torch.float64),
    ),
    "SelectBackward0": (lambda x, y: x.select(-1, -2), lambda x, y: x[1]),
    "SigmoidBackward0": (lambda x, y: x.sigmoid(),),
    "SignBackward0": (lambda x, y: x.sign(),),
    "SiluBackward0": (lambda x, y: F.silu(x),),
    "SinBackward0": (lambda x, y: x.sin(),),
    "SliceBackward0": (lambda x, y: x[:, 1:-1], lambda x, y: x[..., ::2], lambda x, y: x[..., -3:]),
    "SoftmaxBackward0": (
        lambda x, y: x.softmax(-1),
        lambda x, y: F.softmax(x, 0, dtype=torch.float32),
    ),
    "SoftplusBackward0": (lambda x, y: F.softplus(x, 2, 0.5),),
    "SplitBackward0": (lambda x, y: x.split(2, -1)[-1], lambda x, y: x.chunk(2)[0]),
    "SplitWithSizesBackward0": (lambda x, y: x.split([1, x.shape[-1] - 1], -1)[1],),
    "SqrtBackward0": (lambda x, y: x.sqrt(),),
    "SqueezeBackward0": (lambda x, y: x[None, :, None].squeeze(),),
    "SqueezeBackward1": (lambda x, y: x[None].squeeze(0),),
    "SqueezeBackward2": (lambda x, y: x[None, ..., None].squeeze((0, -1, 1)),),
    "StackBackward0": (lambda x, y: torch.stack([x, y, x], -1),),
    "SubBackward0": (lambda x, y: x - y, lambda x, y: torch.sub(x, y, alpha=3)),
    "SumBackward0": (lambda x, y: x.sum(), lambda x, y: x.sum(dtype=torch.float64)),
    "SumBackward1": (
        lambda x, y: x.sum(-1, keepdim=True),
        lambda x, y: x.sum((0, 1)),
        lambda x, y: x.sum(-1, dtype=torch.float32),
    ),
    "TBackward0": (lambda x, y: rows_of(x).t(),),
    "TanhBackward0": (lambda x, y: x.tanh(),),
    "ToCopyBackward0": (
        lambda x, y: x.to(torch.bfloat16 if x.dtype is torch.float32 else torch.float32),
    ),
    "TransposeBackward0": (lambda x, y: x.transpose(-1, 0), lambda x, y: x.mT),
    "TrilBackward0": (lambda x, y: x.tril(-1),),
    "TriuBackward0": (lambda x, y: x.triu(1),),
    "UnbindBackward0": (lambda x, y: x.unbind(-1)[1],),
    "UnsafeViewBackward0": (lambda x, y: aten._unsafe_view(x.contiguous(), (-1,)),),
    "UnsqueezeBackward0": (lambda x, y: x.unsqueeze(-2),),
    "VarBackward0": (lambda x, y: x.var(), lambda x, y: x.var(-1, correction=0, keepdim=True)),
    "ViewBackward0": (lambda x, y: x.contiguous().view(1, -1),),
    "WhereBackward0": (lambda x, y: torch.where(x > y, x, y),),
}
