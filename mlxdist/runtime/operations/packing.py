"""Several arrays of one dtype as one message."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import mlx.core as mx

__all__ = ["pack", "unpack"]


def pack(arrays: Sequence[mx.array]) -> mx.array:
    """All elements in one array. A single array is not copied."""
    if len(arrays) > 1:
        return mx.concatenate([array.reshape(-1) for array in arrays])
    # With six dimensions or more, the shape would leave no room for a hash in the first message.
    return arrays[0] if arrays[0].ndim < 6 else arrays[0].reshape(-1)


def unpack(packed: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """The inverse of :func:`pack`, for arrays of these shapes."""
    if len(shapes) == 1:
        return [packed.reshape(shapes[0])]
    ends = list(accumulate(map(prod, shapes)))
    return [part.reshape(shape) for part, shape in zip(mx.split(packed, ends[:-1]), shapes)]
