"""What a rank tells the others of where it is: its host, and the devices by which it can be reached."""

import ipaddress
import json
from dataclasses import dataclass
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError

from .device import GID_TYPES, REAL_PROVIDER, Device, Gid, list_devices
from .listing import list_apart, may_have_devices

__all__ = ["Place"]

_MAX_BYTES = 64 * 1024
_MAX_DEVICES = 64
_MAX_TEXT = 255
_MAX_INDEX = 255  # sgid_index of an address handle is a byte
_NAME_BYTES = 63
_PROVIDERS = ("soft", "ibverbs", "librdma")
_FIELDS = {"identity", "host", "address", "missing", "devices"}
_DEVICE_FIELDS = {"provider", "name", "error", "state", "gids", "max_qp"}


@dataclass(frozen=True)
class Place:
    """Where a rank is. Ranks with the same ``identity`` share a kernel.

    ``address``: the IP address by which it reaches the rendezvous, "" where that is not known. ``missing``: why it has
    no RDMA device, "" where it has some, or was not to look.
    """

    identity: bytes
    host: str
    address: str = ""
    devices: tuple[Device, ...] = ()
    missing: str = ""

    @classmethod
    def here(
        cls, identity: bytes, host: str, address: str = "", provider: str = "auto", soft_profile: str = "ideal"
    ) -> "Place":
        """This rank's. Devices are listed as far as ``provider`` may need them."""
        devices: list[Device] = []
        missing = ""
        if provider in ("auto", "soft"):
            devices += list_devices("soft", soft_profile)
        if provider != "soft":
            real = REAL_PROVIDER if provider == "auto" else provider
            if provider == "auto" and not may_have_devices():
                missing = "it has no RDMA device"
            else:
                listing = list_apart(real)
                devices += listing.devices
                missing = listing.error
                if not (listing.devices or missing):
                    missing = f"{real} lists no device: `mlxdist devices --provider {real}` says why"
        return cls(identity, host, address, tuple(devices), missing[:_MAX_TEXT])

    def of_provider(self, provider: str) -> tuple[Device, ...]:
        return tuple(sorted((d for d in self.devices if d.provider == provider), key=lambda d: (len(d.name), d.name)))

    def pack(self) -> bytes:
        """As bytes, for :meth:`unpack` on another rank.

        Raises:
            ResourceError: its devices have too many addresses.
        """
        fields = {
            "identity": self.identity.hex(),
            "host": self.host,
            "address": self.address,
            "missing": self.missing,
            "devices": [_pack_device(device) for device in self.devices],
        }
        packed = json.dumps(fields, separators=(",", ":")).encode()
        if len(packed) > _MAX_BYTES or len(self.devices) > _MAX_DEVICES:
            raise ResourceError(
                f"the {len(self.devices)} devices of host {self.host} have too many addresses: {len(packed)} bytes "
                f"where {_MAX_BYTES} are allowed, of at most {_MAX_DEVICES} devices; unload those that are not in use"
            )
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> "Place":
        """What :meth:`pack` was given.

        Raises:
            InvalidArgument: these bytes are not from :meth:`pack` of this version.
        """
        try:
            return _unpack(data)
        except _Malformed as error:
            raise InvalidArgument(
                f"what a rank said of its devices is malformed: {error}; install the same mlxdist on all hosts"
            ) from None


def _pack_device(device: Device) -> dict[str, Any]:
    """Without the addresses that nobody can use: only by those of an active port others reach it."""
    gids = [gid for gid in device.gids if device.is_active and gid.index <= _MAX_INDEX]
    return {
        "provider": device.provider,
        "name": device.name,
        "error": device.error[:_MAX_TEXT],
        "state": device.state,
        "max_qp": max(0, device.limits.get("max_qp", 0)),
        "gids": [[gid.index, gid.type, gid.address.hex(), gid.prefix] for gid in gids],
    }


class _Malformed(ValueError):
    """What is wrong, without saying with what."""


