"""The command line of `mlxdist pull`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import click

from mlxdist.base import tables
from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.options import HostSelection

from .serve import model_options, placement_options

__all__ = ["pull"]


@click.command()
@model_options
@click.option("--to", type=USER_PATH, default="", metavar="DIR", help="Where a folder goes.  [default: the same path]")
@click.option("--only-shards", is_flag=True, help="Hosts that lack it get just what their ranks read in a later job.")
@placement_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pull(
    selection: HostSelection, to: str, only_shards: bool, ranks: int | None, as_json: bool, model: str, **layout: Any
) -> None:
    """Fetch a model once, and bring it to every host that lacks it or some of its files.

    \b
        mlxdist pull mlx-community/Qwen3-8B-4bit                                 this machine
        mlxdist pull mlx-community/Qwen3-8B-4bit --hostfile rmlx-hosts.json
        mlxdist pull ~/models/m --hosts node0,node1,node2 --to /data/models/m
        mlxdist pull ~/models/m --hosts node0,node1 --only-shards --pipeline

    MODEL is the name of a model on the Hugging Face Hub, which goes to the cache that `hf download` uses, or a folder
    on the first host. The first host downloads it; then hosts send it to each other over the links that jobs use, and
    each passes on what it receives. What hosts have already is compared by SHA-256 and kept; type the same command
    once more to go on after an interruption. Disks are checked for room before anything is written.

    With --only-shards a host that lacks some of the model gets just what its ranks read. Give the hosts and the options
    -n and --tp to --plan that `mlxdist serve` is to get. A job that reads other weights is refused.

    Exit status 0 if every host has the model, 1 if one has failed.
    """
    from rich.console import Console

    from mlxdist.tools.models.pull import pull as bring

    given = {"-n": ranks} | {f"--{name.replace('_', '-')}": value for name, value in layout.items()}
    if not only_shards and (useless := [name for name, value in given.items() if value]):
        raise click.UsageError(f"{useless[0]} is for --only-shards")
    if layout["plan"]:
        layout["plan"] = os.path.abspath(layout["plan"])
    pulled = bring(selection.with_ranks(ranks), model, to, Console(stderr=True), layout if only_shards else None)
    if as_json:
        click.echo(json.dumps(asdict(pulled), indent=2))
        return
    width = max(map(len, pulled.received))
    for name, received in pulled.received.items():
        sent = f", {tables.size(received)} of it from other hosts" if received else ""
        state = f"shards of {pulled.shards[name]}" if name in pulled.shards else "complete"
        click.echo(f"{name:{width}}  {state}{sent}")
    click.echo(f"{model}: {pulled.files} files, {tables.size(pulled.size)}")
