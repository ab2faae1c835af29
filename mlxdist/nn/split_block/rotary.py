"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) as cosines and sines, which all layers share.

A rotary embedding is linear in what it turns, so its cosines and sines can be read off any module that computes one: it
turns (1, 0) into (cos, sin). That holds where a vector is turned by its own position alone: `FIXED` are the kinds of
which that is known. Others, such as dynamic NTK, turn by the length of the sequence so far too.

With the tables, turning the queries and keys of a layer is one fused kernel on every backend; ``mx.fast.rope`` is about
ten operations on the CPU backend, in every layer again, for the queries and for the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument

from .probes import boundaries, places

__all__ = ["FIXED", "RotaryTable", "rotate"]

RECENT = 4  # what one pass through a model asks for: a few masks, such as with and without a window

# The modules and names of kinds whose frequencies and scales are fixed when they are made.
FIXED = {
    ("mlx.nn.layers.positional_encoding", "RoPE"),
    ("mlx_lm.models.hunyuan_v1_dense", "DynamicNTKAlphaRoPE"),
    ("mlx_lm.models.rope_utils", "Llama3RoPE"),
    ("mlx_lm.models.rope_utils", "ProportionalRoPE"),
    ("mlx_lm.models.rope_utils", "SuScaledRoPE"),
    ("mlx_lm.models.rope_utils", "YarnRoPE"),
    ("mlx_lm.models.smollm3", "NoPE"),
}


class RotaryTable:
    """Cosines and sines of ``rope``, called with ``(x, offset=...)``, for heads of ``head_dim``; it grows on demand.

    Raises:
        InvalidArgument: ``rope`` is of a kind that is not `FIXED`; or its result differs from the table's, at the start
            or at a number of positions that it names.
    """

    def __init__(self, rope: Callable[..., mx.array], head_dim: int) -> None:
        if (type(rope).__module__, type(rope).__name__) not in FIXED:
            raise InvalidArgument(
                f"{type(rope).__name__}: not a rotary embedding that is known to turn a vector by its own position "
                "alone, so no table of cosines and sines can stand for it"
            )
        self.rope = rope  # itself, for positions that are not the same in all rows of a batch
        self._head_dim = head_dim
        self.traditional = bool(getattr(rope, "traditional", False))
        self.dims = next((getattr(rope, n) for n in ("dims", "dim", "_dims") if hasattr(rope, n)), head_dim)
        if not (isinstance(self.dims, int) and 0 < self.dims <= head_dim and self.dims % 2 == 0):
            raise InvalidArgument(f"{type(rope).__name__}: cannot rotate {self.dims} of {head_dim} dimensions")
        self._recent: dict[tuple, Any] = {}
        self._cos = self._sin = mx.zeros((0, 1, self.dims))
        self._probe = _probe(rope, head_dim)
        self._check(5, *self.rows(5, 3))
        for place in places(boundaries(rope)):
            self._check(place, *self._turned(place, 3))

    def rows(self, offset: int, length: int) -> tuple[mx.array, mx.array]:
        """cos and sin of positions ``offset`` to ``offset + length``: (length, 1, dims) each, float32, for `rotate`."""
        if self._cos.shape[0] < offset + length:
            self._cos, self._sin = self._turned(0, -(-(offset + length) // 1024) * 1024)
            mx.eval(self._cos, self._sin)
        return self._cos[offset : offset + length], self._sin[offset : offset + length]

    def recent(self, key: tuple, make: Callable[[], Any]) -> Any:
        """The result of ``make``, made once for the layers of a model that use ``key`` in one pass."""
        if key in self._recent:
            return self._recent[key]
        if len(self._recent) == RECENT:
            self._recent.clear()
        self._recent[key] = made = make()
        return made

    def _turned(self, offset: int, positions: int) -> tuple[mx.array, mx.array]:
        """cos and sin as `rows` has them, computed by the module."""
        dims, half = self.dims, self.dims // 2
        first = mx.arange(dims) % 2 == 0 if self.traditional else mx.arange(dims) < half
        ones = mx.zeros((1, 1, positions, self._head_dim))
        ones[..., :dims] = first.astype(mx.float32)  # where dims are all: a view of one row, without strides
        turned = self.rope(mx.contiguous(ones), offset=offset)[0, 0, :, :dims]
        pairs = turned.reshape(positions, half, 2) if self.traditional else turned.reshape(positions, 2, half)
        axis = -1 if self.traditional else 1
        cos, sin = mx.split(pairs, 2, axis)
        cos = mx.concatenate([cos, cos], axis).reshape(positions, 1, dims)
        return cos, mx.concatenate([-sin, sin], axis).reshape(positions, 1, dims)

    def _check(self, place: int, cos: mx.array, sin: mx.array) -> None:
        x = _random(self._head_dim)
        wanted = self.rope(x, offset=place).transpose(0, 2, 1, 3)
        found = rotate(x.transpose(0, 2, 1, 3), cos, sin, self.dims, self.traditional)
        error = float(np.array(mx.abs(found - wanted).max()))
        if not error < 1e-3:
            raise InvalidArgument(
                f"{type(self.rope).__name__}: not a rotary embedding that a table of cosines and sines can stand for; "
                f"on a random vector at position {place} they differ by {error:g}"
            )

    def stands_for(self, rope: Callable[..., mx.array], head_dim: int) -> bool:
        """Whether ``rope`` turns like the module that this table was made of, so that it needs none of its own."""
        return head_dim == self._head_dim and bool(mx.array_equal(_probe(rope, head_dim), self._probe))


def _random(head_dim: int) -> mx.array:
    return mx.random.normal((1, 1, 3, head_dim), key=mx.random.key(0))


def _probe(rope: Callable[..., mx.array], head_dim: int) -> mx.array:
    return rope(_random(head_dim), offset=777)


def rotate(x: mx.array, cos: mx.array, sin: mx.array, dims: int, traditional: bool) -> mx.array:
    """``x``, of shape (batch, length, heads, head_dim), turned by the rows of a table. Computed in float32."""
    head_dim = x.shape[-1]
    part = x[..., :dims].astype(mx.float32)
    # The halves (or neighbours) exchanged: a view with a negative stride, which the fused kernel reads as it is.
    pairs = part.reshape(*part.shape[:-1], *((dims // 2, 2) if traditional else (2, dims // 2)))
    exchanged = (pairs[..., ::-1] if traditional else pairs[..., ::-1, :]).reshape(part.shape)
    turned = (part * cos + exchanged * sin).astype(x.dtype)
    return turned if dims == head_dim else mx.concatenate([turned, x[..., dims:]], -1)
