"""The command line of `mlxdist train`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["train"]


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def train(config: Path) -> None:
    """Train a model of mlx-lm as the TOML file CONFIG says, on one process or on all ranks of a job.

    \b
        mlxdist train finetune.toml
        mlxdist launch -n 4 mlxdist train finetune.toml
    """
    from mlxdist.train.config import TrainConfig
    from mlxdist.train.trainer import train

    train(TrainConfig.read(config))
