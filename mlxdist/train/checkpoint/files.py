"""The files of a checkpoint: written so that they are on the disk when that returns, and compared before they are read.

A rank's file is safetensors (https://huggingface.co/docs/safetensors), readable by anything that reads the format. It
is not written by MLX: a thread of ours writes it while the program computes, and counts the CRC-32 of the same bytes.
"""

import errno
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxdist.base.safetensors_reader import ITEM_SIZES, WeightFile

__all__ = [
    "DTYPES",
    "Layout",
    "Snapshot",
    "TensorFile",
    "TensorWriter",
    "Unusable",
    "crc32_of",
    "dtype_name",
    "size_of_tensors",
    "sync",
    "take_snapshots",
    "write_synced",
    "write_tensors",
]

_CHUNK_BYTES = 16 * 2**20

# By their names in safetensors.
DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "C64": mx.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Layout = tuple[str, tuple[int, ...]]  # dtype and shape of a tensor


class Unusable(Exception):
    """A file or a checkpoint cannot be used. The text continues a sentence that begins with its name."""


class Snapshot(NamedTuple):
    """An array as it is now: its bytes stay the same whatever the program does with the array."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def first(self, length: int) -> "Snapshot":
        """The first elements of a flat array's snapshot."""
        return Snapshot(self.dtype, (length,), self.data[: length * (len(self.data) // self.shape[0])])


class TensorFile(WeightFile):
    """A file of weights that raises Unusable where it is damaged or cannot be read."""

    def damaged(self, what: str) -> Exception:
        return self.unusable(f"is damaged: {what}")

    def unusable(self, what: str) -> Exception:
        return Unusable(f"has a file {self.path.name} that {what}")


def dtype_name(array: mx.array) -> str:
    """The name of an array's dtype in safetensors."""
    return _NAMES[array.dtype]


def take_snapshots(arrays: Mapping[str, mx.array]) -> dict[str, Snapshot]:
    """Takes snapshots. A contiguous array is not copied: MLX writes no array in place that has another reference.

    It runs on the CPU's stream, so the arrays must be evaluated.
    """
    flat = {
        name: mx.contiguous(array, stream=mx.cpu).reshape(-1, stream=mx.cpu).view(mx.uint8, stream=mx.cpu)
        for name, array in arrays.items()
        if array.size
    }
    mx.eval(flat)
    data = {name: np.array(array, copy=False).data for name, array in flat.items()}
    return {
        name: Snapshot(dtype_name(array), array.shape, data.get(name, memoryview(b"")))
        for name, array in arrays.items()
    }


def size_of_tensors(tensors: Mapping[str, Snapshot], metadata: Mapping[str, str]) -> int:
    """The size of the file that :func:`write_tensors` writes."""
    return len(_header(_layout(tensors), metadata)) + sum(len(data) for _, _, data in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Snapshot], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes a file. Returns its size and its CRC-32. Raises OSError: not all of it could be written."""
    with TensorWriter(path, _layout(tensors), metadata) as writer:
        for _, _, data in tensors.values():
            writer.write(data)
        return writer.finish()


class TensorWriter:
    """Writes a new safetensors file whose data comes one tensor after the other, so that one is in memory.

    Args:
        path: of the file, which must not be there.
        layout: dtypes, by their names in safetensors, and shapes of the tensors, in the order of their data.
        metadata: of the file.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, layout: Mapping[str, Layout], metadata: Mapping[str, str]) -> None:
        self._size = self._crc = 0
        self._file = path.open("xb", buffering=0)
        self.write(memoryview(_header(layout, metadata)))

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: memoryview) -> None:
        """Writes the bytes of the next tensor. Raises OSError."""
        for chunk in _chunks(data):
            self._crc = zlib.crc32(chunk, self._crc)
            while chunk:
                count = self._file.write(chunk)
                self._size += count
                chunk = chunk[count:]

    def finish(self) -> tuple[int, str]:
        """Returns the file's size and its CRC-32, once it is on the disk. Raises OSError."""
        os.fsync(self._file.fileno())
        self._file.close()
        return self._size, f"{self._crc:08x}"


def crc32_of(path: Path) -> str:
    """The CRC-32 of all bytes of a file. Raises OSError."""
    crc, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    if not path.is_file():  # reading a named pipe would never end
        raise OSError(errno.ENOENT, "no file is there")
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return f"{crc:08x}"


def write_synced(path: Path, content: bytes) -> None:
    """Writes a small file, in place of the one that may be there. Raises OSError."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The new name, too, is on the disk only with its directory: after a loss of power the old file could be back.
    sync(path.parent)


def sync(path: Path) -> None:
    """Writes the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _layout(tensors: Mapping[str, Snapshot]) -> dict[str, Layout]:
    return {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}


def _header(layout: Mapping[str, Layout], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file, before the data of its first tensor."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + math.prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
