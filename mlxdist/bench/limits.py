"""The limits of the machine itself, of which speed tables give multiples: measured by limits_rank.py in the same run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["LIMITS", "LIMIT_COLUMNS", "explain_limits", "limit_cells", "times_limits"]

LIMITS = {
    "transfer": "as many bytes from one core of rank 0's machine to another, which copies them",
    "memcpy": "a copy of as many bytes by all ranks at once",
}
LIMIT_COLUMNS = [f"times {name}" for name in LIMITS]


def times_limits(median: float | None, case: dict[str, Any]) -> dict[str, float | None]:
    """{"times_transfer", "times_memcpy"}: the multiples of the limits that are in ``case``; None without a limit."""
    return {
        f"times_{name}": median / case[name]["median"] if median and case.get(name) else None for name in LIMITS
    }


def limit_cells(median: float | None, case: dict[str, Any]) -> list[str]:
    """For `LIMIT_COLUMNS`: the multiple, and the microseconds of the limit."""
    times = times_limits(median, case)
    return [
        f"{times[f'times_{name}']:.2f} of {case[name]['median']:.2f}" if times[f"times_{name}"] else ""
        for name in LIMITS
    ]


def explain_limits(cases: Iterable[dict[str, Any]]) -> list[str]:
    """Lines below a table with `LIMIT_COLUMNS`."""
    lines = [f"times {name}: compared with {words}, in the same run." for name, words in LIMITS.items()]
    if any("transfer" in case and case["transfer"] is None for case in cases):
        lines.append("There is no transfer: rank 0 has one core.")
    return lines
