"""The collectives, with the names and arguments of ``mx.distributed``, on ``mx.array``, NumPy arrays and buffers.

On an ``mx.array`` they are lazy, work inside ``mx.compile`` and ``mx.vmap`` (as if the function were called once for
each part) and have gradients where that is said: nothing is sent before the result is evaluated. All ranks must
evaluate the same operations of a group in the same order. MLX carries them out in a thread of its own: while some are
under way (``mx.async_eval``), use another group for operations that are carried out at once, or they come in between at
another place on each rank. Groups go on side by side, whatever their order. A number is the ``mx.array`` that
``mx.array(number)`` makes of it, as in ``mx.distributed``.

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
    InvalidArgument: refused before any work: not an array, an unsupported dtype, a wrong ``out``, no such rank.
    Mismatch: the ranks disagree on the operation, dtype, shape or root; raised on every rank.
    Timeout, PeerLost, Aborted, TransportError: the operation could not be completed; raised on every rank.
On an ``mx.array`` all but the first come where the result is evaluated, of a handle from ``wait()``.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxdist.base import errors

from . import eager
from .arguments import as_mlx, check_root, group_of, mlx_group, part_shape, row_counts
from .group import Group
from .native import bridge
from .timeout import native_timeout

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
Stream = mx.Stream | mx.Device | mx.DeviceType | None


def all_sum(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """The sum of all ranks' ``x``, elementwise: shape and dtype of ``x``, bitwise equal on all ranks.

    float16 and bfloat16 are added up in float32; sums of bool are logical or. The gradient is MLX's: the identity.
    """
    return _all_reduce("all_sum", x, "sum", group, stream, out, dtype, async_op, timeout)


def all_max(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """The maximum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result.

    It has no gradient: asking for it raises. ``mx.stop_gradient(x)`` leaves it out.
    """
    return _all_reduce("all_max", x, "max", group, stream, out, dtype, async_op, timeout)


def all_min(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """The minimum of all ranks' ``x``, elementwise: shape and dtype of ``x``. A NaN of one rank is in the result.

    It has no gradient: asking for it raises. ``mx.stop_gradient(x)`` leaves it out.
    """
    return _all_reduce("all_min", x, "min", group, stream, out, dtype, async_op, timeout)


def all_reduce(
    x: Array,
    op: str = "sum",
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """all_sum, all_max or all_min of ``x`` as ``op`` says ("sum", "max", "min"), or the product ("prod").

    Shape and dtype of ``x``, bitwise equal on all ranks. Only the sum has a gradient.
    """
    _check_op("all_reduce", op)
    return _all_reduce("all_reduce", x, op, group, stream, out, dtype, async_op, timeout)


def all_gather(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """All ranks' ``x`` one after the other: shape ``(size * n, ...)`` for an ``x`` of shape ``(n, ...)``.

    Scalars give shape ``(size,)``. The gradient is MLX's: this rank's part of the cotangent. That of
    :func:`mlxdist.nn.gather_from_sequence_parallel_region` is the sum over all ranks.
    """
    group = group_of(group)
    if (array := as_mlx("all_gather", x, stream, out, dtype, async_op)) is not None:
        return bridge.all_gather_as_in_mlx(array, group.connection, stream, native_timeout("all_gather", timeout))
    return eager.all_gather(x, group, out, dtype, async_op, timeout)


def reduce_scatter(
    x: Array,
    op: str = "sum",
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """This rank's part of what all_reduce gives: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    ``op``: "sum", "max", "min" or "prod". Only the sum has a gradient: the cotangents of all ranks' parts, joined.
    """
    _check_op("reduce_scatter", op)
    return _reduce_scatter("reduce_scatter", x, op, group, stream, out, dtype, async_op, timeout)


def sum_scatter(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """This rank's part of the sum of all ranks' ``x``: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    The gradient, which that of ``mx.distributed`` lacks, is the cotangents of all ranks' parts, joined.
    """
    return _reduce_scatter("sum_scatter", x, "sum", group, stream, out, dtype, async_op, timeout)


def broadcast(
    x: Array,
    root: int = 0,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """The root's ``x`` on every rank. All ranks pass an array of the same shape and dtype.

    The gradient: on the root the sum of all ranks' cotangents, elsewhere zeros.
    """
    group = group_of(group)
    check_root("broadcast", root, group)
    if (array := as_mlx("broadcast", x, stream, out, dtype, async_op)) is not None:
        return bridge.broadcast(array, group.connection, root, stream, native_timeout("broadcast", timeout))
    return eager.broadcast(x, root, group, out, dtype, async_op, timeout)


def reduce(
    x: Array,
    op: str = "sum",
    root: int = 0,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """What all_reduce gives for ``op``, on the root alone: shape and dtype of ``x``.

    The other ranks get an array without elements, of shape ``(0, ...)`` for an ``x`` of shape ``(n, ...)`` and ``(0,)``
    for a scalar; their ``out`` stays as it is. Only the sum has a gradient: the root's cotangent, on all ranks.
    """
    group = group_of(group)
    _check_op("reduce", op)
    check_root("reduce", root, group)
    if (array := as_mlx("reduce", x, stream, out, dtype, async_op)) is not None:
        limit = native_timeout("reduce", timeout)
        return bridge.reduce(array, group.connection, eager.REDUCTIONS[op], root, stream, limit)
    return eager.reduce(x, op, root, group, out, dtype, async_op, timeout)


def gather(
    x: Array,
    root: int = 0,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """What all_gather gives, on the root alone: shape ``(size * n, ...)`` for an ``x`` of shape ``(n, ...)``.

    The other ranks get an array without elements, as from :func:`reduce`. The gradient: each rank's part of the root's
    cotangent.
    """
    group = group_of(group)
    check_root("gather", root, group)
    if (array := as_mlx("gather", x, stream, out, dtype, async_op)) is not None:
        return bridge.gather(array, group.connection, root, stream, native_timeout("gather", timeout))
    return eager.gather(x, root, group, out, dtype, async_op, timeout)


def scatter(
    x: Array,
    root: int = 0,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """This rank's part of the root's ``x``: shape ``(n / size, ...)`` for an ``x`` of shape ``(n, ...)``.

    All ranks pass an array of the same shape and dtype, of which only the root's elements count. The gradient: on the
    root all ranks' cotangents, joined, elsewhere zeros.
    """
    group = group_of(group)
    check_root("scatter", root, group)
    if (array := as_mlx("scatter", x, stream, out, dtype, async_op)) is not None:
        part_shape("scatter", array.shape, group)
        return bridge.scatter(array, group.connection, root, stream, native_timeout("scatter", timeout))
    return eager.scatter(x, root, group, out, dtype, async_op, timeout)


def all_to_all(
    x: Array,
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """Cuts ``x`` into ``size`` equal parts and sends part j to rank j; the result is what came, in rank order.

    Shape and dtype of ``x``, whose first dimension is a multiple of the group's size. The gradient is all_to_all of the
    cotangent.
    """
    group = group_of(group)
    if (array := as_mlx("all_to_all", x, stream, out, dtype, async_op)) is not None:
        part_shape("all_to_all", array.shape, group)
        return bridge.all_to_all(array, group.connection, stream, native_timeout("all_to_all", timeout))
    return eager.all_to_all(x, group, out, dtype, async_op, timeout)


def all_to_all_v(
    x: Array,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    group: Group | None = None,
    stream: Stream = None,
    out: Any = None,
    dtype: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array:
    """all_to_all with parts of different sizes.

    The first ``send_counts[0]`` rows of ``x`` go to rank 0, the next ``send_counts[1]`` to rank 1 and so on. The result
    has ``sum(recv_counts)`` rows: ``recv_counts[i]`` from each rank i, in rank order. What rank i sends to j must be
    what j expects from i. The gradient is all_to_all_v of the cotangent with the counts swapped.
    """
    group = group_of(group)
    if (array := as_mlx("all_to_all_v", x, stream, out, dtype, async_op)) is not None:
        counts = row_counts(array.shape, send_counts, recv_counts, group)
        return bridge.all_to_all_v(array, group.connection, *counts, stream, native_timeout("all_to_all_v", timeout))
    return eager.all_to_all_v(x, send_counts, recv_counts, group, out, dtype, async_op, timeout)


def barrier(*, group: Group | None = None, async_op: bool = False, timeout: float | None = None) -> Any:
    """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part."""
    return eager.barrier(group_of(group), async_op, timeout)


def meet(group: Group | None = None, timeout: float | None = None) -> None:
    """Returns once every rank has called it, and has done what it has submitted to MLX: see :meth:`Group.meet`."""
    group_of(group).meet(timeout)


def get_rank(group: Group | None = None) -> int:
    """The number of this process in the group, from 0."""
    return group_of(group).rank()


def get_world_size(group: Group | None = None) -> int:
    """The number of processes in the group."""
    return group_of(group).size()


def is_available(backend: str = "any") -> bool:
    """Whether :func:`init` knows this backend. That mlxdist is built, and for this MLX, is checked at import."""
    return backend in ("any", "mlxdist")


def _all_reduce(
    name: str,
    x: Any,
    op: str,
    group: Group | None,
    stream: Stream,
    out: Any,
    dtype: Any,
    async_op: bool,
    timeout: float | None,
) -> Any:
    group = group_of(group)
    if (array := as_mlx(name, x, stream, out, dtype, async_op)) is None:
        return eager.all_reduce(name, x, op, group, out, dtype, async_op, timeout)
    if op == "sum":
        return mx.distributed.all_sum(array, group=mlx_group(name, group, timeout), stream=stream)
    return bridge.all_reduce(array, group.connection, eager.REDUCTIONS[op], stream, native_timeout(name, timeout))


def _reduce_scatter(
    name: str,
    x: Any,
    op: str,
    group: Group | None,
    stream: Stream,
    out: Any,
    dtype: Any,
    async_op: bool,
    timeout: float | None,
) -> Any:
    group = group_of(group)
    if (array := as_mlx(name, x, stream, out, dtype, async_op)) is not None:
        part_shape(name, array.shape, group)
        limit = native_timeout(name, timeout)
        return bridge.reduce_scatter(array, group.connection, eager.REDUCTIONS[op], stream, limit)
    return eager.reduce_scatter(name, x, op, group, out, dtype, async_op, timeout)


def _check_op(name: str, op: str) -> None:
    if op not in eager.REDUCTIONS:
        raise errors.InvalidArgument(f"{name}: op must be 'sum', 'max', 'min' or 'prod', not {op!r}")
