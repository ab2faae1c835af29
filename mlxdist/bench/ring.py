"""MLX's own ring between the ranks of a benchmark, beside mlxdist in the same processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence

import mlx.core as mx

import mlxdist

__all__ = ["mlx_ring"]


def mlx_ring(hosts: Sequence[str], world: mlxdist.Group) -> mx.distributed.Group:
    """All ranks call it, with the same ``hosts``: "host:port" of each rank.

    Raises:
        RuntimeError: MLX numbers the ranks differently, or cannot connect.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hostfile:
        json.dump([[host] for host in hosts], hostfile)
        hostfile.flush()
        os.environ |= {"MLX_HOSTFILE": hostfile.name, "MLX_RANK": str(world.rank())}
        ring = mx.distributed.init(strict=True, backend="ring")
    if (ring.rank(), ring.size()) != (world.rank(), world.size()):
        raise RuntimeError(f"the ring numbers the ranks differently: {ring.rank()} of {ring.size()}")
    return ring
