"""What pack has seen so far, by what became of it: the grounds for a reason and for a hint."""

from __future__ import annotations

from ssdtrain._core import Account, Tally
from ssdtrain.shortage import Held
from ssdtrain.sizes import shown_bytes

__all__ = ["Seen", "kept_parts"]


class Seen:
    """The kinds of what is packed. Weights and most small tensors the compiled part counts."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.unusual = Tally()
        """No plain CPU tensors; their bytes are not asked for."""
        self.small_here = Tally()
        """Below ``min_bytes``, and not counted by the account: small parts of large storages, and
        under a bound those that had to ask for room."""
        self.apart = Tally()
        """Parts of a storage that count their versions apart, as operations of torch make them; see
        ``shares_no_counter``."""
        self.detached = Tally()
        """Such parts that the program made itself: they have no history."""
        self.foreign = Tally()
        """In the memory of numpy arrays and mapped files."""
        self.eligible = Tally()
        """All others, once for each record."""
        self.planned = Tally()
        """Those of them that the plan kept in memory."""

    @property
    def small(self) -> Tally:
        """All below ``min_bytes``."""
        here = self.small_here
        count, nbytes, largest_bytes = self._account.small()
        return Tally(
            count + here.count, nbytes + here.nbytes, max(largest_bytes, here.largest_bytes)
        )

    @property
    def weight_count(self) -> int:
        """Weights, and what is made of them."""
        return self._account.weight_count

    def count(self) -> int:
        """Return how many tensors were packed; of eligible ones, how many records were made."""
        return self.weight_count + self.unusual.count + sum(kind.count for kind in self._kinds())

    def storage_bytes(self) -> int:
        """Return the bytes of those that are plain tensors of the CPU, and no weights."""
        return sum(kind.nbytes for kind in self._kinds())

    def _kinds(self) -> tuple[Tally, ...]:
        return self.small, self.apart, self.detached, self.foreign, self.eligible


def kept_parts(seen: Seen, kept_bytes: int, min_bytes: int) -> list[Held]:
    """Share out the bytes that are kept now to the kinds that stay in memory.

    By all that was packed so far: which of them have died since is not known.
    """
    small = seen.small
    kinds = (small, seen.apart, seen.detached, seen.foreign)
    all_bytes = max(sum(kind.nbytes for kind in kinds), 1)

    def part(kind: Tally, what: str, advice: str) -> Held:
        return Held(kept_bytes * kind.nbytes // all_bytes, what, advice)

    return [
        part(
            small,
            f"in tensors below min_bytes={min_bytes} ({shown_bytes(min_bytes)}), the largest of "
            f"{shown_bytes(small.largest_bytes)}",
            "lower min_bytes",
        ),
        part(
            seen.apart,
            "in parts of storages that count their changes apart, as some operations of torch make "
            "them: nobody could tell one part's bytes from the others', so they stay",
            "",
        ),
        part(
            seen.detached,
            "in parts of storages that the program detached from them, by .data or detach() of a "
            "slice: such parts count their changes apart, and nobody could tell one part's bytes "
            "from the others', so they stay",
            "detach the whole tensor and take the part of that",
        ),
        part(
            seen.foreign,
            "in the memory of numpy arrays or mapped files, whose owner may change it",
            "clone() what comes from an array before the model gets it",
        ),
    ]
