"""Every host reaches every other one, both ways, over the right interface; and macOS lets Python do so."""

from __future__ import annotations

import collections

from mlxdist.base.local_network import REMEDY

from ..cluster import Cluster, Try
from ..findings import Finding, fail, note, ok, skip, warn, way

__all__ = ["check_interfaces", "check_ports", "check_privacy"]

_FIREWALL = (
    "allow {source} in the firewall of {target}: `sudo ufw allow from ADDRESS` (or `sudo nft list ruleset`); "
    "on a Mac System Settings > Network > Firewall > Options"
)
_MEANING = {
    "ECONNREFUSED": ("it is reached, but a firewall refuses, or it is another machine's address", _FIREWALL),
    "ETIMEDOUT": ("a firewall drops it, or nobody has the address", _FIREWALL),
    "EHOSTUNREACH": ("it is not in that network, or a firewall says so", "on {source}: ping {address}"),
    "ENETUNREACH": ("nothing leads to its network", 'on {source}: netstat -rn; correct "ips" of the hostfile'),
    "WRONG": ("another machine has this address, too", 'on {source}: arp -an; correct its "ips" in the hostfile'),
}
_PRIVACY = f"on {{source}}: {REMEDY}, then start the job again"
_SLOW_SHARE = 0.5


def check_ports(cluster: Cluster) -> list[Finding]:
    if len(cluster.hosts) < 2:
        return [skip((), "there is one host")]
    found, fine = [], []
    for tried in cluster.tries:
        if not tried.error:
            fine.append(tried)
            continue
        meaning, remedy = _MEANING.get(tried.error, ("", _FIREWALL))
        if tried.nc:
            meaning, remedy = "/usr/bin/nc reaches it: see the check privacy", _PRIVACY
        what = ": ".join(filter(None, (tried.address, tried.text, meaning)))
        remedy = remedy.format(source=tried.source, target=tried.target, address=tried.address)
        # A job uses the first address.
        found.append(way((fail if tried.first else warn)((tried.source, tried.target), what, remedy)))
    if fine and not found:
        pairs = {frozenset((tried.source, tried.target)) for tried in fine}
        found.append(ok(_hosts(cluster, fine), f"{len(pairs)} pair{'s' * (len(pairs) > 1)} connected, both ways"))
    return found or [skip((), "fewer than two hosts could be asked")]


def check_interfaces(cluster: Cluster) -> list[Finding]:
    used = [tried for tried in cluster.tries if tried.first and tried.interface]
    if not used:
        why = "there is one host" if len(cluster.hosts) < 2 else "the systems do not say which interface they take"
        return [skip((), why)]
    found = []
    fastest = max((tried.speed for tried in used if tried.speed), default=0)
    for tried in used:
        what = f"{tried.address} is reached by {_describe(tried)}"
        pair = tried.source, tried.target
        if tried.kind == "wifi":
            remedy = f'give {tried.target} the address of its cable in "ips" of the hostfile'
            found.append(way(warn(pair, what, remedy)))
        elif tried.kind == "tunnel":
            remedy = f'end the VPN, or give {tried.target} another address in "ips"'
            found.append(way(warn(pair, what, remedy)))
        elif tried.speed and tried.speed < _SLOW_SHARE * fastest:
            remedy = f'give {tried.target} its address in the faster network ("ips"), or change the cable'
            found.append(way(warn(pair, f"{what}, others by {_mbit(fastest)}", remedy)))
        elif tried.kind == "bridge":
            remedy = "for RDMA give each port an address of its own: mlxdist config --auto-setup"
            found.append(way(note(pair, what, remedy)))
    if not found:
        ways = collections.Counter(_describe(tried) for tried in used)
        found.append(ok(_hosts(cluster, used), "; ".join(ways)))
    return found


def check_privacy(cluster: Cluster) -> list[Finding]:
    """macOS asks whether a program may use the local network; until then it gives it errno 65, and Apple's none."""
    macs = [name for name, facts in cluster.each("facts") if facts["system"] == "Darwin"]
    if not macs:
        return [skip((), "no host runs macOS")]
    if len(cluster.hosts) < 2:
        return [skip((), "there is one host")]
    found = []
    for name in macs:
        refused = [tried for tried in cluster.tries if tried.source == name and tried.error and tried.nc]
        if refused:
            what = f"{refused[0].address} is reached by /usr/bin/nc, and not by Python ({refused[0].text})"
            found.append(fail(name, what, _PRIVACY.format(source=name)))
        elif any(tried.source == name for tried in cluster.tries):
            found.append(ok(name, "Python may use the local network"))
    return found


def _hosts(cluster: Cluster, tries: list[Try]) -> list[str]:
    there = {name for tried in tries for name in (tried.source, tried.target)}
    return [name for name in cluster.names if name in there]


def _describe(tried: Try) -> str:
    kind = {"wifi": "Wi-Fi"}.get(tried.kind, tried.kind)
    extras = ", ".join(filter(None, (kind, _mbit(tried.speed) if tried.speed else "")))
    return f"{tried.interface} ({extras})" if extras else tried.interface


def _mbit(speed: int) -> str:
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"
