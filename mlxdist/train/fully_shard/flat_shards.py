"""Parameters as one flat vector, of which each rank holds an equal shard: any shape, and one message for all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

__all__ = ["FlatShards", "Slot", "slots_of"]


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a parameter is: ``container[key]``, in ``module`` itself or in a list or dict of arrays that it has."""

    module: nn.Module
    path: str  # in the module
    container: Any
    key: Any

    @property
    def array(self) -> mx.array:
        return self.container[self.key]

    def put(self, array: mx.array) -> None:
        self.container[self.key] = array

    @property
    def is_trained(self) -> bool:
        return self.name not in self.module._no_grad

    @cached_property
    def name(self) -> str:
        """The name of the module's own entry that the parameter is in; modules freeze by these names."""
        return self.path.partition(".")[0]


def slots_of(module: nn.Module) -> Iterator[Slot]:
    """The parameters that a module has itself, and not by way of another module."""
    for name, value in module.items():
        if not name.startswith("_"):
            yield from _slots(module, name, module, name, value)


def _slots(module: nn.Module, path: str, container: Any, key: Any, value: Any) -> Iterator[Slot]:
    if isinstance(value, mx.array):
        yield Slot(module, path, container, key)
    elif isinstance(value, dict | list) and not isinstance(value, nn.Module):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _slots(module, f"{path}.{key}", value, key, inner)


class FlatShards:
    """Parameters of one dtype, flattened one after the other; rank r holds elements ``r * length`` and the next ones.

    So a rank holds all of some parameters, a part of at most two, and nothing of the others: its array has size 0
    there. The shards of all ranks, joined, are the vector itself, and every parameter is a view of it. Zeros fill it up
    to a multiple of the ranks: fewer elements than there are ranks, however many parameters there are.

    Attributes:
        slots: the parameters, in the order in which they are in the vector.
        dtype: the dtype of all of them.
        shapes: the shapes of the full parameters.
        length: the elements of the shard that each rank holds.
        ranges: for each parameter, from where to where this rank holds its elements.
    """

    def __init__(self, slots: Sequence[Slot], rank: int, ranks: int) -> None:
        self.slots = list(slots)
        self.dtype = slots[0].array.dtype
        self.shapes = [slot.array.shape for slot in slots]
        sizes = [prod(shape) for shape in self.shapes]
        self._ranks = ranks
        self.length = -(-sum(sizes) // ranks)
        self.ranges = []
        begin = 0
        for size in sizes:
            low, high = (min(max(r * self.length - begin, 0), size) for r in (rank, rank + 1))
            self.ranges.append((low, high))
            begin += size
        self._ends = list(accumulate(sizes))
        self._ends_of_shards = list(accumulate(high - low for low, high in self.ranges))
        # The graph must be the same on all ranks, whatever parts of it are empty: MLX derives the order of evaluation
        # from it. So zeros are joined to the parts on all ranks or on none.
        self._fills_up = sum(sizes) % ranks > 0

    def shard(self) -> None:
        """Puts this rank's shards where the full parameters are, and frees those."""
        for slot, (low, high) in zip(self.slots, self.ranges):
            # Where it would be a view of the full parameter, contiguous() copies.
            slot.put(mx.contiguous(slot.array.reshape(-1)[low:high]))
        mx.eval([slot.array for slot in self.slots])

    def shards(self) -> list[mx.array]:
        return [slot.array for slot in self.slots]

    def pack_shards(self, shards: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The vector that this rank sends: shape (length,)."""
        return self._joined([array.astype(dtype) for array in shards], self.length)

    def unpack(self, vector: mx.array) -> list[mx.array]:
        """The full parameters, as views of the vector of shape (ranks * length,)."""
        return [part.reshape(shape) for part, shape in zip(mx.split(vector, self._ends), self.shapes)]

    def pack(self, arrays: Sequence[mx.array]) -> mx.array:
        """The vector of arrays of the shapes of the full parameters: shape (ranks * length,)."""
        return self._joined(arrays, self._ranks * self.length)

    def unpack_shards(self, shard: mx.array) -> list[mx.array]:
        """This rank's shard of each parameter, as views of an array of shape (length,)."""
        *shards, _ = mx.split(shard, self._ends_of_shards)
        return shards

    def _joined(self, arrays: Sequence[mx.array], length: int) -> mx.array:
        parts = [array.reshape(-1) for array in arrays]
        if self._fills_up:
            parts.append(mx.zeros((length - sum(array.size for array in arrays),), arrays[0].dtype))
        return mx.concatenate(parts)
