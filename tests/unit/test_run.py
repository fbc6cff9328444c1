"""`ssdtrain run`: a program behaves as without it, and what it trains is offloaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from children import forked_python
from ssdtrain.__main__ import main
from support import shared_out

MAIN = "import sys\nfrom ssdtrain.__main__ import main\nsys.exit(main(sys.argv[1:]))"
TRAIN = """
import sys
import torch
torch.set_num_threads(1)  # a process that is forked must not wait for threads that it has not

def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    for _ in range(2):
        loss = model(torch.randn(256, 256)).sin().sum()
        if "ssdtrain" in sys.modules and sys.modules["ssdtrain"].active() is not None:
            # A disk that is slow at this moment would keep all in memory.
            sys.modules["ssdtrain"].active().flush()
        loss.backward()
    return model[0].weight.grad.sum().item().hex()
"""
SMALL = ("--min-bytes", "1KiB")

Done = subprocess.CompletedProcess[str]


def run(folder: Path, *words: str, program: str | None = None) -> Done:
    """Run ``script.py`` in a child that has done its imports, within the folder."""
    if program is not None:
        (folder / "script.py").write_text(program)
    return forked_python(MAIN, "run", "--dir", ".", *words, cwd=folder)


def plain(folder: Path, *words: str, program: str) -> Done:
    """Run ``script.py`` as Python does."""
    (folder / "script.py").write_text(program)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def without_report(text: str) -> str:
    return text.partition("ssdtrain run: ")[0]


def report(folder: Path, name: str = "report.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def saved_count(figures: dict[str, Any]) -> int:
    """Return how many saved tensors a session saw, however they ended."""
    return sum(figures[f"tensors_{fate}"] for fate in ("offloaded", "forwarded", "kept"))


LOOK = """
from __future__ import annotations
import os, pickle, sys
class Own: pass
print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__, __builtins__.len)
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
print(type(pickle.loads(pickle.dumps(Own()))) is Own, sys.stdin.read(), sys.stdout.errors)
"""


def test_a_script_sees_what_it_sees_without(tmp_path: Path) -> None:
    arguments = ["script.py", "--dir", "x", "--max", "3", "-m", "-h", "--version", "--", "-x"]
    (tmp_path / "script.py").write_text(LOOK)
    outputs = []
    for words in ([], ["-m", "ssdtrain", "run", "--dir", str(tmp_path)]):
        command = [sys.executable, "-P", *words, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, input="typed", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[1] == outputs[0]
    assert "typed" in outputs[0]


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN)
    words = ["run", "--report", "report.json", "script.py"]
    done = forked_python(MAIN, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "none, so nothing is written" in done.stderr
    found = report(tmp_path)
    assert found["dirs"] is None
    assert found["bytes_written"] == 0


@pytest.mark.long
def test_a_module_sees_what_it_sees_without(tmp_path: Path) -> None:
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint('package', sys.argv, __name__)\n")
    (package / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__.name)\n"
    )
    (package / "part.py").write_text("import sys\nprint(sys.argv, __spec__.name, __package__)\n")
    for module in ("tool", "tool.part"):
        words = ["-m", module, "--dir", "-h", "--", "x"]
        expected = plain(tmp_path, *words, program="")
        assert expected.returncode == 0, expected.stderr
        assert run(tmp_path, *words).stdout == expected.stdout


ENDINGS = {
    "end": "print('end')",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('some text')",
    "error": "def f():\n    1 / 0\ntry:\n    [][1]\nexcept IndexError:\n    f()",
    "syntax": "a = 1\nb = = 2\n",
    "ctrl-c": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "sigterm": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "own hook": "import sys\nsys.excepthook = lambda *a: print(a[2].tb_lineno)\n1 / 0",
    "at exit": "import atexit; atexit.register(print, 'at exit')",
    "error in a thread": (
        "import threading\ndef f(): 1 / 0\nclass Own(threading.Thread):\n"
        "    def run(self):\n        try: [][1]\n        finally: f()\n"
        "for one in (threading.Thread(target=f), Own()):\n    one.start()\n    one.join()\n"
    ),
    "hook of threads": (
        "import threading\nthreading.excepthook = lambda it: print(it.exc_type)\n"
        "one = threading.Thread(target=lambda: 1 / 0); one.start(); one.join()\n"
    ),
    "thread": "import threading; threading.Timer(0.2, print, ['late']).start(); 1 / 0",
    # From Python 3.12 on a fork warns of threads, and those of the store are some.
    "forked": (
        "import os, sys, warnings\nwarnings.simplefilter('ignore')\n"
        "if os.fork() == 0: sys.exit(0)\nos.wait(); print('parent')"
    ),
}


QUICK = ("exit 3", "error", "ctrl-c", "error in a thread")


@pytest.mark.parametrize("name", shared_out(ENDINGS, quick=QUICK))
def test_a_program_ends_as_without(name: str, tmp_path: Path) -> None:
    expected = plain(tmp_path, "script.py", program=ENDINGS[name])
    done = run(tmp_path, "--report", "report.json", "script.py")
    assert done.returncode == expected.returncode
    assert done.stdout == expected.stdout
    assert without_report(done.stderr) == expected.stderr
    # Who is ended by a signal says nothing any more.
    count = 0 if name == "sigterm" else 1
    assert done.stderr.count("ssdtrain run: ") == count
    assert len(list(tmp_path.glob("*.json"))) == count


@pytest.mark.long
def test_a_report_has_no_place_in_the_output_of_the_program(tmp_path: Path) -> None:
    """Whoever closed the stream of errors reads that of output still."""
    (tmp_path / "script.py").write_text("print('mine')")
    command = 'exec "$0" -m ssdtrain run --dir . --report report.json script.py 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("mine\n", "", 0)
    assert report(tmp_path)["program"] == "script.py"


def test_a_script_is_offloaded_and_its_bits_are_equal(tmp_path: Path) -> None:
    program = f"{TRAIN}\nprint(train())"
    (tmp_path / "script.py").write_text(program)
    expected = forked_python(program, cwd=tmp_path)
    done = run(tmp_path, *SMALL, "--report", "report.json", "script.py")
    assert done.stdout == expected.stdout
    figures = report(tmp_path)
    assert figures["program"] == "script.py"
    assert figures["dirs"] == [str(tmp_path)]
    assert figures["rank"] is None
    assert saved_count(figures) >= 8
    assert figures["tensors_offloaded"] > 0
    assert 0 < figures["process_bytes"] <= figures["process_bytes_peak"]
    assert all(not isinstance(value, dict) for value in figures.values()), "not flat"
    assert "  process    " in done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["report.json", "script.py"]


def test_threads_are_in_the_block(tmp_path: Path) -> None:
    program = (
        f"{TRAIN}\nimport threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "class Own(threading.Thread):\n    def run(self): print(train())\n"
        "for one in (threading.Thread(target=train), Own()):\n    one.start()\n    one.join()\n"
        "    assert 'run' not in vars(one)\n"
        "with ThreadPoolExecutor(1) as pool: print(pool.submit(train).result())\n"
    )
    done = run(tmp_path, *SMALL, "--report", "report.json", "script.py", program=program)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1
    assert saved_count(report(tmp_path)) >= 3 * 8


@pytest.mark.long
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_child_processes_have_a_block_and_a_report_of_their_own(way: str, tmp_path: Path) -> None:
    program = (
        f"{TRAIN}\nimport multiprocessing, os, sys, threading\n"
        "def child():\n"
        "    thread = threading.Thread(target=train)\n    thread.start()\n    thread.join()\n"
        "    print(os.getpid(), train(), flush=True)\n"
        # Longer than commands and idle workers take, which are no training.
        "    while os.times().user < 2: pass\n"
        "def idle(): pass\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({way!r})\n"
        "    os.chdir('/')\n"
        "    processes = [context.Process(target=one) for one in (child, idle)]\n"
        "    for one in processes: one.start()\n    for one in processes: one.join()\n"
        "    sys.exit(sum(one.exitcode for one in processes))\n"
    )
    done = run(tmp_path, *SMALL, "--report", "report.json", "script.py", program=program)
    assert done.returncode == 0, done.stderr
    process, _ = done.stdout.split()
    names = sorted(one.name for one in tmp_path.glob("*.json"))
    assert names == ["report.json", f"report.process{process}.json"]
    figures = report(tmp_path, names[1])
    assert saved_count(figures) >= 2 * 8
    assert saved_count(report(tmp_path)) == 0
    assert f"script.py, process {process}" in done.stderr
    assert done.stderr.count("ssdtrain run: ") == 2
    assert "(multiprocessing, os.fork) have blocks and reports of their own" in done.stderr
    assert "hooks do not reach other processes" not in done.stderr
    assert report(tmp_path)["is_surprising"] == 0


def test_a_forked_child_that_trains_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    program = (
        f"{TRAIN}\nimport os, sys\nchild = os.fork()\n"
        "if child == 0:\n    train()\n    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = run(tmp_path, *SMALL, "script.py", program=program)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_each_rank_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    done = run(tmp_path, "--report", "report.json", "script.py", program="pass")
    assert "ssdtrain run: script.py, rank 3\n" in done.stderr
    assert report(tmp_path, "report.rank3.json")["rank"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dir", ".", "missing.py"], "cannot open the script 'missing.py': No such file"),
        (["--dir", ".", "."], "is a directory without a __main__.py"),
        (["--dir", ".", "-m", "no.such.module"], "no module is named 'no.such.module'"),
        (
            ["--dir", ".", "-m", "json.tool.py"],
            "no module is named 'json.tool.py'; to run the file",
        ),
        (["--dir", ".", "-m", "email"], "it has no module email.__main__"),
        (["--dir", ".", "-m"], "-m needs the name of a module"),
        (["--dir", "."], "name the script to run"),
        ([], "name the script to run"),
        (
            ["--lr", "3", "--dir", ".", "script.py"],
            "arguments: --lr; options of your script come after its name",
        ),
        (
            ["--dir", ".", "--num_epochs", "3", "script.py"],
            r"arguments: --num_epochs; options of your script come after its name: .* --num_epochs",
        ),
        (["--dir", ".", "--min_bytes", "3", "script.py"], "it is written --min-bytes here"),
        (
            ["--dir", ".", "--max-residnt-bytes", "1GiB", "script.py"],
            "it is written --max-resident-bytes here",
        ),
        (
            ["--dir", ".", "--max-disk", "1GiB", "script.py"],
            "it is written --max-disk-bytes here",
        ),
        (
            ["--dir", ".", "--max", "1GiB", "script.py"],
            "options of your script come after its name",
        ),
        (["--dir", "none", "script.py"], "does not exist"),
        (["--dir", ".", "--min-bytes", "8G", "script.py"], "or text such as '8GiB'"),
        (["--dir", ".", "--report", ".", "script.py"], "is a directory; name a file in it"),
        (["--dir", ".", "--report", "none/x.json", "script.py"], "cannot be written to|not a dir"),
    ],
)
def test_a_program_that_cannot_be_run(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    # To look for a module changes both.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code: object = main(["run", *words])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    printed = capsys.readouterr()
    assert re.search(said.replace("(", r"\("), printed.err), printed.err
    assert not printed.out


def test_help_names_what_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = capsys.readouterr().out
    assert "  -m MODULE [ARGS ...]" in told
    assert "\n  SCRIPT " in told


def test_a_launcher_is_told_the_other_way_round(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "torch.distributed.run", "--help")
    assert "put it the other way round: torchrun OPTIONS --no-python ssdtrain run" in done.stderr


@pytest.mark.long
def test_the_installed_command_runs_a_script_with_huge_pages_whatever_it_imports_first(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\ntorch.zeros(3)\nimport ssdtrain\n"
        "print(torch.empty(8 << 20, dtype=torch.uint8).data_ptr() % 4096, ssdtrain.__version__)\n"
    )
    environment = {name: value for name, value in os.environ.items() if "THP_MEM" not in name}
    command = [str(Path(sys.executable).with_name("ssdtrain")), "run", "--dir", ".", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 ")
    assert "pages" not in done.stderr


@pytest.mark.long
def test_ctrl_c_from_outside_ends_it_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import signal\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    command = [sys.executable, "-m", "ssdtrain", "run", "--dir", ".", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    assert "commands/" not in said
    assert "ssdtrain run: script.py\n" in said
