"""`mlxdist bench fsdp`: a step of fully sharded training, by train.fully_shard and by MLX's nn.fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from rich.console import Console

from .results import Result, Target, by_case, case_name, comparison_table
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import format_size, multiples_of

__all__ = ["fsdp", "targets"]

OURS, MLX, RING = "mlxdist", "mlx", "ring"
FASTER_THAN_MLX, FASTER_THAN_RING = 1.15, 1.5


@benchmark(repeats=9)
@click.option("--hidden", type=multiples_of(128), default="512", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(1, 256), default=6, show_default=True, help="Of Qwen3.")
@click.option("--vocabulary", type=multiples_of(64), default="2048", show_default=True, help="Tokens that there are.")
@click.option("--tokens", type=click.IntRange(1, 65536), default=32, show_default=True, help="Of a rank's batch.")
def fsdp(runner: Runner, hidden: list[int], layers: int, vocabulary: list[int], tokens: int) -> Report:
    """Time a step of fully sharded training (ZeRO-3), in float32 on the CPU, with AdamW, and count its memory.

    train.fully_shard ("mlxdist"); MLX's nn.fully_shard on mlxdist ("mlx"), around each decoder layer, the embeddings
    and the head; and the same on MLX's ring ("ring"). The ring has no sum_scatter, so there it is an all_sum of which
    each rank keeps its part. The gradients of each are compared with those of one process. The peak of memory is what
    the gradients need beyond parameters and optimizer; they themselves are in it.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if any(size % runner.ranks for size in (*hidden, *vocabulary)):
        needed = f"--hidden and --vocabulary to be multiples of {runner.ranks}"
        raise click.UsageError(f"MLX's nn.fully_shard needs {needed}, the number of ranks")
    cases = [
        {"operation": "step", "hidden": size, "layers": layers, "vocabulary": words, "tokens": tokens}
        for size in hidden
        for words in vocabulary
    ]
    target = "mlxdist.tools.bench.sharded_training:ShardedTraining"
    results = runner.run(target, cases, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    return [
        Target.slower(case_name(row[OURS]["case"]), row, OURS, [other], factor)
        for row in by_case(results)
        for other, factor in ((MLX, FASTER_THAN_MLX), (RING, FASTER_THAN_RING))
    ]


def _show(results: dict[str, Any], console: Console) -> None:
    size = by_case(results)[0][OURS]["parameter_bytes"]
    title = f"a step on {results['setup']['ranks']} ranks, {format_size(size)} of parameters"
    columns: dict[str, Callable[[dict[str, Result]], str]] = {
        f"{name}: MiB at most": partial(_mib, name) for name in (OURS, MLX, RING)
    }
    console.print(comparison_table(results, title, console, OURS, (MLX, RING), columns))


def _mib(name: str, row: dict[str, Result]) -> str:
    return f"{row[name]['peak'] / (1 << 20):.1f}" if name in row else "-"
