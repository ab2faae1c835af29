"""The operations on memory that is there: NumPy arrays, and whatever else has the buffer protocol.

They are carried out at once, or started (``async_op``), into a new array or in place. mlxdist.runtime.ops documents the
arguments and checks those that have nothing to do with memory; this module checks the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base import errors

from .arguments import part_shape, row_counts
from .group import Group
from .native import dtype_number, ffi, layout, lib
from .timeout import time_limit

__all__ = [
    "REDUCTIONS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_like",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]

Result = Any  # a NumPy array, what was given as `out`, or a Handle of either

REDUCTIONS = {"sum": lib.MLXDIST_SUM, "max": lib.MLXDIST_MAX, "min": lib.MLXDIST_MIN, "prod": lib.MLXDIST_PROD}

# Making a layout costs as much as a small operation, and a program has few of them.
_layouts: dict[Any, Any] = {}
_MOST_LAYOUTS = 4096


def all_reduce(
    name: str, x: Any, op: str, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None
) -> Result:
    x = _array(name, x)
    described = _layout(name, x.dtype, x.shape, dtype)
    source, target, result = _operands(name, x, x.shape, group, out, in_place=True)
    return _run(
        name, group, timeout, async_op, result, lib.mlxdist_all_reduce, source, target, described, REDUCTIONS[op]
    )


def all_gather(x: Any, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("all_gather", x)
    described = _layout("all_gather", x.dtype, x.shape, dtype)
    source, target, result = _operands("all_gather", x, _gathered(x.shape, group), group, out, in_place=False)
    return _run("all_gather", group, timeout, async_op, result, lib.mlxdist_all_gather, source, target, described)


def reduce_scatter(
    name: str, x: Any, op: str, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None
) -> Result:
    x = _array(name, x)
    described = _layout(name, x.dtype, x.shape, dtype)
    source, target, result = _operands(name, x, part_shape(name, x.shape, group), group, out, in_place=True)
    return _run(
        name, group, timeout, async_op, result, lib.mlxdist_reduce_scatter, source, target, described, REDUCTIONS[op]
    )


def broadcast(x: Any, root: int, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("broadcast", x)
    described = _layout("broadcast", x.dtype, x.shape, dtype)
    target, result = _output("broadcast", x.shape, x.dtype, out)
    if group.rank() == root and target is not x:
        np.copyto(target, x)
    return _run("broadcast", group, timeout, async_op, result, lib.mlxdist_broadcast, _memory(target), described, root)


def reduce(
    x: Any, op: str, root: int, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None
) -> Result:
    x = _array("reduce", x)
    described = _layout("reduce", x.dtype, x.shape, dtype)
    source, target, result = _on_root("reduce", x, x.shape, root, group, out, in_place=True)
    return _run(
        "reduce", group, timeout, async_op, result, lib.mlxdist_reduce, source, target, described, REDUCTIONS[op], root
    )


def gather(x: Any, root: int, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("gather", x)
    described = _layout("gather", x.dtype, x.shape, dtype)
    source, target, result = _on_root("gather", x, _gathered(x.shape, group), root, group, out, in_place=False)
    return _run("gather", group, timeout, async_op, result, lib.mlxdist_gather, source, target, described, root)


def scatter(x: Any, root: int, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("scatter", x)
    shape = part_shape("scatter", x.shape, group)
    described = _layout("scatter", x.dtype, shape, dtype)
    if group.rank() == root:
        source, target, result = _operands("scatter", x, shape, group, out, in_place=True)
    else:
        new, result = _output("scatter", shape, x.dtype, out)
        source, target = ffi.NULL, _memory(new)
    return _run("scatter", group, timeout, async_op, result, lib.mlxdist_scatter, source, target, described, root)


def all_to_all(x: Any, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("all_to_all", x)
    part_shape("all_to_all", x.shape, group)  # only to check it
    described = _layout("all_to_all", x.dtype, x.shape, dtype)
    source, target, result = _operands("all_to_all", x, x.shape, group, out, in_place=False)
    return _run("all_to_all", group, timeout, async_op, result, lib.mlxdist_all_to_all, source, target, described)


def all_to_all_v(
    x: Any,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
    out: Any,
    dtype: Any,
    async_op: bool,
    timeout: float | None,
) -> Result:
    x = _array("all_to_all_v", x)
    counts = row_counts(x.shape, send, receive, group)
    row = _layout("all_to_all_v", x.dtype, x.shape[1:], dtype)
    shape = (sum(counts[1]), *x.shape[1:])
    source, target, result = _operands("all_to_all_v", x, shape, group, out, in_place=False)
    sent, received = (ffi.new("uint64_t[]", rows) for rows in counts)
    return _run(
        "all_to_all_v", group, timeout, async_op, result, lib.mlxdist_all_to_all_v, source, sent, target, received, row
    )


def barrier(group: Group, async_op: bool, timeout: float | None) -> Result:
    return _run("barrier", group, timeout, async_op, None, lib.mlxdist_barrier)


def send(x: Any, dst: int, group: Group, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    given, x = x, _array("send", x)
    described = _layout("send", x.dtype, x.shape, dtype)
    source = _memory(_source(x, None, in_place=False))
    return _run("send", group, timeout, async_op, given, lib.mlxdist_send, source, described, dst)


def recv(
    shape: Sequence[int], dtype: Any, src: int, group: Group, out: Any, async_op: bool, timeout: float | None
) -> Result:
    return _recv("recv", _checked_shape("recv", shape), np.dtype(dtype), None, src, group, out, async_op, timeout)


def recv_like(x: Any, src: int, group: Group, out: Any, dtype: Any, async_op: bool, timeout: float | None) -> Result:
    x = _array("recv_like", x)
    return _recv("recv_like", x.shape, x.dtype, dtype, src, group, out, async_op, timeout)


def _recv(
    name: str,
    shape: tuple,
    elements: np.dtype,
    dtype: Any,
    src: int,
    group: Group,
    out: Any,
    async_op: bool,
    timeout: float | None,
) -> Result:
    described = _layout(name, elements, shape, dtype)
    target, result = _output(name, shape, elements, out)
    return _run(name, group, timeout, async_op, result, lib.mlxdist_recv, _memory(target), described, src)


def sendrecv(
    x: Any,
    dst: int,
    src: int,
    shape: Sequence[int] | None,
    dtype: Any,
    group: Group,
    out: Any,
    async_op: bool,
    timeout: float | None,
) -> Result:
    x = _array("sendrecv", x)
    bits = dtype if dtype is not None and _dtype_name(dtype) == "bfloat16" else None  # both ways
    sent = _layout("sendrecv", x.dtype, x.shape, bits)
    elements = x.dtype if dtype is None or bits is not None else np.dtype(_dtype_name(dtype))
    shape = x.shape if shape is None else _checked_shape("sendrecv", shape)
    received = _layout("sendrecv", elements, shape, bits)
    new, result = _output("sendrecv", shape, elements, out)
    source, target = _memory(_source(x, new, in_place=False)), _memory(new)
    return _run(
        "sendrecv", group, timeout, async_op, result, lib.mlxdist_sendrecv, source, sent, dst, target, received, src
    )


def _run(
    name: str,
    group: Group,
    timeout: float | None,
    async_op: bool,
    result: Any,
    function: Callable[..., int],
    *arguments: Any,
) -> Result:
    if timeout is not None:
        with time_limit(name, timeout):
            return _run(name, group, None, async_op, result, function, *arguments)
    if async_op:
        return group.start(name, result, arguments, function, *arguments)
    group.call(function, *arguments)
    return result


def _gathered(shape: tuple[int, ...], group: Group) -> tuple[int, ...]:
    if group.size() == 1:
        return shape
    first, *rest = shape or (1,)
    return (first * group.size(), *rest)


def _operands(
    name: str, x: np.ndarray, shape: tuple[int, ...], group: Group, out: Any, in_place: bool
) -> tuple[Any, Any, Any]:
    """Memory to read, memory to write, and the result. In a group of one the result is there already."""
    alone = group.size() == 1
    target, result = _output(name, shape, x.dtype, out)
    source = _source(x, None if out is None else target, in_place or alone)
    if alone:
        np.copyto(target, source)
    return _memory(source), _memory(target), result


def _on_root(
    name: str, x: np.ndarray, shape: tuple[int, ...], root: int, group: Group, out: Any, in_place: bool
) -> tuple[Any, Any, Any]:
    """The same where only the root has a result; `out` is for the root alone."""
    if group.rank() == root:
        return _operands(name, x, shape, group, out, in_place)
    return _memory(_source(x, None, in_place)), ffi.NULL, np.empty((0, *x.shape[1:]), x.dtype)


# Arrays and buffers.


def _array(name: str, x: Any) -> np.ndarray:
    """``x`` itself, or an array on the memory of a buffer."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise errors.InvalidArgument(
            f"{name}: masked arrays are not supported; pass x.filled(...), or x.data and x.mask"
        )
    if isinstance(x, np.ndarray):
        return x
    return _view(name, "x", x, "an mx.array or a numpy.ndarray or another buffer")


