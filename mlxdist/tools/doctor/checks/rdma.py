"""Checks RDMA where the hostfile needs it: devices, ports, addresses. It finds the same causes as `mlxdist devices`."""

import collections
import ipaddress
import itertools
from collections.abc import Iterator

from mlxdist.base.environment import MAX_LINKS
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.runtime.devices.diagnosis import Verdict as Cause
from mlxdist.runtime.devices.queue_pairs import OF_A_LINK, advice, in_words

from ..cluster import Cluster
from ..findings import Finding, fail, note, ok, skip, warn, way

__all__ = ["check_gids", "check_rdma", "wants_rdma"]

_OF_GIDS = {Cause.NO_IPV4, Cause.BRIDGED}
_SLOWER = {Cause.SLOW_CABLE, Cause.MEMLOCK}


def wants_rdma(cluster: Cluster) -> bool:
    """Whether the user requires RDMA, by naming devices or a provider, or by a backend that needs it."""
    provider = cluster.options.variables.get("MLXDIST_PROVIDER", "auto")
    named = any(devices for host in cluster.hosts for devices in host.rdma)
    return named or provider in ("ibverbs", "librdma") or cluster.options.backend in ("jaccl", "jaccl-ring")


def check_rdma(cluster: Cluster) -> Iterator[Finding]:
    for host, rdma in cluster.each_host("rdma"):
        yield from _of_host(host, rdma, wants_rdma(cluster))
        yield from _without_queue_pairs(cluster, host, rdma)


def _without_queue_pairs(cluster: Cluster, host: Host, rdma: dict) -> Iterator[Finding]:
    """Finds devices with too few queue pairs for the hostfile's cables. Ranks reject such a job before they connect."""
    limits = {device["name"]: device["queue_pairs"] for device in rdma["devices"] if device["queue_pairs"]}
    pairs: collections.Counter[str] = collections.Counter()
    for other, devices in zip(cluster.hosts, host.rdma):
        pairs.update(dict.fromkeys(devices[:MAX_LINKS], host.slots * other.slots))
    for device, count in pairs.items():
        if device in limits and OF_A_LINK * count > limits[device]:
            yield fail(host.name, in_words(device, count, limits[device]), advice(count, limits[device]))


def _of_host(host: Host, rdma: dict, wanted: bool) -> Iterator[Finding]:
    named = {device for devices in host.rdma for device in devices}
    there = {device["name"]: device for device in rdma["devices"]}
    missing = sorted(named - set(there))
    for device in missing:
        what = f"the hostfile names {device}, and it is not there; there are: {', '.join(there) or 'none'}"
        yield fail(host.name, what, 'mlxdist devices (on that host), and correct the hostfile\'s "rdma"')
    problems = [f for f in rdma["findings"] if f["verdict"] not in {Cause.OK, *_OF_GIDS}]
    problems = [f for f in problems if not named or not f["subject"] or f["subject"] in named]
    for problem in problems:
        cause, subject = problem["verdict"], problem["subject"]
        remedy = problem["remedy"] or "mlxdist devices (on that host) says more"
        # A problem of one device is harmless where the hostfile names none and another device is ready.
        hurts = wanted and (not subject or subject in named or not any(d["active"] for d in there.values()))
        make = note if not hurts else warn if cause in _SLOWER else fail
        yield make(host.name, problem["what"], remedy)
    active = sorted(name for name, device in there.items() if device["active"] and (not named or name in named))
    if missing or problems:
        return
    if active:
        yield ok(host.name, f"{', '.join(active)} active")
    else:
        yield note(host.name, "no RDMA device; ranks reach this host by TCP", "mlxdist devices (on that host)")


def check_gids(cluster: Cluster) -> Iterator[Finding]:
    """Checks that active ports have IPv4 addresses, and that both ends of a cable are in one network."""
    networks: dict[tuple[str, str], list[str]] = {}
    for host, rdma in cluster.each_host("rdma"):
        name = host.name
        named = {device for devices in host.rdma for device in devices}
        active = [d for d in rdma["devices"] if d["active"] and (not named or d["name"] in named)]
        networks |= {(name, device["name"]): device["networks"] for device in active}
        wrong = [f for f in rdma["findings"] if f["verdict"] in _OF_GIDS and (not named or f["subject"] in named)]
        for finding in wrong:
            yield (fail if named else note)(name, finding["what"], finding["remedy"])
        if not active:
            yield skip(name, "no active port")
        elif not wrong:
            yield ok(name, "every active port has an IPv4 address")
    yield from _apart(cluster, networks)


def _apart(cluster: Cluster, networks: dict[tuple[str, str], list[str]]) -> Iterator[Finding]:
    for (i, host), (j, peer) in itertools.combinations(enumerate(cluster.hosts), 2):
        cables = zip(host.rdma[j], peer.rdma[i]) if host.rdma and peer.rdma else ()
        for here, there in cables:
            near, far = networks.get((host.name, here), []), networks.get((peer.name, there), [])
            if near and far and not any(_share(a, b) for a in near for b in far):
                what = f"{here} ({', '.join(near)}) and {there} ({', '.join(far)}) are in different networks"
                remedy = "give both ends of the cable addresses of one network: mlxdist config --auto-setup"
                yield way(warn((host.name, peer.name), what, remedy))


def _share(a: str, b: str) -> bool:
    try:
        one, other = ipaddress.ip_interface(a), ipaddress.ip_interface(b)
    except ValueError:
        return True  # not known
    return "/" not in a or "/" not in b or one.network.overlaps(other.network)
