"""Random small graphs: the bits and the refusals of plain autograd, wherever the bytes are.

A program is a list of operations on a pool of tensors: views, changes in place, shared storages,
operations that save, and walks back of every kind. A refusal does not end it: what autograd refuses
once, and what it gives afterwards, is compared too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support import IN_PLACE, MODES, Flush, Rig, assert_equal_bits, nothing, sizes

Op = tuple[str, int, int]


class Pool:
    """The tensors of a random program, and what it can do with them."""

    def __init__(self, dtype: torch.dtype, side: int, flush: Flush) -> None:
        self.leaf = nn.Parameter(torch.randn(side, side, dtype=dtype))
        data = torch.randn(side, side, dtype=dtype)
        self.tensors = [self.leaf * 1, data, data[1:]]
        self.index = torch.randint(0, side, (side,))
        self.flush = flush
        self.found: list[Tensor] = []

    def total(self) -> Tensor:
        weighed = [real(one).float().sum() * (n + 1) for n, one in enumerate(self.tensors)]
        return torch.stack(weighed).sum()

    def play(self, name: str, first: int, second: int) -> None:
        tensors = self.tensors
        a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if name in MAKES:
            tensors.append(MAKES[name](a, b, second))
        elif name in CHANGES:
            CHANGES[name](a, second)
        elif name in LOOKUPS:
            tensors.append(LOOKUPS[name](a, self.index))
        elif name == "split":
            tensors += (a * 2).chunk(3, dim=-1)
        elif name == "split apart":
            # Each part counts its changes for itself.
            tensors += (a * 2).unsafe_chunk(3, dim=-1)
        elif name == "change the index":
            self.index.copy_(self.index.flip(0))
        elif name == "forget" and len(tensors) > 2:
            del tensors[second % len(tensors)]
        else:
            self.walk(name, a, b)

    def walk(self, name: str, a: Tensor, b: Tensor) -> None:
        """Go back through what was made, or let it go."""
        if name == "flush":
            self.flush()
        elif name == "drop":
            dropped = real(a).float().sigmoid().square().sum()
            self.flush()
            del dropped
        elif name == "look" and a.grad_fn is not None:
            self.found += [one.detach().clone() for one in saved_by(a)]
        elif name == "double" and a.requires_grad:
            self.flush()
            loss = real(a).float().cos().sum()
            (grad,) = torch.autograd.grad(loss, self.leaf, create_graph=True)
            self.tensors.append(grad)
        elif name == "backward":
            self.flush()
            self.total().backward(retain_graph=True)
        elif name == "free" and a.requires_grad:
            self.flush()
            real(a).float().square().sum().backward()
        elif name == "partial" and a.requires_grad and b.requires_grad:
            loss = real(a).float().square().sum()
            grads = torch.autograd.grad(loss, b, retain_graph=True, allow_unused=True)
            self.found += [one for one in grads if one is not None]


def real(a: Tensor) -> Tensor:
    return torch.view_as_real(a.resolve_conj()) if a.is_complex() else a


def saved_by(a: Tensor) -> list[Tensor]:
    """Return what the node of a tensor saved, as anybody may ask outside of a backward."""
    names = [name for name in dir(a.grad_fn) if name.startswith("_saved_")]
    found = [getattr(a.grad_fn, name) for name in names]
    return [one for one in found if isinstance(one, Tensor)]


def halve(a: Tensor, n: int) -> None:
    with torch.no_grad():
        a.mul_(0.5)


class Windows(torch.autograd.Function):
    """Saves four tensors on two storages, one of which it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, x[..., 1:], x.transpose(0, -1), y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, part, turned, y = ctx.saved_tensors
        return grad * 2 * x + part.sum() * grad + turned.transpose(0, -1) * 0.5 - y * 0.5


def square_matrix(a: Tensor) -> Tensor:
    return a.reshape(-1, a.shape[-1]) if a.dim() else a.reshape(1, 1)


