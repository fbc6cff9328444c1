"""Says how much memory a session gained, or why it gained little and how to gain more. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ssdtrain._core import Tally
from ssdtrain.planning.policy import RATE_GUESS, Rates
from ssdtrain.seen import Seen
from ssdtrain.sizes import shown_bytes, shown_count

__all__ = ["INNER_BLOCK", "Evidence", "Gain", "Observed", "PlannedRound", "Reason", "reason_of"]

LITTLE_SHARE_MAX = 0.1
"""A session that offloaded a smaller share of its saved bytes did not lower the peak visibly."""
EXPECTED_BYTES_MIN = 8 << 20
"""A session that never held so many bytes at once gets no warning: the memory of Python and torch
varies by more from run to run."""
NODES_MIN = 8
"""A thread that made fewer nodes may have added a few numbers, which saves no tensor."""
CHILD_S_MIN = 1.0
"""Short commands and idle workers of data loaders take less time than this, training more."""
PAGE_BYTES = 4096
GAINED_SHARE_LITTLE = 0.1
"""The report calls a smaller share of the bytes of saved tensors hardly a gain."""
SEEN_SHARE_LITTLE = 0.02
"""The same of a smaller share of the memory of the process, or of GPUs."""
LOST_SHARE_LITTLE = 0.01
"""The report gives no advice about a loss of a smaller share of the time in the block."""
INNER_BLOCK = "an inner block of ssdtrain"
"""The name of hooks on top that are those of another block."""
NO_BACKWARD = "the block ended before a backward used what was saved"
ONE_NODE = (
    "one node of the graph saves nearly all at once, so nothing of it can be gone before it is "
    "needed; if torch.compile made it of the whole model, compile block by block instead "
    "(block.compile())"
)


@dataclass(frozen=True, kw_only=True)
class PlannedRound:
    """A round, and what its plan was made of."""

    saved_bytes: int
    staying_bytes: int
    """Bytes that its plan keeps in memory."""
    idle_s: float
    """Time between the save and the need of these bytes, on average."""
    rates: Rates
    """The rates that the plan was made with."""
    caution: float
    """The share of these rates that the plan counts on."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Counts from the beginning of a block to its end, of which the hooks see nothing."""

    node_count: int
    """Nodes of autograd's graph that the thread made."""
    backward_count: int
    """Backwards of all threads of the process."""
    fork_count: int
    has_reached_children: bool
    """Whether Python started child processes, in which the block goes on by itself."""
    child_s: float
    """What child processes that have ended computed."""
    process_s: float
    """What this process computed, in all threads."""
    others: str | None
    """Whose hooks were seen on top of ours."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a session."""

    seen: Seen
    min_bytes: int
    offloaded_bytes: int
    """Written, and their memory freed."""
    saved_bytes: int
    """Saved bytes that have been used or dropped since."""
    peak_bytes: int
    """Most saved bytes that were in memory at once."""
    failed_count: int
    failure: str | None
    """Why the last write failed."""
    stayed_count: int
    stayed: str | None
    """Why the last of ``stayed_count`` tensors could not leave its GPU."""
    budget_error_count: int
    is_one_node: bool
    """Whether one node saves nearly all that a round does."""
    usual_round: Callable[[], PlannedRound | None]
    """Returns the round that keeps most by its plan; it searches all recorded rounds."""
    observed: Observed | None
    """What happened around the hooks; ``None``: not known, or the block is still open."""


@dataclass(frozen=True)
class Reason:
    """A sentence for a person."""

    text: str
    is_warning: bool
    """Whether something else could have been expected."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a session gained, and what that cost. Sizes in bytes, times in seconds."""

    saved_bytes: int
    """Most bytes of saved tensors at once, in memory or not."""
    resident_bytes: int
    """Most of these bytes that was in memory at once."""
    all_bytes: int
    """The peak of the process, or of the memory of GPUs."""
    away_bytes: int | None
    """On GPUs: most bytes of saved tensors that were not in their memory at once."""
    lost_s: float
    elapsed_s: float
    has_reason: bool
    """Whether the report tells why little was offloaded."""
    has_recomputed: bool
    """Whether blocks were computed again. Then a plain program saves more than ``saved_bytes``."""
    has_others: bool
    """Whether weights or state of an optimizer leave memory as well: that is a gain, too."""

    def __str__(self) -> str:
        """Write it for a person, with advice if hardly anything was gained."""
        if not self.saved_bytes and not self.has_others:
            return "nothing was saved for a backward here, so there was nothing to gain"
        gained_bytes = self.saved_bytes - self.resident_bytes
        least = "at least " if self.has_recomputed else ""
        text = (
            f"saved tensors took {shown_bytes(self.resident_bytes)} of memory at the peak, and "
            f"would take {least}{shown_bytes(self.saved_bytes)} without ssdtrain"
        )
        if self.away_bytes is not None:
            gained_bytes = self.away_bytes
            text = f"without ssdtrain GPUs would hold up to {shown_bytes(gained_bytes)} more"
        share = self.lost_s / max(self.elapsed_s, 1e-9)
        text += (
            f"; hooks and waits took {self.lost_s:.3f} s of {self.elapsed_s:.3f} s ({share:.1%})"
        )
        if self.has_others or self.has_recomputed:
            return text
        is_much = gained_bytes >= GAINED_SHARE_LITTLE * self.saved_bytes
        if is_much and gained_bytes >= SEEN_SHARE_LITTLE * self.all_bytes:
            return text
        if self.has_reason:
            return f"hardly anything was gained: {text}; why, and what to change, is told below"
        advice = "leave the block out"
        if share >= LOST_SHARE_LITTLE:
            advice += ", or raise min_bytes so that it takes less time"
        return f"hardly anything was gained: {text}; {advice}"


