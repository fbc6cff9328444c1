"""Finds the program of `ssdtrain run`, and runs it as ``__main__``, as Python would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["Program", "ProgramError", "find_module", "find_script", "run_program"]

STANDARD_INPUT = "-"
FORMER_MAIN: list[ModuleType] = []
"""The module that was ``__main__`` before: its code goes on after the program."""


class ProgramError(Exception):
    """There is no such program; the message names it and the place."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script or a module that can be run."""

    name: str
    """As on the command line."""
    argv: list[str]
    first_path: str
    """Python would put this in front of ``sys.path``."""
    names: dict[str, Any]
    """Python would set these names in ``__main__``."""
    code: Callable[[], CodeType]
    """Compiles the program: an error in its text is raised where the program runs."""


def find_script(path: str, arguments: list[str]) -> Program:
    """Find a file, a directory or an archive with a ``__main__.py``, or ``-`` for stdin."""
    if path == STANDARD_INPUT:
        return Program(
            name="<stdin>",
            argv=[path, *arguments],
            first_path="",
            names={"__loader__": None, "__spec__": None, "__package__": None},
            code=lambda: _compile(sys.stdin.buffer.read(), "<stdin>"),
        )
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is not None:
        return _of_module(spec, name=path, argv0=path, arguments=arguments, first_path=path)
    if os.path.isdir(path):
        raise ProgramError(f"{path} is a directory without a __main__.py; name the script in it")
    # Python gives a script its absolute path as `__file__`, and follows links only for `sys.path`.
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as opened:
            text = opened.read()
    except OSError as error:
        remedy = ""
        if os.path.basename(path).startswith("python"):
            remedy = "; name the script alone, without the interpreter before it"
        raise ProgramError(f"cannot open the script {path!r}: {error.strerror}{remedy}") from error
    names = {
        "__file__": file,
        "__loader__": importlib.machinery.SourceFileLoader("__main__", file),
        "__cached__": None,
        "__spec__": None,
        "__package__": None,
    }
    return Program(
        name=path,
        argv=[path, *arguments],
        first_path=os.path.dirname(os.path.realpath(path)),
        names=names,
        code=lambda: _compile(text, file),
    )


def find_module(name: str, arguments: list[str]) -> Program:
    """Find a module, or the ``__main__`` of a package, as ``python -m`` does."""
    place = os.getcwd()
    _put_first(place)
    # Python sets this while it looks for the module: some packages read it.
    sys.argv = ["-m", *arguments]
    spec = _spec_of(name)
    if spec.submodule_search_locations is not None:
        try:
            spec = _spec_of(f"{name}.__main__")
        except ProgramError as error:
            raise ProgramError(
                f"{name} is a package that cannot be run: it has no module {name}.__main__"
            ) from error
    argv0 = spec.origin or name
    return _of_module(spec, name=name, argv0=argv0, arguments=arguments, first_path=place)


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package that exists may import one that does not: that error is the program's.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:
        spec = None  # A module that is loaded and has no spec was not found on any path.
    if spec is None:
        hint = f"; to run the file, leave -m out: {name}" if name.endswith(".py") else ""
        raise ProgramError(f"no module is named {name!r}{hint}")
    return spec


def _of_module(
    spec: ModuleSpec, *, name: str, argv0: str, arguments: list[str], first_path: str
) -> Program:
    loader = spec.loader
    if not hasattr(loader, "get_code"):
        raise ProgramError(f"{name} has no code in Python that could be run")
    names = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__cached__": spec.cached,
        "__spec__": spec,
        "__package__": spec.parent,
    }
    return Program(
        name=name,
        argv=[argv0, *arguments],
        first_path=first_path,
        names=names,
        code=lambda: _code_of(loader, spec.name),
    )


def _code_of(loader: Any, name: str) -> CodeType:
    code: CodeType = loader.get_code(name)
    return code


def _compile(text: bytes, file: str) -> CodeType:
    # This module's own `from __future__` is not the program's.
    return compile(text, file, "exec", dont_inherit=True)


def run_program(program: Program) -> None:
    """Run a program as ``__main__``; its errors pass, with the program's frames alone."""
    main = ModuleType("__main__")
    main.__dict__.update(program.names, __builtins__=builtins)
    if sys.version_info < (3, 14):
        # Later versions make it when it is read.
        main.__annotations__ = {}
    FORMER_MAIN.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv = program.argv
    _put_first(program.first_path)
    try:
        exec(program.code(), main.__dict__)  # noqa: S102 - the user asked to run it
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_our_frames(error.__traceback__)
        raise


def _put_first(place: str) -> None:
    """Put ``place`` at the entry of ``sys.path`` that has the folder of this command."""
    # With `python -P`, Python puts nothing there, so neither for the program.
    if not sys.flags.safe_path:
        sys.path[0] = place


def _show_without_our_frames(trace: TracebackType | None) -> None:
    """Have the traceback that Python prints begin with the program's first frame."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    former = sys.excepthook  # Perhaps the program's own.

    def show(kind: type[BaseException], error: BaseException, _whole: TracebackType | None) -> None:
        former(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
