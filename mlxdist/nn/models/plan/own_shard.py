"""Finds out what a model's own ``shard(group)`` shards, without a group of that size and without the weights.

Some methods of mlx-lm's models call MLX's ``shard_linear`` and ``shard_inplace``, others slice arrays by hand, so what
they shard is not read from their calls but observed: ``shard`` runs, as each rank, on a copy of the model whose
parameters are the numbers 0, 1, 2 ... along one axis; what comes out says which of them the rank keeps. In the first
run, on zeros that are never evaluated, only the shapes are looked at, which say along which axis each parameter is
sharded. In the second the parameters are one element wide along all other axes, so that a look costs nothing.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.nn.layout.modules import dtype_name, parameters
from mlxdist.nn.tensor_parallel.linear_layers import COLUMN_SHARDED, ROW_SHARDED

from .parameters import Shard, runs_of

__all__ = ["NotUsable", "observe"]

REPLACEABLE = (nn.Linear, nn.QuantizedLinear)
SHARDED = (*COLUMN_SHARDED, *ROW_SHARDED)


class NotUsable(Exception):
    """The model's own shard() is not right for this model and number of ranks; the text says why."""


class _Rank:
    """The two methods of a group that ``shard`` calls."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def observe(model: nn.Module, ranks: int) -> dict[str, Shard]:
    """How ``model.shard(group)`` shards each parameter in a group of ``ranks``. The model is not changed.

    Raises NotUsable if it fails, leaves out something of an axis, or shards heads that cannot be sharded.
    """
    full = parameters(model)
    before, after = _run(
        model, lambda path, module, array: mx.zeros(_narrowed(path, module, array), array.dtype), 0, ranks
    )
    axes = {path: _cut_axis(path, before[path], after) for path in full}
    marks = lambda path, module, array: _marks(path, module, array, axes[path])
    held = [_run(model, marks, rank, ranks)[1] for rank in range(ranks)]
    return {path: _shard(path, array, axes[path], held) for path, array in full.items()}


def _run(
    model: nn.Module, replace: Callable[[str, nn.Module, mx.array], mx.array], rank: int, ranks: int
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Runs shard() on a copy of the model with other parameters. Returns the parameters before and after it."""
    copied = _copy(model, "", replace, {})
    before, attributes = parameters(copied), _integers(copied)
    kinds = {path: type(module) for path, module in copied.named_modules()}
    try:
        copied.shard(_Rank(rank, ranks))
    except Exception as error:  # whatever it is that a foreign method raises
        raise NotUsable(f"model.shard() fails for {ranks} ranks: {type(error).__name__}: {error}") from error
    for path, module in copied.named_modules():
        if type(module) in SHARDED and kinds[path] not in (*REPLACEABLE, type(module)):
            raise NotUsable(f"model.shard() makes a plain linear layer of {path}, a {kinds[path].__name__}")
    after = _integers(copied)
    for name, number in attributes.items():
        if name in after and after[name] != number and number % ranks:
            raise NotUsable(f"model.shard() would shard {name} = {number} over {ranks} ranks")
    return before, parameters(copied)


def _copy(value: Any, path: str, replace: Callable, copies: dict[int, Any]) -> Any:
    """A copy of a tree of modules, with the parameters replaced. An object that is in it twice is copied once."""
    if id(value) in copies:
        return copies[id(value)]
    inside = lambda key: f"{path}.{key}" if path else str(key)
    if isinstance(value, nn.Module):
        copied = copies[id(value)] = type(value).__new__(type(value))
        vars(copied).update({key: _copy(item, inside(key), replace, copies) for key, item in vars(value).items()})
        for key, item in value.items():
            if isinstance(item, mx.array) and not key.startswith("_"):
                copied[key] = replace(inside(key), value, item)
            else:
                copied[key] = _copy(item, inside(key), replace, copies)
        return copied
    if isinstance(value, dict):
        return {key: _copy(item, inside(key), replace, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item, inside(index), replace, copies) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) or isinstance(value, set):
        return copy.copy(value)
    return value


