"""The sums of a model that `shard_model` has cut, each handed to MLX as soon as it is built."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

__all__ = ["submit_sums"]

_SUMMING = (ShardedToAllLinear, QuantizedShardedToAllLinear)


def submit_sums(model: nn.Module) -> None:
    """Changes the modules of ``model`` that add up over the ranks."""
    for module in model.modules():
        if _adds_up(module):
            module.__class__ = _submitting(type(module))


def _adds_up(module: nn.Module) -> bool:
    if isinstance(module, _SUMMING) or type(module).__name__.startswith("Summed"):
        return True
    return getattr(module, "sharding_group", None) is not None


@cache
def _submitting(kind: type[nn.Module]) -> type[nn.Module]:
    """The module, whose result is submitted before it is returned."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *arguments, **keywords)
        mx.async_eval(result)
        return result

    return type(f"Submitting{kind.__name__}", (kind,), {"__call__": __call__, "__module__": __name__})
