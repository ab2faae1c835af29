"""The command line of `mlxdist dump`."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.job_name import JOB_NAME
from mlxdist.runtime.flight_records import read_folder
from mlxdist.tools.observe.analysis import Analysis, RankState, analyse
from mlxdist.tools.observe.ask import Answers, find_ranks
from mlxdist.tools.observe.trace import trace

__all__ = ["dump"]


@click.command()
@click.argument("job", required=False, type=JOB_NAME)
@host_options
@click.option(
    "--files",
    "folder",
    type=click.Path(path_type=Path),
    help="Read the files that are in this folder, instead of asking a job for them.",
)
@click.option(
    "--wait",
    "seconds",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the ranks of a job to answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the analysis as JSON.")
@click.option(
    "--trace",
    "trace_file",
    type=OUTPUT_FILE,
    help="Also write what all ranks did as a trace for chrome://tracing and ui.perfetto.dev.",
)
def dump(
    job: str | None, chosen: HostSelection, folder: Path | None, seconds: float, as_json: bool, trace_file: Path | None
) -> None:
    """Say what each rank of a job does, and who is behind whom.

    \b
        mlxdist dump                      the only job that runs here, or was started here
        mlxdist dump 741b                 the job whose name begins so
        mlxdist dump --hosts node0,node1  the only job that runs on these hosts
        mlxdist dump --files DIR          the files that a job has left: flight-<rank>.json

    Every rank is asked for the record of its last 1000 operations, also while it is in the middle of one; the job goes
    on. Where a job on several hosts was started, all of its hosts are asked; so are those of --hosts or --hostfile. The
    exit status is 1 if the record of a rank is missing, or the trace could not be written.
    """
    if folder is not None and (job is not None or chosen.hostfile is not None):
        raise click.UsageError("Name a job or a folder of files, not both.")
    try:
        found = Answers(*read_folder(folder)) if folder is not None else _ask(job, chosen, seconds)
    except (InvalidArgument, ResourceError) as error:
        raise click.ClickException(str(error)) from None
    analysis = analyse(found.dumps)
    text = json.dumps(trace(found.dumps)) if trace_file is not None else ""
    written = trace_file is None or is_written(trace_file, text)
    if as_json:
        click.echo(json.dumps(_as_json(analysis, found.notes), indent=2))
    else:
        _print(analysis, found.notes)
    sys.exit(1 if len(found.dumps) < len(analysis.states) or not written else 0)


def _ask(job: str | None, chosen: HostSelection, seconds: float) -> Answers:
    with find_ranks(job, chosen) as ranks:
        found = ranks.ask("dump", seconds)
    if not found.dumps:
        raise InvalidArgument("; ".join(found.notes) or f"no rank of job {ranks.job} has left a record")
    return found


def _print(analysis: Analysis, notes: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    table = Table()
    steps = [state.dump.progress if state.dump else "" for state in analysis.states]
    columns = ("rank", "host", "pid", *(["step"] if any(steps) else []), "doing", "of", "place")
    for column in columns:
        table.add_column(column, overflow="fold")
    table.add_column("for", justify="right")
    table.add_column("waits for", justify="right")
    for state, step in zip(analysis.states, steps):
        where, does = _row(state)
        row = [*where, *([step] if any(steps) else []), *does]
        table.add_row(*map(Text, row), style="bold red" if state.is_behind else None)
    console.print(table)
    for text in (*analysis.sentences, *notes):
        console.print(text, markup=False, soft_wrap=True)


def _row(state: RankState) -> tuple[list[str], list[str]]:
    """Who the rank is, and what it does."""
    operation, written = state.operation, state.dump
    where = [str(state.rank), written.host if written else "", str(written.pid) if written else ""]
    if operation is None:
        return where, [state.doing, "", "", "", ""]
    waits_for = "" if operation.waits_for is None else f"rank {operation.waits_for}"
    return where, [state.doing, operation.array, operation.place, f"{state.seconds:.1f} s", waits_for]


def _as_json(analysis: Analysis, notes: list[str]) -> dict[str, Any]:
    return {
        "ranks": [_rank_as_json(state) for state in analysis.states],
        "sentences": analysis.sentences,
        "notes": notes,
    }


def _rank_as_json(state: RankState) -> dict[str, Any]:
    operation, written = state.operation, state.dump
    return {
        "rank": state.rank,
        "host": written.host if written else None,
        "pid": written.pid if written else None,
        "error": written.error if written else None,
        "step": written.step if written else None,
        "steps": written.steps if written else None,
        "doing": state.doing,
        "in_operation": bool(operation and operation.is_open),
        "is_behind": state.is_behind,
        "seconds": state.seconds,
        "group": operation.group if operation else None,
        "sequence": operation.sequence if operation else None,
        "place": operation.place if operation else None,
        "waits_for": operation.waits_for if operation else None,
        "threads": written.threads if written else {},
    }
