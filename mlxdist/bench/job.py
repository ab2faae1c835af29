"""A benchmark in several processes: the command starts the ranks and shows how far they are; rank 0 hands cases back.

The ranks' module calls `serve` with a generator that yields one dictionary per measured case, on every rank. Parameters
go to the ranks as JSON on their command line. Cases come back as marked lines of rank 0's standard output, whatever
else ranks print as their standard error: no file system is shared, and the ranks may be on other hosts.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import queue
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..hostfile.options import Chosen

__all__ = [
    "MOST_RANKS",
    "QUIET",
    "RANKS_OPTION",
    "free_ports",
    "has_mpirun",
    "number_of_ranks",
    "print_load",
    "results_console",
    "run",
    "serve",
    "write_results",
]

QUIET = 0.05  # share of the CPU that other processes may use before the numbers are no good
MOST_RANKS = 8  # as many as the data is checked for, see operations.py
SILENCE = 300.0  # seconds without a case after which a benchmark is given up
THIS_MACHINE = Chosen()
# In front of each case; the launcher puts the rank before it.
_MARK = "mlxdist bench: "
_FIND_PORT = "import socket; print(socket.create_server(('', 0)).getsockname()[1])"
RANKS_OPTION = click.option(
    "-n", "ranks", type=click.IntRange(1), help="Number of ranks; with hosts: on each of them.  [default: 2]"
)


def run(
    rank_command: Sequence[str],
    parameters: Mapping[str, Any],
    ranks: int,
    steps: int,
    *,
    title: str,
    under_mpirun: bool = False,
    variables: Mapping[str, str] | None = None,
    chosen: Chosen = THIS_MACHINE,
) -> dict[str, Any]:
    """Runs a command as all ranks; its module must call `serve`.

    Args:
        rank_command: what comes after the Python interpreter: ``["-m", "mlxdist.bench.collectives_rank"]``.
        parameters: handed to the ranks, as JSON.
        ranks: of all hosts together; see `number_of_ranks`.
        steps: how many cases will come, for the progress bar.
        under_mpirun: start the ranks with mpirun, without which Open MPI does not work in them.
        variables: set for the ranks, besides this process's own.
        chosen: the hosts to run on.

    Returns:
        {"ranks", "provider", "pinned", "mlx", "mlxdist", "foreign_cpu_share", "cases": [...]}

    Raises:
        click.ClickException: a rank failed; its own output has said why.
    """
    variables = dict(variables or {})
    environment = dict(os.environ) | variables
    start = _mpirun(ranks, environment, variables, chosen) if under_mpirun else _launch(ranks, variables, chosen)
    command = [*start, chosen.python or sys.executable, *rank_command, json.dumps(dict(parameters))]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
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


def number_of_ranks(chosen: Chosen, each: int | None, most: int, default: int = 2) -> tuple[Chosen, int]:
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


def _launch(ranks: int, variables: Mapping[str, str], chosen: Chosen) -> list[str]:
    words = [sys.executable, "-m", "mlxdist", "launch"]
    if chosen.hostfile is None:
        return [*words, "-n", str(ranks), "--"]
    # Ranks need no folder, and this one may not be there on other hosts.
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return [*words, *chosen.arguments, "--cwd", "/", *settings, "--"]


def _mpirun(
    ranks: int, environment: dict[str, str], variables: Mapping[str, str], chosen: Chosen
) -> list[str]:
    """The command; what the ranks need comes into ``environment``. Each takes its number from Open MPI, in `serve`."""
    # MLX looks for libmpi.so, which distributions keep in their development packages.
    environment.setdefault("MLX_MPI_LIBNAME", ctypes.util.find_library("mpi") or "libmpi.so")
    environment["MLXDIST_WORLD_SIZE"] = str(ranks)
    environment["MLXDIST_SECRET"] = secrets.token_hex(32)
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    if chosen.hostfile is None:
        environment["MLXDIST_RENDEZVOUS"] = f"127.0.0.1:{free_ports(1)[0]}"
        return words
    environment["MLXDIST_RENDEZVOUS"] = _rendezvous(chosen)
    hosts = ",".join(f"{host.name}:{host.slots}" for host in chosen.hosts())
    words += ["--host", hosts, "--mca", "plm_rsh_agent", shlex.join(chosen.ssh), "--wdir", "/"]
    names = {name for name in environment if name.startswith("MLXDIST_")} | {"MLX_MPI_LIBNAME", *variables}
    return [*words, *(word for name in sorted(names) for word in ("-x", name))]  # values do not stand on a command line


def _rendezvous(chosen: Chosen) -> str:
    """Where rank 0 will listen, if nobody takes the port before it does."""
    from ..environment import format_address
    from ..remote.ssh import run as run_on

    first = chosen.hosts()[0]
    if not first.ips:
        raise click.ClickException(f'mpirun needs an address of {first.name} in the hostfile: "ips"')
    answer = run_on(first.name, [chosen.python or sys.executable, "-c", _FIND_PORT], chosen.reach)
    if answer.status or not answer.output.strip().isdecimal():
        raise click.ClickException(f"{first.name}: {answer.last_words or answer.output[:80]!r}")
    return format_address(first.ips[0], int(answer.output))


def has_mpirun() -> bool:
    return shutil.which("mpirun") is not None


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    sockets = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def serve(measure: Callable[..., Iterator[dict[str, Any]]], *, pinned: bool = True) -> None:
    """The main function of a rank: connects, calls ``measure(world, parameters)`` and hands back what it yields.

    ``parameters["pinned"]``, if there, wins over ``pinned``: one core per rank, as far as there are cores.
    """
    from ..remote.streams import claim_streams

    # Whatever prints here or in a child: the standard output is for cases alone.
    _, target = claim_streams()
    # Before MLX and mlxdist read their variables: Open MPI's launcher numbers the ranks itself.
    if "OMPI_COMM_WORLD_RANK" in os.environ and "MLXDIST_RANK" not in os.environ:
        os.environ["MLXDIST_RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    import mlx.core as mx

    import mlxdist

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
                "foreign_cpu_share": foreign.share(),
            }
        )


def write_results(results: dict[str, Any], as_json: bool, output: Path | None) -> bool:
    """Writes the results as JSON to ``output`` and, if asked, to the standard output; False if a table is wanted."""
    text = json.dumps(results, indent=2)
    if output:
        output.write_text(text + "\n")
    if as_json:
        click.echo(text)
    return as_json


def results_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def print_load(results: dict[str, Any], console: Console) -> None:
    foreign = results["foreign_cpu_share"]
    if foreign is not None and foreign > QUIET:
        console.print(f"Other processes used {foreign:.0%} of the CPU meanwhile: repeat this on a quiet machine.")
