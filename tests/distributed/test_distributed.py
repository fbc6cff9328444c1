"""Training in two processes: each step has the bits of the same step without ssdtrain."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ssdtrain
from ranks import RAISED, RANKS, ranks, run_ranks
from ssdtrain.planning.rematerialize import PROOF_COUNT
from support import (
    MODES,
    Flush,
    Result,
    Step,
    assert_equal_bits,
    batch,
    nothing,
    prove,
    prove_refused,
    shared_out,
    wait_until,
    watch_records,
)

STEPS = 2
MICRO_BATCHES = 4
ROWS = 24
"""Not the width of a layer: a tensor's shape tells an activation from a weight."""


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(64, 8))


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(module: nn.Module, rank: int, flush: Flush, synchronise: Callable[[bool], Any]) -> Result:
    """Train with micro-batches whose gradients are exchanged at the last one only."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    torch.manual_seed(rank)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            seed = (step * MICRO_BATCHES + number) * RANKS + rank
            with synchronise(number == MICRO_BATCHES - 1):
                loss = module(batch(seed, rows=ROWS)).float().square().mean()
                flush()
                loss.backward()
            found[f"loss {step} {number}"] = loss.detach()
        for name, one in module.named_parameters():
            assert (one.grad is not None) == one.requires_grad, name
            if one.grad is not None:
                found[f"grad {step} {name}"] = local(one.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **{name: local(one) for name, one in module.named_parameters()}}


def replicated_step(rank: int) -> Step:
    def step(flush: Flush) -> Result:
        module = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        return train(
            module, rank, flush, lambda last: contextlib.nullcontext() if last else module.no_sync()
        )

    return step


class Adapted(nn.Module):
    """A frozen layer beside a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(4)))


