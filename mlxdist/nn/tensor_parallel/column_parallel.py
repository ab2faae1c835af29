"""Linear layers whose outputs are sharded over the ranks: the columns of the matrix in ``x @ W``.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053; sequence-parallel: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..layout.partition import Segments, split_sizes
from ..mappings import copy_to_tensor_parallel_region, gather_from_sequence_parallel_region
from .linear_layers import dims
from .parallel_linear import ParallelLinear, PlainWeight, QuantizedWeight, pair

__all__ = ["ColumnParallelLinear", "QuantizedColumnParallelLinear"]


class _ColumnParallel(ParallelLinear):
    shard_axis = 0
    uneven = False  # whether the outputs need not be a multiple of the ranks

    def _shard_full(
        self,
        full: nn.Module,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        segments: Segments = 1,
        rank_shares: Sequence[float] | None = None,
        multiple: int = 1,
        group: GroupLike | None = None,
    ) -> None:
        group = group_of(group)
        if rank_shares is None and self.uneven:
            rank_shares = [1] * group.size()
        name = f"{type(self).__name__}: output_dims"
        sizes = split_sizes(name, dims(full)[0], group.size(), rank_shares, multiple, segments)
        self._shard(full, sizes, segments, group)
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel

    def enter(self, x: mx.array) -> mx.array:
        """``x``, of the full sequence; rejects an ``x`` that has not all features."""
        if x.shape[-1:] != (self.input_dims,):
            raise InvalidArgument(f"{type(self).__name__}: x must be (..., {self.input_dims}), not {x.shape}")
        if self.sequence_parallel:
            # Its backward pass, a sum_scatter, also sums the gradients of all ranks: no all_sum is needed besides.
            return gather_from_sequence_parallel_region(x, -2, group=self._group)
        return copy_to_tensor_parallel_region(x, group=self._group)

    def leave(self, y: mx.array) -> mx.array:
        """``y``, or all ranks' if ``gather_output``."""
        return self.join_shards(y, -1) if self.gather_output else y


class ColumnParallelLinear(PlainWeight, _ColumnParallel):
    """``nn.Linear`` with its outputs sharded over the ranks: each computes ``sizes[rank]`` of them from the same input.

    Forward: no collective, unless ``gather_output``. Backward: one all_sum of the gradient of the input. The gradients
    of the parameters are this rank's shard of the full layer's.

    Input: shape ``(..., input_dims)``, the same on all ranks; with ``sequence_parallel`` this rank's shard of it along
    the axis -2, equally long on all ranks. Output: ``(..., sizes[rank])``, with ``gather_output`` ``(...,
    output_dims)``. The dtype is that of ``nn.Linear``.

    Args:
        input_dims: features of the input.
        output_dims: features of the output, on all ranks together.
        bias: as in ``nn.Linear``; it is sharded like the outputs.
        gather_output: return all outputs on all ranks, by one all_gather.
        sequence_parallel: the input is sharded along the sequence: one all_gather before the product, and a sum_scatter
            in the backward pass.
        segments: of the outputs, each of which is sharded by itself: ``(32, 8, 8)`` for 32 heads of queries and 8 of
            keys and values in one matrix, 2 for merged gate and up.
        rank_shares: one positive number a rank: ``[2, 1]`` gives the first rank two thirds.
        multiple: every rank holds a multiple of it of each segment; the dimension of a head.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    The initial values are this rank's shard of those of ``nn.Linear``: use the same seed on all ranks.

    Raises:
        InvalidArgument: ``output_dims`` cannot be sharded so, see :func:`mlxdist.nn.layout.partition.split_sizes`; in a
            call: the input has not ``input_dims`` features. The same on every rank, before any collective.
        Mismatch: with ``sequence_parallel``, where the result is evaluated: the ranks' shards of the sequence differ in
            length.
    """


class QuantizedColumnParallelLinear(QuantizedWeight, _ColumnParallel):
    """``nn.QuantizedLinear`` with its outputs sharded over the ranks; otherwise as :class:`ColumnParallelLinear`.

    The parameters are frozen; the gradient of the input is the full layer's.

    Args:
        group_size, bits, mode: as in ``nn.QuantizedLinear``; all that MLX has. Each output has its own quantization
            groups, so that these do not limit how the outputs can be sharded.
    """


pair(ColumnParallelLinear, QuantizedColumnParallelLinear)
