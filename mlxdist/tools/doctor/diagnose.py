"""All of `mlxdist doctor` except its command line: probes the hosts, runs a job where they pass, runs the checks."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mlxdist.base.environment import OF_JOB
from mlxdist.cluster.hostfile.hosts import Hostfile
from mlxdist.cluster.hostfile.options import HostSelection

from .checks import run_checks
from .cluster import CheckOptions, Cluster, Job
from .findings import Result, Verdict
from .job import try_job
from .probe import OnProgress, probe
from .report import print_problems
from .soak import LEVEL_SECONDS, soak

__all__ = ["diagnose", "failed_hosts", "make_options", "preflight", "without_hosts"]


def make_options(
    selection: HostSelection,
    command: Sequence[str],
    *,
    directory: str,
    script: str | None = None,
    model: str | None = None,
    variables: Mapping[str, str] | None = None,
    quick: bool = False,
    full: bool = False,
    advertised: float = 0.0,
    level: int = 1,
    seconds: float | None = None,
) -> CheckOptions:
    """The options of the checks. Script and model are taken from the command if they are not given."""
    hostfile = selection.hostfile
    envs = dict(setting.split("=", 1) for setting in hostfile.envs) if hostfile else {}
    ours = {name: v for name, v in os.environ.items() if name.startswith("MLXDIST_") and name not in OF_JOB}
    return CheckOptions(
        command=tuple(command),
        script=script or next((word for word in command[:3] if word.endswith(".py")), ""),
        model=model or _value_of("--model", command),
        guessed=not model,
        directory=directory,
        variables=envs | ours | dict(variables or {}),
        backend=hostfile.backend if hostfile else "",
        quick=quick,
        full=full,
        advertised=advertised,
        level=level,
        seconds=LEVEL_SECONDS[level] if seconds is None else seconds,
    )


def diagnose(
    selection: HostSelection, options: CheckOptions, on_progress: OnProgress | None = None
) -> tuple[Cluster, list[Result]]:
    """Probes all hosts, runs a job on those that pass, and returns the results of all checks.

    ``on_progress``: called with host and step; None shows the progress on the terminal.
    """
    hosts = selection.hosts()
    names = [host.name for host in hosts]
    with contextlib.nullcontext(on_progress) if on_progress else _progress(names) as show:
        cluster = probe(hosts, selection.ssh_config, options, show)
        results = run_checks(cluster, after_job=False)
        failed = failed_hosts(names, results)
        passed = [name for name in names if name not in failed]
        if not passed:
            cluster.job = Job(skipped="no host has passed the checks before")
        else:
            for name in passed:
                show(name, "values and links")
            # Without hosts that have failed: with them the job would fail, too, and test nothing on the others.
            cluster.job = try_job(selection, passed, options)
        if options.level > 1:
            soak(selection, passed, cluster, show)
        return cluster, results + run_checks(cluster, after_job=True)


def preflight(
    selection: HostSelection, command: Sequence[str], *, directory: str = "", variables: Mapping[str, str] | None = None
) -> int:
    """Runs the quick checks before a job. Prints the problems and a summary. Returns 0 if the job may be started.

    Args:
        directory: where the ranks will run; the current one if empty.
        variables: variables for all ranks in addition to the hostfile's and this shell's, by --env.
    """
    options = make_options(selection, command, directory=directory or os.getcwd(), variables=variables, quick=True)
    cluster, results = diagnose(selection, options)
    print_problems(cluster, results, sys.stderr)
    return int(any(result.verdict is Verdict.FAIL for result in results))


def failed_hosts(names: Sequence[str], results: Sequence[Result]) -> list[str]:
    """The hosts that fail by themselves, and the fewest hosts that resolve the pairs that do not reach each other.

    The host in most of these pairs is removed first; among equals, the last one in the hostfile,
    because rank 0 is on the first.
    """
    failures = [f for result in results for f in result.findings if f.verdict is Verdict.FAIL]
    alone = {name for failure in failures if not failure.is_way for name in failure.hosts}
    pairs = {frozenset(failure.hosts) for failure in failures if failure.is_way}
    remaining = [pair for pair in pairs if not pair & alone]
    while remaining:
        counts = Counter(name for pair in remaining for name in pair)
        worst = max(counts, key=lambda name: (counts[name], names.index(name)))
        alone.add(worst)
        remaining = [pair for pair in remaining if worst not in pair]
    return [name for name in names if name in alone]


def without_hosts(found: Hostfile, failed: Sequence[str]) -> Hostfile:
    """The remaining hosts, as JSON if the hosts come from the command line and have no format of their own."""
    remaining = found.only([host.name for host in found.hosts if host.name not in failed])
    has_format = found.format in ("json", "slots", "colon") and found.source != "--hosts"
    return remaining if has_format else replace(remaining, format="json")


@contextlib.contextmanager
def _progress(names: Sequence[str]) -> Iterator[OnProgress]:
    """Shows a line for each host, on a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.fields[host]}"), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task("waiting", total=None, host=name) for name in names}
        yield lambda name, step: bars.update(tasks[name], description=step or "done")


def _value_of(option: str, command: Sequence[str]) -> str:
    for word, after in zip(command, [*command[1:], ""]):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
