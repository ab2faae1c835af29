"""Exact attention one tile of scores at a time, with softmax in float32 and without the matrix of all scores.

The softmax of a row is kept as its maximum, its sum and its sum of values, which a further tile updates (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, "FlashAttention", arXiv:2205.14135). Backward, the scores are
computed again, and the logarithm of the sum makes probabilities of them.

The tiles are matrix products and elementwise operations of MLX. ``mx.fast.scaled_dot_product_attention`` does not
return the logarithm of the sum, without which blocks of keys cannot be merged. A column of ones in the values would
give it, next to a sink of known size, but only to the 7 digits of a quotient near 1, and heads of 65 dimensions have no
fused kernel. In training MLX's function has none either. On the CPU the fused function is matrix products, too, over
all scores at once, which no cache holds.

16-bit arrays become float32, tile by tile: products of 16-bit arrays round the scores to 16 bits, and are no faster on
GPUs before M5, or on any CPU. Here key heads are a dimension of their own, and the query heads that share one are rows
of its matrices: (batch, key heads, query heads of each * queries, dims).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

__all__ = [
    "Piece",
    "Softmax",
    "add_tile",
    "after",
    "causal_tile",
    "differentiate_tile",
    "fold",
    "pieces",
    "tiles",
    "unfold",
]

# Rows and columns of a tile. The scores of a head, 256 KiB, stay in the second-level cache. Longer sequences have
# larger tiles, so that the operations of a pass, which the host submits, grow with the length and not its square.
_TILE, _LARGEST_TILE, _TILES_A_CHUNK = 256, 1024, 8
_LOWEST = -1e30  # below all scores that count; finite, so that differences are none of infinities


class Piece(NamedTuple):
    """Consecutive tokens of a shard: where they are in it, and where the first is in the sequence."""

    start: int
    stop: int
    position: int

    @property
    def last(self) -> int:
        return self.position + self.stop - self.start - 1


def pieces(starts: Sequence[int], length: int) -> list[Piece]:
    """A shard of ``length`` tokens, of equal chunks that are at ``starts`` in the sequence, in pieces of a tile."""
    chunk = length // len(starts)
    tile = min(max(_TILE, -(-chunk // _TILES_A_CHUNK)), _LARGEST_TILE)
    return [
        Piece(i * chunk + first, i * chunk + min(first + tile, chunk), start + first)
        for i, start in enumerate(starts)
        for first in range(0, chunk, tile)
    ]


def tiles(
    queries: Sequence[Piece], keys: Sequence[Piece], causal: bool, window_size: int | None
) -> Iterator[tuple[int, int, bool]]:
    """Which pieces of queries attend to which of keys, by number, and whether not every query does to every key."""
    for j, key in enumerate(keys):
        for i, query in enumerate(queries):
            if not causal:
                yield i, j, False
                continue
            window = query.last + key.stop + 1 if window_size is None else window_size
            oldest = query.position - window + 1  # that the first query attends to
            if key.position <= query.last and key.last >= oldest:
                everyone = key.last <= query.position and key.position > query.last - window
                yield i, j, not everyone


def causal_tile(query: Piece, key: Piece, window_size: int | None) -> mx.array:
    """(queries, keys): which query attends to which key."""
    distance = mx.arange(query.position, query.last + 1)[:, None] - mx.arange(key.position, key.last + 1)
    return distance >= 0 if window_size is None else (distance >= 0) & (distance < window_size)


def fold(x: mx.array, key_heads: int, piece: Piece) -> mx.array:
    """A piece of (batch, heads, length, dims) as rows for each key head, in float32."""
    batch, heads, length, dims = x.shape
    grouped = x.reshape(batch, key_heads, heads // key_heads, length, dims)[..., piece.start : piece.stop, :]
    return grouped.astype(mx.float32).reshape(batch, key_heads, -1, dims)


def unfold(parts: Sequence[mx.array], of: Sequence[Piece], heads: int) -> mx.array:
    """The inverse of :func:`fold`, for all pieces of a shard."""
    batch, key_heads, _, dims = parts[0].shape
    grouped = [
        part.reshape(batch, key_heads, heads // key_heads, piece.stop - piece.start, dims)
        for part, piece in zip(parts, of)
    ]
    return mx.concatenate(grouped, axis=3).reshape(batch, heads, -1, dims)


class Softmax(NamedTuple):
    """The softmax of rows over the keys so far: the largest score, the sum of exp(score - largest), and that sum with
    each term times its value."""

    largest: mx.array
    total: mx.array
    values: mx.array

    @classmethod
    def start(cls, sinks: mx.array | None = None) -> "Softmax":
        """A softmax over no keys, or over the ``sinks`` of all rows, (heads, rows, 1), which have no values."""
        if sinks is None:
            return cls(mx.array(_LOWEST), mx.array(0.0), mx.array(0.0))
        return cls(sinks, mx.array(1.0), mx.array(0.0))

    def results(self) -> tuple[mx.array, mx.array]:
        """The sum of probabilities times values, and the logarithm of the sum; 0 for rows that attend to no key."""
        empty = self.total == 0
        total = mx.where(empty, 1.0, self.total)
        return self.values / total, mx.where(empty, 0.0, self.largest + mx.log(total))


def add_tile(so_far: Softmax, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> Softmax:
    """The softmax over the keys so far and those of a tile."""
    scores = _scores(q, k, mask)
    largest = mx.maximum(so_far.largest, scores.max(-1, keepdims=True))
    weights, decay = mx.exp(scores - largest), mx.exp(so_far.largest - largest)
    total = so_far.total * decay + weights.sum(-1, keepdims=True)
    return Softmax(largest, total, so_far.values * decay + weights @ v)


def differentiate_tile(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, rows: Sequence[mx.array]
) -> tuple[mx.array, mx.array, mx.array]:
    """The summands of a tile in the gradients of q, k and v.

    ``rows``: the cotangents of the rows, their products with the results, summed, and the logarithms of the sums.
    """
    cotangents, products, log_totals = rows
    weights = mx.exp(_scores(q, k, mask) - log_totals)
    score_gradients = weights * (cotangents @ v.swapaxes(-1, -2) - products)
    return score_gradients @ k, score_gradients.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ cotangents


def after(arrays: Sequence[mx.array], *done: mx.array) -> Sequence[mx.array]:
    """``arrays``, once ``done`` are computed: MLX then frees one tile before it computes the next."""
    return mx.depends(list(arrays), list(done)) if done else arrays


def _scores(q: mx.array, k: mx.array, mask: mx.array | None) -> mx.array:
    """The scores of queries and keys, masked. ``mask`` fits (batch, key heads, query heads of each, queries, keys)."""
    scores = q @ k.swapaxes(-1, -2)
    if mask is None:
        return scores
    grouped = scores.reshape(*scores.shape[:2], -1, mask.shape[-2], scores.shape[-1])
    masked = mx.where(mask, grouped, -mx.inf) if mask.dtype == mx.bool_ else grouped + mask
    return masked.reshape(scores.shape)
