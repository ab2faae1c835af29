"""The results of a benchmark: the format that all have, how a file of them is read back, and how they are shown.

    {"benchmark", "schema", "setup": {...}, "cases": [result, ...], "absent": [{"variant", "absent", ...}], "targets"}

A result is that of one case by one variant: {"case": what was measured, "variant": by what, "microseconds": quantiles
or null, "wrong": elements, "refused": why there are no numbers or null}, "transfer" and "memcpy" (limits of the
machine) where bytes move, and more that the benchmark counts. Two results of the same case and variant can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlxdist.base import tables
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import (
    fields_of,
    list_of,
    map_of,
    number,
    object_of,
    or_null,
    positive,
    read_bounded,
    seconds,
    text,
)

from .limits import LIMIT_COLUMNS, LIMITS, explain_limits, limit_cells, limits_line

__all__ = [
    "QUIET_ADVICE",
    "SCHEMA",
    "Comparison",
    "Result",
    "Results",
    "Row",
    "Show",
    "Target",
    "by_case",
    "case_name",
    "comparison",
    "failed",
    "find",
    "foreign_load",
    "hosts_of",
    "key",
    "load",
    "notes",
    "peak_columns",
    "print_results",
    "print_targets",
    "results_console",
    "spread",
    "table_of",
    "times_of",
    "variants_of",
]

SCHEMA = 2
QUIET = 0.05  # share of the CPU that other processes may use before the numbers are no good
QUIET_ADVICE = "repeat this on a quiet machine, or give --force"
_MAX_BYTES = 64 << 20
_MAX_RESULTS = 100_000
_MAX_SIZE = 1 << 60
# Columns of the terminal that a comparison needs to show ranges: for the case, a variant and any other column.
_WIDTH, _WIDTH_OF_VARIANT, _WIDTH_OF_COLUMN = 34, 25, 15

Results = dict[str, Any]
Result = dict[str, Any]
Row = Mapping[str, Result]  # the results of a case, by variant
Show = Callable[[Results, Console], None]


# The file.


def load(path: Path) -> Results:
    """The results in a file.

    Raises:
        click.ClickException: the file cannot be read, or has something else in it.
    """
    try:
        found = parse_json(read_bounded(path, _MAX_BYTES))
        _check(found)
    except ValueError as error:
        raise click.ClickException(f"{path} is not what mlxdist bench --output writes: {error}") from None
    return found


def _case(name: str, value: Any) -> dict[str, Any]:
    found = _FIELDS(name, value)
    for key, value in found.items():
        (number(1 if key == "bytes" else 0, _MAX_SIZE) if type(value) is not str else text())(key, value)
    return found


_TIME = positive(1e15)
_FIELDS = map_of(lambda name, value: value, 1000)
_RESULT = {
    "case": _case,
    "variant": text(),
    "wrong": number(0, _MAX_SIZE),
    "refused": or_null(text(10_000)),
    "microseconds": or_null(object_of(dict.fromkeys(("median", "p10", "p90", "p99", "min", "max"), _TIME))),
}
# What only some benchmarks have.
_IN_SOME = dict.fromkeys(LIMITS, or_null(object_of({"median": _TIME}))) | {"path": or_null(text())}
_SETUP = dict.fromkeys(("provider", "mlxdist", "mlx", "device", "command"), text(100_000)) | {
    "ranks": number(1, _MAX_SIZE),
    "hosts": list_of(object_of({"name": text(), "ips": list_of(text(), 1000)}), 10_000),
    "machines": list_of(_FIELDS, 10_000),
    "cases": list_of(_FIELDS, _MAX_RESULTS),
    "limits": list_of(_FIELDS, 100),
    "foreign_cpu_share": or_null(seconds),
}
_FILE = {
    "setup": object_of(_SETUP),
    "cases": list_of(_FIELDS, _MAX_RESULTS),
    "absent": list_of(object_of({"variant": text(), "absent": text(10_000)}), _MAX_RESULTS),
    "targets": list_of(_FIELDS, _MAX_RESULTS),
}


def _check(found: Any) -> None:
    """Raises ValueError if something is wrong that would make a command that reads results fail later."""
    if not isinstance(found, dict) or not isinstance(found.get("benchmark"), str):
        raise ValueError('there is no "benchmark" in it')
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {found.get('schema')!r:.40}, and this mlxdist reads {SCHEMA}")
    fields_of(_FILE, found)
    for number_, result in enumerate(found["cases"]):
        more = {name: check for name, check in _IN_SOME.items() if name in result}
        try:
            checked = fields_of(_RESULT | more, result)
            if checked["microseconds"] is None and checked["refused"] is None:
                raise ValueError("it has neither times nor a reason why not")
        except ValueError as error:
            raise ValueError(f"case {number_} is malformed: {error}") from None
    seen = [key(result) for result in found["cases"]]
    if len(set(seen)) < len(seen):
        raise ValueError("a case is there twice")


def key(result: Result) -> tuple:
    """A key that two results share if they are of the same case by the same variant."""
    return *sorted(result["case"].items()), result["variant"]


def case_name(case: dict[str, Any]) -> str:
    """The case in words: "all_reduce float32, 4 KiB"."""
    words = [value for value in case.values() if isinstance(value, str)]
    return ", ".join([" ".join(words), *(_numbered(*item) for item in case.items() if not isinstance(item[1], str))])


def _numbered(name: str, value: int) -> str:
    if name == "bytes":
        return tables.size(value)
    return f"{value} {name.removesuffix('s') if value == 1 else name}" if name.endswith("s") else f"{name} {value}"


def variants_of(results: Results) -> list[str]:
    """The names of the variants in the results, in order of appearance."""
    return list(dict.fromkeys(result["variant"] for result in results["cases"]))


def by_case(results: Results) -> list[dict[str, Result]]:
    """A dict for each case: its results by variant."""
    found: dict[tuple, dict[str, Result]] = {}
    for result in results["cases"]:
        found.setdefault(key(result)[:-1], {})[result["variant"]] = result
    return list(found.values())


def find(results: Results, **fields: Any) -> dict[str, Result]:
    """The results, by variant, of the first case with these fields; empty if there is no such case."""
    rows = (row for row in by_case(results) if fields.items() <= next(iter(row.values()))["case"].items())
    return next(rows, {})


def failed(results: Results) -> bool:
    """Whether a result is refused, or there are no results at all."""
    return any(result["refused"] for result in results["cases"]) or not results["cases"]


def times_of(result: Result | None, other: Result | None) -> float | None:
    """How many times as long as ``other`` the case took in ``result``, if both have times."""
    if not result or not other or not result["microseconds"] or not other["microseconds"]:
        return None
    return result["microseconds"]["median"] / other["microseconds"]["median"]


# What is shown.


def results_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 300)


def spread(times: dict[str, float] | None) -> str:
    """The median and the range, as text."""
    if not times:
        return "refused"
    digits = 2 if times["median"] < 10 else 1 if times["median"] < 1000 else 0
    median, low, high = (f"{times[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} [{low}..{high}]"


def table_of(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, **style: Any
) -> Table:
    """Returns a table whose first ``left`` columns hold words, and the others numbers."""
    table = Table(title=escape(title), **style)
    for place, column in enumerate(columns):
        # A narrow terminal loses no digit.
        options = {"no_wrap": True} if place == 0 else {} if place < left else {"justify": "right", "overflow": "fold"}
        table.add_column(escape(column), **options)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


@dataclass(frozen=True)
class Comparison:
    """Prints `comparison` as a table, without ranges in a narrow terminal.

    Attributes:
        title: a function that makes the table's title from the results.
        ours, others: arguments of `comparison`.
        columns: further columns: for each, a function from a row (the results of a case by variant) to the cell. A
            column of None alone is left out.
        apart: whether each case has a table of its own, with its first variant as ours: for cases of other variants.
    """

    title: Callable[[Results], str]
    ours: str | None = None
    others: Sequence[str] | None = None
    columns: Mapping[str, Callable[[Row], str | None]] = field(default_factory=dict)
    apart: bool = False

    def __call__(self, results: Results, console: Console) -> None:
        cases = [list(row.values()) for row in by_case(results)] if self.apart else [results["cases"]]
        for shown in cases:
            console.print(self._table(results | {"cases": shown}, console))

    def _table(self, results: Results, console: Console) -> Table:
        columns, rows = comparison(results, self.ours, self.others)
        found = {title: [say(row) for row in by_case(results)] for title, say in self.columns.items()}
        more = {title: cells for title, cells in found.items() if any(cell is not None for cell in cells)}
        names = variants_of(results)
        narrow = len(columns) - 1 - len(names) - columns.count("GB/s") / 2 + len(more)
        wide = console.width >= _WIDTH + _WIDTH_OF_VARIANT * len(names) + _WIDTH_OF_COLUMN * narrow
        if not wide:
            rows = [[*row[:1], *(cell.partition(" [")[0] for cell in row[1:])] for row in rows]
        rows = [[*row, *(cells[place] or "" for cells in more.values())] for place, row in enumerate(rows)]
        title = f"{self.title(results)}; microseconds: median{' [range]' * wide}"
        return table_of(title, [*columns, *more], rows)


def peak_columns(variants: Sequence[str]) -> dict[str, Callable[[Row], str]]:
    """Columns for a `Comparison`: the "peak" of each variant, in MiB."""

    def column(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name]['peak'] / (1 << 20):.1f}" if name in row else "-"

    return {f"{name}: MiB at most": column(name) for name in variants}


def comparison(
    results: Results, ours: str | None = None, others: Sequence[str] | None = None, with_p99: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, one for each case: the times of all variants, how many times as long as ``ours`` the ``others``
    take, and the machine's limits."""
    names = variants_of(results)
    ours = ours or (names[0] if names else "")
    others = [name for name in names if name != ours] if others is None else others
    has_speed = {result["variant"] for result in results["cases"] if "algbw" in result}
    has_limits = any("transfer" in result for result in results["cases"])
    columns = ["case"]
    for name in names:
        columns += [name, *["p99"] * with_p99, *["GB/s"] * (name in has_speed)]
    columns += [f"{name} / {ours}" for name in others]
    columns += [f"{ours} {column}" for column in LIMIT_COLUMNS * has_limits]
    rows = []
    for row in by_case(results):
        cells = [case_name(next(iter(row.values()))["case"])]
        for name in names:
            result = row.get(name, {})
            times = result.get("microseconds")
            cells.append(spread(times) if result else "-")
            cells += [f"{times['p99']:.1f}" if times else ""] * with_p99
            cells += [f"{result['algbw']:.2f}" if result.get("algbw") else ""] * (name in has_speed)
        ratios = [times_of(row.get(name), row.get(ours)) for name in others]
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append(cells + limit_cells(row.get(ours)) * has_limits)
    return columns, rows


