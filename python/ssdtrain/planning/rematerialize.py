"""Chooses the saved tensors that are made again from others instead of being kept or moved. Pure.

A tensor that is made again frees its memory for the time of the operations that make it, and wears
no drive. The operations are known from the graph, and their times are measured in proofs. TERAIO
(arXiv 2506.06472) and Fuyou (arXiv 2403.06504) choose between moving and computing for whole
layers; here the choice is made for each saved tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

__all__ = [
    "CHAIN_MAX",
    "NO_PRESSURE",
    "PRESSURE_SHARE_MIN",
    "Pressure",
    "Proof",
    "Proofs",
    "RecipeUse",
    "choose_rematerialized",
    "largest_chain",
    "needed_for",
]

PROOF_COUNT = 2
"""A recipe is used once so many rounds in a row have made equal bits with it."""
SLOWDOWN_SHARE_MAX = 0.02
"""The operations of all recipes of a round take at most this share of its time."""
HOOKS_S = 40e-6
"""Time of Python for a recipe: it is found in pack and run in unpack."""
IDLE_FACTOR_MIN = 2.0
"""A tensor must lie idle for so many times the time of its operations, as one that moves must for
its write and read. At the end of forward, where memory is at its peak, a tensor that comes back
soon is away like all others."""
LEAD_SHARE_MAX = 1 / 20
"""A tensor that is made for another, and then waits for its own node for a larger share of the
round, would be in memory too early."""
CHAIN_MAX = 8
"""A tensor may be made from a tensor that is made from another, so many times."""
CHAIN_SHARE_MAX = 1 / 8
"""Under a bound, a tensor and all that it is made from take at most this share of the bound: they
are in memory together while it is made."""
PRESSURE_SHARE_MIN = 0.01
"""A round that waits for memory for a larger share of its time may spend it on recipes instead."""
KNOWN_MAX = 100_000
"""Keys that are remembered before all is forgotten: bounds memory if shapes never repeat."""

RecipeUse = Literal["none", "prove", "use"]
"""A pack looks for no recipe (``"none"``), finds one to prove it, or uses one."""


class Storage(Protocol):
    """A storage of a round; ``policy.Item`` is one."""

    @property
    def key(self) -> int:
        """Its name in the plans."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def packed_s(self) -> float:
        """When it was saved."""

    @property
    def needed_s(self) -> float:
        """When it was needed first."""


@dataclass(frozen=True)
class Proof:
    """Rounds in which a recipe made the bits that had been saved."""

    form: Hashable
    """The operations of the recipe and the layouts of its tensors, which have to be the same in
    later rounds."""
    seconds: float
    """The least time that operations of this form took, for any tensor."""
    sources: tuple[int, ...]
    """The keys of the saved tensors that it is made from."""
    count: int = 1


@dataclass(frozen=True)
class Pressure:
    """A bound on memory, and the waits that it cost a round."""

    limit_bytes: float = math.inf
    """The bound."""
    stall_s: float = 0.0
    """How long the round waited for room and for reads."""
    room_bytes: float = math.inf
    """The bytes that saved tensors should take at most, by the bound of a GPU."""
    has_settled: bool = False
    """True if the bound of a GPU is met, or missed as in the rounds before: no new plan helps."""

    @property
    def is_of_disk(self) -> bool:
        """True if rounds wait for the disk to keep the bound."""
        return math.isfinite(self.limit_bytes) and not math.isfinite(self.room_bytes)

    @property
    def chain_bytes_max(self) -> float:
        """The most bytes of a tensor that is made again, with all that it is made from."""
        return CHAIN_SHARE_MAX * self.limit_bytes


NO_PRESSURE = Pressure()
"""There is no bound."""


