"""Asks `peers.py` in another interpreter, one process each, so that a crash costs few rows."""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from compare_cases import Case, Sample

PROGRAM = Path(__file__).with_name("peers.py")
OPEN_LIMIT_S = 900
"""The first use of DeepSpeed compiles its operators, for minutes on few cores."""
STEP_LIMIT_S = 60
LAST_WORDS_MAX = 300

LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepspeed": (
        "DeepSpeed aio_handle",
        ("plain, default", "plain, tuned", "pinned, default", "pinned, tuned"),
    ),
    "tensornvme": ("TensorNVMe DiskOffloader", ("uring", "aio")),
    "torch.save": ("torch.save, torch.load", ("page cache",)),
}
"""Name in tables, and the engines that are measured."""


class PeerError(Exception):
    """A library is missing, refused, hung or died; the message is the reason in the table."""


class PeerProcess:
    """One library in a process of its own."""

    def __init__(self, python: str, library: str, folder: Path) -> None:
        self._folder = folder / library
        # Open as long as the process.
        self._words = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
            )
        except OSError as error:
            self._words.close()
            raise PeerError(
                f"{python} does not run ({error.strerror}); name another with --peers-python"
            ) from error
        self._folder.mkdir()
        try:
            self.version = self.ask(
                OPEN_LIMIT_S, do="open", library=library, folder=str(self._folder)
            )["version"]
        except PeerError:
            self.close()
            raise

    def ask(self, limit_s: float = STEP_LIMIT_S, **question: Any) -> dict[str, Any]:
        """Ask one question and wait for its answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._death()) from error
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                process.kill()
                raise PeerError(f"no answer to `{question['do']}` in {limit_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise PeerError(self._death())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"].splitlines()[0][:LAST_WORDS_MAX])
        return answer

    def sample(self, case: Case) -> Sample:
        """Run one timed pass."""
        return Sample(**self.ask(do=case.direction))

    def close(self) -> None:
        """End the process and remove what it wrote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It may be gone already.
            self._process.stdin.close()
        try:
            self._process.wait(STEP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._words.close()
        shutil.rmtree(self._folder)

    def _death(self) -> str:
        status = self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        return f"{how}: {words[-1][:LAST_WORDS_MAX] if words else 'no word'}"