def reason_of(known: Evidence) -> Reason | None:
    """Return the first cause why little or nothing was offloaded; ``None`` if much was."""
    observed = known.observed
    is_little = known.offloaded_bytes <= LITTLE_SHARE_MAX * known.saved_bytes
    if is_little and known.budget_error_count and not known.failed_count:
        return Reason(
            "max_resident_bytes left no room for what an operation saved; the BudgetError, which "
            "its backward raises, names the operation, and the bound that it takes",
            is_warning=False,
        )
    if known.seen.count() == 0:
        return None if observed is None else _why_nothing_came(observed)
    if known.saved_bytes == 0:
        return _why_nothing_could_go(known) if observed is not None else None
    if not is_little:
        return None
    if observed is not None and observed.backward_count == 0 and not known.failed_count:
        return Reason(NO_BACKWARD, is_warning=False)
    text = _why_little_went(known)
    if observed is not None and observed.others is not None:
        text += f"; besides, hooks of {observed.others} were on top of ssdtrain's for a time"
    return Reason(text, known.peak_bytes >= EXPECTED_BYTES_MIN)


def _why_nothing_came(observed: Observed) -> Reason:
    """Say why no tensor reached the hooks."""
    if observed.node_count == 0:
        return _why_no_operation(observed)
    whose = observed.others
    nodes = shown_count(observed.node_count, "node")
    if whose == INNER_BLOCK:
        return Reason(
            f"the thread made {nodes} in the block, and an inner `with ssdtrain.offload` block "
            "took what they saved, as the innermost one does; one block is enough (`ssdtrain run` "
            "and the callbacks of trainers are one)",
            is_warning=True,
        )
    if whose is None and observed.node_count < NODES_MIN:
        return Reason(
            f"the thread made {nodes} in the block, and ssdtrain was given "
            "nothing: so few may save nothing, as those of sums and views do; if they saved "
            "something, other hooks on saved tensors were on top of ssdtrain's",
            is_warning=False,
        )
    return Reason(
        f"the thread made {nodes} in the block, and nothing that they saved "
        "reached ssdtrain: other hooks on saved tensors were on top of it, "
        + (f"those of {whose}" if whose is not None else "and only the innermost are called")
        + "; save_on_cpu, offload_wrapper and the activation offloading of trainers are such: "
        "switch it off, or enter ssdtrain's block inside it",
        is_warning=True,
    )


def _why_no_operation(observed: Observed) -> Reason:
    """Say why the thread of the block made no node."""
    if observed.backward_count > 0:
        backwards = shown_count(observed.backward_count, "backward")
        return Reason(
            "no operation of the thread that entered the block saved anything, while other threads "
            f"ran {backwards}: the hooks act in the thread that enters; "
            "enter the block in the thread that runs the forward",
            is_warning=True,
        )
    if observed.has_reached_children:
        # Does not ask for ``child_s``: the time of a fork server's children is not counted there.
        return Reason(
            "no operation of this process was recorded for a backward; the child processes that "
            "Python started (multiprocessing, os.fork) have blocks and reports of their own",
            is_warning=False,
        )
    if observed.child_s >= max(CHILD_S_MIN, observed.process_s):
        times = shown_count(observed.fork_count, "time")
        forks = f" (it was forked {times})" if observed.fork_count else ""
        return Reason(
            "no operation of this process saved anything, while its child processes computed for "
            f"{observed.child_s:.1f} s{forks}: hooks do not reach other processes; enter the block "
            "in the function that the launcher starts in each of them",
            is_warning=True,
        )
    return Reason(
        "no operation in the block was recorded for a backward; under torch.no_grad() and without "
        "parameters that ask for a gradient nothing is saved",
        is_warning=False,
    )


def _why_nothing_could_go(known: Evidence) -> Reason:
    """Say why none of the saved tensors could leave memory."""
    if known.seen.storage_bytes():
        text = _why_little_went(known) if known.failed_count else NO_BACKWARD
        return Reason(text, is_warning=False)
    unusual = known.seen.unusual
    if unusual.count > known.seen.weight_count:
        saved = shown_count(
            unusual.count,
            "saved tensor was not a plain CPU tensor",
            "saved tensors were not plain CPU tensors",
        )
        text = (
            f"{saved} (of other devices, sparse, or of other classes); ssdtrain leaves such where "
            "they are"
        )
    else:
        text = "only weights were saved, which stay in memory for the optimizer"
    return Reason(text, is_warning=False)


