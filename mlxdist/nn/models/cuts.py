"""How this rank's parameters are parts of those of a full model, whatever has sharded it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import FullyShardedModule

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from ..expert_parallel.local_experts import expert_cut, projections
from ..expert_parallel.switch_glu import ExpertParallelSwitchGLU
from ..layout.cut import Cut
from ..layout.modules import join_path, own_arrays, parameters
from ..split_block import SplitBlock
from ..tensor_parallel.linear_layers import COLUMN_SHARDED, ROW_SHARDED
from ..tensor_parallel.lora import LoRALinear
from ..tensor_parallel.parallel_attention import ParallelAttention
from ..tensor_parallel.parallel_linear import Sharded

__all__ = ["cuts"]


def cuts(model: nn.Module) -> dict[str, Cut]:
    """How each parameter of ``model`` is cut, by its path: that of ``tree_flatten(model.parameters())``.

    It covers models and layers that are full, those of :func:`mlxdist.nn.shard_model` and
    :func:`mlxdist.nn.load_sharded` with the adapters on them, the layers of :mod:`mlxdist.nn`, MLX's
    ``nn.layers.distributed.shard_linear`` (of one segment), and each module with a method ``cuts()`` that returns the
    same for the parameters in it that it has sharded, such as what ``fully_shard`` makes. No collective.

    Raises:
        InvalidArgument: how a module is sharded is not known; the text says which.
    """
    modules = model.named_modules()  # the outer ones first
    found: dict[str, Cut] = {}
    for path, module in modules:
        if callable(own := getattr(type(module), "cuts", None)):
            found |= {join_path(path, name): cut for name, cut in own(module).items()}
    for path, module in modules:
        for name, cut in _cuts_of(module):
            # What is sharded once more is known already, and has another shape now.
            if (name := join_path(path, name)) not in found:
                found[name] = cut()
    return {path: found.get(path) or Cut.full(array.shape) for path, array in parameters(model).items()}


def _cuts_of(module: nn.Module) -> Iterator[tuple[str, Callable[[], Cut]]]:
    """The cuts of a module's parameters that the module itself shows, without full parameters."""
    if region := vars(module).get("_region"):  # of a block of shard_model, in which some layers are full
        yield from region.cuts(module)
    elif isinstance(module, ExpertParallelSwitchGLU):
        yield from _of_experts(module)
    elif isinstance(module, ParallelAttention):
        yield from _of_shared_heads(module)
    elif isinstance(module, Sharded):
        sharded = [(name, array) for name, array in own_arrays(module) if module.shards(name)]
        yield from ((name, partial(module.cut, array.shape, module.shard_axis)) for name, array in sharded)
    elif isinstance(module, LoRALinear):
        name, axis = ("lora_b", 1) if module.linear.shard_axis == 0 else ("lora_a", 0)
        yield name, partial(module.linear.cut, module[name].shape, axis)
    elif isinstance(module, (*COLUMN_SHARDED, *ROW_SHARDED)) and "_inside" not in vars(module):
        # One inside of a block its region has named above, or all ranks hold it: mlx-lm's shard() makes such a layer of
        # KV heads that are fewer than the ranks, too.
        yield from _of_mlx(module)
    elif isinstance(module, FullyShardedModule | SplitBlock):
        instead = (
            "fully_shard of mlxdist.train" if isinstance(module, FullyShardedModule) else "shard_model of mlxdist.nn"
        )
        raise InvalidArgument(f"cuts: a {type(module).__name__} does not say how it is sharded; use {instead}")


def _of_experts(layer: ExpertParallelSwitchGLU) -> Iterator[tuple[str, Callable[[], Cut]]]:
    names = projections(layer)
    for name in names:
        for path, array in parameters(layer[name]).items():
            key = path.rpartition(".")[2]
            yield join_path(name, path), partial(expert_cut, key, array.shape, name == names[-1], layer._sharding)


def _of_shared_heads(layer: ParallelAttention) -> Iterator[tuple[str, Callable[[], Cut]]]:
    """The cuts of KV projections whose heads ranks share: the layers alone would count each rank's heads as its own."""
    for name in ("k_proj", "v_proj") if layer.shares_kv_heads else ():
        for key, array in own_arrays(layer[name]):
            yield f"{name}.{key}", partial(_of_heads, array.shape, layer.kv_heads, layer.group)


def _of_heads(local: tuple[int, ...], heads: Sequence[range], group: Group) -> Cut:
    each = local[0] // len(heads[group.rank()])
    total = each * (max(held.stop for held in heads))
    ranges = [[(held.start * each, held.stop * each)] for held in heads]
    return Cut.full((total, *local[1:])).along(0, ranges, group)


def _of_mlx(layer: nn.Module) -> Iterator[tuple[str, Callable[[], Cut]]]:
    """The cuts of a layer of MLX, as equal shards of one segment: the layer does not say its segments."""
    column = isinstance(layer, COLUMN_SHARDED)
    for name, array in own_arrays(layer):
        if column or name != "bias":
            yield name, partial(_equal_shards, array.shape, 0 if column else 1, layer.group)


def _equal_shards(local: tuple[int, ...], axis: int, group: mx.distributed.Group) -> Cut:
    size = local[axis]
    full = Cut.full((*local[:axis], size * group.size(), *local[axis + 1 :]))
    return full.along(axis, [[(rank * size, (rank + 1) * size)] for rank in range(group.size())], group)
