"""Saves a checkpoint: plans which rank writes which arrays, compares the ranks' states, and writes the files."""

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError, name_ranks
from mlxdist.base.safetensors_reader import ITEM_SIZES
from mlxdist.nn.layout.cut import Cut
from mlxdist.runtime.group.group import Group

from .directory import file_name
from .files import Snapshot, dtype_name, size_of_tensors, sync, write_tensors
from .manifest import Array, File, Manifest, cut_from_json, cut_to_json, stored
from .ranks import gather, together
from .state import State

__all__ = ["SavePlan", "make_plan", "require_equal", "sizes_to_write", "write"]

_ALL_BYTES = 4096  # of an array of which all bytes are compared over the ranks; else of its beginning and its end
_SAMPLE_BYTES = 256
_MAX_FILE_BYTES = 200  # of what the manifest says about a file


@dataclass
class SavePlan:
    """A plan of which rank writes which arrays, valid while the arrays have the same shapes and cuts.

    Attributes:
        writers: the ranks that have a file, which are numbered in this order.
        arrays: the arrays of the manifest.
        mine: the paths of the arrays that this rank writes.
        same: for each path of this rank, the ranks that hold the same part of the array.
    """

    cuts: dict[str, Cut]
    kinds: dict[str, tuple]
    writers: list[int]
    arrays: dict[str, Array]
    mine: list[str]
    same: dict[str, list[int]]

    def is_for(self, state: State) -> bool:
        return self.kinds == _kinds(state) and self.cuts == state.cuts


def make_plan(state: State, group: Group) -> SavePlan:
    """Plans a save. Collective. A part that several ranks hold goes to the one of them with the least to write so far.

    Raises:
        InvalidArgument: ranks have different dtypes or full shapes of an array.
    """
    own = {
        path: [dtype, state.cuts[path].shape, cut_to_json(state.cuts[path])]
        for path, (dtype, _) in _kinds(state).items()
    }
    everyones = gather(own, group)
    arrays: dict[str, Array] = {}
    holders: dict[tuple[str, Cut], list[int]] = {}
    for rank, theirs in enumerate(everyones):
        for path, (dtype, shape, cut) in theirs.items():
            array = arrays.setdefault(path, Array(dtype, tuple(shape)))
            if (array.dtype, array.shape) != (dtype, tuple(shape)):
                raise InvalidArgument(
                    f"Checkpoints.save: '{path}' is {dtype} of shape {tuple(shape)} on rank {rank}, but {array.dtype} "
                    f"of shape {array.shape} on another one"
                )
            holders.setdefault((path, cut_from_json(shape, cut)), []).append(rank)
    load = [0] * group.size()
    parts: list[tuple[str, Cut, int]] = []
    for (path, cut), ranks in holders.items():
        if nbytes := math.prod(cut.local_shape) * ITEM_SIZES[arrays[path].dtype]:
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += nbytes
            parts.append((path, cut, writer))
    writers = sorted({writer for _, _, writer in parts})
    for path, cut, writer in parts:
        arrays[path].parts.append((writers.index(writer), cut))
    mine = [path for path, _, writer in parts if writer == group.rank()]
    same = {path: holders[path, stored(cut)] for path, cut in state.cuts.items()}
    return SavePlan(dict(state.cuts), _kinds(state), writers, arrays, mine, same)


def require_equal(plan: SavePlan, state: State, snapshots: Mapping[str, Snapshot], group: Group) -> dict[str, Any]:
    """The values of all ranks. Collective.

    Raises:
        InvalidArgument: ranks differ in an array or a value that they should have alike; of large arrays, only some
            bytes are compared.
    """
    everyones = gather([state.values, _digests(plan, snapshots, lambda path, ranks: str(ranks))], group)
    values: dict[str, Any] = {}
    for rank, (theirs, _) in enumerate(everyones):
        for path, value in theirs.items():
            if values.setdefault(path, value) != value:
                raise _differing(path, f"{values[path]!r:.50} and, on rank {rank}, {value!r:.50}")
    if _difference([digests for _, digests in everyones]):
        by_path = gather(_digests(plan, snapshots, lambda path, ranks: f"{path} {name_ranks(ranks)}"), group)
        path, ranks = _difference(by_path).split(" ", 1)
        raise _differing(path, f"of {ranks}")
    return values


