"""The results of `mlxdist bench suite` as a file: what is in it, and how it is read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from .limits import LIMIT_COLUMNS, LIMITS, limit_cells
from .sizes import format_size

__all__ = [
    "BENCHMARK",
    "COMPUTING",
    "SCHEMA",
    "backends_of",
    "by_name",
    "case_name",
    "hosts_of",
    "key",
    "limits_of",
    "load",
    "size_of",
    "spread",
    "times_of",
]

BENCHMARK, SCHEMA = "suite", 1
# Layers whose time is that of arithmetic and of reading weights.
COMPUTING = ("ep_pipeline", "tp_decode", "tp_prefill")
_MAX_BYTES = 64 << 20
_MAX_SIZE = 1 << 60
_ABSENT = ("operation", "backend", "why")
_SETUP = dict.fromkeys(("provider", "mlxdist", "mlx", "device", "command"), str)
_SETUP |= dict.fromkeys(("ranks", "warm_up", "iterations"), int) | dict.fromkeys(("hosts", "machines", "plan"), list)
_SETUP["foreign_cpu_share"] = float | None
_TIMES = ("median", "p10", "p90", "p99", "min", "max")


def load(path: Path) -> dict[str, Any]:
    """The results in a file.

    Raises:
        click.ClickException: it cannot be read, or has something else in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise click.ClickException(f"{path} has more than {_MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(data)
        _check(found)
    except (ValueError, RecursionError) as error:
        why = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise click.ClickException(f"{path} is not what mlxdist bench suite --output writes: {why}") from None
    return found


def _check(found: Any) -> None:
    """Raises ValueError for what the commands that read results would stumble over."""
    if not isinstance(found, dict) or found.get("benchmark") != BENCHMARK:
        raise ValueError(f'there is no "benchmark": "{BENCHMARK}" in it')
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {found.get('schema')!r:.40}, and this mlxdist reads {SCHEMA}")
    kinds = {"setup": dict, "backends": dict, "cases": list, "absent": list}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f'"{name}" is missing or malformed')
    for name, kind in _SETUP.items():
        if not isinstance(found["setup"].get(name), kind):
            raise ValueError(f'"{name}" of the setup is missing or malformed')
    lists = [found["setup"][name] for name in ("hosts", "machines", "plan")] + [found["absent"]]
    if not all(isinstance(entry, dict) for entries in [*lists, list(found["backends"].values())] for entry in entries):
        raise ValueError("a host, a machine or what is absent is malformed")
    if not all(isinstance(host.get("ips", []), list) for host in found["setup"]["hosts"]):
        raise ValueError("the addresses of a host are malformed")
    if not all(isinstance(entry.get(name), str) for entry in found["absent"] for name in _ABSENT):
        raise ValueError("what is absent is malformed")
    for number, case in enumerate(found["cases"]):
        if not _is_case(case):
            raise ValueError(f"case {number} is malformed")
    seen = [key(case) for case in found["cases"]]
    if len(set(seen)) < len(seen):
        raise ValueError("a case is there twice")


def _is_case(case: Any) -> bool:
    if not isinstance(case, dict) or not isinstance(case.get("refused"), str | None):
        return False
    texts = all(isinstance(case.get(name), str) for name in ("operation", "dtype", "backend"))
    texts = texts and isinstance(case.get("described", ""), str)
    numbers = all(isinstance(case.get(name, 0), int) for name in ("tokens", "wrong"))
    numbers = numbers and isinstance(case.get("bytes"), int) and 0 < case["bytes"] <= _MAX_SIZE
    limits = [case[name] for name in LIMITS if case.get(name) is not None]
    texts = texts and all(isinstance(limit, dict) and _is_time(limit.get("median")) for limit in limits)
    times = case.get("microseconds")
    if times is None:
        return texts and numbers and case["refused"] is not None
    numbers = numbers and _is_time(case.get("gbps"))
    return texts and numbers and isinstance(times, dict) and all(_is_time(times.get(name)) for name in _TIMES)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def key(case: dict[str, Any]) -> tuple:
    """What makes two cases the same."""
    return case["operation"], case["dtype"], case["bytes"], case.get("tokens", 0), case["backend"]


def case_name(case: dict[str, Any]) -> str:
    """What was measured, in words, whatever the backend."""
    return f"{case['operation']} {case['dtype']}, {size_of(case)}"


def size_of(case: dict[str, Any]) -> str:
    if case.get("tokens"):
        return f"{case['tokens']} token{'s' * (case['tokens'] != 1)}"
    return format_size(case["bytes"])


def backends_of(results: dict[str, Any]) -> list[str]:
    """Those that have been measured, in their order."""
    return list(dict.fromkeys(case["backend"] for case in results["cases"]))


def by_name(results: dict[str, Any]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """The cases of all backends beside each other: by what was measured, then by backend."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for case in results["cases"]:
        found.setdefault(key(case)[:-1], {})[case["backend"]] = case
    return found


def times_of(case: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """How many times as long as the other it takes, if both are results."""
    if not case or not other or not case["microseconds"] or not other["microseconds"]:
        return None
    return case["microseconds"]["median"] / other["microseconds"]["median"]


def limits_of(case: dict[str, Any] | None) -> list[str]:
    """For `LIMIT_COLUMNS`; empty for a layer that computes: how long bytes take to move says nothing of it."""
    if not case or case["operation"] in COMPUTING or not case["microseconds"]:
        return [""] * len(LIMIT_COLUMNS)
    return limit_cells(case["microseconds"]["median"], case)


def hosts_of(results: dict[str, Any]) -> str:
    """The hosts with their addresses, in words."""
    parts = []
    for host in results["setup"]["hosts"]:
        ips = f" ({', '.join(map(str, host['ips']))})" if host.get("ips") else ""
        parts.append(f"{host.get('name')}{ips}")
    return ", ".join(parts)


def spread(times: dict[str, float]) -> str:
    """Median and range."""
    digits = 2 if times["median"] < 10 else 1 if times["median"] < 1000 else 0
    median, low, high = (f"{times[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} [{low}..{high}]"
