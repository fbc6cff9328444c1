"""Counts the packed tensors by their kind, and says why some kinds stay in memory."""

from __future__ import annotations

from dataclasses import replace

from ssdtrain._core import Account, Tally
from ssdtrain.notices import Held
from ssdtrain.sizes import shown_bytes

__all__ = ["Seen"]

PAGE_BYTES = 4096


class Seen:
    """Counts packed tensors. The account counts weights and most small tensors."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.unusual = Tally()
        """Tensors that are no plain CPU tensors; their bytes are not counted."""
        self.small_here = Tally()
        """Below ``min_bytes``, and not counted by the account: small parts of large storages, and
        under a bound tensors that had to ask for room."""
        self.apart = Tally()
        """Parts of a storage that count their versions apart, as operations of torch make them."""
        self.detached = Tally()
        """Such parts that the program made by ``detach()`` or ``.data``."""
        self.foreign = Tally()
        """In the memory of numpy arrays and mapped files."""
        self.eligible = Tally()
        """All others, once for each record."""
        self.planned = Tally()
        """Eligible tensors that the plan kept in memory."""

    @property
    def small(self) -> Tally:
        """All tensors below ``min_bytes``."""
        here = self.small_here
        count, nbytes, largest_bytes = self._account.small()
        return Tally(
            count + here.count, nbytes + here.nbytes, max(largest_bytes, here.largest_bytes)
        )

    @property
    def weight_count(self) -> int:
        """Weights, and views of them."""
        return self._account.weight_count

    def count(self) -> int:
        """Return how many tensors were packed; eligible ones count once for each record."""
        counts = sum(tally.count for tally in self._tallies())
        return self.weight_count + self.unusual.count + counts

    def storage_bytes(self) -> int:
        """Return the bytes of all plain CPU tensors that are no weights."""
        return sum(tally.nbytes for tally in self._tallies())

    def _tallies(self) -> tuple[Tally, ...]:
        return self.small, self.apart, self.detached, self.foreign, self.eligible

    def staying(self, min_bytes: int) -> list[Held]:
        """Return the bytes of each kind that stays in memory, with the reason and advice."""
        small = self.small
        mean_bytes = small.nbytes // max(small.count, 1)
        return [
            Held(
                small.nbytes,
                f"in tensors below min_bytes={min_bytes} ({shown_bytes(min_bytes)}), the largest "
                f"of {shown_bytes(small.largest_bytes)}, {shown_bytes(mean_bytes)} on average",
                f"lower min_bytes to {mean_bytes // PAGE_BYTES * PAGE_BYTES}"
                if mean_bytes >= PAGE_BYTES
                else "use larger batches, as these are too small for a disk",
            ),
            Held(
                self.apart.nbytes,
                "in parts of storages that count their changes apart, as some operations of torch "
                "make them (LSTMCell and GRUCell)",
                "",
            ),
            Held(
                self.detached.nbytes,
                "in parts of storages that the program detached from them, by .data or detach() of "
                "a slice, so that they count their changes apart",
                "detach the whole tensor and take the part of that",
            ),
            Held(
                self.foreign.nbytes,
                "in the memory of numpy arrays or mapped files, whose owner may change it",
                "clone() what comes from an array before the model gets it",
            ),
        ]

    def kept_parts(self, kept_bytes: int, min_bytes: int) -> list[Held]:
        """Share out ``kept_bytes`` to the kinds that stay in memory.

        The shares are those of all tensors that were packed so far, alive or not.
        """
        parts = self.staying(min_bytes)
        all_bytes = max(sum(part.nbytes for part in parts), 1)
        return [replace(part, nbytes=kept_bytes * part.nbytes // all_bytes) for part in parts]
