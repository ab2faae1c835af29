"""Tokens that all ranks hold: each computes its own experts for all of them, and the results are added up.

A single collective of the size of the results suits few tokens. Where the host knows the indices, a rank computes the
pairs of its own experts and nothing else. Where it does not (inside ``mx.compile``, or with ``host_sync=False``),
shapes cannot depend on the routing, so all pairs go through some local expert, and those of other ranks' experts are
masked: as much computing as without expert parallelism, but no wait for the host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather, all_sum, sum_scatter
from mlxdist.runtime.operations.ordering import Order, chained

from .fp8 import ExchangeDtype, through
from .local_experts import base, compute, compute_own, projections, skips_others, tied
from .pairs import Pairs, take_rows
from .placement import Placement

__all__ = ["Compiled", "Experts", "optional", "own_experts", "replicated", "with_rows"]

_SORTED_FROM = 64  # pairs: fewer are computed sooner than sorted; mlx-lm's layer has the same limit


class Compiled:
    """The summand of a rank's experts in the result of a few tokens, in ``mx.compile``. Without gradient.

    With few tokens, an operation that MLX is given by itself takes as long as an expert.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []  # of the layer: without a reference to the layer, which has one to this
        self._functions: dict[bool, Callable[..., mx.array]] = {}  # with scores or without

    def __deepcopy__(self, memo: dict) -> "Compiled":
        return Compiled()  # the copy has arrays of its own

    def __call__(self, x: mx.array, scores: mx.array | None, indices: mx.array, experts: "Experts") -> mx.array:
        """(tokens, d) with scores, else (tokens, k, d); ``indices`` of uint32. ``experts`` are always of one layer."""
        mine = experts.placement.local(experts.group.rank())
        names = projections(experts.layer)
        parts = [experts.layer[name] for name in names]
        if any(base(one) is not one for one in parts):  # scale and dropout of adapters change, but are no arrays
            return _masked(x, scores, indices, mine, experts)
        parts.append(experts.layer.activation)
        if [*map(id, parts)] != [*map(id, self._parts)]:
            self._parts, self._functions = parts, {}
        function = self._functions.get(scores is None)
        if function is None:
            layer = nn.Module()
            for name, part in zip((*names, "activation"), parts):
                setattr(layer, name, part)
            own = experts._replace(layer=layer, order=Order(), compiled=None)  # nothing of this call

            def masked(x: mx.array, indices: mx.array, *scores: mx.array) -> mx.array:
                return _masked(x, scores[0] if scores else None, indices, mine, own, skips_others(layer))

            function = self._functions[scores is None] = mx.compile(masked, inputs=[layer])
        return function(x, indices, *optional((scores,)))


class Experts(NamedTuple):
    """The experts of this rank, what tokens travel as, and the order of what communicates in this call."""

    placement: Placement
    group: Group
    layer: nn.Module
    tp_group: Group | None
    exchange_dtype: ExchangeDtype
    order: Order
    compiled: Compiled | None = None  # for few tokens whose experts the host does not wait for

    def compute(self, rows: mx.array, local: mx.array, ascending: bool) -> mx.array:
        """The local experts on their rows, (pairs, d) or (tokens, 1, d); ``ascending`` says that they do."""
        return compute(self.layer, rows, local, ascending, self.tp_group)


def replicated(
    x: mx.array, indices: np.ndarray | mx.array, scores: mx.array | None, experts: Experts, scatter: bool = False
) -> mx.array:
    """The layer on tokens (tokens, d) that all ranks hold alike; the same on all ranks. Shapes as in ``gathered``.

    ``indices``, (tokens, k) with -1 for none, are an ``mx.array`` if the host does not know them, of uint32 if all are
    experts but for those that are wrong. Results are added up by all_sum, with ``scatter`` by sum_scatter and
    all_gather.
    """
    group = experts.group
    x, *weights = experts.order.run(None, chained(partial(all_sum, group=group)), optional((x, scores)))
    if experts.tp_group is None:
        # Behind the step of x and scores: gradients of the experts do not wait for its collectives. Without it, a rank
        # whose experts no token came to would have a result of which MLX asks no gradient.
        layer = tied(experts.layer, [], experts.order, None)[0]
        if layer is not experts.layer:
            experts = experts._replace(layer=layer, compiled=None)
    partial_sum = own_experts(x, weights[0] if weights else None, indices, experts)
    tokens = partial_sum.shape[0]
    if scatter:
        partial_sum = with_rows(partial_sum, -(-tokens // group.size()) * group.size())

    def total(y: mx.array) -> mx.array:
        return all_gather(sum_scatter(y, group=group), group=group) if scatter else all_sum(y, group=group)

    # All ranks have the same cotangent, and that is the gradient.
    (y,) = experts.order.run(chained(partial(through, experts.exchange_dtype, total)), None, [partial_sum])
    return y[:tokens] if scatter else y


def own_experts(x: mx.array, scores: mx.array | None, indices: np.ndarray | mx.array, experts: Experts) -> mx.array:
    """This rank's summand of the result: (tokens, d) with scores, else (tokens, k, d), zeros for others' experts."""
    mine = experts.placement.local(experts.group.rank())
    if isinstance(indices, mx.array):
        if experts.compiled is not None:
            return experts.compiled(x, scores, indices, experts)
        return _masked(x, scores, indices, mine, experts)
    pairs = Pairs(np.where((indices >= mine.start) & (indices < mine.stop), indices - mine.start, -1))
    y = experts.compute(pairs.expand(x), pairs.experts, True)
    if scores is None:
        return pairs.spread(y)
    return pairs.weigh(y, take_rows(scores.reshape(-1), pairs.slots)).astype(y.dtype)


def _masked(
    x: mx.array, scores: mx.array | None, indices: mx.array, mine: range, experts: Experts, skips: bool = False
) -> mx.array:
    """Computes all pairs and masks those of other ranks' experts. ``skips``: those are not computed at all."""
    # Of few tokens each operation of MLX takes as long as an expert.
    tokens, k = indices.shape
    relative = (indices - mine.start).astype(mx.uint32)  # of experts before these: far behind them
    own = relative < len(mine)
    local = mx.where(own, relative, 0)
    if skips:
        y = compute_own(experts.layer, x, relative)
    elif indices.size < _SORTED_FROM:
        y = experts.compute(x[:, None], local, False)
    else:
        local = local.reshape(-1)
        order = mx.argsort(local)
        y = experts.compute(x[order // k], local[order], True)
        y = y[mx.argsort(order)].reshape(tokens, k, -1)
    if not skips:
        y = mx.where(own[..., None], y, mx.zeros((), y.dtype))
    # No rank can raise an error here. A wrong index must not look like a result.
    valid = indices < experts.placement.num_experts
    if indices.dtype != mx.uint32:
        valid = valid & (indices >= -1)
    if scores is None:
        return mx.where(valid[..., None], y, mx.array(float("nan"), y.dtype))
    weights = mx.where(valid, scores.astype(mx.float32), float("nan"))
    return (y.astype(mx.float32) * weights[..., None]).sum(axis=1).astype(y.dtype)


def optional(arrays: Sequence[mx.array | None]) -> list[mx.array]:
    """The arrays that are given: all but ``None``."""
    return [array for array in arrays if array is not None]


def with_rows(x: mx.array, rows: int, filler: int = 0) -> mx.array:
    """``x`` with rows of ``filler`` behind it, up to a number of rows."""
    if x.shape[0] == rows:
        return x
    return mx.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=mx.array(filler, x.dtype))
