"""The hosts' clocks agree with this machine's, as well as a round trip can tell."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, ok, warn

__all__ = ["check_clocks"]

_SECONDS = 1.0


def check_clocks(cluster: Cluster) -> list[Finding]:
    """What a host has told: seconds that it is ahead, and by how much that may be wrong."""
    found = []
    for name, (ahead, unsure) in cluster.each("clock"):
        if abs(ahead) - unsure > _SECONDS:
            what = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
            remedy = "set it: `sudo timedatectl set-ntp true`; on a Mac `sudo sntp -sS time.apple.com`"
            found.append(warn(name, what, remedy))
        else:
            # Not more exactly: then hosts that are alike would not share a line.
            found.append(ok(name, f"within {_SECONDS:g} s of this machine"))
    return found
