"""Checks the result of a real job: correct values, the intended provider, and the speed of each pair of hosts."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..cluster import Cluster, Job
from ..expected_bandwidth import expected_bandwidth
from ..findings import Finding, fail, ok, skip, warn, way
from .rdma import wants_rdma

__all__ = ["check_bandwidth", "check_correctness", "check_latency", "check_provider", "late_pairs", "slow_pairs"]

SHARE = 0.6  # of the bandwidth that a link of its kind and rate reaches, and of the median
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


@dataclass(frozen=True)
class Outlier:
    """A pair of hosts whose link is slow. ``share``: of what it should be."""

    share: float
    what: str


def check_latency(cluster: Cluster) -> Iterator[Finding]:
    values = cluster.job.latency if cluster.job else {}
    yield from _links(cluster, values, late_pairs(cluster), lambda us: f"{us:.1f} us")


def late_pairs(cluster: Cluster) -> dict[tuple[str, str], Outlier]:
    """The pairs of hosts whose latency is far above the median."""
    values = cluster.job.latency if cluster.job else {}
    median = statistics.median(values.values() or [0])
    return {
        pair: Outlier(value / median, f"{value:.1f} us, {value / median:.0%} of the median {median:.1f} us")
        for pair, value in values.items()
        if value > LATENCY_FACTOR * median
    }


def check_bandwidth(cluster: Cluster) -> Iterator[Finding]:
    """Compares each pair with what its link should reach, and with the others: one slow cable of two has no other."""
    values = cluster.job.bandwidth if cluster.job else {}
    links = sorted({expected.link for pair in values if (expected := expected_bandwidth(cluster, pair))})
    yield from _links(cluster, values, slow_pairs(cluster), _gigabytes, f", as {' and '.join(links)}" if links else "")


def slow_pairs(cluster: Cluster) -> dict[tuple[str, str], Outlier]:
    """The pairs of hosts whose bandwidth is far below what their link reaches, or below the median."""
    values = cluster.job.bandwidth if cluster.job else {}
    median = statistics.median(values.values() or [0])
    slow = {}
    for pair, value in values.items():
        expected = expected_bandwidth(cluster, pair)
        if expected and value < SHARE * expected.bandwidth:
            wanted, why = expected.bandwidth, f"that {expected.link} reaches one way"
        elif value < SHARE * median:
            wanted, why = median, "of the median pair"
        else:
            continue
        slow[pair] = Outlier(
            value / wanted, f"{_gigabytes(value)}, {value / wanted:.0%} of the {_gigabytes(wanted)} {why}"
        )
    return slow


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _links(
    cluster: Cluster,
    values: Mapping[tuple[str, str], float],
    outliers: Mapping[tuple[str, str], Outlier],
    show: Callable[[float], str],
    extra: str = "",
) -> Iterator[Finding]:
    if not values or cluster.job is None:
        yield skip((), "there is one host" if len(cluster.hosts) < 2 else "no job was run between hosts")
        return
    for pair, outlier in outliers.items():
        remedy = f"look at the cable and ports between them, and try another cable; mlxdist devices on {pair[0]}"
        yield way(warn(pair, outlier.what, remedy))
    if not outliers:
        yield ok(cluster.job.hosts, f"{show(min(values.values()))} to {show(max(values.values()))}{extra}")
