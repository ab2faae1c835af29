"""Whether the devices have queue pairs enough for all ranks, before the first one is made.

Thunderbolt devices have 10 (on macOS 27: 3), over all processes of a Mac. R ranks on each of two Macs make R * R pairs
of ranks over the cable between them, and each pair takes 2 queue pairs at both ends: 2 ranks a Mac need 8, and 3 would
need 18.
"""

import collections
import math
from collections.abc import Callable, Collection, Sequence

from mlxdist.base.errors import InvalidArgument, name_ranks

from .device import Device
from .links import Choice
from .node_info import NodeInfo

__all__ = ["OF_A_LINK", "advice", "check_queue_pairs", "in_words", "usable"]

OF_A_LINK = 2  # eager and bulk
_THUNDERBOLT = 10  # Apple's TN3205; query_device says 11 there, and on macOS 27 it was seen to say 3


def usable(device: Device) -> int | None:
    """How many queue pairs a device really has; None where it does not say."""
    max_qp = device.limits.get("max_qp", 0)
    if device.is_thunderbolt:
        return min(max_qp, _THUNDERBOLT) if max_qp else _THUNDERBOLT
    return max_qp or None


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
            raise InvalidArgument(f"host {host}: {text}; it connects {ranks} to {peers}; {advice(limits[key])}")


def in_words(device: str, pairs: int, limit: int) -> str:
    return (
        f"{device} has {limit} queue pairs, and {pairs} pairs of ranks over it would need {OF_A_LINK * pairs}: "
        f"{OF_A_LINK} each"
    )


def advice(limit: int) -> str:
    ranks = math.isqrt(limit // OF_A_LINK)
    return (
        f"start at most {ranks} rank{'s' * (ranks > 1)} on each host ({OF_A_LINK} * {ranks} * {ranks} = "
        f"{OF_A_LINK * ranks**2}), add cables, or let them use TCP: MLXDIST_PROVIDER=soft"
    )
