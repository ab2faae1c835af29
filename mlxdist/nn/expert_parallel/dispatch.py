"""Tokens to the owners of their experts, results back: exactly the routed rows, nothing padded, nothing dropped.

    received, experts, handle = dispatch(x, indices, placement, group=group)
    y = ...                                      # the local expert experts[i] on received[i]
    out = combine(y, handle, scores)             # (tokens, d), or (tokens, k, d) without scores

A token travels once to each rank that holds some of its experts; there its row is copied for each of them. With
``scores``, its results are weighted and added up where they are computed, so one row for each token and rank comes
back. Without, each pair of a token and an expert has a row of its own.

Three messages go out: what each rank sends (all_gather, a few numbers), the experts of each row (all_to_all_v) and the
rows (all_to_all_v); with scores a fourth, their weights. A :class:`DispatchHandle` keeps what the first two say. Sizes
depend on the routing, so they need its numbers on the host: dispatch does not work in ``mx.compile``. Rows stay lazy.

Dispatch and combine are each other's gradient (Lepikhin et al. 2020, "GShard", arXiv:2006.16668, has the scheme; DeepEP
the handle). On every rank y must depend on what was received, also where that is nothing, or this rank's backward pass
has fewer messages.
"""

from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.opaque import Opaque, create
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather, all_to_all_v
from mlxdist.runtime.operations.ordering import Order, chained

from ..rank_checks import agree, on_host
from .fp8 import ExchangeDtype, through, through_e4m3
from .pairs import Pairs, places_of, sum_rows, take_or_zero, take_rows
from .placement import Placement, wrong_index, wrong_ranks
from .replicated import Experts, optional, with_rows

__all__ = [
    "DispatchHandle",
    "combine",
    "dispatch",
    "dispatched",
    "dispatched_alike",
    "exchange_routing",
    "outgoing",
    "require_results",
    "route",
]


class Outgoing(NamedTuple):
    """The rows and pairs that this rank will send to each rank, found from its own tokens alone."""

    rows: list[np.ndarray]  # of each rank: the tokens that it gets
    experts: list[np.ndarray]  # of each rank: (its rows, k), its local experts, -1 where another rank has it
    slots: list[np.ndarray]  # of each rank: the flat places in (tokens, k) that it computes
    shape: tuple[int, int]  # (tokens, k)

    def facts(self) -> list[int]:
        """The numbers that the other ranks need: how many rows, then how many pairs, go to each rank."""
        return [len(rows) for rows in self.rows] + [len(slots) for slots in self.slots]


class DispatchHandle(metaclass=Opaque):
    """The sources and destinations of the rows of one routing: made by :func:`dispatch`, used by :func:`combine`.

    It may be used again: ``dispatch(x, handle=handle)`` for other rows of the same tokens, ``combine`` any number of
    times, in the same order on all ranks. It holds no rows itself.
    """

    _made_by = "dispatch"

    def __init__(self, group: Group, sent: Outgoing, rows: list[int], pairs: list[int], received: np.ndarray) -> None:
        self.group = group
        self.tokens, self.top_k = sent.shape
        self.rows_to = [len(chunk) for chunk in sent.rows]
        """Rows of tokens that go to each rank."""
        self.rows_from = rows
        """Rows of tokens that come from each rank."""
        self.pairs_to = [len(chunk) for chunk in sent.slots]
        """Pairs of a token and an expert that each rank computes for this one."""
        self.pairs_from = pairs
        """Pairs that this rank computes for each rank."""
        self.sent_rows = np.concatenate(sent.rows)
        """The token of each row that goes out, in the order in which they go."""
        self.sent_slots = np.concatenate(sent.slots)
        """The flat place in (tokens, k) of each pair, in the order in which their results come back."""
        self.pairs = Pairs(received)
        """The pairs that this rank computes, sorted by expert."""

    @property
    def experts(self) -> mx.array:
        """The local expert of each row that :func:`dispatch` returns, ascending: integers, int32 of shape (pairs,)."""
        return self.pairs.experts

    def add_up(self, sums: mx.array) -> mx.array:
        """The weighted sums that came back, a row for each of ``sent_rows``, added up in float32: (tokens, d)."""
        by_token = np.argsort(self.sent_rows, kind="stable")  # those of rank 0 first, then rank 1 ...
        return sum_rows(sums.astype(mx.float32), by_token, self.sent_rows[by_token], self.tokens).astype(sums.dtype)

    def __repr__(self) -> str:
        return (
            f"<DispatchHandle of {self.tokens} tokens x {self.top_k} experts on rank {self.group.rank()}: rows to "
            f"{self.rows_to}, from {self.rows_from}; {len(self.pairs)} pairs here>"
        )


