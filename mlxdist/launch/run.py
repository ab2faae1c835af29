"""Runs a job from its start to its end, restarts included, on this machine or on several hosts."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from mlxdist.base.environment import Environment
from mlxdist.base.errors import ResourceError, name_ranks

from .backends import free_ports
from .executable import CannotRun
from .exit_status import Ending
from .jobs import LAUNCHER, HostRanks, Job, JobDirectory
from .local import LocalJob, LocalRank, allow_descriptors, new_name, start_with_pipes, usual_grace
from .output import Output
from .plan import LaunchPlan
from .restarts import Follower, name_of_start, run_with_restarts
from .standard_input import StandardInput
from .supervisor import Supervisor
from .terminal import terminal_variables
from .wakeup import Interrupted, Wakeup

if TYPE_CHECKING:  # a job on this machine alone does not load what reaches others
    from .elastic import Elastic
    from .hosts import HostsJob
    from .job_events import LauncherEvents
    from .remote import RemoteRank

__all__ = ["StallWatcher", "run"]


class StallWatcher(Protocol):
    """Makes a context manager that watches a start of the job."""

    def __call__(
        self, job: str, seconds: float, say: Callable[[str], None], on_stall: Callable[[], None]
    ) -> contextlib.AbstractContextManager[object]:
        """``job``: the full name of the start. ``seconds``: without progress until ``on_stall`` is called, after what
        the ranks do has been given to ``say``."""


def run(plan: LaunchPlan, follower: Follower | None = None, watch: StallWatcher | None = None) -> int:
    """Returns the exit status. ``watch``: for --stall-timeout.

    Raises:
        ResourceError, CannotRun: nothing was started, and why; CannotRun also at a restart.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (>&-): something else would be opened under its number
            os.open(os.devnull, os.O_RDWR)
    wakeup = Wakeup()
    output = None
    if plan.options.prefix:
        plan = replace(plan, variables=terminal_variables(plan.variables, plan.labels()) | plan.variables)
        if plan.logs is not None:
            _make_logs(plan.logs)
        output = Output(plan.labels(), wakeup.wake, plan.logs)
    name = new_name()

    def say(text: str) -> None:
        line = f"mlxdist launch: {text}"
        output.say(line) if output is not None else click.echo(line, err=True)

    events = None
    if plan.options.on_event:
        from .job_events import LauncherEvents

        events = LauncherEvents(plan.options.on_event, name, say)
    standard_input = StandardInput(say, output.line_was_typed if output is not None else lambda: None)

    def prepare(restart: int) -> contextlib.AbstractContextManager[LocalJob | HostsJob]:
        if plan.hostfile is None or plan.by_mpirun:
            return _local_job(plan, name, restart, wakeup)
        from .hosts import HostsJob

        return HostsJob(plan, plan.hostfile, name, restart, wakeup, say, follower is not None)

    def run_once(restart: int) -> Ending:
        with contextlib.ExitStack() as stack:
            try:
                job = stack.enter_context(prepare(restart))
            except ResourceError as error:
                if restart == 0:
                    raise
                return Ending(1, str(error), failed=True, cause=str(error))  # a host may be back at the next restart
            elastic = _elastic(job, plan, output, partial(_regroup, say, events, restart))
            supervisor = Supervisor(job, wakeup, output, say, plan.options, elastic)
            if restart == 0 and (macs := job.awake()):
                from .awake import describe

                for text in describe(macs, plan.options.verbose):
                    say(text)
            if follower is not None:
                follower.starting(job.place_of_rank_0(), job.secret)
            for rank in plan.numbers:
                supervisor.add(_start(job, rank, output, plan))
            job.all_started()
            standard_input.feed(job.readers(standard_input.wake))
            if events is not None:
                events.started(restart, plan.size)
            if watch is not None and (seconds := plan.options.stall_timeout) is not None:
                on_stall = partial(_stall, supervisor, events, restart, seconds)
                stack.enter_context(watch(name_of_start(name, restart), seconds, say, on_stall))
            try:
                return _of_plan(plan, supervisor.run())
            finally:
                standard_input.clear()

    directory = _launcher_directory(plan, name)
    start = run_once if events is None else events.around(run_once)
    with wakeup.signals(), events or contextlib.nullcontext():
        try:
            status = run_with_restarts(name, start, plan.options.max_restarts, wakeup, say, directory, follower)
        except Interrupted as interrupt:
            say(f"interrupted by {interrupt} before all hosts were ready.")
            status = 128 + interrupt.number
        finally:
            if directory is not None:
                directory.remove()
        # Waits until the reader has taken the output, like any program that prints, unless another signal comes.
        while output is not None and not output.is_written(0.1):
            if wakeup.read():
                break
    if status == 0 and output is not None and (trouble := output.write_error()):  # of the last that was printed
        say(f"{trouble}.")
        output.is_written(1.0)
        status = 1
    return status


