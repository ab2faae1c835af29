"""Collects the arrays of a tree, with their cuts, and its values for a checkpoint, and puts them back into the tree.

A tree consists of dicts and lists. They hold arrays, values of JSON, models, and objects with a state: optimizers,
positions in data.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.models.cuts import cuts as cuts_of

__all__ = ["State", "collect", "put_back"]

_VALUES = (bool, int, float, str, type(None))


@dataclass
class State:
    """A rank's part of a tree, by path.

    Attributes:
        arrays: the arrays of this rank.
        cuts: how each array is cut from the full one.
        values: leaves that are no arrays.
        modules: how the parameters of each model are cut.
        stateful: the paths of objects with a state. A checkpoint may have more arrays below them than the objects now:
            an optimizer that has done no step has no moments.
        kinds: the kind of each optimizer among them.
        elsewhere: the parameters of the models that only other ranks have, since they are of other stages.
    """

    arrays: dict[str, mx.array] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, dict[str, Cut]] = field(default_factory=dict)
    stateful: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def __or__(self, other: "State") -> "State":
        return State(
            self.arrays | other.arrays,
            self.cuts | other.cuts,
            self.values | other.values,
            self.modules | other.modules,
            self.stateful + other.stateful,
            self.kinds | other.kinds,
            self.elsewhere | other.elsewhere,
        )

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters of all models, in these."""
        return {name for cuts in self.modules.values() for name in cuts}

    def add_cut(self, path: str, array: mx.array) -> None:
        """Adds the cut of an array that belongs to no module: that of the parameter for which an optimizer has it."""
        cut = self.cut_of_parameter(path)
        if cut is None or (not cut.is_full and array.size == 1 and math.prod(cut.local_shape) != 1):
            cut = Cut.full(array.shape)  # such as a number of steps for each parameter
        elif cut.is_full:
            cut = Cut.full(array.shape)
        elif cut.local_shape != array.shape:
            raise InvalidArgument(
                f"'{path}' has the shape {array.shape}, and its parameter, of which each rank has a part, has here "
                f"{cut.local_shape}: how it is cut is not known; pass what it is in as own=, which each rank saves for "
                "itself"
            )
        self.cuts[path] = cut

    def cut_of_parameter(self, path: str) -> Cut | None:
        """The cut of the parameter whose path is part of this: ``layers.0.weight`` in ``optimizer.layers.0.weight.m``.

        If several modules have such a parameter, the one nearest to ``path`` in the tree counts.
        """
        parts = list(_parts(path))
        found: dict[str, Cut] = {}
        for module, cuts in self.modules.items():
            if match := next((part for part in parts if part in cuts), None):
                found[module] = cuts[match]
        return found[max(found, key=lambda module: _common(module, path))] if found else None

    def is_elsewhere(self, path: str) -> bool:
        """Whether a path belongs to a parameter that only other ranks have."""
        return self.cut_of_parameter(path) is None and any(part in self.elsewhere for part in _parts(path))


def collect(
    tree: Any, cuts: Mapping[str, Cut] | None = None, prefix: str = "", *, trainable_only: bool = False
) -> State:
    """Collects a tree. ``cuts``: those of arrays of the tree itself, by path. ``prefix``: begins all paths; each array
    is full then. ``trainable_only``: leaves out the frozen parameters of models.

    Raises:
        InvalidArgument: the tree has something else in it; a key has a dot or a slash, is empty or a number as in a
            list, or no string; a number is not finite; it is not known how an array is cut.
    """
    state, stateful = State(), []
    given = dict(cuts or {})
    for path, node in _nodes(tree, prefix):
        if isinstance(node, nn.Module):
            found = {} if prefix else cuts_of(node)
            state.modules[path] = found
            parameters = node.trainable_parameters() if trainable_only else node.parameters()
            for name, array in _nodes(parameters, path):
                state.arrays[name] = array
                state.cuts[name] = found.get(name.removeprefix(f"{path}."), Cut.full(array.shape))
        elif _has_state(node):
            stateful.append((path, node))
        else:
            _add(state, path, node, given)
    for path, node in stateful:
        state.stateful.append(path)
        if isinstance(node, optim.Optimizer):
            state.kinds[path] = _kind(node)
        for name, leaf in _nodes(node.state, path):
            _add(state, name, leaf, given)
    if given:
        raise InvalidArgument(f"cuts has '{min(given)}', but the tree has no such array")
    for path, cut in state.cuts.items():
        if cut.local_shape != state.arrays[path].shape:
            raise InvalidArgument(f"'{path}' has the shape {state.arrays[path].shape}, but its cut {cut.local_shape}")
    return state


