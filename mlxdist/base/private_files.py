"""Files and directories of mlxdist where other users may write too, such as /tmp: what another user has put there is
neither followed nor written.
"""

import errno
import os
import stat
from pathlib import Path

__all__ = ["is_private_directory", "make_private_directory", "open_private"]


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file like os.open; a new one is for this user only. Child processes do not inherit the descriptor.

    Raises:
        OSError: the path is a link, even one of this user's, belongs to another user, is a file with a second name, or
            cannot be opened.
    """
    # O_NONBLOCK, because opening a pipe waits for its reader, and another user may have put the pipe there.
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            error.strerror = "it is a link"
        raise
    found = os.fstat(descriptor)
    is_file = stat.S_ISREG(found.st_mode)
    # A device, such as /dev/null or a terminal, may belong to root.
    ours = (os.geteuid(),) if is_file else (os.geteuid(), 0)
    if found.st_uid not in ours or (is_file and found.st_nlink > 1):
        os.close(descriptor)
        why = "it belongs to another user" if found.st_uid not in ours else "it has another name, too"
        raise PermissionError(errno.EPERM, why, os.fspath(path))
    if flags & os.O_TRUNC:  # only now: it is ours
        os.ftruncate(descriptor, 0)
    os.set_blocking(descriptor, True)
    return descriptor


def is_private_directory(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a directory of this user, and no symbolic link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_private_directory(path: Path) -> bool:
    """Makes the directory with mode 0700 if it is missing. Returns False if something else has its name.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private_directory(path):
            return False
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)
    return True
