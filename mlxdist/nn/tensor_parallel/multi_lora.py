"""Several low-rank adapters on one linear layer, sharded or not: each row of a batch has one of them, or none.

Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", arXiv:2310.18547: the products of all rows are computed together,
each with the matrices of its adapter.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument

from ..adapters_of_rows import given_adapters
from .lora import ShardedLinear

__all__ = ["MultiLoRALinear"]


class MultiLoRALinear(nn.Module):
    """A linear layer with the adapters of several :class:`LoRALinear` on it, of this package or of mlx-lm.

    Row i of the input has the adapter that :func:`adapters_of_rows` says: ``y + scale * (x A) B``. It is for inference:
    parameters are frozen, and there is no dropout. The forward pass needs no collective besides the layer's own.

    Called as the layer, with an input whose first axis is the batch, or the batch and the next axes merged into one.

    Args:
        adapters: the layer with the first adapter, with the second, and so on, None for one that is not on it. Their
            ``linear`` is the same. At least one is not None.

    Attributes:
        linear: the layer.
        lora_a: float32 of shape (adapters + 1, inputs, r) with the largest r; others have zeros behind. The first is
            all zeros: no adapter.
        lora_b: float32 of shape (adapters + 1, r, outputs).
    """

    def __init__(self, adapters: Sequence[nn.Module | None]) -> None:
        super().__init__()
        example = next(each for each in adapters if each is not None)
        self.linear = example.linear
        inputs, outputs = example.lora_a.shape[0], example.lora_b.shape[1]
        rank = max(each.lora_a.shape[1] for each in adapters if each is not None)
        nothing = mx.zeros((inputs, rank)), mx.zeros((rank, outputs))
        matrices = [nothing, *(nothing if each is None else _padded(each, rank) for each in adapters)]
        self.lora_a, self.lora_b = (mx.stack(list(each)) for each in zip(*matrices))
        self._scale = mx.array([0.0, *(0.0 if each is None else each.scale for each in adapters)])
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        linear, (adapters, rows) = self.linear, given_adapters()
        if rows is None:
            return linear(x)
        if x.shape[0] % len(adapters) or not 0 <= min(adapters) <= max(adapters) < len(self["lora_a"]):
            raise InvalidArgument(
                f"adapters_of_rows: a batch of shape {x.shape} with {len(self['lora_a']) - 1} adapters cannot have "
                f"{str(list(adapters)):.100}"
            )
        if not isinstance(linear, ShardedLinear):
            return linear(x) + self._adapted(x, rows)
        x = linear.enter(x)
        return linear.leave(linear.product(x) + self._adapted(x, rows))

    def _adapted(self, x: mx.array, rows: mx.array) -> mx.array:
        batch = x.reshape(rows.size, -1, x.shape[-1]).astype(mx.float32)
        z = mx.gather_mm(batch, self["lora_a"], rhs_indices=rows)
        z = mx.gather_mm(z, self["lora_b"], rhs_indices=rows)
        z = self._scale[rows][:, None, None] * z
        return z.astype(x.dtype).reshape(*x.shape[:-1], -1)


def _padded(adapter: nn.Module, rank: int) -> tuple[mx.array, mx.array]:
    """The two matrices of an adapter in float32, as mlx-lm trains them, with zeros up to ``rank``."""
    more = (0, rank - adapter.lora_a.shape[1])
    a, b = (adapter[name].astype(mx.float32) for name in ("lora_a", "lora_b"))
    return mx.pad(a, [(0, 0), more]), mx.pad(b, [more, (0, 0)])
