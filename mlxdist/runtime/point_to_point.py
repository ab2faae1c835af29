"""Messages from one rank to another. Arguments, arrays and errors are those of :mod:`mlxdist.runtime.ops`.

Messages between two ranks are matched in order: what one sends first is what the other receives first, and must have
the shape and dtype that the other expects.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base import errors

from . import eager
from .arguments import as_mlx, check_peer, group_of, mlx_group
from .group import Group
from .native import bridge
from .ops import Array, Stream
from .timeout import native_timeout

__all__ = ["recv", "recv_like", "send", "sendrecv"]


def send(
    x: Array,
    dst: int,
    *,
    group: Group | None = None,
    stream: Stream = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """Sends ``x`` to rank ``dst``, which must call :func:`recv`. Returns ``x``: evaluating that is what sends it."""
    group = group_of(group)
    check_peer("send", "dst", dst, group)
    if (array := as_mlx("send", x, stream, None, dtype, async_op)) is not None:
        return mx.distributed.send(array, dst, group=mlx_group("send", group, timeout), stream=stream)
    return eager.send(x, dst, group, dtype, async_op, timeout)


def recv(
    shape: Sequence[int],
    dtype: Any,
    src: int,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> mx.array | np.ndarray:
    """Receives what rank ``src`` sends to this rank: an ``mx.array`` if ``dtype`` is MLX's, else a NumPy array.

    ``shape`` and ``dtype`` must be those of what is sent.

    Raises:
        InvalidArgument: besides, ``stream`` with a dtype of NumPy, ``out`` or ``async_op`` with one of MLX.
    """
    group = group_of(group)
    check_peer("recv", "src", src, group)
    if not isinstance(dtype, mx.Dtype):
        if stream is not None:
            raise errors.InvalidArgument("recv: stream is for dtypes of MLX, and dtype is one of NumPy")
        return eager.recv(shape, dtype, src, group, out, async_op, timeout)
    if out is not None or async_op:
        raise errors.InvalidArgument("recv: out and async_op are for NumPy dtypes, and dtype is one of MLX")
    return mx.distributed.recv(shape, dtype, src, group=mlx_group("recv", group, timeout), stream=stream)


def recv_like(
    x: Array,
    src: int,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """Receives from rank ``src``: kind, shape and dtype of ``x``, which stays as it is unless it is ``out``."""
    group = group_of(group)
    check_peer("recv_like", "src", src, group)
    if (array := as_mlx("recv_like", x, stream, out, dtype, async_op)) is not None:
        return mx.distributed.recv_like(array, src, group=mlx_group("recv_like", group, timeout), stream=stream)
    return eager.recv_like(x, src, group, out, dtype, async_op, timeout)


def sendrecv(
    x: Array,
    dst: int,
    src: int,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """Sends ``x`` to rank ``dst`` and receives from rank ``src`` at the same time, so that all ranks may do it at once.

    ``shape`` and ``dtype`` are those of what is received, ``None`` those of ``x``. For bits in uint16, a ``dtype`` of
    "bfloat16" is that of both. The gradient travels back: the cotangent goes to ``src``, and that of ``x`` comes from
    ``dst``.

    Raises:
        InvalidArgument: besides, a dimension of ``shape`` is negative, or ``dtype`` is not of the same kind as ``x``.
    """
    group = group_of(group)
    check_peer("sendrecv", "dst", dst, group)
    check_peer("sendrecv", "src", src, group)
    if (array := as_mlx("sendrecv", x, stream, out, None, async_op)) is None:
        return eager.sendrecv(x, dst, src, shape, dtype, group, out, async_op, timeout)
    shape = array.shape if shape is None else tuple(shape)
    if any(length < 0 for length in shape):
        raise errors.InvalidArgument(f"sendrecv: shape {shape} has a negative dimension")
    if not isinstance(dtype, mx.Dtype | None):
        raise errors.InvalidArgument(f"sendrecv: dtype must be one of MLX, as x is an mx.array, not {dtype!r}")
    dtype, limit = array.dtype if dtype is None else dtype, native_timeout("sendrecv", timeout)
    return bridge.sendrecv(array, group.connection, dst, src, list(shape), dtype, stream, limit)
