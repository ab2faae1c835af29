"""The base of all layers that are sharded over the ranks, and the base of the linear ones, plain and quantized."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from ..interception import become
from ..layout.cut import Cut
from ..layout.partition import Segments, join, scaled, slices, take
from .linear_layers import check_linear, dims, freeze_like, quantization, quantization_unit
from .lora import ShardedLinear

__all__ = ["ParallelLinear", "PlainWeight", "QuantizedWeight", "Sharded", "pair", "with_weight_of"]

M = TypeVar("M", bound=nn.Module)


class Sharded(nn.Module):
    """A layer that is sharded over the ranks of a group. Names with an underscore are no parameters for MLX."""

    shard_axis = 0  # of the weight and of what belongs to a quantized one
    _sizes: tuple[int, ...]
    _segments: Segments
    _group: Group

    @property
    def sizes(self) -> list[int]:
        """How much of the sharded dimension each rank holds: outputs, inputs, tokens or hidden features."""
        return list(self._sizes)

    @property
    def group(self) -> Group:
        """The ranks that hold the layer."""
        return self._group

    def _extra_repr(self) -> str:
        names = ("input_dims", "output_dims", "num_embeddings", "dims", *quantization(self))
        shown = {name: getattr(self, name) for name in names if hasattr(self, name)} | {"bias": "bias" in self}
        rank = self._group.rank()
        text = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{text}, rank={rank} of {self._group.size()}, size={self._sizes[rank]}"

    def _take_from(self, full: nn.Module, sizes: Sequence[int], group: Group, segments: Segments = 1) -> None:
        """Makes the parameters this rank's shards of those of a full layer, quantized and frozen like them."""
        self._sizes, self._group = tuple(sizes), group
        self._segments = segments if isinstance(segments, int) else tuple(segments)
        for name, value in quantization(full).items():
            setattr(self, name, value)
        for name, value in full.parameters().items():
            setattr(self, name, self.take_shard(value, self.shard_axis) if self.shards(name) else value)
        freeze_like(self, full)

    def _join_into(self, full: M) -> M:
        """Gives a full layer the parameters of all ranks, frozen as here. A collective that is evaluated at once."""
        for name, value in self.parameters().items():
            setattr(full, name, self.join_shards(value, self.shard_axis) if self.shards(name) else value)
        mx.eval(full.parameters())
        return freeze_like(full, self)

    def take_shard(self, x: mx.array, axis: int) -> mx.array:
        """This rank's shard of an ``x`` that has all of the sharded dimension along ``axis``, also packed."""
        return take(x, axis, scaled(self._sizes, x.shape[axis]), self._group.rank(), self._segments)

    def join_shards(self, x: mx.array, axis: int) -> mx.array:
        """All of the sharded dimension, joined from the shards ``x`` of all ranks along ``axis``. A collective."""
        length = x.shape[axis] * sum(self._sizes) // self._sizes[self._group.rank()]
        return join(x, axis, scaled(self._sizes, length), self._group, self._segments)

    def cut(self, local: Sequence[int], axis: int) -> Cut:
        """The cut along ``axis`` of an array, from ``local``, the shape of this rank's part."""
        length = local[axis] * sum(self._sizes) // self._sizes[self._group.rank()]
        sizes = scaled(self._sizes, length)
        held = [slices(sizes, rank, self._segments) for rank in range(len(sizes))]
        ranges = [[(here.start, here.stop) for here in pieces] for pieces in held]
        return Cut.full((*local[:axis], length, *local[axis + 1 :])).along(axis, ranges, self._group)

    def shards(self, name: str) -> bool:
        """Whether each rank has a shard of the parameter ``name``; all hold the bias that is added to their sum."""
        return name in ("weight", "scales", "biases") or name == "bias" and self.shard_axis == 0


def with_weight_of(layer: nn.Module, kind: type[M], source: nn.Module) -> M:
    """``layer`` as a ``kind``, trainable or quantized, with the weight of ``source`` and else what it has itself."""
    changed: Any = copy(layer)
    become(changed, kind)
    changed._no_grad = set()
    for name in ("scales", "biases"):
        changed.pop(name, None)
    for name in quantization(layer):
        delattr(changed, name)
    for name, value in (quantization(source) | source.parameters()).items():
        setattr(changed, name, value)
    if quantization(source):
        changed.freeze()
    return changed


