"""The RDMA devices of this host, and what is wrong with them. Runs on that host; the verdicts are those of
`mlxdist devices`."""

from __future__ import annotations

from typing import Any

from mlxdist.cluster.facts.rdma import read_facts
from mlxdist.runtime.devices.device import REAL_PROVIDER
from mlxdist.runtime.devices.diagnosis import diagnose_device, diagnose_host
from mlxdist.runtime.devices.listing import list_apart
from mlxdist.runtime.devices.queue_pairs import usable

__all__ = ["devices"]


def devices(seconds: float = 10.0) -> dict[str, Any]:
    listing = list_apart(REAL_PROVIDER, seconds=seconds)
    facts = read_facts()
    found = [*diagnose_host(facts, listing.devices, listing.error)]
    found += [finding for device in listing.devices for finding in diagnose_device(device, facts)]
    return {
        "devices": [
            device.to_json()
            | {
                "active": device.is_active,
                "queue_pairs": usable(device.provider, device.limits.get("max_qp", 0)),
                "interfaces": list(device.interfaces),
                "networks": sorted({_network(gid) for gid in device.gids if gid.ipv4}),
            }
            for device in listing.devices
        ],
        "host": {name: _plain(value) for name, value in vars(facts).items()},
        "findings": [
            {"verdict": str(f.verdict), "subject": f.subject, "what": f.what, "remedy": f.remedy} for f in found
        ],
    }


def _network(gid: Any) -> str:
    """Address and prefix; the prefix is missing where the system does not say it."""
    return f"{gid}/{gid.prefix}" if gid.prefix is not None else str(gid)


def _plain(value: Any) -> Any:
    """A fact as JSON can say it."""
    if isinstance(value, frozenset):
        return sorted(value)
    return [vars(item) if hasattr(item, "__dict__") else item for item in value] if isinstance(value, tuple) else value
