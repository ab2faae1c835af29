"""Tokens that each rank has of its own, gathered: all ranks get all of them, and compute their own experts for them.

all_gather of the tokens, then sum_scatter of the results (or all_sum, of which each rank keeps its own): what moves
does not depend on the routing. Ranks with fewer tokens pad them, since MLX gathers equal parts.
"""

import mlx.core as mx
import numpy as np

from ...ops import all_gather, sum_scatter
from ..agreement import on_host
from ..mappings import (
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .fp8 import pack_e4m3, unpack_e4m3
from .replicated import Experts, in_order, own_experts, through, with_rows

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
    tokens, group = x.shape[0], experts.group
    rows = max(1, most)
    everybodys = _gather_indices(indices, rows, experts)

    dtype = experts.exchange_dtype

    def gather(x: mx.array) -> mx.array:
        return all_gather(x, group=group)

    def gather_tokens(x: mx.array) -> mx.array:
        return unpack_e4m3(gather(pack_e4m3(x)), x.dtype) if dtype == "fp8" else through(dtype, gather, x)

    def scatter_cotangents(cotangent: mx.array) -> mx.array:
        return through(dtype, lambda cotangent: sum_scatter(cotangent, group=group), cotangent)

    padded = mx.depends(with_rows(x, rows), everybodys) if isinstance(everybodys, mx.array) else with_rows(x, rows)
    inputs = (padded, None if scores is None else with_rows(scores.astype(mx.float32), rows))
    all_x, all_scores = in_order(inputs, gather, scatter_cotangents, first=gather_tokens)
    partial = own_experts(all_x, all_scores, everybodys, experts)
    if scatter:
        y = through(dtype, lambda y: reduce_scatter_to_sequence_parallel_region(y, 0, group), partial)
    else:
        y = through(dtype, lambda y: reduce_from_tensor_parallel_region(y, group), partial)
        y = scatter_to_tensor_parallel_region(y, 0, group)
    return y[:tokens]


def _gather_indices(indices: np.ndarray | mx.array, rows: int, experts: Experts) -> np.ndarray | mx.array:
    """All ranks' indices, padded with -1; on the host if this rank's are."""
    if isinstance(indices, mx.array):
        padded = mx.concatenate([indices, mx.full((rows - indices.shape[0], indices.shape[1]), -1, indices.dtype)])
        return all_gather(padded, group=experts.group)
    padded = np.full((rows, indices.shape[1]), -1, np.int32)
    padded[: len(indices)] = indices
    return on_host(all_gather(mx.array(padded), group=experts.group))
