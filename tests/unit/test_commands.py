"""`ssdtrain bench` and `ssdtrain doctor`, run as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from children import forked_python
from disks import MIB, NOBODY, fill, needs_root
from seccomp import FORBID_RINGS
from ssdtrain.__main__ import main
from support import python, refusal, shared_out, wait_until

NAMES = [
    "kernel",
    "torch",
    "torch_huge_pages",
    "huge_pages",
    "open_files",
    "file_size",
    "address_space",
    "locked_memory",
    "directory",
    "file_system",
    "drive",
    "free_space",
    "direct_io",
    "io_uring",
    "write_and_read",
    "tuning",
    "gpu_driver",
    "gpu",
    "gpu_link",
    "pinned_memory",
    "gpudirect",
]
LAYOUT = ["format", "ssdtrain", "directory", "usable", "checks", "rates", "gpu"]
COMMANDS = ["bench", "demo", "doctor", "run"]
MAIN = "import sys\nfrom ssdtrain.__main__ import main\nsys.exit(main(sys.argv[1:]))"
AS_NOBODY = """
import os, sys
from ssdtrain.__main__ import main
import ssdtrain.commands.bench, ssdtrain.commands.doctor, ssdtrain.machine.torch_internals
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
sys.exit(main(sys.argv[3:]))
"""

NO_LIBRARY = "OSError('libtorch.so: no')"

Done = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "ssdtrain"


def thread_names(process: int) -> list[str]:
    """Return the names of a process's threads; of those that just ended, none."""
    names = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def ssdtrain(*words: str | Path, cwd: Path | None = None) -> Done:
    """Run the command in a child that has done its imports."""
    return forked_python(MAIN, *map(str, words), cwd=cwd)


def installed_command(*words: str | Path, limits: str = "", **options: Any) -> Done:
    """Run the command that pip installed, under limits that the shell sets first."""
    command = [str(Path(sys.executable).with_name("ssdtrain")), *map(str, words)]
    if limits:
        command = ["sh", "-c", f'{limits} && exec "$@"', "sh", *command]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


def checks_of(done: Done) -> dict[str, dict[str, Any]]:
    """Return the checks that `doctor --json` printed, and hold them to the layout."""
    document = json.loads(done.stdout)
    assert list(document) == LAYOUT
    assert document["format"] == 1
    assert [one["name"] for one in document["checks"]] == NAMES
    for one in document["checks"]:
        assert list(one) == ["name", "state", "finding", "remedy"]
        assert one["state"] in {"OK", "WARN", "FAIL", "SKIP"}
        assert one["finding"]
        assert (one["remedy"] is None) == (one["state"] == "OK")
    failed = any(one["state"] == "FAIL" for one in document["checks"])
    assert document["usable"] == (not failed)
    assert done.returncode == failed
    return {one["name"]: one for one in document["checks"]}


def assert_fails(done: Done, name: str, finding: str, remedy: str) -> None:
    """This is the only check that fails, and none after it was tried."""
    checks = checks_of(done)
    assert [one["name"] for one in checks.values() if one["state"] == "FAIL"] == [name]
    assert finding in checks[name]["finding"]
    assert checks[name]["remedy"] == remedy
    for later in NAMES[NAMES.index(name) + 1 : NAMES.index("gpu_driver")]:
        assert checks[later]["state"] == "SKIP"
        assert f"because {name} failed" in checks[later]["finding"]


# The command line


@pytest.mark.parametrize("command", shared_out([installed_command, ssdtrain], quick=[ssdtrain]))
def test_the_commands_are_listed(command: Callable[..., Done]) -> None:
    done = command()
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ssdtrain ")
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: ssdtrain {name} ")


