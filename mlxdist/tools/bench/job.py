"""A benchmark in several processes: the command starts the ranks and shows how far they are; rank 0 hands cases back.

The ranks' module calls `serve` with a generator that yields one dictionary per measured case, on every rank. Parameters
go to the ranks as JSON on their command line. Cases come back as marked lines of rank 0's standard output, whatever
else ranks print as their standard error: no file system is shared, and the ranks may be on other hosts.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlxdist.base.child_process import module_command
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.output_file import is_written
from mlxdist.cluster.hostfile.options import HostSelection

__all__ = [
    "QUIET",
    "QUIET_ADVICE",
    "RANKS_OPTION",
    "foreign_load",
    "has_mpirun",
    "number_of_ranks",
    "print_load",
    "results_console",
    "run",
    "serve",
    "write_results",
]

QUIET = 0.05  # share of the CPU that other processes may use before the numbers are no good
QUIET_ADVICE = "repeat this on a quiet machine, or give --force"
SILENCE = 300.0  # seconds without a case after which a benchmark is given up
THIS_MACHINE = HostSelection()
# In front of each case; the launcher puts the rank before it.
_MARK = "mlxdist bench: "
RANKS_OPTION = click.option(
    "-n", "ranks", type=click.IntRange(1), help="Number of ranks; with hosts: on each of them.  [default: 2]"
)


def run(
    program: str | Path,
    parameters: Mapping[str, Any],
    ranks: int,
    steps: int,
    *,
    title: str,
    under_mpirun: bool = False,
    variables: Mapping[str, str] | None = None,
    chosen: HostSelection = THIS_MACHINE,
) -> dict[str, Any]:
    """Runs a program as all ranks; it must call `serve`.

    Args:
        program: a module of mlxdist, such as "mlxdist.tools.bench.collectives_rank", or the path of a script.
        parameters: handed to the ranks, as JSON.
        ranks: of all hosts together; see `number_of_ranks`.
        steps: how many cases will come, for the progress bar.
        under_mpirun: start the ranks with mpirun, without which Open MPI does not work in them.
        variables: set for the ranks, besides this process's own.
        chosen: the hosts to run on.

    Returns:
        {"ranks", "provider", "pinned", "mlx", "mlxdist", "foreign_cpu_share", "limits" (see `serve`), "cases": [...]}

    Raises:
        click.ClickException: a rank failed; its own output has said why.
    """
    start = _launch(ranks, variables or {}, chosen, under_mpirun)
    words = [str(program), json.dumps(dict(parameters))]
    is_script = isinstance(program, Path)
    command = [*start, *([sys.executable, *words] if is_script else module_command(*words, python=chosen.python))]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            found = _follow(process, steps, title)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise click.ClickException(f"a rank failed with status {process.returncode}; its output is above")
    if not found:
        raise click.ClickException("rank 0 ended without a result")
    *cases, summary = found
    return summary | {"cases": cases}


def number_of_ranks(
    chosen: HostSelection, each: int | None, most: int = MAX_RANKS, default: int = 2
) -> tuple[HostSelection, int]:
    """The hosts with their ranks, and how many those are, from what -n says.

    Raises:
        click.UsageError: that is no number of ranks to benchmark.
    """
    chosen = chosen.with_ranks(each)
    ranks = chosen.hostfile.ranks if chosen.hostfile is not None else each or default
    if not 2 <= ranks <= most:
        number = f"{ranks} rank{'s' * (ranks != 1)} in all"
        raise click.UsageError(f"{number}; this needs 2 to {most}, see -n and --hostfile")
    return chosen, ranks


def _follow(process: subprocess.Popen, steps: int, title: str) -> list[dict[str, Any]]:
    """The cases, and what `serve` says behind them. The ranks' other output is handed on to the standard error."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    found = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps)
        while True:
            try:
                line = lines.get(timeout=SILENCE)
            except queue.Empty:
                raise click.ClickException(f"nothing came from the ranks for {SILENCE:.0f} s") from None
            if not line:
                return found
            text, mark, case = line.decode(errors="replace").partition(_MARK)
            if mark:
                try:
                    found.append(json.loads(case))
                except ValueError:
                    raise click.ClickException(f"rank 0 broke off in a result: {case[:80]!r}") from None
                progress.update(task, completed=min(steps, len(found)))
            else:
                console.print(text, end="", markup=False, highlight=False)


