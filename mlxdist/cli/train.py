"""The command line of `mlxdist train`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

from pathlib import Path

import click

from mlxdist.base.user_path import UserPath

__all__ = ["train"]


@click.command()
@click.argument("config", type=UserPath(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Find what is wrong, print what the training needs, and train nothing.")
def train(config: Path, check: bool) -> None:
    """Train a model of mlx-lm as the TOML file CONFIG says, on one process or on all ranks of a job.

    \b
        mlxdist train finetune.toml
        mlxdist launch -n 4 mlxdist train finetune.toml
        mlxdist launch -n 4 mlxdist train --check finetune.toml
    """
    import mlxdist.train

    mlxdist.train.train(mlxdist.train.TrainConfig.read(config), check=check)
