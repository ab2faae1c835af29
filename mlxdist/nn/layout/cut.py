"""How one rank's array is a part of a full one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.runtime.group.group import Group

from .partition import slice_along

__all__ = ["Cut", "Piece", "Range", "overlapping"]

Range = tuple[int, int]


class Piece(NamedTuple):
    """A box of the full array, and where a rank has it: in ``local.reshape(-1)[start:stop].reshape(shape)[within]``."""

    box: tuple[slice, ...]  # in the full array
    start: int
    stop: int
    shape: tuple[int, ...]
    within: tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """A rank's part of one full array: along each axis some ranges of it, joined in this order.

    Attributes:
        shape: of the full array.
        ranges: of each axis, what this rank holds: ``((start, stop), ...)``. A fused layer has several; the same one
            may come more than once (KV heads of which each query head has a copy).
        groups: the ranks that hold other parts: one group for each way in which the array is cut. () if it is full.
        copies: for each axis, ranges of the local array, from 0, that an earlier rank holds, too, or that this rank
            holds before: each element is counted where it is held first. ``None``: no rank holds a copy.
        flat: (start, stop) of this rank's elements in the joined ranges, flattened; ``None`` for all. The local
            array then has one dimension.
        length: of the local array where it is flat: zeros follow, up to the length that all ranks have.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    groups: tuple[Group | mx.distributed.Group, ...] = ()
    copies: tuple[tuple[Range, ...] | None, ...] = ()
    flat: Range | None = None
    length: int = 0

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Cut":
        """The cut of an array that all ranks hold in full."""
        return cls(tuple(shape), tuple(((0, length),) for length in shape), (), (None,) * len(shape))

    def along(self, axis: int, ranges: Sequence[Sequence[Range]], group: Group | mx.distributed.Group) -> "Cut":
        """Cut along an axis that is full: ``ranges`` of each rank of ``group``."""
        if group.size() == 1:
            return self
        axis, rank = axis % len(self.shape), group.rank()
        mine = tuple((int(start), int(stop)) for start, stop in ranges[rank])
        taken = np.zeros(self.shape[axis], bool)
        for start, stop in (one for before in ranges[:rank] for one in before):
            taken[start:stop] = True
        copies, held = [], 0
        for start, stop in mine:
            copies += [(held + first, held + last) for first, last in _runs(taken[start:stop])]
            taken[start:stop] = True
            held += stop - start
        put = lambda values, value: (*values[:axis], value, *values[axis + 1 :])
        has_copies = overlapping(one for of_rank in ranges for one in of_rank)
        return replace(
            self,
            ranges=put(self.ranges, mine),
            groups=(*self.groups, group),
            copies=put(self.copies, tuple(copies) if has_copies else None),
        )

    def flattened(self, begin: int, end: int, length: int, group: Group | mx.distributed.Group) -> "Cut":
        """A further cut: this rank of ``group`` holds elements ``begin`` to ``end`` of this cut's array, flattened, in
        an array of ``length`` with zeros at the end."""
        groups = self.groups if group.size() == 1 else (*self.groups, group)
        return replace(self, flat=(begin, end), length=length, groups=groups)

    @property
    def is_full(self) -> bool:
        """Whether the local array is the full one."""
        return not self.groups and self.flat is None

    @property
    def joined(self) -> tuple[int, ...]:
        """The shape of what the ranges give, before it is flattened."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the array that this rank holds."""
        return self.joined if self.flat is None else (self.length,)

    def take(self, full: mx.array) -> mx.array:
        """This rank's array of the full one; lazy."""
        for axis, ranges in enumerate(self.ranges):
            if ranges != ((0, self.shape[axis]),):
                full = slice_along(full, axis, [slice(*one) for one in ranges])
        if self.flat is None:
            # A copy, so that the full array can be freed.
            return full if self.is_full else mx.contiguous(full)
        begin, end = self.flat
        return mx.pad(full.reshape(-1)[begin:end], (0, self.length - (end - begin)))

    def counted(self) -> np.ndarray | None:
        """Which elements of the local array this rank counts, bool of a shape that broadcasts to its own; ``None``:
        each rank counts all of its elements. Padding is zeros, and may be counted.

        ``None`` comes on all ranks or on none, so that what is computed with it has one graph on all of them.
        """
        if all(copies is None for copies in self.copies):
            return None
        mask = np.ones((1,) * len(self.shape), bool)
        for axis, copies in enumerate(self.copies):
            if copies is not None:
                along = np.ones(self.joined[axis], bool)
                for start, stop in copies:
                    along[start:stop] = False
                mask = mask & along.reshape(-1, *(1,) * (len(self.shape) - axis - 1))
        if self.flat is None:
            return mask
        begin, end = self.flat
        mask = np.broadcast_to(mask, self.joined).reshape(-1)[begin:end]
        return np.pad(mask, (0, self.length - (end - begin)))

    def pieces(self) -> Iterator[Piece]:
        """The boxes of the full array that this rank holds, and where. None is empty."""
        if self.flat is None:
            shape = self.joined
            for box, index in self._boxes((0,) * len(shape), shape):
                yield Piece(box, 0, prod(shape), shape, index)
            return
        start = 0
        for low, high in _boxes_of(self.joined, *self.flat):
            shape = tuple(stop - begin for begin, stop in zip(low, high, strict=True))
            stop = start + prod(shape)
            for box, index in self._boxes(low, high):
                yield Piece(box, start, stop, shape, index)
            start = stop

    def put(self, full: np.ndarray, local: np.ndarray) -> None:
        """Writes what this rank holds into the full array."""
        for box, start, stop, shape, within in self.pieces():
            full[box] = local.reshape(-1)[start:stop].reshape(shape)[within]

    def _boxes(self, low: Sequence[int], high: Sequence[int]) -> Iterator[tuple[tuple, tuple]]:
        """The boxes of the full array in a box of the joined array, and where in that box each of them is."""
        axes = []
        for ranges, first, last in zip(self.ranges, low, high, strict=True):
            held, axis = 0, []
            for start, stop in ranges:
                # From `held` on in the joined array.
                begin, end = max(first, held), min(last, held + stop - start)
                if begin < end:
                    axis.append((slice(start + begin - held, start + end - held), slice(begin - first, end - first)))
                held += stop - start
            axes.append(axis)
        for each in product(*axes):
            yield tuple(box for box, _ in each), tuple(index for _, index in each)


def overlapping(ranges: Iterable[Range]) -> bool:
    """Whether two of the ranges have something in common."""
    return any(before[1] > after[0] for before, after in pairwise(sorted(ranges)))


def _runs(mask: np.ndarray) -> list[Range]:
    """The runs of true elements, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``begin`` to ``end`` of a flattened array as boxes of it: the lowest indices, and those behind the
    highest. At most 2 * axes - 1."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows
    if first > last:  # within one row
        row = last
        parts = [(row, begin - row * inner, end - row * inner)]
    else:
        parts = [(first - 1, begin - (first - 1) * inner, inner)] if begin < first * inner else []
    for row, start, stop in parts:
        for low, high in _boxes_of(shape[1:], start, stop):
            yield (row, *low), (row + 1, *high)
    if first > last:
        return
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last, *shape[1:])
    if last * inner < end:
        for low, high in _boxes_of(shape[1:], 0, end - last * inner):
            yield (last, *low), (last + 1, *high)
