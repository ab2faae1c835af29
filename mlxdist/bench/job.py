"""A benchmark in several processes: the command starts the ranks and shows how far they are; rank 0 hands cases back.

The ranks' module calls `serve` with a generator that yields one dictionary per measured case, on every rank. Rank 0
writes each as a line of JSON into a file, and the command reads the file while it grows.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["QUIET", "free_ports", "has_mpirun", "print_load", "results_console", "run", "serve", "write_results"]

QUIET = 0.05  # share of the CPU that other processes may use before the numbers are no good
POLL = 0.05  # seconds between two looks at what rank 0 has written


def run(
    rank_command: Sequence[str],
    parameters: Mapping[str, Any],
    ranks: int,
    steps: int,
    *,
    title: str,
    under_mpirun: bool = False,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a command as all ranks; its module must call `serve`.

    Args:
        rank_command: what comes after the Python interpreter: ``["-m", "mlxdist.bench.collectives_rank"]``.
        parameters: handed to the ranks, as JSON.
        steps: how many cases will come, for the progress bar.
        under_mpirun: start the ranks with mpirun, without which Open MPI does not work in them.
        variables: set for the ranks, besides this process's own.

    Returns:
        {"ranks", "provider", "pinned", "mlx", "mlxdist", "foreign_cpu_share", "cases": [...]}

    Raises:
        click.ClickException: a rank failed; its own output has said why.
    """
    environment = dict(os.environ) | dict(variables or {})
    with tempfile.TemporaryDirectory(prefix="mlxdist-bench-") as folder:
        given, result = Path(folder, "parameters.json"), Path(folder, "cases.jsonl")
        given.write_text(json.dumps(dict(parameters)))
        result.touch()
        launch = _mpirun(ranks, environment) if under_mpirun else _launch(ranks)
        command = [*launch, sys.executable, *rank_command, str(given), str(result)]
        # The ranks' own output is for reading, the results alone are for a pipe.
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr) as process:
            try:
                _follow(process, result, steps, title)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise click.ClickException(f"a rank failed with status {process.returncode}; its output is above")
        *cases, summary = [json.loads(line) for line in result.read_text().splitlines()]
        return summary | {"cases": cases}


def _follow(process: subprocess.Popen, result: Path, steps: int, title: str) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps)
        while process.poll() is None:
            time.sleep(POLL)
            progress.update(task, completed=result.read_bytes().count(b"\n"))


def _launch(ranks: int) -> list[str]:
    return [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"]


def _mpirun(ranks: int, environment: dict[str, str]) -> list[str]:
    """The command; what the ranks need comes into ``environment``. Each takes its number from Open MPI, in `serve`."""
    # MLX looks for libmpi.so, which distributions keep in their development packages.
    environment.setdefault("MLX_MPI_LIBNAME", ctypes.util.find_library("mpi") or "libmpi.so")
    environment["MLXDIST_WORLD_SIZE"] = str(ranks)
    environment["MLXDIST_RENDEZVOUS"] = f"127.0.0.1:{free_ports(1)[0]}"
    environment["MLXDIST_SECRET"] = secrets.token_hex(32)
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def has_mpirun() -> bool:
    return shutil.which("mpirun") is not None


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def serve(measure: Callable[..., Iterator[dict[str, Any]]], *, pinned: bool = True) -> None:
    """The main function of a rank: connects, calls ``measure(world, parameters)`` and writes what it yields.

    ``parameters["pinned"]``, if there, wins over ``pinned``: one core per rank, as far as there are cores.
    """
    # Before MLX and mlxdist read their variables: Open MPI's launcher numbers the ranks itself.
    if "OMPI_COMM_WORLD_RANK" in os.environ and "MLXDIST_RANK" not in os.environ:
        os.environ["MLXDIST_RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    import mlx.core as mx

    import mlxdist

    from .timing import ForeignLoad, pin

    given, result = sys.argv[1:]
    parameters = json.loads(Path(given).read_text())
    world = mlxdist.init()
    pinned = parameters.get("pinned", pinned) and pin(world.rank())
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(4 << 30)  # MLX's default on the CPU gives large buffers back, and mapping them again dominates
    foreign = ForeignLoad(world)
    with open(result, "a", buffering=1) as file:
        for case in measure(world, parameters):
            if world.rank() == 0:
                file.write(json.dumps(case) + "\n")
        share = foreign.share()
        if world.rank() == 0:
            summary = {
                "ranks": world.size(),
                "provider": f"{world.provider}: {world.provider_reason}",
                "pinned": pinned,
                "mlx": mx.__version__,
                "mlxdist": mlxdist.__version__,
                "foreign_cpu_share": share,
            }
            file.write(json.dumps(summary) + "\n")


def write_results(results: dict[str, Any], as_json: bool, output: Path | None) -> bool:
    """Writes the results as JSON to ``output`` and, if asked, to the standard output; False if a table is wanted."""
    text = json.dumps(results, indent=2)
    if output:
        output.write_text(text + "\n")
    if as_json:
        click.echo(text)
    return as_json


def results_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 180)


def print_load(results: dict[str, Any], console: Console) -> None:
    foreign = results["foreign_cpu_share"]
    if foreign is not None and foreign > QUIET:
        console.print(f"Other processes used {foreign:.0%} of the CPU meanwhile: repeat this on a quiet machine.")