def _elastic(
    job: LocalJob | HostsJob, plan: LaunchPlan, output: Output | None, on_epoch: Callable[[bool, str], None]
) -> Elastic | None:
    if plan.options.elastic is None:
        return None
    from .elastic import Elastic, member_variables

    patience = Environment.read(plan.variables).rendezvous_timeout
    least, restarts = plan.options.elastic, plan.options.max_restarts
    variables, start_again = partial(member_variables, plan), partial(_start, job, output=output, plan=plan, joins=True)
    return Elastic(job, plan.size, least, patience, restarts, variables, on_epoch, start_again)


def _regroup(
    say: Callable[[str], None], events: LauncherEvents | None, restart: int, has_grown: bool, text: str
) -> None:
    say(text)
    if events is not None:
        events.regrouped(restart, has_grown, text)


def _stall(supervisor: Supervisor, events: LauncherEvents | None, restart: int, seconds: float) -> None:
    how = f"no rank has gone on for {seconds:g} s (--stall-timeout)"
    if events is not None:
        events.stalled(restart, how)
    supervisor.stall(how)


def _make_logs(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--log-dir: {directory} cannot be made: {error.strerror}") from None
    if directory.is_symlink() and directory.lstat().st_uid not in (os.geteuid(), 0):
        raise ResourceError(f"--log-dir: {directory} is a link of another user; name the directory that it leads to")


def _launcher_directory(plan: LaunchPlan, name: str) -> JobDirectory | None:
    """The launcher's directory for a job without ranks here: they are on other hosts, or the job will be restarted."""
    hosts: list[HostRanks] = []
    if plan.hostfile is not None and not plan.by_mpirun:
        for host in plan.hostfile.hosts:
            hosts.append(HostRanks(host.name, sum(before.slots for before in hosts), host.slots))
    elif not plan.options.max_restarts:
        return None
    job = Job(name, os.getpid(), time.time(), plan.command, hosts=hosts)
    if plan.ssh_config is not None:
        job = replace(job, ssh=plan.ssh_config.ssh, python=plan.ssh_config.python)
    return JobDirectory(job, name + LAUNCHER)


def _local_job(plan: LaunchPlan, name: str, restart: int, wakeup: Wakeup) -> LocalJob:
    grace = usual_grace(sys.platform == "darwin") if plan.options.grace_period is None else plan.options.grace_period
    stdin, backend, nodes = plan.options.stdin, plan.backend, plan.nodes
    where: dict[str, Any] = {"port": backend.rendezvous_port}
    if nodes is not None:
        where = {"interface": nodes.interface, "port": nodes.port, "secret": nodes.secret}
    job = LocalJob(
        name if nodes is None else nodes.job(name),
        restart,
        plan.size,
        plan.command,
        plan.variables,
        grace,
        first=plan.numbers.start,
        numbered=not plan.by_mpirun,
        stdin=stdin,
        piped=stdin == "all" and plan.ranks > 1,
        emulated_node=plan.emulated_node,
        **where,
    )
    if nodes is not None:
        job.address = nodes.address
        return job
    try:
        if plan.options.elastic is not None:
            job.let_shrink(wakeup.wake)
        if plan.by_mpirun:
            job.address = backend.mpi_address()
        else:
            job.exports = backend.exports([free_ports(count) for count in backend.ports()])
    except BaseException:
        job.__exit__()
        raise
    return job


def _of_plan(plan: LaunchPlan, ending: Ending) -> Ending:
    """The ending with a closing line that names the node or mpirun, where it is about one of them."""
    text = ending.text
    if plan.by_mpirun:
        text = text.replace("rank 0 failed first", "mpirun failed").replace("rank 0", "mpirun")
    elif plan.nodes is not None and text:
        text = f"node {plan.nodes.number}: {text}"
    return replace(ending, text=text)


def _start(
    job: LocalJob | HostsJob, rank: int, output: Output | None, plan: LaunchPlan, joins: bool = False
) -> LocalRank | RemoteRank:
    start: Callable[[int, int, int], LocalRank | RemoteRank] = partial(job.start, joins=joins)
    try:
        if output is None:
            return start(rank, 1, 2)
        if plan.by_mpirun and isinstance(job, LocalJob):
            from .mpirun import pipes_of_rank

            labels = plan.labels()
            allow_descriptors(len(labels))
            for number in range(len(labels) - 1):
                output.add(1 + number, *pipes_of_rank(number, job.directory))
        started, out, err = start_with_pipes(start, rank)
    except OSError as error:
        before = range(plan.numbers.start, rank)
        have = f" ({name_ranks(before)} had started)" if before else ""
        raise CannotRun(f"Cannot start rank {rank}: {error}{have}.", 126) from None
    output.add(rank, out, err)
    return started
