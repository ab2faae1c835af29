"""Sends a file of a model from a rank that has it to those that lack it, in chunks, with the SHA-256 of all of it.

The chunks are broadcasts, in which ranks pass on what they have received. What a rank has of the file already, an
interrupted transfer or an older copy, is kept if its SHA-256 is that of as many bytes of the source.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.base.errors import InvalidArgument, ResourceError, TransportError, name_ranks
from mlxdist.base.host_shards import PackedShards
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather, broadcast

from .places import ModelFile

__all__ = [
    "CHUNK_BYTES",
    "MISSING",
    "Members",
    "Readable",
    "beginnings",
    "equal_beginnings",
    "held_bytes",
    "partial_bytes",
    "partial_path",
    "receive",
    "send",
    "write_lock",
]

CHUNK_BYTES = 8 * 2**20
MISSING = -1  # in place of a number of bytes: there is no file, not even an empty one
_BUFFERS = 3  # one is read, one is on its way, one may still be
_DIGEST = 32
Readable = Path | PackedShards


def partial_path(path: Path) -> Path:
    """The path of a file until all of it has come and is right."""
    return path.with_name(f".{path.name}.mlxdist-part")


def held_bytes(path: Path, size: int) -> int:
    """How many bytes of a file of this size a host has, be they right or not: all, those of an interrupted transfer,
    or MISSING."""
    if _has(path, size):
        return size
    # One byte less than all: then the end of the transfer, with its checks, is still to come.
    return min(partial_bytes(path), size - 1) if partial_path(path).is_file() else MISSING


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def partial_bytes(path: Path) -> int:
    """The size of what an interrupted transfer has left of a file."""
    part = partial_path(path)
    return part.stat().st_size if part.is_file() else 0


def beginnings(path: Readable, lengths: Sequence[int]) -> dict[int, Any]:
    """SHA-256 of the first bytes of a file, for each of these lengths; the file is read once.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    found, done, so_far = {}, 0, hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        for length in sorted(lengths):
            while done < length:
                count = file.readinto(buffer[: min(CHUNK_BYTES, length - done)])
                if not count:
                    raise OSError(f"{path} has become shorter while it was read")
                so_far.update(buffer[:count])
                done += count
            found[length] = so_far.copy()
    return found


def equal_beginnings(
    path: Readable, part: Path, held: Sequence[int], source: int, group: Group
) -> tuple[list[int], dict[int, Any]]:
    """Compares what ranks have of a file with the source's. Every rank calls it.

    Args:
        path, part: where the file, and where an incomplete one is on this rank.
        held: of every rank, how many bytes it has.
        source: the rank with all of it.

    Returns:
        Of every rank, how many of its bytes are right: all that it has, or else MISSING. And the SHA-256 of the first
        bytes of this rank, for those lengths and up to its own, to go on from.
    """
    rank = group.rank()
    cuts = sorted({length for other, length in enumerate(held) if other != source and length > 0})
    if not cuts:
        return list(held), {}
    hashes: dict[int, Any] = {}
    with agreed("pull", group):
        if held[rank] > 0:
            mine = path if isinstance(path, PackedShards) or _has(path, held[rank]) else part
            hashes = beginnings(mine, [cut for cut in cuts if cut <= held[rank]])
    digests = np.zeros((len(cuts), _DIGEST), np.uint8)
    for row, cut in enumerate(cuts):
        if cut in hashes:
            digests[row] = np.frombuffer(hashes[cut].digest(), np.uint8)
    table = all_gather(digests, group=group).reshape(group.size(), len(cuts), _DIGEST)
    right = list(held)
    for other, length in enumerate(held):
        if other != source and length > 0:
            row = cuts.index(length)
            right[other] = length if (table[other, row] == table[source, row]).all() else MISSING
    return right, hashes


