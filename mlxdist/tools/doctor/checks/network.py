"""Every host reaches every other one, both ways, over the right interface; macOS lets Python do so."""

import collections

from mlxdist.base.local_network import REMEDY

from ..cluster import Cluster, ConnectAttempt
from ..findings import Finding, fail, note, ok, skip, warn, way

__all__ = ["check_interfaces", "check_local_network", "check_ports"]

_FIREWALL = (
    "allow {source} in the firewall of {target}: `sudo ufw allow from ADDRESS` (or `sudo nft list ruleset`); "
    "on a Mac System Settings > Network > Firewall > Options"
)
_MEANING = {
    "ECONNREFUSED": ("it is reached, but a firewall rejects it, or it is another machine's address", _FIREWALL),
    "ETIMEDOUT": ("a firewall drops it, or no host has the address", _FIREWALL),
    "EHOSTUNREACH": ("it is not in that network, or a firewall says so", "on {source}: ping {address}"),
    "ENETUNREACH": ("nothing leads to its network", 'on {source}: netstat -rn; correct "ips" of the hostfile'),
    "WRONG": ("another machine has this address, too", 'on {source}: arp -an; correct its "ips" in the hostfile'),
}
_LOCAL_NETWORK = f"on {{source}}: {REMEDY}, then start the job again"
_SLOW_SHARE = 0.5


def check_ports(cluster: Cluster) -> list[Finding]:
    if len(cluster.hosts) < 2:
        return [skip((), "there is one host")]
    found, fine = [], []
    for attempt in cluster.attempts:
        if not attempt.error:
            fine.append(attempt)
            continue
        meaning, remedy = _MEANING.get(attempt.error, ("", _FIREWALL))
        if attempt.nc:
            meaning, remedy = "/usr/bin/nc reaches it: see the check local-network", _LOCAL_NETWORK
        what = ": ".join(filter(None, (attempt.address, attempt.text, meaning)))
        remedy = remedy.format(source=attempt.source, target=attempt.target, address=attempt.address)
        # A job uses the first address.
        found.append(way((fail if attempt.first else warn)((attempt.source, attempt.target), what, remedy)))
    if fine and not found:
        pairs = {frozenset((attempt.source, attempt.target)) for attempt in fine}
        found.append(ok(_hosts(cluster, fine), f"{len(pairs)} pair{'s' * (len(pairs) > 1)} connected, both ways"))
    return found or [skip((), "fewer than two hosts responded")]


def check_interfaces(cluster: Cluster) -> list[Finding]:
    used = [attempt for attempt in cluster.attempts if attempt.first and attempt.interface]
    if not used:
        why = "there is one host" if len(cluster.hosts) < 2 else "the systems do not say which interface they take"
        return [skip((), why)]
    found = []
    fastest = max((attempt.speed for attempt in used if attempt.speed), default=0)
    for attempt in used:
        what = f"{attempt.address} is reached by {_describe(attempt)}"
        pair = attempt.source, attempt.target
        if attempt.kind == "wifi":
            remedy = f'give {attempt.target} the address of its cable in "ips" of the hostfile'
            found.append(way(warn(pair, what, remedy)))
        elif attempt.kind == "tunnel":
            remedy = f'end the VPN, or give {attempt.target} another address in "ips"'
            found.append(way(warn(pair, what, remedy)))
        elif attempt.speed and attempt.speed < _SLOW_SHARE * fastest:
            remedy = f'give {attempt.target} its address in the faster network ("ips"), or change the cable'
            found.append(way(warn(pair, f"{what}, others by {_mbit(fastest)}", remedy)))
        elif attempt.kind == "bridge":
            remedy = "for RDMA give each port an address of its own: mlxdist config --auto-setup"
            found.append(way(note(pair, what, remedy)))
    if not found:
        ways = collections.Counter(_describe(attempt) for attempt in used)
        found.append(ok(_hosts(cluster, used), "; ".join(ways)))
    return found


def check_local_network(cluster: Cluster) -> list[Finding]:
    """Until the user allows a program to use the local network, macOS gives it errno 65; Apple's own are exempt."""
    macs = [name for name, facts in cluster.each("facts") if facts["system"] == "Darwin"]
    if not macs:
        return [skip((), "no host runs macOS")]
    if len(cluster.hosts) < 2:
        return [skip((), "there is one host")]
    found = []
    for name in macs:
        refused = [attempt for attempt in cluster.attempts if attempt.source == name and attempt.error and attempt.nc]
        if refused:
            what = f"{refused[0].address} is reached by /usr/bin/nc, and not by Python ({refused[0].text})"
            found.append(fail(name, what, _LOCAL_NETWORK.format(source=name)))
        elif any(attempt.source == name for attempt in cluster.attempts):
            found.append(ok(name, "Python may use the local network"))
    return found


def _hosts(cluster: Cluster, attempts: list[ConnectAttempt]) -> list[str]:
    there = {name for attempt in attempts for name in (attempt.source, attempt.target)}
    return [name for name in cluster.names if name in there]


def _describe(attempt: ConnectAttempt) -> str:
    kind = {"wifi": "Wi-Fi"}.get(attempt.kind, attempt.kind)
    extras = ", ".join(filter(None, (kind, _mbit(attempt.speed) if attempt.speed else "")))
    return f"{attempt.interface} ({extras})" if extras else attempt.interface


def _mbit(speed: int) -> str:
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"