def put_back(tree: Any, saved: Mapping[str, Any], prefix: str = "") -> Any:
    """Puts arrays and values, by path, into the tree, in place. Returns the node to put into the tree above."""
    if isinstance(tree, nn.Module):
        tree.update(_below(prefix, saved))
    elif isinstance(tree, dict):
        for key, node in tree.items():
            tree[key] = put_back(node, saved, _join(prefix, key))
    elif isinstance(tree, list):
        for index, node in enumerate(tree):
            tree[index] = put_back(node, saved, _join(prefix, index))
    elif isinstance(tree, tuple):
        return tuple(put_back(node, saved, _join(prefix, index)) for index, node in enumerate(tree))
    elif not _has_state(tree):
        return saved[prefix]
    elif restore := getattr(tree, "restore", None):
        restore(_below(prefix, saved))
    else:
        tree.state = _with_empty(_below(prefix, saved), tree.state)
    return tree


def _with_empty(saved: Any, own: Any) -> Any:
    """``saved`` with the dicts and lists of ``own`` that have no leaves: a checkpoint has leaves alone. Such are the
    states of layers that have nothing to train."""
    if not isinstance(own, dict | list | tuple):
        return saved
    if not saved:
        return own if not tree_flatten(own) else saved
    for key, node in own.items() if isinstance(own, dict) else enumerate(own):
        if isinstance(saved, list) and key == len(saved):
            saved.append({})
        before = saved.get(key) if isinstance(saved, dict) else saved[key]
        if (found := _with_empty(before, node)) is not None:
            saved[key] = found
    return saved


def _kind(optimizer: optim.Optimizer) -> str:
    """The kind of an optimizer, which must be equal where its state is loaded."""
    if isinstance(optimizer, optim.MultiOptimizer):
        return f"MultiOptimizer({', '.join(map(_kind, optimizer.optimizers))})"
    return getattr(optimizer, "kind", type(optimizer).__name__)


def _has_state(node: Any) -> bool:
    return not isinstance(node, mx.array | type) and hasattr(node, "state")


def _add(state: State, path: str, leaf: Any, given: dict[str, Cut]) -> None:
    if isinstance(leaf, mx.array):
        state.arrays[path] = leaf
        if (cut := given.pop(path, None)) is not None:
            state.cuts[path] = cut
        else:
            state.add_cut(path, leaf)
    elif not isinstance(leaf, _VALUES):
        raise InvalidArgument(
            f"the leaf '{path}' is a {type(leaf).__name__}, not an mx.array, a number, a string, a model or an "
            "optimizer; make it one"
        )
    elif isinstance(leaf, float) and not math.isfinite(leaf):
        raise InvalidArgument(f"the leaf '{path}' is {leaf}; make it an mx.array")
    else:
        state.values[path] = leaf


def _nodes(tree: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the leaves and models of a tree with their paths. ``above``: the ids of the containers around it."""
    if isinstance(tree, nn.Module) or not isinstance(tree, dict | list | tuple):
        yield path, tree
        return
    if id(tree) in above:
        raise InvalidArgument(f"the tree contains itself at '{path}'; save it without that reference")
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, node in entries:
        if isinstance(tree, dict):
            _check_key(key, path)
        yield from _nodes(node, _join(path, key), (*above, id(tree)))


def _check_key(key: Any, path: str) -> None:
    if not isinstance(key, str) or not key or "." in key or "/" in key or key.isdecimal():
        raise InvalidArgument(
            f"the key {key!r:.100} in '{path}' is not a string without a dot and a slash that is no number; name it "
            "otherwise"
        )


def _below(path: str, saved: Mapping[str, Any]) -> Any:
    start = _join(path, "")
    return tree_unflatten([(name[len(start) :], leaf) for name, leaf in saved.items() if name.startswith(start)])


def _join(path: str, key: str | int) -> str:
    if not path or path.endswith("/"):
        return f"{path}{key}"
    return f"{path}.{key}"


def _parts(path: str) -> Iterator[str]:
    """Yields each run of names in a path: for "a.b.c", "a.b.c", "a.b", "a", "b.c", "b", "c"."""
    names = path.split(".")
    return (".".join(names[a:b]) for a in range(len(names)) for b in range(len(names), a, -1))


def _common(a: str, b: str) -> int:
    """The length of the beginning that two paths share."""
    return next((i for i, (x, y) in enumerate(zip(a.split("."), b.split("."))) if x != y), len(a))
