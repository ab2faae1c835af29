"""Data-parallel training: every rank computes the gradients of its own share of a batch, then all average them."""

from functools import lru_cache
from hashlib import blake2b
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.arguments import group_of
from mlxdist.runtime.group import Group
from mlxdist.runtime.packing import pack, unpack

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
    A hash of all paths, shapes and dtypes is made once for each structure, and compared where the ranks compare the
    shape of each ``all_sum``: in its first message, which has room for it.

    Args:
        grads: a tree (dicts, lists, tuples) whose leaves are floating point or complex ``mx.array`` of any shape,
            such as the gradients of ``nn.value_and_grad``. Paths, shapes and dtypes, and ``bucket_bytes``, must be the
            same on all ranks.
        group: the ranks to average over; ``None`` is the group of ``mlxdist.init()``.
        bucket_bytes: how many bytes of leaves share one message at most; 32 MiB by default.

    Returns:
        A tree of the same structure, shapes and dtypes. Every rank holds bitwise the same values: the sum of all
        ranks, in the leaf's dtype, divided by the number of ranks. On a group of one, ``grads`` itself.

    Raises:
        InvalidArgument: a leaf is not an ``mx.array``, or neither floating point nor complex; ``bucket_bytes`` is less
            than 1. What :func:`mlxdist.all_sum` raises comes where the result is evaluated: a Mismatch also where trees
            of equal sizes have other paths, shapes or dtypes.
    """
    if bucket_bytes < 1:
        raise InvalidArgument(f"all_reduce_grads: bucket_bytes must be at least 1, not {bucket_bytes}")
    flat: Any = tree_flatten(grads)
    for path, leaf in flat:
        _require_gradient(path, leaf)
    paths, leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
    group = group_of(group)
    size = group.size()
    if size == 1:
        return grads
    structure = tuple((path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves))
    labeled = group.connection.mlx_group(-1.0, _hash_of(structure, bucket_bytes))

    # By path: two ranks may have built their dicts in different orders.
    order = sorted((i for i, leaf in enumerate(leaves) if leaf.size > 0), key=lambda i: paths[i])
    previous = None
    for bucket in _buckets(order, leaves, bucket_bytes):
        packed = pack([leaves[i] for i in bucket])
        if previous is not None:
            # Ranks may evaluate parts of the result in different orders; the buckets still leave in this one.
            packed = mx.depends(packed, previous)
        previous = mx.distributed.all_sum(packed, group=labeled)
        averaged = previous / size
        for i, values in zip(bucket, unpack(averaged, [leaves[i] for i in bucket])):
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


@lru_cache(maxsize=64)
def _hash_of(structure: tuple, bucket_bytes: int) -> int:
    """Of 63 bits, and never 0. By path: see the order of the leaves."""
    lines = sorted((path, shape, str(dtype)) for path, shape, dtype in structure)
    digest = blake2b(repr((lines, bucket_bytes)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1
