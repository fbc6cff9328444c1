"""Takes the hooks of a block out of their thread while a step goes by that nobody has to see.

torch makes an object of Python for each saved tensor that it gives to hooks, whatever they do with
it. Where nothing of a step would go to the disk, that is all that ssdtrain still costs. So the pair
leaves with the first tensor of such a step. It comes back when an optimizer's ``step()`` has ended
in this thread, or with the next call or block. It leaves once between two such ends, so where no
optimizer tells steps apart, it stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ssdtrain.activations.installed import Pair, install, put_below, uninstall
from ssdtrain.machine.torch_internals import (
    current_backward,
    hooks_are_allowed,
    top_hooks,
    untraced,
)

__all__ = ["leave", "put_on", "step_begins", "take_off"]

NO_BACKWARD = -1


class _Here(threading.local):
    """What is known of this thread."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        """Those of the blocks that are on, the innermost last."""
        self.away: Pair | None = None
        """The one of them that is out."""
        self.is_between_steps = False


_here = _Here()


def put_on(pair: Pair) -> None:
    """Install the pair of a block in this thread, in the last of its calls."""
    _here.pairs.append(pair)
    install(pair)


def take_off(pair: Pair) -> bool:
    """Take the pair of a block out of this thread; return whether nobody else had. Idempotent."""
    was_away = _here.away is pair
    found = uninstall(pair)
    if was_away:
        _here.away = None
    _here.pairs = [one for one in _here.pairs if one is not pair]
    return found or was_away


def step_begins() -> bool:
    """Whether this is asked for the first time since an optimizer's last step here has ended."""
    begins, _here.is_between_steps = _here.is_between_steps, False
    return begins


def leave() -> bool:
    """Take the pair out that packs a tensor now; ``False`` if it has to stay.

    It stays where others are on as well: what is saved would go to those below.
    """
    pair = _here.pairs[0] if len(_here.pairs) == 1 else None
    if pair is None or _here.away is not None or not (_is_on_top(pair) and hooks_are_allowed()):
        return False
    # First: if Ctrl-C comes before it is out, it is found where it was.
    _here.away = pair
    uninstall(pair)
    if top_hooks(True) is None:
        return True
    install(pair)
    _here.away = None
    return False


@untraced
def _step_has_ended(_: Optimizer, *__: object) -> None:
    """Note that no step is under way in this thread, and bring the pair back that is out."""
    # A node of a backward has the hooks of its own that were on when the backward began.
    if current_backward() != NO_BACKWARD:
        return
    _here.is_between_steps = True
    pair = _here.away
    if pair is not None:
        # Whatever is on by now was put on since, and so is to lie on top of it.
        put_below(pair)
        _here.away = None


def _is_on_top(pair: Pair) -> bool:
    top: tuple[Callable[..., object], object] | None = top_hooks(True)
    return top is not None and top[0] is pair.pack_hook


# At the import: to put it in while another thread makes a step could be an error there.
register_optimizer_step_post_hook(_step_has_ended)
