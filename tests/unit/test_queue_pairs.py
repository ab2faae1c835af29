"""Devices with too few queue pairs for all ranks are found before the first queue pair is created."""

import dataclasses

import pytest
from node_infos import device, gid, node

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.devices.links import choose
from mlxdist.runtime.devices.node_info import NodeInfo
from mlxdist.runtime.devices.queue_pairs import check_queue_pairs


def test_nodes_are_unpacked_with_the_queue_pairs_of_their_devices():
    full = dataclasses.replace(device("x"), limits={"max_qp": 11, "max_mr": 100}, link_layer="Thunderbolt")
    found = NodeInfo.unpack(node("a", full).pack())
    assert found.devices[0].limits == {"max_qp": 11} and found.devices[0].is_thunderbolt
    with pytest.raises(InvalidArgument, match="max_qp is -1"):
        NodeInfo.unpack(found.pack().replace(b'"max_qp":11', b'"max_qp":-1'))


def macs(hosts: str, ranks: int, max_qp: int = 11, link_layer: str = "Thunderbolt") -> list[NodeInfo]:
    """``ranks`` on each, in order of the hosts, which one cable joins: b0 at a, a0 at b."""
    ends = {"a": "10.0.0.1", "b": "10.0.0.2"}
    limits = {"max_qp": max_qp} if max_qp else {}
    devices = {
        h: dataclasses.replace(device(f"{h}0", gid(1, ends[h])), limits=limits, link_layer=link_layer) for h in hosts
    }
    return [node(host, devices[host], tcp=(ends[host],)) for host in hosts for _ in range(ranks)]


def check(nodes: list[NodeInfo], adjacency=None, **options) -> None:
    """On every rank."""
    check_queue_pairs(nodes, adjacency, lambda rank: choose(nodes, rank, **options))


@pytest.mark.parametrize("max_qp", [11, 10, 0])
def test_three_ranks_a_mac_need_more_queue_pairs_than_a_device_has(max_qp):
    words = r"host a: a0 has 10 queue pairs, and 9 pairs of ranks over it would need 18: 2 each; "
    words += r"it connects ranks 0, 1 and 2 to ranks 3, 4 and 5; "
    words += r"start at most 2 ranks on each host \(2 \* 2 \* 2 = 8\), add cables, or .*=soft"
    with pytest.raises(InvalidArgument, match=words):
        check(macs("ab", 3, max_qp))
    check(macs("ab", 2, max_qp))
    check(macs("ab", 1, max_qp))


def test_a_device_with_fewer_queue_pairs():
    with pytest.raises(
        InvalidArgument, match="a0 has 3 queue pairs, and 4 pairs .* need 8.* at most 1 rank on each host"
    ):
        check(macs("ab", 2, 3))
    check(macs("ab", 1, 3))


def test_ranks_that_are_not_joined_need_none():
    ring = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)}
    check(macs("ab", 3), adjacency=ring | {(b, a) for a, b in ring})
    check(macs("ab", 3), provider="soft")


def test_cards_have_plenty():
    """On Linux, and those of other makers on a Mac."""
    check(macs("ab", 3, 1 << 17, "Ethernet"))
    check(macs("ab", 3, 0, "Ethernet"))
    with pytest.raises(InvalidArgument, match="a0 has 16 queue pairs"):
        check(macs("ab", 3, 16, "Ethernet"))
