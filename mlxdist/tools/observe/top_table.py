"""The table of ranks in `mlxdist top` and `mlxdist dump`, shortened to the lines of a terminal."""

import time
from collections.abc import Collection
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from mlxdist.runtime.observation.stragglers import RankState
from mlxdist.runtime.observation.view import View

__all__ = ["Screenful", "full", "rank_table"]

# The columns of memory, from the most to the fewest: those that are shown fit into the width.
_MEMORY: tuple[tuple[str, ...], ...] = (("active", "peak", "resident", "of host"), ("resident", "of host"), ())
_UNLIMITED = 10_000  # wider than any table


def full(view: View) -> Group:
    return Group(*_head(view), _RankTable(view.ranks, _is_short(view)))


class Screenful:
    """A view that is shortened to the terminal's lines when drawn: then stragglers and silent ranks come first."""

    def __init__(self, view: View) -> None:
        self._head = _head(view)
        self._rows, self._is_short = view.ranks, _is_short(view)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        head = [line for text in self._head for line in text.wrap(console, options.max_width)]
        limit = max(1, height * 2 // 3)  # the rest is for ranks
        if len(head) > limit:
            head[limit - 1 :] = [Text(f"... {len(head) - limit + 1} more lines")]
        yield from head
        available = height - len(head)
        rows = self._rows
        if len(rows) >= available or self._height(rows, console, options) > available:
            rows = sorted(rows, key=lambda row: (not row.is_straggler, row.has_responded, row.rank))
            rows = rows[: max(0, available - 2)]
            while rows and self._height(rows, console, options) > available - 1:  # a long call site takes several lines
                rows = rows[:-1]
        if rows:
            yield _RankTable(rows, self._is_short)
        if len(rows) < len(self._rows):
            yield Text(f"... {len(self._rows) - len(rows)} more")

    def _height(self, rows: list[RankState], console: Console, options: ConsoleOptions) -> int:
        return len(console.render_lines(_RankTable(rows, self._is_short), options.update(height=None)))


class _RankTable:
    """The table of ranks, with the columns of memory that fit into the width.

    Args:
        rows: the ranks.
        is_short: whether a host is under memory pressure. Then the two columns that show it are there in any case.
    """

    def __init__(self, rows: list[RankState], is_short: bool) -> None:
        self._rows, self._is_short = rows, is_short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        choices = _MEMORY[:-1] if self._is_short else _MEMORY
        if all(row.memory is None for row in self._rows):
            choices = _MEMORY[-1:]
        unlimited = options.update(width=_UNLIMITED)
        tables = (rank_table(self._rows, ("GB/s", *columns)) for columns in choices)
        for table in tables:
            if console.measure(table, options=unlimited).maximum <= options.max_width:
                break
        yield table


def _is_short(view: View) -> bool:
    return any(memory.is_short() for memory in view.memory.values())


def _head(view: View) -> list[Text]:
    first = f"job {view.job}, {len(view.ranks)} ranks, {time.strftime('%H:%M:%S')}"
    return [Text(line) for line in (first, *view.findings, *view.warnings, *view.notes)]


def rank_table(rows: list[RankState], columns: Collection[str] = ("GB/s",)) -> Table:
    """The table of ``rows``. ``columns``: the optional columns to show; "bubble" is shown if a rank has one."""
    columns = {*columns, *(["bubble"] if any(row.bubble is not None for row in rows) else [])}
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = {name: justify for name, justify in _COLUMNS.items() if name not in _OPTIONAL or name in columns}
    for name, justify in shown.items():
        table.add_column(name, justify=justify, no_wrap=name != "call site", overflow="fold")
    for row in rows:
        style = "bold red" if row.is_straggler else "dim" if not row.has_responded else None
        cells = _cells(row)
        table.add_row(*(Text(cells.get(name, "")) for name in shown), style=style)
    return table


_COLUMNS: dict[str, Literal["left", "right"]] = {
    "rank": "right",
    "host": "left",
    "pid": "right",
    "step": "right",
    "bubble": "right",
    "active": "right",
    "peak": "right",
    "resident": "right",
    "of host": "right",
    "operation": "left",
    "array": "left",
    "call site": "left",
    "elapsed": "right",
    "GB/s": "right",
    "waiting on": "left",
}


_OPTIONAL = ("array", "GB/s", "bubble", *_MEMORY[0])


def _cells(row: RankState) -> dict[str, str]:
    """The cells of a row, by column; missing ones are empty."""
    cells = {"rank": str(row.rank), "host": row.host, "pid": str(row.pid or ""), "step": _step(row)}
    if row.bubble is not None:
        cells["bubble"] = f"{row.bubble:.0%}"
    if row.memory is not None:
        sizes = {"active": row.memory.active, "peak": row.memory.peak, "resident": row.memory.resident}
        cells |= {name: f"{number / 2**30:.1f} GiB" for name, number in sizes.items() if number is not None}
        cells["of host"] = "" if row.memory.share is None else f"{row.memory.share:.0%}"
    if not row.has_responded:
        return cells | {"operation": "does not respond"}
    waiting = [f"rank {row.waiting_on}"] * (row.waiting_on is not None) + ["straggler"] * row.is_straggler
    return cells | {
        "operation": row.operation if row.in_operation else f"after {row.operation}" if row.operation else "none yet",
        "array": row.array,
        "call site": row.call_site,
        "elapsed": f"{row.elapsed:.1f} s" if row.operation else "",
        "GB/s": "" if row.gbps is None else f"{row.gbps:.2f}",
        "waiting on": ", ".join(waiting),
    }


def _step(row: RankState) -> str:
    """The step as ``5/100``; without mlxdist.set_step, the number of collectives of all ranks as ``#412``."""
    if row.step is None:
        return f"#{row.operations}" if row.operations else ""
    return str(row.step) if row.total_steps is None else f"{row.step}/{row.total_steps}"
