"""Tokens that each rank has of its own, gathered: all ranks get all of them, and compute their own experts for them.

all_gather of the tokens, then sum_scatter of the results (or all_sum, of which each rank keeps its own): what moves
does not depend on the routing. Ranks with fewer tokens pad them, since MLX gathers equal shards.
"""

import mlx.core as mx
import numpy as np

from mlxdist.runtime.ops import all_gather, all_sum, sum_scatter

from ..rank_checks import on_host
from .fp8 import pack_e4m3, unpack_e4m3
from .replicated import Experts, optional, own_experts, through, with_rows
from .stages import chained

__all__ = ["gathered"]


def gathered(
    x: mx.array,
    indices: np.ndarray | mx.array,
    scores: mx.array | None,
    experts: Experts,
    most: int,
    scatter: bool = True,
) -> mx.array:
    """The layer on tokens that each rank has of its own.

    Args:
        x: (tokens, d).
        indices: (tokens, k), -1 for none; an ``mx.array`` if the host does not know them.
        scores: (tokens, k), or ``None``.
        experts: of this rank.
        most: the largest number of tokens of a rank.
        scatter: add up by sum_scatter; otherwise by all_sum.

    Returns:
        (tokens, d), or (tokens, k, d) without scores.
    """
    rows = max(1, most)
    all_indices = _gather_indices(indices, rows, experts)
    x, padded_scores = with_rows(x, rows), None
    if isinstance(all_indices, mx.array):
        x = mx.depends(x, all_indices)
    if scores is not None:
        padded_scores = with_rows(scores.astype(mx.float32), rows)
    all_x, *all_scores = _gather_tokens(optional((x, padded_scores)), experts)
    partial = own_experts(all_x, all_scores[0] if all_scores else None, all_indices, experts)
    return _add_up(partial, rows, scatter, experts)[: len(indices)]


def _gather_tokens(inputs: list[mx.array], experts: Experts) -> list[mx.array]:
    """All ranks' tokens, and their scores if given. Only the tokens travel in 8 bits, and only forward."""
    dtype, group = experts.exchange_dtype, experts.group

    def gather(x: mx.array) -> mx.array:
        return all_gather(x, group=group)

    def gather_tokens(x: mx.array) -> mx.array:
        return unpack_e4m3(gather(pack_e4m3(x)), x.dtype) if dtype == "fp8" else through(dtype, gather, x)

    def scatter(cotangent: mx.array) -> mx.array:
        return through(dtype, lambda cotangent: sum_scatter(cotangent, group=group), cotangent)

    return experts.stages.run(chained(gather_tokens, gather), chained(scatter), inputs)


def _add_up(partial: mx.array, rows: int, scatter: bool, experts: Experts) -> mx.array:
    """The sums over the ranks of the ``rows`` of this one."""
    group, first = experts.group, experts.group.rank() * rows

    def add_up(y: mx.array) -> mx.array:
        return sum_scatter(y, group=group) if scatter else all_sum(y, group=group)[first : first + rows]

    def gather(cotangent: mx.array) -> mx.array:
        return all_gather(cotangent, group=group)

    (y,) = experts.stages.run(
        lambda arrays: [through(experts.exchange_dtype, add_up, arrays[0])],
        lambda cotangents: [through(experts.exchange_dtype, gather, cotangents[0])],
        [partial],
    )
    return y


def _gather_indices(indices: np.ndarray | mx.array, rows: int, experts: Experts) -> np.ndarray | mx.array:
    """All ranks' indices, padded with -1; on the host if this rank's are."""
    if isinstance(indices, mx.array):
        padded = mx.concatenate([indices, mx.full((rows - indices.shape[0], indices.shape[1]), -1, indices.dtype)])
        return all_gather(padded, group=experts.group)
    padded = np.full((rows, indices.shape[1]), -1, np.int32)
    padded[: len(indices)] = indices
    return on_host(all_gather(mx.array(padded), group=experts.group))
