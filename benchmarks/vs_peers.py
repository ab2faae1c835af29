"""mlxdist beside MLX's ring, Open MPI, gloo and mpi4py on this machine: a table, two curves and JSON.

    python benchmarks/vs_peers.py --setup-gloo ~/gloo --setup-mpi4py ~/mpi4py    once, for two of the peers
    python benchmarks/vs_peers.py --gloo ~/gloo --mpi4py ~/mpi4py

MLX's ring, Open MPI through MLX, MPI_Alltoall through mpi4py and mlxdist run in the same two processes, each pinned to
a core, in shuffled blocks, and with them the machine's own limits: as many bytes from one core to the other, and copied
by both at once. gloo has two processes of its own on the same cores; its blocks lie between the others', while the
first two processes sleep. Every result is checked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import click
import targets
from engine import run_engine
from rich.markup import escape
from rich.table import Table

from mlxdist.launch.backends import free_ports
from mlxdist.tools.bench.job import has_mpirun, print_load, results_console, run
from mlxdist.tools.bench.limits import LIMIT_COLUMNS, LIMITS, explain_limits, times_limits
from mlxdist.tools.bench.sizes import format_size, size_range

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
CURVE_CHAIN_UP_TO = 64 * KIB
# The last torch that this was run with, without CUDA; from the index where torch keeps such wheels.
TORCH = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@click.command()
@click.option("--against", default="ring,mpi", show_default=True, help="MLX backends: ring, mpi (needs mpirun).")
@click.option("--gloo", type=click.Path(file_okay=False, path_type=Path), help="Environment made by --setup-gloo.")
@click.option("--mpi4py", type=click.Path(file_okay=False, path_type=Path), help="Made by --setup-mpi4py.")
@click.option("--setup-gloo", type=click.Path(path_type=Path), help="Make an environment with torch here, and exit.")
@click.option("--setup-mpi4py", type=click.Path(path_type=Path), help="Make one with mpi4py here, and exit.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Blocks measured per case.")
@click.option("--quick", is_flag=True, help="3 rounds, sizes up to 256 KiB: to see that it works.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default="vs_peers.json", show_default=True)
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), default="vs_peers.png", show_default=True)
def main(
    against: str,
    gloo: Path | None,
    mpi4py: Path | None,
    setup_gloo: Path | None,
    setup_mpi4py: Path | None,
    rounds: int,
    quick: bool,
    json_file: Path,
    plot_file: Path,
) -> None:
    """Measure mlxdist and its peers in turn, on two ranks of this machine."""
    if setup_gloo or setup_mpi4py:
        if setup_gloo:
            _setup(setup_gloo, [TORCH, "numpy", "--extra-index-url", TORCH_INDEX])
        if setup_mpi4py:
            _setup(setup_mpi4py, ["mpi4py"])
        return
    backends = _backends(against)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("the curves need matplotlib: pip install 'mlxdist[bench]'")
    gloo_python = gloo and _python_of(gloo, "--setup-gloo")
    mpi4py_packages = mpi4py and _packages_of(mpi4py, "mpi" in backends)
    if quick:
        rounds = 3
    results = _measure(backends, gloo_python, mpi4py_packages, rounds, 256 * KIB if quick else 64 * MIB)
    table = targets.targets(results)
    results["targets"] = [vars(target) | {"met": target.met} for target in table]
    json_file.write_text(json.dumps(results, indent=2) + "\n")
    from plot import draw  # only now: matplotlib takes a second to load

    title = f"all_sum of float32 through MLX, 2 ranks, {results['provider']}; up to 64 KiB in lazy chains of 50"
    draw([case for case in results["cases"] if case["curve"]], title, plot_file)
    _print(results, table)
    click.echo(f"Written: {json_file}, {plot_file}")
    ours = [case["wrong"]["mlxdist"] for case in results["cases"]] + [line["wrong"] for line in results["engine"]]
    ours += [case["wrong"] for case in results["oversubscribed"]]
    sys.exit(1 if any(ours) else 0)


def _setup(folder: Path, packages: list[str]) -> None:
    venv.create(folder, with_pip=True)
    if subprocess.run([folder / "bin" / "python", "-m", "pip", "install", *packages]).returncode:
        raise click.ClickException(f"pip could not install {packages[0]} into {folder}; its output is above")


def _backends(against: str) -> list[str]:
    backends = [name for name in dict.fromkeys(against.split(",")) if name]
    for name in backends:
        if name not in ("ring", "mpi"):
            raise click.BadParameter(f"{name!r} is not one of ring, mpi", param_hint="--against")
    if "mpi" in backends and not has_mpirun():
        click.echo("mpi is left out: there is no mpirun on the path (Debian: apt install openmpi-bin)", err=True)
        backends.remove("mpi")
    return backends


def _python_of(folder: Path, option: str) -> str:
    python = folder / "bin" / "python"
    if not python.exists():
        raise click.ClickException(f"there is no environment in {folder}; make it with {option} {folder}")
    return str(python)


def _packages_of(folder: Path, mpi: bool) -> str:
    """The folder to import mpi4py from, in ranks that run this Python."""
    if not mpi:
        raise click.ClickException("--mpi4py needs Open MPI in the same processes: mpirun, and mpi in --against")
    program = "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(*sys.version_info[:2])"
    command = [_python_of(folder, "--setup-mpi4py"), "-c", program]
    packages, version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if version != f"{sys.version_info[0]} {sys.version_info[1]}":
        raise click.ClickException(f"{folder} was made with Python {version}, not this one; make it again")
    return packages


def _measure(backends: list[str], gloo: str | None, mpi4py: str | None, rounds: int, largest: int) -> dict[str, Any]:
    cases = []
    for size in sorted({*size_range(4 * KIB, largest), 8 * KIB}):
        chain = targets.CHAIN if size <= CURVE_CHAIN_UP_TO else 1
        cases.append({"operation": "all_sum", "dtype": "float32", "bytes": size, "chain": chain, "curve": True})
    known = [{key: case[key] for key in case if key != "curve"} for case in cases]
    cases += [case | {"curve": False} for case in targets.cases(largest) if case not in known]
    parameters = {
        "cases": cases,
        "backends": backends,
        "rounds": rounds,
        "gloo": gloo,
        "gloo_port": free_ports(1)[0],
        "mpi4py": mpi4py,
    }
    results = run(HERE / "peers_rank.py", parameters, 2, len(cases), title="peers", under_mpirun="mpi" in backends)
    memory = run(HERE / "memory_rank.py", {}, targets.SLAB_RANKS, 1, title="memory")
    small = {"operations": ["all_sum"], "dtypes": ["float32"], "sizes": [8 * KIB], "level": "engine", "rounds": rounds}
    module = "mlxdist.tools.bench.collectives_rank"
    unpinned = [
        {"ranks": ranks} | run(module, small | {"pinned": False}, ranks, 1, title="not pinned")["cases"][0]
        for ranks in targets.OVERSUBSCRIBED_US
    ]
    return results | {
        "benchmark": "vs_peers",
        "rounds": rounds,
        "engine": run_engine(rounds),
        "slab_bytes": memory["cases"][0]["slab_bytes"],
        "oversubscribed": unpinned,
    }


def _print(results: dict[str, Any], table: list[targets.Target]) -> None:
    console = results_console()
    console.print(_cases_table(results))
    for line in explain_limits(results["cases"]):
        console.print(line)
    if any("gloo" in case["microseconds"] for case in results["cases"]):
        console.print("gloo: without MLX, in two processes of its own on the same cores, between the others' blocks.")
    engine = Table(title="C programs, without Python and MLX; microseconds: median \\[range]")
    for column in ("all_reduce", "mlxdist", *LIMIT_COLUMNS, "#wrong"):
        engine.add_column(column, justify="right")
    for line in results["engine"]:
        ours = line["all_reduce"]
        engine.add_row(format_size(line["bytes"]), _spread(ours), *_limits(ours, line), str(line["wrong"]))
    console.print(engine)
    reached = Table(title="targets")
    for column in ("case", "wanted", "measured", ""):
        reached.add_column(column)
    for target in table:
        word = {None: "not measured", True: "met", False: "NOT MET"}[target.met]
        reached.add_row(target.case, target.wanted, escape(target.shown()), word)
    console.print(reached)
    print_load(results, console)


def _cases_table(results: dict[str, Any]) -> Table:
    peers = [name for name in ("ring", "mpi", "gloo", "mpi4py") if any(name in c["wrong"] for c in results["cases"])]
    table = Table(title=f"2 ranks, {results['provider']}; microseconds per operation: median \\[range]")
    table.add_column("case")
    for column in ("mlxdist", *LIMIT_COLUMNS):
        table.add_column(column, justify="right")
    for name in peers:
        table.add_column(f"{name}: times ours", justify="right")
    table.add_column("#wrong", justify="right")
    for case in results["cases"]:
        ours = case["microseconds"]["mlxdist"]
        chain = f", chain of {case['chain']}" if case["chain"] > 1 else ""
        row = [f"{case['operation']} {format_size(case['bytes'])} {case['dtype']}{chain}"]
        row += [_spread(ours), *_limits(ours, case)]
        for name in peers:
            theirs = case["microseconds"].get(name)
            row.append(f"{theirs['median'] / ours['median']:.1f}x  {_spread(theirs)}" if theirs else "")
        table.add_row(*row, str(sum(case["wrong"].values())))
    return table


def _limits(ours: dict[str, float], case: dict[str, Any]) -> list[str]:
    times = times_limits(ours["median"], case)
    return [f"{times[f'times_{name}']:.2f}x  {_spread(case[name])}" if case.get(name) else "" for name in LIMITS]


def _spread(measured: dict[str, float]) -> str:
    digits = 2 if measured["median"] < 10 else 1 if measured["median"] < 100 else 0
    median, low, high = (f"{measured[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} \\[{low}..{high}]"  # \\[ keeps rich from taking it for markup


if __name__ == "__main__":
    main()
