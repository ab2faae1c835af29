"""The files of a model on this host: in a folder, or in the local cache of Hugging Face's hub as `hf download` lays it.

The cache keeps contents in blobs/, under their hash, and names in snapshots/COMMIT/, as links to them. refs/main has
the commit that a name stands for.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.model_directory import hub_directory, hub_snapshot
from mlxdist.base.safetensors_reader import INDEX, MAX_INDEX_BYTES, all_of_names
from mlxdist.base.validation import build, checked, list_of, number, object_of, printable, read_bounded

__all__ = [
    "MAX_MANIFEST_BYTES",
    "Folder",
    "HubCache",
    "Manifest",
    "ModelFile",
    "Place",
    "missing_weights",
    "parse_config",
]

MAX_FILES = 4096
_MAX_CONFIG_BYTES = 16 * 2**20
MAX_MANIFEST_BYTES = MAX_FILES * 1024
_MAX_NAME, _MAX_PART = 512, 200
_MAX_FILE_BYTES = 2**50
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def _file_name(what: str, value: Any) -> str:
    """A check for a path inside the directory of a model: no way leads out of it, and no part is hidden."""
    if type(value) is not str or not 0 < len(value.encode()) <= _MAX_NAME or printable(value) != value:
        raise ValueError(f"{what} is no name of a file: {value!r:.80}")
    parts = value.split("/")
    if "\\" in value or any(not part or part.startswith(".") or len(part.encode()) > _MAX_PART for part in parts):
        raise ValueError(f"{what} {value!r:.80} is hidden, or leads out of the model's directory")
    return value


def _hash_name(what: str, value: Any) -> str:
    if type(value) is not str or (value and not _HASH.fullmatch(value)):
        raise ValueError(f"{what} {value!r:.80} is no hash")
    return value


@dataclass(frozen=True)
class ModelFile:
    """A file of a model. ``blob``: its name in the hub's cache, a hash of what is in it; empty outside."""

    name: str = checked(_file_name)
    size: int = checked(number(0, _MAX_FILE_BYTES))
    blob: str = checked(_hash_name, "")


@dataclass(frozen=True)
class Manifest:
    """The files of a model on one host. ``commit``: of the hub; empty for a folder. ``missing``: names of files with
    weights that the index has, or without one the names of others say there are, and this host has not."""

    commit: str = checked(_hash_name)
    files: tuple[ModelFile, ...] = checked(list_of(object_of(ModelFile), MAX_FILES))
    missing: tuple[str, ...] = checked(list_of(_file_name, MAX_FILES))

    @property
    def is_complete(self) -> bool:
        """Whether there are weights, and all of them."""
        return any(file.name.endswith(".safetensors") for file in self.files) and not self.missing

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        """The manifest as JSON, which :meth:`from_json` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Raises ValueError: the text is no manifest, or has a name or size that no model has."""
        return build(cls, parse_json(text))


class Folder:
    """A model in a folder. ``source``: where this host may have it, if it is written to another folder."""

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.root = path
        self._source = path if source is None or not source.is_dir() else source

    def source(self, manifest: Manifest) -> Path:
        """The directory of the model, to read from."""
        return self._source

    def directory(self, manifest: Manifest) -> Path:
        """The directory of the model, to write to."""
        return self.root

    def manifest(self) -> Manifest | None:
        """The files that this host has of the model; None without its config.json."""
        if not (self._source / "config.json").is_file():
            return None
        return _manifest(
            "", self._source, [ModelFile(*_name_and_size(self._source, path)) for path in _files(self._source)]
        )

    def readable(self, manifest: Manifest, file: ModelFile) -> Path:
        """The path to read a file from, if this host has it."""
        return self._source / file.name

    def writable(self, manifest: Manifest, file: ModelFile) -> Path:
        """The path to write a file to."""
        return self.root / file.name

    def finish(self, manifest: Manifest) -> None:
        """Does nothing: a folder is complete with its files."""


class HubCache:
    """A model of Hugging Face's hub, in the local cache of this user."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.root = hub_directory(name)

    def source(self, manifest: Manifest) -> Path:
        """The directory of the model, to read from."""
        return self.directory(manifest)

    def directory(self, manifest: Manifest) -> Path:
        """The directory of the model, to write to."""
        return self.root / "snapshots" / manifest.commit

    def manifest(self) -> Manifest | None:
        """The files that this host has of the commit that refs/main names; None without a config.json."""
        snapshot = hub_snapshot(self._name)
        if snapshot is None or not (snapshot / "config.json").is_file():
            return None
        found = []
        for path in _files(snapshot):
            blob = path.resolve()
            in_cache = blob.parent == (self.root / "blobs").resolve() and _HASH.fullmatch(blob.name)
            found.append(ModelFile(*_name_and_size(snapshot, path), blob.name if in_cache else ""))
        return _manifest(snapshot.name, snapshot, found)

    def readable(self, manifest: Manifest, file: ModelFile) -> Path:
        """The path to read a file from, if this host has it."""
        return self.writable(manifest, file)

    def writable(self, manifest: Manifest, file: ModelFile) -> Path:
        """The path to write a file to: the blob, if the name of that is known."""
        return self.root / "blobs" / file.blob if file.blob else self.directory(manifest) / file.name

    def finish(self, manifest: Manifest) -> None:
        """Gives the files their names, and then the commit the name "main", by which others find it."""
        for file in manifest.files:
            path = self.directory(manifest) / file.name
            if file.blob and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)  # a link to a blob that was removed
                path.symlink_to(os.path.relpath(self.root / "blobs" / file.blob, path.parent))
        main = self.root / "refs" / "main"
        if not main.is_file() or main.read_bytes().strip() != manifest.commit.encode():
            main.parent.mkdir(parents=True, exist_ok=True)
            replace_file(main, manifest.commit, 0o644)


Place = Folder | HubCache


def parse_config(path: Path) -> Any:
    """The content of a config.json. Raises ValueError: it is too large, or not JSON; OSError: it cannot be read."""
    return parse_json(read_bounded(path, _MAX_CONFIG_BYTES))


def missing_weights(directory: Path, names: Sequence[str]) -> list[str]:
    """Names of files with weights that are not among ``names``: those of the index of a model, or without one those
    that other names say there are.

    Raises:
        InvalidArgument: the index is damaged, or names a file outside of the model's directory.
    """
    path = directory / INDEX
    if INDEX not in names:
        return sorted(all_of_names(names) - set(names))
    try:
        weight_map = parse_json(read_bounded(path, MAX_INDEX_BYTES))["weight_map"]
        listed = {_file_name("weight_map", name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} is damaged: {error}; remove it, and pull the model again") from None
    return sorted(listed - set(names))


def _manifest(commit: str, directory: Path, files: list[ModelFile]) -> Manifest:
    names = [file.name for file in files]
    manifest = Manifest(commit, tuple(files), tuple(missing_weights(directory, names)))
    try:
        return Manifest.from_json(manifest.to_json())
    except ValueError as error:
        raise InvalidArgument(f"{directory} cannot be copied to other hosts: {error}") from None


def _files(directory: Path) -> list[Path]:
    """All files below a directory but hidden ones, such as those that are still written."""
    found = []
    for path in sorted(directory.rglob("*")):
        if not any(part.startswith(".") for part in path.relative_to(directory).parts) and path.is_file():
            found.append(path)
            if len(found) > MAX_FILES:
                raise InvalidArgument(f"{directory} has more than {MAX_FILES} files; give the directory of one model")
    return found


def _name_and_size(directory: Path, path: Path) -> tuple[str, int]:
    return str(PurePosixPath(path.relative_to(directory))), path.stat().st_size
