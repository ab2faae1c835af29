"""Runs a job from its start to its end, and again after a failure, on this machine or on several hosts."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from ..errors import name_ranks
from ..hostfile import Hostfile
from ..remote.ssh import Reach
from .executable import CannotRun
from .hosts import HostsJob
from .local import LocalJob, LocalRank, new_name
from .output import Output, terminal_variables
from .remote import RemoteRank
from .restarts import run_with_restarts
from .standard_input import Pipe, Reader, StandardInput
from .supervisor import Ending, Supervisor
from .wakeup import Interrupted, Wakeup

__all__ = ["Plan", "run"]


@dataclass(frozen=True)
class Plan:
    """What is to be run. Without a hostfile: on this machine, where ``folder`` and ``reach`` play no part."""

    ranks: int
    command: list[str]
    variables: dict[str, str]
    hostfile: Hostfile | None = None
    folder: str = ""
    reach: Reach = Reach()
    prefix: bool = True
    grace: float = 5.0
    max_restarts: int = 0
    verbose: bool = False
    logs: Path | None = None  # an existing folder
    limit: float | None = None  # seconds that one start of the job may take
    stdin: str = "all"  # ranks that have the launcher's standard input; see standard_input.CHOICES

    def labels(self) -> list[str]:
        """What stands in front of the lines of each rank."""
        numbers = [f"{rank:>{len(str(self.ranks - 1))}}" for rank in range(self.ranks)]
        if self.hostfile is None:
            return numbers
        names = [host.name.rpartition("@")[2] for host in self.hostfile.hosts for _ in range(host.slots)]
        width = max(map(len, names))
        return [f"{number} {name:<{width}}" for number, name in zip(numbers, names)]


def run(plan: Plan) -> int:
    """Returns the exit status.

    Raises:
        ResourceError, CannotRun: nothing was started, and why.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (>&-): something else would be opened under its number
            os.open(os.devnull, os.O_RDWR)
    wakeup = Wakeup()
    variables = plan.variables
    output = None
    if plan.prefix:
        variables = terminal_variables(variables, plan.labels()) | variables
        output = Output(plan.labels(), wakeup.wake, plan.logs)
    name = new_name()

    def say(text: str) -> None:
        line = f"mlxdist launch: {text}"
        output.say(line) if output is not None else click.echo(line, err=True)

    standard_input = StandardInput(say, output.line_was_typed if output is not None else lambda: None)

    @contextlib.contextmanager
    def prepared(restart: int) -> Iterator[LocalJob | HostsJob]:
        common = (plan.command, variables, plan.grace)
        if plan.hostfile is None:
            with LocalJob(name, restart, plan.ranks, *common) as job:
                yield job
            return
        where = {"folder": plan.folder, "reach": plan.reach, "stdin": plan.stdin}
        with HostsJob(name, restart, plan.hostfile, *common, **where, wakeup=wakeup, say=say) as job:
            yield job

    def run_once(restart: int) -> Ending:
        with prepared(restart) as job:
            supervisor = Supervisor(job, wakeup, output, plan.grace, say, plan.verbose, plan.limit)
            readers: list[Reader] = []
            for rank in range(plan.ranks):
                supervisor.add(_start(job, rank, output, plan, readers))
            job.all_started()
            if isinstance(job, HostsJob):
                readers = job.readers(standard_input.wake)
            standard_input.feed(readers)
            try:
                return supervisor.run()
            finally:
                standard_input.clear()

    with wakeup.signals():
        try:
            status = run_with_restarts(run_once, plan.max_restarts, wakeup, say)
        except Interrupted as interrupt:
            say(f"interrupted by {interrupt} before all hosts were ready.")
            status = 128 + interrupt.number
        # Waits for whoever reads the output, as any program does, unless another signal comes.
        while output is not None and not output.is_written(0.1):
            if any(number != signal.SIGCHLD for number in wakeup.read()):
                break
    return status


def _start(
    job: LocalJob | HostsJob, rank: int, output: Output | None, plan: Plan, readers: list[Reader]
) -> LocalRank | RemoteRank:
    """``readers`` gets the rank's standard input, if that is a pipe of this process."""
    stdout, stderr, stdin = 1, 2, None
    ends: list[int] = []
    try:
        try:
            if output is not None:
                (out, stdout), (err, stderr) = os.pipe(), os.pipe()
                ends = [stdout, stderr]
            if isinstance(job, LocalJob):
                if plan.stdin == "all" and plan.ranks > 1:
                    stdin, target = os.pipe()
                    ends.append(stdin)
                    readers.append(Pipe(f"rank {rank}", target))
                elif rank:
                    stdin = subprocess.DEVNULL
                # else it has the launcher's own: a terminal stays a terminal
            started = job.start(rank, stdout, stderr, stdin)
        finally:
            for end in ends:
                os.close(end)
    except OSError as error:
        have = f" ({name_ranks(range(rank))} had started)" if rank else ""
        raise CannotRun(f"Cannot start rank {rank}: {error}{have}.", 126) from None
    if output is not None:
        output.add(rank, out, err)
    return started
