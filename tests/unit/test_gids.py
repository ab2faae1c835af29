"""Addresses by their form: tables of devices as they were reported, and the pair that is chosen from two of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_infos import device, gid, node

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import parse
from mlxdist.runtime.devices.device import Form, Gid
from mlxdist.runtime.devices.gids import find_route
from mlxdist.runtime.devices.links import choose

UUIDS = {1: "a5f1:93c2:5b7e:4d10:8f2e:61d0:94bb:7c01", 2: "3c1e:7702:91ab:4f6d:a0d4:18e2:55c3:9f02"}


def mac_26(host: int) -> list[Gid]:
    addresses = [f"fe80::a8bb:ccff:fe00:{host}", f"10.0.1.{host}", f"fe80::1c2d:3e4f:5a6b:{host}"]
    return [gid(i, address, "unknown") for i, address in enumerate(addresses)]


def mac_26_without_ipv4(host: int) -> list[Gid]:
    return [gid(0, f"fe80::a8bb:ccff:fe00:{host}", "unknown")]


def mac_27(host: int) -> list[Gid]:
    return [gid(0, UUIDS[host], "unknown"), gid(1, f"fe80::a8bb:ccff:fe00:{host}", "unknown")]


def mac_27_with_ipv4(host: int) -> list[Gid]:
    return [*mac_27(host), gid(2, f"10.0.1.{host}", "unknown")]


def third_party_on_a_mac(host: int) -> list[Gid]:
    """rdma_mcrdmaN: RoCE v2, and no IP."""
    return [gid(0, f"fe80::a8bb:ccff:fe00:{host}", "RoCE v2")]


def roce(host: int) -> list[Gid]:
    lines = [f"fe80::a8bb:ccff:fe00:{host}", f"2001:db8::{host}", f"10.0.0.{host}"]
    return [gid(2 * i + v2, line, f"RoCE v{1 + v2}") for i, line in enumerate(lines) for v2 in (0, 1)]


def roce_without_ipv4(host: int) -> list[Gid]:
    return roce(host)[:4]


def roce_with_random_link_local(host: int) -> list[Gid]:
    return [gid(i, f"fe80::1c2d:3e4f:5a6b:{host}", f"RoCE v{1 + i}") for i in (0, 1)]


def infiniband(host: int) -> list[Gid]:
    return [gid(0, f"fe80::b859:9f03:c1:{host}", "IB")]


def infiniband_of_two_subnets(host: int) -> list[Gid]:
    prefix = "fe80::" if host == 1 else "fec0:0:0:f00d:"
    return [gid(0, f"{prefix}b859:9f03:c1:{host}", "IB")]


@pytest.mark.parametrize(
    ("table", "index"),
    [
        (mac_26, 1),
        (mac_26_without_ipv4, 0),
        (mac_27, 1),
        (mac_27_with_ipv4, 2),
        (third_party_on_a_mac, 0),
        (roce, 5),
        (roce_without_ipv4, 3),
        (roce_with_random_link_local, 1),
        (infiniband, 0),
        (infiniband_of_two_subnets, 0),
    ],
)
def test_the_address_that_is_chosen(table, index):
    route = find_route(table(1), table(2))
    assert route and (route.near.index, route.far.index) == (index, index)


@pytest.mark.parametrize(
    ("address", "type_", "form"),
    [
        ("10.0.0.1", "RoCE v2", Form.IPV4),
        ("0.0.0.0", "RoCE v2", Form.NONE),
        ("::", "RoCE v1", Form.NONE),
        ("::", "IB", Form.NONE),
        ("fe80::a8bb:ccff:fe00:1", "unknown", Form.LINK_LOCAL),
        ("fe80::1c2d:3e4f:5a6b:1", "RoCE v1", Form.LINK_LOCAL),
        ("fe80:0:0:1::1", "RoCE v2", Form.NONE),
        ("2001:db8::1", "RoCE v2", Form.GLOBAL),
        ("fd00::1", "RoCE v2", Form.GLOBAL),
        ("fec0::1", "RoCE v2", Form.NONE),
        ("ff02::1", "RoCE v2", Form.NONE),
        (UUIDS[1], "RoCE v2", Form.NONE),
        (UUIDS[2], "unknown", Form.NONE),
        ("fec0:0:0:f00d::1", "IB", Form.GUID),
        (UUIDS[2], "memory", Form.SEGMENT),
    ],
)
def test_forms(address, type_, form):
    assert gid(0, address, type_).form is form


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_no_uuid_of_a_thunderbolt_domain_is_chosen(near, far):
    """One in eight begins like an address of 2000::/3."""
    domains = [Gid(0, "unknown", bytes([0x20 | near[0] & 0x1F]) + near[1:]), Gid(0, "unknown", b"\xb5" + far[1:])]
    tables = [[domain, mac_27(host)[1]] for host, domain in enumerate(domains, 1)]
    route = find_route(*tables)
    assert route and (route.near.index, route.far.index) == (1, 1)
    assert find_route(tables[0][:1], tables[1][:1]) is None


def test_without_an_address_the_error_lists_the_tables():
    a, b = (node(host, device(f"rdma_en{i}", mac_27(i)[0])) for i, host in enumerate("ab", 1))
    with pytest.raises(InvalidArgument) as caught:
        choose([a, b], 0, "ibverbs", parse('[[null, "rdma_en1"], ["rdma_en2", null]]'))
    for number, host in enumerate("ab", 1):
        table = f"rdma_en{number}: {UUIDS[number]} (unknown, no address)"
        assert f"rdma_en{number} of {host} ({table})" in str(caught.value)
