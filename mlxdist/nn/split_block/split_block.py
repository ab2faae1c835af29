"""A decoder layer as two compiled segments with an all_sum between them: split command buffers.

    segment 1   norm, merged QKV, rotary embedding, KV cache, attention, output projection (inputs sharded)
                all_sum
    segment 2   h = x + attention;  norm, merged gate and up, SiLU times up, down projection (inputs sharded)
                all_sum, whose result is added to h

With ``submit=True`` each segment is handed to MLX together with its all_sum as soon as it is built (`mx.async_eval`):
on a GPU that commits the command buffer where the collective has to wait for it, two submissions per layer. With
``submit=False`` a whole model is one lazy graph: best on the CPU backend, where a submission is pure cost.

Layers of equal sizes share their compiled segments. The KV cache is a buffer of fixed size that goes through the
compiled function and is written in place, with the position as an array: nothing is traced again from token to token,
only when the part of the buffer that attention reads grows by another `WINDOW`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.opaque import Opaque, create
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_sum

from ..rank_checks import agreed, described
from .merged import project
from .rotary import RotaryTable, rotate
from .shard_layer import Shape, group_of_layer, shard_of_layer
from .submissions import submit, traced

__all__ = [
    "WINDOW",
    "Positions",
    "SplitBlock",
    "positions",
    "positions_of",
    "ranks_of",
    "relative_error",
    "reserve",
    "segments",
    "settings",
    "table_of",
    "without_sums",
]

WINDOW = 32  # attention of one token reads the cache up to the next multiple of this
NAME = "SplitBlock.from_layer"
TOLERANCE = 1e-3  # relative difference in float32 above which a block does not compute what its layer does


class Positions(NamedTuple):
    """The arrays that depend on the position and not on the layer: made once for all layers of a model."""

    offset: mx.array  # (1,): where in the cache the new keys go
    cos: mx.array
    sin: mx.array
    mask: mx.array | str | None
    window: int  # how much of the cache attention reads


class SplitBlock(nn.Module, metaclass=Opaque):
    """A block made by :meth:`from_layer`. Called like the decoder layer it stands for: ``block(x, mask, cache)``.

    Parameters are this rank's shards: ``input_norm``, ``qkv``, ``output``, ``post_norm``, ``gate_up``, ``down`` and, if
    the layer normalizes its queries and keys, ``qk_norm``. It is for inference: a block has no way back to a layer.

    Attributes:
        submit: whether each segment is handed to MLX at once; may be set.
    """

    _made_by = NAME

    def __init__(
        self, shape: Shape, parameters: dict[str, Any], table: RotaryTable, group: Group | None, submit: bool
    ) -> None:
        super().__init__()
        self._shape, self._group = shape, group
        self._table = table  # of its rotary embedding
        self.submit = submit
        for name, value in parameters.items():
            self[name] = value

    def _extra_repr(self) -> str:
        shape, group = self._shape, self._group
        rank = "without sums" if group is None else f"rank {group.rank()} of {group.size()}"
        heads = f"heads={shape.heads}, kv_heads={shape.kv_heads}, head_dim={shape.head_dim}"
        return f"{rank}, {heads}, submit={self.submit}"

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        *,
        group: GroupLike | None = None,
        rank_shares: Sequence[float] | None = None,
        transposed: bool | None = None,
        submit: bool | None = None,
        tables: Iterable[RotaryTable] = (),
        check: bool = True,
    ) -> SplitBlock:
        """Makes a block of a decoder layer of mlx-lm that is shaped as in Llama or Qwen3, full or sharded already.

        That is: ``input_layernorm``, ``self_attn`` (``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``rope``; with or
        without ``q_norm`` and ``k_norm`` over a head), ``post_attention_layernorm``, ``mlp`` (``gate_proj``,
        ``up_proj``, ``down_proj``, SiLU); linears of `nn.Linear` or `nn.QuantizedLinear`, with or without bias, and on
        one rank, or in a layer that is sharded, also with low-rank adapters.

        Args:
            layer, group: the same layer on all ranks of the group, which all call this. A layer that `shard_model` has
                sharded stays so, over the ranks that it is sharded over: they call this, and ``group`` is not used.
            rank_shares: one positive number a rank, for shards in that proportion (see `split_sizes`); ``None`` for a
                layer that is sharded.
            transposed: keep matrices as (in, out); by default on the CPU backend only.
            submit: hand each segment to MLX at once; by default on a GPU only.
            tables: of other layers; one that stands for this layer's rotary embedding, too, is shared.
            check: compare with the layer on three random tokens, which in 16 bits could hide a difference. A
                collective: an error on one rank is one on all.

        Raises:
            InvalidArgument: the layer has another shape, cannot be sharded like this, or (``check``) is not what a
                block computes, or has other weights on another rank; a rank with another exception raises that itself.
            Mismatch: on all ranks, which have other layers.
        """
        held, on_cpu = group_of_layer(layer) if isinstance(layer, nn.Module) else None, mx.default_device() == mx.cpu
        group = held or group_of(group)
        with agreed(NAME, group, described(layer) if held is None else {}) if check else nullcontext():
            if held is not None and rank_shares is not None:
                raise InvalidArgument(f"{NAME}: the layer is sharded already; leave out rank_shares")
            transposed = on_cpu if transposed is None else transposed
            shape, parameters = shard_of_layer(layer, group.rank(), group.size(), rank_shares, transposed)
            rope, dim = layer.self_attn.rope, shape.head_dim
            table = next((table for table in tables if table.stands_for(rope, dim)), None) or RotaryTable(rope, dim)
            shape = shape._replace(rotated=table.dims, traditional=table.traditional)
            block = create(cls, shape, parameters, table, group, not on_cpu if submit is None else submit)
            for name, value in settings(layer).items():
                setattr(block, name, value)
            if check and held is None:
                wanted = _change(layer)
        if check:
            if held is not None:  # ranks add up, which they must not do within the block above
                wanted = _change(layer)
            found = _change(block)
            with agreed(NAME, group):
                _require_close(found, wanted, type(layer).__name__)
        return block

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        """Computes the layer, whose arguments it also has. The result has shape and dtype of ``x``.

        Args:
            x: (batch, length, hidden), the same on all ranks, of the dtype in which the layer computes.
            mask: as in mlx-lm: ``None``, "causal" or an array. A single token never needs it.
            cache: a cache of mlx-lm for this layer alone; ``None`` for none. It holds this rank's KV heads.

        Raises:
            InvalidArgument: the cache holds no keys and values, or those of another batch.
        """
        if cache is not None and not _is_plain(cache):
            return self._through(x, mask, cache)
        where = positions_of(self, x, mask, cache)
        if cache is None:
            return segments(self, x, None, None, where)[0]
        keys, values = reserve(self, cache, x, where.window)
        cache.keys = cache.values = None  # this call alone holds them, so that MLX writes into them in place
        y, cache.keys, cache.values = segments(self, x, keys, values, where)
        cache.offset += x.shape[1]
        return y

    def _through(self, h: mx.array, mask: mx.array | str | None, cache: Any) -> mx.array:
        """The layer with a cache that is more than two buffers: mlx-lm's code reads and writes it, and attends."""
        if not hasattr(cache, "update_and_fetch"):
            raise InvalidArgument(f"SplitBlock: {type(cache).__name__} is not a cache of keys and values")
        from mlx_lm.models.base import scaled_dot_product_attention

        attend: Callable[..., mx.array] = scaled_dot_product_attention  # its mask may be "causal"
        heads, output = _compiled_around_attention(self._shape)
        qk, v = heads(h, *self._of_heads())
        qk = self._table.rope(qk, offset=cache.offset)
        keys, values = cache.update_and_fetch(qk[:, self._shape.heads :], v)
        y = attend(qk[:, : self._shape.heads], keys, values, cache=cache, scale=self._shape.scale, mask=mask)
        return self._second(h, output(y, [dict(matrix) for matrix in self.output]))

    def _of_heads(self) -> tuple[mx.array, list[dict[str, mx.array]], mx.array | None]:
        """The parameters that make queries, keys and values."""
        return self.input_norm, [dict(matrix) for matrix in self.qkv], self.get("qk_norm")

    def _second(self, x: mx.array, attention: mx.array) -> mx.array:
        """The rest of the layer from the first sum on."""
        _, second = _compiled(self._shape)
        matrices = [dict(matrix) for matrix in self.gate_up], [dict(matrix) for matrix in self.down]
        h, y = second(x, self._sum(attention), self.post_norm, *matrices)
        return h + self._sum(y)

    def _sum(self, partial: mx.array) -> mx.array:
        total = partial if self._group is None else all_sum(partial, group=self._group)
        if self.submit:
            submit(total)
        return total


