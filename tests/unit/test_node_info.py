"""What ranks send about their nodes and devices arrives as it was sent, and nothing malformed is accepted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_infos import MEMORY, device, gid, node, worlds

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.runtime.devices.device import GID_TYPES
from mlxdist.runtime.devices.links import Ports, choose
from mlxdist.runtime.devices.node_info import NodeInfo


@settings(deadline=None)
@given(worlds())
def test_nodes_arrive_as_they_were_sent(nodes):
    for sent in nodes:
        arrived = NodeInfo.unpack(sent.pack())
        assert (arrived.identity, arrived.host, arrived.address) == (sent.identity, sent.host, sent.address)
        assert [d.name for d in arrived.devices] == [d.name for d in sent.devices]
    ranks = range(len(nodes))
    arrived = [NodeInfo.unpack(sent.pack()) for sent in nodes]
    assert [choose(arrived, rank).links for rank in ranks] == [choose(nodes, rank).links for rank in ranks]


def test_ports_are_those_of_devices_that_were_sent():
    """Two cables, each as fast as its slower end; a device that does not say its rate leaves none."""
    fast, slow, silent, thunderbolt = (
        {"speed": 200.0},
        {"speed": 100.0},
        {},
        {"speed": 80.0, "link_layer": "Thunderbolt"},
    )

    def ports(*ends: tuple[dict, dict]) -> Ports:
        nodes = []
        for end, host in enumerate("ab"):
            cables = enumerate(pair[end] for pair in ends)
            made = (replace(device(f"x{cable}", gid(1, f"10.0.{cable}.{end + 1}")), **port) for cable, port in cables)
            nodes.append(NodeInfo.unpack(node(host, *made).pack()))
        found = [choose(nodes, rank, links_per_peer=2).ports[1 - rank] for rank in (0, 1)]
        assert found[0] == found[1]
        return found[0]

    assert ports((fast, slow)) == Ports(100.0) and ports((fast, slow), (fast, fast)) == Ports(300.0)
    assert ports((fast, silent)) == Ports() and ports((fast, fast), (fast, silent)) == Ports()
    assert ports((thunderbolt, thunderbolt)) == Ports(80.0, True) and ports((thunderbolt, fast)) == Ports(80.0)


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_other_bytes_are_rejected(data):
    with pytest.raises(InvalidArgument, match="a rank has sent a malformed list of its devices"):
        NodeInfo.unpack(data)


VALID = node("a", device("x", gid(1, "10.0.0.1"), gid(2, "fe80::1"))).pack()


@settings(deadline=None)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=3))
def test_altered_bytes_are_rejected_or_are_a_node(position, replacement):
    try:
        found = NodeInfo.unpack(VALID[:position] + replacement + VALID[position + 1 :])
    except InvalidArgument:
        return
    for d in found.devices:
        for g in d.gids:
            assert 0 <= g.index <= 255 and len(g.address) == 16 and g.type in GID_TYPES


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"devices":[', b'"devices":{"a":['),
        (b'[1,"RoCE v2"', b'[256,"RoCE v2"'),
        (b'[1,"RoCE v2"', b'[-1,"RoCE v2"'),
        (b'[1,"RoCE v2"', b'[true,"RoCE v2"'),
        (b'[1,"RoCE v2"', b'[1,"RoCE v3"'),
        (b'[1,"RoCE v2"', b'[1,["RoCE v2"]'),
        (b",24]", b",33]"),
        (b",24]", b",24,1]"),
        (b'"0000', b'"00'),
        (b'"0000', b'"zz00'),
        (b'"address":""', b'"address":"10.0.0"'),
        (b'"host":"a"', b'"host":7'),
        (b'"host":"a"', b'"host":"\\ud800"'),
        (b'"host":"a"', b'"host":"\\u001b[31m"'),
        (b'"host":"a"', b'"host":"' + b"a" * 300 + b'"'),
        (b'"provider":"ibverbs"', b'"provider":"verbs"'),
        (b'"provider":"ibverbs"', b'"provider":["ibverbs"]'),
        (b'"missing"', b'"more"'),
    ],
)
def test_fields_are_checked(old, new):
    altered = VALID.replace(old, new, 1)
    assert altered != VALID
    with pytest.raises(InvalidArgument, match="install the same mlxdist on all hosts"):
        NodeInfo.unpack(altered)


def test_a_node_is_bounded():
    with pytest.raises(InvalidArgument, match="at most 65536 are allowed"):
        NodeInfo.unpack(VALID + b" " * 65536)
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        NodeInfo.unpack(b"[" * 60000)
    many = [device(f"x{i}", *(gid(j, f"10.0.{i}.{j}") for j in range(250))) for i in range(8)]
    with pytest.raises(ResourceError, match="too many addresses"):
        node("a", *many).pack()


def test_addresses_that_no_one_can_use_do_not_travel():
    """Of ports that are down, and behind line 255, which an address handle cannot name."""
    sent = node(
        "a", device("x", gid(1, "10.0.0.1"), state="DOWN"), device("y", gid(256, "10.0.0.1"), gid(7, "fe80::1"))
    )
    x, y = NodeInfo.unpack(sent.pack()).of_provider("ibverbs")
    assert x.gids == () and [g.index for g in y.gids] == [7]


def test_the_node_of_this_process():
    here = NodeInfo.here(b"identity", "host", "10.0.0.1", "soft")
    assert {d.provider for d in here.devices} == {"soft"} and NodeInfo.unpack(here.pack()).devices
    assert choose([here, here], 0).links[1] == MEMORY
