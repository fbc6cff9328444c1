"""What `demo --whole` says before it starts: whether it fits, how long a step takes, what it wears.

Reckoned from the shape of the model and from a smaller one that was trained in memory. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.trainee import BYTE_VALUES_COUNT
from ssdtrain.demo.whole_options import (
    BYTES_PER_PARAMETER,
    PARAMETER_BYTES,
    STATE_BYTES_PER_PARAMETER,
    DiskRates,
    WholeOptions,
    WholeRun,
)
from ssdtrain.planning.lifespan import Wear

OTHER_BYTES = 256 << 20
"""What training takes besides tensors: code that is loaded late, threads, gaps of the allocator."""
LARGEST_TIMES = 3
"""The bound of `ssdtrain.offload_parameters`, in the weights of the largest module."""
DAY_S = 86_400
RATED_BYTES = 1200e12
"""A common rating of a 2 TB drive: 1,200 TB written."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run is expected to take."""

    parameters_count: int
    all_bytes: int
    """Weights, gradients, state and activations."""
    needed_bytes: int
    """What of it has to be in memory at once, with all else that training takes."""
    plain_s: float
    """A step in memory, scaled from the smaller model."""
    read_bytes: int
    written_bytes: int
    disk_s: float
    """What the disk needs for a step's bytes, both ways in turn."""
    step_s: float
    written_bytes_per_day: float
    life_days: float
    """Of a drive rated for `RATED_BYTES`, if this went on day and night."""


def block_parameters_count(hidden: int) -> int:
    """Return the parameters of one block: qkv, attention, MLP of four times the width, norms."""
    return 12 * hidden * hidden + 13 * hidden


def parameters_count(training: TrainingOptions) -> int:
    """Return the parameters of the model: blocks, embeddings, norm and head."""
    hidden = training.hidden
    ends = (2 * BYTE_VALUES_COUNT + training.sequence + 2) * hidden
    return training.layers * block_parameters_count(hidden) + ends


def expected(options: WholeOptions, fits: WholeRun, disk: DiskRates) -> Expected:
    """Reckon what the run takes, from a finished one of a model with fewer layers, and the disk."""
    training = options.training
    assert fits.end is not None, "it has ended"
    scale = training.layers / fits.layers
    count = parameters_count(training)
    weights, state = PARAMETER_BYTES * count, STATE_BYTES_PER_PARAMETER * count
    saved = {one.name: one.all_bytes for one in fits.end.memory}["activations"]
    activations = round(scale * saved)
    resident = LARGEST_TIMES * 4 * training.hidden**2 * PARAMETER_BYTES
    # Forward and backward read all but what is there, and backward updates them meanwhile.
    read = 2 * max(0, weights - resident) + state + activations
    written = weights + state + activations
    plain_s = scale * sorted(step.seconds for step in fits.timed)[len(fits.timed) // 2]
    disk_s = read / disk.read_bytes_per_s + written / disk.write_bytes_per_s
    step_s = max(plain_s, disk_s)
    rate = written / step_s
    gradients = PARAMETER_BYTES * block_parameters_count(training.hidden)
    bounds = options.buffer_bytes + options.activations_bytes
    return Expected(
        parameters_count=count,
        all_bytes=BYTES_PER_PARAMETER * count + activations,
        needed_bytes=resident + gradients + bounds + OTHER_BYTES,
        plain_s=plain_s,
        read_bytes=read,
        written_bytes=written,
        disk_s=disk_s,
        step_s=step_s,
        written_bytes_per_day=rate * DAY_S,
        life_days=Wear(rated_bytes=RATED_BYTES, written_bytes_per_s=rate).rated_days(),
    )
