"""A model from the hosts that have its files to those that lack some: one rank on each host. All of it, or for hosts
that do not have that, just the shards that they read.

The ranks first tell each other what they have. The files of the model are those of the first rank that has all of
them, or at least a config.json; what that one lacks of the weights may come from another. Then the ranks compare by
SHA-256 what they have, check that their disks have room for the rest, and only then write.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import Error, InvalidArgument, TransportError
from mlxdist.base.host_shards import HostShards, remove_shards, write_record
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import gather_blobs
from mlxdist.runtime.operations.collectives import all_gather

from .only_shards import ShardsOfModel, plan_shards_of_hosts
from .places import MAX_MANIFEST_BYTES, Manifest, ModelFile, Place
from .transfer import (
    Members,
    Readable,
    equal_beginnings,
    held_bytes,
    partial_bytes,
    partial_path,
    receive,
    send,
    write_lock,
)

__all__ = ["Spread", "spread"]

MakePlan = Callable[[Path], Sequence[HostShards]]


@dataclass(frozen=True)
class Spread:
    """The result. ``files`` and ``size``: of the model; ``received``: bytes that each rank has written; ``shards``: for
    each rank, which shards it has, in words, empty for all."""

    files: int
    size: int
    received: tuple[int, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True)
class _Wanted:
    """A file that ranks are to have. ``source``: the rank that has it; ``wanted``: the ranks that are to have it;
    ``readable``, ``writable``: where it is on the source, and where it goes on others."""

    file: ModelFile
    source: int
    wanted: Sequence[int]
    readable: Readable
    writable: Path


@dataclass
class _Part:
    """A file while it is spread. ``held``: of every rank, how many bytes it has; ``hashes``: SHA-256 of the first bytes
    on this rank, by their number."""

    wanted: _Wanted
    held: list[int]
    hashes: dict[int, Any]

    @property
    def takers(self) -> list[int]:
        return [rank for rank in self.wanted.wanted if self.held[rank] < self.file.size]

    @property
    def file(self) -> ModelFile:
        return self.wanted.file

    @property
    def source(self) -> int:
        return self.wanted.source

    @property
    def start(self) -> int:
        """The number of bytes that all takers have."""
        return max(0, min(self.held[rank] for rank in self.takers))


def spread(
    group: Group,
    place: Place,
    on_progress: Callable[[str, int, int], Any] = lambda what, done, of: None,
    offers: bool = True,
    plan_hosts: MakePlan | None = None,
) -> Spread:
    """Brings the files of a model to every rank that lacks some. Every rank calls it.

    Args:
        group: one rank on each host.
        place: where the model is on this host, or will be.
        on_progress: called with the name of a file and with numbers of bytes: those done, those of all.
        offers: whether this rank's files may be those of the model; not if a download of them was interrupted.
        plan_hosts: returns for a model's directory the shards that each host reads, for which a rank that does not have
            all weights gets these alone; None: every rank gets all.

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
        of_hosts = None
        if plan_hosts is not None:
            of_hosts = plan_shards_of_hosts(group, place, manifest, sources, plan_hosts)
        parts = _compare(group, _wanted(group, place, manifest, sources, of_hosts), on_progress)
        with agreed("pull", group):
            mine = [part for part in parts if rank in part.takers]
            # What an interrupted transfer has left is kept or written over.
            more = sum(part.file.size - partial_bytes(part.wanted.writable) for part in mine)
            require_room(place.root, more, "the model")
        received = _transfer(group, parts, on_progress)
        with agreed("pull", group):
            _finish(place, manifest, of_hosts, rank)
    rows = all_gather(np.array([received]), group=group)
    shards = tuple(str(of_hosts.of[rank]) if of_hosts and rank in of_hosts.of else "" for rank in range(group.size()))
    return Spread(len(manifest.files), manifest.size, tuple(map(int, rows)), shards)


def _wanted(
    group: Group, place: Place, manifest: Manifest, sources: Sequence[int], of_hosts: ShardsOfModel | None
) -> list[_Wanted]:
    """All files that ranks are to have, in one order on all of them."""
    found = []
    for file, source in zip(manifest.files, sources):
        partial = of_hosts.of if of_hosts is not None and file.name in of_hosts.names else {}
        ranks = [rank for rank in range(group.size()) if rank not in partial]
        found.append(_Wanted(file, source, ranks, place.readable(manifest, file), place.writable(manifest, file)))
    if of_hosts is not None:
        found += _wanted_shards(group.rank(), place.directory(manifest), of_hosts)
    return found


def _wanted_shards(rank: int, directory: Path, of_hosts: ShardsOfModel) -> Iterator[_Wanted]:
    for taker, shards in of_hosts.of.items():
        for part in shards.files:
            path = shards.path(directory, part)
            readable = of_hosts.packed(part) if of_hosts.source == rank else path
            file = ModelFile(f"{part.name} for {shards}", part.packed)
            yield _Wanted(file, of_hosts.source, [taker], readable, path)


def _finish(place: Place, manifest: Manifest, of_hosts: ShardsOfModel | None, rank: int) -> None:
    """Makes what has come a model that others find."""
    directory = place.directory(manifest)
    if of_hosts is None or rank not in of_hosts.of:
        place.finish(manifest)
        remove_shards(directory)
        return
    place.finish(replace(manifest, files=tuple(file for file in manifest.files if file.name not in of_hosts.names)))
    write_record(directory, of_hosts.of[rank])


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


def _compare(group: Group, wanted: Sequence[_Wanted], on_progress: Callable[[str, int, int], Any]) -> list[_Part]:
    """Compares what each rank has of each file with the source, and returns what is right."""
    rank = group.rank()
    own = np.zeros(len(wanted), np.int64)
    with agreed("pull", group):
        for number, each in enumerate(wanted):
            if rank == each.source:
                own[number] = each.file.size
            elif rank in each.wanted:
                own[number] = held_bytes(each.writable, each.file.size)
    table = all_gather(own, group=group).reshape(group.size(), len(wanted))
    parts, done, total = [], 0, sum(each.file.size for each in wanted)
    for each, held in zip(wanted, table.T.tolist()):
        on_progress(f"comparing {each.file.name}", done, total)
        path = each.readable if rank == each.source else each.writable
        right, hashes = equal_beginnings(path, partial_path(each.writable), held, each.source, group)
        parts.append(_Part(each, right, hashes))
        done += each.file.size
    return parts


def _transfer(group: Group, parts: Sequence[_Part], on_progress: Callable[[str, int, int], Any]) -> int:
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
                    send(part.file, part.wanted.readable, part.start, so_far, which, advance)
                else:
                    receive(part.file, part.wanted.writable, part.start, so_far, which, advance)
                    received += length
            except OSError as error:
                if not isinstance(error, Error):
                    group.abort(f"pull: {error}")  # the others wait for chunks, and must not wait for long
                raise
        # The others wait as long as a file takes, which may be hours. Those in its transfer have limits of their own.
        group.barrier(timeout=0)
        done = before + length
    return received
