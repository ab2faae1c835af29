"""Linear layers whose inputs are sharded over the ranks: the rows of the matrix in ``x @ W``.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053; sequence-parallel: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence
from math import lcm

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..layout.partition import scatter, split_sizes
from ..mappings import (
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from .linear_layers import dims, quantization, quantization_unit
from .parallel_linear import ParallelLinear, PlainWeight, QuantizedWeight, pair

__all__ = ["QuantizedRowParallelLinear", "RowParallelLinear"]


class _RowParallel(ParallelLinear):
    shard_axis = 1

    def _shard_full(
        self,
        full: nn.Module,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        rank_shares: Sequence[float] | None = None,
        multiple: int = 1,
        group: GroupLike | None = None,
    ) -> None:
        group = group_of(group)
        name = f"{type(self).__name__}: input_dims"
        if quantization(full):
            unit = quantization_unit(full)
            name += f" in quantization groups of {unit}"
            multiple = lcm(multiple, unit)
        sizes = split_sizes(name, dims(full)[1], group.size(), rank_shares, multiple)
        self._shard(full, sizes, 1, group)
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel

    def enter(self, x: mx.array) -> mx.array:
        """This rank's features of ``x``; rejects an ``x`` that is not what ``input_is_parallel`` says."""
        expected = self._sizes[self._group.rank()] if self.input_is_parallel else self.input_dims
        if x.shape[-1:] != (expected,):
            form = "its shard of the features" if self.input_is_parallel else "all features"
            raise InvalidArgument(
                f"{type(self).__name__}: with input_is_parallel={self.input_is_parallel} rank {self._group.rank()} "
                f"takes {form}, (..., {expected}), not {x.shape}"
            )
        if self.sequence_parallel and (x.ndim < 2 or x.shape[-2] % self._group.size() != 0):
            raise InvalidArgument(
                f"{type(self).__name__}: with sequence_parallel the sequence, axis -2 of shape {x.shape}, is sharded "
                f"over {self._group.size()} ranks equally; pad it to a multiple of that"
            )
        return x if self.input_is_parallel else scatter(x, -1, self._sizes, self._group)

    def leave(self, y: mx.array) -> mx.array:
        """The sum of all ranks' ``y``, or this rank's shard of its sequence, and the bias."""
        if not self.sequence_parallel:
            y = reduce_from_tensor_parallel_region(y, group=self._group)
            return y + self["bias"] if "bias" in self else y
        y = reduce_scatter_to_sequence_parallel_region(y, -2, group=self._group)
        # Each rank adds it to another shard of the sequence: its gradient is the sum over all of them.
        return y + copy_to_tensor_parallel_region(self["bias"], group=self._group) if "bias" in self else y


class RowParallelLinear(PlainWeight, _RowParallel):
    """``nn.Linear`` with its inputs sharded over the ranks: each has ``sizes[rank]`` of them, and the results are
    added.

    Forward: one all_sum, after which every rank adds the bias. Backward: no collective, unless the input was not
    sharded before. The gradients of the parameters are this rank's shard of the full layer's; that of the bias is full.

    Input: shape ``(..., sizes[rank])``, or ``(..., input_dims)`` and the same on all ranks with
    ``input_is_parallel=False``. Output: ``(..., output_dims)``, the same on all ranks; with ``sequence_parallel`` this
    rank's shard of it along the axis -2. The dtype is that of ``nn.Linear``.

    Args:
        input_dims: features of the input, on all ranks together.
        output_dims: features of the output.
        bias: as in ``nn.Linear``; every rank holds all of it.
        input_is_parallel: the input is sharded already, as a column-parallel layer with the same ``rank_shares`` and
            ``multiple`` leaves it.
        sequence_parallel: one sum_scatter instead of the all_sum, and an all_gather in the backward pass. Another
            all_sum in the backward pass gives the bias its gradient.
        rank_shares: one positive number a rank: ``[2, 1]`` gives the first rank two thirds.
        multiple: every rank holds a multiple of it; the dimension of a head.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    The initial values are this rank's shard of those of ``nn.Linear``: use the same seed on all ranks.

    Raises:
        InvalidArgument: ``input_dims`` cannot be sharded so, see :func:`mlxdist.nn.layout.partition.split_sizes`; in a
            call: the input is not sharded as ``input_is_parallel`` says, or with ``sequence_parallel`` the sequence is
            no multiple of the ranks. The same on every rank, before any collective.
    """


class QuantizedRowParallelLinear(QuantizedWeight, _RowParallel):
    """``nn.QuantizedLinear`` with its inputs sharded over the ranks; otherwise as :class:`RowParallelLinear`.

    Quantization groups, and the words of 32 bits that values of 3, 5 and 6 bits are packed in, stay unsharded: every
    rank holds a multiple of both. The parameters are frozen; the gradient of the input is the full layer's.

    Args:
        group_size, bits, mode: as in ``nn.QuantizedLinear``; all that MLX has.
    """


pair(RowParallelLinear, QuantizedRowParallelLinear)
