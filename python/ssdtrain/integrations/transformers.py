"""The callback for ``transformers.Trainer`` and its subclasses, such as the trainers of TRL.

A trainer calls its callbacks when training begins and when it has ended, but not after an error or
Ctrl-C, and not if an earlier callback raises. So this module wraps ``Trainer.train``, to put a
block around it for trainers that have the callback. It also wraps ``Trainer.log``: figures that a
callback adds in ``on_log`` come too late for the trainer's history and for loggers that the trainer
made. Both are wrapped once for all trainers when this module is imported; a process of a launcher
imports it when it unpickles the callback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ssdtrain import Session
from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.integrations.coverage import Coverage, single_callback
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
    """Offloads saved tensors: ``Trainer(..., callbacks=[OffloadCallback("/mnt/nvme")])``.

    The options are those of ``ssdtrain.offload``. No hooks stay on after training.
    Each log of a training loss gets the figures ``ssdtrain/...``; the report is logged at level
    info when training ends, and is ``str(callback.session)``.
    """

    def __init__(
        self,
        dir: Directories | None = None,  # noqa: A002 - as in offload
        **options: Any,
    ) -> None:
        self.coverage = Coverage(dir, options)

    @property
    def session(self) -> Session | None:
        """The session of the last training; ``None`` before the first."""
        return self.coverage.session

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Drop tensors of failed backwards; warn if there is no block around training."""
        # The trainer may begin again with a smaller batch after a backward ran out of memory.
        drop_failed_backwards()
        if not self.coverage.is_on:
            log.warning(
                "ssdtrain offloads nothing: this trainer trains without transformers.Trainer.train."
                " Leave OffloadCallback out, and put `with ssdtrain.offload(dir):` around its call"
            )


def _coverage(trainer: Trainer) -> Coverage | None:
    callback = single_callback(trainer.callback_handler.callbacks, OffloadCallback)
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
        # Logs of evaluations come in between: they would take the figures of the next training
        # loss.
        coverage = _coverage(self)
        if coverage is not None and "loss" in logs:
            logs.update(coverage.metrics())
        write(self, logs, *arguments, **options)

    return with_figures


WRAPPED = "is_wrapped_by_ssdtrain"

if not hasattr(Trainer, WRAPPED):
    # Only once, even if this module is loaded again.
    wrapped = {
        "train": _wrapped_train(Trainer.train),
        "log": _wrapped_log(Trainer.log),
        WRAPPED: True,
    }
    for name, value in wrapped.items():
        setattr(Trainer, name, value)
