"""Gradients in buckets: flat arrays of several gradients, each of which is one message."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import mlx.core as mx

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.operations.packing import pack, unpack

__all__ = ["DEFAULT_BUCKET_BYTES", "Bucket", "BucketPlan", "Gradient", "check_reduce_dtype", "sum_dtype"]

# Large enough that what each message costs besides its bytes does not count: on a Mac the gradients wait for the GPU
# once per message, about 0.2 ms, while 32 MiB take 6 ms at the 5 GB/s of a Thunderbolt 5 cable. Between two ranks of
# one host, where a message costs 30 us and packing as much as sending, 32 MiB of gradients take the same time in any
# size of bucket, and only 3 MiB in many small leaves take 10 ms instead of 5 in buckets of 256 KiB. It is also the
# default of MLX's average_gradients.
DEFAULT_BUCKET_BYTES = 32 * 2**20

_HALVES = (mx.float16, mx.bfloat16)


class Gradient(NamedTuple):
    """The facts about a gradient that are known before it is computed. ``over``: names the ranks that average it."""

    path: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    over: Hashable = None


class Bucket(NamedTuple):
    """Some gradients of a plan, by number, that travel together: added up on this rank, and sent, in these dtypes."""

    gradients: list[int]
    over: Hashable
    sum_dtype: mx.Dtype
    wire_dtype: mx.Dtype


@dataclass
class BucketPlan:
    """How gradients are divided into buckets.

    Args:
        gradients: the gradients of a tree. A gradient without elements is in no bucket.
        order: their numbers, in the order in which they are to leave.
        all_reduce_size: bytes on the wire that share one bucket at most; a larger gradient is alone in one.
        reduce_dtype: of the messages; ``None``: float32 for gradients of 16 bits, for others their own.
    """

    gradients: Sequence[Gradient]
    order: Sequence[int]
    all_reduce_size: int
    reduce_dtype: mx.Dtype | None
    buckets: list[Bucket] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = []
        filling: dict[Hashable, Bucket] = {}  # the bucket of each kind that takes more,
        room: dict[Hashable, int] = {}  # and the bytes it still takes
        last: dict[int, int] = {}  # bucket: the place of its last gradient
        for place, number in enumerate(self.order):
            gradient = self.gradients[number]
            kind = (gradient.over, sum_dtype(gradient.dtype), self._wire_dtype(gradient.dtype))
            nbytes = prod(gradient.shape) * kind[-1].size
            if nbytes == 0:
                continue
            if nbytes >= self.all_reduce_size:
                bucket = Bucket([number], *kind)
                self.buckets.append(bucket)
            elif nbytes <= room.get(kind, 0):
                bucket = filling[kind]
                bucket.gradients.append(number)
                room[kind] -= nbytes
            else:
                bucket = filling[kind] = Bucket([number], *kind)
                room[kind] = self.all_reduce_size - nbytes
                self.buckets.append(bucket)
            last[id(bucket)] = place
        self.buckets.sort(key=lambda bucket: last[id(bucket)])  # a bucket leaves when its last gradient is ready

    def _wire_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        if dtype == mx.complex64:
            return dtype
        return self.reduce_dtype or sum_dtype(dtype)

    def structure(self, *options: object, over: Hashable = None) -> int:
        """A hash of 63 bits, never 0, that ranks with another plan of what is averaged ``over`` them, or other options,
        do not have."""
        # By path: dicts have any order.
        lines = sorted((path, shape, str(dtype)) for path, shape, dtype, ranks in self.gradients if ranks == over)
        order = [self.gradients[number].path for number in self.order if self.gradients[number].over == over]
        text = repr((lines, order, self.all_reduce_size, str(self.reduce_dtype), options))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1

    def pack(self, bucket: Bucket, arrays: dict[int, mx.array]) -> mx.array:
        """Takes the gradients of ``bucket`` out of ``arrays``, where they are by number, as one of its sum_dtype."""
        return pack([arrays.pop(number).astype(bucket.sum_dtype) for number in bucket.gradients])

    def unpack(self, bucket: Bucket, packed: mx.array, arrays: dict[int, mx.array]) -> None:
        """The inverse; the gradients have their own dtypes again."""
        shapes = [self.gradients[number].shape for number in bucket.gradients]
        for number, array in zip(bucket.gradients, unpack(packed, shapes)):
            arrays[number] = array.astype(self.gradients[number].dtype)


def check_reduce_dtype(name: str, reduce_dtype: mx.Dtype | None) -> None:
    """Raises InvalidArgument, which begins with ``name``, for a dtype that gradients cannot have."""
    if reduce_dtype is None:
        return
    if not isinstance(reduce_dtype, mx.Dtype) or not mx.issubdtype(reduce_dtype, mx.floating):
        shown = str(reduce_dtype).removeprefix("mlx.core.")
        raise InvalidArgument(f"{name}: reduce_dtype is {shown}; give a floating point dtype, such as mx.float32")


def sum_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of sums of gradients: in 16 bits, a small gradient is lost beside the sum so far."""
    return mx.float32 if dtype in _HALVES else dtype
