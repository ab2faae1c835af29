"""Whether a disk has room, before anything is written to it."""

import shutil
from pathlib import Path

from . import tables
from .errors import ResourceError

__all__ = ["require_room"]


def require_room(directory: Path, wanted: int, what: str) -> None:
    """Checks that ``wanted`` bytes fit on the disk of ``directory``, which need not exist yet.

    Args:
        directory: where the bytes are to go.
        wanted: their number.
        what: the subject of the message: what needs the room.

    Raises:
        ResourceError: they do not fit.
    """
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise ResourceError(
            f"{what} needs {tables.size(wanted)} in {directory}, whose disk has {tables.size(free)} left; nothing was "
            "written"
        )