def _view(name: str, argument: str, buffer: Any, wanted: str) -> np.ndarray:
    try:
        return np.asarray(memoryview(buffer))
    except TypeError:
        problem = f"must be {wanted}, not {type(buffer).__name__}; np.asarray({argument}) makes one"
    except (ValueError, NotImplementedError, BufferError) as error:
        problem = f"is a {type(buffer).__name__}, whose elements are nothing that NumPy knows: {error}"
    raise errors.InvalidArgument(f"{name}: {argument} {problem}")


def _output(name: str, shape: tuple[int, ...], dtype: np.dtype, out: Any) -> tuple[np.ndarray, Any]:
    """Where the engine writes, and what the user gets: a new array, or `out` if the result can be written there."""
    if out is None:
        new = np.empty(shape, dtype)
        return new, new
    if isinstance(out, np.ndarray):
        target, fits = out, out.shape == shape
    elif isinstance(out, mx.array):
        raise errors.InvalidArgument(f"{name}: out must be a numpy.ndarray or another writable buffer, not an mx.array")
    else:
        target = _view(name, "out", out, "a numpy.ndarray or another writable buffer")
        fits = target.size == np.prod(shape, dtype=int)
    if not fits or target.dtype != dtype:
        raise errors.InvalidArgument(
            f"{name}: out must have shape {shape} and dtype {dtype}, not {target.shape} and {target.dtype}"
        )
    flags = target.flags
    if not (flags.c_contiguous and flags.aligned):
        raise errors.InvalidArgument(f"{name}: out must be contiguous; leave it out, or pass a contiguous array")
    if not flags.writeable:
        raise errors.InvalidArgument(f"{name}: out is read-only; leave it out, or pass an array that can be written")
    return target if target.shape == shape else target.reshape(shape), out


