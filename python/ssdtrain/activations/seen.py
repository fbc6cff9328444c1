"""What pack has seen so far, by what became of it: the grounds for a reason and for a hint."""

from __future__ import annotations

from ssdtrain._core import Account
from ssdtrain.shortage import Held
from ssdtrain.sizes import shown_bytes

__all__ = ["Seen", "Tally", "kept_parts"]


class Tally:
    """Tensors of one kind, each pack counted. Threads may count at once, and lose one then."""

    __slots__ = ("count", "largest_bytes", "nbytes")

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.largest_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count a tensor of ``nbytes``."""
        self.count += 1
        self.nbytes += nbytes
        self.largest_bytes = max(self.largest_bytes, nbytes)


class Seen:
    """The kinds of what is packed. Weights and most small tensors the compiled part counts."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.unusual = Tally()
        """No plain CPU tensors; their bytes are not asked for."""
        self.small_here = Tally()
        """Below ``min_bytes``, and not counted by the account: small parts of large storages, and
        under a bound all."""
        self.apart = Tally()
        """Parts of a storage that count their versions apart; see ``shares_no_counter``."""
        self.foreign = Tally()
        """In the memory of numpy arrays and mapped files."""
        self.eligible = Tally()
        """All others, once for each record."""
        self.planned = Tally()
        """Those of them that the plan kept in memory."""

    @property
    def small(self) -> Tally:
        """All below ``min_bytes``."""
        here, both = self.small_here, Tally()
        count, nbytes, largest_bytes = self._account.small()
        both.count = count + here.count
        both.nbytes = nbytes + here.nbytes
        both.largest_bytes = max(largest_bytes, here.largest_bytes)
        return both

    @property
    def weight_count(self) -> int:
        """Weights, and what is made of them."""
        return self._account.weight_count

    def count(self) -> int:
        """Return how many tensors were packed; of eligible ones, how many records were made."""
        kinds = (self.unusual, self.small, self.apart, self.foreign, self.eligible)
        return self.weight_count + sum(kind.count for kind in kinds)


def kept_parts(seen: Seen, kept_bytes: int, min_bytes: int) -> list[Held]:
    """Share out the bytes that are kept now to the kinds that stay in memory.

    By all that was packed so far: which of them have died since is not known.
    """
    small, apart, foreign = seen.small, seen.apart, seen.foreign
    all_bytes = max(small.nbytes + apart.nbytes + foreign.nbytes, 1)

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
            apart,
            "in parts of storages that count their changes apart, as LSTMCell, GRUCell and "
            "recurrent layers that torch does not fuse make them: nobody could tell one part's "
            "bytes from the others', so they stay",
            "use nn.LSTM or nn.GRU over the whole sequence, which torch fuses in float32",
        ),
        part(
            foreign,
            "in the memory of numpy arrays or mapped files, whose owner may change it",
            "clone() what comes from an array before the model gets it",
        ),
    ]
