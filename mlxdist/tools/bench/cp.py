"""`mlxdist bench cp`: attention over a sequence of which each rank has a shard, in the ways that there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from rich.console import Console

from .results import Target, by_case, case_name, comparison_table
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import multiples_of, names_of

__all__ = ["cp", "targets"]

RING, ULYSSES, GATHERED = "ring", "ulysses", "gathered"
PASSES = ("forward", "training")
NOT_SLOWER, HALF = 1.0, 0.5


@benchmark(repeats=5)
@click.option("--tokens", type=multiples_of(2), default="8192", show_default=True, help="Of the full sequence.")
@click.option("--heads", type=click.IntRange(1, 256), default=4, show_default=True, help="Of queries.")
@click.option("--kv-heads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of keys and values.")
@click.option("--dims", type=click.IntRange(1, 512), default=64, show_default=True, help="Of a head.")
@click.option("--pass", "passes", type=names_of(PASSES), default="all", help="forward or training [default: all].")
def cp(runner: Runner, tokens: list[int], heads: int, kv_heads: int, dims: int, passes: list[str]) -> Report:
    """Time causal attention over a sharded sequence, in float32 on the CPU, and count its memory.

    ring_attention and ulysses_attention; and MLX's attention of this rank's queries to the keys and values of all
    ranks, gathered ("gathered"), with one call for each of the two chunks, which leaves out what causality hides.
    "training" is forward and backward. Each result is compared with that of one process. The peak of memory is what a
    call needs beyond its arguments.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    for count in tokens:
        if count % (2 * runner.ranks):
            raise click.UsageError(
                f"--tokens {count} is not a multiple of {2 * runner.ranks}, two chunks for each rank"
            )
    cases = [
        {"operation": name, "tokens": count, "heads": heads, "kv_heads": kv_heads, "dims": dims}
        for count in tokens
        for name in passes
    ]
    target = "mlxdist.tools.bench.sequence_shards:SequenceShards"
    results = runner.run(target, cases, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    found = []
    for row in by_case(results):
        where = case_name(row[RING]["case"])
        found.append(Target.slower(where, row, RING, [GATHERED], NOT_SLOWER))
        share = row[RING]["peak"] / row[GATHERED]["peak"]
        found.append(Target(f"{where}: peak of memory", f"{HALF:g}x {GATHERED} or less", share, HALF))
    return found


def _show(results: dict[str, Any], console: Console) -> None:
    title = f"causal attention over a sequence on {results['setup']['ranks']} ranks"
    columns: dict[str, Callable[[dict[str, dict[str, Any]]], str]] = {
        f"{name}: MiB at most": partial(_mib, name) for name in (RING, ULYSSES, GATHERED)
    }
    console.print(comparison_table(results, title, console, RING, (ULYSSES, GATHERED), columns))


def _mib(name: str, row: dict[str, dict[str, Any]]) -> str:
    return f"{row[name]['peak'] / (1 << 20):.1f}" if name in row else "-"
