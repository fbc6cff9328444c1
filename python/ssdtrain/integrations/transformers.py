"""The callback for ``transformers.Trainer`` and what derives from it, such as the trainers of TRL.

A trainer tells its callbacks that training begins and that it has ended, but not that it was ended
by an error or by Ctrl-C, and a callback that raises keeps the others from being told anything. So
``train`` itself gets a block around it, for trainers that have our callback, and so does ``log``
get our figures: what a callback adds in ``on_log`` comes after the trainer's own history and after
the loggers that the trainer made. Both are wrapped once, for all trainers, where this module is
imported: also in a process that a launcher starts, when it unpickles the callback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ssdtrain import Session
from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.integrations.coverage import Coverage, the_only_one
from ssdtrain.notices import log

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "ssdtrain.integrations.transformers needs transformers and accelerate: "
        f"pip install 'ssdtrain[transformers]' ({error})"
    ) from error

if TYPE_CHECKING:
    from ssdtrain.config import Directories

__all__ = ["OffloadCallback"]


class OffloadCallback(TrainerCallback):
    """Offloads what training saves: ``Trainer(..., callbacks=[OffloadCallback("/mnt/nvme")])``.

    The options are those of ``ssdtrain.offload``. Whatever ends the training, nothing stays on.
    Each log of a training loss gets the figures ``ssdtrain/...``; the report is logged at level
    info when training ends, and is ``str(callback.session)``.
    """

    def __init__(self, dir: Directories, **options: Any) -> None:  # noqa: A002 - as in offload
        self.coverage = Coverage(dir, options)

    @property
    def session(self) -> Session | None:
        """The session of the last training; ``None`` before the first."""
        return self.coverage.session

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin, perhaps anew with a smaller batch; warn if there is no block around training."""
        # A backward that ran out of memory leaves tensors behind, for which there may be no room.
        drop_failed_backwards()
        if not self.coverage.is_on:
            log.warning(
                "ssdtrain offloads nothing: this trainer trains without transformers.Trainer.train."
                " Leave OffloadCallback out, and put `with ssdtrain.offload(dir):` around its call"
            )


def _coverage(trainer: Trainer) -> Coverage | None:
    callback = the_only_one(trainer.callback_handler.callbacks, OffloadCallback)
    return None if callback is None else callback.coverage


def _wrapped_train(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def covered(self: Trainer, *arguments: Any, **options: Any) -> Any:
        coverage = _coverage(self)
        if coverage is None:
            return train(self, *arguments, **options)
        with coverage.around_training():
            return train(self, *arguments, **options)

    return covered


def _wrapped_log(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def with_figures(self: Trainer, logs: dict[str, Any], *arguments: Any, **options: Any) -> None:
        # Evaluations are logged with names of their own, and in between: their logs would take
        # away what belongs to the next training loss.
        coverage = _coverage(self)
        if coverage is not None and "loss" in logs:
            logs.update(coverage.metrics())
        write(self, logs, *arguments, **options)

    return with_figures


WRAPPED = "is_wrapped_by_ssdtrain"

if not hasattr(Trainer, WRAPPED):
    # Once, also if this module is loaded again.
    wrapped = {
        "train": _wrapped_train(Trainer.train),
        "log": _wrapped_log(Trainer.log),
        WRAPPED: True,
    }
    for name, value in wrapped.items():
        setattr(Trainer, name, value)
