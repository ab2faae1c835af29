"""Which hosts have failed, and the hostfile without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mlxdist.cluster.hostfile import Hostfile, write

from .findings import Result, Verdict

__all__ = ["failed_hosts", "hostfile_without"]


def failed_hosts(names: Sequence[str], results: Sequence[Result]) -> list[str]:
    """Those that have failed by themselves, and of pairs that do not reach each other as few as will do.

    Of the hosts of such pairs, the one that is in most of them goes first; of equal ones the one that comes later in
    the hostfile, since rank 0 is on the first.
    """
    failures = [f for result in results for f in result.findings if f.verdict is Verdict.FAIL]
    alone = {name for failure in failures if not failure.is_way for name in failure.hosts}
    pairs = {frozenset(failure.hosts) for failure in failures if failure.is_way}
    remaining = [pair for pair in pairs if not pair & alone]
    while remaining:
        counts = Counter(name for pair in remaining for name in pair)
        worst = max(counts, key=lambda name: (counts[name], names.index(name)))
        alone.add(worst)
        remaining = [pair for pair in remaining if worst not in pair]
    return [name for name in names if name in alone]


def hostfile_without(found: Hostfile, failed: Sequence[str]) -> str:
    """Its text, in its own format."""
    remaining = found.only([host.name for host in found.hosts if host.name not in failed])
    # Names given on the command line are a hostfile without a format.
    format = found.format if found.format in ("json", "slots", "colon") and found.source != "--hosts" else "json"
    return write(remaining, format)
