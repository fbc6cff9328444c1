"""What the tests of ``ssdtrain.offload`` share: one step run plainly and offloaded, compared."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from children import forked_python
from ssdtrain.__main__ import main
from ssdtrain._core import SavedTensor, SimulatedDisk
from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.activations.followed import Scope
from ssdtrain.activations.hooks import Hooks
from ssdtrain.config import OffloadConfig, Rematerialize, StoreConfig
from ssdtrain.machine.torch_internals import top_hooks
from ssdtrain.offload import active
from ssdtrain.planning.policy import Item, Policy
from ssdtrain.session import Session
from ssdtrain.sharing import Budget
from ssdtrain.stats import Stats

Result = Mapping[str, Tensor]
Flush = Callable[[], None]
Step = Callable[[Flush], Result]
"""Seeds, trains and returns whatever must be equal; calls ``flush`` between forward and backward.

``flush`` does nothing in a plain run. Offloaded, it waits until all that was saved is on the disk
and out of memory, so that backward must read.
"""

MODES = ("disk", "flight", "kept", "skimmed", "made again")
"""Where the bytes are when backward asks: on the disk, in a write that hangs, kept as small, kept
because nothing of the round goes to the disk, so that only its first tensor is followed, or made
again from others, if they can be."""
Mode = Literal["disk", "flight", "kept", "skimmed", "made again"]

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace"
EXIT_USAGE = 2
POLLS_MAX = 10_000
POLL_S = 0.001


class KeepNothing(Policy):
    """A policy that writes everything in every step, however short the step."""

    def learn(self, *arguments: Any) -> None:
        super().learn(*arguments)
        self.keep.clear()

    def note_futile(self, key: int) -> None:
        """Write it again all the same."""

    def is_settled(self, _: int) -> bool:
        """Have each round followed in whole: its plan keeps what is written here."""
        return False


class Patient(Policy):
    """A policy of steps that last so long that the operations of recipes take nothing of them."""

    def learn(self, signature: int, items: Sequence[Item], *others: Any) -> None:
        """Stretch the times of a step, and let each tensor lie idle for long."""
        end_s = 2000.0 * len(items)
        stretched = [
            item._replace(packed_s=1000.0 * place, needed_s=end_s - 100.0 * place)
            for place, item in enumerate(items)
        ]
        super().learn(signature, stretched, *others)


class Rig:
    """A session, and the only place where tests look inside one: what it does not show is here."""

    def __init__(
        self,
        directory: Path,
        *,
        min_bytes: int = 1,
        max_resident_bytes: int | None = None,
        policy: Policy | None = None,
        scope: Scope | None = None,
        others: Sequence[Path] = (),
        faults: Mapping[str, Any] | None = None,
        rematerialize: Rematerialize = "never",
        **store: Any,
    ) -> None:
        self.disk = SimulatedDisk(**(faults or {}))
        """What ``backend="simulated"`` writes to; it can be paused."""
        options: dict[str, Any] = {"backend": "psync", "direct_io": "optional", **store}
        options["simulated_disk"] = self.disk
        config = OffloadConfig(
            store=StoreConfig(dirs=tuple(map(str, (directory, *others))), **options),
            min_bytes=min_bytes,
            max_resident_bytes=max_resident_bytes,
            rematerialize=rematerialize,
        )
        self.session = Session(config, policy if policy is not None else KeepNothing())
        hooks = self.session._hooks
        assert hooks is not None
        self._hooks, self.stalls = hooks, hooks._stalls
        self._writes_end_at_once = False
        self.transfer, self.residency = hooks._transfer, hooks._residency
        self.prefetcher, self.writeback = hooks.prefetcher, hooks.writeback
        self.records = self.writeback.records
        self.policy, self.rematerializer = hooks.policy, hooks.rematerializer
        self.store = self.transfer.store
        if scope is not None:
            self.follow(scope)

    @classmethod
    def in_mode(cls, directory: Path, mode: Mode) -> Rig:
        if mode == "disk":
            return cls(directory, verify=True)
        if mode == "flight":
            return cls(directory, backend="simulated", faults={"seed": 1, "paused": True})
        if mode == "skimmed":
            return cls(directory, scope="skimmed")
        if mode == "made again":
            return cls(directory, rematerialize="always")
        return cls(directory, min_bytes=1 << 40)

    def follow(self, scope: Scope) -> None:
        """Follow so much of each round that begins from now on; without this all, on a CPU."""
        self.prefetcher.scope = lambda *_: scope  # type: ignore[method-assign]

    @property
    def stats(self) -> Stats:
        return self.session.stats

    def context(self) -> contextlib.AbstractContextManager[object]:
        installed = self.session.context()
        if not self._writes_end_at_once:
            return installed
        pack = installed.pack_hook

        def packed(tensor: Tensor) -> object:
            found = pack(tensor)
            self._end_begun_writes()
            return found

        return saved_tensors_hooks(packed, installed.unpack_hook)

    def flush(self) -> None:
        """Pass the node that was made last, and wait for every write."""
        self.session.flush()

    def begin_writes(self) -> None:
        """Pass the node that was made last: whatever was saved is on its way to the disk."""
        self.session.flush(wait=False)
        assert self.stats.disk_used_bytes, "nothing was given to the disk"

    def end_writes_unseen(self) -> None:
        """Wait until every write has ended, and let no hook know."""
        stored = self.records.under_way()
        assert stored, "nothing is on its way to the disk"
        wait_until(lambda: all(one.done() for one in stored), "the end of the writes")

    def end_writes_at_once(self) -> None:
        """Have each write end in the call that began it: the fastest disk that there could be.

        What an operation changes later then differs from what is on the disk.
        """
        self._writes_end_at_once = True

    def _end_begun_writes(self) -> None:
        with self.lock:
            while self.records.end_oldest(self.writeback):
                pass

    @property
    def lock(self) -> threading.RLock:
        """What every hook holds while it looks at what is saved."""
        return self._hooks._lock

    def writes_count(self) -> int:
        """Return how many writes were begun and have not ended, as the hooks know."""
        return self.records.writing_count

    def small_asked_count(self) -> int:
        """Return how many small tensors asked for room in Python, and not only the account."""
        return self._hooks._seen.small_here.count

    def budget(self, name: str) -> Budget:
        """Return a part in the bound for something else than activations."""
        return self._hooks.budget(name)

    def forget_peak(self) -> None:
        """Count the peak of resident bytes anew."""
        self.residency.account.forget_peak()

    def assert_empty(self) -> None:
        """Everything that was saved has gone from memory and disk."""
        self.disk.resume()
        drop_failed_backwards()
        if self._left_bytes():
            gc.collect()
        for _ in range(POLLS_MAX):
            if not self._left_bytes():
                break
            pause()
        assert self.stats.disk_used_bytes == 0, "extents are left behind"
        assert self.stats.resident_bytes == 0, "saved bytes are left in memory"

    def _left_bytes(self) -> int:
        return self.stats.disk_used_bytes + self.stats.resident_bytes


def sizes(*, small: object, whole: object) -> list[ParameterSet]:
    """Return the sizes of a test: small in ``make test``, whole in ``make test-long``."""
    return [
        pytest.param(small, id="small"),
        pytest.param(whole, id="whole", marks=pytest.mark.long),
    ]


def shared_out(cases: Collection[Any], *, quick: Sequence[Any]) -> list[ParameterSet]:
    """Return the cases of a test: the quick ones in ``make test``, all others in the long one."""
    assert set(quick) <= set(cases), "a name that is mistyped would be tried nowhere"
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), id=_id_of(one), marks=marks)
        for one in cases
        for marks in [() if one in quick else pytest.mark.long]
    ]


def _id_of(case: object) -> str | None:
    return case.stem if isinstance(case, Path) else None


def pause() -> None:
    threading.Event().wait(POLL_S)


def functions_of(thread: int) -> set[str]:
    """Return the names of the functions that a thread is in: shows what it waits for."""
    frame, names = sys._current_frames().get(thread), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def wait_until(happened: Callable[[], bool], what: str) -> None:
    for _ in range(POLLS_MAX):
        if happened():
            return
        pause()
    raise AssertionError(f"never happened: {what}")


def nothing() -> None:
    """Stand in for ``flush`` in a plain run."""


def bits(tensor: Tensor) -> bytes:
    """Return the values of a tensor, byte for byte: NaN equals NaN, and -0.0 is not 0.0."""
    plain = tensor.detach()
    plain = plain.to_dense() if plain.is_sparse else plain
    packed = torch.zeros(plain.shape, dtype=plain.dtype).copy_(plain)
    return bytes(packed.reshape(-1).view(torch.uint8).numpy())


def assert_equal_bits(actual: Result, expected: Result) -> None:
    assert expected, "a step that returns nothing proves nothing"
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert bits(actual[name]) == bits(tensor), f"{name} differs in its bits"


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return all gradients by name; a missing one is an error of the test."""
    return {
        name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None
    }