def print_results(results: Results, show: Show, console: Console) -> None:
    if results["setup"]["limits"]:
        console.print(limits_line(results["setup"]["limits"]))
    show(results, console)
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    print_targets(results["targets"], console)
    if load := foreign_load(results["setup"]):
        console.print(f"{load[0].upper()}{load[1:]}: repeat this on a quiet machine.")


def notes(results: Results) -> list[str]:
    """The lines below the tables: how the numbers were measured, and which of them are absent or refused."""
    setup = results["setup"]
    lines = []
    if "iterations" in setup:
        counts = f"{setup['warm_up']} iterations to warm up, {setup['iterations']} timed"
        lines = [f"{counts}, a barrier before each; the time of the slowest rank. GB/s: size over time."]
    has_layers = any("tokens" in result["case"] for result in results["cases"])
    layers = f"; layers on the {setup['device']}, a BLAS has one thread" * has_layers
    lines.append(f"mlxdist {setup['mlxdist']} on {setup['provider']}; MLX {setup['mlx']}{layers}.")
    lines += explain_limits(results["cases"])
    described = dict.fromkeys((r["case"]["operation"], r["described"]) for r in results["cases"] if "described" in r)
    lines += [f"{operation}: {words}" for operation, words in described]
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in results["absent"]:
        known = reasons.setdefault((entry["variant"], entry["absent"]), [])
        if "case" not in entry:
            lines.append(f"{entry['variant']} was not measured: {entry['absent']}")
        elif entry["case"]["operation"] not in known:
            known.append(entry["case"]["operation"])
    lines += [f"{variant} has no {', '.join(names)}: {why}" for (variant, why), names in reasons.items() if names]
    return lines + [
        f"REFUSED: {case_name(result['case'])} by {result['variant']}: {result['refused']}"
        for result in results["cases"]
        if result["refused"]
    ]


