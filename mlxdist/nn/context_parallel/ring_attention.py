"""Attention over a sharded sequence: keys and values go around the ranks, which attend to one shard after the other.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889; with the
shards of :mod:`mlxdist.nn.context_parallel.sequence`, by which causal attention is as much work on every rank.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlxdist.nn.mappings import without_gradient
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.point_to_point import sendrecv

from .arguments import Mask, check_attention
from .sequence import chunk_starts
from .tiles import Piece, Softmax, add_tile, after, causal_tile, differentiate_tile, fold, pieces, tiles, unfold
from .ulysses import full_attention

__all__ = ["ring_attention"]


def ring_attention(
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

    Each rank sends its keys and values to the next one, and attends to those that it has meanwhile, n - 1 times.
    Besides its own it holds two shards of keys and values at most, and one tile of the scores. Softmax is in float32.
    In a causal mask all ranks have equally many scores to compute, and what the mask hides is skipped, as is what is
    outside of a window. Backward, keys and values go around once more, and with them, in float32, their gradients.
    Lazy.

    Args:
        q: (batch, heads, length, dims): this rank's shard, as :func:`shard_sequence` makes it.
        k: (batch, key heads, length, dims).
        v: (batch, key heads, length, any dims).
        scale: of the scores.
        mask: ``None``, "causal", or an array that fits (batch, heads, length, full length), bool or to be added: the
            rows are this rank's queries, the columns the keys of the full sequence in order. An array has no gradient.
        sinks: (heads), the same on all ranks. The gradient is that of this rank's queries.
        window_size: with a causal mask, how many tokens a query attends to, itself included; ``None`` for all.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Returns:
        (batch, heads, length, dims of v), in the dtype that MLX's function gives. 0 for a query that attends to no key.

    Raises:
        InvalidArgument: shapes, dtypes or ``mask`` do not fit.
        Also the errors of :mod:`mlxdist.runtime.operations.collectives`, where the result is evaluated.
    """
    group = group_of(group)
    check_attention("ring_attention", (q, k, v), mask, sinks, window_size, group)
    if group.size() == 1:
        return full_attention(q, k, v, scale, mask, sinks, window_size)
    if isinstance(mask, mx.array):
        mask = without_gradient(mask, "ring_attention has no gradient of its mask")
    attention = _Attention(q, k, v, scale, mask, window_size, group)
    arrays = [q, k, v] if sinks is None else [q, k, v, sinks]
    if not bridge.traces():
        return attention.forward(*arrays)[0]
    differentiable: Any = mx.custom_function(attention.forward)
    differentiable.vjp(attention.backward)
    return differentiable(*arrays)[0]


