"""MLX's linear layers, plain and quantized: dimensions, quantization, copies with other outputs."""

from collections.abc import Callable, Sequence
from copy import copy
from math import gcd, lcm
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)

from mlxdist.base.errors import InvalidArgument

from ..layout.modules import parameters

M = TypeVar("M", bound=nn.Module)

LINEARS = (nn.Linear, nn.QuantizedLinear)
# What MLX makes of a layer in shard_linear: plain and quantized.
COLUMN_SHARDED = (AllToShardedLinear, QuantizedAllToShardedLinear)
ROW_SHARDED = (ShardedToAllLinear, QuantizedShardedToAllLinear)


def check_linear(name: str, linear: nn.Module) -> None:
    """Rejects what is not, and does not compute as, ``nn.Linear`` or ``nn.QuantizedLinear``."""
    for kind in LINEARS:
        if isinstance(linear, kind) and type(linear).__call__ is kind.__call__:
            return
    raise InvalidArgument(
        f"{name}: the layer must be an nn.Linear or nn.QuantizedLinear, not {type(linear).__name__}; of a layer with "
        "an adapter (LoRA) convert the linear layer in it, then put the adapter on top"
    )


def check_has(name: str, module: nn.Module, keys: Sequence[str], kind: str) -> None:
    """Rejects a module without one of the attributes ``keys``."""
    if missing := [key for key in keys if not hasattr(module, key)]:
        raise InvalidArgument(f"{name}: {type(module).__name__} has no {', '.join(missing)}; it is no {kind} of mlx-lm")


def check_parts(name: str, module: nn.Module, linears: Sequence[str], others: Sequence[str] = ()) -> None:
    """Rejects a module with parameters besides ``others`` and these linear layers, which are plain or quantized."""
    check_others(name, module, (*linears, *others))
    for key in linears:
        check_linear(f"{name}: {key}", module[key])


def check_others(name: str, module: nn.Module, known: Sequence[str]) -> None:
    """Rejects a module with parameters besides those of the layers ``known``."""
    found = {path.split(".")[0] for path in parameters(module)}
    if more := sorted(found.difference(known)):
        raise InvalidArgument(f"{name}: {type(module).__name__} has other parameters, too: {', '.join(more)}")


def dims(linear: nn.Module) -> tuple[int, int]:
    """output_dims and input_dims of an ``nn.Linear`` or ``nn.QuantizedLinear``."""
    output_dims, columns = linear["weight"].shape
    return output_dims, unpacked(linear, columns)


def unpacked(layer: nn.Module, columns: int) -> int:
    """How many inputs ``columns`` of the weight are: quantized, they are packed into words of 32 bits."""
    bits = getattr(layer, "bits", None)
    return columns * 32 // bits if bits else columns


def quantization(layer: nn.Module) -> dict[str, Any]:
    """``group_size``, ``bits`` and ``mode`` of a quantized layer; nothing for one that is not."""
    names = ("group_size", "bits", "mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "group_size") else {}


def quantization_unit(layer: nn.Module) -> int:
    """The fewest inputs that are whole quantization groups and, packed into uint32, whole words: 32 values of 3, 5 or
    6 bits. 1 for a layer that is not quantized."""
    config = quantization(layer)
    return lcm(config["group_size"], 32 // gcd(32, config["bits"])) if config else 1


def product(layer: nn.Module, x: mx.array) -> mx.array:
    """``x @ weight.T``, plain or quantized."""
    weight, config = layer["weight"], quantization(layer)
    if not config:
        return x @ weight.T
    return mx.quantized_matmul(x, weight, layer["scales"], layer.get("biases"), transpose=True, **config)


def mapped(module: M, function: Callable[[str, mx.array], mx.array]) -> M:
    """A copy of ``module``, and of the modules in it, with ``function(name, array)`` for its arrays."""
    clone = copy(module)
    clone._no_grad = set(module._no_grad)  # a copy has the same set
    for key, value in module.items():
        if isinstance(value, nn.Module):
            clone[key] = mapped(value, function)
        elif isinstance(value, mx.array):
            clone[key] = function(key, value)
    return clone


def freeze_like(layer: M, example: nn.Module) -> M:
    """``layer`` with the same parameters frozen as in ``example``, and training or not as that is."""
    frozen = example.parameters().keys() - example.trainable_parameters().keys()
    layer.unfreeze(recurse=False)
    layer.freeze(recurse=False, keys=list(frozen))
    layer.train(example.training)
    return layer
