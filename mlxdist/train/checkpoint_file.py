"""The file of a checkpoint: safetensors, and beside the arrays what it is a checkpoint of.

The header says the step, the run that wrote it, and, where every rank saves its part of a model that is cut, whose
part it is. A CRC-32 covers that, and name, dtype, shape and bytes of every array: a damaged file is not loaded. It
takes a sixth of the time of writing, SHA-256 more than the writing itself. It finds accidents: those who may write the
file can make another one.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

__all__ = ["STEP_DIGITS", "About", "Unusable", "is_whole", "read", "read_about", "sync", "write"]

_STEP, _RUN, _PART, _CRC = "mlxdist_step", "mlxdist_run", "mlxdist_part", "mlxdist_crc32"
STEP_DIGITS = 18  # at most: each such step is an int64
# A header has about 100 bytes for each array; safetensors itself reads no larger one.
_MAX_HEADER = 100_000_000


class Unusable(Exception):
    """The text goes on after the name of the file."""


class About(NamedTuple):
    """``part``: "rank-0-of-2" of those over which the arrays are cut; empty for whole arrays."""

    step: int
    run: str
    part: str = ""


def write(path: Path, arrays: Mapping[str, mx.array], about: About) -> None:
    """Raises OSError or RuntimeError: not all of it was written."""
    metadata = {_STEP: str(about.step), _RUN: about.run, _PART: about.part, _CRC: _crc(arrays, about)}
    mx.save_safetensors(str(path), dict(arrays), metadata)
    if not is_whole(path):
        raise OSError("not all of it was written; is the disk full?")
    sync(path)


def read(path: Path) -> dict[str, mx.array]:
    """The arrays of a file, evaluated: it may be gone when they are used.

    Raises Unusable: it is damaged, or cannot be read.
    """
    header = _whole_header(path)
    try:
        arrays, metadata = mx.load(str(path), return_metadata=True)
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise Unusable(f"cannot be read: {error}") from None
    damage = "its CRC-32 differs" if metadata.get(_CRC) != _crc(arrays, _about(header)) else ""
    for name, array in arrays.items():
        shape = header[name].get("shape")
        if repr(shape) != repr(list(array.shape)):  # MLX takes 4.5 and 2**32 + 4 for 4
            damage = f"{name!r:.200} cannot have the shape {shape!r:.100}"
    if damage:
        raise Unusable(f"is damaged: {damage}; remove it, and latest_checkpoint() finds the one before")
    return arrays


def read_about(path: Path) -> About:
    """Raises Unusable: it is no whole file, or none of save_checkpoint."""
    return _about(_whole_header(path))


def is_whole(path: Path) -> bool:
    """Whether the file is as long as its header says."""
    return _header(path) is not None


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_header(path: Path) -> dict:
    header = _header(path)
    if header is None:
        raise Unusable("is not whole; latest_checkpoint() finds one that is")
    return header


def _about(header: dict) -> About:
    metadata = header.get("__metadata__") or {}
    missing = [name for name in (_STEP, _RUN, _PART, _CRC) if not isinstance(metadata.get(name), str)]
    if _STEP in missing or not re.fullmatch(f"[0-9]{{1,{STEP_DIGITS}}}", metadata[_STEP], re.ASCII):
        raise Unusable(f"was not written by save_checkpoint: it has no {_STEP}; remove it, or choose another folder")
    if missing:
        raise Unusable(
            f"has no {missing[0]}: an older mlxdist has written it, before 0.1.0 was released. Remove it, or choose "
            "another folder; mx.load() still reads its arrays, for another save_checkpoint()"
        )
    return About(int(metadata[_STEP]), metadata[_RUN], metadata[_PART])


def _header(path: Path) -> dict | None:
    """Its length in 8 bytes, then JSON; None where the file is not as long as that says."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                return None
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = size == 8 + length + max(ends, default=0) and isinstance(header.get("__metadata__") or {}, dict)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return header if whole else None


def _crc(arrays: Mapping[str, mx.array], about: About) -> str:
    crc = zlib.crc32(repr(tuple(about)).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(repr((name, str(array.dtype), tuple(array.shape))).encode(), crc)
        if array.size:
            data = mx.contiguous(array, stream=mx.cpu).reshape(-1).view(mx.uint8, stream=mx.cpu)
            crc = zlib.crc32(np.array(data, copy=False), crc)
    return f"{crc:08x}"
