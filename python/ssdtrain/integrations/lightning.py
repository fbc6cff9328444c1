"""The callback for Lightning's ``Trainer``, of ``import lightning`` and of ``pytorch_lightning``.

Lightning calls ``on_exception`` of its callbacks after an error, but not if a callback before them
raises there. So the callback puts a block around ``run`` of the ``fit_loop``, when training begins
and in the process and thread that train.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ssdtrain import Session
from ssdtrain.integrations.coverage import Coverage, single_callback

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from ssdtrain.config import Directories
else:
    # A trainer of either package takes callbacks of the other. Taken is the package that is
    # imported already, because the import of the other would take seconds.
    try:
        if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            try:
                from lightning.pytorch import Callback
            except ModuleNotFoundError:
                from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            "ssdtrain.integrations.lightning needs lightning or pytorch_lightning: "
            f"pip install 'ssdtrain[lightning]' ({error})"
        ) from error

__all__ = ["OffloadCallback"]

ATTACHED = ("log", "log_dict")
"""Methods of the model that a trainer sets on its callbacks for each training."""


class OffloadCallback(Callback):
    """Offloads saved tensors: ``Trainer(..., callbacks=[OffloadCallback("/mnt/nvme")])``.

    The options are those of ``ssdtrain.offload``. No hooks stay on after training. The trainer's
    loggers get the figures ``ssdtrain/...`` every ``log_every_n_steps``; the report is
    logged at level info when training ends, and is ``str(callback.session)``.
    """

    def __init__(
        self,
        dir: Directories | None = None,  # noqa: A002 - as in offload
        **options: Any,
    ) -> None:
        self.coverage = Coverage(dir, options)
        self._logged_step = 0

    @property
    def session(self) -> Session | None:
        """The session of the last training; ``None`` before the first."""
        return self.coverage.session

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the methods that the trainer attached, which hold the last model."""
        return {name: value for name, value in vars(self).items() if name not in ATTACHED}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put a block around the loop that is about to run."""
        del pl_module
        single_callback(trainer.callbacks, OffloadCallback)
        self._logged_step = trainer.global_step
        # Replaces the method of the class until training ends. Lightning's tuner runs a loop
        # several times; each run is a training then.
        trainer.fit_loop.run = functools.partial(self._run, trainer)

    def _run(self, trainer: Any) -> Any:
        loop = trainer.fit_loop
        run = type(loop).run
        if self not in trainer.callbacks:
            # The callback was removed after a training that ended without calling it.
            return run(loop)
        with self.coverage.around_training():
            return run(loop)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Give the figures to the loggers, as often as they get those of the model."""
        every = trainer.log_every_n_steps
        if every == 0 or trainer.global_step // every == self._logged_step // every:
            return
        self._logged_step = trainer.global_step
        # The model's `log_dict` would take 2 ms, and has to be called in each batch. Lightning
        # counts the steps of its own logs from 0.
        metrics = {name: float(value) for name, value in self.coverage.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Restore the loop's own ``run``."""
        vars(trainer.fit_loop).pop("run", None)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Restore the loop's own ``run``."""
        vars(trainer.fit_loop).pop("run", None)
