"""The operations, with the names and arguments of ``mx.distributed``, on ``mx.array`` and on NumPy arrays.

On an ``mx.array`` they are lazy, work inside ``mx.compile`` and have MLX's gradients: nothing is sent before the result
is evaluated. All ranks must evaluate the same operations in the same order.

On a ``numpy.ndarray`` they are carried out at once. The result is a new array or, if given, ``out``, which may be
the input itself and must be contiguous. An input that is not contiguous is copied first. NumPy has no bfloat16: pass
arrays of the package ml_dtypes, or the bits as uint16 with ``dtype=mx.bfloat16``.

Arguments of every operation:
    group: a :class:`mlxdist.Group`; ``None`` is the group of ``mlxdist.init()``.
    stream: for ``mx.array`` only: a CPU stream or device, as in ``mx.distributed``.
    out, dtype: for NumPy arrays only, see above.

Supported dtypes: bool, uint8 to uint64, int8 to int64, float16, bfloat16, float32, float64, complex64.

Raises, all of them:
    InvalidArgument: refused before any work: not an array, an unsupported dtype, a wrong ``out``, no such rank.
    Mismatch: the ranks disagree on the operation, dtype, shape or root; raised on every rank.
    Timeout, PeerLost, Aborted, TransportError: the operation could not be completed; raised on every rank.
On an ``mx.array`` all but the first come where the result is evaluated.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from . import eager, errors
from .group import Group, init
from .native import bridge

__all__ = [
    "all_gather",
    "all_max",
    "all_min",
    "all_reduce",
    "all_sum",
    "barrier",
    "broadcast",
    "get_rank",
    "get_world_size",
    "is_available",
    "recv",
    "recv_like",
    "send",
    "sum_scatter",
]

Array = TypeVar("Array", mx.array, np.ndarray)
Stream = mx.Stream | mx.Device | mx.DeviceType | None

_MLX_REDUCTIONS = {"sum": mx.distributed.all_sum, "max": mx.distributed.all_max, "min": mx.distributed.all_min}


def all_sum(
    x: Array, *, group: Group | None = None, stream: Stream = None, out: np.ndarray | None = None, dtype: Any = None
) -> Array:
    """The sum of all ranks' ``x``, elementwise: shape and dtype of ``x``, bitwise equal on all ranks.

    float16 and bfloat16 are added up in float32 and rounded once; sums of bool are logical or. The gradient is MLX's:
    the identity.
    """
    return _all_reduce("all_sum", x, "sum", group, stream, out, dtype)


def all_max(
    x: Array, *, group: Group | None = None, stream: Stream = None, out: np.ndarray | None = None, dtype: Any = None
) -> Array:
    """The maximum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result."""
    return _all_reduce("all_max", x, "max", group, stream, out, dtype)


def all_min(
    x: Array, *, group: Group | None = None, stream: Stream = None, out: np.ndarray | None = None, dtype: Any = None
) -> Array:
    """The minimum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result."""
    return _all_reduce("all_min", x, "min", group, stream, out, dtype)


def all_reduce(
    x: Array,
    op: str = "sum",
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
) -> Array:
    """all_sum, all_max or all_min by name ("sum", "max", "min"), or the product ("prod"), which has no gradient."""
    if op not in ("sum", "max", "min", "prod"):
        raise errors.InvalidArgument(f"all_reduce: op must be 'sum', 'max', 'min' or 'prod', not {op!r}")
    return _all_reduce("all_reduce", x, op, group, stream, out, dtype)


def all_gather(
    x: Array, *, group: Group | None = None, stream: Stream = None, out: np.ndarray | None = None, dtype: Any = None
) -> Array:
    """All ranks' ``x`` one after the other: shape ``(size * n, ...)`` for an ``x`` of shape ``(n, ...)``.

    Scalars give shape ``(size,)``. The gradient is MLX's: this rank's part of the cotangent.
    """
    if _is_mlx("all_gather", x, out, dtype):
        return mx.distributed.all_gather(x, group=_group(group).mlx, stream=stream)
    _no_stream("all_gather", stream)
    return eager.all_gather(x, _group(group), out, dtype)


def sum_scatter(
    x: Array, *, group: Group | None = None, stream: Stream = None, out: np.ndarray | None = None, dtype: Any = None
) -> Array:
    """This rank's part of the sum of all ranks' ``x``: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``."""
    if _is_mlx("sum_scatter", x, out, dtype):
        return mx.distributed.sum_scatter(x, group=_group(group).mlx, stream=stream)
    _no_stream("sum_scatter", stream)
    return eager.sum_scatter(x, _group(group), out, dtype)


def broadcast(
    x: Array,
    root: int = 0,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
) -> Array:
    """The root's ``x`` on every rank. All ranks pass an array of the same shape and dtype.

    The gradient is the true one: on the root the sum of all ranks' cotangents, elsewhere zeros.
    """
    group = _group(group)
    if not 0 <= root < group.size():
        raise errors.InvalidArgument(f"broadcast: root is {root}, but the ranks are 0 to {group.size() - 1}")
    if _is_mlx("broadcast", x, out, dtype):
        return bridge.broadcast(x, group.connection, root, stream)
    _no_stream("broadcast", stream)
    return eager.broadcast(x, root, group, out, dtype)


def send(x: Array, dst: int, *, group: Group | None = None, stream: Stream = None, dtype: Any = None) -> Array:
    """Sends ``x`` to rank ``dst``, which must call :func:`recv`. Returns ``x``: evaluating that is what sends it."""
    group = _group(group)
    _check_peer("send", "dst", dst, group)
    if _is_mlx("send", x, None, dtype):
        return mx.distributed.send(x, dst, group=group.mlx, stream=stream)
    _no_stream("send", stream)
    return eager.send(x, dst, group, dtype)


def recv(
    shape: Sequence[int],
    dtype: Any,
    src: int,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: np.ndarray | None = None,
) -> mx.array | np.ndarray:
    """Receives what rank ``src`` sends to this rank: an ``mx.array`` if ``dtype`` is MLX's, else a NumPy array."""
    group = _group(group)
    _check_peer("recv", "src", src, group)
    if isinstance(dtype, mx.Dtype):
        if out is not None:
            raise errors.InvalidArgument("recv: out is for NumPy dtypes, and dtype is one of MLX")
        return mx.distributed.recv(shape, dtype, src, group=group.mlx, stream=stream)
    _no_stream("recv", stream)
    return eager.recv(shape, np.dtype(dtype), src, group, out, None)


