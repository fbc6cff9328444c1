"""Saves that fail or are killed: a checkpoint is the older one or the new one, and nothing else."""

from __future__ import annotations

import errno
import gc
import os
import random
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import support
from children import forked_python
from disks import fill, needs_root
from ssdtrain import BusyError, NoSpaceError, StorageError, load, save
from ssdtrain.checkpoints import folder as folder_module
from ssdtrain.checkpoints import loading
from test_checkpoints import Run, assert_whole, files_of
from test_undo import ChosenStore

CALLS = ("write", "fsync", "mkdir", "link", "replace", "rename", "open")
"""What a save asks of the kernel to change something; a fault comes before one of these."""


Error = Callable[[], BaseException]
"""Makes an error anew each time: one that was raised holds what it went through."""


class Faults:
    """Raises, or does, something before one of the calls that change the disk."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: Error) -> None:
        self.count = 0
        self.has_come = False
        for name in CALLS:
            patch.setattr(folder_module.os, name, self._with_fault(getattr(os, name), at, error))

    def _with_fault(self, call: Any, at: int, error: Error) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == at:
                self.has_come = True
                raise error()
            return call(*arguments, **named)

        return called


@contextmanager
def faults(at: int, error: Error) -> Iterator[Faults]:
    with pytest.MonkeyPatch.context() as patch:
        yield Faults(patch, at, error)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def over_quota() -> OSError:
    return OSError(errno.EDQUOT, "Disk quota exceeded")


def no_disk() -> OSError:
    return OSError(errno.EIO, "Input/output error")


ERRORS: dict[str, tuple[Error, type[BaseException]]] = {
    "space": (no_space, NoSpaceError),
    "quota": (over_quota, NoSpaceError),
    "error": (no_disk, StorageError),
    "interrupt": (KeyboardInterrupt, KeyboardInterrupt),
}


QUICK = (("error", True, False), ("interrupt", False, True))


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have saves do without files without names, as some file systems do."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_EXCL)
    monkeypatch.setattr(folder_module, "NO_TMPFILE", (errno.EISDIR,))


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize(
    ("umask", "of_files", "of_folder"),
    [(0o22, 0o644, 0o755), (0o77, 0o600, 0o700), (0o777, 0o600, 0o700)],
)
def test_a_umask_never_shuts_the_owner_out(
    umask: int,
    of_files: int,
    of_folder: int,
    unnamed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Root may open everything, so the modes are looked at."""
    if not unnamed:
        without_unnamed_files(monkeypatch)
    run, folder = Run(), tmp_path / "saved"
    run.steps(range(1))
    before = os.umask(umask)
    try:
        for _ in range(2):
            save(folder, run.module, run.optimizer)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == of_folder
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {of_files}


@pytest.mark.parametrize(
    ("how", "has_older", "unnamed"),
    support.shared_out([*product(ERRORS, (True, False), (True, False))], quick=QUICK),
)
def test_a_save_that_fails_anywhere_leaves_the_older_checkpoint(
    how: str, has_older: bool, unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        without_unnamed_files(monkeypatch)
    error, expected = ERRORS[how]
    run, folder = Run(), tmp_path / "saved"
    run.steps(range(1))
    old = run.now()
    if has_older:
        save(folder, run.module, run.optimizer)
    run.steps(range(1, 2))
    new = run.now()
    before = files_of(folder) if has_older else set()
    for at in range(1, 1000):
        with faults(at, error) as made:
            try:
                save(folder, run.module, run.optimizer, shard_bytes="300KB")
            except expected as raised:
                failed = raised
            else:
                assert not made.has_come
                break
        other = Run()
        if has_older and files_of(folder) == before:
            load(folder, other.module, other.optimizer)
            support.assert_equal_bits(other.now(), old)
        elif folder.exists():
            # The fault came after the rename: the new checkpoint is there in whole.
            load(folder, other.module, other.optimizer)
            support.assert_equal_bits(other.now(), new)
            assert_whole(folder)
            break
        else:
            assert not has_older
        assert files_of(tmp_path) == ({"saved"} if has_older else set())
        if how != "interrupt":
            assert "saving into" in str(failed)
            assert failed.errno == error().errno  # type: ignore[attr-defined]
    assert at > 15, "so many calls at least change something"
    save(folder, run.module, run.optimizer)
    assert_whole(folder)


def test_state_that_cannot_be_read_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        run = Run(store)  # type: ignore[arg-type]
        run.steps(range(1))
        save(tmp_path / "saved", run.module, run.optimizer)
        run.steps(range(1, 2))
        run.optimizer._disk.flush()
        before = files_of(tmp_path / "saved")
        store.fail_after(3)
        with pytest.raises(StorageError, match="the test failed this read"):
            save(tmp_path / "saved", run.module, run.optimizer)
        assert files_of(tmp_path / "saved") == before
        # A step that has lost something is not saved over one that has not.
        run.module(torch.ones(2, 160)).sum().backward()
        store.fail_after(3)
        with pytest.raises(StorageError, match="could not be read back in a step"):
            run.optimizer.step()
        with pytest.raises(StorageError, match="could not be read back in a step"):
            save(tmp_path / "saved", run.module, run.optimizer)
        assert files_of(tmp_path / "saved") == before
        run.optimizer.zero_grad()
        other = Run()
        load(tmp_path / "saved", run.module, run.optimizer)
        load(tmp_path / "saved", other.module, other.optimizer)
        for one in (run, other):
            one.steps(range(1, 3))
        support.assert_equal_bits(run.now(), other.now())


@needs_root
def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    run, folder = Run(tmp_path), small_disk / "saved"
    run.steps(range(1))
    save(folder, run.module, run.optimizer)
    before = files_of(folder)
    fill(small_disk, 700 << 10)
    with pytest.raises(NoSpaceError, match=r"this checkpoint takes .* has room for"):
        save(folder, run.module, run.optimizer)
    with pytest.MonkeyPatch.context() as patch:
        # As if somebody else had filled it since it was looked at.
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, *[1 << 40] * 8)))
        with pytest.raises(NoSpaceError, match=r"saving into .* make room there") as raised:
            save(folder, run.module, run.optimizer)
    assert raised.value.errno == errno.ENOSPC
    assert files_of(folder) == before
    other = Run()
    load(folder, other.module, other.optimizer)
    support.assert_equal_bits(other.now(), run.now())


