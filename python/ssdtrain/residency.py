"""Counts the bytes that ssdtrain holds in memory, and keeps them under ``max_resident_bytes``.

An object that holds bytes of training, such as a saved storage, owns a *holding*: its entry in the
account, which ends when the object dies. The compiled part keeps the entries, so that no handler of
a signal runs between two changes that belong together, and a death counts at once on any thread.
Some bytes have no such object, such as those of reads ahead. The transfer counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from torch import UntypedStorage

from ssdtrain._core import Account, Holding
from ssdtrain.errors import BudgetError
from ssdtrain.machine.torch_internals import sequence_number
from ssdtrain.notices import Held, Shortage
from ssdtrain.stalls import Stalls

__all__ = ["MemoryUser", "Refused", "Residency"]

UNLIMITED_BYTES = 1 << 62
"""More than any machine has, and small enough that sums of it stay exact in 64 bits."""
WIDENING_BYTES = 2 * 4096
"""A read takes up to two blocks more than the tensor has, depending on where it lay."""

IN_USE_COUNT = 4
"""Tensors that were read back for other nodes and may still be in use."""


class MemoryUser(Protocol):
    """Holds bytes in memory, and can free some when another user needs room."""

    failure: str | None
    """The error for which its bytes cannot leave memory; ``None`` if they can."""

    def wait_for_room(self) -> bool:
        """Wait until a transfer ends that frees memory; ``False`` if none is under way."""

    def give_way(self) -> None:
        """Free the bytes that are held only for speed, or that will never be used."""

    def held(self) -> list[Held]:
        """List its bytes that cannot leave memory, with the reasons, for a message."""


class Refusal:
    """A pass (a forward) whose saved tensors do not fit under the bound.

    From the first tensor without room on, no tensor of the pass is kept. Its operations still run,
    and the bytes that they would have held are counted. So the error, which backward raises, names
    a bound that is enough for the whole pass, and not only for the next tensor.
    """

    def __init__(self, shortage: Shortage) -> None:
        self.least_bytes = shortage.resident_bytes + shortage.needed_bytes
        """The bound that the pass needs for its operations until now."""
        self.is_told = False
        """True if the error was raised. A tensor that is saved afterwards begins another pass."""
        self._shortage = shortage
        self._staying = Account()
        self._storages: weakref.WeakKeyDictionary[UntypedStorage, int] = weakref.WeakKeyDictionary()
        """By storage, its counted bytes that would have stayed in memory until backward."""
        self._sequence = -1
        self._node: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._node_bytes = 0
        """Bytes that the node which is being made needs at once, now and in backward."""
        self._beside_bytes = shortage.resident_bytes

    def refuse(
        self, storage: UntypedStorage, nbytes: int, *, stays: bool, beside_bytes: int
    ) -> Refused:
        """Count a tensor of the node that is being made.

        With ``stays`` the tensor could not leave memory. ``beside_bytes`` are in memory and cannot
        leave it now.
        """
        sequence = sequence_number()
        if sequence != self._sequence:
            if self._sequence != -1:
                self._beside_bytes = 0
            self._sequence, self._node_bytes = sequence, 0
            self._node.clear()
        # The first tensors of the first node were kept; they may leave while the others are
        # counted, but backward needs them together.
        self._beside_bytes = max(self._beside_bytes, beside_bytes)
        holding = None
        if stays:
            counted_bytes = self._storages.get(storage, 0)
            more_bytes = min(nbytes, max(0, storage.nbytes() - counted_bytes))
            self._storages[storage] = counted_bytes + more_bytes
            holding = self._staying.hold(more_bytes)
        elif storage not in self._node:
            self._node.add(storage)
            self._node_bytes += nbytes + WIDENING_BYTES
        pass_bytes = self._staying.held_bytes + self._node_bytes
        self.least_bytes = max(self.least_bytes, self._beside_bytes + pass_bytes)
        return Refused(self, holding)

    def error(self) -> BudgetError:
        """Return the error that a backward of this pass raises."""
        self.is_told = True
        # Reads for one node need a little more while tensors of another are in use.
        return BudgetError(self._shortage.of_pass(self.least_bytes + IN_USE_COUNT * WIDENING_BYTES))


class Refused:
    """Autograd holds this in the place of a saved tensor for which the bound had no room."""

    __slots__ = ("_holding", "refusal")

    def __init__(self, refusal: Refusal, holding: Holding | None) -> None:
        self.refusal = refusal
        self._holding = holding


class Residency:
    """The account and the bound; used only under the session's lock."""

    def __init__(
        self, limit_bytes: int | None, transfer_bytes: Callable[[], int], stalls: Stalls
    ) -> None:
        self.limit_bytes = limit_bytes
        """The bound (``max_resident_bytes``), or ``None``."""
        self.is_bounded = limit_bytes is not None
        self.recipes_limit_bytes = limit_bytes
        """The bound of which a recipe takes a small part, if there is one."""
        self.look_at_gpu: Callable[[], None] = lambda: None
        """Called before memory of a GPU is let go for room: it may set another limit."""
        self.account = Account()
        self.standing = Account()
        """Reservations that last as long as their holders live. They are in ``account``, too."""
        self._last_refusal: Callable[[], Refusal | None] = lambda: None
        """A weak reference: it ends with the last tensor of its pass."""
        self.let_small_in()
        self._transfer_bytes = transfer_bytes
        """Returns the bytes that transfers hold in memory beside the holdings."""
        self._stalls = stalls
        self.refused_count = 0
        """Errors for lack of room, and refused passes; a pass counts once, with its errors."""
        self._users: list[weakref.ref[MemoryUser]] = []
        """Weak, because they know this account: a cycle would keep the store open."""

    def add_user(self, user: MemoryUser) -> None:
        """Ask ``user`` for room too when there is too little."""
        self._users.append(weakref.ref(user))

    def resident_bytes(self) -> int:
        """Return the bytes in memory now."""
        transfer_bytes = self._beside_holdings()
        return self.account.held_bytes + transfer_bytes

    def room_bytes(self) -> int:
        """Return how many more bytes may become resident."""
        if self.limit_bytes is None:
            return UNLIMITED_BYTES
        self.account.limit_small(0)
        return max(0, self.limit_bytes - self.resident_bytes())

    def left_bytes(self) -> int | None:
        """Return the part of the bound that no standing reservation takes, if there is a bound."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.standing.reserved_bytes)

    def let_small_in(self) -> None:
        """Let the compiled part keep small tensors, without the lock, while there is room.

        It may until the room is looked at: room that was found must not be taken before its use.
        """
        if self._refusal() is not None:
            return
        limit_bytes = self.limit_bytes
        self.account.limit_small(UNLIMITED_BYTES if limit_bytes is None else limit_bytes)

    def note_peak(self) -> None:
        """Raise the peak to the bytes in memory now; called after each change that may raise it."""
        self.account.note_peak(self._beside_holdings())

    def _beside_holdings(self) -> int:
        """Return the bytes that transfers hold, read while no holding changed.

        A record that dies during its write leaves the holdings, and the transfer counts it from
        then on. If it died between the two readings, it would count twice, or not at all.
        """
        account = self.account
        while True:
            held_bytes = account.held_bytes
            transfer_bytes = self._transfer_bytes()
            if held_bytes == account.held_bytes:
                return transfer_bytes

    def admit(
        self,
        nbytes: int,
        wanted: Callable[[], str],
        rest_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Wait until ``nbytes`` more fit under the bound; call it only if there is one.

        ``wanted`` names in an error the operation that needs them. Only a backward gives
        ``rest_bytes``, which returns how many more its node needs at the same time.

        Raises:
            BudgetError: They can never fit: nothing that is in memory can leave it.

        """
        if self.try_to_admit(nbytes):
            return
        if rest_bytes is not None and (refusal := self._refusal()) is not None:
            raise refusal.error()
        shortage = self._counted_shortage(nbytes, wanted())
        raise BudgetError(shortage.of_point(None if rest_bytes is None else rest_bytes()))

    def try_to_admit(self, nbytes: int) -> bool:
        """Wait until ``nbytes`` more fit under the bound; ``False`` if they never can."""
        return self._comes_to_fit(nbytes, may_give_way=True)

    @property
    def is_refusing(self) -> bool:
        """True if a pass that does not fit is still under way."""
        return self._refusal() is not None

    def take_in(
        self,
        storage: UntypedStorage,
        nbytes: int,
        wanted: Callable[[], str],
        *,
        stays: bool,
    ) -> Refused | None:
        """Admit a tensor of an operation; if it can never fit, return the object to pack instead.

        ``stays`` says that it cannot leave memory once it is there. After a refusal all tensors of
        the pass are refused, until a backward has raised the error.
        """
        refusal = self._refusal()
        if refusal is None:
            if self.try_to_admit(nbytes):
                return None
            refusal = Refusal(self._counted_shortage(nbytes, wanted()))
            self._last_refusal = weakref.ref(refusal)
        else:
            # Bytes that can leave memory are not counted below, so wait until they have left.
            self._comes_to_fit(UNLIMITED_BYTES, may_give_way=False)
        # If writes fail, or are not allowed, no tensor can leave.
        stays = stays or any(user.failure is not None for user in self._present())
        return refusal.refuse(storage, nbytes, stays=stays, beside_bytes=self.resident_bytes())

    def _refusal(self) -> Refusal | None:
        """Return the refusal of a pass that is still under way."""
        refusal = self._last_refusal()
        return None if refusal is None or refusal.is_told else refusal

    def _comes_to_fit(self, nbytes: int, *, may_give_way: bool) -> bool:
        """Wait until so many bytes more fit; ``False`` if nothing that is in memory can leave."""
        while self._is_short_of(nbytes):
            began_s = perf_counter()
            users = self._present()
            if any(user.wait_for_room() for user in users):
                self._stalls.note(perf_counter() - began_s)
            elif may_give_way:
                may_give_way = False
                for user in users:
                    user.give_way()
            # A transfer may have ended after the sum was taken, so that none was left to wait for:
            # then there is room now.
            elif self._is_short_of(nbytes):
                return False
        return True

    def let_go_for(self, nbytes: int) -> None:
        """Let memory go for ``nbytes`` more on a GPU, as far as anything can leave it now."""
        self.look_at_gpu()
        self._comes_to_fit(nbytes, may_give_way=True)

    def _is_short_of(self, nbytes: int) -> bool:
        if self.limit_bytes is None:
            return self.account.soft_room_bytes(self._beside_holdings()) < nbytes
        self.account.limit_small(0)
        return self.resident_bytes() + nbytes > self.limit_bytes

    def _present(self) -> list[MemoryUser]:
        return [user for reference in self._users if (user := reference()) is not None]

    def _counted_shortage(self, nbytes: int, wanted: str) -> Shortage:
        """Count a refusal, and return the figures of its error."""
        assert self.limit_bytes is not None
        self.refused_count += 1
        users = self._present()
        return Shortage(
            limit_bytes=self.limit_bytes,
            needed_bytes=nbytes,
            wanted=wanted,
            resident_bytes=self.resident_bytes(),
            held=[held for user in users for held in user.held()],
            failure=next((user.failure for user in users if user.failure is not None), None),
        )
