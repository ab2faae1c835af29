"""Gradient accumulation: the gradients of micro-batches are added up before the ranks average them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument

__all__ = ["Kept", "MicroBatch", "arrays_of", "current", "elements_of", "split", "working_on"]

MicroBatch = tuple[tuple, dict[str, Any]]  # the arguments of fn


@dataclass
class Kept:
    """Arrays that modules which communicate by themselves keep from one micro-batch of a step to the next.

    Attributes:
        parameters: gathered ones, by what the module calls them.
        gradients: sums of gradients that travel with the last micro-batch, which takes them out.
        is_last: whether the gradients that are computed now complete the sum.
    """

    parameters: dict[Any, mx.array] = field(default_factory=dict)
    gradients: dict[Any, mx.array] = field(default_factory=dict)
    is_last: bool = False


_current: ContextVar[Kept | None] = ContextVar("current", default=None)


def current() -> Kept | None:
    """The :class:`Kept` of the step that is computed now; ``None`` outside a step, or if it has one micro-batch."""
    return _current.get()


@contextmanager
def working_on(kept: Kept, number: int, count: int) -> Iterator[None]:
    """The gradients of micro-batch ``number`` of ``count`` are computed within."""
    kept.is_last = number == count - 1
    token = _current.set(kept if count > 1 else None)
    try:
        yield
    finally:
        _current.reset(token)


def split(name: str, count: int, args: tuple, kwargs: dict[str, Any]) -> list[MicroBatch]:
    """The arguments of each micro-batch: every array of one dimension or more is cut along its first, the rest shared.

    Arrays are of MLX or NumPy, also in dicts, lists and tuples, but not in modules.

    Raises:
        InvalidArgument: an array does not divide into ``count`` equal parts, or there is none. It begins with ``name``.
    """
    if count == 1:
        return [(args, kwargs)]
    lengths = {}
    for path, leaf in _flatten((args, kwargs)):
        if _is_batch(leaf):
            lengths[path] = leaf.shape[0]
    for path, length in lengths.items():
        if length % count:
            down = length - length % count
            raise InvalidArgument(
                f"{name}: argument {path} has {length} rows, which do not divide into micro_batches={count} "
                f"equal parts; give {f'{down} or ' if down else ''}{down + count} rows, or another number"
            )
    if not lengths:
        raise InvalidArgument(
            f"{name}: micro_batches={count} divides arrays among the arguments along their first axis, but there are "
            "none"
        )
    return [_part(args, kwargs, number, count) for number in range(count)]


def arrays_of(arguments: MicroBatch) -> list[mx.array]:
    """The arrays of a micro-batch."""
    return [mx.array(leaf) for _, leaf in _flatten(arguments) if _is_batch(leaf)]


def elements_of(arguments: MicroBatch) -> int:
    """The number of elements of the largest array among the arguments, at least 1."""
    return max((int(leaf.size) for _, leaf in _flatten(arguments) if _is_batch(leaf)), default=1)


def _part(args: tuple, kwargs: dict[str, Any], number: int, count: int) -> MicroBatch:
    def part(leaf: Any) -> Any:
        if not _is_batch(leaf):
            return leaf
        rows = leaf.shape[0] // count
        return leaf[number * rows : (number + 1) * rows]

    return tree_map(part, (args, kwargs), is_leaf=_is_module)


def _flatten(arguments: MicroBatch) -> list[tuple[str, Any]]:
    """(name, leaf): "0" is the first positional argument, "tokens.0" in the argument ``tokens``."""
    pairs: list[tuple[str, Any]] = []
    for tree in arguments:
        found: Any = tree_flatten(tree, is_leaf=_is_module)
        pairs += found
    return pairs


def _is_module(node: Any) -> bool:
    return isinstance(node, nn.Module)


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, mx.array | np.ndarray) and leaf.ndim > 0
