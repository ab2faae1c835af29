"""The layer by dispatch and combine: tokens to the owners of their experts, results back."""

import mlx.core as mx
import numpy as np

from ...ops import all_gather
from ..mappings import gather_from_tensor_parallel_region
from .dispatch import Handle, combine, dispatch, route_alike
from .replicated import Experts, in_order, through, with_rows

__all__ = ["dispatched", "dispatched_alike"]


def dispatched(x: mx.array, handle: Handle, scores: mx.array | None, experts: Experts) -> mx.array:
    """The layer on the tokens (tokens, d) of this rank: (tokens, d), or (tokens, k, d) without scores."""
    received, local, _ = dispatch(x, handle=handle, exchange_dtype=experts.exchange_dtype)
    y = experts.compute(received, local, True)
    return combine(y, handle, scores, exchange_dtype=experts.exchange_dtype)


def dispatched_alike(x: mx.array, chosen: np.ndarray, scores: mx.array | None, experts: Experts) -> mx.array:
    """The same for tokens, and their experts ``chosen``, that all ranks hold alike: each rank sends its part of them.

    The results are gathered. As all know the routing, nothing has to be told before.
    """
    group, tokens = experts.group, x.shape[0]
    rows = -(-tokens // group.size())
    padded = np.full((rows * group.size(), chosen.shape[1]), -1, np.int64)
    padded[:tokens] = chosen
    mine = slice(group.rank() * rows, (group.rank() + 1) * rows)
    x, scores = in_order(
        (with_rows(x, len(padded)), None if scores is None else with_rows(scores, len(padded))),
        lambda x: x[mine],
        lambda cotangent: all_gather(cotangent, group=group),
    )
    y = dispatched(x, route_alike(padded, experts.placement, group), scores, experts)
    return through(experts.exchange_dtype, lambda y: gather_from_tensor_parallel_region(y, 0, group), y)[:tokens]