class ParallelLinear(Sharded, ShardedLinear):
    """A linear layer that is sharded over the ranks: by its outputs (column) or by its inputs (row).

    Parameters have the names of ``nn.Linear`` and ``nn.QuantizedLinear`` and hold this rank's shard: ``weight``,
    ``bias``; quantized also ``scales`` and, in the mode "affine", ``biases``, and ``group_size``, ``bits``, ``mode``.
    """

    kinds: tuple[type["ParallelLinear"], type["ParallelLinear"]]  # plain and quantized, see :func:`pair`
    _shard_full: Callable[..., None]  # :meth:`_shard` with the options of the constructor

    def _shard(self, full: nn.Module, sizes: Sequence[int], segments: Segments, group: Group) -> None:
        """Makes the layer this rank's shard of a full one: what a constructor does."""
        nn.Module.__init__(self)
        self.output_dims, self.input_dims = dims(full)
        self._take_from(full, sizes, group, segments)

    @property
    def segments(self) -> Segments:
        """The segments, each sharded by itself: lengths along the sharded dimension, or a number of equal ones."""
        return self._segments

    def __call__(self, x: mx.array) -> mx.array:
        return self.leave(self.product(self.enter(x)))

    def to_linear(self) -> nn.Linear | nn.QuantizedLinear:
        """The full layer, on every rank: bitwise the one that :meth:`from_linear` was given.

        A collective that is evaluated at once: all ranks call it, in the same order.
        """
        config = quantization(self)
        kind: type[nn.Linear | nn.QuantizedLinear] = nn.QuantizedLinear if config else nn.Linear
        return self._join_into(kind(self.input_dims, self.output_dims, "bias" in self, **config))

    @classmethod
    def from_linear(cls, linear: nn.Module, **keywords: Any) -> "ParallelLinear":
        """Returns this rank's shard of a layer that all ranks hold; of a quantized layer this class's quantized form.

        ``keywords`` are those of the constructor. Frozen parameters stay frozen. No collective.

        Raises:
            InvalidArgument: as the constructor; ``linear`` is another kind of layer.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        kind = cls.kinds[bool(quantization(linear))]
        # Not by the constructor, which would draw the weights of a full layer.
        layer = kind.__new__(kind)
        layer._shard_full(linear, **keywords)
        return layer

    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "ParallelLinear":
        """Returns the layer with another weight: see :meth:`ShardedLinear.with_weight`. Raises InvalidArgument where
        the ranks' shards are not whole quantization groups."""
        kind, local = self.kinds[quantized is not None], nn.Module()
        local.weight = weight
        if quantized is not None:
            local = nn.QuantizedLinear(512, 1, False, **quantized)  # which knows MLX's defaults
            unit = quantization_unit(local)
            if self.shard_axis == 1 and any(size % unit for size in self._sizes):
                raise InvalidArgument(
                    f"{kind.__name__}: the shards {self.sizes} are not whole quantization groups of {unit}; shard the "
                    f"layer with multiple={unit}, or quantize it before it is sharded"
                )
            local.update(dict(zip(("weight", "scales", "biases"), mx.quantize(weight, **quantization(local)))))
        return with_weight_of(self, kind, local)


class PlainWeight(ParallelLinear):
    """Made with the dimensions of an ``nn.Linear``."""

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True, **options: Any) -> None:
        self._shard_full(nn.Linear(input_dims, output_dims, bias), **options)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> ParallelLinear:
        """The quantized form of the layer, for ``nn.quantize``. No collective.

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
        config: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        self._shard_full(nn.QuantizedLinear(input_dims, output_dims, bias, **config), **options)


def pair(plain: type[ParallelLinear], quantized: type[ParallelLinear]) -> None:
    """Makes two classes that are sharded in the same way each other's plain and quantized form."""
    plain.kinds = quantized.kinds = (plain, quantized)
