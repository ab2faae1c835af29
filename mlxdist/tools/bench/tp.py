"""`mlxdist bench tp`: a decoder layer on two ranks, as a SplitBlock and in the ways it competes with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mlxdist.base.output_file import OUTPUT_FILE

from .collectives import Names
from .job import has_mpirun, print_load, results_console, run, write_results
from .limits import limits_line

__all__ = ["Numbers", "communication", "failed", "layer_cases", "measure_layers", "print_layers", "tp", "withhold"]

RANKS = 2
FAMILIES, PHASES, BACKENDS = ("mixtral", "qwen"), ("decode", "prefill"), ("ring", "mpi")
NAMES = {
    "per-op": "mlx-lm's layer, every operation evaluated by itself",
    "split": "SplitBlock, two submissions per layer",
    "lazy": "SplitBlock, one lazy graph",
    "graph": "SplitBlock as one compiled graph, all_sum inside",
    "mlx": "mlx-lm's sharded layer on mlxdist",
    "ring": "mlx-lm's sharded layer on MLX's ring",
    "ring compiled": "the same, compiled",
    "mpi": "mlx-lm's sharded layer on Open MPI",
    "mpi compiled": "the same, compiled",
    "tp1": "mlx-lm's layer on one rank, the other one asleep",
    "tp1 split": "SplitBlock on one rank, the other one asleep",
}


class Numbers(click.ParamType):
    """Whole numbers separated by commas, each a multiple of 128."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        found = []
        for text in str(value).split(","):
            if not text.isdecimal() or not 128 <= int(text) <= 65536 or int(text) % 128:
                self.fail(f"{text!r} is not a multiple of 128 from 128 to 65536", param, ctx)
            found.append(int(text))
        return list(dict.fromkeys(found))


