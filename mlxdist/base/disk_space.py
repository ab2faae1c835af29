"""The room that a file system has, before anything is written to it."""

import os
from dataclasses import dataclass
from pathlib import Path

from . import tables
from .errors import ResourceError

__all__ = ["Room", "require_room", "room_of"]


@dataclass(frozen=True)
class Room:
    """The room on a file system.

    Attributes:
        nbytes: bytes that this user may still write; None: the file system does not say, as some of FUSE.
        files: how many files and directories it still takes; None: as many as fit, since it makes inodes as needed.
        block: the bytes of which a file takes a whole number.
        device: the number of the file system on this host.
    """

    nbytes: int | None
    files: int | None
    block: int = 1
    device: int = 0

    def blocks(self, size: int) -> int:
        """The bytes that a file of ``size`` bytes takes."""
        return -(-size // self.block) * self.block

    def lack(self, where: str, nbytes: int, files: int = 0) -> str | None:
        """The part of a sentence behind "needs" that says what is missing for ``nbytes`` and ``files``; None: they fit.

        ``where``: names the directory, such as "in checkpoints".
        """
        if self.nbytes is not None and nbytes > self.nbytes:
            return f"{tables.size(nbytes)} {where}, whose disk has {tables.size(self.nbytes)} left"
        if self.files is not None and files > self.files:
            return f"{files} inodes {where}, whose disk has {self.files} left"
        return None


def room_of(directory: Path) -> Room:
    """The room on the file system of ``directory``, which need not exist yet. Raises OSError."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    found = os.statvfs(there)
    nbytes = found.f_bavail * found.f_frsize if found.f_blocks else None
    files = found.f_favail if found.f_files else None
    return Room(nbytes, files, max(found.f_frsize, 1), there.stat().st_dev)


def require_room(directory: Path, wanted: int, what: str) -> None:
    """Checks that ``wanted`` bytes fit on the disk of ``directory``, which need not exist yet.

    Args:
        directory: where the bytes are to go.
        wanted: their number.
        what: the subject of the message: what needs the room.

    Raises:
        ResourceError: they do not fit.
    """
    if lack := room_of(directory).lack(f"in {directory}", wanted):
        raise ResourceError(f"{what} needs {lack}; nothing was written")
