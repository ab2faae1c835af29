"""What mlxdist wants to reach on two ranks of one machine, soft provider, and whether the measurement says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
CHAIN = 50
OURS = "mlxdist"


@dataclass(frozen=True)
class Target:
    """``measured`` must be at least, or at most, ``bound``; None where it was not measured.

    ``right``: every element was what it must be; else nothing is met. ``ends``: least and most that was measured.
    """

    case: str
    wanted: str
    measured: float | None
    bound: float
    at_least: bool = False
    right: bool = True
    ends: list[float] | None = None

    def shown(self) -> str:
        """What was measured, as "1.20 [1.05..1.61]"."""
        if self.measured is None:
            return ""
        return f"{self.measured:.2f}" + (f" [{self.ends[0]:.2f}..{self.ends[1]:.2f}]" if self.ends else "")

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.right and (self.measured >= self.bound if self.at_least else self.measured <= self.bound)


# case, operation, dtype, bytes, operations per graph, {limit or peer: how many times as long ours may take}
MOST = (
    ("all_sum 8 KiB float32, lazy chain", "all_sum", "float32", 8 * KIB, CHAIN, {"transfer": 1.5}),
    ("all_sum 8 KiB float32, one evaluation", "all_sum", "float32", 8 * KIB, 1, {"mpi": 0.8}),
    ("all_sum 1 MiB float32", "all_sum", "float32", MIB, 1, {"transfer": 1.0}),
    ("all_sum 16 MiB float32", "all_sum", "float32", 16 * MIB, 1, {"memcpy": 1.5}),
)
# The same, {peer: how many times longer it must take}
LEAST = (
    ("all_sum 8 KiB float16, lazy chain", "all_sum", "float16", 8 * KIB, CHAIN, {"ring": 20, "mpi": 8}),
    ("all_sum 16 MiB float16", "all_sum", "float16", 16 * MIB, 1, {"ring": 12, "mpi": 8}),
    ("all_gather 1 MiB float32", "all_gather", "float32", MIB, 1, {"mpi": 1}),
    ("all_to_all 1 MiB float32, NumPy arrays", "all_to_all", "float32", MIB, 1, {"mpi4py": 1}),
)
# bytes: limit, how many times as long all_reduce may take; in engine.c
ENGINE = {4 * KIB: ("transfer", 8), MIB: ("transfer", 2), 16 * MIB: ("memcpy", 1.3)}
SLAB_BYTES, SLAB_RANKS = 16 * MIB, 8
OVERSUBSCRIBED_US = {4: 20.0, 8: 100.0}  # by ranks, on two cores


def cases(largest: int) -> list[dict[str, Any]]:
    """What must be measured for the table, as far as it is not larger than ``largest`` bytes."""
    rows = [{"operation": o, "dtype": d, "bytes": b, "chain": c} for _, o, d, b, c, _ in (*MOST, *LEAST)]
    return [row for row in rows if row["bytes"] <= largest]


def targets(results: dict[str, Any]) -> list[Target]:
    """The table. ``results``: cases, engine, slab_bytes and oversubscribed, as vs_peers.py writes them."""
    table = []
    for rows, at_least in ((MOST, False), (LEAST, True)):
        for name, operation, dtype, size, chain, bounds in rows:
            case = _find(results["cases"], operation=operation, dtype=dtype, bytes=size, chain=chain)
            table += [_compared(name, case, other, bound, at_least) for other, bound in bounds.items()]
    for size, (limit, bound) in ENGINE.items():
        line = _find(results["engine"], bytes=size)
        name = f"C level: all_reduce {size // MIB} MiB" if size >= MIB else f"C level: all_reduce {size // KIB} KiB"
        found = _times(line["all_reduce"], line[limit]["median"]) if line and line.get(limit) else None
        right = not (line and line["wrong"])
        table.append(_target(name, f"{bound:g}x {limit} or less", found, bound, right=right))
    slabs = results["slab_bytes"]
    name = f"slab memory per rank, {SLAB_RANKS} ranks"
    table.append(Target(name, "16 MiB or less", slabs and slabs / MIB, SLAB_BYTES / MIB))
    for ranks, bound in OVERSUBSCRIBED_US.items():
        small = _find(results["oversubscribed"], ranks=ranks)
        name = f"all_sum 8 KiB, {ranks} ranks, not pinned, NumPy arrays"
        found = small and _times(small["microseconds"], 1.0)
        table.append(_target(name, f"{bound:g} us or less", found, bound, right=not (small and small["wrong"])))
    return table


def _compared(name: str, case: dict[str, Any] | None, other: str, bound: float, at_least: bool) -> Target:
    """Ours beside a limit of the machine or a peer, in the same blocks."""
    wanted = f"{other} takes {bound:g}x or more" if at_least else f"{bound:g}x {other} or less"
    found = None
    if case and (theirs := case["microseconds"].get(other) or case.get(other)):
        mine = case["microseconds"][OURS]
        found = _times(theirs, mine["median"]) if at_least else _times(mine, theirs["median"])
    return _target(name, wanted, found, bound, at_least, not (case and case["wrong"][OURS]))


def _times(measured: dict[str, float], one: float) -> list[float]:
    """Median, least and most, as multiples of ``one``."""
    return [measured[name] / one for name in ("median", "min", "max")]


def _target(
    name: str, wanted: str, found: list[float] | None, bound: float, at_least: bool = False, right: bool = True
) -> Target:
    median, *ends = found or [None]
    return Target(name, wanted, median, bound, at_least, right, ends or None)


def _find(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)
