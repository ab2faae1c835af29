"""A tensor-parallel decoder layer of mlxdist beside MLX's own, on two ranks of this machine: tables, targets and JSON.

    python benchmarks/layers_vs_mlx.py
    python benchmarks/layers_vs_mlx.py --hidden 256,1024 --shape all

All variants run in the same two processes, each pinned to a core, in shuffled blocks, and every result is compared with
the whole layer; see `mlxdist bench tp`, which measures one shape. Here come in addition Open MPI, where there is an
mpirun, prefill for all but the largest size on a CPU, and the decode of a whole model with mlx-lm's own generate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from targets import Target

from mlxdist.tools.bench.collectives import Names
from mlxdist.tools.bench.job import has_mpirun, results_console
from mlxdist.tools.bench.tp import FAMILIES, Numbers, communication, failed, layer_cases, measure_layers, print_layers

PREFILL_UP_TO = 1024  # on a CPU: above, the reference BLAS of MLX's wheels takes seconds
FASTER_THAN_RING, COMMUNICATION, NOT_SLOWER, MODEL = 1.3, 0.02, 1.0, 1.5


@click.command()
@click.option("--shape", "families", type=Names(FAMILIES), default="all", show_default=True, help="mixtral, qwen.")
@click.option("--hidden", type=Numbers(), default="256,1024,4096", show_default=True, help="Sizes of the layers.")
@click.option("--tokens", type=click.IntRange(2, 8192), default=32, show_default=True, help="Of a prefill.")
@click.option("--model-hidden", type=Numbers(), default="1024", show_default=True, help="Of the whole models.")
@click.option("--model-layers", type=click.IntRange(1, 128), default=4, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True)
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Blocks measured per case.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default="layers_vs_mlx.json", show_default=True)
def main(
    families: list[str],
    hidden: list[int],
    tokens: int,
    model_hidden: list[int],
    model_layers: int,
    device: str,
    rounds: int,
    json_file: Path,
) -> None:
    """Measure the layers and models, and judge the targets."""
    cases = layer_cases(families, hidden, ["decode"], tokens, 128)
    short = [size for size in hidden if device == "gpu" or size <= PREFILL_UP_TO]
    cases += layer_cases(families, short, ["prefill"], tokens, 128)
    models = [
        {"family": family, "hidden": size, "layers": model_layers, "vocabulary": 8192, "tokens": 24}
        for family in families
        for size in model_hidden
    ]
    results = measure_layers(cases, models, ["ring", "mpi"] if has_mpirun() else ["ring"], device, rounds)
    table = targets(results)
    results["targets"] = [vars(target) | {"met": target.met} for target in table]
    json_file.write_text(json.dumps(results, indent=2) + "\n")
    console = results_console()
    print_layers(results, console)
    reached = Table(title="targets")
    for column in ("case", "wanted", "measured", ""):
        reached.add_column(column)
    for target in table:
        measured = "" if target.measured is None else f"{target.measured:.3g}"
        word = {None: "not measured", True: "met", False: "NOT MET"}[target.met]
        reached.add_row(target.case, target.wanted, measured, word)
    console.print(reached)
    click.echo(f"Written: {json_file}")
    sys.exit(1 if failed(results) else 0)


def targets(results: dict[str, Any]) -> list[Target]:
    """What is wanted of a CPU with two cores, from the results of `measure_layers`, for each shape."""
    table = []
    for family in FAMILIES:
        cases = {c["hidden"]: c for c in results["cases"] if c["family"] == family and c["phase"] == "decode"}
        models = [c for c in results["cases"] if c["family"] == family and c["phase"] == "generate"]
        table += [_ratio(f"{family}, hidden 256, decode", cases.get(256), "ring", FASTER_THAN_RING)]
        share, right = None, True
        if 1024 in cases:
            share, right = communication(cases[1024], ours(cases[1024])), not any(cases[1024]["wrong"].values())
        wanted = f"communication {COMMUNICATION:.0%} of the layer or less"
        table.append(Target(f"{family}, hidden 1024, decode", wanted, share, COMMUNICATION, right=right))
        table.append(_ratio(f"{family}, hidden 4096, decode", cases.get(4096), "ring", NOT_SLOWER))
        table.append(_ratio(f"{family}, whole model, generate", models[0] if models else None, "tp1", MODEL))
    return table


def ours(case: dict[str, Any]) -> str:
    """The form that SplitBlock takes by default on the device that was measured."""
    return "lazy" if case.get("device", "cpu") == "cpu" else "split"


def _ratio(name: str, case: dict[str, Any] | None, other: str, bound: float) -> Target:
    """How many times longer the other takes; of MLX's layer the faster of its two forms."""
    wanted = f"{other} takes {bound:g}x or more"
    if case is None:
        return Target(name, wanted, None, bound, at_least=True)
    times = case["microseconds"]
    mine = times.get(ours(case)) if case["phase"] != "generate" else times["split"]
    theirs = [times[key]["median"] for key in (other, f"{other} compiled") if times.get(key)]
    measured = min(theirs) / mine["median"] if mine and theirs else None
    return Target(name, wanted, measured, bound, at_least=True, right=not any(case["wrong"].values()))


if __name__ == "__main__":
    main()
