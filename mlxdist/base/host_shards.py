"""The shards of a model on a host that has just what its ranks read, as `mlxdist pull --only-shards` brings them.

In the model's directory, beside config.json and the other small files:

    .mlxdist-shards/record.json             HostShards: which ranks, and which slices of which tensors
    .mlxdist-shards/DIGEST/NAME             of each file of weights its header and these slices, one after the other

No file with weights has the name that it has in the full model, and nothing stands in place of what is missing. So
mlx-lm and every other program find no weights there, and a slice that is missing cannot be read as zeros. DIGEST is
that of the slices: a record never stands for files of other slices.
"""

import hashlib
import io
import itertools
import json
import math
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .atomic_file import replace_file
from .errors import InvalidArgument, name_ranks
from .json_reader import parse_json
from .model_directory import pull_command
from .safetensors_reader import MTP_FILE, Checkpoint, StoredTensor, WeightFile, local_shape, runs, write_header
from .validation import build, checked, list_of, number, object_of, plain_text, read_bounded, row_of

__all__ = [
    "ALL",
    "MAX_RECORD_BYTES",
    "FileShards",
    "HostShards",
    "PackedShards",
    "Part",
    "ShardCheckpoint",
    "ShardTensor",
    "find_shards",
    "open_checkpoint",
    "remove_shards",
    "write_record",
]

Part = tuple[int, tuple[tuple[int, int], ...]]  # of a tensor: an axis, and (start, stop) along it; all without these
ALL: Part = (0, ())
MAX_RECORD_BYTES = 64 * 2**20
_DIRECTORY, _RECORD = ".mlxdist-shards", "record.json"
_MAX_FILES, _MAX_TENSORS, _MAX_PIECES, _MAX_RANKS, _MAX_AXES = 4096, 10**6, 4096, 10**5, 64
_LARGEST = 2**62
_WEIGHTS = re.compile(r"model[^/]{0,150}\.safetensors|" + re.escape(MTP_FILE))


def _weights_name(what: str, value: Any) -> str:
    name = plain_text(200, steering="")(what, value)
    if not _WEIGHTS.fullmatch(name):
        raise ValueError(f"{what} {name!r:.80} is no name of a file with weights")
    return name


def _part(what: str, value: Any) -> Part:
    size = number(0, _LARGEST)
    axis, pieces = row_of(number(0, _MAX_AXES), list_of(row_of(size, size), _MAX_PIECES))(what, value)
    ends = [end for piece in pieces for end in piece]
    if any(start >= stop for start, stop in itertools.pairwise(ends)):
        raise ValueError(f"{what} has pieces that are empty, overlap or touch")
    return axis, pieces


def _parts(what: str, value: Any) -> dict[str, Part]:
    if type(value) is not dict or len(value) > _MAX_TENSORS:
        raise ValueError(f"{what} is no object of at most {_MAX_TENSORS}")
    check_name = plain_text(512, steering="")
    return {check_name(what, name): _part(f"the part of {name}", part) for name, part in value.items()}


@dataclass(frozen=True)
class FileShards:
    """The shards of one file. ``size``: of the file with all tensors; ``packed``: of its header and the shards;
    ``parts``: which part of each tensor, by name."""

    name: str = checked(_weights_name)
    size: int = checked(number(0, _LARGEST))
    packed: int = checked(number(0, _LARGEST))
    parts: dict[str, Part] = checked(_parts)


