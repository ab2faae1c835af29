"""The room for a checkpoint on the disks of all ranks, compared before any rank writes a part of it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlxdist.base.disk_space import Room, room_of
from mlxdist.base.errors import ResourceError, located, name_ranks
from mlxdist.base.host_identity import host_identity
from mlxdist.runtime.group.group import Group, engine_of

from .ranks import together

__all__ = ["require_room"]


class _Row(NamedTuple):
    """A rank's part of the comparison."""

    directory: str
    host: str
    disk: str  # equal for directories of one host that are on the same file system
    nbytes: int  # that the rank is going to write
    files: int
    free_bytes: int | None
    free_files: int | None


def require_room(
    directory: Path, step: int, sizes: Callable[[], list[int]], leads: Sequence[int], group: Group
) -> None:
    """Checks that the files of all ranks fit on the disks that they go to. Collective.

    Args:
        directory: of the checkpoints, on this rank.
        step: of the checkpoint.
        sizes: returns those of what this rank is going to make: files and directories.
        leads: for each rank the lowest one that sees the same directory.
        group: the ranks.

    Raises:
        ResourceError: on all ranks alike: the disk of one has too little room, in bytes or inodes.
    """

    def look() -> list[Any]:
        try:
            room, mine = room_of(directory), sizes()
        except OSError as error:
            raise ResourceError(f"Checkpoints.save: {directory} cannot be read: {error.strerror}") from None
        disk = f"{host_identity()} {room.device}"
        nbytes = sum(map(room.blocks, mine))
        host = engine_of(group).world.host
        return list(_Row(str(directory.absolute()), host, disk, nbytes, len(mine), room.nbytes, room.files))

    rows = [_Row(*row) for row in together(look, group)]
    of_disk: dict[str, list[int]] = defaultdict(list)
    for rank, lead in enumerate(leads):
        of_disk[rows[lead].disk].append(rank)
    for ranks in of_disk.values():
        _require_room(step, ranks, rows, group.size())


def _require_room(step: int, ranks: list[int], rows: Sequence[_Row], size: int) -> None:
    """Requires room on the disk that ``ranks`` share, of ``size`` ranks."""
    mine = [rows[rank] for rank in ranks]
    free_bytes = [row.free_bytes for row in mine if row.free_bytes is not None]
    free_files = [row.free_files for row in mine if row.free_files is not None]
    room = Room(min(free_bytes, default=None), min(free_files, default=None))
    where = f"in {mine[0].directory}" + (f" of {name_ranks(ranks)}" if size > 1 else "")
    lack = room.lack(where, sum(row.nbytes for row in mine), sum(row.files for row in mine))
    if lack is not None:
        text = (
            f"Checkpoints.save: step {step} needs {lack}; nothing was written, and earlier checkpoints stay. Make room "
            "there, keep fewer checkpoints, or choose another directory"
        )
        raise ResourceError(text if size == 1 else located(text, ranks[0], mine[0].host))
