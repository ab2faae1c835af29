"""Reads what a rank needs of a checkpoint: whole files once, to compare their CRC-32, then the needed slices alone.

Each file is compared by one of the ranks that see it. Slices of a file that a rank does not see come from a rank that
sees it, over the group.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.base.safetensors_reader import ITEM_SIZES
from mlxdist.nn.layout.cut import Cut, Piece
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.point_to_point import recv, send

from .directory import size_of
from .files import DTYPES, TensorFile, Unusable, crc32_of
from .manifest import Manifest, cut_from_json, cut_to_json, stored
from .ranks import gather, together

__all__ = ["Reader"]

# Arrays are filled as unsigned integers and then viewed in their own dtype, since NumPy has no bfloat16.
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Common(NamedTuple):
    """A box that two parts of an array share: where it is in each, as in a :class:`Piece`."""

    shape: tuple[int, ...]
    source: Piece
    source_index: tuple[slice, ...]
    target: Piece
    target_index: tuple[slice, ...]


class Reader:
    """Reads a checkpoint whose manifest all ranks have. Collective; a group of one does not communicate.

    ``bytes_read``: bytes of arrays read from this rank's files; ``bytes_sent``: those sent to other ranks. Both are
    known after :meth:`read`.
    """

    def __init__(self, path: Path, manifest: Manifest, group: Group) -> None:
        self.path, self.manifest, self.group = path, manifest, group
        self.bytes_read = self.bytes_sent = 0
        mine = [size_of(path, file) for file in manifest.files]
        # The same file on two ranks has the same number and time; a copy on another disk has others.
        self._seen = gather([found and [found.st_ino, found.st_mtime_ns] for found in mine], group)
        self._open = cache(self._opened)

    def missing(self) -> str | None:
        """The name of a file that no rank sees whole."""
        for number, file in enumerate(self.manifest.files):
            if not any(seen[number] for seen in self._seen):
                return file.name
        return None

    def verify(self) -> str | None:
        """Returns a problem with a file, the same on all ranks; None if all files are as they were written."""

        def compare() -> str | None:
            for number, file in enumerate(self.manifest.files):
                if number in self._compared_here():
                    try:
                        crc = crc32_of(self.path / file.name)
                        self._open(number)
                    except OSError as error:
                        return f"has a file {file.name} that cannot be read: {error.strerror}"
                    except Unusable as error:
                        return str(error)
                    if crc != file.crc32:
                        return f"has a file {file.name} that is damaged: its CRC-32 differs"
            return None

        return next((problem for problem in together(compare, self.group) if problem), None)

    def read(self, wanted: Mapping[str, Cut]) -> dict[str, mx.array]:
        """Returns this rank's part of each array.

        Raises:
            Unusable: on all ranks, if one cannot read its files.
        """
        arrays: dict[str, mx.array] = {}
        failure: Unusable | None = None
        if all(all(seen) for seen in self._seen):
            everyones: list[Mapping[str, Cut]] = [wanted if rank == self.group.rank() else {} for rank in self._ranks]
        else:
            everyones = self._gather(wanted)
        for path in sorted(set().union(*everyones)):
            array = self.manifest.arrays[path]
            memory = None
            if path in wanted:
                memory = mx.zeros(wanted[path].local_shape, _UNSIGNED[ITEM_SIZES[array.dtype]], stream=mx.cpu)
                mx.eval(memory)
            local = None if memory is None else np.array(memory, copy=False).reshape(-1)
            try:
                self._fill(path, local, everyones)
            except Unusable as error:
                failure = failure or error
            if memory is not None:
                arrays[path] = memory.view(DTYPES[array.dtype], stream=mx.cpu)
        mx.eval(arrays)

        def check() -> str | None:
            return None if failure is None else str(failure)

        if problem := next((problem for problem in together(check, self.group) if problem), None):
            raise Unusable(problem)
        self.bytes_read = sum(self._open(number).bytes_read for number in self._here())
        return arrays

    @property
    def _ranks(self) -> range:
        return range(self.group.size())

    def _here(self) -> list[int]:
        return [number for number, seen in enumerate(self._seen[self.group.rank()]) if seen]

    def _compared_here(self) -> set[int]:
        """The files that this rank compares: one rank compares each copy of a file, and the ranks share the work."""
        found = set()
        for number in self._here():
            own = self._seen[self.group.rank()][number]
            same = [rank for rank in self._ranks if self._seen[rank][number] == own]
            if same[number % len(same)] == self.group.rank():
                found.add(number)
        return found

    def _gather(self, wanted: Mapping[str, Cut]) -> list[Mapping[str, Cut]]:
        own = {path: cut_to_json(cut) for path, cut in wanted.items()}
        shape = lambda path: list(self.manifest.arrays[path].shape)
        everyones = gather(own, self.group)
        return [{path: cut_from_json(shape(path), cut) for path, cut in theirs.items()} for theirs in everyones]

    def _opened(self, number: int) -> TensorFile:
        return TensorFile(self.path / self.manifest.files[number].name)

    def _fill(self, path: str, local: np.ndarray | None, everyones: list[Mapping[str, Cut]]) -> None:
        """Fills this rank's part from the parts in files. All ranks walk all ranks' parts in the same order."""
        failure: Unusable | None = None
        found = 0
        for rank, wanted in enumerate(everyones):
            for number, cut in self._parts(path, wanted[path]) if path in wanted else ():
                source = rank if self._seen[rank][number] else self._sender(number)
                if self.group.rank() not in (rank, source):
                    continue
                for common in _common(cut, wanted[path]):
                    found += math.prod(common.shape) if rank == self.group.rank() else 0
                    try:
                        data = self._get(path, number, common) if source == self.group.rank() else None
                    except Unusable as error:  # the receiver waits for as many bytes
                        failure, data = failure or error, np.zeros(common.shape, self._dtype(path))
                    data = self._carry(path, data, common, source, rank)
                    if data is not None and local is not None:
                        _view(local, common.target)[common.target_index] = data
        if failure is not None:
            raise failure
        own = everyones[self.group.rank()].get(path)
        if own is not None and found < sum(math.prod(_shape(piece.box)) for piece in own.pieces()):
            raise Unusable(f"has not all parts of {path}")

    def _parts(self, path: str, wanted: Cut) -> list[tuple[int, Cut]]:
        """The parts that a rank reads: a single one if it is exactly the part that the rank wants."""
        parts = self.manifest.arrays[path].parts
        equal = [part for part in parts if part[1] == stored(wanted)]
        return equal[:1] or parts

    def _sender(self, number: int) -> int:
        seeing = [rank for rank in self._ranks if self._seen[rank][number]]
        return seeing[number % len(seeing)]

    def _carry(self, path: str, data: np.ndarray | None, common: Common, source: int, target: int) -> np.ndarray | None:
        """Carries data from rank ``source`` to rank ``target``. Returns it on ``target``, and None on the source."""
        if source == target:
            return data
        if data is not None:
            self.bytes_sent += data.nbytes
            send(data.reshape(-1).view(np.uint8), target, group=self.group)
            return None
        count = math.prod(common.shape) * self._dtype(path).itemsize
        received: Any = recv((count,), np.uint8, source, group=self.group)
        return received.view(self._dtype(path)).reshape(common.shape)

    def _dtype(self, path: str) -> np.dtype:
        return np.dtype(f"u{ITEM_SIZES[self.manifest.arrays[path].dtype]}")

    def _get(self, path: str, number: int, common: Common) -> np.ndarray:
        """A box of an array from one of this rank's files."""
        file = self._open(number)
        tensor = file.tensors.get(path)
        if tensor is None or tensor.dtype != self.manifest.arrays[path].dtype:
            raise file.damaged(f"it has no {path} of {self.manifest.arrays[path].dtype}")
        data = np.empty(common.shape, self._dtype(path))
        begin = tensor.offset + common.source.start * tensor.itemsize
        runs = _runs(common.source.shape, common.source_index, begin, tensor.itemsize)
        file.read_runs(runs, data.reshape(-1).view(np.uint8).data)
        return data


