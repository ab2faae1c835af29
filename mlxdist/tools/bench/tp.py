"""`mlxdist bench tp`: a decoder layer on two ranks, as a SplitBlock and in the ways it competes with."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .results import Target, by_case, find, spread, table_of, times_of
from .runner import ONE_THREAD, Report, Runner, benchmark, without_missing_mpi
from .sizes import multiples_of, names_of

__all__ = ["communication", "targets", "tp"]

RANKS = 2
FAMILIES, PHASES, BACKENDS = ("mixtral", "qwen"), ("decode", "prefill", "generate"), ("ring", "mpi")
# On a CPU: for more, the reference BLAS of MLX's wheels takes seconds.
SLOW_PHASES_UP_TO = 1024
# To reach on a CPU with two cores.
FASTER_THAN_RING, COMMUNICATION, NOT_SLOWER, MODEL = 1.3, 0.02, 1.0, 1.5
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
    "tp1": "mlx-lm's layer on one rank, the other asleep",
    "tp1 split": "SplitBlock on one rank, the other asleep",
}


@benchmark(repeats=15, two_ranks_here=True)
@click.option(
    "--shape", "families", type=names_of(FAMILIES), default="mixtral", show_default=True, help="Or qwen, all."
)
@click.option("--hidden", type=multiples_of(128), default="256,1024", show_default=True, help="Sizes of the layer.")
@click.option(
    "--phase", "phases", type=names_of(PHASES), default="decode", show_default=True, help="Or prefill, generate."
)
@click.option("--tokens", type=click.IntRange(2, 8192), default=32, show_default=True, help="Of a prefill.")
@click.option("--cache", "cached", type=click.IntRange(1, 255), default=128, show_default=True, help="Of a decode.")
@click.option("--baseline", "backends", type=names_of(BACKENDS), default="ring", show_default=True, help="Or mpi, all.")
@click.option("--layers", type=click.IntRange(1, 128), default=4, show_default=True, help="Of models that generate.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="Where layers compute.")
@click.option("--targets", "judging", is_flag=True, help="Judge what a CPU with two cores should reach.")
def tp(
    runner: Runner,
    families: list[str],
    hidden: list[int],
    phases: list[str],
    tokens: int,
    cached: int,
    backends: list[str],
    layers: int,
    device: str,
    judging: bool,
) -> Report:
    """Time one decoder layer on two ranks of this machine, and check what it computes.

    float32 on a CPU, where 16-bit products are several times slower, float16 on a GPU. Every variant is compared with
    the full layer, and all of them alternate in the same two processes. "generate" is the decode of a full model with
    mlx-lm's own generate. On a CPU, prefill and generate are for sizes up to 1024.

    The exit status is 1 if an element was wrong, a time is shorter than reading the weights takes, or the file is not
    written.
    """
    import mlx.core as mx

    if device == "auto":
        device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    lengths = {"decode": {"tokens": 1, "cached": cached}, "prefill": {"tokens": tokens, "cached": 0}}
    lengths["generate"] = {"layers": layers, "vocabulary": 8192, "tokens": 24}
    cases = [
        {"family": family, "operation": phase, "hidden": size} | lengths[phase]
        for family in families
        for size in hidden
        for phase in phases
        if phase == "decode" or device == "gpu" or size <= SLOW_PHASES_UP_TO
    ]
    target, backends = "mlxdist.tools.bench.decoder_layer:Layers", without_missing_mpi(backends)
    results = runner.run(target, cases, backends=backends, device=device, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [one.judged() for one in targets(results, families)] if judging else []
    return Report(results, _show)


def targets(results: dict[str, Any], families: list[str]) -> list[Target]:
    # The form that SplitBlock takes by default on the device that was measured.
    ours = "lazy" if results["setup"]["device"] == "cpu" else "split"
    ring = ["ring", "ring compiled"]
    wanted = f"communication {COMMUNICATION:.0%} of the layer or less"
    table = []
    for name in families:
        small, middle, large = (find(results, family=name, operation="decode", hidden=n) for n in (256, 1024, 4096))
        share = communication(middle[ours]) if middle else None
        model = find(results, family=name, operation="generate", hidden=1024)
        table.append(Target.slower(f"{name}, hidden 256, decode", small, ours, ring, FASTER_THAN_RING))
        table.append(Target(f"{name}, hidden 1024, decode", wanted, share, COMMUNICATION))
        table.append(Target.slower(f"{name}, hidden 4096, decode", large, ours, ring, NOT_SLOWER))
        table.append(Target.slower(f"{name}, whole model, generate", model, "split", ["tp1"], MODEL))
    return table


def communication(result: dict[str, Any]) -> float | None:
    """The share of a layer's time that its all_sum take, of the rank that came to them last and did not wait.

    For "split" and "lazy"; the difference to the same layer without sums (``... compute``) holds the waiting, too.
    """
    times = result["microseconds"]
    return result["engine"]["median"] / times["median"] if times else None


def _show(results: dict[str, Any], console: Console) -> None:
    for row in by_case(results):
        console.print(_table(row))
        for name in ("split", "lazy", "mlx"):
            if f"{name} compute" in row and row[name]["microseconds"]:
                inside = row[name]["engine"]
                console.print(
                    f"{name}: compute {spread(row[f'{name} compute']['microseconds'])} us; in its two all_sum "
                    f"{inside['median']:.1f} us, {communication(row[name]):.1%} of the layer, and up to "
                    f"{inside['longest'] - inside['median']:.1f} us more waiting for the other rank",
                    markup=False,
                )


def _table(row: dict[str, dict[str, Any]]) -> Table:
    ours = row["split"]
    case = ours["case"]
    if case["operation"] == "generate":
        title = f"{case['family']}, hidden {case['hidden']}, {case['layers']} layers: mlx-lm's generate, per token"
    else:
        length = f"{case['cached']} in the cache" if case["operation"] == "decode" else f"{case['tokens']} tokens"
        title = f"{case['family']}, hidden {case['hidden']}, {case['operation']}, {length}; per layer"
    rows = []
    for name, words in NAMES.items():
        if name not in row:
            continue
        result, ratio = row[name], times_of(row[name], ours)
        cells = ["", "", ""]
        if ratio is not None:
            cells[0] = f"{ratio:.2f}"
            if "weights" in result:
                read = result["weights"] * (RANKS if name.startswith("tp1") else 1)
                cells[1:] = [f"{read / result['microseconds']['median'] / 1e3:.1f}", str(result["submitted"])]
        rows.append([name, words, spread(result["microseconds"]), *cells, str(result["wrong"])])
    columns = ["variant", "what it is", "time", "times split", "GB/s of weights", "submissions", "#wrong"]
    return table_of(f"{title}; microseconds: median [range]", columns, rows, left=2)
