"""Named GPUs and drives, with the figures of their data sheets. Pure.

A data sheet gives the best rate of a part. The caller assumes the share of it that training gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from ssdtrain.errors import ConfigError

__all__ = ["DRIVES", "GPUS", "PCIE_BYTES_PER_S", "Drive", "Gpu", "named"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """An SSD: bytes per second of large requests, and the bytes it is rated to have written."""

    title: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    rated_bytes: float
    """The terabytes written (TBW) that its maker warrants, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: its memory, and its rates at their best."""

    title: str
    memory_bytes: int
    tensor_flops: float
    """Floating point operations per second of its tensor cores: bf16 and fp16, dense."""
    single_flops: float
    """Floating point operations per second in float32, without TF32, as PyTorch does by default."""
    memory_bytes_per_s: float
    pcie_generation: int


PCIE_BYTES_PER_S: Mapping[int, float] = {3: 12e9, 4: 25e9, 5: 55e9, 6: 110e9}
"""Measured rates of 16 lanes of each generation, in one direction; 6 is 5 doubled."""

DRIVES: Mapping[str, Drive] = {
    "980-pro-1tb": Drive(
        title="Samsung 980 PRO 1 TB",
        read_bytes_per_s=7.0e9,
        write_bytes_per_s=5.0e9,
        rated_bytes=600e12,
    ),
    "980-pro-2tb": Drive(
        title="Samsung 980 PRO 2 TB",
        read_bytes_per_s=7.0e9,
        write_bytes_per_s=5.1e9,
        rated_bytes=1200e12,
    ),
    "990-pro-2tb": Drive(
        title="Samsung 990 PRO 2 TB",
        read_bytes_per_s=7.45e9,
        write_bytes_per_s=6.9e9,
        rated_bytes=1200e12,
    ),
    "pm9d3a-7.68tb": Drive(
        title="Samsung PM9D3a 7.68 TB",
        read_bytes_per_s=12e9,
        write_bytes_per_s=6.8e9,
        rated_bytes=14_016e12,
    ),
    "9550-max-6.4tb": Drive(
        title="Micron 9550 MAX 6.4 TB",
        read_bytes_per_s=14e9,
        write_bytes_per_s=10e9,
        rated_bytes=35_040e12,
    ),
    "p5800x-1.6tb": Drive(
        title="Intel Optane P5800X 1.6 TB",
        read_bytes_per_s=7.2e9,
        write_bytes_per_s=6.2e9,
        rated_bytes=292e15,
    ),
}

GPUS: Mapping[str, Gpu] = {
    "h200": Gpu(
        title="H200 141 GB",
        memory_bytes=141 * 10**9,
        tensor_flops=989e12,
        single_flops=67e12,
        memory_bytes_per_s=4.8e12,
        pcie_generation=5,
    ),
    "h100": Gpu(
        title="H100 80 GB (SXM)",
        memory_bytes=80 * GIB,
        tensor_flops=989e12,
        single_flops=67e12,
        memory_bytes_per_s=3.35e12,
        pcie_generation=5,
    ),
    "a100-80gb": Gpu(
        title="A100 80 GB (SXM)",
        memory_bytes=80 * GIB,
        tensor_flops=312e12,
        single_flops=19.5e12,
        memory_bytes_per_s=2.039e12,
        pcie_generation=4,
    ),
    "a100-40gb": Gpu(
        title="A100 40 GB",
        memory_bytes=40 * GIB,
        tensor_flops=312e12,
        single_flops=19.5e12,
        memory_bytes_per_s=1.555e12,
        pcie_generation=4,
    ),
    "l40s": Gpu(
        title="L40S 48 GB",
        memory_bytes=48 * GIB,
        tensor_flops=362e12,
        single_flops=91.6e12,
        memory_bytes_per_s=864e9,
        pcie_generation=4,
    ),
    "rtx-4090": Gpu(
        title="GeForce RTX 4090 24 GB",
        memory_bytes=24 * GIB,
        tensor_flops=165e12,
        single_flops=82.6e12,
        memory_bytes_per_s=1.008e12,
        pcie_generation=4,
    ),
    "rtx-3090": Gpu(
        title="GeForce RTX 3090 24 GB",
        memory_bytes=24 * GIB,
        tensor_flops=71e12,
        single_flops=35.6e12,
        memory_bytes_per_s=936e9,
        pcie_generation=4,
    ),
}

Part = TypeVar("Part")


def named(parts: Mapping[str, Part], name: str, what: str) -> Part:
    """Return the part of a name. Raises ``ConfigError`` with the known names."""
    known = parts.get(name.strip().lower().replace(" ", "-").replace("_", "-"))
    if known is None:
        raise ConfigError(f"no {what} is called {name!r} here; there are {', '.join(parts)}")
    return known
