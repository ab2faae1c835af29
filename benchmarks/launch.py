"""How long it takes to start a job on this machine: tables, targets and JSON.

    python benchmarks/launch.py
    python benchmarks/launch.py --repeats 9 --ranks 16

All cases are run in turn, in shuffled order, so that what else the machine does hits all of them alike: ranks that only
print, under mlxdist launch and under mlx.launch, and ranks that form a group and sum once, and a Python that only
imports MLX. All run from bytecode, as what pip has installed does; the first run writes that of a source directory.
Without a file --output, nothing is written.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import track

from mlxdist.tools.bench.benchmark import repeats_option
from mlxdist.tools.bench.results import Target, print_targets, results_console, table_of

MANY_SECONDS, MORE_SECONDS, AS_FAST = 5.0, 0.25, 1.0
SECONDS = 120  # after which a job does not end any more
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
SUM = "import mlx.core as mx; mx.eval(mx.distributed.all_sum(mx.ones(4), group=mx.distributed.init()))"


@dataclass(frozen=True)
class Case:
    """A command to time. ``says``: how often a word has to be in what it prints."""

    name: str
    command: list[str]
    says: tuple[str, int]

    def run(self) -> float:
        began = time.perf_counter()
        job = subprocess.run(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            text=True,
            timeout=SECONDS,
        )
        seconds = time.perf_counter() - began
        word, times = self.says
        if job.returncode or job.stdout.count(word) != times:
            raise click.ClickException(f"{self.name} failed with exit status {job.returncode}:\n{job.stdout}")
        return seconds


def cases(many: int) -> list[Case]:
    python, scripts = sys.executable, Path(sys.executable).parent
    ours = [str(scripts / "mlxdist"), "launch", "-n"]
    theirs = [str(scripts / "mlx.launch"), "-n"]
    word = "rank-says"
    says = [python, "-c", f"print('{word}')"]
    sums = [python, "-c", f"{SUM}; print('{word}')"]
    return [
        Case("many print", [*ours, str(many), "--", *says], (word, many)),
        Case("two print", [*ours, "2", "--", *says], (word, 2)),
        # It looks for what it starts itself, and has no `--`.
        Case("two print, mlx.launch", [*theirs, "2", *says], (word, 2)),
        Case("two sum", [*ours, "2", "--", *sums], (word, 2)),
        Case("import MLX", [python, "-c", f"import mlx.core; print('{word}')"], (word, 1)),
        Case("python alone", says, (word, 1)),
    ]


@click.command()
@repeats_option(15)
@click.option("--ranks", type=click.IntRange(2, 512), default=64, show_default=True, help='Of "many print".')
@click.option("--output", type=click.Path(path_type=Path), help="Also write all times to this file, as JSON.")
def main(repeats: int, ranks: int, output: Path | None) -> None:
    """Measure how long jobs take to start, and judge the targets. Exit status 1: one was not met."""
    measured = cases(ranks)
    times: dict[str, list[float]] = {case.name: [] for case in measured}
    for number in track(range(repeats + 1), "repeats", transient=True, disable=not sys.stderr.isatty()):
        for case in random.sample(measured, len(measured)):
            seconds = case.run()
            if number:  # the first run of all warms the caches of the disk
                times[case.name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    more = medians["two sum"] - medians["import MLX"]
    ratio = medians["two print"] / medians["two print, mlx.launch"]
    targets = [
        Target(f"{ranks} ranks that print", f"{MANY_SECONDS:g} s or less", medians["many print"], MANY_SECONDS),
        Target("two ranks that print", "not slower than mlx.launch", ratio, AS_FAST),
        Target("two ranks, init and all_sum", f"{MORE_SECONDS} s more than import MLX", more, MORE_SECONDS),
    ]
    console, judged = results_console(), [target.judged() for target in targets]
    rows = [[n, *(f"{value:.3f}" for value in (medians[n], min(v), max(v)))] for n, v in times.items()]
    console.print(table_of("seconds from start to end", ["case", "median", "min", "max"], rows))
    print_targets(judged, console)
    if output is not None:
        output.write_text(json.dumps({"seconds": times, "ranks": ranks, "targets": judged}, indent=2) + "\n")
    sys.exit(0 if all(target["met"] for target in judged) else 1)


if __name__ == "__main__":
    main()
