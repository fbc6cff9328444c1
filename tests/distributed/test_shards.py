"""Offloaded optimizers of parameters in shards (FSDP2, DTensor): the bits of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ssdtrain
import support
from ranks import RANKS, run_ranks
from ssdtrain import StorageError, UnsupportedError, offload_optimizer
from ssdtrain.optimizer.disk import ShardAway
from stores import ChosenStore

STEPS = 4
WIDTH = 193
"""Odd, so that the shards of two processes are of different sizes."""
BUFFER = "256KiB"

Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
}


def sharded_model(mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    # The head has one row: the second process has nothing of it.
    parts = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(*parts, nn.Linear(WIDTH, 1))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    return module


def begun(mesh: DeviceMesh, directory: Path | None) -> tuple[nn.Sequential, Any]:
    """A model in shards and its optimizer, offloaded if there is a directory."""
    module = sharded_model(mesh)
    optimizer = MAKES["AdamW"](module.parameters())
    if directory is not None:
        offload_optimizer(optimizer, directory, buffer_bytes=BUFFER)
    return module, optimizer


def train(module: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * RANKS + rank)
        module(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def own(value: Any) -> Tensor:
    part = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
    return part.detach().clone()


def everything(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What this process has of weights and state, and what of it is in shards."""
    values: dict[str, Any] = dict(module.named_parameters())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        values |= {f"{number} {name}": value for name, value in state.items()}
    found = {name: own(value) for name, value in values.items()}
    are_in_shards = [isinstance(value, DTensor) for value in values.values()]
    return {**found, "are in shards": torch.tensor(are_in_shards)}


def assert_trains_alike(
    make_model: Callable[[], nn.Module],
    make: Make,
    rank: int,
    directory: Path,
    **options: Any,
) -> Any:
    found = []
    for is_offloaded in (False, True):
        module = make_model()
        optimizer: Any = make(module.parameters())
        if is_offloaded:
            offload_optimizer(optimizer, directory, buffer_bytes=BUFFER, **options)
        train(module, optimizer, rank, range(STEPS))
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])
    return optimizer


def in_shards(rank: int, directory: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in names:
        # A quarter of the state finds room: the rest stays in memory, in shards all the same.
        for options in ({}, {"undo": True}, {"undo": True, "max_disk_bytes": "160KiB"}):
            optimizer = assert_trains_alike(
                lambda: sharded_model(mesh), MAKES[name], rank, directory, **options
            )
            stats = optimizer.offload_stats
            assert stats.on_disk_bytes > 0, name
            assert stats.read_bytes > 0, name
            whole_bytes = 4 * sum(param.numel() for param in optimizer.param_groups[0]["params"])
            state_bytes = stats.on_disk_bytes + stats.resident_bytes
            # Half of two or three tensors for each parameter, and a step's count.
            assert state_bytes < 3 * whole_bytes * 0.6, "only of its own shards"


def test_state_in_shards(tmp_path: Path) -> None:
    run_ranks(in_shards, tmp_path / "run", tmp_path, ["AdamW"])


@pytest.mark.long
def test_state_of_other_optimizers_in_shards(tmp_path: Path) -> None:
    run_ranks(in_shards, tmp_path / "run", tmp_path, [name for name in MAKES if name != "AdamW"])


def split_by_columns(rank: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))

    def make() -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, 192), nn.GELU(), nn.Linear(192, WIDTH))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(module, mesh, plan)

    # Every process sees the same rows: the weights are what is split.
    optimizer = assert_trains_alike(make, MAKES["AdamW"], 0, directory)
    assert optimizer.offload_stats.read_bytes > 0


@pytest.mark.long
def test_state_of_tensor_parallel_layers(tmp_path: Path) -> None:
    run_ranks(split_by_columns, tmp_path / "run", tmp_path)