def recv_like(
    x: Array,
    src: int,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
) -> Array:
    """Receives an array of the kind, shape and dtype of ``x``, which stays as it is unless it is ``out``."""
    group = _group(group)
    _check_peer("recv_like", "src", src, group)
    if _is_mlx("recv_like", x, out, dtype):
        return mx.distributed.recv_like(x, src, group=group.mlx, stream=stream)
    _no_stream("recv_like", stream)
    return eager.recv(x.shape, x.dtype, src, group, out, dtype)


def barrier(*, group: Group | None = None) -> None:
    """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part."""
    _group(group).barrier()


def get_rank(group: Group | None = None) -> int:
    """The number of this process in the group, from 0."""
    return _group(group).rank()


def get_world_size(group: Group | None = None) -> int:
    """The number of processes in the group."""
    return _group(group).size()


def is_available(backend: str = "any") -> bool:
    """Whether :func:`init` knows this backend. That mlxdist is built, and for this MLX, is checked at import."""
    return backend in ("any", "mlxdist")


def _all_reduce(
    name: str, x: Array, op: str, group: Group | None, stream: Stream, out: np.ndarray | None, dtype: Any
) -> Array:
    if not _is_mlx(name, x, out, dtype):
        _no_stream(name, stream)
        return eager.all_reduce(name, x, op, _group(group), out, dtype)
    if op == "prod":
        return bridge.all_prod(x, _group(group).connection, stream)
    return _MLX_REDUCTIONS[op](x, group=_group(group).mlx, stream=stream)


def _group(group: Group | None) -> Group:
    if group is None:
        return init()
    if not isinstance(group, Group):
        raise errors.InvalidArgument(
            f"group must be what mlxdist.init() returned, not {type(group).__name__}; a group of mx.distributed "
            "goes to the functions of mx.distributed"
        )
    return group


def _is_mlx(name: str, x: Any, out: Any, dtype: Any) -> bool:
    if isinstance(x, np.ndarray):
        return False
    if not isinstance(x, mx.array):
        raise errors.InvalidArgument(
            f"{name}: x must be an mx.array or a numpy.ndarray, not {type(x).__name__}; np.asarray(x) makes one"
        )
    if out is not None or dtype is not None:
        raise errors.InvalidArgument(f"{name}: out and dtype are for NumPy arrays, and x is an mx.array")
    return True


def _no_stream(name: str, stream: Stream) -> None:
    if stream is not None:
        raise errors.InvalidArgument(f"{name}: stream is for mx.array, and this operation on NumPy arrays runs at once")


def _check_peer(name: str, argument: str, rank: int, group: Group) -> None:
    if group.size() == 1:
        raise errors.InvalidArgument(f"{name}: there is nobody to talk to in a group of one")
    if not 0 <= rank < group.size() or rank == group.rank():
        raise errors.InvalidArgument(
            f"{name}: {argument} is {rank}, but must be another rank than {group.rank()}, from 0 to {group.size() - 1}"
        )
