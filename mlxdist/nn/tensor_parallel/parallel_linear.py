"""What the linear layers that are cut over the ranks share, plain and quantized, by columns and by rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd, lcm
from typing import Self

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group import Group

from ..mappings import copy_to_tensor_parallel_region
from ..partition import Segments, join, part, take

__all__ = ["CutLinear", "ParallelLinear", "check_linear", "dims", "quantization", "quantization_unit", "unpacked"]


class CutLinear(nn.Module, ABC):
    """What an adapter (:class:`mlxdist.nn.LoRALinear`) asks of a linear layer of which every rank holds a part.

    A call is ``leave(product(enter(x)))``, so that an adapter can stand between the two collectives and needs none of
    its own. Of the adapter's matrices the one next to the cut dimension is cut like it.

    Attributes:
        input_dims, output_dims: of the whole layer.
        cut_axis: of the weight, of shape (outputs, inputs): 0 for column-parallel, 1 for row-parallel layers.
    """

    cut_axis: int
    input_dims: int
    output_dims: int

    @abstractmethod
    def enter(self, x: mx.array) -> mx.array:
        """What this rank's product takes, from what the layer is called with."""

    def product(self, x: mx.array) -> mx.array:
        """This rank's part of the product, with the bias if that is cut, too."""
        bias = self.get("bias") if self.cut_axis == 0 else None
        weight = self["weight"]
        if "scales" in self:
            scales, biases, config = self["scales"], self.get("biases"), quantization(self)
            y = mx.quantized_matmul(x, weight, scales, biases, transpose=True, **config)
            return y if bias is None else y + bias
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    @abstractmethod
    def leave(self, y: mx.array) -> mx.array:
        """What the layer returns, from this rank's product."""

    @abstractmethod
    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "CutLinear":
        """The same layer with another weight: shape of this rank's part, before it is quantized."""

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
        """The layer with an adapter, as mlx-lm's ``linear_to_lora_layers`` asks for it: a LoRALinear."""
        from .lora import LoRALinear

        return LoRALinear.from_base(self, r, dropout, scale)

    @abstractmethod
    def adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """The parts themselves, with the gradients of all ranks that hold them."""

    @abstractmethod
    def adapter_part(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """This rank's parts of the whole matrices of an adapter: (input_dims, r), (r, output_dims)."""

    @abstractmethod
    def join_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """The whole matrices, from the parts of all ranks. A collective."""

    @abstractmethod
    def part_of_inputs(self, x: mx.array) -> mx.array:
        """This rank's part of something that has all of a row-parallel layer's inputs on its last axis."""


class ParallelLinear(CutLinear):
    """A linear layer of which every rank holds a part: of its outputs (column) or of its inputs (row).

    Parameters have the names of ``nn.Linear`` and ``nn.QuantizedLinear`` and hold this rank's part: ``weight``,
    ``bias``; quantized also ``scales`` and, in the mode "affine", ``biases``.

    Attributes, besides those of :class:`CutLinear`:
        sizes: how much of the cut dimension each rank holds.
        segments: see :mod:`mlxdist.nn.partition`.
        group: the ranks.
        group_size, bits, mode: of the quantized forms, as in ``nn.QuantizedLinear``.
    """

    def __init__(self, whole: nn.Module, sizes: Sequence[int], segments: Segments, group: Group) -> None:
        super().__init__()
        self.output_dims, self.input_dims = dims(whole)
        # Names with an underscore are no parameters for nn.Module.
        self._sizes = tuple(sizes)
        self._segments = segments if isinstance(segments, int) else tuple(segments)
        self._group = group
        for name, value in quantization(whole).items():
            setattr(self, name, value)
        for name, value in self._part_of(whole).items():
            setattr(self, name, value)
        if quantization(whole):
            self.freeze()

    @property
    def sizes(self) -> list[int]:
        """How many outputs (column) or inputs (row) each rank holds."""
        return list(self._sizes)

    @property
    def segments(self) -> Segments:
        """What is cut by itself: lengths along the cut dimension, or a number of equal ones."""
        return self._segments

    @property
    def group(self) -> Group:
        """The ranks that hold the layer."""
        return self._group

    def adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        if self.cut_axis == 0:
            return copy_to_tensor_parallel_region(lora_a, self._group), lora_b
        return lora_a, copy_to_tensor_parallel_region(lora_b, self._group)

    def adapter_part(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        rank = self._group.rank()
        if self.cut_axis == 0:
            return lora_a, take(lora_b, 1, self._sizes, rank, self._segments)
        return take(lora_a, 0, self._sizes, rank), lora_b

    def join_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        if self.cut_axis == 0:
            return lora_a, join(lora_b, 1, self._sizes, self._group, self._segments)
        return join(lora_a, 0, self._sizes, self._group), lora_b

    def part_of_inputs(self, x: mx.array) -> mx.array:
        return x[..., part(self._sizes, self._group.rank())]

    def __call__(self, x: mx.array) -> mx.array:
        return self.leave(self.product(self.enter(x)))

    def to_linear(self) -> nn.Linear | nn.QuantizedLinear:
        """The whole layer again, on every rank: bitwise the one that :meth:`from_linear` was given.

        A collective that is carried out at once: all ranks call it, in the same order.
        """
        kind = nn.QuantizedLinear if quantization(self) else nn.Linear
        whole = kind(self.input_dims, self.output_dims, "bias" in self, **quantization(self))
        cuts = self._cuts()
        for name in whole.parameters():
            value = self[name]
            setattr(whole, name, join(value, *cuts[name], self._group, self._segments) if name in cuts else value)
        mx.eval(whole.parameters())
        return _in_the_state_of(self, whole)

    @classmethod
    def from_linear(cls, linear: nn.Linear | nn.QuantizedLinear, **keywords: object) -> Self:
        """This rank's part of a layer that all ranks hold. Of a quantized one the quantized form, of this class or not.

        ``keywords`` are those of the constructor. Frozen parameters stay frozen. No collective.

        Raises:
            InvalidArgument: as the constructor; ``linear`` is another kind of layer.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        output_dims, input_dims = dims(linear)
        kind = cls._kind(quantized=bool(quantization(linear)))
        layer = kind(input_dims, output_dims, "bias" in linear, **quantization(linear), **keywords)
        layer.update(layer._part_of(linear))
        return _in_the_state_of(linear, layer)

    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "ParallelLinear":
        """The same layer with another weight: shape of this rank's part, before it is quantized.

        ``quantized``: ``group_size``, ``bits`` and ``mode`` for the quantized form. No collective.

        Raises:
            InvalidArgument: the ranks' parts are not whole quantization groups.
        """
        kind = self._kind(quantized is not None)
        arguments = (self.input_dims, self.output_dims, "bias" in self)
        layer = kind(*arguments, **(quantized or {}), **self._options(), weights=self._sizes, group=self._group)
        if layer._sizes != self._sizes:
            raise InvalidArgument(
                f"{kind.__name__}: the parts {self.sizes} are not whole quantization groups of {layer.group_size}; cut "
                f"the layer with multiple={layer.group_size}, or quantize it before it is cut"
            )
        values = [weight] if quantized is None else mx.quantize(weight, **quantization(layer))
        layer.update(dict(zip(("weight", "scales", "biases"), values)))
        if "bias" in self:
            layer.bias = self["bias"]
        return layer.train(self.training)

    @classmethod
    @abstractmethod
    def _kind(cls, quantized: bool) -> type["ParallelLinear"]:
        """The plain or the quantized class that is cut in the same way."""

    @abstractmethod
    def _options(self) -> dict[str, object]:
        """Arguments of the constructor besides dimensions, quantization, sizes and group."""

    @abstractmethod
    def _cuts(self) -> dict[str, tuple[int, list[int]]]:
        """The parameters that are cut: the axis, and the sizes along it in elements of that parameter."""

    def _part_of(self, whole: nn.Module) -> dict[str, mx.array]:
        """This rank's parameters."""
        cuts, rank = self._cuts(), self._group.rank()
        return {
            name: take(value, *cuts[name], rank, self._segments) if name in cuts else value
            for name, value in whole.parameters().items()
        }

    def _extra_repr(self) -> str:
        text = f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={'bias' in self}"
        for name, value in quantization(self).items():
            text += f", {name}={value}"
        rank = self._group.rank()
        return f"{text}, rank={rank} of {self._group.size()}, size={self._sizes[rank]}"


def check_linear(name: str, linear: nn.Module) -> None:
    """Refuses what is not, and does not compute as, ``nn.Linear`` or ``nn.QuantizedLinear``."""
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


def quantization_unit(group_size: int, bits: int) -> int:
    """The fewest inputs that are whole groups and, packed into uint32, whole words: 32 values of 3, 5 or 6 bits."""
    return lcm(group_size, 32 // gcd(32, bits))


def _in_the_state_of(source: nn.Module, layer: nn.Module) -> nn.Module:
    """``layer`` with the same parameters frozen as in ``source``, and training or not as that is."""
    trainable = dict(tree_flatten(source.trainable_parameters()))
    layer.unfreeze(recurse=False)
    layer.freeze(recurse=False, keys=[name for name in source.parameters() if name not in trainable])
    return layer.train(source.training)
