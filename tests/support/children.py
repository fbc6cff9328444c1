"""Child processes that begin where ``import torch, ssdtrain`` has been done already.

A fresh interpreter needs two seconds for these imports, and a hundred tests want a process of their
own. One server for each test process imports them once and forks a child for each program; a child
ends as any interpreter does, with its threads joined and its exit functions run. What depends on
how a process starts (variables that libraries read at import, memory that is counted from the
start) takes ``support.python``, which starts afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUEST_BYTES_MAX = 100_000
"""Below what a socket takes as one message; the longest program of the tests has 5,000."""
TIMEOUT_S = 120
SERVER = "import children; children.begin()"


# --- in the tests -------------------------------------------------------------


def forked_python(
    program: str,
    *arguments: str,
    cwd: Path | None = None,
    channel: socket.socket | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a child that has imported torch and ssdtrain, and nothing else yet.

    Another server than the usual one, given by its `channel`, may have done more.
    """
    words = ["-c", *arguments]
    request = json.dumps(
        {
            "program": program,
            "arguments": words,
            "environment": dict(os.environ),
            "directory": str(cwd or Path.cwd()),
        }
    )
    channel = channel or server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        socket.send_fds(channel, [request.encode()], [out.fileno(), err.fileno()])
        child = int(channel.recv(32))
        try:
            status = int(channel.recv(32))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            channel.recv(32)
            raise subprocess.TimeoutExpired(words, TIMEOUT_S, read(out), read(err)) from None
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess(words, code, read(out), read(err))


def read(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    return file.read()


@functools.cache
def server(program: str = SERVER, environment: tuple[tuple[str, str], ...] = ()) -> socket.socket:
    """Start a server of this process, each kind once; it ends when its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **dict(environment)},
            pass_fds=[theirs.fileno()],
        )
    ours.settimeout(TIMEOUT_S)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- in the server and its children -------------------------------------------


def begin() -> None:
    """Serve until the tests end; in a child, run its program as ``__main__``."""
    import ssdtrain  # noqa: F401, PLC0415 - this is what children need not do

    # What was imported stays until the end: no collection of a child looks at it.
    gc.freeze()
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        main = sys.modules["__main__"].__dict__
        del main["children"]
        exec(compile(program, "<string>", "exec"), main)


def serve(channel: socket.socket) -> str | None:
    """Fork a child for each request; return its program to it, and ``None`` to the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 2)
        if not message:
            return None
        request = json.loads(message)
        child = os.fork()
        if not child:
            channel.close()
            return become(request, files)
        for file in files:
            os.close(file)
        channel.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        channel.send(str(status).encode())


def become(request: dict[str, Any], files: list[int]) -> str:
    """Take over what a fresh process would have been given."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = list(request["arguments"])
    program: str = request["program"]
    return program
