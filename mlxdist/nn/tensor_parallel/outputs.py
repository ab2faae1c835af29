"""Whole linear layers with some, or more, of the outputs of another."""

from collections.abc import Callable
from copy import copy

import mlx.core as mx
from mlx import nn

__all__ = ["with_outputs"]


def with_outputs(linear: nn.Module, change: Callable[[str, mx.array], mx.array]) -> nn.Module:
    """A layer like ``linear``, plain or quantized and as much frozen, with the parameters ``change(name, parameter)``.

    All parameters of the two kinds have the outputs along their first axis.
    """
    layer = copy(linear)
    layer._no_grad = set(linear._no_grad)  # a copy has the same set
    for name, parameter in linear.parameters().items():
        setattr(layer, name, change(name, parameter))
    return layer
