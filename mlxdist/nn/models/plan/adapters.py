"""Low-rank adapters of mlx-lm on a model that is sharded: first the model is sharded, then the adapters are put on
it."""

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.partition import slice_along

from .parameters import Shard

__all__ = ["adapter_axis", "adapter_shard", "full_matrix", "require_no_adapters"]

# Along which axis a matrix of an adapter is sharded, by the number of axes of the layer's weight, which of these is
# sharded, and the matrix's name.
_AXES = {
    (2, 0, "lora_b"): 1,  # (r, outputs) of a weight (outputs, inputs)
    (2, 1, "lora_a"): 0,  # (inputs, r)
    (3, 0, "lora_a"): 0,  # (experts, r, inputs) of (experts, outputs, inputs)
    (3, 0, "lora_b"): 0,  # (experts, outputs, r)
    (3, 1, "lora_b"): 1,
    (3, 2, "lora_a"): 2,
}


def adapter_shard(weight: Shard, name: str, full: mx.array, rank: int) -> mx.array:
    """A rank's shard of ``lora_a`` or ``lora_b``, of the shape that mlx-lm gives it, on a layer with this weight."""
    if (axis := adapter_axis(weight, name)) is None:
        return full
    return mx.contiguous(slice_along(full, axis, weight.slices(rank, full.shape[axis])))


def adapter_axis(weight: Shard, name: str) -> int | None:
    """The axis along which the matrix ``name`` of an adapter is sharded; None if it is full."""
    return _AXES.get((len(weight.shape), weight.axis, name)) if weight.ranges else None


def full_matrix(weight: Shard | None) -> str | None:
    """The matrix of an adapter on a layer with this weight that all ranks hold; None: both or neither are sharded."""
    if weight is None or not weight.ranges:
        return None
    names = [name for name in ("lora_a", "lora_b") if (len(weight.shape), weight.axis, name) not in _AXES]
    return names[0] if len(names) == 1 else None


def require_no_adapters(model: nn.Module) -> None:
    """Raises InvalidArgument, naming one, where there are adapters on ``model``, which is to be sharded."""
    for path, module in model.named_modules():
        if {"lora_a", "lora_b"} <= module.keys():
            raise InvalidArgument(
                f"there is an adapter on {path}, a {type(module).__name__}: shard the model first, then put adapters "
                "on it (mlx-lm's linear_to_lora_layers takes a model that is sharded), or give load_sharded an "
                "adapter_path; or fuse them first"
            )
