"""The operations on memory that is there: NumPy arrays, and all other objects with the buffer protocol.

They run at once, or start (``async_op``), into a new array or in place. mlxdist.runtime.operations.collectives
documents the arguments; this module checks those that concern memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base import errors

from ..group.group import engine_of
from ..native import dtype_number, ffi, layout, lib
from .arguments import Call

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "array",
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

# Making a layout costs as much as a small operation, and a program has few of them.
_layouts: dict[Any, Any] = {}
_MAX_LAYOUTS = 4096


def all_reduce(call: Call, x: np.ndarray, op: int) -> Result:
    return _exchange(call, x, x.shape, True, lib.mlxdist_all_reduce, op)


def all_gather(call: Call, x: np.ndarray) -> Result:
    return _exchange(call, x, _gathered(call, x.shape), False, lib.mlxdist_all_gather)


def reduce_scatter(call: Call, x: np.ndarray, op: int) -> Result:
    return _exchange(call, x, call.chunk_shape(x.shape), True, lib.mlxdist_reduce_scatter, op)


def all_to_all(call: Call, x: np.ndarray) -> Result:
    call.chunk_shape(x.shape)  # only to check it
    return _exchange(call, x, x.shape, False, lib.mlxdist_all_to_all)


def reduce(call: Call, x: np.ndarray, op: int, root: int) -> Result:
    return _exchange(call, x, x.shape, True, lib.mlxdist_reduce, op, root, only=root)


def gather(call: Call, x: np.ndarray, root: int) -> Result:
    return _exchange(call, x, _gathered(call, x.shape), False, lib.mlxdist_gather, root, only=root)


def broadcast(call: Call, x: np.ndarray, root: int) -> Result:
    described = _layout(call, x.dtype, x.shape, call.dtype)
    target, result = _output(call, x.shape, x.dtype)
    if call.group.rank() == root and target is not x:
        np.copyto(target, x)
    return _run(call, result, lib.mlxdist_broadcast, _memory(target), described, root)


def scatter(call: Call, x: np.ndarray, root: int) -> Result:
    shape = call.chunk_shape(x.shape)
    described = _layout(call, x.dtype, shape, call.dtype)
    if call.group.rank() == root:
        source, target, result = _operands(call, x, shape, True)
    else:
        new, result = _output(call, shape, x.dtype)
        source, target = ffi.NULL, _memory(new)
    return _run(call, result, lib.mlxdist_scatter, source, target, described, root)


def all_to_all_v(call: Call, x: np.ndarray, send: Sequence[int], receive: Sequence[int]) -> Result:
    counts = call.row_counts(x.shape, send, receive)
    row = _layout(call, x.dtype, x.shape[1:], call.dtype)
    source, target, result = _operands(call, x, (sum(counts[1]), *x.shape[1:]), False)
    sent, received = (ffi.new("uint64_t[]", rows) for rows in counts)
    return _run(call, result, lib.mlxdist_all_to_all_v, source, sent, target, received, row)


def barrier(call: Call) -> Result:
    return _run(call, None, lib.mlxdist_barrier)


def send(call: Call, given: Any, dst: int) -> Result:
    x = array(call, given)
    described = _layout(call, x.dtype, x.shape, call.dtype)
    return _run(call, given, lib.mlxdist_send, _memory(_source(x, None, False)), described, dst)


def recv(call: Call, shape: Sequence[int], dtype: Any, src: int) -> Result:
    return _recv(call, call.receive_shape(shape), np.dtype(dtype), src)


def recv_like(call: Call, x: np.ndarray, src: int) -> Result:
    return _recv(call, x.shape, x.dtype, src)


def _recv(call: Call, shape: tuple[int, ...], elements: np.dtype, src: int) -> Result:
    described = _layout(call, elements, shape, call.dtype)
    target, result = _output(call, shape, elements)
    return _run(call, result, lib.mlxdist_recv, _memory(target), described, src)


def sendrecv(call: Call, x: np.ndarray, dst: int, src: int, shape: Sequence[int] | None, dtype: Any) -> Result:
    bits = dtype if dtype is not None and _dtype_name(dtype) == "bfloat16" else None  # both ways
    sent = _layout(call, x.dtype, x.shape, bits)
    elements = x.dtype if dtype is None or bits is not None else np.dtype(_dtype_name(dtype))
    shape = x.shape if shape is None else call.receive_shape(shape)
    received = _layout(call, elements, shape, bits)
    new, result = _output(call, shape, elements)
    source, target = _memory(_source(x, new, False)), _memory(new)
    return _run(call, result, lib.mlxdist_sendrecv, source, sent, dst, target, received, src)


def _exchange(
    call: Call,
    x: np.ndarray,
    shape: tuple[int, ...],
    in_place: bool,
    function: Callable[..., int],
    *arguments: int,
    only: int | None = None,
) -> Result:
    """Runs a collective whose result has ``shape``; on rank ``only`` alone, if given, for which ``out`` is then."""
    described = _layout(call, x.dtype, x.shape, call.dtype)
    if only is None or call.group.rank() == only:
        source, target, result = _operands(call, x, shape, in_place)
    else:
        source, target = _memory(_source(x, None, in_place)), ffi.NULL
        result = np.empty((0, *x.shape[1:]), x.dtype)
    return _run(call, result, function, source, target, described, *arguments)


def _run(call: Call, result: Any, function: Callable[..., int], *arguments: Any) -> Result:
    if call.async_op:
        return engine_of(call.group).start(call.name, call.limit, result, arguments, function, *arguments)
    engine_of(call.group).call(call.limit, function, *arguments)
    return result


def _gathered(call: Call, shape: tuple[int, ...]) -> tuple[int, ...]:
    if call.group.size() == 1:
        return shape
    first, *rest = shape or (1,)
    return (first * call.group.size(), *rest)


def _operands(call: Call, x: np.ndarray, shape: tuple[int, ...], in_place: bool) -> tuple[Any, Any, Any]:
    """Memory to read, memory to write, and the result. In a group of one the result is there already."""
    alone = call.group.size() == 1
    target, result = _output(call, shape, x.dtype)
    source = _source(x, None if call.out is None else target, in_place or alone)
    if alone:
        np.copyto(target, source)
        return ffi.NULL, ffi.NULL, result
    return _memory(source), _memory(target), result


# Arrays and buffers.


def array(call: Call, x: Any) -> np.ndarray:
    """``x`` itself, or an array on the memory of a buffer."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise call.error("masked arrays are not supported; pass x.filled(...), or x.data and x.mask")
    if isinstance(x, np.ndarray):
        return x
    return _view(call, "x", x, "an mx.array or a numpy.ndarray or another buffer")