def test_two_that_save_into_one_folder(tmp_path: Path) -> None:
    run = Run()
    save(tmp_path / "saved", run.module)
    lock = folder_module._locked(tmp_path / "saved")
    assert lock is not None
    stray = tmp_path / "saved" / f"weights-{'0' * 16}-00001.safetensors"
    stray.touch()
    try:
        with pytest.raises(BusyError, match="another process saves into"):
            save(tmp_path / "saved", run.module)
        load(tmp_path / "saved", run.module)
        assert stray.exists(), "it may be the other's"
    finally:
        os.close(lock)
    load(tmp_path / "saved", run.module)
    assert not stray.exists()


def test_a_reader_keeps_what_it_has_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Run(), Run()
    run.steps(range(1))
    save(tmp_path / "saved", run.module, run.optimizer)
    expected = run.now()
    run.steps(range(1, 2))
    check = loading._check

    def save_meanwhile(*arguments: Any, **named: Any) -> None:
        save(tmp_path / "saved", run.module, run.optimizer)
        check(*arguments, **named)

    monkeypatch.setattr(loading, "_check", save_meanwhile)
    load(tmp_path / "saved", other.module, other.optimizer)
    support.assert_equal_bits(other.now(), expected)
    assert_whole(tmp_path / "saved")


KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
import support
from ssdtrain import load, save
from test_checkpoint_faults import CALLS
from test_checkpoints import Run, assert_whole, files_of

place = Path(sys.argv[2])
folder, kept = place / "saved", place / "kept"
has_older = sys.argv[3] == "True"
steps = {}
run = Run()
for number in range(6):
    steps[number] = run.now()
    if number == 2:
        save(kept, run.module, run.optimizer)
    run.steps(range(number, number + 1))
steps[6] = run.now()


def save_killed(at):
    run = Run(place)
    load(kept, run.module, run.optimizer)
    run.steps(range(2, 4))
    count = 0

    def killing(call):
        def called(*arguments, **named):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)
        return called

    for name in (*CALLS, "unlink"):
        setattr(os, name, killing(getattr(os, name)))
    save(folder, run.module, run.optimizer, shard_bytes="600KB")
    os._exit(0)


found = []
for at in range(1, 1000, int(sys.argv[4])):
    shutil.rmtree(folder, ignore_errors=True)
    if has_older:
        shutil.copytree(kept, folder)
    child = os.fork()
    if not child:
        save_killed(at)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    assert files_of(place) <= {"saved", "kept"}, files_of(place)
    has_one = (folder / "manifest.json").exists()
    assert has_one or not has_older
    last = at
    number = 0
    run = Run()
    if has_one:
        load(folder, run.module, run.optimizer)
        assert_whole(folder)
        number = 2 if all(torch.equal(a, steps[2][b]) for b, a in run.now().items()) else 4
    support.assert_equal_bits(run.now(), steps[number])
    found.append(number)
    run.steps(range(number, 6))
    support.assert_equal_bits(run.now(), steps[6])
    save(folder, run.module, run.optimizer)
    assert_whole(folder)