def prove(
    step: Step,
    directory: Path,
    *,
    writes: bool = True,
    reads: bool = True,
    modes: Sequence[Mode] = MODES,
) -> Stats:
    """Run a step plainly and in each mode; all must agree in every bit and leave nothing behind.

    Returns the counts of the run whose bytes came back from the disk.
    """
    expected = step(nothing)
    random_state = torch.get_rng_state()
    on_disk: Stats | None = None
    for mode in modes:
        rig = Rig.in_mode(directory, mode)
        with rig.context():
            actual = step(rig.flush if mode == "disk" else nothing)
        assert_equal_bits(actual, expected)
        assert torch.equal(torch.get_rng_state(), random_state), "the hooks moved the random state"
        del actual
        rig.assert_empty()
        if mode == "disk":
            on_disk = rig.stats
    assert on_disk is not None
    assert not writes or on_disk.bytes_written > 0
    assert not reads or on_disk.bytes_read > 0
    return on_disk


def prove_refused(step: Step, directory: Path, message: str = IN_PLACE) -> None:
    """A step that plain autograd refuses is refused with the same words in each mode."""
    with pytest.raises(RuntimeError, match=message):
        step(nothing)
    prove_refused_offloaded(step, directory, message)


def prove_refused_offloaded(step: Step, directory: Path, message: str = IN_PLACE) -> None:
    """A step is refused in each mode, whatever plain autograd says, and leaves nothing."""
    for mode in MODES:
        rig = Rig.in_mode(directory, mode)
        with rig.context(), pytest.raises(RuntimeError, match=message):
            step(rig.flush if mode == "disk" else nothing)
        rig.assert_empty()


