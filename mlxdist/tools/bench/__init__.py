"""`mlxdist bench`: one file per benchmark, with its command and what its ranks measure (`benchmark.Benchmark`).

None of them is a test: the numbers depend on the machine. All commands are imported to be listed, so mlx-lm and the
packages of layers are imported where a rank needs them.
"""

from __future__ import annotations

import importlib

import click

__all__ = ["bench"]

BENCHMARKS = (
    "checkpoint",
    "collectives",
    "compare",
    "cp",
    "dp",
    "ep",
    "fsdp",
    "kv",
    "pp",
    "report",
    "serve",
    "suite",
    "tp",
)


class Benchmarks(click.Group):
    """Finds the command of a benchmark in the module of its name."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return getattr(importlib.import_module(f"{__name__}.{name}"), name) if name in BENCHMARKS else None


@click.group(cls=Benchmarks)
def bench() -> None:
    """Measure communication, with data checked and spread shown, and compare what was measured."""
