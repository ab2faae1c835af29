"""The directory for records of running jobs, with locks that say whether they still run.

It is $XDG_RUNTIME_DIR/mlxdist, where that is a directory of this user's, else mlxdist-<uid> in the temporary directory;
or, where another user was first to take that name, mlxdist-<uid>-<anything>, which all later commands find again.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mlxdist.base.errors import ResourceError
from mlxdist.base.private_files import is_private_directory, make_private_directory, open_private

__all__ = ["is_locked", "make_locked", "runtime_directory", "try_lock"]


def runtime_directory() -> Path:
    """The directory with the job directories of this user; it is made if need be. No other user can read it.

    Raises:
        ResourceError: it cannot be made, or something else of that name is in its place.
    """
    parent = os.environ.get("XDG_RUNTIME_DIR") or ""
    if os.path.isabs(parent) and is_private_directory(parent):  # sudo and su leave that of another user in place
        directory = Path(parent, "mlxdist")
    else:
        directory = Path(os.environ.get("TMPDIR") or "/tmp", f"mlxdist-{os.getuid()}").absolute()
    try:
        return directory if make_private_directory(directory) else _with_another_name(directory)
    except OSError as error:
        raise ResourceError(f"the job cannot be prepared in {directory}: {error}") from None


def _with_another_name(directory: Path) -> Path:
    """The first directory of this user, or a new one: another user must not be able to block every launch."""
    # Twice: where several processes make a directory at the same time, all of them take the first by name.
    for _ in range(2):
        for path in sorted(directory.parent.glob(f"{directory.name}-*")):
            if is_private_directory(path):
                make_private_directory(path)
                return path
        directory.with_name(f"{directory.name}-{os.urandom(8).hex()}").mkdir(mode=0o700)
    raise FileNotFoundError(errno.ENOENT, "what was made there is gone", directory)


def make_locked(name: str, fill: Callable[[Path], None]) -> tuple[Path, int]:
    """Makes a directory in the runtime directory, with the files that ``fill`` writes, and locks it. Returns it and the
    descriptor of its lock.

    Raises:
        ResourceError: it cannot be made; nothing of it is left.
    """
    runtime = runtime_directory()
    new = runtime / f".new-{name}"  # until it is complete: no process sees it without its lock
    try:
        new.mkdir(mode=0o700)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, new, ignore_errors=True)
            lock = open_private(new / "lock", os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, lock)
            with contextlib.suppress(OSError):  # no locks here: it counts as running as long as it is there
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fill(new)
            made = new.rename(runtime / name)
            undo.pop_all()
            return made, lock
    except OSError as error:
        raise ResourceError(f"the job cannot be prepared in {runtime}: {error}") from None


def try_lock(directory: Path, how: int) -> int | None:
    """Locks the directory as ``how`` says. Returns the descriptor of its lock; None if that is impossible now."""
    try:
        lock = open_private(directory / "lock", os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        os.close(lock)
        return None
    return lock


def is_locked(directory: Path) -> bool:
    """Whether a process holds the directory's lock, or its file system has none."""
    lock = try_lock(directory, fcntl.LOCK_SH)
    if lock is not None:
        os.close(lock)
    return lock is None