def dispatch(
    x: mx.array,
    indices: mx.array | None = None,
    placement: Placement | None = None,
    *,
    group: GroupLike | None = None,
    handle: DispatchHandle | None = None,
    exchange_dtype: ExchangeDtype = None,
) -> tuple[mx.array, mx.array, DispatchHandle]:
    """Sends each token to the ranks that hold its experts. Collective; waits for the routing, not for the rows.

    Args:
        x: this rank's tokens, (tokens, d) of a float dtype. Ranks may have different numbers of them, also none.
        indices: the experts of each token, integers of shape (tokens, k); -1 for none. Evaluated here.
        placement: which rank holds which expert; equal on all ranks.
        group: its ranks.
        handle: of an earlier call, instead of the three before: sends ``x`` the same way, with one message.
        exchange_dtype: what the rows travel as: ``None`` for their own dtype, ``mx.float16``, ``mx.bfloat16``,
            ``mx.float32``, or "fp8" (:mod:`mlxdist.nn.expert_parallel.fp8`).

    Returns:
        The rows of this rank's pairs, (pairs, d) of the dtype of x, sorted by expert; the local expert of each of them,
        int32 (pairs,); the handle for :func:`combine`.

    Raises:
        InvalidArgument: ``indices`` are no experts, or arguments do not fit; inside ``mx.compile``. With ``handle``:
            one of the three is given, too, or ``x`` is not of its tokens; on the rank where that is so.
        Mismatch: the ranks disagree about d, k or the placement. Without ``handle`` both are the same on every rank,
            before any row is sent.
    """
    if handle is not None:
        given = {"indices": indices, "placement": placement, "group": group}
        if names := [name for name, value in given.items() if value is not None]:
            raise InvalidArgument(
                f"dispatch: the handle has {' and '.join(names)} of its own; leave out one or the other"
            )
    if handle is None:
        if indices is None or placement is None:
            raise InvalidArgument("dispatch: without a handle it needs indices and a placement")
        handle = route(indices, placement, group, x=x)
    elif x.ndim != 2 or x.shape[0] != handle.tokens:
        raise InvalidArgument(f"dispatch: x has shape {x.shape}, but the handle is of {handle.tokens} tokens")
    return _send_out(x, handle, exchange_dtype, Order()), handle.experts, handle


def combine(
    y: mx.array, handle: DispatchHandle, scores: mx.array | None = None, *, exchange_dtype: ExchangeDtype = None
) -> mx.array:
    """Brings the results back to the tokens. Collective and lazy.

    Args:
        y: the results of this rank's pairs, (pairs, d), in the order of what :func:`dispatch` returned.
        handle: from there.
        scores: (tokens, k) weights of the router. They travel to the experts in float32.
        exchange_dtype: what the rows travel as, as for :func:`dispatch`.

    Returns:
        In the dtype of y, with zeros where an index was -1. With ``scores`` the weighted sums, (tokens, d), added up in
        float32 and rounded for the wire; without (tokens, k, d).

    Raises:
        InvalidArgument: shapes that do not fit; on the rank where they do not.
    """
    require_results("combine", handle, y)
    shape = (handle.tokens, handle.top_k)
    if scores is not None and scores.shape != shape:
        raise InvalidArgument(f"combine: scores have shape {scores.shape}, but the handle is of {shape}")
    return _bring_back(y, handle, scores, exchange_dtype, Order())


