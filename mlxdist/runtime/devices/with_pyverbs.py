"""Lists devices with pyverbs, the Python bindings of rdma-core, for `mlxdist devices`.

Prefixes of subnets are not known here. Values for which pyverbs has no stable call are read from sysfs.
"""

import ipaddress
from pathlib import Path
from typing import Any

from pyverbs.device import Context, get_device_list
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError

from mlxdist.base.errors import ResourceError

from .device import LIMITS, LINK_LAYERS, STATES, TRANSPORTS, Device, Gid, speed_of

__all__ = ["list_devices"]

_TYPES = {"IB/RoCE v1": "RoCE v1", "RoCE v2": "RoCE v2"}  # of a port that is Ethernet


def list_devices() -> list[Device]:
    """All devices of libibverbs, each opened, queried and closed. Raises ResourceError: the kernel has no RDMA."""
    try:
        found = get_device_list()
    except PyverbsRDMAError as error:
        raise ResourceError(f"pyverbs cannot list the devices: {error}") from None
    return [_query(device.name.decode(), TRANSPORTS.get(device.transport_type, "")) for device in found]


def _query(name: str, transport: str) -> Device:
    try:
        with Context(name=name) as context:
            attributes, port = context.query_device(), context.query_port(1)
            gids = _gids(context, name, port.gid_tbl_len, port.link_layer)
    except PyverbsError as error:
        return Device("ibverbs", name, str(error), transport=transport)
    limits = {limit: getattr(attributes, limit) for limit in LIMITS if limit != "max_message"}
    return Device(
        "ibverbs",
        name,
        state=STATES[port.state],
        gids=gids,
        firmware=attributes.fw_version.rstrip("\0"),
        guid=attributes.node_guid.to_bytes(8, "little").hex(":", 2),  # it keeps the bytes as they are in memory
        transport=transport,
        ports=attributes.phys_port_cnt,
        link_layer=LINK_LAYERS.get(port.link_layer, "unspecified"),
        speed=speed_of(port.active_width, port.active_speed),
        active_mtu=128 << port.active_mtu,
        max_mtu=128 << port.max_mtu,
        limits=limits | {"max_message": port.max_msg_sz},
    )


def _gids(context: Any, name: str, entries: int, link_layer: int) -> tuple[Gid, ...]:
    directory = Path("/sys/class/infiniband", name, "ports/1/gid_attrs")
    gids = []
    for index in range(entries):
        address = ipaddress.IPv6Address(context.query_gid(1, index).gid).packed
        if any(address):
            type_ = _TYPES.get(_read(directory / "types" / str(index)), "unknown")
            type_ = "IB" if LINK_LAYERS.get(link_layer) == "InfiniBand" else type_
            gids.append(Gid(index, type_, address, None, _read(directory / "ndevs" / str(index))))
    return tuple(gids)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # EINVAL: a line of the table that has none
        return ""
