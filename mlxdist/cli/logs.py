"""The command line of `mlxdist logs`. It must be cheap to import: `mlxdist --help` does."""

import json
import os
import re
import sys
from pathlib import Path

import click

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.user_path import UserPath
from mlxdist.launch.log_files import LogFile, find_logs
from mlxdist.launch.terminal import RANK_COLORS, colors_wanted

__all__ = ["logs"]

_MAX_LAST = 100_000
_LAST = 10  # as of tail


@click.command()
@click.argument("directory", type=UserPath(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--last",
    type=click.IntRange(1, _MAX_LAST),
    metavar="N",
    help=f"Only the last N lines of each file.  [default: {_LAST}; with --grep all]",
)
@click.option("--grep", metavar="PATTERN", help="Only lines in which this regular expression of Python matches.")
@click.option("--rank", "ranks", multiple=True, metavar="R", help="Only of this rank; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON object: rank, stream, text.")
def logs(directory: Path, last: int | None, grep: str | None, ranks: tuple[str, ...], as_json: bool) -> None:
    """Show what the ranks of a job have printed, from the files that `mlxdist launch --log-dir DIR` writes.

    \b
        mlxdist logs runs/monday                            the last 10 lines of each rank's two files
        mlxdist logs runs/monday --grep 'loss (nan|inf)'
        mlxdist logs runs/monday --rank 3 --last 200

    The files have no times, so lines come rank by rank, what it has printed to standard output before what it has
    printed to standard error. Of a progress bar the last update is shown. The exit status is 1 if there is no line.
    """
    found = _selected(find_logs(directory), ranks)
    pattern = None if grep is None else _compiled(grep)
    if last is None and pattern is None:
        last = _LAST
    width = max(len(log.rank) for log in found)
    in_color = sys.stdout.isatty() and colors_wanted(os.environ)
    shown = False
    for log in found:
        color = RANK_COLORS[int(log.rank) % len(RANK_COLORS)] if log.rank.isdecimal() else 0
        prefix = f"[{log.rank:>{width}} {log.stream}] "
        for text in log.lines(last, pattern):
            shown = True
            if as_json:
                click.echo(json.dumps({"rank": log.rank, "stream": log.stream, "text": text}))
            elif in_color:
                marked = text if pattern is None else pattern.sub(_marked, text)
                click.echo(f"\x1b[{color}m{prefix}\x1b[0m{marked}", color=True)
            else:
                click.echo(prefix + text)
    sys.exit(0 if shown else 1)


def _selected(found: list[LogFile], ranks: tuple[str, ...]) -> list[LogFile]:
    there = list(dict.fromkeys(log.rank for log in found))
    if missing := [rank for rank in ranks if rank not in there]:
        raise InvalidArgument(f"--rank {missing[0]}: there are files of ranks {', '.join(there)}")
    return [log for log in found if not ranks or log.rank in ranks]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"--grep {pattern!r} is no regular expression: {error}") from None


def _marked(match: re.Match[str]) -> str:
    return f"\x1b[1;31m{match[0]}\x1b[0m" if match[0] else ""