def _send_out(x: mx.array, handle: DispatchHandle, exchange_dtype: ExchangeDtype, order: Order) -> mx.array:
    """The rows of this rank's pairs: what :func:`dispatch` does once it has a handle."""
    rows = take_rows(x, handle.sent_rows)
    (rows,) = _exchange(rows, handle.rows_to, handle.rows_from, handle.group, exchange_dtype, order)
    return handle.pairs.expand(rows)


def _bring_back(
    y: mx.array, handle: DispatchHandle, scores: mx.array | None, exchange_dtype: ExchangeDtype, order: Order
) -> mx.array:
    """The results of the tokens: what :func:`combine` does with arguments that fit."""
    group, pairs = handle.group, handle.pairs
    if scores is None:
        places = places_of(pairs.order, len(pairs))
        (y,) = _exchange(take_rows(y, places), handle.pairs_from, handle.pairs_to, group, exchange_dtype, order)
        slots = places_of(handle.sent_slots, handle.tokens * handle.top_k)
        return take_or_zero(y, slots).reshape(handle.tokens, handle.top_k, y.shape[1])
    weights = take_rows(scores.reshape(-1).astype(mx.float32), handle.sent_slots)
    weights, y = _exchange(weights, handle.pairs_to, handle.pairs_from, group, None, order, y)
    sums = pairs.weigh(y, take_rows(weights, pairs.order)).astype(y.dtype)
    (sums,) = _exchange(sums, handle.rows_from, handle.rows_to, group, exchange_dtype, order)
    return handle.add_up(sums)


def route(
    indices: mx.array,
    placement: Placement,
    group: GroupLike | None = None,
    *,
    x: mx.array | None = None,
    name: str = "dispatch",
) -> DispatchHandle:
    """The routing of :func:`dispatch` alone. Collective, and awaited. ``x``, if given, is checked with it."""
    group = group_of(group)
    selected = on_host(indices)
    if selected is None:
        raise InvalidArgument(f"{name}: the sizes of its messages depend on the indices, so it cannot be compiled")
    problem = wrong_ranks(name, placement, group) or _problem(name, selected, placement, x)
    # A rank with a problem still takes part, with no tokens: all ranks raise it in agree().
    sent = outgoing(np.zeros((0, 1), np.int64) if problem else selected.astype(np.int64), placement)
    equal = {
        "number of experts per token": selected.shape[-1:],
        "hidden size": x.shape[-1:] if x is not None else "",
        "placement of the experts": placement,
    }
    facts = [0] * (2 * group.size()) if problem else sent.facts()
    return exchange_routing(sent, agree(name, group, problem, equal, facts), group)


def outgoing(selected: np.ndarray, placement: Placement) -> Outgoing:
    """The rows and pairs that a rank with the experts ``selected``, (tokens, k) or -1, sends. Calls no collective."""
    owners = np.where(selected >= 0, placement.owners[selected], -1)
    rows, experts, slots = [], [], []
    for rank in range(placement.ranks):
        there = owners == rank
        tokens = np.flatnonzero(there.any(axis=1))
        local = np.where(there[tokens], selected[tokens] - placement.local(rank).start, -1)
        rows.append(tokens)
        experts.append(local.astype(np.int32))
        slots.append(np.flatnonzero(there))
    return Outgoing(rows, experts, slots, selected.shape)


def exchange_routing(sent: Outgoing, facts: np.ndarray, group: Group) -> DispatchHandle:
    """The handle, from what all ranks will send: ``facts`` are all ranks' :meth:`Outgoing.facts`."""
    ranks, rank = group.size(), group.rank()
    rows, pairs = facts[:, rank].tolist(), facts[:, ranks + rank].tolist()
    experts = mx.array(np.concatenate(sent.experts))
    received = all_to_all_v(experts, [len(chunk) for chunk in sent.rows], rows, group=group)
    return create(DispatchHandle, group, sent, rows, pairs, np.array(received))


