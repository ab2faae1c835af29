"""The limits of the machine itself, of which speed tables give multiples; limits_rank.py measures them."""

from __future__ import annotations

from typing import Any

from .sizes import format_size

__all__ = ["LIMITS", "LIMIT_COLUMNS", "NARROW", "explain_limits", "limit_cells", "limits_line", "times_limits"]

LIMITS = {
    "transfer": "as many bytes from one core to another on rank 0's machine",
    "memcpy": "a copy of as many bytes by all ranks at once",
}
SHORT = {"transfer": "from core to core", "memcpy": "copied by all ranks at once"}
NO_TRANSFER = "no transfer, since rank 0 has one core"
LIMIT_COLUMNS = [f"times {name}" for name in LIMITS]
NARROW = 130  # columns of a terminal in which a table with these has no room for spaces beside its lines


def times_limits(median: float | None, case: dict[str, Any]) -> dict[str, float | None]:
    """{"times_transfer", "times_memcpy"}: the multiples of the limits that are in ``case``; None without a limit."""
    return {f"times_{name}": median / case[name]["median"] if median and case.get(name) else None for name in LIMITS}


def limit_cells(median: float | None, case: dict[str, Any]) -> list[str]:
    """For `LIMIT_COLUMNS`: the multiple, and the microseconds of the limit."""
    times = times_limits(median, case)
    return [
        f"{_short(times[f'times_{name}'])} of {_short(case[name]['median'])}" if times[f"times_{name}"] else ""
        for name in LIMITS
    ]


def _short(value: float) -> str:
    """With three digits, or all before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def explain_limits(cases: list[dict[str, Any]]) -> list[str]:
    """Lines below a table of ``cases`` with `LIMIT_COLUMNS`."""
    if not cases:
        return []
    lines = [f"times {name}: compared with {words}, in the same run." for name, words in LIMITS.items()]
    missing = any("transfer" in case and not case["transfer"] for case in cases)
    return [*lines, f"There is {NO_TRANSFER}."] if missing else lines


def limits_line(limits: list[dict[str, Any]]) -> str:
    """For tables of layers, which compute: what `limits_rank.measure_limits` has measured, in one line."""
    parts = []
    for name, words in SHORT.items():
        there = [f"{format_size(c['bytes'])} {_short(c[name]['median'])}" for c in limits if c[name]]
        parts += [f"{', '.join(there)} {words}"] if there else [NO_TRANSFER]
    return f"Limits of this machine in the same run, in microseconds: {'; '.join(parts)}."