def _source(x: np.ndarray, target: np.ndarray | None, in_place: bool) -> np.ndarray:
    """`x`, or a copy if the engine cannot read it where it is, or would overwrite it before it has read it."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        if target is None or not np.may_share_memory(x, target):
            return x
        if in_place and (x is target or _pointer(x) == _pointer(target)):
            return x
    return np.array(x, order="C")


def _pointer(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _memory(x: np.ndarray) -> Any:
    """For the engine. Keeps `x`."""
    try:
        return ffi.from_buffer(x)
    except ValueError:  # ml_dtypes' bfloat16, which the buffer protocol has no name for
        return ffi.from_buffer(x.view(np.uint16))


# dtypes and shapes.


def _layout(name: str, elements: np.dtype, shape: tuple[int, ...], dtype: Any) -> Any:
    """dtype and shape for the engine; ``dtype`` may reinterpret the elements (see mlxdist.runtime.ops).

    Raises:
        InvalidArgument: the engine cannot work on them.
    """
    key = (elements, shape) if dtype is None else (elements, shape, _dtype_name(dtype))
    found = _layouts.get(key)
    if found is None:
        found = layout(_engine_name(name, elements, dtype), shape)
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[key] = found
    return found


def _engine_name(name: str, elements: np.dtype, dtype: Any) -> str:
    own = elements.name  # ml_dtypes calls its own "bfloat16", as MLX does
    try:
        dtype_number(own)
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"{name}: {error}") from None
    if not elements.isnative:
        raise errors.InvalidArgument(
            f"{name}: the array has the other byte order ({elements.str}); pass x.astype(x.dtype.newbyteorder('='))"
        )
    asked = own if dtype is None else _dtype_name(dtype)
    if asked == own or (asked == "bfloat16" and own == "uint16"):
        return asked
    raise errors.InvalidArgument(
        f"{name}: dtype={asked} does not fit an array of {own}; it is for the bits of bfloat16 in an array of uint16"
    )


def _dtype_name(dtype: Any) -> str:
    """That of a dtype of MLX or NumPy, or of its name."""
    return np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("mlx.core.")


def _checked_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(shape)
    if any(length < 0 for length in shape):
        raise errors.InvalidArgument(f"{name}: shape {shape} has a negative dimension")
    return shape
