"""Describes a rank's node to the other ranks: the host, and the devices by which it can be reached."""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import (
    fields_of,
    flag,
    hex_bytes,
    list_of,
    number,
    object_of,
    one_of,
    or_null,
    plain_text,
    positive,
    row_of,
)

from .device import GID_TYPES, REAL_PROVIDER, Device, Gid, list_devices
from .listing import list_apart, may_have_devices
from .probe import PeerProbe, Probe

__all__ = ["NodeInfo", "host_numbers"]

_MAX_BYTES = 64 * 1024
_MAX_DEVICES = 64
_MAX_TEXT = 255
_MAX_INDEX = 255  # sgid_index of an address handle is a byte
_MAX_SPEED = 1e6  # Gbit/s
_NAME_BYTES = 63
_PROVIDERS = ("soft", "ibverbs", "librdma")


@dataclass(frozen=True)
class NodeInfo:
    """The node that a rank runs on. Ranks with the same ``identity`` share a kernel.

    ``address``: the IP address by which it reaches the rendezvous, "" where that is not known. ``missing``: why it has
    no RDMA device, "" where it has some, or was not to look. ``is_emulated``: others are on this machine, too, and are
    reached by loopback.
    """

    identity: bytes
    host: str
    address: str = ""
    devices: tuple[Device, ...] = ()
    missing: str = ""
    is_emulated: bool = False

    @classmethod
    def here(
        cls, identity: bytes, host: str, address: str = "", provider: str = "auto", soft_profile: str = "ideal"
    ) -> "NodeInfo":
        """Describes this rank's node. Devices are listed as far as ``provider`` may need them."""
        devices: list[Device] = []
        missing = ""
        if provider in ("auto", "soft"):
            devices += list_devices("soft", soft_profile)
        if provider != "soft":
            real = REAL_PROVIDER if provider == "auto" else provider
            if provider == "auto" and not may_have_devices():
                missing = "it has no RDMA device"
            else:
                # In a process of its own: a driver may hang or crash on a port that is down.
                listing = list_apart(real)
                devices += listing.devices
                missing = listing.error
                if not (listing.devices or missing):
                    missing = f"{real} lists no device: `mlxdist devices --provider {real}` says why"
        return cls(identity, host, address, tuple(devices), missing[:_MAX_TEXT])

    def of_provider(self, provider: str) -> tuple[Device, ...]:
        return tuple(sorted((d for d in self.devices if d.provider == provider), key=lambda d: (len(d.name), d.name)))

    def pack(self) -> bytes:
        """The node as bytes, for :meth:`unpack` on another rank. Raises ResourceError: there are too many addresses."""
        devices = [_pack_device(device) for device in self.devices]
        fields = vars(self) | {"identity": self.identity.hex(), "devices": devices}
        packed = json.dumps(fields, separators=(",", ":")).encode()
        if len(packed) > _MAX_BYTES or len(self.devices) > _MAX_DEVICES:
            raise ResourceError(
                f"the {len(self.devices)} devices of host {self.host} have too many addresses: {len(packed)} bytes "
                f"where {_MAX_BYTES} are allowed, of at most {_MAX_DEVICES} devices; unload those that are not in use"
            )
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> "NodeInfo":
        """The node that :meth:`pack` was called on. Raises InvalidArgument: these bytes are not from :meth:`pack` of
        this version."""
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"it has {len(data)} bytes, and at most {_MAX_BYTES} are allowed")
            return cls(**fields_of(_FIELDS, parse_json(data)))
        except ValueError as error:
            raise InvalidArgument(
                f"a rank has sent a malformed list of its devices: {error}; install the same mlxdist on all hosts"
            ) from None


def host_numbers(nodes: Sequence[NodeInfo]) -> list[int]:
    """The number of each node's host, in the order of the first nodes of hosts."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(node.identity, len(numbers)) for node in nodes]


def _pack_device(device: Device) -> dict[str, Any]:
    """A device's fields, without useless addresses: others reach a device only by those of an active port."""
    gids = [gid for gid in device.gids if device.is_active and gid.index <= _MAX_INDEX]
    return {
        "provider": device.provider,
        "name": device.name,
        "error": device.error[:_MAX_TEXT],
        "state": device.state,
        "link_layer": device.link_layer,
        "speed": device.speed,
        "max_qp": max(0, device.limits.get("max_qp", 0)),
        "probe": device.probe and vars(device.probe),
        "peer_probe": device.peer_probe and vars(device.peer_probe),
        "gids": [[gid.index, gid.type, gid.address.hex(), gid.prefix] for gid in gids],
    }


def _gid(name: str, value: Any) -> Gid:
    return Gid(*_GID(name, value))


def _device(name: str, value: Any) -> Device:
    device = fields_of(_DEVICE, value)
    max_qp = device.pop("max_qp")
    return Device(**device, limits={"max_qp": max_qp} if max_qp else {})


def _address(name: str, value: Any) -> str:
    return str(value and ipaddress.ip_address(plain_text(_MAX_TEXT)(name, value)))


_GID = row_of(number(0, _MAX_INDEX), one_of(GID_TYPES), hex_bytes(16, 16), or_null(number(0, 32)))
_DEVICE = {
    "provider": one_of(_PROVIDERS),
    "name": plain_text(_NAME_BYTES),
    "error": plain_text(_MAX_TEXT),
    "state": plain_text(_MAX_TEXT),
    "link_layer": plain_text(_MAX_TEXT),
    "speed": or_null(positive(_MAX_SPEED)),
    "max_qp": number(0, 2**31 - 1),
    "probe": or_null(object_of(Probe)),
    "peer_probe": or_null(object_of(PeerProbe)),
    "gids": list_of(_gid, _MAX_INDEX + 1),
}
_FIELDS = {
    "identity": hex_bytes(0, _MAX_TEXT),
    "host": plain_text(_MAX_TEXT),
    "address": _address,
    "devices": list_of(_device, _MAX_DEVICES),
    "missing": plain_text(_MAX_TEXT),
    "is_emulated": flag,
}
