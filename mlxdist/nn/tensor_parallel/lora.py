"""Low-rank adapters on linear layers that are sharded: mlxdist's own, and mlx-lm's where those fit.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685: ``y + scale * (x A) B``. Names,
shapes and ``scale`` are those of mlx-lm's ``LoRALinear``, so that its adapters can be put in and taken out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from math import sqrt
from typing import Self

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from ..interception import become, restore
from ..layout.cut import Cut
from ..mappings import copy_to_tensor_parallel_region
from .linear_layers import product, quantization

__all__ = ["SWITCH_LINEARS", "LoRALinear", "ShardedLinear", "as_given", "draw_full"]

# The linear layers of mlx-lm's experts.
SWITCH_LINEARS = ("SwitchLinear", "QuantizedSwitchLinear")


class ShardedLinear(nn.Module, ABC):
    """A linear layer that is sharded over the ranks, with the methods that an adapter (:class:`LoRALinear`) calls.

    A call is ``leave(product(enter(x)))``, so that an adapter can stand between the two collectives and needs none of
    its own. The adapter's matrix next to the sharded dimension is sharded like it.

    Attributes:
        input_dims, output_dims: of the full layer.
        shard_axis: of the weight, of shape (outputs, inputs): 0 for column-parallel, 1 for row-parallel layers.
    """

    shard_axis: int
    input_dims: int
    output_dims: int
    _group: Group

    @abstractmethod
    def enter(self, x: mx.array) -> mx.array:
        """The input of this rank's product, from the input of the layer."""

    def product(self, x: mx.array) -> mx.array:
        """This rank's part of the product, with the bias if that is sharded, too."""
        if self.shard_axis == 1 or "bias" not in self:
            return product(self, x)
        if "scales" in self:
            return product(self, x) + self["bias"]
        return mx.addmm(self["bias"], x, self["weight"].T)

    @abstractmethod
    def leave(self, y: mx.array) -> mx.array:
        """The result of the layer, from this rank's product."""

    @abstractmethod
    def with_weight(self, weight: mx.array, quantized: dict | None = None) -> "ShardedLinear":
        """The same layer with another weight: the shape of this rank's shard, before it is quantized.

        ``quantized``: ``group_size``, ``bits`` and ``mode`` for the quantized form. No collective.
        """

    @abstractmethod
    def take_shard(self, x: mx.array, axis: int) -> mx.array:
        """This rank's shard of an ``x`` that has all of the sharded dimension along ``axis``."""

    @abstractmethod
    def join_shards(self, x: mx.array, axis: int) -> mx.array:
        """All of the sharded dimension, from the shards of all ranks along ``axis``. A collective."""

    @abstractmethod
    def cut(self, local: Sequence[int], axis: int) -> Cut:
        """The cut along ``axis`` of an array, from ``local``, the shape of this rank's part."""

    def adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """The shards themselves, with the gradients of all ranks that hold them."""
        if self.shard_axis == 0:
            return copy_to_tensor_parallel_region(lora_a, group=self._group), lora_b
        return lora_a, copy_to_tensor_parallel_region(lora_b, group=self._group)

    def shard_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """This rank's shards of the full matrices of an adapter: (input_dims, r), (r, output_dims)."""
        return (lora_a, self.take_shard(lora_b, 1)) if self.shard_axis == 0 else (self.take_shard(lora_a, 0), lora_b)

    def join_adapter(self, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
        """The full matrices, from the shards of all ranks. A collective."""
        return (lora_a, self.join_shards(lora_b, 1)) if self.shard_axis == 0 else (self.join_shards(lora_a, 0), lora_b)

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> "LoRALinear":
        """The layer with an adapter, which mlx-lm's ``linear_to_lora_layers`` calls."""
        return LoRALinear.from_base(self, r, dropout, scale)


class LoRALinear(nn.Module):
    """An adapter on a parallel layer, plain or quantized. The matrix next to the sharded dimension is sharded like it.

    The layer is one of this package or one that :func:`mlxdist.nn.shard_model` has sharded; mlx-lm's
    ``linear_to_lora_layers`` puts this class on both. On a column-parallel layer ``lora_b``, of shape (r, output_dims),
    is sharded and ``lora_a``, (input_dims, r), is full on every rank; on a row-parallel one it is the other way round.
    The forward pass needs no collective besides the layer's own, the backward pass one more: the all_sum of the
    gradient of the full matrix. With ``dropout`` the same elements are dropped as in the full layer, if all ranks have
    the same seed.

    Called as the layer: shapes and dtypes are those of ``linear``. The adapter is float32, unless another is loaded.

    Args:
        linear: the column- or row-parallel layer.
        r: the rank of the adapter, at least 1.
        dropout: the share of the input's features that the adapter does not see in training, from 0 to below 1.
        scale: as in mlx-lm.

    Attributes:
        linear: the layer; lora_a, lora_b: this rank's shard of the adapter; scale, dropout: as in mlx-lm.

    Raises:
        InvalidArgument: ``linear`` is no parallel layer; ``r`` is not positive; ``dropout`` is not in [0, 1).
    """

    @classmethod
    def from_base(cls, linear: ShardedLinear, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Self:
        """An adapter of rank ``r`` on ``linear`` that changes nothing yet. Use the same seed on all ranks."""
        return cls(linear, r, dropout, scale)

    def __init__(self, linear: ShardedLinear, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> None:
        super().__init__()
        if not isinstance(linear, ShardedLinear):
            raise InvalidArgument(
                f"LoRALinear: the layer must be column- or row-parallel, not {type(linear).__name__}; for others there "
                "is mlx_lm.tuner.lora.LoRALinear"
            )
        if not isinstance(r, int) or r < 1:
            raise InvalidArgument(f"LoRALinear: r must be a positive integer, not {r!r}")
        if not 0 <= dropout < 1:
            raise InvalidArgument(f"LoRALinear: dropout must be from 0 to below 1, not {dropout!r}")
        self.linear = linear
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale
        self._drops = dropout > 0
        bound = 1 / sqrt(linear.input_dims)
        # mlx-lm's draws the weight of a layer first, which it then replaces: with as many draws here, the adapters of a
        # sharded model are those of the full one.
        mx.random.uniform(shape=())
        self.lora_a, self.lora_b = linear.shard_adapter(
            mx.random.uniform(low=-bound, high=bound, shape=(linear.input_dims, r)), mx.zeros((r, linear.output_dims))
        )

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        a, b = linear.adapter(self["lora_a"], self["lora_b"])
        x = linear.enter(x)
        z = (self._dropped(x) @ a) @ b
        return linear.leave(linear.product(x) + (self.scale * z).astype(x.dtype))

    def fuse(self, dequantize: bool = False) -> ShardedLinear:
        """The layer with the adapter in its weight, quantized as it was unless ``dequantize``. No collective."""
        linear = self.linear
        weight, config = linear["weight"], quantization(linear)
        if config:
            weight = mx.dequantize(weight, linear["scales"], linear.get("biases"), **config)
        delta = (self.scale * self["lora_b"].T) @ self["lora_a"].T
        return linear.with_weight(weight + delta.astype(weight.dtype), None if dequantize else config or None)

    def load_adapter(self, lora_a: mx.array, lora_b: mx.array) -> Self:
        """Takes this rank's shard of a full adapter, such as one that mlx-lm saved.

        ``lora_a`` has shape (input_dims, r), ``lora_b`` (r, output_dims).

        Raises:
            InvalidArgument: other shapes.
        """
        dims, r = (self.linear.input_dims, self.linear.output_dims), lora_b.shape[:1]
        if lora_a.shape != (dims[0], *r) or lora_b.shape != (*r, dims[1]):
            raise InvalidArgument(
                f"LoRALinear: lora_a must be ({dims[0]}, r) and lora_b (r, {dims[1]}), not {lora_a.shape} and "
                f"{lora_b.shape}"
            )
        self.lora_a, self.lora_b = self.linear.shard_adapter(lora_a, lora_b)
        return self

    def join_adapter(self) -> dict[str, mx.array]:
        """``lora_a`` and ``lora_b`` of the full layer, on every rank. A collective that is evaluated at once."""
        full = self.linear.join_adapter(self["lora_a"], self["lora_b"])
        mx.eval(full)
        return dict(zip(("lora_a", "lora_b"), full))

    def _dropped(self, x: mx.array) -> mx.array:
        """``x`` with features dropped. Where x is sharded, this rank's shard of what is dropped from all features:
        ranks with the same seed would otherwise drop the same ones of their shards."""
        linear = self.linear
        if linear.shard_axis == 0 or not (self._drops and self.dropout.training):
            return self.dropout(x)
        kept = self.dropout(mx.ones((*x.shape[:-1], linear.input_dims), x.dtype))
        return x * linear.take_shard(kept, -1)


def draw_full(layer: nn.Module, shape: tuple[int, ...], shard: Callable[[str, mx.array], mx.array]) -> None:
    """Lets mlx-lm's ``linear_to_lora_layers`` draw the adapter of the full layer, and keep this rank's shard of it.

    ``shape`` is that of the full weight, not packed; ``shard(name, full)`` this rank's shard of ``lora_a``, ``lora_b``.
    """
    become(layer, _drawn_full(type(layer)))
    object.__setattr__(layer, "_full", (shape, shard))


def as_given(layer: nn.Module) -> None:
    """Gives a layer that is full again the class that it had."""
    if hasattr(layer, "_full"):
        restore(layer)
        del layer._full


@cache
def _drawn_full(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"to_lora": _to_lora, "__module__": kind.__module__})


def _to_lora(self: nn.Module, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
    """The layer with mlx-lm's adapter, which its ``linear_to_lora_layers`` calls."""
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

    (*experts, output_dims, input_dims), shard = self._full
    kind: Callable[..., nn.Module] = LoRASwitchLinear if experts else LoRALinear
    adapter = kind(input_dims, output_dims, *experts, r=r, dropout=dropout, scale=scale)
    adapter.linear = self
    for name in ("lora_a", "lora_b"):
        adapter[name] = shard(name, adapter[name])
    return adapter
