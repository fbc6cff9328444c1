"""Says why a session offloaded little or nothing, and what to change. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ssdtrain.planning.policy import RATE_GUESS, Rates
from ssdtrain.seen import Seen
from ssdtrain.sizes import shown_bytes, shown_count

__all__ = [
    "INNER_BLOCK",
    "NO_DIRECTORY",
    "ONE_NODE",
    "PRICE",
    "Evidence",
    "Observed",
    "PlannedRound",
    "Reason",
    "reason_of",
]

LITTLE_SHARE_MAX = 0.1
"""A session that offloads a smaller share of its saved bytes does not lower the peak visibly."""
EXPECTED_BYTES_MIN = 8 << 20
"""A session with a smaller peak of saved bytes gets no warning: the memory of Python and torch
varies by more from run to run."""
NODES_MIN = 8
"""A thread that makes fewer nodes may only add a few numbers, which saves no tensor."""
CHILD_S_MIN = 1.0
"""Short commands and idle workers of data loaders take less time than this, training more."""
INNER_BLOCK = "an inner `with ssdtrain.offload` block"
"""The name of hooks that another block of ssdtrain has installed."""
ONE_NODE = (
    "one node of the graph saves nearly all at once and at its end, so offloading cannot lower the "
    "peak; if torch.compile made it of the whole model, compile block by block instead "
    "(block.compile())"
)
PRICE = (
    "the GPU waits for Python in these steps, and to move tensors took %.0f%% of a step, which is "
    "more than their memory is worth, so most steps keep all; larger batches, CUDA graphs or "
    "torch.compile give the GPU more work for each operation of Python's"
)

NO_DIRECTORY = (
    "no directory was given, so nothing is written: tensors are made again from others where that "
    "takes hardly any time (if rematerialize allows it), and those of a GPU go to pinned memory, "
    "as far as max_host_bytes and the time allow; ssdtrain.offload(dir) writes to a disk"
)


@dataclass(frozen=True, kw_only=True)
class PlannedRound:
    """A round and the figures of its plan."""

    saved_bytes: int
    staying_bytes: int
    """Bytes that the plan keeps in memory."""
    idle_s: float
    """Average time between the save and the use of these bytes."""
    rates: Rates
    caution: float
    """The share of ``rates`` that the plan counts on."""
    plan_count: int
    """How many such rounds had a plan made from them."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Counts of the process while a block was open; the hooks see none of this."""

    node_count: int
    """Nodes of autograd's graph that the thread of the block made."""
    backward_count: int
    """Backwards of all threads of the process."""
    has_reached_children: bool
    """True if child processes were started that have blocks of their own (`ssdtrain run`)."""
    child_s: float
    """Computing time of child processes that have ended."""
    process_s: float
    """Computing time of all threads of this process."""
    others: str | None
    """Name of the hooks that were seen on top of the session's."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Figures of a session."""

    seen: Seen
    min_bytes: int
    has_directory: bool
    offloaded_bytes: int
    """Bytes that left memory."""
    saved_bytes: int
    """Saved bytes that have been used or dropped since."""
    peak_bytes: int
    """Most saved bytes that were in memory at once."""
    failed_count: int
    failure: str | None
    """The error of the last write that failed."""
    stayed: str | None
    """Why the last tensor that could not leave its GPU stayed there."""
    budget_error_count: int
    is_one_node: bool
    """True if one node saves nearly all bytes of a round."""
    usual_round: Callable[[], PlannedRound | None]
    """Returns the round whose plan keeps most; it searches all recorded rounds."""
    observed: Observed | None
    """``None`` while the block is open, or if another thread ended it."""


class Reason(NamedTuple):
    """A sentence for the user."""

    text: str
    is_warning: bool
    """True if the user could expect more."""


def reason_of(known: Evidence) -> Reason | None:
    """Return the first cause why little or nothing was offloaded; ``None`` if much was."""
    seen, observed = known.seen, known.observed
    if known.offloaded_bytes > LITTLE_SHARE_MAX * known.saved_bytes:
        return None
    if known.budget_error_count and not known.failed_count:
        return Reason(
            "max_resident_bytes left no room for what an operation saved; the BudgetError of its "
            "backward names the operation and the bound that it takes",
            is_warning=False,
        )
    if observed is None and not (seen.count() and known.saved_bytes):
        return None
    if observed is not None and seen.count() == 0:
        return _why_nothing_came(observed)
    is_unused = observed is not None and not (observed.backward_count and known.saved_bytes)
    if not seen.storage_bytes() or (is_unused and not known.failed_count):
        return Reason(_why_none_left(seen), is_warning=False)
    text = _why_little_went(known)
    if observed is not None and observed.others is not None:
        text += f"; besides, hooks of {observed.others} were on top of ssdtrain's for a time"
    return Reason(text, is_warning=known.peak_bytes >= EXPECTED_BYTES_MIN and not is_unused)


def _why_none_left(seen: Seen) -> str:
    """Return the reason why no saved tensor left memory."""
    if seen.storage_bytes():
        return "the block ended before a backward used what was saved"
    if seen.unusual.count > seen.weight_count:
        return (
            f"of {shown_count(seen.unusual.count, 'saved tensor')} none was a plain CPU tensor "
            "(but sparse, of another device or of another class); ssdtrain keeps such tensors"
        )
    return "only weights were saved, which stay in memory for the optimizer"


