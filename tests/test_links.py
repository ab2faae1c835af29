"""Which devices join two ranks: by shared memory, by RDMA between hosts, by TCP; and that both sides choose alike."""

import dataclasses
import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.device_map import parse
from mlxdist.runtime.devices.device import GID_TYPES, Device, Gid
from mlxdist.runtime.devices.gids import find_route
from mlxdist.runtime.devices.links import Link, Place, choose
from mlxdist.runtime.devices.queue_pairs import check_queue_pairs


def gid(index: int, address: str, type_: str = "RoCE v2", prefix: int | None = 24) -> Gid:
    """``address``: IPv4 or IPv6."""
    if ":" in address:
        return Gid(index, type_, ipaddress.IPv6Address(address).packed)
    return Gid(index, type_, b"\0" * 10 + b"\xff\xff" + ipaddress.IPv4Address(address).packed, prefix)


def device(name: str, *gids: Gid, state: str = "ACTIVE", provider: str = "ibverbs", error: str = "") -> Device:
    return Device(provider, name, error, state, gids, link_layer="Ethernet")


def soft(*addresses: str) -> list[Device]:
    gids = [Gid(0, "memory", b"\x07" * 16), *(gid(i, a, "TCP") for i, a in enumerate(addresses, 1))]
    return [device(name, *gids, provider="soft") for name in ("soft0", "soft1")]


def place(host: str, *devices: Device, address: str = "", tcp: tuple[str, ...] = (), missing: str = "") -> Place:
    return Place(host.encode(), host, address, (*devices, *soft(*tcp)), missing)


def by(name: str, index: int, provider: str = "ibverbs") -> tuple[Link, ...]:
    return (Link(provider, name, index),)


MEMORY = (Link("soft", "soft0", 0),)


def chosen(places: list[Place], low: int = 0, high: int = 1, **options) -> tuple:
    """The links of two ranks to each other."""
    return choose(places, low, **options).links[high], choose(places, high, **options).links[low]


# One host


def test_ranks_of_one_host_use_shared_memory():
    choice = choose([place("a"), place("a"), place("a")], 1)
    assert choice.links == (MEMORY, (), MEMORY)
    assert (choice.summary, choice.reason) == ("soft", "all ranks are on one host")


def test_memory_is_found_wherever_it_is_in_the_table():
    other = Place(
        b"a", "a", devices=(device("soft0", gid(0, "10.0.0.1", "TCP"), Gid(3, "memory", b"\1" * 16), provider="soft"),)
    )
    assert chosen([other, other]) == (by("soft0", 3, "soft"),) * 2


def test_two_cables_on_one_host_are_two_devices():
    assert choose([place("a")] * 2, 0, cables=2).links[1] == (Link("soft", "soft0", 0), Link("soft", "soft1", 0))


@pytest.mark.parametrize("active, text", [(1, "1 RDMA device left"), (2, "2 RDMA devices left"), (0, "one host")])
def test_devices_that_are_not_used_are_told(active, text):
    devices = [device(f"mlx5_{i}", gid(0, f"10.0.{i}.1"), state="ACTIVE" if i < active else "DOWN") for i in range(2)]
    assert text in choose([place("a", *devices)] * 2, 0).reason


def test_a_group_of_one():
    choice = choose([place("a")], 0)
    assert (choice.links, choice.summary) == (((),), "soft")


# RDMA by subnets


def test_a_common_subnet_joins_two_hosts():
    a = place("a", device("mlx5_0", gid(0, "fe80::1"), gid(3, "10.0.0.1")))
    b = place("b", device("roce7", gid(0, "fe80::2"), gid(1, "10.0.0.2", "RoCE v1"), gid(5, "10.0.0.2")))
    assert chosen([a, b]) == (by("mlx5_0", 3), by("roce7", 5))
    choice = choose([a, b], 0)
    assert (choice.summary, choice.reason) == ("ibverbs", "RDMA to other hosts by mlx5_0")


def test_the_device_in_the_peers_subnet_is_used():
    a = place("a", *(device(f"mlx5_{i}", gid(2, f"10.0.{i}.1")) for i in range(3)))
    b = place("b", device("mlx5_0", gid(4, "10.0.2.9")))
    assert chosen([a, b]) == (by("mlx5_2", 2), by("mlx5_0", 4))


