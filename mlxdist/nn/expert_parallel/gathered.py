"""Tokens that each rank has of its own, gathered: all ranks get all of them, and compute their own experts for them.

all_gather of the tokens, then sum_scatter of the results (or all_sum, of which each rank keeps its own): what moves
does not depend on the routing. Ranks with fewer tokens pad them, since MLX gathers equal shards.
"""

from functools import partial

import mlx.core as mx
import numpy as np

from mlxdist.runtime.operations.collectives import all_gather, all_sum, sum_scatter
from mlxdist.runtime.operations.ordering import chained

from .fp8 import through, through_e4m3
from .replicated import Experts, optional, own_experts, with_rows

__all__ = ["gathered"]


def gathered(
    x: mx.array,
    indices: np.ndarray | mx.array,
    scores: mx.array | None,
    experts: Experts,
    most: int,
    scatter: bool = True,
) -> mx.array:
    """The layer on tokens (tokens, d) that each rank has of its own: (tokens, d), or (tokens, k, d) without scores.

    ``indices``, (tokens, k) with -1 for none, are an ``mx.array`` if the host does not know them. ``most`` is the
    largest number of tokens of a rank. Results are added up by sum_scatter, without ``scatter`` by all_sum.
    """
    rows = max(1, most)
    all_indices = _gather_indices(indices, rows, experts)
    x, padded_scores = with_rows(x, rows), None
    # One gather after the other: MLX may evaluate independent operations in another order on each rank.
    if isinstance(all_indices, mx.array):
        x = mx.depends(x, all_indices)
    if scores is not None:
        padded_scores = with_rows(scores.astype(mx.float32), rows)
    all_x, *all_scores = _gather_tokens(optional((x, padded_scores)), experts)
    partial_sum = own_experts(all_x, all_scores[0] if all_scores else None, all_indices, experts)
    return _add_up(partial_sum, rows, scatter, experts)[: len(indices)]


def _gather_tokens(inputs: list[mx.array], experts: Experts) -> list[mx.array]:
    """All ranks' tokens, and their scores if given. Only the tokens travel in 8 bits, and only forward."""
    dtype, group = experts.exchange_dtype, experts.group
    gather, scatter = partial(all_gather, group=group), partial(sum_scatter, group=group)
    forward = chained(partial(through_e4m3, dtype, gather), gather)
    return experts.order.run(forward, chained(partial(through, dtype, scatter)), inputs)


def _add_up(partial_sum: mx.array, rows: int, scatter: bool, experts: Experts) -> mx.array:
    """The sums over the ranks of the ``rows`` of this one."""
    dtype, group, first = experts.exchange_dtype, experts.group, experts.group.rank() * rows

    def add_up(y: mx.array) -> mx.array:
        return sum_scatter(y, group=group) if scatter else all_sum(y, group=group)[first : first + rows]

    gather = partial(all_gather, group=group)
    forward, backward = (chained(partial(through, dtype, function)) for function in (add_up, gather))
    return experts.order.run(forward, backward, [partial_sum])[0]


def _gather_indices(indices: np.ndarray | mx.array, rows: int, experts: Experts) -> np.ndarray | mx.array:
    """All ranks' indices, padded with -1; on the host if this rank's are."""
    if isinstance(indices, mx.array):
        return all_gather(with_rows(indices, rows, -1), group=experts.group)
    return np.array(all_gather(with_rows(mx.array(indices.astype(np.int32)), rows, -1), group=experts.group))
