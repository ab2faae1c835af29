"""Attention over a sharded sequence by exchanging it for sharded heads.

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", arXiv:2309.14509.
"""

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_to_all

from .arguments import Mask, check_attention
from .sequence import gather_sequence, in_order, zigzag

__all__ = ["full_attention", "ulysses_attention"]


def ulysses_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    window_size: int | None = None,
    group: GroupLike | None = None,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention`` over a sequence that is sharded over the ranks.

    The first all_to_all exchanges this rank's shard of the sequence, with all heads, for the full sequence with this
    rank's share of the heads; MLX attends; the second brings the result back. Each rank sends (n - 1) / n of its
    shards of ``q``, ``k``, ``v`` and of the result. Lazy, with gradients.

    Args:
        q: (batch, heads, length, dims): this rank's shard, as :func:`shard_sequence` makes it.
        k: (batch, key heads, length, dims). Where there are fewer key heads than ranks, each is sent to several.
        v: (batch, key heads, length, any dims).
        scale: of the scores.
        mask: ``None``, "causal", or an array that fits (batch, heads, length, full length), bool or to be added: the
            rows are this rank's queries, the columns the keys of the full sequence in order. The rows of an array are
            gathered, so that each rank needs memory for the full mask.
        sinks: (heads), the same on all ranks.
        window_size: with a causal mask, how many tokens a query attends to, itself included; ``None`` for all.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        (batch, heads, length, dims of v), in the dtype that MLX's function gives.

    Raises:
        InvalidArgument: shapes, dtypes or ``mask`` do not fit; or the number of ranks does not divide the heads, or
            neither divides nor is a multiple of the key heads.
        Also the errors of :mod:`mlxdist.runtime.operations.collectives`, where the result is evaluated.
    """
    group = group_of(group)
    check_attention("ulysses_attention", (q, k, v), mask, sinks, window_size, group)
    ranks = group.size()
    _check_heads(q.shape[1], k.shape[1], ranks)
    if ranks > 1:
        # Each rank needs the key heads of its query heads: with fewer key heads than ranks, ranks share one.
        copies = max(1, ranks // k.shape[1])
        q, k, v = _scatter_heads([q, mx.repeat(k, copies, 1), mx.repeat(v, copies, 1)], group)
        sinks = sinks if sinks is None else mx.split(sinks, ranks)[group.rank()]
        mask = _full_mask(mask, group) if isinstance(mask, mx.array) else mask
    out = full_attention(q, k, v, scale, mask, sinks, window_size)
    return out if ranks == 1 else _gather_heads(out, group)


def full_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Mask, sinks: mx.array | None, window_size: int | None
) -> mx.array:
    """MLX's attention over a sequence that is all here, with ``window_size``."""
    length = q.shape[2]
    if window_size is not None and window_size < length:
        distance = mx.arange(length)[:, None] - mx.arange(length)
        mask = (distance >= 0) & (distance < window_size)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def _check_heads(heads: int, key_heads: int, ranks: int) -> None:
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
    if ranks not in fits:
        raise InvalidArgument(
            f"ulysses_attention: {heads} query heads and {key_heads} key heads cannot be shared by {ranks} ranks, only "
            f"by {', '.join(map(str, fits))}; ring_attention takes any number"
        )


def _scatter_heads(arrays: list[mx.array], group: Group) -> list[mx.array]:
    """The full sequence with this rank's share of the heads, of several arrays in one message."""
    ranks = group.size()
    parts = [x.reshape(x.shape[0], ranks, -1, *x.shape[2:]).swapaxes(0, 1) for x in arrays]
    rows = [part.reshape(ranks, -1) for part in parts]
    arrived = all_to_all(mx.concatenate(rows, axis=1), group=group)
    ends = [sum(row.shape[1] for row in rows[: i + 1]) for i in range(len(rows) - 1)]
    return [_joined(row.reshape(part.shape), ranks) for row, part in zip(mx.split(arrived, ends, axis=1), parts)]


def _joined(shards: mx.array, ranks: int) -> mx.array:
    """(ranks, batch, heads, length, dims) as (batch, heads, ranks * length, dims), in the order of the sequence."""
    joined = mx.moveaxis(shards, 0, 2)
    return in_order(joined.reshape(*joined.shape[:2], -1, joined.shape[-1]), 2, ranks)


def _gather_heads(x: mx.array, group: Group) -> mx.array:
    """This rank's shard of the sequence with all heads."""
    ranks = group.size()
    batch, heads, length, dims = x.shape
    shards = mx.moveaxis(zigzag(x, 2, ranks).reshape(batch, heads, ranks, length // ranks, dims), 2, 0)
    arrived = all_to_all(shards, group=group)  # (ranks, batch, heads, length / ranks, dims)
    return arrived.swapaxes(0, 1).reshape(batch, ranks * heads, length // ranks, dims)


def _full_mask(mask: mx.array, group: Group) -> mx.array:
    """The mask with the rows of all ranks and the heads of this rank."""
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = gather_sequence(mask, -2, group=group)
    if mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mx.split(mask, group.size(), -3)[group.rank()]
    return mask
