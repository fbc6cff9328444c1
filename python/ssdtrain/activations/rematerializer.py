"""Makes saved tensors again from others, where the plan says so.

Rounds that are learned from prove recipes: at the first need of a tensor whose bytes are there, its
recipe makes it once more, and the bits are compared. So whatever a program does between forward and
backward, such as a change of a source, is a part of the proof.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ssdtrain._core import Account, Kept, Offloading, Records, Reservation, SavedTensor
from ssdtrain.activations.names import describe
from ssdtrain.activations.saved_tensor import version_of
from ssdtrain.activations.weak_table import WeakTable
from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.torch_internals import address_of, untraced
from ssdtrain.notices import log
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.rematerialize import CHAIN_MAX, Pressure, Proof
from ssdtrain.rematerialize.find import Outputs, find_recipe
from ssdtrain.rematerialize.masks import find_mask
from ssdtrain.rematerialize.narrow import narrowed, widening_from
from ssdtrain.rematerialize.recipe import Recipe, as_in_forward
from ssdtrain.residency import Residency
from ssdtrain.transfer.staged import use_here

__all__ = ["Rematerializer"]

BITS_SHARE_MAX = 1 / 64
"""Under a bound, the bits of masks take at most this share of it, because they cannot leave."""

Bring = Callable[[object], Tensor]
"""Returns the tensor of a packed object."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class RecipeInUse:
    """A recipe for a record."""

    recipe: Recipe
    chain: int
    """The length of the chain of tensors that are made from each other, which ends here."""
    copies: dict[int, Kept] = field(default_factory=dict)
    """By the identity of a source, a copy from before an optimizer changed that weight."""
    kept: frozenset[int] = frozenset()
    """The addresses of the storages of sources that stay in memory."""
    bits: tuple[Reservation, ...] = ()
    """The memory of the bits of a mask, in two accounts."""
    prepared_s: float = 0.0
    """The time that it took to look at a mask, or to copy narrow numbers."""

    def brought_by(self, bring: Bring) -> Bring:
        """Return a function that brings each source as it was when the tensor was saved."""

        def brought(source: object) -> Tensor:
            tensor = bring(self.copies.get(id(source), source))
            _refuse_without_memory(tensor)
            use_here(tensor)  # defence: sources that another stream uses
            return tensor

        return brought


_numbers = itertools.count()
_alive: WeakTable[Rematerializer] = WeakTable(forget_at_min=16)


@untraced
def _keep_weights(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    for rematerializer in _alive.alive():
        rematerializer.keep_weights(optimizer)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_keep_weights)


