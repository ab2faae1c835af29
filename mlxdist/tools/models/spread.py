"""A model from the hosts that have its files to those that lack some: one rank on each host.

The ranks first tell each other what they have. The files of the model are those of the first rank that has all of
them, or at least a config.json; what that one lacks of the weights may come from another. Then the ranks compare by
SHA-256 what they have, check that their disks have room for the rest, and only then write.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import Error, InvalidArgument, TransportError
from mlxdist.nn.models.load.blobs import gather_blobs
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather

from .places import MAX_MANIFEST_BYTES, Manifest, ModelFile, Place
from .transfer import Members, equal_beginnings, held_bytes, partial_bytes, partial_path, receive, send, write_lock

__all__ = ["Spread", "spread"]


@dataclass(frozen=True)
class Spread:
    """The result. ``files`` and ``size``: of the model; ``received``: bytes that each rank has written."""

    files: int
    size: int
    received: tuple[int, ...]


@dataclass
class _Part:
    """A file of the model while it is spread. ``held``: of every rank, how many bytes it has; ``hashes``: SHA-256 of
    the first bytes on this rank, by their number."""

    file: ModelFile
    source: int
    held: list[int]
    hashes: dict[int, Any]

    @property
    def takers(self) -> list[int]:
        return [rank for rank, held in enumerate(self.held) if held < self.file.size]

    @property
    def start(self) -> int:
        """The number of bytes that all takers have."""
        return max(0, min(self.held[rank] for rank in self.takers))


def spread(
    group: Group,
    place: Place,
    on_progress: Callable[[str, int, int], Any] = lambda what, done, of: None,
    offers: bool = True,
) -> Spread:
    """Brings the files of a model to every rank that lacks some. Every rank calls it.

    Args:
        group: one rank on each host.
        place: where the model is on this host, or will be.
        on_progress: called with the name of a file and with numbers of bytes: those done, those of all.
        offers: whether this rank's files may be those of the model; not if a download of them was interrupted.

    Raises:
        InvalidArgument: no rank has the model, or weights are missing on all of them; a disk is full.
        ResourceError: another pull writes there, too.
        TransportError: something else has arrived than was read.
        OSError: this rank cannot read or write a file.
        Aborted, PeerLost: another rank has failed; what has arrived is kept for the next time.
    """
    manifest, sources = _agree_on_files(group, place, offers)
    rank = group.rank()
    with ExitStack() as locks:
        with agreed("pull", group):
            if any(source != rank for source in sources):  # this rank may lack some of it
                locks.enter_context(write_lock(place.root))
        parts = _compare(group, place, manifest, sources, on_progress)
        with agreed("pull", group):
            wanted = [part.file for part in parts if rank in part.takers]
            # What an interrupted transfer has left is kept or written over.
            more = sum(file.size - partial_bytes(place.writable(manifest, file)) for file in wanted)
            require_room(place.root, more, "the model")
        received = _transfer(group, place, manifest, parts, on_progress)
        with agreed("pull", group):
            place.finish(manifest)
    rows = all_gather(np.array([received]), group=group)
    return Spread(len(manifest.files), manifest.size, tuple(map(int, rows)))


def _agree_on_files(group: Group, place: Place, offers: bool) -> tuple[Manifest, list[int]]:
    """The manifest of the whole model, and for each of its files the rank that it comes from."""
    own: Manifest | None = None
    with agreed("pull", group):
        own = place.manifest() if offers else None
    blobs = gather_blobs(b"" if own is None else own.to_json(), group, MAX_MANIFEST_BYTES)
    try:
        manifests = [Manifest.from_json(blob) if blob else None for blob in blobs]
    except ValueError as error:
        raise TransportError(f"pull: a rank has sent a list of files that is none: {error}") from None
    with agreed("pull", group):
        of_ranks = [(rank, manifest) for rank, manifest in enumerate(manifests) if manifest is not None]
        if not of_ranks:
            raise InvalidArgument(f"no host has a config.json in {place.root}")
        first, manifest = next((found for found in of_ranks if found[1].is_complete), of_ranks[0])
        files, sources = list(manifest.files), [first] * len(manifest.files)
        for name in manifest.missing:
            rank, file = _found(name, manifest.commit, manifests)
            files.append(file)
            sources.append(rank)
        if not any(file.name.endswith(".safetensors") for file in files):
            raise InvalidArgument(f"{place.root} has a config.json, and no weights (*.safetensors) on rank {first}")
    return replace(manifest, files=tuple(files), missing=()), sources


def _found(name: str, commit: str, manifests: Sequence[Manifest | None]) -> tuple[int, ModelFile]:
    for rank, manifest in enumerate(manifests):
        if manifest is not None and manifest.commit == commit:
            for file in manifest.files:
                if file.name == name:
                    return rank, file
    raise InvalidArgument(f"{name} is missing, a file of the weights, and no host has it")


def _compare(
    group: Group, place: Place, manifest: Manifest, sources: Sequence[int], on_progress: Callable[[str, int, int], Any]
) -> list[_Part]:
    """Compares what each rank has of each file with the source, and returns what is right."""
    rank = group.rank()
    own = np.zeros(len(sources), np.int64)
    with agreed("pull", group):
        for number, (file, source) in enumerate(zip(manifest.files, sources)):
            own[number] = file.size if rank == source else held_bytes(place.writable(manifest, file), file.size)
    table = all_gather(own, group=group).reshape(group.size(), len(sources))
    parts, done = [], 0
    for file, source, held in zip(manifest.files, sources, table.T.tolist()):
        on_progress(f"comparing {file.name}", done, manifest.size)
        path = place.readable(manifest, file) if rank == source else place.writable(manifest, file)
        right, hashes = equal_beginnings(path, partial_path(path), held, source, group)
        parts.append(_Part(file, source, right, hashes))
        done += file.size
    return parts


def _transfer(
    group: Group, place: Place, manifest: Manifest, parts: Sequence[_Part], on_progress: Callable[[str, int, int], Any]
) -> int:
    """Sends and receives all that is missing. Returns the number of bytes that this rank has received."""
    rank, groups = group.rank(), dict[tuple[int, ...], Group | None]()
    missing = [part for part in parts if part.takers]
    total, done, received = sum(part.file.size - part.start for part in missing), 0, 0
    for part in missing:
        ranks = tuple(sorted({part.source, *part.takers}))
        if ranks not in groups:
            groups[ranks] = group if len(ranks) == group.size() else group.split(0 if rank in ranks else -1)
        members, length, before = groups[ranks], part.file.size - part.start, done

        def advance(count: int) -> None:
            nonlocal done
            done += count
            on_progress(part.file.name, done, total)

        if members is not None:
            so_far = part.hashes.get(part.start) or hashlib.sha256()
            which = Members(members, ranks, ranks.index(part.source))
            try:
                if rank == part.source:
                    send(part.file, place.readable(manifest, part.file), part.start, so_far, which, advance)
                else:
                    receive(part.file, place.writable(manifest, part.file), part.start, so_far, which, advance)
                    received += length
            except OSError as error:
                if not isinstance(error, Error):
                    group.abort(f"pull: {error}")  # the others wait for chunks, and must not wait for long
                raise
        # The others wait as long as a file takes, which may be hours. Those in its transfer have limits of their own.
        group.barrier(timeout=0)
        done = before + length
    return received
