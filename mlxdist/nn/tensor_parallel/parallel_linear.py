"""What the linear layers that are sharded over the ranks share, by columns and by rows, plain and quantized."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group import Group

from ..mappings import copy_to_tensor_parallel_region
from ..partition import Segments, join, shard_slice, take
from .linear_layers import check_linear, dims, freeze_like, quantization
from .lora import ShardedLinear

__all__ = ["ParallelLinear", "PlainWeight", "QuantizedWeight", "pair"]


class ParallelLinear(ShardedLinear):
    """A linear layer of which every rank holds a shard: of its outputs (column) or of its inputs (row).

    Parameters have the names of ``nn.Linear`` and ``nn.QuantizedLinear`` and hold this rank's shard: ``weight``,
    ``bias``; quantized also ``scales`` and, in the mode "affine", ``biases``.

    Attributes, besides those of :class:`ShardedLinear`:
        sizes: how much of the sharded dimension each rank holds.
        segments: see :mod:`mlxdist.nn.partition`.
        group: the ranks.
        group_size, bits, mode: of the quantized forms, as in ``nn.QuantizedLinear``.
    """

    kinds: tuple[type["ParallelLinear"], type["ParallelLinear"]]  # plain and quantized, see :func:`pair`

    def __init__(self, full: nn.Module, sizes: Sequence[int], segments: Segments, group: Group) -> None:
        super().__init__()
        self.output_dims, self.input_dims = dims(full)
        # Names with an underscore are no parameters for nn.Module.
        self._sizes = tuple(sizes)
        self._segments = segments if isinstance(segments, int) else tuple(segments)
        self._group = group
        for name, value in quantization(full).items():
            setattr(self, name, value)
        for name, value in self._shards_of(full).items():
            setattr(self, name, value)
        if quantization(full):
            self.freeze()

    @property
    def sizes(self) -> list[int]:
        """How many outputs (column) or inputs (row) each rank holds."""
        return list(self._sizes)

    @property
    def segments(self) -> Segments:
        """What is sharded by itself: lengths along the sharded dimension, or a number of equal ones."""
        return self._segments

    @property
    def group(self) -> Group:
        """The ranks that hold the layer."""
        return self._group

    def adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        if self.shard_axis == 0:
            return copy_to_tensor_parallel_region(lora_a, self._group), lora_b
        return lora_a, copy_to_tensor_parallel_region(lora_b, self._group)

    def shard_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        rank = self._group.rank()
        if self.shard_axis == 0:
            return lora_a, take(lora_b, 1, self._sizes, rank, self._segments)
        return take(lora_a, 0, self._sizes, rank), lora_b

    def join_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        if self.shard_axis == 0:
            return lora_a, join(lora_b, 1, self._sizes, self._group, self._segments)
        return join(lora_a, 0, self._sizes, self._group), lora_b

    def shard_inputs(self, x: mx.array) -> mx.array:
        return x[..., shard_slice(self._sizes, self._group.rank())]

    def __call__(self, x: mx.array) -> mx.array:
        return self.leave(self.product(self.enter(x)))

    def to_linear(self) -> nn.Linear | nn.QuantizedLinear:
        """The full layer, on every rank: bitwise the one that :meth:`from_linear` was given.

        A collective that is evaluated at once: all ranks call it, in the same order.
        """
        kind = nn.QuantizedLinear if quantization(self) else nn.Linear
        full = kind(self.input_dims, self.output_dims, "bias" in self, **quantization(self))
        axes = self._axes()
        for name in full.parameters():
            value = self[name]
            setattr(full, name, join(value, *axes[name], self._group, self._segments) if name in axes else value)
        mx.eval(full.parameters())
        return freeze_like(full, self)

    @classmethod
    def from_linear(cls, linear: nn.Linear | nn.QuantizedLinear, **keywords: Any) -> Self:
        """This rank's shard of a layer that all ranks hold: of a quantized one the quantized form of this class.

        ``keywords`` are those of the constructor. Frozen parameters stay frozen. No collective.

        Raises:
            InvalidArgument: as the constructor; ``linear`` is another kind of layer.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        output_dims, input_dims = dims(linear)
        kind = cls.kinds[bool(quantization(linear))]
        layer = kind(input_dims, output_dims, "bias" in linear, **quantization(linear), **keywords)
        layer.update(layer._shards_of(linear))
        return freeze_like(layer, linear)

    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "ParallelLinear":
        """The same layer with another weight: the shape of this rank's shard, before it is quantized.

        ``quantized``: ``group_size``, ``bits`` and ``mode`` for the quantized form. No collective.

        Raises:
            InvalidArgument: the ranks' shards are not whole quantization groups.
        """
        kind = self.kinds[quantized is not None]
        arguments = (self.input_dims, self.output_dims, "bias" in self)
        layer = kind(*arguments, **(quantized or {}), **self._options(), rank_shares=self._sizes, group=self._group)
        if layer._sizes != self._sizes:
            raise InvalidArgument(
                f"{kind.__name__}: the shards {self.sizes} are not whole quantization groups of {layer.group_size}; "
                f"shard the layer with multiple={layer.group_size}, or quantize it before it is sharded"
            )
        values = [weight] if quantized is None else mx.quantize(weight, **quantization(layer))
        layer.update(dict(zip(("weight", "scales", "biases"), values)))
        if "bias" in self:
            layer.bias = self["bias"]
        return layer.train(self.training)

    @abstractmethod
    def _options(self) -> dict[str, object]:
        """Arguments of the constructor besides dimensions, quantization, sizes and group."""

    @abstractmethod
    def _axes(self) -> dict[str, tuple[int, list[int]]]:
        """The parameters that are sharded: the axis, and the sizes along it in elements of that parameter."""

    def _shards_of(self, full: nn.Module) -> dict[str, mx.array]:
        """This rank's parameters."""
        axes, rank = self._axes(), self._group.rank()
        return {
            name: take(value, *axes[name], rank, self._segments) if name in axes else value
            for name, value in full.parameters().items()
        }

    def _extra_repr(self) -> str:
        text = f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={'bias' in self}"
        for name, value in quantization(self).items():
            text += f", {name}={value}"
        rank = self._group.rank()
        return f"{text}, rank={rank} of {self._group.size()}, size={self._sizes[rank]}"


class PlainWeight(ParallelLinear):
    """Made with the dimensions of an ``nn.Linear``."""

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True, **options: Any) -> None:
        super().__init__(nn.Linear(input_dims, output_dims, bias), **options)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedWeight":
        """Quantized, for ``nn.quantize``. No collective.

        Args:
            group_size, bits, mode: as in ``nn.QuantizedLinear``; ``None`` for MLX's default.

        Raises:
            InvalidArgument: of a row-parallel layer the ranks' shards are not whole quantization groups.
        """
        return self.with_weight(self["weight"], {"group_size": group_size, "bits": bits, "mode": mode})


class QuantizedWeight(ParallelLinear):
    """Made with the arguments of an ``nn.QuantizedLinear``."""

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        **options: Any,
    ) -> None:
        super().__init__(nn.QuantizedLinear(input_dims, output_dims, bias, group_size, bits, mode), **options)


def pair(plain: type[ParallelLinear], quantized: type[ParallelLinear]) -> None:
    """Makes two classes that are sharded in the same way each other's plain and quantized form."""
    plain.kinds = quantized.kinds = (plain, quantized)
