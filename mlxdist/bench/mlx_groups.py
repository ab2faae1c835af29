"""Groups of MLX's own backends over the same ranks, so that they can be measured in the same processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence

import mlx.core as mx

import mlxdist

__all__ = ["mlx_groups"]


def mlx_groups(
    names: Sequence[str], hosts: Sequence[str], world: mlxdist.Group
) -> dict[str, mx.distributed.Group]:
    """A genuine mx.distributed.Group of each backend: "ring", "mpi".

    Args:
        hosts: where each rank of the ring listens: "127.0.0.1:5000".

    Raises:
        RuntimeError: a backend cannot be used, or numbers the ranks differently.
    """
    found = {}
    for name in names:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as hostfile:
            if name == "ring":
                json.dump([[host] for host in hosts], hostfile)
                hostfile.flush()
                os.environ |= {"MLX_HOSTFILE": hostfile.name, "MLX_RANK": str(world.rank())}
            found[name] = mx.distributed.init(strict=True, backend=name)
        if (found[name].rank(), found[name].size()) != (world.rank(), world.size()):
            raise RuntimeError(f"{name} numbers the ranks differently: {found[name].rank()} of {found[name].size()}")
    return found