def positions_of(block: SplitBlock, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> Positions:
    """The positions for :func:`segments`: equal for all blocks that share a table and whose caches are equally far."""
    offset = None if cache is None else cache.offset
    # An array that is a mask is in the value too, so that its id stays its own.
    key = x.shape[1], offset, id(mask) if isinstance(mask, mx.array) else mask
    return block._table.recent(key, lambda: (positions(block._table, x.shape[1], offset, mask), mask))[0]


def segments(
    block: SplitBlock, x: mx.array, keys: mx.array | None, values: mx.array | None, where: Positions
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Computes a block, on arrays alone. Inside `mx.compile` a block must have ``submit=False``."""
    first, _ = _compiled(block._shape)
    output = [dict(matrix) for matrix in block.output]
    attention, keys, values = first(x, *block._of_heads(), output, keys, values, *where)
    return block._second(x, attention), keys, values


def reserve(block: SplitBlock, cache: Any, h: mx.array, window: int = 0) -> tuple[mx.array, mx.array]:
    """The buffers of a `KVCache`, with room for the tokens of ``h`` and ``window``: it grows by its ``step``."""
    if not _is_plain(cache):
        raise InvalidArgument(f"SplitBlock: these segments work with a KVCache, not with a {type(cache).__name__}")
    batch, length, _ = h.shape
    heads, dim = block._shape.kv_heads, block._shape.head_dim
    needed = max(cache.offset + length, window)
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


def without_sums(block: SplitBlock) -> SplitBlock:
    """A block with every all_sum left out, to measure what they cost: its result is not the layer's."""
    return create(SplitBlock, block._shape, dict(block), block._table, None, block.submit)


def ranks_of(block: SplitBlock) -> int:
    """The number of ranks that share it."""
    return 1 if block._group is None else block._group.size()


def table_of(block: SplitBlock) -> RotaryTable:
    """That of its rotary embedding, for ``tables`` of :meth:`SplitBlock.from_layer`."""
    return block._table


def positions(table: RotaryTable, length: int, offset: int | None, mask: mx.array | str | None = None) -> Positions:
    """The positions of ``length`` tokens behind ``offset`` others in the cache; ``None`` if there is no cache."""
    cached, offset = offset is not None, offset or 0
    cos, sin = table.rows(offset, length)
    window = offset + length
    given = mask.shape[-1] if isinstance(mask, mx.array) else window
    if cached and length == 1 and given == window:
        # A window that stays the same for many tokens, and a mask for what is not there yet.
        window = -(-window // WINDOW) * WINDOW
        mask = _padded(mask, window) if isinstance(mask, mx.array) else _seen(window)[window - 1 - offset :][:window]
    return Positions(mx.array([offset]), cos, sin, mask, window)


@lru_cache(maxsize=1)
def _seen(window: int) -> mx.array:
    """An array that has every mask of one token as a slice: a view, and no arithmetic."""
    return mx.arange(2 * window) < window


def _padded(mask: mx.array, window: int) -> mx.array:
    """A mask that lets nothing behind it be seen: of booleans, or to be added."""
    unseen = False if mask.dtype == mx.bool_ else -mx.inf
    return mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, window - mask.shape[-1])], constant_values=unseen)


