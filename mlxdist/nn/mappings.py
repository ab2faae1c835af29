"""The functions at the boundaries of the parallel regions of a model, with Megatron-LM's names.

Each function is named for its forward pass, and has the gradient with which the shards of the ranks train as the full
model would. They come in pairs: each is the backward pass of the other.

    copy_to_tensor_parallel_region          reduce_from_tensor_parallel_region            itself - sum of all ranks
    scatter_to_tensor_parallel_region       gather_from_tensor_parallel_region            this rank's shard - all shards
    gather_from_sequence_parallel_region    reduce_scatter_to_sequence_parallel_region    all shards - shard of the sum

The tensor-parallel ones (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", arXiv:1909.08053) stand between a part of the model where all ranks hold the same activations, and
also the same gradients of them, and one where each holds its own. The sequence-parallel ones (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198) stand between one where each rank
holds a shard of the sequence and one where all hold all of it, with gradients of their own: they are adjoint to each
other in the plain sense.

``x`` has the dtypes of :mod:`mlxdist.runtime.operations.collectives` and any shape, the same on all ranks; the result
has its dtype, and its shape but for ``axis``, which is as many times longer or shorter as there are ranks where shards
are joined or split.

All are lazy and work inside ``mx.compile`` and ``mx.grad``. In a group of one they change nothing. ``group`` is a
:class:`mlxdist.Group`; ``None`` is the group of ``mlxdist.init()``.

Raises, all of them:
    InvalidArgument: ``axis`` is none of ``x``, or cannot be split into as many equal shards as there are ranks.
    Also the errors of :mod:`mlxdist.runtime.operations.collectives`, where the result is evaluated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike, engine_of
from mlxdist.runtime.label import label_scope, next_label, next_text
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather, all_sum, sum_scatter

__all__ = [
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "with_backward",
    "with_gradients",
    "without_gradient",
]

_Unary = Callable[[mx.array], mx.array]


def copy_to_tensor_parallel_region(x: mx.array, *, group: GroupLike | None = None) -> mx.array:
    """``x`` itself. Backward: the sum of all ranks' cotangents. Before a layer whose weights are sharded by columns."""
    group = group_of(group)
    if group.size() == 1:
        return x
    return with_gradients(lambda cotangents: [all_sum(cotangents[0], group=group)], [x])[0]


def with_gradients(
    backward: Callable[[Sequence[mx.array]], Sequence[mx.array]], arrays: Sequence[mx.array]
) -> Sequence[mx.array]:
    """The arrays themselves. Backward: what ``backward`` makes of the cotangents of all of them.

    Where MLX traces nothing that costs nothing.
    """
    if not arrays or not bridge.traces():
        return arrays
    return _custom(lambda *arrays: list(arrays), lambda cotangents: tuple(backward(cotangents)))(*arrays)


def with_backward(forward: _Unary, backward: _Unary, x: mx.array) -> mx.array:
    """``forward(x)``. Backward: ``backward`` of the cotangent. Where MLX traces nothing, the forward pass alone."""
    if not bridge.traces():
        return forward(x)
    return _custom(forward, backward)(x)


def _custom(forward: Callable[..., Any], backward: Callable[[Any], Any]) -> Any:
    """A function ``forward`` with the gradient ``backward``, whose operations have the label of this place."""
    where = next_text()

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        with label_scope(where and f"{where} backward"):
            return backward(cotangents)

    function: Any = mx.custom_function(forward)
    function.vjp(vjp)
    return function


def without_gradient(x: mx.array, reason: str) -> mx.array:
    """``x`` itself. Backward: an :class:`InvalidArgument` with ``reason``."""

    def refuse(cotangents: Sequence[mx.array]) -> Sequence[mx.array]:
        raise InvalidArgument(reason)

    return with_gradients(refuse, [x])[0]


def reduce_from_tensor_parallel_region(x: mx.array, *, group: GroupLike | None = None) -> mx.array:
    """The sum of all ranks' ``x``. Backward: the cotangent itself. After a layer whose weights are sharded by rows."""
    return all_sum(x, group=group)  # MLX's all_sum has this gradient


def scatter_to_tensor_parallel_region(x: mx.array, axis: int = -1, *, group: GroupLike | None = None) -> mx.array:
    """This rank's shard of ``x`` along ``axis``. Backward: all ranks' cotangents, joined."""
    group = group_of(group)
    axis = _axis("scatter_to_tensor_parallel_region", x, axis, ranks=group.size())
    if group.size() == 1:
        return x
    return with_backward(
        lambda x: mx.split(x, group.size(), axis)[group.rank()], lambda y: _along(axis, all_gather, y, group), x
    )


def gather_from_tensor_parallel_region(x: mx.array, axis: int = -1, *, group: GroupLike | None = None) -> mx.array:
    """All ranks' ``x``, joined along ``axis``. Backward: this rank's shard of the cotangent."""
    # all_gather has MLX's gradient, which is this one.
    return _along(_axis("gather_from_tensor_parallel_region", x, axis), all_gather, x, group_of(group))


def gather_from_sequence_parallel_region(x: mx.array, axis: int = 0, *, group: GroupLike | None = None) -> mx.array:
    """All ranks' ``x``, joined along ``axis``. Backward: this rank's shard of the sum of all ranks' cotangents."""
    axis = _axis("gather_from_sequence_parallel_region", x, axis)
    return _along(axis, _gather_shards, x, group_of(group))


def reduce_scatter_to_sequence_parallel_region(
    x: mx.array, axis: int = 0, *, group: GroupLike | None = None
) -> mx.array:
    """This rank's shard along ``axis`` of the sum of all ranks' ``x``. Backward: all ranks' cotangents, joined."""
    group = group_of(group)
    axis = _axis("reduce_scatter_to_sequence_parallel_region", x, axis, ranks=group.size())
    return _along(axis, sum_scatter, x, group)


def _gather_shards(x: mx.array, group: Group) -> mx.array:
    """Gathers as all_gather, with the plain gradient, the sum_scatter, instead of MLX's."""
    gathered: mx.array = bridge.all_gather(x, engine_of(group).connection, mlx_gradient=False, label=next_label())
    return gathered


def _axis(name: str, x: mx.array, axis: int, ranks: int = 1) -> int:
    """``axis`` from 0, which is to be split into ``ranks``."""
    if not -x.ndim <= axis < x.ndim:
        raise InvalidArgument(f"{name}: axis is {axis}, but x has shape {x.shape}")
    if x.shape[axis] % ranks != 0:
        raise InvalidArgument(f"{name}: dimension {axis} of shape {x.shape} is not a multiple of the {ranks} ranks")
    return axis % x.ndim


def _along(axis: int, collective: Callable[..., mx.array], x: mx.array, group: Group) -> mx.array:
    """A collective that splits and joins along the first axis, on another one."""
    return mx.swapaxes(collective(mx.swapaxes(x, 0, axis), group=group), 0, axis)
