"""A `Benchmark`: one description, from which its command, what the ranks run, its tables and its files are made."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import click

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.cluster.hostfile.options import HostSelection, host_options

from .results import Results, Show, Target, failed, print_results, results_console
from .runner import LAYERS, THIS_MACHINE, Runner, require_package, with_ranks
from .workload import BenchmarkWorkload

__all__ = ["Benchmark", "finish", "repeats_option"]

_RANKS = click.option(
    "-n", "-np", "each", type=click.IntRange(1), help="Number of ranks; with hosts: on each of them.  [default: 2]"
)
_OTHERS = (
    click.option("--pin/--no-pin", "pinned", default=True, help="Keep each rank on a core of its own, or not."),
    click.option("--json", "as_json", is_flag=True, help="Print the results as JSON."),
    click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here."),
)


def repeats_option(default: int) -> Callable[[Callable], Callable]:
    words = "Blocks measured per case."
    return click.option("--repeats", type=click.IntRange(3, 1000), default=default, show_default=True, help=words)


@dataclass(frozen=True)
class Benchmark:
    """Makes a command of a function, which gets a `Runner` and its own options and returns the results of its cases.

    Name and help of the command are those of the function.

    Attributes:
        workload: the class that the ranks measure cases with; `Runner.run` starts the ranks.
        show: prints the tables of results, as a `Comparison` does.
        targets: makes the targets that the results should reach; they are printed, and written with the results.
        draw: draws results by matplotlib, into the file of the function's option ``picture``.
        repeats: the default of --repeats; None for a benchmark without it.
        parameters: parameters of all runs; by default those of layers, which compute.
        max_ranks: the most ranks, on all hosts together.
        two_ranks_here: whether it always runs two ranks on this machine, without a choice of ranks and hosts.
    """

    workload: type[BenchmarkWorkload]
    _: KW_ONLY
    show: Show
    targets: Callable[[Results], list[Target]] | None = None
    draw: Callable[[Results, Path], None] | None = None
    repeats: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: LAYERS)
    max_ranks: int = MAX_RANKS
    two_ranks_here: bool = False

    def __call__(self, function: Callable[..., Results]) -> click.Command:
        @functools.wraps(function)
        def command(
            *,
            selection: HostSelection = THIS_MACHINE,
            each: int | None = None,
            repeats: int | None = None,
            pinned: bool,
            as_json: bool,
            output: Path | None,
            picture: Path | None = None,
            **own: Any,
        ) -> None:
            if picture:
                require_package("matplotlib", "bench")
            where = with_ranks(selection, each, self.max_ranks)
            target = f"{self.workload.__module__}:{self.workload.__name__}"
            results = function(Runner(function.__name__, *where, repeats, pinned, target, self.parameters), **own)
            if self.targets:
                results["targets"] = [one.judged() for one in self.targets(results)]
            drawn = {picture: functools.partial(self.draw, results)} if picture and self.draw else {}
            finish(results, self.show, as_json, output, drawn)

        made: Callable = command
        for option in reversed(self._options()):
            made = option(made)
        return click.command(function.__name__)(made)

    def _options(self) -> list[Callable[[Callable], Callable]]:
        of_ranks: list[Callable[[Callable], Callable]] = [] if self.two_ranks_here else [_RANKS, host_options]
        return [*of_ranks, *_OTHERS, *([] if self.repeats is None else [repeats_option(self.repeats)])]


def finish(
    results: Results,
    show: Show,
    as_json: bool,
    output: Path | None,
    files: Mapping[Path, Callable[[Path], object]] | None = None,
) -> None:
    """Writes files, prints JSON or tables, and exits: with status 1 for wrong results and files that are not written.

    Args:
        files: further files besides ``output``, each with the function that writes it.
    """
    text = json.dumps(results, indent=2)
    files = dict(files or {})
    if output is not None:
        files[output] = lambda path: path.write_text(text + "\n")
    # The files first: the reader of the output, as `head`, may have gone.
    written = [is_written(path, write) for path, write in files.items()]
    if as_json:
        click.echo(text)
    else:
        print_results(results, show, results_console())
    sys.exit(1 if failed(results) or not all(written) else 0)
