"""Chooses the way in which an expert-parallel layer exchanges tokens, by a model of the measured cost of each.

The policy chooses how tokens travel, never whether: every way computes the same result, of the same rows.

The model. n ranks hold the experts; T tokens of all ranks together, each of d elements of s bytes, go to k experts.
A collective of which a rank sends b bytes takes L + b / W seconds: its latency and its bandwidth, measured for each
kind of collective by `calibrate`. With B = T d s, a rank sends

    tokens      mode        collectives                                          bytes
    sharded     replicated  all_gather, all_sum                                  3 (n-1)/n B
                gather      all_gather, sum_scatter                              2 (n-1)/n B
                dispatch    plan, 3 all_to_all_v: rows, weights, rows back       2 q B/n + w
    replicated  replicated  all_sum                                              2 (n-1)/n B
                gather      sum_scatter, all_gather                              2 (n-1)/n B
                dispatch    3 all_to_all_v as above, all_gather                  2 q B/n + w + (n-1)/n B

A token is sent once to each other rank that has experts of it, so q is the number of those: (n-1) (1 - (1-1/n)^k) if
all experts are chosen equally often and independently. w = 4 k (n-1)/n T/n are the float32 weights. "Plan": the ranks
exchange their counts and the experts of their rows, and the host waits for both, P seconds; ranks that hold the same
tokens compute that by themselves.

All ranks must choose the same. So a choice depends on numbers that are equal on all ranks (T, what the slowest rank
measured) and on how often `Policy.choose` was called, never on a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike, engine_of
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather, all_max, all_sum, all_to_all_v, sum_scatter

from .dispatch import route
from .placement import Placement

__all__ = ["MODES", "Cost", "LinkCosts", "Policy", "Workload", "calibrate"]

MODES = ("replicated", "gather", "dispatch")
COLLECTIVES = ("all_sum", "all_gather", "sum_scatter", "all_to_all_v")
SMALL, LARGE = 1 << 10, 1 << 20  # bytes of the arrays that calibrate() sends
PLANNED_TOKENS = 64
REPEATS = 7
TABLE = tuple(1 << i for i in range(13))  # token counts of the printed table


@dataclass(frozen=True)
class Cost:
    """The cost of a collective: ``latency`` in seconds; ``bandwidth`` in bytes a second, at which a rank sends."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


# Before anything is measured. soft: two ranks of one host; librdma: Thunderbolt 5; ibverbs: 100 Gbit/s Ethernet.
_ASSUMED = {"soft": Cost(20e-6, 4e9), "librdma": Cost(30e-6, 5e9), "ibverbs": Cost(15e-6, 10e9)}


@dataclass(frozen=True)
class LinkCosts:
    """The costs of exchanges between the ranks of a group.

    Attributes:
        provider, ranks, hosts: as `Group.provider` names it, and how many.
        costs: by collective: "all_sum", "all_gather", "sum_scatter", "all_to_all_v".
        plan: seconds that dispatch takes before it sends tokens of the ranks' own.
        measured: False where these are assumptions.
    """

    provider: str
    ranks: int
    costs: dict[str, Cost] = field(hash=False)
    plan: float
    measured: bool = False
    hosts: int = 1

    @classmethod
    def of(cls, *, group: Group) -> LinkCosts:
        """The costs in rank 0's tuning file for such a ``group`` (`mlxdist calibrate`), else :meth:`assumed` ones."""
        shape = group.provider, group.size(), engine_of(group).hosts
        return cls.known(engine_of(group).world.native_group.tuning.expert_links, *shape) or cls.assumed(*shape)

    @classmethod
    def known(cls, links: Sequence[Mapping[str, Any]], provider: str, ranks: int, hosts: int) -> LinkCosts | None:
        """The costs that ``links``, a section of the tuning file, has of a group with this ``provider``, number of
        ``ranks`` and of ``hosts``; None where it has none."""
        for known in links:
            costs = {name: Cost(**cost) for name, cost in known["costs"].items() if name in COLLECTIVES}
            alike = (ranks, hosts) == (known["ranks"], known["hosts"]) and len(costs) == len(COLLECTIVES)
            if alike and set(provider.split("+")) == set(known["provider"].split("+")):
                return cls(provider, ranks, costs, known["plan"], measured=True, hosts=hosts)
        return None

    @classmethod
    def assumed(cls, provider: str, ranks: int, hosts: int = 1) -> LinkCosts:
        """The costs to expect of ``provider`` between ``ranks`` ranks on ``hosts`` hosts.

        With `mlxdist calibrate` the choice is better.
        """
        known = [_ASSUMED[name] for name in provider.split("+") if name in _ASSUMED]  # "soft+librdma"
        cost = max(known, key=lambda cost: cost.seconds(SMALL), default=_ASSUMED["soft"])
        # Two collectives, and the host waits for both: about one latency each.
        return cls(provider, ranks, dict.fromkeys(COLLECTIVES, cost), plan=4 * cost.latency, hosts=hosts)


