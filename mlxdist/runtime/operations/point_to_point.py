"""Messages from one rank to another. Arguments, arrays and errors are those of
:mod:`mlxdist.runtime.operations.collectives`.

Messages between two ranks are matched in order: what one sends first is what the other receives first, and must have
the shape and dtype that the other expects.

Gradients travel back: that of a send is a receive, that of a receive a send, each the adjoint of the other. MLX visits
only what lies between the arguments of a function and its result, so both ends need a path. On the sender what
:func:`send` returns joins the result: by use, or by ``mx.depends``, which changes no value. On the receiver the path
comes from an array that is differentiated: the ``x`` of :func:`recv_like`, or the ``token`` of :func:`recv`, a
parameter, say. Its own gradient is zero, and evaluating it sends the cotangent::

    def loss(weight):  # rank 0
        sent = mlxdist.send(layer(weight, x), 1)
        return mx.depends([mx.array(0.0)], [sent])[0]

    def loss(weight):  # rank 1
        hidden = mlxdist.recv(shape, mx.float32, 0, token=weight)
        return head(weight, hidden)

    gradient = mx.grad(loss)(weight)

``mx.checkpoint`` runs its function again for the gradient, and so repeats the messages in it: the two ends of a
message are both inside such functions, or both outside.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import mlx.core as mx
import numpy as np

from ..label import next_label
from ..native import bridge
from . import eager
from .arguments import Call, Options, RecvOptions, SendOptions, operation
from .collectives import Array

__all__ = ["recv", "recv_like", "send", "sendrecv"]


@operation
def send(x: Array, dst: int, **options: Unpack[SendOptions]) -> Array:
    """Sends ``x`` to rank ``dst``, which must call :func:`recv`. Returns ``x``: evaluating that is what sends it.

    The gradient of ``x`` is the cotangent that ``dst`` sends back, plus that of what is returned.
    """
    call = Call("send", options)
    call.check_peer("dst", dst)
    if (array := call.lazy(x)) is None:
        return eager.send(call, x, dst)
    return bridge.send(array, call.connection, dst, call.stream, call.limit, next_label())


@operation
def recv(
    shape: Sequence[int], dtype: Any, src: int, *, token: mx.array | None = None, **options: Unpack[RecvOptions]
) -> mx.array | np.ndarray:
    """Receives what rank ``src`` sends to this rank: an ``mx.array`` if ``dtype`` is MLX's, else a NumPy array.

    ``shape`` and ``dtype`` must be those of what is sent. ``token``: an array of any shape, by which a gradient finds
    the way here: the cotangent is sent to ``src`` when the gradient of ``token``, zero, is evaluated. ``None``: there
    is no gradient.

    Raises:
        InvalidArgument: besides, a negative dimension of ``shape``, ``stream`` or ``token`` with a dtype of NumPy,
            ``out`` or ``async_op`` with one of MLX, a ``token`` that is no ``mx.array``.
    """
    call = Call("recv", options)
    call.check_peer("src", src)
    if not isinstance(dtype, mx.Dtype):
        if call.stream is not None or token is not None:
            raise call.error("stream and token are for dtypes of MLX, and dtype is one of NumPy")
        return eager.recv(call, shape, dtype, src)
    if call.out is not None or call.async_op:
        raise call.error("out and async_op are for NumPy dtypes, and dtype is one of MLX")
    shape = call.receive_shape(shape)
    if token is not None:
        if not isinstance(token, mx.array):
            raise call.error(f"token must be an mx.array, not {type(token).__name__}")
        return _traced_recv(call, token, shape, dtype, src)
    # Without a token there is no gradient, so MLX's own operation is enough.
    return mx.distributed.recv(shape, dtype, src, group=call.mlx_group, stream=call.stream)


@operation
def recv_like(x: Array, src: int, **options: Unpack[Options]) -> Array:
    """Receives from rank ``src``: kind, shape and dtype of ``x``, which stays as it is unless it is ``out``.

    Where MLX traces ``x``, it is the ``token`` of :func:`recv`.
    """
    call = Call("recv_like", options)
    call.check_peer("src", src)
    if (array := call.lazy(x)) is None:
        return eager.recv_like(call, eager.array(call, x), src)
    if bridge.is_traced(array):
        return _traced_recv(call, array, array.shape, array.dtype, src)
    received: Any = mx.distributed.recv_like(array, src, group=call.mlx_group, stream=call.stream)
    return received


@operation
def sendrecv(
    x: Array, dst: int, src: int, shape: Sequence[int] | None = None, dtype: Any = None, **options: Unpack[RecvOptions]
) -> Array:
    """Sends ``x`` to rank ``dst`` and receives from rank ``src`` at the same time, so that all ranks may do it at once.

    ``shape`` and ``dtype`` are those of what is received, ``None`` those of ``x``. With bits in uint16, a ``dtype`` of
    "bfloat16" is that of both. The gradient travels back: the cotangent goes to ``src``, and that of ``x`` comes from
    ``dst``.

    Raises:
        InvalidArgument: besides, a dimension of ``shape`` is negative, or ``dtype`` is not of the same kind as ``x``.
    """
    call = Call("sendrecv", options)
    call.check_peer("dst", dst)
    call.check_peer("src", src)
    if (array := call.lazy(x)) is None:
        return eager.sendrecv(call, eager.array(call, x), dst, src, shape, dtype)
    shape = array.shape if shape is None else call.receive_shape(shape)
    if not isinstance(dtype, mx.Dtype | None):
        raise call.error(f"dtype must be one of MLX, as x is an mx.array, not {dtype!r}")
    return bridge.sendrecv(
        array,
        call.connection,
        dst,
        src,
        list(shape),
        array.dtype if dtype is None else dtype,
        call.stream,
        call.limit,
        next_label(),
    )


def _traced_recv(call: Call, token: mx.array, shape: Sequence[int], dtype: mx.Dtype, src: int) -> Any:
    return bridge.recv(token, call.connection, src, list(shape), dtype, call.stream, call.limit, next_label())
