"""Modules and caches of layers that another stage holds: without memory, while shapes and offsets are the real ones."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..interception import become
from ..layout.modules import children, own_arrays
from ..tensor_parallel.linear_layers import LINEARS
from ..tensor_parallel.lora import SWITCH_LINEARS

__all__ = ["advance", "drop_layer", "drop_parameters", "holds_parameters_alone", "is_known"]


class _MissingLayer(dict[str, Any]):
    """A module whose parameters another stage holds. It has zeros in their place, which MLX never computes: what
    depends on them is not used."""

    _of_another_stage: dict[str, tuple[tuple[int, ...], mx.Dtype]]

    def __getitem__(self, name: str) -> Any:
        if name in self._of_another_stage:
            shape, dtype = self._of_another_stage[name]
            return mx.broadcast_to(mx.zeros((), dtype), shape)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._of_another_stage or super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:  # by way of the two above
        return self[name] if name in self else default


def drop_parameters(module: nn.Module) -> None:
    """Takes the parameters out of a module that has no modules inside. It can be called: the result has the shape and
    dtype that it would have, and is not to be evaluated."""
    # Removed, not replaced by zeros: the parameters of the model are those of this stage, also in checkpoints.
    shapes = {name: (array.shape, array.dtype) for name, array in own_arrays(module)}
    for name in shapes:
        del module[name]
    kind = type(module)
    vars(module)["_of_another_stage"] = shapes  # not as a parameter
    become(module, type(kind.__name__, (_MissingLayer, kind), {"__module__": kind.__module__}))


class _DroppedLinear(nn.Module):
    """Replaces a layer that mlx-lm's ``linear_to_lora_layers`` would take: this one gets no adapter."""

    def to_lora(self, **settings: Any) -> nn.Module:
        return self


def drop_layer(layer: nn.Module) -> None:
    """Takes all parameters out of a layer. Its other attributes, which models look at, stay; what held the parameters
    is no linear layer any more, so nothing puts adapters on it."""
    for module in layer.modules():
        is_leaf = module is not layer and holds_parameters_alone(module)
        for name in [name for name, _ in own_arrays(module)]:
            del module[name]
        if is_leaf:
            become(module, _DroppedLinear if _takes_adapters(module) else nn.Module)


def _takes_adapters(module: nn.Module) -> bool:
    """Whether mlx-lm's ``linear_to_lora_layers`` takes ``module``."""
    kinds = *LINEARS, nn.Embedding, nn.QuantizedEmbedding
    return hasattr(module, "to_lora") or isinstance(module, kinds) or type(module).__name__ in SWITCH_LINEARS


def holds_parameters_alone(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, and no modules inside."""
    return any(True for _ in own_arrays(module)) and not any(True for _ in children(module))


def advance(cache: Any, nothing: mx.array) -> None:
    """Adds tokens to the cache of a layer that another stage has: keys and values of width zero.

    So mlx-lm's caches count, trim, merge and mask as they do in the other stage.

    Args:
        cache: of the layer; ``None`` has nothing to add to.
        nothing: keys, and values, of shape (batch, 1, tokens, 0).
    """
    if cache is None:
        return
    for part in _parts(cache):
        if hasattr(part, "update_and_fetch"):
            part.update_and_fetch(nothing, nothing)
        elif hasattr(part, "update_window"):  # of deepseek_v41
            part.update_window(nothing[:, 0])
        else:  # an ArraysCache: states, which have no length
            for place in range(len(part.cache)):
                part[place] = nothing[:, 0, 0]
            part.advance(nothing.shape[2])


def is_known(cache: Any) -> bool:
    """Whether :func:`advance` can add tokens to a cache."""
    return all(any(hasattr(part, name) for name in _METHODS) for part in _parts(cache))


_METHODS = ("update_and_fetch", "update_window", "advance")


def _parts(cache: Any) -> Any:
    return getattr(cache, "caches", (cache,))  # of a CacheList