class Selective(nn.Module):
    """A checkpoint that caches views of weights too, and hands all to the hooks, bare."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        saved = [torch.ops.aten.t.default, torch.ops.aten.addmm.default]
        return checkpoint(
            self.inner,
            x,
            use_reentrant=False,
            respect_saved_tensors_hooks=True,
            context_fn=lambda: create_selective_checkpoint_contexts(saved),
        )


def selective() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Selective() for _ in range(4)))


RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
SHARDED: dict[str, tuple[Callable[[], nn.Sequential], torch.dtype | None]] = {
    "fp32": (model, None),
    "bf16": (model, torch.bfloat16),
    "frozen with adapters in bf16": (adapted, torch.bfloat16),
    "selective checkpoints": (selective, None),
}


def sharded_step(rank: int, name: str = "fp32") -> Step:
    make, dtype = SHARDED[name]
    mesh = init_device_mesh("cpu", (RANKS,))

    def step(flush: Flush) -> Result:
        module = make()
        for part in (*list(module)[:3], module):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

        @contextlib.contextmanager
        def synchronise(last: bool) -> Iterator[None]:
            module.set_requires_gradient_sync(last)
            yield

        return train(module, rank, flush, synchronise)

    return step


def parallel(rank: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)
        )
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        return parallelize_module(module, mesh, plan)  # type: ignore[return-value]

    def step(flush: Flush) -> Result:
        # Every rank sees the same rows: the weights are what is split.
        return train(make(), 0, flush, lambda _: contextlib.nullcontext())

    messages: list[str] = []
    log = logging.getLogger("ssdtrain")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: bool(messages.append(record.getMessage())))
    with watch_records() as seen:
        prove(step, directory)
    assert any("of kind DTensor stay where they are" in one for one in messages)
    assert all(ROWS in one.shape for one in seen), {one.shape for one in seen}

    def whole(flush: Flush) -> Result:
        """The weights are taken out of their shards by hand, and cast."""
        layer = make()[1]
        x = batch(0, rows=ROWS).bfloat16().requires_grad_()
        loss = (x * 2) @ layer.weight.full_tensor().t().bfloat16()
        loss = loss.sin().sum() + ((x * 3) @ layer.weight.to_local().bfloat16().t()).sin().sum()
        flush()
        loss.backward()
        return {"x": x.grad, "weight": layer.weight.grad.to_local()}

    with watch_records() as seen:
        prove(whole, directory)
    assert all(ROWS in one.shape for one in seen), {one.shape for one in seen}

    def changed(flush: Flush) -> Result:
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()
        y = (x * 2).exp()
        loss = y.sin().sum()
        flush()
        with torch.no_grad():
            y.mul_(2)
        loss.backward()
        return {"x": x.grad}

    prove_refused(changed, directory)


def piped_step(rank: int) -> Step:
    def step(flush: Flush) -> Result:
        whole = model()
        half = len(whole) // 2
        module = whole[:half] if rank == 0 else whole[half:]
        stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))

        def end_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # The stage first asks for shapes only: with fake tensors, or without gradients.
            if type(output) is Tensor and output.requires_grad:
                flush()

        module.register_forward_hook(end_forward)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        found: dict[str, Tensor] = {}
        for number in range(STEPS):
            x = batch(number, rows=ROWS * MICRO_BATCHES)
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(x)
            else:
                output = schedule.step(target=x[:, :8], losses=losses)
                found[f"output {number}"] = output.detach()
                found[f"losses {number}"] = torch.stack(losses).detach()
            for name, one in module.named_parameters():
                assert one.grad is not None
                found[f"grad {number} {name}"] = one.grad.clone()
        return found

    return step


WAYS: dict[str, Callable[[int], Step]] = {
    "replicas": replicated_step,
    "shards": sharded_step,
    "pipeline": piped_step,
}


def prove_way(rank: int, directory: Path, way: str) -> None:
    prove(WAYS[way](rank), directory)


def prove_sharded(rank: int, directory: Path, name: str) -> None:
    step = sharded_step(rank, name)
    with watch_records() as seen:
        # Without a proof, a recipe may need a weight whose shards are not gathered.
        prove(step, directory, modes=MODES[:-1])
        expected = step(nothing)
        with ssdtrain.offload(directory, min_bytes=1, direct_io="optional"):
            for _ in range(PROOF_COUNT):
                assert_equal_bits(step(nothing), expected)
    # All activations have as many rows, and no weight has.
    assert seen
    assert all(ROWS in one.shape for one in seen), {one.shape for one in seen}


@pytest.mark.parametrize("way", ["replicas", "pipeline"])
def test_two_processes_get_equal_gradients(way: str, tmp_path: Path) -> None:
    run_ranks(prove_way, tmp_path / "run", tmp_path, way)


# Selective checkpoints are what fails without the defence.
@pytest.mark.defends("weights without history")
@pytest.mark.parametrize("name", shared_out(SHARDED, quick=["bf16", "selective checkpoints"]))
def test_weights_in_shards_are_not_written_and_get_equal_gradients(
    name: str, tmp_path: Path
) -> None:
    if name == "selective checkpoints" and not RESPECTS:
        pytest.skip("this torch hands nothing of selective checkpoints over")
    run_ranks(prove_sharded, tmp_path / "run", tmp_path, name)


def test_distributed_tensors_stay_where_they_are_and_give_equal_gradients(tmp_path: Path) -> None:
    run_ranks(parallel, tmp_path / "run", tmp_path)


# The death of one process


def stopped(rank: int, directory: Path, way: str) -> None:
    """Train, and stay in the middle of a step in one rank, with bytes on the disk in both."""
    with ssdtrain.offload(directory, min_bytes=1, direct_io="optional") as session:

        def stop() -> None:
            wait_until(lambda: session.stats.bytes_written > 0, "a write")
            os.write(1, b"stopped\n")
            if rank == 1:
                signal.pause()

        WAYS[way](rank)(stop)


def spilled(process: int | str, directory: Path) -> list[os.stat_result]:
    """Return the files in a directory that a process has open, by name or without one."""
    found = []
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry).startswith(f"{directory}/"):
                    found.append(entry.stat())
    return found


@pytest.mark.parametrize("way", shared_out(WAYS, quick=["shards"]))
def test_when_one_process_is_killed_the_other_ends_and_nothing_is_left(
    way: str, tmp_path: Path
) -> None:
    directory = tmp_path / "spilled"
    directory.mkdir()
    with ranks(stopped, tmp_path / "run", directory, way) as started:
        started.wait_for("stopped")
        files = [spilled(one.pid, directory) for one in started.processes]
        assert [len(one) for one in files] == [1] * RANKS, "each rank has one file"
        assert len({one.st_ino for (one,) in files}) == RANKS, "and it is its own"
        for (one,) in files:
            assert one.st_nlink == 0
            assert one.st_blocks > 0
        assert os.listdir(directory) == []
        started.processes[1].kill()
        assert started.wait() == [RAISED, -signal.SIGKILL], started.outputs()
        assert re.search(r"RuntimeError|DistBackendError", started.output(0)), started.output(0)
        assert "ssdtrain" not in started.output(0).splitlines()[-1]
    assert os.listdir(directory) == []
    # A file without a name goes with the last process that has it open.
    processes = [one for one in os.listdir("/proc") if one.isdigit()]
    assert not [one for one in processes if spilled(one, directory)]