def _why_little_went(known: Evidence) -> str:
    if known.failed_count:
        writes = shown_count(
            known.failed_count, "write failed or was refused", "writes failed or were refused"
        )
        return f"{writes}, the last one so: {known.failure}"
    seen = known.seen
    others = (seen.small, seen.apart, seen.detached, seen.foreign)
    if known.is_one_node and seen.eligible.nbytes > max(one.nbytes for one in others):
        return ONE_NODE
    planned_bytes = seen.planned.nbytes
    causes = (
        (seen.small.nbytes, _small),
        (seen.apart.nbytes, _apart),
        (seen.detached.nbytes, _detached),
        (seen.foreign.nbytes, _foreign),
        (planned_bytes, _planned),
        (seen.eligible.nbytes - planned_bytes, _late),
    )
    _, say = max(causes, key=lambda cause: cause[0])
    return say(known)


def _small(known: Evidence) -> str:
    small = known.seen.small
    mean_bytes = small.nbytes // max(small.count, 1)
    tensors = shown_count(small.count, "saved tensor is", "saved tensors are")
    text = (
        f"{tensors} below min_bytes={known.min_bytes} ({shown_bytes(known.min_bytes)}), the "
        f"largest of {shown_bytes(small.largest_bytes)}, "
        f"{shown_bytes(mean_bytes)} on average"
    )
    if mean_bytes < PAGE_BYTES:
        return f"{text}: too small for a disk; larger batches make larger tensors"
    wanted_bytes = mean_bytes // PAGE_BYTES * PAGE_BYTES
    return f"{text}; min_bytes={wanted_bytes} would take those of at least the average"


def _apart(known: Evidence) -> str:
    return (
        f"{_lying(known.seen.apart)} in storages whose parts count their changes apart, as some "
        "operations of torch make them (the gates of LSTMCell and GRUCell are such): nobody could "
        "tell one part's bytes from the others', so they stay in memory"
    )


def _detached(known: Evidence) -> str:
    return (
        f"{_lying(known.seen.detached)} in storages of which they were detached as parts, by "
        ".data or detach() of a slice: such parts count their changes apart, and stay in memory; "
        "detach the whole tensor and take the part of that, or clone() the part"
    )


def _foreign(known: Evidence) -> str:
    return (
        f"{_lying(known.seen.foreign)} in the memory of numpy arrays or mapped files, whose owner "
        "may change it: what lies there stays; clone() what comes from an array"
    )


def _lying(tally: Tally) -> str:
    return shown_count(tally.count, "saved tensor lies", "saved tensors lie")


def _planned(known: Evidence) -> str:
    usual = known.usual_round()
    text = f"by plan tensors stay that could not be written and read back in time{_figures(usual)}"
    if usual is not None and usual.rates.are_bound_by_copies():
        return (
            f"{text}; the link of the GPU is slower than the disk here, so a faster disk changes "
            "nothing; under max_resident_bytes they go, at whatever time the copies need"
        )
    return (
        f"{text}; a faster disk, or several (dir=[...]), changes that, and under "
        "max_resident_bytes they go, at whatever time the disk needs"
    )


def _late(known: Evidence) -> str:
    if known.stayed is not None:
        tensors = shown_count(known.stayed_count, "tensor")
        return f"{tensors} could not leave the GPU, the last one for this: {known.stayed}"
    return (
        "backward asked for most tensors before they had been written, or while others still held "
        f"them{_figures(known.usual_round())}; a first step is often like that, later ones if the "
        "disk is slow or steps are very short"
    )


def _figures(usual: PlannedRound | None) -> str:
    """Write the figures of a round, of its plan, and of the rates that the plan was made with."""
    if usual is None:
        return ""
    rates = usual.rates
    reads = f"reads {shown_bytes(rates.read)}"
    if rates.read == RATE_GUESS:
        reads = f"is taken to read {shown_bytes(RATE_GUESS)}, as it has read too little to tell,"
    told = f"writes {shown_bytes(rates.write)} and {reads}"
    if rates.write == rates.read == RATE_GUESS:
        told = f"has not told yet what it does, and is taken to do {shown_bytes(RATE_GUESS)}"
    text = f": a step saves {shown_bytes(usual.saved_bytes)}"
    if usual.staying_bytes:
        moved_s = usual.staying_bytes * (1 / rates.write + 1 / rates.read) / usual.caution
        text += (
            f", of which {shown_bytes(usual.staying_bytes)} stay: they are needed "
            f"{usual.idle_s:.3f} s after they were saved, on average, and to write and read them "
            f"takes {moved_s:.3f} s"
        )
    text += f"; the disk {told} a second, of which the plan counts on {usual.caution:.0%}"
    for gpu, copies in rates.copies.items():
        ways = (("from it", copies.down), ("to it", copies.up))
        known = [f"{shown_bytes(rate)} {way}" for way, rate in ways if math.isfinite(rate)]
        if known:
            text += f"; the link of GPU {gpu} copies {' and '.join(known)} a second"
    return text