def _view(call: Call, argument: str, buffer: Any, wanted: str) -> np.ndarray:
    try:
        return np.asarray(memoryview(buffer))
    except TypeError:
        problem = f"must be {wanted}, not {type(buffer).__name__}; np.asarray({argument}) makes one"
    except (ValueError, NotImplementedError, BufferError) as error:
        problem = f"is a {type(buffer).__name__}, whose elements are nothing that NumPy knows: {error}"
    raise call.error(f"{argument} {problem}")


def _output(call: Call, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, Any]:
    """The array that the engine writes to, and the result: a new array, or `out` if it can be written to."""
    out = call.out
    if out is None:
        new = np.empty(shape, dtype)
        return new, new
    if isinstance(out, np.ndarray):
        target, fits = out, out.shape == shape
    elif isinstance(out, mx.array):
        raise call.error("out must be a numpy.ndarray or another writable buffer, not an mx.array")
    else:
        target = _view(call, "out", out, "a numpy.ndarray or another writable buffer")
        fits = target.size == np.prod(shape, dtype=int)
    if not fits or target.dtype != dtype:
        raise call.error(f"out must have shape {shape} and dtype {dtype}, not {target.shape} and {target.dtype}")
    flags = target.flags
    if not (flags.c_contiguous and flags.aligned):
        raise call.error("out must be contiguous; leave it out, or pass a contiguous array")
    if not flags.writeable:
        raise call.error("out is read-only; leave it out, or pass an array that can be written")
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
    return x.ctypes.data


def _memory(x: np.ndarray) -> Any:
    """The memory of `x` for the engine. Keeps `x`."""
    try:
        return ffi.from_buffer(x)
    except ValueError:  # ml_dtypes' bfloat16, which the buffer protocol has no name for
        return ffi.from_buffer(x.view(np.uint16))


# dtypes and shapes.


def _layout(call: Call, elements: np.dtype, shape: tuple[int, ...], dtype: Any) -> Any:
    """dtype and shape for the engine; ``dtype`` may reinterpret the elements (see collectives.py).

    Raises:
        InvalidArgument: the engine cannot work on them.
    """
    key = (elements, shape) if dtype is None else (elements, shape, _dtype_name(dtype))
    found = _layouts.get(key)
    if found is None:
        found = layout(_engine_name(call, elements, dtype), shape)
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        _layouts[key] = found
    return found


def _engine_name(call: Call, elements: np.dtype, dtype: Any) -> str:
    own = elements.name  # ml_dtypes calls its own "bfloat16", as MLX does
    try:
        dtype_number(own)
    except errors.InvalidArgument as error:
        raise call.error(str(error)) from None
    if not elements.isnative:
        raise call.error(
            f"the array has the other byte order ({elements.str}); pass x.astype(x.dtype.newbyteorder('='))"
        )
    wanted = own if dtype is None else _dtype_name(dtype)
    if wanted == own or (wanted == "bfloat16" and own == "uint16"):
        return wanted
    raise call.error(
        f"dtype={wanted} does not fit an array of {own}; it is for the bits of bfloat16 in an array of uint16"
    )


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype of MLX or NumPy, which may be given by its name."""
    return np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("mlx.core.")
