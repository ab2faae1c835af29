"""Whether arrays are of a model that is sharded over ranks: what one rank holds of it is no checkpoint of the model."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxdist.runtime.group import Group

__all__ = ["sharded_layer"]

# Whose layers hold a shard of their parameters where they have a group: mlxdist's own and MLX's, which mlx-lm's shard()
# makes.
_PACKAGES = ("mlxdist.nn.", "mlx.nn.layers.distributed")


def sharded_layer(arrays: Iterable[mx.array]) -> str | None:
    """The class of a layer that is sharded over ranks and has one of these parameters; None if there is none.

    ``model.parameters()`` has lost the layers but has their arrays, so the layers are looked for among the objects of
    the process. That takes some 20 ms for each 100,000 objects.
    """
    wanted = {id(array) for array in arrays}
    for found in gc.get_objects():
        # Not isinstance(): it asks objects for their __class__, and some import packages then.
        if issubclass(type(found), nn.Module) and any(id(array) in wanted for array in _shards_of(found)):
            return type(found).__name__
    return None


def _shards_of(layer: nn.Module) -> Iterable[mx.array]:
    """The parameters of a layer of which a rank has a shard."""
    if region := vars(layer).get("_region"):  # of a block of shard_model, in which some layers are full
        return region.sharded_arrays(layer)
    return dict(tree_flatten(layer.parameters())).values() if _is_sharded(layer) else ()


def _is_sharded(layer: nn.Module) -> bool:
    if not type(layer).__module__.startswith(_PACKAGES):
        return False
    return any(isinstance(value, Group | mx.distributed.Group) and value.size() > 1 for value in _attributes(layer))


def _attributes(layer: nn.Module) -> Iterator[Any]:
    for value in vars(layer).values():
        yield value
        if type(value).__module__.startswith(_PACKAGES):  # experts: how they are sharded, with the group
            yield from getattr(value, "__dict__", {}).values()