def test_roce_v1_is_used_where_one_side_has_no_other():
    a = place("a", device("x", gid(0, "10.0.0.1", "RoCE v1"), gid(1, "10.0.0.1")))
    b = place("b", device("y", gid(6, "10.0.0.2", "RoCE v1")))
    assert chosen([a, b]) == (by("x", 0), by("y", 6))


def test_a_subnet_comes_before_169_254():
    a = place("a", device("x", gid(0, "169.254.0.1", prefix=16), gid(1, "10.0.0.1")))
    b = place("b", device("y", gid(0, "10.0.0.2"), gid(1, "169.254.0.2", prefix=16)))
    assert chosen([a, b]) == (by("x", 1), by("y", 0))


def test_169_254_is_accepted_where_it_is_clear():
    a = place("a", device("x", gid(1, "169.254.0.1", "unknown", 16)))
    b = place("b", device("y", gid(2, "169.254.7.2", "unknown", 16)))
    assert chosen([a, b]) == (by("x", 1), by("y", 2))


def test_169_254_on_several_devices_does_not_say_which_cable():
    a = place("a", *(device(f"x{i}", gid(1, f"169.254.0.{i}", prefix=16)) for i in (1, 2)), tcp=("10.1.0.1",))
    b = place("b", *(device(f"y{i}", gid(1, f"169.254.1.{i}", prefix=16)) for i in (1, 2)), tcp=("10.1.0.2",))
    choice = choose([a, b], 0)
    assert (
        choice.summary == "soft"
        and "which cable joins which" in choice.reason
        and "MLXDIST_DEVICE_MAP" in choice.reason
    )
    by_map = parse('[[null, ["x1", "x2"]], [["y2", "y1"], null]]')
    assert [link.device for link in choose([a, b], 0, device_map=by_map).links[1]] == ["x1", "x2"]
    assert [link.device for link in choose([a, b], 1, device_map=by_map).links[0]] == ["y2", "y1"]


def test_bridges_for_containers_join_nobody():
    """Every host has 172.17.0.1."""
    a = place("a", device("x", gid(1, "172.17.0.1", prefix=16)), tcp=("172.17.0.1", "10.0.0.1"), address="10.0.0.1")
    b = place("b", device("x", gid(1, "172.17.0.1", prefix=16)), tcp=("172.17.0.1", "10.0.0.2"), address="10.0.0.2")
    assert chosen([a, b]) == (by("soft0", 2, "soft"),) * 2


def test_loopback_joins_nobody():
    a = place("a", device("x", gid(1, "127.0.0.1", prefix=8)), tcp=("127.0.0.1", "10.0.0.1"))
    b = place("b", device("x", gid(1, "127.0.0.2", prefix=8)), tcp=("127.0.0.2", "10.0.0.2"))
    assert chosen([a, b]) == (by("soft0", 2, "soft"),) * 2


def test_two_cables_by_subnets():
    a = place("a", device("x0", gid(1, "10.0.0.1")), device("x1", gid(1, "10.0.1.1")))
    b = place("b", device("y0", gid(1, "10.0.1.2")), device("y1", gid(1, "10.0.0.2")))
    ends = chosen([a, b], cables=2)
    assert [[link.device for link in links] for links in ends] == [["x0", "x1"], ["y1", "y0"]]
    assert [len(links) for links in chosen([a, b], cables=1)] == [1, 1]


def test_an_unknown_prefix_is_that_of_the_other_side():
    a, b = (place(h, device("x", gid(1, f"10.0.0.{i}", prefix=p))) for h, i, p in (("a", 1, None), ("b", 2, 24)))
    assert chosen([a, b]) == (by("x", 1), by("x", 1))


def test_ranks_of_different_hosts_by_rdma_and_of_one_host_by_memory():
    a, b = (place(h, device("x", gid(i, f"10.0.0.{i}"))) for h, i in (("a", 1), ("b", 2)))
    choice = choose([a, a, b, b], 1)
    assert choice.links == (MEMORY, (), by("x", 1), by("x", 1)) and choice.summary == "ibverbs+soft"


# The device map

