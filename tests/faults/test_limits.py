"""Little of what a process may have: the store works with less, or says which limit to raise."""

from __future__ import annotations

import errno
import os
import resource
from itertools import product
from pathlib import Path

import pytest
import torch

import ssdtrain
from disks import MIB, NOBODY, needs_root
from seccomp import refuse
from ssdtrain import SsdtrainError, TensorStore
from support import NO_SECCOMP, in_child, say, shared_out

RINGS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
THREADS_INSTEAD = (
    "WARNING using pread/pwrite threads instead of io_uring: cannot create an io_uring"
)


def train_a_step() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(256, 256, requires_grad=True)
    (torch.randn(256, 256) @ weight).tanh().tanh().sum().backward()
    assert weight.grad is not None
    return weight.grad


def store_something(place: str) -> None:
    with TensorStore(place, direct_io="optional") as store:
        source = torch.randn(MIB)
        assert torch.equal(store.read(store.write(source)).result(), source)


def use(place: str) -> None:
    """Store something and train a step; print the engine, or the error."""
    try:
        store_something(place)
        expected = train_a_step()
        with ssdtrain.offload(place, direct_io="optional", min_bytes=1) as session:
            assert torch.equal(train_a_step(), expected)
        ((_, engine),) = session.stats.engines
        say("worked with", engine)
    except SsdtrainError as error:
        say(type(error).__name__, error)


def engine_here(place: Path) -> str:
    """Return the engine that this machine allows."""
    with TensorStore(place, direct_io="optional") as store:
        ((_, engine),) = store.stats()["engines"]
    return str(engine)


def without_rings(place: str, number: str, calls: str) -> None:
    if not refuse(*calls.split(","), errno=int(number)):
        say(NO_SECCOMP)
        return
    use(place)


REASONS = {
    errno.EPERM: "(forbidden by seccomp or sysctl kernel.io_uring_disabled): Operation not",
    errno.ENOSYS: "(this kernel has none): Function not implemented",
}
# A filter may let rings be made and not let them be entered.
ENTERED = ("io_uring_enter",)


@pytest.mark.parametrize(
    ("number", "calls"),
    shared_out(
        list(product(REASONS, [RINGS, ENTERED])),
        quick=[(errno.EPERM, RINGS), (errno.ENOSYS, ENTERED)],
    ),
)
def test_rings_refused(tmp_path: Path, number: int, calls: tuple[str, ...]) -> None:
    reason = REASONS[number]
    said, result = in_child(without_rings, tmp_path, number, ",".join(calls))
    assert said.startswith(f"{THREADS_INSTEAD} {reason}")
    assert result == "worked with psync"


def without_locked_memory(place: str) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    become_nobody(place)
    use(".")


def become_nobody(place: str) -> None:
    """Give up the rights of root, to whom some limits do not apply."""
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
        # The way to the place may be closed to others; what is entered stays entered.
        os.chdir(place)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def test_no_locked_memory(tmp_path: Path) -> None:
    # Rings of kernels before 5.12 count as locked memory, so both ends are right.
    *said, result = in_child(without_locked_memory, tmp_path)
    if said:
        assert said[0].startswith(f"{THREADS_INSTEAD} (raise `ulimit -l`)")
    assert result == f"worked with {'psync' if said else engine_here(tmp_path)}"


def with_few_files(place: str, spare: str) -> None:
    train_a_step()
    opened = [os.open("/dev/null", os.O_RDONLY)]
    used = opened[0] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(spare), used + int(spare)))
    use(place)


def test_few_open_files(tmp_path: Path) -> None:
    results = [in_child(with_few_files, tmp_path, spare)[-1] for spare in range(4)]
    # The file, an eventfd, a ring: without the last it falls back, without the others it says why.
    assert "ulimit -n" in results[0]
    assert "ulimit -n" in results[1]
    assert results[2:] == ["worked with psync", f"worked with {engine_here(tmp_path)}"]


def with_sixteen_files(place: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    use(place)


@pytest.mark.long
def test_sixteen_open_files(tmp_path: Path) -> None:
    assert in_child(with_sixteen_files, tmp_path)[-1] == f"worked with {engine_here(tmp_path)}"


def without_threads(place: str) -> None:
    train_a_step()
    become_nobody(place)
    have = len(list(Path("/proc/self/task").iterdir()))
    resource.setrlimit(resource.RLIMIT_NPROC, (have, have))
    use(".")


@needs_root
def test_no_more_threads(tmp_path: Path) -> None:
    (said,) = in_child(without_threads, tmp_path)
    assert said == (
        "StorageError cannot start an I/O thread; see `ulimit -u`: Resource temporarily "
        "unavailable (os error 11)"
    )


def with_little_address_space(place: str, spare: str) -> None:
    train_a_step()
    status = Path("/proc/self/status").read_text()
    (used,) = [int(one.split()[1]) << 10 for one in status.splitlines() if "VmSize" in one]
    limit = used + int(spare)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    use(place)


@pytest.mark.long
def test_a_limit_on_addresses(tmp_path: Path) -> None:
    # A machine's worth of addresses is asked for first, less is made do with.
    result = in_child(with_little_address_space, tmp_path, 512 * MIB)[-1]
    assert result == f"worked with {engine_here(tmp_path)}"
    (refused,) = in_child(with_little_address_space, tmp_path, 16 * MIB)
    assert "ulimit -v" in refused or "ulimit -u" in refused