class Proofs:
    """The recipes that were compared with the bytes of saved tensors, by key.

    Sessions of the same ``offload`` object share them, as they share the plans.
    """

    def __init__(self) -> None:
        self._proofs: dict[int, Proof] = {}
        self._barred: set[int] = set()
        self._seconds: dict[Hashable, float] = {}
        """By form: two measurements of each tensor are few on a machine that others use, too."""
        self.sources: set[int] = set()
        """Keys of the tensors that proved recipes begin with."""
        self._dear: set[int] = set()
        self.takes_dear = False
        """True once a round under a bound has waited for long: then recipes with matrix products,
        attention or convolutions are proved as well."""
        self.differing_count = 0
        """Recipes that made other bits than were saved, and are not used."""

    def use(self, key: int) -> RecipeUse:
        """Return ``"prove"`` while the recipe of this key has not been compared often enough."""
        if key in self._barred or (key in self._dear and not self.takes_dear):
            return "none"
        proof = self._proofs.get(key)
        return "prove" if proof is None or proof.count < PROOF_COUNT else "use"

    def get(self, key: int) -> Proof | None:
        """Return the proof of a recipe that may be used."""
        proof = self._proofs.get(key)
        if proof is None or proof.count < PROOF_COUNT:
            return None
        return replace(proof, seconds=self._seconds.get(proof.form, proof.seconds))

    def note(self, key: int, proof: Proof) -> None:
        """Note that a recipe has made equal bits."""
        before = self._proofs.get(key)
        if before is not None and before.form == proof.form:
            proof = replace(proof, count=before.count + 1)
        known = self._proofs, self._barred, self._seconds, self._dear
        if sum(map(len, known)) >= KNOWN_MAX:
            self._proofs.clear()
            self._barred.clear()
            self._seconds.clear()
            self._dear.clear()
            self.sources.clear()
        self._proofs[key] = proof
        self._seconds[proof.form] = min(proof.seconds, self._seconds.get(proof.form, math.inf))
        self.sources.update(proof.sources)

    def put_off(self, key: int) -> None:
        """Prove the recipe of this key, which is dear, only once such recipes may be worth it."""
        self._dear.add(key)

    def bar(self, key: int, *, differs: bool = False) -> None:
        """Use no recipe for this key: there is none, or it makes other bits."""
        self.differing_count += differs
        self._proofs.pop(key, None)
        self._barred.add(key)


def choose_rematerialized(
    items: Sequence[Storage],
    proofs: Proofs,
    *,
    before: Iterable[int] = (),
    excluded: frozenset[int] | set[int] = frozenset(),
    pressure: Pressure = NO_PRESSURE,
    disk_s: float = 0.0,
    wanted_bytes: int = 0,
) -> frozenset[int]:
    """Return the keys of the tensors to make again, those that free most for a second first.

    ``before`` are the keys that the round made again: their operations are a part of its time.
    Under a bound, the round would have waited for them, too. Tensors are made again beyond the
    usual share of the time as long as there are waits that this shortens: for each byte, ``disk_s``
    seconds of the disk. At least ``wanted_bytes`` are made again, at any cost, if they can be.
    """
    known = {item.key: proof for item in items if (proof := proofs.get(item.key)) is not None}
    if not known:
        return frozenset()
    whole_s = max(item.needed_s for item in items) - items[0].packed_s
    made_keys = known.keys() & set(before)
    made = [item for item in items if item.key in made_keys]
    before_s = sum(known[item.key].seconds + HOOKS_S for item in made)
    left_s = SLOWDOWN_SHARE_MAX * max(0.0, whole_s - before_s)
    waits_s = 0.0
    if pressure.is_of_disk:
        waits_s = pressure.stall_s + disk_s * sum(item.nbytes for item in made)
    candidates = [
        item
        for item in items
        if item.key in known
        and item.key not in excluded
        and item.needed_s - item.packed_s >= IDLE_FACTOR_MIN * (known[item.key].seconds + HOOKS_S)
    ]
    candidates.sort(key=lambda item: (known[item.key].seconds + HOOKS_S) / item.nbytes)
    chains = _Chains(items, known, pressure.chain_bytes_max)
    for item in candidates:
        seconds, spared_s = known[item.key].seconds + HOOKS_S, disk_s * item.nbytes
        is_worth = seconds <= left_s or seconds < min(spared_s, waits_s) or wanted_bytes > 0
        if is_worth and chains.add(item.key, LEAD_SHARE_MAX * whole_s):
            left_s = max(0.0, left_s - seconds)
            waits_s = max(0.0, waits_s - spared_s)
            wanted_bytes -= item.nbytes
    return frozenset(chains.made_s)


