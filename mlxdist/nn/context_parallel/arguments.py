"""The arguments of attention over a sharded sequence, checked before anything is sent."""

from collections.abc import Sequence

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group

from .sequence import local_axis

__all__ = ["Mask", "check_attention", "mask_kind"]

Mask = str | mx.array | None


def check_attention(
    name: str, arrays: Sequence[mx.array], mask: Mask, sinks: mx.array | None, window_size: int | None, group: Group
) -> None:
    """Raises an :class:`InvalidArgument` that begins with ``name`` if the queries, keys and values are unusable."""
    q, k, v = arrays
    shapes = f"q has shape {q.shape}, k {k.shape} and v {v.shape}"
    if any(x.ndim != 4 for x in arrays):
        raise InvalidArgument(f"{name}: q, k and v must have shape (batch, heads, length, dims), but {shapes}")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]):
        raise InvalidArgument(f"{name}: q, k and v do not fit each other: {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InvalidArgument(f"{name}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if q.shape[2] != k.shape[2]:
        raise InvalidArgument(f"{name}: q and k must be shards of one sequence, but have {q.shape[2]} and {k.shape[2]}")
    if any(not mx.issubdtype(x.dtype, mx.floating) or x.dtype == mx.float64 for x in arrays):
        raise InvalidArgument(
            f"{name}: q, k and v must be float32, float16 or bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    local_axis(name, q, 2, group)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise InvalidArgument(f"{name}: sinks has shape {sinks.shape}, but must be one for each of {q.shape[1]} heads")
    _check_mask(name, mask, (*q.shape[:3], q.shape[2] * group.size()))
    if window_size is not None and (mask_kind(mask) != "causal" or window_size < 1):
        raise InvalidArgument(f"{name}: window_size must be at least 1, and mask 'causal', not {window_size}")


def mask_kind(mask: Mask) -> str:
    return "array" if isinstance(mask, mx.array) else str(mask)


def _check_mask(name: str, mask: Mask, shape: tuple[int, ...]) -> None:
    """Checks ``mask`` against ``shape``, the shape of the scores of this rank's queries with all keys."""
    if not isinstance(mask, mx.array):
        if mask is not None and mask != "causal":
            raise InvalidArgument(f"{name}: mask must be None, 'causal' or an array, not {mask!r}")
        return
    if mask.dtype != mx.bool_ and not mx.issubdtype(mask.dtype, mx.floating):
        raise InvalidArgument(f"{name}: mask must be of bool or floating point, not {mask.dtype}")
    padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(padded, shape)):
        raise InvalidArgument(
            f"{name}: mask has shape {mask.shape}, which does not fit {shape}: its rows are this rank's queries, its "
            "columns the keys of the full sequence, in order"
        )
