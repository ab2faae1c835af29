"""Checks that every host reaches every other one over the right interface, and that macOS lets Python do so."""

from collections.abc import Iterator

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
_BETTER = {  # than a kind of interface
    "wifi": 'give {target} the address of its cable in "ips" of the hostfile',
    "tunnel": 'end the VPN, or give {target} another address in "ips"',
}
_LOCAL_NETWORK = f"on {{source}}: {REMEDY}, then start the job again"
_SLOW_SHARE = 0.5


def check_ports(cluster: Cluster) -> Iterator[Finding]:
    fine = [attempt for attempt in cluster.attempts if not attempt.error]
    failed = [attempt for attempt in cluster.attempts if attempt.error]
    for attempt in failed:
        meaning, remedy = _MEANING.get(attempt.error, ("", _FIREWALL))
        if attempt.nc:
            meaning, remedy = "/usr/bin/nc reaches it: see the check local-network", _LOCAL_NETWORK
        what = ": ".join(filter(None, (attempt.address, attempt.text, meaning)))
        remedy = remedy.format(source=attempt.source, target=attempt.target, address=attempt.address)
        # A job uses the first address.
        yield way((fail if attempt.first else warn)((attempt.source, attempt.target), what, remedy))
    if fine and not failed:
        pairs = {frozenset((attempt.source, attempt.target)) for attempt in fine}
        yield ok(_hosts(cluster, fine), f"{len(pairs)} pair{'s' * (len(pairs) > 1)} connected, both ways")
    if not cluster.attempts:
        yield skip((), "there is one host" if len(cluster.hosts) < 2 else "fewer than two hosts responded")


def check_interfaces(cluster: Cluster) -> Iterator[Finding]:
    used = [attempt for attempt in cluster.attempts if attempt.first and attempt.interface]
    if not used:
        why = "there is one host" if len(cluster.hosts) < 2 else "the systems do not say which interface they take"
        yield skip((), why)
        return
    fastest = max((attempt.speed for attempt in used if attempt.speed), default=0)
    good = []
    for attempt in used:
        what = f"{attempt.address} is reached by {_describe(attempt)}"
        pair = attempt.source, attempt.target
        if attempt.kind in _BETTER:
            yield way(warn(pair, what, _BETTER[attempt.kind].format(target=attempt.target)))
        elif attempt.speed and attempt.speed < _SLOW_SHARE * fastest:
            remedy = f'give {attempt.target} its address in the faster network ("ips"), or change the cable'
            yield way(warn(pair, f"{what}, others by {_mbit(fastest)}", remedy))
        elif attempt.kind == "bridge":
            yield way(note(pair, what, "for RDMA give each port an address of its own: mlxdist config --auto-setup"))
        else:
            good.append(attempt)
    if good == used:
        yield ok(_hosts(cluster, used), "; ".join(dict.fromkeys(map(_describe, used))))


def check_local_network(cluster: Cluster) -> Iterator[Finding]:
    """Fails where Apple's nc connects and Python does not: macOS gives errno 65 to a program without permission."""
    macs = [name for name, facts in cluster.each("facts") if facts["system"] == "Darwin"]
    if not macs:
        yield skip((), "no host runs macOS")
    elif len(cluster.hosts) < 2:
        yield skip((), "there is one host")
    for name in macs:
        refused = [attempt for attempt in cluster.attempts if attempt.source == name and attempt.error and attempt.nc]
        if refused:
            what = f"{refused[0].address} is reached by /usr/bin/nc, and not by Python ({refused[0].text})"
            yield fail(name, what, _LOCAL_NETWORK.format(source=name))
        elif any(attempt.source == name for attempt in cluster.attempts):
            yield ok(name, "Python may use the local network")


def _hosts(cluster: Cluster, attempts: list[ConnectAttempt]) -> list[str]:
    there = {name for attempt in attempts for name in (attempt.source, attempt.target)}
    return [name for name in cluster.names if name in there]


def _describe(attempt: ConnectAttempt) -> str:
    kind = {"wifi": "Wi-Fi"}.get(attempt.kind, attempt.kind)
    extras = ", ".join(filter(None, (kind, _mbit(attempt.speed) if attempt.speed else "")))
    return f"{attempt.interface} ({extras})" if extras else attempt.interface


def _mbit(speed: int) -> str:
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"
