"""Tokens that all ranks hold: each computes its own experts for all of them, and the results are added up.

Nothing is sent before the sum. One collective of the size of the results: what a few tokens need. Where the host knows
the indices, a rank computes the pairs of its own experts and nothing else. Where it does not (inside ``mx.compile``,
or with ``host_sync=False``), shapes cannot depend on the routing, so all pairs go through some local expert, and
those of other ranks' experts are masked: as much computing as without expert parallelism, but no wait for the host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...group import Group
from ...ops import all_sum
from ..mappings import (
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from .pairs import Pairs, take_rows
from .placement import Placement

__all__ = ["Experts", "copies", "in_order", "own_experts", "replicated", "through", "with_rows"]

_SORTED_FROM = 64  # pairs: fewer are computed sooner than sorted; mlx-lm's layer has the same limit


class Experts(NamedTuple):
    """The experts of this rank, and what they travel as."""

    placement: Placement
    group: Group
    compute: Callable[[mx.array, mx.array, bool], mx.array]  # rows (pairs, d), their local experts, if these ascend
    exchange_dtype: mx.Dtype | str | None = None


def replicated(
    x: mx.array, indices: np.ndarray | mx.array, scores: mx.array | None, experts: Experts, scatter: bool = False
) -> mx.array:
    """The layer on tokens that all ranks hold alike.

    Args:
        x: (tokens, d).
        indices: (tokens, k), -1 for none; an ``mx.array`` if the host does not know them.
        scores: (tokens, k), or ``None``.
        experts: of this rank.
        scatter: add up by sum_scatter and all_gather instead of all_sum.

    Returns:
        (tokens, d), or (tokens, k, d) without scores; the same on all ranks.
    """
    group = experts.group
    x, scores = copies(x, scores, group)
    part = own_experts(x, scores, indices, experts)
    if not scatter:
        return through(experts.exchange_dtype, lambda y: reduce_from_tensor_parallel_region(y, group), part)
    tokens = part.shape[0]
    part = with_rows(part, -(-tokens // group.size()) * group.size())

    def add_up(y: mx.array) -> mx.array:
        return gather_from_tensor_parallel_region(reduce_scatter_to_sequence_parallel_region(y, 0, group), 0, group)

    return through(experts.exchange_dtype, add_up, part)[:tokens]


def own_experts(
    x: mx.array, scores: mx.array | None, indices: np.ndarray | mx.array, experts: Experts
) -> mx.array:
    """What this rank's experts add to the result: (tokens, d) with scores, else (tokens, k, d) with zeros elsewhere."""
    mine = experts.placement.local(experts.group.rank())
    if isinstance(indices, mx.array):
        return _masked(x, scores, indices, mine, experts)
    pairs = Pairs(np.where((indices >= mine.start) & (indices < mine.stop), indices - mine.start, -1))
    y = experts.compute(pairs.expand(x), pairs.experts, True)
    if scores is None:
        return pairs.spread(y)
    return pairs.weigh(y, take_rows(scores.reshape(-1), pairs.slots)).astype(y.dtype)


def _masked(x: mx.array, scores: mx.array | None, indices: mx.array, mine: range, experts: Experts) -> mx.array:
    tokens, k = indices.shape
    own = (indices >= mine.start) & (indices < mine.stop)
    local = mx.where(own, indices - mine.start, 0).reshape(-1)
    if indices.size < _SORTED_FROM:
        rows = mx.broadcast_to(x[:, None], (tokens, k, x.shape[1])).reshape(-1, x.shape[1])
        y = experts.compute(rows, local, False).reshape(tokens, k, -1)
    else:
        order = mx.argsort(local)
        y = experts.compute(x[order // k], local[order], True)
        y = y[mx.argsort(order)].reshape(tokens, k, -1)
    y = mx.where(own[..., None], y, mx.zeros((), y.dtype))
    # Nobody can raise an error here. A wrong index must not look like a result.
    valid = (indices >= -1) & (indices < experts.placement.num_experts)
    y = y + mx.where(valid, 0.0, float("nan")).astype(y.dtype)[..., None]
    if scores is None:
        return y
    return (y.astype(mx.float32) * scores.astype(mx.float32)[..., None]).sum(axis=1).astype(y.dtype)


def in_order(
    arrays: tuple[mx.array, mx.array | None],
    forward: Callable[[mx.array], mx.array],
    backward: Callable[[mx.array], mx.array],
    first: Callable[[mx.array], mx.array] | None = None,
) -> tuple[mx.array, mx.array | None]:
    """``forward`` of both arrays (``first``, if given, of the first), with ``backward`` as its gradient.

    Their collectives run in this order on all ranks, backward too. MLX evaluates what does not depend on each other in
    an order that depends on the graph, and graphs of ranks with different numbers of tokens differ.
    """

    apply = mx.custom_function(lambda arrays: _chained((first or forward, forward), arrays))
    apply.vjp(lambda primals, cotangents, outputs: _chained((backward, backward), cotangents))
    results = apply([array for array in arrays if array is not None])
    return (results[0], results[1] if len(results) == 2 else None)


def _chained(functions: Sequence[Callable], arrays: Sequence[mx.array]) -> list[mx.array]:
    done: list[mx.array] = []
    for function, array in zip(functions, arrays):
        done.append(function(mx.depends(array, done[-1]) if done else array))
    return done


def copies(x: mx.array, scores: mx.array | None, group: Group) -> tuple[mx.array, mx.array | None]:
    """Both arrays themselves. Backward: the sums of all ranks' cotangents, in this order."""
    if group.size() == 1:
        return x, scores
    add_up = partial(all_sum, group=group)
    copy = mx.custom_function(lambda arrays: arrays)
    copy.vjp(lambda primals, cotangents, outputs: _chained((add_up, add_up), cotangents))
    results = copy([array for array in (x, scores) if array is not None])
    return (results[0], results[1] if len(results) == 2 else None)


def through(dtype: mx.Dtype | str | None, collective: Callable[[mx.array], mx.array], y: mx.array) -> mx.array:
    """A collective on ``y`` as it travels, with the result in the dtype of ``y``. Sums have no 8 bits."""
    if dtype is None or dtype == "fp8":
        return collective(y)
    return collective(y.astype(dtype)).astype(y.dtype)


def with_rows(x: mx.array, rows: int) -> mx.array:
    """``x`` with zeros behind it, up to a number of rows."""
    if x.shape[0] == rows:
        return x
    return mx.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