@click.command()
@click.option("--shape", "families", type=Names(FAMILIES), default="mixtral", show_default=True, help="Or qwen, all.")
@click.option("--hidden", type=Numbers(), default="256,1024", show_default=True, help="Sizes that the shape scales to.")
@click.option("--phase", "phases", type=Names(PHASES), default="decode", show_default=True, help="Or prefill, all.")
@click.option("--tokens", type=click.IntRange(2, 8192), default=32, show_default=True, help="Of a prefill.")
@click.option("--cache", "cached", type=click.IntRange(1, 255), default=128, show_default=True, help="Of a decode.")
@click.option("--against", "backends", type=Names(BACKENDS), default="ring", show_default=True, help="Or mpi, all.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Where layers compute.",
)
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Blocks measured per case.")
@click.option("--pin/--no-pin", "pinned", default=True, help="Keep each rank on a core of its own, or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here.")
def tp(
    families: list[str],
    hidden: list[int],
    phases: list[str],
    tokens: int,
    cached: int,
    backends: list[str],
    device: str,
    rounds: int,
    pinned: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Time one decoder layer on two ranks of this machine, and check what it computes.

    float32 on a CPU, where 16-bit products are several times slower, float16 on a GPU. Every variant is compared with
    the whole layer, and all of them alternate in the same two processes.

    The exit status is 1 if an element was wrong, a time is shorter than reading the weights takes, or the file is not
    written.
    """
    cases = layer_cases(families, hidden, phases, tokens, cached)
    results = measure_layers(cases, [], backends, device, rounds, pinned)
    written = write_results(results, as_json, output, lambda found: print_layers(found, results_console()))
    sys.exit(1 if failed(results) or not written else 0)


def layer_cases(
    families: list[str], hidden: list[int], phases: list[str], tokens: int, cached: int
) -> list[dict[str, Any]]:
    lengths = {"decode": {"tokens": 1, "cached": cached}, "prefill": {"tokens": tokens, "cached": 0}}
    return [
        {"family": family, "hidden": size, "phase": phase} | lengths[phase]
        for family in families
        for size in hidden
        for phase in phases
    ]


def measure_layers(
    cases: list[dict[str, Any]],
    models: list[dict[str, Any]],
    backends: list[str],
    device: str,
    rounds: int,
    pinned: bool = True,
) -> dict[str, Any]:
    """The results of all cases and models; see `tp_rank.measure` for what those are."""
    import mlx.core as mx

    if "mpi" in backends and not has_mpirun():
        click.echo("mpi is left out: there is no mpirun on the path (Debian: apt install openmpi-bin)", err=True)
        backends = [name for name in backends if name != "mpi"]
    if device == "auto":
        device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    dtype = "float16" if device == "gpu" else "float32"
    parameters = {
        "cases": cases,
        "models": models,
        "backends": backends,
        "rounds": rounds,
        "dtype": dtype,
        "device": device,
        "pinned": pinned,
    }
    results = run(
        "mlxdist.tools.bench.tp_rank",
        parameters,
        RANKS,
        len(cases) + len(models),
        title="layers",
        under_mpirun="mpi" in backends,
        # A BLAS with threads of its own would take the other rank's core.
        variables={name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")},
    )
    results |= {"benchmark": "tp", "device": device, "dtype": dtype, "rounds": rounds}
    results["cases"] = [withhold(case) | {"device": device} for case in results["cases"]]
    return results


def withhold(case: dict[str, Any]) -> dict[str, Any]:
    """The case without the numbers that cannot be: nobody shall find them in a file."""
    refused = {name for name, why in case.get("refused", {}).items() if why}
    return case | {"microseconds": {n: None if n in refused else t for n, t in case["microseconds"].items()}}


def failed(results: dict[str, Any]) -> bool:
    """Whether anything was wrong, or too fast to be true."""
    return any(any(case["wrong"].values()) or any(case.get("refused", {}).values()) for case in results["cases"])


def communication(case: dict[str, Any], name: str) -> float | None:
    """The share of a layer's time that its all_sum take, of the rank that came to them last and waited for nobody.

    For "split" and "lazy"; the difference to the same layer without sums (``... compute``) holds the waiting, too.
    """
    times = case["microseconds"][name]
    return case["engine"][name]["median"] / times["median"] if times else None


def print_layers(results: dict[str, Any], console: Console) -> None:
    console.print(limits_line(results["limits"]))
    for case in results["cases"]:
        console.print(_layer_table(case) if case["phase"] != "generate" else _model_table(case))
        if case["phase"] != "generate":
            _print_shares(case, console)
        for why in case.get("refused", {}).values():
            if why:
                console.print(f"Refused: {why}.")
        for name, wrong in case["wrong"].items():
            if wrong:
                console.print(f"WRONG: {name}: {wrong} elements of all ranks together are not what they must be.")
    where = f"{results['ranks']} ranks, {results['provider']}, {results['dtype']} on {results['device']}"
    console.print(f"{where}, MLX {results['mlx']}; a BLAS has one thread.")
    print_load(results, console)


def _layer_table(case: dict[str, Any]) -> Table:
    length = f"{case['cached']} in the cache" if case["phase"] == "decode" else f"{case['tokens']} tokens"
    title = f"{case['family']}, hidden {case['hidden']}, {case['phase']}, {length}; microseconds per layer"
    table = Table(title=f"{title}: median \\[range]")
    for column in ("variant", "what it is"):
        table.add_column(column)
    for column in ("time", "times split", "GB/s of weights", "submissions", "#wrong"):
        table.add_column(column, justify="right")
    ours = case["microseconds"]["split"]
    for name, words in NAMES.items():
        if name not in case["microseconds"]:
            continue
        times = case["microseconds"][name]
        row = [name, words] + (["refused", "", ""] if times is None else [spread(times), "", ""])
        if times and ours:
            read = case["weights"] * (RANKS if name.startswith("tp1") else 1)
            row[3:] = [f"{times['median'] / ours['median']:.2f}", f"{read / times['median'] / 1e3:.1f}"]
        table.add_row(*row, str(case["submitted"][name]), str(case["wrong"][name]))
    return table


def _print_shares(case: dict[str, Any], console: Console) -> None:
    for name in ("split", "lazy", "mlx"):
        times, compute = case["microseconds"][name], case["microseconds"][f"{name} compute"]
        if times and compute:
            inside = case["engine"][name]
            waiting = inside["longest"] - inside["median"]
            console.print(
                f"{name}: compute {spread(compute)} us; in its two all_sum {inside['median']:.1f} us, "
                f"{communication(case, name):.1%} of the layer, and up to {waiting:.1f} us more waiting for the other "
                "rank"
            )


def _model_table(case: dict[str, Any]) -> Table:
    title = f"{case['family']}, hidden {case['hidden']}, {case['layers']} layers: mlx-lm's generate, microseconds"
    table = Table(title=f"{title} per token: median \\[range]")
    for column in ("model", "time", "times split", "#wrong"):
        table.add_column(column, justify="right")
    ours = case["microseconds"]["split"]["median"]
    for name, times in case["microseconds"].items():
        table.add_row(name, spread(times), f"{times['median'] / ours:.2f}", str(case["wrong"][name]))
    return table


def spread(measured: dict[str, float]) -> str:
    digits = 1 if measured["median"] < 100 else 0
    median, low, high = (f"{measured[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} \\[{low}..{high}]"  # \\[ keeps rich from taking it for markup
