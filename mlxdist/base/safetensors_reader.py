"""Reads slices of tensors in safetensors files: the header, and of the data only the bytes that are needed.

The format (https://huggingface.co/docs/safetensors): 8 bytes, little-endian, with the length of the header; the header,
a JSON object that gives dtype, shape and data_offsets of each tensor; then all data without gaps, rows first. A header
is checked whole before anything is read by it. The package ``safetensors`` is no help here: its ``get_slice`` cannot
give bfloat16 to NumPy or MLX.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .errors import InvalidArgument
from .json_reader import parse_json
from .model_directory import pull_command

__all__ = [
    "MTP_FILE",
    "Checkpoint",
    "StoredTensor",
    "WeightFile",
    "all_of_names",
    "local_shape",
    "runs",
    "write_header",
]

# Bytes of an element. F64, F8_E5M2 and formats of less than a byte are missing: MLX cannot load them either.
ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
MAX_INDEX_BYTES = 100_000_000
MAX_READ = 2**30  # macOS refuses 2 GiB and more
INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # weights that mlx-lm leaves out, beside those that it has converted
_OF_SEVERAL = re.compile(r"(model[^/]*-)\d+-of-(\d+)\.safetensors", re.ASCII)
_MAX_FILES = 4096  # that a name may say there are
_SAMPLES, _SAMPLE_BYTES = 8, 64  # of a tensor that is compared by some of its bytes


class TensorLayout(Protocol):
    """The layout of a tensor in a file: dtype, shape, and ``offset``, from which on its rows follow without gaps."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def offset(self) -> int: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``file``, with its first byte at ``offset``."""

    name: str
    file: "WeightFile"
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def sample_runs(self) -> list[tuple[int, int]]:
        """The places of :meth:`sample` in the file: all of a small tensor, 512 bytes of another."""
        if self.nbytes <= 2 * _SAMPLES * _SAMPLE_BYTES:
            return [(self.offset, self.nbytes)]
        step = (self.nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
        return [(self.offset + number * step, _SAMPLE_BYTES) for number in range(_SAMPLES)]

    def read(self, axis: int, slices: Sequence[slice], start: int, memory: memoryview) -> None:
        """Fills ``memory`` with the local part's bytes from ``start`` on; see :func:`runs`. Reads nothing else."""
        self.file.read_runs(runs(self, axis, slices, start, start + len(memory)), memory)

    def sample(self) -> memoryview:
        """Some bytes to compare the tensor by: the same ones on every host, whichever shard is read there."""
        memory = memoryview(bytearray(sum(length for _, length in self.sample_runs)))
        self.file.read_runs(self.sample_runs, memory)
        return memory

    def release(self) -> None:
        """Does nothing: no data is kept between two reads."""


@dataclass
class WeightFile:
    """A safetensors file whose header has been read and found to be right.

    Raises the error of `unusable`, which names the file and, if one is at fault, the tensor.
    """

    path: Path
    metadata: dict[str, Any] = field(init=False, repr=False)  # of the file; {} if there is none
    header: bytes = field(init=False, repr=False)  # with its length before it: the file up to the data
    size: int = field(init=False)
    tensors: dict[str, StoredTensor] = field(init=False, repr=False)
    bytes_read: int = field(init=False, default=0)  # of the data

    def __post_init__(self) -> None:
        try:
            with self._data.open("rb") as file:
                self.size = self._full_size(os.fstat(file.fileno()).st_size)
                length_field = file.read(8)
                length = int.from_bytes(length_field, "little")
                if len(length_field) < 8 or not 2 <= length <= min(self.size - 8, MAX_HEADER_BYTES):
                    raise self.damaged(
                        f"it has {self.size} bytes, and its header would have {length}; it may be cut off, or no "
                        "safetensors file"
                    )
                text = file.read(length)
        except OSError as error:
            raise self.unusable(f"cannot be read: {error.strerror}") from None
        if len(text) < length:
            raise self.damaged("it has become shorter while it was read")
        self.header = length_field + text
        self.tensors = self._parse(text)

    @property
    def digest(self) -> bytes:
        """A digest of 16 bytes over the header and the size of the file."""
        return hashlib.blake2b(self.header + self.size.to_bytes(8, "little"), digest_size=16).digest()

    def damaged(self, what: str) -> Exception:
        return self.unusable(f"is damaged: {what}; copy or download it again")

    def unusable(self, what: str) -> Exception:
        """The error for this file. ``what`` continues a sentence that begins with the name of the file."""
        return InvalidArgument(f"{self.path} {what}")

    def read_runs(self, runs: Iterable[tuple[int, int]], memory: memoryview) -> None:
        """Fills ``memory`` with the bytes of ``runs``: pairs of an offset in the file and a number of bytes."""
        filled = 0
        with self._open() as file:
            for offset, length in runs:
                self._fill(file.fileno(), offset, memory[filled : filled + length])
                filled += length

    @property
    def _data(self) -> Path:
        """The path to read from."""
        return self.path

    def _full_size(self, found: int) -> int:
        """The size of the file with all tensors, of which ``found`` bytes are there."""
        return found

    def _open(self) -> Any:
        try:
            return self._data.open("rb", buffering=0)
        except OSError as error:
            raise self.unusable(f"cannot be read: {error.strerror}") from None

    def _fill(self, descriptor: int, offset: int, memory: memoryview) -> None:
        while memory:
            try:
                count = os.preadv(descriptor, [memory[:MAX_READ]], offset)
            except OSError as error:
                raise self.unusable(f"cannot be read at byte {offset}: {error.strerror}") from None
            if count == 0:
                raise self.damaged(f"it ends at byte {offset}, and had {self.size} when it was opened")
            self.bytes_read += count
            offset += count
            memory = memory[count:]

    def _parse(self, text: bytes) -> dict[str, StoredTensor]:
        try:
            header = parse_json(text)
        except ValueError as error:
            raise self.damaged(f"its header is not the JSON it should be ({error})") from None
        if not isinstance(header, dict):
            raise self.damaged("its header is not a JSON object")
        metadata = header.pop("__metadata__", None)
        self.metadata = metadata if isinstance(metadata, dict) else {}
        tensors = {name: self._tensor(name, entry) for name, entry in header.items()}
        self._require_no_overlap(tensors)
        return tensors

    def _tensor(self, name: str, entry: Any) -> StoredTensor:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self.damaged(f"tensor {name!r:.200} does not have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise self.unusable(
                f"cannot be loaded: tensor {name!r:.200} has dtype {dtype!r:.50}, which MLX does not read; it must be "
                f"one of {', '.join(ITEM_SIZES)}"
            )
        if not _is_sizes(shape):
            raise self.damaged(f"tensor {name!r:.200} has shape {shape!r:.100}")
        if not _is_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1]:
            raise self.damaged(f"tensor {name!r:.200} has data_offsets {offsets!r:.100}")
        tensor = StoredTensor(name, self, dtype, tuple(shape), len(self.header) + offsets[0])
        if tensor.nbytes != offsets[1] - offsets[0]:
            raise self.damaged(
                f"tensor {name!r:.200} of dtype {dtype} and shape {shape!r:.100} takes {tensor.nbytes} bytes, but has "
                f"data_offsets {offsets}"
            )
        if len(self.header) + offsets[1] > self.size:
            raise self.damaged(
                f"tensor {name!r:.200} ends at byte {len(self.header) + offsets[1]}, but the file has {self.size} bytes"
            )
        return tensor

    def _require_no_overlap(self, tensors: dict[str, StoredTensor]) -> None:
        """Checks that tensors neither overlap nor leave a gap: the format has neither."""
        end, before = len(self.header), "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != end:
                relation = "overlaps with" if tensor.offset < end else "does not follow on"
                raise self.damaged(f"tensor {tensor.name!r:.200} at byte {tensor.offset} {relation} {before}")
            end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r:.200}"
        if end != self.size:
            raise self.damaged(f"{self.size - end} bytes at its end belong to no tensor")


