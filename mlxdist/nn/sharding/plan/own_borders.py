"""The borders of the blocks that a model's own ``shard(group)`` has cut.

Those methods are made for inference: an ``AllToShardedLinear`` sums the gradient of its input, but what else of a block
reads that input, and the parameters that all ranks hold, have a share of their gradients only. The blocks are found by
what ``shard`` has put in: a ``ShardedToAllLinear`` ends one, and one with a ``sharding_group`` copies its input and
sums its result itself. Whether that is all of it is known for the files of mlx-lm that the tests compare.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group import Group

from .block_parts import join_path
from .borders import Border
from .parameters import parameters
from .plan import Plan

__all__ = ["cut_by_itself"]

_ENDS = (ShardedToAllLinear, QuantizedShardedToAllLinear)


def cut_by_itself(model: nn.Module, plan: Plan, group: Group) -> None:
    """Calls ``model.shard`` and puts a border around each block that it cuts."""
    held = parameters(model)
    # Arrays of their own: shard() divides in place.
    unscaled = {path: mx.array(held[path]) for path, shard in plan.shards.items() if shard.scale != 1}
    model.shard(group.mlx)
    modules = dict(model.named_modules())
    for path, array in unscaled.items():  # a rank multiplies it where it uses it
        where, _, name = path.rpartition(".")
        modules[where][name] = array
    for path, block, enters in list(_blocks(modules)):
        unscaled = {name: array for name, array in unscaled.items() if not name.startswith(f"{path}.")}
        behind = {join_path(path, name, "bias") for name, child in block.items() if isinstance(child, _ENDS)}
        inside = [shard for name, shard in plan.shards.items() if name.startswith(f"{path}.") and name not in behind]
        Border(group, group.rank(), enters).put(block, path, inside)
    if unscaled:
        raise InvalidArgument(f"model.shard() divides {min(unscaled)}, which is in no block that it cuts")


def _blocks(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """The blocks that were cut, with their paths, and whether their inputs are still to be copied."""
    ends = [path.rpartition(".")[0] for path, module in modules.items() if isinstance(module, _ENDS)]
    yield from ((path, modules[path], True) for path in dict.fromkeys(ends))
    for path, module in modules.items():
        # That of a whole model is for its vocabulary.
        within = any(end == path or end.startswith(f"{path}.") for end in ends) or not path
        if getattr(module, "sharding_group", None) is not None and not within:
            yield path, module, False
