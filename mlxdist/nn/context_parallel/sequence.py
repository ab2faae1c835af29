"""Sequences that are sharded over the ranks, in the head-tail (zigzag) order that gives causal attention equal work.

A sequence is cut into 2n equal chunks for n ranks. Rank r holds chunk r and chunk 2n - 1 - r, one after the
other. A query attends to all that is before it, so a rank with an early and a late chunk has as much to compute as any
other (Llama Team 2024, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). A group of one holds the
sequence as it is.
"""

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.mappings import gather_from_sequence_parallel_region
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

__all__ = ["chunk_starts", "gather_sequence", "in_order", "local_axis", "shard_sequence", "zigzag"]


def shard_sequence(x: mx.array, axis: int = 1, *, group: GroupLike | None = None) -> mx.array:
    """Returns this rank's two chunks of a sequence that every rank holds in full. Nothing is sent.

    Args:
        x: any dtype and shape, such as tokens (batch, length), or activations (batch, length, dims). Shard the targets
            of a loss in the same way.
        axis: along which the sequence runs.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        ``x`` with ``length / ranks`` elements along ``axis``.

    Raises:
        InvalidArgument: ``x`` has no such axis, or its length is not a multiple of twice the number of ranks.
    """
    group = group_of(group)
    axis, ranks = _axis("shard_sequence", x, axis), group.size()
    length = x.shape[axis]
    if ranks == 1:
        return x
    if length % (2 * ranks):
        below = length - length % (2 * ranks)
        raise InvalidArgument(
            f"shard_sequence: a sequence of {length} cannot be cut into the {2 * ranks} equal chunks of {ranks} ranks; "
            f"pad it to {below + 2 * ranks}" + (f" or truncate it to {below}" if below else "")
        )
    chunks = mx.split(x, 2 * ranks, axis)
    return mx.concatenate([chunks[group.rank()], chunks[2 * ranks - 1 - group.rank()]], axis)


def gather_sequence(x: mx.array, axis: int = 1, *, group: GroupLike | None = None) -> mx.array:
    """Gathers the full sequence, in order, from all ranks' shards: the inverse of :func:`shard_sequence`. Collective.

    It costs one all_gather. The gradient is this rank's shard of the sum of all ranks' cotangents.

    Args:
        x: this rank's shard, of the shape and dtype that the other ranks' shards have.
        axis: along which the sequence runs.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        ``x`` with ``length * ranks`` elements along ``axis``.

    Raises:
        InvalidArgument: ``x`` has no such axis, or an odd length there.
    """
    group = group_of(group)
    axis = local_axis("gather_sequence", x, axis, group)
    if group.size() == 1:
        return x
    return in_order(gather_from_sequence_parallel_region(x, axis, group=group), axis, group.size())


def in_order(x: mx.array, axis: int, ranks: int) -> mx.array:
    """The shards of all ranks, joined in rank order along ``axis``, in the order of the sequence."""
    chunks = mx.split(x, 2 * ranks, axis)
    return mx.concatenate([*chunks[0::2], *chunks[::-2]], axis)


def zigzag(x: mx.array, axis: int, ranks: int) -> mx.array:
    """A sequence as the shards of all ranks, joined in rank order along ``axis``: the inverse of :func:`in_order`."""
    chunks = mx.split(x, 2 * ranks, axis)
    pairs = zip(chunks[:ranks], chunks[: -ranks - 1 : -1])
    return mx.concatenate([chunk for pair in pairs for chunk in pair], axis)


def chunk_starts(rank: int, ranks: int, length: int) -> list[int]:
    """The positions in the sequence where the equal chunks of a rank's shard, of ``length`` elements, begin."""
    return [0] if ranks == 1 else [rank * (length // 2), (2 * ranks - 1 - rank) * (length // 2)]


def local_axis(name: str, x: mx.array, axis: int, group: Group) -> int:
    """Returns ``axis`` counted from 0. Raises InvalidArgument where ``x`` cannot be a shard of a sequence along it."""
    axis = _axis(name, x, axis)
    if group.size() > 1 and x.shape[axis] % 2:
        raise InvalidArgument(
            f"{name}: axis {axis} of shape {x.shape} has an odd length, but a rank's shard of a sequence is two equal "
            "chunks, as shard_sequence makes them"
        )
    return axis


def _axis(name: str, x: mx.array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise InvalidArgument(f"{name}: axis is {axis}, but x has shape {x.shape}")
    return axis % x.ndim