def _common(source: Cut, target: Cut) -> Iterator[Common]:
    """The boxes that two parts of an array share. None is empty."""
    for a, b in itertools.product(source.pieces(), target.pieces()):
        box = [(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a.box, b.box, strict=True)]
        if all(start < stop for start, stop in box):
            shape = tuple(stop - start for start, stop in box)
            yield Common(shape, a, _within(a, box), b, _within(b, box))


def _within(piece: Piece, box: list[tuple[int, int]]) -> tuple[slice, ...]:
    """The place of a box of the full array in ``piece.shape``."""
    there, _, _, _, index = piece
    shifts = [axis.start - full.start for axis, full in zip(index, there, strict=True)]
    return tuple(slice(start + shift, stop + shift) for (start, stop), shift in zip(box, shifts, strict=True))


def _view(local: np.ndarray, piece: Piece) -> np.ndarray:
    return local[piece.start : piece.stop].reshape(piece.shape)


def _shape(box: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(axis.stop - axis.start for axis in box)


def _runs(shape: tuple[int, ...], index: tuple[slice, ...], offset: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields the places and lengths of a box's runs of bytes, in an array of ``shape`` whose first byte is at
    ``offset``."""
    inner = len(shape)  # the axes from here on are whole: rows that lie together
    while inner and (index[inner - 1].start, index[inner - 1].stop) == (0, shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    whole = math.prod(shape[inner:]) * itemsize
    if not inner:
        yield offset, whole
        return
    last = index[inner - 1]
    for rows in itertools.product(*(range(axis.start, axis.stop) for axis in index[: inner - 1])):
        start = offset + sum(row * stride for row, stride in zip(rows, strides))
        yield start + last.start * whole, (last.stop - last.start) * whole