def write_header(path: Path, header: bytes, size: int) -> None:
    """Writes a file of ``size`` bytes that begins with ``header``; behind it is a hole that takes no room."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)


def all_of_names(names: Iterable[str]) -> set[str]:
    """The files with weights that the names of some say there are: of model-00001-of-00002.safetensors, two."""
    parts = {match.groups() for match in map(_OF_SEVERAL.fullmatch, names) if match}
    return {
        f"{begin}{number:0{len(count)}}-of-{count}.safetensors"
        for begin, count in parts
        for number in range(1, min(int(count), _MAX_FILES) + 1)
    }


class Checkpoint:
    """The weights in a directory as mlx-lm saves them: all files ``model*.safetensors``, and an index if there is one.
    And ``mtp.safetensors``, which mlx-lm does not look at.

    Raises InvalidArgument: the directory has no such file, one is damaged, one is missing that the index or, without
    one, the names of others say there is, or a tensor is in two files or not in that of the index.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = self._read_index()
        self.files = self._open_files(index)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise InvalidArgument(f"tensor {name!r} is in {self.tensors[name].file.path} and in {file.path}")
                self.tensors[name] = tensor
        for name, file_name in index.items():
            if name not in self.tensors or self.tensors[name].file.path.name != file_name:
                raise InvalidArgument(f"tensor {name!r} is not in {directory / file_name}, where {INDEX} has it")

    @contextmanager
    def with_headers(self) -> Iterator[Path]:
        """A directory for mlx-lm, which opens all files of weights and reads no data of them."""
        yield self.directory

    @property
    def bytes_read(self) -> int:
        """The number of bytes of the tensors that have been read so far."""
        return sum(file.bytes_read for file in self.files)

    def _open_files(self, index: Mapping[str, str]) -> list[WeightFile]:
        """Reads the headers of all files. ``index``: the file of each tensor; empty without an index."""
        directory = self.directory
        paths = sorted(directory.glob("model*.safetensors"))
        names = {path.name for path in paths}
        missing = sorted((set(index.values()) or all_of_names(names)) - names)
        if missing:
            raise InvalidArgument(
                f"{directory / missing[0]} is missing, "
                + (f"which {INDEX} names" if index else "as the names of other files say")
                + (f", and {len(missing) - 1} more files" if len(missing) > 1 else "")
                + f"; type: {pull_command(directory)}"
            )
        if not paths:
            raise InvalidArgument(
                f"there is no model*.safetensors in {directory}; give the directory of a model, or type: "
                f"{pull_command(directory)}"
            )
        return [WeightFile(path) for path in (*paths, *directory.glob(MTP_FILE))]

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.exists():
            return {}
        try:
            if path.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError(f"it has {path.stat().st_size} bytes")
            weight_map = parse_json(path.read_bytes()).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ValueError("it has no weight_map of names to files")
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidArgument(f"{path} is damaged: {error}; copy or download it again") from None
        return weight_map


