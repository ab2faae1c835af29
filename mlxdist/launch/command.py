"""The command line of `mlxdist launch`."""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from .. import mpi_door
from ..environment import MAX_RANKS, MAX_RESTARTS, OF_JOB, PROVIDERS, QUEUE_PAIRS, Environment
from ..errors import EnvironmentVariableError, InvalidArgument, ResourceError
from ..hostfile import Hostfile
from ..hostfile.options import Chosen, host_options
from ..verbs import device_map
from .executable import check_command
from .leftovers import remove_leftovers
from .local import base_environment
from .remote import AGENT
from .run import Plan, run

__all__ = ["launch"]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=click.IntRange(1, MAX_RANKS), help="Number of ranks; with hosts: on each of them.")
@host_options
@click.option("--cwd", metavar="FOLDER", help="Where the ranks run, on every host.  [default: the current folder]")
@click.option("--env-file", metavar="FILE", help="Lines NAME=VALUE, set for all ranks; --env comes after it.")
@click.option("--log-dir", "logs", metavar="FOLDER", help="Write what rank N prints also to rank-N.out and .err there.")
@click.option(
    "--timeout",
    "limit",
    type=click.FloatRange(0, 1e9, min_open=True),
    metavar="SECONDS",
    help="End a job that runs for longer, with exit status 124.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing.")
