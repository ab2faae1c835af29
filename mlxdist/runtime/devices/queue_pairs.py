"""Whether the devices have queue pairs enough for all ranks, before the first one is made.

Thunderbolt devices have 10 (on macOS 27: 3), over all processes of a Mac. R ranks on each of two Macs make R * R pairs
of ranks over the cable between them, and each pair takes 2 queue pairs at both ends: 2 ranks a Mac need 8, and 3 would
need 18. With 3 queue pairs a cable joins one pair of ranks, hence one rank a Mac, also in a mesh of Macs, where each
pair of them has a cable of its own.
"""

import collections
import math
from collections.abc import Callable, Collection, Sequence

from mlxdist.base.errors import InvalidArgument, name_ranks

from .device import Device
from .links import Choice
from .node_info import NodeInfo
from .probe import MOST

__all__ = ["OF_A_LINK", "advice", "check_queue_pairs", "in_words", "usable"]

OF_A_LINK = 2  # eager and bulk
_THUNDERBOLT = 10  # Apple's TN3205; query_device says 11 there, and on macOS 27 it was seen to say 3


def usable(device: Device) -> int | None:
    """How many queue pairs a device really has: those that a probe could make, else by rule; None where nothing says.

    A probe tries no more than 16, so there the device may have more: it has as many as it says.
    """
    max_qp = device.limits.get("max_qp", 0)
    probed = device.probe.queue_pairs if device.probe else 0
    if 0 < probed < MOST["queue_pairs"]:
        return probed
    if device.is_thunderbolt and not probed:
        return min(max_qp, _THUNDERBOLT) if max_qp else _THUNDERBOLT
    return max(max_qp, probed) if max_qp else None


def check_queue_pairs(
    nodes: Sequence[NodeInfo], adjacency: Collection[tuple[int, int]] | None, choice_of: Callable[[int], Choice]
) -> None:
    """Checks the devices of all ranks, alike on every rank. Not the software provider's: there each rank has its own.

    Args:
        adjacency: the pairs of ranks that the user connects at all; None for every pair.
        choice_of: what a rank has chosen.

    Raises:
        InvalidArgument: a device has too few.
    """
    limits = {
        (node.identity, device.provider, device.name): limit
        for node in nodes
        for device in node.devices
        if device.provider != "soft" and (limit := usable(device))
    }
    ranks_of = collections.Counter(node.identity for node in nodes)
    # Enough even if every device served all pairs of ranks: then no rank's choice has to be computed.
    if all(limit >= OF_A_LINK * ranks_of[host] * len(nodes) for (host, *_), limit in limits.items()):
        return
    pairs: dict[tuple[bytes, str, str], list[tuple[int, int]]] = collections.defaultdict(list)
    for rank, node in enumerate(nodes):
        for peer, links in enumerate(choice_of(rank).links):
            for link in links if adjacency is None or (rank, peer) in adjacency else ():
                pairs[node.identity, link.provider, link.device].append((rank, peer))
    for key, joined in pairs.items():
        if key in limits and OF_A_LINK * len(joined) > limits[key]:
            ranks, peers = (name_ranks(sorted(set(side))) for side in zip(*joined))
            host = next(node.host for node in nodes if node.identity == key[0])
            text = in_words(key[2], len(joined), limits[key])
            remedy = advice(len(joined), limits[key])
            raise InvalidArgument(f"host {host}: {text}; it connects {ranks} to {peers}; {remedy}")


def in_words(device: str, pairs: int, limit: int) -> str:
    return (
        f"{device} has {limit} queue pair{'s' * (limit > 1)}, and {pairs} pair{'s' * (pairs > 1)} of ranks over it "
        f"would need {OF_A_LINK * pairs}: {OF_A_LINK} each"
    )


def advice(pairs: int, limit: int) -> str:
    """Advises what to do where ``pairs`` of ranks would share a device that has ``limit`` queue pairs."""
    tcp = "let them use TCP: MLXDIST_PROVIDER=soft"
    again = "`mlxdist devices --probe` counts its queue pairs again"
    joined = limit // OF_A_LINK
    if not joined:
        return f"end the other programs that use the device, or {tcp}; {again}"
    ranks = math.isqrt(joined)
    return (
        f"start at most {ranks} rank{'s' * (ranks > 1)} on each host ({OF_A_LINK} * {ranks} * {ranks} = "
        f"{OF_A_LINK * ranks**2}), connect the hosts by {math.ceil(pairs / joined)} cables, each for {joined} "
        f"pair{'s' * (joined > 1)} of ranks, with a row for each rank in MLXDIST_DEVICE_MAP, or {tcp}; {again}"
    )
