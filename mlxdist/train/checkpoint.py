"""Checkpoints: what a training needs to go on where it stopped, in files that are whole or not there.

A checkpoint is one safetensors file, ``step-00000100.safetensors``, readable by anything that reads the format. It is
written under another name, brought to the disk, and only then given its own: a process that is killed or a machine
that loses power leaves the checkpoint before it untouched. Every file is checked for its length before it is taken,
since other programs copy files, too, and are interrupted; and for its bytes before it is loaded.

It carries the run that wrote it: the job of `mlxdist launch` with all its restarts, MLXDIST_JOB where something else
starts the ranks, else the processes that started together. A program takes another run's checkpoint for its own only
where it says so.
"""

import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.runtime.arguments import group_of
from mlxdist.runtime.default_group import current_run
from mlxdist.runtime.group import Group
from mlxdist.runtime.ops import all_gather

from .checkpoint_file import STEP_DIGITS, About, Unusable, is_whole, read, read_about, sync, write
from .sharded_layers import sharded_layer

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_NAME = re.compile(rf"step-([0-9]{{8,{STEP_DIGITS}}})\.safetensors")

_T = TypeVar("_T")

# The ranks of a model that is sharded compare this number of their last steps.
_COMPARED = 64

# Other runs whose checkpoints this process has loaded on purpose: it goes on as they would.
_continued: set[str] = set()


def save_checkpoint(
    directory: str | os.PathLike, tree: Any, step: int, keep: int = 2, group: Group | None = None
) -> Path:
    """Writes a checkpoint, then removes all but the latest ``keep`` of its directory.

    One rank calls it; with data parallelism all have the same. Returns when the file is on the disk. All ranks call
    ``mlxdist.meet()`` afterwards: the next step must not wait for this one on a GPU.

    Args:
        directory: where the checkpoints of one run lie. It is made if need be.
        tree: dicts and lists with string keys whose leaves are ``mx.array``, such as ``{"model": model.parameters(),
            "optimizer": optimizer.state}``. Empty dicts and lists are not kept. It is evaluated; where one rank calls
            this, all ranks must have done so before, since it may wait for their collectives.
        step: how many steps were done, from 0; an integer below 10**18.
        keep: how many checkpoints stay, at least 1.
        group: the ranks over which the model is sharded (``shard_model``, ``load_sharded``, mlx-lm's ``shard``): all of
            them call this, and each saves its own shard, into a directory of its own within ``directory``. Older ones
            are removed when all have. Before that, shards of this run are removed that are later than the last step of
            which all ranks have theirs: a save that was killed has left them. ``None``: the arrays are whole.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: a leaf is not an ``mx.array``, or there is none; a key has a dot, or is empty or a number;
            ``step`` is below 0 or too large, ``keep`` below 1, or one of them no integer; the directory is a file; or
            it has a checkpoint of a later step, or of another run that this process has not loaded with
            ``other_run=True``; without ``group``: an array is a parameter of a layer that is sharded over ranks. With
            ``group`` also where another rank has failed, or has another step; or ranks have shards, but no step of all.
        ResourceError: it could not be written, for example because the disk is full.
    """
    shard = _shard_name(group)
    with _on_all("save_checkpoint", group, step, keep):
        directory = _checked_path("save_checkpoint", directory)
        own = directory / shard
        step = _checked_number("step", step, 0, 10**STEP_DIGITS - 1)
        keep = _checked_number("keep", keep, 1, sys.maxsize)
        arrays = _flatten(tree)
        if not shard and (layer := sharded_layer(arrays.values())):
            raise InvalidArgument(
                f"save_checkpoint: the tree has parameters of {layer}, of which each rank holds a shard; have every "
                "rank save its own: save_checkpoint(directory, tree, step, group=group) with the group over which the "
                "model is sharded"
            )
        found = _checkpoints("save_checkpoint", own)
    mx.eval(arrays)  # here: the error of a collective that they wait for is none of writing
    last = _last_of_all("save_checkpoint", directory, found, group)
    # Each block ends on all ranks before one begins the next: no new shard meets one that another start has left.
    with _on_all("save_checkpoint", group):
        left = {number: path for number, path in found.items() if number > last and _is_ours(path)}
        found = {number: path for number, path in found.items() if number not in left}
        _check_directory(own, found, step)
        _remove(own, left.values())
    with _on_all("save_checkpoint", group):
        found[step] = _write(own, arrays, About(step, current_run(), shard))
    _remove(own, list(found.values())[:-keep])
    return found[step]