@dataclass(frozen=True)
class Workload:
    """Everything of a call besides its tokens.

    Attributes:
        top_k: experts of a token.
        hidden: elements of a token.
        itemsize: bytes of an element on the wire.
        sharded: each rank has tokens of its own; otherwise all have the same ones.
    """

    top_k: int
    hidden: int
    itemsize: int
    sharded: bool = True

    def __post_init__(self) -> None:
        if min(self.top_k, self.hidden, self.itemsize) < 1:
            raise InvalidArgument(f"Workload: top_k, hidden and itemsize must be at least 1, not {self}")

    def parts(self, mode: str, tokens: int, ranks: int) -> list[tuple[str, float]]:
        """The collectives of ``mode`` and how many bytes one of ``ranks`` sends in each for ``tokens``; see the module.

        Raises InvalidArgument for another mode.
        """
        share = (ranks - 1) / ranks
        full = share * tokens * self.hidden * self.itemsize
        if mode == "replicated":
            return [*([("all_gather", full)] if self.sharded else []), ("all_sum", 2 * full)]
        if mode == "gather":
            return [("all_gather", full), ("sum_scatter", full)]
        if mode == "dispatch":
            own = tokens / ranks
            rows = own * (ranks - 1) * (1 - (1 - 1 / ranks) ** self.top_k) * self.hidden * self.itemsize
            weights = own * self.top_k * share * 4
            joined = [] if self.sharded else [("all_gather", full)]
            return [*(("all_to_all_v", nbytes) for nbytes in (rows, weights, rows)), *joined]
        raise InvalidArgument(f"mode is {mode!r}, not one of {', '.join(MODES)}")

    def seconds(self, mode: str, tokens: int, link: LinkCosts) -> float:
        """The seconds that exchanging ``tokens`` by ``mode`` over ``link`` takes by the model. 0 on one rank."""
        if link.ranks == 1:
            return 0.0
        sent = sum(link.costs[name].seconds(nbytes) for name, nbytes in self.parts(mode, tokens, link.ranks))
        return sent + (link.plan if mode == "dispatch" and self.sharded else 0)

    @lru_cache(maxsize=1024)  # decoding calls it with the same arguments at every layer of every step
    def cheapest(self, tokens: int, link: LinkCosts) -> str:
        """The mode that takes least for ``tokens`` over ``link``; of equal ones the first of `MODES`."""
        return min(MODES, key=lambda mode: self.seconds(mode, tokens, link))