def sizes_to_write(
    directory: Path, tensors: Mapping[str, Snapshot], manifest: Manifest, plan: SavePlan, rank: int, is_lead: bool
) -> list[int]:
    """The sizes of the files and directories that :func:`write` makes on ``rank``; that of the manifest, whose sums are
    not known yet, at most."""
    sizes = []
    if rank in plan.writers:
        sizes.append(size_of_tensors(tensors, _metadata(manifest)))
    if is_lead:
        sizes.append(len(manifest.to_text()) + _MAX_FILE_BYTES * len(plan.writers))
        sizes += [] if directory.is_dir() else [1]
    return sizes


def write(
    directory: Path,
    token: str,
    tensors: Mapping[str, Snapshot],
    manifest: Manifest,
    plan: SavePlan,
    group: Group,
    is_lead: bool,
    prune: Callable[[], None],
) -> None:
    """Writes this rank's file; then, when all have theirs, the manifest; then removes what is not to stay. Collective.

    Args:
        directory: the directory of the step.
        token: names the files of this save.
        is_lead: whether this rank writes the manifest, and removes, in its directory.

    Raises:
        ResourceError: on all ranks, where one could not write. Its files are removed then, or by the next save.
    """
    path = directory / file_name(group.rank(), group.size(), token)

    def write_file() -> Any:
        directory.mkdir(parents=True, exist_ok=True)
        if group.rank() not in plan.writers:
            return None
        written = write_tensors(path, tensors, _metadata(manifest))
        sync(directory)
        return written

    def write_manifest() -> None:
        if is_lead:
            sync(directory.parent)
            manifest.write(directory)

    def remove() -> None:
        if is_lead:
            prune()

    try:
        written = together(_on_disk(write_file, path), group)
    except ResourceError:  # of one rank, and all know it; after PeerLost another may have gone on to the manifest
        with contextlib.suppress(OSError):  # other ranks may have files in the directory, or an earlier save
            path.unlink(missing_ok=True)
            directory.rmdir()
        raise
    names = {rank: file_name(rank, group.size(), token) for rank in plan.writers}
    manifest.files = [File(name, *written[rank]) for rank, name in names.items()]
    # Only now: a directory with a manifest is a checkpoint, so the files of all ranks must be on the disk before.
    together(_on_disk(write_manifest, directory), group)
    together(_on_disk(remove, directory.parent), group)


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {"mlxdist_step": str(manifest.step), "mlxdist_run": manifest.run}


def _on_disk(function: Callable[[], Any], path: Path) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return function()
        except OSError as error:
            raise ResourceError(f"Checkpoints.save: {path} could not be written: {error}") from error

    return call


def _kinds(state: State) -> dict[str, tuple]:
    return {path: (dtype_name(array), array.shape) for path, array in state.arrays.items()}


def _sample(data: memoryview) -> bytes:
    if len(data) <= _ALL_BYTES:
        return bytes(data)
    return bytes(data[:_SAMPLE_BYTES]) + bytes(data[-_SAMPLE_BYTES:])


def _digests(
    plan: SavePlan, snapshots: Mapping[str, Snapshot], key_of: Callable[[str, list[int]], str]
) -> dict[str, int]:
    """Digests of the parts that several ranks hold, by key."""
    digests: dict[str, int] = {}
    for path, ranks in plan.same.items():
        if len(ranks) > 1:
            key = key_of(path, ranks)
            digests[key] = zlib.crc32(_sample(snapshots[path].data), zlib.crc32(path.encode(), digests.get(key, 0)))
    return digests


def _difference(everyones: list[dict[str, int]]) -> str:
    """The first key for which ranks have different digests, or nothing."""
    found: dict[str, int] = {}
    different = {
        key for digests in everyones for key, digest in digests.items() if found.setdefault(key, digest) != digest
    }
    return min(different, default="")


def _differing(path: str, how: str) -> InvalidArgument:
    return InvalidArgument(
        f"Checkpoints.save: the ranks have different values of '{path}': {how}. What is sharded is saved as such where "
        "the tree has the model itself, or cuts= says how; what each rank has of its own belongs into own="
    )
