"""Groups of MLX's own backends over the same ranks, so that they can be measured in the same processes."""

from __future__ import annotations

import json
import os
import socket
import tempfile

import mlx.core as mx

import mlxdist
from mlxdist.base.environment import Environment, format_address
from mlxdist.cluster.hostfile import device_map

from .timing import exchange

__all__ = ["mlx_group"]


def mlx_group(name: str, world: mlxdist.Group) -> mx.distributed.Group:
    """A genuine mx.distributed.Group of a backend: "ring", "mpi", "jaccl". Collective.

    Raises:
        RuntimeError: the backend cannot be used, or numbers the ranks differently.
    """
    addresses = _addresses(world)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        if name == "ring":
            json.dump([[address] for address in addresses], file)
            os.environ |= {"MLX_HOSTFILE": file.name, "MLX_RANK": str(world.rank())}
        elif name == "jaccl":
            if not mx.distributed.is_available(name):
                raise RuntimeError("this MLX has no jaccl")
            json.dump(_devices(world), file)
            os.environ |= {"MLX_IBV_DEVICES": file.name, "MLX_JACCL_COORDINATOR": addresses[0]}
            os.environ["MLX_RANK"] = str(world.rank())
        file.flush()
        group = mx.distributed.init(strict=True, backend=name)
    if (group.rank(), group.size()) != (world.rank(), world.size()):
        raise RuntimeError(f"{name} numbers the ranks differently: {group.rank()} of {group.size()}")
    return group


def _addresses(world: mlxdist.Group) -> list[str]:
    """An address for each rank to listen on: a free port of the address by which the rank reaches rank 0."""
    if (rendezvous := Environment.read().rendezvous) is None:
        raise RuntimeError("MLX's ring and JACCL need two ranks or more")
    host, port = rendezvous
    (family, kind, *_, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as way:
        way.connect(target)  # sends nothing
        own = way.getsockname()[0]
    with socket.socket(family) as listening:
        listening.bind((own, 0))
        return exchange(format_address(own, listening.getsockname()[1]), world)


def _devices(world: mlxdist.Group) -> list[list[str | list[str] | None]]:
    """The matrix that JACCL reads, from the hostfile's "rdma"."""
    setting = Environment.read().device_map
    if setting is None:
        raise RuntimeError('the hostfile names no RDMA devices ("rdma")')
    found = device_map.load(setting)
    if found.size != world.size():
        raise RuntimeError(f"jaccl has one rank on each host, but there are {world.size()} ranks on {found.size} hosts")
    return [[(list(cell) if len(cell) > 1 else cell[0]) if cell else None for cell in row] for row in found.rows]
