"""`mlxdist bench collectives`: all_sum through MLX, ours and MLX's own backends interleaved in the same processes."""

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
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

RANK_MODULE = "mlxdist.bench.collectives_rank"
OURS = "mlxdist"
QUIET = 0.05  # share of the CPU that other processes may use before the numbers are no good


@click.command()
@click.option("-n", "ranks", type=click.IntRange(2, 8), default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--against",
    default="ring,mpi",
    show_default=True,
    help="MLX backends to compare with, separated by commas; mpi needs mpirun and is left out where there is none.",
)
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Blocks measured per case.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results as JSON here.")
def collectives(ranks: int, against: str, rounds: int, as_json: bool, output: Path | None) -> None:
    """Time all_sum between RANKS processes of this machine, through MLX.

    Every case runs in blocks that alternate between mlxdist and the other backends within the same
    processes, each pinned to a core of its own. The table shows the median of the blocks, their range,
    and how many times longer the other backends take. Results are checked.
    """
    backends = [name for name in dict.fromkeys(against.split(",")) if name]
    for name in backends:
        if name not in ("ring", "mpi"):
            raise click.BadParameter(f"{name!r} is not one of ring, mpi", param_hint="--against")
    if "mpi" in backends and not shutil.which("mpirun"):
        click.echo("mpi is left out: there is no mpirun on the path (Debian: apt install openmpi-bin)", err=True)
        backends.remove("mpi")
    with tempfile.TemporaryDirectory(prefix="mlxdist-bench-") as folder:
        results = _run(ranks, backends, rounds, Path(folder))
    if output:
        output.write_text(json.dumps(results, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        _print(results)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def _run(ranks: int, backends: list[str], rounds: int, folder: Path) -> dict:
    """Starts the ranks and returns what rank 0 wrote."""
    *ring_ports, rendezvous_port = _free_ports(ranks + 1)
    hosts, result = folder / "ring.json", folder / "result.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ring_ports]))
    arguments = [str(hosts), str(result), str(rounds), ",".join([OURS, *backends])]
    rank_command = [sys.executable, "-m", RANK_MODULE, *arguments]
    environment = dict(os.environ)
    if "mpi" in backends:
        # Open MPI works only in processes that mpirun has started; the rank takes its number from there.
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
        # MLX looks for libmpi.so, which distributions keep in their development packages.
        environment.setdefault("MLX_MPI_LIBNAME", ctypes.util.find_library("mpi") or "libmpi.so")
        environment |= {
            "MLXDIST_WORLD_SIZE": str(ranks),
            "MLXDIST_RENDEZVOUS": f"127.0.0.1:{rendezvous_port}",
            "MLXDIST_SECRET": secrets.token_hex(32),
        }
    else:
        command = [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"]
    finished = subprocess.run([*command, *rank_command], env=environment, stdout=sys.stderr)
    if finished.returncode:
        raise click.ClickException(f"a rank failed with status {finished.returncode}; its output is above")
    return json.loads(result.read_text())


def _print(results: dict) -> None:
    others = [name for name in results["backends"] if name != OURS]
    where = f"{results['ranks']} ranks, {results['provider']}"
    table = Table(title=f"{where}; microseconds per operation: median \\[range]")
    table.add_column("case")
    table.add_column(OURS, justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("memcpy", justify="right")
    for name in others:
        table.add_column(name, justify="right")
        table.add_column(f"{name} / {OURS}", justify="right")
    for case in results["cases"]:
        ours = case["microseconds"][OURS]
        row = [case["name"], _spread(ours), f"{case['bytes'] / ours['median'] / 1e3:.2f}", _spread(case["memcpy"])]
        for name in others:
            theirs = case["microseconds"][name]
            row += [_spread(theirs), f"{theirs['median'] / ours['median']:.1f}x"]
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "GB/s: bytes of the array over the median. memcpy: a copy of the same bytes by all ranks at once, same blocks."
    )
    foreign = results["foreign_cpu_share"]
    if foreign is not None and foreign > QUIET:
        console.print(f"Other processes used {foreign:.0%} of the CPU meanwhile: repeat this on a quiet machine.")


def _spread(measured: dict) -> str:
    digits = 1 if measured["median"] < 100 else 0
    median, low, high = (f"{measured[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} \\[{low}..{high}]"  # \\[ keeps rich from taking it for markup
