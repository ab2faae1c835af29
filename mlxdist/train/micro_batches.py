"""Micro-batches: a batch in parts, whose gradients are added up before the ranks average them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument

__all__ = ["is_last", "split", "working_on"]

_is_last = ContextVar("is_last", default=True)


def is_last() -> bool:
    """Whether the gradients that are computed now complete the sum: in the last micro-batch, and where there are none.

    For modules that communicate gradients themselves: those of other micro-batches may wait on their rank.
    """
    return _is_last.get()


@contextmanager
def working_on(number: int, count: int) -> Iterator[None]:
    """The gradients of micro-batch ``number`` of ``count`` are computed within."""
    token = _is_last.set(number == count - 1)
    try:
        yield
    finally:
        _is_last.reset(token)


def split(name: str, count: int, args: tuple, kwargs: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of each micro-batch: every array of one dimension or more is cut along its first, the rest shared.

    Arrays are of MLX or NumPy, also in dicts, lists and tuples, but not in modules.

    Raises:
        InvalidArgument: an array does not divide into ``count`` equal parts, or there is none. Begins with ``name``.
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
                f"{name}: argument {path} has {length} rows, which do not divide into accumulate={count} "
                f"micro-batches; give {f'{down} or ' if down else ''}{down + count} rows, or another number"
            )
    if not lengths:
        raise InvalidArgument(
            f"{name}: accumulate={count} divides arrays among the arguments along their first axis, but there are none"
        )
    return [_part(args, kwargs, number, count) for number in range(count)]


def _part(args: tuple, kwargs: dict[str, Any], number: int, count: int) -> tuple[tuple, dict[str, Any]]:
    def part(leaf: Any) -> Any:
        if not _is_batch(leaf):
            return leaf
        rows = leaf.shape[0] // count
        return leaf[number * rows : (number + 1) * rows]

    return tree_map(part, (args, kwargs), is_leaf=_is_module)


def _flatten(arguments: tuple[tuple, dict[str, Any]]) -> list[tuple[str, Any]]:
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
