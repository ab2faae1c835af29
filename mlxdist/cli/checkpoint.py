"""The command line of `mlxdist checkpoint`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.base.user_path import UserPath

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mlxdist.train.checkpoint.manifest import Manifest


__all__ = ["checkpoint"]

DIRECTORY = UserPath(exists=True, file_okay=False, path_type=Path)
STEP = click.option("--step", type=click.IntRange(min=0), help="Of this step.  [default: all; to convert: the last]")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group()
def checkpoint() -> None:
    """Show, verify and convert what train.Checkpoints has saved.

    Hosts that have disks of their own do so together: mlxdist launch --hosts node0,node1 mlxdist checkpoint verify DIR
    """


@checkpoint.command()
@click.argument("directory", type=DIRECTORY)
@STEP
@JSON
def show(directory: Path, step: int | None, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY; with --step, the arrays and values of one.

    \b
        mlxdist checkpoint show checkpoints
        mlxdist checkpoint show checkpoints --step 100

    Only the sizes of files are compared. The exit status is 2 if there is no checkpoint.
    """
    rows = _rows(directory, step, read_all=False)
    manifest = next((row["manifest"] for row in rows if row["manifest"] is not None), None)
    if step is None or manifest is None:
        _print(rows, as_json)
        return
    arrays = {
        path: {"dtype": array.dtype, "shape": array.shape, "parts": len(array.parts)}
        for path, array in manifest.arrays.items()
    }
    if as_json:
        _echo(json.dumps(_as_json(rows[0]) | {"arrays": arrays, "values": manifest.values}, indent=2))
        return
    table = _table("array", "dtype", "shape", "parts")
    for path, array in arrays.items():
        table.add_row(path, array["dtype"], " x ".join(map(str, array["shape"])), str(array["parts"]))
    for path, value in manifest.values.items():
        table.add_row(path, "value", json.dumps(value), "")
    _show_table(table)


@checkpoint.command()
@click.argument("directory", type=DIRECTORY)
@STEP
@JSON
def verify(directory: Path, step: int | None, as_json: bool) -> None:
    """Read all files of the checkpoints in DIRECTORY, and compare their CRC-32 with the manifest's.

    The exit status is 1 if one is not as it was written, and 2 if there is none. A save that was not completed does
    not count: `load` and the next save ignore it.
    """
    rows = _rows(directory, step, read_all=True)
    _print(rows, as_json)
    sys.exit(1 if any(row["damaged"] for row in rows) else 0)


@checkpoint.command()
@click.argument("source", type=DIRECTORY)
@click.argument("target", type=UserPath(path_type=Path))
@click.option("--like", metavar="MODEL", help="The model folder with the config and tokenizer of what is in SOURCE.")
@click.option("--name", default="model", show_default=True, help="Path of the model in the tree that is saved.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Of the floating-point weights in TARGET.  [default: as in SOURCE]",
)
@STEP
@JSON
def convert(
    source: Path, target: Path, like: str | None, name: str, dtype: str | None, step: int | None, as_json: bool
) -> None:
    """Make the model folder TARGET of mlx-lm from a checkpoint, or a checkpoint of step 0 from a model folder.

    \b
        mlxdist checkpoint convert checkpoints my-model --like Qwen/Qwen3-0.6B
        mlxdist checkpoint convert checkpoints my-model --like Qwen/Qwen3-0.6B --dtype bfloat16
        mlxdist checkpoint convert my-model checkpoints

    SOURCE is a model folder if it has a config.json; it must fit into memory then. A checkpoint is read one array at a
    time, its model alone, and what is written is compared. Files without weights, such as the tokenizer, are copied
    from MODEL. A program takes a checkpoint of step 0 with load(..., other_run=True).
    """
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.train.model_folder import require_no_folder

    require_no_folder(target)
    if (source / "config.json").is_file():
        if like is not None or step is not None:
            raise InvalidArgument(f"{source} is a model folder, for which --like and --step have no meaning")
        result = _to_checkpoint(source, target, name, dtype)
    elif like is None:
        raise InvalidArgument(
            f"{source} has no config.json; give --like MODEL, the folder of the model that was trained"
        )
    else:
        result = _to_model(source, target, like, name, step, dtype)
    _echo(json.dumps(result) if as_json else f"{target}: step {result['step']}, {result['parameters']} parameters")


