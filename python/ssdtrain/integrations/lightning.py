"""The callback for Lightning's ``Trainer``, of ``import lightning`` and of ``pytorch_lightning``.

Lightning tells its callbacks of an error, but one that raises in its own ``on_exception`` keeps
those behind it from being told. So the loop itself gets a block around it: where training begins,
in the process and the thread that train, the callback lays it around ``run`` of the ``fit_loop``.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ssdtrain import Session
from ssdtrain.integrations.coverage import Coverage, the_only_one

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from ssdtrain.config import Directories
else:
    # A trainer of one package takes a callback of the other, so one of them is enough: that which
    # is there already, because importing the other one would take seconds.
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
"""Methods of the model that a trainer sets on its callbacks, anew for each training."""


class OffloadCallback(Callback):
    """Offloads what training saves: ``Trainer(..., callbacks=[OffloadCallback("/mnt/nvme")])``.

    The options are those of ``ssdtrain.offload``. Whatever ends the training, nothing stays on. The
    trainer's loggers get the figures ``ssdtrain/...`` every ``log_every_n_steps``; the report is
    logged at level info when training ends, and is ``str(callback.session)``.
    """

    def __init__(self, dir: Directories, **options: Any) -> None:  # noqa: A002 - as in offload
        self.coverage = Coverage(dir, options)
        self._logged_step = 0

    @property
    def session(self) -> Session | None:
        """The session of the last training; ``None`` before the first."""
        return self.coverage.session

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the trainer attached: with it, the model of the last training travels."""
        return {name: value for name, value in vars(self).items() if name not in ATTACHED}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lay a block around the loop that is about to run."""
        del pl_module
        the_only_one(trainer.callbacks, OffloadCallback)
        self._logged_step = trainer.global_step
        # In place of the method of its class, until training ends. Lightning's tuner runs a loop
        # several times, each of which is then a training.
        trainer.fit_loop.run = functools.partial(self._run, trainer)

    def _run(self, trainer: Any) -> Any:
        loop = trainer.fit_loop
        run = type(loop).run
        if self not in trainer.callbacks:
            # Taken out of the trainer after a training that ended without a word to us.
            return run(loop)
        with self.coverage.around_training():
            return run(loop)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Give the loggers our figures, as often as they get those of the model."""
        every = trainer.log_every_n_steps
        if every == 0 or trainer.global_step // every == self._logged_step // every:
            return
        self._logged_step = trainer.global_step
        # Not through the model's `log_dict`: it takes 2 ms for these figures, and has to be called
        # in each batch. Lightning counts the steps of its own logs from 0.
        metrics = {name: float(value) for name, value in self.coverage.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Leave the loop as it was."""
        vars(trainer.fit_loop).pop("run", None)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Leave the loop as it was."""
        vars(trainer.fit_loop).pop("run", None)