def settings(layer: nn.Module) -> dict[str, Any]:
    """The attributes that a model may read of a layer besides calling it: plain values such as ``use_sliding``."""
    return {name: value for name, value in vars(layer).items() if name[0] != "_" and not hasattr(SplitBlock, name)}


def _is_plain(cache: Any) -> bool:
    """Whether it is mlx-lm's `KVCache` itself: two buffers that are filled from the front."""
    return (type(cache).__module__, type(cache).__name__) == ("mlx_lm.models.cache", "KVCache")


def relative_error(found: mx.array, wanted: mx.array) -> float:
    """The error in the norm, in float32; NaN if either has one. Models that forbid tokens by -inf have it in both."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    difference = mx.linalg.norm(mx.where(found == wanted, 0, found - wanted))
    norm = mx.linalg.norm(mx.where(mx.isinf(wanted), 0, wanted))
    return float(np.array(difference / mx.maximum(norm, 1e-30)))


def _change(layer: nn.Module) -> mx.array:
    """The change that a layer, or its block, makes of three tokens, the same on all ranks; evaluated."""
    norm = layer.input_norm if isinstance(layer, SplitBlock) else layer.input_layernorm.weight
    x = mx.random.normal((1, 3, norm.size), key=mx.random.key(0))
    y = layer(x, "causal", None) - x
    mx.eval(y)
    return y


def _require_close(found: mx.array, wanted: mx.array, name: str) -> None:
    error = relative_error(found, wanted)
    if not error <= TOLERANCE:
        raise InvalidArgument(
            f"SplitBlock: differs from {name} by {error:.2g} of its norm: the layer computes something else than those "
            "of Llama and Qwen3, or the ranks hold different weights"
        )


def _heads(shape: Shape, h: mx.array, norm: mx.array, qkv: list, qk_norm: mx.array | None) -> tuple[mx.array, mx.array]:
    """Queries and keys, and values, of this rank's heads: (batch, length, heads, head_dim); not turned yet."""
    heads, kv_heads = shape.heads, shape.kv_heads
    y = project(shape.qkv, qkv, mx.fast.rms_norm(h, norm, shape.eps[0]))
    y = y.reshape(*y.shape[:2], heads + 2 * kv_heads, shape.head_dim)
    qk, v = y[:, :, : heads + kv_heads], y[:, :, heads + kv_heads :]
    if qk_norm is not None:
        qk = mx.fast.rms_norm(qk.astype(mx.result_type(qk, qk_norm)), None, shape.eps[2]) * qk_norm
    return qk, v