class Rematerializer:
    """Finds the recipes of saved tensors, proves them, and makes the tensors.

    Args:
        policy: Chooses the tensors, and has the proofs.
        records: The records of the session. Only its own tensors are sources.
        residency: Has the bound, under which proofs and recipes make room.
        lock: The session's lock, for the counts and the room.
        always: Use each recipe at once, without a proof. For tests.

    """

    def __init__(
        self,
        policy: Policy,
        records: Records,
        residency: Residency,
        lock: threading.RLock,
        *,
        always: bool,
    ) -> None:
        self._policy = policy
        self._records = records
        self._residency = residency
        self._lock = lock
        self._always = always
        self._outputs = Outputs()
        self._bits = Account()
        """The bits of all masks; the session's account has them, too."""
        self._on_kept: WeakTable[RecipeInUse] = WeakTable(forget_at_min=64)
        """Recipes whose sources are weights, or other tensors that stay in memory."""
        self.seconds = 0.0
        """Time of the operations of recipes, on the clock of Python."""
        _alive.remember(next(_numbers), weakref.ref(self))
        _watch_optimizers()  # defence: weights before an update

    def leave_to_parent(self) -> None:
        """In a forked child: a missing thread may hold the lock."""
        self._lock = threading.RLock()

    def keep_weights(self, optimizer: Optimizer) -> None:
        """Copy the weights that an optimizer is about to change and that recipes still need.

        A backward has used up all recipes before the step of an optimizer, unless the program goes
        backward through another forward later. Fused optimizers raise no version.
        """
        if not self._on_kept:
            return
        weights = {
            address_of(weight.untyped_storage())
            for group in optimizer.param_groups
            for weight in group["params"]
            if type(weight) in (Tensor, Parameter)
        }
        for use in self._on_kept.alive():
            if weights.isdisjoint(use.kept):
                continue
            for source in use.recipe.sources:
                if not isinstance(source, Kept) or id(source) in use.copies:
                    continue
                is_unchanged = version_of(source.tensor) == source.version
                if is_unchanged and address_of(source.tensor.untyped_storage()) in weights:
                    copy = source.tensor.detach().clone()
                    use.copies[id(source)] = Kept(copy, version_of(copy))

    # Called by the compiled part.

    def recipe(
        self, saved: SavedTensor, tensor: Tensor, is_new: bool, offloading: Offloading
    ) -> tuple[RecipeInUse, bool] | None:
        """Return the recipe of a tensor that was saved now, and whether it replaces the bytes."""
        if self._residency.is_refusing:
            return None  # The error of the pass names a bound for all that was saved.
        key, proofs = saved.record.key, self._policy.proofs
        # Shapes that never come again are not worth a proof.
        is_open = self._policy.knows(key) and proofs.use(key) == "prove"
        is_open = is_open or self._always
        found = None
        if is_new and (is_open or key in self._policy.rematerialized):
            found = self._find(saved, tensor, offloading)
        if is_open or key in proofs.sources:
            self._outputs.note(tensor, saved)
        if found is not None:
            use, replaces = found
            self.seconds += use.prepared_s if replaces else 0.0
            use.kept = frozenset(
                address_of(source.tensor.untyped_storage())
                for source in use.recipe.sources
                if isinstance(source, Kept)
            )
            if use.kept:
                self._on_kept.remember(next(_numbers), weakref.ref(use))
        return found

    def rematerialize(self, saved: SavedTensor, use: RecipeInUse, unpack: Bring) -> Tensor:
        """Make a saved tensor again; ``unpack`` brings the tensors that it is made from."""
        brought_s = 0.0

        def bring(source: object) -> Tensor:
            nonlocal brought_s
            began_s = perf_counter()
            tensor = unpack(source)
            brought_s += perf_counter() - began_s
            return tensor

        began_s = perf_counter()
        try:
            made = use.recipe.make(use.brought_by(bring))
        except Exception as error:
            error.add_note(
                f"ssdtrain was making a saved tensor ({describe(saved.dtype, saved.size)}) again "
                f"from others by {' and '.join(use.recipe.operations)}; rematerialize='never' "
                "keeps or writes such tensors instead"
            )
            raise
        took_s = perf_counter() - began_s - brought_s
        with self._lock:
            self.seconds += took_s
        return made

    def prove(self, saved: SavedTensor, use: RecipeInUse, tensor: Tensor, bring: Bring) -> None:
        """Compare the result of a recipe with the bytes that were saved, on which ``tensor`` lies.

        An error of a source is none of this step yet: its own node meets it, if it needs it.
        """
        key, recipe, proofs = saved.record.key, use.recipe, self._policy.proofs
        with self._lock:
            reservation = self._reserve(saved, use)
        if reservation is None:
            proofs.bar(key)
            return
        try:
            bring = use.brought_by(bring)
            brought = {id(source): bring(source) for source in recipe.sources}
            made, took_s = _timed(recipe, lambda source: brought[id(source)])
            _compare(saved, tensor, made)  # defence: proof of a recipe
            proofs.note(key, Proof(_form(recipe), use.prepared_s + took_s, _keys(recipe)))
        except (torch.OutOfMemoryError, SsdtrainError) as error:
            log.debug("the recipe %s was not proved: %s", recipe.operations, error)
        except (_OtherBitsError, RuntimeError, TypeError, ValueError, LookupError) as error:
            log.debug("the recipe %s is not used: %s", recipe.operations, error)
            proofs.bar(key, differs=isinstance(error, _OtherBitsError))
        finally:
            reservation.resize(0)

    def _reserve(self, saved: SavedTensor, use: RecipeInUse) -> Reservation | None:
        """Reserve memory for a proof; ``None`` if the bound leaves none for it and its sources."""
        residency, nbytes = self._residency, saved.record.nbytes
        if residency.is_bounded:
            sources = [it for it in use.recipe.sources if isinstance(it, SavedTensor)]
            if not residency.try_to_admit(nbytes + missing_bytes(sources)):
                return None
        reservation = residency.account.reserve(nbytes)
        residency.note_peak()
        return reservation

    def _find(
        self, saved: SavedTensor, tensor: Tensor, offloading: Offloading
    ) -> tuple[RecipeInUse, bool] | None:
        key, policy = saved.record.key, self._policy
        is_planned = key in policy.rematerialized
        base = tensor._base  # noqa: SLF001 - it has no public name
        root = tensor if base is None else base
        is_whole = root.untyped_storage().nbytes() == saved.record.nbytes
        use = self._use_of(root, offloading) if is_whole else None
        if use is None or use.chain > CHAIN_MAX or not self._has_room_for(saved, use.recipe):
            if not is_planned:
                policy.proofs.bar(key)
            return None
        if use.recipe.is_dear and not (self._always or policy.proofs.takes_dear):
            # It takes too long for the bytes that it frees, unless the step waits for memory.
            policy.proofs.put_off(key)
            return None
        if self._always:
            return use, True
        proof = policy.proofs.get(key)
        if not is_planned or proof is None:
            return use, False
        if proof.form != _form(use.recipe):  # defence: form of a recipe
            return None  # defence: form of a recipe
        return use, True

    def _use_of(self, root: Tensor, offloading: Offloading) -> RecipeInUse | None:
        """Return the cheapest recipe of a tensor that covers its storage."""
        began_s = perf_counter()
        if root.grad_fn is not None:
            recipe = find_recipe(root, self._outputs, self._is_source)
            widening, takes_dear = None, self._always or self._policy.proofs.takes_dear
            if recipe is None or (recipe.is_dear and not takes_dear):
                widening = self._widening(root, offloading)
            if widening is not None:
                return RecipeInUse(widening, 1, prepared_s=perf_counter() - began_s)
            if recipe is None:
                return None
            return RecipeInUse(recipe, 1 + max(map(_chain, recipe.sources), default=0))
        mask = find_mask(root)
        if mask is None:
            return None
        bits_bytes = sum(it.tensor.nbytes for it in mask.sources if isinstance(it, Kept))
        limit_bytes = self._residency.limit_bytes or math.inf
        room_bytes = min(
            BITS_SHARE_MAX * limit_bytes - self._bits.held_bytes,
            limit_bytes - self._residency.resident_bytes(),
        )
        if bits_bytes > room_bytes:
            return None
        accounts = self._bits, self._residency.account
        bits = tuple(account.reserve(bits_bytes) for account in accounts)
        return RecipeInUse(mask, 1, bits=bits, prepared_s=perf_counter() - began_s)

    def _widening(self, root: Tensor, offloading: Offloading) -> Recipe | None:
        """Return the recipe of a tensor from its narrow numbers, which are packed for it.

        Not under a bound, which has no room for both until the tensor itself is let go.
        """
        if self._residency.is_bounded:
            return None
        try:
            narrow = narrowed(root)
        except torch.OutOfMemoryError:
            return None
        packed = None if narrow is None else offloading.pack_narrow(narrow)
        return widening_from(packed, root) if isinstance(packed, SavedTensor) else None

    def _has_room_for(self, saved: SavedTensor, recipe: Recipe) -> bool:
        """Return whether the tensor and all that it is made from are a small part of the bound."""
        limit_bytes = self._residency.recipes_limit_bytes
        if limit_bytes is None:
            return True
        nbytes = saved.record.nbytes + _bytes_of(recipe.sources, set())
        return nbytes <= Pressure(limit_bytes).chain_bytes_max

    def _is_source(self, packed: object) -> bool:
        if isinstance(packed, SavedTensor):
            return self._records.owns(packed)
        return isinstance(packed, Kept)