def _unpack(data: bytes) -> Place:
    if len(data) > _MAX_BYTES:
        raise _Malformed(f"it has {len(data)} bytes, and at most {_MAX_BYTES} are allowed")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise _Malformed("it is not JSON") from None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise _Malformed(f"it must be an object with the fields {', '.join(sorted(_FIELDS))}")
    devices = fields["devices"]
    if not isinstance(devices, list) or len(devices) > _MAX_DEVICES:
        raise _Malformed(f"devices must be a list of at most {_MAX_DEVICES}")
    address = _text(fields, "address", _MAX_TEXT)
    if address:
        _ip_address(address)
    return Place(
        _hex(fields["identity"], "identity", _MAX_TEXT),
        _text(fields, "host", _MAX_TEXT),
        address,
        tuple(_unpack_device(device) for device in devices),
        _text(fields, "missing", _MAX_TEXT),
    )


def _unpack_device(fields: Any) -> Device:
    if not isinstance(fields, dict) or set(fields) != _DEVICE_FIELDS:
        raise _Malformed(f"a device must have the fields {', '.join(sorted(_DEVICE_FIELDS))}")
    if fields["provider"] not in _PROVIDERS:
        raise _Malformed(f"a device is of provider {fields['provider']!r:.50}, not one of {', '.join(_PROVIDERS)}")
    name = _text(fields, "name", _NAME_BYTES)
    gids = fields["gids"]
    if not isinstance(gids, list) or len(gids) > _MAX_INDEX + 1:
        raise _Malformed(f"device {name} must have a list of at most {_MAX_INDEX + 1} addresses")
    error, state = _text(fields, "error", _MAX_TEXT), _text(fields, "state", _MAX_TEXT)
    max_qp = fields["max_qp"]
    if type(max_qp) is not int or not 0 <= max_qp < 2**31:
        raise _Malformed(f"device {name} has {max_qp!r:.50} queue pairs, not a number from 0 to {2**31 - 1}")
    gids = tuple(_unpack_gid(gid, name) for gid in gids)
    return Device(fields["provider"], name, error, state, gids, limits={"max_qp": max_qp} if max_qp else {})


def _unpack_gid(fields: Any, device: str) -> Gid:
    if not isinstance(fields, list) or len(fields) != 4:
        raise _Malformed(f"an address of device {device} must be a list of 4")
    index, type_, address, prefix = fields
    if type(index) is not int or not 0 <= index <= _MAX_INDEX:
        raise _Malformed(f"an address of device {device} has index {index!r:.50}, not one from 0 to {_MAX_INDEX}")
    if type_ not in GID_TYPES:
        raise _Malformed(
            f"address {index} of device {device} has type {type_!r:.50}, not one of {', '.join(GID_TYPES)}"
        )
    if prefix is not None and (type(prefix) is not int or not 0 <= prefix <= 32):
        raise _Malformed(f"address {index} of device {device} has a prefix of {prefix!r:.50} bits, not of 0 to 32")
    raw = _hex(address, f"address {index} of device {device}", 16)
    if len(raw) != 16:
        raise _Malformed(f"address {index} of device {device} has {len(raw)} bytes, not 16")
    return Gid(index, type_, raw, prefix)


def _text(fields: dict[str, Any], name: str, most: int) -> str:
    text = fields[name]
    if not isinstance(text, str) or len(text) > most or not _is_plain(text):
        raise _Malformed(f"{name} must be a text of at most {most} characters that can be printed")
    return text


def _is_plain(text: str) -> bool:
    return all(character.isprintable() or character in "\n\t" for character in text)


def _hex(text: Any, name: str, most: int) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * most or len(text) % 2 or not set(text) <= set("0123456789abcdef"):
        raise _Malformed(f"{name} must be at most {2 * most} hex digits")
    return bytes.fromhex(text)


def _ip_address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise _Malformed(f"{text!r:.50} is not an IP address") from None
