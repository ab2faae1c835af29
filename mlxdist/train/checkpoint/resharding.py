"""Resharding: whether a checkpoint of other ranks fits a tree, and which parts of it this rank needs."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.cut import Cut

from .files import DTYPES
from .manifest import Manifest
from .state import State

__all__ = ["match"]


def match(manifest: Manifest, state: State) -> tuple[dict[str, Cut], dict[str, Any]]:
    """Returns the arrays of a checkpoint that a rank needs for its state, with the rank's cuts, and the values.

    Raises:
        InvalidArgument: the checkpoint lacks a part of the state, has other shapes or dtypes, or more parameters of a
            model; or it has the state of another optimizer.
    """
    for path, kind in state.kinds.items():
        _check_optimizer(manifest, state, path, kind)
    cuts: dict[str, Cut] = {}
    values: dict[str, Any] = {}
    for path, cut in _wanted(manifest, state):
        if path in manifest.values:
            values[path] = manifest.values[path]
            continue
        array = manifest.arrays.get(path)
        if array is None:
            raise _other(manifest, f"it has no '{path}'")
        if cut is not None and cut.shape != array.shape:
            raise _other(manifest, f"'{path}' has the shape {array.shape} in it, and {cut.shape} here")
        saved = DTYPES[array.dtype]
        if path in state.arrays and state.arrays[path].dtype != saved and _is_parameter(path, state):
            raise InvalidArgument(
                f"Checkpoints.load: '{path}' is {saved} in the checkpoint of step {manifest.step}, and "
                f"{state.arrays[path].dtype} here; call model.set_dtype({saved}) before, and set_dtype again after"
            )
        cuts[path] = cut or Cut.full(array.shape)
    return cuts, values


def _check_optimizer(manifest: Manifest, state: State, path: str, kind: str) -> None:
    """Requires that an optimizer has the same arrays for a parameter as the checkpoint, if both have some."""
    saved, here = (_by_owner(arrays, path) for arrays in (manifest.arrays, state.arrays))
    different = [owner for owner in here.keys() & saved.keys() if here[owner] != saved[owner]]
    before = manifest.kinds.get(path, kind)
    if before == kind and not different:
        return
    what = f"of {before}, and here it is that of {kind}"
    if before == kind:
        owner = min(different)
        what = f"of another {kind}: it has {', '.join(sorted(saved[owner]))} of '{owner}', and here are "
        what += ", ".join(sorted(here[owner]))
    raise InvalidArgument(
        f"Checkpoints.load: '{path}' is the state {what}, in the checkpoint of step {manifest.step}; take the same "
        f"optimizer, or begin with a new state: load the tree without '{path}'"
    )


def _by_owner(arrays: Mapping[str, Any], above: str) -> dict[str, set[str]]:
    """The names of the arrays below ``above``, by the path that they belong to."""
    found: dict[str, set[str]] = {}
    for path in arrays:
        if _is_below(path, above):
            owner, _, name = path.rpartition(".")
            found.setdefault(owner, set()).add(name)
    return found


def _wanted(manifest: Manifest, state: State) -> Iterator[tuple[str, Cut | None]]:
    """Paths, and how each array must be cut; None for one that is full and may have any shape."""
    for path in (*state.arrays, *state.values):
        if not any(_is_below(path, above) for above in state.stateful):
            cut = state.cuts.get(path)
            yield path, None if cut is None or (cut.is_full and not _is_parameter(path, state)) else cut
    for path in (*manifest.arrays, *manifest.values):
        if state.elsewhere and state.is_elsewhere(path):
            continue
        if any(_is_below(path, above) for above in state.stateful):
            cut = state.cut_of_parameter(path)
            is_same = path in manifest.arrays and cut is not None and cut.shape == manifest.arrays[path].shape
            yield path, cut if is_same else None
        elif path not in state.arrays and _is_parameter(path, state):
            raise _other(manifest, f"it has '{path}', which the model here has not")


def _is_parameter(path: str, state: State) -> bool:
    return any(_is_below(path, module) for module in state.modules)


def _is_below(path: str, above: str) -> bool:
    """Whether a path is below another. All of the tree is below "", but not what a rank has of its own."""
    return path.startswith(f"{above}.") if above else "/" not in path


def _other(manifest: Manifest, how: str) -> InvalidArgument:
    return InvalidArgument(f"Checkpoints.load: the checkpoint of step {manifest.step} is of another model: {how}")
