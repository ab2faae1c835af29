"""`mlxdist bench pp`: training and generation with a model in stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from rich.console import Console

from .results import Result, Target, by_case, case_name, print_comparisons
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import multiples_of, names_of

__all__ = ["pp", "targets"]

OPERATIONS = ("training", "generation", "slowed")
ALONE, SCHEDULES = "alone", ("gpipe", "1f1b", "zero_bubble")
IN_FLIGHT, BATCH, MLX_LM = "in flight", "one batch", "mlx-lm"
BY_SPEED, EQUAL = "by speed", "equal"
SPEEDUP, MORE_TOKENS, FASTER_CUT, BUBBLE = 1.5, 1.6, 1.25, 0.1


@benchmark(repeats=9)
@click.option("--operation", "operations", type=names_of(OPERATIONS), default="all", help=f"{', '.join(OPERATIONS)}.")
@click.option("--hidden", type=multiples_of(128), default="256", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(2, 256), default=8, show_default=True, help="Of Qwen2.")
@click.option("--vocabulary", type=multiples_of(64), default="64", show_default=True, help="Tokens that there are.")
@click.option("--tokens", type=click.IntRange(1, 65536), default=64, show_default=True, help="Of a micro-batch.")
@click.option("--micro-batches", type=click.IntRange(1, 1024), default=8, show_default=True, help="Of a step.")
@click.option("--requests", type=click.IntRange(1, 256), default=4, show_default=True, help="At a time.")
def pp(runner: Runner, operations: list[str], hidden: list[int], vocabulary: list[int], **numbers: int) -> Report:
    """Time a model whose layers are spread over ranks, in float32 on the CPU, with one core for each stage.

    "training" is the gradients of a step by each schedule, and by one process ("alone"); the bubble is the share of
    the ranks' time in which they do not compute, and its formula that of equal stages whose F, I and W take as long.
    "generation": requests in as many batches as there are stages ("in flight"), in one batch, and in one batch by
    mlx-lm's own pipeline on the same group ("mlx-lm"). "slowed": a step where every rank but the first computes each
    layer twice, with a plan by speed and with equal stages. Gradients and tokens are compared with those of one
    process.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    used = {"training": ("tokens", "micro_batches"), "generation": ("requests",), "slowed": ("tokens", "micro_batches")}
    cases = [
        {"operation": name, "hidden": size, "layers": numbers["layers"], "vocabulary": words}
        | {option: numbers[option] for option in used[name]}
        for name in operations
        for size in hidden
        for words in vocabulary
    ]
    if runner.ranks > numbers["layers"]:
        raise click.UsageError(f"--layers {numbers['layers']} are too few for {runner.ranks} stages")
    results = runner.run("mlxdist.tools.bench.pipelines:Pipelines", cases, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    found = []
    for row in by_case(results):
        name = case_name(next(iter(row.values()))["case"])
        if ALONE in row:
            found.append(Target.slower(name, row, "1f1b", [ALONE], SPEEDUP))
            for schedule in SCHEDULES:
                wanted = f"{schedule}: bubble off by {BUBBLE:.0%} of its formula at most"
                off = abs(row[schedule]["bubble"] / row[schedule]["formula"] - 1)
                found.append(Target(name, wanted, off, BUBBLE))
        elif IN_FLIGHT in row:
            found.append(Target.slower(name, row, IN_FLIGHT, [MLX_LM], MORE_TOKENS))
        else:
            found.append(Target.slower(name, row, BY_SPEED, [EQUAL], FASTER_CUT))
    return found


def _show(results: dict[str, Any], console: Console) -> None:
    print_comparisons(results, console, f"{results['setup']['ranks']} stages", _bubbles)


def _bubbles(row: dict[str, Result]) -> dict[str, Callable[[dict[str, Result]], str]]:
    return {f"{name}: bubble (formula)": partial(_bubble, name) for name in SCHEDULES if name in row}


def _bubble(name: str, row: dict[str, Result]) -> str:
    return f"{row[name]['bubble']:.1%} ({row[name]['formula']:.1%})"
