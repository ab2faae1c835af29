"""Device selection: each rank sends its node's devices to all, and all choose by the same rules."""

import dataclasses
import functools
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxdist.base.environment import Environment
from mlxdist.base.errors import Mismatch, name_ranks
from mlxdist.base.host_identity import host_identity
from mlxdist.base.json_reader import parse_json
from mlxdist.cluster.hostfile import device_map

from .device import Device
from .links import Choice, choose
from .node_info import NodeInfo, host_numbers
from .queue_pairs import check_queue_pairs

__all__ = ["ONE_HOST", "DeviceSelection", "select_devices"]

ONE_HOST = "all ranks are on one host"


class Rendezvous(Protocol):
    """The method of the rendezvous that device selection calls."""

    def all_gather(self, blob: bytes, what: str) -> list[bytes]: ...


@dataclass(frozen=True)
class DeviceSelection:
    """``choice``: the devices that this rank uses; None where all ranks are on one host, and the software provider
    connects them by itself. ``nodes``: those of all ranks, ``choice_of``: their choices, ``devices``: all that is known
    of this rank's; all empty then."""

    choice: Choice | None
    nodes: Sequence[NodeInfo] = ()
    choice_of: Callable[[int], Choice] | None = None
    devices: Sequence[Device] = ()

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, in the order of their first ranks; empty where all are on one."""
        numbers = host_numbers(self.nodes)
        return numbers if any(numbers) else []

    def without_rdma(self, environment: Environment, why: str) -> Choice:
        """The choice of this rank where RDMA devices were chosen and could not be set up: ``why`` is the reason. Raises
        InvalidArgument: nothing else connects two ranks; raised on all ranks, so none waits for another."""
        links, transport = environment.links_per_peer or 1, environment.soft_transport
        choices = [choose(self.nodes, r, "soft", None, links, transport) for r in range(len(self.nodes))]
        reason = f"{why}; instead of RDMA ranks use shared memory within a host and TCP between hosts"
        return dataclasses.replace(choices[environment.rank], reason=reason)


def select_devices(rendezvous: Rendezvous, environment: Environment, host: str) -> DeviceSelection:
    """Selects the devices that connect the ranks. Collective.

    Raises:
        Mismatch: the ranks have different settings.
        InvalidArgument: the device map is wrong, or no device connects two ranks.
        ResourceError: the provider that the user wants is not there.
    """
    matrix = None if environment.device_map is None else device_map.load(environment.device_map)
    identity = host_identity().encode()
    is_emulated = environment.emulated_node is not None
    if is_emulated:
        identity += f" {host}".encode()
    hosts = _gather_hosts(rendezvous, environment, identity, matrix)
    # On one host no other device would be used, so none is listed: drivers may hang.
    simple = environment.provider in ("auto", "soft") and environment.soft_transport != "tcp"
    if len(set(hosts)) == 1 and simple and (matrix is None or environment.provider == "soft"):
        return DeviceSelection(None)
    address = _address(environment)
    here = NodeInfo.here(identity, host, address, environment.provider, environment.soft_profile)
    here = dataclasses.replace(here, is_emulated=is_emulated)
    nodes = [NodeInfo.unpack(blob) for blob in rendezvous.all_gather(here.pack(), "devices")]
    choice_of = functools.partial(
        choose,
        nodes,
        provider=environment.provider,
        device_map=matrix,
        links_per_peer=environment.links_per_peer or 1,
        soft_transport=environment.soft_transport,
    )
    check_queue_pairs(nodes, environment.topology, choice_of)
    return DeviceSelection(choice_of(environment.rank), nodes, choice_of, here.devices)


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
        theirs = parse_json(texts[others[0]])
        first = parse_json(texts[0])
        name = next(name for name in settings if first.get(name) != theirs.get(name))
        raise Mismatch(
            f"ranks have different settings: {name} is {first.get(name)} on rank 0 and {theirs.get(name)} on "
            f"{name_ranks(others)}; set it alike on all"
        )
    return list(hosts)


def _address(environment: Environment) -> str:
    """The address of this machine by which it reaches rank 0. Nothing is sent: a datagram socket is only routed."""
    assert environment.rendezvous is not None
    host, port = environment.rendezvous
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            return sock.getsockname()[0]
    except OSError:
        return ""
