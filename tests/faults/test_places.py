"""Bad places and options are refused with what, where, why and what next; good ones stay clean."""

from __future__ import annotations

import copy
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from children import forked_python
from disks import NOBODY, fill, free_bytes, needs_root
from seccomp import FORBID_RINGS
from ssdtrain import ConfigError, NoSpaceError, TensorStore
from ssdtrain.sizes import shown_bytes

MIB = 1 << 20
Opener = Callable[..., object]


def open_offload(place: Any, **options: Any) -> object:
    with ssdtrain.offload(place, **options) as session:
        return session


def open_store(place: Any, **options: Any) -> object:
    with TensorStore(place, **options) as store:
        return store


OPENERS = pytest.mark.parametrize("opener", [open_offload, open_store])


def refusal(opener: Opener, place: Any, **options: Any) -> str:
    """Return the words of the ``ConfigError`` that the place meets."""
    with pytest.raises(ConfigError) as caught:
        opener(place, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@OPENERS
def test_a_missing_directory(opener: Opener, tmp_path: Path) -> None:
    place = tmp_path / "missing"
    said = refusal(opener, place)
    assert said == f"{place} does not exist; create it, or pass another directory"
    assert not place.exists()


@OPENERS
def test_a_file_in_place_of_a_directory(opener: Opener, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("kept")
    said = refusal(opener, str(place))
    assert said == f"{place} is a file, not a directory; pass the directory it stands in"
    assert place.read_text() == "kept"


@OPENERS
def test_other_things_in_place_of_a_directory(opener: Opener, tmp_path: Path) -> None:
    # A FIFO that is opened as a file would wait for a writer for ever.
    os.mkfifo(tmp_path / "fifo")
    # The path of a socket may have 107 bytes at most.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        for place, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path / "socket", "a socket")):
            said = refusal(opener, place)
            assert said == f"{place} is {kind}, not a directory; pass the directory it stands in"
    assert refusal(opener, "/dev/null").startswith("/dev/null is a device, not a directory; ")


@OPENERS
@pytest.mark.parametrize("ending", ["", "/."])
def test_a_link_to_a_directory(opener: Opener, tmp_path: Path, ending: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    said = refusal(opener, f"{tmp_path}/link{ending}")
    assert said == (
        f"{tmp_path}/link is a symbolic link, which somebody may change later; pass its target: "
        f"{tmp_path}/real"
    )
    # Links on the way are the business of whoever made the directories there.
    (tmp_path / "real" / "place").mkdir()
    opener(tmp_path / "link" / "place")


@OPENERS
@pytest.mark.parametrize("mode", [0o777, 0o2703])
def test_a_directory_that_everyone_may_change(opener: Opener, tmp_path: Path, mode: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    assert refusal(opener, place) == (
        f"{place} can be written to by everyone and has no sticky bit (mode {mode:04o}); run "
        f"`chmod o-w {place}`, or `chmod +t {place}` if others need it, or pass a directory of "
        "your own"
    )
    assert not list(place.iterdir())
    subprocess.run(["chmod", "+t", str(place)], check=True)
    opener(place)
    place.chmod(mode)
    subprocess.run(["chmod", "o-w", str(place)], check=True)
    opener(place)


@OPENERS
@pytest.mark.parametrize("mode", [0o700, 0o775, 0o1777])
def test_a_directory_as_people_have_them(opener: Opener, tmp_path: Path, mode: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    opener(place)
    place.chmod(0o700)
    assert not list(place.iterdir())


@OPENERS
@pytest.mark.parametrize("place", [5, b"/var", [], "", ["/", None]])
def test_an_invalid_path(opener: Opener, place: Any) -> None:
    said = refusal(opener, place)
    assert said.startswith("dir must be a path or a list of paths to directories, not ")
    assert repr(place if place != "" else [""]) in said


@OPENERS
def test_the_same_directory_twice(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for places in ([tmp_path, str(tmp_path)], [tmp_path / "link", tmp_path / "." / ""]):
        said = refusal(opener, places)
        assert said.startswith("dir names the same directory twice: ")
        assert said.endswith("; name each one once")
        assert all(str(place) in said for place in places)


@OPENERS
def test_one_bad_directory_among_good_ones(opener: Opener, tmp_path: Path) -> None:
    assert str(tmp_path / "b") in refusal(opener, [tmp_path, tmp_path / "b"])
    assert not list(tmp_path.iterdir())


@OPENERS
def test_tmpfs(opener: Opener) -> None:
    place = "/dev/shm"
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if kind.stdout.strip() != "tmpfs":
        pytest.skip(f"{place} is not a tmpfs in this machine")
    for direct_io in ("required", "optional", "disabled"):
        assert refusal(opener, place, direct_io=direct_io) == (
            f"{place} is on tmpfs, which is memory itself, so nothing would be saved; use a "
            "directory on a local NVMe file system"
        )


NO_SIZE = "must be a positive whole number of bytes, or text such as '8GiB' or '500MB', not "
BAD_OPTIONS: list[tuple[str, Any, str]] = [
    *(
        ("backend", value, "backend must be one of 'auto', 'io_uring', 'psync', not ")
        for value in ("uring", None, ["auto"])
    ),
    *(
        ("direct_io", value, "direct_io must be one of 'required', 'optional', 'disabled', not ")
        for value in ("yes", True)
    ),
    *(("max_disk_bytes", value, f"max_disk_bytes {NO_SIZE}") for value in (0, "1G", True)),
    *(("verify", value, "verify must be True or False, not ") for value in (None, 1)),
]
BAD_OFFLOAD_OPTIONS: list[tuple[str, Any, str]] = [
    (name, value, f"{name} {NO_SIZE}")
    for name in ("min_bytes", "max_resident_bytes")
    for value in (0, "1G", True)
] + [("min_bytes", None, f"min_bytes {NO_SIZE}")]


@OPENERS
@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS)
def test_a_bad_option(opener: Opener, tmp_path: Path, name: str, value: Any, message: str) -> None:
    assert refusal(opener, tmp_path, **{name: value}) == f"{message}{value!r}"


@pytest.mark.parametrize(("name", "value", "message"), BAD_OFFLOAD_OPTIONS)
def test_a_bad_option_of_offload(tmp_path: Path, name: str, value: Any, message: str) -> None:
    assert refusal(open_offload, tmp_path, **{name: value}) == f"{message}{value!r}"


def test_options_are_checked_before_the_directory_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backend must be"):
        ssdtrain.offload(tmp_path / "missing", backend="no")  # type: ignore[arg-type]
    # The directory itself is looked at when the context is entered, not when it is described.
    described = ssdtrain.offload(tmp_path / "later")
    with pytest.raises(ConfigError, match="does not exist"):
        described.__enter__()
    (tmp_path / "later").mkdir()
    with described:
        pass


AS_NOBODY = """
import os, sys
import ssdtrain
from ssdtrain.errors import SsdtrainError
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
for opened in (lambda: ssdtrain.TensorStore(sys.argv[2]),
               lambda: ssdtrain.offload(sys.argv[2]).__enter__()):
    try:
        opened()
    except SsdtrainError as error:
        print(type(error).__name__, error)
    else:
        print("opened")
"""


def as_nobody(folder: Path, place: str) -> list[str]:
    """Open ``place``, seen from ``folder``, without the rights of root; return what was said."""
    done = forked_python(AS_NOBODY, str(folder), place, str(NOBODY))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_permission_to_write(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    # A relative path, because the way to it may be closed too.
    words = (
        "ConfigError cannot create a file in .: Permission denied (os error 13); make it "
        "writable, or pass another directory"
    )
    assert as_nobody(place, ".") == [words, words]


@needs_root
@OPENERS
def test_a_read_only_mount(opener: Opener, tmp_path: Path, mounted: Callable[..., Path]) -> None:
    (tmp_path / "source").mkdir()
    place = mounted("--bind", str(tmp_path / "source"))
    remount = ["mount", "-o", "remount,ro,bind", str(place)]
    subprocess.run(remount, check=True, capture_output=True)
    assert refusal(opener, place) == (
        f"cannot create a file in {place}: Read-only file system (os error 30); make it "
        "writable, or pass another directory"
    )


@needs_root
@OPENERS
def test_too_little_space(opener: Opener, small_disk: Path) -> None:
    fill(small_disk, leave=32 * MIB)
    free = shown_bytes(free_bytes(small_disk))
    with pytest.raises(NoSpaceError) as caught:
        opener(small_disk)
    assert str(caught.value) == (
        f"{small_disk} has {free} free, 64 MiB are the least; free some space"
    )


@needs_root
def test_a_disk_that_fills_up(small_disk: Path) -> None:
    with TensorStore(small_disk) as store:
        held, refusals = [], []
        for index in range(96):
            one = store.write(torch.full((MIB,), float(index)))
            try:
                one.wait()
            except NoSpaceError as error:
                refusals.append((error.errno, str(error)))
            else:
                held.append((index, one))
        assert all(errno == 28 for errno, _ in refusals)
        assert "free some space there" in refusals[0][1]
        assert str(small_disk) in refusals[0][1]
        assert len(held) >= 10
        for index, one in held:
            assert torch.equal(store.read(one).result(), torch.full((MIB,), float(index)))
        held.clear()
        del one
        last = store.write(torch.ones(MIB))
        assert torch.equal(store.read(last).result(), torch.ones(MIB))
    del store, last


def chain(depth: int, width: int, rows: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return torch.nn.Sequential(*layers), torch.randn(rows, width)


WITHOUT_RINGS = (
    FORBID_RINGS
    + """
import logging, sys
import ssdtrain
from ssdtrain.errors import UnsupportedError
logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
import torch
"""
)
WITH_RING = """
for opened in (lambda: ssdtrain.TensorStore(sys.argv[1], backend="io_uring"),
               lambda: ssdtrain.offload(sys.argv[1], backend="io_uring").__enter__()):
    try:
        opened()
    except UnsupportedError as error:
        print(error.errno, error)
"""
REFUSED_RING = (
    "cannot create an io_uring (forbidden by seccomp or sysctl kernel.io_uring_disabled): "
    "Operation not permitted (os error 1)"
)


def without_rings(program: str, *places: Path) -> list[str]:
    done = forked_python(WITHOUT_RINGS + program, *map(str, places))
    assert done.returncode == 0, done.stderr
    if done.stdout == "no seccomp\n":
        pytest.skip("this kernel takes no seccomp filter")
    return done.stdout.splitlines()


def test_rings_forbidden_and_asked_for(tmp_path: Path) -> None:
    said = without_rings(WITH_RING, tmp_path)
    assert len(said) == 2
    for one in said:
        assert REFUSED_RING in one
        assert "backend=" in one, "what next?"


def spill_files(place: Path) -> list[os.stat_result]:
    """Return the facts of this process's open files that had a name in ``place``, or never one."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(f"{place}/") and target.endswith(" (deleted)"):
            found.append(os.fstat(int(entry.name)))
    return found


@pytest.mark.parametrize("umask", [0, 0o777])
def test_files_have_no_names_and_no_readers(tmp_path: Path, umask: int) -> None:
    model, batch = chain(depth=6, width=128, rows=4_000)
    seen: list[list[Path]] = []
    files: list[os.stat_result] = []

    def look(*_: object) -> None:
        seen.append(list(tmp_path.iterdir()))
        files.extend(spill_files(tmp_path))

    before = os.umask(umask)
    try:
        with ssdtrain.offload(tmp_path) as session:
            for _ in range(2):
                model[0].register_forward_hook(look)
                loss = model(batch).sum()
                # However busy the machine is, something has been written.
                session.flush()
                look()
                loss.backward()
                look()
    finally:
        os.umask(before)
    assert session.stats.bytes_written > 0
    del loss
    assert len(seen) >= 6
    assert not any(seen)
    assert not list(tmp_path.iterdir())
    assert len(files) == len(seen)
    for facts in files:
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_nlink == 0
        assert facts.st_uid == os.geteuid()


WITHOUT_STREAMS = """
import os, sys, torch, ssdtrain
out = os.dup(1)
closed = [int(stream) for stream in sys.argv[2:]]
for stream in closed:
    os.close(stream)
# Direct I/O would refuse what is not aligned.
with ssdtrain.TensorStore(sys.argv[1], direct_io="disabled") as store:
    source = torch.randn(1 << 20)
    stored = store.write(source)
    stored.wait()
    for stream in closed:
        try:
            os.write(stream, b"8 bytes\\n")  # as many as an eventfd takes
            os.write(out, f"printed into {os.readlink(f'/proc/self/fd/{stream}')} ".encode())
        except OSError:
            pass
    os.write(out, str(torch.equal(store.read(stored).result(), source)).encode())
"""


@pytest.mark.parametrize("closed", ["2", "012"])
@pytest.mark.parametrize("backend", ["auto", "psync"])
def test_nobody_prints_into_what_a_store_has_opened(
    backend: str, closed: str, tmp_path: Path
) -> None:
    """A descriptor that is opened where a stream was closed takes the stream's number."""
    program = WITHOUT_STREAMS.replace('"disabled"', f'"disabled", backend="{backend}"')
    assert forked_python(program, str(tmp_path), *closed).stdout == "True"


def test_fallback_without_direct_io(tmp_path: Path) -> None:
    with TensorStore(tmp_path, direct_io="disabled", backend="psync") as store:
        assert not list(tmp_path.iterdir())
        source = torch.randn(100_001)
        assert torch.equal(store.read(store.write(source)).result(), source)
        (facts,) = spill_files(tmp_path)
        assert stat.S_IMODE(facts.st_mode) == 0o600
    del store
    assert not spill_files(tmp_path)


def test_the_places_of_a_list_may_be_of_any_kind(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for places in ([str(tmp_path), tmp_path / "b"], (tmp_path,), str(tmp_path), tmp_path):
        open_store(places)
        open_offload(places)


def use_elsewhere(
    made: Callable[[], Callable[[], object]], place: Path, patch: pytest.MonkeyPatch
) -> None:
    """Make something in ``place`` that names ``inner``, and use it from another directory."""
    (place / "inner").mkdir(parents=True)
    (place / "other" / "inner").mkdir(parents=True)
    patch.chdir(place)
    use = made()
    patch.chdir(place / "other")
    use()


def test_a_relative_directory_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hydra and others change the working directory between the two."""
    model, batch = chain(depth=6, width=128, rows=4_000)
    files: list[os.stat_result] = []

    def made() -> Callable[[], object]:
        tool = copy.deepcopy(ssdtrain.offload("inner"))

        def use() -> None:
            for _ in range(2):
                with tool as session:
                    loss = model(batch).sum()
                    session.flush()
                    files.extend(spill_files(tmp_path / "inner"))
                    loss.backward()
                assert [place for place, _ in session.stats.engines] == [f"{tmp_path}/inner"]

        return use

    use_elsewhere(made, tmp_path, monkeypatch)
    assert len(files) == 2


def test_a_decorator_keeps_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Callable[[], object]:
        @ssdtrain.offload(["inner", "other/inner"])
        def use() -> list[str]:
            session = ssdtrain.active()
            assert session is not None
            return [place for place, _ in session.stats.engines]

        def look() -> None:
            assert use() == [f"{tmp_path}/inner", f"{tmp_path}/other/inner"]

        return look

    use_elsewhere(made, tmp_path, monkeypatch)


@OPENERS
def test_a_relative_directory_is_told_in_whole(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(opener, "missing/../there")
    assert said.startswith(f"{tmp_path}/missing/../there does not exist; ")
    assert repr(ssdtrain.offload("inner")) == f"ssdtrain.offload('{tmp_path}/inner')"
    shown = repr(ssdtrain.offload("inner", verify=True, pinned_bytes="1GiB"))
    assert shown == f"ssdtrain.offload('{tmp_path}/inner', pinned_bytes={1 << 30}, verify=True)"