def _launch(ranks: int, variables: Mapping[str, str], chosen: HostSelection, under_mpirun: bool) -> list[str]:
    words = module_command("mlxdist", "launch")
    if under_mpirun:
        words += ["--backend", "mpi", "--mpi-arg", "--allow-run-as-root --oversubscribe --bind-to none"]
        # What comes from other hosts would have a tag in the middle of long lines.
        words += ["--no-prefix"] if chosen.hostfile is not None else []
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    if chosen.hostfile is None:
        return [*words, "-n", str(ranks), *settings, "--"]
    # Ranks need no folder, and this one may not be there on other hosts.
    return [*words, *chosen.arguments, "--cwd", "/", *settings, "--"]


def has_mpirun() -> bool:
    return shutil.which("mpirun") is not None


def serve(measure: Callable[..., Iterator[dict[str, Any]]], *, pinned: bool = True, limits: bool = False) -> None:
    """The main function of a rank: connects, calls ``measure(world, parameters)`` and hands back what it yields.

    ``parameters["pinned"]``, if there, wins over ``pinned``: one core per rank, as far as there are cores. With
    ``limits`` those of the machine are measured once, for benchmarks whose cases do not have them.
    """
    from mlxdist.cluster.ssh.streams import claim_streams

    # Whatever prints here or in a child: the standard output is for cases alone.
    _, target = claim_streams()
    import mlx.core as mx

    import mlxdist

    from .limits_rank import measure_limits
    from .timing import ForeignLoad, pin

    parameters = json.loads(sys.argv[1])
    world = mlxdist.init()
    pinned = parameters.get("pinned", pinned) and pin(world.rank())
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(4 << 30)  # MLX's default on the CPU gives large buffers back, and mapping them again dominates
    foreign = ForeignLoad(world)
    with open(target, "w", buffering=1) as results:

        def hand_back(case: dict[str, Any]) -> None:
            if world.rank() == 0:
                results.write(f"{_MARK}{json.dumps(case)}\n")

        for case in measure(world, parameters):
            hand_back(case)
        hand_back(
            {
                "ranks": world.size(),
                "provider": f"{world.provider}: {world.provider_reason}",
                "pinned": pinned,
                "mlx": mx.__version__,
                "mlxdist": mlxdist.__version__,
                "limits": measure_limits(world) if limits else None,
                "foreign_cpu_share": foreign.share(),
            }
        )


def write_results(
    results: dict[str, Any], as_json: bool, output: Path | None, print_table: Callable[[dict[str, Any]], None]
) -> bool:
    """Writes the results as JSON to ``output``, and prints them as JSON or as a table. Whether the file is written."""
    text = json.dumps(results, indent=2)
    # The file first: whoever reads the output, as `head`, may have gone.
    written = output is None or is_written(output, text + "\n")
    if as_json:
        click.echo(text)
    else:
        print_table(results)
    return written


def results_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def foreign_load(results: dict[str, Any]) -> str | None:
    """What disturbed a measurement too much for its numbers, in words; None also where the system does not say."""
    foreign = results["foreign_cpu_share"]
    return f"other processes used {foreign:.0%} of the CPU meanwhile" if foreign and foreign > QUIET else None


def print_load(results: dict[str, Any], console: Console) -> None:
    if load := foreign_load(results):
        console.print(f"{load[0].upper()}{load[1:]}: repeat this on a quiet machine.")
