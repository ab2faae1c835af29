"""The command line of `mlxdist dump`."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..errors import InvalidArgument, ResourceError, name_ranks
from .analysis import Analysis, RankState, analyse
from .files import Dump, dump_name, marker_of, read_dump, read_folder
from .trace import trace

__all__ = ["dump"]


@click.command()
@click.argument("job", required=False)
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
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write what all ranks did as a trace for chrome://tracing and ui.perfetto.dev.",
)
def dump(job: str | None, folder: Path | None, seconds: float, as_json: bool, trace_file: Path | None) -> None:
    """Say what each rank of a job does, and who is behind whom.

    \\b
        mlxdist dump                 the only job that runs on this machine
        mlxdist dump 741b            the job whose name begins so
        mlxdist dump --files DIR     the files that a job has left: flight-<rank>.json

    Every rank is asked for the record of its last 1000 operations, also while it is in the middle of one; the job goes
    on. The exit status is 1 if the record of a rank is missing.
    """
    if job is not None and folder is not None:
        raise click.UsageError("Name a job or a folder of files, not both.")
    try:
        notes: list[str] = []
        if folder is None:
            folder, notes = _ask(job or "", seconds)
        dumps, problems = read_folder(folder)
    except (InvalidArgument, ResourceError) as error:
        raise click.ClickException("; ".join([*notes, str(error)])) from None
    analysis = analyse(dumps)
    if trace_file is not None:
        _write_trace(trace_file, dumps)
    if as_json:
        click.echo(json.dumps(_as_json(analysis, [*notes, *problems]), indent=2))
    else:
        _print(analysis, [*notes, *problems])
    sys.exit(1 if len(dumps) < len(analysis.states) else 0)


def _ask(name: str, seconds: float) -> tuple[Path, list[str]]:
    """Makes the ranks of a job write their records; returns their folder, and which have not."""
    from ..launch.jobs import find_job, read_record  # a folder of files needs no launcher

    job = find_job(name)
    folder, record = job.flight_folder, read_record(job.folder)
    if folder is None:
        raise InvalidArgument(f"job {job.name} runs with MLXDIST_FLIGHT=none: its ranks write no records")
    if record is None:
        return folder, []  # it has ended, and left its records
    begin = time.time_ns()
    asked = {rank for rank, pid in job.pids.items() if _signal(marker_of(record.temporary / str(rank)), pid)}
    deadline = time.monotonic() + seconds
    late = asked
    while late and time.monotonic() < deadline:
        time.sleep(0.02)
        late = {rank for rank in late if not _is_written(folder / dump_name(rank), begin)}
    notes = []
    if absent := job.pids.keys() - asked:
        notes.append(f"{name_ranks(absent)} cannot be asked: not at mlxdist.init() yet, or past finalize()")
    if late:
        one = len(late) == 1
        notes.append(
            f"{name_ranks(late)} {'has' if one else 'have'} not answered for {seconds:g} s: stopped, or in a call that "
            f"keeps Python to itself{_known_from(folder, late)}"
        )
    return folder, notes


def _signal(marker: Path, launched: int) -> bool:
    """Asks the process named in the marker, which must be what the launcher started or a child of it."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(marker.read_bytes()[:20])
        if pid > 1 and os.getsid(pid) == launched:  # each rank leads a session
            os.kill(pid, signal.SIGUSR1)
            return True
    return False


def _is_written(path: Path, begin: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= begin - 10**9 and read_dump(path).wall_ns >= begin
    except (OSError, InvalidArgument):
        return False


def _known_from(folder: Path, ranks: set[int]) -> str:
    return "; what is shown of it is older" if any((folder / dump_name(rank)).exists() for rank in ranks) else ""


def _print(analysis: Analysis, notes: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    table = Table()
    for column in ("rank", "host", "pid", "doing", "of", "place"):
        table.add_column(column, overflow="fold")
    table.add_column("for", justify="right")
    table.add_column("waits for", justify="right")
    for state in analysis.states:
        table.add_row(*_row(state), style="bold red" if state.is_behind else None)
    console.print(table)
    for text in (*analysis.sentences, *notes):
        console.print(text, markup=False, soft_wrap=True)


def _row(state: RankState) -> list[str]:
    operation, written = state.operation, state.dump
    where = [str(state.rank), written.host if written else "", str(written.pid) if written else "", state.doing]
    if operation is None:
        return [*where, "", "", "", ""]
    waits_for = "" if operation.waits_for is None else f"rank {operation.waits_for}"
    return [*where, operation.array, operation.place, f"{state.seconds:.1f} s", waits_for]


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


def _write_trace(path: Path, dumps: dict[int, Dump]) -> None:
    try:
        path.write_text(json.dumps(trace(dumps)))
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
