"""Clipping gradients by their norm over a mesh: that of one process with the full model.

Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.pipeline_parallel.stage import parameters_of, stage_of
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.collectives import all_sum
from mlxdist.runtime.operations.ordering import Order

__all__ = ["clip_grad_norm"]

AnyGroup = Group | mx.distributed.Group


def clip_grad_norm(
    grads: Any, max_norm: float, *, model: nn.Module | None = None, mesh: Mesh | None = None
) -> tuple[Any, mx.array]:
    """``mlx.optimizers.clip_grad_norm`` of a model that is sharded in any way: each element is counted once.

    Sharded over tp, ep or fsdp, or over several of them, a rank has a part of the gradients; the squares of the others
    come by one all_sum of a few numbers for each group that ``model`` is sharded over, and for the stages of a
    pipeline. Lazy, and works inside ``mx.compile``. Call it after the gradients are averaged over the replicas.

    Args:
        grads: a tree of this rank's gradients, such as that of ``nn.value_and_grad(model, ...)``: floats of any dtype
            in the shapes of this rank's parameters. Squares are added up in float32.
        max_norm: at least 0; gradients with a larger norm are multiplied by ``max_norm / (norm + 1e-6)``.
        model: the model whose gradients they are; ``None``: every rank has all of them, and nothing is sent.
        mesh: the mesh of the job, if it has an axis pp: each stage has parameters of its own.

    Returns:
        The gradients, in their dtypes, and their norm before, a float32 of no dimensions. The norm is bitwise the same
        on all ranks, if gradients of what several ranks hold are.

    Raises:
        InvalidArgument: ``max_norm`` is negative or NaN; a gradient is of no parameter of ``model``, or of another
            shape; how ``model`` is sharded is not known.
    """
    if max_norm < 0 or isnan(max_norm):
        raise InvalidArgument(f"clip_grad_norm: max_norm must be 0 or more, not {max_norm}")
    flat: Any = tree_flatten(grads)
    known = {} if model is None else cuts(model)
    _check(flat, None if model is None else known)
    squares: dict[tuple[AnyGroup, ...], mx.array] = {}
    stage = stage_of(model)
    for path, gradient in flat:
        if stage is not None and parameters_of(stage).holders(path)[0] != stage.index:
            continue  # the first stage that holds it counts it
        cut = known.get(path)
        key = () if cut is None else cut.groups
        squares[key] = squares.get(key, mx.array(0.0)) + _square(gradient, cut)
    total = _sum_over_groups(squares)
    if mesh is not None and mesh.size("pp") > 1:
        total = all_sum(total, group=mesh["pp"])
    norm = mx.sqrt(total)
    factor = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    # Rounded after it is multiplied: in float16 a small factor alone would be 0.
    return tree_map(lambda gradient: (gradient * factor).astype(gradient.dtype), grads), norm


def _check(flat: Sequence[tuple[str, Any]], known: Mapping[str, Cut] | None) -> None:
    for path, gradient in flat:
        if not isinstance(gradient, mx.array) or not mx.issubdtype(gradient.dtype, mx.floating):
            kind = gradient.dtype if isinstance(gradient, mx.array) else type(gradient).__name__
            raise InvalidArgument(f"clip_grad_norm: the gradient of '{path}' must be an mx.array of floats, not {kind}")
        if known is None:
            continue
        if path not in known:
            raise InvalidArgument(
                f"clip_grad_norm: there is a gradient of '{path}', which is no parameter of the model"
            )
        if gradient.shape != known[path].local_shape:
            raise InvalidArgument(
                f"clip_grad_norm: the gradient of '{path}' has the shape {gradient.shape}, and the parameter "
                f"{known[path].local_shape} on this rank"
            )


def _square(gradient: mx.array, cut: Cut | None) -> mx.array:
    """The sum of the squares of the elements that this rank counts."""
    squares = gradient.astype(mx.float32).square()
    if cut is not None and (counted := cut.counted()) is not None:
        squares = mx.where(mx.array(counted), squares, 0.0)
    # MLX leaves out a sum of one element. Another operation in its place keeps the graph, and so the order of
    # collectives, that of the other ranks.
    return (mx.contiguous(squares) if squares.size == 1 else squares).sum()


def _sum_over_groups(squares: Mapping[tuple[AnyGroup, ...], mx.array]) -> mx.array:
    """The sum of all squares, after sums over their groups: one collective for each group."""
    sums, order = dict(squares), Order()
    for group in dict.fromkeys(group for groups in sums for group in groups):
        keys = [groups for groups in sums if group in groups]
        packed = mx.stack([sums[groups] for groups in keys])
        sums |= zip(keys, order.carry_out(partial(_all_sum, group=group), packed))
    return sum(sums.values(), mx.array(0.0))


def _all_sum(x: mx.array, group: AnyGroup) -> mx.array:
    return all_sum(x, group=group) if isinstance(group, Group) else mx.distributed.all_sum(x, group=group)
