"""The command line of `mlxdist watch`."""

import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict
from functools import partial

import click
from rich.console import Console

from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.event_hook import Event, EventHook
from mlxdist.launch.job_name import JOB_NAME

__all__ = ["watch"]

_seconds = partial(click.option, type=click.FloatRange(0.1, 1e6), show_default=True, metavar="SECONDS")
_STYLES = {
    "failed": "bold red",
    "stalled": "bold red",
    "silent": "red",
    "memory_pressure": "red",
    "straggler": "yellow",
    "slow": "yellow",
}


@click.command()
@click.argument("job", required=False, type=JOB_NAME)
@host_options
@_seconds("--interval", default=2.0, help="Between two looks.")
@_seconds(
    "--straggler-after", "straggler", default=10.0, help="How long others wait for a rank until it is a straggler."
)
@_seconds("--stall-after", "stall", default=120.0, help="How long no rank goes on until the job is stalled.")
@_seconds(
    "--quiet",
    default=30.0,
    help="How long something is away until it is over; how long a rank does not respond until it is silent.",
)
@click.option("--on-event", "target", metavar="CMD", help="Also run CMD with each event, or POST it to a URL.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a JSON object in a line of its own.")
def watch(
    job: str | None,
    selection: HostSelection,
    interval: float,
    straggler: float,
    stall: float,
    quiet: float,
    target: str | None,
    as_json: bool,
) -> None:
    """Print a line when something happens to a job, until it ends or Ctrl-C.

    \b
        mlxdist watch                                 the only job that runs here, or was started here
        mlxdist watch 741b --straggler-after 60       the job whose name begins so
        mlxdist watch --on-event 'mail -s mlxdist me@example.org'
        mlxdist watch --on-event https://example.org/hook

    Events: straggler (others wait for a rank), stalled (no rank goes on), silent (a rank does not respond),
    memory_pressure (the ranks of a host have 95 % of its memory or more), slow (a Mac that Low Power Mode or heat
    slows), failed, ended. Each comes once, and once more when it is over. CMD gets the event as JSON on its standard
    input. The launcher knows of starts, failures and restarts: `mlxdist launch --on-event`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False)

    def show(event: Event) -> None:
        if as_json:
            click.echo(json.dumps(asdict(event)))
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            style = "green" if event.over else _STYLES.get(event.event, "")
            over = ", over" * event.over
            console.print(f"{clock} {event.event}{over}: {event.text}", style=style, markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        hook = stack.enter_context(EventHook(target, lambda text: click.echo(text, err=True))) if target else None
        with contextlib.suppress(KeyboardInterrupt):
            from mlxdist.tools.observe.job_watch import JobWatch

            for event in JobWatch(job, selection, interval, straggler, stall, quiet).events():
                show(event)
                if hook is not None:
                    hook.send(event)