def local_shape(shape: Sequence[int], axis: int, slices: Sequence[slice]) -> tuple[int, ...]:
    """The shape of the concatenated ``slices`` of an array of ``shape`` along ``axis``; ``shape`` without slices."""
    if not slices:
        return tuple(shape)
    return (*shape[:axis], sum(part.stop - part.start for part in slices), *shape[axis + 1 :])


def runs(tensor: TensorLayout, axis: int, slices: Sequence[slice], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the places in the file of bytes ``start`` to ``stop`` of the local part: pairs of an offset and a length.

    The local part is ``slices`` along ``axis``, concatenated (the full tensor if there are none), in row-major order,
    like NumPy's. Slices have a start and a stop inside the dimension, and no step.
    """
    if not slices:
        yield tensor.offset + start, stop - start
        return
    inner = math.prod(tensor.shape[axis + 1 :]) * tensor.itemsize
    stride = tensor.shape[axis] * inner
    pieces = [(part.start * inner, (part.stop - part.start) * inner) for part in slices]
    row_bytes = sum(length for _, length in pieces)
    while start < stop:
        row, position = divmod(start, row_bytes)
        for piece_offset, length in pieces:
            if position >= length:
                position -= length
                continue
            count = min(length - position, stop - start)
            yield tensor.offset + row * stride + piece_offset + position, count
            start += count
            position = 0
            if start == stop:
                return


def _is_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