MAKES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "slice": lambda a, b, n: a[n % 6 :, : 1 + n % 5] if a.dim() == 2 else a[..., :3],
    "steps": lambda a, b, n: a[..., n % 2 :: 2],
    "transpose": lambda a, b, n: a.transpose(0, -1),
    "expand": lambda a, b, n: a[..., :1].expand(*a.shape[:-1], 4),
    "view": lambda a, b, n: a.flatten() if n % 2 else a.unsqueeze(0),
    "diagonal": lambda a, b, n: a.diagonal(n % 3 - 1),
    "windows": lambda a, b, n: a.unfold(-1, 2, 1),
    "conj": lambda a, b, n: a.conj(),
    "imag": lambda a, b, n: a.conj().imag if a.is_complex() else a.neg(),
    "detach": lambda a, b, n: a.detach(),
    "mul": lambda a, b, n: a * b.mean().sin() * a,
    "times": lambda a, b, n: a * b,
    "exp": lambda a, b, n: (a * 0.1).exp(),
    "sigmoid": lambda a, b, n: a.sigmoid() * b.sum(),
    "matmul": lambda a, b, n: square_matrix(a).t() @ square_matrix(a),
    "outer": lambda a, b, n: real(a).float().flatten().outer(real(b).float().flatten()[:5]),
    "where": lambda a, b, n: torch.where(real(a) > 0, real(a).sin(), real(a) * real(a)),
    "cumprod": lambda a, b, n: a.cumprod(0),
    "softmax": lambda a, b, n: real(a).softmax(-1),
    "sort": lambda a, b, n: real(a).sort(-1).values,
    "max": lambda a, b, n: real(a).max(0).values * b.abs().sum().float(),
    "norm": lambda a, b, n: F.layer_norm(real(a), real(a).shape[-1:]),
    "noise": lambda a, b, n: F.rrelu(real(a), training=True),
    "dropout": lambda a, b, n: F.dropout(a, 0.3),
    "function": lambda a, b, n: Windows.apply(a),
    "cast": lambda a, b, n: real(a).to((torch.bfloat16, torch.float64, torch.float32)[n % 3]),
    "clone": lambda a, b, n: a.clone(memory_format=torch.contiguous_format),
}
CHANGES: dict[str, Callable[[Tensor, int], object]] = {
    "relu_": lambda a, n: a.relu_(),
    "mul_": lambda a, n: a.mul_(1.5),
    "add_ to a part": lambda a, n: a[..., :2].add_(0.25),
    "t_": lambda a, n: a.t_(),
    "zero_ a row": lambda a, n: a[n % 3].zero_(),
    "mul_ unseen": halve,
    "mul_ detached": lambda a, n: a.detach().mul_(0.75),
}
LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "select": lambda a, index: a.index_select(0, index[:3] % a.shape[0]),
    "rows": lambda a, index: a[index % a.shape[0]],
    "gather": lambda a, index: a.flatten().gather(0, index % a.numel()) * 2,
    "rows of a table": lambda a, index: F.embedding(index % a.shape[0], square_matrix(a)),
    "put": lambda a, index: a.index_put((index % a.shape[0],), a[0] * 2),
    "take": lambda a, index: a.take(index % a.numel()).square(),
}
WALKS = ["forget", "double", "backward", "free", "partial", "look", "drop", "flush"]
NAMES = [*MAKES, *CHANGES, *LOOKUPS, *WALKS, "split", "split apart", "change the index"]


def changes_unseen(names: set[str]) -> bool:
    """Return whether a program may change a result of a node without a node for the change."""
    is_detached = "detach" in names and not names.isdisjoint(CHANGES)
    return is_detached or not names.isdisjoint(("mul_ unseen", "mul_ detached"))


def play(
    program: list[Op], dtype: torch.dtype, side: int, flush: Flush
) -> tuple[list[str], dict[str, Tensor]]:
    """Run a program and walk back from all it made; return the refusals, and what came."""
    torch.manual_seed(len(program))
    pool = Pool(dtype, side, flush)
    refusals = []

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (RuntimeError, IndexError) as error:
            refusals.append(f"{name}: {type(error).__name__} {str(error).split(':')[0]}")

    for name, first, second in program:
        attempt(name, lambda name=name, a=first, b=second: pool.play(name, a, b))
    found: dict[str, Tensor] = {}

    def end() -> None:
        loss = pool.total()
        found["loss"] = loss.detach()
        flush()
        pool.tensors.clear()
        loss.backward()

    attempt("end", end)
    if pool.leaf.grad is not None:
        found["leaf"] = pool.leaf.grad
    found.update((str(number), one) for number, one in enumerate(pool.found))
    found["random state"] = torch.get_rng_state()
    return refusals, found


PROGRAMS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 30), st.integers(0, 30)),
    min_size=3,
    max_size=20,
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("programs_max", sizes(small=100, whole=None))
def test_random_graphs_give_equal_bits_and_equal_refusals(
    programs_max: int | None, tmp_path: Path
) -> None:
    """In the long run 400 programs, or as many as the profile says, see conftest.py."""

    programs_max = programs_max or max(400, settings().max_examples)
    played_count = 0

    @settings(
        max_examples=programs_max,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(program=PROGRAMS, dtype=DTYPES, side=st.sampled_from([6, 33]))
    def compare(program: list[Op], dtype: torch.dtype, side: int) -> None:
        nonlocal played_count
        played_count += 1
        refusals, expected = play(program, dtype, side, nothing)
        for mode in MODES:
            if mode == "made again" and changes_unseen({name for name, _, _ in program}):
                continue
            rig = Rig.in_mode(tmp_path, mode)
            with rig.context():
                flush = rig.flush if mode == "disk" else nothing
                refused, actual = play(program, dtype, side, flush)
            if mode == "made again" and refused != refusals:
                # A recipe may need a tensor that was changed, where plain autograd does not.
                more = Counter(refused) - Counter(refusals)
                assert any(IN_PLACE in it for it in more), refused
                event("a recipe refused a tensor that was changed")
            else:
                assert refused == refusals, mode
                assert_equal_bits(actual, expected)
            del actual
            rig.disk.resume()
            if mode == "disk" and rig.stats.bytes_read:
                event("bytes came back from the disk")
            if refusals:
                event("something was refused")
            rig.assert_empty()

    compare()
    assert played_count >= programs_max >= 100
