"""The collectives, with the names and arguments of ``mx.distributed``, on ``mx.array``, NumPy arrays and buffers.

On an ``mx.array`` they are lazy, work inside ``mx.compile`` and ``mx.vmap`` (as if the function were called once for
each part) and have gradients where that is said: nothing is sent before the result is evaluated. An operation has its
place in the order of its group from then on, so ``mx.async_eval``, several streams of MLX and operations that are
carried out at once may share a group. The order must be the same on all ranks; threads of Python have none between
them, and take a lane each (:meth:`Group.lane`). Groups go on side by side, whatever their order. A number, a list or a
tuple of numbers is the ``mx.array`` that ``mx.array`` makes of it.

On a ``numpy.ndarray``, and on whatever else has the buffer protocol (``bytearray``, ``memoryview``, ``array.array``,
arrays of ctypes ...), they are carried out at once. The result is a new NumPy array or, if given, ``out``, which may be
the input itself. An input that is not contiguous is copied first. NumPy has no bfloat16: pass arrays of the package
ml_dtypes, or the bits as uint16 with ``dtype=mx.bfloat16``.

Arguments of every operation:
    group: a :class:`mlxdist.Group`; ``None`` is the group of ``mlxdist.init()``.
    stream: for ``mx.array`` only: a CPU stream or device, as in ``mx.distributed``.
    out: for other arrays only: where to write the result, contiguous. A NumPy array must have its shape and dtype,
        another buffer as many elements of its dtype.
    dtype: for other arrays only: ``mx.bfloat16`` (or "bfloat16") for bits in uint16.
    async_op: for other arrays only: return a :class:`mlxdist.Handle` at once, whose ``wait()`` gives the result.
    timeout: seconds without progress after which the operation fails, on all ranks; 0 for no limit, ``None`` for that
        of the group (:attr:`mlxdist.Group.timeout`). On an ``mx.array`` they count from when it is carried out.

Supported dtypes: bool, uint8 to uint64, int8 to int64, float16, bfloat16, float32, float64, complex64.
Where an array is cut into parts or parts are joined, that is along its first axis. In a group of one the result equals
the input.

Raises, all of them:
    InvalidArgument: rejected before any work: not an array, an unsupported dtype, a wrong ``out``, no such rank.
    Mismatch: the ranks disagree on the operation, dtype, shape or root; raised on every rank.
    Timeout, PeerLost, Aborted, TransportError: the operation could not be completed; raised on every rank.
On an ``mx.array`` all but the first come where the result is evaluated, of a handle from ``wait()``.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import mlx.core as mx
import numpy as np

from mlxdist.base import errors

from ..group.group import Group, GroupLike
from ..label import current_path, next_label
from ..native import bridge, lib
from . import eager
from .arguments import BarrierOptions, Call, Options, group_of, operation

__all__ = [
    "all_gather",
    "all_max",
    "all_min",
    "all_reduce",
    "all_sum",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "gather",
    "get_rank",
    "get_world_size",
    "is_available",
    "meet",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sum_scatter",
]

Array = TypeVar("Array", mx.array, np.ndarray)

_REDUCTIONS = {"sum": lib.MLXDIST_SUM, "max": lib.MLXDIST_MAX, "min": lib.MLXDIST_MIN, "prod": lib.MLXDIST_PROD}
_SUM = _REDUCTIONS["sum"]


@operation
def all_sum(x: Array, **options: Unpack[Options]) -> Array:
    """The sum of all ranks' ``x``, elementwise: shape and dtype of ``x``, bitwise equal on all ranks.

    float16 and bfloat16 are added up in float32; sums of bool are logical or. The gradient is MLX's: the identity.
    """
    # Calls that name a group and nothing else: MLX's own operation. All that follows here is half of a small sum.
    group = options.get("group")
    if type(group) is Group and len(options) == 1 and type(x) is mx.array and current_path() is None:
        return mx.distributed.all_sum(x, group=group.mlx)
    return _all_reduce("all_sum", x, _SUM, options)


@operation
def all_max(x: Array, **options: Unpack[Options]) -> Array:
    """The maximum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result.

    It has no gradient: asking for it raises. ``mx.stop_gradient(x)`` leaves it out.
    """
    return _all_reduce("all_max", x, _REDUCTIONS["max"], options)


@operation
def all_min(x: Array, **options: Unpack[Options]) -> Array:
    """The minimum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result.

    It has no gradient: asking for it raises. ``mx.stop_gradient(x)`` leaves it out.
    """
    return _all_reduce("all_min", x, _REDUCTIONS["min"], options)


@operation
def all_reduce(x: Array, op: str = "sum", **options: Unpack[Options]) -> Array:
    """all_sum, all_max or all_min of ``x`` as ``op`` says ("sum", "max", "min"), or the product ("prod").

    Shape and dtype of ``x``, bitwise equal on all ranks. Only the sum has a gradient.
    """
    return _all_reduce("all_reduce", x, _reduction("all_reduce", op), options)


@operation
def all_gather(x: Array, **options: Unpack[Options]) -> Array:
    """All ranks' ``x`` one after the other: shape ``(size * n, ...)`` for an ``x`` of shape ``(n, ...)``.

    Scalars give shape ``(size,)``. The gradient is MLX's: this rank's part of the cotangent. That of
    :func:`mlxdist.nn.gather_from_sequence_parallel_region` is the sum over all ranks.
    """
    call = Call("all_gather", options)
    if (array := call.lazy(x)) is not None:
        return bridge.all_gather(array, call.connection, True, call.stream, call.limit, next_label())
    return eager.all_gather(call, eager.array(call, x))


@operation
def reduce_scatter(x: Array, op: str = "sum", **options: Unpack[Options]) -> Array:
    """This rank's part of the result of all_reduce: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    ``op``: "sum", "max", "min" or "prod". Only the sum has a gradient: the cotangents of all ranks' parts, joined.
    """
    return _reduce_scatter("reduce_scatter", x, op, options)


@operation
def sum_scatter(x: Array, **options: Unpack[Options]) -> Array:
    """This rank's part of the sum of all ranks' ``x``: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    The gradient, which that of ``mx.distributed`` lacks, is the cotangents of all ranks' parts, joined.
    """
    return _reduce_scatter("sum_scatter", x, "sum", options)


@operation
def broadcast(x: Array, root: int = 0, **options: Unpack[Options]) -> Array:
    """The root's ``x`` on every rank. All ranks pass an array of the same shape and dtype.

    The gradient: on the root the sum of all ranks' cotangents, elsewhere zeros.
    """
    call = Call("broadcast", options)
    call.check_root(root)
    return _carry_out(call, x, bridge.broadcast, eager.broadcast, root)


@operation
def reduce(x: Array, op: str = "sum", root: int = 0, **options: Unpack[Options]) -> Array:
    """The result of all_reduce for ``op``, on the root alone: shape and dtype of ``x``.

    The other ranks get an array without elements, of shape ``(0, ...)`` for an ``x`` of shape ``(n, ...)`` and ``(0,)``
    for a scalar; their ``out`` stays as it is. Only the sum has a gradient: the root's cotangent, on all ranks.
    """
    call = Call("reduce", options)
    reduction = _reduction("reduce", op)
    call.check_root(root)
    return _carry_out(call, x, bridge.reduce, eager.reduce, reduction, root)


@operation
def gather(x: Array, root: int = 0, **options: Unpack[Options]) -> Array:
    """The result of all_gather, on the root alone: shape ``(size * n, ...)`` for an ``x`` of shape ``(n, ...)``.

    The other ranks get an array without elements, as from :func:`reduce`. The gradient: each rank's part of the root's
    cotangent.
    """
    call = Call("gather", options)
    call.check_root(root)
    return _carry_out(call, x, bridge.gather, eager.gather, root)


@operation
def scatter(x: Array, root: int = 0, **options: Unpack[Options]) -> Array:
    """This rank's part of the root's ``x``: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    All ranks pass an array of the same shape and dtype, but only the root's elements count. The gradient: on the
    root all ranks' cotangents, joined, elsewhere zeros.
    """
    call = Call("scatter", options)
    call.check_root(root)
    return _carry_out(call, x, bridge.scatter, eager.scatter, root, divided=True)


@operation
def all_to_all(x: Array, **options: Unpack[Options]) -> Array:
    """Cuts ``x`` into ``size`` equal parts and sends part j to rank j; the result is what came, in rank order.

    Shape and dtype of ``x``, whose first dimension is a multiple of the group's size. The gradient is all_to_all of the
    cotangent.
    """
    return _carry_out(Call("all_to_all", options), x, bridge.all_to_all, eager.all_to_all, divided=True)


@operation
def all_to_all_v(x: Array, send_counts: Sequence[int], recv_counts: Sequence[int], **options: Unpack[Options]) -> Array:
    """all_to_all with parts of different sizes.

    The first ``send_counts[0]`` rows of ``x`` go to rank 0, the next ``send_counts[1]`` to rank 1 and so on. The result
    has ``sum(recv_counts)`` rows: ``recv_counts[i]`` from each rank i, in rank order. Rank i must send to rank j what
    j expects from i. The gradient is all_to_all_v of the cotangent with the counts swapped.
    """
    call = Call("all_to_all_v", options)
    if (array := call.lazy(x)) is not None:
        counts = call.row_counts(array.shape, send_counts, recv_counts)
        return bridge.all_to_all_v(array, call.connection, *counts, call.stream, call.limit, next_label())
    return eager.all_to_all_v(call, eager.array(call, x), send_counts, recv_counts)


@operation
def barrier(**options: Unpack[BarrierOptions]) -> Any:
    """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part."""
    return eager.barrier(Call("barrier", options))


def meet(*, group: GroupLike | None = None, timeout: float | None = None) -> None:
    """Returns once every rank has called it, and has done what it has submitted to MLX: see :meth:`Group.meet`."""
    group_of(group).meet(timeout)


def get_rank(*, group: GroupLike | None = None) -> int:
    """The number of this process in the group, from 0."""
    return group_of(group).rank()


def get_world_size(*, group: GroupLike | None = None) -> int:
    """The number of processes in the group."""
    return group_of(group).size()


def is_available(backend: str = "any") -> bool:
    """Whether :func:`init` knows this backend. That mlxdist is built, and for this MLX, is checked at import."""
    return backend in ("any", "mlxdist")


def _all_reduce(name: str, x: Any, reduction: int, options: Options) -> Any:
    call = Call(name, options)
    if (array := call.lazy(x)) is None:
        return eager.all_reduce(call, eager.array(call, x), reduction)
    if reduction == _SUM:
        return mx.distributed.all_sum(array, group=call.mlx_group, stream=call.stream)
    return bridge.all_reduce(array, call.connection, reduction, call.stream, call.limit, next_label())


def _reduce_scatter(name: str, x: Any, op: str, options: Options) -> Any:
    reduction = _reduction(name, op)
    return _carry_out(Call(name, options), x, bridge.reduce_scatter, eager.reduce_scatter, reduction, divided=True)


def _carry_out(
    call: Call, x: Any, lazily: Callable[..., Any], at_once: Callable[..., Any], *arguments: int, divided: bool = False
) -> Any:
    """``lazily`` with an mx.array, ``at_once`` with another one. ``divided``: each rank gets a chunk of it."""
    if (array := call.lazy(x)) is None:
        return at_once(call, eager.array(call, x), *arguments)
    if divided:
        call.chunk_shape(array.shape)
    return lazily(array, call.connection, *arguments, call.stream, call.limit, next_label())


def _reduction(name: str, op: str) -> int:
    """The engine's number of ``op``."""
    try:
        return _REDUCTIONS[op]
    except KeyError:
        raise errors.InvalidArgument(f"{name}: op must be 'sum', 'max', 'min' or 'prod', not {op!r}") from None
