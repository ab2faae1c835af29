"""Bytes of any length from rank to rank, at once."""

import numpy as np

from mlxdist.base.errors import ResourceError

from ..group.group import Group
from .collectives import all_gather, broadcast

__all__ = ["broadcast_blob", "gather_blobs"]


def broadcast_blob(blob: bytes, group: Group) -> bytes:
    """Broadcasts the bytes of rank 0 and returns them on every rank."""
    length = int(broadcast(np.array([len(blob)]), group=group)[0])
    buffer = np.zeros(length, np.uint8)
    if group.rank() == 0:
        buffer[:] = np.frombuffer(blob, np.uint8)
    return broadcast(buffer, group=group).tobytes()


def gather_blobs(blob: bytes, group: Group, most: int | None = None) -> list[bytes]:
    """Gathers the bytes of all ranks, in rank order, on every rank.

    Raises:
        ResourceError: on every rank, where one has more than ``most`` bytes.
    """
    lengths = all_gather(np.array([len(blob)]), group=group)
    if most is not None and lengths.max() > most:
        raise ResourceError(
            f"rank {int(lengths.argmax())} has {int(lengths.max())} bytes to send, at most {most} are allowed"
        )
    buffer = np.frombuffer(blob.ljust(int(lengths.max()), b"\0"), np.uint8)
    rows = all_gather(buffer, group=group).reshape(group.size(), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]
