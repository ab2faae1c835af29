"""Finds the arrays that pass between a model's layers, and the modules used before, between and after the layers.

The model is called twice, with other shapes, while nothing is computed: MLX is lazy. The arrays that a layer takes are
known by identity: each is the very array that an earlier layer has returned, or a new one.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument

from ..interception import with_methods
from ..layout.modules import dtype_name, source_of
from .missing_layers import holds_parameters_alone, is_known

__all__ = ["Boundary", "Layers", "Like", "Passed", "at", "find_layers", "is_cache", "leaves", "with_value"]

# Batch and length of the two calls. What differs between the shapes of an array is these. Lengths are even: a shard of
# a sequence is two equal chunks.
_SHAPES = ((2, 6), (3, 10))
_BATCH, _LENGTH = -1, -2  # in place of a dimension
_WHEN = ("before", "between", "after")


@dataclass(frozen=True)
class Like:
    """Shape and dtype of an array of each call: -1 stands for the batch, -2 for the length."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    def zeros(self, batch: int, length: int) -> mx.array:
        """An array like it, lazy."""
        return mx.zeros([{_BATCH: batch, _LENGTH: length}.get(size, size) for size in self.shape], self.dtype)


@dataclass(frozen=True)
class Passed:
    """An array that a layer takes from what is before it.

    Attributes:
        at: where it is in ``[positional arguments, keyword arguments]``, as a path of ``mlx.utils``: "0.0".
        origin: which array it is: the same number where other layers take the same one.
        shape: behind the batch; its first is -2, for the length.
        dtype: of MLX.
    """

    at: str
    origin: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def bytes(self) -> int:
        """The bytes of one token."""
        return math.prod(self.shape[1:]) * self.dtype.size

    def __str__(self) -> str:
        names = {_BATCH: "batch", _LENGTH: "length"}
        shape = ", ".join(str(names.get(size, size)) for size in (_BATCH, *self.shape))
        return f"{dtype_name(self.dtype)} of shape ({shape})"


Boundary = tuple[Passed, ...]  # all that a layer takes


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        paths: of each layer in the model.
        taken: what each takes.
        refused: why no stage can begin with it; None: one can.
        results: what each returns, a tree of :class:`Like`.
        caches: where its cache is in its arguments, as for :class:`Passed`; None: it has none.
        outside: when each module that is in no layer and has parameters of its own is used: "before", "between" or
            "after" the layers. By path, without those that have modules inside.
    """

    paths: tuple[str, ...]
    taken: tuple[Boundary, ...]
    refused: tuple[str | None, ...]
    results: tuple[Any, ...]
    caches: tuple[str | None, ...]
    outside: dict[str, frozenset[str]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.paths)}

    def layer_of(self, path: str) -> int | None:
        """The number of the layer that has the parameter at ``path``; None: it is in no layer."""
        return self._numbers.get(_module_of(path, self._numbers))

    def when(self, path: str) -> frozenset[str]:
        """When a parameter that is in no layer is used, as in ``outside``; at any time where that is not known."""
        return self.outside.get(_module_of(path, self.outside), frozenset(("between",)))


def _module_of(path: str, modules: Collection[str]) -> str:
    """The one of ``modules`` that has the parameter at ``path``, itself or in a module inside; "" for none."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


@dataclass
class _Call:
    """A call of a layer: its number, its arguments, and its result."""

    layer: int
    arguments: list[Any]
    result: Any


def find_layers(model: nn.Module) -> Layers:
    """The layers of a model of mlx-lm, which is neither changed nor evaluated.

    Raises:
        InvalidArgument: the model has no ``layers``, or does not call each of them once, one after the other.
    """
    name = source_of(model)
    layers = list(getattr(model, "layers", ()))
    modules = model.named_modules()
    paths = {id(module): path for path, module in modules}
    if not layers or any(id(layer) not in paths for layer in layers):
        raise InvalidArgument(f"the model {name} has no list of its layers in model.layers")
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = {path: module for path, module in modules if id(module) not in inside and holds_parameters_alone(module)}
    ones, used = _recorded(model, layers, outside, _SHAPES[0])
    others, _ = _recorded(model, layers, outside, _SHAPES[1])
    if [call.layer for call in ones] != list(range(len(layers))):
        raise InvalidArgument(f"the model {name} does not call each layer once, one after the other")
    origins: dict[int, int] = {}
    taken = [_taken(one, other, origins) for one, other in zip(ones, others)]
    return Layers(
        tuple(paths[id(layer)] for layer in layers),
        tuple(taken),
        tuple(_why_not(ones, taken, number) for number in range(len(layers))),
        tuple(tree_map(_like, one.result, other.result) for one, other in zip(ones, others)),
        tuple(next((path for path, x in leaves(call.arguments) if is_cache(x)), None) for call in ones),
        {path: frozenset(used.get(path, _WHEN)) for path in outside},
    )


