"""The ways to train that `benches/gpu_step.py` compares: where saved tensors are until backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ssdtrain
from gpu_llama import Llama
from ssdtrain.machine import cufile

Step = Callable[[Llama, Tensor], Tensor]
"""One forward and its backward; returns the loss."""

STASH_COUNT = 5
"""Tensors whose copy may be under way while the program goes on."""
COPIED_BYTES_MIN = 1 << 10


class Mode:
    """A way to train one step."""

    def __init__(
        self,
        hooks: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        recompute: bool = False,
    ) -> None:
        self._hooks = hooks
        self._recompute = recompute

    def step(self, model: Llama, x: Tensor) -> Tensor:
        """Train one step."""
        with self._hooks():
            loss = model(x, recompute=self._recompute)
            loss.backward()
        return loss.detach()

    def lack(self) -> str | None:
        """Say in one line why this way does not work here; ``None`` if it does."""
        return None

    def session(self) -> ssdtrain.Session | None:
        """Return the session of ssdtrain, if there is one."""
        return None


class Offload(Mode):
    """ssdtrain; one session serves all steps."""

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._directory, self._is_direct = directory, options["gds"] == "required"
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

    def session(self) -> ssdtrain.Session | None:
        """Return the session, once a step has been trained."""
        return self._tool.session


class StreamedCopies:
    """Host offload with a stream for the copies, in the way of torchtune's activation offloading.

    Weights and small tensors stay. A source is let go once some more have been copied, and the
    stream of the program has been made to wait for its copy.
    """

    def __init__(self, model: Llama) -> None:
        self._weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self._stream = torch.cuda.Stream()
        self._stash: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def hooks(self) -> AbstractContextManager[object]:
        """Return the hooks of one step."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, bool]:
        is_weight = tensor.untyped_storage().data_ptr() in self._weights
        if tensor.device.type != "cuda" or is_weight or tensor.nbytes < COPIED_BYTES_MIN:
            return tensor, False
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            self._stash.append((tensor, self._stream.record_event()))
        while len(self._stash) > STASH_COUNT:
            _, copied = self._stash.popleft()
            current.wait_event(copied)
        return host, True

    def _unpack(self, packed: tuple[Tensor, bool]) -> Tensor:
        tensor, is_copied = packed
        current = torch.cuda.current_stream()
        while self._stash:
            # Forward has ended: what is left of it is let go.
            _, copied = self._stash.popleft()
            current.wait_event(copied)
        if not is_copied:
            return tensor
        with torch.cuda.stream(self._stream):
            back = tensor.to("cuda", non_blocking=True)
        current.wait_stream(self._stream)
        back.record_stream(current)
        return back


def modes(
    model: Llama, directory: Path, offload: Mapping[str, Any], host_bytes: int
) -> dict[str, Mode]:
    """Return every way, by name; the first is what the others are compared with.

    ``offload`` has the options of ssdtrain but for the way to the disk; without any, it is as users
    get it. In ``host_bytes`` of the CPU's memory it may leave tensors by plan.
    """
    return {
        "keep": Mode(),
        "keep again": Mode(),
        "recompute": Mode(recompute=True),
        "staged": Offload(directory, {**offload, "gds": "disabled"}),
        "host": Offload(directory, {**offload, "gds": "disabled", "max_host_bytes": host_bytes}),
        "gds": Offload(directory, {**offload, "gds": "required"}),
        "save_on_cpu": Mode(lambda: save_on_cpu(pin_memory=True)),
        "streamed_to_host": Mode(StreamedCopies(model).hooks),
    }


HOST_MODES = ("save_on_cpu", "streamed_to_host")
"""Those that need as much memory of the CPU as the others need of the GPU, and are trained last, in
turns with keep: they are so slow that there would be time for hardly any other step."""
WAYS = ("keep", "keep again", "recompute", "staged", "host", "gds", *HOST_MODES)


def free_host_bytes() -> int:
    """Return the memory of the machine that a program can have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(free) << 10