def _integers(model: nn.Module) -> dict[str, int]:
    """The integer attributes of all modules: numbers of heads are among them."""
    return {
        f"{path}.{name}": number
        for path, module in reversed(model.named_modules())
        for name, number in vars(module).items()
        if type(number) is int
    }


def _narrowed(path: str, module: nn.Module, array: mx.array, axis: int | None = None) -> tuple[int, ...]:
    """The shape of what stands for a parameter: one element, or one quantization group, along the axes not sharded.

    Where the axis is not known yet, experts are left out but for one: shard() shards all of them inside, and may
    evaluate them.
    """
    if axis is None:
        experts = array.ndim == 3 and not {"experts", "switch_mlp"}.isdisjoint(path.split("."))
        return (1, *array.shape[1:]) if experts else array.shape
    bits, group_size = getattr(module, "bits", None), getattr(module, "group_size", None)
    words = bits * group_size // 32 if bits and group_size and array.dtype == mx.uint32 else 1
    shape = [1] * array.ndim
    shape[-1] = min(words, array.shape[-1])
    shape[axis] = array.shape[axis]
    return tuple(shape)


def _cut_axis(path: str, before: mx.array, parameters_after: dict[str, mx.array]) -> int | None:
    """The axis along which shard() shards the parameter at ``path``; None if its shape stays."""
    if path not in parameters_after:
        raise NotUsable(f"model.shard() removes {path}")
    after = parameters_after[path]
    # Axes of length 1 may come and go by a reshape.
    changed = [axis for axis, length in enumerate(before.shape) if length != 1]
    if before.ndim == after.ndim:
        changed = [axis for axis in range(before.ndim) if before.shape[axis] != after.shape[axis]]
    elif len(changed) != 1:
        raise NotUsable(f"model.shard() reshapes {path} from {before.shape} to {after.shape}")
    if len(changed) > 1:
        raise NotUsable(f"model.shard() shards {path} along {len(changed)} axes")
    return changed[0] if changed else None


def _marks(path: str, module: nn.Module, array: mx.array, axis: int | None) -> mx.array:
    """The numbers 0, 1, 2 ... along the axis; ones for what is not sharded."""
    if axis is None:
        return mx.broadcast_to(mx.ones(()), _narrowed(path, module, array))
    shape = _narrowed(path, module, array, axis)
    along = [1] * array.ndim
    along[axis] = array.shape[axis]
    numbers = mx.broadcast_to(mx.arange(array.shape[axis]).reshape(along), shape)
    return numbers.astype(mx.uint32 if array.dtype == mx.uint32 else mx.float32)


def _shard(path: str, array: mx.array, axis: int | None, held_by: list[dict[str, mx.array]]) -> Shard:
    shape, dtype = array.shape, dtype_name(array)
    if axis is None:
        scale = float(np.array(held_by[0][path][(0,) * array.ndim])) if array.size else 1.0
        return Shard(path, "full", shape, dtype, scale=scale)
    ranges = []
    for shards in held_by:
        marks = shards[path]
        if marks.ndim == array.ndim:
            marks = marks[tuple(slice(None) if i == axis else 0 for i in range(array.ndim))]
        ranges.append(tuple(runs_of(np.array(marks).reshape(-1).astype(int).tolist())))
    held = {index for pieces in ranges for start, stop in pieces for index in range(start, stop)}
    if len(held) != shape[axis]:
        raise NotUsable(
            f"model.shard() leaves out {shape[axis] - len(held)} of {shape[axis]} along axis {axis} of {path}"
        )
    # Linear layers hold (outputs, inputs), experts one more axis before these, single numbers belong to outputs.
    kind = "row" if axis == array.ndim - 1 and array.ndim > 1 and not path.endswith(".bias") else "column"
    return Shard(path, kind, shape, dtype, axis, tuple(ranges))
