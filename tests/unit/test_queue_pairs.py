"""Devices with too few queue pairs for all ranks are found before the first queue pair is created."""

import dataclasses
import itertools
import json

import pytest
from node_infos import device, gid, node

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import parse
from mlxdist.runtime.devices.device import Device
from mlxdist.runtime.devices.links import choose
from mlxdist.runtime.devices.node_info import NodeInfo
from mlxdist.runtime.devices.probe import Probe
from mlxdist.runtime.devices.queue_pairs import check_queue_pairs, usable


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


def mesh_of_macs(hosts: str, ranks: int, queue_pairs: int) -> list[NodeInfo]:
    """``ranks`` on each; every two hosts have a cable, and a probe found ``queue_pairs`` in the device at each end."""
    cables = list(itertools.combinations(hosts, 2))
    found: dict[str, list[Device]] = {host: [] for host in hosts}
    for number, cable in enumerate(cables):
        for end, host in enumerate(cable, 1):
            at = device(f"{host}-{''.join(cable)}", gid(1, f"10.0.{number}.{end}"))
            probed = Probe(uc=True, queue_pairs=queue_pairs)
            found[host].append(dataclasses.replace(at, limits={"max_qp": 11}, link_layer="Thunderbolt", probe=probed))
    return [node(host, *found[host]) for host in hosts for _ in range(ranks)]


def check(nodes: list[NodeInfo], adjacency=None, **options) -> None:
    """On every rank."""
    check_queue_pairs(nodes, adjacency, lambda rank: choose(nodes, rank, **options))


@pytest.mark.parametrize("max_qp", [11, 10, 0])
def test_three_ranks_a_mac_need_more_queue_pairs_than_a_device_has(max_qp):
    words = r"host a: a0 has 10 queue pairs, and 9 pairs of ranks over it would need 18: 2 each; "
    words += r"it connects ranks 0, 1 and 2 to ranks 3, 4 and 5; "
    words += r"start at most 2 ranks on each host \(2 \* 2 \* 2 = 8\), connect the hosts by 2 cables, each for 5 pairs "
    words += r"of ranks, with a row for each rank in MLXDIST_DEVICE_MAP, or let them use TCP: MLXDIST_PROVIDER=soft"
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


@pytest.mark.parametrize(
    "link_layer, max_qp, probed, count",
    [
        ("Thunderbolt", 11, 0, 10),
        ("Thunderbolt", 11, 3, 3),
        ("Thunderbolt", 3, 10, 10),
        ("Thunderbolt", 11, 16, 16),  # as many as a probe tries
        ("Thunderbolt", 40, 16, 40),
        ("Ethernet", 1 << 17, 16, 1 << 17),
        ("Ethernet", 1 << 17, 5, 5),
        ("Ethernet", 0, 16, None),
    ],
)
def test_queue_pairs_that_a_probe_could_make_count(link_layer, max_qp, probed, count):
    found = Probe(uc=True, queue_pairs=probed) if probed else None
    limits = {"max_qp": max_qp} if max_qp else {}
    assert usable(dataclasses.replace(device("x"), limits=limits, link_layer=link_layer, probe=found)) == count


def test_four_macs_with_three_queue_pairs_a_device():
    """A mesh of one rank each fits. Two ranks each would share a cable four times, and one pair of ranks fits."""
    check(mesh_of_macs("abcd", 1, 3))
    words = r"host a: a-ab has 3 queue pairs, and 4 pairs of ranks over it would need 8: 2 each; "
    words += r"it connects ranks 0 and 1 to ranks 2 and 3; start at most 1 rank on each host \(2 \* 1 \* 1 = 2\), "
    words += r"connect the hosts by 4 cables, each for 1 pair of ranks, with a row for each rank in MLXDIST_DEVICE_MAP"
    with pytest.raises(InvalidArgument, match=words):
        check(mesh_of_macs("abcd", 2, 3))
    check(mesh_of_macs("abcd", 2, 10))


def test_two_ranks_a_mac_over_as_many_cables_as_the_advice_names():
    ends = {host: [f"{host}{number}" for number in range(4)] for host in "ab"}
    nodes = []
    for subnet, (host, names) in enumerate(ends.items(), 1):
        probed = {"limits": {"max_qp": 11}, "link_layer": "Thunderbolt", "probe": Probe(uc=True, queue_pairs=3)}
        found = [gid(1, f"10.0.{number}.{subnet}") for number in range(4)]
        devices = [dataclasses.replace(device(*pair), **probed) for pair in zip(names, found)]
        nodes += [node(host, *devices)] * 2
    rows = [[None, None, "a0", "a1"], [None, None, "a2", "a3"], ["b0", "b2", None, None], ["b1", "b3", None, None]]
    check(nodes, device_map=parse(json.dumps(rows)))
    with pytest.raises(InvalidArgument, match="connect the hosts by 4 cables"):
        check(nodes)


def test_a_device_without_a_pair_of_queue_pairs():
    """Another program had the others when the device was probed."""
    words = "a-ab has 1 queue pair, and 1 pair of ranks over it would need 2: .*; end the other programs .* --probe`"
    with pytest.raises(InvalidArgument, match=words):
        check(mesh_of_macs("ab", 1, 1))


def test_nodes_are_unpacked_with_the_results_of_probes():
    packed = mesh_of_macs("ab", 1, 3)[0].pack()
    assert NodeInfo.unpack(packed).devices[0].probe == Probe(uc=True, queue_pairs=3)
    for wrong in (b"17", b"-1", b"true", b'"3"', b"null"):
        with pytest.raises(InvalidArgument, match="queue_pairs is"):
            NodeInfo.unpack(packed.replace(b'"queue_pairs":3', b'"queue_pairs":' + wrong))
