"""`mlxdist bench ep`: a layer of experts, expert-parallel in each mode, beside one process and mlx-lm's sharding."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.cluster.hostfile.options import HostSelection, host_options

from .collectives import Names
from .job import RANKS_OPTION, number_of_ranks, print_load, results_console, run, write_results
from .limits import limits_line

ONE_PROCESS, RING, AUTO, COMPILED, INSIDE = "one process", "mlx-lm on ring", "auto", "compiled", "cut inside"
LABELS = {
    RING: "mlx-lm, sharded, on MLX's ring",
    AUTO: "chosen by the policy",
    COMPILED: "replicated, in mx.compile",
    INSIDE: "every expert cut inside",
}
FASTER_THAN_ONE_PROCESS = 1.4  # to reach with 128 tokens
TARGET_TOKENS = 128
MOST_RANKS = 8  # mixtral has as many experts
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True)
class Shape:
    """Of a layer of experts, in the names of mlx-lm's arguments for a model."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    scale: int  # that widths are divided by, if nobody says otherwise: a call of 512 tokens takes less than a second
    norm_topk_prob: bool = True

    def scaled(self, scale: int | None) -> Shape:
        """Widths divided, at least 32."""
        by = scale or self.scale
        return replace(
            self,
            hidden_size=max(32, self.hidden_size // by),
            moe_intermediate_size=max(32, self.moe_intermediate_size // by),
        )


SHAPES = {
    "mixtral": Shape(4096, 14336, 8, 2, scale=16),  # Mixtral 8x7B
    "qwen3.5-moe": Shape(2048, 512, 256, 8, scale=8),  # Qwen3.5-35B-A3B, without its shared expert
}


class Counts(click.ParamType):
    """Numbers from 1, separated by commas."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            counts = sorted({int(text) for text in value.split(",")})
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,16,128", param, ctx)
        if not 1 <= counts[0] <= counts[-1] <= 1 << 16:
            self.fail(f"{value!r}: numbers are from 1 to 65536", param, ctx)
        return counts


@click.command()
@RANKS_OPTION
@host_options
@click.option("--shape", "shapes", type=Names(tuple(SHAPES)), default="all", help="Layers [default: all].")
@click.option("--scale", type=click.IntRange(1, 256), help="Divide widths by this [default: 16, qwen3.5-moe 8].")
@click.option("--tokens", type=Counts(), default="1,2,4,8,16,32,64,128,256,512", show_default=True, help="In a call.")
@click.option("--sharded", is_flag=True, help="Each rank has its part of the tokens, instead of all ranks all of them.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=9, show_default=True, help="Blocks measured per case.")
@click.option("--pin/--no-pin", "pinned", default=True, help="Keep each rank on a core of its own, or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here.")
@click.option("--plot", type=OUTPUT_FILE, help="Draw times over tokens into this PNG.")
def ep(
    chosen: HostSelection,
    ranks: int | None,
    shapes: list[str],
    scale: int | None,
    tokens: list[int],
    sharded: bool,
    rounds: int,
    pinned: bool,
    as_json: bool,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Time a layer of experts, in float32 on the CPU, on this machine or several hosts, and check its results.

    Router, experts and exchange, in blocks that take turns: each mode of ExpertParallelSwitchGLU; the one that a
    calibrated policy chooses ("auto"); all of it in mx.compile, where nothing waits for the host ("compiled"); the
    same layer with every expert cut inside by its tp_group ("cut inside"; both not with --sharded); mlx-lm's own
    sharding, which cuts likewise, on MLX's ring; and the whole layer in one process while the others sleep. One thread
    of BLAS in each.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    chosen, ranks = number_of_ranks(chosen, ranks, MOST_RANKS)
    for package, extra in (("mlx_lm", "lm"), *([("matplotlib", "bench")] if plot else [])):
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(f"this needs {package}: pip install 'mlxdist[{extra}]'")
    parameters = {
        "shapes": shapes,
        "scale": scale,
        "tokens": tokens,
        "sharded": sharded,
        "rounds": rounds,
        "pinned": pinned,
    }
    module, steps = "mlxdist.tools.bench.ep_rank", len(shapes) * len(tokens)
    results = run(module, parameters, ranks, steps, title="ep", variables=ONE_THREAD, chosen=chosen)
    results |= {"benchmark": "ep", "sharded": sharded, "rounds": rounds}
    for case in results["cases"]:
        if case["refused"]:
            case["microseconds"] = None
    results["targets"] = targets(results["cases"])
    written = write_results(results, as_json, output, _print)
    if plot:
        from .ep_plot import draw  # only now: matplotlib takes a second to load

        written = is_written(plot, lambda path: draw(results, path)) and written
    wrong = any(case["refused"] or any(case["wrong"].values()) for case in results["cases"])
    sys.exit(1 if wrong or not written else 0)


def described(case: dict[str, Any]) -> str:
    """The layer of a case: "mixtral: 256x896, top 2 of 8"."""
    return f"{case['shape']}: {case['hidden']}x{case['intermediate']}, top {case['top_k']} of {case['experts']}"


def targets(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is to be reached, and whether it is; of cases that are not refused."""
    found = []
    for case in cases:
        if case["refused"]:
            continue
        times = {name: measured["median"] for name, measured in case["microseconds"].items()}
        where = f"{case['shape']}, {case['tokens']} token{'s' * (case['tokens'] != 1)}"
        found.append(_target(f"{where}: not slower than mlx-lm's sharding", times[RING] / times[AUTO], 1.0))
        if case["tokens"] == TARGET_TOKENS:
            ratio = times[ONE_PROCESS] / times[AUTO]
            found.append(_target(f"{where}: faster than one process", ratio, FASTER_THAN_ONE_PROCESS))
    return found


def _target(what: str, measured: float, wanted: float) -> dict[str, Any]:
    return {"target": what, "times": measured, "wanted": wanted, "met": measured >= wanted}


def target_lines(found: list[dict[str, Any]]) -> list[str]:
    """How many are met, then each: "met: mixtral, 1 token: not slower than mlx-lm's sharding: 1.31, wanted 1.0"."""
    lines = [
        f"{'met' if target['met'] else 'NOT MET'}: {target['target']}: {target['times']:.2f}, "
        f"wanted {target['wanted']:.1f}"
        for target in found
    ]
    return [f"Targets: {sum(target['met'] for target in found)} of {len(found)} met.", *lines]


def _print(results: dict[str, Any]) -> None:
    console = results_console()
    where = "each rank its part of the tokens" if results["sharded"] else "all ranks all tokens"
    console.print(limits_line(results["limits"]))
    title = f"{results['ranks']} ranks, {results['provider']}; {where}; microseconds: median \\[range]"
    table = Table(title=title)
    table.add_column("layer")
    table.add_column("tokens", justify="right")
    names = list(results["cases"][0]["wrong"])
    for name in names:
        table.add_column(name, justify="right")
    for column in ("auto is", "ring/auto", "one/auto", "#wrong"):
        table.add_column(column, justify="right")
    for case in results["cases"]:
        row = [case["shape"], str(case["tokens"])]
        times = case["microseconds"]
        if times is None:
            row += ["refused"] * len(names) + [case["chosen"], "", ""]
        else:
            row += [_spread(times[name]) for name in names] + [case["chosen"]]
            row += [f"{times[name]['median'] / times[AUTO]['median']:.2f}" for name in (RING, ONE_PROCESS)]
        table.add_row(*row, str(sum(case["wrong"].values())))
    console.print(table)
    for shape in dict.fromkeys(described(case) for case in results["cases"]):
        console.print(shape)
    for case in results["cases"]:
        for refused in case["refused"]:
            console.print(f"Refused: {refused}.")
    for line in target_lines(results["targets"]):
        console.print(line)
    print_load(results, console)


def _spread(measured: dict[str, float]) -> str:
    median, low, high = (f"{measured[key]:.0f}" for key in ("median", "min", "max"))
    return f"{median} \\[{low}..{high}]"  # \\[ keeps rich from taking it for markup
