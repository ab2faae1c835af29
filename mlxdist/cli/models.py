"""The command line of `mlxdist models`. It must be cheap to import: `mlxdist --help` does."""

import json
import os
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.base import tables
from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.options import HostSelection, host_options

__all__ = ["models"]


@click.command()
@host_options
@click.option("--json", "as_json", is_flag=True, help="Print the models as JSON.")
@click.argument("directories", nargs=-1, metavar="[DIR]...")
def models(selection: HostSelection, as_json: bool, directories: tuple[str, ...]) -> None:
    """List the models on this machine, or on each host: type, size, whether all files are there, and where.

    \b
        mlxdist models
        mlxdist models --hostfile rmlx-hosts.json
        mlxdist models --hosts node0,node1 ~/models

    Models are those in the cache of the Hugging Face Hub, and those in DIR: a folder of a model, or a folder of such.
    Of weights only the headers are read: a file that was cut off is found, and one with wrong bytes is not; `mlxdist
    pull` compares all bytes. `mlxdist pull MODEL` brings a model to hosts that lack it.

    The exit status is 1 if a host does not respond.
    """
    from mlxdist.tools.models.inventory import list_here, list_on

    wanted = [path if path.startswith("~") else os.path.abspath(path) for path in directories]
    problems: list[str] = []
    if selection.hostfile is None:
        if missing := [path for path in wanted if not os.path.isdir(os.path.expanduser(path))]:
            raise InvalidArgument(f"there is no directory {missing[0]}")
        rows = list_here(wanted)
    else:
        rows, problems = list_on(selection, wanted)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = ["model", *(["host"] if selection.hostfile is not None else []), "type", "size", "state", "path"]
        for name in columns:
            table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
        for row in sorted(rows, key=lambda row: row["model"]):
            cells = row | {"size": tables.size(row["bytes"])}
            table.add_row(*(_state(row) if name == "state" else Text(cells[name]) for name in columns))
        Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    else:
        click.echo(
            "There are no models here." if selection.hostfile is None else "There are no models there.", err=True
        )
    for problem in problems:
        click.echo(problem, err=True)
    sys.exit(1 if problems else 0)


def _state(row: dict[str, Any]) -> Text:
    if row["shards"]:
        return Text(f"shards of {row['shards']}", "yellow")
    return Text(f"incomplete: {row['missing']}", "red") if row["missing"] else Text("complete", "green")
