"""The command line of `mlxdist dump`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from mlxdist.base.errors import ResourceError
from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.base.user_path import UserPath
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.launch.job_name import JOB_NAME
from mlxdist.runtime.diagnostics.flight_records import read_directory
from mlxdist.runtime.observation.stack_groups import group_stacks, odd_ones
from mlxdist.runtime.observation.stragglers import analyze
from mlxdist.tools.observe.collect import Collected, find_ranks
from mlxdist.tools.observe.stack_text import stack_text
from mlxdist.tools.observe.top_table import rank_table
from mlxdist.tools.observe.trace import trace

__all__ = ["dump"]


@click.command()
@click.argument("job", required=False, type=JOB_NAME)
@host_options
@click.option(
    "--files",
    "directory",
    type=UserPath(path_type=Path),
    metavar="DIR",
    help="Read the files in this directory instead of a running job.",
)
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the ranks of a job to respond.",
)
@click.option("--stacks/--no-stacks", default=True, help="The Python stacks of all threads, equal ones of ranks once.")
@click.option("--json", "as_json", is_flag=True, help="Print the analysis as JSON.")
@click.option(
    "--trace",
    "trace_file",
    type=OUTPUT_FILE,
    help="Also write what all ranks did as a trace for chrome://tracing and ui.perfetto.dev.",
)
def dump(
    job: str | None,
    selection: HostSelection,
    directory: Path | None,
    seconds: float,
    stacks: bool,
    as_json: bool,
    trace_file: Path | None,
) -> None:
    """Show what each rank of a job is doing, and which ranks are stragglers.

    \b
        mlxdist dump                      the only job that runs here, or was started here
        mlxdist dump 741b                 the job whose name begins so
        mlxdist dump --hosts node0,node1  the only job that runs on these hosts
        mlxdist dump --files DIR          the files that a job has left: flight-<rank>.json

    Every rank writes the record of its last 1000 operations and the Python stacks of its threads, also while it is in
    an operation; the job continues. A rank in a call that holds the GIL shows its stacks alone, and so does, where
    py-spy is installed, one that is stopped or has not come to mlxdist.init(). A job on several hosts is read on all
    hosts that it was started on, or on those of --hosts or --hostfile. The exit status is 1 if the full record of a
    rank is missing, or the trace could not be written.
    """
    if directory is not None and (job is not None or selection.hostfile is not None):
        raise click.UsageError("Name a job or a directory of files, not both.")
    if directory is None:
        found = _collect(job, selection, seconds)
    else:
        records, problems = read_directory(directory)
        found = Collected(records, notes=problems)
    analysis = analyze(found.records, found.members)
    groups = group_stacks(found.stacks) if stacks else []
    findings = [*analysis.findings, *odd_ones(groups)]
    text = json.dumps(trace(found.records)) if trace_file is not None else ""
    written = trace_file is None or is_written(trace_file, lambda path: path.write_text(text))
    if as_json:
        states = [asdict(state) for state in analysis.states]
        result = {"ranks": states, "findings": findings, "notes": found.notes}
        result |= {"stacks": [asdict(group) for group in groups]} if stacks else {}
        click.echo(json.dumps(result, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
        if analysis.states:
            console.print(rank_table(analysis.states, ["array"]))
        for line in (*findings, *found.notes):
            console.print(line, markup=False, soft_wrap=True)
        if groups:
            console.print(stack_text(groups), soft_wrap=True)
    is_whole = found.records and not found.short and len(found.records) == len(analysis.states)
    sys.exit(0 if is_whole and written else 1)


def _collect(job: str | None, selection: HostSelection, seconds: float) -> Collected:
    with find_ranks(job, selection) as ranks:
        found = ranks.collect(full=True, seconds=seconds)
    if not found.records and not found.stacks:
        raise ResourceError("; ".join(found.notes) or f"no rank of job {ranks.job} has left a record")
    return found
