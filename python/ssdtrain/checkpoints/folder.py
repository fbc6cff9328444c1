"""A folder whose content changes at once: the old checkpoint is there until the new one is whole.

The files of a checkpoint have no names while they are written (O_TMPFILE), so a save that is killed
leaves nothing. When all are on the disk they get names, and then the manifest that names them
replaces the older manifest in a single rename. Files of the older checkpoint go last. If a save is
killed between two of these steps, the next save or load removes the files that it left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ssdtrain.errors import BusyError, ConfigError, CorruptError, NoSpaceError, StorageError

__all__ = [
    "MANIFEST",
    "NewFiles",
    "folder_of",
    "kernel_errors",
    "opened",
    "refuse_strange",
    "remove_strays",
]

MANIFEST = "manifest.json"
OURS = re.compile(
    r"((weights|state)-[0-9a-f]{16}-\d{5}\.safetensors|manifest-[0-9a-f]{16})(\.part)?"
)
NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""Errors of file systems that have no files without names."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def folder_of(path: str | os.PathLike[str], function: str) -> Path:
    """Return the folder of a checkpoint; raise ``ConfigError`` if ``path`` is no path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"the folder of a checkpoint is a path, not {type(path)!r}: "
            f'ssdtrain.{function}("/mnt/nvme/checkpoint", model, optimizer)'
        )
    return Path(os.path.abspath(path))


@contextmanager
def kernel_errors(doing: str, path: Path) -> Iterator[None]:
    """Raise an error of the kernel as a ``StorageError`` that names the action and a remedy."""
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in FULL else StorageError
        remedy = "make room there" if kind is NoSpaceError else "see what is wrong there"
        if error.errno == errno.EFBIG:
            remedy = "raise `ulimit -f`"
        raised = kind(f"{doing} {path} failed: {error}; {remedy} and try again")
        raised.errno = error.errno
        raise raised from error


class NewFiles:
    """The files of a checkpoint that is being written; without `commit` they are removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = secrets.token_hex(8)
        self._files: list[tuple[int, str, bool]] = []
        """Descriptor, final name, and whether the file has the name with `.part` until then."""
        self._lock: int | None = None
        self._is_made = False
        """True if the folder was made by this save."""
        with kernel_errors("saving into", path):
            _refuse_other_folder(path)
            if path.exists():
                self._take_lock()

    def create(self, kind: str, number: int) -> tuple[int, str]:
        """Return the descriptor of a new file, and its final name."""
        name = f"{kind}-{self._mark}-{number:05d}.safetensors"
        return self._open(name), name

    def commit(self, manifest: bytes) -> None:
        """Make the new files the checkpoint, and remove the older checkpoint."""
        path = self._path
        last = f"manifest-{self._mark}"
        file = self._open(last)
        rest = memoryview(manifest)
        while rest:
            rest = rest[os.write(file, rest) :]
        for file, _, _ in self._files:
            os.fsync(file)
        self._make_folder()
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for file, name, has_name in self._files:
                if has_name:
                    os.rename(path / f"{name}.part", path / name)
                else:
                    os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
            os.fsync(folder)
            os.replace(path / last, path / MANIFEST)
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._is_made:
            _sync(path.parent)
        _remove(path, {name for _, name, _ in self._files})

    def _open(self, name: str) -> int:
        base = self._path if self._path.exists() else self._path.parent
        mode = os.O_RDWR | os.O_CLOEXEC
        try:
            file, has_name = os.open(base, mode | os.O_TMPFILE, 0o666), False
        except OSError as error:
            if error.errno not in NO_TMPFILE:
                raise
            self._make_folder()
            part = self._path / f"{name}.part"
            file, has_name = os.open(part, mode | os.O_CREAT | os.O_EXCL, 0o666), True
        self._files.append((file, name, has_name))
        # The owner can load and replace a checkpoint under any umask.
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        return file

    def _make_folder(self) -> None:
        if self._lock is None:
            # Another save may have made the folder since this save began.
            with suppress(FileExistsError):
                self._path.mkdir()
                self._is_made = True
                self._path.chmod(stat.S_IMODE(self._path.stat().st_mode) | stat.S_IRWXU)
            self._take_lock()

    def _take_lock(self) -> None:
        self._lock = _locked(self._path)
        if self._lock is None:
            # The folder belongs to the other save now.
            self._is_made = False
            raise BusyError(
                f"another process saves into {self._path} just now; give each a folder of its own"
            )

    def _is_committed(self) -> bool:
        manifest = self._path / MANIFEST
        return manifest.is_file() and self._mark.encode() in manifest.read_bytes()

    def __enter__(self) -> Self:
        """Return the files themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; remove those with names, unless they have become the checkpoint."""
        for file, _, _ in self._files:
            os.close(file)
        # An interrupt may have come right after the rename, so the manifest is read.
        if error is not None and not self._is_committed():
            for _, name, _ in self._files:
                for left in (name, f"{name}.part"):
                    (self._path / left).unlink(missing_ok=True)
            if self._is_made:
                self._path.rmdir()
        if self._lock is not None:
            os.close(self._lock)


def opened(path: Path) -> int:
    """Return a descriptor to read a file; refuse a pipe or a folder in its place."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptError(f"{path} is no file but something else; load another checkpoint")
    return file


def refuse_strange(names: Iterable[str], manifest: Path) -> None:
    """Raise ``CorruptError`` for a name that no save gives to a file, such as ``../other``."""
    for name in names:
        if not OURS.fullmatch(name):
            raise CorruptError(
                f"{manifest} names {name!r}, which is no file of a checkpoint; nothing outside of "
                "its folder is read. Load another checkpoint"
            )


def remove_strays(path: Path, named: set[str]) -> None:
    """Remove files that a killed save has left, unless another process saves there now."""
    if not os.access(path, os.W_OK):
        return
    lock = _locked(path)
    if lock is None:
        return
    try:
        # Read under the lock: a newer checkpoint may be there than the one that was loaded.
        text = (path / MANIFEST).read_bytes()
        if all(name.encode() in text for name in named):
            _remove(path, named)
    finally:
        os.close(lock)


def _remove(path: Path, named: set[str]) -> None:
    for name in os.listdir(path):
        if OURS.fullmatch(name) and name not in named:
            (path / name).unlink(missing_ok=True)


def _refuse_other_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is no folder; a checkpoint is a folder with several files")
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path} is a link to {os.readlink(path)}, which is not there; make it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist; make it first")
    if (path / MANIFEST).is_dir():
        raise ConfigError(f"{path / MANIFEST} is a folder; remove it, or save elsewhere")
    others = [
        name
        for name in (os.listdir(path) if path.exists() else ())
        if name != MANIFEST and not OURS.fullmatch(name)
    ]
    if others:
        raise ConfigError(
            f"{path} has other files than those of a checkpoint, such as {others[0]!r}; give the "
            "checkpoint a folder of its own"
        )


def _locked(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder; `None` if another process has it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        return None
    except OSError as error:
        # Network file systems may have no such lock; there the user has to keep order.
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(folder)
            raise
    return folder


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
