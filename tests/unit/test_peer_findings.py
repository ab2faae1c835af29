"""Findings of a probe with a peer: what follows from those of both ends, which cables are tried, what travels."""

import functools
import json
from dataclasses import replace

import pytest
from node_infos import device, gid, node

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import load
from mlxdist.runtime.devices.device_selection import DeviceSelection
from mlxdist.runtime.devices.links import choose
from mlxdist.runtime.devices.node_info import NodeInfo
from mlxdist.runtime.devices.peer_findings import Course, Finding, pack_findings, unpack_findings
from mlxdist.runtime.devices.probe import MESSAGE_SIZES, PeerProbe
from mlxdist.runtime.group.first_contact import find_cables, largest_message

ARRIVES = Finding(True, 6, empty=True, lengths=True, packets=False, failed="", longer="")
FAILS = replace(ARRIVES, arrives=False, failed="LOC_LEN_ERR")
SILENT = replace(FAILS, failed="nothing arrives")


def course(*rounds: tuple[Finding, Finding]) -> Course:
    found = Course()
    for size, ends in zip(MESSAGE_SIZES, rounds):
        found.add(size, ends)
    return found


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([(ARRIVES, ARRIVES)], PeerProbe(131072, 6, empty=True, lengths=True)),
        ([(ARRIVES, replace(ARRIVES, empty=False, receives=5))], PeerProbe(131072, 5, lengths=True)),
        (
            [(ARRIVES, FAILS), (ARRIVES, replace(ARRIVES, lengths=False, longer="LOC_LEN_ERR"))],
            PeerProbe(65536, 6, larger="LOC_LEN_ERR", longer="LOC_LEN_ERR", empty=True),
        ),
        (
            [(SILENT, SILENT), *[(FAILS, SILENT)] * 3, *[(replace(ARRIVES, packets=True),) * 2]],
            PeerProbe(4096, 6, larger="LOC_LEN_ERR", packets=True, empty=True, lengths=True),
        ),
    ],
)
def test_the_worse_end_counts_for_both(rounds, expected):
    found = course(*rounds)
    assert found.is_over and found.result() == expected
    assert course(*(ends[::-1] for ends in rounds)).result() == expected
    found.add(4096, (FAILS, FAILS))  # of other cables, which are still tried
    assert found.result() == expected


def test_a_size_that_arrives_one_way_does_not_count():
    assert not course().is_over
    assert not course(*[(ARRIVES, SILENT), (FAILS, ARRIVES)] * 2, (ARRIVES, FAILS)).is_over


def test_findings_travel():
    assert unpack_findings(pack_findings([ARRIVES, FAILS])) == (ARRIVES, FAILS)
    assert unpack_findings(pack_findings([])) == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"arrives": 1}, "arrives is 1, not true or false"),
        ({"receives": -1}, "receives is -1"),
        ({"failed": "\x1b[2J"}, "failed must be a text"),
        ({"longer": "x" * 256}, "longer must be a text"),
        ({"lengths": None}, "lengths is None"),
    ],
)
def test_findings_of_other_ranks_are_checked(change, why):
    with pytest.raises(InvalidArgument, match="malformed findings of a probe: ") as error:
        unpack_findings(json.dumps([vars(ARRIVES) | change]).encode())
    assert why in str(error.value)
    for data in (b"", b"{}", b"[" * 5000, json.dumps([vars(ARRIVES)] * 1025).encode()):
        with pytest.raises(InvalidArgument, match="malformed findings of a probe: "):
            unpack_findings(data)


# Which cables are tried, and by whom


def thunderbolt(name: str, address: str):
    return replace(device(name, gid(0, address), provider="librdma"), link_layer="Thunderbolt")


def selection(nodes, rows=None) -> DeviceSelection:
    matrix = None if rows is None else load(json.dumps(rows))
    choice_of = functools.partial(choose, nodes, provider="librdma", device_map=matrix)
    return DeviceSelection(choice_of(0), nodes, choice_of)


