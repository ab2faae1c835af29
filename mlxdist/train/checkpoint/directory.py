"""The directory of a run's checkpoints: what is in it, who may write there, and what is removed.

    checkpoints/
      lock                                          held by the job that saves here
      step-00000100/
        rank-0-of-2-1f3a9c2e.safetensors            what rank 0 has written
        rank-1-of-2-1f3a9c2e.safetensors
        manifest.json                               written last: without it this is no checkpoint

Each save gives its files names that no other one has, so one of the same step replaces the manifest alone, and until
then the one before is complete. A directory may be on a disk that all ranks see, or each host has one of its own.
"""

import contextlib
import errno
import fcntl
import os
import re
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.runtime.group.default_group import current_run
from mlxdist.runtime.group.group import Group

from .files import Unusable, sync
from .manifest import MANIFEST, File, Manifest
from .ranks import gather, together

__all__ = [
    "STEP_DIGITS",
    "checked_path",
    "file_name",
    "find_disk",
    "Lock",
    "prune",
    "remove",
    "require_next",
    "size_of",
    "step_directory",
    "steps",
]

STEP_DIGITS = 18  # at most: each such step is an int64
_STEP = re.compile(rf"step-([0-9]{{8,{STEP_DIGITS}}})")
_OURS = re.compile(r"rank-[0-9]+-of-[0-9]+-[0-9a-f]{8}\.safetensors|manifest\.json(\.writing)?", re.ASCII)

# Of this process, which may have several objects for a directory. A file that none of them has is closed.
_locks: "weakref.WeakValueDictionary[Path, BinaryIO]" = weakref.WeakValueDictionary()


def checked_path(name: str, path: Any) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"{name}: {path!r} is no path")
    return Path(text).expanduser()


def step_directory(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08}"


def file_name(rank: int, ranks: int, token: str) -> str:
    """``token``: 8 hexadecimal digits of this save."""
    return f"rank-{rank}-of-{ranks}-{token}.safetensors"


def steps(name: str, directory: Path) -> list[int]:
    """The steps that have a directory, in ascending order, complete or not. ``name``: the caller's, for errors.

    Raises:
        InvalidArgument: the directory is a file.
        ResourceError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise InvalidArgument(f"{name}: {directory} is a file, not a directory; choose another name") from None
    except OSError as error:
        raise ResourceError(f"{name}: {directory} cannot be read: {error.strerror}") from None
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def size_of(path: Path, file: File) -> os.stat_result | None:
    """The status of a file that this rank sees in full size; otherwise None."""
    try:
        found = (path / file.name).stat()
    except OSError:
        return None
    return found if found.st_size == file.size else None


def find_disk(directory: Path, token: str, group: Group) -> int:
    """The lowest rank that sees the same directory. Collective.

    Raises:
        ResourceError: on all ranks, where one of them cannot write there.
    """
    own = directory / f".{token}-{group.rank()}"

    def place() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            own.touch(exist_ok=False)
        except OSError as error:
            raise ResourceError(f"Checkpoints: {directory} cannot be written: {error.strerror}") from None

    try:
        together(place, group)
        # By name, and not in a list of names, which NFS keeps for a while.
        lowest = next(rank for rank in range(group.size()) if (directory / f".{token}-{rank}").exists())
        gather(None, group)
    finally:
        with contextlib.suppress(OSError):  # that of place()
            own.unlink()
    return lowest


class Lock:
    """The lock of the job that saves into a directory, held while there is such an object. The system releases it when
    the process ends, in whatever way.

    Raises:
        InvalidArgument: another process has it.
        ResourceError: its file cannot be written.
    """

    def __init__(self, directory: Path, run: str) -> None:
        path = directory.resolve() / "lock"
        self._path, known = path, _locks.get(path)
        if known is not None:
            self._file = known
        if known is None or not self.is_there:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _locks[path] = _locked(path)
            except OSError as error:
                raise ResourceError(f"Checkpoints: {path} cannot be written: {error.strerror}") from None
            self._file.truncate(0)
            self._file.write(f"run {run}, process {os.getpid()} on {Environment.read().host_name}\n".encode())

    @property
    def is_there(self) -> bool:
        """Whether the file is still the one that is locked: a directory can be removed, and made again."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False


