"""The bandwidth that a good link reaches, one way: a share of the rate that its ports have negotiated, one way.

The shares are what others have measured with messages of 1 MiB and more. A rate that is advertised for both ways
together is twice as much.
"""

from dataclasses import dataclass

from mlxdist.runtime.devices.paths import Path

from .cluster import Cluster

__all__ = ["Expected", "expected_bandwidth"]

_THUNDERBOLT_5 = 0.65  # 6.4 to 6.9 GB/s of 10, one cable between two Mac Studios (MCDMA, docs/fabric.md)
_THUNDERBOLT_4 = 0.37  # 14.7 to 15.9 Gbit/s of 40 (hellas-ai/thunderbolt-ibverbs, pull request 44)
_OTHERS = 0.8  # 80 to 90 % (Stas Bekman, Machine Learning Engineering, chapter on networks)
_FASTEST_TCP = 10.0  # Gbit/s; above it, the CPU that copies is the limit
_NO_RATE = ("wifi", "tunnel", "bridge", "virtual", "loopback")  # interfaces whose rate says nothing about a link


@dataclass(frozen=True)
class Expected:
    """``bandwidth`` in bytes a second; ``link``: the kind of link and its rate, in words."""

    bandwidth: float
    link: str


def expected_bandwidth(cluster: Cluster, pair: tuple[str, str]) -> Expected | None:
    """The bandwidth of the link between two hosts; None where its kind or its rate is not known."""
    job, given = cluster.job, cluster.options.advertised
    path = job.paths.get(pair) if job else None
    if job is None or path not in (Path.RDMA, Path.TCP):
        return None
    ports = job.ports[pair]
    rate = given or (ports.rate if path is Path.RDMA else _rate_of_interfaces(cluster, pair))
    if not rate:
        return None
    kind, share = path.label, _OTHERS
    if path is Path.RDMA and ports.are_thunderbolt:
        kind, share = ("Thunderbolt 5", _THUNDERBOLT_5) if rate > 40 else ("Thunderbolt 4", _THUNDERBOLT_4)
    usable = rate if path is Path.RDMA else min(rate, _FASTEST_TCP)
    return Expected(share * usable * 1e9 / 8, f"{kind} at {rate:g} Gbit/s")


def _rate_of_interfaces(cluster: Cluster, pair: tuple[str, str]) -> float:
    """The rate in Gbit/s of the slower interface of the two hosts; 0 where it is not known of both."""
    ways = (pair, pair[::-1])
    attempts = [one for one in cluster.attempts if one.first and (one.source, one.target) in ways]
    speeds = {one.source: one.speed or 0 for one in attempts if one.kind not in _NO_RATE}
    return min(speeds.values()) / 1000 if len(speeds) == 2 else 0.0
