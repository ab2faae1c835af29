"""The command line of `mlxdist ps`."""

import json
import shlex
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.base.errors import name_ranks
from mlxdist.cluster.hostfile.options import HostSelection, host_options

__all__ = ["ps"]


@click.command()
@host_options
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
def ps(selection: HostSelection, as_json: bool) -> None:
    """List the jobs of this user that run on this machine or were started here, or those on other hosts.

    \b
        mlxdist ps
        mlxdist ps --hosts node0,node1

    A job on several hosts is shown with them where it was started; each of its hosts lists its own ranks. `mlxdist dump
    JOB` shows what a job does, `mlxdist top JOB` while it does it, `mlxdist stop JOB` ends it.

    The exit status is 1 if a host does not respond.
    """
    from mlxdist.launch import jobs_on_hosts
    from mlxdist.launch.jobs import list_jobs

    problems: list[str] = []
    if selection.hostfile is None:
        jobs = [jobs_on_hosts.as_json(job) for job in list_jobs()]
    else:
        jobs, problems = jobs_on_hosts.list_on(selection)
    if as_json:
        click.echo(json.dumps(jobs, indent=2))
    elif jobs:
        Console(width=None if sys.stdout.isatty() else 200).print(_table(jobs))
    else:
        click.echo("No jobs run here." if selection.hostfile is None else "No jobs run there.", err=True)
    for problem in problems:
        click.echo(problem, err=True)
    sys.exit(1 if problems else 0)


def _table(jobs: list[dict[str, Any]]) -> Table:
    on_hosts, several = any("host" in job for job in jobs), any(job["hosts"] for job in jobs)
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("job", no_wrap=True)
    if on_hosts:
        table.add_column("host", no_wrap=True)
    table.add_column("runs for", justify="right", no_wrap=True)
    table.add_column("ranks that run" if on_hosts or not several else "ranks", no_wrap=True)
    if several and not on_hosts:
        table.add_column("on hosts", overflow="fold", max_width=60)
    table.add_column("command", overflow="ellipsis", no_wrap=True, ratio=1)  # what is left of the line
    for job in jobs:
        row = [job["job"], *([job["host"]] if on_hosts else []), _duration(job["seconds"])]
        if on_hosts or not job["hosts"]:
            row.append(name_ranks(map(int, job["pids"])) if job["pids"] else "none")
        else:
            row.append(str(sum(host["slots"] for host in job["hosts"])))
        if several and not on_hosts:
            row.append(", ".join(map(_ranks_of, job["hosts"])))
        table.add_row(*map(Text, row), Text(" ".join(shlex.join(job["command"]).split())))
    return table


def _ranks_of(host: dict[str, Any]) -> str:
    """A host's name with its ranks: ``node1: 2-3``."""
    first, slots = host["first"], host["slots"]
    return f"{host['name']}: {first}" + (f"-{first + slots - 1}" if slots > 1 else "")


def _duration(seconds: float) -> str:
    """A duration in seconds as text: 3725 gives "1:02:05"."""
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