@dataclass(frozen=True)
class Members:
    """The ranks that take part in the transfer of a file. ``group``: of these alone; ``ranks``: in the group of all;
    ``root``: the rank in ``group`` that has the file."""

    group: Group
    ranks: Sequence[int]
    root: int


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """No other process pulls into the directory meanwhile. The system releases it however this process ends. A
    directory that is empty then is removed.

    Raises:
        ResourceError: another process does, or the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"{directory} cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(f"another `mlxdist pull` writes to {directory}; wait for its end") from None
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                directory.rmdir()
    finally:
        os.close(descriptor)


def send(
    file: ModelFile, path: Readable, start: int, so_far: Any, members: Members, advance: Callable[[int], Any]
) -> None:
    """Sends a file from byte ``start`` on to the other members, which call :func:`receive`.

    Args:
        file: its size and hash.
        path: where it is.
        start: how many bytes the others have.
        so_far: SHA-256 of these; it is continued.
        members: this rank, their root, and those that get the file.
        advance: called with the number of bytes of each chunk.

    Raises:
        OSError: the file cannot be read.
        InvalidArgument: the file is changed meanwhile, or is not what its name in the hub's cache says.
        TransportError: something else has arrived than was read.
    """
    handles: list[Any] = [None] * _BUFFERS
    buffers = [np.empty(min(CHUNK_BYTES, file.size), np.uint8) for _ in range(_BUFFERS)]
    with path.open("rb", buffering=0) as opened:
        before = os.fstat(opened.fileno())
        opened.seek(start)
        for number, offset in enumerate(range(start, file.size, CHUNK_BYTES)):
            place = number % _BUFFERS
            if handles[place] is not None:
                handles[place].wait()
            chunk = buffers[place][: min(CHUNK_BYTES, file.size - offset)]
            _fill(opened, path, chunk)
            handles[place] = broadcast(chunk, members.root, group=members.group, out=chunk, async_op=True)
            so_far.update(chunk.data)  # while it is on its way
            advance(len(chunk))
        for handle in handles:
            if handle is not None:
                handle.wait()
        with agreed("pull", members.group):
            after = os.fstat(opened.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise InvalidArgument(f"{path} was changed while it was read; pull it again once nothing writes to it")
            if len(file.blob) == 2 * _DIGEST and file.blob != so_far.hexdigest():
                raise InvalidArgument(
                    f"{path} is damaged: its SHA-256 is not the one in its name; remove it, and pull again"
                )
    if differing := _differing(so_far, members):
        raise _damaged(file, differing)


def receive(
    file: ModelFile, path: Path, start: int, so_far: Any, members: Members, advance: Callable[[int], Any]
) -> None:
    """Writes a file from byte ``start`` on as :func:`send` sends it; the file gets its name once it is right.

    Raises:
        OSError: it cannot be written, or has become shorter than what was compared.
        TransportError: something else has arrived than was read.
    """
    part = partial_path(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    buffers = [np.empty(min(CHUNK_BYTES, file.size), np.uint8) for _ in range(2)]
    chunks = range(start, file.size, CHUNK_BYTES)

    def begin(number: int) -> Any:
        chunk = buffers[number % 2][: min(CHUNK_BYTES, file.size - chunks[number])]
        return broadcast(chunk, members.root, group=members.group, out=chunk, async_op=True)

    with part.open("r+b" if start else "wb") as opened:
        if opened.seek(0, os.SEEK_END) < start:  # zeros would stand for what was compared
            raise OSError(f"{part} has become shorter; pull it again once nothing writes to it")
        opened.truncate(start)
        opened.seek(start)
        handle: Any = begin(0) if chunks else None
        for number in range(len(chunks)):
            chunk = handle.wait()
            handle = begin(number + 1) if number + 1 < len(chunks) else None
            opened.write(chunk.data)
            so_far.update(chunk.data)
            advance(len(chunk))
        with agreed("pull", members.group):
            opened.flush()
            os.fsync(opened.fileno())
    if differing := _differing(so_far, members):
        if members.ranks[members.group.rank()] in differing:
            part.unlink()
        raise _damaged(file, differing)
    part.replace(path)


def _fill(opened: Any, path: Readable, chunk: np.ndarray) -> None:
    memory = chunk.data
    while memory:
        count = opened.readinto(memory)
        if not count:
            raise OSError(f"{path} has become shorter while it was read; pull it again once nothing writes to it")
        memory = memory[count:]


def _differing(so_far: Any, members: Members) -> list[int]:
    """The ranks on which a file has another SHA-256 than on the one that has sent it."""
    digest = np.frombuffer(so_far.digest(), np.uint8)
    table = all_gather(digest, group=members.group).reshape(len(members.ranks), _DIGEST)
    return [rank for rank, row in zip(members.ranks, table) if (row != table[members.root]).any()]


def _damaged(file: ModelFile, ranks: Sequence[int]) -> TransportError:
    return TransportError(
        f"pull: {file.name} has arrived damaged on {name_ranks(ranks)}: its SHA-256 is not that of what was read; "
        "pull it again with MLXDIST_CHECKSUM=1, to see whether a cable is at fault"
    )
