"""Data-parallel training: every rank computes the gradients of its own share of a batch, then all average them."""

from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..errors import InvalidArgument
from ..group import Group
from ..ops import all_sum, get_world_size

# Large enough that what each message costs besides its bytes does not count: on a Mac the gradients wait for the GPU
# once per message, about 0.2 ms, while 32 MiB take 6 ms at the 5 GB/s of a Thunderbolt 5 cable. Between two ranks of
# one host, where a message costs 30 us and packing as much as sending, 32 MiB of gradients take the same time in any
# size of bucket, and only 3 MiB in many small leaves take 10 ms instead of 5 in buckets of 256 KiB. It is also the
# default of MLX's average_gradients.
DEFAULT_BUCKET_BYTES = 32 * 2**20


def all_reduce_grads(grads: Any, group: Group | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Any:
    """Averages a tree of gradients over the ranks of a group, in few large messages.

    Leaves of one dtype are packed, in the order of their paths in the tree, into flat buckets of at most
    ``bucket_bytes``; each bucket is one ``all_sum``. A leaf of ``bucket_bytes`` or more travels alone and is not
    copied. Nothing is evaluated: the result is lazy, as that of any operation of MLX, and works inside ``mx.compile``.

    Args:
        grads: a tree (dicts, lists, tuples) whose leaves are floating point or complex ``mx.array`` of any shape,
            such as the gradients of ``nn.value_and_grad``. Paths, shapes and dtypes must be the same on all ranks.
        group: the ranks to average over; ``None`` is the group of ``mlxdist.init()``.
        bucket_bytes: the most bytes that leaves share one message.

    Returns:
        A tree of the same structure, shapes and dtypes. Every rank holds bitwise the same values: the sum of all
        ranks, in the leaf's dtype, divided by the number of ranks. On a group of one, ``grads`` itself.

    Raises:
        InvalidArgument: a leaf is not an ``mx.array``, or neither floating point nor complex; ``bucket_bytes`` is less
            than 1. What :func:`mlxdist.all_sum` raises comes where the result is evaluated.
    """
    if bucket_bytes < 1:
        raise InvalidArgument(f"all_reduce_grads: bucket_bytes must be at least 1, not {bucket_bytes}")
    paths = []
    leaves = []
    for path, leaf in tree_flatten(grads):
        _require_gradient(path, leaf)
        paths.append(path)
        leaves.append(leaf)
    size = get_world_size(group)
    if size == 1:
        return grads

    # By path: two ranks may have built their dicts in different orders.
    order = sorted((i for i, leaf in enumerate(leaves) if leaf.size > 0), key=lambda i: paths[i])
    previous = None
    for bucket in _buckets(order, leaves, bucket_bytes):
        packed = leaves[bucket[0]] if len(bucket) == 1 else mx.concatenate([leaves[i].reshape(-1) for i in bucket])
        if previous is not None:
            # Ranks may evaluate parts of the result in different orders; the buckets still leave in this one.
            packed = mx.depends(packed, previous)
        previous = all_sum(packed, group=group)
        averaged = previous / size
        for i, values in zip(bucket, _unpack(averaged, [leaves[i] for i in bucket])):
            leaves[i] = values
    averages = iter(leaves)
    return tree_map(lambda _: next(averages), grads)


def _require_gradient(path: str, leaf: Any) -> None:
    if not isinstance(leaf, mx.array):
        raise InvalidArgument(f"all_reduce_grads: the leaf '{path}' is a {type(leaf).__name__}, not an mx.array")
    if not mx.issubdtype(leaf.dtype, mx.inexact):
        raise InvalidArgument(
            f"all_reduce_grads: the leaf '{path}' is {str(leaf.dtype).removeprefix('mlx.core.')}, which has no "
            "average; leave it out of the tree, or add it up with mlxdist.all_sum"
        )


def _buckets(order: list[int], leaves: list[mx.array], bucket_bytes: int) -> list[list[int]]:
    """Splits the indices `order` into buckets: one dtype each, at most `bucket_bytes` or a single leaf."""
    buckets = []
    filling: dict[mx.Dtype, list[int]] = {}  # the bucket of each dtype that takes more leaves,
    room: dict[mx.Dtype, int] = {}  # and the bytes it still takes
    for i in order:
        dtype, nbytes = leaves[i].dtype, leaves[i].nbytes
        if nbytes >= bucket_bytes:
            buckets.append([i])
        elif nbytes <= room.get(dtype, 0):
            filling[dtype].append(i)
            room[dtype] -= nbytes
        else:
            filling[dtype] = [i]
            room[dtype] = bucket_bytes - nbytes
            buckets.append(filling[dtype])
    return buckets


def _unpack(packed: mx.array, like: list[mx.array]) -> list[mx.array]:
    """The inverse of packing `like` into one flat array."""
    if len(like) == 1:
        return [packed]
    ends = list(accumulate(leaf.size for leaf in like))
    return [part.reshape(leaf.shape) for part, leaf in zip(mx.split(packed, ends[:-1]), like)]