@dataclass(frozen=True)
class HostShards:
    """The shards on a host. ``ranks``: that read them, of a job with ``of``; ``plan``: its name, such as "tp=2"."""

    ranks: tuple[int, ...] = checked(list_of(number(0, _MAX_RANKS), _MAX_RANKS))
    of: int = checked(number(1, _MAX_RANKS))
    plan: str = checked(plain_text(200, steering=""))
    files: tuple[FileShards, ...] = checked(list_of(object_of(FileShards), _MAX_FILES))

    def __str__(self) -> str:
        return f"{name_ranks(self.ranks)} of {self.of}, {self.plan}"

    def path(self, directory: Path, file: FileShards) -> Path:
        """The path of a file's shards, for a model's directory."""
        return directory / _DIRECTORY / self._digest / file.name

    @property
    def _digest(self) -> str:
        slices = json.dumps([asdict(file) for file in self.files], sort_keys=True)
        return hashlib.blake2b(slices.encode(), digest_size=16).hexdigest()

    def to_json(self) -> bytes:
        """The record as JSON, which :meth:`from_json` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "HostShards":
        """Raises ValueError: the text is no record."""
        return build(cls, parse_json(text))


def find_shards(directory: Path) -> HostShards | None:
    """The record in a model's directory; None without one, and where all files with weights are there after all.

    Raises:
        InvalidArgument: it is damaged.
    """
    path = directory / _DIRECTORY / _RECORD
    if not path.exists():
        return None
    try:
        found = HostShards.from_json(read_bounded(path, MAX_RECORD_BYTES))
    except ValueError as error:
        raise InvalidArgument(f"{path} is damaged: {error}; type: {pull_command(directory)}") from None
    return None if all((directory / file.name).exists() for file in found.files) else found


def write_record(directory: Path, shards: HostShards) -> None:
    """Writes the record, once all shards are there, and removes those of an earlier one."""
    kept = directory / _DIRECTORY
    replace_file(kept / _RECORD, shards.to_json(), 0o644)
    for path in kept.iterdir():
        if path.is_dir() and path.name != shards._digest:
            shutil.rmtree(path)


def remove_shards(directory: Path) -> None:
    """Removes the record and all shards: for a directory that has all weights now."""
    if (directory / _DIRECTORY).exists():
        shutil.rmtree(directory / _DIRECTORY)


def open_checkpoint(directory: Path) -> Checkpoint:
    """The weights in a directory: all, or the shards that are there, of which nothing else can be read.

    Raises:
        InvalidArgument: what Checkpoint raises; the record or a file with shards is damaged.
    """
    shards = find_shards(directory)
    return Checkpoint(directory) if shards is None else ShardCheckpoint(directory, shards)


class ShardCheckpoint(Checkpoint):
    """The weights in a directory of which this host has shards: all headers, and of the data what ``shards`` says."""

    def __init__(self, directory: Path, shards: HostShards) -> None:
        self.shards = shards
        super().__init__(directory)

    def refusal(self, what: str) -> InvalidArgument:
        """The error for a use that needs other weights. ``what`` continues a sentence."""
        return InvalidArgument(
            f"{self.directory} has just the shards of {self.shards}, and {what}; to bring all of it, type: "
            f"{pull_command(self.directory)}"
        )

    @contextmanager
    def with_headers(self) -> Iterator[Path]:
        """A directory with a hole behind each header. What computes from the data must be refused."""
        with TemporaryDirectory(prefix="mlxdist-") as name:
            temporary = Path(name)
            for path in self.directory.iterdir():
                if not path.name.startswith(".") and path.suffix != ".safetensors":
                    (temporary / path.name).symlink_to(path.absolute())
            for file in self.files:
                write_header(temporary / file.path.name, file.header, file.size)
            yield temporary

    def _open_files(self, index: Mapping[str, str]) -> list[WeightFile]:
        return [_ShardFile(self, file) for file in self.shards.files]


class _ShardFile(WeightFile):
    """A file of weights of which this host has the header and some slices."""

    def __init__(self, checkpoint: ShardCheckpoint, shards: FileShards) -> None:
        self.checkpoint, self.shards = checkpoint, shards
        self._packed, self._found = checkpoint.shards.path(checkpoint.directory, shards), 0
        super().__init__(checkpoint.directory / shards.name)
        try:
            places = list(_places(self, shards.parts))
        except ValueError as error:
            raise self.damaged(str(error)) from None
        end = places[-1].end if places else len(self.header)
        if end != self._found:
            raise self.damaged(f"it has {self._found} bytes, and its shards would have {end}")
        for place in places:
            full = place.tensor
            self.tensors[full.name] = ShardTensor(full.name, self, full.dtype, full.shape, full.offset, place)

    @property
    def _data(self) -> Path:
        return self._packed

    def _full_size(self, found: int) -> int:
        self._found = found
        return self.shards.size

    def unusable(self, what: str) -> Exception:
        return InvalidArgument(f"{self._packed} {what}")

    def damaged(self, what: str) -> Exception:
        return self.unusable(f"is damaged: {what}; pull the model again")


@dataclass(frozen=True)
class _Place:
    """The place of a tensor among packed shards: its part from ``start`` on, then a sample where it is not all of it.
    ``part``: None for no part."""

    tensor: StoredTensor
    part: Part | None
    start: int

    @property
    def slices(self) -> list[slice]:
        """The slices of the part; none for all of the tensor."""
        return [slice(*piece) for piece in self.part[1]] if self.part else []

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        if self.part is None:
            return 0
        return math.prod(local_shape(self.tensor.shape, self.part[0], self.slices)) * self.tensor.itemsize

    @property
    def sample_runs(self) -> list[tuple[int, int]]:
        """The places of the sample in the file with all tensors; none where all of the tensor is here."""
        return [] if self.part is not None and not self.part[1] else self.tensor.sample_runs

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.start + self.nbytes + sum(length for _, length in self.sample_runs)


def _places(file: WeightFile, parts: Mapping[str, Part]) -> Iterator[_Place]:
    """The places of all tensors of a file, in the order of the file.

    Raises:
        ValueError: a part is of no tensor of the file, or not inside it.
    """
    if unknown := sorted(parts.keys() - file.tensors.keys()):
        raise ValueError(f"it has no tensor {unknown[0]!r:.200}")
    position = len(file.header)
    for tensor in sorted(file.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        part = parts.get(tensor.name)
        axis, pieces = part or ALL
        if pieces and not (axis < len(tensor.shape) and pieces[-1][1] <= tensor.shape[axis]):
            raise ValueError(f"{tensor.name!r:.200} of shape {tensor.shape} has no such part as {part!r:.100}")
        place = _Place(tensor, part, position)
        position = place.end
        yield place


@dataclass(frozen=True)
class ShardTensor(StoredTensor):
    """A tensor of which this host has a part."""

    place: _Place

    def has(self, axis: int, slices: Sequence[slice]) -> bool:
        """Whether these slices can be read."""
        return self._local(axis, slices) is not None

    def read(self, axis: int, slices: Sequence[slice], start: int, memory: memoryview) -> None:
        """Reads as :meth:`StoredTensor.read` does. Raises InvalidArgument: not all of these slices are here."""
        local = self._local(axis, slices)
        if local is None or self.place.part is None:
            assert isinstance(self.file, _ShardFile)
            raise self.file.checkpoint.refusal(f"other weights are read of {self.name}")
        shape = local_shape(self.shape, self.place.part[0], self.place.slices)
        packed = StoredTensor(self.name, self.file, self.dtype, shape, self.place.start)
        packed.read(axis, local, start, memory)

    def sample(self) -> memoryview:
        """The bytes that :meth:`StoredTensor.sample` returns."""
        moved = self.place.start - self.offset
        sampled = [(offset + moved, length) for offset, length in self.sample_runs]
        if self.place.sample_runs:
            sampled = [(self.place.start + self.place.nbytes, sum(length for _, length in sampled))]
        memory = memoryview(bytearray(sum(length for _, length in sampled)))
        self.file.read_runs(sampled, memory)
        return memory

    def _local(self, axis: int, slices: Sequence[slice]) -> list[slice] | None:
        """The slices of the part that are ``slices`` of the tensor; None where it does not have them."""
        if self.place.part is None:
            return None
        held_axis, pieces = self.place.part
        if not pieces:
            return list(slices)
        if axis != held_axis or not slices:
            return None
        local = []
        for wanted in slices:
            number = bisect_right(pieces, wanted.start, key=lambda piece: piece[0]) - 1
            if number < 0 or wanted.stop > pieces[number][1]:
                return None
            moved = sum(stop - start for start, stop in pieces[:number]) - pieces[number][0]
            local.append(slice(wanted.start + moved, wanted.stop + moved))
        return local


class PackedShards:
    """The bytes that a host is to have of a file of weights, as a file that can be opened and read.

    Attributes:
        size: their number.
    """

    def __init__(self, file: WeightFile, parts: Mapping[str, Part]) -> None:
        self.file, self.places = file, list(_places(file, parts))
        self.size = self.places[-1].end if self.places else len(file.header)

    def open(self, mode: str = "rb", buffering: int = 0) -> io.RawIOBase:
        """A reader, like that of a file. ``mode``, ``buffering``: there is no other."""
        return _PackedReader(self)

    def __str__(self) -> str:
        return str(self.file.path)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The places in the full file of bytes ``start`` to ``stop``: pairs of an offset and a length."""
        yield from _cut([(0, len(self.file.header))], start, stop)
        first = max(bisect_right(self.places, start, key=lambda place: place.start) - 1, 0)
        for place in itertools.takewhile(lambda place: place.start < stop, self.places[first:]):
            begin, end = max(start - place.start, 0), min(stop - place.start, place.nbytes)
            if begin < end and place.part is not None:
                yield from runs(place.tensor, place.part[0], place.slices, begin, end)
            behind = place.start + place.nbytes
            yield from _cut(place.sample_runs, start - behind, stop - behind)


class _PackedReader(io.RawIOBase):
    def __init__(self, packed: PackedShards) -> None:
        self._packed, self._position = packed, 0
        self._opened = packed.file.path.open("rb", buffering=0)

    def fileno(self) -> int:
        return self._opened.fileno()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer)
        memory = memory[: max(self._packed.size - self._position, 0)]
        try:
            self._packed.file.read_runs(self._packed.runs(self._position, self._position + len(memory)), memory)
        except InvalidArgument as error:  # as other files fail
            raise OSError(str(error)) from error
        self._position += len(memory)
        return len(memory)

    def close(self) -> None:
        self._opened.close()
        super().close()


def _cut(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Bytes ``start`` to ``stop`` of runs, one after the other."""
    for offset, length in pieces:
        begin, end = max(start, 0), min(stop, length)
        if begin < end:
            yield offset + begin, end - begin
        start, stop = start - length, stop - length
