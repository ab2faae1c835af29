"""The command line of `mlxdist tiny-model`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mlxdist.base import tables
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.user_path import UserPath

__all__ = ["tiny_model"]


class Setting(click.ParamType):
    """The type of --set: a pair of a name and a value, which is JSON or else a text."""

    name = "setting"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, Any]:
        name, equals, text = value.partition("=")
        if not name or not equals:
            self.fail(f"{value!r} sets nothing; write NAME=VALUE, such as num_hidden_layers=2", parameter, context)
        try:
            return name, parse_json(text)
        except ValueError:
            return name, text


@click.command("tiny-model")
@click.argument("source", metavar="CONFIG")
@click.argument("target", metavar="DIR", type=UserPath(path_type=Path))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Of the random weights.")
@click.option(
    "--set", "fixed", type=Setting(), multiple=True, metavar="NAME=VALUE", help="A field of the configuration."
)
@click.option("--keep-sizes", is_flag=True, help="Change no sizes but those of --set.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tiny_model(
    source: str, target: Path, seed: int, fixed: tuple[tuple[str, Any], ...], keep_sizes: bool, as_json: bool
) -> None:
    """Make a small model with random weights in DIR, with the structure of the model that CONFIG describes.

    \b
        mlxdist tiny-model Qwen/Qwen3-8B tiny-qwen3
        mlxdist tiny-model config.json tiny --seed 1 --set num_hidden_layers=2
        mlxdist tiny-model ~/models/m layer --keep-sizes --set num_hidden_layers=1

    CONFIG is a config.json, a directory that has one, or the name of a model that `mlxdist pull` has fetched. mlx-lm
    loads the model, and 2, 3 and 4 ranks shard it where they shard the original. A tokenizer beside the config.json is
    copied, and the vocabulary then keeps its size. Weights that MLX has quantized are quantized here too; other
    formats become plain weights. Those of a head for multi-token prediction are in mtp.safetensors.
    """
    if len({name for name, _ in fixed}) < len(fixed):
        raise InvalidArgument("--set gives a field twice")
    from mlxdist.tools.models.tiny_model import make_tiny_model

    made = make_tiny_model(source, target, seed, dict(fixed), keep_sizes)
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    for name, (before, after) in made["sizes"].items():
        click.echo(f"{name}: {'not given' if before is None else before} -> {after}")
    click.echo(f"{target}: {made['model_type']}, {made['parameters']} parameters, {tables.size(made['bytes'])}")
