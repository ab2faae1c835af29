"""The command line of `mlxdist stop`."""

import sys

import click

from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.job_name import JOB_NAME

__all__ = ["stop"]


@click.command()
@click.argument("names", metavar="[JOB]...", nargs=-1, type=JOB_NAME)
@click.option("--all", "everything", is_flag=True, help="All jobs of this user on this machine, or on the hosts given.")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for a job to end: its ranks get SIGTERM, after the launcher's grace SIGKILL.",
)
@host_options
def stop(names: tuple[str, ...], everything: bool, seconds: float, selection: HostSelection) -> None:
    """End jobs, as Ctrl-C in their terminal would: by the beginning of their names, see `mlxdist ps`.

    \b
        mlxdist stop 741b
        mlxdist stop --all
        mlxdist stop --all --hosts node0,node1

    A job on several hosts is ended on all of them: where it was started, and on each of its hosts. With --hostfile or
    --hosts those hosts end it, also where the launcher that started it is gone.

    The exit status is 1 if a job has not ended in time, or a host does not respond.
    """
    if bool(names) == everything:
        raise click.UsageError("Name the jobs to be ended, or --all; `mlxdist ps` lists them.")
    from mlxdist.launch.jobs import list_jobs, running_job
    from mlxdist.launch.jobs_on_hosts import Stopped, end_jobs, stop_on

    if selection.hostfile is not None:
        done = stop_on(selection, names, everything, seconds)
    else:
        jobs = [running_job(name) for name in names] if names else list_jobs()
        running = end_jobs(jobs, seconds)
        done = Stopped({job.name: [] for job in jobs if job.name not in running}, {name: [] for name in running})
    for job, hosts in sorted((done.ended | done.running).items()):
        where = f" on {', '.join(hosts)}" if hosts else ""
        click.echo(f"{job} still runs{where} after {seconds:g} s" if job in done.running else f"{job} has ended{where}")
    for note in done.notes + done.silent:
        click.echo(note, err=True)
    sys.exit(1 if done.running or done.silent else 0)
