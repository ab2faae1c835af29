"""Gradient checkpointing of functions that hold expert-parallel layers.

``mx.checkpoint`` computes a function a second time in the backward pass. Nothing says there that this waits for the
cotangents, so the collectives of one layer's second pass and those of the next layer's gradient have an order that
depends on the graph, which differs between ranks with other tokens: they fail with `Mismatch`.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mx.checkpoint`` of a ``function``, but its second pass waits for the cotangents.

    Gradients go to the arrays among the arguments, which may be in lists, tuples and dicts, as in ``mx.checkpoint``.
    """

    @wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        result = None

        def run(arrays: list[mx.array]) -> list[mx.array]:
            nonlocal result
            positional, named = _with_arrays([args, kwargs], arrays)
            result = function(*positional, **named)
            return _arrays(result)

        def gradient(primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
            primals = mx.depends(primals, [*cotangents, *outputs])
            return mx.vjp(lambda *arrays: run(list(arrays)), primals, cotangents)[1]

        step: Any = mx.custom_function(run)
        step.vjp(gradient)
        outputs = step(_arrays([args, kwargs]))  # sets the result
        return _with_arrays(result, outputs)

    return checkpointed


def _arrays(tree: Any) -> list[mx.array]:
    found: dict[str, Any] = {}
    tree_flatten(tree, is_leaf=_is_module, destination=found)
    return [leaf for leaf in found.values() if isinstance(leaf, mx.array)]


def _with_arrays(tree: Any, arrays: Iterable[mx.array]) -> Any:
    """The same tree with other arrays, in the order of :func:`_arrays`."""
    left = iter(arrays)
    return tree_map(lambda leaf: next(left) if isinstance(leaf, mx.array) else leaf, tree, is_leaf=_is_module)


def _is_module(tree: Any) -> bool:
    return isinstance(tree, nn.Module)  # a dict, but its arrays are no arguments