def largest_chain(items: Sequence[Storage], chosen: frozenset[int], proofs: Proofs) -> int:
    """Return the most bytes of a tensor that is made again and of all that it is made from."""
    chains = _chains_of(items, chosen, proofs)
    return max(map(chains.bytes_of, chosen), default=0)


def needed_for(
    items: Sequence[Storage], chosen: frozenset[int], proofs: Proofs
) -> dict[int, float]:
    """Return, by key of a tensor from which others are made, the first time that they need it."""
    return _chains_of(items, chosen, proofs).wanted_s


def _chains_of(items: Sequence[Storage], chosen: frozenset[int], proofs: Proofs) -> _Chains:
    known = {key: proof for key in chosen if (proof := proofs.get(key)) is not None}
    chains = _Chains(items, known)
    for key in known:
        chains.add(key, math.inf)
    return chains


class _Chains:
    """Tensors that are made again, some from others of them."""

    def __init__(
        self,
        items: Sequence[Storage],
        known: Mapping[int, Proof],
        bytes_max: float = math.inf,
    ) -> None:
        self._needed_s = {item.key: item.needed_s for item in items}
        self._nbytes = {item.key: item.nbytes for item in items}
        self._known, self._bytes_max = known, bytes_max
        self.made_s: dict[int, float] = {}
        """When each tensor is made: for its node, or earlier for another tensor."""
        self.wanted_s: dict[int, float] = {}
        """When a tensor is needed first to make another."""
        self._made_from: dict[int, Sequence[int]] = {}
        """The sources of each tensor."""
        self._users: dict[int, list[int]] = {}
        """By source, the tensors that are made from it."""

    def add(self, key: int, lead_s_max: float) -> bool:
        """Make this tensor again, too.

        Not if it or another would then be made too early, or with too many bytes in memory.
        """
        made_s = {key: min(self._needed_s[key], self.wanted_s.get(key, math.inf))}
        wanted_s: dict[int, float] = {}
        waiting = [(key, 1)]
        while waiting:
            user, length = waiting.pop()
            moment_s = made_s[user]
            if length > CHAIN_MAX or self._needed_s[user] - moment_s > lead_s_max:
                return False
            for source in self._known[user].sources:
                wanted_s[source] = min(wanted_s.get(source, math.inf), moment_s)
                before_s = made_s.get(source, self.made_s.get(source, -math.inf))
                if moment_s < before_s:
                    made_s[source] = moment_s
                    waiting.append((source, length + 1))
        self._made_from[key] = self._known[key].sources
        if any(self.bytes_of(user) > self._bytes_max for user in _reached(key, self._users)):
            del self._made_from[key]
            return False
        for source, moment_s in wanted_s.items():
            self.wanted_s[source] = min(self.wanted_s.get(source, math.inf), moment_s)
        for source in self._known[key].sources:
            self._users.setdefault(source, []).append(key)
        self.made_s |= made_s
        return True

    def bytes_of(self, key: int) -> int:
        """Return the bytes of a tensor that is made again and of all that it is made from."""
        return sum(self._nbytes.get(each, 0) for each in _reached(key, self._made_from))


def _reached(key: int, steps: Mapping[int, Iterable[int]]) -> set[int]:
    """Return this key and all that the steps lead to."""
    found, waiting = {key}, [key]
    while waiting:
        after = set(steps.get(waiting.pop(), ())) - found
        found |= after
        waiting += after
    return found
