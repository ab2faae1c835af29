"""What mlxdist wants to reach on two ranks of one machine, soft provider, and whether the measurement says so."""

from __future__ import annotations

from typing import Any

from mlxdist.tools.bench.results import Target, by_case

KIB, MIB = 1 << 10, 1 << 20
CHAIN = 50
OURS = "mlxdist"


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
# bytes: limit, how many times as long all_reduce may take; called from C
ENGINE = {4 * KIB: ("transfer", 8), MIB: ("transfer", 2), 16 * MIB: ("memcpy", 1.3)}
SLAB_RANKS = 8
OVERSUBSCRIBED_US = {4: 20.0, 8: 100.0}  # by ranks, on two cores


def cases(largest: int) -> list[dict[str, Any]]:
    """What must be measured for the table, as far as it is not larger than ``largest`` bytes."""
    rows = [{"operation": o, "dtype": d, "bytes": b, "chain": c} for _, o, d, b, c, _ in (*MOST, *LEAST)]
    rows += [{"operation": "all_reduce", "dtype": "float32", "bytes": size} for size in ENGINE]
    return [row for row in rows if row["bytes"] <= largest]


def targets(results: dict[str, Any]) -> list[Target]:
    """The table. ``results``: as vs_peers.py writes them."""
    rows = by_case(results)
    table = []
    for bounds_of, at_least in ((MOST, False), (LEAST, True)):
        for name, operation, dtype, size, chain, bounds in bounds_of:
            row = _find(rows, operation=operation, dtype=dtype, bytes=size, chain=chain)
            table += [_compared(name, row, other, bound, at_least) for other, bound in bounds.items()]
    for size, (limit, bound) in ENGINE.items():
        name = f"C level: all_reduce {size // MIB} MiB" if size >= MIB else f"C level: all_reduce {size // KIB} KiB"
        row = _find(rows, operation="all_reduce", bytes=size)
        table.append(_compared(name, row, limit, bound))
    slabs = results["setup"].get("slab_bytes")
    table.append(Target(f"slab memory per rank, {SLAB_RANKS} ranks", "16 MiB or less", slabs and slabs / MIB, 16))
    for ranks, bound in OVERSUBSCRIBED_US.items():
        name = f"all_sum 8 KiB, {ranks} ranks, not pinned, NumPy arrays"
        mine = _find(rows, operation="all_sum", ranks=ranks).get(OURS)
        found = mine and mine["microseconds"] and _times(mine["microseconds"], 1.0)
        table.append(_target(name, f"{bound:g} us or less", found, bound, right=not (mine and mine["refused"])))
    return table


def _compared(name: str, row: dict[str, Any], other: str, bound: float, at_least: bool = False) -> Target:
    """Ours compared with a limit of the machine or a peer, in the same blocks."""
    wanted = f"{other} takes {bound:g}x or more" if at_least else f"{bound:g}x {other} or less"
    mine, found = row.get(OURS), None
    if mine and mine["microseconds"]:
        theirs = row[other]["microseconds"] if other in row else mine.get(other)
        if theirs:
            times = mine["microseconds"]
            found = _times(theirs, times["median"]) if at_least else _times(times, theirs["median"])
    return _target(name, wanted, found, bound, at_least)


def _times(measured: dict[str, float], one: float) -> list[float]:
    """Median, least and most, as multiples of ``one``."""
    return [measured[name] / one for name in ("median", "min", "max")]


def _target(
    name: str, wanted: str, found: list[float] | None, bound: float, at_least: bool = False, right: bool = True
) -> Target:
    median, *ends = found or [None]
    return Target(name, wanted, median, bound, at_least, right, ends or None)


def _find(rows: list[dict[str, dict[str, Any]]], **wanted: Any) -> dict[str, dict[str, Any]]:
    """By variant, the results of the case that has these fields."""
    for row in rows:
        case = next(iter(row.values()))["case"]
        if all(case.get(name) == value for name, value in wanted.items()):
            return row
    return {}
