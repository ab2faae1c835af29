"""`mlxdist bench ep`: a layer of experts, expert-parallel in each mode, in one process, and by mlx-lm's sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlxdist.base.output_file import OUTPUT_FILE

from .results import Target, by_case, case_name, comparison_table
from .runner import ONE_THREAD, Report, Runner, benchmark, require_package
from .shapes import AUTO, COMPILED, INSIDE, ONE_PROCESS, RING, SHAPES
from .sizes import multiples_of, names_of

LABELS = {
    RING: "mlx-lm, sharded, on MLX's ring",
    AUTO: "chosen by the policy",
    COMPILED: "replicated, in mx.compile",
    INSIDE: "every expert sharded inside",
}
STYLES: dict[str, dict[str, Any]] = {
    ONE_PROCESS: {"linestyle": "--", "color": "grey"},
    AUTO: {"linewidth": 3, "alpha": 0.4},
}
FASTER_THAN_ONE_PROCESS = 1.4  # to reach with 128 tokens
TARGET_TOKENS = 128
MAX_RANKS = 8  # mixtral has as many experts


@benchmark(repeats=9, max_ranks=MAX_RANKS)
@click.option("--shape", "shapes", type=names_of(tuple(SHAPES)), default="all", help="Layers [default: all].")
@click.option("--scale", type=click.IntRange(1, 256), help="Divide widths by this [default: 16, qwen3.5-moe 8].")
@click.option(
    "--tokens", type=multiples_of(1), default="1,2,4,8,16,32,64,128,256,512", show_default=True, help="In a call."
)
@click.option("--sharded", is_flag=True, help="Each rank has its part of the tokens, instead of all ranks all of them.")
@click.option("--plot", type=OUTPUT_FILE, help="Draw times over tokens into this PNG.")
def ep(
    runner: Runner, shapes: list[str], scale: int | None, tokens: list[int], sharded: bool, plot: Path | None
) -> Report:
    """Time a layer of experts, in float32 on the CPU, on this machine or several hosts, and check its results.

    Router, experts and exchange, in alternating blocks: each mode of ExpertParallelSwitchGLU; the one that a
    calibrated policy chooses ("auto"); all of it in mx.compile, where nothing waits for the host ("compiled"); the
    same layer with every expert sharded by its tp_group ("sharded inside"; both not with --sharded); mlx-lm's own
    sharding, which shards likewise, on MLX's ring; and the full layer in one process while the others sleep. One thread
    of BLAS in each.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    require_package("mlx_lm", "lm")
    if plot:
        require_package("matplotlib", "bench")
    cases = [{"operation": shape, "tokens": count} for shape in shapes for count in tokens]
    target = "mlxdist.tools.bench.expert_layer:Experts"
    results = runner.run(target, cases, scale=scale, sharded=sharded, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [target.judged() for target in targets(results)]

    def draw(path: Path) -> None:
        from .plots import draw_tokens  # only now: matplotlib takes a second to load

        draw_tokens(results, LABELS, STYLES, path)

    return Report(results, _show, {plot: draw} if plot else {})


def targets(results: dict[str, Any]) -> list[Target]:
    found = []
    for row in by_case(results):
        case = row[AUTO]["case"]
        where = case_name(case)
        wanted = {f"{where}: mlx-lm's sharding": (RING, 1.0)}
        if case["tokens"] == TARGET_TOKENS:
            wanted[f"{where}: one process"] = ONE_PROCESS, FASTER_THAN_ONE_PROCESS
        found += [Target.slower(name, row, AUTO, [other], bound) for name, (other, bound) in wanted.items()]
    return found


def _show(results: dict[str, Any], console: Console) -> None:
    where = "each rank its part of the tokens" if results["setup"]["sharded"] else "all ranks all tokens"
    title = f"{results['setup']['ranks']} ranks, {where}"
    columns = {"auto is": lambda row: row[AUTO]["mode"]}
    console.print(comparison_table(results, title, console, AUTO, (RING, ONE_PROCESS), columns))