@click.option("--prefix/--no-prefix", default=True, help="Print the rank in front of each line, or pass output raw.")
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="When a rank has failed: time for the others to leave by themselves, then again between SIGTERM and SIGKILL.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, MAX_RESTARTS),
    default=0,
    show_default=True,
    metavar="K",
    help="When a rank has failed, whatever the reason, start all of them again, at most K times.",
)
@click.option(
    "--provider",
    type=click.Choice(PROVIDERS),
    help="Verbs that carry the messages. auto, the default: shared memory on one host, RDMA between hosts where it is "
    "there, else TCP; says what it chose and why.",
)
@click.option("--qp", type=click.Choice(QUEUE_PAIRS), help="Queue pairs: unreliable (default) or reliable (Linux).")
@click.option(
    "--env", "settings", multiple=True, metavar="NAME=VALUE", help="Set a variable for all ranks; repeatable."
)
@click.option("--verbose", is_flag=True, help="Report the start and the end of every rank.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]...")
def launch(
    chosen: Chosen,
    ranks: int | None,
    cwd: str | None,
    env_file: str | None,
    logs: str | None,
    limit: float | None,
    dry_run: bool,
    prefix: bool,
    grace: float,
    max_restarts: int,
    provider: str | None,
    qp: str | None,
    settings: tuple[str, ...],
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Start a command as N ranks on this machine, or on several hosts.

    \b
        mlxdist launch -n 2 -- python train.py --epochs 3
        mlxdist launch --hostfile rmlx-hosts.json -- python train.py
        mlxdist launch --hosts node0,node1 -n 2 -- python train.py

    Every rank finds its number in MLXDIST_RANK and the number of ranks in MLXDIST_WORLD_SIZE. A program that knows
    nothing of mlxdist and calls mx.distributed.init() gets the same group. Rank 0 reads the standard input. Each rank
    has a temporary folder (TMPDIR) of its own, which is removed when the job has ended.

    The exit status is that of the first rank that failed, 128 + the signal if it was killed by one. Ctrl-C and SIGTERM
    reach all ranks. When the command returns, nothing of the job is left running.

    Hosts are reached by ssh, without a password; mlxdist, the command and its folder have to be there under the same
    names (--python, --cwd). What the ranks are given travels through the connection, not on a command line: the
    variables of --env, --env-file, the hostfile and this shell's MLXDIST_*.

    With --max-restarts, a job whose rank has failed is ended as always and then started again, with pauses of 1, 2, 4
    and up to 30 seconds in between; it finds in MLXDIST_RESTART how often that was, and has to load its own checkpoint.
    Not after Ctrl-C or SIGTERM. The exit status is that of the last start.
    """
    if not command:
        raise click.UsageError("No command given. Write it after --: mlxdist launch -n 2 -- python train.py")
    try:
        on = chosen.with_ranks(ranks).hostfile
        if on is None and ranks is None:
            raise click.UsageError("Missing option '-n', or '--hostfile', or '--hosts'.")
        given = _parse_settings(_lines(env_file), "--env-file") | _parse_settings(settings, "--env")
        given |= {k: v for k, v in {"MLXDIST_PROVIDER": provider, "MLXDIST_QP": qp}.items() if v is not None}
        if on is None:
            variables = _for_this_machine(given, command[0])
        else:
            variables = _for_hosts(on, given)
        _check_variables(variables)
        plan = Plan(
            ranks=on.ranks if on else ranks,
            command=list(command),
            variables=variables,
            hostfile=on,
            folder=os.path.abspath(cwd or "."),
            reach=chosen.reach,
            prefix=prefix,
            grace=grace,
            max_restarts=max_restarts,
            verbose=verbose,
            logs=_folder(logs, prefix),
            limit=limit,
        )
        if dry_run:
            _show(plan)
            return
        if cwd and on is None:
            os.chdir(cwd)
        for text in remove_leftovers():
            click.echo(f"mlxdist launch: {text}", err=True)
        status = run(plan)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    except (ResourceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


def _for_this_machine(given: Mapping[str, str], executable: str) -> dict[str, str]:
    """All that the ranks have in their environment, but for what is each rank's own."""
    variables = base_environment(os.environ)
    mpi_door.check(variables[mpi_door.VARIABLE])
    variables |= given
    if not os.path.isdir(variables.get("TMPDIR") or "/tmp"):
        raise click.UsageError(f"TMPDIR={variables['TMPDIR']} is not a folder; the ranks' temporary folders go there.")
    check_command(executable, variables)
    return variables


def _for_hosts(on: Hostfile, given: Mapping[str, str]) -> dict[str, str]:
    """What is set for the ranks besides what their hosts set."""
    from ..hostfile.weights import weight_variables

    variables = _parse_settings(on.envs, "envs of the hostfile")
    variables |= {name: v for name, v in os.environ.items() if name.startswith("MLXDIST_") and name not in OF_JOB}
    rows = [[list(devices) or None for devices in host.rdma] for host in on.hosts]
    if any(rows) and "MLXDIST_RDMA" not in variables:
        variables["MLXDIST_RDMA"] = json.dumps(rows)
    return variables | weight_variables(on) | dict(given)


def _check_variables(variables: Mapping[str, str]) -> None:
    try:
        environment = Environment.read(variables)
    except EnvironmentVariableError as error:
        raise click.UsageError(str(error)) from None
    if environment.rdma is not None:
        device_map.load(environment.rdma)


def _show(plan: Plan) -> None:
    """What --dry-run prints."""
    for label in plan.labels():
        click.echo(f"[{label}] {shlex.join(plan.command)}")
    if plan.hostfile is not None:
        for host in plan.hostfile.hosts:
            click.echo(f"{host.name}: {shlex.join(plan.reach.module(host.name, AGENT))}")
        for name, value in plan.variables.items():
            click.echo(f"{name}={value}")


def _folder(logs: str | None, prefix: bool) -> Path | None:
    if logs is None:
        return None
    if not prefix:
        raise click.UsageError("--log-dir copies what passes the launcher; with --no-prefix nothing does.")
    folder = Path(logs).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lines(file: str | None) -> list[str]:
    if file is None:
        return []
    lines = Path(file).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _parse_settings(settings: Iterable[str], where: str) -> dict[str, str]:
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise click.UsageError(f"Invalid value for '{where}': {setting!r} is not NAME=VALUE.")
        if name in OF_JOB:
            raise click.UsageError(f"Invalid value for '{where}': {name} is set by the launcher, for each rank.")
        variables[name] = value
    return variables
