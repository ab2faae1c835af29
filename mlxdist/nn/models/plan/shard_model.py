"""Shards a full model, in place, as a plan says: afterwards this rank holds its shard and all ranks compute together.

The blocks that a model's own ``shard(group)`` makes parallel are found by what ``shard`` has put in: a
``ShardedToAllLinear`` ends one, and one with a ``sharding_group`` copies its input and sums its result itself. The
models' methods are made for inference: an ``AllToShardedLinear`` sums the gradient of its input, but all else of a
block that reads this input, and the parameters that all ranks hold, get a share of their gradients only. Whether a
model has more of this is known for the files of mlx-lm whose gradients the tests compare, and for no others.
"""

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.equal_inputs import compare_inputs
from mlxdist.nn.expert_parallel.switch_glu import ExpertParallelSwitchGLU, set_path
from mlxdist.nn.interception import become, with_result
from mlxdist.nn.layout.modules import join_path, parameters
from mlxdist.nn.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from mlxdist.nn.rank_checks import agreed, described
from mlxdist.nn.tensor_parallel.linear_layers import COLUMN_SHARDED, ROW_SHARDED
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from .block import Block
from .blocks import expert_shares, find_blocks
from .parallel_region import ParallelRegion, refuse_training, why_not
from .plan import OWN_SHARD, Plan

__all__ = ["ShardedRMSNorm", "shard_model", "why_not_trained"]


