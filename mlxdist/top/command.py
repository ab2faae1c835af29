"""The command line of `mlxdist top`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..errors import InvalidArgument, ResourceError
from ..hostfile.options import Chosen, host_options
from ..launch.job_name import JOB_NAME

if TYPE_CHECKING:
    from .watch import Row, View, Watch

__all__ = ["top"]

# A rank that is stopped keeps a refresh waiting for so long at most.
_LONGEST_ANSWER = 2.0
_SHORTEST_ANSWER = 0.5


@click.command()
@click.argument("job", required=False, type=JOB_NAME)
@host_options
@click.option(
    "--every",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one look at the job to the next.",
)
@click.option("--once", is_flag=True, help="Print one table, of the time between two looks, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object in a line of its own for each look.")
def top(job: str | None, chosen: Chosen, every: float, once: bool, as_json: bool) -> None:
    """Show what the ranks of a job do, while they do it; q or Ctrl-C ends that.

    \b
        mlxdist top                       the only job that runs here, or was started here
        mlxdist top 741b --every 5        the job whose name begins so
        mlxdist top --hosts node0,node1   the only job that runs on these hosts
        mlxdist top --once | less

    For each rank: the step that the program is at, if it calls mlxdist.set_step, else how many collectives of all ranks
    it has begun; its operation and for how long; what it sends and receives. Ranks that others wait for are late. In a
    pipe one table is printed, as with --once.

    The exit status is 0 also when the job ends meanwhile, and 1 if at the last look a rank did not answer.
    """
    from ..dump.ask import find_ranks
    from .watch import Watch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is put in order
    once = once or not (as_json or sys.stdout.isatty())
    try:
        with find_ranks(job, chosen) as ranks:
            watch = Watch(ranks)
            looks = _looks(watch, every)
            if once:
                view = _second(looks)
                _print_json(view) if as_json else _print(view)
            elif as_json:
                for view in looks:
                    _print_json(view)
            else:
                view = _show(looks)
    except (InvalidArgument, ResourceError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        return
    if view is not None and view.ended:
        click.echo(f"Job {view.job} has ended.", err=True)
    elif view is not None and not (view.rows and all(row.has_answered for row in view.rows)):
        sys.exit(1)


def _looks(watch: Watch, every: float) -> Iterator[View]:
    """Until the job has ended, or somebody presses q; that view is the last."""
    seconds = min(max(every, _SHORTEST_ANSWER), _LONGEST_ANSWER)
    view = None
    with _keys() as keys:
        while view is None or not view.ended:
            begin = time.monotonic()
            view = _look(watch, seconds, view)
            yield view
            while not view.ended and (wait := begin + every - time.monotonic()) > 0:
                if not keys:
                    time.sleep(wait)
                elif select.select(keys, [], [], wait)[0] and os.read(keys[0], 64) in (b"", b"q", b"Q"):
                    return


def _look(watch: Watch, seconds: float, before: View | None) -> View:
    from .watch import View

    try:
        return watch.look(seconds)
    except InvalidArgument as error:
        if before is None:
            raise
        return View(before.job, [], [], [str(error)], True)


def _second(looks: Iterator[View]) -> View:
    """What has gone by is known then; the first one where the job ends before."""
    first = next(looks)
    second = next(looks, first)
    looks.close()
    return second if second.rows else first


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Where keys can be read one by one: a terminal in front of this one; else nothing."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield []
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield [terminal]
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _show(looks: Iterator[View]) -> View | None:
    from rich.live import Live

    console, view, last = Console(), None, None
    try:
        with Live(console=console, auto_refresh=False) as live:
            for view in looks:
                last = view
                if view.rows or view.notes:
                    live.update(_render(view), refresh=True)
    finally:
        looks.close()
    return last


def _print(view: View) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(_render(view))


def _print_json(view: View) -> None:
    click.echo(json.dumps({"time": time.time()} | view.as_json()))


def _render(view: View) -> Group:
    now = time.strftime("%H:%M:%S")
    lines = [Text(f"job {view.job}, {len(view.rows)} ranks, {now}"), _table(view.rows)]
    return Group(*lines, *(Text(line) for line in (*view.sentences, *view.notes)))


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
