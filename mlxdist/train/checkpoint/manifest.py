"""The manifest of a checkpoint, ``manifest.json``: its files, and which file has which part of each array.

It is written last, when the files of all ranks are on the disk, and replaced atomically: a directory without one is no
checkpoint. It has a CRC-32 of each file and of itself. These find accidents, not forgery: a user who may write the
files can compute new ones. CRC-32 takes a sixth of the time of writing, SHA-256 more than the writing itself.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxdist.base.json_reader import parse_json
from mlxdist.nn.layout.cut import Cut

from .files import DTYPES, Unusable, write_synced

__all__ = ["MANIFEST", "Array", "File", "Manifest", "cut_from_json", "cut_to_json", "stored"]

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class File:
    """A rank's file: its name, its size in bytes, and the CRC-32 of its bytes in hexadecimal."""

    name: str
    size: int
    crc32: str


@dataclass
class Array:
    """A full array: the name of its dtype in safetensors, and which file has which part, each under the array's
    path."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[int, Cut]] = field(default_factory=list)


@dataclass
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step, run: the step and the run that it is of; see ``mlxdist.runtime.group.default_group.current_run``.
        saved: the time of the save, in UTC, as ISO 8601.
        ranks: the number of ranks that have written it.
        mesh: the sizes of the mesh's axes, if there was a mesh.
        versions: the versions of mlxdist and MLX.
        files: the files, in the order of the numbers by which the arrays refer to them.
        arrays: the arrays by path. The path of a rank's own array begins with the rank's number: ``0/rng``.
        values: the leaves of the tree that are no arrays, by path.
        kinds: the kinds of the optimizers, by path. Checkpoints of mlxdist 0.1 have none.
    """

    step: int
    run: str
    saved: str
    ranks: int
    mesh: dict[str, int]
    versions: dict[str, str]
    files: list[File]
    arrays: dict[str, Array]
    values: dict[str, Any]
    kinds: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Writes the manifest. Raises OSError."""
        write_synced(directory / MANIFEST, self.to_text().encode())

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Reads the manifest of a directory. Raises Unusable: there is none, or it is damaged."""
        path = directory / MANIFEST
        if path.exists() and not path.is_file():  # reading a named pipe would never end
            raise Unusable(f"has a {MANIFEST} that is no file")
        try:
            return cls.from_text(path.read_bytes())
        except FileNotFoundError:
            raise Unusable(f"has no {MANIFEST}: saving it was not completed") from None
        except OSError as error:
            raise Unusable(f"has a {MANIFEST} that cannot be read: {error.strerror}") from None

    @classmethod
    def from_text(cls, text: bytes) -> "Manifest":
        """Parses a manifest. Raises Unusable: it is damaged."""
        try:
            document = parse_json(text)
            found = document["manifest"]
            if document["crc32"] != _crc(_dumped(found)):
                raise ValueError("its CRC-32 differs")
            if found.pop("format") != _FORMAT:
                raise ValueError("its format is of another version of mlxdist")
            return cls._from_json(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"has a damaged {MANIFEST}: {error}") from None

    def to_text(self) -> str:
        text = self._to_json()
        return f'{{"crc32": "{_crc(text)}", "manifest": {text}}}\n'

    @property
    def nbytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files)

    def _to_json(self) -> str:
        arrays = {
            path: [array.dtype, array.shape, [[file, *cut_to_json(cut)] for file, cut in array.parts]]
            for path, array in self.arrays.items()
        }
        files = [asdict(file) for file in self.files]
        return _dumped({**vars(self), "format": _FORMAT, "files": files, "arrays": arrays})

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> "Manifest":
        files = [File(**file) for file in found.pop("files")]
        if wrong := [file.name for file in files if Path(file.name).name != file.name]:
            raise ValueError(f"{wrong[0]!r:.100} is no name of a file in it")
        arrays = {}
        for path, (dtype, shape, parts) in found.pop("arrays").items():
            cuts = [(int(file), cut_from_json(shape, rest)) for file, *rest in parts]
            if dtype not in DTYPES or not all(0 <= file < len(files) for file, _ in cuts):
                raise ValueError(f"{path!r:.100} has a dtype or a file that does not exist")
            arrays[path] = Array(dtype, tuple(shape), cuts)
        return cls(files=files, arrays=arrays, **found)


def stored(cut: Cut) -> Cut:
    """The cut as a file has it: without the ranks' groups, and without the zeros at the end of a flat array."""
    length = 0 if cut.flat is None else cut.flat[1] - cut.flat[0]
    return replace(cut, groups=(), copies=Cut.full(cut.shape).copies, length=length)


def cut_to_json(cut: Cut) -> list[Any]:
    """The cut for JSON; an empty list for a full array, whose shape is enough."""
    return [] if stored(cut) == Cut.full(cut.shape) else [cut.ranges, cut.flat]


def cut_from_json(shape: list[int], found: list[Any]) -> Cut:
    """The cut of an array of ``shape``, from JSON."""
    full = Cut.full(shape)
    if not found:
        return full
    ranges, flat = found
    if len(ranges) != len(shape):
        raise ValueError(f"an array of {len(shape)} axes has ranges of {len(ranges)}")
    ranges = tuple(tuple((int(start), int(stop)) for start, stop in axis) for axis in ranges)
    return stored(replace(full, ranges=ranges, flat=flat and (int(flat[0]), int(flat[1]))))


# The manifest's own CRC-32 is of this text, and a reader, which has parsed it, must get the same text from the values.
def _dumped(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"))


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
