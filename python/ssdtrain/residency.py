"""The bytes that are in memory because of us: one account, and one bound, for all who hold some.

A *holding* is the entry of one holder: an object that holds bytes of training (a saved storage,
say) and whose death ends the entry. Bytes without a holder, such as those of reads that nobody has
asked for yet, are counted by the transfer, which is asked when the sum is needed.

[Note: no calls] Python runs the handlers of signals after a call, and where a loop jumps back. A
handler may raise (Ctrl-C), or ask for these very counts; between two statements that belong
together either would find the account wrong. So such statements call nothing: they use subscripts
and slots, not `pop`, `get` or `min`. And their loops are `while True` with a `break`: the jump of
any other `while` is after its condition, so between that and the first statement.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from ssdtrain.errors import BudgetError
from ssdtrain.shortage import Held, shortage
from ssdtrain.stalls import Stalls

__all__ = ["Holding", "Residency", "User"]

T = TypeVar("T")

UNLIMITED_BYTES = 1 << 62
"""More than any machine has, and small enough that sums of it stay exact in 64 bits."""


class User(Protocol):
    """Who holds bytes, and can let some go when another needs room."""

    failure: str | None
    """Why its bytes cannot leave memory, if they cannot."""

    def wait_for_room(self) -> bool:
        """Wait until a transfer ends that frees memory; ``False`` if none is under way."""

    def give_way(self) -> None:
        """Let go of what is held for speed alone, or by nobody who will ask for it."""

    def held(self) -> list[Held]:
        """Return what it holds that cannot leave memory, and why; for a message."""


class Holding(weakref.ref[T], Generic[T]):
    """A weak reference to a holder, with what has to be known when it dies.

    Its callback is a function in C, which takes no lock and which no interrupt can enter: one at
    the first line of a finalizer in Python would be lost, and what it counts with it.
    """

    __slots__ = ("fate", "held_bytes", "identity", "nbytes")

    nbytes: int
    held_bytes: int
    """Bytes in memory now: all, or none."""
    fate: str
    """How it would end now: "kept", "forwarded" or "offloaded"."""
    identity: int
    """Of the storage that several holders share, while they live; see ``hold_shared``."""


class Residency:
    """The account and the bound; used only under the session's lock.

    What dies at any moment on any thread is appended to a queue, which the next call settles.
    """

    def __init__(
        self, limit_bytes: int | None, transfer_bytes: Callable[[], int], stalls: Stalls
    ) -> None:
        self.limit_bytes = limit_bytes
        """The bound (``max_resident_bytes``), or ``None``."""
        self.is_bounded = limit_bytes is not None
        self.held_bytes = 0
        """The sum over the holdings; exact after ``settle``."""
        self.peak_bytes = 0
        self.ended_bytes = {"offloaded": 0, "forwarded": 0, "kept": 0}
        self.ended_count = {"offloaded": 0, "forwarded": 0, "kept": 0}
        self._transfer_bytes = transfer_bytes
        """Asks for what transfers hold in memory beyond the holdings."""
        self._stalls = stalls
        self._users: list[weakref.ref[User]] = []
        """Weak, because they know this account: a cycle would keep the store open."""
        self._holdings: dict[object, None] = {}
        """All holdings: a weak reference calls back only if it lives longer than its object."""
        self._ended: deque[Any] = deque()
        self._ended_shared: deque[Any] = deque()
        self._shared: dict[int, list[int]] = {}
        """Identity of a storage that several may hold: its bytes, and how many hold it."""

    def add_user(self, user: User) -> None:
        """Ask ``user`` for room too when there is too little."""
        self._users.append(weakref.ref(user))

    def settle(self) -> None:
        """Take note of what died since the last call."""
        ended, holdings = self._ended, self._holdings
        while True:
            if not ended:
                break
            holding = ended[0]
            del ended[0]
            del holdings[holding]
            self.held_bytes -= holding.held_bytes
            self.ended_bytes[holding.fate] += holding.nbytes
            self.ended_count[holding.fate] += 1
        ended, shared = self._ended_shared, self._shared
        while True:
            if not ended:
                break
            holding = ended[0]
            del ended[0]
            del holdings[holding]
            identity = holding.identity
            entry = shared[identity]
            entry[1] -= 1
            if entry[1] == 0:
                del shared[identity]
                self.held_bytes -= entry[0]
                self.ended_bytes["kept"] += entry[0]
                self.ended_count["kept"] += 1

    def hold(self, holder: T, nbytes: int) -> Holding[T]:
        """Count ``nbytes`` that ``holder`` holds until it dies, or until ``free``."""
        holding = Holding(holder, self._ended.append)
        holding.nbytes = holding.held_bytes = nbytes
        holding.fate = "kept"
        self._holdings[holding] = None
        self.held_bytes += nbytes
        return holding

    def free(self, holding: Holding[T]) -> None:
        """Note that its bytes are on the disk, and in memory no more."""
        self.held_bytes -= holding.held_bytes
        holding.held_bytes = 0
        holding.fate = "offloaded"

    def lend(self, holding: Holding[T]) -> None:
        """Note that somebody else holds its bytes: they are not in memory because of us."""
        self.held_bytes -= holding.held_bytes
        holding.held_bytes = 0

    def take_back(self, holding: Holding[T]) -> None:
        """Note that nobody else holds its bytes any more."""
        self.held_bytes += holding.nbytes - holding.held_bytes
        holding.held_bytes = holding.nbytes

    def shared_more_bytes(self, identity: int, nbytes: int, storage_bytes: int) -> int:
        """Return the bytes that ``hold_shared`` would add."""
        entry = self._shared.get(identity)
        held_bytes = 0 if entry is None else entry[0]
        return max(0, min(nbytes, storage_bytes - held_bytes))

    def hold_shared(self, holder: object, identity: int, nbytes: int, storage_bytes: int) -> None:
        """Count bytes that stay; all holders of one storage count together at most as much as it.

        ``identity`` is that of the storage, which ``holder`` keeps alive.
        """
        holding = Holding(holder, self._ended_shared.append)
        shared = self._shared
        if identity in shared:
            entry = shared[identity]
        else:
            entry = shared[identity] = [0, 0]
        # Not by `min` and `max`: see [Note: no calls].
        more = storage_bytes - entry[0]
        if more > nbytes:
            more = nbytes
        elif more < 0:
            more = 0
        holding.identity = identity
        entry[0] += more
        entry[1] += 1
        self._holdings[holding] = None
        self.held_bytes += more

    def resident_bytes(self) -> int:
        """Return the bytes in memory now."""
        # In this order: a source whose record dies after the question is still held here until it
        # is settled. Asked in the other order, the transfer would count it as abandoned once more.
        transfer_bytes = self._transfer_bytes()
        self.settle()
        return self.held_bytes + transfer_bytes

    def room_bytes(self) -> int:
        """Return how many more bytes may become resident."""
        if self.limit_bytes is None:
            return UNLIMITED_BYTES
        return max(0, self.limit_bytes - self.resident_bytes())

    def note_peak(self) -> None:
        """Compare what is resident now with the peak; called after whatever may raise it."""
        # As in `resident_bytes`; written out because every hook comes here.
        transfer_bytes = self._transfer_bytes()
        self.settle()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + transfer_bytes)

    def admit(self, nbytes: int, wanted: Callable[[], str]) -> None:
        """Wait until ``nbytes`` more fit under the bound; call it only if there is one.

        ``wanted`` says who needs them, if it comes to an error.

        Raises:
            BudgetError: They can never fit: nothing that is in memory can leave it.

        """
        may_give_way = True
        while self._is_short_of(nbytes):
            began_s = perf_counter()
            users = [user for reference in self._users if (user := reference()) is not None]
            if any(user.wait_for_room() for user in users):
                self._stalls.note(perf_counter() - began_s)
            elif may_give_way:
                may_give_way = False
                for user in users:
                    user.give_way()
            # A transfer may have ended after the sum was taken and before somebody looked for one
            # to wait for: then there is room now.
            elif self._is_short_of(nbytes):
                raise self._over_budget(nbytes, wanted(), users)

    def _is_short_of(self, nbytes: int) -> bool:
        assert self.limit_bytes is not None
        return self.resident_bytes() + nbytes > self.limit_bytes

    def _over_budget(self, nbytes: int, wanted: str, users: list[User]) -> BudgetError:
        assert self.limit_bytes is not None
        return BudgetError(
            shortage(
                limit_bytes=self.limit_bytes,
                needed_bytes=nbytes,
                wanted=wanted,
                resident_bytes=self.resident_bytes(),
                held=[one for user in users for one in user.held()],
                failure=next((user.failure for user in users if user.failure is not None), None),
            )
        )
