"""Checks the result of a real job: correct values, the intended provider, and the speed of each pair of hosts."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..cluster import Cluster, Job
from ..findings import Finding, fail, ok, skip, warn, way
from .rdma import wants_rdma

__all__ = ["LATENCY_FACTOR", "SHARE", "check_bandwidth", "check_correctness", "check_latency", "check_provider"]

SHARE = 0.6  # of the median bandwidth
LATENCY_FACTOR = 2.5  # times the median
_RUN_AGAIN = "run it again and look at its output: MLXDIST_DEBUG=info {command}"


def check_correctness(cluster: Cluster) -> Iterator[Finding]:
    job = cluster.job
    if job is None or job.skipped:
        yield skip((), job.skipped if job else "no job was run")
    elif job.error:
        yield from [_failed(smaller, smaller.hosts) for smaller in job.culprits] or [_failed(job, ())]
    elif job.wrong:
        remedy = "MLXDIST_CHECKSUM=1 says whether data is damaged in transit; look for bad memory or a bad cable there"
        yield fail((), f"{'; '.join(job.wrong[:3])}", remedy)
    else:
        yield ok(job.hosts, f"{job.tested} sums over {job.ranks} rank{'s' * (job.ranks > 1)} are right to the bit")


def _failed(job: Job, hosts: Sequence[str]) -> Finding:
    """A finding for a job that failed. ``hosts``: the one or two hosts that cause it; none if they are not known."""
    where = ("", " on this host alone", " on these two")[len(hosts)]
    what = f"a job of {job.ranks} ranks{where} failed: {job.error}"
    found = fail(hosts, what, _RUN_AGAIN.format(command=job.command))
    return way(found) if len(hosts) > 1 else found


def check_provider(cluster: Cluster) -> Iterator[Finding]:
    job = cluster.job
    if job is None or job.skipped or job.error:
        yield skip((), "no job was run")
        return
    what = f"{job.provider} ({job.reason})" if job.reason else job.provider
    if wants_rdma(cluster) and "soft" in job.provider.split("+") and len(job.hosts) > 1:
        remedy = "see the check rdma; for the reason, require it: mlxdist launch --provider librdma (or ibverbs)"
        yield warn((), f"RDMA is wanted, and the ranks have chosen {what}", remedy)
    else:
        yield ok(job.hosts, what)


def check_latency(cluster: Cluster) -> Iterator[Finding]:
    values = cluster.job.latency if cluster.job else {}
    return _links(cluster, values, lambda value, median: value > LATENCY_FACTOR * median, lambda us: f"{us:.1f} us")


def check_bandwidth(cluster: Cluster) -> Iterator[Finding]:
    values = cluster.job.bandwidth if cluster.job else {}
    return _links(cluster, values, lambda value, median: value < SHARE * median, lambda rate: f"{rate / 1e9:.2f} GB/s")


def _links(
    cluster: Cluster,
    values: Mapping[tuple[str, str], float],
    is_outlier: Callable[[float, float], bool],
    show: Callable[[float], str],
) -> Iterator[Finding]:
    if not values or cluster.job is None:
        yield skip((), "there is one host" if len(cluster.hosts) < 2 else "no job was run between hosts")
        return
    median = statistics.median(values.values())
    slow = {pair: value for pair, value in values.items() if is_outlier(value, median)}
    for pair, value in slow.items():
        remedy = f"look at the cable and ports between them, and try another cable; mlxdist devices on {pair[0]}"
        yield way(warn(pair, f"{show(value)}, {value / median:.0%} of the median {show(median)}", remedy))
    if not slow:
        yield ok(cluster.job.hosts, f"{show(min(values.values()))} to {show(max(values.values()))}")
