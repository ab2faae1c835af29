"""Pairs of a token and an expert, in the order in which the experts are computed."""

import mlx.core as mx
import numpy as np

__all__ = ["Pairs", "places_of", "sum_rows", "take_or_zero", "take_rows"]


class Pairs:
    """The pairs that this rank's experts compute for some rows of tokens, sorted by expert, then by row.

    ``experts``: int of shape (rows, k), local experts of each row, -1 where the expert lies on another rank. Nothing is
    padded: there are as many pairs as entries that are not -1.
    """

    def __init__(self, experts: np.ndarray) -> None:
        self.rows, self.top_k = experts.shape
        flat = experts.reshape(-1)
        mine = np.flatnonzero(flat >= 0)
        # Stable: an expert's pairs stay in the order of rows, so results are bitwise the same in every run.
        order = np.argsort(flat[mine], kind="stable")
        self.order = order
        """Where each pair stands among the pairs in order of rows and slots."""
        self.slots = mine[order]
        """The flat place of each pair in (rows, k)."""
        self.experts = mx.array(flat[self.slots].astype(np.int32))
        """The local expert of each pair, ascending: int32 of shape (pairs,)."""

    def __len__(self) -> int:
        return len(self.slots)

    def expand(self, x: mx.array) -> mx.array:
        """Rows (rows, d) as the inputs of their pairs: (pairs, d)."""
        if self.rows == 1:
            return mx.broadcast_to(x, (len(self), x.shape[1]))
        return take_rows(x, self.slots // self.top_k)

    def spread(self, y: mx.array) -> mx.array:
        """Results of the pairs (pairs, d) in their slots: (rows, k, d), with zeros in the slots of other ranks."""
        spread = take_or_zero(y, places_of(self.slots, self.rows * self.top_k))
        return spread.reshape(self.rows, self.top_k, y.shape[-1])

    def weigh(self, y: mx.array, weights: mx.array) -> mx.array:
        """The sum over the pairs of each row of ``weights`` (pairs,) times ``y`` (pairs, d): float32 (rows, d)."""
        weighted = y.astype(mx.float32) * weights.astype(mx.float32)[:, None]
        return weighted.sum(axis=0, keepdims=True) if self.rows == 1 else self.spread(weighted).sum(axis=1)


def take_rows(x: mx.array, rows: np.ndarray) -> mx.array:
    """``x[rows]``, also where x has no rows: MLX 0.32 cannot differentiate that."""
    if x.shape[0] == 0:
        x = mx.zeros((1, *x.shape[1:]), x.dtype) + x.sum()
    return x[mx.array(rows.astype(np.int32))]


def take_or_zero(y: mx.array, places: np.ndarray) -> mx.array:
    """``y[places]`` along the first axis, with zeros where a place is -1. Gathers: bitwise the same in every run."""
    padded = mx.concatenate([y, mx.zeros((1, *y.shape[1:]), y.dtype)])
    return padded[mx.array(np.where(places < 0, len(y), places).astype(np.int32))]


def places_of(slots: np.ndarray, length: int) -> np.ndarray:
    """The index in ``slots`` of each of ``length`` slots, -1 for a slot that is not there."""
    places = np.full(length, -1, np.int64)
    places[slots] = np.arange(len(slots))
    return places


def sum_rows(y: mx.array, order: np.ndarray, groups: np.ndarray, count: int) -> mx.array:
    """The sums of the rows of ``count`` groups: ``y[order[i]]`` is a row of group ``groups[i]``; these ascend."""
    counts = np.bincount(groups, minlength=count)
    first = np.cumsum(counts) - counts
    places = np.full((count, max(1, counts.max(initial=0))), -1, np.int64)
    places[groups, np.arange(len(groups)) - first[groups]] = order
    return take_or_zero(y, places).sum(axis=1)
