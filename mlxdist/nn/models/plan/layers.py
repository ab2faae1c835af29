"""The linear layers of blocks that are sharded: MLX's, which take adapters and leave to the parallel region of their
block what is done once for all of it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.interception import become
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.layout.partition import copy_to_holders, slice_along
from mlxdist.nn.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from mlxdist.nn.tensor_parallel.linear_layers import COLUMN_SHARDED, LINEARS, ROW_SHARDED, mapped, unpacked
from mlxdist.nn.tensor_parallel.lora import SWITCH_LINEARS, ShardedLinear, draw_full
from mlxdist.runtime.native import bridge

from .adapters import adapter_shard
from .parameters import Shard, overlap

__all__ = ["COLUMNS", "put_in"]


class _Inner(ShardedLinear):
    """The base of linear layers in a block that is sharded."""

    _shard: Shard  # its weight, of shape (outputs, inputs); quantized the inputs are packed
    _inside: Any  # the parallel region of the block
    _overlaps: bool  # whether several ranks hold the same piece of it

    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "_Inner":
        if quantized is None and "scales" in self:
            raise InvalidArgument(
                f"a {type(self).__name__} of a model that is sharded stays quantized: fuse() it as it is"
            )
        values = [weight] if quantized is None else mx.quantize(weight, **quantized)
        changed = dict(zip(("weight", "scales", "biases"), values))
        return mapped(self, lambda name, array: changed.get(name, array))

    def enter(self, x: mx.array) -> mx.array:
        return x if self.shard_axis == 1 or self._entered else copy_to_tensor_parallel_region(x, group=self._group)

    def leave(self, y: mx.array) -> mx.array:
        if self.shard_axis == 0:
            return y
        y = reduce_from_tensor_parallel_region(y, group=self._group)
        return y + self["bias"] if "bias" in self else y

    def adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        if not self._inside.inside:  # which has the sum of the gradients of what all ranks hold
            lora_a, lora_b = super().adapter(lora_a, lora_b)
        if self.shard_axis == 0 and self._overlaps:
            lora_b = copy_to_holders(lora_b, self._pieces(self._group.rank()), self.output_dims, 1, self._group)
        return lora_a, lora_b

    def take_shard(self, x: mx.array, axis: int) -> mx.array:
        return mx.contiguous(slice_along(x, axis % x.ndim, self._pieces(self._group.rank())))

    def join_shards(self, x: mx.array, axis: int) -> mx.array:
        """Joins all ranks' shards. A piece that several ranks hold is taken from the first of them."""
        x = x.swapaxes(axis, -1)
        owners = np.empty(self._length, np.int64)
        for rank in reversed(range(self._group.size())):
            for piece in self._pieces(rank):
                owners[piece] = rank
        # By a sum: pieces of ranks may overlap and differ in size, which no all_gather can join.
        full, start = mx.zeros((*x.shape[:-1], self._length), x.dtype), 0
        for piece in self._pieces(self._group.rank()):
            stop = start + piece.stop - piece.start
            full[..., piece] = mx.where(mx.array(owners[piece] == self._group.rank()), x[..., start:stop], 0)
            start = stop
        return reduce_from_tensor_parallel_region(full, group=self._group).swapaxes(axis, -1)

    def cut(self, local: Sequence[int], axis: int) -> Cut:
        return self._shard.cut(local, axis, group=self._group)

    @property
    def _entered(self) -> bool:
        """Whether the parallel region has copied what the layer is called with."""
        return self._inside.enters and self._inside.inside

    def _pieces(self, rank: int) -> Sequence[slice]:
        """Which features of the sharded dimension a rank has."""
        return self._shard.slices(rank, self._length)

    @property
    def _length(self) -> int:
        """The full length of the sharded dimension."""
        return (self.output_dims, self.input_dims)[self.shard_axis]


def _call_column(self: Any, x: mx.array) -> mx.array:
    """The gradient of the input is summed where its block begins, if the block is called."""
    kind = nn.QuantizedLinear if "scales" in self else nn.Linear
    return kind.__call__(self, x if not bridge.traces() else self.enter(x))


# Without an adapter a row-parallel layer is MLX's.
COLUMNS: dict[type, type] = {
    kind: type(f"_Inner{kind.__name__}", (_Inner, kind), {"__call__": _call_column}) for kind in COLUMN_SHARDED
}
_KINDS = COLUMNS | {kind: type(f"_Inner{kind.__name__}", (_Inner, kind), {}) for kind in ROW_SHARDED}


def put_in(layer: nn.Module, shard: Shard, region: Any) -> None:
    """Makes one of MLX's layers one of a block, with its parallel region, and sharded ones that a block sums up for
    take adapters. Others stay as they are."""
    if type(layer) in _KINDS:
        become(layer, _KINDS[type(layer)])
        layer._shard, layer._inside, layer._group = shard, region, region.group
        layer.shard_axis, (layer.output_dims, columns) = shard.axis, shard.shape
        layer.input_dims = unpacked(layer, columns)
        layer._overlaps = overlap(shard, region.group.size())
    elif shard.ranges and (type(layer) in LINEARS or type(layer).__name__ in SWITCH_LINEARS):
        *rows, columns = shard.shape
        draw_full(layer, (*rows, unpacked(layer, columns)), partial(adapter_shard, shard, rank=region.rank))