def _chain(source: object) -> int:
    use = source.record.recipe if isinstance(source, SavedTensor) else None
    return use.chain if isinstance(use, RecipeInUse) else 0


def _recipe_of(saved: SavedTensor) -> Recipe | None:
    use = saved.record.recipe
    return use.recipe if isinstance(use, RecipeInUse) else None


def _bytes_of(sources: Iterable[object], seen: set[int]) -> int:
    """Return the bytes of these saved tensors and of all that they are made from, each once."""
    nbytes = 0
    for source in sources:
        if not isinstance(source, SavedTensor) or id(source.record) in seen:
            continue
        seen.add(id(source.record))
        nbytes += source.record.nbytes
        if (recipe := _recipe_of(source)) is not None:
            nbytes += _bytes_of(recipe.sources, seen)
    return nbytes


def is_away(saved: SavedTensor) -> bool:
    """Return whether the bytes of a saved tensor have to be read or made."""
    return saved.record.source is None and saved.record.storage() is None


def missing_bytes(needed: Iterable[object], seen: set[int] | None = None) -> int:
    """Return the memory that it takes to read or make these saved tensors, each once."""
    nbytes, seen = 0, set() if seen is None else seen
    for saved in needed:
        if not isinstance(saved, SavedTensor) or id(saved.record) in seen or not is_away(saved):
            continue
        seen.add(id(saved.record))
        handle = saved.record.handle
        if (recipe := _recipe_of(saved)) is not None:
            nbytes += saved.record.nbytes + missing_bytes(recipe.sources, seen)
        elif handle is not None and not handle.is_here():
            nbytes += handle.slot_bytes
    return nbytes


