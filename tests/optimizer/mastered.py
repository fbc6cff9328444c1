"""What the tests of float32 masters share: the loop that users write, and training beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import support
from ssdtrain import offload_optimizer
from trained import STEPS, WIDTH, everything, model, plain_step

MakeOf = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer of parameters, or of masters in their place."""
KINDS = (torch.bfloat16, torch.float16)
WAYS: list[dict[str, Any]] = [
    {"overlap": "step"},
    {"overlap": "step", "looks_every": 3},
    {"overlap": "backward", "per_parameter": True},
]


def build() -> nn.Module:
    return model().bfloat16()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int16)


class InMemory:
    """An optimizer over masters in memory. It looks enough like an optimizer for a training loop.

    A parameter that was changed by others since the last step is its own master from then on.
    """

    def __init__(self, make: MakeOf, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.masters = [self._master_of(param) for param in self.params]
        self.inner = make(self.masters)
        self.param_groups = [{"params": self.params}]
        self.stepped: set[int] = set()

    @staticmethod
    def _master_of(param: Tensor) -> Tensor:
        if param.dtype not in KINDS:
            return param
        return param.detach().float().requires_grad_(param.requires_grad)

    @property
    def pairs(self) -> list[tuple[int, Tensor, Tensor]]:
        both = zip(self.params, self.masters, strict=True)
        return [(n, p, master) for n, (p, master) in enumerate(both) if p is not master]

    def add(self, params: Iterable[Tensor], **options: Any) -> None:
        added = list(params)
        masters = [self._master_of(param) for param in added]
        self.params += added
        self.masters += masters
        self.inner.add_param_group({"params": masters, **options})

    @torch.no_grad()
    def follow(self) -> None:
        for _, param, master in self.pairs:
            if not torch.equal(bits(master.to(param.dtype)), bits(param)):
                master.copy_(param)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.follow()
        for _, param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.float()
        self._step()
        with torch.no_grad():
            for number, param, master in self.pairs:
                if master.grad is not None:
                    param.copy_(master)
                    self.stepped.add(number)
        return loss

    def _step(self) -> None:
        # What a GradScaler sets where the step itself is to leave out infinite gradients.
        names = [name for name in ("grad_scale", "found_inf") if name in vars(self)]
        for name in names:
            setattr(self.inner, name, vars(self)[name])
        self.inner.step()
        for name in names:
            delattr(self.inner, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Return what a look at the state of a parameter shows."""
        (number,) = (number for number, one in enumerate(self.params) if one is param)
        master = self.masters[number]
        # As a plain optimizer makes an empty one for whoever asks.
        state = dict(self.inner.state[master])
        if number in self.stepped:
            state["master_weight"] = master.detach()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` has returned just now: that changes nothing."""

    def state_dict(self) -> dict[str, Any]:
        states = sorted(self.inner.state_dict()["state"].items())
        state = {number: dict(one) for number, one in states}
        for number, _, master in self.pairs:
            if number in self.stepped:
                state.setdefault(number, {})["master_weight"] = master.detach()
        return {"state": state}


def inner_of(optimizer: Any) -> Any:
    """Return what a scheduler takes."""
    return getattr(optimizer, "inner", optimizer)


Step = Callable[[nn.Module, Any, Tensor], Any]
Prepare = Callable[[nn.Module, Any], Step]


def prepare_nothing(_module: nn.Module, _optimizer: Any) -> Step:
    return plain_step


def started(
    make: MakeOf, directory: Any, build: Callable[[], nn.Module] = build, **options: Any
) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer: offloaded with masters, or the loop if there is no disk."""
    module = build()
    if directory is None:
        return module, InMemory(make, module.parameters())
    options = {"buffer_bytes": "1MiB", "master_dtype": torch.float32, **options}
    return module, offload_optimizer(make(module.parameters()), directory, **options)


def train(
    make: MakeOf,
    directory: Any,
    prepare: Prepare = prepare_nothing,
    *,
    build: Callable[[], nn.Module] = build,
    steps: int = STEPS,
    looks_every: int = 1,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], Any]:
    """Train, and return what there is after each step, with what the steps returned."""
    module, optimizer = started(make, directory, build, **options)
    step = prepare(module, optimizer)
    generator = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    after = []
    for number in range(steps):
        shown = step(module, optimizer, torch.randn(8, WIDTH, generator=generator).to(dtype))
        if (number + 1) % looks_every:
            continue
        if directory is not None and number % 2:
            # The next step has to read; without it, it may find what is on its way to the disk.
            optimizer._disk.flush()
        now = everything(module, optimizer)
        after.append(now if shown is None else {**now, "shown": shown})
    return after, optimizer


def prove(
    make: MakeOf,
    directory: Path,
    prepare: Prepare = prepare_nothing,
    *,
    in_backward: bool = True,
    ways: list[dict[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Train in memory and offloaded, on every schedule; all has equal bits at each look."""
    plain, _ = train(make, None, prepare, **options)
    optimizer = None
    for way in ways or WAYS:
        if way["overlap"] == "backward" and not in_backward:
            continue
        offloaded, optimizer = train(make, directory, prepare, **options, **way)
        every = way.get("looks_every", 1)
        for actual, expected in zip(offloaded, plain[every - 1 :: every], strict=True):
            support.assert_equal_bits(actual, expected)
        assert optimizer.offload_stats.read_bytes > 0
        assert optimizer.offload_stats.written_bytes > 0
    return optimizer


def master_of(optimizer: Any, param: Tensor) -> Tensor:
    found: Tensor = optimizer.state[param]["master_weight"]
    return found
