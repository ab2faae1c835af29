"""Dispatch and combine of fixed shape, for decoding: nothing is read on the host, so they work inside ``mx.compile``.

Every rank has ``max_tokens`` slots for each rank, whether tokens are in them or not. A slot is a row of bytes:

    [token: D elements, or D codes and a scale as E4M3][ids: j int32][weights: j float32]

with j = min(k, experts of a rank). The ids are those of the token's experts on that rank, counted from its first; -1
where there is none. An exchange is one ``all_to_all`` of ``ranks * max_tokens`` rows there and one back, of the
weighted sum over the rank's experts. Each token is computed exactly, and none is dropped, whatever the routing.

The cost: each rank computes ``ranks * max_tokens * j`` rows, about one in ``ranks`` of them valid, and sends all
slots. With few tokens the latency alone counts; with many, use dispatch.py. (DeepSeek's DeepEP has such a mode.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_to_all

from ..mappings import without_gradient
from ..rank_checks import agree
from .fp8 import SCALE_BYTES, dtype_name, pack_e4m3, unpack_e4m3
from .placement import Placement, wrong_ranks

__all__ = ["LowLatencyExchange", "Slots"]

_NONE = -1  # the id of no expert

# What is received is made from bytes.
_NO_GRADIENT = "LowLatencyExchange is for decoding and has no gradient; train with the modes of ExpertParallelSwitchGLU"


class Slots(NamedTuple):
    """The tokens that a rank has received: R = ranks * max_tokens rows.

    ``x`` (R, D), in the dtype of the tokens, zeros without a token; ``ids`` (R, j), int32: experts of this rank from 0,
    and -1; ``weights`` (R, j), float32, 0 where the id is -1; ``tokens``: how many rows `combine` returns.
    """

    x: mx.array
    ids: mx.array
    weights: mx.array
    tokens: int


class LowLatencyExchange:
    """The exchange of a layer that decodes.

        exchange = LowLatencyExchange(placement, max_tokens=8, top_k=2)
        y = exchange(x, indices, scores, experts)        # also inside mx.compile

    Args:
        placement: which rank has which experts.
        max_tokens, top_k: tokens of a rank in one call, and experts of a token; the same on all ranks.
        fp8: send tokens as E4M3 (fp8.py). Results come back in the dtype of the tokens.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: the placement is for another number of ranks; ``max_tokens`` or ``top_k`` is out of range.
    """

    def __init__(
        self, placement: Placement, max_tokens: int, top_k: int, *, fp8: bool = False, group: GroupLike | None = None
    ) -> None:
        self.placement = placement
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.fp8 = fp8
        self._group = group_of(group)
        if problem := wrong_ranks("LowLatencyExchange", placement, self._group):
            raise InvalidArgument(problem)
        if max_tokens < 1 or not 1 <= top_k <= placement.num_experts:
            raise InvalidArgument(
                f"LowLatencyExchange: max_tokens is {max_tokens} and top_k {top_k}; there must be at least one token, "
                f"and 1 to {placement.num_experts} experts for each"
            )
        experts = [placement.local(rank) for rank in range(placement.ranks)]
        self.ids_per_slot = min(top_k, max(len(local) for local in experts))
        self._first = mx.array([local.start for local in experts]).reshape(-1, 1, 1)
        self._behind = mx.array([local.stop for local in experts]).reshape(-1, 1, 1)

    def admit(self, tokens: int) -> int:
        """Rejects ``tokens`` over the limit on any rank, on all ranks; returns the largest number of a rank.

        A collective of a few bytes, waited for: all ranks call it before a step in which their numbers can change, and
        outside of ``mx.compile``. `dispatch` rejects by itself, but only on the rank that has too many.

        Raises:
            InvalidArgument: on all ranks, with the same text.
            Mismatch: on all ranks, which have made different exchanges.
        """
        equal = {
            "max_tokens": self.max_tokens,
            "top_k": self.top_k,
            "option fp8": self.fp8,
            "placement of the experts": self.placement,
        }
        return int(agree("LowLatencyExchange", self._group, self._too_many(tokens), equal, [tokens]).max())

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        scores: mx.array,
        experts: Callable[[mx.array, mx.array], mx.array],
        count: Any = None,
    ) -> mx.array:
        """The sum over each token's experts, weighted by their scores: shape and dtype of x.

        ``x``, ``indices``, ``scores``, ``count`` are as in `dispatch`. ``experts`` are this rank's: called with tokens
        (R, D) and expert numbers from 0 (R, j), they return (R, j, D), as mlx-lm's SwitchGLU.
        """
        slots = self.dispatch(x, indices, scores, count)
        return self.combine(experts(slots.x, mx.maximum(slots.ids, 0)), slots)

    def dispatch(self, x: mx.array, indices: mx.array, scores: mx.array, count: Any = None) -> Slots:
        """Sends this rank's tokens to the ranks of their experts. Lazy: one ``all_to_all``. No gradient passes it.

        Args:
            x: (tokens, D), float32, float16 or bfloat16: at most ``max_tokens``, which may differ between ranks. D and
                dtype are the same on all ranks.
            indices: (tokens, top_k), integers: experts of the placement, or -1 for none.
            scores: (tokens, top_k): their weights.
            count: how many of the tokens are real, if not all: an integer or a scalar ``mx.array``. The others cost
                nothing but are sent, and their results are zeros. So a compiled function is traced once for all counts.

        Raises:
            InvalidArgument: too many tokens, or shapes that do not fit: on this rank, before it sends anything.
        """
        tokens = self._require_fitting(x, indices, scores)
        valid = mx.arange(self.max_tokens) < (tokens if count is None else mx.minimum(count, tokens))
        padding = [(0, self.max_tokens - tokens), (0, 0)]
        # Padding and all that is behind `count` may hold anything: NaN times 0 would be NaN.
        x = mx.where(valid[:, None], mx.pad(x, padding), mx.array(0, x.dtype))
        ids, weights = self._route(mx.pad(indices.astype(mx.int32), padding), mx.pad(scores, padding), valid)
        token = pack_e4m3(x) if self.fp8 else x.view(mx.uint8)
        token = mx.broadcast_to(token, (self.placement.ranks, *token.shape))
        wire = mx.concatenate([token, ids.view(mx.uint8), weights.view(mx.uint8)], axis=-1)
        return self._unpack(all_to_all(wire.flatten(0, 1), group=self._group), x.shape[-1], x.dtype, tokens)

    def combine(self, y: mx.array, slots: Slots) -> mx.array:
        """Sends results back, weighted and summed over the experts. Lazy: one ``all_to_all``.

        ``y``: (R, j, D), of each row and each of its experts; anything where the id is -1. ``slots``: of `dispatch`.
        Returns (tokens, D), in the dtype and order of the tokens that were dispatched. Sums are those of float32,
        rounded once on each rank that has experts of the token, and once here.

        Raises:
            InvalidArgument: y has another shape.
        """
        expected = (*slots.ids.shape, slots.x.shape[-1])
        if y.shape != expected:
            raise InvalidArgument(f"LowLatencyExchange.combine: y has shape {y.shape}, expected {expected}")
        valid = (slots.ids != _NONE)[..., None]
        part = mx.where(valid, y.astype(mx.float32) * slots.weights[..., None], 0).sum(axis=1).astype(slots.x.dtype)
        parts = all_to_all(part, group=self._group).reshape(self.placement.ranks, self.max_tokens, -1)
        return parts[:, : slots.tokens].astype(mx.float32).sum(axis=0).astype(slots.x.dtype)

    def _route(self, indices: mx.array, scores: mx.array, valid: mx.array) -> tuple[mx.array, mx.array]:
        """Ids and weights in the slots of each rank: both of shape (ranks, max_tokens, j)."""
        if self.ids_per_slot < self.top_k:  # a rank has no more than its experts, but an expert may be there twice
            indices, scores = _merged(indices, scores)
        here = (indices >= self._first) & (indices < self._behind) & valid[None, :, None]
        ids = mx.where(here, indices - self._first, _NONE)
        weights = mx.where(here, scores.astype(mx.float32), 0)
        if self.ids_per_slot < self.top_k:  # those of this rank first, then they are enough
            order = mx.argsort(-ids, axis=-1)[..., : self.ids_per_slot]
            ids, weights = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(weights, order, axis=-1)
        return ids.astype(mx.int32), weights

    def _too_many(self, tokens: int) -> str | None:
        if tokens <= self.max_tokens:
            return None
        return (
            f"LowLatencyExchange: {tokens} tokens are more than max_tokens = {self.max_tokens}; make the exchange with "
            "a larger one, or decode them in several steps"
        )

    def _unpack(self, wire: mx.array, hidden: int, dtype: mx.Dtype, tokens: int) -> Slots:
        width = hidden + SCALE_BYTES if self.fp8 else hidden * dtype.size
        ids_end = width + 4 * self.ids_per_slot
        token, ids, weights = (mx.contiguous(part) for part in mx.split(wire, [width, ids_end], axis=-1))
        x = unpack_e4m3(token, dtype) if self.fp8 else token.view(dtype)
        weights = weights.view(mx.float32)
        return Slots(
            without_gradient(x, _NO_GRADIENT), ids.view(mx.int32), without_gradient(weights, _NO_GRADIENT), tokens
        )

    def _require_fitting(self, x: mx.array, indices: mx.array, scores: mx.array) -> int:
        """Returns the number of tokens; raises InvalidArgument for shapes or dtypes that do not fit."""
        if x.ndim != 2 or x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
            raise InvalidArgument(
                "LowLatencyExchange.dispatch: tokens are float32, float16 or bfloat16 of shape (tokens, D), not "
                f"{dtype_name(x.dtype)} of shape {x.shape}"
            )
        tokens = x.shape[0]
        if problem := self._too_many(tokens):
            raise InvalidArgument(problem)
        expected = (tokens, self.top_k)
        if indices.shape != expected or scores.shape != expected or not mx.issubdtype(indices.dtype, mx.integer):
            raise InvalidArgument(
                f"LowLatencyExchange.dispatch: indices (shape {indices.shape}) must be integers and, as scores (shape "
                f"{scores.shape}), of shape (tokens, top_k) = {expected}"
            )
        return tokens


def _merged(indices: mx.array, scores: mx.array) -> tuple[mx.array, mx.array]:
    """Indices and weights with each expert of a token once, at its first place, with the sum of its weights."""
    equal = indices[..., :, None] == indices[..., None, :]
    weights = mx.where(equal, scores.astype(mx.float32)[..., None, :], 0).sum(axis=-1)
    again = mx.tril(equal, -1).any(axis=-1)
    return mx.where(again, _NONE, indices), weights
