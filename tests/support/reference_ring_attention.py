"""The plain ring attention in one process, where the ranks are a list: slow, and obviously right.

Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889,
section 3; the softmax is that of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
arXiv:1805.02867, section 3. Each rank has one block of the sequence, and MLX differentiates the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

LOWEST = -1e30  # finite: a row that has had no key yet must not compute the difference of two infinities


class Softmax(NamedTuple):
    """The weighted sum of values that a rank has so far: of its rows, in float32, relative to their largest score."""

    largest: mx.array  # (batch, heads, rows, 1)
    total: mx.array  # of the exponentials, (batch, heads, rows, 1)
    weighted: mx.array  # of the values, (batch, heads, rows, dims)


def start(query: mx.array, value: mx.array, sinks: mx.array | None) -> Softmax:
    """A sink is a score of each head, without a value."""
    rows = (*query.shape[:3], 1)
    weighted = mx.zeros((*query.shape[:3], value.shape[3]))
    if sinks is None:
        return Softmax(mx.full(rows, LOWEST), mx.zeros(rows), weighted)
    scores = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], rows)
    largest = mx.stop_gradient(scores)
    return Softmax(largest, mx.exp(scores - largest), weighted)


def attend(state: Softmax, scores: mx.array, value: mx.array) -> Softmax:
    """Adds the keys of one block, and rescales what came before where one of them has a larger score."""
    largest = mx.stop_gradient(mx.maximum(state.largest, scores.max(-1, keepdims=True)))
    before, weights = mx.exp(state.largest - largest), mx.exp(scores - largest)
    total = state.total * before + weights.sum(-1, keepdims=True)
    return Softmax(largest, total, state.weighted * before + weights @ value)


def scores_of(query: mx.array, key: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    """(batch, heads, queries, keys); ``mask`` is bool, or is added."""
    scores = scale * (query @ key.swapaxes(-1, -2))
    if mask is None:
        return scores
    return mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask


def ring_attention(
    queries: list[mx.array],
    keys: list[mx.array],
    values: list[mx.array],
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> list[mx.array]:
    """The result of every rank, (batch, heads, block, dims of values), from the blocks of all, in the order of ranks.

    Of ``keys`` and ``values``, each head serves equally many heads of the queries. ``mask``: of the full sequence, of
    any shape that fits (batch, heads, length, length).
    """
    ranks, (batch, heads, block, _) = len(queries), queries[0].shape
    if mask is not None:
        mask = mx.broadcast_to(mask, (batch, heads, ranks * block, ranks * block))
    states = [start(query, value, sinks) for query, value in zip(queries, values)]
    held = list(enumerate(zip(keys, values)))  # by each rank: whose block of the ring, and the block
    for _ in range(ranks):
        for rank, (owner, pair) in enumerate(held):
            key, value = (mx.repeat(x.astype(mx.float32), heads // x.shape[1], axis=1) for x in pair)
            rows, columns = (slice(block * i, block * (i + 1)) for i in (rank, owner))
            tile = None if mask is None else mask[:, :, rows, columns]
            scores = scores_of(queries[rank].astype(mx.float32), key, scale, tile)
            states[rank] = attend(states[rank], scores, value)
        held = held[-1:] + held[:-1]  # each rank sends what it holds to the next one
    return [(state.weighted / state.total).astype(queries[0].dtype) for state in states]
