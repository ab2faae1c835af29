"""The parameters of a model, and what the ranks hold of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import mlx.core as mx

from mlxdist.nn.layout.cut import Cut, Range, overlapping
from mlxdist.nn.layout.partition import slice_along
from mlxdist.runtime.group.group import Group

__all__ = ["KINDS", "Shard", "overlap", "runs_of"]

KINDS = ("column", "row", "vocab", "experts", "full")


@dataclass(frozen=True)
class Shard:
    """How the ranks hold one parameter.

    Attributes:
        path: where it is in the model: "model.layers.0.self_attn.q_proj.weight".
        kind: "column": a rank has some outputs of a layer (also: some heads); "row": some of its inputs; "vocab": some
            words; "experts": some experts; "full": every rank has all of it.
        shape: of the parameter that is not sharded.
        dtype: its name: "float32".
        axis: along which it is sharded; 0 if it is not.
        ranges: for each rank, which pieces along the axis it has, in this order: ``((start, stop), ...)``. Fused layers
            have several pieces; a piece may be on more than one rank (KV heads where there are fewer than ranks).
        scale: what every rank multiplies it by where it uses it, for what is added up over the ranks and must count
            once (a bias of experts that are sharded inside): 1 / ranks. Otherwise 1.
        reason: why it stays unsharded; "" where it is sharded.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = 0
    ranges: tuple[tuple[Range, ...], ...] = ()
    scale: float = 1.0
    reason: str = ""

    @property
    def sizes(self) -> list[int]:
        """How much of the axis each rank holds; [] if the parameter is full."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.ranges]

    @property
    def segments(self) -> tuple[int, ...]:
        """The lengths of the pieces along the axis that are sharded each by itself: one, if it is not a fused layer."""
        if not self.ranges:
            return (self.shape[self.axis],) if self.shape else ()
        pieces = zip(*self.ranges, strict=True)
        return tuple(sum(stop - start for start, stop in set(ranges)) for ranges in pieces)

    def slices(self, rank: int, length: int | None = None) -> list[slice]:
        """The slices along the axis that a rank has, joined in this order.

        With ``length``: the slices of an axis of that length which is sharded alike, such as the inputs of a quantized
        layer before they are packed.
        """
        if not self.ranges:
            return [slice(0, self.shape[self.axis])] if self.shape else []
        held = self.shape[self.axis]
        length = held if length is None else length
        # Exact: ranges are whole groups and words, so `length` divides in the same proportion.
        return [slice(start * length // held, stop * length // held) for start, stop in self.ranges[rank]]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        if not self.ranges:
            return self.shape
        return (*self.shape[: self.axis], self.sizes[rank], *self.shape[self.axis + 1 :])

    def bytes(self, rank: int) -> int:
        """How many bytes a rank holds."""
        return prod(self.shape_on(rank)) * getattr(mx, self.dtype).size

    @property
    def full_bytes(self) -> int:
        """How many bytes the full parameter has."""
        return prod(self.shape) * getattr(mx, self.dtype).size

    def cut(self, local: Sequence[int], axis: int, *, group: Group) -> Cut:
        """The cut along ``axis`` of an array that is sharded alike, such as a quantized weight's or an adapter's.

        ``local``: the shape of this rank's part of it. ``group``: the ranks of a row of the grid.
        """
        if not self.ranges:
            return Cut.full(local)
        length = local[axis] * self.shape[self.axis] // self.sizes[group.rank()]
        ranges = [[(here.start, here.stop) for here in self.slices(rank, length)] for rank in range(group.size())]
        return Cut.full((*local[:axis], length, *local[axis + 1 :])).along(axis, ranges, group)

    def take(self, x: mx.array, rank: int) -> mx.array:
        """A rank's shard of ``x``, the full parameter; lazy."""
        return mx.contiguous(slice_along(x, self.axis, self.slices(rank))) if self.ranges else x


def overlap(shard: Shard, ranks: int) -> bool:
    """Whether some of the first ``ranks``, a row of the grid, hold the same piece."""
    return overlapping(piece for held in shard.ranges[:ranks] for piece in held)


def runs_of(numbers: Iterable[int]) -> list[Range]:
    """[0, 1, 2, 8, 9] as [(0, 3), (8, 10)]."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return [(run[0], run[-1] + 1) for run in runs]