def load_checkpoint(path: str | os.PathLike, other_run: bool = False, group: Group | None = None) -> tuple[Any, int]:
    """The tree and the step of a checkpoint, as ``save_checkpoint`` got them; tuples have become lists.

    Args:
        path: of the file, from ``latest_checkpoint``.
        other_run: take it also if another run has written it: to go on with what an earlier job has done, or to use
            its weights. This process may then save into its directory.
        group: that of ``save_checkpoint``, whose ranks all call this; each gets its own shard.

    Raises:
        InvalidArgument: there is no such file, it is not whole, damaged or no checkpoint; it is of another run and
            ``other_run`` is not set; or it is not this rank's shard, or none at all, of a model that is sharded over
            ``group``. With ``group``, on all its ranks alike; also where their shards are of different steps or runs.
    """
    shard = _shard_name(group)
    with _on_all("load_checkpoint", group, other_run):
        path = _checked_path("load_checkpoint", path)
        about = _checked_about(path, shard, other_run)
    with _on_all("load_checkpoint", group, about.step, about.run):
        arrays = _usable("load_checkpoint", read, path)
    if about.run != current_run():
        _continued.add(about.run)
    return tree_unflatten(list(arrays.items())), about.step


def latest_checkpoint(directory: str | os.PathLike, group: Group | None = None) -> Path | None:
    """The whole checkpoint with the highest step in a directory, of whatever run, or None.

    With the ``group`` of ``save_checkpoint``, whose ranks all call this: the shard of this rank, of the highest step
    that all ranks have; None also where this run's first save was killed before all had theirs.

    Raises:
        InvalidArgument: the directory is a file; its checkpoints are not of as many shards as ``group`` has ranks, or
            no step has the shards of all of them. With ``group``, on all its ranks alike.
        ResourceError: it cannot be read.
    """
    shard = _shard_name(group)
    with _on_all("latest_checkpoint", group):
        directory = _checked_path("latest_checkpoint", directory)
        found = _checkpoints("latest_checkpoint", directory / shard)
        if not found:
            _check_for_other_shards(directory, shard)
    return found.get(_last_of_all("latest_checkpoint", directory, found, group))


def _last_of_all(name: str, directory: Path, found: dict[int, Path], group: Group | None) -> int:
    """The highest step that all ranks have; -1 for none. ``found``: the checkpoints of this one.

    A first save that was killed is no step either: each rank has one shard of this run at most.
    """
    if not _shard_name(group):
        return max(found, default=-1)
    first = len(found) <= 1 and all(map(_is_ours, found.values()))
    mine = list(found)[-_COMPARED:]
    rows = all_gather(np.array([[first, *mine, *[-1] * (_COMPARED - len(mine))]]), group=group)
    of_all = set.intersection(*(set(row.tolist()) for row in rows[:, 1:])) - {-1}
    if not of_all and not rows[:, 0].all():
        raise InvalidArgument(
            f"{name}: {directory} has no step with the shards of all {len(rows)} ranks; to begin from step 0, remove "
            "it or choose another directory"
        )
    return max(of_all, default=-1)


def _is_ours(path: Path) -> bool:
    try:
        return read_about(path).run == current_run()
    except Unusable:
        return False


def _checked_about(path: Path, shard: str, other_run: bool) -> About:
    if not path.is_file():
        problem = "is a directory; pass what latest_checkpoint(directory) finds" if path.is_dir() else "does not exist"
        raise InvalidArgument(f"load_checkpoint: {path} {problem}")
    about = _usable("load_checkpoint", read_about, path)
    if about.shard != shard:
        raise _wrong_shard("load_checkpoint", path, about.shard, shard)
    if about.run != current_run() and not other_run:
        raise InvalidArgument(
            f"load_checkpoint: {path} is of another run, {about.run}; this one is {current_run()}. To go on with "
            f"it, call load_checkpoint(path, other_run=True); to begin from step 0, remove {path.parent} or choose "
            "another directory"
        )
    return about


def _usable(name: str, read: Callable[[Path], _T], path: Path) -> _T:
    try:
        return read(path)
    except Unusable as error:
        raise InvalidArgument(f"{name}: {path} {error}") from None


def _write(directory: Path, arrays: dict[str, mx.array], about: About) -> Path:
    path = directory / f"step-{about.step:08}.safetensors"
    new = directory / f"writing-{about.step:08}.safetensors"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob("writing-*.safetensors"):  # by a process that was killed
            left.unlink()
        write(new, arrays, about)
        os.replace(new, path)
        sync(directory)
    except (OSError, RuntimeError) as error:
        new.unlink(missing_ok=True)
        raise ResourceError(f"save_checkpoint: {path} could not be written: {error}") from error
    return path