class _Ring:
    """A pass of arrays around the ring: each rank sends to the next one, in the same order on all ranks."""

    def __init__(self, group: Group) -> None:
        self._group, self._last = group, list[mx.array]()

    def shift(self, arrays: Sequence[mx.array], done: Sequence[mx.array] = ()) -> list[mx.array]:
        """Sends ``arrays`` to the next rank once ``done`` are computed, and returns those of the previous rank.

        Each array is a message of its own: one message for all would need a second copy of a shard.
        """
        rank, ranks = self._group.rank(), self._group.size()
        following = []
        for array in arrays:
            array = after([array], *self._last, *done)[0]
            self._last = [sendrecv(array, (rank + 1) % ranks, (rank - 1) % ranks, group=self._group)]
            following += self._last
        return following

    def finish(self, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        """``arrays``, once all has arrived: a rank passes on also what its own window does not reach."""
        return after(arrays, *self._last)


class _Attention:
    """The parameters and pieces of a call of ring_attention, without its arrays."""

    def __init__(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Mask, window_size: int | None, group: Group
    ) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._scale, self._window_size, self._causal = scale, window_size, isinstance(mask, str)
        self._heads, self._key_heads, length = q.shape[1], k.shape[1], q.shape[2]
        self._mask = _grouped(mask, self._key_heads) if isinstance(mask, mx.array) else None
        self._pieces = [pieces(chunk_starts(rank, self._ranks, length), length) for rank in range(self._ranks)]
        self._own = self._pieces[self._rank]

    def forward(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> list[mx.array]:
        """The result and, for each row, the logarithm of the sum of its exponentials."""
        rows = [fold(q, self._key_heads, piece) * self._scale for piece in self._own]
        states = [Softmax.start(self._sink_rows(sinks, piece)) for piece in self._own]
        ring, message, done = _Ring(self._group), [k, v], list[mx.array]()
        for step in range(self._ranks):
            following = ring.shift(message, done) if step + 1 < self._ranks else message
            if not bridge.traces():
                mx.async_eval(following)  # so that it leaves before MLX has submitted the tiles of this step
            keys, values = ([fold(x, self._key_heads, piece) for piece in self._own] for x in message)
            for i, j, mask in self._tiles(step):
                query, key, value = after([rows[i], keys[j], values[j]], *done)
                states[i] = add_tile(states[i], query, key, value, mask)
                done = list(states[i])  # a sum that is left for later would keep a tile of scores
            message = following
        results, log_totals = zip(*(state.results() for state in states))
        out = unfold(results, self._own, self._heads).astype(mx.result_type(q, k, v))
        return list(ring.finish([out, unfold(log_totals, self._own, self._heads)]))

    def backward(
        self, primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        """The gradients of q, k, v and of given sinks. The gradient of keys follows the keys around, a step later."""
        q, k, v, *sinks = primals
        cotangent, (out, log_totals) = cotangents[0], outputs
        products = (cotangent.astype(mx.float32) * out).sum(-1, keepdims=True)
        queries = [fold(q, self._key_heads, piece) * self._scale for piece in self._own]
        rows = [[fold(x, self._key_heads, piece) for x in (cotangent, products, log_totals)] for piece in self._own]
        sums = [mx.zeros_like(x) for x in queries]
        ring, message, done = _Ring(self._group), [k, v], [cotangent]
        own = passing = [mx.array(0.0), mx.array(0.0)]
        for step in range(self._ranks):
            following = ring.shift(message, done) if step + 1 < self._ranks else message
            keys, values = ([fold(x, self._key_heads, piece) for piece in self._own] for x in message)
            added = [[mx.zeros_like(x) for x in keys], [mx.zeros_like(x) for x in values]]
            for i, j, mask in self._tiles(step):
                query, key, value = after([queries[i], keys[j], values[j]], *done)
                tile = differentiate_tile(query, key, value, mask, rows[i])
                sums[i], added[0][j], added[1][j] = sums[i] + tile[0], added[0][j] + tile[1], added[1][j] + tile[2]
                done = [sums[i], added[0][j], added[1][j]]
            gradients = [mx.concatenate(x, axis=2) for x in added]
            # Gradients of this rank's own keys need not travel: the last shift brings those of the other ranks to them.
            if step == 0:
                own = gradients
            else:
                passing = ring.shift([x + y for x, y in zip(gradients, passing)])
            message = following
        dk, dv = (x + y for x, y in zip(own, passing))
        dq = unfold(sums, self._own, self._heads) * self._scale
        of_sinks = (_sink_gradient(x, log_totals, products) for x in sinks)
        return tuple(ring.finish([dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), *of_sinks]))

    def _tiles(self, step: int) -> Iterator[tuple[int, int, mx.array | None]]:
        """The pairs of query pieces and key pieces that are here in a step, and the mask of each tile or ``None``."""
        keys = self._pieces[(self._rank - step) % self._ranks]
        for i, j, partly in tiles(self._own, keys, self._causal, self._window_size):
            mask = causal_tile(self._own[i], keys[j], self._window_size) if partly else None
            yield i, j, mask if self._mask is None else self._tile_of_mask(self._own[i], keys[j])

    def _tile_of_mask(self, query: Piece, key: Piece) -> mx.array:
        mask: Any = self._mask
        if mask.shape[-2] > 1:
            mask = mask[..., query.start : query.stop, :]
        return mask[..., key.position : key.last + 1] if mask.shape[-1] > 1 else mask

    def _sink_rows(self, sinks: mx.array | None, piece: Piece) -> mx.array | None:
        if sinks is None:
            return None
        rows = mx.broadcast_to(sinks[None, :, None, None], (1, self._heads, piece.stop, 1))
        return fold(rows, self._key_heads, piece)


def _grouped(mask: mx.array, key_heads: int) -> mx.array:
    """A mask that fits (batch, heads, queries, keys) as one that fits (batch, key heads, heads of each, ...)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    groups = key_heads if mask.shape[1] > 1 else 1
    return mask.reshape(mask.shape[0], groups, -1, *mask.shape[2:])


def _sink_gradient(sinks: mx.array, log_totals: mx.array, products: mx.array) -> mx.array:
    weights = mx.exp(sinks.astype(mx.float32)[:, None, None] - log_totals)
    return -(weights * products).sum((0, 2, 3)).astype(sinks.dtype)
