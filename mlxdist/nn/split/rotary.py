"""Rotary position embeddings as tables of cosines and sines, which all layers of a model share.

A rotary embedding (Su et al. 2021, "RoFormer", arXiv:2104.09864) is linear in what it turns, so its cosines and sines
can be read off any module that computes one, whatever its frequencies and scales: it turns (1, 0) into (cos, sin).
With the tables, turning the queries and keys of a layer is one fused kernel on every backend; ``mx.fast.rope`` is about
ten operations on the CPU backend, in every layer again, for the queries and for the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...errors import InvalidArgument

__all__ = ["RotaryTable", "rotate"]


class RotaryTable:
    """Cosines and sines of ``rope``, a module that is called with ``(x, offset=...)``, for heads of ``head_dim``.

    Made longer as positions are asked for.

    Raises:
        InvalidArgument: ``rope`` is no rotary embedding, or one of another kind: its result differs from the table's.
    """

    def __init__(self, rope: Callable[..., mx.array], head_dim: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self.traditional = bool(getattr(rope, "traditional", False))
        self.dims = next((getattr(rope, n) for n in ("dims", "dim", "_dims") if hasattr(rope, n)), head_dim)
        if not (isinstance(self.dims, int) and 0 < self.dims <= head_dim and self.dims % 2 == 0):
            raise InvalidArgument(f"{type(rope).__name__}: cannot rotate {self.dims} of {head_dim} dimensions")
        self._cos = self._sin = mx.zeros((0, 1, self.dims))
        self._check()

    def rows(self, offset: int, length: int) -> tuple[mx.array, mx.array]:
        """cos and sin of positions ``offset`` to ``offset + length``: (length, 1, dims) each, float32, for `rotate`."""
        if self._cos.shape[0] < offset + length:
            self._extend(-(-(offset + length) // 1024) * 1024)
        return self._cos[offset : offset + length], self._sin[offset : offset + length]

    def _extend(self, positions: int) -> None:
        dims, half = self.dims, self.dims // 2
        first = mx.arange(dims) % 2 == 0 if self.traditional else mx.arange(dims) < half
        ones = mx.zeros((1, 1, positions, self._head_dim))
        ones[..., :dims] = first.astype(mx.float32)
        turned = self._rope(ones, offset=0)[0, 0, :, :dims]
        pairs = turned.reshape(positions, half, 2) if self.traditional else turned.reshape(positions, 2, half)
        axis = -1 if self.traditional else 1
        cos, sin = mx.split(pairs, 2, axis)
        self._cos = mx.concatenate([cos, cos], axis).reshape(positions, 1, dims)
        self._sin = mx.concatenate([-sin, sin], axis).reshape(positions, 1, dims)
        mx.eval(self._cos, self._sin)

    def _check(self) -> None:
        self._probe = _probe(self._rope, self._head_dim)
        wanted = self._rope(_random(self._head_dim), offset=5).transpose(0, 2, 1, 3)
        found = rotate(_random(self._head_dim).transpose(0, 2, 1, 3), *self.rows(5, 3), self.dims, self.traditional)
        error = mx.abs(found - wanted).max().item()
        if not error < 1e-3:
            raise InvalidArgument(
                f"{type(self._rope).__name__}: not a rotary embedding that a table of cosines and sines can stand for; "
                f"on a random vector they differ by {error:g}"
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

