"""The limits of the machine itself. Tables give times as multiples of them; timing.py measures them."""

from __future__ import annotations

from typing import Any

from mlxdist.base import tables

__all__ = ["LIMITS", "LIMIT_COLUMNS", "NARROW", "explain_limits", "limit_cells", "limits_line"]

LIMITS = {
    "transfer": "as many bytes from one core to another on rank 0's machine",
    "memcpy": "a copy of as many bytes by all ranks at once",
}
SHORT = {"transfer": "from core to core", "memcpy": "copied by all ranks at once"}
NO_TRANSFER = "no transfer, since rank 0 has one core"
LIMIT_COLUMNS = [f"times {name}" for name in LIMITS]
NARROW = 130  # columns of a terminal in which a table with these has no room for spaces next to its lines


def limit_cells(result: dict[str, Any] | None) -> list[str]:
    """The cells of `LIMIT_COLUMNS`: the multiple, and the microseconds of the limit. Empty for a layer that computes:
    its time does not depend on how long bytes take to move."""
    if not result or not result["microseconds"] or "transfer" not in result:
        return [""] * len(LIMITS)
    median = result["microseconds"]["median"]
    limits = [result[name] and result[name]["median"] for name in LIMITS]
    return [f"{_short(median / limit)} of {_short(limit)}" if limit else "" for limit in limits]


def _short(value: float) -> str:
    """The value with three digits, or with all digits before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def explain_limits(results: list[dict[str, Any]]) -> list[str]:
    """Lines below a table of ``results`` with `LIMIT_COLUMNS`."""
    limits = [result["transfer"] for result in results if "transfer" in result]
    if not limits:
        return []
    lines = [f"times {name}: compared with {words}, in the same run." for name, words in LIMITS.items()]
    return lines if all(limits) else [*lines, f"There is {NO_TRANSFER}."]


def limits_line(limits: list[dict[str, Any]]) -> str:
    """The limits that `timing.measure_limits` has measured, in one line, for tables of layers, which compute."""
    parts = []
    for name, words in SHORT.items():
        there = [f"{tables.size(c['bytes'])} {_short(c[name]['median'])}" for c in limits if c[name]]
        parts += [f"{', '.join(there)} {words}"] if there else [NO_TRANSFER]
    return f"Limits of this machine in the same run, in microseconds: {'; '.join(parts)}."
