"""The command line of `mlxdist top`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console

from mlxdist.base.environment import Environment, parse_address
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.job_name import JOB_NAME
from mlxdist.tools.bench.sizes import Parsed
from mlxdist.tools.observe.top_table import Screenful, full

if TYPE_CHECKING:
    from mlxdist.runtime.observation.view import View
    from mlxdist.tools.observe.top import Watch

__all__ = ["top"]

# For ranks to respond: a stopped rank delays a refresh by this at most.
_MAX_RESPONSE_SECONDS = 2.0
_MIN_RESPONSE_SECONDS = 0.5


def _web_address(text: str) -> tuple[str, int]:
    """Parses the value of --web. Raises ValueError."""
    if re.fullmatch("[0-9]{1,5}", text, re.ASCII) and int(text) <= 65535:
        return "127.0.0.1", int(text)
    try:
        return parse_address(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.80} {error}; a port alone is one of this machine") from None


@click.command()
@click.argument("job", required=False, type=JOB_NAME)
@host_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one refresh to the next.",
)
@click.option("--once", is_flag=True, help="Print one table, of the time between two refreshes, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object in a line of its own for each refresh.")
@click.option(
    "--web",
    type=Parsed("[HOST:]PORT", _web_address),
    help="Show it in a page at this address, by default of this machine alone, until Ctrl-C; 0 is a free port.",
)
def top(
    job: str | None, selection: HostSelection, interval: float, once: bool, as_json: bool, web: tuple[str, int] | None
) -> None:
    """Show what the ranks of a job are doing, until q or Ctrl-C.

    \b
        mlxdist top                       the only job that runs here, or was started here
        mlxdist top 741b --interval 5     the job whose name begins so
        mlxdist top --hosts node0,node1   the only job that runs on these hosts
        mlxdist top --once | less
        mlxdist top --web 8081            in a browser, at http://127.0.0.1:8081

    For each rank: the step that the program is at, if it calls mlxdist.set_step, else how many collectives of all ranks
    it has begun; its operation and for how long; what it sends and receives; where the terminal is wide, its memory.
    Ranks that others wait for are stragglers. A host whose ranks take nearly all of its memory has a line, and a Mac
    that Low Power Mode or heat slows has a line. In a pipe one table is printed, as with --once.

    The exit status is 0 also when the job ends meanwhile, and 1 if at the last refresh a rank did not respond.
    """
    if web is not None:
        if once or as_json:
            raise click.UsageError("--web is a page; --once and --json are for the terminal")
        _serve_page(job, selection, *web)
        return
    from mlxdist.tools.observe.collect import find_ranks
    from mlxdist.tools.observe.top import Watch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is put in order
    once = once or not (as_json or sys.stdout.isatty())
    view: View | None
    try:
        with find_ranks(job, selection) as ranks:
            watch = Watch(ranks)
            if once:
                view = _second(_views(watch, interval))
                _print_json(view) if as_json else _print(view)
            elif as_json:
                for view in _views(watch, interval):
                    _print_json(view)
            else:
                view = _show(watch, interval)
    except KeyboardInterrupt:
        return
    if view is not None and view.ended:
        click.echo(f"Job {view.job} has ended.", err=True)
    elif view is not None and not (view.ranks and all(row.has_responded for row in view.ranks)):
        sys.exit(1)


def _serve_page(job: str | None, selection: HostSelection, host: str, port: int) -> None:
    """Serves the page until a signal comes. The key of MLXDIST_API_KEY is for it, too."""
    try:
        from mlxdist.tools.observe.web import JobPage
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--web needs {error.name}: pip install 'mlxdist[lm]'") from None
    ends = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ends.set())
    with JobPage(job, selection, host, port, Environment.read().api_key) as page:
        click.echo(f"mlxdist: the ranks are shown at {page.address}", err=True)
        ends.wait()


def _views(watch: Watch, interval: float, redraw: Callable[[], None] = lambda: None) -> Generator[View]:
    """Yields views until the job has ended (the last view) or the user presses q. ``redraw``: called on a resize."""
    seconds = min(max(interval, _MIN_RESPONSE_SECONDS), _MAX_RESPONSE_SECONDS)
    view = None
    with _terminal() as (keys, sizes):
        while view is None or not view.ended:
            begin = time.monotonic()
            view = watch.refresh(seconds)
            yield view
            while not view.ended and (wait := begin + interval - time.monotonic()) > 0:
                ready = select.select([*keys, *sizes], [], [], wait)[0]
                if any(os.read(key, 64) in (b"", b"q", b"Q") for key in keys if key in ready):
                    return
                if any(os.read(size, 64) for size in sizes if size in ready):
                    redraw()


def _second(views: Generator[View]) -> View:
    """The second view, because only that has speeds; the first one if the job ends before."""
    first = next(views)
    second = next(views, first)
    views.close()
    return second if second.ranks else first


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[list[int], list[int]]]:
    """Descriptors for single keys, and for a byte after each resize; both lists are empty without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield [], []
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    source, target = os.pipe()
    os.set_blocking(target, False)
    signal.signal(signal.SIGWINCH, lambda *_: None)  # without a handler nothing comes through the pipe
    signal.set_wakeup_fd(target, warn_on_full_buffer=False)
    tty.setcbreak(terminal)
    try:
        yield [terminal], [source]
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(-1)
        os.close(source)
        os.close(target)


def _show(watch: Watch, interval: float) -> View | None:
    from rich.live import Live

    console, last, shown = Console(), None, None
    live = Live(console=console, auto_refresh=False, screen=True)  # so that a change of size leaves nothing over
    views = _views(watch, interval, live.refresh)
    try:
        with live:
            for last in views:
                if last.ranks or not last.ended:
                    shown = Screenful(last)
                    live.update(shown, refresh=True)
    finally:
        views.close()
        if shown is not None:
            console.print(shown)
    return last


def _print(view: View) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(full(view))


def _print_json(view: View) -> None:
    click.echo(json.dumps({"time": time.time()} | asdict(view) | {"warnings": view.warnings}))
