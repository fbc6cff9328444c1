"""Training on a GPU with everything on its way to the disk: what tests of CUDA share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ssdtrain
from checkout import SCRATCH
from ssdtrain._core import Gpus
from ssdtrain.activations import followed
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.planning.policy import Item, Policy

ELEMENTS = 16 << 10
"""64 KiB in float32: sixteen of them lie in a ring of 1 MiB, and a fourth of it is for loads."""
RING_BYTES = 1 << 20


class Everything(Policy):
    """A policy that writes everything, so that each tensor takes the whole way."""

    def learn(self, *arguments: Any) -> None:
        """Keep nothing."""

    def note_futile(self, key: int) -> None:
        """Write it again all the same."""


class All(set[int]):
    """A set that contains every key."""

    def __contains__(self, _: object) -> bool:
        return True


class ToldWhen(Everything):
    """A policy by which each tensor has been copied so many packs after its own."""

    def __init__(self, packs: int) -> None:
        super().__init__()
        self._packs = packs
        self.stall_share: float | None = None

    def learn(self, signature: int, items: Sequence[Item], *rest: Any) -> None:
        """Tell moments in packs, and keep nothing."""
        super().learn(signature, items, *rest)
        _rates, self.stall_share, *_ = rest
        for place, item in enumerate(items):
            self.moments[item.key] = place, 2 * len(items) - place, place + self._packs

    def note_copied(self, copied: Sequence[tuple[int, float]]) -> None:
        """Tell no other moments."""


def at_any_price() -> AbstractContextManager[object]:
    """Let no hooks be too dear: that depends on their time, which beside this device says nothing.

    It is asked of rounds that are followed in part.
    """
    return mock.patch.object(followed, "PRICE_MAX", math.inf)


@contextmanager
def offloaded(policy: Policy | None = None, **options: Any) -> Iterator[ssdtrain.Session]:
    """Offload all that is saved in this thread; the disk is one whose calls the fake GPU sees."""
    store = StoreConfig(dirs=(str(SCRATCH),), direct_io="optional", backend="psync")
    given = {"min_bytes": 512, "pinned_bytes": RING_BYTES, "gds": "disabled"}
    given |= {"rematerialize": "never"} | options
    session = ssdtrain.Session(OffloadConfig(store=store, **given), policy or Everything())
    try:
        with at_any_price(), session.context():
            yield session
    finally:
        session.close()


def made(seed: int, count: int = ELEMENTS) -> Tensor:
    """Return a leaf on the GPU that asks for a gradient."""
    torch.manual_seed(seed)
    return torch.randn(count).cuda().requires_grad_()


def chain(x: Tensor, count: int) -> Tensor:
    """Save each of ``count`` results of the last one."""
    for _ in range(count):
        x = torch.sin(x * 1.01)
    return x


def check(leaf: Tensor, count: int) -> None:
    """Compare the gradient of a chain with that of a plain run."""
    plain = made(0, leaf.numel())
    chain(plain, count).sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad.cpu(), plain.grad.cpu())


def settle(session: ssdtrain.Session, staying_bytes: int = 0) -> None:
    """Wait until all that was saved is on the disk, or stays in pinned memory, and left the GPU."""
    torch.cuda.synchronize()
    session.flush()
    # Each call of the driver gives the worker its turn.
    while pinned(session) > staying_bytes:
        torch.cuda.synchronize()
    # The memory of the last ones is let go by whoever looks next.
    session.flush()


def pinned(session: ssdtrain.Session) -> int:
    """Return the bytes of pinned memory, or of the ring on the GPU, that are in use."""
    gpus = gpus_of(session)
    return gpus.pinned_bytes()[1] + gpus.ring_bytes()[1]


def gpus_of(session: ssdtrain.Session) -> Gpus:
    """Return the GPUs of a session."""
    gpus = session._hooks._transfer.gpus  # type: ignore[union-attr]
    assert gpus is not None
    return gpus


def use_memory(like: Tensor, count: int) -> None:
    """Write to as much free memory of the current stream, and let it go at once."""
    kept = [torch.full_like(like, 7.0, requires_grad=False) for _ in range(count)]
    del kept


def refuse(gradient: Tensor) -> Tensor:
    """Give a backward up, as a hook of a tensor."""
    raise RuntimeError("given up here")


def let_backward_go() -> None:
    """Wait until autograd's thread holds nothing of a backward that failed.

    The exception comes while that thread may still hold the graph, until it takes its next task.
    """
    torch.ones((), device="cuda", requires_grad=True).backward()