TRIANGLE = parse('[[null, "a1", "a2"], ["b0", null, "b2"], ["c0", "c1", null]]')


def triangle() -> list[Place]:
    """Three hosts, two cables each; 169.254 everywhere, as macOS makes it."""
    names = {"a": ("a1", "a2"), "b": ("b0", "b2"), "c": ("c0", "c1")}
    return [
        place(host, *(device(n, gid(1, f"169.254.{i}.{j}", prefix=16)) for j, n in enumerate(devices, 1)))
        for i, (host, devices) in enumerate(names.items(), 1)
    ]


def test_the_map_says_which_device_leads_where():
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
    a = place("a", device("x0", gid(1, "10.0.0.1")), device("x1", gid(1, "10.0.1.1")))
    b = place("b", device("y0", gid(1, "10.0.1.2")), device("y1", gid(1, "10.0.0.2")))
    near, far = chosen([a, b], device_map=parse(f"[[null, {there}], [{back}, null]]"))
    assert {(x.device, y.device) for x, y in zip(near, far, strict=True)} == {("x0", "y1"), ("x1", "y0")}


def test_devices_without_a_common_subnet_are_paired_in_the_order_of_the_map():
    a = place("a", device("x0", gid(1, "fe80::1")), device("x1", gid(1, "10.0.1.1")))
    b = place("b", device("y0", gid(1, "10.0.1.2")), device("y1", gid(1, "fe80::2")))
    near, far = chosen([a, b], device_map=parse('[[null, ["x0", "x1"]], [["y0", "y1"], null]]'))
    assert {(x.device, y.device) for x, y in zip(near, far, strict=True)} == {("x1", "y0"), ("x0", "y1")}


def test_more_cables_than_are_used():
    a = place("a", *(device(f"x{i}", gid(1, f"10.0.{i}.1")) for i in range(3)))
    b = place("b", *(device(f"y{i}", gid(1, f"10.0.{i}.2")) for i in range(3)))
    device_map = parse('[[null, ["x0", "x1", "x2"]], [["y2", "y1", "y0"], null]]')
    assert [[link.device for link in links] for links in chosen([a, b], device_map=device_map)] == [
        ["x0", "x1"],
        ["y0", "y1"],
    ]


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
    places = triangle()
    places[0] = place("a", *devices, tcp=("10.9.0.1",))
    places[2] = Place(b"c", "c", devices=(*places[2].devices[:2], *soft("10.9.0.3")))
    choice = choose(places[::2], 0, device_map=parse('[[null, "a2"], ["c0", null]]'))
    assert choice.summary == "soft" and text in choice.reason and choice.reason.startswith("TCP to c: ")
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on c cannot be joined by ibverbs: .*"):
        choose(places[::2], 0, "ibverbs", parse('[[null, "a2"], ["c0", null]]'))


# TCP


def test_hosts_without_rdma_use_tcp_and_say_why():
    a = place("a", tcp=("10.0.0.1",), missing="libibverbs.so.1 is not installed")
    b = place("b", device("rdma_en2", state="DOWN", provider="librdma"), tcp=("10.0.0.2",))
    choice = choose([a, b], 0)
    assert choice.links[1] == by("soft0", 1, "soft") and choice.summary == "soft"
    assert choice.reason == "TCP to b: host a: libibverbs.so.1 is not installed"
    assert "host b: rdma_en2 is DOWN; plug in the cable" in choose([b, b, place("c", tcp=("10.0.0.3",))], 0).reason


def test_different_subnets_of_rdma_are_told():
    a = place("a", device("x", gid(1, "10.0.0.1")), tcp=("10.9.0.1",))
    b = place("b", device("y", gid(1, "10.0.1.1")), tcp=("10.9.0.2",))
    reason = choose([a, b], 0).reason
    assert "x: 10.0.0.1/24" in reason and "y: 10.0.1.1/24" in reason and "one subnet" in reason


def test_a_device_without_ipv4_is_told():
    a = place("a", device("x", gid(0, "fe80::1")), tcp=("10.9.0.1",))
    b = place("b", device("y", gid(1, "10.0.1.1")), tcp=("10.9.0.2",))
    assert "host a: x has no IPv4 address" in choose([a, b], 1).reason


