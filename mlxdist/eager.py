"""The operations on NumPy arrays: carried out at once, into a new array or in place.

mlxdist.ops checks which kind of array it was given and documents the arguments; this module checks the rest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import errors
from .group import Group
from .native import dtype_number, ffi, layout, lib

__all__ = ["all_gather", "all_reduce", "broadcast", "dtype_name", "recv", "send", "sum_scatter"]

_REDUCTIONS = {
    "sum": lib.MLXDIST_SUM,
    "max": lib.MLXDIST_MAX,
    "min": lib.MLXDIST_MIN,
    "prod": lib.MLXDIST_PROD,
}


def all_reduce(name: str, x: np.ndarray, op: str, group: Group, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    array_layout = layout(dtype_name(name, x, dtype), x.shape)
    out = _output(name, x.shape, x.dtype, out)
    source = _source(x, out, in_place=True)
    if group.size() == 1:
        np.copyto(out, source)
    group.call(lib.mlxdist_all_reduce, _address(source), _address(out), array_layout, _REDUCTIONS[op])
    return out


def all_gather(x: np.ndarray, group: Group, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    array_layout = layout(dtype_name("all_gather", x, dtype), x.shape)
    first, *rest = x.shape or (1,)
    alone = group.size() == 1
    out = _output("all_gather", x.shape if alone else (first * group.size(), *rest), x.dtype, out)
    source = _source(x, out, in_place=alone)
    if alone:
        np.copyto(out, source)
    group.call(lib.mlxdist_all_gather, _address(source), _address(out), array_layout)
    return out


def sum_scatter(x: np.ndarray, group: Group, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    array_layout = layout(dtype_name("sum_scatter", x, dtype), x.shape)
    alone = group.size() == 1
    if not alone and (x.ndim == 0 or x.shape[0] % group.size() != 0):
        raise errors.InvalidArgument(
            f"sum_scatter: the first dimension of shape {x.shape} is not a multiple of the {group.size()} ranks"
        )
    shape = x.shape if alone else (x.shape[0] // group.size(), *x.shape[1:])
    out = _output("sum_scatter", shape, x.dtype, out)
    source = _source(x, out, in_place=True)
    if alone:
        np.copyto(out, source)
    group.call(lib.mlxdist_reduce_scatter, _address(source), _address(out), array_layout, lib.MLXDIST_SUM)
    return out


def broadcast(x: np.ndarray, root: int, group: Group, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    array_layout = layout(dtype_name("broadcast", x, dtype), x.shape)
    out = _output("broadcast", x.shape, x.dtype, out)
    if group.rank() == root and out is not x:
        np.copyto(out, x)
    group.call(lib.mlxdist_broadcast, _address(out), array_layout, root)
    return out


def send(x: np.ndarray, dst: int, group: Group, dtype: Any) -> np.ndarray:
    array_layout = layout(dtype_name("send", x, dtype), x.shape)
    group.call(lib.mlxdist_send, _address(_source(x, None, in_place=False)), array_layout, dst)
    return x


def recv(
    shape: Sequence[int], like: np.dtype, src: int, group: Group, out: np.ndarray | None, dtype: Any
) -> np.ndarray:
    shape = tuple(shape)
    if any(length < 0 for length in shape):
        raise errors.InvalidArgument(f"recv: shape {shape} has a negative dimension")
    array_layout = layout(_name_of("recv", like, dtype), shape)
    out = _output("recv", shape, like, out)
    group.call(lib.mlxdist_recv, _address(out), array_layout, src)
    return out


def dtype_name(name: str, x: np.ndarray, dtype: Any) -> str:
    """The engine's name for the elements of ``x``, which ``dtype`` may reinterpret (see mlxdist.ops).

    Raises:
        InvalidArgument: the engine cannot work on them.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise errors.InvalidArgument(
            f"{name}: masked arrays are not supported; pass x.filled(...), or x.data and x.mask"
        )
    return _name_of(name, x.dtype, dtype)


def _name_of(name: str, elements: np.dtype, dtype: Any) -> str:
    own = elements.name  # ml_dtypes calls its own "bfloat16", as MLX does
    try:
        dtype_number(own)
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"{name}: {error}") from None
    if not elements.isnative:
        raise errors.InvalidArgument(
            f"{name}: the array has the other byte order ({elements.str}); pass x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype is None:
        return own
    asked = str(dtype).removeprefix("mlx.core.") if not isinstance(dtype, type) else np.dtype(dtype).name
    if asked == own or (asked == "bfloat16" and own == "uint16"):
        return asked
    raise errors.InvalidArgument(
        f"{name}: dtype={asked} does not fit an array of {own}; it is for the bits of bfloat16 in an array of uint16"
    )


def _output(name: str, shape: tuple[int, ...], dtype: np.dtype, out: np.ndarray | None) -> np.ndarray:
    """A new array, or `out` if the engine can write the result there."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise errors.InvalidArgument(f"{name}: out must be a numpy.ndarray, not {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise errors.InvalidArgument(
            f"{name}: out must have shape {shape} and dtype {dtype}, not {out.shape} and {out.dtype}"
        )
    if not (out.flags.c_contiguous and out.flags.aligned):
        raise errors.InvalidArgument(f"{name}: out must be contiguous; leave it out, or pass a contiguous array")
    if not out.flags.writeable:
        raise errors.InvalidArgument(f"{name}: out is read-only; leave it out, or pass an array that can be written")
    return out


def _source(x: np.ndarray, out: np.ndarray | None, in_place: bool) -> np.ndarray:
    """`x`, or a copy if the engine cannot read it where it is, or would overwrite it before it has read it."""
    readable = x.flags.c_contiguous and x.flags.aligned
    if readable and (out is None or not np.may_share_memory(x, out) or (in_place and _pointer(x) == _pointer(out))):
        return x
    return np.array(x, order="C")


def _pointer(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _address(x: np.ndarray) -> Any:
    return ffi.cast("void *", _pointer(x))
