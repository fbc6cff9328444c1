"""Decides if the tensors of a GPU go past the CPU's memory (GPUDirect Storage).

The compiled part asks at the first tensor of each GPU. Each decision is logged once.
"""

from __future__ import annotations

import logging

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine import cufile
from ssdtrain.notices import PROCESS

__all__ = ["DirectWay"]


class DirectWay:
    """The choice between the two ways of a GPU's tensors, by the option ``gds``."""

    def __init__(self, config: OffloadConfig) -> None:
        """Raise ``ConfigError`` if ``gds`` is required and other options exclude it."""
        self._mode = config.gds
        self._dirs = config.store.dirs
        self._excluded = _excluded(config)
        self._before: tuple[int, int] | None = None
        if self._excluded is not None and self._mode == "required":
            raise ConfigError(f"gds='required' is not possible with {self._excluded}")

    def choose(self, gpu: int) -> tuple[str | None, bool] | None:
        """Return the path of cuFile and whether compatibility mode is allowed, or ``None``."""
        if self._mode == "disabled":
            return None
        if self._excluded is not None:
            self.refuse(gpu, f"{self._excluded} excludes it")
            return None
        allows_compat = self._mode == "compat"
        description = ""
        for directory in self._dirs:
            trial = cufile.try_out(directory, gpu, allows_compat=allows_compat)
            description = trial.message
            if not trial.works:
                self.refuse(gpu, f"in {directory}: {description}")
                return None
        self._before = cufile.direct_bytes()
        proof = "which nvidia-fs counts" if self._before is not None else "which nothing counts"
        mode = "in compatibility mode, " if allows_compat else ""
        self._say(gpu, f"by GPUDirect Storage ({mode}{description}), {proof}")
        return cufile.find_library(), allows_compat

    def expect(self, gpu: int) -> None:
        """Raise if ``gds`` is required and does not work for this GPU."""
        if self._mode == "required":
            self.choose(gpu)

    def refuse(self, gpu: int, why: str) -> None:
        """Log that the tensors of a GPU go through pinned memory; raise if that is not allowed."""
        if self._mode != "optional":
            raise UnsupportedError(
                f"GPUDirect Storage does not work for GPU {gpu}, {why}; gds='optional' takes "
                "pinned memory instead"
            )
        self._say(gpu, f"through pinned memory, not by GPUDirect Storage: {why}")

    def direct_bytes(self) -> tuple[int, int]:
        """Return the bytes that nvidia-fs wrote and read since, for all processes, if it counts."""
        now = cufile.direct_bytes()
        if now is None or self._before is None:
            return 0, 0
        return now[0] - self._before[0], now[1] - self._before[1]

    def _say(self, gpu: int, how: str) -> None:
        topic = f"the way of GPU {gpu}: {how}"
        PROCESS.say(topic, "saved tensors of GPU %d go %s", gpu, how, level=logging.INFO)


def _excluded(config: OffloadConfig) -> str | None:
    """Return the option that keeps bytes from going past the CPU's memory."""
    if not config.store.dirs:
        return "dir=None"
    if config.store.verify:
        return "verify=True, which needs the bytes in the CPU's memory"
    if config.store.direct_io == "disabled":
        return "direct_io='disabled'"
    if config.store.backend == "simulated":
        return "backend='simulated'"
    return None