def tried(agreed: DeviceSelection, topology=None) -> list[tuple]:
    return [(cable.ranks, *(end.device for end in cable.ends)) for cable in find_cables(agreed, topology)]


A = node("a", thunderbolt("rdma_en2", "10.0.1.1"), thunderbolt("rdma_en3", "10.0.2.1"))
B = node("b", thunderbolt("rdma_en4", "10.0.1.2"), thunderbolt("rdma_en5", "10.0.3.1"))
C = node("c", thunderbolt("rdma_en6", "10.0.2.2"), thunderbolt("rdma_en7", "10.0.3.2"))


def test_every_cable_is_tried_once_however_many_ranks_share_it():
    between = [((0, 2), "rdma_en2", "rdma_en4"), ((0, 4), "rdma_en3", "rdma_en6"), ((2, 4), "rdma_en5", "rdma_en7")]
    crossed = selection(
        [A, A, B, B, C],
        [[None, ["rdma_en2"], ["rdma_en3"]], [["rdma_en4"], None, ["rdma_en5"]], [["rdma_en6"], ["rdma_en7"], None]],
    )
    with_own = {frozenset((0, 1)), frozenset((2, 3))}
    pairs = frozenset((a, b) for a in range(5) for b in range(5) if a != b and frozenset((a, b)) not in with_own)
    assert tried(crossed, pairs) == between


def test_several_cables_between_two_hosts():
    near = node("a", thunderbolt("rdma_en2", "10.0.1.1"), thunderbolt("rdma_en3", "10.0.2.1"))
    far = node("b", thunderbolt("rdma_en4", "10.0.1.2"), thunderbolt("rdma_en5", "10.0.2.2"))
    agreed = selection([near, far], [[None, ["rdma_en2", "rdma_en3"]], [["rdma_en4", "rdma_en5"], None]])
    assert tried(agreed) == [((0, 1), "rdma_en2", "rdma_en4"), ((0, 1), "rdma_en3", "rdma_en5")]


def test_pairs_that_are_not_connected_are_not_tried():
    assert tried(selection([A, B, C]), frozenset({(0, 1), (1, 0)})) == [((0, 1), "rdma_en2", "rdma_en4")]


def test_what_is_known_takes_no_exchange():
    """There is no rendezvous here. The least of all cables counts, on each rank."""
    nodes = [A, B, C]
    results = {"rdma_en2": 131072, "rdma_en4": 131072, "rdma_en3": 65536, "rdma_en6": 131072, "rdma_en7": 16384}
    for name, largest in (results | {"rdma_en5": 131072}).items():
        nodes = [with_result(one, name, largest) for one in nodes]
    for rank in range(3):
        environment = Environment(rank=rank, world_size=3)
        assert largest_message(None, environment, "host", selection(nodes)) == 16384
        near = replace(environment, topology=frozenset({(0, 1), (1, 0)}))
        assert largest_message(None, near, "host", selection(nodes)) == 131072
    unknown = selection([with_result(A, "rdma_en2", 131072), B, C])
    with pytest.raises(AttributeError):  # it would be needed
        largest_message(None, Environment(world_size=3), "host", unknown)


def with_result(one: NodeInfo, name: str, largest: int) -> NodeInfo:
    result = PeerProbe(largest)
    return replace(one, devices=tuple(replace(d, peer_probe=result) if d.name == name else d for d in one.devices))


def test_other_devices_are_not_tried():
    cards = [node(name, device("mlx5_0", gid(0, f"10.0.1.{n}"), provider="librdma")) for n, name in enumerate("ab", 1)]
    assert tried(selection(cards)) == []
    assert largest_message(None, Environment(world_size=2), "host", selection(cards)) == 0
    assert largest_message(None, Environment(world_size=2), "host", DeviceSelection(None)) == 0
    soft = replace(thunderbolt("soft0", "10.0.1.1"), provider="soft")
    assert not soft.needs_peer_probe and thunderbolt("rdma_en2", "10.0.1.1").needs_peer_probe