def _locked(path: Path) -> BinaryIO:
    file = path.open("ab+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.seek(0)
            owner = file.read(300).decode(errors="replace").strip()
            raise InvalidArgument(
                f"Checkpoints: another job saves into {path.parent} ({owner}); end it, or choose another directory"
            ) from None
        # A network file system without locks: the runs in the manifests must do.
    return file


def require_next(
    directory: Path, step: int, runs: Collection[str], known: Collection[int], damaged: Collection[int]
) -> None:
    """Requires that a checkpoint of ``step`` may be saved: none is later, and the last one is of these runs.

    ``known``: steps whose runs are known to be among these; ``damaged``: steps that do not count.

    Raises:
        InvalidArgument: it may not be saved.
    """
    for found in reversed(steps("Checkpoints.save", directory)):
        path = step_directory(directory, found)
        if found in damaged or not (path / MANIFEST).exists():
            continue
        try:
            run = None if found in known else Manifest.read(path).run
        except Unusable:
            continue
        if run is not None and run not in runs:
            raise InvalidArgument(
                f"Checkpoints.save: {directory} has a checkpoint of step {found} of another run, {run}; this one is "
                f"{current_run()}. To go on with it, load it first with load(..., other_run=True); to begin from step "
                f"0, remove {directory} or choose another directory"
            )
        if found > step:
            raise InvalidArgument(
                f"Checkpoints.save: {directory} has a checkpoint of step {found}, later than {step}; remove it, or "
                "choose another directory"
            )
        return


def prune(
    directory: Path, kept: Callable[[list[int]], Collection[int]], saved: int, damaged: Collection[int], is_shared: bool
) -> None:
    """Removes what a save of step ``saved`` that is complete makes superfluous.

    It removes files that earlier saves of that step have left; checkpoints that are known as damaged, or have no
    manifest; complete checkpoints up to ``saved`` that ``kept``, which gets all of these in ascending order, does not
    return; and incomplete ones that are older than all that stay. ``is_shared``: whether all ranks see this directory.

    Raises OSError.
    """
    earlier, complete = [], []
    for step in steps("Checkpoints", directory):
        path = step_directory(directory, step)
        try:
            manifest = Manifest.read(path)
        except Unusable:
            manifest = None
        if step == saved and manifest is not None:
            remove(path, keep={MANIFEST, *(file.name for file in manifest.files)})
        if (step in damaged and step != saved) or not (path / MANIFEST).exists():
            remove(path)
        elif step <= saved:
            earlier.append(step)
            if manifest is not None and _is_whole(path, manifest, is_shared):
                complete.append(step)
    remaining = set(kept(complete))
    # One that is damaged does not count. It goes with those that are older than what stays.
    for step in earlier:
        if step not in remaining and (step in complete or step < min(remaining, default=0)):
            remove(step_directory(directory, step))


def remove(path: Path, keep: Collection[str] = ()) -> None:
    """Removes a checkpoint for good: after a loss of power it is gone, too. The manifest goes first; files that are not
    ours stay.

    Raises OSError.
    """
    names = [name for name in os.listdir(path) if _OURS.fullmatch(name) and name not in keep]
    for name in sorted(names, key=lambda name: name != MANIFEST):
        (path / name).unlink(missing_ok=True)
        if name == MANIFEST:
            sync(path)
    if not os.listdir(path):
        path.rmdir()
        sync(path.parent)


def _is_whole(path: Path, manifest: Manifest, is_shared: bool) -> bool:
    """Whether the files of a checkpoint have their full sizes; a directory of one host needs only those it has."""
    there = [file for file in manifest.files if is_shared or (path / file.name).exists()]
    return all(size_of(path, file) for file in there)
