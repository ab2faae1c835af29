"""Runs a benchmark: starts the ranks, shows their progress, and collects what rank 0 hands back.

A benchmark is a list of cases, and a `BenchmarkWorkload` that measures one of them. Both go to the ranks as compressed
JSON on their command line. Results come back as marked lines of rank 0's standard output; all other output of ranks
goes to the standard error. The ranks need no common file system.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlxdist.base.child_process import module_command
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import ResourceError
from mlxdist.base.json_reader import parse_json
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.run_job import host_arguments, run_job

from .machine import describe_command, relevant
from .results import SCHEMA

__all__ = [
    "LAYERS",
    "ONE_THREAD",
    "THIS_MACHINE",
    "Runner",
    "has_mpirun",
    "progress_bar",
    "require_package",
    "with_ranks",
    "without_missing_mpi",
]

SILENCE = 300.0  # seconds without output after which a benchmark is ended
THIS_MACHINE = HostSelection()
MARK = "mlxdist bench: "  # in front of each result; the launcher puts the rank before it
# A BLAS with threads of its own would take the other ranks' cores.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")} | {"VECLIB_MAXIMUM_THREADS": "1"}
LAYERS = {"with_limits": True, "variables": ONE_THREAD}  # parameters of `Runner.run`


@dataclass(frozen=True)
class Runner:
    """The user's choices for a benchmark, by the options that all benchmarks share.

    Attributes:
        target: the class that the ranks measure with, "package.module:Class" or "/path/of/script.py:Class".
        parameters: parameters of every `run`, besides those of a call.
    """

    name: str
    selection: HostSelection = THIS_MACHINE
    ranks: int = 2
    repeats: int | None = None
    pinned: bool = True
    target: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def run(self, cases: Sequence[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
        """Measures all cases, and returns the results. Arguments and errors are those of `job`."""
        begin, setup = time.monotonic(), describe_command()
        parameters = {**self.parameters, **parameters}
        jobs = [self.job(cases, **parameters)]
        return self.results(jobs, cases, setup | {"seconds": time.monotonic() - begin} | parameters)

    def job(
        self,
        cases: Sequence[dict[str, Any]],
        *,
        backends: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Measures cases between ranks.

        Args:
            cases: what the ranks measure, one after the other.
            backends: MLX's backends; with "mpi" among them, mpirun starts the ranks, since Open MPI needs it.
            variables: environment variables for the ranks, besides this process's own.
            parameters: parameters for the workload, besides those that all benchmarks have.

        Returns:
            {"rows": a list of results for each case}, with the summary of the run by `mlxdist.tools.bench.rank`.

        Raises:
            click.ClickException: a rank failed, and its output says why; or there was no output for a long time.
        """
        common = {"repeats": self.repeats, "pinned": self.pinned, "backends": list(backends)}
        under_mpirun = "mpi" in backends
        title = f"{self.name}, under mpirun" if under_mpirun else self.name
        job = {"mark": MARK, "cases": list(cases), "parameters": common | parameters}
        # Compressed: Linux takes 128 KiB in one argument, and there may be a thousand cases.
        packed = base64.b64encode(zlib.compress(json.dumps(job).encode())).decode()
        program = module_command("mlxdist.tools.bench.rank", self.target, packed, python=self.selection.python)
        found: list[Any] = []
        has_hosts = self.selection.hostfile is not None
        where = host_arguments(self.selection) if has_hosts else contextlib.nullcontext(["-n", str(self.ranks)])
        with progress_bar() as progress, where as arguments:
            task = progress.add_task(title, total=len(cases))

            def take(line: str) -> None:
                text, mark, result = line.partition(MARK)
                if not mark:
                    progress.console.print(text, end="", markup=False, highlight=False)
                    return
                try:
                    found.append(parse_json(result))
                except ValueError:
                    raise click.ClickException(f"rank 0 broke off in a result: {result[:80]!r}") from None
                progress.update(task, completed=min(len(cases), len(found)))

            # Ranks need no directory, and this one may not exist on other hosts.
            options = _mpi_options(has_hosts) if under_mpirun else []
            directory = "/" if has_hosts else ""
            try:
                ended = run_job(
                    program, arguments, variables=variables, directory=directory, options=options, on_line=take,
                    silence=SILENCE,
                )  # fmt: skip
            except ResourceError as error:
                raise click.ClickException(str(error)) from None
        if ended.status:
            raise click.ClickException(f"a rank failed with status {ended.status}; its output is above")
        if len(found) != len(cases) + 1:
            raise click.ClickException(f"rank 0 ended after {len(found)} of {len(cases) + 1} results")
        *rows, summary = found
        return summary | {"rows": rows}

    def results(
        self, jobs: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]], setup: dict[str, Any]
    ) -> dict[str, Any]:
        """Joins the results of one or several jobs with the same cases, in the order of the cases."""
        loads = [job["foreign_cpu_share"] for job in jobs if job["foreign_cpu_share"] is not None]
        setup = {name: value for name, value in jobs[0].items() if name not in ("rows", "absent")} | setup
        setup |= {"repeats": self.repeats, "hosts": _hosts(self.selection, self.ranks), "cases": list(cases)}
        setup |= {"environment": relevant(os.environ), "foreign_cpu_share": max(loads, default=None)}
        rows = [row for each in zip(*(job["rows"] for job in jobs)) for of_job in each for row in of_job]
        return {
            "benchmark": self.name,
            "schema": SCHEMA,
            "setup": setup,
            "cases": [row for row in rows if "absent" not in row],
            "absent": [entry for job in jobs for entry in job["absent"]] + [row for row in rows if "absent" in row],
            "targets": [],
        }


def _mpi_options(has_hosts: bool) -> list[str]:
    words = ["--backend", "mpi", "--mpi-arg", "--allow-run-as-root --oversubscribe --bind-to none"]
    # What comes from other hosts would have a tag in the middle of long lines.
    return words + ["--no-prefix"] * has_hosts


def progress_bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def has_mpirun() -> bool:
    return shutil.which("mpirun") is not None


def without_missing_mpi(backends: Sequence[str]) -> list[str]:
    """Returns the backends. Leaves "mpi" out, with a message, where there is no mpirun."""
    if "mpi" in backends and not has_mpirun():
        click.echo("mpi is left out: there is no mpirun on the path (Debian: apt install openmpi-bin)", err=True)
        return [name for name in backends if name != "mpi"]
    return list(backends)


def require_package(name: str, extra: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise click.ClickException(f"this needs {name}: pip install 'mlxdist[{extra}]'")


def _hosts(selection: HostSelection, ranks: int) -> list[dict[str, Any]]:
    if selection.hostfile is None:
        return [{"name": "localhost", "slots": ranks, "ips": [], "rdma": []}]
    return [
        {"name": host.name, "slots": host.slots, "ips": list(host.ips), "rdma": [list(row) for row in host.rdma]}
        for host in selection.hosts()
    ]


def with_ranks(selection: HostSelection, each: int | None, most: int = MAX_RANKS) -> tuple[HostSelection, int]:
    """The hosts with their ranks, and the number of ranks, by the option -n.

    Raises:
        click.UsageError: a benchmark cannot run with this number of ranks.
    """
    selection = selection.with_ranks(each)
    ranks = selection.hostfile.ranks if selection.hostfile is not None else each or 2
    if not 2 <= ranks <= most:
        number = f"{ranks} rank{'s' * (ranks != 1)} in all"
        raise click.UsageError(f"{number}; this needs 2 to {most}, see -n and --hostfile")
    return selection, ranks
