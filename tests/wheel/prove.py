"""Proves an installed ssdtrain: the doctor, a step, a script, and the store's round trip.

    python -P prove.py DIRECTORY

DIRECTORY is where tensors are written. It needs nothing but the package and what that depends on,
and it refuses to run where the package would be built, or taken from a folder beside it.
"""

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain import _core

BUILD_TOOLS = ("cargo", "rustc", "maturin", "cc", "gcc")
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(1024, 1024)).sin().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


def check_environment() -> None:
    """Refuse an environment that could build the package, or that takes it from elsewhere."""
    for tool in BUILD_TOOLS:
        if found := shutil.which(tool):
            sys.exit(f"{found} is on PATH: what is proved here must be what was installed")
    for module in (ssdtrain, _core):
        if not Path(module.__file__).is_relative_to(sys.prefix):
            sys.exit(f"{module.__name__} comes from {module.__file__}, not from {sys.prefix}")


def check_doctor(directory: str) -> None:
    """Run the installed command, which exits with 1 if offload cannot work there."""
    command = Path(sys.prefix) / "bin" / "ssdtrain"
    if subprocess.run([command, "doctor", directory], check=False).returncode != 0:
        sys.exit(f"ssdtrain doctor says that offload does not work in {directory}")


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Run one training step, always from the same random state; dropout draws from it."""
    torch.manual_seed(0)
    model.zero_grad()
    model(batch).square().mean().backward()
    return {name: one.grad for name, one in model.named_parameters()}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every bit, the sign of a zero included."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_training_step(directory: str) -> None:
    """Compare the gradients of one step with those of plain PyTorch, bit for bit."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(128, 128))
    batch = torch.randn(8, 64, 128)
    plain = gradients(model, batch)
    # The bound is a fraction of the 30 MB that this step saves: without it, so small a step might
    # keep everything in memory and prove nothing of the disk.
    bound = {"min_bytes": 4096, "max_resident_bytes": 8 << 20}
    with ssdtrain.offload(directory, **bound) as session:
        offloaded = gradients(model, batch)
    if wrong := [name for name in plain if not is_same(offloaded[name], plain[name])]:
        sys.exit(f"gradients differ from plain PyTorch: {', '.join(wrong)}")
    stats = session.stats
    if not (stats.bytes_written and stats.bytes_read):
        sys.exit(f"the step used no disk, so it proves nothing: {stats}")
    sys.stdout.write(
        f"training step: {len(plain)} gradients equal in every bit,"
        f" {stats.bytes_written} bytes written, {stats.bytes_read} read, {stats.engines}\n"
    )


def check_run(directory: str) -> None:
    """Run an unchanged script with the installed command, and compare it with a plain run."""
    command = Path(sys.prefix) / "bin" / "ssdtrain"
    options = ["--max-resident-bytes", "8MiB", "--min-bytes", "4KiB"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        runs = [
            subprocess.run([*words, script], capture_output=True, text=True, check=False)
            for words in ([sys.executable], [command, "run", "--dir", directory, *options])
        ]
    plain, run = runs
    if plain.returncode or run.returncode or not plain.stdout or run.stdout != plain.stdout:
        sys.exit(f"ssdtrain run does not train as a plain run: {plain}, {run}")
    if "ssdtrain run: " not in run.stderr or " 0 bytes offloaded" in run.stderr:
        sys.exit(f"ssdtrain run reports nothing: {run.stderr}")
    sys.stdout.write(f"{run.stderr}ssdtrain run: every loss as in a plain run\n")


def check_round_trip(directory: str) -> None:
    """Write tensors and arrays, drop the sources, and read them back."""
    generator = np.random.default_rng(0)
    arrays = [generator.random(size) for size in (1, 1000, 1 << 20)]
    with ssdtrain.TensorStore(directory) as store:
        for array in arrays:
            stored = [store.write(array), store.write(torch.from_numpy(array.copy()))]
            for one in stored:
                one.wait()
                if np.asarray(store.read(one).result()).tobytes() != array.tobytes():
                    sys.exit(f"{array.nbytes} bytes came back as others")
    sys.stdout.write(f"store: {2 * len(arrays)} round trips, every byte back\n")


def main() -> None:
    """Prove everything, in the order in which a user meets it."""
    (directory,) = sys.argv[1:]
    check_environment()
    sys.stdout.write(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, ssdtrain"
        f" {version('ssdtrain')} from {Path(ssdtrain.__file__).parent}\n"
    )
    sys.stdout.flush()
    check_doctor(directory)
    check_training_step(directory)
    check_run(directory)
    check_round_trip(directory)


if __name__ == "__main__":
    main()
