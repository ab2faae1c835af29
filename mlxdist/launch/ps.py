"""The command line of `mlxdist ps`."""

import json
import shlex
import sys
import time

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ResourceError, name_ranks
from .jobs import Job, list_jobs

__all__ = ["ps"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
def ps(as_json: bool) -> None:
    """List the jobs of this user that run on this machine.

    Of a job on several hosts, each host lists its own ranks. `mlxdist dump JOB` says what a job does, `mlxdist stop
    JOB` ends it.
    """
    try:
        jobs = list_jobs()
    except ResourceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps([_plain(job) for job in jobs], indent=2))
    elif jobs:
        Console(width=None if sys.stdout.isatty() else 200).print(_table(jobs))
    else:
        click.echo("No jobs run here.", err=True)


def _table(jobs: list[Job]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("job", no_wrap=True)
    table.add_column("runs for", justify="right", no_wrap=True)
    table.add_column("ranks that run", no_wrap=True)
    table.add_column("command", overflow="ellipsis", no_wrap=True, ratio=1)  # what is left of the line
    for job in jobs:
        ranks = name_ranks(sorted(job.pids)) if job.pids else "none"
        command = " ".join(shlex.join(job.command).split())
        table.add_row(job.name, _duration(time.time() - job.started), ranks, Text(command))
    return table


def _duration(seconds: float) -> str:
    """3725 as 1:02:05."""
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _plain(job: Job) -> dict:
    return {
        "job": job.name,
        "launcher": job.launcher,
        "started": job.started,
        "pids": {str(rank): pid for rank, pid in job.pids.items()},
        "command": job.command,
    }
