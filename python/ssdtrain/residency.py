"""The bytes that are in memory because of us: one account, and one bound, for all who hold some.

A *holding* is the entry of one holder: an object that holds bytes of training (a saved storage,
say) and has the holding as a part of itself, so that its death ends the entry. The entries are kept
in the compiled part: no handler of a signal can come between two changes that belong together, and
a death counts at once, on whichever thread it is. Bytes without a holder, such as those of reads
that nobody has asked for yet, are counted by the transfer, which is asked when the sum is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from ssdtrain._core import Account
from ssdtrain.errors import BudgetError
from ssdtrain.shortage import Held, shortage
from ssdtrain.stalls import Stalls

__all__ = ["Residency", "User"]

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


class Residency:
    """The account and the bound; used only under the session's lock."""

    def __init__(
        self, limit_bytes: int | None, transfer_bytes: Callable[[], int], stalls: Stalls
    ) -> None:
        self.limit_bytes = limit_bytes
        """The bound (``max_resident_bytes``), or ``None``."""
        self.is_bounded = limit_bytes is not None
        self.account = Account()
        self.standing = Account()
        """What is reserved for as long as somebody lives. It is in the first account, too."""
        self.let_small_in()
        self._transfer_bytes = transfer_bytes
        """Asks for what transfers hold in memory beyond the holdings."""
        self._stalls = stalls
        self.refused_count = 0
        """How often ``admit`` has raised ``BudgetError``."""
        self._users: list[weakref.ref[User]] = []
        """Weak, because they know this account: a cycle would keep the store open."""

    def add_user(self, user: User) -> None:
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
        """Return what of the bound comes to be free now and then, if there is a bound."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.standing.reserved_bytes)

    def let_small_in(self) -> None:
        """Let the compiled part keep what is small while there is room, without the lock.

        Until somebody looks at the room: what was found must not be taken before it is used.
        """
        limit_bytes = self.limit_bytes
        self.account.limit_small(UNLIMITED_BYTES if limit_bytes is None else limit_bytes)

    def note_peak(self) -> None:
        """Compare what is resident now with the peak; called after whatever may raise it."""
        self.account.note_peak(self._beside_holdings())

    def _beside_holdings(self) -> int:
        """Return what transfers hold now, seen at a moment at which no holding changed.

        A record that dies while its write is under way leaves the holdings and becomes the
        transfer's: seen before one question and after the other it would count twice, or not.
        """
        account = self.account
        while True:
            held_bytes = account.held_bytes
            transfer_bytes = self._transfer_bytes()
            if held_bytes == account.held_bytes:
                return transfer_bytes

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
                self.refused_count += 1
                raise self._over_budget(nbytes, wanted(), users)

    def _is_short_of(self, nbytes: int) -> bool:
        assert self.limit_bytes is not None
        self.account.limit_small(0)
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