def test_tcp_takes_the_network_by_which_the_rendezvous_works():
    a = place("a", tcp=("192.168.0.1", "10.0.0.1"), address="10.0.0.1")
    b = place("b", tcp=("10.0.0.2", "192.168.0.2"), address="::ffff:10.0.0.2")
    assert chosen([a, b]) == (by("soft0", 2, "soft"), by("soft0", 1, "soft"))


def test_tcp_through_a_router():
    a = place("a", tcp=("172.17.0.1", "10.0.0.1"), address="10.0.0.1")
    b = place("b", tcp=("10.0.7.2", "172.17.0.1"), address="10.0.7.2")
    assert chosen([a, b]) == (by("soft0", 2, "soft"), by("soft0", 1, "soft"))


def test_hosts_that_no_network_joins():
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on b cannot be joined by TCP.*10.0.0.1/24"):
        choose([place("a", tcp=("10.0.0.1",)), place("b", tcp=("10.0.1.1",))], 0)


def test_tcp_within_a_host():
    a = place("a", tcp=("10.0.0.1", "127.0.0.1"))
    assert chosen([a, a], soft_transport="tcp") == (by("soft0", 2, "soft"),) * 2


def test_tcp_between_network_namespaces_of_one_host():
    a, b = (place("a", tcp=("127.0.0.1", f"10.0.0.{i}")) for i in (1, 2))
    assert chosen([a, b], soft_transport="tcp") == (by("soft0", 2, "soft"),) * 2
    assert chosen([a, b]) == (MEMORY, MEMORY)


