"""`mlxdist bench kv`: prompt caches from one rank to another."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from .results import Target, by_case, case_name, print_comparisons
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import multiples_of, names_of

__all__ = ["kv", "targets"]

OPERATIONS = ("transfer", "first token")
KV, MESSAGES = "kv", "messages"
SPLIT, ALONE = "split", "alone"
SPEED, LATER = 0.9, 1.05


@benchmark(repeats=9)
@click.option("--operation", "operations", type=names_of(OPERATIONS), default="all", help=f"{', '.join(OPERATIONS)}.")
@click.option("--hidden", type=multiples_of(128), default="512", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Of Qwen2.")
@click.option("--tokens", type=multiples_of(1), default="512", show_default=True, help="Of the prompt.")
def kv(runner: Runner, operations: list[str], hidden: list[int], layers: int, tokens: list[int]) -> Report:
    """Time prompt caches that go from rank 0 to rank 1, in float32 on the CPU.

    "transfer": a cache that is computed, by kv.send and kv.recv ("kv"), and as many bytes by send and recv
    ("messages"). "first token": rank 0 computes a prompt and rank 1 the token after it ("split"), and one process both
    ("alone"). Caches and tokens are compared with those of one process.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if runner.ranks != 2:
        raise click.UsageError(f"a cache goes from one rank to another: -n 2, not {runner.ranks}")
    cases = [
        {"operation": name, "hidden": size, "layers": layers, "tokens": count}
        for name in operations
        for size in hidden
        for count in tokens
    ]
    results = runner.run(
        "mlxdist.tools.bench.prompt_caches:PromptCaches", cases, with_limits=True, variables=ONE_THREAD
    )
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    found = []
    for row in by_case(results):
        name = case_name(next(iter(row.values()))["case"])
        if KV in row:
            found.append(Target.slower(name, row, KV, [MESSAGES], SPEED))
        else:
            alone = row[ALONE]["microseconds"]
            wanted = f"{SPLIT} takes {LATER:g}x of {ALONE} at most"
            found.append(Target.of(name, wanted, row[SPLIT]["microseconds"], alone and alone["median"], LATER))
    return found


def _show(results: dict[str, Any], console: Console) -> None:
    print_comparisons(results, console, "2 ranks")