def shard_model(model: nn.Module, plan: Plan, *, group: GroupLike | None = None) -> nn.Module:
    """Shards ``model`` in place as ``plan`` says and returns it. Collective: all ranks of ``group`` call it.

    Nothing is evaluated: parameters that are lazy stay lazy, so that a rank need never hold the full model. With the
    result the ranks compute what one process computes with the full model, for the same input on every rank.
    The KV cache, made after this, is of this rank's heads.

    It trains as the full model would: the gradients are this rank's shards of the full model's, and those of what all
    ranks hold are the same on all. Where mlxdist does not know that of a model, a gradient of it is an InvalidArgument
    that says why (docs/models.md has the list).

    Args:
        model: unsharded, the one that the plan was made for.
        plan: of :func:`mlxdist.nn.plan_shards`, the same on all ranks.
        group: of ``plan.ranks`` ranks; ``None`` is the group of ``mlxdist.init()``. With ``plan.ep`` > 1 the ranks are
            a grid, rank = ep_index * tp + tp_index.

    Raises, with the same text on all ranks and before anything is changed, InvalidArgument: the plan is for another
    model or number of ranks, the model is sharded already. Mismatch: the ranks have different plans or models. A
    call of the model raises Mismatch on all ranks where one calls it with other arrays, such as tokens that it has
    sampled with another seed. InvalidArgument, when ``model.shard()`` has changed the model already: it divides a
    parameter that is in no block that it shards.
    """
    group = group_of(group)
    compared: dict[str, object] = {}  # as it is behind the block
    with agreed("shard_model", group, compared, described(model)):
        try:
            blocks = _check(model, plan, group)
        except InvalidArgument as error:
            raise InvalidArgument(f"shard_model: {error}") from error
        compared["plan"] = crc32(plan.to_json().encode())
    if plan.ranks == 1:
        return model
    tp_group = group if plan.ep == 1 else group_of(group.split(color=group.rank() // plan.tp))
    reason = _why_not_trained(model, plan, blocks)
    if plan.how == OWN_SHARD:
        _shard_by_own_method(model, plan, tp_group)
    else:
        modules = dict(model.named_modules())
        for block in blocks:
            _shard_block(block, modules, plan, group, tp_group)
    if reason:
        refuse_training(model, reason)
    return compare_inputs(model, group)


def why_not_trained(model: nn.Module, plan: Plan) -> str | None:
    """Why a gradient of the model, sharded by its plan, is rejected; None if it is not. ``model`` is still full."""
    return _why_not_trained(model, plan, [] if plan.how == OWN_SHARD else _blocks_of(model, plan))


def _why_not_trained(model: nn.Module, plan: Plan, blocks: list[Block]) -> str | None:
    if plan.how == OWN_SHARD:
        return why_not(model)
    for block in blocks:
        # One that is not called, but only its layers, has no parallel region.
        unknown = block.roles.get(block.path) == "group" or not callable(block.module)
        if unknown and (reason := why_not(block.module)):
            return reason
    return None


def _check(model: Any, plan: Any, group: Group) -> list[Block]:
    """The blocks that the plan shards. Raises InvalidArgument where this rank's arguments are wrong."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be an mlx.nn.Module, not {type(model).__name__}")
    if not isinstance(plan, Plan):
        raise InvalidArgument(f"plan must be a Plan of plan_shards, not {type(plan).__name__}")
    if plan.ranks != group.size():
        raise InvalidArgument(
            f"the plan is for tp={plan.tp} x ep={plan.ep} = {plan.ranks} ranks, the group has {group.size()}"
        )
    plan.check(model)
    if plan.how == OWN_SHARD:
        if not hasattr(model, "shard"):
            raise InvalidArgument(f"the plan uses model.shard(), which {type(model).__name__} does not have")
        return []
    # What the patterns of this version find is carried out.
    blocks = _blocks_of(model, plan)
    found = {path: shard for block in blocks for path, shard in block.shards.items()}
    for path, shard in plan.shards.items():
        now = found.get(path)
        if (shard.ranges, shard.scale) != ((now.ranges, now.scale) if now else ((), 1.0)):
            raise InvalidArgument(
                f"the plan does not shard {path} as this version of mlxdist does: make it again with plan_shards"
            )
    return blocks


def _blocks_of(model: nn.Module, plan: Plan) -> list[Block]:
    """The blocks that the patterns shard."""
    return find_blocks(model, plan.tp, plan.ep, plan.rank_shares)[0] if plan.ranks > 1 else []


def _shard_by_own_method(model: nn.Module, plan: Plan, group: Group) -> None:
    """Calls ``model.shard`` and puts a parallel region around each block that it shards."""
    held = parameters(model)
    # Arrays of their own: shard() divides in place.
    unscaled = {path: mx.array(held[path]) for path, shard in plan.shards.items() if shard.scale != 1}
    model.shard(group.mlx)
    modules = dict(model.named_modules())
    # MLX's slices leave out one of all or of nothing: of lazy parameters the graphs of ranks would differ.
    cut = {path: shard.take(held[path], group.rank()) for path, shard in plan.shards.items() if shard.ranges}
    for path, array in (cut | unscaled).items():  # a rank multiplies what is unscaled where it uses it
        where, _, name = path.rpartition(".")
        modules[where][name] = array
    for path, block, enters in list(_sharded_blocks(modules)):
        unscaled = {name: array for name, array in unscaled.items() if not name.startswith(f"{path}.")}
        _put_region(block, path, plan, group, group.rank(), enters)
    if unscaled:
        raise InvalidArgument(f"model.shard() divides {min(unscaled)}, which is in no block that it shards")
    for module in model.modules():
        if type(module).__name__ == "ShardedRMSNorm":  # of mlx-lm, whose sum has the gradient of one rank
            _sum_squares(module, group)


def _sharded_blocks(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """The blocks that were sharded, with their paths, and whether their inputs are still to be copied."""
    ends = [path.rpartition(".")[0] for path, module in modules.items() if isinstance(module, ROW_SHARDED)]
    yield from ((path, modules[path], True) for path in dict.fromkeys(ends))
    for path, module in modules.items():
        # That of a full model is for its vocabulary.
        within = any(end == path or end.startswith(f"{path}.") for end in ends) or not path
        if getattr(module, "sharding_group", None) is not None and not within:
            yield path, module, False


def _shard_block(block: Block, modules: dict[str, nn.Module], plan: Plan, group: Group, tp_group: Group) -> None:
    """Carries out what the patterns found in one block."""
    if (role := block.roles.pop(block.path, None)) == "experts":
        shares = expert_shares(plan.rank_shares, plan.ep)
        experts = ExpertParallelSwitchGLU.from_switch(block.module, group=group, rank_shares=shares)
        set_path(experts, block.path)
        _replace(modules, block.path, experts)
        return
    for path, shard in block.shards.items():
        where, _, name = path.rpartition(".")
        module = modules[where]
        module[name] = shard.take(module[name], group.rank())
    for (path, name), values in block.attributes.items():
        setattr(modules[path], name, values[group.rank()])
    for path, kind in block.roles.items():
        layer = modules[path]
        if kind == "norm":
            _sum_squares(layer, tp_group)
        else:
            kinds = COLUMN_SHARDED if kind == "column" else ROW_SHARDED
            become(layer, kinds[isinstance(layer, nn.QuantizedLinear)])
            layer.group = tp_group.mlx
    if role == "group":
        block.module.sharding_group = tp_group.mlx
    # What works on heads inside of attention is called with this rank's own.
    enters = role not in ("group", "inside")
    _put_region(block.module, block.path, plan, tp_group, group.rank(), enters)
    if role == "sum":
        summand = type(block.module)
        become(block.module, with_result(summand, _summed, f"Summed{summand.__name__}"))
        block.module._group = tp_group


def _put_region(block: nn.Module, path: str, plan: Plan, group: Group, rank: int, enters: bool) -> None:
    """Puts a parallel region around a block that is sharded already."""
    # A bias that is added behind the sum over the ranks sees what all of them see.
    behind = {join_path(path, name, "bias") for name, child in block.items() if isinstance(child, ROW_SHARDED)}
    inside = [shard for name, shard in plan.shards.items() if name.startswith(f"{path}.") and name not in behind]
    ParallelRegion(group, rank, enters).put(block, path, inside)


def _replace(modules: dict[str, nn.Module], path: str, layer: nn.Module) -> None:
    where, _, name = path.rpartition(".")
    while where not in modules:  # it is in a list or a dict of a module
        where, _, more = where.rpartition(".")
        name = f"{more}.{name}"
    modules[where].update_modules(tree_unflatten([(name, layer)]))


def _sum_squares(layer: nn.Module, group: Group) -> None:
    become(layer, ShardedRMSNorm)
    layer._group = group


def _summed(layer: Any, share: mx.array) -> mx.array:
    return reduce_from_tensor_parallel_region(share, group=layer._group)


class ShardedRMSNorm(nn.RMSNorm):
    """An RMSNorm over a last axis that is sharded over the ranks: the squares are added up over the ranks.

    x: (..., this rank's shard); the result has its shape, and the dtype that nn.RMSNorm gives. Sizes may differ between
    ranks.
    """

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        sums = mx.concatenate([wide.square().sum(axis=-1, keepdims=True), mx.full((*x.shape[:-1], 1), x.shape[-1])], -1)
        # The sum is used by all ranks, and so is its gradient.
        sums = copy_to_tensor_parallel_region(
            reduce_from_tensor_parallel_region(sums, group=self._group), group=self._group
        )
        mean = sums[..., :1] / sums[..., 1:]
        # Rounded once, to the dtype of the result, as in MLX: the weight may be wider than x.
        dtype = mx.result_type(x, self["weight"])
        return (wide * mx.rsqrt(mean + self.eps)).astype(dtype) * self["weight"]