def _keys(recipe: Recipe) -> tuple[int, ...]:
    return tuple(it.record.key for it in recipe.sources if isinstance(it, SavedTensor))


def _form(recipe: Recipe) -> Hashable:
    """Return the operations of a recipe with its layout, and the strides of all sources."""
    strides = (
        it.stride if isinstance(it, SavedTensor) else it.tensor.stride()
        for it in recipe.sources
        if isinstance(it, SavedTensor | Kept)
    )
    return recipe.operations, recipe.layout, tuple(strides)


def _timed(recipe: Recipe, bring: Bring) -> tuple[Tensor, float]:
    """Make a tensor; return it and the time of the operations, on its GPU if it is on one."""
    device = recipe.layout.device
    if device.type == "cpu":
        began_s = perf_counter()
        made = recipe.make(bring)
        return made, perf_counter() - began_s
    began, ended = (torch.Event(device, enable_timing=True) for _ in range(2))
    began.record()
    made = recipe.make(bring)
    ended.record()
    ended.synchronize()
    return made, began.elapsed_time(ended) / 1e3


class _OtherBitsError(Exception):
    """A recipe has made other bits than were saved."""


def _compare(saved: SavedTensor, tensor: Tensor, made: Tensor) -> None:
    """Raise if ``made`` has other bytes than the storage on which ``tensor`` lies."""
    nbytes = saved.record.nbytes
    start = tensor.storage_offset() * tensor.itemsize - saved.offset
    # Whole words, since one byte at a time takes eight times as long; no number is NaN then.
    unit = torch.int64 if not (nbytes | start) % torch.int64.itemsize else torch.uint8
    with as_in_forward(tensor.device.type):
        both = (
            torch.empty(0, dtype=unit, device=part.device).set_(
                part.untyped_storage(), offset // unit.itemsize, (nbytes // unit.itemsize,), (1,)
            )
            for part, offset in ((tensor, start), (made, 0))
        )
        if not torch.equal(*both):
            raise _OtherBitsError("other bits")


def _refuse_without_memory(tensor: Tensor) -> None:
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise RuntimeError(f"{describe(tensor.dtype, tensor.shape)} has no memory now")