def resumed(rank: int, directory: Path) -> None:
    """A checkpoint of torch's own format is written and read by all processes together."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for is_offloaded in (False, True):
        first, optimizer = begun(mesh, directory if is_offloaded else None)
        train(first, optimizer, rank, range(2))
        saved = {"model": first.state_dict(), "state": get_optimizer_state_dict(first, optimizer)}
        dcp.save(saved, checkpoint_id=directory / f"saved {is_offloaded}")
        train(first, optimizer, rank, range(2, 4))
        found.append(everything(first, optimizer))
    module, optimizer = begun(mesh, directory)
    train(module, optimizer, rank, range(7, 8))
    into = {"model": module.state_dict(), "state": get_optimizer_state_dict(module, optimizer)}
    dcp.load(into, checkpoint_id=directory / "saved True")
    module.load_state_dict(into["model"])
    set_optimizer_state_dict(module, optimizer, into["state"])
    train(module, optimizer, rank, range(2, 4))
    found.append(everything(module, optimizer))
    for one in found[1:]:
        support.assert_equal_bits(one, found[0])


@pytest.mark.long
def test_a_checkpoint_of_all_processes(tmp_path: Path) -> None:
    run_ranks(resumed, tmp_path / "run", tmp_path)


def failing(rank: int, directory: Path) -> None:
    """A shard that cannot be read in one process: its step is undone, and made again."""
    mesh = init_device_mesh("cpu", (RANKS,))
    plain = sharded_model(mesh)
    train(plain, MAKES["AdamW"](plain.parameters()), rank, range(STEPS))
    module = sharded_model(mesh)
    with ChosenStore(directory) as store:
        optimizer: Any = MAKES["AdamW"](module.parameters())
        offload_optimizer(optimizer, store, buffer_bytes=BUFFER, undo=True)
        train(module, optimizer, rank, range(STEPS - 1))
        before = everything(module, optimizer)
        optimizer._disk.flush()
        if rank == 1:
            store.fail_after(2)
        own_step, said = optimizer.step, []

        def step() -> None:
            try:
                own_step()
            except StorageError as error:
                said.append(str(error))
                store.fail_after(0, 0)
                support.assert_equal_bits(everything(module, optimizer), before)
                own_step()

        optimizer.step = step
        train(module, optimizer, rank, range(STEPS - 1, STEPS))
        assert len(said) == rank
        assert all("the step was undone" in one for one in said)
        # What stays in memory because its write has failed is in shards still.
        entry = ShardAway(optimizer._disk, next(module.parameters()).detach())
        assert isinstance(entry.settled(), DTensor)
        support.assert_equal_bits(
            {name: own(param) for name, param in module.named_parameters()},
            {name: own(param) for name, param in plain.named_parameters()},
        )


def test_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    run_ranks(failing, tmp_path / "run", tmp_path)


def held(rank: int, directory: Path) -> None:
    """Who holds a shard sees it change in updates, and changes it for them, as in plain ones."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for is_offloaded in (False, True):
        module, optimizer = begun(mesh, directory if is_offloaded else None)
        train(module, optimizer, rank, range(2))
        with torch.no_grad():
            shards = [
                state["exp_avg"].to_local()
                for state in (optimizer.state[param] for param in module.parameters())
            ]
        train(module, optimizer, rank, range(2, 3))
        seen = {f"seen {number}": shard.clone() for number, shard in enumerate(shards)}
        for shard in shards:
            shard.mul_(0.5)
        train(module, optimizer, rank, range(3, 4))
        del shards
        train(module, optimizer, rank, range(4, 6))
        found.append({**everything(module, optimizer), **seen})
    support.assert_equal_bits(found[1], found[0])
    assert optimizer.offload_stats.read_bytes > 0


@pytest.mark.long
def test_a_shard_that_somebody_holds(tmp_path: Path) -> None:
    run_ranks(held, tmp_path / "run", tmp_path)


class Scaled(torch.optim.Optimizer):
    """Scales each update by the norm of the whole weight, as LAMB does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                norm = param.norm()
                whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                param.add_(state["mean"], alpha=-group["lr"] * float(whole))


def refused(rank: int, directory: Path) -> None:
    module = sharded_model(init_device_mesh("cpu", (RANKS,)))
    refusals: dict[str, dict[str, Any]] = {
        "overlap": {"overlap": "backward"},
        "max_gradient_bytes": {"max_gradient_bytes": "1MiB"},
    }
    for named, options in refusals.items():
        optimizer = MAKES["AdamW"](module.parameters())
        with pytest.raises(UnsupportedError, match=f"in shards .* with {named} so far"):
            offload_optimizer(optimizer, directory, **options)
    # One process that cannot read its state would put the other out of step.
    with pytest.raises(UnsupportedError, match="its update may communicate between processes"):
        offload_optimizer(Scaled(module.parameters()), directory)
    offload_optimizer(Scaled(nn.Linear(WIDTH, WIDTH).parameters()), directory)
    late = MAKES["AdamW"](nn.Linear(WIDTH, WIDTH).parameters())
    offload_optimizer(late, directory).add_param_group({"params": list(module.parameters())})
    early = MAKES["AdamW"](list(module.parameters())[:1])
    offload_optimizer(early, directory).add_param_group({"params": list(module.parameters())[1:]})
    whole = nn.Linear(WIDTH, WIDTH)
    optimizer = offload_optimizer(MAKES["AdamW"](whole.parameters()), directory, overlap="backward")
    with pytest.raises(UnsupportedError, match="in shards"):
        optimizer.add_param_group({"params": list(module.parameters())})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UnsupportedError, match=r"DTensor.*torch\.distributed\.checkpoint"):
        ssdtrain.save(directory / "saved", module)
    with pytest.raises(UnsupportedError, match=r"fully_shard brings and releases them"):
        ssdtrain.offload_parameters(module, directory)


def test_options_that_shards_cannot_have(tmp_path: Path) -> None:
    run_ranks(refused, tmp_path / "run", tmp_path)
