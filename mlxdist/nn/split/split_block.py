"""A decoder layer as two compiled segments with an all_sum between them: split command buffers.

    segment 1   h = h + r;  norm, merged QKV, rotary embedding, KV cache, attention, output projection (inputs cut)
                all_sum
    segment 2   h = h + attention;  norm, merged gate and up, SiLU times up, down projection (inputs cut)
                all_sum, whose result is the r of the next layer: its addition belongs to that layer's first segment

Each segment is one graph that `mx.compile` has fused. With ``submit=True`` it is handed to MLX together with its
all_sum as soon as it is built (`mx.async_eval`): on a GPU that commits the command buffer at the very place where the
collective has to wait for it, two submissions per layer. With ``submit=False`` nothing is evaluated here, and a whole
model is one lazy graph: best on the CPU backend, where a submission is pure cost.

The weights are cut (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053), merged and laid out when the block is made;
see :mod:`mlxdist.nn.split.merged`. Layers of equal sizes share their compiled segments. The KV cache is a buffer of fixed
size that goes through the compiled function and is written in place, with the position as an array: nothing is traced
again from token to token, only when the part of the buffer that attention reads grows by another `WINDOW`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...arguments import group_of
from ...errors import InvalidArgument
from ...group import Group
from ...ops import all_max, all_sum
from .cut_layer import Shape, cut_layer
from .merged import project
from .rotary import RotaryTable, rotate
from .submissions import traced

__all__ = ["TOLERANCE", "WINDOW", "Positions", "SplitBlock", "positions", "relative_error", "require_agreement"]

WINDOW = 32  # attention of one token reads the cache up to the next multiple of this
# Relative difference above which a block does not compute what its layer does, or a model its original.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 1e-1}


class Positions(NamedTuple):
    """What depends on the position and not on the layer: made once for all layers of a model."""

    offset: mx.array  # (1,): where in the cache the new keys go
    cos: mx.array
    sin: mx.array
    mask: mx.array | str | None
    window: int  # how much of the cache attention reads


class SplitBlock(nn.Module):
    """What :meth:`from_layer` makes. Called like the decoder layer it stands for: ``block(x, mask, cache)``.

    Parameters are this rank's parts: ``input_norm``, ``qkv``, ``output``, ``post_norm``, ``gate_up``, ``down`` and, if
    the layer normalises its queries and keys, ``qk_norm``. For inference: a block has no way back to a layer.
    """

    def __init__(
        self, shape: Shape, parameters: dict[str, Any], rope: RotaryTable, group: Group | None, submit: bool
    ) -> None:
        super().__init__()
        self._shape, self._group = shape, group
        self._rope = rope
        self.submit = submit
        for name, value in parameters.items():
            self[name] = value

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        group: Group | None = None,
        *,
        weights: Sequence[float] | None = None,
        transposed: bool | None = None,
        submit: bool | None = None,
        ropes: Iterable[RotaryTable] = (),
        check: bool = True,
    ) -> SplitBlock:
        """Cuts a decoder layer of mlx-lm that is shaped as in Llama or Qwen3 and not sharded yet.

        That is: ``input_layernorm``, ``self_attn`` (``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``rope``; with or
        without ``q_norm`` and ``k_norm`` over a head), ``post_attention_layernorm``, ``mlp`` (``gate_proj``,
        ``up_proj``, ``down_proj``, SiLU); linears of `nn.Linear` or `nn.QuantizedLinear`, with or without bias.

        Args:
            group: the ranks to cut it over; they all call this, with the same layer.
            weights: one positive number a rank, for parts in that proportion (see `split_sizes`).
            transposed: keep matrices as (in, out); by default on the CPU backend only, see :mod:`mlxdist.nn.split.merged`.
            submit: hand each segment to MLX at once; by default on a GPU only.
            ropes: tables of other layers; one that stands for this layer's rotary embedding, too, is shared.
            check: compare with the layer on three random tokens. A collective: an error on one rank is one on all.

        Raises:
            InvalidArgument: the layer has another shape, cannot be cut like this, or (``check``) is not what a block
                computes, or not the same on all ranks.
        """
        group = group_of(group)
        refused, block = None, None
        try:
            block = cls._cut(layer, group, weights, transposed, submit, ropes)
        except InvalidArgument as error:
            refused = error
        if check:
            require_agreement(refused, group, "SplitBlock.from_layer")
            # On all ranks the same tokens, and each compares with its own layer.
            x = mx.random.normal((1, 3, block.input_norm.size), key=mx.random.key(0)).astype(block.input_norm.dtype)
            wrong = _differs(block(x, "causal") - x, layer(x, "causal", None) - x, type(layer).__name__)
            require_agreement(wrong, group, "SplitBlock.from_layer")
        elif refused is not None:
            raise refused
        return block

    @classmethod
    def _cut(
        cls,
        layer: nn.Module,
        group: Group,
        weights: Sequence[float] | None,
        transposed: bool | None,
        submit: bool | None,
        ropes: Iterable[RotaryTable],
    ) -> SplitBlock:
        on_cpu = mx.default_device() == mx.cpu
        fields, parameters = cut_layer(
            layer, group.rank(), group.size(), weights, on_cpu if transposed is None else transposed
        )
        given = layer.self_attn.rope, fields["head_dim"]
        rope = next((table for table in ropes if table.stands_for(*given)), None) or RotaryTable(*given)
        shape = Shape(**fields, rotated=rope.dims, traditional=rope.traditional)
        return cls(shape, parameters, rope, group, not on_cpu if submit is None else submit)

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        """(batch, length, hidden) to the same, as the layer does, of which it also has the arguments.

        Args:
            mask: as in mlx-lm: ``None``, "causal" or an array. One token never needs one.
            cache: a `KVCache` of mlx-lm for this layer alone; ``None`` for none. It holds this rank's KV heads.

        Raises:
            InvalidArgument: another kind of cache, or one of another batch.
        """
        h, r = self.step(x, None, self.positions(x, mask, cache), cache)
        return h + r

    @property
    def rope(self) -> RotaryTable:
        """The table of its rotary embedding, for a layer that has the same one."""
        return self._rope

    def positions(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> Positions:
        """For `step`: the same for all blocks whose caches are equally far."""
        return positions(self._rope, x.shape[1], None if cache is None else cache.offset, mask)

    def step(
        self, h: mx.array, r: mx.array | None, where: Positions, cache: Any = None
    ) -> tuple[mx.array, mx.array]:
        """The layer with its residuals left open: ``h`` and what is to be added to it, of this layer and the next.

        Args:
            h: (batch, length, hidden).
            r: the second result of the layer before; ``None`` before the first.
        """
        if cache is None:
            h, r, _, _ = self.segments(h, r, None, None, where)
            return h, r
        keys, values = self.reserve(cache, h)
        cache.keys = cache.values = None  # nobody else holds them, so that MLX writes into them in place
        h, r, cache.keys, cache.values = self.segments(h, r, keys, values, where)
        cache.offset += h.shape[1]
        return h, r

    def segments(
        self, h: mx.array, r: mx.array | None, keys: mx.array | None, values: mx.array | None, where: Positions
    ) -> tuple[mx.array, mx.array, mx.array | None, mx.array | None]:
        """`step` on arrays alone. Inside `mx.compile` a block must have ``submit=False``."""
        first, second = _compiled(self._shape)
        h, r, keys, values = first(
            h,
            r,
            self.input_norm,
            [dict(matrix) for matrix in self.qkv],
            self.get("qk_norm"),
            [dict(matrix) for matrix in self.output],
            keys,
            values,
            *where,
        )
        attention = self._sum(r)
        h, r = second(
            h,
            attention,
            self.post_norm,
            [dict(matrix) for matrix in self.gate_up],
            [dict(matrix) for matrix in self.down],
        )
        return h, self._sum(r), keys, values

    def without_sums(self) -> SplitBlock:
        """The same with every all_sum left out, to measure what they cost: its result is not the layer's."""
        return SplitBlock(self._shape, dict(self), self._rope, None, self.submit)

    def _sum(self, partial: mx.array) -> mx.array:
        total = partial if self._group is None else all_sum(partial, group=self._group)
        if self.submit:
            mx.async_eval(total)
        return total

    def reserve(self, cache: Any, h: mx.array) -> tuple[mx.array, mx.array]:
        """The buffers of the cache, with room for the tokens of ``h``: it grows by its ``step``."""
        if not any(base.__name__ == "KVCache" for base in type(cache).__mro__):
            raise InvalidArgument(f"SplitBlock: works with mlx-lm's KVCache, not with {type(cache).__name__}")
        batch, length, _ = h.shape
        heads, dim = self._shape.kv_heads, self._shape.head_dim
        needed = cache.offset + length
        present = 0 if cache.keys is None else cache.keys.shape[2]
        if present and cache.keys.shape[:2] != (batch, heads):
            raise InvalidArgument(
                f"SplitBlock: the cache is for batch and KV heads of {cache.keys.shape[:2]}, not {(batch, heads)}"
            )
        if present >= needed:
            return cache.keys, cache.values
        more = mx.zeros((batch, heads, -(-needed // cache.step) * cache.step - present, dim), h.dtype)
        if not present:
            return more, mx.zeros_like(more)
        return mx.concatenate([cache.keys, more], 2), mx.concatenate([cache.values, more], 2)


def positions(rope: RotaryTable, length: int, offset: int | None, mask: mx.array | str | None = None) -> Positions:
    """For ``length`` tokens behind ``offset`` others in the cache; ``None`` if there is no cache."""
    cached, offset = offset is not None, offset or 0
    cos, sin = rope.rows(offset, length)
    window = offset + length
    if cached and length == 1 and not isinstance(mask, mx.array):
        # A window that stays the same for many tokens, and a mask for what is not there yet.
        window = -(-window // WINDOW) * WINDOW
        mask = _seen(window)[window - 1 - offset :][:window]
    return Positions(mx.array([offset]), cos, sin, mask, window)


@lru_cache(maxsize=1)
def _seen(window: int) -> mx.array:
    """Of this one every mask of one token is a part: a view, and no arithmetic."""
    return mx.arange(2 * window) < window


def relative_error(found: mx.array, wanted: mx.array) -> float:
    """Of the norms, in float32; NaN where either has one."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return (mx.linalg.norm(found - wanted) / mx.maximum(mx.linalg.norm(wanted), 1e-30)).item()


def _differs(found: mx.array, wanted: mx.array, name: str) -> InvalidArgument | None:
    error = relative_error(found, wanted)
    if error <= TOLERANCE.get(found.dtype, 1e-3):
        return None
    return InvalidArgument(
        f"SplitBlock: differs from {name} by {error:.2g} of its norm: the layer computes something else than those of "
        "Llama and Qwen3, or the ranks hold different weights"
    )


def require_agreement(refused: InvalidArgument | None, group: Group, where: str) -> None:
    """Raises on every rank if any has a reason to refuse: its own where there is one. A collective."""
    if group.size() > 1:
        ranks = np.full(1, -1 if refused is None else group.rank(), np.int64)
        first = int(all_max(ranks, group=group)[0])
        if first >= 0 and refused is None:
            raise InvalidArgument(f"{where}: rank {first} has refused its model; its own error says why")
    if refused is not None:
        raise refused


@lru_cache(maxsize=None)
def _compiled(shape: Shape) -> tuple[Callable, Callable]:
    def first(h, r, norm, qkv, qk_norm, output, keys, values, offset, cos, sin, mask, window):
        traced()
        h = h if r is None else h + r
        heads, kv_heads = shape.heads, shape.kv_heads
        y = project(shape.qkv, qkv, mx.fast.rms_norm(h, norm, shape.eps[0]))
        y = y.reshape(*y.shape[:2], heads + 2 * kv_heads, shape.head_dim)
        qk, v = y[:, :, : heads + kv_heads], y[:, :, heads + kv_heads :]
        if qk_norm is not None:
            qk = mx.fast.rms_norm(qk, None, shape.eps[2]) * qk_norm
        qk = rotate(qk, cos, sin, shape.rotated, shape.traditional)
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (qk[:, :, :heads], qk[:, :, heads:], v))
        if keys is not None:
            keys = mx.slice_update(keys, k, offset, (2,))
            values = mx.slice_update(values, v, offset, (2,))
            k, v = keys[:, :, :window], values[:, :, :window]
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=shape.scale, mask=mask)
        y = y.transpose(0, 2, 1, 3).flatten(2)
        return h, project(shape.output, output, y), keys, values

    def second(h, attention, norm, gate_up, down):
        traced()
        h = h + attention
        gate, up = mx.split(project(shape.gate_up, gate_up, mx.fast.rms_norm(h, norm, shape.eps[1])), 2, -1)
        return h, project(shape.down, down, nn.silu(gate) * up)

    return mx.compile(first), mx.compile(second)
