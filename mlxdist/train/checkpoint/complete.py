"""Finds the complete checkpoints in a directory."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from .directory import step_directory, steps
from .files import Unusable
from .manifest import MANIFEST, Manifest
from .ranks import gather, together
from .reading import Reader

__all__ = ["Problems", "complete", "none_usable"]


class Problems(dict[int, str]):
    """Why checkpoints are not complete, by step. ``damaged``: the steps whose checkpoints have been complete."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[int] = set()

    def add(self, step: int, problem: str, was_complete: bool = True) -> None:
        self[step] = problem
        if was_complete:
            self.damaged.add(step)


def complete(name: str, directory: Path, group: Group, problems: Problems) -> Iterator[Reader]:
    """Yields readers of the complete checkpoints, the last step first: ranks see all files, in full size. Collective.

    Disks of different hosts may have different checkpoints of a step: then each complete one is yielded. The problems
    of the others go into ``problems``. ``name``: the caller's name, for errors.

    Raises:
        InvalidArgument, ResourceError: as :func:`steps`, on all ranks.
    """
    everyones = together(lambda: steps(name, directory), group)
    for step in sorted(set().union(*everyones), reverse=True):
        path = step_directory(directory, step)
        for manifest in _manifests(path, step, group, problems):
            reader = Reader(path, manifest, group)
            if missing := reader.missing():
                problems.add(step, f"lacks the file {missing}, or it is not as long as it was")
            else:
                yield reader


def none_usable(directory: Path, step: int | None, problems: Problems) -> InvalidArgument:
    """The error where ``step``, or where all that there are, cannot be loaded."""
    if step is not None and step not in problems:
        return InvalidArgument(f"Checkpoints.load: {directory} has no checkpoint of step {step}")
    which = problems if step is None else {step: problems[step]}
    why = "; that of ".join(f"step {step} {problem}" for step, problem in sorted(which.items()))
    return InvalidArgument(
        f"Checkpoints.load: the checkpoint of {why}. To begin from step 0, remove {directory} or choose another "
        "directory"
    )


def _manifests(path: Path, step: int, group: Group, problems: Problems) -> list[Manifest]:
    """The manifests that ranks have of a step, without duplicates, in the order of the ranks."""
    own, problem = None, ""
    try:
        own = Manifest.read(path).to_text()
    except Unusable as error:
        problem = str(error)
    there = gather([own and zlib.crc32(own.encode()), problem, (path / MANIFEST).exists()], group)
    senders = {digest: rank for rank, (digest, _, _) in reversed(list(enumerate(there))) if digest}
    if not senders:
        problems.add(step, there[0][1], any(exists for _, _, exists in there))
    texts = gather(own if group.rank() in senders.values() else None, group)
    return [Manifest.from_text(texts[rank].encode()) for rank in sorted(senders.values())]
