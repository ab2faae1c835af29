"""The command line of `mlxdist stop`."""

import contextlib
import os
import signal
import sys
import time

import click

from ..errors import InvalidArgument, ResourceError
from .jobs import Job, find_job, list_jobs

__all__ = ["stop"]

_STEP = 0.05


@click.command()
@click.argument("names", metavar="[JOB]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All jobs of this user on this machine.")
@click.option(
    "--wait",
    "seconds",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for a job to end: its ranks get SIGTERM, after the launcher's grace SIGKILL.",
)
def stop(names: tuple[str, ...], everything: bool, seconds: float) -> None:
    """End jobs, as Ctrl-C in their terminal would: by the beginning of their names, see `mlxdist ps`.

    \b
        mlxdist stop 741b
        mlxdist stop --all

    The exit status is 1 if one has not ended in time.
    """
    if bool(names) == everything:
        raise click.UsageError("Name the jobs to be ended, or --all; `mlxdist ps` lists them.")
    try:
        jobs = list_jobs() if everything else [_running(name) for name in names]
    except (InvalidArgument, ResourceError) as error:
        raise click.ClickException(str(error)) from None
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):  # its keeper ends what is left
            os.kill(job.launcher, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    running = {job.name for job in jobs}
    while running and time.monotonic() < deadline:
        running &= {job.name for job in list_jobs()}
        time.sleep(_STEP if running else 0)
    for job in jobs:
        click.echo(f"{job.name} still runs after {seconds:g} s" if job.name in running else f"{job.name} has ended")
    sys.exit(1 if running else 0)


def _running(name: str) -> Job:
    job = find_job(name)
    if not job.launcher:
        raise InvalidArgument(f"job {job.name!r} has ended already")
    return job