def _why_nothing_came(observed: Observed) -> Reason:
    """Return the reason why no tensor reached the hooks."""
    if not observed.node_count:
        return _why_no_node(observed)
    nodes = f"the thread made {shown_count(observed.node_count, 'node')} in the block"
    if observed.others is None and observed.node_count < NODES_MIN:
        text = f"{nodes}, and so few may save nothing, as those of sums and views do"
        return Reason(text, is_warning=False)
    whose = "" if observed.others is None else f", those of {observed.others}"
    return Reason(
        f"{nodes}, and nothing that they saved reached ssdtrain: torch calls only the innermost "
        f"hooks on saved tensors, and others were inside of ssdtrain's{whose}; switch them off "
        "(save_on_cpu, offload_wrapper, the activation offloading of a trainer), or enter a single "
        "block of ssdtrain inside of them",
        is_warning=True,
    )


def _why_no_node(observed: Observed) -> Reason:
    """Return the reason why the thread of the block made no node."""
    text, is_warning = "no operation in the block was recorded for a backward", True
    if observed.backward_count:
        backwards = shown_count(observed.backward_count, "backward")
        text += (
            f", but {backwards} ran: the forward ran outside of the block (before it, or in "
            "another thread); enter the block before the forward, in the thread that runs it"
        )
    elif observed.has_reached_children:
        # ``child_s`` has no time of the children of a fork server.
        is_warning = False
        text += (
            "; the child processes that Python started (multiprocessing, os.fork) have blocks and "
            "reports of their own"
        )
    elif observed.child_s >= max(CHILD_S_MIN, observed.process_s):
        text += (
            f", while child processes computed for {observed.child_s:.1f} s, which the hooks do "
            "not reach: enter the block in the function that the launcher starts in each of them"
        )
    else:
        is_warning = False
        text += (
            "; nothing is saved under torch.no_grad() and without parameters that ask for a "
            "gradient"
        )
    return Reason(text, is_warning)


def _why_little_went(known: Evidence) -> str:
    """Return the cause that kept most bytes in memory."""
    if known.failed_count:
        writes = shown_count(
            known.failed_count, "write failed or was refused", "writes failed or were refused"
        )
        return f"{writes}, the last one with: {known.failure}"
    seen = known.seen
    largest = max(seen.staying(known.min_bytes), key=lambda part: part.nbytes)
    late_bytes = seen.eligible.nbytes - seen.planned.nbytes
    if known.is_one_node and seen.eligible.nbytes > largest.nbytes:
        return ONE_NODE
    if largest.nbytes >= max(seen.planned.nbytes, late_bytes):
        advice = largest.advice or "ssdtrain keeps such tensors in memory"
        return f"most saved bytes are {largest.where}; {advice}"
    if not known.has_directory:
        return NO_DIRECTORY
    if seen.planned.nbytes >= late_bytes:
        return _planned(known.usual_round())
    return _late(known)


def _late(known: Evidence) -> str:
    if known.stayed is not None:
        return f"most saved tensors could not leave the GPU, the last one because: {known.stayed}"
    usual = known.usual_round()
    late = "backward asked for most tensors before they had been written, or while others held them"
    if usual is not None and usual.plan_count == 1:
        return f"{late}; this was the first step of its kind, and a plan is made after it"
    return (
        f"{late}{_figures(usual)}; a first step is often like that, later ones if the disk is slow "
        "or steps are very short"
    )


def _planned(usual: PlannedRound | None) -> str:
    advice = "a faster disk, or several (dir=[...]), changes that"
    if usual is not None and usual.rates.are_bound_by_copies():
        advice = "the link of the GPU is slower than the disk, so a faster disk changes nothing"
    return (
        "the plan keeps tensors that could not be written and read back in time"
        f"{_figures(usual)}; {advice}; under max_resident_bytes they leave, and training waits"
    )


def _figures(usual: PlannedRound | None) -> str:
    """Return the figures of a round, of its plan, and of the rates that the plan was made with."""
    if usual is None:
        return ""
    rates = usual.rates
    text = f": a step saves {shown_bytes(usual.saved_bytes)}"
    if usual.staying_bytes:
        moved_s = usual.staying_bytes * (1 / rates.write + 1 / rates.read) / usual.caution
        text += (
            f", of which {shown_bytes(usual.staying_bytes)} stay: they are needed "
            f"{usual.idle_s:.3f} s after they were saved, on average, and to write and read them "
            f"takes {moved_s:.3f} s"
        )
    text += f"; the disk writes {_rate(rates.write)} and reads {_rate(rates.read)}"
    for gpu, copies in rates.copies.items():
        text += f", GPU {gpu} copies {_rate(copies.down)} to memory and {_rate(copies.up)} back"
    return f"{text} a second, of which the plan counts on {usual.caution:.0%}"


def _rate(rate: float) -> str:
    if rate == RATE_GUESS:
        return f"{shown_bytes(rate)} (a guess)"
    return shown_bytes(rate) if math.isfinite(rate) else "an unknown size"
