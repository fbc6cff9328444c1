"""Makes a trace of a recorded round of a session. Pure.

A session sees when tensors are saved and needed, and no kernels: each stretch of computing between
two such events is a kernel of the trace (format: ``docs/internals/planning.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.planning.policy import Item
from ssdtrain.planning.trace import Kernel, Phase, Trace, TracedTensor

__all__ = ["Recording", "trace_of"]

PACKED, NEEDED = 0, 1


@dataclass(frozen=True)
class Recording:
    """The saved tensors of the last round of a kind."""

    items: Sequence[Item]
    """Each storage that was saved and needed, on a clock that stands still in waits for I/O."""
    began_s: float
    ended_s: float


def trace_of(recorded: Recording, *, name: str, origin: str) -> Trace:
    """Return a round as a step whose kernels are the stretches between its events.

    A tensor is used by the stretch that ends when it is saved, and by the stretch that begins when
    it is needed, in which its node computes. In between it is idle.
    """
    events = sorted(
        [(item.packed_s, PACKED, index) for index, item in enumerate(recorded.items)]
        + [(item.needed_s, NEEDED, index) for index, item in enumerate(recorded.items)]
    )
    uses: list[list[int]] = [[] for _ in range(len(events) + 1)]
    moments = [recorded.began_s, *(moment for moment, _, _ in events)]
    moments.append(max(recorded.ended_s, moments[-1]))
    backward = len(events)
    for number, (_, what, tensor) in enumerate(events):
        uses[number + what].append(tensor)
        if what == NEEDED:
            backward = min(backward, number + 1)
    kernels = tuple(
        Kernel(max(0.0, moments[number + 1] - moments[number]), tuple(uses[number]))
        for number in range(len(uses))
    )
    phases = [Phase("forward", 0)]
    if backward < len(kernels):
        phases.append(Phase("backward", backward))
    tensors = tuple(TracedTensor(nbytes=item.nbytes) for item in recorded.items)
    return Trace(name, kernels, tensors, tuple(phases), origin)
