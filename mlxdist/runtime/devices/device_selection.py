"""How the ranks of a job agree on the devices that join them: each tells all where it is, and all choose alike."""

import dataclasses
import functools
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxdist.base.environment import Environment
from mlxdist.base.errors import Mismatch, name_ranks
from mlxdist.base.host_identity import host_identity
from mlxdist.cluster.hostfile import device_map

from .links import Choice, choose
from .node_info import Place
from .queue_pairs import check_queue_pairs

__all__ = ["ONE_HOST", "Agreement", "agree"]

ONE_HOST = "all ranks are on one host"


class Rendezvous(Protocol):
    """What this needs of it."""

    def all_gather(self, blob: bytes, what: str) -> list[bytes]: ...


@dataclass(frozen=True)
class Agreement:
    """``choice``: what this rank uses; None where all ranks are on one host, and the software provider joins them as
    it does. ``places``: of all ranks, empty then."""

    choice: Choice | None
    places: Sequence[Place] = ()

    def without_rdma(self, environment: Environment, why: str) -> Choice:
        """What this rank uses instead where RDMA devices were chosen and could not be set up: ``why``.

        Raises:
            InvalidArgument: two ranks are not joined in another way; the same on all ranks, so none waits for another.
        """
        cables, wire = environment.links_per_peer or 1, environment.soft_transport
        ranks = range(len(self.places))
        choices = [choose(self.places, rank, "soft", cables=cables, soft_transport=wire) for rank in ranks]
        reason = f"{why}; instead of RDMA ranks use shared memory within a host and TCP between hosts"
        return dataclasses.replace(choices[environment.rank], reason=reason)


def agree(rendezvous: Rendezvous, environment: Environment, host: str) -> Agreement:
    """Which devices join the ranks.

    Raises:
        Mismatch: the ranks have different settings.
        InvalidArgument: the device map is wrong, or no device joins two ranks.
        ResourceError: the provider that the user wants is not there.
    """
    matrix = None if environment.device_map is None else device_map.load(environment.device_map)
    identity = host_identity().encode()
    hosts = _gather_hosts(rendezvous, environment, identity, matrix)
    simple = environment.provider in ("auto", "soft") and environment.soft_transport != "tcp"
    if len(set(hosts)) == 1 and simple and (matrix is None or environment.provider == "soft"):
        return Agreement(None)
    address = _address(environment)
    here = Place.here(identity, host, address, environment.provider, environment.soft_profile)
    places = [Place.unpack(blob) for blob in rendezvous.all_gather(here.pack(), "devices")]
    choice_of = functools.partial(
        choose,
        places,
        provider=environment.provider,
        device_map=matrix,
        cables=environment.links_per_peer or 1,
        soft_transport=environment.soft_transport,
    )
    check_queue_pairs(places, environment.topology, choice_of)
    return Agreement(choice_of(environment.rank), places)


def _gather_hosts(
    rendezvous: Rendezvous, environment: Environment, identity: bytes, matrix: device_map.DeviceMap | None
) -> list[bytes]:
    """The identity of every rank's host. A rank with other settings would choose other devices."""
    settings = {
        "MLXDIST_PROVIDER": environment.provider,
        "MLXDIST_SOFT_TRANSPORT": environment.soft_transport,
        "MLXDIST_SOFT_PROFILE": environment.soft_profile if environment.provider in ("auto", "soft") else None,
        "MLXDIST_LINKS_PER_PEER": environment.links_per_peer or 1,
        "MLXDIST_DEVICE_MAP": matrix and json.dumps(matrix.rows),
    }
    blobs = rendezvous.all_gather(identity + b"\0" + json.dumps(settings).encode(), "hosts")
    hosts, texts = zip(*(blob.split(b"\0", 1) for blob in blobs))
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if others:
        theirs = json.loads(texts[others[0]])
        first = json.loads(texts[0])
        name = next(name for name in settings if first.get(name) != theirs.get(name))
        raise Mismatch(
            f"ranks have different settings: {name} is {first.get(name)} on rank 0 and {theirs.get(name)} on "
            f"{name_ranks(others)}; set it alike on all"
        )
    return list(hosts)


def _address(environment: Environment) -> str:
    """The address of this machine by which it reaches rank 0. Nothing is sent: a datagram socket is only routed."""
    host, port = environment.rendezvous
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            return sock.getsockname()[0]
    except OSError:
        return ""
