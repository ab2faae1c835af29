"""The command line of `mlxdist launch`."""

import os
import shutil
import signal
import sys
from collections.abc import Mapping

import click

from .. import mpi_door
from ..environment import MAX_RANKS, MAX_RESTARTS, OF_JOB, PROVIDERS, QUEUE_PAIRS, Environment
from ..errors import EnvironmentVariableError, InvalidArgument, ResourceError, name_ranks
from ..verbs import device_map
from .leftovers import remove_leftovers
from .local import LocalJob, LocalRank, base_environment, new_name
from .output import Output, terminal_variables
from .restarts import run_with_restarts
from .supervisor import Ending, Supervisor, Wakeup

__all__ = ["launch"]


class CannotRun(click.ClickException):
    """The command does not exist (127) or is not executable (126), as shells have it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=click.IntRange(1, MAX_RANKS), required=True, help="Number of ranks.")
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
    ranks: int,
    prefix: bool,
    grace: float,
    max_restarts: int,
    provider: str | None,
    qp: str | None,
    settings: tuple[str, ...],
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Start a command as N ranks on this machine.

    \b
        mlxdist launch -n 2 -- python train.py --epochs 3

    Every rank finds its number in MLXDIST_RANK and the number of ranks in MLXDIST_WORLD_SIZE. A program that knows
    nothing of mlxdist and calls mx.distributed.init() gets the same group. Rank 0 reads the standard input. Each rank
    has a temporary folder (TMPDIR) of its own, which is removed when the job has ended.

    The exit status is that of the first rank that failed, 128 + the signal if it was killed by one. Ctrl-C and SIGTERM
    reach all ranks. When the command returns, nothing of the job is left running.

    With --max-restarts, a job whose rank has failed is ended as always and then started again, with pauses of 1, 2, 4
    and up to 30 seconds in between; it finds in MLXDIST_RESTART how often that was, and has to load its own checkpoint.
    Not after Ctrl-C or SIGTERM. The exit status is that of the last start.
    """
    if not command:
        raise click.UsageError("No command given. Write it after --: mlxdist launch -n 2 -- python train.py")
    try:
        variables = base_environment(os.environ)
        mpi_door.check(variables[mpi_door.VARIABLE])
    except ResourceError as error:
        raise click.ClickException(str(error)) from None
    variables |= _parse_settings(settings)
    given = {"MLXDIST_PROVIDER": provider, "MLXDIST_QP": qp}
    variables |= {name: value for name, value in given.items() if value is not None}
    if not os.path.isdir(variables.get("TMPDIR") or "/tmp"):
        raise click.UsageError(f"TMPDIR={variables['TMPDIR']} is not a folder; the ranks' temporary folders go there.")
    try:
        environment = Environment.read(variables)
        if environment.rdma is not None:
            device_map.load(environment.rdma)
    except (EnvironmentVariableError, InvalidArgument) as error:
        raise click.UsageError(str(error)) from None
    _check_command(command[0], variables)
    try:
        for text in remove_leftovers():
            click.echo(f"mlxdist launch: {text}", err=True)
        status = _run(ranks, prefix, grace, max_restarts, variables, verbose, list(command))
    except ResourceError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


def _run(
    ranks: int,
    prefix: bool,
    grace: float,
    max_restarts: int,
    variables: dict[str, str],
    verbose: bool,
    command: list[str],
) -> int:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (>&-): something else would be opened under its number
            os.open(os.devnull, os.O_RDWR)
    wakeup = Wakeup()
    if prefix:
        variables = terminal_variables(variables, ranks) | variables
        output = Output(ranks, wakeup.wake)
    else:
        output = None
    name = new_name()

    def say(text: str) -> None:
        line = f"mlxdist launch: {text}"
        output.say(line) if output is not None else click.echo(line, err=True)

    def run_once(restart: int) -> Ending:
        with LocalJob(name, restart, ranks, command, variables, grace) as job:
            supervisor = Supervisor(job, wakeup, output, grace, say, verbose)
            _start_all(job, ranks, output, supervisor)
            return supervisor.run()

    with wakeup.signals():
        status = run_with_restarts(run_once, max_restarts, wakeup, say)
        # Waits for whoever reads the output, as any program does, unless another signal comes.
        while output is not None and not output.is_written(0.1):
            if any(number != signal.SIGCHLD for number in wakeup.read()):
                break
    return status


def _start_all(job: LocalJob, ranks: int, output: Output | None, supervisor: Supervisor) -> None:
    started = {}
    for rank in range(ranks):
        try:
            process = _start(job, rank, output)
        except OSError as error:
            have = f" ({name_ranks(range(rank))} had started)" if rank else ""
            raise CannotRun(f"Cannot start rank {rank}: {error}{have}.", 126) from None
        started[rank] = process.process.pid
        supervisor.add(process)
    job.record.note_ranks(started)


def _start(job: LocalJob, rank: int, output: Output | None) -> LocalRank:
    if output is None:
        return job.start(rank, None, None)
    stdout, stdout_end = os.pipe()
    stderr, stderr_end = os.pipe()
    try:
        started = job.start(rank, stdout_end, stderr_end)
    finally:
        os.close(stdout_end)
        os.close(stderr_end)
    output.add(rank, stdout, stderr)
    return started


def _parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise click.UsageError(f"Invalid value for '--env': {setting!r} is not NAME=VALUE.")
        if name in OF_JOB:
            raise click.UsageError(f"Invalid value for '--env': {name} is set by the launcher, for each rank.")
        variables[name] = value
    return variables


def _check_command(name: str, variables: Mapping[str, str]) -> None:
    if "/" in name:
        exists = os.path.exists(name)
        found = os.access(name, os.X_OK) and not os.path.isdir(name)
    else:
        path = variables.get("PATH", os.defpath)
        found = shutil.which(name, path=path) is not None
        exists = found or any(os.path.exists(os.path.join(folder, name)) for folder in path.split(os.pathsep) if folder)
    if found:
        return
    if os.path.isfile(name) and name.endswith(".py"):
        raise CannotRun(f"{name} is a Python file, not a command; write: python {name}", 126)
    if exists:
        what = "a folder" if os.path.isdir(name) else "not executable"
        raise CannotRun(f"{name} is {what}; give the program that runs it, or chmod +x it", 126)
    where = "" if "/" in name else " in PATH"
    raise CannotRun(f"The command {name!r} does not exist{where}; nothing was started", 127)