@cache
def _compiled(shape: Shape) -> tuple[Callable, Callable]:
    def first(x: Any, norm: Any, qkv: Any, qk_norm: Any, output: Any, keys: Any, values: Any, *where: Any) -> Any:
        offset, cos, sin, mask, window = where
        traced()
        qk, v = _heads(shape, x, norm, qkv, qk_norm)
        qk = rotate(qk, cos, sin, shape.rotated, shape.traditional)
        q, k, v = (y.transpose(0, 2, 1, 3) for y in (qk[:, :, : shape.heads], qk[:, :, shape.heads :], v))
        if keys is not None:
            keys = mx.slice_update(keys, k, offset, (2,))
            values = mx.slice_update(values, v, offset, (2,))
            k, v = keys[:, :, :window], values[:, :, :window]
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=shape.scale, mask=mask)
        return _output(shape, y, output), keys, values

    def second(h: Any, attention: Any, norm: Any, gate_up: Any, down: Any) -> Any:
        traced()
        h = h + attention
        gate, up = mx.split(project(shape.gate_up, gate_up, mx.fast.rms_norm(h, norm, shape.eps[1])), 2, -1)
        return h, project(shape.down, down, nn.silu(gate) * up)

    return mx.compile(first), mx.compile(second)


@cache
def _compiled_around_attention(shape: Shape) -> tuple[Callable, Callable]:
    """The first segment without what lies between its projections."""

    def heads(h: Any, norm: Any, qkv: Any, qk_norm: Any) -> Any:
        traced()
        return tuple(x.transpose(0, 2, 1, 3) for x in _heads(shape, h, norm, qkv, qk_norm))

    def output(y: Any, matrices: Any) -> Any:
        traced()
        return _output(shape, y, matrices)

    return mx.compile(heads), mx.compile(output)


def _output(shape: Shape, y: mx.array, matrices: list) -> mx.array:
    return project(shape.output, matrices, y.transpose(0, 2, 1, 3).flatten(2))
