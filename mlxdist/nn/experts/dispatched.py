"""The layer by dispatch and combine: tokens to the owners of their experts, results back."""

import mlx.core as mx
import numpy as np

from mlxdist.runtime.ops import all_gather

from .dispatch import Handle, bring_back, route_alike, send_out
from .replicated import Experts, optional, through, with_rows
from .stages import chained

__all__ = ["dispatched", "dispatched_alike"]


def dispatched(x: mx.array, handle: Handle, scores: mx.array | None, experts: Experts) -> mx.array:
    """The layer on the tokens (tokens, d) of this rank: (tokens, d), or (tokens, k, d) without scores."""
    received = send_out(x, handle, experts.exchange_dtype, experts.stages)
    y = experts.compute(received, handle.experts, True)
    return bring_back(y, handle, scores, experts.exchange_dtype, experts.stages)


def dispatched_alike(x: mx.array, chosen: np.ndarray, scores: mx.array | None, experts: Experts) -> mx.array:
    """The same for tokens, and their experts ``chosen``, that all ranks hold alike: each rank sends its part of them.

    The results are gathered. As all know the routing, it takes no message.
    """
    group, tokens = experts.group, x.shape[0]
    rows = -(-tokens // group.size())
    padded = np.full((rows * group.size(), chosen.shape[1]), -1, np.int64)
    padded[:tokens] = chosen
    mine = slice(group.rank() * rows, (group.rank() + 1) * rows)

    def gather(part: mx.array) -> mx.array:
        return all_gather(part, group=group)

    inputs = [with_rows(array, len(padded)) for array in optional((x, scores))]
    x, *weights = experts.stages.run(lambda arrays: [array[mine] for array in arrays], chained(gather), inputs)
    y = dispatched(x, route_alike(padded, experts.placement, group), weights[0] if weights else None, experts)
    (y,) = experts.stages.run(
        lambda arrays: [through(experts.exchange_dtype, gather, arrays[0])],
        lambda cotangents: [cotangents[0][mine]],
        [y],
    )
    return y[:tokens]
