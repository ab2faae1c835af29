"""The devices of a provider, their port, limits and addresses."""

import enum
import ipaddress
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlxdist.base.errors import ResourceError, Timeout
from mlxdist.base.validation import build
from mlxdist.runtime.internal_thread import InternalThread

from .probe import PeerProbe, Probe

__all__ = ["ACTIVE", "GID_TYPES", "REAL_PROVIDER", "Device", "Form", "Gid", "list_devices", "port_remedy", "speed_of"]

# The library of RDMA that systems of this kind have.
REAL_PROVIDER = "librdma" if sys.platform == "darwin" else "ibverbs"

GID_TYPES = ("IB", "RoCE v1", "RoCE v2", "unknown", "memory", "TCP")  # enum mlxdist_gid_type of mlxdist.h
ACTIVE = "ACTIVE"
STATES = ("NOP", "DOWN", "INIT", "ARMED", ACTIVE, "ACTIVE_DEFER")  # enum ibv_port_state
THUNDERBOLT = "Thunderbolt"
LINK_LAYERS = {0: "unspecified", 1: "InfiniBand", 2: "Ethernet", 100: THUNDERBOLT}  # enum of verbs_abi.h
# enum ibv_transport_type; Apple's own has the number 100.
TRANSPORTS = {0: "InfiniBand", 1: "iWARP", 2: "usNIC", 3: "usNIC UDP", 100: THUNDERBOLT}
LIMITS = ("max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_mr_size", "max_pd", "max_message")

# Lanes and Gbit/s a lane, as ibv_port_attr encodes them.
_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LANE_SPEEDS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}

_IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
_LINK_LOCAL = ipaddress.IPv6Network("fe80::/64")  # RFC 4291: behind fe80 come 54 bits that are zero
_GLOBAL = (ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("fc00::/7"))
_MAX_DEVICES = 256


class Form(enum.StrEnum):
    """The form of a GID. Its index says nothing: the same address is at 0, 1 or 3 on different systems."""

    IPV4 = "IPv4"  # ::ffff:a.b.c.d
    GLOBAL = "global"  # IPv6, unique local addresses included
    LINK_LOCAL = "link-local"  # IPv6: fe80::/64 and an EUI-64, or 64 random bits, as Linux may be set to
    GUID = "GUID"  # InfiniBand: the subnet's prefix, which may be any, and the port's GUID
    SEGMENT = "segment"  # of the software provider
    NONE = "no address"  # such as the UUID of a Thunderbolt domain, which macOS 27 has at index 0


_OWN_FORMS = {"IB": Form.GUID, "memory": Form.SEGMENT}


@dataclass(frozen=True)
class Gid:
    """An address of a device: line ``index`` of its port's table."""

    index: int
    type: str  # of GID_TYPES
    address: bytes  # 16
    prefix: int | None = None  # bits of the IPv4 subnet
    interface: str = ""

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return ipaddress.IPv4Address(self.address[12:]) if self.address.startswith(_IPV4_MAPPED) else None

    @property
    def form(self) -> Form:
        if not any(self.address):
            return Form.NONE
        if self.type in _OWN_FORMS:
            return _OWN_FORMS[self.type]
        if self.ipv4 is not None:
            return Form.IPV4 if int(self.ipv4) else Form.NONE
        ipv6 = ipaddress.IPv6Address(self.address)
        if ipv6 in _LINK_LOCAL:
            return Form.LINK_LOCAL
        # Without a type it may be a UUID, of which one in eight begins like a global address. Nothing is lost: an
        # interface with a global address has a link-local one, too.
        is_global = self.type != "unknown" and any(ipv6 in network for network in _GLOBAL)
        return Form.GLOBAL if is_global else Form.NONE

    @property
    def is_link_local(self) -> bool:
        """169.254.0.0/16 or fe80::/64."""
        return self.form is Form.LINK_LOCAL or (self.ipv4 is not None and self.ipv4.is_link_local)

    def __str__(self) -> str:
        if self.ipv4 is None:
            return str(ipaddress.IPv6Address(self.address))
        return f"{self.ipv4}" if self.prefix is None else f"{self.ipv4}/{self.prefix}"