@pytest.mark.parametrize(
    "words",
    [
        ["nope"],
        ["doctor", ""],
        ["doctor"],
        ["doctor", "/tmp", "--nope"],
        ["bench", "/tmp", "--seconds", "nan"],
        ["bench", "/tmp", "--seconds", "1e9"],
    ],
)
def test_wrong_words(words: list[str], tmp_path: Path) -> None:
    said = refusal(words, tmp_path)
    assert "error: " in said
    assert said.count("\n") == 1
    assert said.endswith(" --help tells the options)\n")


def test_the_version_is_told() -> None:
    done = ssdtrain("--version")
    assert (done.returncode, done.stdout) == (0, f"ssdtrain {version('ssdtrain')}\n")


# The doctor


@pytest.mark.long
def test_a_reader_that_leaves(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nowhere:
        done = subprocess.run(
            [sys.executable, "-m", "ssdtrain", "doctor", tmp_path],
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_good_directory(tmp_path: Path) -> None:
    done = ssdtrain("doctor", tmp_path, "--json")
    checks = checks_of(done)
    assert done.returncode == 0, done.stdout
    assert "every byte came back" in checks["write_and_read"]["finding"]
    rates = json.loads(done.stdout)["rates"]
    assert list(rates) == ["write_bytes_per_s", "read_bytes_per_s"]
    assert all(rate > 0 for rate in rates.values())
    assert not list(tmp_path.iterdir()), "something is left behind"
    assert not done.stderr


def test_the_report_for_a_person(tmp_path: Path) -> None:
    done = ssdtrain("doctor", ".", cwd=tmp_path)
    assert done.returncode == 0
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("ssdtrain 0.")
    for name in NAMES:
        assert any(line[6:].startswith(f"{name} ") for line in lines)
    assert last.startswith(f"Offload works in {tmp_path}.")


def test_a_missing_directory(tmp_path: Path) -> None:
    place = tmp_path / "not here"
    done = ssdtrain("doctor", place, "--json")
    assert_fails(done, "directory", "does not exist", f"mkdir -p '{place}'")
    assert not place.exists()
    person = ssdtrain("doctor", place)
    assert person.returncode == 1
    assert f"try: mkdir -p '{place}'\n" in person.stdout
    assert person.stdout.endswith(f"Offload does not work in {place}: mend directory.\n")


def test_memory_is_no_disk() -> None:
    place = Path("/dev/shm")
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", place], capture_output=True, check=False
    )
    if kind.stdout.strip() != b"tmpfs":
        pytest.skip(f"{place} is not a tmpfs in this machine")
    checks = checks_of(ssdtrain("doctor", place, "--json"))
    assert checks["file_system"]["state"] == "FAIL"
    assert "memory itself" in checks["file_system"]["finding"]
    assert checks["write_and_read"]["state"] == "SKIP"


@pytest.mark.long
@needs_root
def test_a_user_without_permission_to_write_and_with_it(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    done = forked_python(AS_NOBODY, str(place), str(NOBODY), "doctor", ".", "--json")
    remedy = f"sudo install -d -o {NOBODY} ./ssdtrain; ssdtrain doctor ./ssdtrain"
    assert_fails(done, "directory", f"user {NOBODY} cannot create", remedy)
    os.chown(place, NOBODY, NOBODY)
    place.chmod(0o755)
    done = forked_python(AS_NOBODY, str(place), str(NOBODY), "doctor", ".", "--json")
    assert checks_of(done)["write_and_read"]["state"] == "OK"


@pytest.mark.long
@needs_root
def test_a_read_only_mount(tmp_path: Path, mounted: Any) -> None:
    (tmp_path / "source").mkdir()
    place = mounted("--bind", str(tmp_path / "source"))
    remount = ["mount", "-o", "remount,ro,bind", str(place)]
    subprocess.run(remount, check=True, capture_output=True)
    done = ssdtrain("doctor", place, "--json")
    assert_fails(done, "directory", "mounted read-only", f"sudo mount -o remount,rw {place}")


@pytest.mark.long
@needs_root
def test_a_full_disk(small_disk: Path) -> None:
    fill(small_disk, leave=32 * MIB)
    checks = checks_of(ssdtrain("doctor", small_disk, "--json"))
    assert checks["file_system"]["state"] == "OK"
    assert checks["free_space"]["state"] == "FAIL"
    assert "64 MiB are the least" in checks["free_space"]["finding"]
    refused = ssdtrain("bench", small_disk)
    assert refused.returncode == 1
    assert "free some" in refused.stderr


@pytest.mark.long
def test_limits_of_the_process(tmp_path: Path) -> None:
    limits = "ulimit -n 64 && ulimit -v 40000000"
    checks = checks_of(installed_command("doctor", tmp_path, "--json", limits=limits))
    assert checks["open_files"]["state"] == checks["address_space"]["state"] == "WARN"
    assert checks["open_files"]["remedy"] == "ulimit -n 1024"
    assert checks["write_and_read"]["state"] == "OK"
    checks = checks_of(installed_command("doctor", tmp_path, "--json", limits="ulimit -f 1000"))
    assert checks["file_size"]["state"] == "FAIL"
    for name in ("file_size", "write_and_read"):
        assert checks[name]["remedy"] == "ulimit -f unlimited"


@pytest.mark.long
def test_huge_pages_that_were_switched_off(tmp_path: Path) -> None:
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    checks = checks_of(installed_command("doctor", tmp_path, "--json", env=environment))
    assert checks["torch_huge_pages"]["state"] == "WARN"
    assert checks["torch_huge_pages"]["remedy"] == "unset THP_MEM_ALLOC_ENABLE"


@pytest.mark.long
def test_rings_forbidden(tmp_path: Path) -> None:
    done = forked_python(FORBID_RINGS + MAIN, "doctor", str(tmp_path))
    if done.stdout == "no seccomp\n":
        pytest.skip("this kernel takes no seccomp filter")
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line[6:].startswith("io_uring ")]
    assert len(lines) == 1
    assert lines[0].startswith("WARN  io_uring ")
    assert "threads with pread and pwrite do its work" in lines[0]
    if Path("/proc/sys/kernel/io_uring_disabled").read_text().strip() == "0":
        assert "seccomp filter forbids it" in done.stdout
    assert "OK    write_and_read" in done.stdout


@pytest.mark.parametrize(
    "error", shared_out([NO_LIBRARY, "ImportError('no torch')"], quick=[NO_LIBRARY])
)
def test_a_broken_torch(tmp_path: Path, error: str) -> None:
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(f"raise {error}\n")
    environment = {**os.environ, "PYTHONPATH": str(fake.parent)}
    checks = checks_of(installed_command("doctor", tmp_path, "--json", env=environment))
    assert checks["torch"]["state"] == "FAIL"
    assert checks["torch"]["remedy"] == "pip install --upgrade 'torch>=2.11'"
    assert checks["torch_huge_pages"]["state"] == "SKIP"
    assert checks["write_and_read"]["state"] == "OK"
    use = "import ssdtrain; assert not hasattr(ssdtrain, 'nothing'); ssdtrain.offload('x')"
    for program in (use, "from ssdtrain import offload", "from ssdtrain import *"):
        done = python(program, env=environment)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: ssdtrain.")
        assert "`ssdtrain doctor DIR` says what next" in last


@pytest.mark.long
def test_several_directories_are_looked_at(tmp_path: Path) -> None:
    other, missing = tmp_path / "other", tmp_path / "missing"
    other.mkdir()
    done = ssdtrain("doctor", tmp_path, other, "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["format", "directories"]
    assert [one["directory"] for one in document["directories"]] == [str(tmp_path), str(other)]
    assert [one["usable"] for one in document["directories"]] == [True, True]
    assert done.returncode == 0
    done = ssdtrain("doctor", missing, other)
    assert f"Offload does not work in {missing}: mend directory." in done.stdout
    assert f"Offload works in {other}" in done.stdout
    assert done.returncode == 1


# The bench


@pytest.mark.long
def test_the_measured_setting_is_kept_and_used(tmp_path: Path, cache: Path) -> None:
    done = ssdtrain("bench", tmp_path, "--json", "--sweep", "--seconds", "2")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["directories"]
    assert result["directory"] == str(tmp_path)
    settings = [(one["engine"], one["queue_depth"], one["piece_bytes"]) for one in result["sweep"]]
    assert len(set(settings)) == len(settings) >= 4
    assert tuple(result["choice"].values()) in settings
    assert 0 <= result["behind_best"] < 1
    assert result["bytes_written"] > 0
    assert result["sweep_bytes_written"] > 0
    assert not list(tmp_path.iterdir()), "something is left behind"
    if result["kept_in"] is None:
        assert "give more --seconds" in result["problem"]
        return
    assert list(cache.iterdir()) == [Path(result["kept_in"])]
    told = checks_of(ssdtrain("doctor", tmp_path, "--json"))["tuning"]["finding"]
    assert told.startswith(result["choice"]["engine"])
    forgotten = ssdtrain("bench", "--forget", tmp_path)
    assert forgotten.stdout == f"{tmp_path}: deleted {result['kept_in']}\n"
    assert ssdtrain("bench", "--forget", tmp_path).stdout == f"{tmp_path}: nothing was kept\n"
    assert not list(cache.iterdir())


@pytest.mark.long
def test_one_drive_is_measured_once(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    done = ssdtrain("bench", tmp_path, other, "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"{other} is on the drive of {tmp_path}: measured once\n"
    assert done.stdout.count("choice     ") == 1
    assert "which wears the drive" in done.stdout


@pytest.mark.long
def test_ctrl_c_keeps_nothing(tmp_path: Path, cache: Path) -> None:
    command = [sys.executable, "-c", MAIN, "bench", str(tmp_path), "--seconds", "600"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:

        def measures() -> bool:
            assert process.poll() is None
            return any(name.startswith("ssdtrain-") for name in thread_names(process.pid))

        wait_until(measures, "the start of an I/O thread")
        process.send_signal(signal.SIGINT)
        out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not out
    assert told == "ssdtrain bench: interrupted; nothing of this directory was kept\n"
    assert not list(tmp_path.iterdir())
    assert not cache.exists()


def test_places_that_cannot_be_measured(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, words in (
        (tmp_path / "missing", "does not exist; create it"),
        (tmp_path / "file", "is a file, not a directory"),
    ):
        done = ssdtrain("bench", place)
        assert done.returncode == 1
        assert done.stderr.startswith("ssdtrain bench: ")
        assert words in done.stderr
    assert not cache.exists()


@pytest.mark.long
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = installed_command("bench", tmp_path, "--seconds", "2", env=environment)
    assert done.returncode == 0, done.stderr
    assert "not kept   " in done.stdout


@pytest.mark.long
def test_a_bench_without_rings(tmp_path: Path) -> None:
    done = forked_python(FORBID_RINGS + MAIN, "bench", str(tmp_path), "--seconds", "1")
    if done.stdout == "no seccomp\n":
        pytest.skip("this kernel takes no seccomp filter")
    assert done.returncode == 0, done.stderr
    assert "left out   io_uring: " in done.stdout
    assert "choice     psync, " in done.stdout


@pytest.mark.long
def test_errors_have_no_place_in_the_output(tmp_path: Path) -> None:
    """Whoever closed the stream of errors reads that of output still."""
    words = ("plan", "--model", "no such model", "--gpu", "no such GPU")
    done = installed_command(*words, limits="exec 2>&-")
    assert (done.stdout, done.returncode) == ("", 2)
    done = installed_command("doctor", str(tmp_path), limits="exec >&-")
    assert (done.stderr, done.returncode) == ("", 0)