assert last > 15, last
assert set(found) >= {2 if has_older else 0}, found
assert 4 in found or int(sys.argv[4]) > 1, found
print("killed", len(found))
"""


@pytest.mark.parametrize(
    ("has_older", "every"),
    support.shared_out([(True, 11), (True, 1), (False, 1)], quick=[(True, 11)]),
)
def test_a_save_that_is_killed_anywhere(has_older: bool, every: int, tmp_path: Path) -> None:
    arguments = (str(Path(__file__).parent), str(tmp_path), str(has_older), str(every))
    done = forked_python(KILLS, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("killed ")


TRAINS = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from ssdtrain import load, save
from test_checkpoints import Run

place, last = Path(sys.argv[2]), int(sys.argv[3])
run = Run(place)
begin = 0
if (place / "saved" / "manifest.json").exists():
    begin = load(place / "saved", run.module, run.optimizer)
print("begins", begin, flush=True)
for number in range(begin, last):
    run.steps(range(number, number + 1))
    save(place / "saved", run.module, run.optimizer, extra=number + 1, shard_bytes="300KB")
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_that_is_killed_at_random_resumes(tmp_path: Path) -> None:
    kills, steps = 6, 250
    chance = random.Random(1)
    arguments = [str(Path(__file__).parent), str(tmp_path), str(steps)]
    killed = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINS, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("begins")
        wait_s = chance.uniform(0, 0.4) if killed < kills else 600
        try:
            assert process.wait(wait_s) == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        finally:
            process.stdout.close()
        assert files_of(tmp_path) <= {"saved"}
    assert killed, "none was killed"
    plain, resumed = Run(), Run()
    assert load(tmp_path / "saved", resumed.module, resumed.optimizer) == steps
    assert_whole(tmp_path / "saved")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain.steps(range(steps))
    torch.set_num_threads(threads)
    support.assert_equal_bits(resumed.now(), plain.now())


STREAMS = """
import ctypes, sys
import torch
from torch import nn
import ssdtrain
place, whole = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)


def made():
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(whole)))
    for param in module.parameters():
        param.grad = torch.full_like(param, 1e-3)
    return module, ssdtrain.offload_optimizer(
        torch.optim.AdamW(module.parameters()), place, buffer_bytes="8MiB"
    )


def step(module, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    optimizer._disk.flush()


def done(what):
    print(what, flush=True)
    sys.stdin.readline()
    # What the allocator has kept for later would hide what is taken then.
    ctypes.CDLL(None).malloc_trim(0)
    print("ready", flush=True)
    sys.stdin.readline()


first, second = made(), made()
done("begun")
step(*first)
step(*second)
done("stepped")
ssdtrain.save(place + "/saved", *first)
done("saved")
ssdtrain.load(place + "/saved", *second)
done("loaded")
second[1]._disk.flush()
assert second[1].offload_stats.resident_bytes < 1 << 20, second[1].offload_stats
"""


def resident_bytes(process: int, name: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


@pytest.mark.long
def test_no_step_and_no_save_and_no_load_holds_the_whole(tmp_path: Path) -> None:
    """The peak is seen from outside, by what the kernel counts for the child."""
    whole = 512
    state_bytes = whole * 2 * 512 * 512 * 4
    grew = {}
    with subprocess.Popen(
        [sys.executable, "-c", STREAMS, str(tmp_path), str(whole)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = 0
        for doing in ("begun", "stepped", "saved", "loaded"):
            assert process.stdout.readline() == f"{doing}\n"
            grew[doing] = resident_bytes(process.pid, "VmHWM") - before
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            before = resident_bytes(process.pid, "VmRSS")
            process.stdin.write("\n")
            process.stdin.flush()
    del grew["begun"]
    assert process.returncode == 0
    # Two megabytes a parameter; besides: buffers of the store, a piece of a file, code not run yet.
    assert state_bytes >= 128 << 20
    assert max(grew.values()) < 40 << 20, grew


@pytest.mark.parametrize("fails_at", [3, 40])
def test_a_load_that_fails(fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Run(), Run(tmp_path)
    run.steps(range(2))
    save(tmp_path / "saved", run.module, run.optimizer)
    other.steps(range(5, 6))
    before = other.now()
    preadv, calls = os.preadv, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == fails_at:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match=r"loading from .* failed") as raised:
        load(tmp_path / "saved", other.module, other.optimizer)
    assert raised.value.errno == errno.EIO
    if fails_at == 3:
        support.assert_equal_bits(other.now(), before)
    load(tmp_path / "saved", other.module, other.optimizer)
    support.assert_equal_bits(other.now(), run.now())


def test_nothing_is_left_open(tmp_path: Path) -> None:
    run = Run()
    save(tmp_path / "saved", run.module, run.optimizer)
    before = support.open_files()
    save(tmp_path / "saved", run.module, run.optimizer)
    load(tmp_path / "saved", run.module, run.optimizer)
    with pytest.raises(StorageError), faults(4, no_disk):
        save(tmp_path / "saved", run.module, run.optimizer)
    assert support.open_files() == before


def test_the_model_is_in_no_reference_cycle_afterwards(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        module: nn.Module = nn.Linear(4, 4)
        save(tmp_path / "saved", module)
        load(tmp_path / "saved", module)
        alive = weakref.ref(module)
        del module
        assert alive() is None
    finally:
        gc.enable()
