"""Checkpoints: what a training needs to go on where it stopped, in files that are whole or not there.

A checkpoint is one safetensors file, ``step-00000100.safetensors``, readable by anything that reads the format. It is
written under another name, brought to the disk, and only then given its own: a process that is killed or a machine
that loses power leaves the checkpoint before it untouched. Every file is checked for its length before it is taken,
since other programs copy files, too, and are interrupted.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import InvalidArgument, ResourceError

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_NAME = re.compile(r"step-([0-9]{8,})\.safetensors")
_STEP = "mlxdist_step"
# A header has about 100 bytes for each array; safetensors itself reads no larger one.
_MAX_HEADER = 100_000_000


def save_checkpoint(folder: str | os.PathLike, tree: Any, step: int, keep: int = 2) -> Path:
    """Writes a checkpoint, then removes all but the latest ``keep`` of its folder.

    One rank calls it; with data parallelism all have the same. Returns when the file is on the disk.

    Args:
        folder: where the checkpoints of one training lie. It is made if need be.
        tree: dicts and lists with string keys whose leaves are ``mx.array``, such as ``{"model": model.parameters(),
            "optimizer": optimizer.state}``. Empty dicts and lists are not kept. It is evaluated.
        step: how many steps were done, from 0.
        keep: how many checkpoints stay, at least 1.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: a leaf is not an ``mx.array``, or there is none; a key has a dot, or is empty or a number;
            ``step`` is below 0, ``keep`` below 1; or the folder has a checkpoint of a later step.
        ResourceError: it could not be written, for example because the disk is full.
    """
    if step < 0 or keep < 1:
        raise InvalidArgument(f"save_checkpoint: step must be at least 0 and keep at least 1, not {step} and {keep}")
    arrays = _flatten(tree)
    folder = Path(folder)
    later = [number for number in _checkpoints(folder) if number > step]
    if later:
        raise InvalidArgument(
            f"save_checkpoint: {folder} has a checkpoint of step {later[-1]}, later than {step}, of another training; "
            "remove it, or choose another folder"
        )
    path = folder / f"step-{step:08}.safetensors"
    new = folder / f"writing-{step:08}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("writing-*.safetensors"):  # by a process that was killed
            left.unlink()
        mx.save_safetensors(str(new), arrays, {_STEP: str(step)})
        if not _is_whole(new):
            raise OSError("not all of it was written; is the disk full?")
        _sync(new)
        os.replace(new, path)
        _sync(folder)
    except (OSError, RuntimeError) as error:
        new.unlink(missing_ok=True)
        raise ResourceError(f"save_checkpoint: {path} could not be written: {error}") from error
    for old in list(_checkpoints(folder).values())[:-keep]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: str | os.PathLike) -> tuple[Any, int]:
    """The tree and the step of a checkpoint, as ``save_checkpoint`` got them; tuples have become lists.

    Raises:
        InvalidArgument: there is no such file, it is not whole, or no checkpoint.
    """
    path = Path(path)
    if not _is_whole(path):
        problem = "is not whole; latest_checkpoint() finds one that is" if path.exists() else "does not exist"
        raise InvalidArgument(f"load_checkpoint: {path} {problem}")
    arrays, metadata = mx.load(str(path), return_metadata=True)
    step = metadata.get(_STEP, "")
    if not re.fullmatch(r"[0-9]{1,18}", step, re.ASCII):
        raise InvalidArgument(f"load_checkpoint: {path} was not written by save_checkpoint: it has no step")
    mx.eval(arrays)  # or it would be read when the file may be gone
    return tree_unflatten(list(arrays.items())), int(step)


def latest_checkpoint(folder: str | os.PathLike) -> Path | None:
    """The whole checkpoint with the highest step in a folder, or None."""
    return next(reversed(_checkpoints(Path(folder)).values()), None)


def _flatten(tree: Any) -> dict[str, mx.array]:
    arrays = {}
    for path, leaf in tree_flatten(tree):
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


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The whole ones, by step, in ascending order."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    steps = sorted((int(match[1]), match[0]) for name in names if (match := _NAME.fullmatch(name)))
    return {step: folder / name for step, name in steps if _is_whole(folder / name)}


def _is_whole(path: Path) -> bool:
    """Whether the file is as long as its header says. The header: its length in 8 bytes, then JSON."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                return False
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