def _remove(directory: Path, paths: Collection[Path]) -> None:
    """For good: they are gone after a loss of power, too."""
    try:
        for path in paths:
            path.unlink(missing_ok=True)
        if paths:
            sync(directory)
    except OSError as error:
        raise ResourceError(f"save_checkpoint: an earlier checkpoint could not be removed: {error}") from error


def _on_all(name: str, group: Group | None, *values: object) -> AbstractContextManager[None]:
    """A block whose failure on one rank of the group, if there is one, is an error on all of them."""
    if group is None:
        return nullcontext()
    from mlxdist.nn.rank_checks import agreed  # here: data parallelism needs none of the layers

    return agreed(name, group, *values)


def _shard_name(group: Group | None) -> str:
    """As it is named in the file, and its directory is."""
    if group is None or group_of(group).size() == 1:
        return ""
    return f"rank-{group.rank()}-of-{group.size()}"


def _check_for_other_shards(directory: Path, shard: str) -> None:
    """Those of another number of ranks are not taken for none at all."""
    for other in sorted(directory.glob("rank-*-of-*")):
        if not shard or other.name.rpartition("-")[2] != shard.rpartition("-")[2]:
            raise _wrong_shard("latest_checkpoint", other, other.name, shard)
    if shard and _checkpoints("latest_checkpoint", directory):
        raise _wrong_shard("latest_checkpoint", directory, "", shard)


def _wrong_shard(name: str, path: Path, shard: str, wanted: str) -> InvalidArgument:
    holds = f"has the shard {shard} of a model that is sharded" if shard else "has whole arrays"
    other = f"not {wanted}" if wanted else "pass group=, the ranks over which it is sharded"
    return InvalidArgument(f"{name}: {path} {holds}; {other}")


def _checked_path(name: str, path: Any) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"{name}: {path!r} is no path")
    return Path(text)


def _checked_number(name: str, number: Any, least: int, most: int) -> int:
    if not isinstance(number, Integral) or isinstance(number, bool) or not least <= int(number) <= most:
        raise InvalidArgument(f"save_checkpoint: {name} must be an integer from {least} to {most}, not {number!r}")
    return int(number)


def _check_directory(directory: Path, found: dict[int, Path], step: int) -> None:
    """Its checkpoints must be of this run, or of one that it goes on with; and none later than this step."""
    if not found:
        return
    last, path = list(found.items())[-1]
    run = _usable("save_checkpoint", read_about, path).run
    if run != current_run() and run not in _continued:
        raise InvalidArgument(
            f"save_checkpoint: {directory} has a checkpoint of step {last} of another run, {run}; this one is "
            f"{current_run()}. To go on with it, load it first with load_checkpoint(path, other_run=True); to begin "
            f"from step 0, remove {directory} or choose another directory"
        )
    if last > step:
        raise InvalidArgument(
            f"save_checkpoint: {directory} has a checkpoint of step {last}, later than {step}; remove it, or choose "
            "another directory"
        )


def _flatten(tree: Any) -> dict[str, mx.array]:
    arrays = {}
    for path, leaf in dict(tree_flatten(tree)).items():
        if not isinstance(leaf, mx.array):
            raise InvalidArgument(
                f"save_checkpoint: the leaf '{path}' is a {type(leaf).__name__}, not an mx.array; make it one"
            )
        arrays[path] = leaf
    if not arrays:
        raise InvalidArgument("save_checkpoint: the tree has no mx.array")
    if _structure(tree_unflatten(list(arrays.items()))) != _structure(tree):
        raise InvalidArgument(
            "save_checkpoint: a key of the tree has a dot, is empty, or is a number as in a list; name it otherwise"
        )
    return arrays


def _structure(tree: Any) -> Any:
    """The tree without its leaves and what is empty."""
    if isinstance(tree, (list, tuple)):
        return [part for part in map(_structure, tree) if part not in ({}, [])]
    if isinstance(tree, dict):
        parts = {key: _structure(value) for key, value in tree.items()}
        return {key: part for key, part in parts.items() if part not in ({}, [])}
    return None


def _checkpoints(name: str, directory: Path) -> dict[int, Path]:
    """The whole ones, by step, in ascending order. ``name``: the function that is called, for errors."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        raise InvalidArgument(f"{name}: {directory} is a file, not a directory; choose another name") from None
    except OSError as error:
        raise ResourceError(f"{name}: {directory} cannot be read: {error.strerror}") from None
    steps = sorted((int(match[1]), match[0]) for name in names if (match := _NAME.fullmatch(name)))
    return {step: directory / name for step, name in steps if is_whole(directory / name)}