class Policy:
    """Chooses a mode for each call of a layer, with hysteresis.

    A mode is kept until another one is cheaper by the share ``margin``, and at least for ``cooldown``
    calls after the last change. Where another mode is ``urgent`` times as cheap (a prefill after decoding), neither
    holds. Each `Workload` has a memory of its own. All ranks must call it alike: it counts calls.

    Args:
        link: what `calibrate` measured, or `LinkCosts.of`; equal on all ranks.
        margin: from 0 to less than 1.
        cooldown: calls.
        urgent: more than 1.
        forced: always this mode, whatever it costs.

    Raises:
        InvalidArgument: an argument out of its range.
    """

    def __init__(
        self,
        link: LinkCosts,
        *,
        margin: float = 0.1,
        cooldown: int = 32,
        urgent: float = 2.0,
        forced: str | None = None,
    ) -> None:
        if not 0 <= margin < 1 or cooldown < 0 or not urgent > 1:
            raise InvalidArgument(
                f"Policy: margin ({margin}) must be from 0 to less than 1, cooldown ({cooldown}) at least 0 and urgent "
                f"({urgent}) more than 1"
            )
        if forced is not None and forced not in MODES:
            raise InvalidArgument(f"Policy: forced is {forced!r}, not one of {', '.join(MODES)}")
        self.link = link
        self.margin = margin
        self.cooldown = cooldown
        self.urgent = urgent
        self.forced = forced
        self._states: dict[Workload, _State] = {}

    def choose(self, tokens: int, top_k: int, hidden: int, itemsize: int, sharded: bool = True) -> str:
        """The mode of this call of ``tokens`` of all ranks together, equal on all ranks.

        Tokens that all ranks hold are counted once. ``top_k``, ``hidden``, ``itemsize`` and ``sharded`` are
        as in `Workload`. Raises InvalidArgument for a number that cannot be.
        """
        if tokens < 0:
            raise InvalidArgument(f"choose: tokens must be at least 0, not {tokens}")
        workload = Workload(top_k, hidden, itemsize, sharded)
        if self.forced is not None:
            return self.forced
        best = workload.cheapest(tokens, self.link)
        state = self._states.setdefault(workload, _State(best, self.cooldown))
        if best != state.mode:
            now, then = (workload.seconds(mode, tokens, self.link) for mode in (state.mode, best))
            is_due = state.calls >= self.cooldown and then < (1 - self.margin) * now
            if is_due or then * self.urgent < now:
                state.mode, state.calls = best, 0
        state.calls += 1
        return state.mode

    def thresholds(self, workload: Workload, up_to: int = 1 << 16) -> list[tuple[int, str]]:
        """The number of tokens, to ``up_to``, from which each mode is cheapest for ``workload``: [(1, "gather"), ...].

        Costs are straight lines over the tokens, so each mode is in the list at most once.
        """
        found = [(1, workload.cheapest(1, self.link))]
        while True:
            (low, mode), high = found[-1], up_to
            if workload.cheapest(high, self.link) == mode:
                return found
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if workload.cheapest(middle, self.link) == mode else (low, middle)
            found.append((high, workload.cheapest(high, self.link)))

    def table(self, workload: Workload) -> str:
        """The microseconds of each mode for ``workload`` by number of tokens, and what is known of the link."""
        link = self.link
        how = "measured" if link.measured else "assumed"
        lines = [f"{link.ranks} ranks, provider {link.provider}; {how}: plan {link.plan * 1e6:.1f} us"]
        for name, cost in link.costs.items():
            lines.append(f"  {name:<13}{cost.latency * 1e6:>8.1f} us  + bytes / {cost.bandwidth / 1e9:.2f} GB/s")
        kind = "tokens of its own on each rank" if workload.sharded else "the same tokens on all ranks"
        lines.append(f"top {workload.top_k}, hidden {workload.hidden}, {workload.itemsize} bytes an element, {kind}")
        lines.append(f"{'tokens':>7}" + "".join(f"{mode:>13}" for mode in MODES) + "  microseconds")
        for tokens in TABLE:
            best = workload.cheapest(tokens, link)
            times = {mode: f"{workload.seconds(mode, tokens, link) * 1e6:.1f}" for mode in MODES}
            cells = [times[mode] + ("*" if mode == best else " ") for mode in MODES]
            lines.append(f"{tokens:>7}" + "".join(f"{cell:>13}" for cell in cells))
        steps = ", ".join(f"from {tokens} {mode}" for tokens, mode in self.thresholds(workload))
        forced = f"; forced: {self.forced}" if self.forced else ""
        lines.append(
            f"cheapest: {steps}; kept unless another saves {self.margin:.0%} and {self.cooldown} calls have passed, or "
            f"is {self.urgent:g} times as cheap{forced}"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        """The tables of the workloads that were seen."""
        return "\n\n".join(self.table(workload) for workload in self._states) or "no call yet"


@dataclass
class _State:
    mode: str
    calls: int  # since the last change


def calibrate(*, group: GroupLike | None = None, repeats: int = REPEATS) -> LinkCosts:
    """Measures the collectives of the three modes between the ranks of ``group``. All ranks call it.

    Each is timed on small and on large arrays, as lazy operations of MLX, ``repeats`` times; what counts is the median,
    as the slowest rank saw it. Takes some ten milliseconds. All ranks get the same numbers.

    Raises:
        InvalidArgument: ``repeats`` is less than 1.
        Also the errors of the operations.
    """
    group = group_of(group)
    if repeats < 1:
        raise InvalidArgument(f"calibrate: repeats must be at least 1, not {repeats}")
    if group.size() == 1:
        return LinkCosts(
            group.provider, 1, dict.fromkeys(COLLECTIVES, Cost(0.0, float("inf"))), plan=0.0, measured=True
        )
    small, large = _times(group, repeats, SMALL), _times(group, repeats, LARGE)
    costs = {}
    for name in COLLECTIVES:
        (sent_small, fast), (sent_large, slow) = small[name], large[name]
        # Noise may turn the line around; a link faster than memory is no link.
        bandwidth = min((sent_large - sent_small) / max(slow - fast, 1e-9), 1e12)
        costs[name] = Cost(max(fast - sent_small / bandwidth, 1e-7), bandwidth)
    plan, hosts = _plan_seconds(group, repeats), engine_of(group).hosts
    return LinkCosts(group.provider, group.size(), costs, plan, measured=True, hosts=hosts)


def _times(group: Group, repeats: int, nbytes: int) -> dict[str, tuple[float, float]]:
    """The bytes that a rank sends, and the seconds, for each collective on an array of about ``nbytes`` bytes."""
    size = group.size()
    rows = max(1, nbytes // 1024 // size)
    x = mx.ones((rows * size, 256))
    part = x[:rows]
    mx.eval(x, part)
    counts = [rows] * size
    share = (size - 1) / size * x.nbytes
    calls: dict[str, tuple[float, Callable[[], mx.array]]] = {
        "all_sum": (2 * share, lambda: all_sum(x, group=group)),
        "all_gather": (share, lambda: all_gather(part, group=group)),
        "sum_scatter": (share, lambda: sum_scatter(x, group=group)),
        "all_to_all_v": (share, lambda: all_to_all_v(x, counts, counts, group=group)),
    }
    return {name: (sent, _median(group, repeats, call)) for name, (sent, call) in calls.items()}


def _plan_seconds(group: Group, repeats: int) -> float:
    """The seconds that dispatch takes before it sends tokens: see dispatch.route()."""
    placement = Placement(group.size(), group.size())
    indices = mx.arange(PLANNED_TOKENS)[:, None] % group.size()
    return _median(group, repeats, lambda: route(indices, placement, group).experts)


def _median(group: Group, repeats: int, call: Callable[[], mx.array]) -> float:
    """Seconds of a call and of its result, the same number on all ranks. The first two do not count."""
    taken = []
    for _ in range(repeats + 2):
        # As lazy as what is timed: an operation that is carried out at once could overtake those of MLX.
        mx.eval(all_sum(mx.zeros((1,)), group=group))
        begin = time.perf_counter()
        mx.eval(call())
        taken.append(time.perf_counter() - begin)
    return float(np.array(all_max(mx.array([statistics.median(taken[2:])]), group=group))[0])
