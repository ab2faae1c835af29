"""Dispatch and combine that go on while this rank computes something else, and how much of them was hidden by that.

    exchange = OverlappedExchange(placement, group=group)
    sent = exchange.dispatch_async(x, indices, scores)
    mx.eval(shared := shared_expert(x))                       # or the attention of the next micro-batch
    rows, experts = sent.wait()
    back = exchange.combine_async(local_experts(rows, experts), sent)
    ...
    y = back.wait() + shared
    print(exchange.overlap)

(DeepSeek-V3, arXiv:2412.19437, hides the exchange so behind the shared expert and a second micro-batch.)

The rows are evaluated, and then travel as operations with a handle (mlxdist.runtime.operations.collectives,
``async_op``), which the engine's own thread carries on. A second stream of MLX would do without the copy of what
arrives, but operations on two streams may begin in another order on each rank. Handles are started in the order of the
program, in a group of their own, and so may go on next to any other collective.

The hidden time is that in which transfers were in flight, as the engine measured it, less that in which this rank did
nothing but wait for them. A transfer that ends unnoticed during another one's wait counts as waited for to the end of
it, so the number is rather too small.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.group.handle import Handle
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_to_all_v
from mlxdist.runtime.operations.ordering import is_traced

from ..mappings import without_gradient
from .dispatch import DispatchHandle as Routing
from .dispatch import require_results, route
from .fp8 import ExchangeDtype, pack_e4m3, unpack_e4m3
from .pairs import take_rows
from .placement import Placement, wrong_ranks

__all__ = ["CombineInFlight", "DispatchInFlight", "Overlap", "OverlappedExchange"]

_NO_GRADIENT = (
    "OverlappedExchange has no gradient; train with dispatch and combine of mlxdist.nn.expert_parallel, which have one"
)


class Overlap(NamedTuple):
    """The seconds of all transfers that have been waited for. Made by ``OverlappedExchange.overlap``.

    ``in_flight``: the time in which transfers were under way, added up; ``waited``: the part in which this rank waited.
    """

    in_flight: float
    waited: float

    @property
    def hidden(self) -> float:
        """Seconds of communication that went on while this rank did something else."""
        return max(0.0, self.in_flight - self.waited)

    @property
    def share(self) -> float:
        """``hidden`` of ``in_flight``, 0 to 1."""
        return self.hidden / self.in_flight if self.in_flight else 0.0

    def __str__(self) -> str:
        return (
            f"{self.in_flight * 1e3:.3f} ms of communication: {self.hidden * 1e3:.3f} ms hidden ({self.share:.0%}), "
            f"{self.waited * 1e3:.3f} ms waited for"
        )


class OverlappedExchange:
    """Exchanges of one layer, or of several that have the same placement. Collective: all ranks make it.

    Args:
        placement: which rank holds which expert; equal on all ranks.
        group: its ranks; ``None`` is the group of ``mlxdist.init()``. Transfers are in a group of their own, split off.

    Raises:
        InvalidArgument: the placement is for another number of ranks.
        Also the errors of `Group.split`.
    """

    def __init__(self, placement: Placement, *, group: GroupLike | None = None) -> None:
        self.placement = placement
        self._group = group_of(group)
        if problem := wrong_ranks("OverlappedExchange", placement, self._group):
            raise InvalidArgument(problem)
        transfers = self._group.split(0)  # a group that has no other use
        assert transfers is not None  # as it would be for a negative color
        self._transfers = transfers
        self._in_flight: list[_Transfer] = []
        self.reset_overlap()

    @property
    def overlap(self) -> Overlap:
        """The overlap since this exchange was made, or since `reset_overlap` was called."""
        return Overlap((self._transfers.stats()["operation_ns"] - self._before) / 1e9, self._waited)

    def reset_overlap(self) -> None:
        """Begins to count from zero. Raises `InvalidArgument` while something is in flight."""
        if self._in_flight:
            raise InvalidArgument(f"reset_overlap: {len(self._in_flight)} transfers are in flight; wait for them first")
        self._before = self._transfers.stats()["operation_ns"]
        self._waited = 0.0

    def dispatch_async(
        self, x: mx.array, indices: mx.array, scores: mx.array, *, exchange_dtype: ExchangeDtype = None
    ) -> DispatchInFlight:
        """Starts what :func:`mlxdist.nn.expert_parallel.dispatch.dispatch` does. Collective.

        Evaluates ``x`` and waits for the routing; the rows and their weights are under way when it returns. It has no
        gradient, and does not work inside ``mx.compile``.

        Args:
            x, indices, exchange_dtype: as for `dispatch`: (tokens, d) of a float dtype, and integers (tokens, k).
            scores: the weights of the experts, floats (tokens, k).

        Raises:
            InvalidArgument: as `dispatch`, on all ranks; ``scores`` of another shape, on the rank that has them.
        """
        if scores.shape != indices.shape:
            raise InvalidArgument(f"dispatch_async: scores have shape {scores.shape}, indices {indices.shape}")
        routing = route(indices, self.placement, self._group, x=x, name="dispatch_async")
        rows = take_rows(x, routing.sent_rows)
        weights = take_rows(scores.reshape(-1, 1).astype(mx.float32), routing.sent_slots)
        mx.eval(rows, weights)  # together, and before the first of them leaves
        started = self._start(rows, routing.rows_to, routing.rows_from, exchange_dtype)
        return DispatchInFlight(routing, started, self._start(weights, routing.pairs_to, routing.pairs_from, None))

    def combine_async(
        self, y: mx.array, sent: DispatchInFlight, *, exchange_dtype: ExchangeDtype = None
    ) -> CombineInFlight:
        """Starts what :func:`.dispatch.combine` does with scores. Collective; evaluates ``y``.

        Args:
            y: results for the rows that ``sent.wait()`` returned, in their order: (pairs, d) of a float dtype.
            sent: from `dispatch_async`.
            exchange_dtype: as for `combine`.

        Raises:
            InvalidArgument: y has another number of rows.
        """
        routing = sent.routing
        require_results("combine_async", routing, y)
        weights = sent.weights.wait().reshape(-1)
        sums = routing.pairs.weigh(y, take_rows(weights, routing.pairs.order)).astype(y.dtype)
        transfer = self._start(sums, routing.rows_from, routing.rows_to, exchange_dtype)
        return CombineInFlight(routing, transfer)

    def _start(self, rows: mx.array, send: list[int], receive: list[int], exchange_dtype: ExchangeDtype) -> _Transfer:
        dtype = exchange_dtype if isinstance(exchange_dtype, mx.Dtype) else rows.dtype
        # Bytes, since NumPy has no bfloat16.
        wire = pack_e4m3(rows) if exchange_dtype == "fp8" else rows.astype(dtype).view(mx.uint8)
        mx.eval(wire)
        handle: Any = all_to_all_v(np.asarray(wire), send, receive, group=self._transfers, async_op=True)
        self._in_flight.append(_Transfer(self, rows, exchange_dtype == "fp8", dtype, handle))
        return self._in_flight[-1]

    def _wait_for(self, transfer: _Transfer) -> np.ndarray:
        # A wait for one transfer is a wait for all in flight: each of them counts this time as its own.
        under_way = sum(not other.handle.done() for other in self._in_flight)
        begin = time.perf_counter()
        try:
            return transfer.handle.wait()
        finally:
            self._waited += under_way * (time.perf_counter() - begin)
            self._in_flight.remove(transfer)


class DispatchInFlight:
    """Tokens that are under way to their experts; made by `OverlappedExchange.dispatch_async`."""

    def __init__(self, routing: Routing, rows: _Transfer, weights: _Transfer) -> None:
        self.routing = routing
        self.weights = weights
        self._rows = rows

    def done(self) -> bool:
        """Whether all has arrived and left. Does not wait."""
        return self._rows.handle.done() and self.weights.handle.done()

    def wait(self) -> tuple[mx.array, mx.array]:
        """The rows of this rank's pairs, (pairs, d), sorted by expert, and the local expert of each, int32 (pairs,).

        May be called again. Raises the error of the operation.
        """
        return self.routing.pairs.expand(self._rows.wait()), self.routing.experts


class CombineInFlight:
    """Results that are under way to their tokens; made by `OverlappedExchange.combine_async`."""

    def __init__(self, routing: Routing, sums: _Transfer) -> None:
        self._routing = routing
        self._sums = sums

    def done(self) -> bool:
        """Whether all has arrived and left. Does not wait."""
        return self._sums.handle.done()

    def wait(self) -> mx.array:
        """The weighted sums, (tokens, d), dtype of the results. May be called again. Raises as `DispatchInFlight`."""
        return self._routing.add_up(self._sums.wait())


@dataclass(eq=False)
class _Transfer:
    """Rows in flight: what is sent, then what has arrived."""

    exchange: OverlappedExchange
    rows: mx.array
    fp8: bool
    dtype: mx.Dtype  # on the wire
    handle: Handle
    arrived: bool = False

    def wait(self) -> mx.array:
        if not self.arrived:
            wire, dtype = mx.array(self.exchange._wait_for(self)), self.rows.dtype
            received = unpack_e4m3(wire, dtype) if self.fp8 else wire.view(self.dtype).astype(dtype)
            if is_traced(self.rows):  # MLX does not see that they depend on each other: a gradient would be missing
                received = without_gradient(mx.depends(received, self.rows), _NO_GRADIENT)
            self.rows, self.arrived = received, True
        return self.rows