def at(tree: Any, path: str) -> Any:
    """The value in a tree at a path of ``mlx.utils``."""
    for key in path.split("."):
        tree = tree[key if isinstance(tree, dict) else int(key)]
    return tree


def with_value(tree: Any, path: str, value: Any) -> Any:
    """A copy of a tree with another value at ``path``."""
    key, _, rest = path.partition(".")
    new = with_value(at(tree, key), rest, value) if rest else value
    if isinstance(tree, dict):
        return tree | {key: new}
    return type(tree)([new if number == int(key) else old for number, old in enumerate(tree)])


def _recorded(
    model: nn.Module, layers: Sequence[nn.Module], outside: dict[str, nn.Module], shape: tuple[int, int]
) -> tuple[list[_Call], dict[str, set[str]]]:
    """The calls of layers, and when the modules outside are used, in one call of the model."""
    from mlx_lm.models.cache import make_prompt_cache

    numbers = {id(layer): number for number, layer in enumerate(layers)}
    names = {id(module): path for path, module in outside.items()}
    calls: list[_Call] = []
    used: dict[str, set[str]] = {}
    running = False

    def note(module: nn.Module) -> None:
        when = _WHEN[1 if running or 0 < len(calls) < len(layers) else 2 if calls else 0]
        used.setdefault(names[id(module)], set()).add(when)

    def call_layer(kind: Any, self: nn.Module, *args: Any, **keywords: Any) -> Any:
        nonlocal running
        running = True
        result = kind.__call__(self, *args, **keywords)
        running = False
        calls.append(_Call(numbers[id(self)], [list(args), keywords], result))
        return result

    def get_item(kind: Any, self: nn.Module, name: str) -> Any:
        note(self)
        return kind.__getitem__(self, name)

    def get(kind: Any, self: nn.Module, *args: Any) -> Any:
        note(self)
        return kind.get(self, *args)

    with with_methods(layers, __call__=call_layer), with_methods(outside.values(), __getitem__=get_item, get=get):
        model(mx.zeros(shape, mx.int32), cache=make_prompt_cache(model))
    return calls, used


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, with their paths of ``mlx.utils``."""
    flat: Any = tree_flatten(tree) if isinstance(tree, list | tuple | dict) else [("", tree)]
    return flat


def _like(one: Any, other: Any) -> Any:
    """Shape and dtype of an array, seen in both calls; anything else as it is."""
    if not isinstance(one, mx.array):
        return one
    names = {pair: name for name, pair in zip((_BATCH, _LENGTH), zip(*_SHAPES))}
    return Like(tuple(names.get(pair, pair[0]) for pair in zip(one.shape, other.shape)), one.dtype)


def _taken(one: _Call, other: _Call, origins: dict[int, int]) -> Boundary:
    """The arrays that a layer takes and that depend on the tokens: floats with a batch, not masks and positions."""
    others, found = dict(leaves(other.arguments)), []
    for path, x in leaves(one.arguments):
        if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating):
            like = _like(x, others[path])
            if like.shape[:1] == (_BATCH,):
                found.append(Passed(path, origins.setdefault(id(x), len(origins)), like.shape[1:], like.dtype))
    return tuple(found)


def _why_not(calls: Sequence[_Call], taken: Sequence[Boundary], start: int) -> str | None:
    """Why no stage can begin with layer ``start``: later layers need more than it takes."""
    if start == 0:
        return None
    known = {passed.origin for passed in taken[start]}
    returned = {id(x) for call in calls[start:] for _, x in leaves(call.result)}
    caches = {id(x) for call in calls[:start] for _, x in leaves(call.arguments) if is_cache(x)}
    for call, boundary in zip(calls[start:], taken[start:]):
        for passed in boundary:
            if passed.origin not in known and id(at(call.arguments, passed.at)) not in returned:
                return f"layer {call.layer} takes {passed}, which is not what a layer has returned"
        for _, x in leaves(call.arguments):
            if id(x) in caches:
                return f"layer {call.layer} has the cache of an earlier layer"
            if not (isinstance(x, mx.array | int | float | str | None) or is_cache(x) and is_known(x)):
                return f"layer {call.layer} takes a {type(x).__name__}"
    for passed in taken[start]:
        if passed.shape[:1] != (_LENGTH,) or min(passed.shape[1:], default=0) < 0:
            return f"layer {start} takes {passed}, which is not of (batch, length, ...)"
    return None


def is_cache(x: Any) -> bool:
    """Whether ``x`` is a cache as mlx-lm has them."""
    return hasattr(x, "state") and hasattr(x, "nbytes") and not isinstance(x, mx.array)
