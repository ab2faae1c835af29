"""`mlxdist bench`: one file per benchmark. None of them is a test: the numbers depend on the machine."""

from __future__ import annotations

import click

from mlxdist.bench.collectives import collectives


@click.group()
def bench() -> None:
    """Measure collectives on this machine, with data checked and spread shown."""


bench.add_command(collectives)
