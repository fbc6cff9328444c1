"""The ways to train that `benches/gpu_step.py` compares: where saved tensors are until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import ssdtrain
from gpu_llama import Llama, Run, recomputed, selected
from gpu_step_log import StepLog
from ssdtrain.machine import cufile

Step = Callable[[Llama, Tensor], Tensor]
"""One forward and its backward; returns the loss."""


BOUND_SHARE = 0.45
"""12 GiB where keep takes 26.8, as blocks of width 4096 do in bfloat16."""


class Mode:
    """A way to train one step."""

    def __init__(
        self,
        hooks: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        run: Run | None = None,
    ) -> None:
        self._hooks = hooks
        self._run = run

    def step(self, model: Llama, x: Tensor) -> Tensor:
        """Train one step."""
        with self._hooks():
            loss = model(x, run=self._run)
            loss.backward()
        return loss.detach()

    def lack(self) -> str | None:
        """Say in one line why this way does not work here; ``None`` if it does."""
        return None

    def new_log(self) -> StepLog | None:
        """Return a log of the steps of ssdtrain; ``None`` for the ways of torch."""
        return None


class Offload(Mode):
    """ssdtrain; one session serves all steps."""

    def __init__(self, directory: Path | None, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._directory, self._is_direct = directory, options.get("gds") == "required"
        self._tool = ssdtrain.offload(directory, **options)
        self._step = self._tool(super().step)

    def step(self, model: Llama, x: Tensor) -> Tensor:
        """Train one step."""
        loss: Tensor = self._step(model, x)
        return loss

    def lack(self) -> str | None:
        """Say why cuFile does not move bytes past the CPU's memory, if it is to."""
        if not self._is_direct:
            return None
        trial = cufile.try_out(str(self._directory), torch.cuda.current_device())
        return None if trial.works else f"no GPUDirect Storage here: {trial.message}"

    def new_log(self) -> StepLog:
        """Return a log of the steps."""
        return StepLog(self._tool)


class Bounded(Offload):
    """ssdtrain under ``max_device_bytes``, which is known once another way has trained."""

    def __init__(self, options: Mapping[str, Any], *, other: str, share: float) -> None:
        Mode.__init__(self)
        self._options = options
        self.other, self.share = other, share
        """The bound leaves this share of the peak of that way above what is there before a step."""

    def bind(self, peak_bytes: int) -> None:
        """Set the bound by the peak of the other way, above what is there now."""
        bound_bytes = torch.cuda.memory_allocated() + int(self.share * peak_bytes)
        super().__init__(None, {**self._options, "max_device_bytes": bound_bytes})


def modes(directory: Path, offload: Mapping[str, Any], host_bytes: int) -> dict[str, Mode]:
    """Return every way, by name; the first is what the others are compared with.

    ``offload`` has the options of ssdtrain but for the places where tensors go; without any, it is
    as users get it. In ``host_bytes`` of the CPU's memory it may leave tensors by plan.
    """
    host = {**offload, "max_host_bytes": host_bytes}
    return {
        "keep": Mode(),
        "keep again": Mode(),
        "recompute": Mode(run=recomputed),
        "selective": Mode(run=selected),
        "rematerialize": Offload(None, offload),
        "host": Offload(None, {**host, "rematerialize": "never"}),
        "both": Offload(None, host),
        "bound": Bounded(host, other="keep", share=BOUND_SHARE),
        "low bound": Bounded(host, other="recompute", share=1.0),
        "disk": Offload(directory, {**host, "gds": "disabled"}),
        "gds": Offload(directory, {**offload, "gds": "required"}),
        "save_on_cpu": Mode(lambda: save_on_cpu(pin_memory=True)),
    }


WAYS = (
    "keep",
    "keep again",
    "recompute",
    "selective",
    "rematerialize",
    "host",
    "both",
    "bound",
    "low bound",
    "disk",
    "gds",
    "save_on_cpu",
)


def free_host_bytes() -> int:
    """Return the memory of the machine that a program can have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(free) << 10
