"""The command line of `mlxdist record`. It must be cheap to import: `mlxdist --help` does."""

import json
import sys
from pathlib import Path

import click

from mlxdist.base.user_path import UserPath

__all__ = ["record"]


@click.group()
def record() -> None:
    """Compare what `mlxdist launch --record DIR` has written of hosts and jobs."""


@record.command()
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.argument("paths", nargs=-1, required=True, type=UserPath(exists=True, path_type=Path), metavar="PATH...")
def diff(paths: tuple[Path, ...], as_json: bool) -> None:
    """Show what differs between records: PATH is a file, or a directory with those of all hosts of a job.

    \b
        mlxdist record diff runs/monday
        mlxdist record diff runs/monday/studio0.json runs/tuesday/studio0.json
        mlxdist record diff runs/monday runs/tuesday

    Versions, packages, hardware, variables, the command and the state of the git checkout are compared. The exit status
    is 1 if something differs.
    """
    from mlxdist.tools.record.difference import differences, read_records, table

    found = differences(read_records(paths))
    if as_json:
        click.echo(json.dumps([{"what": one.what, "values": one.values} for one in found], indent=2))
    else:
        click.echo(table(found) if found else "The records do not differ.")
    sys.exit(1 if found else 0)
