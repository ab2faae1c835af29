"""Which devices connect two ranks: shared memory, RDMA between hosts, TCP; and that both sides choose alike."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_infos import MEMORY, by, device, gid, node, selected, soft, tables, worlds

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import DeviceMap, parse
from mlxdist.runtime.devices.device import Gid
from mlxdist.runtime.devices.gids import find_route
from mlxdist.runtime.devices.links import Link, choose
from mlxdist.runtime.devices.node_info import NodeInfo

# One host


def test_ranks_of_one_host_use_shared_memory():
    choice = choose([node("a"), node("a"), node("a")], 1)
    assert choice.links == (MEMORY, (), MEMORY)
    assert (choice.summary, choice.reason) == ("soft", "all ranks are on one host")


def test_memory_is_found_wherever_it_is_in_the_table():
    other = NodeInfo(
        b"a", "a", devices=(device("soft0", gid(0, "10.0.0.1", "TCP"), Gid(3, "memory", b"\1" * 16), provider="soft"),)
    )
    assert selected([other, other]) == (by("soft0", 3, "soft"),) * 2


@pytest.mark.parametrize("cables", [1, 2, 3, 4])
def test_each_cable_on_one_host_is_a_device(cables):
    links = choose([node("a")] * 2, 0, links_per_peer=cables).links[1]
    assert links == tuple(Link("soft", f"soft{i}", 0) for i in range(cables))


@pytest.mark.parametrize("active, text", [(1, "1 RDMA device left"), (2, "2 RDMA devices left"), (0, "one host")])
def test_devices_that_are_not_used_are_reported(active, text):
    devices = [device(f"mlx5_{i}", gid(0, f"10.0.{i}.1"), state="ACTIVE" if i < active else "DOWN") for i in range(2)]
    assert text in choose([node("a", *devices)] * 2, 0).reason


def test_a_group_of_one():
    choice = choose([node("a")], 0)
    assert (choice.links, choice.summary) == (((),), "soft")


# RDMA by subnets


def test_a_common_subnet_joins_two_hosts():
    a = node("a", device("mlx5_0", gid(0, "fe80::1"), gid(3, "10.0.0.1")))
    b = node("b", device("roce7", gid(0, "fe80::2"), gid(1, "10.0.0.2", "RoCE v1"), gid(5, "10.0.0.2")))
    assert selected([a, b]) == (by("mlx5_0", 3), by("roce7", 5))
    choice = choose([a, b], 0)
    assert (choice.summary, choice.reason) == ("ibverbs", "RDMA to other hosts by mlx5_0")


def test_the_device_in_the_peers_subnet_is_used():
    a = node("a", *(device(f"mlx5_{i}", gid(2, f"10.0.{i}.1")) for i in range(3)))
    b = node("b", device("mlx5_0", gid(4, "10.0.2.9")))
    assert selected([a, b]) == (by("mlx5_2", 2), by("mlx5_0", 4))


def test_roce_v1_is_used_where_one_side_has_no_other():
    a = node("a", device("x", gid(0, "10.0.0.1", "RoCE v1"), gid(1, "10.0.0.1")))
    b = node("b", device("y", gid(6, "10.0.0.2", "RoCE v1")))
    assert selected([a, b]) == (by("x", 0), by("y", 6))


def test_a_subnet_comes_before_169_254():
    a = node("a", device("x", gid(0, "169.254.0.1", prefix=16), gid(1, "10.0.0.1")))
    b = node("b", device("y", gid(0, "10.0.0.2"), gid(1, "169.254.0.2", prefix=16)))
    assert selected([a, b]) == (by("x", 1), by("y", 0))


def test_169_254_is_accepted_where_it_is_clear():
    a = node("a", device("x", gid(1, "169.254.0.1", "unknown", 16)))
    b = node("b", device("y", gid(2, "169.254.7.2", "unknown", 16)))
    assert selected([a, b]) == (by("x", 1), by("y", 2))


def test_169_254_on_several_devices_does_not_identify_the_cable():
    a = node("a", *(device(f"x{i}", gid(1, f"169.254.0.{i}", prefix=16)) for i in (1, 2)), tcp=("10.1.0.1",))
    b = node("b", *(device(f"y{i}", gid(1, f"169.254.1.{i}", prefix=16)) for i in (1, 2)), tcp=("10.1.0.2",))
    choice = choose([a, b], 0)
    assert (
        choice.summary == "soft"
        and "which cable connects which" in choice.reason
        and "MLXDIST_DEVICE_MAP" in choice.reason
    )
    by_map = parse('[[null, ["x1", "x2"]], [["y2", "y1"], null]]')
    assert [link.device for link in choose([a, b], 0, device_map=by_map).links[1]] == ["x1", "x2"]
    assert [link.device for link in choose([a, b], 1, device_map=by_map).links[0]] == ["y2", "y1"]


def test_bridges_for_containers_connect_no_hosts():
    """Every host has 172.17.0.1."""
    a = node("a", device("x", gid(1, "172.17.0.1", prefix=16)), tcp=("172.17.0.1", "10.0.0.1"), address="10.0.0.1")
    b = node("b", device("x", gid(1, "172.17.0.1", prefix=16)), tcp=("172.17.0.1", "10.0.0.2"), address="10.0.0.2")
    assert selected([a, b]) == (by("soft0", 2, "soft"),) * 2


def test_loopback_connects_no_hosts():
    a = node("a", device("x", gid(1, "127.0.0.1", prefix=8)), tcp=("127.0.0.1", "10.0.0.1"))
    b = node("b", device("x", gid(1, "127.0.0.2", prefix=8)), tcp=("127.0.0.2", "10.0.0.2"))
    assert selected([a, b]) == (by("soft0", 2, "soft"),) * 2


def cabled(near: int, far: int) -> list[NodeInfo]:
    """Two hosts: device x0 of one leads to the last device of the other, x1 to the one before it."""
    a = node("a", *(device(f"x{i}", gid(1, f"10.0.{i}.1")) for i in range(near)))
    b = node("b", *(device(f"y{i}", gid(1, f"10.0.{far - 1 - i}.2")) for i in range(far)))
    return [a, b]


def names(ends: tuple) -> list[list[str]]:
    return [[link.device for link in links] for links in ends]


@pytest.mark.parametrize("cables", [1, 2, 3, 4, 5])
def test_cables_by_subnets(cables):
    for links_per_peer in range(1, 5):
        used = min(cables, links_per_peer)
        ends = selected(cabled(cables, cables), links_per_peer=links_per_peer)
        assert names(ends) == [[f"x{i}" for i in range(used)], [f"y{cables - 1 - i}" for i in range(used)]]


@pytest.mark.parametrize(("near", "far"), [(4, 2), (2, 4), (5, 3), (1, 4)])
def test_one_host_has_more_devices_than_the_other(near, far):
    for ends in (selected(cabled(near, far), links_per_peer=4), selected(cabled(near, far)[::-1], links_per_peer=4)):
        assert [len(links) for links in ends] == [min(near, far)] * 2


def test_an_unknown_prefix_is_that_of_the_other_side():
    a, b = (node(h, device("x", gid(1, f"10.0.0.{i}", prefix=p))) for h, i, p in (("a", 1, None), ("b", 2, 24)))
    assert selected([a, b]) == (by("x", 1), by("x", 1))


def test_ranks_of_different_hosts_by_rdma_and_of_one_host_by_memory():
    a, b = (node(h, device("x", gid(i, f"10.0.0.{i}"))) for h, i in (("a", 1), ("b", 2)))
    choice = choose([a, a, b, b], 1)
    assert choice.links == (MEMORY, (), by("x", 1), by("x", 1)) and choice.summary == "ibverbs+soft"


# The device map

TRIANGLE = parse('[[null, "a1", "a2"], ["b0", null, "b2"], ["c0", "c1", null]]')


def triangle() -> list[NodeInfo]:
    """Three hosts, two cables each; 169.254 everywhere, as macOS makes it."""
    names = {"a": ("a1", "a2"), "b": ("b0", "b2"), "c": ("c0", "c1")}
    return [
        node(host, *(device(n, gid(1, f"169.254.{i}.{j}", prefix=16)) for j, n in enumerate(devices, 1)))
        for i, (host, devices) in enumerate(names.items(), 1)
    ]


def test_the_device_map_selects_devices():
    choice = choose(triangle(), 1, device_map=TRIANGLE)
    assert choice.links == (by("b0", 1), (), by("b2", 1))
    assert choice.reason == "RDMA to other hosts by b0, b2"


def test_the_map_may_have_a_row_for_each_host():
    a, b, c = triangle()
    choice = choose([a, a, b, c], 3, device_map=TRIANGLE)
    assert choice.links == (by("c0", 1), by("c0", 1), by("c1", 1), ())


def test_a_map_for_another_number_of_hosts():
    a, b, c = triangle()
    with pytest.raises(InvalidArgument, match="for 3 hosts, but the job has 4 ranks on 2 hosts"):
        choose([a, a, b, b], 0, device_map=TRIANGLE)


@pytest.mark.parametrize("there", ['["x0", "x1"]', '["x1", "x0"]'])
@pytest.mark.parametrize("back", ['["y0", "y1"]', '["y1", "y0"]'])
def test_cables_are_paired_by_subnets_in_whatever_order_they_are_named(there, back):
    a = node("a", device("x0", gid(1, "10.0.0.1")), device("x1", gid(1, "10.0.1.1")))
    b = node("b", device("y0", gid(1, "10.0.1.2")), device("y1", gid(1, "10.0.0.2")))
    near, far = selected([a, b], device_map=parse(f"[[null, {there}], [{back}, null]]"))
    assert {(x.device, y.device) for x, y in zip(near, far, strict=True)} == {("x0", "y1"), ("x1", "y0")}


def test_devices_without_a_common_subnet_are_paired_in_the_order_of_the_map():
    a = node("a", device("x0", gid(1, "fe80::1")), device("x1", gid(1, "10.0.1.1")))
    b = node("b", device("y0", gid(1, "10.0.1.2")), device("y1", gid(1, "fe80::2")))
    near, far = selected([a, b], device_map=parse('[[null, ["x0", "x1"]], [["y0", "y1"], null]]'))
    assert {(x.device, y.device) for x, y in zip(near, far, strict=True)} == {("x1", "y0"), ("x0", "y1")}


def map_of(cables: int) -> DeviceMap:
    return parse(json.dumps([[None, [f"x{i}" for i in range(cables)]], [[f"y{i}" for i in range(cables)], None]]))


@pytest.mark.parametrize("cables", [2, 3, 4, 5, 6])
def test_all_cables_of_the_map_are_used_up_to_four(cables):
    used = min(cables, 4)
    nodes = cabled(cables, cables)
    ends = selected(nodes, device_map=map_of(cables))
    assert names(ends) == [[f"x{i}" for i in range(used)], [f"y{cables - 1 - i}" for i in range(used)]]
    reason = "RDMA to other hosts by " + ", ".join(f"x{i}" for i in range(used))
    more = f"; 4 of {cables} cables between a and b: at most 4 are used" * (cables > 4)
    assert choose(nodes, 0, device_map=map_of(cables)).reason == reason + more


def test_the_map_names_more_devices_on_one_end():
    with pytest.raises(InvalidArgument, match=r"host 0 has 4 cables to host 1 .* host 1 has 3 to host 0"):
        parse('[[null, ["x0", "x1", "x2", "x3"]], [["y0", "y1", "y2"], null]]')


@pytest.mark.parametrize("down", [{"x1"}, {"y3"}, {"x0", "y3"}, {"x1", "x2", "y0"}])
@pytest.mark.parametrize("bare", [False, True])
def test_cables_that_are_down_leave_the_others(down, bare):
    """A device that is DOWN may have lost its address; then the map says which device is at its other end."""
    nodes = [
        replace(
            a,
            devices=tuple(
                replace(d, state="DOWN", gids=() if bare else d.gids) if d.name in down else d for d in a.devices
            ),
        )
        for a in cabled(4, 4)
    ]
    device_map = parse('[[null, ["x0", "x1", "x2", "x3"]], [["y3", "y2", "y1", "y0"], null]]')
    left = [i for i in range(4) if not down & {f"x{i}", f"y{3 - i}"}]
    assert names(selected(nodes, device_map=device_map)) == [[f"x{i}" for i in left], [f"y{3 - i}" for i in left]]
    reason = choose(nodes, 1, device_map=device_map).reason
    assert f"; {len(left)} of 4 cables between a and b: host " in reason and " is DOWN; plug in the cable" in reason


@pytest.mark.parametrize(
    "devices, text",
    [
        ([device("a2", state="DOWN")], "a2 is DOWN; plug in the cable"),
        ([device("a9", gid(1, "10.0.0.1"))], "host a has no device a2, which the device map names: it has a9"),
        ([], "host a has no device a2, which the device map names: it has no RDMA device"),
        ([device("a2", error="ibv_open_device: Permission denied (errno 13)")], "may not open a2"),
    ],
)
def test_what_the_map_names_but_cannot_be_used(devices, text):
    nodes = triangle()
    nodes[0] = node("a", *devices, tcp=("10.9.0.1",))
    nodes[2] = NodeInfo(b"c", "c", devices=(*nodes[2].devices[:2], *soft("10.9.0.3")))
    choice = choose(nodes[::2], 0, device_map=parse('[[null, "a2"], ["c0", null]]'))
    assert choice.summary == "soft" and text in choice.reason and choice.reason.startswith("TCP to c: ")
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on c cannot be connected by ibverbs: .*"):
        choose(nodes[::2], 0, "ibverbs", parse('[[null, "a2"], ["c0", null]]'))


# TCP


def test_hosts_without_rdma_use_tcp_and_report_why():
    a = node("a", tcp=("10.0.0.1",), missing="libibverbs.so.1 is not installed")
    b = node("b", device("rdma_en2", state="DOWN", provider="librdma"), tcp=("10.0.0.2",))
    choice = choose([a, b], 0)
    assert choice.links[1] == by("soft0", 1, "soft") and choice.summary == "soft"
    assert choice.reason == "TCP to b: host a: libibverbs.so.1 is not installed"
    assert "host b: rdma_en2 is DOWN; plug in the cable" in choose([b, b, node("c", tcp=("10.0.0.3",))], 0).reason


def test_different_subnets_of_rdma_are_reported():
    a = node("a", device("x", gid(1, "10.0.0.1")), tcp=("10.9.0.1",))
    b = node("b", device("y", gid(1, "10.0.1.1")), tcp=("10.9.0.2",))
    reason = choose([a, b], 0).reason
    assert "x: 10.0.0.1/24" in reason and "y: 10.0.1.1/24" in reason and "one subnet" in reason


def test_a_device_without_ipv4_is_reported():
    a = node("a", device("x", gid(0, "fe80::1")), tcp=("10.9.0.1",))
    b = node("b", device("y", gid(1, "10.0.1.1")), tcp=("10.9.0.2",))
    assert "host a: x has no IPv4 address" in choose([a, b], 1).reason


def test_tcp_takes_the_network_by_which_the_rendezvous_works():
    a = node("a", tcp=("192.168.0.1", "10.0.0.1"), address="10.0.0.1")
    b = node("b", tcp=("10.0.0.2", "192.168.0.2"), address="::ffff:10.0.0.2")
    assert selected([a, b]) == (by("soft0", 2, "soft"), by("soft0", 1, "soft"))


def test_tcp_through_a_router():
    a = node("a", tcp=("172.17.0.1", "10.0.0.1"), address="10.0.0.1")
    b = node("b", tcp=("10.0.7.2", "172.17.0.1"), address="10.0.7.2")
    assert selected([a, b]) == (by("soft0", 2, "soft"), by("soft0", 1, "soft"))


def test_hosts_that_no_network_joins():
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on b cannot be connected by TCP.*10.0.0.1/24"):
        choose([node("a", tcp=("10.0.0.1",)), node("b", tcp=("10.0.1.1",))], 0)


def test_tcp_within_a_host():
    a = node("a", tcp=("10.0.0.1", "127.0.0.1"))
    assert selected([a, a], soft_transport="tcp") == (by("soft0", 2, "soft"),) * 2


def test_tcp_between_network_namespaces_of_one_host():
    a, b = (node("a", tcp=("127.0.0.1", f"10.0.0.{i}")) for i in (1, 2))
    assert selected([a, b], soft_transport="tcp") == (by("soft0", 2, "soft"),) * 2
    assert selected([a, b]) == (MEMORY, MEMORY)


@pytest.mark.parametrize("cables", [1, 2, 3, 4])
def test_cables_by_tcp(cables):
    a, b = (node(h, tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    links = choose([a, b], 0, links_per_peer=cables).links[1]
    assert links == tuple(Link("soft", f"soft{i}", 1) for i in range(cables))


def test_memory_alone_rejects_other_hosts():
    a, b = (node(h, tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on b are on different hosts, and MLXDIST_SOFT"):
        choose([a, b], 1, soft_transport="shm")


def test_software_devices_that_reach_one_peer_each():
    """Where it plays Thunderbolt, no device of a rank serves two peers."""
    here = NodeInfo.here(b"a", "a", provider="soft", soft_profile="apple-tb5")
    for cables, ranks in ((1, 5), (2, 5), (3, 5), (4, 4)):
        choices = [choose([here] * ranks, rank, links_per_peer=cables) for rank in range(ranks)]
        for rank, choice in enumerate(choices):
            used = [link.device for links in choice.links for link in links]
            assert len(set(used)) == len(used) == (ranks - 1) * cables and choice.links[rank] == ()
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 8 on a .* enough for 8 ranks; start at most 8"):
        choose([here] * 9, 0, links_per_peer=2)
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 4 on a .* enough for 4 ranks; start at most 4"):
        choose([here] * 5, 0, links_per_peer=4)


# A provider that was asked for


def test_soft_leaves_rdma_and_the_map_alone():
    a, b = (node(h, device("x", gid(1, f"10.0.0.{i}")), tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    choice = choose([a, b], 0, "soft", parse('[[null, "x"], ["x", null]]'))
    assert choice.links[1] == by("soft0", 1, "soft") and choice.reason == "MLXDIST_PROVIDER=soft"


def test_rdma_within_a_host_needs_two_devices_or_a_map():
    one = node("a", device("rxe0", gid(1, "10.0.0.1")))
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on a cannot be connected by ibverbs"):
        choose([one, one], 0, "ibverbs")
    assert selected([one, one], provider="ibverbs", device_map=parse('[[null, "rxe0"], ["rxe0", null]]')) == (
        by("rxe0", 1),
        by("rxe0", 1),
    )
    two = node("a", device("rxe0", gid(1, "10.0.0.1")), device("rxe1", gid(2, "10.0.0.2")))
    assert selected([two, two], provider="ibverbs") == (by("rxe0", 1), by("rxe1", 2))


def test_ranks_without_a_cable_have_no_link_when_rdma_was_requested():
    nodes = triangle()
    line = parse('[[null, "a1", null], ["b0", null, "b2"], [null, "c1", null]]')
    assert choose(nodes, 0, "ibverbs", line).links == ((), by("a1", 1), ())


def test_another_library_than_the_hosts_have():
    a, b = (node(h, device("x", gid(1, f"10.0.0.{i}"))) for h, i in (("a", 1), ("b", 2)))
    with pytest.raises(InvalidArgument, match="connected by librdma: host a: it has no RDMA device"):
        choose([a, b], 0, "librdma")


# Whatever the machines are like


@settings(deadline=None)
@given(worlds(), st.integers(1, 4), st.sampled_from(["auto", "shm", "tcp"]))
def test_both_sides_choose_the_two_ends_of_the_same_cables(nodes, cables, soft_transport):
    """Complete, symmetric and the same every time, in auto mode."""
    try:
        choices = [
            choose(nodes, rank, links_per_peer=cables, soft_transport=soft_transport) for rank in range(len(nodes))
        ]
    except InvalidArgument:
        assert soft_transport == "shm"
        return
    assert choices == [
        choose(nodes, rank, links_per_peer=cables, soft_transport=soft_transport) for rank in range(len(nodes))
    ]
    for low in range(len(nodes)):
        assert choices[low].links[low] == () and choices[low].reason
        for high in range(low + 1, len(nodes)):
            near, far = choices[low].links[high], choices[high].links[low]
            assert 1 <= len(near) == len(far) <= cables
            assert len({link.device for link in near}) == len({link.device for link in far}) == len(near)
            for x, y in zip(near, far):
                one, other = (
                    next(
                        g
                        for d in nodes[rank].devices
                        for g in d.gids
                        if d.name == link.device and g.index == link.gid_index
                    )
                    for rank, link in ((low, x), (high, y))
                )
                assert one.type == other.type and (one.ipv4 is None) == (other.ipv4 is None)
                if nodes[low].identity != nodes[high].identity:
                    assert one.address != other.address and one.type != "memory" and not one.ipv4.is_loopback


@settings(deadline=None)
@given(tables, tables, st.booleans())
def test_a_route_is_as_good_from_both_ends(a, b, one_host):
    there, back = (
        find_route(device("x", *near).gids, device("y", *far).gids, one_host) for near, far in ((a, b), (b, a))
    )
    assert (there is None) == (back is None)
    if there:
        assert (there.near.type, there.nearness) == (back.near.type, back.nearness)
