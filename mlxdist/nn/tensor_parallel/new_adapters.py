"""Adapters of mlx-lm on a layer of which this rank holds a part: they begin as parts of those on the whole layer."""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
from mlx import nn

__all__ = ["SWITCH_LINEARS", "as_given", "draw_whole"]

# The linear layers of mlx-lm's experts.
SWITCH_LINEARS = ("SwitchLinear", "QuantizedSwitchLinear")


def draw_whole(layer: nn.Module, shape: tuple[int, ...], part: Callable[[str, mx.array], mx.array]) -> None:
    """Lets mlx-lm's ``linear_to_lora_layers`` draw the adapter of the whole layer.

    Args:
        layer: a linear layer of MLX, or one of mlx-lm with experts.
        shape: of the whole weight, not packed: (outputs, inputs) or (experts, outputs, inputs).
        part: ``part(name, whole)`` is this rank's part of ``lora_a`` or ``lora_b``.
    """
    layer.__class__ = _drawn_whole(type(layer))
    object.__setattr__(layer, "_whole", (shape, part))


def as_given(layer: nn.Module) -> None:
    """Of the class again that it had: it is whole."""
    if hasattr(layer, "_whole"):
        layer.__class__ = type(layer).__bases__[0]
        del layer._whole


@cache
def _drawn_whole(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"to_lora": _to_lora, "__module__": kind.__module__})


def _to_lora(self: nn.Module, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
    """The layer with mlx-lm's adapter, as its ``linear_to_lora_layers`` asks for it."""
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

    (*experts, output_dims, input_dims), part = self._whole
    kind = LoRASwitchLinear if experts else LoRALinear
    adapter = kind(input_dims, output_dims, *experts, r=r, dropout=dropout, scale=scale)
    adapter.linear = self
    for name in ("lora_a", "lora_b"):
        adapter[name] = part(name, adapter[name])
    return adapter
