"""What mlxdist wants to reach on two ranks of one machine, soft provider, and whether the measurement says so."""

from __future__ import annotations

from typing import Any

from mlxdist.base import tables
from mlxdist.tools.bench.results import Target, find

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
    table = []
    for name, operation, dtype, size, chain, limits in MOST:
        row = find(results, operation=operation, dtype=dtype, bytes=size, chain=chain)
        table += [_within(name, row, limit, bound) for limit, bound in limits.items()]
    for name, operation, dtype, size, chain, peers in LEAST:
        row = find(results, operation=operation, dtype=dtype, bytes=size, chain=chain)
        table += [Target.slower(name, row, OURS, [peer], bound) for peer, bound in peers.items()]
    for size, (limit, bound) in ENGINE.items():
        row = find(results, operation="all_reduce", bytes=size)
        table.append(_within(f"C level: all_reduce {tables.size(size)}", row, limit, bound))
    slabs = results["setup"].get("slab_bytes")
    table.append(Target(f"slab memory per rank, {SLAB_RANKS} ranks", "16 MiB or less", slabs and slabs / MIB, 16))
    for ranks, bound in OVERSUBSCRIBED_US.items():
        name = f"all_sum 8 KiB, {ranks} ranks, not pinned, NumPy arrays"
        mine = find(results, operation="all_sum", ranks=ranks).get(OURS)
        table.append(Target.of(name, f"{bound:g} us or less", mine and mine["microseconds"], 1.0, bound))
    return table


def _within(name: str, row: dict[str, Any], limit: str, bound: float) -> Target:
    """Ours compared with a limit of the machine or a peer, in the same blocks."""
    mine = row.get(OURS, {"microseconds": None})
    one = row[limit]["microseconds"] if limit in row else mine.get(limit)
    return Target.of(name, f"{bound:g}x {limit} or less", mine["microseconds"], one and one["median"], bound)