def _exchange(
    rows: mx.array,
    send: list[int],
    receive: list[int],
    group: Group,
    dtype: ExchangeDtype,
    order: Order,
    *passed: mx.array,
) -> list[mx.array]:
    """all_to_all_v of rows that travel as ``dtype``, with their gradient; and ``passed`` behind it."""
    there = partial(all_to_all_v, send_counts=send, recv_counts=receive, group=group)
    back = partial(all_to_all_v, send_counts=receive, recv_counts=send, group=group)
    forward, backward = chained(partial(through_e4m3, dtype, there)), chained(partial(through, dtype, back))
    return order.run(forward, backward, [rows], passed)


def _problem(name: str, selected: np.ndarray, placement: Placement, x: mx.array | None) -> str | None:
    if selected.dtype.kind not in "iu" or selected.ndim != 2:
        return f"{name}: indices must be integers of shape (tokens, k), not {selected.dtype} of shape {selected.shape}"
    if x is not None and (x.ndim != 2 or x.shape[0] != selected.shape[0]):
        return f"{name}: x has shape {x.shape}, but indices {selected.shape}; both need one row per token"
    return wrong_index(f"{name}: indices", placement, selected, least=-1)


def _route_alike(selected: np.ndarray, placement: Placement, group: Group) -> DispatchHandle:
    """The handle of a rank that holds the indices of all ranks: (ranks * tokens, k), a shard of them for each rank.

    No collective: each rank computes what the others will send it.
    """
    sent = [outgoing(chunk, placement) for chunk in np.split(selected, group.size())]
    here = group.rank()
    rows, pairs = [len(one.rows[here]) for one in sent], [len(one.slots[here]) for one in sent]
    return create(DispatchHandle, group, sent[here], rows, pairs, np.concatenate([one.experts[here] for one in sent]))


def dispatched(x: mx.array, handle: DispatchHandle, scores: mx.array | None, experts: Experts) -> mx.array:
    """The layer on the tokens (tokens, d) of this rank: (tokens, d), or (tokens, k, d) without scores."""
    received = _send_out(x, handle, experts.exchange_dtype, experts.order)
    y = experts.compute(received, handle.experts, True)
    return _bring_back(y, handle, scores, experts.exchange_dtype, experts.order)


def dispatched_alike(x: mx.array, selected: np.ndarray, scores: mx.array | None, experts: Experts) -> mx.array:
    """The same for tokens, and their experts ``selected``, that all ranks hold alike: each sends its shard of them.

    The results are gathered. All ranks hold the routing, so it needs no message.
    """
    group, tokens = experts.group, x.shape[0]
    rows = -(-tokens // group.size())
    padded = np.full((rows * group.size(), selected.shape[1]), -1, np.int64)
    padded[:tokens] = selected
    mine = slice(group.rank() * rows, (group.rank() + 1) * rows)

    gather = partial(all_gather, group=group)
    inputs = [with_rows(array, len(padded)) for array in optional((x, scores))]
    x, *weights = experts.order.run(lambda arrays: [array[mine] for array in arrays], chained(gather), inputs)
    y = dispatched(x, _route_alike(padded, experts.placement, group), weights[0] if weights else None, experts)
    joined = chained(partial(through, experts.exchange_dtype, gather))
    (y,) = experts.order.run(joined, lambda cotangents: [cotangents[0][mine]], [y])
    return y[:tokens]


def require_results(name: str, handle: DispatchHandle, y: mx.array) -> None:
    """Rejects results that are not one row for each pair of this rank."""
    if y.ndim != 2 or y.shape[0] != len(handle.pairs):
        raise InvalidArgument(f"{name}: y has shape {y.shape}, but this rank has {len(handle.pairs)} rows to return")