def hosts_of(results: Results) -> str:
    """The hosts with their addresses, in words."""
    hosts = results["setup"]["hosts"]
    return ", ".join(f"{host['name']} ({', '.join(host['ips'])})" if host["ips"] else host["name"] for host in hosts)


def foreign_load(measured: dict[str, Any]) -> str | None:
    """The load that disturbed a measurement too much, in words. None if it was quiet, or the load is not known."""
    foreign = measured["foreign_cpu_share"]
    return f"other processes used {foreign:.0%} of the CPU meanwhile" if foreign and foreign > QUIET else None


@dataclass(frozen=True)
class Target:
    """A target: ``measured`` must be at least, or at most, ``bound``. None: it was not measured.

    ``ends``: the least and the greatest measured value.
    """

    case: str
    wanted: str
    measured: float | None
    bound: float
    at_least: bool = False
    ends: list[float] | None = None

    @classmethod
    def of(cls, case: str, wanted: str, times: dict[str, float] | None, one: float | None, bound: float) -> Target:
        """Returns a target for ``times`` as multiples of ``one``; None: not measured."""
        if not times or one is None:
            return cls(case, wanted, None, bound)
        median, *ends = (times[name] / one for name in ("median", "min", "max"))
        return cls(case, wanted, median, bound, ends=ends)

    @classmethod
    def slower(cls, case: str, row: dict[str, Result], ours: str, others: Sequence[str], bound: float) -> Target:
        """Returns the target that the fastest of the others takes at least ``bound`` times as long as ours."""
        times = {name: result["microseconds"] for name, result in row.items() if result["microseconds"]}
        theirs = min((times[name] for name in others if name in times), key=lambda t: t["median"], default=None)
        one = times[ours]["median"] if ours in times else None
        return replace(cls.of(case, f"{others[0]} takes {bound:g}x or more", theirs, one, bound), at_least=True)

    def shown(self) -> str:
        """The measured value with its range, as "1.20 [1.05..1.61]"; empty if it was not measured."""
        if self.measured is None:
            return ""
        return f"{self.measured:.3g}" + (f" [{self.ends[0]:.3g}..{self.ends[1]:.3g}]" if self.ends else "")

    def judged(self) -> dict[str, Any]:
        """The target as a dict, with "met": whether it is met, or None if it was not measured."""
        met = None
        if self.measured is not None:
            met = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return vars(self) | {"met": met}


def print_targets(targets: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a table of ``targets``, the dicts that `Target.judged` returns."""
    if targets:
        words = {None: "not measured", True: "met", False: "NOT MET"}
        made = [Target(**{name: value for name, value in each.items() if name != "met"}) for each in targets]
        rows = [[t.case, t.wanted, t.shown(), words[each["met"]]] for t, each in zip(made, targets)]
        title = f"targets: {sum(bool(each['met']) for each in targets)} of {len(targets)} met"
        console.print(table_of(title, ["case", "wanted", "measured", ""], rows, left=4))
