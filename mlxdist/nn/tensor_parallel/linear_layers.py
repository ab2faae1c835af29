"""MLX's linear layers, plain and quantized: dimensions, quantization, copies with other outputs."""

from collections.abc import Callable
from copy import copy
from math import gcd, lcm

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)

from mlxdist.base.errors import InvalidArgument

# What MLX makes of a layer in shard_linear: plain and quantized.
COLUMN_SHARDED = (AllToShardedLinear, QuantizedAllToShardedLinear)
ROW_SHARDED = (ShardedToAllLinear, QuantizedShardedToAllLinear)


def check_linear(name: str, linear: nn.Module) -> None:
    """Rejects what is not, and does not compute as, ``nn.Linear`` or ``nn.QuantizedLinear``."""
    for kind in (nn.Linear, nn.QuantizedLinear):
        if isinstance(linear, kind) and type(linear).__call__ is kind.__call__:
            return
    raise InvalidArgument(
        f"{name}: the layer must be an nn.Linear or nn.QuantizedLinear, not {type(linear).__name__}; of a layer with "
        "an adapter (LoRA) convert the linear layer in it, then put the adapter on top"
    )


def dims(linear: nn.Module) -> tuple[int, int]:
    """output_dims and input_dims of an ``nn.Linear`` or ``nn.QuantizedLinear``."""
    output_dims, columns = linear.weight.shape
    return output_dims, unpacked(linear, columns)


def unpacked(layer: nn.Module, columns: int) -> int:
    """How many inputs ``columns`` of the weight are: quantized, they are packed into words of 32 bits."""
    bits = getattr(layer, "bits", None)
    return columns * 32 // bits if bits else columns


def quantization(layer: nn.Module) -> dict[str, int | str]:
    """``group_size``, ``bits`` and ``mode`` of a quantized layer; nothing for one that is not."""
    names = ("group_size", "bits", "mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "group_size") else {}


def quantization_unit(layer: nn.Module) -> int:
    """The fewest inputs that are whole quantization groups and, packed into uint32, whole words: 32 values of 3, 5 or
    6 bits. 1 for a layer that is not quantized."""
    config = quantization(layer)
    return lcm(config["group_size"], 32 // gcd(32, config["bits"])) if config else 1


def with_outputs(linear: nn.Module, change: Callable[[str, mx.array], mx.array]) -> nn.Module:
    """A layer like ``linear``, plain or quantized and as much frozen, with the parameters ``change(name, parameter)``.

    All parameters of the two kinds have the outputs along their first axis.
    """
    layer = copy(linear)
    layer._no_grad = set(linear._no_grad)  # a copy has the same set
    for name, parameter in linear.parameters().items():
        setattr(layer, name, change(name, parameter))
    return layer


def freeze_like(layer: nn.Module, example: nn.Module) -> nn.Module:
    """``layer`` with the same parameters frozen as in ``example``, and training or not as that is."""
    frozen = example.parameters().keys() - example.trainable_parameters().keys()
    layer.unfreeze(recurse=False)
    layer.freeze(recurse=False, keys=list(frozen))
    return layer.train(example.training)
