"""Checks of one host at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mlxdist.cluster.hostfile import Host

from ..cluster import Cluster
from ..findings import Finding

__all__ = ["each_host", "gib"]


def each_host(step: str) -> Callable[[Callable[[Host, Any], Iterator[Finding]]], Callable[[Cluster], list[Finding]]]:
    """Makes a check of a function that yields the findings about one host from its response to this request."""

    def decorate(find: Callable[[Host, Any], Iterator[Finding]]) -> Callable[[Cluster], list[Finding]]:
        @functools.wraps(find)
        def check(cluster: Cluster) -> list[Finding]:
            return [finding for host, response in cluster.each_host(step) for finding in find(host, response)]

        return check

    return decorate


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