def test_two_cables_by_tcp():
    a, b = (place(h, tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    assert choose([a, b], 0, cables=2).links[1] == (Link("soft", "soft0", 1), Link("soft", "soft1", 1))


def test_memory_alone_refuses_other_hosts():
    a, b = (place(h, tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on b are on different hosts, and MLXDIST_SOFT"):
        choose([a, b], 1, soft_transport="shm")


def test_software_devices_that_reach_one_peer_each():
    """Where it plays Thunderbolt, no device of a rank serves two peers."""
    here = Place.here(b"a", "a", provider="soft", soft_profile="apple-tb5")
    for cables in (1, 2):
        choices = [choose([here] * 5, rank, cables=cables) for rank in range(5)]
        for rank, choice in enumerate(choices):
            used = [link.device for links in choice.links for link in links]
            assert len(set(used)) == len(used) == 4 * cables and choice.links[rank] == ()
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 8 on a .* enough for 8 ranks; start at most 8"):
        choose([here] * 9, 0, cables=2)


# A provider that was asked for


def test_soft_leaves_rdma_and_the_map_alone():
    a, b = (place(h, device("x", gid(1, f"10.0.0.{i}")), tcp=(f"10.0.0.{i}",)) for h, i in (("a", 1), ("b", 2)))
    choice = choose([a, b], 0, "soft", parse('[[null, "x"], ["x", null]]'))
    assert choice.links[1] == by("soft0", 1, "soft") and choice.reason == "MLXDIST_PROVIDER=soft"


def test_rdma_within_a_host_needs_two_devices_or_a_map():
    one = place("a", device("rxe0", gid(1, "10.0.0.1")))
    with pytest.raises(InvalidArgument, match="rank 0 on a and rank 1 on a cannot be joined by ibverbs"):
        choose([one, one], 0, "ibverbs")
    assert chosen([one, one], provider="ibverbs", device_map=parse('[[null, "rxe0"], ["rxe0", null]]')) == (
        by("rxe0", 1),
        by("rxe0", 1),
    )
    two = place("a", device("rxe0", gid(1, "10.0.0.1")), device("rxe1", gid(2, "10.0.0.2")))
    assert chosen([two, two], provider="ibverbs") == (by("rxe0", 1), by("rxe1", 2))


def test_ranks_without_a_cable_have_no_link_when_rdma_was_asked_for():
    places = triangle()
    line = parse('[[null, "a1", null], ["b0", null, "b2"], [null, "c1", null]]')
    assert choose(places, 0, "ibverbs", line).links == ((), by("a1", 1), ())
    assert (0, 2) not in line.wires and (2, 1) in line.wires


def test_another_library_than_the_hosts_have():
    a, b = (place(h, device("x", gid(1, f"10.0.0.{i}"))) for h, i in (("a", 1), ("b", 2)))
    with pytest.raises(InvalidArgument, match="joined by librdma: host a: it has no RDMA device"):
        choose([a, b], 0, "librdma")


# Whatever the machines are like

addresses = st.sampled_from(
    ["10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2", "169.254.0.1", "169.254.3.4", "172.17.0.1", "127.0.0.1"]
    + ["fe80::1", "fe80::2", "2001:db8::1", "2001:db8::2"]
)
tables = st.lists(
    st.tuples(addresses, st.sampled_from(GID_TYPES), st.sampled_from([None, 8, 16, 24, 30])),
    max_size=5,
    unique_by=lambda line: line[:2],
).map(lambda lines: tuple(gid(i * 3, *line) for i, line in enumerate(lines)))


@st.composite
def worlds(draw) -> list[Place]:
    hosts = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        count = draw(st.integers(0, 3))
        states = st.sampled_from(["ACTIVE", "ACTIVE", "DOWN", "INIT"])
        devices = [device(f"{name}{i}", *draw(tables), state=draw(states)) for i in range(count)]
        number = ord(name) - ord("a") + 1
        hosts.append(
            place(name, *draw(st.permutations(devices)), address=f"10.7.0.{number}", tcp=(f"10.7.0.{number}",))
        )
    return draw(st.lists(st.sampled_from(hosts), min_size=2, max_size=5))


@settings(deadline=None)
@given(worlds(), st.integers(1, 2), st.sampled_from(["auto", "shm", "tcp"]))
def test_both_sides_choose_the_two_ends_of_the_same_cables(places, cables, soft_transport):
    """Complete, symmetric and the same every time, in auto mode."""
    try:
        choices = [choose(places, rank, cables=cables, soft_transport=soft_transport) for rank in range(len(places))]
    except InvalidArgument:
        assert soft_transport == "shm"
        return
    assert choices == [
        choose(places, rank, cables=cables, soft_transport=soft_transport) for rank in range(len(places))
    ]
    for low in range(len(places)):
        assert choices[low].links[low] == () and choices[low].reason
        for high in range(low + 1, len(places)):
            near, far = choices[low].links[high], choices[high].links[low]
            assert 1 <= len(near) == len(far) <= cables
            assert len({link.device for link in near}) == len({link.device for link in far}) == len(near)
            for x, y in zip(near, far):
                one, other = (
                    next(
                        g
                        for d in places[rank].devices
                        for g in d.gids
                        if d.name == link.device and g.index == link.gid_index
                    )
                    for rank, link in ((low, x), (high, y))
                )
                assert one.type == other.type and (one.ipv4 is None) == (other.ipv4 is None)
                if places[low].identity != places[high].identity:
                    assert one.address != other.address and one.type != "memory" and not one.ipv4.is_loopback


@settings(deadline=None)
@given(tables, tables, st.booleans())
def test_a_route_is_as_good_from_both_ends(a, b, one_host):
    there, back = (find_route(device("x", *near), device("y", *far), one_host) for near, far in ((a, b), (b, a)))
    assert (there is None) == (back is None)
    if there:
        assert (there.near.type, there.nearness) == (back.near.type, back.nearness)


# Places travel as bytes


@settings(deadline=None)
@given(worlds())
def test_places_arrive_as_they_were_sent(places):
    for sent in places:
        arrived = Place.unpack(sent.pack())
        assert (arrived.identity, arrived.host, arrived.address) == (sent.identity, sent.host, sent.address)
        assert [d.name for d in arrived.devices] == [d.name for d in sent.devices]
    ranks = range(len(places))
    arrived = [Place.unpack(sent.pack()) for sent in places]
    assert [choose(arrived, rank).links for rank in ranks] == [choose(places, rank).links for rank in ranks]


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_other_bytes_are_refused(data):
    with pytest.raises(InvalidArgument, match="what a rank said of its devices is malformed"):
        Place.unpack(data)


VALID = place("a", device("x", gid(1, "10.0.0.1"), gid(2, "fe80::1"))).pack()


@settings(deadline=None)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=3))
def test_altered_bytes_are_refused_or_are_a_place(position, replacement):
    try:
        found = Place.unpack(VALID[:position] + replacement + VALID[position + 1 :])
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
        Place.unpack(altered)


def test_a_place_is_bounded():
    with pytest.raises(InvalidArgument, match="at most 65536 are allowed"):
        Place.unpack(VALID + b" " * 65536)
    with pytest.raises(InvalidArgument, match="not JSON"):
        Place.unpack(b"[" * 60000)
    many = [device(f"x{i}", *(gid(j, f"10.0.{i}.{j}") for j in range(250))) for i in range(8)]
    with pytest.raises(ResourceError, match="too many addresses"):
        place("a", *many).pack()


def test_addresses_that_no_one_can_use_do_not_travel():
    """Of ports that are down, and behind line 255, which an address handle cannot name."""
    sent = place(
        "a", device("x", gid(1, "10.0.0.1"), state="DOWN"), device("y", gid(256, "10.0.0.1"), gid(7, "fe80::1"))
    )
    x, y = Place.unpack(sent.pack()).of_provider("ibverbs")
    assert x.gids == () and [g.index for g in y.gids] == [7]


def test_the_place_of_this_process():
    here = Place.here(b"identity", "host", "10.0.0.1", "soft")
    assert {d.provider for d in here.devices} == {"soft"} and Place.unpack(here.pack()).devices
    assert choose([here, here], 0).links[1] == MEMORY


# Queue pairs


def test_places_are_unpacked_with_the_queue_pairs_of_their_devices():
    found = Place.unpack(place("a", dataclasses.replace(device("x"), limits={"max_qp": 11, "max_mr": 100})).pack())
    assert found.devices[0].limits == {"max_qp": 11}
    with pytest.raises(InvalidArgument, match="device x has -1 queue pairs"):
        Place.unpack(found.pack().replace(b'"max_qp":11', b'"max_qp":-1'))


def macs(hosts: str, ranks: int, max_qp: int = 11, provider: str = "librdma") -> list[Place]:
    """``ranks`` on each, in order of the hosts, which one cable joins: b0 at a, a0 at b."""
    ends = {"a": "10.0.0.1", "b": "10.0.0.2"}
    limits = {"max_qp": max_qp} if max_qp else {}
    devices = {
        h: dataclasses.replace(device(f"{h}0", gid(1, ends[h]), provider=provider), limits=limits) for h in hosts
    }
    return [place(host, devices[host], tcp=(ends[host],)) for host in hosts for _ in range(ranks)]


def check(places: list[Place], wires=None, **options) -> None:
    """On every rank."""
    check_queue_pairs(places, wires, lambda rank: choose(places, rank, **options))


@pytest.mark.parametrize("max_qp", [11, 10, 0])
def test_three_ranks_a_mac_need_more_queue_pairs_than_a_device_has(max_qp):
    words = (
        r"host a: a0 has 10 queue pairs, and 9 pairs of ranks over it would need 18: 2 each; it joins ranks 0, 1 and 2 "
    )
    words += r"to ranks 3, 4 and 5; start at most 2 ranks on each host \(2 \* 2 \* 2 = 8\), add cables, or .*=soft"
    with pytest.raises(InvalidArgument, match=words):
        check(macs("ab", 3, max_qp))
    check(macs("ab", 2, max_qp))
    check(macs("ab", 1, max_qp))


def test_a_device_that_says_less():
    with pytest.raises(
        InvalidArgument, match="a0 has 3 queue pairs, and 4 pairs .* need 8.* at most 1 rank on each host"
    ):
        check(macs("ab", 2, 3))
    check(macs("ab", 1, 3))


def test_ranks_that_are_not_joined_need_none():
    ring = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)}
    check(macs("ab", 3), wires=ring | {(b, a) for a, b in ring})
    check(macs("ab", 3), provider="soft")


def test_cards_have_plenty():
    check(macs("ab", 3, 1 << 17, "ibverbs"))
    check(macs("ab", 3, 0, "ibverbs"))
    with pytest.raises(InvalidArgument, match="a0 has 16 queue pairs"):
        check(macs("ab", 3, 16, "ibverbs"))
