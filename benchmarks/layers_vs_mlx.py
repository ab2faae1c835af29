"""A tensor-parallel decoder layer of mlxdist compared with MLX's own, on two ranks of this machine.

    python benchmarks/layers_vs_mlx.py
    python benchmarks/layers_vs_mlx.py --hidden 256,1024 --shape all

All variants run in the same two processes, each pinned to a core, in shuffled blocks, and every result is compared with
the full layer; see `mlxdist bench tp`, which measures one shape. Here come in addition Open MPI, where there is an
mpirun, prefill for all but the largest size on a CPU, the decode of a whole model with mlx-lm's own generate, and a
table of targets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlxdist.tools.bench.results import Target, by_case
from mlxdist.tools.bench.runner import Report, Runner, finish, repeats_option
from mlxdist.tools.bench.sizes import Names, Numbers
from mlxdist.tools.bench.tp import BACKENDS, DEVICE, FAMILIES, communication, layer_cases, measure_layers, show_layers

PREFILL_UP_TO = 1024  # on a CPU: above, the reference BLAS of MLX's wheels takes seconds
FASTER_THAN_RING, COMMUNICATION, NOT_SLOWER, MODEL = 1.3, 0.02, 1.0, 1.5


@click.command()
@click.option("--shape", "families", type=Names(FAMILIES), default="all", show_default=True, help="mixtral, qwen.")
@click.option("--hidden", type=Numbers(128), default="256,1024,4096", show_default=True, help="Sizes of the layers.")
@click.option("--tokens", type=click.IntRange(2, 8192), default=32, show_default=True, help="Of a prefill.")
@click.option("--model-hidden", type=Numbers(128), default="1024", show_default=True, help="Of the whole models.")
@click.option("--model-layers", type=click.IntRange(1, 128), default=4, show_default=True)
@DEVICE
@repeats_option(15)
@click.option("--output", type=click.Path(path_type=Path), default="layers_vs_mlx.json", show_default=True)
def main(
    families: list[str],
    hidden: list[int],
    tokens: int,
    model_hidden: list[int],
    model_layers: int,
    device: str,
    repeats: int,
    output: Path,
) -> None:
    """Measure the layers and models, and judge the targets."""
    cases = layer_cases(families, hidden, ["decode"], tokens, 128)
    short = [size for size in hidden if device == "gpu" or size <= PREFILL_UP_TO]
    cases += layer_cases(families, short, ["prefill"], tokens, 128)
    model = {"layers": model_layers, "vocabulary": 8192, "tokens": 24}
    cases += [
        {"family": family, "operation": "generate", "hidden": size} | model
        for family in families
        for size in model_hidden
    ]
    results = measure_layers(Runner("layers", repeats=repeats), cases, list(BACKENDS), device)
    results["targets"] = [target.judged() for target in targets(results)]
    finish(Report(results, show_layers), False, output)


def targets(results: dict[str, Any]) -> list[Target]:
    """What is wanted of a CPU with two cores, from the results of `measure_layers`, for each shape."""
    # The form that SplitBlock takes by default on the device that was measured.
    ours = "lazy" if results["setup"]["device"] == "cpu" else "split"
    table = []
    for family in FAMILIES:
        rows = {}
        for row in by_case(results):
            case = next(iter(row.values()))["case"]
            if case["family"] == family:
                rows.setdefault((case["operation"], case["hidden"]), row)
        model = next((row for (operation, _), row in rows.items() if operation == "generate"), {})
        small, middle, large = (rows.get(("decode", hidden), {}) for hidden in (256, 1024, 4096))
        share = communication(middle[ours]) if middle else None
        wanted = f"communication {COMMUNICATION:.0%} of the layer or less"
        table.append(_ratio(f"{family}, hidden 256, decode", small, ours, "ring", FASTER_THAN_RING))
        table.append(Target(f"{family}, hidden 1024, decode", wanted, share, COMMUNICATION))
        table.append(_ratio(f"{family}, hidden 4096, decode", large, ours, "ring", NOT_SLOWER))
        table.append(_ratio(f"{family}, whole model, generate", model, "split", "tp1", MODEL))
    return table


def _ratio(name: str, row: dict[str, dict[str, Any]], ours: str, other: str, bound: float) -> Target:
    """How many times as long the other takes; of MLX's layer the faster of its two forms."""
    times = {name: result["microseconds"]["median"] for name, result in row.items() if result["microseconds"]}
    theirs = [times[form] for form in (other, f"{other} compiled") if form in times]
    measured = min(theirs) / times[ours] if ours in times and theirs else None
    return Target(name, f"{other} takes {bound:g}x or more", measured, bound, at_least=True)


if __name__ == "__main__":
    main()
