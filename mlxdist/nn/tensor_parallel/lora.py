"""A low-rank adapter on top of a linear layer that is cut: column- or row-parallel, or of a model of shard_model.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685: ``y + scale * (x A) B``. Names,
shapes and ``scale`` are those of mlx-lm's ``LoRALinear``, so that its adapters can be put in and taken out.
"""

from math import sqrt
from typing import Self

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument

from .parallel_linear import CutLinear, quantization

__all__ = ["LoRALinear"]


class LoRALinear(nn.Module):
    """An adapter on a parallel layer, plain or quantized. The matrix next to the cut dimension is cut like it.

    The layer is one of this package or one that :func:`mlxdist.nn.shard_model` has cut; mlx-lm's
    ``linear_to_lora_layers`` puts this class on both. On a column-parallel layer ``lora_b``, of shape (r, output_dims),
    is cut and ``lora_a``, (input_dims, r), is whole on every rank; on a row-parallel one it is the other way round. The
    forward pass then needs no collective besides the layer's own, and the backward pass one more: the all_sum of the
    gradient of the whole matrix, which so stays the same on all ranks. The gradients are this rank's parts of those of
    the adapter on the whole layer; with ``dropout`` bitwise the same elements are dropped, if all ranks are seeded
    alike.

    Train it as with mlx-lm: ``model.freeze()`` first, then put the adapters in.

    Called as the layer: shapes and dtypes are those of ``linear``. The adapter is float32, unless another is loaded.

    Args:
        linear: the column- or row-parallel layer.
        r: the rank of the adapter, at least 1.
        dropout: the share of the input's features that the adapter does not see in training, from 0 to below 1.
        scale: as in mlx-lm.

    Attributes:
        linear: the layer; lora_a, lora_b: this rank's part of the adapter; scale, dropout: as in mlx-lm.

    Raises:
        InvalidArgument: ``linear`` is no parallel layer; ``r`` is not positive; ``dropout`` is not in [0, 1).
    """

    @classmethod
    def from_base(cls, linear: CutLinear, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Self:
        """An adapter of rank ``r`` on ``linear`` that changes nothing yet. Seed all ranks alike.

        Raises:
            InvalidArgument: ``linear`` is no parallel layer; ``r`` is not positive; ``dropout`` is not in [0, 1).
        """
        return cls(linear, r, dropout, scale)

    def __init__(self, linear: CutLinear, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> None:
        super().__init__()
        if not isinstance(linear, CutLinear):
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
        self.lora_a, self.lora_b = linear.adapter_part(
            mx.random.uniform(low=-bound, high=bound, shape=(linear.input_dims, r)), mx.zeros((r, linear.output_dims))
        )

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        a, b = linear.adapter(self["lora_a"], self["lora_b"])
        x = linear.enter(x)
        z = (self._dropped(x) @ a) @ b
        return linear.leave(linear.product(x) + (self.scale * z).astype(x.dtype))

    def fuse(self, dequantize: bool = False) -> CutLinear:
        """The layer with the adapter in its weight, quantized as it was unless ``dequantize``. No collective."""
        linear = self.linear
        weight, config = linear["weight"], quantization(linear)
        if config:
            weight = mx.dequantize(weight, linear["scales"], linear.get("biases"), **config)
        delta = (self.scale * self["lora_b"].T) @ self["lora_a"].T
        return linear.with_weight(weight + delta.astype(weight.dtype), None if dequantize else config or None)

    def load_adapter(self, lora_a: mx.array, lora_b: mx.array) -> Self:
        """Takes this rank's part of a whole adapter, such as one that mlx-lm saved.

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
        self.lora_a, self.lora_b = self.linear.adapter_part(lora_a, lora_b)
        return self

    def join_adapter(self) -> dict[str, mx.array]:
        """``lora_a`` and ``lora_b`` of the whole layer, on every rank. A collective that is carried out at once."""
        whole = self.linear.join_adapter(self["lora_a"], self["lora_b"])
        mx.eval(whole)
        return dict(zip(("lora_a", "lora_b"), whole))

    def _dropped(self, x: mx.array) -> mx.array:
        """``x`` with features dropped. Where x is cut, this rank's part of what is dropped from all features: ranks
        with the same seed would otherwise drop the same ones of their parts."""
        linear = self.linear
        if linear.cut_axis == 0 or not (self._drops and self.dropout.training):
            return self.dropout(x)
        kept = self.dropout(mx.ones((*x.shape[:-1], linear.input_dims), x.dtype))
        return x * linear.part_of_inputs(kept)