def _rows(directory: Path, step: int | None, read_all: bool) -> list[dict[str, Any]]:
    """Returns a row per checkpoint: its step, manifest and problem, and whether it is damaged, not just incomplete."""
    import mlxdist
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.train.checkpoint.complete import Problems, complete

    problems, rows = Problems(), {}
    manifests: dict[int, Manifest] = {}
    for reader in complete("checkpoint", directory, mlxdist.init(), problems):
        found = reader.manifest.step
        manifests[found] = reader.manifest
        if read_all and step in (None, found) and (problem := reader.verify()):
            problems.add(found, problem)
    for found in sorted({*manifests, *problems}):
        if step in (None, found):
            problem, damaged = problems.get(found), found in problems.damaged
            rows[found] = {"step": found, "manifest": manifests.get(found), "problem": problem, "damaged": damaged}
    if not rows:
        raise InvalidArgument(f"{directory} has no checkpoint" + ("" if step is None else f" of step {step}"))
    return list(rows.values())


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    manifest = row["manifest"]
    return {
        "step": row["step"],
        "problem": row["problem"],
        "damaged": row["damaged"],
        "saved": manifest and manifest.saved,
        "run": manifest and manifest.run,
        "ranks": manifest and manifest.ranks,
        "mesh": manifest and manifest.mesh,
        "versions": manifest and manifest.versions,
        "files": manifest and len(manifest.files),
        "bytes": manifest and manifest.nbytes,
    }


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _echo(json.dumps([_as_json(row) for row in rows], indent=2))
        return
    table = _table("step", "saved", "ranks", "mesh", "MB", "run", "state")
    for row in rows:
        cells, manifest = [""] * 5, row["manifest"]
        if manifest is not None:
            mesh = " x ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
            cells = [manifest.saved, str(manifest.ranks), mesh, f"{manifest.nbytes / 1e6:.1f}", manifest.run]
        table.add_row(str(row["step"]), *cells, Text(row["problem"] or "complete"))
    _show_table(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in ("step", "ranks", "MB", "parts") else "left", overflow="fold")
    return table


def _show_table(table: Table) -> None:
    if _is_first_rank():
        Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def _echo(text: str) -> None:
    if _is_first_rank():
        click.echo(text)


def _is_first_rank() -> bool:
    import mlxdist

    return mlxdist.init().rank() == 0


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], object]]:
    from mlxdist.base.byte_progress import byte_progress

    with byte_progress(Console(stderr=True), shown=_is_first_rank()) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _to_checkpoint(source: Path, target: Path, name: str, dtype: str | None) -> dict[str, Any]:
    from mlxdist.train.conversion import to_checkpoint

    with _progress("reading the model") as on_progress:
        model = to_checkpoint(source, target, name, dtype=_dtype(dtype), on_progress=on_progress)
    return _result(target, model, 0)


def _to_model(source: Path, target: Path, like: str, name: str, step: int | None, dtype: str | None) -> dict[str, Any]:
    import mlxdist
    from mlxdist.base.model_directory import model_directory
    from mlxdist.train.conversion import to_model_folder

    base, group = model_directory(like), mlxdist.init()
    with _progress("writing the model") as on_progress:
        found, model = to_model_folder(
            source, target, base, name, group, step=step, dtype=_dtype(dtype), on_progress=on_progress
        )
    return _result(target, model, found)


def _dtype(name: str | None) -> mx.Dtype | None:
    import mlx.core as mx

    return None if name is None else getattr(mx, name)


def _result(target: Path, model: nn.Module, step: int) -> dict[str, Any]:
    from mlx_lm.utils import get_total_parameters

    return {"target": str(target), "step": step, "parameters": get_total_parameters(model)}
