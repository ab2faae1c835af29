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

    ``right``: every element was what it must be; else nothing is met.
    """

    case: str
    wanted: str
    measured: float | None
    bound: float
    at_least: bool = False
    right: bool = True

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.right and (self.measured >= self.bound if self.at_least else self.measured <= self.bound)


# case, operation, dtype, bytes, operations per graph, {peer: how many times longer it must take}
RATIOS = (
    ("all_sum 8 KiB float32, lazy chain", "all_sum", "float32", 8 * KIB, CHAIN, {"ring": 25, "mpi": 3}),
    ("all_sum 8 KiB float16, lazy chain", "all_sum", "float16", 8 * KIB, CHAIN, {"ring": 20, "mpi": 8}),
    ("all_sum 64 KiB float32, lazy chain", "all_sum", "float32", 64 * KIB, CHAIN, {"ring": 6, "mpi": 2}),
    ("all_sum 16 MiB float32", "all_sum", "float32", 16 * MIB, 1, {"ring": 6, "mpi": 2}),
    ("all_sum 16 MiB float16", "all_sum", "float16", 16 * MIB, 1, {"ring": 12, "mpi": 8}),
    ("all_gather 1 MiB float32", "all_gather", "float32", MIB, 1, {"mpi": 1}),
    ("all_to_all 1 MiB float32, NumPy arrays", "all_to_all", "float32", MIB, 1, {"mpi4py": 1}),
)
# bytes: unit, bound; in engine.c
ENGINE = {4 * KIB: ("us", 1.5), MIB: ("memcpy", 4.0), 16 * MIB: ("memcpy", 1.3)}
MEMCPY = 1.6  # all_sum 16 MiB float32 through MLX, compared with a copy
SLAB_BYTES, SLAB_RANKS = 16 * MIB, 8
OVERSUBSCRIBED_US, OVERSUBSCRIBED_RANKS = 100.0, 4


def cases(largest: int) -> list[dict[str, Any]]:
    """What must be measured for the table, as far as it is not larger than ``largest`` bytes."""
    rows = [{"operation": o, "dtype": d, "bytes": b, "chain": c} for _, o, d, b, c, _ in RATIOS]
    return [row for row in rows if row["bytes"] <= largest]


def targets(results: dict[str, Any]) -> list[Target]:
    """The table. ``results``: cases, engine, slab_bytes and oversubscribed, as vs_peers.py writes them."""
    table = []
    for name, operation, dtype, size, chain, ratios in RATIOS:
        case = _find(results["cases"], operation=operation, dtype=dtype, bytes=size, chain=chain)
        right = not (case and case["wrong"][OURS])
        for peer, bound in ratios.items():
            measured = _ratio(case, peer)
            table.append(Target(name, f"{peer} takes {bound}x or more", measured, bound, True, right))
        if (operation, dtype, size) == ("all_sum", "float32", 16 * MIB):
            measured = case and case["microseconds"][OURS]["median"] / case["memcpy"]["median"]
            table.append(Target(name, f"{MEMCPY}x memcpy or less", measured, MEMCPY, right=right))
    for size, (unit, bound) in ENGINE.items():
        line = _find(results["engine"], bytes=size)
        measured = line and line["all_reduce"]["median"] / (line["memcpy"]["median"] if unit == "memcpy" else 1)
        wanted = f"{bound} us or less" if unit == "us" else f"{bound:g}x memcpy or less"
        name = f"C level: all_reduce {size // MIB} MiB" if size >= MIB else f"C level: all_reduce {size // KIB} KiB"
        table.append(Target(name, wanted, measured, bound, right=not (line and line["wrong"])))
    slabs = results["slab_bytes"]
    name = f"slab memory per rank, {SLAB_RANKS} ranks"
    table.append(Target(name, "16 MiB or less", slabs and slabs / MIB, SLAB_BYTES / MIB))
    small = results["oversubscribed"]
    name = f"all_sum 8 KiB, {OVERSUBSCRIBED_RANKS} ranks, not pinned, NumPy arrays"
    table.append(Target(name, "100 us or less", small["median"], OVERSUBSCRIBED_US, right=not small["wrong"]))
    return table


def _find(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _ratio(case: dict[str, Any] | None, peer: str) -> float | None:
    if case is None or peer not in case["microseconds"]:
        return None
    return case["microseconds"][peer]["median"] / case["microseconds"][OURS]["median"]