@contextlib.contextmanager
def watch_records() -> Iterator[list[Tensor]]:
    """List what is managed, so may be written or kept; as tensors without bytes of their own."""
    seen: list[Tensor] = []
    context = Hooks.context

    def watched(self: Hooks) -> saved_tensors_hooks:
        pair = context(self)

        def pack(tensor: Tensor) -> object:
            packed = pair.pack_hook(tensor)
            if isinstance(packed, SavedTensor):
                seen.append(tensor.detach().to("meta"))
            return packed

        return saved_tensors_hooks(pack, pair.unpack_hook)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hooks, "context", watched)
        yield seen


def open_files() -> set[str]:
    """Return what this process has open, by number and target."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{entry.name} {os.readlink(entry)}")
    return {one for one in found if not one.endswith("/fd")}


def store_threads() -> list[str]:
    """Return the names of the store's threads that are alive."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("ssdtrain")]


def assert_nothing_is_on() -> None:
    """No hooks of anybody are on in this thread."""
    assert active() is None
    assert top_hooks(True) is None


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """No thread of a store and no file stays once everything made in the block is gone."""
    gc.collect()
    files = open_files()
    yield
    gc.collect()
    wait_until(lambda: not store_threads(), "the end of the store's threads")
    wait_until(lambda: not open_files() - files, "the closing of the store's files")


def python(program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter; ``children.forked_python`` takes less time."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def refusal(arguments: list[str], place: Path) -> str:
    """Give the command line wrong arguments in an empty folder; return what it says.

    It must end with the exit code of wrong usage, and leave no file.
    """
    said = io.StringIO()
    with contextlib.chdir(place), contextlib.redirect_stderr(said):
        try:
            code: object = main(arguments)
        except SystemExit as end:  # as argparse ends
            code = end.code
    assert code == EXIT_USAGE, said.getvalue()
    assert list(place.iterdir()) == []
    return said.getvalue()


def say(*words: object) -> None:
    """Tell the test that runs this child."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


NO_SECCOMP = "this kernel takes no seccomp filter"
"""What a child prints that could not set its own refusals up."""


def in_child(function: Callable[..., None], *arguments: object) -> list[str]:
    """Run a test module's function in a fresh interpreter; return the lines it printed."""
    module, name = Path(inspect.getfile(function)), function.__name__
    program = (
        "import sys, logging; sys.path.insert(0, sys.argv[1]); "
        "logging.basicConfig(format='%(levelname)s %(message)s', stream=sys.stdout); "
        f"from {module.stem} import {name}; {name}(*sys.argv[2:])"
    )
    done = forked_python(program, str(module.parent), *map(str, arguments))
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    if done.stdout.startswith(NO_SECCOMP):
        pytest.skip(NO_SECCOMP)
    return done.stdout.splitlines()


def mlp(seed: int = 0, width: int = 64, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(width, 1))


def batch(seed: int = 0, rows: int = 32, width: int = 64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def chain(x: Tensor, length: int = 6) -> Tensor:
    """Return something that saves ``length`` tensors of the size of ``x``."""
    for _ in range(length):
        x = (x * 1.01).exp().sin()
    return x


def write_after_forward(module: nn.Module) -> None:
    """Have what forward saved on the disk, and out of memory, before backward asks for it."""
    module.register_forward_hook(_flush)


def _flush(*_: object) -> None:
    session = active()
    if session is not None:
        session.flush()
