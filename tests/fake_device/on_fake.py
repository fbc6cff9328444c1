"""Tests that run on a fake device: each in a child process, which had the driver preloaded."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import children
import fake_build

SERVER = """
import children, fake_device, on_fake
fake_device.load_kernels()
del fake_device, on_fake
children.begin()
"""
CHILD = "import on_fake; on_fake.run_on_fake()"

SKIPPED = 77
"""The exit code of a child that lacks what its test needs; the last line it prints says what."""


class SkippedError(Exception):
    """This machine lacks what a test needs; says what."""


@dataclass(frozen=True)
class Kind:
    """A kind of device: how the processes of its tests begin."""

    server: str
    """The program of the process that they are forked from."""
    child: str
    """Their program, which takes a function, options and arguments as JSON."""
    environment: Callable[[dict[str, Any]], dict[str, str]]
    """Tells from the options what the environment must hold before such a process starts."""


def environment_of(options: dict[str, Any]) -> dict[str, str]:
    """Return the environment of fake devices with these options."""
    others = {"fake": [fake_build.CUFILE], "real": [fake_build.MACHINE]}
    names = others.get(options.get("cufile", ""), [])
    return fake_build.environment(*(fake_build.build() / name for name in names))


FAKE = Kind(SERVER, CHILD, environment_of)


def on_fake_device(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process with fake devices; it is given their handle as its first argument.

    The `options` are those of `fake_device.start`, and ``cufile``: ``"fake"`` has a cuFile of ours
    in the place of NVIDIA's, ``"real"`` what NVIDIA's looks for on a machine. Races that the test
    does not ask for fail it, and so does whatever it called that the fake does not do. Other
    arguments have to fit into JSON.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_child(**arguments: Any) -> None:
            judge(child(test, options, **arguments))

        signature = inspect.signature(test)
        in_child.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        return in_child

    return decorate


def judge(done: subprocess.CompletedProcess[str]) -> None:
    """Let the test end as its child did."""
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.splitlines()[-1])
    if done.returncode:
        words = f"the child ended with {done.returncode}\n{done.stdout}{done.stderr}"
        pytest.fail(words, pytrace=False)


def child(
    function: Callable[..., None],
    options: dict[str, Any] | None = None,
    kind: Kind = FAKE,
    **arguments: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a module's function in a process with devices of a kind, however that ends."""
    try:
        environment = tuple(kind.environment(options or {}).items())
    except fake_build.UnavailableError as reason:
        pytest.skip(f"no fake device: {reason}")
    return children.forked_python(
        kind.child,
        json.dumps([inspect.getfile(function), function.__name__, options or {}, arguments]),
        channel=children.server(kind.server, environment),
    )


def run_on_fake() -> None:
    """In the child: run one function on fake devices."""
    import fake_device  # noqa: PLC0415 - imports torch, which some processes of tests must not

    run(fake_device.start)


def run(start: Callable[..., Any]) -> None:
    """In the child: start devices, and run one function, which is given their handle.

    To take the interpreter apart would need longer than all else here, so the process just ends
    after its exit functions; one that leaves by `sys.exit` ends as any other does.
    """
    file, name, options, arguments = json.loads(sys.argv[1])
    sys.path.insert(0, str(Path(file).parent))
    function = inspect.unwrap(getattr(importlib.import_module(Path(file).stem), name))
    cufile = options.pop("cufile", None)
    if cufile:
        # Whether cuFile works is asked in a child process, which has to begin as this one did.
        devices = str(options.get("devices", 1))
        os.environ |= environment_of({"cufile": cufile}) | {"SSDTRAIN_FAKE_DEVICES": devices}
    device = start(**options)
    code = 0
    try:
        function(device, **arguments)
        assert not device.races()
        # NVIDIA's cuFile asks the driver for much that it can do without.
        assert cufile == "real" or not device.refused()
    except SkippedError as reason:
        sys.stdout.write(f"{reason}\n")
        code = SKIPPED
    except Exception:  # noqa: BLE001 - its traceback is what the test that waits for this shows
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
