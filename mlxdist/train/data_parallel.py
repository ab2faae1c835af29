"""Data-parallel training: every rank computes the gradients of its own share of a batch, then all average them."""

from functools import lru_cache, partial
from math import inf
from numbers import Real
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike, engine_of
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.ordering import Order

from .gradient_buckets import DEFAULT_BUCKET_BYTES, BucketPlan, Gradient, check_reduce_dtype

__all__ = ["all_reduce_grads", "average_gradients"]


def average_gradients(
    gradients: Any,
    group: GroupLike | None = None,
    all_reduce_size: int = DEFAULT_BUCKET_BYTES,
    communication_stream: mx.Stream | None = None,
    *,
    reduce_dtype: mx.Dtype | None = None,
    weight: float | mx.array | None = None,
) -> Any:
    """Averages a tree of gradients over the ranks of a group, in few large messages: MLX's ``nn.average_gradients``.

    Also by its name in guides for MLX, ``all_reduce_grads``.

    Leaves that travel in one dtype are packed, in the order of their paths in the tree, into flat buckets of at most
    ``all_reduce_size`` bytes; each bucket is one ``all_sum``. A leaf of that size or more travels alone. Nothing is
    evaluated: the result is lazy, as that of any operation of MLX, and works inside ``mx.compile``. A hash of all
    paths, shapes and dtypes is made once for each structure, and compared where the ranks compare the shape of each
    ``all_sum``: in its first message, which has room for it. :func:`value_and_grad` averages while it still computes.

    Args:
        gradients: a tree (dicts, lists, tuples) whose leaves are floating point or complex ``mx.array`` of any shape,
            such as the gradients of ``nn.value_and_grad``. Paths, shapes and dtypes, and the options, must be the same
            on all ranks.
        group: the ranks to average over; ``None`` is the group of ``mlxdist.init()``.
        all_reduce_size: how many bytes share one message at most; 32 MiB by default. At 0, each leaf travels alone.
        communication_stream: of the CPU, for the communication; ``None``: MLX's default.
        reduce_dtype: in which leaves travel and are added up. ``None``: those of float16 and bfloat16 in float32, the
            others in their own. Complex leaves always keep theirs.
        weight: what this rank's gradients count, such as its number of tokens: a number from 0, or an ``mx.array`` of
            one element. The average is then that of one process which has all tokens. A rank of weight 0 adds nothing,
            not even NaN. ``None`` on all ranks: all count the same. It takes one more message, of 4 bytes.

    Returns:
        A tree of the same structure, shapes and dtypes. Every rank holds bitwise the same values: the sum of all
        ranks, in ``reduce_dtype``, divided by the number of ranks or the sum of weights, then rounded to the leaf's
        dtype. On a group of one, ``gradients`` itself.

    Raises:
        InvalidArgument: a leaf is not an ``mx.array``, or neither floating point nor complex; an option has no such
            value. Errors of :func:`mlxdist.all_sum` are raised where the result is evaluated: a Mismatch also where
            trees of equal sizes have other paths, shapes or dtypes, or options differ.
    """
    flat: Any = tree_flatten(gradients)
    for path, leaf in flat:
        _require_gradient(path, leaf)
    check_reduce_dtype("average_gradients", reduce_dtype)
    weight = None if weight is None else _checked_weight(weight)
    group = group_of(group)
    if group.size() == 1:
        return gradients
    described = tuple(Gradient(path, tuple(leaf.shape), leaf.dtype) for path, leaf in flat)
    plan, structure = _planned(described, all_reduce_size, reduce_dtype, weight is not None)
    compared = engine_of(group).connection.mlx_group(-1.0, structure)

    total: Any = group.size()
    # Ranks may evaluate parts of the result in different orders; the messages still leave in one.
    order = Order(communication_stream)
    add_up: Any = partial(mx.distributed.all_sum, group=compared, stream=communication_stream)
    if weight is not None:
        total = order.carry_out(add_up, weight)
    arrays = {number: leaf for number, (_, leaf) in enumerate(flat)}
    for bucket in plan.buckets:
        packed = plan.pack(bucket, arrays)
        if weight is not None:
            packed = mx.where(weight > 0, packed * weight, mx.zeros((), packed.dtype))
        summed = order.carry_out(add_up, packed.astype(bucket.wire_dtype))
        plan.unpack(bucket, summed.astype(bucket.sum_dtype) / total, arrays)
    averages = iter(arrays[number] for number in range(len(flat)))
    return tree_map(lambda _: next(averages), gradients)


all_reduce_grads = average_gradients


@lru_cache(maxsize=64)
def _planned(
    gradients: tuple[Gradient, ...], all_reduce_size: int, reduce_dtype: mx.Dtype | None, weighted: bool
) -> tuple[BucketPlan, int]:
    """A plan with its structure. It goes by paths, since two ranks may have built their dicts in different orders."""
    order = sorted(range(len(gradients)), key=lambda number: gradients[number].path)
    plan = BucketPlan(gradients, order, all_reduce_size, reduce_dtype)
    return plan, plan.structure(weighted)


def _require_gradient(path: str, leaf: Any) -> None:
    if not isinstance(leaf, mx.array):
        raise InvalidArgument(f"average_gradients: the leaf '{path}' is a {type(leaf).__name__}, not an mx.array")
    if not mx.issubdtype(leaf.dtype, mx.inexact):
        raise InvalidArgument(
            f"average_gradients: the leaf '{path}' is {str(leaf.dtype).removeprefix('mlx.core.')}, which has no "
            "average; leave it out of the tree, or add it up with mlxdist.all_sum"
        )


def _checked_weight(weight: Any) -> mx.array:
    if isinstance(weight, mx.array) and weight.size == 1:
        return weight.reshape(()).astype(mx.float32)
    if isinstance(weight, Real) and 0 <= float(weight) < inf:
        return mx.array(float(weight), mx.float32)
    shown = f"an array of shape {weight.shape}" if isinstance(weight, mx.array) else repr(weight)
    raise InvalidArgument(f"average_gradients: weight is {shown}; give a number from 0, such as this rank's tokens")
