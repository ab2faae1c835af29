"""The command line of `mlxdist pull`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from mlxdist.base import tables
from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.options import HostSelection, host_options

__all__ = ["pull"]


@click.command()
@host_options
@click.option("--to", type=USER_PATH, default="", metavar="DIR", help="Where a folder goes.  [default: the same path]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("model")
def pull(selection: HostSelection, to: str, as_json: bool, model: str) -> None:
    """Fetch a model once, and bring it to every host that lacks it or some of its files.

    \b
        mlxdist pull mlx-community/Qwen3-8B-4bit                                 this machine
        mlxdist pull mlx-community/Qwen3-8B-4bit --hostfile rmlx-hosts.json
        mlxdist pull ~/models/m --hosts node0,node1,node2 --to /data/models/m

    MODEL is the name of a model on the Hugging Face Hub, which goes to the cache that `hf download` uses, or a folder
    on the first host. The first host downloads it; then hosts send it to each other over the links that jobs use, and
    each passes on what it receives. What hosts have already is compared by SHA-256 and kept; type the same command
    once more to go on after an interruption. Disks are checked for room before anything is written.

    Exit status 0 if every host has the model, 1 if one has failed.
    """
    from rich.console import Console

    from mlxdist.tools.models.pull import pull as bring

    pulled = bring(selection, model, to, Console(stderr=True))
    if as_json:
        click.echo(json.dumps(asdict(pulled), indent=2))
        return
    width = max(map(len, pulled.received))
    for name, received in pulled.received.items():
        sent = f", {tables.size(received)} of it from other hosts" if received else ""
        click.echo(f"{name:{width}}  complete{sent}")
    click.echo(f"{model}: {pulled.files} files, {tables.size(pulled.size)}")
