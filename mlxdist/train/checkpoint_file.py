"""The file of a checkpoint: safetensors, and beside the arrays what it is a checkpoint of.

The header says the step, the run that wrote it, and, where every rank saves its part of a model that is sharded, whose
shard it is. A CRC-32 covers that, and name, dtype, shape and bytes of every array: a damaged file is not loaded. It
takes a sixth of the time of writing, SHA-256 more than the writing itself. It finds accidents: those who may write the
file can make another one.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.base.safetensors_reader import WeightFile

__all__ = ["STEP_DIGITS", "About", "Unusable", "is_whole", "read", "read_about", "sync", "write"]

_STEP, _RUN, _SHARD, _CRC = "mlxdist_step", "mlxdist_run", "mlxdist_shard", "mlxdist_crc32"
STEP_DIGITS = 18  # at most: each such step is an int64


class Unusable(Exception):
    """The text goes on after the name of the file."""


class About(NamedTuple):
    """``shard``: "rank-0-of-2" of those over which the arrays are sharded; empty for whole arrays."""

    step: int
    run: str
    shard: str = ""


def write(path: Path, arrays: Mapping[str, mx.array], about: About) -> None:
    """Raises OSError or RuntimeError: not all of it was written."""
    metadata = {_STEP: str(about.step), _RUN: about.run, _SHARD: about.shard, _CRC: _crc(arrays, about)}
    mx.save_safetensors(str(path), dict(arrays), metadata)
    if not is_whole(path):
        raise OSError("not all of it was written; is the disk full?")
    sync(path)


def read(path: Path) -> dict[str, mx.array]:
    """The arrays of a file, evaluated: it may be gone when they are used.

    Raises Unusable: it is damaged, or cannot be read.
    """
    file = _File(path)
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise Unusable(f"cannot be read: {error}") from None
    damage = "its CRC-32 differs" if metadata.get(_CRC) != _crc(arrays, _about(file)) else ""
    for name, array in arrays.items():
        if (shape := file.tensors[name].shape) != array.shape:  # MLX takes (0, 2**32 + 4) for (0, 4)
            damage = f"{name!r:.200} cannot have the shape {shape!r:.100}"
    if damage:
        raise file.damaged(damage)
    return arrays


def read_about(path: Path) -> About:
    """Raises Unusable: it is no whole file, or none of save_checkpoint."""
    return _about(_File(path))


def is_whole(path: Path) -> bool:
    """Whether the file has a right header, and is as long as that says."""
    try:
        _File(path)
    except Unusable:
        return False
    return True


def sync(path: Path) -> None:
    """Brings a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _File(WeightFile):
    """Raises Unusable."""

    def damaged(self, what: str) -> Exception:
        return self.unusable(f"is damaged: {what}; remove it, and latest_checkpoint() finds the one before")

    def unusable(self, what: str) -> Exception:
        return Unusable(what)


def _about(file: _File) -> About:
    metadata = file.metadata
    missing = [name for name in (_STEP, _RUN, _SHARD, _CRC) if not isinstance(metadata.get(name), str)]
    if _STEP in missing or not re.fullmatch(f"[0-9]{{1,{STEP_DIGITS}}}", metadata[_STEP], re.ASCII):
        raise Unusable(f"was not written by save_checkpoint: it has no {_STEP}; remove it, or choose another directory")
    if missing:
        raise Unusable(
            f"has no {missing[0]}: an older mlxdist has written it, before 0.1.0 was released. Remove it, or choose "
            "another directory; mx.load() still reads its arrays, for another save_checkpoint()"
        )
    return About(int(metadata[_STEP]), metadata[_RUN], metadata[_SHARD])


def _crc(arrays: Mapping[str, mx.array], about: About) -> str:
    crc = zlib.crc32(repr(tuple(about)).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(repr((name, str(array.dtype), tuple(array.shape))).encode(), crc)
        if array.size:
            data = mx.contiguous(array, stream=mx.cpu).reshape(-1).view(mx.uint8, stream=mx.cpu)
            crc = zlib.crc32(np.array(data, copy=False).data, crc)
    return f"{crc:08x}"
