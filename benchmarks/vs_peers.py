"""mlxdist compared with MLX's ring, Open MPI, gloo and mpi4py on this machine: a table, two curves and JSON.

    python benchmarks/vs_peers.py --gloo ~/gloo --mpi4py ~/mpi4py

The two directories are environments with torch and with mpi4py; without one of them, the program says how to make it.

MLX's ring, Open MPI through MLX, MPI_Alltoall through mpi4py and mlxdist run in the same two processes, each pinned to
a core, in shuffled blocks, and with them the machine's own limits: as many bytes from one core to the other, and copied
by both at once. gloo has two processes of its own on the same cores; its blocks lie between the others', while the
first two processes sleep. Every result is checked.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import targets
from rich.console import Console

from mlxdist.launch.backends import free_ports
from mlxdist.tools.bench.benchmark import finish, repeats_option
from mlxdist.tools.bench.machine import describe_command
from mlxdist.tools.bench.results import Comparison, Results
from mlxdist.tools.bench.runner import Runner, require_package, without_missing_mpi
from mlxdist.tools.bench.sizes import names_of, size_range

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
CURVE_CHAIN_UP_TO = 64 * KIB
# The last torch that this was run with, without CUDA; from the index where torch keeps such wheels.
TORCH = "torch==2.13.0 numpy --extra-index-url https://download.pytorch.org/whl/cpu"
if sys.platform == "linux":
    TORCH = TORCH.replace("2.13.0", "2.13.0+cpu")


@click.command()
@click.option(
    "--baseline", type=names_of(("ring", "mpi")), default="all", help="MLX backends: ring, mpi (needs mpirun)."
)
@click.option("--gloo", type=click.Path(file_okay=False, path_type=Path), help="Environment with torch.")
@click.option("--mpi4py", type=click.Path(file_okay=False, path_type=Path), help="One with mpi4py.")
@repeats_option(15)
@click.option("--quick", is_flag=True, help="3 repeats, sizes up to 256 KiB: to see that it works.")
@click.option("--output", type=click.Path(path_type=Path), default="vs_peers.json", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default="vs_peers.png", show_default=True)
def main(
    baseline: list[str], gloo: Path | None, mpi4py: Path | None, repeats: int, quick: bool, output: Path, plot: Path
) -> None:
    """Measure mlxdist and its peers in turn, on two ranks of this machine."""
    backends = without_missing_mpi(baseline)
    require_package("matplotlib", "bench")
    gloo_python = gloo and _python_of(gloo, TORCH)
    mpi4py_packages = mpi4py and _packages_of(mpi4py, "mpi" in backends)
    results = _measure(
        backends, gloo_python, mpi4py_packages, 3 if quick else repeats, 256 * KIB if quick else 64 * MIB
    )
    results["targets"] = [target.judged() for target in targets.targets(results)]

    def draw(path: Path) -> None:
        from mlxdist.tools.bench.plots import draw_operation  # only now: matplotlib takes a second to load

        curve = [result for result in results["cases"] if result["case"] in _curve(64 * MIB)]
        title = f"all_sum of float32 through MLX, 2 ranks, {results['setup']['provider']}; up to 64 KiB in chains of 50"
        draw_operation(curve, title, path)

    finish(results, _show, False, output, {plot: draw})


def _show(results: Results, console: Console) -> None:
    two = {**results, "cases": [result for result in results["cases"] if "ranks" not in result["case"]]}
    Comparison(lambda results: "2 ranks; all_reduce called from C, without Python")(two, console)
    console.print("gloo, if any, has two processes of its own on the same cores, between the others' blocks.")


def _python_of(directory: Path, packages: str) -> str:
    python = directory / "bin" / "python"
    if not python.exists():
        advice = f"{sys.executable} -m venv {directory} && {directory}/bin/pip install {packages}"
        raise click.ClickException(f"there is no environment in {directory}; make it: {advice}")
    return str(python)


def _packages_of(directory: Path, mpi: bool) -> str:
    """The directory to import mpi4py from, in ranks that run this Python."""
    if not mpi:
        raise click.ClickException("--mpi4py needs Open MPI in the same processes: mpirun, and mpi in --baseline")
    program = "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(*sys.version_info[:2])"
    command = [_python_of(directory, "mpi4py"), "-c", program]
    packages, version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if version != f"{sys.version_info[0]} {sys.version_info[1]}":
        raise click.ClickException(f"{directory} was made with Python {version}, not this one; make it again")
    return packages


def _curve(largest: int) -> list[dict[str, Any]]:
    """The cases of the curves: all_sum of float32, small ones in chains."""
    return [
        {"operation": "all_sum", "dtype": "float32", "bytes": size, "chain": targets.CHAIN if small else 1}
        for size in sorted({*size_range(4 * KIB, largest), 8 * KIB})
        for small in [size <= CURVE_CHAIN_UP_TO]
    ]


def _measure(backends: list[str], gloo: str | None, mpi4py: str | None, repeats: int, largest: int) -> dict[str, Any]:
    setup, begin = describe_command(), time.monotonic()
    runner = Runner("peers", repeats=repeats, target=f"{HERE}/peers_rank.py:Peers")
    cases = _curve(largest)
    cases += [case for case in targets.cases(largest) if case not in cases]
    peers = {"gloo": gloo, "gloo_port": free_ports(1)[0], "mpi4py": mpi4py}
    job = runner.job(cases, backends=backends, **peers)
    results = runner.results([job], cases, setup)
    many = Runner("memory", ranks=targets.SLAB_RANKS, repeats=repeats, target=f"{HERE}/peers_rank.py:Memory")
    results["setup"] |= many.job([{}])["rows"][0][0]
    for ranks in targets.OVERSUBSCRIBED_US:
        small = {"operation": "all_sum", "dtype": "float32", "bytes": 8 * KIB}
        target = "mlxdist.tools.bench.collectives:Collectives"
        crowded = Runner("not pinned", ranks=ranks, repeats=repeats, pinned=False, target=target)
        found = crowded.job([small], api="engine")
        results["cases"] += [result | {"case": small | {"ranks": ranks}} for result in found["rows"][0]]
    results["setup"]["seconds"] = time.monotonic() - begin
    return results


if __name__ == "__main__":
    main()
