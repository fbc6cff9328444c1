"""One way of training a model whose weights and state do not lie in memory, in its own process.

`compare_training.py` starts it: `training_ways.py WAY DIR OPTIONS`. It answers each line of its
input, which is the number of a step, with a line of JSON: seconds, loss, and the most memory that
the process has had above what its libraries take, from the first step on. All ways train the same
bfloat16 model with AdamW on float32 masters, from the same seed and batches.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

RATE = 1e-4
MIB = 1 << 20


class Residual(nn.Module):
    """The part of a transformer that has most of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what goes in and what the part makes of it."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        out: Tensor = x + self.down(hidden)
        return out


def model(options: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return the model, with the same weights in each process."""
    torch.manual_seed(0)
    blocks = (Residual(options["width"]) for _ in range(options["layers"]))
    return nn.Sequential(*blocks).to(torch.bfloat16).to(dtype)


def loss_of(module: Any, options: dict[str, int], number: int) -> Tensor:
    """Return the loss of one batch."""
    generator = torch.Generator().manual_seed(number)
    shape = options["tokens"], options["width"]
    x = torch.randn(shape, generator=generator).to(torch.bfloat16)
    target = torch.randn(shape, generator=generator)
    loss: Tensor = nn.functional.mse_loss(module(x).float(), target)
    return loss


class Way(ABC):
    """A model in training."""

    def __init__(self, directory: Path, options: dict[str, int]) -> None:
        self.options = options
        self.begin(directory)

    @abstractmethod
    def begin(self, directory: Path) -> None:
        """Make model and optimizer."""

    @abstractmethod
    def step(self, number: int) -> float:
        """Make a step; return its loss."""


class Ordinary(Way):
    """One whose step is that of any loop."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> float:
        """Make a step; return its loss."""
        loss = loss_of(self.module, self.options, number)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class InMemory(Way):
    """Plain PyTorch, with the masters in a list."""

    def begin(self, directory: Path) -> None:  # noqa: ARG002 - it writes nothing
        """Make model and optimizer."""
        self.module = model(self.options)
        self.masters = [param.detach().float() for param in self.module.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=RATE)

    def step(self, number: int) -> float:
        """Make a step; return its loss."""
        loss = loss_of(self.module, self.options, number)
        loss.backward()  # type: ignore[no-untyped-call]
        for master, param in zip(self.masters, self.module.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.module.parameters(), strict=True):
                param.copy_(master)
                master.grad = None
        return loss.item()


class Imported(InMemory):
    """The same where ssdtrain is imported, which switches on torch's huge pages."""

    def begin(self, directory: Path) -> None:
        """Make model and optimizer."""
        importlib.import_module("ssdtrain")
        super().begin(directory)


class OnDisk(Ordinary):
    """Weights, masters and state by ssdtrain, a quarter of the weights in memory."""

    overlap = "step"

    def begin(self, directory: Path) -> None:
        """Make model and optimizer."""
        ssdtrain = importlib.import_module("ssdtrain")
        module = model(self.options)
        nbytes = sum(param.nbytes for param in module.parameters())
        self.module = ssdtrain.offload_parameters(
            module, directory, max_resident_bytes=max(nbytes // 4, 9 * self.options["width"] ** 2)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE)
        ssdtrain.offload_optimizer(
            self.optimizer, directory, master_dtype=torch.float32, overlap=self.overlap
        )


class OnDiskInBackward(OnDisk):
    """The same, with updates in backward."""

    overlap = "backward"


class DeepSpeed(Way):
    """ZeRO-3 with parameters and optimizer state on NVMe."""

    def begin(self, directory: Path) -> None:
        """Make the engine."""
        # Its builder calls ninja, which lies beside the interpreter of an environment.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.environ["DS_ACCELERATOR"] = "cpu"
        as_one_process()
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.init_distributed("gloo")
        module = model(self.options)
        largest = max(param.numel() for param in module.parameters())
        total = sum(param.numel() for param in module.parameters())
        disk = {"device": "nvme", "nvme_path": str(directory), "pin_memory": False}
        config = {
            "train_micro_batch_size_per_gpu": self.options["tokens"],
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": disk
                | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16},
                "offload_param": disk
                | {"buffer_count": 24, "buffer_size": largest, "max_in_cpu": 0},
                "stage3_max_live_parameters": total // 4,
                "stage3_prefetch_bucket_size": 2 * largest,
                "sub_group_size": 4 * largest,
            },
            "aio": {"block_size": MIB, "queue_depth": 16, "overlap_events": True},
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config
        )

    def step(self, number: int) -> float:
        """Make a step; return its loss."""
        loss = loss_of(self.engine, self.options, number)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class Sharded(Ordinary):
    """FSDP2 with `CPUOffloadPolicy`, in one process."""

    def begin(self, directory: Path) -> None:  # noqa: ARG002 - it writes nothing
        """Make model and optimizer."""
        fsdp = importlib.import_module("torch.distributed.fsdp")
        as_one_process()
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        policy = {
            "mesh": mesh,
            "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False),
        }
        self.module = model(self.options, torch.float32)
        for block in self.module.children():
            fsdp.fully_shard(block, **policy)
        fsdp.fully_shard(self.module, **policy)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE)


class OffloadedOptimizer(InMemory):
    """torchao's `CPUOffloadOptimizer` around AdamW."""

    def begin(self, directory: Path) -> None:
        """Make model and optimizer."""
        super().begin(directory)
        torchao = importlib.import_module("torchao.optim")
        self.optimizer = torchao.CPUOffloadOptimizer(self.masters, torch.optim.AdamW, lr=RATE)


WAYS: dict[str, type[Way]] = {
    "plain": InMemory,
    "imported": Imported,
    "ssdtrain": OnDisk,
    "ssdtrain-backward": OnDiskInBackward,
    "deepspeed": DeepSpeed,
    "fsdp2": Sharded,
    "torchao": OffloadedOptimizer,
}


def as_one_process() -> None:
    """Be the only process of a group."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # Each way has a port of its own: they run at the same time.
    os.environ.update(one, MASTER_PORT=str(20_000 + os.getpid() % 20_000))


def status_bytes(name: str) -> int:
    """Return a figure of this process that the kernel tells."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"the kernel tells nothing of {name}")


def main(words: list[str]) -> None:
    """Answer until the input ends."""
    name, directory, told = words
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(told)
    torch.set_num_threads(options["threads"])
    if name == "deepspeed":
        importlib.import_module("deepspeed")
    resident_bytes = status_bytes("VmRSS")
    way = WAYS[name](Path(directory), options)
    # How a model is made is no part of this: all make it in memory first.
    Path("/proc/self/clear_refs").write_text("5")
    print(json.dumps({"is_ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        began_s = perf_counter()
        loss = way.step(int(line))
        seconds = perf_counter() - began_s
        peak_bytes = status_bytes("VmHWM") - resident_bytes
        found = {"seconds": seconds, "loss": loss, "peak_bytes": peak_bytes}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
