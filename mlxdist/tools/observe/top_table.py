"""What `mlxdist top` shows: who is behind whom, then a table of the ranks, as far as the terminal has lines for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .top import Row, View

__all__ = ["Screenful", "whole"]


def whole(view: View) -> Group:
    return Group(*_head(view), _table(view.rows))


class Screenful:
    """A view in as many lines as there are when it is drawn: ranks that are late or silent come first then."""

    def __init__(self, view: View) -> None:
        self._head = _head(view)
        self._rows = view.rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        head = [line for text in self._head for line in text.wrap(console, options.max_width)]
        most = max(1, height * 2 // 3)  # the rest is for ranks
        if len(head) > most:
            head[most - 1 :] = [Text(f"... {len(head) - most + 1} more lines")]
        yield from head
        room = height - len(head)
        rows = self._rows
        if len(rows) >= room or _height(rows, console, options) > room:
            rows = sorted(rows, key=lambda row: (not row.is_late, row.has_answered, row.rank))[: max(0, room - 2)]
            while rows and _height(rows, console, options) > room - 1:  # a long place takes several lines
                rows = rows[:-1]
        if rows:
            yield _table(rows)
        if len(rows) < len(self._rows):
            yield Text(f"... {len(self._rows) - len(rows)} more")


def _height(rows: list[Row], console: Console, options: ConsoleOptions) -> int:
    return len(console.render_lines(_table(rows), options.update(height=None)))


def _head(view: View) -> list[Text]:
    first = f"job {view.job}, {len(view.rows)} ranks, {time.strftime('%H:%M:%S')}"
    return [Text(line) for line in (first, *view.sentences, *view.notes)]


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in _COLUMNS:
        table.add_column(column, justify=justify, no_wrap=column != "place", overflow="fold")
    for row in rows:
        style = "bold red" if row.is_late else "dim" if not row.has_answered else None
        table.add_row(*map(Text, _cells(row)), style=style)
    return table


_COLUMNS = [
    ("rank", "right"),
    ("host", "left"),
    ("pid", "right"),
    ("step", "right"),
    ("operation", "left"),
    ("place", "left"),
    ("for", "right"),
    ("GB/s", "right"),
    ("waits for", "left"),
]


def _cells(row: Row) -> list[str]:
    who = [str(row.rank), row.host, "" if row.pid is None else str(row.pid), _step(row)]
    if not row.has_answered:
        return [*who, "does not answer", "", "", "", ""]
    does = row.operation if row.in_operation else f"after {row.operation}" if row.operation else "none yet"
    seconds = f"{row.seconds:.1f} s" if row.operation else ""
    speed = "" if row.gbps is None else f"{row.gbps:.2f}"
    waits = "late: others wait" if row.is_late else "" if row.waits_for is None else f"rank {row.waits_for}"
    return [*who, does, row.place, seconds, speed, waits]


def _step(row: Row) -> str:
    """``5/100``, or ``#412`` where the program does not say: the collectives of all ranks."""
    if row.step is None:
        return f"#{row.operations}" if row.operations else ""
    return str(row.step) if row.steps is None else f"{row.step}/{row.steps}"
