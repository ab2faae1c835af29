"""Low-rank adapters of mlx-lm on a model that is cut: first the model is cut, then the adapters are put on it."""

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.partition import cut_out

from .parameters import Shard

__all__ = ["adapter_part", "require_no_adapters", "whole_matrix"]

# Along which axis a matrix of an adapter is cut, by the number of axes of the layer's weight, which of these is cut,
# and the matrix's name.
_AXES = {
    (2, 0, "lora_b"): 1,  # (r, outputs) of a weight (outputs, inputs)
    (2, 1, "lora_a"): 0,  # (inputs, r)
    (3, 0, "lora_a"): 0,  # (experts, r, inputs) of (experts, outputs, inputs)
    (3, 0, "lora_b"): 0,  # (experts, outputs, r)
    (3, 1, "lora_b"): 1,
    (3, 2, "lora_a"): 2,
}


def adapter_part(weight: Shard, name: str, whole: mx.array, rank: int) -> mx.array:
    """A rank's part of ``lora_a`` or ``lora_b``, of the shape that mlx-lm gives it, on a layer with this weight."""
    axis = _AXES.get((len(weight.shape), weight.axis, name))
    if axis is None or not weight.ranges:
        return whole
    return mx.contiguous(cut_out(whole, axis, weight.slices(rank, whole.shape[axis])))


def whole_matrix(weight: Shard | None) -> str | None:
    """Of an adapter on a layer with this weight, the matrix that all ranks hold; None: both are cut, or neither is."""
    if weight is None or not weight.ranges:
        return None
    names = [name for name in ("lora_a", "lora_b") if (len(weight.shape), weight.axis, name) not in _AXES]
    return names[0] if len(names) == 1 else None


def require_no_adapters(model: nn.Module) -> None:
    """Raises InvalidArgument, naming one, where there are adapters on ``model``, which is to be cut."""
    for path, module in model.named_modules():
        if {"lora_a", "lora_b"} <= module.keys():
            raise InvalidArgument(
                f"there is an adapter on {path}, a {type(module).__name__}: cut the model first, then put adapters on "
                "it (mlx-lm's linear_to_lora_layers takes a model that is cut), or give load_sharded an adapter_path; "
                "or fuse them first"
            )
