"""Write a file whole or not at all, and check beforehand whether it can be written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator
from typing import BinaryIO

from hookscope.errors import WriteError, path_of

StrPath = str | os.PathLike[str]

_unfinished: set[str] = set()

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/(?:fd/(?P<number>\d+)|(?P<name>stdout|stderr))")
_CURES = {
    errno.ENOSPC: "free some space or write elsewhere",
    errno.EDQUOT: "free some space or write elsewhere",
    errno.EFBIG: "raise the limit (`ulimit -f`) or write elsewhere",
    errno.EACCES: "write where you have the right to",
    errno.EPERM: "write where you have the right to",
    errno.EROFS: "write where you have the right to",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "name a file in a folder",
}


def write_atomically(path: StrPath, data: bytes) -> None:
    """Write ``data`` to ``path`` by `replacement`; after a WriteError the old file is intact and no part is left."""
    with write_errors(path), replacement(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def replacement(path: StrPath, follow: bool = True) -> Iterator[BinaryIO]:
    """A stream whose content replaces the file ``path`` at the end of the block, unless the block raises.

    A symbolic link is followed and stays. A path that exists and is not a regular file (a device, a FIFO,
    ``/dev/stdout``) is written directly. A new file gets its mode from the umask, an old one keeps its mode. Without
    ``follow`` a new file takes the name, whatever had it: a link, a FIFO, a file.
    """
    number = _descriptor(path) if follow else None
    old = None if not follow else _stat(path) if number is None else os.fstat(number)
    if number is not None or (old is not None and not stat.S_ISREG(old.st_mode)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if number is None else os.dup(number)
        with open(descriptor, "wb") as stream:
            yield stream
        return
    target = _target(path) if follow else os.fspath(path)
    if old is not None:
        os.close(os.open(target, os.O_WRONLY | os.O_CLOEXEC))  # rename would replace a write-protected file
    # A name of fixed length: one derived from a name of 250 characters would be too long.
    temporary = os.path.join(os.path.dirname(target), f".hookscope-{os.urandom(8).hex()}.tmp")
    _unfinished.add(temporary)
    try:
        # Not tempfile.mkstemp: its files have mode 0600 whatever the umask, which cannot be read without setting it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as stream:
            if old is not None:
                with contextlib.suppress(PermissionError):  # a file of another user that its group may write
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            yield stream
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # already renamed, or never created
            os.unlink(temporary)
        _unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Remove the temporary files of this process, which is about to end without running ``finally`` blocks."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def check_writable(path: StrPath) -> None:
    """Raise the WriteError that ``write_atomically(path, ...)`` would raise; write nothing."""
    with write_errors(path):
        number = _descriptor(path)
        if number is not None:
            os.fstat(number)
            return
        old = _stat(path)
        if old is not None:
            _require(path, os.W_OK)
        if old is None or stat.S_ISREG(old.st_mode):
            folder = os.path.dirname(_target(path)) or "."
            os.stat(folder)
            _require(folder, os.W_OK | os.X_OK)


def check_folder(path: StrPath) -> None:
    """Raise a WriteError if no files can be written to the folder ``path``, which need not exist yet."""
    with write_errors(path):
        folder = _nearest_existing(path)
        if not os.path.isdir(folder):
            raise WriteError(f"cannot write to {os.fspath(path)}: {os.strerror(errno.ENOTDIR)}", do="name a folder")
        _require(folder, os.W_OK | os.X_OK)


def make_folder(path: StrPath) -> None:
    """Make the folder ``path`` and its parents if they are missing, or raise a WriteError."""
    with write_errors(path):
        os.makedirs(path, exist_ok=True)


def is_locked_by_another(descriptor: int) -> bool:
    """Lock an open file until it is closed, or this process ends; whether another process has locked it before."""
    try:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which workers would inherit
    except ImportError:  # Windows has no locks of this kind
        return False
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)  # else the file system has no locks
    return False


def _descriptor(path: StrPath) -> int | None:
    """The file descriptor behind ``/dev/stdout`` and the like: the shell holds its file open, so it is not replaced."""
    match = _DESCRIPTOR.fullmatch(path_of(path))
    if match is None:
        return None
    return int(match["number"]) if match["number"] else {"stdout": 1, "stderr": 2}[match["name"]]


def _target(path: StrPath) -> str:
    # Not always realpath: a relative name works in folders whose parents the user may not enter.
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def _stat(path: StrPath) -> os.stat_result | None:
    """The status of ``path``, links followed; None if nothing is there. A folder is an error."""
    if not os.fspath(path):
        raise WriteError("cannot write to an empty name", do="name a file")
    if not os.path.basename(path):  # "folder/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return status


def _require(path: StrPath, access: int) -> None:
    if os.access(path, access):
        return
    number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
    raise PermissionError(number, os.strerror(number), os.fspath(path))


def _nearest_existing(path: StrPath) -> str:
    folder = os.path.realpath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


@contextlib.contextmanager
def write_errors(path: StrPath) -> Iterator[None]:
    """Raise a WriteError with advice instead of the OSError that the block raises while it writes ``path``."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a character outside the file system's encoding
        if isinstance(error, FileNotFoundError):
            folder = os.path.dirname(os.path.realpath(path))
            if (exists := _nearest_existing(folder)) != folder:  # not where it exists, as in /proc
                asked = f"cannot write {os.fspath(path)}: its folder does not exist"
                raise WriteError(asked, f"there is {exists}", f"mkdir -p {shlex.quote(folder)}") from error
        reason, number = getattr(error, "strerror", None) or error, getattr(error, "errno", None)
        raise WriteError(f"cannot write {os.fspath(path)}: {reason}", do=_CURES.get(number or 0, "")) from error