@dataclass(frozen=True)
class Device:
    """A device; everything behind ``error`` is known only where that is empty, and is of its first port."""

    provider: str
    name: str
    error: str = ""  # the call that failed, and how
    state: str = ""  # of STATES
    gids: tuple[Gid, ...] = ()
    firmware: str = ""
    guid: str = ""
    transport: str = ""
    ports: int = 0
    link_layer: str = ""
    speed: float | None = None  # Gbit/s
    active_mtu: int | None = None
    max_mtu: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    probe: Probe | None = None  # limits that were tried, which count where those that the device says differ
    peer_probe: PeerProbe | None = None  # likewise how messages arrive

    @property
    def is_active(self) -> bool:
        return not self.error and self.state == ACTIVE

    @property
    def is_thunderbolt(self) -> bool:
        """Whether it is Apple's, or plays one. Other makers' devices under macOS have none of the rules of those."""
        return THUNDERBOLT in (self.link_layer, self.transport)

    @property
    def needs_peer_probe(self) -> bool:
        """Whether only a message shows how long messages may be. The software provider keeps to what it says."""
        return self.is_thunderbolt and self.provider != "soft"

    def found_in_words(self) -> dict[str, str]:
        """The results of probes, for people; empty where there was none."""
        words = self.probe.in_words() if self.probe else {}
        if self.peer_probe:
            return words | self.peer_probe.in_words()
        missing = {"messages": "not found yet: start a job of two hosts"}
        return words | missing if words and self.needs_peer_probe else words

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The network interfaces that it shares its port with."""
        return tuple(dict.fromkeys(gid.interface for gid in self.gids if gid.interface))

    def to_json(self) -> dict[str, Any]:
        gids = [
            {
                "index": gid.index,
                "type": gid.type,
                "form": gid.form,
                "gid": f"::ffff:{gid.ipv4}" if gid.ipv4 else str(ipaddress.IPv6Address(gid.address)),
                "ipv4": gid.ipv4 and str(gid.ipv4),
                "prefix": gid.prefix,
                "interface": gid.interface,
            }
            for gid in self.gids
        ]
        results = {"probe": self.probe and vars(self.probe), "peer_probe": self.peer_probe and vars(self.peer_probe)}
        return vars(self) | {"gids": gids, "limits": dict(self.limits)} | results

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Device":
        gids = tuple(
            Gid(gid["index"], gid["type"], ipaddress.IPv6Address(gid["gid"]).packed, gid["prefix"], gid["interface"])
            for gid in fields["gids"]
        )
        probe = fields["probe"] and build(Probe, fields["probe"])
        peer_probe = fields["peer_probe"] and build(PeerProbe, fields["peer_probe"])
        return cls(**dict(fields) | {"gids": gids, "probe": probe, "peer_probe": peer_probe})


def list_devices(
    provider: str, soft_profile: str = "ideal", seconds: float = 10.0, probe: bool = False
) -> list[Device]:
    """All devices of a provider, each opened, queried and closed.

    Args:
        probe: probe each active device, too: that takes all its queue pairs for a moment.

    Raises:
        ResourceError: there is no such provider here, or it cannot list its devices.
        Timeout: a call of the provider's library has not returned. The thread that it is in cannot be ended.
    """
    from mlxdist._native import ffi, lib  # here: unpacking devices needs no engine

    array = ffi.new("mlxdist_device[]", _MAX_DEVICES)
    found: list[int] = []
    failure: list[str] = []

    def query() -> None:
        found.append(lib.mlxdist_devices(provider.encode(), soft_profile.encode(), probe, array, _MAX_DEVICES))
        failure.append(ffi.string(lib.mlxdist_last_error()).decode(errors="replace"))  # a thread has its own

    # In a thread of its own: Apple's driver does not return for ports that are down.
    thread = InternalThread(target=query, name="mlxdist-devices", daemon=True)
    thread.start()
    thread.join(seconds)
    if not failure:
        text = ffi.new("char[]", 128)
        lib.mlxdist_devices_call(text, len(text))
        raise Timeout(
            f"{ffi.string(text).decode(errors='replace')} of provider {provider} has not returned for {seconds:g} s; "
            "Apple's driver does that for ports that are down: plug in their cables, or restart the machine"
        )
    if found[0] < 0:
        raise ResourceError(failure[0])
    devices = [_device(provider, array[i], ffi) for i in range(min(found[0], _MAX_DEVICES))]
    if not probe:
        return devices
    return [d if d.error else replace(d, probe=_probe(array[i].probe, ffi)) for i, d in enumerate(devices)]


def port_remedy() -> str:
    """The remedy for a port of a Mac in bridge0 or without an IPv4 address, in the words of the engine's errors."""
    from mlxdist._native import ffi, lib  # here: unpacking devices needs no engine

    return ffi.string(lib.mlxdist_port_remedy()).decode()


def speed_of(width: int, speed: int) -> float | None:
    """Gbit/s of a link; None where the device does not say, or not in values of the standard."""
    if width not in _LANES or speed not in _LANE_SPEEDS:
        return None
    return _LANES[width] * _LANE_SPEEDS[speed]


def _device(provider: str, native: Any, ffi: Any) -> Device:
    name, error = _text(native.name, ffi), _text(native.error, ffi)
    if error:
        return Device(provider, name, error, transport=TRANSPORTS.get(native.transport, ""))
    return Device(
        provider,
        name,
        state=STATES[native.state] if 0 <= native.state < len(STATES) else str(native.state),
        gids=tuple(_gid(native.gids[i], ffi) for i in range(native.gid_count)),
        firmware=_text(native.firmware, ffi),
        guid=bytes(native.guid).hex(":", 2),
        transport=TRANSPORTS.get(native.transport, ""),
        ports=native.ports,
        link_layer=LINK_LAYERS.get(native.link_layer, "unspecified"),
        speed=None if provider == "soft" else speed_of(native.width, native.speed),
        active_mtu=native.active_mtu or None,
        max_mtu=native.max_mtu or None,
        limits={limit: getattr(native, limit) for limit in LIMITS},
    )


def _probe(native: Any, ffi: Any) -> Probe:
    """The result of a probe. C has numbers where Python has flags."""
    if error := _text(native.error, ffi):
        return Probe(error)
    values: dict[str, Any] = {one.name: getattr(native, one.name) for one in fields(Probe) if one.name != "error"}
    return Probe(**values | {one.name: bool(values[one.name]) for one in fields(Probe) if one.type is bool})


def _gid(native: Any, ffi: Any) -> Gid:
    prefix = native.prefix if native.prefix >= 0 else None
    return Gid(native.index, GID_TYPES[native.type], bytes(native.bytes), prefix, _text(native.interface, ffi))


def _text(field: Any, ffi: Any) -> str:
    return ffi.string(field).decode(errors="replace")
